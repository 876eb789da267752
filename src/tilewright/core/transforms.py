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


def define(lib: library.Library, schema: str, kernel: Callable) -> None:
    """Define the operator ``tilewright::<schema>`` of `lib`, with its `kernel` for tensors of all devices."""
    name = schema.partition("(")[0]

    def untransformed(*given):
        if _internals.forward_level() >= 0 and any(map(_internals.has_tangent, given)):
            raise _no_tangent(name)
        return kernel(*given)

    lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl(name, untransformed, "CompositeExplicitAutograd")
    lib.impl(name, lambda *given: _under_transforms(name, given), "FuncTorchDynamicLayerFrontMode")


def differentiate(
    lib: library.Library, name: str, setup: Callable, backward: Callable, batched: Callable | None = None
) -> None:
    """Give the operator ``tilewright::<name>`` of `lib` its gradient, see `Formula`."""
    _FORMULAS[name] = Formula(setup, backward, batched)
    library.register_autograd(f"tilewright::{name}", backward, setup_context=setup, lib=lib)


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
            f"{expected}, found a tensor without values of its own: one of torch.func, of a program that is traced, or "
            "a fake one"
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
    # The dispatcher leaves out what equals its default.
    known = _operator(name).default._schema.arguments
    given = (*given, *(argument.default_value for argument in known[len(given) :]))
    kinds = _internals.functionalized()
    if kinds and kinds[-1]:
        return _internals.call_functionalized(_operator(name), given)
    if any(kinds):
        raise PatternError(f"functionalize: expected no transform inside of it that {_said(name)} is called in")
    return _Transformed.apply(name, *given)


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
        if ctx.name not in _FORMULAS:
            raise PatternError(f"{_said(ctx.name)} has no gradient: expected tensors that need none")
        found = _FORMULAS[ctx.name].backward(ctx, *grads)
        return None, *(found if isinstance(found, tuple) else (found,))

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
    return {"attend": "a plan", "ragged": "a packed batch", "slices": "attention to slices"}.get(family, name)
