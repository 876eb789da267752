"""Patterns by head and by image on a GPU, where there is none under Triton's interpreter, against masked attention."""

import numpy as np
import pytest
import torch

from helpers import plans
from helpers.gpu import TRITON_DEVICE as DEVICE
from helpers.gpu import cases
from helpers.hopper import compiled
from tilewright import graph, reference
from tilewright.attention.cuda import backward, bias_gradients, tile_kernel
from tilewright.attention.cuda import executor as cuda_executor
from tilewright.attention.masks import Bias
from tilewright.attention.units import Units
from tilewright.core.errors import PatternError

H, D = 2, 16
TILES = "64x1", "16x1"
GROUPS = {
    "head": Units("head", H, (1, 0)),
    "image": Units("image", H, (0, 1, 0)),
    "both": Units("both", H, (0, 1, 2, 0, 1, 1)),
}
BATCH = 3


def prepared(units, n_q=70, n_k=60, split_keys=32, seed=0, dtype=torch.float32, names=TILES, ordered=False, **options):
    """``(executor, q, k, v, masks bool [B, H, N_q, N_k])`` of random patterns, in a random order and schedule."""
    found = [plans.pattern(n_q, n_k, seed=seed + g) for g in range(units.patterns)]
    rng = np.random.default_rng(seed)
    rows, keys = rng.permutation(n_q), rng.permutation(n_k)
    stacked = graph.stacked([graph.from_pattern(x) for x in found])
    order = (np.arange(units.patterns)[:, None] * n_q + rows).ravel()
    covers = plans.covers(stacked.reordered(order, keys), names, 64)
    schedule = plans.scheduled(covers, split_keys, seed)
    given = {"heads": H, "head_dim": D, "dtype": dtype, "device": DEVICE, "row_order": rows, "col_order": keys}
    call = cuda_executor.prepare(schedule, covers, units=units, ordered=ordered, **given, **options)
    make = torch.Generator().manual_seed(seed)
    tokens = [torch.randn(BATCH, H, n, D, generator=make).to(DEVICE, dtype) for n in (n_q, n_k, n_k)]
    shape = {"head": (1, H), "image": (BATCH, 1), "both": (BATCH, H)}[units.by]
    masks = torch.from_numpy(np.stack([found[g] for g in units.group])).view(*shape, n_q, n_k).expand(BATCH, H, -1, -1)
    return call, *tokens, masks


def masked(q, k, v, masks, bias=None, scale=None):
    """Attention in float64; bias: [H, N_q, N_k]."""
    scores = q.cpu().double() @ k.cpu().double().mT * (D**-0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias.double()
    seen = masks.any(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(~masks & seen, -torch.inf), -1) * seen @ v.cpu().double()


def check(call, q, k, v, masks, **options):
    expected = masked(q, k, v, masks, **options)
    for _ in range(2):
        # Twice: the counters of split blocks are to be as they were.
        result = call(q, k, v).cpu()
        assert not result.isnan().any()
        assert reference.relative_error(result, expected) <= reference.TOLERANCE[q.dtype]


@pytest.mark.parametrize("by, dtype", cases([*GROUPS], [torch.float32, torch.float16]), ids=str)
def test_each_has_its_pattern(by, dtype):
    check(*prepared(GROUPS[by], dtype=dtype))


@pytest.mark.parametrize("by, bias, split_keys", cases([*GROUPS], [False, True], [32, None], times=2))
def test_gradients(monkeypatch, by, bias, split_keys):
    monkeypatch.setattr(backward.backward_lists.facts, "SPLIT_KEYS", split_keys)
    # Of a size that shows where the greatest of another head or image is taken off.
    table = 20 * torch.randn(H, 70, 60, generator=torch.Generator().manual_seed(1)) if bias else None
    call, *tokens, masks = prepared(GROUPS[by], bias=table)
    grad = torch.randn(tokens[0].shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    leaves = [x.cpu().double().requires_grad_() for x in tokens]
    expected = torch.autograd.grad(masked(*leaves, masks, bias=table), leaves, grad.cpu().double())
    out, first = call(*tokens), None
    for _ in range(2):
        # Twice: the counters of split blocks are to be as they were, and the sums have one order.
        found = backward.gradients(call, *tokens, out, grad)
        for x, y in zip(found, expected, strict=True):
            # A gradient sums products of four rounded factors where the result sums those of two.
            errors = (x.cpu().double() - y).flatten(2).norm(dim=2) / y.flatten(2).norm(dim=2)
            assert errors.max() <= 2 * reference.TOLERANCE[x.dtype]
        assert first is None or all(map(torch.equal, first, found))
        first = found


@pytest.mark.parametrize(
    "by, dtype, of",
    cases([*GROUPS], [torch.float32, torch.float16], [("dense", 1024), ("table", 1024), ("table", 1)]),
    ids=str,
)
def test_gradients_of_a_bias(monkeypatch, by, dtype, of):
    # Few programs sum many uses of a tile each.
    kind, programs = of
    monkeypatch.setattr(bias_gradients, "PROGRAMS", programs)
    monkeypatch.setattr(backward.backward_lists.facts, "SPLIT_KEYS", 32)
    make = torch.Generator().manual_seed(1)
    values = 20 * torch.randn(H, 70, 60, generator=make)
    at = torch.arange(70 * 60).view(70, 60)
    bias = values
    if kind == "table":
        # In patterns of repeated tiles, too: equal places of rows and keys have equal entries.
        values, at = values[:, 0, :13].contiguous(), (torch.arange(70)[:, None] + 3 * torch.arange(60)) % 13
        bias = Bias(values, lambda rows, keys: (rows + 3 * keys) % 13)
    call, *tokens, masks = prepared(GROUPS[by], bias=bias, dtype=dtype)
    grad = torch.randn(tokens[0].shape, generator=make).to(DEVICE, dtype)
    # Those that it was made with, and others.
    for given in (None, torch.randn(values.shape, generator=make)):
        now = call if given is None else call.with_bias(given.to(DEVICE))
        table = (values if given is None else given).double().requires_grad_()
        leaves = [*(x.cpu().double().requires_grad_() for x in tokens), table]
        pairs = table.flatten(1)[:, at]
        pairs.retain_grad()
        masked(*leaves[:3], masks, bias=pairs).backward(grad.cpu().double())
        out, first = now(*tokens), None
        for _ in range(2 if given is None else 1):
            found = backward.gradients_with_bias(now, *tokens, out, grad)
            assert found[3].dtype == torch.float32
            for x, leaf in zip(found, leaves, strict=True):
                # Gradients of pairs may cancel each other in an entry of a table; their errors do not.
                norm = torch.maximum(leaf.grad.norm(), pairs.grad.norm()) if leaf is table else leaf.grad.norm()
                assert (x.cpu().double().view(leaf.shape) - leaf.grad).norm() <= 2 * reference.TOLERANCE[dtype] * norm
            assert first is None or all(map(torch.equal, first, found))
            first = found


def test_gradients_of_a_batch_of_other_images_are_refused():
    call, q, k, v, _ = prepared(GROUPS["image"])
    out = call(q, k, v)
    with pytest.raises(PatternError, match="expected a batch of 3, one for each image's pattern, found 2"):
        backward.gradients(call, q[:2], k[:2], v[:2], out[:2], out[:2])


@pytest.mark.parametrize("by, kind", cases([*GROUPS], ["dense", "table"]))
def test_a_bias(by, kind):
    table = torch.randn(H, 70, 60, generator=torch.Generator().manual_seed(1))
    bias = full = table
    if kind == "table":
        bias = Bias(table[:, 0, :13].contiguous(), lambda rows, keys: (rows + 3 * keys) % 13)
        full = bias.table[:, (torch.arange(70)[:, None] + 3 * torch.arange(60)) % 13]
    check(*prepared(GROUPS[by], bias=bias), bias=full)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 2.0])
def test_scales(scale):
    check(*prepared(GROUPS["both"], scale=scale), scale=scale)


@pytest.mark.parametrize("seed", range(3))
def test_ordered_tokens(seed):
    call, q, k, v, masks = prepared(GROUPS["head"], ordered=True, seed=seed)
    rows, keys = (torch.from_numpy(order) for order in call.source.common.natural)
    check(call, q, k, v, masks[:, :, rows][:, :, :, keys])


@pytest.mark.parametrize("across", [0, 12])
def test_it_compiles_for_hopper(across):
    constants = {"BLOCK_M": 64, "BLOCK_N": 64, "HEAD_DIM": 64, "D0": 64, "D1": 0, "RANK": 16, "HEADS": 12}
    constants |= {"MASK_HEADS": 1, "FULL": True, "PARTIAL": True, "SPLIT": True, "ORDERED": False, "SIGN": 1}
    constants |= {"NUM_STAGES": 2, "WIDE": False, "ACROSS": across}
    types = dict.fromkeys(("item_ptr", "row_ptr", "key_ptr", "part_ptr", "count_ptr"), "*i32")
    types |= {"acc_ptr": "*fp32", "stat_ptr": "*fp32", "scale_log2": "fp32"}
    given = {"free": ("n_items", "n_hb"), "num_warps": 4}
    made = compiled(tile_kernel.__name__, "tilewright_tile_attention", constants, types, **given)
    assert made.ptx.count("wgmma.mma_async") >= 8 and made.spilled == [0, 0]


def test_lists_of_patterns_that_agree_are_held_once():
    own = Units("head", H, (0, 1))
    held = []
    for units in (Units("both", H, (0, 1) * BATCH), own):
        call, *tokens, masks = prepared(units)
        check(call, *tokens, masks)
        held.append(sum(x.lists.keys.nbytes + x.lists.right.nbytes + x.lists.left.nbytes for x in call.launches))
    assert held[0] == held[1]


def test_other_images_than_patterns_are_refused():
    call, q, k, v, _ = prepared(GROUPS["image"])
    with pytest.raises(PatternError, match="expected a batch of 3, one for each image's pattern, found 2"):
        call(q[:2], k[:2], v[:2])
