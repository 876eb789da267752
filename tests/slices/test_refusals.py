"""What slices refuse: each bad input has one error that says what was expected and what was found."""

import pytest
import torch

from helpers.slices import mask_of, qkv
from tilewright import slices
from tilewright.core.errors import DeviceError, PatternError
from tilewright.slices import operators


@pytest.fixture
def lists(device):
    return slices.from_mask(mask_of([[[5, 3], [4, 0]]], 90).to(device), 130)


@pytest.fixture
def tokens(device):
    return dict(zip("qkv", qkv(1, 2, 130, 90, 64, device=device), strict=True))


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize(
    "change,message",
    [
        (lambda x: x[:, :, 1:], r"expected shape \(1, 2, {n}, .*\) as the lists are laid out, found"),
        (lambda x: x[:, :1], r"expected shape \(1, 2, {n}, .*\) as the lists are laid out, found"),
        (lambda x: x[0], r"expected shape \(1, 2, {n}, .*\) as the lists are laid out, found"),
        (lambda x: x.double(), r"expected float32, float16 or bfloat16, the same for q, k and v, found torch.float64"),
        (lambda x: x.mT.contiguous().mT, r"expected stride 1 in the last dimension, found"),
    ],
)
def test_tokens_are_those_of_the_lists(name, change, message, lists, tokens):
    slices.attend(**tokens, lists=lists)
    tokens[name] = change(tokens[name])
    with pytest.raises(PatternError, match=f"^{name}: " + message.format(n=130 if name == "q" else 90)):
        slices.attend(**tokens, lists=lists)


@pytest.mark.parametrize("head_dim", [32, 72, 256])
def test_head_dims_are_64_and_128(head_dim, lists, device):
    with pytest.raises(PatternError, match=rf"^q: expected a head dim of 64 or 128, found {head_dim}$"):
        slices.attend(*qkv(1, 2, 130, 90, head_dim, device=device), lists)
    with pytest.raises(PatternError, match=rf"^q: expected a head dim of 64 or 128, found {head_dim}$"):
        slices.dense(*qkv(1, 2, 130, 90, head_dim, device=device))


def test_gradients_are_not_recorded_without_need(lists, tokens):
    tokens["q"].requires_grad_()
    with torch.no_grad():
        assert not slices.attend(**tokens, lists=lists).requires_grad


def test_memory_for_the_result_is_its_own(lists, tokens):
    with pytest.raises(PatternError, match=r"^out: expected memory that no input uses, found the memory of q$"):
        slices.attend(**tokens, lists=lists, out=tokens["q"])
    with pytest.raises(PatternError, match=r"^out: expected shape \(1, 2, 130, 64\) as the lists are laid out, found"):
        slices.attend(**tokens, lists=lists, out=torch.empty_like(tokens["k"]))
    with pytest.raises(PatternError, match=r"^out: expected float32, float16 or bfloat16, the same for"):
        slices.attend(**tokens, lists=lists, out=tokens["q"].half())


@pytest.mark.parametrize("name", ["keys", "counts", "order", "state"])
@pytest.mark.parametrize("change", [lambda x: x[..., :-1], lambda x: x.long(), lambda x: x.mT.contiguous().mT])
def test_lists_have_their_layout(name, change, lists, tokens):
    changed = change(getattr(lists, name)) if getattr(lists, name).ndim > 1 else getattr(lists, name)[:-1]
    held = {field: getattr(lists, field) for field in ("layout", "keys", "counts", "order", "state")} | {name: changed}
    with pytest.raises(PatternError, match=rf"^{name} of the lists: expected contiguous int32 of shape \(.*, found"):
        slices.attend(**tokens, lists=slices.SliceLists(**held))


def test_everything_lies_on_one_device(lists, tokens):
    with pytest.raises(DeviceError, match=r"^k: expected a tensor on .*, as the lists are, found meta$"):
        slices.attend(**tokens | {"k": tokens["k"].to("meta")}, lists=lists)
    with pytest.raises(DeviceError, match=r"^expected tensors on one of .*cpu.*, found meta$"):
        slices.from_mask(torch.ones(1, 1, 1, 4, dtype=torch.bool, device="meta"), 4)
    held = {field: getattr(lists, field) for field in ("layout", "keys", "counts", "order")}
    with pytest.raises(DeviceError, match=r"^state: expected a tensor on"):
        slices.attend(**tokens, lists=slices.SliceLists(**held, state=lists.state.to("meta")))


@pytest.mark.parametrize("scale", [0, -1.0, float("nan")])
def test_scales_are_positive(scale, lists, tokens):
    with pytest.raises(PatternError, match=r"^scale: expected a number greater than 0, found"):
        slices.attend(**tokens, lists=lists, scale=scale)


def test_dense_attention_takes_tokens_of_one_kind(tokens):
    q, k, v = tokens.values()
    for bad, message in (
        ((q, k[:, :1], v), r"k: expected shape \(B, H, N, D\), B, H and D as of q, found \(1, 1, 90, 64\)"),
        ((q[0], k, v), r"q: expected shape \(B, H, N, D\)"),
        ((q, k, v[:, :, :0]), r"v: expected shape \(B, H, N, D\)"),
        ((q, k, v[:, :, 1:]), r"v: expected shape \(1, 2, 90, 64\), as of k, found \(1, 2, 89, 64\)"),
        ((q, k, v.half()), "v: expected float32, float16 or bfloat16, the same for q, k and v, found torch.float16"),
    ):
        with pytest.raises(PatternError, match=f"^{message}"):
            slices.dense(*bad)


@pytest.mark.parametrize(
    "option,value,message",
    [
        ("rows", 96, "a power of two from 16 to 128, found 96"),
        ("rows", 8, "a power of two from 16 to 128, found 8"),
        ("rows", 256, "a power of two from 16 to 128, found 256"),
        ("width", 3, "a power of two from 1 to 128, found 3"),
        ("width", 256, "a power of two from 1 to 128, found 256"),
        ("budget", 0, r"a share of the keys in \(0, 1\], found 0"),
        ("budget", 1.01, r"a share of the keys in \(0, 1\], found 1.01"),
        ("queries", 0, "an integer of at least 1, found 0"),
    ],
)
def test_layouts_are_sensible(option, value, message):
    with pytest.raises(PatternError, match=f"^{option}: expected {message}$"):
        slices.make_layout(**{"batch": 1, "heads": 1, "queries": 10, "keys": 10} | {option: value})


def test_a_layout_has_room_for_its_budget():
    assert slices.make_layout(1, 1, 10, 1000, budget=0.3).capacity == 320
    assert slices.make_layout(1, 1, 10, 1000).capacity == 1024
    assert slices.make_layout(1, 1, 10, 1000, budget=1e-9).capacity == 64


@pytest.mark.parametrize(
    "mask,message",
    [
        (torch.ones(1, 1, 1, 4), r"^mask: expected bool of shape \(B, H, G, N_k\), found torch.float32"),
        (
            torch.ones(1, 1, 4) > 0,
            r"^mask: expected bool of shape \(B, H, G, N_k\), found .* of shape \(1, 1, 4\)$",
        ),
        (torch.ones(1, 1, 2, 4) > 0, "^mask: expected 1 groups, of 128 of 100 queries, found 2$"),
        (torch.ones(1, 2, 1, 4) > 0, "^mask: expected heads of 1 or 3, found 2$"),
        (torch.ones(2, 1, 1, 4) > 0, "^mask: expected batch of 1 or 4, found 2$"),
        (torch.ones(1, 1, 1, 0) > 0, "^keys: expected an integer of at least 1, found 0$"),
    ],
)
def test_masks_fit(mask, message):
    with pytest.raises(PatternError, match=message):
        slices.from_mask(mask, 100, heads=3, batch=4)


def test_numbers_are_integers_of_as_many_groups():
    keys, counts = torch.zeros(1, 1, 1, 5, dtype=torch.int32), torch.ones(1, 1, 1, dtype=torch.int32)
    for bad, message in (
        ((keys.float(), counts), r"keys: expected int32 or int64 of shape \(B, H, G, C\), found torch.float32"),
        ((keys[0], counts), r"keys: expected int32 or int64 of shape \(B, H, G, C\), found .* of shape \(1, 1, 5\)"),
        ((keys, counts.bool()), r"counts: expected int32 or int64 of shape \(B, H, G\), found torch.bool"),
        ((keys, counts[:, :, :0]), r"counts: expected shape \(1, 1, 1\) on cpu, as keys has, found \(1, 1, 0\) on cpu"),
        ((keys[:, :, :0], counts), "keys: expected 1 groups, of 128 of 100 queries, found 0"),
    ):
        with pytest.raises(PatternError, match=f"^{message}"):
            slices.from_indices(*bad, (100, 9))


def test_bits_are_those_of_the_layout(lists):
    bits = lists.pack()
    for bad in (bits[..., :-1], bits.long(), bits[:, :, :1]):
        with pytest.raises(PatternError, match=r"^bits: expected int32 of shape \(1, 2, 2, 4\), found"):
            slices.unpack(bad, lists.layout)


def test_executors_of_many_layouts_are_few():
    assert operators.executor.cache_info().maxsize == 256
