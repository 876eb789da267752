"""Reading what the other stages wrote, for tables and figures: strictly, and by content rather than by path."""

import csv
import io
import json
import zipfile
from pathlib import Path

import numpy as np

from tilewright.baselines.sparse import DENSE
from tilewright.core.errors import ArtifactError
from tilewright.study.tables import _select

_TIMES = ["p20_us", "p50_us", "p80_us", "rse", "cold_us", "useful_gflops", "executed_gflops", "tokens_per_s"]
NETWORK_TIMES = ["p20_us", "p50_us", "p80_us", "rse", "images_per_s", "attention_us", "rest_us", "gpu_us"]
RAGGED_TIMES = [
    *("p20_us", "p50_us", "p80_us", "rse", "latency_us", "host_us", "useful_gflops"),
    *("byte_floor_us", "floor_fraction"),
]
PRUNED_TIMES = ["p20_us", "p50_us", "p80_us", "rse", "images_per_s", "pack_us", "pack_share"]
# Kinds of CSV by the columns that each needs: text, and numbers (an empty field: not applicable, or not measured).
_KINDS = {
    "bench": (
        [
            *("model", "reorder", "tiles", "solver", "provider", "variant", "status", "reason", "ordered", "dtype"),
            *("device", "commit", "code"),
        ],
        [
            *("resolution", "batch", "heads", "head_dim", "tokens", "entries", "density", "max_abs_error"),
            *("relative_error", "checked_rows", "tolerance", "predicted_us", "objective_us", "bound_us", "gap"),
            *("items", "launches", "repetitions", "memory_bytes", *_TIMES),
        ],
    ),
    "network": (
        ["network", "family", "attention", "status", "reason", "dtype", "device", "commit", "code"],
        [
            *("resolution", "batch", "parameters", "max_abs_error", "relative_error", "tolerance"),
            *("attention_error", "attention_tolerance", "same_top1", "first_call_s", "repetitions", *NETWORK_TIMES),
        ],
    ),
    "ragged": (
        ["lengths", "provider", "call", "exact", "status", "reason", "dtype", "device", "commit", "code"],
        [
            *("heads", "head_dim", "images", "tokens", "max_abs_error", "relative_error", "tolerance", "repetitions"),
            *RAGGED_TIMES,
        ],
    ),
    "pruned": (
        [
            *("network", "variant", "pruner", "setting", "strategy", "mode", "status", "reason", "dtype", "device"),
            *("commit", "code"),
        ],
        [
            *("resolution", "batch", "tokens", "fewest_kept", "most_kept", "spread", "capacity", "inputs"),
            *("same_tokens", "max_abs_error", "relative_error", "tolerance", "same_top1", "max_abs_error_all"),
            *("same_top1_all", "attention_error", "largest_logit", *PRUNED_TIMES),
        ],
    ),
    "heatmap": (
        ["status", "reason", "dense", "device", "commit", "code"],
        ["resolution", "patch", "tokens", "dense_p50_us", "plan_p50_us", "speedup", "max_abs_error"],
    ),
    "reorder_time": (
        ["model", "reorder", "device", "commit", "code"],
        ["tokens", "entries", "distinct_rows", "seconds", "work_fraction", "peak_rss_bytes"],
    ),
    "paper_latency": (["family", "provider", "reorder", "policy"], ["resolution", "latency_ms"]),
    "paper_heatmap": ([], ["resolution", "patch", "paper_speedup"]),
    "claims": (["id", "experiments", "claim", "relation", "unit"], ["expected"]),
}
# Those that a run leaves in its logs.
ROWS = ("bench", "network", "ragged", "pruned", "heatmap", "reorder_time")
STATUSES = ("ok", "skipped", "failed")
# Solvers that solve no integer program.
HEURISTICS = ("greedy", "descent")
# The policy of the headline, chosen before measuring: what `tilewright.plan` makes of these patterns by itself.
HEADLINE = {"reorder": "window", "tiles": "mixed", "solver": "highs"}


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
        except (OSError, ValueError, KeyError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            raise ArtifactError(f"{path}: expected {' or '.join(expected)}, found a damaged file: {error}") from error
        if kind not in found:
            raise ArtifactError(f"{path}: expected {' or '.join(expected)}, found {kind}")
        found[kind].append(path)
    for kind, paths in found.items():
        if not paths and kind not in optional:
            listed = ", ".join(map(str, inputs)) or "no files"
            raise ArtifactError(f"expected a {kind} file among the inputs, found {listed}")
    return found


def _csv_kind(path):
    with open(path, encoding="utf-8") as stream:
        columns = stream.readline().strip().split(",")
    lacks = {kind: {*words, *numbers} - set(columns) for kind, (words, numbers) in _KINDS.items()}
    share = {kind: len(some) / sum(map(len, _KINDS[kind])) for kind, some in lacks.items()}
    nearest = min(share, key=share.get)
    if share[nearest] > 0.5:
        return f"a CSV with the columns {', '.join(columns)}"
    # Rows of another version lack some.
    return nearest if not lacks[nearest] else f"{nearest} rows without {', '.join(sorted(lacks[nearest]))}"


def _header_kind(path):
    if path.suffix == ".npz":
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            return json.loads(bytes(archive["tilewright"])).get("kind")
    return json.loads(path.read_bytes()).get("kind")


def by_kind(inputs, **loaders):
    """The files among `inputs`, loaded: ``{kind: {path: loaded}}`` for `loaders` ``{kind: load}``. Raises as `sort`."""
    found = sort(inputs, tuple(loaders))
    return {kind: {path: loaders[kind](path) for path in paths} for kind, paths in found.items()}


def frames(inputs, *expected):
    """The CSV files `inputs` as one DataFrame per kind, in the order of `expected`.

    Raises as `sort`, and `ArtifactError` for text where a number belongs, and for a status that is none.
    """
    found = sort(inputs, expected)
    return [_frame(found[kind], kind) for kind in expected]


def _frame(paths, kind):
    """The rows of CSV files of one kind."""
    import pandas as pd

    # A study leaves hundreds of files of a few rows: one frame of all is made much faster than one for each file.
    found = [_read_csv(path, kind) for path in paths]
    columns = dict.fromkeys(name for header, _ in found for name in header)
    frame = pd.DataFrame([row for _, rows in found for row in rows], columns=list(columns))
    return frame.astype(dict.fromkeys(_KINDS[kind][1], float))


def _read_csv(path, kind):
    """``(columns, rows)`` of a file, a dict for each row.

    Only an empty field is missing: "none" is an order, and NA could be a name.
    """
    words, numbers = _KINDS[kind]
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream, restval="", strict=True)
            header, rows = reader.fieldnames, list(reader)
        for row in rows:
            row.update({name: float(row[name] or "nan") for name in numbers})
            if None in row:
                raise ValueError(f"more fields than columns: {row[None]}")
    except (OSError, ValueError, csv.Error) as error:
        raise ArtifactError(f"{path}: expected a {kind} file, found: {error}") from error
    if "status" in words:
        known(path, "status", [row["status"] for row in rows], STATUSES)
    return header, rows


def known(path, what, values, names):
    """Raise `ArtifactError` unless all `values` that a file holds are among `names`."""
    if wrong := sorted(set(values) - set(names)):
        raise ArtifactError(f"{path}: {what}: expected {', '.join(names)}, found {', '.join(wrong)}")


def bench(frame):
    """Bench rows with what tables and figures ask of them; a row that did not run has no measured number.

    Rows come `in_order`. Adds ``family`` (of the workload's name), ``policy`` (greedy, descent, ilp or empty),
    ``dense`` (the fastest of `DENSE` of the same workload, type, batch and device), ``dense_us`` (its p50) and
    ``speedup`` over it; ``ordered`` becomes a bool, false where a call permutes its tokens.
    """
    frame = frame.copy()
    frame["family"] = frame["model"].map(_select.family)
    frame["policy"] = frame["solver"].map(lambda solver: solver if solver in ("", *HEURISTICS) else "ilp")
    frame["ordered"] = frame["ordered"].str.lower() != "false"
    frame.loc[frame["status"] != "ok", _TIMES] = np.nan
    key = ["model", "dtype", "batch", "device"]
    fastest = best(frame[frame["provider"].isin(DENSE)], key)[["provider", "p50_us"]]
    frame = frame.join(fastest.set_axis(["dense", "dense_us"], axis=1), on=key).fillna({"dense": ""})
    frame["speedup"] = frame["dense_us"] / frame["p50_us"]
    return in_order(frame)


def best(frame, key, column="p50_us"):
    """The row with the least `column` for each value of `key`, which becomes the index."""
    timed = frame.dropna(subset=column).sort_values(column, kind="stable")
    return timed.drop_duplicates(key).set_index(key)


def noise(ratio, rse, other):
    """Two standard errors of `ratio`, of two times whose relative standard errors are `rse` and `other`."""
    return 2 * ratio * np.hypot(rse, other)


def verdict(ratio, noise):
    """``faster``, ``slower`` or, where `ratio` is within `noise` of 1, ``tie``; empty where there is no ratio. Where
    the noise is not known, any difference counts."""
    import pandas as pd

    found = [(ratio - 1).abs() <= noise.fillna(0), ratio > 1, ratio < 1]
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
