"""Networks in 16 bits on a CPU: stored so, computed in float32."""

import pytest
import torch

from helpers.cases import rest_slow
from tilewright import networks
from tilewright.core import precision
from tilewright.core.errors import PatternError

# Two stages of windows and one that attends to everything; small ones of the other families.
SPARSE = {"heads": 1, "dim": 32, "blocks": 1, "patch": 2, "radius": 2}
STAGES = [SPARSE | {"patch": 4}, SPARSE, SPARSE | {"heads": 2, "patch": 1, "sparse": False}]
NETWORKS = {
    "vision_longformer": {"variant": "tiny", "image_size": 32, "stages": STAGES},
    "regionvit": {"variant": "tiny", "image_size": 64},
    "dynamicvit": {"variant": "deit-256", "image_size": 64},
}
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def images(size, batch=8):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", rest_slow([torch.bfloat16, torch.float16], 0), ids=str)
@pytest.mark.parametrize("family", NETWORKS)
@torch.inference_mode()
def test_attentions_agree_in_16_bits(family, dtype, tmp_path_factory, monkeypatch):
    # Both types have the same plans.
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "plans"))
    options = NETWORKS[family]
    batch = images(options["image_size"]).to(dtype)
    found = {
        a: networks.create(family, attention=a, **options).to(dtype)(batch) for a in ("dense", "native", "tilewright")
    }
    for logits in found.values():
        assert logits.dtype == torch.float32
        assert (logits - found["dense"]).abs().max() <= 1e-4
        assert torch.equal(logits.argmax(1), found["dense"].argmax(1))


@HALF
@torch.inference_mode()
def test_weights_and_images_are_rounded_once(dtype):
    options = NETWORKS["dynamicvit"]
    half = networks.create("dynamicvit", attention="native", **options).to(dtype)
    wide = networks.create("dynamicvit", attention="native", **options)
    batch = images(64, 2)
    unrounded = wide(batch)
    wide.load_state_dict({name: x.to(dtype).float() for name, x in half.state_dict().items()})
    assert torch.equal(half(batch.to(dtype)), wide(batch.to(dtype).float()))
    assert not torch.equal(half(batch.to(dtype)), unrounded)
    assert all(x.dtype == dtype for x in half.parameters())


def test_running_statistics_are_widened_and_counts_are_not():
    norm = torch.nn.BatchNorm2d(2).bfloat16()
    assert {x.dtype for x in precision.float32(norm).values()} == {torch.float32, torch.int64}


@HALF
def test_images_are_checked_in_16_bits(dtype):
    network = networks.create("dynamicvit", **NETWORKS["dynamicvit"]).to(dtype)
    with pytest.raises(PatternError, match="expected a tensor"):
        network(images(32, 1).to(dtype))
