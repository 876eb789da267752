"""T5: check and time baselines on the graph of a pattern, in one order or several."""

import argparse

from tilewright.core import flags
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.cli import attention_options, compile_option, script, timing_options
from tilewright_study.stages.baselines import run


def form(text):
    """A baseline and a form of it."""
    name, given, form = text.partition("=")
    if not given:
        raise argparse.ArgumentTypeError(f"expected <baseline>=<form>, found {text!r}")
    return name, form


parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--baselines", nargs="+", required=True, metavar="NAME", help=f"baselines: {', '.join(sparse_baselines.NAMES)}")
add("--forms", nargs="*", type=form, default=[], metavar="NAME=FORM", help="forms of baselines (default: all of each)")
add("--graph", nargs="+", required=True, metavar="NPZ", help="the pattern; in several orders, one file for each")
add("--output", type=flags.output, required=True, metavar="CSV", help="the rows to write")
add("--batch", type=flags.count, default=1, help="sequences in a call (default: 1)")
add("--max-dense-tokens", type=flags.whole, default=20000, help="skip dense attention above (default: 20000)")
add("--max-seconds", type=flags.seconds, default=1.0, help="a timing stops after this time in any case (default: 1)")
compile_option(add)
attention_options(add, "float32")
timing_options(add, "the tokens")

if __name__ == "__main__":
    script(parser, run)
