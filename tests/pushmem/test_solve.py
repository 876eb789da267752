"""Streams are configured, or told why not; what is returned gives the stream, and nothing else does."""

import json
from dataclasses import replace
from time import process_time

import numpy as np
import pytest

from helpers import extras
from helpers.cases import rest_slow
from helpers.checkout import ROOT
from helpers.files import run_script
from tilewright.core.errors import ArtifactError, ConfigError, SolverError, UnknownNameError
from tilewright.pushmem import (
    configuration_file,
    counting,
    memories,
    parts,
    recurrence,
    settings,
    solve,
    streams,
    templates,
)
from tilewright_study.experiments.push import examples
from tilewright_study.experiments.push.examples import raster

PUB, DP = memories.member("pub"), memories.member("dp")
SHAPES = (
    *("identity-14x14", "identity-16x16", "identity-15x15", "identity-64x64"),
    *("line_buffer-3-14x14", "line_buffer-3-28x28", "line_buffer-3-30x30", "line_buffer-3-64x64"),
    *("rows_with_gaps-2-12x14", "rows_with_gaps-2-26x28", "rows_with_gaps-2-62x62", "rows_with_gaps-4-60x60"),
    *("line_buffer-2-62x62", "strided-2-32x32", "strided-3-30x30", "transposed-16x16", "transposed-40x40"),
)


def of(name):
    return examples.stream(name, PUB.PARAMETERS)


def part_of(name, part):
    stream = of(name)
    known = templates.configuration(stream, PUB)
    ran = PUB.run(recurrence.fired(known, PUB, len(stream)), stream.data_in[:, :, 0])
    return parts.of_run(part, stream, ran)


@pytest.fixture(scope="module")
def hardware():
    """Whether the RTL can be built here; it is, before anything is timed."""
    extras.need("amaranth", "pyosys")
    for part in streams.PARTS:
        solve.hardware_of(PUB, part)
    return True


@pytest.mark.parametrize("name", SHAPES)
def test_the_top_stream_alone_is_enough(name, hardware):
    stream = of(name)
    begin = process_time()
    found = solve.solve(stream, PUB, engine="fit")
    assert found.verdict == "solved" and process_time() - begin < 1
    assert found.verified == {"model": len(stream) + 64, "rtl": len(stream) + 64}
    assert found.layers == solve.layers(found.configuration, "top", PUB)


@pytest.mark.parametrize("part", parts.ORDER)
@pytest.mark.parametrize("name", SHAPES[:12])
def test_the_stream_of_a_part_is_enough(name, part, hardware):
    stream = part_of(name, part)
    begin = process_time()
    found = solve.solve(stream, PUB, engine="fit")
    assert found.verdict == "solved" and process_time() - begin < 1
    assert found.verified["rtl"] == len(stream) + 64


def test_the_parts_make_the_tile():
    stream = of("line_buffer-3-28x28")
    found = [parts.configuration(part_of("line_buffer-3-28x28", part), PUB) for part in parts.ORDER]
    joined = parts.joined(found, PUB, len(stream))
    assert not solve.model_differences(joined, stream, PUB)
    late = found[2].controllers["sram2tb0"]
    late = replace_start(late, late.cycle.start + 1)
    wrong = settings.Configuration("pub", {**found[2].controllers, "sram2tb0": late})
    with pytest.raises(counting.NoScheduleError, match="sram2tb0: expected one schedule, found two in two parts"):
        parts.joined([*found[:2], wrong], PUB, len(stream))


def replace_start(controller, start):
    cycle = settings.Affine(start, controller.cycle.strides)
    return settings.Controller(controller.extents, cycle, controller.addresses)


@pytest.mark.parametrize("monolithic", rest_slow([False, True], 0))
def test_the_published_aggregator_has_the_published_optimum(monolithic, hardware):
    extras.need("bitwuzla")
    stream = part_of("identity-16x16", "agg")
    begin = process_time()
    found = solve.solve(stream, PUB, engine="bmc", monolithic=monolithic)
    assert found.verdict == "solved" and found.least and process_time() - begin < 60
    assert found.layers == {"levels": 2, "extents": 320, "strides": 7, "starts": 4}


@pytest.mark.parametrize("name", rest_slow(["identity-8x8", "strided-2-8x8"], 1))
def test_model_checking_finds_the_loops_that_algebra_finds(name, hardware):
    extras.need("bitwuzla")
    for part in parts.ORDER:
        stream = part_of(name, part)
        fit, bmc = (solve.solve(stream, PUB, engine=engine) for engine in ("fit", "bmc"))
        assert bmc.verdict == "solved" and bmc.least
        for kind, controller in bmc.configuration.controllers.items():
            same = fit.configuration.controllers[kind]
            assert (controller.extents, controller.cycle) == (same.extents, same.cycle)
        assert all(bmc.layers[layer] <= fit.layers[layer] for layer in solve.LAYERS)


def test_a_whole_tile_by_model_checking(hardware):
    extras.need("bitwuzla")
    stream = of("identity-14x14")
    found = solve.solve(stream, PUB, engine="bmc")
    assert found.verdict == "solved" and found.verified["rtl"] == len(stream) + 64
    assert {"agg", "sram", "tb", "in2agg0", "tb2out0"} <= set(found.seconds)


def test_words_that_may_be_any_are_for_model_checking(hardware):
    extras.need("bitwuzla")
    stream = part_of("identity-14x14", "tb")
    free = stream.data_out.copy()
    free[::3] = streams.ANY
    stream = replace(stream, data_out=free)
    assert solve.solve(stream, PUB, engine="fit").verdict == "unknown"
    found = solve.solve(stream, PUB)
    assert (found.verdict, found.engine) == ("solved", "bmc")
    whole = of("identity-14x14")
    free = np.where(whole.valid_out[:, :, None], streams.ANY, whole.data_out)
    assert solve.solve(replace(whole, data_out=free), PUB, limit_s=1).verdict == "unknown"


def test_time_that_is_over_is_unknown(hardware):
    extras.need("bitwuzla")
    found = solve.solve(part_of("identity-14x14", "agg"), PUB, engine="bmc", limit_s=0.0)
    assert (found.verdict, found.configuration) == ("unknown", None)


def test_a_controller_that_is_fixed_stays(hardware):
    extras.need("bitwuzla")
    stream = part_of("identity-14x14", "agg")
    whole = parts.configuration(stream, PUB)
    fixed = settings.Configuration("pub", {"in2agg0": whole.controllers["in2agg0"]})
    for engine in ("fit", "bmc"):
        found = solve.solve(stream, PUB, engine=engine, known=fixed)
        assert found.verdict == "solved" and found.configuration.controllers["in2agg0"] == whole.controllers["in2agg0"]
    turned = settings.Controller((196,), settings.Affine(0, (1,)), {"agg": settings.Affine(4, (1,))})
    found = solve.solve(stream, PUB, known=settings.Configuration("pub", {"in2agg0": turned}))
    assert (found.verdict, found.engine) == ("solved", "bmc")
    assert found.configuration.controllers["in2agg0"] == turned
    late = replace_start(turned, 1)
    found = solve.solve(stream, PUB, engine="bmc", known=settings.Configuration("pub", {"in2agg0": late}))
    assert found.verdict == "infeasible"


# Soundness: what is returned gives the very stream.


def altered(stream, draw):
    """A stream with a token or a valid bit swapped, dropped, shifted or repeated."""
    columns = {name: getattr(stream, name).copy() for name in ("data_in", "valid_in", "data_out", "valid_out")}
    side = ("in", "out")[draw.integers(2)]
    data, valid = columns[f"data_{side}"], columns[f"valid_{side}"]
    port = draw.integers(valid.shape[1])
    at = np.flatnonzero(valid[:, port])
    if not len(at):
        port, at = 0, np.flatnonzero(valid[:, 0])
    one, other = draw.choice(at, 2)
    place = min(port, data.shape[1] - 1)
    kind = draw.integers(4)
    if kind == 0:
        data[[one, other], place] = data[[other, one], place]
    elif kind == 1:
        valid[one, port] = False
    elif kind == 2:
        valid[one, port], valid[min(one + 1, len(valid) - 1), port] = False, True
        data[min(one + 1, len(valid) - 1), place] = data[one, place]
    else:
        data[other, place] = data[one, place]
    return replace(stream, **columns)


@pytest.mark.parametrize(
    "name",
    rest_slow(["identity-14x14", "line_buffer-3-14x14", "strided-2-32x32", "rows_with_gaps-2-12x14"], 1, 2),
)
def test_no_configuration_is_returned_that_differs_from_its_stream(name):
    draw, refused = np.random.default_rng(len(name)), 0
    made = [of(name), *(part_of(name, part) for part in parts.ORDER)]
    for number in range(60):
        stream = altered(made[number % 4], draw)
        found = solve.solve(stream, PUB, engine="fit", hardware=False, limit_s=0.1)
        if found.verdict == "solved":
            assert not solve.model_differences(found.configuration, stream, PUB)
        else:
            refused += 1
            assert found.configuration is None and found.cause["text"]
    assert refused > 40


def test_an_answer_that_a_run_refutes_is_an_error():
    stream = of("identity-14x14")
    known = templates.configuration(stream, PUB)
    wrong = settings.Configuration(
        "pub", {**known.controllers, "tb2out0": replace_start(known.controllers["tb2out0"], 8)}
    )
    with pytest.raises(
        SolverError, match="the model does not give the stream: port 0, cycle 7: expected a word, found none"
    ):
        solve.verified(wrong, stream, PUB)


# Completeness: streams that some configuration gives are solved.


def loops(draw, most=3):
    extents = tuple(int(extent) for extent in draw.integers(2, 6, draw.integers(1, most + 1)))
    pitch, strides = int(draw.integers(1, 4)), []
    for extent in extents:
        strides.append(pitch)
        pitch = pitch * extent + int(draw.integers(0, 5))
    return extents, tuple(strides)


def feasible(draw):
    """A stream at the top of a tile: words come in by loops; some go out in another order, by loops, behind them."""
    extents, strides = loops(draw)
    arrivals = settings.Affine(int(draw.integers(9)), strides).at(extents, 16)
    width = extents[0]
    order = np.arange(len(arrivals))
    kind = draw.integers(3)
    if kind == 1 and len(extents) > 1:
        order = order.reshape(-1, width)[:, :: int(draw.integers(1, 3))].reshape(-1)
    elif kind == 2:
        order = np.repeat(order, int(draw.integers(1, 3)))
    gap = int(draw.integers(1, 4))
    times = arrivals.max() + int(draw.integers(8, 30)) + gap * np.arange(len(order))
    return streams.of_moves(arrivals, [(times, order)], PUB.PARAMETERS)


def test_streams_of_random_configurations_are_solved(hardware):
    solved, draw = 0, np.random.default_rng(7)
    for _ in range(200):
        stream = feasible(draw)
        known = templates.configuration(stream, PUB)
        ran = PUB.run(recurrence.fired(known, PUB, len(stream)), stream.data_in[:, :, 0])
        assert not streams.differences(stream, ran.data_out[:, :, None], ran.valid_out)
        for part in parts.ORDER:
            own = parts.of_run(part, stream, ran)
            found = parts.configuration(own, PUB)
            assert not solve.model_differences(found, own, PUB), part
        solved += 1
    assert solved == 200


def test_small_ones_are_solved_by_model_checking(hardware):
    extras.need("bitwuzla")
    draw, done = np.random.default_rng(11), 0
    while done < 9:
        stream = feasible(draw)
        if stream.valid_in.sum() > 24 or len(stream) > 180:
            continue
        known = templates.configuration(stream, PUB)
        ran = PUB.run(recurrence.fired(known, PUB, len(stream)), stream.data_in[:, :, 0])
        part = parts.ORDER[done % 3]
        found = solve.solve(parts.of_run(part, stream, ran), PUB, engine="bmc", depth=2, hardware=False)
        assert found.verdict == "solved", part
        done += 1


# Why there is none.


def test_rows_of_28_words_from_lane_1_begin_with_a_wide_word_of_their_own(hardware):
    words = (np.arange(28)[:, None] * 32 + 1 + np.arange(28)).reshape(-1)
    stream = streams.of_moves(raster(32, 30), [(raster(28, 28, 28, start=1000), words)], PUB.PARAMETERS)
    assert solve.solve(stream, PUB, engine="fit").verdict == "solved"


SOME = np.cumsum(np.random.default_rng(0).integers(2, 9, 64))


@pytest.mark.parametrize(
    ("arrivals", "reads", "name", "text"),
    [
        (np.arange(64), [(np.arange(64) + 3, np.arange(64))], "latency", "a word takes at least 4 cycles"),
        (
            np.arange(2100),
            [(np.arange(2100) + 2120, np.arange(2100))],
            "memory words",
            "2100 words that came in and are still needed, of 2076",
        ),
        (
            np.arange(64),
            [(np.arange(64) + 4, np.arange(64))],
            "memory port",
            "accesses of the memory, which has one a cycle, in",
        ),
        (np.arange(64), [(100 + SOME, np.arange(64))], "not affine", "tb2out0: cycle"),
        (SOME, [(600 + np.arange(64), np.arange(64))], "not affine", "in2agg0: cycle"),
        (
            np.arange(64),
            [(np.arange(64) + 20, np.append(np.arange(63), 70))],
            "never written",
            "70, which never came in",
        ),
        (np.arange(64), [(np.arange(8) + 20, np.arange(8) + 40)], "output before input", "gives 40, which comes in at"),
    ],
    ids=["latency", "memory words", "memory port", "going out", "coming in", "never written", "output before input"],
)
def test_a_stream_that_no_tile_gives_is_told_by_counting(arrivals, reads, name, text):
    stream = streams.of_moves(arrivals, reads, PUB.PARAMETERS)
    for engine in ("fit", "bmc"):
        found = solve.solve(stream, PUB, engine=engine, hardware=False)
        assert found.verdict == "infeasible" and found.cause["cause"] == name and text in found.cause["text"]


@pytest.mark.parametrize(
    ("reads", "name"),
    [
        ([(100 + 4 * np.arange(64), np.random.default_rng(0).permutation(64))], "not affine"),
        (
            [(100 + np.arange(64), np.arange(64).reshape(16, 4).T.reshape(-1)[::step]) for step in (1, -1)],
            "memory port",
        ),
    ],
    ids=["not affine", "memory port"],
)
def test_what_algebra_does_not_find_is_unknown(reads, name):
    # Algebra goes on for as long as it may.
    given = {"engine": "fit", "hardware": False, "limit_s": 1.0}
    found = solve.solve(streams.of_moves(np.arange(64), reads, PUB.PARAMETERS), PUB, **given)
    assert found.verdict == "unknown" and found.cause["cause"] == name


def test_a_token_that_comes_twice_is_named():
    stream = of("identity-14x14")
    stream.data_in[7, 0, 0] = 3
    stream.data_out[stream.data_out == 7] = 3
    found = solve.solve(stream, PUB, engine="fit", hardware=False)
    assert found.verdict == "unknown"
    assert "cycle 7: expected a number for each word that comes in, found 3 again" in found.cause["text"]


def test_the_window_that_is_too_short_is_exact():
    """By Hall's theorem: accesses fit exactly where no window holds more of them than cycles."""
    draw, crowded = np.random.default_rng(0), 0
    for _ in range(300):
        earliest = draw.integers(0, 12, 10)
        latest = earliest + draw.integers(0, 5, 10)
        windows = [(a, b) for a in range(17) for b in range(a, 17)]
        full = [(a, b) for a, b in windows if ((earliest >= a) & (latest <= b)).sum() > b - a + 1]
        found = counting.crowded(earliest, latest)
        assert (found is None) == (not full)
        if found is not None:
            crowded += 1
            first, last, _ = found
            assert ((earliest >= first) & (latest <= last)).sum() > last - first + 1
    assert 50 < crowded < 300


# Files and the command.


@pytest.mark.parametrize("part", streams.PARTS)
def test_a_stream_outlives_its_file(part, tmp_path):
    stream = of("line_buffer-3-14x14") if part == "top" else part_of("line_buffer-3-14x14", part)
    streams.write(tmp_path / "s.csv", stream)
    again = streams.read(tmp_path / "s.csv", part, PUB.PARAMETERS)
    for name in ("data_in", "valid_in", "data_out", "valid_out"):
        np.testing.assert_array_equal(getattr(again, name), getattr(stream, name))


@pytest.mark.parametrize("part", ["tb", "sram"])
def test_words_that_come_in_need_not_be_known(part, tmp_path):
    """As in the published streams: what the read register shows before the first read, and rows that no one gives."""
    stream = part_of("identity-14x14", part)
    idle = ~stream.valid_in if part == "sram" else ~np.roll(stream.valid_in.any(1, keepdims=True), 1, 0)
    data = np.where(idle[:, :, None], streams.ANY, stream.data_in)
    streams.write(tmp_path / "s.csv", replace(stream, data_in=data))
    assert "X" in (tmp_path / "s.csv").read_text()
    again = streams.read(tmp_path / "s.csv", part, PUB.PARAMETERS)
    np.testing.assert_array_equal(again.data_in, data)
    assert solve.solve(again, PUB, engine="fit").verdict == "solved"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[[1] [0]],1,[[0] [0]]", r"row 2 \(cycle 0\): expected 4 columns, found 3"),
        ("[[1]],1,[[0] [0]],0", "column data_in: expected 2 lists of 1 words, found"),
        ("[[1 2] [0]],1,[[0] [0]],0", "column data_in: expected 2 lists of 1 words"),
        ("[[70000] [0]],1,[[0] [0]],0", "column data_in: expected words of 16 bits, found 70000"),
        ("[[1] [0]],4,[[0] [0]],0", "column valid_in: expected a mask of 2 ports, 0 to 3, found 4"),
        ("[[1] [0]],yes,[[0] [0]],0", "column valid_in: expected a mask"),
        ("[[X] [0]],1,[[0] [0]],0", "column data_in: expected words that are known where valid_in is set, found X"),
        ("[[1] [X]],3,[[0] [0]],0", "column data_in: expected words that are known where valid_in is set, found X"),
        ("[[1] [-2]],1,[[0] [0]],0", "column data_in: expected 2 lists"),
    ],
)
def test_a_bad_row_is_named(row, message, tmp_path):
    (tmp_path / "s.csv").write_text("data_in,valid_in,data_out,valid_out\n" + row + "\n")
    with pytest.raises(ArtifactError, match=message):
        streams.read(tmp_path / "s.csv", "top", PUB.PARAMETERS)


def test_a_bad_file_is_named(tmp_path):
    with pytest.raises(ArtifactError, match="no such file; expected a stream"):
        streams.read(tmp_path / "none.csv", "top", PUB.PARAMETERS)
    (tmp_path / "s.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ArtifactError, match="expected the columns data_in,valid_in,data_out,valid_out, found a,b"):
        streams.read(tmp_path / "s.csv", "top", PUB.PARAMETERS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ident-16x16", "unknown stream 'ident-16x16'; known: identity"),
        ("identity-16", "expected identity-<width>x<height>"),
        ("line_buffer-4-16x16", "expected at most 2 outputs, found 3"),
    ],
)
def test_an_unknown_example_is_named(name, message):
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        of(name)


def test_a_configuration_outlives_its_file(tmp_path):
    known = templates.configuration(of("line_buffer-3-14x14"), PUB)
    configuration_file.write(tmp_path / "c.json", known, {"verdict": "solved"})
    again, document = configuration_file.read(tmp_path / "c.json")
    assert again == known and document["registers"] == recurrence.registers(known, PUB)
    text = (tmp_path / "c.json").read_text().replace('"extents"', '"extent"')
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"c\.json: expected a push configuration, found a damaged one"):
        configuration_file.read(tmp_path / "c.json")


def command(*words, cwd):
    return run_script(ROOT / "workflow/scripts/configure.py", *words, folder=cwd)


def test_the_command(tmp_path, hardware):
    streams.write(tmp_path / "s.csv", of("identity-14x14"))
    done = command("--stream", "s.csv", "--output", "c.json", cwd=tmp_path)
    assert done.returncode == 0 and "verified by the model over 331 cycles, the RTL over 331 cycles" in done.stdout
    document = json.loads((tmp_path / "c.json").read_text())
    assert document["engine"] == "fit" and document["verdict"] == "solved" and document["verified"]["rtl"] == 331
    done = command("--stream", "s.csv", "--verify", "c.json", cwd=tmp_path)
    assert done.returncode == 0 and "gives s.csv" in done.stdout
    late = of("identity-14x14")
    late = replace(late, data_out=np.roll(late.data_out, -4, 0), valid_out=np.roll(late.valid_out, -4, 0))
    streams.write(tmp_path / "soon.csv", late)
    done = command("--stream", "soon.csv", "--verify", "c.json", cwd=tmp_path)
    assert done.returncode == 2 and "the model does not give the stream" in done.stderr
    done = command("--stream", "soon.csv", "--output", "why.json", cwd=tmp_path)
    assert done.returncode == 2 and "a word takes at least 4 cycles" in done.stdout
    assert json.loads((tmp_path / "why.json").read_text())["explanation"]["cause"] == "latency"
    done = command("--stream", "identity-14x14", "--component", "agg", "--engine", "bmc", "--time-limit", 0.001,
                   "--output", "late.json", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 3 and "unknown" in done.stdout
    for words, message in (
        (["--output", "x.json"], "expected --stream CSV, or --system"),
        (["--stream", "s.csv"], "expected --output or --verify"),
        (["--stream", "s.csv", "--component", "top2", "--output", "x.json"], "--component: unknown 'top2'"),
        (["--stream", "s.csv", "--layers", 5, "--output", "x.json"], "--layers: expected 0 to 4, found 5"),
        (["--stream", "s.csv", "--engine", "smt", "--output", "x.json"], "unknown engine 'smt'; known: auto, fit, bmc"),
        (
            ["--stream", "identity-14x14", "--memory", "dp", "--component", "agg", "--output", "x.json"],
            "dp has no parts",
        ),
    ):
        done = command(*words, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (tmp_path / "x.json").exists()


def test_a_dual_port_memory_is_configured(hardware):
    stream = examples.stream("line_buffer-2-28x28", DP.PARAMETERS)
    found = solve.solve(stream, DP)
    assert found.verdict == "solved" and found.verified["rtl"] == len(stream) + 64
    soon = streams.of_moves(np.arange(9), [(np.arange(9) + 1, np.arange(9))], DP.PARAMETERS)
    assert solve.solve(soon, DP, hardware=False).cause["cause"] == "latency"


@pytest.mark.slow
@pytest.mark.parametrize("part", parts.ORDER)
def test_model_checking_of_long_streams(part, hardware):
    """Their times are in docs/pushmem.md, whatever they are."""
    extras.need("bitwuzla")
    stream = part_of("identity-64x64", part)
    found = solve.solve(stream, PUB, engine="bmc", limit_s=1800)
    assert found.verdict == "solved" and found.least and len(stream) == 4167
    same = parts.configuration(stream, PUB).controllers
    for name, controller in found.configuration.controllers.items():
        assert (controller.extents, controller.cycle) == (same[name].extents, same[name].cycle)


@pytest.mark.slow
def test_one_question_of_a_whole_tile(hardware):
    """Its time is in docs/pushmem.md, too."""
    extras.need("bitwuzla")
    stream = of("identity-4x2")
    found = solve.solve(stream, PUB, engine="bmc", monolithic=True, limit_s=1800)
    assert found.verdict == "solved" and found.least
    assert found.layers["levels"] == 4 and found.layers["extents"] == 20
