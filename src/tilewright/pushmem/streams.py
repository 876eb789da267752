"""What goes in and comes out of a tile or of a part of it, cycle by cycle, and its file.

A CSV has the header ``data_in,valid_in,data_out,valid_out`` and a row for each cycle. Data are lists of ports, each a
list of words, such as ``[[3] [0]]``; valid is a mask of ports, port 0 the lowest bit. Blanks are free. A word may be
``X``: going out it may be any, coming in it is not known. A word that comes in at a valid port of the top or of ``agg``
is known. Tokens number the words: each word that comes in has a number of its own.

| part | data in | data out |
|---|---|---|
| top | a word for each input | a word for each output |
| agg | a word for each input | for each input the aggregator's row that the memory is given |
| sram | the aggregators' rows | the read register; valid where an output fetches; the word shows in the next cycle |
| tb | the read register; valid where an output fetches | a word for each output |
"""

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError
from tilewright.pushmem.memories import Parameters

COLUMNS = ("data_in", "valid_in", "data_out", "valid_out")
PARTS = ("top", "agg", "sram", "tb")
# Any word.
ANY = -1
# Cycles behind the last event, in which nothing may happen.
DRAIN = 64
_NUMBER = re.compile(r"\d+|[xX]")


@dataclass(frozen=True)
class Stream:
    """A trace of a part of a tile. data_in, data_out: int64 [cycles, ports, words], `ANY` for X; valid_in, valid_out:
    bool [cycles, ports]."""

    part: str
    data_in: np.ndarray
    valid_in: np.ndarray
    data_out: np.ndarray
    valid_out: np.ndarray

    def __len__(self) -> int:
        return len(self.data_in)


def shapes(part: str, parameters: Parameters) -> tuple[tuple[int, int], tuple[int, int], int, int]:
    """``((ports, words), (ports, words), valid bits in, valid bits out)`` of a part's data."""
    one, row = (parameters.inputs, 1), (parameters.inputs, parameters.fetch)
    register, out = (1, parameters.fetch), (parameters.outputs, 1)
    return {
        "top": (one, out, parameters.inputs, parameters.outputs),
        "agg": (one, row, parameters.inputs, parameters.inputs),
        "sram": (row, register, parameters.inputs, parameters.outputs),
        "tb": (register, out, parameters.outputs, parameters.outputs),
    }[part]


def read(path: str | Path, part: str, parameters: Parameters) -> Stream:
    """Read a stream from a CSV file.

    Parameters
    ----------
    path : str or Path
        File with the columns ``data_in,valid_in,data_out,valid_out`` and a row for each cycle.
    part : str
        ``top`` for the whole tile, or ``agg``, ``sram`` or ``tb``.
    parameters : Parameters
        Ports and words of the tile, ``memory.PARAMETERS``.

    Returns
    -------
    Stream

    Raises
    ------
    ArtifactError
        For a file that is missing or damaged; the message names row and column.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; expected a stream") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: expected a stream, found a file that cannot be read: {error}") from error
    rows = list(csv.reader(io.StringIO(text)))
    header = tuple(cell.strip() for cell in rows[0]) if rows else ()
    if header != COLUMNS:
        raise ArtifactError(f"{path}: expected the columns {','.join(COLUMNS)}, found {','.join(header) or 'none'}")
    if len(rows) == 1:
        raise ArtifactError(f"{path}: expected a row for each cycle, found none")
    given, told, bits_in, bits_out = shapes(part, parameters)
    found: list[list] = [[], [], [], []]
    for number, row in enumerate(rows[1:]):
        where = f"{path}: row {number + 2} (cycle {number})"
        if len(row) != len(COLUMNS):
            missing = f": no {', '.join(COLUMNS[len(row) :])}" if len(row) < len(COLUMNS) else ""
            raise ArtifactError(f"{where}: expected {len(COLUMNS)} columns, found {len(row)}{missing}")
        for column, shape, limit in ((0, given, None), (2, told, None), (1, None, bits_in), (3, None, bits_out)):
            place = f"{where}, column {COLUMNS[column]}"
            if limit is None:
                found[column].append(_words(place, row[column], shape, parameters.bits))
            else:
                found[column].append(_mask(place, row[column], limit))
        if part in ("top", "agg") and any(
            word == ANY and found[1][-1] >> port & 1 for port, word in enumerate(found[0][-1])
        ):
            raise ArtifactError(
                f"{where}, column data_in: expected words that are known where valid_in is set, found X"
            )
    data = [np.array(found[column], dtype=np.int64).reshape(-1, *shape) for column, shape in ((0, given), (2, told))]
    valid = [_bits(found[column], limit) for column, limit in ((1, bits_in), (3, bits_out))]
    return Stream(part, data[0], valid[0], data[1], valid[1])


def _words(where, text, shape, bits):
    found = _NUMBER.findall(text)
    rest = re.sub(r"[\[\]\s]", "", _NUMBER.sub("", text))
    ports, words = shape
    lists = re.findall(r"\[[^\[\]]*\]", text)
    if rest or len(lists) != ports or any(len(_NUMBER.findall(each)) != words for each in lists):
        raise ArtifactError(f"{where}: expected {ports} lists of {words} words, found {text.strip() or 'nothing'}")
    values = [ANY if word in "xX" else int(word) for word in found]
    for value in values:
        if value >= 1 << bits:
            raise ArtifactError(f"{where}: expected words of {bits} bits, found {value}")
    return values


def _mask(where, text, bits):
    if not text.strip().isdigit() or int(text) >= 1 << bits:
        raise ArtifactError(
            f"{where}: expected a mask of {bits} ports, 0 to {(1 << bits) - 1}, found {text.strip() or 'nothing'}"
        )
    return int(text)


def _bits(masks, count):
    return (np.array(masks)[:, None] >> np.arange(count)) & 1 == 1


def write(path: str | Path, stream: Stream) -> None:
    """Write a stream as a file that `read` reads."""
    lines = [",".join(COLUMNS)]
    for cycle in range(len(stream)):
        cells = []
        for data, valid in ((stream.data_in, stream.valid_in), (stream.data_out, stream.valid_out)):
            lists = ["[" + " ".join("X" if w == ANY else str(w) for w in words) + "]" for words in data[cycle]]
            # The read register is one list.
            cells.append(lists[0] if stream.part in ("sram", "tb") and data.shape[1] == 1 else f"[{' '.join(lists)}]")
            cells.append(str(int((valid[cycle] << np.arange(valid.shape[1])).sum())))
        lines.append(",".join(cells))
    artifacts.write_text(path, "\n".join(lines) + "\n")


def of_moves(arrivals: np.ndarray, reads: list[tuple[np.ndarray, np.ndarray]], parameters: Parameters) -> Stream:
    """The `Stream` at the top of a tile in which word n comes in at ``arrivals[n]``, and words go out as `reads`
    says."""
    cycles = int(max([arrivals.max(), *(at.max() for at, _ in reads if len(at))])) + 1 + DRAIN
    data_in = np.zeros((cycles, parameters.inputs, 1), dtype=np.int64)
    data_out = np.zeros((cycles, parameters.outputs, 1), dtype=np.int64)
    valid_in, valid_out = (np.zeros(x.shape[:2], dtype=bool) for x in (data_in, data_out))
    data_in[arrivals, 0, 0], valid_in[arrivals, 0] = np.arange(len(arrivals)), True
    for port, (at, words) in enumerate(reads):
        data_out[at, port, 0], valid_out[at, port] = words, True
    return Stream("top", data_in, valid_in, data_out, valid_out)


def differences(wanted: Stream, data_out: np.ndarray, valid_out: np.ndarray) -> list[str]:
    """What a run did otherwise than `wanted`, in words; the first of each port. data_out: [cycles, ports, words]."""
    said = []
    for port in range(wanted.valid_out.shape[1]):
        wrong = np.flatnonzero(valid_out[:, port] != wanted.valid_out[:, port])
        if len(wrong):
            cycle = wrong[0]
            words = ("a word", "none") if wanted.valid_out[cycle, port] else ("none", "a word")
            said.append(f"port {port}, cycle {cycle}: expected {words[0]}, found {words[1]}")
            continue
        place = min(port, wanted.data_out.shape[1] - 1)
        # The read register shows its word in every cycle.
        shown = True if wanted.part == "sram" else wanted.valid_out[:, port, None]
        counts = shown & (wanted.data_out[:, place] != ANY)
        unlike = np.argwhere(counts & (data_out[:, place] != wanted.data_out[:, place]))
        if len(unlike):
            cycle, lane = unlike[0]
            said.append(
                f"port {port}, cycle {cycle}: expected {wanted.data_out[cycle, place, lane]}, "
                f"found {data_out[cycle, place, lane]}"
            )
    return said
