"""Attention by slice lists, dense attention with its log-sum-exps, and what follows from both."""

from typing import Any

import torch
from torch import Tensor

from tilewright.core import _internals, arguments
from tilewright.core.caches import Recent
from tilewright.core.errors import PatternError, Unavailable
from tilewright.core.operators import records, watched
from tilewright.core.transforms import transformed
from tilewright.devices import qkv
from tilewright.slices import operators
from tilewright.slices.layout import FEWEST_ROWS, MOST_ROWS, OVERFLOW, SliceLists, check_lengths, check_tokens
from tilewright.slices.lists import from_mask
from tilewright.torch_attention import kernels

# Dense kernels of a GPU, the fastest first: cuDNN's is 1.75 times as fast as FlashAttention-2 on an H200.
HOPPER, OLDER = ("cudnn", "flash", "efficient"), ("flash", "cudnn", "efficient")
# Backends by the tensors that they take: asking torch takes the host a hundred times as long as a call.
_known = Recent(256)

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
    bound: float | None = None,
) -> Any:
    """Softmax attention of each query over the listed keys of its group.

    Parameters
    ----------
    q, k, v : Tensor
        [B, H, N_q, D], and k and v [B, H, N_k, D]: float32, float16 or bfloat16, D of 64 or 128, strided views with
        the values of a head side by side. Queries of text, see `Layout`, attend to all keys by `dense`.
    lists : SliceLists
        Of `predict`, `from_mask`, `from_mask_mod` or `from_indices`.
    scale : float, optional
        Of the scores; the default is ``D ** -0.5``.
    lse : bool
        Return the natural log-sum-exps as well.
    out : Tensor, optional
        Memory for the result that no input uses, strided likewise.
    bound : float, optional
        What no score times `scale` exceeds, as is known where q and k are normed. A GPU then needs no maximum of the
        scores, but for float16 and for queries of text; a CPU does not use it. Results are wrong where scores exceed it
        by 80 or stay below it by as much.

    Returns
    -------
    Tensor, or (Tensor, Tensor)
        [B, H, N_q, D], and with `lse` float32 [B, H, N_q]. Groups without keys give zeros and -inf. Where a list did
        not fit all is NaN, and `SliceLists.check` says which.

    Raises
    ------
    PatternError, DeviceError
        For tensors that the lists are not for.

    Notes
    -----
    On a GPU the call does not wait, and may be captured in a CUDA graph. q, k and v have gradients of first order, for
    which the lists are constants. On a GPU those of k and v are sums in any order: two calls may differ in rounding.
    """
    check_kinds(lists, q=q, k=k, v=v, out=out)
    arguments.flag("lse", lse)
    scale = _scale(q, scale)
    bound = None if bound is None else arguments.number("bound", bound, error=PatternError)
    by = _joint if lists.layout.text else _grouped
    made, sums = by(q, k, v, lists, scale, lse, out, bound)
    return (made, sums) if lse else made


def _grouped(q, k, v, lists, scale, lse, out, bound=None):
    """`attend` where all queries are in groups; log-sum-exps are None unless `lse`."""
    recorded = _recorded(q, k, v)
    if watched(q) or recorded:
        # The backward needs log-sum-exps.
        name = "slices_attend_lse" if lse or recorded else "slices_attend"
        made = getattr(torch.ops.tilewright, name)(*lists.tensors, q, k, v, scale, bound, [*lists.layout])
        made, sums = made if lse or recorded else (made, None)
        made = made if out is None else out.copy_(made)
    else:
        run = operators.executor(lists.layout, q.device).attend
        made, sums = run(lists.tensors, q, k, v, scale=scale, out=out, with_lse=lse, bound=bound)
    return made, sums


def _joint(q, k, v, lists, scale, lse, out, bound):
    """`_grouped` where some queries are text."""
    layout = lists.layout
    for name, x in (("q", q), ("out", q if out is None else out)):
        if x.ndim != 4 or x.shape[2] != layout.tokens:
            shape = f"({layout.batch}, {layout.heads}, {layout.tokens}, D)"
            raise PatternError(f"{name}: expected shape {shape} as the lists are laid out, found {tuple(x.shape)}")
    # Nothing is right where a list did not fit.
    spoiled = lists.state[OVERFLOW] > 0

    def of_text(taken: slice) -> list[Tensor]:
        found = dense(q[:, :, taken], k, v, scale=scale, lengths=lists.lengths)
        return [x.masked_fill(spoiled, torch.nan) for x in found]

    if _recorded(q, k, v):
        # Gradients pass no memory that is written to.
        parts = [(layout.grouped.start, _grouped(q[:, :, layout.grouped], k, v, lists, scale, True, None, bound))]
        parts += [(taken.start, of_text(taken)) for taken in layout.text]
        joined = [torch.cat(x, 2) for x in zip(*(part for _, part in sorted(parts, key=_start)), strict=True)]
        return joined[0] if out is None else out.copy_(joined[0]), joined[1]
    made = qkv.empty(q, layout.tokens) if out is None else out
    sums = q.new_empty(q.shape[:3], dtype=torch.float32) if lse else None
    _, own = _grouped(q[:, :, layout.grouped], k, v, lists, scale, lse, made[:, :, layout.grouped], bound)
    if sums is not None:
        sums[:, :, layout.grouped] = own
    for taken in layout.text:
        made[:, :, taken], own = of_text(taken)
        if sums is not None:
            sums[:, :, taken] = own
    return made, sums


def _start(part):
    return part[0]


def _recorded(q, k, v):
    """Whether gradients are recorded, or may be."""
    return records(q, k, v) or transformed()


def merge(*parts: Part) -> Part:
    """Attention over the union of disjoint sets of keys, from attention over each.

    Parameters
    ----------
    *parts : (Tensor, Tensor)
        Attention [B, H, N_q, D] and log-sum-exps, float32 [B, H, N_q], as `attend` returns them.

    Returns
    -------
    (Tensor, Tensor)
        Attention and log-sum-exps over all keys. Computed in float32; the result has the type of the first part.

    Raises
    ------
    PatternError
        For parts of different shapes, and for none.
    """
    for part in parts:
        if not isinstance(part, tuple) or len(part) != 2 or not all(isinstance(x, Tensor) for x in part):
            raise PatternError(f"parts: expected pairs of attention and log-sum-exps, found {arguments.shown(part)}")
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


def dense(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, lengths: Tensor | None = None) -> Part:
    """Attention over all keys, with log-sum-exps, by the fastest operator of torch that returns both.

    Parameters
    ----------
    q, k, v : Tensor
        [B, H, N_q, D], and k and v [B, H, N_k, D], as `attend` takes them.
    scale : float, optional
        Factor of the scores; the default is ``D ** -0.5``.
    lengths : Tensor, optional
        int [B], from 1 to N_k: keys of each batch entry, from the first one on. None for all keys.

    Returns
    -------
    (Tensor, Tensor)
        Attention [B, H, N_q, D] and natural log-sum-exps float32 [B, H, N_q].

    Raises
    ------
    PatternError, DeviceError
        For tensors that `attend` refuses.

    Notes
    -----
    On a GPU of compute capability 9.0 or later this is cuDNN's kernel, on others FlashAttention-2, and the
    memory-efficient kernel for tensors that these refuse and for `lengths`. On a CPU it is torch's flash operator.
    Where gradients are recorded it is `attend` by lists of all keys.

    Examples
    --------
    >>> import torch
    >>> from tilewright import slices
    >>> q = torch.randn(1, 2, 128, 64)
    >>> out, lse = slices.dense(q, q, q)
    >>> out.shape, lse.shape
    (torch.Size([1, 2, 128, 64]), torch.Size([1, 2, 128]))
    """
    check_tensors(q=q, k=k, v=v)
    scale = _scale(q, scale)
    if lengths is not None:
        lengths = check_lengths(lengths, q)
    if _recorded(q, k, v):
        check_tokens(q=q, k=k, v=v)
        return _grouped(q, k, v, _all_keys(q, k.shape[2], lengths), scale, True, None)
    if watched(q):
        return torch.ops.tilewright.slices_dense(q, k, v, lengths, scale, [])
    return _dense(q, k, v, lengths, scale)


def recall(q: Tensor, k: Tensor, lists: SliceLists, *, scale: float | None = None, lse: Tensor | None = None) -> Tensor:
    """The share of each query's attention that its listed keys have, exact, without an N×N array.

    Parameters
    ----------
    q, k : Tensor
        [B, H, N_q, D] and [B, H, N_k, D].
    lists : SliceLists
        Lists that did not fit give NaN.
    scale : float, optional
        Of the scores; the default is ``D ** -0.5``.
    lse : Tensor, optional
        Log-sum-exps of dense attention, float32 [B, H, N_q]. None computes them.

    Returns
    -------
    Tensor
        Float32 [B, H, N_q], from 0 to 1, without a gradient.
    """
    check_kinds(lists, q=q, k=k, lse=lse)
    q, k = q.detach(), k.detach()
    _, listed = attend(q, k, k, lists, scale=scale, lse=True)
    if lse is None:
        _, lse = dense(q, k, k, scale=scale, lengths=lists.lengths)
    if lse.shape != listed.shape:
        raise PatternError(f"lse: expected shape {tuple(listed.shape)}, found {tuple(lse.shape)}")
    return (listed - lse).exp().clamp(max=1)


def _scale(q, scale):
    if scale is None:
        return max((1, *q.shape[-1:])) ** -0.5
    return check_scale(scale)


def check_scale(scale: float) -> float:
    """A scale of scores. Raises `PatternError` unless it is a number greater than 0."""
    found = arguments.real(scale)
    if found is None or found <= 0:
        raise PatternError(f"scale: expected a number greater than 0, found {arguments.shown(scale)}")
    return found


def check_kinds(lists: Any, **tensors: Any) -> None:
    """Raise `PatternError` for what are no lists, or no tensors. None stands for what is not given."""
    if not isinstance(lists, SliceLists):
        raise PatternError(f"lists: expected SliceLists, found {arguments.shown(lists)}")
    check_tensors(**tensors)


def check_tensors(**tensors: Any) -> None:
    """Raise `PatternError` for what is no tensor; None may stand for an ``out`` or ``lse`` that is not given."""
    for name, x in tensors.items():
        if x is None and name in ("out", "lse"):
            continue
        if not isinstance(x, Tensor) or x.ndim < 3 or x.is_nested:
            raise PatternError(f"{name}: expected a tensor of shape (B, H, N, D), found {arguments.shown(x)}")


def _all_keys(q, n_keys, lengths):
    """Lists of all keys, or of the first `lengths` of each batch entry."""
    batch, heads, queries, _ = q.shape
    rows = max(FEWEST_ROWS, min(MOST_ROWS, 1 << (queries - 1).bit_length()))
    mask = torch.arange(n_keys, device=q.device).view(1, 1, 1, -1)
    mask = mask >= 0 if lengths is None else mask < lengths.view(-1, 1, 1, 1)
    mask = mask.expand(-1, -1, -(-queries // rows), -1)
    return from_mask(mask, queries, batch=batch, heads=heads, rows=rows)


def _dense(q, k, v, lengths, scale):
    check_tokens(q=q, k=k, v=v)
    bias = None
    if lengths is not None:
        bias = left_out(lengths, k.shape[2], q.dtype)[:, None, None, : k.shape[2]].expand(*q.shape[:3], -1)
    return biased(q, k, v, bias, scale)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Part:
    """`dense` with a `bias` [B, H, N_q, N_k] of q's type that is added to the scores, or None. Checks nothing."""
    if not q.is_cuda:
        return _internals.attention_with_lse(q, k, v, attn_mask=bias, scale=scale)
    backend = _backend(q, k, v) if bias is None else "efficient"
    out, lse = kernels.attend(backend, q, k, v, with_lse=True, scale=scale, bias=bias)
    return out, lse[..., 0]


def left_out(lengths: Tensor, n_keys: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of batch entries with so many keys, [B, n_keys or some more]: -inf from these on."""
    # The memory-efficient kernel reads rows that begin at multiples of 16 values.
    key = torch.arange(-(-n_keys // 16) * 16, device=lengths.device)
    none = torch.zeros(len(lengths), len(key), dtype=dtype, device=lengths.device)
    return none.masked_fill_(key >= lengths[:, None], -torch.inf)


def _backend(q, k, v):
    """The fastest of torch's kernels that takes such tensors."""
    key = q.device, q.dtype, *((x.shape, x.stride()) for x in (q, k, v))
    if found := _known.get(key):
        return found[-1]
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
    _known.add(key, backend)
    return backend


def _dense_operator(layout, q, k, v, lengths, scale):
    out, lse = _dense(q, k, v, lengths, scale)
    # The memory that the fake promises.
    return qkv.empty(q, q.shape[2]).copy_(out), lse.contiguous()


def _fake_dense(layout, q, k, v, lengths, scale):
    return qkv.empty(q, q.shape[2]), q.new_empty(q.shape[:3], dtype=torch.float32)


_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor? lengths, float scale"
operators.define("dense", _ARGUMENTS, "(Tensor, Tensor)", _dense_operator, _fake_dense)
