"""Figures of the study (stage T6). Each is drawn from files alone and gives the same bytes for the same files.

Contract of a member module; its docstring says what the figure shows:
    ``needs(config) -> list[str]``: the files it is drawn from; empty when the configuration selects nothing to show.
    ``draw(inputs) -> matplotlib.figure.Figure``: what was not measured stays blank and says why.

A member of `OF_FAMILIES` draws one figure for each family of models, ``<member>_<family>``. Its functions take the
family as well: ``needs(config, family)`` and ``draw(inputs, family)``.
"""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tilewright.core import registry
from tilewright_study import tables
from tilewright_study.tables import _select

OF_FAMILIES = ("latency", "pattern")
_NAMES = (
    "latency",
    "speedup",
    "end_to_end",
    "network_plans",
    "ragged_kernel",
    "dispatch",
    "pruned",
    "pruned_ratio",
    "pruned_accuracy",
    "slices_speedup",
    "slices_recall",
    "video_step",
    "video_maps",
    "video_clips",
    "heatmap",
    "path_front",
    "path_families",
    "path_skips",
    "path_prediction",
    "scene",
    "stream",
    "accelerator",
    "configure_time",
    "push_tiles",
    "push_live",
    "push_gantt",
    "push_attention",
    "worth",
    "pattern",
    "fill",
    "prediction",
    "gantt",
    "reorder_time",
    "policy",
)
# Figures by name: their module, and the family where they show one.
_MEMBERS = {
    f"{member}_{family}" if family else member: (member, family)
    for member in _NAMES
    for family in (_select.FAMILIES if member in OF_FAMILIES else ("",))
}
NAMES = tuple(_MEMBERS)
TABLES = tables.NAMES


@dataclass(frozen=True)
class Figure:
    """The figure `name`: its `module`, and the `family` that it shows, or an empty name."""

    name: str
    module: ModuleType
    family: str

    @property
    def _family(self):
        return (self.family,) if self.family else ()

    @property
    def shows(self):
        """What the figure shows, in words."""
        from tilewright_study.figures import _style

        text = " ".join(self.module.__doc__.partition("\n\n")[0].split())
        return f"{_style.layer_name(self.family)}: {text[0].lower()}{text[1:]}" if self.family else text

    def needs(self, config):
        """Files that the figure is drawn from under `config`."""
        return self.module.needs(config, *self._family)

    def draw(self, inputs):
        """The figure, as matplotlib has it."""
        return self.module.draw([Path(path) for path in inputs], *self._family)


def member(name):
    """The `Figure` of a name. Raises `UnknownNameError`."""
    registry.check("figure", name, NAMES)
    module, family = _MEMBERS[name]
    return Figure(name, registry.member("tilewright_study.figures", "figure", module, _NAMES), family)


def module(name):
    """Dotted name of the module of the figure `name`. Raises `UnknownNameError`."""
    return member(name).module.__name__


def needs(name, config):
    """Files that the figure `name` is drawn from under `config`. Raises `UnknownNameError`."""
    return member(name).needs(config)


def selected(config):
    """``(figures, tables)``: the names for which `config` selects something to show.

    Figures and tables that need schedules are left out of a recorded study, whose times alone are recorded.
    """

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
    from tilewright_study.figures import _style
    from tilewright_study.tables import _origin

    found = member(name)
    pictures = [path for path in map(Path, outputs) if path.suffix != ".json"]
    for path in pictures:
        _style.check_suffix(path)
    with _style.context():
        figure = found.draw(inputs)
        _style.settle(figure)
        for path in pictures:
            _style.save(figure, path)
    for path in set(map(Path, outputs)) - set(pictures):
        _origin.save(path, name, found.module, inputs)
