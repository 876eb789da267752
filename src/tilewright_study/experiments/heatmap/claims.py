"""What is claimed of the experiment `heatmap`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.heatmap import table_heatmap
from tilewright_study.tables._values import cases


def _over_paper(frame, _):
    """Share of the paper's speed-up that is reached, for each cell that both have."""
    said = [f"{size:.0f} px, patch {patch:.0f}" for size, patch in frame[["resolution", "patch"]].to_numpy()]
    return cases(frame["speedup"] / frame["paper_speedup"], said)


MEASURES = {
    "heatmap_over_paper": (table_heatmap.table, _over_paper, "paper_heatmap"),
}
