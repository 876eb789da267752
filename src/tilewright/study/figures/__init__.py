"""Figures of the study (stage T6). Each is drawn from files alone and gives the same bytes for the same files.

Contract of a member module; its docstring says what the figure shows:
    ``needs(config) -> list[str]``: the files it is drawn from; empty when the configuration selects nothing to show.
    ``draw(inputs) -> matplotlib.figure.Figure``: what was not measured stays blank and says why.
"""

from pathlib import Path

from tilewright.core import registry
from tilewright.study import tables
from tilewright.study.tables import _select

NAMES = (
    "latency_vil",
    "latency_regionvit",
    "latency_dynamicvit",
    "speedup",
    "end_to_end",
    "ragged_kernel",
    "dispatch",
    "pruned",
    "pruned_ratio",
    "heatmap",
    "pattern_vil",
    "pattern_regionvit",
    "pattern_dynamicvit",
    "fill",
    "prediction",
    "gantt",
    "reorder_time",
    "policy",
)
TABLES = tables.NAMES


def needs(name, config):
    """Files that the figure `name` is drawn from under `config`. Raises `UnknownNameError`."""
    return registry.member("tilewright.study.figures", "figure", name, NAMES).needs(config)


def selected(config):
    """``(figures, tables)``: the names for which `config` selects something to show, and of a recorded study those that
    need no schedule: it is its times that are recorded."""

    def shown(files):
        return files and not (config.recorded and any(path.startswith(_select.SCHEDULES) for path in files))

    return (
        tuple(name for name in NAMES if shown(needs(name, config))),
        tuple(name for name in TABLES if shown(tables.needs(name, config))),
    )


def draw(name, inputs, outputs):
    """Draw the figure `name` and write it to `outputs`, paths ending in ``.svg``, ``.png`` or ``.pdf``; one ending in
    ``.json`` names its origin.

    Raises `UnknownNameError` for the name, `ArtifactError` for inputs that are not the figure's and for other endings.
    """
    from tilewright.study.figures import _style
    from tilewright.study.tables import _origin

    module = registry.member("tilewright.study.figures", "figure", name, NAMES)
    pictures = [path for path in map(Path, outputs) if path.suffix != ".json"]
    for path in pictures:
        _style.check_suffix(path)
    with _style.context():
        figure = module.draw([Path(path) for path in inputs])
        _style.settle(figure)
        for path in pictures:
            _style.save(figure, path)
    for path in set(map(Path, outputs)) - set(pictures):
        _origin.save(path, module, inputs)
