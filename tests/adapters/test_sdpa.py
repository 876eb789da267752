"""Slices in place of torch's attention, in modules of others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilewright import slices
from tilewright.adapters import sdpa
from tilewright.core.errors import ConfigError, PatternError

ALL = {"tokens": 1, "keep": 1.0, "budget": 1.0}


def draw(b=2, h=2, n=300, d=64):
    return torch.randn(3, b, h, n, d, generator=torch.Generator().manual_seed(0)).unbind(0)


class Module(nn.Module):
    """Somebody's attention."""

    def forward(self, x, **more):
        if more.pop("fails", False):
            raise ValueError("somebody's error")
        return F.scaled_dot_product_attention(x, x, x, **more)


def masked(lengths, n=300):
    return (torch.arange(n) < torch.tensor(lengths)[:, None])[:, None, None]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("mask", [None, masked([300, 171]), masked([64])], ids=["none", "two", "one"])
def test_all_keys_are_dense_attention(mask, scale):
    q, k, v = draw()
    attention = sdpa.Slices(**ALL)
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    assert torch.allclose(attention(q, k, v, mask, scale=scale), expected, atol=1e-5)
    assert attention.calls == {"slices": 1}


def test_fewer_keys_are_softmax_over_the_lists_without_what_a_mask_leaves_out():
    q, k, v = draw()
    stated = {"keep": 0.3, "budget": 0.5, "rows": 32, "always": [(290, 300)]}
    allowed = masked([300, 171])
    found = sdpa.Slices(tokens=1, last=10, keep=0.3, budget=0.5, rows=32)(q, k, v, allowed)
    lists = slices.predict(q, k, **stated)
    seen = torch.zeros(2, 2, 300, 300, dtype=torch.bool)
    for b in range(2):
        for h in range(2):
            for g in range(lists.layout.groups):
                keys = lists.keys[b, h, g, : lists.counts[b, h, g]].long()
                seen[b, h, g * 32 : g * 32 + 32, keys] = True
    assert seen[1, ..., 171:].any() and not seen.all()
    assert torch.allclose(found, F.scaled_dot_product_attention(q, k, v, seen & allowed), atol=1e-5)


def test_lists_are_shortened_whatever_they_hold():
    counts = torch.tensor([[[0, 1, 64, 65, 128]]])
    keys = torch.arange(128).mul(2).expand(1, 1, 5, 128).contiguous()
    lists = slices.from_indices(keys, counts, (5 * 16, 256), rows=16)
    for length in (0, 1, 2, 100, 129, 256):
        found = sdpa.shortened(lists, torch.arange(256)[None] < length)
        assert found.counts.tolist() == counts.clamp(max=-(-length // 2)).tolist()
        assert found.order.sort(-1).values.tolist() == [[[0, 1, 2, 3, 4]]]


def test_a_mask_with_holes_is_nan_and_says_so():
    q, k, v = draw()
    allowed = masked([300, 171])
    allowed[1, ..., 5] = False
    found = sdpa.Slices(**ALL)(q, k, v, allowed)
    assert found.isnan().all()
    with pytest.raises(PatternError, match="batch entry 1"):
        sdpa.shortened(slices.predict(q, k, keep=1.0, budget=1.0), allowed[:, 0, 0]).check()


@pytest.mark.parametrize(
    ("settings", "more", "reason"),
    [
        ({"tokens": 301}, {}, "few tokens"),
        ({}, {"is_causal": True}, "dropout or causal mask"),
        ({}, {"attn_mask": torch.zeros(1, 1, 300, 300)}, "mask"),
        ({}, {"k": 200}, "queries and keys differ"),
        ({}, {"d": 32}, "head dim"),
        ({}, {"gradient": True}, "gradient"),
    ],
)
def test_other_calls_go_to_torch_and_are_counted(settings, more, reason):
    attention = sdpa.Slices(**(ALL | settings))
    q, k, v = draw(d=more.pop("d", 64))
    n = more.pop("k", 300)
    k, v = k[:, :, :n], v[:, :, :n]
    if more.pop("gradient", False):
        q = q.clone().requires_grad_()
    found = attention(q, k, v, **more)
    assert torch.equal(found, F.scaled_dot_product_attention(q, k, v, **more))
    assert attention.calls == {reason: 1}


def test_somebodys_module_calls_slices_inside_only():
    x, module, attention = draw()[0], Module(), sdpa.Slices(tokens=1, keep=0.2, budget=0.3)
    expected = module(x)
    with attention.replacing():
        found = module(x)
    assert attention.calls["slices"] == 1 and not torch.allclose(found, expected, atol=1e-3)
    assert torch.equal(module(x), expected)
    handle = attention.attach(module)
    assert torch.equal(module(x), found) and attention.calls["slices"] == 2
    with pytest.raises(ValueError, match="somebody"):
        module(x, fails=True)
    assert torch.equal(F.scaled_dot_product_attention(x, x, x), expected)
    handle.remove()
    assert torch.equal(module(x), expected) and attention.calls["slices"] == 2


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="unknown field `kept`; settings: by, budget, mass, keep"):
        sdpa.Slices(kept=0.3)
    with pytest.raises(ConfigError, match="expected one of mass, keep and threshold"):
        sdpa.Slices(tokens=1, keep=0.3, mass=0.9)(*draw())
