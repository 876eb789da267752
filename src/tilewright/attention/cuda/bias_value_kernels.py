"""The values of a bias as a work list's kernels read them, from its table (stage T5).

`tilewright_bias_peaks` finds the greatest bias of each row in each step, `tilewright_bias_tiles` that of each row in
all steps of its family, and writes the tiles; `tilewright_spread_peaks` gives each query that of its row. The first two
read the table through the lists' own indices: nothing waits for the device, and a CUDA graph that holds them sees the
values of each replay.
"""

import triton
import triton.language as tl

# No bias is further below the greatest of its row: it weighs nothing there. A step, or a part of a split block, in
# which all keys are as low has weights of its own first. What rounding leaves of their scores, at most half of the 128
# between two floats of this size in base 2, is the exponent of finite numbers, which are then multiplied by zero; that
# of -1e20 is not.
LOWEST = tl.constexpr(-(2.0**30))


@triton.jit(do_not_specialize=["n_entries"])
def tilewright_bias_peaks(
    table_ptr, step_ptr, index_ptr, n_entries,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The greatest bias of each row of each tile, -inf for none. Grid: (tiles * HEADS,).

    table_ptr [HEADS, n_entries], of any float type. index_ptr int32 [tiles, BLOCK_M, BLOCK_N]: the entry of each pair,
    negative where it is not allowed. step_ptr: float32 [tiles, HEADS, BLOCK_M].
    """
    tile, h = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    m = tl.arange(0, BLOCK_M)
    b_bias = values_of(table_ptr, index_ptr, tile, h, n_entries, BLOCK_M, BLOCK_N)
    tl.store(step_ptr + (tile.to(tl.int64) * HEADS + h) * BLOCK_M + m, tl.max(b_bias, 1))


@triton.jit(do_not_specialize=["n_entries"])
def tilewright_bias_tiles(
    table_ptr, tile_ptr, step_ptr, peak_ptr, index_ptr, family_ptr, first_ptr, member_ptr, n_entries, inv_scale,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RELATIVE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Tiles of a bias, float32 [tiles, HEADS, BLOCK_M, BLOCK_N], -inf where a pair is not allowed. Grid: as above.

    table_ptr, index_ptr, step_ptr: as of `tilewright_bias_peaks`. RELATIVE: less the greatest bias of each row in its
    family, at least LOWEST, times inv_scale; that greatest goes to peak_ptr, float32 [families, HEADS, BLOCK_M], 0
    where there is none. family_ptr [tiles]; member_ptr: the tiles of each family side by side, from first_ptr
    [families + 1] on, STEPS read at a time.
    """
    tile, h = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    b_bias = values_of(table_ptr, index_ptr, tile, h, n_entries, BLOCK_M, BLOCK_N)
    if RELATIVE:
        family = tl.load(family_ptr + tile)
        first, end = tl.load(first_ptr + family), tl.load(first_ptr + family + 1)
        s = tl.arange(0, STEPS)
        most = tl.full((STEPS, BLOCK_M), -float("inf"), tl.float32)
        for lo in range(first, end, STEPS):
            m_steps = lo + s < end
            other = tl.load(member_ptr + lo + s, mask=m_steps, other=0).to(tl.int64)  # [STEPS]
            p_step = step_ptr + ((other * HEADS + h) * BLOCK_M)[:, None] + m[None, :]
            most = tl.maximum(most, tl.load(p_step, mask=m_steps[:, None], other=-float("inf")))
        peak = tl.max(most, 0)  # [BLOCK_M]
        peak = tl.where(peak == -float("inf"), 0.0, peak)
        if tile == tl.load(member_ptr + first):
            tl.store(peak_ptr + (family.to(tl.int64) * HEADS + h) * BLOCK_M + m, peak)
        b_bias = tl.where(b_bias == -float("inf"), b_bias, tl.maximum(b_bias - peak[:, None], LOWEST)) * inv_scale
    p_tile = tile_ptr + (tile.to(tl.int64) * HEADS + h) * (BLOCK_M * BLOCK_N)
    tl.store(p_tile + m[:, None] * BLOCK_N + n[None, :], b_bias)


@triton.jit(do_not_specialize=["n"])
def tilewright_spread_peaks(peak_ptr, out_ptr, source_ptr, n, BLOCK: tl.constexpr):
    """Values of peak_ptr for `n` places of out_ptr. Grid: (n / BLOCK rounded up,). source_ptr int32 [n]: where."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_there = i < n
    source = tl.load(source_ptr + i, mask=m_there, other=0)
    tl.store(out_ptr + i, tl.load(peak_ptr + source, mask=m_there, other=0.0), mask=m_there)


@triton.jit
def values_of(table_ptr, index_ptr, tile, h, n_entries, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The bias of the pairs of a tile, float32 [BLOCK_M, BLOCK_N]."""
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    p_index = index_ptr + tile.to(tl.int64) * (BLOCK_M * BLOCK_N)
    b_index = tl.load(p_index + m[:, None] * BLOCK_N + n[None, :])
    p_table = table_ptr + h.to(tl.int64) * n_entries
    return tl.load(p_table + b_index, mask=b_index >= 0, other=-float("inf")).to(tl.float32)
