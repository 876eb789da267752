"""Packed batches on an NVIDIA GPU (stage T5): kernels that describe, gather, scatter, pad and attend.

What they pass to each other are the lists of `packed.lists`. No grid depends on numbers that only the device knows:
programs without work return at once.
"""

import triton
import triton.language as tl

from tilewright.devices.cuda.online_softmax import load_rows, scores, store_rows, update
from tilewright.packed import lists

BAD, KEPT, ITEMS, EMPTY, STARTS = (tl.constexpr(offset) for offset in range(lists.HEADER + 1))
FIRST_ROW, LENGTH, FIRST_QUERY = (tl.constexpr(field) for field in range(lists.RECORD))
RECORD = tl.constexpr(lists.RECORD)


@triton.jit(do_not_specialize=["n_images", "n_tokens", "capacity", "source_at", "position_at", "work_at"])
def tilewright_pack_lists(
    list_ptr, keep_ptr, length_ptr, n_images, n_tokens, capacity, source_at, position_at, work_at,
    BLOCK_M: tl.constexpr, MOST_ITEMS: tl.constexpr, MOST_TOKENS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Describe a batch: write the whole lists. Grid: (n_images,).

    keep_ptr: uint8 [n_images, n_tokens]. length_ptr: int32 [n_images], the tokens that each image keeps, or None: each
    program then counts the whole batch, rather than wait for the others; that of 32 images has 6 KB. BLOCK_M: queries
    of a work item. MOST_TOKENS, MOST_ITEMS: powers of two that hold the tokens and the work items of an image.
    BLOCK_B: images that are counted at once. BLOCK_R: rows that are written at once.
    """
    b = tl.program_id(0)
    b_keep, length, start, item, kept, n_items, n_empty, bad = _count(
        keep_ptr, length_ptr, b, n_images, n_tokens, capacity, BLOCK_M, MOST_TOKENS, BLOCK_B
    )
    _write_image(
        list_ptr, b, b_keep, length, start, item, kept, n_items, n_empty, bad, n_tokens, capacity, source_at,
        position_at, work_at, BLOCK_M, MOST_ITEMS, MOST_TOKENS,
    )  # fmt: skip
    _write_spare(list_ptr, b, n_images, kept, n_items, bad, capacity, source_at, work_at, BLOCK_M, BLOCK_R)


@triton.jit(do_not_specialize=["n_x", "n_images", "n_tokens", "capacity", "source_at", "position_at", "work_at"])
def tilewright_pack(
    list_ptr, keep_ptr, x_ptr, out_ptr, origin_ptr, stride_xb, stride_xn, n_x,
    n_images, n_tokens, capacity, source_at, position_at, work_at,
    C: tl.constexpr, BLOCK_M: tl.constexpr, MOST_ITEMS: tl.constexpr, MOST_TOKENS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """As `tilewright_pack_lists`, and gather the kept tokens. Grid: (n_images * CHUNKS,).

    x_ptr: [n_images, n_tokens, C], strided. origin_ptr: lists by which the tokens are packed already, [n_x, C], or
    None. out_ptr: [capacity, C]. BLOCK_R, BLOCK_C: rows and columns that are moved at once. CHUNKS: programs of an
    image; the first one writes its lists.
    """
    pid = tl.program_id(0)
    b, chunk = pid // CHUNKS, pid % CHUNKS
    b_keep, length, start, item, kept, n_items, n_empty, bad = _count(
        keep_ptr, None, b, n_images, n_tokens, capacity, BLOCK_M, MOST_TOKENS, BLOCK_B
    )
    if chunk == 0:
        _write_image(
            list_ptr, b, b_keep, length, start, item, kept, n_items, n_empty, bad, n_tokens, capacity, source_at,
            position_at, work_at, BLOCK_M, MOST_ITEMS, MOST_TOKENS,
        )  # fmt: skip

    n = tl.arange(0, MOST_TOKENS)
    r = tl.arange(0, BLOCK_R)
    c = tl.arange(0, BLOCK_C)
    share = (n_tokens + CHUNKS - 1) // CHUNKS
    row = start + tl.sum(tl.where(n < chunk * share, b_keep, 0), 0)
    if bad == 0:
        image = b.to(tl.int64) * stride_xb
        if origin_ptr is not None:
            first = tl.load(origin_ptr + STARTS + b)
        for lo in range(chunk * share, tl.minimum(chunk * share + share, n_tokens), BLOCK_R):
            token = lo + r
            m_token = (r < chunk * share + share - lo) & (token < n_tokens)
            b_kept = tl.load(keep_ptr + b * n_tokens + token, mask=m_token, other=0).to(tl.int32)  # [BLOCK_R]
            x_row = token
            if origin_ptr is not None:
                # A batch that did not fit may keep rows that do not exist.
                x_row = tl.minimum(first + token, n_x - 1)
            p_x = x_ptr + image + x_row.to(tl.int64)[:, None] * stride_xn
            p_out = out_ptr + (row + tl.cumsum(b_kept, 0) - 1).to(tl.int64)[:, None] * C
            for column in range(0, C, BLOCK_C):
                m_x = (b_kept > 0)[:, None] & (column + c < C)[None, :]
                b_x = tl.load(p_x + (column + c)[None, :], mask=m_x)  # [BLOCK_R, BLOCK_C]
                tl.store(p_out + (column + c)[None, :], b_x, mask=m_x)
            row += tl.sum(b_kept, 0)

    # Rows of no image, a share for each program.
    _write_spare(list_ptr, pid, n_images * CHUNKS, kept, n_items, bad, capacity, source_at, work_at, BLOCK_M, BLOCK_R)
    n_packed = tl.where(bad, 0, kept)
    for lo in range(n_packed + pid * BLOCK_R, capacity, n_images * CHUNKS * BLOCK_R):
        p_out = out_ptr + (lo + r).to(tl.int64)[:, None] * C
        b_x = tl.where(bad, float("nan"), tl.zeros((BLOCK_R, BLOCK_C), tl.float32)).to(out_ptr.dtype.element_ty)
        for column in range(0, C, BLOCK_C):
            m_out = (lo + r < capacity)[:, None] & (column + c < C)[None, :]
            tl.store(p_out + (column + c)[None, :], b_x, mask=m_out)


@triton.jit
def _count(
    keep_ptr, length_ptr, b, n_images, n_tokens, capacity,
    BLOCK_M: tl.constexpr, MOST_TOKENS: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """What image b keeps, int32 [MOST_TOKENS], its length, first row and first work item, then of the whole batch: rows
    kept, work items, images that keep nothing, and whether it does not fit. One that does not keeps nothing."""
    n = tl.arange(0, MOST_TOKENS)
    b_keep = tl.load(keep_ptr + b * n_tokens + n, mask=n < n_tokens, other=0).to(tl.int32)  # [MOST_TOKENS]
    length = tl.sum(b_keep, 0)
    start, kept, n_items, item, n_empty = 0, 0, 0, 0, 0
    for lo in range(0, n_images, BLOCK_B):
        i = lo + tl.arange(0, BLOCK_B)
        m_i = i < n_images
        if length_ptr is not None:
            lengths = tl.load(length_ptr + i, mask=m_i, other=0)  # [BLOCK_B]
        else:
            p_keep = keep_ptr + i[:, None] * n_tokens + n[None, :]
            b_all = tl.load(p_keep, mask=m_i[:, None] & (n < n_tokens)[None, :], other=0)  # [BLOCK_B, MOST_TOKENS]
            lengths = tl.sum(b_all.to(tl.int32), 1)
        items = (lengths + BLOCK_M - 1) // BLOCK_M
        start += tl.sum(tl.where(i < b, lengths, 0), 0)
        kept += tl.sum(lengths, 0)
        n_items += tl.sum(items, 0)
        # The longest images come first.
        item += tl.sum(tl.where((lengths > length) | ((lengths == length) & (i < b)), items, 0), 0)
        n_empty += tl.sum((m_i & (lengths == 0)).to(tl.int32), 0)
    bad = (kept > capacity) | (n_empty > 0)
    return b_keep, length, start, item, kept, n_items, n_empty, bad


@triton.jit
def _write_image(
    list_ptr, b, b_keep, length, start, item, kept, n_items, n_empty, bad, n_tokens, capacity, source_at, position_at,
    work_at, BLOCK_M: tl.constexpr, MOST_ITEMS: tl.constexpr, MOST_TOKENS: tl.constexpr,
):  # fmt: skip
    """Write what the lists say of image b, and the header for the first one."""
    if b == 0:
        n_spare = (capacity - tl.where(bad, 0, kept) + BLOCK_M - 1) // BLOCK_M
        tl.store(list_ptr + BAD, bad.to(tl.int32))
        tl.store(list_ptr + KEPT, kept)
        tl.store(list_ptr + ITEMS, tl.where(bad, 0, n_items) + n_spare)
        tl.store(list_ptr + EMPTY, n_empty)
        tl.store(list_ptr + STARTS, 0)
    tl.store(list_ptr + STARTS + 1 + b, tl.minimum(start + length, capacity))
    n = tl.arange(0, MOST_TOKENS)
    m_kept = (b_keep > 0) & (bad == 0)
    rows = start + tl.cumsum(b_keep, 0) - 1
    tl.store(list_ptr + source_at + rows, b * n_tokens + n, mask=m_kept)
    tl.store(list_ptr + position_at + b * n_tokens + n, tl.where(m_kept, rows, -1), mask=n < n_tokens)
    t = tl.arange(0, MOST_ITEMS)
    p_item = list_ptr + work_at + (item + t) * RECORD
    m_item = (t * BLOCK_M < length) & (bad == 0)
    tl.store(p_item + FIRST_ROW, tl.zeros_like(t) + start, mask=m_item)
    tl.store(p_item + LENGTH, tl.zeros_like(t) + length, mask=m_item)
    tl.store(p_item + FIRST_QUERY, t * BLOCK_M, mask=m_item)


@triton.jit
def _write_spare(
    list_ptr, pid, n_programs, kept, n_items, bad, capacity, source_at, work_at,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write a program's share of what the lists say of rows of no image: they are images of one work item each, so that
    all that follows is finite."""
    r = tl.arange(0, BLOCK_R)
    kept = tl.where(bad, 0, kept)
    n_items = tl.where(bad, 0, n_items)
    n_spare = (capacity - kept + BLOCK_M - 1) // BLOCK_M
    for lo in range(kept + pid * BLOCK_R, capacity, n_programs * BLOCK_R):
        tl.store(list_ptr + source_at + lo + r, tl.full((BLOCK_R,), -1, tl.int32), mask=lo + r < capacity)
    for lo in range(pid * BLOCK_R, n_spare, n_programs * BLOCK_R):
        first = kept + (lo + r) * BLOCK_M
        p_item = list_ptr + work_at + (n_items + lo + r) * RECORD
        tl.store(p_item + FIRST_ROW, first, mask=lo + r < n_spare)
        tl.store(p_item + LENGTH, tl.minimum(capacity - first, BLOCK_M), mask=lo + r < n_spare)
        tl.store(p_item + FIRST_QUERY, tl.zeros((BLOCK_R,), tl.int32), mask=lo + r < n_spare)


@triton.jit(do_not_specialize=["index_at", "n_rows", "n_x", "n_tokens"])
def tilewright_gather_rows(
    out_ptr, list_ptr, x_ptr, fill_ptr, stride_xb, stride_xn, stride_fb, stride_fn, index_at, n_rows, n_x, n_tokens,
    C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rows of x by their numbers in the lists. Grid: (n_rows / BLOCK_R * (C / BLOCK_C),), both rounded up.

    x_ptr: rows of C values, `n_x` of them stride_xn apart, the next ones stride_xb on. fill_ptr: rows [., n_tokens, C]
    for where the number is -1, strided, or None for zeros. out_ptr: [n_rows, C].
    """
    r, c, m_columns = _block(C, BLOCK_R, BLOCK_C)
    bad = tl.load(list_ptr + BAD)
    index = tl.load(list_ptr + index_at + r, mask=r < n_rows, other=-1)  # [BLOCK_R]
    m_index = (index >= 0) & (bad == 0)
    at = (index // n_x).to(tl.int64) * stride_xb + (index % n_x).to(tl.int64) * stride_xn
    b_x = tl.load(x_ptr + at[:, None] + c[None, :], mask=m_index[:, None] & m_columns, other=0.0)  # [BLOCK_R, BLOCK_C]
    if fill_ptr is not None:
        at = (r // n_tokens).to(tl.int64) * stride_fb + (r % n_tokens).to(tl.int64) * stride_fn
        m_fill = (r < n_rows) & (index < 0)
        b_x += tl.load(fill_ptr + at[:, None] + c[None, :], mask=m_fill[:, None] & m_columns, other=0.0)
    _store_block(out_ptr, b_x, r, c, m_columns, n_rows, bad, C)


@triton.jit(do_not_specialize=["index_at", "n_rows", "n_x", "n_tokens"])
def tilewright_gather_packed_rows(
    out_ptr, list_ptr, x_ptr, origin_ptr, stride_xn, index_at, n_rows, n_x, n_tokens,
    C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """As `tilewright_gather_rows`, for rows x that are packed by the lists `origin_ptr`.

    Token n of image b has the number ``b * n_tokens + n``.
    """
    r, c, m_columns = _block(C, BLOCK_R, BLOCK_C)
    bad = tl.load(list_ptr + BAD)
    index = tl.load(list_ptr + index_at + r, mask=r < n_rows, other=-1)  # [BLOCK_R]
    m_index = (index >= 0) & (bad == 0)
    row = tl.load(origin_ptr + STARTS + index // n_tokens, mask=m_index, other=0) + index % n_tokens
    # A batch that did not fit may keep rows that do not exist.
    at = tl.minimum(row, n_x - 1).to(tl.int64) * stride_xn
    b_x = tl.load(x_ptr + at[:, None] + c[None, :], mask=m_index[:, None] & m_columns, other=0.0)  # [BLOCK_R, BLOCK_C]
    _store_block(out_ptr, b_x, r, c, m_columns, n_rows, bad, C)


@triton.jit(do_not_specialize=["length", "n_rows"])
def tilewright_pad_rows(
    out_ptr, list_ptr, x_ptr, stride_xn, length, n_rows, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Packed rows by image and number, zeros where an image has no such row. Grid: as of `tilewright_gather_rows`.

    x_ptr: rows of C values, stride_xn apart. out_ptr: [images, length, C], of `n_rows` rows.
    """
    r, c, m_columns = _block(C, BLOCK_R, BLOCK_C)
    bad = tl.load(list_ptr + BAD)
    p_start = list_ptr + STARTS + r // length
    first = tl.load(p_start, mask=r < n_rows, other=0)  # [BLOCK_R]
    end = tl.load(p_start + 1, mask=r < n_rows, other=0)  # [BLOCK_R]
    row = first + r % length
    m_row = (row < end) & (bad == 0)
    p_x = x_ptr + row.to(tl.int64)[:, None] * stride_xn + c[None, :]
    b_x = tl.load(p_x, mask=m_row[:, None] & m_columns, other=0.0)  # [BLOCK_R, BLOCK_C]
    _store_block(out_ptr, b_x, r, c, m_columns, n_rows, bad, C)


@triton.jit
def _block(C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows and columns of a program, and the mask [1, BLOCK_C] of those columns that are there."""
    pid = tl.program_id(0)
    across: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    r = pid // across * BLOCK_R + tl.arange(0, BLOCK_R)
    c = pid % across * BLOCK_C + tl.arange(0, BLOCK_C)
    return r, c, (c < C)[None, :]


@triton.jit
def _store_block(out_ptr, b_x, r, c, m_columns, n_rows, bad, C: tl.constexpr):
    """Write rows r, NaN for a batch that did not fit."""
    b_x = tl.where(bad != 0, float("nan"), b_x)
    tl.store(out_ptr + r.to(tl.int64)[:, None] * C + c[None, :], b_x, mask=(r < n_rows)[:, None] & m_columns)


@triton.jit(do_not_specialize=["work_at"])
def tilewright_packed_attention(
    o_ptr, list_ptr, q_ptr, k_ptr, v_ptr,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, work_at, scale_log2,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRIM: tl.constexpr, WIDTHS: tl.constexpr,
    HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, NUM_STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attention of each image within itself. Grid: (most work items * HEADS,), the heads of an item side by side.

    q_ptr, k_ptr, v_ptr: [capacity, HEADS, HEAD_DIM], strided; o_ptr: the same, contiguous. BLOCK_N: keys a step; the
    last step is cut to a multiple of TRIM, in WIDTHS sizes each half of the one before. WIDE: the tokens of a head span
    2**31 values or more.
    """
    pid = tl.program_id(0)
    item, h = pid // HEADS, pid % HEADS
    bad, n_items = tl.load(list_ptr + BAD), tl.load(list_ptr + ITEMS)
    p_item = list_ptr + work_at + item * RECORD
    first_row, length = tl.load(p_item + FIRST_ROW), tl.load(p_item + LENGTH)
    first_query = tl.load(p_item + FIRST_QUERY)
    if item >= n_items:
        return
    m = tl.arange(0, BLOCK_M)
    rows = first_query + tl.minimum(m, length - first_query - 1)
    # A batch, and all heads of an image, may span more than 2**31 values.
    at, head = first_row.to(tl.int64), h.to(tl.int64)
    stride_on = HEADS * HEAD_DIM
    if WIDE:
        stride_qn, stride_kn = tl.cast(stride_qn, tl.int64), tl.cast(stride_kn, tl.int64)
        stride_vn, stride_on = tl.cast(stride_vn, tl.int64), tl.cast(stride_on, tl.int64)
    q_ptr += at * stride_qn + head * stride_qh
    k_ptr += at * stride_kn + head * stride_kh
    v_ptr += at * stride_vn + head * stride_vh
    o_ptr += at * stride_on + h * HEAD_DIM
    b_q0, b_q1 = load_rows(q_ptr, rows, stride_qn, HEAD_DIM, D0, D1)  # [BLOCK_M, D0], [BLOCK_M, D1]
    acc0 = tl.zeros((BLOCK_M, D0), tl.float32)
    acc1 = tl.zeros((BLOCK_M, D1 if D1 else 1), tl.float32)
    m_i = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)

    # The keys of the last step come first: nothing waits for them at the end.
    n_full = (length - 1) // BLOCK_N
    lo = n_full * BLOCK_N
    left = (length - lo + TRIM - 1) // TRIM
    for i in tl.static_range(WIDTHS):
        if left & ((BLOCK_N >> i) // TRIM) != 0:
            n = lo + tl.arange(0, BLOCK_N >> i)
            keys = tl.minimum(n, length - 1)
            b_v0, b_v1 = load_rows(v_ptr, keys, stride_vn, HEAD_DIM, D0, D1)  # [BLOCK_N >> i, D0], [., D1]
            b_s = scores(b_q0, b_q1, k_ptr, keys, stride_kn, HEAD_DIM, D0, D1)
            b_s = tl.where((n < length)[None, :], b_s, -float("inf"))
            m_i, l_i, acc0, acc1 = update(b_s, b_v0, b_v1, m_i, l_i, acc0, acc1, scale_log2, D1)
            lo += BLOCK_N >> i
    for j in tl.range(0, n_full, num_stages=NUM_STAGES):
        keys = j * BLOCK_N + tl.arange(0, BLOCK_N)
        b_s = scores(b_q0, b_q1, k_ptr, keys, stride_kn, HEAD_DIM, D0, D1)
        b_v0, b_v1 = load_rows(v_ptr, keys, stride_vn, HEAD_DIM, D0, D1)  # [BLOCK_N, D0], [BLOCK_N, D1]
        m_i, l_i, acc0, acc1 = update(b_s, b_v0, b_v1, m_i, l_i, acc0, acc1, scale_log2, D1)

    l_i = tl.where(bad != 0, float("nan"), l_i)
    m_rows = first_query + m < length
    store_rows(o_ptr, rows, stride_on, acc0, acc1, l_i, m_rows, HEAD_DIM, D0, D1)
