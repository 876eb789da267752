"""Claims about paths of trained networks: small tables whose answers are worked out by hand."""

import csv
import re

import msgspec
import numpy as np
import pandas as pd
import pytest

from helpers import synthetic
from helpers.checkout import ROOT
from tilewright.paths import table as look_up
from tilewright_study.experiments.paths import figure_path_families, table_paths
from tilewright_study.tables import _select, claims

B2, PLAIN = "segformer-b2-64.sampled", "segformer-b2-64.plain"


def row(case, us, choice, test, part="base", rung="trained", **changes):
    """A path of `case` that takes `us` microseconds; its text is its time, but for the full path's."""
    seen = {"choice": choice, "test": test, "fit": choice, "p50_us": us, "promise_us": us}
    network = {"network": case.rpartition(".")[0]}
    text = {"path": "full decoder=folded" if part == "base" else f"{us} {choice} decoder=folded"}
    text["base"] = "full decoder=folded"
    return synthetic.path_row(case, rung, (), part, **seen | network | text | changes)


STATIC = [(0, 100, 0.50), (1, 200, 0.60), (2, 400, 0.70)]


def static(recipe="continued", **changes):
    """Full paths of three networks, trained for as long as `sampled` ones."""
    return [row(f"segformer-b{size}-64.{recipe}", us, seen, seen, **changes) for size, us, seen in STATIC]


def sampled(first=(150, 0.56, 0.55)):
    """Paths of the largest network that stand in its table, and two of the other rung, which claims are not about."""
    found = [row(B2, *first, "proposed"), row(B2, 300, 0.62, 0.63, "single"), row(B2, 390, 0.69, 0.69)]
    return [*found, row(B2, 160, 0.9, 0.9, "single", "statistics"), row(B2, 395, 0.4, 0.4, "base", "statistics")]


def judged(tmp_path, rows, name, **claim):
    """The verdict on one claim, or None where the rows are of another case."""
    synthetic.write_csv(tmp_path / "paths.csv", "paths", rows)
    claim = {"id": name, "kind": "aim", "claim": "c", "relation": ">=", "expected": 1, "unit": "", **claim}
    pd.DataFrame([claim]).to_csv(tmp_path / "claims.csv", index=False)
    found = claims.table([tmp_path / "claims.csv", ROOT / _select.PAPER_LATENCY, tmp_path / "paths.csv"])
    return found.iloc[0] if len(found) else None


def answer(*given, **claim):
    """What was measured, and where."""
    found = judged(*given, **claim)
    return found["measured"], found["where"]


def test_a_front_is_chosen_on_one_split_and_seen_on_another():
    rows = pd.DataFrame({"p50_us": [30, 10, 20, 20, 25, 40], "choice": [0.4, 0.1, 0.3, 0.2, 0.25, 0.4]})
    found = table_paths.front(rows.assign(test=[3, 1, 2, 9, 9, 9]))
    assert dict(found) == {10: 1, 20: 2, 30: 3}
    assert table_paths.at(found, [9, 10, 29, 50]).tolist() == [0, 1, 2, 3]


def test_the_area_of_several_fronts_lies_below_all_of_them():
    one, other = pd.Series({10: 0.1, 20: 0.3, 50: 0.9}), pd.Series({15: 0.2})
    assert table_paths.area(one, slowest_us=40) == pytest.approx(10 * 0.1 + 20 * 0.3)
    assert table_paths.area(one, other, slowest_us=40) == pytest.approx(5 * 0.1 + 20 * 0.2)


def test_a_table_is_judged_where_it_is_least_above_static_networks(tmp_path):
    # Above by 5 points at 150, -5 at 200, 3 at 300, 9 at 390 and -1 at 400.
    assert answer(tmp_path, static() + sampled(), f"path_static:{B2}", expected=-1) == (-5, "at 200 µs")


def test_a_table_is_held_against_its_own_network_that_is_slower_when_published(tmp_path):
    rows = static() + sampled(first=(150, 0.61, 0.61))
    assert answer(tmp_path, rows, f"path_static:{B2}", expected=-1) == (-1, "at 400 µs")


def test_a_table_is_not_held_against_larger_networks(tmp_path):
    rows = [*static(), row("segformer-b0-64.sampled", 120, 0.52, 0.52)]
    assert answer(tmp_path, rows, "path_static:segformer-b0-64.sampled") == (2, "at 120 µs")


def test_paths_that_are_dominated_are_in_no_table(tmp_path):
    rows = [*static(), *sampled(), row(B2, 160, 0.9, 0.9, "single", dominated="x")]
    assert answer(tmp_path, rows, f"path_static:{B2}") == (-5, "at 200 µs")


@pytest.mark.parametrize(
    "changes",
    [
        *({"network": "segformer-b1-32"}, {"dtype": "float16"}, {"batch": 2}, {"data": "x"}),
        {"code": "other"},
    ],
)
def test_static_networks_are_alike(changes, tmp_path):
    case = f"{changes.get('network', 'segformer-b3-64')}.continued"
    other = row(case, 160, 0.9, 0.9, **changes)
    assert answer(tmp_path, [*static(), *sampled(), other], f"path_static:{B2}") == (-5, "at 200 µs")


@pytest.mark.parametrize(("slower", "found"), [(1, (-5, "at 200 µs")), (1.05, None)])
def test_codes_are_compared_where_full_paths_take_as_long(slower, found, tmp_path):
    """The full path of the table's own network is the one that both have: 390 us of this code, 400 or 420."""
    rows = [row(f"segformer-b{n}-64.continued", us * slower, *[seen] * 2, code="other") for n, us, seen in STATIC]
    judgement = judged(tmp_path, rows + sampled(), f"path_static:{B2}")
    if found is None:
        assert judgement["verdict"] == "not shown"
    else:
        assert (judgement["measured"], judgement["where"]) == found


@pytest.mark.parametrize(("slower", "found"), [(1, (-5, "at 200 µs")), (1.06, None)])
def test_codes_that_have_no_network_in_common_are_joined_by_a_third(slower, found, tmp_path):
    """Static networks of one code, without B2, the table of another one, and a B0 and a B2 of a third."""
    rows = [row(f"segformer-b{n}-64.continued", us, *[seen] * 2, code="y") for n, us, seen in STATIC if n < 2]
    third = [("segformer-b0-64.x", 100), ("segformer-b2-64.x", 390 * slower)]
    rows += [row(case, us, 0.1, 0.1, code="z") for case, us in third]
    judgement = judged(tmp_path, rows + sampled(), f"path_static:{B2}")
    if found is None:
        assert judgement["verdict"] == "not shown"
    else:
        assert (judgement["measured"], judgement["where"]) == found


@pytest.mark.parametrize("name", [f"path_static:{B2}", "path_between:64"])
def test_one_static_network_is_no_front(name, tmp_path):
    assert judged(tmp_path, static()[2:] + sampled(), name)["verdict"] == "not shown"


@pytest.mark.parametrize(
    "name", ["path_static:x.sampled", "path_between:128", "path_full:x.sampled", "path_folded:x.plain"]
)
def test_claims_about_networks_without_rows_are_left_out(name, tmp_path):
    assert judged(tmp_path, static() + sampled(), name) is None


@pytest.mark.parametrize(
    "name", [f"path_static:{B2}", "path_between:64", f"path_full:{B2}", f"path_saving:2/trained/{B2}"]
)
def test_trained_paths_are_not_held_against_networks_that_trained_for_less(name, tmp_path):
    rows = static("plain") + sampled()
    assert judged(tmp_path, rows, name)["verdict"] == "not shown"
    # Whatever they see, those that trained as long decide.
    alone, both = (judged(tmp_path, static() + more, name)["measured"] for more in (sampled(), rows))
    assert alone == both


def test_static_networks_that_were_trained_as_long_stand_beside_paths(tmp_path):
    longer = row("segformer-b1-64.continued", 200, 0.66, 0.66)
    rows = [*static("plain"), *sampled(), longer, row("segformer-b1-64.depthless", 200, 0.9, 0.9)]
    synthetic.write_csv(tmp_path / "paths.csv", "paths", rows)
    figure = figure_path_families.draw([tmp_path / "paths.csv"])
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert [text for text in shown if text.startswith("static")] == ["static B1"]


def test_each_table_has_a_front(tmp_path):
    rows = [*sampled(), *static("continued")]
    synthetic.write_csv(tmp_path / "paths.csv", "paths", rows)
    figure = figure_path_families.draw([tmp_path / "paths.csv"])
    (axes,) = figure.axes
    fronts = [line.get_xydata() for line in axes.lines]
    # Each ends at the time of the slowest path of all.
    own = [[0.15, 55], [0.3, 63], [0.39, 69]]
    assert any(len(front) == 4 and front == pytest.approx(np.array([*own, [0.4, 69]])) for front in fronts)
    assert "SegFormer-B2 with paths: mean IoU 69 % in" in figure.legends[0].get_title().get_text()


def test_between_static_networks_is_before_the_slowest(tmp_path):
    rows = [*static(), *sampled(), row(B2, 400, 0.9, 0.9, "single"), row(B2, 500, 0.99, 0.99, "single")]
    assert answer(tmp_path, rows, "path_between:64", relation=">") == (9, "at 390 µs")


def test_the_full_path_is_held_against_the_static_network_of_equal_training(tmp_path):
    rows = static() + sampled() + static("plain")
    assert answer(tmp_path, rows, f"path_full:{B2}", relation="<=") == (1, B2)
    assert judged(tmp_path, sampled(), f"path_full:{B2}")["verdict"] == "not shown"


def test_what_trained_paths_save_is_counted_below_the_static_network_of_equal_training(tmp_path):
    # The full path loses 1 point to it, the one that takes 300 of 390 us 7.
    rows = static() + sampled()
    for points, saved, where in (
        (0.5, 0, "no path"),
        (1.5, 0, "full decoder=folded"),
        (7.5, 23, "300 0.62 decoder=folded"),
    ):
        measured, at = answer(tmp_path, rows, f"path_saving:{points}/trained/{B2}")
        assert (round(measured), at) == (saved, where)
    # Any batch sees the same.
    eight = [
        row(f"{B2}-8", us, seen, seen, part, batch=8) for us, seen, part in ((390, 0.69, "base"), (300, 0.6, "single"))
    ]
    assert answer(tmp_path, static() + eight, f"path_saving:1.5/trained/{B2}-8") == (0, "full decoder=folded")


def test_the_folded_decoder_is_held_against_the_published_one(tmp_path):
    rows = [*sampled(), row(B2, 520, 0.69, 0.69, "alone", path="full decoder=published")]
    assert answer(tmp_path, rows, f"path_folded:{B2}") == (25, "full decoder=folded")
    assert judged(tmp_path, sampled(), f"path_folded:{B2}")["verdict"] == "not shown"


def test_what_is_saved_does_not_count_another_decoder(tmp_path):
    full = "full decoder=published"
    rows = [
        row(PLAIN, 400, 0.7, 0.7, path=full, base=full),
        row(PLAIN, 200, 0.7, 0.7, "alone", path="full decoder=folded"),
        row(PLAIN, 300, 0.67, 0.67, "single", path="some decoder=published", base=full),
        row(PLAIN, 240, 0.6, 0.6, "single", path="fewer decoder=published", base=full),
    ]
    for points, saved, where in ((1, 0, full), (4, 25, "some decoder=published"), (11, 40, "fewer decoder=published")):
        assert answer(tmp_path, rows, f"path_saving:{points}/trained/{PLAIN}") == (pytest.approx(saved), where)


def test_a_path_that_no_runner_picks_saves_nothing(tmp_path):
    rows = [
        row(PLAIN, 400, 0.7, 0.7),
        row(PLAIN, 200, 0.5, 0.69, "proposed", dominated="180 0.6", path="half decoder=folded"),
        row(PLAIN, 180, 0.6, 0.6, "proposed"),
        row(PLAIN, 300, 0.65, 0.69, "proposed", path="kept decoder=folded"),
    ]
    assert answer(tmp_path, rows, f"path_saving:2/trained/{PLAIN}") == (25, "kept decoder=folded")


def test_static_networks_are_chosen_by_the_test_scenes(tmp_path):
    # Scenes of choice rank the network of the middle below the smallest.
    rows = [*static(), *sampled()]
    rows[1] |= {"choice": 0.4}
    assert answer(tmp_path, rows, f"path_static:{B2}", expected=-1) == (-5, "at 200 µs")


def test_the_true_front_is_reached_as_far_as_proposals_lie_above_it(tmp_path):
    # The true front has an area of 10 * 0.1 + 10 * 0.3 + 10 * 0.4 = 8, of which proposals reach all but the first 1.
    rows = [
        row(B2, 40, 0.5, 0.5),
        row(B2, 10, 0.1, None, "every", promise_us=None, proposed="second 10"),
        row(B2, 20, 0.3, 0.3, "single", proposed="highs 20"),
        row(B2, 30, 0.4, None, "every", promise_us=None),
        row(B2, 30, 0.6, 0.6, "proposed", proposed="greedy 30", base="smaller decoder=folded"),
    ]
    assert answer(tmp_path, rows, f"path_true_front:{B2}") == (87.5, "trained")
    assert judged(tmp_path, rows[:1], f"path_true_front:{B2}") is None


def test_cases_whose_names_end_alike_are_judged_together(tmp_path):
    rows = [*static(), *sampled(), row("segformer-b0-64.sampled", 120, 0.52, 0.52)]
    assert answer(tmp_path, rows, "path_static:.sampled", expected=-1) == (-5, f"{B2} at 200 µs")
    assert judged(tmp_path, rows, "path_static:.sampled")["cases"] == 2


def test_a_joint_table_of_recorded_rows_is_the_best_at_each_budget():
    """And its page has the means: of static networks, of paths of one network, of all."""
    kept = {}
    with (ROOT / "expected/h200/paths.csv").open(newline="") as stream:
        for row in csv.DictReader(stream):
            if row["rung"] == "trained" and row["status"] == "ok" and row["promise_us"] and row["choice"]:
                stated = {name: row[name] for name in look_up.Entry.__struct_fields__ if row.get(name)}
                kept.setdefault(row["case"], []).append(msgspec.convert(stated, look_up.Entry, strict=False))
    full = re.compile(r"[1.]+ levels=1234 scale=1 decoder=folded")
    alone = [x for net in ("b0", "b1", "b2") for x in kept[f"segformer-{net}-512.continued"] if full.fullmatch(x.path)]
    tables = {"static B0, B1, B2": look_up.Table(alone, joint=True)}
    tables |= {
        f"paths of {n.upper()}": look_up.Table(kept[f"segformer-{n}-512.sampled"], least=0.3) for n in ("b0", "b2")
    }
    tables["all of them"] = look_up.Table([row for each in tables.values() for row in each.rows], joint=True)
    static = tables["static B0, B1, B2"].rows
    budgets = np.linspace(static[0].promise_us, 1.2 * static[-1].promise_us, 2000)
    seen = {name: np.array([table.select(budget).test for budget in budgets]) for name, table in tables.items()}
    best = seen["all of them"]
    # Also by the scenes of `test`, by which none is picked.
    assert all((best >= other).all() for other in seen.values())
    page = (ROOT / "docs/dynamic.md").read_text()
    for name, values in seen.items():
        assert f"| {name} | {values.mean():.1%} |".replace("%", " %") in page
