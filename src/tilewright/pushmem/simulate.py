"""A mapped program, run: tiles by their models, registers and PEs on whole columns of cycles.

When a tile moves a word does not depend on the word. So each tile first moves *tokens*, which number the cycles and
inputs that a word may come in at; its outputs then take the words that their tokens name. A conflict on an SRAM port
and a word that is taken before it is there are errors that name cycle and unit.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright.pushmem import dsl, expressions, recurrence, reference
from tilewright.pushmem.configuration import configuration
from tilewright.pushmem.errors import ProgramError, RunError
from tilewright.pushmem.mapping import Mapped
from tilewright.pushmem.memories import Link
from tilewright.pushmem.pack import TileUse
from tilewright.pushmem.program import Program, Statement, word
from tilewright.pushmem.streams import DRAIN

_REDUCED: dict[str, Callable[..., np.ndarray]] = {"+": np.sum, "min": np.min, "max": np.max}


@dataclass(frozen=True)
class Run:
    """outputs: arrays by buffer. last_cycle: of the last output. sram_accesses: of all tiles. words: of all outputs."""

    outputs: dict[str, np.ndarray]
    last_cycle: int
    sram_accesses: int
    words: int
    seconds: float


class _Column:
    """A signal. word: int64 [cycles]; there: bool [cycles]."""

    def __init__(self, cycles: int):
        self.word, self.there = np.zeros(cycles, np.int64), np.zeros(cycles, bool)

    def put(self, times: np.ndarray, words: np.ndarray, there: np.ndarray | bool = True) -> None:
        """Words at some cycles; those behind the last one are left out."""
        inside = times < len(self.word)
        self.word[times[inside]] = words[inside]
        self.there[times[inside]] = there if isinstance(there, bool) else there[inside]


class _Array:
    """The array with a program's input words. faults: ``[(cycle, text)]``."""

    def __init__(self, mapped: Mapped, words: list[np.ndarray]):
        program, plan = mapped.program, mapped.schedule
        self.mapped, self.cycles = mapped, plan.last_cycle + 1 + DRAIN
        self.faults: list[tuple[int, str]] = []
        self.finished: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._columns: dict[str, _Column] = {}
        self._moves: dict[int, np.ndarray] = {}
        self._delays = {delay.target: delay for delay in mapped.wiring.delays}
        self._ports = {target: (k, p) for k, tile in enumerate(mapped.tiles) for p, target in enumerate(tile.targets)}
        self._statements = {s.name: s for s in program.statements}
        for name, own in zip(program.inputs, words, strict=True):
            column = self._columns[name] = _Column(self.cycles)
            column.put(plan.times(name, program.buffers[name].shape).ravel(), own)

    def signal(self, name: str) -> _Column:
        """The column of a signal; nothing is ever there on one that nothing drives."""
        if name not in self._columns:
            column = self._columns[name] = _Column(self.cycles)
            if name in self._delays:
                delay = self._delays[name]
                source, later = self.signal(delay.source), np.arange(delay.cycles, self.cycles)
                column.put(later, source.word[: len(later)], source.there[: len(later)])
            elif name in self._ports:
                self._leave(column, *self._ports[name])
            elif name in self._statements:
                self._execute(column, self._statements[name])
        return self._columns[name]

    def _leave(self, column: _Column, number: int, port: int) -> None:
        """What leaves a tile at an output."""
        tile = self.mapped.tiles[number]
        tokens = self._moved(number)[:, port]
        for place, source in enumerate(tile.sources):
            times = np.flatnonzero((tokens > 0) & ((tokens - 1) % len(tile.sources) == place))
            if len(times):
                taken, came = self.signal(source), (tokens[times] - 1) // len(tile.sources)
                column.put(times, taken.word[came], taken.there[came])

    def _moved(self, number: int) -> np.ndarray:
        """int64 [cycles, outputs]: the tokens that leave a tile, 0 where nothing does."""
        if number not in self._moves:
            tile = self.mapped.tiles[number]
            memory, inputs = tile.member, len(tile.sources)
            tokens = np.zeros((self.cycles, memory.PARAMETERS.inputs), np.int64)
            tokens[:, :inputs] = 1 + np.arange(self.cycles * inputs).reshape(-1, inputs)
            link = {} if tile.chain is None else {"link": self._link(tile)}
            fired = recurrence.fired(configuration(tile), memory, self.cycles)
            self._moves[number] = memory.run(fired, tokens, strict=False, **link).data_out
        return self._moves[number]

    def _link(self, tile: TileUse) -> Link:
        before = None
        for port, source in enumerate(tile.chain.sources if tile.chain else ()):
            if source in self._ports:
                number, other = self._ports[source]
                before = np.zeros_like(self._moved(number)) if before is None else before
                before[:, port] = self._moved(number)[:, other]
        assert tile.chain is not None
        return Link(tile.chain.index, tile.chain.mask, before)

    def _execute(self, column: _Column, s: Statement) -> None:
        """What a statement gives; a reduction with its last iteration."""
        plan, wires = self.mapped.schedule, self.mapped.wiring.wires
        times = plan.times(s.name, s.extents)
        inside = times < self.cycles
        at, reads = np.where(inside, times, 0), []
        for k in range(len(s.reads)):
            read = self.signal(wires[s.name, k])
            reads.append(read.word[at])
            missing = inside & ~read.there[at]
            asked = s.needed[k]
            if len(absent := times[missing if asked is None else missing & asked]):
                self.faults.append((int(absent.min()), f"statement {s.name} reads a word that is not there"))
        words = np.broadcast_to(word(s.expression, reads, s.grid), times.shape)
        inner = tuple(range(s.rank, len(s.loops)))
        if inner:
            words = _REDUCED[s.reduction](expressions.number(words, s.signed), axis=inner) & expressions.WORD
            times = times.max(axis=inner)
        column.put(times.ravel(), words.ravel())
        self.finished[s.name] = times, words

    def accesses(self) -> int:
        """SRAM accesses of all tiles; what a tile may not do is added to the faults."""
        total = 0
        for number, tile in enumerate(self.mapped.tiles):
            memory = tile.member
            fired = recurrence.fired(configuration(tile), memory, self.cycles)
            for port, source in enumerate(tile.sources):
                times = fired[f"{memory.PARAMETERS.kinds[0][0]}{port}"][0]
                if len(absent := times[~self.signal(source).there[times]]):
                    self.faults.append((int(absent[0]), f"tile {number} takes a word that is not there"))
            own = fired if tile.chain is None else self._link(tile).owned(fired, memory.PARAMETERS)[0]
            total += sum(len(times) for times, addresses in own.values() if "sram" in addresses)
            times = np.sort(np.concatenate([np.zeros(0, np.int64), *(own[n][0] for n in memory.PARAMETERS.priority())]))
            if len(met := times[1:][times[1:] == times[:-1]]):
                self.faults.append((int(met[0]), f"two accesses of the SRAM port of tile {number}"))
        return total


def run(mapped: Mapped, data: dict[str, np.ndarray]) -> Run:
    """Run a mapped program cycle by cycle, in a model of its tiles.

    Parameters
    ----------
    mapped : Mapped
        Program that `mapping.compile` returned.
    data : dict
        Arrays of the inputs by name.

    Returns
    -------
    Run
        Arrays of the outputs by buffer, the cycle of the last word, and numbers of words and of accesses.

    Raises
    ------
    RunError
        If a tile reads a word that was never written, and if output words are missing.

    Examples
    --------
    >>> import numpy as np
    >>> from tilewright.pushmem import dsl, mapping, simulate
    >>> image = dsl.Input("image", (8, 8))
    >>> edges = dsl.Stage("edges", (8, 7), lambda y, x: image[y, x + 1] - image[y, x])
    >>> found = simulate.run(mapping.compile(edges), {"image": np.arange(64).reshape(8, 8)})
    >>> found.outputs["edges"][0]
    array([1, 1, 1, 1, 1, 1, 1], dtype=uint16)
    """
    program, begin = mapped.program, time.perf_counter()
    array = _Array(mapped, input_words(program, data))
    for s in program.statements:
        array.signal(s.name)
    accesses = array.accesses()
    if array.faults:
        cycle, text = min(array.faults)
        raise RunError(f"cycle {cycle}: {text}")
    last, words, outputs = 0, 0, {}
    for name in program.outputs:
        times, found = array.finished[name]
        if missing := int((times >= array.cycles).sum()):
            raise RunError(f"{missing} of {found.size} output words of {name} never came")
        last, words = max(last, int(times.max())), words + found.size
        typed = reference.stored(found.reshape(program.buffers[name].shape), program.buffers[name].dtype)
        outputs[name] = program.as_written(name, typed)
    return Run(outputs, last, accesses, words, time.perf_counter() - begin)


def _place(lane, dimensions: int) -> tuple:
    """The index of one copy of an array whose dimensions are partly in space."""
    fixed = dict(lane)
    return tuple(fixed.get(d, slice(None)) for d in range(dimensions))


def input_words(program: Program, data: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The words of each of the program's inputs in the order of time. Raises `ProgramError` for a wrong shape."""
    words = []
    for name in program.inputs:
        source, lane = program.origins[name]
        kept = program.buffers[name].shape
        # All dimensions in space: each copy is one word.
        single = kept == (1,) and source in data and np.ndim(data[source]) == len(lane)
        dimensions = len(lane) + (0 if single else len(kept))
        if source not in data or np.ndim(data[source]) != dimensions:
            raise ProgramError(f"input {source}: expected {dimensions} dimensions, found {data.get(source)!r}")
        part = np.asarray(data[source])[_place(lane, dimensions)]
        part = part.reshape(kept) if single else part
        if part.shape != kept:
            raise ProgramError(f"input {source}: expected {kept} in time, found {part.shape}")
        words.append(reference.stored(part, program.buffers[name].dtype).astype(np.int64).ravel() & expressions.WORD)
    return words


def whole_arrays(mapped: Mapped, stages: dsl.Outputs, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The array of each output stage, of what a run gives by buffer."""
    arrays = {s.name: np.empty(s.shape, s.dtype) for s in dsl.stages(stages)}
    for name, found in outputs.items():
        source, lane = mapped.program.origins[name]
        place = _place(lane, arrays[source].ndim)
        arrays[source][place] = found.reshape(arrays[source][place].shape)
    return arrays


def differing_words(
    mapped: Mapped, stages: dsl.Outputs, data: dict[str, np.ndarray], outputs: dict[str, np.ndarray]
) -> int:
    """Words of `outputs` that differ from the oracle's."""
    arrays = dsl.evaluate(stages, data)
    return sum(int((arrays[n] != found).sum()) for n, found in whole_arrays(mapped, stages, outputs).items())
