"""Maps on an NVIDIA GPU (stage T5): kernels of a folded decoder, and of a depthwise convolution with its GELU.

Channels of a pixel lie next to each other: libraries want them apart for such convolutions, and each would copy.
"""

import triton
import triton.language as tl

from tilewright.devices.cuda.overlap import wait

SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def tilewright_copy(out_ptr, x_ptr, n, BLOCK: tl.constexpr):
    """`n` values of x to out, BLOCK a program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def _of_tap(weight_ptr, c, m_c, TAP: tl.constexpr):
    return tl.load(weight_ptr + c * 9 + TAP, mask=m_c, other=0).to(tl.float32)[None, :]


@triton.jit
def _tap(acc, b_x, weights, FROM: tl.constexpr, TO: tl.constexpr, DX: tl.constexpr):
    """A row of results and what it takes of the row FROM, where that is next to it. weights: of the nine taps."""
    if FROM - TO >= -1 and FROM - TO <= 1:
        acc += b_x * weights[3 * (FROM - TO + 1) + DX + 1]
    return acc


@triton.jit
def _store_gelu(acc, out_ptr, y, x, c, m_c, line, rows, columns, channels):
    acc = 0.5 * acc * (1.0 + tl.erf(acc * SQRT_HALF))
    place = (line.to(tl.int64) * columns + x) * channels
    m_out = ((y < rows) & (x < columns))[:, None] & m_c[None, :]
    tl.store(out_ptr + place[:, None] + c[None, :], acc.to(out_ptr.dtype.element_ty), mask=m_out)


@triton.jit
def tilewright_dwconv_gelu(
    out_ptr, x_ptr, weight_ptr, bias_ptr, rows, columns, channels, BLOCK_Y: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A 3 x 3 depthwise convolution and a GELU, 1, 2 or 4 rows a program: each is loaded once for all that take of it.

    Grid: (batch * cdiv(rows, BLOCK_Y) * cdiv(columns, BLOCK_M), cdiv(channels, BLOCK_C)). out_ptr, x_ptr: [batch, rows,
    columns, channels]; weight_ptr: [channels, 9]; bias_ptr: [channels]; contiguous.
    """
    tiles, groups = tl.cdiv(columns, BLOCK_M), tl.cdiv(rows, BLOCK_Y)
    group = tl.program_id(0) // tiles
    y = group % groups * BLOCK_Y
    line = group // groups * rows + y
    x = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = c < channels
    bias = tl.zeros((BLOCK_M, BLOCK_C), tl.float32) + tl.load(bias_ptr + c, mask=m_c, other=0).to(tl.float32)[None, :]
    acc_0, acc_1, acc_2, acc_3 = bias, bias, bias, bias
    weights = (
        _of_tap(weight_ptr, c, m_c, 0), _of_tap(weight_ptr, c, m_c, 1), _of_tap(weight_ptr, c, m_c, 2),
        _of_tap(weight_ptr, c, m_c, 3), _of_tap(weight_ptr, c, m_c, 4), _of_tap(weight_ptr, c, m_c, 5),
        _of_tap(weight_ptr, c, m_c, 6), _of_tap(weight_ptr, c, m_c, 7), _of_tap(weight_ptr, c, m_c, 8),
    )  # fmt: skip
    wait(OVERLAP)
    for r in tl.static_range(BLOCK_Y + 2):
        for dx in tl.static_range(3):
            m_x = (x + dx >= 1) & (x + dx <= columns) & (y + r >= 1) & (y + r <= rows)
            place = ((line + r - 1).to(tl.int64) * columns + x + dx - 1) * channels
            b_x = tl.load(x_ptr + place[:, None] + c[None, :], mask=m_x[:, None] & m_c[None, :], other=0)
            b_x = b_x.to(tl.float32)
            acc_0 = _tap(acc_0, b_x, weights, r - 1, 0, dx - 1)
            if BLOCK_Y > 1:
                acc_1 = _tap(acc_1, b_x, weights, r - 1, 1, dx - 1)
            if BLOCK_Y > 2:
                acc_2 = _tap(acc_2, b_x, weights, r - 1, 2, dx - 1)
                acc_3 = _tap(acc_3, b_x, weights, r - 1, 3, dx - 1)
    _store_gelu(acc_0, out_ptr, y, x, c, m_c, line, rows, columns, channels)
    if BLOCK_Y > 1:
        _store_gelu(acc_1, out_ptr, y + 1, x, c, m_c, line + 1, rows, columns, channels)
    if BLOCK_Y > 2:
        _store_gelu(acc_2, out_ptr, y + 2, x, c, m_c, line + 2, rows, columns, channels)
        _store_gelu(acc_3, out_ptr, y + 3, x, c, m_c, line + 3, rows, columns, channels)


@triton.jit
def _level(y, x, b, rows, columns, from_ptr, from_rows, from_columns, CHANNELS: tl.constexpr, WIDE: tl.constexpr,
           TAPS: tl.constexpr):  # fmt: skip
    """What pixels y, x [BLOCK_M], a rectangle on a grid of `rows` x `columns`, read of a smaller map (bilinear, edges
    are not aligned).

    Gathered, where TAPS is 0: offsets of two corners in each of two rows, and the weights of the second row and of the
    second column. Else what the rectangle reads, by rows of WIDE: weights [BLOCK_M, TAPS], offsets [TAPS], which exist.
    """
    at_y = tl.maximum((y.to(tl.float32) + 0.5) * (from_rows / rows) - 0.5, 0.0)
    at_x = tl.maximum((x.to(tl.float32) + 0.5) * (from_columns / columns) - 0.5, 0.0)
    y0, x0 = at_y.to(tl.int32), at_x.to(tl.int32)
    if TAPS > 0:
        t = tl.arange(0, TAPS)
        row, column = tl.min(y0) + t // WIDE, tl.min(x0) + t % WIDE
        # Behind the last row there is none: its weight is that of the last one.
        at_y, at_x = tl.minimum(at_y, from_rows - 1.0), tl.minimum(at_x, from_columns - 1.0)
        of_y = tl.maximum(1.0 - tl.abs(at_y[:, None] - row.to(tl.float32)[None, :]), 0.0)
        of_x = tl.maximum(1.0 - tl.abs(at_x[:, None] - column.to(tl.float32)[None, :]), 0.0)
        m_tap = (t < TAPS // WIDE * WIDE) & (row < from_rows) & (column < from_columns)
        weights = tl.where(m_tap[None, :], of_y * of_x, 0.0).to(from_ptr.dtype.element_ty)
        return weights, ((b * from_rows + row) * from_columns + column) * CHANNELS, m_tap
    else:
        y1, x1 = tl.minimum(y0 + 1, from_rows - 1), tl.minimum(x0 + 1, from_columns - 1)
        first, second = (b * from_rows + y0) * from_columns, (b * from_rows + y1) * from_columns
        return (
            (first + x0) * CHANNELS, (first + x1) * CHANNELS, (second + x0) * CHANNELS, (second + x1) * CHANNELS,
            at_y - y0.to(tl.float32), at_x - x0.to(tl.float32),
        )  # fmt: skip


@triton.jit
def _with_level(z, z_ptr, level, c, m_pixel, PRECISION: tl.constexpr, TAPS: tl.constexpr):
    """z and channels c [BLOCK_C] of a `_level`, [BLOCK_M, BLOCK_C] in float32."""
    if TAPS > 0:
        weights, at, m_tap = level
        b_z = tl.load(z_ptr + at[:, None] + c[None, :], mask=m_tap[:, None], other=0)  # [TAPS, BLOCK_C]
        return tl.dot(weights, b_z, z, input_precision=PRECISION)
    else:
        p00, p01, p10, p11, of_y, of_x = level
        m = m_pixel[:, None]
        b_00 = tl.load(z_ptr + p00[:, None] + c[None, :], mask=m, other=0).to(tl.float32)  # [BLOCK_M, BLOCK_C]
        b_01 = tl.load(z_ptr + p01[:, None] + c[None, :], mask=m, other=0).to(tl.float32)
        b_10 = tl.load(z_ptr + p10[:, None] + c[None, :], mask=m, other=0).to(tl.float32)
        b_11 = tl.load(z_ptr + p11[:, None] + c[None, :], mask=m, other=0).to(tl.float32)
        of_y, of_x = of_y[:, None], of_x[:, None]
        above, below = b_00 + of_x * (b_01 - b_00), b_10 + of_x * (b_11 - b_10)
        return z + above + of_y * (below - above)


@triton.jit
def tilewright_decode(
    out_ptr, bias_ptr, class_ptr, class_bias_ptr, first_ptr, weight_ptr, u_ptr, v_ptr, w_ptr, rows, columns,
    u_rows, u_columns, v_rows, v_columns, w_rows, w_columns,
    CLASSES: tl.constexpr, CHANNELS: tl.constexpr, FIRST: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, REST_K: tl.constexpr, PRECISION: tl.constexpr,
    U_WIDE: tl.constexpr, U_TAPS: tl.constexpr, V_WIDE: tl.constexpr, V_TAPS: tl.constexpr, W_WIDE: tl.constexpr,
    W_TAPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A folded decoder in one pass: class maps of relu(first weight' + the maps u, v, w on the grid of first + bias).

    Grid: (batch * cdiv(rows, BLOCK_Y) * cdiv(columns, BLOCK_X),), a rectangle of pixels a program. first_ptr: [pixels,
    FIRST], weight_ptr: [CHANNELS, FIRST], or None both. u_ptr, v_ptr, w_ptr: [batch, their rows, their columns,
    CHANNELS], or None; how each is read, `_level` says. class_ptr: [CLASSES, CHANNELS]. out_ptr: [pixels, CLASSES].
    Classes are held as BLOCK_K and REST_K, powers of two; REST_K may be 0. CHANNELS is a multiple of BLOCK_C. Each of
    the smaller maps has less than 2^31 values.
    """
    of_rows, of_columns = (rows + BLOCK_Y - 1) // BLOCK_Y, (columns + BLOCK_X - 1) // BLOCK_X
    b, tile = tl.program_id(0) // (of_rows * of_columns), tl.program_id(0) % (of_rows * of_columns)
    m = tl.arange(0, BLOCK_Y * BLOCK_X)
    y, x = tile // of_columns * BLOCK_Y + m // BLOCK_X, tile % of_columns * BLOCK_X + m % BLOCK_X
    m_pixel = (y < rows) & (x < columns)
    pixel = (b * rows + y).to(tl.int64) * columns + x
    # What is gathered for pixels outside of the map is not used, but has to be somewhere.
    y, x = tl.minimum(y, rows - 1), tl.minimum(x, columns - 1)
    if u_ptr is not None:
        u = _level(y, x, b, rows, columns, u_ptr, u_rows, u_columns, CHANNELS, U_WIDE, U_TAPS)
    if v_ptr is not None:
        v = _level(y, x, b, rows, columns, v_ptr, v_rows, v_columns, CHANNELS, V_WIDE, V_TAPS)
    if w_ptr is not None:
        w = _level(y, x, b, rows, columns, w_ptr, w_rows, w_columns, CHANNELS, W_WIDE, W_TAPS)
    f = tl.arange(0, BLOCK_F)
    # Before any weight: the kernel ahead may have made them of others.
    wait(OVERLAP)
    if first_ptr is not None:
        m_first = m_pixel[:, None] & (f < FIRST)[None, :]
        b_first = tl.load(first_ptr + pixel[:, None] * FIRST + f[None, :], mask=m_first, other=0)
    k, rest = tl.arange(0, BLOCK_K), BLOCK_K + tl.arange(0, REST_K if REST_K > 0 else 16)
    acc = tl.zeros((BLOCK_Y * BLOCK_X, BLOCK_K), tl.float32)
    acc_rest = tl.zeros((BLOCK_Y * BLOCK_X, REST_K if REST_K > 0 else 16), tl.float32)
    for lo in range(0, CHANNELS, BLOCK_C):
        c = lo + tl.arange(0, BLOCK_C)
        z = tl.zeros((BLOCK_Y * BLOCK_X, BLOCK_C), tl.float32) + tl.load(bias_ptr + c).to(tl.float32)[None, :]
        if first_ptr is not None:
            m_weight = (f < FIRST)[:, None]
            b_weight = tl.load(weight_ptr + c[None, :] * FIRST + f[:, None], mask=m_weight, other=0)
            z = tl.dot(b_first, b_weight, z, input_precision=PRECISION)  # [BLOCK_M, BLOCK_C]
        if u_ptr is not None:
            z = _with_level(z, u_ptr, u, c, m_pixel, PRECISION, U_TAPS)
        if v_ptr is not None:
            z = _with_level(z, v_ptr, v, c, m_pixel, PRECISION, V_TAPS)
        if w_ptr is not None:
            z = _with_level(z, w_ptr, w, c, m_pixel, PRECISION, W_TAPS)
        z = tl.maximum(z, 0.0).to(class_ptr.dtype.element_ty)
        b_class = tl.load(class_ptr + k[None, :] * CHANNELS + c[:, None], mask=(k < CLASSES)[None, :], other=0)
        acc = tl.dot(z, b_class, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_K]
        if REST_K > 0:
            b_class = tl.load(
                class_ptr + rest[None, :] * CHANNELS + c[:, None], mask=(rest < CLASSES)[None, :], other=0
            )
            acc_rest = tl.dot(z, b_class, acc_rest, input_precision=PRECISION)  # [BLOCK_M, REST_K]
    to = out_ptr + pixel[:, None] * CLASSES
    acc += tl.load(class_bias_ptr + k, mask=k < CLASSES, other=0).to(tl.float32)[None, :]
    tl.store(to + k[None, :], acc.to(out_ptr.dtype.element_ty), mask=m_pixel[:, None] & (k < CLASSES)[None, :])
    if REST_K > 0:
        acc_rest += tl.load(class_bias_ptr + rest, mask=rest < CLASSES, other=0).to(tl.float32)[None, :]
        m_rest = m_pixel[:, None] & (rest < CLASSES)[None, :]
        tl.store(to + rest[None, :], acc_rest.to(out_ptr.dtype.element_ty), mask=m_rest)
