"""What a path of a network computes, layer by layer: products of matrices, and convolutions as such products.

Norms, softmax, activations, sums and resizing hold no products and are left out. The products of a folded decoder with
the published one's weights are made once, and are left out, too.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from tilewright.masks import segformer as segformer_sizes
from tilewright.masks import swin as swin_sizes
from tilewright.networks.path import Path, scaled

if TYPE_CHECKING:
    from tilewright.networks.map_operators import Options


class Layer(NamedTuple):
    """A product: of `pixels` rows, each of `inputs` x `taps` numbers, to `outputs` numbers.

    name: of its weights, or of the products of attention, ``….scores`` and ``….values`` (all heads together). kind:
    ``conv``, ``depthwise`` (of one input channel an output), ``linear`` or ``attention``.
    """

    name: str
    kind: str
    pixels: int
    inputs: int
    outputs: int
    taps: int = 1

    @property
    def macs(self) -> int:
        """Multiplications, each with its addition, for one image."""
        return self.pixels * self.inputs * self.outputs * self.taps


def macs(layers: Iterable[Layer]) -> int:
    """Multiplications of all `layers` for one image."""
    return sum(layer.macs for layer in layers)


def segformer(options: "Options", path: Path) -> list:
    """The layers of a path of a SegFormer, in the order in which they run."""
    size, sizes = segformer_sizes.VARIANTS[options.variant], segformer_sizes
    grids = sizes.grids(scaled(options.pixels, path.scale))
    found, before = [], 3
    for stage in range(path.last):
        width, (rows, columns) = size.widths[stage], grids[stage]
        tokens, reduction = rows * columns, sizes.REDUCTIONS[stage]
        keys = (rows // reduction) * (columns // reduction)
        name = f"backbone.patch_embed{stage + 1}.proj"
        found.append(Layer(name, "conv", tokens, before, width, sizes.PATCHES[stage] ** 2))
        for block, kept in enumerate(path.blocks[stage]):
            if kept == "1":
                name, hidden = f"backbone.block{stage + 1}.{block}", sizes.MLP_RATIO * width
                found += [Layer(f"{name}.attn.sr", "conv", keys, width, width, reduction**2)] * (reduction > 1)
                found += [
                    Layer(f"{name}.attn.q", "linear", tokens, width, width),
                    Layer(f"{name}.attn.kv", "linear", keys, width, 2 * width),
                    Layer(f"{name}.attn.scores", "attention", tokens, width, keys),
                    Layer(f"{name}.attn.values", "attention", tokens, keys, width),
                    Layer(f"{name}.attn.proj", "linear", tokens, width, width),
                    Layer(f"{name}.mlp.fc1", "linear", tokens, width, hidden),
                    Layer(f"{name}.mlp.dwconv.dwconv", "depthwise", tokens, 1, hidden, 9),
                    Layer(f"{name}.mlp.fc2", "linear", tokens, hidden, width),
                ]
        before = width
    if options.head != segformer_sizes.DECODE_HEADS[0]:
        return found + _head(options, path, size.widths, [rows * columns for rows, columns in grids])
    fuse, outputs = path.fuse or options.channels, path.width or options.channels
    first = grids[0][0] * grids[0][1]
    for level in map(int, path.levels):
        pixels = grids[level - 1][0] * grids[level - 1][1]
        found.append(Layer(f"decode_head.linear_c{level}.proj", "linear", pixels, size.widths[level - 1], fuse))
    if path.decoder == "published":
        found.append(Layer("decode_head.linear_fuse.conv", "conv", first, fuse * len(path.levels), outputs))
    return [*found, Layer("decode_head.linear_pred", "conv", first, outputs, options.num_classes)]


def swin(options: "Options", path: Path) -> list:
    """The layers of a path of a Swin with UPerNet. Attention is that of whole windows, padding included."""
    size, sizes, window = swin_sizes.VARIANTS[options.variant], swin_sizes, getattr(options, "window", 0)
    grids = sizes.grids(options.pixels)
    pixels = [rows * columns for rows, columns in grids]
    widths = [size.width * 2**stage for stage in range(4)]
    found = [Layer("backbone.patch_embed.proj", "conv", pixels[0], 3, widths[0], sizes.PATCH**2)]
    for stage, (width, tokens) in enumerate(zip(widths, pixels, strict=True)):
        rows, columns = (-(-side // window) * window for side in grids[stage])
        padded = rows * columns
        for block, kept in enumerate(path.blocks[stage]):
            if kept == "1":
                name, hidden = f"backbone.layers.{stage}.blocks.{block}", sizes.MLP_RATIO * width
                found += [
                    Layer(f"{name}.attn.qkv", "linear", padded, width, 3 * width),
                    Layer(f"{name}.attn.scores", "attention", padded, width, window**2),
                    Layer(f"{name}.attn.values", "attention", padded, window**2, width),
                    Layer(f"{name}.attn.proj", "linear", padded, width, width),
                    Layer(f"{name}.mlp.fc1", "linear", tokens, width, hidden),
                    Layer(f"{name}.mlp.fc2", "linear", tokens, hidden, width),
                ]
        if stage < 3:
            name = f"backbone.layers.{stage}.downsample.reduction"
            found.append(Layer(name, "linear", pixels[stage + 1], 4 * width, 2 * width))
    return found + _head(options, path, widths, pixels)


def _head(options, path, widths, pixels):
    """The layers of a head of `heads.SHARED`, for maps of `widths` channels and so many `pixels`."""
    channels, classes, name = options.channels, options.num_classes, "decode_head"
    levels, first = [int(level) - 1 for level in path.levels], pixels[0]
    sizes_of = [pixels[level] if path.decoder == "folded" else first for level in levels]
    if options.head == "linear":
        return [
            Layer(f"{name}.conv_seg", "conv", each, widths[level], classes)
            for level, each in zip(levels, sizes_of, strict=True)
        ]
    if options.head == "mmseg":
        own = [Layer(f"{name}.convs.{level}.conv", "conv", pixels[level], widths[level], channels) for level in levels]
        own += [Layer(f"{name}.fusion_conv.conv", "conv", each, channels, channels) for each in sizes_of]
        return [*own, Layer(f"{name}.conv_seg", "conv", first, channels, classes)]
    return _upernet(options, path, widths, pixels)


def _upernet(options, path, widths, pixels):
    found, sizes, channels = [], swin_sizes, options.channels
    fuse, outputs = path.fuse or channels, path.width or channels
    for level, (width, tokens) in enumerate(zip(widths[:3], pixels[:3], strict=True)):
        found.append(Layer(f"decode_head.lateral_convs.{level}.conv", "conv", tokens, width, channels))
        found.append(Layer(f"decode_head.fpn_convs.{level}.conv", "conv", tokens, channels, fuse, 9))
    for place, side in enumerate(sizes.POOLS):
        found.append(Layer(f"decode_head.psp_modules.{place}.1.conv", "conv", side**2, widths[3], channels))
    pooled = widths[3] + len(sizes.POOLS) * channels
    return [
        *found,
        Layer("decode_head.bottleneck.conv", "conv", pixels[3], pooled, channels, 9),
        Layer("decode_head.fpn_bottleneck.conv", "conv", pixels[0], 4 * fuse, outputs, 9),
        Layer("decode_head.conv_seg", "conv", pixels[0], outputs, options.num_classes),
    ]
