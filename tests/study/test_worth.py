"""The experiment worth: windows of a density, checks that see faults, and what its table and figure say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import synthetic
from tilewright.core import timing
from tilewright.core.errors import ConfigError
from tilewright_study import experiments
from tilewright_study.experiments import worth
from tilewright_study.experiments.worth import figure_worth as figure
from tilewright_study.experiments.worth import run as _worth
from tilewright_study.experiments.worth import table_worth as table
from tilewright_study.figures import _style
from tilewright_study.measure.effort import Run

HOW = Run("cpu", "float32", 0, 1.0, 3)
STATED = {
    **{"square": 1, "densities": (0.2, 0.6), "heads": 2, "head_dim": 32, "batch": 2, "order": "auto"},
    **{"solver": "greedy", "masked": {"sdpa_mask": ("torch",)}, "masked_densities": (0.2,), "compiled": False},
    **{"max_entries": 10**6, "max_seconds": 0.001},
}


def run(case="8", how=HOW, **changes):
    found = list(_worth.run(case, worth.Settings(**STATED | changes), how))
    # Every column is declared, and has its type.
    assert all(worth.Row.of(row) for row in found)
    return found


def by(rows, **stated):
    return [row for row in rows if all(row.get(name) == value for name, value in stated.items())]


# Patterns


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.sampled_from([1, 2, 3]), st.integers(1, 7))
def test_a_pattern_is_the_windows_around_squares_and_a_global_token(squares, square, halo):
    side = squares * square
    y, x = np.divmod(np.arange(side**2), side)
    allowed = np.ones((side**2 + 1,) * 2, bool)
    for own, their in ((y, y), (x, x)):
        first = own // square * square
        near = (their >= (first - halo)[:, None]) & (their < (first + square + halo)[:, None])
        allowed[1:, 1:] &= near
    graph = _worth.pattern(side, square, halo)
    assert np.array_equal(graph.to_dense(), allowed)
    pairs, held = _worth.entries(side, square, halo)
    assert pairs == allowed.sum() == graph.entries
    assert held >= len(graph.indices)


@pytest.mark.parametrize("square", [1, 8])
@pytest.mark.parametrize("density", [0.05, 0.2, 0.6])
def test_the_halo_is_that_of_the_closest_density(square, density):
    halo = _worth.halo_of(64, square, density)
    off = [abs(_worth.entries(64, square, each)[0] / 4097**2 - density) for each in (halo - 1, halo, halo + 1)]
    assert off[1] == min(off) and off[1] < 0.3 * density


# Rows


def test_every_part_is_checked_and_timed():
    rows = run()
    of_gpus = "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "fa4_dense", "flash3_dense"
    assert {row["status"] for row in rows if row["provider"] not in of_gpus} == {"ok"}
    for part in worth.PARTS:
        (dense,) = by(rows, part=part, provider="sdpa_dense")
        ours = by(rows, part=part, provider="tilewright")
        assert dense["density"] == 1 and [row["asked"] for row in ours] == [0.2, 0.6]
        assert all(row["p50_us"] > 0 and row["relative_error"] <= row["tolerance"] for row in (dense, *ours))
        assert all(row["plan_s"] > 0 and row["tiles"] and row["window"] % 2 for row in ours)
    (masked,) = by(rows, provider="sdpa_mask")
    assert (masked["part"], masked["asked"]) == ("layer", 0.2)
    for row in by(rows, status="skipped"):
        assert row["reason"] == "runs on an NVIDIA GPU only, found cpu"


def test_on_a_cpu_all_calls_of_a_grid_are_timed_in_rounds(monkeypatch):
    together = []

    def noted(calls, **effort):
        together.append(len(calls))
        return timing.time_together(calls, **effort)

    monkeypatch.setattr(_worth, "time_together", noted)
    monkeypatch.setattr(_worth, "time_call", None)
    rows = run()
    assert together == [len(by(rows, status="ok"))] == [7]


def test_a_block_that_is_compiled_says_so_and_is_the_same():
    rows = by(run(compiled=True, densities=(0.2,), masked_densities=()), part="block")
    assert [row["status"] for row in rows] == ["ok", "ok"] and all(row["compiled"] for row in rows)
    assert list(_worth.first_calls("8", worth.Settings(**STATED | {"compiled": True}), HOW)) == ["block"]
    assert worth.compiles(worth.Settings(**STATED | {"compiled": True}))
    assert not worth.compiles(worth.Settings(**STATED))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_over_another_window_is_seen_in_both_parts(monkeypatch, dtype):
    """The window of a neighbouring size: a tenth of the keys too few."""
    made = _worth._plan

    def other(graph, settings, how):
        found = made(_worth.pattern(16, 1, _worth.halo_of(16, 1, 0.5)), settings, how)
        object.__setattr__(found, "graph", made(graph, settings, how).graph)
        return found

    monkeypatch.setattr(_worth, "_plan", other)
    wanted = dict(densities=(0.6,), masked_densities=(), order="none")
    rows = by(run("16", Run("cpu", dtype, 0, 1.0, 3), **wanted), provider="tilewright")
    assert [(row["part"], row["status"]) for row in rows] == [("layer", "failed"), ("block", "failed")]
    assert all("against the reference" in row["reason"] and "p50_us" not in row for row in rows)


@pytest.mark.parametrize("share", [0.01, 0.1])
@torch.inference_mode()
def test_a_block_without_some_keys_is_refused(share):
    tokens = _worth._tokens(_worth._everything(16), {"heads": 4, "head_dim": 32, "batch": 1}, {"dtype": "bfloat16"})
    vit = _worth.ViT(4, 32, device="cpu", dtype=torch.bfloat16, seed=0)
    image = _worth.Image(vit, 16, tokens)

    def attend(q, k, v, kept=slice(None)):
        return torch.nn.functional.scaled_dot_product_attention(q, k[:, :, kept], v[:, :, kept])

    rows = tokens.rows
    expected = image.expected(slice(None), rows, lambda q, k, v: _worth.reference.dense_rows(rows, q, k, v))
    row, call = _worth._block(image, slice(None), tokens, attend, expected)
    assert row["status"] == "ok" and call is not None
    fewer = slice(int(share * 257) + 1, None)
    row, call = _worth._block(image, slice(None), tokens, lambda *qkv: attend(*qkv, fewer), expected)
    assert (row["status"], call) == ("failed", None)


def test_what_does_not_fit_says_why():
    tight = by(run(max_entries=500), provider="tilewright")
    assert {row["status"] for row in tight} == {"skipped"} and len(tight) == 4
    assert all(
        "the distinct rows hold" in row["reason"] and "at most 500 are allowed" in row["reason"] for row in tight
    )
    (layer, block) = by(run("4", densities=(0.05,), masked_densities=()), provider="tilewright")
    assert layer["reason"] == block["reason"] and "no window on this grid has a density of 5%" in layer["reason"]


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("9x", {}, "case '9x': expected tokens a side"),
        ("9", {"square": 2}, "case '9': expected tokens a side, at least 4, whole squares of 2"),
        ("8", {"densities": (0.2, 1.5)}, "densities: expected shares above 0 and below 1, found 1.5"),
        (
            "8",
            {"masked_densities": (0.3,)},
            "masked_densities: expected some of the densities, found 0.3; known: 0.2, 0.6",
        ),
        ("8", {"masked": {"pie": ()}}, "masked: unknown baseline 'pie'"),
        ("8", {"masked": {"sdpa_flash": ()}}, "masked: expected baselines that compute the pattern, found sdpa_flash"),
        ("8", {"order": "hilbert"}, "order: unknown order 'hilbert'; known: auto, none"),
        ("8", {"solver": "cplex"}, "solver: unknown solver 'cplex'"),
    ],
)
def test_wrong_settings_are_named(case, changes, message):
    with pytest.raises(ConfigError, match=message):
        run(case, **changes)


def test_rows_depend_on_the_orders_that_their_plans_may_have():
    def entered(**row):
        return set(experiments.modules("worth", [{"provider": "tilewright", **row}], "cuda"))

    auto, window = entered(reorder="auto", solver="highs"), entered(reorder="window", solver="highs")
    assert {
        "tilewright.attention.reorder.ic",
        "tilewright.attention.reorder.window",
    } <= auto and "tilewright.attention.reorder.ic" not in window
    assert "tilewright.attention.cuda.cost_model" in window and "tilewright.milp.highs" in window
    assert "tilewright_study.baselines.sparse.flex" in experiments.modules("worth", [{"provider": "flex"}], "cpu")


# Table and figure


def written(folder, ratios, **changes):
    """Files of grids whose plans are `ratios[tokens a side]` times as fast, by density; blocks half as much more."""
    for side, of_density in ratios.items():
        rows = [synthetic.worth_row(side, 1.0, part, "sdpa_dense", 1000.0) for part in worth.PARTS]
        rows.append(synthetic.worth_row(side, 1.0, "layer", "sdpa_flash", 2000.0))
        for asked, ratio in of_density.items():
            for part, gain in zip(worth.PARTS, (1, 0.5), strict=True):
                us = None if ratio is None else 1000.0 / (1 + gain * (ratio - 1))
                rows.append(synthetic.worth_row(side, asked, part, "tilewright", us, **changes))
        synthetic.write_csv(folder / f"{side}.csv", "worth", rows)
    return sorted(folder.glob("*.csv"))


def test_the_table_says_from_how_many_tokens_each_part_pays(tmp_path):
    grids = {16: {0.1: 1.5, 0.2: 0.8}, 32: {0.1: 0.9, 0.2: 1.4}, 64: {0.1: 3.0, 0.2: 2.0}, 128: {0.1: 4.0, 0.2: None}}
    found = table.table(written(tmp_path, grids)).set_index(["tokens", "asked"])
    assert found["layer_ratio"].tolist() == pytest.approx([1.5, 0.8, 0.9, 1.4, 3.0, 2.0, 4.0, np.nan], nan_ok=True)
    assert found.loc[(4097, 0.1), "block_ratio"] == pytest.approx(2)
    # Faster at 257 tokens, but not at all more: what counts is from where on.
    assert set(found.xs(0.1, level="asked")["layer_from"]) == {4097}
    assert set(found.xs(0.2, level="asked")["block_from"]) == {1025}
    assert set(found["dense"]) == {"sdpa_dense"} and found.loc[(16385, 0.2), "reason"] == synthetic.TOO_LONG


def test_what_is_within_the_noise_does_not_pay(tmp_path):
    found = table.table(written(tmp_path, {16: {0.1: 1.02}}, rse=0.05))
    assert found["layer_ratio"][0] > 1 and found["layer_from"].isna().all()
    assert table.table(written(tmp_path, {16: {0.1: 1.02}}, rse=0.001))["layer_from"].tolist() == [257]


def test_a_row_that_failed_its_check_has_no_ratio(tmp_path):
    found = table.table(written(tmp_path, {16: {0.1: 2.0}}, status="failed", reason="wrong"))
    assert found["layer_ratio"].isna().all() and found["reason"].tolist() == ["wrong"]


def drawn(paths):
    with _style.context():
        return figure.draw(paths)


def test_the_figure_shows_both_parts_and_from_where_a_window_pays(tmp_path):
    grids = {16: {0.1: 0.8, 0.2: 0.5}, 32: {0.1: 1.6, 0.2: 0.9}, 64: {0.1: 12.0, 0.2: 2.0}, 128: {0.1: 30.0, 0.2: None}}
    figure = drawn(written(tmp_path, grids))
    layer, block = figure.axes[:2]
    words = [text.get_text() for text in layer.texts]
    assert words == ["0.80", "1.60", "12.0", "30.0", "0.50", "0.90", "2.00"] and len(layer.patches) == 1
    assert block.get_title(loc="left") == "whole block of ViT-B"
    said = figure.legends[0].get_title().get_text()
    assert said == "A window pays from 4,097 tokens on, whatever it keeps"


@pytest.mark.parametrize("ratios", [{0.1: 0.5}, {0.1: 0.5, 0.2: None}, {0.1: None}], ids=["one", "blank", "none"])
def test_a_window_that_does_not_pay_is_said_so(tmp_path, ratios):
    figure = drawn(written(tmp_path, {16: ratios}))
    assert figure.legends[0].get_title().get_text() == "A window pays at none of these sizes"
