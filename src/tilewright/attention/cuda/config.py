"""How the attention kernels are compiled: how a head dim is loaded, and what suits a tile or a packed batch."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from tilewright.core.errors import ArtifactError, PatternError, TileError
from tilewright.devices.cuda.facts import FEWEST_ROWS

if TYPE_CHECKING:
    import numpy as np
    import torch

# Head dims as the powers of two that they are loaded in, as little as possible beyond them: one, or one and a smaller.
_POWERS = [(a, b) for a in (16, 32, 64, 128, 256) for b in (0, 16, 32, 64, 128) if b < a and a + b <= 256]
HEAD_DIMS = {d: min((pair for pair in _POWERS if sum(pair) >= d), key=sum) for d in range(8, 257, 8)}
# Of the shared memory that a program may ask for, what its stages of keys and values and its queries may take: the rest
# is for factors of masks and for what the compiler adds.
_SHARED_SHARE = 8 / 9
# The values that each choice of a form is tried with. programs: of 64 queries that a multiprocessor's registers are
# shared out to, which limits those of a thread; None for the compiler's choice. warps: rows of each.
GRID = {"step_keys": (64, 32, 128), "num_stages": (2, 3, 4), "programs": (4, 5, None), "warp_rows": (16, 32, 8)}
# Of float32 beyond 64 columns, which does not use the tensor cores.
WIDE_GRID = {"step_keys": (16, 32), "num_stages": (1, 2), "programs": (None,), "warp_rows": (8, 16)}
# In 16 bits, most registers of a thread of packed attention, where a program has 64 queries or more, by the columns
# that are loaded.
_MAXNREG, _MAXNREG_ROWS = {16: 96, 32: 96, 64: 128}, 64


@dataclass(frozen=True)
class Room:
    """What forms have to fit. shared_bytes: most of a program; registers: of a multiprocessor (`facts.describe`)."""

    shared_bytes: int
    registers: int


# Where there is no GPU, as under Triton's interpreter: the limits of compute capability 9.0.
ANY_ROOM = Room(shared_bytes=227 << 10, registers=1 << 16)


@dataclass(frozen=True)
class KernelConfig:
    """How a kernel is compiled: its form.

    step_keys: keys a step (BLOCK_N). num_stages: of the pipeline that loads them. num_warps: of a program. maxnreg:
    most registers of a thread, None for the compiler's choice. trim: in packed batches, what the keys of an image are
    rounded up to, at most step_keys.
    """

    step_keys: int = 64
    num_stages: int = 2
    num_warps: int = 4
    maxnreg: int | None = None
    trim: int = 32


def read(stated) -> KernelConfig:
    """The `KernelConfig` that a file states as a dict. Raises `ArtifactError`."""
    numbers = {field.name for field in fields(KernelConfig)}
    given = [value for name, value in stated.items() if (name, value) != ("maxnreg", None)]
    if stated.keys() != numbers or not all(isinstance(value, int) and value >= 1 for value in given):
        known = ", ".join(sorted(numbers))
        raise ArtifactError(f"the form of a kernel: expected above zero {known}, found {stated}")
    return KernelConfig(**stated)


def for_tile(tile, head_dim, dtype, room=ANY_ROOM):
    """The `KernelConfig` of a tile where no calibration has found a faster one: the first of `candidates`.

    Raises `TileError` for fewer rows than one tensor-core product has.
    """
    return candidates(tile, head_dim, dtype, room)[0]


def candidates(tile, head_dim: int, dtype: "torch.dtype", room):
    """Forms of a tile's kernel that fit `room`, distinct, a tuple: first the default, then those that differ from it in
    one choice of the grid.

    The default is what the grid begins with, but for hints: 128 keys a step at 48 columns, and registers shared out to
    5 programs up to 32 columns, to 4 at 64 and as the compiler likes beyond, for tiles of 64 rows or more in 16 bits.
    It has one stage where two do not fit. All hints are of order alone: which form is taken is timed, see `forms`.
    """
    if tile.rows < FEWEST_ROWS:
        raise TileError(f"tile {tile.name}: expected at least {FEWEST_ROWS} rows on a GPU, found {tile.rows}")
    width = sum(HEAD_DIMS[head_dim])
    grid = dict(WIDE_GRID if dtype.itemsize > 2 and width > 64 else GRID)
    if dtype.itemsize > 2 or tile.rows < _MAXNREG_ROWS:
        grid["programs"] = (None,)
    elif width != 64:
        grid["programs"] = (5, 4, None) if width <= 32 else (None, 4, 5)
    if width == 48 and grid["step_keys"] == GRID["step_keys"]:
        grid["step_keys"] = (128, 64, 32)
    first = {name: values[0] for name, values in grid.items()}
    first["step_keys"] = max(first["step_keys"], tile.run)
    row_bytes = width * dtype.itemsize

    def fits(choice):
        taken = (2 * choice["num_stages"] * choice["step_keys"] + tile.rows) * row_bytes
        return taken <= _SHARED_SHARE * room.shared_bytes

    if not fits(first):
        first["num_stages"] = 1
    others = [first | {name: value} for name, values in grid.items() for value in values]
    chosen = [first, *(choice for choice in others if choice["step_keys"] >= tile.run and fits(choice))]
    return tuple(dict.fromkeys(_form(tile.rows, room, **choice) for choice in chosen))


def _form(rows, room, step_keys, num_stages, programs, warp_rows):
    num_warps = min(8, max(1, rows // warp_rows))
    if programs is None:
        return KernelConfig(step_keys, num_stages, num_warps)
    # Of a thread of 64 queries. Registers are handed out in eights, and 255 are the most that one can have.
    threads = 32 * num_warps * 64 // rows
    return KernelConfig(step_keys, num_stages, num_warps, min(255, room.registers // (programs * threads) // 8 * 8))


def for_packed(rows, head_dim, dtype: "torch.dtype"):
    """The `KernelConfig` of packed attention with `rows` queries a program.

    In 16 bits, 16 queries a warp. float32 does not use the tensor cores: it has few keys a step and as many warps as
    keep a thread's share small.
    """
    if dtype.itemsize > 2:
        step_keys = 16 if head_dim > 64 else 32
        return KernelConfig(step_keys, num_stages=1, num_warps=min(8, rows // 8), trim=step_keys)
    return KernelConfig(num_warps=min(8, rows // FEWEST_ROWS), maxnreg=_maxnreg(rows, sum(HEAD_DIMS[head_dim])))


def _maxnreg(rows, width):
    return _MAXNREG.get(width) if rows >= _MAXNREG_ROWS else None


def check_head_dim(head_dim: int) -> None:
    """Raise `PatternError` for a head dim that the kernels do not have."""
    if head_dim not in HEAD_DIMS:
        raise PatternError(f"head_dim: expected a multiple of 8 from 8 to {max(HEAD_DIMS)} on a GPU, found {head_dim}")


def for_backward(rows: "np.ndarray", head_dim: int, dtype: "torch.dtype", narrow: bool = False) -> KernelConfig:
    """The `KernelConfig` of the backward's kernels with `rows` rows a program.

    narrow: of a kernel of keys whose lists let it have 32 queries a step, see `backward.narrow`.
    """
    # ASSUME: the rest is one form for both kernels. On an H200 it was the fastest for queries. With 32 queries a step
    # kernels of keys took 100 us where 64 took 110, of head dim 64, and of 48 32 us where they took 35. float32 does
    # not use the tensor cores: it has few keys a step, and more warps.
    width = sum(HEAD_DIMS[head_dim])
    if dtype.itemsize > 2:
        return KernelConfig(32 if width <= 64 else 16, num_stages=1, num_warps=4 if rows <= 16 else 8)
    if width <= 64:
        if narrow and rows == 64:
            return KernelConfig(32, num_stages=3, num_warps=4)
        return KernelConfig(64, num_stages=2, num_warps=8 if rows > 64 else 4)
    return KernelConfig(64 if width <= 128 else 32, num_stages=2 if width <= 128 else 1, num_warps=8)
