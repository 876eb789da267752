"""Files of an app, and what they cost."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from tilewright.core.errors import ArtifactError, TilewrightError, UnknownNameError
from tilewright.pushmem import configuration, mapping, simulate
from tilewright.pushmem.dsl import Input, Reduce, Stage
from tilewright_study.experiments.push import apps
from tilewright_study.stages import push_app as stage
from tilewright_study.stages.push_app import run


def test_an_app_leaves_three_files_that_agree(tmp_path, capsys):
    run("brighten_blur-24", "pub", None, False, tmp_path)
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
        *(("harris-32", "pub"), ("transpose-64", "pub"), pytest.param("layers-8", "pub", marks=pytest.mark.slow)),
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
        run("brighten_blur-24", "pub", None, False, tmp_path)


def test_a_memory_that_is_not_there_names_those_that_are(tmp_path):
    with pytest.raises(UnknownNameError, match="known: pub, dp"):
        run("gaussian-24", "sram", None, False, tmp_path)
    assert not list(tmp_path.iterdir())


def test_steps_leave_what_all_of_them_do(tmp_path):
    for step in (None, "map", "configure", "run"):
        run("downsample-16", "pub", step, False, tmp_path / ("whole" if step is None else "steps"))
    assert (tmp_path / "whole/mapped.json").read_text() == (tmp_path / "steps/mapped.json").read_text()
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("whole", "steps")]
    assert configs[0]["tiles"] == configs[1]["tiles"]
    rows = [next(csv.DictReader((tmp_path / each / "run.csv").open())) for each in ("whole", "steps")]
    assert all(rows[0][name] == rows[1][name] for name in rows[0] if not name.endswith("_s"))


def test_a_step_after_another_mapping_is_refused(tmp_path):
    run("brighten_blur-24", "pub", "map", False, tmp_path)
    with pytest.raises(ArtifactError, match="expected gaussian-24 on pub, found brighten_blur-24 on pub"):
        run("gaussian-24", "pub", "configure", False, tmp_path)
    text = (tmp_path / "mapped.json").read_text()
    (tmp_path / "mapped.json").write_text(text.replace('"pes": 6', '"pes": 7'))
    with pytest.raises(ArtifactError, match="found another; run --step map again"):
        run("brighten_blur-24", "pub", "run", False, tmp_path)
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


OWN = """import numpy as np
from tilewright.pushmem.dsl import Input, Stage, bounded, saturate

def outputs(size):
    image = Input("image", (size, size), "uint8")
    near = bounded(image, "clamp")
    apart = lambda y, x: saturate((near[y, x + 1] * 2 - near[y, x]).as_signed())
    return Stage("edges", (size, size), apart, dtype="uint8")

def twice(size):
    image = Input("image", (size, size), "uint8")
    return Stage("both", (2, size, size), lambda c, y, x: image[y, x] * (c + 1), unroll=(0,))

def in_numpy(image):
    wide = np.pad(image.astype(int), ((0, 0), (0, 1)), mode="edge")
    return np.clip(2 * wide[:, 1:] - wide[:, :-1], 0, 255)

def wrong(image):
    found = in_numpy(image)
    found[3, 4] += 1
    return {"edges": found}

def flat(image):
    return in_numpy(image).ravel()

def failing(size):
    return size / 0

fixed = outputs(6)
"""


def own(folder, program, *, memory="pub", step=None, rtl=False, **options):
    """Run a program of one's own."""
    (folder / "own.py").write_text(OWN)
    options = {k: f"{folder}/own.py:{v}" if k == "definition" else v for k, v in options.items()}
    run(None, memory, step, rtl, folder / "out", program=f"{folder}/own.py:{program}", **options)


def test_a_program_in_a_file_runs_on_images(tmp_path, capsys):
    image = np.arange(64, dtype=np.uint8).reshape(8, 8) * 3
    Image.fromarray(image).save(tmp_path / "image.png")
    np.save(tmp_path / "image.npy", image.astype(np.int64))
    for step in ("map", "configure"):
        own(tmp_path, "outputs", size=8, step=step)
    for given in (f"image={tmp_path}/image.png", f"{tmp_path}/image.npy"):
        own(tmp_path, "outputs", size=8, step="run", image=[given], definition="in_numpy")
        found = np.load(tmp_path / "out/edges.npy")
        assert found.dtype == np.uint8 and found[0, :2].tolist() == [6, 9]
    assert "own.py:outputs-8 on pub: 0 tiles" in capsys.readouterr().out
    own(tmp_path, "fixed", memory="dp", definition="in_numpy")
    own(tmp_path, "twice", size=4)
    assert np.load(tmp_path / "out/both.npy").shape == (2, 4, 4)


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        ("outputs", {"size": 8, "definition": "wrong"}, r"-8 on pub: edges\[3, 4\]: expected \d+, found \d+; 1 of"),
        ("outputs", {"size": 8, "definition": "flat"}, r"shape \(8, 8\) for edges, found int64 of \(64,\)"),
        ("outputs", {"size": 8, "image": ["light=a.npy"]}, "unknown input 'light'; known: image"),
        ("outputs", {"size": 8, "image": ["image=small.npy"]}, r"shape \(8, 8\) for image, found int64 of \(2, 2\)"),
        ("outputs", {"size": 2, "image": ["image=small.npy"]}, "words of uint8, 0 to 255, for image, found 7 to 300"),
        ("outputs", {"size": 2, "image": ["image=real.npy"]}, r"expected whole numbers .* found float64"),
        ("outputs", {"size": 2, "image": ["image=own.py"]}, "own.py: expected an image, found: cannot identify"),
        ("outputs", {}, r"--program: .*own.py: TypeError: outputs\(\) missing 1 required"),
        ("failing", {"size": 3}, r"--program: .*own.py, line \d+: ZeroDivisionError: division by zero"),
        ("fixed", {"size": 3}, "--size: expected a function that takes a size"),
        ("other", {"size": 3}, r"own.py has no 'other'; known: outputs, twice, in_numpy, wrong, flat, failing"),
        ("in_numpy", {"size": 3}, "--program: .*AttributeError"),
        ("np", {}, "expected stages as outputs, found"),
        ("outputs", {"size": 8, "step": "run", "memory": "dp"}, "mapped.json"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_give_is_told_in_one_line(program, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("small.npy", [[7, 8], [9, 300]])
    np.save("real.npy", np.zeros((2, 2)))
    with pytest.raises((TilewrightError, OSError), match=message) as found:
        own(tmp_path, program, **options)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "expected either --app or --program, found neither"),
        ({"app": "gaussian-8", "program": "a.py:b"}, "expected either --app or --program"),
        ({"app": "gaussian-8", "size": 4, "image": ["a"]}, "--size, --image: for --program only"),
        ({"program": "a:b"}, "--program: expected FILE.py:NAME, found a:b"),
        ({"program": "a.py:b"}, "--program: a.py: expected a file, found none"),
    ],
)
def test_what_is_run_is_an_app_or_a_file(asked, message, tmp_path):
    with pytest.raises(TilewrightError, match=message):
        run(**{"app": None, "memory": "pub", "step": None, "rtl": False, "output": tmp_path} | asked)


def test_a_file_that_cannot_be_read_names_its_line(tmp_path):
    (tmp_path / "own.py").write_text("a = 1\nb = (\n")
    with pytest.raises(TilewrightError, match=r"own.py, line 2: SyntaxError"):
        run(None, "pub", None, False, tmp_path / "out", program=f"{tmp_path}/own.py:a")
