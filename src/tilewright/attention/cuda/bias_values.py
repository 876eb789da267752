"""Where the values of a bias stand in the tiles of work lists, and the launches that put them there (stage T5).

Lists hold an index into the table for each pair (`tile_lists`). They are copied to the device once, with the plan. From
then on new values go from a table on the device to tiles on the device: nothing is copied to the host, and nothing
waits. Tiles are made in new memory in each call, so that calls of several threads, streams and graphs do not meet.
"""

import numpy as np
import torch
from torch import Tensor
from triton import next_power_of_2

from tilewright.attention.cuda import bias_kernels
from tilewright.attention.cuda.repeated import Repeated
from tilewright.attention.cuda.tile_lists import TileLists
from tilewright.devices.cuda.launcher import lasting

# Steps of a family whose greatest values a program reads at a time.
STEPS = 16
# Values of a tile for each warp of a program, and most warps.
PER_WARP, MOST_WARPS = 1024, 8
# Queries that a program gives their greatest bias.
SPREAD = 256
# What is said of a capture that comes first.
REFUSED = "call the plan once with a bias of this type and alignment before that"


class Tiles:
    """Puts the values of a table into the tiles of `lists`; made once, for all values.

    Its calls take a contiguous table [mask heads, T] on the device, of any float type.
    """

    def __init__(
        self, lists: TileLists, mask_heads: int, scale: float, device: torch.device | str, relative: bool = True
    ):
        """mask_heads: rows of the tables. scale: what relative values are divided by. relative: whether the greatest of
        each row is taken off its values, and their scale."""
        self._heads, self._relative, self._device = mask_heads, relative, device
        self._shape = len(lists.bias_index), mask_heads, lists.rows, lists.step_keys
        family = lists.family.astype(np.int64)
        counts = np.bincount(family, minlength=1)
        self._families = len(counts)
        order = np.argsort(family, kind="stable")
        held = lists.bias_index, family, np.concatenate(([0], np.cumsum(counts))), order
        self._held = tuple(torch.from_numpy(x.astype(np.int32)).to(device) for x in held)
        self._inv_scale = 1 / scale
        size = lists.rows * lists.step_keys
        self._warps = min(MOST_WARPS, max(1, next_power_of_2(size // PER_WARP)))
        self._of_rows, self._of_tiles = (
            Repeated(kernel, device, REFUSED)
            for kernel in (bias_kernels.tilewright_bias_peaks, bias_kernels.tilewright_bias_tiles)
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of lists held between calls."""
        return sum(x.nbytes for x in self._held)

    @property
    def peaks(self) -> int:
        """Values of what `put` writes to `peaks`."""
        return self._families * self._heads * self._shape[2]

    def __call__(self, table: Tensor, peaks: Tensor | None = None) -> Tensor:
        """float32 [tiles, mask heads, M, N]: as `tile_kernel` reads them, -inf where a pair is not allowed.

        peaks: float32 [families, mask heads, M], memory for the greatest bias of each row of a family, 0 for none; None
        where nobody asks. Raises `DeviceError` in a capture before a call with such a table.
        """
        tiles = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        # Beside what it is for, it orders the two launches: the second reads what the first writes.
        steps = tiles.new_empty(self._shape[:3]) if self._relative else tiles
        if peaks is None:
            peaks = tiles.new_empty(self.peaks if self._relative else 1)
        if not self._shape[0]:
            return tiles
        index, *families = map(lasting, self._held)
        grid, entries, sizes = (self._shape[0] * self._heads, 1, 1), table.shape[1], (self._heads, *self._shape[2:])
        if self._relative:
            self._of_rows(grid, (table, steps, index), (entries, *sizes), num_warps=self._warps)
        following = entries, self._inv_scale, *sizes, self._relative, STEPS
        self._of_tiles(grid, (table, tiles, steps, peaks, index, *families), following, num_warps=self._warps)
        return tiles


class Spread:
    """Gives each query the greatest bias of its row, out of the peaks of several `Tiles`; made once, for all values."""

    def __init__(self, source: np.ndarray, device: torch.device | str):
        """source: int [lanes, N_q], where the greatest bias of each query stands among the peaks."""
        self._source, self._shape = torch.from_numpy(source.astype(np.int32)).to(device), source.shape
        self._gather = Repeated(bias_kernels.tilewright_spread_peaks, device, REFUSED)

    @property
    def memory_bytes(self) -> int:
        """Bytes of lists held between calls."""
        return self._source.nbytes

    def __call__(self, peaks: Tensor) -> Tensor:
        """float32 [lanes, N_q] of `peaks`, float32 [.]."""
        found = peaks.new_empty(self._shape)
        n = found.numel()
        if n:
            self._gather((-(-n // SPREAD), 1, 1), (peaks, found, lasting(self._source)), (n, SPREAD))
        return found
