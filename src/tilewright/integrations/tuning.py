"""Budgets of slices for a model: what each head loses by fewer keys is measured in a few runs, then shares are chosen.

Works on any module whose self-attention calls `scaled_dot_product_attention`, such as diffusers' transformers and the
networks of this package. Some passes of its runs are repeated with other attention.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright import slices
from tilewright.core.errors import PatternError
from tilewright.integrations.sdpa import Replacing
from tilewright.slices import budgets
from tilewright.slices.attention import dense
from tilewright.slices.budgets.measured import losses, times
from tilewright.slices.layout import HEAD_DIMS

# Shares of the keys that are chosen among.
SHARES = (0.05, 0.1, 0.2, 0.35, 0.6)
# ASSUME: attention of fewer tokens is that of a prompt.
TOKENS = 256
# ``attend(layer, q, k, v)``: what stands in for self-attention.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass of a model. step: of its run. shape: of the latents, without the batch. repeat: ``repeat(attend)`` makes
    the pass once more, with another self-attention, and returns its result."""

    step: int
    shape: tuple[int, ...]
    repeat: Callable[[Attend], Tensor]


@dataclass(frozen=True, eq=False)
class Measured:
    """What budgets are chosen by, float64 [parts, layers, heads, shares] each; means over passes.

    error: squares of the L2 error of a head's attention, over that of dense attention. recall: share of the attention
    that is kept. velocity: squares of the L2 error of the model's result by lists of that head alone, over the result;
    part by part, so that a sum is the mean of a run. us: microseconds of a run.
    """

    model: str
    shape: tuple[int, ...]
    tokens: int
    steps: int
    begins: tuple[int, ...]
    shares: tuple[float, ...]
    error: np.ndarray
    recall: np.ndarray
    velocity: np.ndarray
    us: np.ndarray

    def limit_us(self, keep: float) -> float:
        """Time of a run in which all heads list a share of the keys. Raises `PatternError` for one out of range."""
        check_keep(keep, self.shares)
        return float(np.interp(keep, self.shares, self.us.sum((0, 1, 2))))

    def table(self, chosen: np.ndarray) -> budgets.Budgets:
        """The table of a choice, numbers of shares [parts, layers, heads]."""
        keep = tuple(tuple(map(tuple, part)) for part in np.asarray(self.shares)[chosen].tolist())
        return budgets.Budgets(self.model, self.shape, self.tokens, self.steps, self.begins, keep)


def check_keep(keep: float, shares: Sequence[float]) -> None:
    """Raise `PatternError` unless a share of the keys is in the range of those that are measured."""
    if not shares[0] <= keep <= shares[-1]:
        raise PatternError(f"keep: expected a share from {shares[0]} to {shares[-1]}, found {keep}")


def _exchanged(attend):
    """Context in which ``attend(layer, q, k, v)`` is called where self-attention calls torch's function."""
    layers = count()

    def call(query, key, value, *others, **named):
        if _of_video(query, key, value, *others, **named):
            return attend(next(layers), query, key, value)
        return F.scaled_dot_product_attention(query, key, value, *others, **named)

    return Replacing(call)


def _of_video(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Whether a call is self-attention of a video's tokens, over all pairs."""
    own = query.ndim == 4 and query.shape == key.shape == value.shape and query.shape[2] >= TOKENS
    usual = scale is None or abs(scale * query.shape[-1] ** 0.5 - 1) < 1e-6
    return own and query.shape[3] in HEAD_DIMS and attn_mask is None and not dropout_p and not is_causal and usual


def passes(model: nn.Module, run: Callable[[], Any], steps: int, begins: Sequence[int]) -> list[Pass]:
    """The passes of a run at the middle step of each part.

    run: makes a video, in all its steps. begins: first steps of the parts. Raises `PatternError` where the model is not
    called as often in each step.
    """
    calls: list[tuple[tuple, dict]] = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    finally:
        handle.remove()
    if not calls or len(calls) % steps:
        raise PatternError(f"steps: expected passes of the model in each of {steps} steps, found {len(calls)} in all")
    branches = len(calls) // steps

    def repeat(args, kwargs, attend):
        with torch.no_grad(), _exchanged(attend):
            found = model(*args, **kwargs)
        # Models of diffusers return it with what else they have.
        return found if isinstance(found, Tensor) else found[0]

    made = []
    for first, end in zip(begins, (*begins[1:], steps), strict=True):
        step = (first + end - 1) // 2
        for args, kwargs in calls[step * branches : (step + 1) * branches]:
            latents = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            made.append(Pass(step, tuple(latents.shape[1:]), partial(repeat, args, kwargs)))
    return made


def measure(
    taken: Sequence[Pass],
    model: str,
    steps: int,
    begins: Sequence[int],
    *,
    shares: Sequence[float] = SHARES,
    show: Callable[[str], None] | None = None,
    **options: Any,
) -> Measured:
    """What heads lose by lists of each share of the keys, and how long a run takes by such lists.

    taken: of `passes`, of one run or several, some of each part. model: its name. steps: of a run; begins: first steps
    of its parts. shares: ascending. options: of `slices.predict`. show: takes lines about the progress. The model's
    error by a head's lists is measured at the middle share, and follows that of the head at others.

    Raises `PatternError` for passes without self-attention, and for such that differ in layers, heads or tokens.
    """
    shares = tuple(map(float, shares))
    found: list[list[tuple]] = [[] for _ in begins]
    us, sizes, layers = None, set(), set()
    for number, one in enumerate(taken):
        seen: list[Any] = []

        def observed(layer, q, k, v, seen=seen):
            nonlocal us
            out, lse = dense(q, k, v)
            seen.append(losses(q, k, v, out, lse, shares, **options))
            sizes.add((q.shape[1], q.shape[2]))
            us = times(q, k, v, shares, **options) if us is None else us
            return out

        right = one.repeat(observed)
        layers.add(len(seen))
        if len(sizes) != 1 or len(layers) != 1:
            raise PatternError(
                f"{model}: expected self-attention of {TOKENS} tokens or more, in as many layers of as many heads and "
                f"tokens in each pass, found {len(seen)} layers and {len(sizes)} sizes"
            )
        error, recall = (np.stack([getattr(each, name) for each in seen]) for name in ("error", "recall"))
        velocity = _of_result(one, right, error, shares, options)
        found[bisect_right(begins, one.step) - 1].append((error, recall, velocity))
        if show:
            show(f"pass {number + 1} of {len(taken)}: step {one.step}, {error.shape[0]} layers, {error.shape[1]} heads")
    error, recall, velocity = (np.stack([np.mean([each[at] for each in part], 0) for part in found]) for at in range(3))
    ((_, tokens),) = sizes
    often = np.diff([*begins, steps])[:, None, None, None]
    run_us = np.broadcast_to(often * us, error.shape)
    stated = model, taken[0].shape, tokens, steps, tuple(begins), shares
    return Measured(*stated, error, recall, velocity * often / steps, run_us)


def relative(found: Tensor, right: Tensor) -> float:
    """L2 error, over what is right."""
    return float((found.double() - right.double()).norm() / right.double().norm())


def by_table(table: budgets.Budgets, step: int, **options: Any) -> Attend:
    """Attention by lists as a table has them at a step. options: of `slices.predict`."""

    def attend(layer, q, k, v):
        table.check_call(layer, step, q.shape[1], q.shape[2])
        keep = table.of(step, layer)
        return slices.attend(q, k, v, slices.predict(q, k, keep=keep, budget=max(keep), **options))

    return attend


def _of_result(one, right, error, shares, options):
    """Squares of the error of a pass's result by lists of each head, [layers, heads, shares]."""
    middle = len(shares) // 2
    factor = np.zeros(error.shape[:2])
    for place in np.ndindex(*factor.shape):
        if error[*place, middle]:
            off = relative(one.repeat(partial(_by_lists_of, place, shares[middle], options)), right)
            factor[place] = off**2 / error[*place, middle]
    return factor[..., None] * error


def _by_lists_of(place, share, options, layer, q, k, v):
    """Attention over all keys, and in one head of a layer by lists."""
    out, (chosen, head) = dense(q, k, v)[0], place
    if layer == chosen:
        q, k, v = (x[:, head : head + 1] for x in (q, k, v))
        out = out.clone()
        out[:, head : head + 1] = slices.attend(q, k, v, slices.predict(q, k, keep=share, budget=share, **options))
    return out


def error_of(table: budgets.Budgets, taken: Sequence[Pass], **options: Any) -> float:
    """Root of the mean square of the L2 error of passes by a table, over that of dense attention.

    options: of `slices.predict`. Each pass counts as the steps of its part.
    """
    weights, squares = [], []
    ends = (*table.begins[1:], table.steps)
    for one in taken:
        right = one.repeat(lambda layer, q, k, v: dense(q, k, v)[0])
        squares.append(relative(one.repeat(by_table(table, one.step, **options)), right) ** 2)
        part = table.part(one.step)
        weights.append(ends[part] - table.begins[part])
    return float(np.average(squares, weights=weights) ** 0.5)
