"""Operators on maps as torch computes them: some rows after the other on a CPU, the same as all at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.networks import map_operators


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([1, 700, 1 << 21]),
    st.sampled_from(map_operators.EXACT),
)
def test_a_decoder_by_rows_is_the_decoder(grid, levels, batch, cached, dtype):
    drawn = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype)

    sides = [grid if whole else side for *side, whole in levels]
    maps = [normal(batch, 3 + place, *side) for place, side in enumerate(sides)]
    weights = [normal(5, x.shape[1]) for x in maps]
    arguments = maps, weights, normal(5), grid, normal(4, 5), normal(4)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(map_operators, "CACHED", cached)
        found = map_operators.decode(*arguments)
        patch.setattr(map_operators, "EXACT", ())
        expected = map_operators.decode(*arguments)
    assert found.shape == expected.shape == (batch, 4, *grid)
    assert found.permute(0, 2, 3, 1).is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_a_decoder_that_is_trained_has_gradients():
    x, weight = torch.randn(1, 3, 4, 4), torch.randn(5, 3, requires_grad=True)
    map_operators.decode([x], [weight], torch.randn(5), (8, 8), torch.randn(4, 5), torch.randn(4)).sum().backward()
    assert weight.grad.abs().sum() > 0


def test_a_decoder_in_lower_precision_is_the_decoder_as_well():
    arguments = (
        [torch.randn(1, 3, 4, 4)],
        [torch.randn(5, 3)],
        torch.randn(5),
        (8, 8),
        torch.randn(4, 5),
        torch.randn(4),
    )
    with torch.no_grad():
        expected = map_operators.decode(*arguments)
        with torch.autocast("cpu", torch.bfloat16):
            found = map_operators.decode(*arguments)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
