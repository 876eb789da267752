"""The tensors that a plan is called with: what is expected of them, and which have the same layout (stage T5)."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from tilewright.core import _internals
from tilewright.core.caches import Recent
from tilewright.core.errors import DeviceError, PatternError

# Calls are known for so many sizes of tensors, and so many layouts of a size. The oldest are dropped.
_SIZES, _LAYOUTS = 32, 4


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    shape: tuple[int, ...],
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise `PatternError` or `DeviceError` for tensors other than planned, or whose gradient would be lost.

    Planned are q [B, heads, shape[0], head_dim] and k, v [B, heads, shape[1], head_dim] of `dtype` on `device`, a
    ``torch.device``; one without an index stands for any of its kind.
    """
    for name, x, n in (("q", q, shape[0]), ("k", k, shape[1]), ("v", v, shape[1])):
        if x.is_nested:
            raise PatternError(f"{name}: expected a strided tensor, found a nested one")
        if x.ndim != 4 or tuple(x.shape) != (q.shape[0], heads, n, head_dim):
            batch = "B" if x is q or q.ndim != 4 else q.shape[0]
            wanted = f"({batch}, {heads}, {n}, {head_dim}), which is (batch, heads, tokens, head_dim)"
            swapped = x.ndim == 4 and tuple(x.shape[1:]) == (n, heads, head_dim)
            hint = "; transpose its dimensions 1 and 2" if swapped else ""
            raise PatternError(f"{name}: expected shape {wanted}, found {tuple(x.shape)}{hint}")
        if x.dtype != dtype:
            raise PatternError(f"{name}: expected dtype {dtype} as planned, found {x.dtype}")
        if x.layout != torch.strided:
            raise PatternError(f"{name}: expected a strided tensor, found one of layout {x.layout}")
        if x.device.type != device.type or device.index not in (None, x.device.index):
            raise DeviceError(f"{name}: expected a tensor on {device} as planned, found {x.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise PatternError(f"{name}: this operator has no backward; call it under torch.no_grad()")


def layout(*tensors: Any) -> tuple:
    """What kernels are compiled for of tensors: shapes, strides and types."""
    return tuple((x.shape, x.stride(), x.dtype) for x in tensors)


def same_layout(*tensors: Any) -> Callable:
    """``callable(*tensors) -> bool``: true only for tensors that `check` and a kernel treat as they treat these.

    They may lie elsewhere, in the same device's memory. Tensors that need a gradient match only where none is
    recorded. One tensor given twice, as k and v, is compared as two.
    """
    apart = _told_apart(tensors)
    same = compared = _internals.same_tensors(*apart)
    if any(x is not y for x, y in zip(tensors, apart, strict=True)):

        def same(*others):
            return compared(*_told_apart(others))

    if not any(x.requires_grad for x in tensors):
        return same
    return lambda *others: not torch.is_grad_enabled() and same(*others)


def _unlike(*_):
    return False


class Seen:
    """Calls by the layout of their tensors, those of late. Threads may share it.

    An entry is ``(like, call, …)``: ``like(*tensors)``, whether tensors are like those of that call, which were
    checked, see `same_layout`; ``call(*tensors)``, which returns None for tensors that go the usual way after all.

    last: the entry that was found last, or added; `NOTHING` before.
    """

    NOTHING: ClassVar[tuple[Any, ...]] = _unlike, None, False

    def __init__(self):
        """Nothing is known."""
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.last, self._entries = self.NOTHING, Recent(_SIZES, _LAYOUTS)

    def find(self, *tensors: torch.Tensor) -> Any:
        """The entry for such tensors, or None."""
        if self.last[0](*tensors):
            return self.last
        for entry in self._entries.get(tensors[0].numel()):
            if entry[0](*tensors):
                self.last = entry
                return entry
        return None

    def add(self, *entry: Any, size: int) -> tuple[Any, ...]:
        """Keep an entry; size: numbers in the first of its tensors."""
        self._entries.add(size, entry)
        self.last = entry
        return entry


def _told_apart(tensors):
    """`tensors`, with a view in place of each that came before: no comparison takes one twice."""
    seen, found = set(), []
    for x in tensors:
        found.append(x.view(x.shape) if id(x) in seen and isinstance(x, torch.Tensor) else x)
        seen.add(id(x))
    return found


def split(x: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values [B, H, N, D] of what one projection makes of tokens, [B, N, 3 H D]: views."""
    return x.view(x.shape[0], x.shape[1], 3, heads, x.shape[2] // (3 * heads)).permute(2, 0, 3, 1, 4).unbind(0)


def empty(q: torch.Tensor, n_queries: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Memory for a result [B, H, n_queries, D], the heads of a token side by side, as a network's next layer reads it.

    dtype: of the result, None for that of q.

    Executors return their results like this, and compilers expect it of the registered operator.
    """
    batch, heads, _, head_dim = q.shape
    width = heads * head_dim
    strides = (n_queries * width, head_dim, width, 1)
    return q.new_empty_strided((batch, heads, n_queries, head_dim), strides, dtype=dtype)


def by_token(out: torch.Tensor) -> torch.Tensor:
    """A result in memory as `empty` gives, copied where it is in other."""
    return out if out.transpose(1, 2).is_contiguous() else empty(out, out.shape[2]).copy_(out)


def own(out: torch.Tensor) -> torch.Tensor:
    """A result as no view, which who called could not write to: torch refuses views that were made out of its sight."""
    return out.data


def empty_like_result(x: torch.Tensor) -> Callable:
    """``callable()``: memory like that of `x`, on the current GPU as compiled code asks for it, at half the cost.

    As much of it as `x` has: kernels may fill rows that are longer than what is shown of them, the last one, too.
    """
    shape, stride = tuple(x.shape), x.stride()
    held = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    shown = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if x.numel() and held > shown:
        whole = _memory(x, (held,), (1,))
        return lambda: own(whole().as_strided(shape, stride))
    return _memory(x, shape, stride)


def _memory(x, shape, stride):
    """``callable()``: memory of the type of `x`, where it lies."""
    if x.device.type == "cuda":
        return partial(_internals.empty_strided_cuda, shape, stride, x.dtype)
    return partial(x.new_empty_strided, shape, stride)
