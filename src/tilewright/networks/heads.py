"""Decoders that networks of maps share: maps of four stages to maps of logits on the first stage's grid.

A head is called as ``head(maps, path, folded)``. ``fold(levels)``, where it has one, gives what a caller may keep as
`folded`. SegFormer's own head is `segformer`'s.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.masks import swin as sizes
from tilewright.networks import map_operators
from tilewright.networks.path import DECODERS, LEVELS, Path

DROPOUT = 0.1


class Kind(NamedTuple):
    """A head of a network. decoders: that it has, its own first. knobs: of paths that it takes."""

    decoders: tuple[str, ...]
    knobs: tuple[str, ...]


SEGFORMER = Kind(DECODERS, ("levels", "scale", "decoder", "fuse", "width"))
# Neither has channels that a path drops.
SUMS = Kind(DECODERS, ("levels", "scale", "decoder"))
# It is not linear between its norms, and each of its levels needs the next one.
UPERNET = Kind(DECODERS[1:], ("scale", "fuse", "width"))


# What tells a head by the names of its tensors: its last layer but for the classes.
_MARKS = {
    "linear_fuse.conv": "segformer",
    "fusion_conv.conv": "mmseg",
    "fpn_bottleneck.conv": "upernet",
    "bn": "linear",
}


def named(state: Mapping[str, Tensor]) -> str | None:
    """The head whose tensors a checkpoint has under the official names; None for a backbone alone."""
    return next((head for mark, head in _MARKS.items() if f"decode_head.{mark}.weight" in state), None)


def checked(state: Mapping[str, Tensor], wanted: str) -> str | None:
    """`named`, where it is the head of the network or none. Raises `ValueError` for another one."""
    found = named(state)
    if found not in (None, wanted):
        raise ValueError(f"expected the head {wanted}, found the head {found}; head={found!r} takes it")
    return found


def stated(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Options of a head that the tensors of a checkpoint state. Raises `KeyError` for half a head."""
    if (head := named(state)) is None:
        return {}
    mark = next(mark for mark, name in _MARKS.items() if name == head)
    classes = len(state[f"decode_head.{'linear_pred' if head == 'segformer' else 'conv_seg'}.weight"])
    channels = {} if head == "linear" else {"channels": len(state[f"decode_head.{mark}.weight"])}
    return {"head": head, "num_classes": classes, **channels}


def counted(state: Mapping[str, Tensor], begin: str) -> int:
    """How many parts a checkpoint has behind such a name."""
    return len({key[len(begin) :].split(".")[0] for key in state if key.startswith(begin)})


class Folded(NamedTuple):
    """A folded decoder. weights: M_i [C, c_i] of each level that is summed up; bias: b [C]."""

    weights: tuple[Tensor, ...]
    bias: Tensor


def fold(linears: Iterable, parts: Iterable, norm: Any, *, normed: bool = True) -> Folded:
    """`Folded` for a sum over levels: their linear layers, the parts [C, C] of a convolution that read these, and the
    batch norm behind it, which is left out where `normed` is False.

    Rounded once: it is made in float64, which is exact for weights in 16 bits.
    """
    scale, bias = torch.ones_like(norm.weight, dtype=torch.float64), torch.zeros_like(norm.bias, dtype=torch.float64)
    if normed:
        scale, bias = _affine(norm)
    weights = []
    for linear, own in zip(linears, parts, strict=True):
        part = scale[:, None] * own.double()
        weights.append((part @ linear.weight.double()).to(linear.weight.dtype))
        bias = bias + part @ linear.bias.double()
    return Folded(tuple(weights), bias.to(norm.bias.dtype))


def _affine(norm):
    """What a batch norm multiplies by and adds, float64."""
    scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
    return scale, norm.bias.double() - scale * norm.running_mean.double()


class Head(nn.Module):
    """What heads share: products of the weights that are kept while these stay."""

    conv_seg: nn.Conv2d

    def __init__(self, operators: map_operators.Operators):
        """operators: of the network."""
        super().__init__()
        self.operators = operators
        self._made = map_operators.Remembered()

    def _remembered(self, what, make, *arguments):
        """``make(*arguments)``, kept for the next call with the same weights where no gradient is asked for."""
        return self._made(what, lambda: make(*arguments), [*self.parameters(), *self.buffers()], fresh=self.training)

    def _classes(self, x):
        return self.conv_seg(F.dropout2d(x, DROPOUT, self.training))


class ConvModule(nn.Module):
    """Convolution, batch norm and ReLU."""

    def __init__(self, before: int, width: int, kernel: int = 1):
        """kernel: pixels of a side."""
        super().__init__()
        self.conv = nn.Conv2d(before, width, kernel, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """A map to a map."""
        return self.bn(self.conv(x)).relu()


class Linear(Head):
    """A batch norm over the channels of all levels, and a linear layer, as DINOv2's.

    ASSUME: a level that is left out has zeros behind the norm.
    """

    def __init__(self, widths: Sequence[int], channels: int, classes: int, operators: map_operators.Operators):
        """widths: channels of the levels. channels: not read."""
        super().__init__(operators)
        self.widths = tuple(widths)
        self.bn = nn.BatchNorm2d(sum(widths))
        self.conv_seg = nn.Conv2d(sum(widths), classes, 1)

    def forward(self, maps: list, path: Path, folded: Folded | None = None) -> Tensor:
        """maps: of the stages that `path` runs."""
        grid, kept = tuple(maps[0].shape[2:]), [maps[int(level) - 1] for level in path.levels]
        if self.training or path.decoder == "published":
            x, bn = torch.cat([map_operators.resized(x, grid) for x in kept], 1), self.bn
            if path.levels == LEVELS:
                return self.conv_seg(bn(x))
            at = self._columns(path.levels)
            mean, variance = (None if self.training else held[at] for held in (bn.running_mean, bn.running_var))  # type: ignore[index]  # a batch norm has them
            x = F.batch_norm(x, mean, variance, bn.weight[at], bn.bias[at], self.training, eps=bn.eps)
            return F.conv2d(x, self.conv_seg.weight[:, at], self.conv_seg.bias)
        weights, bias = folded or self._remembered(path.levels, self.fold, path.levels)
        total: Any = None
        for x, weight in zip(kept, weights, strict=True):
            part = map_operators.resized(map_operators.product(x, weight, bias if total is None else None), grid)
            total = part if total is None else total + part
        return total

    def fold(self, levels: str) -> Folded:
        """`Folded` to classes."""
        scale, shift = _affine(self.bn)
        weight, bias = self.conv_seg.weight.flatten(1).double(), self.conv_seg.bias.double()  # type: ignore[union-attr]  # it has one
        at = [self._columns(level) for level in levels]
        bias = bias + sum(weight[:, each] @ shift[each] for each in at)
        dtype = self.conv_seg.weight.dtype
        return Folded(tuple((weight[:, each] * scale[each]).to(dtype) for each in at), bias.to(dtype))

    def _columns(self, levels):
        parts = torch.arange(sum(self.widths), device=self.bn.weight.device).split(self.widths)
        return torch.cat([parts[int(level) - 1] for level in levels])


class Normed(Head):
    """mmsegmentation's head for SegFormer: a convolution, batch norm and ReLU at each level, and one over them all.

    The last convolution is linear up to its norm. Folded, it runs at each level's own size.
    """

    def __init__(self, widths: Sequence[int], channels: int, classes: int, operators: map_operators.Operators):
        """widths: channels of the levels. channels: of the head."""
        super().__init__(operators)
        self.convs = nn.ModuleList(ConvModule(width, channels) for width in widths)
        self.fusion_conv = ConvModule(len(widths) * channels, channels)
        self.conv_seg = nn.Conv2d(channels, classes, 1)

    def forward(self, maps: list, path: Path, folded: tuple | None = None) -> Tensor:
        """maps: of the stages that `path` runs."""
        grid, levels = tuple(maps[0].shape[2:]), [int(level) - 1 for level in path.levels]
        if self.training or path.decoder == "published":
            kept = [map_operators.resized(self.convs[level](maps[level]), grid) for level in levels]
            weight = torch.cat(self._parts(path.levels), 1)[:, :, None, None]
            return self._classes(self.fusion_conv.bn(F.conv2d(torch.cat(kept, 1), weight)).relu())
        layers, (weights, bias) = folded or self._remembered(path.levels, self.fold, path.levels)
        kept = [map_operators.product(maps[level], *layer).relu() for level, layer in zip(levels, layers, strict=True)]
        classes = self.conv_seg
        return self.operators(map_operators.decode, kept, weights, bias, grid, classes.weight.flatten(1), classes.bias)

    def fold(self, levels: str) -> tuple:
        """``(layers, folded)``: weight and bias of each level's convolution, and `Folded` of the last one."""
        layers = []
        for level in levels:
            (scale, bias), weight = _affine(self.convs[int(level) - 1].bn), self.convs[int(level) - 1].conv.weight  # type: ignore[union-attr]  # torch's modules do not tell the types of what they hold
            layers.append(((scale[:, None] * weight.flatten(1)).to(weight.dtype), bias.to(weight.dtype)))  # type: ignore[operator, arg-type]  # as above
        scale, bias = _affine(self.fusion_conv.bn)
        parts = tuple((scale[:, None] * part).to(part.dtype) for part in self._parts(levels))
        return layers, Folded(parts, bias.to(parts[0].dtype))

    def _parts(self, levels):
        """What reads each level of the last convolution, [C, C]."""
        parts = self.fusion_conv.conv.weight.flatten(1).chunk(len(self.convs), 1)
        return [parts[int(level) - 1] for level in levels]


class UPerNet(Head):
    """UPerNet (`tilewright.masks.swin`): pyramid pooling of the last map, and a feature pyramid."""

    def __init__(self, widths: Sequence[int], channels: int, classes: int, operators: map_operators.Operators):
        """widths: channels of the levels. channels: of the head."""
        super().__init__(operators)
        self.channels = channels
        self.psp_modules = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(side), ConvModule(widths[3], channels)) for side in sizes.POOLS
        )
        self.bottleneck = ConvModule(widths[3] + len(sizes.POOLS) * channels, channels, 3)
        self.lateral_convs = nn.ModuleList(ConvModule(width, channels) for width in widths[:3])
        self.fpn_convs = nn.ModuleList(ConvModule(channels, channels, 3) for _ in widths[:3])
        self.fpn_bottleneck = ConvModule(4 * channels, channels, 3)
        self.conv_seg = nn.Conv2d(channels, classes, 1)

    def forward(self, maps: list, path: Path, folded: None = None) -> Tensor:
        """maps: of the four stages."""
        last = maps[3]
        pooled = [map_operators.resized(module(last), last.shape[2:]) for module in self.psp_modules]
        maps = [conv(x) for conv, x in zip(self.lateral_convs, maps[:3], strict=True)]
        maps.append(self.bottleneck(torch.cat((last, *pooled), 1)))
        for level in (3, 2, 1):
            maps[level - 1] = maps[level - 1] + map_operators.resized(maps[level], maps[level - 1].shape[2:])
        grid = maps[0].shape[2:]
        if path.fuse is None and path.width is None:
            maps = [conv(x) for conv, x in zip(self.fpn_convs, maps[:3], strict=True)] + maps[3:]
            return self._classes(self.fpn_bottleneck(torch.cat([map_operators.resized(x, grid) for x in maps], 1)))
        convs, kept, fuse, predict = self._remembered(path, self._narrowed, path)
        maps = [_convolved(x, *conv) for conv, x in zip(convs, maps[:3], strict=True)] + [maps[3][:, kept]]
        x = _convolved(torch.cat([map_operators.resized(x, grid) for x in maps], 1), *fuse)
        return F.conv2d(x, predict, self.conv_seg.bias)

    def _narrowed(self, path):
        """Weights and norms for the channels that `path` keeps of each level and of the fused map, contiguous.

        ASSUME: channels go by the norm of the weights that read them, times the batch norm's weight of what makes them.
        """
        channels, predict = self.channels, self.conv_seg.weight
        norms = [conv.bn for conv in (*self.fpn_convs, self.bottleneck)]
        outputs = map_operators.largest(
            self.fpn_bottleneck.bn.weight.abs() * predict.flatten(1).norm(dim=0), path.width
        )
        convs, parts = [], []
        for level, bn in enumerate(norms):
            part = self.fpn_bottleneck.conv.weight[:, level * channels : (level + 1) * channels]
            kept = map_operators.largest(bn.weight.abs() * torch.linalg.vector_norm(part, dim=(0, 2, 3)), path.fuse)
            parts.append(part[outputs][:, kept])
            if level < 3:
                convs.append((self.fpn_convs[level].conv.weight[kept], _of(bn, kept)))  # type: ignore[index, union-attr]  # torch's modules do not tell the types of what they hold
        fuse = torch.cat(parts, 1), _of(self.fpn_bottleneck.bn, outputs)
        return convs, kept, fuse, predict[:, outputs].contiguous()


def _of(bn, kept):
    """Some channels of a batch norm, as `F.batch_norm` takes them."""
    return [x[kept] for x in (bn.running_mean, bn.running_var, bn.weight, bn.bias)]


def _convolved(x, weight, norm):
    return F.batch_norm(F.conv2d(x, weight, padding=1), *norm).relu()


# By name, beside SegFormer's own.
SHARED = {"mmseg": Normed, "upernet": UPerNet, "linear": Linear}
