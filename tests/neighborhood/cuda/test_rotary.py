"""Queries and keys normed, scaled and turned in one kernel, on a GPU or under the interpreter, against the formulas."""

import pytest
import torch

from helpers.gpu import TRITON_DEVICE, cases
from tilewright.core.errors import PatternError
from tilewright.neighborhood.rotary import rotary

GRIDS, HEADS = [(2, 3, 5), (7, 1, 4), (1, 9, 13)], [1, 3]
# Channels, and how many of them turn by frame, row and column.
SPLITS = [(0, 4, 4), (2, 2, 20), (16, 24, 24), (32, 48, 48)]
# The interpreter is wrong in bfloat16.
TYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (TRITON_DEVICE == "cuda")
HOW = {"eps": (1e-6, 1e-2), "scale": 0.3, "base": 100.0}


def expected(x, gain, eps, scale, split, base):
    """In float64, a pair of channels as a complex number."""
    x = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * gain.double() * scale
    parts = []
    for axis, part in enumerate(x.split(split, -1), 1):
        shape = [1] * 6
        shape[axis], n = x.shape[axis], part.shape[-1]
        turns = torch.arange(x.shape[axis], dtype=torch.float64).view(shape).to(x.device)
        angle = turns * base ** (-torch.arange(0, n, 2, dtype=torch.float64).to(x.device) / max(1, n))
        turned = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(angle * 0 + 1, angle)
        parts.append(torch.view_as_real(turned).flatten(-2))
    return torch.cat(parts, -1)


def drawn(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TRITON_DEVICE, dtype)


@pytest.mark.parametrize("grid, heads, split, dtype, layout", cases(GRIDS, HEADS, SPLITS, TYPES, ["apart", "joint"]))
def test_queries_and_keys_are_normed_scaled_and_turned(grid, heads, split, dtype, layout):
    dim = sum(split)
    if layout == "apart":
        q, k = (drawn(2, *grid, heads, dim, dtype=dtype, seed=seed) for seed in (0, 1))
    else:
        # Of one projection, and of keys whose tokens have no common distance.
        q, k, _ = drawn(2, *grid, heads * dim * 3, dtype=dtype, seed=0).unflatten(-1, (3, heads, dim)).unbind(-3)
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    gains = [drawn(dim, dtype=dtype, seed=seed) for seed in (2, 3)]
    found = rotary(q, k, *gains, split=split, **HOW)
    for x, y, gain, eps, scale in zip((q, k), found, gains, HOW["eps"], (HOW["scale"], 1.0), strict=True):
        wanted = expected(x, gain, eps, scale, split, HOW["base"])
        assert y.dtype == dtype and y.shape == x.shape and y.is_contiguous()
        # Float32 inside, and one rounding.
        assert (y.double() - wanted).abs().max() <= max(torch.finfo(dtype).eps, 1e-6) * wanted.abs().max()


def test_far_positions_turn_as_in_float32():
    # As diffusers has it: angles are products in float32, which are off by 1e-5 at a place of some hundreds.
    q, split = drawn(1, 1, 1, 481, 1, 64, dtype=torch.float32, seed=0), (16, 24, 24)
    gain = torch.ones(64, device=q.device)
    found, _ = rotary(q, q, gain, gain, eps=(1e-6, 1e-6), scale=1.0, split=split, base=10_000.0)
    wanted = expected(q, gain, 1e-6, 1.0, split, 10_000.0)
    assert (found.double() - wanted).abs().max() <= 1e-4


def test_no_tokens_give_no_tokens():
    q, gain = torch.empty(0, 2, 2, 2, 1, 8, device=TRITON_DEVICE), torch.ones(8, device=TRITON_DEVICE)
    found = rotary(q, q, gain, gain, split=(0, 4, 4), **HOW)
    assert [x.shape for x in found] == [q.shape] * 2


def test_a_compiler_sees_one_operator():
    torch._dynamo.reset()
    q, k = (drawn(1, 2, 3, 4, 2, 8, dtype=torch.float32, seed=seed) for seed in (0, 1))
    gain = drawn(8, dtype=torch.float32, seed=2)

    def call(q, k):
        return rotary(q, k, gain, gain, split=(0, 4, 4), **HOW)

    found = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k)
    assert all(map(torch.equal, found, call(q, k)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": torch.zeros(1, 2, 2, 2, 1, 16)}, r"q and k: expected \[B, T, H, W, heads, d\] both"),
        ({"split": (2, 2, 2)}, "split: expected three even numbers that add up to 8, found"),
        ({"split": (3, 3, 2)}, "split: expected three even numbers"),
        ({"k_gain": torch.zeros(4)}, r"gains: expected 8 channels, found \(8,\) and \(4,\)"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    right = {"q": torch.zeros(1, 2, 2, 2, 1, 8), "k": torch.zeros(1, 2, 2, 2, 1, 8), "split": (0, 4, 4)}
    right |= {"q_gain": torch.ones(8), "k_gain": torch.ones(8)}
    with pytest.raises(PatternError, match=message):
        rotary(**right | change, **HOW)


def test_gradients_are_refused():
    q, gain = torch.zeros(1, 2, 2, 2, 1, 8, device=TRITON_DEVICE), torch.ones(8, device=TRITON_DEVICE)
    with pytest.raises(PatternError, match="has no gradient"):
        rotary(q.requires_grad_(), q, gain, gain, split=(0, 4, 4), **HOW)[0].sum().backward()
