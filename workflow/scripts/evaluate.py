"""Measure how many labels of a folder of images a network gets right: top-1 and top-5, or mean IoU by class.

python workflow/scripts/evaluate.py --model deit-small-224 --data imagenet --checkpoint cached --count 1000
"""

from tilewright import devices
from tilewright.core import flags
from tilewright_study.cli import parser_for, script, set_option
from tilewright_study.evaluation import DTYPES, run
from tilewright_study.map_evaluation import ORIGINAL
from tilewright_study.scenes.sources import LABELLED


def _side(text):
    return text if text == ORIGINAL else flags.pixels(text)


parser = parser_for(__doc__)
add = parser.add_argument
add("--model", required=True, help="network, e.g. deit-small-224, vil-tiny-224, regionvit-tiny-224, dynamicvit-s-224")
add(
    "--data",
    required=True,
    metavar="FOLDER",
    help="images as FOLDER/<split>/<class>/* (ImageNet) or FOLDER/<class>/*; for a network that labels pixels a folder "
    f"with data.toml, or {', '.join(f'{name}=FOLDER' for name in LABELLED)}",
)
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
add("--split", help="subfolder of FOLDER (default: val), or split of images with label maps (default: test)")
add(
    "--side",
    type=_side,
    metavar="PIXELS",
    help="shorter side that images with label maps are resized to, or original (default: the network's)",
)
add("--window", type=flags.pixels, nargs="+", metavar="PIXELS", help="side, or height and width, of sliding windows")
add("--stride", type=flags.pixels, metavar="PIXELS", help="pixels between windows (default: their shorter side)")
add("--paths", nargs="+", default=[], metavar="PATH", help="paths of the network, e.g. 2.2.3.2 (default: the full one)")
add("--count", type=flags.count, metavar="N", help="use at most N images, evenly spread (default: all)")
add("--batch", type=flags.count, default=32, help="images or windows in a batch (default: 32)")
add(
    "--classes",
    metavar="FILE",
    help="folder of each class of the network, one a line; needed if folders of classes are missing",
)
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add("--dtype", default="float32", help=f"{', '.join(DTYPES)} (default: float32)")
add("--output", type=flags.output, metavar="CSV", help="file for a row for each attention")
set_option(add, "further options of the network, values in YAML, e.g. keep_ratio=0.5 num_classes=21841", dest="set")

if __name__ == "__main__":
    script(parser, run)
