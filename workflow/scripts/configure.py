"""Configure a push memory, a part of it, or any design in BTOR2 so that given inputs produce given outputs.

Exit status: 0 for a verified configuration; 2 for a proof that there is none, whose reason is printed and written, or
for an error; 3 where the search found none, which proves nothing.

python workflow/scripts/configure.py --stream identity-16x16 --output identity.json
"""

from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.stages.configure import run

parser = parser_for(__doc__)
add = parser.add_argument
add("--stream", metavar="CSV", help="words that enter and leave in each cycle, or an example such as identity-16x16")
add("--component", help="component to configure: top, the whole tile, or its part agg, sram or tb (default: top)")
add("--memory", help="kind of memory tile: pub, wide with aggregators, or dp, dual-port (default: pub)")
add("--engine", help="fit (algebra), bmc (model checking), or auto: fit first, bmc next (default: auto)")
add(
    "--layers",
    type=flags.count,
    metavar="N",
    help="how many of loops, iterations, strides and starts are minimised, in this order (default: 4)",
)
add("--fix", metavar="JSON", help="keep the controllers, or the design's words, of this configuration")
add("--monolithic", action="store_true", help="solve a component in one query, the whole tile, too")
add(
    "--time-limit",
    type=flags.seconds,
    metavar="S",
    help="seconds for all engines (default: none; 60 for the whole tile in auto)",
)
add("--system", metavar="DESIGN", help="a design to configure instead of a tile: Verilog (.v, .sv), or BTOR2")
add("--solve", metavar="REGEX", help="names of the design's inputs that are its configuration")
add(
    "--least",
    metavar="REGEX",
    action="append",
    help="minimise the sum of the configuration words of these names; may be repeated, the first one comes first",
)
add("--example", metavar="CSV", help="words of the design's inputs and outputs, a row for each cycle")
add(
    "--for-all",
    metavar="REGEX",
    help="names of inputs that may have any words: no run breaks an assertion of the design or outputs of the example",
)
add("--cycles", type=flags.count, metavar="N", help="length of such a run, in place of an example")
add("--always", action="store_true", help="prove it for all cycles, by induction")
add("--verify", metavar="JSON", help="only check this configuration against the stream or the example")
add("--write-stream", type=flags.output, metavar="CSV", help="also write the stream of the component")
add(
    "--output",
    type=flags.output,
    metavar="JSON",
    help="file for the configuration, or for the reason why there is none",
)

if __name__ == "__main__":
    script(parser, run)
