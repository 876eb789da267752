"""Configurations of a mapped program's tiles: in closed form from the mapping, and from their streams alone."""

import numpy as np

from tilewright.pushmem import memories, recurrence, settings, solve
from tilewright.pushmem.mapping import Mapped
from tilewright.pushmem.pack import TileUse
from tilewright.pushmem.streams import DRAIN, Stream


def configuration(tile: TileUse) -> settings.Configuration:
    """The closed form: loops and strides of the mapping, modulo the widths of the tile."""
    memory = tile.member
    ports = memory.PARAMETERS.ports()
    controllers = {}
    for name in ports:
        if name in tile.controllers:
            known = tile.controllers[name]
            addresses = {what: affine.stored(ports[name].addresses[what]) for what, affine in known.addresses.items()}
            cycle = known.cycle.stored(settings.CYCLE_BITS)
            controllers[name] = settings.Controller(known.extents, cycle, addresses)
    made = settings.Configuration(tile.memory, controllers)
    made.check(memory)
    return made


def place(tile: TileUse) -> dict[str, int]:
    """The registers that tell a tile's place in a chain; none for a tile alone."""
    return {} if tile.chain is None else {"chain_index": tile.chain.index, "chain_mask": tile.chain.mask}


def configurations(mapped: Mapped) -> list[settings.Configuration]:
    """The closed form of every tile."""
    return [configuration(tile) for tile in mapped.tiles]


def stream(tile: TileUse) -> Stream:
    """What enters and leaves `tile`, words numbered from 1; no schedule inside the tile is told. No tile of a chain."""
    memory = memories.member(tile.memory)
    parameters = memory.PARAMETERS
    kinds = ("in2agg", "tb2out", 0) if tile.memory == "pub" else ("in2sram", "sram2out", 1)
    events = {n: g.cycle.at(g.extents, 62) for n, g in tile.controllers.items()}
    last = max(int(t.max()) for t in events.values()) + 2 + DRAIN
    data_in = np.zeros((last, parameters.inputs, 1), np.int64)
    valid_in = np.zeros((last, parameters.inputs), bool)
    token = 1
    for p in range(len(tile.sources)):
        times = events[f"{kinds[0]}{p}"]
        data_in[times, p, 0] = np.arange(token, token + len(times))
        valid_in[times, p] = True
        token += len(times)
    fired = recurrence.fired(configuration(tile), memory, last)
    run = memory.run(fired, data_in[:, :, 0])
    return Stream("top", data_in, valid_in, run.data_out[:, :, None], run.valid_out)


def from_streams(mapped: Mapped) -> list[solve.Found | None]:
    """What the configurator finds for every tile from its stream alone, by algebra. Equal streams are solved once.

    None for a tile that also delivers words that nobody takes, where a loop is rounded up: its stream is no example of
    what was meant. None for a tile of a chain: it delivers other tiles' words.
    """
    known: dict[bytes, solve.Found] = {}
    found: list[solve.Found | None] = []
    idle = {
        target
        for use in mapped.wiring.uses
        for target, read in use.reads
        if read.live is not None and not read.live.all()
    }
    for tile in mapped.tiles:
        if tile.chain is not None or idle.intersection(tile.targets):
            found.append(None)
            continue
        given = stream(tile)
        key = b"".join(a.tobytes() for a in (given.data_in, given.valid_in, given.data_out, given.valid_out))
        if key not in known:
            known[key] = solve.solve(given, memories.member(tile.memory), engine="fit", hardware=False)
        found.append(known[key])
    return found
