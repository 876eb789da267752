"""Vision transformers of Hugging Face, with random weights: attention ``tilewright`` is its own ``sdpa`` with a mask.

Skipped where transformers 5 is not installed: before it BEiT and Swin take no attention from the registry.
"""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from helpers import gradients
from tilewright.core.errors import ConfigError, PatternError, UnknownNameError
from tilewright.nn import patterns

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="transformers 5 is not installed, or cannot be imported"
)

from tilewright.integrations import transformers as adapter  # noqa: E402

SMALL = {"hidden_size": 36, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
VIT = {**SMALL, "image_size": 96, "patch_size": 16}
# Model, configuration, pattern, special tokens. Heads have 18 channels.
MODELS = {
    "vit": ("ViT", {**VIT, "image_size": [64, 96]}, "window-3-g1", 1),
    "dinov2": ("Dinov2", {**VIT, "patch_size": 14, "image_size": 98}, "chunk-5-g1", 1),
    "registers": ("Dinov2WithRegisters", {**VIT, "num_register_tokens": 4}, "window-3-g5", 5),
    "dinov3": ("DINOv3ViT", {**VIT, "num_attention_heads": 3, "num_register_tokens": 4}, "axial-g5", 5),
    "siglip": ("SiglipVision", VIT, "swin-3", 0),
    "beit": ("Beit", {**VIT, "use_relative_position_bias": True, "drop_path_rate": 0.0}, "window-3-g1", 1),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "plans"))


def drawn(model):
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = "norm" in name and name.endswith("weight")
        parameter.data.copy_(scale + 0.2 * noise if "position" not in name else 0.5 * noise)
    return model.eval()


def made(case):
    name, settings, pattern, n_special = MODELS[case]
    config = getattr(transformers, f"{name}Config")(**settings)
    model = drawn(getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="sdpa"))
    rows, columns = np.broadcast_to(settings["image_size"], 2)
    return model, pattern, n_special, torch.randn(2, 3, rows, columns, generator=torch.Generator().manual_seed(1))


class Masked(TorchFunctionMode):
    """The library's own calls of torch's attention, with a mask."""

    def __init__(self, mask):
        super().__init__()
        self.mask, self.calls = mask, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            bias = kwargs.get("attn_mask")
            kwargs["attn_mask"] = self.mask if bias is None else bias.masked_fill(~self.mask, -torch.inf)
            self.calls += 1
        return func(*args, **kwargs)


def expected(model, pattern, n_special, images, **named):
    patch = model.config.patch_size
    grid = tuple(int(side) // patch for side in images.shape[-2:])
    graph = patterns.graph(pattern, grid, n_special)
    indptr, indices = graph.expand()
    mask = torch.zeros(graph.shape, dtype=torch.bool)
    mask[np.repeat(np.arange(graph.n_rows), np.diff(indptr)), indices] = True
    with Masked(mask) as mode:
        out = model(images, **named).last_hidden_state
    assert mode.calls == SMALL["num_hidden_layers"]
    return out


def close(found, wanted):
    assert not found.isnan().any()
    return torch.allclose(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", MODELS)
@torch.no_grad()
def test_a_pattern_is_sdpa_with_its_mask_and_full_is_sdpa(case):
    model, pattern, n_special, images = made(case)
    whole, wanted = model(images).last_hidden_state, expected(model, pattern, n_special, images)
    assert not torch.allclose(whole, wanted, atol=1e-2)
    adapter.use(model, pattern)
    assert model.config._attn_implementation == "tilewright"
    assert close(model(images).last_hidden_state, wanted) and close(model(images).last_hidden_state, wanted)
    adapter.use(model, "full")
    assert close(model(images).last_hidden_state, whole)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(images).last_hidden_state, whole)


def last_tokens(model):
    return lambda images: model(images).last_hidden_state


@pytest.mark.parametrize("case", MODELS)
def test_it_trains_as_masked_attention(case):
    model, pattern, n_special, images = made(case)
    exact = copy.deepcopy(model).double()
    wanted = gradients.of(exact, lambda x: expected(exact, pattern, n_special, x), images.double())
    adapter.use(model, pattern)
    gradients.agree(gradients.of(model, last_tokens(model), images), wanted)


@pytest.mark.parametrize("way", ["compiled", "checkpointed"])
@pytest.mark.parametrize("case", ["vit", "beit"])
def test_it_trains_the_same_compiled_and_checkpointed(case, way):
    model, pattern, _, images = made(case)
    adapter.use(model.train(), pattern)
    # No gradient comes to it: None, or zeros of a compiled graph.
    model.pooler = None
    wanted = gradients.of(model, last_tokens(model), images)
    if way == "checkpointed":
        model.gradient_checkpointing_enable()
    call = torch.compile(model, backend="aot_eager", fullgraph=case == "vit") if way == "compiled" else model
    gradients.agree(gradients.of(model, last_tokens(call), images), wanted)


@torch.no_grad()
def test_by_the_name_of_the_attention_and_a_saved_configuration(tmp_path):
    model, pattern, n_special, images = made("vit")
    wanted = expected(model, pattern, n_special, images)
    adapter.use(model, pattern)
    model.save_pretrained(tmp_path)
    again = transformers.ViTModel.from_pretrained(tmp_path, attn_implementation="tilewright")
    assert close(again(images).last_hidden_state, wanted)


# How a family is told that images have another shape than the configuration's.
OTHERS = {
    case: {} if case in ("dinov2", "registers", "dinov3") else {"interpolate_pos_encoding": True} for case in MODELS
}
# Patterns that fit all of the grids.
ANY_GRID = {"siglip": "window-3", "dinov2": "window-3-g1"}


def of_any_shape(case):
    """A model, its pattern, and images of as many tokens as the configuration's, upright and lying, and of fewer."""
    model, pattern, n_special, images = made(case)
    patch = model.config.patch_size
    height, width = (side // patch for side in images.shape[-2:])
    height, width = (height * width // 2, 2) if height * width % 2 == 0 else (height * width, 1)
    grids = (height, width), (width, height), (3, 4)
    generator = torch.Generator().manual_seed(2)
    images = [torch.randn(2, 3, h * patch, w * patch, generator=generator) for h, w in grids]
    return model, ANY_GRID.get(case, pattern), n_special, images


@pytest.mark.parametrize("case", MODELS)
@torch.no_grad()
def test_images_of_another_shape_have_a_grid_of_their_own(case):
    model, pattern, n_special, images = of_any_shape(case)
    if case == "vit":
        # The library itself resamples square grids alone.
        model.config.image_size = 96
        model.embeddings = type(model.embeddings)(model.config)
        drawn(model)
        images = [torch.randn(1, 3, *size) for size in ((64, 144), (144, 64), (48, 64))]
    wanted = [expected(model, pattern, n_special, each, **OTHERS[case]) for each in images]
    adapter.use(model, pattern)
    for each, out in zip(images, wanted, strict=True):
        assert close(model(each, **OTHERS[case]).last_hidden_state, out)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: model(images[i % 3], **OTHERS[case]).last_hidden_state, range(12)))
    assert all(close(out, wanted[i % 3]) for i, out in enumerate(found))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", MODELS)
def test_what_checkpointing_computes_again_sees_the_grid_of_its_own_forward(case, reentrant):
    if case == "vit":
        pytest.skip("the library resamples no position table of a grid that is not square")
    model, pattern, _, images = of_any_shape(case)
    adapter.use(model.train(), pattern)

    def found():
        model.zero_grad()
        # DINOv3 draws how rotations are moved.
        torch.manual_seed(0)
        sum(model(each, **OTHERS[case]).last_hidden_state.square().mean() for each in images).backward()
        return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])

    wanted = found()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert torch.allclose(found(), wanted, rtol=1e-4, atol=1e-6)
    model.gradient_checkpointing_disable()
    for layer in model.modules():
        if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
            call = functools.partial(layer.forward)
            layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, call, use_reentrant=False)
    assert torch.allclose(found(), wanted, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_layer_without_images_has_the_grid_that_was_stated():
    model, pattern, n_special, _ = made("dinov2")
    images = torch.randn(1, 3, 70, 112)
    wanted = expected(model, pattern, n_special, images)
    tokens = model.embeddings(images)
    adapter.use(model, pattern, grid=(5, 8))
    assert close(model(images).last_hidden_state, wanted)
    with ThreadPoolExecutor(1) as elsewhere:
        found = elsewhere.submit(model.encoder, tokens).result().last_hidden_state
        assert close(model.layernorm(found), wanted)
        model.config.tilewright_grid = None
        with pytest.raises(PatternError, match="1 special tokens and a grid of 7 x 7, found 41 queries"):
            elsewhere.submit(model.encoder, tokens).result()


@torch.no_grad()
def test_models_of_one_configuration_have_patterns_of_their_own():
    config = made("vit")[0].config
    first, second, third = (
        drawn(transformers.ViTModel._from_config(config, attn_implementation="sdpa")) for _ in range(3)
    )
    images = torch.randn(1, 3, 64, 96)
    whole = third(images).last_hidden_state
    wanted = [expected(third, pattern, 1, images) for pattern in ("window-3-g1", "axial-g1")]
    adapter.use(first, "window-3-g1")
    adapter.use(second, "axial-g1")
    for model, out in zip((first, second, third), (*wanted, whole), strict=True):
        assert close(model(images).last_hidden_state, out)


@torch.no_grad()
def test_a_bias_that_was_written_to():
    model, pattern, n_special, images = made("beit")
    adapter.use(model, pattern)
    before = model(images).last_hidden_state
    for name, parameter in model.named_parameters():
        if "relative_position_bias_table" in name:
            parameter.mul_(2)
    after = model(images).last_hidden_state
    assert not torch.allclose(before, after, atol=1e-3)
    model.set_attn_implementation("sdpa")
    assert close(after, expected(model, pattern, n_special, images))


@torch.no_grad()
def test_swin_answers_as_with_sdpa_and_refuses_patterns():
    config = transformers.SwinConfig(image_size=56, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=7)
    model = drawn(transformers.SwinModel._from_config(config, attn_implementation="sdpa"))
    images = torch.randn(2, 3, 56, 56)
    wanted = model(images).last_hidden_state
    adapter.use(model, "full")
    assert close(model(images).last_hidden_state, wanted)
    with pytest.raises(PatternError, match="expected full for swin, whose windows are its pattern, found 'window-7'"):
        adapter.use(model, "window-7")


@torch.no_grad()
def test_the_images_of_a_model_of_text_and_images():
    text = {**SMALL, "vocab_size": 50, "max_position_embeddings": 8, "projection_size": 36}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.SiglipConfig(text_config=text, vision_config=VIT)
    model = drawn(transformers.SiglipModel._from_config(config, attn_implementation="sdpa"))
    tokens, images = torch.arange(8)[None], torch.randn(1, 3, 96, 96)
    inputs = {"input_ids": tokens, "pixel_values": images}
    before = model(**inputs)
    wanted = expected(model.vision_model, "window-3", 0, images)
    adapter.use(model, "window-3")
    after = model(**inputs)
    assert torch.equal(before.text_embeds, after.text_embeds)
    assert not torch.allclose(before.image_embeds, after.image_embeds, atol=1e-4)
    assert close(model.vision_model(images).last_hidden_state, wanted)


@pytest.mark.parametrize(
    ("pattern", "error", "line"),
    [
        ("window-3-g5", PatternError, "special tokens, 1, found 5; name it window-3-g1"),
        ("window-3", PatternError, "special tokens, 1, found 0; name it window-3-g1"),
        ("swin-4-g1", PatternError, "whole windows of 4, found 4 x 6"),
        ("windows", UnknownNameError, "unknown pattern 'windows'; known"),
        (np.ones((25, 25)), ConfigError, "pattern: expected a name, found ndarray"),
    ],
)
@torch.no_grad()
def test_what_does_not_fit_is_refused_and_the_model_left_as_it_was(pattern, error, line):
    model, _, _, images = made("vit")
    before = model(images).last_hidden_state
    with pytest.raises(error, match=line) as found:
        adapter.use(model, pattern)
    assert "\n" not in str(found.value)
    assert model.config._attn_implementation == "sdpa" and not hasattr(model.config, "tilewright_pattern")
    assert torch.equal(model(images).last_hidden_state, before)


def test_other_models_are_refused():
    config = transformers.BertConfig(**{**SMALL, "vocab_size": 20})
    with pytest.raises(ConfigError, match=r"expected one of vit, dinov2.*found bert"):
        adapter.use(transformers.BertModel(config), "full")


def test_a_model_that_keeps_its_attention_is_refused(monkeypatch):
    """As BEiT and Swin do before transformers 5, with a warning alone."""
    model, pattern, _, _ = made("beit")
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda self, name: None)
    with pytest.raises(ConfigError, match=r"takes attention from the registry of transformers, found beit of"):
        adapter.use(model, pattern)
    assert model.config._attn_implementation == "sdpa" and not hasattr(model.config, "tilewright_pattern")


def test_calls_that_cannot_be_honoured_are_refused():
    model, pattern, _, images = made("vit")
    adapter.use(model, pattern)
    layer = next(module for module in model.modules() if type(module).__name__ == "ViTAttention")
    q = torch.randn(1, 2, 25, 18)
    with torch.no_grad():
        for named, what in ({"dropout": 0.1}, "dropout"), ({"is_causal": True}, "causal attention"):
            with pytest.raises(PatternError, match=f"without {what}"):
                adapter.attend(layer, q, q, q, None, **named)
        with pytest.raises(PatternError, match=r"expected a bias .* found torch\.bool"):
            adapter.attend(layer, q, q, q, torch.ones(1, 1, 25, 25, dtype=torch.bool))
        with pytest.raises(PatternError, match="expected queries, keys and values of one dtype"):
            adapter.attend(layer, q, q.half(), q, None)
        model.config.tilewright_pattern = None
        with pytest.raises(ConfigError, match="expected a pattern in the model's configuration, tilewright_pattern"):
            model(images)
