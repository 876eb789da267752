"""Wan: the network against the published formulas, written out here, and against diffusers' own class."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tilewright import networks
from tilewright.core.errors import ArtifactError, ConfigError, PatternError, UnknownNameError
from tilewright.masks import wan as pattern
from tilewright.networks import wan
from tilewright.slices import orders
from tilewright_study.measure import clock as clocks

NAME = "wan-tiny-480p-9f"
SMALL = {"height": 48, "width": 80}
GRID = (3, 3, 5)


@pytest.fixture(autouse=True)
def narrow(monkeypatch, tmp_path):
    """The network that is run is as published, but for its width and depth."""
    monkeypatch.setitem(pattern.VARIANTS, "tiny", pattern.Size(256, 320, 2, 2))
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))


def create(**options):
    return networks.create_video(NAME, **(SMALL | options))


@pytest.fixture
def network():
    """Random values for everything that a checkpoint holds; queries and keys large, so that attention is not even."""
    made = create()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            scale = 0.2 if tensor.ndim == 1 else tensor[0].numel() ** -0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale + ("norm" in name) * (tensor.ndim == 1))
            if ".norm_" in name:
                tensor *= 2
    return made


def inputs(batch=2, tokens=7):
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(batch, *create().options.latents, generator=generator)
    text = torch.randn(batch, tokens, pattern.TEXT_WIDTH, generator=generator)
    return latents, torch.tensor([900.0, 12.5])[:batch], text


def attend_by(network, attention):
    """Let the clips of `GRID` attend by an object of a test."""
    for layer in network.clip(GRID, "cpu").layers:
        layer.attention = attention


@torch.no_grad()
def published(state, latents, time, text, heads=2):
    """The velocity of one clip [16, T, H, W], in float64, by the definitions: one token after the other."""
    w = {key: tensor.double() for key, tensor in state.items()}
    latents, text = latents.double(), text.double()

    def linear(x, key):
        return x @ w[f"{key}.weight"].T + w[f"{key}.bias"]

    def norm(x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()

    def rms(x, key):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{key}.weight"]

    def attention(x, others, key, place=None):
        q, k = (rms(linear(y, f"{key}.{at}"), f"{key}.norm_{at}") for y, at in ((x, "q"), (others, "k")))
        q, k, v = (y.unflatten(1, (heads, -1)) for y in (q, k, linear(others, f"{key}.v")))
        if place is not None:
            q, k = (turn(y, place) for y in (q, k))
        weights = (torch.einsum("qhd,khd->hqk", q, k) / 128**0.5).softmax(-1)
        return linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{key}.o")

    def turn(x, place):
        numbers = torch.view_as_complex(x.unflatten(-1, (64, 2)).contiguous())
        angles = torch.tensor(
            [
                [
                    place[n][axis] * 10000 ** (-j / pairs)
                    for axis, pairs in enumerate((22, 21, 21))
                    for j in range(pairs)
                ]
                for n in range(len(x))
            ],
            dtype=torch.float64,
        )
        return torch.view_as_real(numbers * torch.exp(1j * angles)[:, None]).flatten(-2)

    t, h, width = latents.shape[1], latents.shape[2] // 2, latents.shape[3] // 2
    place = [(a, b, c) for a in range(t) for b in range(h) for c in range(width)]
    patches = torch.stack([latents[:, a, 2 * b : 2 * b + 2, 2 * c : 2 * c + 2].flatten() for a, b, c in place])
    x = patches @ w["patch_embedding.weight"].flatten(1).T + w["patch_embedding.bias"]
    angles = [float(time) * 10000 ** (-j / 128) for j in range(128)]
    waves = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles], dtype=torch.float64)
    e = linear(F.silu(linear(waves, "time_embedding.0")), "time_embedding.2")
    e6 = linear(F.silu(e), "time_projection.1").unflatten(0, (6, -1))
    text = torch.cat([text, text.new_zeros(512 - len(text), 4096)])
    text = linear(F.gelu(linear(text, "text_embedding.0"), approximate="tanh"), "text_embedding.2")
    for i in range(2):
        at = f"blocks.{i}"
        m = w[f"{at}.modulation"][0] + e6
        x = x + attention(*2 * [norm(x) * (1 + m[1]) + m[0]], f"{at}.self_attn", place) * m[2]
        crossed = norm(x) * w[f"{at}.norm3.weight"] + w[f"{at}.norm3.bias"]
        x = x + attention(crossed, text, f"{at}.cross_attn")
        hidden = F.gelu(linear(norm(x) * (1 + m[4]) + m[3], f"{at}.ffn.0"), approximate="tanh")
        x = x + linear(hidden, f"{at}.ffn.2") * m[5]
    m = w["head.modulation"][0] + e
    x = linear(norm(x) * (1 + m[1]) + m[0], "head.head")
    out = latents.new_zeros(16, t, 2 * h, 2 * width)
    for n, (a, b, c) in enumerate(place):
        out[:, a, 2 * b : 2 * b + 2, 2 * c : 2 * c + 2] = x[n].unflatten(0, (2, 2, 16)).permute(2, 0, 1)
    return out


@torch.no_grad()
def test_the_network_is_as_published(network):
    latents, time, text = inputs()
    found = network(latents, time, text)
    assert found.shape == latents.shape
    for b in range(2):
        expected = published(network.state_dict(), latents[b], time[b], text[b])
        assert (found[b] - expected).abs().max() < 1e-4 * expected.abs().max()


def test_the_published_sizes_and_names():
    with torch.device("meta"):
        state = networks.create_video("wan-1.3b-480p-81f").state_dict()
    assert len(state) == 825
    assert sum(x.numel() for x in state.values()) == 1_418_996_800
    assert state["blocks.29.modulation"].shape == (1, 6, 1536)
    assert state["head.modulation"].shape == (1, 2, 1536)
    assert state["head.head.weight"].shape == (64, 1536)
    assert "blocks.0.norm1.weight" not in state
    with torch.device("meta"):
        large = networks.create_video("wan-14b-720p-81f")
    assert len(large.blocks) == 40
    assert large.blocks[0].ffn[0].weight.shape == (13824, 5120)


@pytest.mark.parametrize(
    ("name", "tokens"), [("480p-33f", 14_040), ("480p-81f", 32_760), ("720p-81f", 75_600)], ids=lambda x: str(x)
)
def test_a_name_states_the_tokens(name, tokens):
    options = wan.Options(**networks.parse_video(f"wan-1.3b-{name}")[1])
    assert math.prod(pattern.grid(options.latents)) == tokens
    assert wan.name(options) == f"wan-1.3b-{name}"


def test_the_angles_are_those_of_the_definition():
    cos, sin = wan.rotary((2, 3, 4))
    assert cos.shape == sin.shape == (24, 64)
    # Token 23 is at frame 1, row 2, column 3.
    for pair, angle in ((0, 1.0), (21, 10000 ** (-21 / 22)), (22, 2.0), (24, 2 * 10000 ** (-2 / 21)), (43, 3.0)):
        assert cos[23, pair] == pytest.approx(math.cos(angle), abs=1e-6)
        assert sin[23, pair] == pytest.approx(math.sin(angle), abs=1e-6)


def test_turning_keeps_what_differs_by_the_same_offset():
    q, k = torch.randn(2, 128, generator=torch.Generator().manual_seed(0)).double()
    cos, sin = wan.rotary((4, 5, 6))
    grid = torch.arange(120).view(4, 5, 6)

    def score(a, b):
        x, y = (wan.turned(v[None, None, None], cos[n], sin[n]).flatten() for v, n in ((q, a[None]), (k, b[None])))
        return float(x @ y)

    first = score(grid[0, 1, 2], grid[2, 2, 0])
    assert score(grid[1, 3, 5], grid[3, 4, 3]) == pytest.approx(first, abs=1e-4)
    assert score(grid[0, 1, 2], grid[2, 1, 0]) != pytest.approx(first, abs=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("order", orders.NAMES)
def test_the_order_of_tokens_changes_nothing(network, order):
    arguments = inputs()
    other = network.with_attention("dense", order=order)
    assert torch.allclose(other(*arguments), network(*arguments), atol=1e-4)


@torch.no_grad()
def test_tokens_attend_in_the_order(network):
    seen = []

    class Spy:
        stateful = True

        def __call__(self, q, k, v, call):
            seen.append((call, k))
            return F.scaled_dot_product_attention(q, k, v)

    for name in ("raster", "hilbert"):
        other = network.with_attention("dense", order=name)
        attend_by(other, Spy())
        other(*inputs(), step=3, branch=1)
    assert [tuple(call) for call, _ in seen] == [(0, 3, 1), (1, 3, 1)] * 2
    order = torch.from_numpy(orders.order("hilbert", GRID))
    assert not torch.equal(order, torch.arange(len(order)))
    assert torch.allclose(seen[2][1], seen[0][1][:, :, order], atol=1e-5)


@torch.no_grad()
def test_an_empty_prompt_is_512_zeros(network):
    latents, time, text = inputs()
    zeros = torch.zeros(2, 512, pattern.TEXT_WIDTH)
    assert torch.allclose(network(latents, time), network(latents, time, zeros), atol=1e-5)
    assert not torch.allclose(network(latents, time), network(latents, time, text), atol=1e-2)


@torch.no_grad()
def test_matrices_in_bfloat16_stay_close(network):
    latents, time, text = inputs()
    expected = network(latents, time, text)
    lowered = network.lowered(torch.bfloat16)
    assert lowered.blocks[0].modulation.dtype == lowered.time_embedding[0].weight.dtype == torch.float32
    assert lowered.blocks[0].self_attn.q.weight.dtype == torch.bfloat16
    found = lowered(latents, time, text)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_products_may_be_of_16_bits_in_training(network):
    latents, time, text = inputs()
    expected = network(latents, time, text)
    with torch.autocast("cpu", torch.bfloat16):
        found = network(latents, time, text)
    assert found.dtype == torch.float32
    assert 1e-4 < (found - expected).norm() / expected.norm() < 0.03
    found.square().mean().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in network.parameters())


@torch.no_grad()
def test_windows_are_a_plan_over_the_clip(network):
    arguments = inputs()
    whole = network.with_attention("window", {"window": (5, 5, 9)})
    assert torch.allclose(whole(*arguments), network(*arguments), atol=1e-4)
    narrow = network.with_attention("window", {"window": (1, 3, 3)})
    found = narrow(*arguments)
    at = torch.stack(torch.meshgrid(*map(torch.arange, GRID), indexing="ij"), -1).flatten(0, 2)
    mask = ((at[:, None] - at).abs() <= torch.tensor([0, 1, 1])).all(-1)
    masked = network.with_attention("dense")

    class Masked:
        stateful = False

        def __call__(self, q, k, v, call):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    attend_by(masked, Masked())
    assert torch.allclose(found, masked(*arguments), atol=1e-4)
    assert not torch.allclose(found, network(*arguments), atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("name", ["slices", "blocks"])
@pytest.mark.parametrize("order", [None, "hilbert"])
def test_lists_of_all_keys_are_dense_attention(network, name, order):
    arguments = inputs()
    found = network.with_attention(name, {"keep": 1.0, "budget": 1.0}, order)(*arguments)
    # ASSUME: as logits of other networks, float32 against the oracle.
    assert (found - network(*arguments)).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("slices", {"keep": 0.5, "budget": 0.5}),
        ("blocks", {"keep": 0.5, "budget": 0.5}),
        ("slices", {}),
        ("blocks", {"mass": 0.9, "keep": 0.4}),
        ("slices", {"by": "column", "threshold": 0.002, "predictor": {"criterion": "mean"}}),
    ],
    ids=str,
)
def test_fewer_keys_change_the_answer_a_little(name, settings):
    large = networks.create_video(NAME, height=128, width=208, seed=3)
    latents = torch.randn(1, *large.options.latents, generator=torch.Generator().manual_seed(0))
    expected = large(latents, 500.0)
    found = large.with_attention(name, settings, "hilbert")(latents, 500.0)
    error = float((found - expected).norm() / expected.norm())
    assert 1e-4 < error < 0.2


@torch.no_grad()
def test_lists_are_kept_from_step_to_step(network):
    latents, time, text = inputs()
    settings = {"keep": 1.0, "budget": 1.0, "steps": {"refresh": [1], "first_dense": 1}}
    kept = network.with_attention("slices", settings)
    expected = network(latents, time, text)
    # Dense, refreshed, kept: with all keys all are the same.
    for step in range(3):
        assert torch.allclose(kept(latents, time, text, step=step), expected, atol=1e-4)
    assert kept.clip(GRID, "cpu").layers[0].attention.steps.memory_bytes > 0
    with pytest.raises(
        PatternError, match="step 2: expected lists of layer 0, branch 1, made at step 1 of this run, found none"
    ):
        kept(latents, time, text, step=2, branch=1)
    # A sampler tells its steps and branches; the second branch takes the lists of the first.
    settings = {
        "keep": 0.5,
        "budget": 1.0,
        "rows": 32,
        "steps": {"refresh": [0, 2], "first_dense": 0, "shared": {1: 0}},
    }
    sampled = network.with_attention("slices", settings).sample(text, steps=4, guidance=2.0)
    assert sampled.passes == 8 and sampled.latents.isfinite().all()


def test_windows_are_trained_as_dense_attention_is(network):
    def gradients(model):
        loss = model(*inputs()).square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    dense = gradients(network)
    assert all(x.isfinite().all() for x in dense)
    whole = gradients(network.with_attention("window", {"window": (99, 99, 99)}))
    for one, other in zip(whole, dense, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    narrow = gradients(network.with_attention("window", {"window": (1, 1, 1)}))
    assert any((one - other).abs().max() > 1e-6 for one, other in zip(narrow, dense, strict=True))


def test_lists_of_all_keys_have_the_gradients_of_dense_attention(network):
    found = []
    for attention, settings in (("dense", {}), ("slices", {"keep": 1.0, "budget": 1.0})):
        network.zero_grad()
        network.with_attention(attention, settings)(*inputs()).square().mean().backward()
        found.append(network.blocks[0].self_attn.q.weight.grad.clone())
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3 * float(found[0].abs().max()))


def test_checkpoints_of_both_dialects_load(network, tmp_path):
    state = network.state_dict()
    theirs = wan.diffusers_state(state)
    assert "blocks.0.attn1.to_out.0.weight" in theirs and "condition_embedder.time_proj.bias" in theirs
    assert not set(theirs) & set(state) - {"patch_embedding.weight", "patch_embedding.bias"}
    for name, saved in (("official", state), ("diffusers", theirs)):
        path = tmp_path / f"{name}.safetensors"
        save_file(saved, path)
        loaded = create(checkpoint=path)
        assert loaded.weights == str(path)
        assert all(torch.equal(x, loaded.state_dict()[key]) for key, x in state.items())
    assert wan.adapt(theirs, network).keys() == state.keys()


def test_a_checkpoint_of_another_size_is_refused(network, tmp_path, monkeypatch):
    save_file(network.state_dict(), tmp_path / "small.safetensors")
    monkeypatch.setitem(pattern.VARIANTS, "tiny", pattern.Size(384, 320, 3, 2))
    with pytest.raises(ArtifactError, match=r"mis-shaped: .*\[256\] for \[384\]"):
        create(checkpoint=tmp_path / "small.safetensors")
    monkeypatch.setitem(pattern.VARIANTS, "tiny", pattern.Size(256, 320, 2, 3))
    with pytest.raises(ArtifactError, match=r"missing: blocks\.2\."):
        create(checkpoint=tmp_path / "small.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames": 10}, "frames: expected one more than a multiple of 4, found 10"),
        ({"height": 50}, "height: expected a multiple of 16 pixels, found 50"),
        ({"resolution": "8k"}, "resolution: expected one of 480p, 720p"),
        ({"layers": 99}, "layers: expected at most 2, found 99"),
        ({"depth": 2}, "unknown field `depth`"),
        ({"attention": "window", "settings": {"window": (2, 3, 3)}}, "window: expected odd numbers"),
        (
            {"attention": "slices", "settings": {"budget": 1.5}},
            "attention slices: .*<= 1.0.*budget.*; settings: by, budget",
        ),
        ({"attention": "slices", "settings": {"predictor": {"pools": 8}}}, "predictor pooled: .*`pools`"),
        ({"attention": "slices", "settings": {"steps": {"refresh": [-1]}}}, "attention slices: .*>= 0"),
        ({"attention": "dense", "settings": {"keep": 1}}, "attention dense: .*`keep`.*; settings: none"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        create(**options)


def test_unknown_names_are_refused():
    with pytest.raises(UnknownNameError, match=r"unknown video network 'wan-2b-480p-81f'; known: wan-<1\.3b"):
        networks.create_video("wan-2b-480p-81f")
    with pytest.raises(UnknownNameError, match="unknown attention 'flash'; known: dense, "):
        create(attention="flash")
    with pytest.raises(UnknownNameError, match="unknown predictor 'best'; known: pooled"):
        create(attention="slices", settings={"by": "best"})
    with pytest.raises(UnknownNameError, match="unknown order of tokens 'z'; known: raster"):
        create(order="z")
    with pytest.raises(UnknownNameError, match="unknown network"):
        networks.parse("wan-1.3b-480p-81f")


def test_a_plan_has_an_order_of_its_own(network):
    with pytest.raises(ConfigError, match="expected none, since attention window has an order"):
        network.with_attention("window", order="voxel")(*inputs())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, t, c: (x[0], t, c), r"latents: expected a tensor \[B, 16"),
        (lambda x, t, c: (x[:, :3], t, c), "latents: expected"),
        (lambda x, t, c: (x[..., :9], t, c), "columns even, found"),
        (lambda x, t, c: (x.int(), t, c), "floating point"),
        (lambda x, t, c: (x, t, c[:1]), r"text: expected a tensor \[2, 1 to 512, 4096\], found \[1, 7, 4096\]"),
        (lambda x, t, c: (x, t, c[..., :9]), "text: expected"),
    ],
)
def test_wrong_tensors_are_refused(network, change, message):
    with pytest.raises(PatternError, match=message):
        network(*change(*inputs()))


@torch.no_grad()
def test_attention_is_timed_apart(network):
    with clocks.clocked() as clock:
        network(*inputs())
    assert clock.seconds > 0


def test_parsing_names_needs_no_torch():
    code = (
        "import sys; from tilewright import networks; networks.parse_video('wan-tiny-480p-81f'); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")
@torch.no_grad()
def test_diffusers_own_network_answers_the_same(network):
    from diffusers import WanTransformer3DModel

    theirs = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=128, ffn_dim=320, num_layers=2, text_dim=pattern.TEXT_WIDTH
    ).eval()
    state = wan.diffusers_state(network.state_dict())
    assert theirs.load_state_dict(state) and theirs.state_dict().keys() == state.keys()
    latents, time, text = inputs(tokens=512)
    expected = theirs(latents, time, text, return_dict=False)[0]
    assert expected.std() > 0.1
    # Theirs rounds angles of the time to float32.
    assert (network(latents, time, text) - expected).abs().max() < 1e-3 * expected.abs().max()
