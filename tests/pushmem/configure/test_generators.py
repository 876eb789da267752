"""A generator of a tile, six levels and 16 bits, from the cycles in which it fires: the loops that it ran are found."""

import numpy as np
import pytest

from helpers import extras
from tilewright.pushmem import bmc, memories
from tilewright.pushmem.configure import query
from tilewright.pushmem.configure.unroll import Unrolled

NAME = "sram2tb0"


@pytest.fixture(autouse=True)
def extra():
    extras.need("bitwuzla", "amaranth", "pyosys")


@pytest.mark.parametrize(
    ("extents", "strides", "start", "layers"),
    [
        # Steps as stored: how far from the last firing of the loops inside to the next one.
        pytest.param((), (), 9, (0, 1, 0, 9), id="once"),
        pytest.param((16, 16), (1, 20), 4, (2, 256, 1 + 5, 4), id="rows with gaps"),
        pytest.param(*((7, 6, 5), (1, 9, 65), 0, (3, 210, 1 + 3 + 14, 0)), id="three loops", marks=pytest.mark.slow),
        pytest.param(
            (2, 2, 2, 2, 2, 2), (1, 3, 8, 19, 50, 120), 3, (6, 64, 1 + 2 + 4 + 7 + 19 + 39, 3), id="six loops"
        ),
    ],
)
def test_the_loops_that_a_generator_ran_are_found(extents, strides, start, layers):
    at = np.array([start])
    for extent, stride in zip(extents, strides, strict=True):
        at = (np.arange(extent)[:, None] * stride + at).reshape(-1)
    memory, system = memories.member("pub"), bmc._controller(NAME, 6)
    chosen = bmc._layers(memory, [NAME], {NAME: ()}, 4)
    answer = query.solve(system, bmc._schedule(NAME, at, 400), layers=chosen)
    assert answer.verdict == query.SOLVED and answer.complete and answer.replayed == 400
    assert tuple(answer.layers.values()) == layers
    lasts = [answer.registers[f"{NAME}_last{level}"] for level in range(len(extents))]
    assert lasts == [extent - 1 for extent in extents]


def test_what_has_no_answer_is_refuted_before_all_loops_are_tried(monkeypatch):
    # The sum at the third firing is not the cycle that it fires in.
    example = bmc._schedule(NAME, np.arange(0, 60, 3), 80)
    example.pins[f"{NAME}.{NAME}_cycle_sum"][6] = 7
    memory, system = memories.member("pub"), bmc._controller(NAME, 6)
    chosen, tried = bmc._layers(memory, [NAME], {NAME: ()}, 4), []
    monkeypatch.setattr(query, "Unrolled", lambda *args: tried.append(1) or Unrolled(*args))
    # Asked at once, for as long as it takes: how fast this machine is decides nothing.
    monkeypatch.setattr(query, "PATIENCE_S", 0.0)
    monkeypatch.setattr(query, "ALONE", 1e9)
    answer = query.solve(system, example, layers=chosen)
    assert answer.verdict == query.INFEASIBLE and answer.cause.least and len(tried) < 7
    assert (f"{NAME}.{NAME}_cycle_sum", 6, 7) in answer.cause.asked


def test_firings_that_no_loops_give_are_infeasible():
    at = np.array([0, 1, 3, 4, 9, 11, 30, 31, 38, 77, 78, 90, 91, 200, 207])
    memory, system = memories.member("pub"), bmc._controller(NAME, 6)
    chosen = bmc._layers(memory, [NAME], {NAME: ()}, 4)
    answer = query.solve(system, bmc._schedule(NAME, at, 220), layers=chosen, explained=False)
    assert answer.verdict == query.INFEASIBLE
