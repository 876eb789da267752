"""Programs for push memories. A name states the app and the side of its image, or of its output: ``gaussian-64``."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.core.errors import UnknownNameError
from tilewright.pushmem.dsl import Expression, Input, Lut, Reduce, Source, Stage, maximum, minimum, select
from tilewright.pushmem.errors import ProgramError

BINOMIAL = ((1, 2, 1), (2, 4, 2), (1, 2, 1))
BINOMIAL_5 = tuple(tuple(a * b for b in (1, 4, 6, 4, 1)) for a in (1, 4, 6, 4, 1))
SOBEL_X = ((-1, 0, 1), (-2, 0, 2), (-1, 0, 1))
SOBEL_Y = ((-1, -2, -1), (0, 0, 0), (1, 2, 1))
BOX = ((1, 1, 1),) * 3
# Of Harris' response, above which a corner is one.
THRESHOLD = 1
# Of the camera: from its colours to those of a screen, and the tone curve.
MATRIX = ((300, -30, -14), (-40, 330, -34), (-10, -60, 326))
CURVE = tuple(round(255 * (i / 255) ** (1 / 2.2)) for i in range(256))
POINTWISE = tuple(tuple((7 * o + 3 * i) % 11 - 5 for i in range(4)) for o in range(4))

_APPS: dict[str, tuple[int, Callable[[int], tuple[Stage, ...]]]] = {}


def program(name: str) -> Sequence[Source]:
    """The outputs of the app `name`, e.g. ``harris-64``. Raises `UnknownNameError` and `ProgramError`."""
    app, side = parse(name)
    least, outputs = _APPS[app]
    if side < least:
        raise ProgramError(f"{app}: expected a side of at least {least}, found {side}")
    return outputs(side)


def parse(name: str) -> tuple[str, int]:
    """The app and its side, ``("harris", 64)``. Raises `UnknownNameError`."""
    match = re.fullmatch(r"([a-z_]+)-(\d{1,9})", name)
    if not match or match[1] not in _APPS:
        raise UnknownNameError("app", name, [f"{n}-<side>" for n in _APPS])
    return match[1], int(match[2])


def _app(least: int) -> Callable[[Callable[[int], tuple[Stage, ...]]], Callable[[int], tuple[Stage, ...]]]:
    """An app, whose side is at least so much."""

    def named(outputs):
        _APPS[outputs.__name__.strip("_")] = least, outputs
        return outputs

    return named


def window(name: str, source: Source, weights: Sequence[Sequence[int]], shift: int, **options: Any) -> Stage:
    """The weighted sum of a window of `source`, shifted right by `shift` bits, at every place where it fits."""
    rows, columns = len(weights), len(weights[0])
    height, width = source.shape

    def word(y, x):
        total: Expression | int = 0
        for i in range(rows):
            for j in range(columns):
                if weights[i][j]:
                    total = source[y + i, x + j] * weights[i][j] + total
        return total >> shift if shift else total

    return Stage(name, (height - rows + 1, width - columns + 1), word, **options)


@_app(2)
def _brighten_blur(size):
    """Twice as bright, then the mean of 2 × 2: the smallest app with a line of the image in memory."""
    image = Input("in", (size, size))
    bright = Stage("brighten", (size, size), lambda y, x: image[y, x] * 2)
    return (window("blur", bright, ((1, 1), (1, 1)), 2),)


@_app(3)
def _gaussian(size):
    """A 3 × 3 binomial filter."""
    return (window("blur", Input("in", (size, size)), BINOMIAL, 4),)


@_app(5)
def _cascade(size):
    """Two 3 × 3 binomial filters, one after the other."""
    return (window("second", window("first", Input("in", (size, size)), BINOMIAL, 4), BINOMIAL, 4),)


@_app(7)
def _harris(size):
    """Corners by Harris and Stephens (1988): gradients, their products summed over 3 × 3, a response, its local maxima.

    255 where the response is a local maximum above the threshold, else 0.
    """
    image = Input("in", (size, size))
    dx = window("dx", image, SOBEL_X, 0, dtype="int16")
    dy = window("dy", image, SOBEL_Y, 0, dtype="int16")

    def summed(name, left, right):
        product = Stage(f"d{name}", left.shape, lambda y, x: (left[y, x] >> 2) * (right[y, x] >> 2) >> 7, dtype="int16")
        return window(f"s{name}", product, BOX, 0, dtype="int16")

    sxx, sxy, syy = summed("xx", dx, dx), summed("xy", dx, dy), summed("yy", dy, dy)

    def response(y, x):
        trace = sxx[y, x] + syy[y, x]
        return (sxx[y, x] * syy[y, x] - sxy[y, x] * sxy[y, x]) - (trace * trace >> 4)

    strength = Stage("strength", sxx.shape, response, dtype="int16")

    def corner(y, x):
        around: Expression = strength[y, x]
        for i in range(3):
            for j in range(3):
                around = maximum(around, strength[y + i, x + j])
        centre = strength[y + 1, x + 1]
        return select((centre == around) & (centre > THRESHOLD), 255, 0)

    return (Stage("corners", (size - 6, size - 6), corner),)


@_app(5)
def _unsharp(size):
    """Unsharp mask of an RGB image: the brightness blurred by 5 × 5, and each colour moved away from it."""
    image = Input("in", (3, size, size), unroll=(0,))
    gray = Stage(
        "gray",
        (size, size),
        lambda y, x: ((image[0, y, x] & 255) * 77 + (image[1, y, x] & 255) * 150 + (image[2, y, x] & 255) * 29) >> 8,
    )
    blur = window("blur", gray, BINOMIAL_5, 8)

    def word(c, y, x):
        moved = ((image[c, y + 2, x + 2] & 255) + gray[y + 2, x + 2] - blur[y, x]).as_signed()
        return minimum(maximum(moved, 0), 255)

    return (Stage("sharp", (3, size - 4, size - 4), word, unroll=(0,)),)


@_app(7)
def _camera(size):
    """A camera pipeline: hot pixels, demosaic of an RGGB mosaic, a colour matrix and a tone curve."""
    raw = Input("raw", (size, size))

    def clean(y, x):
        around: list[Expression] = [raw[y, x + 2], raw[y + 4, x + 2], raw[y + 2, x], raw[y + 2, x + 4]]
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


@_app(1)
def _upsample(size):
    """Each word of the image in 2 × 2 places."""
    image = Input("in", (size, size))
    return (Stage("larger", (2 * size, 2 * size), lambda y, x: image[y // 2, x // 2]),)


def _mean(name: str, image: Source) -> Stage:
    """The mean of each 2 × 2 square."""

    def mean(y, x):
        total = image[2 * y, 2 * x] + image[2 * y, 2 * x + 1] + image[2 * y + 1, 2 * x] + image[2 * y + 1, 2 * x + 1]
        return total >> 2

    return Stage(name, (image.shape[0] // 2, image.shape[1] // 2), mean)


@_app(2)
def _downsample(size):
    """The mean of each 2 × 2 square of the image."""
    return (_mean("smaller", Input("in", (size, size))),)


@_app(2)
def _pyramid(size):
    """One level of a Laplacian pyramid: the image less what a level of half its side keeps."""
    image = Input("in", (size, size))
    coarse, even = _mean("coarse", image), 2 * (size // 2)
    return (
        Stage("detail", (even, even), lambda y, x: image[y, x] - coarse[y // 2, x // 2], dtype="int16"),
        coarse,
    )


@_app(1)
def _resnet(size):
    """A 3 × 3 convolution of eight channels to eight, as in the layers of ResNet: nine multiplications in time."""
    image = Input("in", (8, size + 2, size + 2), unroll=(0,))
    weights = Input("weights", (8, 8, 3, 3), unroll=(0, 1))

    def sums(c, y, x):
        return Reduce((8, 3, 3), lambda k, ry, rx: image[k, y + ry, x + rx] * weights[c, k, ry, rx], unroll=(0,))

    return (Stage("sums", (8, size, size), sums, unroll=(0,), order="auto"),)


@_app(1)
def _mobilenet(size):
    """A depthwise 3 × 3 convolution, whose weights are data, and a pointwise one of four channels, as in MobileNet."""
    image = Input("in", (4, size + 2, size + 2), unroll=(0,))
    weights = Input("weights", (4, 3, 3), unroll=(0,))
    depthwise = Stage(
        "depthwise",
        (4, size, size),
        lambda c, y, x: Reduce((3, 3), lambda ry, rx: image[c, y + ry, x + rx] * weights[c, ry, rx]),
        unroll=(0,),
        order="auto",
    )

    def pointwise(c, y, x):
        total: Expression | int = 0
        for k in range(4):
            total = depthwise[k, y, x] * POINTWISE[c][k] + total
        return total

    return (Stage("pointwise", (4, size, size), pointwise, unroll=(0,)),)


@_app(4)
def _patch_embed(size):
    """The patch embedding of a vision transformer: a 4 × 4 convolution of stride 4, three channels to eight."""
    image = Input("in", (3, size, size), unroll=(0,))
    weights = Input("weights", (8, 3, 4, 4), unroll=(0, 1))

    def token(c, y, x):
        products = lambda k, ry, rx: image[k, 4 * y + ry, 4 * x + rx] * weights[c, k, ry, rx]  # noqa: E731
        return Reduce((3, 4, 4), products, unroll=(0,))

    return (Stage("tokens", (8, size // 4, size // 4), token, unroll=(0,), order="auto"),)


@_app(4)
def _transpose(size):
    """Rows as columns: every distance is another one, and the whole image waits in memory."""
    image = Input("in", (size, size))
    return (Stage("transpose", (size, size), lambda y, x: image[x, y]),)


@_app(4)
def _channels(size):
    """A 3 × 3 convolution whose four output channels follow each other in time: the image is read anew for each."""
    image, weights = Input("in", (size + 2, size + 2)), Input("weights", (4, 3, 3))

    def sums(c, y, x):
        return Reduce((3, 3), lambda ry, rx: image[y + ry, x + rx] * weights[c, ry, rx])

    return (Stage("channels", (4, size, size), sums),)


@_app(4)
def _layers(size):
    """Two 3 × 3 convolutions of two channels, one after the other, for four images.

    While the second works on an image, the first works on the next one: what is between them is held twice.
    """

    def convolution(name, source, side):
        weights = Input(f"weights_{name}", (2, 2, 3, 3), unroll=(0, 1))

        def sums(b, c, y, x):
            products = lambda k, ry, rx: source[b, k, y + ry, x + rx] * weights[c, k, ry, rx]  # noqa: E731
            return Reduce((2, 3, 3), products, unroll=(0,))

        return Stage(name, (4, 2, side, side), sums, unroll=(1,))

    image = Input("in", (4, 2, size + 4, size + 4), unroll=(1,))
    return (convolution("second", convolution("first", image, size + 2), size),)


@_app(8)
def _mixer(size):
    """The two products of an MLP-Mixer's block without its nonlinearity, for four windows of `size` tokens.

    Channels are mixed, then tokens (Tolstikhin et al., 2021). The second product needs all tokens of a window: while it
    works on one, the first fills the other half of a double buffer with the next.
    """
    image, by_token = Input("in", (4, size, 8)), Input("weights_tokens", (size, size))
    by_channel = Input("weights_channels", (8, 4), unroll=(1,))

    def channel(b, t, c):
        return Reduce((8,), lambda k: image[b, t, k] * by_channel[k, c])

    channels = Stage("channels", (4, size, 4), channel, unroll=(2,))

    def token(b, t, c):
        return Reduce((size,), lambda k: channels[b, k, c] * by_token[t, k])

    return (Stage("tokens", (4, size, 4), token, unroll=(2,)),)


NAMES = tuple(_APPS)
