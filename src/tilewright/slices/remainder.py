"""What lists leave out, estimated: the keys that a group does not list, as one more key of its queries."""

import torch
from torch import Tensor

from tilewright.core.errors import PatternError
from tilewright.core.operators import records, watched
from tilewright.devices import qkv
from tilewright.slices import operators
from tilewright.slices.attention import biased, check_kinds, check_scale, left_out
from tilewright.slices.layout import SliceLists, check_inputs, with_tails

# Pairs of a group and a key that are worked on at a time: 128 MB of two bytes each.
_PAIRS = 1 << 26


def rest(q: Tensor, k: Tensor, v: Tensor, lists: SliceLists, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Estimate the attention to the keys that lists leave out, by the mean query of each group.

    ``merge(attend(q, k, v, lists, lse=True), rest(q, k, v, lists))`` is dense attention if the queries of each group
    are equal, and an estimate of it otherwise.

    Parameters
    ----------
    q, k, v : Tensor
        [B, H, N_q, D], and k and v [B, H, N_k, D], as `attend` takes them.
    lists : SliceLists
        Lists that name the other keys.
    scale : float, optional
        Factor of the scores; the default is ``D ** -0.5``.

    Returns
    -------
    (Tensor, Tensor)
        Attention [B, H, N_q, D] and natural log-sum-exps float32 [B, H, N_q], equal for all queries of a group. Queries
        of text, and groups that list all keys, get zeros and -inf.

    Raises
    ------
    PatternError, DeviceError
        For tensors that `attend` refuses, and for those that need a gradient.

    Notes
    -----
    By Jensen's inequality the log-sum-exp is at most the mean of those of the queries. The operation takes 1 / M of the
    products of dense attention for groups of M queries. On a GPU the call does not wait.
    """
    check_kinds(lists, q=q, k=k, v=v)
    if records(q, k, v):
        raise PatternError("q, k, v: slices.rest has no backward; call it under torch.no_grad()")
    layout = lists.layout
    scale = q.shape[-1] ** -0.5 if scale is None else check_scale(scale)
    check_inputs(layout, *lists.tensors, q=q[:, :, layout.grouped], k=k, v=v)
    given = lists.keys, lists.counts, q, k, v, lists.lengths, scale
    return torch.ops.tilewright.slices_rest(*given, [*layout]) if watched(q) else _rest(layout, *given)


def _rest(layout, keys, counts, q, k, v, lengths, scale):
    means = _means(q[:, :, layout.grouped], layout.rows)
    found = torch.zeros_like(means)
    sums = torch.full(means.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    n_keys = torch.full_like(counts[:, 0, 0], layout.keys) if lengths is None else lengths
    step = max(1, _PAIRS // layout.keys)
    for b in range(layout.batch):
        for h in range(layout.heads):
            for first in range(0, layout.groups, step):
                one = (slice(b, b + 1), slice(h, h + 1), slice(first, first + step))
                bias = _without(keys[one], counts[one], n_keys[b : b + 1], layout.keys, q.dtype)
                some = counts[one] < n_keys[b]
                out, lse = biased(means[one], k[one[:2]], v[one[:2]], bias, scale)
                # Softmax over no key is not defined.
                found[one] = torch.where(some[..., None], out, 0)
                sums[one] = torch.where(some, lse, -torch.inf)
    whole = qkv.empty(q, layout.tokens).zero_()
    total = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    whole[:, :, layout.grouped] = found.repeat_interleave(layout.rows, 2)[:, :, : layout.queries]
    total[:, :, layout.grouped] = sums.repeat_interleave(layout.rows, 2)[:, :, : layout.queries]
    return whole, total


def _means(q, rows):
    """Means of `rows` consecutive queries, the last of fewer, in the type of q."""
    padded = torch.nn.functional.pad(q.float(), (0, 0, 0, -q.shape[2] % rows)).unflatten(2, (-1, rows)).sum(3)
    sizes = (q.shape[2] - rows * torch.arange(padded.shape[2], device=q.device)).clamp(max=rows)
    return (padded / sizes[:, None]).to(q.dtype)


def _without(keys, counts, length, n_keys, dtype):
    """What is added to scores, [1, 1, G, N_k]: -inf for keys that are listed and for those from `length` [1] on."""
    bias = left_out(length, n_keys, dtype).repeat(*counts.shape, 1)
    listed = with_tails(keys, counts).clamp(0, n_keys - 1).long()
    # A group without keys has none to repeat.
    fill = torch.where(counts > 0, -torch.inf, 0).to(dtype)[..., None].expand(listed.shape)
    return bias.scatter_add_(-1, listed, fill)[..., :n_keys]


def _fake_rest(layout, keys, counts, q, *_):
    return qkv.empty(q, layout.tokens), q.new_empty(q.shape[:3], dtype=torch.float32)


operators.define(
    "rest",
    "Tensor keys, Tensor counts, Tensor q, Tensor k, Tensor v, Tensor? lengths, float scale",
    "(Tensor, Tensor)",
    _rest,
    _fake_rest,
)
