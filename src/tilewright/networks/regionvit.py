"""RegionViT: four stages of regional and local tokens (Chen et al., arXiv 2106.02689, and its public code).

Each block attends twice with the same weights: among the regional tokens, then within each window of one regional and
w^2 local tokens, with a relative-position bias between the locals. The second is the `Site` of a stage.
"""

from typing import Annotated, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from tilewright.core.errors import ConfigError
from tilewright.masks import regionvit as pattern
from tilewright.networks import _parameters, _precision, attention_sites, attentions, vit_parts
from tilewright.networks._region_windows import Windows

EXCHANGED = attentions

# Blocks of each stage, and convolutions of the stem.
SIZES = {
    "tiny": ((2, 2, 8, 2), 3),
    "small": ((2, 2, 8, 2), 3),
    "medium": ((2, 2, 14, 2), 1),
    "base": ((2, 2, 14, 2), 1),
}
PATCH = 4
MLP_RATIO = 4


class Options(vit_parts.Sizes, frozen=True, forbid_unknown_fields=True):
    """One network. image_size: pixels a side, or (height, width). window: w, local tokens along a side of a region;
    default 7.

    peg: a positional convolution after the first block of each stage. A variant's ``-w14`` and ``-peg`` state the same.
    """

    variant: Literal[
        "tiny", "small", "medium", "base", "tiny-w14", "small-w14", "small-w14-peg", "base-w14", "base-w14-peg"
    ]
    # Without a bound of its own: msgspec crashes on a union of a bounded number and a tuple.
    image_size: int | tuple[int, int] = 224
    num_classes: Annotated[int, msgspec.Meta(ge=1)] = 1000
    window: Annotated[int, msgspec.Meta(ge=2)] | None = None
    peg: bool | None = None

    def __post_init__(self) -> None:
        size, *suffixes = self.variant.split("-")
        for option, suffix, meant, default in (("window", "w14", 14, 7), ("peg", "peg", True, False)):
            stated = getattr(self, option)
            if suffix in suffixes and stated not in (None, meant):
                raise ConfigError(f"{option}: expected {meant} for variant {self.variant}, found {stated}")
            value = meant if suffix in suffixes else default
            msgspec.structs.force_setattr(self, option, value if stated is None else stated)
        msgspec.structs.force_setattr(self, "variant", size)
        if min(self.pixels) < PATCH:
            raise ConfigError(f"image_size: expected at least a patch of {PATCH}, found {self.size_name}")


def name(options: Options) -> str:
    """The network's name in files and figures, e.g. ``regionvit-tiny-224``, ``regionvit-small-384-w14-peg``."""
    window = "" if options.window == 7 else f"-w{options.window}"
    return f"regionvit-{options.variant}-{options.size_name}{window}{'-peg' * bool(options.peg)}"


def adapt(state: dict[str, torch.Tensor], network: nn.Module) -> dict[str, torch.Tensor]:
    """Drop the projections' second name and resize what depends on the window, both as the public tools do."""
    for key in [key for key in state if ".proj_cls." in key]:
        twin = state.get(key.replace(".proj_cls.", ".proj."))
        if twin is not None and torch.equal(twin, state[key]):
            del state[key]
    for key, wanted in network.state_dict().items():
        found = state.get(key)
        if found is None or found.shape == wanted.shape:
            continue
        if key == "cls_token.proj.weight" and found.ndim == 4 and found.shape[:2] == wanted.shape[:2]:
            state[key] = _bicubic(found, wanted.shape[2])
        elif key.endswith(".rel_pos") and found.ndim == 2 and len(found) == len(wanted):
            old, new = (round(x.shape[1] ** 0.5) for x in (found, wanted))
            # The table as it is stored, wrapped offsets and all: that is what the public tool resizes.
            if old * old == found.shape[1]:
                state[key] = _bicubic(found.view(1, -1, old, old), new).flatten(2)[0]
    return state


def _bicubic(x, side):
    return F.interpolate(x.float(), size=(side, side), mode="bicubic").to(x.dtype)


class Network(_parameters.Counted):
    """RegionViT; see the contract of `tilewright.networks`."""

    def __init__(self, options: Options, attention: str):
        """Draw random weights, in the main as the public code does (it cuts the normals off at 100 deviations)."""
        super().__init__()
        self.options = options
        w: int = options.window  # type: ignore[assignment]  # the options have set it
        depths, stem = SIZES[options.variant]
        heads = pattern.HEADS[options.variant]
        width = heads * pattern.HEAD_DIM
        self.patch_embed = nn.ModuleDict({"proj": _stem(width, stem)})
        self.cls_token = nn.ModuleDict({"proj": nn.Conv2d(3, width, PATCH * w, PATCH * w)})
        # ASSUME: an axis of whole regions has no border. The public code gives it one of a whole region where the other
        # axis has one; published weights are of squares, which tell nothing of it.
        down, across = (-side % (PATCH * w) for side in options.pixels)
        self.border = across // 2, across - across // 2, down // 2, down - down // 2
        # One convolution of 8 x 8 after a border of 3 leaves out a last single row of pixels; three round up.
        grid = tuple(-(-side // PATCH) if stem == 3 else (side + 2) // PATCH for side in options.pixels)
        regions = tuple(-(-side // (PATCH * w)) for side in options.pixels)
        self.layers, before = nn.ModuleList(), width
        for stage, depth in enumerate(depths):
            if stage:
                grid, regions = (tuple(-(-side // 2) for side in sides) for sides in (grid, regions))
                heads *= 2
            windows = Windows(grid, regions, w, heads, attention)
            width = heads * pattern.HEAD_DIM
            self.layers.append(_Stage(before, width, depth, windows, options.peg))
            before = width
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, options.num_classes)
        self.apply(_initialise)

    @_precision.checked
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, H, W] to logits [B, num_classes]; raises `PatternError` for images of another shape."""
        # The regional convolution sees the image amid its border; the locals are padded to the right and below.
        regionals = self.cls_token["proj"](F.pad(images, self.border))
        locals_ = self.patch_embed["proj"](images)
        for stage in self.layers:
            regionals, locals_ = stage(regionals, locals_)
        return _precision.logits(self.head, self.norm(regionals.flatten(2).transpose(1, 2)).mean(1))


def _stem(width, convolutions):
    """Image to local tokens, a quarter as many along each side."""
    if convolutions == 1:
        return nn.Conv2d(3, width, 2 * PATCH, PATCH, PATCH - 1)
    layers = [nn.Conv2d(3, width // 4, 3, 2, 1), _GridNorm(width // 4), nn.GELU()]
    layers += [nn.Conv2d(width // 4, width // 2, 3, 2, 1), _GridNorm(width // 2), nn.GELU()]
    return nn.Sequential(*layers, nn.Conv2d(width // 2, width, 3, 1, 1))


def _initialise(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


class _GridNorm(nn.Module):
    """Layer norm over the channels of a grid [B, C, H, W]."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, width, 1, 1))  # as of torch.nn
        self.bias = nn.Parameter(torch.zeros(1, width, 1, 1))  # as of torch.nn

    def forward(self, x):
        affine = self.weight.flatten(), self.bias.flatten()
        return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], *affine, 1e-5).permute(0, 3, 1, 2)


def _projection(before, width):
    """Between stages, for both grids: half the side, each channel giving ``width / before`` new ones."""
    if before == width:
        return nn.ModuleDict({"proj": nn.Identity()})
    conv = nn.Conv2d(before, width, 3, 2, 1, groups=before)
    return nn.ModuleDict({"proj": nn.Sequential(_GridNorm(before), nn.GELU(), conv)})


class _Stage(nn.Module):
    """Grids [B, C, r, s] of regional and [B, C, n, m] of local tokens, in the width before, to those of the stage."""

    def __init__(self, before, width, depth, windows, peg):
        super().__init__()
        blocks = [_Block(width, windows) for _ in range(depth)]
        self.block = nn.ModuleList([_projection(before, width), *blocks])
        self.peg = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False) if peg else None
        self.windows = windows

    def forward(self, regionals, locals_):
        project, *blocks = self.block
        x = self.windows.enter(project["proj"](regionals), project["proj"](locals_))  # type: ignore[index]  # torch's modules do not tell the types of what they hold
        for i, block in enumerate(blocks):
            x = block(x, self.windows.regionals(x.device))
            if i == 0 and self.peg is not None:
                x = self.windows.enter(*(grid + self.peg(grid) for grid in self.windows.leave(x)))
        return self.windows.leave(x)


class _Block(nn.Module):
    """Attention among the regional tokens and then in the windows, with the same weights, and an MLP."""

    def __init__(self, width, windows):
        super().__init__()
        self.norm0 = nn.LayerNorm(width, eps=1e-6)
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = _Attention(width, windows)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = vit_parts.Mlp(width, MLP_RATIO * width)

    def forward(self, x, regionals):
        own = x.index_select(1, regionals)
        # In place: nobody else holds these tokens.
        x.index_copy_(1, regionals, own + self.attn(self.norm0(own), attention_sites.full))
        x = x + self.attn(self.norm1(x), self.attn.in_windows)
        return x + self.mlp(self.norm2(x))


class _Attention(vit_parts.Attention):
    def __init__(self, width, windows):
        super().__init__(width, windows.site.heads, bias=True)
        self.rel_pos = nn.Parameter(0.02 * torch.randn(self.heads, (2 * windows.window - 1) ** 2))  # as of torch.nn
        self.attend = windows.site.layer()

    def in_windows(self, q, k, v):
        """Attention within each window."""
        return self.attend(q, k, v, lambda: F.pad(self.rel_pos, (0, 1)), (self.rel_pos,))
