"""Executor of packed batches on an NVIDIA GPU (stage T5): launches of `triton_ragged_kernels`.

The contract is that of `ragged_lists`.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from tilewright.core.errors import PatternError
from tilewright.targets import packed_lists
from tilewright.targets.cuda import executor, packed_kernels
from tilewright.targets.cuda.executor import FEWEST_ROWS, HEAD_DIMS, check_head_dim
from tilewright.targets.cuda.launcher import KEYS, CachedLaunch, wide

# Most images whose tokens the kernel that describes the batch gathers: each of its programs counts the batch again.
# Measured on an H200, docs/decisions/0011.
FUSED = 32
# Values that a program counts at once; programs that gather tokens, a few for each multiprocessor of a large GPU; rows
# and columns that one brings at once.
COUNTED, GATHERING, ROWS, COLUMNS = 8192, 528, 16, 256


@dataclass(frozen=True)
class Form(executor.Form):
    """How attention is compiled. trim: what the keys of an image are rounded up to, at most step_keys."""

    trim: int = 32


def form(rows, head_dim, dtype):
    """The `Form` for so many queries a program (docs/decisions/0011).

    In 16 bits, 16 of them a warp, and registers as in `triton_schedule.form`; in float32, whose products are not those
    of the tensor cores, as few keys a step and as many warps as keep a thread's share small.
    """
    if dtype.itemsize > 2:
        step_keys = 16 if head_dim > 64 else 32
        return Form(step_keys, stages=1, warps=min(8, rows // 8), trim=step_keys)
    registers = {16: 96, 32: 96, 64: 128}.get(sum(HEAD_DIMS[head_dim])) if rows >= 64 else None
    return Form(warps=min(8, rows // FEWEST_ROWS), registers=registers)


class Executor:
    """The kernels for a `ragged_lists.Layout` on a device: methods as in `ragged_lists`.

    chosen: a `Form` of attention; None: by `form`. The first call with tensors of some shapes and strides, on each
    stream, goes through Triton, which compiles.
    """

    def __init__(self, layout, device, chosen=None):
        """Compile nothing yet. Raises `PatternError` for a batch whose lists are too long for their own numbers."""
        if layout.size >= 2**31:
            raise PatternError(f"lists: expected fewer than 2**31 values, found {layout.size} of {layout}")
        self.layout, self._device, self._chosen = layout, device, chosen
        self._lists, self._pack, self.attend, self.attend_into = (
            CachedLaunch(start, device)
            for start in (self._start_lists, self._start_pack, self._start_attend, self._start_attend_into)
        )
        self._take = {
            part: CachedLaunch(lambda *tensors, part=part: self._start_take(part, *tensors), device)
            for part in ("source", "place", "starts")
        }
        self._take_packed = CachedLaunch(self._start_take_packed, device)
        # By the places of an image, those used last.
        self._pad = lru_cache(KEYS)(
            lambda slots: CachedLaunch(lambda *tensors: self._start_pad(slots, *tensors), self._device)
        )

    def lists(self, keep):
        """See `ragged_lists`."""
        return self._lists(keep, keep.sum(1, dtype=torch.int32)) if self.layout.images > FUSED else self._lists(keep)

    def pack(self, keep, tokens, origin=None):
        """See `ragged_lists`."""
        if self.layout.images > FUSED:
            lists = self.lists(keep)
            if origin is None:
                return lists, self.take(lists, "source", tokens, None)
            return lists, self._take_packed(lists, tokens, origin)
        packed = tokens.new_empty(self.layout.capacity, tokens.shape[-1])
        return self._pack(keep, tokens, packed, *(() if origin is None else (origin,))), packed

    def take(self, lists, part, x, fill):
        """See `ragged_lists`."""
        return self._take[part](lists, x) if fill is None else self._take[part](lists, x, fill)

    def pad(self, lists, x, slots):
        """See `ragged_lists`."""
        return self._pad(slots)(lists, x)

    # What `CachedLaunch` starts: each returns the result, the compiled kernel, its grid, and what follows the tensors.

    def _start_lists(self, keep, counts=None):
        return self._start_pack(keep, counts, None)

    def _start_pack(self, keep, tokens, packed, origin=None):
        layout, width = self.layout, 0
        strides = (0, 0, 0)
        if packed is not None:
            packed_lists.check_rows(layout, "source", tokens, None, origin)
            packed_lists.check_tensors(keep.device, tokens=tokens)
            _side_by_side(tokens=tokens)
            strides, width = _strides(tokens), tokens.shape[-1]
        lists = keep.new_empty(layout.size, dtype=torch.int32)
        # Powers of two, lest each number of images be compiled for.
        spread = triton.next_power_of_2(triton.cdiv(GATHERING, layout.images))
        chunks = min(spread, triton.cdiv(layout.tokens, ROWS)) if width else 1
        n = triton.next_power_of_2(layout.tokens)
        tiles = triton.next_power_of_2(triton.cdiv(layout.tokens, layout.rows))
        told = packed is None and tokens is not None
        block = min(triton.next_power_of_2(layout.images), COUNTED // 8) if told else max(1, COUNTED // n)
        sizes = (layout.images, layout.tokens, layout.capacity, layout.source, layout.place, layout.work)
        columns = min(COLUMNS, triton.next_power_of_2(max(1, width)))
        arguments = (*strides, *sizes, width, layout.rows, tiles, n, block, ROWS, columns, chunks)
        grid = layout.images * chunks
        bits = keep.view(torch.uint8)
        compiled = packed_kernels.pack[(grid,)](lists, bits, tokens, packed, origin, *arguments)
        missing = [x for x in (tokens, packed, origin) if x is None]
        return lists, compiled, grid, (*missing, *arguments)

    def _start_take_packed(self, lists, x, origin):
        return self._start_take("source", lists, x, None, origin)

    def _start_take(self, part, lists, x, fill=None, origin=None):
        layout, other = self.layout, fill if origin is None else origin
        packed_lists.check_rows(layout, part, x, fill, origin)
        packed_lists.check_tensors(lists.device, tokens=x)
        first, count = layout.part(part)
        width = x.shape[-1]
        out = x.new_empty(layout.result(part, width))
        given = {"tokens": x} if fill is None else {"tokens": x, "fill": fill}
        _side_by_side(**given)
        fill_b, fill_n = (0, 0) if fill is None else fill.stride()[:2]
        columns = min(COLUMNS, triton.next_power_of_2(width))
        x_b, x_n, n_x = _strides(x)
        sizes = (first, count, n_x, layout.tokens, width, ROWS, columns)
        arguments = (x_b, x_n, fill_b, fill_n, *sizes, origin is not None)
        grid = triton.cdiv(count, ROWS) * triton.cdiv(width, columns)
        compiled = packed_kernels.take[(grid,)](out, lists, x, other, *arguments)
        return out, compiled, grid, arguments if other is not None else (None, *arguments)

    def _start_pad(self, slots, lists, x):
        layout = self.layout
        packed_lists.check_rows(layout, "starts", x, None)
        packed_lists.check_tensors(lists.device, tokens=x)
        _side_by_side(tokens=x)
        rows, width = layout.images * slots, x.shape[-1]
        out = x.new_empty(layout.images, slots, width)
        columns = min(COLUMNS, triton.next_power_of_2(width))
        grid = triton.cdiv(rows, ROWS) * triton.cdiv(width, columns)
        arguments = (x.stride(0), slots, rows, width, ROWS, columns)
        return out, packed_kernels.pad[(grid,)](out, lists, x, *arguments), grid, arguments

    def _start_attend(self, lists, q, k, v):
        return self._start_attend_into(q.new_empty(q.shape), lists, q, k, v)

    def _start_attend_into(self, out, lists, q, k, v):
        layout = self.layout
        packed_lists.check_qkv(layout, q, k, v, out)
        packed_lists.check_tensors(lists.device, q=q)
        _side_by_side(q=q, k=k, v=v)
        heads, head_dim = q.shape[1:]
        check_head_dim(head_dim)
        chosen = self._chosen or form(layout.rows, head_dim, q.dtype)
        scale_log2 = head_dim**-0.5 * math.log2(math.e)
        strides = (stride for x in (q, k, v) for stride in x.stride()[:2])
        trim = min(chosen.trim, chosen.step_keys)
        widths = (chosen.step_keys // trim).bit_length()
        is_wide = any(wide(layout.tokens, x.stride(0)) for x in (q, k, v, out))
        dims = head_dim, *HEAD_DIMS[head_dim]
        constants = (heads, layout.rows, chosen.step_keys, trim, widths, *dims, chosen.stages, is_wide)
        arguments = (*strides, layout.work, scale_log2, *constants)
        grid = layout.items * heads
        compiled = packed_kernels.attend[(grid,)](
            out, lists, q, k, v, *arguments, num_warps=chosen.warps, maxnreg=chosen.registers
        )
        return out, compiled, grid, arguments


def _strides(x):
    """``(from image to image, from row to row, rows of an image)`` of tokens; packed ones are those of one image."""
    return (*x.stride()[:2], x.shape[1]) if x.ndim == 3 else (0, x.stride(0), len(x))


def _side_by_side(**tensors):
    """Raise `PatternError` unless the last dimension of each tensor lies in one piece."""
    for name, x in tensors.items():
        if x.stride(-1) != 1:
            raise PatternError(f"{name}: expected the values of a row side by side, found stride {x.stride(-1)}")
