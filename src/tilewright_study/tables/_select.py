"""Which files the configured study makes: the paths that tables and figures ask for."""

from tilewright_study import experiments

PAPER_LATENCY = "expected/paper/latency.csv"
PAPER_HEATMAP = "expected/paper/heatmap.csv"
PAPER_RAGGED = "expected/paper/ragged.csv"
PAPER_CONFIGURE = "expected/paper/configure.csv"
PAPER_PUSH = "expected/paper/push.csv"
PAPER_RAGGED_KERNEL = "expected/paper/ragged_kernel.csv"
PAPERS = (PAPER_LATENCY, PAPER_HEATMAP, PAPER_PUSH)
# The families of the paper, in the order in which tables and figures show them.
FAMILIES = ("vil", "regionvit", "dynamicvit")
CLAIMS = "expected/claims.csv"
# The form that inference takes where a workload is what training computes; it makes another result, hence is no peer.
INFERENCE = "sdpa_compacted"
SCHEDULES = "results/schedules/"
LOGS = experiments.LOGS


def family(workload):
    """First word of a workload's name: ``vil`` of ``vil-tiny-224-s1``."""
    return workload.partition("-")[0]


def case(workload):
    """What the pattern of a workload is computed for where a reader may take it for another: DynamicViT's, of all
    queries, is what training masks; inference drops the pruned queries."""
    return "training mask" if family(workload) == "dynamicvit" else ""


def of_family(workloads, name):
    """The workloads of one family, in their order."""
    return [workload for workload in workloads if family(workload) == name]


def method(config):
    """``(tile set, [solvers])`` that the study compares policies on.

    It is the first tile set that is run with greedy and an ILP solver, else the first one.
    """
    sets = config.attention.schedules
    both = [name for name, solvers in sets.items() if "greedy" in solvers and len(solvers) > 1]
    name = next(iter([*both, *sets]))
    return name, list(sets[name])


def logs(config, *names):
    """CSV files of the experiments `names` that the study runs; of all without names."""
    return [path for name in names or experiments.NAMES for path in experiments.files(name, config)]


def attention(config, workloads, pairs=None):
    """Files of attention on `workloads`: baselines, and every order under the (tile set, solver) `pairs` (None: all);
    none where the study does not run it."""
    if "attention" not in config.experiments:
        return []
    pairs = config.attention.runs if pairs is None else pairs
    baselines = [f"{LOGS}{m}/baselines.csv" for m in workloads]
    runs = [f"{LOGS}{m}/{r}/{t}.{s}.csv" for m in workloads for r in config.orders for t, s in pairs]
    return baselines + runs


def attention_of_method(config, workloads):
    """Files of attention on `workloads` under the tile set that policies are compared on."""
    name, solvers = method(config)
    return attention(config, workloads, [(name, solver) for solver in solvers])


def drawn(config, workloads):
    """Those of `workloads` whose patterns the study has: figures of patterns, tiles and schedules belong to the
    experiment ``attention``."""
    return [name for name in workloads if "attention" in config.experiments and name in config.workloads]


def chosen(config):
    """Pairs (tile set, solver): every tile set that leaves a choice, by every solver."""
    return [(name, s) for name, members in config.tile_sets.items() if len(members) > 1 for s in config.solvers]


def solved(config):
    """Pairs (tile set, solver) of the schedules that a study solves: those that it shows, and that it runs."""
    return list(dict.fromkeys([*chosen(config), *config.attention.runs]))


def schedules(config):
    """Schedules of every tile set that leaves a choice, by every solver."""
    models, pairs = drawn(config, config.workloads), chosen(config)
    return [f"{SCHEDULES}{m}/{r}/{t}.{s}.json" for m in models for r in config.orders for t, s in pairs]


def blocks(config, workloads, tiles):
    """Blocks files of `workloads`, every order and `tiles`."""
    return [f"results/blocks/{m}/{r}/{t}.npz" for m in drawn(config, workloads) for r in config.orders for t in tiles]
