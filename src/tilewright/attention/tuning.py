"""The fastest of a few schedules of one pattern, measured whole (stage T4).

Profiles predict to a few percent, and tiles differ by less: which of the best few is the fastest, only the device says.
So the finalists are run as they will be: checked against the reference, timed in turns, and the fastest is taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from tilewright import devices, reference
from tilewright.attention import backends
from tilewright.attention.blocks import Blocks
from tilewright.attention.masks import as_bias
from tilewright.attention.profile import Profile
from tilewright.attention.schedule import COLUMNS, TUNED, Schedule, Trial, solve
from tilewright.core.errors import ArtifactError, TilewrightError
from tilewright.core.provenance import sha256_arrays
from tilewright.core.timing import time_in_turns
from tilewright.devices import Limits
from tilewright.graph import Graph

# Fixed tiles that are tried: those predicted fastest.
FIXED = 3
# ASSUME: so many rows, spread over the pattern, show a kernel that is wrong.
CHECKED_ROWS = 256
# Of a timing: repetitions and seconds in all its turns, and the relative standard error at which a turn stops.
EFFORT: dict[str, Any] = {"min_reps": 15, "max_seconds": 0.15, "rse_target": 0.01}


def finalists(
    found: Schedule, blocks: Mapping[str, Blocks], profiles: Mapping[str, Profile], limits: Limits
) -> list[Schedule]:
    """The schedule that a solver `found`, greedy's, and those of the `FIXED` tiles alone that are predicted fastest."""
    alone = [solve({name: blocks[name]}, {name: profiles[name]}, limits, "greedy") for name in blocks]
    alone.sort(key=lambda schedule: schedule.predicted_us)
    return [found, *alone[:FIXED], solve(dict(blocks), dict(profiles), limits, "greedy")]


def fastest(
    schedules: Sequence[Schedule],
    blocks: Mapping[str, Blocks],
    graph: Graph,
    *,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    bias: Any = None,
    scale: float | None = None,
    seed: int = 0,
) -> Schedule:
    """The fastest of `schedules` of a `graph` in plan order, as a schedule whose solver is `TUNED`.

    blocks: of all their tiles. device: its kind. bias, scale: see `attention.backends`. Tokens stand in plan order,
    batch 1. Of schedules with the same work, the first one is tried. What is wrong or cannot run is not taken, and its
    trial says why. Raises `ArtifactError` where none is left.
    """
    begin, options = perf_counter(), {"heads": heads, "head_dim": head_dim, "dtype": dtype}
    distinct: dict[str, Schedule] = {}
    for schedule in schedules:
        distinct.setdefault(_work(schedule), schedule)
    tried = list(distinct.values())
    place = devices.facts(device).TORCH_DEVICE
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    q, k, v = (
        torch.randn(1, heads, n, head_dim, **drawn).to(place, dtype) for n in (graph.n_rows, graph.n_cols, graph.n_cols)
    )
    rows = reference.sample_rows(graph, max(1, graph.n_rows // CHECKED_ROWS), seed)
    added = None if bias is None else _added(as_bias(bias, heads, graph.shape), graph, place)
    expected = reference.attention_rows(graph, rows, q, k, v, bias=added, scale=scale)
    orders = {"row_order": graph.row_order, "col_order": graph.col_order, "ordered": True}
    calls: dict[int, Any] = {}
    reasons = [""] * len(tried)
    for i, schedule in enumerate(tried):
        try:
            call = backends.executor(device).prepare(schedule, blocks, **options, **orders, bias=bias, scale=scale)
            error = reference.relative_error(call(q, k, v)[:, :, rows], expected)
        except (TilewrightError, RuntimeError) as refusal:
            reasons[i] = f"{type(refusal).__name__}: {refusal}".splitlines()[0]
            continue
        # Not `>`: a NaN does not pass.
        if error <= reference.TOLERANCE[dtype]:
            calls[i] = call
        else:
            reasons[i] = f"relative error {error:.2g}, tolerance {reference.TOLERANCE[dtype]:.2g}"
    if not calls:
        raise ArtifactError(f"expected a schedule that runs, found: {'; '.join(reasons)}")
    runs = [lambda call=call: call(q, k, v) for call in calls.values()]
    times = dict(zip(calls, time_in_turns(runs, gpu=devices.facts(device).GPU_TIMER, **EFFORT), strict=True))
    trials = []
    for i, schedule in enumerate(tried):
        timed = {"p50_us": times[i].p50_us, "rse": times[i].rse} if i in times else {"reason": reasons[i]}
        trials.append(Trial(_used(schedule), schedule.solver, schedule.predicted_us, **timed))
    best = tried[min(times, key=lambda i: times[i].p50_us)]
    return replace(best, solver=TUNED, trials=tuple(trials), tuned_s=perf_counter() - begin)


def _used(schedule):
    """Names of the tiles that a schedule's items have."""
    return tuple(schedule.tiles[t] for t in np.unique(schedule.tile))


def _work(schedule):
    """A digest of what a schedule runs: its items, by the names of tiles."""
    _, tile = np.unique(schedule.tile, return_inverse=True)
    columns = [np.asarray(getattr(schedule, name)) for name in COLUMNS if name not in ("tile", "lane", "start_us")]
    return sha256_arrays(repr((_used(schedule), schedule.lengths)), tile, *columns)


def _added(bias, graph, place):
    """``bias(rows, keys) -> [H, R, K]`` of a `Bias`, for rows and keys in the order of `graph`."""
    table = bias.table.detach().to(place, torch.float64)

    def added(rows, keys):
        pairs = np.broadcast_to(
            bias.index(graph.row_order[rows][:, None], graph.col_order[keys]), (len(rows), len(keys))
        )
        # Pairs that are not allowed may have any index.
        return table[:, torch.from_numpy(np.clip(pairs, 0, table.shape[1] - 1).astype(np.int64)).to(place)]

    return added
