"""A tile, or a part of it, configured from its stream: by algebra, by model checking, or by the one and then the other.

Whatever found it, a configuration is run over the whole stream and a drain behind it, by the model and, where it can be
built, by the RTL, and every word is compared. One that differs is never returned.
"""

from dataclasses import dataclass, field
from functools import cache
from time import perf_counter

import numpy as np

from tilewright.core import registry
from tilewright.core.errors import ConfigError, SolverError, Unavailable
from tilewright.pushmem import fit, inner, parts, recurrence, rtl, streams
from tilewright.pushmem.counting import NoScheduleError, UndecidedError
from tilewright.pushmem.examples import DRAIN
from tilewright.pushmem.memories import ConflictError
from tilewright.pushmem.settings import CYCLE_BITS, Configuration

ENGINES = ("auto", "fit", "bmc")
LAYERS = ("levels", "extents", "strides", "starts")
SOLVED, INFEASIBLE, UNKNOWN = "solved", "infeasible", "unknown"


@dataclass
class Found:
    """verdict: solved, infeasible or unknown. layers: of the configuration. seconds: by component, and by component and
    layer. cause: ``{cause, text, ...}`` where there is none. verified: cycles by what ran them, or why it did not."""

    verdict: str
    engine: str
    configuration: Configuration | None = None
    layers: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cause: dict | None = None
    verified: dict[str, int | str] = field(default_factory=dict)
    least: bool = False

    def told(self) -> dict:
        """What a file says besides the controllers."""
        told = {"layers": self.layers, "seconds": self.seconds, "engine": self.engine, "verified": self.verified}
        return told | {"least": self.least}


def solve(
    stream, memory, *, engine="auto", depth=4, known=None, monolithic=False, limit_s=None, hardware=True
) -> Found:
    """The `Found` of a stream.

    engine: of `ENGINES`. depth: layers that bmc makes least. known: a `Configuration` whose controllers are fixed.
    monolithic: bmc asks for all of the tile, or of a part, at once. limit_s: of bmc, seconds. hardware: whether the RTL
    runs the answer, too.

    Raises `ConfigError`, and what `memories` and `rtl` raise for a missing extra.
    """
    registry.check("engine", engine, ENGINES)
    check_part(stream.part, memory)
    if known is not None:
        known.check(memory)
    begin = perf_counter()
    found = None
    if engine != "bmc":
        found = _fitted(stream, memory, known)
        found.seconds["fit"] = perf_counter() - begin
    if found is None or (engine == "auto" and found.verdict == UNKNOWN):
        found = _checked(stream, memory, depth, known, monolithic, limit_s)
    if found.configuration is not None:
        found.layers = layers(found.configuration, stream.part, memory)
        found.verified = verified(found.configuration, stream, memory, hardware=hardware)
    return found


def check_part(part, memory):
    """Raise `ConfigError` for a part of a memory that has none."""
    if part != "top" and not hasattr(memory, "aggregated"):
        raise ConfigError(f"{memory.NAME} has no parts: expected the component top, found {part}")


def _fitted(stream, memory, known):
    """By algebra. Where a part's places cannot be rings it is unknown whether there are others."""
    try:
        chosen = inner.configuration(stream, memory) if stream.part == "top" else parts.configuration(stream, memory)
        differences = model_differences(chosen, stream, memory)
    except UndecidedError as error:
        return Found(UNKNOWN, "fit", cause={"cause": "undecided", "text": str(error)})
    except (NoScheduleError, fit.NotAffineError, ConflictError) as error:
        cause = {"cause": getattr(error, "cause", "not affine"), "text": str(error), **getattr(error, "told", {})}
        open_ended = stream.part != "top" and not isinstance(error, NoScheduleError)
        return Found(UNKNOWN if open_ended else INFEASIBLE, "fit", cause=cause)
    if differences:
        return Found(
            UNKNOWN, "fit", cause={"cause": "places", "text": f"rings of places give other words: {differences[0]}"}
        )
    if known is not None and (other := _other(chosen, known)):
        return Found(
            UNKNOWN, "fit", cause={"cause": "fixed", "text": f"{other} is fixed otherwise than algebra finds it"}
        )
    return Found(SOLVED, "fit", chosen)


def _other(chosen, known):
    return next(
        (name for name, fixed in known.controllers.items() if chosen.controllers.get(name, fixed) != fixed), None
    )


def _checked(stream, memory, depth, known, monolithic, limit_s):
    """By bounded model checking: a part; the tile in one question; or the tile part by part, its inner schedules chosen
    as `inner` does."""
    from tilewright.pushmem import bmc

    _has_parts(memory)
    fixed = {} if known is None else _registers(known, memory)
    if stream.part != "top" or monolithic:
        answers, chosen = bmc.solve(stream, memory, depth=depth, known=fixed, monolithic=monolithic, limit_s=limit_s)
        return _told(stream.part, answers, chosen)
    try:
        chosen = inner.configuration(stream, memory)
    except UndecidedError as error:
        return Found(UNKNOWN, "bmc", cause={"cause": "undecided", "text": str(error)})
    except NoScheduleError as error:
        return Found(INFEASIBLE, "bmc", cause={"cause": error.cause, "text": str(error), **error.told})
    ran = memory.run(recurrence.fired(chosen, memory, len(stream)), stream.data_in[:, :, 0])
    all_found, seconds, shared, end = [], {}, dict(fixed), None if limit_s is None else perf_counter() + limit_s
    for part in parts.ORDER:
        own = parts.of_run(part, stream, ran)
        left = None if end is None else max(0.0, end - perf_counter())
        answers, chosen = bmc.solve(own, memory, depth=depth, known=shared, limit_s=left)
        if answers.verdict == INFEASIBLE and shared != fixed:
            # Loops that the part before chose may be too few for these addresses.
            answers, chosen = bmc.solve(own, memory, depth=depth, known=fixed, limit_s=left)
        found = _told(part, answers, chosen)
        seconds |= found.seconds
        if found.verdict != SOLVED:
            found.seconds = seconds
            return found
        all_found.append(chosen)
        shared = fixed | bmc.schedules(chosen, memory)
    return Found(SOLVED, "bmc", parts.joined(all_found, memory, len(stream)), seconds=seconds)


def _has_parts(memory):
    """Raise `ConfigError` for a memory that model checking knows nothing of."""
    if not hasattr(memory, "aggregated"):
        raise ConfigError(f"bmc: expected a memory with parts, such as pub, found {memory.NAME}; known engines: fit")


def asserted(configuration, stream, memory, *, limit_s=None) -> int:
    """Cycles in which the one question of the tile, or of its part, holds with this configuration.

    Raises `SolverError` where it does not, or where the solver gave up; `ConfigError` for a memory without parts.
    """
    from tilewright.pushmem import bmc

    _has_parts(memory)
    configuration.check(memory)
    answer = bmc.asserted(configuration, stream, memory, limit_s=limit_s)
    if answer.verdict != SOLVED:
        why = f": {answer.cause.text()}" if answer.cause else ""
        raise SolverError(f"the question of the {stream.part} with this configuration is {answer.verdict}{why}")
    return answer.replayed


def _registers(known, memory):
    """Registers of the controllers that are known; those of others are open."""
    stated = recurrence.registers(known, memory)
    return {name: value for name, value in stated.items() if name.split("_", 1)[0] in known.controllers}


def _told(part, answers, chosen):
    seconds = dict(answers.seconds)
    for name, answer in answers.by_name.items():
        seconds |= {f"{name}.{layer}": spent for layer, spent in answer.seconds.items()}
    last = answers.by_name[next(reversed(answers.by_name))]
    cause = None
    if answers.verdict == INFEASIBLE:
        text = (
            last.cause.text() if last.cause else "no configuration gives the stream; no smaller cause was found in time"
        )
        cause = {"cause": "core", "text": f"{part}: {text}", "component": next(reversed(answers.by_name))}
        if last.cause:
            cause |= {"asked": [list(each) for each in last.cause.asked], "minimal": last.cause.least}
    return Found(
        answers.verdict,
        "bmc",
        chosen,
        seconds=seconds,
        cause=cause,
        least=all(a.complete for a in answers.by_name.values()),
    )


def layers(configuration, part, memory) -> dict[str, int]:
    """The published objectives: loops, iterations, steps as they are stored, starts."""
    ports, found = memory.PARAMETERS.ports(), dict.fromkeys(LAYERS, 0)
    for name, controller in configuration.controllers.items():
        stated = [(controller.cycle, CYCLE_BITS)]
        for address, affine in controller.addresses.items():
            if part == "top" or address in parts.TOLD[part].get(ports[name].kind, ()):
                stated.append((affine, ports[name].addresses[address]))
        found["levels"] += len(controller.extents)
        found["extents"] += int(np.prod(controller.extents, dtype=np.int64))
        found["strides"] += sum(sum(recurrence.steps(controller.extents, *each)) for each in stated)
        found["starts"] += sum(affine.start for affine, _ in stated)
    return found


def _with_drain(stream):
    """`stream` and cycles behind it in which nothing may happen."""

    def longer(x):
        return np.concatenate([x, np.zeros((DRAIN, *x.shape[1:]), dtype=x.dtype)])

    known = streams.ANY if stream.part == "sram" else 0
    data_out = np.concatenate([stream.data_out, np.full((DRAIN, *stream.data_out.shape[1:]), known)])
    return streams.Stream(
        stream.part, longer(stream.data_in), longer(stream.valid_in), data_out, longer(stream.valid_out)
    )


@cache
def hardware_of(memory, part):
    """The RTL of a memory or a part, built once. Raises `Unavailable`."""
    return rtl.Tile(memory, part=part)


def model_differences(configuration, stream, memory) -> list[str]:
    """What the model does otherwise than the stream, in words. Raises `ConflictError`."""
    stream = _with_drain(stream)
    fired = recurrence.fired(configuration, memory, len(stream))
    if stream.part == "top":
        ran = memory.run(fired, stream.data_in[:, :, 0])
        return streams.differences(stream, ran.data_out[:, :, None], ran.valid_out)
    return streams.differences(stream, *parts.run(stream.part, fired, stream, memory.PARAMETERS))


def hardware_differences(configuration, stream, memory) -> list[str]:
    """What the RTL does otherwise than the stream, in words. Raises `Unavailable`."""
    stream = _with_drain(stream)
    bits, fetch = memory.PARAMETERS.bits, memory.PARAMETERS.fetch
    ports = stream.data_in.shape[1]
    words = [
        sum(
            stream.data_in[:, p, lane].astype(np.uint64) << np.uint64(bits * lane)
            for lane in range(stream.data_in.shape[2])
        )
        for p in range(ports)
    ]
    ran = hardware_of(memory, stream.part).run(configuration, np.column_stack(words))
    if stream.part in ("top", "tb"):
        return streams.differences(stream, ran.data_out[:, :, None], ran.valid_out)
    names = ["register"] if stream.part == "sram" else [f"row{port}" for port in range(stream.data_out.shape[1])]
    lanes = np.uint64(bits) * np.arange(fetch, dtype=np.uint64)
    told = [(ran.inside[name][:, None] >> lanes) & np.uint64((1 << bits) - 1) for name in names]
    # When these controllers fire is no output of the RTL: the model's firings are those of its generators.
    kind = list(parts.TOLD[stream.part])[1]
    fired = recurrence.fired(configuration, memory, len(stream))
    valid = np.zeros(stream.valid_out.shape, dtype=bool)
    for port in range(valid.shape[1]):
        valid[fired[f"{kind}{port}"][0], port] = True
    return streams.differences(stream, np.stack(told, 1).astype(np.int64), valid)


def verified(configuration, stream, memory, *, hardware=True) -> dict[str, int | str]:
    """``{"model": cycles, "rtl": cycles}`` that were run and compared; for the RTL, why it was not run.

    Raises `SolverError` where a run is not the stream's.
    """
    cycles = len(stream) + DRAIN
    try:
        wrong = model_differences(configuration, stream, memory)
    except ConflictError as error:
        wrong = [str(error)]
    if wrong:
        raise SolverError(f"the model does not give the stream: {wrong[0]}")
    if not hardware:
        return {"model": cycles, "rtl": "not run: it was not asked for"}
    try:
        wrong = hardware_differences(configuration, stream, memory)
    except Unavailable as reason:
        return {"model": cycles, "rtl": f"not run: {reason}"}
    if wrong:
        raise SolverError(f"the RTL does not give the stream: {wrong[0]}")
    return {"model": cycles, "rtl": cycles}
