"""DynamicViT's training mask: speed-up over dense attention by resolution and patch size, beside the paper's value.

DynamicViT's training mask: measured speed-up of the plan over the fastest dense attention by resolution and patch size.
The upper number of a cell is ours, the lower one the paper's (over FlashAttention, A100). Hatched cells were not
measured; the table has the reason. The paper's map also holds cells that the published network cannot run, such as one
token (224 px, patch 128).
"""

from tilewright_study.tables import _read, _select

SHOWN = {
    "resolution": ("resolution (px)", ".0f"),
    "patch": ("patch (px)", ".0f"),
    "tokens": ("tokens", ",.0f"),
    "dense": ("dense by", ""),
    "dense_p50_us": ("dense p50 (µs)", ",.0f"),
    "plan_p50_us": ("plan p50 (µs)", ",.0f"),
    "speedup": ("× dense, measured", ".2f"),
    "paper_speedup": ("× FlashAttention, paper", ".1f"),
    "max_abs_error": ("max error", ".1e"),
    "reason": ("why blank", ""),
}


def needs(config):
    """The heat map's files and the paper's values."""
    files = _select.logs(config, "heatmap")
    return [*files, _select.PAPER_HEATMAP] if files else []


def table(inputs):
    """One row per cell, resolutions upwards and patches downwards; cells that did not run have no number."""
    cells, paper = _read.frames(inputs, "heatmap", "paper_heatmap")
    cells.loc[cells["status"] != "ok", ["dense_p50_us", "plan_p50_us", "speedup", "max_abs_error"]] = None
    cells = cells.merge(paper, on=["resolution", "patch"], how="left", validate="one_to_one")
    return cells.sort_values(["resolution", "patch"], ascending=[True, False], ignore_index=True)
