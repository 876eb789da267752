"""What is claimed of the experiment `push`: the measures of its claims, see `tables.claims`."""

from tilewright_study.tables import _read
from tilewright_study.tables._values import by_name, cases


def _pushed(inputs):
    """Rows of whole apps."""
    (frame,) = _read.frames(inputs, "push")
    return frame[frame["part"] == "whole"]


def _push(column, scale=1):
    def values(frame, case):
        """A column of an app on a memory, ``<app>/<memory>``."""
        app, memory = case.split("/")
        rows = frame[(frame["app"] == app) & (frame["memory"] == memory)].dropna(subset=column)
        return by_name(rows.assign(value=scale * rows[column]), "value", "app", "memory")

    return values


def _push_exact(frame, _):
    """Share of apps and memories whose every word is numpy's, in model and RTL, in percent."""
    exact = (frame["wrong_model"] == 0) & (frame["wrong_rtl"] == 0)
    first = frame[~exact].head(1)
    where = f"{first['app'].iloc[0]} {first['memory'].iloc[0]}" if len(first) else f"{len(frame)} apps on memories"
    return cases([100 * exact.mean()], [where])


MEASURES = {
    "push_tiles": (_pushed, _push("tiles")),
    "push_cycles": (_pushed, _push("last_cycle")),
    "push_saved": (_pushed, _push("saved", 100)),
}
# Whether what was timed is right.
CHECKS = {
    "push_exact": (_pushed, _push_exact),
}
