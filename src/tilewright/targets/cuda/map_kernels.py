"""Maps on an NVIDIA GPU (stage T5): kernels of a folded decoder, and of a depthwise convolution with its GELU.

Channels of a pixel lie next to each other: libraries want them apart for such convolutions, and each would copy.
"""

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def tilewright_dwconv_gelu(
    out_ptr, x_ptr, weight_ptr, bias_ptr, rows, columns, channels, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr
):
    """A 3 x 3 depthwise convolution and a GELU. Grid: (batch * rows * cdiv(columns, BLOCK_M), cdiv(channels, BLOCK_C)).

    out_ptr, x_ptr: [batch, rows, columns, channels]; weight_ptr: [channels, 9]; bias_ptr: [channels]; contiguous.
    """
    tiles = (columns + BLOCK_M - 1) // BLOCK_M
    line = tl.program_id(0) // tiles
    y = line % rows
    x = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = c < channels
    acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    acc += tl.load(bias_ptr + c, mask=m_c, other=0).to(tl.float32)[None, :]
    for tap in tl.static_range(9):
        dy, dx = tap // 3 - 1, tap % 3 - 1
        b_weight = tl.load(weight_ptr + c * 9 + tap, mask=m_c, other=0).to(tl.float32)  # [BLOCK_C]
        m_x = (x + dx >= 0) & (x + dx < columns) & (y + dy >= 0) & (y + dy < rows)
        place = ((line + dy).to(tl.int64) * columns + x + dx) * channels
        b_x = tl.load(x_ptr + place[:, None] + c[None, :], mask=m_x[:, None] & m_c[None, :], other=0)
        acc += b_x.to(tl.float32) * b_weight[None, :]  # [BLOCK_M, BLOCK_C]
    acc = 0.5 * acc * (1.0 + tl.erf(acc * SQRT_HALF))
    place = (line.to(tl.int64) * columns + x) * channels
    m_out = (x < columns)[:, None] & m_c[None, :]
    tl.store(out_ptr + place[:, None] + c[None, :], acc.to(out_ptr.dtype.element_ty), mask=m_out)


@triton.jit
def _corners(y, x, b, rows, columns, from_rows, from_columns, CHANNELS: tl.constexpr):
    """Where pixels [BLOCK_M] of a grid of `rows` x `columns` lie in a smaller one: offsets of two corners in each of
    two rows, and the weights of the second row and of the second column (bilinear, edges are not aligned)."""
    at_y = tl.maximum((y.to(tl.float32) + 0.5) * (from_rows / rows) - 0.5, 0.0)
    at_x = tl.maximum((x.to(tl.float32) + 0.5) * (from_columns / columns) - 0.5, 0.0)
    y0, x0 = at_y.to(tl.int32), at_x.to(tl.int32)
    y1, x1 = tl.minimum(y0 + 1, from_rows - 1), tl.minimum(x0 + 1, from_columns - 1)
    first, second = (b * from_rows + y0) * from_columns, (b * from_rows + y1) * from_columns
    return (
        (first + x0) * CHANNELS, (first + x1) * CHANNELS, (second + x0) * CHANNELS, (second + x1) * CHANNELS,
        at_y - y0.to(tl.float32), at_x - x0.to(tl.float32),
    )  # fmt: skip


@triton.jit
def _gathered(z_ptr, corners, c, m_pixel):
    """Channels c [BLOCK_C] of pixels [BLOCK_M], between the four corners of each, in float32."""
    p00, p01, p10, p11, of_y, of_x = corners
    m = m_pixel[:, None]
    b_00 = tl.load(z_ptr + p00[:, None] + c[None, :], mask=m, other=0).to(tl.float32)  # [BLOCK_M, BLOCK_C]
    b_01 = tl.load(z_ptr + p01[:, None] + c[None, :], mask=m, other=0).to(tl.float32)
    b_10 = tl.load(z_ptr + p10[:, None] + c[None, :], mask=m, other=0).to(tl.float32)
    b_11 = tl.load(z_ptr + p11[:, None] + c[None, :], mask=m, other=0).to(tl.float32)
    of_x, of_y = of_x[:, None], of_y[:, None]
    above, below = b_00 + of_x * (b_01 - b_00), b_10 + of_x * (b_11 - b_10)
    return above + of_y * (below - above)


@triton.jit
def tilewright_decode(
    out_ptr, bias_ptr, class_ptr, class_bias_ptr, first_ptr, weight_ptr, a_ptr, b_ptr, c_ptr, pixels, rows, columns,
    a_rows, a_columns, b_rows, b_columns, c_rows, c_columns,
    CLASSES: tl.constexpr, CHANNELS: tl.constexpr, FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, REST_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A folded decoder in one pass: class maps of relu(first weight' + the maps a, b, c on the grid of first + bias).

    Grid: (cdiv(pixels, BLOCK_M),), pixels of all images. first_ptr: [pixels, FIRST], weight_ptr: [CHANNELS, FIRST], or
    None both. a_ptr, b_ptr, c_ptr: [batch, their rows, their columns, CHANNELS], or None. class_ptr: [CLASSES,
    CHANNELS]. out_ptr: [pixels, CLASSES]. Classes are held as BLOCK_K and REST_K, powers of two; REST_K may be 0.
    CHANNELS is a multiple of BLOCK_C. Each gathered map has less than 2^31 values.
    """
    pixel = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_pixel = pixel < pixels
    b, place = pixel // (rows * columns), pixel % (rows * columns)
    y, x = place // columns, place % columns
    if a_ptr is not None:
        a_corners = _corners(y, x, b, rows, columns, a_rows, a_columns, CHANNELS)
    if b_ptr is not None:
        b_corners = _corners(y, x, b, rows, columns, b_rows, b_columns, CHANNELS)
    if c_ptr is not None:
        c_corners = _corners(y, x, b, rows, columns, c_rows, c_columns, CHANNELS)
    f = tl.arange(0, BLOCK_F)
    if first_ptr is not None:
        m_first = m_pixel[:, None] & (f < FIRST)[None, :]
        b_first = tl.load(first_ptr + pixel.to(tl.int64)[:, None] * FIRST + f[None, :], mask=m_first, other=0)
    k, rest = tl.arange(0, BLOCK_K), BLOCK_K + tl.arange(0, REST_K if REST_K > 0 else 16)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    acc_rest = tl.zeros((BLOCK_M, REST_K if REST_K > 0 else 16), tl.float32)
    for lo in range(0, CHANNELS, BLOCK_C):
        c = lo + tl.arange(0, BLOCK_C)
        z = tl.zeros((BLOCK_M, BLOCK_C), tl.float32) + tl.load(bias_ptr + c).to(tl.float32)[None, :]
        if first_ptr is not None:
            m_weight = (f < FIRST)[:, None]
            b_weight = tl.load(weight_ptr + c[None, :] * FIRST + f[:, None], mask=m_weight, other=0)
            z = tl.dot(b_first, b_weight, z, input_precision=PRECISION)  # [BLOCK_M, BLOCK_C]
        if a_ptr is not None:
            z += _gathered(a_ptr, a_corners, c, m_pixel)
        if b_ptr is not None:
            z += _gathered(b_ptr, b_corners, c, m_pixel)
        if c_ptr is not None:
            z += _gathered(c_ptr, c_corners, c, m_pixel)
        z = tl.maximum(z, 0.0).to(class_ptr.dtype.element_ty)
        b_class = tl.load(class_ptr + k[None, :] * CHANNELS + c[:, None], mask=(k < CLASSES)[None, :], other=0)
        acc = tl.dot(z, b_class, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_K]
        if REST_K > 0:
            b_class = tl.load(
                class_ptr + rest[None, :] * CHANNELS + c[:, None], mask=(rest < CLASSES)[None, :], other=0
            )
            acc_rest = tl.dot(z, b_class, acc_rest, input_precision=PRECISION)  # [BLOCK_M, REST_K]
    to = out_ptr + pixel.to(tl.int64)[:, None] * CLASSES
    acc += tl.load(class_bias_ptr + k, mask=k < CLASSES, other=0).to(tl.float32)[None, :]
    tl.store(to + k[None, :], acc.to(out_ptr.dtype.element_ty), mask=m_pixel[:, None] & (k < CLASSES)[None, :])
    if REST_K > 0:
        acc_rest += tl.load(class_bias_ptr + rest, mask=rest < CLASSES, other=0).to(tl.float32)[None, :]
        m_rest = m_pixel[:, None] & (rest < CLASSES)[None, :]
        tl.store(to + rest[None, :], acc_rest.to(out_ptr.dtype.element_ty), mask=m_rest)
