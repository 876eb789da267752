"""The paths that a network has: bases, each with every set of blocks.

A base is a path that runs all blocks of its stages: everything but the blocks is its own. What a path of a base leaves
out is its skips, a boolean for each block that may be skipped, in the order of the network.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.networks.path import Path, checked

if TYPE_CHECKING:
    from tilewright.networks.map_operators import Options

# Sets of blocks beyond these are not listed: 2 ** 20.
MOST_BLOCKS = 20


def bases(options: "Options", knobs: dict[str, Sequence]) -> list[Path]:
    """The bases that lists of values make, of `knobs` such as ``{"levels": ["1234", "123"], "scale": [1.0, 0.75]}``.

    The full path comes first where the lists begin with its values. Raises `ConfigError` for what the network lacks.
    """
    full = Path.full(options)
    unknown = [knob for knob in knobs if knob not in options.knobs]
    if unknown:
        raise ConfigError(f"knobs: unknown {', '.join(unknown)}; known: {', '.join(options.knobs)}")
    made = itertools.product(*knobs.values())
    return [base_of(checked_path(full, dict(zip(knobs, values, strict=True)), options)) for values in made]


def checked_path(path: Path, fields: dict, options: "Options") -> Path:
    """`path` with other `fields`, where the network has it."""
    return checked(msgspec.structs.replace(path, **fields), options)


def base_of(path: Path) -> Path:
    """The base of a path: the same with all blocks."""
    return msgspec.structs.replace(path, blocks=tuple("1" * len(stage) for stage in path.blocks))


def free(base: Path) -> list[tuple[int, int]]:
    """``(stage, block)``, from 0, of the blocks that a base runs, all of which may be skipped."""
    return [(stage, block) for stage in range(base.last) for block in range(len(base.blocks[stage]))]


def skips(path: Path) -> np.ndarray:
    """bool [blocks of `free`]: which of them a path skips."""
    return np.array([path.blocks[stage][block] == "0" for stage, block in free(path)], dtype=bool)


def with_skips(base: Path, skipped: Iterable[Any]) -> Path:
    """The path of a base that skips the blocks where `skipped` is true; blocks of stages behind the last are kept."""
    stages = [list(stage) for stage in base_of(base).blocks]
    for (stage, block), skip in zip(free(base), skipped, strict=True):
        stages[stage][block] = "01"[not skip]
    return msgspec.structs.replace(base, blocks=tuple(map("".join, stages)))


def singles(base: Path) -> list[Path]:
    """The paths of a base that skip one block."""
    return [with_skips(base, row) for row in np.eye(len(free(base)), dtype=bool)]


def every(base: Path) -> Iterator[Path]:
    """All paths of a base, the base first. Raises `ConfigError` beyond `MOST_BLOCKS` blocks."""
    count = len(free(base))
    if count > MOST_BLOCKS:
        raise ConfigError(f"paths: expected at most {MOST_BLOCKS} blocks to list all sets of, found {count}")
    for number in range(1 << count):
        yield with_skips(base, [bool(number >> place & 1) for place in range(count)])


def drawn(base: Path, count: int, seed: int | Sequence[int]) -> list[Path]:
    """`count` different paths of a base that skip two blocks or more: n skips with a likelihood of 1 / n, sets of n
    alike likely. Where many blocks are left out, little is left to choose from.

    Fewer where there are no more.
    """
    blocks, rng = len(free(base)), np.random.default_rng(seed)
    numbers = np.arange(2, blocks + 1)
    likely = 1 / numbers / np.sum(1 / numbers)
    most = 2**blocks - 1 - blocks
    found: dict[Path, None] = {}
    while len(found) < min(count, most):
        skipped = np.zeros(blocks, dtype=bool)
        skipped[rng.choice(blocks, rng.choice(numbers, p=likely), replace=False)] = True
        found[with_skips(base, skipped)] = None
    return list(found)
