"""Prediction of slices on a GPU: captured, without waiting, in little memory, and far apart."""

import mmap

import pytest
import torch

from helpers import selection as oracle
from helpers.gpu import TRITON_DEVICE
from helpers.slices import DTYPES, qkv, tokens
from tilewright import slices
from tilewright.slices import operators, prediction
from tilewright.slices.cuda import code_kernels
from tilewright.slices.cuda import selection as slice_selection
from tilewright.slices.cuda.forms import PREDICTION
from tilewright.slices.cuda.selection import Selection
from tilewright.slices.layout import Layout
from tilewright.slices.selection import WORKSPACE

needs_gpu = pytest.mark.skipif(TRITON_DEVICE == "cpu", reason="captures CUDA graphs, and this machine has no GPU")
STATED = {
    "pooled": {"mass": 0.8},
    "column": {"keep": 0.2, "sample": 32},
    "blocks": {"mass": 0.8, "always": [(0, 7)]},
    "random": {"threshold": 0.01, "width": 16},
    "text": {"by": "pooled", "mass": 0.8, "text": (21, 100)},
}


def stated_for(name, q):
    """Arguments of a prediction; with text, some of it padding."""
    lengths = {"lengths": torch.tensor([450, 500][: len(q)], device=q.device)} if name == "text" else {}
    return {"by": name, "budget": 1.0, **lengths, **STATED[name]}


def layout_of(q, k, rows):
    return Layout(*q.shape[:3], k.shape[2], rows, -(-k.shape[2] // 64) * 64)


@needs_gpu
@pytest.mark.parametrize("by", STATED)
def test_captured_predictions_follow_their_inputs(by):
    q, k, _ = qkv(2, 2, 300, 500, 64, dtype=torch.bfloat16, device=TRITON_DEVICE)
    given = stated_for(by, q)

    def call():
        return slices.predict(q, k, **given)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lists = call()
    for seed in (5, 6):
        for x, y in zip((q, k), qkv(2, 2, 300, 500, 64, seed=seed, dtype=torch.bfloat16), strict=False):
            x.copy_(y)
        graph.replay()
        right = call()
        lists.check()
        for one, other in zip(lists.tensors[1:], right.tensors[1:], strict=True):
            assert torch.equal(one, other)


@needs_gpu
@pytest.mark.parametrize("by", STATED)
def test_the_host_never_waits(by):
    q, k, v = qkv(1, 2, 300, 500, 64, dtype=torch.bfloat16, device=TRITON_DEVICE)
    given = stated_for(by, q)

    def call():
        return slices.attend(q, k, v, slices.predict(q, k, **given))

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_memory_beyond_the_lists_is_bounded():
    # Codes of all heads: 420 MB.
    q, k, _ = qkv(1, 16, 58_000, 58_000, 64, dtype=torch.bfloat16, device=TRITON_DEVICE)
    slices.predict(q, k, mass=0.8, budget=0.1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lists = slices.predict(q, k, mass=0.8, budget=0.1)
    made = sum(4 * x.numel() for x in lists.tensors)
    assert torch.cuda.max_memory_allocated() - before <= made + WORKSPACE + (1 << 20)


def test_offsets_beyond_32_bits(monkeypatch):
    n = 2_500_000_000
    if TRITON_DEVICE == "cuda":
        far_apart = torch.empty(n, dtype=torch.float16, device=TRITON_DEVICE)
    else:
        # The interpreter copies whole storages back.
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
        far_apart = torch.frombuffer(mmap.mmap(-1, 2 * n, flags=mmap.MAP_PRIVATE), dtype=torch.float16)
    near = tokens(1, 2, 20, 64, device=TRITON_DEVICE, dtype=torch.float16)
    other = tokens(1, 2, 20, 64, seed=3, device=TRITON_DEVICE, dtype=torch.float16)
    # Tokens, then heads.
    for strides in ((0, 64, 120_000_000, 1), (0, 1_200_000_000, 64, 1)):
        far = far_apart.as_strided((1, 2, 20, 64), strides)
        far.copy_(near)
        for q, k in ((far, other), (other, far)):
            codes = Selection(layout_of(q, k, 16), q.device).pooled(q, k, 4, 0.1)
            oracle.check_codes(codes, oracle.pooled(q, k, 16, 4, 0.1), oracle.CODE_ERROR[torch.float16])


def exchanged(*given):
    """Tensors [B, h, N, D] as an exchange between ranks leaves them: tokens 3 B h D values apart."""
    whole = torch.stack(given, 2).permute(3, 0, 2, 1, 4).contiguous()
    return [x.permute(1, 2, 0, 3) for x in whole.unbind(2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lists_and_results_of_a_head_do_not_depend_on_those_beside_it(dtype, monkeypatch):
    monkeypatch.setattr(slice_selection, "LEAST_SPLIT", 16)
    # As many programs as make the number of ranges of keys vary with that of heads, if it does.
    monkeypatch.setattr(slice_selection, "PROGRAMS", 8)
    monkeypatch.setitem(prediction.SELECTIONS, TRITON_DEVICE, Selection.__module__)
    monkeypatch.setitem(operators.EXECUTORS, TRITON_DEVICE, "tilewright.slices.cuda.executor")
    for cache in (operators.executor, prediction._selection):
        cache.cache_clear()
    given = qkv(1, 4, 200, 200, 64, dtype=dtype, device=TRITON_DEVICE)
    for x in given[:2]:
        # All scores have thousands in common, so that log-sum-exps are rounded coarsely. At this size no list changed
        # by it with ranges that followed the heads: test_slice_selection compares the sums themselves, which did.
        x[..., :4] = 64

    def made(q, k, v):
        lists = slices.predict(q, k, pool=8, rows=32, keep=0.2, budget=0.2, least=1)
        lists.check()
        return slices.attend(q, k, v, lists), *lists.tensors[:2]

    try:
        whole = made(*given)
        assert 0 < int(whole[2].min()) <= int(whole[2].max()) < 200
        for heads in (slice(0, 2), slice(3, 4)):
            for one, other in zip(made(*exchanged(*(x[:, heads] for x in given))), whole, strict=True):
                assert torch.equal(one, other[:, heads])
    finally:
        for cache in (operators.executor, prediction._selection):
            cache.cache_clear()
        prediction._REPLAYS = prediction.Recent(256, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pipelines_fit_the_shared_memory_of_an_a100(head_dim, dtype):
    config = PREDICTION[dtype.itemsize]
    rows = config.block_m + config.num_stages * config.block_n
    assert rows * head_dim * dtype.itemsize <= 160 << 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "rows, pool, n_q, n_k", [(16, 8, 50, 64), (32, 2, 100, 40), (32, 8, 97, 133), (64, 16, 130, 70), (128, 4, 60, 9)]
)
def test_products_of_keys_by_rows_give_the_codes_of_rows_by_keys(dtype, rows, pool, n_q, n_k, monkeypatch):
    q, k, _ = qkv(1, 2, n_q, n_k, 64, dtype=dtype, device=TRITON_DEVICE)
    # A group whose shares are unknown, and a key far from all.
    q[:, 0, 3], k[:, 1, -1] = torch.nan, 100
    config = PREDICTION[dtype.itemsize]._replace(block_m=128)
    found = []
    # Rows of a group for products of keys by rows: as many as there are, and more.
    for fewest in (code_kernels.FEWEST_ROWS, 256):
        monkeypatch.setattr(code_kernels, "FEWEST_ROWS", fewest)
        selection = Selection(layout_of(q, k, rows), q.device, config)
        given = q, k, None, pool
        found.append(
            [selection.pooled(q, k, pool, 0.125), *(selection.column(*given, top, 0.125) for top in (True, False))]
        )
    for one, other in zip(*found, strict=True):
        apart = (one.int() - other.int()).abs()
        # Sums of a group's rows are added in another order: codes of shares between two of them may differ by one.
        assert apart.max() <= 1 and (apart > 0).float().mean() <= 1e-3
