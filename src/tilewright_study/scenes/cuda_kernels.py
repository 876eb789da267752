"""A kernel that draws scenes of objects over photographs: a tile of a scene a program, its objects one after another.

What it computes, and the arrays that it reads, are those of `tilewright_study.scenes.drawing`, which draws the same on
a CPU. Objects whose window does not touch the tile are passed over.
"""

import triton
import triton.language as tl


@triton.jit
def tilewright_scene(
    pictures, labels, owners, buffer, places, colours, lights, texels, windows, grounds, photographs, height, width,
    objects, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """uint8 pictures [B, 3, H, W], labels and owners [B, H, W]."""
    tile, scene = tl.program_id(0), tl.program_id(1).to(tl.int64)
    across = tl.cdiv(width, COLUMNS)
    top, left = tile // across * ROWS, tile % across * COLUMNS
    rows, columns = top + tl.arange(0, ROWS)[:, None], left + tl.arange(0, COLUMNS)[None, :]
    m_pixels = (rows < height) & (columns < width)
    x, y = columns.to(tl.float32) + 0.5, rows.to(tl.float32) + 0.5

    ground, photograph = grounds + scene * 17, photographs + scene * 3
    u, v = _mapped(ground, x, y)
    red, green, blue, cover = _sampled(
        buffer, tl.load(photograph), tl.load(photograph + 1), _mirrored(u), _mirrored(v), m_pixels
    )
    red, green, blue = _coloured(ground + 6, red, green, blue, 1.0)
    label, owner = tl.zeros([ROWS, COLUMNS], tl.int32), tl.zeros([ROWS, COLUMNS], tl.int32)

    for at in range(objects):
        one = scene * objects + at
        window = windows + one * 4
        touched = (tl.load(window) < left + COLUMNS) & (tl.load(window + 1) > left)
        touched &= (tl.load(window + 2) < top + ROWS) & (tl.load(window + 3) > top)
        if touched:
            place, light, texel = places + one * 6, lights + one * 5, texels + one * 5
            fall_x, fall_y = tl.load(light + 3), tl.load(light + 4)
            u, v = _mapped(place, x - fall_x, y - fall_y)
            _, _, _, shadow = _sampled(buffer, tl.load(texel + 2), tl.load(texel + 3), u, v, m_pixels)
            shadow = 1 - tl.load(light + 2) * shadow
            u, v = _mapped(place, x, y)
            o_red, o_green, o_blue, cover = _sampled(buffer, tl.load(texel), tl.load(texel + 1), u, v, m_pixels)
            o_red, o_green, o_blue = _coloured(colours + one * 9, o_red, o_green, o_blue, cover)
            shade, shadow = 1 + tl.load(light) * u + tl.load(light + 1) * v, shadow * (1 - cover)
            red = red * shadow + o_red * shade
            green = green * shadow + o_green * shade
            blue = blue * shadow + o_blue * shade
            label = tl.where(cover >= 0.5, tl.load(texel + 4), label)
            owner = tl.where(cover >= 0.5, at + 1, owner)

    exponent, noise = tl.load(ground + 15), tl.load(ground + 16)
    pixel = rows * width + columns
    hashed = pixel.to(tl.uint32) * 0x9E3779B1 + tl.load(photograph + 2).to(tl.uint32)
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
    hashed = hashed ^ (hashed >> 16)
    plane, begin = height * width, scene * 3 * height * width
    tl.store(pictures + begin + pixel, _exposed(red, exponent, noise, hashed), m_pixels)
    tl.store(pictures + begin + plane + pixel, _exposed(green, exponent, noise, hashed >> 11), m_pixels)
    tl.store(pictures + begin + 2 * plane + pixel, _exposed(blue, exponent, noise, hashed >> 22), m_pixels)
    tl.store(labels + scene * plane + pixel, label.to(tl.uint8), m_pixels)
    tl.store(owners + scene * plane + pixel, owner.to(tl.uint8), m_pixels)


@triton.jit
def _mapped(place, x, y):
    x, y = x - tl.load(place + 4), y - tl.load(place + 5)
    u = tl.load(place) * x + tl.load(place + 1) * y
    return u, tl.load(place + 2) * x + tl.load(place + 3) * y


@triton.jit
def _mirrored(u):
    u = u + 0.5
    return 0.5 - tl.abs(u - 2 * tl.floor(u / 2) - 1)


@triton.jit
def _sampled(buffer, begin, side, u, v, m_pixels):
    """Red, green, blue and opacity of a picture at places u, v, in sides of it from its middle; zero beyond."""
    x, y = (u + 0.5) * side - 0.5, (v + 0.5) * side - 0.5
    # Far beyond the picture a whole number would overflow.
    x, y = tl.clamp(x, -2.0, side + 1.0), tl.clamp(y, -2.0, side + 1.0)
    left, top = tl.floor(x), tl.floor(y)
    along, down = x - left, y - top
    column, row = left.to(tl.int32), top.to(tl.int32)
    red, green, blue, cover = 0.0 * x, 0.0 * x, 0.0 * x, 0.0 * x
    for corner in tl.static_range(4):
        c, r = column + corner % 2, row + corner // 2
        weight = (along if corner % 2 else 1 - along) * (down if corner // 2 else 1 - down)
        inside = m_pixels & (c >= 0) & (c < side) & (r >= 0) & (r < side)
        packed = tl.load(buffer + (begin + r * side + c), inside, 0)
        red += weight * (packed & 255).to(tl.float32)
        green += weight * ((packed >> 8) & 255).to(tl.float32)
        blue += weight * ((packed >> 16) & 255).to(tl.float32)
        cover += weight * ((packed >> 24) & 255).to(tl.float32)
    return red / 255, green / 255, blue / 255, cover / 255


@triton.jit
def _coloured(matrix, red, green, blue, cover):
    r = tl.load(matrix) * red + tl.load(matrix + 1) * green + tl.load(matrix + 2) * blue
    g = tl.load(matrix + 3) * red + tl.load(matrix + 4) * green + tl.load(matrix + 5) * blue
    b = tl.load(matrix + 6) * red + tl.load(matrix + 7) * green + tl.load(matrix + 8) * blue
    return _limited(r, cover), _limited(g, cover), _limited(b, cover)


@triton.jit
def _limited(x, most):
    return tl.minimum(tl.maximum(x, 0.0), most)


@triton.jit
def _exposed(x, exponent, noise, hashed):
    """uint8 of light in 0..1."""
    x = tl.exp2(exponent * tl.log2(tl.minimum(tl.maximum(x, 1e-6), 1.0)))
    x += noise * ((hashed & 1023).to(tl.float32) / 511.5 - 1)
    return (tl.minimum(tl.maximum(x, 0.0), 1.0) * 255 + 0.5).to(tl.uint8)
