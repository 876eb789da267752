"""Executor of schedules on an NVIDIA GPU: one launch of `triton_tiles` for each tile kind of a round (stage T5)."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from tilewright.errors import DeviceError, PatternError
from tilewright.kernels import tile_lists, triton_tiles
from tilewright.kernels.torch_launch import setting
from tilewright.schedule.record import verify_inputs

# Head dims as the powers of two that they are loaded in.
HEAD_DIMS = {16: (16, 0), 32: (32, 0), 48: (32, 16), 64: (64, 0), 96: (64, 32), 128: (128, 0)}


@dataclass(frozen=True)
class Form:
    """How a tile is compiled. step_keys: keys a step; stages: of the pipeline that fetches them; warps: of a program"""

    step_keys: int = 64
    stages: int = 2
    warps: int = 4


def form(tile):
    """The `Form` of a tile. Measured on an H200 (docs/decisions/0008): 64 keys a step, two stages, 16 rows a warp."""
    return Form(step_keys=max(64, tile.run), warps=max(1, min(8, tile.rows // 16)))


def prepare(schedule, blocks, *, heads, head_dim, dtype, device="cuda", forms=None, **options):
    """Return an `Executor` of `schedule`: ``callable(q [B, H, N_q, D], k, v [B, H, N_k, D]) -> [B, H, N_q, D]``.

    blocks: ``{tile: Blocks}``. forms: ``{tile: Form}``, default `form`. options: row_order, col_order, ordered, bias
    and scale as of `torch_blocks.prepare`. Raises `ArtifactError` for blocks of another schedule, `PatternError` for an
    order, a bias or a head dim that does not fit.
    """
    verify_inputs(schedule, blocks)
    if head_dim not in HEAD_DIMS:
        raise PatternError(f"head_dim: expected one of {', '.join(map(str, HEAD_DIMS))}, found {head_dim}")
    shape = next(iter(blocks.values())).shape
    common = setting(shape, heads, head_dim, dtype, **options)
    scale = head_dim**-0.5 if common.scale is None else common.scale
    launches = []
    batches = np.unique(np.stack([schedule.round, schedule.tile]), axis=1).T.tolist()
    for turn, t in batches:
        member = (schedule.round == turn) & (schedule.tile == t)
        cover = blocks[schedule.tiles[t]]
        chosen = (forms or {}).get(cover.tile.name, form(cover.tile))
        columns = schedule.block[member], schedule.run_lo[member], schedule.run_hi[member]
        lists = tile_lists.build(cover, *columns, chosen.step_keys, _index(common))
        launches.append(_Launch(lists, chosen, common, scale, device))
    used = [(blocks[schedule.tiles[t]], schedule.tile == t) for t in np.unique(schedule.tile).tolist()]
    written = sum(int(cover.rows[np.unique(schedule.block[member])].sum()) for cover, member in used)
    return Executor(tuple(launches), shape, heads, head_dim, dtype, torch.device(device), written < shape[0])


def _index(common):
    """Slots of the bias by place in the graph's order, or None."""
    if common.bias is None:
        return None
    rows, keys = common.natural
    return lambda row, key: common.bias.index(rows[row], keys[key])


class _Launch:
    """One launch: lists on the device, scratch memory, and the call."""

    def __init__(self, lists, chosen, common, scale, device):
        def there(array):
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.lists, self.form, self._dtype = lists, chosen, common.dtype
        self.heads, self._scale_log2 = common.heads, scale * math.log2(math.e)
        self.d0, self.d1 = HEAD_DIMS[common.head_dim]
        taken_rows, taken_keys = common.taken
        self.ordered = bool((taken_rows == np.arange(len(taken_rows))).all())
        self.items, self.parts = (
            there(lists.items),
            there(lists.parts if len(lists.parts) else np.zeros((1, 4), np.int32)),
        )
        self.rows = there(taken_rows.astype(np.int32))
        self.keys = there(taken_keys[lists.keys].astype(np.int32))
        self.mask_heads = 1
        if lists.rank:
            self.left = there(lists.left).to(common.dtype) * triton_tiles.FACTOR
            self.right = there(lists.right).to(common.dtype) * -triton_tiles.FACTOR
        else:
            table = torch.zeros(1, 1) if common.bias is None else common.bias.table.detach().float() / scale
            self.mask_heads = len(table)
            # The last slot, that of index -1, is what is not allowed.
            masked = torch.full((len(table), 1), -(triton_tiles.FACTOR**2))
            table = torch.cat((table.cpu(), masked), 1).to(device)
            self.left = there(lists.left).to(common.dtype)
            self.right = table[:, there(lists.slots).long()].transpose(0, 1).contiguous()
        self._scratch = {}

    def scratch(self, batch):
        """``(accumulators, statistics, counters)`` of the parts, for a batch."""
        if batch not in self._scratch:
            n, hb, device = max(1, len(self.lists.parts)), batch * self.heads, self.items.device
            shape = (n, hb, self.lists.rows)
            self._scratch[batch] = (
                torch.empty(*shape, self.d0 + self.d1, device=device),
                torch.empty(*shape, 2, device=device),
                torch.zeros(max(1, self.lists.groups), hb, dtype=torch.int32, device=device),
            )
        return self._scratch[batch]

    def __call__(self, q, k, v, out):
        """Attend the launch's items; returns the compiled kernel."""
        batch, lists = q.shape[0], self.lists
        return triton_tiles.attend[(len(lists.items) * batch * self.heads,)](
            q, k, v, out,
            self.items, self.rows, self.keys, self.left, self.right, self.parts, *self.scratch(batch),
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            self.heads, self._scale_log2,
            M=lists.rows, N=lists.step_keys, D0=self.d0, D1=self.d1, RANK=lists.rank, MASK_HEADS=self.mask_heads,
            FULL=lists.full, PARTIAL=lists.partial, SPLIT=len(lists.parts) > 0, ORDERED=self.ordered,
            STAGES=self.form.stages, HB=batch * self.heads, num_warps=self.form.warps,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Executor:
    """A prepared schedule; call it with q, k and v, whose heads lie contiguously. incomplete: some query has no key."""

    launches: tuple
    shape: tuple[int, int]
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    incomplete: bool

    def __call__(self, q, k, v):
        """Attention over the pattern. Raises `PatternError` or `DeviceError` for tensors other than planned."""
        self._check(q, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self.incomplete:
            out.zero_()
        for launch in self.launches:
            launch(q, k, v, out)
        return out

    def _check(self, q, k, v):
        for name, x, tokens in (("q", q, self.shape[0]), ("k", k, self.shape[1]), ("v", v, self.shape[1])):
            expected = (q.shape[0], self.heads, tokens, self.head_dim)
            if tuple(x.shape) != expected:
                raise PatternError(f"{name}: expected shape {('B', *expected[1:])}, found {tuple(x.shape)}")
            if x.stride(3) != 1:
                raise PatternError(f"{name}: expected the values of a head side by side, found stride {x.stride(3)}")
            if x.dtype != self.dtype:
                raise PatternError(f"{name}: expected {self.dtype} as planned, found {x.dtype}")
            if x.device.type != self.device.type:
                raise DeviceError(f"{name}: expected a tensor on {self.device} as planned, found {x.device}")
