"""What a packed batch is described by: one int32 tensor on the device of its tokens, whose parts lie one after another.

Contract of the modules that write and read it (`torch_ragged`, `triton_ragged`): ``Executor(layout, device)`` with
    ``lists(keep) -> lists``: for bool keep [B, N], in one piece;
    ``pack(keep, tokens, origin) -> (lists, packed tokens)``: and for tokens [B, N, C], or for packed ones [.., C] and
        the lists `origin` of their batch: those of an image are its first;
    ``take(lists, part, x, fill) -> rows``: rows of x [.., C] by the numbers in a part of the lists, see `Layout.part`;
        fill: what stands where there is none, None for zeros;
    ``pad(lists, x, slots) -> [B, slots, C]``: packed x [capacity, C] by image and place, zeros where no token is;
    ``attend(lists, q, k, v) -> [capacity, H, D]``: each image within itself, finite where no image is;
    ``attend_into(out, lists, q, k, v) -> out``: the same, written to `out`, in one piece.
All results are NaN where the lists are of no use. Tensors that are not of this batch raise `PatternError` or
`DeviceError`.
"""

from typing import NamedTuple

import torch

from tilewright.core.errors import DeviceError, PatternError

# What the tensor begins with: whether it is of no use, tokens kept, work items, images that keep nothing.
BAD, KEPT, ITEMS, EMPTY, HEADER = range(5)
# Values of a work item: the first row of its image, the tokens of that, the first query of the item among them.
RECORD = 3


class Layout(NamedTuple):
    """Where the parts of the lists begin. images, tokens: of the batch before packing, B and N.

    capacity: rows of packed tensors. rows: queries of a work item. The parts are the header, `starts` [B + 1], `source`
    [capacity] (the token of each row, -1 for none), `place` [B * N] (the row of each token, -1 for none), and work
    items [items, 3], the longest images first.
    """

    images: int
    tokens: int
    capacity: int
    rows: int

    @property
    def starts(self):
        """First of the cumulative lengths."""
        return HEADER

    @property
    def source(self):
        """First of the tokens that rows come from."""
        return HEADER + self.images + 1

    @property
    def place(self):
        """First of the rows that tokens go to."""
        return self.source + self.capacity

    @property
    def work(self):
        """First of the work items."""
        return self.place + self.images * self.tokens

    @property
    def items(self):
        """Most work items: each image, and the rows that no image has, may fill its last one with a single row."""
        return (self.capacity + (self.images + 1) * (self.rows - 1)) // self.rows

    @property
    def size(self):
        """Values of the lists."""
        return self.work + self.items * RECORD

    def part(self, name):
        """``(first, count)`` of what `take` brings rows by: ``source``, ``place`` or ``starts`` (one an image)."""
        count = {"source": self.capacity, "place": self.images * self.tokens, "starts": self.images}[name]
        return getattr(self, name), count

    def result(self, name, width):
        """Shape of what `take` returns for rows of `width` values."""
        return (self.images, self.tokens, width) if name == "place" else (self.part(name)[1], width)

    def origin(self, name):
        """Shape, but for the values of a token, of what `take` takes from."""
        return (self.images, self.tokens) if name == "source" else (self.capacity,)


def check_qkv(layout, q, k, v, out):
    """Raise `PatternError` or `DeviceError` for q, k, v [capacity, H, D] that are not of this batch or not alike, and
    for an `out` that cannot hold their result."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3 or len(x) != layout.capacity or x.shape != q.shape:
            rest = "H, D" if x is q or q.ndim != 3 else ", ".join(map(str, q.shape[1:]))
            raise PatternError(
                f"{name}: expected shape ({layout.capacity}, {rest}), a row for each token of the capacity, found "
                f"{tuple(x.shape)}"
            )
        if x.dtype != q.dtype or not x.is_floating_point():
            raise PatternError(f"{name}: expected a float dtype, the same for q, k and v, found {x.dtype}")
    check_tensors(q.device, q=q, k=k, v=v)
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise PatternError(
            f"out: expected {q.dtype} of shape {tuple(q.shape)} in one piece, found {out.dtype} of shape "
            f"{tuple(out.shape)}, strides {out.stride()}"
        )
    check_tensors(q.device, out=out)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            raise PatternError(f"out: expected memory of its own, found that of {name}")


def check_rows(layout, part, x, fill, origin=None):
    """Raise `PatternError` or `DeviceError` for tensors that `take` cannot bring rows from. origin: lists by which x is
    packed already, or None."""
    expected = layout.origin(part) if origin is None else (len(x),)
    if tuple(x.shape[:-1]) != expected or x.ndim != len(expected) + 1:
        raise PatternError(f"expected tokens of shape ({', '.join(map(str, expected))}, C), found {tuple(x.shape)}")
    if fill is not None:
        wanted = layout.result(part, x.shape[-1])
        if tuple(fill.shape) != wanted or fill.dtype != x.dtype:
            raise PatternError(f"fill: expected {x.dtype} of shape {wanted}, found {fill.dtype} of {tuple(fill.shape)}")
        check_tensors(x.device, fill=fill)
    check_tensors(x.device, tokens=x)


def check_tensors(device, **tensors):
    """Raise `DeviceError` for tensors elsewhere than on `device`, `PatternError` for those that record gradients."""
    for name, x in tensors.items():
        if x.device != device:
            raise DeviceError(f"{name}: expected a tensor on {device}, found {x.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise PatternError(f"{name}: packed batches have no backward; call this under torch.no_grad()")
