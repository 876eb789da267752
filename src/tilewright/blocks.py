"""Blocks: the ordered pattern cut into nearly dense pieces for one tile (stage T2).

`Blocks` is the contract between the cover (this module), the schedule and the executors.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tilewright import artifacts, tiles
from tilewright.errors import ArtifactError, TileError
from tilewright.provenance import sha256_arrays
from tilewright.tiles import Tile

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
    meta: dict
    region_rows: int
    region_ptr: np.ndarray
    row_ptr: np.ndarray
    run_ptr: np.ndarray
    run_keys: np.ndarray
    run_mask: np.ndarray
    masks: np.ndarray
    run_entries: np.ndarray

    @property
    def n_blocks(self):
        """Number of blocks."""
        return len(self.row_ptr) - 1

    @property
    def n_regions(self):
        """Number of regions."""
        return len(self.region_ptr) - 1

    @cached_property
    def rows(self):
        """int32 [B]: rows of each block."""
        return np.diff(self.row_ptr)

    @cached_property
    def runs(self):
        """int64 [B]: key runs of each block."""
        return np.diff(self.run_ptr)

    @cached_property
    def region(self):
        """int32 [B]: region of each block."""
        return (np.searchsorted(self.region_ptr, self.row_ptr[:-1], side="right") - 1).astype(np.int32)

    @cached_property
    def entries(self):
        """int64 [B]: allowed pairs of each block."""
        total = np.concatenate(([0], np.cumsum(self.run_entries, dtype=np.int64)))
        return total[self.run_ptr[1:]] - total[self.run_ptr[:-1]]

    @cached_property
    def id(self):
        """Digest of the tile, the graph and every array of the cover."""
        ptr = self.region_ptr, self.row_ptr, self.run_ptr
        return sha256_arrays(
            self.tile.name, self.graph_id, *ptr, self.run_keys, self.run_mask, self.masks, self.run_entries
        )[:16]

    @property
    def area(self):
        """int64 [B]: pairs that a full tile executes for each block, padding included: ``M * runs * W``."""
        return self.runs * (self.tile.rows * self.tile.run)

    @property
    def density(self):
        """float64 [B]: entries over `area`; NaN for a block without keys."""
        return np.divide(self.entries, self.area, out=np.full(self.n_blocks, np.nan), where=self.area > 0)

    def allowed(self, lo, hi):
        """bool [hi-lo, M, W]: the pairs that runs ``lo..hi`` allow. A full run allows padded rows, too."""
        return self.allowed_by(self.run_mask[lo:hi])

    def allowed_by(self, masks):
        """bool [..., M, W]: the pairs that runs with the mask numbers `masks` [...] allow, -1 being a full run."""
        bits = np.concatenate([self.masks, np.full((1, *self.masks.shape[1:]), 255, np.uint8)])[masks]
        return np.unpackbits(bits, axis=-1, count=self.tile.run, bitorder="little").astype(bool)

    def to_dense(self):
        """The covered pattern as a bool array [N_q, N_k]; for small graphs."""
        dense = np.zeros(self.shape, bool)
        for b in range(self.n_blocks):
            lo, hi = self.run_ptr[b : b + 2]
            run, row, key = np.nonzero(self.allowed(lo, hi)[:, : self.rows[b]])
            dense[self.row_ptr[b] + row, self.run_keys[lo + run, key]] = True
        return dense

    def summary(self):
        """JSON-able totals. `fill`: entries over padded area; `work`: padded area over the dense pairs."""
        area, entries = int(self.area.sum()), int(self.run_entries.sum(dtype=np.int64))
        return {
            "tile": self.tile.name,
            "regions": self.n_regions,
            "blocks": self.n_blocks,
            "runs": len(self.run_mask),
            "full_runs": int((self.run_mask < 0).sum()),
            "masks": len(self.masks),
            "entries": entries,
            "area": area,
            "fill": entries / area,
            "work": area / (self.shape[0] * self.shape[1]),
        }


def extract(graph, tile, region_rows=128):
    """Cover `graph` (in its new order) by blocks of `tile`, inside regions of at most `region_rows` rows.

    Regions depend on the graph and `region_rows` only; each is cut again, exactly, into blocks that suit the tile.
    Raises `TileError` for a tile of at least twice the size of the graph, or when `region_rows` is below 1.
    """
    # Here, so that those who only read blocks need not load the compiler.
    from tilewright.cover import cover
    from tilewright.cut import cut, regions

    tiles.check_fits(tile, graph.shape)
    region_ptr = regions(graph, region_rows)
    row_ptr = cut(graph, tile.rows, tile.run, tile.gathered, region_ptr)
    return Blocks(
        tile,
        graph.shape,
        graph.id,
        graph.meta,
        region_rows,
        region_ptr,
        row_ptr,
        *cover(graph, row_ptr, tile),
    )


def save(path, blocks, made_by=None):
    """Write `blocks`. The keys of a block tile are told by the first of each run."""
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


def load(path):
    """Read blocks that `save` wrote, checking them against their own digest. Raises `ArtifactError`."""
    arrays, header = artifacts.read_npz(path, KIND, VERSION)
    try:
        tile, shape = tiles.parse(header["tile"]), tuple(header["shape"])
        if not tile.gathered:
            arrays["run_keys"] = tiles.aligned_keys(arrays["run_keys"], tile.run, shape[1])
        facts = header["graph_id"], header["meta"], header["region_rows"]
        blocks = Blocks(tile, shape, *facts, **arrays)
    except (KeyError, TypeError, ValueError, TileError) as error:
        raise ArtifactError(f"{path}: expected a complete blocks file, found {error!r}") from error
    if blocks.id != header.get("id"):
        raise ArtifactError(f"{path}: expected content {header.get('id')}, found {blocks.id}: the file was altered")
    return blocks
