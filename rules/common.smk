"""Shared by all rules: the checked configuration, wildcards, and what inputs and parameters ask of the package.

A parameter `code` is the digest of everything that a job runs, since Snakemake does not see the package behind a command.
"""

import json
import os
import shlex
import sys
from functools import cache

from tilewright import models, networks, pruners, targets
from tilewright.baselines import packed as packed_baselines
from tilewright.baselines import sparse as sparse_baselines
from tilewright.core import provenance
from tilewright.networks import attentions, batching
from tilewright.schedule.search import HEURISTICS
from tilewright.study import config as study
from tilewright.study import figures, tables
from tilewright.study import report as page
from tilewright.study.tables import _select as select

CONFIG = study.load(config)
FIGURES, TABLES = figures.selected(CONFIG)
# The runs of T5: what a schedule's file is called after its graph and order.
BENCHED = [f"{tile_set}.{solver}" for tile_set, solver in CONFIG.benched]


def effort(max_seconds):
    """The flags that say when a timing is good enough."""
    flags = f"--rse {CONFIG.bench.rse} --min-repetitions {CONFIG.bench.min_repetitions}"
    return f"{flags} --max-seconds {max_seconds} --seed {CONFIG.seed}"


EFFORT = effort(CONFIG.bench.max_seconds)


def sized(batches):
    """Names with their batches, as commands take them."""
    return [f"{name}={','.join(map(str, sizes))}" for name, sizes in batches.items() if sizes]


# Batches of each attention of whole networks.
BATCHES = sized(CONFIG.networks.attention)
# Workloads whose graphs figures show in detail.
DRAWN = CONFIG.figures.pattern_workloads + CONFIG.figures.fill_workloads
SPLIT = "" if CONFIG.split_keys is None else f"--split-keys {CONFIG.split_keys}"

# What timed jobs run on. Modules that are entered by the device's name, as `code` takes them; threads: on a CPU a timed job has
# all cores, while jobs for a GPU start side by side and take turns at it.
DEVICE = f"--device {CONFIG.device} --dtype {CONFIG.dtype}"
FACTS, EXECUTOR, PROBE, *PACKED = (
    name.removeprefix("tilewright.") for name in targets.modules(CONFIG.device, "executor", "probe", "packed")
)
DEVICE_CODE = [FACTS, EXECUTOR, PROBE]
THREADS = workflow.cores if CONFIG.device == "cpu" else 4
TIMED = {"timing": 1} if CONFIG.device == "cpu" else {"timing": 1, "gpu": 1}

# What a pruned network enters by name, the executor of packed tokens among it.
PRUNED_CODE = [
    *("models.deit", "networks.deit", FACTS, *PACKED),
    *(f"networks.batching.{name}" for name in batching.NAMES),
    *(f"pruners.{name}" for name in pruners.NAMES),
]

# What a job asks of a cluster. Bytes and microseconds for each number of its graph (`models.size`): 30 bytes and 0.3 to 2 us were
# measured for T1 and T2 up to 4.7e8 numbers, see docs/slurm.md. Megabytes and minutes come on top: Python, its libraries,
# the Snakemake that a cluster's job starts, and for timed jobs CUDA.
BYTES, MICROSECONDS = 40, 4
LEAST_MB, LEAST_TIMED_MB = 1500, 8000
LEAST_MINUTES, LEAST_TIMED_MINUTES = 10, 30
TIMED_ENV = "../envs/cpu.yaml" if CONFIG.device == "cpu" else "../envs/gpu.yaml"

# Jobs use the Python and the package of this run, also where no environment is activated; a rule's own conda environment, where
# one is deployed, comes before them.
for name, first in {"PATH": os.path.dirname(sys.executable), "PYTHONPATH": f"{ROOT}/src"}.items():
    os.environ[name] = os.pathsep.join(filter(None, [first, os.environ.get(name)]))


wildcard_constraints:
    m=r"[a-z0-9]+(-[a-z0-9.]+)*",
    r="|".join(dict.fromkeys(CONFIG.orders + CONFIG.bench.baseline_orders)),
    t=r"\d+x\d+",
    set="|".join(CONFIG.tile_sets),
    solver="|".join(CONFIG.solvers),
    resolution=r"\d+",
    heads=r"\d+",
    head_dim=r"\d+",
    network=r"[a-z0-9]+(-[a-z0-9_]+)*",
    figure="|".join(figures.NAMES),
    table="|".join(tables.NAMES),


def here(path):
    """A path of this checkout as seen from where Snakemake runs, so that a printed command can be pasted there."""
    return os.path.relpath(os.path.join(ROOT, path))


def script(stage):
    """A stage's command."""
    return here(f"workflow/scripts/{stage}.py")


def code(stage, *modules):
    """Parameter: the digest of a stage's script and of all that `modules` import, dotted names that may hold wildcards.

    Members of a family are entered by name, which imports do not show: a rule lists those that it uses.
    """

    def digest(wildcards):
        named = [f"tilewright.{module}".format(**wildcards) for module in modules]
        return f"{provenance.sha256_file(script(stage))[:8]}-{provenance.code_digest(*named)}"

    return digest


def family(workload):
    """Family module and parameters of a workload."""
    return models.parse(workload, CONFIG.models.get(workload))


def families(workloads):
    """The family modules of workloads, as `code` takes them."""
    return sorted({family(name)[0].__name__.removeprefix("tilewright.") for name in workloads})


def solvers(*names):
    """The solver modules, as `code` takes them; heuristics are part of the search."""
    return [f"schedule.solvers.{name}" for name in names if name not in HEURISTICS]


def graph_code(wildcards):
    """Parameter: as `code`, for the family of a workload."""
    return code("gen_adj", "models", *families([wildcards.m]))(wildcards)


def network_code(wildcards):
    """Parameter: as `code`, for the family of a network and all that its attentions and plans are made with."""
    member, _ = networks.parse(wildcards.network)
    if member == "deit":
        return code("run_network", "study.bench.networks", *PRUNED_CODE, *DEVICE_CODE)(wildcards)
    entered = [f"models.{member}", f"networks.{member}", *(f"networks.attentions.{name}" for name in attentions.NAMES)]
    entered += ["reorder.window"]
    return code("run_network", "study.bench.networks", *entered, *DEVICE_CODE, *solvers("highs"))(wildcards)


def schedule_code(wildcards):
    """Parameter: as `code`, for the solver of a schedule."""
    return code("solve_ilp", "study.stages.schedule", FACTS, *solvers(wildcards.solver))(wildcards)


def sources(wildcards):
    """Input: the user's own files that a workload is made from."""
    member, params = family(wildcards.m)
    return member.sources(params)


def stated(definitions, wildcard):
    """Parameter: the `--set` flags for what `definitions` hold about the wildcard's value."""

    def flags(wildcards):
        pairs = definitions.get(wildcards[wildcard], {}).items()
        return ["--set", *(shlex.quote(f"{key}={json.dumps(value)}") for key, value in pairs)] if pairs else []

    return flags


@cache
def numbers(workload):
    """How many numbers the graph of a workload holds."""
    return models.size(workload, CONFIG.models.get(workload))


def of_graph(wildcards):
    """Size of a job on one workload."""
    return numbers(wildcards.m)


def of_largest(workloads):
    """Size of a job on one workload after the other."""

    def size(wildcards):
        return max(map(numbers, workloads), default=0)

    return size


def of_heatmap(wildcards):
    """Size of a job on the heat map: a token sees at most the quarter of them all, on average, see `dynamicvit`."""
    return CONFIG.heatmap.max_tokens**2 // 4


def of_network(wildcards):
    """Size of a job on a whole network: its graphs are small beside its tokens' values."""
    # ASSUME: fifty numbers of `BYTES` for each pixel, 2 kB, hold an image's features at the largest batch.
    return 50 * networks.parse(wildcards.network)[1]["image_size"] ** 2


def of_ragged(wildcards):
    """Size of a job on packed attention: the values of its largest batch."""
    images = max(max(sizes, default=1) for sizes in CONFIG.ragged.attention.values())
    return images * max(high for _, high in CONFIG.ragged.lengths) * int(wildcards.heads) * int(wildcards.head_dim)


def modes(wildcards):
    """Parameter: the batches of each mode of a pruned network."""
    return sized(CONFIG.pruned.of.get(wildcards.network, CONFIG.pruned.modes))


def settings(wildcards):
    """Parameter: those of the pruner of a network."""
    return [shlex.quote(json.dumps(setting)) for setting in CONFIG.pruned.settings.get(wildcards.network, [{}])]


def mem_mb(size, least=LEAST_MB):
    """Resource: megabytes of a job by the `size` of what it works on; each retry may take twice as many."""

    def megabytes(wildcards, attempt):
        return int(least + size(wildcards) * BYTES / 1e6) * 2 ** (attempt - 1)

    return megabytes


def runtime(size, least=LEAST_MINUTES):
    """Resource: minutes of a job, likewise."""

    def minutes(wildcards, attempt):
        return int(least + size(wildcards) * MICROSECONDS / 60e6) * 2 ** (attempt - 1)

    return minutes


def asked(size):
    """Resources of a timed job, by the size of what it works on."""
    return {**TIMED, "mem_mb": mem_mb(size, LEAST_TIMED_MB), "runtime": runtime(size, LEAST_TIMED_MINUTES)}


def in_orders(orders):
    """Input: the graph of a workload in each of `orders`; the natural one is the graph as it was made."""
    return ["results/graphs/{m}.npz" if name == "none" else f"results/graphs/{{m}}/{name}.npz" for name in orders]


def unless_open(flag, value):
    """The flag of a setting, or nothing where it is left to the device."""
    return "" if value is None else f"{flag} {value}"


def for_tiles(path):
    """Input: `path` for every tile of a tile set."""

    def paths(wildcards):
        return expand(path, tile=CONFIG.tile_sets[wildcards.set], m=wildcards.m, r=wildcards.r)

    return paths


def needs(family, wildcard):
    """Input: what a figure or a table asks for; the paper's values, and recorded ones, lie in this checkout."""

    def place(path):
        if CONFIG.recorded and path.startswith(select.LOGS):
            return here(f"{CONFIG.recorded}/logs/{path.removeprefix(select.LOGS)}")
        return here(path) if path.startswith("expected/") else path

    def paths(wildcards):
        return [place(path) for path in family.needs(wildcards[wildcard], CONFIG)]

    return paths


def caption(wildcard):
    """Parameter: the caption in the report, a file of the figure's or the table's name."""

    def text(wildcards):
        with open(here(f"workflow/report/captions/{wildcards[wildcard]}.rst")) as stream:
            return stream.read()

    return text
