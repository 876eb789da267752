"""Clips of moving photographs and their latents."""

import numpy as np
import pytest
import torch

from tilewright.core import images
from tilewright.core.errors import PatternError, UnknownNameError
from tilewright_study.scenes import clips

SIZES = (8, 48, 80)


def test_a_clip_is_a_function_of_its_index():
    one, again, other = (clips.video(index, *SIZES) for index in (3, 3, 4))
    assert one.shape == (3, *SIZES)
    assert one.dtype == torch.float32
    assert 0 <= one.min() < 0.2 < 0.8 < one.max() <= 1
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one, clips.video(3, *SIZES, seed=1))
    assert not torch.equal(one, clips.video(3, *SIZES, split="test"))


def test_latents_do_not_depend_on_the_clips_beside_them():
    together = clips.latents([5, 2, 9], 2, 6, 10)
    assert together.shape == (3, 16, 2, 6, 10)
    assert torch.equal(together[1:2], clips.latents([2], 2, 6, 10))
    assert torch.equal(together[2], clips.encode(clips.video(9, 8, 48, 80)))
    assert clips.latents([], 2, 6, 10).shape == (0, 16, 2, 6, 10)


def test_splits_share_no_photograph():
    train, test = (set(clips.SPLITS[name]) for name in ("train", "test"))
    assert not train & test
    assert train | test <= {*images.PHOTOGRAPHS}


def test_a_split_is_made_of_its_own_photographs_alone(monkeypatch):
    asked = []
    load = images.load
    monkeypatch.setattr(clips.images, "load", lambda name, size: asked.append(name) or load(name, size))
    clips._photographs.cache_clear()
    clips.video(0, 1, 8, 8, split="test")
    assert set(asked) == {*clips.SPLITS["test"]}


def test_everything_moves():
    """No frame is like the one before it, and there is more to see than a shift of the whole."""
    video = clips.video(0, 36, 120, 208)
    assert (video[:, 1:] - video[:, :-1]).abs().mean((0, 2, 3)).min() > 1e-3
    # What moves differently: the shift that explains the ground best leaves much unexplained.
    ground, after = video[:, 0], video[:, 9]
    shifted = [ground.roll((y, x), (1, 2)) for y in range(-12, 13, 2) for x in range(-12, 13, 2)]
    left = min(float((picture - after)[:, 12:-12, 12:-12].square().mean()) for picture in shifted)
    assert left > 0.05 * float(after.var())


def test_channels_have_about_unit_variance():
    found = clips.latents(range(12), 5, 15, 26)
    deviation = found.transpose(0, 1).flatten(1).std(1)
    # Of a dozen clips on four photographs.
    assert deviation.min() > 0.5
    assert deviation.max() < 2
    assert found.transpose(0, 1).flatten(1).mean(1).abs().max() < 0.6


def test_the_transform_is_that_of_the_formula():
    """One coefficient of one block of pixels, summed up by hand."""
    pixels = torch.rand(3, 4, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    channel = clips.CHANNELS[-1]
    luma = np.tensordot([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]], pixels, 1)
    total = 0.0
    for t, y, x in np.ndindex(4, 8, 8):
        waves = [
            np.cos(np.pi * (at + 0.5) * frequency / size) * np.sqrt((2 if frequency else 1) / size)
            for at, frequency, size in zip((t, y, x), channel[1:4], (4, 8, 8), strict=True)
        ]
        total += luma[channel.colour, t, y, x] * np.prod(waves)
    found = clips.encode(pixels.float())[-1].item()
    assert found == pytest.approx((total - channel.mean) / channel.deviation, abs=1e-4)


def test_decoding_is_undone_by_encoding():
    latents = torch.randn(2, 16, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    pixels = clips.decode(latents)
    assert pixels.shape == (2, 3, 8, 24, 32)
    torch.testing.assert_close(clips.encode(pixels), latents, atol=1e-4, rtol=1e-4)


def test_what_is_decoded_looks_like_the_clip():
    video = clips.video(1, 8, 120, 208)
    assert (clips.decode(clips.encode(video)) - video).square().mean() < 0.1 * video.var()


def test_an_even_picture_has_no_detail():
    latents = clips.encode(torch.full((3, 4, 8, 8), 0.5))[:, 0, 0, 0]
    for channel, value in zip(clips.CHANNELS, latents.tolist(), strict=True):
        if any(channel[1:4]):
            assert value * channel.deviation + channel.mean == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("sizes", [(0, 8, 8), (1, 0, 8), (1, 8, -1)], ids=str)
def test_sizes_are_positive(sizes):
    with pytest.raises(PatternError, match="of at least 1"):
        clips.video(0, *sizes)
    with pytest.raises(PatternError, match="of at least 1"):
        clips.latents([0], *sizes)


def test_an_index_is_not_negative():
    with pytest.raises(PatternError, match="found -1 and 0"):
        clips.video(-1, *SIZES)


def test_an_unknown_split_is_refused():
    with pytest.raises(UnknownNameError, match="train, test"):
        clips.video(0, *SIZES, split="valid")


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (3, 5, 8, 8), (3, 4, 8, 12)], ids=str)
def test_pixels_are_of_whole_latents(shape):
    with pytest.raises(PatternError, match="3, 4T, 8H, 8W"):
        clips.encode(torch.zeros(shape))
