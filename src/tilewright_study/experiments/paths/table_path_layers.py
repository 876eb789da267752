"""Layers of networks with paths: products and bytes, counted, and the time that leaving a block out saves, measured.

What the full path of a network computes, block by block: products and bytes as counted, and the time that leaving the
block out saves, as measured. A block that holds a large share of the products may save little time, and the other way
round.
"""

from types import SimpleNamespace

from tilewright import networks
from tilewright.networks.path import Path
from tilewright_study import scenes
from tilewright_study.experiments.paths import table_paths as of_paths
from tilewright_study.planning import layers as counted
from tilewright_study.tables import _select

# Where its scenes are, whose classes are counted.
ENTERED = ("tilewright_study.scenes.sources.scenes",)
# Bytes of a number.
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}

SHOWN = {
    "case": ("network", ""),
    "layer": ("layers", ""),
    "macs": ("products (M)", ",.1f"),
    "macs_share": ("of all products", ".1%"),
    "mib": ("read and written (MiB)", ",.2f"),
    "saved_us": ("time saved without (µs)", ",.1f"),
    "saved_share": ("of the full path's time", ".1%"),
    "lost": ("points lost without", ".2f"),
    "device": ("device", ""),
}


def needs(config):
    """One file for each network."""
    return _select.logs(config, "paths")


def table(inputs):
    """One row per network and block, stem of a stage, or part of the decoder, as the full path runs it.

    mib: what products read and write, each layer for itself; a convolution reads its windows, and what overlaps again.
    saved_us, lost: of the path that skips this block alone, weights as trained; blank for what no path skips alone.
    """
    import pandas as pd

    rows = of_paths.measured(inputs)
    found = []
    for case, own in rows[rows["rung"] == rows["rung"].iloc[0]].groupby("case", sort=False):
        full = own[own["path"] == own["full"]]
        if not len(full):
            continue
        first = full.iloc[0]
        singles = own[(own["part"] == "single") & (own["base"] == first["full"])]
        skipped = {_skipped(row.path): row for row in singles.itertuples()}
        parts = {}
        for layer in _layers(first):
            parts.setdefault(_part(layer.name), []).append(layer)
        width, everything = WIDTHS[first["dtype"]], first["macs"]
        for name, layers in parts.items():
            products, row = counted.macs(layers), skipped.get(name)
            found.append(
                {
                    "case": case, "layer": name, "macs": products / 1e6, "macs_share": products / everything,
                    "mib": sum(map(_numbers, layers)) * width / 2**20,
                    "saved_us": row.saved_us if row else None, "lost": 100 * row.lost if row else None,
                    "saved_share": row.saved_us / first["p50_us"] if row else None, "device": first["device"],
                }
            )  # fmt: skip
    columns = [*SHOWN]
    return pd.DataFrame(found, columns=columns).astype(
        dict.fromkeys(("macs", "macs_share", "mib", "saved_us", "saved_share", "lost"), float)
    )


def _layers(row):
    """Layers of the full path of a row's network."""
    family, options = networks.parse(row["network"])
    side = options["image_size"]
    classes = len(scenes.stated(row["data"]).classes)
    pixels = (side, side) if isinstance(side, int) else tuple(side)
    sizes = getattr(counted, f"{family}_sizes")
    head = options.get("head", sizes.DECODE_HEADS[0])
    stated = SimpleNamespace(variant=options["variant"], pixels=pixels, num_classes=classes, head=head)
    stated.channels = options.get("channels") or sizes.channels(options["variant"], head)
    stages, *knobs = row["path"].split()
    fields = dict(knob.split("=") for knob in knobs)
    path = Path(tuple(stages.split(".")), levels=fields["levels"], decoder=fields["decoder"])
    return getattr(counted, family)(stated, path)


def _part(name):
    """``block <stage>.<number>``, ``stem <stage>`` or the decoder's layer that a layer's name is of."""
    words = name.split(".")
    if words[1].startswith("block"):
        return f"block {words[1].removeprefix('block')}.{words[2]}"
    if words[1].startswith("patch_embed"):
        return f"stem {words[1].removeprefix('patch_embed')}"
    return "decoder, by level" if words[1].startswith("linear_c") else f"decoder, {words[1]}"


def _skipped(path):
    """The one block that a path skips, as `_part` names it."""
    stages = path.split()[0].split(".")
    return next(f"block {at}.{bits.index('0')}" for at, bits in enumerate(stages, 1) if "0" in bits)


def _numbers(layer):
    """How many numbers a layer reads and writes."""
    if layer.kind == "depthwise":
        return layer.outputs * (2 * layer.pixels + layer.taps)
    return layer.taps * layer.inputs * (layer.pixels + layer.outputs) + layer.pixels * layer.outputs
