"""Executor of slice lists on an NVIDIA GPU (stage T5): launches of `kernels`.

The contract is that of `slices.backends`.
"""

import math
from functools import lru_cache, partial

import torch
import triton

from tilewright.devices import qkv
from tilewright.devices.cuda.launcher import ALIGNED, KEYS, CachedLaunch, wide
from tilewright.slices import layout as layouts
from tilewright.slices.cuda import forms, gradient_kernel, kernels

# Keys that a program flags or packs at once; groups that it ranks at once, and others that it compares them with.
FLAGGED, RANKED, COMPARED = 1024, 32, 64
LOG2E = math.log2(math.e)


class Executor:
    """The kernels for a `slices.layout.Layout` on a device: methods as in `slices.backends`.

    attention_config: the `SliceConfig` of attention; None: `forms.of_attention`. The first call with tensors of some
    shapes and strides, on each stream, goes through Triton, which compiles.
    """

    def __init__(self, layout: layouts.Layout, device: torch.device, attention_config: forms.SliceConfig | None = None):
        """Compile nothing yet."""
        self.layout, self._device, self._attention_config = layout, device, attention_config
        self._from_mask = CachedLaunch(partial(self._launch_list, False), device)
        self._unpack = CachedLaunch(partial(self._launch_list, True), device)
        self._rank = CachedLaunch(self._launch_rank, device)
        self._pack = CachedLaunch(self._launch_pack, device)
        # By scale, bound and whether memory for the result is given.
        self._attend = lru_cache(KEYS)(lambda *stated: CachedLaunch(partial(self._launch_attend, *stated), device))
        self._backward = lru_cache(KEYS)(lambda scale: CachedLaunch(partial(self._launch_backward, scale), device))

    def from_mask(self, mask: torch.Tensor) -> layouts.Lists:
        """See `slices.backends`."""
        counts = mask.new_empty(self._groups, dtype=torch.int32)
        keys = self._from_mask(counts, mask)
        return keys, counts, *self.rank(counts)

    def unpack(self, bits: torch.Tensor) -> layouts.Lists:
        """See `slices.backends`."""
        counts = bits.new_empty(self._groups)
        keys = self._unpack(counts, bits)
        return keys, counts, *self.rank(counts)

    def rank(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `slices.backends`."""
        state = counts.new_empty(layouts.STATE)
        return self._rank(state, counts), state

    def pack(self, keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """See `slices.backends`."""
        bits = keys.new_zeros(*self._groups, self.layout.words + 1)
        return self._pack(bits, keys, counts)

    def attend(
        self,
        lists: layouts.Lists,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor | None = None,
        with_lse: bool = False,
        bound: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `slices.backends`."""
        # In float16 weights far below the bound are none.
        run = self._attend(scale, None if q.dtype == torch.float16 else bound, out is not None)
        given = () if out is None else (out,)
        if not with_lse:
            return run(*given, *lists, q, k, v), None
        lse = q.new_empty(*self._groups[:2], self.layout.queries, dtype=torch.float32)
        return run(*given, *lists, q, k, v, lse), lse

    def backward(
        self,
        lists: layouts.Lists,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad: torch.Tensor,
        *,
        scale: float,
        lse_grad: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `slices.backends`."""
        # Sums of programs in any order are in float32. They are NaN from the start where a list did not fit.
        start = torch.where(lists[3][layouts.OVERFLOW] > 0, torch.nan, 0.0)
        dk, dv = (qkv.empty(x, x.shape[2], torch.float32).copy_(start) for x in (k, v))
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        more = () if lse_grad is None else (lse_grad.contiguous(),)
        dq = self._backward(scale)(dk, dv, *lists, q, k, v, out, grad, lse.contiguous(), *more)
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    @property
    def _groups(self):
        return self.layout.batch, self.layout.heads, self.layout.groups

    # What a `CachedLaunch` starts: each returns the result, the compiled kernel, its grid and what follows the tensors.

    def _launch_list(self, bits, counts, flags):
        layout = self.layout
        keys = counts.new_empty(*self._groups, layout.capacity)
        # A batch entry or head of one stands for all.
        strides = [0 if n == 1 else stride for n, stride in zip(flags.shape[:3], flags.stride()[:3], strict=True)]
        sizes = layout.heads, layout.groups, layout.keys, layout.words, layout.capacity
        arguments = (*strides, *sizes, bits, FLAGGED)
        grid = math.prod(self._groups)
        # As bytes: tensors of bool are flags of 0 and 1.
        given = flags if bits else flags.view(torch.uint8)
        compiled = kernels.tilewright_list_keys[(grid,)](keys, counts, given, *arguments)
        return keys, compiled, grid, arguments

    def _launch_rank(self, state, counts):
        layout = self.layout
        heads = layout.batch * layout.heads
        order = torch.empty_like(counts)
        arguments = (heads, layout.groups, layout.capacity, RANKED, COMPARED)
        grid = heads * triton.cdiv(layout.groups, RANKED) + 1
        compiled = kernels.tilewright_rank_groups[(grid,)](order, state, counts, *arguments)
        return order, compiled, grid, arguments

    def _launch_pack(self, bits, keys, counts):
        arguments = (self.layout.words, self.layout.capacity, FLAGGED)
        grid = math.prod(self._groups)
        compiled = kernels.tilewright_pack_keys[(grid,)](bits, keys, counts, *arguments)
        return bits, compiled, grid, arguments

    def _launch_attend(self, scale, bound, given, *tensors):
        layout = self.layout
        out, tensors = (tensors[0], tensors[1:]) if given else (None, tensors)
        *lists, q, k, v = tensors[:7]
        # Memory for the log-sum-exps, where they are asked for, is the executor's own.
        lse = tensors[7:]
        inputs = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
        layouts.check_inputs(layout, *lists, **inputs)
        if out is None:
            out = qkv.empty(q, layout.queries)
        head_dim = q.shape[-1]
        capability, shared_bytes = forms.device_facts(self._device)
        chosen = self._attention_config or forms.of_attention(layout.rows, head_dim, q.dtype, capability, shared_bytes)
        if chosen.by_warps and not all(x.data_ptr() % ALIGNED == 0 and _even(x) for x in (q, k, v)):
            # Its copies of 16 bytes need that the compiler knows of their alignment.
            chosen = forms.plain(layout.rows, head_dim, q.dtype, shared_bytes)
        strides = (stride for x in (q, k, v, out) for stride in x.stride()[:3])
        is_wide = any(wide(x.shape[2], x.stride(2)) for x in (q, k, v, out))
        sizes = layout.queries, layout.groups, layout.capacity, scale * LOG2E, (bound or 0.0) * LOG2E
        constants = (layout.heads, layout.rows, chosen.step_keys, layout.width, head_dim, chosen.num_stages)
        if chosen.by_warps:
            from tilewright.slices.cuda import warp_kernel

            kernel = warp_kernel.tilewright_slice_attention_by_warps
            own: tuple = ()
            num_warps = warp_kernel.NUM_WARPS
        else:
            kernel, own, num_warps = kernels.tilewright_slice_attention, (chosen.ahead,), chosen.num_warps
        arguments = (*(() if lse else (None,)), *strides, *sizes, *constants, bound is not None, is_wide, *own)
        grid = math.prod(self._groups)
        compiled = kernel[(grid,)](out, *lists, q, k, v, *lse, *arguments, num_warps=num_warps)
        return out, compiled, grid, arguments

    def _launch_backward(self, scale, dk, dv, *tensors):
        layout = self.layout
        *lists, q, k, v, out, grad, _ = tensors[:10]
        layouts.check_inputs(layout, *lists, q=q, k=k, v=v)
        dq, head_dim = qkv.empty(q, layout.queries), q.shape[-1]
        chosen = forms.of_gradients(layout.rows, head_dim, q.dtype, forms.device_facts(self._device)[1])
        strided = q, k, v, out, grad, dq
        strides = (stride for x in strided for stride in x.stride()[:3])
        sizes = layout.queries, layout.keys, layout.groups, layout.capacity, scale * LOG2E, scale
        constants = (layout.heads, layout.rows, chosen.step_keys, layout.width, head_dim, chosen.num_stages)
        is_wide = any(wide(x.shape[2], x.stride(2)) for x in strided)
        arguments = (*(() if len(tensors) > 10 else (None,)), *strides, *sizes, *constants, is_wide)
        grid = math.prod(self._groups)
        compiled = gradient_kernel.tilewright_slice_gradients[(grid,)](
            dq, dk, dv, *tensors, *arguments, num_warps=chosen.num_warps
        )
        return dq, compiled, grid, arguments


def _even(x):
    """Whether strides of tokens, heads and batch entries are multiples of 16, as the compiler knows them."""
    return all(stride % 16 == 0 for stride in x.stride()[:3])
