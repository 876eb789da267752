"""Slice lists for tests, and the oracle of attention by them."""

import numpy as np
import torch

from helpers.gpu import TRITON_DEVICE
from tilewright import reference, slices

# bfloat16 is silently wrong under some releases of the interpreter.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if TRITON_DEVICE == "cuda" else [])
# float32 log-sum-exps of scores of length 16 at most: a few units in the last place, and the rounding of 16-bit
# products in float32 sums.
LSE_TOLERANCE = 1e-4


def tokens(*shape, device="cpu", dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def qkv(batch, heads, n_q, n_k, head_dim, seed=1, **options):
    """q [B, H, N_q, D], k and v [B, H, N_k, D], as views of what projections leave: [B, N, H, D]."""
    sizes = (n_q, n_k, n_k)
    return [tokens(batch, n, heads, head_dim, seed=seed + i, **options).transpose(1, 2) for i, n in enumerate(sizes)]


def mask_of(counts, n_k, seed=0):
    """bool [B, H, G, N_k] with so many random keys in each group; counts: int [B, H, G]."""
    score = torch.rand(*np.shape(counts), n_k, generator=torch.Generator().manual_seed(seed))
    return score.argsort(-1).argsort(-1) < torch.as_tensor(counts)[..., None]


def expected(lists, q, k, v):
    """Attention by the lists in float64 and its log-sum-exps, on the CPU, from the graph of each head."""
    q, k, v = (x.detach().cpu() for x in (q, k, v))
    rows = np.arange(q.shape[2])
    out, lse = torch.empty(q.shape, dtype=torch.float64), torch.empty(q.shape[:3], dtype=torch.float64)
    for b, h in np.ndindex(*q.shape[:2]):
        pattern, one = lists.graph(b, h), np.s_[b : b + 1, h : h + 1]
        out[one] = reference.attention_rows(pattern, rows, q[one], k[one], v[one])
        scores = q[b, h].double() @ k[b, h].double().mT * q.shape[-1] ** -0.5
        lse[b, h] = scores.masked_fill(~torch.from_numpy(pattern.to_dense()), -torch.inf).logsumexp(-1)
    return out, lse


def check_attention(lists, q, k, v):
    """Compare attention by the lists, and its log-sum-exps, with the oracle."""
    out, lse = slices.attend(q, k, v, lists, lse=True)
    right, sums = expected(lists, q, k, v)
    assert out.shape == q.shape and out.dtype == q.dtype and lse.dtype == torch.float32
    assert reference.relative_error(out.cpu(), right) <= reference.TOLERANCE[q.dtype]
    assert torch.equal(lse.cpu() == -torch.inf, sums == -torch.inf)
    torch.testing.assert_close(lse.cpu().double(), sums, rtol=0, atol=LSE_TOLERANCE)
    assert torch.equal(slices.attend(q, k, v, lists), out)
    return out, lse
