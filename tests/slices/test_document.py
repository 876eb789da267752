"""The document of slices: its example runs, and what it names exists."""

import re
import subprocess
import sys
from pathlib import Path

from tilewright import slices

TEXT = (Path(__file__).parents[2] / "docs/slices.md").read_text()


def test_the_example_attends_to_what_it_lists(tmp_path):
    first, *_ = re.findall(r"^```python\n(.+?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    check = """
assert out.shape == q.shape and 0 < share.min() and share.max() < 1
rows = torch.arange(128, 256)
keys = torch.arange(0, 655)
right = torch.nn.functional.scaled_dot_product_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys])
assert torch.allclose(out[:, :, rows], right, atol=1e-4)
"""
    (tmp_path / "example.py").write_text(first.replace("4680", "2000").replace("0.3)", "0.6)") + check)
    subprocess.run([sys.executable, "example.py"], cwd=tmp_path, check=True)


def test_every_call_that_is_named_is_there():
    calls = re.findall(r"^\| `(.+?)` \|", TEXT, re.MULTILINE)
    named = [name for call in calls for name in re.findall(r"([\w.]+)\(", call.replace("(out, lse)", ""))]
    assert {"attend", "lists.check", "Steps"} < set(named)
    owners = [(slices.SliceLists, name[6:]) if name.startswith("lists.") else (slices, name) for name in named]
    assert [name for owner, name in owners if not hasattr(owner, name)] == []
