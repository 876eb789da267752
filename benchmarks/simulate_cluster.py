"""The full-scale study on a simulated cluster: makespan, critical path, peak queue and what submission costs.

The jobs and their groups are those of Snakemake's own dry run under a profile; the queue is simulated event by event,
with the executor's habits: one submission after the other, a limit on jobs in flight, and a poll for finished ones that
slows down while nothing finishes. Each GPU node holds one timed job. Durations are a model, see the constants.

    python benchmarks/simulate_cluster.py [--gpu-nodes 64] [--cpu-jobs 256] [--timed-s 60]
"""

import argparse
import heapq
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml

from tilewright import models

ROOT = Path(__file__).parents[1]
TIMED = ("profile", "tune", "bench", "baselines", "experiment")
# Seconds of a job that is not timed: T1 and T2 as `benchmark:` recorded them in the small study on two cores; for each
# number of a graph, measured for T1 and T2 up to 4.7e8 numbers (docs/slurm.md).
# ASSUME: ten seconds for a schedule, five for a figure, table or report, and for the orders' times what README.md
# claims.
FIXED_S = {
    **{"graph": 1, "reorder": 3, "blocks": 3, "schedule": 10, "figure": 5, "table": 5, "report": 5},
    "experiment_on_host": 120,
}
NUMBER_S = 1e-6
# Of the executor on one busy node (docs/slurm.md): from sbatch to sbatch, and what a job lasts beyond its command.
SUBMIT_S, START_S = 0.15, 9
# Of snakemake-executor-plugin-slurm 2.8: the first poll, each next one while nothing finishes, and the last.
POLL_S, POLL_MORE_S, POLL_MOST_S = 40, 10, 180

JOB = re.compile(r"^( *)(?:local)?rule (\w+):\n((?:\1    \S.*\n)+)", re.MULTILINE)
GROUP = re.compile(r"^\[.*\] Group job .*:\n", re.MULTILINE)


def main():
    """Dry run, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu-nodes", type=int, default=64)
    parser.add_argument("--cpu-jobs", type=int, default=256, help="jobs that the CPU partition runs at once")
    parser.add_argument("--timed-s", type=float, default=60, help="seconds of a timed job, an assumption")
    parser.add_argument("--profile", type=Path, default=ROOT / "profiles/slurm-a100")
    given = parser.parse_args()
    started = time.monotonic()
    text = dry_run(given.profile)
    dag_s = time.monotonic() - started
    units = read(text, given.timed_s)
    limit = yaml.safe_load((given.profile / "profile.yaml").read_text())["jobs"]
    found = simulate(units, {"gpu": given.gpu_nodes, "cpu": given.cpu_jobs}, limit)
    ideal = max(critical_path(units))
    work = sum(unit["seconds"] for unit in units)
    rows = {
        "jobs": sum(unit["jobs"] for unit in units),
        "submissions": len(units),
        "dry run, s": f"{dag_s:.1f}",
        "work of all jobs, h": f"{work / 3600:.1f}",
        "critical path, min": f"{ideal / 60:.1f}",
        "makespan, min": f"{found['makespan'] / 60:.1f}",
        "overhead of a submission, s": f"{found['overhead'] / len(units):.1f}",
        "most jobs waiting for a node": found["queued"],
        "most GPU nodes at work": found["gpu"],
        "most CPU jobs at work": found["cpu"],
    }
    for name, value in rows.items():
        print(f"{name:32} {value}")


def dry_run(profile):
    """What Snakemake says it would submit."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--dry-run", "--workflow-profile"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, profile, "--directory", folder], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr + done.stdout)
    return done.stdout + done.stderr


def read(text, timed_s):
    """Submissions, in order: each with its ``jobs``, ``kind`` of node, ``seconds`` and the indices it ``needs``."""
    # Where a group begins, its jobs are indented; a job at the margin is a submission of its own.
    heads = [match.end() for match in GROUP.finditer(text)]
    jobs, makers, members = [], {}, {}
    for match in JOB.finditer(text):
        stated = dict(re.findall(r"^ +(\w+): (.*)$", match[3], re.MULTILINE))
        name = match[2]
        if name == "all":
            continue
        key = ("group", sum(head <= match.start() for head in heads)) if match[1] else ("job", len(jobs))
        members.setdefault(key, []).append(len(jobs))
        makers |= dict.fromkeys(stated["output"].split(", "), len(jobs))
        wildcards = dict(pair.split("=") for pair in stated.get("wildcards", "").split(", ") if pair)
        jobs.append((name, seconds(name, wildcards, timed_s), stated.get("input", "").split(", ")))
    of = {job: unit for unit, chosen in enumerate(members.values()) for job in chosen}
    needs = [{makers[path] for path in inputs if path in makers} for _, _, inputs in jobs]
    units = []
    for unit, chosen in enumerate(members.values()):
        ends = {}
        # A dry run lists what is needed before what needs it, but for the members of a group.
        pending = list(chosen)
        while pending:
            for job in [job for job in pending if not needs[job] & set(pending)]:
                ends[job] = jobs[job][1] + max((ends[need] for need in needs[job] if need in ends), default=0)
                pending.remove(job)
        outside = {of[need] for job in chosen for need in needs[job]} - {unit}
        kind = "gpu" if jobs[chosen[0]][0] in TIMED else "cpu"
        units.append({"jobs": len(chosen), "kind": kind, "seconds": max(ends.values()), "needs": outside})
    return units


def seconds(rule, wildcards, timed_s):
    """How long a job takes by the model."""
    size = models.size(wildcards["m"]) if "m" in wildcards else 0
    return (timed_s if rule in TIMED else FIXED_S[rule]) + size * NUMBER_S


def critical_path(units):
    """When each submission ends if nothing waits for a node, a submission or a poll; start-up included."""
    ends = {}

    def end(index):
        if index not in ends:
            unit = units[index]
            ends[index] = START_S + unit["seconds"] + max((end(need) for need in unit["needs"]), default=0)
        return ends[index]

    return [end(index) for index in range(len(units))]


def simulate(units, nodes, limit):
    """Makespan and peaks under at most `limit` submissions in flight.

    overhead: seconds of all submissions that are neither work nor waiting for a node.
    """
    missing = [set(unit["needs"]) for unit in units]
    ready = [index for index, needs in enumerate(missing) if not needs]
    free, peak, overhead = Counter(nodes), Counter(), 0.0
    now, wait, flying, done = 0.0, POLL_S, 0, 0
    # What SLURM sees: (time, whether a job ends, its index); and who waits for a node.
    events, queue = [], []
    while done < len(units):
        # Snakemake submits what may go, one after the other, ...
        at = now
        while ready and flying < limit:
            at += SUBMIT_S
            overhead += at - now
            flying += 1
            heapq.heappush(events, (at, False, ready.pop(0)))
        # ... and looks again after a while.
        now, ended = max(now + wait, at), []
        while events and events[0][0] <= now:
            at, ends, index = heapq.heappop(events)
            if ends:
                free[units[index]["kind"]] += 1
                ended.append(index)
                overhead += now - at + START_S
            else:
                queue.append(index)
            for waiting in [index for index in queue if free[units[index]["kind"]]]:
                kind = units[waiting]["kind"]
                if free[kind]:
                    queue.remove(waiting)
                    free[kind] -= 1
                    peak[kind] = max(peak[kind], nodes[kind] - free[kind])
                    heapq.heappush(events, (at + START_S + units[waiting]["seconds"], True, waiting))
            peak["queued"] = max(peak["queued"], len(queue))
        flying, done = flying - len(ended), done + len(ended)
        for needs in missing:
            needs.difference_update(ended)
        # Those without needs that have not been ready before.
        ready += [index for index, needs in enumerate(missing) if not needs and units[index]["needs"] & set(ended)]
        wait = POLL_S if ended else min(wait + POLL_MORE_S, POLL_MOST_S)
    return {"makespan": now, "overhead": overhead, **{name: peak[name] for name in ("queued", "gpu", "cpu")}}


if __name__ == "__main__":
    main()
