"""Slices on a GPU: captured, without waiting, far apart in memory, and configured for the device."""

import mmap

import pytest
import torch

from helpers.gpu import TRITON_DEVICE
from helpers.slices import check_attention, mask_of, qkv, tokens
from tilewright import slices
from tilewright.slices import operators
from tilewright.slices.cuda import forms
from tilewright.slices.cuda.executor import Executor
from tilewright.slices.cuda.forms import SliceConfig

needs_gpu = pytest.mark.skipif(TRITON_DEVICE == "cpu", reason="captures CUDA graphs, and this machine has no GPU")
# Shared memory that a program may ask for: an H100 or H200, an A100, a GPU for games.
SHARED = {(9, 0): 227 << 10, (8, 0): 163 << 10, (8, 9): 99 << 10}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setitem(operators.EXECUTORS, TRITON_DEVICE, Executor.__module__)
    operators.executor.cache_clear()
    yield
    operators.executor.cache_clear()


def test_offsets_beyond_32_bits(monkeypatch):
    n = 2_500_000_000
    if TRITON_DEVICE == "cuda":
        far_apart = torch.empty(n, dtype=torch.float16, device=TRITON_DEVICE)
    else:
        # The interpreter copies whole storages back.
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
        far_apart = torch.frombuffer(mmap.mmap(-1, 2 * n, flags=mmap.MAP_PRIVATE), dtype=torch.float16)
    lists = slices.from_mask(mask_of([[[2, 3], [3, 1]]], 20).to(TRITON_DEVICE), 20, rows=16)
    q, k, v = qkv(1, 2, 20, 20, 64, dtype=torch.float16, device=TRITON_DEVICE)
    # Tokens, then heads.
    for strides in ((0, 64, 120_000_000, 1), (0, 1_200_000_000, 64, 1)):
        far = far_apart.as_strided((1, 2, 20, 64), strides)
        far.copy_(k)
        check_attention(lists, q, far, v)
        check_attention(lists, far, k, v)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_fit_the_shared_memory_of_the_device(dtype, capability):
    for rows in (16, 32, 64, 128):
        for head_dim in (64, 128):
            most = SHARED[capability]
            chosen = forms.of_attention(rows, head_dim, dtype, capability, most)
            assert forms.shared_bytes(chosen, rows, head_dim, dtype.itemsize) <= most
            assert chosen.num_warps >= 1 and chosen.num_stages >= 1


def test_forms_are_those_that_were_measured_on_hopper():
    most = SHARED[9, 0]
    for head_dim in (64, 128):
        chosen = forms.of_attention(128, head_dim, torch.bfloat16, (9, 0), most)
        assert chosen == SliceConfig(128, 3, 4, by_warps=True)
        chosen = forms.plain(128, head_dim, torch.bfloat16, most)
        assert chosen == SliceConfig(64, 3, 8, ahead=True)


@needs_gpu
def test_a_captured_call_is_right_with_other_lists():
    q, k, v = qkv(2, 2, 300, 400, 128, dtype=torch.bfloat16, device=TRITON_DEVICE)
    masks = [mask_of(torch.randint(0, 400, (2, 2, 3)), 400, seed=seed).to(TRITON_DEVICE) for seed in range(3)]
    mask = masks[0].clone()

    def call():
        lists = slices.from_mask(mask, 300)
        again = slices.unpack(lists.pack(), lists.layout)
        return (*slices.attend(q, k, v, again, lse=True), slices.recall(q, k, lists), slices.dense(q, k, v)[1])

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for changed in masks:
        mask.copy_(changed)
        q.copy_(tokens(*q.shape, dtype=q.dtype, device=q.device, seed=int(changed.sum())))
        graph.replay()
        found = [x.clone() for x in captured]
        for one, other in zip(found, call(), strict=True):
            assert torch.equal(one, other)
        check_attention(slices.from_mask(mask, 300), q, k, v)


@needs_gpu
def test_nothing_waits_for_the_device():
    q, k, v = qkv(1, 2, 300, 400, 64, dtype=torch.float16, device=TRITON_DEVICE)
    mask = mask_of([[[5, 70, 0], [300, 400, 1]]], 400).to(TRITON_DEVICE)
    keys, counts = mask.int().sort(dim=-1, descending=True, stable=True).indices, mask.sum(-1)

    def call():
        slices.from_indices(keys, counts, (300, 400))
        lists = slices.from_mask(mask, 300, budget=0.5)
        lists.density()
        slices.unpack(lists.pack(), lists.layout)
        parts = slices.attend(q, k, v, lists, lse=True), slices.dense(q, k, v)
        return slices.merge(*parts), slices.recall(q, k, lists)

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_tokens_off_16_bytes_are_loaded_rightly():
    lists = slices.from_mask(mask_of([[[5, 70], [300, 1]]], 400).to(TRITON_DEVICE), 200)
    for shift in (0, 1):
        q, k, v = (
            tokens(2 * n * 64 + 8, dtype=torch.float16, device=TRITON_DEVICE)[shift : shift + 2 * n * 64].view(
                1, 2, n, 64
            )
            for n in (200, 400, 400)
        )
        check_attention(lists, q, k, v)
