"""How lists are made: from numbers, masks, mask functions and bits; what their tensors hold; how they are told."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.slices import mask_of, qkv
from tilewright import slices
from tilewright.core.errors import PatternError
from tilewright.slices.layout import EMPTY, LISTED, LISTED_HIGH, OVERFLOW, STEP


def check_lists(lists, mask):
    """The tensors of the lists hold the keys that `mask` [B, H, G, N_k] flags, as their layout says."""
    counts = mask.sum(-1)
    assert torch.equal(lists.counts.cpu().long(), counts)
    keys = lists.keys.cpu()
    for b, h, g in np.ndindex(*counts.shape):
        kept = mask[b, h, g].nonzero()[:, 0]
        assert torch.equal(keys[b, h, g, : len(kept)].long(), kept)
        tail = keys[b, h, g, len(kept) : -(-len(kept) // STEP) * STEP]
        assert not len(tail) or (tail == kept[-1]).all()
    assert torch.equal(lists.order.cpu().long(), counts.argsort(dim=-1, descending=True, stable=True))
    empty = int((counts.flatten() == 0).nonzero()[-1]) + 1 if (counts == 0).any() else 0
    assert lists.state.tolist() == [0, empty, int(counts.sum()), 0]


def same(one, other):
    """Whether two lists hold the same, but for what is not defined."""
    place = torch.arange(one.layout.capacity, device=one.keys.device)
    held = place < (one.counts[..., None] + STEP - 1) // STEP * STEP
    rest = [torch.equal(x, y) for x, y in zip(one.tensors[1:], other.tensors[1:], strict=True)]
    return one.layout == other.layout and torch.equal(one.keys * held, other.keys * held) and all(rest)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_masks_bits_and_numbers_make_the_same_lists(data, device):
    n_k = data.draw(st.sampled_from([1, 31, 32, 33, 64, 130, 1030]), "N_k")
    groups = data.draw(st.integers(1, 40), "G")
    draw = st.sampled_from([0, 1, 63, 64, 65, n_k])
    counts = [[[min(n_k, data.draw(draw)) for _ in range(groups)] for _ in range(2)]]
    mask = mask_of(counts, n_k)
    lists = slices.from_mask(mask.to(device), 16 * groups, rows=16)
    check_lists(lists, mask)
    bits = lists.pack()
    assert bits.dtype == torch.int32 and bits.shape == (1, 2, groups, -(-n_k // 32) + 1)
    assert same(slices.unpack(bits, lists.layout), lists)
    shape = 16 * groups, n_k
    assert same(slices.from_indices(lists.keys, lists.counts.long(), shape, rows=16, check=True), lists)


def test_a_mask_may_stand_for_all_heads_and_entries(device):
    mask = mask_of([[[5, 70]], [[3, 1]]], 100)
    lists = slices.from_mask(mask.to(device), 200, heads=3)
    check_lists(lists, mask.expand(-1, 3, -1, -1))
    check_lists(slices.from_mask(mask[:1].to(device), 200, batch=2), mask[:1].expand(2, -1, -1, -1))
    # Strided masks.
    turned = mask.mT.contiguous().mT.to(device)
    check_lists(slices.from_mask(turned, 200), mask)


def test_groups_are_ranked_within_their_head_only(device):
    counts = torch.randint(0, 5, (2, 3, 150), generator=torch.Generator().manual_seed(0)).tolist()
    mask = mask_of(counts, 7)
    check_lists(slices.from_mask(mask.to(device), 150 * 16, rows=16), mask)


def test_more_keys_than_31_bits_count(device):
    layout = slices.make_layout(2, 1, 3 * 16, 2**30, rows=16)
    counts = torch.full((2, 1, 3), 2**30, dtype=torch.int32, device=device)
    _, state = slices.operators.executor(layout, counts.device).rank(counts)
    assert int(state[LISTED]) + (int(state[LISTED_HIGH]) << 31) == 6 * 2**30


def test_a_mask_function_lists_what_any_query_of_a_group_sees(device):
    def near(b, h, query, key):
        return (query - key).abs() <= 3 + 5 * h + b

    lists = slices.from_mask_mod(near, (70, 90), batch=2, heads=2, rows=16, device=device)
    for b, h in np.ndindex(2, 2):
        reach = 3 + 5 * h + b
        for g in range(5):
            last = min(16 * g + 15, 69)
            kept = list(range(max(0, 16 * g - reach), min(90, last + reach + 1)))
            assert lists.keys[b, h, g, : len(kept)].tolist() == kept and lists.counts[b, h, g] == len(kept)


def test_the_graph_has_the_keys_of_each_query(device):
    mask = mask_of([[[5, 0, 9], [2, 7, 7]]], 40)
    lists = slices.from_mask(mask.to(device), 35, rows=16)
    for h in range(2):
        assert np.array_equal(lists.graph(0, h).to_dense(), mask[0, h].repeat_interleave(16, 0)[:35])
    dense = [[lists.graph(0, h).density for h in range(2)]]
    assert lists.density().tolist() == pytest.approx(np.array(dense))


def test_runs_are_listed_whole(device):
    mask = torch.zeros(1, 1, 2, 40, dtype=torch.bool)
    mask[0, 0, 0, [3, 39]] = True
    lists = slices.from_mask(mask.to(device), 200, width=16)
    assert lists.keys[0, 0, 0, :24].tolist() == [*range(16), *range(32, 40)] and lists.counts.tolist() == [[[24, 0]]]
    assert same(slices.from_indices(lists.keys, lists.counts, (200, 40), width=16, check=True), lists)


def attended(lists, device):
    """Results of all kinds, of one head dim."""
    layout = lists.layout
    q, k, v = qkv(layout.batch, layout.heads, layout.queries, layout.keys, 64, device=device)
    return [slices.attend(q, k, v, lists), *slices.attend(q, k, v, lists, lse=True), slices.recall(q, k, lists)]


def test_a_list_that_does_not_fit_makes_every_result_nan(device):
    mask = mask_of([[[64, 65, 3], [1, 0, 2]]], 150).to(device)
    lists = slices.from_mask(mask, 300, budget=64 / 150)
    assert lists.state.tolist() == [2, 5, 64 + 64 + 3 + 1 + 2, 0]
    message = r"^budget: expected at most 64 keys a group, found 65 in group 1 of head 0, batch entry 0; a budget of "
    with pytest.raises(PatternError, match=message + r"0\.434 holds the lists of all groups$"):
        lists.check()
    with pytest.raises(PatternError, match=message):
        lists.graph(0, 1)
    # Also after they have been packed, in a layout with room for all.
    larger = lists.layout._replace(capacity=192)
    for made in (lists, *(slices.unpack(lists.pack(), layout) for layout in (lists.layout, larger))):
        assert made.state[OVERFLOW] == 2
        assert all(x.isnan().all() for x in attended(made, device))


def test_groups_without_keys_are_told_where_they_are_not_expected(device):
    lists = slices.from_mask(mask_of([[[3, 2], [1, 0]]], 50).to(device), 200)
    assert lists.state[EMPTY] == 4
    with pytest.raises(PatternError, match=r"^expected every group to have a key, found none in group 1 of head 1"):
        lists.check()
    lists.check(allow_empty=True)


BAD_KEYS = {
    "out of range": ([3, 50], 2),
    "negative": ([-1, 4], 2),
    "twice": ([3, 3], 2),
    "descending": ([4, 3], 2),
    "more than there are": ([3, 4], 3),
    "fewer than none": ([3, 4], -1),
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_numbers_that_are_no_lists_are_never_used(case, device):
    keys, count = BAD_KEYS[case]
    keys = torch.tensor([[[[1, 2], keys]]], device=device)
    counts = torch.tensor([[[2, count]]], device=device)
    message = r"^keys: expected keys from 0 to 49, ascending, and as many as counted, found others in group 1 of head 0"
    with pytest.raises(PatternError, match=message):
        slices.from_indices(keys, counts, (200, 50), check=True)
    assert all(x.isnan().all() for x in attended(slices.from_indices(keys, counts, (200, 50)), device))


@pytest.mark.parametrize("keys,count", [(range(8, 24), 16), (range(12), 12), ([*range(16), *range(48, 50)], 17)])
def test_numbers_that_are_no_whole_runs_are_never_used(keys, count, device):
    keys = torch.tensor(list(keys), device=device).view(1, 1, 1, -1)
    counts = torch.tensor([[[count]]], device=device)
    with pytest.raises(PatternError, match=r"^keys: expected"):
        slices.from_indices(keys, counts, (100, 50), width=16, check=True)


def test_numbers_behind_the_counted_ones_are_not_read(device):
    keys = torch.tensor([[[[1, 2, -7, 10**6]]]], device=device)
    lists = slices.from_indices(keys, torch.tensor([[[2]]], device=device), (100, 50), check=True)
    assert lists.keys[0, 0, 0].tolist() == [1] + 63 * [2]


def test_no_numbers_at_all(device):
    keys = torch.zeros(1, 1, 1, 0, dtype=torch.int32, device=device)
    lists = slices.from_indices(keys, torch.zeros(1, 1, 1, dtype=torch.int32, device=device), (100, 50), check=True)
    out, *_ = attended(lists, device)
    assert not out.any()
