"""Figures of the study (stage T6). Each is drawn from files alone and gives the same bytes for the same files.

The figure ``<name>`` of an experiment is the module ``figure_<name>`` of its folder. The first paragraph of its
docstring says what the figure shows. The others are its caption, in reStructuredText; without any it has that of the
table of its name. Contract of the module:
    ``needs(config) -> list[str]``: the files it is drawn from; empty when the configuration selects nothing to show.
    ``draw(inputs) -> matplotlib.figure.Figure``: as wide as a page (`_style.figure`), a finding of its rows above it
        (`_style.head`), contenders by their looks (`_palette.look`). What was not measured is left out, tables say why;
        where nothing was, it is `_style.nothing`.

One of `OF_FAMILIES` is drawn for each family of models, ``<name>_<family>``. Its functions take the family as well:
``needs(config, family)`` and ``draw(inputs, family)``.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tilewright.core import registry
from tilewright_study import experiments, tables
from tilewright_study.tables import _select

OF_FAMILIES = ("latency", "pattern")
# Figures by name: their module, and the family where they show one.
_MEMBERS = {
    f"{figure}_{family}" if family else figure: (f"{of.__name__}.figure_{figure}", family)
    for of in map(experiments.member, experiments.NAMES)
    for figure in of.FIGURES
    for family in (_select.FAMILIES if figure in OF_FAMILIES else ("",))
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

        text, _ = tables.words(self.module)
        return f"{_style.layer_name(self.family)}: {text[0].lower()}{text[1:]}" if self.family else text

    @property
    def caption(self):
        """What the report says below the figure."""
        _, own = tables.words(self.module)
        return own or tables.words(tables.member(self.name))[1]

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
    return Figure(name, import_module(module), family)


def module(name):
    """Dotted name of the module of the figure `name`. Raises `UnknownNameError`."""
    registry.check("figure", name, NAMES)
    return _MEMBERS[name][0]


def modules(name):
    """The same in a list, as of `tables.modules`."""
    return [module(name)]


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
