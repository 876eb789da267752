"""Slices on an NVIDIA GPU (stage T5): kernels that write codes of keys, and those that choose keys by codes.

Heads come one after the other, so that programs that run at a time share a head's keys in L2. Nothing but codes has a
value for each group and key. What codes are: `tilewright.slices.selection`. Rows of codes are written to their padded
end, so that threads store 16 codes at once; what stands behind the last key is never read as a code.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from tilewright.slices import layout, selection

CODES, OCTAVE = tl.constexpr(selection.CODES), tl.constexpr(selection.OCTAVE)
UNKNOWN, NO_LENGTH = tl.constexpr(layout.UNKNOWN), tl.constexpr(layout.NO_LENGTH)
STEP = tl.constexpr(layout.STEP)
# Codes of a bin have one weight: that of the first half of an octave, or of the second.
BIN, BINS = tl.constexpr(selection.BIN), tl.constexpr(selection.CODES // selection.BIN)
W0, W1 = (tl.constexpr(weight) for weight in selection.WEIGHTS)
MASS_UNIT = tl.constexpr(selection.MASS_UNIT)
# Of four codes in a word: their lowest bits, all but their highest ones, and these.
ONES, LOW, HIGH = tl.constexpr(0x01010101), tl.constexpr(0x7F7F7F7F), tl.constexpr(0x80808080)
# Blocks of a row that counts in bytes are enough for.
MOST_BLOCKS = 255
# What rounding down takes off first, to be rounding to the nearest: less than a half, so that an integer stays one.
# The float32 whose last bits count from zero on.
NEARLY_HALF, COUNTING = tl.constexpr(0.5 - 2.0**-15), tl.constexpr(2.0**23)
# Below all scores, and finite: a row may have no score at all.
LOWEST = tl.constexpr(-1e30)


if triton.knobs.runtime.interpret:

    @triton.jit
    def fast_log2(x):
        """log2 of float32."""
        return tl.log2(x)

else:

    @triton.jit
    def fast_log2(x):
        """log2 of float32, to 2^-22: one instruction of the special functions, where Triton's own takes twenty."""
        return libdevice.fast_log2f(x)


@triton.jit
def nearest_codes(b_x):
    """Codes uint8 of float32, rounded to the nearest and cut to their range; NaN has code 0.

    By an addition: conversions to integers run at an eighth of its rate.
    """
    b_x = tl.minimum(tl.maximum(b_x, 0.0), CODES - 1.0) + COUNTING
    return b_x.to(tl.uint32, bitcast=True).to(tl.uint8)


@triton.jit(do_not_specialize=["n_tokens", "n_rows"])
def tilewright_slice_means(
    mean_ptr, x_ptr, cosine_ptr, stride_b, stride_h, stride_n, n_tokens, n_rows, heads,
    SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Means of SIZE consecutive tokens. Grid: (batch * heads * n_rows / BLOCK_R,), rounded up.

    mean_ptr: [batch, heads, n_rows, HEAD_DIM]. cosine_ptr: float32 [batch, heads, n_rows], the mean cosine of the
    tokens to their mean, or None. BLOCK_T: tokens of a mean that are read at once.
    """
    n_programs = tl.cdiv(n_rows, BLOCK_R)
    bh = tl.program_id(0) // n_programs
    r = tl.program_id(0) % n_programs * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, HEAD_DIM)
    x_ptr += (bh // heads).to(tl.int64) * stride_b + (bh % heads).to(tl.int64) * stride_h
    acc = tl.zeros((BLOCK_R, HEAD_DIM), tl.float32)
    for lo in range(0, SIZE, BLOCK_T):
        acc += tl.sum(_tokens(x_ptr, r, lo, stride_n, n_tokens, SIZE, HEAD_DIM, BLOCK_T), 1)
    count = tl.maximum(tl.minimum(n_tokens - r * SIZE, SIZE), 1)
    b_mean = (acc / count[:, None]).to(mean_ptr.dtype.element_ty)  # [BLOCK_R, HEAD_DIM]
    m_rows = r < n_rows
    row = bh.to(tl.int64) * n_rows + r
    tl.store(mean_ptr + row[:, None] * HEAD_DIM + d[None, :], b_mean, mask=m_rows[:, None])
    if cosine_ptr is not None:
        b_mean = b_mean.to(tl.float32)
        length = tl.sum(b_mean * b_mean, 1)
        total = tl.zeros((BLOCK_R,), tl.float32)
        for lo in range(0, SIZE, BLOCK_T):
            b_x = _tokens(x_ptr, r, lo, stride_n, n_tokens, SIZE, HEAD_DIM, BLOCK_T)
            norms = tl.sqrt(tl.maximum(tl.sum(b_x * b_x, 2) * length[:, None], 1e-24))
            # Tokens that are not there are zeros and add nothing.
            total += tl.sum(tl.sum(b_x * b_mean[:, None, :], 2) / norms, 1)
        tl.store(cosine_ptr + row, total / count, mask=m_rows)


@triton.jit
def _tokens(x_ptr, r, lo, stride_n, n_tokens, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr):
    """Tokens lo to lo + BLOCK_T of each row r of SIZE tokens, float32 [R, BLOCK_T, HEAD_DIM]; zeros for none."""
    token = r[:, None] * SIZE + lo + tl.arange(0, BLOCK_T)[None, :]
    p_x = x_ptr + token.to(tl.int64)[:, :, None] * stride_n + tl.arange(0, HEAD_DIM)[None, None, :]
    return tl.load(p_x, mask=(token < n_tokens)[:, :, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows", "n_keys", "n_tokens"])
def tilewright_slice_lse(
    lse_ptr, q_ptr, k_ptr, length_ptr, alike_ptr, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    n_rows, n_keys, n_tokens, heads, scale_log2, least_alike,
    SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Log2-sum-exp2 of the scores of rows of q in SPLITS ranges of SPLIT keys. Grid: (batch * heads * SPLITS * tiles of
    rows,).

    lse_ptr: float32 [batch, heads, SPLITS, n_rows]. length_ptr: int32 [batch], keys that count. SIZE: tokens that a key
    is the mean of; it counts as many times. alike_ptr: float32 [batch, heads, n_keys], or None: keys with less than
    least_alike are left out.
    """
    tiles = tl.cdiv(n_rows, BLOCK_M)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles % SPLITS
    bh = tl.program_id(0) // (tiles * SPLITS)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    length = tl.minimum(tl.load(length_ptr + bh // heads), n_keys)
    b_q, k_ptr = head_tokens(
        q_ptr, k_ptr, bh, rows, n_rows, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, heads, HEAD_DIM
    )
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    for lo in tl.range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, length), BLOCK_N, num_stages=NUM_STAGES):
        n = lo + tl.arange(0, BLOCK_N)
        b_s = _scores(b_q, k_ptr, n, n_keys, stride_kn, HEAD_DIM) * scale_log2  # [BLOCK_M, BLOCK_N]
        m_n = n < length
        if SIZE > 1:
            b_s += tl.log2(tl.minimum(n_tokens - n * SIZE, SIZE).to(tl.float32))[None, :]
        if alike_ptr is not None:
            unlike = tl.load(alike_ptr + bh * n_keys + n, mask=m_n, other=1.0) < least_alike
            m_n = m_n & (unlike == 0)
        b_s = tl.where(m_n[None, :], b_s, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(b_s, 1))
        l_i = l_i * tl.exp2(m_i - m_new) + tl.sum(tl.exp2(b_s - m_new[:, None]), 1)
        m_i = m_new
    p_lse = lse_ptr + (bh * SPLITS + split).to(tl.int64) * n_rows + rows
    tl.store(p_lse, m_i + tl.log2(l_i), mask=rows < n_rows)


@triton.jit
def head_tokens(
    q_ptr, k_ptr, bh, rows, n_rows, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, heads,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Rows of q of a head, [BLOCK_M, HEAD_DIM], and the pointer of its k."""
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    p_q = q_ptr + b * stride_qb + h * stride_qh + rows.to(tl.int64)[:, None] * stride_qn
    b_q = tl.load(p_q + tl.arange(0, HEAD_DIM)[None, :], mask=(rows < n_rows)[:, None], other=0.0)
    return b_q, k_ptr + b * stride_kb + h * stride_kh


@triton.jit
def _scores(b_q, k_ptr, n, n_keys, stride_kn, HEAD_DIM: tl.constexpr):
    """Products [BLOCK_M, BLOCK_N] of rows with keys n; any value where a key is not there."""
    p_k = k_ptr + tl.minimum(n, n_keys - 1).to(tl.int64)[:, None] * stride_kn + tl.arange(0, HEAD_DIM)[None, :]
    return tl.dot(b_q, tl.trans(tl.load(p_k)), input_precision="ieee")


@triton.jit(do_not_specialize=["n_rows", "n_keys", "n_queries", "n_groups"])
def tilewright_slice_codes(
    code_ptr, q_ptr, k_ptr, lse_ptr, q_alike_ptr, k_alike_ptr, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh,
    stride_kn, stride_lb, stride_lh, stride_ls, stride_ln, stride_c, n_rows, n_keys, n_queries, n_groups, heads,
    scale_log2, lse_log2, least_alike,
    OF_GROUP: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MOST_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Codes of all keys for groups of OF_GROUP rows of q. Grid: (batch * heads * chunks of keys * tiles of groups,).

    code_ptr: uint8 [batch, heads, n_groups, stride_c]. lse_ptr: log-sum-exps of the rows in SPLITS parts, those in base
    2 after multiplication with lse_log2. SIZE: queries that a row stands for. LARGEST: the largest share of the rows
    counts, else their mean. BLOCK_G, BLOCK_R: groups, and rows of each, of one product. CHUNK: keys of a program.
    q_alike_ptr, k_alike_ptr: float32 [batch, heads, n_groups] and [.., n_keys], or None: code 0 below least_alike.
    """
    tiles = tl.cdiv(n_groups, BLOCK_G)
    chunks = tl.cdiv(n_keys, CHUNK)
    tile = tl.program_id(0) % tiles
    chunk = tl.program_id(0) // tiles % chunks
    bh = tl.program_id(0) // (tiles * chunks)
    i = tl.arange(0, BLOCK_G * BLOCK_R)
    groups = tile * BLOCK_G + tl.arange(0, BLOCK_G)
    # Of each group the rows that come first; all of them where one product holds them.
    first = (tile * BLOCK_G + i // BLOCK_R) * OF_GROUP + i % BLOCK_R
    lse_ptr += (bh // heads).to(tl.int64) * stride_lb + (bh % heads).to(tl.int64) * stride_lh
    code_ptr += (bh * n_groups).to(tl.int64) * stride_c
    tokens = q_ptr, k_ptr, lse_ptr, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_ls, stride_ln
    sizes = n_rows, n_queries, heads, lse_log2
    if OF_GROUP == BLOCK_R:
        b_q, k_ptr, b_l = group_rows(tokens, sizes, bh, first, OF_GROUP, SIZE, LARGEST, HEAD_DIM, SPLITS, MOST_SPLITS)
    ALONE: tl.constexpr = OF_GROUP == 1 and not LARGEST
    if ALONE:
        # Rows of no query, and those whose scores are no numbers.
        b_known = b_l < float("inf")
        b_off = b_l * OCTAVE - NEARLY_HALF
    for lo in tl.range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, n_keys), BLOCK_N, num_stages=NUM_STAGES):
        n = lo + tl.arange(0, BLOCK_N)
        if ALONE:
            b_m = _scores(b_q, k_ptr, n, n_keys, stride_kn, HEAD_DIM) * (scale_log2 * -OCTAVE) + b_off[:, None]
        elif OF_GROUP == BLOCK_R:
            b_x = _scores(b_q, k_ptr, n, n_keys, stride_kn, HEAD_DIM) * scale_log2 - b_l[:, None]
            b_m = _over_rows(b_x, LARGEST, BLOCK_G, BLOCK_R, BLOCK_N)  # [BLOCK_G, BLOCK_N]
            if BLOCK_R > 1 and not LARGEST:
                b_m = fast_log2(b_m)
        else:
            b_m = tl.full((BLOCK_G, BLOCK_N), -float("inf") if LARGEST else 0.0, tl.float32)
            for start in range(0, OF_GROUP, BLOCK_R):
                rows = first + start
                b_q, k_head, b_l = group_rows(
                    tokens, sizes, bh, rows, OF_GROUP, SIZE, LARGEST, HEAD_DIM, SPLITS, MOST_SPLITS
                )
                b_x = _scores(b_q, k_head, n, n_keys, stride_kn, HEAD_DIM) * scale_log2 - b_l[:, None]
                b_part = _over_rows(b_x, LARGEST, BLOCK_G, BLOCK_R, BLOCK_N)
                b_m = tl.maximum(b_m, b_part) if LARGEST else b_m + b_part
            if not LARGEST:
                b_m = fast_log2(b_m)
        if ALONE:
            # A score that is no number beside a log-sum-exp that does not know of it is listed: the result shows it.
            b_c = tl.where(b_known[:, None], nearest_codes(b_m), CODES - 1)  # [BLOCK_G, BLOCK_N]
        else:
            b_c = b_m * -OCTAVE - NEARLY_HALF
            # NaN, and what stands for it among maxima, is no share.
            b_c = nearest_codes(tl.where((b_c == b_c) & (b_c > -float("inf")), b_c, CODES - 1.0))
        m_n = n < n_keys
        m_groups = groups < n_groups
        if k_alike_ptr is not None:
            unlike = tl.load(k_alike_ptr + bh * n_keys + n, mask=m_n, other=1.0) < least_alike
            q_unlike = tl.load(q_alike_ptr + bh * n_groups + groups, mask=m_groups, other=1.0) < least_alike
            b_c = tl.where((unlike[None, :] | q_unlike[:, None]) & (b_l == b_l)[:, None], 0, b_c)
        p_code = code_ptr + groups.to(tl.int64)[:, None] * stride_c + n[None, :]
        tl.store(p_code, b_c.to(tl.uint8), mask=m_groups[:, None] & (n < stride_c)[None, :])


@triton.jit
def group_rows(
    tokens, sizes, bh, rows, OF_GROUP: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr, HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr, MOST_SPLITS: tl.constexpr,
):  # fmt: skip
    """Rows of q of a head, the pointer of its k, and what is taken from the scores of these rows."""
    q_ptr, k_ptr, lse_ptr, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_ls, stride_ln = tokens
    n_rows, n_queries, heads, lse_log2 = sizes
    b_q, k_ptr = head_tokens(
        q_ptr, k_ptr, bh, rows, n_rows, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, heads, HEAD_DIM
    )
    b_l = _log_sum_exps(
        lse_ptr, rows, n_rows, n_queries, stride_ls, stride_ln, lse_log2, OF_GROUP, SIZE, LARGEST, SPLITS, MOST_SPLITS
    )
    return b_q, k_ptr, b_l


@triton.jit
def _log_sum_exps(
    lse_ptr, rows, n_rows, n_queries, stride_ls, stride_ln, lse_log2,
    OF_GROUP: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr, SPLITS: tl.constexpr, MOST_SPLITS: tl.constexpr,
):  # fmt: skip
    """What is taken from a row's scores, in base 2: its log-sum-exp, less the log of its share of the group's queries.

    Infinite for rows of no query.
    """
    s = tl.arange(0, MOST_SPLITS)
    m_rows = rows < n_rows
    p_lse = lse_ptr + rows.to(tl.int64)[:, None] * stride_ln + s[None, :] * stride_ls
    m_parts = m_rows[:, None] & (s < SPLITS)[None, :]
    b_l = tl.load(p_lse, mask=m_parts, other=-float("inf")) * lse_log2  # [BLOCK_M, MOST_SPLITS]
    if SPLITS > 1:
        m_i = tl.maximum(tl.max(b_l, 1), LOWEST)
        b_l = m_i + tl.log2(tl.sum(tl.exp2(b_l - m_i[:, None]), 1))
    else:
        b_l = tl.sum(tl.where(m_parts, b_l, 0.0), 1)
    if OF_GROUP > 1 and not LARGEST:
        queries = tl.minimum(n_queries - rows * SIZE, SIZE).to(tl.float32)
        of_group = tl.minimum(n_queries - rows // OF_GROUP * (OF_GROUP * SIZE), OF_GROUP * SIZE).to(tl.float32)
        b_l -= tl.log2(tl.where(m_rows, queries / of_group, 1.0))
    return tl.where(m_rows, b_l, float("inf"))


@triton.jit
def _over_rows(b_x, LARGEST: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """The log2 of the largest share of a group's rows, or the sum of their shares; of one row, the log2 of its share.

    b_x: log2 of shares, [BLOCK_G * BLOCK_R, BLOCK_N]. Where one is NaN, the largest is infinite.
    """
    if LARGEST:
        b_x = tl.where(b_x == b_x, b_x, float("inf"))
        return tl.max(tl.reshape(b_x, (BLOCK_G, BLOCK_R, BLOCK_N)), 1)
    if BLOCK_R == 1:
        return b_x
    return tl.sum(tl.reshape(tl.exp2(b_x), (BLOCK_G, BLOCK_R, BLOCK_N)), 1)


@triton.jit(do_not_specialize=["n_keys", "first", "end"])
def tilewright_slice_spread(
    code_ptr, of_block_ptr, n_keys, first, end, stride_c, stride_b, SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Codes of keys from those of their blocks of SIZE keys, which begin at key `first` and end at `end`; the last code
    for others. Grid: (groups in all, keys / BLOCK_N rounded up)."""
    chunks = tl.cdiv(n_keys, BLOCK_N)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    n = tl.program_id(0) % chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    m_block = (n >= first) & (n < end)
    b_c = tl.load(of_block_ptr + row * stride_b + (n - first) // SIZE, mask=m_block, other=CODES - 1)
    tl.store(code_ptr + row * stride_c + n, b_c, mask=n < stride_c)


@triton.jit(do_not_specialize=["n_keys", "n_groups"])
def tilewright_slice_given(
    code_ptr, mask_ptr, stride_mb, stride_mh, stride_mg, stride_mn, n_keys, n_groups, heads, stride_c,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Codes 0 where a mask, uint8, is not 0, else 255. Grid: (groups in all * (keys / BLOCK_N rounded up),)."""
    chunks = tl.cdiv(n_keys, BLOCK_N)
    row = tl.program_id(0) // chunks
    n = tl.program_id(0) % chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    bh = row // n_groups
    mask_ptr += (bh // heads).to(tl.int64) * stride_mb + (bh % heads).to(tl.int64) * stride_mh
    p_mask = mask_ptr + (row % n_groups).to(tl.int64) * stride_mg + n.to(tl.int64) * stride_mn
    b_mask = tl.load(p_mask, mask=n < n_keys, other=0)
    b_c = tl.where(b_mask != 0, 0, CODES - 1).to(tl.uint8)
    tl.store(code_ptr + row.to(tl.int64) * stride_c + n, b_c, mask=n < stride_c)


@triton.jit(do_not_specialize=["n_keys", "seed"])
def tilewright_slice_random(code_ptr, n_keys, seed, stride_c, BLOCK_N: tl.constexpr):
    """Codes as good as random. Grid: (groups in all * (keys / BLOCK_N rounded up),)."""
    chunks = tl.cdiv(n_keys, BLOCK_N)
    row = tl.program_id(0) // chunks
    n = tl.program_id(0) % chunks * BLOCK_N + tl.arange(0, BLOCK_N)
    # The last code stands for no share: a group of such keys alone would list nothing.
    b_c = _mixed(_mixed((row + seed).to(tl.uint32)) + n.to(tl.uint32)) % tl.full((), CODES - 1, tl.uint32)
    tl.store(code_ptr + row.to(tl.int64) * stride_c + n, b_c.to(tl.uint8), mask=n < stride_c)


@triton.jit
def _mixed(x):
    """The finaliser of MurmurHash3, of uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["n_keys", "n_units", "of_entry"])
def tilewright_slice_runs(
    run_ptr, code_ptr, length_ptr, n_keys, n_units, of_entry, stride_r, stride_c,
    WIDTH: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Codes of the sums of shares of runs of WIDTH keys. Grid: (groups in all * (runs / BLOCK_U rounded up),).

    Keys of code 255 have no share: a run of such alone has that code, too. length_ptr: int32 [batch], keys that count.
    of_entry: groups of a batch entry.
    """
    chunks = tl.cdiv(n_units, BLOCK_U)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    n_keys = tl.minimum(tl.load(length_ptr + row // of_entry), n_keys)
    unit = tl.program_id(0) % chunks * BLOCK_U + tl.arange(0, BLOCK_U)
    n = unit[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    b_c = tl.load(code_ptr + row * stride_c + n, mask=n < n_keys, other=CODES - 1)
    b_p = tl.where(b_c < CODES - 1, tl.exp2((b_c.to(tl.float32) + 0.5) * (-1 / OCTAVE)), 0.0)
    b_r = fast_log2(tl.sum(b_p, 1)) * -OCTAVE
    b_r = tl.minimum(tl.maximum(b_r, 0.0), CODES - 1.0)
    tl.store(run_ptr + row * stride_r + unit, b_r.to(tl.int32).to(tl.uint8), mask=unit < stride_r)


@triton.jit(do_not_specialize=["n_keys", "of_entry", "of_head", "n_always", "mass", "code", "least", "most"])
def tilewright_slice_select(
    key_ptr, count_ptr, code_ptr, length_ptr, always_ptr, counted_ptr, n_keys, of_entry, of_head, n_always, mass, code,
    least, most, capacity, stride_c,
    BY_MASS: tl.constexpr, BY_CODE: tl.constexpr, ALWAYS: tl.constexpr, FREE: tl.constexpr, KNOWN: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The list of a group. Grid: (groups in all,). Arguments are the fields of `selection.Rule`, mass in `MASS_UNIT`.

    key_ptr: int32 [groups in all, capacity]. count_ptr: int32 [groups in all]. code_ptr: uint8, rows of codes stride_c
    apart, a multiple of 4. length_ptr: int32 [batch], of n_keys keys those that each entry has; none for a number out
    of range. always_ptr: int32 [2 * n_always], ranges of units that are always listed; ALWAYS: there are some.
    counted_ptr: int32 [heads], the rule's count of each head. of_entry, of_head: groups of an entry, of a head.
    BLOCK_N: units at a time, a multiple of 4. Codes are read four to a word.
    """
    row = tl.program_id(0).to(tl.int64)
    code_ptr += row * stride_c
    key_ptr += row * capacity
    length = tl.load(length_ptr + row // of_entry)
    n_keys = tl.where((length > 0) & (length <= n_keys), length, 0)
    n_units = tl.cdiv(n_keys, WIDTH)
    in_always = tl.zeros((), tl.int32)
    if ALWAYS:
        for a in range(0, n_always):
            first, end = _always(always_ptr, a, n_units)
            in_always += end - first
    others = tl.zeros((), tl.int32)
    if BY_MASS:
        code, others = _code_of_mass(code_ptr, always_ptr, n_units, n_always, mass, ALWAYS, FREE, BLOCK_N)
    elif BY_CODE:
        others = _count_others(code_ptr, always_ptr, n_units, n_always, code, ALWAYS, BLOCK_N)
    count = tl.load(counted_ptr + row % of_entry // of_head)
    cap = tl.minimum(count, n_units)
    if BY_MASS or BY_CODE:
        count = in_always + others
    asked = tl.maximum(tl.minimum(count, cap), tl.maximum(tl.minimum(least, n_units), in_always))
    wanted = tl.minimum(asked, most) - in_always
    # The last code of which units are listed, and how many of its units are not. The code that the rule ends at needs
    # no search where nothing else limits the list.
    last = wanted * 0 + code
    ties, n_ties = wanted * 0, wanted * 0
    if (code < 0) | (wanted + in_always != count):
        last, below, upto = _code_of_count(
            code_ptr, always_ptr, n_units, n_always, n_units - in_always, wanted, ALWAYS, BLOCK_N
        )
        ties, n_ties = wanted - below, upto - below
    listed = tl.zeros((), tl.int32)
    tied = tl.zeros((), tl.int32)
    for lo in range(0, n_units, BLOCK_N):
        listed, tied = _list_block(
            key_ptr,
            code_ptr,
            always_ptr,
            lo,
            n_units,
            n_keys,
            n_always,
            last,
            ties,
            n_ties,
            tied,
            listed,
            ALWAYS,
            WIDTH,
            BLOCK_N,
        )
    # Where another unit than those of ranges is listed, and the last code is not, the group has shares.
    has_none = (last >= CODES - 1) | (listed <= in_always)
    # The last unit, for the end of the list, was written by another thread.
    tl.debug_barrier()
    if WIDTH > 1:
        final = tl.load(key_ptr + tl.maximum(listed - 1, 0) * WIDTH, mask=listed > 0, other=0) // WIDTH
        # The last run of all may be short, where one is listed.
        short = tl.maximum(final * WIDTH + WIDTH - n_keys, 0)
        listed = tl.where(listed > 0, listed * WIDTH - short, 0)
        final = tl.minimum(final * WIDTH + WIDTH, n_keys) - 1
    else:
        final = tl.load(key_ptr + tl.maximum(listed - 1, 0), mask=listed > 0, other=-1)
    behind = listed + tl.arange(0, STEP)
    end = (listed + STEP - 1) // STEP * STEP
    tl.store(key_ptr + behind, tl.zeros((STEP,), tl.int32) + final, mask=behind < end)
    # A list that does not fit, or of a group without shares, says so.
    listed = tl.where(asked > most, asked * WIDTH, listed)
    if not KNOWN and has_none:
        listed = tl.where(_count(code_ptr, 0, n_units, CODES - 2, BLOCK_N) == 0, UNKNOWN, listed)
    listed = tl.where(n_keys < 1, NO_LENGTH, listed)
    if listed >= UNKNOWN:
        # Such a list has no keys that anybody asked for; those of its room are some all the same.
        tl.debug_barrier()
        for lo in range(0, capacity, STEP):
            tl.store(key_ptr + lo + tl.arange(0, STEP), tl.zeros((STEP,), tl.int32))
    tl.store(count_ptr + row, listed)


@triton.jit
def _always(always_ptr, a, n_units):
    """The first unit and the end of a range that is always listed, of those that there are."""
    first, end = tl.load(always_ptr + 2 * a), tl.load(always_ptr + 2 * a + 1)
    return tl.minimum(first, n_units), tl.minimum(end, n_units)


@triton.jit
def _list_block(
    key_ptr, code_ptr, always_ptr, lo, n_units, n_keys, n_always, last, ties, n_ties, tied, listed,
    ALWAYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """List those of BLOCK_N units from `lo` that are chosen; returns how many units are listed so far, and how many of
    the last code were seen, of which the first `ties` are chosen, of `n_ties`."""
    n = lo + 4 * tl.arange(0, BLOCK_N // 4)
    b_w = _words(code_ptr, lo, n_units, BLOCK_N)
    b_taken = _at_most(b_w, last)
    if ties < n_ties:
        b_less = _at_most(b_w, last - 1)
        b_tie = b_taken & ~b_less
        if ALWAYS:
            b_tie &= ~_of_ranges(always_ptr, n_always, n)
        if lo + BLOCK_N > n_units:
            b_tie &= _first(n_units - n)
        b_of_word = _how_many(b_tie)
        in_block = tl.sum(b_of_word, 0)
        if tied >= ties:
            b_taken = b_less
        elif tied + in_block > ties:
            # Of each word as many as are left: the number of those up to each, in bytes, against that.
            left = ties - tied - (tl.cumsum(b_of_word, 0) - b_of_word)
            b_left = tl.minimum(tl.maximum(left, 0), 4).to(tl.uint32) * ONES
            b_fits = ((b_left | HIGH) - b_tie.to(tl.uint32) * ONES) >> 7
            b_taken = b_less | (b_tie & b_fits.to(tl.int32))
        tied += in_block
    if ALWAYS:
        b_taken |= _of_ranges(always_ptr, n_always, n)
    if lo + BLOCK_N > n_units:
        b_taken &= _first(n_units - n)
    b_of_word = _how_many(b_taken)
    b_to = listed + tl.cumsum(b_of_word, 0) - b_of_word
    for i in tl.static_range(4):
        b_one = (b_taken >> (8 * i)) & 1
        for w in tl.static_range(WIDTH):
            key = (n + i) * WIDTH + w
            m_key = (b_one != 0) & (key < n_keys) if WIDTH > 1 else b_one != 0
            tl.store(key_ptr + b_to * WIDTH + w, key, mask=m_key)
        b_to += b_one
    return listed + tl.sum(b_of_word, 0), tied


@triton.jit
def _words(code_ptr, lo, end, BLOCK_N: tl.constexpr):
    """The codes of BLOCK_N units from `lo`, a multiple of 4, as uint32 [BLOCK_N / 4]; the last code from `end` on."""
    word = tl.arange(0, BLOCK_N // 4)
    p_word = code_ptr.to(tl.pointer_type(tl.uint32)) + lo // 4 + word
    if lo + BLOCK_N <= end:
        # Without a mask threads load 16 codes at once.
        b_w = tl.load(p_word)
    else:
        n = lo + 4 * word
        b_w = tl.load(p_word, mask=n < end, other=0xFFFFFFFF)
        beyond = tl.minimum(tl.maximum(n + 4 - end, 0), 4)
        b_none = tl.full((BLOCK_N // 4,), 0xFFFFFFFF, tl.uint32)
        b_w |= tl.where(beyond > 0, b_none << (8 * (4 - beyond)).to(tl.uint32), 0)
    return b_w


@triton.jit
def _at_most(b_w, code):
    """Which codes of words are at most this one, or none for -1: int32, the lowest bit of each byte."""
    code = tl.zeros((), tl.int32) + code
    # Of seven bits, bit 7 of 128 + code - c tells, and no byte borrows from another. Where the eighth bits differ,
    # they tell.
    b_low = (tl.where(code < 128, code + 128, code).to(tl.uint32) * ONES) - (b_w & LOW)
    upper = tl.where(code < 128, 0, HIGH).to(tl.uint32)
    b_not = b_w ^ 0xFFFFFFFF
    b_high = (b_low & b_not) | (upper & (b_low | b_not))
    return ((b_high >> 7) & ONES).to(tl.int32)


@triton.jit
def _first(m):
    """The bits, as those of `_at_most`, of the first m of the four codes of a word; m is any number."""
    return tl.where(m > 1, 0x101, tl.where(m > 0, 1, 0)) | tl.where(m > 3, 0x1010000, tl.where(m > 2, 0x10000, 0))


@triton.jit
def _how_many(b_bits):
    """How many bits, of those of `_at_most`, are set."""
    # The product's highest byte is the sum of all.
    return ((b_bits.to(tl.uint32) * ONES) >> 24).to(tl.int32)


@triton.jit
def _code_of_mass(
    code_ptr, always_ptr, n_units, n_always, mass, ALWAYS: tl.constexpr, FREE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The smallest code up to which units, with the ranges, have the mass asked for, and how many units outside of the
    ranges have at most this code. FREE: code 0 has none."""
    c = tl.arange(0, BINS)
    # The codes of a bin have one weight: the bin is found by masses, and the code in it by counts.
    b_w = _weight(c)
    b_all = _histogram(code_ptr, n_units, BLOCK_N)
    b_always = tl.zeros((BINS,), tl.int32)
    n_free = tl.zeros((), tl.int32)
    always_free = tl.zeros((), tl.int32)
    if ALWAYS:
        for a in range(0, n_always):
            first, end = _always(always_ptr, a, n_units)
            b_always += _range_histogram(code_ptr, first, end, BLOCK_N)
            if FREE:
                always_free += _range_count(code_ptr, first, end, 0, BLOCK_N)
    if FREE:
        n_free = _count(code_ptr, 0, n_units, 0, BLOCK_N)
    b_rest = b_all - b_always
    b_has = b_all - tl.where(c == 0, n_free, 0)
    b_adds = b_rest - tl.where(c == 0, n_free - always_free, 0)
    base = tl.sum((b_has - b_adds).to(tl.int64) * b_w, 0)
    target = tl.cast(mass, tl.float64) * MASS_UNIT * tl.sum(b_has.to(tl.int64) * b_w, 0).to(tl.float64)
    b_mass = base + tl.cumsum(b_adds.to(tl.int64) * b_w, 0)
    bin = tl.min(tl.where(b_mass.to(tl.float64) >= target, c, BINS - 1), 0)
    before = base + tl.sum(tl.where(c < bin, b_adds.to(tl.int64) * b_w, 0), 0)
    # Of the units of the bin: those up to its first code, its second, and so on.
    lower = tl.sum(tl.where(c < bin, b_rest, 0), 0) + tl.where(bin == 0, n_free - always_free, 0)
    weight = tl.sum(tl.where(c == bin, b_w, 0), 0)
    code = bin * BIN + (BIN - 1)
    count = tl.sum(tl.where(c <= bin, b_rest, 0), 0)
    for i in tl.static_range(BIN - 1):
        found = bin * BIN + (BIN - 2 - i)
        n = _count_others(code_ptr, always_ptr, n_units, n_always, found, ALWAYS, BLOCK_N)
        reached = (before + (n - lower).to(tl.int64) * weight).to(tl.float64) >= target
        code = tl.where(reached, found, code)
        count = tl.where(reached, n, count)
    return code, count


@triton.jit
def _weight(c):
    """The mass int64 of a unit of bin c."""
    return tl.where(c % 2 == 0, W0, W1).to(tl.int64) >> (c // 2).to(tl.int64)


@triton.jit
def _histogram(code_ptr, n_units, BLOCK_N: tl.constexpr):
    """How many units each bin has, int32 [BINS]."""
    found = tl.zeros((BINS,), tl.int32)
    for lo in range(0, n_units, BLOCK_N):
        b_w = _words(code_ptr, lo, n_units, BLOCK_N)
        # Bins of the four places of a word, in any order.
        b_02, b_13 = tl.join(b_w & 0xFF, (b_w >> 16) & 0xFF), tl.join((b_w >> 8) & 0xFF, b_w >> 24)
        b_c = tl.reshape(tl.join(b_02, b_13), (BLOCK_N,), can_reorder=True).to(tl.int32)
        found += tl.histogram(b_c // BIN, BINS)
    # Those that are not there are counted with the last code.
    beyond = (n_units + BLOCK_N - 1) // BLOCK_N * BLOCK_N - n_units
    return found - tl.where(tl.arange(0, BINS) == BINS - 1, beyond, 0)


@triton.jit
def _range_histogram(code_ptr, first, end, BLOCK_N: tl.constexpr):
    """As `_histogram`, of the units from `first` to `end`."""
    found = tl.zeros((BINS,), tl.int32)
    for lo in range(first, end, BLOCK_N):
        n = lo + tl.arange(0, BLOCK_N)
        b_c = tl.load(code_ptr + n, mask=n < end, other=CODES - 1).to(tl.int32)
        found += tl.histogram(b_c // BIN, BINS)
    beyond = (end - first + BLOCK_N - 1) // BLOCK_N * BLOCK_N - (end - first)
    return found - tl.where(tl.arange(0, BINS) == BINS - 1, beyond, 0)


@triton.jit
def _count(code_ptr, lo, end, code, BLOCK_N: tl.constexpr):
    """How many units from `lo`, a multiple of 4, to `end` have at most this code, which may be -1. There are at most
    `MOST_BLOCKS` times BLOCK_N units."""
    # Sums in bytes: one for each block.
    found = tl.zeros((BLOCK_N // 4,), tl.uint32)
    for start in range(lo, end, BLOCK_N):
        found += _at_most(_words(code_ptr, start, end, BLOCK_N), code).to(tl.uint32)
    total = _sum_of_bytes(found)
    # Those that are not there have the last code.
    beyond = (end - lo + BLOCK_N - 1) // BLOCK_N * BLOCK_N - (end - lo)
    return total - tl.where(code == CODES - 1, beyond, 0)


@triton.jit
def _range_count(code_ptr, first, end, code, BLOCK_N: tl.constexpr):
    """As `_count`, of the units from any `first` on."""
    found = tl.zeros((BLOCK_N,), tl.int32)
    for lo in range(first, end, BLOCK_N):
        n = lo + tl.arange(0, BLOCK_N)
        b_c = tl.load(code_ptr + n, mask=n < end, other=CODES - 1).to(tl.int32)
        found += ((b_c <= code) & (n < end)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _count_others(
    code_ptr, always_ptr, n_units, n_always, code, ALWAYS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """How many units outside of the ranges have at most this code."""
    found = _count(code_ptr, 0, n_units, code, BLOCK_N)
    if ALWAYS:
        for a in range(0, n_always):
            first, end = _always(always_ptr, a, n_units)
            found -= _range_count(code_ptr, first, end, code, BLOCK_N)
    return found


@triton.jit
def _count_pair(
    code_ptr, always_ptr, n_units, n_always, code, ALWAYS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """How many units outside of the ranges have a smaller code, which is not the last one, and how many at most it."""
    b_fewer, b_found = tl.zeros((BLOCK_N // 4,), tl.uint32), tl.zeros((BLOCK_N // 4,), tl.uint32)
    for start in range(0, n_units, BLOCK_N):
        b_w = _words(code_ptr, start, n_units, BLOCK_N)
        b_fewer += _at_most(b_w, code - 1).to(tl.uint32)
        b_found += _at_most(b_w, code).to(tl.uint32)
    fewer, found = _sum_of_bytes(b_fewer), _sum_of_bytes(b_found)
    if ALWAYS:
        for a in range(0, n_always):
            first, end = _always(always_ptr, a, n_units)
            fewer -= _range_count(code_ptr, first, end, code - 1, BLOCK_N)
            found -= _range_count(code_ptr, first, end, code, BLOCK_N)
    return fewer, found


@triton.jit
def _sum_of_bytes(b_x):
    """The sum of all bytes of uint32, int32."""
    b_x = (b_x & 0xFF00FF) + ((b_x >> 8) & 0xFF00FF)
    return tl.sum(((b_x & 0xFFFF) + (b_x >> 16)).to(tl.int32), 0)


@triton.jit
def _code_of_count(
    code_ptr, always_ptr, n_units, n_always, others, wanted, ALWAYS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The smallest code up to which so many units outside of the ranges, of all these `others`, have a code; how many
    have a smaller one, and at most this one."""
    lo = tl.zeros((), tl.int32)
    hi = lo + (CODES - 1)
    below, upto = lo, lo + others
    # From where a sample has it, in steps that double, until it lies between two counts: then by halves.
    mid = tl.minimum(_sampled_code(code_ptr, n_units, wanted, BLOCK_N), hi - 1)
    step, from_below, from_above = lo + 1, lo, lo
    while lo < hi:
        fewer, n = _count_pair(code_ptr, always_ptr, n_units, n_always, mid, ALWAYS, BLOCK_N)
        enough, too_many = n >= wanted, fewer >= wanted
        below = tl.where(enough, tl.where(too_many, below, fewer), n)
        upto = tl.where(too_many, fewer, tl.where(enough, n, upto))
        # Between the two counts the search is over.
        lo = tl.where(enough, tl.where(too_many, lo, mid), mid + 1)
        hi = tl.where(too_many, mid - 1, tl.where(enough, mid, hi))
        from_below |= tl.where(enough, 0, 1)
        from_above |= tl.where(enough, 1, 0)
        further = tl.where(enough, tl.maximum(hi - step, lo), tl.minimum(lo + step, hi) - 1)
        mid = tl.where((from_below & from_above) != 0, (lo + hi) // 2, further)
        step += step
    return hi, below, upto


@triton.jit
def _sampled_code(code_ptr, n_units, wanted, BLOCK_N: tl.constexpr):
    """About the smallest code up to which so many units have a code, by those of as many words as a block has."""
    words = (n_units + 3) // 4
    i = tl.arange(0, BLOCK_N // 4)
    p_word = code_ptr.to(tl.pointer_type(tl.uint32)) + (i.to(tl.int64) * words // (BLOCK_N // 4)).to(tl.int32)
    # Codes behind the last unit may be anything, and are few.
    b_w = tl.load(p_word)
    wanted = (wanted.to(tl.int64) * BLOCK_N // tl.maximum(words * 4, 1)).to(tl.int32)
    code = tl.zeros((), tl.int32)
    for i in tl.static_range(8):
        least = code + (128 >> i)
        code = tl.where(tl.sum(_how_many(_at_most(b_w, least - 1)), 0) < wanted, least, code)
    return code


@triton.jit
def _of_ranges(always_ptr, n_always, n):
    """The bits, as those of `_at_most`, of the units n to n + 3 that lie in one of the ranges."""
    b_in = n * 0
    for a in range(0, n_always):
        first, end = tl.load(always_ptr + 2 * a), tl.load(always_ptr + 2 * a + 1)
        b_in |= _first(end - n) & ~_first(first - n)
    return b_in
