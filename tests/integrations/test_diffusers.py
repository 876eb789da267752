"""Slices as an attention backend of diffusers: its own networks, with random weights, answer the same.

Skipped where diffusers is not installed.
"""

import pytest
import torch

from tilewright.core.errors import ConfigError, Unavailable

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
adapter = pytest.importorskip("tilewright.integrations.diffusers")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no dispatcher")

from tilewright.integrations import sdpa  # noqa: E402

ALL = {"tokens": 100, "keep": 1.0, "budget": 1.0}
FEW = {"tokens": 100, "keep": 0.3, "budget": 0.4, "rows": 32}


@pytest.fixture(autouse=True)
def own_backend():
    """Of the process: a model that is given a backend by name sets it."""
    with dispatch.attention_backend("native"):
        yield


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def wan():
    torch.manual_seed(0)
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=64, ffn_dim=128, num_layers=2, text_dim=32, freq_dim=32
    ).eval()


@pytest.fixture
def of_wan():
    # 3 frames of 6 x 8 tokens.
    return {
        "hidden_states": random(2, 16, 3, 12, 16),
        "timestep": torch.tensor([900.0, 10.0]),
        "encoder_hidden_states": random(2, 512, 32),
        "return_dict": False,
    }


@pytest.fixture
def hunyuan():
    torch.manual_seed(0)
    return diffusers.HunyuanVideoTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=24,
        pooled_projection_dim=16,
        rope_axes_dim=(16, 24, 24),
    ).eval()


@pytest.fixture
def of_hunyuan():
    # 3 frames of 6 x 8 tokens and 20 of text, of which one prompt has 20 and the other 7.
    return {
        "hidden_states": random(2, 16, 3, 12, 16),
        "timestep": torch.tensor([900.0, 10.0]),
        "encoder_hidden_states": random(2, 20, 24),
        "encoder_attention_mask": (torch.arange(20) < torch.tensor([[20], [7]])).long(),
        "pooled_projections": random(2, 16),
        "guidance": torch.tensor([6000.0, 6000.0]),
        "return_dict": False,
    }


@pytest.fixture(params=[False, True], ids=["2b", "5b"])
def cogvideox(request):
    """The smaller network has tables of places, the larger one turns queries and keys."""
    torch.manual_seed(0)
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        num_layers=2,
        time_embed_dim=32,
        text_embed_dim=24,
        max_text_seq_length=20,
        sample_width=16,
        sample_height=12,
        sample_frames=9,
        use_rotary_positional_embeddings=request.param,
    ).eval()


@pytest.fixture
def of_cogvideox(cogvideox):
    # 20 tokens of text and 3 frames of 6 x 8.
    angle = random(3 * 6 * 8, 32, seed=5)
    turns = tuple(table.repeat_interleave(2, 1) for table in (angle.cos(), angle.sin()))
    return {
        "hidden_states": random(2, 3, 16, 12, 16),
        "timestep": torch.tensor([900, 10]),
        "encoder_hidden_states": random(2, 20, 24),
        "image_rotary_emb": turns if cogvideox.config.use_rotary_positional_embeddings else None,
        "return_dict": False,
    }


@torch.no_grad()
def test_cogvideox_answers_the_same_with_all_keys(cogvideox, of_cogvideox):
    expected = cogvideox(**of_cogvideox)[0]
    attention = sdpa.Slices(first=20, **ALL)
    handle = attention.attach(cogvideox)
    found = cogvideox(**of_cogvideox)[0]
    assert attention.calls == {"slices": 2}
    assert torch.allclose(found, expected, atol=1e-5) and not found.isnan().any()
    handle.remove()
    assert torch.equal(cogvideox(**of_cogvideox)[0], expected) and attention.calls["slices"] == 2


@torch.no_grad()
def test_cogvideox_with_fewer_keys_answers_something_else(cogvideox, of_cogvideox):
    expected = cogvideox(**of_cogvideox)[0]
    with sdpa.Slices(first=20, **FEW).replacing():
        found = cogvideox(**of_cogvideox)[0]
    assert 1e-5 < float((found - expected).norm() / expected.norm()) < 0.2


@torch.no_grad()
def test_wan_answers_the_same_with_all_keys_by_the_backend_of_a_name(wan, of_wan):
    expected = wan(**of_wan)[0]
    attention = adapter.register("slices-of-all", **ALL)
    wan.set_attention_backend("slices-of-all")
    found = wan(**of_wan)[0]
    assert attention.calls == {"slices": 2, "queries and keys differ": 2}
    assert torch.allclose(found, expected, atol=1e-5) and not found.isnan().any()
    wan.reset_attention_backend()
    # In 0.42 the name stays that of the process.
    with dispatch.attention_backend("native"):
        assert torch.equal(wan(**of_wan)[0], expected) and attention.calls["slices"] == 2


@torch.no_grad()
def test_wan_with_fewer_keys_answers_something_else(wan, of_wan):
    expected = wan(**of_wan)[0]
    attention = adapter.register("tilewright", **FEW)
    with dispatch.attention_backend("tilewright"):
        found = wan(**of_wan)[0]
    assert attention.calls["slices"] == 2
    assert 1e-5 < float((found - expected).norm() / expected.norm()) < 0.1
    # Again, with other settings.
    adapter.register("tilewright", **ALL)
    with dispatch.attention_backend("tilewright"):
        assert torch.allclose(wan(**of_wan)[0], expected, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("text", [None, [7, 7], [20, 7]], ids=["full", "equal", "of-two-lengths"])
def test_hunyuan_answers_the_same_with_all_keys(hunyuan, of_hunyuan, text):
    if text is None:
        text = [20, 20]
    of_hunyuan["encoder_attention_mask"] = (torch.arange(20) < torch.tensor(text)[:, None]).long()
    expected = hunyuan(**of_hunyuan)[0]
    attention = sdpa.Slices(last=20, **ALL)
    handle = attention.attach(hunyuan)
    found = hunyuan(**of_hunyuan)[0]
    assert attention.calls["slices"] == 2 and attention.calls.keys() <= {"slices", "few tokens"}
    assert torch.allclose(found, expected, atol=1e-5) and not found.isnan().any()
    handle.remove()
    assert torch.equal(hunyuan(**of_hunyuan)[0], expected) and attention.calls["slices"] == 2


@torch.no_grad()
def test_hunyuan_with_fewer_keys_answers_something_else(hunyuan, of_hunyuan):
    expected = hunyuan(**of_hunyuan)[0]
    attention = sdpa.Slices(last=20, **FEW)
    with attention.replacing():
        found = hunyuan(**of_hunyuan)[0]
    assert attention.calls["slices"] == 2
    assert 1e-5 < float((found - expected).norm() / expected.norm()) < 0.2
    # What pads the shorter prompt is not seen, whatever it is.
    of_hunyuan["encoder_hidden_states"][1, 7:] *= 30
    with attention.replacing():
        other = hunyuan(**of_hunyuan)[0]
    assert torch.allclose(other[0], found[0], atol=1e-5) and torch.allclose(other[1], found[1], atol=1e-5)


@pytest.mark.parametrize("name", ["native", "Slices", ""])
def test_a_backend_has_a_name_of_its_own(name):
    with pytest.raises(ConfigError, match=f"a name that diffusers does not use, found '{name}'"):
        adapter.register(name)


def test_wrong_settings_enter_nothing():
    with pytest.raises(ConfigError, match="unknown field"):
        adapter.register("other", kept=0.3)
    assert "other" not in [backend.value for backend in dispatch.AttentionBackendName]


def test_other_dispatchers_are_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "dispatch_attention_fn", lambda query, key, value, backend: query)
    with pytest.raises(Unavailable, match=r"0\.35 and 0\.42, found another: what is entered is not called"):
        adapter.register("other")
    monkeypatch.delattr(dispatch, "_AttentionBackendRegistry")
    with pytest.raises(Unavailable, match=r"found another: module .* has no attribute '_AttentionBackendRegistry'"):
        adapter.register("other")


@torch.no_grad()
def test_a_parallel_configuration_is_refused():
    adapter.register("other")
    with pytest.raises(ConfigError, match="other: expected all tokens on one device"):
        dispatch._AttentionBackendRegistry._backends["other"](*torch.zeros(3, 1, 8, 1, 64), _parallel_config={})
