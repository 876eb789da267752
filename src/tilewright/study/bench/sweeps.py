"""The two sweeps over sizes: DynamicViT by resolution and patch, and the time that orders take (stage T5)."""

import resource

from tilewright import blocks, models, reorder, schedule, targets
from tilewright.baselines.sparse import DENSE
from tilewright.blocks import tiles
from tilewright.core import progress
from tilewright.core.errors import ConfigError
from tilewright.study.bench.rows import Tokens, now, run_baselines, run_schedule
from tilewright.targets.measure import measure

HEATMAP = (
    "resolution", "patch", "tokens", "status", "reason", "dense", "dense_p50_us", "plan_p50_us", "speedup",
    "max_abs_error", "device", "torch", "commit", "code", "time",
)  # fmt: skip
REORDER_TIMES = (
    "model", "tokens", "entries", "distinct_rows", "reorder", "seconds", "work_fraction", "peak_rss_bytes", "device",
    "commit", "code", "time",
)  # fmt: skip


# ASSUME: the plan of a cell, of a few tiles and regions, is good enough after so long.
SOLVE_SECONDS = 10.0


def plan_row(
    pattern, order, names, solver, effort, *, device="cpu", dtype=None, region_rows=128, split_keys=1024, seed=0
):
    """`pattern` carried through T2 to T5: the row of its plan with tokens in plan order, and the `Tokens`.

    Of the tiles `names` those that fit are used; where none does, the smallest slice that holds all queries.
    """
    ordered, _ = reorder.apply(pattern, order)
    names = tiles.fitting(names, ordered.shape, targets.facts(device).FEWEST_ROWS)
    covers = {name: blocks.extract(ordered, tiles.parse(name), region_rows) for name in names}
    options = {"device": device, "dtype": dtype, "seed": seed}
    profiles = {name: measure(cover, split_keys=split_keys, **options) for name, cover in covers.items()}
    limits = targets.limits(next(iter(profiles.values())).device)
    plan = schedule.solve(covers, profiles, limits, solver, time_limit_s=SOLVE_SECONDS, seed=seed)
    tokens = Tokens(ordered, **options)
    return run_schedule(plan, covers, tokens, effort)[0], tokens


def run_heatmap(resolution, patches, effort, *, device="cpu", max_tokens, order, names, solver, **options):
    """A row of `HEATMAP` for each of `patches`: the plan of DynamicViT-S at `resolution` pixels beside ``dense``, the
    fastest attention over all pairs.

    device: a kind; options: as of `plan_row`. What cannot be run, or has more than `max_tokens` tokens, is skipped with
    the reason.
    """
    rows = []
    for patch in progress.steps(patches, f"heat map {resolution} px"):
        cell = dict.fromkeys(HEATMAP, "") | {"resolution": resolution, "patch": patch, "status": "skipped"}
        rows.append(cell)
        facts = targets.describe(device)
        cell |= {"device": facts["name"], "torch": facts["versions"]["torch"]}
        cell["time"] = now()
        cell["tokens"] = count = 1 + (resolution // patch) ** 2
        if count > max_tokens:
            cell["reason"] = f"too many tokens: {count:,} over {max_tokens:,}"
            continue
        try:
            pattern = models.build(f"dynamicvit-s-{resolution}-p{patch}")
            plan, tokens = plan_row(pattern, order, names, solver, effort, device=device, **options)
        except ConfigError as error:
            cell["reason"] = str(error)
            continue
        dense = _fastest(run_baselines(DENSE, tokens, effort, max_dense_tokens=max_tokens))
        failed = [row for row in (plan, dense) if row["status"] != "ok"]
        cell |= {"max_abs_error": plan["max_abs_error"], "status": failed[0]["status"] if failed else "ok"}
        if failed:
            cell["reason"] = failed[0]["reason"]
            continue
        cell |= {"dense": dense["provider"], "dense_p50_us": dense["p50_us"], "plan_p50_us": plan["p50_us"]}
        cell["speedup"] = dense["p50_us"] / plan["p50_us"]
    return rows


def _fastest(rows):
    """The fastest row that is right, else the first."""
    return min((row for row in rows if row["status"] == "ok"), key=lambda row: row["p50_us"], default=rows[0])


def run_reorder_times(workloads, orders):
    """A row of `REORDER_TIMES` for each workload and order, smallest first: seconds of the ordering and how good it is.

    peak_rss_bytes: of this process so far; workloads are to be given from small to large.
    """
    rows = []
    # What is compiled or loaded once is no part of an order's time.
    for order in orders if workloads else ():
        reorder.apply(models.build(workloads[0]), order)
    for name in progress.steps(workloads, "reorder times"):
        pattern = models.build(name)
        for order in orders:
            _, info = reorder.apply(pattern, order)
            rows.append(
                {
                    "model": name,
                    "tokens": pattern.n_rows,
                    "entries": pattern.entries,
                    "distinct_rows": pattern.n_classes,
                    "reorder": order,
                    "seconds": info["seconds"],
                    "work_fraction": info["work_fraction"],
                    # ru_maxrss counts KiB on Linux.
                    "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                    "device": targets.describe("cpu")["name"],
                    **dict.fromkeys(("commit", "code"), ""),
                    "time": now(),
                }
            )
            print(f"{name} {order}: {info['seconds']:.2f} s, gathered work {info['work_fraction']:.4f} of dense")
    return rows
