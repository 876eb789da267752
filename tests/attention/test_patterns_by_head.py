"""Patterns by head and by image: what `plan` takes, and what its plans give, against masked attention."""

import copy

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

import tilewright as tw
from tilewright import graph, reference
from tilewright.attention import patterns
from tilewright.attention.masks import Bias
from tilewright.attention.units import Units, interleaved
from tilewright.core.errors import ArtifactError, ConfigError, PatternError

H, D, N_Q, N_K = 3, 16, 70, 60


def random_masks(*lead, n_q=N_Q, n_k=N_K, seed=0):
    """Masks [*lead, N_q, N_k], with a query that sees every key and one that sees none."""
    found = torch.rand(*lead, n_q, n_k, generator=torch.Generator().manual_seed(seed)) < 0.15
    found[..., 5 % n_q, :] = True
    found[..., 3 % n_q, :] = n_q < 4
    return found


def tensors(batch, heads=H, n_q=N_Q, n_k=N_K, dtype=torch.float32, seed=0):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, n, D, generator=make).to(dtype) for n in (n_q, n_k, n_k)]


def masked(q, k, v, mask, bias=None):
    """SDPA in float64 with a mask [B or 1, H or 1, N_q, N_k]; zeros for a query without a key."""
    added = torch.zeros(mask.shape, dtype=torch.float64) if bias is None else bias.double()
    # Minus infinity for a whole row gives no number: such a row is left alone and then set to zero.
    seen = mask.any(-1, keepdim=True)
    added = added.masked_fill(~mask & seen, -torch.inf)
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=added) * seen


def make(pattern, **options):
    return tw.plan(pattern, **{"heads": H, "head_dim": D, "solver": "greedy"} | options)


def near(found, expected):
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_patterns_by_head_and_image_are_those_of_masked_attention(data):
    by = data.draw(st.sampled_from(["head", "image", "both"]))
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    n_q, n_k = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    units = {"head": heads, "image": batch, "both": batch * heads}[by]
    # Some agree.
    group = [data.draw(st.integers(0, units - 1)) for _ in range(units)]
    masks = random_masks(units, n_q=n_q, n_k=n_k, seed=data.draw(st.integers(0, 99)))[group]
    mask = masks.view({"head": 1}.get(by, batch), -1, n_q, n_k)
    bias = None
    if data.draw(st.booleans()):
        bias = torch.randn(heads, n_q, n_k, generator=torch.Generator().manual_seed(1))
    given_mask = {"head": mask[0]}.get(by, mask)
    split = data.draw(st.sampled_from([16, None]))
    planned = make(given_mask, heads=heads, bias=bias, split_keys=split)
    q, k, v = (x.requires_grad_() for x in tensors(batch, heads, n_q, n_k))
    out, expected = planned(q, k, v), masked(q, k, v, mask, bias)
    near(out, expected)
    rows, keys = planned.row_order, planned.col_order
    ordered = planned(q[:, :, rows], k[:, :, keys], v[:, :, keys], ordered=True)
    near(ordered, expected[:, :, rows])
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(out, (q, k, v), grad)
    for one, wanted in zip(found, torch.autograd.grad(expected, (q, k, v), grad.double()), strict=True):
        near(one, wanted.double())


@pytest.mark.parametrize("by", ["head", "image", "both"])
@pytest.mark.parametrize("kind", ["dense", "table"])
def test_gradients_of_a_bias(by, kind):
    batch = 2
    mask = random_masks(1 if by == "head" else batch, 1 if by == "image" else H)
    make_table = torch.Generator().manual_seed(1)
    if kind == "dense":
        bias = table = torch.randn(H, N_Q, N_K, generator=make_table)
        full = lambda x: x  # noqa: E731
    else:
        table = torch.randn(H, 11, generator=make_table)
        bias = Bias(table, lambda rows, keys: (rows + 3 * keys) % 11)
        at = (torch.arange(N_Q)[:, None] + 3 * torch.arange(N_K)) % 11
        full = lambda x: x[:, at]  # noqa: E731
    planned = make(mask[0] if by == "head" else mask, bias=bias, split_keys=16)
    # Other values than those planned with.
    values = (2 * table).requires_grad_()
    q, k, v = tensors(batch)
    out, expected = planned(q, k, v, bias=values), masked(q, k, v, mask, full(values))
    near(out, expected)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (found,), (wanted,) = (torch.autograd.grad(x, values, grad.to(x.dtype)) for x in (out, expected))
    near(found, wanted.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    mask = random_masks(H)
    q, k, v = tensors(2, dtype=dtype)
    found = make(mask, dtype=dtype)(q, k, v)
    expected = masked(q, k, v, mask[None])
    error = (found.double() - expected).norm() / expected.norm()
    assert found.dtype == dtype and error <= reference.TOLERANCE[dtype]


def test_a_batch_of_no_images_and_of_several():
    planned = make(random_masks(H))
    for batch in (0, 1, 4):
        q, k, v = tensors(batch)
        near(planned(q, k, v), masked(q, k, v, random_masks(H)[None]))


# Forms of patterns by head: all of the same three masks, the first and last equal.
THREE = random_masks(H)
THREE[2] = THREE[0]
FORMS = {
    "tensor": lambda: THREE,
    "float tensor": lambda: THREE.float(),
    "array": lambda: THREE.numpy(),
    "batch of one": lambda: THREE[None],
    "list of arrays": lambda: [x.numpy() for x in THREE],
    "list of sparse": lambda: [sp.csr_array(x.numpy()) for x in THREE],
    "tuple of graphs": lambda: tuple(graph.from_pattern(x.numpy()) for x in THREE),
    "list of mixed": lambda: [THREE[0], graph.from_pattern(THREE[1].numpy()), lambda b, h, q, k: THREE[0][q, k]],
    "mask_mod": lambda: lambda b, h, q, k: THREE[h, q, k],
    "block mask": lambda: flex_attention.create_block_mask(
        lambda b, h, q, k: THREE[h, q, k], None, H, N_Q, N_K, device="cpu", BLOCK_SIZE=16
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_by_head(form):
    found, units = patterns.read(FORMS[form](), heads=H, kind="cpu", shape=(N_Q, N_K))
    assert units == Units("head", H, (0, 1, 0))
    for one, expected in zip(found, THREE[:2], strict=True):
        np.testing.assert_array_equal(one.to_dense(), expected.numpy())


def test_forms_by_image():
    two = random_masks(2)
    mod = {"shape": (N_Q, N_K), "images": 2}
    given_forms = [
        ({"by": "image"}, two),
        ({"by": "image"}, list(two)),
        ({}, two[:, None]),
        ({}, two[:, None].expand(-1, H, -1, -1)),
        (mod, lambda b, h, q, k: two[b, q, k]),
        ({}, flex_attention.create_block_mask(lambda b, h, q, k: two[b, q, k], 2, None, N_Q, N_K, device="cpu")),
    ]
    for options, form in given_forms:
        found, units = patterns.read(form, heads=H, kind="cpu", **options)
        assert units == Units("image", H, (0, 1))
        for one, expected in zip(found, two, strict=True):
            np.testing.assert_array_equal(one.to_dense(), expected.numpy())


def test_forms_by_head_and_image():
    four = random_masks(2, H)
    four[1] = four[0, [1, 0, 2]]
    given_forms = [
        ({}, four),
        ({"by": "image"}, [list(x) for x in four]),
        ({"by": "image"}, list(four)),
        ({"shape": (N_Q, N_K), "images": 2}, lambda b, h, q, k: four[b, h, q, k]),
        ({}, flex_attention.create_block_mask(lambda b, h, q, k: four[b, h, q, k], 2, H, N_Q, N_K, device="cpu")),
    ]
    for options, form in given_forms:
        found, units = patterns.read(form, heads=H, kind="cpu", **options)
        assert units == Units("both", H, (0, 1, 2, 1, 0, 2)) and len(found) == 3


def test_a_plan_of_a_block_mask_computes_what_flex_attention_does():
    def allowed(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= 3 + 2 * h + 5 * b

    mask = flex_attention.create_block_mask(allowed, 2, H, N_Q, N_K, device="cpu", BLOCK_SIZE=16)
    q, k, v = tensors(2)
    expected = flex_attention.flex_attention(q, k, v, block_mask=mask)
    near(make(mask)(q, k, v), expected.double())


@pytest.mark.parametrize(
    "mask_mod, units",
    [
        (lambda b, h, q, k: (q - k).abs() < 7 + h, Units("head", 2, (0, 1))),
        (lambda b, h, q, k: (q == k) | ((q == 89) & (k == 0) & (h == 1)), Units("head", 2, (0, 1))),
        (lambda b, h, q, k: (q - k).abs() < 7 + b, Units("image", 2, (0, 1))),
        (lambda b, h, q, k: (q - k).abs() < 7 + (b * 2 + h) % 3, Units("both", 2, (0, 1, 2, 0))),
        # Python branches: it cannot be asked for all heads at once.
        (lambda b, h, q, k: q >= k if h == 0 else q <= k, Units("head", 2, (0, 1))),
        (lambda b, h, q, k: (q - k).abs() < 7, None),
        (lambda b, h, q, k: (q - k).abs() < 7 + 0 * h, None),
    ],
)
def test_a_mask_mod_may_depend_on_head_and_batch(monkeypatch, mask_mod, units):
    # Some rows at a time.
    monkeypatch.setattr(patterns, "_PAIRS_ON", {"cpu": 1000})
    planned = make(mask_mod, shape=(90, 90), heads=2, images=2)
    assert planned.units == units
    at = torch.arange(90)
    mask = torch.stack([torch.stack([mask_mod(b, h, at[:, None], at) for h in range(2)]) for b in range(2)])
    q, k, v = tensors(2, 2, 90, 90)
    near(planned(q, k, v), masked(q, k, v, mask))


def test_heads_that_agree_share_memory(tmp_path):
    own = random_masks(12, n_q=256, n_k=256)
    one, two, twelve, different = (
        make(own[group], heads=12) for group in ([0] * 12, [0, 1] * 6, [0] * 11 + [1], list(range(12)))
    )

    def held(planned):
        return sum(x.run_keys.nbytes + x.run_mask.nbytes + x.masks.nbytes for x in planned.blocks.values())

    assert held(two) == held(twelve) and held(two) <= 2.2 * held(one)
    # Six times as many patterns.
    assert 4 * held(two) <= held(different)
    sizes = []
    for planned in (two, twelve, different):
        planned.save(tmp_path / "p.plan")
        sizes.append((tmp_path / "p.plan").stat().st_size)
    assert sizes[0] <= 1.1 * sizes[1] and 2.5 * sizes[0] <= sizes[2]


def test_heads_that_agree_share_masks_of_the_executor():
    masks = random_masks(2, n_q=256, n_k=256)
    q, k, v = tensors(1, 12, 256, 256)
    held = []
    for group in ([0, 1] * 6, [0] * 11 + [1]):
        planned = make(masks[group], heads=12)
        near(planned(q, k, v), masked(q, k, v, masks[group][None]))
        (executor,) = planned._prepared.values()
        held.append(sum(x.masks.held_bytes for x in executor.launches if x.masks is not None))
    own = make(random_masks(12, n_q=256, n_k=256), heads=12)
    own(q, k, v)
    (executor,) = own._prepared.values()
    most = sum(x.masks.held_bytes for x in executor.launches if x.masks is not None)
    assert max(held) * 3 <= most


@pytest.mark.parametrize("by", ["head", "image", "both"])
def test_plans_are_saved_copied_and_compiled(tmp_path, by):
    mask = random_masks(1 if by == "head" else 2, 1 if by == "image" else H)
    bias = torch.randn(H, N_Q, N_K, generator=torch.Generator().manual_seed(1))
    planned = make(mask[0] if by == "head" else mask, bias=bias)
    q, k, v = tensors(2)
    expected = masked(q, k, v, mask, bias)
    planned.save(tmp_path / "p.plan")
    loaded = tw.load(tmp_path / "p.plan")
    assert loaded.units == planned.units and loaded.digest() == planned.digest()
    near(loaded(q, k, v), expected)
    # As compilers are told.
    assert loaded(q, k, v).stride() == loaded.like_result(q, k, v).stride()
    assert loaded.summary() == planned.summary() and f"{planned.units.patterns} for " in loaded.summary()
    near(planned.with_bias(None)(q, k, v), masked(q, k, v, mask))
    near(copy.deepcopy(planned)(q, k, v), expected)
    compiled = torch.compile(lambda *x: planned(*x) * 2, backend="aot_eager", fullgraph=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = compiled(*leaves)
    near(out, 2 * expected)
    wanted = torch.autograd.grad(2 * masked(*leaves, mask, bias), leaves, torch.ones(out.shape, dtype=torch.float64))
    for found in (
        torch.autograd.grad(out, leaves, torch.ones_like(out)),
        torch.autograd.grad(
            checkpoint(lambda *x: 2 * planned(*x), *leaves, use_reentrant=False), leaves, torch.ones_like(out)
        ),
    ):
        for one, other in zip(found, wanted, strict=True):
            near(one, other.double())


def test_plans_that_differ_in_who_has_which_pattern_have_other_digests():
    masks = random_masks(2)
    digests = {make(masks[group]).digest() for group in ([0, 1, 0], [0, 1, 1], [0, 0, 1])}
    assert len(digests) == 3


def test_an_exported_program_holds_a_plan_by_head():
    planned = make(random_masks(H))

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return planned(q, k, v)

    q, k, v = tensors(2)
    program = torch.export.export(Module(), (q, k, v), strict=False)
    near(program.module()(q, k, v), masked(q, k, v, random_masks(H)[None]))


BAD = {
    "heads": (random_masks(4), {}, r"expected a mask \[3, N_q, N_k\] by head.* found shape \(4, 70, 60\)"),
    "images and heads": (random_masks(2, 2), {}, r"\[B, 3 or 1, N_q, N_k\], found shape \(2, 2, 70, 60\)"),
    "dimensions": (random_masks(2, 2, 2), {}, r"found shape \(2, 2, 2, 70, 60\)"),
    "list of heads": (list(random_masks(2)), {}, "patterns: expected one for each of 3 heads, found 2"),
    "shapes": (
        [*random_masks(2), random_masks(1, n_q=9)[0]],
        {},
        r"expected one shape \(N_q, N_k\), found \(70, 60\), and \(9, 60\) at",
    ),
    "images": (list(random_masks(2)), {"by": "image", "images": 3}, "one for each of 3 images, found 2"),
    "list in a list": ([random_masks(H)] * H, {}, "one pattern in each entry, found an entry that differs by head"),
    "images in a list": (
        [random_masks(2, 1)] * 2,
        {"by": "image"},
        "patterns of one image in each entry, found an entry of 2 images",
    ),
    "no image": (random_masks(H), {"images": 0}, "images: expected an integer of at least 1, found 0"),
    "number of images": (lambda b, h, q, k: q >= k + b, {"shape": (9, 9)}, "state the number of patterns by images="),
    "values": (2 * random_masks(H).int(), {}, "expected a boolean or 0/1 pattern, found the value 2"),
    "not a number": (
        random_masks(H).float().log(),
        {},
        "found the value -inf; give `mask == 0` for",
    ),
    "empty": (torch.stack([*random_masks(2), torch.zeros(N_Q, N_K, dtype=torch.bool)]), {}, "has no entry"),
    "no rows": (torch.zeros(H, 0, 5, dtype=torch.bool), {}, r"found shape \(3, 0, 5\)"),
    "heads of a block mask": (
        flex_attention.create_block_mask(lambda b, h, q, k: q >= k + h, None, 2, 90, 90, device="cpu"),
        {},
        "BlockMask: expected 1 or 3 heads, found 2",
    ),
    "no keys": (
        lambda b, h, q, k: q >= k,
        {"shape": (9, 0)},
        r"shape: expected 2 integers of at least 1, found \(9, 0\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_patterns_are_refused_in_one_line(case):
    pattern, options, message = BAD[case]
    with pytest.raises(PatternError, match=message) as refused:
        make(pattern, **options)
    assert "\n" not in str(refused.value)


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match="by: expected head or image, found 'batch'"):
        make(random_masks(H), by="batch")


def test_a_batch_of_other_images_is_refused():
    planned = make(random_masks(2, 1))
    for call in (planned, torch.compile(planned, backend="eager")):
        with pytest.raises(Exception, match="expected a batch of 2, one for each image's pattern, found 3"):
            call(*tensors(3))


def test_a_bias_of_another_shape_is_refused():
    with pytest.raises(PatternError, match="bias"):
        make(random_masks(H), bias=torch.zeros(H, N_Q, N_K - 1))(*tensors(1))


@pytest.mark.parametrize(
    "units",
    [
        {"by": "head", "heads": H, "group": (0, 0, 0)},
        {"by": "head", "heads": H, "group": (0, 1)},
        {"by": "head", "heads": 0, "group": ()},
        {"by": "head", "heads": H, "group": (0, 2, 1)},
        {"by": "both", "heads": H, "group": (0, 1, 0, 1)},
        {"by": "image", "heads": H, "group": (0, -1, 1)},
    ],
    ids=str,
)
def test_a_file_of_other_units_than_patterns_is_refused(tmp_path, monkeypatch, units):
    planned = make(random_masks(2)[[0, 1, 0]])
    planned.units = Units(**units)
    planned.save(tmp_path / "p.plan")
    with pytest.raises(ArtifactError, match="expected"):
        tw.load(tmp_path / "p.plan")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.randoms())
def test_the_longest_items_come_first_and_patterns_take_turns(pattern, random):
    length = np.array([random.choice([1, 5]) for _ in pattern])
    order = interleaved(np.array(pattern), length)
    assert sorted(order) == list(range(len(pattern)))
    assert (np.diff(length[order]) <= 0).all()


# What a pattern may be told by, and what is refused in every form: masks that are added to scores, and other numbers.
ALLOWED = random_masks(n_q=24, n_k=16)[3:]
VALUES = {
    "bool": ALLOWED,
    "uint8": ALLOWED.byte(),
    "float16": ALLOWED.half(),
    "added": torch.zeros(ALLOWED.shape).masked_fill(~ALLOWED, -torch.inf),
    "least": torch.zeros(ALLOWED.shape).masked_fill(~ALLOWED, torch.finfo(torch.float32).min),
    "NaN": torch.ones(ALLOWED.shape).masked_fill(~ALLOWED, torch.nan),
    "255": ALLOWED.byte() * 255,
    "minus": -ALLOWED.int(),
    "complex": ALLOWED.to(torch.complex64),
}


def block_mask(mask_mod):
    whole = torch.tensor([[[2, 2]]]), torch.arange(2).expand(1, 1, 2, 2)
    return flex_attention.BlockMask.from_kv_blocks(
        *(x.int() for x in whole), BLOCK_SIZE=(11, 8), mask_mod=mask_mod, seq_lengths=(21, 16)
    )


TOLD_BY = {
    "tensor": lambda x: (x, {}),
    "array": lambda x: (x.numpy(), {}),
    "arrays": lambda x: (torch.stack([x, x.flip(0)]).numpy(), {}),
    "sparse": lambda x: (sp.csr_array(x.float().numpy() if x.dtype == torch.half else x.numpy()), {}),
    "coo": lambda x: (x.to_sparse(), {}),
    "mask_mod": lambda x: (lambda b, h, q, k: x[q, k], {"shape": (21, 16)}),
    "mask_mods": lambda x: (lambda b, h, q, k: x[(q + h) % 21, k], {"shape": (21, 16)}),
    "numpy": lambda x: (lambda b, h, q, k: x.numpy()[q.numpy(), k.numpy()], {"shape": (21, 16)}),
    "list": lambda x: ([x, lambda b, h, q, k: x[q, k]], {"shape": (21, 16)}),
    "BlockMask": lambda x: (block_mask(lambda b, h, q, k: x[q, k]), {}),
}


@pytest.mark.parametrize("form", TOLD_BY.values(), ids=TOLD_BY)
def test_a_pattern_is_of_booleans_or_zeros_and_ones_in_every_form(form):
    for name, values in VALUES.items():
        pattern, told = form(values)
        if name in ("bool", "uint8", "float16"):
            found, _ = patterns.read(pattern, heads=2, kind="cpu", **told)
            assert np.array_equal(found[0].to_dense(), ALLOWED.numpy()), name
        else:
            with pytest.raises(PatternError, match=r"expected a boolean or 0/1 pattern, found (the value|NaN|dtype)"):
                patterns.read(pattern, heads=2, kind="cpu", **told)
