"""Frames on an NVIDIA GPU (stage T5): launches of `frame_kernels`. The contract is that of `networks.backends`."""

from typing import NamedTuple

import torch
import triton

from tilewright.networks.cuda import frame_kernels

# Pixels of a row that a program prepares, and its warps.
PREPARED, PREPARE_WARPS = 256, 4


class Form(NamedTuple):
    """Pixels of a cell, cells and classes that a program labels at once, and its warps."""

    pixels: int
    cells: int
    classes: int
    num_warps: int


# The fastest of 13 forms on an H200, with 150 classes and 128 x 128 maps: of cells of 4 pixels, and of more.
LABEL, LABEL_WIDE = Form(4, 4, 32, 4), Form(8, 8, 16, 4)


def prepare(out: torch.Tensor, frames: torch.Tensor, rows: tuple, columns: tuple, scale: torch.Tensor) -> torch.Tensor:
    """See `networks.backends`."""
    batch, height, width, _ = frames.shape
    (first_y, share_y), (first_x, share_x), sides = rows, columns, out.shape[2:]
    frame_kernels.tilewright_prepare[batch * sides[0], triton.cdiv(sides[1], PREPARED)](
        out, frames, first_y, share_y, first_x, share_x, scale, height, width, *sides,
        share_y.shape[1], share_x.shape[1], PREPARED, num_warps=PREPARE_WARPS,
    )  # fmt: skip
    return out


def label(
    out: torch.Tensor,
    maps: torch.Tensor,
    rows: tuple,
    columns: tuple,
    most: int,
    form: Form | None = None,
) -> torch.Tensor:
    """See `networks.backends`. form: None for the one that is known as the fastest."""
    batch, classes, height, width = maps.shape
    (cell_y, behind_y, _), (_, behind_x, begin) = rows, columns
    form = form or (LABEL if most <= LABEL.pixels else LABEL_WIDE)
    grid = batch * out.shape[1], triton.cdiv(width + 1, form.cells), triton.cdiv(most, form.pixels)
    frame_kernels.tilewright_label[grid](
        out, maps, cell_y, behind_y, behind_x, begin, height, width, *out.shape[1:], *maps.stride(),
        classes, *form[:3], num_warps=form.num_warps,
    )  # fmt: skip
    return out
