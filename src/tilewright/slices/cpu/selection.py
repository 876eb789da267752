"""Codes and lists of slices on a CPU, a few groups at a time (stage T5).

The contract is that of `tilewright.slices.selection`.
"""

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.devices.cpu.workers import in_any_state
from tilewright.slices.layout import NO_LENGTH, STEP, UNKNOWN
from tilewright.slices.selection import BIN, CODES, MASS_UNIT, OCTAVE, WEIGHTS

if TYPE_CHECKING:
    from tilewright.slices.layout import Layout
    from tilewright.slices.selection import Rule

# Scores, and codes, that are worked on at a time: 16 MB of the former stay in a large cache.
SCORES, COUNTED = 1 << 22, 1 << 21


def memory(device: torch.device) -> int:
    """See `selection`."""
    return psutil.virtual_memory().total


class Selection:
    """Methods as in `selection`."""

    def __init__(self, layout: "Layout", device: torch.device):
        """`device` holds the tensors of each call."""
        self.layout, self._device = layout, device

    @in_any_state
    def pooled(
        self, q: Tensor, k: Tensor, pool: int, scale: float, lengths: Tensor | None = None, sample: int = 1
    ) -> Tensor:
        """See `selection`."""
        rows, lse = means(q, pool), None
        if sample > 1:
            size = (k.shape[2] - torch.arange(0, k.shape[2], sample, device=k.device)).clamp(max=sample).log()
            lse = (rows.float() @ k[:, :, ::sample].float().mT * scale + size).logsumexp(-1)
        return self._codes(rows, k, lse, pool, False, scale, lengths)

    @in_any_state
    def column(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor | None,
        step: int,
        largest: bool,
        scale: float,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """See `selection`."""
        lse = None if lse is None else lse[..., ::step]
        return self._codes(q[:, :, ::step], k, lse, step, largest, scale, lengths)

    @in_any_state
    def blocks(self, q: Tensor, k: Tensor, block: int, similarity: float, scale: float) -> Tensor:
        """See `selection`."""
        layout = self.layout
        k = k[:, :, layout.first : layout.keys - layout.last]
        q_mean, k_mean = means(q, layout.rows), means(k, block)
        # NaN is alike, so that it reaches the shares.
        q_unlike, k_unlike = cosines(q, q_mean, layout.rows) < similarity, cosines(k, k_mean, block) < similarity
        scores = (q_mean.float() @ k_mean.float().mT).mul_(scale)
        size = torch.full((k_mean.shape[2],), float(block), dtype=torch.float32, device=k.device)
        size[-1] = k.shape[2] - block * (len(size) - 1)
        lse = torch.where(k_unlike[:, :, None], -math.inf, scores + size.log()).logsumexp(-1, keepdim=True)
        codes = _coded((scores - lse).mul_(math.log2(math.e)))
        codes.masked_fill_((q_unlike[..., None] | k_unlike[:, :, None]) & ~lse.isnan(), 0)
        codes = codes.repeat_interleave(block, -1)[..., : k.shape[2]]
        return F.pad(codes, (layout.first, layout.last), value=CODES - 1)

    @in_any_state
    def given(self, mask: Tensor) -> Tensor:
        """See `selection`."""
        layout = self.layout
        codes = torch.where(mask, 0, 255).to(torch.uint8)
        return codes.expand(layout.batch, layout.heads, layout.groups, layout.keys)

    @in_any_state
    def random(self, seed: int) -> Tensor:
        """See `selection`."""
        layout = self.layout
        rows = torch.arange(layout.batch * layout.heads * layout.groups, device=self._device)
        keys = torch.arange(layout.keys, device=self._device)
        # The last code stands for no share: a group of such keys alone would list nothing.
        codes = mixed(mixed(rows + seed)[:, None] + keys) % (CODES - 1)
        return codes.to(torch.uint8).view(layout.batch, layout.heads, layout.groups, layout.keys)

    def _codes(self, rows, k, lse, step, largest, scale, lengths):
        """Codes of rows [B, H, P, D] that stand for `step` queries each; `largest`: not their mean, but the maximum."""
        layout = self.layout
        codes = torch.empty(layout.batch, layout.heads, layout.groups, layout.keys, dtype=torch.uint8, device=k.device)
        of_group = layout.rows // step
        at_once = max(1, SCORES // (of_group * layout.keys))
        n_keys = self._lengths(lengths)
        for b, h in np.ndindex(layout.batch, layout.heads):
            # Scores in octaves: the factor is part of the rows.
            scaled, keys = rows[b, h].float() * (scale * math.log2(math.e)), k[b, h, : n_keys[b]].float()
            for g in range(0, layout.groups, at_once):
                taken = slice(g * of_group, (g + at_once) * of_group)
                logs = None if lse is None else lse[b, h, taken].float() * math.log2(math.e)
                counts = self._queries(taken, min(at_once * of_group, rows.shape[2] - taken.start), step)
                shares = _of_groups(scaled[taken] @ keys.mT, logs, counts, of_group, largest)
                if of_group == 1 and logs is not None:
                    # A key that the log-sum-exps do not know of is listed and shows in the result.
                    shares.masked_fill_((shares.isnan() | shares.isposinf()) & ~logs.isnan()[:, None], 0)
                codes[b, h, g : g + at_once, : len(keys)] = _coded(shares)
        return codes

    def _queries(self, taken, n, step):
        """How many queries each of n rows stands for, float32 [n]."""
        first = torch.arange(taken.start, taken.start + n, device=self._device) * step
        return (self.layout.queries - first).clamp(0, step).float()

    def _lengths(self, lengths):
        """How many keys each batch entry has, a list; all of them where its number is out of range."""
        n = self.layout.keys
        return [n] * self.layout.batch if lengths is None else [m if 0 < m <= n else n for m in lengths.tolist()]

    @in_any_state
    def select(self, codes: Tensor, rule: "Rule", keys: Tensor, counts: Tensor, lengths: Tensor | None = None) -> None:
        """See `selection`."""
        for b, n in enumerate(self._lengths(lengths)):
            rows, lists, found = codes[b, ..., :n].flatten(0, 1), keys[b].view(-1, keys.shape[-1]), counts[b].view(-1)
            at_once, most = max(1, COUNTED // n), self._most(rule)
            for lo in range(0, len(rows), at_once):
                taken = slice(lo, lo + at_once)
                found[taken] = _select(rows[taken], rule, most[taken], lists[taken])
        if lengths is not None:
            counts[(lengths < 1) | (lengths > self.layout.keys)] = NO_LENGTH
        keys[counts >= UNKNOWN] = 0

    def _most(self, rule):
        """int64 [H * G]: the most units that a rule lists of each group."""
        each = torch.tensor(rule.counts(self.layout.heads), dtype=torch.int64, device=self._device)
        return each.repeat_interleave(self.layout.groups)


def means(x: Tensor, n: int) -> Tensor:
    """Means of n consecutive rows of x [B, H, N, D], in its type; the last of fewer."""
    if n == 1:
        return x
    whole = x.shape[2] // n * n
    found = x[:, :, :whole].unflatten(2, (-1, n)).mean(3, dtype=torch.float32)
    if whole < x.shape[2]:
        found = torch.cat([found, x[:, :, whole:].mean(2, keepdim=True, dtype=torch.float32)], 2)
    return found.to(x.dtype)


def cosines(x: Tensor, mean: Tensor, n: int) -> Tensor:
    """Mean cosine of n consecutive rows of x [B, H, N, D] to their mean, float32 [B, H, ceil(N / n)]."""
    mean = mean.float()
    spread = mean.repeat_interleave(n, 2)[:, :, : x.shape[2]]
    cosine = F.cosine_similarity(x.float(), spread, dim=-1, eps=1e-12)
    return means(cosine[..., None], n)[..., 0]


def mixed(x: Tensor) -> Tensor:
    """Integers int64 below 2**32, as good as random for consecutive x."""
    # The finaliser of MurmurHash3.
    x = x & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def _of_groups(scores, logs, counts, of_group, largest):
    """log2 of the shares [G, N] of groups of rows, which stand for `counts` [P] queries each; overwrites the scores.

    scores: [P, N], in octaves. logs: their log-sum-exps in base 2 [P], or None.
    """
    missing = -len(scores) % of_group
    if largest:
        logs = torch.logsumexp(scores * math.log(2), 1) * math.log2(math.e) if logs is None else logs
        shares = F.pad(scores.sub_(logs[:, None]), (0, 0, 0, missing), value=-math.inf)
        # `amax` hands on NaN.
        return shares.view(-1, of_group, shares.shape[1]).amax(1)
    weight = F.pad(counts, (0, missing)).view(-1, of_group)
    weight = weight / weight.sum(1, keepdim=True)
    # Without log-sum-exps, what the shares of a row add up to is divided by in the end.
    shares = scores.sub_((scores.amax(1) if logs is None else logs)[:, None]).exp2_()
    if logs is None:
        weight = weight / F.pad(shares.sum(1), (0, missing), value=1).view(-1, of_group)
    shares = F.pad(shares, (0, 0, 0, missing)).view(-1, of_group, shares.shape[1])
    return torch.bmm(weight[:, None], shares)[:, 0].log2_()


def _coded(logs):
    """Codes uint8 of shares given by their log2, float32; overwrites them."""
    return logs.mul_(-OCTAVE).nan_to_num_(nan=CODES - 1.0, posinf=CODES - 1.0).clamp_(0, CODES - 1).to(torch.uint8)


@lru_cache
def _weights(free, device):
    """int64 [256]: the weights of codes."""
    weights = [WEIGHTS[code % OCTAVE // BIN] >> code // OCTAVE for code in range(CODES)]
    if free:
        weights[0] = 0
    return torch.tensor(weights, dtype=torch.int64, device=device)


def _select(codes, rule, most, keys):
    """Write the lists of rows of codes [R, N], of at most int64 [R] units, to keys [R, capacity]; counts int32 [R]."""
    n_keys = codes.shape[1]
    if rule.width > 1:
        codes = _runs(codes, rule.width)
    n = codes.shape[1]
    always = torch.zeros(n, dtype=torch.bool, device=codes.device)
    for first, end in rule.always:
        always[first:end] = True
    unknown = (codes == CODES - 1).all(1)
    taken, asked = _taken(codes, rule, most, always)
    if rule.width > 1:
        taken = taken.repeat_interleave(rule.width, 1)[:, :n_keys]
        asked = torch.where(asked > rule.most, asked * rule.width, taken.sum(1))
    for flags, listed in zip(taken.numpy(), keys.numpy(), strict=True):
        found = np.flatnonzero(flags)
        listed[: len(found)] = found
        listed[len(found) : -(-len(found) // STEP) * STEP] = found[-1:]
    return asked if rule.known else torch.where(unknown, UNKNOWN, asked)


def _taken(codes, rule, most, always):
    """``(bool [R, N], the units that the rule asks for [R])``."""
    # Fewer than the rule says where a batch entry is shorter.
    n_always = int(always.sum())
    rows = torch.arange(len(codes), device=codes.device)
    counts = torch.bincount((codes + CODES * rows[:, None]).flatten(), minlength=CODES * len(codes)).view(-1, CODES)
    of_always = torch.bincount((codes[:, always] + CODES * rows[:, None]).flatten(), minlength=CODES * len(codes))
    of_always = of_always.view(-1, CODES)
    upto = (counts - of_always).cumsum(1)
    if rule.mass is not None:
        weights = _weights(rule.free, codes.device)
        total, base = (counts * weights).sum(1), (of_always * weights).sum(1)
        target = rule.mass_units * MASS_UNIT * total.double()
        enough = base[:, None] + ((counts - of_always) * weights).cumsum(1) >= target[:, None]
        asked = n_always + upto.gather(1, enough.int().argmax(1, keepdim=True))[:, 0]
    elif rule.code is not None:
        asked = n_always + upto[:, rule.code]
    else:
        asked = torch.full_like(upto[:, 0], codes.shape[1])
    asked = torch.minimum(asked, most).clamp(min=max(min(rule.least, codes.shape[1]), n_always))
    fit = asked.clamp(max=rule.most)
    # The last code of which units are taken, and how many of them.
    wanted = fit - n_always
    last = (upto >= wanted[:, None]).int().argmax(1, keepdim=True)
    before = (upto - (counts - of_always)).gather(1, last)
    same = (codes == last) & ~always
    ties = same & (same.cumsum(1, dtype=torch.int32) <= wanted[:, None] - before)
    return always | (codes < last) | ties, asked


def _runs(codes, width):
    """Codes of the sums of shares of aligned runs of `width` keys; a run of code 255 alone has it, too."""
    shares = torch.exp2((codes.float() + 0.5) / -OCTAVE).masked_fill_(codes == CODES - 1, 0)
    shares = F.pad(shares, (0, -codes.shape[1] % width)).unflatten(1, (-1, width)).sum(2)
    return _coded(shares.log2_())
