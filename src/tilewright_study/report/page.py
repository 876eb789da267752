"""The page: what a run left in its folders, set into ``page.html``."""

import base64
import json
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path

import numpy as np

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError
from tilewright_study import experiments, figures, tables
from tilewright_study.report import ASSETS, explorer
from tilewright_study.tables import _origin, _select
from tilewright_study.tables.claims import VERDICTS
from tilewright_study.tables.claims import table as judged

# How the files of each folder came about: the method behind what is drawn from them.
METHODS = {
    "graphs": "patterns from the models' definitions, put in order (T1, T2)",
    "blocks": "exact covers of the ordered patterns by blocks of a tile (T2)",
    "profiling": "tiles timed alone on the device, shape by shape (T3)",
    "schedules": "schedules solved from blocks and profiles; their times are predictions (T4)",
    "logs": "runs whose results were checked against a reference before they were timed: p50, p20 and p80 (T5)",
    "paper": "values of the paper",
    "claims.csv": "the list of claims",
}


@dataclass(frozen=True)
class Item:
    """A figure or a table on the page; `caption` is HTML, `columns` and `rows` are a table's."""

    name: str
    shows: str
    caption: str
    method: list
    hardware: str
    command: str
    picture: str = ""
    columns: tuple = ()
    rows: tuple = ()


def write(figure_files, table_files, explored, output, recorded=()):
    """Write the page to `output`, whole.

    figure_files: SVGs; table_files: CSVs; each with its origin, a JSON, beside it. explored: what the tile explorer
    draws, `report.explored`; without any the page says that it has none. recorded: claims and the rows of a recorded
    run, `report.recorded`.

    Raises `ArtifactError` for a file that is missing or is not what it should be, `UnknownNameError` for a name.
    """
    drawn = [_figure(Path(path)) for path in figure_files]
    made = [_table(Path(path)) for path in table_files]
    claims = next((item for item in made if item.name == "claims"), None)
    scene = explorer.scene(explored) if explored else None
    # What the verdicts are of. Without any it is the longest, which names all facts that the others name some of.
    hardware = claims.hardware if claims else max((item.hardware for item in made), key=len, default="")
    runs = [("This run", hardware, claims)] if claims else []
    if recorded:
        item = _recorded([Path(path) for path in recorded])
        runs.append((f"Recorded run {item.name}", item.hardware, item))
    parts = {
        "runs": [(title, device, item, _counts(item)) for title, device, item in runs],
        "hardware": hardware,
        "even": _evenness(made),
        "figures": drawn,
        "tables": [item for item in made if item is not claims],
        "scene": scene and json.dumps(scene, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "omitted": scene["omitted"] if scene else [],
        "plotly": _plotly() if scene else "",
        **{path.name.replace(".", "_"): path.read_text(encoding="utf-8") for path in ASSETS[1:]},
    }
    artifacts.write_text(output, _environment().get_template(ASSETS[0].name).render(parts))


@cache
def _environment():
    import jinja2

    loader = jinja2.FileSystemLoader(ASSETS[0].parent)
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)


def _plotly():
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _html(caption):
    """A caption as HTML. Raises `SystemMessage` of docutils for what is no reStructuredText."""
    from docutils.core import publish_parts

    settings = {"raw_enabled": False, "file_insertion_enabled": False, "halt_level": 2, "report_level": 5}
    settings["warning_stream"] = False
    return publish_parts(caption, writer="html5", settings_overrides=settings)["body"]


def _read(path):
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: expected a text file, which cannot be read: {error}") from error


def _item(path, shows, caption, **parts):
    """`Item` of the file at `path`."""
    made = _origin.load(path.with_suffix(".json"))
    command = f"snakemake --cores all {path.as_posix()}"
    return Item(path.stem, shows, _html(caption), _method(made.inputs), made.hardware, command, **parts)


def _method(inputs):
    """How the files `inputs` came about, in words."""
    # The innermost folder that is known, wherever the run or the checkout lies.
    known = [[*Path(path).parts[::-1], _rows_of(path)] for path in inputs]
    kinds = [next((part for part in parts if part in METHODS), "") for parts in known]
    counts = {kind: kinds.count(kind) for kind in METHODS}
    return [f"{METHODS[kind]}: {n} file{'s' * (n > 1)}" for kind, n in counts.items() if n]


def _rows_of(path):
    """The folder of rows, where a file of no folder that is known bears the name of an experiment: recorded rows."""
    return "logs" if Path(path).stem in experiments.NAMES else ""


def _figure(path):
    picture = base64.b64encode(_read(path).encode()).decode()
    of = figures.member(path.stem)
    return _item(path, of.shows, of.caption, picture=f"data:image/svg+xml;base64,{picture}")


def _table(path):
    columns, rows = _grid(path, path.stem)
    return _item(path, *tables.words(tables.member(path.stem)), columns=columns, rows=rows)


def _recorded(paths):
    """`Item` of the claims that are judged by the files `paths`, the rows of a recorded run last."""
    folder = paths[-1].parent
    columns, rows = _grid(folder, "claims", StringIO(judged(paths).to_csv(index=False)))
    place = [name for name, _, _ in columns].index("device")
    return Item(
        name=folder.name,
        shows="",
        caption="<p>Verdicts on rows that were recorded before. This run measured none of them.</p>",
        method=[f"{METHODS['logs']}: recorded in {folder.as_posix()}"],
        hardware="; ".join(dict.fromkeys(row[place][0] for row in rows)),
        command=f"python workflow/scripts/table.py --table claims --inputs {_select.CLAIMS} {_select.PAPER_LATENCY} "
        f"{folder.as_posix()} --outputs claims.csv",
        columns=columns,
        rows=rows,
    )


def _grid(path, name, csv=None):
    """``(columns, rows)`` of the table `name` at `path`, or of its `csv`, as an `Item` has them."""
    import pandas as pd

    module = tables.member(name)
    try:
        # Only an empty field is missing: "none" is an order.
        frame = pd.read_csv(csv or path, keep_default_na=False, na_values=[""])
        if parts := getattr(module, "PARTS", None):
            column, values = parts
            frame = frame.sort_values(column, key=lambda found: found.map(values.index), kind="stable")
        numeric, rows = tables.cells(frame, module.SHOWN)
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: expected the table {name}, found: {error!r}") from error
    columns = [(name, header, right) for (name, (header, _)), right in zip(module.SHOWN.items(), numeric, strict=True)]
    raw = frame[list(module.SHOWN)].astype(object).where(frame[list(module.SHOWN)].notna(), "").to_numpy().tolist()
    return tuple(columns), tuple(list(zip(text, value, strict=True)) for text, value in zip(rows, raw, strict=True))


def _evenness(made):
    """How far apart repeated timings of the same calls are, in words; empty where no table holds any."""
    found = []
    for item in made:
        names = [name for name, _, _ in item.columns]
        if {"p20_us", "p80_us"} <= set(names):
            low, high = names.index("p20_us"), names.index("p80_us")
            pairs = ((row[low][1], row[high][1]) for row in item.rows)
            found += [last / first for first, last in pairs if first not in ("", 0) and last != ""]
    if not found:
        return ""
    middle, most = np.percentile(found, (50, 90))
    return (
        f"p80 over p20 of {len(found):,} rows: median {middle:.2f}, nine tenths below {most:.2f}. Other work on the "
        "machine raises both, and the times with them"
    )


def _counts(claims):
    """``{verdict: number of claims}``, of the verdicts that there are."""
    place = [name for name, _, _ in claims.columns].index("verdict")
    found = [row[place][0] for row in claims.rows]
    return {verdict: found.count(verdict) for verdict in VERDICTS if verdict in found}
