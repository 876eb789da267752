"""Memory tiles configured from what goes in and comes out: by engine, with the published configurator's times.

Memory tiles configured from what goes in and comes out: loops, iterations, strides and starts of the configuration that
was found, how long that took, and over how many cycles the model and the RTL were run and compared with the stream.
"""

from tilewright_study.tables import _read, _select

SHOWN = {
    "stream": ("stream", ""),
    "part": ("component", ""),
    "engine": ("engine", ""),
    "cycles": ("cycles", ",.0f"),
    "seconds": ("seconds", ".3f"),
    "paper_seconds": ("paper's seconds", ",.1f"),
    "levels": ("loops", ".0f"),
    "extents": ("iterations", ",.0f"),
    "strides": ("strides", ",.0f"),
    "starts": ("starts", ",.0f"),
    "model_cycles": ("cycles run, model", ",.0f"),
    "rtl_cycles": ("cycles run, RTL", ",.0f"),
    "reason": ("why blank", ""),
}


def needs(config):
    """The experiment's files and the published times."""
    files = _select.logs(config, "configure")
    return [*files, _select.PAPER_CONFIGURE] if files else []


def components(inputs):
    """One row per component that was configured, and per whole; a whole has no ``component``."""
    found, _ = _read.frames(inputs, "configure", "paper_configure")
    return found.fillna({"component": ""}).sort_values(["cycles", "stream", "part", "engine"], ignore_index=True)


def published(inputs):
    """The published times: ``stream``, ``component``, ``task``, ``cycles``, ``paper_seconds``."""
    return _read.frames(inputs, "configure", "paper_configure")[1]


def table(inputs):
    """One row per stream and engine, shorter streams first. rtl: why the RTL was not run. paper_seconds: of bmc, for
    the same stream and component: the published time of all layers, else to the first configuration."""
    whole = components(inputs)
    whole = whole[whole["component"] == ""].copy()
    known = published(inputs).sort_values("task").drop_duplicates(["stream", "component"])
    known = known.set_index(["stream", "component"])["paper_seconds"]
    named = list(zip(whole["stream"], whole["part"], strict=True))
    whole["paper_seconds"] = [known.get(name) for name in named]
    whole.loc[whole["engine"] == "fit", "paper_seconds"] = None
    whole["reason"] = whole["reason"].where(whole["reason"] != "", whole["rtl"])
    return whole.reset_index(drop=True)
