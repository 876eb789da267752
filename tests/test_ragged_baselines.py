import pytest
import torch

from conftest import TRITON_DEVICE
from tilewright import ragged
from tilewright.errors import PatternError, UnknownNameError
from tilewright.kernels import ragged_baselines, reference
from tilewright.kernels.baselines import Unavailable

DTYPE = torch.float16 if TRITON_DEVICE == "cuda" else torch.float32
GPU_ONLY = ("sdpa_flash", "flash_varlen", "torch_varlen")


@pytest.mark.parametrize("counts", [[7, 1, 20], [9, 9]], ids=str)
@pytest.mark.parametrize("name", ragged_baselines.NAMES)
def test_every_baseline_computes_the_batch(name, counts):
    lengths = torch.tensor(counts, device=TRITON_DEVICE)
    packing = ragged.pack_lengths(lengths, 32)
    try:
        ready = ragged_baselines.prepare(name, packing, 2, 16, DTYPE)
    except Unavailable as error:
        assert TRITON_DEVICE == "cpu"
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
        ragged_baselines.prepare(name, ragged.pack_lengths([2, 3]), 2, 16, torch.float16)


def test_unknown_baselines_are_named():
    with pytest.raises(UnknownNameError, match="unknown ragged baseline 'vaarlen'; known: sdpa_mask, sdpa_flash"):
        ragged_baselines.prepare("vaarlen", ragged.pack_lengths([2, 3]), 2, 16, torch.float16)


def test_a_batch_that_does_not_fit_is_refused():
    packing = ragged.pack(torch.ones(2, 3) > 0, 4)
    with pytest.raises(PatternError, match="capacity: expected at least the 6 tokens kept, found 4"):
        ragged_baselines.prepare("nested", packing, 2, 16, torch.float32)
