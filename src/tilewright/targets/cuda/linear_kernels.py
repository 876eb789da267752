"""Linear layers of a block on an NVIDIA GPU (stage T5), with the norm before them or the sum behind them.

At one image a block is bound by the number of its kernels: a library runs norm, product and sum in one each.
"""

import triton
import triton.language as tl


@triton.jit
def _part(x_ptr, shift_ptr, m, k, m_m, CHANNELS: tl.constexpr):
    """Channels k [BLOCK_K] of rows m [BLOCK_M] in float32, plus those of `shift_ptr`, rounded as a sum in memory is."""
    m_k = k < CHANNELS
    b_x = tl.load(x_ptr + m[:, None] * CHANNELS + k[None, :], mask=m_m[:, None] & m_k[None, :], other=0)
    if shift_ptr is not None:
        b_shift = tl.load(shift_ptr + k, mask=m_k, other=0).to(tl.float32)
        b_x = (b_x.to(tl.float32) + b_shift[None, :]).to(x_ptr.dtype.element_ty)
    return b_x.to(tl.float32)


@triton.jit
def _normed(b_x, mean, scale, gain_ptr, offset_ptr, k, CHANNELS: tl.constexpr):
    """A part of rows less their mean, scaled, with the norm's own weights; zeros behind the last channel."""
    gain = tl.load(gain_ptr + k, mask=k < CHANNELS, other=0).to(tl.float32)
    offset = tl.load(offset_ptr + k, mask=k < CHANNELS, other=0).to(tl.float32)
    return (b_x - mean[:, None]) * scale[:, None] * gain[None, :] + offset[None, :]


@triton.jit
def tilewright_norm_linear(
    out_ptr, kept_ptr, x_ptr, shift_ptr, gain_ptr, offset_ptr, weight_ptr, bias_ptr, rows, features, eps,
    CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows through a layer norm and a linear layer. Grid: (cdiv(rows, BLOCK_M), cdiv(features, BLOCK_N)).

    x_ptr: [rows, CHANNELS]; shift_ptr: [CHANNELS], added before, or None; kept_ptr: [rows, CHANNELS], takes the norm's
    result, or None; gain_ptr, offset_ptr: [CHANNELS], of the norm; weight_ptr: [features, CHANNELS]; bias_ptr:
    [features]; out_ptr: [rows, features]. Each program norms its rows by itself: they are few, and stay in the cache.
    """
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = m < rows, n < features
    dtype = x_ptr.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if BLOCK_K >= CHANNELS:
        b_x = _part(x_ptr, shift_ptr, m, k, m_m, CHANNELS)
        b_weight = tl.load(
            weight_ptr + n[None, :] * CHANNELS + k[:, None], mask=m_n[None, :] & (k < CHANNELS)[:, None], other=0
        )
        mean = tl.sum(b_x, 1) / CHANNELS
        off = tl.where((k < CHANNELS)[None, :], b_x - mean[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(off * off, 1) / CHANNELS + eps)
        b_normed = _normed(b_x, mean, scale, gain_ptr, offset_ptr, k, CHANNELS).to(dtype)
        if kept_ptr is not None:
            if tl.program_id(1) == 0:
                m_kept = m_m[:, None] & (k < CHANNELS)[None, :]
                tl.store(kept_ptr + m[:, None] * CHANNELS + k[None, :], b_normed, mask=m_kept)
        acc = tl.dot(b_normed, b_weight, acc, input_precision=PRECISION)
    else:
        total = tl.zeros((BLOCK_M,), tl.float32)
        for lo in tl.static_range(0, CHANNELS, BLOCK_K):
            total += tl.sum(_part(x_ptr, shift_ptr, m, lo + k, m_m, CHANNELS), 1)
        mean = total / CHANNELS
        squares = tl.zeros((BLOCK_M,), tl.float32)
        for lo in tl.static_range(0, CHANNELS, BLOCK_K):
            off = _part(x_ptr, shift_ptr, m, lo + k, m_m, CHANNELS) - mean[:, None]
            off = tl.where((lo + k < CHANNELS)[None, :], off, 0.0)
            squares += tl.sum(off * off, 1)
        scale = tl.rsqrt(squares / CHANNELS + eps)
        for lo in tl.static_range(0, CHANNELS, BLOCK_K):
            b_x = _part(x_ptr, shift_ptr, m, lo + k, m_m, CHANNELS)
            m_k = lo + k < CHANNELS
            b_normed = _normed(b_x, mean, scale, gain_ptr, offset_ptr, lo + k, CHANNELS).to(dtype)
            if kept_ptr is not None:
                if tl.program_id(1) == 0:
                    place = kept_ptr + m[:, None] * CHANNELS + (lo + k)[None, :]
                    tl.store(place, b_normed, mask=m_m[:, None] & m_k[None, :])
            b_weight = tl.load(
                weight_ptr + n[None, :] * CHANNELS + (lo + k)[:, None], mask=m_n[None, :] & m_k[:, None], other=0
            )
            acc = tl.dot(b_normed, b_weight, acc, input_precision=PRECISION)
    acc += tl.load(bias_ptr + n, mask=m_n, other=0).to(tl.float32)[None, :]
    place = out_ptr + m[:, None] * features + n[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def tilewright_linear_add(
    out_ptr, x_ptr, weight_ptr, bias_ptr, residual_ptr, rows, features,
    CHANNELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
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
    b_residual = tl.load(residual_ptr + place, mask=m_out, other=0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc += tl.load(bias_ptr + n, mask=m_n, other=0).to(tl.float32)[None, :]
    for lo in range(0, CHANNELS, BLOCK_K):
        m_k = lo + k < CHANNELS
        at = x_ptr + m[:, None] * CHANNELS + (lo + k)[None, :]
        to = weight_ptr + n[None, :] * CHANNELS + (lo + k)[:, None]
        b_x = tl.load(at, mask=m_m[:, None] & m_k[None, :], other=0)
        b_weight = tl.load(to, mask=m_n[None, :] & m_k[:, None], other=0)
        acc = tl.dot(b_x, b_weight, acc, input_precision=PRECISION)
    acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32) + b_residual.to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=m_out)
