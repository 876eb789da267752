"""Configure a memory tile, a part of it, or any design in BTOR2, from what goes in and comes out.

Exit 0: solved and verified; 2: infeasible, which is proven, why is printed and written, or an error; 3: nothing was
found, which is no proof, or the time was over.
"""

import argparse

from tilewright.core import flags
from tilewright_study.cli import script
from tilewright_study.stages.configure import run

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
add = parser.add_argument
add("--stream", metavar="CSV", help="what goes in and comes out, or the name of an example, such as identity-16x16")
add("--component", help="of the tile: top, agg, sram or tb (default: top)")
add("--memory", help="the tile, pub or dp (default: pub)")
add("--engine", help="auto, fit or bmc (default: auto, fit and then bmc)")
add(
    "--layers",
    type=flags.count,
    metavar="N",
    help="of loops, iterations, strides and starts, made least (default: 4)",
)
add("--fix", metavar="JSON", help="a configuration whose controllers are fixed")
add("--monolithic", action="store_true", help="ask for all of a component, the top too, in one question")
add(
    "--time-limit",
    type=flags.seconds,
    metavar="S",
    help="seconds for all engines (default: none; 60 for the whole tile in auto)",
)
add("--system", metavar="BTOR2", help="a design in place of a tile")
add("--solve", metavar="REGEX", help="inputs of the design that are its configuration")
add("--example", metavar="CSV", help="words of the design's inputs and outputs, a row for each cycle")
add("--verify", metavar="JSON", help="run this configuration over the stream, or the example, and write nothing")
add("--write-stream", type=flags.output, metavar="CSV", help="also write the stream, of the component")
add("--output", type=flags.output, metavar="JSON", help="the configuration, or why there is none")

if __name__ == "__main__":
    script(parser, run)
