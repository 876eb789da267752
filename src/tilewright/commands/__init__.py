"""The subcommands of ``tilewright``.

Contract of a member module; the first line of its docstring is its help:
    ``arguments(parser)``: declare its options.
    ``run(**chosen) -> int | None``: do it and print to standard output; an exit status, None for 0. Raises
        `TilewrightError`.
Importing a member stays light: `tilewright --help` loads no torch.
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from tilewright.core import registry

NAMES = ("plan", "show", "bench", "calibrate", "compile", "doctor", "stream", "tune-slices", "descriptors")


def member(name: str) -> ModuleType:
    """The module of a subcommand. Raises `UnknownNameError`."""
    registry.check("command", name, NAMES)
    return import_module(f"{__name__}.{name.replace('-', '_')}")


def table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Lines of a table of `rows`, dicts of texts with the same keys: a header, then the rows, aligned to the right."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    return [
        "  ".join(line[name].rjust(width) for name, width in widths.items()).rstrip()
        for line in ({name: name for name in widths}, *rows)
    ]
