"""Run a network on photographs: most probable classes and what it attends to, or a class map of each.

A network that labels pixels takes a photograph, a file or a folder, of any size and orientation. It runs within a time
budget by the paths of a table, and tells the parts of its time.

python workflow/scripts/infer.py --checkpoint segformer.b0.512x512.ade.160k.pth --example --maps maps
"""

from tilewright import devices
from tilewright.core import flags, images
from tilewright_study import labelling
from tilewright_study.cli import parser_for, script, set_option
from tilewright_study.inference import run

parser = parser_for(__doc__)
add = parser.add_argument
add("--model", help="network, e.g. vil-tiny-224, segformer-b0-512 (default: the SegFormer or Swin of --checkpoint)")
add("--image", help=f"a file, a photograph ({', '.join(images.PHOTOGRAPHS)}), or for class maps a folder")
add("--example", action="store_true", help="ten photographs of scikit-image, instead of --image")
add(
    "--checkpoint",
    metavar="FILE",
    help="official weights, .pth or .safetensors, or cached for those of timm (default: random weights)",
)
add(
    "--attention",
    help="tilewright, dense, flex or native; of a DeiT its batching, such as padded (default) or ragged",
)
add("--maps", type=flags.folder, metavar="FOLDER", help="folder for class maps (.png) and blends (.blend.png)")
add("--data", metavar="FILE", help="classes and colours of class maps, .toml or .json (default: those of the weights)")
add("--budget-us", type=flags.positive, help="budget of an image in microseconds (default: none)")
add("--table", metavar="CSV", help="paths to pick from by the budget (default: the whole network)")
add(
    "--fit",
    default="stretch",
    help=f"{', '.join(labelling.FITS)}: the image takes the network's size, keeps its aspect ratio, or is cut into "
    "windows (default: stretch)",
)
add("--blend", type=flags.share, default=0.5, help="share of the colours over the photograph (default: 0.5)")
add("--dtype", default="float32", help="of a network that labels pixels, such as bfloat16 (default: float32)")
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add(
    "--output",
    type=flags.output,
    metavar="PICTURE",
    help="picture to write (.png, .svg, .pdf): kept patches, or the tokens that a token attends to",
)
add("--labels", metavar="FILE", help="names of the classes, one a line (default: their numbers)")
add("--token", metavar="Y,X", help="row and column of the token in the first stage's grid (default: the centre)")
set_option(add, "further options of the network, values in YAML, e.g. keep_ratio=0.5 num_classes=21841", dest="set")

if __name__ == "__main__":
    script(parser, run)
