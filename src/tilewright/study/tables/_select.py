"""Which files the configured study makes: the paths that tables and figures ask for."""

PAPER_LATENCY = "expected/paper/latency.csv"
PAPER_HEATMAP = "expected/paper/heatmap.csv"
# The families of the paper, in the order in which tables and figures show them.
FAMILIES = ("vil", "regionvit", "dynamicvit")
CLAIMS = "expected/claims.csv"
# The form that inference takes where a workload is what training computes; it makes another result, hence is no peer.
INFERENCE = "sdpa_compacted"
SCHEDULES = "results/schedules/"
LOGS = "results/logs/"
REORDER_TIME = f"{LOGS}reorder_time.csv"


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

    It is the first tile set benched with greedy and an ILP solver, else the first one benched.
    """
    sets = config.bench.tile_sets
    both = [name for name, solvers in sets.items() if "greedy" in solvers and len(solvers) > 1]
    name = next(iter([*both, *sets]))
    return name, list(sets[name])


def bench(config, workloads, pairs=None):
    """Bench files of `workloads`: baselines, and every order under the (tile set, solver) `pairs` (None: all)."""
    pairs = config.benched if pairs is None else pairs
    baselines = [f"{LOGS}{m}/baselines.csv" for m in workloads]
    runs = [f"{LOGS}{m}/{r}/{t}.{s}.csv" for m in workloads for r in config.orders for t, s in pairs]
    return baselines + runs


def bench_of_method(config, workloads):
    """Bench files of `workloads` under the tile set that policies are compared on."""
    name, solvers = method(config)
    return bench(config, workloads, [(name, solver) for solver in solvers])


def schedules(config):
    """Schedules of every tile set that leaves a choice, by every solver."""
    sets = [name for name, members in config.tile_sets.items() if len(members) > 1]
    return [
        f"{SCHEDULES}{m}/{r}/{t}.{s}.json"
        for m in config.workloads
        for r in config.orders
        for t in sets
        for s in config.solvers
    ]


def blocks(config, workloads, tiles):
    """Blocks files of `workloads`, every order and `tiles`."""
    return [f"results/blocks/{m}/{r}/{t}.npz" for m in workloads for r in config.orders for t in tiles]


def heatmap(config):
    """Heat-map files, one a resolution; none when the map has no cell."""
    resolutions = config.heatmap.resolutions if config.heatmap.patches else ()
    return [f"{LOGS}heatmap/{resolution}.csv" for resolution in resolutions]


def ragged(config):
    """Files of packed attention, one for each shape of heads."""
    sizes = config.ragged.lengths and any(config.ragged.attention.values())
    return [f"{LOGS}ragged/{heads}x{head_dim}.csv" for heads, head_dim in config.ragged.shapes] if sizes else []


def pruned(config):
    """Files of pruned networks, one each."""
    return [f"{LOGS}pruned/{network}.csv" for network in config.pruned.workloads]


def networks(config):
    """Files of whole networks, one each."""
    return [f"{LOGS}networks/{network}.csv" for network in config.networks.workloads]
