"""Which code made the rows of T5, and which of the recorded ones older code made.

Every row tells the commit and the digest of the code that made it: of the module that makes such rows and of those that
it enters by name. A recorded row whose digest is not today's is listed in `OLDER`, with the reason why it still stands.
"""

import csv
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tilewright import models, networks, reorder, targets
from tilewright.core import provenance
from tilewright.core.errors import ArtifactError, ConfigError, UnknownNameError
from tilewright.networks import attentions
from tilewright.schedule import solvers

# Beside the recorded ``logs`` of a device: which rows older code made, since which change, and why they still stand.
OLDER = "older.csv"
OLDER_COLUMNS = ("code", "commit", "what", "since", "why")
# What plans of whole networks and of the heat map are made with.
_PLANS = ("reorder.window", "schedule.solvers.highs")
_DENSE = ("sdpa_dense", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")


def _layers(row, kind):
    """A schedule or a baseline on one pattern."""
    made = [*_family(row["model"]), *([f"reorder.{row['reorder']}"] if row["reorder"] in reorder.NAMES else [])]
    if row["provider"] != "tilewright":
        return [*made, f"baselines.sparse.{row['provider']}", *targets.modules(kind)]
    solver = [f"schedule.solvers.{row['solver']}"] if row["solver"] in solvers.NAMES else []
    return [*made, "blocks", "schedule", *solver, *targets.modules(kind, "executor", "probe")]


def _networks(row, kind):
    """A whole network."""
    family, _ = networks.parse(row["network"])
    registry = "attentions" if row["attention"] in attentions.NAMES else "batching"
    oracle = {"attentions": "dense", "batching": "padded"}[registry]
    made = [f"models.{family}", *(f"networks.{name}" for name in (family, f"{registry}.{oracle}"))]
    own = [*_PLANS, *targets.modules(kind, "executor", "probe", "packed")] if row["attention"] == "tilewright" else []
    return [*made, f"networks.{registry}.{row['attention']}", *own]


def _ragged(row, kind):
    """Attention of packed images, or a call around it."""
    return [
        *targets.modules(kind, "packed"),
        *([] if row["provider"] == "tilewright" else [f"baselines.packed.{row['provider']}"]),
    ]


def _pruned(row, kind):
    """A pruned network."""
    family, _ = networks.parse(row["network"])
    strategies = (f"networks.batching.{name}" for name in ("padded", row["strategy"]))
    entered = (*strategies, f"pruners.{row['pruner']}", *targets.modules(kind, "packed"))
    return [f"models.{family}", f"networks.{family}", *entered]


def _heatmap(row, kind):
    """DynamicViT at one resolution and patch."""
    dense = (f"baselines.sparse.{name}" for name in _DENSE)
    return ["models.dynamicvit", *_PLANS, *dense, *targets.modules(kind, "executor", "probe")]


def _orders(row, kind):
    """An order of one pattern."""
    return [*_family(row["model"]), f"reorder.{row['reorder']}"]


def _family(model):
    """The module of the family that a workload's name tells; none for a name of the user's own."""
    try:
        return [models.parse(model)[0].__name__]
    except (UnknownNameError, ConfigError):
        return []


@dataclass(frozen=True)
class Kind:
    """A kind of rows: the module that makes them, the name of their columns there, and what it enters by name:
    ``entered(row, kind of device)``."""

    module: str
    name: str
    entered: object

    @property
    def columns(self):
        """Names of the columns, in order."""
        return getattr(import_module(self.module), self.name)


KINDS = {
    "bench": Kind("tilewright.study.bench.rows", "COLUMNS", _layers),
    "network": Kind("tilewright.study.bench.networks", "NETWORKS", _networks),
    "ragged": Kind("tilewright.study.bench.ragged", "RAGGED", _ragged),
    "pruned": Kind("tilewright.study.bench.pruned", "PRUNED", _pruned),
    "heatmap": Kind("tilewright.study.bench.sweeps", "HEATMAP", _heatmap),
    "reorder_time": Kind("tilewright.study.bench.sweeps", "REORDER_TIMES", _orders),
}


def origin(kind, row, device):
    """The columns ``commit`` and ``code`` of a `row` of one of `KINDS` that was made on a `device` of this kind."""
    entered = KINDS[kind].entered(row, device)
    modules = {name if name.startswith("tilewright.") else f"tilewright.{name}" for name in entered}
    return {
        "commit": provenance.commit(),
        "code": provenance.code_digest(*sorted({KINDS[kind].module, *modules})),
    }


def older(folder):
    """Recorded rows below ``folder/logs`` that today's code did not make: a list of ``{path, rows, commit, code, what,
    since, why}``, a dict for each file and code, as `OLDER` explains them; blank where it does not.

    Raises `ArtifactError` for a file whose columns are not those of today's writers, and for such an `OLDER`.
    """
    explained = {(entry["code"], entry["commit"]): entry for entry in _explained(folder)}
    found = Counter()
    for path in sorted(Path(folder).glob("logs/**/*.csv")):
        kind, rows = _read(path)
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


def _read(path):
    """``(kind, rows)`` of a recorded CSV."""
    columns, rows = _csv(path)
    for kind, known in KINDS.items():
        if columns == known.columns:
            return kind, rows
    kind = max(KINDS, key=lambda kind: len({*KINDS[kind].columns} & {*columns}))
    expected = KINDS[kind].columns
    raise ArtifactError(
        f"{path}: expected the columns of today's {kind} rows, found {sorted({*expected} - {*columns})} missing and "
        f"{sorted({*columns} - {*expected})} more, or another order; record it again"
    )


def _csv(path):
    with open(path, newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        return tuple(reader.fieldnames or ()), list(reader)


def _todays(kind, row):
    """Digests that today's code gives such a row, one for each kind of device."""
    try:
        return {origin(kind, row, device)["code"] for device in targets.NAMES}
    except UnknownNameError:
        # Of a module that is no longer there.
        return set()
