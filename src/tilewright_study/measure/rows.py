"""Rows of stage T5: one struct declares the columns of an experiment, writes its CSV files and reads them.

The first two columns of every file are ``kind``, the experiment's name, and ``version``, of its columns: a reader knows
what a file holds without guessing. A blank field is a value that does not apply, or that was not measured.
"""

import csv
import io
import typing
from datetime import UTC, datetime
from typing import Literal

import msgspec

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError

STATUSES = ("ok", "skipped", "failed")
# Text that may be blank, and numbers that may.
Number = float | None
Count = int | None
Flag = bool | None
Status = Literal[STATUSES]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row: its fields are the columns, in order.

    A subclass declares ``kind`` and ``version`` as the literals that its files hold, and columns of its own. The last
    `LATER` are columns that files lack which were recorded before they were declared: blank there. The last
    columns are the same everywhere: the device, its cores (a GPU's multiprocessors), driver and libraries; commit and
    code, of the code that made the row, see `experiments.code`; time: when, ISO 8601 in UTC.
    """

    LATER = ()

    kind: str
    version: int
    device: str = ""
    cores: Count = None
    driver: str = ""
    torch: str = ""
    triton: str = ""
    numpy: str = ""
    commit: str = ""
    code: str = ""
    time: str = ""

    @classmethod
    def columns(cls):
        """Names of the columns, in order: what is a class's own comes before what it has of another one."""
        shared = Row.__struct_fields__
        classes = cls.__mro__[: cls.__mro__.index(Row)]
        own = [name for each in classes for name in each.__annotations__ if name not in shared]
        return *shared[:2], *own, *shared[2:]

    @classmethod
    def numbers(cls):
        """Names of the columns that hold numbers."""
        hints = typing.get_type_hints(cls)
        return [name for name in cls.columns() if hints[name] in (int, float, Number, Count)]

    @classmethod
    def of(cls, facts):
        """The row with these `facts`, ``{column: value}``; what is missing or an empty text is blank.

        Text stands for the value that it writes. Raises `ArtifactError` for an unknown column and for a value of
        another type.
        """
        stated = {name: _plain(value) for name, value in facts.items() if value is not None and value != ""}
        try:
            return msgspec.convert(stated, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ArtifactError(f"{kind_of(cls)} row: {error}") from None


class Judged(Row, frozen=True, kw_only=True):
    """A row of what may have failed its check, or been skipped: why says ``reason``."""

    status: Status = "ok"
    reason: str = ""


class Typed(Judged, frozen=True, kw_only=True):
    """One of a type of numbers."""

    dtype: str = ""


class Timed(Typed, frozen=True, kw_only=True):
    """One that was compared and then timed.

    relative_error: has its `tolerance`. p20_us, p50_us, p80_us: of `repetitions`, whose relative standard error is rse.
    """

    relative_error: Number = None
    tolerance: Number = None
    p20_us: Number = None
    p50_us: Number = None
    p80_us: Number = None
    repetitions: Count = None
    rse: Number = None


class Compared(Timed, frozen=True, kw_only=True):
    """One whose largest error is told, too."""

    max_abs_error: Number = None


class Called(Compared, frozen=True, kw_only=True):
    """A call of attention: checked_rows: of its result. p20_us, p50_us, p80_us: on a GPU its own time, else wall time;
    timing: how a GPU was timed (`Timing.method`), blank on CPUs."""

    checked_rows: Count = None
    timing: str = ""


class Waited(Called, frozen=True, kw_only=True):
    """A call that was timed by the host's clock, too, on a GPU.

    latency_us: a call and the wait for it; host_us: until a call returns.
    """

    latency_us: Number = None
    host_us: Number = None


def kind_of(row_type):
    """The kind of an experiment's rows."""
    return typing.get_args(typing.get_type_hints(row_type)["kind"])[0]


def version_of(row_type):
    """The version of their columns."""
    return typing.get_args(typing.get_type_hints(row_type)["version"])[0]


def _plain(value):
    """A number of NumPy as Python's."""
    return value.item() if hasattr(value, "item") else value


def now():
    """The time of a row."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine(device):
    """Columns that say what a row was measured on, from a description of `devices`; blank where it has none."""
    found = {"device": device["name"], "cores": device["threads"], "driver": device.get("driver", "")}
    return found | {package: device["versions"].get(package, "") for package in ("torch", "triton", "numpy")}


def microseconds(row):
    """What the log says of a timed row that passed: its time and its error."""
    error = row.get("max_abs_error")
    return f"{row['p50_us']:,.1f} us, " + ("no error" if error is None else f"error {error:.1e}")


def text(row_type, rows):
    """The CSV of `rows`, ``{column: value}`` each."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(row_type.columns())
    for row in map(row_type.of, rows):
        writer.writerow(["" if (value := getattr(row, name)) is None else value for name in row.columns()])
    return stream.getvalue()


def write(path, row_type, rows):
    """Write `rows` as a CSV. Raises `ArtifactError` as `Row.of` does, and where there is no row; nothing is written
    then."""
    rows = list(rows)
    if not rows:
        raise ArtifactError(f"{path}: expected at least one {kind_of(row_type)} row to write, found none")
    artifacts.write_text(path, text(row_type, rows))


def read(path, types):
    """``(kind, rows)`` of a CSV, ``{column: text}`` each. types: the row struct of each kind that is known.

    Raises `ArtifactError` for a file without rows, of an unknown kind, of another version or with other columns.
    """
    try:
        with open(path, newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream, strict=True)
            columns, rows = tuple(reader.fieldnames or ()), list(reader)
    except (OSError, ValueError, csv.Error) as error:
        raise ArtifactError(f"{path}: expected rows of an experiment, found a damaged file: {error}") from error
    kind = _kind(path, columns, rows, types)
    return kind, [dict.fromkeys(types[kind].LATER, "") | row for row in rows]


def _kind(path, columns, rows, types):
    """The kind of all `rows` of a file, whose columns are as declared."""
    if columns[:2] != ("kind", "version"):
        raise ArtifactError(
            f"{path}: expected rows that begin with kind and version, found a CSV with the columns {', '.join(columns)}"
        )
    if not rows:
        raise ArtifactError(f"{path}: expected at least one row, found none")
    found = {(row["kind"], row["version"]) for row in rows}
    kind, version = min(found, key=str)
    if len(found) > 1 or kind not in types:
        kinds = ", ".join(sorted({name for name, _ in found}, key=str))
        raise ArtifactError(f"{path}: expected rows of one of {', '.join(types)}, found {kinds}")
    if version != str(version_of(types[kind])):
        raise ArtifactError(f"{path}: expected version {version_of(types[kind])} of {kind} rows, found {version}")
    _same(
        path,
        kind,
        [name for name in types[kind].columns() if name in columns or name not in types[kind].LATER],
        columns,
    )
    if any(None in row or None in row.values() for row in rows):
        raise ArtifactError(f"{path}: expected {len(columns)} fields in each row, found others: a damaged file")
    return kind


def _same(path, kind, expected, columns):
    # In any order: files that were recorded have that of their time.
    if sorted(columns) != sorted(expected):
        raise ArtifactError(
            f"{path}: expected the columns of {kind} rows, found {sorted({*expected} - {*columns})} missing and "
            f"{sorted({*columns} - {*expected})} more, or some twice"
        )
