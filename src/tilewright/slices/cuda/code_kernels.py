"""Codes of slices on an NVIDIA GPU (stage T5) where several rows of queries stand for a group: the kernel whose sums
over a group's rows stay in registers.

`selection_kernels.tilewright_slice_codes` multiplies rows by keys. A tensor core leaves the rows of a product to
different threads, so that a sum over some of them goes through shared memory, as float32. Here keys are multiplied by
rows, and the rows of a group stand where one thread has their products.
"""

import triton
import triton.language as tl

from tilewright.slices import selection
from tilewright.slices.cuda.selection_kernels import NEARLY_HALF, fast_log2, group_rows, nearest_codes

CODES, OCTAVE = tl.constexpr(selection.CODES), tl.constexpr(selection.OCTAVE)
# Of each row of a product, a thread has two columns of every eight: four threads share a row.
PAIR, THREADS = tl.constexpr(2), tl.constexpr(4)
# Rows of a group, and groups, of one product at least.
FEWEST_ROWS, FEWEST_GROUPS = PAIR.value, THREADS.value


@triton.jit(do_not_specialize=["n_rows", "n_keys", "n_queries", "n_groups"])
def tilewright_slice_codes_by_keys(
    code_ptr, q_ptr, k_ptr, lse_ptr, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_lb,
    stride_lh, stride_ls, stride_ln, stride_c, n_rows, n_keys, n_queries, n_groups, heads, scale_log2, lse_log2,
    OF_GROUP: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MOST_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Codes of all keys for groups of OF_GROUP rows of q, a power of two. Grid: (batch * heads * chunks of keys * tiles
    of groups,).

    Arguments as of `tilewright_slice_codes`. BLOCK_G: groups of one product, a power of two.
    """
    tiles = tl.cdiv(n_groups, BLOCK_G)
    chunks = tl.cdiv(n_keys, CHUNK)
    tile = tl.program_id(0) % tiles
    chunk = tl.program_id(0) // tiles % chunks
    bh = tl.program_id(0) // (tiles * chunks)
    # Columns of a product: four groups side by side, of each two rows, then the next two rows of these groups.
    PAIRS: tl.constexpr = OF_GROUP // PAIR
    c = tl.arange(0, BLOCK_G * OF_GROUP)
    of_tile = c // (PAIR * THREADS * PAIRS) * THREADS + c // PAIR % THREADS
    row = (tile * BLOCK_G + of_tile) * OF_GROUP + c // (PAIR * THREADS) % PAIRS * PAIR + c % PAIR
    groups = tile * BLOCK_G + tl.arange(0, BLOCK_G)
    lse_ptr += (bh // heads).to(tl.int64) * stride_lb + (bh % heads).to(tl.int64) * stride_lh
    code_ptr += (bh * n_groups).to(tl.int64) * stride_c
    tokens = q_ptr, k_ptr, lse_ptr, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_ls, stride_ln
    sizes = n_rows, n_queries, heads, lse_log2
    b_q, k_ptr, b_l = group_rows(tokens, sizes, bh, row, OF_GROUP, SIZE, LARGEST, HEAD_DIM, SPLITS, MOST_SPLITS)
    b_q = tl.trans(b_q)  # [HEAD_DIM, BLOCK_G * OF_GROUP]
    d = tl.arange(0, HEAD_DIM)
    for lo in tl.range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, n_keys), BLOCK_N, num_stages=NUM_STAGES):
        n = lo + tl.arange(0, BLOCK_N)
        p_k = k_ptr + tl.minimum(n, n_keys - 1).to(tl.int64)[:, None] * stride_kn + d[None, :]
        b_x = tl.dot(tl.load(p_k), b_q, input_precision="ieee") * scale_log2 - b_l[None, :]
        b_m = _over_rows(b_x, LARGEST, BLOCK_G, PAIRS, BLOCK_N)  # [BLOCK_N, BLOCK_G]
        b_c = (b_m if LARGEST else fast_log2(b_m)) * -OCTAVE - NEARLY_HALF
        # NaN, and what stands for it among maxima, is no share.
        b_c = nearest_codes(tl.where((b_c == b_c) & (b_c > -float("inf")), b_c, CODES - 1.0))
        p_code = code_ptr + groups.to(tl.int64)[None, :] * stride_c + n[:, None]
        tl.store(p_code, b_c, mask=(groups < n_groups)[None, :] & (n < stride_c)[:, None])


@triton.jit
def _over_rows(b_x, LARGEST: tl.constexpr, BLOCK_G: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The log2 of the largest share of a group's rows, or the sum of their shares, [BLOCK_N, BLOCK_G].

    b_x: log2 of shares, [BLOCK_N, columns]. Where one is NaN, the largest is infinite.
    """
    b_x = tl.where(b_x == b_x, b_x, float("inf")) if LARGEST else tl.exp2(b_x)
    b_x = tl.reshape(b_x, (BLOCK_N, BLOCK_G // THREADS, PAIRS, THREADS, PAIR))
    # Of two rows first: both are one thread's.
    b_m = tl.max(tl.max(b_x, 4), 2) if LARGEST else tl.sum(tl.sum(b_x, 4), 2)
    return tl.reshape(b_m, (BLOCK_N, BLOCK_G))
