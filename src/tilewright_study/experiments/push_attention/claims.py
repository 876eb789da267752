"""What is claimed of the experiment `push_attention`: the measures of its claims, see `tables.claims`."""

from tilewright_study.tables import _read
from tilewright_study.tables._values import by_name, cases


def _streamed(inputs):
    (frame,) = _read.frames(inputs, "push_attention")
    return frame


def _push_attention(column):
    def values(frame, model):
        return by_name(frame[frame["model"] == model].dropna(subset=column), column, "model")

    return values


def _push_attention_exact(frame, _):
    """Share of workloads whose every query is given the keys of its row, in model and RTL, in percent."""
    counts = frame[["wrong", "conflicts", "queries", "rtl_wrong"]]
    exact = (counts == 0).all(axis=1) & (frame["status"] == "ok")
    return cases([100 * exact.mean()], [next(iter(frame.loc[~exact, "model"]), f"{len(frame)} workloads")])


MEASURES = {
    "push_attention_cycles": (_streamed, _push_attention("cycles_global")),
    "push_attention_exact": (_streamed, _push_attention_exact),
}
