"""What is claimed of the experiment `push_streams`: the measures of its claims, see `tables.claims`."""

from tilewright_study.tables import _read
from tilewright_study.tables._values import cases


def _cut(inputs):
    (frame,) = _read.frames(inputs, "push_streams")
    return frame


def _push_streams_exact(frame, _):
    """Share of orders and tiles whose pieces give each key of T2's blocks and no other, in percent."""
    exact = (frame["wrong"] == 0) & (frame["status"] == "ok")
    first = frame[~exact].head(1)
    named = [f"{row.model} {row.reorder} {row.tile}" for row in first.itertuples()]
    return cases([100 * exact.mean()], named or [f"{len(frame)} orders and tiles"])


MEASURES = {
    "push_streams_exact": (_cut, _push_streams_exact),
}
