"""One question for a whole tile: what is found in parts is an answer to it, and nothing else passes as one."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from helpers import extras
from helpers.systems import checked
from tilewright.core.errors import SolverError
from tilewright.pushmem import bmc, configuration_file, memories, parts, recurrence, settings, solve, streams, templates
from tilewright.pushmem.configure import explain, query
from tilewright_study.experiments.push import examples
from tilewright_study.stages import configure

extras.need("amaranth", "pyosys", "bitwuzla")
PUB, DP = memories.member("pub"), memories.member("dp")


def of(name):
    return examples.stream(name, PUB.PARAMETERS)


def moved(count=4, delay=7, port=0, out=0):
    """A stream of a few words, one a cycle, without idle cycles behind them."""
    arrivals = np.arange(count)
    stream = streams.of_moves(arrivals, [(arrivals + delay, arrivals)], PUB.PARAMETERS)
    cut = {
        name: getattr(stream, name)[: count + delay + 1] for name in ("data_in", "valid_in", "data_out", "valid_out")
    }
    for name, column in cut.items():
        at = port if name.endswith("in") else out
        cut[name] = np.roll(column, at, 1)
    return streams.Stream("top", **cut)


def test_a_whole_tile_is_found_by_one_question():
    stream = moved()
    found = solve.solve(stream, PUB, engine="bmc", monolithic=True)
    assert found.verdict == "solved" and found.least and next(iter(found.seconds)) == "top"
    # Four words: a loop as they come in and one as they go out; one row is written, read and kept.
    assert found.layers == {"levels": 2, "extents": 10, "strides": 4, "starts": 4 + 5 + 7}
    assert set(found.configuration.controllers) == {"in2agg0", "agg2sram0", "sram2tb0", "tb2out0"}
    assert found.verified["model"] == found.verified["rtl"] == len(stream) + 64


def test_other_ports_of_a_tile_are_used_as_the_stream_says():
    found = solve.solve(moved(port=1, out=1), PUB, engine="bmc", depth=1, monolithic=True)
    assert set(found.configuration.controllers) == {"in2agg1", "agg2sram1", "sram2tb1", "tb2out1"}


def test_words_that_nobody_asks_for_need_not_be_written():
    stream = moved()
    data, valid = stream.data_in.copy(), stream.valid_in.copy()
    data[1, 1], valid[1, 1] = 9, True
    found = solve.solve(replace(stream, data_in=data, valid_in=valid), PUB, engine="bmc", depth=1, monolithic=True)
    assert set(found.configuration.controllers) == {"in2agg0", "in2agg1", "agg2sram0", "sram2tb0", "tb2out0"}


def test_words_that_may_be_any_are_written_before_they_go_out():
    stream = moved()
    free = np.where(stream.valid_out[:, :, None], streams.ANY, stream.data_out)
    found = solve.solve(replace(stream, data_out=free), PUB, engine="bmc", depth=1, monolithic=True)
    assert found.verdict == "solved" and "agg2sram0" in found.configuration.controllers


def test_words_that_come_out_too_soon_have_no_answer(monkeypatch):
    monkeypatch.setattr(query, "PATIENCE_S", 0.0)
    found = solve.solve(moved(1, 3), PUB, engine="bmc", monolithic=True, limit_s=60)
    assert (found.verdict, found.configuration) == ("infeasible", None)
    assert "no configuration gives all of" in found.cause["text"] and found.cause["component"] == "top"


def test_the_question_of_a_larger_tile_ends_in_time():
    found = solve.solve(of("identity-8x8"), PUB, engine="bmc", monolithic=True, limit_s=0.5)
    assert (found.verdict, found.configuration) == ("unknown", None)


def in_parts(name):
    """What model checking finds of a tile part by part, by part, and joined as ``top``; each with its stream."""
    stream = of(name)
    ran = PUB.run(recurrence.fired(templates.configuration(stream, PUB), PUB, len(stream)), stream.data_in[:, :, 0])
    own = {part: parts.of_run(part, stream, ran) for part in parts.ORDER}
    found = {part: solve.solve(each, PUB, engine="bmc", hardware=False) for part, each in own.items()}
    known = {part: each.configuration for part, each in found.items()}
    joined = parts.joined(list(known.values()), PUB, len(stream))
    return {**{part: (own[part], known[part]) for part in own}, "top": (stream, joined)}


@pytest.fixture(scope="module")
def modular():
    return in_parts("identity-8x8")


@pytest.mark.parametrize("part", streams.PARTS)
def test_the_modular_answer_is_one_of_the_one_question(part, modular):
    stream, known = modular[part]
    assert solve.asserted(known, stream, PUB) == len(stream)


def changed(known, part):
    """``(name, configuration)``: one number that the part tells is one larger."""
    for name, controller in known.controllers.items():
        port = PUB.PARAMETERS.ports()[name]
        told = port.addresses if part == "top" else parts.TOLD[part][port.kind]
        affines, bits = {"cycle": controller.cycle, **controller.addresses}, {"cycle": 16, **port.addresses}
        for what in ("cycle", *told):
            numbers = [affines[what].start, *affines[what].strides]
            for place in range(len(numbers)):
                other = [(number + (at == place)) % (1 << bits[what]) for at, number in enumerate(numbers)]
                taken = affines | {what: settings.Affine(other[0], tuple(other[1:]))}
                wrong = settings.Controller(controller.extents, taken.pop("cycle"), taken)
                yield f"{name}.{what}[{place}]", with_controller(known, name, wrong)


def with_controller(known, name, controller):
    return settings.Configuration(known.memory, {**known.controllers, name: controller})


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] if part == "top" else []) for part in streams.PARTS]
)
def test_a_changed_register_is_refused(part, modular):
    stream, known = modular[part]
    tried = 0
    # The parts ask for each register; the whole tile, which takes longest, asks for every other one.
    for name, wrong in itertools.islice(changed(known, part), 0, None, 2 if part == "top" else 1):
        with pytest.raises(SolverError, match=f"the question of the {part} with this configuration is infeasible: "):
            solve.asserted(wrong, stream, PUB)
            pytest.fail(f"{name} was changed and passed")
        tried += 1
    assert tried >= 8


@pytest.mark.slow
def test_the_core_of_an_infeasible_part_is_minimal_when_asked_again(monkeypatch):
    monkeypatch.setattr(query, "PATIENCE_S", 0.0)
    # However fast this machine is.
    monkeypatch.setattr(explain, "LIMIT_S", 600.0)
    whole = of("identity-8x3")
    ran = PUB.run(recurrence.fired(templates.configuration(whole, PUB), PUB, len(whole)), whole.data_in[:, :, 0])
    stream = parts.of_run("agg", whole, ran)
    data = stream.data_out.copy()
    data[np.flatnonzero(stream.valid_out[:, 0])[5], 0, 0] += 1
    found = solve.solve(replace(stream, data_out=data), PUB, engine="bmc")
    assert found.verdict == "infeasible" and "no configuration gives all of: row0[" in found.cause["text"]
    system, told = bmc._system(PUB, "agg"), found.cause["asked"]
    asked = [(signal, cycle, word + signal.startswith("row")) for signal, cycle, word in told]
    silent = {name: 0 for name in system.configuration if name.startswith(("in2agg1_", "agg2sram1_"))}
    given = bmc._example(stream, PUB, {}, bmc._blank(stream, PUB))
    assert found.cause["minimal"] and checked(system, given, explain.Cause(asked, True), silent)
    assert not checked(system, given, explain.Cause(asked[1:], True), silent)


def test_another_place_in_the_memory_is_as_good(modular):
    stream, known = modular["top"]
    for name in ("agg2sram0", "sram2tb0"):
        each = known.controllers[name]
        there = settings.Affine(each.addresses["sram"].start + 7, each.addresses["sram"].strides)
        known = with_controller(
            known, name, settings.Controller(each.extents, each.cycle, {**each.addresses, "sram": there})
        )
    assert solve.asserted(known, stream, PUB) == len(stream)


def test_two_accesses_in_a_cycle_are_no_answer():
    stream = of("identity-8x8")
    known = templates.configuration(stream, PUB)
    ports = {"agg_row": settings.Affine(0), "sram": settings.Affine(300)}
    # It writes a word that nobody reads, in a cycle in which another word is fetched: the RTL lets the write pass.
    meets = settings.Controller((), settings.Affine(known.controllers["sram2tb0"].cycle.start), ports)
    wrong = with_controller(known, "agg2sram1", meets)
    with pytest.raises(SolverError, match=r"infeasible.*two_accesses is 0 in cycle 5"):
        solve.asserted(wrong, stream, PUB)


def test_an_output_that_the_stream_does_not_have_stays_silent():
    stream = of("identity-8x8")
    more = settings.Controller((), settings.Affine(40), {"tb": settings.Affine(0)})
    wrong = with_controller(templates.configuration(stream, PUB), "tb2out1", more)
    with pytest.raises(SolverError, match=r"infeasible.*tb2out1_fire is 0 in cycle 40"):
        solve.asserted(wrong, stream, PUB)


def test_a_memory_without_parts_is_one_question():
    stream = examples.stream("identity-4x2", DP.PARAMETERS)
    found = solve.solve(stream, DP, engine="bmc", depth=1, hardware=False)
    assert found.verdict == "solved"
    assert solve.asserted(templates.configuration(stream, DP), stream, DP) == len(stream)


ASKED = dict(
    component=None, memory=None, engine="bmc", layers=None, fix=None, monolithic=True, time_limit=None, system=None,
    solve=None, least=None, example=None, verify=None, write_stream=None, output=None,
)  # fmt: skip


def test_the_command_asks_one_question(tmp_path, modular, capsys):
    stream, known = modular["top"]
    streams.write(tmp_path / "s.csv", stream)
    configuration_file.write(tmp_path / "c.json", known)
    configure.run(**ASKED | {"stream": tmp_path / "s.csv", "engine": None, "verify": tmp_path / "c.json"})
    assert f"the one question over {len(stream)} cycles" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        configure.run(**ASKED | {"stream": tmp_path / "s.csv", "time_limit": 1.0, "output": tmp_path / "late.json"})
    assert ended.value.code == 3 and "unknown: the time limit ended" in capsys.readouterr().out
    assert json.loads((tmp_path / "late.json").read_text())["verdict"] == "unknown"
    streams.write(tmp_path / "few.csv", moved())
    configure.run(**ASKED | {"stream": tmp_path / "few.csv", "output": tmp_path / "few.json"})
    document = json.loads((tmp_path / "few.json").read_text())
    assert document["engine"] == "bmc" and document["layers"]["levels"] == 2 and "top" in document["seconds"]
