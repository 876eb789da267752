"""Oracles of operators and networks beside `tilewright.reference`: neighbourhoods by rule, logits."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.reference import attention, relative_error


def logits_error(found: Tensor, expected: Tensor) -> float:
    """`relative_error` of an image's logits [B, classes], by how far those expected spread around their mean."""
    return relative_error(found, expected, expected.double().mean(1, keepdim=True))


def neighborhood(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    border: str = "shift",
    scale: float | None = None,
    extra: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the tokens of a grid to boxes around them: q, k, v [B, *grid, H, D] → float64 of q's form, and its
    natural log-sum-exps [B, *grid, H].

    extra: keys and values [B, N, H, D] that all tokens see. k, v and these may have fewer heads, each for as many
    neighbours of q's.
    """
    grid, heads = q.shape[1:-2], q.shape[-2]
    each = [x if isinstance(x, Sequence) else [x] * len(grid) for x in (window, stride, dilation, causal)]
    allowed = torch.ones(1, 1, dtype=torch.int8)
    for n, w, s, d, c in zip(grid, *each, strict=True):
        allowed = torch.kron(allowed, axis_pairs(n, w, s, d, bool(c), border).to(torch.int8))
    k, v = (x.flatten(1, -3) for x in (k, v))
    if extra is not None:
        k, v = torch.cat((k, extra[0]), 1), torch.cat((v, extra[1]), 1)
        allowed = F.pad(allowed, (0, extra[0].shape[1]), value=1)
    keys, values = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (k, v))
    queries, allowed = q.flatten(1, -3).transpose(1, 2), allowed.bool().to(q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lse = (queries.double() @ keys.double().mT * scale).masked_fill(~allowed, -torch.inf).logsumexp(-1)
    out = attention(queries, keys, values, allowed, scale=scale)
    return out.transpose(1, 2).unflatten(1, grid), lse.transpose(1, 2).unflatten(1, grid)


def axis_pairs(length: int, window: int, stride: int, dilation: int, causal: bool, border: str) -> Tensor:
    """Bool [length, length]: which positions along an axis see which, as NATTEN has it; or with windows that are cut at
    borders."""
    x = torch.arange(length)
    # Tokens of each token's sub-axis, and its place there.
    n, i = -(-(length - x % dilation) // dilation), x // dilation
    left, right = window // 2, window // 2 + window % 2 - 1
    if causal:
        leader = torch.minimum(i // stride * stride + stride - 1, n - 1)
        lo, hi = (leader - left - right).clamp(min=0), torch.minimum(i + 1, n)
    else:
        leader = torch.minimum(i // stride * stride + stride // 2, n - 1)
        lo = (leader - left).clamp(min=0)
        if border == "shift":
            lo = lo + torch.where(leader + right >= n, n - right - leader - 1, 0)
            hi = lo + window
        else:
            hi = torch.minimum(leader + right + 1, n)
    return (x[:, None] % dilation == x % dilation) & (lo[:, None] <= i) & (i < hi[:, None])
