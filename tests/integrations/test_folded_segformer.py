"""transformers' SegFormer with the folded decoder: the same logits, names and files."""

import copy

import pytest
import torch
from torch import nn

import tilewright as tw
from tilewright.core.errors import Unavailable

transformers = pytest.importorskip("transformers", reason="transformers is not installed, or cannot be imported")


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=20,
        num_labels=7,
    )  # fmt: skip
    found = transformers.SegformerForSemanticSegmentation(config).eval()
    norm = found.decode_head.batch_norm
    for x in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(x.data, 0.5, 2.0)
    for name, x in found.decode_head.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(x.data)
    return found


@pytest.mark.parametrize("size", [(64, 64), (40, 88)])
def test_logits_are_those_of_the_published_decoder(model, size):
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        expected = model(images).logits
        before = {*model.state_dict()}
        folded = tw.fold(copy.deepcopy(model))
        found = folded(images).logits
    assert found.shape == expected.shape and (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert {*folded.state_dict()} == before
    # Gradients, and training, go by the published decoder.
    assert torch.equal(folded(images).logits, model(images).logits)
    folded(images).logits.sum().backward()
    assert all(x.grad is not None for x in folded.decode_head.parameters())


@torch.no_grad()
def test_changed_weights_are_folded_anew(model):
    images = torch.randn(1, 3, 64, 64)
    folded = tw.fold(copy.deepcopy(model))
    before = folded(images).logits
    for each in (folded, model):
        each.decode_head.linear_fuse.weight.mul_(1.5)
        each.decode_head.batch_norm.running_mean.add_(0.3)
    found, expected = folded(images).logits, model(images).logits
    assert not torch.allclose(found, before) and torch.allclose(found, expected, atol=1e-4)
    again = copy.deepcopy(folded)
    assert torch.equal(again(images).logits, found)
    again.decode_head.classifier.bias.add_(1.0)
    assert torch.allclose(again(images).logits, found + 1.0, atol=1e-4)
    assert torch.equal(folded(images).logits, found)


def test_other_models_are_refused(model):
    with pytest.raises(Unavailable, match="SegformerDecodeHead, found Linear with none"):
        tw.fold(nn.Linear(2, 2))
    model.decode_head.activation = nn.GELU()
    with pytest.raises(Unavailable, match="found SegformerForSemanticSegmentation with SegformerDecodeHead"):
        tw.fold(model)
