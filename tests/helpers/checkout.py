"""Copies of this checkout that may be edited, and Snakemake run on one."""

import contextlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
# The small study, and how it is run.
TINY = ROOT / "tests/config/tiny.yaml"
RUN = ("--cores", "2", "--configfile", TINY)
JOB = re.compile(r"^(?:local)?rule (\w+):\n((?:    .+\n)*)", re.MULTILINE)
PARTS = ("src", "workflow", "rules", "profiles", "envs", "expected", "config")


def copied(source):
    """Copy what runs the workflow to the folder `source`; return it."""
    for name in PARTS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("Snakefile", "config.yaml"):
        shutil.copy(ROOT / name, source / name)
    return source


def snakemake(directory, *arguments, source=ROOT, start=subprocess.run, **keywords):
    """Run the workflow of the checkout `source`, and its package, in `directory`."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src")}
    command = [sys.executable, "-m", "snakemake", *_stated(directory, source), *arguments]
    return start(command, env=environment, text=True, **keywords)


def _stated(directory, source):
    """What a command line of Snakemake begins with."""
    where = ["--snakefile", source / "Snakefile", "--directory", directory]
    return [*where, "--workflow-profile", source / "profiles/default"]


# Loading Snakemake takes as long as planning: processes that plan begin as forks of one that has loaded it, and nothing
# of this package.
_LOADED = multiprocessing.get_context("forkserver")
_LOADED.set_forkserver_preload(["snakemake.cli", "snakemake.report.html_reporter", "scipy.sparse.csgraph"])


def _run_loaded(arguments, source, folder, output):
    """In a process of its own: Snakemake with `arguments`, which prints to the file `output`."""
    from snakemake.cli import main

    with open(output, "wb") as stream:
        for printed in (1, 2):
            os.dup2(stream.fileno(), printed)
    os.environ["PYTHONPATH"] = str(source / "src")
    os.chdir(folder)
    sys.path.insert(0, os.environ["PYTHONPATH"])
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    main(arguments)


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


def plan(directory, *targets, configs=(TINY,), source=ROOT):
    """Jobs that Snakemake would run for `targets`: a list of (rule, wildcards)."""
    status, printed = dry_run(directory, *targets, "--configfile", *configs, source=source)
    assert status == 0, printed
    found = []
    for name, body in JOB.findall(printed):
        stated = re.search(r"wildcards: (.*)", body)
        pairs = stated.group(1).split(", ") if stated else []
        found.append((name, dict(pair.split("=") for pair in pairs)))
    return found


def overlay(path, mapping):
    path.write_text(yaml.safe_dump(mapping))
    return path


@contextlib.contextmanager
def appended(path, text):
    before = path.read_text()
    path.write_text(before + text)
    yield
    path.write_text(before)
