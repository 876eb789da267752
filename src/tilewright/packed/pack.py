"""Packed batches of images that keep different numbers of tokens: pack, attend, unpack (stage T5).

A batch of pruned images is one block-diagonal pattern, and packing is its order. Only the device knows what is kept.
The host gives a *capacity*, the rows of every packed tensor, and never waits. Where a batch keeps more, or an image
keeps nothing, all results of the batch are NaN, and `Packing.check` raises an error with the reason.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from importlib import import_module
from numbers import Real

import numpy as np
import torch
from torch import Tensor, library

from tilewright import devices, graph
from tilewright.core import _internals, arguments, transforms
from tilewright.core.errors import DeviceError, PatternError
from tilewright.core.operators import exporting, watched
from tilewright.core.transforms import call
from tilewright.packed import backward
from tilewright.packed import lists as packed_lists
from tilewright.packed.lists import BAD, EMPTY, KEPT, PackedOffsets

# Modules of the devices that run packed batches, by torch's name of their device.
EXECUTORS = devices.offering("packed.executor")
# Queries of a work item: those of one tensor-core product of a warp group, fewer where images have fewer tokens.
ROWS, FEWEST_ROWS = 64, 16
_INTEGERS = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64


def pack(
    keep: Tensor,
    capacity: int | None = None,
    tokens: Tensor | None = None,
    rows: int | None = None,
    origin: "Packing | None" = None,
) -> "Packing":
    """Pack the tokens that each image of a batch keeps, in their order.

    Parameters
    ----------
    keep : Tensor
        Bool [B, N]: which tokens each image keeps.
    capacity : int, optional
        Rows of packed tensors, more or fewer than are kept. None takes as many as are kept; the host then waits for a
        GPU, and the batch is checked at once.
    tokens : Tensor, optional
        [B, N, C], gathered by the same kernel, see `Packing.tokens`.
    rows : int, optional
        Queries of a work item, a power of two from 16. The default follows from N.
    origin : Packing, optional
        The packing of as many images that has packed `tokens` [its capacity, C] already. `keep` then says which tokens
        of each image go on.

    Returns
    -------
    Packing
        What attends, gathers and scatters packed tensors.

    Raises
    ------
    PatternError
        For arguments that are no such batch, and without a capacity for an image that keeps nothing.
    DeviceError
        For a device without an executor.

    Examples
    --------
    >>> import torch
    >>> from tilewright import ragged
    >>> packing = ragged.pack(torch.tensor([[True, True, False], [True, False, False]]))
    >>> q = k = v = torch.randn(packing.capacity, 2, 16)  # [rows, heads, values of a head]
    >>> packing.attend(q, k, v).shape
    torch.Size([3, 2, 16])
    """
    arguments.of_kind(Tensor, "a tensor", PatternError, keep=keep, tokens=tokens)
    if tokens is not None and tokens.is_nested:
        raise PatternError("tokens: expected a strided tensor, found a nested one")
    if keep is None or keep.ndim != 2 or keep.dtype != torch.bool or not keep.numel():
        raise PatternError(f"keep: expected bool of shape (B, N), found {arguments.shown(keep)}")
    if keep.device.type not in EXECUTORS:
        raise DeviceError(f"keep: expected a tensor on one of {', '.join(EXECUTORS)}, found {keep.device}")
    capacity = None if capacity is None else arguments.whole("capacity", capacity, error=PatternError)
    # While a program is traced, sizes are tensors.
    images, n = map(int, keep.shape)
    if rows is None:
        rows = min(ROWS, max(FEWEST_ROWS, 1 << (n - 1).bit_length()))
    rows = arguments.whole("rows", rows, error=PatternError)
    if rows < FEWEST_ROWS or rows & (rows - 1):
        raise PatternError(f"rows: expected a power of two from {FEWEST_ROWS}, found {rows}")
    if origin is not None:
        _check_origin(origin, images, tokens)
    offsets = PackedOffsets(images, n, max(1, _kept(keep)) if capacity is None else capacity, rows)
    lists, tokens = _packed(offsets, keep.contiguous(), tokens, origin)
    packing = Packing(offsets, lists, tokens)
    if capacity is None:
        packing.check()
    return packing


def _kept(keep):
    """How many tokens are kept. Raises `PatternError` where that is not one number, known to the host."""
    if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
        # Cuts the compiled code in two.
        return int(keep.sum())
    if exporting():
        raise PatternError("capacity: expected a number in a program that is exported or traced, found None")
    return transforms.values("keep: expected a batch, or a capacity that is stated", keep.sum()[None])[0]


def _packed(offsets, keep, tokens, origin):
    """``(lists, packed tokens or None)``, by the operators where the call is compiled or traced."""
    seen = watched(keep) or _records(keep.device, tokens)
    if tokens is None:
        return call("ragged_lists", keep, offsets) if seen else _executor(offsets, keep.device).lists(keep), None
    given = keep, tokens, None if origin is None else origin.lists
    if transforms.transformed():
        # Lists that no token counts in: all images of a transform may have them in common.
        return call("ragged_lists", keep, offsets), call("ragged_pack", *given, offsets)[1]
    return call("ragged_pack", *given, offsets) if seen else _executor(offsets, keep.device).pack(*given)


def _check_origin(origin, images, tokens):
    """Raise `PatternError` for tokens that `origin` has not packed, or another number of images."""
    arguments.of_kind(Packing, "a Packing", PatternError, origin=origin)
    if origin.offsets.images != images:
        raise PatternError(f"origin: expected the packing of {images} images, found one of {origin.offsets.images}")
    if tokens is None or tokens.ndim != 2 or len(tokens) != origin.capacity:
        found = None if tokens is None else tuple(tokens.shape)
        raise PatternError(f"tokens: expected shape ({origin.capacity}, C), as `origin` has packed them, found {found}")


def pack_lengths(
    lengths: Tensor | list[int],
    capacity: int | None = None,
    *,
    tokens: Tensor | None = None,
    rows: int | None = None,
) -> "Packing":
    """Pack images that keep the first ``lengths[b]`` of their tokens; N is the greatest length.

    Parameters
    ----------
    lengths : Tensor or list of int
        Int [B] on a CPU or GPU. The host waits for them.
    capacity, tokens, rows
        As in `pack`.

    Returns
    -------
    Packing

    Raises
    ------
    PatternError
        For an image without tokens, and for lengths whose sum exceeds the capacity.
    """
    try:
        given = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise PatternError(f"lengths: expected integers of shape (B,), found {arguments.shown(lengths)}") from None
    if given.ndim != 1 or not len(given) or given.dtype not in _INTEGERS:
        raise PatternError(f"lengths: expected integers of shape (B,), found {arguments.shown(given)}")
    lengths = given
    least, most = transforms.values("lengths: expected those of one batch", torch.stack(lengths.aminmax()))
    if least < 1:
        raise PatternError(f"lengths: expected at least one token an image, found {least}")
    keep = torch.arange(most, device=lengths.device) < lengths[:, None]
    packing = pack(keep, capacity, tokens, rows)
    packing.check()
    return packing


class Packing:
    """A batch of images of different numbers of tokens, one after the other; `pack` makes it.

    Attributes
    ----------
    tokens : Tensor or None
        [capacity, C], the tokens that were packed.
    capacity : int
        Rows of a packed tensor.
    offsets, lists
        Sections of the lists, and the lists, int32: the device's own description of the batch.

    Notes
    -----
    On a GPU, calls with tensors of a known layout do not wait and take a few microseconds of the host's time. They may
    be captured in a CUDA graph, and so may `pack` with a capacity.
    """

    def __init__(self, offsets: PackedOffsets, lists: Tensor, tokens: Tensor | None = None) -> None:
        """Wrap what an executor made."""
        self.offsets, self.lists, self.tokens = offsets, lists, tokens

    @cached_property
    def _executor(self):
        return _executor(self.offsets, self.lists.device)

    def _through_operator(self, *tensors):
        """Whether a call on `tensors` is compiled or traced, or is to be differentiated."""
        for x in tensors:
            if not isinstance(x, Tensor) or x.is_nested:
                raise PatternError(f"expected a tensor of the batch, found {arguments.shown(x)}")
        return watched(tensors[0]) or _records(self.lists.device, *tensors)

    @property
    def capacity(self) -> int:
        """Rows of packed tensors."""
        return self.offsets.capacity

    @property
    def starts(self) -> Tensor:
        """int32 [B + 1]: cumulative lengths, on the device; at most the capacity."""
        return self.lists[self.offsets.starts : self.offsets.source]

    @property
    def source(self) -> Tensor:
        """int32 [capacity]: the token of each row, as ``b * N + n``; -1 for none."""
        return self.lists[self.offsets.source : self.offsets.position]

    def gather(self, x: Tensor) -> Tensor:
        """The kept tokens of a padded tensor.

        Parameters
        ----------
        x : Tensor
            [B, N, C].

        Returns
        -------
        Tensor
            [capacity, C], with zeros after the last token.
        """
        if self._through_operator(x):
            return call("ragged_gather", self.lists, x, self.offsets)
        return self._executor.gather(self.lists, x)

    def scatter(self, x: Tensor, fill: Tensor | float = 0) -> Tensor:
        """Packed tokens at their positions in a padded tensor.

        Parameters
        ----------
        x : Tensor
            [capacity, C].
        fill : Tensor or 0
            [B, N, C], values of positions without a kept token.

        Returns
        -------
        Tensor
            [B, N, C].
        """
        if not isinstance(fill, (Tensor, Real)) or (not isinstance(fill, Tensor) and fill != 0):
            raise PatternError(f"fill: expected a tensor or 0, found {arguments.shown(fill)}")
        given = fill if isinstance(fill, Tensor) else None
        if self._through_operator(x, *(() if given is None else (given,))):
            return call("ragged_scatter", self.lists, x, given, self.offsets)
        return self._executor.scatter(self.lists, x, given)

    def first(self, x: Tensor) -> Tensor:
        """The first kept token of each image, such as the class token.

        Parameters
        ----------
        x : Tensor
            [capacity, C].

        Returns
        -------
        Tensor
            [B, C].
        """
        if self._through_operator(x):
            return call("ragged_first", self.lists, x, self.offsets)
        return self._executor.first(self.lists, x)

    def pad(self, x: Tensor, length: int) -> Tensor:
        """Packed tokens by image, padded to one length.

        Parameters
        ----------
        x : Tensor
            [capacity, C].
        length : int
            Tokens of an image in the result, at least those of any image.

        Returns
        -------
        Tensor
            [B, length, C], with zeros after the tokens of an image.

        Raises
        ------
        PatternError
            On a CPU, for a length below the tokens of an image. A GPU, which does not wait, leaves out further tokens.
        """
        length = arguments.whole("length", length, error=PatternError)
        if self._through_operator(x):
            return call("ragged_pad", self.lists, x, length, self.offsets)
        return self._executor.pad(self.lists, x, length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """Attention of each image within itself, with the scale ``D ** -0.5``.

        Parameters
        ----------
        q, k, v : Tensor
            [capacity, H, D], with stride 1 in the last dimension.
        out : Tensor, optional
            Contiguous memory for the result that no input uses.

        Returns
        -------
        Tensor
            [capacity, H, D].

        Raises
        ------
        PatternError, DeviceError
            For tensors that are not of this batch, such as those of another number of rows.
        """
        if self._through_operator(q, k, v):
            made = call("ragged_attend", self.lists, q, k, v, self.offsets)
            return made if out is None else out.copy_(made)
        if out is None:
            return self._executor.attend(self.lists, q, k, v)
        arguments.of_kind(Tensor, "a tensor", PatternError, out=out)
        if out.is_nested or out.layout != torch.strided:
            raise PatternError(f"out: expected a strided tensor, found {'nested' if out.is_nested else out.layout}")
        return self._executor.attend_into(out, self.lists, q, k, v)

    def check(self) -> None:
        """Wait for the device and check the batch.

        Raises
        ------
        PatternError
            If the batch exceeds its capacity, or an image keeps no token.
        """
        header = transforms.values("check: expected one batch", self.lists[: packed_lists.HEADER])
        if header[EMPTY]:
            raise PatternError(f"expected every image to keep a token, found {header[EMPTY]} that keep none")
        if header[BAD]:
            raise PatternError(f"capacity: expected at least the {header[KEPT]} tokens kept, found {self.capacity}")

    def graph(self) -> graph.Graph:
        """The batch as one block-diagonal `graph.Graph` over the kept tokens, on the host. Checks the batch."""
        self.check()
        starts = self.starts.cpu().numpy().astype(np.int64)
        owner = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
        return graph.from_distinct_rows(starts, np.arange(len(owner), dtype=np.int32), owner, len(owner))


@_internals.constant
def differentiates(device: str | torch.device) -> bool:
    """Whether packed batches have gradients on a device of this kind. Raises `DeviceError` where they do not run."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError, ValueError):
        kind = None
    if kind not in EXECUTORS:
        raise DeviceError(f"expected one of {', '.join(EXECUTORS)}, found {arguments.shown(device)}")
    return hasattr(import_module(EXECUTORS[kind]).Executor, "attend_backward")


def _records(device, *tensors):
    """Whether a call on tensors, or None, is to be differentiated where it can be; else the executor refuses it."""
    if not torch.is_grad_enabled():
        return False
    needed = any(x is not None and x.requires_grad for x in tensors)
    return needed and differentiates(device)


# Offsets differ from batch to batch without a capacity. An executor holds no tensors: a few kilobytes.
@lru_cache(256)
def _executor(offsets, device):
    return import_module(EXECUTORS[device.type]).Executor(offsets, device)


# The same as operators, for ``torch.compile``, ``torch.export`` and tracing. Offsets are their last argument.

_LIBRARY = library.Library("tilewright", "FRAGMENT")


def _method(name: str) -> Callable:
    """The operator that calls a method of the executor where its first argument lies."""
    return lambda offsets, first, *rest: getattr(_executor(offsets, first.device), name)(first, *rest)


def _rows(section: str) -> Callable:
    """The fake of an operator that brings rows of x by the numbers of a section."""
    return lambda offsets, lists, x, *_: x.new_empty(offsets.rows_into(section, x.shape[-1]))


def _fake_lists(offsets, keep):
    return keep.new_empty(offsets.size, dtype=torch.int32)


def _fake_pack(offsets, keep, tokens, origin):
    return _fake_lists(offsets, keep), tokens.new_empty(offsets.capacity, tokens.shape[-1])


def _fake_pad(offsets, lists, x, length):
    return x.new_empty(offsets.images, length, x.shape[-1])


def _fake_attend(offsets, lists, q, k, v):
    return q.new_empty(q.shape)


def _fake_attend_backward(offsets, lists, q, k, v, out, grad):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _define(name: str, arguments: str, result: str, fake: Callable) -> None:
    """Define ``tilewright::ragged_<name>``, whose offsets come as a list of int."""

    def taking_list(call):
        return lambda *given: call(PackedOffsets(*given[-1]), *given[:-1])

    schema = f"ragged_{name}({arguments}, int[] offsets) -> {result}"
    transforms.define(_LIBRARY, schema, taking_list(_method(name)), taking_list(fake))


_define("lists", "Tensor keep", "Tensor", _fake_lists)
_define("pack", "Tensor keep, Tensor tokens, Tensor? origin", "(Tensor, Tensor)", _fake_pack)
_define("gather", "Tensor lists, Tensor x", "Tensor", _rows("source"))
_define("scatter", "Tensor lists, Tensor x, Tensor? fill", "Tensor", _rows("position"))
_define("first", "Tensor lists, Tensor x", "Tensor", _rows("starts"))
_define("pad", "Tensor lists, Tensor x, int length", "Tensor", _fake_pad)
_define("attend", "Tensor lists, Tensor q, Tensor k, Tensor v", "Tensor", _fake_attend)
_define(
    "attend_backward",
    "Tensor lists, Tensor q, Tensor k, Tensor v, Tensor out, Tensor grad",
    "(Tensor, Tensor, Tensor)",
    _fake_attend_backward,
)
backward.register(differentiates)
