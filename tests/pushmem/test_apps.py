"""Every app, mapped and run, against numpy; what the published designs need; and the RTL of a whole app."""

import dataclasses

import numpy as np
import pytest
from msgspec import structs

from helpers import extras
from helpers.cases import rest_slow
from helpers.push import compiled, fails, without_parts, words
from tilewright.pushmem import configuration, memories, netlist, recurrence, simulate, solve
from tilewright.pushmem.errors import RunError
from tilewright_study.experiments.push import apps
from tilewright_study.stages.push_app import cost

SIDES = {"layers": (8,), "mixer": (16,), "resnet": (8,), "mobilenet": (8, 13)}
SLOW = [("mobilenet", 13), ("patch_embed", 29), ("channels", 29)]


@pytest.mark.parametrize("memory", ["pub", "dp"])
@pytest.mark.parametrize(
    ("app", "sides"),
    [
        *((app, [side for side in SIDES.get(app, (16, 29)) if (app, side) not in SLOW]) for app in apps.NAMES),
        *(pytest.param(app, [side], marks=pytest.mark.slow) for app, side in SLOW),
    ],
    ids=str,
)
def test_an_app_gives_the_words_of_numpy(app, sides, memory):
    for side in sides:
        outputs, mapped = compiled(f"{app}-{side}", memory)
        for data in (words(outputs), words(outputs, value=65535), words(outputs, value=0)):
            run = simulate.run(mapped, data)
            assert simulate.differing_words(mapped, outputs, data, run.outputs) == 0, side


@pytest.mark.parametrize(
    ("app", "memory", "tiles", "last_cycle"),
    [
        *(("gaussian-64", "pub", 1, 4098), ("cascade-64", "pub", 2, 4098), ("harris-64", "pub", 5, 4098)),
        *(("unsharp-64", "pub", 4, 4098), ("camera-64", "pub", 2, 4098), ("upsample-64", "pub", 1, 16399)),
        *(("gaussian-64", "dp", 2, 4098), ("harris-64", "dp", 11, 4098), ("upsample-64", "dp", 2, 16399)),
        # Mapped for longest; each run of the study maps it, too.
        pytest.param("resnet-28", "pub", 40, 7200, marks=pytest.mark.slow),
        ("resnet-28", "dp", 80, 8739),
    ],
)
def test_tiles_and_cycles_are_at_most_the_published_ones(app, memory, tiles, last_cycle):
    outputs, mapped = compiled(app, memory)
    data = words(outputs)
    run = simulate.run(mapped, data)
    assert len(mapped.tiles) <= tiles and run.last_cycle <= last_cycle
    assert simulate.differing_words(mapped, outputs, data, run.outputs) == 0


@pytest.mark.parametrize(
    ("app", "least"),
    [("gaussian-64", 8 / 9), ("camera-64", 0.84), pytest.param("resnet-28", 0.40, marks=pytest.mark.slow)],
)
def test_registers_and_sharing_save_what_is_published(app, least):
    found = cost(compiled(app)[1], "pub")
    assert found.saved >= least
    assert found.area_um2 == round(found.ports * (1 - found.saved)) * 13_700


def test_the_reads_of_brighten_blur_are_65_64_1_and_0_cycles_after_the_writes():
    _, mapped = compiled("brighten_blur-64")
    plan = mapped.schedule
    assert sorted(plan.distance(e)[0] for e in plan.edges if e.buffer == "brighten") == [0, 1, 64, 65]
    assert len(mapped.wiring.taps) == 1
    assert mapped.registers == 2


@pytest.mark.parametrize("app", ["gaussian-29", "upsample-16", "unsharp-29", "pyramid-16", "resnet-8"])
@pytest.mark.parametrize("memory", ["pub", "dp"])
def test_what_the_configurator_finds_from_streams_alone_runs_to_the_same_words(app, memory, monkeypatch):
    # On a busy machine, too.
    monkeypatch.setattr(solve, "FIT_S", 60.0)
    _, mapped = compiled(app, memory)
    closed, found = configuration.configurations(mapped), configuration.from_streams(mapped)
    member = memories.member(memory)
    for tile, one, other in zip(mapped.tiles, closed, found, strict=True):
        assert other.verdict == "solved"
        given = configuration.stream(tile)
        for chosen in (one, other.configuration):
            run = member.run(recurrence.fired(chosen, member, len(given)), given.data_in[:, :, 0])
            assert np.array_equal(run.data_out, given.data_out[:, :, 0])
            assert np.array_equal(run.valid_out, given.valid_out)


@pytest.mark.parametrize("app", ["gaussian-29", "harris-29", "unsharp-29", "pyramid-16", "camera-16", "mobilenet-8"])
def test_a_mapping_without_one_of_its_parts_fails(app):
    outputs, mapped = compiled(app)
    data = words(outputs)
    assert not fails(mapped, outputs, data)
    found = list(without_parts(mapped))
    assert len(found) > len(mapped.tiles) + len(mapped.wiring.delays)
    for what, fewer in found:
        assert fails(fewer, outputs, data), what


# Other tests build random programs, chains and reductions.
@pytest.mark.parametrize("app", rest_slow(["gaussian-29", "upsample-16", "mobilenet-8"], 2))
def test_the_rtl_of_an_app_gives_the_words_of_numpy(app):
    extras.need("amaranth", "pyosys")
    outputs, mapped = compiled(app)
    data = words(outputs)
    stalls = np.random.default_rng(2).random(101) < 0.3
    for held in (None, stalls):
        found = netlist.run(mapped, data, held)
        assert simulate.differing_words(mapped, outputs, data, found) == 0


def moved(mapped, name, cycles):
    (tile,) = mapped.tiles
    one = tile.controllers[name]
    later = structs.replace(one, cycle=structs.replace(one.cycle, start=one.cycle.start + cycles))
    return dataclasses.replace(
        mapped, tiles=(dataclasses.replace(tile, controllers={**tile.controllers, name: later}),)
    )


@pytest.mark.parametrize(
    ("name", "cycles", "message"),
    [("sram2tb0", None, "two accesses of the SRAM port of tile 0"), ("tb2out0", -20, "reads a word that is not there")],
)
def test_what_the_hardware_forbids_is_an_error_with_its_cycle(name, cycles, message):
    outputs, mapped = compiled("gaussian-64")
    if cycles is None:
        at = {n: g.cycle.start % 4 for n, g in mapped.tiles[0].controllers.items()}
        cycles = (at["agg2sram0"] - at["sram2tb0"]) % 4
    with pytest.raises(RunError, match=f"cycle [0-9]+: .*{message}"):
        simulate.run(moved(mapped, name, cycles), words(outputs))
