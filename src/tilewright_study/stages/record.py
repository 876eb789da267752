"""Recorded runs (stage T5): the rows of a whole study, of one commit, machine and sitting, a file for each experiment.

``run`` measures what is missing in build/record/<device>, most wanted first, and writes expected/<device>/ of all that
is there: ``<experiment>.csv`` and ``run.json``, which says what the rows are of and which cases were left out, and why.
Rows that no table, figure or claim reads are counted and not kept, and numbers have `DIGITS`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic

import yaml

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright_study import config, experiments, provenance
from tilewright_study.measure import rows as _rows
from tilewright_study.stages.experiment import terminating

RUN = "run.json"
KIND = "recorded run"
VERSION = 1
# Columns that say what made a row; those that the rows of a run share are named in `RUN`.
FACTS = ("commit", "device", "cores", "driver", "torch", "triton", "numpy")
# In the folder of a run: what its calls asked for, and the minutes of each.
CALLS = "calls.json"
# Significant digits of a number: what is timed scatters by more than the last one.
DIGITS = 6
# Seconds that a job has to write the rows so far when time is up.
PATIENCE = 60


def run(device, overlays, minutes, checkout):
    """Record the study of config.yaml with `overlays` as expected/<device>/ of `checkout`, in so many `minutes`.

    overlays: without any, config/<device>.yaml, where there is one, else config/all.yaml. Those of ``experiments:``
    come first, then the others that the last overlay has a section of, in their order. A case that is there already,
    of an earlier call that ran out of time or was ended, is not measured again; with no minutes nothing is. What
    earlier calls asked for under other overlays is part of the run. Raises `ConfigError` where the checkout has
    changes, or rows are there of another commit, `ArtifactError` where there are none at the end.
    """
    begin = monotonic()
    target, work = checkout / "expected" / device, checkout / "build" / "record" / device
    if target.exists() and not (target / RUN).is_file():
        raise ConfigError(f"{target}: expected a recorded run to take the place of, found another folder")
    named = [path for path in [checkout / "config" / f"{device}.yaml"] if path.is_file()]
    overlays = [Path(path).resolve() for path in overlays] or named or [checkout / "config/all.yaml"]
    study = _study(checkout, overlays)
    asked = {name: experiments.files(name, study) for name in study.experiments}
    before = _before(work)
    every = [*dict.fromkeys([*before["asked"], *(path for paths in asked.values() for path in paths)])]
    _check_commit([work / path for path in every])
    spent, failed = before["minutes"], set()
    # Without a file to make the workflow would make all that the study shows.
    for name in filter(asked.get, study.experiments):
        left = 60 * minutes - (monotonic() - begin)
        if left <= 0:
            break
        names = f"experiments=[{', '.join(study.experiments)}]"
        given = ["--configfile", *overlays, "--config", names, "--", *asked[name]]
        if _measured(checkout, device, work, given, left):
            failed.update(asked[name])
        spent = [*before["minutes"], round((monotonic() - begin) / 60, 2)]
        artifacts.write_text(work / CALLS, json.dumps({"minutes": spent, "asked": every}))
    collect(work, target, every, failed, spent)


def collect(work, target, asked, failed=(), minutes=()):
    """Write the rows of the files `asked` for, where a workflow ran in the folder `work`, to the folder `target`, in
    place of what is there. failed: files that are missing for another reason than time; minutes: of each call.

    Raises `ArtifactError` where there are no rows.
    """
    rows, left_out = {}, {}
    for path in asked:
        if (work / path).is_file():
            kind, own = _rows.read(work / path, experiments.row_types())
            rows.setdefault(kind, []).extend(own)
        else:
            case = path.removeprefix(experiments.LOGS).removesuffix(".csv")
            left_out[case] = "failed" if path in failed else "no time"
    if not rows:
        raise ArtifactError(f"{work}: expected the rows of a run, found none")
    scores = {path.stem: json.loads(path.read_bytes()) for path in sorted(work.glob("results/checkpoints/*.json"))}
    write(target, rows, {"minutes": [*minutes], "left_out": left_out, "trainings": scores})
    print(f"{target}: {sum(map(len, rows.values()))} rows of {len(rows)} experiments; {len(left_out)} cases left out")


def write(target, rows, stated):
    """Write those of `rows`, ``{experiment: rows}``, that are kept, and `RUN`, with what is `stated` beside their own
    facts and how many were not kept."""
    measured = {name: len(own) for name, own in rows.items()}
    rows = {name: kept(name, own) for name, own in rows.items()}
    apart = {name: measured[name] - len(own) for name, own in rows.items() if len(own) < measured[name]}
    new = target.with_name(f"{target.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    for name, own in rows.items():
        _rows.write(new / f"{name}.csv", experiments.member(name).Row, own)
    found = facts([row for own in rows.values() for row in own])
    found |= {"experiments": {name: facts(own) for name, own in rows.items()}, "not_kept": apart, **stated}
    artifacts.write_json(new / RUN, KIND, VERSION, found)
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)


def kept(name, rows):
    """Those of an experiment's `rows`, texts as read, that it wants `recorded`, in `DIGITS`."""
    module = experiments.member(name)
    numbers = module.Row.numbers()
    chosen = module.recorded(rows) if hasattr(module, "recorded") else rows
    return [row | {column: _rounded(row[column]) for column in numbers if row[column]} for row in chosen]


def _rounded(text):
    """A number in `DIGITS`, unless that is longer."""
    return text if text.isdecimal() else min(text, repr(float(f"{float(text):.{DIGITS}g}")), key=len)


def facts(rows):
    """What `rows` say of themselves: how many they are, the first and the last time, and each value of `FACTS`."""
    times = [row["time"] for row in rows]
    found = {"rows": len(rows), "from": min(times), "to": max(times)}
    return found | {name: sorted({row[name] for row in rows} - {""}) for name in FACTS}


def _study(checkout, overlays):
    """The study of the overlays, with all experiments that the last one has a section of; those named come first."""
    from snakemake.utils import update_config

    stated = yaml.safe_load((checkout / "config.yaml").read_text())
    for own in [yaml.safe_load(path.read_text()) for path in overlays]:
        update_config(stated, own)
    others = [name for section in own for name in experiments.NAMES if experiments.section_of(name) == section]
    return config.load(stated | {"experiments": [*dict.fromkeys([*stated["experiments"], *others])]})


def _before(work):
    """What calls before asked for, and the minutes of each."""
    path = work / CALLS
    return json.loads(path.read_text()) if path.is_file() else {"minutes": [], "asked": []}


def _check_commit(paths):
    """Raise `ConfigError` unless all rows that are there are of this commit."""
    commit = provenance.commit()
    if not commit or commit.endswith("+"):
        raise ConfigError(f"expected the package of a commit, without changes, found {commit or 'none'}")
    for path in filter(Path.is_file, paths):
        _, rows = _rows.read(path, experiments.row_types())
        if others := sorted({row["commit"] for row in rows} - {commit}):
            raise ConfigError(
                f"{path}: expected rows of commit {commit}, found {', '.join(others)}; remove these to start over"
            )


def _measured(checkout, device, work, given, seconds):
    """Run the workflow as `given` in the folder `work`, no longer than `seconds`; whether some of it failed."""
    profile = next(path for name in (device, "default") if (path := checkout / "profiles" / name).is_dir())
    command = [sys.executable, "-m", "snakemake", "--snakefile", checkout / "Snakefile", "--directory", work]
    # Who was ended left its lock.
    command += ["--workflow-profile", profile, "--cores", "all", "--keep-going", "--rerun-incomplete", "--nolock"]
    path = os.pathsep.join(filter(None, [str(checkout / "src"), os.environ.get("PYTHONPATH")]))
    work.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": path}
    with terminating():
        process = subprocess.Popen([*command, *given], env=environment, stdin=subprocess.DEVNULL, process_group=0)
        try:
            return process.wait(seconds) != 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                _end(process)


def _end(process):
    """End `process` and all that it started: jobs first write the rows that they have."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
