"""Programs and words for tests of push memories."""

import dataclasses
import functools

import numpy as np

from tilewright.pushmem import dsl, expressions, mapping, simulate
from tilewright.pushmem.dsl import Input, Stage, maximum
from tilewright.pushmem.errors import RunError
from tilewright_study.experiments.push import apps


def compiled(app, memory="pub"):
    """``(outputs, mapped app)``, compiled once a run."""
    return _compiled(app, memory)


@functools.cache
def _compiled(app, memory):
    outputs = apps.program(app)
    return outputs, mapping.compile(outputs, memory)


def words(outputs, seed=0, value=None):
    """Random words for every input of `outputs`, or `value` in all places."""
    rng = np.random.default_rng(seed)
    inputs = [s for s in dsl.stages_of(outputs) if not isinstance(s, Stage)]
    if value is not None:
        return {s.name: np.full(s.shape, value).astype(s.dtype) for s in inputs}
    return {s.name: rng.integers(0, 1 << 16, s.shape).astype(s.dtype) for s in inputs}


def fails(mapped, outputs, data):
    """Whether a run of `mapped` breaks a rule or gives other words than numpy."""
    try:
        return simulate.differing_words(mapped, outputs, data, simulate.run(mapped, data).outputs) > 0
    except RunError:
        return True


def without_parts(mapped):
    """Yield what is missing, and `mapped` without it: a tile, a port of a tile, a register."""
    for k, tile in enumerate(mapped.tiles):
        others = mapped.tiles[:k] + mapped.tiles[k + 1 :]
        yield f"tile {k}", dataclasses.replace(mapped, tiles=others)
        for port, target in enumerate(tile.targets):
            silent = {n: g for n, g in tile.controllers.items() if not n.endswith(f"out{port}")}
            yield target, dataclasses.replace(mapped, tiles=(*others, dataclasses.replace(tile, controllers=silent)))
    for k, delay in enumerate(mapped.wiring.delays):
        left = [dataclasses.replace(delay, cycles=delay.cycles - 1)] if delay.cycles > 1 else []
        delays = (*mapped.wiring.delays[:k], *left, *mapped.wiring.delays[k + 1 :])
        wiring = dataclasses.replace(mapped.wiring, delays=delays)
        yield str(delay), dataclasses.replace(mapped, wiring=wiring)


def stencil(integer, pick, mark="", most=5, sides=(18, 40)):
    """Outputs of a random stencil: up to `most` stages, offsets up to 3, rates of one half, 1 and 2, paths that meet
    again.

    integer(low, high): draws a number, both ends included. pick(list): draws a member. mark: begins all names. sides:
    of the image, least and most.
    """
    size = integer(*sides)
    sources = [Input(f"{mark}in", (size, size))]
    rate = {sources[0].name: 0}
    for n in range(integer(1, most)):
        kind, source, name = pick(["stencil", "stencil", "meet", "half", "double"]), pick(sources), f"{mark}s{n}"
        height, width = source.shape
        if kind == "half" and rate[source.name] > -1:
            made = Stage(name, (height // 2, width // 2), lambda y, x, s=source: s[2 * y, 2 * x] + 1)
            rate[name] = rate[source.name] - 1
        elif kind == "double" and rate[source.name] < 1:
            made = Stage(name, (2 * height, 2 * width), lambda y, x, s=source: s[y // 2, x // 2] ^ 5)
            rate[name] = rate[source.name] + 1
        else:
            others = [o for o in sources if rate[o.name] == rate[source.name]]
            other = pick(others) if kind == "meet" else source
            i, j, k, m = (integer(0, 3) for _ in range(4))
            shape = (min(height - i, other.shape[0] - k), min(width - j, other.shape[1] - m))
            if min(shape) < min(5, sides[0] // 2):
                continue

            def word(y, x, s=source, o=other, at=(i, j, k, m)):
                return maximum(s[y + at[0], x + at[1]] * 3, o[y + at[2], x + at[3]] >> 1) - s[y, x]

            made = Stage(name, shape, word)
            rate[name] = rate[source.name]
        sources.append(made)
    read = {r.source.name for s in sources[1:] for r in expressions.reads(s.traced(*dsl.variables(s, {})))}
    last = [s for s in sources[1:] if s.name not in read]
    return last or [Stage(f"{mark}copy", (size, size), lambda y, x: sources[0][y, x])]


def stencils(seed, count, **options):
    """Outputs of `count` random stencils that share nothing, as one program."""
    rng = np.random.default_rng(seed)

    def integer(low, high):
        return int(rng.integers(low, high + 1))

    def pick(members):
        return members[integer(0, len(members) - 1)]

    return [s for k in range(count) for s in stencil(integer, pick, mark=f"p{k}", **options)]
