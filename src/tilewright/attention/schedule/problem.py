"""The scheduling problem: what each region needs with each option, and what a choice costs (stage T4).

An *option* is a tile and the length at which long blocks are split. The cost of a schedule follows from one table: how
many work items of each shape every round runs. `Problem.round_us` and `Problem.costs_us` alone define that cost.
Heuristics, solvers and predictions call them.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tilewright.attention.blocks import Blocks, work
from tilewright.attention.profile import ItemShape, Profile, SplitCosts
from tilewright.core.errors import ArtifactError, InfeasibleError
from tilewright.devices import Limits

OBJECTIVES = ("sum", "paper")
# Relative slack of limits on sums of floating-point needs, for the order in which they are added.
SLACK = 1 + 1e-9


@dataclass(frozen=True, eq=False)
class Problem:
    """Regions, options and shapes (B regions with work, S tiles, O options in tile order, K shapes of all
    options in their order, L launches).

    tiles: tile names [S]. tile_of: int [O], tile of each option. split_keys: int or None [O], its split length; the
        first option of a tile is the one that its profile names first. region: int [B], ids of the regions that have
        work.
    option_of: int [K], option of each shape. launch_of: int [K], launch of each shape: those of one tile and form share
        it, whatever their options. Launches are in the order of tiles, then of forms.
    latency_us, alone_us, launch_us, occupancy: float [K], per item in a full batch and alone, per launch, and units
        per item.
    tile_us: float [O], until an option's items fill the lanes of a round, and as they run out.
    envelope: ``{resource: float [S]}``, the largest need of an item of each tile (C5).
    counts: int [B, K], items of shape k that region b needs when it runs with option ``option_of[k]``.
    allowed: bool [B, O], options whose items all fit the per-block limits (C2).
    """

    tiles: tuple[str, ...]
    tile_of: np.ndarray
    split_keys: tuple[int | None, ...]
    region: np.ndarray
    option_of: np.ndarray
    launch_of: np.ndarray
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
    def of_option(self) -> np.ndarray:
        """bool [K, O]: which option each shape belongs to."""
        return self.option_of[:, None] == np.arange(self.n_options)

    @cached_property
    def of_launch(self) -> np.ndarray:
        """float [K, L]: 1 where a shape is of a launch."""
        return (self.launch_of[:, None] == np.arange(self.n_launches)).astype(float)

    @cached_property
    def launch_tile(self) -> np.ndarray:
        """int [L]: tile of each launch."""
        tile = np.zeros(self.n_launches, np.int64)
        tile[self.launch_of] = self.tile_of[self.option_of]
        return tile

    @cached_property
    def tile_of_launch(self) -> np.ndarray:
        """float [L, S]: 1 where a launch is of a tile."""
        return (self.launch_tile[:, None] == np.arange(len(self.tiles))).astype(float)

    @cached_property
    def each_launch_us(self) -> np.ndarray:
        """float [L]: `launch_us` of each launch."""
        cost = np.zeros(self.n_launches)
        cost[self.launch_of] = self.launch_us
        return cost

    @cached_property
    def load_us(self) -> np.ndarray:
        """float [B, O]: summed latency of a region's items."""
        return self.counts @ (self.of_option * self.latency_us[:, None])

    @cached_property
    def units(self) -> np.ndarray:
        """float [B, O]: summed occupancy of a region's items."""
        return self.counts @ (self.of_option * self.occupancy[:, None])

    @cached_property
    def longest_us(self) -> np.ndarray:
        """float [B, O]: a region's longest item, alone on the device."""
        present = np.where(self.counts > 0, self.alone_us, 0.0)
        return np.stack([present[:, here].max(axis=1, initial=0.0) for here in self.of_option.T], axis=1)

    @cached_property
    def fixed_us(self) -> np.ndarray:
        """float [B, O]: what a round takes beside its load where it runs this region with this option and no other."""
        launches = (self.counts > 0) @ (self.of_option * self.launch_us[:, None])
        return launches + self.tile_us + self.limits.round_us

    @property
    def n_regions(self) -> int:
        """Regions that have work."""
        return len(self.region)

    @property
    def n_options(self) -> int:
        """Pairs of a tile and a split length."""
        return len(self.tile_of)

    @property
    def n_launches(self) -> int:
        """Launches that a round may hold."""
        return int(self.launch_of.max(initial=-1)) + 1

    @property
    def has_splits(self) -> bool:
        """Whether some tile has several options."""
        return self.n_options > len(self.tiles)

    def first_options(self) -> "tuple[Problem, np.ndarray]":
        """The problem with the first option of each tile alone, and int [S], those options.

        Raises `InfeasibleError` where a region fits none of them.
        """
        first = np.flatnonzero(np.diff(self.tile_of, prepend=-1))
        if not self.allowed[:, first].any(axis=1).all():
            raise InfeasibleError("some region fits no tile at its first split length")
        keep = np.isin(self.option_of, first)
        _, launch_of = np.unique(self.launch_of[keep], return_inverse=True)
        of_shapes = {name: getattr(self, name)[keep] for name in ("latency_us", "alone_us", "launch_us", "occupancy")}
        only = replace(
            self,
            tile_of=self.tile_of[first],
            split_keys=tuple(self.split_keys[o] for o in first),
            option_of=np.searchsorted(first, self.option_of[keep]),
            launch_of=launch_of,
            tile_us=self.tile_us[first],
            counts=self.counts[:, keep],
            allowed=self.allowed[:, first],
            **of_shapes,
        )
        return only, first

    def table(self, option: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        """int [R, K]: work items of each shape and round when region b runs with ``option[b]`` in
        ``rounds[b]``."""
        chosen = np.where(self.option_of == np.asarray(option)[:, None], self.counts, 0)
        table = np.zeros((self.limits.rounds, len(self.option_of)), np.int64)
        np.add.at(table, np.asarray(rounds), chosen)
        return table

    def makespan_us(self, option: np.ndarray, rounds: np.ndarray) -> float:
        """Predicted makespan of an assignment, in microseconds.

        It is the sum, over the rounds used, of the duration T_r, one launch for each tile and form present, the cost of
        the round, and that of each tile beside its first.
        """
        return self.value(option, rounds, "sum")

    def value(self, option: np.ndarray, rounds: np.ndarray, objective: str) -> float:
        """The objective of an assignment: ``sum`` is the makespan, ``paper`` the longest round."""
        costs = self.costs_us(self.table(option, rounds), objective)
        return float(costs.sum() if objective == "sum" else costs.max())

    def costs_us(self, counts: np.ndarray, objective: str) -> np.ndarray:
        """float [R]: what each round that runs `counts` [R, K] adds to the objective ``sum``, else its duration T_r."""
        present = counts > 0
        if objective == "sum":
            launched = present.astype(float) @ self.of_launch > 0
            kinds = (launched @ self.tile_of_launch > 0).sum(axis=1)
            fixed = launched @ self.each_launch_us + self.limits.round_us * (kinds > 0)
            return self.round_us(counts) + fixed + self.limits.fork_us * np.maximum(kinds - 1, 0)
        return self.round_us(counts)

    def round_us(self, counts: np.ndarray) -> np.ndarray:
        """Durations T_r, float [R], of rounds that run `counts` [R, K] work items of each shape (C4).

        A round lasts as long as its longest item takes alone on the device, or as its load over the lanes plus the time
        that filling and emptying the lanes takes, whichever is larger. Options share the lanes, which are filled and
        emptied once: as the option does that takes longest for it.
        """
        longest = np.where(counts > 0, self.alone_us, 0.0).max(axis=1, initial=0.0)
        uneven_us = np.where(counts @ self.of_option > 0, self.tile_us, 0.0).max(axis=1, initial=0.0)
        return np.maximum(longest, counts @ self.latency_us / self.limits.lanes + uneven_us)

    def feasible(self, option: np.ndarray, rounds: np.ndarray) -> bool:
        """True when an assignment keeps C2, C3 and C5 to C7."""
        option, rounds = np.asarray(option), np.asarray(rounds)
        if not self.allowed[np.arange(self.n_regions), option].all():
            return False
        units = np.bincount(rounds, self.units[np.arange(self.n_regions), option], self.limits.rounds)
        kinds = np.zeros((self.limits.rounds, self.n_options), np.bool_)
        kinds[rounds, option] = True
        return bool((units <= self.limits.occupancy * SLACK).all()) and all(map(self.compatible, kinds))

    def compatible(self, options: np.ndarray) -> bool:
        """True when the tile kinds of `options` (bool [O]) may share a round (C3, C5, C7)."""
        kinds = np.bincount(self.tile_of[options], minlength=len(self.tiles)) > 0
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
    options: list[tuple[int, SplitCosts]] = []
    option_of: list[int] = []
    shapes: list[ItemShape] = []
    forms: list[tuple] = []
    launch: list[float] = []
    for s, (name, cover) in enumerate(blocks.items()):
        profile = profiles[name]
        for costs in profile.options.values():
            items = work.items(cover, costs.split_keys)
            _check_shapes(name, items, costs)
            counts = np.zeros((cover.n_regions, items.n_shapes), np.int64)
            np.add.at(counts, (cover.region[items.block], items.shape), 1)
            parts.append(counts)
            option_of += [len(options)] * items.n_shapes
            options.append((s, costs))
            shapes += costs.shapes
            forms += [(s, *form) for form in items.forms]
            launch += [profile.launch_us] * items.n_shapes
    counts, tile_of = np.concatenate(parts, axis=1), np.array([s for s, _ in options], np.int64)
    order = {form: number for number, form in enumerate(sorted(set(forms)))}
    region = np.flatnonzero(counts.any(axis=1))
    counts = counts[region]

    names = sorted({*limits.per_block, *limits.envelope})
    needs = {name: np.array([_need(shape, name) for shape in shapes], float) for name in names}
    fits = np.ones(len(shapes), bool)
    for name, most in limits.per_block.items():
        fits &= needs[name] <= most
    of_option = np.array(option_of, np.int64)
    excluded = np.zeros((len(region), len(options)), bool)
    for o in range(len(options)):
        excluded[:, o] = (counts[:, (of_option == o) & ~fits] > 0).any(axis=1)
    if excluded.all(axis=1).any():
        b = int(np.flatnonzero(excluded.all(axis=1))[0])
        raise InfeasibleError(_no_tile(region[b], counts[b], tuple(blocks), tile_of[of_option], needs, limits))
    envelope = {
        name: np.array([needs[name][(tile_of[of_option] == s) & fits].max(initial=0.0) for s in range(len(blocks))])
        for name in limits.envelope
    }
    return Problem(
        tiles=tuple(blocks),
        tile_of=tile_of,
        split_keys=tuple(costs.split_keys for _, costs in options),
        region=region,
        option_of=of_option,
        launch_of=np.array([order[form] for form in forms], np.int64),
        latency_us=np.array([shape.latency_us for shape in shapes], float),
        alone_us=np.array([shape.alone_us for shape in shapes], float),
        launch_us=np.array(launch, float),
        occupancy=np.array([shape.occupancy for shape in shapes], float),
        tile_us=np.array([costs.tile_us for _, costs in options], float),
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


def _check_shapes(name, items, costs):
    expected = items.forms
    found = [(shape.rows, shape.runs, shape.masked, shape.split) for shape in costs.shapes]
    latencies = [time for shape in costs.shapes for time in (shape.latency_us, shape.alone_us)]
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
