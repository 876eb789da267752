"""Streams to tiles: ports, capacity and the SRAM's cycles decide what shares one."""

from dataclasses import dataclass, replace

import numpy as np

from tilewright.pushmem import memories
from tilewright.pushmem.affine import fit
from tilewright.pushmem.errors import MappingError
from tilewright.pushmem.vectorise import Generator, Use, plan_dp, plan_pub


@dataclass(frozen=True)
class TileUse:
    """A tile: the signals at its inputs and outputs, the buffers it holds, and its controllers."""

    memory: str
    buffers: tuple[str, ...]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    controllers: dict[str, Generator]


def plan(memory: str, uses: list[Use]) -> dict[str, Generator] | None:
    """Controllers of one tile that serves `uses`, or None."""
    return plan_pub(uses) if memory == "pub" else plan_dp(uses)


def pack(memory: str, uses: tuple[Use, ...]) -> list[TileUse]:
    """Tiles for all `uses`, first fit with the largest first. Raises `MappingError` where a stream fits no tile."""
    tile = memories.member(memory).PARAMETERS
    parts = [
        replace(use, reads=use.reads[k : k + tile.outputs])
        for use in sorted(uses, key=lambda u: -len(u.reads))
        for k in range(0, len(use.reads), tile.outputs)
    ]
    parts.sort(key=lambda u: -len(u.reads))
    known: dict[tuple, dict[str, Generator] | None] = {}

    def plan_once(uses):
        key = tuple(
            a.tobytes() for u in uses for s in (u.write, *(r for _, r in u.reads)) for a in (s.times, s.addresses)
        )
        key = (tuple(len(u.reads) for u in uses), hash(key))
        if key not in known:
            known[key] = plan(memory, uses)
        return known[key]

    bins: list[list[Use]] = []
    plans: list[dict[str, Generator]] = []
    for part in parts:
        for b, held in enumerate(bins):
            outputs = len(part.reads) + sum(len(u.reads) for u in held)
            if len(held) < tile.inputs and outputs <= tile.outputs:
                joint = plan_once([*held, part])
                if joint is not None:
                    bins[b], plans[b] = [*held, part], joint
                    break
        else:
            alone = plan_once([part])
            if alone is None:
                raise MappingError(f"{part.buffer}: {_why(part, tile.levels)} on one {memory} tile")
            bins.append([part])
            plans.append(alone)
    return [
        TileUse(
            memory,
            tuple(u.buffer for u in held),
            tuple(u.source for u in held),
            tuple(t for u in held for t, _ in u.reads),
            controllers,
        )
        for held, controllers in zip(bins, plans, strict=True)
    ]


def _why(use: Use, levels: int) -> str:
    """What keeps a stream from a tile that it has for itself."""
    for stream in (use.write, *(s for _, s in use.reads)):
        found = fit(np.stack([stream.times, stream.addresses], axis=1), 2 * levels)
        if found is not None and len(found[0]) > levels:
            return f"{len(found[0])} loops after flattening; a controller has {levels}, and there is no schedule"
    return "no conflict-free affine schedule"
