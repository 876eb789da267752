"""Slices on Hopper (stage T5): attention by warps that gather keys and values beside warps that multiply.

What `slice_kernels.tilewright_slice_attention` does, in Gluon, for 16 bits and groups of 128 queries. Four warps fill
stages of shared memory by asynchronous copies of 16 bytes; two times four warps attend to them with 64 queries each,
and take turns by themselves: the softmax of one half runs beside the products of the other. Memory barriers tell who
may read or fill a stage, no program-wide barrier does. A program takes one group after another.

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

from tilewright.slices import layout

OVERFLOW = gl.constexpr(layout.OVERFLOW)
LN2 = gl.constexpr(0.6931471805599453)
# Warps that gather, and halves of the queries, each of which four warps attend with.
GATHERING = gl.constexpr(4)
HALVES = gl.constexpr(2)
# Warps that a launch states: those of the first half. The compiler adds the others.
NUM_WARPS = 4


@gluon.jit(do_not_specialize=["n_queries", "groups", "n_items"])
def tilewright_slice_attention_by_warps(
    o_ptr, key_ptr, count_ptr, order_ptr, state_ptr, q_ptr, k_ptr, v_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, n_queries, groups, capacity, scale_log2, n_items,
    HEADS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, RUN: gl.constexpr, HEAD_DIM: gl.constexpr,
    NUM_STAGES: gl.constexpr, AHEAD: gl.constexpr, LOOSE: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Attention of each group to its listed keys. Grid: any number of programs, which share n_items groups out.

    n_items: batch * heads * groups, the groups of a head side by side. Tensors as in `tilewright_slice_attention`,
    aligned to 16 bytes. AHEAD: 1: products of a step run beside the softmax of the step before it, else weighted values
    of a step beside the softmax of the next one; 2: with the two halves in turns. LOOSE: each
    thread says by itself that it has read a stage, else one does so for its half once all have.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    HALF: gl.constexpr = BLOCK_M // HALVES
    EACH: gl.constexpr = 128 if LOOSE else 1
    if WIDE:
        stride_qn, stride_kn = gl.cast(stride_qn, gl.int64), gl.cast(stride_kn, gl.int64)
        stride_vn, stride_on = gl.cast(stride_vn, gl.int64), gl.cast(stride_on, gl.int64)
    kv_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    q_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HEAD_DIM], dtype)
    k_mem = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, HEAD_DIM], kv_at)
    v_mem = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, HEAD_DIM], kv_at)
    q_mem = gl.allocate_shared_memory(dtype, [HALVES, HALF, HEAD_DIM], q_at)
    bar_at: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_at)
    v_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_at)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], bar_at)
    k_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_at)
    v_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_at)
    q_free = gl.allocate_shared_memory(gl.int64, [1, 1], bar_at)
    mbarrier.init(q_full.index(0), count=GATHERING * 32)
    mbarrier.init(q_free.index(0), count=HALVES)
    turns = gl.allocate_shared_memory(gl.int64, [HALVES, 1], bar_at)
    for i in gl.static_range(HALVES):
        mbarrier.init(turns.index(i), count=EACH)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(k_full.index(i), count=GATHERING * 32)
        mbarrier.init(v_full.index(i), count=GATHERING * 32)
        mbarrier.init(k_free.index(i), count=HALVES * EACH)
        mbarrier.init(v_free.index(i), count=HALVES * EACH)
    lists = key_ptr, count_ptr, order_ptr, n_queries, groups, capacity, n_items
    memory = q_mem, k_mem, v_mem, q_full, k_full, v_full, q_free, k_free, v_free, turns
    out = o_ptr, lse_ptr, state_ptr, stride_ob, stride_oh, stride_on, scale_log2
    q_strides = stride_qb, stride_qh, stride_qn
    k_strides = stride_kb, stride_kh, stride_kn
    v_strides = stride_vb, stride_vh, stride_vn
    gl.warp_specialize(
        [
            (_multiply, (0, lists, out, memory, HEADS, AHEAD, LOOSE)),
            (_multiply, (1, lists, out, memory, HEADS, AHEAD, LOOSE)),
            (_gather, (q_ptr, k_ptr, v_ptr, q_strides, k_strides, v_strides, lists, memory, HEADS, RUN)),
        ],
        [4, GATHERING],
        # Registers of a thread: 65,536 hold those of 256 that multiply and 128 that gather.
        [232 if BLOCK_N == 64 else 224, 40 if BLOCK_N == 64 else 56],
    )


@gluon.jit
def _group(item, lists):
    """``(batch and head, group of the head, its number of keys, its list)`` of an item."""
    key_ptr, count_ptr, order_ptr, _, groups, capacity, n_items = lists
    # Items beyond the last are asked for a step ahead, and not used.
    item = gl.minimum(item, n_items - 1)
    bh = item // groups
    g = gl.load(order_ptr + item)
    group = bh * groups + g
    count = gl.minimum(gl.load(count_ptr + group), capacity)
    return bh, g, count, key_ptr + group.to(gl.int64) * capacity


@gluon.jit
def _head(x_ptr, strides, bh, HEADS: gl.constexpr):
    """The tokens of a head."""
    return x_ptr + (bh // HEADS).to(gl.int64) * strides[0] + (bh % HEADS).to(gl.int64) * strides[1]


@gluon.jit
def _next(stage, phase, NUM_STAGES: gl.constexpr):
    """The stage after this one, and its phase."""
    last = stage == NUM_STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _listed(key_ptr, place, RUN: gl.constexpr):
    """Numbers of the keys at places of a list."""
    return gl.load(key_ptr + place) if RUN == 1 else gl.load(key_ptr + place // RUN * RUN) + place % RUN


@gluon.jit
def _gather(
    q_ptr, k_ptr, v_ptr, q_strides, k_strides, v_strides, lists, memory, HEADS: gl.constexpr, RUN: gl.constexpr
):
    """Fill the stages: queries of each group, then keys and values, those of the last step first."""
    q_mem, k_mem, v_mem, q_full, k_full, v_full, q_free, k_free, v_free, _ = memory
    n_queries, n_items = lists[3], lists[6]
    NUM_STAGES: gl.constexpr = k_mem.shape[0]
    BLOCK_N: gl.constexpr = k_mem.shape[1]
    HEAD_DIM: gl.constexpr = k_mem.shape[2]
    HALF: gl.constexpr = q_mem.shape[1]
    columns: gl.constexpr = HEAD_DIM // 8
    at: gl.constexpr = gl.BlockedLayout([1, 8], [32 // columns, columns], [GATHERING, 1], [1, 0])
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, at))
    m = gl.arange(0, HALF, gl.SliceLayout(1, at))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, at))[None, :]
    stage = 0
    # Waiting for the phase before the first one ends at once.
    phase = 1
    q_phase = 1
    bh, g, count, key_ptr = _group(gl.program_id(0), lists)
    for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
        p_q = _head(q_ptr, q_strides, bh, HEADS)
        p_k = _head(k_ptr, k_strides, bh, HEADS)
        p_v = _head(v_ptr, v_strides, bh, HEADS)
        mbarrier.wait(q_free.index(0), q_phase)
        for half in gl.static_range(HALVES):
            rows = gl.minimum((g * HALVES + half) * HALF + m, n_queries - 1)
            async_copy.async_copy_global_to_shared(q_mem.index(half), p_q + rows[:, None] * q_strides[2] + d)
        async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)
        q_phase ^= 1
        keys_ptr = key_ptr
        last = count - 1
        bh, g, count, key_ptr = _group(item + gl.num_programs(0), lists)
        if last >= 0:
            n_full = last // BLOCK_N
            # Never beyond the keys of a list, where its numbers need not be defined.
            keys = _listed(keys_ptr, gl.minimum(n_full * BLOCK_N + n, last), RUN)
            for j in range(0, n_full + 1):
                later = _listed(keys_ptr, gl.minimum(j * BLOCK_N + n, last), RUN)
                mbarrier.wait(k_free.index(stage), phase)
                async_copy.async_copy_global_to_shared(k_mem.index(stage), p_k + keys[:, None] * k_strides[2] + d)
                async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
                mbarrier.wait(v_free.index(stage), phase)
                async_copy.async_copy_global_to_shared(v_mem.index(stage), p_v + keys[:, None] * v_strides[2] + d)
                async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
                keys = later
                stage, phase = _next(stage, phase, NUM_STAGES)
    async_copy.wait_group(0)


@gluon.jit
def _multiply(half: gl.constexpr, lists, out, memory, HEADS: gl.constexpr, AHEAD: gl.constexpr, LOOSE: gl.constexpr):
    """Attention of one half of each group's queries."""
    q_mem, k_mem, _, q_full, _, _, q_free, _, _, _ = memory
    o_ptr, lse_ptr, state_ptr, stride_ob, stride_oh, stride_on, scale_log2 = out
    n_queries, n_items = lists[3], lists[6]
    BLOCK_N: gl.constexpr = k_mem.shape[1]
    HEAD_DIM: gl.constexpr = k_mem.shape[2]
    HALF: gl.constexpr = q_mem.shape[1]
    dtype: gl.constexpr = k_mem.dtype
    s_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    row_at: gl.constexpr = gl.SliceLayout(1, o_at)
    m = gl.arange(0, HALF, row_at)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_at))[None, :]
    bad = gl.load(state_ptr + OVERFLOW)
    stage = 0
    phase = 0
    q_phase = 0
    # The first half begins.
    turn = 1 - half
    bh, g, count, _ = _group(gl.program_id(0), lists)
    for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
        next_bh, next_g, next_count, _ = _group(item + gl.num_programs(0), lists)
        mbarrier.wait(q_full.index(0), q_phase)
        q = q_mem.index(half).load(gl.DotOperandLayout(0, s_at, 2))
        mbarrier.arrive(q_free.index(0), count=1)
        q_phase ^= 1
        m_i = gl.full([HALF], -float("inf"), gl.float32, row_at)
        l_i = gl.zeros([HALF], gl.float32, row_at)
        acc = gl.zeros([HALF, HEAD_DIM], gl.float32, o_at)
        zeros = gl.zeros([HALF, BLOCK_N], gl.float32, s_at)
        if count > 0:
            if AHEAD == 1:
                m_i, l_i, acc, stage, phase = _ahead(
                    q, zeros, scale_log2, count, m_i, l_i, acc, memory, stage, phase, LOOSE
                )
            else:
                m_i, l_i, acc, stage, phase, turn = _behind(
                    q, zeros, scale_log2, count, m_i, l_i, acc, memory, stage, phase, turn, half, AHEAD == 2, LOOSE
                )
        # Groups without keys give zeros and -inf; lists that did not fit give NaN, whatever they hold.
        l_i = gl.where(count == 0, 1.0, l_i)
        l_i = gl.where(bad != 0, float("nan"), l_i)
        rows = (g * HALVES + half) * HALF + m
        p_o = _head(o_ptr, (stride_ob, stride_oh), bh, HEADS)
        b_o = (acc * (1.0 / l_i)[:, None]).to(dtype)
        gl.store(p_o + rows[:, None] * stride_on + d, b_o, mask=(rows < n_queries)[:, None])
        if lse_ptr is not None:
            p_lse = lse_ptr + bh.to(gl.int64) * n_queries
            gl.store(p_lse + rows, (m_i + gl.log2(l_i)) * LN2, mask=rows < n_queries)
        bh = next_bh
        g = next_g
        count = next_count


@gluon.jit
def _arrive(bar, LOOSE: gl.constexpr):
    """Say that this half has read what `bar` guards."""
    if LOOSE:
        # The arrival of a thread that has no copies under way, and no barrier of its half before it.
        async_copy.mbarrier_arrive(bar, increment_count=False)
    else:
        mbarrier.arrive(bar, count=1)


@gluon.jit
def _products(q, zeros, k_mem, k_full, stage, phase):
    """Start the products of queries with the keys of a stage, once these are there."""
    mbarrier.wait(k_full.index(stage), phase)
    # What copies wrote is seen by the tensor cores after this alone.
    fence_async_shared()
    return warpgroup_mma(q, k_mem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _weighted(w, acc, v_mem, v_full, stage, phase):
    """Start to add the weighted values of a stage, once these are there."""
    mbarrier.wait(v_full.index(stage), phase)
    fence_async_shared()
    return warpgroup_mma(w, v_mem.index(stage), acc, is_async=True)


@gluon.jit
def _first_scores(q, zeros, count, k_mem, k_full, k_free, stage, phase, LOOSE: gl.constexpr):
    """Scores of the last keys of a list, which come first: only they need a mask."""
    BLOCK_N: gl.constexpr = k_mem.shape[1]
    s = _products(q, zeros, k_mem, k_full, stage, phase)
    s = warpgroup_mma_wait(0, deps=[s])
    _arrive(k_free.index(stage), LOOSE)
    place = (count - 1) // BLOCK_N * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, zeros.type.layout))
    return gl.where((place < count)[None, :], s, -float("inf"))


@gluon.jit
def _softmax(s, m_i, l_i, scale_log2, dtype: gl.constexpr):
    """``(weights as an operand of the next product, m_i, l_i, alpha)`` after scores of a step."""
    row_at: gl.constexpr = m_i.type.layout
    m_new = gl.maximum(m_i, gl.convert_layout(gl.max(s, 1), row_at) * scale_log2)
    p = gl.exp2(s * scale_log2 - gl.convert_layout(m_new, gl.SliceLayout(1, s.type.layout))[:, None])
    alpha = gl.exp2(m_i - m_new)
    l_i = l_i * alpha + gl.convert_layout(gl.sum(p, 1), row_at)
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, row_at.parent, 2)), m_new, l_i, alpha


@gluon.jit
def _ahead(q, zeros, scale_log2, count, m_i, l_i, acc, memory, stage, phase, LOOSE: gl.constexpr):
    """All steps of a group: the products of the next step run beside the softmax of this one."""
    _, k_mem, v_mem, _, k_full, v_full, _, k_free, v_free, _ = memory
    s = _first_scores(q, zeros, count, k_mem, k_full, k_free, stage, phase, LOOSE)
    for _j in range(0, (count - 1) // k_mem.shape[1]):
        k_stage, k_phase = _next(stage, phase, k_mem.shape[0])
        later = _products(q, zeros, k_mem, k_full, k_stage, k_phase)
        w, m_i, l_i, alpha = _softmax(s, m_i, l_i, scale_log2, k_mem.dtype)
        acc = _weighted(w, acc * alpha[:, None], v_mem, v_full, stage, phase)
        s, acc = warpgroup_mma_wait(0, deps=[later, acc])
        _arrive(k_free.index(k_stage), LOOSE)
        _arrive(v_free.index(stage), LOOSE)
        stage = k_stage
        phase = k_phase
    w, m_i, l_i, alpha = _softmax(s, m_i, l_i, scale_log2, k_mem.dtype)
    acc = _weighted(w, acc * alpha[:, None], v_mem, v_full, stage, phase)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _arrive(v_free.index(stage), LOOSE)
    stage, phase = _next(stage, phase, k_mem.shape[0])
    return m_i, l_i, acc, stage, phase


@gluon.jit
def _behind(
    q,
    zeros,
    scale_log2,
    count,
    m_i,
    l_i,
    acc,
    memory,
    stage,
    phase,
    turn,
    half: gl.constexpr,
    TURNS: gl.constexpr,
    LOOSE: gl.constexpr,
):
    """All steps of a group: the weighted values of a step run beside the softmax of the next one."""
    _, k_mem, v_mem, _, k_full, v_full, _, k_free, v_free, turns = memory
    s = _first_scores(q, zeros, count, k_mem, k_full, k_free, stage, phase, LOOSE)
    w, m_i, l_i, alpha = _softmax(s, m_i, l_i, scale_log2, k_mem.dtype)
    for _j in range(0, (count - 1) // k_mem.shape[1]):
        k_stage, k_phase = _next(stage, phase, k_mem.shape[0])
        if TURNS:
            mbarrier.wait(turns.index(half), turn)
        s = _products(q, zeros, k_mem, k_full, k_stage, k_phase)
        acc = _weighted(w, acc, v_mem, v_full, stage, phase)
        if TURNS:
            _arrive(turns.index(1 - half), LOOSE)
            turn ^= 1
        s = warpgroup_mma_wait(1, deps=[s])
        _arrive(k_free.index(k_stage), LOOSE)
        w, m_i, l_i, alpha = _softmax(s, m_i, l_i, scale_log2, k_mem.dtype)
        acc, w = warpgroup_mma_wait(0, deps=[acc, w])
        _arrive(v_free.index(stage), LOOSE)
        acc = acc * alpha[:, None]
        stage = k_stage
        phase = k_phase
    acc = _weighted(w, acc, v_mem, v_full, stage, phase)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _arrive(v_free.index(stage), LOOSE)
    stage, phase = _next(stage, phase, k_mem.shape[0])
    return m_i, l_i, acc, stage, phase, turn
