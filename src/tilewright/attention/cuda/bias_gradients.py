"""The gradient of a bias on an NVIDIA GPU (training): the lists that `bias_kernels` take, and the calls.

Equal tiles of a bias are held once (`tile_lists`). The steps that share one are the uses of it: programs, each of a
part of the uses and some images, add up the gradients of their scores. Then the sums of a tile's parts are folded, and
the pairs of each entry of the table added up. Memory: a tile for each part, as much as the bias itself has on the
device, and about `PROGRAMS` tiles.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from tilewright.attention.cuda import bias_kernels
from tilewright.attention.cuda.launch import MOST_ACROSS, ItemLaunch, mask_heads, to_device
from tilewright.attention.cuda.repeated import Repeated
from tilewright.attention.cuda.tile_lists import Item
from tilewright.attention.setting import Setting
from tilewright.core.errors import DeviceError
from tilewright.devices.cuda import launcher
from tilewright.devices.cuda.launcher import lasting

# Programs that the uses of all tiles are shared out to, where they are so many. ASSUME: a large GPU runs half of them
# at a time, so that those that take longest are not alone at the end.
PROGRAMS = 1024
# Places that one list of an entry has at most; more are added up in a second step. ASSUME: a program waits for memory
# once for each `PLACES` of its longest list, so that more of them take longer than the second step does.
LONGEST = 512
# Lists and places of a program at a time, and values and parts that are folded at a time.
LISTS, PLACES, FOLDED, PARTS = 16, 64, 512, 8
# What is said of a capture that comes first.
REFUSED = "differentiate the plan once with tensors of these shapes and strides before that"


class BiasGradients:
    """Sums the gradient of a bias for the query launches of a `backward.Backward`; made once, for all values.

    Where heads have patterns of their own, one head of the tiles holds the entries of all (`executor.bias_table`).
    """

    def __init__(self, launches: Sequence[ItemLaunch], common: Setting, device: torch.device | str):
        """launches: `backward.QueryLaunch` of each tile, whose masks are tiles of the bias. common: their `Setting`."""
        assert common.bias is not None
        heads, self._shape = mask_heads(common), common.bias.table.shape
        entries = common.bias.table.numel() // heads
        self._heads, self._device = heads, device
        self._sum_lists = Repeated(bias_kernels.tilewright_sum_lists, device, REFUSED)
        self._parts, places, of_place, total = [], [], [], 0
        for launch in launches:
            lists = launch.lists
            self._parts.append((_Parts(lists, heads, device), total))
            index = lists.bias_index.reshape(-1)
            at = np.flatnonzero(index >= 0)
            places.append(at + total)
            of_place.append(index[at])
            total += index.size
        if total >= 2**31:
            raise DeviceError(f"bias: expected tiles of fewer than 2**31 values for its gradient, found {total}")
        self._total = total
        at, sums, more, self._sums = listed(np.concatenate(places), np.concatenate(of_place), entries)
        # One head of the sums may hold the entries of all.
        self._strides = (self._shape[1] if heads == 1 else self._sums), 1
        self._steps = [(to_device(device, at), to_device(device, sums), len(sums))]
        if len(more):
            self._steps.append(
                (torch.arange(self._sums, dtype=torch.int32, device=device), to_device(device, more), len(more))
            )

    @property
    def memory_bytes(self) -> int:
        """Bytes of lists held between calls."""
        return sum(x.nbytes for step in self._steps for x in step[:2]) + sum(p.memory_bytes for p, _ in self._parts)

    def __call__(self, launches: Sequence[ItemLaunch], tensors: Sequence[Tensor]) -> Tensor:
        """Sums, float32, of which `of_table` is the gradient of the table.

        launches: as this was made of. tensors: of a `backward.Backward`, whose launches for queries have run.
        """
        tiles = torch.empty(self._heads, self._total, dtype=torch.float32, device=self._device)
        for launch, (parts, begin) in zip(launches, self._parts, strict=True):
            parts(launch, tensors, tiles, begin)
        sums, source = tiles.new_empty(self._heads, self._sums), tiles
        for at, lists, count in self._steps:
            grid = triton.cdiv(count, LISTS), self._heads, 1
            following = count, source.stride(0), sums.stride(0), LISTS, PLACES
            self._sum_lists(grid, (source, sums, lasting(at), lasting(lists)), following)
            source = sums
        return sums

    def of_table(self, sums: Tensor) -> Tensor:
        """The gradient of the table, float32 [H, T]."""
        return sums.as_strided(self._shape, self._strides).contiguous()


def listed(places: np.ndarray, entry: np.ndarray, entries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """``(places in order, lists, lists of sums, sums)`` that add up the `places` of each entry.

    lists: int32 [., 3], begin, length and where the sum goes, the longest first: to the entry, or of an entry with more
    than `LONGEST` places to one of the sums behind the `entries`, which the second lists add up. An entry without
    places has an empty list. sums: how many there are in all.
    """
    order = np.argsort(entry, kind="stable")
    counts = np.bincount(entry, minlength=entries)
    begins, pieces = np.cumsum(counts) - counts, np.maximum(1, -(-counts // LONGEST))
    owner = np.repeat(np.arange(entries), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    length = np.minimum(LONGEST, counts[owner] - number * LONGEST)
    several = pieces[owner] > 1
    into = np.where(several, entries + np.cumsum(several) - 1, owner)
    lists = np.stack((begins[owner] + number * LONGEST, length, into), 1)
    long = pieces > 1
    begin_sums = entries + np.cumsum(pieces[long]) - pieces[long]
    more = np.stack((begin_sums, pieces[long], np.flatnonzero(long)), 1)
    lists, more = (x[np.argsort(-x[:, 1], kind="stable")].astype(np.int32) for x in (lists, more))
    return places[order].astype(np.int32), lists, more, entries + int(several.sum())


class _Parts:
    """The uses of each tile of a launch, in parts for a program each."""

    def __init__(self, lists, heads, device):
        items = lists.items.astype(np.int64)
        steps = items[:, Item.STEPS]
        owner = np.repeat(np.arange(len(items)), steps)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(steps) - steps, steps)
        tile = items[owner, Item.MASK_STEP] + number
        order = np.argsort(tile, kind="stable")
        # The first head of a unit, heads of all images counted through.
        first_head = items[:, len(Item)] if items.shape[1] > len(Item) else np.zeros(len(items), np.int64)
        fields = items[owner, Item.FIRST_ROW], items[owner, Item.ROWS], items[owner, Item.FIRST_STEP] + number
        uses = np.stack([*fields, first_head[owner]], 1)
        n_tiles = len(lists.bias_index)
        counts = np.bincount(tile, minlength=n_tiles)
        most = max(1, -(-len(owner) * heads // PROGRAMS))
        parts = -(-counts // most)
        of_part = np.repeat(np.arange(n_tiles), parts)
        before = np.arange(len(of_part)) - np.repeat(np.cumsum(parts) - parts, parts)
        first = (np.cumsum(counts) - counts)[of_part] + before * most
        length = np.minimum(most, counts[of_part] - before * most)
        self._count, self._tiles, self._heads = len(of_part), n_tiles, heads
        self._of_steps, self._fold = (
            Repeated(kernel, device, REFUSED)
            for kernel in (bias_kernels.tilewright_bias_gradients, bias_kernels.tilewright_fold_tiles)
        )
        self._uses = to_device(device, uses[order].astype(np.int32))
        self._records = to_device(device, np.stack((of_part, first, length, 0 * first), 1).astype(np.int32))
        self._first = to_device(device, np.concatenate(([0], np.cumsum(parts))).astype(np.int32))

    @property
    def memory_bytes(self):
        return sum(x.nbytes for x in (self._uses, self._records, self._first))

    def __call__(self, launch, tensors, tiles, begin):
        """Write the sums of each tile to `tiles` [H, .], from `begin` on."""
        q, k, v, _, grad, _, _, _, lse, delta = tensors[:10]
        constants, heads = launch.constants, self._heads
        # Where patterns are those of images, a use is of one of them.
        batch, size = launch.images(len(q)), constants["BLOCK_M"] * constants["BLOCK_N"]
        groups = max(1, min(batch, PROGRAMS // (self._count * heads)))
        layers = max(1, -(-self._count // MOST_ACROSS))
        sums = torch.empty(groups * self._count * heads, size, dtype=torch.float32, device=q.device)
        strided = q, k, v, grad
        strides = [stride for x in strided for stride in x.stride()[:3]]
        wide = any(launcher.wide(x.shape[2], x.stride(2)) for x in strided)
        form = launch.form
        # In the kernel's order.
        names = "BLOCK_M", "BLOCK_N", "HEAD_DIM", "D0", "D1", "HEADS", "MASK_HEADS", "ORDERED", "SIGN", "NUM_STAGES"
        grid = heads * groups, -(-self._count // layers), layers
        held = map(lasting, (self._uses, self._records, launch.held("row_ptr"), launch.held("key_ptr")))
        memory = (*strided, lse, delta, sums, *held, launch.tiles(tensors))
        sizes = *strides, self._count, batch, groups, q.shape[2], launch.scale_log2
        with launcher.fitting("gradient of a bias"):
            self._of_steps(grid, memory, (*sizes, *(constants[name] for name in names), wide), num_warps=form.num_warps)
        grid = self._tiles * heads, triton.cdiv(size, FOLDED), 1
        following = self._count, groups, begin, tiles.stride(0), heads, size, FOLDED, PARTS
        self._fold(grid, (sums, tiles, lasting(self._first)), following)
