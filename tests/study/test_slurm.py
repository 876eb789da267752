"""The workflow on a real SLURM, one node with two stand-in GPUs (slurm_node.sh), through the profile that users copy.

Skipped, with the reason, where SLURM or its executor cannot be had; `SLURM_NODE_REQUIRED=1` makes that a failure.
"""

import contextlib
import errno
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml

from helpers.checkout import ROOT, TINY, overlay, plan
from tilewright import graph
from tilewright.attention import blocks

NODE = ROOT / "tests/study/slurm_node.sh"
PROFILE = ROOT / "profiles/slurm-a100/profile.yaml"
# What its user would put in.
FILLED = {"CHANGE-ME-account": "lab", "CHANGE-ME-cpu-partition": "cpu", "CHANGE-ME-gpu-partition": "gpu"}
GRAPH = "results/graphs/vil-tiny-64-s1.npz"
# What is made of one workload by every rule but that of the report, which is of all figures.
TARGETS = (
    *("figures/latency_vil.svg", "figures/video_maps.svg", "figures/scene.svg", "figures/push_tiles.svg"),
    *(f"results/tables/{name}.csv" for name in ("pruned_accuracy", "configure", "reorder_time")),
)
FEWER = {
    "workloads": ["vil-tiny-64-s1"],
    "orders": ["ic"],
    "attention": {"schedules": {"mixed": ["highs"]}},
}
# Seconds that a run on the node may take, whatever else the machine does.
PATIENCE = 1500


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """The folder of a running node."""

    def missing(reason):
        (pytest.fail if os.environ.get("SLURM_NODE_REQUIRED") else pytest.skip)(f"no SLURM: {reason}")

    if importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        missing("snakemake-executor-plugin-slurm is not installed (the extra `slurm`)")
    folder = tmp_path_factory.mktemp("node")
    started = subprocess.run([NODE, "start", folder], capture_output=True, text=True)
    if started.returncode:
        missing(started.stderr.strip().rpartition("\n")[2])
    assert "idle" in started.stdout and "gpu:a100:2" in started.stdout
    yield folder
    subprocess.run([NODE, "stop", folder], check=True)


def profile(folder, filled=FILLED, resources=None, **changes):
    """Write the shipped profile with the placeholders `filled`, and with what a small node without accounting needs.

    resources: by rule, added to ``set-resources``. The study runs on the CPU, and its timed jobs ask for a GPU anyway.
    """
    text = PROFILE.read_text()
    for placeholder, value in filled.items():
        text = text.replace(placeholder, value)
    mapping = yaml.safe_load(text)
    stated = mapping["set-resources"]
    for chosen in stated.values():
        chosen |= {"mem_mb": 2000} | ({"gpu": 1} if "gpu_model" in chosen else {})
    for rule, more in (resources or {}).items():
        stated[rule] = stated.get(rule, {}) | more
    mapping |= {"configfile": [str(TINY)], "cores": 2, "slurm-status-command": "squeue", "latency-wait": 10}
    mapping |= {"slurm-init-seconds-before-status-checks": 2, **changes}
    folder.mkdir()
    (folder / "profile.yaml").write_text(yaml.safe_dump(mapping))
    return folder


def begin(directory, chosen, *targets):
    """Start the workflow in `directory` under a profile."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", directory, *targets]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [*command, "--workflow-profile", chosen],
        env=environment,
        # A shell that starts the tests in the background has them ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **pipes,
    )


def run(directory, chosen, *arguments):
    """Return code and output of a whole run."""
    started = begin(directory, chosen, *arguments)
    try:
        output, _ = started.communicate(timeout=PATIENCE)
    finally:
        if started.poll() is None:
            # On SIGTERM the executor keeps waiting for its jobs.
            started.send_signal(signal.SIGINT)
            started.wait()
    return started.returncode, output


def jobs(directory, *fields):
    """Fields of every job of a run: first what it is, then those asked for, by the names of ``squeue -O``."""
    form = ",".join(f"{name}:200" for name in ("workdir", "comment", *fields))
    told = subprocess.run(["squeue", "--states=all", "-h", "-O", form], capture_output=True, text=True, check=True)
    found = [line.split() for line in told.stdout.splitlines()]
    return [(what.partition("_wildcards")[0], *values) for place, what, *values in found if place == str(directory)]


def states(directory):
    """The states of a run's jobs."""
    return {state for _, state in jobs(directory, "state")}


def until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


@pytest.mark.slow
def test_every_rule_goes_through(node, tmp_path):
    # `.ci/run` runs all of the small study on one machine.
    configs = [TINY, overlay(tmp_path / "fewer.yaml", FEWER)]
    directory, whole = tmp_path / "run", plan(tmp_path / "run")
    begun = plan(directory, *TARGETS, configs=configs)
    assert {rule for rule, _ in begun} == {rule for rule, _ in whole} - {"all", "report"}
    chosen = profile(tmp_path / "profile", configfile=[*map(str, configs)])
    status, output = run(directory, chosen, *TARGETS)
    assert status == 0, output[-4000:]
    assert all((directory / target).stat().st_size for target in TARGETS)
    asked = {name: rest for name, *rest in jobs(directory, "state", "partition", "tres-per-job", "oversubscribe")}
    for rule in ("rule_profile", "rule_bench", "rule_baselines", "rule_experiment"):
        assert asked[rule] == ["COMPLETED", "gpu", "gres:gpu:a100:1", "NO"]
    assert asked["rule_graph"] == ["COMPLETED", "cpu", "N/A", "OK"]
    # An order and its blocks are one job.
    assert not {"rule_reorder", "rule_blocks"} & set(asked)
    status, output = run(directory, chosen, *TARGETS)
    assert status == 0 and "Nothing to be done" in output


@pytest.mark.slow
def test_a_job_killed_for_memory_is_retried_with_more(node, tmp_path):
    # Less than Snakemake and the package need, then enough.
    chosen = profile(tmp_path / "profile", resources={"graph": {"mem_mb": "100 * 15 ** (attempt - 1)"}})
    status, output = run(tmp_path / "run", chosen, GRAPH)
    assert status == 0, output[-4000:]
    assert "Trying to restart job" in output
    assert re.search(r"SLURM-job '\d+' failed, SLURM status is: '(OUT_OF_MEMORY|FAILED)'", output)
    assert graph.load(tmp_path / "run" / GRAPH).n_rows == 257


@pytest.mark.slow
def test_a_job_that_keeps_failing_ends_the_run_and_shows_its_log(node, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(
        yaml.safe_dump({"workloads": ["vil-tiny-64-s1", "file-mine"], "models": {"file-mine": {"path": "mask.npy"}}})
    )
    chosen = profile(tmp_path / "profile", retries=1, configfile=[str(TINY), str(wrong)])
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "mask.npy").write_text("not a mask")
    status, output = run(directory, chosen, "results/graphs/file-mine.npz")
    assert status != 0
    assert output.count("Trying to restart job") == 1
    assert "mask.npy: expected a mask in .npz, .npy or .pt form" in output
    assert not (directory / "results/graphs/file-mine.npz").exists()


def processes(number):
    """Processes of a job; none before it has some.

    A task without a process is listed as -1, which is every process of the machine where a signal is sent to it.
    """
    told = subprocess.run(["scontrol", "listpids", number], capture_output=True, text=True)
    found = [int(line.split()[0]) for line in told.stdout.splitlines()[1:]] if told.returncode == 0 else []
    return [process for process in found if process > 0]


def stopped(number):
    """Stop the processes of a job, and return them."""
    found = processes(number)
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)
    return found


def test_a_task_without_a_process_has_none(tmp_path, monkeypatch):
    listing = "PID      JOBID    STEPID   LOCALID GLOBALID"
    stand_in = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for rows, expected in (("-1 7 batch 0 0", []), ("-1 7 batch 0 0\n41 7 batch - -", [41])):
        stand_in.write_text(f"#!/bin/sh\ncat <<'EOF'\n{listing}\n{rows}\nEOF\n")
        stand_in.chmod(0o755)
        assert processes("7") == expected


@pytest.mark.slow
def test_a_job_over_its_time_is_killed_by_name(node, tmp_path):
    directory = tmp_path / "run"
    chosen = profile(tmp_path / "profile", retries=0, resources={"graph": {"runtime": 1}})
    started = begin(directory, chosen, GRAPH)
    # A stopped job lasts for ever; one that is looked at first and stopped later may have ended meanwhile.
    until(lambda: any(stopped(number) for _, number in jobs(directory, "jobid")))
    ((_, number),) = jobs(directory, "jobid")
    output, _ = started.communicate(timeout=PATIENCE)
    assert started.returncode != 0
    assert f"SLURM-job '{number}' failed, SLURM status is: 'TIMEOUT'" in output, output[-4000:]


@pytest.mark.slow
def test_a_cancelled_run_leaves_no_job_and_resumes(node, tmp_path):
    wanted = [f"results/blocks/vil-tiny-64-s1/{r}/16x1.npz" for r in ("none", "ic")]
    directory, chosen = tmp_path / "run", profile(tmp_path / "profile")
    started = begin(directory, chosen, *wanted)
    until((directory / GRAPH).exists)
    # Until then the folder is locked for others.
    status, output = run(directory, chosen, *wanted)
    assert status != 0 and "LockException" in output and "--unlock" in output
    until(lambda: any(name.startswith("rule_order") for name, _ in jobs(directory, "state")))
    started.send_signal(signal.SIGINT)
    output, _ = started.communicate(timeout=PATIENCE)
    assert started.returncode != 0, output[-4000:]
    until(lambda: not states(directory) & {"RUNNING", "PENDING", "COMPLETING"})
    made = (directory / GRAPH).stat().st_mtime_ns
    status, output = run(directory, chosen, *wanted)
    assert status == 0, output[-4000:]
    assert (directory / GRAPH).stat().st_mtime_ns == made
    for path in wanted:
        blocks.load(directory / path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("filled", "resources", "message"),
    [
        (
            {**FILLED, "CHANGE-ME-cpu-partition": "CHANGE-ME-cpu-partition"},
            {},
            "invalid partition specified: CHANGE-ME",
        ),
        (FILLED, {"graph": {"gpu": 1, "gpu_model": "h200"}}, "Requested node configuration is not available"),
        (FILLED, {"graph": {"gpu": 3, "gpu_model": "a100"}}, "Requested node configuration is not available"),
        (FILLED, {"graph": {"mem_mb": 10**9}}, "Memory specification can not be satisfied"),
    ],
    ids=["no_partition", "no_such_gpu", "too_many_gpus", "too_much_memory"],
)
def test_what_the_cluster_has_not_is_refused_by_name(node, tmp_path, filled, resources, message):
    chosen = profile(tmp_path / "profile", filled, resources, retries=0)
    status, output = run(tmp_path / "run", chosen, GRAPH)
    assert status != 0
    assert message in output, output[-4000:]
    assert not (tmp_path / "run" / GRAPH).exists()


def test_a_full_disk_is_named_and_leaves_no_broken_file(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", small], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk: {mounted.stderr.strip()}")
    try:
        script = [sys.executable, ROOT / "workflow/scripts/gen_adj.py", "--model", "vil-tiny-224-s1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run([*script, "--output", small / "A.npz"], capture_output=True, text=True, env=environment)
        assert done.returncode != 0
        assert os.strerror(errno.ENOSPC) in done.stderr and "Traceback" not in done.stderr
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)
