"""Drawing a scene on a CPU, compiled by numba: an object after another, each within its window.

The arrays are those of a scene of `drawing.Listed`; all arithmetic is in float32.
"""

import numpy as np
from numba import float32, int32, int64, types, uint8, uint32

from tilewright.core.compiled import njit

_F1, _F2, _I1, _I2 = float32[::1], float32[:, ::1], int32[::1], int32[:, ::1]
_HALF, _ONE, _TWO = np.float32(0.5), np.float32(1), np.float32(2)
_BYTE = np.float32(1 / 255)


@njit(types.void(_I1, int64, int64, float32, float32, _F1), cache=True, nogil=True)
def sample(texels, begin, side, u, v, found):
    """Fill `found` [4] with red, green, blue and opacity of a picture at a place, in sides of it from its middle."""
    x, y = (u + _HALF) * np.float32(side) - _HALF, (v + _HALF) * np.float32(side) - _HALF
    found[:] = 0
    if not (-_ONE < x < np.float32(side) and -_ONE < y < np.float32(side)):
        return
    left, top = int64(np.floor(x)), int64(np.floor(y))
    along, down = x - np.float32(left), y - np.float32(top)
    for i in range(2):
        row = top + i
        if row < 0 or row >= side:
            continue
        weight = down if i else _ONE - down
        for j in range(2):
            column = left + j
            if column < 0 or column >= side:
                continue
            share = weight * (along if j else _ONE - along) * _BYTE
            packed = texels[begin + row * side + column]
            found[0] += share * np.float32(packed & 255)
            found[1] += share * np.float32((packed >> 8) & 255)
            found[2] += share * np.float32((packed >> 16) & 255)
            found[3] += share * np.float32((packed >> 24) & 255)


@njit(float32(_F1, int64, _F1, float32), cache=True, nogil=True)
def coloured(matrix, row, colour, most):
    """A row of a matrix of nine numbers times a colour, at least 0 and at most `most`."""
    x = matrix[3 * row] * colour[0] + matrix[3 * row + 1] * colour[1] + matrix[3 * row + 2] * colour[2]
    return min(max(x, np.float32(0)), most)


@njit(float32(float32), cache=True, nogil=True)
def mirrored(u):
    """A place in a photograph, mirrored at its edges: in -0.5..0.5."""
    u += _HALF
    return _HALF - abs(u - _TWO * np.floor(u / _TWO) - _ONE)


@njit(
    types.void(_I1, _F2, _F2, _F2, _I2, _I2, _F1, _I1, uint8[:, :, ::1], uint8[:, ::1], uint8[:, ::1]),
    cache=True,
    nogil=True,
)
def draw(texels, places, colours, lights, pictures, windows, ground, photograph, image, labels, owners):
    """Fill `image` [3, H, W], `labels` and `owners` [H, W] with a scene; pictures: `Listed.texels`."""
    height, width = labels.shape
    canvas = np.empty((height, width, 3), np.float32)
    colour, found = np.empty(3, np.float32), np.empty(4, np.float32)
    matrix = ground[6:15]
    for row in range(height):
        y = np.float32(row) + _HALF - ground[5]
        for column in range(width):
            x = np.float32(column) + _HALF - ground[4]
            u, v = ground[0] * x + ground[1] * y, ground[2] * x + ground[3] * y
            sample(texels, photograph[0], photograph[1], mirrored(u), mirrored(v), found)
            for at in range(3):
                canvas[row, column, at] = coloured(matrix, at, found, _ONE)
            labels[row, column], owners[row, column] = 0, 0

    for one in range(len(places)):
        place, light, picture = places[one], lights[one], pictures[one]
        for row in range(windows[one, 2], windows[one, 3]):
            y = np.float32(row) + _HALF - place[5]
            for column in range(windows[one, 0], windows[one, 1]):
                x = np.float32(column) + _HALF - place[4]
                below_x, below_y = x - light[3], y - light[4]
                u, v = place[0] * below_x + place[1] * below_y, place[2] * below_x + place[3] * below_y
                sample(texels, picture[2], picture[3], u, v, found)
                shadow = _ONE - light[2] * found[3]
                u, v = place[0] * x + place[1] * y, place[2] * x + place[3] * y
                sample(texels, picture[0], picture[1], u, v, found)
                cover, shade = found[3], _ONE + light[0] * u + light[1] * v
                for at in range(3):
                    colour[at] = coloured(colours[one], at, found, cover)
                for at in range(3):
                    canvas[row, column, at] = canvas[row, column, at] * shadow * (_ONE - cover) + colour[at] * shade
                if cover >= _HALF:
                    labels[row, column], owners[row, column] = picture[4], one + 1

    key, exponent, noise = uint32(photograph[2]), ground[15], ground[16]
    for row in range(height):
        for column in range(width):
            hashed = uint32(uint32(row * width + column) * uint32(0x9E3779B1) + key)
            hashed = uint32((hashed ^ (hashed >> uint32(16))) * uint32(0x85EBCA6B))
            hashed = uint32((hashed ^ (hashed >> uint32(13))) * uint32(0xC2B2AE35))
            hashed = uint32(hashed ^ (hashed >> uint32(16)))
            for at in range(3):
                x = min(max(canvas[row, column, at], np.float32(1e-6)), _ONE) ** exponent
                x += noise * (np.float32((hashed >> uint32(11 * at)) & uint32(1023)) / np.float32(511.5) - _ONE)
                image[at, row, column] = uint8(min(max(x, np.float32(0)), _ONE) * np.float32(255) + _HALF)
