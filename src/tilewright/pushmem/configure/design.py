"""Any design in BTOR2 or Verilog: read, configured from an example, and told in a file."""

import re
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from tilewright.core import artifacts, deadline
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.pushmem.configure import btor2, example, forall, query, replay, smtlib, verilog
from tilewright.pushmem.configure.objectives import Least
from tilewright.pushmem.configure.system import System, some

KIND, VERSION = "configured design", 1
VERILOG = (".v", ".sv")


def run(
    design: str | Path,
    solved_for: str,
    trace: str | Path,
    output: str | Path,
    *,
    least: Sequence[str] = (),
    fix: str | Path | None = None,
    limit_s: float | None = None,
) -> query.Answer:
    """Configure the file `design`, in BTOR2 or Verilog, from the example file `trace`; write `output`.

    solved_for: an expression; inputs whose whole names match it are the configuration. least: expressions; for one
    after the other, the sum of the configuration words whose whole names match it is minimised. fix: a file as `output`
    is, whose words are kept; it may leave words out. Raises `TilewrightError`.
    """
    end = None if limit_s is None else perf_counter() + limit_s

    def ask():
        system = read(design, solved_for)
        known, layers, fixed = example.read(trace, system), _layers(system, least), _registers(fix, system)
        yield query.solve(system, known, layers=layers, fixed=fixed, limit_s=deadline.left(end))

    answer = deadline.last(ask, limit_s) or query.Answer(query.GAVE_UP, complete=False)
    body: dict[str, Any] = {"design": Path(design).name, "verdict": answer.verdict, "registers": answer.registers}
    body |= {"layers": answer.layers, "least": answer.complete}
    body |= {"seconds": answer.seconds, "verified": {"replay": answer.replayed}}
    body |= {"cause": answer.cause.text() if answer.cause else None}
    artifacts.write_json(output, KIND, VERSION, body)
    return answer


def run_for_all(
    design: str | Path,
    solved_for: str,
    free: str,
    output: str | Path,
    *,
    trace: str | Path | None = None,
    cycles: int = 0,
    always: bool = False,
    least: Sequence[str] = (),
    fix: str | Path | None = None,
    limit_s: float | None = None,
) -> forall.Answer:
    """Configure the file `design` for all words of the inputs that the expression `free` matches, see `forall`.

    trace: an example file, or None for a number of `cycles`. Writes `output`, and beside it each question that has no
    answer, which another solver confirms in the time that is left. Other parameters are those of `run`.

    Raises `TilewrightError`.
    """
    end = None if limit_s is None else perf_counter() + limit_s
    answer = _of_all(design, solved_for, free, trace, cycles, always, end, least, fix)
    body: dict[str, Any] = {"design": Path(design).name, "verdict": answer.verdict, "registers": answer.registers}
    body |= {"layers": answer.layers, "cycles": answer.cycles, "induction": answer.depth, "cause": answer.why or None}
    body |= {"runs": [{"inputs": run.inputs, "begin": run.begin} for run in answer.runs], "rounds": answer.rounds}
    body |= {"seconds": answer.seconds, "verified": {"replay": answer.replayed}, "proofs": {}}
    for name, text in answer.questions.items():
        path = Path(output).with_suffix(f".{name}.smt2")
        path.write_text(text, encoding="utf-8")
        solver, said = smtlib.confirmed(path, deadline.left(end))
        body["proofs"][path.name] = {solver: said}
        answer.confirmed[name] = f"{said} by {solver}"
    artifacts.write_json(output, KIND, VERSION, body)
    return answer


def verify(design: str | Path, solved_for: str, trace: str | Path, written: str | Path) -> int:
    """Run the configuration of the file `written` over an example; returns its cycles.

    Raises `ConfigError` for a run that is not the example's, `ArtifactError` for files that cannot be read.
    """
    system = read(design, solved_for)
    known = example.read(trace, system).constrained(system)
    found = replay.run(system, _registers(written, system), known.inputs, known.cycles, [*known.outputs, *known.pins])
    if (broken := known.broken(found)) is not None:
        raise ConfigError(f"{written}: {broken}")
    return known.cycles


def verify_for_all(
    design: str | Path, solved_for: str, free: str, written: str | Path, *, trace: str | Path | None = None,
    cycles: int = 0, always: bool = False, limit_s: float | None = None,
) -> forall.Answer:  # fmt: skip
    """Whether no run breaks the configuration of the file `written`. Raises `ConfigError` for a run that does."""
    end = None if limit_s is None else perf_counter() + limit_s
    answer = _of_all(design, solved_for, free, trace, cycles, always, end, (), written, whole=True)
    if answer.verdict == query.INFEASIBLE:
        raise ConfigError(f"{written}: {answer.why}")
    return answer


def _of_all(design, solved_for, free, trace, cycles, always, end, least, fix, whole=False):
    """The `forall.Answer` by the time `end`. whole: what the file `fix` leaves out is 0."""

    def ask():
        system = read(design, solved_for)
        known = example.Example(cycles) if trace is None else example.read(trace, system, asks=False)
        fixed, layers = dict.fromkeys(system.configuration if whole else (), 0), _layers(system, least)
        fixed |= _registers(fix, system)
        left = deadline.left(end)
        yield forall.solve(system, known, free, layers=layers, fixed=fixed, always=always, limit_s=left)

    over = forall.Answer(query.GAVE_UP, cycles=cycles, why=forall.OVER)
    return deadline.last(ask, deadline.left(end)) or over


def read(path: str | Path, solved_for: str) -> System:
    """The `System` of a file: in Verilog where its name ends with ``.v`` or ``.sv``, else in BTOR2.

    Raises `ArtifactError` for a file that cannot be read, `Unavailable` for Verilog without the extra.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"{path}: expected a design in BTOR2 or Verilog, found a file that cannot be read: {error}"
        ) from error
    if Path(path).suffix in VERILOG:
        try:
            text = verilog.btor2(path)
        except verilog.RefusedError as error:
            raise ArtifactError(f"{path}: expected a design in Verilog: {error}") from error
    return btor2.read(text, solved_for, Path(path).name)


def _layer(system, expression):
    """The sum of the configuration words that an expression names."""
    try:
        chosen = re.compile(expression)
    except re.error as error:
        raise ConfigError(f"expected a regular expression, found {expression!r}: {error}") from error
    names = [name for name in system.configuration if chosen.fullmatch(name)]
    if not names:
        known = some(system.configuration)
        raise ConfigError(f"expected configuration words that match {expression!r}, found none; known: {known}")
    return Least(expression, [[(name, 0)] for name in names])


def _layers(system, least):
    """The objectives that expressions name."""
    layers = [_layer(system, each) for each in least]
    if len({layer.name for layer in layers}) < len(layers):
        raise ConfigError(f"expected an objective once, found {max(least, key=list(least).count)!r} twice")
    return layers


def _registers(path, system):
    """Configuration words of a file, none of None."""
    if path is None:
        return {}
    found = artifacts.read_json(path, KIND, VERSION).get("registers")
    if not isinstance(found, dict) or not all(type(word) is int for word in found.values()):
        raise ArtifactError(f"{path}: expected registers, each a whole number, found none or others")
    for name, word in found.items():
        if name not in system.configuration:
            known = some(system.configuration)
            raise ConfigError(f"{path}: {system.name} has no configuration word {name!r}; known: {known}")
        if not 0 <= word < 1 << system.width(name):
            raise ConfigError(f"{path}: {name}: expected a word of {system.width(name)} bits, found {word}")
    return found
