"""Pieces of attention kernels: rows of a head, scores, one step of the online softmax, results.

Names are those of the literature: m_i and l_i are the running maximum (times the scale, in base 2) and sum of each
query's weights, acc0 and acc1 the weighted values, alpha what they are multiplied by when the maximum grows. A head dim
that is no power of two is loaded as two blocks of columns, D0 and D1, powers of two: HEAD_DIM <= D0 + D1, and D1 may be
0. Blocks of that many columns have one column instead, which is never read.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(x_ptr, rows, stride, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Rows of a matrix with HEAD_DIM columns, zeros beyond those: blocks [R, D0] and [R, D1]."""
    d0 = tl.arange(0, D0)
    b_x0 = _load_columns(x_ptr + rows[:, None] * stride + d0[None, :], d0, HEAD_DIM, D0)  # [R, D0]
    b_x1 = b_x0
    if D1:
        d1 = D0 + tl.arange(0, D1)
        b_x1 = _load_columns(x_ptr + rows[:, None] * stride + d1[None, :], d1, HEAD_DIM, D0 + D1)  # [R, D1]
    return b_x0, b_x1


@triton.jit
def _load_columns(p_x, d, HEAD_DIM: tl.constexpr, END: tl.constexpr):
    """Values at `p_x` of the columns `d`, which end before END; zeros from column HEAD_DIM on."""
    return tl.load(p_x) if END <= HEAD_DIM else tl.load(p_x, mask=(d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def scores(b_q0, b_q1, k_ptr, keys, stride_kn, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Products [BLOCK_M, BLOCK_N] of queries with the keys at `keys`, not scaled."""
    # Keys are loaded as values are: their addresses are worked out once, which saves instructions and registers.
    b_k0, b_k1 = load_rows(k_ptr, keys, stride_kn, HEAD_DIM, D0, D1)  # [BLOCK_N, D0], [BLOCK_N, D1]
    return products(b_q0, b_q1, b_k0, b_k1, D1)


@triton.jit
def products(b_q0, b_q1, b_k0, b_k1, D1: tl.constexpr):
    """Products [BLOCK_M, BLOCK_N] of queries and keys, each [., D0] and [., D1]."""
    b_s = tl.dot(b_q0, tl.trans(b_k0), input_precision="ieee")
    if D1:
        b_s = tl.dot(b_q1, tl.trans(b_k1), b_s, input_precision="ieee")
    return b_s


@triton.jit
def update(b_s, b_v0, b_v1, m_i, l_i, acc0, acc1, scale_log2, D1: tl.constexpr):
    """One step of the online softmax: ``(m_i, l_i, acc0, acc1)`` after scores [BLOCK_M, BLOCK_N] and their values."""
    m_new = tl.maximum(m_i, tl.max(b_s, 1) * scale_log2)
    b_p = tl.exp2(b_s * scale_log2 - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(b_p, 1)
    b_w = b_p.to(b_v0.dtype)
    acc0 = tl.dot(b_w, b_v0, acc0 * alpha[:, None], input_precision="ieee")
    if D1:
        acc1 = tl.dot(b_w, b_v1, acc1 * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc0, acc1


@triton.jit
def store_rows(
    o_ptr, rows, stride_on, acc0, acc1, l_i, m_rows,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Write the weighted values over their sums to the rows of the mask `m_rows`."""
    write_rows(o_ptr, rows, stride_on, acc0 / l_i[:, None], acc1 / l_i[:, None], m_rows, HEAD_DIM, D0, D1)


@triton.jit
def write_rows(
    x_ptr, rows, stride, b_x0, b_x1, m_rows,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Write [BLOCK_M, D0] and [BLOCK_M, D1] to the rows of the mask `m_rows`, `stride` apart."""
    d0 = tl.arange(0, D0)
    p_x = x_ptr + rows[:, None] * stride
    tl.store(p_x + d0[None, :], b_x0.to(x_ptr.dtype.element_ty), mask=m_rows[:, None] & (d0 < HEAD_DIM)[None, :])
    if D1:
        d1 = D0 + tl.arange(0, D1)
        tl.store(p_x + d1[None, :], b_x1.to(x_ptr.dtype.element_ty), mask=m_rows[:, None] & (d1 < HEAD_DIM)[None, :])
