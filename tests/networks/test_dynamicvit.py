"""DynamicViT whole: every way of attending against the published forward pass, written out for one image."""

import argparse
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.nn.attention.flex_attention import create_block_mask

from helpers import gradients
from tilewright import networks
from tilewright.attention import backends
from tilewright.core.errors import ArtifactError, ConfigError, PatternError, Unavailable, UnknownNameError
from tilewright.masks import dynamicvit as pattern
from tilewright.networks import dynamicvit
from tilewright.packed import pack
from tilewright_study.measure import clock as clocks

create = partial(networks.create, "dynamicvit", num_classes=10)


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """The networks that are run are as published, but for their width and depth: 64 channels, four blocks."""
    for variant in ("deit-256", "lvvit-s"):
        monkeypatch.setitem(pattern.VARIANTS, variant, (64, 2, (1, 2, 3)))


def draw(network):
    """Random values for everything that a checkpoint holds."""
    torch.manual_seed(1)
    for name, tensor in network.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
        elif "norm" in name or ".bn" in name or "in_conv.0" in name:
            tensor.copy_(name.endswith("weight") + 0.2 * torch.randn(tensor.shape))
        else:
            tensor.normal_(0, tensor[0].numel() ** -0.5 if tensor.ndim in (2, 4) else 0.3)
    return network


def same_weights(network, **options):
    other = create(**options)
    other.load_state_dict(network.state_dict())
    return other


def images(size, batch=2):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(2))


def published(state, image, variant, counts):
    """Logits of one image [3, R, R] by the definition: score, sort, cut, gather."""
    lvvit, (width, heads, prune_before) = variant.startswith("lvvit"), pattern.VARIANTS[variant]
    eps, skip = (1e-5, 2) if lvvit else (1e-6, 1)

    def linear(x, key):
        return F.linear(x, state[f"{key}.weight"], state.get(f"{key}.bias"))

    def norm(x, key, eps=eps):
        return F.layer_norm(x, (width,), state[f"{key}.weight"], state[f"{key}.bias"], eps)

    x = image[None]
    for i, (stride, pad) in enumerate(((2, 3), (1, 1), (1, 1)) if lvvit else (), start=1):
        x = F.conv2d(x, state[f"patch_embed.conv{i}.weight"], stride=stride, padding=pad)
        bn = (state[f"patch_embed.bn{i}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        x = F.batch_norm(x, *bn).relu()
    kernel = state["patch_embed.proj.weight"]
    x = F.conv2d(x, kernel, state["patch_embed.proj.bias"], stride=kernel.shape[-1])[0].flatten(1).T
    x = torch.cat([state["cls_token"][0], x]) + state["pos_embed"][0]
    for i in range(4 * prune_before[0]):
        if i in prune_before:
            time = prune_before.index(i)
            key = f"score_predictor.{time}"
            h = F.gelu(linear(norm(x[1:], f"{key}.in_conv.0", 1e-5), f"{key}.in_conv.1"))
            h = torch.cat([h[:, : width // 2], h[:, width // 2 :].mean(0).expand(len(h), -1)], 1)
            h = F.gelu(linear(F.gelu(linear(h, f"{key}.out_conv.0")), f"{key}.out_conv.2"))
            best = linear(h, f"{key}.out_conv.4").log_softmax(-1)[:, 0].argsort(descending=True)[: counts[time]]
            x = torch.cat([x[:1], x[1 + best]])
        q, k, v = linear(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attn.qkv").view(len(x), 3, heads, -1).unbind(1)
        weights = (torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"blocks.{i}.attn.proj") / skip
        h = F.gelu(linear(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.fc1"))
        x = x + linear(h, f"blocks.{i}.mlp.fc2") / skip
    x = norm(x, "norm")
    return linear(x[0], "head") + (0.5 * linear(x[1:], "aux_head").max(0).values if lvvit else 0)


@pytest.mark.parametrize("attention", ["native", "tilewright", "dense"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"variant": "deit-256", "image_size": 96}, id="deit-256-96"),
        pytest.param({"variant": "deit-256", "image_size": 60, "patch": 8, "keep_ratio": 0.5}, id="left-over"),
        pytest.param({"variant": "lvvit-s", "image_size": 64}, id="lvvit-s-64"),
    ],
)
@torch.no_grad()
def test_every_attention_gives_the_published_logits(options, attention):
    network = draw(create(attention=attention, **options))
    state, batch = network.state_dict(), images(options["image_size"])
    wanted = torch.stack([published(state, image, options["variant"], network.options.kept) for image in batch])
    torch.testing.assert_close(network(batch), wanted, atol=1e-4, rtol=0)


@torch.no_grad()
def test_pruned_blocks_attend_by_the_packed_kernel(monkeypatch):
    """Each block behind a pruning, once, with the tokens that its images keep."""
    calls, attend = [], pack.Packing.attend

    def noted(packing, *qkv):
        calls.append((packing.starts.diff().tolist(), qkv[0].is_contiguous()))
        return attend(packing, *qkv)

    monkeypatch.setattr(pack.Packing, "attend", noted)
    network = draw(create(variant="deit-256", image_size=96, attention="tilewright"))
    network(images(96))
    # In place: neither queries, keys nor values are copied.
    assert calls == [([1 + kept] * 2, False) for kept in network.options.kept]


def test_packed_blocks_have_the_gradients_of_the_published_ones():
    network = draw(create(variant="deit-256", image_size=64, attention="tilewright"))
    other = same_weights(network, variant="deit-256", image_size=64, attention="native")
    gradients.agree(gradients.of(network, network, images(64)), gradients.of(other, other, images(64)), 3e-5)


def test_packed_blocks_attend_and_refuse_a_backward_where_there_is_none(monkeypatch):
    monkeypatch.delattr("tilewright.packed.cpu.executor.Executor.attend_backward")
    monkeypatch.setattr(backends, "differentiates", lambda kind: False)
    network = draw(create(variant="deit-256", image_size=64, attention="tilewright"))
    logits = network(images(64))
    torch.testing.assert_close(
        logits.detach(),
        same_weights(network, variant="deit-256", image_size=64, attention="native")(images(64)).detach(),
        atol=1e-4,
        rtol=0,
    )
    # Whatever is trained: what lies before the prunings alone, too.
    network.requires_grad_(False).patch_embed.requires_grad_(True)
    for found in (logits, network(images(64))):
        with pytest.raises(PatternError, match="no backward: train with attention='dense'"):
            found.sum().backward()


def test_lvvit_takes_an_image_one_pixel_short_of_a_further_patch():
    # The stem makes 40 of these 79 pixels: five patches by the kernel, four by the published count, which then fails.
    assert create(variant="lvvit-s", image_size=79)(images(79)).shape == (2, 10)


def test_packed_attention_is_compiled_in_one_graph():
    torch.compiler.reset()
    network = create(variant="deit-256", image_size=64, attention="tilewright")
    compiled = torch.compile(network, fullgraph=True, dynamic=False, backend="eager")
    with torch.inference_mode():
        assert torch.equal(compiled(images(64)), network(images(64)))


@torch.no_grad()
def test_flex_gives_the_same_logits_and_compiles_once():
    # What other files compiled counts towards torch's limit.
    torch.compiler.reset()
    native = draw(create(variant="deit-256", image_size=96, patch=8, attention="native"))
    batch = images(96, 4)
    flexed(native, batch[:2], keep_ratio=0.7)
    with torch.compiler.set_stance("fail_on_recompile"):
        flexed(native, batch[2:], keep_ratio=0.7)
        # All of the first 128 tokens are seen: a full block.
        flexed(native, batch[:2], keep_ratio=1.0)


def flexed(native, batch, **options):
    options = {"variant": "deit-256", "image_size": 96, "patch": 8, **options}
    wanted, found = (same_weights(native, attention=name, **options)(batch) for name in ("native", "flex"))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_the_block_mask_is_that_of_its_rule():
    torch.manual_seed(0)
    # Blocks of each kind: all seen, some, none but a token itself, and the last one cut by the edge.
    seen = torch.cat([torch.ones(2, 128), (torch.rand(2, 128) < 0.5).float(), torch.zeros(2, 256), torch.ones(2, 9)], 1)
    seen = seen.bool()
    made = dynamicvit.block_mask(seen)
    wanted = create_block_mask(lambda b, h, q, kv: seen[b, kv] | (q == kv), 2, None, *2 * (521,), device="cpu")
    assert torch.equal(made.to_dense(), wanted.to_dense())
    assert torch.equal(made.full_kv_num_blocks, wanted.full_kv_num_blocks)
    assert torch.equal(made.kv_num_blocks, wanted.kv_num_blocks)


def test_flex_needs_a_compiler(monkeypatch):
    from torch._inductor import cpp_builder, exc

    def missing():
        raise exc.InvalidCxxCompiler

    dynamicvit.compiled_flex.cache_clear()
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler"):
        create(variant="deit-256", image_size=64, attention="flex")(images(64))


def test_pruned_tokens_see_the_kept_ones_and_themselves():
    torch.manual_seed(0)
    seen = torch.tensor([[True, False, True, False], [True, True, False, False]])
    q, k, v = torch.randn(3, 2, 1, 4, 8).unbind()
    found = dynamicvit.masked(seen, torch.float32)(q, k, v)
    for image in range(2):
        for row in range(4):
            keys = [key for key in range(4) if seen[image, key] or key == row]
            weights = (k[image, 0, keys] @ q[image, 0, row] / 8**0.5).softmax(0)
            torch.testing.assert_close(found[image, 0, row], weights @ v[image, 0, keys])


@torch.no_grad()
def test_a_mask_that_is_too_large_is_made_by_rows(monkeypatch):
    network = draw(create(variant="deit-256", image_size=64, attention="dense"))
    whole = network(images(64))
    monkeypatch.setattr(dynamicvit, "MASK_BYTES", 600)
    torch.testing.assert_close(network(images(64)), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["native", "tilewright", "dense"])
@torch.no_grad()
def test_kept_patches_are_told(attention):
    network = draw(create(variant="deit-256", image_size=96, attention=attention))
    kept = network.kept(images(96))
    assert [tuple(ids.shape) for ids in kept] == [(2, 25), (2, 17), (2, 12)]
    assert all(ids.dtype == torch.int64 and (ids.diff(dim=1) > 0).all() for ids in kept)
    for image in range(2):
        first, second, third = (set(ids[image].tolist()) for ids in kept)
        assert third < second < first < set(range(36))
    native = same_weights(network, variant="deit-256", image_size=96, attention="native").kept(images(96))
    assert all(map(torch.equal, kept, native))


@pytest.mark.parametrize("attention", ["native", "tilewright", "dense"])
@torch.no_grad()
def test_a_deit_goes_on_with_the_class_token_alone(attention):
    network = draw(create(variant="deit-256", image_size=64, keep_ratio=0.05, attention=attention))
    assert [ids.shape[1] for ids in network.kept(images(64))] == [0, 0, 0]
    wanted = torch.stack([published(network.state_dict(), image, "deit-256", (0, 0, 0)) for image in images(64)])
    torch.testing.assert_close(network(images(64)), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@torch.no_grad()
def test_half_precision_changes_the_logits_by_its_rounding(dtype):
    options = {"variant": "deit-256", "image_size": 64}
    network, batch = draw(create(**options)), images(64, 64)
    logits, kept = network(batch), network.kept(batch)
    for attention in ("native", "tilewright", "dense"):
        half = same_weights(network, attention=attention, **options).to(dtype)
        found = half(batch.to(dtype))
        # A patch at the cut may go the other way; the rounding that is meant here is that of the other images.
        alike = torch.stack([(a == b).all(1) for a, b in zip(kept, half.kept(batch.to(dtype)), strict=True)]).all(0)
        assert found.dtype == torch.float32
        assert alike.sum() > 32
        # A few roundings of the largest logit add up over the layers.
        atol = 4 * torch.finfo(dtype).eps * logits.abs().max().item()
        torch.testing.assert_close(found[alike].float(), logits[alike], atol=atol, rtol=0)


@torch.no_grad()
def test_scores_are_single_precision_whatever_the_network_is():
    predictor = draw(create(variant="deit-256")).score_predictor[0]
    x, alive = torch.randn(1, 196, 64), torch.ones(1, 196, dtype=torch.bool)
    wanted = predictor(x, alive)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(predictor(x, alive), wanted)
    # In bfloat16 itself some of them tie.
    assert len(wanted.bfloat16().unique()) < 190
    assert len(predictor.bfloat16()(x.bfloat16(), alive).unique()) == 196


@torch.no_grad()
def test_attention_is_on_the_clock():
    network = create(variant="deit-256", image_size=64, attention="dense")
    with clocks.clocked() as clock:
        network(images(64))
    assert clock.seconds > 0


@pytest.mark.parametrize(
    ("variant", "parameters"),
    [
        ("deit-256", 10_304_942),
        ("deit-s", 22_774_414),
        ("deit-b", 89_452_846),
        ("lvvit-s", 26_875_574),
        ("lvvit-m", 57_115_030),
    ],
)
def test_parameters_are_counted_as_the_official_code_counts_them(monkeypatch, variant, parameters):
    monkeypatch.undo()
    with torch.device("meta"):
        network = dynamicvit.Network(dynamicvit.Options(variant), "native")
    assert sum(p.numel() for p in network.parameters()) == parameters


@pytest.mark.parametrize("variant", ["deit-256", "lvvit-s"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@torch.no_grad()
def test_an_official_checkpoint_loads_as_published(tmp_path, variant, suffix):
    source, path = draw(create(variant=variant, image_size=64)), tmp_path / f"net.{suffix}"
    state = source.state_dict()
    assert {f"score_predictor.{i}.{part}.bias" for i in range(3) for part in ("in_conv.1", "out_conv.4")} < set(state)
    if suffix == "pth":
        torch.save({"model": state, "epoch": 29, "args": argparse.Namespace(arch=variant)}, path)
    else:
        save_file(state, path)
    loaded = create(variant=variant, image_size=64, checkpoint=path)
    assert torch.equal(loaded(images(64)), source(images(64)))


@torch.no_grad()
def test_a_position_table_of_another_size_is_resized(tmp_path):
    source = draw(create(variant="deit-256", image_size=64))
    torch.save({"model": source.state_dict()}, tmp_path / "net.pth")
    loaded = create(variant="deit-256", image_size=96, checkpoint=tmp_path / "net.pth").pos_embed
    assert torch.equal(loaded[:, 0], source.pos_embed[:, 0])
    # Bilinear with centres aligned: places 0 and 1 of six lie at -1/6 (clamped to 0) and 1/2 of four.
    grid, old = loaded[0, 1:].view(6, 6, -1), source.pos_embed[0, 1:].view(4, 4, -1)
    torch.testing.assert_close(grid[0, 0], old[0, 0])
    torch.testing.assert_close(grid[1, 1], (old[0, 0] + old[0, 1] + old[1, 0] + old[1, 1]) / 4)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        pytest.param(torch.zeros(1, 18, 64), r"1 mis-shaped: pos_embed \[1, 18, 64\] for \[1, 17, 64\]", id="grid"),
        pytest.param(torch.zeros(1, 26, 384), r"1 mis-shaped: pos_embed \[1, 17, 384\] for", id="width"),
        pytest.param(torch.zeros(256), r"1 mis-shaped: pos_embed \[256\] for", id="flat"),
        pytest.param(torch.zeros(1, 0, 64), r"1 mis-shaped: pos_embed \[1, 0, 64\] for", id="empty"),
        pytest.param(None, "1 missing: pos_embed$", id="none"),
    ],
)
def test_a_position_table_that_does_not_fit_is_named(tmp_path, table, message):
    state = create(variant="deit-256", image_size=64).state_dict()
    state.pop("pos_embed")
    torch.save(state if table is None else {**state, "pos_embed": table}, tmp_path / "net.pth")
    with pytest.raises(ArtifactError, match=message):
        create(variant="deit-256", image_size=64, checkpoint=tmp_path / "net.pth")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        pytest.param(
            {"variant": "deit-xl"},
            ConfigError,
            "dynamicvit: variant: expected one of .*, found 'deit-xl'",
            id="variant",
        ),
        pytest.param({"patch": 100}, ConfigError, "patch: expected at most the image size 64, found 100", id="patch"),
        pytest.param({"variant": "lvvit-s", "patch": 8}, ConfigError, "expected 16 for lvvit-s, found 8", id="stem"),
        pytest.param({"keep_ratio": 0}, ConfigError, "keep_ratio", id="ratio"),
        pytest.param(
            {"variant": "lvvit-s", "keep_ratio": 0.3},
            ConfigError,
            r"needs one to classify; found 0.3, which leaves \[4, 1, 0\] of 16",
            id="nothing-kept",
        ),
        pytest.param({"attention": "sparse"}, UnknownNameError, "unknown attention 'sparse'", id="attention"),
    ],
)
def test_options_out_of_range_are_named(options, error, message):
    with pytest.raises(error, match=message):
        create(**{"variant": "deit-256", "image_size": 64, **options})


@pytest.mark.parametrize(
    "batch",
    [torch.zeros(1, 3, 64, 65), torch.zeros(0, 3, 64, 64), torch.zeros(1, 4, 64, 64), torch.zeros(1, 3, 64, 64).int()],
    ids=["size", "none", "channels", "integers"],
)
def test_images_of_another_kind_are_named(batch):
    with pytest.raises(PatternError, match="images: expected"):
        create(variant="deit-256", image_size=64)(batch)


def test_names_are_those_of_the_graphs():
    assert dynamicvit.name(dynamicvit.Options("deit-s")) == "dynamicvit-s-224"
    assert dynamicvit.name(dynamicvit.Options("lvvit-m", 384)) == "dynamicvit-lvvit-m-384"
    assert dynamicvit.name(dynamicvit.Options("deit-256", 512, 32)) == "dynamicvit-256-512-p32"


@pytest.mark.parametrize("variant", ["deit-256", "lvvit-s"])
@torch.no_grad()
def test_images_that_are_no_squares(variant):
    network = draw(create(variant=variant, image_size=(64, 112), attention="native"))
    batch = torch.randn(2, 3, 64, 112)
    assert [each.shape[1] for each in network.kept(batch)] == [int(28 * 0.7**time) for time in (1, 2, 3)]
    for attention in ("dense", "tilewright"):
        other = same_weights(network, variant=variant, image_size=(64, 112), attention=attention)
        torch.testing.assert_close(other(batch), network(batch), rtol=1e-4, atol=1e-4)
