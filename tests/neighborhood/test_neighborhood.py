"""Neighbourhood attention against the oracle by coordinates, and what is refused."""

import pickle
import re
from functools import partial
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tilewright import reference
from tilewright.core.errors import DeviceError, PatternError, TilewrightError
from tilewright.neighborhood import rule as rules
from tilewright.neighborhood.cpu import choice, kernel, slabs

DTYPES = torch.float32, torch.bfloat16, torch.float16


@st.composite
def cases(draw):
    """Grids, windows, borders, heads, extra tokens, types and layouts."""
    n_axes = draw(st.integers(1, 3))
    grid = tuple(draw(st.integers(1, (70, 14, 7)[n_axes - 1])) for _ in range(n_axes))
    window = tuple(draw(st.integers(1, n)) for n in grid)
    dilation = tuple(draw(st.integers(1, min(3, n // w))) for n, w in zip(grid, window, strict=True))
    stride = tuple(draw(st.integers(1, w)) for w in window)
    border = draw(st.sampled_from(["shift", "cut"]))
    causal = tuple(border == "shift" and draw(st.booleans()) for _ in grid)
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    rule = {"window": window, "stride": stride, "dilation": dilation, "causal": causal, "border": border}
    form = {
        "heads": (kv_heads * group, kv_heads),
        "dims": (draw(st.sampled_from([1, 8, 20])), draw(st.sampled_from([1, 8, 24]))),
        "batch": draw(st.integers(1, 2)),
        "extra": draw(st.sampled_from([0, 0, 3])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "layout": draw(st.sampled_from(["plain", "heads first", "values apart", "expanded", "a part"])),
    }
    return grid, rule, form


def tensors(grid, form):
    """``(q, k, v, extra)`` of a form."""
    generator = torch.Generator().manual_seed(0)

    def make(tokens, heads, dim):
        shape = (form["batch"], *tokens, heads, dim)
        if form["layout"] == "heads first":
            made = torch.randn(shape[0], heads, *tokens, dim, generator=generator).movedim(1, -2)
        elif form["layout"] == "values apart":
            made = torch.randn(dim, *shape[:-1], generator=generator).movedim(0, -1)
        elif form["layout"] == "expanded":
            made = torch.randn(1, *shape[1:-2], 1, dim, generator=generator).expand(shape)
        elif form["layout"] == "a part":
            made = torch.randn(*shape[:-2], 3, heads, dim, generator=generator).select(-3, 1)
        else:
            made = torch.randn(shape, generator=generator)
        return made.to(form["dtype"])

    (heads, kv_heads), (dim, v_dim) = form["heads"], form["dims"]
    q, k, v = make(grid, heads, dim), make(grid, kv_heads, dim), make(grid, kv_heads, v_dim)
    n = form["extra"]
    return q, k, v, (make((n,), kv_heads, dim), make((n,), kv_heads, v_dim)) if n else None


@settings(max_examples=60)
@given(cases())
def test_attention_is_that_of_the_oracle(case):
    grid, rule, form = case
    q, k, v, extra = tensors(grid, form)
    out, lse = tw.neighborhood.attend(q, k, v, **rule, extra=extra, lse=True)
    expected, sums = reference.neighborhood(q, k, v, **rule, extra=extra)
    # Rows of one value have no length to speak of.
    bound = reference.TOLERANCE[q.dtype] * expected.abs().max()
    assert out.dtype == q.dtype and out.shape == (*q.shape[:-1], v.shape[-1]) and out.is_contiguous()
    assert (out - expected).abs().max() <= bound
    assert lse.dtype == torch.float32 and (lse - sums).abs().max() < 1e-4
    if all(n > 0 for n in grid):
        plan = tw.neighborhood.plan(
            grid, **rule, heads=q.shape[-2], head_dim=q.shape[-1], dtype=q.dtype, kv_heads=k.shape[-2]
        )
        assert torch.equal(pickle.loads(pickle.dumps(plan))(q, k, v, extra=extra), out)
        flat = (x.flatten(1, -3) for x in (q, k, v))
        assert torch.equal(plan(*flat, extra=extra), out if len(grid) == 1 else out.flatten(1, -3))


@pytest.mark.parametrize(
    ("grid", "window"), [((72, 192, 192), 11), ((4000, 4000), 15), ((2_000_000,), 2048), ((48, 48, 48), 31)]
)
def test_copies_of_keys_fit_a_cache(grid, window):
    rule = rules.make(len(grid), window, 1, 1, False, "shift")
    box = choice.choose(rule, grid, 4, 4, 64, 64).box
    tables = slabs.tables(rule.axes, grid, box, 1)
    # Each box is in one slab.
    found = list(slabs.slabs(1, 4, tables, 512, 30.0, threads=64))
    assert len(found) >= 64 and sum(prod(end - first for first, end in ends) for _, *ends in found) == 4 * prod(
        map(len, tables)
    )
    alone = 512 * prod(one.most for one in tables)
    for _, (first, end), *ends in found[:: max(1, len(found) // 50)]:
        keys = [one.places(*each)[1] for one, each in zip(tables, ends, strict=True)]
        assert (end - first) * prod(x.stop - x.start for x in keys) * 512 <= max(slabs._BYTES, 2 * alone)


def test_registers_of_other_processors_do_the_same(monkeypatch):
    assert kernel.sizes() in ((16, 16, 16), (8, 12, 8))
    q, k, v = torch.randn(3, 1, 5, 9, 3, 24)
    expected = reference.neighborhood(q, k, v, (3, 5))[0]
    caches = kernel.compiled, slabs._table, choice.choose
    try:
        for sizes in ((8, 12, 8), (16, 16, 16)):
            monkeypatch.setattr(kernel, "sizes", lambda sizes=sizes: sizes)
            for one in caches:
                one.cache_clear()
            assert reference.relative_error(tw.neighborhood.attend(q, k, v, (3, 5)), expected) < 1e-5
    finally:
        monkeypatch.undo()
        for one in caches:
            one.cache_clear()


def test_what_is_no_number_is_seen():
    q, k, v = torch.randn(3, 1, 20, 20, 1, 16)
    for x in (q, k, v):
        given = [one.clone() if one is x else one for one in (q, k, v)]
        next(one for one, before in zip(given, (q, k, v), strict=True) if one is not before)[0, 3, 4, 0, 5] = torch.nan
        out = tw.neighborhood.attend(*given, 5).isnan().any(-1)
        assert out[0, 3, 4, 0] and not out[0, 12:].any()


def test_scales_and_empty_batches():
    q, k, v = torch.randn(3, 2, 6, 6, 2, 8)
    out = tw.neighborhood.attend(q, k, v, 3, scale=0.3)
    assert reference.relative_error(out, reference.neighborhood(q, k, v, 3, scale=0.3)[0]) < 1e-5
    out, lse = tw.neighborhood.attend(q[:0], k[:0], v[:0, ..., :3], 3, lse=True)
    assert out.shape == (0, 6, 6, 2, 3) and lse.shape == (0, 6, 6, 2)


@pytest.mark.parametrize("planned", [False, True])
def test_a_call_like_one_before_is_looked_at_where_it_differs(planned):
    q, k, v = torch.randn(3, 2, 6, 6, 2, 8)
    plan = tw.neighborhood.plan((6, 6), 3, heads=2, head_dim=8)
    attend = plan if planned else partial(tw.neighborhood.attend, window=3)
    first = attend(q, k, v)
    assert torch.equal(attend(q, k, v), first) and not torch.equal(attend(2 * q, k, v), first)
    assert torch.equal(attend(q, k, v, lse=True)[0], first) and torch.equal(attend(q, k, v, lse=True)[0], first)
    with pytest.raises(PatternError, match="k: expected shape"):
        attend(q, k[:, 1:], v)
    with pytest.raises(PatternError, match="k: expected a strided tensor"):
        attend(q, torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]), v)
    with pytest.raises(DeviceError, match="v: expected a tensor on cpu"):
        attend(q, k, v.to("meta"))
    assert attend(q.requires_grad_(), k, v).requires_grad
    with torch.no_grad():
        assert torch.equal(attend(q, k, v), first) and torch.equal(attend(q, k, v), first)
    assert attend(q, k, v).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(q.detach(), k, v).dtype == (torch.float32 if planned else torch.bfloat16)
    if not planned:
        assert not torch.allclose(tw.neighborhood.attend(q, k, v, 3, scale=0.1), first)
        assert not torch.allclose(tw.neighborhood.attend(q, k, v, 3, causal=True), first)


def test_a_plan_says_what_it_will_do():
    plan = tw.neighborhood.plan((121, 272, 480), 11, heads=4, head_dim=64, kv_heads=2, dtype=torch.bfloat16)
    assert plan.summary().splitlines()[:4] == [
        "neighbourhood attention on cpu, bfloat16",
        "grid 121×272×480, window 11×11×11, stride 1×1×1, dilation 1×1×1, causal False, False, False, border shift",
        "heads 4, 2 of keys, head_dim 64",
        "pairs of a head 21,026,818,560, 1,331.0 keys a query",
    ]
    assert re.fullmatch(
        r"box \d+×\d+×\d+, visited pairs [\d,]+, fill 0\.\d+, predicted .* ms for a batch of one",
        plan.summary().splitlines()[4],
    )
    # A box has all its pairs.
    assert plan.rule.pairs(plan.grid) < plan.choice.visited < 2**3 * plan.rule.pairs(plan.grid)
    planned = [tw.neighborhood.plan(16_000_000, 2048, heads=1, head_dim=8, stride=s) for s in (1, 3)]
    assert [one.rule.pairs(one.grid) for one in planned] == [16_000_000 * 2048] * 2
    assert all(one.choice.visited >= 16_000_000 * 2048 for one in planned)


Q = torch.zeros(1, 6, 6, 4, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": 7}, "window: expected at most the 6 tokens of axis 0, found window 7"),
        ({"dilation": (1, 3)}, "window: expected at most the 6 tokens of axis 1, found window 3 times dilation 3"),
        ({"stride": 4}, "stride: expected at most the window 3, found 4"),
        ({"causal": True, "border": "cut"}, 'border: expected "shift" with a causal axis, found "cut"'),
        ({"scale": float("nan")}, "scale: expected a finite number, found nan"),
        ({"lse": 1}, "lse: expected True or False, found 1"),
        ({"q": None}, "q: expected a strided tensor, found None"),
        (
            {"q": torch.zeros(2, 3)},
            "q: expected shape (batch, 1 to 3 axes of a grid, heads, head_dim), found (2, 3)",
        ),
        (
            {"q": Q.double()},
            "q: expected one of torch.float32, torch.bfloat16, torch.float16, found torch.float64",
        ),
        ({"k": Q.half()}, "k: expected dtype torch.float32 like q, found torch.float16"),
        ({"v": Q.to("meta")}, "v: expected a tensor on cpu like q, found meta"),
        (
            {"k": Q[:, :5]},
            "k: expected shape (1, 6, 6, any, 8) with q (1, 6, 6, 4, 8), found (1, 5, 6, 4, 8)",
        ),
        (
            {"v": Q[..., :2, :]},
            "v: expected shape (1, 6, 6, 4, any) with q (1, 6, 6, 4, 8), found (1, 6, 6, 2, 8)",
        ),
        ({"k": Q[..., :3, :]}, "k: expected a number of heads that divides the 4 of q, found 3"),
        ({"extra": Q}, "extra: expected a pair of keys and values, found torch.float32 of shape (1, 6, 6, 4, 8)"),
        (
            {"extra": (Q[:, 0, ..., :4], Q[:, 0])},
            "extra keys: expected shape (1, any, 4, 8) with q (1, 6, 6, 4, 8), found (1, 6, 4, 4)",
        ),
        (
            {"extra": (Q[:, 0], Q[:, 0, :5])},
            "extra values: expected shape (1, 6, 4, 8) with q (1, 6, 6, 4, 8), found (1, 5, 4, 8)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    with pytest.raises(TilewrightError) as refusal:
        tw.neighborhood.attend(**{"q": Q, "k": Q, "v": Q, "window": 3} | given)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grid": (0, 6)}, "grid: expected 2 integers of at least 1, found (0, 6)"),
        ({"grid": (2**30, 2**30, 6)}, "grid: expected fewer than 2^63 values, found the grid"),
        ({"heads": 0}, "heads: expected an integer of at least 1, found 0"),
        ({"kv_heads": 3}, "kv_heads: expected a divisor of the 4 heads, found 3"),
        ({"dtype": torch.float64}, "dtype: expected one of torch.float32"),
        ({"device": "meta"}, "device: expected one of cpu"),
    ],
)
def test_plans_of_what_is_no_grid_are_refused(given, message):
    with pytest.raises(TilewrightError) as refusal:
        tw.neighborhood.plan(**{"grid": (6, 6), "window": 3, "heads": 4, "head_dim": 8} | given)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_plans_refuse_other_tensors():
    plan = tw.neighborhood.plan((6, 6), 3, heads=4, head_dim=8)
    for x, message in (
        (Q[:, :5], "q: expected shape (B, 6, 6, 4, 8) and 4 heads of k as planned, found (1, 5, 6, 4, 8) and 4"),
        (Q.flatten(1, 2)[:, 1:], "q: expected the 36 tokens of (6, 6), found (1, 35, 4, 8)"),
        (Q.half(), "q: expected dtype torch.float32 as planned, found torch.float16"),
    ):
        with pytest.raises(PatternError) as refusal:
            plan(x, x, x)
        assert str(refusal.value) == message
    with pytest.raises(DeviceError, match="q: expected a tensor on cpu as planned, found meta"):
        plan(*[Q.to("meta")] * 3)


def gradients(of, *results):
    """Gradients of a loss of results."""
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in results)
    return torch.autograd.grad(loss, of)


@settings(max_examples=40)
@given(cases())
def test_gradients_are_those_of_the_oracle(case):
    grid, rule, form = case
    q, k, v, extra = tensors(grid, form)
    leaves = [x.requires_grad_() for x in (q, k, v, *(extra or ()))]
    found = gradients(leaves, *tw.neighborhood.attend(q, k, v, **rule, extra=extra, lse=True))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    pair = tuple(exact[3:]) if extra else None
    expected = gradients(exact, *reference.neighborhood(*exact[:3], **rule, extra=pair))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == form["dtype"]
        assert (one - other).abs().max() <= 4 * reference.TOLERANCE[one.dtype] * max(1, other.abs().max())


def test_a_bound_of_scores_changes_no_result():
    q, k, v = torch.randn(3, 1, 6, 6, 2, 8)
    given = {"heads": 2, "head_dim": 8, "bound": 20.0}
    out = tw.neighborhood.attend(q, k, v, 3)
    assert torch.equal(tw.neighborhood.attend(q, k, v, 3, bound=20.0), out)
    assert torch.equal(pickle.loads(pickle.dumps(tw.neighborhood.plan((6, 6), 3, **given)))(q, k, v), out)
    with pytest.raises(PatternError, match="bound: expected"):
        tw.neighborhood.attend(q, k, v, 3, bound="high")
