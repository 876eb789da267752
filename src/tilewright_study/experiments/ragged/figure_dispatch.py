"""The dispatch floor: the host's time of each call of packed attention, whatever the GPU has to do.

The dispatch floor: the host's time until a prepared call returns, whatever the GPU has to do. At small batches it
decides how long an eager network takes; CUDA graphs remove it, for every contender.
"""

from tilewright import devices
from tilewright_study.experiments.ragged import table_ragged
from tilewright_study.figures import _contenders, _style
from tilewright_study.tables import _read


def needs(config):
    """What the table of packed attention needs, on a GPU: on a CPU a call is its work."""
    return table_ragged.needs(config) if devices.facts(config.device).GPU_TIMER else []


def draw(inputs):
    """A bar per call, the least first: the median over batches, with the least and the greatest as whiskers."""
    frame = table_ragged.table(inputs)
    frame = frame.assign(name=frame["provider"].map(_contenders.label) + ", " + frame["call"])
    timed = frame.dropna(subset="host_us")
    drawn = _style.figure(8.4, 1.6 + 0.34 * max(4, timed["name"].nunique()))
    axes = drawn.subplots()
    if timed.empty:
        _style.nothing(axes, "On a CPU a call is its work: there is no dispatch apart from it.")
    else:
        spread = timed.groupby(["name", "provider"])["host_us"].agg(["median", "min", "max"]).sort_values("median")
        for place, ((_, provider), us) in enumerate(spread.iterrows()):
            axes.barh(place, us["median"], 0.62, color=_contenders.colour(provider, frame["provider"]))
            whiskers = [[us["median"] - us["min"]], [us["max"] - us["median"]]]
            axes.errorbar(us["median"], place, xerr=whiskers, color=_style.INK, linewidth=0.8, capsize=1.5)
            axes.annotate(
                f"{us['median']:.1f}", (us["max"], place), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
        axes.set_yticks(range(len(spread)), [name for name, _ in spread.index])
        axes.set_ylim(len(spread) - 0.5, -0.5)
        # The slowest peer takes a hundred times as long as the others.
        axes.set(xlabel="host's time until a prepared call returns (µs, log scale)", xscale="log")
        axes.set_xlim(1, 3 * spread["max"].max())
        _style.plain_ticks(axes.xaxis)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    _style.head(drawn, "The host's time of a call")
    _style.notes(
        drawn,
        [f"{_read.devices(frame)}. Calls queued one after the other; whiskers: least and greatest over the batches."],
    )
    return drawn
