"""The kernel that draws scenes, on a GPU or under the interpreter, against what the CPU draws."""

import pytest
import torch

from helpers.gpu import TRITON_DEVICE
from tilewright_study.scenes import backends, cuda, drawing


@pytest.mark.parametrize("pixels", [(7, 45), (16, 24)], ids=str)
def test_a_gpu_draws_what_a_cpu_draws(pixels):
    numbers = drawing.numbers("test", [4, 11])
    # Few objects: the interpreter takes half a second for each program.
    things = drawing.things("test", numbers._replace(objects=numbers.objects[:, :5]), pixels, counts=(3, 5))
    listed = drawing.listed("test", numbers._replace(objects=numbers.objects[:, :5]), things, pixels)
    pictures, labels = drawing.drawn(listed, pixels)
    found, found_labels, owners = cuda.draw(listed, drawing.texels(TRITON_DEVICE), pixels)
    # Sums are taken in another order, and powers by other functions: some pixels round the other way.
    apart = (pictures.int() - found.cpu().int()).abs()
    assert apart.max() <= 1 or (apart > 1).float().mean() < 2e-3
    assert (drawing.outlined(found_labels, owners).cpu() != labels).float().mean() < 2e-3
    assert (labels > 0).any()


def test_which_targets_draw_scenes():
    assert backends.scenes("cuda") is cuda
    assert backends.scenes("cpu") is None


@pytest.mark.skipif(TRITON_DEVICE == "cpu", reason="draws on a GPU")
def test_scenes_are_drawn_where_they_are_asked_for():
    numbers = drawing.numbers("train", range(8))
    listed = drawing.listed("train", numbers, drawing.things("train", numbers, (128, 128)), (128, 128))
    pictures, labels = drawing.drawn(listed, (128, 128), TRITON_DEVICE)
    known, wanted = drawing.drawn(listed, (128, 128))
    assert pictures.is_cuda and labels.is_cuda
    assert ((pictures.cpu().int() - known.int()).abs() > 1).float().mean() < 2e-3
    assert (labels.cpu() != wanted).float().mean() < 2e-3
    assert torch.equal(pictures, drawing.drawn(listed, (128, 128), TRITON_DEVICE)[0])
