"""The command ``tilewright``: what a machine needs once, before plans are made on it.

tilewright compile
tilewright calibrate --head-dim 64 --dtype bfloat16 --forms
"""

import argparse
import logging
import sys
import time

import numpy as np

from tilewright import graph, reorder, targets
from tilewright.blocks import cut
from tilewright.blocks.tiles import parse
from tilewright.core import compiled, progress
from tilewright.core.errors import TilewrightError
from tilewright.profile import DTYPES


def main(arguments=None):
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="tilewright", description="Scheduled sparse attention")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("compile", help="compile once what plans of large patterns, and orders, are made with")
    one = commands.add_parser("calibrate", help="measure once what plans on this GPU are made of")
    one.add_argument("--head-dim", type=int, nargs="+", default=[64], help="values of a head")
    one.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bfloat16"], help="of the tensors")
    one.add_argument("--tiles", nargs="+", help="such as 64x1; by default those that plans choose from")
    one.add_argument("--device", default="cuda", help="kind of the device")
    one.add_argument("--anew", action="store_true", help="measure what is already there, too")
    one.add_argument(
        "--forms", action="store_true", help="choose the form of each tile's kernel among candidates first"
    )
    chosen = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    try:
        if chosen.command == "calibrate":
            calibrate(chosen)
        begin = time.perf_counter()
        compile_ahead()
        if chosen.command == "compile":
            print(f"compiled in {time.perf_counter() - begin:.1f} s")
    except TilewrightError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def compile_ahead():
    """Compile what no plan should wait for: by use, where a function's types are those that it is called with."""
    for name in cut.ENTERED:
        compiled.prepare(name)
    # Tokens of a grid in any order, and a pattern that is none.
    generator, n = np.random.default_rng(0), 256
    place = np.stack(np.divmod(generator.permutation(n), 16), 1)
    near = np.abs(place[:, None] - place).max(-1) <= 2
    for pattern in progress.with_progress((near, near | (generator.random((n, n)) < 0.1)), "compile"):
        found = graph.from_pattern(pattern)
        for order in ("ic", "hc"):
            reorder.apply(found, order)


def calibrate(chosen):
    """Calibrate for each type and head dim that was `chosen`, and print a table."""
    model = targets.cost_model(chosen.device)
    tiles = [parse(name) for name in chosen.tiles or targets.facts(chosen.device).TILES]
    rows = [
        {"type": dtype, "head dim": str(head_dim), "tile": name, **model.summary(found)}
        for dtype in chosen.dtype
        for head_dim in chosen.head_dim
        for name, found in model.calibrated(tiles, head_dim, dtype, chosen.anew, chosen.forms).items()
    ]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    for line in ({name: name for name in widths}, *rows):
        print("  ".join(line[name].rjust(width) for name, width in widths.items()))


if __name__ == "__main__":
    sys.exit(main())
