"""A camera pipeline: hot pixels, demosaic of an RGGB mosaic, a colour matrix and a tone curve."""

from tilewright.pushmem.apps._common import at_least
from tilewright.pushmem.dsl import Input, Lut, Stage, maximum, minimum, select

SIZE = 64
MATRIX = ((300, -30, -14), (-40, 330, -34), (-10, -60, 326))
CURVE = tuple(round(255 * (i / 255) ** (1 / 2.2)) for i in range(256))


def outputs(size: int):
    """image, 3 × (size - 6)²."""
    at_least("camera", size, 7)
    raw = Input("raw", (size, size))

    def clean(y, x):
        around = [raw[y, x + 2], raw[y + 4, x + 2], raw[y + 2, x], raw[y + 2, x + 4]]
        low, high = around[0], around[0]
        for word in around[1:]:
            low, high = minimum(low, word), maximum(high, word)
        return minimum(maximum(raw[y + 2, x + 2], low), high) & 255

    hot = Stage("denoised", (size - 4, size - 4), clean)

    def colours(c, y, x):
        here = hot[y + 1, x + 1]
        beside = (hot[y + 1, x] + hot[y + 1, x + 2]) >> 1
        above = (hot[y, x + 1] + hot[y + 2, x + 1]) >> 1
        cross = (hot[y + 1, x] + hot[y + 1, x + 2] + hot[y, x + 1] + hot[y + 2, x + 1]) >> 2
        corners = (hot[y, x] + hot[y, x + 2] + hot[y + 2, x] + hot[y + 2, x + 2]) >> 2
        # The word at (y + 1, x + 1) of an RGGB mosaic is blue for even (y, x).
        even_y, even_x = (y % 2) == 0, (x % 2) == 0
        blue_row = [corners, cross, here]
        green_in_blue_row = [above, here, beside]
        green_in_red_row = [beside, here, above]
        red_place = [here, cross, corners]
        return select(
            even_y,
            select(even_x, blue_row[c], green_in_blue_row[c]),
            select(even_x, green_in_red_row[c], red_place[c]),
        )

    rgb = Stage("rgb", (3, size - 6, size - 6), colours, unroll=(0,))

    def corrected(c, y, x):
        total = (rgb[0, y, x] >> 2) * MATRIX[c][0] + (rgb[1, y, x] >> 2) * MATRIX[c][1]
        total = (total + (rgb[2, y, x] >> 2) * MATRIX[c][2]).as_signed() >> 6
        return Lut.of(CURVE, minimum(maximum(total, 0), 255))

    return (Stage("image", (3, size - 6, size - 6), corrected, unroll=(0,)),)
