"""Slices on an NVIDIA GPU (stage T5): kernels that list keys, rank groups, pack lists into bits, and attend.

What they pass to each other are the tensors of `slices.layout`. No grid depends on numbers that only the device knows.
"""

import triton
import triton.language as tl

from tilewright.devices.cuda.bounded_softmax import update_below
from tilewright.devices.cuda.online_softmax import load_rows, scores, store_rows, update
from tilewright.slices import layout

OVERFLOW, EMPTY = tl.constexpr(layout.OVERFLOW), tl.constexpr(layout.EMPTY)
LISTED, LISTED_HIGH = tl.constexpr(layout.LISTED), tl.constexpr(layout.LISTED_HIGH)
STEP, WORD = tl.constexpr(layout.STEP), tl.constexpr(layout.WORD)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["heads", "groups", "n_keys", "n_words"])
def tilewright_list_keys(
    key_ptr, count_ptr, flag_ptr, stride_fb, stride_fh, stride_fg, heads, groups, n_keys, n_words, capacity,
    BITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """List the keys of each group that are flagged. Grid: (batch * heads * groups,).

    flag_ptr: uint8 [batch, heads, groups, n_keys], strided; with BITS the words of `SliceLists.pack`, contiguous in a
    group. A list that exceeds the capacity is cut; its count says so.
    """
    group = tl.program_id(0)
    g, bh = group % groups, group // groups
    flag_ptr += (bh // heads).to(tl.int64) * stride_fb + (bh % heads).to(tl.int64) * stride_fh
    flag_ptr += g.to(tl.int64) * stride_fg
    key_ptr += group.to(tl.int64) * capacity
    n = tl.arange(0, BLOCK_N)
    count = tl.zeros((), tl.int32)
    last = tl.zeros((), tl.int32)
    for lo in range(0, n_keys, BLOCK_N):
        keys = lo + n
        if BITS:
            b_word = tl.load(flag_ptr + keys // WORD, mask=keys < n_keys, other=0)
            b_kept = (b_word >> (keys % WORD)) & 1  # [BLOCK_N]
        else:
            b_kept = tl.load(flag_ptr + keys, mask=keys < n_keys, other=0).to(tl.int32)  # [BLOCK_N]
        place = count + tl.cumsum(b_kept, 0) - b_kept
        tl.store(key_ptr + place, keys, mask=(b_kept != 0) & (place < capacity))
        last = tl.maximum(last, tl.max(tl.where(b_kept != 0, keys, 0), 0))
        count += tl.sum(b_kept, 0)
    tail = count + tl.arange(0, STEP)
    end = tl.minimum((count + STEP - 1) // STEP * STEP, capacity)
    tl.store(key_ptr + tail, tl.zeros((STEP,), tl.int32) + last, mask=tail < end)
    if BITS:
        # A list that had not fit was packed without all of its keys: it must not seem whole in a larger layout.
        asked = tl.load(flag_ptr + n_words)
        count = tl.where(asked > count, tl.maximum(asked, capacity + 1), count)
    tl.store(count_ptr + group, count)


@triton.jit(do_not_specialize=["n_heads", "groups", "capacity"])
def tilewright_rank_groups(
    order_ptr, state_ptr, count_ptr, n_heads, groups, capacity, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The groups of each head, most keys first, and the state. Grid: (n_heads * cdiv(groups, BLOCK_M) + 1,).

    A group's place is the number of groups before it: those with more keys, or with as many and a smaller number.
    """
    pid = tl.program_id(0)
    blocks = (groups + BLOCK_M - 1) // BLOCK_M
    if pid == n_heads * blocks:
        _write_state(state_ptr, count_ptr, n_heads * groups, capacity, BLOCK_M * BLOCK_N)
    else:
        first = pid // blocks * groups
        i = pid % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        b_own = tl.load(count_ptr + first + i, mask=i < groups, other=0)  # [BLOCK_M]
        place = tl.zeros((BLOCK_M,), tl.int32)
        for lo in range(0, groups, BLOCK_N):
            j = lo + tl.arange(0, BLOCK_N)
            b_other = tl.load(count_ptr + first + j, mask=j < groups, other=-1)[None, :]  # [1, BLOCK_N]
            before = (b_other > b_own[:, None]) | ((b_other == b_own[:, None]) & (j[None, :] < i[:, None]))
            place += tl.sum(before.to(tl.int32), 1)
        tl.store(order_ptr + first + place, i, mask=i < groups)


@triton.jit
def _write_state(state_ptr, count_ptr, n_groups, capacity, BLOCK: tl.constexpr):
    """Write what `SliceLists.state` holds of all groups."""
    n = tl.arange(0, BLOCK)
    overflow, empty = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    listed = tl.zeros((), tl.int64)
    for lo in range(0, n_groups, BLOCK):
        group = lo + n
        b_count = tl.load(count_ptr + group, mask=group < n_groups, other=1)  # [BLOCK]
        overflow = tl.maximum(overflow, tl.max(tl.where(b_count > capacity, group + 1, 0), 0))
        empty = tl.maximum(empty, tl.max(tl.where(b_count == 0, group + 1, 0), 0))
        b_listed = tl.where(group < n_groups, tl.minimum(b_count, capacity), 0)
        listed += tl.sum(b_listed.to(tl.int64), 0)
    tl.store(state_ptr + OVERFLOW, overflow)
    tl.store(state_ptr + EMPTY, empty)
    tl.store(state_ptr + LISTED, (listed & 0x7FFFFFFF).to(tl.int32))
    tl.store(state_ptr + LISTED_HIGH, (listed >> 31).to(tl.int32))


@triton.jit(do_not_specialize=["n_words"])
def tilewright_pack_keys(bit_ptr, key_ptr, count_ptr, n_words, capacity, BLOCK_N: tl.constexpr):
    """Set the bit of each listed key, and the last word of each group to its count. Grid: (groups of all heads,).

    bit_ptr: int32 [groups, n_words + 1], zeros.
    """
    group = tl.program_id(0)
    bit_ptr += group.to(tl.int64) * (n_words + 1)
    key_ptr += group.to(tl.int64) * capacity
    count = tl.load(count_ptr + group)
    # A list that did not fit may hold no keys.
    listed = tl.where(count > capacity, 0, count)
    for lo in range(0, listed, BLOCK_N):
        n = lo + tl.arange(0, BLOCK_N)
        keys = tl.load(key_ptr + n, mask=n < listed, other=0)  # [BLOCK_N]
        b_bit = tl.full((BLOCK_N,), 1, tl.int32) << (keys % WORD)
        tl.atomic_or(bit_ptr + keys // WORD, b_bit, mask=n < listed, sem="relaxed")
    tl.store(bit_ptr + n_words, count)


@triton.jit(do_not_specialize=["n_queries", "groups"])
def tilewright_slice_attention(
    o_ptr, key_ptr, count_ptr, order_ptr, state_ptr, q_ptr, k_ptr, v_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, n_queries, groups, capacity, scale_log2, bound_log2,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RUN: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_STAGES: tl.constexpr, BOUNDED: tl.constexpr, WIDE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Attention of each group to its listed keys. Grid: (batch * heads * groups,), the groups of a head side by side.

    q_ptr, o_ptr: [batch, HEADS, n_queries, HEAD_DIM]; k_ptr, v_ptr: [batch, HEADS, n_keys, HEAD_DIM], all strided.
    lse_ptr: float32 [batch, HEADS, n_queries], or None. BLOCK_M: queries of a group. BLOCK_N: keys a step. RUN: lists
    hold whole aligned runs of so many keys. BOUNDED: no score times scale_log2 exceeds bound_log2. WIDE: the tokens of
    a head span 2**31 values or more. AHEAD: the keys' numbers of a step are loaded in the step before it.
    """
    pid = tl.program_id(0)
    bh = pid // groups
    bad = tl.load(state_ptr + OVERFLOW)
    # The longest lists of a head start first; neighbours in time share the keys and values of the head in the L2 cache.
    g = tl.load(order_ptr + pid)
    group = bh * groups + g
    # Lists of results that are NaN are not read: what they hold may be no keys.
    count = tl.where(bad != 0, 0, tl.load(count_ptr + group))
    b, h = (bh // HEADS).to(tl.int64), (bh % HEADS).to(tl.int64)
    if WIDE:
        stride_qn, stride_kn = tl.cast(stride_qn, tl.int64), tl.cast(stride_kn, tl.int64)
        stride_vn, stride_on = tl.cast(stride_vn, tl.int64), tl.cast(stride_on, tl.int64)
    key_ptr += group.to(tl.int64) * capacity
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    o_ptr += b * stride_ob + h * stride_oh

    rows = g * BLOCK_M + tl.arange(0, BLOCK_M)
    m_rows = rows < n_queries
    rows = tl.minimum(rows, n_queries - 1)
    n = tl.arange(0, BLOCK_N)
    b_q, b_q1 = load_rows(q_ptr, rows, stride_qn, HEAD_DIM, HEAD_DIM, 0)  # [BLOCK_M, HEAD_DIM]
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    acc1 = tl.zeros((BLOCK_M, 1), tl.float32)
    m_i = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    if BOUNDED:
        m_i = tl.where(count > 0, bound_log2, m_i)
    l_i = tl.zeros((BLOCK_M,), tl.float32)

    # The keys of the last step come first: only they need a mask, and nothing waits for them at the end.
    n_full = (count - 1) // BLOCK_N
    if count > 0:
        place = n_full * BLOCK_N + n
        keys = listed_keys(key_ptr, tl.minimum(place, count - 1), RUN)
        b_v, b_v1 = load_rows(v_ptr, keys, stride_vn, HEAD_DIM, HEAD_DIM, 0)  # [BLOCK_N, HEAD_DIM]
        b_s = scores(b_q, b_q1, k_ptr, keys, stride_kn, HEAD_DIM, HEAD_DIM, 0)
        b_s = tl.where((place < count)[None, :], b_s, -float("inf"))
        m_i, l_i, acc, acc1 = _updated(b_s, b_v, b_v1, m_i, l_i, acc, acc1, scale_log2, BOUNDED)
        if AHEAD:
            keys = listed_keys(key_ptr, tl.minimum(n, count - 1), RUN)
            for j in tl.range(0, n_full, num_stages=NUM_STAGES):
                # Never beyond the full steps, where the numbers of a list need not be defined.
                later = _step(key_ptr, tl.minimum(j + 1, n_full - 1) * BLOCK_N, n, RUN, BLOCK_N)
                b_s = scores(b_q, b_q1, k_ptr, keys, stride_kn, HEAD_DIM, HEAD_DIM, 0)
                b_v, b_v1 = load_rows(v_ptr, keys, stride_vn, HEAD_DIM, HEAD_DIM, 0)  # [BLOCK_N, HEAD_DIM]
                m_i, l_i, acc, acc1 = _updated(b_s, b_v, b_v1, m_i, l_i, acc, acc1, scale_log2, BOUNDED)
                keys = later
        else:
            for j in tl.range(0, n_full, num_stages=NUM_STAGES):
                keys = _step(key_ptr, j * BLOCK_N, n, RUN, BLOCK_N)
                b_s = scores(b_q, b_q1, k_ptr, keys, stride_kn, HEAD_DIM, HEAD_DIM, 0)
                b_v, b_v1 = load_rows(v_ptr, keys, stride_vn, HEAD_DIM, HEAD_DIM, 0)  # [BLOCK_N, HEAD_DIM]
                m_i, l_i, acc, acc1 = _updated(b_s, b_v, b_v1, m_i, l_i, acc, acc1, scale_log2, BOUNDED)

    # Groups without keys give zeros and -inf; lists that did not fit give NaN, whatever they hold.
    l_i = tl.where(count == 0, 1.0, l_i)
    l_i = tl.where(bad != 0, float("nan"), l_i)
    store_rows(o_ptr, rows, stride_on, acc, acc1, l_i, m_rows, HEAD_DIM, HEAD_DIM, 0)
    if lse_ptr is not None:
        tl.store(lse_ptr + bh.to(tl.int64) * n_queries + rows, (m_i + tl.log2(l_i)) * LN2, mask=m_rows)


@triton.jit
def _updated(b_s, b_v, b_v1, m_i, l_i, acc, acc1, scale_log2, BOUNDED: tl.constexpr):
    """``(m_i, l_i, acc, acc1)`` after a step."""
    if BOUNDED:
        m_i, l_i, acc, acc1 = update_below(b_s, b_v, b_v1, m_i, l_i, acc, acc1, scale_log2, 0)
    else:
        m_i, l_i, acc, acc1 = update(b_s, b_v, b_v1, m_i, l_i, acc, acc1, scale_log2, 0)
    return m_i, l_i, acc, acc1


@triton.jit
def _step(key_ptr, lo, n, RUN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Numbers of the keys from place `lo` of a list on, all of which are listed."""
    if RUN < BLOCK_N:
        return listed_keys(key_ptr, lo + n, RUN)
    # The keys of a step are neighbours.
    return tl.load(key_ptr + lo // RUN * RUN) + lo % RUN + n


@triton.jit
def listed_keys(key_ptr, place, RUN: tl.constexpr):
    """Numbers of the keys at places of a list."""
    if RUN == 1:
        return tl.load(key_ptr + place)
    return tl.load(key_ptr + place // RUN * RUN) + place % RUN
