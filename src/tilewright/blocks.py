"""Blocks: the ordered pattern cut into nearly dense pieces for one tile (stage T2).

`Blocks` is the contract between the cover (this module), the schedule and the executors.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

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
        run_keys: int32 [U, W], keys of each run in ascending order, -1 where padded. A block tile ``MxN`` lists the
            aligned keys ``N*j .. N*j+N-1``; a slice ``Mx1`` lists the union of its rows' keys, packed.
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
        arrays = (self.region_ptr, self.row_ptr, self.run_ptr, self.run_keys, self.run_mask, self.masks)
        return sha256_arrays(self.tile.name, self.graph_id, *arrays)[:16]

    @property
    def area(self):
        """int64 [B]: pairs that a full tile executes for each block, padding included: ``M * runs * W``."""
        return self.runs * (self.tile.rows * self.tile.run)
