"""`slices.predict`: lists of every predictor against NumPy, memory, refusals, and as an operator."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import library

from helpers import selection as oracle
from helpers.cases import rest_slow
from helpers.slices import DTYPES, qkv, tokens
from tilewright import slices
from tilewright.core.errors import ConfigError, DeviceError, PatternError, UnknownNameError
from tilewright.slices import prediction, predictors, selection
from tilewright.slices.cpu.selection import Selection, mixed
from tilewright.slices.layout import EMPTY, LISTED, OVERFLOW, STEP, UNKNOWN
from tilewright.slices.predictors import pooled

N_Q, N_K, SCALE = 75, 150, 64**-0.5
# What each predictor is asked for in the contract test.
STATED = {
    "pooled": {"mass": 0.8, "pool": 8},
    "column": {"threshold": 0.02},
    "blocks": {"mass": 0.8, "block": 16, "similarity": -1.0},
    "given": {"pattern": "temporal", "grid": (3, 5, 5), "reach": 2},
    "random": {"keep": 0.3},
}


def inputs(device, n_k=N_K, **options):
    q, k, _ = qkv(options.pop("batch", 2), 2, N_Q, n_k, 64, device=device, **options)
    return q, k


def listed(lists, b, h, g):
    """Keys of a list, as a set of numbers in order."""
    return lists.keys[b, h, g][: lists.counts[b, h, g]].tolist()


def check_lists(lists):
    """What `SliceLists` promises."""
    lists.check(allow_empty=True)
    counts = lists.counts.cpu()
    assert (counts <= lists.layout.capacity).all()
    state = lists.state.tolist()
    assert state[OVERFLOW] == 0 and state[LISTED] == counts.sum()
    assert bool(state[EMPTY]) == bool((counts == 0).any())
    order = counts.argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(lists.order.cpu().long(), order)
    for place in np.ndindex(*counts.shape):
        keys = listed(lists, *place)
        assert keys == sorted(set(keys)) and all(0 <= key < lists.layout.keys for key in keys)
        end = -(-len(keys) // STEP) * STEP
        assert set(lists.keys[place][len(keys) : end].tolist()) <= set(keys[-1:])


@pytest.mark.parametrize("name", predictors.NAMES)
def test_a_predictor_keeps_its_contract(name, device):
    q, k = inputs(device, n_k=N_Q if name == "given" else N_K)
    lists = slices.predict(q, k, budget=0.9, by=name, rows=32, **STATED[name])
    check_lists(lists)
    module, params = predictors.parse(name, {})
    assert isinstance(params, predictors.Settings)
    assert module.group_bytes(params, lists.layout._replace(rows=128), 64) >= lists.layout.keys
    # A part of the heads alone has the same lists.
    part = slices.predict(q[:, 1:], k[:, 1:], budget=0.9, by=name, rows=32, **STATED[name])
    if name != "random":
        assert [listed(part, 1, 0, g) for g in range(3)] == [listed(lists, 1, 1, g) for g in range(3)]


def test_random_lists_of_one_key_hold_it(device):
    """Whatever its code would be."""
    seeds = torch.arange(4096)
    # Those of which a hash ends in 255.
    chosen = seeds[(mixed(mixed(seeds)) & 255) == 255][:2]
    q, k = (x[:1, :1] for x in inputs(device, n_k=1))
    for seed in chosen.tolist():
        lists = slices.predict(q, k, budget=1, by="random", keep=1, seed=seed, rows=128)
        lists.check()
        assert listed(lists, 0, 0, 0) == [0]
        assert slices.attend(q, k, k, lists).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mass_asked_for_is_listed(dtype, device):
    q, k = inputs(device, dtype=dtype)
    q = q * 3
    lists = slices.predict(q, k, mass=0.9, budget=1, rows=32, pool=1, least=1)
    shares = oracle.pooled(q, k, 32, 1, SCALE)
    density = lists.density()
    assert (density < 0.9).all() and (density > 0.05).all()
    for place in np.ndindex(*lists.counts.shape):
        # A code step, at either end, is 9 %.
        assert shares[place][listed(lists, *place)].sum() > 0.9 - 0.1 * 0.09 * 1.1


def test_the_largest_shares_are_listed(device):
    q, k = inputs(device)
    lists = slices.predict(q, k, keep=0.2, budget=0.5, rows=32, pool=4, least=0)
    assert (lists.counts == 30).all() and lists.layout.capacity == 128
    shares = oracle.pooled(q, k, 32, 4, SCALE)
    for place in np.ndindex(*lists.counts.shape):
        keys = listed(lists, *place)
        others = np.delete(shares[place], keys)
        # Within a code, and the error of float32, any of them may stand for the other.
        assert shares[place][keys].min() >= others.max() * 2 ** (-1 / 8) * (1 - 1e-3)


def test_a_sample_of_the_keys_ranks_them_as_all_do(monkeypatch):
    """Where `keep` alone chooses, and a group has one mean; lists hold as much attention."""
    monkeypatch.setattr(pooled, "FEWEST", 16)
    q, k, _ = qkv(1, 3, 512, 1500, 64)
    # Queries of a group have something in common, and some keys lie far off.
    q = (q[:, :, ::128].repeat_interleave(128, 2) * 2 + q) * torch.tensor([0.3, 1, 3])[:, None, None]
    k = k * torch.linspace(0.2, 3, 1500)[tokens(1500).argsort()][:, None]
    asked = []
    monkeypatch.setattr(
        Selection, "pooled", lambda *given, old=Selection.pooled: asked.append(given[-1]) or old(*given)
    )
    stated = {"keep": 0.2, "budget": 0.2}
    found = [slices.predict(q, k, pool=128, **how, **stated) for how in ({}, {"sample": 1})]
    slices.predict(q, k, pool=128, mass=0.8, budget=1.0)
    slices.predict(q, k, pool=64, **stated)
    assert asked == [pooled.SAMPLE, 1, 1, 1]
    kept = [slices.recall(q, k, lists).mean((0, 2)) for lists in found]
    assert (kept[0] >= kept[1] - 2e-3).all() and kept[0].mean() < 0.99


def test_the_threshold_is_exact(device):
    q, k = inputs(device)
    theta = 0.03
    lists = slices.predict(q, k, by="column", threshold=theta, budget=1, rows=32, least=0)
    shares = oracle.column(q, k, 32, 1, True, SCALE)
    for place in np.ndindex(*lists.counts.shape):
        keys = listed(lists, *place)
        assert set(np.flatnonzero(shares[place] >= theta * (1 + 1e-4))) <= set(keys)
        assert shares[place][keys].min() >= theta * 2 ** (-1 / 8) * (1 - 1e-4)


WAYS = {
    "mass": {"mass": 0.6, "pool": 4},
    "threshold": {"by": "column", "threshold": 0.7 / N_K, "criterion": "mean"},
    "runs": {"mass": 0.5, "width": 4, "pool": 4},
    "given": {"by": "given"},
}


@pytest.mark.parametrize("way", WAYS)
def test_lists_hold_all_that_was_asked_for_or_say_which_budget_does(way, device):
    q, k = inputs(device)
    stated = {"rows": 32, **WAYS[way]}
    if way == "given":
        stated["mask"] = (torch.rand(1, 1, 3, N_K, generator=torch.Generator().manual_seed(0)) < 0.6).to(device)
    all_of_them = slices.predict(q, k, budget=1, **stated)
    check_lists(all_of_them)
    most = int(all_of_them.counts.max())
    assert 64 < most < N_K
    lists = slices.predict(q, k, budget=0.3, **stated)
    assert lists.layout.capacity == 64
    assert slices.attend(q, k, tokens(2, 2, N_K, 64, device=device), lists).isnan().all()
    with pytest.raises(PatternError, match=r"^budget: expected at most 64 keys a group, found \d+ in ") as error:
        lists.check()
    budget = float(re.search(r"a budget of ([\d.]+) holds the lists of all groups$", str(error.value))[1])
    assert most / N_K <= budget <= most / N_K + 1e-3
    fitting = slices.predict(q, k, budget=budget, **stated)
    fitting.check()
    assert torch.equal(fitting.counts, all_of_them.counts)


@pytest.mark.parametrize(
    "way", [{"mass": 0.6, "pool": 4}, {"by": "column", "threshold": 0.7 / N_K, "criterion": "mean"}], ids=str
)
def test_the_keys_of_a_mass_or_a_threshold_can_be_limited(way, device):
    q, k = inputs(device)
    for keep, count in ((0.4, 60), (0.03, 5)):
        lists = slices.predict(q, k, budget=0.4, keep=keep, rows=32, least=0, **way)
        check_lists(lists)
        lists.check()
        assert (lists.counts == count).all()
    loose, free = (slices.predict(q, k, budget=1, rows=32, **way, **own) for own in ({"keep": 0.99}, {}))
    assert torch.equal(loose.counts, free.counts)


@pytest.mark.parametrize("width", [1, 16, 128])
@pytest.mark.parametrize("n", [150, 1100])
def test_a_share_of_the_keys_fits_a_budget_of_that_share(width, n):
    q = tokens(1, 1, 40, 64)
    for share in (0.01, 0.3, 0.55, 0.9, 1.0):
        lists = slices.predict(q, tokens(1, 1, n, 64), keep=share, budget=share, rows=32, width=width, least=0)
        lists.check()
        # The last run may be short.
        assert lists.counts.min() >= min(share * n, n - width + 1)


@pytest.mark.parametrize(("width", "parts"), rest_slow([(1, None), (16, 1), (1, 1), (16, None)], 0, 1))
def test_a_head_may_keep_a_share_of_its_own(width, parts, device, monkeypatch):
    q, k = inputs(device)
    stated = {"rows": 32, "width": width, "budget": 0.6, "least": 0}
    expected = [slices.predict(q[:, [h]], k[:, [h]], keep=keep, **stated) for h, keep in enumerate((0.6, 0.1))]
    if parts is not None:
        monkeypatch.setattr(selection, "WORKSPACE", parts)
        prediction._planned.cache_clear()
    lists = slices.predict(q, k, keep=(0.6, 0.1), **stated)
    prediction._planned.cache_clear()
    assert torch.equal(lists.counts, torch.cat([each.counts for each in expected], 1))
    for h, each in enumerate(expected):
        assert torch.equal(lists.pack()[:, [h]], each.pack())


def test_lists_of_predicted_keys_are_attended_to(device):
    q, k = inputs(device)
    v = tokens(2, 2, N_K, 64, seed=9, device=device)
    lists = slices.predict(q, k, keep=0.5, budget=0.6, rows=32, pool=8)
    recall = slices.recall(q, k, lists)
    random = slices.recall(q, k, slices.predict(q, k, by="random", keep=0.5, budget=0.6, rows=32))
    assert recall.mean() > random.mean() + 0.05
    whole = slices.predict(q, k, keep=1.0, budget=1, rows=32, pool=8)
    torch.testing.assert_close(slices.attend(q, k, v, whole), slices.dense(q, k, v)[0], rtol=0, atol=1e-5)


def test_ranges_are_always_listed(device):
    q, k = inputs(device)
    lists = slices.predict(q, k, keep=0.2, budget=0.5, rows=32, pool=4, always=[(140, 150), (0, 5), (4, 8)])
    check_lists(lists)
    for place in np.ndindex(*lists.counts.shape):
        keys = listed(lists, *place)
        assert len(keys) == 64 and {*range(8), *range(140, 150)} < set(keys)


def test_runs_are_listed_whole(device):
    q, k = inputs(device)
    lists = slices.predict(q, k, keep=0.4, budget=0.5, rows=32, pool=4, width=16, always=[(20, 21)])
    check_lists(lists)
    assert lists.layout.width == 16
    shares = oracle.pooled(q, k, 32, 4, SCALE)
    for place in np.ndindex(*lists.counts.shape):
        keys = np.array(listed(lists, *place))
        runs = np.unique(keys // 16)
        # 0.4 of 10 runs, of which the last is short.
        assert len(runs) == 4 and 1 in runs
        assert len(keys) == 64 - 10 * (9 in runs)
        sums = np.add.reduceat(shares[place], range(0, N_K, 16))
        others = np.setdiff1d(np.arange(10), runs)
        assert sums[np.setdiff1d(runs, [1])].min() >= sums[others].max() * 2 ** (-3 / 8)


def test_log_sum_exps_may_be_given(device):
    q, k = inputs(device)
    lse = slices.dense(q, k, k)[1]
    for settings in ({"sample": 16}, {"criterion": "mean"}):
        one, other = (
            slices.predict(q, k, by="column", threshold=0.01, budget=1, rows=32, lse=x, **settings) for x in (lse, None)
        )
        assert (one.counts - other.counts).abs().max() <= 2


# Arguments of the call below, as they are planned.
PLANNED = "pooled", "pool=4", 0.7, None, None, (), None


def test_a_call_in_parts_has_the_same_lists(monkeypatch, device):
    q, k = inputs(device)
    stated = {"budget": 0.7, "rows": 16, "mass": 0.7, "pool": 4}
    mask = tokens(1, 2, 5, N_K, device=device) > 0.5
    whole = slices.predict(q, k, **stated), slices.predict(q, k, budget=1, by="given", rows=16, mask=mask)
    # Parts of some entries, of some heads, and of some groups.
    for bytes_at_once, n_parts in ((20_000, 2), (10_000, 4), (1_500, 20)):
        monkeypatch.setattr(selection, "WORKSPACE", bytes_at_once)
        prediction._planned.cache_clear()
        found = slices.predict(q, k, **stated), slices.predict(q, k, budget=1, by="given", rows=16, mask=mask)
        assert len(prediction._planned(whole[0].layout, 64, *PLANNED).parts) == n_parts
        for one, other in zip(whole, found, strict=True):
            assert torch.equal(one.counts, other.counts) and torch.equal(one.order, other.order)
            places = list(np.ndindex(*one.counts.shape))
            assert [listed(one, *place) for place in places] == [listed(other, *place) for place in places]
    prediction._planned.cache_clear()


def test_lists_are_the_same_in_every_call(device):
    q, k = inputs(device)
    one, other = (slices.predict(q, k, mass=0.6, budget=0.5, rows=32, pool=8) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.tensors[1:], other.tensors[1:], strict=True))


@pytest.mark.parametrize("where", ["q", "k"])
def test_nan_makes_results_nan_and_is_told(where, device):
    q, k = inputs(device)
    (q if where == "q" else k)[1, 0, 40, 7] = torch.nan
    # Few keys are listed, of room for many: none of the rest may be read as a key.
    lists = slices.predict(q, k, mass=0.9, budget=1, rows=32, pool=8, least=1)
    assert lists.keys[lists.counts == UNKNOWN].min() >= 0 and lists.keys[lists.counts == UNKNOWN].max() < N_K
    # Groups are numbered over [2, 2, 3] from 1; the last one is told: of q the second group, of k all of the head.
    assert lists.state.tolist()[OVERFLOW] == (8 if where == "q" else 9)
    assert (lists.counts == UNKNOWN).sum() == (1 if where == "q" else 3)
    with pytest.raises(
        PatternError, match=r"^q, k: expected finite values, found others for group \d of head 0, batch entry 1$"
    ):
        lists.check()
    assert slices.attend(q, k, k, lists).isnan().all()


def test_a_mask_that_does_not_fit_is_told(device):
    q, k = inputs(device)
    mask = torch.zeros(1, 1, 3, N_K, dtype=torch.bool, device=device)
    mask[..., 1, :100] = True
    lists = slices.predict(q, k, budget=0.3, by="given", rows=32, mask=mask)
    with pytest.raises(PatternError, match=r"expected at most 64 keys a group, found 100 in group 1 of head 1"):
        lists.check()
    fits = slices.predict(q, k, budget=0.7, by="given", rows=32, mask=mask)
    assert fits.counts[0, 0].tolist() == [0, 100, 0]
    with pytest.raises(PatternError, match="expected every group to have a key"):
        fits.check()


# As an operator.


@pytest.mark.parametrize("backend", rest_slow(["eager", "aot_eager"], 0))
def test_compiled_as_one_graph(backend, device):
    q, k = inputs(device)

    def network(q, k):
        lists = slices.predict(q, k, mass=0.3, budget=0.5, rows=32, pool=4, always=[(0, 3)])
        columns = slices.predict(q, k, by="column", threshold=0.01, budget=1.0, rows=32, criterion="max")
        return slices.attend(q, k, k, lists), columns.counts, lists.order

    with torch.no_grad():
        found = torch.compile(network, fullgraph=True, backend=backend)(q, k)
        for one, other in zip(found, network(q, k), strict=True):
            assert torch.equal(one, other)


def test_the_operator_is_well_formed(device):
    q, k = inputs(device)
    lists = slices.predict(q, k, mass=0.8, budget=0.5, rows=32, pool=4)
    given = q, k, None, None, None, "pooled", "pool=4", 0.8, None, None, [0, 4], None, SCALE, list(lists.layout)
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    library.opcheck(torch.ops.tilewright.slices_predict.default, given, **checks)


# Refusals.


MASK = torch.ones(1, 1, 2, 200, dtype=torch.bool)


def small(**stated):
    q, k, _ = qkv(1, 1, 40, 200, 64)
    return slices.predict(stated.pop("q", q), stated.pop("k", k), **{"budget": 0.5, "rows": 32, **stated})


@pytest.mark.parametrize(
    ("stated", "error", "message"),
    [
        ({}, ConfigError, "^expected one of mass, threshold and keep, .*, found none$"),
        ({"mass": 0.5, "threshold": 0.5}, ConfigError, "^expected .*, found mass, threshold$"),
        ({"mass": 0.0}, ConfigError, r"^mass: expected a number in \(0, 1\], found 0"),
        ({"keep": 1.5}, ConfigError, r"^keep: expected a number in \(0, 1\], or one for each head, found 1.5$"),
        ({"keep": (0.3, 0)}, ConfigError, r"^keep: expected a number in \(0, 1\], or one for .*, found \(0.3, 0\)$"),
        ({"keep": (0.3, 0.2)}, ConfigError, "^keep: expected a number, or one for each of 1 heads, found 2$"),
        ({"threshold": float("nan")}, ConfigError, r"^threshold: expected a number in \(0, 1\], found nan"),
        ({"mass": 0.5, "budget": 0}, PatternError, r"^budget: expected a share of the keys in \(0, 1\], found 0"),
        ({"mass": 0.5, "budget": 1.1}, PatternError, r"^budget: .*found 1.1"),
        (
            {"mass": 0.5, "least": 130},
            ConfigError,
            "^budget: expected room for the 130 keys of least, found 128; a budget of 0.650 holds them$",
        ),
        (
            {"mass": 0.5, "always": [(0, 100), (150, 180)]},
            ConfigError,
            "^budget: expected room for the 130 keys of always, found 128; a budget of 0.650 holds them$",
        ),
        (
            {"keep": 0.7},
            ConfigError,
            "^budget: expected room for the 140 keys of keep, found 128; a budget of 0.700 holds them$",
        ),
        ({"mass": 0.5, "always": [(10, 201)]}, ConfigError, "^always: expected ranges .* 0 to 200, found 10 to 201"),
        ({"mass": 0.5, "always": [(10, 10)]}, ConfigError, "^always: expected ranges within 0 to 200, found 10 to 10"),
        ({"mass": 0.5, "least": -1}, ConfigError, "^least: expected an integer of at least 0, found -1"),
        ({"mass": 0.5, "rows": 48}, PatternError, "^rows: expected a power of two from 16 to 128, found 48"),
        ({"mass": 0.5, "pool": 12}, ConfigError, "^pool: expected a power of two from 1 to the 32 rows .*, found 12"),
        ({"mass": 0.5, "pool": 64}, ConfigError, "^pool: expected a power of two from 1 to the 32 rows .*, found 64"),
        ({"mass": 0.5, "by": "column", "sample": 3}, ConfigError, "^sample: expected a power of two .*, found 3"),
        ({"mass": 0.5, "by": "topk"}, UnknownNameError, "unknown predictor 'topk'; known: pooled, column, blocks"),
        ({"mass": 0.5, "pol": 8}, ConfigError, "^predictor pooled: .*`pol`; settings: pool, sample$"),
        ({"mass": 0.5, "by": "blocks", "block": 32}, ConfigError, "^predictor blocks: .*block"),
        ({"mass": 0.5, "by": "blocks", "similarity": 2.0}, ConfigError, "^predictor blocks: .*similarity"),
        ({"mass": 0.5, "by": "random", "seed": -1}, ConfigError, "^predictor random: .*seed"),
        ({"mass": 0.5, "pool": slices}, ConfigError, "^pool: expected a number, a text or .*, found <module"),
        ({"mass": 0.5, "scale": 0}, PatternError, "^scale: expected a number greater than 0, found 0"),
        ({"mass": 0.5, "by": "given", "mask": MASK}, ConfigError, "expected none of mass, .*, found mass"),
        ({"by": "given", "least": 4, "mask": MASK}, ConfigError, "none of mass, .*, found least"),
        ({"by": "given"}, ConfigError, "^predictor given: expected a mask or a pattern, found neither; known patterns"),
        (
            {"by": "given", "mask": MASK.expand(1, 2, 2, 200)},
            PatternError,
            r"^mask: expected torch.bool of shape \(1, 1, 2, 200\), found torch.bool of \(1, 2, 2, 200\)$",
        ),
        ({"by": "given", "mask": MASK.float()}, PatternError, "^mask: expected torch.bool .*, found torch.float32"),
        ({"by": "given", "mask": MASK, "sink": 1}, ConfigError, "expected a mask or a pattern, found both"),
        ({"mass": 0.5, "mask": MASK}, ConfigError, "^mask: expected none, predictor pooled takes"),
        ({"mass": 0.5, "lse": torch.ones(1, 1, 40)}, ConfigError, "^lse: expected none, predictor pooled takes"),
        ({"mass": 0.5, "by": "column", "lse": torch.ones(1, 1, 41)}, PatternError, r"^lse: expected .*\(1, 1, 40\)"),
        (
            {"mass": 0.5, "by": "column", "lse": torch.ones(1, 1, 40, device="meta")},
            DeviceError,
            "^lse: expected a tensor on cpu, as q, found meta$",
        ),
        ({"keep": 0.5, "pool": 16, "sample": 2}, ConfigError, "^sample: expected 1 where a group has several means"),
        ({"keep": 0.5, "sample": 0}, ConfigError, "^sample: expected an integer of at least 1, found 0$"),
        ({"mass": 0.5, "q": torch.ones(1, 40, 64)}, PatternError, r"^q: expected shape \(B, H, N, D\)"),
        ({"mass": 0.5, "k": torch.ones(1, 2, 40, 64)}, PatternError, "^k: expected shape .*, B, H and D as of q"),
        ({"mass": 0.5, "k": torch.ones(1, 1, 40, 64).half()}, PatternError, "^k: expected float32, .*, the same"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_refused(stated, error, message):
    with pytest.raises(error, match=message):
        small(**stated)


@pytest.mark.parametrize("least", [0, 150])
def test_the_budget_that_is_advised_holds_all_that_was_asked_for(least):
    stated = {"keep": 0.7, "always": [(0, 100)], "least": least}
    with pytest.raises(ConfigError, match=r"^budget: expected room for") as error:
        small(**stated, budget=0.1)
    budget = float(re.search(r"a budget of ([\d.]+) holds them$", str(error.value))[1])
    small(**stated, budget=budget).check()


def test_lists_larger_than_the_device_are_refused(monkeypatch):
    # 12 heads of a long video: 6,250 groups with room for 400,000 keys each.
    q = torch.zeros(1, 1, 1, 64).expand(1, 12, 800_000, 64)
    monkeypatch.setattr(prediction, "_memory", lambda device: 80 * 10**9)
    found = "found 120.0 GB of 400000 keys a group, and the device has 80.0 GB; a budget of 0.332 would fit"
    with pytest.raises(DeviceError, match=f"^budget: expected lists that fit, {found}$"):
        slices.predict(q, q, mass=0.9, budget=0.5)


def test_memory_that_is_not_free_is_told(monkeypatch):
    def taken(*sizes):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch.Tensor, "new_empty", taken)
    with pytest.raises(
        DeviceError, match=r"^budget: expected lists that fit, found 0.0 GB of 128 keys .*not free; none fits$"
    ):
        small(mass=0.5)


def test_a_device_without_slices_is_refused():
    q = torch.ones(1, 1, 40, 64, device="meta")
    with pytest.raises(DeviceError, match="expected tensors on one of cpu, cuda, found meta"):
        slices.predict(q, q, mass=0.5, budget=0.5)


# The family.


def test_a_new_predictor_edits_nothing_else(monkeypatch):
    class Params(predictors.Settings, frozen=True, forbid_unknown_fields=True):
        first: int = 70

    def codes(selection, q, k, params, *, scale):
        key = torch.arange(k.shape[2])
        found = torch.where(key < params.first, 10, 200).to(torch.uint8)
        return found.expand(*q.shape[:2], selection.layout.groups, -1).contiguous()

    module = SimpleNamespace(Params=Params, codes=codes, group_bytes=lambda params, layout, head_dim: layout.keys)
    monkeypatch.setattr(predictors, "NAMES", (*predictors.NAMES, "firsts"))
    monkeypatch.setitem(sys.modules, "tilewright.slices.predictors.firsts", module)
    prediction._planned.cache_clear()
    lists = small(by="firsts", mass=0.9, first=75)
    assert lists.counts.unique().tolist() == [75]
    prediction._planned.cache_clear()


def test_the_family_loads_without_torch():
    import subprocess

    line = "import sys, tilewright.slices.predictors; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", line], check=True)
