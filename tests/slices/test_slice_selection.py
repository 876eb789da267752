"""Codes and selection of slices on every target: the GPU's kernels on a GPU, else under Triton's interpreter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import selection as oracle
from helpers.gpu import TRITON_DEVICE
from helpers.slices import DTYPES, tokens
from tilewright.slices.cpu import selection as on_cpu
from tilewright.slices.cuda import selection as on_cuda
from tilewright.slices.cuda.forms import PREDICTION
from tilewright.slices.layout import STEP, UNKNOWN, Layout
from tilewright.slices.selection import WORKSPACE, Rule, padded, part_layout, parts

TARGETS = {"cpu": (on_cpu.Selection, "cpu"), "cuda": (on_cuda.Selection, TRITON_DEVICE)}
SCALE = 0.3


@pytest.fixture(params=TARGETS)
def target(request):
    return TARGETS[request.param]


def inputs(n_q, n_k, device, batch=1, heads=2, head_dim=16, dtype=torch.float32, strided=True):
    q, k = (
        tokens(batch, n, heads, head_dim, seed=seed, device=device, dtype=dtype).transpose(1, 2)
        for n, seed in ((n_q, 1), (n_k, 2))
    )
    return (q, k) if strided else (q.contiguous(), k.contiguous())


def layout_of(q, k, rows):
    return Layout(*q.shape[:3], k.shape[2], rows, -(-k.shape[2] // STEP) * STEP)


def made(target, q, k, rows, **options):
    make, device = target
    return make(layout_of(q, k, rows), torch.device(device), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pool", [1, 4, 32])
def test_pooled_codes(pool, dtype, target):
    q, k = inputs(75, 140, target[1], dtype=dtype)
    codes = made(target, q, k, 32).pooled(q, k, pool, SCALE)
    shares = oracle.pooled(q, k, 32, pool, SCALE)
    np.testing.assert_allclose(shares.sum(-1), 1)
    oracle.check_codes(codes, shares, oracle.CODE_ERROR[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_sum_exps_of_a_sample_scale_all_shares_alike(dtype, target):
    """Every third key stands for three, the last one for fewer; one that is no number has code 0 beside them."""
    q, k = inputs(75, 140, target[1], dtype=dtype)
    exact = np.log(oracle.pooled(q, k, 32, 32, SCALE))
    sizes = np.minimum(140 - np.arange(0, 140, 3), 3)
    shares = np.exp(exact) / (np.exp(exact[..., ::3]) * sizes).sum(-1, keepdims=True)
    codes = made(target, q, k, 32).pooled(q, k, 32, SCALE, None, 3)
    oracle.check_codes(codes, shares, oracle.CODE_ERROR[dtype])
    k[0, 0, 4, 1], k[0, 1, 6, 1] = torch.nan, torch.nan
    other = made(target, q, k, 32).pooled(q, k, 32, SCALE, None, 3)
    assert not other[0, 0, :, 4].any() and torch.equal(other[0, 0, :, :4], codes[0, 0, :, :4])
    assert (other[0, 1] == 255).all()


def test_one_query_to_a_pool_gives_exact_shares(target):
    q, k = inputs(40, 70, target[1])
    mean = oracle.column(q, k, 16, 1, False, SCALE)
    oracle.check_codes(made(target, q, k, 16).pooled(q, k, 1, SCALE), mean, oracle.CODE_ERROR[torch.float32])


def test_pools_of_more_rows_than_one_product_has():
    q, k = inputs(75, 70, TRITON_DEVICE)
    selection = made(TARGETS["cuda"], q, k, 64, config=PREDICTION[2]._replace(block_m=16, block_n=32))
    error = oracle.CODE_ERROR[torch.float32]
    oracle.check_codes(selection.pooled(q, k, 2, SCALE), oracle.pooled(q, k, 64, 2, SCALE), error)
    for largest in (True, False):
        shares = oracle.column(q, k, 64, 1, largest, SCALE)
        oracle.check_codes(selection.column(q, k, None, 1, largest, SCALE), shares, error)


def test_log_sum_exps_of_several_ranges_of_keys(monkeypatch):
    monkeypatch.setattr(on_cuda, "LEAST_SPLIT", 32)
    q, k = inputs(40, 150, TRITON_DEVICE)
    codes = made(TARGETS["cuda"], q, k, 32).pooled(q, k, 16, SCALE)
    oracle.check_codes(codes, oracle.pooled(q, k, 32, 16, SCALE), oracle.CODE_ERROR[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_sum_exps_of_a_head_do_not_depend_on_those_beside_it(dtype, monkeypatch):
    monkeypatch.setattr(on_cuda, "LEAST_SPLIT", 32)
    # As many programs as make the number of ranges vary with that of heads, if it does.
    monkeypatch.setattr(on_cuda, "PROGRAMS", 24)
    q, k = inputs(75, 300, TRITON_DEVICE, batch=2, heads=4, dtype=dtype)

    def sums(b, h):
        one = made(TARGETS["cuda"], q[b, h], k[b, h], 32)
        return one.log_sum_exps(one.means(q[b, h], 16), k[b, h], SCALE)

    whole = sums(slice(None), slice(None))
    assert whole.shape[2] > 1
    for b, h in ((slice(0, 1), slice(0, 2)), (slice(1, 2), slice(3, 4)), (slice(None), slice(1, 4))):
        assert torch.equal(sums(b, h), whole[b, h])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("step", [1, 4])
def test_column_codes(step, largest, known, target):
    q, k = inputs(75, 130, target[1])
    lse = (q @ k.mT * SCALE).logsumexp(-1) if known else None
    codes = made(target, q, k, 32).column(q, k, lse, step, largest, SCALE)
    oracle.check_codes(codes, oracle.column(q, k, 32, step, largest, SCALE), oracle.CODE_ERROR[torch.float32])


@pytest.mark.parametrize("similarity", [-1, 0.22, 0.25, 1])
def test_block_codes(similarity, target):
    q, k = inputs(75, 150, target[1])
    shares = oracle.blocks(q, k, 32, 16, similarity, SCALE)
    kept = np.isinf(shares)
    assert kept.any() == (similarity > -1) and kept.all() == (similarity == 1)
    codes = made(target, q, k, 32).blocks(q, k, 16, similarity, SCALE)
    oracle.check_codes(codes, shares, oracle.CODE_ERROR[torch.float32])
    np.testing.assert_array_equal(codes.cpu().numpy() == 0, kept)


@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1), (1, 1)])
def test_codes_of_a_mask(shape, target):
    q, k = inputs(40, 70, target[1], batch=2)
    mask = (tokens(*shape, 3, 70) > 0).to(target[1])
    codes = made(target, q, k, 16).given(mask)
    assert torch.equal(codes.long(), torch.where(mask, 0, 255).expand(2, 2, 3, 70))


def test_random_codes_are_the_same_on_all_targets():
    q, k = inputs(40, 2500, "cpu", batch=2)
    one, other = (made(target, q, k, 16).random(5).cpu() for target in TARGETS.values())
    assert torch.equal(one, other)
    assert not torch.equal(one[0, 0, 0], one[0, 0, 1])
    # 30,000 codes: 118 of each on average, with a standard deviation of 11; the last stands for no share.
    counts = one.flatten().bincount(minlength=255)
    assert len(counts) == 255
    assert counts.min() > 60 and counts.max() < 180


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_targets_agree(data):
    rows = data.draw(st.sampled_from([16, 32, 64]), "M")
    pool = data.draw(st.sampled_from([1, 2, 8, 16]), "pool")
    n_q, n_k = data.draw(st.integers(1, 2 * rows + 3), "N_q"), data.draw(st.integers(1, 150), "N_k")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    sizes = {"batch": data.draw(st.integers(1, 2), "B"), "strided": data.draw(st.booleans(), "strided")}
    q, k = inputs(n_q, n_k, "cpu", dtype=dtype, **sizes)
    one, other = (
        made(target, q, k, rows).pooled(q.to(target[1]), k.to(target[1]), pool, SCALE).cpu().int()
        for target in TARGETS.values()
    )
    assert (one - other).abs().max() <= 1 and (one != other).float().mean() < 0.02


@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("method", ["pooled", "pooled_exact", "largest", "mean", "blocks"])
def test_nan_gives_the_last_code(method, where, target):
    q, k = inputs(40, 70, target[1], heads=2)
    (q if where == "q" else k)[0, 1, 17, 3] = torch.nan
    selection = made(target, q, k, 16)
    calls = {
        "pooled": lambda: selection.pooled(q, k, 8, SCALE),
        "pooled_exact": lambda: selection.pooled(q, k, 16, SCALE),
        "largest": lambda: selection.column(q, k, None, 1, True, SCALE),
        "mean": lambda: selection.column(q, k, None, 2, False, SCALE),
        "blocks": lambda: selection.blocks(q, k, 16, -1.0, SCALE),
    }
    codes = calls[method]().cpu()
    hit = torch.zeros(1, 2, 3, dtype=torch.bool)
    hit[0, 1, 1 if where == "q" and method != "mean" else slice(None)] = True
    if method == "mean" and where == "q":
        # The query is not among those asked.
        hit[:] = False
    assert torch.equal((codes == 255).all(-1), hit)


# Selection.


def listed(target, codes, rule, capacity):
    """Keys and counts of codes uint8 [B, H, G, N]; memory that is not to be written stays -7."""
    make, device = target
    layout = Layout(*codes.shape[:2], codes.shape[2] * 16, codes.shape[3], 16, capacity)
    rows = torch.full((*codes.shape[:3], padded(codes.shape[3])), 77, dtype=torch.uint8, device=device)
    rows[..., : codes.shape[3]] = codes
    counts = torch.full(codes.shape[:3], -7, dtype=torch.int32, device=device)
    keys = torch.full((*codes.shape[:3], capacity), -7, dtype=torch.int32, device=device)
    make(layout, torch.device(device)).select(rows[..., : codes.shape[3]], rule, keys, counts)
    return keys.cpu().numpy(), counts.cpu().numpy()


def check_selection(target, codes, rule, capacity):
    keys, counts = listed(target, codes, rule, capacity)
    for place in np.ndindex(codes.shape[:3]):
        of_head = rule._replace(count=rule.counts(codes.shape[1])[place[1]])
        right, count = oracle.select(codes[place].numpy(), of_head)
        assert counts[place] == count
        if count >= UNKNOWN:
            # Some key at each place, so that none is read that is not there.
            assert (keys[place] == 0).all()
            continue
        np.testing.assert_array_equal(keys[place][: len(right)], right)
        end = -(-len(right) // STEP) * STEP
        assert (keys[place][len(right) : end] == (right[-1] if len(right) else None)).all()
        assert (keys[place][end:] == -7).all()
    return keys, counts


def codes_of(*shape, spread=40, seed=0):
    """Codes of a bell, so that many are equal."""
    score = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread + 100
    return score.clamp(0, 255).to(torch.uint8)


RULES = {
    "mass": Rule(mass=0.9, least=5, most=128),
    "mass that exceeds the capacity": Rule(mass=0.999, most=64),
    "all the mass": Rule(mass=1.0, most=150),
    "mass of ranges": Rule(mass=0.7, most=64, always=((3, 7), (100, 101))),
    "ranges that have the mass": Rule(mass=0.01, most=64, always=((0, 60),)),
    "free": Rule(mass=0.9, most=150, free=True),
    "threshold": Rule(code=90, least=4, most=128),
    "threshold that exceeds the capacity": Rule(code=200, most=50, always=((0, 5),)),
    "threshold that nothing reaches": Rule(code=0, least=7, most=64),
    "share": Rule(count=37, most=128, always=((149, 150),)),
    "share of each head": Rule(count=(37, 90), least=40, most=128),
    "mass, at most a share of each head": Rule(mass=0.9, count=(90, 20), most=128, always=((3, 7),)),
    "one key": Rule(count=1, least=0, most=64),
    "runs": Rule(mass=0.8, width=4, most=16, least=2),
    "runs, the last one short": Rule(count=7, width=4, most=16, always=((37, 38),)),
    "mass, at most": Rule(mass=0.9, count=20, least=5, most=128, always=((3, 7),)),
    "threshold, at most": Rule(code=120, count=33, width=4, most=140),
    "known": Rule(code=90, known=True, most=140),
    "known, too many": Rule(code=150, known=True, most=64),
    "known, none": Rule(code=0, known=True, most=64),
}


@pytest.mark.parametrize("name", RULES)
def test_kernels_select_what_a_sort_selects(name):
    codes = codes_of(1, 2, 2, 150)
    if name == "free":
        codes[..., :20] = 0
    capacity = -(-RULES[name].most * RULES[name].width // STEP) * STEP
    check_selection(TARGETS["cuda"], codes, RULES[name], capacity)


@pytest.mark.parametrize("name", RULES)
def test_the_cpu_selects_what_a_sort_selects(name):
    codes = codes_of(2, 2, 3, 150)
    if name == "free":
        codes[..., :20] = 0
    check_selection(TARGETS["cpu"], codes, RULES[name], -(-RULES[name].most * RULES[name].width // STEP) * STEP)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_selection(data):
    n = data.draw(st.integers(1, 200), "N")
    codes = codes_of(
        1, 1, 2, n, spread=data.draw(st.sampled_from([0, 3, 80]), "spread"), seed=data.draw(st.integers(0, 99))
    )
    width = data.draw(st.sampled_from([1, 1, 4, 16]), "width")
    units = -(-n // width)
    most = data.draw(st.integers(1, units), "most")
    kinds = data.draw(st.sampled_from([["mass"], ["code"], ["count"], ["mass", "count"], ["code", "count"]]), "kinds")
    stated = {"mass": st.floats(0.01, 1), "code": st.integers(0, 255), "count": st.integers(1, units)}
    always = ()
    if data.draw(st.booleans(), "always"):
        first = data.draw(st.integers(0, units - 1), "first")
        always = ((first, min(units, first + data.draw(st.integers(1, most), "length"))),)
    chosen = {kind: data.draw(stated[kind], kind) for kind in kinds}
    rule = Rule(width, **chosen, least=data.draw(st.integers(0, most), "least"), most=most, always=always)
    keys, counts = check_selection(TARGETS["cpu"], codes, rule, -(-most * width // STEP) * STEP)
    if data.draw(st.integers(0, 5)) == 0:
        found = listed(TARGETS["cuda"], codes, rule, -(-most * width // STEP) * STEP)
        np.testing.assert_array_equal(found[0], keys)
        np.testing.assert_array_equal(found[1], counts)


def test_the_mass_listed_is_that_asked_for(target):
    codes = codes_of(1, 1, 3, 300, spread=30)
    keys, counts = listed(target, codes, Rule(mass=0.9, most=300), 320)
    for g in range(3):
        chosen, code = keys[0, 0, g][: counts[0, 0, g]], codes[0, 0, g].numpy()
        # What stands for a code: the middle of its half octave. True shares, here the middles of codes, are near that.
        for middle, slack in ((code // 4 * 4 + 2, 1e-6), (code + 0.5, 0.02)):
            mass = 2.0 ** -(middle / 8)
            assert mass[chosen].sum() >= 0.9 * mass.sum() * (1 - slack)


def test_a_group_without_shares_is_marked(target):
    codes = codes_of(1, 1, 3, 100)
    codes[0, 0, 1] = 255
    for rule in (Rule(mass=0.9, most=64), Rule(code=40, most=64), Rule(mass=0.9, width=4, most=16)):
        _, counts = check_selection(target, codes, rule, 64)
        assert (counts[0, 0] == UNKNOWN).tolist() == [False, True, False]


@pytest.mark.parametrize("left_out", [1, 3])
@pytest.mark.parametrize("ties", [1, 5, 65, 69])
def test_the_last_tie_listed_may_be_the_first_of_a_word(ties, left_out, target, monkeypatch):
    # The first word of all, another one, and both of the second block of 64 codes. The next one or three are ties, too.
    codes = torch.full((1, 1, 1, 150), 110, dtype=torch.uint8)
    codes[..., : ties + left_out] = 100
    below = [120, 123, 125]
    codes[..., below] = 90
    monkeypatch.setattr(on_cuda, "COUNTED", 64)
    keys, counts = check_selection(target, codes, Rule(count=ties + len(below), most=128), 128)
    assert keys[0, 0, 0][: counts[0, 0, 0]].tolist() == [*range(ties), *below]


def test_no_run_is_listed_of_fewer_keys_than_a_run_has(target):
    check_selection(target, codes_of(1, 1, 2, 3, spread=0), Rule(code=2, width=4, most=1), 64)


def test_rows_of_codes_may_be_padded(target):
    codes = codes_of(1, 2, 2, 150)
    apart = torch.full((1, 2, 2, 160), 0, dtype=torch.uint8)[..., :150].copy_(codes)
    check_selection(target, apart, RULES["mass"], 128)


# Parts.


@pytest.mark.parametrize("group_bytes", [1, 1 << 20, 20 << 20, 60 << 20, 200 << 20])
def test_parts_cover_each_group_once_in_order(group_bytes):
    layout = Layout(2, 3, 16 * 7 - 5, 100, 16, 64)
    found = np.arange(2 * 3 * 7).reshape(2, 3, 7)
    taken = [found[part] for part in parts(layout, group_bytes)]
    np.testing.assert_array_equal(np.concatenate([x.ravel() for x in taken]), found.ravel())
    assert all(x.size * group_bytes <= WORKSPACE for x in taken)
    sizes = [part_layout(layout, part) for part in parts(layout, group_bytes)]
    assert [s.batch * s.heads * s.groups for s in sizes] == [x.size for x in taken]


def test_a_large_call_needs_little_memory():
    # 75,600 tokens, 12 x 128: codes of six heads fit.
    layout = Layout(1, 12, 75600, 75600, 128, 22720)
    assert len(parts(layout, 75600)) == 2
