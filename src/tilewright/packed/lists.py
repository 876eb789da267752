"""How a packed batch is described: one int32 tensor on the device of its tokens, of sections that follow one another.

Contract of ``packed/<device>/executor.py``, which writes and reads it. ``Executor(offsets, device)``, for
`PackedOffsets`, has
    ``lists(keep) -> lists``: the description, for bool keep [B, N], contiguous;
    ``pack(keep, tokens, origin) -> (lists, packed)``: also the kept tokens [capacity, C], of tokens [B, N, C]. With
        origin, the lists of an earlier batch of as many images, tokens are its packed ones [.., C], and keep says which
        of the first N of each image are kept;
    ``gather(lists, x) -> [capacity, C]``: kept tokens of x [B, N, C], zeros behind the last one;
    ``scatter(lists, x, fill) -> [B, N, C]``: packed x [capacity, C] to its positions; `fill` [B, N, C] where nothing
        was kept, None for zeros;
    ``first(lists, x) -> [B, C]``: the first kept token of each image, of packed x [capacity, C];
    ``pad(lists, x, length) -> [B, length, C]``: packed x [capacity, C] by image and number, zeros where an image has no
        such token;
    ``attend(lists, q, k, v) -> [capacity, H, D]``: attention of each image within itself, finite in rows of no image;
    ``attend_into(out, lists, q, k, v) -> out``: the same, written to `out`, contiguous;
    ``attend_backward(lists, q, k, v, out, grad) -> (dq, dk, dv)``, optional: gradients, contiguous, for the gradient
        `grad` of the result `out` of attention; zeros in rows of no image. Batches of a target without it have no
        gradients (`packed.backward`).
All results are NaN where the lists say that the batch did not fit. Tensors that are not of this batch raise
`PatternError` or `DeviceError`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.core.errors import DeviceError, PatternError

# Fields of the header: whether the batch did not fit, tokens kept, work items, images that keep nothing.
BAD, KEPT, ITEMS, EMPTY, HEADER = range(5)
# Fields of a work item: the first row of its image, the tokens of that image, the first query of the item among them.
FIRST_ROW, LENGTH, FIRST_QUERY, RECORD = range(4)


class PackedOffsets(NamedTuple):
    """Where the sections of the lists begin.

    images, tokens: B and N of the batch before packing. capacity: rows of packed tensors. rows: queries of a work item.
    Sections: the header, `starts` [B + 1] (cumulative lengths), `source` [capacity] (the token of each row, -1 for
    none), `position` [B * N] (the row of each token, -1 for none) and `work` [items, RECORD], the longest images first.
    """

    images: int
    tokens: int
    capacity: int
    rows: int

    @property
    def starts(self) -> int:
        """Offset of the cumulative lengths."""
        return HEADER

    @property
    def source(self) -> int:
        """Offset of the tokens that rows come from."""
        return HEADER + self.images + 1

    @property
    def position(self) -> int:
        """Offset of the rows that tokens go to."""
        return self.source + self.capacity

    @property
    def work(self) -> int:
        """Offset of the work items."""
        return self.position + self.images * self.tokens

    @property
    def items(self) -> int:
        """Most work items: each image, and the rows of no image, may fill their last one with a single row."""
        return (self.capacity + (self.images + 1) * (self.rows - 1)) // self.rows

    @property
    def size(self) -> int:
        """Values of the lists."""
        return self.work + self.items * RECORD

    def section(self, name: str) -> tuple[int, int]:
        """``(offset, count)`` of the row numbers in a section: of `starts`, the first row of each image."""
        count = {"source": self.capacity, "position": self.images * self.tokens, "starts": self.images}[name]
        return getattr(self, name), count

    def rows_into(self, name: str, width: int) -> tuple[int, ...]:
        """Shape of the rows of `width` values that are brought by the numbers of a section."""
        return (self.images, self.tokens, width) if name == "position" else (self.section(name)[1], width)

    def rows_from(self, name: str) -> tuple[int, ...]:
        """Shape, without the values of a row, of what the numbers of a section count."""
        return (self.images, self.tokens) if name == "source" else (self.capacity,)


def check_qkv(offsets: PackedOffsets, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Raise `PatternError` or `DeviceError` for q, k, v [capacity, H, D] that are not of this batch or differ in type,
    and for an `out` that cannot hold their result."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3 or len(x) != offsets.capacity or x.shape != q.shape:
            rest = "H, D" if x is q or q.ndim != 3 else ", ".join(map(str, q.shape[1:]))
            raise PatternError(
                f"{name}: expected shape ({offsets.capacity}, {rest}), a row for each token of the capacity, found "
                f"{tuple(x.shape)}"
            )
        if x.dtype != q.dtype or not x.is_floating_point():
            raise PatternError(f"{name}: expected a float dtype, the same for q, k and v, found {x.dtype}")
    check_tensors(q.device, q=q, k=k, v=v)
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise PatternError(
            f"out: expected contiguous {q.dtype} of shape {tuple(q.shape)}, found {out.dtype} of shape "
            f"{tuple(out.shape)}, strides {out.stride()}"
        )
    check_tensors(q.device, out=out)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            raise PatternError(f"out: expected memory that no input uses, found the memory of {name}")


def check_result(q: Tensor, **tensors: Tensor) -> None:
    """Raise `PatternError` or `DeviceError` for tensors that have not the form of the result of queries q."""
    for name, x in tensors.items():
        if x.shape != q.shape or x.dtype != q.dtype:
            raise PatternError(
                f"{name}: expected {q.dtype} of shape {tuple(q.shape)}, found {x.dtype} of {tuple(x.shape)}"
            )
    check_tensors(q.device, **tensors)


def check_rows(offsets: PackedOffsets, section: str, x: Tensor, fill: Tensor | None = None) -> None:
    """Raise `PatternError` or `DeviceError` for rows x, and a fill, that the numbers of a section are not for."""
    expected = offsets.rows_from(section)
    if tuple(x.shape[:-1]) != expected or x.ndim != len(expected) + 1:
        raise PatternError(f"expected tokens of shape ({', '.join(map(str, expected))}, C), found {tuple(x.shape)}")
    if fill is not None:
        wanted = offsets.rows_into(section, x.shape[-1])
        if tuple(fill.shape) != wanted or fill.dtype != x.dtype:
            raise PatternError(f"fill: expected {x.dtype} of shape {wanted}, found {fill.dtype} of {tuple(fill.shape)}")
        check_tensors(x.device, fill=fill)
    check_tensors(x.device, tokens=x)


def check_packed(x: Tensor) -> None:
    """Raise `PatternError` or `DeviceError` for tokens x that no batch has packed: they are [rows, C]."""
    if x.ndim != 2:
        raise PatternError(f"expected tokens of shape ({len(x)}, C), found {tuple(x.shape)}")
    check_tensors(x.device, tokens=x)


def check_keep(keep: Tensor) -> None:
    """Raise `PatternError` for a `keep` that kernels, which read bytes, would misread."""
    if keep.dtype != torch.bool:
        raise PatternError(f"keep: expected torch.bool, found {keep.dtype}")


def check_tensors(device: torch.device, **tensors: Tensor) -> None:
    """Raise `DeviceError` for tensors that are not on `device`, `PatternError` for those that record gradients."""
    for name, x in tensors.items():
        if x.device != device:
            raise DeviceError(f"{name}: expected a tensor on {device}, found {x.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise PatternError(f"{name}: packed batches have no backward; call this under torch.no_grad()")
