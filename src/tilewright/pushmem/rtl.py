"""RTL of tiles, without system packages: Amaranth → RTLIL → Yosys → BTOR2, Verilog, or C++ that g++ makes a library of.

A library holds one tile, whose configuration is set at run time. It is kept by its sources, so that it is built once.
"""

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.core import caches
from tilewright.core.errors import Unavailable, install
from tilewright.pushmem import recurrence
from tilewright.pushmem.configure.verilog import TO_BTOR2, pyosys, run_yosys
from tilewright.pushmem.memories import Memory, Parameters, Run
from tilewright.pushmem.settings import Configuration

# What Yosys does before each of its writers.
_FLAT = ("hierarchy -top tile", "proc", "flatten")
_CXX = ("opt", "write_cxxrtl -O6 -header {}")
_VERILOG = ("opt", "write_verilog -noattr {}")
_RUN = """
#include "{header}"
extern "C" void run(uint64_t cycles, const uint64_t *constants, const uint64_t *in, uint64_t *out) {{
  cxxrtl_design::p_tile tile;
{constants}
  for (uint64_t t = 0; t < cycles; t++, in += {inputs}, out += {outputs}) {{
{driven}
    tile.p_clk.set<uint32_t>(0);
    tile.step();
{seen}
    tile.p_clk.set<uint32_t>(1);
    tile.step();
  }}
}}
"""


def rtlil(tile: Any) -> str:
    """A tile in RTLIL, as module ``tile``. Raises `Unavailable` without the extra."""
    try:
        from amaranth.back import rtlil as writer
    except ImportError as error:
        raise Unavailable(f"RTL needs amaranth: {install()} ({error})") from error
    return writer.convert(tile, name="tile", ports=tile.ports, emit_src=False)


def btor2(memory: Memory, parameters: Parameters | None = None) -> str:
    """The tile of a memory as a system in BTOR2; `run` and the configuration are inputs of it."""
    return _written(memory.tile(parameters or memory.PARAMETERS), TO_BTOR2, "tile.btor2")


def verilog(memory: Memory, parameters: Parameters | None = None, part: str = "top") -> str:
    """The Verilog of a memory tile, as module ``tile``.

    Parameters
    ----------
    memory : module
        Member of `pushmem.memories`, such as ``memories.member("pub")``.
    parameters : Parameters, optional
        Ports and words of the tile; the default is ``memory.PARAMETERS``.
    part : str
        ``top`` for the whole tile, or a part of it: ``agg``, ``sram`` or ``tb``.

    Returns
    -------
    str

    Raises
    ------
    Unavailable
        Without the packages of the extra ``push``.
    """
    parameters = parameters or memory.PARAMETERS
    tile = memory.tile(parameters) if part == "top" else memory.tile(parameters, part)
    return _written(tile, _VERILOG, "tile.v")


def _written(tile, passes, name):
    """What Yosys writes of a tile."""
    return yosys(rtlil(tile), passes, name)[name]


def yosys(text: str, passes: Sequence[str], name: str) -> dict[str, str]:
    """``{file: text}`` that Yosys writes of a design in RTLIL; `passes` follow on flattening, ``{}`` is for `name`.

    Raises `Unavailable` without the extra.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "tile.il"
        source.write_text(text)
        run_yosys([line.format(Path(folder) / name) for line in (f"read_rtlil {source}", *_FLAT, *passes)])
        source.unlink()
        return {path.name: path.read_text() for path in Path(folder).iterdir()}


class Library:
    """A design as a shared library. constants, inputs, outputs: names of its ports, of at most 64 bits each.

    Raises `Unavailable` without the extra or without g++.
    """

    def __init__(self, text: str, constants: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]):
        self.constants, self.inputs, self.outputs = list(constants), list(inputs), list(outputs)
        path = _built(text, self.constants, self.inputs, self.outputs)
        self._run = ctypes.CDLL(str(path)).run
        words = np.ctypeslib.ndpointer(dtype=np.uint64, flags="C")
        self._run.argtypes, self._run.restype = [ctypes.c_uint64, words, words, words], None

    def run(self, constants: Mapping[str, int], inputs: np.ndarray) -> np.ndarray:
        """uint64 [cycles, outputs] of `inputs` [cycles, inputs], from reset."""
        stated = np.array([constants[name] for name in self.constants] or [0], dtype=np.uint64)
        given = np.ascontiguousarray(inputs, dtype=np.uint64)
        out = np.zeros((len(given), len(self.outputs)), dtype=np.uint64)
        self._run(len(given), stated, given, out)
        return out


def _built(text, constants, inputs, outputs):
    """The shared library of a design, made where it is not kept."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise Unavailable("RTL: expected the C++ compiler g++ on the PATH, found none")
    package, version = pyosys(), metadata.version("pyosys")
    ports = {"constants": constants, "inputs": inputs, "outputs": outputs}
    digest = hashlib.sha256("\n".join([text, repr(ports), _RUN, version, *_CXX]).encode()).hexdigest()[:20]
    path = caches.folder() / "rtl" / f"tile-{digest}.so"
    if caches.has(path):
        return path
    with caches.keeping("compiled designs"):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        path = _own_folder() / path.name
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for name, content in yosys(text, _CXX, "tile.cpp").items():
            (Path(folder) / name).write_text(content)
        (Path(folder) / "run.cpp").write_text(_driver(constants, inputs, outputs))
        runtime = package / "share/include/backends/cxxrtl/runtime"
        command = [compiler, "-std=c++14", "-O1", "-shared", "-fPIC", "-w", f"-I{runtime}", "tile.cpp", "run.cpp"]
        done = subprocess.run([*command, "-o", "tile.so"], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"RTL: g++ failed: {done.stderr.strip().splitlines()[0]}")
        os.replace(Path(folder) / "tile.so", path)
    return path


@cache
def _own_folder():
    """A folder of this process, which goes with it."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _driver(constants, inputs, outputs):
    def port(name):
        return "tile.p_" + name.replace("_", "__")

    def lines(texts, indent):
        return "\n".join(indent * " " + text for text in texts)

    return _RUN.format(
        header="tile.h",
        inputs=len(inputs),
        outputs=len(outputs),
        constants=lines([f"{port(name)}.set<uint64_t>(constants[{at}]);" for at, name in enumerate(constants)], 2),
        driven=lines([f"{port(name)}.set<uint64_t>(in[{at}]);" for at, name in enumerate(inputs)], 4),
        seen=lines([f"out[{at}] = {port(name)}.get<uint64_t>();" for at, name in enumerate(outputs)], 4),
    )


class Tile:
    """The RTL of a memory, or of a part of it, ready to run."""

    def __init__(self, memory: Memory, parameters: Parameters | None = None, part: str | None = None):
        self.memory, self.parameters = memory, parameters or memory.PARAMETERS
        tile = memory.tile(self.parameters) if part in (None, "top") else memory.tile(self.parameters, part)
        self.ports = len(tile.data_out)
        self.told = [signal.name for signal in tile.told]
        ports = [signal.name for signal in (*tile.data_out, *tile.valid_out, *tile.told)]
        given = ["run", *(signal.name for signal in tile.data_in)]
        self.compiled = Library(rtlil(tile), [*tile.configuration, "rst"], given, ports)

    def run(self, configuration: Configuration, data_in: np.ndarray, run: np.ndarray | None = None) -> Run:
        """The `Run` of data_in [cycles, inputs]. run: bool [cycles], which cycles count; None for all."""
        stated = recurrence.registers(configuration, self.memory) | {"rst": 0}
        counts = np.ones(len(data_in), np.uint64) if run is None else np.asarray(run, dtype=np.uint64)
        out = self.compiled.run(stated, np.column_stack([counts, data_in.astype(np.uint64)]))
        told = dict(zip(self.told, out[:, 2 * self.ports :].T, strict=True))
        return Run(out[:, : self.ports].astype(np.int64), out[:, self.ports : 2 * self.ports].astype(bool), told)
