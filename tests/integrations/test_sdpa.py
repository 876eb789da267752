"""Slices in place of torch's attention, in modules of others."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tilewright import slices
from tilewright.core.errors import ConfigError, PatternError, Unavailable
from tilewright.integrations import diffusers, sdpa

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
    stated = {"keep": 0.3, "budget": 0.5, "rows": 32}
    lengths = torch.tensor([300, 291])
    found = sdpa.Slices(tokens=1, first=7, last=10, **stated)(q, k, v, masked(lengths))
    lists = slices.predict(q, k, text=(7, 10), lengths=lengths, **stated)
    seen = torch.stack([torch.from_numpy(lists.graph(b, h).to_dense()) for b in range(2) for h in range(2)])
    assert not seen[2:, :, 291:].any() and seen[:, :, 290].all() and 0.3 < seen.float().mean() < 0.5
    expected = F.scaled_dot_product_attention(q, k, v, seen.unflatten(0, (2, 2)))
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("length", [1, 171, 299, 300])
def test_lengths_are_those_of_a_mask(length):
    assert sdpa.lengths_of(masked([300, length])).tolist() == [300, length]


@pytest.mark.parametrize("wrong", ["hole", "first", "none"])
def test_a_mask_that_leaves_out_others_is_nan_and_can_be_told(wrong):
    q, k, v = draw()
    allowed = masked([300, 171])
    allowed[1, ..., {"hole": 5, "first": slice(0, 9), "none": slice(None)}[wrong]] = False
    found = sdpa.Slices(**ALL)(q, k, v, allowed)
    assert found.isnan().all()
    with pytest.raises(
        PatternError, match=r"^lengths: expected .* a mask that leaves them alone in, .* batch entry 1$"
    ):
        sdpa.Slices(check=True, **ALL)(q, k, v, allowed)
    assert not sdpa.Slices(check=True, **ALL)(q, k, v, masked([300, 171])).isnan().any()


@pytest.mark.parametrize(
    ("settings", "more", "reason"),
    [
        ({"tokens": 301}, {}, "few tokens"),
        ({"first": 100, "last": 200}, {}, "text alone"),
        ({}, {"is_causal": True}, "dropout or causal mask"),
        ({}, {"attn_mask": torch.zeros(1, 1, 300, 300)}, "mask"),
        ({}, {"k": 200}, "queries and keys differ"),
        ({}, {"d": 32}, "head dim"),
    ],
)
def test_other_calls_go_to_torch_and_are_counted(settings, more, reason):
    attention = sdpa.Slices(**(ALL | settings))
    q, k, v = draw(d=more.pop("d", 64))
    n = more.pop("k", 300)
    k, v = k[:, :, :n], v[:, :, :n]
    found = attention(q, k, v, **more)
    assert torch.equal(found, F.scaled_dot_product_attention(q, k, v, **more))
    assert attention.calls == {reason: 1}


def test_calls_by_slices_have_gradients():
    attention = sdpa.Slices(**ALL)
    q, k, v = (x.clone().requires_grad_() for x in draw())
    found = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    assert attention.calls == {"slices": 1}
    for one, other in zip(
        found, torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def either(function, *arguments, **named):
    """What a call gives, or the class of what it raises."""
    torch.manual_seed(0)
    try:
        return function(*arguments, **named)
    except Exception as error:
        return type(error)


NAMES = "b", "h", "n", "d"
SIZES = {"b": [0, 1, 2], "h": [1, 2, 4], "n": [0, 1, 5, 40], "d": [64, 64, 64, 32, 0]}


@st.composite
def calls(draw):
    """Arguments of torch's function: most calls are for slices but for one thing, or for nothing."""

    def one(usual, *others):
        return draw(st.sampled_from([usual] * 3 + list(others)))

    size = {name: draw(st.sampled_from(SIZES[name])) for name in NAMES}
    skipped, drawn, tensors = one(0, 1), torch.Generator().manual_seed(draw(st.integers(0, 9))), []
    for i in range(3):
        shape = [size[name] if i == 0 or one(True, False) else one(size[name], 1, 2) for name in NAMES]
        shape = shape[skipped:]
        x = torch.randn(shape, generator=drawn).to(one(torch.float32, torch.float64, torch.bfloat16, torch.int32))
        x = one(lambda x: x, lambda x: x.mT.contiguous().mT, lambda x: x[..., ::2], lambda x: x.transpose(-3, -2))(x)
        tensors.append(one(x, x.tolist() if x.numel() < 4 else x, x.requires_grad_(x.is_floating_point())))
    b, n = max(1, size["b"]), size["n"]
    masks = torch.ones(b, 1, 1, n) > 0, torch.ones(n, n).tril() > 0, torch.zeros(1, 1, 1, n), torch.ones(3, 3, 3, 3) > 0
    return tensors, {
        "attn_mask": one(None, *masks),
        "dropout_p": one(0.0, 0.5, 1.5, -0.5),
        "is_causal": one(False, True),
        "scale": one(None, 0.3, 0.0, -1.0, float("inf"), 2, "a"),
        "enable_gqa": one(False, True),
    }


@given(calls(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_call_gives_what_torchs_function_gives(call, autocast):
    tensors, named = call
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        wanted = either(F.scaled_dot_product_attention, *tensors, **named)
        found = either(sdpa.Slices(**ALL), *tensors, **named)
    if isinstance(wanted, type):
        assert found is wanted
    else:
        close = {"atol": 2e-2, "rtol": 2e-2} if wanted.dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
        torch.testing.assert_close(found, wanted, equal_nan=True, **close)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_dense_tokens_attend_to_all_and_are_listed_by_all_wherever_they_lie(data):
    first, last = data.draw(st.sampled_from([(0, 0), (12, 0), (0, 8), (12, 8)]), "text")
    video = data.draw(st.integers(40, 90), "video") // 4 * 4
    n, more = first + video + last, {"rows": 16, "keep": 0.6, "least": 1}
    begin = data.draw(st.integers(0, n - 2), "begin")
    ranges = [(begin, data.draw(st.integers(begin + 1, min(n, begin + 20)), "end"))] if data.draw(st.booleans()) else []
    # Text of which an end is padding.
    padding = data.draw(st.integers(1, 7), "padding") if first + last and data.draw(st.booleans(), "padded") else 0
    text = [*range(first), *range(n - last, n)]
    dense = [i for each in ranges for i in range(*each) if i not in text]
    order = [*dense, *(i for i in range(n) if i not in dense and i not in text), *text]
    allowed = torch.ones(2, 1, 1, n, dtype=torch.bool)
    allowed[1, 0, 0, text[len(text) - padding :] if padding else []] = False

    q, k, v = draw(n=n)
    ordered = [x[:, :, order] for x in (q, k, v)]
    ends = {"text": (len(dense), len(text)), "lengths": torch.tensor([n, n - padding])}
    lists = slices.predict(ordered[0], ordered[1], budget=1.0, **ends, **more)
    expected = torch.empty_like(q)
    expected[:, :, order], sums = slices.attend(*ordered, lists, lse=True)
    attention = sdpa.Slices(tokens=1, first=first, last=last, dense=ranges, budget=1.0, **more)
    mask = allowed if padding else None
    out, lse = attention.both(q, k, v, mask, lse=True)
    assert torch.allclose(out, expected, atol=1e-5) and torch.allclose(lse[:, :, order], sums, atol=1e-5)
    assert attention.calls == {"slices": 1}

    # Some queries alone.
    lo = data.draw(st.integers(0, n - video // 2), "lo")
    own = slice(lo, lo + video // 2 + 1)
    if set(range(*own.indices(n))) - set(text) - set(dense):
        found, some = attention.both(q, k, v, mask, lse=True, own=own)
        assert torch.allclose(found, out[:, :, own], atol=1e-6) and torch.allclose(some, lse[:, :, own], atol=1e-6)

    # Four processes, one after the other, each with a fourth of each kind of token.
    kinds = torch.arange(n).split([first, video, last])
    shared = torch.cat([kind.chunk(4)[part] for part in range(4) for kind in kinds if len(kind)])
    attention = sdpa.Slices(tokens=1, first=first, last=last, budget=1.0, **more)
    whole = attention(q, k, v, mask)
    found, _ = attention.both(*(x[:, :, shared] for x in (q, k, v)), allowed[..., shared] if padding else None, parts=4)
    assert torch.allclose(found, whole[:, :, shared], atol=1e-6)


def test_calls_compile_as_one_graph():
    q, k, v = draw()
    attention = sdpa.Slices(tokens=1, first=9, dense=[(20, 30)], keep=0.3, budget=0.5, rows=32)
    # Padding in the text, which goes last.
    mask = masked([300, 300])
    mask[1, ..., 7:9] = False
    expected = attention(q, k, v, mask)
    call = torch.compile(lambda *given: 1 + attention(*given), backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(call(q, k, v, mask), 1 + expected) and not expected.isnan().any()


def test_a_mask_of_tokens_is_ranges():
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 1], dtype=torch.bool)
    assert sdpa.ranges_of(mask) == sdpa.ranges_of(mask.numpy()) == [(0, 2), (3, 4), (6, 7)]
    assert sdpa.Slices(dense=mask).settings.dense == ((0, 2), (3, 4), (6, 7))
    assert sdpa.ranges_of(~mask | mask) == [(0, 7)] and sdpa.ranges_of(mask & ~mask) == []


def test_settings_change_in_a_context_alone():
    q, k, v = draw()
    attention = sdpa.Slices(**ALL)
    dense = attention(q, k, v)
    with pytest.raises(ConfigError, match="unknown field `kept`"), attention.using(kept=0.3):
        pass
    with attention.using(keep=0.2) as same:
        assert same is attention and not torch.allclose(attention(q, k, v), dense, atol=1e-3)
    assert torch.equal(attention(q, k, v), dense)


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
    with pytest.raises(ConfigError, match="expected one of mass, threshold and keep"):
        sdpa.Slices(tokens=1, threshold=0.3, mass=0.9)(*draw())
    with pytest.raises(ConfigError, match=r"^dense: expected ranges \(first, end\) of 300 tokens, found \(9, 301\)$"):
        sdpa.Slices(**ALL, dense=[(9, 301)])(*draw())
    with pytest.raises(
        ConfigError, match=r"^steps: expected a call inside of diffusers\.denoising, .*, found another$"
    ):
        sdpa.Slices(**ALL, steps={"refresh": [0]})(*draw())
    with pytest.raises(ConfigError, match=r"^dense: expected ranges .* outside of diffusers\.denoising, found 'text'$"):
        sdpa.Slices(**ALL, dense=["text"])(*draw())
    with pytest.raises(ConfigError, match=r"^dense: expected a mask bool \[N\] of tokens, found torch.float32"):
        sdpa.Slices(**ALL, dense=torch.ones(3))
    with pytest.raises(ConfigError, match=r"^text: expected tokens in 7 equal parts, found 300 of which 3 are text$"):
        sdpa.Slices(**ALL, first=3).both(*draw(), parts=7)


def test_a_missing_diffusers_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers.models", None)
    with pytest.raises(Unavailable, match="diffusers cannot be imported"):
        diffusers.register()


def test_a_copy_is_called_by_its_own_name():
    q, k, v = draw()
    attention = sdpa.Slices(**ALL)
    other = copy.deepcopy(attention)
    call = torch.compile(lambda *given: other(*given) + 0, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(call(q, k, v), attention(q, k, v))
    assert attention.calls == other.calls == {"slices": 1} and other.settings == attention.settings
