"""Tables of an artifact's description and evaluation, as conferences ask for them: claims, and what checks each."""

import ast
import re
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from tilewright_study import experiments
from tilewright_study.measure import rows as _rows
from tilewright_study.tables import _read, _select, claims

# What an experiment reads of others.
WITH = {"stream": ("paths",)}
# Seconds: longer pauses between rows are of other work.
PAUSE = 300


def listed(root):
    """Each claim, with its number and its experiment."""
    (frame,) = _read.frames([root / _select.CLAIMS], "claims")
    of = [claims.experiment_of(name.partition(":")[0]) for name in frame["id"]]
    return frame.assign(number=range(1, len(frame) + 1), experiment=of)


def by_experiment(root, folders):
    """``(header, lines)``: of each experiment its claims, what to select, and the minutes that its rows took.

    folders: of the recorded runs, by the words for their device.
    """
    frame, lines = listed(root), []
    for name in filter(set(frame["experiment"]).__contains__, experiments.NAMES):
        own = frame.loc[frame["experiment"] == name, "number"]
        chosen = ", ".join([*WITH.get(name, ()), name])
        spent = [_minutes(root / folder / f"{name}.csv") for folder in folders.values()]
        lines.append([_title(name), f"`experiments=[{chosen}]`", _numbers([*own]), *spent])
    return ["what is measured", "selected by", "claims", *(f"minutes, {words}" for words in folders)], lines


def by_claim(root, folders, frames):
    """``(header, lines)``: each claim and its verdict in each of `frames`, by the words for their device.

    folders: of the recorded runs, the one of a CPU first.
    """
    lines, (cpu, *_) = [], folders.values()
    for claim in listed(root).to_dict("records"):
        cells = [frame["verdict"].get(claim["id"], "") for frame in frames.values()]
        if not cells[0]:
            cells[0] = "needs a GPU" if (root / cpu / f"{claim['experiment']}.csv").is_file() else "not recorded"
        lines.append([str(claim["number"]), claim["claim"], *cells])
    return ["", "claim", *frames], lines


def _title(name):
    """The first clause of an experiment's docstring."""
    text = Path(experiments.member(name).__file__).read_text(encoding="utf-8")
    return re.match(r"[^,:.(]+", ast.get_docstring(ast.parse(text)))[0].strip()


def _minutes(path):
    """Minutes between the rows of a file, without long pauses; empty where it is not there."""
    if not path.is_file():
        return ""
    times = sorted(datetime.fromisoformat(row["time"]) for row in _rows.read(path, experiments.row_types())[1])
    gaps = [(after - before).total_seconds() for before, after in pairwise(times)]
    minutes = sum(gap for gap in gaps if gap <= PAUSE) / 60
    return f"{minutes:.0f}" if minutes >= 1 else "< 1"


def _numbers(found):
    """Numbers in words: those that follow one another as a range."""
    runs = []
    for number in found:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}–{last}" if last > first else f"{first}" for first, last in runs)
