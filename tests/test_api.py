from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import tilewright as tw
from tilewright import api, graph, hardware, models
from tilewright.kernels import triton_schedule

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


def test_a_graph_file_is_a_pattern(tmp_path, dense):
    graph.save(tmp_path / "g.npz", graph.from_pattern(dense))
    q, k, v = tensors(*dense.shape)
    out = make(tmp_path / "g.npz", reorder="none")(q, k, v)
    torch.testing.assert_close(out.double(), dense_attention(q, k, v, dense), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("solver", ["greedy", "highs", "gurobi"])
def test_every_solver(dense, solver):
    q, k, v = tensors(*dense.shape)
    planned = make(dense, solver=solver)
    assert planned.schedule.solver == solver
    torch.testing.assert_close(planned(q, k, v).double(), dense_attention(q, k, v, dense), atol=2e-5, rtol=2e-5)


def test_tokens_in_plan_order(dense, planned):
    q, k, v = tensors(*dense.shape)
    rows, cols = planned.row_order, planned.col_order
    out = planned(q[:, :, rows], k[:, :, cols], v[:, :, cols], ordered=True)
    torch.testing.assert_close(out, planned(q, k, v)[:, :, rows], atol=2e-5, rtol=2e-5)


def test_auto_takes_the_windows_a_model_declares():
    natural = models.build("vil-tiny-128-s1")
    planned = tw.plan(natural, heads=1, head_dim=48)
    assert planned.reorder["order"] == "window"


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
    assert again.summary() == planned.summary()
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
        (lambda q, k, v: (q, k.requires_grad_(), v), "k: this operator has no backward"),
    ],
    ids=["heads", "tokens", "head_dim", "dtype", "rank", "gradient"],
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
    assert tuple(planned.blocks) == hardware.KINDS["cpu"].TILES
    assert planned.schedule.split_keys == hardware.KINDS["cpu"].SPLIT_KEYS
    monkeypatch.setattr(hardware.KINDS["cpu"], "TILES", ("16x1", "128x1"))
    monkeypatch.setattr(hardware.KINDS["cpu"], "SPLIT_KEYS", 64)
    other = make(dense[:10], solver="greedy")
    assert tuple(other.blocks) == ("16x1",) and other.schedule.split_keys == 64
    assert make(dense, solver="greedy", tiles=["16x1"], split_keys=None).schedule.split_keys is None


GPU = {"kind": "cuda", "name": "NVIDIA H200", "multiprocessors": 132, "threads": 132, "versions": {}}


@pytest.fixture
def on_gpu(planned):
    """The plan as if it had been profiled on a GPU."""
    named = {"device": GPU, "device_id": hardware.device_id(GPU)}
    profiles = {name: replace(measured, **named) for name, measured in planned.profiles.items()}
    schedule = replace(planned.schedule, device_id=named["device_id"])
    return api.Plan(planned.graph, planned.blocks, profiles, schedule, reorder=planned.reorder)


def test_a_plan_runs_on_the_executor_of_its_device(dense, on_gpu, monkeypatch):
    asked = []
    prepare = partial(triton_schedule.prepare, device="cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(hardware, "executor", lambda kind: (asked.append(kind), SimpleNamespace(prepare=prepare))[1])
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_here_is_refused(tmp_path, dense, on_gpu):
    with pytest.raises(tw.errors.DeviceError, match="expected an NVIDIA GPU"):
        make(dense, device="cuda")
    on_gpu.save(tmp_path / "p.plan")
    with pytest.raises(
        tw.errors.DeviceError, match=r"planned on NVIDIA H200 \(kind cuda\), .*; plan the pattern again"
    ):
        tw.load(tmp_path / "p.plan")


def test_a_plan_from_another_machine_of_its_kind_is_refused(tmp_path, planned, monkeypatch):
    planned.save(tmp_path / "p.plan")
    here = hardware.describe("cpu")
    monkeypatch.setattr(hardware, "describe", lambda kind: here | {"name": "another processor"})
    with pytest.raises(tw.errors.DeviceError, match=r"another processor.*; profile the blocks again here"):
        tw.load(tmp_path / "p.plan")


def test_another_gpu_than_the_current_one_is_refused(dense, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(tw.errors.DeviceError, match="expected the current GPU, cuda:0, found cuda:1"):
        make(dense, device=torch.device("cuda", 1))


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


def test_a_compiler_is_told_the_layout_of_the_result(dense, planned):
    q, k, v = tensors(*dense.shape)
    for x in (q, torch.randn(2, dense.shape[0], 3, H, D)[:, :, 0].transpose(1, 2)):
        assert planned.like_result(x, k, v).stride() == planned(x, k, v).stride()


def test_summary_names_the_order_the_tiles_and_the_proof(planned):
    text = planned.summary()
    assert "150 × 130" in text and "gap" in text and "predicted" in text
