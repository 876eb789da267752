"""Shared by all rules: the checked configuration, wildcards, and what inputs and parameters ask of the package.

Parameters come from `origins.Origins`: with their digest Snakemake sees what is behind a command, and all that is upstream.
"""

import json
import os
import shlex
import sys
from functools import cache
from pathlib import Path

import tilewright
import yaml
from snakemake.exceptions import WorkflowError
from snakemake.utils import update_config

if not Path(tilewright.__file__).resolve().is_relative_to(Path(ROOT, "src").resolve()):
    raise WorkflowError(
        f"expected the package of this checkout, {ROOT}/src, found {Path(tilewright.__file__).parent}: "
        f"its code would decide what is stale; PYTHONPATH={shlex.quote(ROOT)}/src snakemake … takes this one"
    )

from tilewright import devices, masks
from tilewright_study.scenes import backends
from tilewright_study import training
from tilewright_study.baselines import sparse
from tilewright.pushmem import solve as configuring
from tilewright.attention.schedule.search import entered
from tilewright_study import config as study
from tilewright_study import experiments, figures, origins, starts, tables
from tilewright_study import report as page
from tilewright_study.measure import weights
from tilewright_study.tables import _select as select

# A workflow of one's own that includes this one as a module may state a part of the configuration: the rest is that of config.yaml.
# So the order of keys is that file's, too.
STATED = yaml.safe_load(Path(ROOT, "config.yaml").read_text())
update_config(STATED, config)
CONFIG = study.recorded(study.load(STATED), ROOT)


def environment(name):
    """A file of envs/, where braces stand for themselves: Snakemake reads wildcards in its path."""
    return f"{ROOT}/envs/{name}.yaml".replace("{", "{{").replace("}", "}}")


FIGURES, TABLES = figures.selected(CONFIG)
# What a schedule's file is called after its graph and order.
RUNS = [f"{tile_set}.{solver}" for tile_set, solver in CONFIG.attention.runs]
# The tile sets and solvers of the schedules that one job solves: those that are run, and those that tables show.
SOLVED = select.solved(CONFIG)
# When a timing of T5 is good enough.
EFFORT = f"--rse {CONFIG.timing.rse} --min-repetitions {CONFIG.timing.min_repetitions} --max-seconds {CONFIG.attention.max_seconds}"
# Workloads whose graphs figures show in detail.
DRAWN = CONFIG.figures.pattern_workloads + CONFIG.figures.fill_workloads
SPLIT = f"--split-keys {str(CONFIG.split_keys).lower()}"

# What timed jobs run on. Jobs for a device with a lock start side by side and wait for it; otherwise a timed job has all cores.
DEVICE = f"--device {CONFIG.device} --dtype {CONFIG.dtype}"
# Its facts come first.
DEVICE_CODE = list(devices.modules(CONFIG.device, "attention.executor", "attention.probe"))
EXCLUSIVE = devices.facts(CONFIG.device).EXCLUSIVE
THREADS = 4 if EXCLUSIVE else workflow.cores
TIMED = {"timing": 1, "gpu": 1} if EXCLUSIVE else {"timing": 1}
# What times depend on, a parameter of all that is timed: rows of one table are of one device.
MACHINE = devices.identity(CONFIG.device, THREADS)
HOST = devices.identity("cpu", workflow.cores)
# What draws scenes on it.
SCENES = [*devices.modules(CONFIG.device), *backends.modules(CONFIG.device)]
# Where torch keeps what it compiled, for the jobs that compile ahead and those that are timed.
COMPILED = "TORCHINDUCTOR_CACHE_DIR=.snakemake/inductor"
# It is for as many threads as torch has. Snakemake sets those of a job to its own, which for one that compiles ahead is one.
TIMED_THREADS = f"OMP_NUM_THREADS={THREADS} MKL_NUM_THREADS={THREADS}"
# Experiments that the rule `experiment` runs on this device, those that time the host's processors, and those that time nothing.
UNTIMED, ON_HOST, ON_DEVICE = experiments.by_place()

# What a job asks of a cluster. Bytes and microseconds for each number of its graph (`masks.size`): 30 bytes and 0.3 to 2 us were
# measured for T1 and T2 up to 4.7e8 numbers, see docs/slurm.md. Megabytes and minutes come on top: Python, its libraries,
# the Snakemake that a cluster's job starts, and for timed jobs CUDA.
BYTES, MICROSECONDS = 40, 4
LEAST_MB, LEAST_TIMED_MB = 1500, 8000
LEAST_MINUTES, LEAST_TIMED_MINUTES = 10, 30
TIMED_ENV = environment("gpu" if EXCLUSIVE else "cpu")

# Jobs use the Python and the package of this run, also where no environment is activated; a rule's own conda environment, where
# one is deployed, comes before them.
for name, first in {"PATH": os.path.dirname(sys.executable), "PYTHONPATH": f"{ROOT}/src"}.items():
    os.environ[name] = os.pathsep.join(filter(None, [first, os.environ.get(name)]))
# Torch takes the processor's word for what it compiles for, and compiles nothing to ask g++: any that can read torch's headers knows
# these instructions. It reads this while it is loaded, in what jobs are forks of, too.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


# In few jobs, libraries load faster than in a server of forks. A GPU's driver, and environments that Snakemake deploys, take none.
onstart:
    many = sum(1 for job in workflow.dag.needrun_jobs()) > 20
    plain = EXCLUSIVE or workflow.deployment_settings.deployment_method or not workflow.local_exec
    if many and not plain and starts.POSSIBLE:
        # Snakemake reads fields in braces.
        defined = starts.begin([1, THREADS, workflow.cores]).replace("{", "{{").replace("}", "}}")
        shell.prefix(f"set -euo pipefail; {defined}; ")


wildcard_constraints:
    m=r"[a-z0-9]+(-[a-z0-9.]+)*",
    r="|".join(dict.fromkeys(CONFIG.orders + CONFIG.attention.baseline_orders)),
    t=r"\d+x\d+",
    set="|".join(CONFIG.tile_sets),
    solver="|".join(CONFIG.solvers),
    experiment="|".join(ON_DEVICE),
    case=r"[a-z0-9]+([-_.][a-z0-9_]+)*",
    figure="|".join(figures.NAMES),
    table="|".join(tables.NAMES),
    recipe="|".join(training.RECIPES),


ORIGINS = origins.Origins(workflow, ROOT)
# The parameters of a rule, see there. Members of a family are entered by name, which imports do not show: a rule lists those it uses.
parameters = ORIGINS.parameters
here = ORIGINS.here


def family(workload):
    """Family module and parameters of a workload."""
    return masks.parse(workload, CONFIG.models.get(workload))


def graph_modules(wildcards):
    """Modules entered: all that makes the graph of a workload."""
    return masks.modules(wildcards.m, CONFIG.models.get(wildcards.m))


def case_modules(wildcards):
    """Modules entered: those that make the rows of a case."""
    return experiments.modules_of_case(wildcards.experiment, CONFIG, wildcards.case)


def experiment_arguments(wildcards):
    """Parameter: the flags that a case of an experiment is run with."""
    flags = experiments.arguments(wildcards.experiment, CONFIG, wildcards.case)
    return ORIGINS.placed(flags, case_sources(wildcards))


def attention_modules(rows):
    """Modules entered: those that make rows of attention; ``rows(CONFIG, *wildcards)`` says which."""
    return lambda wildcards: experiments.modules("attention", rows(CONFIG, *wildcards), CONFIG.device)


def baseline_forms(wildcards):
    """Parameter: the flags for the forms that baselines run in on a workload."""
    found = experiments.member("attention").forms(CONFIG, wildcards.m)
    return ["--forms", *found] if found else []


def shown_modules(family, wildcard):
    """Modules entered: the one of a figure or a table, and the experiments whose rows it reads."""

    def modules(wildcards):
        name = wildcards[wildcard]
        return [*family.modules(name), DEVICE_CODE[0], *experiments.read(family.needs(name, CONFIG))]

    return modules


def solving(pairs):
    """Parameters of a job that solves; ``pairs(wildcards)``: the tile set and the solver of each of its schedules."""

    def modules(wildcards):
        return [DEVICE_CODE[0], *dict.fromkeys(name for _, solver in pairs(wildcards) for name in entered(solver))]

    return parameters(
        "solve_ilp",
        modules,
        solvers=lambda wildcards: [solver for _, solver in pairs(wildcards)],
        tiles=lambda wildcards: ["+".join(CONFIG.tile_sets[name]) for name, _ in pairs(wildcards)],
        objective=CONFIG.schedule.objective,
        time_limit_s=CONFIG.schedule.time_limit_s,
        gap=CONFIG.schedule.gap,
        rounds=unless_open("--rounds", CONFIG.schedule.rounds),
        kinds=unless_open("--max-tile-kinds", CONFIG.schedule.max_tile_kinds),
        seed=CONFIG.seed,
    )


def sources(wildcards):
    """Input: the user's own files that a workload is made from."""
    return masks.sources(*family(wildcards.m))


def stated(definitions, wildcard, sources=lambda wildcards: []):
    """Parameter: the `--set` flags for what `definitions` hold about the wildcard's value, files in `sources` among it."""

    def flags(wildcards):
        pairs = definitions.get(wildcards[wildcard], {}).items()
        words = [shlex.quote(f"{key}={json.dumps(value)}") for key, value in pairs]
        return ["--set", *ORIGINS.placed(words, sources(wildcards))] if pairs else []

    return flags


@cache
def numbers(workload):
    """How many numbers the graph of a workload holds."""
    return masks.size(workload, CONFIG.models.get(workload))


def of_graph(wildcards):
    """Size of a job on one workload."""
    return numbers(wildcards.m)


def of_largest(workloads):
    """Size of a job on one workload after the other."""

    def size(wildcards):
        return max(map(numbers, workloads), default=0)

    return size


def case_sources(wildcards):
    """Input: what a case of an experiment reads: files of other rules and the user's own."""
    found = experiments.sources(wildcards.experiment, CONFIG, wildcards.case)
    return [path for path in found if not is_shipped(path)]


def case_shipped(wildcards):
    """Files of this checkout that a case of an experiment reads."""
    return [*filter(is_shipped, experiments.sources(wildcards.experiment, CONFIG, wildcards.case))]


def is_shipped(path):
    """Whether a file is of this checkout alone: one of that name where Snakemake runs comes first, as one that a rule makes."""
    return not path.startswith("results/") and not os.path.isfile(path) and os.path.isfile(os.path.join(ROOT, path))


def case_machine(wildcards):
    """Parameter: what the times of a case depend on."""
    return "" if wildcards.experiment in UNTIMED else HOST if wildcards.experiment in ON_HOST else MACHINE


def case_python(wildcards):
    """Parameter: what runs a case: where its rows state the memory of a process, one of its own from the start."""
    return "command python" if wildcards.experiment in ON_HOST else "python"


def weights_arguments(wildcards):
    """Parameter: the flags by which weights of a video network are trained."""
    return weights.arguments(CONFIG.video.weights[wildcards.case], CONFIG)


def classifier_arguments(wildcards):
    """Parameter: the flags by which a network of the experiment `pruned_accuracy` is trained."""
    case = f"{wildcards.network}.{wildcards.seed}"
    return experiments.member("pruned_accuracy").arguments_of_training(CONFIG, case)


def classifier_modules(wildcards):
    """Modules entered: those by which such a network is trained."""
    return experiments.member("pruned_accuracy").modules_of_training(wildcards.network, CONFIG.device)


def pictures_modules(wildcards):
    """Modules entered: those of a case of the experiment `video`."""
    return experiments.modules_of_case("video", CONFIG, wildcards.case)


def configuring_modules(wildcards):
    """Modules entered: those that configure a memory tile from an example stream."""
    return experiments.member("configure").of_stream(CONFIG.push.memory)


def configuring_arguments(wildcards):
    """The flags by which a memory tile is configured from an example stream."""
    stream, part = experiments.member("configure").split(wildcards.stream)
    limit = [] if CONFIG.push.time_limit is None else ["--time-limit", CONFIG.push.time_limit]
    return ["--stream", stream, "--component", part, "--memory", CONFIG.push.memory, *limit]


def app_modules(wildcards):
    """Modules entered: those of a program on push memories."""
    return experiments.member("push").of_app(wildcards.memory)


def of_classifier(wildcards):
    """Size of a job that trains a network of the experiment `pruned_accuracy`: as of its case."""
    return experiments.size("pruned_accuracy", CONFIG, f"{wildcards.network}.{wildcards.seed}")


def pictured_weights(wildcards):
    """Input: the weights of a case of the experiment `video`."""
    return experiments.sources("video", CONFIG, wildcards.case)


def pictures_arguments(wildcards):
    """Parameter: the settings of a case of the experiment `video`."""
    found = experiments.arguments("video", CONFIG, wildcards.case)
    return ORIGINS.placed(found[: found.index("--device")], pictured_weights(wildcards))


def path_pictures_arguments(wildcards):
    """Parameter: the settings of a case of the experiment `paths`."""
    found = experiments.arguments("paths", CONFIG, wildcards.case)
    return ORIGINS.placed(found[: found.index("--device")], case_sources(wildcards))


def of_weights(wildcards):
    """Size of a job on a video network with weights: as of its case."""
    return experiments.size("video", CONFIG, wildcards.case)


def of_case(wildcards):
    """Size of a case of an experiment."""
    return experiments.size(wildcards.experiment, CONFIG, wildcards.case)


def trained_from(wildcards):
    """Input: the weights that a recipe goes on from."""
    start = training.STARTS.get(wildcards.recipe)
    return [] if start is None else f"results/checkpoints/{wildcards.network}.{start}.safetensors"


def training_arguments(wildcards):
    """Parameter: the flags of a recipe: its data, its minutes, and the weights that it goes on from."""
    start = trained_from(wildcards)
    stated = ["--from", ORIGINS.under_prefix(start)] if start else []
    minutes = CONFIG.training.minutes_of(wildcards.network, wildcards.recipe)
    for flag in ("size", "batch"):
        if (value := getattr(CONFIG.training, flag)) is not None:
            stated += [f"--{flag}", value]
    return [*stated, "--data", shlex.quote(CONFIG.training.data), "--minutes", minutes]


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


def compiled_baselines(wildcards):
    """Input of a timed job: what was compiled ahead. On a device with a lock, jobs side by side compile for themselves."""
    ahead = not EXCLUSIVE and any(name in sparse.COMPILED for name in CONFIG.attention.baselines)
    return [f"results/compiled/{wildcards.m}.txt"] if ahead else []


def compiled_case(wildcards):
    """Input of a timed job: as `compiled_baselines`, for a case of an experiment."""
    ahead = not EXCLUSIVE and experiments.compiles(wildcards.experiment, CONFIG, wildcards.case)
    return [f"results/compiled/{wildcards.experiment}/{wildcards.case}.txt"] if ahead else []


def headline_plan(wildcards):
    """Input: the schedule that baselines are timed beside; it names the files that it was made from."""
    attention = experiments.member("attention")
    named = "results/schedules/{m}/{reorder}/{tiles}.{solver}.json"
    return [named.format(m=wildcards.m, **attention.HEADLINE)] if attention.beside(CONFIG) else []


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


def of_checkout(paths):
    """Those of `paths` that lie in this checkout: the paper's values, and recorded rows in the place of a run's logs."""
    found = []
    for path in paths:
        if CONFIG.recorded and path.startswith(select.LOGS):
            found.append(f"{CONFIG.recorded}/{experiments.of_file(path)}.csv")
        elif path.startswith("expected/"):
            found.append(path)
    return list(dict.fromkeys(found))


def needs(family, wildcard):
    """Input: what a figure or a table asks for, but for what lies in this checkout, see `shipped`."""

    def paths(wildcards):
        asked = family.needs(wildcards[wildcard], CONFIG)
        checked(of_checkout(asked))
        return [path for path in asked if not of_checkout([path])]

    return paths


def shipped(family, wildcard):
    """Files of this checkout: those of what a figure or a table asks for that `needs` leaves out."""
    return lambda wildcards: of_checkout(family.needs(wildcards[wildcard], CONFIG))


def checked(paths):
    """Raise `WorkflowError` for files of this checkout that are not there; Snakemake would keep what they made before."""
    if missing := [path for path in paths if not os.path.isfile(os.path.join(ROOT, path))]:
        raise WorkflowError(f"expected files of this checkout, found no {', '.join(missing)}")


def caption(wildcard):
    """Parameter: the caption in the report."""
    return lambda wildcards: captioned(**{wildcard: wildcards[wildcard]})


def captioned(figure=None, table=None):
    """The caption of a figure or of a table."""
    return tables.words(tables.member(table))[1] if table else figures.member(figure).caption


def captions(wildcards):
    """Parameter: the captions that the report shows."""
    return [*(captioned(figure=name) for name in FIGURES), *(captioned(table=name) for name in TABLES)]


def everything(wildcards):
    """Input: figures, tables and the report, and all that they are made from, so that what is gone is missed."""
    shown = [f"figures/{figure}.svg" for figure in FIGURES] + [f"results/tables/{table}.csv" for table in TABLES]
    return ORIGINS.upstream([*shown, "results/report.html"])
