"""Describe a run of the workflow as an RO-Crate: its rules, jobs, inputs and outputs, with their digests.

python workflow/scripts/make_crate.py --output ro-crate-metadata.json
"""

from pathlib import Path

from tilewright.core import flags
from tilewright_study.cli import parser_for, script
from tilewright_study.stages import crate

if __name__ == "__main__":
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--folder", type=Path, default=Path(), help="checkout in which the workflow ran (default: this folder)")
    add("--output", type=flags.output, required=True, metavar="JSON", help="the file to write in it")
    script(parser, crate.write)
