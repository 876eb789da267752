"""Plan attention for a pattern: order its tokens, choose and schedule tiles, and save the plan."""

import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from statistics import median

from tilewright.attention.profile import DTYPES, Profile
from tilewright.attention.reorder import NAMES as ORDERS
from tilewright.commands import _inputs
from tilewright.core import flags
from tilewright.core.errors import ConfigError

# ASSUME: on an idle CPU, times spread less than this; a plan of busy times may choose other tiles.
MOST_SPREAD = 0.5


def arguments(parser: ArgumentParser) -> None:
    """The pattern, what the plan will be called with, and how it is made."""
    parser.add_argument("pattern", help=_inputs.PATTERN)
    _inputs.grid_option(parser)
    parser.add_argument(
        "--output",
        "-o",
        type=flags.output,
        required=True,
        help="file to write, e.g. window.plan; missing folders are made",
    )
    parser.add_argument("--heads", type=flags.count, help="number of attention heads (default: the workload's)")
    parser.add_argument("--head-dim", type=flags.count, help="dimension of a head (default: the workload's)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help=f"type of the tensors (default: {DTYPES[0]})"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--reorder",
        default="auto",
        help=f"order of the tokens: {', '.join(ORDERS)} or auto, the best of several (default: auto)",
    )
    parser.add_argument("--tiles", nargs="+", help=_inputs.TILES)
    parser.add_argument(
        "--solver", default="highs", help="solver of the schedule: highs, gurobi, descent or greedy (default: highs)"
    )


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
    measured = [each for each in made.profiles.values() if each.source == "measured"]
    if (spreads := spread(measured)) > MOST_SPREAD:
        print(
            f"warning: the {device.upper()} seems busy, times spread by {spreads:.0%}; plan again when it is idle",
            file=sys.stderr,
        )
    print(f"saved      {output}")


def spread(profiles: Iterable[Profile]) -> float:
    """How far apart the 20th and the 80th percentile of times are: the median over the measured shapes."""
    return median([each.p80_us / each.p20_us for profile in profiles for each in profile.shapes] or [1.0]) - 1


def _size(option, size, pattern):
    if size is None or size < 1:
        raise ConfigError(f"{option}: expected a positive number, found none; {pattern} does not state it")
    return size
