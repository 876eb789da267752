"""Slices on Hopper (stage T5): attention by warps that gather keys and values beside warps that multiply.

What `kernels.tilewright_slice_attention` does, in Gluon, for 16 bits and groups of 128 queries. Four warps fill
stages of shared memory by asynchronous copies of 16 bytes; two times four warps attend to them with 64 queries each, so
that the softmax of one half runs beside the products of the other. Barriers in memory tell who may read or fill a
stage; none waits for all warps.

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
# Warps that gather.
GATHERING = gl.constexpr(4)
# Halves of the queries, each of which four warps attend with.
HALVES = gl.constexpr(2)
# Warps that a launch states: those of the first half. The compiler adds the others.
NUM_WARPS = 4


@gluon.jit(do_not_specialize=["n_queries", "groups"])
def tilewright_slice_attention_by_warps(
    o_ptr, key_ptr, count_ptr, order_ptr, state_ptr, q_ptr, k_ptr, v_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, n_queries, groups, capacity, scale_log2, bound_log2,
    HEADS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, RUN: gl.constexpr, HEAD_DIM: gl.constexpr,
    NUM_STAGES: gl.constexpr, BOUNDED: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Attention of each group to its listed keys. Arguments and grid are those of `tilewright_slice_attention`.

    q_ptr, k_ptr, v_ptr: aligned to 16 bytes, as their strides are.
    """
    pid = gl.program_id(0)
    bh = pid // groups
    bad = gl.load(state_ptr + OVERFLOW)
    # The longest lists of a head start first; neighbours in time share the keys and values of the head in the L2 cache.
    g = gl.load(order_ptr + pid)
    group = bh * groups + g
    # Lists of results that are NaN are not read: what they hold may be no keys.
    count = gl.where(bad != 0, 0, gl.load(count_ptr + group))
    b, h = (bh // HEADS).to(gl.int64), (bh % HEADS).to(gl.int64)
    if WIDE:
        stride_qn, stride_kn = gl.cast(stride_qn, gl.int64), gl.cast(stride_kn, gl.int64)
        stride_vn, stride_on = gl.cast(stride_vn, gl.int64), gl.cast(stride_on, gl.int64)
    key_ptr += group.to(gl.int64) * capacity
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    o_ptr += b * stride_ob + h * stride_oh
    if lse_ptr is not None:
        lse_ptr += bh.to(gl.int64) * n_queries

    dtype: gl.constexpr = q_ptr.dtype.element_ty
    HALF: gl.constexpr = BLOCK_M // HALVES
    kv_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    q_at: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HEAD_DIM], dtype)
    k_mem = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, HEAD_DIM], kv_at)
    v_mem = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, HEAD_DIM], kv_at)
    q_mem = gl.allocate_shared_memory(dtype, [HALVES, HALF, HEAD_DIM], q_at)
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
        mbarrier.init(k_free.index(i), count=HALVES)
        mbarrier.init(v_free.index(i), count=HALVES)
    memory = q_mem, k_mem, v_mem, q_full, k_full, v_full, k_free, v_free
    tokens = q_ptr, k_ptr, v_ptr, stride_qn, stride_kn, stride_vn
    first = g * BLOCK_M
    results = o_ptr, lse_ptr, stride_on, first, n_queries, count, bad, scale_log2, bound_log2
    gl.warp_specialize(
        [
            (_multiply, (0, results, memory, BOUNDED)),
            (_multiply, (1, results, memory, BOUNDED)),
            (_gather, (tokens, key_ptr, first, n_queries, count, memory, RUN)),
        ],
        [4, GATHERING],
        # Registers of a thread: 65,536 hold those of 256 that multiply and 128 that gather.
        [232 if BLOCK_N == 64 else 224, 40 if BLOCK_N == 64 else 56],
    )


@gluon.jit
def _listed(key_ptr, place, RUN: gl.constexpr):
    """Numbers of the keys at places of a list."""
    return gl.load(key_ptr + place) if RUN == 1 else gl.load(key_ptr + place // RUN * RUN) + place % RUN


@gluon.jit
def _gather(tokens, key_ptr, first, n_queries, count, memory, RUN: gl.constexpr):
    """Fill the stages: the queries, then keys and values, those of the last step first."""
    q_mem, k_mem, v_mem, q_full, k_full, v_full, k_free, v_free = memory
    q_ptr, k_ptr, v_ptr, stride_qn, stride_kn, stride_vn = tokens
    BLOCK_N: gl.constexpr = k_mem.shape[1]
    HALF: gl.constexpr = q_mem.shape[1]
    HEAD_DIM: gl.constexpr = q_mem.shape[2]
    columns: gl.constexpr = HEAD_DIM // 8
    at: gl.constexpr = gl.BlockedLayout([1, 8], [32 // columns, columns], [GATHERING, 1], [1, 0])
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, at))
    m = gl.arange(0, HALF, gl.SliceLayout(1, at))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, at))[None, :]
    for half in gl.static_range(HALVES):
        rows = gl.minimum(first + half * HALF + m, n_queries - 1)
        async_copy.async_copy_global_to_shared(q_mem.index(half), q_ptr + rows[:, None] * stride_qn + d)
    async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)
    if count > 0:
        n_full = (count - 1) // BLOCK_N
        # Never beyond the keys of a list, where its numbers need not be defined.
        keys = _listed(key_ptr, gl.minimum(n_full * BLOCK_N + n, count - 1), RUN)
        stage = 0
        # Waiting for the phase before the first one ends at once.
        phase = 1
        for j in range(0, n_full + 1):
            later = _listed(key_ptr, gl.minimum(j * BLOCK_N + n, count - 1), RUN)
            mbarrier.wait(k_free.index(stage), phase)
            async_copy.async_copy_global_to_shared(k_mem.index(stage), k_ptr + keys[:, None] * stride_kn + d)
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            mbarrier.wait(v_free.index(stage), phase)
            async_copy.async_copy_global_to_shared(v_mem.index(stage), v_ptr + keys[:, None] * stride_vn + d)
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            keys = later
            stage, phase = _next_stage(stage, phase, k_mem.shape[0])
    async_copy.wait_group(0)


@gluon.jit
def _multiply(half, results, memory, BOUNDED: gl.constexpr):
    """Attention of one half of the queries."""
    q_mem, k_mem, _, q_full, _, _, _, _ = memory
    o_ptr, lse_ptr, stride_on, first, n_queries, count, bad, scale_log2, bound_log2 = results
    BLOCK_N: gl.constexpr = k_mem.shape[1]
    HALF: gl.constexpr = q_mem.shape[1]
    HEAD_DIM: gl.constexpr = q_mem.shape[2]
    s_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_at: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    row_at: gl.constexpr = gl.SliceLayout(1, o_at)
    mbarrier.wait(q_full.index(0), 0)
    q = q_mem.index(half).load(gl.DotOperandLayout(0, s_at, 2))
    m_i = gl.full([HALF], -float("inf"), gl.float32, row_at)
    if BOUNDED:
        m_i = gl.where(count > 0, bound_log2, m_i)
    l_i = gl.zeros([HALF], gl.float32, row_at)
    acc = gl.zeros([HALF, HEAD_DIM], gl.float32, o_at)
    zeros = gl.zeros([HALF, BLOCK_N], gl.float32, s_at)
    if count > 0:
        m_i, l_i, acc = _all_steps(q, zeros, scale_log2, count, m_i, l_i, acc, memory, BOUNDED)
    # Groups without keys give zeros and -inf; lists that did not fit give NaN, whatever they hold.
    l_i = gl.where(count == 0, 1.0, l_i)
    l_i = gl.where(bad != 0, float("nan"), l_i)
    rows = first + half * HALF + gl.arange(0, HALF, row_at)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_at))[None, :]
    b_o = (acc * (1.0 / l_i)[:, None]).to(k_mem.dtype)
    gl.store(o_ptr + rows[:, None] * stride_on + d, b_o, mask=(rows < n_queries)[:, None])
    if lse_ptr is not None:
        gl.store(lse_ptr + rows, (m_i + gl.log2(l_i)) * LN2, mask=rows < n_queries)


@gluon.jit
def _products(q, zeros, k_mem, k_full, stage, phase):
    """Start the products of queries with the keys of a stage, once these are there."""
    mbarrier.wait(k_full.index(stage), phase)
    # What copies wrote is seen by the tensor cores after this alone.
    fence_async_shared()
    return warpgroup_mma(q, k_mem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _all_steps(q, zeros, scale_log2, count, m_i, l_i, acc, memory, BOUNDED: gl.constexpr):
    """``(m_i, l_i, acc)`` after all keys of a list. The values of a step are added beside the softmax of the next."""
    _, k_mem, v_mem, _, k_full, v_full, k_free, v_free = memory
    # The last keys come first: only they need a mask.
    BLOCK_N: gl.constexpr = k_mem.shape[1]
    s = _products(q, zeros, k_mem, k_full, 0, 0)
    s = warpgroup_mma_wait(0, deps=[s])
    # This half has read the stage.
    mbarrier.arrive(k_free.index(0), count=1)
    n_full = (count - 1) // BLOCK_N
    place = n_full * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, zeros.type.layout))
    s = gl.where((place < count)[None, :], s, -float("inf"))
    w, m_i, l_i, alpha = _softmax(s, m_i, l_i, scale_log2, k_mem.dtype, BOUNDED)
    stage = 0
    phase = 0
    for _j in range(0, n_full):
        k_stage, k_phase = _next_stage(stage, phase, k_mem.shape[0])
        s = _products(q, zeros, k_mem, k_full, k_stage, k_phase)
        acc = _weighted(w, acc, v_mem, v_full, stage, phase)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_free.index(k_stage), count=1)
        w, m_i, l_i, alpha = _softmax(s, m_i, l_i, scale_log2, k_mem.dtype, BOUNDED)
        acc, w = warpgroup_mma_wait(0, deps=[acc, w])
        mbarrier.arrive(v_free.index(stage), count=1)
        if not BOUNDED:
            acc = acc * alpha[:, None]
        stage = k_stage
        phase = k_phase
    acc = _weighted(w, acc, v_mem, v_full, stage, phase)
    return m_i, l_i, warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _next_stage(stage, phase, NUM_STAGES: gl.constexpr):
    """The stage after this one, and its phase."""
    last = stage == NUM_STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _weighted(w, acc, v_mem, v_full, stage, phase):
    """Start to add the weighted values of a stage, once these are there."""
    mbarrier.wait(v_full.index(stage), phase)
    # What copies wrote is seen by the tensor cores after this alone.
    fence_async_shared()
    return warpgroup_mma(w, v_mem.index(stage), acc, is_async=True)


@gluon.jit
def _softmax(s, m_i, l_i, scale_log2, dtype: gl.constexpr, BOUNDED: gl.constexpr):
    """``(weights as an operand of the next product, m_i, l_i, alpha)`` after scores of a step.

    BOUNDED: all scores stay below m_i, and alpha is 1.
    """
    row_at: gl.constexpr = m_i.type.layout
    m_new = m_i
    if not BOUNDED:
        m_new = gl.maximum(m_i, gl.convert_layout(gl.max(s, 1), row_at) * scale_log2)
    p = gl.exp2(s * scale_log2 - gl.convert_layout(m_new, gl.SliceLayout(1, s.type.layout))[:, None])
    alpha = gl.exp2(m_i - m_new)
    l_i = (l_i if BOUNDED else l_i * alpha) + gl.convert_layout(gl.sum(p, 1), row_at)
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, row_at.parent, 2)), m_new, l_i, alpha
