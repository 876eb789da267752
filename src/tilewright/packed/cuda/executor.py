"""Executor of packed batches on an NVIDIA GPU (stage T5): launches of `kernels`.

The contract is that of `packed.lists`.
"""

import math
from functools import lru_cache, partial

import torch
import triton
from torch import Tensor

from tilewright.attention.cuda import config
from tilewright.core.errors import PatternError
from tilewright.devices.cuda.launcher import KEYS, CachedLaunch, wide
from tilewright.packed.cuda import backward_kernels, kernels
from tilewright.packed.lists import (
    PackedOffsets,
    check_keep,
    check_packed,
    check_qkv,
    check_result,
    check_rows,
    check_tensors,
)

# Most images whose tokens the kernel that describes the batch gathers: each of its programs counts the batch itself.
# Measured on an H200, docs/trials/tile-kernel.md.
FUSED = 32
# Rows of a program of the backward, at most.
BACKWARD_ROWS = 64
# Values that a program counts at once; programs that gather tokens, a few for each multiprocessor of a large GPU; rows
# and columns that one moves at once.
COUNTED, GATHERING, ROWS, COLUMNS = 8192, 528, 16, 256


class Executor:
    """The kernels for a `packed.lists.PackedOffsets` on a device: methods as in `packed.lists`.

    attention_config: the `config.KernelConfig` of attention; None: `config.for_packed`. The first call with tensors of
    some shapes and strides, on each stream, goes through Triton, which compiles.
    """

    def __init__(
        self, offsets: PackedOffsets, device: torch.device, attention_config: config.KernelConfig | None = None
    ):
        """Compile nothing yet. Raises `PatternError` for a batch whose lists are too long for their own numbers."""
        if offsets.size >= 2**31:
            raise PatternError(f"lists: expected fewer than 2**31 values, found {offsets.size} of {offsets}")
        self.offsets, self._device, self._attention_config = offsets, device, attention_config
        self._lists = CachedLaunch(self._launch_lists, device)
        self._pack = CachedLaunch(self._launch_pack, device)
        self._gather_packed = CachedLaunch(self._launch_gather_packed, device)
        # By section of the lists.
        self._rows = {
            section: CachedLaunch(partial(self._launch_rows, section), device)
            for section in ("source", "position", "starts")
        }
        # By length, those used last.
        self._pad = lru_cache(KEYS)(lambda length: CachedLaunch(partial(self._launch_pad, length), device))
        self.attend = CachedLaunch(self._launch_attend, device)
        self.attend_into = CachedLaunch(self._launch_attend_into, device)
        self._of_queries = CachedLaunch(self._launch_of_queries, device)
        self._of_keys = CachedLaunch(self._launch_of_keys, device)

    def lists(self, keep: Tensor) -> Tensor:
        """See `packed.lists`."""
        return self._lists(keep, keep.sum(1, dtype=torch.int32)) if self.offsets.images > FUSED else self._lists(keep)

    def pack(self, keep: Tensor, tokens: Tensor, origin: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `packed.lists`."""
        if self.offsets.images > FUSED:
            lists = self.lists(keep)
            if origin is None:
                return lists, self.gather(lists, tokens)
            return lists, self._gather_packed(lists, tokens, origin)
        packed = tokens.new_empty(self.offsets.capacity, tokens.shape[-1])
        return self._pack(keep, tokens, packed, *(() if origin is None else (origin,))), packed

    def gather(self, lists: Tensor, x: Tensor) -> Tensor:
        """See `packed.lists`."""
        return self._rows["source"](lists, x)

    def scatter(self, lists: Tensor, x: Tensor, fill: Tensor | None = None) -> Tensor:
        """See `packed.lists`."""
        return self._rows["position"](lists, x) if fill is None else self._rows["position"](lists, x, fill)

    def first(self, lists: Tensor, x: Tensor) -> Tensor:
        """See `packed.lists`."""
        return self._rows["starts"](lists, x)

    def pad(self, lists: Tensor, x: Tensor, length: int) -> Tensor:
        """See `packed.lists`."""
        return self._pad(length)(lists, x)

    def attend_backward(
        self, lists: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `packed.lists`: two launches, and two floats for each row and head."""
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        stats = self._of_queries(q.new_empty(2, *q.shape[1::-1], dtype=torch.float32), lists, q, k, v, out, grad, dq)
        self._of_keys(stats, lists, q, k, v, grad, dk, dv)
        return dq, dk, dv

    # What a `CachedLaunch` starts: each returns the result, the compiled kernel, its grid and what follows the tensors.

    def _launch_lists(self, keep, lengths=None):
        offsets = self.offsets
        check_keep(keep)
        lists = keep.new_empty(offsets.size, dtype=torch.int32)
        most_items, most_tokens, counted = self._counting()
        if lengths is not None:
            counted = min(triton.next_power_of_2(offsets.images), COUNTED // 8)
        arguments = (*self._sizes(), offsets.rows, most_items, most_tokens, counted, ROWS)
        grid = offsets.images
        kernel = kernels.tilewright_pack_lists
        compiled = kernel[(grid,)](lists, keep.view(torch.uint8), lengths, *arguments)
        return lists, compiled, grid, arguments if lengths is not None else (None, *arguments)

    def _launch_pack(self, keep, tokens, packed, origin=None):
        offsets = self.offsets
        check_keep(keep)
        if origin is None:
            check_rows(offsets, "source", tokens)
        else:
            check_packed(tokens)
        check_tensors(keep.device, tokens=tokens)
        _side_by_side(tokens=tokens)
        lists, width = keep.new_empty(offsets.size, dtype=torch.int32), tokens.shape[-1]
        # Powers of two, so that kernels are not compiled for each number of images.
        spread = triton.next_power_of_2(triton.cdiv(GATHERING, offsets.images))
        chunks = min(spread, triton.cdiv(offsets.tokens, ROWS)) if width else 1
        columns = min(COLUMNS, triton.next_power_of_2(max(1, width)))
        sizes = (*_strides(tokens), *self._sizes(), width, offsets.rows)
        arguments = (*sizes, *self._counting(), ROWS, columns, chunks)
        grid = offsets.images * chunks
        kernel = kernels.tilewright_pack
        compiled = kernel[(grid,)](lists, keep.view(torch.uint8), tokens, packed, origin, *arguments)
        return lists, compiled, grid, arguments if origin is not None else (None, *arguments)

    def _sizes(self):
        """Sizes of the batch and offsets of its lists, as the kernels take them."""
        offsets = self.offsets
        return offsets.images, offsets.tokens, offsets.capacity, offsets.source, offsets.position, offsets.work

    def _counting(self):
        """Powers of two: bounds of the work items and tokens of an image, and images that are counted at once."""
        most_tokens = triton.next_power_of_2(self.offsets.tokens)
        most_items = triton.next_power_of_2(triton.cdiv(self.offsets.tokens, self.offsets.rows))
        return most_items, most_tokens, max(1, COUNTED // most_tokens)

    def _launch_rows(self, section, lists, x, fill=None):
        offsets, width = self.offsets, x.shape[-1]
        check_rows(offsets, section, x, fill)
        check_tensors(lists.device, tokens=x)
        _side_by_side(**{"tokens": x} if fill is None else {"tokens": x, "fill": fill})
        first, count = offsets.section(section)
        out = x.new_empty(offsets.rows_into(section, width))
        fill_strides = (0, 0) if fill is None else fill.stride()[:2]
        stride_b, stride_n, n_x = _strides(x)
        grid, blocks = _grid(count, width)
        arguments = (stride_b, stride_n, *fill_strides, first, count, n_x, offsets.tokens, width, *blocks)
        compiled = kernels.tilewright_gather_rows[(grid,)](out, lists, x, fill, *arguments)
        return out, compiled, grid, arguments if fill is not None else (None, *arguments)

    def _launch_gather_packed(self, lists, x, origin):
        offsets, width = self.offsets, x.shape[-1]
        check_packed(x)
        check_tensors(lists.device, tokens=x)
        _side_by_side(tokens=x)
        first, count = offsets.section("source")
        out = x.new_empty(offsets.rows_into("source", width))
        grid, blocks = _grid(count, width)
        arguments = (x.stride(0), first, count, len(x), offsets.tokens, width, *blocks)
        compiled = kernels.tilewright_gather_packed_rows[(grid,)](out, lists, x, origin, *arguments)
        return out, compiled, grid, arguments

    def _launch_pad(self, length, lists, x):
        check_rows(self.offsets, "starts", x)
        check_tensors(lists.device, tokens=x)
        _side_by_side(tokens=x)
        rows, width = self.offsets.images * length, x.shape[-1]
        out = x.new_empty(self.offsets.images, length, width)
        grid, blocks = _grid(rows, width)
        arguments = (x.stride(0), length, rows, width, *blocks)
        return out, kernels.tilewright_pad_rows[(grid,)](out, lists, x, *arguments), grid, arguments

    def _launch_attend(self, lists, q, k, v):
        return self._launch_attend_into(q.new_empty(q.shape), lists, q, k, v)

    def _launch_attend_into(self, out, lists, q, k, v):
        offsets = self.offsets
        check_qkv(offsets, q, k, v, out)
        check_tensors(lists.device, q=q)
        _side_by_side(q=q, k=k, v=v)
        heads, head_dim = q.shape[1:]
        config.check_head_dim(head_dim)
        chosen = self._attention_config or config.for_packed(offsets.rows, head_dim, q.dtype)
        scale_log2 = head_dim**-0.5 * math.log2(math.e)
        strides = (stride for x in (q, k, v) for stride in x.stride()[:2])
        trim = min(chosen.trim, chosen.step_keys)
        widths = (chosen.step_keys // trim).bit_length()
        is_wide = any(wide(offsets.tokens, x.stride(0)) for x in (q, k, v, out))
        dims = head_dim, *config.HEAD_DIMS[head_dim]
        constants = (heads, offsets.rows, chosen.step_keys, trim, widths, *dims, chosen.num_stages, is_wide)
        arguments = (*strides, offsets.work, scale_log2, *constants)
        grid = offsets.items * heads
        compiled = kernels.tilewright_packed_attention[(grid,)](
            out, lists, q, k, v, *arguments, num_warps=chosen.num_warps, maxnreg=chosen.maxnreg
        )
        return out, compiled, grid, arguments

    def _launch_of_queries(self, stats, lists, q, k, v, out, grad, dq):
        check_qkv(self.offsets, q, k, v, dq)
        for name, x in (("out", out), ("grad", grad)):
            check_result(q, **{name: x})
        check_tensors(lists.device, q=q)
        _side_by_side(q=q, k=k, v=v, out=out, grad=grad)
        strided, kernel = (q, k, v, out, grad), backward_kernels.tilewright_packed_query_gradients
        return self._launch_gradients(kernel, strided, (stats, lists, *strided, dq))

    def _launch_of_keys(self, stats, lists, q, k, v, grad, dk, dv):
        strided, kernel = (q, k, v, grad), backward_kernels.tilewright_packed_key_gradients
        return self._launch_gradients(kernel, strided, (stats, lists, *strided, dk, dv))

    def _launch_gradients(self, kernel, strided, tensors):
        """Launch a kernel of the backward on `tensors`, `strided` among them."""
        offsets, (heads, head_dim) = self.offsets, strided[0].shape[1:]
        config.check_head_dim(head_dim)
        block = min(offsets.rows, BACKWARD_ROWS)
        form = config.for_backward(block, head_dim, strided[0].dtype)
        is_wide = any(wide(offsets.tokens, x.stride(0)) for x in strided)
        strides = (stride for x in strided for stride in x.stride()[:2])
        scale = head_dim**-0.5
        dims = head_dim, *config.HEAD_DIMS[head_dim]
        constants = (heads, offsets.rows, block, form.step_keys, *dims, form.num_stages, is_wide)
        arguments = (*strides, offsets.work, offsets.capacity, scale * math.log2(math.e), scale, *constants)
        grid = offsets.items * (offsets.rows // block) * heads
        compiled = kernel[(grid,)](*tensors, *arguments, num_warps=form.num_warps, maxnreg=form.maxnreg)
        return tensors[0], compiled, grid, arguments


def _grid(rows, width):
    """``(programs, (rows, columns) of each)`` that move `rows` rows of `width` values."""
    columns = min(COLUMNS, triton.next_power_of_2(width))
    return triton.cdiv(rows, ROWS) * triton.cdiv(width, columns), (ROWS, columns)


def _strides(x):
    """``(from image to image, from row to row, rows of an image)`` of tokens; packed ones are those of one image."""
    return (*x.stride()[:2], x.shape[1]) if x.ndim == 3 else (0, x.stride(0), len(x))


def _side_by_side(**tensors):
    """Raise `PatternError` unless the last dimension of each tensor is contiguous."""
    for name, x in tensors.items():
        if x.stride(-1) != 1:
            raise PatternError(
                f"{name}: expected stride 1 in the last dimension, found {x.stride(-1)}; pass {name}.contiguous()"
            )
