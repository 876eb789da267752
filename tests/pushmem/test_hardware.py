"""RTL of whole mapped programs against the simulator and numpy."""

from time import perf_counter

import numpy as np
import pytest

from helpers import extras
from helpers.push import stencils, words
from tilewright.pushmem import dsl, mapping, netlist, simulate
from tilewright.pushmem.dsl import Input
from tilewright_study.experiments.push import apps
from tilewright_study.experiments.push.apps import BINOMIAL, window

extras.need("amaranth", "pyosys")
# Seconds that a build may take, on one core.
BUILD_S = 15


def agrees(outputs, memory, seed=0):
    """Check model and RTL against numpy; the words that are not 0, so that nothing is compared with nothing."""
    mapped, data = mapping.compile(outputs, memory), words(outputs, seed)
    model, hardware = simulate.run(mapped, data), netlist.run(mapped, data)
    assert simulate.differing_words(mapped, outputs, data, model.outputs) == 0
    for name, found in model.outputs.items():
        np.testing.assert_array_equal(hardware[name], found)
    assert any(found.any() for found in hardware.values())
    return mapped


@pytest.mark.parametrize("memory", ["pub", "dp"])
def test_the_rtl_of_random_programs_does_as_the_simulator(memory):
    # One design of five programs: it is built once.
    mapped = agrees(stencils(3, 5), memory)
    assert mapped.tiles and mapped.wiring.delays and len(mapped.program.inputs) == 5


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["pub", "dp"])
@pytest.mark.parametrize("seed", range(10, 16))
def test_the_rtl_of_many_random_programs_does_as_the_simulator(memory, seed):
    agrees(stencils(seed, 6), memory, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "app", ["gaussian-64", "cascade-64", "harris-64", "unsharp-64", "camera-64", "upsample-64", "resnet-28"]
)
def test_the_rtl_of_an_app_at_its_size_is_built_in_time_and_exact(app, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    outputs = apps.program(app)
    mapped = mapping.compile(outputs)
    begin = perf_counter()
    netlist.build(mapped)
    assert perf_counter() - begin < BUILD_S
    for data in (words(outputs), words(outputs, value=65535), words(outputs, value=0)):
        assert simulate.differing_words(mapped, outputs, data, netlist.run(mapped, data)) == 0


def test_a_run_of_more_cycles_than_a_counter_tells_apart():
    image = Input("in", (300, 240))
    outputs = (window("blur", image, BINOMIAL, 4),)
    mapped = agrees(outputs, "pub")
    assert mapped.schedule.last_cycle > 1 << 16


def test_a_reduction_over_more_cycles_than_a_counter_tells_apart():
    image, weights = Input("in", (92, 92)), Input("weights", (3, 3))

    def sums(y, x):
        return dsl.Reduce((3, 3), lambda ry, rx: image[y + ry, x + rx] * weights[ry, rx])

    # 9 x 88 x 90 iterations, one a cycle; a tile cannot hold the image, which comes at the pace of its reduction.
    outputs = (dsl.Stage("sums", (90, 88), sums),)
    mapped = agrees(outputs, "pub")
    assert mapped.schedule.last_cycle > 1 << 16 and mapped.wiring.layouts["in"].size < 2048
