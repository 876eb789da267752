"""Recorded files as the readers of today expect them: rows of the versions before, rewritten in place.

Before, rows had no ``kind`` and ``version``; pruned networks named their ``batching`` a ``strategy``; rows of the heat
map did not name the order and the solver of their plans, which were the same in every recorded study; and the time of
orders stood in a file of its own. Rows of networks of version 1 were of none that was compiled or had plans that were
chosen, those of recall of planted maps alone, and those of attention were not timed in turns, nor of tuned schedules.
What was measured, and the commit and code that measured it, stay what they are.
"""

import csv
from pathlib import Path

from tilewright.core.errors import ArtifactError
from tilewright.study import experiments
from tilewright.study.experiments import _rows

# Columns that only one kind of rows had.
_OWN = {
    "networks": "attention_us",
    "ragged": "exact",
    "pruned": "strategy",
    "heatmap": "patch",
    "orders": "peak_rss_bytes",
    "attention": "predicted_us",
}
_RENAMED = {"strategy": "batching"}
_ADDED = {"heatmap": {"reorder": "window", "solver": "highs"}}
# Columns that later versions have, where they are not blank.
_LATER = {("networks", "1"): {"compiled": False}, ("recall", "1"): {}, ("attention", "1"): {}}
_MOVED = {"reorder_time.csv": "orders/times.csv"}


def run(folders):
    """Rewrite the CSV files below each of `folders`, a folder ``logs`` or one file; those of today are left alone.

    Raises `ArtifactError` for a file whose columns are of no kind, and where there are no files.
    """
    for folder in map(Path, folders):
        paths = [folder] if folder.is_file() else sorted(folder.rglob("*.csv"))
        if not paths:
            raise ArtifactError(f"{folder}: expected CSV files of recorded rows, found none")
        for path in paths:
            _convert(path, folder)


def _convert(path, folder):
    try:
        with open(path, newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            columns, rows = tuple(reader.fieldnames or ()), list(reader)
    except (ValueError, csv.Error) as error:
        raise ArtifactError(f"{path}: expected rows of a recorded study, found a damaged file: {error}") from error
    if columns[:2] == ("kind", "version"):
        found = (rows[0]["kind"], rows[0]["version"]) if rows else None
        if found in _LATER:
            row_type = experiments.member(found[0]).Row
            now = {"version": _rows.version_of(row_type)} | _LATER[found]
            _rows.write(path, row_type, [row | now for row in rows])
        return
    kind = next((kind for kind, column in _OWN.items() if column in columns), None)
    if kind is None:
        raise ArtifactError(f"{path}: expected rows of a recorded study, found the columns {', '.join(columns)[:200]}")
    rows = [{_RENAMED.get(name, name): value for name, value in row.items()} | _ADDED.get(kind, {}) for row in rows]
    target = path if folder == path else folder / _MOVED.get(str(path.relative_to(folder)), path.relative_to(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    _rows.write(target, experiments.member(kind).Row, rows)
    if target != path:
        path.unlink()
