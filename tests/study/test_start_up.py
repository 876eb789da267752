"""A command imports what it uses and no more: the workflow starts hundreds of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import plans
from helpers.factories import make_profile
from tilewright import devices, graph
from tilewright.attention import blocks, profile

SCRIPTS = Path(__file__).parents[2] / "workflow/scripts"
HEAVY = ("torch", "triton", "numba", "scipy", "highspy", "gurobipy", "matplotlib", "pandas", "tqdm", "yaml", "PIL")
# Runs a command and says on the last line what it has loaded.
WATCHED = """
import atexit, json, runpy, sys
heavy, sys.argv = json.loads(sys.argv[1]), sys.argv[2:]
atexit.register(lambda: print(json.dumps(sorted(set(heavy) & set(sys.modules)))))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """blocks and a profile of it."""
    folder = tmp_path_factory.mktemp("files")
    ordered = plans.reordered(plans.pattern(64, 64), heads=2, head_dim=8)
    graph.save(folder / "natural.npz", graph.from_pattern(plans.pattern(64, 64)))
    graph.save(folder / "graph.npz", ordered)
    cover = plans.covers(ordered, ["16x1"])["16x1"]
    blocks.save(folder / "blocks.npz", cover)
    profile.save(folder / "profile.json", make_profile(cover, device=devices.describe("cpu")))
    return folder


SOLVE = "solve_ilp.py --blocks blocks.npz --profile profile.json --output out.json --solver"
COMMANDS = {
    "graph": ("gen_adj.py --model vil-tiny-64-s1 --output out.npz", set()),
    "graphs-of-files": ("gen_adj.py --list", set()),
    "greedy": (f"{SOLVE} greedy", set()),
    "highs": (f"{SOLVE} highs", {"highspy"}),
    "gurobi": (f"{SOLVE} gurobi", {"gurobipy"}),
    "blocks": ("extract_blocks.py --input graph.npz --tile 16x1 --output out.npz", {"scipy"}),
    "order": ("reorder.py --method none --input natural.npz --output out.npz", {"scipy"}),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_imports_what_it_uses(name, files):
    command, used = COMMANDS[name]
    script, *flags = command.split()
    words = [sys.executable, "-c", WATCHED, json.dumps(HEAVY), str(SCRIPTS / script), *flags]
    done = subprocess.run(words, cwd=files, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) <= used
