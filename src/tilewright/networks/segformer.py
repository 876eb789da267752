"""SegFormer: images to maps of logits, a quarter as many along each side (source: `tilewright.masks.segformer`).

Parameters have the official names. The decoder runs as published or folded: its linear layers, the 1 x 1 convolution
behind them and the batch norm act on channels, the upsampling between them on space, with weights that sum to one. They
commute, and ``norm(fuse(cat(up(L_i c_i + l_i))))`` is ``sum_i up(M_i c_i) + b`` with one small matrix a level
(docs/decisions/segformer.md).
"""

import contextlib
import copy
import logging
import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.core.errors import Unavailable
from tilewright.masks import segformer as pattern
from tilewright.networks import _parameters, _precision, attentions, heads, map_operators, vit_parts
from tilewright.networks.path import LEVELS, Path, Routed, Stages, scaled

EXCHANGED = attentions
# Its attention where none is stated.
ENTERED = ("tilewright.networks.attentions.dense",)
# What the public code states for the norms of blocks and stages; those of patches and of reduced keys have torch's own.
EPS, TORCH_EPS = 1e-6, 1e-5
DROPOUT = 0.1

_LOG = logging.getLogger(__name__)

# Parts of a stage in other forms, and what they are called here, before the stage's number.
_PART = {"patch_embeddings": "patch_embed", "layer_norm": "norm", "block": "block", "blocks": "block"}
_PART |= {"0": "patch_embed", "1": "block", "2": "norm"}


def _of_stage(match):
    # Stages count from 0 there.
    return f"backbone.{_PART[match['part']]}{int(match['stage']) + 1}."


# Names of the Hugging Face form, in files and, since transformers 5, in memory, then those of mmsegmentation 1.x, and
# what they are called here, one after the other.
_STAGE: dict[str, vit_parts.Replacement] = {
    r"^(?:segformer\.)?encoder\.(?P<part>patch_embeddings|layer_norm|block)\.(?P<stage>\d)\.": _of_stage,
    r"^(?:segformer\.)?stages\.(?P<stage>\d)\.(?P<part>patch_embeddings|layer_norm|blocks)\.": _of_stage,
    r"^(?:backbone\.)?layers\.(?P<stage>\d)\.(?P<part>0(?=\.[pn])|1(?=\.\d)|2(?=\.[wb]))\.": _of_stage,
    r"^decode_head\.linear_(?:c|projections)\.(\d)\.": lambda match: f"decode_head.linear_c{int(match[1]) + 1}.",
}
_PARTS: dict[str, vit_parts.Replacement] = {
    r"\.layer_?norm_(?:1|before)\.": ".norm1.",
    r"\.layer_?norm_(?:2|after)\.": ".norm2.",
    r"\.attention\.(?:self\.)?([qkv])(?:uery|ey|alue|_proj)\.": r".attn.\1.",
    r"\.attention\.(?:self\.sr|sequence_reduction\.sequence_reduction)\.": ".attn.sr.",
    r"\.attention\.(?:self|sequence_reduction)\.layer_norm\.": ".attn.norm.",
    r"\.(?:attention\.output\.dense|attention\.o_proj|attn\.attn\.out_proj)\.": ".attn.proj.",
    # Of the patches.
    r"\.layer_norm\.": ".norm.",
    r"\.mlp\.dense([12])\.": r".mlp.fc\1.",
    r"\.projection\.": ".proj.",
    r"\.ffn\.layers\.0\.": ".mlp.fc1.",
    r"\.ffn\.layers\.1\.": ".mlp.dwconv.dwconv.",
    r"\.ffn\.layers\.4\.": ".mlp.fc2.",
    r"^decode_head\.linear_fuse\.weight$": "decode_head.linear_fuse.conv.weight",
    r"^decode_head\.batch_norm\.": "decode_head.linear_fuse.bn.",
    r"^decode_head\.classifier\.": "decode_head.linear_pred.",
}


class Options(map_operators.Options, frozen=True, forbid_unknown_fields=True):
    """One network. image_size: pixels a side, or (height, width). decoder: of its full path, of those of its head."""

    FAMILY = pattern  # type: ignore[misc]  # mypy takes it for a field
    KINDS = MappingProxyType(  # type: ignore[misc]  # as above
        {"segformer": heads.SEGFORMER, "mmseg": heads.SUMS, "upernet": heads.UPERNET, "linear": heads.SUMS}
    )


def name(options: Options) -> str:
    """The network's name in files and figures, e.g. ``segformer-b0-512``, ``segformer-b2-360x480``."""
    return f"segformer-{options.variant}-{options.size_name}{options.tag}"


def timm_name(options: Options) -> str:
    """The name in the Hugging Face hub of the weights for ADE20K, which have 150 classes."""
    side = 640 if options.variant == "b5" else 512
    return f"segformer-{options.variant}-finetuned-ade-{side}-{side}"


def adapt(state: dict[str, torch.Tensor], network: nn.Module) -> dict[str, torch.Tensor]:
    """The state of the official code, whole or of a backbone alone, of `transformers` or of mmsegmentation 1.x."""
    state = _official(state)
    own = network.state_dict()
    found = heads.checked(state, network.options.head)  # type: ignore[union-attr, arg-type]  # options of this family
    if any(key in own for key in state) and found is None:
        _LOG.warning("the checkpoint holds a backbone alone: the decoder stays as it is")
        state |= {key: tensor for key, tensor in own.items() if key.startswith("decode_head.")}
    return state


def recognised(state: dict[str, torch.Tensor]) -> dict[str, Any] | None:
    """Options that the tensors of a checkpoint state, or None for one of another family.

    Raises `ValueError` for a variant that is not known, and `KeyError` for half a backbone.
    """
    state = _official(state)
    if "backbone.patch_embed1.proj.weight" not in state:
        return None
    widths = tuple(len(state[f"backbone.patch_embed{stage}.proj.weight"]) for stage in range(1, 5))
    depths = tuple(heads.counted(state, f"backbone.block{stage}.") for stage in range(1, 5))
    for variant, size in pattern.VARIANTS.items():
        if (size.widths, size.depths) == (widths, depths):
            return {"variant": variant, **heads.stated(state)}
    known = "; ".join(f"{name} {size.widths}, {size.depths}" for name, size in pattern.VARIANTS.items())
    raise ValueError(f"expected widths and depths of a SegFormer ({known}), found {widths}, {depths}")


def _official(state):
    """`state` under the official names, without what is never called."""
    if any(re.match(pattern, key) for pattern in _STAGE for key in state if not key.startswith("decode_head.")):
        state = _renamed(state)
    elif "patch_embed1.proj.weight" in state:
        state = {key if key.startswith("head.") else f"backbone.{key}": tensor for key, tensor in state.items()}
    # Of a classifier, of training, and of mmsegmentation's base class, which the official head never calls.
    own = heads.named(state) in (None, "segformer")
    unused = ("head.", "classifier.", "auxiliary_head.", *(("decode_head.conv_seg.",) if own else ()))
    return {key: tensor for key, tensor in state.items() if not key.startswith(unused)}


def _renamed(state):
    # Layers of a token are convolutions there.
    renamed = {
        key: tensor.flatten(1) if re.search(r"\.mlp\.fc[12]\.weight$", key) else tensor
        for key, tensor in vit_parts.renamed(state, _STAGE | _PARTS).items()
    }
    for key in [key for key in renamed if ".attn.attn.in_proj_" in key]:
        begin, kind = key.split(".attn.attn.in_proj_")
        q, k, v = renamed.pop(key).chunk(3)
        renamed |= {f"{begin}.attn.q.{kind}": q, f"{begin}.attn.kv.{kind}": torch.cat((k, v))}
    return vit_parts.joined(renamed, (".attn.k.", ".attn.v."), ".attn.kv.")


class Network(Routed, _parameters.Counted):
    """Images [B, 3, H, W] to maps [B, num_classes, ceil(H / 4), ceil(W / 4)] of logits, in the network's type."""

    def __init__(self, options: Options, attention: str):
        """Random weights, drawn as published. attention: ``dense`` or ``native``, which are the same here."""
        super().__init__()
        self.options, self.attention = options, attention
        self._full = Path.full(options)
        self.operators = map_operators.Operators()
        self.backbone = _Backbone(options, self.operators)
        widths, own = pattern.VARIANTS[options.variant].widths, options.head == pattern.DECODE_HEADS[0]
        shared = widths, options.channels, options.num_classes, self.operators
        self.decode_head: Any = _Decoder(options, self.operators) if own else heads.SHARED[options.head](*shared)
        map_operators.initialise(self)
        nn.init.normal_(self.decode_head.get_parameter(f"{'linear_pred' if own else 'conv_seg'}.weight"), std=0.01)

    @_precision.checked
    def forward(
        self, images: torch.Tensor, path: Path | str | None = None, folded: Any = None, stages: Stages | None = None
    ) -> torch.Tensor:
        """Images [B, 3, H, W] of any size to maps of logits.

        path: a `Path`, or its text, which a compiler does not read; None runs everything. folded: what `fold` returned
        for such a path, where the caller keeps it, for instance for compiled code, which makes it in each call
        otherwise. stages: `path.Stages` that other paths of the same images left.

        Raises `PatternError` for images that are none or too small, `ConfigError` for a path of another network, and
        `Unavailable` with an attention that has no pattern to use.
        """
        if self.attention not in ("dense", "native"):
            raise Unavailable(f"attention {self.attention}: SegFormer's attention is dense: expected dense or native")
        path = self.path(path)
        height, width = pixels = images.shape[2:]
        if path.scale != 1:
            images = map_operators.resized(images, scaled((height, width), path.scale))
            _precision.check_least(images, self.options.least)
        maps = self.decode_head(self.backbone(images, path, stages), path, folded)
        return maps if path.scale == 1 else map_operators.resized(maps, pattern.grids(pixels)[0])

    def set_drop_path(self, rate: float) -> None:
        """In training, have images leave out branches of blocks: from the first block 0 to the last a share `rate`."""
        blocks = [module for module in self.modules() if isinstance(module, _Block)]
        for block, share in zip(
            blocks, torch.linspace(0, rate, len(blocks), dtype=torch.float32, device="cpu").tolist(), strict=True
        ):
            block.drop_path = share

    @contextlib.contextmanager
    def parts_compiled(self, **options: Any) -> Iterator[None]:
        """Within, each block and the decoder are compiled by ``torch.compile(**options)``.

        Paths share these parts; compiled whole, each set of blocks would be compiled by itself.
        """
        try:
            self._compile_parts(options)
            yield
        finally:
            for part in self._parts():
                vars(part).pop("forward", None)

    def compiled(self, **options: Any) -> "Network":
        """This network with the very same weights, its parts compiled as in `parts_compiled`, for as long as it lives.

        Kernels that were chosen are its own from then on.
        """
        shared = {id(x): x for x in (*self.parameters(), *self.buffers())}
        made = copy.deepcopy(self, shared)
        made._compile_parts(options)
        return made

    def _parts(self):
        return [module for module in self.modules() if isinstance(module, _Block | heads.Head)]

    def _compile_parts(self, options):
        for part in self._parts():
            # Of this module alone, before that of its class; `Module.compile` has no way back.
            part.forward = torch.compile(part.forward, **options)

    def fold(self, path: Path | str | None = None) -> heads.Folded | tuple | None:
        """What the decoder of a path makes of the weights and the batch norm's statistics, as they are now.

        `heads.Folded`, the weights of the channels that a published decoder keeps, or None where that keeps all.
        """
        path = self.path(path)
        if path.decoder == "folded":
            return self.decode_head.fold(path.levels)
        kept = path.fuse is None and path.width is None
        return None if kept or not isinstance(self.decode_head, _Decoder) else self.decode_head.narrowed(path)


class _Backbone(nn.Module):
    """The stages; ``patch_embed1``, ``block1`` and ``norm1`` are those of the first."""

    def __init__(self, options, operators):
        super().__init__()
        self.operators = operators
        size, before = pattern.VARIANTS[options.variant], 3
        for stage, (width, depth) in enumerate(zip(size.widths, size.depths, strict=True)):
            sizes = width, pattern.HEADS[stage], pattern.REDUCTIONS[stage]
            blocks = [_Block(*sizes, operators) for _ in range(depth)]
            patches = _Patches(before, width, pattern.PATCHES[stage], pattern.STRIDES[stage], operators)
            self.add_module(f"patch_embed{stage + 1}", patches)
            self.add_module(f"block{stage + 1}", nn.ModuleList(blocks))
            self.add_module(f"norm{stage + 1}", nn.LayerNorm(width, EPS))
            before = width

    def forward(self, x, path, stages=None):
        """Images to maps [B, c_i, h_i, w_i] of the stages that a path runs, channels last in memory."""
        found = stages.begun(path) if stages else []
        for stage in range(len(found) + 1, path.last + 1):
            x, grid = getattr(self, f"patch_embed{stage}")(found[-1] if found else x)
            for block, keep in zip(getattr(self, f"block{stage}"), path.blocks[stage - 1], strict=True):
                if keep == "1":
                    x = block(x, grid)
            norm = getattr(self, f"norm{stage}")
            x = self.operators(map_operators.norm, x, norm.weight, norm.bias, norm.eps)
            found.append(map_operators.to_map(x, grid))
        if stages:
            stages.keep(path, found)
        return found


class _Patches(nn.Module):
    """Overlapping patches: a map to tokens [B, N, C] and their grid."""

    def __init__(self, before, width, patch, stride, operators):
        super().__init__()
        self.stride, self.operators = stride, operators
        self.proj = nn.Conv2d(before, width, patch, stride, patch // 2)
        self.norm = nn.LayerNorm(width, TORCH_EPS)

    def forward(self, x):
        conv, norm = self.proj, self.norm
        grid = tuple(-(-side // self.stride) for side in x.shape[2:])
        of_norm = norm.weight, norm.bias, norm.eps
        return self.operators(map_operators.patches, x, conv.weight, conv.bias, self.stride, *of_norm), grid


class _Block(nn.Module):
    """Attention to reduced keys, and an MLP with a depthwise convolution between its layers."""

    def __init__(self, width, heads, reduction, operators):
        super().__init__()
        self.operators = operators
        self.norm1, self.norm2 = nn.LayerNorm(width, EPS), nn.LayerNorm(width, EPS)
        self.attn = _Attention(width, heads, reduction, operators)
        self.mlp = _MixMlp(width, pattern.MLP_RATIO * width, operators)
        # In training: the share of images that leave out a branch.
        self.drop_path = 0.0

    def forward(self, x, grid):
        x = self._added(x, self.attn(x, self.norm1, grid), self.attn.proj)
        return self._added(x, self.mlp(x, self.norm2, grid), self.mlp.fc2)

    def _added(self, x, branch, linear):
        """Tokens x and a branch, behind its last layer. Images that leave it out in training are chosen anew; the
        others have as much more of it."""
        if self.training and self.drop_path:
            branch, share = linear(branch), 1 - self.drop_path
            return x + branch * (branch.new_empty(len(branch), 1, 1).bernoulli_(share) / share)
        return self.operators(map_operators.linear_add, branch, linear.weight, linear.bias, x)


class _Attention(nn.Module):
    def __init__(self, width, heads, reduction, operators):
        super().__init__()
        self.heads, self.operators = heads, operators
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.sr = nn.Conv2d(width, width, reduction, reduction) if reduction > 1 else None
        if reduction > 1:
            self.norm = nn.LayerNorm(width, TORCH_EPS)

    def forward(self, x, norm, grid):
        """Tokens x [B, N, C] of a grid, behind `norm`. Its last layer, `proj`, is the caller's."""
        queries = norm.weight, norm.bias, norm.eps, self.q.weight, self.q.bias
        reduced: tuple = None, None, None, None, 0.0
        if self.sr is not None:
            reduced = self.sr.weight, self.sr.bias, self.norm.weight, self.norm.bias, self.norm.eps
        keys = *reduced, self.kv.weight, self.kv.bias
        return self.operators(map_operators.attention, x, grid, self.heads, *queries, *keys)


class _MixMlp(nn.Module):
    def __init__(self, width, hidden, operators):
        super().__init__()
        self.operators = operators
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dwconv = nn.ModuleDict({"dwconv": nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)})

    def forward(self, x, norm, grid):
        """Tokens x [B, N, C] of a grid, behind `norm`. Its last layer, `fc2`, is the caller's."""
        conv = self.dwconv["dwconv"]
        x = self.operators(
            map_operators.norm_linear, x, norm.weight, norm.bias, norm.eps, self.fc1.weight, self.fc1.bias
        )
        return self.operators(map_operators.dwconv_gelu, x, grid, conv.weight, conv.bias)


class _Linear(nn.Module):
    """A level's linear layer, under its official name."""

    def __init__(self, before, width):
        super().__init__()
        self.proj = nn.Linear(before, width)


class _Decoder(heads.Head):
    """Maps of the levels to maps of logits on the first level's grid."""

    def __init__(self, options, operators):
        super().__init__(operators)
        channels = options.channels
        for level, width in enumerate(pattern.VARIANTS[options.variant].widths, 1):
            self.add_module(f"linear_c{level}", _Linear(width, channels))
        conv = nn.Conv2d(4 * channels, channels, 1, bias=False)
        self.linear_fuse = nn.ModuleDict({"conv": conv, "bn": nn.BatchNorm2d(channels)})
        self.linear_pred = nn.Conv2d(channels, options.num_classes, 1)

    def forward(self, maps, path, folded=None):
        """maps: of the stages that `path` runs."""
        grid = maps[0].shape[2:]
        maps = [maps[int(level) - 1] for level in path.levels]
        if path.decoder == "folded":
            return self._folded(maps, grid, folded or self._remembered(("fold", path.levels), self.fold, path.levels))
        if path.fuse is None and path.width is None:
            return self._published(maps, grid, path.levels)
        return self._narrow(maps, grid, folded or self._remembered(path, self.narrowed, path))

    def fold(self, levels):
        """`heads.Folded` for a sum of these levels. In training without the batch norm, whose statistics are not known.

        ASSUME: a level that is left out takes its bias along, as if its linear layer gave zeros.
        """
        parts = [self._fuse[:, self._columns(level)] for level in levels]
        return heads.fold(map(self._linear, levels), parts, self.linear_fuse["bn"], normed=not self.training)

    def _folded(self, maps, grid, folded):
        weights, bias = folded
        if self.training:
            bias, total = bias.to(weights[0].dtype), None
            for x, weight in zip(maps, weights, strict=True):
                part = map_operators.product(x, weight, bias if total is None else None)
                if part.shape[2:] != grid:
                    sides = zip(part.shape[2:], grid, strict=True)
                    part = map_operators.spread(
                        part, *(map_operators.interpolation(*side, part.dtype, part.device) for side in sides)
                    )
                total = part if total is None else total + part
            return self._predicted(self.linear_fuse["bn"](total))
        return self.operators(
            map_operators.decode, maps, weights, bias, grid, self.linear_pred.weight.flatten(1), self.linear_pred.bias
        )

    def _published(self, maps, grid, levels):
        """The published operators; a level that is left out has no columns in the convolution."""
        maps = [
            map_operators.resized(map_operators.product(x, self._linear(level).weight, self._linear(level).bias), grid)
            for x, level in zip(maps, levels, strict=True)
        ]
        # The last level comes first.
        weight = self.linear_fuse["conv"].weight
        if levels != LEVELS:
            weight = self._remembered(("fuse", levels), self._of_levels, levels)
        return self._predicted(self.linear_fuse["bn"](F.conv2d(torch.cat(maps[::-1], 1), weight)))  # type: ignore[arg-type]  # torch's modules do not tell the types of what they hold

    def _of_levels(self, levels):
        """The convolution's weights for some levels, contiguous: it would copy a slice in each call."""
        return torch.cat([self._fuse[:, self._columns(level)] for level in levels[::-1]], 1)[:, :, None, None]

    def _predicted(self, x):
        return self.linear_pred(F.dropout2d(x.relu(), DROPOUT, self.training))

    def narrowed(self, path):
        """Weights of the published decoder for the channels that `path` keeps, each contiguous.

        ASSUME: channels go by weight x deviation: the norm of the weights that read a channel, times its standard
        deviation. That of a linear layer's channel is estimated by the norm of its weights, since a stage's norm makes
        its inputs vary by one times the norm's own weights, which stand with the backbone and are near one; that of a
        fused channel is the batch norm's weight. They are compared in float32: in 16 bits some tie.
        """
        bn, fuse, predict = self.linear_fuse["bn"], self._fuse, self.linear_pred.weight.flatten(1)
        outputs = map_operators.largest(bn.weight.float().abs() * predict.float().norm(dim=0), path.width)  # type: ignore[operator]  # torch's modules do not tell the types of what they hold
        linears: list = []
        parts: list = []
        for level in path.levels:
            linear, part = self._linear(level), fuse[:, self._columns(level)]
            kept = map_operators.largest(part.float().norm(dim=0) * linear.weight.float().norm(dim=1), path.fuse)
            linears.append((linear.weight[kept], linear.bias[kept]))
            parts.insert(0, part[outputs][:, kept])
        norm = [x[outputs] for x in (bn.running_mean, bn.running_var, bn.weight, bn.bias)]  # type: ignore[index]  # torch's modules do not tell the types of what they hold
        return linears, torch.cat(parts, 1)[:, :, None, None], norm, predict[:, outputs, None, None].contiguous()

    def _narrow(self, maps, grid, narrowed):
        linears, fuse, norm, predict = narrowed
        maps = [
            map_operators.resized(map_operators.product(x, *linear), grid)
            for x, linear in zip(maps, linears, strict=True)
        ]
        x = F.batch_norm(F.conv2d(torch.cat(maps[::-1], 1), fuse), *norm, eps=self.linear_fuse["bn"].eps)  # type: ignore[arg-type, misc]  # mypy does not know the length of what is unpacked
        return F.conv2d(x.relu(), predict, self.linear_pred.bias)

    @property
    def _fuse(self):
        return self.linear_fuse["conv"].weight.flatten(1)  # type: ignore[operator]  # torch's modules do not tell the types of what they hold

    def _linear(self, level):
        return getattr(self, f"linear_c{level}").proj

    def _columns(self, level):
        """Where a level stands in the convolution's input: the last comes first."""
        channels, place = len(self._fuse), len(LEVELS) - int(level)
        return slice(place * channels, (place + 1) * channels)
