"""DeiT and its pruners: every batching against the published forward pass, written out for one image."""

import argparse
import logging
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tilewright import networks
from tilewright.core.errors import ArtifactError, ConfigError, PatternError, UnknownNameError
from tilewright.masks import deit as pattern
from tilewright.networks import deit
from tilewright.packed.pruners.threshold_l2 import SEED
from tilewright_study.measure import clock as clocks

create = partial(networks.create, "deit", variant="tiny", image_size=96, num_classes=10)
BATCHINGS = ("padded", "padded_kept", "gathered", "ragged")


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """The networks that are run are as published, but for their width."""
    for variant in ("tiny", "tiny-distilled"):
        monkeypatch.setitem(pattern.VARIANTS, variant, (64, 2))


def draw(network):
    """Random values for everything that a checkpoint holds; queries and keys large, so that attention is not even."""
    torch.manual_seed(1)
    for name, tensor in network.state_dict().items():
        if "norm" in name or "in_conv.0" in name:
            tensor.copy_(name.endswith("weight") + 0.2 * torch.randn(tensor.shape))
        else:
            tensor.normal_(0, tensor[0].numel() ** -0.5 if tensor.ndim in (2, 4) else 0.3)
        if name.endswith("qkv.weight"):
            tensor[:128] *= 2
    return network


def images(size=96, batch=3):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(2))


def same_weights(network, **options):
    other = create(**options)
    other.load_state_dict(network.state_dict())
    return other


def published(state, image, prune, n_heads=2):
    """Logits [num_classes] of one image and its tokens after each pruning, by the definitions.

    prune: ``(block, place, x, attention [H, N, N], v [N, H, D]) -> x``, called before each block and inside it.
    """

    def linear(x, key):
        return F.linear(x, state[f"{key}.weight"], state[f"{key}.bias"])

    def norm(x, key):
        return F.layer_norm(x, x.shape[-1:], state[f"{key}.weight"], state[f"{key}.bias"], 1e-6)

    x = F.conv2d(image[None], state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=16)
    x = torch.cat([state["cls_token"][0], x[0].flatten(1).T]) + state["pos_embed"][0]
    counts = []

    def pruned(*arguments):
        after = prune(*arguments)
        if after is not arguments[2]:
            counts.append(len(after))
        return after

    for i in range(12):
        x = pruned(i, "before", x, None, None)
        q, k, v = linear(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attn.qkv").view(len(x), 3, n_heads, -1).unbind(1)
        attention = (torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + linear(torch.einsum("hqk,khd->qhd", attention, v).flatten(1), f"blocks.{i}.attn.proj")
        x = pruned(i, "inside", x, attention, v)
        x = x + linear(F.gelu(linear(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.fc1")), f"blocks.{i}.mlp.fc2")
    return linear(norm(x, "norm")[0], "head"), counts


def unpruned(block, place, x, attention, v):
    return x


def threshold_l2(count):
    def prune(block, place, x, attention, v):
        if (block, place) != (4, "before"):
            return x
        kept = set(x.norm(dim=1).topk(count(x)).indices.tolist()) | {0}
        return x[sorted(kept)]

    return prune


def dynamicvit(state, ratio, n_patches=36):
    def prune(block, place, x, attention, v):
        if place != "before" or block not in (3, 6, 9):
            return x
        time = block // 3
        part = {key: t for key, t in state.items() if key.startswith(f"pruner.score_predictor.{time - 1}.")}
        w = {key.split(".", 3)[3]: t for key, t in part.items()}
        h = F.layer_norm(x[1:], x.shape[-1:], w["in_conv.0.weight"], w["in_conv.0.bias"])
        h = F.gelu(F.linear(h, w["in_conv.1.weight"], w["in_conv.1.bias"]))
        h = torch.cat([h[:, : x.shape[1] // 2], h[:, x.shape[1] // 2 :].mean(0).expand(len(h), -1)], 1)
        for layer in (0, 2, 4):
            h = F.linear(h, w[f"out_conv.{layer}.weight"], w[f"out_conv.{layer}.bias"])
            h = F.gelu(h) if layer < 4 else h.log_softmax(-1)
        best = h[:, 0].argsort(descending=True)[: int(n_patches * ratio**time)]
        return torch.cat([x[:1], x[1 + best]])

    return prune


def evit(rate):
    def prune(block, place, x, attention, v):
        left = math.ceil(rate * (len(x) - 1))
        if place != "inside" or block not in (3, 6, 9) or left == len(x) - 1:
            return x
        score = attention[:, 0, 1:].mean(0)
        best = score.topk(left).indices
        rest = torch.tensor(sorted(set(range(len(score))) - set(best.tolist())))
        fused = sum(score[j] * x[1 + j] for j in rest)
        return torch.cat([x[:1], x[1 + best], fused[None]])

    return prune


def ats(n_ref):
    def prune(block, place, x, attention, v):
        if place != "inside" or block < 3 or len(x) <= 2:
            return x
        score = attention[:, 0].sum(0) * v.flatten(1).norm(dim=1)
        score, order = (score[1:] / score[1:].sum()).double().sort()
        cdf = score.cumsum(0)
        cdf = (cdf - cdf[0]) / (cdf[-1] - cdf[0])
        start = cdf[cdf > 0].min()
        steps = torch.arange(n_ref - 1) / (n_ref - 2)
        hit = {int((y - cdf).abs().argmin()) for y in start + steps - start * steps}
        return torch.cat([x[:1], x[1 + order[sorted(hit)]]])

    return prune


CASES = {
    "none": ({}, lambda state, b: unpruned),
    "threshold": ({"pruner": "threshold_l2"}, lambda state, b: threshold_l2(lambda x: 18)),
    "all-kept": ({"pruner": "threshold_l2", "keep_ratio": 1.0}, lambda state, b: threshold_l2(lambda x: 37)),
    "one-kept": ({"pruner": "threshold_l2", "keep_ratio": 0.01}, lambda state, b: threshold_l2(lambda x: 1)),
    "drawn": (
        {"pruner": "threshold_l2", "keep_range": (0.3, 0.7)},
        lambda state, b: threshold_l2(
            lambda x: int(37 * (0.3 + 0.4 * torch.rand(3, generator=torch.Generator().manual_seed(SEED))[b].item()))
        ),
    ),
    "by-norm": (
        {"pruner": "threshold_l2", "threshold": 1.1},
        lambda state, b: threshold_l2(lambda x: int((x.norm(dim=1) >= 1.1 * x.norm(dim=1).mean()).sum())),
    ),
    "dynamicvit": (
        {"pruner": "dynamicvit", "predictor": "random", "keep_ratio": 0.6}, lambda state, b: dynamicvit(state, 0.6)
    ),
    "dynamicvit-class-alone": (
        {"pruner": "dynamicvit", "predictor": "random", "keep_ratio": 0.02}, lambda state, b: dynamicvit(state, 0.02)
    ),
    "evit": ({"pruner": "evit", "keep_ratio": 0.7}, lambda state, b: evit(0.7)),
    "evit-keeps-all": ({"pruner": "evit", "keep_ratio": 1.0}, lambda state, b: evit(1.0)),
    "ats": ({"pruner": "ats"}, lambda state, b: ats(37)),
    "ats-coarse": ({"pruner": "ats", "keep_ratio": 0.4}, lambda state, b: ats(15)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_batching_gives_the_published_logits(case):
    options, rule = CASES[case]
    network = draw(create(**options))
    state, batch = network.state_dict(), images()
    wanted, counts = zip(*(published(state, image, rule(state, b)) for b, image in enumerate(batch)), strict=True)
    equal = len(set(map(tuple, counts))) == 1
    for batching in BATCHINGS if equal else (name for name in BATCHINGS if name != "gathered"):
        found, layouts = same_weights(network, batching=batching, **options)(batch, None, True)
        torch.testing.assert_close(
            found, torch.stack(wanted), atol=1e-4, rtol=0, msg=partial("{}: {}".format, batching)
        )
        told = [layout.valid.sum(1) for layout in layouts]
        for image, expected in enumerate(counts):
            assert changes([37, *(int(kept[image]) for kept in told)]) == changes([37, *expected]), batching


def changes(counts):
    """Counts without those that repeat the one before."""
    return [now for before, now in zip([None, *counts], counts, strict=False) if now != before]


@torch.no_grad()
def test_a_batch_does_not_change_what_an_image_keeps():
    network = draw(create(pruner="ats", batching="padded"))
    batch = images()
    alone = torch.cat([network(image[None]) for image in batch])
    torch.testing.assert_close(network(batch), alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_attention_is_on_the_clock():
    with clocks.clocked() as clock:
        create()(images())
    assert clock.seconds > 0


@pytest.mark.parametrize(
    ("variant", "size", "parameters"),
    [("tiny", 224, 5_717_416), ("small", 224, 22_050_664), ("base", 224, 86_567_656), ("base", 384, 86_859_496),
     ("small-distilled", 224, 22_436_432)],
)  # fmt: skip
def test_parameters_are_counted_as_published(monkeypatch, variant, size, parameters):
    monkeypatch.undo()
    with torch.device("meta"):
        network = deit.Network(deit.Options(variant, size), "ragged")
    assert sum(p.numel() for p in network.parameters()) == parameters


@pytest.mark.parametrize("pruner", ["none", "evit", "ats", "dynamicvit"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@torch.no_grad()
def test_an_official_checkpoint_loads_as_published(tmp_path, pruner, suffix):
    random = {"predictor": "random"} if pruner == "dynamicvit" else {}
    source, path = draw(create(pruner=pruner, **random)), tmp_path / f"net.{suffix}"
    state = {name.removeprefix("pruner."): tensor for name, tensor in source.state_dict().items()}
    if pruner == "ats":
        state["blocks.3.attn.out_zero_mask"] = torch.zeros(1, 64)
    if suffix == "pth":
        torch.save({"model": state, "args": argparse.Namespace(arch="deit")}, path)
    else:
        save_file(state, path)
    loaded = create(pruner=pruner, checkpoint=path)
    assert loaded.weights == str(path)
    assert torch.equal(loaded(images()), source(images()))


# Names of transformers: as it saves them, and as a model of version 5 has them.
SAVED = {
    "blocks.": "deit.encoder.layer.",
    **{f".attn.{part[0]}.": f".attention.attention.{part}." for part in ("query", "key", "value")},
    **{".attn.proj.": ".attention.output.dense.", ".mlp.fc1.": ".intermediate.dense.", ".mlp.fc2.": ".output.dense."},
}
HELD = {
    "blocks.": "deit.layers.",
    **{f".attn.{part}.": f".attention.{part}_proj." for part in "qkv"},
    **{".attn.proj.": ".attention.o_proj."},
}
BOTH = {
    **{"patch_embed.proj.": "deit.embeddings.patch_embeddings.projection.", "cls_token": "deit.embeddings.cls_token"},
    **{"pos_embed": "deit.embeddings.position_embeddings", "dist_token": "deit.embeddings.distillation_token"},
    **{".norm1.": ".layernorm_before.", ".norm2.": ".layernorm_after.", "head_dist.": "distillation_classifier."},
}


@pytest.mark.parametrize("names", [SAVED, HELD], ids=["saved", "held"])
@pytest.mark.parametrize("variant", ["tiny", "tiny-distilled"])
@torch.no_grad()
def test_checkpoints_of_transformers_load(tmp_path, variant, names):
    source, state = draw(create(variant=variant)), {}
    last = {"norm.": "deit.layernorm.", "head.": "cls_classifier." if "dist" in variant else "classifier."}
    for name, tensor in source.state_dict().items():
        split = zip("qkv", tensor.chunk(3), strict=True) if ".qkv." in name else [("", tensor)]
        for part, each in split:
            own = name.replace(".qkv.", f".{part}.")
            for ours, theirs in (names | BOTH).items():
                own = own.replace(ours, theirs)
            for ours, theirs in last.items():
                own = theirs + own.removeprefix(ours) if own.startswith(ours) else own
            state[own] = each.clone()
    torch.save(state, tmp_path / "net.pth")
    assert torch.equal(create(variant=variant, checkpoint=tmp_path / "net.pth")(images()), source(images()))
    torch.save({"state_dict": {f"model.{name}": x for name, x in state.items()}}, tmp_path / "net.pth")
    assert torch.equal(create(variant=variant, checkpoint=tmp_path / "net.pth")(images()), source(images()))


@pytest.mark.parametrize("options", [{}, {"pruner": "evit", "batching": "gathered"}], ids=["plain", "pruned"])
@torch.no_grad()
def test_traced_networks_compute_the_same(options):
    network = draw(create(**options))
    traced = torch.jit.trace(network, (images(),))
    assert torch.equal(traced(images().flip(0)), network(images().flip(0)))
    # The exporter of traces to ONNX knows no `mT`.
    assert "aten::mT" not in str(traced.inlined_graph)


@torch.no_grad()
def test_a_random_predictor_can_be_put_on_a_plain_deit(tmp_path):
    source = draw(create())
    torch.save({"model": source.state_dict()}, tmp_path / "net.pth")
    loaded = create(pruner="dynamicvit", predictor="random", checkpoint=tmp_path / "net.pth", keep_ratio=1.0)
    torch.testing.assert_close(loaded(images()), source(images()), atol=1e-5, rtol=0)
    with pytest.raises(ArtifactError, match=r"30 missing: pruner\.score_predictor\.0\.in_conv\.0\.weight"):
        create(pruner="dynamicvit", checkpoint=tmp_path / "net.pth")


@pytest.mark.parametrize(("pruner", "mode"), [("none", "bicubic"), ("dynamicvit", "bilinear")])
@torch.no_grad()
def test_a_position_table_of_another_size_is_resized_as_published(tmp_path, pruner, mode):
    options = {"pruner": pruner} | ({"predictor": "random"} if pruner == "dynamicvit" else {})
    source = draw(create(**options))
    torch.save({"model": source.state_dict()}, tmp_path / "net.pth")
    table = create(image_size=160, checkpoint=tmp_path / "net.pth", **options).pos_embed
    assert torch.equal(table[:, 0], source.pos_embed[:, 0])
    for channel in (0, 63):
        old = source.pos_embed[0, 1:, channel].view(1, 1, 6, 6)
        new = F.interpolate(old, size=(10, 10), mode=mode, align_corners=False)
        torch.testing.assert_close(table[0, 1:, channel], new.flatten())


@torch.no_grad()
def test_a_distilled_network_answers_with_the_mean_of_its_heads():
    network = draw(create(variant="tiny-distilled"))
    whole = network(images())
    heads = []
    for name in ("head", "head_dist"):
        other = same_weights(network, variant="tiny-distilled")
        for bias in (other.head.bias, other.head_dist.bias):
            bias += 100 * (bias is getattr(other, name).bias)
        heads.append(other(images()) - whole)
    torch.testing.assert_close(heads[0], torch.full_like(whole, 50), atol=1e-3, rtol=0)
    torch.testing.assert_close(heads[1], torch.full_like(whole, 50), atol=1e-3, rtol=0)
    assert not torch.equal(network.head.weight, network.head_dist.weight)


@pytest.mark.parametrize("folder", ["hub", "tagged", "torch"])
def test_weights_that_timm_has_downloaded_are_found(tmp_path, monkeypatch, caplog, folder):
    for name in ("HF_HOME", "HF_HUB_CACHE", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with caplog.at_level(logging.WARNING):
        assert create(checkpoint="cached").weights is None
    assert "no weights of deit_tiny_patch16_224 in" in caplog.text and "they are random" in caplog.text
    repository = "huggingface/hub/models--timm--deit_tiny_patch16_224"
    path = (
        tmp_path
        / ".cache"
        / {
            "hub": f"{repository}/snapshots/0a/model.safetensors",
            "tagged": f"{repository}.fb_in1k/snapshots/0a/model.safetensors",
            "torch": "torch/hub/checkpoints/deit_tiny_patch16_224-a1311bcf.pth",
        }[folder]
    )
    path.parent.mkdir(parents=True)
    source = draw(create())
    (torch.save if folder == "torch" else save_file)(source.state_dict(), path)
    found = create(checkpoint="cached")
    assert found.weights == str(path)
    assert torch.equal(found.head.weight, source.head.weight)


def test_other_families_have_no_cached_weights():
    with pytest.raises(ConfigError, match="expected a file, found 'cached': timm publishes no weights of regionvit"):
        networks.create("regionvit", variant="tiny", checkpoint="cached")


def test_names():
    assert deit.name(deit.Options("small")) == "deit-small-224"
    assert deit.name(deit.Options("base", 384, "evit")) == "deit-base-384-evit"
    assert deit.timm_name(deit.Options("base", 384)) == "deit_base_patch16_384"
    assert deit.timm_name(deit.Options("small", 384)) == "deit_small_patch16_224"
    assert deit.timm_name(deit.Options("tiny-distilled")) == "deit_tiny_distilled_patch16_224"
    assert networks.parse("deit-small-224-threshold_l2") == (
        "deit", {"variant": "small", "image_size": 224, "pruner": "threshold_l2"}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        pytest.param({"variant": "huge"}, ConfigError, "variant: expected one of tiny, .*, found 'huge'", id="variant"),
        pytest.param({"image_size": 15}, ConfigError, "expected at least a patch of 16, found 15", id="size"),
        pytest.param({"num_classes": 0}, ConfigError, "num_classes: expected at least 1, found 0", id="classes"),
        pytest.param({"mlp": 4}, ConfigError, "unknown field `mlp`; options: variant, image_size", id="unknown"),
        pytest.param({"pruner": "topk"}, UnknownNameError, "unknown pruner 'topk'; known: none, thresh", id="pruner"),
        pytest.param({"batching": "flex"}, UnknownNameError, "unknown batching 'flex'; known: padded", id="batching"),
        pytest.param({"attention": "flex"}, ConfigError, "attention: deit takes batching instead", id="att"),
        pytest.param({"keep_ratio": 0.5}, ConfigError, "`keep_ratio`; .*settings of pruner none: none", id="none"),
        pytest.param(
            {"variant": "tiny-distilled", "pruner": "evit"}, ConfigError, "expected a network of one", id="distilled"
        ),
        pytest.param(
            {"pruner": "dynamicvit"}, ConfigError, "with the weights of pruner dynamicvit, found none", id="weights"
        ),
    ],
)  # fmt: skip
def test_options_out_of_range_are_named(options, error, message):
    with pytest.raises(error, match=message):
        create(**options)


@pytest.mark.parametrize("pruner", ["threshold_l2", "dynamicvit", "evit", "ats"])
@pytest.mark.parametrize("ratio", [0, -0.5, 1.01, float("nan")])
def test_a_keep_ratio_outside_its_range_is_named(pruner, ratio):
    with pytest.raises(ConfigError, match=f"pruner {pruner}: .*keep_ratio"):
        create(pruner=pruner, keep_ratio=ratio)


@pytest.mark.parametrize("batch", [torch.zeros(1, 3, 96, 97), torch.zeros(1, 3, 96, 96).int()], ids=["size", "type"])
def test_images_of_another_kind_are_named(batch):
    with pytest.raises(PatternError, match="images: expected"):
        create()(batch)


@pytest.mark.parametrize("size", [(64, 96), (48, 160)], ids=str)
@pytest.mark.parametrize("pruner", ["none", "evit", "ats"])
@torch.no_grad()
def test_images_that_are_no_squares(size, pruner):
    network = draw(create(image_size=size, pruner=pruner))
    assert networks.deit.name(network.options).startswith(f"deit-tiny-{size[0]}x{size[1]}")
    batch = torch.randn(2, 3, *size)
    found = network(batch)
    assert not found.isnan().any()
    torch.testing.assert_close(network.with_batching("padded")(batch), found, rtol=1e-4, atol=1e-4)
    with pytest.raises(PatternError, match=rf"\[B, 3, {size[0]}, {size[1]}\]"):
        network(batch.mT)


@torch.no_grad()
def test_a_square_table_is_resized_to_a_grid_that_is_none(tmp_path):
    source = draw(create())
    torch.save({"model": source.state_dict()}, tmp_path / "net.pth")
    old = source.pos_embed[:, 1:].unflatten(1, (6, 6)).movedim(-1, 1)
    # The second has as many patches as the square.
    for grid in (5, 8), (4, 9):
        loaded = create(image_size=(16 * grid[0], 16 * grid[1]), checkpoint=tmp_path / "net.pth")
        new = F.interpolate(old, size=grid, mode="bicubic", align_corners=False).flatten(2).mT
        torch.testing.assert_close(loaded.pos_embed[:, 1:], new)


@pytest.mark.parametrize("variant", ["tiny", "tiny-distilled"])
@torch.no_grad()
def test_a_batch_of_several_sizes_is_each_image_by_itself(tmp_path, variant):
    network = draw(create(variant=variant))
    torch.save({"model": network.state_dict()}, tmp_path / "net.pth")
    batch = [torch.randn(3, *size) for size in ((96, 96), (64, 112), (160, 48), (96, 96))]
    found = network.mixed(batch)
    for logits, each in zip(found, batch, strict=True):
        alone = create(variant=variant, image_size=tuple(each.shape[1:]), checkpoint=tmp_path / "net.pth")
        torch.testing.assert_close(logits[None], alone(each[None]), rtol=1e-4, atol=1e-4)
    for wrong, line in (
        ([], "expected at least one"),
        ([torch.zeros(3, 15, 96)], r"at least 16 pixels a side, found \[3, 15, 96\] at 0"),
        ([batch[0], batch[1].half()], "found torch.float16 on cpu at 1"),
    ):
        with pytest.raises(PatternError, match=line):
            network.mixed(wrong)
    with pytest.raises(PatternError, match="without a pruner, found evit"):
        create(pruner="evit").mixed(batch)
