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
    out_ptr, maps_ptr, behind_y_ptr, begin_y_ptr, behind_x_ptr, begin_x_ptr, map_rows, map_columns, rows, columns,
    stride_b, stride_c, stride_y, stride_x,
    CLASSES: tl.constexpr, GROUPS: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The class of the largest logit of each pixel, of equal ones the first: logits are interpolated, bilinear.

    A cell is what lies between four places of the map: those before the first row and column, and behind the last ones,
    are among them. BLOCK_M cells of a row of them are a program's, of each BLOCK_Y x BLOCK_X pixels, which share what
    is loaded of the map. Grid: (batch * (map_rows + 1) * GROUPS, cdiv(map_columns + 1, BLOCK_M), cdiv(most columns of a
    cell, BLOCK_X)), GROUPS = cdiv(most rows of a cell, BLOCK_Y). out_ptr: uint8 [batch, rows, columns]; maps_ptr:
    [batch, CLASSES, map_rows, map_columns] by its strides. begin_y_ptr [map_rows + 2]: the first row of pixels of each
    cell, and one behind the last; behind_y_ptr [rows]: how far a row lies behind that of the map before it, in 0..1; of
    columns alike.
    """
    line = tl.program_id(0) // GROUPS
    b, cell_y = line // (map_rows + 1), line % (map_rows + 1)
    group = tl.program_id(0) % GROUPS
    y = tl.load(begin_y_ptr + cell_y) + group * BLOCK_Y + tl.arange(0, BLOCK_Y)
    m_y = y < tl.load(begin_y_ptr + cell_y + 1)
    of_y = tl.load(behind_y_ptr + y, mask=m_y, other=0)[:, None, None]
    cell = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_cell = cell <= map_columns
    begin = tl.load(begin_x_ptr + cell, mask=m_cell, other=0)
    end = tl.load(begin_x_ptr + cell + 1, mask=m_cell, other=0)
    x = begin[None, :] + tl.program_id(2) * BLOCK_X + tl.arange(0, BLOCK_X)[:, None]  # [BLOCK_X, BLOCK_M]
    m_x = x < end[None, :]
    of_x = tl.load(behind_x_ptr + x, mask=m_x, other=0)[None, :, :, None]
    lines = maps_ptr + b.to(tl.int64) * stride_b
    above = lines + tl.maximum(cell_y - 1, 0) * stride_y
    below = lines + tl.minimum(cell_y, map_rows - 1) * stride_y
    left = (tl.maximum(cell - 1, 0) * stride_x)[:, None]
    right = (tl.minimum(cell, map_columns - 1) * stride_x)[:, None]
    best = tl.full((BLOCK_Y, BLOCK_X, BLOCK_M, BLOCK_K), float("-inf"), tl.float32)
    found = tl.zeros((BLOCK_Y, BLOCK_X, BLOCK_M, BLOCK_K), tl.int32)
    for lo in range(0, CLASSES, BLOCK_K):
        k = lo + tl.arange(0, BLOCK_K)
        # What is left of these makes sums of minus infinity, or no numbers: neither is more.
        m, of_k = m_cell[:, None] & (k < CLASSES)[None, :], (k * stride_c)[None, :]
        b_00 = tl.load(above + left + of_k, mask=m, other=float("-inf")).to(tl.float32)  # [BLOCK_M, BLOCK_K]
        b_01 = tl.load(above + right + of_k, mask=m, other=float("-inf")).to(tl.float32)
        b_10 = tl.load(below + left + of_k, mask=m, other=float("-inf")).to(tl.float32)
        b_11 = tl.load(below + right + of_k, mask=m, other=float("-inf")).to(tl.float32)
        b_left = b_00[None, :, :] + of_y * (b_10 - b_00)[None, :, :]  # [BLOCK_Y, BLOCK_M, BLOCK_K]
        b_right = b_01[None, :, :] + of_y * (b_11 - b_01)[None, :, :]
        b_z = b_left[:, None, :, :] + of_x * (b_right - b_left)[:, None, :, :]
        # Each lane meets its classes in order: of equal ones the first stays.
        more = b_z > best
        best, found = tl.where(more, b_z, best), tl.where(more, k[None, None, None, :], found)
    most = tl.max(best, 3)
    label = tl.min(tl.where(best == most[:, :, :, None], found, CLASSES - 1), 3)
    place = ((b * rows + y).to(tl.int64) * columns)[:, None, None] + x[None, :, :]
    tl.store(out_ptr + place, label.to(tl.uint8), mask=m_y[:, None, None] & m_x[None, :, :])
