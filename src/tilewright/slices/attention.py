"""Attention by slice lists, dense attention with its log-sum-exps, and what follows from both."""

from typing import Any

import torch
from torch import Tensor

from tilewright.core import _internals
from tilewright.core.errors import PatternError, Unavailable
from tilewright.core.operators import watched
from tilewright.slices import operators
from tilewright.slices.layout import SliceLists, check_tokens
from tilewright.targets import qkv
from tilewright.torch_attention import kernels

# Dense kernels of a GPU, the fastest first: cuDNN's is 1.75 times as fast as FlashAttention-2 on an H200.
HOPPER, OLDER = ("cudnn", "flash", "efficient"), ("flash", "cudnn", "efficient")
# Backends by the tensors that they take: asking torch takes the host a hundred times as long as a call.
KEPT = 256
_known: dict[tuple, str] = {}

Part = tuple[Tensor, Tensor]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: SliceLists,
    *,
    scale: float | None = None,
    lse: bool = False,
    out: Tensor | None = None,
) -> Any:
    """Softmax attention of each query over the listed keys of its group: a tensor [B, H, N_q, D].

    q [B, H, N_q, D], k and v [B, H, N_k, D]: float32, float16 or bfloat16, D of 64 or 128, strided views with the
    values of a head side by side. scale: default ``D ** -0.5``. lse: return ``(out, lse)``, with the natural
    log-sum-exps of each query's scores, float32 [B, H, N_q]. out: memory for the result that no input uses, strided
    likewise; None: new.

    Groups without keys give zeros and -inf. Where a list did not fit all is NaN, and `SliceLists.check` says which. On
    a GPU the call takes a few µs of the host's time for tensors of a layout seen before, does not wait, and may be
    captured in a CUDA graph. Raises `PatternError` or `DeviceError` for tensors that the lists are not for, and for
    those that need a gradient.
    """
    scale = _scale(q, scale)
    if watched(q):
        name = "slices_attend_lse" if lse else "slices_attend"
        made = getattr(torch.ops.tilewright, name)(*lists.tensors, q, k, v, scale, lists.layout)
        made, sums = made if lse else (made, None)
        made = made if out is None else out.copy_(made)
    else:
        run = operators.executor(lists.layout, q.device).attend
        made, sums = run(lists.tensors, q, k, v, scale=scale, out=out, with_lse=lse)
    return (made, sums) if lse else made


def merge(*parts: Part) -> Part:
    """Attention over the union of disjoint sets of keys, from that over each: ``((out, lse), ...) -> (out, lse)``.

    out: [B, H, N_q, D]; lse: float32 [B, H, N_q], as `attend` returns them. Computed in float32; the result has the
    type of the first part. Raises `PatternError` for parts of different shapes, and for none.
    """
    if not parts:
        raise PatternError("parts: expected at least one pair of attention and log-sum-exps, found none")
    (first, _), *_ = parts
    for out, lse in parts:
        if out.shape != first.shape or lse.shape != first.shape[:-1]:
            raise PatternError(
                f"parts: expected attention {tuple(first.shape)} and log-sum-exps {tuple(first.shape[:-1])}, found "
                f"{tuple(out.shape)} and {tuple(lse.shape)}"
            )
    total = torch.stack([lse for _, lse in parts]).logsumexp(0)
    merged = torch.zeros_like(first, dtype=torch.float32)
    for out, lse in parts:
        # Without keys in any part, exp(-inf + inf) is to be 0.
        weight = (lse - total).exp().masked_fill(lse == -torch.inf, 0)
        merged += weight[..., None] * out
    return merged.to(first.dtype), total


def dense(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Part:
    """Attention over all keys and its natural log-sum-exps, by the fastest operator here that returns both.

    q [B, H, N_q, D], k and v [B, H, N_k, D] → ([B, H, N_q, D], float32 [B, H, N_q]). On a GPU of compute capability 9.0
    or later cuDNN's kernel, before that FlashAttention-2, and where these refuse the tensors the memory-efficient one;
    on a CPU torch's flash operator. Raises `PatternError` or `DeviceError` for tensors that `attend` would refuse.
    """
    scale = _scale(q, scale)
    if watched(q):
        return torch.ops.tilewright.slices_dense(q, k, v, scale, [])
    return _dense(q, k, v, scale)


def recall(q: Tensor, k: Tensor, lists: SliceLists, *, scale: float | None = None, lse: Tensor | None = None) -> Tensor:
    """The share of each query's attention that its listed keys have: float32 [B, H, N_q], exact, without an N×N array.

    lse: the log-sum-exps of dense attention, where they are known; None: computed. Lists that did not fit give NaN.
    """
    _, listed = attend(q, k, k, lists, scale=scale, lse=True)
    if lse is None:
        _, lse = dense(q, k, k, scale=scale)
    return (listed - lse).exp().clamp(max=1)


def _scale(q, scale):
    if scale is None:
        return max((1, *q.shape[-1:])) ** -0.5
    if not scale > 0:
        raise PatternError(f"scale: expected a number greater than 0, found {scale}")
    return scale


def _dense(q, k, v, scale):
    check_tokens(q=q, k=k, v=v)
    if not q.is_cuda:
        return _internals.attention_with_lse(q, k, v, attn_mask=None, scale=scale)
    out, lse = kernels.attend(_backend(q, k, v), q, k, v, with_lse=True, scale=scale)
    return out, lse[..., 0]


def _backend(q, k, v):
    """The fastest of torch's kernels that takes such tensors."""
    key = q.device, q.dtype, *((x.shape, x.stride()) for x in (q, k, v))
    if key not in _known:
        refusals = []
        for backend in HOPPER if torch.cuda.get_device_capability(q.device) >= (9, 0) else OLDER:
            try:
                kernels.need(backend, q, k, v)
            except Unavailable as refusal:
                refusals.append(str(refusal))
            else:
                break
        else:
            raise Unavailable("; ".join(refusals))
        while len(_known) >= KEPT:
            del _known[next(iter(_known))]
        _known[key] = backend
    return _known[key]


def _dense_operator(layout, q, k, v, scale):
    out, lse = _dense(q, k, v, scale)
    # The memory that the fake promises.
    return qkv.empty(q, q.shape[2]).copy_(out), lse.contiguous()


def _fake_dense(layout, q, k, v, scale):
    return qkv.empty(q, q.shape[2]), q.new_empty(q.shape[:3], dtype=torch.float32)


operators.define("dense", "Tensor q, Tensor k, Tensor v, float scale", "(Tensor, Tensor)", _dense_operator, _fake_dense)
