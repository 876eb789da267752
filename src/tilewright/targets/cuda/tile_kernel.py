"""A work list as one fused attention kernel for NVIDIA GPUs (stages T3 and T5).

One program attends one work item of one head: a tile of M queries against steps of N keys, brought together by their
indices, which are fetched a step ahead in registers. Masks come as products (`mask_factors`), which the tensor cores
add to the scores, or else, and with a bias, as tiles. Parts of a split item leave their sums in scratch memory;
whichever part is last merges them.
"""

import triton
import triton.language as tl

# The square root of what a mask takes off a forbidden score: above any score, and held by the type of its factors.
# ASSUME: products |q . k| stay below half of that: 2**99, and in float16 2**29, which no values up to 1,024 exceed.
FACTOR, FACTOR_HALF = 2.0**50, 2.0**15
# What a row's greatest score begins with where there are masks: above all that is forbidden, below all that is allowed.
FLOOR, FLOOR_HALF = tl.constexpr(-0.5 * FACTOR**2), tl.constexpr(-0.5 * FACTOR_HALF**2)
# Split blocks of up to so many rows are merged row by row, so many parts at a time.
FEW_ROWS = tl.constexpr(4)
PARTS = tl.constexpr(16)


# Batches differ from call to call: nothing is compiled for one.
@triton.jit(do_not_specialize=["n_items", "n_hb"])
def attend(
    q_ptr, k_ptr, v_ptr, o_ptr,
    item_ptr, row_ptr, key_ptr, left_ptr, right_ptr, part_ptr, acc_ptr, stat_ptr, count_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    n_items, n_hb, scale_log2,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, RANK: tl.constexpr,
    HEADS: tl.constexpr, MASK_HEADS: tl.constexpr, FULL: tl.constexpr, PARTIAL: tl.constexpr, SPLIT: tl.constexpr,
    ORDERED: tl.constexpr, SIGN: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """See the module. Grid: (n_hb, ., .), in all at least `n_items` times; n_hb: heads times batch.

    item_ptr: int32 [items, 8]: first row, rows, first key step, full steps, all steps, first mask step, left factor,
    part (-1: whole). row_ptr: int32, where each query of the order lies (unread if ORDERED). key_ptr: int32 [steps + 1,
    N], where the keys of a step lie. left_ptr [., M, RANK], right_ptr [steps, N, RANK]: mask factors; with RANK 0,
    right_ptr [steps, MASK_HEADS, M, N] is added to the scores, -inf where a pair is not allowed. part_ptr: int32
    [parts, 4]: group, parts in it, scratch rows before them, own number. acc_ptr [rows * n_hb, D0 + D1], stat_ptr
    [rows * n_hb, 2] for the rows of all parts, count_ptr [groups, n_hb], zeros. scale_log2: above zero; SIGN: of the
    scale, 0 for none. D: the head dim, at most D0 + D1, powers of two, D1 possibly 0. WIDE: the tokens of a head span
    2**31 values or more.
    """
    hb, item = tl.program_id(0), tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    if item >= n_items:
        return
    # A batch, and all heads of an image, may span more than 2**31 values.
    b, h = (hb // HEADS).to(tl.int64), hb % HEADS
    head = h.to(tl.int64)
    if WIDE:
        q_n, k_n = tl.cast(q_n, tl.int64), tl.cast(k_n, tl.int64)
        v_n, o_n = tl.cast(v_n, tl.int64), tl.cast(o_n, tl.int64)
    record = item_ptr + item * 8
    row_lo, n_rows = tl.load(record), tl.load(record + 1)
    step, n_full, n_all = tl.load(record + 2), tl.load(record + 3), tl.load(record + 4)
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    rows = row_lo + tl.minimum(m, n_rows - 1)
    if not ORDERED:
        rows = tl.load(row_ptr + rows)
    q_ptr += b * q_b + head * q_h
    k_ptr += b * k_b + head * k_h
    v_ptr += b * v_b + head * v_h
    o_ptr += b * o_b + head * o_h
    q0, q1 = _rows(q_ptr, rows, q_n, D, D0, D1)
    if SIGN != 1:
        q0, q1 = q0 * SIGN, q1 * SIGN
    acc0 = tl.zeros((M, D0), tl.float32)
    acc1 = tl.zeros((M, D1 if D1 else 1), tl.float32)
    floor: tl.constexpr = FLOOR_HALF if RANK and left_ptr.dtype.element_ty == tl.float16 else FLOOR
    top = tl.full((M,), 1.0, tl.float32) * (floor * scale_log2 if PARTIAL else -float("inf"))
    total = tl.zeros((M,), tl.float32)
    key_ptr += step.to(tl.int64) * N
    keys = tl.load(key_ptr + n)

    if FULL:
        for j in tl.range(0, n_full, num_stages=STAGES):
            following = tl.load(key_ptr + (j + 1) * N + n)
            s = _scores(q0, q1, k_ptr, keys, k_n, D, D0, D1)
            v0, v1 = _rows(v_ptr, keys, v_n, D, D0, D1)
            top, total, acc0, acc1 = _fold(s, v0, v1, top, total, acc0, acc1, scale_log2, D1)
            keys = following

    if PARTIAL:
        mask_step = tl.load(record + 5).to(tl.int64)
        if RANK:
            r = tl.arange(0, RANK)
            left_ptr += tl.load(record + 6).to(tl.int64) * (M * RANK)
            left = tl.load(left_ptr + m[:, None] * RANK + r[None, :])
            right_ptr += mask_step * (RANK * N)
        else:
            right_ptr += (mask_step * MASK_HEADS + h % MASK_HEADS) * (M * N)
        for j in tl.range(n_full, n_all, num_stages=STAGES):
            following = tl.load(key_ptr + (j + 1) * N + n)
            s = _scores(q0, q1, k_ptr, keys, k_n, D, D0, D1)
            if RANK:
                right = tl.load(right_ptr + (j - n_full).to(tl.int64) * (RANK * N) + r[:, None] + n[None, :] * RANK)
                s = tl.dot(left, right, s, input_precision="ieee")
            else:
                at = right_ptr + (j - n_full).to(tl.int64) * (MASK_HEADS * M * N)
                s += tl.load(at + m[:, None] * N + n[None, :])
            v0, v1 = _rows(v_ptr, keys, v_n, D, D0, D1)
            top, total, acc0, acc1 = _fold(s, v0, v1, top, total, acc0, acc1, scale_log2, D1)
            keys = following

    live = m < n_rows
    part = -1
    if SPLIT:
        part = tl.load(record + 7)
    if part < 0:
        if PARTIAL:
            # Rows without an allowed key.
            total = tl.where(total > 0, total, 1.0)
        _store(o_ptr, rows, o_n, acc0, acc1, total, live, D, D0, D1)
    elif SPLIT:
        group = tl.load(part_ptr + part * 4)
        n_parts = tl.load(part_ptr + part * 4 + 1)
        # Scratch rows of all heads may hold more than 2**31 values; `size` of them part those of one part and the next.
        size = n_hb.to(tl.int64) * n_rows
        first = tl.load(part_ptr + part * 4 + 2).to(tl.int64) * n_hb + hb * n_rows
        at = first + tl.load(part_ptr + part * 4 + 3) * size + m
        d0 = tl.arange(0, D0)
        tl.store(acc_ptr + at[:, None] * (D0 + D1) + d0[None, :], acc0, mask=live[:, None])
        if D1:
            d1 = D0 + tl.arange(0, D1)
            tl.store(acc_ptr + at[:, None] * (D0 + D1) + d1[None, :], acc1, mask=live[:, None])
        tl.store(stat_ptr + at * 2, top, mask=live)
        tl.store(stat_ptr + at * 2 + 1, total, mask=live)
        tl.debug_barrier()
        count_ptr += group.to(tl.int64) * n_hb + hb
        done = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
        if done == n_parts - 1:
            # For the next call.
            tl.store(count_ptr, 0)
            acc_ptr += first * (D0 + D1)
            stat_ptr += first * 2
            if n_rows > FEW_ROWS:
                _merge_tiles(acc_ptr, stat_ptr, o_ptr, rows, o_n, live, n_parts, size, M, D, D0, D1)
            else:
                for row in range(n_rows):
                    to = row_lo + row
                    if not ORDERED:
                        to = tl.load(row_ptr + to)
                    _merge_row(acc_ptr, stat_ptr, o_ptr + to * o_n, row, n_parts, size, D, D0, D1)


@triton.jit
def _rows(ptr, rows, stride, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Rows [R, D0] and [R, D1] of a matrix of D columns, zeros beyond those."""
    d0 = tl.arange(0, D0)
    x0 = _columns(ptr + rows[:, None] * stride + d0[None, :], d0, D, D0)
    x1 = x0
    if D1:
        d1 = D0 + tl.arange(0, D1)
        x1 = _columns(ptr + rows[:, None] * stride + d1[None, :], d1, D, D0 + D1)
    return x0, x1


@triton.jit
def _columns(ptr, d, D: tl.constexpr, END: tl.constexpr):
    """Values at `ptr` for the columns `d`, which end with END; zeros from column D on."""
    return tl.load(ptr) if END <= D else tl.load(ptr, mask=(d < D)[None, :], other=0.0)


@triton.jit
def _scores(q0, q1, k_ptr, keys, k_n, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Products [M, N] of the queries with the keys at `keys`."""
    # Keys are loaded as values are: their addresses are worked out once, which saves instructions and registers.
    k0, k1 = _rows(k_ptr, keys, k_n, D, D0, D1)
    s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    if D1:
        s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
    return s


@triton.jit
def _fold(s, v0, v1, top, total, acc0, acc1, scale_log2, D1: tl.constexpr):
    """One step of the running softmax: scores [M, N] and values into maximum (scaled), sum and weighted values."""
    new = tl.maximum(top, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - new[:, None])
    fade = tl.exp2(top - new)
    total = total * fade + tl.sum(p, 1)
    w = p.to(v0.dtype)
    acc0 = tl.dot(w, v0, acc0 * fade[:, None], input_precision="ieee")
    if D1:
        acc1 = tl.dot(w, v1, acc1 * fade[:, None], input_precision="ieee")
    return new, total, acc0, acc1


@triton.jit
def _store(o_ptr, rows, o_n, acc0, acc1, total, live, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Write the weighted values over their sums."""
    d0 = tl.arange(0, D0)
    out0 = (acc0 / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + rows[:, None] * o_n + d0[None, :], out0, mask=live[:, None] & (d0 < D)[None, :])
    if D1:
        d1 = D0 + tl.arange(0, D1)
        out1 = (acc1 / total[:, None]).to(o_ptr.dtype.element_ty)
        tl.store(o_ptr + rows[:, None] * o_n + d1[None, :], out1, mask=live[:, None] & (d1 < D)[None, :])


@triton.jit
def _merge_tiles(
    acc_ptr, stat_ptr, o_ptr, rows, o_n, live, n_parts, size,
    M: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a block with many rows, a tile at a time. A part without an allowed key has sums of zero."""
    m = tl.arange(0, M)
    d0 = tl.arange(0, D0)
    top = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc0 = tl.zeros((M, D0), tl.float32)
    acc1 = tl.zeros((M, D1 if D1 else 1), tl.float32)
    for i in range(n_parts):
        at = i * size + m
        log = tl.load(stat_ptr + at * 2, mask=live, other=0.0, cache_modifier=".cg")
        own = tl.load(stat_ptr + at * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
        new = tl.maximum(top, log)
        fade, rise = tl.exp2(top - new), tl.exp2(log - new)
        total = total * fade + own * rise
        value0 = tl.load(acc_ptr + at[:, None] * (D0 + D1) + d0[None, :], mask=live[:, None], cache_modifier=".cg")
        acc0 = acc0 * fade[:, None] + value0 * rise[:, None]
        if D1:
            d1 = D0 + tl.arange(0, D1)
            value1 = tl.load(acc_ptr + at[:, None] * (D0 + D1) + d1[None, :], mask=live[:, None], cache_modifier=".cg")
            acc1 = acc1 * fade[:, None] + value1 * rise[:, None]
        top = new
    total = tl.where(total > 0, total, 1.0)
    _store(o_ptr, rows, o_n, acc0, acc1, total, live, D, D0, D1)


@triton.jit
def _merge_row(
    acc_ptr, stat_ptr, o_ptr, row, n_parts, size,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row, `PARTS` at a time. A part without an allowed key has sums of zero."""
    d0 = tl.arange(0, D0)
    parts = tl.arange(0, PARTS)
    top = -float("inf")
    total = 0.0
    out0 = tl.zeros((D0,), tl.float32)
    out1 = tl.zeros((D1 if D1 else 1,), tl.float32)
    for i in range(0, n_parts, PARTS):
        at = (i + parts) * size + row
        there = i + parts < n_parts
        own = tl.load(stat_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        log = tl.load(stat_ptr + at * 2, mask=there, other=-float("inf"), cache_modifier=".cg")
        to = at[:, None] * (D0 + D1)
        value0 = tl.load(acc_ptr + to + d0[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
        new = tl.maximum(top, tl.max(log, 0))
        fade, rise = tl.exp2(top - new), tl.exp2(log - new)
        total = total * fade + tl.sum(own * rise, 0)
        out0 = out0 * fade + tl.sum(value0 * rise[:, None], 0)
        if D1:
            d1 = D0 + tl.arange(0, D1)
            value1 = tl.load(acc_ptr + to + d1[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
            out1 = out1 * fade + tl.sum(value1 * rise[:, None], 0)
        top = new
    total = tl.where(total > 0, total, 1.0)
    tl.store(o_ptr + d0, (out0 / total).to(o_ptr.dtype.element_ty), mask=d0 < D)
    if D1:
        d1 = D0 + tl.arange(0, D1)
        tl.store(o_ptr + d1, (out1 / total).to(o_ptr.dtype.element_ty), mask=d1 < D)
