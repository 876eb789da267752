"""Parts that plain vision transformers share: patches, blocks and their checkpoints' position tables."""

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from tilewright.core import sides


class Patches(nn.Module):
    """Patches by a convolution that steps by a patch: [B, channels, H, W] to [B, width, H // patch, W // patch]."""

    def __init__(self, channels: int, width: int, patch: int):
        """Cut `patch` x `patch` pixels."""
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, patch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Embed the patches."""
        return self.proj(x)


class InRows:
    """Attention for `Attention.forward` that takes the tokens of all images one after the other."""

    def __init__(self, attend: Callable):
        """attend: ``callable(q, k, v)`` on [B N, H, D]."""
        self.attend = attend


class Attention(nn.Module):
    """The projections around an attention that the caller chooses."""

    def __init__(self, width: int, heads: int, bias: bool):
        """bias: of the projection to queries, keys and values."""
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [..., H, D] of tokens x [..., C]: strided views of one projection."""
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)

    def forward(self, x: torch.Tensor, attend: Callable | InRows) -> torch.Tensor:
        """Tokens [B, N, C] through ``attend(q, k, v)`` on [B, H, N, D], or what is `InRows`."""
        if isinstance(attend, InRows):
            out = attend.attend(*self.split(x.flatten(0, 1)))
            return self.proj(out.flatten(1)).view(x.shape)
        q, k, v = (heads.transpose(1, 2) for heads in self.split(x))
        return self.proj(attend(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, width: int, hidden: int):
        """hidden: channels of the first layer."""
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [..., C], each by itself."""
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(
        self, width: int, heads: int, *, eps: float = 1e-6, ratio: int = 4, bias: bool = True, skip: float = 1.0
    ):
        """eps: of the norms. ratio: the MLP's hidden channels over `width`. skip: what the layers add is divided by."""
        super().__init__()
        self.skip = skip
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.attn = Attention(width, heads, bias)
        self.mlp = Mlp(width, ratio * width)

    def forward(self, x: torch.Tensor, attend: Callable | InRows) -> torch.Tensor:
        """Tokens [B, N, C]; attend: as `Attention.forward` takes it."""
        x = x + self._added(self.attn(self.norm1(x), attend))
        return x + self._added(self.mlp(self.norm2(x)))

    def _added(self, x):
        # A division by one is a launch on a GPU.
        return x if self.skip == 1.0 else x / self.skip


def initialise(network: nn.Module, *tables: torch.Tensor) -> None:
    """Draw `tables` and the linear layers of `network` as published: normal of 0.02, cut at two units; biases zero."""
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    for table in (*tables, *(module.weight for module in linear)):
        nn.init.trunc_normal_(table, std=0.02)
    for module in linear:
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of options with an ``image_size``, pixels a side or ``(height, width)``, and a size of patches: the grid."""

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width of images."""
        return sides.pair(self.image_size)  # type: ignore[attr-defined]  # a field of the options themselves

    @property
    def size_name(self) -> str:
        """The size as names state it."""
        return "x".join(map(str, dict.fromkeys(self.pixels)))

    def grid_of(self, patch: int) -> tuple[int, int]:
        """Rows and columns of patches; what is left over at the right and at the bottom is not seen."""
        height, width = self.pixels
        return height // patch, width // patch


# Of a pattern, as `re.sub` takes it.
Replacement = str | Callable[[re.Match[str]], str]


def renamed(state: dict[str, torch.Tensor], names: dict[str, Replacement]) -> dict[str, torch.Tensor]:
    """`state` with each of `names`, a pattern and what stands for it, replaced in its keys, one after the other."""
    found = {}
    for key, tensor in state.items():
        for theirs, ours in names.items():
            key = re.sub(theirs, ours, key)
        found[key] = tensor
    return found


def joined(state: dict[str, torch.Tensor], parts: tuple[str, ...], whole: str) -> dict[str, torch.Tensor]:
    """`state` with the rows of what bears the names of all `parts` but for these, as one tensor of the name `whole`."""
    for key in [key for key in state if parts[0] in key]:
        state[key.replace(parts[0], whole)] = torch.cat([state.pop(key.replace(parts[0], part)) for part in parts])
    return state


def resize_positions(
    state: dict[str, torch.Tensor], network: nn.Module, mode: str, grid: tuple[int, int], first: int = 1
) -> None:
    """Resize ``state["pos_embed"]`` [1, first + n^2, C] to the `grid` of `network`, where it is such a table.

    mode: of `interpolate`. first: rows before the grid, which stay as they are. A table of as many entries as the
    network's is taken for one of its grid, unless its own is a square and the network's is not.
    """
    wanted: Any = network.pos_embed
    table = state.get("pos_embed")
    if table is None or table.ndim != 3:
        return
    old = math.isqrt(max(table.shape[1] - first, 0))
    # ASSUME: a table of n^2 entries is of a square, as the published ones are; a network that was saved with a grid of
    # 4 x 9 patches, say, is told from one of 6 x 6 by nothing.
    if table.shape[1] == wanted.shape[1] and (grid[0] == grid[1] or first + old**2 != table.shape[1]):
        return
    if old > 0 and first + old**2 == table.shape[1]:
        state["pos_embed"] = resampled(table, first, (old, old), grid, mode)


def resampled(table: torch.Tensor, first: int, old: tuple[int, int], grid: tuple[int, int], mode: str) -> torch.Tensor:
    """Positions [1, first + rows * columns, C] of the grid `old` for another `grid`; the `first` rows stay."""
    places = table[:, first:].unflatten(1, old).movedim(-1, 1).float()
    places = F.interpolate(places, size=grid, mode=mode).flatten(2).mT
    return torch.cat((table[:, :first], places.to(table.dtype)), dim=1)
