import sys
from types import SimpleNamespace

import pytest
import torch

from helpers.gpu import TRITON_DEVICE
from tilewright import reference
from tilewright.core.errors import PatternError, Unavailable, UnknownNameError
from tilewright.packed import pack
from tilewright.torch_attention import flex
from tilewright_study.baselines import packed as packed_baselines
from tilewright_study.baselines.packed import flash3_varlen

DTYPE = torch.float16 if TRITON_DEVICE == "cuda" else torch.float32
GPU_ONLY = ("sdpa_flash", "flash_varlen", "flash3_varlen", "torch_varlen")


@pytest.mark.parametrize("counts", [[7, 1, 20], [9, 9]], ids=str)
@pytest.mark.parametrize("name", packed_baselines.NAMES)
def test_every_baseline_computes_the_batch(monkeypatch, name, counts):
    # Compiling more of them takes long.
    monkeypatch.setattr(flex, "UNSPLIT", ("128", "64") if TRITON_DEVICE == "cuda" else ("32",))
    lengths = torch.tensor(counts, device=TRITON_DEVICE)
    packing = pack.pack_lengths(lengths, 32)
    try:
        ready = packed_baselines.prepare(name, packing, 2, 16, DTYPE)
    except Unavailable as error:
        assert TRITON_DEVICE == "cpu" or name == "flash3_varlen"
        pytest.skip(str(error))
    q, k, v = torch.randn(32, 3, 2, 16, generator=torch.Generator().manual_seed(0)).to(lengths.device, DTYPE).unbind(1)
    seen = torch.from_numpy(packing.graph().to_dense())
    kept = sum(counts)
    expected = reference.attention(*(x[:kept].cpu().transpose(0, 1)[None] for x in (q, k, v)), seen)[0].transpose(0, 1)
    found = ready.get(ready.call(*ready.put(q, k, v)))
    assert found.shape == (kept, 2, 16)
    assert ready.exact == (name != "sdpa_flash" or len(set(counts)) == 1)
    if ready.exact:
        assert reference.relative_error(found.cpu(), expected) <= reference.TOLERANCE[DTYPE]


@pytest.mark.parametrize("name", GPU_ONLY)
def test_those_of_a_gpu_say_so_on_a_cpu(name):
    with pytest.raises(Unavailable, match="runs on an NVIDIA GPU only, found cpu"):
        packed_baselines.prepare(name, pack.pack_lengths([2, 3]), 2, 16, torch.float16)


@pytest.mark.parametrize("with_lse", [True, False], ids=["with log-sum-exps", "result alone"])
def test_flash_attention_3_gets_the_batch(monkeypatch, with_lse):
    """The package was never installed where this was written: what it is called with is recorded by a stand-in."""

    def attend(q, k, v, starts_q, starts_k, longest_q, longest_k):
        assert starts_q is starts_k and starts_q.dtype == torch.int32 and longest_q == longest_k == 20
        assert q.shape == k.shape == v.shape == (28, 2, 16) and q.dtype == torch.float16
        parts = [part.transpose(0, 1)[None] for x in (q, k, v) for part in x.tensor_split(starts_q[1:-1].tolist())]
        everything = torch.ones(1, 1, dtype=torch.bool)
        outs = [reference.attention(*parts[at::3], everything)[0].transpose(0, 1) for at in range(3)]
        out = torch.cat(outs).to(q.dtype)
        return (out, None) if with_lse else out

    monkeypatch.setattr(flash3_varlen, "need_gpu", lambda device: None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_varlen_func=attend))
    packing = pack.pack_lengths(torch.tensor([7, 1, 20]), 32)
    ready = packed_baselines.prepare("flash3_varlen", packing, 2, 16, torch.float16)
    q, k, v = torch.randn(32, 3, 2, 16, generator=torch.Generator().manual_seed(0)).half().unbind(1)
    found = ready.get(ready.call(*ready.put(q, k, v)))
    seen = torch.from_numpy(packing.graph().to_dense())
    expected = reference.attention(*(x[:28].transpose(0, 1)[None] for x in (q, k, v)), seen)[0].transpose(0, 1)
    assert (found.double() - expected).abs().max() <= reference.TOLERANCE[torch.float16]
    with pytest.raises(Unavailable, match=r"takes 16-bit types, found torch\.float32"):
        packed_baselines.prepare("flash3_varlen", packing, 2, 16, torch.float32)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(Unavailable, match="FlashAttention-3 cannot be imported"):
        packed_baselines.prepare("flash3_varlen", packing, 2, 16, torch.float16)


def test_unknown_baselines_are_named():
    with pytest.raises(UnknownNameError, match="unknown ragged baseline 'vaarlen'; known: sdpa_mask, sdpa_flash"):
        packed_baselines.prepare("vaarlen", pack.pack_lengths([2, 3]), 2, 16, torch.float16)


def test_a_batch_that_does_not_fit_is_refused():
    packing = pack.pack(torch.ones(2, 3) > 0, 4)
    with pytest.raises(PatternError, match="capacity: expected at least the 6 tokens kept, found 4"):
        packed_baselines.prepare("nested", packing, 2, 16, torch.float32)
