"""Strategies for kept tokens: any batch of them gives the same logits, packed again and again, in any capacity."""

from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tilewright import networks
from tilewright.core.errors import PatternError, Unavailable
from tilewright.masks import deit as pattern
from tilewright.networks import batching
from tilewright.networks.batching import ragged
from tilewright.networks.token_layouts import Packed, Rectangle
from tilewright.packed.pruners import Choice
from tilewright_study.experiments.pruned.captured import Captured

N = 17
create = partial(networks.create, "deit", variant="tiny", image_size=64, num_classes=10)


@pytest.fixture(autouse=True, scope="module")
def narrow():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pattern.VARIANTS, "tiny", (32, 2))
        yield


class Masks(nn.Module):
    """A pruner that keeps what masks [B, N] of an image's first tokens hold, one after the other."""

    def __init__(self, *masks):
        super().__init__()
        self.masks = masks
        self.before, self.inside = tuple(range(2, 2 + len(masks))), ()

    def forward(self, time, x, layout, heads):
        return x, Choice(self.masks[time][:, : layout.length] & layout.valid, 1, layout.length)


@cache
def drawn_network():
    network = create(batching="padded")
    generator = torch.Generator().manual_seed(3)
    for tensor in network.state_dict().values():
        tensor.normal_(0, 0.3, generator=generator)
    return network


def logits(name, masks, capacity=None, with_layouts=False):
    network = drawn_network().with_batching(name)
    network.pruner = Masks(*masks)
    images = torch.randn(len(masks[0]), 3, 64, 64, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        return network(images, capacity, with_layouts)


def mask(*kept):
    """Masks of images that keep the class token and the tokens listed."""
    made = torch.zeros(len(kept), N, dtype=torch.bool)
    for image, tokens in zip(made, kept, strict=True):
        image[[0, *tokens]] = True
    return made


MASKS = {
    "class-alone": mask([], [], []),
    "all": torch.ones(2, N, dtype=torch.bool),
    "one-image": mask([3, 9]),
    "extremes": mask([], range(N), [5], range(1, N)),
    "one-patch": mask([1], [N - 1]),
}


@pytest.mark.parametrize("name", [each for each in batching.NAMES if each not in ("padded", "varlen")])
@pytest.mark.parametrize("case", MASKS)
def test_batchings_agree_at_the_extremes(case, name):
    masks, lengths = [MASKS[case]], MASKS[case].sum(1)
    if name == "gathered" and lengths.unique().numel() > 1:
        least, most = lengths.aminmax()
        with pytest.raises(Unavailable, match=f"equal numbers of tokens, found from {least} to {most}"):
            logits(name, masks)
    else:
        torch.testing.assert_close(logits(name, masks), logits("padded", masks), atol=1e-4, rtol=0)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.booleans(), min_size=N, max_size=N), min_size=3, max_size=3), min_size=1, max_size=3)
)
def test_batchings_agree_on_any_masks(drawn):
    masks = [torch.tensor(batch) for batch in drawn]
    for kept in masks:
        kept[:, 0] = True
    wanted = logits("padded", masks)
    # The kept tokens of an image alone, which need no batching.
    for name in ("padded_unfused", "padded_kept", "ragged"):
        torch.testing.assert_close(logits(name, masks), wanted, atol=1e-4, rtol=0)
    alone, _ = logits("padded_kept", [kept[:1] for kept in masks], None, True)
    assert alone.isfinite().all()


@pytest.mark.parametrize("spare", [0, 1, 13, 10_000])
def test_any_capacity_that_is_enough_gives_the_same(spare):
    masks = [MASKS["extremes"]]
    enough = int(masks[0].sum())
    found, (layout,) = logits("ragged", masks, enough + spare, True)
    assert layout.packing.capacity == min(enough + spare, 4 * N)
    layout.check()
    torch.testing.assert_close(found, logits("padded", masks), atol=1e-5, rtol=0)


def test_a_batch_that_did_not_fit_is_nan_when_packed_again():
    masks = [MASKS["extremes"], mask([], range(N), [], [1, 4])]
    assert logits("ragged", masks, int(masks[0].sum())).isfinite().all()
    assert logits("ragged", masks, int(masks[0].sum()) - 1).isnan().all()


@pytest.mark.parametrize("places", [N, N + 3])
def test_a_capacity_is_shared_out_evenly_among_rectangles(places):
    masks = [MASKS["extremes"]]
    found, (layout,) = logits("padded_kept", masks, 4 * places + 3, True)
    assert layout.length == N
    layout.check()
    torch.testing.assert_close(found, logits("padded", masks), atol=1e-5, rtol=0)


def test_too_few_places_are_told_and_never_truncate():
    kept, fewer = MASKS["extremes"], mask([1, 2], [3], [4], [5, 6])
    for masks, length, most in (
        ([kept], N - 1, N),
        ([fewer, kept[:, :3]], 2, 3),
        ([torch.ones_like(kept), kept], 1, N),
    ):
        found, made = logits("padded_kept", masks, 4 * length + 3, True)
        assert found.isnan().all()
        with pytest.raises(PatternError, match=f"positions for the {most} tokens of an image, found {length}"):
            made[0].check()
    found, (layout,) = logits("padded_kept", [fewer], 4 * 3, True)
    assert layout.length == 3
    torch.testing.assert_close(found, logits("padded", [fewer]), atol=1e-5, rtol=0)


def test_too_small_a_capacity_is_told_and_never_truncates():
    kept = MASKS["extremes"]
    for masks in ([kept], [torch.ones_like(kept), kept], [kept, kept]):
        capacity = int(masks[0].sum()) - 1
        found, made = logits("ragged", masks, capacity, True)
        assert found.isnan().all()
        with pytest.raises(PatternError, match=f"at least the {capacity + 1} tokens kept, found {capacity}"):
            made[0].check()


def test_numbers_that_the_host_knows_are_the_capacity():
    x, layout = torch.randn(4, N, 8), Rectangle(4, N, torch.device("cpu"))
    kept = MASKS["extremes"]
    for least, capacity in ((N, None), (N - 1, 3)):
        _, packed = ragged.narrow(x, layout, Choice(kept, least, N), capacity)
        assert packed.packing.capacity == 4 * N
    _, packed = ragged.narrow(x, layout, Choice(kept, 1, N), None)
    assert packed.packing.capacity == kept.sum()


@pytest.mark.parametrize("even", [False, True])
def test_layouts_say_the_same_of_the_same_tokens(even):
    x, kept = torch.randn(4, N, 2, 4), mask([1, 2], [3, 4], [N - 2, N - 1], [1, N - 1]) if even else MASKS["extremes"]
    whole = Rectangle(4, N, x.device)
    rows, lengths = whole.compact(x.flatten(2), kept, N)
    rectangle = Rectangle(4, N, x.device, lengths)
    choice = Choice(kept, 3, 3) if even else Choice(kept, 1, N)
    packed_rows, packed = ragged.narrow(x.flatten(2), whole, choice, int(kept.sum()) + 5)
    assert isinstance(packed, Packed) and packed.even == even
    if even:
        rows, rectangle = rows[:, :3], Rectangle(4, 3, x.device)
    assert torch.equal(packed.valid, rectangle.valid)
    padded = packed.padded(packed_rows)
    assert torch.equal(padded[packed.valid], rectangle.padded(rows)[rectangle.valid])
    assert padded.isfinite().all()
    assert torch.equal(packed.first(packed_rows.unflatten(1, (2, 4))), x[:, 0])
    place, other = torch.tensor([0, 2, 0, 1]), torch.randn(4, 8)
    changed = packed.padded(packed.put(packed_rows, place, other))
    assert torch.equal(changed[packed.valid], rectangle.put(rows, place, other)[rectangle.valid])
    assert torch.equal(changed[range(4), place], other)


PRUNERS = {"threshold_l2": {"keep_range": (0.3, 0.7)}, "evit": {}, "ats": {}, "dynamicvit": {"predictor": "random"}}


# By themselves, padded and packed rows with a pruner that keeps a range, and a learned one with packed rows.
QUICK = ("padded", "threshold_l2"), ("ragged", "threshold_l2"), ("ragged", "dynamicvit")
COMPILED = [
    pytest.param(name, pruner, marks=[] if (name, pruner) in QUICK else pytest.mark.slow)
    for name in ("padded", "padded_unfused", "padded_kept", "ragged")
    for pruner in PRUNERS
]


@pytest.mark.parametrize(("name", "pruner"), COMPILED)
def test_pruned_networks_compile_whole(monkeypatch, name, pruner):
    # Compiling takes as long as there are blocks: these hold two prunings of each pruner.
    monkeypatch.setattr(pattern, "DEPTH", 7)
    network = create(batching=name, pruner=pruner, **PRUNERS[pruner])
    images = torch.randn(2, 3, 64, 64)
    torch.compiler.reset()
    compiled = torch.compile(network, fullgraph=True, dynamic=False, backend="eager")
    with torch.inference_mode():
        assert torch.equal(compiled(images, 2 * N, True)[0], network(images, 2 * N))


def test_varlen_needs_a_gpu():
    with pytest.raises(Unavailable, match="runs on an NVIDIA GPU only, found cpu"):
        logits("varlen", [MASKS["all"]])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention's variable lengths need a GPU")
def test_varlen_needs_16_bits():
    with pytest.raises(Unavailable, match=r"expected 16-bit tokens, found torch\.float32"):
        create(batching="varlen", pruner="evit").cuda()(torch.randn(1, 3, 64, 64, device="cuda"))


@torch.no_grad()
def test_a_captured_network_takes_the_least_capacity_that_is_enough():
    network = create(batching="ragged", pruner="threshold_l2", threshold=1.0)
    images = torch.randn(3, 3, 64, 64)
    wanted, (layout,) = network(images, None, True)
    kept = int(layout.valid.sum())
    captured = Captured(network, [3 * N, kept - 1, kept + 2])
    for capacity, bucket in ((kept, kept + 2), (kept + 2, kept + 2), (kept + 3, 3 * N), (None, 3 * N)):
        torch.testing.assert_close(captured(images, capacity), wanted, atol=1e-5, rtol=0)
        captured.check()
        assert captured.layouts[0].packing.capacity == bucket
    assert captured(images, 1).isnan().all()
    with pytest.raises(PatternError, match=f"at least the {kept} tokens kept, found {kept - 1}"):
        captured.check()
    with pytest.raises(PatternError, match=f"capacity: expected at most {3 * N} tokens, found {3 * N + 1}"):
        captured(images, 3 * N + 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("pruner", ["threshold_l2", "evit", "ats"])
def test_a_graph_is_replayed_for_other_lengths(pruner):
    options = {"threshold": 1.0} if pruner == "threshold_l2" else {}
    network = create(batching="ragged", pruner=pruner, **options).cuda().half()
    captured = Captured(network, [4 * N])
    for seed in range(3):
        images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(seed)).cuda().half()
        with torch.inference_mode():
            wanted = network(images)
        torch.testing.assert_close(captured(images), wanted, atol=2e-2, rtol=0)
        captured.check()
    assert len(captured._graphs) == 1


@pytest.mark.parametrize("capacities", [[], [0, 8]])
def test_capacities_that_hold_no_token_are_refused(capacities):
    with pytest.raises(PatternError, match="capacities: expected at least one, of at least a token"):
        Captured(create(batching="ragged"), capacities)
