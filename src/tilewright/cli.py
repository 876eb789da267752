"""The thin shell around a stage's function: parse the command line, call it, turn errors into one line."""

import os
import sys

import yaml

from tilewright.errors import ConfigError, TilewrightError

# Read by GNU OpenMP when torch is loaded: how long its threads wait actively for the next operator. Its default keeps
# cores from the executor's slots for milliseconds after every operator that was shared; with this one, the operators of
# torch take the same time.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def script(parser, run):
    """Parse the command line with `parser` and call ``run(**arguments)``.

    Exits with 0 on success, 2 with one line on stderr for a `TilewrightError`, 130 when interrupted.
    """
    arguments = vars(parser.parse_args())
    try:
        run(**arguments)
    except TilewrightError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def settings(texts):
    """What ``--set`` states, ``KEY=VALUE`` with values in YAML, as a dict. Raises `ConfigError`."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"--set {text}: expected KEY=VALUE")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {text}: expected a YAML value: {error}") from error
    return found
