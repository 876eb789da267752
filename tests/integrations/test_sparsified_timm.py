"""Timm's own vision transformers, with random weights, over patterns: the same as masked attention in timm's own code.

Skipped where timm is not installed.
"""

import copy
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import get_static_address_type
from torch.overrides import TorchFunctionMode

from helpers import gradients
from tilewright.core.errors import ConfigError, PatternError, UnknownNameError
from tilewright.nn import patterns
from tilewright.nn.attention import Patterned

timm = pytest.importorskip("timm", reason="timm is not installed")

from tilewright.integrations.timm import NORMS, remove, sparsify  # noqa: E402

# Of timm's, what it does not do yet.
OLDER = tuple(map(int, timm.__version__.split(".")[:3])) < (1, 0, 31)
SMALL = {"depth": 3, "embed_dim": 48, "num_heads": 3, "num_classes": 11}
# Name, options, pattern, size of the images. The grids are not square where the model takes such.
MODELS = {
    "vit": ("vit_tiny_patch16_224", {"img_size": (80, 112)}, "window-5-g1", (80, 112)),
    "vit-norms": ("vit_tiny_patch16_224", {"img_size": 96, "qk_norm": True}, "axial-g1", (96, 96)),
    "deit-distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 96}, "chunk-5-g2", (96, 96)),
    "dinov2": ("vit_small_patch14_reg4_dinov2", {"img_size": (98, 70)}, "window-3-g5", (98, 70)),
    "dinov2-any-size": ("vit_small_patch14_reg4_dinov2", {"dynamic_img_size": True}, "window-3-g5", (84, 126)),
    "beit": ("beit_base_patch16_224", {"img_size": (64, 96)}, "window-3-g1", (64, 96)),
    "beit-shared": (
        "beit_base_patch16_224",
        {"img_size": 80, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
        "window-3-g1",
        (80, 80),
    ),
    "eva": ("eva02_tiny_patch14_224", {"img_size": 84, "num_heads": 3}, "window-3-g1", (84, 84)),
    "dinov3": ("vit_small_patch16_dinov3", {"img_size": 96}, "swin-3-g5", (96, 96)),
    "rotations-of-each-layer": ("vit_small_patch16_rope_mixed_224", {"img_size": 80}, "window-3-g1", (80, 80)),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "plans"))


def made(case):
    name, options, pattern, size = MODELS[case]
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **options}).eval()
    # As drawn, layers add little, and tables that begin as zeros would hide what goes wrong with them.
    for name, parameter in model.named_parameters():
        scale = "gamma" in name or ("norm" in name and name.endswith("weight"))
        torch.nn.init.normal_(parameter, mean=1.0 * scale, std=0.5 if "token" in name or "pos" in name else 0.2)
    return model, pattern, torch.randn(2, 3, *size)


def dense(graph):
    indptr, indices = graph.expand()
    mask = torch.zeros(graph.shape, dtype=torch.bool)
    mask[np.repeat(np.arange(graph.n_rows), np.diff(indptr)), indices] = True
    return mask


class Masked(TorchFunctionMode):
    """Timm's own calls of torch's attention, with a mask; `only`: which of them."""

    def __init__(self, mask, only=None):
        super().__init__()
        self.mask, self.only, self.calls = mask, only, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            if self.only is None or self.calls in self.only:
                bias = kwargs.get("attn_mask")
                kwargs["attn_mask"] = self.mask if bias is None else bias.masked_fill(~self.mask, -torch.inf)
            self.calls += 1
        return func(*args, **kwargs)


def grid_of(model, images):
    return tuple(model.patch_embed.dynamic_feat_size(images.shape[-2:]))


def expected(model, pattern, images, only=None):
    mask = dense(patterns.graph(pattern, grid_of(model, images), model.num_prefix_tokens))
    with Masked(mask, only) as mode:
        out = model(images)
    assert mode.calls == len(model.blocks)
    return out


def close(found, wanted):
    assert not found.isnan().any()
    return torch.allclose(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", ("vit", "dinov2"))
@torch.no_grad()
def test_layers_give_a_plan_their_projection_as_it_is(case, monkeypatch):
    """Views of it took the host longer than the launch."""
    model, pattern, images = made(case)
    sparsify(model, pattern)
    wanted = [model(x) for x in (images, images[:1])]
    monkeypatch.setattr(Patterned, "attend", None)
    assert torch.equal(model(images), wanted[0]) and torch.equal(model(images[:1]), wanted[1])


@pytest.mark.parametrize("case", ("vit", "eva"))
@torch.no_grad()
def test_norms_that_do_nothing_are_called_where_someone_sees_it(case):
    """A layer of which nobody does calls none."""
    model, pattern, images = made(case)
    sparsify(model, pattern)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    before, seen = model(images), []
    assert close(compiled(images), before)
    layers = [block.attn for block in model.blocks]
    hooks = [getattr(layers[0], name).register_forward_hook(lambda *_: seen.append(1)) for name in NORMS]
    assert torch.equal(model(images), before) and len(seen) == len(NORMS)
    for hook in hooks:
        hook.remove()
    # Also of what was compiled.
    layers[1].norm = torch.nn.LayerNorm(48, bias=False)
    layers[1].norm.weight.copy_(torch.linspace(0.5, 1.5, 48))
    layers[2].q_norm = layers[2].k_norm = torch.nn.LayerNorm(16)
    own = copy.deepcopy(model)
    remove(own)
    wanted = expected(own, pattern, images)
    assert not torch.allclose(wanted, before, atol=1e-3)
    assert close(model(images), wanted) and close(compiled(images), wanted) and len(seen) == len(NORMS)


@pytest.mark.parametrize("case", MODELS)
@torch.no_grad()
def test_a_pattern_gives_the_logits_of_masked_attention_and_full_gives_timms_own(case):
    model, pattern, images = made(case)
    whole, wanted = model(images), expected(model, pattern, images)
    # The pattern matters.
    assert not torch.allclose(whole, wanted, atol=1e-3)
    names = list(model.state_dict())
    sparse = sparsify(model, pattern)
    assert close(model(images), wanted)
    assert list(model.state_dict()) == names
    sparse.remove()
    assert torch.equal(model(images), whole)
    full = sparsify(model, "full")
    assert close(model(images), whole)
    full.remove()


@pytest.mark.parametrize("case", MODELS)
def test_it_trains_as_masked_attention(case):
    if case == "rotations-of-each-layer" and OLDER:
        pytest.skip(f"timm {timm.__version__} turns by a layer's own rotations in float32 alone")
    model, pattern, images = made(case)
    exact = copy.deepcopy(model).double()
    wanted = gradients.of(exact, lambda x: expected(exact, pattern, x), images.double())
    sparsify(model, pattern)
    gradients.agree(gradients.of(model, model, images), wanted)


@pytest.mark.parametrize("way", ["compiled", "checkpointed"])
@pytest.mark.parametrize("case", ["vit", "beit"])
def test_it_trains_the_same_compiled_and_checkpointed(case, way):
    model, pattern, images = made(case)
    sparsify(model, pattern)
    wanted = gradients.of(model, model, images)
    model.set_grad_checkpointing(way == "checkpointed")
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "compiled" else model
    gradients.agree(gradients.of(model, call, images), wanted)


@pytest.mark.parametrize("case", ["vit", "eva", "beit"])
@pytest.mark.parametrize("blocks", [[1], [0, 2], [1, 2]])
@torch.no_grad()
def test_some_blocks_are_sparse(case, blocks):
    model, pattern, images = made(case)
    wanted = expected(model, pattern, images, blocks)
    sparsify(model, pattern, blocks=blocks)
    assert close(model(images), wanted)


@torch.no_grad()
def test_a_matrix_of_all_ones_runs_by_a_plan_and_is_timms_own():
    model, _, images = made("vit")
    whole = model(images)
    n = 1 + 5 * 7
    sparsify(model, np.ones((n, n), bool))
    assert close(model(images), whole)


@torch.no_grad()
def test_images_of_several_sizes():
    model, pattern, images = made("dinov2-any-size")
    others = torch.randn(1, 3, 56, 70)
    wanted = [expected(model, pattern, each) for each in (images, others)]
    sparsify(model, pattern)
    assert close(model(images), wanted[0]) and close(model(others), wanted[1]) and close(model(images), wanted[0])


@pytest.mark.parametrize("case", ["vit", "beit"])
@torch.no_grad()
def test_timm_may_resize_a_sparse_model(case):
    model, pattern, _ = made(case)
    if not hasattr(model, "set_input_size"):
        pytest.skip(f"timm {timm.__version__} does not resize a {type(model).__name__}")
    sparsify(model, pattern)
    model.set_input_size((112, 80))
    images = torch.randn(1, 3, 112, 80)
    found = model(images)
    # Another model, resized by timm alone.
    plain, _, _ = made(case)
    plain.set_input_size((112, 80))
    assert close(found, expected(plain, pattern, images))


@torch.no_grad()
def test_features_between_the_blocks_stand_in_timms_order():
    model, pattern, images = made("dinov2")
    mask = dense(patterns.graph(pattern, grid_of(model, images), model.num_prefix_tokens))
    with Masked(mask):
        wanted = model.forward_intermediates(images, intermediates_only=True)
    sparsify(model, pattern)
    found = model.forward_intermediates(images, intermediates_only=True)
    assert all(map(close, found, wanted)) and len(found) == 3
    assert close(model.forward_features(images), model.forward_intermediates(images)[0])


@torch.no_grad()
def test_tokens_are_ordered_once(monkeypatch):
    model, pattern, images = made("vit")
    sparse = sparsify(model, pattern)
    counts = {"enter": 0, "leave": 0}
    for name in counts:
        run = getattr(type(sparse.attention), name)

        def counted(*arguments, name=name, run=run):
            counts[name] += 1
            return run(*arguments)

        monkeypatch.setattr(type(sparse.attention), name, counted)
    model(images)
    assert counts == {"enter": 1, "leave": 1}


@torch.no_grad()
def test_copies_and_written_tables():
    model, pattern, images = made("beit")
    sparsify(model, pattern)
    before = model(images)
    other = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    model.blocks[1].attn.relative_position_bias_table.data.mul_(3)
    after = model(images)
    assert not torch.allclose(after, before, atol=1e-3)
    assert close(other(images), before) and close(again(images), before)
    plain, _, _ = made("beit")
    plain.blocks[1].attn.relative_position_bias_table.mul_(3)
    assert close(after, expected(plain, pattern, images))


# As many tokens in both.
CROPS = (96, 64), (64, 96)
ANY_SIZE = {
    "vit": ("vit_tiny_patch16_224", {"dynamic_img_size": True}, "window-3-g1"),
    "dinov2": ("vit_small_patch16_dinov3", {"dynamic_img_size": True}, "window-3-g5"),
    "eva": ("eva02_tiny_patch14_224", {"dynamic_img_size": True, "patch_size": 16, "num_heads": 3}, "window-3-g1"),
}


def of_any_size(case):
    MODELS["any size"] = (*ANY_SIZE[case], CROPS[0])
    try:
        model, pattern, _ = made("any size")
    finally:
        del MODELS["any size"]
    sparsify(model, pattern)
    return model, [torch.randn(2, 3, *size) for size in CROPS]


def whole(model, images):
    return model.forward_features(images)


def between(model, images):
    return torch.cat([x.flatten(2).mT for x in model.forward_intermediates(images, intermediates_only=True)], 1)


def by_hand(reentrant):
    """Blocks two at a time, then one."""

    def run(model, images):
        x = model._pos_embed(model.patch_embed(images))
        for part in (model.blocks[:2], model.blocks[2:]):
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=reentrant)
        return x

    return run


def entirely(model, images):
    return torch.utils.checkpoint.checkpoint(model, images, use_reentrant=False)


def gradients_of_both(model, run, crops):
    model.zero_grad()
    torch.stack([run(model, images).square().mean() for images in crops]).sum().backward()
    return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


@pytest.mark.parametrize("case", ANY_SIZE)
def test_what_checkpointing_computes_again_sees_the_grid_of_its_own_forward(case, monkeypatch):
    model, crops = of_any_size(case)
    # Timm's own reentrant checkpoints take no rotations.
    ways = [(run, reentrant) for run in (whole, between) for reentrant in (False, True)[: 1 + (case == "vit")]]
    wanted = {run: gradients_of_both(model, run, crops) for run in (whole, between)}
    model.set_grad_checkpointing()
    for run, reentrant in ways:
        monkeypatch.setattr(timm.models._manipulate, "use_reentrant_ckpt", lambda reentrant=reentrant: reentrant)
        assert torch.allclose(gradients_of_both(model, run, crops), wanted[run], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("way", [by_hand(False), by_hand(True), entirely], ids=["by hand", "reentrant", "entirely"])
def test_checkpoints_by_hand_see_the_grid_of_their_own_forward(way):
    model, crops = of_any_size("vit")
    model.set_grad_checkpointing(False)
    plain = {entirely: lambda model, images: model(images)}.get(
        way, lambda model, images: model.blocks(model._pos_embed(model.patch_embed(images)))
    )
    wanted = gradients_of_both(model, plain, crops)
    assert torch.allclose(gradients_of_both(model, way, crops), wanted, atol=1e-6, rtol=1e-4)


def test_blocks_that_are_compiled_by_themselves_see_the_grid_of_their_own_forward():
    model, crops = of_any_size("vit")
    wanted = gradients_of_both(model, whole, crops)
    model.set_grad_checkpointing()
    for block in model.blocks:
        block.compile(backend="eager")
    assert torch.allclose(gradients_of_both(model, whole, crops), wanted, atol=1e-6, rtol=1e-4)


def test_tokens_that_were_moved_away_are_those_of_the_only_grid_or_refused():
    model, crops = of_any_size("vit")
    wanted = gradients_of_both(model, whole, crops[:1])
    model.set_grad_checkpointing()
    with torch.autograd.graph.save_on_cpu():
        assert torch.allclose(gradients_of_both(model, whole, crops[:1]), wanted, atol=1e-6, rtol=1e-4)
    moved = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x)
    with moved, pytest.raises(PatternError, match=r"recomputes layers found .* expected images of one shape"):
        gradients_of_both(model, whole, crops)


@pytest.mark.parametrize("case", ["any", "beit"])
@torch.no_grad()
def test_threads_call_one_model_with_images_of_their_own(case):
    if case == "any":
        model, images = of_any_size("vit")
    else:
        model, pattern, images = made(case)
        sparsify(model, pattern)
        images = images[:1], images
    wanted = [model(each) for each in images]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda i: model(images[i % 2]), range(24)))
            features = list(pool.map(lambda i: (model if i % 2 else model.forward_features)(images[i % 2]), range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert all(close(out, wanted[i % 2]) for i, out in enumerate(found))
    assert all(close(out, wanted[1]) for out in features[1::2])


@pytest.mark.parametrize("case", ["vit-norms", "beit", "beit-shared", "eva"])
def test_replicas_and_swapped_parameters_compute_with_their_own(case):
    model, pattern, images = made(case)
    sparsify(model, pattern)
    other, _, _ = made(case)
    generator = torch.Generator().manual_seed(1)
    for parameter in other.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    sparsify(other, pattern)
    wanted = other(images)
    assert not torch.allclose(model(images), wanted, atol=1e-3)
    swapped = torch.func.functional_call(model, dict(other.named_parameters()), (images,))
    assert close(swapped, wanted)
    # As `DataParallel` makes one.
    modules = list(model.modules())
    replicas = [module._replicate_for_data_parallel() for module in modules]
    values = dict(zip(model.parameters(), other.parameters(), strict=True))
    for module, replica in zip(modules, replicas, strict=True):
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else replicas[modules.index(child)]
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else values[parameter])
    assert close(replicas[0](images), wanted)
    replicas[0](images).sum().backward()
    assert all(x.grad is not None for x in other.parameters()) and all(x.grad is None for x in model.parameters())


@torch.no_grad()
def test_copies_of_a_sparse_model_are_given_back_as_it_is():
    model, pattern, images = made("beit")
    plain = model(images)
    parts = [type(module) for module in model.modules()]
    sparse = sparsify(model, pattern)
    layer, of_timm = model.blocks[0].attn, vars(made("beit")[0].blocks[0].attn)
    assert all(getattr(layer, name) == of_timm[name] for name in ("num_heads", "scale", "fused_attn"))
    found = model(images)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(sparse).model
    for other in copies:
        assert close(other(images), found) and list(other.state_dict()) == list(model.state_dict())
        remove(other)
        assert torch.equal(other(images), plain) and [type(module) for module in other.modules()] == parts
        assert close(model(images), found)
    remove(model)
    assert torch.equal(model(images), plain)
    again = sparsify(model, pattern)
    assert close(model(images), found)
    again.remove()
    again.remove()
    assert torch.equal(model(images), plain)


@torch.no_grad()
def test_a_model_without_its_last_blocks_puts_tokens_back():
    model, pattern, images = made("vit")
    sparsify(model, pattern)
    model.prune_intermediate_layers([1], prune_head=False)
    assert len(model.blocks) == 2
    assert close(model.forward_features(images), model.forward_intermediates(images)[0])


@torch.no_grad()
def test_a_compiled_model_gives_the_same():
    model, pattern, images = made("vit")
    sparsify(model, pattern)
    # Whole, before any call.
    assert close(torch.compile(model, backend="eager", fullgraph=True)(images), model(images))


@torch.no_grad()
def test_compiled_code_is_guarded_hardly_more_than_timms_own():
    counts, given, images = [], [], torch.randn(1, 3, 64, 64)

    def backend(graph, inputs):
        given[:] = inputs
        return graph

    for pattern in (None, "window-3-g1"):
        model = timm.create_model("vit_tiny_patch16_224", img_size=64, **{**SMALL, "depth": 12}).eval()
        if pattern is not None:
            sparsify(model, pattern)
        torch.compiler.reset()
        torch.compile(model, backend=backend, fullgraph=True)(images)
        (entry,) = _debug_get_cache_entry_list(type(model).forward.__code__)
        counts.append(len(re.findall(r"\+- [A-Z_]+:", str(entry.guard_manager))))
        # What a CUDA graph would copy in each replay.
        moved = [x for x in given if not isinstance(x, torch.nn.Parameter) and get_static_address_type(x) is None]
        assert len(moved) == 1 and moved[0] is images
    own, sparse = counts
    assert sparse <= 1.05 * own


@pytest.mark.parametrize(
    ("case", "arguments", "error", "line"),
    [
        ("vit", {"pattern": "window-5-g5"}, PatternError, "special tokens, 1, found 5; name it window-5-g1"),
        ("dinov2", {"pattern": "window-5"}, PatternError, "special tokens, 5, found 0; name it window-5-g5"),
        ("vit", {"pattern": "swin-4-g1"}, PatternError, "grid of whole windows of 4, found 5 x 7"),
        ("vit", {"pattern": "windows-4"}, UnknownNameError, "unknown pattern 'windows-4'; known: window-<side>"),
        ("vit", {"pattern": np.ones((4, 4), bool)}, PatternError, "expected 36 x 36 for 1 special tokens"),
        ("vit", {"pattern": "full", "blocks": [3]}, ConfigError, "numbers from 0 to 2"),
        ("vit", {"pattern": "full", "blocks": []}, ConfigError, "at least one"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_model_left_as_it_was(case, arguments, error, line):
    model, _, images = made(case)
    with torch.no_grad():
        before, parts = model(images), [type(module) for module in model.modules()]
        with pytest.raises(error, match=line) as found:
            sparsify(model, **arguments)
        assert "\n" not in str(found.value)
        assert [type(module) for module in model.modules()] == parts and torch.equal(model(images), before)
    assert not model.blocks[0]._forward_pre_hooks and "forward_intermediates" not in vars(model)


def test_other_models_are_refused():
    with pytest.raises(ConfigError, match="VisionTransformer, Beit, Eva, found ResNet"):
        sparsify(timm.create_model("resnet18"), "full")
    model, pattern, _ = made("vit")
    sparsify(model, pattern)
    with pytest.raises(ConfigError, match="found a sparse one"):
        sparsify(model, pattern)
    other = timm.create_model("vit_small_patch16_36x1_224", **{**SMALL, "img_size": 64})
    other.blocks[1].attn = torch.nn.Identity()
    with pytest.raises(ConfigError, match=r"block 1: expected attention of timm's .*found Identity"):
        sparsify(other, "window-3-g1")


def test_what_a_call_cannot_honour_is_refused():
    model, pattern, images = made("vit")
    sparsify(model, pattern)
    with torch.no_grad(), pytest.raises(PatternError, match="attn_mask or is_causal"):
        model(images, is_causal=True)
    model, pattern, images = made("beit")
    sparsify(model, pattern)
    model.blocks[0].attn.attn_drop.p = 0.1
    with torch.no_grad(), pytest.raises(PatternError, match=r"dropout in training, found 0\.1"):
        model.train()(images)
