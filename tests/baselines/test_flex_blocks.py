"""FlexAttention over lists of whole blocks."""

import pytest
import torch

from tilewright.core import _internals
from tilewright.core.errors import Unavailable
from tilewright_study.baselines import flex_blocks


@pytest.mark.parametrize("tokens", [256, 300])
def test_each_head_attends_to_its_own_blocks(tokens):
    if _internals.missing_compiler():
        pytest.skip("no C++ compiler")
    blocks = -(-tokens // 128)
    flags = torch.rand(1, 2, blocks, blocks, generator=torch.Generator().manual_seed(2)) < 0.5
    flags[..., -1] = True
    q, k, v = torch.randn(3, 1, 2, tokens, 32, generator=torch.Generator().manual_seed(1))
    mask = flags.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :tokens, :tokens]
    assert not torch.equal(mask[:, 0], mask[:, 1])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    found = flex_blocks.prepare(flags, (tokens, tokens))(q, k, v)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_it_needs_a_compiler(monkeypatch):
    monkeypatch.setattr(_internals, "missing_compiler", lambda: "none is installed")
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler"):
        flex_blocks.prepare(torch.ones(1, 1, 1, 1, dtype=torch.bool), (128, 128))
