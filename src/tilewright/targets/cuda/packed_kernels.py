"""Packed batches on an NVIDIA GPU, four kernels: describe and gather, attend, bring rows by number, pad (stage T5).

What they hand to each other is `ragged_lists`. None depends on numbers that only the device knows in its grid: programs
without work leave at once.
"""

import triton
import triton.language as tl

from tilewright.targets import packed_lists
from tilewright.targets.cuda.tile_kernel import _fold, _rows, _scores, _store

BAD, KEPT, ITEMS, EMPTY, STARTS = (tl.constexpr(place) for place in range(packed_lists.HEADER + 1))
RECORD = tl.constexpr(packed_lists.RECORD)


@triton.jit(do_not_specialize=["n_x", "n_images", "n_tokens", "capacity", "source_at", "place_at", "work_at"])
def pack(
    list_ptr, keep_ptr, x_ptr, out_ptr, origin_ptr, x_b, x_n, n_x,
    n_images, n_tokens, capacity, source_at, place_at, work_at,
    C: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Describe a batch, and gather its tokens where C > 0. Grid: (images * CHUNKS,).

    keep_ptr: uint8 [images, tokens]. x_ptr: [images, tokens, C], strided by x_b, x_n; where C = 0, int32 [images], the
    tokens that each keeps, or None. origin_ptr: lists by which the tokens are packed already, [n_x, C], or None.
    out_ptr: [capacity, C]. M: queries of a work item. N, TILES: powers of two that hold the tokens and the work items
    of an image. Where nobody has counted each program counts the whole batch, `BLOCK` images at a time, rather than
    wait for others: 6 KB for 32 images.
    """
    counted: tl.constexpr = C == 0 and x_ptr is not None
    pid = tl.program_id(0)
    b, chunk = pid // CHUNKS, pid % CHUNKS
    n = tl.arange(0, N)
    own = tl.load(keep_ptr + b * n_tokens + n, mask=n < n_tokens, other=0).to(tl.int32)
    length = tl.sum(own, 0)
    start, kept, items, item, empty = 0, 0, 0, 0, 0
    for lo in range(0, n_images, BLOCK):
        i = lo + tl.arange(0, BLOCK)
        there = i < n_images
        if counted:
            lengths = tl.load(x_ptr + i, mask=there, other=0)
        else:
            at = keep_ptr + i[:, None] * n_tokens + n[None, :]
            lengths = tl.sum(tl.load(at, mask=there[:, None] & (n < n_tokens)[None, :], other=0).to(tl.int32), 1)
        tiles = (lengths + M - 1) // M
        start += tl.sum(tl.where(i < b, lengths, 0), 0)
        kept += tl.sum(lengths, 0)
        items += tl.sum(tiles, 0)
        item += tl.sum(tl.where((lengths > length) | ((lengths == length) & (i < b)), tiles, 0), 0)
        empty += tl.sum((there & (lengths == 0)).to(tl.int32), 0)
    bad = (kept > capacity) | (empty > 0)
    kept_here = tl.where(bad, 0, kept)
    items = tl.where(bad, 0, items)
    # Rows of no image are images of one work item each, so that all that follows is finite.
    spare = (capacity - kept_here + M - 1) // M

    if chunk == 0:
        if b == 0:
            tl.store(list_ptr + BAD, bad.to(tl.int32))
            tl.store(list_ptr + KEPT, kept)
            tl.store(list_ptr + ITEMS, items + spare)
            tl.store(list_ptr + EMPTY, empty)
            tl.store(list_ptr + STARTS, 0)
        tl.store(list_ptr + STARTS + 1 + b, tl.minimum(start + length, capacity))
        here = (own > 0) & (bad == 0)
        rows = start + tl.cumsum(own, 0) - 1
        tl.store(list_ptr + source_at + rows, b * n_tokens + n, mask=here)
        tl.store(list_ptr + place_at + b * n_tokens + n, tl.where(here, rows, -1), mask=n < n_tokens)
        t = tl.arange(0, TILES)
        record = list_ptr + work_at + (item + t) * RECORD
        mine = (t * M < length) & (bad == 0)
        tl.store(record, tl.zeros_like(t) + start, mask=mine)
        tl.store(record + 1, tl.zeros_like(t) + length, mask=mine)
        tl.store(record + 2, t * M, mask=mine)

    c = tl.arange(0, COLS)
    if C:
        r = tl.arange(0, ROWS)
        share = (n_tokens + CHUNKS - 1) // CHUNKS
        begun = start + tl.sum(tl.where(n < chunk * share, own, 0), 0)
        if bad == 0:
            base = b.to(tl.int64) * x_b
            if origin_ptr is not None:
                before = tl.load(origin_ptr + STARTS + b)
            for lo in range(chunk * share, tl.minimum(chunk * share + share, n_tokens), ROWS):
                token = lo + r
                inside = (r < chunk * share + share - lo) & (token < n_tokens)
                taken = tl.load(keep_ptr + b * n_tokens + token, mask=inside, other=0).to(tl.int32)
                row = token
                if origin_ptr is not None:
                    # A batch that did not fit may keep what is not there.
                    row = tl.minimum(before + token, n_x - 1)
                source = x_ptr + base + row.to(tl.int64)[:, None] * x_n
                target = out_ptr + (begun + tl.cumsum(taken, 0) - 1).to(tl.int64)[:, None] * C
                for first in range(0, C, COLS):
                    mask = (taken > 0)[:, None] & (first + c < C)[None, :]
                    value = tl.load(source + (first + c)[None, :], mask=mask)
                    tl.store(target + (first + c)[None, :], value, mask=mask)
                begun += tl.sum(taken, 0)

    # What no image has, a share for each program.
    e = tl.arange(0, ROWS)
    for lo in range(kept_here + pid * ROWS, capacity, n_images * CHUNKS * ROWS):
        there = lo + e < capacity
        tl.store(list_ptr + source_at + lo + e, tl.full((ROWS,), -1, tl.int32), mask=there)
        if C:
            target = out_ptr + (lo + e).to(tl.int64)[:, None] * C
            value = tl.where(bad, float("nan"), tl.zeros((ROWS, COLS), tl.float32)).to(out_ptr.dtype.element_ty)
            for column in range(0, C, COLS):
                tl.store(target + (column + c)[None, :], value, mask=there[:, None] & (column + c < C)[None, :])
    for lo in range(pid * ROWS, spare, n_images * CHUNKS * ROWS):
        lone = kept_here + (lo + e) * M
        record = list_ptr + work_at + (items + lo + e) * RECORD
        tl.store(record, lone, mask=lo + e < spare)
        tl.store(record + 1, tl.minimum(capacity - lone, M), mask=lo + e < spare)
        tl.store(record + 2, tl.zeros((ROWS,), tl.int32), mask=lo + e < spare)


@triton.jit(do_not_specialize=["index_at", "n_rows", "n_x", "n_tokens"])
def take(
    out_ptr, list_ptr, x_ptr, other_ptr, x_b, x_n, fill_b, fill_n, index_at, n_rows, n_x, n_tokens,
    C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Rows of x by their numbers in the lists. Grid: (rows / ROWS * (C / COLS),), both rounded up.

    x_ptr: rows of C values, `n_x` of them x_n apart, the next so many x_b on. other_ptr: what stands where the number
    is -1, strided by fill_b, fill_n, or None for zeros; PACKED: the lists by which the rows of x are packed, numbers
    being ``image * n_tokens + place``. out_ptr: [n_rows, C].
    """
    pid = tl.program_id(0)
    across: tl.constexpr = (C + COLS - 1) // COLS
    r = pid // across * ROWS + tl.arange(0, ROWS)
    c = pid % across * COLS + tl.arange(0, COLS)
    bad = tl.load(list_ptr + BAD)
    index = tl.load(list_ptr + index_at + r, mask=r < n_rows, other=-1)
    live = (index >= 0) & (bad == 0)
    wide = (c < C)[None, :]
    if PACKED:
        row = tl.load(other_ptr + STARTS + index // n_tokens, mask=live, other=0) + index % n_tokens
        # A batch that did not fit may keep what is not there.
        at = tl.minimum(row, n_x - 1).to(tl.int64) * x_n
    else:
        at = (index // n_x).to(tl.int64) * x_b + (index % n_x).to(tl.int64) * x_n
    value = tl.load(x_ptr + at[:, None] + c[None, :], mask=live[:, None] & wide, other=0.0)
    if other_ptr is not None and not PACKED:
        at = (r // n_tokens).to(tl.int64) * fill_b + (r % n_tokens).to(tl.int64) * fill_n
        bare = (r < n_rows) & (index < 0)
        value += tl.load(other_ptr + at[:, None] + c[None, :], mask=bare[:, None] & wide, other=0.0)
    value = tl.where(bad != 0, float("nan"), value)
    tl.store(out_ptr + r.to(tl.int64)[:, None] * C + c[None, :], value, mask=(r < n_rows)[:, None] & wide)


@triton.jit(do_not_specialize=["n_slots", "n_rows"])
def pad(out_ptr, list_ptr, x_ptr, x_n, n_slots, n_rows, C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Packed rows by image and place, zeros where no token is. Grid: as of `take`.

    x_ptr: rows of C values, x_n apart. out_ptr: [images, n_slots, C], of `n_rows` rows.
    """
    pid = tl.program_id(0)
    across: tl.constexpr = (C + COLS - 1) // COLS
    r = pid // across * ROWS + tl.arange(0, ROWS)
    c = pid % across * COLS + tl.arange(0, COLS)
    bad = tl.load(list_ptr + BAD)
    there, wide = r < n_rows, (c < C)[None, :]
    at = list_ptr + STARTS + r // n_slots
    first, end = tl.load(at, mask=there, other=0), tl.load(at + 1, mask=there, other=0)
    row = first + r % n_slots
    live = (row < end) & (bad == 0)
    value = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_n + c[None, :], mask=live[:, None] & wide, other=0.0)
    value = tl.where(bad != 0, float("nan"), value)
    tl.store(out_ptr + r.to(tl.int64)[:, None] * C + c[None, :], value, mask=there[:, None] & wide)


@triton.jit(do_not_specialize=["work_at"])
def attend(
    o_ptr, list_ptr, q_ptr, k_ptr, v_ptr, q_n, q_h, k_n, k_h, v_n, v_h, work_at, scale_log2,
    H: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TRIM: tl.constexpr, WIDTHS: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attention of each image within itself. Grid: (most work items * H,), the heads of an item side by side.

    q_ptr, k_ptr, v_ptr: [capacity, H, D], strided; o_ptr: [capacity, H, D]. N: keys a step; the last one is cut to a
    multiple of TRIM, in WIDTHS sizes each half of the one before. D, D0 + D1, WIDE: as of `triton_tiles`.
    """
    pid = tl.program_id(0)
    item, h = pid // H, pid % H
    bad, n_items = tl.load(list_ptr + BAD), tl.load(list_ptr + ITEMS)
    record = list_ptr + work_at + item * RECORD
    first, length, offset = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    if item >= n_items:
        return
    m = tl.arange(0, M)
    rows = offset + tl.minimum(m, length - offset - 1)
    # A batch, and all heads of an image, may span more than 2**31 values.
    at, head = first.to(tl.int64), h.to(tl.int64)
    o_n = H * D
    if WIDE:
        q_n, k_n = tl.cast(q_n, tl.int64), tl.cast(k_n, tl.int64)
        v_n, o_n = tl.cast(v_n, tl.int64), tl.cast(o_n, tl.int64)
    q_ptr += at * q_n + head * q_h
    k_ptr += at * k_n + head * k_h
    v_ptr += at * v_n + head * v_h
    o_ptr += at * o_n + h * D
    q0, q1 = _rows(q_ptr, rows, q_n, D, D0, D1)
    acc0 = tl.zeros((M, D0), tl.float32)
    acc1 = tl.zeros((M, D1 if D1 else 1), tl.float32)
    top = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)

    # What is left of the last step comes first: nothing waits for it at the end.
    n_full = (length - 1) // N
    lo = n_full * N
    left = (length - lo + TRIM - 1) // TRIM
    for i in tl.static_range(WIDTHS):
        if left & ((N >> i) // TRIM) != 0:
            n = lo + tl.arange(0, N >> i)
            keys = tl.minimum(n, length - 1)
            v0, v1 = _rows(v_ptr, keys, v_n, D, D0, D1)
            s = _scores(q0, q1, k_ptr, keys, k_n, D, D0, D1)
            s = tl.where((n < length)[None, :], s, -float("inf"))
            top, total, acc0, acc1 = _fold(s, v0, v1, top, total, acc0, acc1, scale_log2, D1)
            lo += N >> i
    for j in tl.range(0, n_full, num_stages=STAGES):
        keys = j * N + tl.arange(0, N)
        s = _scores(q0, q1, k_ptr, keys, k_n, D, D0, D1)
        v0, v1 = _rows(v_ptr, keys, v_n, D, D0, D1)
        top, total, acc0, acc1 = _fold(s, v0, v1, top, total, acc0, acc1, scale_log2, D1)

    total = tl.where(bad != 0, float("nan"), total)
    _store(o_ptr, rows, o_n, acc0, acc1, total, offset + m < length, D, D0, D1)
