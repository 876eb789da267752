"""The workflow itself, by Snakemake, on part of the small study of tests/config/tiny.yaml. `.ci/run` runs all of it."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

from helpers.checkout import copied, snakemake
from tilewright import blocks, graph, models, pruners
from tilewright.study import config, experiments, figures, tables

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests/config/tiny.yaml"
# Reach every stage with few jobs.
TARGETS = ("figures/fill.svg", "figures/latency_vil.svg", "results/tables/fill.csv", "results/tables/end_to_end.csv")
RUN = ("--cores", "2", "--configfile", TINY)
JOB = re.compile(r"^(?:local)?rule (\w+):\n((?:    .+\n)*)", re.MULTILINE)


def plan(directory, *targets, configs=(TINY,), **keywords):
    """Jobs that Snakemake would run for `targets`: a list of (rule, wildcards)."""
    done = snakemake(directory, *targets, "--dry-run", "--configfile", *configs, capture_output=True, **keywords)
    assert done.returncode == 0, done.stderr + done.stdout
    found = []
    for name, body in JOB.findall(done.stdout + done.stderr):
        stated = re.search(r"wildcards: (.*)", body)
        pairs = stated.group(1).split(", ") if stated else []
        found.append((name, dict(pair.split("=") for pair in pairs)))
    return found


def overlay(path, mapping):
    path.write_text(yaml.safe_dump(mapping))
    return path


def tiny():
    """The configuration of the small study, as Snakemake merges it."""
    merged = yaml.safe_load((ROOT / "config.yaml").read_text())
    for key, value in yaml.safe_load(TINY.read_text()).items():
        merged[key] = {**merged[key], **value} if isinstance(value, dict) else value
    return merged


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what runs the workflow, free to be edited."""
    return copied(tmp_path_factory.mktemp("source") / "checkout")


@pytest.fixture(scope="module")
def study(checkout, tmp_path_factory):
    """A finished run of `TARGETS`."""
    directory = tmp_path_factory.mktemp("study")
    done = snakemake(directory, *TARGETS, *RUN, source=checkout, capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return directory


@contextlib.contextmanager
def appended(path, text):
    before = path.read_text()
    path.write_text(before + text)
    yield
    path.write_text(before)


def test_default_study_plans_every_job_once(tmp_path):
    study = config.load(yaml.safe_load((ROOT / "config.yaml").read_text()))
    jobs = plan(tmp_path, configs=[ROOT / "config.yaml"])
    counts = Counter(name for name, _ in jobs)
    graphs = len(study.workloads) * len(study.orders)
    assert counts["all"] == counts["report"] == 1
    assert counts["profile"] == counts["bench"] == graphs
    assert counts["figure"] == len(figures.NAMES)
    assert counts["table"] == len(tables.NAMES)
    assert {w["m"] for name, w in jobs if name == "baselines"} == set(study.workloads)
    ran = {(w["experiment"], w["case"]) for name, w in jobs if name in ("experiment", "experiment_on_host")}
    general = [name for name in experiments.NAMES if name != "attention"]
    assert ran == {(name, case) for name in general for case in experiments.cases(name, study)}
    assert {w["solver"] for name, w in jobs if name == "schedule"} == set(study.solvers)
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
    done = snakemake(tmp_path, *RUN, wrong, capture_output=True)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "results").exists()


def test_an_unknown_target_is_refused(tmp_path):
    done = snakemake(tmp_path, "results/graphs/vil-tiny-64-s1/hcc.npz", *RUN, capture_output=True)
    assert done.returncode != 0
    assert "MissingRuleException" in done.stderr


def test_a_second_run_does_nothing(study, checkout):
    assert graph.load(study / "results/graphs/vil-tiny-64-s1.npz").entries > 0
    assert {path.suffix for path in study.glob("figures/fill.*")} == {".svg", ".png", ".pdf", ".json"}
    done = snakemake(study, *TARGETS, *RUN, source=checkout, capture_output=True)
    assert "Nothing to be done" in done.stderr + done.stdout


def test_a_figure_is_made_by_name(study, checkout):
    figure = study / "figures/fill.svg"
    content = figure.read_bytes()
    figure.unlink()
    assert [name for name, _ in plan(study, "figures/fill.svg", source=checkout)] == ["figure"]
    done = snakemake(study, "figures/fill.svg", *RUN, source=checkout, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert figure.read_bytes() == content


def assert_only_order(jobs, order):
    """All jobs of `order` from its reordering on, none of another order, and what shows several."""
    assert {name for name, _ in jobs} >= {"reorder", "blocks", "profile", "schedule", "bench", "figure", "table"}
    assert {w["r"] for _, w in jobs if "r" in w} == {order}
    assert not {name for name, _ in jobs} & {"graph", "baselines"}


def test_a_changed_parameter_reruns_its_order_alone(study, checkout, tmp_path):
    change = overlay(tmp_path / "change.yaml", {"reorder": {"ic": {"tau": 0.31}}})
    assert_only_order(plan(study, *TARGETS, configs=(TINY, change), source=checkout), "ic")


def test_changed_code_of_an_order_reruns_its_order_alone(study, checkout):
    module = checkout / "src/tilewright/reorder/ic.py"
    with appended(module, "\n# A comment changes nothing.\n"):
        assert plan(study, *TARGETS, source=checkout) == []
    with appended(module, "\nCHANGED = True\n"):
        assert_only_order(plan(study, *TARGETS, source=checkout), "ic")


def test_changed_facts_of_a_device_rerun_what_was_made_for_it(study, checkout):
    facts = checkout / "src/tilewright/targets"
    with appended(facts / "cuda/facts.py", "\nCHANGED = True\n"):
        assert plan(study, *TARGETS, source=checkout) == []
    with appended(facts / "cpu/facts.py", "\nCHANGED = True\n"):
        names = {name for name, _ in plan(study, *TARGETS, source=checkout)}
    assert names >= {"profile", "schedule", "bench", "baselines"}
    assert not names & {"graph", "reorder", "blocks"}


def test_a_changed_script_reruns_its_stage_and_what_follows(study, checkout):
    with appended(checkout / "workflow/scripts/solve_ilp.py", "\n# changed\n"):
        names = {name for name, _ in plan(study, *TARGETS, source=checkout)}
    assert {"schedule", "bench"} <= names
    assert not names & {"graph", "reorder", "blocks", "profile", "baselines"}


def test_networks_follow_their_code_and_keep_plans_in_the_folder(study, checkout):
    assert list((study / ".snakemake/plans").glob("*.plan"))
    with appended(checkout / "src/tilewright/networks/regionvit.py", "\nCHANGED = True\n"):
        jobs = plan(study, *TARGETS, source=checkout)
    assert [w for name, w in jobs if name == "experiment"] == [{"experiment": "networks", "case": "regionvit-tiny-64"}]
    assert {name for name, _ in jobs} == {"experiment", "table"}


def test_the_high_resolution_overlay_runs_networks_alone(tmp_path):
    wanted = ("results/tables/end_to_end.csv", "figures/end_to_end.svg")
    jobs = plan(tmp_path, *wanted, configs=[ROOT / "config/high_resolution.yaml"])
    assert sorted(name for name, _ in jobs) == ["experiment", "experiment", "figure", "table"]


def test_the_gpu_study_has_the_same_rules_on_another_device(tmp_path):
    given = ("--configfile", ROOT / "config/h200.yaml", "--workflow-profile", ROOT / "profiles/h200")
    done = snakemake(tmp_path, "--dry-run", "--printshellcmds", *given, capture_output=True)
    assert done.returncode == 0, done.stderr
    bodies = {name: body for name, body in JOB.findall(done.stdout + done.stderr)}
    commands = dict(re.findall(r"python \S*/(run_\w+).py (.*)", done.stdout + done.stderr))
    assert all("--device cuda" in command for command in commands.values())
    for rule in ("profile", "bench", "baselines", "experiment"):
        assert "gpu=1" in bodies[rule] and "threads: " in bodies[rule]
    assert "gpu" not in bodies["blocks"] + bodies["schedule"]


def test_the_peers_overlay_follows_the_gpu_study(tmp_path):
    given = [ROOT / "config/h200.yaml", ROOT / "config/h200_peers.yaml"]
    counts = Counter(name for name, _ in plan(tmp_path, configs=given))
    assert counts["profile"] == counts["bench"] == counts["baselines"] == 12
    assert not {"experiment", "experiment_on_host"} & set(counts)


def test_the_ragged_overlay_runs_packed_attention_and_pruned_networks_alone(tmp_path):
    given = [ROOT / "config/h200.yaml", ROOT / "config/h200_ragged.yaml"]
    jobs = plan(tmp_path, configs=given)
    counts = Counter(name for name, _ in jobs)
    assert counts == {"experiment": 16, "figure": 4, "table": 3, "report": 1, "all": 1}
    pruned = [w["case"] for name, w in jobs if w.get("experiment") == "pruned"]
    assert len(pruned) == 13 and {case.rpartition("-")[2] for case in pruned} == {*pruners.NAMES} - {"none"}


def test_orders_are_timed_on_the_host_of_a_gpu(tmp_path):
    given = ("--configfile", ROOT / "config/h200.yaml", ROOT / "config/full_scale.yaml")
    done = snakemake(tmp_path, "results/logs/orders/times.csv", "--dry-run", *given, capture_output=True)
    assert done.returncode == 0, done.stderr
    (body,) = [body for name, body in JOB.findall(done.stdout + done.stderr) if name == "experiment_on_host"]
    assert "timing=1" in body and "gpu" not in body


def test_a_changed_batching_reruns_pruned_networks_alone(tmp_path, checkout):
    wanted, run = ("results/logs/pruned/deit-tiny-64-threshold_l2.csv", "results/logs/ragged/1x32.csv"), [*RUN]
    done = snakemake(tmp_path, *wanted, *run, source=checkout, capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:]

    def rerun():
        return [(name, w["experiment"]) for name, w in plan(tmp_path, *wanted, source=checkout)]

    with appended(checkout / "src/tilewright/networks/batching/gathered.py", "\nCHANGED = True\n"):
        assert rerun() == [("experiment", "pruned")]
    with appended(checkout / "src/tilewright/baselines/packed/nested.py", "\nCHANGED = True\n"):
        assert rerun() == [("experiment", "ragged")]
    with appended(checkout / "src/tilewright/study/experiments/heatmap.py", "\nCHANGED = True\n"):
        assert rerun() == []


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
    done = snakemake(tmp_path, *wanted, "--dry-run", *given, capture_output=True)
    assert done.returncode == 0, done.stderr
    asked = {}
    for _, body in JOB.findall(done.stdout + done.stderr):
        stated = dict(re.findall(r"\b(m|mem_mb|runtime)=([\w-]+)", body))
        asked[stated.get("m")] = (int(stated["mem_mb"]), int(stated["runtime"])) if "m" in stated else None
    small, large, largest = (asked[name] for name in ("vil-tiny-224-s1", "vil-tiny-8192-s1", "dynamicvit-s-4096"))
    assert small == (1500 + int(40 * models.size("vil-tiny-224-s1") / 1e6), 10)
    assert small < large < largest == (1500 + int(40 * models.size("dynamicvit-s-4096") / 1e6), 74)


def test_recorded_logs_are_shown_without_their_device(study, checkout, tmp_path):
    recorded = overlay(tmp_path / "study.recorded.yaml", {"recorded": str(study / "results"), "device": "cuda"})
    wanted = ("figures/latency_vil.svg", "results/tables/end_to_end.csv")
    run = ("--cores", "2", "--configfile", TINY, recorded)
    done = snakemake(tmp_path, *wanted, *run, source=checkout, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "results/logs").exists()
    for path in wanted:
        assert (tmp_path / path).read_bytes() == (study / path).read_bytes()


def test_a_failed_rule_prints_the_end_of_its_log(tmp_path):
    (tmp_path / "mine.npy").write_bytes(b"not an array")
    broken = {"workloads": ["file-mine"], "models": {"file-mine": {"path": "mine.npy"}}}
    change = {**broken, "figures": {"gantt_workload": "file-mine"}}
    run = (*RUN, overlay(tmp_path / "change.yaml", change))
    done = snakemake(tmp_path, "results/graphs/file-mine.npz", *run, capture_output=True)
    assert done.returncode != 0
    found = done.stderr.partition("Logfile logs/graph/file-mine.log:")[2]
    assert "error: mine.npy: expected a mask in .npz or .npy form" in found


def test_a_changed_page_makes_the_report_again_alone(study, checkout):
    assert snakemake(study, "results/report.html", *RUN, source=checkout, capture_output=True).returncode == 0
    text = (study / "results/report.html").read_text()
    assert all(f'id="figure-{name}"' in text for name in figures.selected(config.load(tiny()))[0])
    with appended(checkout / "src/tilewright/study/report/style.css", "\nbody { color: red; }\n"):
        assert [name for name, _ in plan(study, "results/report.html", source=checkout)] == ["report"]


def test_a_killed_run_resumes_and_leaves_no_broken_file(tmp_path):
    wanted = [f"results/blocks/vil-tiny-64-s1/{r}/{t}.npz" for r in ("none", "ic") for t in ("16x1", "64x64")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = snakemake(tmp_path, *wanted, *RUN, start=subprocess.Popen, start_new_session=True, **quiet)
    deadline = time.monotonic() + 120
    while not (found := [path for path in wanted if (tmp_path / path).exists()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert 0 < len(found) < len(wanted)
    for path in found:
        blocks.load(tmp_path / path)
    assert snakemake(tmp_path, "--unlock", *RUN, capture_output=True).returncode == 0
    done = snakemake(tmp_path, *wanted, *RUN, capture_output=True)
    assert done.returncode == 0, done.stderr
    for path in wanted:
        blocks.load(tmp_path / path)


# Parts of the study, as docs/running.md has them.

DOCUMENTED = re.findall(r"^snakemake (.+?)(?:  +#.*)?$", (ROOT / "docs/running.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", DOCUMENTED)
def test_a_documented_command_is_planned(line, checkout):
    small = [] if "--configfile" in line or "--lint" in line else ["--configfile", TINY]
    # Nothing but the command decides: it runs in the checkout, whose default profile Snakemake finds by itself.
    command = [sys.executable, "-m", "snakemake", "--dry-run", *shlex.split(line), *small]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_figure_and_table_is_a_target(tmp_path):
    shown = config.load(yaml.safe_load((ROOT / "config.yaml").read_text()))
    files = {
        "figure": [f"figures/{name}.{kind}" for name in figures.selected(shown)[0] for kind in ("svg", "png", "pdf")],
        "table": [f"results/tables/{name}.{kind}" for name in figures.selected(shown)[1] for kind in ("csv", "md")],
    }
    counts = Counter(name for name, _ in plan(tmp_path, *files["figure"], *files["table"]))
    assert (counts["figure"], counts["table"]) == (len(files["figure"]) / 3, len(files["table"]) / 2)


@pytest.mark.parametrize(
    ("stage", "rules"),
    [("graph", {"graph"}), ("blocks", {"graph", "reorder", "blocks"})],
)
def test_until_stops_after_a_stage(tmp_path, stage, rules):
    assert {name for name, _ in plan(tmp_path, "--until", stage)} == rules


def test_a_stale_table_is_made_alone(study, checkout):
    table = study / "results/tables/fill.md"
    content = table.read_text()
    table.unlink()
    assert plan(study, "results/tables/fill.md", source=checkout) == [("table", {"table": "fill"})]
    done = snakemake(study, "results/tables/fill.md", *RUN, source=checkout, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert table.read_text() == content
    with appended(checkout / "src/tilewright/study/tables/fill.py", "\nCHANGED = True\n"):
        # The figure is drawn with the table's code.
        assert {name for jobs in plan(study, *TARGETS, source=checkout) for name in jobs[1].values()} == {"fill"}
        assert plan(study, "results/tables/end_to_end.csv", source=checkout) == []


def test_values_on_the_command_line_win(tmp_path):
    jobs = plan(tmp_path, "--config", "solvers=[greedy,descent,highs]")
    assert {w["solver"] for name, w in jobs if name == "schedule"} == {"greedy", "descent", "highs"}


def test_another_folder_takes_all_that_a_run_writes(study, checkout):
    assert {"figures", "results", "logs", ".snakemake"} <= {path.name for path in study.iterdir()}
    assert not {"figures", "results", "logs"} & {path.name for path in checkout.iterdir()}


def test_the_graph_of_jobs_is_drawn(tmp_path):
    done = snakemake(tmp_path, "figures/fill.svg", "--dag", *RUN, capture_output=True)
    assert done.returncode == 0, done.stderr
    graphviz = done.stdout[done.stdout.index("digraph") :]
    labels = set(re.findall(r'label = "(\w+)', graphviz))
    assert labels == {"figure", "blocks", "reorder", "graph"}


def test_the_report_of_what_was_made(study, checkout, tmp_path):
    report = tmp_path / "study.report.html"
    shown = ("figures/fill.svg", "results/tables/fill.csv")
    done = snakemake(study, *shown, "--report", report, *RUN[2:], source=checkout, capture_output=True)
    assert done.returncode == 0, done.stderr
    page = report.read_text()
    assert all(name in page for name in shown) and "figures/latency_vil.svg" not in page


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
    done = snakemake(tmp_path, *arguments, *RUN, capture_output=True)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert not (tmp_path / "results").exists()


def test_a_missing_overlay_is_named(tmp_path):
    done = snakemake(tmp_path, "--cores", "2", "--configfile", "my.yaml", capture_output=True)
    assert done.returncode != 0 and "No such file or directory: 'my.yaml'" in done.stderr + done.stdout


@pytest.mark.skipif(shutil.which("conda") is not None, reason="conda is installed: it would deploy the environments")
def test_conda_environments_need_conda(tmp_path):
    done = snakemake(tmp_path, "results/graphs/vil-tiny-64-s1.npz", "--sdm", "conda", *RUN, capture_output=True)
    assert done.returncode != 0 and "Is conda installed and accessible?" in done.stderr + done.stdout


# The study from another Snakefile.


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
