import pytest
import torch

from tilewright import hardware
from tilewright.devices import cpu
from tilewright.errors import ArtifactError, DeviceError


@pytest.fixture
def device():
    return hardware.describe("cpu")


def test_a_cpu_tells_its_cores_caches_and_versions(device):
    assert device["kind"] == "cpu" and device["name"]
    assert 1 <= device["threads"] == torch.get_num_threads()
    assert device["cores"] >= 1
    assert 0 < device["l1_bytes"] < device["l2_bytes"] <= device["l3_bytes"] < device["memory_bytes"]
    assert device["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_a_description_cannot_be_altered_for_others(device):
    device["name"] = "another"
    assert hardware.describe("cpu")["name"] != "another"


@pytest.mark.parametrize("change", [{"name": "another"}, {"threads": 77}, {"versions": {}}], ids=str)
def test_what_changes_timing_changes_the_id(device, change):
    assert hardware.device_id(device | change) != hardware.device_id(device)


def test_what_does_not_change_timing_keeps_the_id(device):
    assert hardware.device_id(device | {"memory_bytes": 1, "cores": 99}) == hardware.device_id(dict(device))


def test_limits_come_from_the_description_alone():
    limits = hardware.limits(
        {"kind": "cpu", "threads": 4, "memory_bytes": 1000}, rounds=3, max_tile_kinds=2, conflicts=[("8x1", "16x1")]
    )
    assert (limits.slots, limits.rounds, limits.max_tile_kinds) == (4, 3, 2)
    assert limits.per_block == {"working_set_bytes": 250} and limits.envelope == {"working_set_bytes": 1000}
    assert limits.conflicts == (("8x1", "16x1"),)


@pytest.mark.parametrize(
    "ask", [hardware.describe, lambda kind: hardware.limits({"kind": kind})], ids=["describe", "limits"]
)
@pytest.mark.parametrize("kind", ["cuda", "abacus"])
def test_a_device_that_is_not_there_is_refused_by_name(ask, kind):
    with pytest.raises(DeviceError, match=f"'{kind}'.*known: cpu"):
        ask(kind)


def test_a_description_without_a_fact_is_refused():
    with pytest.raises(ArtifactError, match="lacks 'memory_bytes'"):
        hardware.limits({"kind": "cpu", "threads": 2})


def test_a_machine_that_does_not_tell_its_caches_gets_assumed_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "_CACHES", tmp_path)
    assert cpu.describe()["l2_bytes"] == cpu._UNKNOWN_CACHE[2]
