"""Swin with UPerNet: its attentions against each other, its paths against what they skip, names and refusals."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import gradients
from tilewright import networks
from tilewright.core.errors import ArtifactError, ConfigError, PatternError
from tilewright.masks import swin as pattern
from tilewright.networks import swin
from tilewright.networks.path import Path, parse
from tilewright_study.planning import layers

EXACT = {"atol": 1e-5, "rtol": 0}
create = partial(networks.create, "swin", variant="tiny", image_size=(40, 100), num_classes=5, attention="native")


@pytest.fixture(autouse=True, scope="module")
def small():
    """Networks are as published, but for their width, depth and channels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pattern.VARIANTS, "tiny", pattern.Size(32, (2, 2, 3, 2), 1))
        patch.setattr(pattern, "CHANNELS", 64)
        yield


def draw(network):
    generator = torch.Generator().manual_seed(0)
    for name, tensor in network.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("running_var"):
            tensor.copy_(noise.abs() + 0.5)
        elif "norm" in name or ".bn." in name:
            tensor.copy_((name.endswith("weight") + 0.2 * noise).to(tensor.dtype))
        else:
            tensor.copy_(noise * (1 if "bias_table" in name else tensor[0].numel() ** -0.5 if tensor.ndim > 1 else 0.2))
    return network


def images(*size, batch=2):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def network(small):
    return draw(create())


@pytest.fixture(scope="module")
def inputs():
    return images(40, 100)


def windows_of(grid, shift):
    """For each token of a padded grid, those that it sees: by the published rolls, a token at a time."""
    rows, columns = grid
    where = {}
    for y in range(rows):
        for x in range(columns):
            # Rolled up and to the left; what came around is apart.
            rolled = (y - shift) % rows, (x - shift) % columns
            key = (rolled[0] // 7, rolled[1] // 7, rolled[0] >= rows - shift, rolled[1] >= columns - shift)
            where.setdefault(key, set()).add(y * columns + x)
    return {token: seen for seen in where.values() for token in seen}


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("grid", [(7, 7), (5, 10), (15, 20)])
def test_windows_are_the_published_ones(grid, shift):
    windows = swin.Windows(grid, 1, 32, "dense", 7, shift)
    at = torch.arange(windows.grid[0] * windows.grid[1])
    index = windows.site.bias_index(at[:, None], at)
    assert index.min() >= 0 and index.max() < 13**2
    expected = windows_of(windows.grid, shift)
    scipy_rows = windows.site.graph.to_csr()
    for token, seen in expected.items():
        assert set(scipy_rows.indices[scipy_rows.indptr[token] : scipy_rows.indptr[token + 1]]) == seen


def published(state, image):
    """Logits by the definitions, from the tensors of a checkpoint; a pair of tokens at a time in attention."""

    def of(key):
        return state[f"{key}.weight"], state.get(f"{key}.bias")

    def norm(x, key):
        return F.layer_norm(x, x.shape[-1:], *of(key))

    def conv(x, key):
        x = F.conv2d(x, state[f"{key}.conv.weight"], padding=state[f"{key}.conv.weight"].shape[2] // 2)
        bn = (state[f"{key}.bn.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *bn).relu()

    def up(x, like):
        return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=False)

    def attend(x, key, shift, heads):
        rows, columns = x.shape[1:3]
        q, k, v = F.linear(x.flatten(1, 2), *of(f"{key}.qkv")).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        scores = torch.full((heads, rows * columns, rows * columns), -torch.inf)
        for token, seen in windows_of((rows, columns), shift).items():
            for other in seen:
                dy, dx = token // columns - other // columns, token % columns - other % columns
                scores[:, token, other] = state[f"{key}.relative_position_bias_table"][(dy + 6) * 13 + dx + 6]
        out = (q @ k.mT * q.shape[-1] ** -0.5 + scores).softmax(-1) @ v
        return F.linear(out.transpose(1, 2).flatten(2), *of(f"{key}.proj")).view(x.shape)

    x = F.pad(image, (0, -image.shape[3] % 4, 0, -image.shape[2] % 4))
    x = norm(F.conv2d(x, *of("backbone.patch_embed.proj"), stride=4).movedim(1, -1), "backbone.patch_embed.norm")
    levels, size = [], pattern.VARIANTS["tiny"]
    for stage in range(4):
        for block in range(size.depths[stage]):
            key, (rows, columns) = f"backbone.layers.{stage}.blocks.{block}", x.shape[1:3]
            y = F.pad(norm(x, f"{key}.norm1"), (0, 0, 0, -columns % 7, 0, -rows % 7))
            x = x + attend(y, f"{key}.attn", 3 * (block % 2), size.heads << stage)[:, :rows, :columns]
            y = F.gelu(F.linear(norm(x, f"{key}.norm2"), *of(f"{key}.mlp.fc1")))
            x = x + F.linear(y, *of(f"{key}.mlp.fc2"))
        levels.append(norm(x, f"backbone.norm{stage}").movedim(-1, 1))
        if stage < 3:
            x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
            # By columns, then by rows.
            x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
            key = f"backbone.layers.{stage}.downsample"
            x = F.linear(norm(x, f"{key}.norm"), *of(f"{key}.reduction"))
    head, last = "decode_head", levels[3]
    pooled = [
        up(conv(F.adaptive_avg_pool2d(last, side), f"{head}.psp_modules.{i}.1"), last)
        for i, side in enumerate((1, 2, 3, 6))
    ]
    maps = [conv(levels[i], f"{head}.lateral_convs.{i}") for i in range(3)]
    maps.append(conv(torch.cat((last, *pooled), 1), f"{head}.bottleneck"))
    for i in (2, 1, 0):
        maps[i] = maps[i] + up(maps[i + 1], maps[i])
    maps = [conv(maps[i], f"{head}.fpn_convs.{i}") for i in range(3)] + maps[3:]
    fused = conv(torch.cat([up(x, maps[0]) for x in maps], 1), f"{head}.fpn_bottleneck")
    return F.conv2d(fused, *of(f"{head}.conv_seg"))


@torch.inference_mode()
@pytest.mark.parametrize("size", [(40, 100), (37, 66)], ids=str)
def test_a_network_is_its_definition(size):
    network = draw(create(image_size=size))
    expected = published(network.state_dict(), images(*size, batch=1))
    torch.testing.assert_close(network(images(*size, batch=1)), expected, **EXACT)


@torch.inference_mode()
@settings(max_examples=8, deadline=None)
@given(size=st.tuples(*2 * [st.integers(32, 150)]))
def test_the_published_windows_are_masked_attention(size):
    native = draw(create(image_size=size))
    dense = create(image_size=size, attention="dense")
    dense.load_state_dict(native.state_dict())
    x = images(*size, batch=1)
    found, expected = native(x), dense(x)
    assert found.shape == (1, 5, -(-size[0] // 4), -(-size[1] // 4)) and 0.1 < expected.std() < 5
    torch.testing.assert_close(found, expected, **EXACT)


@torch.inference_mode()
def test_scheduled_plans_are_masked_attention(network, inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    planned = create(attention="tilewright")
    planned.load_state_dict(network.state_dict())
    torch.testing.assert_close(planned(inputs), network(inputs), **EXACT)


# Paths


@torch.inference_mode()
def test_a_skipped_block_is_not_there(network, inputs):
    assert torch.equal(network(inputs, "2.2.3.2"), network(inputs))
    without = copy.deepcopy(network)
    for layer, kept in zip(without.backbone.layers, ("10", "01", "101", "00"), strict=True):
        layer.blocks = torch.nn.ModuleList(
            block if keep == "1" else torch.nn.Identity() for block, keep in zip(layer.blocks, kept, strict=True)
        )
    expected = without(inputs)
    assert (expected - network(inputs)).abs().max() > 1e-2
    assert torch.equal(network(inputs, "10.01.101.00"), expected)


@torch.inference_mode()
@pytest.mark.parametrize(("fuse", "width"), [(16, None), (None, 32), (48, 16), (64, 64)])
def test_dropped_channels_are_those_of_zero_weights(network, inputs, fuse, width):
    head, state = network.decode_head, {key: x.clone() for key, x in network.state_dict().items()}
    weights, predict = state["decode_head.fpn_bottleneck.conv.weight"], state["decode_head.conv_seg.weight"]
    for level, conv in enumerate((*head.fpn_convs, head.bottleneck)):
        part = weights[:, 64 * level : 64 * (level + 1)]
        part[:, (conv.bn.weight.abs() * part.square().sum((0, 2, 3)) ** 0.5).argsort(descending=True)[fuse or 64 :]] = 0
    score = head.fpn_bottleneck.bn.weight.abs() * predict[:, :, 0, 0].norm(dim=0)
    predict[:, score.argsort(descending=True)[width or 64 :]] = 0
    expected = functional_call(network, state, (inputs,))
    path = Path(network.path().blocks, decoder="published", fuse=fuse, width=width)
    torch.testing.assert_close(network(inputs, path), expected, **EXACT)


@settings(max_examples=5, deadline=None)
@given(
    size=st.tuples(*2 * [st.integers(32, 150)]),
    blocks=st.tuples(*(st.text("01", min_size=n, max_size=n) for n in (2, 2, 3, 2))),
    kept=st.tuples(*2 * [st.none() | st.integers(1, 4)]),
)
@torch.inference_mode()
def test_multiplications_of_a_path_are_those_that_torch_counts(size, blocks, kept):
    options = swin.Options("tiny", image_size=size, num_classes=21)
    path = Path(blocks, decoder="published", fuse=kept[0] and 16 * kept[0], width=kept[1] and 16 * kept[1])
    with torch.device("meta"):
        network = swin.Network(options, "native").eval().requires_grad_(False)
        batch = torch.empty(1, 3, *size)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        network(batch, path)
    assert 2 * layers.macs(layers.swin(options, path)) == counter.get_total_flops()


def test_the_decoders_share_is_as_counted_elsewhere(monkeypatch):
    monkeypatch.setitem(pattern.VARIANTS, "tiny", pattern.Size(96, (2, 2, 6, 2), 3))
    monkeypatch.setattr(pattern, "CHANNELS", 512)
    options = swin.Options("tiny", image_size=512)
    found = layers.swin(options, Path.full(options))
    (fused,) = (layer.macs for layer in found if layer.name == "decode_head.fpn_bottleneck.conv")
    assert round(layers.macs(found) / 1e9) in (236, 237)
    assert round(100 * fused / layers.macs(found)) == 65


@pytest.mark.parametrize("attention", ["tilewright", "dense", "native"])
def test_parameters_have_the_gradients_of_the_published_formulation(network, inputs, attention):
    exact = copy.deepcopy(network).double()
    wanted = gradients.of(exact, exact, inputs.double())
    other = draw(create(attention=attention))
    found = gradients.of(other, other, inputs)
    assert any("bias_table" in name and x.any() for name, x in found.items() if x is not None)
    gradients.agree(found, wanted)


# Compiled, checkpoints, names


@torch.no_grad()
def test_a_compiler_sees_one_graph(network, inputs):
    torch.compiler.reset()
    path = network.path("10.2.011.2 width=32")
    # Called first: a compiler does not follow how windows are made.
    expected = network(inputs, path)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs, path), expected, **EXACT)


@torch.inference_mode()
def test_an_official_checkpoint_is_read(tmp_path, network, inputs):
    more = {
        "auxiliary_head.conv_seg.weight": torch.zeros(5, 256, 1, 1),
        "backbone.layers.0.blocks.0.attn.relative_position_index": torch.zeros(49, 49).long(),
        "backbone.layers.0.blocks.1.attn_mask": torch.zeros(64, 49, 49),
    }
    torch.save({"state_dict": network.state_dict() | more, "meta": {}}, tmp_path / "x.pth")
    assert torch.equal(create(checkpoint=tmp_path / "x.pth")(inputs), network(inputs))


@torch.inference_mode()
def test_names_of_transformers_in_memory_are_read(tmp_path, network, inputs):
    renamed = {
        r"backbone\.layers": "backbone.swin.encoder.layers",
        r"backbone\.patch_embed\.proj": "backbone.swin.embeddings.patch_embeddings.projection",
        r"backbone\.patch_embed\.norm": "backbone.swin.embeddings.norm",
        r"backbone\.norm(\d)": lambda match: f"backbone.hidden_states_norms.stage{int(match[1]) + 1}",
        r"norm1": "layernorm_before",
        r"norm2": "layernorm_after",
        r"attn\.relative": "attention.relative_position_bias.relative",
        r"attn\.proj": "attention.o_proj",
        r"decode_head\.conv_seg": "decode_head.classifier",
        r"\.bn\.": ".batch_norm.",
    }
    found = {}
    for key, tensor in network.state_dict().items():
        for ours, theirs in renamed.items():
            key = re.sub(ours, theirs, key)
        if ".attn.qkv." in key:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            found |= {key.replace(".attn.qkv.", f".attention.{part}_proj."): x for part, x in parts}
        else:
            found[key] = tensor
    torch.save(found, tmp_path / "x.pth")
    assert torch.equal(create(checkpoint=tmp_path / "x.pth")(inputs), network(inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {k: x for k, x in s.items() if "layers.2" not in k}, "missing: backbone.layers.2"),
        (lambda s: s | {"decode_head.conv_seg.bias": torch.zeros(19)}, r"conv_seg.bias \[19\] for \[5\]"),
        (lambda s: s | {"backbone.stages.0.blocks.0.norm1.bias": torch.zeros(1)}, "unexpected: backbone.stages"),
    ],
)
def test_other_checkpoints_are_refused(tmp_path, network, change, message):
    torch.save(change(network.state_dict()), tmp_path / "x.pth")
    with pytest.raises(ArtifactError, match=message):
        create(checkpoint=tmp_path / "x.pth")


def test_names():
    for text in ("swin-tiny-512", "swin-base-360x480", "swin-large-640-w12", "swin-tiny-64-w5-linear"):
        family, fields = networks.parse(text)
        assert family == "swin" and swin.name(swin.Options(**fields)) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "huge"}, "variant: expected one of tiny, small, base, large, found 'huge'"),
        ({"image_size": (512, 16)}, "at least 32 pixels a side, found 512x16"),
        ({"decoder": "folded"}, "decoder: expected one of published of the head upernet, found 'folded'"),
        ({"checkpoint": "cached"}, "timm publishes no weights of swin"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        create(**options)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("2.2.3.2 scale=0.5", "this network takes no scale=0.5; its keys: fuse, width"),
        ("2.2.3.2 levels=12", "this network takes no levels=12"),
        ("2.2.3.2 decoder=folded", "this network takes no decoder=folded"),
        ("2.2.3.2 fuse=80", "fuse of at most 64 channels, found 80"),
        ("2.2.3", "expected 4 stages, of at most 2.2.3.2 blocks, found 3"),
    ],
)
def test_a_path_of_another_network_is_refused(network, inputs, path, message):
    with pytest.raises(ConfigError, match=message):
        network(inputs, path)


@pytest.mark.parametrize("attention", ["native", "dense"])
def test_one_network_takes_images_of_any_size(network, attention):
    one = create(attention=attention)
    one.load_state_dict(network.state_dict())
    for size in ((32, 57), (61, 33), (40, 100)):
        own = create(attention=attention, image_size=size)
        own.load_state_dict(network.state_dict())
        for path in ("2.2.3.2", "1.01.101.1 width=32"):
            torch.testing.assert_close(one(images(*size), path), own(images(*size), path), **EXACT)


def test_few_other_sizes_are_kept(network, monkeypatch):
    monkeypatch.setattr(swin, "OTHERS", 2)
    for side in (32, 36, 40, 44):
        network(images(side, 32, batch=1))
    attention = network.backbone.layers[0].blocks[0].attn
    # Rows and columns of tokens: the first stage's.
    assert list(attention._others) == list(attention.windows._others) == [(10, 8), (11, 8)]
    assert copy.deepcopy(network)(images(40, 32)).equal(network(images(40, 32)))


def test_images_of_another_kind_are_named(network):
    with pytest.raises(PatternError, match=r"images: expected a tensor \[B, 3, H, W\] with B at least 1, found"):
        network(images(100, 40)[:, :2])
    with pytest.raises(PatternError, match="images: expected at least 32 pixels a side, found 100x31"):
        network(images(100, 31))


def test_text_of_its_paths(network):
    path = network.path("10.2.011.2 width=32")
    assert parse(str(path), network.options) == path
