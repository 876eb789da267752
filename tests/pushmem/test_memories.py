"""Model, RTL, recurrence and loops by algebra say the same."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import extras
from tilewright.core.errors import ConfigError, Unavailable, UnknownNameError
from tilewright.pushmem import fit, memories, recurrence, rtl
from tilewright.pushmem.memories import ConflictError
from tilewright.pushmem.settings import CYCLE_BITS, Affine, Configuration, Controller

PUB, DP = memories.member("pub"), memories.member("dp")


def controller(port, draw, most=65_536, levels=6):
    """A random `Controller`, whose schedule steps by less than `most`."""
    extents = tuple(draw.integers(2, 5, draw.integers(0, levels + 1)).tolist())

    def affine(below):
        return Affine(int(draw.integers(below)), tuple(draw.integers(0, below, len(extents)).tolist()))

    return Controller(extents, affine(most), {name: affine(1 << bits) for name, bits in port.addresses.items()})


def configuration(memory, seed):
    draw = np.random.default_rng(seed)
    most = int(draw.choice([8, 64, 65_536]))
    ports = memory.PARAMETERS.ports()
    return Configuration(
        memory.NAME, {name: controller(p, draw, most) for name, p in ports.items() if draw.random() < 0.85}
    )


@pytest.fixture(scope="module")
def tiles():
    extras.need("amaranth", "pyosys")
    return {memory.NAME: rtl.Tile(memory) for memory in (PUB, DP)}


@pytest.mark.parametrize("memory", [PUB, DP], ids=lambda memory: memory.NAME)
def test_model_and_rtl_give_the_same_words_in_every_cycle(memory, tiles):
    conflicts = 0
    for seed in range(200):
        # One in ten runs past what the counter of cycles counts to.
        cycles = 150_000 if seed % 10 == 9 else 300
        known = configuration(memory, seed)
        data = np.random.default_rng(seed).integers(0, 65_536, (cycles, memory.PARAMETERS.inputs))
        fired = recurrence.fired(known, memory, cycles)
        model, hardware = memory.run(fired, data, strict=False), tiles[memory.NAME].run(known, data)
        np.testing.assert_array_equal(model.valid_out, hardware.valid_out, err_msg=f"seed {seed}")
        np.testing.assert_array_equal(model.data_out, hardware.data_out, err_msg=f"seed {seed}")
        try:
            memory.run(fired, data)
        except ConflictError:
            conflicts += 1
    assert 20 < conflicts < 200


def test_a_tile_of_other_sizes_is_the_same_in_model_and_rtl():
    extras.need("amaranth", "pyosys")
    from dataclasses import replace

    small = replace(PUB.PARAMETERS, fetch=2, depth=16, inputs=1, outputs=1, levels=3)
    known = Configuration(
        "pub",
        {
            "in2agg0": Controller((16,), Affine(0, (1,)), {"agg": Affine(0, (1,))}),
            "agg2sram0": Controller((8,), Affine(2, (2,)), {"agg_row": Affine(0, (1,)), "sram": Affine(3, (1,))}),
            "sram2tb0": Controller((8,), Affine(21, (2,)), {"sram": Affine(3, (1,)), "tb_row": Affine(0, (1,))}),
            "tb2out0": Controller((16,), Affine(23, (1,)), {"tb": Affine(0, (1,))}),
        },
    )
    data = np.arange(100, 160)[:, None]

    class Small:
        NAME, PARAMETERS, tile = "pub", small, staticmethod(PUB.tile)

    model = PUB.run(recurrence.fired(known, Small, 60), data, small)
    np.testing.assert_array_equal(model.data_out[23:39, 0], data[:16, 0])
    hardware = rtl.Tile(Small).run(known, data)
    np.testing.assert_array_equal(model.data_out, hardware.data_out)
    np.testing.assert_array_equal(model.valid_out, hardware.valid_out)


def test_a_tile_that_is_stopped_goes_on_where_it_was(tiles):
    known = configuration(PUB, 3)
    data = np.random.default_rng(0).integers(0, 65_536, (200, 2))
    whole = tiles["pub"].run(known, data)
    runs = np.random.default_rng(1).random(400) < 0.5
    runs = np.concatenate([runs, np.ones(200, dtype=bool)])
    runs[np.cumsum(runs) > 200] = False
    stretched = data[np.minimum(np.cumsum(runs) - runs, 199)]
    stopped = tiles["pub"].run(known, stretched, runs)
    np.testing.assert_array_equal(stopped.data_out[runs], whole.data_out)
    assert not stopped.valid_out[~runs].any()


def test_two_accesses_that_meet_are_named():
    known = {
        "agg2sram0": Controller((), Affine(9), {"agg_row": Affine(0), "sram": Affine(0)}),
        "sram2tb1": Controller((), Affine(9), {"sram": Affine(0), "tb_row": Affine(0)}),
    }
    with pytest.raises(ConflictError, match="cycle 9: agg2sram0 and sram2tb1 use the memory's only port"):
        PUB.run(recurrence.fired(Configuration("pub", known), PUB, 20), np.zeros((20, 2), dtype=np.int64))


@pytest.mark.parametrize(("memory", "name", "cycle"), [(PUB, "tb2out1", 5), (DP, "sram2out0", 5)])
def test_a_word_that_was_never_written_is_named(memory, name, cycle):
    port = memory.PARAMETERS.ports()[name]
    known = Configuration(memory.NAME, {name: Controller((), Affine(cycle), dict.fromkeys(port.addresses, Affine(0)))})
    data = np.zeros((9, memory.PARAMETERS.inputs), dtype=np.int64)
    with pytest.raises(ConflictError, match=f"cycle 5: {name} reads a word that was never written"):
        memory.run(recurrence.fired(known, memory, 9), data)


@given(st.integers(0, 2**32), st.sampled_from(sorted(PUB.PARAMETERS.ports())))
@settings(max_examples=200, deadline=None)
def test_recurrence_and_closed_form_are_the_same(seed, name):
    port, draw = PUB.PARAMETERS.ports()[name], np.random.default_rng(seed)
    known = controller(port, draw)
    memory_registers = recurrence.registers(Configuration("pub", {name: known}), PUB)
    again = recurrence.configuration(memory_registers, PUB).controllers[name]
    assert recurrence.events(again, port, 10**7)[0].tolist() == recurrence.events(known, port, 10**7)[0].tolist()
    # One firing after the other, as the hardware steps.
    values = {what: memory_registers[f"{name}_{what}_start"] for what in ("cycle", *port.addresses)}
    counts, told = [0] * 6, []
    while True:
        told.append(tuple(values.values()))
        level = next((each for each in range(6) if counts[each] < memory_registers[f"{name}_last{each}"]), None)
        if level is None:
            break
        counts[: level + 1] = [0] * level + [counts[level] + 1]
        for what in values:
            bits = CYCLE_BITS if what == "cycle" else port.addresses[what]
            values[what] = (values[what] + memory_registers[f"{name}_{what}_step{level}"]) % (1 << bits)
    times, addresses = recurrence.events(known, port, 10**9)
    assert told == list(
        zip((times % (1 << CYCLE_BITS)).tolist(), *(a.tolist() for a in addresses.values()), strict=True)
    )


@given(st.integers(0, 2**32), st.sampled_from(sorted(PUB.PARAMETERS.ports())))
@settings(max_examples=300, deadline=None)
def test_loops_that_were_found_give_the_same_events_with_no_more_levels(seed, name):
    port, draw = PUB.PARAMETERS.ports()[name], np.random.default_rng(seed)
    known = controller(port, draw, int(draw.choice([8, 64, 65_536])))
    times, addresses = recurrence.events(known, port, 10**9)
    found = fit.controller(times, addresses, port.addresses, 6)
    assert len(found.extents) <= len(known.extents)
    again, places = recurrence.events(found, port, 10**9)
    np.testing.assert_array_equal(again, times)
    for what, column in addresses.items():
        np.testing.assert_array_equal(places[what], column)


def test_the_event_that_breaks_the_loops_is_named():
    times = np.arange(64) * 3
    times[41] += 1
    with pytest.raises(fit.NotAffineError, match=r"cycle \d+: firing \d+ of 64 fits no 6 loops"):
        fit.controller(times, {}, {}, 6)
    with pytest.raises(fit.NotAffineError, match="cycle 65536: expected a first firing before cycle 65536"):
        fit.controller(np.array([65_536]), {}, {}, 6)
    with pytest.raises(fit.NotAffineError, match="cycle 65538: expected a first firing before cycle 65536 and gaps"):
        fit.controller(np.array([1, 65_538]), {}, {}, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": "dp"}, "expected one of the memory pub, found one of dp"),
        (
            {"controllers": {"in2agg7": Controller((), Affine(0), {})}},
            "unknown controller 'in2agg7' of pub; known: in2agg0",
        ),
        ({"controllers": {"in2agg0": Controller((), Affine(0), {})}}, "in2agg0: expected the addresses agg, found"),
        (
            {"controllers": {"in2agg0": Controller((), Affine(0), {"agg": Affine(16)})}},
            "in2agg0.agg: expected numbers from 0 to 15, found 16",
        ),
        (
            {"controllers": {"in2agg0": Controller((2,) * 7, Affine(0, (1,) * 7), {"agg": Affine(0, (0,) * 7)})}},
            "in2agg0: expected at most 6 loops, found 7",
        ),
    ],
)
def test_a_configuration_for_another_memory_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Configuration(**{"memory": "pub", "controllers": {}, **changes}).check(PUB)


def test_an_unknown_memory_is_refused():
    with pytest.raises(UnknownNameError, match="unknown memory 'sram'; known: pub, dp"):
        memories.member("sram")


def test_verilog_is_written_and_a_library_is_quick(tiles):
    from time import perf_counter

    text = rtl.verilog(PUB)
    assert "module tile(" in text and "data_out1" in text
    data = np.zeros((200_000, 2), dtype=np.int64)
    begin = perf_counter()
    tiles["pub"].run(configuration(PUB, 0), data)
    assert len(data) / (perf_counter() - begin) > 1e5


def test_without_a_compiler_it_says_so(monkeypatch):
    from tilewright.core.errors import Unavailable

    monkeypatch.setattr(rtl.shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match=r"compiler g\+\+ on the PATH"):
        rtl.Library("", [], [], [])


def test_yosys_leaves_this_process_as_it_was():
    # What is loaded with global symbols has kernels of torch run one for another.
    extras.need("amaranth", "pyosys")
    before = sys.getdlopenflags()
    assert "module tile" in rtl.verilog(PUB)
    assert sys.getdlopenflags() == before and "pyosys" not in sys.modules


def test_what_yosys_refuses_is_named():
    extras.need("pyosys")
    with pytest.raises(Unavailable, match=r"Yosys failed: .*nowhere"):
        rtl.run_yosys(["read_rtlil /nowhere.il"])
