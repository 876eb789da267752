"""Execution paths in the study: sections, tables and figures of made-up rows, and a network that is really trained."""

import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pandas as pd
import pytest

from helpers import synthetic
from helpers.cases import rest_slow
from helpers.checkout import ALL, ROOT, merged
from tilewright import networks
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.networks import segformer
from tilewright.networks.path import Path
from tilewright.paths import table as look_up
from tilewright_study import config, experiments, figures
from tilewright_study.experiments import paths as of_paths
from tilewright_study.experiments.paths import run as _paths
from tilewright_study.experiments.paths import table_path_layers, table_paths
from tilewright_study.experiments.stream import run as _stream
from tilewright_study.experiments.stream import table_stream
from tilewright_study.measure import effort
from tilewright_study.planning import block_sets, latency, layers
from tilewright_study.stages import path_pictures, plan_paths
from tilewright_study.tables import claims

CASE = "segformer-b0-64.plain"


def configured(network="segformer-b0-64", checkpoint=None, name=CASE, static=(), **changes):
    mapping = merged(ALL)
    mapping["experiments"] = ["paths", "stream"]
    stated = {"networks": {name: {"network": network, "checkpoint": checkpoint}}}
    mapping["paths"] |= stated | {"rungs": ["trained", "statistics"]} | changes
    mapping["stream"]["networks"] = [name]
    if static:
        contenders = [*mapping["stream"]["contenders"], "static"]
        mapping["stream"] |= {"contenders": contenders, "static": static}
    return config.load(mapping)


@pytest.fixture
def rows(tmp_path):
    synthetic.write_paths(tmp_path, configured(static=[CASE]))
    return tmp_path / f"results/logs/paths/{CASE}.csv", tmp_path / f"results/logs/stream/{CASE}.csv"


def test_weights_that_are_not_there_are_named_with_what_trains_them(tmp_path):
    with pytest.raises(
        ConfigError, match=r"paths.networks.mine.sampled: no weights at a/b.safetensors; python "
    ) as told:
        configured(checkpoint="a/b.safetensors", name="mine.sampled")
    assert "train.py --network segformer-b0-64 --recipe sampled --output a/b.safetensors" in str(told.value)
    assert "\n" not in str(told.value)
    there = tmp_path / "b.safetensors"
    there.write_bytes(b"")
    assert experiments.cases("paths", configured(checkpoint=str(there), name="mine"))


def test_weights_that_are_trained_for_another_network_need_not_be_there():
    mapping = merged(ALL)
    mapping["experiments"] = ["paths"]
    other = {"network": "segformer-b0-64", "checkpoint": f"results/checkpoints/{CASE}.safetensors"}
    mapping["paths"]["networks"] = {CASE: {"network": "segformer-b0-64", "checkpoint": None}, "batches": other}
    mapping["paths"]["network_settings"] = {"batches": {"batch": 8}}
    found = config.load(mapping)
    stated = [experiments.member("paths").settings(found, name) for name in (CASE, "batches")]
    assert stated[0].network == stated[1].network and [one.batch for one in stated] == [1, 8]
    mapping["experiments"], mapping["stream"]["networks"] = ["paths", "stream"], ["batches"]
    with pytest.raises(ConfigError, match=r"stream\.networks: expected paths for one image a call, found 8 of batches"):
        config.load(mapping)
    mapping["stream"]["networks"] = ["none"]
    with pytest.raises(ConfigError, match=r"stream\.networks: unknown network 'none'; known: " + CASE):
        config.load(mapping)
    del mapping["paths"]["networks"][CASE]
    mapping["experiments"], mapping["paths"]["network_settings"] = ["paths"], {}
    with pytest.raises(ConfigError, match=r"paths\.networks\.batches: no weights at results/checkpoints/"):
        config.load(mapping)


@pytest.mark.parametrize(("shots", "told"), [(3, "at most 2 of stream.scenes, found 3"), (0, "at least 1, found 0")])
def test_each_shot_of_a_stream_has_a_scene(shots, told):
    mapping = merged(ALL)
    mapping["stream"] |= {"scenes": 2, "shots": shots}
    with pytest.raises(ConfigError, match=rf"stream\.shots: expected {told}"):
        config.load(mapping)


@pytest.mark.parametrize("name", ["segformer-b0-64", "segformer-b0-64.quick", "segformer-b1-64.plain"])
def test_weights_that_are_trained_here_have_the_name_of_their_rule(name):
    with pytest.raises(ConfigError, match=r"expected the name segformer-b0-64\.plain or .*, found '" + name):
        configured(name=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rungs": ["tuned"]}, "paths.rungs: unknown rung 'tuned'; known: trained, statistics"),
        ({"solver": "cplex"}, "paths.solver: unknown solver 'cplex'; known: exhaustive, highs, gurobi"),
        ({"bases": []}, "paths.bases: expected at least one name, found none"),
        ({"alone": [""]}, "paths.alone: '' appears twice"),
        ({"fit": 0}, "paths.fit: expected at least 1, found 0"),
        ({"data": "pictures"}, "paths.data: unknown source 'pictures'"),
    ],
)
def test_what_a_section_refuses(changes, message):
    with pytest.raises(ConfigError, match=message):
        configured(**changes)


def test_a_network_is_left_out_by_null():
    mapping = merged(ALL)
    mapping["experiments"] = ["paths"]
    mapping["paths"]["networks"] = {"segformer-b0-256.sampled": None}
    assert experiments.cases("paths", config.load(mapping)) == []


def test_the_table_of_paths_is_over_the_full_one(rows):
    found = table_paths.table(rows[:1])
    assert len(found) == 6 and (found.groupby("rung")["promise_us"].diff().dropna() > 0).all()
    (full,) = found[(found["rung"] == "trained") & (found["part"] == "base")].itertuples()
    assert (full.time_over, full.points, full.kept) == (1, 0, "yes")
    (least,) = found[(found["rung"] == "trained") & (found["p50_us"] == 2100)].itertuples()
    assert least.time_over == pytest.approx(0.7) and least.points == pytest.approx(-6)


def test_layers_add_up_to_the_products_of_the_full_path(rows):
    found = table_path_layers.table(rows[:1]).set_index("layer")
    assert list(found.index[:3]) == ["stem 1", "block 1.0", "block 1.1"]
    assert found["saved_us"].dropna().tolist() == list(synthetic.SAVED)
    assert found.loc["block 1.0", "lost"] == pytest.approx(8)
    network = networks.create("segformer", variant="b0", image_size=64, num_classes=21)
    whole = layers.macs(layers.segformer(network.options, Path.full(network.options)))
    assert found["macs"].sum() == pytest.approx(whole / 1e6)


def test_times_of_a_slower_moment_are_stated_as_of_the_first_one(monkeypatch):
    """All calls take twice as long the second time, half as long the third time."""
    bench = object.__new__(_paths.Bench)
    base, *others = (Path(blocks) for blocks in (("11",) * 4, ("10", "11", "11", "11"), ("01", "11", "11", "11")))
    bench.network, bench.bases, bench.times_us, slower = None, [base], {}, iter([1.0, 2.0, 0.5])
    bench.settings = msgspec.defstruct("Settings", ["max_seconds", "batch", "compiled"])(0.1, 1, False)
    bench.how, bench.images, bench.wrong = effort.Run("cpu", "float32", 0, 0.02, 10), None, {}
    us = {base: 100.0, others[0]: 90.0, others[1]: 80.0}

    def times(network, wanted, **_):
        by = next(slower)
        return {path: by * us[path] for path in wanted}

    monkeypatch.setattr(_paths.measure, "times", times)
    for wanted in ([base], [others[0]], [others[1], others[0]]):
        bench.time(wanted)
    assert bench.times_us == pytest.approx(us)
    bench.time(list(us))


def test_streams_are_over_the_oracle_one_path_and_static_networks(rows):
    found = table_stream.table(rows[1:]).set_index(["trace", "contender"])
    uniform = found.loc["uniform"]
    assert uniform.loc["oracle", "oracle_share"] == 1 and uniform.loc["closed", "oracle_share"] == pytest.approx(
        50 / 54
    )
    assert uniform.loc["closed", "over_static"] == pytest.approx(-5)
    assert uniform.loc["closed", "over_fixed"] == pytest.approx(-3) and set(found["switch_us"]) == {4.0}


@pytest.mark.parametrize(
    ("measure", "contender", "expected", "verdict"),
    [
        ("stream_share", "closed", 92.5, "met"),
        ("stream_share", "closed", 92.6, "not met"),
        ("stream_over_one", "closed", -3.1, "met"),
        ("stream_over_one", "oracle", 1.1, "not met"),
        ("stream_over_static", "closed", -5.1, "met"),
        ("stream_over_static", "oracle", -0.9, "not met"),
        ("stream_switch_us", "closed", 4.0, "met"),
    ],
)
def test_claims_about_streams_are_judged(measure, contender, expected, verdict, rows, tmp_path):
    claim = {"id": f"{measure}:uniform/{contender}/{CASE}", "kind": "aim", "claim": "c", "unit": ""}
    relation = "<=" if measure == "stream_switch_us" else ">="
    path = tmp_path / "claims.csv"
    pd.DataFrame([claim | {"relation": relation, "expected": expected}]).to_csv(path, index=False)
    found = claims.table([path, ROOT / "expected/paper/latency.csv", rows[1]]).iloc[0]
    assert found["verdict"] == verdict, found


@pytest.mark.parametrize("exact", rest_slow(["highs", "exhaustive"], 0))
def test_a_second_round_knows_what_the_first_one_overrated(exact):
    options = segformer.Options(variant="b2", image_size=512, num_classes=3)
    base = Path.full(options)

    def truth(path):
        skips = block_sets.skips(path)
        # Three blocks in a row cost more than pairs of them tell.
        return float(1 / (1 + np.exp(-3 + 0.3 * skips.sum() + 2 * (skips[2:] & skips[1:-1] & skips[:-2]).sum())))

    def see(rung, split, wanted):
        return {path: truth(path) for path in wanted}

    measured = {base: dict.fromkeys([base, *block_sets.singles(base), *block_sets.drawn(base, 30, 0)], "drawn")}
    times = {base: latency.model(base, {path: 1000.0 - 50 * block_sets.skips(path).sum() for path in measured[base]})}
    stated = SimpleNamespace(rungs=("trained",), budgets=12, solver=exact)
    bench = SimpleNamespace(settings=stated, bases=[base], how=SimpleNamespace(seed=0), see=see)
    first, proposals, _ = _paths.planned(bench, measured, times)
    proposed = list(proposals["trained"])
    assert {by.split()[0] for found in proposals["trained"].values() for by in found} == {*(exact, "searched", "front")}

    def error(fitted):
        losses = fitted["trained", base]
        return np.mean([losses.predict(path) - truth(path) for path in proposed])

    measured[base] |= dict.fromkeys(proposed, "earlier")
    second, _, seconds = _paths.planned(bench, measured, times)
    assert error(first) > 0.05 and abs(error(second)) < 0.4 * error(first) and seconds["trained"] > 0


def test_proposals_of_searches_are_measured_first_then_of_programs_and_fronts():
    found = {
        "a": {"front 3": None},
        "b": {"highs 1": None},
        "c": {"highs 2": None},
        "d": {"highs 3": None, "searched 2": None},
    }
    assert _paths.thinned(found, 1) == ["d"]
    assert _paths.thinned(found, 3) == ["d", "b", "c"]
    assert _paths.thinned(found, 9) == ["d", "b", "c", "a"]


def test_budgets_run_from_the_fastest_path_to_the_full_one():
    assert of_paths.budgets_of(100, 400, 4) == [100, 200, 300, 400]
    assert of_paths.budgets_of(100, 400, 1) == [400]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A network trained for three steps."""
    from tilewright import networks
    from tilewright_study import scenes
    from tilewright_study.training import segmentation

    source = scenes.create("scenes")
    family, options = networks.parse("segformer-b0-64")
    network = networks.create(family, seed=0, num_classes=len(source.classes), **options)
    stage = segmentation.Stage(until=1.0, sizes=(64,), batch=2)
    recipe = msgspec.structs.replace(segmentation.RECIPES["plain"], stages=(stage,), steps=3, measured=4)
    path = tmp_path_factory.mktemp("weights") / "b0.safetensors"
    segmentation.train(network, source, recipe, path)
    return path


@pytest.mark.slow
def test_a_trained_network_goes_through_paths_and_stream(weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = {"fit": 2, "choice": 2, "test": 2, "novel": 1, "drawn": 5, "timed": 1, "budgets": 2, "proposals": 12}
    few |= {"samples": 2, "rounds": 2, "alone": ["scale=0.5"], "solver": "highs", "max_seconds": 0.01}
    study = configured(checkpoint=str(weights), name="mine", **few)
    stated = of_paths.settings(study, "mine")
    how = effort.Run("cpu", "float32", 0, 0.5, 3)
    found = list(_paths.run("mine", stated, how))
    assert {row["part"] for row in found} >= {"base", "single", "drawn", "seen", "alone"}
    assert len({(row["rung"], row["path"]) for row in found}) == len(found)
    assert [row["part"] for row in found if row["rung"] == "trained"].count("drawn") == 1
    # A path has one time, whichever rung it was proposed on.
    asked = {row["path"] for row in found if row["proposed"]}
    for row in found:
        untimed = row["part"] == "seen" and row["path"] not in asked
        assert row["p50_us"] is None if untimed else row["p50_us"] > 0
        assert (row.get("held_out") is None) == (row["part"] in ("base", "proposed", "every", "alone"))
        assert ("saved_us" in row) == (row["p50_us"] is not None and row["part"] != "alone")
        assert not row["proposed"] or row["p50_us"] > 0
        assert ("promise_us" in row) == ("test" in row)
        assert row["part"] not in ("base", "alone") or row["promise_us"] > 0
    proposed = [row for row in found if row["proposed"]]
    assert any("promise_us" in row for row in proposed)
    synthetic.write_csv(tmp_path / "results/logs/paths/mine.csv", "paths", [{"status": "ok", **row} for row in found])
    kept = [entry for entry in look_up.read("results/logs/paths/mine.csv") if entry.rung == "trained"]
    assert look_up.Table(kept).rows
    words = experiments.arguments("paths", study, "mine")
    pairs = [word.strip("'") for word in words[words.index("--set") + 1 : words.index("--device")]]
    path_pictures.run("mine", "results/logs/paths/mine.csv", "mine.npz", "cpu", pairs)
    arrays, header = path_pictures.read("mine.npz")
    assert arrays["seen"].shape == (3, len(header["paths"]), 64, 64) and arrays["seen"].max() < len(header["classes"])
    assert header["p50_us"] == sorted(header["p50_us"], reverse=True)
    assert header["miou"] == sorted(header["miou"], reverse=True)
    drawn = figures.member("scene").draw(["mine.npz"])
    assert any("mean IoU" in text.get_text() for text in drawn.findobj(lambda part: hasattr(part, "get_text")))
    streamed = experiments.member("stream")
    settings = msgspec.structs.replace(
        streamed.settings(study, "mine"), frames=6, shown=3, scenes=2, shots=2, switches=2
    )
    (tmp_path / "other").write_bytes(b"other weights")
    for changes in ({"network": "segformer-b0-96"}, {"checkpoint": str(tmp_path / "other")}):
        (field,) = changes
        other = msgspec.structs.replace(settings, network=msgspec.structs.replace(settings.network, **changes))
        with pytest.raises(ConfigError, match=f"path table: expected one of {field} "):
            next(iter(_stream.run("mine", other, how)))
    both = {"contenders": (*settings.contenders, "static", "joint"), "static": {"whole": settings.network}}
    settings = msgspec.structs.replace(settings, **both)
    rows = list(_stream.run("mine", settings, how))
    whole = [row for row in rows if "missed" in row]
    assert len(whole) == len(settings.traces) * len(settings.contenders)
    assert all(0 <= row["missed"] <= 1 and 0 <= row["miou"] <= 1 for row in whole)
    for row in whole:
        assert row["mean_miou"] * (1 - row["missed"]) - row["missed"] <= row["timely_miou"] <= row["mean_miou"]
        assert row["missed"] or row["timely_miou"] == row["mean_miou"]
        assert row["missed"] < 1 or row["timely_miou"] == 0
    assert sum("frame" in row for row in rows) == 3 * len(whole)
    # Six frames, of which the first three are told, are those of two scenes by turns.
    for one in whole:
        told = [x for x in rows if "frame" in x and all(x[key] == one[key] for key in ("trace", "contender"))]
        assert all(0 <= x["miou"] <= 1 for x in told)
        if one["contender"] == "static":
            assert {x["path"] for x in told} == {"whole"}
        if one["contender"] == "full":
            assert told[0]["miou"] == told[2]["miou"]
            assert one["mean_miou"] == pytest.approx((told[0]["miou"] + told[1]["miou"]) / 2)


def test_plans_from_measured_rows(rows, tmp_path, capsys):
    plan_paths.run(rows[0], tmp_path / "p.json", "highs", None, 4, "trained", 0)
    found = json.loads((tmp_path / "p.json").read_text())
    text = (tmp_path / "p.json").read_text()
    assert text.count("budget_us") == 4 and found["kind"] == "path plans"
    # 460 us are to be saved.
    for solver in ("exhaustive", "highs"):
        plan_paths.run(rows[0], tmp_path / "p.json", solver, [2540.0, 100.0], 1, "trained", 0)
        (plan,) = json.loads((tmp_path / "p.json").read_text())["plans"]
        assert plan["us"] <= 2540 and plan["accuracy"] == pytest.approx(0.57, abs=1e-3)
        assert "100 us: no path is predicted to be so fast" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"solver": "cplex"}, "solver: unknown 'cplex'; known: exhaustive, highs, gurobi"),
        ({"rung": "tuned"}, "rung: unknown 'tuned'; known: trained, statistics"),
        ({"budgets": [float("nan")]}, "budgets: expected microseconds above 0, found nan"),
        ({"budgets": [0.0]}, "budgets: expected microseconds above 0, found 0.0"),
        ({"count": 0}, "count: expected at least 1, found 0"),
    ],
)
def test_what_a_plan_refuses(rows, tmp_path, changes, message):
    stated = {"solver": "highs", "budgets": None, "count": 2, "rung": "trained", "seed": 0}
    with pytest.raises(ConfigError, match=message):
        plan_paths.run(rows[0], tmp_path / "p.json", **(stated | changes))
    with pytest.raises(ArtifactError, match="expected rows of the experiment paths, found stream"):
        plan_paths.run(rows[1], tmp_path / "p.json", **stated)
    assert not (tmp_path / "p.json").exists()
