"""Write the least descriptors of a data mover for an access pattern, or say why it has none.

Sizes and strides stand outermost first and count in elements, as in NumPy.
"""

import math
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from tilewright.core import flags
from tilewright.core.errors import ConfigError

# Elements of a pattern, at most.
MOST = 1 << 27
BYTES = {"i8": 1, "i16": 2, "bf16": 2, "f16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}


def arguments(parser: ArgumentParser) -> None:
    """The mover, and what it is to move."""
    add = parser.add_argument
    add("--device", default="aie2-shim", help="mover: aie2-shim, aie2-memtile or aie2-core (default: aie2-shim)")
    add("--channel", type=int, default=0, help="channel of the mover (default: 0)")
    add("--dtype", default="i32", help=f"elements: {', '.join(BYTES)} (default: i32)")
    add("--shape", help="shape of the buffer, outermost first, e.g. 64x64; by default it ends where the pattern does")
    add("--slice", help="elements of the buffer as NumPy slices them, e.g. 'a[2::3, :, ::-1]' or 'a.T'; needs --shape")
    add("--sizes", help="rounds of nested loops, outermost first, e.g. 4,64,32")
    add("--strides", help="strides of these loops in elements, e.g. 2048,1,64")
    add("--offset", type=int, default=0, help="first element of the loops (default: 0)")
    add("--indices", type=Path, help="elements one by one: a .npy file, or a text file with an integer a line")
    add(
        "--stream",
        type=Path,
        help="a stream of the memory pub, a CSV: its words, as they go out",
    )
    add("--write", action="store_true", help="elements are written: refuse a pattern that has one of them twice")
    add("--time-limit", type=flags.seconds, metavar="S", help="seconds, after which the least so far counts")


def run(**given: Any) -> int:
    """Print descriptors and exit with 0; with 1 where none exist, or none were found."""
    from tilewright.pushmem import movers
    from tilewright.pushmem.movers import least, text

    own = movers.mover(given["device"])
    if not 0 <= given["channel"] < own.channels:
        raise ConfigError(f"--channel: expected 0 to {own.channels - 1} of {own.title}, found {given['channel']}")
    if given["dtype"] not in BYTES:
        raise ConfigError(f"--dtype: expected one of {', '.join(BYTES)}, found {given['dtype']!r}")
    wide = BYTES[given["dtype"]]
    shape = None if given["shape"] is None else _numbers("--shape", given["shape"], "x")
    indices = _indices(given, shape)
    if given["write"]:
        _once(indices)
    elements = math.prod(shape) if shape else None
    answer = least.descriptors(indices, wide, own, elements, given["time_limit"])
    print(f"pattern    {len(indices):,} elements of {wide} bytes, for the {own.title}")
    if answer.status != least.SOLVED:
        found = "no legal descriptors exist" if answer.status == least.NONE else "unknown"
        print(f"answer     {found}: {answer.why}")
        return 1
    sure = "the least there are" if answer.least else "fewer may exist"
    limit = f"of {own.descriptors}" if not own.first_of_odd else f"of {own.descriptors} of this channel"
    number = f"{answer.descriptors} descriptor{'s' * (answer.descriptors != 1)}"
    print(f"answer     {number} {limit}, {sure}" + f"; {answer.why}" * bool(answer.why))
    size = elements or (max(indices.tolist(), default=0) + 1)
    print(text.written(answer.tasks, own, -(-size * wide // own.granule), given["channel"]), end="")
    return 0


def _indices(given, shape):
    """Elements in their order, int64 [n]. Raises `ConfigError`."""
    import numpy as np

    ways = [name for name in ("slice", "sizes", "indices", "stream") if given[name] is not None]
    if len(ways) != 1:
        found = " and ".join(f"--{name}" for name in ways) or "none"
        raise ConfigError(f"expected one of --slice, --sizes, --indices and --stream, found {found}")
    if (given["strides"] is not None) != (ways == ["sizes"]) or (given["offset"] and ways != ["sizes"]):
        found = " and ".join(f"--{name}" for name in ("sizes", "strides", "offset") if given[name]) or "neither"
        raise ConfigError(f"expected --sizes with --strides, and --offset with these alone, found {found}")
    if ways == ["sizes"]:
        sizes = _numbers("--sizes", given["sizes"], ",", least=1)
        strides = _numbers("--strides", given["strides"], ",", least=None)
        if len(sizes) != len(strides):
            raise ConfigError(f"--strides: expected {len(sizes)} numbers as of --sizes, found {len(strides)}")
        _few("--sizes", sizes)
        rounds = np.indices(sizes).reshape(len(sizes), -1)
        return given["offset"] + np.array(strides) @ rounds
    if ways == ["slice"]:
        if shape is None:
            raise ConfigError("--slice: expected the --shape of the buffer, found none")
        _few("--shape", shape)
        return sliced(given["slice"], shape)
    return _read(given["indices"]) if ways == ["indices"] else _streamed(given["stream"])


def _once(indices):
    import numpy as np

    order = np.argsort(indices, kind="stable")
    twice = np.flatnonzero(np.diff(indices[order]) == 0)
    if len(twice):
        first, other = sorted(order[twice[0] : twice[0] + 2].tolist())
        raise ConfigError(
            f"--write: expected each element once, found {indices[first]} at the places {first} and {other}"
        )


def _streamed(path):
    from tilewright.pushmem import memories, streams, templates

    moved = templates.words(streams.read(path, "top", memories.member("pub").PARAMETERS))
    outs = [numbers for at, _, numbers in moved.reads if len(at)]
    if len(outs) != 1 or sum(len(at) > 0 for at in moved.arrivals) != 1 or moved.free:
        raise ConfigError(f"--stream {path}: expected one input, and one output of known words, found others")
    return outs[0]


def _few(name, sizes):
    if math.prod(sizes) > MOST:
        raise ConfigError(f"{name}: expected at most {MOST:,} elements, found {math.prod(sizes):,}")


def sliced(text: str, shape: tuple[int, ...]) -> Any:
    """Elements int64 [n] of a buffer of this shape as ``a``, by slices, integers, ``.T`` and ``.transpose(...)``.

    Raises `ConfigError` for other expressions, and for slices that NumPy refuses.
    """
    import numpy as np

    form = re.fullmatch(r"\s*\w+\s*(?:\[([-\d:,\s.]*)\])?\s*(\.T|\.transpose\(([\d,\s]*)\))?\s*", text)
    if form is None:
        raise ConfigError(f"--slice: expected an expression such as 'a[2::3, :, ::-1]' or 'a.T', found {text!r}")
    found = np.arange(math.prod(shape)).reshape(shape)
    try:
        if form[1] is not None:
            found = found[tuple(map(_part, form[1].split(",")))]
        if form[2]:
            found = found.transpose([int(n) for n in form[3].split(",")] if form[3] else None)
    except (IndexError, ValueError) as error:
        raise ConfigError(f"--slice {text}: {error}, with a of shape {shape}") from error
    return np.ascontiguousarray(found).reshape(-1)


def _part(text):
    """One index: a slice, an integer or ``...``."""
    parts = [None if not part.strip() else int(part) for part in text.split(":")] if text.strip() != "..." else []
    return Ellipsis if not parts else slice(*parts) if len(parts) > 1 else parts[0]


def _read(path):
    import numpy as np

    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False).reshape(-1)
        return np.array([int(line) for line in path.read_text().split()], np.int64)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--indices {path}: expected a .npy file, or an integer a line: {error}") from error


def _numbers(name, text, mark, least=1):
    parts = [part.strip() for part in text.split(mark)]
    if not all(re.fullmatch(r"-?\d+", part) for part in parts):
        raise ConfigError(f"{name}: expected integers with {mark!r} between them, found {text!r}")
    found = tuple(map(int, parts))
    if least is not None and min(found) < least:
        raise ConfigError(f"{name}: expected numbers of at least {least}, found {text!r}")
    return found
