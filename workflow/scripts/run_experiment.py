"""T5: run one case of an experiment; every time follows a check."""

import argparse

from tilewright.core import flags
from tilewright_study import experiments
from tilewright_study.cli import compile_option, script, timing_options
from tilewright_study.stages.experiment import run

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--experiment", required=True, metavar="NAME", help=f"experiment: {', '.join(experiments.NAMES)}")
add(
    "--case",
    required=True,
    help="a network, a shape of heads, a resolution: what the experiment's files are named after",
)
add(
    "--set",
    nargs="+",
    default=[],
    dest="stated",
    metavar="KEY=VALUE",
    help="settings of the case in JSON or YAML, e.g. attention='{\"native\": [1, 8]}' max_seconds=1",
)
add("--output", type=flags.output, required=True, metavar="CSV", help="the rows to write")
add("--dtype", default="float32", help="float32, float16 or bfloat16 (default: float32)")
compile_option(add)
timing_options(add, "weights, tokens and crops")

if __name__ == "__main__":
    script(parser, run)
