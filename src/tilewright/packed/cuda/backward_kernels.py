"""The gradients of packed attention as two kernels for NVIDIA GPUs (training).

Both take the work items of the forward: an image sees itself whole, so that the lists of its keys are those of its
queries. Names, and what the first kernel leaves for the second, are those of `backward_kernels`. Rows of no image have
no gradient; that of a batch that did not fit is NaN.
"""

import triton
import triton.language as tl

from tilewright.attention.cuda.backward_kernels import (
    add_keys,
    add_queries,
    log_sum_exp,
    store_sums,
)
from tilewright.devices.cuda.online_softmax import load_rows, products
from tilewright.packed.cuda.kernels import BAD, FIRST_QUERY, FIRST_ROW, ITEMS, KEPT, LENGTH, RECORD


@triton.jit(do_not_specialize=["work_at", "capacity"])
def tilewright_packed_query_gradients(
    stats_ptr, list_ptr, q_ptr, k_ptr, v_ptr, o_ptr, g_ptr, dq_ptr,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_on, stride_oh, stride_gn, stride_gh,
    work_at, capacity, scale_log2, scale,
    HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, NUM_STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries. Grid: (most work items * ROWS / BLOCK_M * HEADS,), the heads of rows side by side.

    q_ptr, k_ptr, v_ptr, o_ptr (the result), g_ptr (its gradient): [capacity, HEADS, HEAD_DIM], strided. dq_ptr: the
    same, contiguous. stats_ptr: float32 [2, HEADS, capacity], log-sum-exps in base 2 and deltas. ROWS: queries of a
    work item, a multiple of BLOCK_M.
    """
    h, first_row, length, begin, bad, there = _item(list_ptr, work_at, HEADS, ROWS, BLOCK_M)
    if not there:
        return
    if WIDE:
        stride_qn, stride_kn, stride_vn = _int64(stride_qn), _int64(stride_kn), _int64(stride_vn)
        stride_on, stride_gn = _int64(stride_on), _int64(stride_gn)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    rows = begin + tl.minimum(m, length - begin - 1)
    m_rows = begin + m < length
    at, head = first_row.to(tl.int64), h.to(tl.int64)
    k_ptr += at * stride_kn + head * stride_kh
    v_ptr += at * stride_vn + head * stride_vh
    b_q0, b_q1 = load_rows(q_ptr + at * stride_qn + head * stride_qh, rows, stride_qn, HEAD_DIM, D0, D1)
    b_o0, b_o1 = load_rows(o_ptr + at * stride_on + head * stride_oh, rows, stride_on, HEAD_DIM, D0, D1)
    b_g0, b_g1 = load_rows(g_ptr + at * stride_gn + head * stride_gh, rows, stride_gn, HEAD_DIM, D0, D1)
    delta = tl.sum(b_o0.to(tl.float32) * b_g0.to(tl.float32), 1)
    if D1:
        delta += tl.sum(b_o1.to(tl.float32) * b_g1.to(tl.float32), 1)
    acc0 = tl.zeros((BLOCK_M, D0), tl.float32)
    acc1 = tl.zeros((BLOCK_M, D1 if D1 else 1), tl.float32)
    m_i = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    # Of no image: no step.
    seen = tl.where(first_row < tl.load(list_ptr + KEPT), length, 0)
    for lo in tl.range(0, seen, BLOCK_N, num_stages=NUM_STAGES):
        keys = tl.minimum(lo + n, length - 1)
        b_k0, b_k1 = load_rows(k_ptr, keys, stride_kn, HEAD_DIM, D0, D1)
        b_v0, b_v1 = load_rows(v_ptr, keys, stride_vn, HEAD_DIM, D0, D1)
        b_s = products(b_q0, b_q1, b_k0, b_k1, D1)
        b_s = tl.where((lo + n < length)[None, :], b_s, -float("inf"))
        b_dp = products(b_g0, b_g1, b_v0, b_v1, D1)
        m_i, l_i, acc0, acc1 = add_keys(b_s, b_dp, delta, b_k0, b_k1, m_i, l_i, acc0, acc1, scale_log2, D1)

    p_stats = stats_ptr + head * capacity + at + rows
    tl.store(p_stats, log_sum_exp(m_i, l_i), mask=m_rows)
    tl.store(p_stats + HEADS * capacity.to(tl.int64), delta, mask=m_rows)
    factor = scale / tl.where(l_i > 0, l_i, 1.0)[:, None]
    factor = tl.where(bad != 0, float("nan"), factor)
    _store(dq_ptr, acc0 * factor, acc1 * factor, first_row + rows, h, m_rows, HEADS, HEAD_DIM, D0, D1)


@triton.jit(do_not_specialize=["work_at", "capacity"])
def tilewright_packed_key_gradients(
    stats_ptr, list_ptr, q_ptr, k_ptr, v_ptr, g_ptr, dk_ptr, dv_ptr,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_gn, stride_gh,
    work_at, capacity, scale_log2, scale,
    HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, NUM_STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values. Grid and arguments: as of `tilewright_packed_query_gradients`.

    Rows are keys, and the steps walk the queries of their image. dk_ptr, dv_ptr: contiguous.
    """
    h, first_row, length, begin, bad, there = _item(list_ptr, work_at, HEADS, ROWS, BLOCK_M)
    if not there:
        return
    if WIDE:
        stride_qn, stride_kn, stride_vn = _int64(stride_qn), _int64(stride_kn), _int64(stride_vn)
        stride_gn = _int64(stride_gn)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    rows = begin + tl.minimum(m, length - begin - 1)
    m_rows = begin + m < length
    at, head = first_row.to(tl.int64), h.to(tl.int64)
    q_ptr += at * stride_qn + head * stride_qh
    g_ptr += at * stride_gn + head * stride_gh
    b_k0, b_k1 = load_rows(k_ptr + at * stride_kn + head * stride_kh, rows, stride_kn, HEAD_DIM, D0, D1)
    b_v0, b_v1 = load_rows(v_ptr + at * stride_vn + head * stride_vh, rows, stride_vn, HEAD_DIM, D0, D1)
    p_lse = stats_ptr + head * capacity + at
    p_delta = p_lse + HEADS * capacity.to(tl.int64)
    dk0 = tl.zeros((BLOCK_M, D0), tl.float32)
    dv0 = tl.zeros((BLOCK_M, D0), tl.float32)
    dk1 = tl.zeros((BLOCK_M, D1 if D1 else 1), tl.float32)
    dv1 = tl.zeros((BLOCK_M, D1 if D1 else 1), tl.float32)
    # Of no image: no step.
    seen = tl.where(first_row < tl.load(list_ptr + KEPT), length, 0)
    for lo in tl.range(0, seen, BLOCK_N, num_stages=NUM_STAGES):
        m_queries = lo + n < length
        queries = tl.minimum(lo + n, length - 1)
        b_q0, b_q1 = load_rows(q_ptr, queries, stride_qn, HEAD_DIM, D0, D1)
        b_g0, b_g1 = load_rows(g_ptr, queries, stride_gn, HEAD_DIM, D0, D1)
        # Queries beyond the last have no weights.
        lse = tl.load(p_lse + lo + n, mask=m_queries, other=float("inf"))  # [BLOCK_N]
        delta = tl.load(p_delta + lo + n, mask=m_queries, other=0.0)  # [BLOCK_N]
        b_s = products(b_k0, b_k1, b_q0, b_q1, D1)
        dk0, dk1, dv0, dv1 = add_queries(
            b_s, b_v0, b_v1, lse, delta, b_q0, b_q1, b_g0, b_g1, dk0, dk1, dv0, dv1, scale_log2, D1
        )

    factor = tl.where(bad != 0, float("nan"), 1.0)
    of_keys = factor * scale
    _store(dk_ptr, dk0 * of_keys, dk1 * of_keys, first_row + rows, h, m_rows, HEADS, HEAD_DIM, D0, D1)
    _store(dv_ptr, dv0 * factor, dv1 * factor, first_row + rows, h, m_rows, HEADS, HEAD_DIM, D0, D1)


@triton.jit
def _item(list_ptr, work_at, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """``(head, first row of the image, its tokens, first row of the program among them, whether the batch did not fit,
    whether there is such a row)`` of a program."""
    pid = tl.program_id(0)
    h, block = pid % HEADS, pid // HEADS
    item, part = block // (ROWS // BLOCK_M), block % (ROWS // BLOCK_M)
    bad, n_items = tl.load(list_ptr + BAD), tl.load(list_ptr + ITEMS)
    p_item = list_ptr + work_at + item * RECORD
    m_item = item < n_items
    first_row = tl.load(p_item + FIRST_ROW, mask=m_item, other=0)
    length = tl.load(p_item + LENGTH, mask=m_item, other=0)
    begin = tl.load(p_item + FIRST_QUERY, mask=m_item, other=0) + part * BLOCK_M
    return h, first_row, length, begin, bad, begin < length


@triton.jit
def _int64(x):
    return tl.cast(x, tl.int64)


@triton.jit
def _store(
    x_ptr, b_x0, b_x1, rows, h, m_rows,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Write a head's rows of a contiguous tensor [., HEADS, HEAD_DIM]."""
    store_sums(x_ptr, rows.to(tl.int64) * HEADS + h, b_x0, b_x1, m_rows, HEAD_DIM, D0, D1)
