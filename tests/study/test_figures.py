"""Figures and tables from a made-up study: what they show is what the files say, and nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest

from helpers import synthetic
from helpers.checkout import ALL, merged
from helpers.files import run_script
from tilewright import graph
from tilewright.attention import blocks, schedule
from tilewright.core.errors import ArtifactError, UnknownNameError
from tilewright.networks import attentions, batching
from tilewright_study import config, experiments, figures, provenance, tables
from tilewright_study.baselines import packed, sparse
from tilewright_study.experiments.attention import figure_pattern as masks
from tilewright_study.figures import _palette, _quoted, _style
from tilewright_study.measure import rows as _rows
from tilewright_study.report import page
from tilewright_study.stages import blocks as blocks_stage
from tilewright_study.tables import _read, _select, claims

ROOT = Path(__file__).parents[2]
SMALL = {
    "experiments": list(experiments.NAMES),
    "paths": {
        "networks": {
            "segformer-b0-256.sampled": None,
            "segformer-b0-64.plain": {"network": "segformer-b0-64", "checkpoint": None},
        },
        "rungs": ["trained", "statistics"],
    },
    "stream": {"networks": ["segformer-b0-64.plain"]},
    "workloads": ["vil-tiny-128-s1", "vil-tiny-224-s1", "regionvit-tiny-224-s1", "dynamicvit-s-224"],
    "orders": ["none", "rcm", "ic", "window"],
    "tiles": ["8x1", "16x16"],
    "tile_sets": {"mixed": ["8x1", "16x16"], "8x1": ["8x1"]},
    "region_rows": 16,
    "attention": {"schedules": {"mixed": ["greedy", "highs"], "8x1": ["greedy"]}},
    "networks": {
        "workloads": ["vil-tiny-224", "dynamicvit-s-224"],
        "attention": {"native": [1, 8], "dense": [1, 8], "tilewright": [1, 8], "flex": [1]},
        "plans": [{"reorder": "ic", "solver": "greedy"}],
    },
    "ragged": {
        "shapes": [[6, 64], [3, 64]],
        "attention": {"tilewright": [1, 16, 256], "sdpa_mask": [1, 16], "flash_varlen": [1, 16, 256], "flex": [16]},
    },
    "pruned": {
        "workloads": ["deit-small-224-threshold_l2", "deit-tiny-224-evit"],
        "batching": ["padded", "padded_unfused", "padded_kept", "gathered", "ragged", "varlen"],
        "modes": {"eager": [1, 16], "graph": [1, 16], "compile": [16]},
        "settings": {"deit-small-224-threshold_l2": [{"keep_ratio": 0.5}, {"keep_ratio": 0.3}]},
    },
    "heatmap": {"resolutions": [224, 512], "patches": [32, 16], "max_tokens": 1000},
    "order_times": {"workloads": ["vil-tiny-128-s1", "vil-tiny-224-s1"]},
    "figures": {
        "pattern_workloads": ["vil-tiny-224-s1", "regionvit-tiny-224-s1", "dynamicvit-s-224"],
        "pattern_tiles": ["8x1", "16x16"],
        "fill_workloads": ["vil-tiny-224-s1"],
        "fill_tiles": ["8x1", "16x16"],
    },
}
BLANK = ("vil-tiny-224-s1", "rcm")
PEERS = (("sdpa_dense", 90, "none"), ("flex", 75, "none"), ("flex", 60, "window"), ("sdpa_mask", None, "none"))


def configured(**changes):
    mapping = merged(ALL)
    for key, value in {**SMALL, **changes}.items():
        merge = isinstance(value, dict) and key != "tile_sets"
        mapping[key] = {**mapping[key], **value} if merge else value
    return config.load(mapping)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The configuration of a study whose files lie in the working folder for the whole module."""
    root, before = tmp_path_factory.mktemp("study"), Path.cwd()
    os.chdir(root)
    (root / "expected").symlink_to(ROOT / "expected")
    chosen = configured()
    synthetic.write_graphs(root, chosen)
    synthetic.write_logs(root, chosen, blank=[BLANK])
    yield chosen
    os.chdir(before)


FIGURES = {}


def drawn(name, study, inputs=None):
    """The figure `name`; that of the whole study is drawn once for all tests, none of which changes it."""
    if inputs is None:
        if name not in FIGURES:
            FIGURES[name] = drawn(name, study, figures.needs(name, study))
        return FIGURES[name]
    with _style.context():
        return figures.member(name).draw(inputs)


def table(name, study, inputs=None):
    module = tables.member(name)
    return module.table([Path(path) for path in inputs or tables.needs(name, study)])


def texts(figure):
    """All words of a figure."""
    from matplotlib.text import Text

    return " ".join(found.get_text().replace("\n", " ") for found in figure.findobj(Text))


def heights(axes):
    """Bar heights of a panel by rounded x."""
    return {round(bar.get_x() + bar.get_width() / 2, 3): bar.get_height() for bar in axes.patches}


def lengths(axes):
    """Lengths of lying bars of a panel by rounded y."""
    return {round(bar.get_y() + bar.get_height() / 2, 3): bar.get_width() for bar in axes.patches}


def title(figure):
    """The finding above a figure."""
    return figure.legends[0].get_title().get_text().replace("\n", " ")


# Every figure and table


def test_a_recorded_study_shows_what_its_rows_hold():
    shown, _ = figures.selected(configured(recorded="expected/h200"))
    assert set(figures.NAMES) - set(shown) == {"scene"}  # Pictures are not recorded.
    assert set(tables.NAMES) - set(figures.selected(configured(recorded="expected/h200"))[1]) == {"solvers"}
    for device in ("cpu", "cuda"):
        assert figures.selected(configured(device=device)) == (figures.NAMES, tables.NAMES)


def test_the_fastest_peer_is_named_with_its_order(study, tmp_path):
    rows = [synthetic.row("vil-tiny-224-s1", name, us, reorder=order) for name, us, order in PEERS]
    rows += [synthetic.row("vil-tiny-224-s1", "tilewright", 20, ordered="True", **_read.HEADLINE)]
    synthetic.write_csv(tmp_path / "study.bench.csv", synthetic.BENCH, rows)
    (row,) = table("speedup", study, [tmp_path / "study.bench.csv", _select.PAPER_LATENCY]).itertuples()
    assert (row.peer, row.peer_us, row.over_peer) == ("flex (window)", 60, 3)
    assert (row.peer_natural, row.peer_us_natural) == ("flex (none)", 75)


def test_a_peer_that_ran_in_one_order_is_not_missing(study, tmp_path):
    """Missing ones are told once, with the workloads that lack them."""
    blank = {"status": "skipped", "reason": "fa4 cannot be imported; known: flash_attn"}
    rows = [synthetic.row("vil-tiny-224-s1", "fa4", None, reorder="none", **blank)]
    rows += [synthetic.row("vil-tiny-224-s1", "fa4", 60, reorder="window")]
    rows += [synthetic.row("vil-tiny-224-s1", "tilewright", 20, ordered="True", **_read.HEADLINE)]
    for model in ("vil-tiny-224-s1", "vil-tiny-384-s1"):
        rows += [synthetic.row(model, "natten", None, reorder="none", status="skipped", reason="not installed")]
    rows += [synthetic.row("vil-tiny-384-s1", "tilewright", 20, ordered="True", **_read.HEADLINE)]
    synthetic.write_csv(tmp_path / "study.bench.csv", synthetic.BENCH, rows)
    inputs = [tmp_path / "study.bench.csv", _select.PAPER_LATENCY]
    assert list(table("speedup", study, inputs)["reason"]) == ["natten: not installed"] * 2


# With pictures, marks, bars and lines; others are drawn by the same functions.
AGAIN = ("overview", "pattern_vil", "stream", "speedup", "reorder_time")


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        *(pytest.param(name, "svg", marks=[] if name in AGAIN else pytest.mark.slow) for name in figures.NAMES),
        *(("reorder_time", "png"), ("reorder_time", "pdf")),
    ],
)
def test_a_figure_is_written_the_same_twice(name, suffix, study, tmp_path):
    paths = [tmp_path / "a" / f"{name}.{suffix}", tmp_path / "b" / f"{name}.{suffix}"]
    figures.draw(name, figures.needs(name, study), paths[:1])
    figure = drawn(name, study)
    with _style.context():
        _style.settle(figure)
        _style.save(figure, paths[1])
    assert [list(path.parent.iterdir()) for path in paths] == [[path] for path in paths]
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("name", tables.NAMES)
def test_a_table_is_written_as_csv_and_markdown(name, study, tmp_path):
    paths = [tmp_path / f"{name}.csv", tmp_path / f"{name}.md"]
    tables.tabulate(name, tables.needs(name, study), paths)
    frame = pd.read_csv(paths[0])
    lines = paths[1].read_text().splitlines()
    module = tables.member(name)
    assert set(module.SHOWN) <= set(frame.columns)
    parts = len(module.PARTS[1]) if hasattr(module, "PARTS") else 1
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == len(frame) + 2 * parts > 2 * parts
    assert {line.replace("\\|", "").count("|") for line in rows} == {len(module.SHOWN) + 1}


def test_every_member_says_what_it_shows():
    for name in tables.NAMES:
        module = tables.member(name)
        assert module.__doc__ and callable(module.needs)
    shown = [figures.member(name).shows for name in figures.NAMES]
    assert all(shown) and len(set(shown)) == len(shown)
    captions = [figures.member(name).caption for name in figures.NAMES]
    captions += [tables.words(tables.member(name))[1] for name in tables.NAMES]
    assert all(map(page._html, captions))


@pytest.mark.parametrize("name", experiments.NAMES)
def test_an_experiments_folder_holds_the_tables_and_figures_that_it_names(name):
    of = experiments.member(name)
    folder = Path(of.__file__).parent
    for kind, names in (("table", of.TABLES), ("figure", of.FIGURES)):
        assert {path.stem for path in folder.glob(f"{kind}_*.py")} == {f"{kind}_{each}" for each in names}
    assert len(set(of.TABLES)) == len(of.TABLES) and len(set(of.FIGURES)) == len(of.FIGURES)


@pytest.mark.parametrize("name", figures.NAMES)
def test_a_figure_needs_only_what_the_rules_make(name, study):
    wanted = figures.needs(name, study)
    assert len(set(wanted)) == len(wanted) > 0
    assert all(Path(path).is_file() for path in wanted)


@pytest.mark.parametrize("name", tables.NAMES)
def test_a_table_needs_only_what_the_rules_make(name, study):
    wanted = tables.needs(name, study)
    assert len(set(wanted)) == len(wanted) > 0
    assert all(Path(path).is_file() for path in wanted)


def test_what_a_study_leaves_out_is_not_selected():
    less = configured(
        experiments=["attention"],
        workloads=["vil-tiny-224-s1"],
        attention={"schedules": {"mixed": ["greedy"]}},
        figures={**SMALL["figures"], "pattern_workloads": [], "fill_workloads": []},
    )
    assert figures.selected(less) == (
        ("latency_vil", "speedup", "prediction"),
        ("latency", "speedup", "prediction", "solvers", "claims"),
    )


def test_a_study_of_pruned_networks_alone_shows_nothing_else():
    less = configured(experiments=["ragged", "pruned"])
    assert figures.selected(less) == (
        ("ragged_kernel", "pruned"),
        ("ragged", "pruned", "claims"),
    )


def test_importing_the_families_stays_light():
    code = (
        "import sys; from tilewright_study import figures, tables;"
        "[figures.member(name) for name in figures.NAMES];"
        "[tables.member(name) for name in tables.NAMES];"
        "sys.exit(' '.join({'matplotlib', 'seaborn', 'pandas', 'torch', 'numba', 'highspy'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})


# What they show


def test_latency_bars_are_the_measured_speedups(study):
    axes = drawn("latency_vil", study).axes[0]
    model, orders = "vil-tiny-128-s1", ["none", "rcm", "ic", "window"]
    dense = synthetic.dense_us(model)
    expected = {
        place + side: dense / synthetic.plan_us(model, order, solver)
        for place, order in enumerate(orders)
        for side, solver in ((-0.2, "greedy"), (0.2, "highs"))
    }
    assert lengths(axes) == pytest.approx(expected)
    assert "128 px, 129 tokens" in axes.get_title(loc="left")


def test_the_papers_speedups_stand_beside_ours(study):
    axes = drawn("latency_vil", study).axes[0]
    diamonds = next(line for line in axes.lines if line.get_marker() == "D")
    # ViL at 128 px: 5.23 ms dense; RCM 4.10 and 2.15, IC 4.00 and 2.05 with greedy and ILP.
    points = dict(zip(np.round(diamonds.get_ydata(), 2), diamonds.get_xdata(), strict=True))
    assert points == pytest.approx({0.8: 5.23 / 4.10, 1.2: 5.23 / 2.15, 1.8: 5.23 / 4.00, 2.2: 5.23 / 2.05})


def test_dense_bars_are_the_fastest_kernels_and_inference_is_a_line(study, tmp_path):
    model, plan = "dynamicvit-s-224", {"ordered": "True", "reorder": "window", "tiles": "mixed", "solver": "highs"}
    peers = {"sdpa_dense": 9000.0, "sdpa_flash": 6000.0, "sdpa_compacted": 1000.0}
    rows = [synthetic.row(model, name, us, reorder="none") for name, us in peers.items()]
    rows += [synthetic.row(model, "tilewright", 3000.0, **plan)]
    rows += [synthetic.row(model, "tilewright", 1.0, **plan | {"solver": "descent"})]
    synthetic.write_csv(tmp_path / "b.csv", synthetic.BENCH, rows)
    figure = drawn("latency_dynamicvit", study, [tmp_path / "b.csv", _select.PAPER_LATENCY])
    (axes,) = figure.axes
    assert lengths(axes) == pytest.approx({0: 2}) and "dense: 6.00 ms" in axes.get_title(loc="left")
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [6]
    assert title(figure) == "DynamicViT, training mask: 2.0 times as fast as dense attention"
    assert "dense FlashAttention" in texts(figure)


def test_a_plan_that_did_not_run_is_blank_with_its_reason(study):
    # The other workload has more schedules and stands alone.
    (axes,) = drawn("latency_vil", study).axes
    assert axes.get_title(loc="left").startswith("128 px")
    rows = table("latency", study)
    rows = rows[(rows["model"] == BLANK[0]) & (rows["reorder"] == BLANK[1])]
    assert len(rows) == 6 and rows["p50_us"].isna().all() and rows["speedup"].isna().all()
    assert set(rows["reason"]) == {"no C++ compiler"}


def test_the_latency_table_holds_the_papers_bars(study):
    rows = table("latency", study)
    rows = rows[rows["model"] == "vil-tiny-128-s1"].set_index(["provider", "reorder", "solver", "ordered"])
    # A list of one: not all keys are unique, and releases of pandas differ in what they give for one that is.
    assert rows.loc[[("sdpa_dense", "none", "", "yes")], "paper_ms"].tolist() == [5.23]
    assert rows.loc[[("tilewright", "ic", "highs", "yes")], "paper_ms"].tolist() == [2.05]


def test_a_time_left_in_a_row_that_failed_is_not_shown(study):
    path = "results/logs/vil-tiny-128-s1/baselines.csv"
    frame = _read.frames([path], "attention")[0].assign(status="failed", p50_us=1.0)
    assert _read.bench(frame)[["p50_us", "speedup"]].isna().all(axis=None)


def test_speedup_takes_the_best_plan(study):
    row = table("speedup", study).set_index("model").loc["regionvit-tiny-224-s1"]
    assert row["speedup"] == pytest.approx(6.0)
    assert row["plan"] == "window + highs (mixed)"
    assert row["paper_speedup"] == pytest.approx(8.41 / 2.75)
    assert row["sdpa_mask"] == pytest.approx(0.5)
    assert np.isnan(row["flex"]) and row["reason"] == "flex: no C++ compiler"
    (axes,) = drawn("speedup", study).axes
    frame = table("speedup", study).sort_values("over_peer", ascending=False)
    assert [mark[2] for mark in marks(axes)] == pytest.approx(frame["over_peer"].tolist())
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [_style.workload(row.model, row.tokens) for row in frame.itertuples()]
    assert title(drawn("speedup", study)).startswith("Faster than every other attention in 4 of 4 workloads: ")


def test_a_mask_without_a_resolution_is_shown_by_its_name(study, tmp_path):
    rows = [synthetic.row("vil-tiny-128-s1", "sdpa_dense", 5.0), synthetic.row("vil-tiny-128-s1", "flex", 2.0)]
    named = [{**row, "model": "file-mine", "resolution": ""} for row in rows]
    synthetic.write_csv(tmp_path / "baselines.csv", synthetic.BENCH, named)
    frame = table("speedup", study, [tmp_path / "baselines.csv", _select.PAPER_LATENCY])
    assert frame["flex"].item() == pytest.approx(2.5)
    assert list(_read.labels(frame).values()) == ["mine"]


def test_a_result_that_was_wrong_is_a_check_that_failed(study, tmp_path):
    rows = [synthetic.row("vil-tiny-128-s1", "tilewright", None, status="failed", relative_error=1e-3)]
    synthetic.write_csv(tmp_path / "baselines.csv", synthetic.BENCH, rows)
    inputs = [tmp_path / "baselines.csv", _select.PAPER_LATENCY, _select.CLAIMS]
    claims = table("claims", study, inputs).set_index("id")
    assert claims.loc["bench_passed:", ["measured", "verdict"]].tolist() == [0, "failed"]


def test_speedup_without_any_plan_is_blank(study, tmp_path):
    lone = tmp_path / "baselines.csv"
    synthetic.write_csv(lone, synthetic.BENCH, [synthetic.row("vil-tiny-128-s1", "sdpa_dense", 5.0)])
    inputs = [lone, _select.PAPER_LATENCY]
    assert np.isnan(table("speedup", study, inputs)["speedup"].item())
    figure = drawn("speedup", study, inputs)
    assert "Nothing was measured: no reason is given" in texts(figure) and not figure.axes


def test_networks_are_faster_by_the_ratio_of_their_medians(study):
    frame = table("end_to_end", study)
    # The families in their order, each with its batches in theirs.
    assert list(dict.fromkeys(zip(frame["network"], frame["batch"], strict=True))) == [
        ("vil-tiny-224", 1),
        ("vil-tiny-224", 8),
        ("dynamicvit-s-224", 1),
        ("dynamicvit-s-224", 8),
    ]
    ours = frame[frame["attention"] == "tilewright"]
    assert ours["over_native"].to_numpy() == pytest.approx(50 / 30)
    assert ours["over_dense"].to_numpy() == pytest.approx(110 / 30)
    assert ours["over_flex"].isna().all()
    flex = frame[frame["attention"] == "flex"]
    assert set(flex["reason"]) == {"no C++ compiler"} and flex["p50_us"].isna().all()


def test_bars_of_networks_stack_attention_and_rest(study):
    figure = drawn("end_to_end", study)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["ViL-tiny, 224 px", "DynamicViT-S, 224 px"]
    names = ["Tilewright", "masked SDPA", "as published"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == names
    bars = {(round(bar.get_y() + bar.get_height() / 2), bar.get_x()): bar.get_width() for bar in figure.axes[0].patches}
    # In ms of a batch of 8; masked SDPA, 720 + 160, ends at 1.6 times as published.
    assert bars == pytest.approx({(0, 0): 80, (0, 80): 160, (1, 0): 640, (1, 720): 0, (2, 0): 240, (2, 240): 160})
    words = texts(figure)
    assert "880 →" in words and "FlexAttention" not in words
    assert title(figure) == "Whole networks: faster than every other attention in 4 of 4 cases"


def network_plans(tmp_path):
    """A network with its own plans, four others, one of which failed, a compiled row, and a peer; and one without."""
    changes = [
        {},
        *({"reorder": order, "solver": solver} for order, solver in (("ic", "greedy"), ("ic", "highs-paper"))),
        {"reorder": "none", "solver": "highs"},
        {"reorder": "hc", "solver": "highs", "status": "failed", "reason": "logits differ"},
        {"compiled": True, "p50_us": 5.0, "gpu_us": 1.0},
    ]
    rows = [
        {**synthetic.network_row("vil-tiny-224", "tilewright", 1), "gpu_us": 10 + at, **change}
        for at, change in enumerate(changes)
    ]
    rows += [{**synthetic.network_row("vil-tiny-224", "native", 1), "gpu_us": 20}]
    synthetic.write_csv(tmp_path / "vil.csv", synthetic.NETWORK, rows)
    lone = [synthetic.network_row("dynamicvit-s-224", "tilewright", 1)]
    synthetic.write_csv(tmp_path / "dynamicvit.csv", synthetic.NETWORK, lone)
    return [tmp_path / "vil.csv", tmp_path / "dynamicvit.csv"]


def test_plans_of_networks_are_compared_with_their_own(study, tmp_path):
    inputs = network_plans(tmp_path)
    frame = table("network_plans", study, inputs)
    shown = frame[["network", "reorder", "solver", "gpu_us"]].values.tolist()
    assert shown[:4] == [
        ["vil-tiny-224", "window", "highs", 10],
        ["vil-tiny-224", "ic", "greedy", 11],
        ["vil-tiny-224", "ic", "highs-paper", 12],
        ["vil-tiny-224", "none", "highs", 13],
    ]
    assert len(shown) == 5 and np.isnan(shown[4][-1]) and frame["reason"].iloc[-1] == "logits differ"
    assert frame["over_own"].iloc[1] == pytest.approx(10 / 11)
    assert frame["over_native"].iloc[1] == pytest.approx(20 / 11)
    ends = table("end_to_end", study, inputs).set_index(["network", "attention"])
    assert len(ends) == 3
    assert ends.loc[("vil-tiny-224", "tilewright"), ["compiled_us", "compiled_gpu_us"]].tolist() == [5, 1]


def test_a_study_without_other_plans_has_no_table_of_them():
    without = configured(networks={**SMALL["networks"], "plans": []})
    assert tables.needs("network_plans", without) == []


def test_a_network_that_was_wrong_is_no_peer(study, tmp_path):
    wrong = {"status": "failed", "reason": "logits differ", "relative_error": 2e-4}
    rows = [synthetic.network_row("vil-tiny-1024", name, 1) for name in ("dense", "flex")]
    rows += [synthetic.network_row("vil-tiny-1024", "native", 1, **wrong)]
    rows += [synthetic.network_row("vil-tiny-1024", "tilewright", 1)]
    synthetic.write_csv(tmp_path / "vil-tiny-1024.csv", synthetic.NETWORK, rows)
    inputs = [tmp_path / "vil-tiny-1024.csv", _select.PAPER_LATENCY, _select.CLAIMS]
    claims = table("claims", study, inputs).set_index("id")
    assert claims.loc["network_passed:", "verdict"] == "passed"
    # The wrong one has no time, and FlexAttention did not run.
    peer = claims.loc["end_to_end:vil"]
    assert (peer["measured"], peer["verdict"]) == (pytest.approx(110 / 30), "faster")
    assert peer["where"] == "vil-tiny-1024 batch 1 dense"
    assert np.isnan(table("end_to_end", study, inputs[:1]).set_index("attention").loc["native", "p50_us"])


def test_heatmap_shows_numbers_and_why_there_are_none(study):
    figure = drawn("heatmap", study)
    picture = figure.axes[0].images[0].get_array()
    assert np.ma.getmaskarray(picture).tolist() == [[False, False], [False, True]]
    assert picture[0, 0] == pytest.approx(0.8 + 50**0.5 / 40)
    words = texts(figure)
    assert "Hatched: not run." in words and len(figure.axes[0].patches) == 1
    # The paper's values at 224 px with patches 32 and 16 and at 512 px likewise.
    assert all(f" {value} " in f" {words} " for value in ("2.9", "3.0", "3.2"))
    cells = table("heatmap", study)
    assert cells.loc[cells["status"] != "ok", "speedup"].isna().all()


@pytest.mark.parametrize("tile", ["8x1", "16x16"])
def test_pattern_pictures_show_entries_and_executed_pairs(tile, study):
    pattern = graph.load("results/graphs/vil-tiny-224-s1/ic.npz")
    cover = blocks.load(f"results/blocks/vil-tiny-224-s1/ic/{tile}.npz")
    picture = masks.picture(pattern, cover)
    entry = np.array(matplotlib.colors.to_rgb(masks.ENTRY), np.float32)
    assert np.array_equal(np.isclose(picture, entry).all(axis=2), pattern.to_dense())
    boxes = np.zeros(pattern.shape, bool)
    for top, bottom, left, right in masks.stretches(cover):
        boxes[top:bottom, left:right] = True
    assert np.array_equal(boxes, ~np.isclose(picture, 1).all(axis=2))


def test_a_large_pattern_is_averaged_not_sampled(study, monkeypatch):
    pattern = graph.load("results/graphs/vil-tiny-224-s1/none.npz")
    cover = blocks.load("results/blocks/vil-tiny-224-s1/none/16x16.npz")
    full = masks.picture(pattern, cover)
    monkeypatch.setattr(masks, "PIXELS", 30)
    small = masks.picture(pattern, cover)
    assert small.shape == (22, 22, 3)
    assert small[0, 0] == pytest.approx(full[:3, :3].mean(axis=(0, 1)), abs=1e-6)
    assert small[-1, -1] == pytest.approx(full[63:, 63:].mean(axis=(0, 1)), abs=1e-6)


def test_pattern_figures_have_a_picture_for_each_tile_and_order(study):
    figure = drawn("pattern_regionvit", study)
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.images]
    assert len(titles) == 2 * 4
    cover = blocks.load("results/blocks/regionvit-tiny-224-s1/ic/8x1.npz")
    assert f"order IC: {cover.area.sum() / 64**2:.1%}\ntile 8 × 1" in titles
    assert sum(each.startswith("the model's order") for each in titles) == 2
    natural = blocks.load("results/blocks/regionvit-tiny-224-s1/none/8x1.npz")
    assert f"tiles run {natural.area.sum() / 64**2:.1%}, reordered" in title(figure)


def test_fill_is_entries_over_area(study):
    cover = blocks.load("results/blocks/vil-tiny-224-s1/ic/16x16.npz")
    frame = table("fill", study).set_index(["reorder", "tile"])
    assert frame.loc[("ic", "16x16"), "fill"] == pytest.approx(blocks_stage.summary(cover)["fill"])
    found = heights(drawn("fill", study).axes[0])
    assert found[round(1 + 0.1, 3)] == pytest.approx(100 * blocks_stage.summary(cover)["fill"])


def test_prediction_states_the_median_error(study):
    figure = drawn("prediction", study)
    # Each of 4 workloads, 4 orders and 3 schedules, but for one workload's order that did not run.
    assert title(figure) == "Predicted times are off by 10.0% at the median of 45 schedules"
    assert "±30%, 100% of schedules. 90th percentile: 10.0%." in texts(figure)
    frame = table("prediction", study)
    assert frame["error"].to_numpy() == pytest.approx(0.1)


def test_reorder_times_are_drawn_as_measured(study):
    left = drawn("reorder_time", study).axes[0]
    lines = {line.get_label(): line for line in left.lines}
    assert lines["RCM"].get_ydata() == pytest.approx([20, 60])
    assert lines["RCM"].get_xdata() == pytest.approx([100, 400])
    assert left.get_xscale() == left.get_yscale() == "log"


def test_policy_compares_the_ilp_with_fixed_tiles_and_with_greedy(study):
    frame = table("policy", study)
    measured = frame.dropna(subset="over_greedy")
    assert len(frame) == 16 and len(measured) == 15
    for rival in ("fixed", "greedy"):
        assert measured[f"over_{rival}"].to_numpy() == pytest.approx(1.2)
        assert set(measured[f"verdict_{rival}"]) == {"faster"}
    assert set(measured["fixed"]) == {"8x1"} and frame["over_descent"].isna().all()
    assert set(measured["left"]) == {0.0}
    row = frame[(frame["model"] == "vil-tiny-128-s1") & (frame["reorder"] == "ic")].iloc[0]
    assert row["paper_gain"] == pytest.approx(1 - 2.05 / 4.00)
    figure = drawn("policy", study)
    assert "median 1.20× 15 faster, 0 ties, 0 slower" in texts(figure)
    assert title(figure) == "Integer programming: 1.2 times as fast as the best fixed tile and plain greedy"
    assert len(marks(figure.axes[0])) == 30
    summary = table("policy_summary", study).set_index("rival")
    assert summary.loc["plain greedy", ["cases", "median"]].tolist() == pytest.approx([15, 1 - 1 / 1.2])


def test_solvers_stand_side_by_side(study):
    frame = table("solvers", study).set_index(["model", "reorder", "solver"])
    assert set(frame.index.get_level_values("solver")) == {"greedy", "descent", "highs", "gurobi"}
    assert set(frame["tiles"]) == {"mixed"}
    plan = schedule.load("results/schedules/vil-tiny-224-s1/ic/mixed.highs.json")
    row = frame.loc[("vil-tiny-224-s1", "ic", "highs")]
    assert (row["objective_us"], row["bound_us"], row["status"]) == (plan.objective_us, plan.bound_us, plan.status)
    assert row["gain"] == pytest.approx(1 - plan.predicted_us / row["greedy_us"])
    assert frame.xs("greedy", level="solver")[["objective_us", "bound_us", "gap"]].isna().all(axis=None)


def test_verdicts_follow_from_the_inputs(study):
    frame = table("claims", study, ["expected/aims.csv", *tables.needs("claims", study)]).set_index("id")
    faster = frame.loc["over_peer:vil"]
    assert (faster["measured"], faster["verdict"]) == (pytest.approx(4.0), "faster")
    tokens = frame.loc["tokens:vil-tiny-224-s1"]
    assert (tokens["measured"], tokens["verdict"]) == (225, "not met")
    assert set(frame["device"]) == {synthetic.DEVICE["name"], "a cost model"}
    assert frame.loc["prediction_error:median", "measured"] == pytest.approx(10)
    assert frame.loc["network_passed:", "verdict"] == "passed"
    # The workloads of these were not asked for.
    for absent in ("end_to_end:regionvit", "density:vil-tiny-384-s1", "reorder_s:65537"):
        assert absent not in frame.index
    # The made-up IC order gathers 4/3 of the window order.
    assert frame.loc["gathered_over_window:ic", ["measured", "verdict"]].tolist() == [33.3333, "not met"]


@pytest.mark.parametrize(
    ("relation", "expected", "verdict", "measured"),
    [
        (">=", 6.1, "not met", 6.0),
        (">=", 6, "met", 6.0),
        ("<=", 7, "not met", 8.0),
        ("<=", 8, "met", 8.0),
        ("=", 8, "not met", 6.0),
        ("=", 6, "not met", 8.0),
    ],
)
def test_a_claim_is_judged_by_its_worst_case(relation, expected, verdict, measured, study, tmp_path):
    claim = {
        "id": "over_peer:vil",
        "kind": "aim",
        "claim": "all",
        "relation": relation,
        "expected": expected,
        "unit": "×",
    }
    synthetic.write_csv(tmp_path / "claims.csv", ",".join(claim), [claim])
    rows = []
    for model, p50 in (("vil-tiny-128-s1", 1 / 8), ("vil-tiny-224-s1", 1 / 6)):
        rows += [synthetic.row(model, "sdpa_dense", 1.0)]
        rows += [synthetic.row(model, "tilewright", p50, ordered="True", **_read.HEADLINE)]
    synthetic.write_csv(tmp_path / "study.bench.csv", synthetic.BENCH, rows)
    row = table("claims", study, [tmp_path / "claims.csv", _select.PAPER_LATENCY, tmp_path / "study.bench.csv"]).iloc[0]
    assert (row["verdict"], row["measured"]) == (verdict, pytest.approx(measured))


@pytest.mark.parametrize(
    ("found", "verdict"), [(0.1187, "reproduced"), (0.1186, "reproduced"), (0.1196, "not reproduced")]
)
def test_equality_is_judged_in_the_digits_claimed(found, verdict, study, tmp_path):
    synthetic.write_csv(
        tmp_path / "study.bench.csv", synthetic.BENCH, [synthetic.row("vil-tiny-224-s1", "flex", 1.0, density=found)]
    )
    frame = table("claims", study, [_select.CLAIMS, _select.PAPER_LATENCY, tmp_path / "study.bench.csv"]).set_index(
        "id"
    )
    assert frame.loc["density:vil-tiny-224-s1", "verdict"] == verdict


def test_workloads_of_one_resolution_have_their_own_labels():
    frame = pd.DataFrame(
        {
            "model": ["vil-tiny-224-s1", "vil-tiny-224-s2", "vil-tiny-384-s1"],
            "family": "vil",
            "resolution": [224.0, 224.0, 384.0],
        }
    )
    assert list(_read.labels(frame).values()) == ["tiny-224-s1", "tiny-224-s2", "384 px"]


def test_each_tile_has_its_own_colour():
    sizes = ["16x1", "32x1", "64x1", "128x1", "16x16", "32x32", "64x64", "128x128"]
    assert len({_style.tile_colour(name) for name in sizes}) == len(sizes)
    assert _palette.in_order(["window", "hilbert", "none", "ic"], "orders") == ["none", "ic", "window", "hilbert"]


# Bad input


@pytest.mark.parametrize("family", [figures.draw, tables.tabulate], ids=["figure", "table"])
def test_an_unknown_name_lists_the_known_ones(family):
    with pytest.raises(UnknownNameError, match=r"unknown (figure|table) 'pie'; known: (overview|latency)"):
        family("pie", [], [])


@pytest.mark.parametrize(
    ("make", "suffix"),
    [(figures.draw, ".svg, .png, .pdf"), (tables.tabulate, ".csv, .md, .json")],
    ids=["figure", "table"],
)
def test_an_unknown_ending_is_refused_before_any_work(make, suffix, tmp_path):
    with pytest.raises(ArtifactError, match=f"expected a name ending in {re.escape(suffix)}, found '.gif'"):
        make("speedup", [], [tmp_path / "a.gif"])


def test_a_missing_input_is_named(study):
    with pytest.raises(ArtifactError, match=r"gone\.csv: no such file; expected attention or paper_latency"):
        drawn("speedup", study, ["gone.csv"])


@pytest.mark.parametrize("name", ["speedup", "end_to_end", "heatmap", "fill", "pattern_vil", "reorder_time"])
def test_an_input_of_another_stage_is_refused(name, study):
    foreign = "results/logs/orders/times.csv" if name != "reorder_time" else "results/logs/heatmap/224.csv"
    with pytest.raises(ArtifactError, match=r"(times|224)\.csv: expected .*, found (orders|heatmap)"):
        drawn(name, study, [foreign])


def test_a_csv_of_no_stage_is_refused(study, tmp_path):
    synthetic.write_csv(tmp_path / "x.csv", "name,value", [{"name": "a", "value": 1}])
    with pytest.raises(ArtifactError, match="found a CSV with the columns name, value"):
        drawn("prediction", study, [tmp_path / "x.csv"])


def test_rows_of_another_version_are_refused(study, tmp_path):
    path = tmp_path / "x.csv"
    synthetic.write_csv(path, synthetic.BENCH, [synthetic.row("vil-tiny-128-s1", "sdpa_dense", 5.0)])
    text = path.read_text()
    path.write_text(text.replace(",commit,", ",made,"))
    with pytest.raises(ArtifactError, match=r"x\.csv: .*\['commit'\] missing and \['made'\] more"):
        drawn("prediction", study, [path])
    path.write_text(text.replace("attention,2,", "attention,9,"))
    with pytest.raises(ArtifactError, match=r"x\.csv: expected version 2 of attention rows, found 9"):
        drawn("prediction", study, [path])


@pytest.mark.parametrize(
    "content", [b"", b"\x93NUMPY", b"{}", b'{"kind": "graph"'], ids=["empty", "npy", "bare", "cut"]
)
@pytest.mark.parametrize("suffix", [".json", ".npz", ".csv"])
def test_a_damaged_file_is_refused(content, suffix, study, tmp_path):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=f"x{suffix}: expected (graph or blocks), found"):
        drawn("pattern_vil", study, [path])


def test_text_where_a_number_belongs_is_refused(study, tmp_path):
    rows = [synthetic.row("vil-tiny-128-s1", "sdpa_dense", 5.0, repetitions="many")]
    synthetic.write_csv(tmp_path / "b.csv", synthetic.BENCH, rows)
    with pytest.raises(ArtifactError, match=r"b\.csv: expected an attention file, found: .*many"):
        drawn("prediction", study, [tmp_path / "b.csv"])


def test_an_unknown_status_is_refused(study, tmp_path):
    rows = [synthetic.row("vil-tiny-128-s1", "sdpa_dense", 5.0, status="fine")]
    synthetic.write_csv(tmp_path / "b.csv", synthetic.BENCH, rows)
    with pytest.raises(ArtifactError, match="status: expected ok, skipped, failed, found fine"):
        drawn("prediction", study, [tmp_path / "b.csv"])


def test_a_finding_its_legend_and_the_notes_stay_inside_a_figure():
    from matplotlib.lines import Line2D

    words = "What a NVIDIA H200 measured, beside 1,000 WORDS of an IMAGE; " * 4
    with _style.context():
        drawn = _style.figure(4)
        drawn.subplots()
        _style.head(drawn, words, [Line2D([], [], label=f"a contender with a long name, {n}") for n in range(8)])
        _style.notes(drawn, words)
        drawn.draw_without_rendering()
        (legend,), notes = drawn.legends, drawn._supxlabel
        for found in (legend, legend.get_title(), notes):
            box = found.get_window_extent()
            assert drawn.bbox.x0 <= box.x0 and box.x1 <= drawn.bbox.x1
        assert "\n" in notes.get_text() and "\n" in legend.get_title().get_text()


def test_nothing_given_is_an_error(study):
    heat = "results/logs/heatmap/224.csv"
    with pytest.raises(ArtifactError, match=r"expected an orders file among the inputs, found .*224\.csv"):
        _read.sort([heat], ("heatmap", "orders"))


def test_a_prediction_of_nothing_is_an_error(study):
    with pytest.raises(ArtifactError, match="at least one schedule that was predicted and timed"):
        drawn("prediction", study, ["results/logs/vil-tiny-128-s1/baselines.csv"])


def test_blocks_of_another_graph_are_refused(study):
    inputs = ["results/graphs/vil-tiny-224-s1/none.npz", "results/blocks/vil-tiny-224-s1/ic/8x1.npz"]
    with pytest.raises(ArtifactError, match=r"ic/8x1.npz: expected blocks of a graph among the inputs"):
        drawn("pattern_vil", study, inputs)


@pytest.mark.parametrize(("column", "value"), [("relation", "<"), ("id", "luck:vil"), ("kind", "hope")])
def test_a_claim_that_cannot_be_judged_is_refused(column, value, study, tmp_path):
    claim = {"id": "over_peer:vil", "kind": "aim", "claim": "x", "relation": ">=", "expected": 1}
    claim |= {"unit": "×", column: value}
    synthetic.write_csv(tmp_path / "c.csv", ",".join(claim), [claim])
    with pytest.raises(ArtifactError, match=r"c.csv: (relation|measure|kind): expected .*, found (<|luck|hope)"):
        table("claims", study, [tmp_path / "c.csv", _select.PAPER_LATENCY])


def test_a_failed_write_leaves_what_was_there(study, tmp_path, monkeypatch):
    path = tmp_path / "reorder_time.svg"
    path.write_text("before")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(ArtifactError, match="No space left on device; an existing file is unchanged"):
        figures.draw("reorder_time", figures.needs("reorder_time", study), [path])
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


# Commands


@pytest.mark.parametrize(
    ("script", "flag", "name", "outputs"),
    [("draw", "--figure", "heatmap", ["h.png"]), ("table", "--table", "heatmap", ["h.csv", "h.md"])],
)
def test_the_command_writes_what_it_is_asked_for(script, flag, name, outputs, study, tmp_path):
    command = [ROOT / "workflow" / "scripts" / f"{script}.py", flag, name, "--inputs"]
    paths = [tmp_path / output for output in outputs]
    assert run_script(*command, *figures.needs(name, study), "--outputs", *paths).returncode == 0
    assert all(path.stat().st_size > 100 for path in paths)
    failed = run_script(*command, "gone.csv", "--outputs", *paths)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: gone.csv: no such file") and failed.stderr.count("\n") == 1


# Packed attention and pruned networks


def test_packed_attention_is_shown_over_ours(study):
    frame = table("ragged", study)
    rows = frame[(frame["call"] == "attend") & (frame["heads"] == 6)].set_index(["provider", "images"])
    assert rows.loc[("sdpa_mask", 16), "over_ours"] == 2 and rows.loc[("tilewright", 256), "over_ours"] == 1
    assert np.isnan(rows.loc[("flex", 16), "p50_us"])


def test_the_best_fair_baseline_is_of_the_same_batch_and_mode(study):
    frame = table("pruned", study)
    ours = frame[frame["batching"] == "ragged"]
    one, many = (ours[ours["batch"] == batch] for batch in (1, 16))
    assert set(one["fair"]) == {"gathered"} and set(many["fair"]) == {"padded_kept"}
    assert (one["over_fair"] == 1.5).all() and many["over_fair"].tolist() == pytest.approx([1.6] * len(many))
    assert ours["over_padded"].tolist() == pytest.approx([2.4] * len(ours))
    assert ours["over_published"].tolist() == pytest.approx([3.0] * len(ours))
    assert (one["over_dense"] == 1.5).all() and many["over_dense"].tolist() == pytest.approx([1.6] * len(many))


def test_claims_about_pruned_networks_are_judged_by_their_rows(study, tmp_path):
    found = table("claims", study, ["expected/aims.csv", *tables.needs("claims", study)]).set_index("id")
    expected = {
        "ragged_over:flash_varlen/256-256": (3, "met", "6x64, 256 images of 50-197"),
        "ragged_over:flash_varlen/1-16": (3, "met", "6x64, 1 images of 50-197"),
        "ragged_floor:256": (2, "not met", "6x64, 256 images of 50-197"),
        "ragged_host:": (30.6, "not met", "3x64, 256 images of 50-197"),
        "pruned_over:graph/fair": (1.5, "faster", None),
        "pruned_over:called/fair": (1.5, "faster", None),
        "pruned_differ:graph/fair": (1.6, "met", None),
        "pruned_differ:graph/dense": (1.6, "met", None),
        "pack_share:graph": (2, "met", None),
        "pruned_logits:float16": (1e-3, "met", None),
        "pruned_top1:": (100, "met", None),
        "pruned_top1_all:": (93.75, "failed", None),
    }
    # Neither this mode nor this type nor this setting was asked for.
    absent = (
        "differ:compile_graph/fair",
        "logits:float32",
        "best:any/padded/deit-small-224-threshold_l2/keep_ratio=0.5",
    )
    assert not {f"pruned_{case}" for case in absent} & set(found.index)
    for claim, (measured, verdict, where) in expected.items():
        row = found.loc[claim]
        assert row["verdict"] == verdict, claim
        assert where in (None, row["where"])
        assert row["measured"] == pytest.approx(measured, 1e-5)
    slow = synthetic.pruned_row("deit-tiny-224-evit", "", "ragged", "eager", 1, p50_us=1000.0)
    rows = [slow, synthetic.pruned_row("deit-tiny-224-evit", "", "padded", "eager", 1, p50_us=1000.0)]
    synthetic.write_csv(tmp_path / "p.csv", synthetic.PRUNED, rows)
    row = table("claims", study, [_select.CLAIMS, _select.PAPER_LATENCY, tmp_path / "p.csv"]).set_index("id")
    assert row.loc["pruned_over:called/fair", ["measured", "verdict"]].tolist() == [1, "tie"]


def test_the_figure_of_pruned_networks_has_a_line_for_each_batching(study):
    figure = drawn("pruned", study)
    panel = next(axes for axes in figure.axes if axes.get_title(loc="left").startswith("DeiT-small, Threshold-L2"))
    lines = {line.get_label(): [*line.get_ydata()] for line in panel.lines}
    assert lines["Tilewright, packed"] == pytest.approx([2.4, 2.4]) and lines["gathered"] == pytest.approx([1.6])
    assert "padded to the full length" not in lines and "as CUDA graphs" in texts(figure)
    assert title(figure) == "Packed, pruned networks are 2.4 times as fast as padded ones at batch 16"


def test_the_figure_of_packed_attention_shows_times_over_ours(study, tmp_path):
    figure = drawn("ragged_kernel", study)
    ratios = {line.get_label(): [*line.get_ydata()] for line in figure.axes[0].lines}
    assert ratios["FlashAttention varlen"] == [3, 3, 3] and ratios["padded, masked SDPA"] == [2, 2]
    # It did not run.
    assert "FlexAttention" not in texts(figure)
    assert title(figure) == "Packed images: faster than every other attention in 6 of 6 cases, 2.0 to 3.0 times as fast"


def test_every_contender_has_a_look():
    named = {"batchings": batching.NAMES, "packed": packed.NAMES, "attention": attentions.NAMES, "sparse": sparse.NAMES}
    for group, names in named.items():
        assert set(names) <= set(_palette.GROUPED[group])


# Machado, Oliveira and Fernandes (2009): linear RGB as it is seen without one kind of cones.
BLINDNESS = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def seen(colour, blindness):
    """CIE L*a*b* of a colour as it is seen."""
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(BLINDNESS.get(blindness, np.eye(3))) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    x, y, z = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("group", _palette.GROUPED)
def test_contenders_of_a_figure_are_told_apart_by_mark_and_colour(group):
    looks = _palette.GROUPED[group]
    assert len({look.marker for look in looks.values()}) == len(looks)
    for blindness in ("", *BLINDNESS):
        colours = [seen(look.colour, blindness) for look in looks.values()]
        least = min(np.linalg.norm(one - other) for at, one in enumerate(colours) for other in colours[:at])
        assert least >= 10, (blindness, least)


def test_a_contender_has_one_look_in_all_groups():
    looks = {}
    for group in (_palette.ATTENTION, _palette.SPARSE, _palette.PACKED):
        for name, look in group.items():
            looks.setdefault(name, set()).add((look.colour, look.marker))
    assert all(len(found) == 1 for found in looks.values())
    assert {
        _palette.GROUPED[group][name].colour for group, name in (("sparse", "tilewright"), ("batchings", "ragged"))
    } == {_palette.BLUE}


# Figures of documents

PAGES = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
QUOTED = sorted({name for page in PAGES for name in _quoted.shown(page)})


def test_each_picture_is_on_a_page():
    linked = {name for page in PAGES for name in re.findall(r"figures/(\w+\.(?:png|svg))\)", page)}
    assert {path.name for path in (ROOT / _quoted.PLACE).iterdir()} == linked


@pytest.mark.parametrize("name", QUOTED)
def test_a_picture_of_a_page_is_drawn_of_the_recorded_rows(name):
    path = ROOT / _quoted.PLACE / f"{name}.png"
    assert _quoted.said(path) == _quoted.source(name, ROOT)
    assert path.stat().st_size <= 150_000


def test_a_picture_is_drawn_by_its_name(tmp_path):
    (tmp_path / "expected/h200").mkdir(parents=True)
    for place in ("config.yaml", "config", "expected/h200/worth.csv"):
        (tmp_path / place).symlink_to(ROOT / place)
    assert _quoted.shown("![a](figures/h200_worth.png) ![b](figures/mine.png)") == ["h200_worth"]
    _quoted.draw("h200_worth", tmp_path)
    made, kept = (root / _quoted.PLACE / "h200_worth.png" for root in (tmp_path, ROOT))
    assert _quoted.said(made) == _quoted.said(kept) != ""


# Figures of pictures, whose words are those of their panels.
PICTURES = ("pattern_vil", "pattern_regionvit", "pattern_dynamicvit", "overview", "scene", "video_maps")


@pytest.mark.parametrize("name", figures.NAMES)
def test_a_figure_is_read_at_the_width_of_a_page(name, study):
    """Its letters have at least nine points there, and each of its panels shows something."""
    from matplotlib.text import Text

    figure = drawn(name, study)
    shrunk = min(1, _style.WIDTH / figure.get_figwidth())
    sizes = {round(text.get_fontsize() * shrunk, 2) for text in figure.findobj(Text) if text.get_text().strip()}
    assert min(sizes) >= _style.LETTERS
    for axes in figure.axes:
        if axes.get_visible() and axes.axison and axes.get_label() != "<colorbar>":
            assert axes.has_data() or axes.get_title() == "the tokens are of no grid"
    # Panels, several of which a row of frames or a head of a picture is.
    assert name in PICTURES or len(figure.axes) <= 9


@pytest.mark.parametrize("name", figures.NAMES)
def test_a_finding_is_of_the_rows(name, study):
    """It says a number, or that there is none to say."""
    assert re.search(r"\d", title(drawn(name, study)))


@pytest.mark.parametrize(
    "module",
    [
        "tilewright.networks.batching.ragged",
        "tilewright_study.baselines.packed.flex",
        "tilewright.networks.attentions.dense",
    ],
)
def test_a_label_does_not_change_what_measures(module):
    found = provenance.closure(module)
    assert not [name for name in map(str, found) if "figures" in name]


def test_every_mode_has_words():
    assert set(figures.member("pruned").module.MODES) == set(batching.MODES)


def test_a_contender_that_says_nothing_of_itself_is_drawn_under_its_name(study, tmp_path):
    rows = [synthetic.ragged_row(1, 64, "5-9", 1, name, 3.0) for name in ("tilewright", "flex", "newcomer", "other")]
    synthetic.write_csv(tmp_path / "r.csv", synthetic.RAGGED, rows)
    shown = looks(drawn("ragged_kernel", study, [tmp_path / "r.csv"]))
    assert {"FlexAttention", "newcomer", "other"} == set(shown) and len(set(shown.values())) == len(shown)
    rows = [synthetic.pruned_row("deit-tiny-224-evit", "", name, "eager", 1) for name in ("padded", "ragged")]
    rows += [synthetic.pruned_row("deit-tiny-224-evit", "", "padded", "eager", 1) | {"batching": "newcomer"}]
    synthetic.write_csv(tmp_path / "p.csv", synthetic.PRUNED, rows)
    assert "newcomer" in texts(drawn("pruned", study, [tmp_path / "p.csv"]))
    rows = [synthetic.network_row("vil-tiny-224", name, 1) for name in ("native", "tilewright")]
    rows += [synthetic.network_row("vil-tiny-224", "native", 1) | {"attention": "newcomer"}]
    synthetic.write_csv(tmp_path / "n.csv", synthetic.NETWORK, rows)
    axes = drawn("end_to_end", study, [tmp_path / "n.csv"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Tilewright", "as published", "newcomer"]


def bars(axes):
    """Boxes of the bars of a panel, ``(left, right, low, high)``, those without an area left out."""
    found = [bar for container in axes.containers for bar in getattr(container, "patches", ())]
    ends = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_y(), bar.get_y() + bar.get_height()) for bar in found]
    boxes = [(*sorted(box[:2]), *sorted(box[2:])) for box in ends]
    return [box for box in boxes if box[0] < box[1] and box[2] < box[3]]


def over(one, other):
    """Whether two boxes share more than an edge."""
    across, up = (min(one[at + 1], other[at + 1]) - max(one[at], other[at]) for at in (0, 2))
    return across > 1e-6 * (one[1] - one[0]) and up > 1e-6 * (one[3] - one[2])


def marks(axes):
    """Places of marks that no line joins, with their form; ends of whiskers, ``|`` and ``_``, are none."""
    lone = [
        line
        for line in axes.lines
        if line.get_marker() not in ("", "None", None, "|", "_") and line.get_linestyle() == "None"
    ]
    return [
        (line.get_marker(), str(line.get_color()), x, y)
        for line in lone
        for x, y in zip(*map(np.ravel, line.get_data()), strict=True)
        if x == x and y == y
    ]


@pytest.mark.parametrize("name", figures.NAMES)
def test_no_two_bars_or_marks_of_a_figure_share_a_place(name, study):
    """Drawn of all rows of the kinds that it needs, among them sets of tiles that it does not show."""
    needed = figures.needs(name, study)
    logs = {path.split("/")[2] for path in needed if path.startswith("results/logs/") and path.endswith(".csv")}
    more = [str(path) for kind in logs for path in Path("results/logs", kind).rglob("*.csv")]
    figure = drawn(name, study, list(dict.fromkeys([*needed, *more])))
    for axes in figure.axes:
        boxes = bars(axes)
        assert [(one, other) for at, one in enumerate(boxes) for other in boxes[:at] if over(one, other)] == []
        found = marks(axes)
        # Places of marks of these figures are what was measured.
        assert len(found) == len(set(found)) or name in ("prediction", "configure_time", "policy", "neighborhood")


def looks(figure):
    """``{label: (colour, mark)}`` of the lines of a figure's legends."""
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    return {
        text.get_text(): (matplotlib.colors.to_hex(line.get_color()), line.get_marker())
        for legend in legends
        for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)
    }


@pytest.mark.parametrize("name", ["slices_speedup", "slices_recall"])
def test_a_contender_looks_the_same_whoever_else_is_in_a_figure(name, study, tmp_path):
    kind, at = ("slices", {"sparsity": 0.7}) if name == "slices_speedup" else ("recall", {"target": 0.9})
    place, found = ("2x64-4x4x4", "hilbert"), []
    for number, choosers in enumerate(
        [("pooled32", "pooled128", "anew"), ("anew", "blocks", "pooled128"), ("pooled32",)]
    ):
        rows = [synthetic.slices_row(*place, "sdpa_dense", 100.0, **at)]
        for chooser in ("oracle", *choosers):
            lists = synthetic.slices_lists("128x1", chooser, 0.3, 0.9, keep=0.3)
            for call in ("attend", "predict_attend"):
                rows.append(synthetic.slices_row(*place, "tilewright", 50.0, **lists | {"call": call}, **at))
        synthetic.write_csv(tmp_path / f"{number}.csv", kind, rows)
        found.append(looks(drawn(name, study, [tmp_path / f"{number}.csv"])))
    for one in found:
        assert all(one[label] == other[label] for other in found for label in one.keys() & other.keys())


@pytest.mark.parametrize("name", [name for name in experiments.NAMES if hasattr(experiments.member(name), "recorded")])
def test_the_rows_that_recorded_runs_keep_show_the_same(name, study, tmp_path):
    module = experiments.member(name)
    rows = [row for path in experiments.files(name, study) for row in _rows.read(path, experiments.row_types())[1]]
    kept = module.recorded(rows)
    assert 0 < len(kept) < len(rows)
    for folder, own in (("all", rows), ("kept", kept), ("less", kept[::2])):
        _rows.write(tmp_path / folder / "rows.csv", module.Row, own)
    lists = [ROOT / _select.CLAIMS, ROOT / "expected/aims.csv", *(ROOT / path for path in _select.PAPERS)]
    shown = [(claims.table, lists, pd.DataFrame.to_csv)]
    for family, names, make, said in (
        (tables, module.TABLES, "table", pd.DataFrame.to_csv),
        (figures, module.FIGURES, "draw", lambda drawn: texts(drawn) + str(extents(drawn))),
    ):
        for each in names:
            needed = family.needs(each, study)
            papers = [ROOT / path for path in needed if path.startswith("expected/")]
            # The figure `scene` reads pictures.
            if experiments.files(name, study)[0] in needed:
                shown.append((getattr(family.member(each), make), papers, said))
    for make, further, said in shown:
        with _style.context():
            every, same = (said(make([*further, tmp_path / folder / "rows.csv"])) for folder in ("all", "kept"))
        assert every == same, make.__module__
    # That more is missing shows.
    table = tables.member(module.TABLES[0]).table
    papers = [ROOT / path for path in tables.needs(module.TABLES[0], study) if path.startswith("expected/")]
    every, less = (table([*papers, tmp_path / folder / "rows.csv"]).to_csv() for folder in ("all", "less"))
    assert every != less


def extents(figure):
    """Where the lines of a figure go."""
    from matplotlib.lines import Line2D

    return [line.get_xydata().tolist() for line in figure.findobj(Line2D)]
