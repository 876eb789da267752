"""What networks from images to maps share: options, layouts of maps, and the operators for which kernels are chosen.

A map is a tensor [B, C, H, W] whose channels lie next to each other in memory, as tokens [B, H W, C] do: going from one
to the other copies nothing.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar

import msgspec
import torch
import torch.nn.functional as F
from torch import library, nn

from tilewright.core import operators
from tilewright.core.errors import ConfigError
from tilewright.networks import attention_sites, backends, vit_parts

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Options(vit_parts.Sizes, frozen=True, forbid_unknown_fields=True):
    """Fields and properties that networks of maps share. FAMILY: module with ``VARIANTS``, ``DECODE_HEADS`` and
    ``LEAST``. KINDS: a `heads.Kind` by name of a head.

    Where they are not stated, the head is the family's first one, its channels (0) are those that were published, and
    the decoder of the full path is the head's first one.
    """

    variant: str
    image_size: int | tuple[int, int] = 512
    num_classes: Positive = 150
    decoder: str = ""
    head: str = ""
    channels: Annotated[int, msgspec.Meta(ge=0)] = 0

    FAMILY: ClassVar
    KINDS: ClassVar

    def __post_init__(self) -> None:
        if self.variant not in self.FAMILY.VARIANTS:
            raise ConfigError(f"variant: expected one of {', '.join(self.FAMILY.VARIANTS)}, found {self.variant!r}")
        head = self.head or self.FAMILY.DECODE_HEADS[0]
        if head not in self.FAMILY.DECODE_HEADS:
            raise ConfigError(f"head: expected one of {', '.join(self.FAMILY.DECODE_HEADS)}, found {head!r}")
        known = self.KINDS[head].decoders
        if self.decoder not in ("", *known):
            raise ConfigError(f"decoder: expected one of {', '.join(known)} of the head {head}, found {self.decoder!r}")
        stated = {"head": head, "decoder": self.decoder or known[0], "channels": self.channels or self._channels(head)}
        for field, value in stated.items():
            msgspec.structs.force_setattr(self, field, value)
        if min(self.pixels) < self.least:
            raise ConfigError(f"image_size: expected at least {self.least} pixels a side, found {self.size_name}")

    def _channels(self, head):
        """Channels of a head as published."""
        return self.FAMILY.channels(self.variant, head)

    @property
    def knobs(self) -> tuple[str, ...]:
        """Keys that paths take, see `path.Path`."""
        return self.KINDS[self.head].knobs

    @property
    def tag(self) -> str:
        """What names say of the head: nothing of the family's first one."""
        return "" if self.head == self.FAMILY.DECODE_HEADS[0] else f"-{self.head}"

    @property
    def least(self) -> int:
        """Fewest pixels of a side."""
        return self.FAMILY.LEAST

    @property
    def depths(self) -> tuple[int, ...]:
        """Blocks of each stage."""
        return self.FAMILY.VARIANTS[self.variant].depths


# The form of an operator that no kernel runs.
TORCH = "torch"
# Bytes of a decoder's sum that a CPU works on at once, and the types in which the order of its sums does not matter.
CACHED = 1 << 21
EXACT = torch.float32, torch.float64


class Operators:
    """The operators of one network for which a device may have kernels: torch's, or by sizes the kernel that was chosen
    (`networks.choose_kernels`). Kernels serve inference: where gradients are recorded torch's operators run.

    chosen: ``{sizes: name of a form}``, see `sizes`. seen: a dict that takes the arguments of every call, or None.
    held: tensors that were weights, and are kept for who may still read them.
    """

    def __init__(self):
        self.chosen, self.seen, self.held = {}, None, []

    def __call__(self, operator: Callable, *arguments: Any) -> torch.Tensor:
        """What an operator of this module returns, such as `decode`: torch's, or its kernel for these sizes."""
        if not self.chosen and self.seen is None:
            return operator(*arguments)
        key = sizes(operator, arguments)
        if self.seen is not None:
            self.seen[key] = arguments
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(arguments))
        return run(operator, arguments, TORCH if recorded else self.chosen.get(key, TORCH))


def sizes(operator: Callable, arguments: Sequence[Any]) -> tuple[str, torch.dtype, tuple[tuple[int, ...], ...]]:
    """What a kernel is chosen for: ``(name, type, shapes)``."""
    tensors = _tensors(arguments)
    return operator.__name__, tensors[-1].dtype, tuple(tuple(x.shape) for x in tensors)


def _tensors(arguments):
    """Those among arguments, and in lists of them."""
    lists = (x if isinstance(x, list | tuple) else (x,) for x in arguments)
    return [x for x in itertools.chain.from_iterable(lists) if isinstance(x, torch.Tensor)]


class Remembered:
    """What was made of weights, by name, for as long as they are not written to."""

    def __init__(self):
        self._tables, self._made = [], {}

    def __call__(self, name: str, make: Callable, tables: Sequence[torch.Tensor], *, fresh: bool = False) -> Any:
        """What ``make()`` returns, or returned when it was called with the same `name` and `tables`.

        It is made anew where `fresh` says so, where gradients are recorded, and where a program is made, which cannot
        compare.
        """
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tables)
        if fresh or recorded or any(map(operators.watched, tables)):
            return make()
        if not attention_sites.same(tables, self._tables):
            self._tables, self._made = [attention_sites.Table(x) for x in tables], {}
        if name not in self._made:
            # Layers that are trained later may read it, too.
            with torch.inference_mode(False), torch.no_grad():
                self._made[name] = make()
        return self._made[name]

    def __deepcopy__(self, memo: dict) -> "Remembered":
        return Remembered()


def initialise(network: nn.Module) -> None:
    """Draw linear layers and convolutions as published: normal of 0.02, and by the outputs that read an input."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Conv2d):
            fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def to_map(x: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
    """Tokens [B, H W, C] of a grid as a map."""
    return x.unflatten(1, grid).permute(0, 3, 1, 2)


def to_tokens(x: torch.Tensor) -> torch.Tensor:
    """A map as tokens."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A map through a linear layer."""
    return F.linear(x.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)


def resized(x: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
    """A map on another grid, bilinear as published (`align_corners` False)."""
    return x if x.shape[2:] == grid else F.interpolate(x, size=tuple(grid), mode="bilinear", align_corners=False)


@cache
def interpolation(side: int, whole: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """[whole, side]: the weights by which `resized` takes `whole` rows from `side` rows."""
    with torch.inference_mode(False), torch.no_grad():
        ones = torch.eye(side, dtype=torch.float64, device=device)[None]
        return F.interpolate(ones, size=whole, mode="linear", align_corners=False)[0].T.to(dtype).contiguous()


def spread(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """A map [B, C, h, w] as a map [B, C, H, W] by weights `rows` [H, h] and `columns` [W, w].

    Its gradient, unlike that of `resized`, is a product, too: on a GPU the other adds up atomically.
    """
    x = columns @ x.permute(0, 2, 3, 1)
    return (rows @ x.flatten(2)).unflatten(2, x.shape[2:]).permute(0, 3, 1, 2)


def largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices, in order, of the `count` largest scores, None for all; of equal ones the first."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def decode(
    maps: Sequence,
    weights: Sequence,
    bias: torch.Tensor,
    grid: tuple[int, ...],
    classes: torch.Tensor,
    classes_bias: torch.Tensor,
) -> torch.Tensor:
    """A folded decoder: ``classes relu(sum_i up(weights_i maps_i) + bias) + classes_bias``, a map on `grid`."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (*maps, *weights, bias, classes, classes_bias))
    exact = bias.is_cpu and bias.dtype in EXACT and not torch.is_autocast_enabled(bias.device.type)
    # What watches operators, as a tracer does, may not see a result that is written in parts.
    if exact and not recorded and not any(map(operators.watched, (*maps, bias))):
        return _by_rows(maps, weights, bias, tuple(grid), classes, classes_bias)
    total: Any = None
    for x, weight in zip(maps, weights, strict=True):
        # The bias goes with the first product, which the library adds at no cost.
        part = resized(product(x, weight, bias if total is None else None), grid)
        total = part if total is None else total.add_(part)
    return product(total.relu(), classes, classes_bias)


def _by_rows(maps, weights, bias, grid, classes, classes_bias):
    """`decode`, some rows of the grid after the other: sums of all channels then never leave the caches of a CPU."""
    (height, width), channels = grid, len(bias)
    whole, wide = [], []
    for x, weight in zip(maps, weights, strict=True):
        if tuple(x.shape[2:]) == grid:
            whole.append((x.permute(0, 2, 3, 1), weight))
        else:
            part = resized(product(x, weight), (x.shape[2], width)).permute(0, 2, 3, 1).flatten(2)
            wide.append((part, interpolation(x.shape[2], height, part.dtype, part.device)))
    found = classes.new_empty(len(maps[0]), height, width, len(classes))
    rows = max(1, CACHED // (bias.element_size() * width * channels))
    for image, lo in itertools.product(range(len(found)), range(0, height, rows)):
        hi = min(height, lo + rows)
        total = bias.repeat((hi - lo) * width, 1)
        for x, weight in whole:
            total.addmm_(x[image, lo:hi].flatten(0, 1), weight.T)
        total = total.view(hi - lo, -1)
        for part, shares in wide:
            # Those rows of the smaller map that these lie between.
            side = part.shape[1]
            first, last = ((2 * row + 1) * side // (2 * height) for row in (lo, hi - 1))
            near = slice(max(0, first - 1), last + 2)
            total.addmm_(shares[lo:hi, near], part[image, near])
        pixels = total.view(-1, channels).relu_()
        torch.addmm(classes_bias, pixels, classes.T, out=found[image, lo:hi].view(len(pixels), -1))
    return found.permute(0, 3, 1, 2)


def dwconv_gelu(x: torch.Tensor, grid: tuple[int, ...], weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Tokens x [B, N, C] of a grid through a 3 x 3 depthwise convolution and a GELU."""
    x = F.conv2d(to_map(x, grid), weight, bias, padding=1, groups=len(weight))
    return F.gelu(to_tokens(x))


def patches(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    stride: int,
    gain: torch.Tensor,
    offset: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """A map through a convolution of overlapping patches, as tokens, through a layer norm."""
    return norm(to_tokens(F.conv2d(x, weight, bias, stride, weight.shape[2] // 2)), gain, offset, eps)


def norm(x: torch.Tensor, gain: torch.Tensor, offset: torch.Tensor, eps: float) -> torch.Tensor:
    """Tokens x [B, N, C] through a layer norm."""
    return F.layer_norm(x, x.shape[-1:], gain, offset, eps)


def norm_linear(
    x: torch.Tensor, gain: torch.Tensor, offset: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Tokens x [B, N, C] through a layer norm and a linear layer."""
    return F.linear(norm(x, gain, offset, eps), weight, bias)


def attention(
    x: torch.Tensor, grid: tuple[int, ...], heads: int, gain: torch.Tensor, offset: torch.Tensor, eps: float,
    weight: torch.Tensor, bias: torch.Tensor, conv_weight: torch.Tensor, conv_bias: torch.Tensor,
    key_gain: torch.Tensor, key_offset: torch.Tensor, key_eps: float, kv_weight: torch.Tensor, kv_bias: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Tokens x [B, N, C] of a grid, behind a norm, attend to themselves, or to what a convolution of patches that do
    not overlap and another norm make of them: conv_weight [C, C, s, s] to key_offset [C], or None all. weight, bias: of
    queries; kv_weight [2 C, C], kv_bias: of keys, then values."""
    x = norm(x, gain, offset, eps)
    q = F.linear(x, weight, bias).unflatten(2, (heads, -1)).transpose(1, 2)
    if conv_weight is not None:
        x = to_tokens(F.conv2d(to_map(x, grid), conv_weight, conv_bias, stride=conv_weight.shape[2:]))
        x = norm(x, key_gain, key_offset, key_eps)
    k, v = F.linear(x, kv_weight, kv_bias).unflatten(2, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    return attention_sites.full(q, k, v).transpose(1, 2).flatten(2)


def linear_add(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Tokens x through a linear layer, added to a residual."""
    return residual + F.linear(x, weight, bias)


def run(operator: Callable, arguments: Sequence[Any], form: str) -> torch.Tensor:
    """An operator of this module: torch's, or a form of a kernel by its name."""
    if form == TORCH:
        return operator(*arguments)
    # Each is one operator for a compiler, which does not look into it.
    return getattr(torch.ops.tilewright, KERNELS[operator.__name__])(*arguments, form)


def forms(name: str, device: torch.device) -> dict[str, Any]:
    """``{name of a form: form}`` of the kernels that `device` has for an operator."""
    module = backends.maps(device.type)
    return {} if module is None else {str(form): form for form in module.FORMS[name]}


def _launched(name):
    """The launch of the kernel of an operator, by the name of its form."""

    def launch(*given):
        *arguments, form = given
        device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
        return getattr(backends.maps(device.type), name)(*arguments, forms(name, device)[form])

    return launch


def _like_decode(maps, weights, bias, grid, classes, classes_bias, form):
    return classes.new_empty(len(maps[0]), *grid, len(classes)).permute(0, 3, 1, 2)


def _like_patches(x, weight, bias, stride, gain, offset, eps, form):
    rows, columns = (-(-side // stride) for side in x.shape[2:])
    return x.new_empty(len(x), rows * columns, len(weight))


def _like_first(x, *others):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_norm_linear(x, gain, offset, eps, weight, bias, form):
    return x.new_empty(*x.shape[:-1], len(weight))


def _like_linear_add(x, weight, bias, residual, form):
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


_LIBRARY = library.Library("tilewright", "FRAGMENT")
_NORM = "Tensor gain, Tensor offset, float eps"
# For a compiler: arguments, and what the result looks like.
_SCHEMAS = {
    "decode": (
        "Tensor[] maps, Tensor[] weights, Tensor bias, int[] grid, Tensor classes, Tensor classes_bias",
        _like_decode,
    ),
    "dwconv_gelu": ("Tensor x, int[] grid, Tensor weight, Tensor bias", _like_first),
    "patches": (f"Tensor x, Tensor weight, Tensor bias, int stride, {_NORM}", _like_patches),
    "norm": (f"Tensor x, {_NORM}", _like_first),
    "norm_linear": (f"Tensor x, {_NORM}, Tensor weight, Tensor bias", _like_norm_linear),
    "attention": (
        f"Tensor x, int[] grid, int heads, {_NORM}, Tensor weight, Tensor bias, Tensor? conv_weight, "
        "Tensor? conv_bias, Tensor? key_gain, Tensor? key_offset, float key_eps, Tensor kv_weight, Tensor kv_bias",
        _like_first,
    ),
    "linear_add": ("Tensor x, Tensor weight, Tensor bias, Tensor residual", _like_linear_add),
}
# Their names in torch's library, by those of the operators here.
KERNELS = {name: "decode_maps" if name == "decode" else name for name in _SCHEMAS}
for _name, (_arguments, _like) in _SCHEMAS.items():
    _schema = f"{KERNELS[_name]}({_arguments}, str form) -> Tensor"
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(KERNELS[_name], _launched(_name), "CompositeExplicitAutograd")
    library.register_fake(f"tilewright::{KERNELS[_name]}", _like, lib=_LIBRARY)  # type: ignore[arg-type]  # mypy joins signatures to a bare function
