"""Files of an app, and what they cost."""

import csv
import json

import pytest

from tilewright.core.errors import ArtifactError, TilewrightError, UnknownNameError
from tilewright.pushmem import configuration, mapping, simulate
from tilewright.pushmem.dsl import Input, Reduce, Stage
from tilewright_study.experiments.push import apps
from tilewright_study.stages import push_app as stage
from tilewright_study.stages.push_app import run


def test_an_app_leaves_three_files_that_agree(tmp_path, capsys):
    run("brighten_blur-24", "pub", None, True, tmp_path)
    mapped, config = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("mapped", "config"))
    (row,) = csv.DictReader((tmp_path / "run.csv").open())
    assert (mapped["starts"]["brighten"], mapped["strides"]["brighten"]) == (0, [24, 1])
    assert [t["distance"] for t in mapped["taps"]] == [24]
    assert mapped["tiles"] == [
        {"memory": "pub", "buffers": ["brighten"], "sources": ["brighten"], "targets": ["brighten@24"]}
    ]
    assert config["tiles"][0]["controllers"]["in2agg0"]["extents"] == [552]
    assert config["tiles"][0]["from_stream"]["verdict"] == "solved"
    assert (row["tiles"], row["error_words_model"], row["error_words_rtl"]) == ("1", "0", "not run")
    assert "0 of 529 words differ; RTL: not run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("app", "memory"),
    [
        *(("harris-32", "pub"), ("transpose-64", "pub"), ("layers-8", "pub")),
        *(("upsample-16", "dp"), ("mobilenet-16", "dp"), ("mixer-16", "dp")),
    ],
)
def test_live_words_lie_within_the_modulus_that_is_told(app, memory):
    mapped = mapping.compile(apps.program(app), memory)
    held, layouts = stage.mapped_document(mapped)["held"], mapped.wiring.layouts
    assert held and all(each["buffer"] in layouts for each in held)
    for each in held:
        assert 1 <= max(each["live"]) <= each["modulus"] == layouts[each["buffer"]].size


def test_words_that_differ_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(simulate, "differing_words", lambda *_: 3)
    with pytest.raises(TilewrightError, match="expected the words of numpy, found 3"):
        run("brighten_blur-24", "pub", None, True, tmp_path)


def test_a_memory_that_is_not_there_names_those_that_are(tmp_path):
    with pytest.raises(UnknownNameError, match="known: pub, dp"):
        run("gaussian-24", "sram", None, True, tmp_path)
    assert not list(tmp_path.iterdir())


def test_steps_leave_what_all_of_them_do(tmp_path):
    for step in (None, "map", "configure", "run"):
        run("downsample-16", "pub", step, True, tmp_path / ("whole" if step is None else "steps"))
    assert (tmp_path / "whole/mapped.json").read_text() == (tmp_path / "steps/mapped.json").read_text()
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("whole", "steps")]
    assert configs[0]["tiles"] == configs[1]["tiles"]
    rows = [next(csv.DictReader((tmp_path / each / "run.csv").open())) for each in ("whole", "steps")]
    assert all(rows[0][name] == rows[1][name] for name in rows[0] if not name.endswith("_s"))


def test_a_step_after_another_mapping_is_refused(tmp_path):
    run("brighten_blur-24", "pub", "map", True, tmp_path)
    with pytest.raises(ArtifactError, match="expected gaussian-24 on pub, found brighten_blur-24 on pub"):
        run("gaussian-24", "pub", "configure", True, tmp_path)
    text = (tmp_path / "mapped.json").read_text()
    (tmp_path / "mapped.json").write_text(text.replace('"pes": 6', '"pes": 7'))
    with pytest.raises(ArtifactError, match="found another; run --step map again"):
        run("brighten_blur-24", "pub", "run", True, tmp_path)
    assert not (tmp_path / "run.csv").exists()


def test_live_words_are_those_between_a_words_arrival_and_its_last_read():
    (held,) = stage.mapped_document(mapping.compile(apps.program("brighten_blur-24")))["held"]
    # The second row of a 2 x 2 window reads a row and a word later; the word itself and its neighbour are registers.
    assert max(held["live"]) == 25 and held["live"][-1] <= 1
    assert [(port["kind"], port["first"]) for port in held["ports"]] == [("in", 0), ("out", 24)]


def test_tiles_that_deliver_words_that_nobody_takes_are_not_asked():
    def found(width):
        image, weights = Input("in", (6, width + 2)), Input("weights", (3, 3))
        sums = Stage("sums", (4, width), lambda y, x: Reduce((3, 3), lambda i, j: image[y + i, x + j] * weights[i, j]))
        return configuration.from_streams(mapping.compile(sums))

    # Rows of 5 words run as 8.
    assert set(found(5)) == {None}
    assert None not in found(8)
