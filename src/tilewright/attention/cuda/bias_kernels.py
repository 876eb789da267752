"""A bias as kernels for NVIDIA GPUs: its values as a work list's kernels read them, and its gradient.

`tilewright_bias_peaks` finds the greatest bias of each row in each step, `tilewright_bias_tiles` that of each row in
all steps of its family, and writes the tiles; `tilewright_spread_peaks` gives each query that of its row. The first two
read the table through the lists' own indices: nothing waits for the device, and a CUDA graph that holds them sees the
values of each replay.

`tilewright_bias_gradients` walks the steps of a work list that share a tile of the bias, and sums the gradients of
their scores in registers, [BLOCK_M, BLOCK_N]. `tilewright_fold_tiles` adds up what several programs leave of a tile,
and `tilewright_sum_lists` the pairs of each entry of the table. There are no atomics: all sums have one order.

Names are those of `backward_kernels`.
"""

import triton
import triton.language as tl

from tilewright.devices.cuda.online_softmax import load_rows, products

# Fields of a use: the first row of its item, its rows, its step of keys, the first head of its unit. Of a part: its
# tile, first use, uses.
USE_SIZE, PART_SIZE = tl.constexpr(4), tl.constexpr(4)
# No bias is further below the greatest of its row: it weighs nothing there. A step, or a part of a split block, in
# which all keys are as low has weights of its own first. What rounding leaves of their scores, at most half of the 128
# between two floats of this size in base 2, is the exponent of finite numbers, which are then multiplied by zero; that
# of -1e20 is not.
LOWEST = tl.constexpr(-(2.0**30))


@triton.jit(do_not_specialize=["n_parts", "batch", "n_groups", "n_queries"])
def tilewright_bias_gradients(
    q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, sum_ptr,
    use_ptr, part_ptr, row_ptr, key_ptr, bias_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gn,
    n_parts, batch, n_groups, n_queries, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    HEADS: tl.constexpr, MASK_HEADS: tl.constexpr, ORDERED: tl.constexpr, SIGN: tl.constexpr,
    NUM_STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """See the module. Grid: (n_groups * MASK_HEADS, parts, layers of parts), groups of images side by side.

    batch: images that each use has. MASK_HEADS: heads that tiles have of their own; a use has each of them, from the
    first head of its unit on. lse_ptr, delta_ptr: as `tilewright_query_gradients` leaves them. sum_ptr [n_groups,
    n_parts, MASK_HEADS, BLOCK_M, BLOCK_N]. use_ptr [uses, USE_SIZE], those of a part side by side; part_ptr [n_parts,
    PART_SIZE]. row_ptr, key_ptr: as of that kernel. bias_ptr [tiles, MASK_HEADS, BLOCK_M, BLOCK_N], its tiles with
    RANK 0.
    """
    group, h = tl.program_id(0) // MASK_HEADS, tl.program_id(0) % MASK_HEADS
    part = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    if part >= n_parts:
        return
    if WIDE:
        stride_qn, stride_kn = tl.cast(stride_qn, tl.int64), tl.cast(stride_kn, tl.int64)
        stride_vn, stride_gn = tl.cast(stride_vn, tl.int64), tl.cast(stride_gn, tl.int64)
    p_part = part_ptr + part * PART_SIZE
    tile, first_use, n_uses = tl.load(p_part), tl.load(p_part + 1), tl.load(p_part + 2)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    at = m[:, None] * BLOCK_N + n[None, :]
    b_bias = tl.load(bias_ptr + (tile.to(tl.int64) * MASK_HEADS + h) * (BLOCK_M * BLOCK_N) + at)  # [BLOCK_M, BLOCK_N]
    first_image = group * batch // n_groups
    images = (group + 1) * batch // n_groups - first_image
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for j in tl.range(0, n_uses * images, num_stages=NUM_STAGES):
        p_use = use_ptr + (first_use + j % n_uses) * USE_SIZE
        first_row, n_rows, step = tl.load(p_use), tl.load(p_use + 1), tl.load(p_use + 2)
        hb = tl.load(p_use + 3) + h + (first_image + j // n_uses) * HEADS
        b, head = (hb // HEADS).to(tl.int64), (hb % HEADS).to(tl.int64)
        rows = first_row + tl.minimum(m, n_rows - 1)
        if not ORDERED:
            rows = tl.load(row_ptr + rows)
        keys = tl.load(key_ptr + step.to(tl.int64) * BLOCK_N + n)  # [BLOCK_N]
        of_head = hb.to(tl.int64) * n_queries
        lse, delta = tl.load(lse_ptr + of_head + rows), tl.load(delta_ptr + of_head + rows)  # [BLOCK_M]
        # Rows beyond the last have no weights.
        lse = tl.where(m < n_rows, lse, float("inf"))
        b_q0, b_q1 = load_rows(q_ptr + b * stride_qb + head * stride_qh, rows, stride_qn, HEAD_DIM, D0, D1)
        b_k0, b_k1 = load_rows(k_ptr + b * stride_kb + head * stride_kh, keys, stride_kn, HEAD_DIM, D0, D1)
        b_s = products(b_q0, b_q1, b_k0, b_k1, D1)
        b_s = b_s * SIGN + b_bias
        b_g0, b_g1 = load_rows(g_ptr + b * stride_gb + head * stride_gh, rows, stride_gn, HEAD_DIM, D0, D1)
        b_v0, b_v1 = load_rows(v_ptr + b * stride_vb + head * stride_vh, keys, stride_vn, HEAD_DIM, D0, D1)
        b_dp = products(b_g0, b_g1, b_v0, b_v1, D1) - delta[:, None]
        acc += tl.exp2(b_s * scale_log2 - lse[:, None]) * b_dp
    sums = (group.to(tl.int64) * n_parts + part) * MASK_HEADS + h
    tl.store(sum_ptr + sums * (BLOCK_M * BLOCK_N) + at, acc)


@triton.jit(do_not_specialize=["n_parts", "n_groups", "begin"])
def tilewright_fold_tiles(
    sum_ptr, out_ptr, first_ptr, n_parts, n_groups, begin, stride_h,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of each tile, over all groups, PARTS at a time. Grid: (tiles * HEADS, SIZE / BLOCK rounded up).

    sum_ptr [n_groups, n_parts, HEADS, SIZE]. first_ptr [tiles + 1]: the first part of each tile. out_ptr: float32,
    heads stride_h apart, tiles side by side from `begin` on.
    """
    tile, h = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, end = tl.load(first_ptr + tile), tl.load(first_ptr + tile + 1)
    p = tl.arange(0, PARTS)
    acc = tl.zeros((PARTS, BLOCK), tl.float32)
    for group in range(n_groups):
        for lo in range(first, end, PARTS):
            p_sum = sum_ptr + ((group * n_parts + lo + p).to(tl.int64) * HEADS + h)[:, None] * SIZE
            acc += tl.load(p_sum + at[None, :], mask=(lo + p < end)[:, None] & (at < SIZE)[None, :], other=0.0)
    p_out = out_ptr + h.to(tl.int64) * stride_h + begin + tile.to(tl.int64) * SIZE
    tl.store(p_out + at, tl.sum(acc, 0), mask=at < SIZE)


@triton.jit(do_not_specialize=["n_lists", "stride_x", "stride_out"])
def tilewright_sum_lists(
    x_ptr, out_ptr, at_ptr, list_ptr, n_lists, stride_x, stride_out,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Sums of the values at listed places. Grid: (n_lists / BLOCK_R rounded up, heads).

    x_ptr, out_ptr: float32, heads stride_x and stride_out apart. at_ptr: int32, the places of all lists. list_ptr int32
    [n_lists, 3]: where a list begins, how long it is, and where its sum goes; neighbours are about as long.
    """
    h = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    w = tl.arange(0, BLOCK_W)
    m_list = r < n_lists
    begin = tl.load(list_ptr + r * 3, mask=m_list, other=0)  # [BLOCK_R]
    count = tl.load(list_ptr + r * 3 + 1, mask=m_list, other=0)  # [BLOCK_R]
    into = tl.load(list_ptr + r * 3 + 2, mask=m_list, other=0)  # [BLOCK_R]
    acc = tl.zeros((BLOCK_R, BLOCK_W), tl.float32)
    for lo in range(0, tl.max(count, 0), BLOCK_W):
        m_at = (lo + w)[None, :] < count[:, None]
        places = tl.load(at_ptr + begin[:, None] + (lo + w)[None, :], mask=m_at, other=0)  # [BLOCK_R, BLOCK_W]
        acc += tl.load(x_ptr + h * stride_x + places, mask=m_at, other=0.0)
    tl.store(out_ptr + h * stride_out + into, tl.sum(acc, 1), mask=m_list)


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
