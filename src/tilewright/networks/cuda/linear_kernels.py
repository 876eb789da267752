"""Layers of a block on an NVIDIA GPU (stage T5): products with the norm before them or the sum behind them.

At one image a block is bound by the number of its kernels: a library runs norm, product and sum in one each.
"""

import triton
import triton.language as tl

from tilewright.devices.cuda.overlap import wait

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _channels(weights_ptr, k, CHANNELS: tl.constexpr):
    """Channels k [BLOCK_K] of weights in float32, zeros behind the last."""
    return tl.load(weights_ptr + k, mask=k < CHANNELS, other=0).to(tl.float32)


@triton.jit
def _part(x_ptr, at, k, m_m, shift, apart, CHANNELS: tl.constexpr, SUMMANDS: tl.constexpr):
    """Channels k [BLOCK_K] of rows that begin at `at` [BLOCK_M], in float32: the sum of SUMMANDS tensors, each `apart`
    from the next, and of `shift` [BLOCK_K], which may be None."""
    m_k = k < CHANNELS
    place, m = x_ptr + at[:, None] + k[None, :], m_m[:, None] & m_k[None, :]
    b_x = tl.load(place, mask=m, other=0).to(tl.float32)
    for i in tl.static_range(1, SUMMANDS):
        b_x += tl.load(place + i * apart, mask=m, other=0).to(tl.float32)
    if shift is not None:
        b_x += shift[None, :]
    return b_x


@triton.jit
def _normed(b_x, mean, scale, gain, offset):
    """A part of rows less their mean, scaled, with the norm's own weights; zeros behind the last channel."""
    return (b_x - mean[:, None]) * scale[:, None] * gain[None, :] + offset[None, :]


@triton.jit
def _moments(b_x, k, eps, CHANNELS: tl.constexpr):
    """Mean, and one over the standard deviation, of rows in one piece."""
    mean = tl.sum(b_x, 1) / CHANNELS
    off = tl.where((k < CHANNELS)[None, :], b_x - mean[:, None], 0.0)
    return mean, tl.rsqrt(tl.sum(off * off, 1) / CHANNELS + eps)


@triton.jit
def _with_product(
    acc, x_ptr, at, m_m, shift_ptr, apart, gain_ptr, offset_ptr, eps, weight_ptr, to, m_n,
    CHANNELS: tl.constexpr, SUMMANDS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] and the product of normed rows that begin at `at`, see `_part`, with weights that begin at
    `to` [BLOCK_N]. Each program norms its rows by itself: they are few, and stay in the cache. OVERLAP: it waits, after
    all weights are loaded where rows are in one piece."""
    dtype = weight_ptr.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    if BLOCK_K >= CHANNELS:
        m_weight = (k < CHANNELS)[:, None] & m_n[None, :]
        b_weight = tl.load(weight_ptr + to[None, :] + k[:, None], mask=m_weight, other=0)
        gain, offset = _channels(gain_ptr, k, CHANNELS), _channels(offset_ptr, k, CHANNELS)
        shift = None if shift_ptr is None else _channels(shift_ptr, k, CHANNELS)
        wait(OVERLAP)
        b_x = _part(x_ptr, at, k, m_m, shift, apart, CHANNELS, SUMMANDS)
        mean, scale = _moments(b_x, k, eps, CHANNELS)
        b_normed = _normed(b_x, mean, scale, gain, offset).to(dtype)
        acc = tl.dot(b_normed, b_weight, acc, input_precision=PRECISION)
    else:
        wait(OVERLAP)
        total = tl.zeros_like(at).to(tl.float32)
        for lo in tl.static_range(0, CHANNELS, BLOCK_K):
            shift = None if shift_ptr is None else _channels(shift_ptr, lo + k, CHANNELS)
            total += tl.sum(_part(x_ptr, at, lo + k, m_m, shift, apart, CHANNELS, SUMMANDS), 1)
        mean = total / CHANNELS
        squares = tl.zeros_like(mean)
        for lo in tl.static_range(0, CHANNELS, BLOCK_K):
            shift = None if shift_ptr is None else _channels(shift_ptr, lo + k, CHANNELS)
            off = _part(x_ptr, at, lo + k, m_m, shift, apart, CHANNELS, SUMMANDS) - mean[:, None]
            off = tl.where((lo + k < CHANNELS)[None, :], off, 0.0)
            squares += tl.sum(off * off, 1)
        scale = tl.rsqrt(squares / CHANNELS + eps)
        for lo in tl.static_range(0, CHANNELS, BLOCK_K):
            shift = None if shift_ptr is None else _channels(shift_ptr, lo + k, CHANNELS)
            b_x = _part(x_ptr, at, lo + k, m_m, shift, apart, CHANNELS, SUMMANDS)
            gain, offset = _channels(gain_ptr, lo + k, CHANNELS), _channels(offset_ptr, lo + k, CHANNELS)
            b_normed = _normed(b_x, mean, scale, gain, offset).to(dtype)
            m_weight = (lo + k < CHANNELS)[:, None] & m_n[None, :]
            b_weight = tl.load(weight_ptr + to[None, :] + (lo + k)[:, None], mask=m_weight, other=0)
            acc = tl.dot(b_normed, b_weight, acc, input_precision=PRECISION)
    return acc


@triton.jit
def tilewright_norm(
    out_ptr, x_ptr, shift_ptr, gain_ptr, offset_ptr, rows, apart, eps, CHANNELS: tl.constexpr, SUMMANDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows through a layer norm. Grid: (cdiv(rows, BLOCK_M),).

    x_ptr: [SUMMANDS, rows, CHANNELS], each `apart` from the next; shift_ptr: [CHANNELS], added to their sum, or None;
    gain_ptr, offset_ptr: [CHANNELS], of the norm; out_ptr: [rows, CHANNELS]. BLOCK_K: no less than CHANNELS.
    """
    m, k = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64), tl.arange(0, BLOCK_K)
    at, m_m = m * CHANNELS, m < rows
    gain, offset = _channels(gain_ptr, k, CHANNELS), _channels(offset_ptr, k, CHANNELS)
    shift = None if shift_ptr is None else _channels(shift_ptr, k, CHANNELS)
    wait(OVERLAP)
    b_x = _part(x_ptr, at, k, m_m, shift, apart, CHANNELS, SUMMANDS)
    mean, scale = _moments(b_x, k, eps, CHANNELS)
    b_normed = _normed(b_x, mean, scale, gain, offset)
    place, m_out = out_ptr + at[:, None] + k[None, :], m_m[:, None] & (k < CHANNELS)[None, :]
    tl.store(place, b_normed.to(out_ptr.dtype.element_ty), mask=m_out)


@triton.jit
def tilewright_norm_linear(
    out_ptr, x_ptr, shift_ptr, gain_ptr, offset_ptr, weight_ptr, bias_ptr, rows, features, apart, eps,
    CHANNELS: tl.constexpr, SUMMANDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows through a layer norm and a linear layer. Grid: (cdiv(rows, BLOCK_M), cdiv(features, BLOCK_N)).

    x_ptr: [SUMMANDS, rows, CHANNELS], each `apart` from the next; shift_ptr: [CHANNELS], added to their sum, or None;
    gain_ptr, offset_ptr: [CHANNELS], of the norm; weight_ptr: [features, CHANNELS]; bias_ptr: [features]; out_ptr:
    [rows, features].
    """
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = m < rows, n < features
    b_bias = tl.load(bias_ptr + n, mask=m_n, other=0).to(tl.float32)
    acc = _with_product(
        tl.zeros((BLOCK_M, BLOCK_N), tl.float32), x_ptr, m * CHANNELS, m_m, shift_ptr, apart, gain_ptr, offset_ptr,
        eps, weight_ptr, n * CHANNELS, m_n, CHANNELS, SUMMANDS, BLOCK_K, PRECISION, OVERLAP,
    )  # fmt: skip
    acc += b_bias[None, :]
    place = out_ptr + m[:, None] * features + n[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def _with_tap(
    acc, tap, x_ptr, line, x, columns, m_m, gain_ptr, offset_ptr, eps, weight_ptr, n, m_n, STEP: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """acc and one place of patches, the number `tap` of STEP * STEP, that begin in row `line` and column `x`."""
    at = ((line + tap // STEP) * columns + x + tap % STEP) * CHANNELS
    return _with_product(
        acc, x_ptr, at, m_m, None, 0, gain_ptr, offset_ptr, eps, weight_ptr, (n * STEP * STEP + tap) * CHANNELS,
        m_n, CHANNELS, 1, BLOCK_K, PRECISION, OVERLAP,
    )  # fmt: skip


@triton.jit
def tilewright_norm_patches(
    out_ptr, x_ptr, gain_ptr, offset_ptr, weight_ptr, batch, rows, columns, features, eps,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUMMANDS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Tokens through a layer norm and a convolution of STEP x STEP patches that do not overlap, as SUMMANDS of it.

    Grid: (cdiv(patches, BLOCK_M), cdiv(features, BLOCK_N), SUMMANDS): a patch has so many values that a program of all
    would take long. x_ptr: [batch, rows, columns, CHANNELS]; weight_ptr: [features, STEP * STEP, CHANNELS]; out_ptr:
    [SUMMANDS, patches, features], float32.
    """
    of_rows, of_columns = rows // STEP, columns // STEP
    patches = batch * of_rows * of_columns
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = m < patches, n < features
    line, x = m // of_columns, m % of_columns * STEP
    line = (line // of_rows * rows + line % of_rows * STEP).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    TAPS: tl.constexpr = STEP * STEP // SUMMANDS
    # The first, often the only one, apart from the loop: it waits.
    acc = _with_tap(
        acc, tl.program_id(2) * TAPS, x_ptr, line, x, columns, m_m, gain_ptr, offset_ptr, eps, weight_ptr, n, m_n,
        STEP, CHANNELS, BLOCK_K, PRECISION, OVERLAP,
    )  # fmt: skip
    for i in range(1, TAPS):
        acc = _with_tap(
            acc, tl.program_id(2) * TAPS + i, x_ptr, line, x, columns, m_m, gain_ptr, offset_ptr, eps, weight_ptr, n,
            m_n, STEP, CHANNELS, BLOCK_K, PRECISION, False,
        )  # fmt: skip
    place = out_ptr + (tl.program_id(2) * patches + m[:, None]).to(tl.int64) * features + n[None, :]
    tl.store(place, acc, mask=m_m[:, None] & m_n[None, :])


@triton.jit
def tilewright_patches(
    out_ptr, x_ptr, weight_ptr, batch, rows, columns, features, of_b, of_c, of_y, of_x,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, CHANNELS: tl.constexpr, SUMMANDS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A map through a convolution of SIDE x SIDE overlapping patches, centred, as SUMMANDS of it.

    Grid: (cdiv(patches, BLOCK_M), cdiv(features, BLOCK_N), SUMMANDS). x_ptr: [batch, CHANNELS, rows, columns] by the
    strides `of_b` to `of_x`; weight_ptr: [features, SIDE * SIDE, CHANNELS]; out_ptr: [SUMMANDS, patches, features].
    WHOLE: whether channels are a multiple of BLOCK_K: a step then reads neighbours in memory.
    """
    of_rows, of_columns = (rows + STRIDE - 1) // STRIDE, (columns + STRIDE - 1) // STRIDE
    patches = batch * of_rows * of_columns
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = m < patches, n < features
    line = m // of_columns
    y, x = line % of_rows * STRIDE - SIDE // 2, m % of_columns * STRIDE - SIDE // 2
    first = x_ptr + (line // of_rows).to(tl.int64) * of_b
    VALUES: tl.constexpr = SIDE * SIDE * CHANNELS
    STEPS: tl.constexpr = ((VALUES + BLOCK_K - 1) // BLOCK_K + SUMMANDS - 1) // SUMMANDS
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Before any weight: whoever wrote them may be the kernel ahead of a network's first.
    wait(OVERLAP)
    for step in range(STEPS):
        lo = (tl.program_id(2) * STEPS + step) * BLOCK_K
        k = lo + tl.arange(0, BLOCK_K)
        if WHOLE:
            tap, c = lo // CHANNELS, lo % CHANNELS + tl.arange(0, BLOCK_K)
            at_y, at_x = y + tap // SIDE, x + tap % SIDE
            m_x = m_m & (at_y >= 0) & (at_y < rows) & (at_x >= 0) & (at_x < columns)
            place = first + at_y * of_y + at_x * of_x
            b_x = tl.load(place[:, None] + (c * of_c)[None, :], mask=m_x[:, None] & (k < VALUES)[None, :], other=0)
        else:
            tap, c = k // CHANNELS, k % CHANNELS
            at_y, at_x = y[:, None] + (tap // SIDE)[None, :], x[:, None] + (tap % SIDE)[None, :]
            m_x = (at_y >= 0) & (at_y < rows) & (at_x >= 0) & (at_x < columns)
            place = first[:, None] + at_y * of_y + at_x * of_x + (c * of_c)[None, :]
            b_x = tl.load(place, mask=m_x & m_m[:, None] & (k < VALUES)[None, :], other=0)
        m_weight = (k < VALUES)[:, None] & m_n[None, :]
        b_weight = tl.load(weight_ptr + n[None, :] * VALUES + k[:, None], mask=m_weight, other=0)
        acc = tl.dot(b_x, b_weight, acc, input_precision=PRECISION)
    place = out_ptr + (tl.program_id(2) * patches + m[:, None]).to(tl.int64) * features + n[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def tilewright_norm_attention(
    out_ptr, x_ptr, gain_ptr, offset_ptr, weight_ptr, bias_ptr, kv_ptr, tokens, keys, eps, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Tokens through a layer norm, the linear layer of queries, and attention. Grid: (batch * cdiv(tokens, BLOCK_M),
    HEADS).

    x_ptr, out_ptr: [batch, tokens, CHANNELS]; weight_ptr: [CHANNELS, CHANNELS]; bias_ptr: [CHANNELS]; kv_ptr: [batch,
    keys, 2, HEADS, WIDTH]. Queries are rounded, as they are in memory.
    """
    tiles = tl.cdiv(tokens, BLOCK_M)
    b, h = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1)
    m, d = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    m_m, m_d = m < tokens, d < WIDTH
    at, of_head = (b * tokens + m) * CHANNELS, h * WIDTH + d
    dtype = kv_ptr.dtype.element_ty
    b_bias = tl.load(bias_ptr + of_head, mask=m_d, other=0).to(tl.float32)
    q = tl.zeros((BLOCK_M, BLOCK_D), tl.float32) + b_bias[None, :]
    q = _with_product(
        q, x_ptr, at, m_m, None, 0, gain_ptr, offset_ptr, eps, weight_ptr, of_head * CHANNELS, m_d, CHANNELS, 1,
        BLOCK_K, PRECISION, OVERLAP,
    ).to(dtype)  # fmt: skip
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    most, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for lo in range(0, keys, BLOCK_N):
        n = lo + tl.arange(0, BLOCK_N)
        place = kv_ptr + (b * keys + n) * 2 * CHANNELS
        m_key = (n < keys)[None, :] & m_d[:, None]
        b_k = tl.load(place[None, :] + of_head[:, None], mask=m_key, other=0)  # [BLOCK_D, BLOCK_N]
        s = tl.dot(q, b_k, input_precision=PRECISION) * (scale * LOG2E)
        s = tl.where((n < keys)[None, :], s, -float("inf"))
        larger = tl.maximum(most, tl.max(s, 1))
        share, p = tl.exp2(most - larger), tl.exp2(s - larger[:, None])
        most, total, acc = larger, total * share + tl.sum(p, 1), acc * share[:, None]
        b_v = tl.load(place[:, None] + (CHANNELS + of_head)[None, :], mask=tl.trans(m_key), other=0)
        acc = tl.dot(p.to(dtype), b_v, acc, input_precision=PRECISION)
    acc /= total[:, None]
    m_out = m_m[:, None] & m_d[None, :]
    tl.store(out_ptr + at[:, None] + of_head[None, :], acc.to(out_ptr.dtype.element_ty), mask=m_out)


@triton.jit
def tilewright_linear_add(
    out_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr, rows, features,
    CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows through a linear layer, added to others. Grid: (cdiv(rows, BLOCK_M), cdiv(features, BLOCK_N)).

    x_ptr: [rows, CHANNELS]; weight_ptr: [features, CHANNELS]; bias_ptr: [features]; residual_ptr, out_ptr: [rows,
    features].
    """
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_m, m_n = m < rows, n < features
    m_out = m_m[:, None] & m_n[None, :]
    place = m[:, None] * features + n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc += tl.load(bias_ptr + n, mask=m_n, other=0).to(tl.float32)[None, :]
    wait(OVERLAP)
    b_residual = tl.load(residual_ptr + place, mask=m_out, other=0)
    for lo in range(0, CHANNELS, BLOCK_K):
        m_k = lo + k < CHANNELS
        at = x_ptr + m[:, None] * CHANNELS + (lo + k)[None, :]
        to = weight_ptr + n[None, :] * CHANNELS + (lo + k)[:, None]
        b_x = tl.load(at, mask=m_m[:, None] & m_k[None, :], other=0)
        b_weight = tl.load(to, mask=m_n[None, :] & m_k[:, None], other=0)
        acc = tl.dot(b_x, b_weight, acc, input_precision=PRECISION)
    acc += b_residual.to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=m_out)
