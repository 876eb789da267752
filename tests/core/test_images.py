"""Photographs: those that are shipped, the user's own, and what is no photograph."""

import numpy as np
import pytest
from PIL import Image

from tilewright.core import images
from tilewright.core.errors import ArtifactError, UnknownNameError


@pytest.mark.parametrize("name", images.PHOTOGRAPHS)
def test_every_photograph_is_there_without_a_network(name, monkeypatch):
    monkeypatch.setattr("socket.socket", None)
    with Image.open(images.path(name)) as image:
        assert image.size == images.PHOTOGRAPHS[name].size
    pixels = images.load(name, 96)
    assert pixels.shape == (3, 96, 96)
    assert pixels.dtype == np.float32
    assert pixels.min() >= 0
    assert 0.1 < np.ptp(pixels) <= 1


def test_some_photograph_has_a_high_resolution():
    assert max(min(photograph.size) for photograph in images.PHOTOGRAPHS.values()) >= 1024


def test_the_shorter_side_is_resized_and_the_middle_cut_out(tmp_path):
    # Red, green and blue squares side by side: the middle one stays.
    strip = np.kron(np.eye(3)[None] * 255, np.ones((40, 40, 1))).astype(np.uint8)
    Image.fromarray(strip).save(tmp_path / "strip.png")
    pixels = images.load(tmp_path / "strip.png", 20)
    np.testing.assert_array_equal(pixels[:, 5:-5, 5:-5].mean((1, 2)), [0, 1, 0])


def test_a_photograph_that_is_no_square_is_cut_likewise(tmp_path):
    """Of the same strip the upper and lower ends are cut off, where it is to be flatter still."""
    strip = np.kron(np.eye(3)[None] * 255, np.ones((40, 40, 1))).astype(np.uint8)
    Image.fromarray(strip).save(tmp_path / "strip.png")
    pixels = images.load(tmp_path / "strip.png", (20, 40))
    assert pixels.shape == (3, 20, 40)
    assert pixels[1, 5:-5, 15:-15].min() == 1 and pixels[0, 5:-5, :5].min() == pixels[2, 5:-5, -5:].min() == 1
    assert images.load(tmp_path / "strip.png", (5, 60)).shape == (3, 5, 60)


def test_an_upright_photograph_is_shown_upright(tmp_path):
    image = Image.fromarray(np.concatenate([np.zeros((8, 16, 3)), np.full((8, 16, 3), 255)]).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    image.save(tmp_path / "turned.png", exif=exif)
    assert images.load(tmp_path / "turned.png", 16)[:, 0].min() == 1


def test_an_unknown_photograph_is_answered_with_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"unknown photograph \(nor a file\) 'cat'; known: astronaut, chelsea"):
        images.load("cat", 16)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_an_image_of_other_channels_is_refused(tmp_path, mode):
    path = tmp_path / "image.tiff"
    Image.new(mode, (16, 16)).save(path)
    with pytest.raises(ArtifactError, match=f"expected an RGB image, found mode {mode}"):
        images.load(path, 16)


def _truncated(path):
    Image.effect_noise((64, 64), 50).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[:200])


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda path: path.write_text("no image"), id="text"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(_truncated, id="truncated"),
    ],
)
def test_what_is_no_image_is_refused(tmp_path, write):
    write(tmp_path / "image.png")
    with pytest.raises(ArtifactError, match=r"image\.png: expected an image, found"):
        images.load(tmp_path / "image.png", 16)


@pytest.mark.parametrize(("mode", "kind"), [("L", "png"), ("LA", "png"), ("P", "gif"), ("1", "png"), ("CMYK", "jpg")])
def test_images_of_eight_bits_are_turned_into_rgb(tmp_path, mode, kind):
    drawn = np.random.default_rng(0).integers(0, 256, (6, 8), dtype=np.uint8)
    Image.fromarray(drawn).convert(mode).save(tmp_path / f"image.{kind}")
    with Image.open(tmp_path / f"image.{kind}") as image:
        expected = image.convert("RGB")
    found = images.rgb(tmp_path / f"image.{kind}")
    assert found.mode == "RGB" and found.tobytes() == expected.tobytes()


def test_an_image_of_sixteen_bits_is_refused(tmp_path):
    Image.new("I;16", (8, 6)).save(tmp_path / "deep.png")
    with pytest.raises(ArtifactError, match=r"deep\.png: expected an image of 8 bits \(RGB, .*\), found mode I;16"):
        images.rgb(tmp_path / "deep.png")
