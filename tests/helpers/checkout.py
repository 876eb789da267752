"""Copies of this checkout that may be edited, and Snakemake run on one."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
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
    command = [sys.executable, "-m", "snakemake", "--snakefile", source / "Snakefile", "--directory", directory]
    profile = ["--workflow-profile", source / "profiles/default"]
    return start([*command, *profile, *arguments], env=environment, text=True, **keywords)


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


@contextlib.contextmanager
def appended(path, text):
    before = path.read_text()
    path.write_text(before + text)
    yield
    path.write_text(before)
