"""The experiment neighborhood: contenders that compute the same windows, boxes, and what its tables and figures say."""

import pytest
import torch

from helpers import synthetic
from tilewright import neighborhood as operator
from tilewright.core.errors import ConfigError
from tilewright.neighborhood import rule
from tilewright.neighborhood.cpu import launch as cpu
from tilewright.neighborhood.cuda import launch as cuda
from tilewright_study.experiments import neighborhood
from tilewright_study.experiments.neighborhood import claims, figure_neighborhood, figure_neighborhood_boxes
from tilewright_study.experiments.neighborhood import flex as _flex
from tilewright_study.experiments.neighborhood import run as _neighborhood
from tilewright_study.experiments.neighborhood import table_neighborhood as table
from tilewright_study.experiments.neighborhood import table_neighborhood_boxes as boxes
from tilewright_study.figures import _style
from tilewright_study.measure.effort import Run

HOW = Run("cpu", "float32", 0, 1.0, 3)
CONTENDERS = {"gather": 500, "natten": 500, "sdpa_dense": 500}


def run(case, **changes):
    stated = {"contenders": CONTENDERS, "boxes": 2, "box_tokens": 500, "max_seconds": 0.001} | changes
    found = list(_neighborhood.run(case, neighborhood.Settings(**stated), HOW))
    assert all(neighborhood.Row.of(row) for row in found)
    return found


@pytest.mark.parametrize(
    ("case", "others"), [("9x14-w4-s2-d2-causal0-2x16", 2), ("5x6x9-w3-cut-1x16", 2), ("40-w7-1x16", 0)]
)
def test_contenders_and_boxes_are_checked_and_timed(case, others):
    rows = run(case)
    status = {row["provider"]: row["status"] for row in rows}
    assert status == {"tilewright": "ok", "gather": "ok", "natten": "skipped", "sdpa_dense": "ok"}
    assert [row["chosen"] for row in rows if row["provider"] == "tilewright"] == [True] + [False] * others
    assert all(row["p50_us"] > 0 and row["useful_gflops"] > 0 for row in rows if row["status"] == "ok")
    assert all(row["pairs"] <= row["visited"] for row in rows if "visited" in row)


def test_what_is_too_large_says_so():
    rows = run("8x8-w3-1x16", contenders={"gather": 63}, box_tokens=63)
    assert [row["provider"] for row in rows] == ["tilewright", "gather"]
    assert rows[1]["reason"] == "a grid of 64 tokens; it is run on 63 at most"


def test_another_window_is_seen(monkeypatch):
    attend = operator.attend
    monkeypatch.setattr(operator, "attend", lambda *given, window, **more: attend(*given, window=(3, 5), **more))
    (row,) = run("8x8-w5-1x16", contenders={}, boxes=0)
    assert row["status"] == "failed" and "against the reference" in row["reason"] and "p50_us" not in row


@pytest.mark.parametrize("case", ["9x14-w4-s2-d2-causal0-1x16", "5x6x9-w3-cut-1x16", "300-w7-1x16"])
def test_blocks_of_flex_hold_all_pairs_and_its_mask_these_alone(case):
    layer = neighborhood.layer(case)
    order = torch.from_numpy(_flex._order(layer.grid))
    assert sorted(order.tolist()) == list(range(len(order)))
    where = torch.unravel_index(order, layer.grid)
    axes = [_flex._Axis(axis, n, at) for axis, n, at in zip(layer.rule.axes, layer.grid, where, strict=True)]
    token = torch.arange(len(order))
    allowed = _flex._mask_mod(axes)(0, 0, token[:, None], token)
    assert allowed.sum() == layer.rule.pairs(layer.grid)
    n = _flex.BLOCK
    parts = [[block.sum() for block in row.split(n, 1)] for row in allowed.split(n)]
    assert torch.equal(_flex._counts(layer, axes, order), torch.tensor(parts))


@pytest.mark.parametrize(
    ("case", "message"), [("8x8-w3", "expected <grid>-w<window>"), ("8x8-w9-1x16", "at most the 8 tokens")]
)
def test_a_wrong_layer_is_named(case, message):
    with pytest.raises(ConfigError, match=message):
        neighborhood.layer(case)


@pytest.mark.parametrize("launch", [cpu, cuda])
def test_the_first_candidate_is_the_choice_and_the_others_are_in_order(launch):
    found = rule.make(3, (3, 5, 5), 1, 1, False, "shift")
    given = found, (8, 16, 16), 2, 2, 32, 32, torch.float32
    first, *others = launch.candidates(*given)
    assert launch.choose(*given).visited == first.visited
    assert [each.predicted for each in others] == sorted(each.predicted for each in others) and len(others) > 5
    assert len({each.name for each in others} | {first.name}) == len(others) + 1


def files(folder, **ours):
    for case, us in {"8x8-w5-1x16": 10.0, "8x8x8-w5-1x16": 100.0}.items():
        rows = [
            synthetic.neighborhood_row(case, "tilewright", us, box="4x4", chosen="True", **ours),
            synthetic.neighborhood_row(case, "tilewright", us / 1.25, box="2x8", chosen="False"),
            synthetic.neighborhood_row(case, "flex", 2 * us),
            synthetic.neighborhood_row(case, "natten", 4 * us, variant="a"),
            synthetic.neighborhood_row(case, "natten", 3 * us, variant="b"),
            synthetic.neighborhood_row(case, "sdpa_dense", us / 2),
        ]
        synthetic.write_csv(folder / f"{case}.csv", "neighborhood", rows)
    return sorted(folder.glob("*.csv"))


def test_tables_figures_and_claims_compare_with_the_chosen_box(tmp_path):
    paths = files(tmp_path)
    found = table.table(paths).set_index(["case", "provider"])
    assert found.loc[("8x8-w5-1x16", "natten"), "variant"] == "b"
    assert found.xs("flex", level="provider")["over_ours"].tolist() == pytest.approx([2, 2])
    over, values = claims.MEASURES["neighborhood_over"]
    assert values(over(paths), "3")["value"].to_dict() == pytest.approx({"8x8x8-w5-1x16": 2})
    chosen, values = claims.MEASURES["neighborhood_chosen"]
    assert values(chosen(paths), "")["value"].tolist() == pytest.approx([1.25, 1.25])
    with _style.context():
        first, second = figure_neighborhood.draw(paths), figure_neighborhood_boxes.draw(paths)
    said = [drawn.legends[0].get_title().get_text().replace("\n", " ") for drawn in (first, second)]
    assert said[0] == "Neighbourhood attention: faster than every other in 2 of 2 layers, 2.0 times as fast"
    assert said[1] == "The chosen box takes at most 25% longer than the fastest, in 2 layers"


def test_what_failed_has_no_ratio(tmp_path):
    paths = files(tmp_path, status="failed", reason="wrong")
    assert table.table(paths)["over_ours"].isna().all() and boxes.table(paths)["over_chosen"].isna().all()
