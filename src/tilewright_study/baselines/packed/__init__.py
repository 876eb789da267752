"""What attention of packed batches is measured against (stage T5).

Contract of a member module: ``prepare(packing, heads, head_dim, dtype) -> Ready``: attention of this batch, ready to be
timed where the packing lies. What a network does once a batch, such as masks and the host's knowledge of lengths, is
done by then; the first call may compile. Raises `Unavailable`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tilewright.core import registry
from tilewright.torch_attention import need_gpu

NAMES = ("sdpa_mask", "sdpa_flash", "flash_varlen", "flash3_varlen", "torch_varlen", "nested", "flex")


@dataclass(frozen=True)
class Ready:
    """A prepared baseline: ``get(call(*put(q, k, v)))`` is the attention of packed tokens [capacity, H, D], of as many
    rows as are kept. `call` alone is timed: a network that runs the baseline keeps its tokens as it wants them.

    exact: whether it computes this batch's attention; otherwise it works through padding too and is a bound.
    """

    call: Callable
    put: Callable
    get: Callable
    exact: bool = True


def prepare(name, packing, heads, head_dim, dtype):
    """`Ready` of the member `name`. Raises `UnknownNameError`, and `Unavailable` with the reason."""
    return registry.member(__name__, "ragged baseline", name, NAMES).prepare(packing, heads, head_dim, dtype)


def lengths(packing):
    """Tokens of each image, on the host. Raises `PatternError` for a batch that does not fit."""
    packing.check()
    return packing.starts.diff().tolist()


def rows(packing):
    """``(put, get)`` for baselines that take the kept rows as they are."""
    kept = sum(lengths(packing))
    return lambda *qkv: [x[:kept] for x in qkv], lambda out: out


def need_flash(packing, heads, head_dim, dtype):
    """Raise `Unavailable` unless torch's FlashAttention takes tokens of this kind where the packing lies."""
    import torch

    from tilewright.torch_attention import kernels

    device = packing.lists.device
    need_gpu(device.type)
    kernels.need("flash", *(torch.empty(1, heads, 1, head_dim, dtype=dtype, device=device) for _ in range(3)))


def padded(packing):
    """``(put, get, own)``: tokens padded to the longest image, [B, H, L, D]; own: bool [B, L], those that are."""
    import torch

    counts = packing.starts.diff()
    column = torch.arange(max(lengths(packing)), device=counts.device)
    own = column < counts[:, None]
    at = packing.starts[:-1, None] + torch.minimum(column, counts[:, None] - 1)
    return lambda *qkv: [x[at].transpose(1, 2) for x in qkv], lambda out: out.transpose(1, 2)[own], own
