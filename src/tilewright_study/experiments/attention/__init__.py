"""Attention over one pattern: schedules and baselines, checked against the oracle and then timed (stage T5).

Its cases need the files of stages T1 to T4, so that it has rules of its own and runs in `tilewright_study.stages.bench`
and `tilewright_study.stages.baselines`.
"""

from typing import Literal

from tilewright import devices, masks
from tilewright.attention import reorder
from tilewright.attention.schedule.search import entered
from tilewright.core.errors import ConfigError, UnknownNameError
from tilewright_study import sections
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Flag, Number

TABLES = ("latency", "speedup", "fill", "prediction", "solvers", "policy", "policy_summary")
FIGURES = ("overview", "latency", "speedup", "pattern", "fill", "prediction", "policy")

# Its files lie beside those of the stages before, at results/logs/<graph>/…
FOLDER = ""
OURS = "tilewright"
# The policy of the headline, chosen before measuring: what `tilewright.plan` makes of these patterns by itself.
HEADLINE = {"reorder": "window", "tiles": "mixed", "solver": "highs"}


class Section(sections.Section, frozen=True):
    """Attention over the patterns of `workloads`: schedules and their baselines.

    schedules: the solvers whose schedules are run, by tile set, null for none
    baselines: what schedules are measured against
    forms: by baseline and the first word of workloads' names, the forms of it that run; all of them where nothing is
        said, or null
    baseline_orders: orders in which the baselines get their tokens; those that work through all pairs run in the first
    max_dense_tokens: a longer sequence is not run densely, and its row says so
    max_seconds: a timing stops after this time, in seconds
    """

    schedules: dict[str, tuple[str, ...] | None]
    baselines: tuple[str, ...]
    forms: dict[str, dict[str, tuple[str, ...]] | None]
    baseline_orders: tuple[str, ...]
    max_dense_tokens: int
    max_seconds: float

    @property
    def runs(self):
        """Pairs (tile set, solver) whose schedules are run."""
        return tuple((name, solver) for name, chosen in self.schedules.items() for solver in chosen)

    def check(self, config):
        """Raise `ConfigError` for unknown names and for limits out of range."""
        sections.selection("attention.schedules", tuple(self.schedules))
        sections.known("attention.schedules", "tile set", self.schedules, config.tile_sets)
        for name, chosen in self.schedules.items():
            sections.selection(f"attention.schedules.{name}", chosen)
            sections.known(f"attention.schedules.{name}", "solver", chosen, config.solvers)
        sections.selection("attention.baselines", self.baselines)
        sections.known("attention.baselines", "baseline", self.baselines, sparse_baselines.NAMES)
        sections.known("attention.forms", "baseline", self.forms, sparse_baselines.NAMES)
        for name, chosen in self.forms.items():
            for family, forms in (chosen or {}).items():
                sections.selection(f"attention.forms.{name}.{family}", forms)
        sections.selection("attention.baseline_orders", self.baseline_orders)
        sections.known("attention.baseline_orders", "order", self.baseline_orders, reorder.NAMES)
        sections.at_least("attention.max_dense_tokens", 1, [self.max_dense_tokens])
        sections.above_zero("attention.max_seconds", self.max_seconds)


class Row(rows.Waited, frozen=True, kw_only=True):
    """A provider on one pattern.

    relative_error: see `reference.relative_error`. A GPU is timed with a warm second-level cache. What follows is blank
    on CPUs. cold_us: with a cold cache; byte_floor_us: `ceilings.floor_bytes` at the bandwidth of a copy;
    floor_fraction: of p50_us; ceiling_fraction: executed_gflops over `ceilings.softmax_bound_gflops`. turns: how often
    it was measured, in turns with others: of several, rse is the standard error between them, else that within one.
    Of a schedule, variant is the form of torch's own attention that it runs, blank for its tiles, and own_us what these
    are predicted to take. Of a baseline, plan_us and plan_rse are of the headline's plan in turns with it.
    """

    LATER = ("own_us", "plan_us", "plan_rse")

    kind: Literal["attention"] = "attention"
    version: Literal[2] = 2
    model: str = ""
    family: str = ""
    resolution: Count = None
    reorder: str = ""
    tiles: str = ""
    solver: str = ""
    provider: str = ""
    variant: str = ""
    ordered: Flag = None
    batch: Count = None
    heads: Count = None
    head_dim: Count = None
    tokens: Count = None
    entries: Count = None
    density: Number = None
    turns: Count = None
    cold_us: Number = None
    predicted_us: Number = None
    own_us: Number = None
    plan_us: Number = None
    plan_rse: Number = None
    objective_us: Number = None
    bound_us: Number = None
    gap: Number = None
    items: Count = None
    launches: Count = None
    useful_gflops: Number = None
    executed_gflops: Number = None
    byte_floor_us: Number = None
    floor_fraction: Number = None
    ceiling_fraction: Number = None
    tokens_per_s: Number = None
    memory_bytes: Count = None


def forms(config, workload):
    """Words ``<baseline>=<form>``: forms that baselines run in on a workload, of those that do not run in all."""
    family, stated = workload.partition("-")[0], config.attention.forms.items()
    return [f"{name}={form}" for name, chosen in stated for form in (chosen or {}).get(family, ())]


def cases(config):
    """``<graph>/baselines`` and ``<graph>/<order>/<tile set>.<solver>`` for every workload."""
    section = config.attention
    return [f"{m}/baselines" for m in config.workloads] + [
        f"{m}/{r}/{t}.{s}" for m in config.workloads for r in config.orders for t, s in section.runs
    ]


def scheduled(config, model, order):
    """What decides the rows of schedules of one graph in one order, as `modules` asks for it."""
    return [{"model": model, "reorder": order, "provider": OURS, "solver": s} for _, s in config.attention.runs]


def compared(config, model):
    """What decides the rows of the baselines of one graph, and of the plan beside them."""
    section = config.attention
    names = [(name, order) for name in section.baselines for order in section.baseline_orders]
    found = [{"model": model, "reorder": order, "provider": name, "solver": ""} for name, order in names]
    return found + [{"model": model, "provider": OURS, **HEADLINE}] * beside(config)


def beside(config):
    """Whether the study runs the plan that baselines are timed beside."""
    return HEADLINE["reorder"] in config.orders and (HEADLINE["tiles"], HEADLINE["solver"]) in config.attention.runs


def modules(row, device):
    """Modules that a row's time depends on, see `experiments`."""
    order = [f"tilewright.attention.reorder.{row['reorder']}"] if row["reorder"] in reorder.NAMES else []
    made = [f"{__package__}.run", *_family(row["model"]), *order]
    if row["provider"] != OURS:
        return [*made, f"tilewright_study.baselines.sparse.{row['provider']}"]
    found = devices.modules(device, "attention.executor", "attention.probe")
    return [
        *made,
        "tilewright.attention.native",
        "tilewright.attention.blocks",
        "tilewright.attention.schedule",
        *entered(row["solver"]),
        *found,
    ]


def _family(model):
    """The module of a workload's family; none for a name of the user's own."""
    try:
        return [masks.parse(model)[0].__name__]
    except (UnknownNameError, ConfigError):
        return []
