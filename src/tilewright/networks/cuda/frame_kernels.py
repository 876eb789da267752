"""Frames on an NVIDIA GPU (stage T5): kernels that make images of them, and their classes of maps of logits."""

import triton
import triton.language as tl


@triton.jit
def tilewright_prepare(
    out_ptr, frame_ptr, first_y_ptr, share_y_ptr, first_x_ptr, share_x_ptr, scale_ptr, rows, columns, out_rows,
    out_columns, TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Resize frames and normalise them.

    Grid: (batch * out_rows, cdiv(out_columns, BLOCK_M)). out_ptr: [batch, 3, out_rows, out_columns], frame_ptr: uint8
    [batch, rows, columns, 3], contiguous. first_y_ptr [out_rows], share_y_ptr [out_rows, TAPS_Y]: the first row that a
    row is made of, and the shares of it and those behind it; of columns alike. scale_ptr [2, 3]: what a channel is
    multiplied with, and what is added.
    """
    b, y = tl.program_id(0) // out_rows, tl.program_id(0) % out_rows
    x = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_x = x < out_columns
    first_y = tl.load(first_y_ptr + y)
    first_x = tl.load(first_x_ptr + x, mask=m_x, other=0)
    none = tl.zeros((BLOCK_M,), tl.float32)
    acc_0, acc_1, acc_2 = none, none, none
    for i in range(TAPS_Y):
        share_y = tl.load(share_y_ptr + y * TAPS_Y + i)
        # Behind the last row there is none: its share is 0.
        line = (b * rows + tl.minimum(first_y + i, rows - 1)).to(tl.int64) * columns
        for j in range(TAPS_X):
            share = share_y * tl.load(share_x_ptr + x * TAPS_X + j, mask=m_x, other=0)
            place = frame_ptr + (line + tl.minimum(first_x + j, columns - 1)) * 3
            acc_0 += share * tl.load(place, mask=m_x, other=0).to(tl.float32)
            acc_1 += share * tl.load(place + 1, mask=m_x, other=0).to(tl.float32)
            acc_2 += share * tl.load(place + 2, mask=m_x, other=0).to(tl.float32)
    plane = out_rows * out_columns
    to = out_ptr + b.to(tl.int64) * 3 * plane + y * out_columns + x
    b_0 = acc_0 * tl.load(scale_ptr) + tl.load(scale_ptr + 3)
    b_1 = acc_1 * tl.load(scale_ptr + 1) + tl.load(scale_ptr + 4)
    b_2 = acc_2 * tl.load(scale_ptr + 2) + tl.load(scale_ptr + 5)
    tl.store(to, b_0.to(out_ptr.dtype.element_ty), mask=m_x)
    tl.store(to + plane, b_1.to(out_ptr.dtype.element_ty), mask=m_x)
    tl.store(to + 2 * plane, b_2.to(out_ptr.dtype.element_ty), mask=m_x)


@triton.jit
def tilewright_label(
    out_ptr, maps_ptr, cell_y_ptr, behind_y_ptr, behind_x_ptr, begin_ptr, map_rows, map_columns, rows, columns,
    stride_b, stride_c, stride_y, stride_x,
    CLASSES: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The class of the largest logit of each pixel, of equal ones the first: logits are interpolated, bilinear.

    Grid: (batch * rows, cdiv(map_columns + 1, BLOCK_M), cdiv(most pixels of a cell, BLOCK_X)), BLOCK_M cells of a row
    of pixels a program. A cell lies between two columns of the map, the first one left of all and the last one right of
    all, and begins at the pixel begin_ptr [map_columns + 2]; BLOCK_X of its pixels share what is loaded of the map.
    out_ptr: uint8 [batch, rows, columns]; maps_ptr: [batch, CLASSES, map_rows, map_columns] by its strides. cell_y_ptr
    [rows]: row of the map above a row of pixels, -1 for none. behind_y_ptr [rows], behind_x_ptr [columns]: how far a
    pixel lies behind the row above it, or the column left of it, in 0..1.
    """
    b, y = tl.program_id(0) // rows, tl.program_id(0) % rows
    cell_y, of_y = tl.load(cell_y_ptr + y), tl.load(behind_y_ptr + y)
    cell = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_cell = cell <= map_columns
    begin = tl.load(begin_ptr + cell, mask=m_cell, other=0)
    end = tl.load(begin_ptr + cell + 1, mask=m_cell, other=0)
    x = begin[None, :] + tl.program_id(2) * BLOCK_X + tl.arange(0, BLOCK_X)[:, None]  # [BLOCK_X, BLOCK_M]
    m_x = x < end[None, :]
    of_x = tl.load(behind_x_ptr + x, mask=m_x, other=0)[:, :, None]
    lines = maps_ptr + b.to(tl.int64) * stride_b
    above = lines + tl.maximum(cell_y, 0) * stride_y
    below = lines + tl.minimum(cell_y + 1, map_rows - 1) * stride_y
    left = (tl.maximum(cell - 1, 0) * stride_x)[:, None]
    right = (tl.minimum(cell, map_columns - 1) * stride_x)[:, None]
    best = tl.full((BLOCK_X, BLOCK_M, BLOCK_K), float("-inf"), tl.float32)
    found = tl.zeros((BLOCK_X, BLOCK_M, BLOCK_K), tl.int32)
    for lo in range(0, CLASSES, BLOCK_K):
        k = lo + tl.arange(0, BLOCK_K)
        m, of_k = m_cell[:, None] & (k < CLASSES)[None, :], (k * stride_c)[None, :]
        b_00 = tl.load(above + left + of_k, mask=m, other=0).to(tl.float32)  # [BLOCK_M, BLOCK_K]
        b_01 = tl.load(above + right + of_k, mask=m, other=0).to(tl.float32)
        b_10 = tl.load(below + left + of_k, mask=m, other=0).to(tl.float32)
        b_11 = tl.load(below + right + of_k, mask=m, other=0).to(tl.float32)
        b_left, b_right = (1.0 - of_y) * b_00 + of_y * b_10, (1.0 - of_y) * b_01 + of_y * b_11
        b_z = (1.0 - of_x) * b_left[None, :, :] + of_x * b_right[None, :, :]  # [BLOCK_X, BLOCK_M, BLOCK_K]
        # Each lane meets its classes in order: of equal ones the first stays.
        more = (b_z > best) & (k < CLASSES)[None, None, :]
        best, found = tl.where(more, b_z, best), tl.where(more, k[None, None, :], found)
    most = tl.max(best, 2)
    label = tl.min(tl.where(best == most[:, :, None], found, CLASSES - 1), 2)
    place = (b * rows + y).to(tl.int64) * columns
    tl.store(out_ptr + place + x, label.to(tl.uint8), mask=m_x)
