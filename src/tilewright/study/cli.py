"""The thin shell around a stage's function: parse the command line, call it, turn errors into one line."""

import os
import sys

import yaml

from tilewright import targets
from tilewright.core.errors import ConfigError, TilewrightError

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


def timing_options(add, max_seconds, seed):
    """Options of every command that times: where, in what type, how long, drawn from which seed, and to which file.

    add: a parser's ``add_argument``. max_seconds: by default; seed: what of.
    """
    add("--device", default="cpu", help=f"{' or '.join(targets.NAMES)} (default: cpu)")
    add("--dtype", default="float32", help="float32, float16 or bfloat16 (default: float32)")
    add("--rse", type=float, default=0.02, help="stop at this relative standard error (default: 0.02)")
    add("--min-repetitions", type=int, default=10, help="but not before as many calls (default: 10)")
    add(
        "--max-seconds",
        type=float,
        default=max_seconds,
        help=f"and stop after this time in any case (default: {max_seconds:g})",
    )
    add("--seed", type=int, default=0, help=f"seed of {seed} (default: 0)")
    add("--output", required=True, metavar="CSV", help="the rows to write")


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
