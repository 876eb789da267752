"""Types of the command line: what is given is checked as it is read, before any work begins."""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

# Counts beyond this are slips of the pen: of rows, images, steps.
MOST = 10**9
# Seeds that NumPy, torch and the solvers all take.
SEEDS = 2**31


def number(what: str, kind: Callable, least: int, most: float = MOST, *, above: bool = False) -> Callable:
    """A type of argparse: an int or a float from `least` to `most`, finite; above: not `least` itself."""

    def parsed(text):
        expected = f"expected {what} above {least:g}" if above else f"expected {what} of at least {least:g}"
        expected += f", at most {most:g}" if most < MOST else ""
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{expected}, found {_short(text)}") from None
        if not (least < value if above else least <= value) or not value <= most or value == math.inf:
            raise argparse.ArgumentTypeError(f"{expected}, found {_short(text)}")
        return value

    return parsed


count = number("a whole number", int, 1)
whole = number("a whole number", int, 0)
seed = number("a seed", int, 0, SEEDS - 1)
pixels = number("pixels", int, 1, 65536)
threads = number("threads", int, 1, 4 * (os.cpu_count() or 1))
positive = number("a number", float, 0, math.inf, above=True)
seconds = number("seconds", float, 0, MOST, above=True)
minutes = number("minutes", float, 0)
share = number("a share", float, 0, 1, above=True)
gap = number("a gap", float, 0, 1)


def output(text: str) -> str:
    """A type of argparse: a path that a file can be written to."""
    _below_folders(text)
    if not text or text.endswith(os.sep) or os.path.isdir(text):
        raise argparse.ArgumentTypeError(
            f"expected a file to write, found {'a folder: ' + text if text else 'nothing'}"
        )
    if os.path.exists(text) and not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"expected a file to write, found a device or a pipe: {text}")
    return text


def folder(text: str) -> str:
    """A type of argparse: a folder that files can be written to; it may not be there yet."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder to write to, found nothing")
    _below_folders(os.path.join(text, "file"))
    return text


def _below_folders(text):
    try:
        place = next(parent for parent in Path(text).absolute().parents if parent.exists())
        Path(text).exists()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a path that can be written, found {_short(text)}: {error.strerror}"
        ) from None
    if not place.is_dir():
        raise argparse.ArgumentTypeError(f"expected a path below folders, found the file {place}")
    if not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a path that can be written, found {place}, which cannot be")


def _short(text):
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
