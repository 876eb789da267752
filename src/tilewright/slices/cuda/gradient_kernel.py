"""Gradients of slices on an NVIDIA GPU: one kernel for those of queries, keys and values.

A program has the queries of a group and walks its list once more. The gradient of its queries stays in registers; those
of a listed key and of its value are sums over the groups that list the key, which programs add to by atomic operations
in float32: a list of groups for each key would have a product for each key and group, too few rows for tensor cores.
Sums are therefore added in any order. Names are those of the literature: delta is the sum of out * grad of a query,
b_dp the gradient of its weights, b_ds that of its scores.
"""

import triton
import triton.language as tl

from tilewright.devices.cuda.online_softmax import load_rows, write_rows
from tilewright.slices.cuda.kernels import LN2, OVERFLOW, listed_keys


@triton.jit(do_not_specialize=["n_queries", "n_keys", "groups"])
def tilewright_slice_gradients(
    dq_ptr, dk_ptr, dv_ptr, key_ptr, count_ptr, order_ptr, state_ptr, q_ptr, k_ptr, v_ptr, o_ptr, g_ptr, lse_ptr,
    lse_grad_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, stride_gb, stride_gh, stride_gn, stride_db, stride_dh, stride_dn,
    n_queries, n_keys, groups, capacity, scale_log2, scale,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RUN: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """See the module. Grid and lists: as of `kernels.tilewright_slice_attention`.

    dq_ptr, o_ptr, g_ptr: strided as q_ptr; the result and its gradient. dk_ptr, dv_ptr: float32 [batch, n_keys, HEADS,
    HEAD_DIM], which is added to. lse_ptr, lse_grad_ptr: float32 [batch, HEADS, n_queries]; natural log-sum-exps, and
    their gradient or None.
    """
    pid = tl.program_id(0)
    bh = pid // groups
    bad = tl.load(state_ptr + OVERFLOW)
    g = tl.load(order_ptr + pid)
    group = bh * groups + g
    count = tl.where(bad != 0, 0, tl.load(count_ptr + group))
    b, h = (bh // HEADS).to(tl.int64), (bh % HEADS).to(tl.int64)
    if WIDE:
        stride_qn, stride_kn, stride_vn = stride_qn.to(tl.int64), stride_kn.to(tl.int64), stride_vn.to(tl.int64)
        stride_on, stride_gn, stride_dn = stride_on.to(tl.int64), stride_gn.to(tl.int64), stride_dn.to(tl.int64)
    key_ptr += group.to(tl.int64) * capacity
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    dk_ptr += (b * n_keys * HEADS + h) * HEAD_DIM
    dv_ptr += (b * n_keys * HEADS + h) * HEAD_DIM

    rows = g * BLOCK_M + tl.arange(0, BLOCK_M)
    m_rows = rows < n_queries
    rows = tl.minimum(rows, n_queries - 1)
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    b_q = load_rows(q_ptr + b * stride_qb + h * stride_qh, rows, stride_qn, HEAD_DIM, HEAD_DIM, 0)[0]
    b_g = load_rows(g_ptr + b * stride_gb + h * stride_gh, rows, stride_gn, HEAD_DIM, HEAD_DIM, 0)[0]
    b_o = load_rows(o_ptr + b * stride_ob + h * stride_oh, rows, stride_on, HEAD_DIM, HEAD_DIM, 0)[0]
    of_head = bh.to(tl.int64) * n_queries + rows
    delta = tl.sum(b_o.to(tl.float32) * b_g.to(tl.float32), 1)
    if lse_grad_ptr is not None:
        delta -= tl.load(lse_grad_ptr + of_head)
    # Rows of no query have no weights.
    lse = tl.load(lse_ptr + of_head, mask=m_rows, other=float("inf")) / LN2
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    acc1 = tl.zeros((BLOCK_M, 1), tl.float32)
    if count > 0:
        keys = listed_keys(key_ptr, tl.minimum(n, count - 1), RUN)
        for lo in tl.range(0, count, BLOCK_N, num_stages=NUM_STAGES):
            later = listed_keys(key_ptr, tl.minimum(lo + BLOCK_N + n, count - 1), RUN)
            b_k = load_rows(k_ptr, keys, stride_kn, HEAD_DIM, HEAD_DIM, 0)[0]  # [BLOCK_N, HEAD_DIM]
            b_v = load_rows(v_ptr, keys, stride_vn, HEAD_DIM, HEAD_DIM, 0)[0]  # [BLOCK_N, HEAD_DIM]
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
            b_p = tl.exp2(b_s * scale_log2 - lse[:, None])
            b_p = tl.where((lo + n < count)[None, :], b_p, 0.0)  # [BLOCK_M, BLOCK_N]
            p_sum = keys.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + d[None, :]
            b_dv = tl.dot(tl.trans(b_p.to(b_g.dtype)), b_g, input_precision="ieee")
            tl.atomic_add(dv_ptr + p_sum, b_dv, sem="relaxed")
            b_dp = tl.dot(b_g, tl.trans(b_v), input_precision="ieee")
            b_ds = (b_p * (b_dp - delta[:, None])).to(b_q.dtype)
            acc = tl.dot(b_ds, b_k, acc, input_precision="ieee")
            b_dk = tl.dot(tl.trans(b_ds), b_q, input_precision="ieee") * scale
            tl.atomic_add(dk_ptr + p_sum, b_dk, sem="relaxed")
            keys = later
    acc = tl.where(bad != 0, float("nan"), acc * scale)
    write_rows(dq_ptr + b * stride_db + h * stride_dh, rows, stride_dn, acc, acc1, m_rows, HEAD_DIM, HEAD_DIM, 0)
