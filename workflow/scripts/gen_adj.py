"""Write the attention pattern of a model as a graph.

python workflow/scripts/gen_adj.py --model vil-tiny-224-s1 --output A.npz
"""

from tilewright.core import flags
from tilewright_study.cli import parser_for, script, set_option
from tilewright_study.stages.graph import run

SETTINGS = "further parameters of the workload, values in YAML, e.g. window=9 or image=photo.jpg"

parser = parser_for(__doc__)
what = parser.add_mutually_exclusive_group(required=True)
what.add_argument("--model", help="workload, e.g. vil-tiny-224-s1, or a published name, e.g. VisionLongformer")
what.add_argument(
    "--list", dest="known", action="store_true", help="list the names of workloads and photographs instead"
)
parser.add_argument("--output", type=flags.output, metavar="NPZ", help="graph file to write")
set_option(parser.add_argument, SETTINGS)

if __name__ == "__main__":
    script(parser, run)
