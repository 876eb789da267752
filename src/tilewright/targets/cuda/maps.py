"""Operators of networks of maps on an NVIDIA GPU (stage T5): launches of `map_kernels` and `linear_kernels`.

The contract is that of `targets`.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
from triton.runtime.errors import OutOfResources

from tilewright.core.errors import PatternError
from tilewright.targets.cuda import linear_kernels, map_kernels

# What is raised for a form that does not fit the device, or the tensors.
REFUSALS = (PatternError, OutOfResources)
# Levels beside the first that the kernel reads.
MOST_GATHERED = 3
# Places of a smaller map that a program reads: a product has 16 at least, and weights of more would not fit.
LEAST_TAPS, MOST_TAPS = 16, 256


class Form(NamedTuple):
    """Pixels of a row and channels that a program works on at once, its warps, and steps whose loads overlap; for
    `decode` also how many rows, and whether what pixels share of a smaller map is loaded once and spread by a
    product."""

    pixels: int
    channels: int
    num_warps: int
    num_stages: int = 1
    rows: int = 1
    spread: bool = False

    def __str__(self):
        return "-".join(map(str, self[:4])) + (f"-{self.rows}" if self.rows > 1 else "") + "-spread" * self.spread


class Tile(NamedTuple):
    """Rows and features that a program works on, channels that it multiplies at once, its warps, and steps whose loads
    overlap."""

    rows: int
    features: int
    channels: int
    num_warps: int
    num_stages: int = 1

    def __str__(self):
        return f"{self.rows}x{self.features}x{self.channels}-{self.num_warps}-{self.num_stages}"


# For norms, whose rows are in one piece where a program's channels are as many as a row's.
NORMED = (
    *(Tile(16, 64, 512, 4), Tile(32, 64, 512, 4), Tile(64, 64, 512, 8)),
    *(Tile(32, 64, 64, 4), Tile(64, 64, 64, 4), Tile(128, 64, 64, 8), Tile(128, 128, 64, 8)),
)
# ASSUME: these are worth timing; which is the fastest depends on the map, and is measured (`networks.choose_kernels`).
FORMS = {
    "decode": (
        *(Form(64, 64, 8), Form(64, 32, 4), Form(64, 32, 4, 2)),
        *(Form(32, 64, 4), Form(32, 32, 4), Form(32, 32, 4, 3)),
        *(Form(8, 64, 4, stages, 8, True) for stages in (1, 2, 3)),
        *(Form(16, 64, 8, stages, 8, True) for stages in (1, 2, 3)),
        *(Form(16, 32, 8, 3, 8, True), Form(8, 32, 4, 3, 8, True)),
    ),
    "dwconv_gelu": (Form(8, 64, 2), Form(8, 64, 4), Form(16, 64, 4), Form(16, 32, 2), Form(8, 128, 4)),
    "norm_linear": NORMED,
    "reduced_linear": NORMED,
    "linear_add": (
        *(Tile(16, 32, 128, 2, 4), Tile(16, 64, 128, 4, 4), Tile(32, 32, 128, 4, 4), Tile(32, 64, 128, 4, 3)),
        *(Tile(64, 64, 64, 4, 4), Tile(128, 64, 64, 4, 3), Tile(128, 64, 64, 8, 3)),
    ),
}


def decode(maps, weights, bias, grid, classes, classes_bias, form):
    """See `targets`."""
    _check(*maps, *weights, bias, classes, classes_bias)
    channels, (rows, columns) = classes.shape[1], grid
    if channels % form.channels:
        raise PatternError(f"decode: expected channels in multiples of {form.channels}, found {channels}")
    tokens = [x.permute(0, 2, 3, 1) for x in maps]
    whole = tuple(tokens[0].shape[1:3]) == tuple(grid)
    first, weight = (tokens[0].contiguous(), weights[0].contiguous()) if whole else (None, None)
    # On their own grids products are small.
    parts = [F.linear(x, w) for x, w in zip(tokens[whole:], weights[whole:], strict=True)]
    if len(parts) > MOST_GATHERED:
        raise PatternError(f"decode: expected at most {MOST_GATHERED} levels on other grids, found {len(parts)}")
    sides = [side for part in parts for side in part.shape[1:3]]
    if any(part.numel() >= 2**31 for part in parts):
        raise PatternError("decode: expected less than 2^31 values of a level, found more: take a smaller batch")
    parts += [None] * (MOST_GATHERED - len(parts))
    sides += [1] * (2 * MOST_GATHERED - len(sides))
    n_classes, taken = len(classes), maps[0].shape[1]
    out = classes.new_empty(len(maps[0]), rows, columns, n_classes)
    most = max(16, 1 << (n_classes.bit_length() - 1))
    rest = 0 if most >= n_classes else max(16, triton.next_power_of_2(n_classes - most))
    programs = len(maps[0]) * triton.cdiv(rows, form.rows) * triton.cdiv(columns, form.pixels)
    constants = (n_classes, channels, taken, form.rows, form.pixels, form.channels)
    held = [tuple(part.shape[1:3]) for part in parts if part is not None and form.spread]
    read = [_read(form, (rows, columns), side) for side in held] + [(0, 0)] * (MOST_GATHERED - len(held))
    map_kernels.tilewright_decode[(programs,)](
        out, bias.contiguous(), classes.contiguous(), classes_bias.contiguous(), first, weight, *parts,
        rows, columns, *sides, *constants, max(16, triton.next_power_of_2(taken)), most, rest, _precision(out),
        *(number for numbers in read for number in numbers), num_warps=form.num_warps, num_stages=form.num_stages,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


@cache
def _read(form, grid, smaller):
    """``(columns, power of two that holds all)`` of what rectangles of a form read of a smaller map, at most."""
    high, wide = (
        _most(block, whole, side) for block, whole, side in zip((form.rows, form.pixels), grid, smaller, strict=True)
    )
    taps = max(LEAST_TAPS, triton.next_power_of_2(high * wide))
    if taps > MOST_TAPS:
        raise PatternError(f"decode: expected rectangles that read at most {MOST_TAPS} places of a map, found {taps}")
    return wide, taps


def _most(block, whole, side):
    """Rows of a map of `side` that `block` rows of one of `whole` read, at most."""
    at = np.maximum((np.arange(whole) + 0.5) * (side / whole) - 0.5, 0).astype(int)
    begin = np.arange(0, whole, block)
    end = np.minimum(begin + block, whole) - 1
    most = int((np.minimum(at[end] + 1, side - 1) - at[begin]).max()) + 1
    # The kernel's float32 is exact for such shares; for others it may take one row for its neighbour.
    return most if math.frexp(side / whole)[0] == 0.5 else min(side, most + 1)


def dwconv_gelu(x, grid, weight, bias, form):
    """See `targets`."""
    _check(x, weight, bias)
    (batch, tokens, channels), (rows, columns) = x.shape, grid
    if tokens != rows * columns or tuple(weight.shape) != (channels, 1, 3, 3):
        found = f"{list(x.shape)} and weights {list(weight.shape)}"
        raise PatternError(f"dwconv_gelu: expected {rows} x {columns} tokens and a 3 x 3 each channel, found {found}")
    x = x.contiguous()
    out = torch.empty_like(x)
    programs = batch * rows * triton.cdiv(columns, form.pixels), triton.cdiv(channels, form.channels)
    map_kernels.tilewright_dwconv_gelu[programs](
        out, x, weight.contiguous(), bias.contiguous(), rows, columns, channels, form.pixels, form.channels,
        num_warps=form.num_warps,
    )  # fmt: skip
    return out


def norm_linear(x, gain, offset, eps, weight, bias, kept, form):
    """See `targets`."""
    return _norm_linear(x, None, gain, offset, eps, weight, bias, kept, form)


def reduced_linear(x, grid, conv_weight, conv_bias, gain, offset, eps, weight, bias, form):
    """See `targets`."""
    _check(x, conv_weight, conv_bias)
    x = x.unflatten(1, tuple(grid)).permute(0, 3, 1, 2)
    # A library adds the bias in a kernel of its own.
    x = F.conv2d(x, conv_weight, stride=conv_weight.shape[2:]).permute(0, 2, 3, 1).flatten(1, 2)
    return _norm_linear(x, conv_bias, gain, offset, eps, weight, bias, False, form)[0]


def _norm_linear(x, shift, gain, offset, eps, weight, bias, kept, form):
    """``(linear(norm(x + shift)), norm(x + shift))``; the latter is empty unless it is `kept`."""
    _check(x, gain, offset, weight, bias)
    x, (features, channels) = x.contiguous(), weight.shape
    rows = math.prod(x.shape[:-1])
    out, normed = x.new_empty(*x.shape[:-1], features), torch.empty_like(x) if kept else x.new_empty(0)
    linear_kernels.tilewright_norm_linear[triton.cdiv(rows, form.rows), triton.cdiv(features, form.features)](
        out, normed if kept else None, x, shift, gain.contiguous(), offset.contiguous(), weight.contiguous(),
        bias.contiguous(), rows, features, eps, channels, *_blocks(form, channels), _precision(x),
        num_warps=form.num_warps, num_stages=form.num_stages,
    )  # fmt: skip
    return out, normed


def linear_add(x, weight, bias, residual, form):
    """See `targets`."""
    _check(x, weight, bias, residual)
    x, residual, (features, channels) = x.contiguous(), residual.contiguous(), weight.shape
    rows, out = math.prod(x.shape[:-1]), torch.empty_like(residual)
    linear_kernels.tilewright_linear_add[triton.cdiv(rows, form.rows), triton.cdiv(features, form.features)](
        out, x, weight.contiguous(), bias.contiguous(), residual, rows, features, channels,
        *_blocks(form, channels), _precision(x), num_warps=form.num_warps, num_stages=form.num_stages,
    )  # fmt: skip
    return out


def _blocks(form, channels):
    """Rows, features and channels of a program: of the latter no more than there are."""
    return form.rows, form.features, min(form.channels, max(16, triton.next_power_of_2(channels)))


def _precision(x):
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _check(first, *others):
    """Raise `PatternError` unless all tensors are of one type and none asks for a gradient."""
    for x in (first, *others):
        if x.dtype != first.dtype:
            raise PatternError(f"maps: expected tensors of one type, {first.dtype}, found {x.dtype}")
        if x.requires_grad and torch.is_grad_enabled():
            raise PatternError("maps: this operator has no backward; call it under torch.no_grad()")
