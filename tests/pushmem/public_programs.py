"""Programs of public image pipelines, each defined twice: in the language, and in NumPy by who published it.

The definitions in NumPy know nothing of the compiler: whole arrays of int64, `numpy.pad` at borders. Constants are
rounded to whole numbers where the source has fractions; what is rounded is in both definitions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewright.pushmem.dsl import Input, Lut, Reduce, Stage, bounded, divide, maximum, minimum, saturate, select

H, W = 12, 16


@dataclass(frozen=True)
class Program:
    """source: where the pipeline is published. outputs: a function of no arguments that gives stages. numpy: arrays of
    the outputs, in order, of the inputs by name."""

    source: str
    outputs: Callable
    numpy: Callable


PROGRAMS: dict[str, Program] = {}


def program(source):
    """A class with `outputs` and `numpy`."""

    def named(given):
        PROGRAMS[given.__name__] = Program(source, given.outputs, given.numpy)
        return given

    return named


def image(name="image", shape=(H, W), dtype="uint8", **options):
    return Input(name, shape, dtype, **options)


def summed(words):
    first, *others = words
    for word in others:
        first = first + word
    return first


def padded(array, mode, *sides, **options):
    """int64, with `sides` words on both sides of the last two dimensions."""
    rows, columns = sides if len(sides) == 2 else sides * 2
    before = [(0, 0)] * (array.ndim - 2)
    return np.pad(array.astype(np.int64), [*before, (rows, rows), (columns, columns)], mode=mode, **options)


def shifts(array, rows, columns, height=None, width=None):
    """``{(i, j): the array from row i and column j on}``, all of one shape."""
    height = array.shape[-2] - rows + 1 if height is None else height
    width = array.shape[-1] - columns + 1 if width is None else width
    return {(i, j): array[..., i : i + height, j : j + width] for i in range(rows) for j in range(columns)}


@program("https://github.com/halide/Halide/tree/main/apps/blur")
class box_blur:
    def outputs():
        source = image(dtype="uint16")
        across = Stage("across", (H, W - 2), lambda y, x: (source[y, x] + source[y, x + 1] + source[y, x + 2]) // 3)
        down = lambda y, x: (across[y, x] + across[y + 1, x] + across[y + 2, x]) // 3  # noqa: E731
        return Stage("blur", (H - 2, W - 2), down)

    def numpy(image):
        a = image.astype(np.int64)
        across = (a[:, :-2] + a[:, 1:-1] + a[:, 2:]) % 65536 // 3
        return [(across[:-2] + across[1:-1] + across[2:]) % 65536 // 3]


BINOMIAL = (1, 4, 6, 4, 1)


@program("https://github.com/opencv/opencv: GaussianBlur, 5 x 5, 8 bits, BORDER_REFLECT_101")
class gaussian:
    def outputs():
        near = bounded(image(), "mirror")

        def word(y, x):
            taps = (near[y + i - 2, x + j - 2] * (BINOMIAL[i] * BINOMIAL[j]) for i in range(5) for j in range(5))
            return (summed(taps) + 128) >> 8

        return Stage("blur", (H, W), word, dtype="uint8")

    def numpy(image):
        taps = shifts(padded(image, "reflect", 2), 5, 5)
        return [(sum(BINOMIAL[i] * BINOMIAL[j] * a for (i, j), a in taps.items()) + 128) // 256]


@program("https://github.com/opencv/opencv: Sobel in x and y, |gx| + |gy|, BORDER_REPLICATE, saturated")
class sobel:
    def outputs():
        near = bounded(image(), "clamp")

        def gradient(dy, dx):
            def word(y, x):
                side = lambda s: near[y + s * dy - dx, x + s * dx - dy] + near[y + s * dy + dx, x + s * dx + dy]  # noqa: E731
                return (side(1) + near[y + dy, x + dx] * 2 - side(-1) - near[y - dy, x - dx] * 2).as_signed()

            return word

        gx = Stage("gx", (H, W), gradient(0, 1), dtype="int16")
        gy = Stage("gy", (H, W), gradient(1, 0), dtype="int16")
        return Stage("edges", (H, W), lambda y, x: saturate(abs(gx[y, x]) + abs(gy[y, x])), dtype="uint8")

    def numpy(image):
        a = padded(image, "edge", 1)
        gx = (a[:-2, 2:] + 2 * a[1:-1, 2:] + a[2:, 2:]) - (a[:-2, :-2] + 2 * a[1:-1, :-2] + a[2:, :-2])
        gy = (a[2:, :-2] + 2 * a[2:, 1:-1] + a[2:, 2:]) - (a[:-2, :-2] + 2 * a[:-2, 1:-1] + a[:-2, 2:])
        return [np.minimum(abs(gx) + abs(gy), 255)]


@program("https://github.com/scipy/scipy: ndimage.laplace, mode reflect")
class laplace:
    def outputs():
        near = bounded(image(), "symmetric")
        around = lambda y, x: near[y - 1, x] + near[y + 1, x] + near[y, x - 1] + near[y, x + 1]  # noqa: E731
        return Stage("laplace", (H, W), lambda y, x: around(y, x) - near[y, x] * 4, dtype="int16")

    def numpy(image):
        a = padded(image, "symmetric", 1)
        return [a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:] - 4 * a[1:-1, 1:-1]]


@program("https://github.com/halide/Halide/tree/main/apps/harris")
class harris:
    def outputs():
        source = image()

        def gradient(weights):
            def word(y, x):
                return summed(source[y + i, x + j] * w for (i, j), w in weights.items()).as_signed() >> 3

            return word

        gx = Stage("gx", (H - 2, W - 2), gradient(GX), dtype="int16")
        gy = Stage("gy", (H - 2, W - 2), gradient({(j, i): w for (i, j), w in GX.items()}), dtype="int16")

        def moment(name, one, other):
            product = Stage(f"p{name}", one.shape, lambda y, x: one[y, x] * other[y, x] >> 6, dtype="int16")
            box = lambda y, x: summed(product[y + i, x + j] for i in range(3) for j in range(3)) >> 4  # noqa: E731
            return Stage(f"s{name}", (H - 4, W - 4), box, dtype="int16")

        xx, xy, yy = moment("xx", gx, gx), moment("xy", gx, gy), moment("yy", gy, gy)

        def response(y, x):
            trace = xx[y, x] + yy[y, x]
            return xx[y, x] * yy[y, x] - xy[y, x] * xy[y, x] - (trace * trace >> 4)

        return Stage("harris", (H - 4, W - 4), response, dtype="int16")

    def numpy(image):
        a = image.astype(np.int64)
        taps = shifts(a, 3, 3)
        gx = sum(w * taps[i, j] for (i, j), w in GX.items()) // 8
        gy = sum(w * taps[j, i] for (i, j), w in GX.items()) // 8
        xx, xy, yy = (sum(shifts(p // 64, 3, 3).values()) // 16 for p in (gx * gx, gx * gy, gy * gy))
        return [xx * yy - xy * xy - (xx + yy) ** 2 // 16]


GX = {(0, 0): -1, (1, 0): -2, (2, 0): -1, (0, 2): 1, (1, 2): 2, (2, 2): 1}


@program("https://github.com/halide/Halide/tree/main/apps/unsharp: a sharpened image, as OpenCV's addWeighted(2, -1)")
class unsharp:
    def outputs():
        source = image()
        near = bounded(source, "clamp")
        across = Stage("across", (H, W), lambda y, x: near[y, x - 1] + near[y, x] * 2 + near[y, x + 1])
        beside = bounded(across, "clamp")
        blur = Stage("blur", (H, W), lambda y, x: (beside[y - 1, x] + beside[y, x] * 2 + beside[y + 1, x] + 8) >> 4)
        sharp = lambda y, x: saturate((source[y, x] * 2 - blur[y, x]).as_signed())  # noqa: E731
        return Stage("sharp", (H, W), sharp, dtype="uint8")

    def numpy(image):
        taps = shifts(padded(image, "edge", 1), 3, 3)
        weights = (1, 2, 1)
        blur = (sum(weights[i] * weights[j] * a for (i, j), a in taps.items()) + 8) // 16
        return [np.clip(2 * image.astype(np.int64) - blur, 0, 255)]


@program("https://github.com/opencv/opencv: medianBlur, 3 x 3, BORDER_REPLICATE, Smith's network of 19 exchanges")
class median:
    def outputs():
        near = bounded(image(), "clamp")

        def sorted3(a, b, c):
            low, high = minimum(a, b), maximum(a, b)
            return minimum(low, c), maximum(low, minimum(high, c)), maximum(high, c)

        # Each column of the window is sorted once; windows that follow each other share columns.
        columns = [
            Stage(name, (H, W), lambda y, x, k=k: sorted3(near[y - 1, x], near[y, x], near[y + 1, x])[k], dtype="uint8")
            for k, name in enumerate(("low", "middle", "high"))
        ]
        low, middle, high = (bounded(c, "clamp") for c in columns)

        def word(y, x):
            most_low = maximum(maximum(low[y, x - 1], low[y, x]), low[y, x + 1])
            mid = sorted3(middle[y, x - 1], middle[y, x], middle[y, x + 1])[1]
            least_high = minimum(minimum(high[y, x - 1], high[y, x]), high[y, x + 1])
            return sorted3(most_low, mid, least_high)[1]

        return Stage("median", (H, W), word, dtype="uint8")

    def numpy(image):
        taps = shifts(padded(image, "edge", 1), 3, 3)
        return [np.median(np.stack(list(taps.values())), axis=0).astype(np.int64)]


@program("https://github.com/scikit-image/scikit-image: morphology.opening, square of 3 x 3")
class opening:
    def outputs():
        source = image()

        def box(name, of, best):
            near = bounded(of, "symmetric")

            def word(y, x):
                found = near[y, x]
                for i in (-1, 0, 1):
                    for j in (-1, 0, 1):
                        found = best(found, near[y + i, x + j])
                return found

            return Stage(name, (H, W), word, dtype="uint8")

        return box("opened", box("eroded", source, minimum), maximum)

    def numpy(image):
        eroded = np.min(list(shifts(padded(image, "symmetric", 1), 3, 3).values()), axis=0)
        return [np.max(list(shifts(padded(eroded, "symmetric", 1), 3, 3).values()), axis=0)]


@program("https://github.com/halide/Halide/tree/main/apps/max_filter: the greatest of a window, 5 x 5")
class max_filter:
    def outputs():
        near = bounded(image(), "clamp")
        return Stage("most", (H, W), lambda y, x: Reduce((5, 5), lambda i, j: near[y + i - 2, x + j - 2], op="max"))

    def numpy(image):
        return [np.max(list(shifts(padded(image, "edge", 2), 5, 5).values()), axis=0)]


@program("https://github.com/opencv/opencv: pyrDown")
class pyramid_down:
    def outputs():
        near = bounded(image(), "mirror")

        def word(y, x):
            taps = (
                near[2 * y + i - 2, 2 * x + j - 2] * (BINOMIAL[i] * BINOMIAL[j]) for i in range(5) for j in range(5)
            )
            return (summed(taps) + 128) >> 8

        return Stage("coarse", (H // 2, W // 2), word, dtype="uint8")

    def numpy(image):
        taps = shifts(padded(image, "reflect", 2), 5, 5)
        return [((sum(BINOMIAL[i] * BINOMIAL[j] * a for (i, j), a in taps.items()) + 128) // 256)[::2, ::2]]


@program("https://github.com/opencv/opencv: pyrUp, without its own rule for the last row")
class pyramid_up:
    def outputs():
        near = bounded(image(), "clamp")

        def across(y, x):
            even = near[y, x // 2 - 1] + near[y, x // 2] * 6 + near[y, x // 2 + 1]
            return select(x % 2 == 0, even, (near[y, x // 2] + near[y, x // 2 + 1]) * 4)

        rows = Stage("rows", (H, 2 * W), across)
        wide = bounded(rows, "clamp")

        def word(y, x):
            even = wide[y // 2 - 1, x] + wide[y // 2, x] * 6 + wide[y // 2 + 1, x]
            return (select(y % 2 == 0, even, (wide[y // 2, x] + wide[y // 2 + 1, x]) * 4) + 32) >> 6

        return Stage("fine", (2 * H, 2 * W), word, dtype="uint8")

    def numpy(image):
        def twice(a):
            p = np.pad(a, ((0, 0), (1, 1)), mode="edge")
            out = np.zeros((a.shape[0], 2 * a.shape[1]), np.int64)
            out[:, ::2] = p[:, :-2] + 6 * p[:, 1:-1] + p[:, 2:]
            out[:, 1::2] = 4 * (p[:, 1:-1] + p[:, 2:])
            return out

        return [(twice(twice(image.astype(np.int64)).T).T + 32) // 64]


@program("https://github.com/pytorch/pytorch: interpolate, bilinear, scale 2, align_corners False")
class bilinear:
    def outputs():
        near = bounded(image(), "clamp")

        def word(y, x):
            def across(row):
                left, right = near[row, (x - 1) // 2], near[row, (x + 1) // 2]
                return select(x % 2 == 0, left + right * 3, left * 3 + right)

            above, below = across((y - 1) // 2), across((y + 1) // 2)
            return (select(y % 2 == 0, above + below * 3, above * 3 + below) + 8) >> 4

        return Stage("larger", (2 * H, 2 * W), word, dtype="uint8")

    def numpy(image):
        def twice(a):
            p = np.pad(a, ((0, 0), (1, 1)), mode="edge")
            out = np.zeros((a.shape[0], 2 * a.shape[1]), np.int64)
            out[:, ::2] = p[:, :-2] + 3 * p[:, 1:-1]
            out[:, 1::2] = 3 * p[:, 1:-1] + p[:, 2:]
            return out

        return [(twice(twice(image.astype(np.int64)).T).T + 8) // 16]


@program("https://github.com/halide/Halide/tree/main/apps/basic_demosaic: bilinear, RGGB")
class demosaic:
    def outputs():
        near = bounded(image("raw", dtype="uint16"), "mirror")

        def colours(c, y, x):
            here = near[y, x] & 1023
            beside = ((near[y, x - 1] & 1023) + (near[y, x + 1] & 1023)) >> 1
            above = ((near[y - 1, x] & 1023) + (near[y + 1, x] & 1023)) >> 1
            cross = (beside + above) >> 1
            corner = lambda i, j: near[y + i, x + j] & 1023  # noqa: E731
            corners = (corner(-1, -1) + corner(-1, 1) + corner(1, -1) + corner(1, 1)) >> 2
            even_row = select(x % 2 == 0, (here, cross, corners)[c], (beside, here, above)[c])
            odd_row = select(x % 2 == 0, (above, here, beside)[c], (corners, cross, here)[c])
            return select(y % 2 == 0, even_row, odd_row)

        return Stage("rgb", (3, H, W), colours, unroll=(0,))

    def numpy(raw):
        p = padded(raw & 1023, "reflect", 1)
        at = shifts(p, 3, 3)
        here, beside, above = at[1, 1], (at[1, 0] + at[1, 2]) // 2, (at[0, 1] + at[2, 1]) // 2
        cross, corners = (beside + above) // 2, (at[0, 0] + at[0, 2] + at[2, 0] + at[2, 2]) // 4
        y, x = np.indices(raw.shape) % 2
        red = np.select([(y == 0) & (x == 0), (y == 0) & (x == 1), (y == 1) & (x == 0)], [here, beside, above], corners)
        green = np.where(y == x, cross, here)
        blue = np.select(
            [(y == 0) & (x == 0), (y == 0) & (x == 1), (y == 1) & (x == 0)], [corners, above, beside], here
        )
        return [red, green, blue]


@program("https://github.com/halide/Halide/tree/main/apps/camera_pipe: hot pixels")
class hot_pixels:
    def outputs():
        near = bounded(image("raw", dtype="uint16"), "clamp")

        def word(y, x):
            most = maximum(maximum(near[y - 2, x], near[y + 2, x]), maximum(near[y, x - 2], near[y, x + 2]))
            return minimum(near[y, x], most)

        return Stage("clean", (H, W), word)

    def numpy(raw):
        p = padded(raw, "edge", 2)
        around = [p[:-4, 2:-2], p[4:, 2:-2], p[2:-2, :-4], p[2:-2, 4:]]
        return [np.minimum(raw.astype(np.int64), np.max(around, axis=0))]


MATRIX = ((1634, -328, -282), (-252, 1421, -145), (-65, -594, 1683))
CURVE = [min(255, round(255 * (i / 1023) ** (1 / 1.8))) for i in range(1024)]


@program("https://github.com/halide/Halide/tree/main/apps/camera_pipe: colour matrix and tone curve")
class colour_and_curve:
    def outputs():
        rgb = image("rgb", (3, H, W), unroll=(0,))

        def word(c, y, x):
            mixed = summed((rgb[k, y, x] >> 3) * MATRIX[c][k] for k in range(3))
            return Lut.of(CURVE, minimum(maximum((mixed.as_signed()) >> 5, 0), 1023))

        return Stage("screen", (3, H, W), word, unroll=(0,), dtype="uint8")

    def numpy(rgb):
        # A PE keeps 16 bits of a sum.
        mixed = np.einsum("ck,kyx->cyx", np.array(MATRIX), rgb.astype(np.int64) // 8)
        mixed = (mixed + 32768) % 65536 - 32768
        return list(np.array(CURVE)[np.clip(mixed // 32, 0, 1023)])


@program("https://github.com/opencv/opencv: Canny, thinning of edges along four directions, 0 beyond the border")
class canny_thinning:
    def outputs():
        gx, gy = image("gx", dtype="int16"), image("gy", dtype="int16")
        small = lambda of, y, x: of[y, x] >> 6  # noqa: E731
        steep = Stage("strength", (H, W), lambda y, x: abs(small(gx, y, x)) + abs(small(gy, y, x)))
        near = bounded(steep, "zero")

        def word(y, x):
            across, along = abs(small(gx, y, x)), abs(small(gy, y, x))
            # tan 22.5 and tan 67.5 degrees in fifths and halves.
            flat, upright = along * 5 < across * 2, along * 2 > across * 5
            same = (small(gx, y, x) < 0) == (small(gy, y, x) < 0)
            one = select(same, near[y - 1, x - 1], near[y - 1, x + 1])
            other = select(same, near[y + 1, x + 1], near[y + 1, x - 1])
            one = select(flat, near[y, x - 1], select(upright, near[y - 1, x], one))
            other = select(flat, near[y, x + 1], select(upright, near[y + 1, x], other))
            return select((steep[y, x] > one) & (steep[y, x] >= other), steep[y, x], 0)

        return Stage("thin", (H, W), word)

    def numpy(gx, gy):
        gx, gy = gx.astype(np.int64) // 64, gy.astype(np.int64) // 64
        steep = abs(gx) + abs(gy)
        p = np.pad(steep, 1)
        out = np.zeros_like(steep)
        for y in range(steep.shape[0]):
            for x in range(steep.shape[1]):
                a, b = abs(gx[y, x]), abs(gy[y, x])
                if 5 * b < 2 * a:
                    dy, dx = 0, 1
                elif 2 * b > 5 * a:
                    dy, dx = 1, 0
                else:
                    dy, dx = 1, 1 if (gx[y, x] < 0) == (gy[y, x] < 0) else -1
                one, other = p[y + 1 - dy, x + 1 - dx], p[y + 1 + dy, x + 1 + dx]
                out[y, x] = steep[y, x] if steep[y, x] > one and steep[y, x] >= other else 0
        return [out]


@program("https://github.com/opencv/opencv: Canny, one round of hysteresis with two thresholds")
class canny_hysteresis:
    def outputs():
        source = image()
        near = bounded(source, "zero")

        def word(y, x):
            most = summed([near[y + i, x + j] > 200 for i in (-1, 0, 1) for j in (-1, 0, 1)])
            return select((source[y, x] > 90) & (most != 0), 255, 0)

        return Stage("edges", (H, W), word, dtype="uint8")

    def numpy(image):
        strong = sum(shifts(padded(image > 200, "constant", 1), 3, 3).values()) > 0
        return [np.where((image > 90) & strong, 255, 0)]


@program("https://github.com/halide/Halide/tree/main/apps/bilateral_grid: blur of the grid along all three axes")
class bilateral_grid:
    def outputs():
        grid = bounded(image("grid", (4, H, W), dtype="uint16", unroll=(0,)), "zero")
        weigh = lambda *words: summed(w * k for w, k in zip(words, BINOMIAL, strict=True)) >> 4  # noqa: E731
        deep = Stage(
            "deep", (4, H, W), lambda z, y, x: weigh(*((grid[z + k - 2, y, x] >> 6) for k in range(5))), unroll=(0,)
        )
        by_depth = bounded(deep, "zero")
        wide = Stage(
            "wide", (4, H, W), lambda z, y, x: weigh(*(by_depth[z, y, x + k - 2] for k in range(5))), unroll=(0,)
        )
        by_row = bounded(wide, "zero")
        word = lambda z, y, x: weigh(*(by_row[z, y + k - 2, x] for k in range(5)))  # noqa: E731
        return Stage("blurred", (4, H, W), word, unroll=(0,))

    def numpy(grid):
        found = grid.astype(np.int64) // 64
        for axis in (0, 2, 1):
            sides = [(2, 2) if d == axis else (0, 0) for d in range(3)]
            p = np.pad(found, sides)
            parts = [np.take(p, np.arange(found.shape[axis]) + k, axis=axis) for k in range(5)]
            found = sum(w * part for w, part in zip(BINOMIAL, parts, strict=True)) // 16
        return list(found)


@program(
    "https://github.com/halide/Halide/tree/main/apps/nl_means: the distance of 3 x 3 patches to those a shift away"
)
class patch_distance:
    def outputs():
        near = bounded(image(), "clamp")

        def squared(y, x):
            apart = abs((near[y, x] - near[y + 1, x + 2]).as_signed()).as_unsigned()
            return (apart * apart) >> 4

        distance = bounded(Stage("squared", (H, W), squared), "clamp")
        box = lambda y, x: summed(distance[y + i, x + j] for i in (-1, 0, 1) for j in (-1, 0, 1)) // 9  # noqa: E731
        return Stage("distance", (H, W), box)

    def numpy(image):
        p = np.pad(image.astype(np.int64), ((0, 1), (0, 2)), mode="edge")
        squared = (image.astype(np.int64) - p[1:, 2:]) ** 2 // 16
        return [sum(shifts(padded(squared, "edge", 1), 3, 3).values()) // 9]


@program("https://github.com/opencv/opencv: adaptiveThreshold, mean of 5 x 5 rounded, BORDER_REPLICATE, C = 7")
class local_threshold:
    def outputs():
        source = image()
        near = bounded(source, "clamp")

        def word(y, x):
            total = summed(near[y + i, x + j] for i in range(-2, 3) for j in range(-2, 3))
            return select(source[y, x] + 7 > divide(total, 25, "nearest"), 255, 0)

        return Stage("white", (H, W), word, dtype="uint8")

    def numpy(image):
        total = sum(shifts(padded(image, "edge", 2), 5, 5).values())
        mean = np.floor(total / 25 + 0.5).astype(np.int64)
        return [np.where(image.astype(np.int64) + 7 > mean, 255, 0)]


@program("https://github.com/pytorch/vision: ResNet's stem, max_pool2d, 3 x 3, stride 2, padding 1")
class max_pool:
    def outputs():
        near = bounded(image(dtype="int16"), "clamp")
        best = lambda i, j, y, x: near[2 * y + i - 1, 2 * x + j - 1]  # noqa: E731
        pool = lambda y, x: Reduce((3, 3), lambda i, j: best(i, j, y, x), op="max")  # noqa: E731
        return Stage("pool", (H // 2, W // 2), pool, dtype="int16")

    def numpy(image):
        p = padded(image, "constant", 1, constant_values=-32768)
        return [np.max([p[i : i + H : 2, j : j + W : 2] for i in range(3) for j in range(3)], axis=0)]


WEIGHTS = np.random.default_rng(62).integers(-9, 10, (2, 2, 3, 3)).tolist()
BIAS = (150, -90)


@program("https://github.com/pytorch/vision: a layer of ResNet, quantised: 3 x 3, padding 1, bias, ReLU, shift")
class convolution:
    def outputs():
        near = bounded(image("image", (2, H, W), unroll=(0,)), "zero")

        def word(c, y, x):
            places = [(k, i, j) for k in range(2) for i in range(3) for j in range(3)]
            total = summed(near[k, y + i - 1, x + j - 1] * WEIGHTS[c][k][i][j] for k, i, j in places) + BIAS[c]
            return saturate(total.as_signed() >> 4)

        return Stage("layer", (2, H, W), word, unroll=(0,), dtype="uint8")

    def numpy(image):
        p = padded(image, "constant", 1)
        weights = np.array(WEIGHTS)
        total = sum(np.einsum("ck,kyx->cyx", weights[:, :, i, j], a) for (i, j), a in shifts(p, 3, 3).items())
        return list(np.clip((total + np.array(BIAS)[:, None, None]) // 16, 0, 255))


@program("https://github.com/pytorch/vision: MobileNet's depthwise 3 x 3, stride 2, padding 1, weights as data, ReLU6")
class depthwise:
    def outputs():
        near = bounded(image("image", (2, H, W), unroll=(0,)), "zero")
        weights = Input("weights", (2, 3, 3), "int16", unroll=(0,))

        def word(c, y, x):
            taps = lambda i, j: near[c, 2 * y + i - 1, 2 * x + j - 1] * (weights[c, i, j] >> 12)  # noqa: E731
            return minimum(maximum(Reduce((3, 3), taps).as_signed() >> 5, 0), 6)

        return Stage("depthwise", (2, H // 2, W // 2), word, unroll=(0,))

    def numpy(image, weights):
        p, weights = padded(image, "constant", 1), weights.astype(np.int64) // 4096
        parts = [(p[:, i : i + H : 2, j : j + W : 2], weights[:, i, j]) for i in range(3) for j in range(3)]
        total = sum(a * w[:, None, None] for a, w in parts)
        return list(np.clip(total // 32, 0, 6))


@program("https://github.com/pytorch/vision: ResNet's bottleneck, 1 x 1 with weights as data, and the shortcut")
class shortcut:
    def outputs():
        inner, outer = image("inner", (4, H, W), unroll=(0,)), image("outer", (2, H, W), unroll=(0,))
        weights = Input("weights", (2, 4), "int16", unroll=(0, 1))

        def word(c, y, x):
            mixed = summed(inner[k, y, x] * (weights[c, k] >> 11) for k in range(4)).as_signed()
            return saturate((mixed >> 3) + outer[c, y, x])

        return Stage("added", (2, H, W), word, unroll=(0,), dtype="uint8")

    def numpy(inner, outer, weights):
        mixed = np.einsum("ck,kyx->cyx", weights.astype(np.int64) // 2048, inner.astype(np.int64))
        return list(np.clip(mixed // 8 + outer, 0, 255))


@program("https://github.com/pytorch/pytorch: pixel_shuffle, factor 2, the last step of a decoder")
class pixel_shuffle:
    def outputs():
        channels = image("channels", (4, H, W), unroll=(0,))

        def word(y, x):
            a, b, c, d = (channels[k, y // 2, x // 2] for k in range(4))
            return select(y % 2 == 0, select(x % 2 == 0, a, b), select(x % 2 == 0, c, d))

        return Stage("shuffled", (2 * H, 2 * W), word, dtype="uint8")

    def numpy(channels):
        return [channels.reshape(2, 2, H, W).transpose(2, 0, 3, 1).reshape(2 * H, 2 * W)]


@program("https://github.com/halide/Halide/tree/main/apps/wavelet: Haar along x, there and back")
class haar:
    def outputs():
        source = image(dtype="int16")
        half = lambda y, x: source[y, x] >> 2  # noqa: E731
        low = Stage("low", (H, W // 2), lambda y, x: (half(y, 2 * x) + half(y, 2 * x + 1)) >> 1, dtype="int16")
        high = Stage("high", (H, W // 2), lambda y, x: (half(y, 2 * x) - half(y, 2 * x + 1)) >> 1, dtype="int16")
        back = lambda y, x: select(x % 2 == 0, low[y, x // 2] + high[y, x // 2], low[y, x // 2] - high[y, x // 2])  # noqa: E731
        return Stage("back", (H, W), back, dtype="int16"), low

    def numpy(image):
        a = image.astype(np.int64) // 4
        low, high = (a[:, ::2] + a[:, 1::2]) // 2, (a[:, ::2] - a[:, 1::2]) // 2
        return [np.stack([low + high, low - high], axis=2).reshape(H, W), low]


@program("https://github.com/libjpeg-turbo/libjpeg-turbo: RGB to YCbCr, BT.601, and chroma at half the side")
class jpeg_colours:
    def outputs():
        rgb = image("rgb", (3, H, W), unroll=(0,))
        luma = lambda y, x: (rgb[0, y, x] * 77 + rgb[1, y, x] * 150 + rgb[2, y, x] * 29 + 128) >> 8  # noqa: E731
        light = Stage("light", (H, W), luma, dtype="uint8")

        def chroma(y, x):
            mixed = (rgb[2, y, x] * 128 - rgb[0, y, x] * 43 - rgb[1, y, x] * 85).as_signed()
            return (mixed >> 8) + 128

        blue = Stage("blue", (H, W), chroma, dtype="uint8")
        mean = lambda y, x: summed(blue[2 * y + i, 2 * x + j] for i in (0, 1) for j in (0, 1))  # noqa: E731
        return light, Stage("half", (H // 2, W // 2), lambda y, x: (mean(y, x) + 2) >> 2, dtype="uint8")

    def numpy(rgb):
        r, g, b = rgb.astype(np.int64)
        blue = ((128 * b - 43 * r - 85 * g) // 256 + 128) % 256
        half = (blue[::2, ::2] + blue[1::2, ::2] + blue[::2, 1::2] + blue[1::2, 1::2] + 2) // 4
        return [(77 * r + 150 * g + 29 * b + 128) // 256, half]


@program("https://github.com/libjpeg-turbo/libjpeg-turbo: DCT of rows of 8 words, cosines as data")
class cosine_transform:
    def outputs():
        source, table = image(), Input("table", (8, 8), "int16")

        def word(y, x):
            return Reduce((8,), lambda k: source[y, 8 * (x // 8) + k] * (table[x % 8, k] >> 11))

        return Stage("spectrum", (H, W), word, dtype="int16")

    def numpy(image, table):
        blocks = image.astype(np.int64).reshape(H, W // 8, 8)
        return [np.einsum("ybk,uk->ybu", blocks, table.astype(np.int64) // 2048).reshape(H, W)]


@program("https://github.com/python-pillow/Pillow: alpha_composite of a mirrored layer, with exact division by 255")
class composite:
    def outputs():
        below, above, alpha = image("below"), image("above"), image("alpha")

        def word(y, x):
            a = alpha[y, x]
            return divide(above[y, W - 1 - x] * a + below[y, x] * (255 - a), 255, "nearest")

        return Stage("mixed", (H, W), word, dtype="uint8")

    def numpy(below, above, alpha):
        a = alpha.astype(np.int64)
        return [np.floor((above[:, ::-1] * a + below * (255 - a)) / 255 + 0.5).astype(np.int64)]


@program("https://github.com/raspberrypi/libcamera: lens shading, a gain for each row and each column, and black level")
class lens_shading:
    def outputs():
        raw, rows, columns = image("raw"), image("rows", (H,)), image("columns", (W,))

        def word(y, x):
            light = maximum((raw[y, x] - 16).as_signed(), 0).as_unsigned()
            once = light * ((rows[y] >> 1) + 128) >> 8
            return saturate(once * ((columns[x] >> 1) + 128) >> 7)

        return Stage("even", (H, W), word, dtype="uint8")

    def numpy(raw, rows, columns):
        light = np.maximum(raw.astype(np.int64) - 16, 0)
        once = light * (rows.astype(np.int64) // 2 + 128)[:, None] // 256
        return [np.minimum(once * (columns.astype(np.int64) // 2 + 128) // 128, 255)]


@program("https://github.com/halide/Halide/tree/main/apps/stencil_chain: three stencils of 5 x 5, one after the other")
class stencil_chain:
    def outputs():
        def stencil(name, source):
            near = bounded(source, "wrap")
            cross = [(0, j) for j in range(-2, 3)] + [(i, 0) for i in (-2, -1, 1, 2)]
            mean = lambda y, x: summed(near[y + i, x + j] for i, j in cross) // 9  # noqa: E731
            return Stage(name, (H, W), mean, dtype="uint8")

        return stencil("third", stencil("second", stencil("first", image())))

    def numpy(image):
        found = image.astype(np.int64)
        for _ in range(3):
            p = padded(found, "wrap", 2)
            taps = shifts(p, 5, 5)
            found = (sum(taps[2, j] for j in range(5)) + sum(taps[i, 2] for i in (0, 1, 3, 4))) // 9
        return [found]
