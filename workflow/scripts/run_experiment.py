"""Run one case of an experiment and write its rows. Each result is checked before it is timed.

python workflow/scripts/run_experiment.py --experiment networks --case vil-tiny-224 --output networks.csv
"""

from tilewright.core import flags
from tilewright_study import experiments
from tilewright_study.cli import compile_option, parser_for, script, set_option, timing_options
from tilewright_study.stages.experiment import run

parser = parser_for(__doc__)
add = parser.add_argument
add("--experiment", required=True, metavar="NAME", help=f"experiment: {', '.join(experiments.NAMES)}")
add(
    "--case",
    required=True,
    help="case of the experiment: a network, a shape of heads or a resolution, as in the names of its files",
)
set_option(add, "settings of the case in JSON or YAML, e.g. attention='{\"native\": [1, 8]}' max_seconds=1")
add("--output", type=flags.output, required=True, metavar="CSV", help="the rows to write")
add("--dtype", default="float32", help="float32, float16 or bfloat16 (default: float32)")
compile_option(add)
timing_options(add, "weights, tokens and crops")

if __name__ == "__main__":
    script(parser, run)
