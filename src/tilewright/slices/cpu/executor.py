"""Executor of slice lists on a CPU (stage T5): each worker gathers the keys of a group and attends densely to them.

The contract is that of `slices.backends`.
"""

from functools import partial

import numpy as np
import torch

from tilewright.core._internals import attention_with_lse
from tilewright.devices import qkv
from tilewright.devices.cpu.workers import alone, in_any_state, workers
from tilewright.slices import layout as layouts


class Executor:
    """Methods as in `slices.backends`, for a `slices.layout.Layout`. The device is the CPU."""

    def __init__(self, layout: layouts.Layout, device: torch.device):
        """Hold nothing but the layout."""
        self.layout = layout

    @in_any_state
    def from_mask(self, mask: torch.Tensor) -> layouts.Lists:
        """See `slices.backends`."""
        layout = self.layout
        mask = mask.expand(layout.batch, layout.heads, -1, -1)
        keys = torch.zeros(*self._groups, layout.capacity, dtype=torch.int32, device=mask.device)
        # A head at a time: places take four times the memory of its mask.
        for flags, lists in zip(mask.flatten(0, 1), keys.flatten(0, 1), strict=True):
            place = flags.cumsum(1, dtype=torch.int32) - 1
            group, key = (flags & (place < layout.capacity)).nonzero(as_tuple=True)
            lists[group, place[group, key].long()] = key.int()
        counts = mask.sum(-1, dtype=torch.int32)
        return layouts.with_tails(keys, counts), counts, *self.rank(counts)

    @in_any_state
    def unpack(self, bits: torch.Tensor) -> layouts.Lists:
        """See `slices.backends`."""
        words, asked = bits[..., :-1].contiguous(), bits[..., -1]
        flags = np.unpackbits(words.numpy().view(np.uint8), -1, count=self.layout.keys, bitorder="little")
        keys, counts, *_ = self.from_mask(torch.from_numpy(flags).bool())
        # A list that had not fit was packed without all of its keys: it must not seem whole in a larger layout.
        counts = torch.where(asked > counts, asked.clamp(min=self.layout.capacity + 1), counts)
        return keys, counts, *self.rank(counts)

    @in_any_state
    def rank(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `slices.backends`."""
        order = counts.argsort(dim=-1, descending=True, stable=True).int()
        number = torch.arange(1, counts.numel() + 1, device=counts.device).view_as(counts)
        overflow, empty = (int((number * flag).max()) for flag in (counts > self.layout.capacity, counts == 0))
        listed = int(counts.clamp(max=self.layout.capacity).sum(dtype=torch.int64))
        state = counts.new_tensor([overflow, empty, listed & 0x7FFFFFFF, listed >> 31], dtype=torch.int32)
        return order, state

    @in_any_state
    def pack(self, keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """See `slices.backends`."""
        layout = self.layout
        bits = keys.new_empty(*self._groups, layout.words + 1, dtype=torch.int32)
        place = torch.arange(layout.capacity, device=keys.device)
        for lists, count, words in zip(*(x.flatten(0, 1) for x in (keys, counts, bits)), strict=True):
            flags = keys.new_zeros(layout.groups, layout.words * layouts.WORD, dtype=torch.bool)
            # A list that did not fit may hold no keys.
            listed = count.where(count <= layout.capacity, 0)
            group, at = (place < listed[:, None]).nonzero(as_tuple=True)
            flags[group, lists[group, at].long()] = True
            packed = np.packbits(flags.numpy(), -1, bitorder="little").view(np.int32)
            words[:, :-1], words[:, -1] = torch.from_numpy(packed), count
        return bits

    def attend(
        self,
        lists: layouts.Lists,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor | None = None,
        with_lse: bool = False,
        bound: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `slices.backends`."""
        inputs = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
        layouts.check_inputs(self.layout, *lists, **inputs)
        if out is None:
            out = qkv.empty(q, self.layout.queries)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        # Counted here: where groups are shared, this thread's operators have one core.
        self._attend(lists, (q, k, v), scale, out, lse, torch.get_num_threads())
        return out, lse if with_lse else None

    @in_any_state
    def _attend(self, lists, tokens, scale, out, lse, threads):
        """Write the attention of `tokens` and its log-sum-exps; the longest lists of each head start first."""
        keys, counts, order, state = lists
        if state[layouts.OVERFLOW]:
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
            return
        counts, order = counts.numpy(), order.numpy()
        jobs = [(b, h, g) for b, h in np.ndindex(order.shape[:2]) for g in order[b, h].tolist()]
        with alone():
            workers(threads).run(partial(self._group, keys, counts, tokens, scale, out, lse), jobs)

    def _group(self, keys, counts, tokens, scale, out, lse, job):
        b, h, g = job
        rows = slice(g * self.layout.rows, (g + 1) * self.layout.rows)
        listed = keys[b, h, g, : counts[b, h, g]]
        if not len(listed):
            out[b, h, rows], lse[b, h, rows] = 0, -torch.inf
            return
        q, k, v = tokens
        taken = (x[b, h].index_select(0, listed)[None, None] for x in (k, v))
        found, sums = attention_with_lse(q[b : b + 1, h : h + 1, rows], *taken, attn_mask=None, scale=scale)
        out[b, h, rows], lse[b, h, rows] = found[0, 0], sums[0, 0]

    @in_any_state
    def backward(
        self,
        lists: layouts.Lists,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad: torch.Tensor,
        *,
        scale: float,
        lse_grad: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `slices.backends`."""
        layouts.check_inputs(self.layout, *lists, q=q, k=k, v=v)
        start = torch.nan if lists[3][layouts.OVERFLOW] else 0.0
        found = [qkv.empty(x, x.shape[2], torch.float32).fill_(start) for x in (q, k, v)]
        delta = (out.float() * grad.float()).sum(-1)
        if lse_grad is not None:
            delta -= lse_grad
        keys, counts = lists[0], lists[1].numpy()
        if start == 0:
            job = partial(self._head_gradients, keys, counts, (q, k, v, grad, lse, delta), scale, found)
            with alone():
                # Groups of a head add to the same keys: they follow each other.
                workers(torch.get_num_threads()).run(job, list(np.ndindex(*counts.shape[:2])))
        dq, dk, dv = (x.to(q.dtype) for x in found)
        return dq, dk, dv

    def _head_gradients(self, keys, counts, tokens, scale, found, head):
        q, k, v, grad, lse, delta = (x[head] for x in tokens)
        dq, dk, dv = (x[head] for x in found)
        for g in range(self.layout.groups):
            rows = slice(g * self.layout.rows, (g + 1) * self.layout.rows)
            listed = keys[head][g, : counts[head][g]]
            own, its_grad, (near, values) = q[rows].float(), grad[rows].float(), (x[listed].float() for x in (k, v))
            weights = (own @ near.mT * scale - lse[rows, None]).exp_()
            dv.index_add_(0, listed, weights.mT @ its_grad)
            weights *= (its_grad @ values.mT - delta[rows, None]) * scale
            dq[rows] = weights @ near
            dk.index_add_(0, listed, weights.mT @ own)

    @property
    def _groups(self):
        return self.layout.batch, self.layout.heads, self.layout.groups
