"""Attention of packed images over their number: time of each contender, and over ours.

Attention of packed images over their number, of each contender, and over ours. What a network prepares once a batch,
such as masks, is not in the time. Flash attention of the padded images without a mask does not compute the same: it is
a bound. Dotted: q, k, v and the result moved once at the bandwidth of a copy.
"""

from tilewright_study.experiments.ragged import table_ragged
from tilewright_study.figures import _contenders, _style
from tilewright_study.tables import _read


def needs(config):
    """What the table of packed attention needs."""
    return table_ragged.needs(config)


def draw(inputs):
    """A row of panels per shape of heads and lengths: microseconds on the left, times over ours on the right."""
    frame = table_ragged.table(inputs)
    frame = frame[frame["call"] == "attend"]
    cases = list(frame.groupby(["heads", "head_dim", "lengths"], sort=False))
    names = _contenders.in_order(frame["provider"])
    drawn = _style.figure(9.6, 1.4 + 3.0 * len(cases))
    for (left, right), ((heads, head_dim, lengths), rows) in zip(
        drawn.subplots(len(cases), 2, squeeze=False), cases, strict=True
    ):
        for provider in _contenders.in_order(rows["provider"]):
            own = rows[(rows["provider"] == provider) & (rows["status"] == "ok")].sort_values("images")
            left.plot(own["images"], own["p50_us"], **_contenders.line_style(provider, names))
            right.plot(own["images"], own["over_ours"], **_contenders.line_style(provider, names))
        ours = rows[rows["provider"] == table_ragged.OURS].dropna(subset="byte_floor_us").sort_values("images")
        left.plot(ours["images"], ours["byte_floor_us"], ":", color=_style.INK, label="bytes moved once")
        title = f"{heads:.0f} heads × {head_dim:.0f}, {lengths} tokens an image"
        left.set(title=title, xlabel="images", ylabel="time of a call, p50 (µs)", yscale="log")
        right.set(title=title, xlabel="images", ylabel="time over ours (×)", yscale="log")
        for axes in (left, right):
            _contenders.log_ticks(axes, rows["images"])
            _style.plain_ticks(axes.yaxis)
    lines = dict(zip(*reversed(drawn.axes[0].get_legend_handles_labels()), strict=True))
    _style.head(drawn, "Attention of packed images", lines.values(), columns=4)
    where = frame.assign(images=frame["images"].map("{:.0f} images".format))
    device = _read.devices(frame)
    _style.notes(
        drawn,
        [
            f"{device}, {', '.join(sorted(set(frame['dtype'])))}; GPU time by replays of a CUDA graph, on a CPU the "
            "host's clock; every result but the bound's was compared with attention in float64 first.",
            *_contenders.blanks(where, "provider", ["images"]),
        ],
    )
    return drawn
