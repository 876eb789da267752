"""The command ``tilewright``: plans, what they are made of, and what this machine needs once. See `commands`.

tilewright plan window-15-g1 --grid 64x64 --heads 6 --head-dim 64 --output window.plan
tilewright show window.plan --figure window.svg
tilewright bench window.plan
tilewright calibrate --head-dim 64 --dtype bfloat16
tilewright compile
tilewright doctor
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from tilewright import commands
from tilewright.core.errors import TilewrightError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 2 for bad input, which is one line on standard error."""
    parser = argparse.ArgumentParser(prog="tilewright", description="Scheduled sparse attention")
    known = parser.add_subparsers(dest="command", required=True)
    for name in commands.NAMES:
        module = commands.member(name)
        said = (module.__doc__ or "").partition("\n\n")[0]
        module.arguments(known.add_parser(name, help=said.splitlines()[0].rstrip("."), description=said))
    chosen = vars(parser.parse_args(arguments))
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
