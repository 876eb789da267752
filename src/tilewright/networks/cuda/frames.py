"""Frames on an NVIDIA GPU (stage T5): launches of `frame_kernels`. The contract is that of `networks.backends`."""

import torch
import triton

from tilewright.networks.cuda import frame_kernels

# Pixels of a row that a program prepares, and its warps.
PREPARED, PREPARE_WARPS = 256, 4
# Pixels of a cell, cells and classes that a program labels at once, and its warps. The last are the classes that lie
# next to each other in memory: 32 bytes of them.
PIXELS, CELLS, CLASSES, LABEL_WARPS = 4, 8, 16, 4


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
    form: tuple[int, int, int, int] = (PIXELS, CELLS, CLASSES, LABEL_WARPS),
) -> torch.Tensor:
    """See `networks.backends`. form: as `PIXELS` to `LABEL_WARPS`."""
    batch, classes, height, width = maps.shape
    (cell_y, behind_y, _), (_, behind_x, begin) = rows, columns
    pixels, cells, lanes, warps = form
    grid = batch * out.shape[1], triton.cdiv(width + 1, cells), triton.cdiv(most, pixels)
    frame_kernels.tilewright_label[grid](
        out, maps, cell_y, behind_y, behind_x, begin, height, width, *out.shape[1:], *maps.stride(),
        classes, pixels, cells, lanes, num_warps=warps,
    )  # fmt: skip
    return out
