"""What lists keep and what they lose: shares of attention, recall, density at a recall, errors of a result.

The *share* of a key in a query's attention is its softmax weight, the share of a key in a group's the mean over the
group's queries. The *recall* of a query is the sum of the shares that its list keeps.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from tilewright import reference
from tilewright.slices.layout import SliceLists

# Scores that `group_shares` computes at a time: half a gigabyte of float32.
_SLAB_SCORES = 1 << 27


def group_shares(q: Tensor, k: Tensor, groups: Tensor, *, rows: int, scale: float | None = None) -> Tensor:
    """Exact shares of all keys in the attention of some groups of one head: float32 [len(groups), N_k].

    q: [N_q, D], k: [N_k, D]. groups: int64, numbers of groups of `rows` consecutive queries; the last one may be short.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = k.float().mT
    shares = torch.empty(len(groups), len(k), dtype=torch.float32, device=q.device)
    step = max(1, _SLAB_SCORES // (rows * len(k)))
    for lo in range(0, len(groups), step):
        queries = groups[lo : lo + step, None] * rows + torch.arange(rows, device=q.device)
        inside = queries < len(q)
        scores = q[queries.clamp_max(len(q) - 1)].float() @ keys * scale
        each = torch.softmax(scores, -1) * (inside.float() / inside.sum(1, keepdim=True))[:, :, None]
        shares[lo : lo + step] = each.sum(1)
    return shares


def run_shares(shares: Tensor, width: int) -> Tensor:
    """Shares of aligned runs of `width` keys, the last one maybe short: [..., N_k] → [..., ceil(N_k / width)]."""
    padded = torch.nn.functional.pad(shares, (0, -shares.shape[-1] % width))
    return padded.unflatten(-1, (-1, width)).sum(-1)


class Ranked:
    """Keys, or runs, of groups by their shares, the largest first; equal ones in the order of the keys.

    places: int32 [..., N], the keys in this order. cumulative: float64 [..., N], what the first of them come to. least:
    how many come first whatever their shares.
    """

    def __init__(self, shares: Tensor, always: Tensor | None = None):
        """Rank `shares` [..., N], which sum to the attention of a group, 1 for exact ones. always: bool [N], those that
        come first, or None."""
        self.least = 0 if always is None else int(always.sum())
        self.places = torch.empty_like(shares, dtype=torch.int32)
        self.cumulative = torch.empty_like(shares, dtype=torch.float64)
        for rows, places, cumulative in self._slabs(shares, self.places, self.cumulative):
            keys = rows if always is None else rows.masked_fill(always, torch.inf)
            order = keys.argsort(dim=-1, descending=True, stable=True)
            places.copy_(order)
            torch.cumsum(rows.gather(-1, order).double(), -1, out=cumulative)

    def counts(self, mass: float) -> Tensor:
        """int64 [...]: the fewest of each group whose shares come to `mass` of their sum."""
        # What rounding leaves of the sum is not asked for.
        missing = self.cumulative < mass * self.cumulative[..., -1:] * (1 - 1e-12)
        return (missing.sum(-1) + 1).clamp(self.least, self.cumulative.shape[-1])

    def kept(self, counts: Tensor) -> Tensor:
        """float64 [...]: what the first `counts` [...] of each group, at least one, come to."""
        return self.cumulative.gather(-1, counts[..., None] - 1)[..., 0]

    def mask(self, counts: Tensor) -> Tensor:
        """bool [..., N]: which these are."""
        flags = torch.zeros_like(self.places, dtype=torch.bool)
        place = torch.arange(self.places.shape[-1], device=counts.device)
        for rows, places, count in self._slabs(flags, self.places, counts[..., None]):
            rows.scatter_(-1, places.long(), place < count)
        return flags

    @staticmethod
    def _slabs(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Views of some rows at a time: what a sort needs besides takes several times their memory."""
        flat = [x.view(-1, x.shape[-1]) for x in tensors]
        return zip(*(x.split(max(1, _SLAB_SCORES // flat[0].shape[1])) for x in flat), strict=True)


def attention_rows(lists: SliceLists, rows: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the queries `rows`, int64 [R], over their lists → float64 [B, H, R, D], where the lists are.

    As `reference.attention_rows` of `lists.graph`, whose lists go to the host: of many heads that takes minutes. q, k,
    v as for `attend`, of lists without `lengths`. Lists are not checked.
    """
    layout = lists.layout
    out = torch.empty(*q.shape[:2], len(rows), v.shape[-1], dtype=torch.float64, device=q.device)
    groups = (rows - layout.first).div(layout.rows, rounding_mode="floor")
    text = (rows < layout.first) | (rows >= layout.tokens - layout.last)
    place = torch.arange(layout.capacity, device=q.device)
    step = max(1, _SLAB_SCORES // layout.keys)
    for b, h in itertools.product(range(layout.batch), range(layout.heads)):
        one = slice(b, b + 1), slice(h, h + 1)
        own, values = (x[one].double() for x in (k, v))
        for lo in range(0, len(rows), step):
            here = slice(lo, lo + step)
            asked, of_row = groups[here].clamp(0, layout.groups - 1).unique(return_inverse=True)
            # Places behind the end of a list stand for a key that is not there.
            listed = lists.keys[b, h, asked].long().where(place < lists.counts[b, h, asked, None], layout.keys)
            allowed = torch.zeros(len(asked), layout.keys + 1, dtype=torch.bool, device=q.device).scatter_(
                1, listed, True
            )
            allowed = allowed[of_row, :-1] | text[here, None]
            out[one[0], one[1], here] = reference.attention(q[one][:, :, rows[here]], own, values, allowed)
    return out


def errors(found: Tensor, expected: Tensor) -> dict[str, float]:
    """``l1``, sum of absolute errors over that of absolute values; ``cosine``, of the whole results as vectors;
    ``largest``, the largest absolute error. Computed in float64."""
    found, expected = found.double().flatten(), expected.double().flatten()
    apart = (found - expected).abs()
    return {
        "l1": float(apart.sum() / expected.abs().sum()),
        "cosine": float(torch.nn.functional.cosine_similarity(found, expected, 0)),
        "largest": float(apart.max()),
    }


def error_bound(recall: Tensor, v: Tensor) -> Tensor:
    """Largest absolute error that queries with such `recall` [B, H, N_q] may have: 2 (1 - recall) max |v| of v
    [B, H, N_k, D].

    Lists keep the weights w_j of recall r as w_j / r and lose the others: the weights change by 1 - r in what is kept
    and by 1 - r in what is lost.
    """
    return 2 * (1 - recall).clamp_min(0) * v.abs().amax((-2, -1))[..., None]
