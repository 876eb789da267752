"""How the attention kernels are compiled: how a head dim is loaded, and what suits a tile or a packed batch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright import devices
from tilewright.core.errors import DeviceError, PatternError, TileError
from tilewright.devices.cuda.facts import FEWEST_ROWS

if TYPE_CHECKING:
    import torch

    from tilewright.attention.blocks.tiles import Tile

# Head dims as the powers of two that they are loaded in, as little as possible beyond them: one, or one and a smaller.
_POWERS = [(a, b) for a in (16, 32, 64, 128, 256) for b in (0, 16, 32, 64, 128) if b < a and a + b <= 256]
HEAD_DIMS = {d: min((pair for pair in _POWERS if sum(pair) >= d), key=sum) for d in range(8, 257, 8)}
# Of the shared memory that a program may ask for, what its stages of keys and values and its queries may take: the rest
# is for factors of masks and for what the compiler adds.
_SHARED_SHARE = 8 / 9
# In 16 bits, most registers of a thread of packed attention, where a program has 64 queries or more, by the columns
# that are loaded.
_MAXNREG, _MAXNREG_ROWS = {16: 96, 32: 96, 64: 128}, 64


@dataclass(frozen=True)
class Room:
    """What a kernel has to fit. shared_bytes: most of a program; registers: of a multiprocessor (`facts.describe`)."""

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


def for_tile(tile: "Tile", head_dim: int, dtype: "torch.dtype", room: Room | None = None) -> KernelConfig:
    """The `KernelConfig` of a tile in `room`, None for this GPU's.

    64 keys a step, or 128 at 48 columns, in two stages, or one where two do not fit. Registers are shared out to 5
    programs of 64 queries up to 32 columns, to 4 at 64 and as the compiler likes beyond, for tiles of 64 rows or more
    in 16 bits. float32 beyond 64 columns, which does not use the tensor cores, has few keys a step and more warps.

    Raises `TileError` for fewer rows than one tensor-core product has.
    """
    if tile.rows < FEWEST_ROWS:
        raise TileError(f"tile {tile.name}: expected at least {FEWEST_ROWS} rows on a GPU, found {tile.rows}")
    room, width = room or _here(), sum(HEAD_DIMS[head_dim])
    is_wide = dtype.itemsize > 2 and width > 64
    step_keys = max(tile.run, 16 if is_wide else 128 if width == 48 else 64)
    stage, most = 2 * step_keys * width * dtype.itemsize, _SHARED_SHARE * room.shared_bytes
    fits = 2 * stage + tile.rows * width * dtype.itemsize <= most
    num_warps = min(8, max(1, tile.rows // (8 if is_wide else 16)))
    programs = 5 if width <= 32 else 4
    maxnreg = None
    if dtype.itemsize == 2 and tile.rows >= _MAXNREG_ROWS and (width <= 32 or width == 64):
        # Of a thread of 64 queries. Registers are handed out in eights, and 255 are the most that one can have.
        threads = 32 * num_warps * 64 // tile.rows
        maxnreg = min(255, room.registers // (programs * threads) // 8 * 8)
    return KernelConfig(step_keys, 2 if fits and not is_wide else 1, num_warps, maxnreg)


def _here():
    """What this GPU has room for."""
    try:
        device = devices.describe("cuda")
    except DeviceError:
        return ANY_ROOM
    return Room(device["shared_bytes"], device["registers"])


def for_packed(rows: int, head_dim: int, dtype: "torch.dtype") -> KernelConfig:
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


def for_backward(rows: int, head_dim: int, dtype: "torch.dtype", narrow: bool = False) -> KernelConfig:
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
