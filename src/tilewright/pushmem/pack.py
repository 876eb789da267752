"""Streams to tiles: ports, capacity and the SRAM's cycles decide what shares one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilewright.pushmem import memories
from tilewright.pushmem.errors import MappingError
from tilewright.pushmem.fit import integers
from tilewright.pushmem.settings import Controller
from tilewright.pushmem.vectorise import Use, controller, plan_dp, plan_pub


@dataclass(frozen=True)
class Chain:
    """A tile's place among those that keep one buffer by address: tile ``address // capacity``, modulo a power of two.

    index: of the tile; count: of tiles. sources: the signals at its chain inputs, those of the tile before; the first
    tile has none.
    """

    index: int
    count: int
    sources: tuple[str, ...] = ()

    @property
    def mask(self) -> int:
        """The bits of an address' tile that count: addresses wrap behind a power of two of tiles."""
        return (1 << (self.count - 1).bit_length()) - 1


@dataclass(frozen=True)
class TileUse:
    """A tile: the signals at its inputs and outputs, the buffers it holds, its controllers and its place in a chain."""

    memory: str
    buffers: tuple[str, ...]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    controllers: dict[str, Controller]
    chain: Chain | None = None

    @property
    def member(self) -> memories.Memory:
        """The memory, as a tile of a chain where it is one."""
        return memories.member(self.memory) if self.chain is None else memories.chained(self.memory)


def plan(memory: str, uses: list[Use]) -> dict[str, Controller] | None:
    """Controllers of one tile that serves `uses`, or of every tile of a chain that serves one use; or None."""
    depth = memories.member(memory).PARAMETERS.depth * (Chain(0, uses[0].tiles).mask + 1)
    return plan_pub(uses, depth=depth) if memory == "pub" else plan_dp(uses, depth)


def pack(memory: str, uses: Sequence[Use], split: bool = False) -> list[TileUse]:
    """Tiles for all `uses`, first fit with the largest first. split: whether streams that fit no tile together get one
    each. Raises `MappingError` where a stream fits no tile."""
    tile = memories.member(memory).PARAMETERS
    parts = [
        replace(use, reads=use.reads[k : k + tile.outputs])
        for use in sorted(uses, key=lambda u: -len(u.reads))
        for k in range(0, len(use.reads), tile.outputs)
    ]
    parts.sort(key=lambda u: -len(u.reads))
    known: dict[tuple, dict[str, Controller] | None] = {}

    def plan_once(uses):
        key = tuple(
            a.tobytes() for u in uses for s in (u.write, *(r for _, r in u.reads)) for a in (s.times, s.addresses)
        )
        key = (tuple((len(u.reads), u.tiles) for u in uses), hash(key))
        if key not in known:
            known[key] = plan(memory, uses)
        return known[key]

    bins: list[list[Use]] = []
    plans: list[dict[str, Controller]] = []
    while parts:
        part = parts.pop(0)
        for b, held in enumerate(bins):
            outputs = len(part.reads) + sum(len(u.reads) for u in held)
            if max(u.tiles for u in (*held, part)) > 1:
                continue
            if len(held) < tile.inputs and outputs <= tile.outputs:
                joint = plan_once([*held, part])
                if joint is not None:
                    bins[b], plans[b] = [*held, part], joint
                    break
        else:
            alone = plan_once([part])
            if alone is None and split and len(part.reads) > 1:
                parts[:0] = [replace(part, reads=(read,)) for read in part.reads]
                continue
            if alone is None:
                raise MappingError(f"{part.buffer}: {_why(part, memory)}")
            bins.append([part])
            plans.append(alone)
    return [
        tile_use
        for held, controllers in zip(bins, plans, strict=True)
        for tile_use in _tiles(memory, held, controllers)
    ]


def _tiles(memory, held, controllers):
    """The tile of the uses `held`, or the tiles of a chain, in the order in which their outputs pass through."""
    targets = tuple(t for u in held for t, _ in u.reads)
    buffers, sources, count = tuple(u.buffer for u in held), tuple(u.source for u in held), held[0].tiles
    if count == 1:
        return [TileUse(memory, buffers, sources, targets, controllers)]
    passed = [tuple(f"{t}~{k}" for t in targets) for k in range(count - 1)]
    return [
        TileUse(memory, buffers, sources, out, controllers, Chain(k, count, before))
        for k, (before, out) in enumerate(zip([(), *passed], [*passed, targets], strict=True))
    ]


def _on(memory, use):
    return f"one {memory} tile" if use.tiles == 1 else f"a chain of {use.tiles} {memory} tiles"


def _why(use: Use, memory: str) -> str:
    """What keeps a stream from a tile that it has for itself: the stream, the cycle, and what would help."""
    tile, where = memories.member(memory).PARAMETERS, _on(memory, use)
    named = [("what comes in", use.write), *((f"output {target}", read) for target, read in use.reads)]
    for _, stream in named:
        found = integers(np.stack([stream.times, stream.addresses], axis=1), 2 * tile.levels)
        if found is not None and len(found[0]) > tile.levels:
            text = f"{len(found[0])} loops after flattening; a controller has {tile.levels}, and there is no schedule"
            return f"{text} on {where}"
    text = f"no conflict-free affine schedule on {where}"
    for name, stream in named:
        if controller(stream.times, address=stream.addresses) is None:
            at = int(stream.times[0])
            return f"{text}: {name}, from cycle {at} on, is not {tile.levels} loops; a box of other sides would help"
    # A wide word is filled, written, fetched, and goes out two cycles later.
    least = tile.fetch + 3 if memory == "pub" else 2
    for name, stream in named[1:]:
        came = _came(use.write, stream)
        live = True if stream.live is None else stream.live
        soon = np.flatnonzero((stream.times - came < least) & live)
        if len(soon):
            at, gap = int(stream.times[soon[0]]), int((stream.times - came)[soon[0]])
            return (
                f"{text}: {name} takes in cycle {at} a word that came {gap} cycles before, and one takes {least}; a "
                "threshold of registers above this distance would help"
            )
    at, targets = int(use.reads[0][1].times[0]), " and ".join(f"{t} (output {k})" for k, (t, _) in enumerate(use.reads))
    return (
        f"{text}: from cycle {at} on, writes of {use.source} and fetches for {targets} meet at the memory's one port, "
        "or need a row of its buffers twice; whole wide words in a row, or a stage that turns the image, would help"
    )


def _came(write, read):
    """The cycle in which each word of `read` was written, int64 [n]: the last before it is read."""
    far = 1 + max(int(write.times.max()), int(read.times.max()))
    known = np.sort(write.addresses.astype(np.int64) * far + write.times)
    found = known[np.maximum(0, np.searchsorted(known, read.addresses.astype(np.int64) * far + read.times) - 1)]
    return np.where(found // far == read.addresses, found % far, read.times)
