"""Where transformers can be imported: our SegFormer and Swin are its own, with the weights that it writes to a file."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilewright.masks import segformer as pattern
from tilewright.masks import swin
from tilewright.networks import from_checkpoint

transformers = pytest.importorskip("transformers", reason="transformers is not installed, or cannot be imported")


def drawn(network):
    """Random values for everything that a checkpoint holds, so that all of it shows in logits of about 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if "num_batches" in name or "relative_position_index" in name:
                continue
            if name.endswith("running_var"):
                tensor.copy_(noise.abs() + 0.5)
            elif "norm" in name:
                tensor.copy_(name.endswith("weight") + 0.2 * noise)
            elif "relative_position_bias" in name:
                tensor.copy_(noise)
            else:
                tensor.copy_(noise * (tensor[0].numel() ** -0.5 if tensor.ndim > 1 else 0.2))
    return network.eval()


def images(size):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
@pytest.mark.parametrize("decoder", ["published", "folded"])
@pytest.mark.parametrize(
    ("variant", "size"), [("b0", (64, 64)), ("b0", (53, 94)), ("b1", (96, 64)), ("b2", (61, 80)), ("b5", (64, 32))]
)
def test_a_segformer_is_that_of_transformers(tmp_path, variant, size, decoder):
    known = pattern.VARIANTS[variant]
    config = transformers.SegformerConfig(
        hidden_sizes=list(known.widths),
        depths=list(known.depths),
        num_attention_heads=[1, 2, 5, 8],
        decoder_hidden_size=known.channels,
        id2label={0: "road"} | {number: f"LABEL_{number}" for number in range(1, 19)},
    )
    theirs = drawn(transformers.SegformerForSemanticSegmentation(config))
    # They have torch's own everywhere; the weights that people have were trained with these.
    for name, module in theirs.named_modules():
        if isinstance(module, nn.LayerNorm) and not ("patch_embed" in name or "reduction" in name or ".self." in name):
            module.eps = config.layer_norm_eps
    theirs.save_pretrained(tmp_path)
    checkpoint = tmp_path / "model.safetensors"
    ours = from_checkpoint(tmp_path if decoder == "folded" else checkpoint, image_size=size, decoder=decoder)
    assert (ours.options.variant, ours.options.head) == (variant, "segformer") and ours.labels[:2] == (
        "road",
        "LABEL_1",
    )
    expected = theirs(images(size)).logits
    assert 0.3 < expected.std() < 3
    torch.testing.assert_close(ours(images(size)), expected, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["native", "dense"])
@pytest.mark.parametrize(
    ("variant", "size", "window"),
    [("tiny", (64, 64), 7), ("tiny", (120, 226), 7), ("tiny", (33, 58), 7), ("base", (224, 64), 12)],
)
def test_a_swin_with_upernet_is_that_of_transformers(tmp_path, monkeypatch, variant, size, window, attention):
    # As published, but for the channels of the head and the depth of the third stage.
    known = swin.VARIANTS[variant]._replace(depths=(2, 2, 3, 2))
    monkeypatch.setitem(swin.VARIANTS, variant, known)
    config = transformers.UperNetConfig(
        backbone_config=transformers.SwinConfig(
            embed_dim=known.width,
            depths=list(known.depths),
            num_heads=[known.heads << stage for stage in range(4)],
            window_size=window,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        hidden_size=64,
        num_labels=19,
    )
    theirs = drawn(transformers.UperNetForSemanticSegmentation(config))
    theirs.save_pretrained(tmp_path)
    checkpoint = tmp_path / "model.safetensors"
    ours = from_checkpoint(checkpoint, image_size=size, attention=attention)
    assert (ours.options.variant, ours.options.channels, ours.options.window) == (variant, 64, window)
    expected = theirs(images(size)).logits
    assert 0.3 < expected.std() < 3
    # They resize the maps to the image.
    found = F.interpolate(ours(images(size)), size=size, mode="bilinear", align_corners=False)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
