"""Packed batches of images that keep different numbers of tokens: pack, attend, unpack (stage T5).

A batch of pruned images is one more pattern, block diagonal; packing is its order. What is kept is known to the device
alone: the host gives a *capacity*, the rows of every packed tensor, and never waits. A batch that keeps more, or an
image that keeps nothing, makes every result of the batch NaN, and `Packing.check` says why.
"""

from functools import cached_property, lru_cache
from importlib import import_module

import numpy as np
import torch
from torch import library

from tilewright import graph, targets
from tilewright.core.errors import DeviceError, PatternError
from tilewright.core.operators import watched
from tilewright.targets import packed_lists
from tilewright.targets.packed_lists import BAD, EMPTY, KEPT, Layout

# The executor of each kind of device.
EXECUTORS = {kind: targets.modules(kind, "packed")[-1] for kind in targets.packing()}
# Queries of a work item: those of one tensor-core product of a warp group, fewer where images have fewer tokens.
ROWS, FEWEST_ROWS = 64, 16


def pack(keep, capacity=None, tokens=None, rows=None, origin=None):
    """Return the `Packing` of a batch: image b keeps its tokens ``keep[b]``, in their order.

    keep: bool [B, N]. capacity: rows of packed tensors, more or fewer than are kept; None: as many as are kept, which
    costs a wait on a GPU and is checked then. tokens: [B, N, C] or None, gathered by the same kernel; see
    `Packing.tokens`. rows: queries of a work item, a power of two from 16; None: by N. origin: the packing of as many
    images by which tokens [its capacity, C] are packed already; what `keep` tells of an image is of its tokens there.

    Raises `PatternError` for what is no such batch, `DeviceError` for a device without an executor; without a capacity,
    for an image that keeps nothing.
    """
    if keep.ndim != 2 or keep.dtype != torch.bool or not keep.numel():
        raise PatternError(f"keep: expected bool of shape (B, N), found {keep.dtype} of shape {tuple(keep.shape)}")
    if keep.device.type not in EXECUTORS:
        raise DeviceError(f"keep: expected a tensor on one of {', '.join(EXECUTORS)}, found {keep.device}")
    if capacity is not None and capacity < 1:
        raise PatternError(f"capacity: expected at least one row, found {capacity}")
    images, n = keep.shape
    if rows is None:
        rows = min(ROWS, max(FEWEST_ROWS, 1 << (n - 1).bit_length()))
    if rows < FEWEST_ROWS or rows & (rows - 1):
        raise PatternError(f"rows: expected a power of two from {FEWEST_ROWS}, found {rows}")
    if origin is not None:
        _check_origin(origin, images, tokens)
    layout = Layout(images, n, max(1, int(keep.sum())) if capacity is None else capacity, rows)
    keep = keep.contiguous()
    ops = torch.ops.tilewright if watched(keep) else None
    if tokens is None:
        lists = ops.ragged_lists(keep, layout) if ops else _executor(layout, keep.device).lists(keep)
    else:
        given = keep, tokens, None if origin is None else origin.lists
        lists, tokens = ops.ragged_pack(*given, layout) if ops else _executor(layout, keep.device).pack(*given)
    packing = Packing(layout, lists, tokens)
    if capacity is None:
        packing.check()
    return packing


def _check_origin(origin, images, tokens):
    """Raise `PatternError` for tokens that are not packed by `origin`, or not of so many images."""
    if origin.layout.images != images:
        raise PatternError(f"origin: expected the packing of {images} images, found one of {origin.layout.images}")
    if tokens is None or tokens.ndim != 2 or len(tokens) != origin.capacity:
        found = None if tokens is None else tuple(tokens.shape)
        raise PatternError(f"tokens: expected shape ({origin.capacity}, C), as `origin` has packed them, found {found}")


def pack_lengths(lengths, capacity=None, **options):
    """The `Packing` of images that keep the first ``lengths[b]`` of their tokens; N is the greatest length.

    lengths: int [B] on a CPU or GPU; waits for them. capacity, options: as of `pack`. Raises `PatternError` for an
    image without tokens, and for lengths that sum to more than the capacity.
    """
    lengths = torch.as_tensor(lengths)
    if lengths.ndim != 1 or not len(lengths) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise PatternError(
            f"lengths: expected integers of shape (B,), found {lengths.dtype} of shape {tuple(lengths.shape)}"
        )
    if (least := int(lengths.min())) < 1:
        raise PatternError(f"lengths: expected at least one token an image, found {least}")
    keep = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    packing = pack(keep, capacity, **options)
    packing.check()
    return packing


class Packing:
    """A packed batch; made by `pack`.

    layout: `ragged_lists.Layout`. lists: the device's own description of the batch. tokens: [capacity, C], those given
    to `pack`, or None. On a GPU, what is called repeatedly with tensors alike takes a few µs of the host's time, does
    not wait, and may be captured in a CUDA graph, `pack` with a capacity included.
    """

    def __init__(self, layout, lists, tokens=None):
        """Wrap what an executor made."""
        self.layout, self.lists, self.tokens = layout, lists, tokens

    @cached_property
    def _executor(self):
        return _executor(self.layout, self.lists.device)

    def _taken(self, part, x, fill):
        if watched(x):
            return torch.ops.tilewright.ragged_take(self.lists, part, x, fill, self.layout)
        return self._executor.take(self.lists, part, x, fill)

    @property
    def capacity(self):
        """Rows of packed tensors."""
        return self.layout.capacity

    @property
    def starts(self):
        """int32 [B + 1]: cumulative lengths, on the device; at most the capacity."""
        return self.lists[self.layout.starts : self.layout.source]

    @property
    def source(self):
        """int32 [capacity]: the token of each row, as ``b * N + n``; -1 for none."""
        return self.lists[self.layout.source : self.layout.place]

    def gather(self, x):
        """Kept tokens of x [B, N, C] → [capacity, C]; zeros behind the last one."""
        return self._taken("source", x, None)

    def scatter(self, x, fill=0):
        """Packed x [capacity, C] to its places → [B, N, C]; `fill` [B, N, C] or 0 where nothing was kept."""
        if not isinstance(fill, torch.Tensor) and fill != 0:
            raise PatternError(f"fill: expected a tensor or 0, found {fill!r}")
        return self._taken("place", x, fill if isinstance(fill, torch.Tensor) else None)

    def first(self, x):
        """The first kept token of each image, of packed x [capacity, C] → [B, C]."""
        return self._taken("starts", x, None)

    def pad(self, x, slots):
        """Packed x [capacity, C] by image and place → [B, slots, C]; zeros where an image has no such token.

        slots: at least the tokens of any image.
        """
        if watched(x):
            return torch.ops.tilewright.ragged_pad(self.lists, x, slots, self.layout)
        return self._executor.pad(self.lists, x, slots)

    def attend(self, q, k, v, out=None):
        """Attention of each image within itself, scale ``D ** -0.5``: q, k, v [capacity, H, D] → [capacity, H, D].

        Tensors may be strided views, the values of a head side by side. out: memory of its own for the result, in one
        piece, which saves the host a microsecond; None: new.

        Raises `PatternError` or `DeviceError` for tensors that are not of this batch: such as lengths that do not sum
        to their tokens.
        """
        if watched(q):
            made = torch.ops.tilewright.ragged_attend(self.lists, q, k, v, self.layout)
            return made if out is None else out.copy_(made)
        if out is None:
            return self._executor.attend(self.lists, q, k, v)
        return self._executor.attend_into(out, self.lists, q, k, v)

    def check(self):
        """Raise `PatternError` where the batch exceeds its capacity or an image keeps nothing. Waits for the device."""
        header = self.lists[: packed_lists.HEADER].tolist()
        if header[EMPTY]:
            raise PatternError(f"expected every image to keep a token, found {header[EMPTY]} that keep none")
        if header[BAD]:
            raise PatternError(f"capacity: expected at least the {header[KEPT]} tokens kept, found {self.capacity}")

    def graph(self):
        """The batch as one block-diagonal `graph.Graph` over the kept tokens, on the host. Checks the batch."""
        self.check()
        starts = self.starts.cpu().numpy().astype(np.int64)
        owner = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
        return graph.from_classes(starts, np.arange(len(owner), dtype=np.int32), owner, len(owner))


# Layouts differ from batch to batch without a capacity. An executor holds no tensors: a few kilobytes.
@lru_cache(256)
def _executor(layout, device):
    return import_module(EXECUTORS[device.type]).Executor(layout, device)


# The same as operators, for ``torch.compile``, ``torch.export`` and tracing.

_LIBRARY = library.Library("tilewright", "FRAGMENT")
for _schema in (
    "ragged_lists(Tensor keep, int[] layout) -> Tensor",
    "ragged_pack(Tensor keep, Tensor tokens, Tensor? origin, int[] layout) -> (Tensor, Tensor)",
    "ragged_pad(Tensor lists, Tensor x, int slots, int[] layout) -> Tensor",
    "ragged_take(Tensor lists, str part, Tensor x, Tensor? fill, int[] layout) -> Tensor",
    "ragged_attend(Tensor lists, Tensor q, Tensor k, Tensor v, int[] layout) -> Tensor",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _lists(keep, layout):
    return _executor(Layout(*layout), keep.device).lists(keep)


def _pack(keep, tokens, origin, layout):
    return _executor(Layout(*layout), keep.device).pack(keep, tokens, origin)


def _pad(lists, x, slots, layout):
    return _executor(Layout(*layout), lists.device).pad(lists, x, slots)


def _take(lists, part, x, fill, layout):
    return _executor(Layout(*layout), lists.device).take(lists, part, x, fill)


def _attend(lists, q, k, v, layout):
    return _executor(Layout(*layout), lists.device).attend(lists, q, k, v)


def _like_lists(keep, layout):
    return keep.new_empty(Layout(*layout).size, dtype=torch.int32)


def _like_pack(keep, tokens, origin, layout):
    return _like_lists(keep, layout), tokens.new_empty(Layout(*layout).capacity, tokens.shape[-1])


def _like_pad(lists, x, slots, layout):
    return x.new_empty(Layout(*layout).images, slots, x.shape[-1])


def _like_take(lists, part, x, fill, layout):
    return x.new_empty(Layout(*layout).result(part, x.shape[-1]))


def _like_attend(lists, q, k, v, layout):
    return q.new_empty(q.shape)


for _name, _call, _fake in (
    ("ragged_lists", _lists, _like_lists),
    ("ragged_pack", _pack, _like_pack),
    ("ragged_pad", _pad, _like_pad),
    ("ragged_take", _take, _like_take),
    ("ragged_attend", _attend, _like_attend),
):
    _LIBRARY.impl(_name, _call, "CompositeExplicitAutograd")
    library.register_fake(f"tilewright::{_name}", _fake, lib=_LIBRARY)
