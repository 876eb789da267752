"""Data movers, a family: nested affine address generators with hard limits, each in a file ``<name>.toml`` here.

A mover reads or writes a buffer by descriptors, one after the other. A `Descriptor` is a base and nested loops. A
`Task` is a chain of descriptors that is made several times, of which each moves on by its own step. All addresses and
steps are in granules, the bytes that the mover moves at a time; sizes and steps stand innermost first.

`least.program` finds the least descriptors for a list of indices, `text.written` writes them as the device's tools read
them. `replay` is what decides whether an answer is right: it knows the loops alone.
"""

import math
import tomllib
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import numpy as np

from tilewright.core.errors import ConfigError, UnknownNameError
from tilewright.pushmem.errors import MappingError

_FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@dataclass(frozen=True)
class Mover:
    """What a mover can do.

    dimensions: loops of a descriptor. All but the outermost have at most ``2 ** wrap_bits - 1`` rounds, and each a step
    from 1 to ``2 ** step_bits``. length_bits: a descriptor moves at most ``2 ** length_bits - 1`` granules each time.
    iteration_bits: a descriptor moves on by its own step up to ``2 ** iteration_bits`` times; repeat_bits: a task is
    made up to ``2 ** repeat_bits`` times. descriptors: that a channel may use; first_of_odd: the number of the first
    one of odd channels. granule: bytes.
    """

    name: str
    title: str
    dimensions: int
    wrap_bits: int
    step_bits: int
    iteration_bits: int
    length_bits: int
    repeat_bits: int
    descriptors: int
    channels: int
    granule: int
    first_of_odd: int = 0

    @property
    def longest_wrap(self) -> int:
        """Most rounds of a loop that is not the outermost."""
        return 2**self.wrap_bits - 1

    @property
    def longest_step(self) -> int:
        """The longest step of a loop."""
        return 2**self.step_bits

    @property
    def longest(self) -> int:
        """Most granules that a descriptor moves at a time."""
        return 2**self.length_bits - 1

    @property
    def most_iterations(self) -> int:
        """How often a descriptor may move on."""
        return min(2**self.iteration_bits, self.most_repeats)

    @property
    def most_repeats(self) -> int:
        """How often a task may be made."""
        return 2**self.repeat_bits


@dataclass(frozen=True)
class Descriptor:
    """Addresses ``base + sum(i * step)`` for all i below the sizes, innermost first; each time `forward` further on."""

    base: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    forward: int = 0

    @property
    def length(self) -> int:
        """Granules that it moves each time."""
        return math.prod(self.sizes)

    @property
    def dimensions(self) -> int:
        """Loops of more than one round."""
        return sum(size > 1 for size in self.sizes)


@dataclass(frozen=True)
class Task:
    """Descriptors one after the other, all of them `times` times."""

    descriptors: tuple[Descriptor, ...]
    times: int = 1


@lru_cache(16)
def mover(name: str) -> Mover:
    """The mover of this name. Raises `UnknownNameError`."""
    if name not in NAMES:
        raise UnknownNameError("device", name, NAMES)
    stated = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    known = {field.name for field in fields(Mover)}
    if others := sorted({*stated} - known):
        raise ConfigError(f"{name}.toml: expected {', '.join(sorted(known))}, found {', '.join(others)}")
    return Mover(name=name, **stated)


def replay(tasks: tuple[Task, ...]) -> np.ndarray:
    """Addresses int64 [n] in the order in which they are moved."""
    moved = [np.empty(0, np.int64)]
    for task in tasks:
        for time in range(task.times):
            for own in task.descriptors:
                places = np.array([own.base + time * own.forward])
                for size, step in zip(own.sizes[::-1], own.steps[::-1], strict=True):
                    places = (places[:, None] + step * np.arange(size)).reshape(-1)
                moved.append(places)
    return np.concatenate(moved)


def check(tasks: tuple[Task, ...], own: Mover) -> None:
    """Raise `MappingError` for what breaks a limit of the mover; the message names the descriptor and the limit."""
    used = [descriptor for task in tasks for descriptor in task.descriptors]
    if len(used) > own.descriptors:
        raise MappingError(f"{own.name}: expected at most {own.descriptors} descriptors, found {len(used)}")
    for task in tasks:
        if task.times > own.most_repeats:
            raise MappingError(f"{own.name}: expected a task at most {own.most_repeats} times, found {task.times}")
        for each in task.descriptors:
            where = f"{own.name}: descriptor {used.index(each)}"
            wraps = each.sizes[: own.dimensions - 1]
            steps = [step for rounds, step in zip(each.sizes, each.steps, strict=True) if rounds > 1]
            if len(each.sizes) > own.dimensions:
                raise MappingError(f"{where}: expected at most {own.dimensions} loops, found {len(each.sizes)}")
            if max(wraps, default=1) > own.longest_wrap or min(each.sizes, default=1) < 1:
                raise MappingError(f"{where}: expected wraps from 1 to {own.longest_wrap}, found {list(wraps)}")
            if any(not 1 <= step <= own.longest_step for step in steps):
                raise MappingError(f"{where}: expected steps from 1 to {own.longest_step}, found {steps}")
            if each.length > own.longest:
                raise MappingError(f"{where}: expected at most {own.longest} granules, found {each.length}")
            if task.times > 1 and not 0 <= each.forward <= own.longest_step:
                raise MappingError(f"{where}: expected to move on by 0 to {own.longest_step}, found {each.forward}")
            if task.times > own.most_iterations and each.forward:
                raise MappingError(
                    f"{where}: expected to move on at most {own.most_iterations} times, found {task.times}"
                )
