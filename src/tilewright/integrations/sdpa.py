"""Slices in place of `scaled_dot_product_attention`, in modules that nobody has to change.

Calls that slices are for go by lists of keys; all others go to torch as they are, and `Slices.calls` counts both.
Slices are for self-attention of many tokens: as many queries as keys, head dims that the kernels have, no dropout, no
causal mask, and no mask but one that leaves out the last keys of a clip, or of its text, as those of padded prompts.
"""

import itertools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tilewright import slices
from tilewright.core import _internals, arguments
from tilewright.core.errors import ConfigError
from tilewright.core.operators import records
from tilewright.core.precision import cast
from tilewright.core.transforms import transformed
from tilewright.devices import qkv
from tilewright.slices import operators
from tilewright.slices import settings as slice_settings
from tilewright.slices.backends import EXECUTORS
from tilewright.slices.layout import HEAD_DIMS

Number = slice_settings.Number
# Tokens that attend to all keys and that all queries list: those from a first one to before an end.
Range = tuple[Number, Number]
DTYPES = torch.float32, torch.float16, torch.bfloat16
# Attention that compiled code calls, by name.
_NAMED: "weakref.WeakValueDictionary[str, Slices]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class Settings(slice_settings.Stepped, frozen=True, forbid_unknown_fields=True):
    """Which keys are listed, as `slices.predict` takes it, and which calls slices are for.

    tokens: calls of fewer go to torch. first, last: so many tokens at the beginning and at the end are text, which
    attends to all keys and is listed by all queries: first 226 for CogVideoX, last 256 for HunyuanVideo. dense: ranges
    ``(first, end)`` of other such tokens, or names that `diffusers.denoising` knows: ``"text"``, ``"first_frame"``,
    ``"reference"``. steps: keep lists across denoising steps, as `diffusers.denoising` counts them; None: predict in
    each call. check: wait in each call and raise an error where a list did not fit or a mask has holes; else results
    are NaN there.
    """

    tokens: Number = 1024
    first: Number = 0
    last: Number = 0
    dense: tuple[str | Range, ...] = ()
    check: bool = False

    @property
    def stated(self) -> dict[str, Any]:
        """Keywords of `slices.predict`."""
        own = ("tokens", "first", "last", "dense", "check")
        return {name: value for name, value in super().stated.items() if name not in own}


class Dense(NamedTuple):
    """Which tokens of a sequence stay dense. first, last: tokens of text. ranges: others.

    pairs: masks of pairs are those of keys, as the first query has them, and of queries likewise.
    """

    first: int = 0
    last: int = 0
    ranges: tuple[Range, ...] = ()
    pairs: bool = False


@dataclass
class Place:
    """Where in the denoising of a video attention is called: lists are kept by it. layer: of the next call."""

    steps: slices.Steps
    step: int = 0
    branch: Hashable = None
    layer: int = 0


class Slices:
    """Attention by slices with the signature of `scaled_dot_product_attention`.

    Parameters
    ----------
    **settings
        Fields of `Settings`: those of `slices.predict`, `first` and `last` tokens of text, and `check`.

    Attributes
    ----------
    calls : Counter
        How many calls went by ``"slices"``, and how many to torch for which reason. Not those that a CUDA graph
        replays; of compiled code those alone that record no gradient and whose shapes and types slices are for.

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
        self._set(_settings(settings))
        self._name = f"slices {next(_NUMBERS)}"
        _NAMED[self._name] = self
        # What a host says of the network that calls: its text, and where it is; None where nobody says anything.
        self.stated_dense: Dense | None = None
        self.place: Place | None = None
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
        given = attn_mask, dropout_p, is_causal, scale, enable_gqa
        return self.both(query, key, value, *given)[0]

    def both(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        lse: bool = False,
        parts: int = 1,
        own: slice = slice(None),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the queries `own`, and with `lse` its natural log-sum-exps [B, H, N], as hosts ask for them.

        parts: the sequence is so many equal ones, one after the other, each with its share of the text. Raises
        `ConfigError` for log-sum-exps of a call with a mask or dropout that slices are not for.
        """
        q, k, v = cast(query, key, value)
        reason = _unlike(q, k, v, dropout_p, is_causal)
        if not torch.compiler.is_compiling():
            reason = reason or self._unfit(q, k, v, attn_mask, scale)
            self.calls[reason or "slices"] += 1
        elif reason is None and parts == 1 and own == slice(None) and not _looked_into(q, k, v):
            # Settings, counts and places are of the run: there would be code for each.
            return self._by_name(q, k, v, attn_mask, scale, lse)
        else:
            reason = reason or self._unfit(q, k, v, attn_mask, scale)
        if reason is None:
            return self._attend(q, k, v, attn_mask, scale, lse, parts, own)
        query = query if own == slice(None) else query[:, :, own]
        if lse:
            if attn_mask is not None or dropout_p or is_causal:
                raise ConfigError(f"log-sum-exps: expected a call without a mask and dropout, found others ({reason})")
            return slices.dense(q[:, :, own], k, v, scale=scale)
        given = attn_mask, dropout_p, is_causal
        return F.scaled_dot_product_attention(query, key, value, *given, scale=scale, enable_gqa=enable_gqa), None

    def _set(self, settings):
        self.settings, self._stated = settings, settings.stated
        # What a host does in a call, or waits for, no CUDA graph replays.
        self._on_host = settings.steps is not None or settings.check

    def __reduce__(self) -> tuple:
        # A copy has a name of its own.
        return _copied, (self.settings,)

    def _by_name(self, q, k, v, mask, scale, lse):
        """`both` as compiled code calls it."""
        if lse:
            return torch.ops.tilewright.slices_named_lse(q, k, v, mask, scale, self._name, [])
        by = torch.ops.tilewright.slices_named_on_host if self._on_host else torch.ops.tilewright.slices_named
        return by(q, k, v, mask, scale, self._name, []), None

    @contextmanager
    def using(self, **changes: Any) -> "Iterator[Slices]":
        """Context with other settings, for calls of all threads. Raises `ConfigError`."""
        before = self.settings
        self._set(_settings(msgspec.structs.asdict(before) | changes))
        try:
            yield self
        finally:
            self._set(before)

    def _attend(self, q, k, v, mask, scale, lse, parts, own):
        """`both` of a call that slices are for."""
        n = q.shape[2]
        dense = self.dense
        # Numbers alone, as a compiler takes them.
        given = n, dense.first, dense.last, dense.ranges, mask is not None, parts
        first, last = _ends(*given)
        index = _index(q.device, *given)
        lengths = None
        if mask is not None:
            # The first query is of the video, or text of which something is always left in.
            mask = mask[:, :, :1]
            lengths = lengths_of(mask if index is None else mask.index_select(3, index[0])).expand(len(q))
        if index is not None:
            q, k, v = (_taken(x, index[0]) for x in (q, k, v))
        if own == slice(None):
            out, sums = self._by_lists(q, k, v, lengths, scale, lse, text=(first, last))
            place = None if index is None else index[1]
        else:
            # Their groups whole, and their text.
            lo, hi, of_text, place = _of_own(q.device, self.settings.rows, *own.indices(n)[:2], *given)
            text = [each for each in ((0, first), (n - last, n)) if each[0] < each[1]]
            out, sums = self._by_lists(q[:, :, lo:hi], k, v, lengths, scale, lse, always=text)
            if of_text is not None:
                more = slices.dense(q.index_select(2, of_text), k, v, scale=scale, lengths=lengths)
                out = torch.cat([out, more[0]], 2)
                sums = torch.cat([sums, more[1]], 2) if lse else None
        if place is not None:
            out, sums = _taken(out, place), None if sums is None else sums.index_select(2, place)
        return out, sums

    def _by_lists(self, q, k, v, lengths, scale, lse, **ends):
        """`_attend` of tokens in order."""

        def predict(q, k, **given):
            lists = slices.predict(q, k, scale=scale, **{**ends, **self._stated, **given})
            if self.settings.check:
                lists.check(allow_empty=True)
            return lists

        if self.place is not None:
            if lse:
                raise ConfigError("log-sum-exps: expected lists of each call, found settings with steps")
            return self._by_kept(q, k, v, lengths, predict), None
        if self.settings.steps is not None:
            raise ConfigError("steps: expected a call inside of diffusers.denoising, which counts them, found another")
        lists = predict(q, k, lengths=lengths)
        found = slices.attend(q, k, v, lists, scale=scale, lse=lse)
        return found if lse else (found, None)

    # Not for a compiler, which would do its work again in each step.
    @_internals.uncompiled
    def _by_kept(self, q, k, v, lengths, predict):
        place = self.place
        assert place is not None
        place.layer += 1
        return place.steps(place.layer - 1, place.step, place.branch, q, k, v, lengths, predict=predict)

    @property
    def dense(self) -> Dense:
        """Tokens that stay dense, as a host or the settings say. Raises `ConfigError` for names without a host."""
        if self.stated_dense is not None:
            return self.stated_dense
        settings = self.settings
        if names := [name for name in settings.dense if isinstance(name, str)]:
            raise ConfigError(
                f"dense: expected ranges (first, end) of tokens outside of diffusers.denoising, found {names[0]!r}"
            )
        return Dense(settings.first, settings.last, settings.dense)

    def _unfit(self, q, k, v, mask, scale):
        """Why slices by these settings are not for a call that is not `_unlike` them, or None."""
        if q.shape[2] < self.settings.tokens:
            return "few tokens"
        dense = self.dense
        if q.shape[2] <= dense.first + dense.last:
            return "text alone"
        if mask is not None and not _of_keys(mask, q, dense.pairs):
            return "mask"
        if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
            return "scale"
        if scale is not None and self.place is not None and not math.isclose(scale, q.shape[3] ** -0.5):
            return "scale"
        # Steps keep lists, and estimates that have no gradient.
        if self.place is not None and records(q, k, v):
            return "gradient"
        return None if _internals.forward_level() < 0 else "gradient"

    @contextmanager
    def replacing(self) -> "Iterator[Slices]":
        """Context in which this takes the place of torch's function, wherever it is called from."""
        with Replacing(self):
            yield self

    def attach(self, module: Any) -> Any:
        """Take the place of torch's function in calls of `module`. Returns a handle, whose ``remove()`` ends it."""
        before = module.register_forward_pre_hook(_internals.uncompiled(self._enter))
        # After an error, too.
        after = module.register_forward_hook(_internals.uncompiled(self._leave), always_call=True)
        return _Handle(before, after)

    def _enter(self, *_):
        mode = Replacing(self)
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


class Replacing(TorchFunctionMode):
    """Context in which `attention` is called where torch's function is."""

    def __init__(self, attention: Callable):
        """attention: with the signature of `scaled_dot_product_attention`."""
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """See torch."""
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _unlike(q, k, v, dropout_p, is_causal):
    """Why slices are not for a call, whatever the settings are, or None."""
    # Written out, for the host's time.
    for x in (q, k, v):
        if not isinstance(x, torch.Tensor) or x.is_nested or x.ndim != 4:
            return "dimensions"
    shape, dtype = q.shape, q.dtype
    if not shape == k.shape == v.shape:
        return "queries and keys differ"
    if 0 in shape:
        return "no tokens"
    if shape[3] not in HEAD_DIMS:
        return "head dim"
    if dtype not in DTYPES or not dtype == k.dtype == v.dtype or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return "types or strides"
    if q.device.type not in EXECUTORS or not q.device == k.device == v.device:
        return "device"
    return "dropout or causal mask" if dropout_p or is_causal else None


def _looked_into(q, k, v):
    """Whether a compiler has to see what a call does: its gradients, or all of an exported program."""
    return records(q, k, v) or transformed() or torch.compiler.is_exporting()


def _copied(settings):
    """`Slices` of the same settings."""
    return Slices(**msgspec.structs.asdict(settings))


def _named(_, q, k, v, mask, scale, name, lse=False):
    """A call of compiled code, in the memory that its fake promises."""
    out, sums = _NAMED[name].both(q, k, v, mask, scale=scale, lse=lse)
    out = qkv.by_token(out)
    return out if sums is None else (out, sums.contiguous())


def _fake_named(_, q, *given, lse=False):
    out = qkv.empty(q, q.shape[2])
    return (out, q.new_empty(q.shape[:3], dtype=torch.float32)) if lse else out


_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor? mask, float? scale, str name"
operators.define("named", _GIVEN, "Tensor", _named, _fake_named)
operators.define("named_lse", _GIVEN, "(Tensor, Tensor)", partial(_named, lse=True), partial(_fake_named, lse=True))
operators.define("named_on_host", _GIVEN, "Tensor", _named, _fake_named, (torch.Tag.cudagraph_unsafe,))


def _settings(given):
    """`Settings` of what a user states. Raises `ConfigError`."""
    given = dict(given)
    if (dense := given.get("dense")) is not None and hasattr(dense, "dtype"):
        given["dense"] = ranges_of(dense)
    try:
        return msgspec.convert(arguments.plain(given), Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(Settings.__struct_fields__)
        raise ConfigError(f"slices: {error}; settings: {known}") from None


def ranges_of(mask: Any) -> list[Range]:
    """The ranges ``(first, end)`` that a mask of tokens, bool [N], flags. Raises `ConfigError` for another array."""
    flags = torch.as_tensor(mask)
    if flags.dtype != torch.bool or flags.ndim != 1:
        raise ConfigError(f"dense: expected a mask bool [N] of tokens, found {arguments.shown(mask)}")
    edges = torch.diff(F.pad(flags.cpu().int(), (1, 1))).nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class Order(NamedTuple):
    """Text at the beginning and end of a sequence that was put in order, and this order; None: as it lies."""

    text: tuple[int, int]
    tokens: np.ndarray | None


@lru_cache(256)
def arranged(n: int, first: int, last: int, ranges: tuple[Range, ...], masked: bool, parts: int = 1) -> Order:
    """The order of n tokens in which those that stay dense lie at the ends.

    With a mask, text comes last: its padding is what a mask may leave out. Raises `ConfigError` for tokens that are not
    there, and for text that cannot be shared out among `parts`.
    """
    if wrong := [each for each in ranges if not each[0] < each[1] <= n]:
        raise ConfigError(f"dense: expected ranges (first, end) of {n} tokens, found {wrong[0]}")
    place, other = np.arange(n), np.zeros(n, bool)
    if parts > 1 and (first or last):
        if n % parts or first % parts or last % parts:
            found = f"{n} of which {first + last} are text"
            raise ConfigError(f"text: expected tokens in {parts} equal parts, found {found}")
        # As one process has them: text, video, text.
        kinds = np.split(place.reshape(parts, -1), [first // parts, (n - last) // parts], axis=1)
        place = np.concatenate([kind.ravel() for kind in kinds])
    for each in ranges:
        other[slice(*each)] = True
    text = np.arange(n) < first
    text |= np.arange(n) >= n - last
    other &= ~text
    rest = ~text & ~other
    lead, tail = int(rest.argmax()), int(rest[::-1].argmax())
    if masked and (first or other.any()):
        order = np.concatenate([np.flatnonzero(kind) for kind in (other, rest, text)])
        ends = int(other.sum()), first + last
    elif rest.any() and rest[lead : n - tail].all():
        order, ends = np.arange(n), (lead, tail)
    else:
        order = np.concatenate([np.flatnonzero(~rest), np.flatnonzero(rest)])
        ends = n - int(rest.sum()), 0
    order = place[order]
    return Order(ends, None if (order == np.arange(n)).all() else order)


def _taken(x, tokens):
    """Some tokens of x [B, H, N, D], whose heads lie side by side: what is read and written is in one piece."""
    return x.transpose(1, 2).index_select(1, tokens).transpose(1, 2)


@_internals.constant
def _ends(*given):
    """Text at the ends of tokens in order."""
    return arranged(*given).text


@_internals.constant
def _index(*given):
    """Numbers of the tokens in order, and the places of the tokens in it; None where they lie so."""
    return _indices(*given)


@lru_cache(64)
def _indices(device, *given):
    tokens = arranged(*given).tokens
    if tokens is None:
        return None
    return tuple(torch.from_numpy(x).to(device) for x in (tokens, tokens.argsort()))


@lru_cache(64)
def _of_own(device, rows, begin, end, n, *given):
    """For the queries from `begin` to before `end` of n: ``(lo, hi)`` of their groups in order, which of them are text,
    and their places in the result for both; None for no text."""
    (first, last), order = arranged(n, *given)
    places = np.arange(n)[begin:end] if order is None else order.argsort()[begin:end]
    of_video = (places >= first) & (places < n - last)
    video = places[of_video]
    lo = first + (int(video.min()) - first) // rows * rows
    hi = min(n - last, first + -(-(int(video.max()) + 1 - first) // rows) * rows)
    of_text = np.sort(places[~of_video])
    at = np.where(of_video, places - lo, np.searchsorted(of_text, places) + hi - lo)
    text, place = (torch.from_numpy(x).to(device) for x in (of_text, at))
    return lo, hi, text if len(of_text) else None, place


def _of_keys(mask, q, pairs):
    """Whether a mask is one of keys alone."""
    n = q.shape[2]
    shapes = [(1, 1, n), (1, n, n)] if pairs else [(1, 1, n)]
    if not isinstance(mask, torch.Tensor) or mask.device != q.device:
        return False
    return mask.dtype == torch.bool and mask.ndim == 4 and len(mask) in (1, len(q)) and tuple(mask.shape[1:]) in shapes


def lengths_of(mask: torch.Tensor) -> torch.Tensor:
    """How many first keys of each clip a mask [B or 1, 1, 1, N_k] leaves in, int32 [B or 1]; the host does not wait.

    0 where it leaves out others than the last ones: that makes every result NaN, and `SliceLists.check` tells of it.
    """
    allowed = mask[:, 0, 0]
    lengths = allowed.sum(-1, dtype=torch.int32)
    first = torch.arange(allowed.shape[-1], device=mask.device) < lengths[:, None]
    return lengths * (allowed == first).all(-1)
