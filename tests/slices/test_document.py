"""The document of slices: its example runs, and what it names exists."""

import re
from pathlib import Path

import torch

from tilewright import slices

TEXT = (Path(__file__).parents[2] / "docs/slices.md").read_text()


def test_the_examples_attend_to_what_they_list():
    predicted, masked, *_ = re.findall(r"^```python\n(.+?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    check = """
import numpy as np

def right(rows, keys):
    return torch.nn.functional.scaled_dot_product_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys])

assert out.shape == q.shape and lse.shape == q.shape[:3] and 0 < share.min() and share.max() < 1
rows = torch.arange(128, 256)
keys = torch.from_numpy(lists.graph(0, 1).row(128).astype(np.int64))
assert 0.3 * 2000 < len(keys) <= 0.4 * 2000 + 64
assert torch.allclose(out[:, 1:, rows], right(rows, keys)[:, 1:], atol=1e-4)
assert torch.allclose(slices.attend(q, k, v, near)[:, :, rows], right(rows, torch.arange(0, 655)), atol=1e-4)
"""
    exec((predicted + masked).replace("4680", "2000").replace("0.3)", "0.6)") + check, {})


def test_the_example_of_text_keeps_it():
    _, _, text, *_ = re.findall(r"^```python\n(.+?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    q, k, v = torch.randn(3, 1, 2, 700, 64).unbind(0)
    names = {"slices": slices, "q": q, "k": k, "v": v, "lengths": torch.tensor([600])}
    # Room for 256 tokens of few.
    exec(text.replace("0.3", "0.5"), names)
    assert names["out"].shape == q.shape
    lists = slices.predict(q, k, **names["padded"])
    assert lists.graph(0, 0).to_dense()[0, 444:600].all() and not lists.graph(0, 0).to_dense()[:, 600:].any()


def test_every_call_that_is_named_is_there():
    calls = re.findall(r"^\| `(.+?)` \|", TEXT, re.MULTILINE)
    named = [name for call in calls for name in re.findall(r"([\w.]+)\(", call.replace("(out, lse)", ""))]
    assert {"attend", "lists.check", "Steps"} < set(named)
    owners = [(slices.SliceLists, name[6:]) if name.startswith("lists.") else (slices, name) for name in named]
    assert [name for owner, name in owners if not hasattr(owner, name)] == []
