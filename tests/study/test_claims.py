"""Claims, verdicts and quoted tables: what recorded rows say is what is written, and a check of it can fail."""

import csv
import itertools
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from test_figures import ROOT

from helpers import synthetic
from helpers.files import run_script
from tilewright.core import registry
from tilewright.core.errors import ArtifactError, UnknownNameError
from tilewright_study import experiments, tables
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.experiments.attention import (
    table_policy,
    table_policy_summary,
    table_speedup,
)
from tilewright_study.experiments.networks import (
    table_end_to_end as end_to_end,
)
from tilewright_study.experiments.networks import (
    table_network_plans,
)
from tilewright_study.experiments.pruned import table_pruned
from tilewright_study.experiments.slices import table_slices
from tilewright_study.experiments.stream import table_stream
from tilewright_study.experiments.video import table_video
from tilewright_study.tables import _quoted, _read, _select, claims

MODEL = "vil-tiny-224-s1"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAPER = ROOT / _select.PAPER_LATENCY
PAPERS = [ROOT / path for path in _select.PAPERS]
LISTS = [ROOT / _select.CLAIMS, ROOT / "expected/aims.csv"]


def bench(path, *rows):
    """A bench file of rows ``(provider, p50_us, changes)``."""
    synthetic.write_csv(
        path,
        synthetic.BENCH,
        [synthetic.row(**{"model": MODEL, "provider": name, "p50_us": us} | more) for name, us, more in rows],
    )
    return path


def plan(us, **changes):
    return "tilewright", us, {"ordered": "True", **_read.HEADLINE, **changes}


def verdicts(tmp_path, rows, **claim):
    """The table of one claim, judged by the files `rows`."""
    claim = {"id": "x", "kind": "aim", "claim": "c", "relation": ">=", "expected": 1, "unit": "×", **claim}
    synthetic.write_csv(tmp_path / "claims.csv", ",".join(claim), [claim])
    return claims.table([tmp_path / "claims.csv", *PAPERS, *rows])


def judged(tmp_path, rows, **claim):
    """The verdict on one claim, judged by the files `rows`."""
    return verdicts(tmp_path, rows, **claim).iloc[0]


# What is recorded and what is written of it


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_quoted_tables_are_those_of_the_recorded_rows(path):
    text = path.read_text()
    assert _quoted.updated(text, ROOT) == text


def test_every_claim_is_of_a_known_measure_and_about_a_run_that_is_recorded_or_configured():
    (frame,) = _read.frames(LISTS, "claims")
    assert frame["id"].is_unique and frame["claim"].is_unique
    assert claims.table([*LISTS, *PAPERS]).empty
    found = []
    for device, folder in _quoted.FOLDERS.items():
        rows = [path for path in (ROOT / folder).glob("*.csv") if path.stem in _read.ROWS]
        aims = claims.table([LISTS[1], *PAPERS, *rows])
        found.append({*_quoted.judged(ROOT, device)["id"], *aims["id"]})
    # Networks that are to be trained and measured, and were not yet.
    configured = yaml.safe_load((ROOT / "config/h200.yaml").read_text())["paths"]["networks"]
    waiting = set(configured) - {row["case"] for row in recorded("paths")}
    waiting |= {name.rpartition(".")[0] for name in waiting}
    unrecorded = set(frame["id"]) - set.union(*found)
    # Experiments that no run has recorded yet.
    later = {name for name in experiments.NAMES if not recorded(name)}
    unrecorded = {name for name in unrecorded if name.partition("_")[0] not in later}
    assert {name.rpartition(":")[2].rpartition("/")[2] for name in unrecorded} <= waiting


def recorded(experiment):
    """The recorded rows of an experiment."""
    paths = sorted(ROOT.glob(f"expected/*/{experiment}.csv"))
    return [row for path in paths if path.parent.name != "paper" for row in csv.DictReader(path.open())]


def test_recorded_schedules_are_near_the_proven_optimum():
    rows = (row for row in recorded("attention") if row["status"] == "ok")
    gaps = [float(row["gap"]) for row in rows if row["solver"] not in ("", *_read.HEURISTICS)]
    assert len(gaps) > 0 and max(gaps) <= 0.01


def test_recorded_orders_took_little_memory():
    rows = [row for row in recorded("orders") if int(row["tokens"]) <= 300_000]
    assert rows and all(float(row["peak_rss_bytes"]) <= 6 * 2**30 for row in rows)


# Claims


@pytest.mark.parametrize(("us", "verdict"), [(20.0, "met"), (30.0, "met"), (40.0, "not met")])
def test_a_floor_is_missed_below_it(us, verdict, tmp_path):
    rows = [bench(tmp_path / "b.csv", ("sdpa_dense", 60.0, {}), plan(us))]
    row = judged(tmp_path, rows, id="over_peer:vil", expected=2)
    assert (row["verdict"], row["cases"], row["expects"]) == (verdict, 1, "at least 2 ×")


def test_a_ceiling_is_missed_above_it(tmp_path):
    rows = [bench(tmp_path / "b.csv", plan(10.0, predicted_us=12.0))]
    row = judged(tmp_path, rows, id="prediction_error:p90", relation="<=", expected=16, unit="%")
    assert (row["measured"], row["expects"], row["verdict"]) == (20, "at most 16 %", "not met")


@pytest.mark.parametrize(
    ("us", "rse", "relation", "verdict", "missed", "ties"),
    [
        (99.0, 0.0, ">=", "met", 0, 0),
        (102.0, 0.01, ">=", "met", 0, 1),
        (102.0, 0.001, ">=", "not met", 1, 0),
        # Faster is more than as fast.
        (102.0, 0.01, ">", "not met", 1, 0),
        # So much noise shows nothing.
        (120.0, 0.1, ">=", "not met", 1, 0),
    ],
)
def test_a_tie_is_no_miss_of_a_claim_to_be_as_fast(us, rse, relation, verdict, missed, ties, tmp_path):
    rows = [
        synthetic.network_row("vil-tiny-224", name, 1, p50_us=p50, rse=rse)
        for name, p50 in (("tilewright", us), ("native", 100.0))
    ]
    synthetic.write_csv(tmp_path / "n.csv", synthetic.NETWORK, rows)
    row = judged(tmp_path, [tmp_path / "n.csv"], id="end_to_end:vil", relation=relation)
    assert (row["verdict"], row["missed"], row["ties"]) == (verdict, missed, ties)
    assert row["measured"] == pytest.approx(100 / us, 1e-5)


def test_the_worst_case_named_is_a_miss_rather_than_a_tie(tmp_path):
    rows = []
    for batch, us, rse in ((1, 104.0, 0.05), (8, 102.0, 0.001)):
        rows += [synthetic.network_row("vil-tiny-224", "tilewright", batch, p50_us=us, rse=rse)]
        rows += [synthetic.network_row("vil-tiny-224", "native", batch, p50_us=100.0, rse=rse)]
    synthetic.write_csv(tmp_path / "n.csv", synthetic.NETWORK, rows)
    row = judged(tmp_path, [tmp_path / "n.csv"], id="end_to_end:vil")
    assert (row["where"], row["cases"], row["missed"], row["ties"]) == ("vil-tiny-224 batch 8 native", 2, 1, 1)


def test_modes_of_pruned_networks_are_judged_apart(tmp_path):
    rows = []
    for mode, us in (("graph", 90.0), ("eager", 110.0)):
        for strategy, p50 in (("ragged", us), ("padded", 100.0)):
            rows.append(synthetic.pruned_row("deit-tiny-224-evit", "", strategy, mode, 4, p50_us=p50, rse=0.001))
    synthetic.write_csv(tmp_path / "p.csv", synthetic.PRUNED, rows)
    found = {
        mode: verdicts(tmp_path, [tmp_path / "p.csv"], id=f"pruned_over:{mode}/padded")["verdict"].tolist()
        for mode in ("graph", "eager", "any", "compile")
    }
    assert found == {"graph": ["met"], "eager": ["not met"], "any": ["not met"], "compile": []}


def test_a_run_reports_the_claims_about_its_own_experiments(tmp_path):
    rows = [synthetic.network_row("vil-tiny-224", name, 1) for name in ("native", "tilewright")]
    synthetic.write_csv(tmp_path / "n.csv", synthetic.NETWORK, rows)
    bench(tmp_path / "b.csv", ("sdpa_dense", 60.0, {}), plan(10.0))
    listed = [ROOT / _select.CLAIMS, *PAPERS]
    networks = set(claims.table([*listed, tmp_path / "n.csv"])["id"])
    # Neither a network nor a way of running that was not asked for is among them.
    assert networks == {"paper_network:vil", "end_to_end:vil", "network_passed:"}
    both = claims.table([*listed, tmp_path / "b.csv", tmp_path / "n.csv"])
    assert set(both["id"]) > networks and set(both["device"]) == {synthetic.DEVICE["name"]}
    assert both["kind"].tolist() == sorted(both["kind"], key=list(claims.KINDS).index)


def test_a_claim_whose_rows_hold_no_value_is_not_measured(tmp_path):
    rows = [synthetic.network_row("vil-tiny-224", name, 1) for name in ("flex", "tilewright")]
    synthetic.write_csv(tmp_path / "n.csv", synthetic.NETWORK, rows)
    row = judged(tmp_path, [tmp_path / "n.csv"], id="end_to_end:vil")
    assert (row["verdict"], row["cases"]) == ("not shown", 0) and pd.isna(row["measured"])


def test_the_cold_form_is_claimed_only_where_it_is_timed(tmp_path):
    for cold, forms in (("", 1), (15.0, 2)):
        rows = [bench(tmp_path / "b.csv", ("sdpa_dense", 60.0, {"cold_us": 2 * cold}), plan(10.0, cold_us=cold))]
        assert judged(tmp_path, rows, id="over_peer:vil")["cases"] == forms


def test_a_claim_beside_a_paper_needs_its_values(tmp_path):
    rows = [bench(tmp_path / "b.csv", ("sdpa_dense", 60.0, {}), plan(10.0))]
    with pytest.raises(ArtifactError, match="expected a paper_latency file among the inputs"):
        claims.table([ROOT / _select.CLAIMS, *rows])


@pytest.mark.parametrize("changes", [{"relation": ">="}, {"expected": 1.2}])
def test_a_claim_against_alternatives_is_to_be_faster(changes, tmp_path):
    claim = {"id": "over_peer:vil", "kind": "alternatives", "relation": ">", **changes}
    with pytest.raises(ArtifactError, match="over_peer:vil: expected > 1 of a claim against alternatives"):
        judged(tmp_path, [], **claim)


@pytest.mark.parametrize(
    ("values", "verdict", "missed", "ties"),
    [
        ([1.5, 1.1], "faster", 0, 0),
        ([1.5, 1.01], "tie", 0, 1),
        ([0.99, 0.98], "tie", 0, 2),
        ([1.5, 0.99, 0.9], "mixed", 1, 1),
        ([0.9, 0.5], "slower", 2, 0),
        # Noise excuses no more than 5 %.
        ([0.94], "slower", 1, 0),
    ],
)
def test_alternatives_are_faster_slower_or_as_fast(values, verdict, missed, ties):
    claim = SimpleNamespace(expected=1, relation=">", kind="alternatives")
    noise = 0.1 if values == [0.94] else 0.03
    found = claims._judged(claim, pd.DataFrame({"value": values, "noise": noise}, index=[*"abc"][: len(values)]))
    assert (found["verdict"], found["missed"], found["ties"]) == (verdict, missed, ties)
    assert (found["measured"], found["best"]) == (min(values), max(values))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "mixed: 0.46 to 12.3 ×, slower in 2 of 1,200"),
        ({"verdict": "slower", "missed": 1200}, "slower: 0.46 to 12.3 ×"),
        ({"kind": "beyond", "verdict": "does not hold"}, "does not hold: 0.46 to 12.3 ×, not in 2 of 1,200"),
        ({"measured": 123.4, "best": 123.4, "unit": "", "missed": 0}, "mixed: 123"),
        ({"verdict": "not shown"}, "not shown"),
    ],
)
def test_what_was_found_of_a_claim_is_said_in_a_cell(changes, said):
    row = {"kind": "alternatives", "verdict": "mixed", "measured": 0.4567, "best": 12.345, "unit": "×"}
    assert claims.found({**row, "missed": 2, "cases": 1200, **changes}) == said


def test_a_claim_of_zero_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="expected values other than 0"):
        judged(tmp_path, [], id="over_peer:vil", expected=0)


def test_a_claim_about_the_ilp_is_measured(tmp_path):
    fixed = {"solver": "greedy", "tiles": "64x1", "rse": 0.001}
    rows = [
        bench(tmp_path / "b.csv", plan(100.0, rse=0.001), plan(95.0, **fixed), plan(97.0, **fixed | {"tiles": "8x1"}))
    ]
    # No schedule of descent ran.
    for case, said in (("fixed/median", ["not met"]), ("fixed/each", ["not met"]), ("descent/each", [])):
        assert verdicts(tmp_path, rows, id=f"policy_over:{case}")["verdict"].tolist() == said
    (row,) = table_policy.table([*rows, PAPER]).to_dict("records")
    assert (row["fixed"], row["fixed_us"], row["verdict_fixed"]) == ("64x1", 95.0, "slower")
    summary = table_policy_summary.table([*rows, PAPER]).set_index("rival").loc["the best fixed tile"]
    assert summary["worst"] == pytest.approx(1 - 100 / 95) and summary["slower"] == 1
    # Torch's own attention, which a schedule may run, says nothing of its tiles.
    own = plan(10.0, rse=0.001, variant="torch:masked")
    rows = [bench(tmp_path / "t.csv", own, plan(95.0, **fixed))]
    assert table_policy.table([*rows, PAPER]).empty


# Dense attention, peers and the headline


def test_dense_is_the_fastest_row_over_all_pairs(tmp_path):
    path = bench(
        tmp_path / "b.csv", ("sdpa_dense", 36.0, {}), ("sdpa_flash", 23.0, {}), ("sdpa_mask", 9.0, {}), plan(10.0)
    )
    rows = _read.bench(_read.frames([path], "attention")[0])
    assert set(rows["dense"]) == {"sdpa_flash"} and set(rows["dense_us"]) == {23}
    failed = ("sdpa_flash", 23.0, {"status": "failed"})
    rows = _read.bench(_read.frames([bench(path, ("sdpa_dense", 36.0, {}), failed)], "attention")[0])
    assert set(rows["dense"]) == {"sdpa_dense"}
    # Another batch is another workload.
    other = ("sdpa_flash", 1.0, {"batch": 8})
    rows = _read.bench(_read.frames([bench(path, ("sdpa_dense", 36.0, {}), other, plan(10.0))], "attention")[0])
    assert rows.set_index("provider").loc["tilewright", "dense_us"] == 36


def test_dense_names_the_baselines_that_are_dense():
    members = {
        n: registry.member("tilewright_study.baselines.sparse", "baseline", n, sparse_baselines.NAMES)
        for n in sparse_baselines.NAMES
    }
    assert set(sparse_baselines.DENSE) == {
        name for name, member in members.items() if member.DENSE and not member.MASKED
    }


def test_each_form_compares_like_with_like(tmp_path):
    flex = {"reorder": "window", "variant": "64"}
    path = bench(
        tmp_path / "b.csv",
        ("sdpa_dense", 60.0, {"reorder": "none", "cold_us": 66.0}),
        ("flex", 40.0, {"reorder": "none", "ordered": "True", "cold_us": 44.0}),
        ("flex", 20.0, {**flex, "ordered": "True", "cold_us": 30.0}),
        ("flex", 26.0, {**flex, "ordered": "False", "cold_us": 36.0}),
        ("sdpa_compacted", 2.0, {"reorder": "none"}),
        plan(10.0, cold_us=15.0),
        plan(12.0, ordered="False", cold_us=18.0),
        plan(9.0, tiles="64x1", solver="greedy"),
        plan(1.0, status="failed", reorder="ic"),
    )
    (row,) = table_speedup.table([path, PAPER]).to_dict("records")
    assert (row["plan"], row["plan_us"], row["over_peer"], row["peer"]) == (
        "window + highs (mixed)",
        10,
        2,
        "flex (window, 64)",
    )
    assert (row["plan_us_natural"], row["over_peer_natural"]) == (12, pytest.approx(26 / 12))
    assert row["peer_natural"] == "flex (window, 64, permuted inside)"
    assert (row["plan_us_cold"], row["over_peer_cold"], row["speedup_cold"]) == (15, 2, pytest.approx(66 / 15))
    assert (row["best"], row["best_us"], row["plans"]) == ("window + greedy (64x1)", 9, 2)
    assert (row["flex"], row["flex_natural"], row["inference_us"]) == (3, pytest.approx(60 / 26), 2)


def test_a_peer_is_compared_with_what_the_plan_took_in_turns_with_it(tmp_path):
    # In the minute of the peers everything took twice as long.
    path = bench(
        tmp_path / "b.csv",
        ("flex", 30.0, {"reorder": "window", "ordered": "True", "plan_us": 20.0, "plan_rse": 0.03, "rse": 0.04}),
        ("sdpa_mask", 28.0, {"reorder": "none", "ordered": "True"}),
        plan(10.0, rse=0.0),
        plan(12.0, ordered="False", rse=0.0),
    )
    (row,) = table_speedup.table([path, PAPER]).to_dict("records")
    assert (row["peer"], row["peer_us"], row["over_peer"]) == ("flex (window)", 15, 1.5)
    assert row["noise_peer"] == pytest.approx(2 * 1.5 * 0.05)
    assert (row["peer_natural"], row["over_peer_natural"]) == ("flex (window)", 15 / 12)


def test_a_peer_without_a_row_in_natural_order_counts_there_in_its_favour(tmp_path):
    path = bench(
        tmp_path / "b.csv", ("flex", 20.0, {"reorder": "window"}), ("sdpa_dense", 60.0, {}), plan(5.0, ordered="False")
    )
    (row,) = table_speedup.table([path, PAPER]).to_dict("records")
    assert (row["peer_natural"], row["over_peer_natural"]) == ("flex (window)", 4)


def test_dynamicvits_layers_are_labelled():
    assert _select.case("dynamicvit-s-224") == "training mask" and _select.case(MODEL) == ""


# Noise


def test_networks_name_the_fastest_peer_and_ties(tmp_path):
    rows = [
        synthetic.network_row("vil-tiny-224", name, 1, p50_us=us, rse=0.01)
        for name, us in (("native", 120.0), ("dense", 101.0), ("tilewright", 100.0))
    ]
    synthetic.write_csv(tmp_path / "n.csv", synthetic.NETWORK, rows)
    row = end_to_end.table([tmp_path / "n.csv"]).set_index("attention").loc["tilewright"]
    assert (row["peer"], row["over_peer"], row["verdict"]) == ("dense", 1.01, "tie")


def test_pruned_networks_name_ties_and_what_was_compared(tmp_path):
    rows = [
        synthetic.pruned_row("deit-tiny-224-evit", "", name, "graph", 1, p50_us=us)
        for name, us in (("padded", 150.0), ("gathered", 101.0), ("ragged", 100.0))
    ]
    synthetic.write_csv(tmp_path / "p.csv", synthetic.PRUNED, rows)
    row = table_pruned.table([tmp_path / "p.csv"]).set_index("batching").loc["ragged"]
    assert (row["fair"], row["ties"], row["compared"]) == ("gathered", "dense, fair", 15 / 16)


def test_unknown_noise_excuses_nothing():
    ratio, noise = pd.Series([0.999, 1.0, float("nan")]), pd.Series([float("nan")] * 3)
    assert _read.verdict(ratio, noise).tolist() == ["slower", "tie", ""]


# Quoted tables


@pytest.fixture
def root(tmp_path):
    """A checkout with one recorded run."""
    (tmp_path / "expected").mkdir()
    for name in ("claims.csv", "paper"):
        (tmp_path / "expected" / name).symlink_to(ROOT / "expected" / name)
    folder = tmp_path / _quoted.FOLDERS["cpu"]
    bench(folder / "attention.csv", ("sdpa_dense", 60.0, {}), plan(10.0), plan(12.0, ordered="False"))
    rows = [synthetic.network_row("vil-tiny-224", name, 1) for name in ("native", "tilewright", "flex")]
    synthetic.write_csv(folder / "networks.csv", synthetic.NETWORK, rows)
    return tmp_path


def test_a_table_that_disagrees_with_the_rows_is_set_anew(root):
    text = "a\n<!-- table: cpu-speedup -->\n| old |\n<!-- end -->\nb\n<!-- table: cpu-networks -->\n<!-- end -->\n"
    made = _quoted.updated(text, root)
    assert made.startswith("a\n<!-- table: cpu-speedup -->\n\n| workload |") and "| old |" not in made
    assert "| vil-tiny-224-s1 | 10.0 | 60.0 (sdpa_dense) | 6.00 | 5.00 |" in made and "<!-- end -->\nb\n" in made
    assert "| vil-tiny-224 | 1 | 50.0 (45.0–55.0) | skipped | 30.0 (27.0–33.0) | as published | 1.67 | faster |" in made
    assert _quoted.updated(made, root) == made


def test_published_kernels_stand_above_what_was_recorded_of_the_same_batch(root):
    rows = [
        synthetic.ragged_row(heads, 64, lengths, 64, name, us, latency_us=2 * us)
        for heads, lengths in ((12, "98-98"), (12, "50-197"), (6, "98-98"))
        for name, us in (("tilewright", 10.0 * heads / 12), ("flash_varlen", 15.0))
    ]
    synthetic.write_csv(root / _quoted.FOLDERS["h200"] / "ragged.csv", synthetic.RAGGED, rows)
    lines = _quoted.quoted("h200-published-kernel", root).splitlines()
    at = lines.index("| 64 | 50 % | H200, its own time |  | 15.0 | 10.0 | 1.50 |")
    assert lines[at - 1] == "| 64 | 50 % | RTX 4000 Ada, published (v2) | 3,839 | 72.0 | 80.0 | 0.90 |"
    assert lines[at + 1] == "| 64 | 50 % | H200, until the result |  | 30.0 | 20.0 | 1.50 |"
    assert sum("H200" in line for line in lines) == 2 and len(lines) == 2 + 16 + 2


def test_what_was_found_on_each_device_stands_side_by_side(root, monkeypatch):
    monkeypatch.setattr(_quoted, "FOLDERS", {"cpu": _quoted.FOLDERS["cpu"]})
    lines = _quoted.quoted("results-alternatives", root).splitlines()
    assert lines[0] == "| claim | 2 CPU cores |" and len(lines) == 2 + 2
    line = next(line for line in lines if "One layer of Vision Longformer" in line)
    assert line.endswith("| faster: 5 to 6 × |")


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("<!-- table: cpu-pie -->\n<!-- end -->\n", UnknownNameError, "unknown quoted table 'cpu-pie'; known: cpu-"),
        ("<!-- table: cpu-speedup -->\n| a |\n", ArtifactError, "table cpu-speedup: expected <!-- end --> after it"),
        (
            "<!-- table: h200-speedup -->\n<!-- end -->\n",
            ArtifactError,
            "expected recorded rows of attention, found none",
        ),
    ],
)
def test_a_mark_that_cannot_be_filled_is_refused(text, error, said, root):
    with pytest.raises(error, match=said):
        _quoted.updated(text, root)


def test_a_pattern_that_no_table_shows_is_an_error(root):
    (root / _quoted.FOLDERS["h200"]).symlink_to(root / _quoted.FOLDERS["cpu"])
    with pytest.raises(ArtifactError, match="vil-medium-wide-512-s2-exact"):
        _quoted.quoted("h200-patterns", root)


@pytest.mark.parametrize(
    ("value", "low", "high"), [(1.065, "1.06", "1.07"), (1.07, "1.07", "1.07"), (12.5, "12.50", "12.50")]
)
def test_least_values_are_rounded_down_and_greatest_up(value, low, high):
    assert (_quoted.at_least(value, 2), _quoted.at_most(value, 2)) == (low, high)


def test_the_command_sets_documents_anew_and_prints_tables(root):
    script = root / "workflow/scripts/quote.py"
    script.parent.mkdir(parents=True)
    script.write_text((ROOT / "workflow/scripts/quote.py").read_text())
    document = root / "README.md"
    document.write_text("<!-- table: cpu-speedup -->\n<!-- end -->\n")
    done = run_script(script, document, "--table", "cpu-policy-summary")
    assert done.returncode == 0 and done.stdout.startswith("| against |")
    assert "| vil-tiny-224-s1 | 10.0 |" in document.read_text()


def test_one_command_judges_all_recorded_rows(root):
    outputs = [root / "made.csv"]
    folder = root / _quoted.FOLDERS["cpu"]
    tables.tabulate("claims", [root / _select.CLAIMS, root / "expected/paper", folder], outputs)
    assert outputs[0].read_text() == _quoted.judged(root, "cpu").to_csv(index=False, lineterminator="\n")


def configured(tmp_path, *rows):
    """Rows of configured streams, by the engine and what they change."""
    made = [
        synthetic.configure_row(f"identity-16x16.{engine}", component, **changes) for engine, component, changes in rows
    ]
    synthetic.write_csv(tmp_path / "configure.csv", "configure", made)
    return [tmp_path / "configure.csv"]


def test_configured_streams_are_judged_whole(tmp_path):
    slow = ("bmc", "agg", {"seconds": 99.0})
    rows = configured(tmp_path, ("fit", "", {}), ("bmc", "", {}), slow, ("bmc", "", {"part": "agg", "extents": 320}))
    seconds = {"relation": "<=", "expected": 1, "unit": "s"}
    fit = judged(tmp_path, rows, id="configure_seconds:fit", **seconds)
    assert (fit.verdict, fit.measured, fit.cases) == ("met", 0.01, 1)
    bmc = judged(tmp_path, rows, id="configure_seconds:bmc", **seconds)
    assert (bmc.verdict, bmc.measured, bmc.cases) == ("not met", 2.0, 2)
    exact = judged(tmp_path, rows, id="configure_exact", kind="correctness", relation="=", expected=100)
    assert (exact.verdict, exact["where"]) == ("passed", "3 streams")
    whole = {"id": "configure_layer:extents/identity-16x16/agg", "relation": "="}
    assert judged(tmp_path, rows, **whole, expected=320).verdict == "met"
    assert judged(tmp_path, rows, **whole, expected=640).verdict == "not met"


@pytest.mark.parametrize(
    "changes",
    [
        {"rtl_cycles": 390},
        {"rtl_cycles": None, "rtl": "not run: RTL: expected the C++ compiler g++"},
        {"status": "failed", "reason": "unknown", "model_cycles": None, "rtl_cycles": None},
    ],
)
def test_a_stream_that_was_not_run_to_its_end_is_not_exact(tmp_path, changes):
    rows = configured(tmp_path, ("fit", "", {}), ("bmc", "", changes))
    found = judged(tmp_path, rows, id="configure_exact", kind="correctness", relation="=", expected=100)
    assert (found.verdict, found.measured) == ("failed", 50)


def test_programs_on_push_memories_are_judged(tmp_path):
    rows = [synthetic.push_row("gaussian-64", "pub"), synthetic.push_row("harris-64", "pub", tiles=6, wrong_rtl=2)]
    live = {"app": "harris-64", "memory": "pub", "part": "live", "status": "ok", "cycle": 0, "live": 1}
    synthetic.write_csv(tmp_path / "push.csv", "push", [*rows, live | {"device": rows[0]["device"]}])
    claim = {"relation": "<=", "unit": "", "rows": [tmp_path / "push.csv"], "tmp_path": tmp_path}
    # Five were published.
    tiles = judged(id="push_tiles:", **claim)
    assert (tiles.verdict, tiles.measured, tiles["where"], tiles.missed) == ("not met", 1.2, "harris-64 pub", 1)
    exact = judged(id="push_exact", expected=100, kind="correctness", **claim | {"relation": "="})
    assert (exact.verdict, exact.measured, exact["where"]) == ("failed", 50, "harris-64 pub")


@pytest.mark.parametrize(
    ("changes", "verdict"), [({}, "passed"), ({"queries": 1}, "failed"), ({"rtl_wrong": None}, "failed")]
)
def test_attention_on_push_memories_is_exact_in_rtl_too(changes, verdict, tmp_path):
    rows = [synthetic.push_attention_row("vil-tiny-224-s1", **changes)]
    synthetic.write_csv(tmp_path / "push.csv", "push_attention", rows)
    claim = {"id": "push_attention_exact", "kind": "correctness", "relation": "=", "expected": 100}
    assert judged(tmp_path, [tmp_path / "push.csv"], **claim).verdict == verdict


# No row that was measured is left out of a comparison


def networks_file(path, *rows):
    """A file of networks of rows ``(attention, compiled, p50_us, gpu_us)``, and a batch other than 1."""
    made = [
        synthetic.network_row(
            "vil-tiny-224", name, *batch or [1], p50_us=us, gpu_us=gpu_us, rse=0.001, compiled=compiled, status="ok"
        )
        for name, compiled, us, gpu_us, *batch in rows
    ]
    synthetic.write_csv(path, synthetic.NETWORK, made)
    return path


OURS = [("tilewright", False, 100.0, 50.0), ("tilewright", True, 90.0, 40.0)]
SLOWER = [(name, False, 300.0, 200.0) for name in ("native", "dense", "flex", "full")]


def test_a_faster_row_of_any_attention_in_any_form_decides_about_networks(tmp_path):
    names, times = ("native", "dense", "flex", "full", "anew"), ((60.0, 45.0), (95.0, 20.0))
    # Each is a batch of its own.
    cases, rows = [*itertools.product(names, (False, True), times)], []
    for batch, (name, compiled, faster) in enumerate(cases, 1):
        others = [row for row in SLOWER if compiled or row[0] != name]
        rows += [(*row, batch) for row in (*OURS, *others, (name, compiled, *faster))]
    found = end_to_end.table([networks_file(tmp_path / "n.csv", *rows)])
    found = found[found["attention"] == "tilewright"].set_index("batch")
    for batch, (name, compiled, (us, gpu_us)) in enumerate(cases, 1):
        # Ours counts compiled only against what was compiled as well.
        row, (ours_us, ours_gpu_us) = found.loc[batch], OURS[compiled][2:]
        assert (row["over_peer"], row["over_peer_graph"]) == (us / ours_us, gpu_us / ours_gpu_us), (name, compiled)
        assert row["verdict"] == ("faster" if us > ours_us else "slower")
        assert row["verdict_graph"] == ("faster" if gpu_us > ours_gpu_us else "slower")
        assert (row["peer"], row["peer_form"]) == (name, "compiled" if compiled else "")
    # A claim asks the table alone.
    path = networks_file(tmp_path / "n.csv", *OURS, *SLOWER, ("anew", True, 95.0, 20.0))
    assert judged(tmp_path, [path], id="end_to_end_graph:vil")["verdict"] == "not met"


def test_what_was_not_compiled_is_not_held_against_ours_that_was(tmp_path):
    path = networks_file(tmp_path / "n.csv", *OURS, ("flex", False, 95.0, 45.0))
    row = end_to_end.table([path]).set_index("attention").loc["tilewright"]
    assert (row["over_flex"], row["over_flex_graph"], row["best_us"]) == (0.95, 0.9, 90.0)


def test_a_faster_row_of_any_provider_decides_about_layers(tmp_path):
    ways = {"reorder": "none"}, {"reorder": "window"}, {"reorder": "window", "ordered": "False"}
    cases, rows = [*itertools.product((*sparse_baselines.NAMES, "anew"), ways)], []
    faster = {"cold_us": 6.0, "rse": 0.001}
    for size, (name, how) in enumerate(cases, 224):
        few = [("sdpa_dense", 60.0, {}), plan(10.0, cold_us=12.0), plan(11.0, ordered="False")]
        few.append((name, 5.0, {"ordered": "True", **faster, **how}))
        # Each is a workload of its own.
        rows += [(name, us, {"model": f"vil-tiny-{size}-s1", **more}) for name, us, more in few]
    found = table_speedup.table([bench(tmp_path / "b.csv", *rows), PAPER]).set_index("resolution")
    for size, (name, _) in enumerate(cases, 224):
        row = found.loc[size]
        times = [row[f"over_peer{suffix}"] for suffix in table_speedup.FORMS]
        if name == _select.INFERENCE:
            # It computes something else, and has a column of its own.
            assert min(times) > 1 and row["inference_us"] == 5.0
        else:
            assert times == [0.5, pytest.approx(5 / 11), 0.5], cases[size - 224]


def test_a_faster_batching_in_any_form_that_is_called_alike_decides(tmp_path):
    names = ("padded", "padded_unfused", "padded_kept", "gathered", "varlen")
    # Each is a batch of its own.
    cases, made = [*itertools.product(names, ("eager", "compile", "graph", "compile_graph"))], []
    for batch, (name, mode) in enumerate(cases, 1):
        ours = "graph" if "graph" in mode else "eager"
        rows = [("ragged", ours, 100.0), ("padded", ours, 300.0), ("gathered", ours, 300.0), (name, mode, 50.0)]
        more = {"rse": 0.001, "status": "ok"}
        made += [synthetic.pruned_row("deit-tiny-224-evit", "", *who, batch, p50_us=us, **more) for *who, us in rows]
    synthetic.write_csv(tmp_path / "p.csv", synthetic.PRUNED, made)
    found = table_pruned.table([tmp_path / "p.csv"])
    found = found[found["batching"] == "ragged"].set_index("batch")
    for batch, (name, mode) in enumerate(cases, 1):
        assert (found.loc[batch, "fair"], found.loc[batch, "over_fair"]) == (name, 0.5), mode


def test_a_faster_provider_of_packed_attention_decides(tmp_path):
    rows = [synthetic.ragged_row(12, 64, "98-98", 4, name, us) for name, us in (("tilewright", 10.0), ("anew", 5.0))]
    synthetic.write_csv(tmp_path / "r.csv", synthetic.RAGGED, rows)
    row = judged(tmp_path, [tmp_path / "r.csv"], id="ragged_over:peer/1-256")
    assert (row["verdict"], row["measured"]) == ("not met", 0.5)


def test_lists_are_held_against_the_fastest_dense_call_of_their_case(tmp_path):
    lists = synthetic.slices_lists("128x1", "oracle", 0.3, 0.9, keep=0.3)
    dense = [
        synthetic.slices_row("2x64-4x4x4", "hilbert", "sdpa_cudnn", us) | {"sparsity": at}
        for us, at in ((120, 0.7), (80, 0.9))
    ]
    rows = [*dense, synthetic.slices_row("2x64-4x4x4", "hilbert", "tilewright", 40.0, **lists) | {"sparsity": 0.7}]
    synthetic.write_csv(tmp_path / "s.csv", "slices", rows)
    assert table_slices.table([tmp_path / "s.csv"])["speedup"].iloc[-1] == 2


@pytest.mark.parametrize("group", ["128x1", "128x64"])
def test_faster_lists_of_equal_recall_decide(group, tmp_path):
    def lists(name, group, us):
        return synthetic.slices_row(
            "2x64-4x4x4", "hilbert", name, us, target=0.95, **synthetic.slices_lists(group, "oracle", 0.3, 0.95)
        )

    synthetic.write_csv(tmp_path / "r.csv", "recall", [lists("tilewright", "128x1", 10.0), lists("anew", group, 5.0)])
    row = judged(tmp_path, [tmp_path / "r.csv"], id="recall_over:")
    assert (row["verdict"], row["measured"]) == ("not met", 0.5)


def test_a_dense_pass_in_any_mode_decides_about_video(tmp_path):
    known = [("dense", "compile", 50.0), ("dense", "eager", 300.0), ("slices", "eager", 100.0)]
    rows = [synthetic.video_row("wan", by, SimpleNamespace(by=by, every=1), us, mode=mode) for by, mode, us in known]
    synthetic.write_csv(tmp_path / "v.csv", "video", rows)
    assert table_video.table([tmp_path / "v.csv"])["speedup"].iloc[-1] == 0.5


def test_times_of_graphs_are_never_held_against_times_of_calls(tmp_path):
    rows = [
        synthetic.network_row("vil-tiny-224", "tilewright", 1, p50_us=100.0, gpu_us=10.0, reorder=order)
        for order in ("", "none")
    ]
    rows.append(synthetic.network_row("vil-tiny-224", "native", 1, p50_us=50.0))
    synthetic.write_csv(tmp_path / "n.csv", synthetic.NETWORK, rows)
    assert table_network_plans.table([tmp_path / "n.csv"])["over_native"].tolist() == [0.5, 0.5]


# The paper's networks


def test_the_papers_speedups_are_judged_by_whole_networks_with_attention_to_all_pairs(tmp_path):
    """2.99 times was published; one over masked SDPA that is as much may be less over the plain one."""
    claim = {"id": "paper_network:vil", "kind": "paper"}
    for full, dense, said in (
        (299.0, 999.0, ("reproduced", 1)), (200.0, 999.0, ("not reproduced", 2 / 2.99)),
        (None, 200.0, ("not reproduced", 2 / 2.99)), (None, 999.0, ("not shown", None)),
        (None, None, ("not shown", None)),
    ):  # fmt: skip
        known = [(name, us) for name, us in (("tilewright", 100.0), ("full", full), ("dense", dense)) if us]
        path = networks_file(tmp_path / "n.csv", *((name, False, us, us) for name, us in known))
        row = judged(tmp_path, [path], **claim)
        assert row["verdict"] == said[0] and (said[1] is None or row["measured"] == pytest.approx(said[1], 1e-2))
    # The better of both ways decides: called it takes as long, as a graph not.
    ours = ("tilewright", False, 100.0, 50.0)
    row = judged(tmp_path, [networks_file(tmp_path / "n.csv", ours, ("full", False, 100.0, 200.0))], **claim)
    assert (row["verdict"], row["where"]) == ("reproduced", "vil-tiny-224: 4.00 of 2.99 ×")
    # What is not known of one way is not refuted by the other one.
    rows = [ours, ("full", False, 100.0, None), ("dense", False, 100.0, 400.0)]
    assert judged(tmp_path, [networks_file(tmp_path / "n.csv", *rows)], **claim)["verdict"] == "not shown"


def test_the_papers_heat_map_is_judged_cell_by_cell(tmp_path):
    cells = [
        {"resolution": 224, "patch": patch, "status": status, "speedup": speedup, "reason": ""}
        for patch, status, speedup in ((64, "ok", 2.7), (32, "ok", 1.45), (128, "skipped", None))
    ]
    synthetic.write_csv(tmp_path / "h.csv", "heatmap", cells)
    row = judged(tmp_path, [tmp_path / "h.csv"], id="heatmap_over_paper:", kind="paper")
    assert (row["verdict"], row["measured"], row["cases"]) == ("not reproduced", 0.5, 2)
    assert row["where"] == "224 px, patch 32"


def test_what_an_order_gains_is_the_median_of_workloads(tmp_path):
    rows = [
        bench(tmp_path / "b.csv", plan(100.0), plan(150.0, reorder="none"), plan(90.0, reorder="none", tiles="8x1"))
    ]
    row = judged(tmp_path, rows, id="order_over:none", relation=">", kind="paper")
    assert (row["verdict"], row["measured"], row["where"]) == ("reproduced", 1.5, "median of 1")


def test_what_the_program_saves_is_a_share_of_the_rivals_time(tmp_path):
    for greedy, said in ((200.0, ("reproduced", 50)), (150.0, ("not reproduced", 33.3333))):
        rows = [bench(tmp_path / "b.csv", plan(100.0), plan(greedy, solver="greedy"))]
        row = judged(tmp_path, rows, id="policy_saved:greedy", kind="paper", expected=45, unit="%")
        assert (row["verdict"], row["measured"]) == said


# Claims that can fail


def test_a_median_is_more_than_one_only_beyond_noise(tmp_path):
    fixed = {"solver": "greedy", "tiles": "64x1"}
    for us, said in ((100.5, "not met"), (110.0, "met")):
        rows = [bench(tmp_path / "b.csv", plan(100.0, rse=0.005), plan(us, rse=0.005, **fixed))]
        row = judged(tmp_path, rows, id="policy_over:fixed/median", relation=">")
        assert (row["verdict"], row["measured"]) == (said, us / 100)


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({}, 100),
        ({"status": "failed"}, 50),
        ({"relative_error": 2e-5, "tolerance": 1.5e-5}, 50),
        ({"status": "skipped"}, 100),
    ],
)
def test_a_row_that_was_wrong_fails_the_claim_whatever_its_status(changes, measured, tmp_path):
    path = bench(tmp_path / "b.csv", plan(10.0), plan(10.0, **changes))
    row = judged(tmp_path, [path], id="bench_passed:", kind="correctness", expected=100)
    assert (row["measured"], row["verdict"]) == (measured, "passed" if measured == 100 else "failed")


def stream_rows(tmp_path, case="segformer-b0-64.sampled", trained="continued", switch_us=(3.0, 4.0, 5.0), **seen):
    """The table of a stream: mean IoU of contenders where late frames count 0."""
    known = {"case": case, "network": "segformer-b0-64", "trace": "uniform", "status": "ok"}
    rows = [
        known | {"part": "frames", "contender": name, "frames": 9, "mean_miou": 0.6, "timely_miou": miou}
        for name, miou in seen.items()
    ]
    frame = {"part": "frames", "contender": "static", "frame": 0, "path": f"segformer-b1-64.{trained}"}
    rows += [known | frame, *(known | {"part": "switching", "measured_us": us} for us in switch_us)]
    synthetic.write_csv(tmp_path / "s.csv", "stream", rows)
    return table_stream.table([tmp_path / "s.csv"]).set_index("contender")


def test_numbers_that_cannot_be_are_blank(tmp_path):
    seen = {"oracle": 0.5, "closed": 0.4, "target": 0.502, "full": 0.6, "static": 0.7}
    found = stream_rows(tmp_path, **seen)
    # The oracle chooses by the table, not by the frame, and bounds no other network.
    assert found["oracle_share"].fillna(-1).to_dict() == {
        "oracle": 1,
        "closed": 0.8,
        "target": 1,
        "full": -1,
        "static": -1,
    }
    assert set(found["switch_us"]) == {4.0}
    assert stream_rows(tmp_path, switch_us=(-9934.0, 1.0, -2.0), **seen)["switch_us"].isna().all()


@pytest.mark.parametrize(("trained", "case", "equal"), [
    ("continued", "segformer-b0-64.sampled", True), ("plain", "segformer-b0-64.sampled", False),
    ("plain", "segformer-b0-64.plain", True),
])  # fmt: skip
def test_streams_are_held_against_static_networks_of_equal_training(trained, case, equal, tmp_path):
    found = stream_rows(tmp_path, case, trained, **{"closed": 0.5, "static": 0.5})
    assert found["over_static"].notna().all() == equal
