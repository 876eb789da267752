"""Costs of paths on generated hardware: rows, ratios, what is shown without the cost model, and claims."""

import pytest
import yaml
from test_figures import ROOT, configured

from helpers import synthetic
from helpers.rows import whole
from tilewright.core.errors import ConfigError, Unavailable
from tilewright_study import accelerators, experiments
from tilewright_study.accelerators import workloads
from tilewright_study.experiments import accelerator
from tilewright_study.experiments.accelerator import table_accelerator as costs_table
from tilewright_study.measure.effort import Run
from tilewright_study.planning import layers
from tilewright_study.tables import _select, claims

NAME = "segformer-b0-64"
PATHS = ("2.2.2.2", "2.2.2.2 decoder=published", "1.2.1.2")


def settings(**changes):
    stated = {"paths": PATHS, "classes": 20, "vectors": (16, 64), "lanes": (8,), "elements": (4,), "loops": 4}
    stated |= {"multipliers": (1, 10000), "buffers": ((32, 16, 16),), "files": ()}
    return accelerator.Settings(**{**stated, **changes})


def run(**changes):
    return whole("accelerator", accelerator.run(NAME, settings(**changes), Run()))


@pytest.fixture
def model(monkeypatch):
    """Every product takes a cycle for what the array multiplies at once, and 1 pJ."""

    def costs(hardware, shapes, loops):
        assert loops == 4
        products = {shape: shape.pixels * shape.inputs * shape.outputs for shape in shapes}
        return {shape: accelerators.Cost(n / hardware.multipliers, float(n)) for shape, n in products.items()}

    monkeypatch.setattr(accelerators, "version", lambda: "3.9.1")
    monkeypatch.setattr(accelerators, "costs", costs)


def test_rows_hold_the_costs_of_every_path_on_every_hardware(model, tmp_path):
    own = {"vector": 32, "lanes": 4, "elements": 4, "weights_kib": 8, "inputs_kib": 8, "outputs_kib": 8}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    rows = run(files=(str(tmp_path / "own.yaml"),))
    assert [(row["vector"], row["path"]) for row in rows] == [(v, path) for v in (16, 64, 32) for path in PATHS]
    assert [row["whole"] for row in rows[:3]] == [1, 0, 0]
    for row in rows:
        assert row["device"] == "zigzag-dse 3.9.1, a cost model, uncalibrated" and row["status"] == "ok"
        assert row["padded_macs"] >= row["macs"] > 0 and row["energy_uj"] == pytest.approx(row["padded_macs"] / 1e6)
        assert row["cycles"] == pytest.approx(row["padded_macs"] / (row["vector"] * row["lanes"] * row["elements"]))
        assert row["decoder_uj"] + row["depthwise_uj"] + row["attention_uj"] < row["energy_uj"]
    # Channels of 32 and more fill 16 of a vector, and not all fill 64.
    assert rows[3]["padded_macs"] > rows[0]["padded_macs"]
    _, _, found = workloads.layers_of(NAME, PATHS[0], 20)
    assert rows[0]["macs"] == layers.macs(found)
    assert experiments.sources("accelerator", configured(), "segformer-b0-512") == []


def test_without_the_model_a_row_says_what_is_missing(monkeypatch):
    def missing():
        raise Unavailable("zigzag-dse not installed")

    monkeypatch.setattr(accelerators, "version", missing)
    (row,) = run()
    assert (row["status"], row["reason"], row["network"]) == ("skipped", "zigzag-dse not installed", NAME)
    assert row["device"] == "zigzag-dse, a cost model, uncalibrated" and row["energy_uj"] == ""


@pytest.mark.parametrize("name", ["swin-tiny-64", "segformer-b0-64-mmseg"])
def test_networks_with_other_heads_have_no_costs(name):
    with pytest.raises(ConfigError, match=r"expected a network named segformer-\.\.\. with its own head, found"):
        workloads.layers_of(name, "2.2.2.2", 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"networks": {"swin-tiny-512": ["2.2.6.2"]}}, "expected networks named segformer-..., found 'swin-tiny-512'"),
        ({"networks": {"segformer-b9-512": []}}, "accelerators.networks: unknown network"),
        (
            {"networks": {NAME: ["2.2.2.2", "2.2.2.2"]}},
            "accelerators.networks.segformer-b0-64: '2.2.2.2' appears twice",
        ),
        ({"multipliers": [1, 2]}, "accelerators: hardware: expected some with 1 to 2 multipliers, found none"),
        ({"buffers": [[1, 1, 1]]}, r"accelerators: hardware 8x32x16 1\+1\+1: outputs_kib: expected room for one tile"),
        ({"files": ["none.yaml"]}, "accelerators: none.yaml: no such file"),
    ],
    ids=str,
)
def test_a_wrong_section_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        configured(accelerators=changes)


def test_a_path_of_another_network_is_named(model):
    with pytest.raises(ConfigError, match=r"expected 4 stages, of at most 2\.2\.2\.2 blocks, found 3"):
        run(paths=("2.2.2",))


# What is shown


@pytest.fixture
def file(tmp_path):
    rows = [
        synthetic.accelerator_row("segformer-b2-512", path, at, vector)
        for vector in (8, 16)
        for at, path in enumerate(["3.4.6.3", "3.4.6.3 decoder=published", "2.3.5.2"])
    ]
    rows[1] |= {"decoder_uj": 50.0, "energy_uj": 100.0}
    rows[4] |= {"decoder_uj": 40.0, "energy_uj": 90.0}
    synthetic.write_csv(tmp_path / "x.csv", "accelerator", rows)
    return tmp_path / "x.csv"


def test_ratios_are_those_of_the_whole_network_on_the_same_hardware(file):
    frame = costs_table.table([file]).set_index(["path", "vector"])
    path = frame.loc["2.3.5.2", 8]
    assert path["energy_over"] == pytest.approx(0.81) and path["macs_over"] == pytest.approx(0.81)
    assert frame.loc["3.4.6.3", 16]["energy_over"] == 1 and path["hardware"] == "8×8×4, 32+16+16"
    assert path["padding"] == pytest.approx(1 - 1 / 1.1)
    # Twice the vector: half the cycles, twice the area.
    assert path["cycles_least"] == pytest.approx(2) and path["product_least"] == pytest.approx(1)
    assert set(frame["origin"]) == {"run"}


def test_recorded_costs_stand_in_for_a_model_that_is_not_there(file, tmp_path):
    skipped = {"network": "segformer-b2-512", "status": "skipped", "reason": "zigzag-dse not installed"}
    synthetic.write_csv(tmp_path / "run.csv", "accelerator", [skipped])
    recorded = tmp_path / costs_table.RECORDED
    recorded.parent.mkdir(parents=True)
    recorded.write_bytes(file.read_bytes())
    frame = costs_table.table([tmp_path / "run.csv", recorded])
    assert len(frame) == 6 and set(frame["origin"]) == {"recorded"} and frame["energy_over"].notna().all()
    # What was run is not mixed with what was recorded.
    assert set(costs_table.table([file, recorded])["origin"]) == {"run"}


@pytest.mark.parametrize(
    ("claim", "measured"), [("accelerator_decoder", 5 / 40), ("accelerator_whole", 50 / 90)], ids=["decoder", "whole"]
)
def test_claims_are_about_the_hardware_where_folding_gains_least(file, tmp_path, claim, measured):
    stated = {"id": f"{claim}:segformer-b2-512", "kind": "aim", "claim": "c", "relation": "<="}
    stated |= {"expected": 0.6, "unit": "×"}
    synthetic.write_csv(tmp_path / "c" / "claims.csv", ",".join(stated), [stated])
    (row,) = claims.table([tmp_path / "c" / "claims.csv", ROOT / _select.PAPER_LATENCY, file]).itertuples()
    assert row.measured == pytest.approx(measured, rel=1e-5) and row.verdict == "met"
