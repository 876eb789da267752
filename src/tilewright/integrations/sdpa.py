"""Slices in place of `scaled_dot_product_attention`, in modules that nobody has to change.

Calls that slices are for go by lists of keys; all others go to torch as they are, and `Slices.calls` counts both.
Slices are for self-attention of many tokens: as many queries as keys, head dims that the kernels have, no dropout, no
causal mask, and no mask but one that leaves out the last keys of a clip, as those of padded prompts.
"""

import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tilewright import slices
from tilewright.core import _internals, arguments
from tilewright.core.errors import ConfigError
from tilewright.core.precision import cast
from tilewright.slices import settings as slice_settings
from tilewright.slices.backends import EXECUTORS
from tilewright.slices.layout import HEAD_DIMS

Number = Annotated[int, msgspec.Meta(ge=0)]
DTYPES = torch.float32, torch.float16, torch.bfloat16


class Settings(slice_settings.Settings, frozen=True, forbid_unknown_fields=True):
    """Which keys are listed, as `slices.predict` takes it, and which calls slices are for.

    tokens: calls of fewer go to torch. first, last: so many tokens at the beginning and at the end are text, which
    attends to all keys and is listed by all queries: first 226 for CogVideoX, last 256 for HunyuanVideo. check: wait in
    each call and raise an error where a list did not fit or a mask has holes; else results are NaN there.
    """

    tokens: Number = 1024
    first: Number = 0
    last: Number = 0
    check: bool = False

    @property
    def stated(self) -> dict[str, Any]:
        """Keywords of `slices.predict`."""
        own = ("tokens", "first", "last", "check")
        return {name: value for name, value in super().stated.items() if name not in own}


class Slices:
    """Attention by slices with the signature of `scaled_dot_product_attention`.

    Parameters
    ----------
    **settings
        Fields of `Settings`: those of `slices.predict`, `first` and `last` tokens of text, and `check`.

    Attributes
    ----------
    calls : Counter
        How many calls went by ``"slices"``, and how many to torch for which reason.

    Raises
    ------
    ConfigError
        For settings that are unknown or out of range.

    Examples
    --------
    >>> import torch
    >>> from tilewright.integrations import sdpa
    >>> attention = sdpa.Slices(keep=0.25, budget=0.25)
    >>> q, k, v = torch.randn(3, 1, 2, 512, 64)
    >>> with torch.no_grad():
    ...     attention(q, k, v).shape
    torch.Size([1, 2, 512, 64])
    """

    def __init__(self, **settings: Settings):
        """settings: of `Settings`. Raises `ConfigError`."""
        try:
            self.settings = msgspec.convert(arguments.plain(settings), Settings)
        except msgspec.ValidationError as error:
            known = ", ".join(Settings.__struct_fields__)
            raise ConfigError(f"slices: {error}; settings: {known}") from None
        self._stated = self.settings.stated
        self.calls: Counter[str] = Counter()
        # By threads, each of which has modes of its own.
        self._entered: dict[int, list[TorchFunctionMode]] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attention of query [B, H, N, D] to key and value."""
        q, k, v = cast(query, key, value)
        reason = self._unfit(q, k, v, attn_mask, dropout_p, is_causal, scale)
        self.calls[reason or "slices"] += 1
        if reason:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        text = self.settings.first, self.settings.last
        lengths = None if attn_mask is None else lengths_of(attn_mask).expand(len(q))
        lists = slices.predict(q, k, scale=scale, text=text, lengths=lengths, **self._stated)
        if self.settings.check:
            lists.check(allow_empty=True)
        return slices.attend(q, k, v, lists, scale=scale)

    def _unfit(self, q, k, v, mask, dropout_p, is_causal, scale):
        """Why slices are not for a call, or None."""
        if not all(isinstance(x, torch.Tensor) and not x.is_nested and x.ndim == 4 for x in (q, k, v)):
            return "dimensions"
        if not q.shape == k.shape == v.shape:
            return "queries and keys differ"
        if not q.numel():
            return "no tokens"
        if q.shape[2] < self.settings.tokens:
            return "few tokens"
        if q.shape[2] <= self.settings.first + self.settings.last:
            return "text alone"
        if q.shape[3] not in HEAD_DIMS:
            return "head dim"
        if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype or any(x.stride(3) != 1 for x in (q, k, v)):
            return "types or strides"
        if q.device.type not in EXECUTORS or not q.device == k.device == v.device:
            return "device"
        if dropout_p or is_causal:
            return "dropout or causal mask"
        if mask is not None and not _of_keys(mask, q):
            return "mask"
        if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
            return "scale"
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return "gradient"
        return None if _internals.forward_level() < 0 else "gradient"

    @contextmanager
    def replacing(self) -> "Iterator[Slices]":
        """Context in which this takes the place of torch's function, wherever it is called from."""
        with _Replacing(self):
            yield self

    def attach(self, module: Any) -> Any:
        """Take the place of torch's function in calls of `module`. Returns a handle, whose ``remove()`` ends it."""
        before = module.register_forward_pre_hook(self._enter)
        # After an error, too.
        after = module.register_forward_hook(self._leave, always_call=True)
        return _Handle(before, after)

    def _enter(self, *_):
        mode = _Replacing(self)
        mode.__enter__()
        self._entered.setdefault(threading.get_ident(), []).append(mode)

    def _leave(self, *_):
        modes = self._entered[threading.get_ident()]
        modes.pop().__exit__(None, None, None)
        if not modes:
            del self._entered[threading.get_ident()]


class _Handle:
    def __init__(self, *hooks):
        self._hooks = hooks

    def remove(self):
        """End it."""
        for hook in self._hooks:
            hook.remove()


class _Replacing(TorchFunctionMode):
    """Where torch's function is called, `attention` is."""

    def __init__(self, attention):
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _of_keys(mask, q):
    """Whether a mask is one of keys alone."""
    shape = (1, 1, q.shape[2])
    if not isinstance(mask, torch.Tensor) or mask.device != q.device:
        return False
    return mask.dtype == torch.bool and mask.ndim == 4 and len(mask) in (1, len(q)) and tuple(mask.shape[1:]) == shape


def lengths_of(mask: torch.Tensor) -> torch.Tensor:
    """How many first keys of each clip a mask [B or 1, 1, 1, N_k] leaves in, int32 [B or 1]; the host does not wait.

    0 where it leaves out others than the last ones: that makes every result NaN, and `SliceLists.check` tells of it.
    """
    allowed = mask[:, 0, 0]
    lengths = allowed.sum(-1, dtype=torch.int32)
    first = torch.arange(allowed.shape[-1], device=mask.device) < lengths[:, None]
    return lengths * (allowed == first).all(-1)
