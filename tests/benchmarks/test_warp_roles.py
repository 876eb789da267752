"""The kernels that a tool's own share of reports is read from: compiled anywhere, run on Hopper alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.gpu import needs_hopper

FILE = Path(__file__).parents[2] / "benchmarks/warp_roles.py"
# Compiled in a process of its own, without the interpreter: prints what the kernel shares.
COMPILE = """
import importlib.util
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

spec = importlib.util.spec_from_file_location("warp_roles", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
kernel = getattr(module, sys.argv[2])
constants = {"BLOCK": module.NUMBERS, "REGISTERS": 40}
types = {"o_ptr": "*fp32", "x_ptr": "*fp32", "n": "i32"}
signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
given = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1)}
source = GluonASTSource(fn=kernel, signature=signature, constexprs=given, attrs=aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": module.WARPS.value})
ptx = compiled.asm["ptx"]
print(compiled.metadata.shared, ptx.count("ld.shared"), ptx.count("cp.async.c"), ptx.count("setmaxnreg"))
"""


@pytest.mark.parametrize("name, copies", [("alone", False), ("handed", True)])
def test_kernels_of_roles_compile_for_hopper(name, copies):
    given = {"env": {**os.environ, "TRITON_INTERPRET": "0"}, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", COMPILE, str(FILE), name], **given)
    assert done.returncode == 0, done.stderr[-2000:]
    shared, read, copied, shares = map(int, done.stdout.split())
    # The compiler hands out roles and their arguments in shared memory, where the kernel itself asks for none.
    assert read > 0 and shares > 0 and (copied > 0) == copies and (shared > 2 * 1024 * 4) == copies


@needs_hopper
def test_roles_give_the_right_numbers():
    done = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split() == ["alone", "right", "handed", "right"]
