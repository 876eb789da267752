"""Blocks: the ordered pattern cut into nearly dense pieces for one tile (stage T2).

`extract` makes `Blocks`. The profile, the schedule and the executors read them.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tilewright.attention.blocks import tiles
from tilewright.attention.blocks.tiles import Tile
from tilewright.core import artifacts, contents
from tilewright.core.errors import ArtifactError, TileError
from tilewright.core.provenance import sha256_arrays
from tilewright.graph import Graph

KIND = "blocks"
VERSION = 1


@dataclass(frozen=True, eq=False)
class Blocks:
    """The cover of a reordered graph by blocks of one tile; rows and keys count in the *new* order.

    R regions, B blocks, U key runs of W = ``tile.run`` keys each:
        region_ptr: int32 [R+1], row boundaries of the regions; equal for every tile of one graph and `region_rows`.
        row_ptr: int32 [B+1], row boundaries of the blocks; refines `region_ptr`, at most ``tile.rows`` rows a block.
        run_ptr: int64 [B+1], the runs of each block (a block without keys has none).
        run_keys: int32 [U, W], keys of each run, -1 where padded. A block tile ``MxN`` lists the aligned keys
            ``N*j .. N*j+N-1``, blocks ascending; a slice ``Mx1`` packs the union of its rows' keys, those that every
            row of the block sees first, so that they fill full runs, then the others, each part ascending.
        run_mask: int32 [U], -1 for a full run (every row of the block sees all W keys), else a row of `masks`.
        masks: uint8 [n_masks, M, ceil(W/8)], shared bit masks, little bit order; padded rows and keys are 0.
        run_entries: int32 [U], allowed pairs in each run.
    """

    tile: Tile
    shape: tuple[int, int]
    graph_id: str
    meta: dict[str, Any]
    region_rows: int
    region_ptr: NDArray[np.int32]
    row_ptr: NDArray[np.int32]
    run_ptr: NDArray[np.int64]
    run_keys: NDArray[np.int32]
    run_mask: NDArray[np.int32]
    masks: NDArray[np.uint8]
    run_entries: NDArray[np.int32]

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self.row_ptr) - 1

    @property
    def n_regions(self) -> int:
        """Number of regions."""
        return len(self.region_ptr) - 1

    @cached_property
    def rows(self) -> NDArray[np.int32]:
        """int32 [B]: rows of each block."""
        return np.diff(self.row_ptr)

    @cached_property
    def runs(self) -> NDArray[np.int64]:
        """int64 [B]: key runs of each block."""
        return np.diff(self.run_ptr)

    @cached_property
    def region(self) -> NDArray[np.int32]:
        """int32 [B]: region of each block."""
        return (np.searchsorted(self.region_ptr, self.row_ptr[:-1], side="right") - 1).astype(np.int32)

    @cached_property
    def entries(self) -> NDArray[np.int64]:
        """int64 [B]: allowed pairs of each block."""
        total = np.concatenate(([0], np.cumsum(self.run_entries, dtype=np.int64)))
        return total[self.run_ptr[1:]] - total[self.run_ptr[:-1]]

    @cached_property
    def id(self) -> str:
        """Digest of the tile, the graph and every array of the cover."""
        ptr = self.region_ptr, self.row_ptr, self.run_ptr
        return sha256_arrays(
            self.tile.name, self.graph_id, *ptr, self.run_keys, self.run_mask, self.masks, self.run_entries
        )[:16]

    @property
    def area(self) -> NDArray[np.int64]:
        """int64 [B]: pairs that a full tile executes for each block, padding included: ``M * runs * W``."""
        return self.runs * (self.tile.rows * self.tile.run)

    @property
    def density(self) -> NDArray[np.float64]:
        """float64 [B]: entries over `area`; NaN for a block without keys."""
        return np.divide(self.entries, self.area, out=np.full(self.n_blocks, np.nan), where=self.area > 0)

    def allowed(self, lo: int, hi: int) -> NDArray[np.bool_]:
        """bool [hi-lo, M, W]: the pairs that runs ``lo..hi`` allow. A full run allows padded rows, too."""
        return self.allowed_by(self.run_mask[lo:hi])

    def allowed_by(self, masks: NDArray[np.integer]) -> NDArray[np.bool_]:
        """bool [..., M, W]: the pairs that runs with the mask numbers `masks` [...] allow, -1 being a full run."""
        bits = np.concatenate([self.masks, np.full((1, *self.masks.shape[1:]), 255, np.uint8)])[masks]
        return np.unpackbits(bits, axis=-1, count=self.tile.run, bitorder="little").astype(bool)

    def to_dense(self) -> NDArray[np.bool_]:
        """The covered pattern as a bool array [N_q, N_k]; for small graphs."""
        dense = np.zeros(self.shape, bool)
        for b in range(self.n_blocks):
            lo, hi = self.run_ptr[b : b + 2]
            run, row, key = np.nonzero(self.allowed(lo, hi)[:, : self.rows[b]])
            dense[self.row_ptr[b] + row, self.run_keys[lo + run, key]] = True
        return dense


def extract(graph: Graph, tile: Tile, region_rows: int = 128) -> Blocks:
    """Cover `graph` (in its new order) by blocks of `tile`, inside regions of at most `region_rows` rows.

    Regions depend on the graph and `region_rows` only; each is cut further, exactly, into blocks that suit the tile.
    Raises `TileError` for a tile of at least twice the size of the graph, or when `region_rows` is below 1.
    """
    return extract_all(graph, (tile,), region_rows)[tile.name]


def extract_all(graph: Graph, chosen: Iterable[Tile], region_rows: int = 128) -> dict[str, Blocks]:
    """`extract` for each of the tiles `chosen`: a dict of `Blocks` by the tile's name. The regions are found once."""
    # Here, so that those who only read blocks need not load SciPy.
    from tilewright.attention.blocks.cover import cover
    from tilewright.attention.blocks.cut import Windows, cut, functions, regions

    chosen = list(chosen)
    for tile in chosen:
        tiles.check_fits(tile, graph.shape)
    most = max([region_rows, *(tile.rows for tile in chosen if tile.gathered)])
    windows = Windows(graph, tiles.SLICE_RUN, True, most)
    region_ptr = regions(graph, region_rows, windows, graph.bounds)

    def made(tile):
        counted = windows if tile.gathered else Windows(graph, tile.run, False, tile.rows)
        row_ptr = cut(graph, tile.rows, tile.run, tile.gathered, region_ptr, windows=counted)
        runs = cover(graph, row_ptr, tile, counted)
        found = Blocks(tile, graph.shape, graph_id, graph.meta, region_rows, region_ptr, row_ptr, *runs)
        # All who take blocks ask for their digest: they are computed side by side, too.
        _ = found.id
        return found

    graph_id = graph.id
    # Compiled functions run side by side, array operations hardly do.
    workers = len(os.sched_getaffinity(0)) if functions(graph) else 1
    with ThreadPoolExecutor(workers) as pool:
        return {tile.name: found for tile, found in zip(chosen, pool.map(made, chosen), strict=True)}


def save(path: str | Path, blocks: Blocks, made_by: dict[str, Any] | None = None) -> None:
    """Write `blocks`. Of a block tile, the file holds the first key of each run: the others follow it."""
    arrays = {
        "region_ptr": blocks.region_ptr,
        "row_ptr": blocks.row_ptr,
        "run_ptr": blocks.run_ptr,
        "run_keys": blocks.run_keys if blocks.tile.gathered else blocks.run_keys[:, :1],
        "run_mask": blocks.run_mask,
        "masks": blocks.masks,
        "run_entries": blocks.run_entries,
    }
    header = {
        "id": blocks.id,
        "tile": blocks.tile.name,
        "shape": list(blocks.shape),
        "graph_id": blocks.graph_id,
        "region_rows": blocks.region_rows,
        "meta": blocks.meta,
    }
    artifacts.write_npz(path, KIND, VERSION, arrays, header, made_by, compress=True)


class _Header(msgspec.Struct):
    id: str
    tile: str
    shape: tuple[contents.Size, contents.Size]
    graph_id: str
    region_rows: contents.Size
    meta: dict


def load(path: str | Path) -> Blocks:
    """Read blocks that `save` wrote. Their contents and their digest are checked. Raises `ArtifactError`."""
    arrays, header = artifacts.read_npz(path, KIND, VERSION)
    header = contents.fields(path, KIND, header, _Header)
    try:
        tile = tiles.parse(header.tile)
    except TileError as error:
        raise ArtifactError(f"{path}: expected a known tile, found {error}") from None
    _check(path, arrays, tile, header.shape)
    if not tile.gathered:
        arrays["run_keys"] = tiles.aligned_keys(arrays["run_keys"], tile.run, header.shape[1])
    blocks = Blocks(tile, header.shape, header.graph_id, header.meta, header.region_rows, **arrays)
    if blocks.id != header.id:
        raise ArtifactError(f"{path}: expected content {header.id}, found {blocks.id}: the file was altered")
    return blocks


def _check(path, arrays, tile, shape):
    """Raise `ArtifactError` unless every number of the `arrays` of a file points into what it counts."""
    n_runs, n_masks = (len(arrays[name]) if name in arrays else 0 for name in ("run_mask", "masks"))
    n_blocks = len(arrays["row_ptr"]) - 1 if "row_ptr" in arrays else 0
    contents.arrays(
        path,
        arrays,
        region_ptr=(np.int32, None),
        row_ptr=(np.int32, None),
        run_ptr=(np.int64, n_blocks + 1),
        run_keys=(np.int32, n_runs, tile.run if tile.gathered else 1),
        run_mask=(np.int32, n_runs),
        masks=(np.uint8, n_masks, tile.rows, -(-tile.run // 8)),
        run_entries=(np.int32, n_runs),
    )
    contents.expect(path, n_runs, "runs", "none")
    contents.bounds(path, "region_ptr", arrays["region_ptr"], shape[0], 1)
    contents.bounds(path, "row_ptr", arrays["row_ptr"], shape[0], 1, tile.rows)
    crossed = np.setdiff1d(arrays["region_ptr"], arrays["row_ptr"])
    contents.expect(path, not len(crossed), "blocks within their regions", f"one across row {crossed[:1]}")
    contents.bounds(path, "run_ptr", arrays["run_ptr"], n_runs)
    # A run begins with a key: padding repeats it.
    contents.within(path, "first of run_keys", arrays["run_keys"][:, 0], 0, shape[1] - 1)
    contents.within(path, "run_keys", arrays["run_keys"], -1, shape[1] - 1)
    aligned = tile.gathered or not (arrays["run_keys"] % tile.run).any()
    contents.expect(path, aligned, f"run_keys: multiples of {tile.run}", "others")
    contents.within(path, "run_mask", arrays["run_mask"], -1, n_masks - 1)
    contents.within(path, "run_entries", arrays["run_entries"], 1, tile.rows * tile.run)


def verify(several: Iterable[Blocks], graph: Graph) -> None:
    """Raise `ArtifactError` unless each of `several` `Blocks` holds each allowed pair of `graph` once, and no other.

    The keys of a row are compared by their sum, each key being a random number of 46 bits.
    """
    # The last one stands for a padded key, -1, which no row may see.
    number = np.random.default_rng(0).integers(1 << 46, size=graph.n_cols + 1)
    sums, some = np.zeros(graph.n_distinct, np.int64), np.diff(graph.indptr) > 0
    sums[some] = np.add.reduceat(number[graph.indices], graph.indptr[:-1][some])
    for blocks in several:
        wrong = np.flatnonzero(_key_sums(blocks, number) != sums[graph.row_id])
        if len(wrong):
            raise ArtifactError(
                f"tile {blocks.tile.name}: expected each pair of graph {graph.id} covered once, found others in "
                f"{len(wrong)} rows, the first {wrong[0]}"
            )


def _key_sums(blocks, number):
    """int64 [N_q]: the sum of ``number[key]`` over the keys of each row."""
    # Sums of one run are exact in float64.
    keys = number[blocks.run_keys].astype(np.float64)
    owner = np.repeat(np.arange(blocks.n_blocks), blocks.runs)
    by_mask = np.argsort(blocks.run_mask, kind="stable")
    sums = np.zeros((blocks.n_blocks, blocks.tile.rows), np.int64)
    for runs in np.split(by_mask, np.flatnonzero(np.diff(blocks.run_mask[by_mask])) + 1):
        allowed = blocks.allowed_by(blocks.run_mask[runs[:1]])[0]
        members, first = np.unique(owner[runs], return_index=True)
        sums[members] += np.add.reduceat((keys[runs] @ allowed.T).astype(np.int64), first, axis=0)
    block = np.repeat(np.arange(blocks.n_blocks), blocks.rows)
    return sums[block, np.arange(len(block)) - blocks.row_ptr[block]]
