"""What is claimed of the experiment `ragged`: the measures of its claims, see `tables.claims`."""

from tilewright_study.experiments.ragged import table_ragged
from tilewright_study.tables import _read
from tilewright_study.tables._values import cases, passed


def _ragged_over(frame, case):
    """A peer's time over ours, ``<peer>/<fewest images>-<most>``, with six heads; that of the fastest ``peer`` of each
    case with any number of heads."""
    peer, span = case.split("/")
    low, high = map(float, span.split("-"))
    rows = frame[frame["images"].between(low, high) & (frame["provider"] != table_ragged.OURS)]
    if peer == "peer":
        rows = _read.best(rows, table_ragged.KEY, "over_ours").reset_index()
    else:
        rows = rows[(rows["provider"] == peer) & (rows["heads"] == 6)]
    return _at_images(rows, rows["over_ours"])


def _ragged_host(frame, _):
    """The host's time of a call, which a GPU alone leaves to other work."""
    if frame["host_us"].isna().all():
        return ()
    rows = frame[(frame["provider"] == table_ragged.OURS) & (frame["call"] == "attend")]
    return _at_images(rows, rows["host_us"])


def _ragged_floor(frame, case):
    rows = frame[(frame["provider"] == table_ragged.OURS) & (frame["call"] == "attend") & (frame["heads"] == 6)]
    rows = rows[rows["images"] == float(case)]
    return _at_images(rows, 1 / rows["floor_fraction"])


def _at_images(rows, values):
    where = zip(rows["heads"], rows["head_dim"], rows["lengths"], rows["images"], strict=True)
    return cases(values, [f"{h:.0f}x{d:.0f}, {images:.0f} images of {span}" for h, d, span, images in where])


MEASURES = {
    "ragged_over": (table_ragged.table, _ragged_over),
    "ragged_host": (table_ragged.table, _ragged_host),
    "ragged_floor": (table_ragged.table, _ragged_floor),
    "ragged_passed": (table_ragged.table, passed("provider", table_ragged.OURS)),
}
