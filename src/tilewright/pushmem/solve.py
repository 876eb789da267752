"""A tile, or a part of it, configured from its stream: by algebra, by model checking, or by the one and then the other.

Whatever found it, a configuration is run over the whole stream and a drain behind it, by the model and, where it can be
built, by the RTL, and every word is compared. One that differs is never returned.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from time import perf_counter

import numpy as np

from tilewright.core import deadline, registry
from tilewright.core.errors import ConfigError, SolverError, Unavailable
from tilewright.pushmem import counting, fit, parts, recurrence, rtl, search, streams, templates
from tilewright.pushmem.counting import NoScheduleError, NotFoundError
from tilewright.pushmem.memories import ConflictError, Memory, pub
from tilewright.pushmem.settings import CYCLE_BITS, Configuration
from tilewright.pushmem.streams import DRAIN, Stream

ENGINES = ("auto", "fit", "bmc")
LAYERS = ("levels", "extents", "strides", "starts")
SOLVED, INFEASIBLE, UNKNOWN = "solved", "infeasible", "unknown"
# Seconds of algebra, where no shorter limit is stated, or one for it alone; and the share of them after which what no
# template has is searched.
FIT_S, TEMPLATES = 5.0, 0.4
# Seconds for the one question of a whole tile that algebra cannot tell, where no limit is stated.
WHOLE_S = 60.0


@dataclass
class Found:
    """verdict: solved; infeasible, which is a proof; or unknown. layers: of the configuration. seconds: by component,
    and by component and layer. cause: ``{cause, text, ...}`` where there is none. verified: cycles by what ran them, or
    why it did not."""

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
    stream: Stream,
    memory: Memory,
    *,
    engine: str = "auto",
    depth: int = 4,
    known: Configuration | None = None,
    monolithic: bool = False,
    limit_s: float | None = None,
    hardware: bool = True,
) -> Found:
    """Find a configuration of a memory tile, or of a part of it, that gives a stream.

    Parameters
    ----------
    stream : Stream
        Words that enter and leave in each cycle, see `streams.read`.
    memory : module
        Member of `pushmem.memories`, such as ``memories.member("pub")``.
    engine : str
        ``fit`` (algebra), ``bmc`` (model checking) or ``auto`` (fit first, bmc next).
    depth : int
        How many of loops, iterations, strides and starts ``bmc`` minimises, in this order.
    known : Configuration, optional
        Controllers that are fixed.
    monolithic : bool
        Let ``bmc`` solve the whole tile, or part, in one query.
    limit_s : float, optional
        Time limit in seconds, also for running the RTL; without one algebra takes at most 5.
    hardware : bool
        Verify the answer in the memory's RTL, too.

    Returns
    -------
    Found
        ``verdict`` is ``solved``, ``infeasible`` (a proof) or ``unknown``. ``configuration`` is the answer, and
        ``cause`` the reason if there is none.

    Raises
    ------
    ConfigError
        For a part that the memory lacks, and for a configuration of another memory.
    SolverUnavailableError, Unavailable
        Without the packages of the extra ``push``.
    """
    registry.check("engine", engine, ENGINES)
    check_part(stream.part, memory)
    if known is not None:
        known.check(memory)
    found = deadline.last(
        lambda: _answers(stream, memory, engine, depth, known, monolithic, limit_s, hardware), limit_s
    )
    return found or Found(UNKNOWN, engine, cause={"cause": "time", "text": "the time limit ended the search"})


def _answers(stream, memory, engine, depth, known, monolithic, limit_s, hardware) -> Iterator[Found]:
    """What is known after each step, the last one `solve`'s answer."""
    begin = perf_counter()
    alone = engine == "fit" and limit_s is not None
    fit_s = limit_s if alone else FIT_S if limit_s is None else min(FIT_S, limit_s)
    # The last one counts.
    for chosen, found in _fitted(stream, memory, known, fit_s):  # noqa: B007
        if found.verdict == UNKNOWN:
            yield found
    spent = found.seconds["fit"] = perf_counter() - begin
    if engine == "bmc" or (engine == "auto" and found.verdict == UNKNOWN):
        told = stream.part == "top" and not monolithic and found.cause
        yield _given_up(found) if told else Found(UNKNOWN, "bmc", seconds=found.seconds)
        left = None if limit_s is None else max(0.0, limit_s - spent)
        found = _checked(stream, memory, chosen, found, depth, known, monolithic, left)
    if found.configuration is not None:
        found.layers = layers(found.configuration, stream.part, memory)
        found.verified = verified(found.configuration, stream, memory, hardware=False)
        if hardware:
            yield replace(found, verified=found.verified | {"rtl": "not run: the time limit is over"})
            found.verified |= _by_hardware(found.configuration, stream, memory)
    yield found


def _given_up(fitted):
    """What is told where the time for model checking is over. fitted: what algebra found."""
    cause = fitted.cause or {"cause": "time", "text": "algebra chose schedules that no part has"}
    text = f"{cause['text']}; the time limit ended model checking of the whole tile"
    return Found(UNKNOWN, "bmc", seconds=fitted.seconds, cause=cause | {"text": text})


def check_part(part: str, memory: Memory) -> None:
    """Raise `ConfigError` for a part of a memory that has none."""
    if part != "top" and not hasattr(memory, "aggregated"):
        raise ConfigError(f"{memory.NAME} has no parts: expected the component top, found {part}")


def _fitted(stream, memory, known, limit_s):
    """Yield ``(configuration, Found)`` by algebra; the configuration is None where there is none. What algebra does not
    find is unknown, unless no configuration can give it."""
    try:
        for name, at in parts.firings(stream, memory).items():
            counting.affine(name, at, memory.PARAMETERS.levels, len(stream) + DRAIN - 1)
        for step in _by_algebra(stream, memory, limit_s):
            if isinstance(step, Configuration):
                chosen = step
            else:
                yield None, _refused(step)
        differences = model_differences(chosen, stream, memory)
    except (NoScheduleError, fit.NotAffineError, ConflictError) as error:
        yield None, _refused(error)
        return
    if differences:
        cause = {"cause": "places", "text": f"rings of places give other words: {differences[0]}"}
        yield None, Found(UNKNOWN, "fit", cause=cause)
    elif known is not None and (other := _other(chosen, known)):
        cause = {"cause": "fixed", "text": f"{other} is fixed otherwise than algebra finds it"}
        yield chosen, Found(UNKNOWN, "fit", cause=cause)
    else:
        yield chosen, Found(SOLVED, "fit", chosen)


def _refused(error):
    proof = isinstance(error, NoScheduleError) and not isinstance(error, NotFoundError)
    cause = {"cause": getattr(error, "cause", "not affine"), "text": str(error)}
    return Found(INFEASIBLE if proof else UNKNOWN, "fit", cause=cause)


def _by_algebra(stream, memory, limit_s) -> Iterator[Configuration | Exception]:
    """Yield a configuration by templates; or why no template has one, and one by the search. Raises what they do."""
    if stream.part != "top":
        yield parts.configuration(stream, memory)
        return
    begin = perf_counter()
    try:
        yield templates.configuration(stream, memory, begin + TEMPLATES * limit_s)
        return
    except (NotFoundError, fit.NotAffineError) as error:
        why = error
    yield why
    found = templates.words(stream)
    if found.free is None:
        with suppress(NotFoundError):
            yield search.configuration(
                found, memory, lambda made: _wrong(made, stream, memory) is None, begin + limit_s
            )
            return
    raise why


def _other(chosen, known):
    return next(
        (name for name, fixed in known.controllers.items() if chosen.controllers.get(name, fixed) != fixed), None
    )


def _checked(stream, memory, chosen, fitted, depth, known, monolithic, limit_s):
    """By bounded model checking: a part, or the tile in one question; or the tile part by part, with the inner
    schedules of the configuration `chosen`, and in one question where that has no answer. fitted: what algebra found.
    """
    end = None if limit_s is None else perf_counter() + limit_s
    fixed = {} if known is None else _registers(known, memory)
    if stream.part != "top" or monolithic:
        return _asked(stream, memory, depth, fixed, monolithic, end)
    seconds = {}
    if chosen is not None and hasattr(memory, "aggregated"):
        found = _by_parts(stream, memory, chosen, depth, fixed, end)
        if found.verdict == SOLVED and not _wrong(found.configuration, stream, memory):
            return found
        # Other schedules inside may do what these cannot.
        seconds = found.seconds
    elif fitted.verdict == INFEASIBLE:
        return replace(fitted, engine="bmc")
    found = _asked(stream, memory, depth, fixed, True, perf_counter() + WHOLE_S if end is None else end)
    found.seconds = seconds | found.seconds
    if found.verdict == UNKNOWN:
        found.cause = _given_up(fitted).cause
    return found


def _over(end):
    return end is not None and perf_counter() >= end


def _wrong(configuration: Configuration, stream: Stream, memory: Memory):
    """What a run does otherwise than the stream, or that it breaks a rule of the memory; None where it is right."""
    try:
        return next(iter(model_differences(configuration, stream, memory)), None)
    except ConflictError as error:
        return str(error)


def _asked(stream, memory, depth, fixed, monolithic, end):
    """By one question, or, of a part that is not `monolithic`, by one of each controller before."""
    from tilewright.pushmem import bmc

    if _over(end):
        return Found(UNKNOWN, "bmc")

    def ask(asked, blank=None):
        left = deadline.left(end)
        return bmc.solve(asked, memory, depth=depth, known=fixed, monolithic=monolithic, limit_s=left, blank=blank)

    blank, (answers, chosen) = None, ask(stream)
    if answers.verdict == INFEASIBLE and stream.part in ("agg", "sram") and (stream.data_out == 0).any():
        # What was never written is 0, which may be what these parts show.
        blank, (answers, chosen) = 0, ask(stream, 0)
    if chosen is not None and _wrong(chosen, stream, memory):
        # Loops may go on behind the stream, but not before the drain is over.
        answers, chosen = ask(_with_drain(stream), blank)
    found, wrong = _told(stream.part, answers, chosen), chosen and _wrong(chosen, stream, memory)
    if wrong:
        cause = {"cause": "rules", "text": f"what model checking found breaks a rule that it does not know: {wrong}"}
        return Found(UNKNOWN, "bmc", seconds=found.seconds, cause=cause)
    return found


def _by_parts(stream, memory, chosen, depth, fixed, end):
    """Part by part, with the schedules inside of the tile as in `chosen`. What is infeasible is so with these."""
    from tilewright.pushmem import bmc

    ran = memory.run(recurrence.fired(chosen, memory, len(stream)), stream.data_in[:, :, 0])
    all_found: list = []
    seconds: dict = {}
    shared = dict(fixed)
    for part in parts.ORDER:
        if _over(end):
            return Found(UNKNOWN, "bmc", seconds=seconds)
        own = parts.of_run(part, stream, ran)
        for given in (shared, fixed) if shared != fixed else (fixed,):
            # Loops that the part before chose may be too few for these addresses.
            answers, made = bmc.solve(own, memory, depth=depth, known=given, limit_s=deadline.left(end))
            if answers.verdict != INFEASIBLE:
                break
        found = _told(part, answers, made)
        seconds |= found.seconds
        if found.verdict != SOLVED or made is None:
            found.seconds = seconds
            return found
        all_found.append(made)
        shared = fixed | bmc.schedules(made, memory)
    try:
        return Found(SOLVED, "bmc", parts.joined(all_found, memory, len(stream)), seconds=seconds)
    except (NotFoundError, fit.NotAffineError) as error:
        return Found(UNKNOWN, "bmc", seconds=seconds, cause={"cause": "parts", "text": str(error)})


def asserted(configuration: Configuration, stream: Stream, memory: Memory, *, limit_s: float | None = None) -> int:
    """Cycles in which the one question of the tile, or of its part, holds with this configuration.

    Raises `SolverError` where it does not, or where the solver gave up; `ConfigError` for a memory without parts.
    """
    from tilewright.pushmem import bmc

    configuration.check(memory)
    end = None if limit_s is None else perf_counter() + limit_s

    def ask():
        yield bmc.asserted(configuration, stream, memory, limit_s=deadline.left(end))

    answer = deadline.last(ask, limit_s)
    if answer is None or answer.verdict != SOLVED:
        why = f": {answer.cause.text()}" if answer and answer.cause else ""
        verdict = answer.verdict if answer else UNKNOWN
        raise SolverError(f"the question of the {stream.part} with this configuration is {verdict}{why}")
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


def layers(configuration: Configuration, part: str, memory: Memory) -> dict[str, int]:
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
def hardware_of(memory: Memory, part: str) -> rtl.Tile:
    """The RTL of a memory or a part, built once. Raises `Unavailable`."""
    return rtl.Tile(memory, part=part)


def model_differences(configuration: Configuration, stream: Stream, memory: Memory) -> list[str]:
    """What the model does otherwise than the stream, in words. Raises `ConflictError`."""
    stream = _with_drain(stream)
    fired = recurrence.fired(configuration, memory, len(stream))
    if stream.part == "top":
        ran = memory.run(fired, stream.data_in[:, :, 0])
        return streams.differences(stream, ran.data_out[:, :, None], ran.valid_out)
    return streams.differences(stream, *parts.run(stream.part, fired, stream, memory.PARAMETERS))


def hardware_differences(configuration: Configuration, stream: Stream, memory: Memory) -> list[str]:
    """What the RTL does otherwise than the stream, in words. Raises `Unavailable`."""
    stream = _with_drain(stream)
    bits, fetch = memory.PARAMETERS.bits, memory.PARAMETERS.fetch
    # What is not known is the largest word.
    lanes = np.uint64(bits) * np.arange(stream.data_in.shape[2], dtype=np.uint64)
    words = ((stream.data_in & ((1 << bits) - 1)).astype(np.uint64) << lanes).sum(2)
    ran = hardware_of(memory, stream.part).run(configuration, words)
    if stream.part in ("top", "tb"):
        return streams.differences(stream, ran.data_out[:, :, None], ran.valid_out)
    names = ["register"] if stream.part == "sram" else [f"row{port}" for port in range(stream.data_out.shape[1])]
    lanes = np.uint64(bits) * np.arange(fetch, dtype=np.uint64)
    told = [(ran.inside[name][:, None] >> lanes) & np.uint64((1 << bits) - 1) for name in names]
    # When these controllers fire is no output of the RTL: the model's firings are those of its generators.
    kind = list(parts.TOLD[stream.part])[1]
    fired = recurrence.fired(configuration, memory, len(stream))
    valid = pub.fires(fired, kind, stream.valid_out.shape[1], len(stream))
    return streams.differences(stream, np.stack(told, 1).astype(np.int64), valid)


def verified(
    configuration: Configuration, stream: Stream, memory: Memory, *, hardware: bool = True
) -> dict[str, int | str]:
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
    by = {"rtl": "not run: it was not asked for"} if not hardware else _by_hardware(configuration, stream, memory)
    return {"model": cycles, **by}


def _by_hardware(configuration, stream, memory):
    try:
        wrong = hardware_differences(configuration, stream, memory)
    except Unavailable as reason:
        return {"rtl": f"not run: {reason}"}
    if wrong:
        raise SolverError(f"the RTL does not give the stream: {wrong[0]}")
    return {"rtl": len(stream) + DRAIN}
