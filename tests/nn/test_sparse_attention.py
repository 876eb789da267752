"""The module with timm's names, against masked attention of torch."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tilewright
from helpers import gradients
from tilewright import nn as sparse
from tilewright.core.errors import ConfigError, PatternError
from tilewright.nn import attention, patterns


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "plans"))


def layer(pattern="window-3-g1", grid=(5, 7), dim=36, heads=2, **options):
    torch.manual_seed(0)
    made = sparse.SparseAttention(dim, heads, pattern, grid, **options).eval()
    if made.has_bias:
        torch.nn.init.normal_(made.relative_position_bias_table)
    return made


def reference(made, x, grid=None):
    """Masked attention, with the bias of each pair looked up by the offset of its tokens."""
    grid = made.grid if grid is None else grid
    g, n = made.attention.n_special, x.shape[1]
    graph = patterns.graph(made.attention.pattern, grid, g)
    indptr, indices = graph.expand()
    mask = torch.full((n, n), -torch.inf)
    mask[np.repeat(np.arange(n), np.diff(indptr)), indices] = 0
    if made.has_bias:
        table, none = made.relative_position_bias_table[:-1], made.relative_position_bias_table[-1]
        table = table.unflatten(0, (2 * grid[0] - 1, 2 * grid[1] - 1))
        bias = none.expand(n, n, -1).clone()
        for q in range(g, n):
            for k in range(g, n):
                (qy, qx), (ky, kx) = (divmod(at - g, grid[1]) for at in (q, k))
                bias[q, k] = table[qy - ky + grid[0] - 1, qx - kx + grid[1] - 1]
        mask = mask + bias.movedim(-1, 0)
    q, k, v = made.qkv(x).reshape(len(x), n, 3, made.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k, mask = made.q_norm(q), made.k_norm(k), mask.to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=made.attention.scale)
    return made.proj(out.transpose(1, 2).flatten(2))


CASES = {
    "window": {},
    "head-dim-18": {"dim": 36, "heads": 2},
    "head-dim-32": {"dim": 64, "heads": 2, "qkv_bias": False},
    "norms": {"qk_norm": True},
    "bias": {"bias": True},
    "scale": {"scale": 0.5},
    "shifted": {"pattern": "swin-3-shift-g2", "grid": (6, 9), "bias": True},
    "full": {"pattern": "full", "grid": (4, 4), "bias": True, "special": 1},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@torch.no_grad()
def test_it_is_masked_attention(options):
    made = layer(**options)
    x = torch.randn(2, made.attention.n_special + made.grid[0] * made.grid[1], made.qkv.in_features)
    wanted = reference(made, x)
    torch.testing.assert_close(made(x), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made.leave(made(made.enter(x), ordered=True)), wanted, rtol=1e-4, atol=1e-5)


RUNS = {
    "eager": lambda made: made,
    "compiled": lambda made: torch.compile(made, backend="aot_eager"),
    "checkpointed": lambda made: lambda x: checkpoint(made, x, use_reentrant=False),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_it_trains_as_masked_attention(options, run):
    made = layer(**options).train()
    x = torch.randn(2, made.attention.n_special + made.grid[0] * made.grid[1], made.qkv.in_features)
    exact = copy.deepcopy(made).double()
    wanted = gradients.of(exact, lambda x: reference(exact, x), x.double())
    torch.compiler.reset()
    gradients.agree(gradients.of(made, run(made), x), wanted)


def test_names_are_timms():
    names = set(layer(qk_norm=True).state_dict())
    of_norms = {f"{n}_norm.{p}" for n in "qk" for p in ("weight", "bias")}
    assert names == {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"} | of_norms
    assert set(layer(qkv_bias=False, proj_bias=False).state_dict()) == {"qkv.weight", "proj.weight"}
    assert tilewright.nn.SparseAttention is sparse.SparseAttention


@torch.no_grad()
def test_another_grid_in_a_call():
    made = layer()
    x = torch.randn(1, 1 + 4 * 6, 36)
    torch.testing.assert_close(made(x, (4, 6)), reference(made, x, (4, 6)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda table: table.mul_(-2), id="in-place"),
        pytest.param(lambda table: table.data.mul_(-0.5).add_(torch.randn_like(table)), id="average"),
        pytest.param(lambda table: table.numpy().__imul__(-2), id="numpy"),
        pytest.param(lambda table: setattr(table, "data", -2 * table), id="data"),
        pytest.param(lambda table: torch.optim.SGD([table], 3.0, foreach=True).step(), id="step"),
    ],
)
@torch.no_grad()
def test_a_table_that_is_written_to_is_seen_and_copies_have_their_own(write):
    made, x = layer(bias=True), torch.randn(1, 36, 36)
    before = made(x)
    other, again = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    made.relative_position_bias_table.grad = torch.randn_like(made.relative_position_bias_table)
    write(made.relative_position_bias_table)
    assert not torch.allclose(made(x), before, atol=1e-3)
    torch.testing.assert_close(made(x), reference(made, x), rtol=1e-4, atol=1e-5)
    assert torch.equal(other(x), before) and torch.equal(again(x), before)


@torch.no_grad()
def test_a_compiled_layer_is_one_graph_and_sees_what_is_written_to_its_table():
    made, x = layer(bias=True), torch.randn(1, 36, 36)
    before = made(x)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), before)
    made.relative_position_bias_table.data.mul_(-2)
    torch.testing.assert_close(compiled(x), reference(made, x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_compiler_brings_tokens_into_plan_order_before_any_call():
    made, x = layer(), torch.randn(1, 36, 36)
    compiled = torch.compile(
        lambda x: made.attention.leave(2 * made.attention.enter(x, (5, 7)), (5, 7)), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(x), 2 * x)


@torch.no_grad()
def test_layers_with_biases_of_one_form_share_what_is_compiled_of_one():
    layers, x = [layer(bias=True) for _ in range(3)], torch.randn(1, 36, 36)
    expected = [made(x) for made in layers]
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for made, out in zip(layers, expected, strict=True):
            torch.testing.assert_close(torch.compile(made, fullgraph=True, backend="eager")(x), out)


@torch.no_grad()
def test_equal_patterns_share_a_plan_which_is_made_in_the_first_call(monkeypatch):
    made = []
    plan = tilewright.attention.plan.plan
    monkeypatch.setattr(tilewright.attention.plan, "plan", lambda *a, **k: made.append(a) or plan(*a, **k))
    monkeypatch.setattr(attention, "_SITES", {})
    first, second = (
        layer(grid=(3, 11)),
        layer(lambda grid, g: patterns.graph("window-3-g1", grid, 1), (3, 11), special=1),
    )
    assert not made
    x = torch.randn(1, 34, 36)
    assert torch.equal(first(x), second(x)) and len(made) <= 1
    plans = [each.attention.plan((3, 11), torch.float32, torch.device("cpu")) for each in (first, layer(grid=(3, 11)))]
    assert plans[0].graph is plans[1].graph


@pytest.mark.parametrize(
    ("options", "error", "line"),
    [
        ({"heads": 5}, ConfigError, "dim: expected a multiple of the 5 heads, found 36"),
        ({"grid": 7}, ConfigError, "expected .rows, columns. of tokens, found 7"),
        ({"special": 5}, PatternError, "special tokens, 5, found 1; name it window-3-g5"),
        ({"pattern": "swin-4"}, PatternError, "whole windows of 4, found 5 x 7"),
    ],
)
def test_what_does_not_fit_is_named(options, error, line):
    with pytest.raises(error, match=line):
        layer(**options)


def test_calls_that_do_not_fit_are_named():
    made = layer(bias=True)
    with torch.no_grad():
        with pytest.raises(PatternError, match="expected 36 tokens, 1 special and a grid of 5 x 7, found 35"):
            made(torch.randn(1, 35, 36))
        with pytest.raises(PatternError, match="expected the grid of the bias table"):
            made(torch.randn(1, 36, 36), (7, 5))
        q = torch.randn(1, 2, 36, 18)
        with pytest.raises(PatternError, match="of one dtype and device"):
            made.attention.attend(q, q.half(), q, (5, 7))


def test_a_pattern_and_its_plans_are_freed_with_the_last_layer_that_has_it():
    made = sparse.SparseAttention(16, 2, np.eye(12, dtype=bool), (3, 4))
    with torch.no_grad():
        made(torch.randn(1, 12, 16))
    site = weakref.ref(made.attention.site((3, 4)))
    other = copy.deepcopy(made)
    del made
    gc.collect()
    assert site() is not None
    del other
    gc.collect()
    assert site() is None
