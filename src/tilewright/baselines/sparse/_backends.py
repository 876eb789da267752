"""The kernels behind `scaled_dot_product_attention` on a GPU, each by itself, with its log-sum-exp."""

import warnings

import torch

from tilewright.baselines.sparse import Ready, Unavailable, need_gpu

NAMES = ("flash", "cudnn", "efficient")
# Looked up once: calls of it are timed by the host's clock, too.
_VARLEN = torch.ops.aten._flash_attention_forward


def dense(backend, graph, *, batch, heads, head_dim, dtype, device):
    """`Ready` for attention over all pairs by `backend`. Raises `Unavailable`."""
    need_gpu(device)
    n_q, n_k = graph.shape
    need(backend, *(torch.empty(batch, heads, n, head_dim, dtype=dtype, device=device) for n in (n_q, n_k, n_k)))
    return Ready(lambda q, k, v: attend(backend, q, k, v)[0], 0, n_q * n_k)


def need(backend, q, k, v):
    """Raise `Unavailable` unless `backend` takes such tokens without a mask."""
    able = getattr(torch.backends.cuda, f"can_use_{backend}_attention")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if not able(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, False), True):
            why = "; ".join(str(warning.message).partition(" (Triggered")[0] for warning in told)
            raise Unavailable(f"torch's {backend} attention refuses {q.dtype}, head dim {q.shape[-1]}: {why}")


def attend(backend, q, k, v, with_lse=False):
    """Attention over all pairs by `backend`: ``(out [B, H, N_q, D], lse [B, H, N_q, 1] float32)``.

    The operators are called as `scaled_dot_product_attention` calls them. lse: undefined unless `with_lse`.
    """
    aten = torch.ops.aten
    if backend == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v)
    elif backend == "cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, with_lse)
    else:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, with_lse)
    # Rows are padded by one operator and followed by a dimension of one in another.
    return out, lse.flatten(2)[:, :, : q.shape[2], None] if with_lse else lse


def varlen(q, k, v, starts, longest):
    """FlashAttention-2 of packed images [T, H, D], each within itself. starts: int32 [B + 1], cumulative lengths;
    longest: a bound of them."""
    return _VARLEN(q, k, v, starts, starts, longest, longest, 0.0, False, False)[0]
