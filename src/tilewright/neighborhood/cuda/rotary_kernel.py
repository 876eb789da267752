"""Heads of queries and keys on a 3-D grid, normed, scaled and turned by their position, on an NVIDIA GPU.

One pass reads what a projection made and writes what attention reads: it is bound by memory.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# Channels of one head that a program holds of its tokens, and its warps.
HELD, WARPS = 2048, 4


@triton.jit
def _turned(b_x, gain, eps, scale, cos, sin, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Heads [BLOCK_M, BLOCK_D] after their norm, times `scale`; pairs of channels turned by angles [BLOCK_M, pairs]."""
    square = tl.sum(b_x * b_x, 1) / DIM
    b_x = b_x * tl.rsqrt(square + eps)[:, None] * gain[None, :] * scale
    even, odd = tl.split(tl.reshape(b_x, (BLOCK_M, BLOCK_D // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK_M, BLOCK_D))


# Grids differ from video to video, and from tile to tile.
@triton.jit(do_not_specialize=["tokens", "frames", "rows", "columns", "heads"])
def tilewright_rotary(
    q_out_ptr, k_out_ptr, q_ptr, k_ptr, q_gain_ptr, k_gain_ptr, tokens, frames, rows, columns, heads,
    q_token, q_head, k_token, k_head, q_eps, k_eps, scale,
    DIM: tl.constexpr, OF_T: tl.constexpr, OF_H: tl.constexpr, LOG2_BASE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Queries, which are scaled, and keys. Grid: (cdiv(tokens, BLOCK_M),), some tokens of all heads a program.

    q_ptr, k_ptr: tokens `q_token` and heads `q_head` apart, and likewise; q_gain_ptr, k_gain_ptr: [DIM]; q_out_ptr,
    k_out_ptr: [tokens, heads, DIM]. The first OF_T channels turn by the frame, OF_H by the row, the others by the
    column: channels 2 i and 2 i + 1 of `n` by the position times base^(-2 i / n).
    """
    m, d = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64), tl.arange(0, BLOCK_D)
    m_x = (m < tokens)[:, None] & (d < DIM)[None, :]
    # In float64 as diffusers has it: a program has few of these.
    pair = tl.arange(0, BLOCK_D // 2)
    in_t, in_h = pair < OF_T // 2, pair < (OF_T + OF_H) // 2
    begin = tl.where(in_t, 0, tl.where(in_h, OF_T // 2, (OF_T + OF_H) // 2))
    share = tl.where(in_t, OF_T, tl.where(in_h, OF_H, DIM - OF_T - OF_H))
    frequency = tl.exp2(-(2 * (pair - begin)).to(tl.float64) / share.to(tl.float64) * LOG2_BASE).to(tl.float32)
    row = m // columns
    t, y, x = row // rows % frames, row % rows, m % columns
    place = tl.where(in_t[None, :], t[:, None], tl.where(in_h[None, :], y[:, None], x[:, None]))
    angle = place.to(tl.float32) * frequency[None, :]  # [BLOCK_M, BLOCK_D // 2]
    cos, sin = tl.cos(angle), tl.sin(angle)
    q_gain = tl.load(q_gain_ptr + d, mask=d < DIM, other=0).to(tl.float32)
    k_gain = tl.load(k_gain_ptr + d, mask=d < DIM, other=0).to(tl.float32)
    for head in range(heads):
        out = (m * heads + head)[:, None] * DIM + d[None, :]
        b_q = tl.load(q_ptr + (m * q_token + head * q_head)[:, None] + d[None, :], mask=m_x, other=0).to(tl.float32)
        b_k = tl.load(k_ptr + (m * k_token + head * k_head)[:, None] + d[None, :], mask=m_x, other=0).to(tl.float32)
        b_q = _turned(b_q, q_gain, q_eps, scale, cos, sin, DIM, BLOCK_M, BLOCK_D)
        b_k = _turned(b_k, k_gain, k_eps, 1.0, cos, sin, DIM, BLOCK_M, BLOCK_D)
        tl.store(q_out_ptr + out, b_q.to(q_out_ptr.dtype.element_ty), mask=m_x)
        tl.store(k_out_ptr + out, b_k.to(k_out_ptr.dtype.element_ty), mask=m_x)


def rotary(
    q: Tensor, k: Tensor, q_gain: Tensor, k_gain: Tensor, eps: list[float], scale: float, split: list[int], base: float
) -> tuple[Tensor, Tensor]:
    """See `tilewright.neighborhood.rotary`."""
    _, frames, rows, columns, heads, dim = q.shape
    made = q.new_empty(q.shape), k.new_empty(k.shape)
    # A view, but where tokens have no common distance.
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q.flatten(0, 3), k.flatten(0, 3)))
    tokens, block_d = len(q), triton.next_power_of_2(dim)
    block_m = max(1, HELD // block_d)
    if tokens:
        with torch.cuda.device(q.device) if q.is_cuda else torch.no_grad():
            tilewright_rotary[(triton.cdiv(tokens, block_m),)](
                *made, q, k, q_gain.contiguous(), k_gain.contiguous(), tokens, frames, rows, columns, heads,
                q.stride(0), q.stride(1), k.stride(0), k.stride(1), *eps, scale,
                dim, split[0], split[1], math.log2(base), block_m, block_d, num_warps=WARPS,
            )  # fmt: skip
    return made
