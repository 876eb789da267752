"""Vision Longformer (MsViT): four stages of tokens on a grid, the first ones with windows and global tokens.

Zhang et al., "Multi-Scale Vision Longformer", ICCV 2021 (arXiv 2103.15358) and its public code, whose names the
parameters bear: projections shared by local and global tokens, a norm after the patch embedding.
"""

import hashlib
from math import isqrt
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from tilewright.core.errors import ConfigError
from tilewright.masks.vision_longformer import GLOBALS, SPARSE_STAGES, STAGES
from tilewright.networks import _parameters, _precision, attention_sites, attentions, vit_parts
from tilewright.networks._sliding_chunks import Windows, by_offset

EXCHANGED = attentions

# ASSUME: the public code reads LN_EPS from its configuration and does not use it.
EPS = 1e-6
# Names under which a published file repeats the projections that globals share with locals.
ALIASES = {f".{own}_global.": f".{own}." for own in ("query", "kv", "proj")}
TABLE = "local_relative_position_bias_table"
# Blocks of each stage: the published configurations; heads, widths and globals are those of the graphs.
BLOCKS = {
    "tiny": (1, 1, 9, 1),
    "small": (1, 2, 8, 1),
    "medium-deep": (1, 4, 16, 1),
    "medium-wide": (1, 2, 8, 1),
    "base-deep": (1, 8, 24, 1),
    "base-wide": (1, 2, 8, 1),
}
# Bias that is spelt out at a time in a stage that attends to everything.
BIAS_BYTES = 1 << 26


Positive = Annotated[int, msgspec.Meta(ge=1)]


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage. patch: the stride on the grid before. radius: the published f, half the window and side of a chunk.

    number, absolute, grid: set by `Options.shapes`; the kind of position, and rows and columns of tokens.
    """

    heads: Positive
    dim: Positive
    blocks: Positive
    patch: Positive
    sparse: bool = True
    n_global: Annotated[int, msgspec.Meta(ge=0)] = 1
    radius: Positive = 7
    number: int = 0
    absolute: bool = True
    grid: tuple[int, int] = (0, 0)


def published(variant: str) -> tuple[Shape, ...]:
    """The stages of a published variant."""
    stages = zip(STAGES[variant], BLOCKS[variant], GLOBALS, strict=True)
    return tuple(
        Shape(heads, dim, blocks, 4 if number == 1 else 2, number in SPARSE_STAGES, n_global)
        for number, ((heads, dim), blocks, n_global) in enumerate(stages, 1)
    )


class Options(vit_parts.Sizes, frozen=True, forbid_unknown_fields=True):
    """What decides a network. image_size: pixels a side, or (height, width).

    stages: a `Shape` each, instead of the variant's own. position: None for ``absolute``, as in the public code.
    window_mode: SW_EXACT 0, 1 or -1 of the public code.
    """

    variant: Literal["tiny", "small", "medium-deep", "medium-wide", "base-deep", "base-wide"]
    image_size: int | tuple[int, int] = 224
    position: Literal["absolute", "relative"] | None = None
    window_mode: Literal["chunk", "exact", "cyclic"] = "chunk"
    num_classes: Positive = 1000
    stages: tuple[Shape, ...] | None = None

    def __post_init__(self) -> None:
        if self.stages == ():
            raise ConfigError("stages: expected at least one, found none")
        for shape in self.shapes():
            where, fewest = f"stage {shape.number}", min(shape.grid)
            if fewest < 1:
                raise ConfigError(f"image_size {self.size_name} leaves no token at {where}")
            if shape.dim % shape.heads:
                raise ConfigError(f"{where}: expected heads that divide the width {shape.dim}, found {shape.heads}")
            if shape.absolute and shape.dim % 2:
                raise ConfigError(f"{where}: expected an even width with absolute position, found {shape.dim}")
            if self.window_mode == "cyclic" and shape.sparse and -(-fewest // shape.radius) < 3:
                # With two chunks, the left and the right neighbour are one: a key would count twice.
                raise ConfigError(
                    f"cyclic chunks: expected a grid of at least 3 chunks of {shape.radius} a side, found {fewest} "
                    f"tokens at {where} of images of {self.size_name} pixels"
                )

    def shapes(self) -> list[Shape]:
        """The stages, with all that is set."""
        grid, sparse, shapes = self.pixels, True, []
        for number, stage in enumerate(published(self.variant) if self.stages is None else self.stages, 1):
            grid = grid[0] // stage.patch, grid[1] // stage.patch
            # As published: behind a full stage, all are full.
            sparse = sparse and stage.sparse
            known = {"number": number, "sparse": sparse, "absolute": self.position != "relative", "grid": grid}
            shapes.append(msgspec.structs.replace(stage, **known))
        return shapes


def name(options: Options) -> str:
    """Name of the network in files and figures, e.g. ``vil-tiny-224``; what is not the default follows."""
    parts = ["vil", options.variant, options.size_name]
    parts += [part for part in (options.position, options.window_mode) if part not in (None, "absolute", "chunk")]
    parts += [] if options.stages is None else [hashlib.sha256(msgspec.json.encode(options.stages)).hexdigest()[:8]]
    return "-".join(parts)


class Network(_parameters.Counted):
    """Images [B, 3, H, W] to logits [B, classes]; H and W are fixed by the options."""

    def __init__(self, options: Options, attention: str):
        """Random weights, drawn as the public code draws them. attention: of `attentions.NAMES`."""
        super().__init__()
        self.options = options
        channels = 3
        for shape in options.shapes():
            self.add_module(f"layer{shape.number}", Stage(channels, shape, options.window_mode, attention))
            channels = shape.dim
        self.norm = nn.LayerNorm(channels, EPS)
        self.head = nn.Linear(channels, options.num_classes)
        self.apply(_draw)

    @property
    def stages(self) -> list:
        """The `Stage` modules in order."""
        return [module for module in self.children() if isinstance(module, Stage)]

    @_precision.checked
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits. Raises `PatternError` for images of another shape than the network's."""
        x = images
        for stage in self.stages:
            tokens = stage(x)
            n_global = stage.shape.n_global
            x = tokens[:, n_global:].transpose(-2, -1).unflatten(2, stage.shape.grid)
        tokens = self.norm(tokens)
        return _precision.logits(self.head, tokens[:, 0] if n_global else tokens.mean(1))


class Stage(nn.Sequential):
    """Patch embedding, then blocks of attention and MLP in turn. site: of a sparse stage, else None."""

    def __init__(self, channels: int, shape: Shape, mode: str, attention: str):
        """A stage of `shape` on images of `channels`."""
        super().__init__(PatchEmbed(channels, shape))
        self.shape = shape
        self.windows: Any = None
        self.site: Any = None
        if shape.sparse:
            self.windows = Windows(shape.grid, shape.n_global, shape.radius, mode)
            head_dim = shape.dim // shape.heads
            build, native, index = self.windows.graph, self.windows.attend, self.windows.bias_index
            self.site = attention_sites.Site(attention, build, shape.heads, head_dim, native, index)
        for _ in range(shape.blocks):
            attend = SparseAttention(shape, self.windows, self.site) if shape.sparse else FullAttention(shape)
            self.append(AttentionBlock(shape.dim, attend)).append(MlpBlock(shape.dim))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Image [B, C, H, W] to tokens [B, g + m n, d] in the model's own order: globals, then the grid by rows."""
        embed, *blocks = self
        x = embed(image)
        if self.site is not None:
            x = self.site.enter(self.windows.pad(x))
        for block in blocks:
            x = block(x)
        return x if self.site is None else self.windows.unpad(self.site.leave(x))


class PatchEmbed(nn.Module):
    """Image to normed tokens: globals, then the grid by rows, with absolute positions where the stage has them."""

    def __init__(self, channels: int, shape: Shape):
        """Tokens of `shape` from patches of an image of `channels`."""
        super().__init__()
        self.proj = nn.Conv2d(channels, shape.dim, shape.patch, shape.patch)
        self.norm_embed = nn.LayerNorm(shape.dim, EPS)
        self.absolute = shape.absolute
        self.cls_token = _drawn(1, shape.n_global, shape.dim) if shape.n_global else None
        if shape.absolute:
            self.cls_pos_embed = _drawn(1, shape.n_global, shape.dim)
            rows, columns = shape.grid
            # In the published names x goes down, y across.
            self.x_pos_embed = _drawn(1, rows, shape.dim // 2)
            self.y_pos_embed = _drawn(1, columns, shape.dim // 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Image [B, C, H, W] to tokens [B, g + m n, d]."""
        x = self.norm_embed(self.proj(image).flatten(2).transpose(-2, -1))
        if self.absolute:
            m, n = self.x_pos_embed.shape[1], self.y_pos_embed.shape[1]
            down, across = self.x_pos_embed[:, :, None], self.y_pos_embed[:, None]
            x = x + torch.cat([down.expand(-1, -1, n, -1), across.expand(-1, m, -1, -1)], 3).flatten(1, 2)
        if self.cls_token is None:
            return x
        first = self.cls_token + self.cls_pos_embed if self.absolute else self.cls_token
        return torch.cat([first.expand(len(x), -1, -1), x], 1)


class AttentionBlock(nn.Module):
    """Tokens plus attention to them, normed."""

    def __init__(self, dim: int, attention: nn.Module):
        """`attention` on tokens of width `dim`."""
        super().__init__()
        self.norm = nn.LayerNorm(dim, EPS)
        self.attn = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [B, N, d] to tokens."""
        return x + self.attn(self.norm(x))


class MlpBlock(nn.Module):
    """Tokens plus a perceptron of each, normed."""

    def __init__(self, dim: int):
        """Four times as wide inside as `dim`."""
        super().__init__()
        self.norm = nn.LayerNorm(dim, EPS)
        self.mlp = vit_parts.Mlp(dim, 4 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [B, N, d] to tokens."""
        return x + self.mlp(self.norm(x))


class RelativePosition(nn.Module):
    """What the attention of both kinds of stages shares: the bias tables, none with absolute position."""

    def __init__(self, shape: Shape, reach: tuple[int, int]):
        """A table of offsets up to ``reach - 1`` either way, reach: down and across; and terms of the globals."""
        super().__init__()
        self.heads, self.n_global, self.relative = shape.heads, shape.n_global, not shape.absolute
        # Offsets down and across, which the table lists row by row.
        self.offsets = 2 * reach[0] - 1, 2 * reach[1] - 1
        if self.relative:
            self.local_relative_position_bias_table = _drawn(self.offsets[0] * self.offsets[1], shape.heads)
            if shape.n_global:
                self.g2l_relative_position_bias = _drawn(2, shape.heads, shape.n_global)
                self.g2g_relative_position_bias = _drawn(shape.heads, shape.n_global, shape.n_global)


class SparseAttention(RelativePosition):
    """Attention over a site's windows and globals."""

    def __init__(self, shape: Shape, windows: Windows, site: attention_sites.Site):
        """One layer at `site`."""
        super().__init__(shape, (2 * windows.radius, 2 * windows.radius))
        self.query = nn.Linear(shape.dim, shape.dim)
        self.kv = nn.Linear(shape.dim, 2 * shape.dim)
        self.proj = nn.Linear(shape.dim, shape.dim)
        self.windows, self.site, self.attend = windows, site, site.layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [B, N, d], in the site's order, to tokens."""
        kv = self.kv(x)
        if self.windows.padded:
            kv = kv * self.site.enter(self.windows.real(kv))
        q = self.query(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = kv.unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # The layer's own parameters are the tables.
        bias = (self._bias, list(self.parameters(recurse=False))) if self.relative else ()
        return self.proj(self.attend(q, k, v, *bias).transpose(1, 2).flatten(2))

    def _bias(self):
        """The tables one after the other, [H, n], as `masks.vision_longformer.bias_index_at` says."""
        table = self.local_relative_position_bias_table.transpose(-2, -1)
        parts = [table]
        if self.n_global:
            of_global, of_local = self.g2l_relative_position_bias
            parts += [of_local, of_global, self.g2g_relative_position_bias.flatten(1)]
        return torch.cat([*parts, table.new_zeros(self.heads, 1)], 1)


class FullAttention(RelativePosition):
    """Attention of all tokens to all."""

    def __init__(self, shape: Shape):
        """One layer of a stage of `shape`."""
        super().__init__(shape, shape.grid)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim)
        self.proj = nn.Linear(shape.dim, shape.dim)
        self.grid = shape.grid

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [B, N, d] to tokens."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if not self.relative:
            out = attention_sites.full(q, k, v)
        else:
            ends, parts = 0, []
            for bias in self._biases():
                begin, ends = ends, ends + bias.shape[1]
                parts.append(attention_sites.full(q[:, :, begin:ends], k, v, bias))
            out = torch.cat(parts, 2)
        return self.proj(out.transpose(1, 2).flatten(2))

    def _biases(self):
        """The bias [H, some rows, N] of the globals, then of some rows of the grid at a time: any size fits memory."""
        g, (rows, columns) = self.n_global, self.grid
        table = self.local_relative_position_bias_table
        local = by_offset(table.transpose(-2, -1).unflatten(1, self.offsets), self.grid)
        if g:
            of_global, of_local = self.g2l_relative_position_bias
            yield torch.cat([self.g2g_relative_position_bias, of_global[..., None].expand(-1, -1, rows * columns)], 2)
        step = max(1, BIAS_BYTES // (self.heads * rows * columns**2 * table.itemsize))
        for y in range(0, rows, step):
            bias = local[:, y : y + step].flatten(1, 2).flatten(2)
            yield torch.cat([of_local[:, None].expand(-1, bias.shape[1], -1), bias], 2) if g else bias


def _drawn(*shape):
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))  # as of torch.nn


def _draw(module):
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def adapt(state: dict[str, torch.Tensor], network: nn.Module) -> dict[str, torch.Tensor]:
    """A published checkpoint's tensors for `network`: aliases dropped, position tables resized as the public code does.

    Tensors of an alias that differ from the projection they stand for stay in, and so does all that is unknown.
    """
    wanted, tables = network.state_dict(), _tables(network)
    of_square, adapted = _of_square(state, tables), {}
    for key, tensor in state.items():
        if key.endswith(".relative_position_index") or _repeats(key, tensor, state):
            continue
        other = key in wanted and tensor.shape != wanted[key].shape
        if key in tables:
            down, across = tables[key]
            # ASSUME: where all tables have as many entries as those of a square, they are of one, as published.
            if (other and down == across) or (down != across and of_square):
                tensor = _resized_table(tensor, (down, across))
        elif other and key.endswith((".x_pos_embed", ".y_pos_embed")) and tensor.shape[1] > 1:
            tensor = _resized_axis(tensor, wanted[key].shape[1])
        adapted[key] = tensor
    return adapted


def _repeats(key, tensor, state):
    owners = [key.replace(alias, own) for alias, own in ALIASES.items() if alias in key]
    return any(owner in state and torch.equal(tensor, state[owner]) for owner in owners)


def _tables(network):
    """Offsets down and across of each table of relative positions, by its name in the network's state."""
    found = [(name, module) for name, module in network.named_modules() if isinstance(module, RelativePosition)]
    return {f"{name}.{TABLE}": module.offsets for name, module in found if module.relative}


def _of_square(state, tables):
    """Whether a file may be of square images, by the tables of it that in the network are of none."""
    lengths = [state[key].shape[0] for key, (down, across) in tables.items() if down != across and key in state]
    return all(isqrt(length) ** 2 == length for length in lengths)


def _resized_axis(positions, length):
    """Positions [1, n, C] along an axis in another length, by linear interpolation."""
    return F.interpolate(positions.mT[..., None], (length, 1), mode="bilinear").squeeze(-1).mT


def _resized_table(table, offsets):
    """A table [n^2, H] of a square file in another size, by bilinear interpolation."""
    old = isqrt(len(table))
    return F.interpolate(table.mT.unflatten(1, (old, old))[None], offsets, mode="bilinear")[0].flatten(1).mT
