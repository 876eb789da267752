"""Which code made the rows of T5, and which of the recorded ones older code made.

Every row holds the commit and the digest of the code that made it, see `experiments.code`. A recorded row whose digest
is not today's is listed in `OLDER`, with the reason why it still stands.
"""

import csv
from collections import Counter
from pathlib import Path

from tilewright import targets
from tilewright.core import provenance
from tilewright.core.errors import ArtifactError, UnknownNameError
from tilewright.study import experiments
from tilewright.study.experiments import _rows

# Beside the recorded ``logs`` of a device: which rows older code made, since which change, and why they still stand.
OLDER = "older.csv"
OLDER_COLUMNS = ("code", "commit", "what", "since", "why")


def origin(experiment, row, device):
    """The columns ``commit`` and ``code`` of a `row` of an `experiment` that was made on a `device` of this kind."""
    return {"commit": provenance.commit(), "code": experiments.code(experiment, [row], device)}


def older(folder):
    """Recorded rows below ``folder/logs`` that today's code did not make: a list of ``{path, rows, commit, code, what,
    since, why}``, a dict for each file and code, as `OLDER` explains them; blank where it does not.

    Raises `ArtifactError` for a file whose columns are not those of today's writers, and for such an `OLDER`.
    """
    explained = {(entry["code"], entry["commit"]): entry for entry in _explained(folder)}
    found = Counter()
    for path in sorted(Path(folder).glob("logs/**/*.csv")):
        kind, rows = _rows.read(path, experiments.row_types())
        for row in rows:
            if row["code"] not in _todays(kind, row):
                found[str(path.relative_to(folder)), row["commit"], row["code"]] += 1
    blank = dict.fromkeys(("what", "since", "why"), "")
    return [
        {"path": path, "rows": count, **(blank | explained.get((code, commit), {})), "commit": commit, "code": code}
        for (path, commit, code), count in found.items()
    ]


def check(folder):
    """Raise `ArtifactError` for recorded rows in `folder` that older code made and `OLDER` does not explain, and for
    what it explains and is not there; otherwise as `older`."""
    rows = older(folder)
    if wrong := [row for row in rows if not row["why"]]:
        first = "{rows} in {path} of code {code!r}, commit {commit!r}".format_map(wrong[0])
        raise ArtifactError(
            f"{folder}: expected rows of today's code, found {first} and others in {len(wrong) - 1} places; record "
            f"them again, or say in {OLDER} why they still stand"
        )
    there = {(row["code"], row["commit"]) for row in rows}
    for entry in _explained(folder):
        if (entry["code"], entry["commit"]) not in there:
            raise ArtifactError(f"{folder}/{OLDER}: expected entries of older rows, found none of code {entry['code']}")


def _explained(folder):
    path = Path(folder) / OLDER
    if not path.exists():
        return []
    columns, entries = _csv(path)
    if columns != OLDER_COLUMNS or not all(all(entry.values()) for entry in entries):
        raise ArtifactError(f"{path}: expected {', '.join(OLDER_COLUMNS)}, none of them blank, found {columns}")
    return entries


def _csv(path):
    with open(path, newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        return tuple(reader.fieldnames or ()), list(reader)


def _todays(experiment, row):
    """Digests that today's code gives such a row, one for each kind of device."""
    try:
        return {experiments.code(experiment, [row], device) for device in targets.NAMES}
    except UnknownNameError:
        # Of a module that is no longer there.
        return set()
