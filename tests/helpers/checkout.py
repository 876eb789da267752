"""Copies of this checkout that may be edited, and Snakemake run on one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
