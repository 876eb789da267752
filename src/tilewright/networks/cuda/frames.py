"""Frames on an NVIDIA GPU (stage T5): launches of `frame_kernels`. The contract is that of `networks.backends`."""

from typing import NamedTuple

import torch
import triton

from tilewright.networks.cuda import frame_kernels

# Pixels of a row that a program prepares, and its warps.
PREPARED, PREPARE_WARPS = 256, 4


class Form(NamedTuple):
    """Rows and columns of pixels of a cell, cells and classes that a program labels at once, and its warps."""

    rows: int
    columns: int
    cells: int
    classes: int
    num_warps: int


# The fastest of 21 forms on an H200, for 512 x 512 pixels of maps of 128 x 128 and 150 classes.
LABEL = Form(4, 4, 16, 8, 4)


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
    out: torch.Tensor, maps: torch.Tensor, rows: tuple, columns: tuple, most: tuple[int, int], form: Form = LABEL
) -> torch.Tensor:
    """See `networks.backends`."""
    batch, classes, height, width = maps.shape
    (_, behind_y, begin_y), (_, behind_x, begin_x) = rows, columns
    groups = triton.cdiv(most[0], form.rows)
    grid = batch * (height + 1) * groups, triton.cdiv(width + 1, form.cells), triton.cdiv(most[1], form.columns)
    frame_kernels.tilewright_label[grid](
        out, maps, behind_y, begin_y, behind_x, begin_x, height, width, *out.shape[1:], *maps.stride(),
        classes, groups, *form[:4], num_warps=form.num_warps,
    )  # fmt: skip
    return out
