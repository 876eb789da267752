"""Operators of networks of maps on an NVIDIA GPU (stage T5): launches of `map_kernels` and `linear_kernels`.

The contract is that of `networks.backends`.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
from triton.runtime.errors import OutOfResources

from tilewright.core.errors import PatternError
from tilewright.devices.cuda import launcher, overlap
from tilewright.networks.cuda import linear_kernels, map_kernels

# What is raised for a form that does not fit the device, or the tensors.
REFUSALS = (PatternError, OutOfResources)
# Levels beside the first that the kernel reads.
MOST_GATHERED = 3
# Places of a smaller map that a program reads: a product has 16 at least, and weights of more would not fit.
LEAST_TAPS, MOST_TAPS = 16, 256


class Form(NamedTuple):
    """Pixels of a row and channels that a program works on at once, its warps, steps whose loads overlap, and how many
    rows; for `decode` also whether what pixels share of a smaller map is loaded once and spread by a product."""

    pixels: int
    channels: int
    num_warps: int
    num_stages: int = 1
    rows: int = 1
    spread: bool = False

    def __str__(self) -> str:
        return "-".join(map(str, self[:4])) + (f"-{self.rows}" if self.rows > 1 else "") + "-spread" * self.spread


class Tile(NamedTuple):
    """Rows and features that a program works on, channels that it multiplies at once, its warps, and steps whose loads
    overlap."""

    rows: int
    features: int
    channels: int
    num_warps: int
    num_stages: int = 1

    def __str__(self) -> str:
        return f"{self.rows}x{self.features}x{self.channels}-{self.num_warps}-{self.num_stages}"


class Apart(NamedTuple):
    """A norm in a kernel of its own, of so many rows a program; all else by libraries."""

    rows: int

    def __str__(self) -> str:
        return f"norm-{self.rows}"


# Programs that keep a GPU busy, for which a convolution is cut into summands, and how many these may be: what follows
# adds them up.
BUSY, SUMMANDS = 512, 32
# Rows of a norm's program go by how wide they are.
APART, NARROW, NORM_WARPS = (Apart(4), Apart(16)), 128, 4
# ASSUME: these are worth timing; which is the fastest depends on the map, and is measured (`networks.choose_kernels`).
FORMS = {
    "decode": (
        *(Form(64, 64, 8), Form(64, 32, 4), Form(64, 32, 4, 2)),
        *(Form(32, 64, 4), Form(32, 32, 4), Form(32, 32, 4, 3)),
        *(Form(8, 64, 4, stages, 8, True) for stages in (1, 2, 3)),
        *(Form(16, 64, 8, stages, 8, True) for stages in (1, 2, 3)),
        *(Form(16, 32, 8, 3, 8, True), Form(8, 32, 4, 3, 8, True)),
    ),
    "dwconv_gelu": (
        *(Form(8, 64, 2), Form(8, 64, 4), Form(8, 128, 4)),
        *(Form(8, 64, 2, rows=2), Form(8, 64, 4, rows=2), Form(8, 64, 4, rows=4), Form(4, 64, 2, rows=4)),
    ),
    "norm": (*APART, Apart(64)),
    "patches": (
        *APART,
        *(Tile(16, 64, 64, 4, 3), Tile(32, 64, 64, 4, 3), Tile(64, 64, 64, 4, 3), Tile(64, 64, 32, 4, 3)),
    ),
    # Rows in one piece, and in several.
    "norm_linear": (
        *APART,
        *(Tile(16, 64, 512, 4), Tile(32, 64, 512, 4), Tile(64, 64, 512, 8)),
        *(Tile(32, 64, 64, 4), Tile(64, 64, 64, 4), Tile(128, 64, 64, 8), Tile(128, 128, 64, 8)),
    ),
    # Features of these are keys.
    "attention": (
        *APART,
        *(Tile(16, 64, 512, 4), Tile(16, 64, 512, 4, 3), Tile(32, 64, 512, 4), Tile(32, 128, 512, 4, 2)),
        *(Tile(64, 64, 512, 4), Tile(64, 64, 64, 4), Tile(64, 64, 64, 4, 3)),
    ),
    "linear_add": (
        *(Tile(16, 32, 128, 2, 4), Tile(16, 64, 128, 4, 4), Tile(32, 32, 128, 4, 4), Tile(32, 64, 128, 4, 3)),
        *(Tile(64, 64, 64, 4, 4), Tile(128, 64, 64, 4, 3), Tile(128, 64, 64, 8, 3)),
        *(Tile(16, 32, 256, 4, 3), Tile(32, 32, 256, 4, 3)),
    ),
}
# Values that a program copies.
COPIED = 4096
# What makes keys and values goes by how many there are: up to `FEW`, and more.
FEW, OF_FEW, OF_MORE = 512, Tile(16, 64, 512, 4), Tile(64, 64, 512, 8)


def copier(device: torch.device) -> Callable:
    """See `networks.backends`."""
    return launcher.CachedLaunch(_copy, device)


def _copy(out, x):
    grid = triton.cdiv(out.numel(), COPIED)
    return out, map_kernels.tilewright_copy[(grid,)](out, x, out.numel(), COPIED), grid, (out.numel(), COPIED)


def decode(
    maps: Sequence,
    weights: Sequence,
    bias: torch.Tensor,
    grid: tuple[int, ...],
    classes: torch.Tensor,
    classes_bias: torch.Tensor,
    form: Form,
) -> torch.Tensor:
    """See `networks.backends`."""
    _check(*maps, *weights, bias, classes, classes_bias)
    channels, (rows, columns) = classes.shape[1], grid
    if channels % form.channels:
        raise PatternError(f"decode: expected channels in multiples of {form.channels}, found {channels}")
    tokens = [x.permute(0, 2, 3, 1) for x in maps]
    whole = tuple(tokens[0].shape[1:3]) == tuple(grid)
    first, weight = (tokens[0].contiguous(), weights[0].contiguous()) if whole else (None, None)
    # On their own grids products are small.
    parts: list = [F.linear(x, w) for x, w in zip(tokens[whole:], weights[whole:], strict=True)]
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
    rest = 0 if most >= n_classes else _padded(n_classes - most)
    programs = len(maps[0]) * triton.cdiv(rows, form.rows) * triton.cdiv(columns, form.pixels)
    constants = (n_classes, channels, taken, form.rows, form.pixels, form.channels)
    held = [tuple(part.shape[1:3]) for part in parts if part is not None and form.spread]
    read = [_read(form, (rows, columns), side) for side in held] + [(0, 0)] * (MOST_GATHERED - len(held))
    map_kernels.tilewright_decode[(programs,)](
        out, bias.contiguous(), classes.contiguous(), classes_bias.contiguous(), first, weight, *parts,
        rows, columns, *sides, *constants, _padded(taken), most, rest, _precision(out),
        *(number for numbers in read for number in numbers), num_warps=form.num_warps, num_stages=form.num_stages,
        **overlap.options(out),
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


def dwconv_gelu(
    x: torch.Tensor, grid: tuple[int, ...], weight: torch.Tensor, bias: torch.Tensor, form: Form
) -> torch.Tensor:
    """See `networks.backends`."""
    _check(x, weight, bias)
    (batch, tokens, channels), (rows, columns) = x.shape, grid
    if tokens != rows * columns or tuple(weight.shape) != (channels, 1, 3, 3):
        found = f"{list(x.shape)} and weights {list(weight.shape)}"
        raise PatternError(f"dwconv_gelu: expected {rows} x {columns} tokens and a 3 x 3 each channel, found {found}")
    x = x.contiguous()
    out = torch.empty_like(x)
    tiles = batch * triton.cdiv(rows, form.rows) * triton.cdiv(columns, form.pixels)
    map_kernels.tilewright_dwconv_gelu[tiles, triton.cdiv(channels, form.channels)](
        out, x, weight.contiguous(), bias.contiguous(), rows, columns, channels, form.rows, form.pixels, form.channels,
        num_warps=form.num_warps, **overlap.options(x, weight, bias),
    )  # fmt: skip
    return out


def norm(x: torch.Tensor, gain: torch.Tensor, offset: torch.Tensor, eps: float, form: Apart) -> torch.Tensor:
    """See `networks.backends`."""
    _check(x, gain, offset)
    return _norm(x.contiguous()[None], None, gain, offset, eps, form)


def _norm(parts, shift, gain, offset, eps, form):
    """A norm of the sum of `parts` [n, ..., C] and `shift` [C], which may be None."""
    summands, *sizes, channels = parts.shape
    rows, out = math.prod(sizes), gain.new_empty(*sizes, channels)
    linear_kernels.tilewright_norm[(triton.cdiv(rows, form.rows),)](
        out, parts, shift, gain.contiguous(), offset.contiguous(), rows, rows * channels, eps, channels, summands,
        form.rows, triton.next_power_of_2(channels), num_warps=NORM_WARPS,
        **overlap.options(out, shift, gain, offset),
    )  # fmt: skip
    return out


def patches(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    stride: int,
    gain: torch.Tensor,
    offset: torch.Tensor,
    eps: float,
    form: Apart | Tile,
) -> torch.Tensor:
    """See `networks.backends`."""
    _check(x, weight, bias, gain, offset)
    if isinstance(form, Apart):
        # A library adds the bias in a kernel of its own.
        parts = F.conv2d(x, weight, None, stride, weight.shape[2] // 2).permute(0, 2, 3, 1).flatten(1, 2)[None]
        return _norm(parts.contiguous(), bias, gain, offset, eps, form)
    features, channels, side, _ = weight.shape
    batch, _, rows, columns = x.shape
    tokens = triton.cdiv(rows, stride) * triton.cdiv(columns, stride)
    # The most channels of a step that lie next to each other in memory; for few of them, those of several places.
    whole = math.gcd(channels, form.channels)
    block_k = whole if whole >= 16 else form.channels
    programs = triton.cdiv(batch * tokens, form.rows), triton.cdiv(features, form.features)
    steps = triton.cdiv(side * side * channels, block_k)
    summands = min(triton.cdiv(BUSY, math.prod(programs)), steps, SUMMANDS)
    dtype = x.dtype if summands == 1 else torch.float32
    out = torch.empty(summands, batch, tokens, features, dtype=dtype, device=x.device)
    linear_kernels.tilewright_patches[(*programs, summands)](
        out, x, weight.permute(0, 2, 3, 1).contiguous(), batch, rows, columns, features, *x.stride(),
        side, stride, channels, summands, whole >= 16, form.rows, form.features, block_k, _precision(x),
        num_warps=form.num_warps, num_stages=form.num_stages, **overlap.options(x),
    )  # fmt: skip
    return _norm(out, bias, gain, offset, eps, APART[features <= NARROW])


def norm_linear(
    x: torch.Tensor,
    gain: torch.Tensor,
    offset: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    form: Apart | Tile,
) -> torch.Tensor:
    """See `networks.backends`."""
    _check(x, gain, offset, weight, bias)
    if isinstance(form, Apart):
        return F.linear(norm(x, gain, offset, eps, form), weight, bias)
    return _norm_linear(x.contiguous(), None, gain, offset, eps, weight, bias, form)


def _norm_linear(x, shift, gain, offset, eps, weight, bias, form):
    """A linear layer behind a norm of x [..., C]; or, with `shift` [C], of the sum of that and x [n, B, N, C]."""
    features, channels = weight.shape
    sizes = x.shape[:-1] if shift is None else x.shape[1:-1]
    rows, out = math.prod(sizes), weight.new_empty(*sizes, features)
    linear_kernels.tilewright_norm_linear[triton.cdiv(rows, form.rows), triton.cdiv(features, form.features)](
        out, x, shift, gain.contiguous(), offset.contiguous(), weight.contiguous(), bias.contiguous(), rows, features,
        rows * channels, eps, channels, 1 if shift is None else len(x), *_blocks(form, channels), _precision(weight),
        num_warps=form.num_warps, num_stages=form.num_stages,
        **overlap.options(x, shift, gain, offset, weight, bias),
    )  # fmt: skip
    return out


def attention(
    x: torch.Tensor, grid: tuple[int, ...], heads: int, gain: torch.Tensor, offset: torch.Tensor, eps: float,
    weight: torch.Tensor, bias: torch.Tensor, conv_weight: torch.Tensor, conv_bias: torch.Tensor,
    key_gain: torch.Tensor, key_offset: torch.Tensor, key_eps: float,
    kv_weight: torch.Tensor, kv_bias: torch.Tensor, form: Apart | Tile,
) -> torch.Tensor:  # fmt: skip
    """See `networks.backends`."""
    _check(x, gain, offset, weight, bias, kv_weight, kv_bias)
    x, norm = x.contiguous(), (gain, offset)
    batch, tokens, channels = x.shape
    if channels % heads:
        raise PatternError(f"attention: expected channels in multiples of {heads} heads, found {channels}")
    if isinstance(form, Apart):
        return _attention_apart(
            _norm(x[None], None, *norm, eps, form), grid, heads, weight, bias, conv_weight, conv_bias, key_gain,
            key_offset, key_eps, kv_weight, kv_bias, form,
        )  # fmt: skip
    if conv_weight is None:
        kv = norm_linear(x, gain, offset, eps, kv_weight, kv_bias, _of_keys(batch * tokens))
    else:
        _check(x, conv_weight, conv_bias, key_gain, key_offset)
        parts = _norm_patches(x, grid, norm, eps, conv_weight)
        of_keys = _of_keys(math.prod(parts.shape[1:-1]))
        kv = _norm_linear(parts, conv_bias, key_gain, key_offset, key_eps, kv_weight, kv_bias, of_keys)
    width, out = channels // heads, torch.empty_like(x)
    rows, keys, block_k = _blocks(form, channels)
    linear_kernels.tilewright_norm_attention[batch * triton.cdiv(tokens, rows), heads](
        out, x, *(w.contiguous() for w in (*norm, weight, bias)), kv, tokens, kv.shape[1], eps, width**-0.5,
        heads, width, channels, rows, keys, _padded(width), block_k, _precision(x),
        num_warps=form.num_warps, num_stages=form.num_stages, **overlap.options(x, *norm, weight, bias),
    )  # fmt: skip
    return out


def _attention_apart(
    x, grid, heads, weight, bias, conv_weight, conv_bias, key_gain, key_offset, key_eps, kv_weight, kv_bias, form
):
    """`attention` of what the norm made of tokens, by libraries."""
    q = F.linear(x, weight, bias).unflatten(2, (heads, -1)).transpose(1, 2)
    if conv_weight is not None:
        x = F.conv2d(x.unflatten(1, tuple(grid)).permute(0, 3, 1, 2), conv_weight, stride=conv_weight.shape[2:])
        x = x.permute(0, 2, 3, 1).flatten(1, 2).contiguous()
        x = _norm(x[None], conv_bias, key_gain, key_offset, key_eps, form)
    k, v = F.linear(x, kv_weight, kv_bias).unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).contiguous()


def _norm_patches(x, grid, norm, eps, conv_weight):
    """Summands [n, B, N, C], float32, of a convolution of patches without its bias, behind a norm of x."""
    features, channels, step, _ = conv_weight.shape
    (batch, *_), sides = x.shape, [side // step for side in grid]
    weights = *norm, conv_weight.permute(0, 2, 3, 1)
    patches = batch * math.prod(sides)
    tile = _of_keys(patches)
    programs = triton.cdiv(patches, tile.rows), triton.cdiv(features, tile.features)
    wanted = min(SUMMANDS, triton.next_power_of_2(triton.cdiv(BUSY, math.prod(programs))))
    summands = math.gcd(step * step, wanted)
    out = torch.empty(summands, batch, math.prod(sides), features, dtype=torch.float32, device=x.device)
    linear_kernels.tilewright_norm_patches[(*programs, summands)](
        out, x, *(w.contiguous() for w in weights), batch, *grid, features, eps, step, channels,
        *_blocks(tile, channels), summands, _precision(x), num_warps=tile.num_warps, num_stages=tile.num_stages,
        **overlap.options(x, *weights),
    )  # fmt: skip
    return out


def _of_keys(count):
    return OF_FEW if count <= FEW else OF_MORE


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, form: Tile
) -> torch.Tensor:
    """See `networks.backends`."""
    _check(x, weight, bias, residual)
    x, residual, (features, channels) = x.contiguous(), residual.contiguous(), weight.shape
    rows, out = math.prod(x.shape[:-1]), torch.empty_like(residual)
    linear_kernels.tilewright_linear_add[triton.cdiv(rows, form.rows), triton.cdiv(features, form.features)](
        out, x, weight.contiguous(), bias.contiguous(), residual, rows, features, channels,
        *_blocks(form, channels), _precision(x), num_warps=form.num_warps, num_stages=form.num_stages,
        **overlap.options(x, bias),
    )  # fmt: skip
    return out


def _blocks(form, channels):
    """Rows, features and channels of a program: of the latter no more than there are."""
    return form.rows, form.features, min(form.channels, _padded(channels))


def _padded(count):
    """How many a product takes for `count`: a power of two, 16 at least."""
    return max(16, triton.next_power_of_2(count))


def _precision(x):
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _check(first, *others):
    """Raise `PatternError` unless all tensors are of one type and none asks for a gradient."""
    for x in (first, *others):
        if x.dtype != first.dtype:
            raise PatternError(f"maps: expected tensors of one type, {first.dtype}, found {x.dtype}")
        if x.requires_grad and torch.is_grad_enabled():
            raise PatternError("maps: this operator has no backward; call it under torch.no_grad()")
