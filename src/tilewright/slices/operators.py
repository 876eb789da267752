"""What runs slices on the device of a tensor, and the same as operators for ``torch.compile`` and tracing.

``torch.ops.tilewright.slices_*`` take the layout as a list of int, their last argument. Other modules define further
operators by `define`.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, library

from tilewright.core import operators as _first  # noqa: F401  defines the library that a fragment is added to
from tilewright.core import transforms
from tilewright.core.errors import DeviceError, PatternError
from tilewright.devices import qkv
from tilewright.slices.backends import EXECUTORS
from tilewright.slices.layout import STATE, Layout, Lists

if TYPE_CHECKING:
    from tilewright.slices.cpu.executor import Executor

_LIBRARY = library.Library("tilewright", "FRAGMENT")


# An executor holds no tensors: a few kilobytes.
@lru_cache(256)
def executor(layout: Layout, device: torch.device) -> "Executor":
    """The executor of a device for lists of `layout` on `device`. Raises `DeviceError` where there is none."""
    if device.type not in EXECUTORS:
        raise DeviceError(f"expected tensors on one of {', '.join(EXECUTORS)}, found {device}")
    return import_module(EXECUTORS[device.type]).Executor(layout, device)


def define(
    name: str, arguments: str, result: str, call: Callable, fake: Callable, tags: tuple[torch.Tag, ...] = ()
) -> None:
    """Define ``tilewright::slices_<name>``. call, fake: ``callable(layout, *arguments)``, None for an empty layout."""

    def taking_list(function):
        return lambda *given: function(Layout(*given[-1]) if given[-1] else None, *given[:-1])

    schema = f"slices_{name}({arguments}, int[] layout) -> {result}"
    transforms.define(_LIBRARY, schema, taking_list(call), taking_list(fake), tags)


def fake_lists(layout: Layout, like: Tensor, *_: Any) -> Lists:
    """The fake of an operator that makes lists on the device of `like`."""
    counts = like.new_empty(layout.batch, layout.heads, layout.groups, dtype=torch.int32)
    keys = counts.new_empty(*counts.shape, layout.capacity)
    return keys, counts, *_fake_rank(layout, counts)


def _by(name):
    """The operator that a method of executors is, of tensors alone."""
    return lambda layout, *tensors: getattr(executor(layout, tensors[0].device), name)(*tensors)


def _fake_rank(layout, counts):
    return torch.empty_like(counts), counts.new_empty(STATE)


def _fake_pack(layout, keys, counts):
    return keys.new_empty(*keys.shape[:3], layout.words + 1)


def _attend(layout, keys, counts, order, state, q, k, v, scale, bound, with_lse=False):
    lists = keys, counts, order, state
    found = executor(layout, q.device).attend(lists, q, k, v, scale=scale, with_lse=with_lse, bound=bound)
    return found if with_lse else found[0]


def _fake_attend(layout, keys, counts, order, state, q, *_):
    return qkv.empty(q, layout.queries)


def _fake_attend_lse(layout, keys, counts, order, state, q, *_):
    lse = q.new_empty(layout.batch, layout.heads, layout.queries, dtype=torch.float32)
    return qkv.empty(q, layout.queries), lse


def _backward(layout, grad, lse_grad, keys, counts, order, state, q, k, v, out, lse, scale):
    lists = keys, counts, order, state
    return executor(layout, q.device).backward(lists, q, k, v, out, lse, grad, scale=scale, lse_grad=lse_grad)


def _fake_backward(layout, grad, lse_grad, keys, counts, order, state, q, k, v, *_):
    return tuple(qkv.empty(x, x.shape[2]) for x in (q, k, v))


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, _, ctx.layout = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiated(ctx, grad, lse_grad):
    tensors, found = ctx.saved_tensors, (None, None, None)
    if grad is not None or lse_grad is not None:
        grad = torch.zeros_like(tensors[-2]) if grad is None else grad
        found = torch.ops.tilewright.slices_backward(grad, lse_grad, *tensors, ctx.scale, list(ctx.layout))
    # The lists are constants.
    return *(None,) * 4, *found, None, None, None


def _nothing(ctx, inputs, output):
    """A refusal needs nothing of a call."""


def _refused(ctx, *_):
    raise PatternError("attention by slices has first derivatives only, found a call for a second derivative")


_MADE = "(Tensor, Tensor, Tensor, Tensor)"
_ATTENDED = (
    "Tensor keys, Tensor counts, Tensor order, Tensor state, Tensor q, Tensor k, Tensor v, float scale, float? bound"
)

define("from_mask", "Tensor mask", _MADE, _by("from_mask"), fake_lists)
define("unpack", "Tensor bits", _MADE, _by("unpack"), fake_lists)
define("rank", "Tensor counts", "(Tensor, Tensor)", _by("rank"), _fake_rank)
define("pack", "Tensor keys, Tensor counts", "Tensor", _by("pack"), _fake_pack)
define("attend", _ATTENDED, "Tensor", _attend, _fake_attend)
define("attend_lse", _ATTENDED, "(Tensor, Tensor)", partial(_attend, with_lse=True), _fake_attend_lse)
define(
    "backward",
    "Tensor grad, Tensor? lse_grad, Tensor keys, Tensor counts, Tensor order, Tensor state, Tensor q, Tensor k, "
    "Tensor v, Tensor out, Tensor lse, float scale",
    "(Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
transforms.differentiate("slices_attend_lse", _setup, _differentiated)
transforms.differentiate("slices_backward", _nothing, _refused)
