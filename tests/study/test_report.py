"""The page of a made-up study: what it says, what its explorer shows, and how it behaves in a browser."""

import base64
import gzip
import html
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from test_figures import ROOT, configured

from helpers import browser, synthetic
from tilewright import graph
from tilewright.attention import blocks, profile, schedule
from tilewright.core.errors import ArtifactError
from tilewright_study import experiments, figures, report, tables
from tilewright_study.report import explorer, page
from tilewright_study.tables import _origin, _quoted, _read, _select, claims

in_browser = pytest.mark.skipif(bool(browser.MISSING), reason=f"not found: {browser.MISSING}")
SHOWN = ("speedup", "fill"), ("claims", "speedup", "latency")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The configuration of a study whose files, some figures and tables lie in the working folder."""
    root, before = tmp_path_factory.mktemp("report"), Path.cwd()
    os.chdir(root)
    (root / "expected").symlink_to(ROOT / "expected")
    chosen = configured(workloads=["vil-tiny-224-s1", "dynamicvit-s-224"], orders=["none", "ic"])
    synthetic.write_graphs(root, chosen)
    synthetic.write_logs(root, chosen)
    for name in SHOWN[0]:
        figures.draw(name, figures.needs(name, chosen), [f"figures/{name}.svg", f"figures/{name}.json"])
    for name in SHOWN[1]:
        outputs = [f"results/tables/{name}.csv", f"results/tables/{name}.json"]
        tables.tabulate(name, tables.needs(name, chosen), outputs)
    yield chosen
    os.chdir(before)


def write(output, explored, **changes):
    parts = {
        "figure_files": [f"figures/{name}.svg" for name in SHOWN[0]],
        "table_files": [f"results/tables/{name}.csv" for name in SHOWN[1]],
    }
    page.write(**parts | changes, explored=explored, output=output)
    return Path(output).read_text()


@pytest.fixture(scope="module")
def written(study):
    return write("study.report.html", report.explored(study), recorded=report.recorded(configured()))


@pytest.fixture(scope="module")
def scene(study):
    return explorer.scene(report.explored(study))


# What the page says


def unpacked(text, pattern):
    """What the page shows on demand of the first place that `pattern` finds."""
    return gzip.decompress(base64.b64decode(re.search(pattern, text, re.DOTALL)[1])).decode()


def results(text):
    """``{claim: [cell of each run]}``, as words."""
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', text, re.DOTALL)
    return {
        claim: [" ".join(re.sub("<[^>]*>", " ", cell).split()) for cell in re.findall(r"<td[^>]*>(.*?)</td>", cells)]
        for claim, cells in rows
    }


def test_the_page_needs_no_network(written):
    shown = re.sub(r'data-packed="[^"]*"|<script type="application/gzip".*?</script>', "", written)
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"|url\((?!data:)|@import|fetch\(', shown)
    assert unpacked(written, r'<script [^>]*id="plotly">(.*?)</script>') == page._plotly()
    # What is shown at once is small, whatever the figures are.
    assert len(shown) < 200_000


def test_the_page_begins_with_five_sentences_and_the_results(written):
    lead = " ".join(re.search(r'<p class="lead">(.*?)</p>', written, re.DOTALL)[1].split())
    assert len(re.findall(r"\.(?= [A-Z]|$)", lead)) == 5
    assert f"measured on {synthetic.DEVICE['name']}" in lead
    # No headline plan is in this run.
    assert "The recorded run on 2 CPU cores found one layer 0.106 to 2.26 times as fast as the fastest" in lead
    heads = re.findall(r"<h[1-3]>([^<]*)<", html.unescape(written))
    assert heads[1:6] == ["Results", *(heading for kind, (heading, _) in claims.KINDS.items() if kind != "aim")]
    assert "met" not in re.findall(r"\w+", re.sub("<[^>]*>", " ", written.partition("<nav")[0]))


def test_results_stand_beside_those_of_recorded_runs(study, written):
    found = results(written)
    run, cpu, h200 = found["One layer of Vision Longformer is faster than the fastest other attention."]
    assert run == "not shown"
    judged = {name: _quoted.judged(ROOT, name).set_index("id").loc["over_peer:vil"] for name in ("cpu", "h200")}
    assert [cpu.replace(" :", ":"), h200.replace(" :", ":")] == [claims.found(row) for row in judged.values()]
    # What this run has nothing of is empty.
    graphs = found["Whole networks of RegionViT, as CUDA graphs, are faster than with the fastest other attention."]
    assert graphs[:2] == ["", ""] and graphs[2].startswith("faster")
    expected = set(_quoted.judged(ROOT, "cpu")["claim"]) | set(_quoted.judged(ROOT, "h200")["claim"])
    # Of an experiment that no run has recorded yet, this run alone says something.
    later = {name for name in experiments.NAMES if not [*ROOT.glob(f"expected/*/{name}.csv")]}
    (claimed,) = _read.frames([ROOT / _select.CLAIMS], "claims")
    expected |= set(claimed["claim"][claimed["id"].str.partition("_")[0].isin(later)])
    assert set(map(html.unescape, found)) == expected
    assert not any("expected/h200/" in path for path in report.recorded(configured(recorded="expected/h200")))


def test_the_page_says_how_far_apart_repeated_timings_are(written):
    text = " ".join(written.split())
    assert re.search(
        r"the 80th percentile is \d\.\d\d times the 20th, and in one row of ten \d\.\d\d times or more",
        text,
    )


def test_the_run_is_headed_by_what_its_results_are_of(study, tmp_path, monkeypatch):
    """Not by the longest name: one of a cost model is longer than that of a machine."""
    load = _origin.load

    def renamed(path):
        found = load(path)
        return found if path.stem == "claims" else replace(found, hardware="a cost model, uncalibrated" * 5)

    monkeypatch.setattr(_origin, "load", renamed)
    page_of_run = write(str(tmp_path / "report.html"), [])
    hardware = load(Path("results/tables/claims.json")).hardware
    assert f"This run of its study was measured on {hardware.replace(';', ',')}." in page_of_run
    # What is of other hardware says so.
    assert page_of_run.count("<dt>Hardware</dt>") == len(SHOWN[0]) + len(SHOWN[1]) - 1


def test_figures_and_tables_stand_in_their_experiment_with_caption_and_command(written):
    experiment = re.search(r'<details id="experiment-attention".*', written, re.DOTALL)[0]
    assert re.findall(r'<details id="experiment-(\w+)"', written) == ["attention"]
    assert "Attention over one pattern" in experiment and "stage T5" not in experiment
    figure = re.search(r'<figure id="figure-speedup">.*?</figure>', experiment, re.DOTALL)[0]
    assert "How many times as fast as the fastest other attention" in figure and "Method" not in figure
    assert "<code>snakemake --cores all figures/speedup.svg</code>" in figure
    picture = unpacked(figure, r'data-packed="([^"]*)"')
    assert picture.startswith("data:image/svg+xml,")
    assert unquote(picture.partition(",")[2]) == Path("figures/speedup.svg").read_text()
    table = unpacked(experiment, r'<details id="table-speedup".*?data-packed="([^"]*)"')
    assert table.count("<tr>") == 1 + len(pd.read_csv("results/tables/speedup.csv"))
    contents = re.search(r'<ul class="contents">.*?</ul>', written, re.DOTALL)[0]
    assert re.findall(r'href="#([\w-]+)"', contents) == ["experiment-attention", "figure-speedup", "figure-fill"]


def test_what_is_written_in_a_figure_is_its_alternative_text(written):
    seen = re.search(r'<figure id="figure-fill">.*?alt="([^"]*)"', written, re.DOTALL)[1]
    assert "Axes: " in seen and not re.search(r"(^|, )[\d.]+(,|$)", seen)
    svg = Path("figures/fill.svg").read_text()
    assert set(re.split(r"\. |, |: ", seen)) & {text.strip() for text in re.findall("<!--(.*?)-->", svg)}


def test_a_figure_that_is_no_svg_is_refused(study, tmp_path):
    (tmp_path / "speedup.svg").write_text("<svg>")
    with pytest.raises(ArtifactError, match=r"speedup.svg: expected an SVG, found"):
        write(tmp_path / "study.report.html", [], figure_files=[tmp_path / "speedup.svg"])


def test_text_of_the_tables_is_escaped(study, tmp_path):
    table = tmp_path / "speedup.csv"
    table.write_text(Path("results/tables/speedup.csv").read_text().replace("ic + ", "<b>ic</b> & "))
    _origin.save(
        tmp_path / "speedup.json",
        "speedup",
        tables.member("speedup"),
        [],
    )
    text = write(tmp_path / "study.report.html", [], table_files=[table], figure_files=[])
    rows = unpacked(text, r'data-packed="([^"]*)"')
    assert "&lt;b&gt;ic&lt;/b&gt; &amp; highs" in rows and "<b>ic</b>" not in rows
    assert "This run of its study timed nothing." in text and "No layer was compared" in text


def test_a_recorded_study_has_no_explorer(tmp_path):
    explored = report.explored(configured(recorded="expected/h200"))
    text = write(tmp_path / "study.report.html", explored)
    assert "This run holds no schedules" in text and 'id="plotly"' not in text


def test_hardware_is_that_of_the_times(study):
    assert _origin.hardware(["results/logs/vil-tiny-224-s1/baselines.csv"]) == "Imaginary CPU"
    assert _origin.hardware(["results/profiling/vil-tiny-224-s1/ic/8x1.json"]) == "Imaginary CPU; 2 cores"
    assert _origin.hardware(["results/graphs/vil-tiny-224-s1/ic.npz", "expected/claims.csv"]) == ""


def test_hardware_names_each_number_of_cores_once_and_no_cost_model(tmp_path):
    for number, cores in enumerate((2, 1)):
        rows = [synthetic.row("vil-tiny-224-s1", "sdpa_dense", 5.0, cores=cores, torch="2.13.0")]
        synthetic.write_csv(tmp_path / f"{number}.csv", synthetic.BENCH, rows)
    synthetic.write_csv(tmp_path / "a.csv", "accelerator", [{"device": "zigzag-dse, a cost model", "status": "ok"}])
    one, both = [tmp_path / "1.csv"], sorted(tmp_path.glob("*.csv"))
    assert _origin.hardware(one) == "Imaginary CPU; 1 core; torch 2.13.0"
    assert _origin.hardware(both) == "Imaginary CPU; 1 and 2 cores; torch 2.13.0"


# What the explorer shows


def test_items_are_those_of_the_schedule(study, scene):
    place = "results/{}/vil-tiny-224-s1/ic/"
    plan = schedule.load(place.format("schedules") + "mixed.highs.json")
    covers = {tile: blocks.load(place.format("blocks") + f"{tile}.npz") for tile in plan.tiles}
    timed = {tile: profile.load(place.format("profiling") + f"{tile}.json") for tile in plan.tiles}
    pattern = next(i for i, p in enumerate(scene["patterns"]) if (p["model"], p["order"]) == ("vil-tiny-224-s1", "IC"))
    shown = next(p for p in scene["plans"] if p["pattern"] == pattern and p["name"] == "mixed tiles, HiGHS")
    items = shown["items"]
    # The cover of a graph by a schedule holds each entry once.
    assert sum(items["entries"]) == graph.load("results/graphs/vil-tiny-224-s1/ic.npz").entries
    for i, (t, b) in enumerate(zip(plan.tile, plan.block, strict=True)):
        cover, stripe = covers[plan.tiles[t]], items["stripe"][i]
        assert shown["edges"][stripe : stripe + 2] == cover.row_ptr[b : b + 2].tolist()
        keys = cover.run_keys[plan.run_lo[i] : plan.run_hi[i]]
        spans = np.reshape(items["cells"][i], (-1, 2))
        assert np.concatenate([np.arange(*span) for span in spans]).tolist() == np.unique(keys[keys >= 0]).tolist()
        assert items["pairs"][i] == keys.size * cover.tile.rows
        assert items["latency_us"][i] == round(timed[plan.tiles[t]].shapes[plan.shape[i]].latency_us, 3)


def test_each_order_has_its_own_profile(study, tmp_path):
    """Equal blocks of two orders have a profile each."""
    files = [path for path in report.explored(study) if "/none/8x1" in path or path.endswith("none.npz")]
    files = [path for path in files if "vil" in path and path.endswith((".npz", "greedy.json", "8x1.json"))]
    copies = {path: tmp_path / path.replace("/none", "/window") for path in files}
    for path, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(Path(path).read_bytes())
    slow = next(copy for copy in copies.values() if "profiling" in str(copy))
    timed = json.loads(slow.read_text())
    for shape in timed["shapes"]:
        shape["latency_us"] *= 10
    slow.write_text(json.dumps(timed))
    first, second = explorer.scene([*files, *copies.values()])["plans"]
    longer = 10 * np.array(first["items"]["latency_us"])
    assert second["items"]["latency_us"] == pytest.approx(longer, abs=0.01)


@pytest.mark.parametrize("cells", [7, 480])
def test_a_picture_holds_the_share_of_each_cell(cells, monkeypatch):
    monkeypatch.setattr(explorer, "CELLS", cells)
    dense = np.random.default_rng(0).random((50, 33)) < 0.3
    found = explorer.shares(graph.from_pattern(dense))
    high, wide = explorer.cell_keys(50), explorer.cell_keys(33)
    expected = [[dense[r : r + high, c : c + wide].mean() for c in range(0, 33, wide)] for r in range(0, 50, high)]
    assert found == pytest.approx(np.array(expected))


def test_a_schedule_too_large_is_left_out_by_name(study, monkeypatch):
    monkeypatch.setattr(explorer, "MOST_ITEMS", 1)
    scene = explorer.scene(report.explored(study))
    assert not scene["plans"] and len(scene["omitted"]) == len([p for p in report.explored(study) if "schedules" in p])
    assert re.search(
        r"vil-tiny-224-s1/ic/mixed.highs.json: too large to explore, \d+ items", " ".join(scene["omitted"])
    )


# What is refused


@pytest.mark.parametrize(
    ("missing", "message"), [("graphs", "its graph"), ("blocks", "needs blocks"), ("profiling", "needs profiles")]
)
def test_a_schedule_without_its_inputs_is_refused(missing, message, study):
    files = [path for path in report.explored(study) if f"{missing}/vil-tiny-224-s1" not in path]
    with pytest.raises(ArtifactError, match=rf"results/schedules/vil-tiny-224-s1/.*{message}"):
        explorer.scene(files)


def test_a_missing_figure_is_refused(study, tmp_path):
    with pytest.raises(ArtifactError, match=r"figures/policy.svg: expected a text file, which cannot be read"):
        write(tmp_path / "study.report.html", [], figure_files=["figures/policy.svg"])


def test_a_table_of_other_columns_is_refused(study, tmp_path):
    (tmp_path / "speedup.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ArtifactError, match=r"speedup.csv: expected the table speedup, found"):
        write(tmp_path / "study.report.html", [], table_files=[tmp_path / "speedup.csv"])


def test_a_damaged_origin_is_refused(study, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"kind": _origin.KIND, "version": _origin.VERSION, "name": "x"}))
    with pytest.raises(ArtifactError, match="expected a complete origin file, found KeyError"):
        _origin.load(path)


# In a browser


@pytest.fixture(scope="module")
def window(written, tmp_path_factory):
    with browser.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def shown(window, width):
    """The page of this width, with the explorer."""
    window.messages()
    window.open(Path("study.report.html").absolute().as_uri(), width)
    # What is closed shows nothing, and links open what they lead to.
    assert window.run("return document.querySelector('#figure-speedup img').getAttribute('src')") is None
    window.run("location.hash = 'table-latency'; document.getElementById('explore').click()")
    window.until(
        "return document.querySelector('#plot .heatmaplayer image') && document.getElementById('rows-latency')"
    )
    return window


@pytest.fixture(params=[1280, 390], ids=["wide", "narrow"])
def opened(window, request, written):
    return shown(window, request.param)


@pytest.fixture
def wide(window, written):
    """For what does not depend on the width."""
    return shown(window, 1280)


def choose(window, name, value):
    window.run(
        f"const select = document.getElementById('controls').elements.{name}; select.value = {json.dumps(value)};"
        "select.dispatchEvent(new Event('change'))"
    )


def item(window):
    """What the explorer says of the item under the mouse, a dict."""
    return window.run(
        "return Object.fromEntries([...document.querySelectorAll('#item dt')].map("
        "(name) => [name.textContent, name.nextSibling.textContent]))"
    )


@in_browser
def test_nothing_overflows_and_the_console_is_silent(opened):
    width, most = opened.run("return [window.innerWidth, document.documentElement.scrollWidth]")
    assert most == width in (1280, 390)
    assert opened.messages() == []


@in_browser
def test_figures_are_there_and_large_enough_to_read(opened):
    found = opened.until(
        "const all = [...document.querySelectorAll('figure img')];"
        "return all.every((image) => image.complete) && all.map((image) => [image.naturalWidth, image.clientWidth])"
    )
    assert len(found) == len(SHOWN[0])
    assert all(natural > 0 and shown >= 600 for natural, shown in found)
    sizes = opened.run(
        "return [...document.querySelectorAll('p, td, dd')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 13


@in_browser
def test_the_explorer_begins_with_the_headline_plan(wide):
    chosen = "return ['order', 'plan'].map((name) => document.getElementById('controls').elements[name].value)"
    # No window order is in this study.
    assert wide.run(chosen) == ["none", "mixed tiles, HiGHS"]
    choose(wide, "order", "IC")
    choose(wide, "plan", "8x1 tiles, greedy")
    assert wide.run(chosen) == ["IC", "8x1 tiles, greedy"]
    height = wide.run("return document.getElementById('plot').clientHeight")
    assert height <= 900 - 220


@in_browser
def test_a_change_of_colour_keeps_the_zoom(wide):
    # On a narrow page a finger scrolls there, and does not zoom.
    zoom = "return document.getElementById('plot').layout.xaxis.range"
    whole = wide.run(zoom)
    wide.run("document.documentElement.style.scrollBehavior = 'auto'; document.getElementById('plot').scrollIntoView()")
    x, y = wide.run("const r = document.querySelector('#plot .nsewdrag').getBoundingClientRect(); return [r.x, r.y]")
    wide.drag((x + 100, y + 100), (x + 250, y + 300))
    zoomed = wide.until(
        f"const now = document.getElementById('plot').layout.xaxis.range; return now[0] > {whole[0]} && now"
    )
    choose(wide, "colour", "density")
    assert wide.run(zoom) == zoomed
    choose(wide, "order", "IC")
    assert wide.run(zoom) == whole


@in_browser
def test_dark_pages_are_dark_and_pictures_stay_on_white(wide):
    schemes = {}
    for scheme in ("dark", "light"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        wide.post("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": features})
        schemes[scheme] = wide.run(
            "return ['body', '#figure-speedup img'].map("
            "(place) => getComputedStyle(document.querySelector(place)).backgroundColor)"
        )
    assert schemes == {"dark": ["rgb(21, 25, 30)", "rgb(255, 255, 255)"], "light": ["rgb(255, 255, 255)"] * 2}


@in_browser
@pytest.mark.parametrize("opened", [1280], indirect=True)
def test_pointing_at_an_item_says_what_it_is(opened):
    opened.run(
        "document.documentElement.style.scrollBehavior = 'auto'; document.getElementById('plot').scrollIntoView()"
    )
    assert item(opened) == {"Item": "none chosen yet"}
    x, y = opened.run(
        "const r = document.querySelector('#plot .nsewdrag').getBoundingClientRect();"
        # Query 35 of 65: the mouse comes from another one of the same item.
        "return [r.x + 4, r.y + r.height * 0.54]"
    )
    opened.point(x, y)
    opened.until("return document.querySelector('#item').children.length > 2")
    said = item(opened)
    assert set(said) >= {"Tile", "Round", "Density", "Predicted"}
    assert re.fullmatch(r"\d+(\.\d+)? %", said["Density"]) and re.fullmatch(r"[\d.]+ (µs|ms)", said["Predicted"])
    low, high = map(int, re.findall(r"\d+", said["Queries"]))
    assert low <= 35 <= high
    if opened.run("return window.innerWidth") > 600:
        label = opened.until("return document.querySelector('#plot .hoverlayer .hovertext')?.textContent")
        assert f"Density: {said['Density']}" in label


@in_browser
def test_the_choice_decides_what_is_drawn(wide):
    said = "return document.getElementById('plan-facts').textContent"
    drawn = "return JSON.stringify(document.getElementById('plot').data[0].z)"
    before = wide.run(said), wide.run(drawn)
    options = "return [...document.getElementById('controls').elements.model.options].map((o) => o.value)"
    assert wide.run(options) == ["vil-tiny-224-s1", "dynamicvit-s-224"]
    choose(wide, "order", "IC")
    after = wide.run(said), wide.run(drawn)
    assert after[1] != before[1]
    choose(wide, "plan", "8x1 tiles, greedy")
    assert "heuristic" in wide.run(said) and wide.run(said) != after[0]
    choose(wide, "colour", "density")
    assert wide.run("return document.getElementById('plot').data[0].zmax") == 1
    choose(wide, "model", "dynamicvit-s-224")
    assert wide.run("return document.getElementById('controls').elements.order.value") == "IC"
    assert wide.messages() == []


@in_browser
@pytest.mark.parametrize("opened", [390], indirect=True)
def test_tables_are_sorted_and_searched(opened):
    rows = "[...document.querySelectorAll('#rows-latency tbody tr:not([hidden])')]"
    column = f"return {rows}.map((row) => row.cells[9].dataset.value)"
    header = "document.querySelectorAll('#rows-latency th button')[9].click();"
    for ascending in (True, False):
        values = opened.run(header + column)
        numbers = [float(value) for value in values if value]
        assert len(numbers) > 3 and numbers == sorted(numbers, reverse=not ascending)
        assert values == sorted(values, key=lambda value: value == "")
    opened.run(
        "const input = document.querySelector('input[data-table=latency]'); input.value = 'sdpa_mask dynamicvit';"
        "input.dispatchEvent(new Event('input'))"
    )
    assert len(opened.run(column)) == 1
    assert re.match(r"1 of \d+ rows", opened.run("return document.getElementById('found-latency').textContent"))
