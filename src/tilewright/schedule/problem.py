"""The scheduling problem: what each region needs on each tile, and what a choice costs (stage T4).

The cost of a schedule follows from one table: how many work items of each shape every round runs.
`Problem.round_us` and `Problem.costs_us` alone define that cost. Heuristics, solvers and predictions call them.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tilewright.blocks import Blocks, work
from tilewright.core.errors import ArtifactError, InfeasibleError
from tilewright.profile import ItemShape, Profile
from tilewright.targets import Limits

OBJECTIVES = ("sum", "paper")
# Relative slack of limits on sums of floating-point needs, for the order in which they are added.
SLACK = 1 + 1e-9


@dataclass(frozen=True, eq=False)
class Problem:
    """Regions, tiles and shapes (B regions with work, S tiles, K shapes of all tiles in tile
    order).

    tiles: tile names [S]. region: int [B], ids of the regions that have work. tile_of: int [K], tile of each
        shape.
    latency_us, alone_us, launch_us, occupancy: float [K], per item in a full batch and alone, per launch, and units
        per item.
    tile_us: float [S], until a tile's items fill the lanes of a round, and as they run out.
    envelope: ``{resource: float [S]}``, the largest need of an item of each tile (C5).
    counts: int [B, K], items of shape k that region b needs when it runs on tile ``tile_of[k]``.
    allowed: bool [B, S], tiles whose items all fit the per-block limits (C2).
    """

    tiles: tuple[str, ...]
    region: np.ndarray
    tile_of: np.ndarray
    latency_us: np.ndarray
    alone_us: np.ndarray
    launch_us: np.ndarray
    occupancy: np.ndarray
    tile_us: np.ndarray
    envelope: dict[str, np.ndarray]
    counts: np.ndarray
    allowed: np.ndarray
    limits: Limits

    @cached_property
    def of_tile(self) -> np.ndarray:
        """bool [K, S]: which tile each shape belongs to."""
        return self.tile_of[:, None] == np.arange(len(self.tiles))

    @cached_property
    def load_us(self) -> np.ndarray:
        """float [B, S]: summed latency of a region's items."""
        return self.counts @ (self.of_tile * self.latency_us[:, None])

    @cached_property
    def units(self) -> np.ndarray:
        """float [B, S]: summed occupancy of a region's items."""
        return self.counts @ (self.of_tile * self.occupancy[:, None])

    @cached_property
    def longest_us(self) -> np.ndarray:
        """float [B, S]: a region's longest item, alone on the device."""
        present = np.where(self.counts > 0, self.alone_us, 0.0)
        return np.stack([present[:, here].max(axis=1, initial=0.0) for here in self.of_tile.T], axis=1)

    @property
    def n_regions(self) -> int:
        """Regions that have work."""
        return len(self.region)

    def table(self, tile: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        """int [R, K]: work items of each shape and round when region b runs on ``tile[b]`` in
        ``rounds[b]``."""
        chosen = np.where(self.tile_of == np.asarray(tile)[:, None], self.counts, 0)
        table = np.zeros((self.limits.rounds, len(self.tile_of)), np.int64)
        np.add.at(table, np.asarray(rounds), chosen)
        return table

    def makespan_us(self, tile: np.ndarray, rounds: np.ndarray) -> float:
        """Predicted makespan of an assignment, in microseconds.

        It is the sum, over the rounds used, of the duration T_r, one launch for each shape present, and the cost
        of the round.
        """
        return self.value(tile, rounds, "sum")

    def value(self, tile: np.ndarray, rounds: np.ndarray, objective: str) -> float:
        """The objective of an assignment: ``sum`` is the makespan, ``paper`` the longest round."""
        costs = self.costs_us(self.table(tile, rounds), objective)
        return float(costs.sum() if objective == "sum" else costs.max())

    def costs_us(self, counts: np.ndarray, objective: str) -> np.ndarray:
        """float [R]: what each round that runs `counts` [R, K] adds to the objective ``sum``, else its duration T_r."""
        present = counts > 0
        if objective == "sum":
            fixed = present @ self.launch_us + self.limits.round_us * present.any(axis=1)
            return self.round_us(counts) + fixed
        return self.round_us(counts)

    def round_us(self, counts: np.ndarray) -> np.ndarray:
        """Durations T_r, float [R], of rounds that run `counts` [R, K] work items of each shape (C4).

        A round lasts as long as its longest item takes alone on the device, or as its load over the lanes plus the time
        that filling and emptying the lanes takes, whichever is larger.
        """
        longest = np.where(counts > 0, self.alone_us, 0.0).max(axis=1, initial=0.0)
        uneven_us = (counts @ self.of_tile > 0) @ self.tile_us
        return np.maximum(longest, counts @ self.latency_us / self.limits.lanes + uneven_us)

    def feasible(self, tile: np.ndarray, rounds: np.ndarray) -> bool:
        """True when an assignment keeps C2, C3 and C5 to C7."""
        tile, rounds = np.asarray(tile), np.asarray(rounds)
        if not self.allowed[np.arange(self.n_regions), tile].all():
            return False
        units = np.bincount(rounds, self.units[np.arange(self.n_regions), tile], self.limits.rounds)
        kinds = np.zeros((self.limits.rounds, len(self.tiles)), np.bool_)
        kinds[rounds, tile] = True
        return bool((units <= self.limits.occupancy * SLACK).all()) and all(map(self.compatible, kinds))

    def compatible(self, kinds: np.ndarray) -> bool:
        """True when the tile kinds `kinds` (bool [S]) may share a round (C3, C5, C7)."""
        if kinds.sum() > self.limits.max_tile_kinds:
            return False
        if any(need[kinds].sum() > self.limits.envelope[name] * SLACK for name, need in self.envelope.items()):
            return False
        return not any(kinds[a] and kinds[b] for a, b in self.conflicts)

    @property
    def conflicts(self) -> list[tuple[int, int]]:
        """Index pairs of the tiles of this problem that conflict. Pairs that name other tiles are left out."""
        index = {name: s for s, name in enumerate(self.tiles)}
        return [(index[a], index[b]) for a, b in self.limits.conflicts if a in index and b in index]


def build(blocks: dict[str, Blocks], profiles: dict[str, Profile], limits: Limits) -> Problem:
    """Build the `Problem` of `blocks` ``{tile: Blocks}`` with `profiles` ``{tile: Profile}`` under `limits`.

    Raises `ArtifactError` when blocks and profiles do not belong together, `InfeasibleError` when some region
    fits no tile.
    """
    check_inputs(blocks, profiles)
    parts: list[np.ndarray] = []
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
    excluded = np.zeros((len(region), len(blocks)), bool)
    for s in range(len(blocks)):
        excluded[:, s] = (counts[:, (tile_of == s) & ~fits] > 0).any(axis=1)
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


def check_inputs(blocks: dict[str, Blocks], profiles: dict[str, Profile]) -> None:
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
    shapes = zip(items.shape_rows, items.shape_runs, items.shape_masked, items.shape_split, strict=True)
    expected = [(int(r), int(u), bool(m), bool(p)) for r, u, m, p in shapes]
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
