"""What Snakemake plans and refuses, without running a job."""

import re
import shlex
import shutil
from collections import Counter

import pytest
import yaml

from helpers.cases import rest_slow
from helpers.checkout import ALL, JOB, ROOT, RUN, TINY, dry_run, linked, merged, overlay, plan, run_loaded
from tilewright import masks
from tilewright.packed import pruners
from tilewright_study import config, experiments, figures, tables

# Parts of the study, as pages have them; a reader's own profile is a copy of the one for clusters.
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tutorials").glob("*.md")]
# Other tests of this file plan the whole study and single experiments of a GPU's; a dry run and another folder are what
# all of them do.
PLANNED = {"--cores all --configfile config/all.yaml", "--cores all --dry-run", "--cores all --directory ../study"}
PLANNED |= {"--cores all", "--cores all --until blocks", "--workflow-profile profiles/h200"}
PLANNED |= {
    f"--workflow-profile profiles/h200 --config 'experiments=[{names}]'"
    for names in ("pruned_accuracy", "worth", "ragged, pruned")
}
STATED = {
    line.replace("profiles/mine", "profiles/slurm-a100").removesuffix(" -n --quiet rules")
    for page in PAGES
    for line in re.findall(r"^ *snakemake (.+?)(?: +#.*)?$", page.read_text(), re.MULTILINE)
}
# Files by their names alone are planned together.
_NAMED = {line for line in STATED - PLANNED if re.fullmatch(r"--cores \w+( (?:figures|results)/\S+)+", line)}
_TOGETHER = "--cores all " + " ".join(sorted({word for line in _NAMED for word in line.split()[2:]}))
DOCUMENTED = [*sorted(STATED - PLANNED - _NAMED), _TOGETHER]
# The rules of experiments whose cases need no file of the study.
EXPERIMENTS = ("experiment", "experiment_on_host", "experiment_untimed")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Another name of this checkout."""
    return linked(tmp_path_factory.mktemp("source") / "checkout")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Jobs of all that runs on a CPU."""
    return plan(tmp_path_factory.mktemp("whole"), configs=[ALL])


def test_the_default_study_runs_a_part_of_all_and_trains_nothing(tmp_path, whole):
    jobs = plan(tmp_path, configs=[ROOT / "config.yaml"])
    # Figures and tables of what it runs alone; the rest of its jobs are those of the whole study.
    assert {(name, *sorted(w.items())) for name, w in jobs} < {(name, *sorted(w.items())) for name, w in whole}
    assert not {"classifier", "video_weights", "train"} & {name for name, _ in jobs}
    assert {w["m"] for name, w in jobs if name == "bench"} == {w["m"] for name, w in whole if name == "bench"}
    assert len({w["app"] for name, w in jobs if name == "push_run"}) == 4


def test_the_whole_study_plans_every_job_once(whole):
    study, jobs = config.load(merged(ALL)), whole
    counts = Counter(name for name, _ in jobs)
    graphs = len(study.workloads) * len(study.orders)
    assert counts["all"] == counts["report"] == 1
    assert counts["profile"] == counts["bench"] == graphs
    assert (counts["figure"], counts["table"]) == tuple(map(len, figures.selected(study)))
    # It has no plans of networks but their own.
    shown, listed = figures.selected(study)
    assert set(shown) == set(figures.NAMES) and {*tables.NAMES} - {*listed} == {"network_plans"}
    assert {w["m"] for name, w in jobs if name == "baselines"} == set(study.workloads)
    ran = {(w["experiment"], w["case"]) for name, w in jobs if name in EXPERIMENTS}
    general = [name for name in experiments.NAMES if name != "attention"]
    assert ran == {(name, case) for name in general for case in experiments.cases(name, study)}
    # FlexAttention is compiled ahead wherever it is timed.
    assert {w["m"] for name, w in jobs if name == "compile_baselines"} == set(study.workloads)
    compiled = {(w["experiment"], w["case"]) for name, w in jobs if name == "compile_experiment"}
    flexible = {"networks": study.networks.workloads}
    flexible |= {name: experiments.cases(name, study) for name in ("slices", "recall", "neighborhood")}
    assert compiled == {(name, case) for name, cases in flexible.items() for case in cases}
    orders = {(m, r) for m in study.workloads for r in study.orders}
    assert {(w["m"], w["r"]) for name, w in jobs if name == "schedule"} == orders
    assert len(jobs) == len({(name, *sorted(w.items())) for name, w in jobs})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"orders": ["hcc"]}, "orders: unknown order 'hcc'; known: none, rcm, hc, ic, window"),
        ({"sed": 1}, "unknown field `sed`"),
        ({"schedule": {"gap": "1%"}}, "schedule.gap"),
    ],
    ids=["name", "key", "type"],
)
def test_a_wrong_configuration_stops_before_any_job(tmp_path, change, message):
    wrong = overlay(tmp_path / "wrong.yaml", change)
    status, printed = dry_run(tmp_path, *RUN, wrong)
    assert status != 0
    assert message in printed
    assert not (tmp_path / "results").exists()


def test_an_unknown_target_is_refused(tmp_path):
    status, printed = dry_run(tmp_path, "results/graphs/vil-tiny-64-s1/hcc.npz", *RUN)
    assert status != 0
    assert "MissingRuleException" in printed


def test_the_overlay_of_larger_cases_runs_networks_alone_for_their_figure(tmp_path):
    wanted = ("results/tables/end_to_end.csv", "figures/end_to_end.svg")
    jobs = plan(tmp_path, *wanted, configs=[ROOT / "config/large.yaml"])
    compiled = ["compile_experiment"] * 2
    assert sorted(name for name, _ in jobs) == [*compiled, "experiment", "experiment", "figure", "table"]


def selected(directory, names, overlaid="h200"):
    """Jobs of the experiments `names` of an overlay, see `plan`."""
    return plan(directory, "--config", f"experiments=[{names}]", configs=[ROOT / f"config/{overlaid}.yaml"])


@pytest.fixture(scope="module")
def gpu_study(tmp_path_factory):
    """What Snakemake prints of the study of a GPU."""
    given = ("--configfile", ROOT / "config/h200.yaml", "--workflow-profile", ROOT / "profiles/h200")
    status, printed = dry_run(tmp_path_factory.mktemp("gpu"), "--printshellcmds", *given)
    assert status == 0, printed
    return printed


def test_the_gpu_study_has_the_same_rules_on_another_device(gpu_study):
    bodies = {name: body for name, body in JOB.findall(gpu_study)}
    commands = dict(re.findall(r"python \S*/(run_\w+).py (.*)", gpu_study))
    assert all("--device cuda" in command for command in commands.values())
    for rule in ("profile", "bench", "baselines", "experiment"):
        assert "gpu=1" in bodies[rule] and "threads: " in bodies[rule]
    assert "gpu" not in bodies["blocks"] + bodies["schedule"]
    # Jobs that share a GPU compile for themselves.
    assert not any(rule.startswith("compile_") for rule in bodies)


def test_the_peers_overlay_follows_the_gpu_study(tmp_path):
    given = [ROOT / "config/h200.yaml", ROOT / "config/h200_peers.yaml"]
    counts = Counter(name for name, _ in plan(tmp_path, configs=given))
    assert counts["profile"] == counts["bench"] == counts["baselines"] == 12
    assert not {*EXPERIMENTS} & set(counts)


def test_trained_pruners_of_the_gpu_study_are_trained_for_each_seed_before_they_are_timed(tmp_path):
    jobs = selected(tmp_path, "pruned_accuracy")
    counts = Counter(name for name, _ in jobs)
    assert counts == {"classifier": 3, "experiment": 3, "figure": 1, "table": 2, "report": 1, "all": 1}
    trained = {(w["network"], w["seed"]) for name, w in jobs if name == "classifier"}
    assert trained == {("deit-tiny-224", str(seed)) for seed in range(3)}


@pytest.mark.parametrize(("name", "cases"), [("h200", 5), ("large", 3)])
def test_windows_that_pay_are_a_case_a_grid(tmp_path, name, cases):
    counts = Counter(each for each, _ in selected(tmp_path, "worth", name))
    assert counts == {"experiment": cases, "figure": 1, "table": 1, "report": 1, "all": 1}


@pytest.mark.parametrize("kinds", rest_slow([2, 1], 1))
def test_a_study_says_how_many_kinds_of_tiles_a_round_may_have(tmp_path, kinds):
    changed = overlay(tmp_path / "kinds.yaml", {"schedule": {"max_tile_kinds": kinds}})
    _, planned = dry_run(tmp_path, "--printshellcmds", "--until", "schedule", "--configfile", TINY, changed)
    assert planned.count(f"--max-tile-kinds {kinds} ") == planned.count("solve_ilp.py ") > 0


def test_profiles_and_networks_read_one_cache(gpu_study):
    """Where a calibration has kept forms of kernels."""
    found = re.findall(r"(\S+) (?:command )?python \S+/(run_bench\.py --profile_only|run_experiment\.py)", gpu_study)
    assert {cache for cache, _ in found} == {"TILEWRIGHT_CACHE=.snakemake/plans"}
    assert {script for _, script in found} == {"run_bench.py --profile_only", "run_experiment.py"}
    assert len(found) == gpu_study.count("--profile_only") + gpu_study.count("run_experiment.py")


# Other experiments, and a run that left most of the study out.
PACKED, LESS = {"experiments": ["ragged", "pruned"]}, {"recorded": str(ROOT / "expected/h100")}


@pytest.mark.parametrize(
    ("more", "stated"), rest_slow([((), {}), (("h200_peers",), {}), ((), PACKED), ((), LESS)], 0, 3)
)
def test_recorded_gpu_rows_suffice_for_every_study(tmp_path, more, stated):
    recorded = overlay(tmp_path / "recorded.yaml", {"recorded": str(ROOT / "expected/h200"), **stated})
    given = [ROOT / f"config/{name}.yaml" for name in ("h200", *more)]
    names = {name for name, _ in plan(tmp_path, configs=[*given, recorded])}
    # Patterns are drawn from graphs and blocks; nothing is timed.
    assert (
        {"figure", "table"}
        <= names - {"blocks_of_tile"}
        <= {"all", "report", "figure", "table", "graph", "reorder", "blocks"}
    )


def test_selected_experiments_of_the_gpu_study_run_alone(tmp_path):
    jobs = selected(tmp_path, "ragged,pruned")
    counts = Counter(name for name, _ in jobs)
    assert counts == {"experiment": 16, "figure": 2, "table": 3, "report": 1, "all": 1}
    pruned = [w["case"] for name, w in jobs if w.get("experiment") == "pruned"]
    assert len(pruned) == 13 and {case.rpartition("-")[2] for case in pruned} == {*pruners.NAMES} - {"none"}


# FlexAttention, which else neighbourhoods alone compile in the small study.
COMPILING = {"attention": {"baselines": ["sdpa_dense", "flex"]}, "networks": {"attention": {"flex": [1]}}}


@pytest.mark.parametrize("section", rest_slow([*COMPILING], 0))
def test_what_does_not_compile_is_not_compiled_ahead(tmp_path, section):
    compiling = overlay(tmp_path / "flex.yaml", {section: COMPILING[section], "neighborhood": {"layers": []}})
    counts = Counter(name for name, _ in plan(tmp_path, configs=(TINY, compiling)))
    rule, left = ("baselines", "experiment") if section == "attention" else ("experiment", "baselines")
    assert counts[f"compile_{rule}"] > 0 == counts[f"compile_{left}"] and counts[left] > 0


def test_what_is_compiled_ahead_is_for_the_threads_of_the_timed_job(tmp_path):
    options = ("--printshellcmds", "--cores", "3")
    _, printed = dry_run(tmp_path, "results/logs/vil-tiny-128-s1/baselines.csv", *options)
    commands = [line for line in printed.splitlines() if "run_baselines.py" in line]
    ahead, timed = (next(line for line in commands if ("--compile-only" in line) == only) for only in (True, False))
    assert "OMP_NUM_THREADS=3 MKL_NUM_THREADS=3" in ahead and "OMP_NUM_THREADS" not in timed
    assert all("--forms flex=16-split " in command for command in (ahead, timed))
    kept = "TORCHINDUCTOR_CACHE_DIR=.snakemake/inductor"
    assert kept in ahead and kept in timed


def test_orders_are_timed_on_the_host_of_a_gpu(tmp_path):
    given = ("--configfile", ROOT / "config/h200.yaml", ROOT / "config/full_scale.yaml")
    status, printed = dry_run(tmp_path, "results/logs/orders/times.csv", *given)
    assert status == 0, printed
    (body,) = [body for name, body in JOB.findall(printed) if name == "experiment_on_host"]
    assert "timing=1" in body and "gpu" not in body


def test_what_times_nothing_runs_beside_others(tmp_path):
    given = ("--configfile", ROOT / "config/h200.yaml", "--config", "experiments=[push,push_attention,push_streams]")
    status, printed = dry_run(tmp_path, *given)
    assert status == 0, printed
    bodies = [body for name, body in JOB.findall(printed) if name == "experiment_untimed"]
    assert bodies and not any("timing" in body or "gpu" in body or "threads" in body for body in bodies)


def test_a_cluster_gives_a_gpu_to_the_rules_that_ask_for_one():
    profile = yaml.safe_load((ROOT / "profiles/slurm-a100/profile.yaml").read_text())
    rules = "".join(path.read_text() for path in (ROOT / "rules").glob("*.smk"))
    asking = [body.partition(":")[0] for body in rules.split("\nrule ") if "**asked(" in body]
    chosen = {rule: what for rule, what in profile["set-resources"].items() if "gpu_model" in what}
    assert sorted(chosen) == sorted(asking)
    assert all(what["gpu_model"] == "a100" and what["slurm_extra"] == "--exclusive" for what in chosen.values())
    assert all("CHANGE-ME" in what["slurm_partition"] for what in (profile["default-resources"], *chosen.values()))
    assert "CHANGE-ME" in profile["default-resources"]["slurm_account"]


def test_a_cluster_is_asked_for_memory_and_time_by_the_size_of_the_graph(tmp_path):
    wanted = [f"results/graphs/{name}.npz" for name in ("vil-tiny-224-s1", "vil-tiny-8192-s1", "dynamicvit-s-4096")]
    given = ("--configfile", ROOT / "config/h200.yaml", ROOT / "config/full_scale.yaml")
    status, printed = dry_run(tmp_path, *wanted, *given)
    assert status == 0, printed
    asked = {}
    for _, body in JOB.findall(printed):
        stated = dict(re.findall(r"\b(m|mem_mb|runtime)=([\w-]+)", body))
        asked[stated.get("m")] = (int(stated["mem_mb"]), int(stated["runtime"])) if "m" in stated else None
    small, large, largest = (asked[name] for name in ("vil-tiny-224-s1", "vil-tiny-8192-s1", "dynamicvit-s-4096"))
    assert small == (1500 + int(40 * masks.size("vil-tiny-224-s1") / 1e6), 10)
    assert small < large < largest == (1500 + int(40 * masks.size("dynamicvit-s-4096") / 1e6), 74)


@pytest.mark.parametrize("line", DOCUMENTED)
def test_a_documented_command_is_planned(line, checkout):
    small = [] if any(word in line for word in ("--configfile", "--lint", "experiments=")) else ["--configfile", TINY]
    # Nothing but the command decides: it runs in the checkout, whose default profile Snakemake finds by itself.
    status, printed = run_loaded("--dry-run", *shlex.split(line), *small, source=checkout, folder=checkout)
    assert status == 0, printed


def test_every_figure_and_table_is_a_target(tmp_path):
    shown = config.load(merged(ALL))
    files = {
        "figure": [f"figures/{name}.{kind}" for name in figures.selected(shown)[0] for kind in ("svg", "png", "pdf")],
        "table": [f"results/tables/{name}.{kind}" for name in figures.selected(shown)[1] for kind in ("csv", "md")],
    }
    counts = Counter(name for name, _ in plan(tmp_path, *files["figure"], *files["table"]))
    assert (counts["figure"], counts["table"]) == (len(files["figure"]) / 3, len(files["table"]) / 2)


@pytest.mark.parametrize(
    ("stage", "rules"),
    rest_slow([("graph", {"graph"}), ("blocks", {"graph", "reorder", "blocks"})], 1),
)
def test_until_stops_after_a_stage(tmp_path, stage, rules):
    assert {name for name, _ in plan(tmp_path, "--until", stage)} == rules


def test_values_on_the_command_line_win(tmp_path):
    given = ("--config", "solvers=[greedy,descent,highs]", "--configfile", TINY)
    _, printed = dry_run(tmp_path, "--printshellcmds", "--until", "schedule", *given)
    found = re.findall(r"--solver (.*?) --", printed)
    assert {solver for solvers in found for solver in solvers.split()} == {"greedy", "descent", "highs"}


def test_the_graph_of_jobs_is_drawn(tmp_path):
    status, printed = dry_run(tmp_path, "figures/fill.svg", "--dag", *RUN)
    assert status == 0, printed
    graphviz = printed[printed.index("digraph") :]
    labels = set(re.findall(r'label = "(\w+)', graphviz))
    assert labels == {"figure", "blocks", "blocks_of_tile", "reorder", "graph"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("figures/spedup.svg",), "No rule to produce figures/spedup.svg"),
        (("--until", "block"), "No rule to produce block"),
        (("--config", "heatmap={resolutions: [96]}"), "Expected `int`, got `str` - at `$.heatmap.resolutions[0]`"),
        (("--config", "seed"), "Unparsable value: 'seed'"),
        (("--report", "study.report.html"), "marked for report but does not exist"),
    ],
    ids=["target", "stage", "value", "pair", "report"],
)
def test_a_wrong_command_names_what_is_wrong(tmp_path, arguments, message):
    status, printed = dry_run(tmp_path, *arguments, *RUN)
    assert status != 0
    assert message in printed
    assert not (tmp_path / "results").exists()


def test_a_missing_overlay_is_named(tmp_path):
    status, printed = dry_run(tmp_path, "--cores", "2", "--configfile", "my.yaml")
    assert status != 0 and "No such file or directory: 'my.yaml'" in printed


@pytest.mark.skipif(shutil.which("conda") is not None, reason="conda is installed: it would deploy the environments")
def test_conda_environments_need_conda(tmp_path):
    status, printed = dry_run(tmp_path, "results/graphs/vil-tiny-64-s1.npz", "--sdm", "conda", *RUN)
    assert status != 0 and "Is conda installed and accessible?" in printed


def test_the_catalogs_snakefile_is_the_study(checkout, tmp_path):
    mine = tmp_path / "Snakefile"
    mine.write_text(
        f'configfile: "{checkout}/config.yaml"\nmodule tw:\n    snakefile: "{checkout}/Snakefile"\n    config: config\n'
        "use rule * from tw\nrule mine:\n    default_target: True\n    input: rules.all.input\n"
    )
    counts = []
    for snakefile in (checkout / "Snakefile", checkout / "workflow/Snakefile", mine):
        # The last --snakefile counts.
        jobs = Counter(name for name, _ in plan(tmp_path, "--snakefile", snakefile, source=checkout))
        counts.append({name: count for name, count in jobs.items() if name not in ("all", "study", "mine")})
    assert counts[0] and counts[0] == counts[1] == counts[2]


def test_what_the_catalog_looks_for_is_there():
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert usage == {"software-stack-deployment": {"conda": True}, "report": True}
    readme = (ROOT / "README.md").read_text().lower()
    assert "snakemake" in readme and "workflow" in readme
    assert (ROOT / "config/README.md").is_file() and (ROOT / "workflow/Snakefile").is_file()
