"""DeiT, whole or pruned: a pruner drops tokens of each image, and a batching keeps images of different length together.

Touvron et al., "Training data-efficient image transformers" (2021). Until the first pruning all images have all of
their tokens; from then on the tokens stand as the batching lays them out (`tilewright.networks.batching`). All
batchings give the same logits.
"""

import copy
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch import nn

from tilewright.core.errors import ConfigError, PatternError
from tilewright.core.registry import member
from tilewright.masks import deit as pattern
from tilewright.networks import _precision, attention_sites, vit_parts
from tilewright.networks import batching as batchings
from tilewright.networks.token_layouts import Rectangle
from tilewright.packed import pack, pruners

EXCHANGED = batchings
# The names of `transformers`, saved and of a model of version 5, and the official ones. One after the other.
_TRANSFORMERS: dict[str, vit_parts.Replacement] = {
    r"^(?:vit|deit)\.": "",
    r"^(?:encoder\.layer|layers)\.": "blocks.",
    r"^embeddings\.patch_embeddings\.projection\.": "patch_embed.proj.",
    r"^embeddings\.position_embeddings$": "pos_embed",
    r"^embeddings\.distillation_token$": "dist_token",
    r"^embeddings\.cls_token$": "cls_token",
    r"\.layernorm_before\.": ".norm1.",
    r"\.layernorm_after\.": ".norm2.",
    r"\.attention\.(?:attention\.)?([qkv])(?:uery|ey|alue|_proj)\.": r".attn.\1.",
    r"\.attention\.(?:output\.dense|o_proj)\.": ".attn.proj.",
    r"\.intermediate\.dense\.": ".mlp.fc1.",
    r"\.output\.dense\.": ".mlp.fc2.",
    r"^layernorm\.": "norm.",
    r"^(?:cls_)?classifier\.": "head.",
    r"^distillation_classifier\.": "head_dist.",
}


class Options(vit_parts.Sizes, frozen=True, forbid_unknown_fields=True):
    """One network. image_size: pixels a side, or (height, width), of patches of 16; what is left over at the right and
    at the bottom is not seen.

    pruner: of `packed.pruners.NAMES`. pruner_settings: its settings, see its ``Params``; its own where not stated.
    """

    variant: str
    image_size: int | tuple[int, int] = 224
    pruner: str = "none"
    pruner_settings: dict[str, Any] = msgspec.field(default_factory=dict)
    num_classes: int = 1000

    def __post_init__(self) -> None:
        if self.variant not in pattern.VARIANTS:
            raise ConfigError(f"variant: expected one of {', '.join(pattern.VARIANTS)}, found {self.variant!r}")
        if min(self.pixels) < pattern.PATCH:
            raise ConfigError(f"image_size: expected at least a patch of {pattern.PATCH}, found {self.size_name}")
        if self.num_classes < 1:
            raise ConfigError(f"num_classes: expected at least 1, found {self.num_classes}")
        if self.distilled and self.pruner != "none":
            raise ConfigError(f"pruner {self.pruner}: expected a network of one class token, found {self.variant}")
        self.pruning()

    def pruning(self) -> tuple[ModuleType, Any]:
        """The pruner's module and its settings. Raises `UnknownNameError` and `ConfigError`."""
        return pruners.parse(self.pruner, self.pruner_settings)

    @property
    def distilled(self) -> bool:
        """Whether a second token and head were trained to answer as a teacher."""
        return self.variant.endswith("-distilled")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.grid_of(pattern.PATCH)

    @property
    def n_tokens(self) -> int:
        """Tokens of an image before it is pruned."""
        return 1 + self.distilled + self.grid[0] * self.grid[1]

    @property
    def needs(self) -> str | None:
        """What a checkpoint must hold for the network to make sense, or None."""
        return f"the weights of pruner {self.pruner}" if self.pruning()[1].learned else None


def stated(options: dict[str, Any]) -> dict[str, Any]:
    """`options` with the settings of the pruner, which may stand among them, gathered in ``pruner_settings``.

    Raises `UnknownNameError` for the pruner and `ConfigError` for a name that is neither an option nor a setting.
    """
    own, pruner = Options.__struct_fields__, options.get("pruner", "none")
    settings = pruners.settings(pruner)
    for name in options:
        if name not in (*own, *settings):
            known = f"options: {', '.join(own)}; settings of pruner {pruner}: {', '.join(settings) or 'none'}"
            raise ConfigError(f"deit: unknown field `{name}`; {known}")
    kept = {name: value for name, value in options.items() if name in own}
    given = {name: value for name, value in options.items() if name not in own}
    return {**kept, "pruner_settings": {**kept.get("pruner_settings", {}), **given}}


def name(options: Options) -> str:
    """The network's name in files and figures, e.g. ``deit-small-224-evit``."""
    return f"deit-{options.variant}-{options.size_name}" + f"-{options.pruner}" * (options.pruner != "none")


def timm_name(options: Options) -> str:
    """The name under which timm, and the official code, publish the weights: of 384 pixels for B only."""
    size = 384 if options.variant.startswith("base") and min(options.pixels) >= 384 else 224
    return f"deit_{options.variant.replace('-', '_')}_patch{pattern.PATCH}_{size}"


def adapt(state: dict[str, torch.Tensor], network: "Network") -> dict:
    """The state of DeiT, timm, `transformers`, or a pruner of official names, under this network's names and shapes."""
    if any(re.match(r"(?:(?:vit|deit)\.)?embeddings\.", key) for key in state):
        state = vit_parts.renamed(state, _TRANSFORMERS)
        state = vit_parts.joined(state, (".attn.q.", ".attn.k.", ".attn.v."), ".attn.qkv.")
    # As DeiT and EViT resize it; DynamicViT resizes bilinearly.
    mode = "bilinear" if network.options.pruner == "dynamicvit" else "bicubic"
    vit_parts.resize_positions(state, network, mode, network.options.grid, 1 + network.options.distilled)
    learned = network.options.pruning()[1].learned
    for own, tensor in network.pruner.state_dict().items():
        if own in state or not learned:
            state[f"pruner.{own}"] = state.pop(own, tensor)
    # A constant of ATS's code, which its checkpoints hold.
    return {key: tensor for key, tensor in state.items() if not key.endswith("attn.out_zero_mask")}


class Network(nn.Module):
    """Images [B, 3, H, W] to logits [B, num_classes]; parameters under the official names."""

    def __init__(self, options: Options, batching: str):
        """Random weights, drawn as published. batching: of `batching.NAMES`."""
        super().__init__()
        self.options = options
        self._batch_by(batching)
        width, heads = pattern.VARIANTS[options.variant]
        self.patch_embed = vit_parts.Patches(3, width, pattern.PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))  # as of torch.nn
        self.pos_embed = nn.Parameter(torch.zeros(1, options.n_tokens, width))  # as of torch.nn
        self.blocks = nn.ModuleList(vit_parts.Block(width, heads) for _ in range(pattern.DEPTH))
        self.norm = nn.LayerNorm(width, 1e-6)
        self.head = nn.Linear(width, options.num_classes)
        tables = [self.cls_token, self.pos_embed]
        if options.distilled:
            self.dist_token = nn.Parameter(torch.zeros(1, 1, width))  # as of torch.nn
            self.head_dist = nn.Linear(width, options.num_classes)
            tables.append(self.dist_token)
        module, settings = options.pruning()
        # Last: the same seed draws the same DeiT whatever prunes it.
        vit_parts.initialise(self, *tables)
        self.pruner = module.Pruner(settings, width, options.n_tokens)
        vit_parts.initialise(self.pruner)

    def _batch_by(self, name):
        self.batching = name
        self.batcher = member(batchings.__name__, "batching", name, batchings.NAMES)

    def with_batching(self, name: str) -> "Network":
        """This very network, its weights shared, with the batching `name` of `batching.NAMES`."""
        other = copy.copy(self)
        other._batch_by(name)
        return other

    @_precision.checked
    def forward(self, images: torch.Tensor, capacity: int | None = None, with_layouts: bool = False) -> Any:
        """Images [B, 3, H, W] to logits [B, num_classes].

        capacity: most tokens of the batch that may be kept by a pruner that leaves it open how many, for batchings
            that have a ``ROOM``; None: as many as there are, for which the host asks the device.
        with_layouts: return ``(logits, layouts)``, the layout after each pruning; ``layout.check()`` has the host ask
            whether the capacity was enough. Where it was not, logits are NaN.

        Raises `PatternError` for images of another shape, and what the batching raises.
        """
        x = self._embedded(images)
        layouts: list = []
        layout = Rectangle(*x.shape[:2], x.device)  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked

        def prune(x, heads=None):
            x, choice = self.pruner(len(layouts), x, layout, heads)
            x, narrower = self.batcher.narrow(x, layout, choice, capacity)
            narrower.choice = choice
            layouts.append(narrower)
            return x, narrower

        for i, block in enumerate(self.blocks):
            if i in self.pruner.before:
                x, layout = prune(x)
            heads = block.attn.split(block.norm1(x))  # type: ignore[operator]  # torch's modules do not tell the types of what they hold
            x = x + block.attn.proj(attention_sites.timed(layout.attend, *heads).flatten(-2))  # type: ignore[operator, union-attr]  # torch's modules do not tell the types of what they hold
            if i in self.pruner.inside:
                x, layout = prune(x, heads)
            x = x + block.mlp(block.norm2(x))  # type: ignore[operator]  # torch's modules do not tell the types of what they hold
        logits = _precision.logits(self.head, self.norm(layout.first(x)))
        if self.options.distilled:
            # Without a pruner the layout is the whole rectangle, the distillation token second.
            logits = (logits + _precision.logits(self.head_dist, self.norm(x[:, 1]))) / 2
        return (logits, layouts) if with_layouts else logits

    @torch.no_grad()
    def mixed(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """Images of several sizes, a list of [3, H, W], to logits [B, num_classes]: one packed batch (`packed`).

        The position table is resampled for each size, as for a network of that size. Images that are smaller than a
        patch, a pruner, and a type or device other than the network's raise `PatternError`.
        """
        self._check_mixed(images)
        tokens = [self._embedded(each[None])[0] for each in images]
        lengths = [len(each) for each in tokens]
        packing = pack.pack_lengths(torch.tensor(lengths, dtype=torch.int64, device=tokens[0].device))
        x = torch.cat(tokens)
        for block in self.blocks:
            x = x + block.attn.proj(packing.attend(*block.attn.split(block.norm1(x))).flatten(-2))  # type: ignore[operator, union-attr]  # torch's modules do not tell the types of what they hold
            x = x + block.mlp(block.norm2(x))  # type: ignore[operator]  # torch's modules do not tell the types of what they hold
        starts = torch.tensor([0, *lengths[:-1]], dtype=torch.int64, device=x.device).cumsum(0)
        logits = _precision.logits(self.head, self.norm(x[starts]))
        if self.options.distilled:
            logits = (logits + _precision.logits(self.head_dist, self.norm(x[starts + 1]))) / 2
        return logits

    def _embedded(self, images):
        """Tokens [B, N, C] of images of any size, with positions resampled as `adapt` resamples a file's."""
        patches = self.patch_embed(images)
        grid, first = tuple(patches.shape[-2:]), 1 + self.options.distilled
        positions: torch.Tensor = self.pos_embed
        if grid != self.options.grid:
            positions = vit_parts.resampled(positions, first, self.options.grid, grid, "bicubic")
        firsts = [self.cls_token, self.dist_token] if self.options.distilled else [self.cls_token]
        tokens = patches.flatten(2).transpose(-2, -1)
        return torch.cat((*(each.expand(len(images), -1, -1) for each in firsts), tokens), 1) + positions

    def _check_mixed(self, images):
        if self.options.pruner != "none":
            raise PatternError(f"mixed: expected a network without a pruner, found {self.options.pruner}")
        like = self.pos_embed
        if not images:
            raise PatternError("images: expected at least one, found none")
        for i, each in enumerate(images):
            if each.ndim != 3 or len(each) != 3 or min(each.shape[1:]) < pattern.PATCH:
                raise PatternError(
                    f"images: expected [3, H, W] of at least {pattern.PATCH} pixels a side, found {list(each.shape)} "
                    f"at {i}"
                )
            if each.dtype != like.dtype or each.device != like.device:
                raise PatternError(
                    f"images: expected {like.dtype} on {like.device}, found {each.dtype} on {each.device} at {i}"
                )
