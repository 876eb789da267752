import copy
import inspect
import os
import pickle
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

import tilewright as tw
from helpers.factories import quick_profiles
from helpers.gpu import hide_gpu
from helpers.solvers import need
from tilewright import devices, graph, masks
from tilewright.attention import backends, blocks, patterns, reorder
from tilewright.attention import plan as api
from tilewright.attention.blocks import tiles, work
from tilewright.attention.cuda import config as cuda_config
from tilewright.attention.cuda import executor as cuda_executor
from tilewright.attention.profile import item_shape
from tilewright.attention.reorder import _grid
from tilewright.core.errors import InfeasibleError
from tilewright.core.timing import Timing
from tilewright.devices.cpu import facts as cpu_facts

H, D = 2, 16


def banded(n_q, n_k, seed=0):
    rows, cols = np.ogrid[:n_q, :n_k]
    dense = np.abs(rows - cols) < 9
    dense |= np.random.default_rng(seed).random((n_q, n_k)) < 0.02
    dense[5] = True
    dense[11] = False
    return dense


def tensors(n_q, n_k, batch=2, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(batch, H, n, D, dtype=dtype) for n in (n_q, n_k, n_k)]


def dense_attention(q, k, v, dense, bias=0.0):
    scores = q.double() @ k.double().mT * D**-0.5 + bias
    scores = scores.masked_fill(~torch.as_tensor(dense), -torch.inf)
    return torch.nan_to_num(torch.softmax(scores, -1)) @ v.double()


def make(pattern, **options):
    return tw.plan(pattern, heads=H, head_dim=D, **options)


def as_graph(pattern, shape=None, kind="cpu"):
    """The graph of a pattern that is one for all heads and images."""
    (found,), units = patterns.read(pattern, heads=H, kind=kind, shape=shape)
    assert units is None
    return found


@pytest.fixture(scope="module")
def dense():
    return banded(150, 130)


@pytest.fixture(scope="module")
def planned(dense):
    return make(dense)


@pytest.mark.parametrize(
    "form", [sp.csr_matrix, sp.coo_array, torch.tensor, graph.from_pattern], ids=lambda form: form.__name__
)
def test_every_form_of_a_pattern_gives_the_oracles_result(dense, form):
    q, k, v = tensors(*dense.shape)
    out = make(form(dense), reorder="none", tiles=["32x1"])(q, k, v)
    torch.testing.assert_close(out.double(), dense_attention(q, k, v, dense), atol=2e-5, rtol=2e-5)


def test_a_mask_mod_is_a_pattern():
    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < 7

    q, k, v = tensors(90, 90)
    expected = dense_attention(q, k, v, np.abs(np.subtract.outer(range(90), range(90))) < 7)
    torch.testing.assert_close(make(window, shape=(90, 90))(q, k, v).double(), expected, atol=2e-5, rtol=2e-5)


def test_a_mask_mod_without_its_shape_is_refused():
    with pytest.raises(tw.TilewrightError, match="needs its shape"):
        make(lambda b, h, q, k: q >= k)


def test_a_mask_mod_may_read_the_head():
    allowed = torch.rand(H, 20, 30, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[:] = allowed[0]
    planned = make(lambda b, h, q_idx, kv_idx: allowed[h, q_idx, kv_idx], shape=(20, 30), solver="greedy")
    q, k, v = tensors(20, 30)
    expected = dense_attention(q, k, v, allowed[0])
    torch.testing.assert_close(planned(q, k, v).double(), expected, atol=2e-5, rtol=2e-5)


def test_a_mask_mod_that_raises_is_refused_in_one_line():
    allowed = torch.ones(1, 20, 30, dtype=torch.bool)
    with pytest.raises(tw.errors.PatternError, match="b=1, h=0 on cpu failed: index 1"):
        make(lambda b, h, q_idx, kv_idx: allowed[b, q_idx, kv_idx], shape=(20, 30))


def test_a_mask_mod_is_evaluated_on_the_gpu_that_is_planned_for_else_on_the_cpu(monkeypatch):
    tried = []

    def evaluate(mask_mod, n_q, n_k, heads, images, device):
        tried.append(device)
        if device == "cuda":
            raise tw.errors.PatternError("") from RuntimeError("tensors on different devices")
        return [[graph.from_pattern(np.ones((n_q, n_k), bool))]], False

    monkeypatch.setattr(patterns, "_evaluated", evaluate)
    assert as_graph(lambda b, h, q, k: q >= k, (20, 30), "cuda").shape == (20, 30)
    assert tried == ["cuda", "cpu"]
    tried.clear()
    assert as_graph(lambda b, h, q, k: q >= k, (20, 30)).shape == (20, 30)
    assert tried == ["cpu"]


def near(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < 9


@pytest.mark.parametrize("batch, heads", [(None, None), (1, 1), (None, H), (2, None), (2, H)])
@pytest.mark.parametrize("separate", [True, False])
def test_a_block_mask_is_a_pattern(batch, heads, separate):
    options = {} if separate else {"separate_full_blocks": False}
    if not {*options} <= {*inspect.signature(flex_attention.create_block_mask).parameters}:
        pytest.skip("this release of torch always separates full blocks")
    mask = flex_attention.create_block_mask(near, batch, heads, 90, 75, device="cpu", BLOCK_SIZE=(16, 32), **options)
    found = as_graph(mask)
    np.testing.assert_array_equal(found.to_dense(), np.abs(np.subtract.outer(range(90), range(75))) < 9)


def test_a_plan_of_a_block_mask_computes_what_flex_attention_does():
    mask = flex_attention.create_block_mask(near, None, None, 90, 75, device="cpu", BLOCK_SIZE=16)
    q, k, v = tensors(90, 75)
    expected = flex_attention.flex_attention(q, k, v, block_mask=mask)
    # Queries without a key give zeros in both.
    torch.testing.assert_close(make(mask, solver="greedy")(q, k, v), expected, atol=2e-5, rtol=2e-5)


def test_a_block_mask_of_blocks_alone_is_a_pattern():
    blocks = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    order = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    mask = flex_attention.BlockMask.from_kv_blocks(
        blocks.sum(1).int()[None, None], order[None, None], BLOCK_SIZE=(8, 16), seq_lengths=(20, 40)
    )
    expected = blocks.repeat_interleave(8, 0).repeat_interleave(16, 1)[:20, :40]
    np.testing.assert_array_equal(as_graph(mask).to_dense(), expected)


def test_another_shape_than_that_of_a_block_mask_is_refused():
    mask = flex_attention.create_block_mask(near, None, None, 90, 75, device="cpu")
    with pytest.raises(tw.errors.PatternError, match=r"the pattern's \(N_q, N_k\), \(90, 75\), found \(90, 90\)"):
        make(mask, shape=(90, 90))
    assert as_graph(mask, (90, 75)).shape == (90, 75)


@pytest.mark.parametrize("form", [np.asarray, torch.tensor], ids=["array", "tensor"])
def test_equal_slices_of_a_mask_are_one_pattern(dense, form):
    assert as_graph(form(np.broadcast_to(dense, (3, H, *dense.shape)))).id == graph.from_pattern(dense).id


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensor_is_a_pattern(dense, layout):
    for dtype in (torch.float32, torch.bool):
        mask = torch.tensor(dense, dtype=dtype).to_sparse(layout=layout)
        assert as_graph(mask).id == graph.from_pattern(dense).id


def test_a_mask_of_bfloat16_is_a_pattern(dense):
    mask = torch.tensor(dense, dtype=torch.bfloat16)
    assert as_graph(mask).id == graph.from_pattern(dense).id


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_masks_may_lie_on_a_gpu(dense):
    wanted, on_gpu = graph.from_pattern(dense).id, torch.tensor(dense, device="cuda")
    mask = flex_attention.create_block_mask(
        lambda b, h, q_idx, kv_idx: on_gpu[q_idx, kv_idx], None, None, *dense.shape, device="cuda"
    )
    forms = (
        on_gpu,
        on_gpu.to_sparse(),
        mask,
        lambda b, h, q_idx, kv_idx: on_gpu[q_idx, kv_idx] & (q_idx + on_gpu[0, 0] >= 0),
    )
    assert {as_graph(form, dense.shape, "cuda").id for form in forms} == {wanted}


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_not_finite_is_refused(dense, scale):
    with pytest.raises(tw.errors.PatternError, match=f"scale: expected a finite number, found {scale}"):
        make(dense, scale=scale)


def test_a_scale_of_zero_means_the_mean_of_what_is_allowed(dense):
    q, k, v = tensors(*dense.shape)
    allowed = torch.as_tensor(dense).double()
    expected = torch.nan_to_num(allowed / allowed.sum(1, keepdim=True)) @ v.double()
    out = make(dense, scale=0, solver="greedy")(q, k, v)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


def test_a_graph_file_is_a_pattern(tmp_path, dense):
    graph.save(tmp_path / "g.npz", graph.from_pattern(dense))
    q, k, v = tensors(*dense.shape)
    out = make(tmp_path / "g.npz", reorder="none")(q, k, v)
    torch.testing.assert_close(out.double(), dense_attention(q, k, v, dense), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("solver", ["greedy", "highs", "gurobi"])
def test_every_solver(tmp_path, dense, solver):
    need(solver)
    q, k, v = tensors(*dense.shape)
    planned = make(dense, solver=solver)
    assert planned.schedule.solver == solver
    planned.save(tmp_path / "p.plan")
    assert tw.load(tmp_path / "p.plan").digest() == planned.digest()
    torch.testing.assert_close(planned(q, k, v).double(), dense_attention(q, k, v, dense), atol=2e-5, rtol=2e-5)


def test_tokens_in_plan_order(dense, planned):
    q, k, v = tensors(*dense.shape)
    rows, cols = planned.row_order, planned.col_order
    out = planned(q[:, :, rows], k[:, :, cols], v[:, :, cols], ordered=True)
    torch.testing.assert_close(out, planned(q, k, v)[:, :, rows], atol=2e-5, rtol=2e-5)


def test_auto_takes_the_windows_a_model_declares_where_no_order_is_cheaper():
    _, info = api._reorder(masks.build("vil-tiny-224-s1"), "auto", lambda ordered: ordered)
    assert info["order"] == "window"
    assert list(info["among"]) == ["window", "none", "ic"]
    assert info["among"]["window"] == pytest.approx(info["among"]["ic"])


def test_auto_finds_the_grid_of_a_shuffled_mask_and_says_so():
    y, x = np.divmod(np.random.default_rng(0).permutation(576), 24)
    mask = np.maximum(abs(y[:, None] - y), abs(x[:, None] - x)) <= 3
    planned = tw.plan(mask, heads=1, head_dim=16)
    assert planned.reorder["order"] == "ic"
    assert list(planned.reorder["among"]) == ["none", "ic"]
    assert "order      ic, " in planned.summary()
    assert ", grid 24 × 24, chosen over none" in planned.summary()


def test_auto_takes_the_cheapest_order(monkeypatch):
    pattern = masks.build("regionvit-tiny-128-s1")
    costs = {"window": 0.3, "none": 0.4, "ic": 0.2, "hc": 0.2}
    asked = iter(costs.values())
    monkeypatch.setattr(api, "_order_cost", lambda ordered: next(asked))
    _, info = api._reorder(pattern, "auto", lambda ordered: ordered)
    assert info["order"] == "ic"
    assert info["among"] == costs


class FakeCostModel:
    """A cost model of the CPU, and its calibrations: what a run of keys costs depends on the tile, and on the order by
    its digest."""

    def __init__(self, costs):
        self.costs, self.asked = costs, []

    def of(self, tiles, head_dim, dtype, anew=False):
        return {tile.name: 1.0 + tile.rows / 100 for tile in tiles}

    def predict(self, cover, *, heads, head_dim, dtype, split_keys, calibration, bias_heads):
        self.asked.append((cover.graph_id, cover.tile.name))
        items = work.items(cover, split_keys)
        us = 10.0 * calibration * self.costs(cover)
        times = {"latency_us": us, "alone_us": us, "p20_us": us, "p80_us": us}
        resources = {"working_set_bytes": 1.0, "shared_bytes": 1.0}
        timing = Timing(us, us, us, 0, 0.0)
        shapes = [
            item_shape(items, shape, timing, **times, resources=resources, occupancy=1.0)
            for shape in range(items.n_shapes)
        ]
        return 0.0, 0.0, shapes


def with_cost_model(monkeypatch, costs):
    model = FakeCostModel(costs)
    monkeypatch.setattr(backends, "predicts", lambda kind: True)
    for role in ("calibration", "cost_model"):
        monkeypatch.setattr(backends, role, lambda kind: model)
    return model


def best_tile_us(ordered, tile_names, costs):
    """Predicted microseconds of the best of some tiles, as `FakeCostModel` has it."""
    lanes, found = devices.describe("cpu")["threads"], []
    for tile in map(tiles.parse, tile_names):
        cover = blocks.extract(ordered, tile)
        us = 10.0 * (1.0 + tile.rows / 100) * costs(cover)
        found.append(max(us, us * len(work.items(cover, cpu_facts.SPLIT_KEYS).block) / lanes))
    return min(found)


@pytest.mark.parametrize("winner", ["window", "none", "ic"])
def test_auto_takes_the_order_that_is_predicted_to_be_fastest(monkeypatch, winner):
    pattern = masks.build("vil-tiny-128-s1")
    ordered = {name: reorder.apply(pattern, name)[0] for name in ("window", "none", "ic")}
    ids = {graph.id: name for name, graph in ordered.items()}
    assert len(ids) == 3

    def costs(cover):
        return 1.0 if ids[cover.graph_id] == winner else 50.0

    model = with_cost_model(monkeypatch, costs)
    chosen = "16x1", "32x1"
    planned = make(pattern, tiles=chosen, solver="greedy")
    assert planned.reorder["order"] == winner and planned.graph.id == ordered[winner].id
    assert planned.profiles["16x1"].source == "predicted"
    # Each order is tiled and predicted once.
    assert sorted(model.asked) == sorted((graph.id, tile) for graph in ordered.values() for tile in chosen)
    expected = {name: best_tile_us(graph, chosen, costs) for name, graph in ordered.items()}
    assert planned.reorder["among"] == pytest.approx(expected)
    text = planned.summary()
    others = ", ".join(name for name in ("window", "none", "ic") if name != winner)
    assert f", chosen over {others} by predicted time: window " in text
    for name, us in planned.reorder["among"].items():
        assert f"{name} {us:.1f} µs" in text
    q, k, v = tensors(*pattern.shape, batch=1)
    expected = dense_attention(q, k, v, pattern.to_dense())
    torch.testing.assert_close(planned(q, k, v).double(), expected, atol=2e-5, rtol=2e-5)


def test_auto_does_not_predict_an_order_without_locality(monkeypatch, tmp_path):
    y, x = np.divmod(np.random.default_rng(0).permutation(576), 24)
    mask = np.maximum(abs(y[:, None] - y), abs(x[:, None] - x)) <= 2
    model = with_cost_model(monkeypatch, lambda cover: 1.0)
    planned = make(mask, tiles=("16x1",), solver="greedy")
    assert planned.reorder["order"] == "ic" and list(planned.reorder["among"]) == ["ic"]
    assert list(planned.reorder["left_out"]) == ["none"] and len(model.asked) == 1
    far = planned.reorder["left_out"]["none"]
    assert f"chosen over none by predicted time: ic {planned.reorder['among']['ic']:.1f} µs" in planned.summary()
    assert f"far from none {far:.1%}" in planned.summary()
    planned.save(tmp_path / "p.plan")
    assert tw.load(tmp_path / "p.plan").summary() == planned.summary()


def test_auto_predicts_an_order_of_two_names_once(monkeypatch):
    n = 64
    mask = graph.from_pattern(abs(np.arange(n)[:, None] - np.arange(n)) <= 3, row_hint=np.arange(n))
    model = with_cost_model(monkeypatch, lambda cover: 1.0)
    planned = make(mask, tiles=("16x1",), solver="greedy")
    among = planned.reorder["among"]
    assert planned.reorder["order"] == "window" and among["window"] == among["none"]
    assert len(model.asked) == len({id for id, _ in model.asked}) < len(among)


def test_orders_that_are_tiled_side_by_side_give_the_same_plan(monkeypatch):
    pattern = masks.build("vil-tiny-128-s1")
    plans = []
    for workers in (1, 3):
        with_cost_model(monkeypatch, lambda cover: 1.0 + cover.n_blocks)
        monkeypatch.setattr(api, "_at_once", lambda pattern, workers=workers: workers)
        plans.append(make(pattern, tiles=("16x1", "32x1"), solver="greedy"))
    one, three = plans
    assert three.reorder["among"] == one.reorder["among"] and list(three.reorder["among"]) == list(one.reorder["among"])
    assert three.digest() == one.digest()


def test_auto_leaves_out_a_tile_that_does_not_fit(monkeypatch):
    class Refusing(FakeCostModel):
        def predict(self, cover, **options):
            launch_us, tile_us, shapes = super().predict(cover, **options)
            if cover.tile.rows == 32:
                shapes = [replace(shape, resources={"working_set_bytes": 1e18}) for shape in shapes]
            return launch_us, tile_us, shapes

    model = Refusing(lambda cover: 1.0)
    monkeypatch.setattr(backends, "predicts", lambda kind: True)
    for role in ("calibration", "cost_model"):
        monkeypatch.setattr(backends, role, lambda kind: model)
    mask = abs(np.arange(96)[:, None] - np.arange(96)) <= 9
    planned = make(mask, tiles=("16x1", "32x1"), solver="greedy")
    assert set(planned.schedule.tile) == {0}
    with pytest.raises(InfeasibleError, match="fits no tile"):
        make(mask, tiles=("32x1",), solver="greedy")


def test_without_a_cost_model_auto_says_that_it_compared_work():
    mask = abs(np.arange(64)[:, None] - np.arange(64)) <= 3
    planned = make(mask, tiles=("16x1",), solver="greedy")
    among = planned.reorder["among"]
    assert planned.reorder["by"] == "work" and "by the work of the best tile: none " in planned.summary()
    assert all(f"{name} {cost:.1%}" in planned.summary() for name, cost in among.items())


def test_bias_dense_and_by_table_agree(dense):
    q, k, v = tensors(*dense.shape)
    table = torch.randn(H, 64)

    def index(rows, cols):
        return np.abs(np.asarray(rows) - cols) % 64

    full = table[:, index(*np.ogrid[: dense.shape[0], : dense.shape[1]])]
    expected = dense_attention(q, k, v, dense, full.double())
    for bias in (full, api.Bias(table, index)):
        out = make(dense, bias=bias)(q, k, v)
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("bias", ["none", "dense", "table"])
def test_save_and_load(tmp_path, dense, bias):
    q, k, v = tensors(*dense.shape)
    table = torch.randn(H, 8)
    given = {
        "none": None,
        "dense": torch.randn(H, *dense.shape),
        "table": api.Bias(table, lambda rows, cols: (np.asarray(rows) + cols) % 8),
    }[bias]
    planned = make(dense, bias=given)
    planned.save(tmp_path / "p.plan")
    again = tw.load(tmp_path / "p.plan")
    assert again.summary() == planned.summary() and again.digest() == planned.digest()
    torch.testing.assert_close(again(q, k, v), planned(q, k, v), atol=0, rtol=0)


def test_a_damaged_plan_is_refused(tmp_path, planned):
    path = tmp_path / "p.plan"
    planned.save(path)
    whole = path.read_bytes()
    for damaged in (whole[:-200], whole[: len(whole) // 2], b"", whole.replace(b'"schedule"', b'"scheXule"', 1)):
        path.write_bytes(damaged)
        with pytest.raises(tw.errors.ArtifactError, match=r"p\.plan"):
            tw.load(path)


def test_a_missing_plan_is_refused(tmp_path):
    with pytest.raises(tw.errors.ArtifactError, match="no such file"):
        tw.load(tmp_path / "absent.plan")


def test_an_archive_without_a_plan_is_refused(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "x.plan", "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(tw.errors.ArtifactError, match="expected a plan file, found a foreign"):
        tw.load(tmp_path / "x.plan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[:, :1], k, v), "q: expected shape"),
        (lambda q, k, v: (q, k[:, :, :-1], v), "k: expected shape"),
        (lambda q, k, v: (q, k, v[..., :8]), "v: expected shape"),
        (lambda q, k, v: (q.half(), k, v), "dtype torch.float32 as planned"),
        (lambda q, k, v: (q[0], k, v), "q: expected shape"),
    ],
    ids=["heads", "tokens", "head_dim", "dtype", "rank"],
)
def test_other_tensors_than_planned_are_refused(dense, planned, change, message):
    wrong = change(*tensors(*dense.shape))
    with pytest.raises(tw.errors.PatternError, match=message):
        planned(*wrong)
    # A compiler is told so, too, before it has built anything.
    with pytest.raises(Exception, match=message):
        torch.compile(planned, fullgraph=True, backend="eager")(*wrong)


def test_an_unknown_dtype_is_refused(dense):
    with pytest.raises(tw.errors.UnknownNameError, match="unknown dtype"):
        make(dense, dtype=torch.float64)


@pytest.mark.parametrize("argument", ["reorder", "solver", "device"])
def test_unknown_names_are_refused(dense, argument):
    with pytest.raises(tw.TilewrightError, match=r"'nonesuch'.*; known:"):
        make(dense, **{argument: "nonesuch"})


def test_the_device_says_what_is_chosen_from(dense, planned, monkeypatch):
    assert tuple(planned.blocks) == devices.facts("cpu").TILES
    assert planned.schedule.split_keys == devices.facts("cpu").SPLIT_KEYS
    monkeypatch.setattr(devices.facts("cpu"), "TILES", ("16x1", "128x1"))
    monkeypatch.setattr(devices.facts("cpu"), "SPLIT_KEYS", 64)
    other = make(dense[:10], solver="greedy")
    assert tuple(other.blocks) == ("16x1",) and other.schedule.split_keys == 64
    assert make(dense, solver="greedy", tiles=["16x1"], split_keys=None).schedule.split_keys is None


GPU = {"kind": "cuda", "name": "NVIDIA H200", "multiprocessors": 132, "threads": 132, "versions": {}}


@pytest.fixture
def on_gpu(planned):
    """The plan as if it had been profiled on a GPU."""
    named = {"device": GPU, "device_id": devices.device_id(GPU)}
    profiles = {name: replace(measured, **named) for name, measured in planned.profiles.items()}
    schedule = replace(planned.schedule, device_id=named["device_id"])
    return api.Plan(planned.graph, planned.blocks, profiles, schedule, reorder=planned.reorder)


def test_a_plan_runs_on_the_executor_of_its_device(dense, on_gpu, monkeypatch):
    asked = []
    prepare = partial(cuda_executor.prepare, device="cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(backends, "executor", lambda kind: (asked.append(kind), SimpleNamespace(prepare=prepare))[1])
    qkv = tensors(*dense.shape)
    out = on_gpu(*(x.cuda() if torch.cuda.is_available() else x for x in qkv)).cpu()
    assert asked == ["cuda"] and on_gpu.device == "cuda"
    torch.testing.assert_close(out.double(), dense_attention(*qkv, dense), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("device", "found"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_tensors_of_another_device_are_refused(dense, planned, on_gpu, device, found):
    with torch._subclasses.FakeTensorMode():
        wrong = [torch.empty(2, H, n, D, device=found) for n in (dense.shape[0], dense.shape[1], dense.shape[1])]
        with pytest.raises(tw.errors.DeviceError, match=f"q: expected a tensor on {device} as planned, found {found}"):
            (planned if device == "cpu" else on_gpu)(*wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_profiles_plans_and_runs(tmp_path, dense):
    planned = make(dense, device="cuda", dtype=torch.float16)
    qkv = tensors(*dense.shape, dtype=torch.float16)
    on_device = [x.cuda() for x in qkv]
    expected = dense_attention(*qkv, dense)
    with pytest.raises(tw.errors.DeviceError, match="q: expected a tensor on cuda:0 as planned, found cpu"):
        planned(*qkv)
    torch.testing.assert_close(planned(*on_device).cpu().double(), expected, atol=5e-3, rtol=5e-3)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = planned(*on_device)
    captured.replay()
    torch.testing.assert_close(out, planned(*on_device), atol=0, rtol=0)
    planned.save(tmp_path / "p.plan")
    torch.testing.assert_close(tw.load(tmp_path / "p.plan")(*on_device), out, atol=0, rtol=0)


def test_a_device_that_is_not_here_is_refused(tmp_path, dense, on_gpu, monkeypatch):
    hide_gpu(monkeypatch)
    with pytest.raises(tw.errors.DeviceError, match="expected an NVIDIA GPU"):
        make(dense, device="cuda")
    on_gpu.save(tmp_path / "p.plan")
    with pytest.raises(
        tw.errors.DeviceError, match=r"planned on NVIDIA H200 \(kind cuda\), .*; plan the pattern again"
    ):
        tw.load(tmp_path / "p.plan")


def test_a_plan_from_another_machine_of_its_kind_is_refused(tmp_path, planned, monkeypatch):
    planned.save(tmp_path / "p.plan")
    here = devices.describe("cpu")
    monkeypatch.setattr(devices, "describe", lambda kind: here | {"name": "another processor"})
    with pytest.raises(tw.errors.DeviceError, match=r"another processor.*; profile the blocks again here"):
        tw.load(tmp_path / "p.plan")


def test_another_gpu_than_the_current_one_is_refused(dense, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(tw.errors.DeviceError, match="expected the current GPU, cuda:0, found cuda:1"):
        make(dense, device=torch.device("cuda", 1))


SIDES = st.integers(1, 40) | st.integers(100, 200)


@settings(max_examples=12, deadline=None)
@given(SIDES, SIDES, st.integers(0, 99), st.sampled_from(["auto", "none"]))
def test_patterns_of_any_size_are_planned(n_q, n_k, seed, order):
    dense = np.random.default_rng(seed).random((n_q, n_k)) < 0.4
    dense[-1, 0] = True
    q, k, v = tensors(n_q, n_k)
    expected = dense_attention(q, k, v, dense)
    with mock.patch.object(api, "expected", quick_profiles):
        planned = make(dense, reorder=order, solver="greedy")
        fitting = tiles.fitting((*devices.facts("cpu").TILES, "16x1", "16x16"), dense.shape, 1)
        for each in (planned, *(make(dense, reorder=order, solver="greedy", tiles=[name]) for name in fitting)):
            torch.testing.assert_close(each(q, k, v).double(), expected, atol=2e-5, rtol=2e-5)
        for name in {"16x1", "64x64", "128x1", "1x128"} - set(
            tiles.fitting(("16x1", "64x64", "128x1", "1x128"), dense.shape, 1)
        ):
            with pytest.raises(tw.errors.TileError, match=f"tile {name} is larger than the graph"):
                make(dense, reorder=order, solver="greedy", tiles=[name])


@pytest.mark.parametrize("n_q, n_k", [(1, 1), (1, 40), (8, 8), (9, 3), (15, 20), (16, 31), (17, 64), (40, 1)])
def test_patterns_of_any_size_are_planned_on_a_gpu(monkeypatch, n_q, n_k):
    limits = {"shared_bytes": 1 << 17, "memory_bytes": 1 << 37, "launch_us": 1.0}
    limits |= {
        "registers": 1 << 16,
        "capability": "9.0",
        "driver": "580",
        "versions": {"torch": "2.13.0", "triton": "3.7.1"},
    }
    if not torch.cuda.is_available():
        monkeypatch.setattr(devices, "describe", lambda kind: GPU | limits)
        prepare = partial(cuda_executor.prepare, device="cpu")
        monkeypatch.setattr(backends, "executor", lambda kind: SimpleNamespace(prepare=prepare))
    monkeypatch.setattr(api, "expected", quick_profiles)
    dense = np.random.default_rng(0).random((n_q, n_k)) < 0.4
    dense[-1, 0] = True
    planned = make(dense, device="cuda", solver="greedy")
    assert all(cover.tile.rows >= cuda_config.FEWEST_ROWS for cover in planned.blocks.values())
    qkv = tensors(n_q, n_k)
    out = planned(*(x.cuda() if torch.cuda.is_available() else x for x in qkv)).cpu()
    torch.testing.assert_close(out.double(), dense_attention(*qkv, dense), atol=2e-5, rtol=2e-5)


def test_the_device_says_the_fewest_rows_that_its_executor_has():
    assert devices.facts("cuda").FEWEST_ROWS == cuda_config.FEWEST_ROWS == tiles.SMALL_ROWS


def test_many_queries_of_one_key_are_planned():
    q, k, v = (torch.randn(1, 1, n, 32) for n in (193, 1, 1))
    planned = tw.plan(np.ones((193, 1), bool), heads=1, head_dim=32)
    torch.testing.assert_close(planned(q, k, v), v.expand_as(q))


def test_a_tile_that_was_asked_for_and_does_not_fit_is_refused():
    with pytest.raises(tw.errors.TileError, match="tile 64x64 is larger than the graph: expected at most 1 keys for 1"):
        make(np.ones((193, 1), bool), tiles=("64x1", "64x64"))


def test_one_token():
    q, k, v = tensors(1, 1)
    torch.testing.assert_close(make(np.ones((1, 1), bool))(q, k, v), v)


def test_compile_and_export(dense, planned):
    q, k, v = tensors(*dense.shape)
    expected = planned(q, k, v)

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return planned(q, k, v) * 2

    with torch.no_grad():
        compiled = torch.compile(Layer(), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q, k, v), expected * 2)
        exported = torch.export.export(Layer(), (q, k, v)).module()
        torch.testing.assert_close(exported(q, k, v), expected * 2)


class Layer(torch.nn.Module):
    """A layer that holds a plan."""

    def __init__(self, planned):
        super().__init__()
        self.planned = planned

    def forward(self, q, k, v):
        return self.planned(q, k, v)


def test_ahead_of_time_autograd_compiles_plans(dense, planned):
    q, k, v = tensors(*dense.shape)
    with torch.no_grad():
        compiled = torch.compile(Layer(planned), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v), planned(q, k, v), atol=0, rtol=0)


def test_compiled_code_calls_the_plan_that_it_is_given(dense, planned):
    q, k, v = tensors(*dense.shape)
    plans = [planned, *(planned.with_bias(torch.randn(H, *dense.shape)) for _ in range(3))]
    with torch.no_grad():
        compiled = torch.compile(lambda plan: plan(q, k, v), fullgraph=True, backend="eager")
        for each in (*plans, *plans):
            torch.testing.assert_close(compiled(each), each(q, k, v), atol=0, rtol=0)


# What another process does with a program: its own plan of the same shape first, then that of the program.
FOREIGN = """
import sys
import numpy as np
import torch
import tilewright as tw

folder = sys.argv[1]
q, k, v, expected = torch.load(f"{folder}/tensors.pt")
other = tw.plan(np.ones((q.shape[2], k.shape[2]), bool), heads=q.shape[1], head_dim=q.shape[3], solver="greedy")
program = torch.export.load(f"{folder}/program.pt2").module()
try:
    program(q, k, v)
except tw.errors.ArtifactError as error:
    print(error)
planned = tw.load(f"{folder}/p.plan")
torch.testing.assert_close(program(q, k, v), expected, atol=0, rtol=0)
print(planned.digest())
"""


def test_a_strictly_exported_program_finds_its_plan_in_another_process(tmp_path, dense, planned):
    # By tensors of torch, as networks do.
    planned = planned.with_bias(
        api.Bias(torch.randn(H, 8), lambda rows, cols: ((torch.as_tensor(rows) + torch.as_tensor(cols)) % 8).numpy())
    )
    q, k, v = tensors(*dense.shape)
    torch.export.save(torch.export.export(Layer(planned), (q, k, v), strict=True), tmp_path / "program.pt2")
    planned.save(tmp_path / "p.plan")
    torch.save((q, k, v, planned(q, k, v)), tmp_path / "tensors.pt")
    environment = os.environ | {"PYTHONPATH": str(Path(tw.__file__).parents[1])}
    command = [sys.executable, "-c", FOREIGN, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    error, digest = done.stdout.splitlines()
    assert f"calls the plan {planned.digest()}, which is not loaded" in error and "tilewright.load(path)" in error
    assert digest == planned.digest()


def test_a_digest_is_of_all_that_decides_the_result(dense, planned):
    table = torch.randn(H, 8)

    def plan_with(**changes):
        made = planned.with_bias(changes.pop("bias", None))
        vars(made).update(changes)
        return made

    def bias(factor):
        return api.Bias(table, lambda rows, cols: (factor * np.asarray(rows) + cols) % 8)

    schedule = planned.schedule
    plans = [
        plan_with(),
        plan_with(scale=0.0),
        plan_with(scale=1),
        plan_with(dtype=torch.float16),
        plan_with(heads=1),
        plan_with(graph=graph.from_pattern(~dense)),
        plan_with(schedule=replace(schedule, block=schedule.block[::-1])),
        plan_with(bias=torch.zeros(H, *dense.shape)),
        plan_with(bias=torch.ones(H, *dense.shape)),
        plan_with(bias=bias(1)),
        plan_with(bias=bias(2)),
    ]
    assert len({made.digest() for made in plans}) == len(plans)
    assert plan_with().digest() == planned.digest()
    assert plan_with(scale=1.0).digest() == plan_with(scale=1).digest()
    assert plan_with(bias=bias(1)).digest() == plan_with(bias=bias(9)).digest()


def test_the_index_of_a_long_bias_is_digested_in_parts(dense, planned, monkeypatch):
    def digest(index):
        return planned.with_bias(
            api.Bias(torch.randn(H, 8, generator=torch.Generator().manual_seed(0)), index)
        ).digest()

    def index(rows, cols):
        return np.asarray(rows + cols) % 8

    monkeypatch.setattr(api, "_INDEX_PAIRS", 1000)
    assert digest(index) == digest(index) != digest(lambda rows, cols: (index(rows, cols) + (rows == 149)) % 8)


def test_copies_of_a_module_share_its_plan(planned):
    assert copy.deepcopy(Layer(planned)).planned is planned


@pytest.mark.parametrize("index", [lambda rows, cols: (rows + cols) % 5, lambda rows, cols: 3], ids=["pairs", "one"])
def test_a_loaded_plan_with_a_bias_is_pickled_as_any_other(dense, tmp_path, index):
    made = make(dense, bias=api.Bias(torch.randn(H, 5), index), solver="greedy")
    made.save(tmp_path / "bias.plan")
    again = pickle.loads(pickle.dumps(tw.load(tmp_path / "bias.plan")))
    q, k, v = tensors(*dense.shape)
    assert torch.equal(again(q, k, v), made(q, k, v)) and again.digest() == made.digest()


def test_a_pickled_plan_is_made_anew(dense, planned):
    q, k, v = tensors(*dense.shape)
    expected = planned(q, k, v)
    again = pickle.loads(pickle.dumps(planned))
    assert again.digest() == planned.digest() and again._name != planned._name
    torch.testing.assert_close(again(q, k, v), expected, atol=0, rtol=0)


@pytest.mark.parametrize("form", ["dense", "table"])
def test_a_bias_that_is_learnt_is_taken_by_value(tmp_path, dense, planned, form):
    q, k, v = tensors(*dense.shape)
    # Not contiguous, and to be differentiated.
    learnt = torch.nn.Parameter(torch.randn(*(dense.shape if form == "dense" else (8,)), H).movedim(-1, 0))
    bias = learnt if form == "dense" else api.Bias(learnt, lambda rows, cols: (np.asarray(rows) + cols) % 8)
    biased = planned.with_bias(bias)
    digest = biased.digest()
    expected = biased(q, k, v)
    with torch.no_grad():
        learnt.add_(torch.randn_like(learnt))
    rows, cols = biased.row_order, biased.col_order
    in_order = biased(q[:, :, rows], k[:, :, cols], v[:, :, cols], ordered=True)
    torch.testing.assert_close(in_order, expected[:, :, rows], atol=2e-5, rtol=2e-5)
    biased.save(tmp_path / "p.plan")
    loaded = tw.load(tmp_path / "p.plan")
    torch.testing.assert_close(loaded(q, k, v), expected, atol=0, rtol=0)
    assert loaded.digest() == biased.digest() == digest != planned.with_bias(bias).digest()


def test_a_plan_is_prepared_for_each_gpu_that_calls_it(planned, monkeypatch):
    fresh, prepared, current = planned.with_bias(None), [], []

    @contextmanager
    def device_of(x):
        current.append(x.get_device())
        yield
        current.pop()

    def prepare(self, ordered, tiles):
        prepared.append((ordered, *current))
        return lambda q, k, v: prepared[-1]

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(api.Plan, "_prepare", prepare)
    for ordered in (False, True, False):
        for index in (0, 1):
            fresh.run(SimpleNamespace(get_device=lambda index=index: index), None, None, ordered)
    assert prepared == [(False, 0), (False, 1), (True, 0), (True, 1)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", ["dense", "table"])
def test_a_bias_may_lie_on_a_gpu(tmp_path, dense, planned, form):
    q, k, v = tensors(*dense.shape)
    learnt = torch.nn.Parameter(torch.randn(H, *(dense.shape if form == "dense" else (8,)), device="cuda"))
    bias = learnt if form == "dense" else api.Bias(learnt, lambda rows, cols: (np.asarray(rows) + cols) % 8)
    biased = planned.with_bias(bias)
    biased.save(tmp_path / "p.plan")
    torch.testing.assert_close(tw.load(tmp_path / "p.plan")(q, k, v), biased(q, k, v), atol=0, rtol=0)


def test_first_calls_of_several_threads_prepare_once(dense, planned, monkeypatch):
    q, k, v = tensors(*dense.shape)
    expected, fresh = planned(q, k, v), planned.with_bias(None)
    prepared, coming, found, prepare = [], threading.Barrier(8), [], api.Plan._prepare

    def slowly(self, ordered, tiles):
        prepared.append(ordered)
        # The others come in the meantime.
        time.sleep(0.2)
        return prepare(self, ordered, tiles=tiles)

    def call():
        coming.wait(60)
        found.append(fresh(q, k, v))

    monkeypatch.setattr(api.Plan, "_prepare", slowly)
    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert prepared == [False] and len(found) == 8
    for out in found:
        torch.testing.assert_close(out, expected, atol=0, rtol=0)


def test_a_fork_prepares_while_a_thread_of_its_parent_does():
    held, done = threading.Event(), threading.Event()

    def hold():
        with api._PREPARING:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if not child:
        os._exit(0 if api._PREPARING.acquire(timeout=10) else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_compiler_is_told_the_layout_of_the_result(dense, planned):
    q, k, v = tensors(*dense.shape)
    for x in (q, torch.randn(2, dense.shape[0], 3, H, D)[:, :, 0].transpose(1, 2)):
        assert planned.like_result(x, k, v).stride() == planned.run(x, k, v, False).stride()


def test_summary_names_the_order_the_tiles_and_the_proof(planned):
    text = planned.summary()
    assert "150 × 130" in text and "gap" in text and "predicted" in text


def test_a_device_whose_launches_follow_one_another_gets_the_fastest_tile_alone(monkeypatch):
    # A dense part beside scattered pairs: greedy takes a tile for each.
    dense = np.zeros((256, 256), bool)
    dense[:128, :128] = True
    dense[128:, 128:] = np.random.default_rng(0).random((128, 128)) < 0.05
    dense[128:, 0] = True
    monkeypatch.setattr(cpu_facts, "MIXES", False)
    one = tw.plan(dense, heads=2, head_dim=16, solver="greedy", region_rows=64, reorder="none")
    assert len(one.blocks) == len(one.profiles) == 1 and set(one.schedule.tiles) == set(one.blocks)
    q, k, v = torch.randn(3, 1, 2, 256, 16)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, torch.from_numpy(dense))
    torch.testing.assert_close(one(q, k, v), wanted, atol=1e-5, rtol=1e-4)


def test_clusterings_are_made_side_by_side(monkeypatch):
    both, apply = threading.Barrier(2), reorder.apply

    def applied(pattern, name):
        if name in ("ic", "hc"):
            # Who comes alone waits in vain.
            both.wait(timeout=20)
        return apply(pattern, name)

    monkeypatch.setattr(reorder, "apply", applied)
    plan = api.plan(np.random.default_rng(0).random((64, 64)) < 0.2, heads=1, head_dim=16)
    assert {*plan.reorder["among"]} == {"none", "ic", "hc"}


def test_a_grid_is_looked_for_once(monkeypatch):
    looked, order = [], _grid.order
    monkeypatch.setattr(_grid, "order", lambda graph: looked.append(graph.id) or order(graph))
    y, x = np.divmod(np.arange(15 * 13), 13)
    near = (abs(y[:, None] - y) <= 3) & (abs(x[:, None] - x) <= 2)
    plan = api.plan(near, heads=1, head_dim=16)
    assert {*plan.reorder["among"]} == {"none", "ic"} and len(looked) == 1
