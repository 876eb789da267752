"""What paths of networks give an accelerator: shapes of its products, and bytes of what the cost model leaves out.

Numbers have 8 bits: a byte each. ASSUME: a network that was rounded to them still sees what it saw.
"""

import re
from collections import Counter

from tilewright.core.errors import ConfigError
from tilewright.masks import segformer as sizes
from tilewright.networks.path import parse, scaled
from tilewright_study.accelerators import Shape
from tilewright_study.planning import layers

# Which part of a network a layer is of, by its name, and what is neither.
PARTS = {"decoder": r"decode_head\.", "depthwise": r".*\.dwconv\.dwconv$", "attention": r".*\.attn\.(scores|values)$"}
REST = "rest"


def shapes(found, hardware):
    """``{part: Counter of Shape}`` of `found`, `planning.layers.Layer` each, on `hardware`.

    Channels and pixels are rounded up to what the array takes at once: what is left of it idles, and is paid for.
    ASSUME: products of convolutions read their input as rows, so that pixels under several kernels are read as often.
    """
    parts = {name: Counter() for name in (*PARTS, REST)}
    for layer in found:
        part = next((name for name, pattern in PARTS.items() if re.match(pattern, layer.name)), REST)
        parts[part].update(dict.fromkeys([_shape(layer, hardware)], _heads(layer)))
    return parts


def _shape(layer, hardware):
    heads = _heads(layer)
    inputs, outputs = layer.inputs * layer.taps, layer.outputs
    if layer.kind == "attention":
        # Of one head: the channels that queries and keys share are inputs of the scores and outputs of the values.
        inputs, outputs = (inputs // heads, outputs) if layer.name.endswith("scores") else (inputs, outputs // heads)
    pixels, outputs = _up(layer.pixels, hardware.elements), _up(outputs, hardware.lanes)
    if layer.kind == "depthwise":
        return Shape("depthwise", layer.pixels, inputs, outputs)
    return Shape("product", pixels, _up(inputs, hardware.vector), outputs)


def _heads(layer):
    """Heads of a layer of attention, by the stage in its name; 1 of all others."""
    stage = re.match(r"backbone\.block(\d)\.", layer.name)
    return sizes.HEADS[int(stage[1]) - 1] if layer.kind == "attention" else 1


def _up(size, multiple):
    return -(-size // multiple) * multiple


def products(parts):
    """Multiplications of ``{part: Counter of Shape}``, those of idle channels among them."""
    return sum(n * s.pixels * s.inputs * s.outputs for counted in parts.values() for s, n in counted.items())


def left_out(options, path):
    """Bytes read and written by what the cost model does not know, of a path of a SegFormer: norms, softmax, GELU and
    ReLU, sums of blocks and levels, resizing. Each reads and writes its own maps once. ASSUME: none is fused."""
    size, grids = sizes.VARIANTS[options.variant], sizes.grids(scaled(options.pixels, path.scale))
    total = 0
    for stage in range(path.last):
        width, heads, reduction = size.widths[stage], sizes.HEADS[stage], sizes.REDUCTIONS[stage]
        rows, columns = grids[stage]
        tokens, keys = rows * columns, (rows // reduction) * (columns // reduction)
        # The norms behind the patches and behind the stage.
        total += 4 * tokens * width
        norms = 4 * tokens * width + 2 * keys * width * (reduction > 1)
        softmax, gelu, sums = 2 * heads * tokens * keys, 2 * tokens * sizes.MLP_RATIO * width, 6 * tokens * width
        total += path.blocks[stage].count("1") * (norms + softmax + gelu + sums)
    fuse, outputs = path.fuse or size.channels, path.width or size.channels
    first = grids[0][0] * grids[0][1]
    summed = outputs if path.decoder == "folded" else fuse
    for level in map(int, path.levels):
        pixels = grids[level - 1][0] * grids[level - 1][1]
        # Level 1 has the grid of the maps; a folded level is added to the sum of those before.
        total += (pixels + first) * summed if level > 1 else 0
        total += 3 * first * summed if path.decoder == "folded" else 0
    return total + 2 * first * outputs


def layers_of(network, text, classes):
    """``(options, path, layers)`` of a path, by its text, of a network, by its name. Imports torch.

    Raises `UnknownNameError` and `ConfigError`, for networks other than SegFormers, too.
    """
    from tilewright import networks
    from tilewright.networks import segformer

    family, stated = networks.parse(network, {"num_classes": classes})
    if family != "segformer" or "head" in stated:
        raise ConfigError(f"accelerator: expected a network named segformer-... with its own head, found {network!r}")
    options = segformer.Options(**stated)
    path = parse(text, options)
    return options, path, layers.segformer(options, path)
