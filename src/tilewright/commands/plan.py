"""Plan a pattern and save the plan."""

from argparse import ArgumentParser

from tilewright.attention.profile import DTYPES
from tilewright.commands import _inputs, settle_threads
from tilewright.core import flags
from tilewright.core.errors import ConfigError


def arguments(parser: ArgumentParser) -> None:
    """The pattern, what the plan will be called with, and how it is made."""
    parser.add_argument("pattern", help=_inputs.PATTERN)
    _inputs.grid_option(parser)
    parser.add_argument("--output", "-o", type=flags.output, required=True, help="file to write, e.g. window.plan")
    parser.add_argument("--heads", type=flags.count, help="attention heads (default: of the workload)")
    parser.add_argument("--head-dim", type=flags.count, help="values of a head (default: of the workload)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help=f"of the tensors (default: {DTYPES[0]})")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--reorder", default="auto", help="order of the tokens (default: auto, the best of several)")
    parser.add_argument("--tiles", nargs="+", help="such as 64x1 64x64; by default those of the device")
    parser.add_argument("--solver", default="highs", help="highs, gurobi, descent or greedy (default: highs)")


def run(
    pattern: str,
    grid: str | None,
    output: str,
    heads: int | None,
    head_dim: int | None,
    dtype: str,
    device: str,
    reorder: str,
    tiles: list[str] | None,
    solver: str,
) -> None:
    """Plan, save, and print the summary."""
    settle_threads()
    found = _inputs.pattern(pattern, grid)
    heads = _size("--heads", heads or found.meta.get("heads"), pattern)
    head_dim = _size("--head-dim", head_dim or found.meta.get("head_dim"), pattern)

    import torch

    from tilewright.attention import plan

    made = plan.plan(
        found,
        heads=heads,
        head_dim=head_dim,
        dtype=getattr(torch, dtype),
        device=device,
        reorder=reorder,
        tiles=tiles,
        solver=solver,
    )
    made.save(output)
    print(made.summary())
    print(f"saved      {output}")


def _size(option, size, pattern):
    if size is None or size < 1:
        raise ConfigError(f"{option}: expected a positive number, which {pattern} does not tell, found {size}")
    return size
