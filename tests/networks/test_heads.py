"""Heads behind the stages of a SegFormer and of a Swin: their forms agree, files tell them, and frames are labelled."""

import json
import re

import pytest
import torch
import torch.nn.functional as F

from tilewright import networks
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.masks import swin as swin_sizes
from tilewright.networks import from_checkpoint
from tilewright.paths import FrameRunner
from tilewright.paths.runner import facts
from tilewright.paths.table import Entry, Table
from tilewright_study.planning import layers

EXACT = {"atol": 1e-5, "rtol": 0}
SIZE = (40, 70)
HEADS = [("segformer", head) for head in ("segformer", "mmseg", "upernet", "linear")]
HEADS += [("swin", "upernet"), ("swin", "linear")]


@pytest.fixture(autouse=True, scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(swin_sizes.VARIANTS, "tiny", swin_sizes.Size(32, (2, 2, 3, 2), 1))
        yield


def created(family, head, **more):
    channels = {} if head in ("segformer", "linear") else {"channels": 48}
    variant = {"segformer": "b0", "swin": "tiny"}[family]
    stated = {"variant": variant, "image_size": SIZE, "num_classes": 5, "head": head} | channels | more
    made = networks.create(family, **stated)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2, generator=generator)
            elif name.startswith("decode_head") and tensor.ndim == 1 and tensor.is_floating_point():
                tensor.normal_(1, 0.3, generator=generator)
    return made


@pytest.fixture(scope="module")
def made(small):
    return {key: created(*key) for key in HEADS}


def images(batch=1):
    return torch.randn(batch, 3, *SIZE, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
@pytest.mark.parametrize(("family", "head"), [x for x in HEADS if x[1] != "upernet"])
def test_a_folded_head_is_the_published_one(made, family, head):
    network = made[family, head]
    blocks = ".".join("1" * depth for depth in network.options.depths)
    for levels in ("1234", "124", "3") if family == "segformer" else ("1234",):
        # A Swin runs all of its stages.
        path = f"{blocks} levels={levels}" if family == "segformer" else blocks
        found = {x: network(images(), f"{path} decoder={x}") for x in ("folded", "published")}
        torch.testing.assert_close(found["folded"], found["published"], **EXACT)
        assert found["folded"].std() > 0.01
    assert network.options.decoder == "folded"
    counts = [
        layers.macs(getattr(layers, family)(network.options, network.path(f"{blocks} decoder={x}"))) for x in found
    ]
    assert counts[0] < counts[1]


@torch.no_grad()
def test_heads_are_those_of_their_authors(made):
    """Written down once more, from the public code of DINOv2's evaluation and of mmsegmentation."""
    for head in ("linear", "mmseg"):
        network = made["segformer", head]
        maps = network.backbone(images(), network.path())
        own = network.decode_head
        if head == "linear":
            wide = [F.interpolate(x, maps[0].shape[2:], mode="bilinear", align_corners=False) for x in maps]
            expected = own.conv_seg(own.bn(torch.cat(wide, 1)))
        else:
            wide = [conv.bn(conv.conv(x)).relu() for conv, x in zip(own.convs, maps, strict=True)]
            wide = [F.interpolate(x, maps[0].shape[2:], mode="bilinear", align_corners=False) for x in wide]
            expected = own.conv_seg(own.fusion_conv.bn(own.fusion_conv.conv(torch.cat(wide, 1))).relu())
        torch.testing.assert_close(network(images()), expected, **EXACT)


def test_heads_are_trained(made):
    for family, head in (("segformer", "mmseg"), ("segformer", "linear"), ("swin", "linear")):
        network = created(family, head).train()
        network(images(2)).square().mean().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in network.decode_head.parameters())
    path = ".".join("1" * depth for depth in network.options.depths)
    assert created("segformer", "linear").train()(images(2), f"{path.replace('111', '11')} levels=12").requires_grad


# Files


def of_mmsegmentation(family, state):
    """The names and layouts that `tools/model_converters` of mmsegmentation give, written from there."""
    found = {}
    for key, x in state.items():
        if family == "swin":
            for ours, theirs in {
                "backbone.layers.": "backbone.stages.",
                "patch_embed.proj": "patch_embed.projection",
                ".attn.": ".attn.w_msa.",
                ".mlp.fc1.": ".ffn.layers.0.0.",
                ".mlp.fc2.": ".ffn.layers.1.",
            }.items():
                key = key.replace(ours, theirs)
            if ".downsample.reduction." in key:
                out, inside = x.shape
                x = x.reshape(out, 4, inside // 4)[:, [0, 2, 1, 3]].transpose(1, 2).reshape(out, inside)
            elif ".downsample.norm." in key:
                x = x.reshape(4, len(x) // 4)[[0, 2, 1, 3]].transpose(0, 1).reshape(len(x))
            found[key] = x
            continue
        if match := re.match(r"backbone\.(patch_embed|block|norm)(\d)\.(.*)", key):
            part, stage, rest = match[1], int(match[2]) - 1, match[3]
            place = {"patch_embed": "0", "block": "1", "norm": "2"}[part]
            rest = rest.replace("proj.", "projection.") if part == "patch_embed" else rest
            key = f"backbone.layers.{stage}.{place}.{rest.replace('attn.proj.', 'attn.attn.out_proj.')}"
            for ours, theirs in (("fc1", "0"), ("dwconv.dwconv", "1"), ("fc2", "4")):
                key = key.replace(f".mlp.{ours}.", f".ffn.layers.{theirs}.")
            if re.search(r"\.ffn\.layers\.[04]\.weight", key):
                x = x[:, :, None, None]
        found[key] = x
    for key in [key for key in found if ".attn.q." in key]:
        kind = key.rsplit(".", 1)[1]
        both = torch.cat((found.pop(key), found.pop(key.replace(".q.", ".kv."))))
        found[key.replace(f"q.{kind}", f"attn.in_proj_{kind}")] = both
    more = (
        {"decode_head.conv_seg.weight": torch.zeros(5, 128, 1, 1)} if "decode_head.linear_pred.weight" in found else {}
    )
    return {"meta": {}, "state_dict": found | more | {"auxiliary_head.conv_seg.bias": torch.zeros(5)}}


@torch.no_grad()
@pytest.mark.parametrize("form", ["official", "mmsegmentation", "safetensors"])
@pytest.mark.parametrize(("family", "head"), HEADS)
def test_a_file_says_what_it_holds(made, tmp_path, family, head, form):
    network, file = made[family, head], tmp_path / "x.pth"
    if form == "safetensors":
        from safetensors.torch import save_file

        save_file(
            {f"model.{k}": x.contiguous() for k, x in network.state_dict().items()},
            file := tmp_path / "model.safetensors",
        )
        (tmp_path / "config.json").write_text(json.dumps({"id2label": {str(at): f"name {at}" for at in range(5)}}))
    else:
        state = network.state_dict()
        torch.save(of_mmsegmentation(family, state) if form == "mmsegmentation" else state, file)
    found = from_checkpoint(tmp_path if form == "safetensors" else file, image_size=SIZE)
    assert found.options == network.options and found.weights == str(file)
    assert found.labels == (tuple(f"name {at}" for at in range(5)) if form == "safetensors" else ())
    assert torch.equal(found(images()), network(images()))


WRONG = {
    "another": (lambda s: {"conv1.weight": torch.zeros(3)}, "expected weights of segformer or swin by .*, found conv1"),
    "variant": (
        lambda s: {k: x for k, x in s.items() if "block3.1." not in k},
        r"expected widths and depths of a SegFormer \(b0 .*, found \(32, 64, 160, 256\), \(2, 2, 1, 2\)",
    ),
    "half": (
        lambda s: {k: x for k, x in s.items() if "patch_embed3.proj" not in k},
        "expected a whole segformer, found none of its 'backbone.patch_embed3.proj.weight'",
    ),
    "width": (
        lambda s: {
            "backbone.patch_embed.proj.weight": torch.zeros(100, 3, 4, 4),
            "backbone.layers.0.blocks.0.attn.relative_position_bias_table": torch.zeros(529, 4),
        },
        r"expected width, depths and heads of a Swin \(tiny .*, found \(100, \(1, 0, 0, 0\), 4\)",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_files_of_others_say_what_was_expected(made, tmp_path, kind):
    change, message = WRONG[kind]
    torch.save(change(made["segformer", "segformer"].state_dict()), tmp_path / "x.pth")
    with pytest.raises(ArtifactError, match=message) as raised:
        from_checkpoint(tmp_path / "x.pth")
    assert "\n" not in str(raised.value)


def test_a_backbone_alone_asks_for_classes(made, tmp_path):
    state = {k: x for k, x in made["segformer", "mmseg"].state_dict().items() if k.startswith("backbone.")}
    torch.save(state, tmp_path / "x.pth")
    with pytest.raises(ConfigError, match=r"num_classes: expected one, since .*x.pth holds a backbone alone"):
        from_checkpoint(tmp_path / "x.pth")
    assert from_checkpoint(tmp_path / "x.pth", num_classes=3, image_size=64).options.head == "segformer"


def test_a_head_that_is_not_the_network_s(made, tmp_path):
    torch.save(made["swin", "upernet"].state_dict(), tmp_path / "x.pth")
    with pytest.raises(ArtifactError, match="expected the head linear, found the head upernet"):
        from_checkpoint(tmp_path / "x.pth", head="linear", image_size=SIZE)


# Paths, frames


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("segformer", {"head": "upernet", "decoder": "folded"}, "expected one of published of the head upernet"),
        ("segformer", {"head": "fcn"}, "head: expected one of segformer, mmseg, upernet, linear, found 'fcn'"),
        ("swin", {"head": "mmseg"}, "head: expected one of upernet, linear, found 'mmseg'"),
    ],
)
def test_what_a_network_cannot_have_is_said(family, options, message):
    with pytest.raises(ConfigError, match=message):
        networks.create(family, variant={"segformer": "b0", "swin": "tiny"}[family], image_size=SIZE, **options)


def test_what_a_head_cannot_leave_out_is_said(made):
    for (family, head), key in {
        ("segformer", "upernet"): "levels=123",
        ("segformer", "linear"): "decoder=published fuse=16",
        ("swin", "linear"): "decoder=published width=16",
    }.items():
        network = made[family, head]
        blocks = ".".join("1" * depth for depth in network.options.depths)
        with pytest.raises(ConfigError, match=f"this network takes no {key.split()[-1]}; its keys: "):
            network.path(f"{blocks} {key}")


def test_names_tell_heads():
    for name in ("segformer-b0-64-mmseg", "segformer-b1-64x96-upernet", "swin-tiny-64-linear"):
        family, options = networks.parse(name)
        made = networks.create(family, **options, num_classes=3)
        assert facts(made)["network"] == name


@torch.no_grad()
def test_frames_are_labelled_by_every_head(made):
    frame = torch.randint(0, 256, (64, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for network in made.values():
        known = {"rung": "trained", "batch": 1, "macs": 1, "p50_us": 1.0, "frame": "64x48", **facts(network)}
        blocks = ".".join("1" + "0" * (depth - 1) for depth in network.options.depths)
        rows = [
            Entry(path=str(network.path(x)), choice=y, promise_us=y * 1e9, **known)
            for x, y in ((blocks, 0.2), (None, 0.4))
        ]
        runner = FrameRunner(network, Table(rows), (64, 48))
        for row in rows:
            labels, told = runner(frame, 1.01 * row.promise_us)
            runner.places.prepare(pictures := torch.empty(1, 3, *SIZE))
            maps = F.interpolate(network(pictures, row.path), (64, 48), mode="bilinear", align_corners=False)
            assert told.path == row.path and (labels == maps[0].argmax(0)).float().mean() > 0.999
