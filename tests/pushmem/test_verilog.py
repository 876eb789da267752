"""Verilog that is written for users does as the model: read again by Yosys and, where it is found, by Verilator."""

import shutil
import subprocess

import numpy as np
import pytest

from helpers import extras
from helpers.cases import rest_slow
from tilewright.core.errors import Unavailable
from tilewright.pushmem import memories, recurrence, rtl, templates
from tilewright_study.experiments.push import examples

extras.need("amaranth", "pyosys")
CYCLES = 400
# The standard input has a word for each constant, then a word for each input in each cycle.
HARNESS = """
#include <cinttypes>
#include <cstdio>
#include "Vtile.h"
#include "verilated.h"

static bool more(uint64_t &word) {{ return std::scanf("%" SCNu64, &word) == 1; }}

int main(int argc, char **argv) {{
  VerilatedContext context;
  context.commandArgs(argc, argv);
  Vtile tile{{&context}};
  uint64_t word;
  {constants}
  while ({inputs}) {{
    tile.clk = 0;
    tile.eval();
    {outputs}
    tile.clk = 1;
    tile.eval();
  }}
  tile.final();
}}
"""


def by_yosys(text, constants, inputs, outputs, folder):
    """The Verilog as Yosys reads it: a function of words of `constants` and words of `inputs` [cycles, inputs]."""
    (folder / "tile.v").write_text(text)
    rtl.run_yosys([f"read_verilog {folder / 'tile.v'}", "proc", f"write_rtlil {folder / 'tile.il'}"])
    try:
        return rtl.Library((folder / "tile.il").read_text(), constants, inputs, outputs).run
    except Unavailable as reason:
        pytest.skip(str(reason))


def by_verilator(text, constants, inputs, outputs, folder):
    """The Verilog as Verilator reads it, likewise."""
    verilator = shutil.which("verilator")
    if verilator is None:
        pytest.skip("verilator was not found on the PATH: no second opinion on the Verilog")

    def lines(form, names, between="\n    "):
        return between.join(form.format(name) for name in names)

    harness = HARNESS.format(
        constants=lines("if (more(word)) tile.{} = word;", constants, "\n  "),
        inputs=lines("(more(word) && (tile.{} = word, true))", inputs, " && "),
        outputs=lines('std::printf("%" PRIu64 " ", (uint64_t)tile.{});', outputs),
    )
    (folder / "tile.v").write_text(text)
    (folder / "main.cpp").write_text(harness)
    flags = ["--cc", "--exe", "--build", "-Wno-fatal", "--top-module", "tile", "--Mdir", "made", "main.cpp", "tile.v"]
    done = subprocess.run([verilator, *flags], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def run(known, words):
        fed = " ".join(map(str, [*(known[name] for name in constants), *words.ravel().tolist()]))
        told = subprocess.run([folder / "made/Vtile"], input=fed, capture_output=True, text=True, check=True).stdout
        return np.array(told.split(), dtype=np.uint64).reshape(-1, len(outputs))

    return run


@pytest.mark.parametrize(
    ("name", "simulated"), rest_slow([("pub", by_yosys), ("dp", by_yosys), ("pub", by_verilator)], 1, 2)
)
def test_the_written_verilog_gives_the_models_words(name, simulated, tmp_path):
    memory = memories.member(name)
    stream = examples.stream(f"line_buffer-{memory.PARAMETERS.outputs + 1}-12x9", memory.PARAMETERS)
    known = templates.configuration(stream, memory)
    data = np.random.default_rng(0).integers(1, 1 << 16, (CYCLES, memory.PARAMETERS.inputs))
    ran = memory.run(recurrence.fired(known, memory, CYCLES), data)
    assert (ran.valid_out.sum(0) > 80).all()
    words = np.column_stack([ran.data_out, ran.valid_out])
    stated = recurrence.registers(known, memory) | {"rst": 0}
    inputs = ["run", *(f"data_in{port}" for port in range(data.shape[1]))]
    outputs = [f"{what}{port}" for what in ("data_out", "valid_out") for port in range(ran.data_out.shape[1])]
    run = simulated(rtl.verilog(memory), list(stated), inputs, outputs, tmp_path)
    given = np.column_stack([np.ones(CYCLES, dtype=np.int64), data])
    np.testing.assert_array_equal(run(stated, given), words)
    last = next(name for name in stated if name.endswith("out0_cycle_start"))
    assert (run(stated | {last: stated[last] + 1}, given) != words).any()
