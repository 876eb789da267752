"""The command ``tilewright``: plans, what they are made of, frames, budgets, what this machine needs. See `commands`.

tilewright plan window-15-g1 --grid 64x64 --heads 6 --head-dim 64 --output window.plan
tilewright show window.plan --figure window.svg
tilewright bench window.plan
tilewright calibrate --head-dim 64 --dtype bfloat16
tilewright compile
tilewright doctor
tilewright stream --source photographs --network segformer-b0-512=b0.safetensors --table table.csv --fps 30
tilewright tune-slices wan-1.3b-480p-81f --checkpoint wan.safetensors --device cuda --keep 0.2 --output budgets.json
tilewright descriptors --device aie2-memtile --shape 64x64 --slice 'a[::2].T'
"""

import argparse
import logging
import sys
import textwrap
from collections.abc import Sequence

from tilewright import commands
from tilewright.core.errors import TilewrightError
from tilewright.core.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 2 for bad input, which is one line on standard error."""
    examples = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(
        prog="tilewright",
        description="Plan sparse attention, look at plans, time them, and check the installation.",
        epilog=f"examples:\n{textwrap.indent(examples, '  ')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tilewright {__version__}")
    known = parser.add_subparsers(dest="command", metavar="command")
    for name in commands.NAMES:
        module = commands.member(name)
        said = module.__doc__ or ""
        shown = next(line for line in examples.splitlines() if line.startswith(f"tilewright {name}"))
        subparser = known.add_parser(
            name,
            help=said.splitlines()[0].rstrip("."),
            description=said,
            epilog=f"example:\n  {shown}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(subparser)
    chosen = vars(parser.parse_args(arguments))
    if chosen["command"] is None:
        parser.print_help(sys.stderr)
        return 2
    logging.basicConfig(format="%(message)s")
    try:
        return commands.member(chosen.pop("command")).run(**chosen) or 0
    except TilewrightError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
