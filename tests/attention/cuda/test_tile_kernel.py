"""The GPU's kernel against the oracle: on a GPU where there is one, else under Triton's interpreter."""

import mmap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import plans
from helpers.gpu import TRITON_DEVICE as DEVICE
from helpers.gpu import cases
from tilewright import graph, masks, reference
from tilewright.attention import blocks, reorder
from tilewright.attention.blocks import tiles, work
from tilewright.attention.cuda import config, mask_factors, tile_lists
from tilewright.attention.cuda import executor as cuda_executor
from tilewright.attention.cuda.tile_lists import Item
from tilewright.attention.masks import Bias
from tilewright.core.errors import DeviceError, PatternError

H = 2
# bfloat16 is silently wrong under some releases of the interpreter.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def tokens(n_q, n_k, head_dim, batch=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, H, n, head_dim, generator=generator).to(DEVICE, dtype) for n in (n_q, n_k, n_k)]


def check(dense, names, *, head_dim=32, batch=1, dtype=torch.float32, **options):
    """Run a random order and schedule and compare with the reference; return the executor."""
    qkv = tokens(*dense.shape, head_dim, batch, dtype)
    call, inputs, expected = plans.prepared(
        cuda_executor.prepare, dense, names, qkv, region_rows=64, device=DEVICE, **options
    )
    for _ in range(2):
        # Twice: the counters of split blocks are to be as they were.
        result = call(*inputs).cpu()
        assert result.dtype == dtype and not result.isnan().any()
        assert reference.relative_error(result, expected) <= reference.TOLERANCE[dtype]
    return call


@pytest.mark.parametrize(
    "names, dtype", cases([["16x1"], ["32x1", "64x1"], ["16x16"], ["64x64", "16x1"], ["128x1"]], DTYPES), ids=str
)
def test_tiles(names, dtype):
    check(plans.pattern(100, 90), names, dtype=dtype)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 96, 128])
def test_head_dims(head_dim):
    check(plans.pattern(70, 90), ["16x1", "32x1"], head_dim=head_dim, dtype=torch.float16)


@pytest.mark.parametrize("head_dim, dtype", cases([8, 24, 40, 72, 80, 112, 160, 256], DTYPES), ids=str)
def test_head_dims_that_no_powers_of_two_make_up_are_padded(head_dim, dtype):
    check(plans.pattern(40, 70, n_global=1), ["16x1", "16x16"], head_dim=head_dim, dtype=dtype, split_keys=32)


def test_head_dims_are_loaded_as_few_values():
    exact = {16: (16, 0), 32: (32, 0), 48: (32, 16), 64: (64, 0), 80: (64, 16), 96: (64, 32), 128: (128, 0)}
    assert exact.items() <= config.HEAD_DIMS.items()
    assert config.HEAD_DIMS[72] == (64, 16) and config.HEAD_DIMS[200] == (256, 0)


@pytest.mark.parametrize("n_global, head_dim", cases([1, 9], [32, 48]))
def test_split_rows_are_merged(n_global, head_dim):
    call = check(plans.pattern(70, 200, 0.1, n_global=n_global), ["16x1"], split_keys=32, head_dim=head_dim)
    assert call.launches[0].lists.groups > 0


def test_ordered_batches():
    check(plans.pattern(70, 70), ["16x1", "16x16"], batch=3, ordered=True, split_keys=32)


@pytest.mark.parametrize("scale", [1.0, 0, -0.5])
def test_scale(scale):
    check(plans.pattern(40, 40), ["16x1"], scale=scale)
    bias = torch.randn(H, 40, 40, generator=torch.Generator().manual_seed(1))
    check(plans.pattern(40, 40), ["16x1"], scale=scale, bias=bias)


@pytest.mark.parametrize("scale", [1e-9, -1e9, torch.nan])
def test_scales_beyond_what_float32_tells_apart_are_refused(scale):
    with pytest.raises(PatternError, match="scale: expected 0 or a size from 1e-06 to 1e"):
        check(plans.pattern(40, 40), ["16x1"], scale=scale)


def test_windows_become_factors():
    ordered, _ = reorder.apply(masks.build("vil-tiny-96-s1-exact"), "window")
    cover = blocks.extract(ordered, tiles.parse("64x1"))
    items = work.items(cover, None)
    assert tile_lists.build(cover, items.block, items.run_lo, items.run_hi, 64).rank == 16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_without_factors_become_bytes(dtype):
    rng = np.random.default_rng(0)
    call = check(rng.random((64, 100)) < 0.5, ["64x1"], dtype=dtype)
    assert [launch.lists.rank for launch in call.launches] == [tile_lists.BYTES] * len(call.launches)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["band", "causal"])
@pytest.mark.parametrize("split_keys", [None, 128])
def test_bands_become_intervals(kind, split_keys, dtype):
    at = np.arange(160)
    dense = np.abs(at[:, None] - at) <= 50 if kind == "band" else at[:, None] >= at
    # A row that sees all keys, and one that sees none.
    dense[70], dense[90] = True, False
    (launch,) = check(dense, ["64x1"], dtype=dtype, split_keys=split_keys, seed=None, rounds=1).launches
    assert launch.lists.rank == tile_lists.INTERVALS
    assert launch.lists.groups > 0 or split_keys is None


@pytest.mark.parametrize("kind", ["table", "dense"])
def test_bias(kind):
    dense = plans.pattern(50, 60)
    generator = torch.Generator().manual_seed(1)
    if kind == "table":
        bias = Bias(torch.randn(H, 7, generator=generator), lambda rows, cols: (rows + 3 * cols) % 7)
    else:
        bias = torch.randn(H, 50, 60, generator=generator)
    check(dense, ["16x1", "16x16"], bias=bias, split_keys=32)


@pytest.mark.parametrize("keys", [60, 64, 100, 160])
def test_keys_with_a_bias_of_minus_infinity_are_not_allowed(keys):
    bias = torch.zeros(H, 160, 160)
    bias[:, :, :keys] = -torch.inf
    check(np.ones((160, 160), bool), ["64x1"], bias=bias)
    check(np.ones((160, 160), bool), ["16x1"], bias=bias, split_keys=64)


@pytest.mark.parametrize("size", [-1e6, 1e6])
def test_a_large_bias_that_all_keys_of_a_row_have_is_not_rounded(size):
    bias = torch.randn(H, 40, 90, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    bias[:, 10:] = size
    bias[:, 20:, :30] = 2 * size
    check(plans.pattern(40, 90, 0.5, n_global=2), ["16x1"], bias=bias, split_keys=32)


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_biases_of_any_size(data):
    n_q, n_k = data.draw(st.integers(17, 40)), data.draw(st.integers(32, 100))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    sizes = data.draw(st.lists(st.sampled_from([-np.inf, -1e9, -1e6, -30.0, 0.0, 1e6]), min_size=1, max_size=4))
    by_key, by_row = data.draw(st.booleans()), data.draw(st.booleans())
    shape = H, 1 if by_key else n_q, 1 if by_row else n_k
    bias = torch.from_numpy(np.broadcast_to(rng.choice(sizes, shape), (H, n_q, n_k)).astype(np.float32))
    options = {
        "scale": data.draw(st.sampled_from([None, 0, -1.0])),
        "split_keys": data.draw(st.sampled_from([None, 32])),
    }
    check(plans.pattern(n_q, n_k, 0.6, seed=int(rng.integers(99))), ["16x1", "16x16"], bias=bias, **options)


def test_a_fused_projection_is_taken_as_it_lies():
    dense = plans.pattern(50, 50)
    pattern = plans.reordered(dense)
    cover = plans.covers(pattern, ["16x1"])
    qkv = torch.randn(2, 50, 3, H, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    orders = {"row_order": pattern.row_order, "col_order": pattern.col_order}
    sizes = {"heads": H, "head_dim": 32, "dtype": torch.float32, "device": DEVICE}
    result = cuda_executor.prepare(plans.scheduled(cover), cover, **sizes, **orders)(q, k, v)
    expected = reference.attention(q.cpu(), k.cpu(), v.cpu(), torch.from_numpy(dense))
    assert reference.relative_error(result.cpu(), expected) <= reference.TOLERANCE[torch.float32]


def test_large_scores_are_exact():
    dense = np.tril(np.ones((40, 40), bool))[::-1].copy()
    pattern = plans.reordered(dense)
    cover = plans.covers(pattern, ["16x1"])
    sizes = {"heads": H, "head_dim": 32, "dtype": torch.float32, "device": DEVICE}
    orders = {"row_order": pattern.row_order, "col_order": pattern.col_order}
    q, k, v = tokens(40, 40, 32)
    result = cuda_executor.prepare(plans.scheduled(cover), cover, **sizes, **orders)(30 * q, 30 * k, v)
    expected = reference.attention(30 * q.cpu(), 30 * k.cpu(), v.cpu(), torch.from_numpy(dense))
    # Scores of some thousands: their rounding in float32 weighs as 1e-3 in the weights.
    assert (result.cpu().double() - expected).abs().max() <= 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["factors", "intervals", "bytes", "bias"])
def test_masks_hold_whatever_the_scores(kind, dtype):
    rng = np.random.default_rng(0)
    dense = np.tri(64, 100, 20, dtype=bool) if kind in ("factors", "intervals") else rng.random((64, 100)) < 0.5
    dense[3] = False
    pattern = plans.reordered(dense, seed=None if kind == "intervals" else 0)
    cover = plans.covers(pattern, ["64x1"], 64)
    # Products of up to some 10**7, exact in float32, and far above the 2**20 of a small mask.
    q, k = (torch.from_numpy(rng.integers(-3, 4, (1, H, n, 32)) * 256.0).to(DEVICE, dtype) for n in dense.shape)
    v = tokens(*dense.shape, 32, dtype=dtype)[2]
    bias = torch.zeros(H, *dense.shape) if kind == "bias" else None
    sizes = {"heads": H, "head_dim": 32, "dtype": dtype, "device": DEVICE}
    orders = {"row_order": pattern.row_order, "col_order": pattern.col_order, "bias": bias}
    schedule = plans.scheduled(cover, split_keys=None if kind in ("bytes", "intervals") else 32)
    call = cuda_executor.prepare(schedule, cover, **sizes, **orders)
    ranks = {"intervals": (tile_lists.INTERVALS,), "bytes": (tile_lists.BYTES,), "bias": (0,)}
    assert call.launches[0].lists.rank in ranks.get(kind, tile_lists.RANKS)
    expected = reference.attention(q.cpu(), k.cpu(), v.cpu(), torch.from_numpy(dense))
    assert (call(q, k, v).cpu().double() - expected).abs().max() <= reference.TOLERANCE[dtype]


@pytest.fixture
def far_apart(monkeypatch):
    """float16 memory for more than 2**31 values, little of which is touched."""
    n = 2_600_000_000
    if DEVICE == "cuda":
        return torch.empty(n, dtype=torch.float16, device=DEVICE)
    # The interpreter copies whole storages back.
    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
    return torch.frombuffer(mmap.mmap(-1, 2 * n, flags=mmap.MAP_PRIVATE), dtype=torch.float16)


@pytest.mark.parametrize(
    "strides", [(0, 16, 120_000_000), (0, 1_200_000_000, 48), (0, 1_200_000_000, 10_000_000)], ids=str
)
def test_offsets_beyond_32_bits(far_apart, strides):
    heads, n, d = (2, 20, 16) if strides[1] == 16 else (3, 20, 16)
    q, k, v = (far_apart.as_strided((1, heads, n, d), (*strides, 1), 200 * i) for i in range(3))
    if strides[1] > 16:
        k, v = (torch.empty(1, heads, n, d, dtype=torch.float16, device=DEVICE) for _ in range(2))
    for i, x in enumerate((q, k, v)):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(i)))
    dense = plans.pattern(n, n, 0.4)
    cover = plans.covers(graph.from_pattern(dense), ["16x1"])
    sizes = {"heads": heads, "head_dim": d, "dtype": torch.float16, "device": DEVICE}
    result = cuda_executor.prepare(plans.scheduled(cover), cover, **sizes)(q, k, v)
    expected = reference.attention(q.cpu(), k.cpu(), v.cpu(), torch.from_numpy(dense))
    assert (result.cpu().double() - expected).abs().max() <= reference.TOLERANCE[torch.float16]


@pytest.mark.parametrize("n_q", [1, 5, 15])
def test_fewer_queries_than_a_tile_has_rows(monkeypatch, n_q):
    # Which tiles a pattern may have is not the executor's to say.
    monkeypatch.setattr(tiles, "check_fits", lambda tile, shape: None)
    check(np.random.default_rng(0).random((n_q, 40)) < 0.5, ["16x1"], split_keys=16)


def test_an_empty_batch():
    cover = plans.covers(plans.reordered(plans.pattern(40, 50)), ["16x1"])
    sizes = {"heads": H, "head_dim": 32, "dtype": torch.float32, "device": DEVICE}
    call = cuda_executor.prepare(plans.scheduled(cover), cover, **sizes)
    assert call(*tokens(40, 50, 32, batch=0)).shape == (0, H, 40, 32)


@pytest.mark.skipif(DEVICE == "cpu", reason="compiles for a GPU, and this machine has none")
def test_batches_of_all_sizes_share_one_compiled_kernel():
    cover = plans.covers(plans.reordered(plans.pattern(40, 70)), ["16x1"])
    sizes = {"heads": H, "head_dim": 32, "dtype": torch.float32, "device": DEVICE}
    (launch,) = cuda_executor.prepare(plans.scheduled(cover, split_keys=32, rounds=1), cover, **sizes).launches
    compiled = set()
    for batch in range(1, 21):
        q, k, v = tokens(40, 70, 32, batch)
        compiled.add(launch(q, k, v, torch.empty_like(q)))
    assert len(compiled) == 1


WRONG = {
    "shape": (lambda q: q[:, :, :-1], PatternError, "expected shape"),
    "dtype": (lambda q: q.double(), PatternError, "expected dtype torch.float32 as planned, found torch.float64"),
    "stride": (lambda q: q.mT.contiguous().mT, PatternError, "expected stride 1"),
    "device": (lambda q: q.to("meta"), DeviceError, "as planned, found meta"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_tensors_than_planned_are_refused(case):
    change, error, message = WRONG[case]
    cover = plans.covers(plans.reordered(plans.pattern(40, 40)), ["16x1"])
    sizes = {"heads": H, "head_dim": 32, "dtype": torch.float32, "device": DEVICE}
    call = cuda_executor.prepare(plans.scheduled(cover), cover, **sizes)
    q, k, v = tokens(40, 40, 32)
    with pytest.raises(error, match=message):
        call(change(q), k, v)


def test_an_unknown_head_dim_is_refused():
    cover = plans.covers(plans.reordered(plans.pattern(40, 40)), ["16x1"])
    with pytest.raises(PatternError, match="head_dim: expected a multiple of 8 from 8 to 256 on a GPU, found 20"):
        cuda_executor.prepare(plans.scheduled(cover), cover, heads=H, head_dim=20, dtype=torch.float32, device=DEVICE)


# The lists, without the kernel.


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_factors_forbid_what_they_are_made_of(data):
    rows, keys, terms = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 20), st.integers(0, 5)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    forbidden = (rng.random((rows, terms)) < 0.4) @ (rng.random((terms, keys)) < 0.4)
    a, b = mask_factors.factors(forbidden, rows)
    assert np.array_equal((a.astype(int) @ b.astype(int)) > 0, forbidden)
    assert a.shape[1] <= rows


def test_windows_of_a_square_need_as_many_factors_as_lines():
    side = np.arange(22)
    near = abs(side[7:15, None] - side) <= 7
    a, _ = mask_factors.factors(~np.kron(near, near).astype(bool), 32)
    assert a.shape == (64, 16)


def test_too_many_factors_are_none():
    assert mask_factors.factors(~np.eye(40, dtype=bool), 8) is None


def slow_pieces(forbidden):
    """The left factors as sets of rows, from the definition: groups of sets, merged one pair after the other."""

    def cut(group):
        rows = [frozenset(i for i, member in enumerate(group) if row in member) for row in range(len(forbidden))]
        return {frozenset(r for r, other in enumerate(rows) if other == mine) for mine in rows if mine}

    sets = [frozenset(np.flatnonzero(row).tolist()) for row in np.unique(forbidden.T, axis=0) if row.any()]
    groups = [[s] for s in sets if frozenset().union(*(t for t in sets if t < s)) != s]
    while True:
        pairs = [(i, j) for i in range(len(groups)) for j in range(i + 1, len(groups))]
        saved = [len(cut(groups[i])) + len(cut(groups[j])) - len(cut(groups[i] + groups[j])) for i, j in pairs]
        good = [pair for least in (1, 0) for pair, s in zip(pairs, saved, strict=True) if s >= least]
        if not good:
            return set().union(*map(cut, groups)) if groups else set()
        i, j = good[0]
        groups[i] += groups.pop(j)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_factors_are_those_of_the_definition(data):
    rows, keys = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 14)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    forbidden = rng.random((rows, keys)) < data.draw(st.sampled_from([0.1, 0.3, 0.5, 0.8]))
    a, _ = mask_factors.factors(forbidden, 1000)
    assert {frozenset(np.flatnonzero(column).tolist()) for column in a.T} == slow_pieces(forbidden)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), name=st.sampled_from(["16x1", "16x16", "8x1"]), split=st.sampled_from([None, 16, 64]))
def test_lists_hold_every_pair_once(seed, name, split):
    dense = plans.pattern(40, 50, 0.3, seed)
    cover = blocks.extract(plans.reordered(dense, seed), tiles.parse(name), 32)
    items = work.items(cover, split)
    for index in (None, lambda rows, keys: np.zeros(np.broadcast_shapes(rows.shape, keys.shape), int)):
        lists = tile_lists.build(cover, items.block, items.run_lo, items.run_hi, 32, index)
        assert np.array_equal(unpacked(lists, cover.shape), cover.to_dense())
        assert (np.diff(lists.items[:, Item.STEPS]) <= 0).all()


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_intervals_hold_every_pair_once(data):
    """In whatever steps: bands, bands with keys of single rows beside, and masks without any structure."""
    kind, seed = data.draw(st.sampled_from(["band", "beside", "random"])), data.draw(st.integers(0, 1000))
    name, split = data.draw(st.sampled_from(["32x1", "16x16", "64x64"])), data.draw(st.sampled_from([None, 16, 64]))
    rng, at = np.random.default_rng(seed), np.arange(70)
    dense = np.abs(at[:, None] - at) <= rng.integers(0, 40)
    if kind != "band":
        dense = (dense & (kind == "beside")) | (rng.random(dense.shape) < (0.02 if kind == "beside" else 0.5))
    ordered = graph.from_pattern(dense) if data.draw(st.booleans()) else plans.reordered(dense, seed)
    cover = blocks.extract(ordered, tiles.parse(name), 64)
    items = work.items(cover, split)
    columns = cover, items.block, items.run_lo, items.run_hi, 64 if name == "64x64" else 32
    tiled = tile_lists.build(*columns, forms=("tiles",))
    lists = tile_lists.build(*columns, forms=("intervals",))
    assert (tiled.rank, lists.rank) == (0, tile_lists.INTERVALS)
    flagged = tile_lists.build(*columns, forms=("bytes",))
    assert flagged.rank == tile_lists.BYTES and np.array_equal(flagged.bias_index, tiled.bias_index)
    assert np.array_equal(unpacked(tiled, cover.shape), cover.to_dense())
    assert np.array_equal(unpacked(lists, cover.shape), cover.to_dense())
    if kind == "band" and name != "16x16" and ordered.row_order is None:
        assert (lists.items[:, Item.STEPS] <= tiled.items[:, Item.STEPS]).all()


def test_intervals_that_take_many_more_steps_are_not_taken():
    at = np.arange(70)
    band = np.abs(at[:, None] - at) <= 20
    for seed, wanted in ((None, tile_lists.INTERVALS), (0, tile_lists.BYTES)):
        cover = blocks.extract(plans.reordered(band, seed), tiles.parse("64x1"), 64)
        items = work.items(cover, None)
        columns = cover, items.block, items.run_lo, items.run_hi, 64
        found, forced = tile_lists.build(*columns), tile_lists.build(*columns, forms=("intervals",))
        assert (found.rank, forced.rank) == (wanted, tile_lists.INTERVALS)
        more = forced.items[:, Item.STEPS].sum() / found.items[:, Item.STEPS].sum()
        assert (more <= tile_lists.MOST_STEPS) == (wanted == tile_lists.INTERVALS)


def test_lists_of_full_blocks_beside_partial_ones():
    dense = np.zeros((32, 32), bool)
    dense[:16], dense[16:] = True, np.tril(np.ones((16, 32), bool))
    cover = blocks.extract(graph.from_pattern(dense), tiles.parse("16x1"), 16)
    items = work.items(cover, None)
    lists = tile_lists.build(cover, items.block, items.run_lo, items.run_hi, 16)
    assert np.array_equal(unpacked(lists, cover.shape), cover.to_dense()) and lists.full and lists.partial


def unpacked(lists, shape):
    """int [N_q, N_k]: how often the lists allow each pair."""
    found = np.zeros(shape, int)
    for row, n_rows, step, n_full, n_all, mask_step, kind, _ in lists.items.tolist():
        for j in range(n_all):
            allowed = np.ones((lists.rows, lists.step_keys), bool)
            if j >= n_full and lists.rank == tile_lists.INTERVALS:
                bounds = lists.intervals[mask_step + j - n_full, :, None]
                place = np.arange(lists.step_keys) - (bounds & 0xFFFF)
                allowed = (place >= 0) & (place < bounds >> 16)
            elif j >= n_full and lists.rank in tile_lists.RANKS:
                right = lists.right[mask_step + j - n_full].T.astype(int)
                allowed = lists.left[kind].astype(int) @ right == 0
            elif j >= n_full:
                allowed = lists.bias_index[mask_step + j - n_full] != tile_lists.MASKED
            at, key = np.nonzero(allowed[:n_rows])
            np.add.at(found, (row + at, lists.keys[step + j][key]), 1)
    return found
