"""What paths cost on generated hardware, by a cost model: energy and cycles over those of the whole network, and of the
folded decoder over the published one. Ratios of one model: no chip was made or measured.

What paths of SegFormer cost on hardware that is generated from a few widths and buffer sizes, by the cost model
zigzag-dse: energy and cycles over those of the whole network. The numbers are uncalibrated, and only ratios are
claimed: no chip was made, and the paper's silicon is not compared with. Channels round up to the width of the vector.
What the model does not know (norms, softmax, activations, sums, resizing) is counted in bytes beside. Where the cost
model is not installed, recorded costs are shown.
"""

from pathlib import Path

import numpy as np

from tilewright_study.tables import _read, _select

# Costs that were recorded, for where the cost model is not installed.
RECORDED = "expected/cpu-2-cores/accelerator.csv"
HARDWARE = ["vector", "lanes", "elements", "weights_kib", "inputs_kib", "outputs_kib"]
_COSTS = ["cycles", "energy_uj", "decoder_cycles", "decoder_uj"]

SHOWN = {
    "network": ("network", ""),
    "path": ("path", ""),
    "hardware": ("vector × lanes × elements, KiB", ""),
    "area": ("area, × the least", ".2f"),
    "macs_over": ("products, × whole", ".3f"),
    "padding": ("products of idle channels", ".1%"),
    "cycles_over": ("cycles, × whole", ".3f"),
    "energy_over": ("energy, × whole", ".3f"),
    "decoder_cycles_over": ("decoder: cycles, × whole's", ".3f"),
    "decoder_energy_over": ("decoder: energy, × whole's", ".3f"),
    "cycles_least": ("cycles, × the least hardware's", ".2f"),
    "energy_least": ("energy, × the least hardware's", ".2f"),
    "product_least": ("energy × delay × area, × the least", ".2f"),
    "left_out_mb": ("left out (MB)", ",.1f"),
    "origin": ("costs", ""),
    "reason": ("why blank", ""),
}


def needs(config):
    """One file for each network, and where they are there the recorded rows."""
    files = _select.logs(config, "accelerator")
    # Snakemake asks from the root of the checkout.
    return [*files, *([RECORDED] if files and not config.recorded and Path(RECORDED).is_file() else [])]


def table(inputs):
    """One row per network, path and hardware. ``…_over``: over the whole network on the same hardware. ``…_least``:
    over the same path on the hardware where it is least. area: over the smallest hardware's. padding: share of the
    products that are of channels and pixels which the hardware rounds up to. origin: ``run``, or ``recorded`` where the
    cost model is not installed.
    """
    run, recorded = [], []
    for path in map(Path, inputs):
        (recorded if path.as_posix().endswith(RECORDED) else run).append(path)
    (frame,) = _read.frames(run or recorded, "accelerator")
    frame["origin"] = "run" if run else "recorded"
    missing = set(frame.loc[frame["status"] != "ok", "network"])
    if run and missing and recorded:
        (stated,) = _read.frames(recorded, "accelerator")
        stated = stated[stated["network"].isin(missing)].assign(origin="recorded")
        reasons = frame[frame["status"] != "ok"].drop_duplicates("network").set_index("network")["reason"]
        stated["reason"] = stated["network"].map(reasons)
        there = set(stated["network"])
        import pandas as pd

        frame = pd.concat([frame[~frame["network"].isin(there)], stated], ignore_index=True)
    return _ratios(frame)


def _ratios(frame):
    place = ["network", *HARDWARE]
    whole = frame[frame["whole"] == 1].set_index(place)[["macs", *_COSTS]]
    own = frame[place].join(whole, on=place)
    names = dict(zip(["macs", *_COSTS], ["macs", "cycles", "energy", "decoder_cycles", "decoder_energy"], strict=True))
    for column, name in names.items():
        frame[f"{name}_over"] = frame[column] / own[column]
    frame["padding"] = 1 - frame["macs"] / frame["padded_macs"]
    frame["area"] = frame["area_mm2"] / frame["area_mm2"].min()
    frame["product"] = frame["cycles"] * frame["energy_uj"] * frame["area_mm2"]
    for column, name in (("cycles", "cycles"), ("energy_uj", "energy"), ("product", "product")):
        frame[f"{name}_least"] = frame[column] / frame.groupby(["network", "path"])[column].transform("min")
    widths = frame[HARDWARE].apply(lambda row: "" if row.isna().any() else _name(row), axis=1)
    return frame.assign(hardware=widths if len(frame) else np.array([], object))


def _name(row):
    vector, lanes, elements, *kib = (f"{value:.0f}" for value in row)
    return f"{vector}×{lanes}×{elements}, {'+'.join(kib)}"
