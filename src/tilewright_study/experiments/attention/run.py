"""Schedules and baselines on one pattern: a row for each, with its check and, if it passed, its time (stage T5).

A row that did not pass has the status ``failed`` and no time; one that could not run has ``skipped``; both say why.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from tilewright import devices, reference
from tilewright.attention import native
from tilewright.attention.profile import DTYPES
from tilewright.core import registry
from tilewright.core.errors import ArtifactError
from tilewright.core.timing import TURNS, Checked, time_call, time_gpu, time_host, time_in_turns
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.measure import ceilings
from tilewright_study.measure.checks import checked, errors, refusal, settled
from tilewright_study.measure.device import copy_bandwidth, time_cold
from tilewright_study.measure.rows import machine, now
from tilewright_study.schedules import Skipped

# ASSUME: a baseline that needs more than this for its tables, of masks or bits, is not worth waiting for.
BASELINE_BYTES = 2 << 30
# Whether tokens are in plan order, or permuted inside the call.
ORDERS = (True, False)


class Tokens:
    """Standard normal q, k, v of one graph on a device, and what attention over its pattern, or over all pairs, makes
    of them."""

    def __init__(self, graph, *, heads=None, head_dim=None, dtype=None, batch=1, seed=0, device="cpu"):
        """Draw the tokens, in the order of `graph`, the same on every `device`. heads, head_dim: default those of its
        model; dtype: default float32.

        Raises `ArtifactError` for a model without heads and head_dim, `DeviceError` and `UnknownNameError`.
        """
        self.graph, self.batch, self.seed, self.device = graph, batch, seed, devices.describe(device)
        self.heads, self.head_dim = (
            graph.meta.get(name) if value is None else value
            for name, value in (("heads", heads), ("head_dim", head_dim))
        )
        if self.heads is None or self.head_dim is None:
            raise ArtifactError("the graph states no heads and head_dim; pass --heads and --head-dim")
        dtype = dtype or DTYPES[0]
        registry.check("dtype", dtype, DTYPES)
        self.dtype = getattr(torch, dtype)
        generator, place = torch.Generator().manual_seed(seed), devices.facts(device).TORCH_DEVICE
        self.ordered = tuple(
            torch.randn(batch, self.heads, n, self.head_dim, generator=generator).to(place, self.dtype)
            for n in (graph.shape[0], graph.shape[1], graph.shape[1])
        )
        # A GPU checks all rows in the time that a CPU takes for a sample.
        step = 1 if self.gpu else reference.stride(graph.n_rows)
        self.rows = reference.sample_rows(graph, step, seed)

    @property
    def gpu(self):
        """Whether calls are timed by a GPU's own clock."""
        return devices.facts(self.device["kind"]).GPU_TIMER

    @property
    def setting(self):
        """What a baseline is prepared for, see `baselines`."""
        sizes = {"batch": self.batch, "heads": self.heads, "head_dim": self.head_dim}
        return sizes | {"dtype": self.dtype, "device": self.device["kind"]}

    @cached_property
    def natural(self):
        """q, k, v with tokens in the natural order."""
        g = self.graph
        orders = g.row_order, g.col_order, g.col_order
        return tuple(
            x if order is None else x[:, :, np.argsort(order)] for x, order in zip(self.ordered, orders, strict=True)
        )

    @cached_property
    def masked_result(self):
        """float64 [B, H, R, D]: the oracle's result for `rows`."""
        return reference.attention_rows(self.graph, self.rows, *self.ordered)

    @cached_property
    def dense_result(self):
        """float64 [B, H, R, D]: dense attention of `rows`."""
        return reference.dense_rows(self.rows, *self.ordered)

    def of(self, graph):
        """Tokens of another graph, with the same sizes and seed."""
        shape = {"heads": self.heads, "head_dim": self.head_dim, "batch": self.batch}
        dtype = str(self.dtype).removeprefix("torch.")
        return Tokens(graph, **shape, dtype=dtype, seed=self.seed, device=self.device["kind"])

    def row(self, **facts):
        """A row with what is known of the graph, the tokens and the device, and `facts`."""
        g, meta, tokens = self.graph, self.graph.meta, self.graph.n_rows
        known = {
            "model": meta.get("model", ""),
            "reorder": meta.get("reorder", {}).get("order", "none" if g.row_order is None else ""),
            "family": meta.get("family", ""),
            "resolution": meta.get("resolution", ""),
            "batch": self.batch,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tokens": tokens,
            "entries": g.entries,
            "density": g.density,
            "tolerance": reference.TOLERANCE[self.dtype],
            **machine(self.device),
            "time": now(),
        }
        return known | {"status": "ok"} | facts

    def checked(self, call, expected, tokens, rows, executed, effort, **facts):
        """The row of ``call(*tokens)``: its check of `rows` against `expected`, and only if it passes, its time.

        executed: pairs of query and key that one head computes, padding included.
        """
        row, timed = self.compared(call, expected, tokens, rows, **facts)
        if timed is None:
            return row
        time_one = time_gpu if self.gpu else time_call
        return self.timed(row, timed, executed, effort, time_one(timed, **effort.limits))

    def compared(self, call, expected, tokens, rows, **facts):
        """``(row, call)``: the row of ``call(*tokens)`` with its check of `rows` against `expected` and without a time,
        and what is to be timed, see `checks.checked`."""

        def columns(found):
            return {**errors(found[:, :, rows], expected), "checked_rows": len(rows)}

        return checked(partial(call, *tokens), columns, self.row(**facts), like=tokens[0])

    def timed(self, row, call, executed, effort, timing, turns=1):
        """A `row` that passed its check with the `timing` of its `call`, and what else is measured of it."""
        facts = timing.columns | {"turns": turns} | (self._elsewhere(call, effort, timing.method) if self.gpu else {})
        per_us = 4 * self.head_dim * self.heads * self.batch / facts["p50_us"] / 1e3
        facts["useful_gflops"], facts["executed_gflops"] = self.graph.entries * per_us, executed * per_us
        facts["tokens_per_s"] = self.batch * self.graph.n_rows / facts["p50_us"] * 1e6
        return settled(row, call, facts | (self._judged(facts) if self.gpu else {}))

    def _elsewhere(self, call, effort, method):
        """Of a call on a GPU, how it was timed, and its time with a cold cache and by the host's clock."""
        latency_us, host_us = time_host(call, **effort.limits)
        cold_us = time_cold(call, self.device["l2_bytes"], **effort.limits)
        return {"timing": method, "cold_us": cold_us, "latency_us": latency_us, "host_us": host_us}

    def _judged(self, facts):
        """The measured time and rate beside what the GPU allows at best."""
        sizes = {"batch": self.batch, "heads": self.heads, "head_dim": self.head_dim}
        moved = ceilings.floor_bytes(self.graph, **sizes, itemsize=self.dtype.itemsize)
        floor_us = moved / copy_bandwidth() * 1e6
        ceiling = ceilings.softmax_bound_gflops(self.device, self.head_dim, self.dtype)
        return {
            "byte_floor_us": floor_us,
            "floor_fraction": floor_us / facts["p50_us"],
            "ceiling_fraction": None if ceiling is None else facts["executed_gflops"] / ceiling,
        }


def run_schedule(schedule, blocks, tokens, effort, *, tiles=None, orders=ORDERS):
    """`run_schedules` of one, with `tokens` of its graph. tiles: name of the tile set."""
    return run_schedules([(schedule, blocks, tiles)], tokens, effort, orders)[0]


def run_schedules(schedules, tokens, effort, orders=ORDERS):
    """For each ``(schedule, blocks, name of the tile set or None)`` of one graph, a row for each of `orders`. Those of
    a `Skipped` one say why.

    tokens: `Tokens` of the graph that the schedules are for. All are checked, and then timed in turns.
    ``memory_bytes`` are the executor's tables and an estimate of the most that it holds in a call. Raises
    `ArtifactError` for parts that do not belong together.
    """
    rows = _in_turns([run for found in schedules for run in _runs(*found, tokens, orders)], effort)
    return [rows[i : i + len(orders)] for i in range(0, len(rows), len(orders))]


@dataclass
class _Run:
    """A row of a schedule or a baseline and, where it passed its check, the call to time, the pairs that one head
    computes, and the tokens."""

    row: dict
    call: Checked | None = None
    executed: int = 0
    tokens: Tokens | None = None


def _in_turns(runs, effort, plan=None):
    """The rows of `runs`: those that passed their checks are timed in turns, and beside them the `_Run` of a plan."""
    right = [run for run in (*runs, plan) if run is not None and run.call is not None]
    gpu = any(run.tokens.gpu for run in right)
    timings = time_in_turns([run.call for run in right], gpu=gpu, **effort.limits)
    for run, timing in zip(right, timings, strict=True):
        run.row = run.tokens.timed(run.row, run.call, run.executed, effort, timing, TURNS)
    if plan in right and plan.row["status"] == "ok":
        beside = {"plan_us": plan.row["p50_us"], "plan_rse": plan.row["rse"]}
        return [run.row | (beside if run.row["status"] == "ok" else {}) for run in runs]
    return [run.row for run in runs]


def _runs(schedule, blocks, tiles, tokens, orders):
    """The `_Run` of a schedule in each of `orders`, checked."""
    graph = tokens.graph
    if graph.id != schedule.graph_id:
        raise ArtifactError(f"expected the graph {schedule.graph_id} of the schedule, found {graph.id}")
    facts = {"provider": "tilewright", "tiles": tiles or "+".join(schedule.tiles), "solver": schedule.solver}
    if isinstance(schedule, Skipped):
        facts |= {"status": "skipped", "reason": schedule.reason}
        return [_Run(tokens.row(**facts, ordered=ordered)) for ordered in orders]
    facts |= {name: getattr(schedule, name) for name in ("predicted_us", "objective_us", "bound_us", "gap")}
    facts |= {
        "items": len(schedule.tile),
        "own_us": schedule.tiles_us,
        "variant": schedule.runs if schedule.form else "",
    }
    return [_run(schedule, blocks, tokens, facts, ordered) for ordered in orders]


def _run(schedule, blocks, tokens, facts, ordered):
    graph = tokens.graph
    executor = native.executor(
        schedule,
        blocks,
        graph,
        device=tokens.device["kind"],
        heads=tokens.heads,
        head_dim=tokens.head_dim,
        dtype=tokens.dtype,
        row_order=graph.row_order,
        col_order=graph.col_order,
        ordered=ordered,
    )
    places = tokens.rows if ordered or graph.row_order is None else graph.row_order[tokens.rows]
    facts = facts | {
        "ordered": ordered,
        "launches": len(executor.launches),
        "memory_bytes": executor.memory_bytes + executor.peak_bytes(tokens.batch),
    }
    inputs = tokens.ordered if ordered else tokens.natural
    row, call = tokens.compared(executor, tokens.masked_result, inputs, places, **facts)
    return _Run(row, call, executor.executed, tokens)


def run_baselines(names, tokens, effort, *, max_dense_tokens, forms=None, plan=None):
    """A row of each of the baselines `names`, in its fastest variant, tokens in the order of the graph of `tokens`.

    forms: ``{baseline: variants}`` of those that do not run in all. In an order other than the natural one, a second
    row is of that variant with tokens permuted inside the call. More than `max_dense_tokens` keys are not attended
    densely. Where a baseline has several variants a first timing chooses one; then all are timed in turns.
    ``memory_bytes`` are the tables that a baseline holds. The first call, which may compile, is not counted; its time
    is printed. plan: a schedule, its blocks, the name of its tile set and `Tokens` of its graph. It takes turns with
    them, as a host may be faster in another minute, and their rows say what it took. Raises `UnknownNameError`.
    """
    runs, beside = [], None if plan is None else _runs(*plan, orders=(True,))[0]
    for name in names:
        module = sparse_baselines.member(name)
        facts = {"provider": name, "ordered": True}
        if module.DENSE and tokens.graph.n_cols > max_dense_tokens:
            reason = f"{tokens.graph.n_cols:,} tokens; dense attention is run up to {max_dense_tokens:,}"
            runs.append(_Run(tokens.row(status="skipped", reason=reason, **facts)))
            continue
        try:
            asked = tokens.of(module.part(tokens.graph)) if hasattr(module, "part") else tokens
        except sparse_baselines.Unavailable as reason:
            runs.append(_Run(tokens.row(status="skipped", reason=str(reason), **facts)))
            continue
        runs.append(best := _fastest(module, _variants(name, forms), asked, effort, facts))
        if best.call is not None and asked.graph.row_order is not None and not module.DENSE:
            runs.append(_variant(module, best.row["variant"], asked, facts | {"ordered": False}))
    return _in_turns(runs, effort, beside)


def _variants(name, forms):
    """Forms of a baseline, of all those that `forms`, ``{baseline: forms}``, name. Raises `UnknownNameError`."""
    known = sparse_baselines.member(name).VARIANTS
    chosen = (forms or {}).get(name, known)
    for form in chosen:
        registry.check(f"form of {name}", form, known)
    return chosen


def _fastest(module, variants, tokens, effort, facts):
    """The `_Run` of the fastest of the `variants` of a baseline that is right, else of one that is wrong, else of one
    that could not run. The tables of the others are freed."""
    ranks, least, best = ("ok", "failed", "skipped"), (), None
    for variant in variants:
        run = _variant(module, variant, tokens, facts)
        row = run.row
        if run.call is not None and len(variants) > 1:
            timing = (time_gpu if tokens.gpu else time_call)(run.call, **effort.limits)
            row = settled(row, run.call, timing.columns)
            run = run if row["status"] == "ok" else _Run(row)
        rank = ranks.index(row["status"]), row.get("p50_us", 0)
        if best is None or rank < least:
            least, best = rank, run
    return best


def compile_baselines(names, tokens, forms=None):
    """Make the first call of every form of those baselines that torch compiles: calls of another process, over the
    same pattern with tokens of the same sizes, find them on disk. forms: as for `run_baselines`. Yields their names."""
    for name in [name for name in names if name in sparse_baselines.COMPILED]:
        module = sparse_baselines.member(name)
        for variant in _variants(name, forms):
            # What cannot run says so where it is timed.
            with suppress(sparse_baselines.Unavailable, RuntimeError):
                _prepared(module, variant, tokens).call(*tokens.ordered)
                yield f"{name} {variant}"


def _prepared(module, variant, tokens):
    """One form of the baseline `module`, ready for `tokens`."""
    return module.prepare(tokens.graph, variant=variant, **tokens.setting, max_bytes=BASELINE_BYTES)


def _variant(module, variant, tokens, facts):
    """The `_Run` of one form of a baseline, checked."""
    facts = facts | {"variant": variant}
    inputs, places = tokens.ordered, tokens.rows
    try:
        ready = _prepared(module, variant, tokens)
        if not facts["ordered"]:
            ready = replace(ready, call=_permuting(ready.call, tokens.graph, tokens.device["kind"]))
            inputs, places = tokens.natural, tokens.graph.row_order[tokens.rows]
        begin = time.perf_counter()
        ready.call(*inputs)
    except sparse_baselines.Unavailable as reason:
        return _Run(tokens.row(status="skipped", reason=str(reason), **facts))
    except RuntimeError as error:
        return _Run(tokens.row(status="failed", reason=refusal(error), **facts))
    print(f"{facts['provider']} {variant}: first call {time.perf_counter() - begin:.2f} s, not counted")
    expected = tokens.masked_result if module.MASKED else tokens.dense_result
    facts |= {"memory_bytes": ready.held_bytes}
    row, call = tokens.compared(ready.call, expected, inputs, places, **facts)
    return _Run(row, call, ready.executed, tokens)


def _permuting(call, graph, device):
    """`call` for tokens in the natural order: they are put in the order of `graph`, and the result back."""
    rows, cols, back = (
        torch.from_numpy(order.astype(np.int64)).to(device)
        for order in (graph.row_order, graph.col_order, np.argsort(graph.row_order))
    )

    def run(q, k, v):
        out = call(q.index_select(2, rows), k.index_select(2, cols), v.index_select(2, cols))
        return out.index_select(2, back)

    return run
