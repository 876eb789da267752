"""What is claimed of the experiment `video`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.video import table_video
from tilewright_study.tables._values import by_name, passed


def _video_over(frame, case):
    """A pass with lists over one with dense attention, the faster mode of each: ``<attention>/<network>``, or all."""
    rows = frame[frame["by"] == "slices"]
    if case:
        name, network = case.split("/")
        rows = rows[(rows["attention"] == name) & (rows["network"] == network)]
    rows = rows.sort_values("p50_us").drop_duplicates([*table_video.CASE, "attention"])
    return by_name(rows, "speedup", "case", "attention", "mode", noise="noise")


MEASURES = {
    "video_over": (table_video.table, _video_over),
    "video_passed": (table_video.table, passed("ours", True)),
}
