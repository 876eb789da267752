"""Hardware that is generated, what paths give it, and costs: of the model where it is installed, else of a stand-in."""

import json
import subprocess
import sys
from dataclasses import dataclass

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.errors import ArtifactError, ConfigError, TilewrightError, Unavailable
from tilewright.masks import segformer as sizes
from tilewright.networks.path import DECODERS, Path
from tilewright_study import accelerators
from tilewright_study.accelerators import Shape, _worker, hardware, workloads
from tilewright_study.accelerators.hardware import Hardware
from tilewright_study.planning import layers

ONE = Hardware(16, 8, 4, 32, 16, 16)
WIDTHS = st.sampled_from([1, 8, 16, 48, 64])


@dataclass(frozen=True)
class Options:
    """Of a SegFormer, without torch."""

    variant: str = "b0"
    pixels: tuple[int, int] = (64, 96)
    num_classes: int = 150
    head: str = "segformer"
    decoder: str = "folded"
    knobs: tuple[str, ...] = ("levels", "scale", "decoder", "fuse", "width")
    least: int = 32

    @property
    def depths(self):
        return sizes.VARIANTS[self.variant].depths

    @property
    def channels(self):
        return sizes.VARIANTS[self.variant].channels


# Hardware


def test_the_study_generates_48_kinds_of_hardware():
    buffers = [(32, 16, 16), (128, 64, 64), (512, 256, 256)]
    found = hardware.generated((8, 16, 32, 64), (8, 16, 32), (4, 16), buffers, (512, 4096))
    assert len(found) == len(set(found)) == 48
    assert {each.vector for each in found} == {8, 16, 32, 64} and {each.lanes for each in found} == {8, 16, 32}
    with pytest.raises(ConfigError, match="expected some with 1 to 2 multipliers, found none"):
        hardware.generated((8,), (8,), (4,), buffers, (1, 2))


def test_costs_of_buffers_are_those_that_are_stated_and_powers_in_between():
    cost = hardware.technology()
    assert [cost.buffer_pj_per_bit(kib) * 64 for kib in (8, 32, 1024)] == pytest.approx([10, 20, 100])
    # Between 8 and 32 KiB energy doubles where the size has four times as much: its root.
    assert cost.buffer_pj_per_bit(16) * 64 == pytest.approx(10 * 2**0.5)
    assert cost.buffer_pj_per_bit(4) < cost.buffer_pj_per_bit(8) < cost.buffer_pj_per_bit(4096)


@given(WIDTHS, WIDTHS, WIDTHS)
def test_larger_hardware_has_more_area_and_its_ports_feed_the_array(vector, lanes, elements):
    one = Hardware(vector, lanes, elements, 64, 64, 64)
    assert one.area_mm2 < Hardware(vector, lanes, elements, 128, 64, 64).area_mm2
    assert one.area_mm2 < Hardware(vector, 2 * lanes, elements, 64, 64, 64).area_mm2
    told = one.described()
    memories = told["memories"]
    assert told["operational_array"]["sizes"] == [vector, lanes, elements]
    for name, bits in (("weights", 8 * vector * lanes), ("inputs", 8 * vector * elements)):
        (read,) = (port for port in memories[name]["ports"] if port["type"] == "read")
        assert read["bandwidth_max"] == bits
        assert memories[name]["r_cost"] == pytest.approx(bits * hardware.technology().buffer_pj_per_bit(64))


def test_hardware_is_read_strictly(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(ONE)))
    assert hardware.read(path) == ONE
    for text, error, message in (
        ("vector: 8", ConfigError, r"missing required field `lanes`; fields: vector, lanes, elements"),
        ("[1", ArtifactError, "own.yaml: expected YAML"),
        (yaml.safe_dump(msgspec.to_builtins(ONE) | {"wires": 3}), ConfigError, "unknown field `wires`"),
        (yaml.safe_dump(msgspec.to_builtins(ONE) | {"lanes": 0}), ConfigError, "Expected `int` >= 1"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=message):
            hardware.read(path)
    with pytest.raises(ArtifactError, match="no such file; expected hardware as YAML"):
        hardware.read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vector": 512, "lanes": 128}, "weights_kib: expected room for one tile, 64 KiB, found 32"),
        ({"vector": 512, "elements": 64, "lanes": 1}, "inputs_kib: expected room for one tile, 32 KiB, found 16"),
        ({"lanes": 128, "elements": 64}, "outputs_kib: expected room for one tile, 24 KiB, found 16"),
    ],
    ids=["weights", "inputs", "outputs"],
)
def test_a_buffer_that_cannot_hold_one_tile_is_refused(tmp_path, changes, message):
    stated = msgspec.to_builtins(ONE) | changes
    with pytest.raises(ConfigError, match=message):
        Hardware(**stated)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(stated))
    with pytest.raises(ConfigError, match=message):
        hardware.read(tmp_path / "own.yaml")


# What paths give it

KEPT = st.tuples(*(st.text("01", min_size=2, max_size=2) for _ in range(4)))


@given(KEPT, st.sampled_from(["1234", "123", "24"]), st.sampled_from(DECODERS))
def test_shapes_hold_every_product_of_a_path_and_idle_channels_only_add(blocks, levels, decoder):
    options = Options()
    found = layers.segformer(options, Path(blocks, levels=levels, decoder=decoder))
    exact = workloads.shapes(found, Hardware(1, 1, 1, 32, 16, 16))
    assert workloads.products(exact) == layers.macs(found)
    rounded = workloads.shapes(found, ONE)
    assert workloads.products(rounded) >= layers.macs(found)
    for shape in (shape for counted in rounded.values() for shape in counted):
        assert shape.outputs % ONE.lanes == 0
        assert shape.kind == "depthwise" or (shape.inputs % ONE.vector == 0 and shape.pixels % ONE.elements == 0)


def test_attention_is_that_of_each_head():
    options = Options(pixels=(512, 512))
    found = layers.segformer(options, Path.full(options))
    parts = workloads.shapes(found, Hardware(1, 1, 1, 32, 16, 16))
    # B0's third stage: 5 heads of 32 channels, 32 x 32 queries, 16 x 16 keys.
    assert parts["attention"][Shape("product", 1024, 32, 256)] == 2 * 5
    assert parts["attention"][Shape("product", 1024, 256, 32)] == 2 * 5
    assert sum(parts["depthwise"].values()) == 8
    assert Shape("depthwise", 16384, 9, 128) in parts["depthwise"]


def test_what_is_left_out_grows_with_what_runs():
    options = Options(pixels=(512, 512))
    full = Path.full(options)
    whole = workloads.left_out(options, full)
    assert whole > workloads.left_out(options, Path(("10", "11", "11", "11"))) > 0
    assert whole > workloads.left_out(options, Path(full.blocks, levels="123"))
    # The widest maps alone: 4 x 32 channels of 128 x 128 tokens into GELU and out of it, twice.
    assert whole > 2 * 2 * 128 * 128 * 128


# Costs


def test_without_the_extra_it_is_said_what_is_missing(monkeypatch):
    monkeypatch.setitem(accelerators.NEEDED, "no-such-distribution", "none")
    with pytest.raises(Unavailable, match="no-such-distribution not installed; the extra `accelerator`"):
        accelerators.version()


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A stand-in for the model's process, which counts its calls; costs are kept in a cache of their own."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(accelerators, "version", lambda: "0")
    calls = []

    def run(command, *, input, cwd, **_):
        asked = json.loads(input)
        calls.append(asked)
        costs = [[shape["pixels"], shape["inputs"] * asked["sizes"][0]] for shape in asked["shapes"]]
        return subprocess.CompletedProcess(command, 0, json.dumps(costs), "")

    monkeypatch.setattr(accelerators.subprocess, "run", run)
    return calls


def test_costs_are_kept_by_shape_hardware_and_version(model, monkeypatch):
    first, second = Shape("product", 64, 16, 8), Shape("depthwise", 64, 9, 8)
    found = accelerators.costs(ONE, [first, first], 4)
    assert found == {first: accelerators.Cost(64, 16 * 16)}
    assert accelerators.costs(ONE, [first, second], 4)[second] == accelerators.Cost(64, 9 * 16)
    assert [len(asked["shapes"]) for asked in model] == [1, 1]
    accelerators.costs(ONE, [first, second], 4)
    assert len(model) == 2
    accelerators.costs(Hardware(8, 8, 4, 32, 16, 16), [first], 4)
    accelerators.costs(ONE, [first], 3)
    monkeypatch.setattr(accelerators, "version", lambda: "1")
    accelerators.costs(ONE, [first], 4)
    assert len(model) == 5


@pytest.mark.parametrize(
    ("done", "message"),
    [
        ((1, "", "words\nKeyError: 'D4'\n"), "found an error: KeyError: 'D4'"),
        ((1, "", ""), "found an error: nothing was said"),
        ((0, "words", ""), "expected costs of 1 shapes, found"),
    ],
    ids=["failed", "silent", "no costs"],
)
def test_a_model_that_fails_is_one_line_and_nothing_is_kept(model, monkeypatch, tmp_path, done, message):
    monkeypatch.setattr(
        accelerators.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, *done)
    )
    with pytest.raises(TilewrightError, match=message):
        accelerators.costs(ONE, [Shape("product", 64, 16, 8)], 4)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_layers_and_mappings_are_as_the_model_reads_them():
    product = _worker.layer({"kind": "product", "pixels": 64, "inputs": 16, "outputs": 8}, 3)
    assert (product["id"], product["loop_dims"], product["loop_sizes"]) == (3, ["B", "K", "C"], [64, 8, 16])
    depthwise = _worker.layer({"kind": "depthwise", "pixels": 96, "inputs": 9, "outputs": 32}, 0)
    assert dict(zip(depthwise["loop_dims"], depthwise["loop_sizes"], strict=True)) == {
        **{"B": 1, "G": 32, "K": 1, "C": 1, "OY": 8, "OX": 12, "FY": 3, "FX": 3}
    }
    (spread,) = _worker.mapping("depthwise", [16, 8, 4])
    # Over pixels, groups and taps: of channels to sum up there is one.
    assert spread["spatial_mapping"] == {"D1": ["FX, 3", "FY, 3"], "D2": ["G, 8"], "D3": ["OX, 4"]}
    assert _worker.mapping("depthwise", [8, 8, 4])[0]["spatial_mapping"]["D1"] == ["FX, 3"]
    assert _worker.rectangle(7) == (1, 7)


@pytest.mark.parametrize("name", ["accelerators", "accelerators.workloads"])
def test_importing_it_is_light(name):
    code = f"import sys, tilewright_study.{name}; assert not {{'torch', 'zigzag', 'onnx', 'sympy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_model_itself_gives_costs(tmp_path, monkeypatch):
    """With the extra: a product that fills the array takes as many cycles as it has products, and half of it half."""
    try:
        accelerators.version()
    except Unavailable as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    whole, half = Shape("product", 1024, 256, 256), Shape("product", 1024, 256, 128)
    depthwise = Shape("depthwise", 1024, 9, 64)
    found = accelerators.costs(Hardware(16, 8, 4, 128, 128, 128), [whole, half, depthwise], 4)
    ideal = whole.pixels * whole.inputs * whole.outputs / 512
    assert ideal <= found[whole].cycles < 1.2 * ideal
    assert 1.8 < found[whole].cycles / found[half].cycles < 2.2 and found[whole].pj > 1.5 * found[half].pj
    # Spread over pixels and groups: far from one product in a cycle.
    assert found[depthwise].cycles < 1024 * 9 * 64 / 16
    # It writes where it stands; only the cache is left.
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
