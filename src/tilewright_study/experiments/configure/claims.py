"""What is claimed of the experiment `configure`: the measures of its claims, see `tables.claims`."""

from tilewright.pushmem.streams import DRAIN
from tilewright_study.tables import _read
from tilewright_study.tables._values import by_name, cases


def _configured(inputs):
    """Rows of whole streams: those of a component are left out."""
    (frame,) = _read.frames(inputs, "configure")
    return frame[frame["component"].fillna("") == ""]


def _configured_seconds(frame, engine):
    return by_name(frame[frame["engine"] == engine], "seconds", "stream", "part")


def _configured_exact(frame, _):
    """Share of streams whose configuration gave each word, in model and RTL, also in the cycles behind, in percent."""
    ran = frame[["model_cycles", "rtl_cycles"]].eq(frame["cycles"] + DRAIN, axis=0).all(axis=1)
    exact = ran & (frame["status"] == "ok")
    first = next(iter(frame.loc[~exact, "stream"]), f"{len(frame)} streams")
    return cases([100 * exact.mean()], [first])


def _configured_layer(frame, case):
    """An objective of what model checking found: ``<objective>/<stream>/<component>``."""
    layer, stream, part = case.split("/")
    rows = frame[(frame["engine"] == "bmc") & (frame["stream"] == stream) & (frame["part"] == part)]
    return by_name(rows, layer, "stream", "part")


MEASURES = {
    "configure_seconds": (_configured, _configured_seconds),
    "configure_layer": (_configured, _configured_layer),
    "configure_exact": (_configured, _configured_exact),
}
