"""The page of a made-up study: what it says, what its explorer shows, and how it behaves in a browser."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_figures import ROOT, configured

from helpers import browser, synthetic
from tilewright import graph
from tilewright.attention import blocks, profile, schedule
from tilewright.core.errors import ArtifactError
from tilewright_study import figures, report, tables
from tilewright_study.report import explorer, page
from tilewright_study.tables import _origin, _quoted
from tilewright_study.tables.claims import VERDICTS

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


def test_the_page_needs_no_network(written):
    without_plotly = written.replace(page._plotly(), "")
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"|url\((?!data:)|@import|fetch\(', without_plotly)
    assert written.count("plotly.js v") == 1


def test_claims_come_with_expected_measured_and_verdict(written):
    claim = re.search(r"<tr>\s*<td[^>]*>[^<]*before it was timed[^<]*</td>.*?</tr>", written, re.DOTALL)[0]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", claim)
    assert cells[1:7] == ["&lt;=", "1", "0.1", "", "passed", "+90.0%"]


def shown_verdicts(written, name):
    table = re.search(rf'<table id="rows-{name}">.*?</table>', written, re.DOTALL)[0]
    return re.findall(r'class="verdict [^"]*">([^<]*)<', table)


def test_the_head_says_how_far_apart_repeated_timings_are(written):
    head = " ".join(written.partition("<nav")[0].split())
    assert re.search(r"p80 over p20 of \d+ rows: median \d\.\d\d, nine tenths below \d\.\d\d\. Other work", head)


def test_the_run_is_headed_by_what_its_verdicts_are_of(study, tmp_path, monkeypatch):
    """Not by the longest name: one of a cost model is longer than that of a machine."""
    load = _origin.load

    def renamed(path):
        found = load(path)
        return found if path.stem == "claims" else replace(found, hardware="a cost model, uncalibrated" * 5)

    monkeypatch.setattr(_origin, "load", renamed)
    page_of_run = write(str(tmp_path / "report.html"), [])
    assert f"<h3>This run: {load(Path('results/tables/claims.json')).hardware}</h3>" in page_of_run


@pytest.mark.parametrize("name", ["claims", "h200"])
def test_claims_that_are_not_met_come_first(name, written):
    verdicts = shown_verdicts(written, name)
    assert {"not met", "met", "passed"} <= set(verdicts)
    assert verdicts == sorted(verdicts, key=VERDICTS.index)


def test_the_recorded_gpu_run_reports_its_own_claims(study, written):
    section = re.search(r'<article id="claims-h200">.*?</article>', written, re.DOTALL)[0]
    rows = _quoted.judged(ROOT, "h200")
    assert len(shown_verdicts(written, "h200")) == len(rows) != len(shown_verdicts(written, "claims"))
    # Orders are found on the host.
    assert "<h3>Recorded run h200: NVIDIA H200; AMD EPYC</h3>" in section and "recorded in expected/h200" in section
    assert rows["claim"][0] in section
    summary = re.findall(r'<dl class="summary">.*?</dl>', written, re.DOTALL)
    assert len(summary) == 2 and synthetic.DEVICE["name"] in summary[0] and "NVIDIA H200" in summary[1]
    assert report.recorded(configured(recorded="expected/h200")) == []


def test_a_figure_comes_with_caption_method_hardware_and_command(written):
    figure = re.search(r'<figure id="figure-speedup">.*?</figure>', written, re.DOTALL)[0]
    assert "How many times as fast as the fastest other attention" in figure
    assert re.search(
        r"Method</dt>\s*<dd>runs whose results were checked[^;]*: 14 files; values of the paper: 1 file", figure
    )
    assert synthetic.DEVICE["name"] in figure
    assert "<code>snakemake --cores all figures/speedup.svg</code>" in figure
    assert "data:image/svg+xml;base64," in figure


def test_text_of_the_tables_is_escaped(study, tmp_path):
    table = tmp_path / "speedup.csv"
    table.write_text(Path("results/tables/speedup.csv").read_text().replace("ic + ", "<b>ic</b> & "))
    _origin.save(
        tmp_path / "speedup.json",
        "speedup",
        tables.member("speedup"),
        [],
    )
    text = write(tmp_path / "study.report.html", [], table_files=[table])
    assert "&lt;b&gt;ic&lt;/b&gt; &amp; highs" in text and "<b>ic</b>" not in text
    assert "nothing in it was timed" in text


def test_a_recorded_study_has_no_explorer(tmp_path):
    explored = report.explored(configured(recorded="expected/h200"))
    text = write(tmp_path / "study.report.html", explored)
    assert "This run holds no schedules" in text and "plotly.js v" not in text


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


@pytest.fixture(params=[1280, 390], ids=["wide", "narrow"])
def opened(window, request, written):
    window.messages()
    window.open(Path("study.report.html").absolute().as_uri(), request.param)
    window.until("return document.querySelector('#plot .heatmaplayer image')")
    return window


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
def test_the_choice_decides_what_is_drawn(opened):
    said = "return document.getElementById('plan-facts').textContent"
    drawn = "return JSON.stringify(document.getElementById('plot').data[0].z)"
    before = opened.run(said), opened.run(drawn)
    options = "return [...document.getElementById('controls').elements.model.options].map((o) => o.value)"
    assert opened.run(options) == ["vil-tiny-224-s1", "dynamicvit-s-224"]
    choose(opened, "order", "IC")
    after = opened.run(said), opened.run(drawn)
    assert after[1] != before[1]
    choose(opened, "plan", "8x1 tiles, greedy")
    assert "heuristic" in opened.run(said) and opened.run(said) != after[0]
    choose(opened, "colour", "density")
    assert opened.run("return document.getElementById('plot').data[0].zmax") == 1
    choose(opened, "model", "dynamicvit-s-224")
    assert opened.run("return document.getElementById('controls').elements.order.value") == "IC"
    assert opened.messages() == []


@in_browser
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
