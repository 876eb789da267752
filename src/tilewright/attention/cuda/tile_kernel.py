"""A work list as one fused attention kernel for NVIDIA GPUs (stages T3 and T5).

One program computes one work item of one head: a block of BLOCK_M queries against steps of BLOCK_N keys, gathered by
their indices, which are loaded one step ahead. Masks are products of factors (`mask_factors`), which the tensor cores
add to the scores; where there are none, or there is a bias, they are tiles. The parts of a split item leave their sums
in scratch memory, and the part that finishes last merges them.
"""

import triton
import triton.language as tl

from tilewright.attention.cuda.tile_lists import BYTES, INTERVALS, Item, Part
from tilewright.devices.cuda.online_softmax import load_rows, products, store_rows, update

# The square root of what a mask takes off a forbidden score: above any score, and held by the type of its factors.
# ASSUME: products |q . k| stay below half of that: 2**99, and in float16 2**29, which no values up to 1,024 exceed.
FACTOR, FACTOR_HALF = 2.0**50, 2.0**15
# What m_i begins with where there are masks: above all that is forbidden, below all that is allowed.
FLOOR, FLOOR_HALF = tl.constexpr(-0.5 * FACTOR**2), tl.constexpr(-0.5 * FACTOR_HALF**2)
# What half a key beyond the end of an interval takes off is more than twice the floor, and half a key inside is more
# than any score.
PER_KEY = tl.constexpr(4 * FACTOR**2)
# In place of the rank of factors.
BOUNDS, FLAGS = tl.constexpr(INTERVALS), tl.constexpr(BYTES)
# Of the number of a column, the bits that differ between the threads of a product: of every eight, each has two.
LANES = tl.constexpr(6)
# Split blocks of up to FEW_ROWS rows are merged row by row, MERGED parts at a time.
FEW_ROWS = tl.constexpr(4)
MERGED = tl.constexpr(16)
# Where the fields of a work item and of a part stand in their records.
ITEM_FIRST_ROW = tl.constexpr(int(Item.FIRST_ROW))
ITEM_ROWS = tl.constexpr(int(Item.ROWS))
ITEM_FIRST_STEP = tl.constexpr(int(Item.FIRST_STEP))
ITEM_FULL_STEPS = tl.constexpr(int(Item.FULL_STEPS))
ITEM_STEPS = tl.constexpr(int(Item.STEPS))
ITEM_MASK_STEP = tl.constexpr(int(Item.MASK_STEP))
ITEM_LEFT_FACTOR = tl.constexpr(int(Item.LEFT_FACTOR))
ITEM_PART = tl.constexpr(int(Item.PART))
ITEM_SIZE = tl.constexpr(len(Item))
PART_GROUP = tl.constexpr(int(Part.GROUP))
PART_COUNT = tl.constexpr(int(Part.COUNT))
PART_SCRATCH_ROW = tl.constexpr(int(Part.SCRATCH_ROW))
PART_NUMBER = tl.constexpr(int(Part.NUMBER))
PART_SIZE = tl.constexpr(len(Part))


# Batches differ from call to call: nothing is compiled for one.
@triton.jit(do_not_specialize=["n_items", "n_hb"])
def tilewright_tile_attention(
    q_ptr, k_ptr, v_ptr, o_ptr,
    item_ptr, row_ptr, key_ptr, left_ptr, right_ptr, part_ptr, acc_ptr, stat_ptr, count_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on,
    n_items, n_hb, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    RANK: tl.constexpr, HEADS: tl.constexpr, MASK_HEADS: tl.constexpr, FULL: tl.constexpr, PARTIAL: tl.constexpr,
    SPLIT: tl.constexpr, ORDERED: tl.constexpr, SIGN: tl.constexpr, ACROSS: tl.constexpr, NUM_STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """See the module. Grid: (n_hb, ., .), in all at least `n_items` times; n_hb: heads times batch.

    ACROSS: 0, or where heads have patterns of their own, see `tile_lists.of_units`, the step from a head of an item to
    the next, heads of all images counted through: n_hb is how many heads an item has then.

    item_ptr: int32 [items, ITEM_SIZE], records of `tile_lists.Item`. row_ptr: int32, the position of each query of the
    order (not read if ORDERED). key_ptr: int32 [steps + 1, BLOCK_N], the positions of the keys of a step. left_ptr [.,
    BLOCK_M, RANK], right_ptr [steps, BLOCK_N, RANK]: mask factors; with RANK INTERVALS, right_ptr [steps, 2, BLOCK_M],
    see `room`; with RANK BYTES, right_ptr uint8 [steps, BLOCK_M, BLOCK_N], 255 where a pair is not allowed, else 0;
    with RANK 0, right_ptr [steps, MASK_HEADS, BLOCK_M, BLOCK_N] is added to the scores, -inf where it is not. part_ptr:
    int32 [parts, PART_SIZE], records of `tile_lists.Part`. acc_ptr [rows * n_hb, D0 + D1], stat_ptr [rows * n_hb, 2]
    for the rows of all parts, count_ptr [groups, n_hb], zeros. scale_log2: above zero; SIGN: of the scale, 0 for none.
    WIDE: the tokens of a head span 2**31 values or more.
    """
    lane, item = tl.program_id(0), tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    if item >= n_items:
        return
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    p_item, _, b, h, first_row, n_rows, p_keys, n_full, n_steps, rows = work_item(
        item_ptr, row_ptr, key_ptr, item, lane, m, BLOCK_N, HEADS, ORDERED, ACROSS
    )
    head = h.to(tl.int64)
    if WIDE:
        stride_qn, stride_kn = tl.cast(stride_qn, tl.int64), tl.cast(stride_kn, tl.int64)
        stride_vn, stride_on = tl.cast(stride_vn, tl.int64), tl.cast(stride_on, tl.int64)
    q_ptr += b * stride_qb + head * stride_qh
    k_ptr += b * stride_kb + head * stride_kh
    v_ptr += b * stride_vb + head * stride_vh
    o_ptr += b * stride_ob + head * stride_oh
    b_q0, b_q1 = load_rows(q_ptr, rows, stride_qn, HEAD_DIM, D0, D1)  # [BLOCK_M, D0], [BLOCK_M, D1]
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
            b_s = products(b_q0, b_q1, b_k0, b_k1, D1)
            b_v0, b_v1 = load_rows(v_ptr, keys, stride_vn, HEAD_DIM, D0, D1)
            m_i, l_i, acc0, acc1 = update(b_s, b_v0, b_v1, m_i, l_i, acc0, acc1, scale_log2, D1)
            keys = next_keys

    if PARTIAL:
        left_ptr, right_ptr, b_left = masks_of(p_item, left_ptr, right_ptr, m, h, BLOCK_M, BLOCK_N, RANK, MASK_HEADS)
        for j in tl.range(n_full, n_steps, num_stages=NUM_STAGES):
            next_keys = tl.load(p_keys + (j + 1) * BLOCK_N + n)  # [BLOCK_N]
            b_k0, b_k1 = load_rows(k_ptr, keys, stride_kn, HEAD_DIM, D0, D1)
            b_s = products(b_q0, b_q1, b_k0, b_k1, D1)
            b_s = masked(b_s, b_left, right_ptr, (j - n_full).to(tl.int64), m, n, BLOCK_M, BLOCK_N, RANK, MASK_HEADS)
            b_v0, b_v1 = load_rows(v_ptr, keys, stride_vn, HEAD_DIM, D0, D1)
            m_i, l_i, acc0, acc1 = update(b_s, b_v0, b_v1, m_i, l_i, acc0, acc1, scale_log2, D1)
            keys = next_keys

    m_rows = m < n_rows
    part = -1
    if SPLIT:
        part = tl.load(p_item + ITEM_PART)
    if part < 0:
        if PARTIAL:
            # Rows without an allowed key.
            l_i = tl.where(l_i > 0, l_i, 1.0)
        store_rows(o_ptr, rows, stride_on, acc0, acc1, l_i, m_rows, HEAD_DIM, D0, D1)
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
                merge_block(
                    acc_ptr, stat_ptr, o_ptr, rows, stride_on, m_rows, n_parts, part_rows, BLOCK_M, HEAD_DIM, D0, D1
                )
            else:
                for row in range(n_rows):
                    o_row = first_row + row
                    if not ORDERED:
                        o_row = tl.load(row_ptr + o_row)
                    merge_row(acc_ptr, stat_ptr, o_ptr + o_row * stride_on, row, n_parts, part_rows, HEAD_DIM, D0, D1)


@triton.jit
def work_item(
    item_ptr, row_ptr, key_ptr, item, lane, m,
    BLOCK_N: tl.constexpr, HEADS: tl.constexpr, ORDERED: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """``(its record, the head of all images, image, head, first row, rows, its keys, steps without a mask, steps,
    positions of the rows m)`` of a work item for one of its heads, `lane`. Rows beyond the last are that one."""
    p_item = item_ptr + item * (ITEM_SIZE + (1 if ACROSS else 0))
    hb = lane
    if ACROSS:
        hb = tl.load(p_item + ITEM_SIZE) + lane * ACROSS
    # A batch, and all heads of an image, may span more than 2**31 values.
    b, h = (hb // HEADS).to(tl.int64), hb % HEADS
    first_row, n_rows = tl.load(p_item + ITEM_FIRST_ROW), tl.load(p_item + ITEM_ROWS)
    p_keys = key_ptr + tl.load(p_item + ITEM_FIRST_STEP).to(tl.int64) * BLOCK_N
    n_full, n_steps = tl.load(p_item + ITEM_FULL_STEPS), tl.load(p_item + ITEM_STEPS)
    rows = first_row + tl.minimum(m, n_rows - 1)
    if not ORDERED:
        rows = tl.load(row_ptr + rows)
    return p_item, hb, b, h, first_row, n_rows, p_keys, n_full, n_steps, rows


@triton.jit
def masks_of(
    p_item, left_ptr, right_ptr, m, h,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, MASK_HEADS: tl.constexpr,
):  # fmt: skip
    """``(left_ptr, right_ptr, left factor)`` of an item's masks; the factor is of no use where they have none."""
    mask_step = tl.load(p_item + ITEM_MASK_STEP).to(tl.int64)
    b_left = m
    if RANK == BOUNDS:
        right_ptr += mask_step * (2 * BLOCK_M)
    elif RANK > FLAGS:
        r = tl.arange(0, RANK)
        left_ptr += tl.load(p_item + ITEM_LEFT_FACTOR).to(tl.int64) * (BLOCK_M * RANK)
        b_left = tl.load(left_ptr + m[:, None] * RANK + r[None, :])  # [BLOCK_M, RANK]
        right_ptr += mask_step * (RANK * BLOCK_N)
    else:
        right_ptr += (mask_step * MASK_HEADS + h % MASK_HEADS) * (BLOCK_M * BLOCK_N)
    return left_ptr, right_ptr, b_left


@triton.jit
def masked(
    b_s, b_left, right_ptr, step, m, n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, MASK_HEADS: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M, BLOCK_N] with the mask of a step, of an item's masks."""
    if RANK == BOUNDS:
        p_bounds = right_ptr + step * (2 * BLOCK_M) + m
        b_s = tl.minimum(b_s, room(n, tl.load(p_bounds), tl.load(p_bounds + BLOCK_M)))
    elif RANK > FLAGS:
        r = tl.arange(0, RANK)
        b_right = tl.load(right_ptr + step * (RANK * BLOCK_N) + r[:, None] + n[None, :] * RANK)  # [RANK, BLOCK_N]
        b_s = tl.dot(b_left, b_right, b_s, input_precision="ieee")
    else:
        p_mask = right_ptr + step * (MASK_HEADS * BLOCK_M * BLOCK_N)
        b_mask = tl.load(p_mask + m[:, None] * BLOCK_N + n[None, :])  # [BLOCK_M, BLOCK_N]
        # As the highest byte of a float, 255 is -2**127, far below the floor. No unit converts bytes as fast.
        b_s += (b_mask.to(tl.uint32) << 24).to(tl.float32, bitcast=True) if RANK == FLAGS else b_mask
    return b_s


@triton.jit
def room(n, middle, half):
    """[BLOCK_M, BLOCK_N]: how far each of the keys `n` lies inside of an interval, below zero outside, times PER_KEY.

    middle, half: [BLOCK_M], of the interval and of its length, times PER_KEY, too.
    """
    # What differs between threads is taken off the rows, once, and the rest of a key's number is a constant then. Two
    # sums of floats and the least of two take fewer instructions than comparisons, and units with more lanes do them.
    lane, rest = (n & LANES).to(tl.float32) * PER_KEY, (n & ~LANES).to(tl.float32) * PER_KEY
    return half[:, None] - tl.abs(rest[None, :] - (middle[:, None] - lane[None, :]))


@triton.jit
def part_of(part_ptr, count_ptr, part, n_hb, lane, n_rows, m):
    """``(counter of the block, its parts, rows from one to the next, first scratch row of all, scratch rows)`` of a
    part of a split block."""
    p_part = part_ptr + part * PART_SIZE
    group = tl.load(p_part + PART_GROUP)
    n_parts = tl.load(p_part + PART_COUNT)
    # Scratch rows of all heads may hold more than 2**31 values.
    part_rows = n_hb.to(tl.int64) * n_rows
    first = tl.load(p_part + PART_SCRATCH_ROW).to(tl.int64) * n_hb + lane * n_rows
    at = first + tl.load(p_part + PART_NUMBER) * part_rows + m
    return count_ptr + group.to(tl.int64) * n_hb + lane, n_parts, part_rows, first, at


@triton.jit
def keep_sums(
    acc_ptr, at, b_x0, b_x1, m_rows,
    BEGIN: tl.constexpr, WIDTH: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Leave [BLOCK_M, D0] and [BLOCK_M, D1] in the scratch rows `at` of WIDTH values, from value BEGIN on."""
    p_x = acc_ptr + at[:, None] * WIDTH + BEGIN
    tl.store(p_x + tl.arange(0, D0)[None, :], b_x0, mask=m_rows[:, None])
    if D1:
        tl.store(p_x + D0 + tl.arange(0, D1)[None, :], b_x1, mask=m_rows[:, None])


@triton.jit
def merge_block(
    acc_ptr, stat_ptr, o_ptr, rows, stride_on, m_rows, n_parts, part_rows,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a block with many rows, one part at a time; returns ``(m_i, l_i)``, [BLOCK_M] each.

    A part without an allowed key has sums of zero.
    """
    m = tl.arange(0, BLOCK_M)
    d0 = tl.arange(0, D0)
    m_i = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc0 = tl.zeros((BLOCK_M, D0), tl.float32)
    acc1 = tl.zeros((BLOCK_M, D1 if D1 else 1), tl.float32)
    for i in range(n_parts):
        at = i * part_rows + m
        m_part = tl.load(stat_ptr + at * 2, mask=m_rows, other=0.0, cache_modifier=".cg")  # [BLOCK_M]
        l_part = tl.load(stat_ptr + at * 2 + 1, mask=m_rows, other=0.0, cache_modifier=".cg")  # [BLOCK_M]
        m_new = tl.maximum(m_i, m_part)
        alpha, beta = tl.exp2(m_i - m_new), tl.exp2(m_part - m_new)
        l_i = l_i * alpha + l_part * beta
        p_acc = acc_ptr + at[:, None] * (D0 + D1)
        b_acc0 = tl.load(p_acc + d0[None, :], mask=m_rows[:, None], cache_modifier=".cg")  # [BLOCK_M, D0]
        acc0 = acc0 * alpha[:, None] + b_acc0 * beta[:, None]
        if D1:
            d1 = D0 + tl.arange(0, D1)
            b_acc1 = tl.load(p_acc + d1[None, :], mask=m_rows[:, None], cache_modifier=".cg")  # [BLOCK_M, D1]
            acc1 = acc1 * alpha[:, None] + b_acc1 * beta[:, None]
        m_i = m_new
    store_rows(o_ptr, rows, stride_on, acc0, acc1, tl.where(l_i > 0, l_i, 1.0), m_rows, HEAD_DIM, D0, D1)
    return m_i, l_i


@triton.jit
def merge_row(
    acc_ptr, stat_ptr, o_ptr, row, n_parts, part_rows,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row, `MERGED` at a time; returns ``(m_i, l_i)``, as of `merge_block`."""
    d0 = tl.arange(0, D0)
    parts = tl.arange(0, MERGED)
    m_i = -float("inf")
    l_i = 0.0
    acc0 = tl.zeros((D0,), tl.float32)
    acc1 = tl.zeros((D1 if D1 else 1,), tl.float32)
    for i in range(0, n_parts, MERGED):
        at = (i + parts) * part_rows + row
        m_parts = i + parts < n_parts
        l_part = tl.load(stat_ptr + at * 2 + 1, mask=m_parts, other=0.0, cache_modifier=".cg")  # [MERGED]
        m_part = tl.load(stat_ptr + at * 2, mask=m_parts, other=-float("inf"), cache_modifier=".cg")  # [MERGED]
        p_acc = acc_ptr + at[:, None] * (D0 + D1)
        b_acc0 = tl.load(p_acc + d0[None, :], mask=m_parts[:, None], other=0.0, cache_modifier=".cg")  # [MERGED, D0]
        m_new = tl.maximum(m_i, tl.max(m_part, 0))
        alpha, beta = tl.exp2(m_i - m_new), tl.exp2(m_part - m_new)
        l_i = l_i * alpha + tl.sum(l_part * beta, 0)
        acc0 = acc0 * alpha + tl.sum(b_acc0 * beta[:, None], 0)
        if D1:
            d1 = D0 + tl.arange(0, D1)
            b_acc1 = tl.load(
                p_acc + d1[None, :], mask=m_parts[:, None], other=0.0, cache_modifier=".cg"
            )  # [MERGED, D1]
            acc1 = acc1 * alpha + tl.sum(b_acc1 * beta[:, None], 0)
        m_i = m_new
    total = tl.where(l_i > 0, l_i, 1.0)
    tl.store(o_ptr + d0, (acc0 / total).to(o_ptr.dtype.element_ty), mask=d0 < HEAD_DIM)
    if D1:
        d1 = D0 + tl.arange(0, D1)
        tl.store(o_ptr + d1, (acc1 / total).to(o_ptr.dtype.element_ty), mask=d1 < HEAD_DIM)
    return m_i, l_i
