"""The scheduling problem: what each region needs with each tile, and what a choice costs (stage T4).

The cost of a schedule follows from one table: how many work items of each shape every round runs. `Problem.round_us`
and `Problem.costs_us` alone define that cost. Heuristics, solvers and predictions call them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tilewright.attention.blocks import Blocks, work
from tilewright.attention.profile import ItemShape, Profile
from tilewright.core.errors import ArtifactError, InfeasibleError
from tilewright.devices import Limits

OBJECTIVES = ("sum", "paper")
# Relative slack of limits on sums of floating-point needs, for the order in which they are added.
SLACK = 1 + 1e-9

Bools = NDArray[np.bool_]
Ints = NDArray[np.integer]
Floats = NDArray[np.floating]
# Tile and round of each region, ``(int [B], int [B])``.
Choice = tuple[Ints, Ints]


@dataclass(frozen=True, eq=False)
class Problem:
    """Regions, tiles and shapes (B regions with work, S tiles, K shapes of all tiles in their order).

    tiles: tile names [S]. region: int [B], ids of the regions that have work. tile_of: int [K], tile of each shape.
    latency_us, alone_us, launch_us, occupancy: float [K], per item in a full batch and alone, per launch, which runs
        the items of one shape in a round, and units per item.
    tile_us: float [S], until a tile's items fill the lanes of a round, and as they run out.
    envelope: ``{resource: float [S]}``, the largest need of an item of each tile (C5).
    counts: int [B, K], items of shape k that region b needs when it runs with tile ``tile_of[k]``.
    allowed: bool [B, S], tiles whose items all fit the per-block limits (C2).
    """

    tiles: tuple[str, ...]
    region: Ints
    tile_of: Ints
    latency_us: Floats
    alone_us: Floats
    launch_us: Floats
    occupancy: Floats
    tile_us: Floats
    envelope: dict[str, Floats]
    counts: Ints
    allowed: Bools
    limits: Limits

    @cached_property
    def of_tile(self) -> Bools:
        """bool [K, S]: which tile each shape belongs to."""
        return self.tile_of[:, None] == np.arange(self.n_tiles)

    @cached_property
    def load_us(self) -> Floats:
        """float [B, S]: summed latency of a region's items."""
        return self.counts @ (self.of_tile * self.latency_us[:, None])

    @cached_property
    def units(self) -> Floats:
        """float [B, S]: summed occupancy of a region's items."""
        return self.counts @ (self.of_tile * self.occupancy[:, None])

    @cached_property
    def longest_us(self) -> Floats:
        """float [B, S]: a region's longest item, alone on the device."""
        present = np.where(self.counts > 0, self.alone_us, 0.0)
        return np.stack([present[:, here].max(axis=1, initial=0.0) for here in self.of_tile.T], axis=1)

    @cached_property
    def fixed_us(self) -> Floats:
        """float [B, S]: what a round takes beside its load where it runs this region with this tile and no other."""
        launches = (self.counts > 0) @ (self.of_tile * self.launch_us[:, None])
        return launches + self.tile_us + self.limits.round_us

    @property
    def lower_bounds_us(self) -> dict[str, float]:
        """Lower bounds on any schedule: ``work``, ``longest``, ``launched``.

        work: the least load of each region, shared by the lanes. longest: the longest item, each region with the tile
            that keeps its longest item shortest. launched: `work`, and what the region that needs most beside it needs.
        """
        needs = self.load_us, self.longest_us, self.fixed_us
        least, longest, fixed = (np.where(self.allowed, each, np.inf).min(axis=1) for each in needs)
        work = float(least.sum() / self.limits.lanes)
        return {"work": work, "longest": float(longest.max()), "launched": work + float(fixed.max())}

    @cached_property
    def classes(self) -> tuple[Ints, Ints]:
        """``(first, member)`` of the classes of regions with equal counts, which are interchangeable: a region of each
        class, int [C], and the class of each region, int [B]."""
        _, first, member = np.unique(self.counts, axis=0, return_index=True, return_inverse=True)
        return first, member.reshape(-1)

    @property
    def n_regions(self) -> int:
        """Regions that have work."""
        return len(self.region)

    @property
    def n_tiles(self) -> int:
        """Tiles to choose from."""
        return len(self.tiles)

    def table(self, tile: Ints, rounds: Ints) -> Ints:
        """int [R, K]: work items of each shape and round when region b runs with ``tile[b]`` in ``rounds[b]``."""
        chosen = np.where(self.tile_of == np.asarray(tile)[:, None], self.counts, 0)
        table = np.zeros((self.limits.rounds, len(self.tile_of)), np.int64)
        np.add.at(table, np.asarray(rounds), chosen)
        return table

    def value(self, tile: Ints, rounds: Ints, objective: str = "sum") -> float:
        """The objective of an assignment in microseconds: ``sum`` is the makespan, ``paper`` the longest round."""
        costs = self.costs_us(self.table(tile, rounds), objective)
        return float(costs.sum() if objective == "sum" else costs.max())

    def costs_us(self, counts: NDArray, objective: str) -> Floats:
        """float [R]: what each round that runs `counts` [R, K] adds to the objective ``sum``, else its duration T_r."""
        if objective != "sum":
            return self.round_us(counts)
        present = counts > 0
        return self.round_us(counts) + present @ self.launch_us + self.limits.round_us * present.any(axis=1)

    def round_us(self, counts: NDArray) -> Floats:
        """Durations T_r, float [R], of rounds that run `counts` [R, K] work items of each shape (C4).

        A round lasts as long as its longest item takes alone on the device, or as its load over the lanes plus the time
        that filling and emptying the lanes takes, whichever is larger. Tiles share the lanes, which are filled and
        emptied once: as the tile does that takes longest for it.
        """
        longest = np.where(counts > 0, self.alone_us, 0.0).max(axis=1, initial=0.0)
        uneven_us = np.where(counts @ self.of_tile > 0, self.tile_us, 0.0).max(axis=1, initial=0.0)
        return np.maximum(longest, counts @ self.latency_us / self.limits.lanes + uneven_us)

    def compatible(self, kinds: Bools) -> bool:
        """True when the tiles `kinds` (bool [S]) may share a round (C3, C5)."""
        if kinds.sum() > self.limits.max_tile_kinds:
            return False
        return all(need[kinds].sum() <= self.limits.envelope[name] * SLACK for name, need in self.envelope.items())


def build(blocks: Mapping[str, Blocks], profiles: Mapping[str, Profile], limits: Limits) -> Problem:
    """Build the `Problem` of `blocks` ``{tile: Blocks}`` with `profiles` ``{tile: Profile}`` under `limits`.

    Raises `ArtifactError` when blocks and profiles do not belong together, `InfeasibleError` when some region
    fits no tile.
    """
    check_inputs(blocks, profiles)
    parts: list[Ints] = []
    tiles: list[int] = []
    shapes: list[ItemShape] = []
    launch: list[float] = []
    for s, (name, cover) in enumerate(blocks.items()):
        profile = profiles[name]
        items = work.items(cover, profile.split_keys)
        _check_shapes(name, items, profile)
        counts = np.zeros((cover.n_regions, items.n_shapes), np.int64)
        np.add.at(counts, (cover.region[items.block], items.shape), 1)
        parts.append(counts)
        tiles += [s] * items.n_shapes
        shapes += profile.shapes
        launch += [profile.launch_us] * items.n_shapes
    counts, tile_of = np.concatenate(parts, axis=1), np.array(tiles, np.int64)
    region = np.flatnonzero(counts.any(axis=1))
    counts = counts[region]

    names = sorted({*limits.per_block, *limits.envelope})
    needs = {name: np.array([_need(shape, name) for shape in shapes], float) for name in names}
    fits = np.ones(len(shapes), bool)
    for name, most in limits.per_block.items():
        fits &= needs[name] <= most
    excluded = np.stack([(counts[:, (tile_of == s) & ~fits] > 0).any(axis=1) for s in range(len(blocks))], axis=1)
    if excluded.all(axis=1).any():
        b = int(np.flatnonzero(excluded.all(axis=1))[0])
        raise InfeasibleError(_no_tile(region[b], counts[b], tuple(blocks), tile_of, needs, limits))
    envelope = {
        name: np.array([needs[name][(tile_of == s) & fits].max(initial=0.0) for s in range(len(blocks))])
        for name in limits.envelope
    }
    return Problem(
        tiles=tuple(blocks),
        region=region,
        tile_of=tile_of,
        latency_us=np.array([shape.latency_us for shape in shapes], float),
        alone_us=np.array([shape.alone_us for shape in shapes], float),
        launch_us=np.array(launch, float),
        occupancy=np.array([shape.occupancy for shape in shapes], float),
        tile_us=np.array([profiles[name].tile_us for name in blocks], float),
        envelope=envelope,
        counts=counts,
        allowed=~excluded,
        limits=limits,
    )


def check_inputs(blocks: Mapping[str, Blocks], profiles: Mapping[str, Profile]) -> None:
    """Raise `ArtifactError` unless `blocks` share a graph and its regions, and their profiles device and settings."""
    if not blocks or set(blocks) != set(profiles):
        raise ArtifactError(f"expected a profile for each of the tiles {sorted(blocks)}, found {sorted(profiles)}")
    first, reference = next(iter(blocks.values())), profiles[next(iter(blocks))]
    for name, cover in blocks.items():
        profile = profiles[name]
        if cover.tile.name != name or profile.tile != name:
            raise ArtifactError(f"tile {name}: found blocks of {cover.tile.name} and a profile of {profile.tile}")
        if cover.graph_id != first.graph_id or not np.array_equal(cover.region_ptr, first.region_ptr):
            raise ArtifactError(
                f"tile {name}: expected blocks of graph {first.graph_id} in {first.n_regions} regions, "
                f"found graph {cover.graph_id} in {cover.n_regions}"
            )
        if profile.blocks_id != cover.id:
            raise ArtifactError(f"tile {name}: the profile was made for blocks {profile.blocks_id}, found {cover.id}")
        for what in ("device_id", "split_keys", "heads", "head_dim", "dtype"):
            expected, found = getattr(reference, what), getattr(profile, what)
            if expected != found:
                raise ArtifactError(f"tile {name}: expected a profile with {what} {expected!r}, found {found!r}")


def _check_shapes(name, items, profile):
    expected = items.forms
    found = [(shape.rows, shape.runs, shape.masked, shape.split) for shape in profile.shapes]
    latencies = [time for shape in profile.shapes for time in (shape.latency_us, shape.alone_us)]
    if not all(0 < latency < np.inf for latency in latencies):
        raise ArtifactError(f"tile {name}: expected positive, finite latencies, found {latencies}")
    if expected != found:
        raise ArtifactError(
            f"tile {name}: expected a profile of the {len(expected)} shapes (rows, runs, masked, split) "
            f"{expected}, found {found}"
        )


def _need(shape, resource):
    try:
        return shape.resources[resource]
    except KeyError:
        raise ArtifactError(
            f"expected a profile that states {resource!r}, which the limits name; found {sorted(shape.resources)}"
        ) from None


def _no_tile(region, counts, tiles, tile_of, needs, limits):
    reasons = []
    for s, tile in enumerate(tiles):
        here = (tile_of == s) & (counts > 0)
        over = [
            f"{name} {needs[name][here].max():g} of at most {most:g}"
            for name, most in limits.per_block.items()
            if needs[name][here].max() > most
        ]
        reasons.append(f"{tile} needs {' and '.join(over)}")
    return f"region {region} fits no tile: {'; '.join(reasons)}; add a smaller tile or split blocks at fewer keys"
