"""The workflow itself, by Snakemake, on part of the small study, `helpers.checkout.TINY`.

What is due is planned where all files are there, empty. Jobs run in slow tests, and in `.ci/run`, which runs all of it.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from functools import partial

import pytest

from helpers import checkout as small
from helpers import loaded
from helpers.checkout import appended, copied, finish, merged, overlay, snakemake
from tilewright import graph
from tilewright.attention import blocks
from tilewright_study import config, figures
from tilewright_study.stages import record
from tilewright_study.tables import _select

# The small study, of whole networks one with two kinds of attention.
TINY = small.kept(small.small(networks={"workloads": ["regionvit-tiny-64"], "attention": {"native": [], "full": []}}))
# On one core, jobs are forks of one process that has loaded libraries, and not of two.
RUN = ("--cores", "1", "--configfile", TINY)
plan = partial(small.plan, configs=(TINY,), cores=1)
described = partial(small.described, studies=[(TINY,)], cores=1)
# Reach every stage with few jobs.
TARGETS = ("figures/fill.svg", "figures/latency_vil.svg", "results/tables/fill.csv", "results/tables/end_to_end.csv")
PACKED = ("results/logs/pruned/deit-tiny-64-threshold_l2.csv", "results/logs/ragged/1x32.csv")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what runs the workflow, free to be edited."""
    return copied(tmp_path_factory.mktemp("source") / "checkout")


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """A folder of what the jobs of `study` have loaded."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def study(checkout, tmp_path_factory):
    """A folder where `TARGETS` and `PACKED` are done, of empty files."""
    directory = tmp_path_factory.mktemp("done")
    finish(directory, *TARGETS, *PACKED, configs=(TINY,), source=checkout, cores=1)
    return directory


@pytest.fixture(scope="module")
def ran(checkout, traces, tmp_path_factory):
    """A finished run of `TARGETS` and `PACKED`."""
    directory = tmp_path_factory.mktemp("study")
    given = {"source": checkout, "variables": loaded.traced(traces), "capture_output": True}
    done = snakemake(directory, *TARGETS, *PACKED, *RUN, **given)
    assert done.returncode == 0, done.stderr[-4000:]
    return directory


@pytest.mark.slow
def test_a_second_run_does_nothing(ran, checkout):
    assert graph.load(ran / "results/graphs/vil-tiny-64-s1.npz").entries > 0
    assert {path.suffix for path in ran.glob("figures/fill.*")} == {".svg", ".png", ".pdf", ".json"}
    assert list((ran / ".snakemake/plans").glob("*.plan"))
    done = snakemake(ran, *TARGETS, *RUN, source=checkout, capture_output=True)
    assert "Nothing to be done" in done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["figures/fill.svg", "results/tables/fill.md"])
def test_a_figure_and_a_table_are_made_by_name(ran, checkout, name):
    content = (ran / name).read_bytes()
    (ran / name).unlink()
    done = snakemake(ran, name, *RUN, source=checkout, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (ran / name).read_bytes() == content


def test_what_is_whole_is_not_due_and_a_file_that_is_lost_is_made_alone(study, checkout, tmp_path):
    assert plan(study, *TARGETS, *PACKED, source=checkout) == []
    for name, job in (
        ("figures/fill.svg", ("figure", {"figure": "fill"})),
        ("results/tables/fill.md", ("table", {"table": "fill"})),
    ):
        kept = (study / name).rename(tmp_path / "kept")
        assert plan(study, name, source=checkout) == [job]
        kept.rename(study / name)


def assert_only_order(jobs, order):
    """All jobs of `order` from its reordering on, none of another order, and what shows several."""
    assert {name for name, _ in jobs} >= {"reorder", "blocks", "profile", "schedule", "bench", "figure", "table"}
    assert {w["r"] for _, w in jobs if "r" in w} == {order}
    assert not {name for name, _ in jobs} & {"graph", "baselines"}


def test_a_changed_parameter_reruns_its_order_alone(study, checkout, tmp_path):
    change = overlay(tmp_path / "change.yaml", {"reorder": {"ic": {"tau": 0.31}}})
    assert_only_order(plan(study, *TARGETS, configs=(TINY, change), source=checkout), "ic")


def test_changed_code_of_an_order_reruns_its_order_alone(study, checkout):
    module = checkout / "src/tilewright/attention/reorder/ic.py"
    with appended(module, "\n# A comment changes nothing.\n"):
        assert plan(study, *TARGETS, source=checkout) == []
    with appended(module, "\nCHANGED = True\n"):
        assert_only_order(plan(study, *TARGETS, source=checkout), "ic")


def test_changed_facts_of_a_device_rerun_what_was_made_for_it(study, checkout):
    facts = checkout / "src/tilewright/devices"
    with appended(facts / "cuda/facts.py", "\nCHANGED = True\n"):
        assert plan(study, *TARGETS, source=checkout) == []
    with appended(facts / "cpu/facts.py", "\nCHANGED = True\n"):
        names = {name for name, _ in plan(study, *TARGETS, source=checkout)}
    assert names >= {"profile", "schedule", "bench", "baselines"}
    assert not names & {"graph", "reorder", "blocks"}


def test_a_changed_script_reruns_its_stage_and_what_follows(study, checkout):
    script = checkout / "workflow/scripts/solve_ilp.py"
    with appended(script, "\n# A comment changes nothing.\n"):
        assert plan(study, *TARGETS, source=checkout) == []
    with appended(script, "\nCHANGED = True\n"):
        names = {name for name, _ in plan(study, *TARGETS, source=checkout)}
    assert {"schedule", "bench"} <= names
    assert not names & {"graph", "reorder", "blocks", "profile", "baselines"}


@pytest.mark.slow
def test_what_jobs_load_is_their_code(ran, checkout, traces):
    (jobs,) = described(ran, *TARGETS, *PACKED, source=checkout)
    found = loaded.missed(jobs, traces)
    assert found.keys() >= {
        "graph",
        "reorder",
        "blocks",
        "profile",
        "schedule",
        "bench",
        "baselines",
        "experiment",
    }
    assert found.keys() >= {"figure", "table"} and not any(found.values()), found


# A change of each stage, a file that its job has removed when it was interrupted, and the rule that is due then for one
# figure, too.
INTERRUPTED = [
    ("graph", "results/graphs/vil-tiny-64-s1.npz", {"models": {"vil-tiny-64-s1": {"window": 5}}}),
    ("reorder", "results/graphs/vil-tiny-64-s1/ic.npz", {"reorder": {"ic": {"tau": 0.31}}}),
    ("blocks", "results/blocks/vil-tiny-64-s1/ic/64x1.npz", {"region_rows": 256}),
    ("profile", "results/profiling/vil-tiny-64-s1/ic/64x1.json", {"split_keys": 512}),
    ("schedule", "results/schedules/vil-tiny-64-s1/ic/mixed.greedy.json", {"schedule": {"objective": "paper"}}),
    ("baselines", "results/logs/vil-tiny-64-s1/baselines.csv", {"attention": {"max_dense_tokens": 10}}),
    ("bench", "results/logs/vil-tiny-64-s1/ic/mixed.greedy.csv", {"timing": {"rse": 0.03}}),
]


@pytest.mark.parametrize(("rule", "lost", "change"), INTERRUPTED, ids=[rule for rule, *_ in INTERRUPTED])
def test_a_change_whose_job_was_interrupted_is_missed_by_a_figure(study, checkout, tmp_path, rule, lost, change):
    configs = (TINY, overlay(tmp_path / "change.yaml", change))
    kept = (study / lost).rename(tmp_path / "kept")
    jobs = plan(study, "figures/latency_vil.svg", configs=configs, source=checkout)
    kept.rename(study / lost)
    assert {name for name, _ in jobs} >= {rule, "figure"}


def test_networks_follow_their_code(study, checkout):
    with appended(checkout / "src/tilewright/networks/regionvit.py", "\nCHANGED = True\n"):
        jobs = plan(study, *TARGETS, source=checkout)
    assert [w for name, w in jobs if name == "experiment"] == [{"experiment": "networks", "case": "regionvit-tiny-64"}]
    assert {name for name, _ in jobs} == {"experiment", "table"}


def test_a_changed_batching_reruns_pruned_networks_alone(study, checkout):
    def rerun():
        return [(name, w["experiment"]) for name, w in plan(study, *PACKED, source=checkout)]

    assert rerun() == []
    with appended(checkout / "src/tilewright/networks/batching/gathered.py", "\nCHANGED = True\n"):
        assert rerun() == [("experiment", "pruned")]
    with appended(checkout / "src/tilewright_study/baselines/packed/nested.py", "\nCHANGED = True\n"):
        assert rerun() == [("experiment", "ragged")]
    with appended(checkout / "src/tilewright_study/experiments/heatmap/__init__.py", "\nCHANGED = True\n"):
        assert rerun() == []


@pytest.mark.slow
def test_recorded_logs_are_shown_without_their_device(ran, checkout, tmp_path):
    record.collect(ran, tmp_path / "rows", _select.logs(config.load(merged(TINY))))
    recorded = overlay(tmp_path / "study.recorded.yaml", {"recorded": str(tmp_path / "rows"), "device": "cuda"})
    wanted = ("figures/latency_vil.svg", "results/tables/end_to_end.csv")
    run = ("--cores", "1", "--configfile", TINY, recorded)
    done = snakemake(tmp_path, *wanted, *run, source=checkout, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "results/logs").exists()
    for path in wanted:
        (words, numbers), (expected, rounded) = (parts(folder / path) for folder in (ran, tmp_path))
        assert words == expected
        # Recorded numbers are rounded.
        assert rounded == pytest.approx(numbers, rel=1e-4, abs=1e-3)


def parts(path):
    """The words of a file, without the digests that name marks in a figure, and its numbers."""
    text = re.sub(r"\b[a-z][0-9a-f]{10}\b", "", path.read_text())
    number = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
    return re.sub(number, "", text), [float(found) for found in re.findall(number, text)]


def test_a_failed_rule_prints_the_end_of_its_log(tmp_path):
    (tmp_path / "mine.npy").write_bytes(b"not an array")
    broken = {"workloads": ["file-mine"], "models": {"file-mine": {"path": "mine.npy"}}}
    change = {**broken, "figures": {"pattern_workloads": [], "fill_workloads": []}}
    run = (*RUN, overlay(tmp_path / "change.yaml", change))
    done = snakemake(tmp_path, "results/graphs/file-mine.npz", *run, capture_output=True)
    assert done.returncode != 0
    found = done.stderr.partition("Logfile logs/graph/file-mine.log:")[2]
    assert "error: mine.npy: expected a mask in .npz, .npy or .pt form" in found


@pytest.mark.slow
def test_a_changed_page_makes_the_report_again_alone(ran, checkout, tmp_path, tmp_path_factory):
    # Most of what this part of the study shows was made with `ran`.
    part = {"experiments": ["attention"], "workloads": ["vil-tiny-64-s1"], "orders": ["ic"]}
    configs = (TINY, overlay(tmp_path / "part.yaml", part))
    shown = figures.selected(config.load(merged(*configs)))
    # As deep as the study: commands name the checkout by its relative path, and others would run again.
    directory = shutil.copytree(ran, tmp_path_factory.mktemp("page"), dirs_exist_ok=True)
    jobs = plan(directory, "results/report.html", configs=configs, source=checkout)
    assert not {"profile", "bench", "baselines", "experiment"} & {name for name, _ in jobs}
    run = ("--cores", "1", "--configfile", *configs)
    done = snakemake(directory, "results/report.html", *run, source=checkout, capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:]
    text = (directory / "results/report.html").read_text()
    assert len(shown[0]) > 5 and all(f'id="figure-{name}"' in text for name in shown[0])
    with appended(checkout / "src/tilewright_study/report/style.css", "\nbody { color: red; }\n"):
        jobs = plan(directory, "results/report.html", configs=configs, source=checkout)
    assert [name for name, _ in jobs] == ["report"]


@pytest.mark.slow
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


def test_a_table_and_its_figure_follow_the_tables_code(study, checkout):
    with appended(checkout / "src/tilewright_study/experiments/attention/table_fill.py", "\nCHANGED = True\n"):
        # The figure is drawn with the table's code.
        assert {name for jobs in plan(study, *TARGETS, source=checkout) for name in jobs[1].values()} == {"fill"}
        assert plan(study, "results/tables/end_to_end.csv", source=checkout) == []


@pytest.mark.slow
def test_another_folder_takes_all_that_a_run_writes(ran, checkout):
    assert {"figures", "results", "logs", ".snakemake"} <= {path.name for path in ran.iterdir()}
    assert not {"figures", "results", "logs"} & {path.name for path in checkout.iterdir()}


@pytest.mark.slow
def test_the_report_of_what_was_made(ran, checkout, tmp_path):
    report = tmp_path / "study.report.html"
    shown = ("figures/fill.svg", "results/tables/fill.csv")
    done = snakemake(ran, *shown, "--report", report, *RUN[2:], source=checkout, capture_output=True)
    assert done.returncode == 0, done.stderr
    page = report.read_text()
    assert all(name in page for name in shown) and "figures/latency_vil.svg" not in page
