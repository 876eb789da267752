# ruff: noqa: E402
"""What an installed package has to do, away from the checkout and without what the study brings: a plan, and commands.

`make installs` runs this with each Python; the argument is the folder of its environment. The plan has no order: most
are functions that numba would compile for this place alone.
"""

import sys

sys.modules |= dict.fromkeys(("gurobipy", "matplotlib", "pandas", "PIL", "seaborn", "skimage", "snakemake", "yaml"))
from pathlib import Path

import torch

import tilewright as tw
from tilewright.__main__ import main

assert Path(tw.__file__).is_relative_to(sys.argv[1]), tw.__file__
mask = torch.rand(40, 50) < 0.3
mask[:, 0] = True
plan = tw.plan(mask, heads=2, head_dim=8, reorder="none", solver="greedy")
q, k, v = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
torch.testing.assert_close(plan(q, k, v), expected, atol=1e-5, rtol=1e-5)
plan.save("smoke.plan")
assert main(["show", "smoke.plan"]) == 0
assert main(["show", "smoke.plan", "--figure", "smoke.svg"]) == 2
assert main(["bench", "smoke.plan", "--without", "flex", "--seconds", "0.01", "--rse", "1"]) == 0
assert "tilewright_study" not in sys.modules
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}: a plan, show and bench run")
