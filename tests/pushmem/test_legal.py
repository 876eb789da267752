"""What some configuration gives is never called infeasible: small configurations are drawn, and run to streams."""

from time import process_time

import numpy as np
import pytest

from helpers import extras
from tilewright.pushmem import fit, memories, parts, recurrence, search, settings, solve, streams
from tilewright.pushmem.memories import ConflictError
from tilewright.pushmem.settings import Affine

PUB, DP = memories.member("pub"), memories.member("dp")
DRAWN = 25


def controller(memory, name, extents, cycle, **addresses):
    """A controller of loops, of which those of one iteration are left out. cycle, addresses: start and strides."""
    widths, used = memory.PARAMETERS.ports()[name].addresses, [at for at, extent in enumerate(extents) if extent > 1]

    def affine(value, bits):
        start, *strides = (int(each) % (1 << bits) for each in value)
        return Affine(start, tuple(strides[at] for at in used))

    told = {what: affine(addresses[what], bits) for what, bits in widths.items()}
    return settings.Controller(tuple(extents[at] for at in used), affine(cycle, settings.CYCLE_BITS), told)


def wide(draw):
    """A configuration of `pub` that is often legal: rounds of words that come in, are written, fetched and go out."""

    def whole(low, high):
        return int(draw.integers(low, high + 1))

    def pick(*members):
        return members[whole(0, len(members) - 1)]

    words, rounds, gap = whole(1, 4), whole(1, 5), whole(1, 3)
    period, found, written = words * gap + whole(0, 5), {}, []
    for port in range(whole(1, 2)):
        first, row = pick(0, 0, 1, 3, 4, 9), pick(4, 4, 4, words, 0, 5)
        places = first, pick(1, 1, 1, 0, 2, 3), row
        found[f"in2agg{port}"] = controller(
            PUB, f"in2agg{port}", (words, rounds), (whole(0, 3), gap, period), agg=places
        )
        times, count = found[f"in2agg{port}"].cycle.start + (words - 1) * gap + 1 + whole(0, 2), pick(1, 1, 2)
        sram = pick(0, 100) * port + pick(0, 7), pick(0, 1), pick(1, 1, 2, 0)
        rows = first // 4, pick(0, 1), pick(1, row // 4)
        written.append((times + port, sram))
        found[f"agg2sram{port}"] = controller(
            PUB, f"agg2sram{port}", (count, rounds), (times + port, whole(1, 2), max(period, 2 * count)), agg_row=rows,
            sram=sram,
        )  # fmt: skip
    for port in range(whole(1, 2)):
        (times, sram), count, turns = pick(*written), pick(1, 1, 2), pick(rounds, rounds, whole(1, 5))
        out, pace, begin = whole(1, 4), pick(period, period, whole(1, 6)), times + 1 + pick(0, 0, rounds * period)
        places = sram[0] + pick(0, 0, 1), pick(0, 1), pick(sram[2], sram[2], whole(0, 2))
        found[f"sram2tb{port}"] = controller(
            PUB, f"sram2tb{port}", (count, turns), (begin, whole(1, 2), max(pace, 2 * count)), sram=places,
            tb_row=(0, 1, pick(1, 0)),
        )  # fmt: skip
        places = pick(0, 0, 1, 3), pick(1, 1, 0, 2, 7), pick(4, 4, 0, 1)
        found[f"tb2out{port}"] = controller(
            PUB, f"tb2out{port}", (out, turns), (begin + 2 + whole(0, 2), 1, max(pace, out)), tb=places
        )
    return {name: found[name] for name in PUB.PARAMETERS.ports() if name in found}


def narrow(draw):
    """A configuration of `dp` that is often legal."""
    extents = tuple(int(each) for each in draw.integers(1, 6, 2))
    strides, places = draw.integers(1, 4, 2) * (1, extents[0] * 3), draw.integers(0, 4, 3)
    begin, again = draw.integers(1, 40), (int(draw.integers(1, 6)), extents[1])
    return {
        "in2sram0": controller(DP, "in2sram0", extents, (0, *strides), sram=places),
        "sram2out0": controller(DP, "sram2out0", again, (begin, 1, 6), sram=(places[0], *draw.integers(0, 4, 2))),
    }


def legal(draw, memory, controllers):
    """``(stream, run)`` of a drawn configuration that breaks no rule, until all of it is over."""
    while True:
        drawn = settings.Configuration(memory.NAME, controllers(draw))
        try:
            stream, ran = ran_as(memory, drawn, 400)
        except ConflictError:
            continue
        if ran.valid_out.sum() > 1:
            return stream, ran


def ran_as(memory, configuration, most=1 << 16):
    """``(stream, run)`` of a configuration. Raises `ConflictError` where it breaks a rule, or takes too many cycles."""
    ports = memory.PARAMETERS.ports()
    last = [recurrence.events(each, ports[name], 1 << 17)[0][-1] for name, each in configuration.controllers.items()]
    cycles, token = 2 + int(max(last)), 0
    if cycles > most:
        raise ConflictError(f"{cycles} cycles")
    fired = recurrence.fired(configuration, memory, cycles)
    data_in, valid_in = (np.zeros((cycles, memory.PARAMETERS.inputs), dtype=kind) for kind in (np.int64, bool))
    for port in range(memory.PARAMETERS.inputs):
        at = fired.get(f"in2agg{port}", fired.get(f"in2sram{port}"))[0]
        data_in[at, port], valid_in[at, port] = np.arange(token, token + len(at)), True
        token += len(at)
    ran = memory.run(fired, data_in)
    return streams.Stream("top", data_in[:, :, None], valid_in, ran.data_out[:, :, None], ran.valid_out), ran


@pytest.mark.parametrize(("memory", "controllers"), [(PUB, wide), (DP, narrow)], ids=["pub", "dp"])
def test_algebra_calls_no_stream_of_a_configuration_infeasible(memory, controllers):
    draw, verdicts = np.random.default_rng(1), []
    for _ in range(DRAWN):
        stream, ran = legal(draw, memory, controllers)
        verdicts.append(solve.solve(stream, memory, engine="fit", hardware=False).verdict)
        for part in parts.ORDER if memory is PUB else ():
            own = parts.of_run(part, stream, ran)
            assert solve.solve(own, memory, engine="fit", hardware=False).verdict != "infeasible", part
    assert "infeasible" not in verdicts and verdicts.count("solved") >= DRAWN - 2


# Tiles that published applications state, as controllers: extents, then start and strides of cycles and addresses.
# From github.com/dillonhuff/clockwork, aha_garnet_design_new: resnet at 0c1cb52a, where rows of 30 words leave half of
# a wide word empty, weights are fetched beyond the last one, and one output reads two inputs at the same addresses;
# up_sample at 019c156a. What comes into the resnet tiles is not as published: rows that break no rule stand in its
# place.
PUBLISHED = {
    "resnet input": {
        "in2agg0": ((30, 30), (0, 8, 240), {"agg": (0, 1, 0)}),
        "agg2sram0": ((8, 30), (32, 32, 240), {"agg_row": (0, 1, 0), "sram": (0, 1, 8)}),
        "sram2tb0": (
            (8, 28, 3, 3), (19999, 4, 32, 896, 2688), {"sram": (0, 1, 8, 0, 8), "tb_row": (0, 1, 0, 0, 0)},
        ),
        "tb2out0": ((4, 7, 28, 3, 3), (20004, 1, 4, 32, 896, 2688), {"tb": (0, 1, 4, 0, 1, 0)}),
    },
    "resnet kernel": {
        "in2agg0": ((4, 3), (0, 24, 96), {"agg": (0, 1, 0)}),
        "agg2sram0": ((3,), (96, 96), {"agg_row": (0, 0), "sram": (0, 1)}),
        "sram2tb0": ((3,), (9999, 2688), {"sram": (0, 1), "tb_row": (0, 1)}),
        "tb2out0": ((28, 28, 3, 3), (10004, 1, 32, 896, 2688), {"tb": (0, 0, 0, 1, 3)}),
    },
    "resnet sums": {
        "in2agg0": ((4, 7, 28, 3, 3), (30004, 1, 4, 32, 896, 2688), {"agg": (0, 1, 0, 0, 0, 0)}),
        "in2agg1": ((4, 7, 28), (0, 1, 4, 28), {"agg": (0, 1, 0, 0)}),
        "agg2sram0": (
            (7, 28, 3, 3), (30008, 4, 32, 896, 2688), {"agg_row": (0, 0, 0, 0, 0), "sram": (0, 1, 7, 0, 0)},
        ),
        "agg2sram1": ((7, 28), (4, 4, 28), {"agg_row": (0, 0, 0), "sram": (0, 1, 7)}),
        "sram2tb0": (
            (7, 28, 3, 3), (29999, 4, 32, 896, 2688), {"sram": (0, 1, 7, 0, 0), "tb_row": (0, 1, 3, 0, 0)},
        ),
        "sram2tb1": ((7, 28), (39995, 4, 28), {"sram": (0, 1, 7), "tb_row": (0, 1, 3)}),
        "tb2out0": ((4, 7, 28, 3, 3), (30004, 1, 4, 32, 896, 2688), {"tb": (0, 1, 4, 12, 0, 0)}),
        "tb2out1": ((4, 7, 28), (40000, 1, 4, 28), {"tb": (0, 1, 4, 12)}),
    },
    "up_sample": {
        "in2agg0": ((64, 64), (0, 2, 256), {"agg": (0, 1, 0)}),
        "agg2sram0": ((16, 64), (7, 8, 256), {"agg_row": (0, 1, 0), "sram": (0, 1, 16)}),
        "sram2tb0": ((16, 2, 64), (14, 8, 128, 256), {"sram": (0, 1, 0, 16), "tb_row": (0, 1, 0, 0)}),
        "tb2out0": ((2, 64, 2, 64), (16, 1, 2, 128, 256), {"tb": (0, 0, 1, 0, 0)}),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_tiles_of_published_applications_are_solved_by_algebra(name, monkeypatch):
    # Seconds of a clock are none of a processor that others use as well.
    monkeypatch.setattr(solve, "FIT_S", 60.0)
    stated = PUBLISHED[name].items()
    made = {each: controller(PUB, each, extents, cycle, **told) for each, (extents, cycle, told) in stated}
    stream, _ = ran_as(PUB, settings.Configuration("pub", made))
    begin = process_time()
    found = solve.solve(stream, PUB, engine="fit", hardware=False)
    assert found.verdict == "solved" and process_time() - begin < 5


def test_the_search_solves_what_no_template_has(monkeypatch):
    monkeypatch.setattr("tilewright.pushmem.templates.TRIES", 0)
    draw = np.random.default_rng(8)
    found = [solve.solve(legal(draw, PUB, wide)[0], PUB, engine="fit", hardware=False) for _ in range(6)]
    assert [each.verdict for each in found].count("solved") >= 5


@pytest.mark.parametrize("count", [1, 3])
def test_the_search_takes_single_words(count, monkeypatch):
    monkeypatch.setattr("tilewright.pushmem.templates.TRIES", 0)
    stream = streams.of_moves(np.arange(count) * 3, [(np.array([30]), np.array([count - 1]))], PUB.PARAMETERS)
    assert solve.solve(stream, PUB, engine="fit", hardware=False).verdict == "solved"


def test_equations_without_a_constant_are_solved_in_whole_numbers():
    rows = ((2, -4, 0, 6), (0, 3, 3, 0), (2, -1, 3, 6))
    found = search.kernel(rows, 4)
    assert len(found) == 2 and np.linalg.matrix_rank(np.array(found)) == 2
    assert not (np.array(rows) @ np.array(found).T).any()


def test_model_checking_calls_no_stream_of_a_configuration_infeasible():
    extras.need("bitwuzla", "amaranth", "pyosys")
    draw = np.random.default_rng(3)
    for turn in range(4):
        stream, ran = legal(draw, PUB, wide)
        part = (*parts.ORDER, "top")[turn]
        asked = stream if part == "top" else parts.of_run(part, stream, ran)
        assert solve.solve(asked, PUB, engine="bmc", depth=1, limit_s=5, hardware=False).verdict != "infeasible", part


# Half of each wide word stays empty: four words come in, and go out five cycles later.
HALF = streams.of_moves(np.arange(4), [(np.arange(4) + 5, np.arange(4))], PUB.PARAMETERS)


def cut(stream, cycles):
    columns = (column[:cycles] for column in (stream.data_in, stream.valid_in, stream.data_out, stream.valid_out))
    return streams.Stream(stream.part, *columns)


@pytest.mark.parametrize("engine", solve.ENGINES)
def test_wide_words_may_be_half_empty(engine):
    if engine == "bmc":
        extras.need("bitwuzla", "amaranth", "pyosys")
    found = solve.solve(cut(HALF, 9), PUB, engine=engine, depth=1)
    assert found.verdict == "solved"


def test_what_algebra_does_not_find_is_asked_of_the_whole_tile(monkeypatch):
    extras.need("bitwuzla", "amaranth", "pyosys")
    monkeypatch.setattr("tilewright.pushmem.templates.TRIES", 0)
    monkeypatch.setattr("tilewright.pushmem.search.SIZES", ())
    monkeypatch.setattr(solve, "WHOLE_S", 600.0)
    stream = cut(HALF, 9)
    assert solve.solve(stream, PUB, engine="fit").verdict == "unknown"
    late = solve.solve(stream, PUB, depth=1, limit_s=0.0)
    assert late.verdict == "unknown" and "the time limit ended model checking of the whole tile" in late.cause["text"]
    found = solve.solve(stream, PUB, depth=1)
    assert (found.verdict, found.engine) == ("solved", "bmc")


WANTED = np.arange(0, 64, 2)


@pytest.mark.parametrize(
    ("reads", "count"),
    [
        # The first word of a row is not wanted; every other word is; the first half is.
        ([(90 + np.arange(56), (np.arange(8)[:, None] * 8 + 1 + np.arange(7)).reshape(-1))], 64),
        ([(200 + np.arange(32), WANTED)], 64),
        # More come in than the memory has, and every other word is wanted: the others share its places.
        ([(3000 + np.arange(1500), np.arange(0, 3000, 2))], 3000),
    ],
)
def test_words_that_do_not_go_out_may_be_left_out(reads, count):
    stream = streams.of_moves(np.arange(count), reads, PUB.PARAMETERS)
    assert solve.solve(stream, PUB, engine="fit", hardware=count < 100).verdict == "solved"


def test_an_output_may_give_words_of_both_inputs():
    data_in, valid_in = np.zeros((200, 2, 1), np.int64), np.zeros((200, 2), bool)
    data_out, valid_out = data_in.copy(), valid_in.copy()
    data_in[:32, :, 0], valid_in[:32] = np.arange(64).reshape(2, 32).T, True
    data_out[80:144, 0, 0], valid_out[80:144, 0] = np.arange(64), True
    stream = streams.Stream("top", data_in, valid_in, data_out, valid_out)
    assert solve.solve(stream, PUB, engine="fit").verdict == "solved"


def test_a_stream_that_ends_on_a_fetch_is_configured():
    stream, ran = legal(np.random.default_rng(5), PUB, wide)
    own = parts.of_run("sram", stream, ran)
    last = int(np.flatnonzero(own.valid_out.any(1))[-1])
    assert solve.solve(cut(own, last + 1), PUB, engine="fit", hardware=False).verdict == "solved"


def test_loops_may_be_cut_off_where_they_go_on_late_enough():
    # Rounds of three firings, of which the second is cut off before cycle 1,200.
    times = np.array([0, 100, 200, 1000, 1100])
    found = fit.controller(times, {}, {}, 6, until=1200)
    assert (found.extents, found.cycle.strides) == ((3, 2), (100, 1000))
    for until in (None, 1201):
        with pytest.raises(fit.NotAffineError):
            fit.controller(times, {}, {}, 6, until)
