"""What subcommands are given: plans, and patterns by name, as workloads or in files."""

import re
import zipfile
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.core.errors import ArtifactError, ConfigError, UnknownNameError

if TYPE_CHECKING:
    from tilewright.graph import Graph

MASKS = (".npz", ".npy", ".pt")
PATTERN = (
    "a name such as window-15-g1, with --grid; a workload of the study such as vil-tiny-224-s1; or a mask file, "
    ".npz (scipy or graph), .npy or .pt"
)


def grid_option(parser: ArgumentParser) -> None:
    """The grid that named patterns need."""
    parser.add_argument("--grid", help="tokens of a named pattern behind its special ones, e.g. 64x64 rows x columns")


def pattern(text: str, grid: str | None = None) -> "Graph":
    """The `Graph` of a pattern, see `PATTERN`; grid: ``ROWSxCOLUMNS`` or None.

    Raises `ArtifactError` for a file, `UnknownNameError` for a name and `ConfigError` for a grid.
    """
    from tilewright import graph, masks
    from tilewright.nn import patterns

    if Path(text).suffix in MASKS:
        if grid is not None:
            raise ConfigError(f"--grid: expected with a named pattern alone, found the file {text}")
        return graph.read_mask(text)
    try:
        patterns.parse(text)
    except UnknownNameError as unknown:
        try:
            found = masks.build(text)
        except UnknownNameError as also:
            named, workloads = (str(each).partition("known: ")[2] for each in (unknown, also))
            raise UnknownNameError(
                "pattern", text, [named, f"workloads: {workloads}", f"files ending in {', '.join(MASKS)}"]
            ) from None
        if grid is not None:
            raise ConfigError(f"--grid: expected with a named pattern alone, found the workload {text}") from None
        return found
    if grid is None:
        raise ConfigError(f"pattern {text}: expected its grid, e.g. --grid 64x64, found none")
    sides = re.fullmatch(r"(\d+)[x×](\d+)", grid)
    if not sides:
        raise ConfigError(f"--grid: expected rows x columns such as 64x64, found {grid!r}")
    return patterns.graph(text, (int(sides[1]), int(sides[2])), patterns.special(text) or 0)


def is_plan(path: str | Path) -> bool:
    """Whether a file is a plan's, by what it holds. Raises `ArtifactError` for one that ends in ``.plan`` and is
    missing."""
    path = Path(path)
    if not path.is_file():
        if path.suffix == ".plan":
            raise ArtifactError(f"{path}: no such file; expected a plan that `tilewright plan` wrote")
        return False
    return path.suffix not in MASKS and (path.suffix == ".plan" or zipfile.is_zipfile(path))
