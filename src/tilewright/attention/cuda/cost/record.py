"""The record of a calibration: what the programs of one form of the kernel take on one GPU (stage T3)."""

from dataclasses import dataclass

from tilewright.core.contents import Amount, Count, Size
from tilewright.core.errors import DeviceError


@dataclass(frozen=True)
class Kernel:
    """One variant of the kernel: masks of this `TileLists.rank`, or None for no masks.

    resident, resident_split: programs on a multiprocessor at a time; where some block is split. busy: 1 to `resident`,
    numbers of programs on each multiprocessor. item_us, full_us, partial_us: with so many that begin together, what a
    program takes beside its steps, a step without a mask and one with a mask. steady_us: these three where all places
    are taken and programs begin as others end.
    """

    rank: Count | None
    registers: Amount
    spills: Amount
    shared_bytes: Amount
    resident: Size
    resident_split: Size
    busy: tuple[Size, ...]
    item_us: tuple[Amount, ...]
    full_us: tuple[Amount, ...]
    partial_us: tuple[Amount, ...]
    steady_us: tuple[Amount, Amount, Amount]


@dataclass(frozen=True)
class Calibration:
    """What the programs of one form take on one GPU, in one type and head dim.

    made_for: what it holds for, see `calibration.made_for`. kernels: the variants. launch_us: of a launch, whatever it
    runs. by_age: how far the older programs of a multiprocessor go first, see `shares`.
    What a step takes more, for each program on the multiprocessor:
    scattered_us: if none of its keys lie side by side. missed_us: if none is in the second-level cache.
    apart_factors_us, apart_tiles_us: if the multiprocessor's other programs have other masks, factors of the greatest
    rank or tiles. own_tiles_us, missed_tiles_us: if no other program reads the tile of its mask; if it is not in the
    second-level cache.
    And a program: part_us, to leave its sums, for each on the multiprocessor. merge_us, merge_few_us: to merge a part
    of a block of many rows, and `tile_kernel.MERGED` parts of one row of a block of few.
    error, spread: medians of how far the times that it was made of are from what it says of them, and of their own
    spread. seconds: that the timing took. timings: these times, ``us`` of each `calibration_points.Point`.
    """

    made_for: dict[str, str | int | float | None]
    rows: Size
    step_keys: Size
    multiprocessors: Size
    l2_bytes: Size
    kernels: tuple[Kernel, ...]
    launch_us: Amount
    by_age: Amount
    scattered_us: Amount
    missed_us: Amount
    apart_factors_us: Amount
    apart_tiles_us: Amount
    own_tiles_us: Amount
    missed_tiles_us: Amount
    part_us: Amount
    merge_us: Amount
    merge_few_us: Amount
    error: Amount
    spread: Amount
    seconds: Amount
    timings: tuple[dict[str, int | float | bool | None], ...]

    def kernel(self, rank: int | None) -> Kernel:
        """The variant for masks of `rank`. Raises `DeviceError` where it does not fit the device."""
        found = next((kernel for kernel in self.kernels if kernel.rank == rank), None)
        if found is None:
            raise DeviceError(
                f"tiles of {self.rows} rows: expected one of the ranks {[each.rank for each in self.kernels]} that fit "
                f"this device, found masks of rank {rank}; plan with a smaller tile"
            )
        return found
