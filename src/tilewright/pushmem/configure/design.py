"""Any design in BTOR2: read, configured from an example, and told in a file."""

from pathlib import Path
from typing import Any

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.pushmem.configure import btor2, example, query, replay

KIND, VERSION = "configured design", 1


def run(
    design: str | Path, solved_for: str, trace: str | Path, output: str | Path, *, limit_s: float | None = None
) -> query.Answer:
    """Configure the BTOR2 file `design` from the example file `trace`; write `output` where there is an answer.

    solved_for: an expression; inputs whose whole names match it are the configuration. Raises `TilewrightError`.
    """
    system = btor2.read(_text(design), solved_for, Path(design).name)
    known = example.read(trace, system)
    answer = query.solve(system, known, limit_s=limit_s)
    body: dict[str, Any] = {"design": Path(design).name, "verdict": answer.verdict, "registers": answer.registers}
    body |= {"seconds": answer.seconds, "verified": {"replay": answer.replayed}}
    body |= {"cause": answer.cause.text() if answer.cause else None}
    artifacts.write_json(output, KIND, VERSION, body)
    return answer


def verify(design: str | Path, solved_for: str, trace: str | Path, written: str | Path) -> int:
    """Run the configuration of the file `written` over an example; returns its cycles.

    Raises `ConfigError` for a run that is not the example's, `ArtifactError` for files that cannot be read.
    """
    system = btor2.read(_text(design), solved_for, Path(design).name)
    known, document = example.read(trace, system).constrained(system), artifacts.read_json(written, KIND, VERSION)
    found = replay.run(system, document["registers"], known.inputs, known.cycles, list(known.outputs))
    if (broken := known.broken(found)) is not None:
        raise ConfigError(f"{written}: {broken}")
    return known.cycles


def _text(path):
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: expected a design in BTOR2, found a file that cannot be read: {error}") from error
