from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tilewright import devices
from tilewright.attention import backends
from tilewright.core.errors import ArtifactError, DeviceError
from tilewright.devices.cpu import facts as cpu
from tilewright.devices.cuda import facts as cuda


@pytest.fixture
def device():
    return devices.describe("cpu")


def test_a_cpu_states_its_cores_caches_and_versions(device):
    assert device["kind"] == "cpu" and device["name"]
    assert 1 <= device["threads"] == torch.get_num_threads()
    assert device["cores"] >= 1
    assert 0 < device["l1_bytes"] < device["l2_bytes"] <= device["l3_bytes"] < device["memory_bytes"]
    assert device["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_a_description_cannot_be_altered_for_others(device):
    device["name"] = "another"
    assert devices.describe("cpu")["name"] != "another"


@pytest.mark.parametrize(
    "change", [{"name": "another"}, {"threads": 77}, {"versions": {"torch": "1", "numpy": np.__version__}}], ids=str
)
def test_what_changes_timing_changes_the_id(device, change):
    assert devices.device_id(device | change) != devices.device_id(device)


def test_what_does_not_change_timing_keeps_the_id(device):
    versions = device["versions"] | {"numpy": "99"}
    same = device | {"memory_bytes": 1, "cores": 99, "versions": versions}
    assert devices.device_id(same) == devices.device_id(dict(device)) and not devices.differing(device, same)


def test_limits_come_from_the_description_alone():
    device = {"kind": "cpu", "threads": 4, "memory_bytes": 1000}
    limits = devices.limits(device, rounds=3, max_tile_kinds=2)
    assert (limits.lanes, limits.rounds, limits.max_tile_kinds) == (4, 3, 2)
    assert devices.limits(device, max_tile_kinds=9).max_tile_kinds == devices.limits(device).max_tile_kinds == 4
    assert limits.per_block == {"working_set_bytes": 250} and limits.envelope == {"working_set_bytes": 1000}


def test_a_gpu_runs_one_tile_a_round_on_its_multiprocessors():
    facts = {"kind": "cuda", "multiprocessors": 132, "shared_bytes": 1000, "memory_bytes": 5000, "launch_us": 1.5}
    limits = devices.limits(facts)
    assert (limits.lanes, limits.max_tile_kinds, limits.round_us) == (132, 1, 1.5)
    assert limits.per_block == {"shared_bytes": 1000} and limits.rounds > 1
    assert devices.limits(facts, rounds=1).rounds == 1


@pytest.mark.parametrize("tool", ["no-such-tool", "true"], ids=["missing", "silent"])
def test_a_gpu_whose_driver_does_not_answer_is_refused(tool, monkeypatch):
    monkeypatch.setattr(cuda, "TOOL", tool)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="some-uuid"))
    with pytest.raises(DeviceError, match=f"expected {tool} to state driver_version of GPU some-uuid"):
        cuda.query_gpu("driver_version")


@pytest.mark.parametrize(
    "ask",
    [devices.describe, backends.executor, backends.probe, lambda kind: devices.limits({"kind": kind})],
    ids=["describe", "executor", "probe", "limits"],
)
def test_a_kind_that_is_not_known_is_refused_by_name(ask):
    with pytest.raises(DeviceError, match=r"'abacus'.*known: cpu, cuda"):
        ask("abacus")


def test_a_description_without_a_fact_is_refused():
    with pytest.raises(ArtifactError, match="lacks 'memory_bytes'"):
        devices.limits({"kind": "cpu", "threads": 2})


def test_a_machine_that_does_not_state_its_caches_gets_assumed_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "_CACHES", tmp_path)
    assert cpu.describe()["l2_bytes"] == cpu._UNKNOWN_CACHE[2]
