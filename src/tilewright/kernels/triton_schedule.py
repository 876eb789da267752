"""Executor of schedules on an NVIDIA GPU: one launch of `triton_tiles` for each tile kind of a round (stage T5)."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from tilewright.errors import DeviceError, PatternError, TileError
from tilewright.kernels import tile_lists, tokens, triton_launch, triton_tiles
from tilewright.kernels.torch_launch import setting
from tilewright.schedule.record import verify_inputs

# Rows of one tensor-core product.
FEWEST_ROWS = 16
# Head dims as the powers of two that they are loaded in.
HEAD_DIMS = {16: (16, 0), 32: (32, 0), 48: (32, 16), 64: (64, 0), 96: (64, 32), 128: (128, 0)}


@dataclass(frozen=True)
class Form:
    """How a tile is compiled.

    step_keys: keys a step; stages: of the pipeline that fetches them; warps: of a program; registers: most of a thread,
    None for the compiler's choice.
    """

    step_keys: int = 64
    stages: int = 2
    warps: int = 4
    registers: int | None = None


def form(tile, head_dim, dtype):
    """The `Form` of a tile; measured on an H200 (docs/decisions/0008).

    64 keys a step, 128 at head dim 48; two stages; 16 rows a warp. In 16 bits, registers of tiles with 64 rows or more
    are held to what four programs of 64 rows on a multiprocessor have, five at head dims up to 32. Raises `TileError`
    for fewer rows than one tensor-core product has.
    """
    if tile.rows < FEWEST_ROWS:
        raise TileError(f"tile {tile.name}: expected at least {FEWEST_ROWS} rows on a GPU, found {tile.rows}")
    registers = None
    if tile.rows >= 64 and dtype.itemsize == 2:
        registers = {16: 96, 32: 96, 64: 128}.get(head_dim)
    step_keys = max(128 if head_dim == 48 else 64, tile.run)
    return Form(step_keys, warps=min(8, tile.rows // FEWEST_ROWS), registers=registers)


def prepare(schedule, blocks, *, heads, head_dim, dtype, device="cuda", **options):
    """Return an `Executor` of `schedule`: ``callable(q [B, H, N_q, D], k, v [B, H, N_k, D]) -> [B, H, N_q, D]``.

    blocks: ``{tile: Blocks}``. device: whose current one holds the lists. options: row_order, col_order, ordered, bias
    and scale as of `torch_blocks.prepare`. Raises `ArtifactError` for blocks of another schedule, `PatternError` for an
    order, a bias or a head dim that does not fit, `TileError` for a tile too small, and `DeviceError` while a CUDA
    graph is captured.
    """
    verify_inputs(schedule, blocks)
    _expect_no_capture()
    if head_dim not in HEAD_DIMS:
        raise PatternError(f"head_dim: expected one of {', '.join(map(str, HEAD_DIMS))}, found {head_dim}")
    shape = next(iter(blocks.values())).shape
    common = setting(shape, heads, head_dim, dtype, **options)
    device = torch.empty(0, device=device).device
    launches = []
    batches = np.unique(np.stack([schedule.round, schedule.tile]), axis=1).T.tolist()
    for turn, t in batches:
        member = (schedule.round == turn) & (schedule.tile == t)
        cover = blocks[schedule.tiles[t]]
        columns = schedule.block[member], schedule.run_lo[member], schedule.run_hi[member]
        step_keys = form(cover.tile, head_dim, dtype).step_keys
        lists = tile_lists.build(cover, *columns, step_keys, _index(common))
        launches.append(Launch(lists, cover.tile, common, device))
    if device.type == "cuda":
        # Calls may come on any stream.
        torch.cuda.current_stream(device).synchronize()
    used = [(blocks[schedule.tiles[t]], schedule.tile == t) for t in np.unique(schedule.tile).tolist()]
    written = sum(int(cover.rows[np.unique(schedule.block[member])].sum()) for cover, member in used)
    return Executor(tuple(launches), shape, heads, head_dim, dtype, device, written < shape[0])


def _index(common):
    """Slots of the bias by place in the graph's order, or None."""
    if common.bias is None:
        return None
    rows, keys = common.natural
    return lambda row, key: common.bias.index(rows[row], keys[key])


def _expect_no_capture():
    if triton_launch.capturing():
        raise DeviceError(
            "a CUDA graph is being captured: call the plan once with tensors of these shapes and strides before that"
        )


class Launch:
    """Work items of one tile: their lists on the device, scratch memory for what split items leave, and the call."""

    def __init__(self, lists, tile, common, device):
        def there(array):
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.lists, self._tile, self._heads = lists, tile, common.heads
        scale = common.head_dim**-0.5 if common.scale is None else common.scale
        self._scale_log2 = scale * math.log2(math.e)
        self._form = form(tile, common.head_dim, common.dtype)
        self._d0, self._d1 = HEAD_DIMS[common.head_dim]
        rows, keys = common.taken
        parts = lists.parts if len(lists.parts) else np.zeros((1, 4), np.int32)
        mask_heads = 1
        if lists.rank:
            left = there(lists.left).to(common.dtype) * triton_tiles.FACTOR
            right = there(lists.right).to(common.dtype) * -triton_tiles.FACTOR
        else:
            table = torch.zeros(1, 1) if common.bias is None else common.bias.table.detach().float() / scale
            mask_heads = len(table)
            # The last slot, that of index -1, is what is not allowed.
            masked = torch.full((mask_heads, 1), -(triton_tiles.FACTOR**2))
            table = torch.cat((table.cpu(), masked), 1).to(device)
            left = there(lists.left).to(common.dtype)
            right = table[:, there(lists.slots).long()].transpose(0, 1).contiguous()
        places = there(rows.astype(np.int32)), there(keys[lists.keys].astype(np.int32))
        self._held = (there(lists.items), *places, left, right, there(parts))
        # In the kernel's order, but for HB.
        self._constants = {
            "M": lists.rows, "N": lists.step_keys, "D0": self._d0, "D1": self._d1, "RANK": lists.rank,
            "MASK_HEADS": mask_heads, "FULL": lists.full, "PARTIAL": lists.partial, "SPLIT": len(lists.parts) > 0,
            "ORDERED": bool((rows == np.arange(len(rows))).all()), "STAGES": self._form.stages,
        }  # fmt: skip
        self._stream, self._scratch = triton_launch.current_stream(left.device), {}

    @property
    def memory_bytes(self):
        """Bytes of lists and masks held between calls."""
        return sum(x.nbytes for x in self._held)

    def scratch_bytes(self, batch):
        """Bytes that what split items leave takes, for each stream that calls."""
        return 4 * batch * self._heads * (len(self.lists.parts) * self.lists.rows * (self._d0 + self._d1 + 2))

    def __call__(self, q, k, v, out):
        """Attend the items through Triton's own launch; returns the compiled kernel.

        Raises `DeviceError` where a program's tile does not fit the device.
        """
        memory, sizes, constants = self._arguments(q, k, v, out)
        try:
            return triton_tiles.attend[(self._programs(q),)](
                q,
                k,
                v,
                out,
                *memory,
                *sizes,
                **constants,
                num_warps=self._form.warps,
                maxnreg=self._form.registers,
            )
        except OutOfResources as error:
            raise DeviceError(
                f"tile {self._tile.name}: expected to need at most {error.limit} of this device's {error.name}, found "
                f"{error.required}; plan with a smaller tile"
            ) from error

    def again(self, compiled, q, k, v, out):
        """``callable(addresses of q, k, v, out)`` that launches `compiled` for tensors like these; see `direct`."""
        memory, sizes, constants = self._arguments(q, k, v, out)
        arguments = (*(x.data_ptr() for x in memory), *sizes, *constants.values())
        return triton_launch.direct(compiled, self._programs(q), self._stream(), arguments)

    def _programs(self, q):
        return len(self.lists.items) * q.shape[0] * self._heads

    def _arguments(self, q, k, v, out):
        """What the kernel takes after q, k, v and out: memory, sizes, and constants by name."""
        batch = q.shape[0]
        strides = (stride for x in (q, k, v, out) for stride in x.stride()[:3])
        constants = self._constants | {"HB": batch * self._heads}
        return (*self._held, *self._parts(batch)), (*strides, self._heads, self._scale_log2), constants

    def _parts(self, batch):
        """``(accumulators, statistics, counters)`` of the parts for a batch, each stream its own."""
        made = self._scratch.setdefault(batch, {})
        stream = self._stream()
        if stream not in made:
            # Counters that a graph set to zero would be so only after its first replay.
            if made and triton_launch.capturing():
                return next(iter(made.values()))
            n, hb, device = max(1, len(self.lists.parts)), batch * self._heads, self._held[0].device
            shape = (n, hb, self.lists.rows)
            made[stream] = (
                torch.empty(*shape, self._d0 + self._d1, device=device),
                torch.empty(*shape, 2, device=device),
                torch.zeros(max(1, self.lists.groups), hb, dtype=torch.int32, device=device),
            )
        return made[stream]


class Executor:
    """A prepared schedule; call it with q, k and v, the values of whose heads lie side by side.

    The first call with tensors of some shapes and strides, on each stream, goes through Triton, which compiles; later
    ones go straight to its launcher (`triton_launch`), to the current stream, without synchronising. Calls on several
    streams at once are safe. So is capture in a CUDA graph, after a first call; graphs captured from one executor share
    scratch memory with each other and with its calls: keep it as long as they are replayed, and replay one at a time.

    launches: `Launch` in order. incomplete: some query has no key.
    """

    def __init__(self, launches, shape, heads, head_dim, dtype, device, incomplete):
        self.launches, self.shape, self.heads, self.head_dim = launches, shape, heads, head_dim
        self.dtype, self.device, self.incomplete = dtype, device, incomplete
        self._stream = triton_launch.current_stream(device)
        self._several = device.type == "cuda" and torch.cuda.device_count() > 1
        # By stream and alignment: (whether tensors are alike, memory for a result, launches).
        self._known = {}

    @property
    def memory_bytes(self):
        """Bytes of lists and masks held between calls."""
        return sum(launch.memory_bytes for launch in self.launches)

    @property
    def executed(self):
        """Pairs of query and key that a head works through, padding included."""
        lists = [launch.lists for launch in self.launches]
        return sum(x.rows * x.step_keys * int(x.items[:, 4].sum()) for x in lists)

    def peak_bytes(self, batch):
        """Most bytes that calls hold beyond their arguments: the result, and what split items leave."""
        result = batch * self.heads * self.shape[0] * self.head_dim * self.dtype.itemsize
        return result + sum(launch.scratch_bytes(batch) for launch in self.launches)

    def __call__(self, q, k, v):
        """Attention over the pattern. Raises `PatternError` or `DeviceError` for tensors other than planned."""
        if self._several and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self(q, k, v)
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        # A kernel is compiled for the alignment of its tensors.
        key = (self._stream(), at_q & 15, at_k & 15, at_v & 15)
        for alike, empty, again in self._known.get(key, ()):
            if again and alike(q, k, v):
                out = empty()
                if self.incomplete:
                    out.zero_()
                at_out = out.data_ptr()
                for launch in again:
                    launch(at_q, at_k, at_v, at_out)
                return out
        return self._first(key, q, k, v)

    def _first(self, key, q, k, v):
        """Check tensors unlike those of calls before, launch through Triton, and remember how to do so again."""
        expected = {name: getattr(self, name) for name in ("shape", "heads", "head_dim", "dtype", "device")}
        tokens.check(q, k, v, **expected)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.stride(3) != 1:
                raise PatternError(f"{name}: expected the values of a head side by side, found stride {x.stride(3)}")
        if not self._seen(q, k, v, lambda known: known[1:] == key[1:]):
            _expect_no_capture()
        out = tokens.empty(q, self.shape[0])
        if self.incomplete:
            out.zero_()
        again = [launch.again(launch(q, k, v, out), q, k, v, out) for launch in self.launches]
        if not triton_launch.capturing() and not self._seen(q, k, v, lambda known: known == key):
            launches = () if None in again else tuple(again)
            self._known.setdefault(key, []).append((tokens.alike(q, k, v), tokens.another(out), launches))
        return out

    def _seen(self, q, k, v, which):
        """Whether calls with tensors like these are known, under keys that ``which(key)``."""
        return any(alike(q, k, v) for key, calls in self._known.items() if which(key) for alike, *_ in calls)
