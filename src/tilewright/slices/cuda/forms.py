"""How the kernels of slices are compiled for a GPU: their forms, those that were fastest on an H200 for random keys.

For GPUs before Hopper, and for float32, they are assumptions that fit.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tilewright.devices.cuda.facts import FEWEST_ROWS

# The GPUs that the kernel of `warp_kernel` is for, and queries of its groups.
HOPPER, WARPS_ROWS = (9, 0), 128


@dataclass(frozen=True)
class SliceConfig:
    """How attention to lists is compiled.

    step_keys: keys a step (BLOCK_N). num_stages: of the pipeline that loads them. num_warps: of a program. ahead: the
    numbers of a step's keys are loaded in the step before it. by_warps: the kernel of `warp_kernel`, which of all this
    has step_keys and num_stages alone.
    """

    step_keys: int
    num_stages: int
    num_warps: int
    ahead: bool = False
    by_warps: bool = False


class Config(NamedTuple):
    """How the kernels of prediction that compute products are compiled.

    block_m, block_n: rows and keys of a product; num_warps, num_stages: of its kernels. alone_warps: of that for codes
    where one row stands for a group. keyed, keyed_warps, keyed_stages: keys of a product of `code_kernels`, which has
    block_m rows, and of its kernel.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    alone_warps: int
    keyed: int
    keyed_warps: int
    keyed_stages: int


# By bytes of a value. Pipelines fit the shared memory, products without tensor cores the registers.
PREDICTION = {
    # Two programs of this size fit a multiprocessor: one computes while the other waits. Codes of 12 heads of 32,760
    # tokens took 94 us on an H200 with 4 warps, 108 us with 8 (one row a group, head dim 128).
    2: Config(128, 64, num_warps=8, num_stages=3, alone_warps=4, keyed=128, keyed_warps=8, keyed_stages=2),
    4: Config(32, 32, num_warps=4, num_stages=1, alone_warps=4, keyed=32, keyed_warps=4, keyed_stages=1),
}


def of_attention(
    rows: int, head_dim: int, dtype: torch.dtype, capability: tuple[int, int], most_shared_bytes: int
) -> SliceConfig:
    """The `SliceConfig` of groups of `rows` queries on a GPU of `capability` (major, minor).

    most_shared_bytes: of a program. On Hopper, in 16 bits, groups of 128 queries take the kernel of `warp_kernel`; all
    else is `plain`.
    """
    if dtype.itemsize == 2 and capability == HOPPER and rows == WARPS_ROWS:
        return SliceConfig(128, num_stages=3, num_warps=4, by_warps=True)
    return plain(rows, head_dim, dtype, most_shared_bytes)


def plain(rows: int, head_dim: int, dtype: torch.dtype, most_shared_bytes: int) -> SliceConfig:
    """The `SliceConfig` of `kernels`, for tokens and GPUs of any kind.

    In 16 bits 64 keys a step, three stages and 8 warps, the keys' numbers a step ahead (docs/decisions/slice-lists.md);
    for smaller groups a trial kernel's form. float32 does not use the tensor cores: it has few keys a step and as many
    warps as keep a thread's share small.
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


def of_gradients(rows: int, head_dim: int, dtype: torch.dtype, most_shared_bytes: int) -> SliceConfig:
    """The `SliceConfig` of `gradient_kernel`: the fastest on an H200, with the stages that fit.

    There, 64 keys, three stages and 8 warps took 11.2 ms for 12 heads of 32,760 tokens, head dim 128 and a fifth of the
    keys; two stages 12.3 ms, 32 keys 16.1 ms, 128 keys 15.8 ms.
    """
    if dtype.itemsize > 2:
        return plain(rows, head_dim, dtype, most_shared_bytes)
    chosen = SliceConfig(64, num_stages=3, num_warps=8 if rows > 64 else 4)
    # Beside what attention keeps: gradients of the queries' results, and weights and their gradients in 16 bits.
    more = (head_dim + 2 * chosen.step_keys) * rows * dtype.itemsize
    most = most_shared_bytes - more
    while chosen.num_stages > 1 and shared_bytes(chosen, rows, head_dim, dtype.itemsize) > most:
        chosen = replace(chosen, num_stages=chosen.num_stages - 1)
    return chosen


def device_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """``((major, minor), most bytes of shared memory of a program)``; those of an A100 under the interpreter, which
    runs no kernel of `warp_kernel`."""
    if device.type != "cuda":
        return (8, 0), 163 << 10
    # Any: torch's stub leaves fields out.
    facts: Any = torch.cuda.get_device_properties(device)
    return (facts.major, facts.minor), facts.shared_memory_per_block_optin


def shared_bytes(chosen: SliceConfig, rows: int, head_dim: int, itemsize: int) -> int:
    """Shared memory of a program, about: its stages of keys and values, and its queries.

    Triton keeps one stage more of keys and values whose numbers are known ahead.
    """
    stages = chosen.num_stages + (chosen.ahead and not chosen.by_warps and chosen.num_stages > 1)
    return (2 * stages * chosen.step_keys + rows) * head_dim * itemsize
