"""Measure the kernels of plans on this GPU once, and compile as `tilewright compile` does."""

from argparse import ArgumentParser

from tilewright.attention import backends
from tilewright.attention.profile import DTYPES
from tilewright.commands import _inputs, table
from tilewright.commands import compile as compiling
from tilewright.core import flags


def arguments(parser: ArgumentParser) -> None:
    """What is calibrated."""
    parser.add_argument(
        "--head-dim", type=flags.count, nargs="+", default=[64], help="dimensions of a head (default: 64)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, nargs="+", default=["bfloat16"], help="types of the tensors (default: bfloat16)"
    )
    parser.add_argument("--tiles", nargs="+", help=_inputs.TILES)
    parser.add_argument("--device", default="cuda", help="kind of device (default: cuda)")
    parser.add_argument("--anew", action="store_true", help="repeat measurements that exist")
    parser.add_argument("--all", dest="every", action="store_true", help="calibrate all that the package comes with")
    parser.add_argument(
        "-o", "--output", type=flags.output, help="file of calibrations for the package, see CONTRIBUTING.md"
    )


def run(
    head_dim: list[int],
    dtype: list[str],
    tiles: list[str] | None,
    device: str,
    anew: bool,
    every: bool,
    output: str | None,
) -> None:
    """Calibrate for each type and head dim, and print a table."""
    from tilewright import devices
    from tilewright.attention.blocks.tiles import parse

    known = backends.calibration(device)
    chosen = [parse(name) for name in tiles or devices.facts(device).TILES]
    sizes = known.SHIPPED_SIZES if every else [(dim, each) for each in dtype for dim in head_dim]
    measured = known.measured(chosen, sizes, anew)
    rows = [
        {"type": each, "head dim": str(dim), "tile": name, **known.summary(found)}
        for (dim, each), by_tile in measured.items()
        for name, found in by_tile.items()
    ]
    print("\n".join(table(rows)))
    if output is not None:
        known.ship(output, (found for by_tile in measured.values() for found in by_tile.values()))
    else:
        compiling.ahead()
