"""Any design in BTOR2 or Verilog: read, configured from an example, and told in a file."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.pushmem.configure import btor2, example, query, replay, verilog
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
    system = read(design, solved_for)
    known, layers = example.read(trace, system), [_layer(system, each) for each in least]
    if len({layer.name for layer in layers}) < len(layers):
        raise ConfigError(f"expected an objective once, found {max(least, key=list(least).count)!r} twice")
    fixed = {} if fix is None else _registers(fix, system)
    answer = query.solve(system, known, layers=layers, fixed=fixed, limit_s=limit_s)
    body: dict[str, Any] = {"design": Path(design).name, "verdict": answer.verdict, "registers": answer.registers}
    body |= {"layers": answer.layers, "least": answer.complete}
    body |= {"seconds": answer.seconds, "verified": {"replay": answer.replayed}}
    body |= {"cause": answer.cause.text() if answer.cause else None}
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


def _registers(path, system):
    """Configuration words of a file."""
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
