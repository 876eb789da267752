"""The thin shell around a stage's function: parse the command line, call it, turn errors into one line."""

import argparse
import json
import os
import sys

from tilewright import devices
from tilewright.core import flags
from tilewright.core.errors import ConfigError, TilewrightError

# Read by GNU OpenMP when torch is loaded: how long its threads wait actively for the next operator. Its default keeps
# cores from jobs beside this one for milliseconds after every operator that was shared; with this one, the operators
# of torch take the same time.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

# Characters of an error.
MOST = 2000


def parser_for(text):
    """A parser from a script's docstring: what the script does, and in the last paragraph an example."""
    said, _, example = text.strip().rpartition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=said, epilog=f"example:\n  {example}", formatter_class=form)


def script(parser, run):
    """Parse the command line with `parser` and call ``run(**arguments)``.

    Exits with 0 on success, 2 with one line on stderr for a `TilewrightError`, for a file that the system refuses and
    for what asks for more memory than there is, 130 when interrupted.
    """
    arguments = vars(parser.parse_args())
    try:
        run(**arguments)
    except TilewrightError as error:
        _end(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        _end(f"{str(error.filename)[:200]}: expected a file that can be used, found: {error.strerror}")
    except (MemoryError, RuntimeError) as error:
        # Torch has no type of its own for the memory of a CPU.
        if isinstance(error, RuntimeError) and "memory" not in str(error).partition("\n")[0]:
            raise
        _end(f"expected a size that fits the memory, found a larger one: {str(error)[:200]}")
    except KeyboardInterrupt:
        sys.exit(130)


def _end(message):
    words = " ".join(message.split())
    # What was found may be a whole file.
    print(f"error: {words if len(words) <= MOST else f'{words[:MOST]}...'}", file=sys.stderr)
    sys.exit(2)


def timing_options(add, seed):
    """Options of every command that times: where, how often, and drawn from which seed.

    add: a parser's ``add_argument``; seed: what is drawn from it.
    """
    add("--device", default="cpu", help=f"{' or '.join(devices.NAMES)} (default: cpu)")
    add("--rse", type=flags.positive, default=0.02, help="stop timing at this relative standard error (default: 0.02)")
    add("--min-repetitions", type=flags.count, default=10, help="time at least this number of calls (default: 10)")
    add("--seed", type=flags.seed, default=0, help=f"seed of {seed} (default: 0)")


def attention_options(add, dtype):
    """Options of the commands that run attention over one pattern: its sizes and type.

    add: a parser's ``add_argument``; dtype: the default type, in words.
    """
    add("--heads", type=flags.count, help="number of attention heads (default: the model's)")
    add("--head-dim", type=flags.count, help="dimension of a head (default: the model's)")
    add("--dtype", help=f"type of the tensors: float32, float16 or bfloat16 (default: {dtype})")


def compile_option(add):
    """The option of the commands that run what torch compiles.

    add: a parser's ``add_argument``.
    """
    add(
        "--compile-only",
        action="store_true",
        help="compile only, without timing, and list the files that torch keeps",
    )


def set_option(add, help, dest="stated"):
    """The option ``--set`` of settings by name, see `settings`.

    add: a parser's ``add_argument``. dest: the argument that takes them.
    """
    add("--set", nargs="+", default=[], dest=dest, metavar="KEY=VALUE", help=help)


def settings(texts, flags=()):
    """What ``--set`` states, ``KEY=VALUE`` with values in JSON or YAML, as a dict.

    flags: keys that have a flag of their own. Raises `ConfigError` for these, and for what states nothing.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"--set {text}: expected KEY=VALUE")
        if key in flags:
            raise ConfigError(f"--set {text}: expected an option of the network, found {key}, which has its own flag")
        found[key] = _value(text, value)
    return found


def _value(text, value):
    """A value in JSON, else in YAML, which takes 1e-05 for a text."""
    try:
        return json.loads(value)
    except RecursionError:
        raise ConfigError(f"--set {text[:40]}...: expected values nested a few deep, found too many") from None
    except ValueError:
        import yaml
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}: expected a YAML value: {error}") from error
