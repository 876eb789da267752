"""Operators under ``torch.func`` and forward-mode derivatives, which custom operators have no support for.

An operator that was made by `define` has the formula that it has otherwise under ``grad``, ``vjp`` and ``vmap``. What
has none, as a forward-mode derivative, is refused by name: torch's own answer is zero, or an error of its inside.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from tilewright.core import _internals
from tilewright.core.errors import PatternError


class Formula(NamedTuple):
    """The gradient of an operator, as `register_autograd` takes it, and its batched form.

    batched: ``callable(size, given, dims) -> result``, batched along its first dimension where the tensors are along
    `dims`, or None where it is called for each entry.
    """

    setup: Callable
    backward: Callable
    batched: Callable | None


_FORMULAS: dict[str, Formula] = {}
# What ends the names of operators without a formula.
BARE = "_bare"
# What ends the names of functions beside these operators.
DIRECT = "_direct"


def define(
    lib: library.Library, schema: str, kernel: Callable, fake: Callable, tags: tuple[torch.Tag, ...] = ()
) -> None:
    """Define the operator ``tilewright::<schema>`` of `lib`, with its `kernel` for tensors of all devices.

    fake: returns memory of the form of the results, for compilers. tags: what else these know of it.
    """
    name = schema.partition("(")[0]

    def untransformed(*given):
        if _internals.forward_level() >= 0 and any(map(_internals.has_tangent, given)):
            raise _no_tangent(name)
        return kernel(*given)

    # Compiled code calls what runs without the dispatcher, which takes 8 µs of the host.
    direct = f"torch.ops.tilewright.{name}{DIRECT}"
    setattr(torch.ops.tilewright, name + DIRECT, kernel)

    def compiled_fake(*given, **named):
        _internals.call_directly(_operator(name + BARE).default, direct)
        return fake(*given, **named)

    for each in name, name + BARE:
        lib.define(schema.replace(name, each, 1), tags=(torch.Tag.pt2_compliant_tag, *tags))
        lib.impl(each, untransformed, "CompositeExplicitAutograd")
        lib.impl(each, lambda *given: _under_transforms(name, given), "FuncTorchDynamicLayerFrontMode")
        library.register_fake(f"tilewright::{each}", fake if each == name else compiled_fake, lib=lib)
    lib.impl(name, lambda *given: _recording(name, given), "Autograd")


def differentiate(name: str, setup: Callable, backward: Callable, batched: Callable | None = None) -> None:
    """Give the operator ``tilewright::<name>`` its gradient, see `Formula`."""
    _FORMULAS[name] = Formula(setup, backward, batched)


def _recording(name, given):
    """An operator's call where gradients may be recorded."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given):
        return _Recorded.apply(name, *_whole(name, given))
    return _unrecorded(name, given)


def _unrecorded(name, given):
    """An operator's call that records no gradient.

    ``torch.compile``, whose graphs have their gradients already, sees the operator without a formula, `BARE`: a formula
    costs the host 4 µs in each call of a compiled graph. Others who trace may differentiate what they find.
    """
    compiled = _internals.compiled_graph() and not torch.compiler.is_exporting()
    with _internals.below_autograd():
        return _operator(name + BARE if compiled else name)(*given)


class _Recorded(torch.autograd.Function):
    """An operator with its gradient."""

    @staticmethod
    def forward(ctx, name, *given):
        ctx.name = name
        output = _unrecorded(name, given)
        if name in _FORMULAS:
            _FORMULAS[name].setup(ctx, given, output)
        return output

    @staticmethod
    def backward(ctx, *grads):
        return _gradients(ctx, grads)


def transformed() -> bool:
    """True where a function is transformed by ``torch.func``, or tensors may have forward-mode derivatives."""
    return _internals.transforms_active() or _internals.forward_level() >= 0


def values(expected: str, x: Tensor) -> list[Any]:
    """Values of a tensor [n]. Raises `PatternError`, with what was `expected`, where they are hidden from the host."""
    try:
        return x.tolist()
    except RuntimeError as error:
        if not transformed() and _internals.dispatch_depth() == 0:
            raise
        raise PatternError(
            f"{expected}, found a tensor without values, as torch.func, tracing and fake tensors have"
        ) from error


def call(name: str, *given: Any) -> Any:
    """``torch.ops.tilewright.<name>(*given)`` where tensors may have tangents, which torch does not show to operators
    that record a gradient, nor to compilers."""
    if _internals.forward_level() < 0:
        return _operator(name)(*given)
    return _apart(name, *given) if torch.compiler.is_compiling() else _Transformed.apply(name, *given)


@_internals.uncompiled
def _apart(name, *given):
    return _Transformed.apply(name, *given)


def _operator(name):
    return getattr(torch.ops.tilewright, name)


def _under_transforms(name, given):
    """An operator's call where the innermost transform is to see it."""
    given = _whole(name, given)
    kinds = _internals.functionalized()
    if kinds and kinds[-1]:
        return _internals.call_functionalized(_operator(name), given)
    if any(kinds):
        raise PatternError(
            f"{_said(name)} cannot be called in a transform inside functionalize: call functionalize innermost"
        )
    return _Transformed.apply(name, *given)


def _whole(name, given):
    """All arguments of an operator: the dispatcher leaves out what equals its default."""
    known = _operator(name).default._schema.arguments
    return (*given, *(argument.default_value for argument in known[len(given) :]))


class _Transformed(torch.autograd.Function):
    """An operator as transforms see it."""

    @staticmethod
    def forward(name, *given):
        return _operator(name)(*given)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name, *given = inputs
        if ctx.name in _FORMULAS and any(ctx.needs_input_grad):
            _FORMULAS[ctx.name].setup(ctx, given, output)

    @staticmethod
    def backward(ctx, *grads):
        return _gradients(ctx, grads)

    @staticmethod
    def jvp(ctx, *_):
        raise _no_tangent(ctx.name)

    @staticmethod
    def vmap(info, dims, name, *given):
        size, dims = info.batch_size, dims[1:]
        batched = _FORMULAS[name].batched if name in _FORMULAS else None
        found = None if batched is None else batched(size, given, dims)
        if found is None:
            entries = ([_entry(x, at, i) for x, at in zip(given, dims, strict=True)] for i in range(size))
            made = [_operator(name)(*entry) for entry in entries]
            several = isinstance(made[0], tuple)
            found = tuple(map(torch.stack, zip(*made, strict=True))) if several else torch.stack(made)
        return found, (0,) * len(found) if isinstance(found, tuple) else 0


def _gradients(ctx, grads):
    """The gradients of an operator's arguments, None for its name first."""
    if ctx.name not in _FORMULAS:
        raise PatternError(f"{_said(ctx.name)} has no gradient: expected tensors without requires_grad")
    found = _FORMULAS[ctx.name].backward(ctx, *grads)
    return None, *(found if isinstance(found, tuple) else (found,))


def _entry(x: Any, at: Any, number: int) -> Any:
    return x.select(at, number) if isinstance(x, Tensor) and at is not None else x


def folded(x: Tensor, at: int | None, size: int) -> Tensor:
    """A tensor [B, ...] that is batched along `at`, or the same for all of `size` entries, as one [size * B, ...]."""
    x = x.expand(size, *x.shape) if at is None else x.movedim(at, 0)
    return x.flatten(0, 1)


def _no_tangent(name):
    return PatternError(
        f"{_said(name)} has no forward-mode derivative: expected grad, vjp or jacrev, found jvp, jacfwd, hessian or a "
        "dual tensor"
    )


def _said(name):
    """What people know the operator by."""
    family = name.partition("_")[0]
    known = {"attend": "a plan", "ragged": "a packed batch", "slices": "attention to slices"}
    return known.get(family, "neighbourhood attention" if family == "neighborhood" else name)
