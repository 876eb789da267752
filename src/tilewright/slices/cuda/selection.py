"""Codes and lists of slices on an NVIDIA GPU (stage T5): launches of `selection_kernels`.

The contract is that of `tilewright.slices.selection`. No launch waits for the device or asks it for a number, so that
all of them can be captured in a CUDA graph after a first call with such tensors.
"""

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from tilewright.devices.cuda.launcher import KEYS, CachedLaunch, lasting, lasting_memory
from tilewright.devices.cuda.tape import recorded  # noqa: F401  of the contract
from tilewright.slices.cuda import code_kernels, forms, selection_kernels
from tilewright.slices.selection import padded

if TYPE_CHECKING:
    from tilewright.slices.layout import Layout
    from tilewright.slices.selection import Rule

LOG2_E = math.log2(math.e)
# Codes that a program moves at once, and selects from at once; warps of the latter.
MOVED, COUNTED, COUNT_WARPS = 2048, 4096, 4
# Tokens that are read at once for means, and the warps that do so.
AVERAGED, MEAN_WARPS = 64, 4
# Programs that keys are shared out to, about: eight for each multiprocessor of a large GPU, since many short ones share
# a few that are late.
PROGRAMS = 1056
# Ranges of keys that log-sum-exps are computed in, at most.
SPLITS = 16
# Keys of a range that log-sum-exps are computed in, at least.
LEAST_SPLIT = 512
# Heads of a call that those ranges are chosen for, whatever it has: sums over other ranges are rounded otherwise, and
# a head's lists would depend on the heads beside it. ASSUME: as many as the calls that ranges were measured with.
HEADS = 12


def memory(device: torch.device) -> int:
    """See `selection`."""
    if device.type != "cuda":
        # Under Triton's interpreter.
        return 1 << 40
    return torch.cuda.get_device_properties(device).total_memory


class Selection:
    """Methods as in `selection`. config: a `forms.Config`, None: that of `forms.PREDICTION`."""

    def __init__(self, layout: "Layout", device: torch.device, config: forms.Config | None = None):
        """Compile nothing yet."""
        self.layout, self._device, self._config = layout, device, config
        # By name and settings.
        self._launch = lru_cache(KEYS)(lambda name, *s: CachedLaunch(partial(getattr(self, name), *s), device))

    @property
    def _lists(self):
        """Groups of all heads."""
        return self.layout.batch * self.layout.heads * self.layout.groups

    def pooled(
        self, q: Tensor, k: Tensor, pool: int, scale: float, lengths: Tensor | None = None, sample: int = 1
    ) -> Tensor:
        """See `selection`."""
        rows = self.means(q, pool)
        lse = self.log_sum_exps(rows, k[:, :, ::sample], scale, lengths, sample)
        return self._codes(rows, k, lse, pool, False, scale)

    def means(self, q: Tensor, pool: int) -> Tensor:
        """Means of `pool` consecutive queries each, [B, H, P, D]."""
        return q if pool == 1 else self._launch("_start_means", pool)(q)

    def log_sum_exps(
        self, rows: Tensor, k: Tensor, scale: float, lengths: Tensor | None = None, sample: int = 1
    ) -> Tensor:
        """Log2-sum-exp2 of the scores of rows [B, H, P, D], float32 [B, H, ranges of keys, P]; each of the keys is one
        of `sample`."""
        known = self._all(k.shape[2]) if lengths is None else lengths
        return self._launch("_start_lse", sample, self.layout.keys, 0.0, scale)(rows, k, known)

    def column(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor | None,
        step: int,
        largest: bool,
        scale: float,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """See `selection`."""
        rows = q[:, :, ::step]
        if lse is None:
            return self._codes(rows, k, self.log_sum_exps(rows, k, scale, lengths), step, largest, scale)
        return self._codes(rows, k, lse[:, :, None, ::step], step, largest, scale, LOG2_E)

    def blocks(self, q: Tensor, k: Tensor, block: int, similarity: float, scale: float) -> Tensor:
        """See `selection`."""
        layout = self.layout
        k = k[:, :, layout.first : layout.keys - layout.last]
        groups = layout.groups, math.ceil(k.shape[2] / block)
        alike = [q.new_empty(layout.batch, layout.heads, n, dtype=torch.float32) for n in groups]
        means = [
            self._launch("_start_means", n)(x, cosine)
            for x, n, cosine in zip((q, k), (layout.rows, block), alike, strict=True)
        ]
        n_tokens = self.layout.keys - self.layout.first - self.layout.last
        lse = self._launch("_start_lse", block, n_tokens, similarity, scale)(*means, self._all(groups[1]), alike[1])
        coded = self._launch("_start_block_codes", similarity, scale)(*means, lse, *alike)
        return self._launch("_start_spread", block)(coded)

    def given(self, mask: Tensor) -> Tensor:
        """See `selection`."""
        return self._launch("_start_given")(mask.view(torch.uint8))

    def random(self, seed: int) -> Tensor:
        """See `selection`."""
        codes = self._empty_codes(self.layout.keys)
        return self._launch("_start_random", seed)(codes)

    def select(self, codes: Tensor, rule: "Rule", keys: Tensor, counts: Tensor, lengths: Tensor | None = None) -> None:
        """See `selection`."""
        known = self._all(self.layout.keys) if lengths is None else lengths
        if rule.width > 1:
            codes = self._launch("_start_runs", rule.width)(codes, known)
        counted = self._numbers(rule.counts(self.layout.heads))
        self._launch("_start_select", rule)(keys, counts, codes, known, self._always(rule.always), counted)

    def _form(self, x):
        """The `Config` for tokens of a type."""
        return self._config or forms.PREDICTION[x.dtype.itemsize]

    def _codes(self, rows, k, lse, step, largest, scale, lse_log2=1.0):
        config, of_group = self._form(k), self.layout.rows // step
        fits = of_group >= code_kernels.FEWEST_ROWS and of_group * code_kernels.FEWEST_GROUPS <= config.block_m
        start = "_start_codes_by_keys" if fits else "_start_codes"
        return self._launch(start, step, largest, scale, lse_log2)(rows, k, lse)

    def _empty_codes(self, n):
        layout = self.layout
        shape = layout.batch, layout.heads, layout.groups, padded(n)
        return torch.empty(shape, dtype=torch.uint8, device=self._device)[..., :n]

    def _always(self, ranges):
        """int32 [2 * ranges]: ranges of units, one of none where there are none."""
        return self._numbers(number for one in ranges or ((0, 0),) for number in one)

    def _all(self, n_keys):
        """Lengths of batch entries that have all keys."""
        return lasting(self._all_of(n_keys))

    def _numbers(self, numbers):
        """int32 [n] of integers."""
        return lasting(self._numbers_of(tuple(numbers)))

    @lru_cache(KEYS)  # noqa: B019
    def _numbers_of(self, numbers):
        made = partial(torch.tensor, numbers, dtype=torch.int32, device=self._device)
        return lasting_memory(self._device, made)

    @lru_cache(KEYS)  # noqa: B019
    def _all_of(self, n_keys):
        made = partial(torch.full, (self.layout.batch,), n_keys, dtype=torch.int32, device=self._device)
        return lasting_memory(self._device, made)

    # What a `CachedLaunch` starts: each returns the result, the compiled kernel, its grid and what follows the tensors.

    def _start_means(self, n, x, cosine=None):
        batch, heads, tokens, head_dim = x.shape
        rows = math.ceil(tokens / n)
        mean = x.new_empty(batch, heads, rows, head_dim)
        block_t = min(n, AVERAGED)
        block_r = AVERAGED // block_t
        arguments = (*x.stride()[:3], tokens, rows, heads, n, head_dim, block_r, block_t)
        grid = batch * heads * math.ceil(rows / block_r)
        compiled = selection_kernels.tilewright_slice_means[(grid,)](mean, x, cosine, *arguments, num_warps=MEAN_WARPS)
        return mean, compiled, grid, arguments if cosine is not None else (None, *arguments)

    def _start_lse(self, size, n_tokens, similarity, scale, rows, k, lengths, alike=None):
        batch, heads, n_rows, head_dim = rows.shape
        n_keys, config = k.shape[2], self._form(k)
        tiles = math.ceil(n_rows / config.block_m)
        # A key that stands for several is one of few: they are shared out to as many programs.
        least = min(LEAST_SPLIT, max(2 * config.block_n, LEAST_SPLIT // size))
        splits = max(1, min(SPLITS, n_keys // least, math.ceil(PROGRAMS / (HEADS * tiles))))
        split = math.ceil(n_keys / splits / config.block_n) * config.block_n
        splits = math.ceil(n_keys / split)
        lse = rows.new_empty(batch, heads, splits, n_rows, dtype=torch.float32)
        strides = (*rows.stride()[:3], *k.stride()[:3])
        sizes = (n_rows, n_keys, n_tokens, heads, scale * LOG2_E, similarity)
        blocks = (config.block_m, config.block_n, splits, split, config.num_stages)
        arguments = (*strides, *sizes, size, head_dim, *blocks)
        grid = batch * heads * splits * tiles
        compiled = selection_kernels.tilewright_slice_lse[(grid,)](
            lse, rows, k, lengths, alike, *arguments, num_warps=config.num_warps
        )
        return lse, compiled, grid, arguments if alike is not None else (None, *arguments)

    def _start_block_codes(self, similarity, scale, rows, k, lse, q_alike, k_alike):
        return self._start_codes(self.layout.rows, False, scale, 1.0, rows, k, lse, q_alike, k_alike, similarity)

    def _start_codes(
        self, step, largest, scale, lse_log2, rows, k, lse, q_alike=None, k_alike=None, similarity=0.0
    ):  # fmt: skip
        config, of_group = self._form(k), self.layout.rows // step
        block_r = min(of_group, config.block_m)
        block_g = config.block_m // block_r
        codes, grid, sizes, splitting = self._split(rows, k, lse, block_g, config.block_n, config.num_stages)
        scales = (scale * LOG2_E, lse_log2, similarity)
        constants = (of_group, step, largest, rows.shape[3], block_g, block_r, config.block_n, *splitting)
        arguments = (*sizes, *scales, *constants)
        given = codes, rows, k, lse, q_alike, k_alike
        num_warps = config.alone_warps if of_group == 1 and not largest else config.num_warps
        compiled = selection_kernels.tilewright_slice_codes[(grid,)](*given, *arguments, num_warps=num_warps)
        return codes, compiled, grid, arguments if k_alike is not None else (None, None, *arguments)

    def _start_codes_by_keys(self, step, largest, scale, lse_log2, rows, k, lse):
        config, of_group = self._form(k), self.layout.rows // step
        block_g = config.block_m // of_group
        codes, grid, sizes, splitting = self._split(rows, k, lse, block_g, config.keyed, config.keyed_stages)
        constants = (of_group, step, largest, rows.shape[3], block_g, config.keyed, *splitting)
        arguments = (*sizes, scale * LOG2_E, lse_log2, *constants)
        compiled = code_kernels.tilewright_slice_codes_by_keys[(grid,)](
            codes, rows, k, lse, *arguments, num_warps=config.keyed_warps
        )
        return codes, compiled, grid, arguments

    def _split(self, rows, k, lse, block_g, block_n, num_stages):
        """``(codes, grid, strides and sizes, how lse and keys are split)`` of programs that take so many groups, and so
        many keys a step."""
        layout, n_keys, splits = self.layout, k.shape[2], lse.shape[2]
        batch, heads, n_rows, _ = rows.shape
        codes, tiles = self._empty_codes(n_keys), math.ceil(layout.groups / block_g)
        chunk = math.ceil(batch * heads * tiles * math.ceil(n_keys / block_n) / PROGRAMS) * block_n
        # [B, H, splits, P]; a stride of one split is never used.
        strides = (*rows.stride()[:3], *k.stride()[:3], *lse.stride(), codes.stride(2))
        sizes = (*strides, n_rows, n_keys, layout.queries, layout.groups, heads)
        grid = batch * heads * math.ceil(n_keys / chunk) * tiles
        return codes, grid, sizes, (splits, triton.next_power_of_2(splits), chunk, num_stages)

    def _start_spread(self, block, coded):
        n = self.layout.keys
        codes = self._empty_codes(n)
        arguments = (n, self.layout.first, n - self.layout.last, codes.stride(2), coded.stride(2), block, MOVED)
        grid = self._lists * math.ceil(n / MOVED)
        return (codes, selection_kernels.tilewright_slice_spread[(grid,)](codes, coded, *arguments), grid, arguments)

    def _start_given(self, mask):
        layout = self.layout
        codes = self._empty_codes(layout.keys)
        # A dimension of one entry stands for all.
        strides = (
            0 if n == 1 else stride
            for n, stride in zip(mask.shape, mask.stride(), strict=True)
        )  # fmt: skip
        arguments = (*strides, layout.keys, layout.groups, layout.heads, codes.stride(2), MOVED)
        grid = self._lists * math.ceil(layout.keys / MOVED)
        return codes, selection_kernels.tilewright_slice_given[(grid,)](codes, mask, *arguments), grid, arguments

    def _start_random(self, seed, codes):
        arguments = (self.layout.keys, seed, codes.stride(2), MOVED)
        grid = self._lists * math.ceil(self.layout.keys / MOVED)
        return codes, selection_kernels.tilewright_slice_random[(grid,)](codes, *arguments), grid, arguments

    def _start_runs(self, width, codes, lengths):
        units = math.ceil(self.layout.keys / width)
        runs = self._empty_codes(units)
        block = max(1, MOVED // width)
        of_entry = self._lists // self.layout.batch
        arguments = (self.layout.keys, units, of_entry, runs.stride(2), codes.stride(2), width, block)
        grid = self._lists * math.ceil(units / block)
        compiled = selection_kernels.tilewright_slice_runs[(grid,)](runs, codes, lengths, *arguments)
        return runs, compiled, grid, arguments

    def _start_select(self, rule, keys, counts, codes, lengths, always, counted):
        units = codes.shape[3]
        stated = (0 if rule.mass is None else rule.mass_units, -1 if rule.code is None else rule.code)
        of_entry = self._lists // self.layout.batch
        sizes = (self.layout.keys, of_entry, self.layout.groups, len(rule.always), *stated, rule.least, rule.most)
        chosen_by = (rule.mass is not None, rule.code is not None, bool(rule.always), rule.free, rule.known, rule.width)
        least = triton.next_power_of_2(math.ceil(units / selection_kernels.MOST_BLOCKS))
        block = min(max(64, COUNTED // rule.width, least), max(64, triton.next_power_of_2(units)))
        arguments = (*sizes, keys.shape[-1], codes.stride(2), *chosen_by, block)
        compiled = selection_kernels.tilewright_slice_select[(self._lists,)](
            keys, counts, codes, lengths, always, counted, *arguments, num_warps=COUNT_WARPS
        )
        return keys, compiled, self._lists, arguments
