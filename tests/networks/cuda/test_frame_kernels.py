"""Kernels on frames, on a GPU or under the interpreter, against torch's operators and the compiled ones of a CPU."""

import pytest
import torch
import torch.nn.functional as F

from helpers.gpu import TRITON_DEVICE, cases
from tilewright.networks.cuda import frames as kernels
from tilewright.paths import frames

SIZES = [((5, 7), (20, 28)), ((4, 6), (15, 31)), ((8, 9), (6, 5)), ((2, 1), (22, 8))]
FORMS = [kernels.LABEL, kernels.Form(1, 2, 4, 8, 1)]


def on(device, found):
    return tuple(torch.from_numpy(x).to(device) for x in found)


# Sums of minus infinity under the interpreter, of classes that are not there.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("sizes", "classes", "last", "form"), cases(SIZES, [3, 16, 21, 40], [False, True], FORMS, times=1)
)
def test_a_label_is_the_first_of_the_largest_logits(sizes, classes, last, form):
    (grid, size), draw = sizes, torch.Generator().manual_seed(classes)
    # Few values, such that many logits are equal, and some of them large.
    maps = torch.randint(-2, 2, (2, classes, *grid), generator=draw).float() * 64
    maps = maps.to(TRITON_DEVICE, memory_format=torch.channels_last if last else torch.contiguous_format)
    rows, columns = (on(maps.device, frames.cells(*sides)) for sides in zip(grid, size, strict=True))
    held = torch.full((4, *size), 77, dtype=torch.uint8, device=maps.device)
    most = tuple(frames._most(*sides) for sides in zip(grid, size, strict=True))
    kernels.label(held[1:3], maps, rows, columns, most, form)
    assert (held[0] == 77).all() and (held[3] == 77).all()
    large = F.interpolate(maps, size=size, mode="bilinear")
    first = large.argmax(1)
    top = large.topk(2, 1).values
    # Exact where weights are; else rounding decides between equal logits.
    near = top[:, 0] - top[:, 1] <= 1e-4
    exact = all(whole % side == 0 for side, whole in zip(grid, size, strict=True))
    differ = held[1:3] != first
    assert not differ.any() if exact else not (differ & ~near).any()
    assert near.any()
    assert torch.equal(frames.labels(maps.cpu(), size)[~near.cpu()], first.cpu()[~near.cpu()].to(torch.uint8))


@pytest.mark.parametrize(("size", "pixels"), [((37, 53), (16, 24)), ((20, 21), (32, 40)), ((16, 24), (16, 24))])
def test_a_frame_is_resized_and_normalised(size, pixels):
    given = torch.randint(0, 256, (2, *size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = frames.images_of(given, torch.empty(2, 3, *pixels))
    out = torch.empty(2, 3, *pixels, device=TRITON_DEVICE)
    rows, columns = (on(out.device, frames.taps(*sides)) for sides in zip(size, pixels, strict=True))
    kernels.prepare(out, given.to(out.device), rows, columns, frames._scale(frames.MEAN, frames.DEVIATION, out.device))
    assert (out.cpu() - expected).abs().max() <= 1e-5
