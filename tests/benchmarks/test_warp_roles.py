"""The kernels that a tool's own share of reports is read from: compiled anywhere, run on Hopper alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.files import loaded
from helpers.gpu import needs_hopper
from helpers.hopper import compiled

FILE = Path(__file__).parents[2] / "benchmarks/warp_roles.py"


@pytest.mark.parametrize("name, copies", [("alone", False), ("handed", True)])
def test_kernels_of_roles_compile_for_hopper(name, copies):
    module = loaded(FILE)
    constants, warps = {"BLOCK": module.NUMBERS, "REGISTERS": 40}, module.WARPS.value
    made = compiled(FILE, name, constants, pointers="*fp32", free=("n",), gluon=True, num_warps=warps)
    # The compiler hands out roles and their arguments in shared memory, where the kernel itself asks for none.
    assert "ld.shared" in made.ptx and "setmaxnreg" in made.ptx
    assert ("cp.async.c" in made.ptx) == copies and (made.shared > 2 * 1024 * 4) == copies


@needs_hopper
def test_roles_give_the_right_numbers():
    done = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split() == ["alone", "right", "handed", "right"]
