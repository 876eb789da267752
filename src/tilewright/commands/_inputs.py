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
    "a name with --grid: window-<side>, chunk-<side>, cyclic-<side>, swin-<side>, swin-<side>-shift, axial or full, "
    "each also with -g<special tokens>; a workload such as vil-tiny-224-s1; or a mask file, .npz (scipy or graph), "
    ".npy or .pt"
)

TILES = (
    "tiles to choose from, MxN for M queries by N keys: 64x1 (keys gathered one by one) or 64x64 (blocks of keys) "
    "(default: the device's)"
)


def grid_option(parser: ArgumentParser) -> None:
    """The grid that named patterns need."""
    parser.add_argument(
        "--grid", help="rows x columns of tokens of a named pattern, without special tokens, e.g. 64x64"
    )


def pattern(text: str, grid: str | None = None) -> "Graph":
    """The `Graph` of a pattern, see `PATTERN`; grid: ``ROWSxCOLUMNS`` or None.

    Raises `ArtifactError` for a file, `UnknownNameError` for a name and `ConfigError` for a grid.
    """
    from tilewright import graph, masks
    from tilewright.nn import patterns

    if Path(text).suffix in MASKS:
        if grid is not None:
            raise ConfigError(f"--grid: only a named pattern takes a grid, found the file {text}")
        return graph.read_mask(text)
    try:
        patterns.parse(text)
    except UnknownNameError:
        try:
            found = masks.build(text)
        except UnknownNameError as error:
            workloads = str(error).partition("known: ")[2].partition(";")[0]
            known = [*patterns.NAMED, "each also with -g<special tokens>", f"workloads such as {workloads}"]
            raise UnknownNameError("pattern", text, [*known, f"files ending in {', '.join(MASKS)}"]) from None
        if grid is not None:
            raise ConfigError(f"--grid: only a named pattern takes a grid, found the workload {text}") from None
        return found
    if grid is None:
        raise ConfigError(f"pattern {text}: expected a grid of rows x columns, e.g. --grid 64x64, found none")
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
