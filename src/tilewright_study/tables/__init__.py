"""Tables of the study (stage T6): tidy CSV with full precision, and Markdown to read.

The table ``<name>`` of an experiment is the module ``table_<name>`` of its folder; `claims` is of all. Contract of one;
the first paragraph of its docstring says what the table shows, the others are its caption, in reStructuredText:
    ``needs(config) -> list[str]``: the files it is made from; empty when the configuration selects nothing to show.
    ``table(inputs) -> DataFrame``: the rows, from those files alone; what was not measured is missing, never guessed.
    ``SHOWN``: ``{column: (header with unit, format)}``, the columns of the Markdown form, in order.
"""

import inspect
from importlib import import_module
from pathlib import Path

from tilewright.core import artifacts, registry
from tilewright.core.errors import ArtifactError
from tilewright_study import experiments

_MODULES = {
    **{
        table: f"{of.__name__}.table_{table}"
        for of in map(experiments.member, experiments.NAMES)
        for table in of.TABLES
    },
    "claims": f"{__name__}.claims",
}
NAMES = tuple(_MODULES)


def module(name):
    """Dotted name of the module of the table `name`."""
    return _MODULES[name]


def modules(name):
    """Dotted names of the modules that the table `name` is made by: its own, and those that it enters by name."""
    return [module(name), *getattr(member(name), "modules", list)()]


def member(name):
    """The module of the table `name`. Raises `UnknownNameError`."""
    registry.check("table", name, NAMES)
    return import_module(module(name))


def words(module):
    """``(shows, caption)`` of a table's or a figure's module: the first paragraph of its docstring, and the others."""
    shows, _, caption = inspect.cleandoc(module.__doc__).partition("\n\n")
    return " ".join(shows.split()), caption


def needs(name, config):
    """Files that the table `name` is made from under `config`. Raises `UnknownNameError`."""
    return member(name).needs(config)


def tabulate(name, inputs, outputs):
    """Write the table `name` to `outputs`, paths ending in ``.csv`` or ``.md``; one ending in ``.json`` names its
    origin. A folder among `inputs` stands for all CSV files in it.

    Raises `UnknownNameError` for the name, `ArtifactError` for inputs that are not the table's and for other endings.
    """
    from tilewright_study.tables import _origin

    module = member(name)
    writers = {
        ".csv": lambda path: artifacts.write_text(path, frame.to_csv(index=False, lineterminator="\n")),
        ".md": lambda path: artifacts.write_text(path, markdown(frame, module.SHOWN)),
        ".json": lambda path: _origin.save(path, name, module, inputs),
    }
    for path in map(Path, outputs):
        if path.suffix not in writers:
            raise ArtifactError(f"{path}: expected a name ending in {', '.join(writers)}, found {path.suffix!r}")
    found = (sorted(path.rglob("*.csv")) if path.is_dir() else [path] for path in map(Path, inputs))
    inputs = [path for paths in found for path in paths]
    frame = module.table(inputs)
    for path in map(Path, outputs):
        writers[path.suffix](path)


def cells(frame, shown):
    """`frame` in words: ``(numeric, rows)``, whether each column in `shown` holds numbers, and the text of each cell.

    Missing values are blank.
    """
    import pandas as pd

    numeric = [pd.api.types.is_numeric_dtype(frame[column]) for column in shown]
    forms = [(column, form) for column, (_, form) in shown.items()]
    rows = [
        ["" if pd.isna(row[column]) else format(row[column], form) for column, form in forms]
        for row in frame.to_dict("records")
    ]
    return numeric, rows


def markdown(frame, shown):
    """`frame` as a Markdown table of the columns in `shown`; numbers stand to the right."""
    numeric, rows = cells(frame, shown)
    lines = [
        [header for header, _ in shown.values()],
        ["---:" if right else "---" for right in numeric],
        *([text.replace("|", "\\|") for text in row] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
