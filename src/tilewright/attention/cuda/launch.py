"""Work items of one tile as launches of one kernel: lists on the device, scratch memory, and the call (stage T5)."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tilewright.attention.cuda import tile_kernel
from tilewright.attention.cuda.config import HEAD_DIMS, KernelConfig
from tilewright.attention.cuda.tile_lists import BYTES, INTERVALS, MASKED, RANKS, Item, Part, TileLists
from tilewright.attention.setting import Setting
from tilewright.core.errors import PatternError
from tilewright.devices.cuda import launcher

# Sizes of a scale for which scores, masks and the initial maximum of a row differ in float32.
SCALES = 2.0**-20, 2.0**20
# Programs in the second dimension of a grid, at most.
MOST_ACROSS = 65535


class ItemLaunch:
    """Work items of one tile and one kernel, see the module.

    A call gives tensors in the order of `GIVEN`, then the tiles of a bias of all launches that there are, of which this
    one reads those of its `number`. The kernel takes them, and all else, by the names of its parameters.
    """

    # Of each kernel: itself, the names of its parameters, and values in a scratch row, in row widths.
    kernel: Any
    parameters: ClassVar[Sequence[str]]
    sums = 1
    # Names of the tensors that a call gives, as of the kernel's parameters without what ends them.
    GIVEN: ClassVar[tuple[str, ...]]
    # What a refusal ends with.
    remedy = ""
    number = 0

    def __init__(
        self,
        lists: TileLists,
        form: KernelConfig,
        common: Setting,
        positions: tuple[np.ndarray, np.ndarray],
        device: torch.device | str,
    ):
        """positions: int [rows], [keys] of the lists, in the tensors. form: that the lists were built for."""
        self.lists, self.form, self.common = lists, form, common
        self._sign, self._size = signed_scale(common)
        self._widths = HEAD_DIMS[common.head_dim]
        left, right, heads = masks(lists, common, device)
        rows, keys = positions
        self._held: dict[str, Tensor | None] = {
            **records(lists, device),
            "row_ptr": to_device(device, rows.astype(np.int32)),
            "key_ptr": to_device(device, keys[lists.keys].astype(np.int32)),
            "left_ptr": left,
            "right_ptr": right,
        }
        self.constants = {
            "BLOCK_M": lists.rows, "BLOCK_N": lists.step_keys, "HEAD_DIM": common.head_dim, "D0": self._widths[0],
            "D1": self._widths[1], "RANK": lists.rank, "HEADS": common.heads, "MASK_HEADS": heads, "FULL": lists.full,
            "PARTIAL": lists.partial, "SPLIT": len(lists.parts) > 0, "SIGN": self._sign,
            "ORDERED": bool((rows == np.arange(len(rows))).all()), "NUM_STAGES": form.num_stages,
            "ACROSS": 0 if common.units is None else common.units.step,
        }  # fmt: skip
        # By stream, the latest and largest last. Graphs hold the addresses of all: none is given back.
        self._stream = launcher.current_stream(left.device)
        self._scratch: dict[int, list[tuple[int, dict[str, Tensor]]]] = {}

    @property
    def what(self) -> str:
        """What a refusal names."""
        return f"{self.lists.rows} rows"

    @property
    def device(self) -> torch.device:
        """Where the lists are."""
        return self.held("item_ptr").device

    @property
    def tiled(self) -> bool:
        """Whether masks are tiles of a bias, which each call is given."""
        return self._held["right_ptr"] is None

    @property
    def memory_bytes(self) -> int:
        """Bytes of lists and masks held between calls."""
        return sum(x.nbytes for x in self._held.values() if x is not None)

    @property
    def executed(self) -> int:
        """Pairs of query and key that a head works through, padding included."""
        return self.lists.rows * self.lists.step_keys * int(self.lists.items[:, Item.STEPS].sum())

    @property
    def scale_log2(self) -> float:
        """What scores are multiplied by to base 2."""
        return self._size * math.log2(math.e)

    def held(self, name: str) -> Tensor:
        """The tensor that is held for a parameter of the kernel."""
        found = self._held[name]
        assert found is not None, name
        return found

    def scratch_bytes(self, batch: int) -> int:
        """Bytes that what split items leave takes, for each stream that calls; at most four times those of the largest
        batch where smaller ones came before."""
        return scratch_bytes(self.lists, self._lanes(batch), self.sums * sum(self._widths))

    def __call__(self, *tensors: Tensor) -> Any:
        """Launch through Triton's own launch; returns the compiled kernel.

        Raises `DeviceError` where a program does not fit the device.
        """
        pointers, scalars = self._arguments(tensors)
        grid = self._grid(tensors[0])
        with launcher.fitting(self.what, self.remedy):
            compiled = self.kernel[grid](*pointers, *scalars, num_warps=self.form.num_warps, maxnreg=self.form.maxnreg)
        launcher.taken_down(compiled, grid, pointers, scalars)
        return compiled

    def direct(self, compiled: Any, *tensors: Tensor) -> Callable | None:
        """``callable(addresses of all tensors)`` that launches `compiled` for tensors of this layout, see
        `launcher.direct`."""
        pointers, scalars = self._arguments(tensors)
        numbers = self._numbers()
        # What a call gives comes first, but for what it gives of a bias.
        leading = next((i for i, number in enumerate(numbers) if number is None), len(numbers))
        later = [(i - leading, number) for i, number in enumerate(numbers) if number is not None and i >= leading]
        taken = [number for number in numbers[:leading] if number is not None]
        following = (*(x.data_ptr() for x in pointers[leading:]), *scalars)
        arguments = () if later else following
        launch = launcher.direct(compiled, self._grid(tensors[0]), self._stream(), arguments)
        if launch is None or (not later and taken == list(range(len(tensors)))):
            return launch
        pick = itemgetter(*taken)
        if not later:
            return lambda *addresses: launch(*pick(addresses))

        def call(*addresses):
            now = list(following)
            for place, number in later:
                now[place] = addresses[number]
            launch(*pick(addresses), *now)

        return call

    def _numbers(self):
        """Of each pointer that the kernel takes, in its order, the number among a call's tensors; None for others."""
        numbers = {f"{name}_ptr": number for number, name in enumerate(self.GIVEN)}
        if self.tiled:
            numbers["right_ptr"] = len(self.GIVEN) + self.number
        else:
            numbers.pop("peak_ptr", None)
        return [numbers.get(name) for name in self.parameters if name.endswith("_ptr")]

    def _arguments(self, tensors):
        """``(pointers, all else)`` that the kernel takes, each in its order."""
        q, k = tensors[:2]
        given = dict(zip(self.GIVEN, tensors, strict=False))
        strided = {name: x for name, x in given.items() if f"stride_{name}n" in self.parameters}
        parts = self._parts(len(q))
        memory = {name: x if x is None else launcher.lasting(x) for name, x in (self._held | parts).items()}
        # A pointer needs memory even where there is no bias.
        memory["peak_ptr"] = memory["acc_ptr"]
        named = {
            **{f"stride_{name}{of}": x.stride(i) for name, x in strided.items() for i, of in enumerate("bhn")},
            "n_items": len(self.lists.items),
            "n_hb": self._lanes(len(q)),
            "n_queries": q.shape[2],
            "n_keys": k.shape[2],
            "scale_log2": self.scale_log2,
            "scale": float(self._sign * self._size),
            "mask_scale": 1 / self._size,
            **self.constants,
            "WIDE": any(launcher.wide(x.shape[2], x.stride(2)) for x in strided.values()),
            "PEAKS": len(tensors[self.GIVEN.index("peak")]) if self.tiled and "peak" in self.GIVEN else 1,
        }
        names = [name for name in self.parameters if name.endswith("_ptr")]
        pointers = [
            memory[name] if number is None else tensors[number]
            for name, number in zip(names, self._numbers(), strict=True)
        ]
        return pointers, tuple(named[name] for name in self.parameters[len(names) :])

    def _grid(self, q):
        """Heads of an item side by side, and items in the dimensions that CUDA limits."""
        n = len(self.lists.items)
        layers = max(1, -(-n // MOST_ACROSS))
        return self._lanes(q.shape[0]), -(-n // layers), layers

    def _lanes(self, batch):
        """Heads that each work item has in a batch."""
        return batch * self.common.heads if self.common.units is None else self.common.units.lanes(batch)

    def _parts(self, batch):
        """Memory of the parts, by parameter, for a batch or a larger one, each stream its own."""
        made, hb = self._scratch.setdefault(self._stream(), []), self._lanes(batch)
        # Counters that a graph set to zero would be so only after its first replay: it takes those of any stream.
        known = itertools.chain(*self._scratch.values()) if launcher.capturing() else made
        if (found := next((parts for most, parts in known if most >= hb), None)) is not None:
            return found
        # At least twice the largest before, so that batches of many sizes take little more than the largest alone.
        hb = max(hb, 2 * made[-1][0] if made else 0)
        parts = launcher.lasting_memory(self.device, self._empty_parts, hb)
        made.append((hb, parts))
        return parts

    def _empty_parts(self, hb):
        floats = partial(torch.empty, dtype=torch.float32, device=self.device)
        rows, groups = max(1, self.lists.part_rows), max(1, self.lists.groups)
        parts = {"acc_ptr": floats(rows * hb, self.sums * sum(self._widths))}
        if "stat_ptr" in self.parameters:
            parts["stat_ptr"] = floats(rows * hb, 2)
        parts["count_ptr"] = torch.zeros(groups * hb, dtype=torch.int32, device=self.device)
        return parts


def to_device(device: torch.device | str, array: np.ndarray) -> Tensor:
    """An array on a device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def records(lists: TileLists, device: torch.device | str) -> dict[str, Tensor | None]:
    """Records of the items and of the parts, by parameter."""
    # A pointer needs memory even where nothing is split.
    parts = lists.parts if len(lists.parts) else np.zeros((1, len(Part)), np.int32)
    return {"item_ptr": to_device(device, lists.items), "part_ptr": to_device(device, parts)}


def masks(lists: TileLists, common: Setting, device: torch.device | str) -> tuple[Tensor, Tensor | None, int]:
    """``(left, right, mask heads)`` as the kernel reads them: factors, intervals or bytes; None for tiles of a bias,
    which calls are given."""
    left = to_device(device, lists.left).to(common.dtype)
    if lists.rank == INTERVALS:
        begin, length = lists.intervals & 0xFFFF, lists.intervals >> 16
        bounds = np.stack([begin + (length - 1) / 2, length / 2], 1) * tile_kernel.PER_KEY.value
        return left, to_device(device, bounds.astype(np.float32)), 1
    if lists.rank == BYTES:
        flags = np.where(lists.bias_index == MASKED, 255, 0).astype(np.uint8)
        return left, to_device(device, flags), 1
    if lists.rank in RANKS:
        factor = tile_kernel.FACTOR_HALF if common.dtype == torch.float16 else tile_kernel.FACTOR
        return left * factor, to_device(device, lists.right).to(common.dtype) * -factor, 1
    return left, None, mask_heads(common)


def mask_heads(common: Setting) -> int:
    """Heads that tiles of a bias have of their own."""
    alone = common.bias is None or (common.units is not None and common.units.apart)
    return 1 if alone else common.heads


def scratch_bytes(lists: TileLists, hb: int, width: int) -> int:
    """Bytes that the parts of split items leave for `hb` heads of `width` values, as the kernel has them."""
    return 4 * hb * lists.part_rows * (width + 2)


def signed_scale(common: Setting) -> tuple[int, float]:
    """``(sign, size)`` of the scale; the size of none is 1. Raises `PatternError` beyond `SCALES`."""
    scale = common.head_dim**-0.5 if common.scale is None else common.scale
    if scale and not SCALES[0] <= abs(scale) <= SCALES[1]:
        least, most = (f"{size:.0e}" for size in SCALES)
        raise PatternError(f"scale: expected 0 or a size from {least} to {most} on a GPU, found {scale}")
    return (scale > 0) - (scale < 0), abs(scale) or 1.0
