"""Measure top-1, top-5 and images per second of a network on a folder of labelled images, with each attention.

python workflow/scripts/evaluate.py --model deit-small-224 --data imagenet --checkpoint cached --count 1000
"""

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.evaluation import DTYPES, run

parser = parser_for(__doc__)
add = parser.add_argument
add("--model", required=True, help="network, e.g. deit-small-224, vil-tiny-224, regionvit-tiny-224, dynamicvit-s-224")
add("--data", required=True, metavar="FOLDER", help="images as FOLDER/<split>/<class>/* (ImageNet) or FOLDER/<class>/*")
add(
    "--checkpoint",
    metavar="FILE",
    help="official weights, .pth or .safetensors, or cached for those of timm (default: random weights)",
)
add(
    "--attention",
    nargs="+",
    default=[],
    metavar="NAME",
    help="attentions such as tilewright dense flex native; of a DeiT batchings (default: all)",
)
add("--split", default="val", help="subfolder of FOLDER (default: val)")
add("--count", type=flags.count, metavar="N", help="use at most N images, evenly spread (default: all)")
add("--batch", type=flags.count, default=32, help="images in a batch (default: 32)")
add(
    "--classes",
    metavar="FILE",
    help="folder of each class of the network, one a line; needed if folders of classes are missing",
)
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--dtype", default="float32", help=f"{', '.join(DTYPES)} (default: float32)")
add("--output", type=flags.output, metavar="CSV", help="file for a row for each attention")
add(
    "--set",
    nargs="+",
    default=[],
    metavar="KEY=VALUE",
    help="further options of the network, values in YAML, e.g. keep_ratio=0.5 num_classes=21841",
)

if __name__ == "__main__":
    script(parser, run)
