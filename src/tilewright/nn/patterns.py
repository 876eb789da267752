"""Ready patterns by name, for a grid of tokens of any shape: ``window-7-g1`` on 64 x 64 tokens behind a class token.

A workload of `tilewright.masks` states its sizes in its name. These names leave them to the model that the pattern is
for, and are made by the same functions. Tokens: the special ones first (class, registers), then the grid, row by row.
``-g<n>`` says that the first n tokens are special: they see all and are seen by all.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.attention import patterns
from tilewright.core import arguments
from tilewright.core.errors import ConfigError, PatternError, TilewrightError, UnknownNameError
from tilewright.graph import Graph
from tilewright.masks import _ready, axial, swin, vision_longformer

FULL = "full"


def _windows(mode):
    def make(grid, n_special, window):
        if window < 3 or window % 2 == 0:
            raise ConfigError(f"window: expected an odd number of tokens, at least 3, found {window}")
        least = 3 * (window // 2)
        if mode == "cyclic" and min(grid) < least:
            raise PatternError(f"expected a grid of at least 3 chunks, {least} tokens, a side, found {_by(grid)}")
        return vision_longformer.pattern(grid, n_special, window // 2, mode)

    return make


def _shifted(by_half):
    def make(grid, n_special, window):
        if window < 1 or any(side % window for side in grid):
            raise PatternError(f"expected a grid of whole windows of {window}, found {_by(grid)}")
        rows, number = swin.partition(grid, window, window // 2 * by_half)
        return _behind(n_special, rows, number, number)

    return make


def _axes(grid, n_special):
    height, width = grid
    graph = axial.graph(axial.Params(height=height, width=width))
    return _behind(n_special, [graph.row(q) for q in range(graph.n_rows)], np.arange(graph.n_rows), graph.row_hint)


def _everything(grid, n_special):
    n = n_special + grid[0] * grid[1]
    row_id = np.zeros(n, np.int32)
    return _ready.build(FULL, _ready.Sizes(), [np.arange(n)], row_id, hint=row_id)


def _behind(n_special, rows, number, hint):
    """The graph of a grid's rows with special tokens put before them; rows: keys; number: the row of each token."""
    special, n = np.arange(n_special), n_special + len(number)
    rows = [np.arange(n)] * (n_special > 0) + [np.concatenate((special, n_special + row)) for row in rows]
    row_id = np.concatenate((np.zeros(n_special, int), np.asarray(number) + (n_special > 0)))
    hint = np.concatenate((np.full(n_special, -1), hint))
    return _ready.build("named", _ready.Sizes(), rows, row_id, hint=hint)


# Form, what it means, and ``make(grid, n_special, *numbers)``. A number of a name is written <…>.
NAMED = {
    "window-<side>": ("the side x side tokens around each", _windows("exact")),
    "chunk-<side>": ("Vision Longformer's 3 x 3 chunks of side // 2 tokens", _windows("chunk")),
    "cyclic-<side>": ("the same, chunks wrapped around", _windows("cyclic")),
    "swin-<side>": ("Swin's windows", _shifted(False)),
    "swin-<side>-shift": ("Swin's windows, shifted by half a window", _shifted(True)),
    "axial": ("the row and the column of each token", _axes),
    FULL: ("all tokens", _everything),
}


def parse(name: str) -> tuple[Callable, tuple[int, ...], int | None]:
    """``(make, numbers, n_special)`` of a name; n_special is None where it does not tell.

    Raises `UnknownNameError`.
    """
    match = re.fullmatch(r"(.+?)(?:-g(\d+))?", name)
    for form, (_, make) in NAMED.items():
        found = match and re.fullmatch(form.replace("<side>", r"(\d+)"), match[1])
        if match and found:
            return make, tuple(map(int, found.groups())), None if match[2] is None else int(match[2])
    raise UnknownNameError("pattern", name, [f"{form}[-g<special tokens>]" for form in NAMED])


def special(pattern: Any) -> int | None:
    """How many special tokens a pattern is told of; None where it does not tell: ``full``, a matrix, a function."""
    if not isinstance(pattern, str):
        return None
    told = parse(pattern)[2]
    return None if told is None and pattern == FULL else told or 0


def graph(pattern: Any, grid: tuple[int, int], n_special: int) -> Graph:
    """The pattern of special tokens and a grid of tokens that follow them.

    Parameters
    ----------
    pattern : str, Graph, matrix or callable
        A name of `NAMED` such as ``window-15-g1``; a `Graph`, a scipy sparse matrix or a boolean array [N, N]; or
        ``callable(grid, n_special)`` that returns one of these.
    grid : (int, int)
        Rows and columns of tokens.
    n_special : int
        Number of special tokens. They attend to all tokens and are attended to by all.

    Returns
    -------
    Graph
        Of N = n_special + rows * columns tokens.

    Raises
    ------
    UnknownNameError
        For a name of no pattern.
    PatternError
        For a pattern that does not fit the grid.

    Examples
    --------
    >>> from tilewright.nn import patterns
    >>> found = patterns.graph("window-7-g1", (14, 14), 1)
    >>> found.shape, round(found.density, 3)
    ((197, 197), 0.201)
    """
    height, width = grid
    if min(height, width) < 1:
        raise PatternError(f"grid: expected at least 1 x 1 tokens, found {_by(grid)}")
    n = n_special + height * width
    if n > arguments.MOST:
        raise PatternError(f"grid: expected at most {arguments.MOST} tokens, found {_by(grid)}")
    if isinstance(pattern, str):
        make, numbers, _ = parse(pattern)
        told = special(pattern)
        if told is not None and told != n_special:
            raise PatternError(
                f"pattern {pattern}: expected the model's number of special tokens, {n_special}, found {told}; name it "
                f"{re.sub(r'-g[0-9]+$', '', pattern)}{f'-g{n_special}' * (n_special > 0)}"
            )
        try:
            return make((height, width), n_special, *numbers)
        except (ConfigError, PatternError) as error:
            raise type(error)(f"pattern {pattern}: {error}") from None
    found = _called(pattern, grid, n_special) if callable(pattern) and not isinstance(pattern, Graph) else pattern
    if not isinstance(found, Graph):
        found = patterns.read(found, heads=1, kind="cpu")[0][0]
    if found.shape != (n, n):
        raise PatternError(
            f"pattern: expected {n} x {n} for {n_special} special tokens and a grid of {_by(grid)}, found "
            f"{' x '.join(map(str, found.shape))}"
        )
    if found.row_order is not None:
        raise PatternError("pattern: expected a graph in the model's own token order, found one that is reordered")
    if found.row_hint is None:
        # Nothing says which tokens belong together: they are taken as they stand.
        hint = np.arange(n)
        found = replace(found, row_hint=hint, col_hint=hint)
    return found


def _called(pattern, grid, n_special):
    try:
        return pattern(grid, n_special)
    except TilewrightError:
        raise
    # A user's function may raise anything.
    except Exception as error:
        raise PatternError(
            f"pattern: a call for a grid of {_by(grid)} failed: {' '.join(str(error).split())}"
        ) from error


def _by(grid):
    return f"{grid[0]} x {grid[1]}"
