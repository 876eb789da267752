"""Torch's own attention as what a plan runs: every form against the oracle, its choice, its file and its gradients."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from helpers.factories import quick_profiles
from helpers.plans import running
from tilewright import graph, reference
from tilewright.attention import native, schedule
from tilewright.attention import plan as api
from tilewright.attention.masks import Bias
from tilewright.attention.measure import beside_torch
from tilewright.core.errors import ArtifactError, PatternError
from tilewright.devices import limits
from tilewright_study.measure.schedule_check import violations

H, D = 3, 16


def patterns(kind, n_q, n_k, seed):
    """A pattern [n_q, n_k] that has some form: `windows` by a random owner of equally many tokens each."""
    rng = np.random.default_rng(seed)
    if kind == "random":
        dense = rng.random((n_q, n_k)) < 0.3
    elif kind == "kept":
        dense = np.tile(rng.random(n_k) < 0.4, (n_q, 1))
    elif kind == "full":
        dense = np.ones((n_q, n_k), bool)
    elif kind == "empty":
        dense = (rng.random(n_q) < 0.6)[:, None] & (rng.random((n_q, n_k)) < 0.5) & (rng.random(n_k) < 0.6)
    elif kind == "dense rows":
        dense = (rng.random(n_q) < 0.6)[:, None] & (rng.random(n_k) < 0.6)
    else:
        owners = [rng.permutation(np.repeat(np.arange(4), n)) for n in (n_q // 4, n_k // 4)]
        dense = owners[0][:, None] == owners[1]
    dense[0, 0] |= not dense.any()
    return dense


KINDS = ("random", "kept", "full", "empty", "dense rows", "windows")


def made(pattern, form, **options):
    """A plan of `pattern` that runs `form`, None for the tiles; nothing is timed."""
    with mock.patch.object(api, "expected", quick_profiles):
        plan = tw.plan(pattern, heads=H, head_dim=D, tiles=("16x1", "32x1"), solver="greedy", **options)
    return plan if form is None else running(plan, form)


def tensors(n_q, n_k, batch=1, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(batch, H, n, D).to(dtype) for n in (n_q, n_k, n_k)]


def of_table(rows, cols):
    return (rows * 7 + cols * 3) % 11


def biases(kind, n_q, n_k, dense):
    """``(bias for a plan, its values [H, N_q, N_k])``."""
    torch.manual_seed(1)
    if kind == "table":
        table = torch.randn(H, 11)
        index = of_table(np.arange(n_q)[:, None], np.arange(n_k))
        return Bias(table, of_table), table[:, torch.from_numpy(index)]
    if kind in ("dense", "far"):
        values = torch.randn(H, n_q, n_k) + (1000 if kind == "far" else 0)
        values[:, :, 0] = -torch.inf
        return values, values
    return None, None


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    bias=st.sampled_from((None, "table", "dense", "far")),
    scale=st.sampled_from((None, 0.3)),
    batch=st.integers(1, 3),
    ordered=st.booleans(),
    seed=st.integers(0, 99),
    order=st.sampled_from(("none", "ic")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_forms_compute_the_pattern(kind, bias, scale, batch, ordered, seed, order, dtype):
    n_q, n_k = 36, 44
    dense = patterns(kind, n_q, n_k, seed)
    given_bias, values = biases(bias, n_q, n_k, dense)
    plan = made(dense, None, bias=given_bias, scale=scale, reorder=order, dtype=dtype)
    q, k, v = tensors(n_q, n_k, batch, dtype, seed)
    expected = reference.attention(q, k, v, torch.from_numpy(dense), bias=values, scale=scale)
    rows, cols = (plan.row_order, plan.col_order) if ordered else (slice(None), slice(None))
    names = native.forms(plan.graph)
    assert "masked" in names
    assert ("windows" in names) == (kind == "windows")
    assert ("products" in names) >= (kind in ("kept", "full", "dense rows"))
    for name, form in names.items():
        if not native.able(form, device="cpu", heads=H, dtype=dtype, biased=bias is not None):
            assert name == "products" and running(plan, name).schedule.runs == "tiles"
            continue
        found = running(plan, name)(q[:, :, rows], k[:, :, cols], v[:, :, cols], ordered=ordered)
        assert reference.relative_error(found, expected[:, :, rows]) <= reference.TOLERANCE[dtype], name
        assert found.transpose(1, 2).is_contiguous() or found.is_contiguous()
        assert found.dtype == dtype


@pytest.mark.parametrize("bias", (None, "table"))
@pytest.mark.parametrize("by", ("head", "image", "both"))
@pytest.mark.parametrize("ordered", (False, True))
def test_several_patterns(by, bias, ordered):
    n_q, n_k, images = 20, 28, 4
    dense = np.stack([patterns("empty", n_q, n_k, seed) for seed in range(12)])
    dense[:, :, 5] = False
    allowed = {
        "head": dense[None, [0, 1, 0]],
        "image": dense[[0, 1, 1, 2], None],
        "both": dense.reshape(4, 3, n_q, n_k),
    }
    allowed = np.broadcast_to(allowed[by], (1 if by == "head" else images, H, n_q, n_k))
    given_bias, values = biases(bias, n_q, n_k, dense)
    plan = made(allowed if by != "head" else allowed[0], None, bias=given_bias, by="image" if by == "image" else "head")
    q, k, v = tensors(n_q, n_k, images)
    expected = reference.attention(q, k, v, torch.from_numpy(allowed.copy()), bias=values)
    rows, cols = (plan.row_order, plan.col_order) if ordered else (slice(None), slice(None))
    assert list(native.forms(plan.graph, plan.units)) == ["masked", "compacted"]
    for name in ("masked", "compacted"):
        found = running(plan, name)(q[:, :, rows], k[:, :, cols], v[:, :, cols], ordered=ordered)
        assert reference.relative_error(found, expected[:, :, rows]) <= reference.TOLERANCE[torch.float32], name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", (None, "table", "dense"))
@pytest.mark.parametrize("ordered", (False, True))
def test_gradients(kind, bias, ordered):
    n_q, n_k = 36, 44
    dense = patterns(kind, n_q, n_k, 3)
    given_bias, values = biases(bias, n_q, n_k, dense)
    plan = made(dense, None, bias=given_bias)
    q, k, v = (x.requires_grad_() for x in tensors(n_q, n_k, 2))
    grad = torch.randn(2, H, n_q, D)
    expected = torch.autograd.grad(
        reference.attention(q, k, v, torch.from_numpy(dense), bias=values), (q, k, v), grad.double()
    )
    rows, cols = (plan.row_order, plan.col_order) if ordered else (slice(None), slice(None))
    for name in native.forms(plan.graph):
        one = running(plan, name)
        out = one(q[:, :, rows], k[:, :, cols], v[:, :, cols], ordered=ordered)
        for mine, theirs in zip(torch.autograd.grad(out, (q, k, v), grad[:, :, rows]), expected, strict=True):
            assert torch.allclose(mine, theirs.float(), atol=2e-5), name
            assert mine.shape == theirs.shape


def test_gradient_of_a_bias():
    dense = patterns("random", 36, 44, 3)
    given_bias, _ = biases("table", 36, 44, dense)
    plan, table = made(dense, "masked", bias=given_bias), torch.randn(H, 11, requires_grad=True)
    q, k, v = tensors(36, 44)
    found = torch.autograd.grad(plan(q, k, v, bias=table).sum(), table)[0]
    expected = torch.autograd.grad(made(dense, None, bias=given_bias)(q, k, v, bias=table).sum(), table)[0]
    assert torch.allclose(found, expected, atol=1e-5)


def test_values_of_a_bias_by_call():
    dense = patterns("random", 36, 44, 3)
    given_bias, _ = biases("table", 36, 44, dense)
    plan = made(dense, "masked", bias=given_bias)
    q, k, v = tensors(36, 44)
    for seed in (1, 2):
        table = torch.randn(H, 11, generator=torch.Generator().manual_seed(seed))
        index = torch.from_numpy(of_table(np.arange(36)[:, None], np.arange(44)))
        expected = reference.attention(q, k, v, torch.from_numpy(dense), bias=table[:, index])
        assert reference.relative_error(plan(q, k, v, bias=table), expected) < 1e-5


@pytest.mark.parametrize("kind", ("kept", "windows"))
def test_compiled(kind):
    dense = patterns(kind, 36, 44, 3)
    plan = made(dense, "compacted" if kind == "kept" else "windows")
    q, k, v = (x.requires_grad_() for x in tensors(36, 44))
    compiled = torch.compile(lambda q, k, v: plan(q, k, v) * 2, fullgraph=True, backend="aot_eager")
    found, expected = compiled(q, k, v), plan(q, k, v) * 2
    assert torch.equal(found, expected)
    for one, other in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, expected)), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_plan_says_what_runs_and_its_file_keeps_it(tmp_path):
    dense = patterns("kept", 36, 44, 3)
    plan = made(dense, "compacted")
    assert plan.schedule.runs == "torch:compacted"
    assert "torch:compacted instead of the tiles" in plan.summary()
    assert f"{plan.schedule.own_us:.1f} µs" in plan.summary()
    plan.save(tmp_path / "a.plan")
    loaded = tw.load(tmp_path / "a.plan")
    q, k, v = tensors(36, 44)
    assert loaded.schedule.runs == plan.schedule.runs
    assert loaded.schedule.own_us == plan.schedule.own_us
    assert loaded.digest() == plan.digest() != made(dense, None).digest()
    for other in (loaded, copy.deepcopy(plan), pickle.loads(pickle.dumps(loaded))):
        assert torch.equal(other(q, k, v), plan(q, k, v))


def test_what_is_chosen_is_never_predicted_slower():
    dense = patterns("kept", 65, 65, 3)
    plan = tw.plan(dense, heads=H, head_dim=D)
    made_by = plan.schedule
    fixed = [
        schedule.solve({name: plan.blocks[name]}, {name: plan.profiles[name]}, limits(plan.profiles[name].device))
        for name in plan.blocks
    ]
    assert made_by.predicted_us <= min(each.predicted_us for each in fixed) * (1 + 1e-9)
    assert made_by.predicted_us <= min(made_by.torch_us.values())
    # A call of so few tokens is not worth handing to workers.
    assert made_by.form in ("masked", "compacted")
    assert not violations(made_by, plan.blocks, plan.profiles, limits(next(iter(plan.profiles.values())).device))
    assert made_by.torch_us == next(iter(plan.profiles.values())).torch_us


@pytest.mark.parametrize("near", (0.9, 1.1, 0.1, 10.0))
def test_close_predictions_are_settled_in_turns(near, monkeypatch):
    plan = made(patterns("random", 36, 44, 3), None)
    own_us = plan.schedule.tiles_us
    asked = []

    def timed(calls, **_):
        asked.append([call.func.launches for call in calls[:2]])
        return [SimpleNamespace(p20_us=us) for us in (3.0, 2.0, 5.0, 4.0)]

    monkeypatch.setattr(native.timing, "time_together", timed)
    known = schedule.choose(plan.schedule, {"masked": near * own_us})
    sizes = {"device": "cpu", "heads": H, "head_dim": D, "dtype": "float32"}
    found = native.in_turns(known, plan.blocks, plan.graph, **sizes)
    if near in (0.1, 10.0):
        assert not asked and found == known.torch_us
        return
    assert found == {"masked": pytest.approx(1.5 * own_us)}
    assert asked[0][0] == ("torch:masked",) and asked[0][1] != asked[0][0]


def test_who_names_tiles_gets_tiles():
    dense = patterns("kept", 65, 65, 3)
    for options in ({"tiles": ("32x1",)}, {"solver": "greedy"}, {"solver": "highs-paper"}):
        plan = tw.plan(dense, heads=H, head_dim=D, **options)
        assert plan.schedule.runs == "tiles"
        assert plan.schedule.torch_us is None


BROKEN = {
    "no time": dict(torch_us=None),
    "another time": dict(predicted_us=2e-3),
    "tiles, stated twice": dict(runs="tiles"),
    "slower": dict(torch_us={"masked": 1e-3, "compacted": 1e-4}),
    "no time of tiles": dict(own_us=None),
    "wrong time of tiles": dict(own_us=1.0),
    "unknown": dict(runs="torch:other"),
}


@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN)
def test_the_checker_sees_a_broken_choice(changes):
    plan = made(patterns("kept", 36, 44, 3), "masked")
    given = plan.blocks, plan.profiles, limits(next(iter(plan.profiles.values())).device)
    assert not violations(plan.schedule, *given)
    assert violations(replace(plan.schedule, **changes), *given)


def test_a_choice_of_tiles_that_is_not_the_fastest_is_seen():
    plan = made(patterns("kept", 36, 44, 3), None)
    given = plan.blocks, plan.profiles, limits(next(iter(plan.profiles.values())).device)
    for us, wrong in ((1e9, False), (1e-3, True)):
        times = {"masked": us}
        profiles = {name: replace(of, torch_us=times) for name, of in plan.profiles.items()}
        found = violations(replace(plan.schedule, torch_us=times), given[0], profiles, given[2])
        assert bool(found) == wrong
    assert violations(schedule.choose(plan.schedule, {"masked": 1e9}), *given)


def test_a_form_that_the_pattern_does_not_have(tmp_path):
    plan = made(patterns("random", 36, 44, 3), None)
    with pytest.raises(PatternError, match="torch:windows, a form that the pattern does not have"):
        running(plan, "windows")
    with pytest.raises(PatternError, match="of masked; found windows"):
        native.prepare("windows", plan.graph, heads=H, head_dim=D, dtype=torch.float32, device="cpu")
    plan.schedule = schedule.choose(plan.schedule, {"windows": 1e-3})
    plan.save(tmp_path / "a.plan")
    with pytest.raises(ArtifactError, match="a form of masked"):
        tw.load(tmp_path / "a.plan")


def test_other_tensors_are_refused():
    plan = made(patterns("kept", 36, 44, 3), "compacted")
    q, k, v = tensors(36, 44)
    plan(q, k, v)
    for wrong in ((q[:, :, :35], k, v), (q, k.double(), v), (q, k, v[:, :2])):
        with pytest.raises(PatternError):
            plan(*wrong)
    plan(*tensors(36, 44, 3))


def test_layouts():
    """Tokens as a network's projection leaves them, expanded and transposed ones."""
    dense = patterns("windows", 36, 44, 3)
    for name in ("masked", "windows"):
        plan = made(dense, name)
        q, k, v = tensors(36, 44, 2)
        expected = plan(q, k, v)
        for move in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT):
            found = plan(*map(move, (q, k, v)))
            assert torch.allclose(found, expected, atol=1e-6)
            assert found.transpose(1, 2).is_contiguous() and not found.is_contiguous()
        assert torch.allclose(plan(q, k, v[:1].expand(2, -1, -1, -1)), plan(q, k, v[:1].repeat(2, 1, 1, 1)))


@pytest.mark.parametrize("form", ("masked", "compacted", "products"))
def test_results_of_queries_by_head_stay_by_head(form):
    """To copy them takes a tenth of a small call. The registered operator returns one layout in any case."""
    plan = made(patterns("kept", 36, 44, 3), form, reorder="none")
    given = tensors(36, 44)
    expected = torch.ops.tilewright.attend(*given, plan.digest(), False)
    assert expected.transpose(1, 2).is_contiguous()
    for _ in range(2):
        found = plan(*given)
        assert found.is_contiguous() and torch.allclose(found, expected, atol=1e-6)
    assert plan(given[0].clone().requires_grad_(), *given[1:]).requires_grad


def test_autocast_and_inference():
    plan = made(patterns("kept", 36, 44, 3), "compacted")
    q, k, v = tensors(36, 44)
    expected = plan(q, k, v)
    with torch.autocast("cpu"):
        assert torch.equal(plan(q, k, v), expected)
    with torch.inference_mode():
        assert torch.equal(plan(q, k, v), expected)
    expected += 1


@pytest.mark.parametrize("form", ("masked", "compacted"))
def test_what_is_dropped_is_freed_at_once(form):
    plan = made(patterns("empty", 36, 44, 3), form)
    plan(*tensors(36, 44))
    (executor,) = (weakref.ref(each) for each in plan._prepared.values())
    assert executor() is not None
    gc.disable()
    try:
        plan._prepared.clear()
        plan._called.clear()
        assert executor() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ("random", "dense rows", "windows"))
def test_as_on_a_gpu(kind):
    """Masks of the type of the queries, with aligned rows."""
    dense = patterns(kind, 36, 44, 3)
    plan = made(dense, None, dtype=torch.bfloat16)
    q, k, v = tensors(36, 44, 2, torch.bfloat16)
    expected = reference.attention(q, k, v, torch.from_numpy(dense))
    orders = {"row_order": plan.graph.row_order, "col_order": plan.graph.col_order}
    for name, form in native.forms(plan.graph).items():
        if form.products:
            continue
        run = native.prepare(name, plan.graph, heads=H, head_dim=D, dtype=torch.bfloat16, device="cpu", **orders)
        run = run.moved(torch.device("cpu"))
        assert run.mask is None or (run.mask.dtype == torch.bfloat16 and run.mask.stride(2) % 16 == 0)
        assert reference.relative_error(run(q, k, v), expected) <= reference.TOLERANCE[torch.bfloat16], name
        assert not run.differentiates


def test_masks_too_large_are_left_to_tiles():
    form = native.forms(graph.from_pattern(patterns("random", 36, 44, 3)))["masked"]
    options = {"device": "cpu", "heads": 6, "dtype": torch.float32}
    assert native.able(form, **options, biased=True)
    large = replace(form, rows=np.zeros((1, 9000), int), keys=np.zeros((1, 9000), int))
    assert not native.able(large, **options, biased=False)
    assert native.able(replace(large, dense=True), **options, biased=False)
    assert not native.able(replace(large, dense=True), **options, biased=True)
    assert not native.able(form, device="cuda", heads=6, dtype=torch.bfloat16, biased=True)
    assert not native.able(replace(form, empty=True), device="cuda", heads=6, dtype=torch.bfloat16, biased=False)


def test_small_forms_are_timed_by_token_and_by_head(monkeypatch):
    found = graph.from_pattern(patterns("kept", 64, 64, 3))
    seen = []

    def timed(runs, given, *_):
        seen.append([x.is_contiguous() for x in given])
        return dict.fromkeys(runs, 2.0 * len(seen))

    monkeypatch.setattr(native, "_timed", timed)
    common = {"device": "cpu", "head_dim": D, "dtype": "float32", "own_us": 1e9}
    assert native.times(found, heads=H, **common) == dict.fromkeys(("masked", "compacted", "products"), 3.0)
    assert seen == [[False] * 3, [True] * 3]
    native.times(found, heads=1, **common)
    assert len(seen) == 3


def test_forms_that_cannot_win_are_not_timed():
    found = graph.from_pattern(patterns("random", 64, 64, 3))
    common = {"device": "cpu", "heads": H, "head_dim": D, "dtype": "float32"}
    assert native.times(found, **common, own_us=1e-9) == {}
    assert native.times(found, **common, own_us=1e9)["masked"] > 0


def test_what_tiles_take_counts_their_launches():
    """Those of a small pattern take nearly all of it."""
    plan = made(patterns("random", 64, 64, 3), None)
    name, profile = next(iter(plan.profiles.items()))
    shapes = tuple(replace(shape, latency_us=1e-6) for shape in profile.shapes)
    for launch_us, timed in ((0.0, False), (1e9, True)):
        found = beside_torch({name: replace(profile, launch_us=launch_us, shapes=shapes)}, plan.graph, heads=H)
        assert bool(found[name].torch_us) == timed


@pytest.mark.parametrize("layout", ("by head", "by token", "strided"))
def test_keys_are_compacted_in_any_layout(layout):
    pattern = patterns("kept", 60, 60, 3)
    inputs = torch.randn(3, 2, H, 60, 2 * D)[..., :D]
    if layout != "strided":
        order = (0, 1, 2, 3, 4) if layout == "by head" else (0, 1, 3, 2, 4)
        inputs = inputs.permute(order).contiguous().permute(order)
    expected = reference.attention(*inputs, torch.from_numpy(pattern)).float()
    assert torch.allclose(made(pattern, "compacted")(*inputs), expected, atol=1e-5)
