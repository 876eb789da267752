"""The additions that CONTRIBUTING.md shows: each diff applies to this checkout, and the commands below it run."""

import ast
import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from helpers.checkout import run_loaded

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
# Paths below src/, of modules whose docstring is a contract.
CONTRACTS = [
    path if path.startswith("tilewright_study/") else f"tilewright/{path}"
    for path in re.findall(r"docstring of `(.+?)`", TEXT)
]
# The fifth is added in tests/study/test_experiments.py.
SHOWN = re.findall(
    r"^### (.+?)\n.*?^```diff\n(.+?)^```\n\n```\n(.+?)^```$",
    TEXT.partition("\n### An experiment\n")[0],
    re.MULTILINE | re.DOTALL,
)


def left_out(folder, names):
    """What a copy does not need: hidden files and, at the top, what a run made. What was compiled is not made again."""
    made = {"results", "figures", "logs"} if Path(folder) == ROOT else set()
    return made | {name for name in names if name.startswith(".") or name.endswith(".egg-info")}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of this checkout with all that is shown."""
    checkout = shutil.copytree(ROOT, tmp_path_factory.mktemp("added") / "checkout", ignore=left_out)
    # Snakemake ends when its last timer does: nothing is timed here.
    profile = checkout / "profiles/default/profile.yaml"
    profile.write_text(profile.read_text().replace("1000/10s", "1000/1s"))
    for _, diff, _ in SHOWN:
        subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=checkout, check=True)
    for check in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *check, "src"], cwd=checkout, check=True)
    return checkout


# Run pytest and scripts, each of a line of its own, in one process.
TOGETHER = """
import shlex, sys
import pytest
from helpers.files import run_script
for line in sys.argv[1:]:
    command, *words = shlex.split(line)
    done = run_script(*words) if command == "python" else None
    status = pytest.main(words) if done is None else done.returncode
    if status:
        sys.exit(f"{line}: {done and done.stderr}")
"""


def assert_ok(diff, commands, checkout):
    """The tables that commands have written hold rows of the baseline of a diff."""
    new = re.search(r"^--- /dev/null\n\+\+\+ b/.+/(\w+)\.py$", diff, re.MULTILINE).group(1)
    assert len(re.findall(r"^\+\+\+ ", diff, re.MULTILINE)) == 2, "one new file, one line"
    for table in re.findall(r"--output (\S+\.csv)", commands):
        rows = {row["provider"]: row["status"] for row in csv.DictReader((checkout / table).open())}
        assert rows[new] == "ok"


def test_additions_work_in_one_process_and_are_planned(checkout):
    lines = [line for *_, commands in SHOWN for line in commands.splitlines()]
    planned, scripts, tests = ([x for x in lines if x.startswith(way)] for way in ("snakemake", "python", "pytest"))
    assert len(planned) + len(scripts) + len(tests) == len(lines) and planned and scripts and tests
    environment = {**os.environ, "PYTHONPATH": f"{checkout}/src{os.pathsep}{checkout}/tests"}
    command = [sys.executable, "-c", TOGETHER, *tests, *scripts]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(re.findall(r"\b[1-9]\d* passed", done.stdout)) == len(tests) and "skipped" not in done.stdout
    for line in planned:
        status, printed = run_loaded(*shlex.split(line)[1:], "--dry-run", source=checkout, folder=checkout)
        assert status == 0, printed
    for _, diff, commands in SHOWN:
        assert_ok(diff, commands, checkout)


@pytest.mark.slow
@pytest.mark.parametrize(("title", "diff", "commands"), SHOWN, ids=[title for title, *_ in SHOWN])
def test_an_addition_works_as_shown(title, diff, commands, checkout):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(checkout / "src")}
    for command in commands.splitlines():
        done = subprocess.run(command, shell=True, cwd=checkout, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        if command.startswith("pytest"):
            assert re.search(r"\b[1-9]\d* passed", done.stdout) and "skipped" not in done.stdout
    assert_ok(diff, commands, checkout)


def test_four_families_are_shown():
    assert [title for title, *_ in SHOWN] == ["A model", "An order", "A baseline", "A solver"]


@pytest.mark.parametrize("path", CONTRACTS)
def test_a_contract_is_where_the_table_says(path):
    module = ast.parse((ROOT / "src" / path).read_text())
    assert re.search(r"Contract of|A module offers", ast.get_docstring(module))
    assert any(target.id == "NAMES" for node in module.body if isinstance(node, ast.Assign) for target in node.targets)


# Families whose members are modules: experiments and devices are folders, which hold figures and tables.
FAMILIES = [path for path in CONTRACTS if path.split("/")[1] not in ("devices", "experiments", "figures", "tables")]
# The names of deit, segformer and wan stand beside the graphs of the other families, but no graph is made of them.
# Networks of videos are in a tuple of their own. What several networks share stands beside them.
NOT_MEMBERS = {
    "masks": {"deit", "segformer", "wan"},
    "networks": {
        *("wan", "path", "backends", "plans", "attention_sites", "map_operators"),
        *("folding", "heads", "rectified_flow", "token_layouts", "vit_parts"),
    },
}


@pytest.mark.parametrize("path", FAMILIES)
def test_a_listing_shows_members_and_helpers_apart(path):
    folder = (ROOT / "src" / path).parent
    names = import_module(path.removesuffix("/__init__.py").replace("/", ".")).NAMES
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert modules - NOT_MEMBERS.get(folder.name, set()) == set(names)
