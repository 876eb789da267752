"""The thin shell around a stage's function: parse the command line, call it, turn errors into one line."""

import sys

from tilewright.errors import TilewrightError


def script(parser, run):
    """Parse the command line with `parser`, call ``run(**arguments)`` and exit: 0 on success, 2 with one line on an error."""
    arguments = vars(parser.parse_args())
    try:
        run(**arguments)
    except TilewrightError as error:
        sys.exit(_fail(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(error):
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
