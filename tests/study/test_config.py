import copy
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import msgspec
import pytest

from helpers.checkout import ALL, TINY, merged
from tilewright.core.errors import ConfigError
from tilewright_study import config, experiments

ROOT = Path(__file__).parents[2]
DEFAULT, WHOLE = merged(), merged(ALL)


def changed(path, value):
    """The whole study with one value replaced, or removed when `value` is ..."""
    mapping = copy.deepcopy(WHOLE)
    *parents, last = path.split("/")
    place = mapping
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return mapping


def test_default_study_loads():
    study = config.load(DEFAULT)
    assert study.attention.runs[0] == ("mixed", "greedy")
    assert study.workloads == tuple(DEFAULT["workloads"])
    with pytest.raises(AttributeError):
        study.seed = 1


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("workload", ["vil-tiny-224-s1"], "unknown field `workload`"),
        ("seed", ..., "missing required field `seed`"),
        ("seed", "0", r"Expected `int`, got `str` - at `\$.seed`"),
        ("timing/rse", "false", r"Expected `float`, got `str` - at `\$.timing.rse`"),
        ("schedule/objective", "max", r"Invalid enum value 'max' - at `\$.schedule.objective`"),
        ("dtype", "float64", r"Invalid enum value 'float64' - at `\$.dtype`"),
        ("device", "tpu", "device: unknown kind of device 'tpu'; known: cpu, cuda"),
        ("tiles", [], "tiles: expected at least one name"),
        ("attention/forms", {"flax": None}, "attention.forms: unknown baseline 'flax'; known: sdpa_dense"),
        ("ragged/attention", {"vaarlen": [1]}, "ragged.attention: unknown attention 'vaarlen'; known: tilewright"),
        ("ragged/shapes", [[3, 0]], "ragged.shapes: expected at least 1, found 0"),
        ("ragged/lengths", [[9, 3]], r"ragged.lengths: expected the least first, found \[9, 3\]"),
        ("ragged/shape_lengths", {"9x64": [[3, 9]]}, "ragged.shape_lengths: unknown shape '9x64'; known: 3x64"),
        ("ragged/shape_lengths", {"3x64": [[9, 3]]}, r"ragged.shape_lengths.3x64: expected the least first"),
        ("ragged/max_seconds", 0, "ragged.max_seconds: expected a number above 0"),
        (
            "pruned/workloads",
            ["vil-tiny-64"],
            "pruned.workloads: expected networks named deit-..., found 'vil-tiny-64'",
        ),
        ("paths/network_settings", {"b9": {}}, "paths.network_settings: unknown network 'b9'; known: segformer-b0-256"),
        (
            "paths/network_settings",
            {"segformer-b0-256.sampled": {"fit": 0}},
            "paths.network_settings.segformer-b0-256.sampled.fit: expected at least 1, found 0",
        ),
        (
            "paths/network_settings",
            {"segformer-b0-256.sampled": {"fits": 1}},
            "paths.network_settings.segformer-b0-256.sampled: Object contains unknown field `fits`",
        ),
        ("pruned/workloads", ["deit-tiny-64-evot"], "pruned.workloads: unknown pruner 'evot'; known: none, threshold"),
        ("pruned/batching", ["paded"], "pruned.batching: unknown batching 'paded'; known: padded"),
        ("pruned/modes", {"jit": [1]}, "pruned.modes: unknown mode 'jit'; known: eager, graph, compile"),
        ("pruned/modes", {"eager": [0]}, "pruned.modes.eager: expected at least 1, found 0"),
        (
            "pruned/network_modes",
            {"deit-tiny-64": {"jit": [1]}},
            "pruned.network_modes.deit-tiny-64: unknown mode 'jit'",
        ),
        ("workloads", ["vil-tiny-224-s1"] * 2, "workloads: 'vil-tiny-224-s1' appears twice"),
        ("workloads", ["vit-tiny-224"], "workloads: unknown workload 'vit-tiny-224'; known: vil-"),
        ("models", {"dynamicvit-s-224": {"keep": 1}}, "dynamicvit-s-224: .*`keep`; parameters: variant"),
        ("models", {"dynamicvit-s-224": {"keep_ratio": 2}}, "keep_ratio"),
        ("orders", ["none", "hcc"], "orders: unknown order 'hcc'; known: none, rcm, hc, ic, window"),
        ("reorder", {"icc": {}}, "reorder: unknown order 'icc'"),
        ("reorder", {"ic": {"tao": 1}}, "reorder.ic: .*`tao`"),
        ("tiles", ["16x1", "63x1"], "tiles: tile '63x1': rows must be a power of two"),
        ("tile_sets/mixed", ["8x1"], "tile_sets.mixed: unknown tile '8x1'; known: 16x1, 64x1, 64x64"),
        ("tile_sets/mixed", [], "tile_sets.mixed: expected at least one name"),
        ("tile_sets/16x1", ["64x1"], r"tile_sets.16x1: the name of a tile; expected \[16x1\]"),
        ("solvers", ["cplex"], "solvers: unknown solver 'cplex'; known: greedy, descent, highs, gurobi"),
        (
            "attention/schedules",
            {"wide": ["greedy"]},
            "attention.schedules: unknown tile set 'wide'; known: mixed, 16x1, 64x1, 64x64",
        ),
        ("attention/schedules", {"mixed": ["cplex"]}, "attention.schedules.mixed: unknown solver 'cplex'"),
        ("attention/schedules", {}, "attention.schedules: expected at least one name"),
        ("attention/schedules/mixed", [], "attention.schedules.mixed: expected at least one name"),
        ("attention/baselines", ["flash"], "attention.baselines: unknown baseline 'flash'; known: sdpa_dense"),
        ("experiments", ["layers"], "experiments: unknown experiment 'layers'; known: attention, networks, ragged"),
        ("experiments", ["ragged", "ragged"], "experiments: 'ragged' appears twice"),
        ("ragged", None, "experiments: 'ragged' is selected; expected its section 'ragged', found none"),
        ("order_times", ..., "experiments: 'orders' is selected; expected its section 'order_times', found none"),
        ("pruned/batching", [], "pruned.batching: expected at least one name"),
        ("pruned/modes", {"eager": []}, "pruned.modes: expected a batch for at least one mode"),
        ("ragged/attention", {}, "ragged.attention: expected a number of images for at least one provider"),
        ("heatmap/max_seconds", 0, "heatmap.max_seconds: expected a number above 0"),
        ("attention/baselines", [], "attention.baselines: expected at least one name"),
        ("attention/baselines", ["flex", "flex"], "attention.baselines: "),
        ("attention/baseline_orders", [], "attention.baseline_orders: expected at least one name"),
        (
            "attention/baseline_orders",
            ["hilbert"],
            "attention.baseline_orders: unknown order 'hilbert'; known: none, rcm",
        ),
        ("order_times/workloads", ["vil"], "order_times.workloads: unknown workload 'vil'"),
        ("figures/pattern_workloads", ["vil"], "figures.pattern_workloads: unknown workload 'vil'"),
        ("figures/pattern_tiles", ["3x3"], "figures.pattern_tiles: tile '3x3'"),
        ("figures/fill_workloads", ["vil"], "figures.fill_workloads: unknown workload 'vil'"),
        ("figures/fill_tiles", ["3x3"], "figures.fill_tiles: tile '3x3'"),
        ("region_rows", 32, "region_rows: expected at least 64, found 32"),
        ("split_keys", 0, "split_keys: expected at least 1"),
        ("schedule/rounds", 0, "schedule.rounds: expected at least 1"),
        ("training/minutes", {"plane": 1}, "training.minutes: unknown recipe 'plane'; known: plain"),
        ("training/minutes", {"segformer-b9-512.plain": 1}, "training.minutes: .*b9"),
        ("training/minutes", {"segformer-b2-512.plain": 0}, "training.minutes.segformer-b2-512.plain: expected"),
        ("schedule/max_tile_kinds", 0, "schedule.max_tile_kinds: expected at least 1"),
        ("schedule/time_limit_s", 0, "schedule.time_limit_s: expected a number above 0"),
        ("schedule/gap", 1, "schedule.gap: expected a fraction"),
        ("timing/rse", 0, "timing.rse: expected a number above 0"),
        ("attention/max_seconds", float("nan"), "attention.max_seconds: expected a number above 0"),
        ("timing/min_repetitions", 1, "timing.min_repetitions: expected at least 3"),
        ("networks/workloads", ["vil-tiny-224"] * 2, "networks.workloads: 'vil-tiny-224' appears twice"),
        (
            "networks/workloads",
            ["vit"],
            "networks.workloads: unknown network 'vit'; known: vil-.*regionvit-.*dynamicvit-",
        ),
        (
            "networks/attention",
            {"magic": [1]},
            "networks.attention: unknown attention 'magic'; known: dense, tilewright",
        ),
        ("networks/attention", {"native": []}, "networks.attention: expected a batch for at least one attention"),
        ("networks/attention/native", [0], "networks.attention.native: expected at least 1, found 0"),
        ("networks/attention/native", [2, 2], "networks.attention.native: 2 appears twice"),
        ("networks/attention/native", ["1"], r"Expected `int`, got `str` - at `\$.networks.attention"),
        ("networks/max_seconds", 0, "networks.max_seconds: expected a number above 0"),
        ("networks/batches", [1], r"unknown field `batches` - at `\$.networks`"),
        ("heatmap/order", "hilbert", "heatmap.order: unknown order 'hilbert'"),
        ("heatmap/solver", "cplex", "heatmap.solver: unknown solver 'cplex'"),
        ("heatmap/patches", [0], "heatmap.patches: expected at least 1"),
    ],
)
def test_a_wrong_value_names_its_place(path, value, message):
    with pytest.raises(ConfigError, match=message):
        config.load(changed(path, value))


def test_an_experiment_that_is_not_selected_needs_no_section():
    chosen = changed("experiments", ["networks"])
    del chosen["ragged"]
    assert config.load(chosen).ragged is None


@pytest.mark.parametrize("path", ["split_keys", "schedule/rounds", "schedule/max_tile_kinds"])
def test_what_may_be_left_to_the_device_is_null(path):
    assert config.load(changed(path, None))


def test_a_network_may_be_trained_for_other_minutes():
    study = config.load(changed("training/minutes", {"plain": 3.2, "segformer-b2-512.plain": 9}))
    assert study.training.minutes_of("segformer-b2-512", "plain") == 9
    assert study.training.minutes_of("segformer-b1-512", "plain") == 3.2
    study = config.load(changed("training/minutes", {"segformer-b2-512.plain": 9}))
    assert study.training.minutes_of("segformer-b2-512", "plain") == 9


def test_an_attention_without_batches_is_left_out():
    assert config.load(changed("networks/attention/flex", [])).networks.attention["flex"] == ()
    none = {"workloads": [], "attention": {}, "compiled": {}, "plans": [], "max_seconds": 1.0}
    assert config.load(changed("networks", none)).networks.workloads == ()


@pytest.mark.parametrize(("path", "place"), [(TINY, "workloads"), ("config/large.yaml", "networks")])
def test_overlays_change_known_keys(path, place):
    assert msgspec.to_builtins(config.load(merged(ROOT / path)))[place] != DEFAULT[place]


def test_what_snakemake_parses_stays_light():
    heavy = ("torch", "triton", "numba", "gurobipy", "highspy", "matplotlib", "pandas", "seaborn")
    program = f"""
import sys, yaml
from tilewright_study import config, figures
figures.selected(config.load(yaml.safe_load(open({str(ROOT / "config.yaml")!r}))))
print([name for name in {heavy!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The schema for editors.

SCHEMA = ROOT / "config/schema.json"


def test_the_command_of_make_schema_prints_the_schema():
    makefile = (ROOT / "Makefile").read_text()
    assert "python -m tilewright_study.config > config/schema.json" in makefile
    printed = subprocess.run([sys.executable, "-m", "tilewright_study.config"], capture_output=True, check=True).stdout
    assert json.loads(printed) == config.schema()


def test_every_value_of_the_study_is_described():
    for name, section in config.schema()["$defs"].items():
        assert not section["description"].startswith("A section of the configuration"), name
        for key, value in section["properties"].items():
            assert value["description"], f"{name}.{key}"


def test_the_default_study_follows_the_schema():
    jsonschema.validate(DEFAULT, config.schema())
    first, *_ = (ROOT / "config.yaml").read_text().splitlines()
    assert (ROOT / first.partition("$schema=")[2]) == SCHEMA


@pytest.mark.parametrize(
    ("path", "value"), [("sed", 1), ("seed", ...), ("timing/rse", "false"), ("schedule/gap", None)]
)
def test_the_schema_refuses_what_is_refused(path, value):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed(path, value), config.schema())


def test_a_section_that_another_one_reads_is_missed_by_name():
    with pytest.raises(config.ConfigError, match="experiments: 'paths' is selected; expected its section 'paths'"):
        config.load(changed("paths", None))
    with pytest.raises(config.ConfigError, match=r"stream\.static: unknown network"):
        config.load(changed("stream/static", ["other"]) | {"paths": None, "experiments": ["attention"]})


def test_a_predictor_has_a_default():
    found = config.load(changed("slices/predictors", {"pooled128": {"pool": 128}}))
    (case, *_) = experiments.cases("slices", found)
    assert "tilewright.slices.predictors.pooled" in experiments.modules_of_case("slices", found, case)
