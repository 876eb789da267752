"""Swin with UPerNet: images to maps of logits, a quarter as many along each side (sources: `tilewright.masks.swin`).

Parameters have the names of the official code for segmentation. Windows and shifted windows are two `Site`s a stage.
"""

import math
import re
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from tilewright.masks import swin as pattern
from tilewright.networks import _parameters, _precision, attention_sites, attentions, heads, map_operators, vit_parts
from tilewright.networks.path import Path, Routed, Stages

EXCHANGED = attentions
EPS = 1e-5
# What hides a key in the published form; with it a key's share is below 1e-40.
HIDDEN = -100.0

# Grids of images of other sizes than the network's whose windows are kept, of each stage.
OTHERS = 16

# Names of the Hugging Face form, in files and, since transformers 5, in memory, and what they are called here, one
# after the other.
_RENAMED: dict[str, vit_parts.Replacement] = {
    r"^backbone\.(swin\.)?embeddings\.patch_embeddings\.projection\.": "backbone.patch_embed.proj.",
    r"^backbone\.(swin\.)?embeddings\.norm\.": "backbone.patch_embed.norm.",
    r"^backbone\.(swin\.)?encoder\.": "backbone.",
    r"\.layernorm_before\.": ".norm1.",
    r"\.layernorm_after\.": ".norm2.",
    r"\.attention\.(self|relative_position_bias)\.": ".attn.",
    r"\.attention\.([qkv])_proj\.": r".attn.\1.",
    r"\.attn\.([qkv])(uery|ey|alue)\.": r".attn.\1.",
    r"\.attention\.(output\.dense|o_proj)\.": ".attn.proj.",
    r"\.intermediate\.dense\.": ".mlp.fc1.",
    r"\.output\.dense\.": ".mlp.fc2.",
    r"\.batch_norm\.": ".bn.",
    r"^decode_head\.classifier\.": "decode_head.conv_seg.",
    r"backbone\.hidden_states_norms\.stage(\d)": lambda match: f"backbone.norm{int(match[1]) - 1}",
}
# Those of mmsegmentation 1.x.
_MMSEG: dict[str, vit_parts.Replacement] = {
    r"^backbone\.stages\.": "backbone.layers.",
    r"^backbone\.patch_embed\.projection\.": "backbone.patch_embed.proj.",
    r"\.attn\.w_msa\.": ".attn.",
    r"\.ffn\.layers\.0\.0\.": ".mlp.fc1.",
    r"\.ffn\.layers\.1\.": ".mlp.fc2.",
}


class Options(map_operators.Options, frozen=True, forbid_unknown_fields=True):
    """One network. image_size: pixels a side, or (height, width). window: tokens of a side of a window."""

    window: Annotated[int, msgspec.Meta(ge=2, le=64)] = pattern.WINDOW

    FAMILY = pattern  # type: ignore[misc]  # mypy takes it for a field
    # All of its stages run, on images of one size.
    KINDS = MappingProxyType(  # type: ignore[misc]  # as above
        {"upernet": heads.UPERNET._replace(knobs=("fuse", "width")), "linear": heads.SUMS._replace(knobs=("decoder",))}
    )


def name(options: Options) -> str:
    """The network's name in files and figures, e.g. ``swin-tiny-512``."""
    window = "" if options.window == pattern.WINDOW else f"-w{options.window}"
    return f"swin-{options.variant}-{options.size_name}{window}{options.tag}"


def adapt(state: dict[str, torch.Tensor], network: nn.Module) -> dict:
    """The state of the official code, of `transformers` or of mmsegmentation 1.x, under the official names."""
    state = _official(state)
    heads.checked(state, network.options.head)  # type: ignore[union-attr, arg-type]  # options of this family
    return state


def recognised(state: dict[str, torch.Tensor]) -> dict[str, Any] | None:
    """Options that the tensors of a checkpoint state, or None for one of another family.

    Raises `ValueError` for a variant that is not known, and `KeyError` for half a backbone.
    """
    state = _official(state)
    if "backbone.layers.0.blocks.0.attn.relative_position_bias_table" not in state:
        return None
    width, depths = (
        len(state["backbone.patch_embed.proj.weight"]),
        tuple(heads.counted(state, f"backbone.layers.{stage}.blocks.") for stage in range(4)),
    )
    places, own = state["backbone.layers.0.blocks.0.attn.relative_position_bias_table"].shape
    for variant, size in pattern.VARIANTS.items():
        if tuple(size) == (width, depths, own):
            return {"variant": variant, "window": (math.isqrt(places) + 1) // 2, **heads.stated(state)}
    known = "; ".join(f"{name} {tuple(size)}" for name, size in pattern.VARIANTS.items())
    raise ValueError(f"expected width, depths and heads of a Swin ({known}), found {(width, depths, own)}")


def _official(state):
    """`state` under the official names, without what follows from the sizes and what only training reads."""
    if any(key.startswith(("backbone.embeddings.", "backbone.swin.embeddings.")) for key in state):
        # The norm of a classifier is one that a backbone does not call.
        state = {k: x for k, x in state.items() if not re.match(r"backbone\.(swin\.)?layernorm\.", k)}
        state = vit_parts.renamed(state, _RENAMED)
        state = vit_parts.joined(state, (".attn.q.", ".attn.k.", ".attn.v."), ".attn.qkv.")
    elif "backbone.patch_embed.projection.weight" in state:
        state = {k: _merged(k, x) for k, x in vit_parts.renamed(state, _MMSEG).items()}
    unused = (".relative_position_index", ".attn_mask")
    return {k: x for k, x in state.items() if not k.endswith(unused) and not k.startswith("auxiliary_head.")}


def _merged(name, tensor):
    """The layers of a merge in the order of the official code: mmsegmentation has the four tokens of a channel side by
    side, row by row."""
    if not re.search(r"\.downsample\.(norm\.|reduction\.weight)", name):
        return tensor
    return tensor.unflatten(-1, (-1, 4)).mT[..., [0, 2, 1, 3], :].flatten(-2)


class Network(Routed, _parameters.Counted):
    """Images [B, 3, H, W] to maps [B, num_classes, ceil(H / 4), ceil(W / 4)] of logits, in the network's type."""

    def __init__(self, options: Options, attention: str):
        """Random weights, drawn as published. attention: of `attentions.NAMES`."""
        super().__init__()
        self.options = options
        self._full = Path.full(options)
        self.backbone = _Backbone(options, attention)
        widths = [pattern.VARIANTS[options.variant].width << stage for stage in range(4)]
        shared = widths, options.channels, options.num_classes, map_operators.Operators()
        self.decode_head = heads.SHARED[options.head](*shared)
        map_operators.initialise(self)
        nn.init.normal_(self.decode_head.conv_seg.weight, std=0.01)

    @_precision.checked
    def forward(
        self, images: torch.Tensor, path: Path | str | None = None, stages: Stages | None = None
    ) -> torch.Tensor:
        """Images [B, 3, H, W] of any size to maps of logits. path: a `Path`, or its text; None runs everything. stages:
        `path.Stages` that other paths of the same images left.

        Raises `PatternError` for images that are none or too small, and `ConfigError` for a path of another network.
        """
        path = self.path(path)
        return self.decode_head(self.backbone(images, path, stages), path)


class _Backbone(nn.Module):
    def __init__(self, options, attention):
        super().__init__()
        size, grids = pattern.VARIANTS[options.variant], pattern.grids(options.pixels)
        self.patch_embed = vit_parts.Patches(3, size.width, pattern.PATCH)
        self.patch_embed.norm = nn.LayerNorm(size.width, EPS)
        self.layers = nn.ModuleList()
        for stage, depth in enumerate(size.depths):
            width, heads = size.width << stage, size.heads << stage
            windows = Windows.pair(grids[stage], heads, width // heads, attention, options.window)
            self.layers.append(_Stage(width, depth, windows))
            if stage < 3:
                self.layers[-1].downsample = _Merge(width)
            self.add_module(f"norm{stage}", nn.LayerNorm(width, EPS))

    def forward(self, images, path, stages=None):
        """Images to the four stages' maps, channels last in memory."""
        # Of each stage what leaves its blocks, and that behind its norm.
        given = stages.begun(path) if stages else []
        for stage in range(len(given), len(path.blocks)):
            layer = self.layers[stage]
            x = self.layers[stage - 1].downsample(given[-1][0]) if given else self._patches(images)  # type: ignore[operator]  # torch's modules do not tell the types of what they hold
            for block, keep in zip(layer.blocks, path.blocks[stage], strict=True):  # type: ignore[arg-type]  # torch's modules do not tell the types of what they hold
                if keep == "1":
                    x = block(x)
            normed = getattr(self, f"norm{stage}")(map_operators.to_tokens(x))
            given.append((x, map_operators.to_map(normed, x.shape[2:])))
        if stages:
            stages.keep(path, given)
        return [normed for _, normed in given]

    def _patches(self, images):
        below, right = (-side % pattern.PATCH for side in images.shape[2:])
        x = self.patch_embed(F.pad(images, (0, right, 0, below)))
        return map_operators.to_map(self.patch_embed.norm(map_operators.to_tokens(x)), x.shape[2:])  # type: ignore[operator]  # torch's modules do not tell the types of what they hold


class _Stage(nn.Module):
    def __init__(self, width, depth, windows):
        """windows: plain and shifted, in turns."""
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width, windows[i % 2]) for i in range(depth))


class _Merge(nn.Module):
    """Two by two tokens to one of twice the width."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(4 * width, EPS)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x):
        """A map to one of half its sides, rounded up."""
        x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)).permute(0, 2, 3, 1)
        x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], -1)
        return self.reduction(self.norm(x)).permute(0, 3, 1, 2)


class _Block(nn.Module):
    def __init__(self, width, windows):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, EPS), nn.LayerNorm(width, EPS)
        self.attn = _Attention(width, windows)
        self.mlp = vit_parts.Mlp(width, pattern.MLP_RATIO * width)

    def forward(self, x):
        """A map; padding follows the norm, so that its keys are the projection's bias, which unshifted windows see."""
        grid, x = x.shape[2:], map_operators.to_tokens(x)
        windows, attend = self.attn.at(tuple(grid))
        padded = windows.padded(map_operators.to_map(self.norm1(x), grid))
        out = self.attn.in_windows(map_operators.to_tokens(padded), windows.site, attend)
        out = map_operators.to_map(out, padded.shape[2:])
        x = x + map_operators.to_tokens(out[:, :, : grid[0], : grid[1]])
        return map_operators.to_map(x + self.mlp(self.norm2(x)), grid)


class _Attention(vit_parts.Attention):
    def __init__(self, width, windows):
        super().__init__(width, windows.site.heads, bias=True)
        self.windows = windows
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros((2 * windows.window - 1) ** 2, self.heads)  # as of torch.nn
        )
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.attend = windows.site.layer()
        # Of other grids: windows and what attends in them.
        self._others: dict = {}

    def at(self, grid):
        """Windows of a grid, and what attends in them."""
        if grid == self.windows.tokens:
            return self.windows, self.attend
        if grid not in self._others:
            windows = self.windows.of(grid)
            _kept(self._others, grid, (windows, windows.site.layer()))
        return self._others[grid]

    def in_windows(self, x, site, attend):
        """Tokens x [B, N, C] of the padded grid of a site."""
        table = self.relative_position_bias_table
        return site.leave(self(site.enter(x), lambda *qkv: attend(*qkv, lambda: F.pad(table.T, (0, 1)), (table,))))


def _kept(others, grid, made):
    """Keep what was made for a grid beside the latest ones."""
    while len(others) >= OTHERS:
        others.pop(next(iter(others)))
    others[grid] = made


class Windows:
    """The windows of a stage's grid, padded to whole ones, and the `Site` at which its tokens attend, row by row."""

    def __init__(self, grid: tuple[int, int], heads: int, head_dim: int, attention: str, window: int, shift: int):
        """grid: rows and columns of tokens. window: tokens of a side. shift: by so many tokens."""
        self.window = window
        self.copies: dict = {}
        self._others: dict = {}
        self.shift, self.tokens = shift, tuple(grid)
        self.grid = tuple(-(-side // window) * window for side in grid)
        self._padding = [whole - side for whole, side in zip(self.grid, grid, strict=True)]
        self.site = attention_sites.Site(attention, self._graph, heads, head_dim, self.native, self._bias_index)

    @classmethod
    def pair(
        cls, grid: tuple[int, int], heads: int, head_dim: int, attention: str, window: int
    ) -> "tuple[Windows, Windows]":
        """Plain and shifted windows."""
        make = partial(cls, grid, heads, head_dim, attention, window)
        return make(0), make(window // 2)

    def of(self, grid: tuple[int, int]) -> "Windows":
        """The windows of another grid; those of the latest ones are kept."""
        if grid not in self._others:
            site = self.site
            made = Windows(grid, site.heads, site.head_dim, site.attention, self.window, self.shift)
            made.site.planned = site.planned
            _kept(self._others, grid, made)
        return self._others[grid]

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """A map with zeros to the right and below."""
        below, right = self._padding
        return F.pad(x, (0, right, 0, below)) if below or right else x

    def _graph(self):
        kind = "shifted" if self.shift else "plain"
        meta = {"family": "swin", "variant": kind, "grid": list(self.grid), "window": self.window}
        return pattern.pattern(self.grid, self.window, self.shift, meta)

    def _bias_index(self, rows, columns):
        # Pairs of other windows are asked for, too, and hidden: their index only has to be one.
        width, most = self.grid[1], self.window - 1
        y = (rows // width - columns // width).clamp(-most, most)
        x = (rows % width - columns % width).clamp(-most, most)
        return (y + most) * (2 * most + 1) + x + most

    def native(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The windows as one batch, rolled where they are shifted: q, k, v [B, H, N, D], bias [H, n]."""
        (rows, columns), w, batch = self.grid, self.window, len(q)
        q, k, v = (self._windows(x) for x in (q, k, v))
        mask = bias[:, attention_sites.resident(self, "_indices", bias.device)][None]
        if self.shift:
            apart = attention_sites.resident(self, "_apart", mask.device).to(mask.dtype)
            mask = (mask + HIDDEN * apart[:, None]).repeat(batch, 1, 1, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.view(batch, rows // w, columns // w, *out.shape[1:3], -1).unflatten(4, (w, w))
        # [B, H, rows, columns, D]
        out = out.permute(0, 3, 1, 4, 2, 5, 6).flatten(4, 5).flatten(2, 3)
        return torch.roll(out, (self.shift, self.shift), (2, 3)).flatten(2, 3)

    def _windows(self, x):
        """Tokens [B, H, N, D] as windows [B n, H, w^2, D]."""
        w = self.window
        x = torch.roll(x.unflatten(2, self.grid), (-self.shift, -self.shift), (2, 3))
        x = x.unflatten(3, (-1, w)).unflatten(2, (-1, w))
        return x.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(0, 2)

    @property
    def _indices(self):
        """Bias index of each pair of tokens of a window, int64 [w^2, w^2]."""
        w = self.window
        at = torch.arange(w, device="cpu")
        y, x = at.repeat_interleave(w), at.repeat(w)
        return (y[:, None] - y + w - 1) * (2 * w - 1) + x[:, None] - x + w - 1

    @property
    def _apart(self):
        """Bool [n, w^2, w^2]: pairs of a rolled window that come from opposite edges."""
        axes = (torch.arange(side, device="cpu") for side in self.grid)
        wrapped = [at >= len(at) - self.shift for at in axes]
        part = (2 * wrapped[0][:, None] + wrapped[1].long()).view(1, 1, -1, 1)
        part = torch.roll(part.unflatten(2, self.grid), (self.shift, self.shift), (2, 3)).flatten(2, 3)
        part = self._windows(part).view(-1, self.window**2)
        return part[:, :, None] != part[:, None]
