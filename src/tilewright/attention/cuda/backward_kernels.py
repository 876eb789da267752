"""The gradients of a work list as two kernels for NVIDIA GPUs (training).

`tilewright_query_gradients` takes the work items of the forward once more: one program has a block of BLOCK_M queries
and walks the keys that they see. It sums the gradient of its queries while it finds their weights, as an online softmax
does, so that nothing of the forward but its result is needed. It leaves each query's log-sum-exp and the product of its
result and the result's gradient.

`tilewright_key_gradients` takes transposed lists: one program has a block of BLOCK_M keys and walks the queries that
see them. Scores stand transposed, keys by queries, so that weights are a product's left factor where they are.

The parts of a split item leave their sums in scratch memory, and the part that finishes last adds them up, in one
order. Names are those of `tile_kernel`, and those of the literature: delta is the sum of out * grad of a query, b_dp
the gradient of its weights, b_ds that of its scores.
"""

import triton
import triton.language as tl

from tilewright.attention.cuda.tile_kernel import (
    FEW_ROWS,
    FLAGS,
    FLOOR,
    FLOOR_HALF,
    ITEM_PART,
    MERGED,
    keep_sums,
    masked,
    masks_of,
    merge_block,
    merge_row,
    part_of,
    work_item,
)
from tilewright.devices.cuda.online_softmax import load_rows, products, write_rows


@triton.jit(do_not_specialize=["n_items", "n_hb"])
def tilewright_query_gradients(
    q_ptr, k_ptr, v_ptr, o_ptr, g_ptr, dq_ptr, lse_ptr, delta_ptr,
    item_ptr, row_ptr, key_ptr, left_ptr, right_ptr, part_ptr, acc_ptr, stat_ptr, count_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, stride_gb, stride_gh, stride_gn,
    n_items, n_hb, n_queries, scale_log2, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    RANK: tl.constexpr, HEADS: tl.constexpr, MASK_HEADS: tl.constexpr, FULL: tl.constexpr, PARTIAL: tl.constexpr,
    SPLIT: tl.constexpr, ORDERED: tl.constexpr, SIGN: tl.constexpr, NUM_STAGES: tl.constexpr,
    ACROSS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """See the module. Grid, lists and ACROSS: as of `tile_kernel.tilewright_tile_attention`.

    o_ptr, g_ptr: the result and its gradient. dq_ptr [n_hb, n_queries, HEAD_DIM]. lse_ptr, delta_ptr: float32 [n_hb,
    n_queries]; the log-sum-exps are those of the scores times scale_log2, in base 2, less the greatest bias of the row,
    and infinite for a query without a key. acc_ptr [rows * n_hb, D0 + D1], stat_ptr [rows * n_hb, 2] for the rows of
    all parts, count_ptr [groups, n_hb], zeros. scale: what scores are multiplied by, with its sign; 0 for none.
    """
    lane, item = tl.program_id(0), tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    if item >= n_items:
        return
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    p_item, hb, b, h, first_row, n_rows, p_keys, n_full, n_steps, rows = work_item(
        item_ptr, row_ptr, key_ptr, item, lane, m, BLOCK_N, HEADS, ORDERED, ACROSS
    )
    head, m_rows = h.to(tl.int64), m < n_rows
    if WIDE:
        stride_qn, stride_kn = tl.cast(stride_qn, tl.int64), tl.cast(stride_kn, tl.int64)
        stride_vn, stride_on = tl.cast(stride_vn, tl.int64), tl.cast(stride_on, tl.int64)
        stride_gn = tl.cast(stride_gn, tl.int64)
    q_ptr += b * stride_qb + head * stride_qh
    k_ptr += b * stride_kb + head * stride_kh
    v_ptr += b * stride_vb + head * stride_vh
    o_ptr += b * stride_ob + head * stride_oh
    g_ptr += b * stride_gb + head * stride_gh
    of_head = hb.to(tl.int64) * n_queries
    dq_ptr += of_head * HEAD_DIM
    lse_ptr += of_head
    delta_ptr += of_head
    b_q0, b_q1 = load_rows(q_ptr, rows, stride_qn, HEAD_DIM, D0, D1)  # [BLOCK_M, D0], [BLOCK_M, D1]
    b_g0, b_g1 = load_rows(g_ptr, rows, stride_gn, HEAD_DIM, D0, D1)  # [BLOCK_M, D0], [BLOCK_M, D1]
    b_o0, b_o1 = load_rows(o_ptr, rows, stride_on, HEAD_DIM, D0, D1)  # [BLOCK_M, D0], [BLOCK_M, D1]
    delta = tl.sum(b_o0.to(tl.float32) * b_g0.to(tl.float32), 1)
    if D1:
        delta += tl.sum(b_o1.to(tl.float32) * b_g1.to(tl.float32), 1)
    # The parts of a split block all write the same.
    tl.store(delta_ptr + rows, delta, mask=m_rows)
    if SIGN != 1:
        b_q0, b_q1 = b_q0 * SIGN, b_q1 * SIGN
    acc0 = tl.zeros((BLOCK_M, D0), tl.float32)
    acc1 = tl.zeros((BLOCK_M, D1 if D1 else 1), tl.float32)
    floor: tl.constexpr = FLOOR_HALF if RANK > FLAGS and left_ptr.dtype.element_ty == tl.float16 else FLOOR
    m_i = tl.full((BLOCK_M,), 1.0, tl.float32) * (floor * scale_log2 if PARTIAL else -float("inf"))
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    keys = tl.load(p_keys + n)  # [BLOCK_N]

    if FULL:
        for j in tl.range(0, n_full, num_stages=NUM_STAGES):
            next_keys = tl.load(p_keys + (j + 1) * BLOCK_N + n)  # [BLOCK_N]
            b_k0, b_k1 = load_rows(k_ptr, keys, stride_kn, HEAD_DIM, D0, D1)
            b_v0, b_v1 = load_rows(v_ptr, keys, stride_vn, HEAD_DIM, D0, D1)
            b_s = products(b_q0, b_q1, b_k0, b_k1, D1)
            b_dp = products(b_g0, b_g1, b_v0, b_v1, D1)
            m_i, l_i, acc0, acc1 = add_keys(b_s, b_dp, delta, b_k0, b_k1, m_i, l_i, acc0, acc1, scale_log2, D1)
            keys = next_keys

    if PARTIAL:
        left_ptr, right_ptr, b_left = masks_of(p_item, left_ptr, right_ptr, m, h, BLOCK_M, BLOCK_N, RANK, MASK_HEADS)
        for j in tl.range(n_full, n_steps, num_stages=NUM_STAGES):
            next_keys = tl.load(p_keys + (j + 1) * BLOCK_N + n)  # [BLOCK_N]
            b_k0, b_k1 = load_rows(k_ptr, keys, stride_kn, HEAD_DIM, D0, D1)
            b_v0, b_v1 = load_rows(v_ptr, keys, stride_vn, HEAD_DIM, D0, D1)
            b_s = products(b_q0, b_q1, b_k0, b_k1, D1)
            b_s = masked(b_s, b_left, right_ptr, (j - n_full).to(tl.int64), m, n, BLOCK_M, BLOCK_N, RANK, MASK_HEADS)
            b_dp = products(b_g0, b_g1, b_v0, b_v1, D1)
            m_i, l_i, acc0, acc1 = add_keys(b_s, b_dp, delta, b_k0, b_k1, m_i, l_i, acc0, acc1, scale_log2, D1)
            keys = next_keys

    acc0, acc1 = acc0 * scale, acc1 * scale
    part = -1
    if SPLIT:
        part = tl.load(p_item + ITEM_PART)
    if part < 0:
        tl.store(lse_ptr + rows, log_sum_exp(m_i, l_i), mask=m_rows)
        # Rows without an allowed key.
        l_i = tl.where(l_i > 0, l_i, 1.0)
        store_sums(dq_ptr, rows, acc0 / l_i[:, None], acc1 / l_i[:, None], m_rows, HEAD_DIM, D0, D1)
    elif SPLIT:
        count_ptr, n_parts, part_rows, first, at = part_of(part_ptr, count_ptr, part, n_hb, lane, n_rows, m)
        keep_sums(acc_ptr, at, acc0, acc1, m_rows, 0, D0 + D1, D0, D1)
        tl.store(stat_ptr + at * 2, m_i, mask=m_rows)
        tl.store(stat_ptr + at * 2 + 1, l_i, mask=m_rows)
        tl.debug_barrier()
        done = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
        if done == n_parts - 1:
            # For the next call.
            tl.store(count_ptr, 0)
            acc_ptr += first * (D0 + D1)
            stat_ptr += first * 2
            if n_rows > FEW_ROWS:
                m_i, l_i = merge_block(
                    acc_ptr, stat_ptr, dq_ptr, rows, HEAD_DIM, m_rows, n_parts, part_rows, BLOCK_M, HEAD_DIM, D0, D1
                )
                tl.store(lse_ptr + rows, log_sum_exp(m_i, l_i), mask=m_rows)
            else:
                for row in range(n_rows):
                    q_row = first_row + row
                    if not ORDERED:
                        q_row = tl.load(row_ptr + q_row)
                    p_dq = dq_ptr + q_row * HEAD_DIM
                    m_row, l_row = merge_row(acc_ptr, stat_ptr, p_dq, row, n_parts, part_rows, HEAD_DIM, D0, D1)
                    tl.store(lse_ptr + q_row, log_sum_exp(m_row, l_row))


@triton.jit(do_not_specialize=["n_items", "n_hb"])
def tilewright_key_gradients(
    q_ptr, k_ptr, v_ptr, g_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr,
    item_ptr, row_ptr, key_ptr, left_ptr, right_ptr, part_ptr, acc_ptr, count_ptr, peak_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    n_items, n_hb, n_queries, n_keys, scale_log2, scale, mask_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    RANK: tl.constexpr, HEADS: tl.constexpr, MASK_HEADS: tl.constexpr, FULL: tl.constexpr, PARTIAL: tl.constexpr,
    SPLIT: tl.constexpr, ORDERED: tl.constexpr, SIGN: tl.constexpr, NUM_STAGES: tl.constexpr,
    ACROSS: tl.constexpr, WIDE: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """See the module. Grid and ACROSS: as of `tilewright_query_gradients`. The rows of the lists are keys, their keys
    queries.

    dk_ptr, dv_ptr [n_hb, n_keys, HEAD_DIM]. lse_ptr, delta_ptr: as `tilewright_query_gradients` leaves them. acc_ptr
    [rows * n_hb, 2 * (D0 + D1)]. With RANK 0, right_ptr holds the bias itself, and peak_ptr, float32 [PEAKS,
    n_queries], the greatest of each query, of one image or of all; their difference times mask_scale is added to the
    scores.
    """
    lane, item = tl.program_id(0), tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    if item >= n_items:
        return
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    p_item, hb, b, h, first_row, n_rows, p_queries, n_full, n_steps, rows = work_item(
        item_ptr, row_ptr, key_ptr, item, lane, m, BLOCK_N, HEADS, ORDERED, ACROSS
    )
    head, m_rows = h.to(tl.int64), m < n_rows
    if WIDE:
        stride_qn, stride_kn = tl.cast(stride_qn, tl.int64), tl.cast(stride_kn, tl.int64)
        stride_vn, stride_gn = tl.cast(stride_vn, tl.int64), tl.cast(stride_gn, tl.int64)
    q_ptr += b * stride_qb + head * stride_qh
    k_ptr += b * stride_kb + head * stride_kh
    v_ptr += b * stride_vb + head * stride_vh
    g_ptr += b * stride_gb + head * stride_gh
    lse_ptr += hb.to(tl.int64) * n_queries
    delta_ptr += hb.to(tl.int64) * n_queries
    dk_ptr += hb.to(tl.int64) * n_keys * HEAD_DIM
    dv_ptr += hb.to(tl.int64) * n_keys * HEAD_DIM
    peak_ptr += (hb % PEAKS).to(tl.int64) * n_queries
    b_k0, b_k1 = load_rows(k_ptr, rows, stride_kn, HEAD_DIM, D0, D1)  # [BLOCK_M, D0], [BLOCK_M, D1]
    b_v0, b_v1 = load_rows(v_ptr, rows, stride_vn, HEAD_DIM, D0, D1)  # [BLOCK_M, D0], [BLOCK_M, D1]
    if SIGN != 1:
        b_k0, b_k1 = b_k0 * SIGN, b_k1 * SIGN
    dk0 = tl.zeros((BLOCK_M, D0), tl.float32)
    dv0 = tl.zeros((BLOCK_M, D0), tl.float32)
    dk1 = tl.zeros((BLOCK_M, D1 if D1 else 1), tl.float32)
    dv1 = tl.zeros((BLOCK_M, D1 if D1 else 1), tl.float32)
    queries = tl.load(p_queries + n)  # [BLOCK_N]

    if FULL:
        for j in tl.range(0, n_full, num_stages=NUM_STAGES):
            next_queries = tl.load(p_queries + (j + 1) * BLOCK_N + n)  # [BLOCK_N]
            b_q0, b_q1 = load_rows(q_ptr, queries, stride_qn, HEAD_DIM, D0, D1)
            b_g0, b_g1 = load_rows(g_ptr, queries, stride_gn, HEAD_DIM, D0, D1)
            lse, delta = tl.load(lse_ptr + queries), tl.load(delta_ptr + queries)  # [BLOCK_N]
            b_s = products(b_k0, b_k1, b_q0, b_q1, D1)
            dk0, dk1, dv0, dv1 = add_queries(
                b_s, b_v0, b_v1, lse, delta, b_q0, b_q1, b_g0, b_g1, dk0, dk1, dv0, dv1, scale_log2, D1
            )
            queries = next_queries

    if PARTIAL:
        left_ptr, right_ptr, b_left = masks_of(p_item, left_ptr, right_ptr, m, h, BLOCK_M, BLOCK_N, RANK, MASK_HEADS)
        for j in tl.range(n_full, n_steps, num_stages=NUM_STAGES):
            next_queries = tl.load(p_queries + (j + 1) * BLOCK_N + n)  # [BLOCK_N]
            b_q0, b_q1 = load_rows(q_ptr, queries, stride_qn, HEAD_DIM, D0, D1)
            b_g0, b_g1 = load_rows(g_ptr, queries, stride_gn, HEAD_DIM, D0, D1)
            lse, delta = tl.load(lse_ptr + queries), tl.load(delta_ptr + queries)  # [BLOCK_N]
            b_s = products(b_k0, b_k1, b_q0, b_q1, D1)
            step = (j - n_full).to(tl.int64)
            if RANK == 0:
                p_bias = right_ptr + step * (MASK_HEADS * BLOCK_M * BLOCK_N)
                b_bias = tl.load(p_bias + m[:, None] * BLOCK_N + n[None, :])  # [BLOCK_M, BLOCK_N]
                b_s += (b_bias - tl.load(peak_ptr + queries)[None, :]) * mask_scale
            else:
                b_s = masked(b_s, b_left, right_ptr, step, m, n, BLOCK_M, BLOCK_N, RANK, MASK_HEADS)
            dk0, dk1, dv0, dv1 = add_queries(
                b_s, b_v0, b_v1, lse, delta, b_q0, b_q1, b_g0, b_g1, dk0, dk1, dv0, dv1, scale_log2, D1
            )
            queries = next_queries

    dk0, dk1 = dk0 * scale, dk1 * scale
    part = -1
    if SPLIT:
        part = tl.load(p_item + ITEM_PART)
    if part < 0:
        store_sums(dk_ptr, rows, dk0, dk1, m_rows, HEAD_DIM, D0, D1)
        store_sums(dv_ptr, rows, dv0, dv1, m_rows, HEAD_DIM, D0, D1)
    elif SPLIT:
        count_ptr, n_parts, part_rows, first, at = part_of(part_ptr, count_ptr, part, n_hb, lane, n_rows, m)
        width: tl.constexpr = 2 * (D0 + D1)
        keep_sums(acc_ptr, at, dk0, dk1, m_rows, 0, width, D0, D1)
        keep_sums(acc_ptr, at, dv0, dv1, m_rows, D0 + D1, width, D0, D1)
        tl.debug_barrier()
        done = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
        if done == n_parts - 1:
            # For the next call.
            tl.store(count_ptr, 0)
            acc_ptr += first * width
            if n_rows > FEW_ROWS:
                add_parts(acc_ptr, dk_ptr, rows, m_rows, n_parts, part_rows, 0, width, BLOCK_M, HEAD_DIM, D0, D1)
                add_parts(acc_ptr, dv_ptr, rows, m_rows, n_parts, part_rows, D0 + D1, width, BLOCK_M, HEAD_DIM, D0, D1)
            else:
                for row in range(n_rows):
                    k_row = first_row + row
                    if not ORDERED:
                        k_row = tl.load(row_ptr + k_row)
                    p_dk, p_dv = dk_ptr + k_row * HEAD_DIM, dv_ptr + k_row * HEAD_DIM
                    add_parts_of_row(acc_ptr, p_dk, row, n_parts, part_rows, 0, width, HEAD_DIM, D0, D1)
                    add_parts_of_row(acc_ptr, p_dv, row, n_parts, part_rows, D0 + D1, width, HEAD_DIM, D0, D1)


@triton.jit
def add_keys(b_s, b_dp, delta, b_k0, b_k1, m_i, l_i, acc0, acc1, scale_log2, D1: tl.constexpr):
    """``(m_i, l_i, acc0, acc1)`` after a step of keys: their scores and the gradients of their weights, [BLOCK_M,
    BLOCK_N] each. The sums are those of the queries' gradient times l_i."""
    m_new = tl.maximum(m_i, tl.max(b_s, 1) * scale_log2)
    b_p = tl.exp2(b_s * scale_log2 - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(b_p, 1)
    b_ds = (b_p * (b_dp - delta[:, None])).to(b_k0.dtype)
    acc0 = tl.dot(b_ds, b_k0, acc0 * alpha[:, None], input_precision="ieee")
    if D1:
        acc1 = tl.dot(b_ds, b_k1, acc1 * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc0, acc1


@triton.jit
def add_queries(
    b_s, b_v0, b_v1, lse, delta, b_q0, b_q1, b_g0, b_g1, dk0, dk1, dv0, dv1, scale_log2,
    D1: tl.constexpr,
):  # fmt: skip
    """``(dk0, dk1, dv0, dv1)`` after a step of queries with the scores [BLOCK_M, BLOCK_N]."""
    # In this order the first product overlaps with the next, and fewer registers are taken.
    b_p = tl.exp2(b_s * scale_log2 - lse[None, :])
    b_w = b_p.to(b_g0.dtype)
    dv0 = tl.dot(b_w, b_g0, dv0, input_precision="ieee")
    if D1:
        dv1 = tl.dot(b_w, b_g1, dv1, input_precision="ieee")
    b_dp = less(b_v0, b_v1, b_g0, b_g1, delta, D1)
    b_ds = (b_p * b_dp).to(b_q0.dtype)
    dk0 = tl.dot(b_ds, b_q0, dk0, input_precision="ieee")
    if D1:
        dk1 = tl.dot(b_ds, b_q1, dk1, input_precision="ieee")
    return dk0, dk1, dv0, dv1


@triton.jit
def less(b_x0, b_x1, b_y0, b_y1, offset, D1: tl.constexpr):
    """Products [R, C] of the rows of two blocks, less the `offset` [C] of each column."""
    # What accumulators begin with takes no register of its own.
    b_s = tl.zeros((b_x0.shape[0], b_y0.shape[0]), tl.float32) - offset[None, :]
    b_s = tl.dot(b_x0, tl.trans(b_y0), b_s, input_precision="ieee")
    if D1:
        b_s = tl.dot(b_x1, tl.trans(b_y1), b_s, input_precision="ieee")
    return b_s


@triton.jit
def store_sums(
    x_ptr, rows, b_x0, b_x1, m_rows,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Write [BLOCK_M, D0] and [BLOCK_M, D1] to the rows of the mask `m_rows`, which lie side by side."""
    write_rows(x_ptr, rows.to(tl.int64), HEAD_DIM, b_x0, b_x1, m_rows, HEAD_DIM, D0, D1)


@triton.jit
def log_sum_exp(m_i, l_i):
    """In base 2; infinite where the sum is zero, so that no weight is left of it."""
    return tl.where(l_i > 0, m_i + tl.log2(tl.where(l_i > 0, l_i, 1.0)), float("inf"))


@triton.jit
def add_parts(
    acc_ptr, x_ptr, rows, m_rows, n_parts, part_rows,
    BEGIN: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Write the sums over the parts of a block with many rows, one part at a time."""
    m = tl.arange(0, BLOCK_M)
    acc0 = tl.zeros((BLOCK_M, D0), tl.float32)
    acc1 = tl.zeros((BLOCK_M, D1 if D1 else 1), tl.float32)
    for i in range(n_parts):
        p_x = acc_ptr + (i * part_rows + m)[:, None] * WIDTH + BEGIN
        acc0 += tl.load(p_x + tl.arange(0, D0)[None, :], mask=m_rows[:, None], other=0.0, cache_modifier=".cg")
        if D1:
            p_x1 = p_x + D0 + tl.arange(0, D1)[None, :]
            acc1 += tl.load(p_x1, mask=m_rows[:, None], other=0.0, cache_modifier=".cg")
    store_sums(x_ptr, rows, acc0, acc1, m_rows, HEAD_DIM, D0, D1)


@triton.jit
def add_parts_of_row(
    acc_ptr, p_out, row, n_parts, part_rows,
    BEGIN: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Write the sum over the parts of one row, `MERGED` at a time."""
    d0 = tl.arange(0, D0)
    d1 = tl.arange(0, D1 if D1 else 1)
    parts = tl.arange(0, MERGED)
    acc0 = tl.zeros((D0,), tl.float32)
    acc1 = tl.zeros((D1 if D1 else 1,), tl.float32)
    for i in range(0, n_parts, MERGED):
        p_x = acc_ptr + ((i + parts) * part_rows + row)[:, None] * WIDTH + BEGIN
        m_parts = (i + parts < n_parts)[:, None]
        acc0 += tl.sum(tl.load(p_x + d0[None, :], mask=m_parts, other=0.0, cache_modifier=".cg"), 0)
        if D1:
            acc1 += tl.sum(tl.load(p_x + D0 + d1[None, :], mask=m_parts, other=0.0, cache_modifier=".cg"), 0)
    tl.store(p_out + d0, acc0.to(p_out.dtype.element_ty), mask=d0 < HEAD_DIM)
    if D1:
        tl.store(p_out + D0 + d1, acc1.to(p_out.dtype.element_ty), mask=D0 + d1 < HEAD_DIM)
