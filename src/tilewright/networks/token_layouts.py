"""How the kept tokens of a batch stand in memory: in a rectangle, or packed one image after the other.

An image's tokens keep their order, the class token first. A *position* is the number of a token in its image, from 0.
Both layouts offer

    ``n_batch``: images. ``length`` (L): a bound of the tokens of an image, known to the host.
    ``valid``: bool [B, L], the positions that hold a token.
    ``attend(q, k, v)``: attention of each image within itself; q, k, v [..., H, D], strided, and so is the result.
    ``padded(x)``: tokens [..., *] by image and position [B, L, *]; positions without a token hold finite values.
    ``put(x, position, y)``: tokens x [..., C] with the one at position int64 [B] of its image replaced by y [B, C], in
        place.
    ``pack(x, keep, capacity)``: the tokens that are kept, bool [B, L], as a packing of `tilewright.packed.pack`.
    ``first(x)``: the class tokens, [B, *].
    ``check()``: raise `PatternError` when the tokens were more than the layout could hold; waits for the device.
    ``choice``: of a layout that a pruning made, the `packed.pruners.Choice` by which the network made it.

None but `check` waits for the device.
"""

from typing import Any

import torch
import torch.nn.functional as F

from tilewright.core.errors import PatternError
from tilewright.packed import pack as ragged
from tilewright.torch_attention import ALIGNED


class _Once:
    """A property that is worked out once, as `functools.cached_property`, whose lock in Python 3.11 ``torch.compile``
    cannot follow."""

    def __init__(self, make):
        self._make = make

    def __set_name__(self, owner, name):
        self._name = name

    def __get__(self, layout, owner=None):
        made = self._make(layout)
        setattr(layout, self._name, made)
        return made


class Rectangle:
    """Tokens [B, L, C], those of an image first. lengths: int64 [B], or None where all positions hold one."""

    def __init__(self, n_batch: int, length: int, device: torch.device, lengths: torch.Tensor | None = None):
        """Lay out `n_batch` images of up to `length` tokens on `device`."""
        self.n_batch, self.length, self.device, self.lengths = n_batch, length, device, lengths
        self._mask: Any = None

    @_Once
    def valid(self) -> torch.Tensor:
        """See the module."""
        return _valid(self.n_batch, self.length, self.device, self.lengths)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See the module; positions without a token are masked."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.additive(q)).transpose(1, 2)

    def additive(self, like: torch.Tensor) -> torch.Tensor:
        """Mask [B, 1, 1, L] of the type of `like`, made in the first layer; None where all positions hold a token."""
        if self._mask is None and self.lengths is not None:
            shape = self.n_batch, 1, 1, -(-self.length // ALIGNED) * ALIGNED
            mask = torch.zeros(shape, dtype=like.dtype, device=like.device)[..., : self.length]
            self._mask = mask.masked_fill_(~self.valid[:, None, None], -torch.inf)
        return self._mask

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """See the module."""
        return x

    def put(self, x: torch.Tensor, position: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See the module."""
        return _put(x, position, y)

    def pack(self, x: torch.Tensor, keep: torch.Tensor, capacity: int | None) -> ragged.Packing:
        """See the module."""
        return ragged.pack(keep, capacity, x)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """See the module."""
        return x[:, 0]

    def compact(self, x: torch.Tensor, keep: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens x with those in keep [B, L] put first, cut to `length`: ``(x, lengths)``."""
        order = keep.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :length]
        return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1])), keep.sum(1)

    def check(self) -> None:
        """See the module."""
        if self.lengths is not None and (most := int(self.lengths.max())) > self.length:
            raise PatternError(f"capacity: expected positions for the {most} tokens of an image, found {self.length}")


class Packed:
    """Tokens [capacity, C], image after image, as a packing of `tilewright.packed.pack` has them."""

    def __init__(self, packing: ragged.Packing, length: int, even: bool = False):
        """packing: with ``starts`` int32 [B + 1] on the device. length: a bound of the tokens of an image. even: each
        image has that many, and the packing no other rows: tokens by image and position are then a view of it."""
        self.packing, self.length, self.even = packing, length, even
        self.n_batch = len(packing.starts) - 1

    @_Once
    def valid(self) -> torch.Tensor:
        """See the module."""
        starts = self.packing.starts
        return _valid(self.n_batch, self.length, starts.device, None if self.even else starts.diff())

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See the module."""
        return self.packing.attend(q, k, v)

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """See the module."""
        if self.even:
            return x.unflatten(0, (self.n_batch, self.length))
        return self.packing.pad(x.reshape(len(x), -1), self.length).view(self.n_batch, self.length, *x.shape[1:])

    def put(self, x: torch.Tensor, position: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See the module."""
        if self.even:
            return _put(self.padded(x), position, y).flatten(0, 1)
        # Where the capacity was exceeded there may be no such row; the values are NaN then.
        put = x.index_copy if x.requires_grad else x.index_copy_
        return put(0, (self.packing.starts[:-1] + position).clamp_(max=len(x) - 1), y)

    def pack(self, x: torch.Tensor, keep: torch.Tensor, capacity: int | None) -> ragged.Packing:
        """See the module."""
        if self.even:
            return ragged.pack(keep, capacity, self.padded(x))
        return ragged.pack(keep, capacity, x, origin=self.packing)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """See the module."""
        if self.even:
            return self.padded(x)[:, 0]
        return self.packing.first(x.flatten(1)).unflatten(1, x.shape[1:])

    def check(self) -> None:
        """See the module."""
        self.packing.check()


def _valid(n_batch, length, device, lengths):
    """bool [B, L]: the first lengths [B] positions of each image; None: all of them."""
    if lengths is None:
        return torch.ones(n_batch, length, dtype=torch.bool, device=device)
    return torch.arange(length, device=device) < lengths[:, None]


def _put(x, position, y):
    """Tokens x [B, L, C] with the one at position [B] of each image replaced by y [B, C], in place where no gradient
    needs what was there."""
    put = x.scatter if x.requires_grad else x.scatter_
    return put(1, position[:, None, None].expand(-1, 1, x.shape[-1]), y[:, None])
