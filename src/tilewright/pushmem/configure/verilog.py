"""Designs in Verilog, which Yosys writes in BTOR2; it comes with the extra, as a package of Python.

Yosys runs in a process of its own. pyosys makes the symbols of all libraries global that its process loads later.
Kernels that torch compiles have the same names: in one process one of them would run for another.
"""

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tilewright.core.errors import Unavailable, install

# Passes that read a design, whose assertions become bad states and whose assumptions become constraints.
_READ = (
    *('read_verilog -sv -formal "{}"', "hierarchy -check -auto-top", "proc", "flatten"),
    *("async2sync", "chformal -lower"),
)
# And those that write a flat one.
TO_BTOR2 = ("memory -nomap", "memory_nordff", "opt -full", "async2sync", "dffunmap", "opt_clean", "write_btor -s {}")
# Passes, one an argument.
_YOSYS = """
import sys
from pyosys import libyosys
design = libyosys.Design()
for line in sys.argv[1:]:
    libyosys.run_pass(line, design)
"""


class RefusedError(Unavailable):
    """A design that Yosys does not take; the message is its own."""


def btor2(path: str | Path) -> str:
    """A design in Verilog as a system in BTOR2: the module that no other one uses, with what it is made of.

    Raises `RefusedError` for a design that Yosys does not take, `Unavailable` without the extra.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "design.btor2"
        run_yosys([line.format(path) for line in _READ] + [line.format(written) for line in TO_BTOR2])
        return written.read_text()


def run_yosys(passes: Sequence[str]) -> None:
    """Run Yosys in a process of its own. Raises `Unavailable` without the extra, `RefusedError` where a pass fails."""
    pyosys()
    command = [sys.executable, "-c", _YOSYS, *passes]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise RefusedError(f"RTL: Yosys failed: {next((line for line in lines if 'ERROR:' in line), lines[-1])}")


def pyosys() -> Path:
    """The folder of pyosys, which is not imported. Raises `Unavailable` without the extra."""
    found = importlib.util.find_spec("pyosys")
    if found is None or found.origin is None:
        raise Unavailable(f"RTL needs pyosys: {install()} (it is not installed)")
    return Path(found.origin).parent
