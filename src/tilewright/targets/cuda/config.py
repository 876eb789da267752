"""How the attention kernels are compiled: how a head dim is loaded, and what suits a tile or a packed batch."""

from dataclasses import dataclass, replace

from tilewright.core.errors import PatternError, TileError
from tilewright.targets.cuda.facts import FEWEST_ROWS

# Head dims as the powers of two that they are loaded in, as little as possible beyond them: one, or one and a smaller.
_POWERS = [(a, b) for a in (16, 32, 64, 128, 256) for b in (0, 16, 32, 64, 128) if b < a and a + b <= 256]
HEAD_DIMS = {d: min((pair for pair in _POWERS if sum(pair) >= d), key=sum) for d in range(8, 257, 8)}
# What a program's stages of keys and values and its queries may take of shared memory, about: that of an H100 or H200.
_SHARED_BYTES = 200 << 10
# In 16 bits, most registers of a thread where a program has 64 queries or more, by the columns that are loaded: what
# four programs of 64 queries on a multiprocessor have, five at up to 32 columns.
_MAXNREG, _MAXNREG_ROWS = {16: 96, 32: 96, 64: 128}, 64


@dataclass(frozen=True)
class KernelConfig:
    """How a kernel is compiled.

    step_keys: keys a step (BLOCK_N). num_stages: of the pipeline that loads them. num_warps: of a program. maxnreg:
    most registers of a thread, None for the compiler's choice. trim: in packed batches, what the keys of an image are
    rounded up to, at most step_keys.
    """

    step_keys: int = 64
    num_stages: int = 2
    num_warps: int = 4
    maxnreg: int | None = None
    trim: int = 32


@dataclass(frozen=True)
class SliceConfig(KernelConfig):
    """How attention to slice lists is compiled.

    ahead: the numbers of a step's keys are loaded in the step before it. k_columns: keys are loaded as columns, else as
    rows, which are transposed in shared memory.
    """

    ahead: bool = False
    k_columns: bool = False


def for_tile(tile, head_dim, dtype):
    """The `KernelConfig` of a tile, measured on an H200 (docs/decisions/0008).

    64 keys a step, 128 at head dim 48. Two stages, one where two do not fit shared memory. 16 rows a warp. Two cases
    were not measured: that one, and float32 beyond head dim 64, which does not use the tensor cores: it has few keys a
    step and as many warps as keep a thread's share small. Raises `TileError` for fewer rows than one tensor-core
    product has.
    """
    if tile.rows < FEWEST_ROWS:
        raise TileError(f"tile {tile.name}: expected at least {FEWEST_ROWS} rows on a GPU, found {tile.rows}")
    width = sum(HEAD_DIMS[head_dim])
    if dtype.itemsize > 2 and width > 64:
        return KernelConfig(max(16, tile.run), num_stages=1, num_warps=min(8, tile.rows // 8))
    step_keys, num_stages = max(128 if width == 48 else 64, tile.run), 2
    if (2 * num_stages * step_keys + tile.rows) * width * dtype.itemsize > _SHARED_BYTES:
        num_stages = 1
    maxnreg = _maxnreg(tile.rows, width) if dtype.itemsize == 2 else None
    return KernelConfig(step_keys, num_stages, min(8, tile.rows // FEWEST_ROWS), maxnreg)


def for_packed(rows, head_dim, dtype):
    """The `KernelConfig` of packed attention with `rows` queries a program (docs/decisions/0011).

    In 16 bits, 16 queries a warp. float32 does not use the tensor cores: it has few keys a step and as many warps as
    keep a thread's share small.
    """
    if dtype.itemsize > 2:
        step_keys = 16 if head_dim > 64 else 32
        return KernelConfig(step_keys, num_stages=1, num_warps=min(8, rows // 8), trim=step_keys)
    return KernelConfig(num_warps=min(8, rows // FEWEST_ROWS), maxnreg=_maxnreg(rows, sum(HEAD_DIMS[head_dim])))


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


def _maxnreg(rows, width):
    return _MAXNREG.get(width) if rows >= _MAXNREG_ROWS else None


def check_head_dim(head_dim):
    """Raise `PatternError` for a head dim that the kernels do not have."""
    if head_dim not in HEAD_DIMS:
        raise PatternError(f"head_dim: expected a multiple of 8 from 8 to {max(HEAD_DIMS)} on a GPU, found {head_dim}")
