"""How attention to slice lists is compiled, and what suits a group on a GPU."""

from dataclasses import dataclass, replace

from tilewright.targets.cuda.facts import FEWEST_ROWS


@dataclass(frozen=True)
class SliceConfig:
    """How the kernel is compiled: its form.

    step_keys: keys a step (BLOCK_N). num_stages: of the pipeline that loads them. num_warps: of a program. maxnreg:
    most registers of a thread, None for the compiler's choice. ahead: the numbers of a step's keys are loaded in the
    step before it. k_columns: keys are loaded as columns, else as rows, which are transposed in shared memory. slack:
    octaves that the maximum of a row may grow by before sums are rescaled, 0 for none: weights are up to 2**slack,
    which 16 bits hold up to 15.
    """

    step_keys: int
    num_stages: int
    num_warps: int
    maxnreg: int | None = None
    ahead: bool = False
    k_columns: bool = False
    slack: int = 0


def for_slices(rows, head_dim, dtype, capability, most_shared_bytes):
    """The `SliceConfig` of groups of `rows` queries on a GPU of `capability` (major, minor).

    most_shared_bytes: of a program. In 16 bits, measured on an H200 by a kernel that gathers lists alike
    (docs/decisions/0023): 64 keys a step and three stages, 4 warps at head dim 128 and 8 at 64, where groups of 64
    queries have 128 keys a step. ASSUME: GPUs before Hopper, which were not measured, need 8 warps for 128 queries at
    head dim 128: their products keep twice the registers a thread. float32 was not measured either. It does not use the
    tensor cores: it has few keys a step and as many warps as keep a thread's share small.
    """
    if dtype.itemsize > 2:
        return SliceConfig(16, num_stages=1, num_warps=min(16, rows // 8))
    if rows < 128:
        step_keys, num_warps = 128 if head_dim == 64 else 64, min(4, rows // FEWEST_ROWS)
        num_stages = 3
    else:
        step_keys, num_warps = 64, 4 if head_dim == 128 and capability >= (9, 0) else 8
        num_stages = 3 if head_dim == 128 else 2
    chosen = SliceConfig(step_keys, num_stages, num_warps)
    while chosen.num_stages > 1 and shared_bytes(chosen, rows, head_dim, dtype.itemsize) > most_shared_bytes:
        chosen = replace(chosen, num_stages=chosen.num_stages - 1)
    return chosen


def shared_bytes(chosen, rows, head_dim, itemsize):
    """Shared memory of a program, about: its stages of keys and values, and its queries."""
    return (2 * chosen.num_stages * chosen.step_keys + rows) * head_dim * itemsize
