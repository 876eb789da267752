"""The page: what a run left in its folders, set into ``page.html``."""

import base64
import gzip
import inspect
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

import numpy as np

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError
from tilewright_study import experiments, figures, tables
from tilewright_study.report import ASSETS, RECORDED, explorer
from tilewright_study.tables import _origin, claims

# What the page calls the run whose figures and tables it shows.
THIS = "This run"


@dataclass(frozen=True)
class Item:
    """A figure or a table on the page; `caption` is HTML. A figure's `seen` is what is written in it. `rows` and
    `columns` are a table's. `hardware` is that of its times; empty where nothing in it was timed."""

    name: str
    shows: str
    caption: str
    hardware: str
    command: str
    picture: str = ""
    seen: str = ""
    columns: tuple = ()
    rows: tuple = ()


def write(figure_files, table_files, explored, output, recorded=()):
    """Write the page to `output`, whole.

    figure_files: SVGs; table_files: CSVs; each with its origin, a JSON, beside it. explored: what the tile explorer
    draws, `report.explored`; without any the page says that it has none. recorded: claims and the rows of recorded
    runs, `report.recorded`.

    Raises `ArtifactError` for a file that is missing or is not what it should be, `UnknownNameError` for a name.
    """
    drawn = [_figure(Path(path)) for path in figure_files]
    made = [_table(Path(path)) for path in table_files if Path(path).stem != "claims"]
    results = next((Path(path) for path in table_files if Path(path).stem == "claims"), None)
    runs = ({THIS: _results(results)} if results else {}) | _recorded([Path(path) for path in recorded])
    # What the results are of. Without any it is the longest, which names all facts that the others name some of.
    longest = max((item.hardware for item in [*drawn, *made]), key=len, default="")
    hardware = _origin.load(results.with_suffix(".json")).hardware if results else longest
    scene = explorer.scene(explored) if explored else None
    parts = {
        "runs": list(runs),
        "kinds": _kinds(runs),
        "found": _headline(runs),
        "hardware": hardware,
        "even": _evenness(made),
        "experiments": _experiments(drawn, made),
        "scene": scene and _packed(json.dumps(scene, separators=(",", ":"), allow_nan=False)),
        "omitted": scene["omitted"] if scene else [],
        "plotly": _packed(_plotly()) if scene else "",
        "packed": _packed,
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


def _packed(text):
    """`text` as the page keeps what it shows on demand: gzip in base64, which ``page.js`` unpacks."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _item(path, shows, caption, **parts):
    """`Item` of the file at `path`."""
    made = _origin.load(path.with_suffix(".json"))
    command = f"snakemake --cores all {path.as_posix()}"
    return Item(path.stem, shows, _html(caption), made.hardware, command, **parts)


def _figure(path):
    svg, of = _read(path), figures.member(path.stem)
    # Letters as they are pack far better than base64.
    picture = f"data:image/svg+xml,{quote(svg, safe=' !$&()*+,-./:;=?@[]_~')}"
    return _item(path, of.shows, of.caption, picture=picture, seen=_seen(path, svg))


def _seen(path, svg):
    """What is written in a figure, for those who do not see it: its titles, its legend and its axes."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    try:
        root = ElementTree.fromstring(svg, parser)
    except ElementTree.ParseError as error:
        raise ArtifactError(f"{path}: expected an SVG, found: {error}") from error
    parts = {"Legend": [], "Panels": [], "Axes": []}
    places = {"axes_": "Panels", "matplotlib.axis_": "Axes", "legend_": "Legend"}

    def walk(group, part):
        for child in group:
            if child.tag is not ElementTree.Comment:
                name = re.sub(r"\d+$", "", child.get("id", ""))
                if name not in ("xtick_", "ytick_"):
                    walk(child, places.get(name, part))
            elif part and re.search(r"[^\W\d]{3}", child.text):
                parts[part].append(" ".join(child.text.split()))

    walk(root, "")
    # The legend is headed by the title.
    title, parts["Legend"] = parts["Legend"][:1], parts["Legend"][1:]
    return ". ".join(
        [*title, *(f"{part}: {', '.join(dict.fromkeys(words))}" for part, words in parts.items() if words)]
    )


def _table(path):
    columns, rows = _grid(path)
    return _item(path, *tables.words(tables.member(path.stem)), columns=columns, rows=rows)


def _experiments(drawn, made):
    """``(name, what it is about, figures, tables)`` of each experiment with any of these."""
    found = []
    for name in experiments.NAMES:
        of = experiments.member(name)
        about = inspect.cleandoc(of.__doc__).partition("\n\n")[0]
        own = [item for item in drawn if figures.module(item.name).startswith(f"{of.__name__}.")]
        listed = [item for item in made if tables.module(item.name).startswith(f"{of.__name__}.")]
        if own or listed:
            found.append((name, re.sub(r"\s*\((?:stage\s+)?T\d\)", "", about), own, listed))
    return found


def _results(path):
    """``{id of a claim: its row}`` of the table at `path`."""
    import pandas as pd

    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""]).fillna({"unit": "", "where": ""})
        return _said(frame)
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: expected the table claims, found: {error!r}") from error


def _said(frame):
    return {row["id"]: row | {"found": claims.found(row)} for row in frame.to_dict("records")}


def _recorded(paths):
    """The same of each recorded run: of the lists and values among `paths` with the rows of its folder."""
    runs = {run: [path for path in paths if path.parent.as_posix().endswith(run)] for run in RECORDED}
    shared = [path for path in paths if not any(path in rows for rows in runs.values())]
    return {RECORDED[run]: _said(claims.table([*shared, *rows])) for run, rows in runs.items() if rows}


def _kinds(runs):
    """``[(heading, [(sentence, [row of each run, or None])])]`` of the claims of each kind."""
    rows = {name: row for found in reversed(runs.values()) for name, row in found.items()}
    ordered = [name for found in runs.values() for name in found]
    return [
        (heading, [(rows[name]["claim"], [found.get(name) for found in runs.values()]) for name in names])
        for kind, (heading, _) in claims.KINDS.items()
        if (names := [name for name in dict.fromkeys(ordered) if rows[name]["kind"] == kind])
    ]


def _headline(runs):
    """How a layer compares with the fastest other attention in the first run that says so, a sentence."""
    for run, found in runs.items():
        rows = [row for name, row in found.items() if name.startswith("over_peer:") and row["cases"]]
        if rows:
            least, most = min(row["measured"] for row in rows), max(row["best"] for row in rows)
            name = run if run == THIS else f"The {run[0].lower()}{run[1:]}"
            ratio = f"{claims.digits(least)} to {claims.digits(most)} times"
            return f"{name} found one layer {ratio} as fast as the fastest other attention."
    return "No layer was compared with other attention."


def _grid(path):
    """``(columns, rows)`` of the table at `path`, as an `Item` has them."""
    import pandas as pd

    module = tables.member(path.stem)
    try:
        # Only an empty field is missing: "none" is an order.
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
        numeric, rows = tables.cells(frame, module.SHOWN)
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: expected the table {path.stem}, found: {error!r}") from error
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
        f"In the median of {len(found):,} timed rows the 80th percentile is {middle:.2f} times the 20th, and in one "
        f"row of ten {most:.2f} times or more. Other work on the machine raises both."
    )
