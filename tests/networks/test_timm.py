"""Where timm can be imported: the pieces that our networks share with its own give the same results."""

import pytest
import torch

from tilewright.networks import create

timm_vit = pytest.importorskip("timm.models.vision_transformer", reason="timm is not installed, or cannot be imported")


@torch.no_grad()
def test_a_deit_block_is_timms():
    network = create("dynamicvit", variant="deit-256", image_size=64, attention="native")
    block, theirs = network.blocks[0], timm_vit.Block(256, 4, mlp_ratio=4.0, qkv_bias=True).eval()
    theirs.norm1.eps = theirs.norm2.eps = block.norm1.eps
    weights = {name: torch.randn_like(value) / 8 for name, value in block.state_dict().items()}
    for module in (block, theirs):
        module.load_state_dict(weights)
    x = torch.randn(2, 17, 256)
    attend = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(block(x, attend), theirs(x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_network_that_keeps_everything_is_timms_vision_transformer():
    network = create(
        "dynamicvit", variant="deit-256", image_size=64, attention="native", keep_ratio=1.0, num_classes=10
    )
    theirs = timm_vit.VisionTransformer(
        img_size=64, patch_size=16, embed_dim=256, depth=12, num_heads=4, num_classes=10, class_token=True
    ).eval()
    found = theirs.load_state_dict(
        {name: value for name, value in network.state_dict().items() if not name.startswith("score_predictor")},
        strict=False,
    )
    assert not found.unexpected_keys and not found.missing_keys
    # Their default of the last norm is ours too.
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(network(images), theirs(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("hidden", [32, 96])
@torch.no_grad()
def test_the_mlp_is_timms(hidden):
    from timm.layers import Mlp

    from tilewright.networks.vit_parts import Mlp as Ours

    ours, theirs = Ours(48, hidden), Mlp(48, hidden)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 48)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("variant", "size"), [("tiny", 224), ("tiny", 64), ("small", 64), ("tiny-distilled", 64)])
@torch.no_grad()
def test_a_deit_is_timms(variant, size):
    timm = pytest.importorskip("timm")
    ours = create("deit", variant=variant, image_size=size)
    torch.manual_seed(0)
    for tensor in ours.state_dict().values():
        tensor.add_(0.1 * torch.randn_like(tensor))
    theirs = timm.create_model(f"deit_{variant.replace('-', '_')}_patch16_224", img_size=size).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, size, size)
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-5)
