"""T5: rewrite recorded rows of older versions as today's readers expect them; what was measured stays."""

import argparse

from tilewright.study.cli import script
from tilewright.study.stages.convert import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="PATH", help="folders of logs, or single files")
    script(parser, run)
