"""``torch.ops.tilewright.attend``: plans as an operator, for ``torch.compile``, ``torch.export`` and tracing.

The operator names its plan by a digest of the plan's content, which holds in every process. An exported program holds
the plan's file besides, as a tensor of bytes: it runs where the plan is not. The operator is defined and implemented by
hand, which costs the host less in each call than the decorator for custom operators (docs/decisions/calls.md).
"""

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library
from torch.compiler import is_compiling

from tilewright.core import transforms
from tilewright.core._internals import dispatch_depth, forward_level, is_batched, is_tracing
from tilewright.core.errors import ArtifactError, ConfigError, PatternError

# Plans by names of this process, and those that were called by digest. A plan lives as long as its owner holds it.
_LIVE: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_CALLED: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
# Types of tensors that are what they seem to be.
_PLAIN = Tensor, torch.nn.Parameter
# Plans that were read out of programs. Nobody else holds them: they live as long as the process.
_CARRIED: dict = {}

_LIBRARY = library.Library("tilewright", "DEF")


def register(plan: Any) -> str:
    """Make `plan` known to the operator; return a name that no other plan of this process has or had.

    The operator is given ``plan.digest()``, or the name where nothing is compiled or exported, and calls
    ``plan.run(q, k, v, ordered, bias)``, ``plan.like_result(q, k, v)``, ``plan.check_backward()`` and
    ``plan.gradients(…)``.
    """
    name = f"plan {next(_NUMBERS)}"
    _LIVE[name] = plan
    return name


def named(name: str) -> Any:
    """The plan that `register` gave this name."""
    return _LIVE[name]


def read_by(read: Callable) -> None:
    """Have plans that a program holds read by ``read(bytes) -> plan``."""
    global _read
    _read = read


def _read(content):
    raise ArtifactError("this program holds its plans: import tilewright.attention.plan first")


def records(q: Tensor, k: Tensor, v: Tensor, bias: Any = None) -> bool:
    """True where a call on q, k, v and values of a bias is to be differentiated."""
    # Written out: every call of a plan asks, and a generator would cost it a microsecond.
    needed = q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
    return needed and torch.is_grad_enabled()


def exporting() -> bool:
    """True while a program is made that may hold tensors of its own: by ``torch.export``, but with strict=True, or by
    ``torch.jit.trace``. Raises `ConfigError` where it is made for ONNX."""
    if torch.compiler.is_dynamo_compiling():
        # Dynamo traces no files, and cannot look into what follows.
        return False
    made = torch.compiler.is_exporting() or is_tracing()
    # Who exports to ONNX has loaded its module, which takes long to load.
    onnx = sys.modules.get("torch.onnx")
    if made and onnx is not None and onnx.is_in_onnx_export():
        raise ConfigError(
            "ONNX has no operator for a plan: export with torch.export.export for AOTInductor, or export the model "
            "with dense or masked attention"
        )
    return made


def watched(x: Tensor) -> bool:
    """True where a call on tensor `x` must go through the operator: it is compiled, exported, traced or transformed."""
    return is_compiling() or type(x) not in _PLAIN or dispatch_depth() > 0 or is_tracing() or transforms.transformed()


def _found(digest):
    """A plan of this digest or name, or None: equal plans stand for each other."""
    found = _CALLED.get(digest) or _LIVE.get(digest)
    if found is None:
        # Digests are computed here, not when plans are made: few plans are ever called by them.
        live = filter(None, (reference() for reference in _LIVE.valuerefs()))
        found = next((plan for plan in live if plan.digest() == digest), None)
        if found is not None:
            _CALLED[digest] = found
    return found


def _plan(digest, file):
    """The plan of this digest, or else that of the `file`, uint8 [bytes] or None, that the program holds."""
    found = _found(digest)
    if found is not None:
        return found
    if file is None:
        raise ArtifactError(
            f"this program calls the plan {digest}, which is not loaded: call tilewright.load(path) first, and keep "
            "the plan while the program runs"
        )
    found = _read(file.cpu().numpy().tobytes())
    if found.digest() != digest:
        raise ArtifactError(f"this program's plan: expected the digest {digest}, found {found.digest()}; export again")
    _CALLED[digest] = _CARRIED[digest] = found
    return found


def _attend(q, k, v, plan, ordered, file=None, bias=None):
    return _plan(plan, file).run(q, k, v, ordered, bias)


def _like_result(q, k, v, plan, ordered, file=None, bias=None):
    if file is not None and _found(plan) is None:
        # What is read of a program that is compiled again has no values yet: the form is that of the queries.
        heads, n, dim = q.shape[1:]
        return q.new_empty_strided(q.shape, (n * heads * dim, dim, heads * dim, 1))
    return _plan(plan, file).like_result(q, k, v, bias)


# For tensors of every device: the plan's executor refuses those of another device than its own.
transforms.define(
    _LIBRARY,
    "attend(Tensor q, Tensor k, Tensor v, str plan, bool ordered, Tensor? file=None, Tensor? bias=None) -> Tensor",
    _attend,
    _like_result,
)


_OPERATOR = torch.ops.tilewright.attend


def traced(q: Tensor, k: Tensor, v: Tensor, plan: str | None, ordered: bool, file: Any, bias: Any) -> Tensor:
    """A call of the plan of this digest as who traces it sees it. A compiler guards all that is looked for here, and
    would guard defaults."""
    if forward_level() < 0:
        return _OPERATOR(q, k, v, plan, ordered, file, bias)
    return transforms.call("attend", q, k, v, plan, ordered, file, bias)


def _setup(ctx, inputs, output):
    q, k, v, ctx.plan, ctx.ordered, _, bias = inputs
    # Refused here: once the graph is recorded, the call that lacks a backward is hard to find.
    # The plan is held: its owner may drop it before the backward.
    ctx.held = _plan(ctx.plan, None)
    ctx.of_bias = bias is not None and bias.requires_grad
    ctx.held.check_backward()
    ctx.save_for_backward(q, k, v, output, bias)


def _differentiated(ctx, grad):
    *tensors, bias = ctx.saved_tensors
    if torch.is_grad_enabled() or watched(grad) or is_batched(grad):
        found = torch.ops.tilewright.attend_backward(grad, *tensors, ctx.plan, ctx.ordered, bias, ctx.of_bias)
    else:
        # Nobody looks: an operator with an autograd formula costs the host 25 µs a call.
        found = ctx.held.gradients(grad, *tensors, ctx.ordered, bias, ctx.of_bias)
    return *found[:3], None, None, None, found[3] if ctx.of_bias else None


class _Attend(torch.autograd.Function):
    """``attend`` and its formula where nobody looks at the operator."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _attend(*inputs)
        _setup(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiated)


def differentiated(q: Tensor, k: Tensor, v: Tensor, plan: Any, ordered: bool, bias: Any = None) -> Tensor:
    """A call of the plan of this name that is not `watched`, with what its backward needs."""
    return _Attend.apply(q, k, v, plan, ordered, None, bias)


def _attend_backward(grad, q, k, v, out, plan, ordered, bias=None, bias_needs_grad=False):
    found = _plan(plan, None).gradients(grad, q, k, v, out, ordered, bias, bias_needs_grad)
    # An operator has always as many results.
    return found if bias_needs_grad else (*found, grad.new_empty(0))


def _nothing(ctx, inputs, output):
    """A refusal needs nothing of a call."""


def _refused(ctx, *_):
    raise PatternError("plans have first derivatives only, found a call for a second derivative")


def _in_one_batch(size, given, dims):
    """A batched call as one of a larger batch, None where entries differ by more than their tokens."""
    q, k, v, plan, ordered, file, bias = given
    if dims[6] is not None or not _plan(plan, file).any_batch:
        return None
    q, k, v = (transforms.folded(x, at, size) for x, at in zip((q, k, v), dims[:3], strict=True))
    return torch.ops.tilewright.attend(q, k, v, plan, ordered, file, bias).unflatten(0, (size, len(q) // size))


def _backwards_in_one_batch(size, given, dims):
    *tensors, plan, ordered, bias, of_bias = given
    if of_bias or dims[7] is not None or not _plan(plan, None).any_batch:
        return None
    tensors = [transforms.folded(x, at, size) for x, at in zip(tensors, dims[:5], strict=True)]
    *found, none = torch.ops.tilewright.attend_backward(*tensors, plan, ordered, bias, of_bias)
    return *(x.unflatten(0, (size, len(x) // size)) for x in found), none.expand(size, 0)


def _like_gradients(grad, q, k, v, out, plan, ordered, bias=None, bias_needs_grad=False):
    of_bias = bias.new_empty(bias.shape) if bias_needs_grad else grad.new_empty(0)
    return *(x.new_empty(x.shape) for x in (q, k, v)), of_bias


transforms.define(
    _LIBRARY,
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, str plan, bool ordered, Tensor? bias=None,"
    " bool bias_needs_grad=False) -> (Tensor, Tensor, Tensor, Tensor)",
    _attend_backward,
    _like_gradients,
)
transforms.differentiate("attend", _setup, _differentiated, _in_one_batch)
transforms.differentiate("attend_backward", _nothing, _refused, _backwards_in_one_batch)
