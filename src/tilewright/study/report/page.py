"""The page: what a run left in its folders, set into ``page.html``."""

import base64
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tilewright.core import artifacts, registry
from tilewright.core.errors import ArtifactError
from tilewright.study import figures, tables
from tilewright.study.report import ASSETS, explorer
from tilewright.study.tables import _origin
from tilewright.study.tables.claims import VERDICTS

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


def write(figure_files, table_files, explored, captions, output):
    """Write the page to `output`, whole.

    figure_files: SVGs; table_files: CSVs; each with its origin, a JSON, beside it. explored: what the tile explorer
    draws, `report.explored`; without any the page says that it has none. captions: reStructuredText, one file of the
    name of each figure and table. Raises `ArtifactError` for a file that is missing or is not what it should be,
    `UnknownNameError` for a name.
    """
    texts = {Path(path).stem: _html(path) for path in captions}
    drawn = [_figure(Path(path), texts) for path in figure_files]
    made = [_table(Path(path), texts) for path in table_files]
    claims = next((item for item in made if item.name == "claims"), None)
    scene = explorer.scene(explored) if explored else None
    parts = {
        "claims": claims,
        "counts": _counts(claims),
        # The longest names all facts that the others name some of.
        "hardware": max((item.hardware for item in made), key=len, default=""),
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


def _html(path):
    """A caption as HTML."""
    from docutils.core import publish_parts

    settings = {"raw_enabled": False, "file_insertion_enabled": False, "halt_level": 2, "report_level": 5}
    return publish_parts(_read(path), writer="html5", settings_overrides=settings)["body"]


def _read(path):
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: expected a text file, which cannot be read: {error}") from error


def _item(path, family, kind, texts, **parts):
    """`Item` of the file at `path`, made by a member of `family`."""
    module = registry.member(family.__name__, kind, path.stem, family.NAMES)
    made = _origin.load(path.with_suffix(".json"))
    if path.stem not in texts:
        raise ArtifactError(
            f"{path}: expected a caption {path.stem}.rst, found those of {', '.join(texts) or 'nothing'}"
        )
    shows = " ".join(module.__doc__.partition("\n\n")[0].split())
    command = f"snakemake --cores all {path.as_posix()}"
    return Item(path.stem, shows, texts[path.stem], _method(made.inputs), made.hardware, command, **parts)


def _method(inputs):
    """How the files `inputs` came about, in words."""
    # The innermost folder that is known, wherever the run or the checkout lies.
    kinds = [next((part for part in Path(path).parts[::-1] if part in METHODS), "") for path in inputs]
    counts = {kind: kinds.count(kind) for kind in METHODS}
    return [f"{METHODS[kind]}: {n} file{'s' * (n > 1)}" for kind, n in counts.items() if n]


def _figure(path, texts):
    picture = base64.b64encode(_read(path).encode()).decode()
    return _item(path, figures, "figure", texts, picture=f"data:image/svg+xml;base64,{picture}")


def _table(path, texts):
    import pandas as pd

    module = registry.member("tilewright.study.tables", "table", path.stem, tables.NAMES)
    try:
        # Only an empty field is missing: "none" is an order.
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
        if parts := getattr(module, "PARTS", None):
            column, values = parts
            frame = frame.sort_values(column, key=lambda found: found.map(values.index), kind="stable")
        numeric, rows = tables.cells(frame, module.SHOWN)
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: expected the table {path.stem}, found: {error!r}") from error
    columns = [(name, header, right) for (name, (header, _)), right in zip(module.SHOWN.items(), numeric, strict=True)]
    raw = frame[list(module.SHOWN)].astype(object).where(frame[list(module.SHOWN)].notna(), "").to_numpy().tolist()
    cells = [list(zip(text, value, strict=True)) for text, value in zip(rows, raw, strict=True)]
    return _item(path, tables, "table", texts, columns=tuple(columns), rows=tuple(cells))


def _counts(claims):
    """``{verdict: number of claims}``."""
    if claims is None:
        return {}
    place = [name for name, _, _ in claims.columns].index("verdict")
    found = [row[place][0] for row in claims.rows]
    return {verdict: found.count(verdict) for verdict in VERDICTS}
