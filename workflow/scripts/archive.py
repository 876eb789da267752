"""Pack the source of this commit, recorded rows, and the report and crate made of them, into one file.

python workflow/scripts/archive.py --recorded h200 --output build/tilewright.tar.gz
"""

from functools import partial
from pathlib import Path

from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.stages import archive

if __name__ == "__main__":
    parser = parser_for(__doc__)
    add = parser.add_argument
    add(
        "--recorded",
        default="h200",
        metavar="NAME",
        help="recorded run for the report (default: h200)",
    )
    add("--output", type=flags.output, required=True, metavar="TAR.GZ", help="the file to write")
    script(parser, partial(archive.write, Path(__file__).parents[2]))
