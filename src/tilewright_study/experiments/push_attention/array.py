"""Windowed attention on push memories: K and V banked by dimension, a bank a tile, all with the same controllers.

A pass holds G queries in the PEs and streams their keys by, one a cycle. ``longformer``: Vision Longformer's chunks of
f × f tokens; a query sees its own chunk and the eight around it. The bank is a ring of 32 rows of the image; a chunk's
row of f words is padded to a multiple of the fetch width. ``regionvit``: windows with their regional token, two of them
in the bank at a time, then the regional tokens among themselves. The oracle of both is the graph of stage T1.
"""

from dataclasses import dataclass

import numpy as np

from tilewright.graph import Graph
from tilewright.pushmem import memories, recurrence, settings
from tilewright.pushmem.errors import MappingError
from tilewright.pushmem.mapping import PES
from tilewright.pushmem.settings import Controller, generate
from tilewright.pushmem.vectorise import Stream, Use, controller, plan_pub, read_choices, write_choices

RING_ROWS = 32
MHZ = 900
FETCH = 4
# No image holds it: what a delivery outside of it is.
OUTSIDE = -1


@dataclass(frozen=True)
class Layer:
    """A layer of attention on the array.

    tiles: for K and V. cycles: to the last delivery. cycles_global: with the global token. bound: cycles of the
    multiply-adds alone. inputs: for each port of a bank the cycles and keys that enter. outputs: for each port the
    cycles and keys of all deliveries, `OUTSIDE` where one is masked. passes: queries and keys of every pass.
    """

    name: str
    configuration: settings.Configuration
    tiles: int
    cycles: int
    cycles_global: int
    bound: int
    inputs: tuple[tuple[np.ndarray, np.ndarray], ...]
    outputs: tuple[tuple[np.ndarray, np.ndarray], ...]
    passes: tuple[tuple[np.ndarray, np.ndarray], ...]
    heads: int

    @property
    def milliseconds(self) -> float:
        """At the clock of the array, with the global token."""
        return self.cycles_global / MHZ / 1e3


def layer(meta: dict) -> Layer:
    """The `Layer` of a graph with the meta data `meta`. Raises `MappingError` for a graph without windows."""
    makers = {"vision_longformer": longformer, "regionvit": regionvit}
    if meta.get("family") not in makers or "window" not in meta:
        raise MappingError(
            f"{meta.get('model', 'a graph')}: expected attention in windows, of the families {', '.join(makers)}; "
            f"found one of {meta.get('family')}"
        )
    return makers[meta["family"]](meta)


def queries_a_pass(head_dim: int, pes: int = PES) -> int:
    """G: a query takes `head_dim` PEs for its logits and as many for its sum."""
    # ASSUME: a PE makes one multiply-add a cycle.
    return pes // (2 * head_dim)


def longformer(meta: dict) -> Layer:
    """Vision Longformer's stage whose graph has the meta data `meta`.

    Raises `MappingError` where the ring is larger than a bank.
    """
    height, width = meta["grid"]
    side, dim, heads = meta["window"] // 2, meta["head_dim"], meta["heads"]
    if height % side or width % side:
        raise MappingError(f"chunks of {side} do not cover a grid of {height} x {width}; expected a multiple")
    rows, columns = height // side, width // side
    padded = -(-side // FETCH) * FETCH
    pitch = columns * padded
    memory = memories.member("pub")
    words = memory.PARAMETERS.depth * memory.PARAMETERS.fetch
    if RING_ROWS * pitch > words or 4 * side > RING_ROWS:
        raise MappingError(
            f"a ring of {max(RING_ROWS, 4 * side)} rows of {pitch} words is larger than a bank of {words}; "
            f"strips of {words // max(RING_ROWS, 4 * side) // padded} chunks would fit"
        )
    group = queries_a_pass(dim)
    passes = -(-(side * side) // group)
    span = 3 * side
    extents = (side, 3, span, passes, columns, rows)
    time = [1]
    for e in extents[:-1]:
        time.append(time[-1] * e)
    addresses = generate(extents, (1, padded, pitch, 0, padded, side * pitch), -side * pitch - padded)
    born, where = [], []
    for chunk_rows, start in ((1, 0), (rows - 1, 1)):
        shape = (side, columns, side, chunk_rows)
        born.append(generate(shape, (1, side, side * columns, time[5])))
        where.append(generate(shape, (1, padded, pitch, side * pitch), start * side * pitch))
    column, chunk, row, _, x, y = (generate(extents, [int(k == d) for k in range(6)]) for d in range(6))
    key_y, key_x = (y - 1) * side + row, (x - 1 + chunk) * side + column
    inside = (key_y >= 0) & (key_y < height) & (key_x >= 0) & (key_x < width)
    controllers, begin = _ring(born, where, generate(extents, time), addresses, inside.reshape(-1, side)[:, 0])
    tokens = []
    for (chunk_rows, first), t in zip(((1, 0), (rows - 1, 1)), born, strict=True):
        shape = (side, columns, side, chunk_rows)
        key = generate(shape, (1, side, width, side * width), first * side * width)
        tokens.append((t, meta["n_global"] + key))
    keys = np.where(inside, meta["n_global"] + key_y * width + key_x, OUTSIDE).reshape(-1, side * 3 * span)
    query = np.arange(passes * group)
    query = np.where(query < side * side, query, OUTSIDE).reshape(passes, group)
    base = (np.arange(rows)[:, None] * side * width + np.arange(columns) * side).ravel()[:, None, None]
    local = np.where(query >= 0, query // side * width + query % side, 0)
    queries = np.where(query >= 0, meta["n_global"] + base + local, OUTSIDE).reshape(-1, group)
    times = generate(extents, time, begin)
    cycles = int(times[-1]) + 1
    # The global key waits in registers: one more cycle for every G queries. The global query has a pass of its own.
    extra = meta["n_global"] * (-(-height * width // group) + height * width + meta["n_global"])
    macs = height * width * 9 * side * side * 2 * dim
    return Layer(
        meta["model"], _configuration(controllers), 2 * dim, heads * cycles, heads * (cycles + extra),
        heads * macs // PES, tuple(tokens), ((times, keys.ravel()),), _passes(queries, keys), heads,
    )  # fmt: skip


def _ring(born, where, read_at, addresses, live):
    """Controllers of a bank with two writers and one reader, the writers' start cycles, and that of the reader.

    Least start of the reader first. All strides but the innermost are multiples of the chunk's side, so that accesses
    that differ modulo it never meet. live: whether a row of a chunk lies within the image.
    """
    period = len(read_at) // len(live)
    steps = [write_choices(Stream(t, a), FETCH)[0] for t, a in zip(born, where, strict=True)]
    found = []
    for read in read_choices(Stream(read_at, addresses), FETCH):
        # The cycles from a fetch, at its base, to the end of the write that it waits for.
        waits = []
        for step in steps:
            there = np.full(max(int(read.wide.max()), int(step.wide.max())) + 1, -(1 << 40))
            there[step.wide] = step.base
            used = np.repeat(live, len(read.wide) // len(live)) & (read.wide >= 0)
            waits.append(int(np.where(used, there[read.wide] - read.base, -(1 << 40)).max()) + 1)
        for offset in range(read.low, read.high + 1):
            for first in range(steps[0].low, steps[0].high + 1):
                for second in range(steps[1].low, steps[1].high + 1):
                    least = max(waits[0] + first, waits[1] + second, -int(read.base[0])) - offset
                    found += [(least + k, offset, first, second, read) for k in range(period)]
    for begin, offset, first, second, read in sorted(found, key=lambda f: f[0]):
        writes, fetched = [steps[0].base + first, steps[1].base + second], read.base + begin + offset
        phases = [np.unique(t[:64] % period) for t in (fetched, *writes)]
        if begin < 0 or len(np.unique(np.concatenate(phases))) < sum(map(len, phases)):
            continue
        made = _bank(born, where, steps, writes, read, fetched, read_at + begin)
        if made:
            return made, begin
    raise MappingError("no conflict-free schedule of the bank's ports")


def _bank(born, where, steps, writes, read, fetched, read_at):
    made: dict[str, Controller | None] = {}
    for p, (t, a, step, w) in enumerate(zip(born, where, steps, writes, strict=True)):
        run = np.cumsum(np.r_[False, np.diff(a // FETCH) != 0])
        made[f"in2agg{p}"] = controller(t, agg=run * FETCH + a % FETCH)
        made[f"agg2sram{p}"] = controller(w, agg_row=np.arange(len(w)), sram=step.wide)
    made["sram2tb0"] = controller(fetched, sram=read.wide, tb_row=np.arange(len(fetched)))
    made["tb2out0"] = controller(read_at, tb=read.template[1])
    return None if None in made.values() else made


def _configuration(controllers) -> settings.Configuration:
    from tilewright.pushmem.configuration import configuration
    from tilewright.pushmem.pack import TileUse

    return configuration(TileUse("pub", ("bank",), (), (), controllers))


def regionvit(meta: dict) -> Layer:
    """RegionViT's stage whose graph has the meta data `meta`: regional tokens first, then patches in raster order."""
    width = meta["grid"][1]
    side, dim, heads, regions = meta["window"], meta["head_dim"], meta["heads"], meta["n_regional"]
    group = queries_a_pass(dim)
    size = side * side + 1
    passes, regional_passes = -(-size // group), -(-regions // group)
    padded = -(-size // FETCH) * FETCH
    windows = heads * regions
    period = passes * size
    begin = 8
    extents = (size, windows)
    born = generate(extents, (1, period))
    where = generate(extents, (1, padded))
    read_extents = (size, passes, windows)
    reading = generate(read_extents, (1, size, period), begin)
    read_where = generate(read_extents, (1, 0, padded))
    late = windows * period
    padded_regions = -(-regions // FETCH) * FETCH
    own = generate((regions, heads), (1, regions * regional_passes), late)
    own_where = generate((regions, heads), (1, padded_regions))
    own_extents = (regions, regional_passes, heads)
    own_reading = generate(own_extents, (1, regions, regions * regional_passes), late + begin)
    own_read_where = generate(own_extents, (1, 0, padded_regions))
    uses = [
        Use("windows", "keys", Stream(born, where), (("windows", Stream(reading, read_where)),)),
        Use("regional", "keys", Stream(own, own_where), (("regional", Stream(own_reading, own_read_where)),)),
    ]
    controllers = plan_pub(uses)
    if controllers is None:
        raise MappingError("no conflict-free schedule of the bank's ports")
    columns = width // side
    member = np.arange(side * side)
    place = np.arange(regions)
    corner = place // columns * side * width + place % columns * side
    patches = regions + corner[:, None] + (member // side * width + member % side)[None, :]
    keys_of = np.concatenate([place[:, None], patches], axis=1)
    all_keys = np.tile(keys_of, (heads, 1))
    query = np.full((regions, passes * group), OUTSIDE)
    query[:, :size] = keys_of
    window_queries = np.tile(query.reshape(-1, group), (heads, 1))
    delivered = np.repeat(all_keys, passes, axis=0)
    own_query = np.full(regional_passes * group, OUTSIDE)
    own_query[:regions] = place
    own_queries = np.tile(own_query.reshape(-1, group), (heads, 1))
    own_keys = np.tile(place, (heads * regional_passes, 1))
    cycles = int(own_reading[-1]) + 1
    macs = 2 * heads * dim * (regions * size * size + regions * regions)
    inputs = ((born, all_keys.ravel()), (own, np.tile(place, heads)))
    outputs = ((reading, delivered.ravel()), (own_reading, np.tile(place, heads * regional_passes)))
    return Layer(
        meta["model"], _configuration(controllers), 2 * dim, cycles, cycles, macs // PES,
        inputs, outputs, _passes(window_queries, delivered) + _passes(own_queries, own_keys), heads,
    )  # fmt: skip


def _passes(queries, keys):
    """Queries and keys of each pass, without those that are not there."""
    return tuple((q[q != OUTSIDE], k[k != OUTSIDE]) for q, k in zip(queries, keys, strict=True))


@dataclass(frozen=True)
class Delivery:
    """What a bank delivered. wrong: deliveries that are not the key due. deliveries: those that are not masked."""

    deliveries: int
    wrong: int
    conflicts: int
    words: int


def deliver(layer: Layer, hardware: bool = False) -> Delivery:
    """Run one bank with keys as words, on the model of the tile or on its RTL."""
    memory = memories.member("pub")
    cycles = max(int(t[-1]) for t, _ in layer.outputs) + 65
    data = np.zeros((cycles, 2), np.int64)
    for p, (times, keys) in enumerate(layer.inputs):
        # Key 0 differs from what an unwritten word is.
        data[times, p] = keys + 1
    fired = recurrence.fired(layer.configuration, memory, cycles)
    accesses = np.concatenate([fired[n][0] for n in memory.PARAMETERS.priority()])
    conflicts = len(accesses) - len(np.unique(accesses))
    if hardware:
        from tilewright.pushmem.rtl import Tile

        run = Tile(memory).run(layer.configuration, data)
    else:
        run = memory.run(fired, data, strict=False)
    deliveries = wrong = 0
    for p, (times, keys) in enumerate(layer.outputs):
        due = keys != OUTSIDE
        found = run.data_out[times, p] - 1
        wrong += int((found[due] != keys[due]).sum()) + int((~run.valid_out[times, p]).sum())
        wrong += int(run.valid_out[:, p].sum()) - len(times)
        deliveries += int(due.sum())
    return Delivery(deliveries, wrong, conflicts, sum(len(t) for t, _ in layer.inputs))


def rows_that_differ(layer: Layer, graph: Graph, extra: np.ndarray) -> int:
    """Queries whose delivered keys, with the keys `extra` that wait in registers, are not their row of `graph`.

    Queries in `extra` have a pass of their own over all keys. Every head has the same passes.
    """
    given: dict[int, list[np.ndarray]] = {q: [] for q in range(graph.n_rows)}
    for queries, keys in layer.passes:
        for q in queries.tolist():
            given[q].append(keys)
    for q in extra.tolist():
        given[q].append(np.arange(graph.shape[1]))
    return sum(
        not np.array_equal(np.unique(np.concatenate([extra, *keys])), np.sort(graph.row(q)))
        for q, keys in given.items()
    )


def attend(layer: Layer, q: np.ndarray, k: np.ndarray, v: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """float32 [tokens, dim]: attention by online softmax over the delivered vectors of one head, in their order.

    The keys `extra` are in registers and come first. Queries in `extra` see all keys in one pass. A query that comes
    again goes on where it stopped; a key that it was given before is masked.
    """
    scale = np.float32(q.shape[1] ** -0.5)
    out = np.zeros_like(q)
    # Every head has the same passes.
    passes = {(queries.tobytes(), own.tobytes()): (queries, own) for queries, own in layer.passes}.values()
    seen = np.bincount(np.concatenate([queries for queries, _ in passes]), minlength=len(q))
    again: dict[int, list[np.ndarray]] = {int(query): [extra] for query in np.flatnonzero(seen > 1)}
    for queries, own in passes:
        once, keys = queries[seen[queries] == 1], np.concatenate([extra, own])
        if len(once):
            out[once] = _online(q[once] * scale, k[keys], v[keys])
        for query in queries[seen[queries] > 1].tolist():
            again[query].append(own)
    for query, given in again.items():
        keys = np.concatenate(given)
        keys = keys[np.sort(np.unique(keys, return_index=True)[1])]
        out[query] = _online(q[[query]] * scale, k[keys], v[keys])[0]
    for query in extra:
        out[query] = _online(q[[query]] * scale, k, v)[0]
    return out


def _online(q, k, v):
    """One key after another: running maximum, sum and weighted values."""
    m_i = np.full(len(q), -np.inf, np.float32)
    l_i, acc = np.zeros(len(q), np.float32), np.zeros((len(q), v.shape[1]), np.float32)
    logits = q @ k.T
    for j in range(len(k)):
        m_new = np.maximum(m_i, logits[:, j])
        alpha, p = np.exp(m_i - m_new), np.exp(logits[:, j] - m_new)
        l_i, m_i = l_i * alpha + p, m_new
        acc = acc * alpha[:, None] + p[:, None] * v[j]
    return acc / l_i[:, None]
