"""How attention to slice lists is compiled, and what suits a group on a GPU."""

import itertools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from tilewright.core.errors import ArtifactError
from tilewright.devices.cuda.facts import FEWEST_ROWS

if TYPE_CHECKING:
    import numpy as np
    import torch

# What forms of each kernel are tried with in 16 bits. warp_rows: queries of a warp. The kernel of `warp_kernel`
# needs Hopper and groups of 128 queries.
PLAIN_GRID = {"step_keys": (32, 64, 128), "num_stages": (2, 3), "warp_rows": (16, 32)}
WARPS_GRID = {"step_keys": (128, 64), "num_stages": (3, 5), "loose": (False, True)}
HOPPER, WARPS_ROWS = (9, 0), 128
# Registers of a thread, at most.
REGISTERS = 255


@dataclass(frozen=True)
class SliceConfig:
    """How a kernel is compiled: its form.

    step_keys: keys a step (BLOCK_N). num_stages: of the pipeline that loads them. num_warps: of a program. maxnreg:
    most registers of a thread, None for the compiler's choice. ahead: the numbers of a step's keys are loaded in the
    step before it. k_columns: keys are loaded as columns, else as rows, which are transposed in shared memory. slack:
    octaves that the maximum of a row may grow by before sums are rescaled, 0 for none: weights are up to 2**slack,
    which 16 bits hold up to 15.

    by_warps: the kernel of `warp_kernel`, which of all this has step_keys and num_stages alone. loose: its LOOSE.
    """

    step_keys: int
    num_stages: int
    num_warps: int
    maxnreg: int | None = None
    ahead: bool = False
    k_columns: bool = False
    slack: int = 0
    by_warps: bool = False
    loose: bool = False


def for_slices(
    rows: "np.ndarray", head_dim: int, dtype: "torch.dtype", capability: tuple[int, int], most_shared_bytes: int
):
    """The `SliceConfig` of groups of `rows` queries on a GPU of `capability` (major, minor).

    most_shared_bytes: of a program. On Hopper, in 16 bits, for groups of 128 queries: the form of `warp_kernel`
    that was fastest for random keys on an H200. Else `plain`.
    """
    if dtype.itemsize == 2 and capability == HOPPER and rows == WARPS_ROWS:
        return SliceConfig(128, num_stages=3, num_warps=4, by_warps=True)
    return plain(rows, head_dim, dtype, most_shared_bytes)


def plain(rows, head_dim, dtype: "torch.dtype", most_shared_bytes: int):
    """The `SliceConfig` of `kernels`, for tokens and GPUs of any kind.

    In 16 bits, what was fastest on an H200: 64 keys a step, three stages and 8 warps, the keys' numbers a step ahead
    (docs/decisions/slice-lists.md); for smaller groups a trial kernel's form, not measured since. float32 was not
    measured either. It does not use the tensor cores: it has few keys a step and as many warps as keep a thread's share
    small.
    """
    if dtype.itemsize > 2:
        return SliceConfig(16, num_stages=1, num_warps=min(16, rows // 8))
    if rows < 128:
        chosen = SliceConfig(128 if head_dim == 64 else 64, num_stages=3, num_warps=min(4, rows // FEWEST_ROWS))
    else:
        chosen = SliceConfig(64, num_stages=3, num_warps=8, ahead=True)
    while chosen.num_stages > 1 and shared_bytes(chosen, rows, head_dim, dtype.itemsize) > most_shared_bytes:
        chosen = replace(chosen, num_stages=chosen.num_stages - 1)
    return chosen


def candidates(rows, head_dim: int, dtype: "torch.dtype", capability: tuple[int, int], most_shared_bytes: int) -> tuple:
    """Forms that fit, distinct, a tuple; `for_slices` first, with its arguments."""
    first = for_slices(rows, head_dim, dtype, capability, most_shared_bytes)
    if dtype.itemsize > 2:
        found = [replace(first, step_keys=keys, num_stages=stages) for keys in (16, 32) for stages in (1, 2)]
    else:
        found = [plain(rows, head_dim, dtype, most_shared_bytes)]
        found += [
            SliceConfig(keys, stages, max(1, rows // warp_rows), ahead=True)
            for keys, stages, warp_rows in itertools.product(*PLAIN_GRID.values())
        ]
    if dtype.itemsize == 2 and capability == HOPPER and rows == WARPS_ROWS:
        found += [
            SliceConfig(keys, stages, 4, by_warps=True, loose=bool(loose))
            for keys, stages, loose in itertools.product(*WARPS_GRID.values())
        ]
    # With room for what the compiler adds.
    most = most_shared_bytes - 1024
    fitting = [
        form
        for form in found
        if shared_bytes(form, rows, head_dim, dtype.itemsize) <= most and _registers(form, rows, head_dim) <= REGISTERS
    ]
    return tuple(dict.fromkeys((first, *fitting)))


def _registers(form, rows, head_dim):
    """Registers of a thread for scores and sums alone; where there are more, the compiler keeps them in memory."""
    if form.by_warps:
        # It shares them out by itself, and two times four warps multiply.
        return 0
    return rows * (form.step_keys + head_dim) // (32 * form.num_warps)


def read(stated) -> SliceConfig:
    """The `SliceConfig` that a file states as numbers and None by name. Raises `ArtifactError`."""
    types = {field.name: field.type for field in fields(SliceConfig)}
    given = [value for name, value in stated.items() if (name, value) != ("maxnreg", None)]
    if stated.keys() != types.keys() or not all(isinstance(value, int) and value >= 0 for value in given):
        raise ArtifactError(f"the form of attention to slices: expected {', '.join(types)}, numbers, found {stated}")
    return SliceConfig(**{name: bool(value) if types[name] is bool else value for name, value in stated.items()})


def shared_bytes(chosen, rows: "np.ndarray", head_dim: int, itemsize):
    """Shared memory of a program, about: its stages of keys and values, and its queries.

    Triton keeps one stage more of keys and values whose numbers are known ahead.
    """
    stages = chosen.num_stages + (chosen.ahead and not chosen.by_warps and chosen.num_stages > 1)
    return (2 * stages * chosen.step_keys + rows) * head_dim * itemsize
