"""Run a network on a photograph: latency, most probable classes, and a picture of the tokens it keeps or attends to.

python workflow/scripts/infer.py --model vil-tiny-224 --image chelsea --checkpoint vil_tiny.pth --output seen.png
"""

from tilewright import devices
from tilewright.core import flags, images
from tilewright_study.cli import parser_for, script
from tilewright_study.inference import run

parser = parser_for(__doc__)
add = parser.add_argument
add("--model", required=True, help="network, e.g. vil-tiny-224, regionvit-small-384-w14, dynamicvit-s-224")
add("--image", required=True, help=f"an RGB file, or a photograph: {', '.join(images.PHOTOGRAPHS)}")
add(
    "--checkpoint",
    metavar="FILE",
    help="official weights, .pth or .safetensors, or cached for those of timm (default: random weights)",
)
add(
    "--attention",
    help="tilewright, dense, flex or native; of a DeiT its batching, such as padded (default) or ragged",
)
add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
add(
    "--output",
    type=flags.output,
    metavar="PICTURE",
    help="picture to write (.png, .svg, .pdf): kept patches, or the tokens that a token attends to",
)
add("--labels", metavar="FILE", help="names of the classes, one a line (default: their numbers)")
add("--token", metavar="Y,X", help="row and column of the token in the first stage's grid (default: the centre)")
add(
    "--set",
    nargs="+",
    default=[],
    metavar="KEY=VALUE",
    help="further options of the network, values in YAML, e.g. keep_ratio=0.5 num_classes=21841",
)

if __name__ == "__main__":
    script(parser, run)
