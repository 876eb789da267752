"""The kernels behind `scaled_dot_product_attention` on a GPU, each by itself, with its log-sum-exp."""

import warnings
from typing import Any

import torch
from torch import Tensor

from tilewright.core import _internals
from tilewright.core.errors import Unavailable

NAMES = ("flash", "cudnn", "efficient")


def need(backend: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise `Unavailable` unless `backend` takes such tokens without a mask."""
    able = getattr(torch.backends.cuda, f"can_use_{backend}_attention")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not able(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, False), True):
            why = "; ".join(str(warning.message).partition(" (Triggered")[0] for warning in caught)
            raise Unavailable(f"torch's {backend} attention refuses {q.dtype}, head dim {q.shape[-1]}: {why}")


def attend(
    backend: str, q: Tensor, k: Tensor, v: Tensor, with_lse: bool = False, scale: float | None = None, bias: Any = None
) -> tuple[Tensor, Tensor]:
    """Attention over all pairs by `backend`: ``(out [B, H, N_q, D], lse [B, H, N_q, 1] float32)``.

    The operators are called as `scaled_dot_product_attention` calls them. lse: natural logarithms, undefined unless
    `with_lse`. scale: default ``D ** -0.5``. bias: added to the scores, [B, H, N_q, N_k] of q's type; not for flash.
    """
    rest = () if backend == "flash" else (bias, with_lse)
    given = {} if scale is None else {"scale": scale}
    out, lse, *_ = _internals.SDPA_BACKENDS[backend](q, k, v, *rest, **given)
    # Rows are padded by one operator and followed by a dimension of one in another.
    return out, lse.flatten(2)[:, :, : q.shape[2], None] if with_lse else lse


def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """FlashAttention-2 of packed images [T, H, D], each within itself. starts: int32 [B + 1], cumulative lengths;
    longest: a bound of them."""
    return _internals.packed_flash(q, k, v, starts, starts, longest, longest, 0.0, False, False)[0]
