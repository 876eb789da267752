"""The kernel whose warps gather and multiply beside each other: compiled anywhere, run on Hopper alone.

Gluon has no interpreter, so that nothing here runs the kernel without a GPU.
"""

import pytest
import torch

from helpers.gpu import TRITON_DEVICE, needs_hopper
from helpers.hopper import compiled
from helpers.slices import LSE_TOLERANCE, expected, mask_of, qkv
from tilewright import reference, slices
from tilewright.slices.cuda import warp_kernel
from tilewright.slices.cuda.executor import Executor
from tilewright.slices.cuda.forms import SliceConfig

FORMS = [
    SliceConfig(128, 3, 4, by_warps=True),
    SliceConfig(64, 5, 4, by_warps=True),
]


@pytest.mark.parametrize("head_dim, step_keys, stages, run, bounded", [(128, 128, 3, 1, True), (64, 64, 5, 16, False)])
def test_it_compiles_for_hopper(head_dim, step_keys, stages, run, bounded):
    constants = {"HEADS": 3, "BLOCK_M": 128, "BLOCK_N": step_keys, "RUN": run, "HEAD_DIM": head_dim}
    constants |= {"NUM_STAGES": stages, "WIDE": False, "BOUNDED": bounded}
    types = dict.fromkeys(("key_ptr", "count_ptr", "order_ptr", "state_ptr"), "*i32")
    types |= {"lse_ptr": "*fp32", "scale_log2": "fp32", "bound_log2": "fp32"}
    given = {"free": ("n_queries", "groups"), "gluon": True, "num_warps": warp_kernel.NUM_WARPS}
    made = compiled(warp_kernel.__name__, "tilewright_slice_attention_by_warps", constants, types, **given)
    stages_and_queries = (2 * stages * step_keys + 128) * head_dim * 2
    assert stages_and_queries <= made.shared <= stages_and_queries + 1024
    # Copies of 16 bytes: of queries, keys and values by 128 threads.
    assert made.ptx.count("cp.async.cg") == (128 + 2 * step_keys) * head_dim // 8 // 128
    assert made.ptx.count("wgmma.mma_async") >= 2 * 2 * (head_dim // 16 + step_keys // 16)
    assert "setmaxnreg" in made.ptx


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_it_is_launched_with_its_arguments_in_order(monkeypatch, lse, shift):
    """By a stand-in for the kernel; tokens off 16 bytes go to the other one."""
    form = SliceConfig(64, 5, 4, by_warps=True)
    launched = {}

    class Kernel:
        names = warp_kernel.tilewright_slice_attention_by_warps.arg_names

        def __getitem__(self, grid):
            return lambda *given, **options: launched.update(
                zip(self.names, given, strict=True), grid=grid, options=options
            )

    monkeypatch.setattr(warp_kernel, "tilewright_slice_attention_by_warps", Kernel())
    lists = slices.from_mask(mask_of([[[2, 30, 1], [0, 1, 31]]], 100).to(TRITON_DEVICE), 300)
    q, k, v = qkv(1, 2, 300, 100, 64, dtype=torch.float16, device=TRITON_DEVICE)
    k = k.new_empty(k.numel() + shift)[shift:].view(1, 2, 100, 64).copy_(k)
    executor = Executor(lists.layout, q.device, form)
    out, sums = executor.attend(lists.tensors, q, k, v, scale=0.5, with_lse=lse)
    if shift:
        assert not launched and not out.isnan().any()
        return
    tensors = {"o_ptr": out, "key_ptr": lists.keys, "state_ptr": lists.state, "q_ptr": q, "k_ptr": k, "lse_ptr": sums}
    assert all(launched[name] is x for name, x in tensors.items())
    sizes = {
        "stride_qn": 128,
        "stride_kn": 64,
        "n_queries": 300,
        "groups": 3,
        "capacity": 128,
        "HEADS": 2,
        "WIDE": False,
    }
    sizes |= {"BLOCK_M": 128, "BLOCK_N": 64, "RUN": 1, "HEAD_DIM": 64, "NUM_STAGES": 5, "grid": (6,)}
    assert {name: launched[name] for name in sizes} == sizes and launched["options"] == {"num_warps": 4}


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 16, 128])
@pytest.mark.parametrize("config", FORMS, ids=str)
def test_every_form(config, width, dtype, head_dim):
    n_k = 1333
    runs = -(-n_k // width)
    counts = [[[2, runs, 1, 0], [0, 1, 1 + runs // 3, runs // 2]], [[1, 1, 0, runs]] * 2]
    mask = mask_of(counts, runs).repeat_interleave(width, -1)[..., :n_k]
    lists = slices.from_mask(mask.to(TRITON_DEVICE), 500, width=width)
    q, k, v = qkv(2, 2, 500, n_k, head_dim, dtype=dtype, device=TRITON_DEVICE)
    # Maxima that grow along the lists, a little and much, but for their end, which comes first.
    k *= torch.linspace(0.2, 3, n_k, device=k.device).roll(-n_k // 3)[:, None].to(k.dtype)
    executor = Executor(lists.layout, q.device, config)
    right, sums = expected(lists, q, k, v)
    for _ in range(3):
        out, lse = executor.attend(lists.tensors, q, k, v, scale=head_dim**-0.5, with_lse=True)
        assert reference.relative_error(out.cpu(), right) <= reference.TOLERANCE[dtype]
        torch.testing.assert_close(lse.cpu().double(), sums, rtol=0, atol=LSE_TOLERANCE)
        # A bound is used in bfloat16 alone.
        out, lse = executor.attend(lists.tensors, q, k, v, scale=head_dim**-0.5, with_lse=True, bound=30.0)
        assert reference.relative_error(out.cpu(), right) <= reference.TOLERANCE[dtype]
        torch.testing.assert_close(lse.cpu().double(), sums, rtol=0, atol=LSE_TOLERANCE)


@needs_hopper
def test_lists_that_did_not_fit_give_nan_and_tokens_off_16_bytes_are_right():
    q, k, v = qkv(1, 1, 128, 256, 64, dtype=torch.bfloat16, device=TRITON_DEVICE)
    mask = mask_of([[[200]]], 256).to(TRITON_DEVICE)
    for lists, shift in ((slices.from_mask(mask, 128, budget=0.5), 0), (slices.from_mask(mask, 128), 1)):
        near = torch.empty(256 * 64 + shift, dtype=k.dtype, device=k.device)[shift:].view(1, 1, 256, 64).copy_(k)
        out, _ = Executor(lists.layout, q.device, FORMS[0]).attend(lists.tensors, q, near, v, scale=0.125)
        if shift:
            assert reference.relative_error(out.cpu(), expected(lists, q, k, v)[0]) <= reference.TOLERANCE[q.dtype]
        else:
            assert out.isnan().all()
