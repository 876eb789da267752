"""What is claimed of the experiment `video`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.video import table_video
from tilewright_study.tables._values import by_name, error, passed


def _video_over(frame, case):
    """A pass with an attention over one with dense attention, the faster mode of each: ``<attention>/<network>``."""
    name, network = case.split("/")
    rows = frame[(frame["attention"] == name) & (frame["network"] == network)].dropna(subset="p50_us")
    dense = frame[(frame["by"] == "dense") & (frame["network"] == network)]
    if not len(rows):
        return ()
    rows = rows.sort_values("p50_us").head(1)
    return by_name(rows.assign(over=dense["p50_us"].min() / rows["p50_us"]), "over", "case", "mode")


MEASURES = {
    "video_over": (table_video.table, _video_over),
}
# Whether what was timed is right.
CHECKS = {
    "video_error": (table_video.table, error("case", "mode", "attention")),
    "video_whole": (
        table_video.table,
        error("case", "mode", "attention", error="whole_error", tolerance="whole_tolerance"),
    ),
    "video_passed": (table_video.table, passed("ours", True)),
}
