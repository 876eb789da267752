"""Planted attention maps: queries and keys of a video's tokens whose maps have a known structure and density.

A query is ``s * R_i(sqrt(E) u + sqrt(1 - E) e_o(i)) + noise``, a key likewise; R is the 3-D rotary embedding of video
transformers (Wan 2.1), u a direction of the head, e_o one of the object that covers the token. Energy of u in the
bands of an axis makes attention local along it: in time a spatial head, in rows and columns a temporal one, in all a
local one. e_o lies in the slowest bands, which hardly turn across the grid: a head of content. The strength s, which
scales both parts, is found by bisection so that the map has the density that is asked for.

Such maps say how fast sparse attention of a given density is. They say nothing about what trained networks attend to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from tilewright.core import registry
from tilewright.core.errors import PatternError
from tilewright.slices import orders
from tilewright_study.measure import slice_shares

# Energy in the bands of frames, rows and columns, and in objects.
KINDS = {
    "local": (1 / 3, 1 / 3, 1 / 3, 0.0),
    "spatial": (0.7, 0.15, 0.15, 0.0),
    "temporal": (0.2, 0.4, 0.4, 0.0),
    "content": (0.1, 0.1, 0.1, 0.7),
}
# Base of the rotary frequencies (Wan 2.1).
THETA = 1e4
# A band is slow where it turns by less than this angle, in radians, across the grid.
SLOW = 0.5
# ASSUME: the parts of a scene, moving ones over those at rest. About as many as things in a shot.
MOVING, RESTING = 12, 8
# Share of the volume in which a share of the attention of HunyuanVideo lies (STA, arXiv 2502.04507).
STA_VOLUME, STA_MASS = 0.155, 0.70
# Groups and queries on which a density is measured, the largest strength, and steps of bisection.
GROUPS, QUERIES, STRONGEST, STEPS = 16, 256, 64.0, 12


@dataclass(frozen=True)
class Head:
    """A head to plant.

    kind: of `KINDS`. density: share of the keys that the best lists of groups of 128 queries, in the order
    ``hilbert``, keep on average for `recall` of each group's attention. window: density is instead that of a 3-D window
    around each query, and recall the mean share of attention inside it.
    """

    kind: str
    density: float
    recall: float = 0.95
    window: bool = False


# What `mixed` plants, in turn: every kind, every density, and a head as STA found them.
HEADS = (
    *(Head("local", 0.1), Head("content", 0.2), Head("local", STA_VOLUME, STA_MASS, window=True)),
    *(Head("temporal", 0.4), Head("spatial", 0.2), Head("content", 0.1), Head("temporal", 0.1), Head("local", 0.05)),
    *(Head("spatial", 0.05), Head("content", 0.4), Head("temporal", 0.2), Head("spatial", 0.4)),
)


@dataclass(frozen=True)
class Planted:
    """q, k, v: float32 [1, H, tokens, D], tokens in raster order. strengths: of the heads. objects: int64 [tokens]."""

    q: Tensor
    k: Tensor
    v: Tensor
    heads: tuple[Head, ...]
    strengths: tuple[float, ...]
    objects: Tensor


def mixed(count: int) -> tuple[Head, ...]:
    """`count` heads of all sorts, as `HEADS` has them."""
    return tuple(HEADS[at % len(HEADS)] for at in range(count))


def tokens(
    grid: tuple[int, int, int],
    head_dim: int,
    heads: Sequence[Head],
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    rows: int = 128,
    noise: float = 1.0,
) -> Planted:
    """Queries, keys and values of a `grid` of (frames, rows, columns) with one attention map for each of `heads`.

    rows: queries of a group. noise: standard deviation of what is added to each value. Values are standard normal. What
    is drawn depends on the seed alone; strengths may differ in the last digits between devices, as their products do.

    Raises `UnknownNameError` for a kind, and `PatternError` for a density that the kind does not reach on this grid.
    """
    for head in heads:
        registry.check("kind of head", head.kind, KINDS)
    generator = torch.Generator().manual_seed(seed)
    angles = _angles(grid, head_dim)
    objects = _objects(grid, generator)
    order = torch.from_numpy(orders.hilbert(grid))
    found = []
    for head in heads:
        signal = _signal(head.kind, angles, objects, generator)
        q_noise, k_noise, v = (torch.randn(len(objects), head_dim, generator=generator) for _ in range(3))
        drawn = [x.to(device) for x in (signal, noise * q_noise, noise * k_noise, v)]
        found.append(_planted(head, grid, drawn, order.to(device), rows))
    q, k, v = (torch.stack([made[at] for made in found])[None] for at in range(3))
    return Planted(q, k, v, tuple(heads), tuple(made[3] for made in found), objects)


def with_text(made: Planted, first: int, last: int, *, seed: int = 0) -> Planted:
    """`made` with so many tokens of text before and behind those of the grid, in no object, -1.

    Their queries, keys and values are standard normal.
    """
    # ASSUME: a key of text gets as much attention as one that a query has nothing to do with.
    generator = torch.Generator().manual_seed(seed + 1)

    def joined(x: Tensor) -> Tensor:
        drawn = torch.randn(*x.shape[:2], first + last, x.shape[3], generator=generator).to(x.device)
        return torch.cat([drawn[:, :, :first], x, drawn[:, :, first:]], 2)

    objects = torch.nn.functional.pad(made.objects, (first, last), value=-1)
    return replace(made, q=joined(made.q), k=joined(made.k), v=joined(made.v), objects=objects)


def window(grid: tuple[int, int, int], volume: float) -> tuple[int, int, int]:
    """Sides of the 3-D window whose share of the grid is nearest to `volume`, shaped like the grid."""
    sides = [volume ** (1 / 3) * size for size in grid]
    near = [{max(1, int(side)), min(size, int(side) + 1)} for side, size in zip(sides, grid, strict=True)]
    t, h, w = min(product(*map(sorted, near)), key=lambda box: abs(_volume(box) / _volume(grid) - volume))
    return t, h, w


def window_mass(q: Tensor, k: Tensor, queries: Tensor, grid: tuple[int, int, int], sides: Sequence[int]) -> Tensor:
    """float32 [len(queries)]: share of their attention inside the window with these sides around each, which is moved
    into the grid at its edges. q, k: [tokens, D] in raster order."""
    shares = torch.softmax(q[queries] @ k.mT * q.shape[-1] ** -0.5, -1)
    inside = torch.ones(1, dtype=torch.bool, device=q.device)
    for axis, (size, side) in enumerate(zip(grid, sides, strict=True)):
        places = _places(grid)[:, axis].to(q.device)
        first = (places[queries] - side // 2).clamp(0, size - side)[:, None]
        inside = inside & (places >= first) & (places < first + side)
    return (shares * inside).sum(-1)


def _planted(head, grid, drawn, order, rows):
    """``(q, k, v, strength)`` of one head, tokens in raster order. drawn: the signal, two noises and the values."""
    signal, q_noise, k_noise, v = drawn

    def at(strength: float) -> tuple[Tensor, Tensor]:
        return strength * signal + q_noise, strength * signal + k_noise

    if head.window:
        sides = window(grid, head.density)
        queries = _spread(len(signal), QUERIES, signal.device)

        def short(strength):
            q, k = at(strength)
            return float(window_mass(q, k, queries, grid, sides).mean()) < head.recall
    else:
        groups = _spread(-(-len(signal) // rows), GROUPS, signal.device)

        def short(strength):
            q, k = at(strength)
            shares = slice_shares.group_shares(q[order], k[order], groups, rows=rows)
            return float(slice_shares.Ranked(shares).counts(head.recall).double().mean()) > head.density * len(signal)

    strength = _least(short, head)
    return *at(strength), v, strength


def _least(short: Callable[[float], bool], head: Head) -> float:
    """The least strength that is not too `short`, of a sequence of halved intervals."""
    low, high = 0.0, STRONGEST
    if short(high):
        raise PatternError(f"{head}: expected a density that this kind reaches on this grid; choose a larger one")
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if short(middle) else (low, middle)
    return high


def _spread(count: int, some: int, device) -> Tensor:
    """int64: `some` of `count` numbers, or all, evenly spread."""
    return torch.linspace(0, count - 1, min(some, count), dtype=torch.float64).round().long().to(device)


def _volume(box: Sequence[int]) -> int:
    t, h, w = box
    return t * h * w


def _places(grid: tuple[int, int, int]) -> Tensor:
    """int64 [tokens, 3]: frame, row and column of each token."""
    return torch.cartesian_prod(*map(torch.arange, grid)).reshape(-1, 3)


def _bands(head_dim: int) -> tuple[int, int, int]:
    """Pairs of values that turn with the frame, the row and the column: 22, 21 and 21 of a head dim of 128."""
    side = head_dim // 6
    return head_dim // 2 - 2 * side, side, side


def _angles(grid: tuple[int, int, int], head_dim: int) -> Tensor:
    """float64 [tokens, D / 2]: by how much each pair of values is turned, in radians."""
    if head_dim % 2 or head_dim < 12:
        raise PatternError(f"head dim: expected an even number of at least 12, found {head_dim}")
    places = _places(grid).double()
    turns = [THETA ** -(torch.arange(pairs, dtype=torch.float64) / pairs) for pairs in _bands(head_dim)]
    return torch.cat([places[:, axis, None] * turn for axis, turn in enumerate(turns)], 1)


def _signal(kind: str, angles: Tensor, objects: Tensor, generator: torch.Generator) -> Tensor:
    """float32 [tokens, D]: the part of queries and keys that the noise is added to, rows of length about 1."""
    *axes, content = KINDS[kind]
    # Bands that turn little across the grid are for the objects.
    widest = angles.amax(0)
    energy = torch.zeros_like(widest)
    for axis, (share, band) in enumerate(zip(axes, energy.split(_bands(2 * len(energy))), strict=True)):
        weight = torch.rand(len(band), generator=generator, dtype=torch.float64)
        turning = widest.split(_bands(2 * len(energy)))[axis].clamp_max(1) + 1e-9
        band += share * weight * turning / (weight * turning).sum()
    direction = energy.sqrt() * _phases(energy.shape, generator)
    slow = torch.where(widest < SLOW, 1.0, 0.0)
    drawn = torch.randn(MOVING + RESTING, len(slow), 2, generator=generator, dtype=torch.float64)
    named = torch.view_as_complex(drawn) * slow
    named = named / torch.linalg.vector_norm(named, dim=1, keepdim=True)
    turned = (direction + content**0.5 * named[objects]) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(1).float()


def _phases(shape, generator: torch.Generator) -> Tensor:
    """complex128: numbers of length 1."""
    angle = 2 * torch.pi * torch.rand(shape, generator=generator, dtype=torch.float64)
    return torch.polar(torch.ones_like(angle), angle)


def _objects(grid: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """int64 [tokens]: which part of a scene covers each token; discs that move, over a ground in regions."""

    def drawn(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    places = _places(grid).double()
    time = places[:, :1] / max(grid[0] - 1, 1)
    # In heights of a frame, so that discs are round.
    plane, extent = places[:, 1:] / grid[1], torch.tensor([1.0, grid[2] / grid[1]], dtype=torch.float64)
    ground = torch.cdist(plane, drawn(RESTING, 2) * extent).argmin(1)
    starts, ends, radii = drawn(MOVING, 2) * extent, drawn(MOVING, 2) * extent, 0.08 + 0.14 * drawn(MOVING)
    for disc in range(MOVING):
        centre = starts[disc] + time * (ends[disc] - starts[disc])
        covered = (plane - centre).square().sum(1) < radii[disc] ** 2
        ground = torch.where(covered, RESTING + disc, ground)
    return ground
