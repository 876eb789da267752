"""Check and time baselines on an attention pattern, in one order or in several.

python workflow/scripts/run_baselines.py --baselines sdpa_mask flex --graph A.npz --output baselines.csv
"""

import argparse

from tilewright.core import flags
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.cli import attention_options, compile_option, parser_for, script, timing_options
from tilewright_study.stages.baselines import run


def form(text):
    """A baseline and a form of it."""
    name, given, form = text.partition("=")
    if not given:
        raise argparse.ArgumentTypeError(f"expected <baseline>=<form>, found {text!r}")
    return name, form


parser = parser_for(__doc__)
add = parser.add_argument
add("--baselines", nargs="+", required=True, metavar="NAME", help=f"baselines: {', '.join(sparse_baselines.NAMES)}")
add(
    "--forms",
    nargs="*",
    type=form,
    default=[],
    metavar="NAME=FORM",
    help="variant of a baseline, e.g. flex=128 (default: all variants)",
)
add("--graph", nargs="+", required=True, metavar="NPZ", help="the pattern, one file for each order")
add("--schedule", metavar="JSON", help="a plan to time in turns with them, of the files that its schedule names")
add("--output", type=flags.output, required=True, metavar="CSV", help="the rows to write")
add("--batch", type=flags.count, default=1, help="sequences in a call (default: 1)")
add(
    "--max-dense-tokens",
    type=flags.whole,
    default=20000,
    help="skip dense attention above this number of tokens (default: 20000)",
)
add("--max-seconds", type=flags.seconds, default=1.0, help="longest time of a measurement in seconds (default: 1)")
compile_option(add)
attention_options(add, "float32")
timing_options(add, "the tokens")

if __name__ == "__main__":
    script(parser, run)
