"""Speed-up of DynamicViT's plans over dense attention, by resolution and patch size (stage T5)."""

from typing import Literal

from tilewright import devices, masks
from tilewright.attention import backends, reorder
from tilewright.attention.schedule.search import NAMES as SOLVERS
from tilewright.attention.schedule.search import entered
from tilewright.core import progress
from tilewright.core.errors import ConfigError, PatternError
from tilewright.masks import dynamicvit
from tilewright_study import sections
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.measure import lock
from tilewright_study.measure import rows as _rows
from tilewright_study.measure.rows import Count, Number

TABLES = ("heatmap",)
FIGURES = ("heatmap",)

# ASSUME: the plan of a cell, of a few tiles and regions, is good enough after this time.
SOLVE_SECONDS = 10.0


class Values(sections.Section, frozen=True):
    """What all resolutions are run with.

    patches: sides of the patches, in pixels
    max_tokens: a cell with more tokens is blank, with the reason
    order: the order of its plans
    solver: the solver of its plans
    max_seconds: a timing stops after this time, in seconds
    """

    patches: tuple[int, ...]
    max_tokens: int
    order: str
    solver: str
    max_seconds: float


class Section(Values, frozen=True):
    """Speed-up of DynamicViT by resolution and patch size.

    resolutions: sides of the images, in pixels
    """

    resolutions: tuple[int, ...]

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range."""
        sections.known("heatmap.order", "order", (self.order,), reorder.NAMES)
        sections.known("heatmap.solver", "solver", (self.solver,), SOLVERS)
        sections.at_least("heatmap.max_tokens", 1, [self.max_tokens])
        for place in ("resolutions", "patches"):
            sections.at_least(f"heatmap.{place}", 1, getattr(self, place))
            sections.distinct(f"heatmap.{place}", getattr(self, place))
        sections.above_zero("heatmap.max_seconds", self.max_seconds)


class Settings(Values, frozen=True):
    """What one resolution is run with. tiles, split_keys: of the whole study."""

    tiles: tuple[str, ...]
    split_keys: int | None


class Row(_rows.Judged, frozen=True, kw_only=True):
    """A cell of the map.

    reorder, solver: of the plan; dense: the fastest attention over all pairs; speedup: of the plan over it.
    """

    kind: Literal["heatmap"] = "heatmap"
    version: Literal[1] = 1
    resolution: Count = None
    patch: Count = None
    tokens: Count = None
    reorder: str = ""
    solver: str = ""
    dense: str = ""
    dense_p50_us: Number = None
    plan_p50_us: Number = None
    speedup: Number = None
    max_abs_error: Number = None


NAMED = "heat map {resolution} px, patch {patch}"


def cases(config):
    """The resolutions; none for a map without a cell."""
    return [str(resolution) for resolution in config.heatmap.resolutions] if config.heatmap.patches else []


def settings(config, case):
    """`Settings` of one resolution."""
    return sections.taken(Settings, config.heatmap, tiles=config.tiles, split_keys=config.split_keys)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    return [{"reorder": settings.order, "solver": settings.solver}]


def modules(row, device):
    """Modules that a row's time depends on, see `experiments`."""
    return [
        "tilewright_study.experiments.attention.run",
        # Of any size: the gate is among them.
        *masks.modules("dynamicvit-s-224"),
        f"tilewright.attention.reorder.{row['reorder']}",
        *entered(row["solver"]),
        *(f"tilewright_study.baselines.sparse.{name}" for name in sparse_baselines.DENSE),
        *devices.modules(device, *backends.PLANNING),
    ]


def size(case, settings):
    """Numbers that a case holds: a token attends to at most a quarter of all on average, and graphs with too many
    entries are refused, see `masks.dynamicvit`."""
    return min(settings.max_tokens**2 // 4, dynamicvit.MAX_ENTRIES)


def run(case, settings, how):
    """Yield a row for each patch of the resolution `case`. A cell that cannot run is skipped, with the reason."""
    resolution = _resolution(case)
    facts = devices.describe(how.device)
    for patch in progress.with_progress(settings.patches, f"heat map {resolution} px"):
        known = {"resolution": resolution, "patch": patch, "reorder": settings.order, "solver": settings.solver}
        tokens = 1 + (resolution // patch) ** 2
        known |= {"tokens": tokens, **_rows.machine(facts), "time": _rows.now()}
        if tokens > settings.max_tokens:
            reason = f"too many tokens: {tokens:,} over {settings.max_tokens:,}"
            yield known | {"status": "skipped", "reason": reason}
            continue
        try:
            yield known | cell(f"dynamicvit-s-{resolution}-p{patch}", settings, how)
        except (ConfigError, PatternError) as error:
            yield known | {"status": "skipped", "reason": str(error)}


def cell(name, settings, how):
    """Columns of one cell: the plan of the pattern `name`, with tokens in plan order, beside the fastest dense
    attention."""
    from tilewright_study.experiments.attention import run as _attention

    effort = how.effort(settings.max_seconds)
    # Of 65,537 tokens it takes long, on the host alone.
    with lock.untimed():
        plan = make_plan(masks.build(name), settings, how)
    tokens = _attention.Tokens(plan.graph, device=how.device, dtype=how.dtype, seed=how.seed)
    (ours,) = _attention.run_schedule(plan.schedule, plan.blocks, tokens, effort, orders=(True,))
    rows = _attention.run_baselines(sparse_baselines.DENSE, tokens, effort, max_dense_tokens=settings.max_tokens)
    dense = min((row for row in rows if row["status"] == "ok"), key=lambda row: row["p50_us"], default=rows[0])
    for row in (ours, dense):
        if row["status"] != "ok":
            failed = {name: row[name] for name in ("status", "reason")}
            return failed | {"max_abs_error": ours.get("max_abs_error")}
    return {
        "dense": dense["provider"],
        "dense_p50_us": dense["p50_us"],
        "plan_p50_us": ours["p50_us"],
        "speedup": dense["p50_us"] / ours["p50_us"],
        "max_abs_error": ours["max_abs_error"],
    }


def make_plan(pattern, settings, how):
    """The `tilewright.Plan` of a `pattern`, of those tiles of the study that fit it."""
    import torch

    from tilewright.attention import plan as api
    from tilewright.attention.blocks import tiles

    return api.plan(
        pattern,
        heads=pattern.meta["heads"],
        head_dim=pattern.meta["head_dim"],
        dtype=getattr(torch, how.dtype),
        device=how.device,
        reorder=settings.order,
        tiles=tiles.fitting(settings.tiles, pattern.shape, devices.facts(how.device).FEWEST_ROWS),
        solver=settings.solver,
        split_keys=settings.split_keys,
        time_limit_s=SOLVE_SECONDS,
        seed=how.seed,
    )


def remark(row):
    """What the log says of a row that passed."""
    return f"{row['plan_p50_us']:,.1f} us, {row['speedup']:.2f} times as fast as {row['dense']}"


def _resolution(case):
    if not (case.isdecimal() and int(case)):
        raise ConfigError(f"case {case!r}: expected a resolution in pixels, such as 224")
    return int(case)
