"""Copies of this checkout that may be edited, and Snakemake run on one."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import yaml
from snakemake.utils import update_config

ROOT = Path(__file__).parents[2]


def _experiments():
    return sorted(path.parent for path in (ROOT / "src/tilewright_study/experiments").glob("*/__init__.py"))


def small(**changes):
    """The small study of all experiments: tests/config/tiny.yaml, and the section that each has in its folder.

    changes: in place of some of its keys.
    """
    folders = _experiments()
    found = {"experiments": [folder.name for folder in folders]}
    for path in (ROOT / "tests/config/tiny.yaml", *(folder / "tiny.yaml" for folder in folders)):
        # Several experiments may share a section, which stands in the folder of one.
        found |= yaml.safe_load(path.read_text()) if path.is_file() else {}
    update_config(found, changes)
    return found


def kept(mapping):
    """A file of this content, the same for all processes of the tests."""
    text = yaml.safe_dump(mapping, sort_keys=False, default_flow_style=None)
    path = Path(tempfile.gettempdir(), f"tilewright-{hashlib.sha256(text.encode()).hexdigest()[:16]}.yaml")
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    new.replace(path)
    return path


# The small study, and how it is run.
TINY = kept(small())
RUN = ("--cores", "2", "--configfile", TINY)
# All that runs on a CPU, an overlay of the default study.
ALL = ROOT / "config/all.yaml"
JOB = re.compile(r"^(?:local)?rule (\w+):\n((?:    .+\n)*)", re.MULTILINE)
PARTS = ("src", "workflow", "rules", "profiles", "envs", "expected", "config")


def merged(*overlays):
    """The configuration of the default study under `overlays`, paths or mappings, as Snakemake merges it."""
    found = yaml.safe_load((ROOT / "config.yaml").read_text())
    for each in overlays:
        update_config(found, deepcopy(each) if isinstance(each, dict) else yaml.safe_load(Path(each).read_text()))
    return found


def copied(source):
    """Copy what runs the workflow to the folder `source`; return it."""
    for name in PARTS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("Snakefile", "config.yaml"):
        shutil.copy(ROOT / name, source / name)
    return source


def linked(source):
    """Have the new folder `source` stand for this checkout; what runs in it writes nothing here."""
    source.mkdir()
    for name in (*PARTS, "Snakefile", "config.yaml"):
        (source / name).symlink_to(ROOT / name)
    return source


def snakemake(directory, *arguments, source=ROOT, start=subprocess.run, variables=None, **keywords):
    """Run the workflow of the checkout `source`, and its package, in `directory`.

    variables: of its environment; of PYTHONPATH what comes after the package.
    """
    stated = dict(variables or {})
    path = os.pathsep.join(filter(None, [str(source / "src"), stated.get("PYTHONPATH")]))
    environment = {**os.environ, **stated, "PYTHONPATH": path}
    # Snakemake ends when its last timer does, see the profile: nothing is timed here.
    quick = ["--max-jobs-per-timespan", "1000/1s"]
    command = [sys.executable, "-m", "snakemake", *_stated(directory, source), *quick, *arguments]
    return start(command, env=environment, text=True, **keywords)


def _stated(directory, source):
    """What a command line of Snakemake begins with."""
    where = ["--snakefile", source / "Snakefile", "--directory", directory]
    return [*where, "--workflow-profile", source / "profiles/default"]


# Loading takes longer than planning: processes that plan are forks of one that has loaded Snakemake and the package.
_LOADED = multiprocessing.get_context("forkserver")
_LOADED.set_forkserver_preload(
    [
        *("snakemake.cli", "snakemake.report.html_reporter", "scipy.sparse.csgraph", "smart_open", "msgspec"),
        *(f"tilewright_study.{name}" for name in ("config", "origins", "starts", "report")),
        *(f"tilewright_study.experiments.{folder.name}" for folder in _experiments()),
    ]
)
# What planning does without; Snakemake itself loads solvers.
HEAVY = {"torch", "triton", "numba", "matplotlib"}


def _take(source):
    """In a process of its own: the package of the checkout `source`."""
    os.environ["PYTHONPATH"] = str(source / "src")
    sys.path.insert(0, os.environ["PYTHONPATH"])
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("tilewright", "tilewright_study"):
            place = getattr(sys.modules[name], "__file__", None)
            if place is None or not Path(place).resolve().is_relative_to(Path(source, "src").resolve()):
                del sys.modules[name]


def _run_loaded(arguments, source, folder, output):
    """In a process of its own: Snakemake with `arguments`, which prints to the file `output`."""
    from snakemake.cli import main

    with open(output, "wb") as stream:
        for printed in (1, 2):
            os.dup2(stream.fileno(), printed)
    os.chdir(folder)
    _take(source)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    try:
        main(arguments)
    finally:
        assert not HEAVY & sys.modules.keys(), "planning loads what only jobs need"


def _describe(directory, targets, studies, source, cores, snakefile, output):
    """In a process of its own: see `described`, as JSON in the file `output`."""
    _take(source)
    from snakemake.api import SnakemakeApi
    from snakemake.settings import types

    found = []
    for configs in studies:
        with SnakemakeApi(types.OutputSettings(quiet={types.Quietness.ALL})) as api:
            workflow = api.workflow(
                resource_settings=types.ResourceSettings(cores=cores),
                config_settings=types.ConfigSettings(configfiles=[*map(Path, configs)]),
                snakefile=snakefile or source / "Snakefile",
                workdir=Path(directory),
            )
            made = workflow.dag(types.DAGSettings(targets=set(targets))).workflow_api._workflow
            made._prepare_dag(forceall=False, ignore_incomplete=True, lock_warn_only=True)
            made._build_dag()
            found.append([_job(job) for job in made.dag.jobs])
    Path(output).write_text(json.dumps(found))


def _job(job):
    found = {"rule": job.rule.name, "wildcards": dict(job.wildcards.items())}
    found |= {"input": [*map(str, job.input)], "output": [*map(str, job.output)]}
    if job.rule.shellcmd is None:
        return found
    words = shlex.split(job.shellcmd.partition(" 2>&1")[0])
    script = next(place for place, word in enumerate(words) if word.endswith(".py"))
    return found | {
        "script": words[script],
        "arguments": words[script + 1 :],
        "parameters": dict(job.params.items()),
        "recorded": [*map(repr, job.non_derived_params)],
        "covered": list(job.rule.params.code.__wrapped__.covered(job.wildcards)),
    }


def described(directory, *targets, studies=((TINY,),), source=ROOT, cores=2, snakefile=None):
    """All jobs behind `targets`, a list of dicts for each of `studies`, which are overlays each; nothing runs.

    snakefile: a workflow of one's own, that of `source` if not stated.

    ``arguments``: of a job's ``script``. ``recorded``: of its parameters, as Snakemake keeps them. ``covered``: modules
    that its digest of code holds.
    """
    with tempfile.NamedTemporaryFile() as output:
        process = _LOADED.Process(
            target=_describe, args=(directory, targets, studies, source, cores, snakefile, output.name)
        )
        process.start()
        process.join()
        assert process.exitcode == 0
        return json.loads(Path(output.name).read_bytes())


def run_loaded(*arguments, source=ROOT, folder=None):
    """Exit status and output of Snakemake with `arguments`, by the package of the checkout `source`; it runs no job.

    folder: where it runs, that of the tests if not stated.
    """
    with tempfile.NamedTemporaryFile() as output:
        given = [*map(str, arguments)], source, folder or os.getcwd(), output.name
        process = _LOADED.Process(target=_run_loaded, args=given)
        process.start()
        process.join()
        return process.exitcode, Path(output.name).read_text()


def dry_run(directory, *arguments, source=ROOT):
    """Exit status and output of a dry run of the workflow of the checkout `source` in `directory`."""
    return run_loaded(*_stated(directory, source), "--dry-run", *arguments, source=source)


def plan(directory, *targets, configs=(TINY,), source=ROOT, cores=2):
    """Jobs that Snakemake would run for `targets`: a list of (rule, wildcards)."""
    status, printed = dry_run(directory, *targets, "--cores", str(cores), "--configfile", *configs, source=source)
    assert status == 0, printed
    found = []
    for name, body in JOB.findall(printed):
        stated = re.search(r"wildcards: (.*)", body)
        pairs = stated.group(1).split(", ") if stated else []
        found.append((name, dict(pair.split("=") for pair in pairs)))
    return found


def finish(directory, *targets, configs=(TINY,), source=ROOT, cores=2):
    """Have Snakemake take all jobs behind `targets` for done; their files in `directory` are empty."""
    (jobs,) = described(directory, *targets, studies=(configs,), source=source, cores=cores)
    for path in (Path(directory, name) for job in jobs for name in job["output"]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    given = ("--cores", cores, "--configfile", *configs, "--touch", "--forceall")
    status, printed = run_loaded(*_stated(directory, source), *targets, *given, source=source)
    assert status == 0, printed


def overlay(path, mapping):
    path.write_text(yaml.safe_dump(mapping))
    return path


@contextlib.contextmanager
def appended(path, text):
    before = path.read_text()
    path.write_text(before + text)
    yield
    path.write_text(before)


if __name__ == "__main__":
    print(TINY)
