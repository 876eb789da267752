"""Reading what the other stages wrote, for tables and figures: strictly, and by content rather than by path."""

import csv
import io
import json
import zipfile
from pathlib import Path

import numpy as np

from tilewright.core.errors import ArtifactError
from tilewright_study import experiments
from tilewright_study.baselines.sparse import DENSE
from tilewright_study.measure import rows as _rows
from tilewright_study.tables import _select

_TIMES = ["p20_us", "p50_us", "p80_us", "rse", "cold_us", "useful_gflops", "executed_gflops", "tokens_per_s"]
NETWORK_TIMES = [
    *("p20_us", "p50_us", "p80_us", "rse", "images_per_s", "attention_us", "rest_us", "gpu_us"),
    "peak_bytes",
]
RAGGED_TIMES = [
    *("p20_us", "p50_us", "p80_us", "rse", "latency_us", "host_us", "useful_gflops"),
    *("byte_floor_us", "floor_fraction"),
]
PRUNED_TIMES = ["p20_us", "p50_us", "p80_us", "rse", "images_per_s", "pack_us", "pack_share"]
# What makes rows those of one device.
_DEVICE = ("device", "cores", "driver", "torch", "triton")
# Files that are written by hand, by their header: columns of text, and of numbers.
_BY_HAND = {
    "paper_latency": (["family", "provider", "reorder", "policy"], ["resolution", "latency_ms"]),
    "paper_heatmap": ([], ["resolution", "patch", "paper_speedup"]),
    "paper_ragged": (["network", "device", "version"], ["unpruned", "padded", "varlen", "packed"]),
    "paper_ragged_kernel": (
        ["device", "version"],
        ["images", "pruned", "kept", "padded_us", "varlen_us", "packed_us"],
    ),
    "paper_configure": (["stream", "component", "task"], ["cycles", "paper_seconds"]),
    "paper_push": (["app", "memory"], ["paper_tiles", "paper_last_cycle", "paper_saved"]),
    "claims": (["id", "kind", "claim", "relation", "unit"], ["expected"]),
}
PAPERS = tuple(kind for kind in _BY_HAND if kind.startswith("paper"))
# Those that a run leaves in its logs.
ROWS = experiments.NAMES
# Solvers that solve no integer program.
HEURISTICS = ("greedy", "descent")
# What ends the name of one that solves it under the published objective.
PUBLISHED = "-paper"
# ASSUME: who is slower by more than this share is slower, however noisy the measurement.
MOST_NOISE = 0.05
HEADLINE = experiments.member("attention").HEADLINE


# What reading bytes raises that are no file of a known kind.
_DAMAGE = (OSError, ValueError, KeyError, AttributeError, EOFError, RecursionError, zipfile.BadZipFile)


def sort(inputs, expected, optional=()):
    """``{kind: [paths]}`` of `inputs` for the `expected` kinds, by what each file says it is.

    Raises `ArtifactError` for a file that is missing, damaged or of another kind, and when there is none of an expected
    kind that is not `optional`.
    """
    found = {kind: [] for kind in expected}
    for path in map(Path, inputs):
        try:
            kind = _csv_kind(path) if path.suffix == ".csv" else _header_kind(path)
        except FileNotFoundError:
            raise ArtifactError(f"{path}: no such file; expected {' or '.join(expected)}") from None
        except _DAMAGE as error:
            raise ArtifactError(f"{path}: expected {' or '.join(expected)}, found a damaged file: {error}") from error
        if kind not in found:
            raise ArtifactError(f"{path}: expected {' or '.join(expected)}, found {kind}")
        found[kind].append(path)
    for kind, paths in found.items():
        if not paths and kind not in optional:
            listed = ", ".join(map(str, inputs)) or "no files"
            raise ArtifactError(f"expected {_a(kind)} file among the inputs, found {listed}")
    return found


def _a(kind):
    return f"{'an' if kind[0] in 'aeo' else 'a'} {kind}"


def _csv_kind(path):
    with open(path, newline="", encoding="utf-8") as stream:
        lines = csv.reader(stream)
        columns, first = next(lines, []), next(lines, [])
    if columns[:2] == ["kind", "version"] and first:
        return first[0]
    for kind, (words, numbers) in _BY_HAND.items():
        if {*columns} == {*words, *numbers}:
            return kind
    return f"a CSV with the columns {', '.join(columns)}"


def _header_kind(path):
    if path.suffix == ".npz":
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            return json.loads(bytes(archive["tilewright"])).get("kind")
    return json.loads(path.read_bytes()).get("kind")


def by_kind(inputs, **loaders):
    """The files among `inputs`, loaded: ``{kind: {path: loaded}}`` for `loaders` ``{kind: load}``. Raises as `sort`."""
    found = sort(inputs, tuple(loaders))
    return {kind: {path: loaders[kind](path) for path in paths} for kind, paths in found.items()}


def frames(inputs, *expected, optional=(), apart=False):
    """The CSV files `inputs` as one DataFrame per kind, in the order of `expected`; that of an `optional` kind
    without files is empty and has no columns. apart: rows may be of several devices, which the caller tells apart by
    their names.

    Raises as `sort`, and `ArtifactError` for text where a number belongs, for a status that is none, and for rows of
    unequal devices.
    """
    import pandas as pd

    found = sort(inputs, expected, optional)
    return [_frame(found[kind], kind, apart) if found[kind] else pd.DataFrame() for kind in expected]


def _frame(paths, kind, apart):
    """The rows of CSV files of one kind."""
    import pandas as pd

    # A study leaves hundreds of files of a few rows: one frame of all is made much faster than one for each file.
    words, numbers = _BY_HAND[kind] if kind in _BY_HAND else ((), experiments.member(kind).Row.numbers())
    read = _by_hand if kind in _BY_HAND else _recorded
    rows = [row for path in paths for row in _parsed(path, kind, read(path), numbers)]
    if kind not in _BY_HAND:
        _check_one_device(kind, rows, apart)
    columns = [*words, *numbers] if kind in _BY_HAND else experiments.member(kind).Row.columns()
    return pd.DataFrame(rows, columns=list(columns)).astype(dict.fromkeys(numbers, float))


def _check_one_device(kind, rows, apart):
    """Raise `ArtifactError` for rows of unequal devices: their times are not to be compared.

    apart: those whose devices have other names are told apart.
    """
    found = {}
    for row in rows:
        for column in _DEVICE:
            # A row of what did not run may say nothing of it.
            seen = found.setdefault((row["device"] if apart else "", column), set())
            value = row[column]
            seen.update({f"{value:g}" if isinstance(value, float) else value} - {"", "nan"})
    for (_, column), values in found.items():
        if len(values) > 1:
            raise ArtifactError(f"expected {kind} rows of one device, found {column} {' and '.join(sorted(values))}")


def _recorded(path):
    """The rows of an experiment, a dict of text each."""
    return _rows.read(path, experiments.row_types())[1]


def _by_hand(path):
    """The rows of a file that is written by hand, a dict of text each."""
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream, restval="", strict=True))
    except (OSError, ValueError, csv.Error) as error:
        raise ArtifactError(f"{path}: expected a table, found: {error}") from error
    if any(None in row for row in rows):
        raise ArtifactError(f"{path}: expected as many fields as columns, found more")
    return rows


def _parsed(path, kind, rows, numbers):
    """`rows` with `numbers` parsed. Only an empty field is missing: "none" is an order, and NA could be a name."""
    try:
        for row in rows:
            row.update({name: float(row[name] or "nan") for name in numbers})
    except ValueError as error:
        raise ArtifactError(f"{path}: expected {_a(kind)} file, found: {error}") from error
    if rows and "status" in rows[0]:
        known(path, "status", [row["status"] for row in rows], _rows.STATUSES)
    return rows


def known(path, what, values, names):
    """Raise `ArtifactError` unless all `values` that a file holds are among `names`."""
    if wrong := sorted(set(values) - set(names)):
        raise ArtifactError(f"{path}: {what}: expected {', '.join(names)}, found {', '.join(wrong)}")


def bench(frame):
    """Bench rows with what tables and figures ask of them; a row that did not run has no measured number.

    Rows come `in_order`. Adds ``family`` (of the workload's name), ``policy`` (see `policy`, or empty),
    ``dense`` (the fastest of `DENSE` of the same workload, type, batch and device), ``dense_us`` (its p50) and
    ``speedup`` over it; ``ordered`` becomes a bool, false where a call permutes its tokens.
    """
    frame = frame.copy()
    frame["family"] = frame["model"].map(_select.family)
    frame["policy"] = frame["solver"].map(policy)
    frame["ordered"] = frame["ordered"].str.lower() != "false"
    frame.loc[frame["status"] != "ok", _TIMES] = np.nan
    key = ["model", "dtype", "batch", "device"]
    fastest = best(frame[frame["provider"].isin(DENSE)], key)[["provider", "p50_us"]]
    frame = frame.join(fastest.set_axis(["dense", "dense_us"], axis=1), on=key).fillna({"dense": ""})
    frame["speedup"] = frame["dense_us"] / frame["p50_us"]
    return in_order(frame)


def policy(solver):
    """What a solver is called in comparisons: itself if it is none or a heuristic, ``published`` for the
    published objective, else ``ilp``."""
    if solver in ("", *HEURISTICS):
        return solver
    return "published" if solver.endswith(PUBLISHED) else "ilp"


def best(frame, key, column="p50_us"):
    """The row with the least `column` for each value of `key`, which becomes the index."""
    timed = frame.dropna(subset=column).sort_values(column, kind="stable")
    return timed.drop_duplicates(key).set_index(key)


def noise(ratio, rse, other):
    """Two standard errors of `ratio`, of two times whose relative standard errors are `rse` and `other`."""
    return 2 * ratio * np.hypot(rse, other)


def verdict(ratio, noise):
    """``faster``, ``slower`` or, where `ratio` is within `noise` of 1, ``tie``; empty where there is no ratio. Where
    the noise is not known, any difference counts, and one above `MOST_NOISE` is never excused by it."""
    import pandas as pd

    noise = noise.fillna(0)
    found = [(1 - ratio <= noise.clip(upper=MOST_NOISE)) & (ratio - 1 <= noise), ratio > 1, ratio < 1]
    return pd.Series(np.select(found, ["tie", "faster", "slower"], ""), ratio.index)


def in_order(frame):
    """`frame` by family, resolution and workload; the rows of a workload keep their order."""
    known = {name: place for place, name in enumerate(_select.FAMILIES)}
    family = frame["family"].map(known).fillna(len(known))
    keys = frame.assign(_rank=family).sort_values(["_rank", "family", "resolution", "model"], kind="stable")
    return keys.drop(columns="_rank").reset_index(drop=True)


def plans(frame):
    """Rows of the method itself as a network runs it: tokens already in plan order."""
    return frame[(frame["provider"] == "tilewright") & frame["ordered"]]


def headline(frame):
    """Rows of the method under the policy that is praised, `HEADLINE`: tokens in plan order, and permuted inside."""
    mine = frame[frame["provider"] == "tilewright"]
    return mine[(mine[list(HEADLINE)] == list(HEADLINE.values())).all(axis=1)]


def dense(frame):
    """The row of the fastest dense attention of each workload of `frame`, else of the first one, which says why."""
    rows = frame[frame["provider"].isin(DENSE)]
    return rows.sort_values("p50_us", kind="stable").drop_duplicates("model")


def devices(frame):
    """The devices that the rows of a result were measured on, in words."""
    return ", ".join(sorted(set(frame["device"]) - {""})) or "device not recorded"


def paper_speedups(latency):
    """The paper's bars with ``speedup`` over its FlashAttention bar of the same family and resolution."""
    dense = latency[latency["provider"] == "flash_attention"].set_index(["family", "resolution"])["latency_ms"]
    latency = latency.join(dense.rename("dense_ms"), on=["family", "resolution"])
    return latency.assign(speedup=latency["dense_ms"] / latency["latency_ms"])


def labels(frame):
    """``{model: label}`` in the order of `frame`: the resolution, or all after the family where that is not enough."""
    models = frame.drop_duplicates("model")
    counts = models.groupby(["family", "resolution"])["model"].transform("size")
    return {
        row.model: f"{row.resolution:.0f} px" if count == 1 else row.model.partition("-")[2] or row.model
        for row, count in zip(models.itertuples(), counts, strict=True)
    }
