"""SegFormer against its forward pass written out, its decoders against each other, its paths against what they skip."""

import copy
import logging
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers.cases import rest_slow
from tilewright import networks
from tilewright.core.errors import ArtifactError, ConfigError, PatternError, Unavailable
from tilewright.masks import segformer as pattern
from tilewright.networks import segformer
from tilewright.networks.path import DECODERS, Path, parse
from tilewright_study.planning import layers

create = partial(networks.create, "segformer", variant="b0", image_size=(40, 60), num_classes=5)
# Logits of the networks drawn here are of about 1, and float32 rounds them some dozen times.
EXACT = {"atol": 1e-5, "rtol": 0}
# Blocks without the rest of a stage in the text of a path.
FULL = "2.2.2.2"


def draw(network, seed=0):
    """Random values for everything that a checkpoint holds, so that all of it shows in logits of about 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in network.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("running_var"):
            tensor.copy_(noise.abs() + 0.5)
        elif "norm" in name or ".bn." in name:
            tensor.copy_(name.endswith("weight") + 0.2 * noise)
        else:
            tensor.copy_(noise * (tensor[0].numel() ** -0.5 if tensor.ndim > 1 else 0.2))
    return network


def images(*size, batch=2):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def network():
    return draw(create())


@pytest.fixture(scope="module")
def inputs():
    return images(40, 60)


def published(state, image, size):
    """Logits by the definitions, from the tensors of a checkpoint."""

    def of(key):
        return state[f"{key}.weight"], state[f"{key}.bias"]

    def norm(x, key, eps=1e-6):
        return F.layer_norm(x.movedim(1, -1), x.shape[1:2], *of(key), eps).movedim(-1, 1)

    def linear(x, key):
        return F.linear(x.movedim(1, -1), *of(key)).movedim(-1, 1)

    x, levels = image, []
    for stage in range(4):
        key = f"backbone.patch_embed{stage + 1}"
        x = F.conv2d(x, *of(f"{key}.proj"), stride=(4, 2, 2, 2)[stage], padding=(3, 1, 1, 1)[stage])
        x = norm(x, f"{key}.norm", 1e-5)
        for block in range(size.depths[stage]):
            key = f"backbone.block{stage + 1}.{block}"
            y = norm(x, f"{key}.norm1")
            heads, q = (1, 2, 5, 8)[stage], linear(y, f"{key}.attn.q")
            if stage < 3:
                y = F.conv2d(y, *of(f"{key}.attn.sr"), stride=(8, 4, 2)[stage])
                y = norm(y, f"{key}.attn.norm", 1e-5)
            k, v = linear(y, f"{key}.attn.kv").chunk(2, 1)
            q, k, v = (t.flatten(2).unflatten(1, (heads, -1)) for t in (q, k, v))
            weights = (q.mT @ k / q.shape[2] ** 0.5).softmax(-1)
            x = x + linear((weights @ v.mT).mT.flatten(1, 2).view(x.shape), f"{key}.attn.proj")
            y = linear(norm(x, f"{key}.norm2"), f"{key}.mlp.fc1")
            y = F.gelu(F.conv2d(y, *of(f"{key}.mlp.dwconv.dwconv"), padding=1, groups=y.shape[1]))
            x = x + linear(y, f"{key}.mlp.fc2")
        x = norm(x, f"backbone.norm{stage + 1}")
        levels.append(x)
    maps = [linear(x, f"decode_head.linear_c{level}.proj") for level, x in enumerate(levels, 1)]
    maps = [F.interpolate(x, size=levels[0].shape[2:], mode="bilinear", align_corners=False) for x in maps]
    x = F.conv2d(torch.cat(maps[::-1], 1), state["decode_head.linear_fuse.conv.weight"])
    bn = (state[f"decode_head.linear_fuse.bn.{key}"] for key in ("running_mean", "running_var", "weight", "bias"))
    return F.conv2d(F.batch_norm(x, *bn).relu(), *of("decode_head.linear_pred"))


@torch.inference_mode()
@pytest.mark.parametrize("size", [(32, 32), (40, 60), (33, 47), (97, 64)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_network_is_its_definition(size, decoder):
    network = draw(create(image_size=size, decoder=decoder))
    expected = published(network.state_dict(), images(*size), pattern.VARIANTS["b0"])
    found = network(images(*size))
    assert found.shape == (2, 5, -(-size[0] // 4), -(-size[1] // 4))
    assert 0.3 < expected.std() < 3
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize(
    ("variant", "millions"), [("b0", 3.75), ("b1", 13.72), ("b2", 27.46), ("b3", 47.34), ("b4", 64.11), ("b5", 84.71)]
)
def test_parameters_are_as_many_as_published(variant, millions):
    with torch.device("meta"):
        network = segformer.Network(segformer.Options(variant), "dense")
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 2) == millions


def test_norms_are_those_that_the_weights_were_trained_with(network):
    norms = {name: module.eps for name, module in network.named_modules() if isinstance(module, torch.nn.LayerNorm)}
    torchs = {name for name, eps in norms.items() if eps == 1e-5}
    assert torchs == {name for name in norms if "patch_embed" in name or name.endswith("attn.norm")}
    assert {norms[name] for name in norms.keys() - torchs} == {1e-6} and len(torchs) == 4 + 6


# The folded decoder


@st.composite
def texts(draw):
    """Texts of paths of B0, without a decoder."""
    blocks = ".".join(draw(st.text("01", min_size=2, max_size=2)) for _ in range(4))
    levels = "".join(sorted(draw(st.sets(st.sampled_from("1234"), min_size=1))))
    return f"{blocks} levels={levels} scale={draw(st.sampled_from([1, 0.9, 0.75, 0.5]))}"


@settings(max_examples=25, deadline=None)
@given(text=texts(), size=st.tuples(*2 * [st.integers(64, 101)]), seed=st.integers(0, 99))
@torch.inference_mode()
def test_the_folded_decoder_is_the_published_one(text, size, seed):
    network = draw(create(image_size=size), seed)
    folded, published = (network(images(*size), f"{text} decoder={decoder}") for decoder in DECODERS)
    assert folded.shape == published.shape == (2, 5, -(-size[0] // 4), -(-size[1] // 4))
    torch.testing.assert_close(folded, published, **EXACT)


@torch.inference_mode()
@pytest.mark.parametrize("variant", pattern.VARIANTS)
def test_every_variant_folds(variant, monkeypatch):
    # As published but for the depths.
    monkeypatch.setitem(pattern.VARIANTS, variant, pattern.VARIANTS[variant]._replace(depths=(1, 1, 1, 1)))
    network = draw(create(variant=variant, image_size=(64, 96), num_classes=150))
    x = images(64, 96, batch=1)
    folded, published = network(x), network(x, "1.1.1.1 decoder=published")
    torch.testing.assert_close(folded, published, **EXACT)
    assert torch.equal(folded.argmax(1), published.argmax(1))


@torch.no_grad()
def test_weights_that_are_written_to_are_folded_anew(network, inputs):
    network = copy.deepcopy(network)
    network(inputs)
    written = [
        lambda: network.decode_head.linear_c3.proj.weight.mul_(2),
        lambda: network.decode_head.linear_c2.proj.weight.data.mul_(0.5).add_(0.1),
        lambda: network.decode_head.linear_fuse["bn"].running_mean.add_(1),
        lambda: network.load_state_dict(draw(create(), 5).state_dict()),
    ]
    before = network(inputs)
    for write in written:
        write()
        after = network(inputs)
        assert (after - before).abs().max() > 1e-2
        torch.testing.assert_close(after, network(inputs, f"{FULL} decoder=published"), **EXACT)
        before = after


@torch.inference_mode()
def test_what_was_folded_is_kept(network, inputs):
    network(inputs)
    made, count = network.decode_head.fold, []
    network.decode_head.fold = lambda levels: count.append(levels) or made(levels)
    network(inputs)
    network(inputs, f"{FULL} levels=12")
    network(inputs, f"{FULL} levels=12")
    del network.decode_head.fold
    assert count == ["12"]


@torch.inference_mode()
def test_a_decoder_that_the_caller_keeps_is_taken(network, inputs):
    path = f"{FULL} levels=124"
    folded = network.fold(path)
    assert torch.equal(network(inputs, path, folded=folded), network(inputs, path))
    other = folded._replace(bias=folded.bias + 1)
    assert not torch.equal(network(inputs, path, folded=other), network(inputs, path))


def test_both_decoders_are_trained_alike(network, inputs):
    grads = []
    for decoder in DECODERS:
        trained = copy.deepcopy(network).train()
        torch.manual_seed(0)
        maps = trained(inputs, f"{FULL} decoder={decoder}")
        maps.square().mean().backward()
        bn = trained.decode_head.linear_fuse["bn"]
        grads.append([p.grad for p in trained.parameters()] + [maps.detach(), bn.running_mean, bn.running_var])
    for found, expected in zip(*grads, strict=True):
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found / scale, expected / scale, atol=1e-4, rtol=0)


def test_in_evaluation_gradients_pass_through_the_folded_decoder(network, inputs):
    grads = []
    for decoder in DECODERS:
        network.zero_grad()
        network(inputs, f"{FULL} decoder={decoder}").square().mean().backward()
        grads.append([p.grad for p in network.parameters()])
    network.zero_grad()
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


# Paths


@torch.inference_mode()
def test_skipping_nothing_is_the_network(network, inputs):
    expected = network(inputs)
    for path in (Path.full(network.options), "2.2.2.2", "11.11.11.11 levels=1234 scale=1 decoder=folded"):
        assert torch.equal(network(inputs, path), expected)


@torch.inference_mode()
@pytest.mark.parametrize("blocks", ["10.01.00.11", "00.00.00.00", "01.1.2.0"])
def test_a_skipped_block_is_not_there(network, inputs, blocks):
    without = copy.deepcopy(network)
    for stage, kept in enumerate(network.path(blocks).blocks, 1):
        own = getattr(without.backbone, f"block{stage}")
        names = [i for i, keep in enumerate(kept) if keep == "1"]
        setattr(without.backbone, f"block{stage}", torch.nn.ModuleList(own[i] for i in names))
    state = without.state_dict()
    depths = tuple(stage.count("1") for stage in network.path(blocks).blocks)
    expected = published(state, inputs, pattern.VARIANTS["b0"]._replace(depths=depths))
    torch.testing.assert_close(network(inputs, blocks), expected, **EXACT)


@torch.inference_mode()
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("levels", ["1", "4", "123", "234", "14"])
def test_a_level_that_is_left_out_adds_nothing(network, inputs, levels, decoder):
    state = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    for level in set("1234") - set(levels):
        for kind in ("weight", "bias"):
            state[f"decode_head.linear_c{level}.proj.{kind}"].zero_()
    expected = published(state, inputs, pattern.VARIANTS["b0"])
    found = network(inputs, f"{FULL} levels={levels} decoder={decoder}")
    torch.testing.assert_close(found, expected, **EXACT)


@torch.inference_mode()
def test_stages_behind_the_last_level_do_not_run(network, inputs):
    network = copy.deepcopy(network)
    for part in ("patch_embed4", "patch_embed3"):
        setattr(network.backbone, part, None)
    assert network(inputs, f"{FULL} levels=12").isfinite().all()


@torch.inference_mode()
@pytest.mark.parametrize("scale", [0.8, 0.97])
def test_a_scale_is_the_network_of_that_size(network, inputs, scale):
    size = [round(side * scale) for side in (40, 60)]
    small = create(image_size=tuple(size))
    small.load_state_dict(network.state_dict())
    shrunk = F.interpolate(inputs, size=size, mode="bilinear", align_corners=False)
    expected = F.interpolate(small(shrunk), size=(10, 15), mode="bilinear", align_corners=False)
    torch.testing.assert_close(network(inputs, f"{FULL} scale={scale}"), expected, **EXACT)


@torch.inference_mode()
@pytest.mark.parametrize("fuse", [None, 16, 144, 256])
@pytest.mark.parametrize("width", [None, 32, 256])
def test_dropped_channels_are_those_of_zero_weights(network, inputs, fuse, width):
    path = Path.full(network.options)
    path = Path(path.blocks, levels="134", decoder="published", fuse=fuse, width=width)
    head, state = network.decode_head, {key: x.clone() for key, x in network.state_dict().items()}
    weights, predict = state["decode_head.linear_fuse.conv.weight"], state["decode_head.linear_pred.weight"]
    weights[:, 512:768] = 0
    for place, level in ((0, 4), (256, 3), (768, 1)):
        linear = getattr(head, f"linear_c{level}").proj
        score = head.linear_fuse["conv"].weight[:, place : place + 256, 0, 0].norm(dim=0) * linear.weight.norm(dim=1)
        for dropped in score.argsort(descending=True)[256 if fuse is None else fuse :]:
            weights[:, place + dropped] = 0
    score = head.linear_fuse["bn"].weight.abs() * head.linear_pred.weight[:, :, 0, 0].norm(dim=0)
    predict[:, score.argsort(descending=True)[256 if width is None else width :]] = 0
    expected = functional_call(network, state, (inputs, f"{FULL} decoder=published"))
    torch.testing.assert_close(network(inputs, path), expected, **EXACT)


@settings(max_examples=10, deadline=None)
@given(
    text=texts(),
    size=st.tuples(*2 * [st.integers(64, 150)]),
    kept=st.tuples(*2 * [st.none() | st.integers(1, 16)]),
    variant=st.sampled_from(["b0", "b1"]),
)
@torch.inference_mode()
def test_multiplications_of_a_path_are_those_that_torch_counts(text, size, kept, variant):
    options = segformer.Options(variant, image_size=size, num_classes=21)
    path = parse(text, options)
    if kept != (None, None):
        path = Path(path.blocks, path.levels, path.scale, "published", *(n and 16 * n for n in kept))
    with torch.device("meta"):
        network = segformer.Network(options, "dense").eval()
        batch = torch.empty(1, 3, *size)
    folded = network.fold(path)
    # Attention as two products, which the counter knows.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        network(batch, path, folded)
    assert 2 * layers.macs(layers.segformer(options, path)) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("variant", "published", "folded"), [("b0", 8.4, 4.1), ("b1", 15.9, 11.6), ("b2", 62.3, 23.7), ("b5", 111.5, 72.9)]
)
def test_multiplications_at_512_pixels_are_as_counted_elsewhere(variant, published, folded):
    options = segformer.Options(variant, image_size=512)
    paths_ = (Path(Path.full(options).blocks, decoder=decoder) for decoder in ("published", "folded"))
    assert [round(layers.macs(layers.segformer(options, path)) / 1e9, 1) for path in paths_] == [published, folded]


# Compiled, and in 16 bits


@torch.no_grad()
@pytest.mark.parametrize(
    "path", rest_slow([None, "10.11.01.00 levels=123 scale=0.9", f"{FULL} decoder=published width=32"], 1, 2)
)
def test_a_compiler_sees_one_graph(network, inputs, path):
    torch.compiler.reset()
    path = path and network.path(path)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs, path), network(inputs, path), **EXACT)


@torch.no_grad()
def test_who_makes_a_program_of_a_call_sees_all_of_it(network, inputs):
    """A result that is written in parts is lost to exporters, which know no views."""
    expected = network(inputs)
    made = torch.jit.trace(network, (images(40, 60, batch=1),)), make_fx(network)(images(40, 60))
    written = [str(made[0].inlined_graph), made[1].code]
    assert not any("new_empty" in text for text in written)
    for program, count in zip(made, (1, 2), strict=True):
        torch.testing.assert_close(program(inputs[:count]), expected[:count], **EXACT)
    mapped = torch.func.vmap(network)(inputs[:, None])
    torch.testing.assert_close(mapped[:, 0], expected, **EXACT)


@torch.no_grad()
def test_on_a_cpu_16_bits_are_computed_in_float32(network, inputs):
    half = copy.deepcopy(network).bfloat16()
    expected = copy.deepcopy(half).float()(inputs.bfloat16().float())
    torch.testing.assert_close(half(inputs.bfloat16()), expected, **EXACT)


# Checkpoints


def transformers_names(state):
    """A state as `transformers` writes it to files."""
    names = [
        *(("norm1", "layer_norm_1"), ("norm2", "layer_norm_2"), ("attn.q", "attention.self.query")),
        *(("attn.sr", "attention.self.sr"), ("attn.norm", "attention.self.layer_norm")),
        *(("attn.proj", "attention.output.dense"), ("mlp.fc1", "mlp.dense1"), ("mlp.fc2", "mlp.dense2")),
        ("mlp.dwconv.dwconv", "mlp.dwconv.dwconv"),
    ]
    head = {"linear_fuse.conv": "linear_fuse", "linear_fuse.bn": "batch_norm", "linear_pred": "classifier"}
    found = {}
    for key, tensor in state.items():
        owner, kind = key.rsplit(".", 1)
        where, part = owner.split(".", 1)
        if where == "decode_head":
            level = part.removeprefix("linear_c").removesuffix(".proj")
            new = head.get(part) or f"linear_c.{int(level) - 1}.proj"
            found[f"decode_head.{new}.{kind}"] = tensor
        elif part.startswith("block"):
            stage, block, rest = part.split(".", 2)
            prefix = f"segformer.encoder.block.{int(stage[-1]) - 1}.{block}"
            if rest == "attn.kv":
                for new, half in zip(("key", "value"), tensor.chunk(2), strict=True):
                    found[f"{prefix}.attention.self.{new}.{kind}"] = half
            else:
                found[f"{prefix}.{dict(names)[rest]}.{kind}"] = tensor
        elif part.startswith("patch_embed"):
            new = part[13:].replace("norm", "layer_norm")
            found[f"segformer.encoder.patch_embeddings.{int(part[11]) - 1}.{new}.{kind}"] = tensor
        else:
            found[f"segformer.encoder.layer_norm.{int(part[-1]) - 1}.{kind}"] = tensor
    return found


def names_in_memory(state):
    """A state as `transformers` has it in memory since its version 5."""
    renamed = {
        r"encoder\.patch_embeddings\.(\d)": r"stages.\1.patch_embeddings",
        r"encoder\.block\.(\d)\.": r"stages.\1.blocks.",
        r"encoder\.layer_norm\.(\d)": r"stages.\1.layer_norm",
        r"\.layer_norm_1\.": ".layernorm_before.",
        r"\.layer_norm_2\.": ".layernorm_after.",
        r"attention\.self\.(q|k|v)(uery|ey|alue)": r"attention.\1_proj",
        r"attention\.self\.sr": "attention.sequence_reduction.sequence_reduction",
        r"attention\.self\.layer_norm": "attention.sequence_reduction.layer_norm",
        r"attention\.output\.dense": "attention.o_proj",
        r"mlp\.dense": "mlp.fc",
        r"decode_head\.linear_c": "decode_head.linear_projections",
    }
    found = {}
    for key, tensor in transformers_names(state).items():
        for theirs, ours in renamed.items():
            key = re.sub(theirs, ours, key)
        found[key] = tensor
    return found


def backbone_alone(state):
    return {
        **{key.removeprefix("backbone."): x for key, x in state.items() if key.startswith("backbone.")},
        "head.weight": torch.zeros(1000, 256),
        "head.bias": torch.zeros(1000),
    }


FORMS = {
    "official": lambda state: {
        "state_dict": {
            **state,
            "decode_head.conv_seg.weight": torch.zeros(5, 128, 1, 1),
            "decode_head.conv_seg.bias": torch.zeros(5),
        },
        "meta": {"epoch": 1},
    },
    "transformers": transformers_names,
    "transformers-5": names_in_memory,
    "lightning": lambda state: {"state_dict": {f"model._orig_mod.{key}": x for key, x in state.items()}},
    "wrapped": lambda state: {"model_state": {f"net.{key}": x for key, x in names_in_memory(state).items()}},
}


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMS)
def test_published_forms_are_read(tmp_path, network, inputs, form):
    torch.save(FORMS[form](network.state_dict()), tmp_path / "x.pth")
    read = create(checkpoint=tmp_path / "x.pth")
    assert read.state_dict().keys() == network.state_dict().keys()
    assert torch.equal(read(inputs), network(inputs))


@pytest.mark.parametrize(
    "form",
    [
        backbone_alone,
        lambda state: transformers_backbone(state),
        lambda state: {f"encoder.{key}": x for key, x in backbone_alone(state).items() if "head" not in key},
        # Of a `SegformerModel`.
        lambda state: {
            key.removeprefix("segformer."): x for key, x in names_in_memory(state).items() if "decode" not in key
        },
    ],
    ids=["nvlabs", "hf", "encoder", "hf-alone"],
)
def test_a_backbone_alone_is_read_and_the_decoder_said_to_be_random(tmp_path, network, form, caplog):
    torch.save(form(network.state_dict()), tmp_path / "mit_b0.pth")
    with caplog.at_level(logging.WARNING):
        read = create(checkpoint=tmp_path / "mit_b0.pth")
    assert "the decoder stays as it is" in caplog.text
    fresh = create()
    for key, tensor in read.state_dict().items():
        assert torch.equal(tensor, (network if key.startswith("backbone.") else fresh).state_dict()[key])


def transformers_backbone(state):
    renamed = {key: x for key, x in transformers_names(state).items() if key.startswith("segformer.")}
    return renamed | {"classifier.weight": torch.zeros(1000, 256), "classifier.bias": torch.zeros(1000)}


def of_mmsegmentation(state):
    kept = {key: x for key, x in state.items() if key.startswith("backbone.")}
    return kept | {"decode_head.fusion_conv.conv.weight": torch.zeros(256, 1024, 1, 1)}


def test_unknown_names_are_no_backbone(tmp_path, network, caplog):
    torch.save({f"x{at}.{key}": x for at, (key, x) in enumerate(network.state_dict().items())}, tmp_path / "x.pth")
    with pytest.raises(ArtifactError, match=r"missing: backbone\..* unexpected: x0\.backbone\."):
        create(checkpoint=tmp_path / "x.pth")
    assert "backbone alone" not in caplog.text


def without_stage_3(state):
    return {key: x for key, x in backbone_alone(state).items() if not key.startswith("block3.")}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (of_mmsegmentation, "expected the head segformer, found the head mmseg; head='mmseg' takes it"),
        (without_stage_3, "missing: backbone.block3"),
        (lambda s: s | {"decode_head.linear_pred.bias": torch.zeros(19)}, r"linear_pred.bias \[19\] for \[5\]"),
        (lambda s: {k: x for k, x in transformers_names(s).items() if ".value." not in k}, "not a checkpoint"),
    ],
    ids=["mmsegmentation", "half-a-backbone", "classes", "without-values"],
)
def test_other_checkpoints_are_refused(tmp_path, network, form, message):
    torch.save(form(network.state_dict()), tmp_path / "x.pth")
    with pytest.raises(ArtifactError, match=message):
        create(checkpoint=tmp_path / "x.pth")


def test_weights_of_the_hub_are_found(tmp_path, monkeypatch, network):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--nvidia--segformer-b0-finetuned-ade-512-512/snapshots/1"
    folder.mkdir(parents=True)
    torch.save(transformers_names(network.state_dict()), folder / "pytorch_model.bin")
    assert create(checkpoint="cached").weights == str(folder / "pytorch_model.bin")
    assert segformer.timm_name(segformer.Options("b5")) == "segformer-b5-finetuned-ade-640-640"


# Names, and what is refused


@pytest.mark.parametrize(
    ("text", "size"),
    [("segformer-b0-512", 512), ("segformer-b5-360x480", (360, 480)), ("segformer-b2-1024x2048", None)],
)
def test_names(text, size):
    family, fields = networks.parse(text)
    assert family == "segformer" and size in (None, fields["image_size"])
    assert segformer.name(segformer.Options(**fields)) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "b6"}, "variant: expected one of b0, .*, found 'b6'"),
        ({"image_size": 31}, "image_size: expected at least 32 pixels a side, found 31"),
        ({"image_size": (512, 16)}, "at least 32 pixels a side, found 512x16"),
        ({"image_size": (64, 64, 64)}, "image_size"),
        ({"num_classes": 0}, "num_classes"),
        ({"decoder": "mlp"}, "decoder: expected one of folded, published of the head segformer, found 'mlp'"),
        ({"heads": 3}, "options: variant, image_size, num_classes, decoder"),
        ({"plans": {"reorder": "ic"}}, "plans: expected attention 'tilewright'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        create(**options)


@pytest.mark.parametrize("attention", ["tilewright", "flex"])
def test_an_attention_without_a_pattern_says_so(attention, inputs):
    with pytest.raises(Unavailable, match=f"attention {attention}: SegFormer's attention is dense: expected dense"):
        create(attention=attention)(inputs)


@pytest.mark.parametrize(
    "batch",
    [torch.zeros(1, 3, 31, 40), torch.zeros(0, 3, 40, 60), torch.zeros(3, 40, 60), torch.zeros(1, 3, 40, 60).int()],
)
def test_images_of_another_kind_are_named(network, batch):
    with pytest.raises(PatternError, match=r"images: expected"):
        network(batch)


@pytest.mark.parametrize("decoder", ["folded", "published"])
def test_one_network_takes_images_of_any_size(network, decoder):
    for size in ((64, 97), (96, 64)):
        own = create(image_size=size)
        own.load_state_dict(network.state_dict())
        given = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        for path in ("2.2.2.2", "1.2.2.1 levels=123 scale=0.85"):
            text = f"{path} decoder={decoder}"
            torch.testing.assert_close(network(given, text), own(given, text), atol=1e-6, rtol=0)


def test_an_image_that_a_path_makes_too_small_is_named(network):
    with pytest.raises(PatternError, match="at least 32 pixels a side, found 31x64"):
        create(image_size=128)(torch.zeros(1, 3, 62, 128), "2.2.2.2 scale=0.5")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("2.2.2.2 scale=0.5", "at least 32 pixels a side, found 20x30 at scale 0.5"),
        ("2.2.2", "expected 4 stages, of at most 2.2.2.2 blocks, found 3"),
        (Path(("11", "11", "111", "11")), "expected 2 blocks in stage 3, found 3: 111"),
        (Path(("11", "11", "11", "11"), decoder="published", fuse=512), "fuse of at most 256 channels, found 512"),
    ],
)
def test_a_path_of_another_network_is_refused(network, inputs, path, message):
    with pytest.raises(ConfigError, match=message):
        network(inputs, path)
