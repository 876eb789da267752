"""An example of what a system does: words of its inputs and outputs for each cycle, and its file.

A CSV has a column for each signal, which may also be one inside, and a row for each cycle. A blank or ``x`` is a word
that may be any: of an output it asks for nothing, of an input it is 0.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.pushmem.configure.system import System, some


@dataclass(frozen=True)
class Example:
    """Words of a system's inputs and outputs, cycle by cycle.

    Parameters
    ----------
    cycles : int
        Number of cycles.
    inputs : dict
        Words of each input by name, int [cycles]. Inputs that are left out are 0.
    outputs : dict
        Words of each output by name, [cycles]; None leaves a word open.
    pins : dict
        Known words of states and outputs by name. Each is required, and then assumed.
    """

    cycles: int
    inputs: Mapping[str, Sequence[int]] = field(default_factory=dict)
    outputs: Mapping[str, Sequence[int | None]] = field(default_factory=dict)
    pins: Mapping[str, Sequence[int | None]] = field(default_factory=dict)

    def check(self, system: System) -> None:
        """Raise `ConfigError` for signals that the system lacks, other lengths, and words that are too wide."""
        for name in self.inputs:
            if name not in system.inputs:
                raise ConfigError(f"{system.name}: unknown input {name!r}; known: {some(system.inputs)}")
        for name in (*self.outputs, *self.pins):
            system.node(name)
        for kind in (self.inputs, self.outputs, self.pins):
            for name, column in kind.items():
                if len(column) != self.cycles:
                    raise ConfigError(f"{name}: expected {self.cycles} cycles, found {len(column)}")
                width = system.width(name)
                for cycle, value in enumerate(column):
                    if value is None and kind is self.inputs:
                        raise ConfigError(f"{name}, cycle {cycle}: expected a word of an input, found none")
                    if value is not None and not 0 <= value < 1 << width:
                        raise ConfigError(f"{name}, cycle {cycle}: expected a word of {width} bits, found {value}")

    def constrained(self, system: System) -> "Example":
        """This example, in which the constraints of a system hold in every cycle."""
        held = {name: [1] * self.cycles for name in system.constraints}
        return replace(self, outputs={**self.outputs, **held}) if held else self

    def broken(self, found: Mapping[str, Sequence[int]]) -> str | None:
        """The first output of a run that is not as asked for, in words; None where all are. found: columns by name."""
        for name, column in {**self.pins, **self.outputs}.items():
            for cycle, (wanted, value) in enumerate(zip(column, found[name], strict=True)):
                if wanted is not None and wanted != value:
                    return f"{name}, cycle {cycle}: expected {wanted}, found {value}"
        return None


def read(path: str | Path, system: System, asks: bool = True) -> Example:
    """The `Example` of a file, for a system. asks: it has to tell an output.

    Raises `ArtifactError` that names the row and the column.
    """
    try:
        rows = list(csv.reader(Path(path).read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; expected an example") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: expected an example, found a file that cannot be read: {error}") from error
    names = [cell.strip() for cell in rows[0]] if rows else []
    known = system.told()
    for name in names:
        if name not in known:
            raise ArtifactError(f"{path}: expected columns among {some(known)}, found {name or 'a blank'}")
    if len(set(names)) < len(names):
        raise ArtifactError(f"{path}: expected a column for each signal, found two of {max(names, key=names.count)}")
    if len(rows) < 2:
        raise ArtifactError(f"{path}: expected a row for each cycle, found none")
    if asks and set(names) <= set(system.inputs):
        outputs = [name for name in known if name not in system.inputs]
        raise ArtifactError(f"{path}: expected a column of an output, among {some(outputs)}, found none")
    columns: dict[str, list[int | None]] = {name: [] for name in names}
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(names):
            raise ArtifactError(f"{path}: row {number}: expected {len(names)} columns, found {len(row)}")
        for name, cell in zip(names, row, strict=True):
            columns[name].append(_word(f"{path}: row {number}, column {name}", cell.strip(), system.width(name)))
    inputs = {name: [value or 0 for value in column] for name, column in columns.items() if name in system.inputs}
    shown = {name: column for name, column in columns.items() if name in system.outputs}
    # What is inside is taken for granted from then on, so that less is left to be asked.
    inner = {name: column for name, column in columns.items() if name not in {**inputs, **shown}}
    return Example(len(rows) - 1, inputs, shown, inner)


def _word(where, text, width):
    if text in ("", "x", "X"):
        return None
    try:
        value = int(text, 0)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << width:
        raise ArtifactError(f"{where}: expected a word of {width} bits or x, found {text}")
    return value
