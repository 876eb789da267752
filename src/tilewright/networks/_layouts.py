"""How the kept tokens of a batch stand in memory: in a rectangle, or packed one image after the other.

An image's tokens keep their order, the class token first; its *places* count them from 0. Both layouts offer

    ``n_batch``, ``slots``: images, and a bound of the tokens that one of them has, known to the host.
    ``valid``: bool [B, slots], which places hold a token.
    ``attend(q, k, v)``: attention of each image within itself; q, k, v [..., H, D], strided, and so is the result.
    ``padded(x)``: tokens [..., *] by image and place [B, slots, *]; what stands where no token does is finite.
    ``put(x, place, y)``: tokens x [..., C] with the one at place int64 [B] of its image replaced by y [B, C], in place.
    ``pack(x, keep, capacity)``: the tokens that are kept, bool [B, slots], as a packing of `tilewright.ragged`.
    ``first(x)``: the class tokens, [B, *].
    ``check()``: raise `PatternError` when the tokens were more than the layout could hold; the host asks.
    ``choice``: of a layout that a pruning made, the `pruners.Choice` by which the network made it.

None but `check` waits for the device.
"""

import torch
import torch.nn.functional as F

from tilewright import ragged
from tilewright.core.errors import PatternError
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
    """Tokens [B, slots, C], those of an image first. lengths: int64 [B], or None where all places hold one."""

    def __init__(self, n_batch, slots, device, lengths=None):
        """Lay out `n_batch` images of up to `slots` tokens on `device`."""
        self.n_batch, self.slots, self.device, self.lengths = n_batch, slots, device, lengths
        self._mask = None

    @_Once
    def valid(self):
        """See the module."""
        return _valid(self.n_batch, self.slots, self.device, self.lengths)

    def attend(self, q, k, v):
        """See the module; places without a token are masked."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.additive(q)).transpose(1, 2)

    def additive(self, like):
        """Mask [B, 1, 1, slots] of the type of `like`, made in the first layer; None where all places hold a token."""
        if self._mask is None and self.lengths is not None:
            shape = self.n_batch, 1, 1, -(-self.slots // ALIGNED) * ALIGNED
            mask = torch.zeros(shape, dtype=like.dtype, device=like.device)[..., : self.slots]
            self._mask = mask.masked_fill_(~self.valid[:, None, None], -torch.inf)
        return self._mask

    def padded(self, x):
        """See the module."""
        return x

    def put(self, x, place, y):
        """See the module."""
        return _put(x, place, y)

    def pack(self, x, keep, capacity):
        """See the module."""
        return ragged.pack(keep, capacity, x)

    def first(self, x):
        """See the module."""
        return x[:, 0]

    def compact(self, x, keep, slots):
        """Tokens x with those in keep [B, slots] put first, cut to `slots`: ``(x, lengths)``."""
        order = keep.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :slots]
        return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1])), keep.sum(1)

    def check(self):
        """See the module."""
        if self.lengths is not None and (most := int(self.lengths.max())) > self.slots:
            raise PatternError(f"capacity: expected places for the {most} tokens of an image, found {self.slots}")


class Packed:
    """Tokens [capacity, C], image after image, as a packing of `tilewright.ragged` has them."""

    def __init__(self, packing, slots, even=False):
        """packing: with ``starts`` int32 [B + 1] on the device. slots: a bound of the tokens of an image; even: what
        each has, and the packing no more rows than these, which then are by image and place what they are packed."""
        self.packing, self.slots, self.even = packing, slots, even
        self.n_batch = len(packing.starts) - 1

    @_Once
    def valid(self):
        """See the module."""
        starts = self.packing.starts
        return _valid(self.n_batch, self.slots, starts.device, None if self.even else starts.diff())

    def attend(self, q, k, v):
        """See the module."""
        return self.packing.attend(q, k, v)

    def padded(self, x):
        """See the module."""
        if self.even:
            return x.unflatten(0, (self.n_batch, self.slots))
        return self.packing.pad(x.reshape(len(x), -1), self.slots).view(self.n_batch, self.slots, *x.shape[1:])

    def put(self, x, place, y):
        """See the module."""
        if self.even:
            return _put(self.padded(x), place, y).flatten(0, 1)
        # Where the capacity was exceeded there may be no such row; the values are NaN then.
        return x.index_copy_(0, (self.packing.starts[:-1] + place).clamp_(max=len(x) - 1), y)

    def pack(self, x, keep, capacity):
        """See the module."""
        if self.even:
            return ragged.pack(keep, capacity, self.padded(x))
        return ragged.pack(keep, capacity, x, origin=self.packing)

    def first(self, x):
        """See the module."""
        if self.even:
            return self.padded(x)[:, 0]
        return self.packing.first(x.flatten(1)).unflatten(1, x.shape[1:])

    def check(self):
        """See the module."""
        self.packing.check()


def _valid(n_batch, slots, device, lengths):
    """bool [B, slots]: the first of an image's places, so many as lengths [B] tells; None: all of them."""
    if lengths is None:
        return torch.ones(n_batch, slots, dtype=torch.bool, device=device)
    return torch.arange(slots, device=device) < lengths[:, None]


def _put(x, place, y):
    """Tokens x [B, slots, C] with the one at place [B] of each image replaced by y [B, C], in place."""
    return x.scatter_(1, place[:, None, None].expand(-1, 1, x.shape[-1]), y[:, None])
