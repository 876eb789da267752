"""Scenes: objects with an opacity over photographs, and a label for each pixel.

What a scene holds is a function of ``(seed, split, index)``: all of it is drawn from a counter-based generator with
that key, on the host. A scene can be drawn at any size. Lengths are in the shorter side of the frame, from its middle.

A list of scenes is first worked out (`listed`): for each object which texels it reads, by which affine map, which
colours it takes. Then it is drawn (`drawn`): on a CPU by `_compiled`, elsewhere by the device's kernel.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright.core import images, registry
from tilewright.core.errors import PatternError
from tilewright_study.scenes import backends, objects, pictures

# Photographs of `core.images`: those that networks are trained with, and those that no training shows. Networks learn
# photographs: on those of the training what loses most elsewhere may look best. Of the others paths are planned and
# chosen by the left halves and tested by the right ones: of one kind, and without a pixel in common.
TRAINED = ("astronaut", "coffee", "hubble_deep_field", "retina")
HELD_OUT = ("chelsea", "rocket", *pictures.GRAY)
CHOSEN, TESTED = ([(name, half) for name in HELD_OUT] for half in ("left", "right"))
# What backgrounds are cut from: a name, and its half or None for all of it.
PHOTOGRAPHS = [*((name, None) for name in TRAINED), *CHOSEN, *TESTED]
# By split: its photographs, and whether its objects are those that no network is trained on. The place is part of the
# key of its scenes: new splits go to the end.
SPLITS = {
    "train": (PHOTOGRAPHS[: len(TRAINED)], False),
    "fit": (CHOSEN, False),
    "choice": (CHOSEN, False),
    "test": (TESTED, False),
    "novel": (TESTED, True),
}
# Label of the two pixels along each outline.
VOID = 255
# Sides in texels: of a photograph, and of the smallest picture that is kept of an object and of a photograph.
PHOTOGRAPH, LEAST, LEAST_PHOTOGRAPH = 640, 8, 80

# ASSUME: ranges from which a scene is drawn; angles in radians, blur in levels of halved pictures. An object's size
# is the side of its cell. Hues turn by any angle, so that colour does not give a class away.
COUNT, SIZE = (5, 12), (0.08, 0.5)
TURN, SHEAR, STRETCH = 1.6, 0.25, (0.8, 1.25)
SATURATION, GAIN, SHADE = (0.2, 1.3), (0.55, 1.2), 0.35
BLURRED, BLUR = 0.3, (0.7, 1.8)
SHADOW, FALL = (0.0, 0.6), (0.02, 0.12)
# Of the photograph behind: the share of its side that the frame shows, its turn and its colours.
GROUND, GROUND_TURN, GROUND_SATURATION, GROUND_GAIN = (0.25, 1.0), 0.5, (0.3, 1.2), (0.5, 1.2)
# Of the camera: exponent of the light, and noise in shares of white.
GAMMA, NOISE = (0.75, 1.35), (0.0, 0.06)
# How far beyond the frame's edge the middle of an object may lie, in sizes of the object.
BEYOND = 0.25
# Numbers drawn for a scene as a whole, and for each object.
_OF_SCENE, _OF_OBJECT = 16, 24
# Between the counters of two numbers: odd, and without a pattern in its bits.
_STEP = np.uint64(0x9E3779B97F4A7C15)
# Luma, to turn hues about (ITU-R BT.601).
_LUMA = np.array((0.299, 0.587, 0.114))


class Listed(NamedTuple):
    """Scenes as they are drawn: B scenes of at most K objects, from the back to the front.

    places: float32 [B, K, 6], the map from a pixel at (x, y) to the object's cell: ``u = p0 (x - p4) + p1 (y - p5)``,
    ``v = p2 (x - p4) + p3 (y - p5)``, in sides of the cell from its middle. colours: float32 [B, K, 9], rows of a
    matrix. lights: float32 [B, K, 5]: shade along u and v; strength of the shadow, and how far it falls to the right
    and down, in pixels. texels: int32 [B, K, 5]: where the object's picture begins in `texels` and its side, the same
    of its shadow, and its label. windows: int32 [B, K, 4]: the pixels that it and its shadow may touch, first and last
    column, first and last row, empty where there is no object.

    grounds: float32 [B, 17]: the photograph's map (6, as above), its colours (9), the exponent of light, the noise.
    photographs: int32 [B, 3]: where its texels begin, their side, and the key of the noise.
    """

    places: np.ndarray
    colours: np.ndarray
    lights: np.ndarray
    texels: np.ndarray
    windows: np.ndarray
    grounds: np.ndarray
    photographs: np.ndarray


class Numbers(NamedTuple):
    """What is drawn of scenes, uniform in 0..1: scene float64 [B, 16], objects float64 [B, K, 24], keys int64 [B]."""

    scene: np.ndarray
    objects: np.ndarray
    keys: np.ndarray


def numbers(split: str, indices: Sequence[int], *, seed: int = 0, count: int = COUNT[1]) -> Numbers:
    """The numbers of the scenes `indices` of a split, with `count` objects at most.

    Raises `UnknownNameError` for a split, `PatternError` for an index or a seed that is negative.
    """
    registry.check("split", split, SPLITS)
    if seed < 0 or any(index < 0 for index in indices):
        raise PatternError(f"scenes: expected indices and a seed of at least 0, found {list(indices)} and {seed}")
    keys = _hashed(_hashed(np.uint64(seed * len(SPLITS) + list(SPLITS).index(split))) + np.array(indices, np.uint64))
    # Counter-based: neither scenes nor numbers need anything of each other.
    counters = np.arange(1 + _OF_SCENE + count * _OF_OBJECT, dtype=np.uint64) * _STEP
    found = (_hashed(keys[:, None] + counters) >> np.uint64(11)) * 2.0**-53
    drawn = found[:, 1 + _OF_SCENE :].reshape(len(indices), count, _OF_OBJECT)
    return Numbers(found[:, 1 : 1 + _OF_SCENE], drawn, (found[:, 0] * 2**31).astype(np.int64))


def _hashed(x):
    """uint64 of uint64: the mixing of SplitMix64 (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return x ^ x >> np.uint64(31)


class Things(NamedTuple):
    """The objects of scenes, [B, K] each. kinds: number in `objects.table`. x, y: of their middles. sizes: of cells.

    shown: whether the scene has it.
    """

    kinds: np.ndarray
    x: np.ndarray
    y: np.ndarray
    sizes: np.ndarray
    shown: np.ndarray


def things(split: str, drawn: Numbers, pixels: tuple[int, int], *, counts=COUNT, spread: float = 1.0) -> Things:
    """The `Things` of scenes of ``(height, width)`` pixels. spread: sides of the area in which they lie, in frames."""
    u = drawn.objects
    known, many = _known(SPLITS[split][1])
    classes = _below(u[..., 0], len(known))
    kinds = known[classes, _below(u[..., 1], many[classes])]
    sizes = np.exp(_between(u[..., 2], np.log(SIZE)))
    height, width = (side / min(pixels) for side in pixels)
    x = (u[..., 3] - 0.5) * (spread * width + 2 * BEYOND * sizes)
    y = (u[..., 4] - 0.5) * (spread * height + 2 * BEYOND * sizes)
    many = counts[0] + _below(drawn.scene[:, 0], counts[1] - counts[0] + 1)
    return Things(kinds, x, y, sizes, np.arange(u.shape[1]) < many[:, None])


def listed(split: str, drawn: Numbers, scene: Things, pixels: tuple[int, int], *, view=None) -> Listed:
    """Scenes as they are drawn in ``(height, width)`` pixels.

    view: float64 [B, 3], middle (x, y) and size of what the frame shows; None for all of it, (0, 0, 1).
    """
    u, height, width = drawn.objects, *pixels
    view = np.array([[0.0, 0.0, 1.0]]) if view is None else view
    unit = min(pixels) / view[:, 2:]
    x = (scene.x - view[:, :1]) * unit + width / 2
    y = (scene.y - view[:, 1:2]) * unit + height / 2
    side = scene.sizes * unit
    angle = (u[..., 5] + u[..., 6] - 1) * TURN
    stretch = np.exp(_between(u[..., 7], np.log(STRETCH)))
    shear, flip = (2 * u[..., 8] - 1) * SHEAR, np.where(u[..., 9] < 0.5, -1.0, 1.0)
    places = np.empty((*u.shape[:2], 6))
    # Turned back, then sheared, stretched and flipped, in sides of the cell.
    places[..., 0] = flip * (np.cos(angle) + shear * -np.sin(angle)) * stretch / side
    places[..., 1] = flip * (np.sin(angle) + shear * np.cos(angle)) * stretch / side
    places[..., 2] = -np.sin(angle) / stretch / side
    places[..., 3] = np.cos(angle) / stretch / side
    places[..., 4], places[..., 5] = x, y

    colours = _colours(2 * math.pi * u[..., 10], _between(u[..., 11], SATURATION), _between(u[..., 12], GAIN))
    direction, shade = 2 * math.pi * u[..., 13], SHADE * 2 * u[..., 14]
    lights = np.empty((*u.shape[:2], 5))
    lights[..., 0], lights[..., 1] = shade * np.cos(direction), shade * np.sin(direction)
    # Light falls from one side in all of a scene.
    sun = 2 * math.pi * drawn.scene[:, 1:2]
    fall = _between(u[..., 15], FALL) * side
    lights[..., 2] = _between(drawn.scene[:, 2:3], SHADOW) * (0.5 + 0.5 * u[..., 16])
    lights[..., 3], lights[..., 4] = fall * np.cos(sun), fall * np.sin(sun)

    blur = np.where(u[..., 17] < BLURRED, _between(u[..., 18], BLUR), 0.0)
    level = np.log2(np.maximum(objects.CELL / side, 1e-9)) + blur
    begins, shadow_begins = (_level(level + more, scene.kinds) for more in (0, 2))
    texels = np.stack([*begins, *shadow_begins, objects.table().labels[scene.kinds]], -1)
    windows = _windows(places, lights, scene.shown, pixels)
    grounds, photographs = _grounds(split, drawn, pixels, view)
    floats = (array.astype(np.float32) for array in (places, colours, lights))
    return Listed(*floats, texels.astype(np.int32), windows, grounds, photographs)


def drawn(scenes: Listed, pixels: tuple[int, int], device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """Images uint8 [B, 3, H, W] and labels uint8 [B, H, W] of scenes, on `device`.

    By the kernel of its kind, where it has one, else on the CPU. Two devices round some pixels otherwise, by one.
    """
    device = torch.device(device)
    if (kernels := backends.scenes(device.type)) is None:
        pictures, labels, owners = (torch.from_numpy(x).to(device) for x in _on_host(scenes, pixels))
    else:
        pictures, labels, owners = kernels.draw(scenes, texels(str(device)), pixels)
    return pictures, outlined(labels, owners)


def _on_host(scenes, pixels):
    """uint8 pictures [B, 3, H, W], labels and owners [B, H, W], by as many threads as torch has."""
    # Compiled when it is first imported, for seconds, and then kept beside its source.
    from tilewright_study.scenes import _compiled

    pictures = np.empty((len(scenes.places), 3, *pixels), np.uint8)
    labels, owners = (np.empty((len(scenes.places), *pixels), np.uint8) for _ in range(2))
    buffer = texels("cpu").numpy()

    def draw(at):
        _compiled.draw(buffer, *(array[at] for array in scenes), pictures[at], labels[at], owners[at])

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(draw, range(len(pictures))))
    return pictures, labels, owners


def outlined(labels: Tensor, owners: Tensor) -> Tensor:
    """`labels` [B, H, W] with `VOID` where a pixel and one beside it are of different `owners`."""
    edges = torch.zeros_like(labels, dtype=torch.bool)
    down = owners[:, 1:] != owners[:, :-1]
    right = owners[:, :, 1:] != owners[:, :, :-1]
    edges[:, 1:] |= down
    edges[:, :-1] |= down
    edges[:, :, 1:] |= right
    edges[:, :, :-1] |= right
    return labels.masked_fill(edges, VOID)


@cache
def texels(device: str) -> Tensor:
    """int32 [texels]: red, green, blue times opacity and the opacity, 8 bits each from the lowest, of all pictures.

    Objects come first, level after level, each with half the side of that before it. Then photographs, the same.
    """
    found = [*_halved(objects.pictures(), LEAST)]
    loaded = np.stack([_photograph(*each) for each in PHOTOGRAPHS]).transpose(0, 2, 3, 1)
    opaque = np.full((*loaded.shape[:3], 4), 255, np.uint8)
    opaque[..., :3] = np.round(loaded * 255)
    found += _halved(opaque, LEAST_PHOTOGRAPH)
    return torch.from_numpy(np.concatenate([level.reshape(-1).view(np.int32) for level in found])).to(device)


def _photograph(name, half):
    """float32 [3, side, side] of a photograph, or of one half of it and its mirror image: scenes show what lies beyond
    an edge as its mirror image, too."""
    picture = (pictures.gray if name in pictures.GRAY else images.load)(name, PHOTOGRAPH)
    if half is None:
        return picture
    picture = picture[..., : PHOTOGRAPH // 2] if half == "left" else picture[..., PHOTOGRAPH // 2 :]
    return np.concatenate((picture, picture[..., ::-1]), -1)


def _halved(pictures, least):
    """Pictures uint8 [N, side, side, 4] of falling sides, each pixel the mean of four."""
    while pictures.shape[1] >= least:
        yield pictures
        rows = pictures[:, ::2].astype(np.uint16) + pictures[:, 1::2]
        pictures = (rows[:, :, ::2] + rows[:, :, 1::2] + 2 >> 2).astype(np.uint8)


def _levels(count, side, least):
    """``(begin, side)`` of each level of `count` pictures, from 0, and the end."""
    begins, sides = [0], []
    while side >= least:
        sides.append(side)
        begins.append(begins[-1] + count * side**2)
        side //= 2
    return np.array(begins[:-1]), np.array(sides), begins[-1]


def _level(level, kinds):
    """Where the pictures of objects begin at these levels, rounded, and their sides."""
    begins, sides, _ = _levels(len(objects.table().names), objects.CELL, LEAST)
    chosen = np.clip(np.round(level), 0, len(sides) - 1).astype(np.int64)
    return begins[chosen] + kinds * sides[chosen] ** 2, sides[chosen]


def _grounds(split, drawn, pixels, view):
    u = drawn.scene
    own = np.array([PHOTOGRAPHS.index(each) for each in SPLITS[split][0]])
    chosen = own[_below(u[:, 3], len(own))]
    share = np.exp(_between(u[:, 4], np.log(GROUND)))
    angle = (2 * u[:, 5] - 1) * GROUND_TURN
    flip = np.where(u[:, 6] < 0.5, -1.0, 1.0)
    # Of the photograph's side, for each pixel; the longer side of the frame shows `share` of it.
    step = share * view[:, 2] / max(pixels)
    middle = (u[:, 7:9] - 0.5) * (1 - share)[:, None]
    found = np.empty((len(u), 17))
    found[:, 0], found[:, 1] = flip * step * np.cos(angle), flip * step * np.sin(angle)
    found[:, 2], found[:, 3] = -step * np.sin(angle), step * np.cos(angle)
    # The pixel that shows the photograph's middle, from that of the frame.
    unit = min(pixels) / view[:, 2]
    turned = [
        (np.cos(angle) * flip * middle[:, 0] - np.sin(angle) * middle[:, 1]) / step,
        (np.sin(angle) * flip * middle[:, 0] + np.cos(angle) * middle[:, 1]) / step,
    ]
    found[:, 4] = pixels[1] / 2 - view[:, 0] * unit - turned[0]
    found[:, 5] = pixels[0] / 2 - view[:, 1] * unit - turned[1]
    # ASSUME: less turned than objects are, since a photograph has its own range of hues.
    hue = (u[:, 9] - 0.5) * 2 * math.pi
    found[:, 6:15] = _colours(hue, _between(u[:, 10], GROUND_SATURATION), _between(u[:, 11], GROUND_GAIN))
    found[:, 15], found[:, 16] = _between(u[:, 12], GAMMA), _between(u[:, 13], NOISE)
    begins, sides, _ = _levels(len(PHOTOGRAPHS), PHOTOGRAPH, LEAST_PHOTOGRAPH)
    level = np.clip(np.round(np.log2(step * PHOTOGRAPH)), 0, len(sides) - 1).astype(np.int64)
    first = _levels(len(objects.table().names), objects.CELL, LEAST)[2]
    begin = first + begins[level] + chosen * sides[level] ** 2
    return found.astype(np.float32), np.stack([begin, sides[level], drawn.keys], -1).astype(np.int32)


def _colours(hue, saturation, gain):
    """Matrices [..., 9] that turn hues about the grey axis, scale what is not grey, and all."""
    grey = np.full((3, 3), 1 / 3)
    # What the axis (1, 1, 1) / sqrt(3) turns.
    turn = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)
    cos, sin, saturation, gain = (np.asarray(x)[..., None, None] for x in (np.cos(hue), np.sin(hue), saturation, gain))
    turned = cos * np.eye(3) + (1 - cos) * grey + sin * turn
    muted = saturation * np.eye(3) + (1 - saturation) * _LUMA[None, :]
    return (gain * (muted @ turned)).reshape(*hue.shape, 9)


def _windows(places, lights, shown, pixels):
    """int32 [B, K, 4]: see `Listed`."""
    a, b, c, d = (places[..., at] for at in range(4))
    # The furthest corner of the cell, by the inverse of its map.
    reaches = (np.stack([np.abs(d) + np.abs(b), np.abs(c) + np.abs(a)], -1) / np.abs(a * d - b * c)[..., None]) / 2
    found = np.empty((*places.shape[:2], 4), np.int64)
    for axis, side in ((0, pixels[1]), (1, pixels[0])):
        middle, fall = places[..., 4 + axis], lights[..., 3 + axis]
        # A texel of the coarsest picture of a shadow reaches half of itself beyond its cell.
        reach = reaches[..., axis] * (1 + 1 / LEAST) + 1
        found[..., 2 * axis] = np.clip(np.floor(middle - reach + np.minimum(fall, 0)), 0, side)
        found[..., 2 * axis + 1] = np.clip(np.ceil(middle + reach + np.maximum(fall, 0)), 0, side)
    found[~shown] = 0
    return found.astype(np.int32)


@cache
def _known(novel):
    """``(objects, counts)``: of each class the objects that are novel, or are not, int64 [classes, …], and how many."""
    table = objects.table()
    found = [np.flatnonzero((table.labels == at) & (table.novel == novel)) for at in range(1, len(table.classes))]
    counts = np.array([len(known) for known in found])
    return np.stack([np.resize(known, counts.max()) for known in found]), counts


def _below(u, count):
    """Whole numbers 0..count - 1 of u in 0..1."""
    return (u * count).astype(np.int64)


def _between(u, span):
    return span[0] + (span[1] - span[0]) * u
