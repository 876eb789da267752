"""`tilewright stream`: frames of a folder and of a camera, what is shown, what is written, and what is refused."""

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tilewright import __main__ as command
from tilewright import networks
from tilewright.commands import stream
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.paths import frame_runner

NETWORK = ["--network", "segformer-b0-32", "--classes", "5", "--samples", "2"]


@pytest.fixture
def folder(tmp_path):
    """Three frames of three modes, besides one that is half there, one of another size, and what is no image."""
    place = tmp_path / "frames"
    place.mkdir()
    drawn = np.random.default_rng(0)
    for name in "abc":
        Image.fromarray(drawn.integers(0, 256, (32, 48, 3), dtype=np.uint8)).save(place / f"{name}.png")
    Image.open(place / "b.png").convert("RGBA").save(place / "b.png")
    Image.open(place / "c.png").convert("P").save(place / "c.png")
    (place / "d.png").write_bytes((place / "a.png").read_bytes()[:1500])
    Image.new("RGB", (40, 32)).save(place / "e.jpg")
    (place / "notes.txt").write_text("no image")
    return place


def test_a_folder_is_labelled_and_what_is_refused_is_said(folder, tmp_path, capsys):
    files = ["--record", str(tmp_path / "r.json"), "--output", str(tmp_path / "maps")]
    assert command.main(["stream", "--source", str(folder), *NETWORK, "--budget-us", "1e9", *files]) == 1
    told = capsys.readouterr()
    first, header, row = told.out.strip().splitlines()
    assert first.startswith("5 frames, 3 labelled, 2 refused; ") and first.endswith("0 budgets below every promise")
    assert header.split() == ["made", "kept", "promise_us", "path"] and row.split()[0] == "3"
    errors = told.err.strip().splitlines()
    assert errors[0].startswith("frame 4, d.png: ") and "expected an image, found" in errors[0]
    assert errors[1] == (
        "frame 5, e.jpg: frame: expected 1x32x48x3 of the runner, found 1x32x40x3; resize it, or make a runner for its "
        "size"
    )
    assert json.loads((tmp_path / "r.json").read_text())["frames"] == 3
    maps = sorted((tmp_path / "maps").iterdir())
    assert [x.name for x in maps] == ["a.1.png", "b.2.png", "c.3.png"]
    assert np.asarray(Image.open(maps[0])).shape == (32, 48)


def test_a_file_of_weights_says_which_network_it_is(folder, tmp_path, capsys):
    torch.save(
        networks.create("segformer", variant="b0", image_size=32, num_classes=3).state_dict(), tmp_path / "x.pth"
    )
    arguments = ["--network", str(tmp_path / "x.pth"), "--samples", "2", "--budget-us", "1e9", "--frames", "2"]
    assert command.main(["stream", "--source", str(folder), *arguments]) == 0
    assert "2 frames, 2 labelled, 0 refused" in (said := capsys.readouterr().out) and "segformer-b0-512 " in said
    arguments[1] = str(folder / "notes.txt")
    assert command.main(["stream", "--source", str(folder), *arguments]) == 2
    assert "expected a checkpoint of tensors" in (said := capsys.readouterr().err) and said.count("\n") == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_promises_live_and_idle_time_measures(folder, monkeypatch):
    shown, idle = Terminal(), []
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(stream, "SHOWN_S", 0.0)
    monkeypatch.setattr(stream, "SPARED_S", -0.2)
    monkeypatch.setattr(frame_runner.FrameRunner, "remeasure", lambda self, seconds: idle.append(seconds))
    arguments = ["stream", "--source", str(folder), *NETWORK, "--fps", "5", "--budget-us", "1", "--frames", "3"]
    assert command.main(arguments) == 0
    lines = [line for line in shown.getvalue().split("\r") if "a second" in line]
    assert len(lines) == 3 and lines[2].startswith("3 frames, ")
    assert "segformer-b0-32 11.11.11.11 took" in lines[0] and "below every promise 3, refused 0" in lines[2]
    assert len(idle) >= 1 and min(idle) > 0


def test_a_camera_gives_frames_until_it_does_not(monkeypatch):
    read = [np.full((2, 3, 3), (1, 2, 3), np.uint8)] * 2
    camera = SimpleNamespace(read=lambda: (True, read.pop()) if read else (False, None), release=lambda: None)
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(VideoCapture=lambda number: camera))
    found = stream.frames_of("camera:1")
    assert next(found)[1][0, 0].tolist() == [3, 2, 1] and next(found)[0] == "2"
    with pytest.raises(ArtifactError, match="camera:1: expected a frame, found none after 2"):
        next(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "nowhere", *NETWORK, "--fps", "1"], "nowhere: expected a folder of images"),
        (["--source", "camera:x", *NETWORK, "--fps", "1"], "expected camera or camera:N, found 'camera:x'"),
        (["--source", ".", *NETWORK], "--budget-us: expected a budget, or frames a second by --fps, found neither"),
        (["--source", ".", "--network", "a", "b", "--fps", "1"], "--table: expected a table to pick among 2 networks"),
        (["--source", "FOLDER", "--network", "vil-tiny-224", "--fps", "1"], "expected one that makes maps"),
        (["--source", "FOLDER", *NETWORK, "--fps", "1", "--dtype", "int8"], "--dtype: expected one of float32"),
        (["--source", "FOLDER", *NETWORK, "--fps", "1", "--table", "none.csv"], "no such file; expected a path table"),
    ],
)
def test_bad_input_is_one_line(arguments, message, folder, capsys):
    assert command.main(["stream", *(str(folder) if x == "FOLDER" else x for x in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_no_frame_that_can_be_read_is_an_error(folder, capsys):
    for name in "abce":
        next(folder.glob(f"{name}.*")).unlink()
    assert command.main(["stream", "--source", str(folder), *NETWORK, "--fps", "9"]) == 2
    assert "expected frames, found none of 1 that can be read" in capsys.readouterr().err
    Image.new("I;16", (48, 32)).save(folder / "a.png")
    assert command.main(["stream", "--source", str(folder), *NETWORK, "--fps", "9"]) == 2
    errors = capsys.readouterr().err
    assert "a.png: expected an image of 8 bits (RGB, " in errors and "none of 2 that can be read" in errors
    with pytest.raises(ConfigError, match="cameras need cv2"):
        next(stream.frames_of("camera"))
