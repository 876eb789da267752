"""A work list on Hopper (stages T3 and T5): warps that gather keys and values beside warps that multiply.

What `tile_kernel.tilewright_tile_attention` does, in Gluon, for 16 bits and tiles of 64 or 128 rows without a bias.
Four warps fill stages of shared memory by asynchronous copies of 16 bytes; for every 64 rows, four warps attend to
them. Barriers in memory tell who may read or fill a stage; none waits for all warps. The factors of a step's mask lie
in its stage, and their product is what its scores begin with.

Names are those of the literature, see `online_softmax`: s are scores, w their weights in 16 bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier

from tilewright.attention.cuda.tile_kernel import (
    BOUNDS,
    FEW_ROWS,
    FLAGS,
    FLOOR,
    FLOOR_HALF,
    ITEM_FIRST_ROW,
    ITEM_FIRST_STEP,
    ITEM_FULL_STEPS,
    ITEM_LEFT_FACTOR,
    ITEM_MASK_STEP,
    ITEM_PART,
    ITEM_ROWS,
    ITEM_SIZE,
    ITEM_STEPS,
    MERGED,
    PART_COUNT,
    PART_GROUP,
    PART_NUMBER,
    PART_SCRATCH_ROW,
    PART_SIZE,
    room,
)
from tilewright.devices.cuda.warps import GATHERING, next_stage, softmax, weighted

# Rows that four warps attend for.
ROWS = gl.constexpr(64)
# Rows of a split block that are merged at a time.
MERGED_ROWS = gl.constexpr(32)
# What the kernel is compiled for, in its order, but for WIDE.
CONSTANTS = (
    *("BLOCK_M", "BLOCK_N", "HEAD_DIM", "RANK", "HEADS", "FULL", "PARTIAL", "SPLIT", "ORDERED", "NUM_STAGES"),
    "MAXNREG",
)


@gluon.jit(do_not_specialize=["n_items", "n_hb"])
def tilewright_tile_attention_by_warps(
    q_ptr, k_ptr, v_ptr, o_ptr,
    item_ptr, row_ptr, key_ptr, left_ptr, right_ptr, part_ptr, acc_ptr, stat_ptr, count_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on,
    n_items, n_hb, scale_log2,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, RANK: gl.constexpr, HEADS: gl.constexpr,
    FULL: gl.constexpr, PARTIAL: gl.constexpr, SPLIT: gl.constexpr, ORDERED: gl.constexpr, NUM_STAGES: gl.constexpr,
    MAXNREG: gl.constexpr, WIDE: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """Arguments and grid are those of `tile_kernel.tilewright_tile_attention`, for a scale above zero.

    q_ptr, k_ptr, v_ptr: aligned to 16 bytes, as their strides are. HEAD_DIM: a power of two. MAXNREG: registers of a
    thread, on average, a multiple of 8.
    """
    lane, item = gl.program_id(0), gl.program_id(1) + gl.program_id(2) * gl.num_programs(1)
    # All warps come to the end alike: a program beyond the items has no steps and no rows.
    is_there = item < n_items
    p_item = item_ptr + gl.minimum(item, n_items - 1) * (ITEM_SIZE + (1 if ACROSS else 0))
    hb = lane
    if ACROSS:
        hb = gl.load(p_item + ITEM_SIZE) + lane * ACROSS
    b, h = (hb // HEADS).to(gl.int64), (hb % HEADS).to(gl.int64)
    if WIDE:
        stride_qn, stride_kn = gl.cast(stride_qn, gl.int64), gl.cast(stride_kn, gl.int64)
        stride_vn, stride_on = gl.cast(stride_vn, gl.int64), gl.cast(stride_on, gl.int64)
    first_row, last_row = gl.load(p_item + ITEM_FIRST_ROW), gl.load(p_item + ITEM_ROWS) - 1
    n_rows = gl.where(is_there, last_row + 1, 0)
    n_steps = gl.where(is_there, gl.load(p_item + ITEM_STEPS), 0)
    n_full = gl.minimum(gl.load(p_item + ITEM_FULL_STEPS), n_steps)
    key_ptr += gl.load(p_item + ITEM_FIRST_STEP).to(gl.int64) * BLOCK_N
    part = -1
    if SPLIT:
        part = gl.where(is_there, gl.load(p_item + ITEM_PART), -1)
    if PARTIAL:
        mask_step = gl.load(p_item + ITEM_MASK_STEP).to(gl.int64)
        if RANK == BOUNDS:
            right_ptr += mask_step * (2 * BLOCK_M)
        elif RANK == FLAGS:
            right_ptr += mask_step * (BLOCK_M * BLOCK_N)
        else:
            left_ptr += gl.load(p_item + ITEM_LEFT_FACTOR).to(gl.int64) * (BLOCK_M * RANK)
            right_ptr += mask_step * (RANK * BLOCK_N)
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    o_ptr += b * stride_ob + h * stride_oh

    dtype: gl.constexpr = q_ptr.dtype.element_ty
    PIECES: gl.constexpr = BLOCK_M // ROWS
    # Where masks have no factors, what holds them is small and not used.
    DEPTH: gl.constexpr = RANK if PARTIAL and RANK > FLAGS else 0
    HELD: gl.constexpr = DEPTH if DEPTH else 16
    kv_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    q_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    right_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HELD], dtype)
    left_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HELD], dtype)
    k_mem = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, HEAD_DIM], kv_at)
    v_mem = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, HEAD_DIM], kv_at)
    q_mem = gl.allocate_shared_memory(dtype, [PIECES, ROWS, HEAD_DIM], q_at)
    right_mem = gl.allocate_shared_memory(dtype, [NUM_STAGES if DEPTH else 1, BLOCK_N, HELD], right_at)
    left_mem = gl.allocate_shared_memory(dtype, [PIECES, ROWS, HELD], left_at)
    bar_at: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], bar_at)
    k_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_at)
    v_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_at)
    k_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_at)
    v_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_at)
    mbarrier.init(q_full.index(0), count=GATHERING * 32)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(k_full.index(i), count=GATHERING * 32)
        mbarrier.init(v_full.index(i), count=GATHERING * 32)
        mbarrier.init(k_free.index(i), count=PIECES)
        mbarrier.init(v_free.index(i), count=PIECES)
    memory = q_mem, left_mem, k_mem, right_mem, v_mem, q_full, k_full, v_full, k_free, v_free
    rows = row_ptr, first_row, last_row, n_rows
    steps = n_full, n_steps, right_ptr
    tokens = q_ptr, k_ptr, v_ptr, stride_qn, stride_kn, stride_vn, key_ptr, left_ptr
    results = o_ptr, stride_on, lane, n_hb, part, part_ptr, acc_ptr, stat_ptr, count_ptr, scale_log2
    # Of a thread that gathers, and of one that multiplies. The first four warps take what is left.
    FEW: gl.constexpr = 56 if BLOCK_N > 64 else 40 if MAXNREG >= 128 else 32
    MANY: gl.constexpr = (MAXNREG * (PIECES + 1) - FEW) // PIECES // 8 * 8
    # Queries stay in registers where there are enough: those that spill nothing with all kinds of masks.
    HOLD: gl.constexpr = MANY >= 216 and HEAD_DIM * BLOCK_N <= 64 * 128
    kind: gl.constexpr = (RANK, DEPTH, FULL, PARTIAL, SPLIT, ORDERED, HOLD)
    if PIECES == 1:
        gl.warp_specialize(
            [
                (_multiply, (0, PIECES, rows, steps, results, memory, kind)),
                (_gather, (PIECES, rows, steps, tokens, memory, kind)),
            ],
            [GATHERING],
            [FEW],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, PIECES, rows, steps, results, memory, kind)),
                (_multiply, (1, PIECES, rows, steps, results, memory, kind)),
                (_gather, (PIECES, rows, steps, tokens, memory, kind)),
            ],
            [4, GATHERING],
            [MANY, FEW],
        )


@gluon.jit
def _positions(rows, m, ORDERED: gl.constexpr):
    """Positions of the rows `m` of an item; those beyond its last are that one."""
    row_ptr, first_row, last_row, _ = rows
    found = first_row + gl.minimum(m, last_row)
    if not ORDERED:
        found = gl.load(row_ptr + found)
    return found


@gluon.jit
def _gather(PIECES: gl.constexpr, rows, steps, tokens, memory, kind: gl.constexpr):
    """Fill the stages: the queries, then keys and values of one step after the other, with factors of their masks."""
    q_mem, left_mem, k_mem, right_mem, v_mem, q_full, k_full, v_full, k_free, v_free = memory
    q_ptr, k_ptr, v_ptr, stride_qn, stride_kn, stride_vn, key_ptr, left_ptr = tokens
    n_full, n_steps, right_ptr = steps
    DEPTH: gl.constexpr = kind[1]
    BLOCK_N: gl.constexpr = k_mem.shape[1]
    HEAD_DIM: gl.constexpr = k_mem.shape[2]
    columns: gl.constexpr = HEAD_DIM // 8
    at: gl.constexpr = gl.BlockedLayout([1, 8], [32 // columns, columns], [GATHERING, 1], [1, 0])
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, at))
    m = gl.arange(0, ROWS, gl.SliceLayout(1, at))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, at))[None, :]
    keys = gl.load(key_ptr + n)
    HELD: gl.constexpr = right_mem.shape[2]
    factor_at: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HELD, HELD // 8], [GATHERING, 1], [1, 0])
    r = gl.arange(0, HELD, gl.SliceLayout(0, factor_at))[None, :]
    right_at = gl.arange(0, BLOCK_N, gl.SliceLayout(1, factor_at))[:, None] * HELD + r
    for piece in gl.static_range(PIECES):
        at_rows = _positions(rows, piece * ROWS + m, kind[5])
        async_copy.async_copy_global_to_shared(q_mem.index(piece), q_ptr + at_rows[:, None] * stride_qn + d)
        if DEPTH:
            left_at = (piece * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, factor_at)))[:, None] * HELD + r
            async_copy.async_copy_global_to_shared(left_mem.index(piece), left_ptr + left_at)
    async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)
    stage = 0
    # Waiting for the phase before the first one ends at once.
    phase = 1
    for j in range(0, n_steps):
        # There is one step more than all items have.
        later = gl.load(key_ptr + (j + 1) * BLOCK_N + n)
        mbarrier.wait(k_free.index(stage), phase)
        async_copy.async_copy_global_to_shared(k_mem.index(stage), k_ptr + keys[:, None] * stride_kn + d)
        if DEPTH:  # noqa: SIM102 (the first is known when this is compiled)
            if j >= n_full:
                p_right = right_ptr + (j - n_full).to(gl.int64) * (BLOCK_N * HELD)
                async_copy.async_copy_global_to_shared(right_mem.index(stage), p_right + right_at)
        async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
        mbarrier.wait(v_free.index(stage), phase)
        async_copy.async_copy_global_to_shared(v_mem.index(stage), v_ptr + keys[:, None] * stride_vn + d)
        async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
        keys = later
        stage, phase = next_stage(stage, phase, k_mem.shape[0])
    async_copy.wait_group(0)


@gluon.jit
def _multiply(piece: gl.constexpr, PIECES: gl.constexpr, rows, steps, results, memory, kind: gl.constexpr):
    """Attention of `ROWS` rows of an item."""
    q_mem, left_mem, k_mem, _, v_mem, q_full, _, v_full, _, _ = memory
    o_ptr, stride_on, _, _, part, _, _, _, _, scale_log2 = results
    n_full, n_steps, right_ptr = steps
    RANK: gl.constexpr = kind[0]
    DEPTH: gl.constexpr = kind[1]
    FULL: gl.constexpr = kind[2]
    PARTIAL: gl.constexpr = kind[3]
    SPLIT: gl.constexpr = kind[4]
    BLOCK_N: gl.constexpr = k_mem.shape[1]
    HEAD_DIM: gl.constexpr = k_mem.shape[2]
    dtype: gl.constexpr = k_mem.dtype
    s_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    row_at: gl.constexpr = gl.SliceLayout(1, o_at)
    m = piece * ROWS + gl.arange(0, ROWS, row_at)
    at_rows = _positions(rows, m, kind[5])
    floor: gl.constexpr = FLOOR_HALF if DEPTH and dtype == gl.float16 else FLOOR
    m_i = gl.full([ROWS], 1.0, gl.float32, row_at) * (floor * scale_log2 if PARTIAL else -float("inf"))
    l_i = gl.zeros([ROWS], gl.float32, row_at)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, o_at)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_at)
    # What masks this piece's rows: bounds, of which a step has those of all rows twice, or bytes.
    bounds = right_ptr + piece * (ROWS * BLOCK_N if RANK == FLAGS else ROWS)
    mbarrier.wait(q_full.index(0), 0)
    q = q_mem.index(piece)
    left = left_mem.index(piece)
    if kind[6]:
        q = q.load(gl.DotOperandLayout(0, s_at, 2))
        if DEPTH:
            left = left.load(gl.DotOperandLayout(0, s_at, 2))
    operands = q, left, zeros, bounds, n_full, scale_log2
    if n_steps > 0:
        if FULL and PARTIAL:
            if n_full > 0:
                s = _first_scores(operands, memory, PIECES, 0, 0)
            else:
                s = _first_scores(operands, memory, PIECES, RANK, DEPTH)
        else:
            s = _first_scores(operands, memory, PIECES, RANK if PARTIAL else 0, DEPTH)
        w, m_i, l_i, _alpha = softmax(s, m_i, l_i, scale_log2, dtype)
        stage = 0
        phase = 0
        if FULL:
            stage, phase, w, m_i, l_i, acc = _steps(
                1, n_full, stage, phase, w, m_i, l_i, acc, operands, memory, PIECES, 0, 0
            )
        if PARTIAL:
            stage, phase, w, m_i, l_i, acc = _steps(
                gl.maximum(n_full, 1), n_steps, stage, phase, w, m_i, l_i, acc, operands, memory, PIECES, RANK, DEPTH
            )
        acc = weighted(w, acc, v_mem, v_full, stage, phase)
        acc = warpgroup_mma_wait(0, deps=[acc])
    if SPLIT:
        if part >= 0:
            _leave(PIECES, m, rows, results, m_i, l_i, acc, kind)
        else:
            _store(o_ptr, at_rows, stride_on, acc, l_i, m < rows[3])
    else:
        _store(o_ptr, at_rows, stride_on, acc, l_i, m < rows[3])


@gluon.jit
def _store(o_ptr, at_rows, stride_on, acc, l_i, m_rows):
    """Write the weighted values over their sums; rows without an allowed key give zeros."""
    b_o = (acc * (1.0 / gl.where(l_i > 0, l_i, 1.0))[:, None]).to(o_ptr.dtype.element_ty)
    d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))[None, :]
    gl.store(o_ptr + at_rows[:, None] * stride_on + d, b_o, mask=m_rows[:, None])


@gluon.jit
def _products(operands, memory, stage, phase, DEPTH: gl.constexpr):
    """Start the products of queries with the keys of a stage, once these are there, and those of its factors."""
    q, left, zeros, _, _, _ = operands
    k_mem, right_mem, k_full = memory[2], memory[3], memory[6]
    mbarrier.wait(k_full.index(stage), phase)
    # What copies wrote is seen by the tensor cores after this alone.
    fence_async_shared()
    s = zeros
    if DEPTH:
        s = warpgroup_mma(left, right_mem.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    return warpgroup_mma(q, k_mem.index(stage).permute((1, 0)), s, use_acc=DEPTH > 0, is_async=True)


@gluon.jit
def _bounds(operands, j, PIECES: gl.constexpr, RANK: gl.constexpr):
    """What `_bounded` needs: of intervals ``(middle, half)`` of a step, see `room`, and of bytes those, twice."""
    _, _, zeros, bounds, n_full, _ = operands
    m = gl.arange(0, ROWS, gl.SliceLayout(1, zeros.type.layout))
    middle = m.to(gl.float32)
    half = middle
    if RANK == BOUNDS:
        p_bounds = bounds + (j - n_full).to(gl.int64) * (2 * PIECES * ROWS) + m
        middle, half = gl.load(p_bounds), gl.load(p_bounds + PIECES * ROWS)
    elif RANK == FLAGS:
        BLOCK_N: gl.constexpr = zeros.shape[1]
        n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, zeros.type.layout))
        p_bytes = bounds + (j - n_full).to(gl.int64) * (PIECES * ROWS * BLOCK_N)
        middle = gl.load(p_bytes + m[:, None] * BLOCK_N + n[None, :])
        half = middle
    return middle, half


@gluon.jit
def _bounded(s, middle, half, RANK: gl.constexpr):
    """Scores, far below zero where an interval or a byte does not allow the pair."""
    if RANK == BOUNDS:
        n = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s = gl.minimum(s, room(n, middle, half))
    elif RANK == FLAGS:
        # See `tile_kernel`.
        s += (middle.to(gl.uint32) << 24).to(gl.float32, bitcast=True)
    return s


@gluon.jit
def _first_scores(operands, memory, PIECES: gl.constexpr, RANK: gl.constexpr, DEPTH: gl.constexpr):
    """Scores of the first step."""
    middle, half = _bounds(operands, operands[4] * 0, PIECES, RANK)
    s = _products(operands, memory, 0, 0, DEPTH)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(memory[8].index(0), count=1)
    return _bounded(s, middle, half, RANK)


@gluon.jit
def _steps(
    first, end, stage, phase, w, m_i, l_i, acc, operands, memory,
    PIECES: gl.constexpr, RANK: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Steps with one kind of mask: the weighted values of a step run beside the softmax of the next one."""
    _, _, k_mem, _, v_mem, _, _, v_full, k_free, v_free = memory
    for j in range(first, end):
        k_stage, k_phase = next_stage(stage, phase, k_mem.shape[0])
        middle, half = _bounds(operands, j, PIECES, RANK)
        s = _products(operands, memory, k_stage, k_phase, DEPTH)
        acc = weighted(w, acc, v_mem, v_full, stage, phase)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_free.index(k_stage), count=1)
        s = _bounded(s, middle, half, RANK)
        w, m_i, l_i, alpha = softmax(s, m_i, l_i, operands[5], k_mem.dtype)
        acc, w = warpgroup_mma_wait(0, deps=[acc, w])
        mbarrier.arrive(v_free.index(stage), count=1)
        acc = acc * alpha[:, None]
        stage = k_stage
        phase = k_phase
    return stage, phase, w, m_i, l_i, acc


@gluon.jit
def _leave(PIECES: gl.constexpr, m, rows, results, m_i, l_i, acc, kind: gl.constexpr):
    """Leave the sums of a part's rows in scratch memory; whoever does so last merges those of all parts."""
    o_ptr, stride_on, hb, n_hb, part, part_ptr, acc_ptr, stat_ptr, count_ptr, _ = results
    n_rows = rows[3]
    HEAD_DIM: gl.constexpr = acc.shape[1]
    p_part = part_ptr + part * PART_SIZE
    n_parts = gl.load(p_part + PART_COUNT)
    # Scratch rows of all heads may hold more than 2**31 values. From a part to the next there are `part_rows`.
    part_rows = n_hb.to(gl.int64) * n_rows
    first = gl.load(p_part + PART_SCRATCH_ROW).to(gl.int64) * n_hb + hb * n_rows
    at = first + gl.load(p_part + PART_NUMBER) * part_rows + m
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, acc.type.layout))[None, :]
    gl.store(acc_ptr + at[:, None] * HEAD_DIM + d, acc, mask=(m < n_rows)[:, None])
    gl.store(stat_ptr + at * 2, m_i, mask=m < n_rows)
    gl.store(stat_ptr + at * 2 + 1, l_i, mask=m < n_rows)
    debug_barrier()
    count_ptr += gl.load(p_part + PART_GROUP).to(gl.int64) * n_hb + hb
    done = gl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    if done == n_parts * PIECES - 1:
        # For the next call.
        gl.store(count_ptr, 0)
        acc_ptr += first * HEAD_DIM
        stat_ptr += first * 2
        if n_rows > FEW_ROWS:
            for start in range(0, n_rows, MERGED_ROWS):
                _merge_rows(acc_ptr, stat_ptr, o_ptr, rows, start, stride_on, n_parts, part_rows, HEAD_DIM, kind[5])
        else:
            for row in range(n_rows):
                _merge_row(acc_ptr, stat_ptr, o_ptr, rows, row, stride_on, n_parts, part_rows, HEAD_DIM, kind[5])


@gluon.jit
def _merge_rows(
    acc_ptr, stat_ptr, o_ptr, rows, start, stride_on, n_parts, part_rows, HEAD_DIM: gl.constexpr, ORDERED: gl.constexpr
):
    """Merge `MERGED_ROWS` rows, one part at a time. A part without an allowed key has sums of zero."""
    at: gl.constexpr = gl.BlockedLayout([1, 4], [128 // HEAD_DIM, HEAD_DIM // 4], [4, 1], [1, 0])
    row_at: gl.constexpr = gl.SliceLayout(1, at)
    m = start + gl.arange(0, MERGED_ROWS, row_at)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, at))[None, :]
    m_rows = m < rows[3]
    m_i = gl.full([MERGED_ROWS], -float("inf"), gl.float32, row_at)
    l_i = gl.zeros([MERGED_ROWS], gl.float32, row_at)
    acc = gl.zeros([MERGED_ROWS, HEAD_DIM], gl.float32, at)
    for i in range(n_parts):
        place = i * part_rows + m
        m_part = gl.load(stat_ptr + place * 2, mask=m_rows, other=0.0, cache_modifier=".cg")
        l_part = gl.load(stat_ptr + place * 2 + 1, mask=m_rows, other=0.0, cache_modifier=".cg")
        p_acc = acc_ptr + place[:, None] * HEAD_DIM + d
        b_acc = gl.load(p_acc, mask=m_rows[:, None], other=0.0, cache_modifier=".cg")
        m_new = gl.maximum(m_i, m_part)
        alpha, beta = gl.exp2(m_i - m_new), gl.exp2(m_part - m_new)
        l_i = l_i * alpha + l_part * beta
        acc = acc * alpha[:, None] + b_acc * beta[:, None]
        m_i = m_new
    b_o = acc * (1.0 / gl.where(l_i > 0, l_i, 1.0))[:, None]
    at_rows = _positions(rows, m, ORDERED)
    p_o = o_ptr + at_rows[:, None] * stride_on + d
    gl.store(p_o, b_o.to(o_ptr.dtype.element_ty), mask=m_rows[:, None])


@gluon.jit
def _merge_row(
    acc_ptr, stat_ptr, o_ptr, rows, row, stride_on, n_parts, part_rows, HEAD_DIM: gl.constexpr, ORDERED: gl.constexpr
):
    """Merge the parts of one row, `MERGED` at a time. A part without an allowed key has sums of zero."""
    # Each warp has all parts, so that sums over them need no other warp.
    at: gl.constexpr = gl.BlockedLayout([1, 4], [128 // HEAD_DIM, HEAD_DIM // 4], [4, 1], [1, 0])
    part_at: gl.constexpr = gl.SliceLayout(1, at)
    parts = gl.arange(0, MERGED, part_at)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, at))
    m_i = -float("inf")
    l_i = 0.0
    acc = gl.zeros([HEAD_DIM], gl.float32, gl.SliceLayout(0, at))
    for i in range(0, n_parts, MERGED):
        place = (i + parts) * part_rows + row
        m_parts = i + parts < n_parts
        m_part = gl.load(stat_ptr + place * 2, mask=m_parts, other=-float("inf"), cache_modifier=".cg")
        l_part = gl.load(stat_ptr + place * 2 + 1, mask=m_parts, other=0.0, cache_modifier=".cg")
        p_acc = acc_ptr + place[:, None] * HEAD_DIM + d[None, :]
        b_acc = gl.load(p_acc, mask=m_parts[:, None], other=0.0, cache_modifier=".cg")
        m_new = gl.maximum(m_i, gl.max(m_part, 0))
        alpha, beta = gl.exp2(m_i - m_new), gl.exp2(m_part - m_new)
        l_i = l_i * alpha + gl.sum(l_part * beta, 0)
        acc = acc * alpha + gl.sum(b_acc * beta[:, None], 0)
        m_i = m_new
    b_o = acc * (1.0 / gl.where(l_i > 0, l_i, 1.0))
    row_ptr, first_row, _, _ = rows
    at_row = first_row + row
    if not ORDERED:
        at_row = gl.load(row_ptr + at_row)
    gl.store(o_ptr + at_row * stride_on + d, b_o.to(o_ptr.dtype.element_ty))
