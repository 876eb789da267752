"""What every target offers, on its device or, for Triton's kernels without a GPU, under the interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tilewright as tw
from helpers import plans
from helpers.gpu import TRITON_DEVICE
from tilewright import attention, devices, graph, reference
from tilewright.attention import backends, blocks, profile, schedule
from tilewright.attention.blocks import tiles, work
from tilewright.attention.masks import Bias
from tilewright.attention.measure import measure
from tilewright.core.errors import ArtifactError, DeviceError, PatternError
from tilewright.core.timing import time_call, time_gpu
from tilewright.devices import qkv
from tilewright_study import provenance
from tilewright_study.stages import schedule as schedule_stage

OTHERS = Path(__file__).parents[1] / "helpers" / "devices_of_others"
N_Q, N_K, H, D, BATCH = 75, 63, 2, 16, 2
SIZES = {"heads": H, "head_dim": D}
NAMES = ["16x1", "16x16"]


@pytest.fixture
def abacus(monkeypatch):
    """A device that the package does not have: folders that it finds and a word in `NAMES`."""
    for package, place in ((tw, OTHERS), (devices, OTHERS / "devices"), (attention, OTHERS / "attention")):
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(place)])
    monkeypatch.setattr(devices, "NAMES", (*devices.NAMES, "abacus"))
    yield "abacus"
    devices._described.cache_clear()
    for name in [name for name in sys.modules if ".abacus" in name]:
        del sys.modules[name]


@pytest.fixture(params=[*devices.NAMES, "abacus"])
def kind(request):
    return request.getfixturevalue("abacus") if request.param == "abacus" else request.param


@pytest.fixture
def device(kind):
    """The description of the target's device."""
    try:
        return devices.describe(kind)
    except DeviceError as error:
        pytest.skip(f"{kind}: {error}")


@pytest.fixture(scope="module")
def dense():
    return plans.pattern(N_Q, N_K, n_global=2, empty=3)


def where(kind):
    """Options for `prepare`, and the device of its tensors: CUDA kernels are interpreted on a machine without a GPU."""
    return ({"device": TRITON_DEVICE}, TRITON_DEVICE) if devices.facts(kind).CUDA else ({}, "cpu")


def tokens(device, batch=BATCH, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, H, n, D, generator=generator).to(device, dtype) for n in (N_Q, N_K, N_K)]


def prepared(kind, dense, **options):
    """``(executor, its arguments, what they should give)``."""
    more, device = where(kind)
    prepare = backends.executor(kind).prepare
    return plans.prepared(prepare, dense, NAMES, tokens(device), split_keys=32, **options, **more)


def check_executor(executor, arguments, expected, least_pairs):
    """Assert what the contract says of a prepared executor."""
    result = executor(*arguments)
    assert reference.relative_error(result.cpu(), expected) <= reference.TOLERANCE[torch.float32]
    assert (result.cpu()[(expected == 0).expand_as(result)] == 0).all(), "a query without keys does not give zeros"
    assert result.stride() == qkv.empty(arguments[0], result.shape[2]).stride()
    assert len(executor.launches) >= 1
    assert isinstance(executor.memory_bytes, int) and executor.memory_bytes > 0
    assert isinstance(executor.executed, int) and least_pairs <= executor.executed <= 16 * least_pairs
    one, two = (executor.peak_bytes(batch) for batch in (1, 2))
    assert isinstance(one, int) and one >= result[:1].numel() * result.element_size() and one < two <= 2 * one


def least_pairs(dense):
    """Pairs that the blocks of a random schedule have, as `plans.prepared` makes it."""
    cover = plans.covers(plans.reordered(dense, 0), NAMES)
    chosen, total = plans.scheduled(cover, 32, 0), 0
    for t, one in enumerate(cover.values()):
        item = chosen.tile == t
        runs = (chosen.run_hi - chosen.run_lo)[item]
        total += int((one.rows[chosen.block[item]] * runs).sum()) * one.tile.run
    return total


TABLE = Bias(torch.linspace(-4, 4, 2 * 9).view(H, 9), lambda rows, cols: (rows + 2 * cols) % 9)


@pytest.mark.parametrize("ordered", [False, True], ids=["natural", "ordered"])
@pytest.mark.parametrize("options", [{}, {"bias": TABLE, "scale": 0.5}], ids=["plain", "bias"])
def test_an_executor_computes_attention_and_says_what_it_takes(kind, dense, ordered, options):
    check_executor(*prepared(kind, dense, ordered=ordered, **options), least_pairs(dense))


class Broken:
    """An executor in which something is other than it was."""

    def __init__(self, right, **changes):
        self.right, self.changes = right, changes

    def __getattr__(self, name):
        return self.changes[name] if name in self.changes else getattr(self.right, name)

    def __call__(self, *arguments):
        return self.changes.get("call", lambda result: result)(self.right(*arguments))


@pytest.mark.parametrize(
    "changes",
    [
        {"call": lambda result: result * (1 + 1e-3)},
        {"call": lambda result: result + (result == 0) * 1e-6},
        {"call": lambda result: result.contiguous()},
        {"launches": ()},
        {"memory_bytes": 0},
        {"executed": 1},
        {"executed": 10**9},
        {"peak_bytes": lambda batch: 64 * batch},
        {"peak_bytes": lambda batch: 10**9},
    ],
    ids=["values", "zeros", "layout", "launches", "memory", "few-pairs", "many-pairs", "little-memory", "one-batch"],
)
def test_an_executor_that_breaks_the_contract_is_found(dense, changes):
    executor, arguments, expected = prepared("cpu", dense)
    with pytest.raises(AssertionError):
        check_executor(Broken(executor, **changes), arguments, expected, least_pairs(dense))


def test_an_executor_refuses_other_tensors_than_planned(kind, dense):
    executor, (q, k, v), _ = prepared(kind, dense)
    for wrong in ((q[:, :1], k, v), (q.double(), k.double(), v.double()), (q, k[:, :, 1:], v[:, :, 1:])):
        with pytest.raises(PatternError, match="expected"):
            executor(*wrong)
    with pytest.raises(PatternError, match="no backward"):
        executor(q.clone().requires_grad_(), k, v)
    with pytest.raises(DeviceError, match="expected a tensor on"):
        executor(*(x.to("meta") for x in (q, k, v)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_order": np.arange(3)}, "row_order: expected an order of 75 tokens"),
        ({"bias": torch.zeros(H, 3, 3)}, "bias: expected shape"),
    ],
    ids=["order", "bias"],
)
def test_what_does_not_fit_is_refused_before_it_runs(kind, dense, options, message):
    cover = plans.covers(graph.from_pattern(dense), NAMES)
    more, _ = where(kind)
    with pytest.raises(PatternError, match=message):
        backends.executor(kind).prepare(plans.scheduled(cover), cover, **SIZES, dtype=torch.float32, **options, **more)


def test_blocks_of_another_schedule_are_refused(kind, dense):
    cover = plans.covers(graph.from_pattern(dense), NAMES)
    other = plans.covers(graph.from_pattern(plans.pattern(40, 30, seed=5)), NAMES)
    with pytest.raises(ArtifactError, match="graph"):
        backends.executor(kind).prepare(plans.scheduled(cover), other, **SIZES, dtype=torch.float32)


def test_a_call_is_timed_as_the_facts_say(kind, device, dense):
    executor, arguments, _ = prepared(kind, dense)
    timer = time_gpu if devices.facts(kind).GPU_TIMER else time_call
    timing = timer(lambda: executor(*arguments), min_reps=3, max_seconds=0.1, rse_target=1.0)
    assert timing.p50_us > 0
    # A capture needs a call that leaves the host alone; without one, events time the calls.
    assert (timing.method == "graph") == devices.facts(kind).GPU_TIMER


def test_facts_say_what_plans_need(kind):
    facts = devices.facts(kind)
    assert all(tiles.parse(name).rows >= facts.FEWEST_ROWS >= 1 for name in facts.TILES) and facts.TILES
    assert facts.SPLIT_KEYS is None or facts.SPLIT_KEYS >= 1
    assert set(facts.MACHINE) <= set(facts.IDENTITY) and "kind" in facts.MACHINE
    assert facts.TORCH_DEVICE in ("cpu", "cuda") and (facts.TORCH_DEVICE == "cuda") == facts.CUDA
    assert all(isinstance(getattr(facts, name), bool) for name in ("CUDA", "GPU_TIMER", "EXCLUSIVE", "MIXES"))
    # CUDA's events and graphs need its tensors.
    assert facts.CUDA or not facts.GPU_TIMER
    assert facts.current() is None or facts.current() >= 0
    assert not facts.EXCLUSIVE or (callable(facts.available) and callable(facts.claim))


def test_a_description_holds_what_others_read(kind, device):
    assert json.loads(json.dumps(device)) == device
    assert device["kind"] == kind and device["name"] and device["threads"] >= 1
    stated = device | device["versions"]
    assert all(stated.get(name) is not None for name in devices.facts(kind).IDENTITY)


def test_a_probe_times_every_shape_that_the_limits_judge(kind, device, dense):
    cover = plans.covers(plans.reordered(dense, **SIZES), ["16x1"])["16x1"]
    measured, items = measure(cover, device=kind, split_keys=32, budget_s=0.05), work.items(cover, 32)
    assert measured.device == device and measured.launch_us >= 0 and measured.tile_us >= 0
    assert [c.items for c in measured.shapes] == items.counts.tolist()
    limits = devices.limits(device)
    for shape in measured.shapes:
        assert 0 < shape.p20_us <= shape.latency_us <= shape.p80_us and shape.alone_us > 0 and shape.occupancy >= 0
        assert {*limits.per_block, *limits.envelope} <= set(shape.resources)


def test_importing_facts_imports_no_torch(kind):
    code = (
        "import sys, tilewright; from tilewright import devices; "
        f"tilewright.__path__ += [{str(OTHERS)!r}]; devices.__path__ += [{str(OTHERS / 'devices')!r}]; "
        f"devices.NAMES += ({kind!r},); devices.facts({kind!r}); devices.offering('packed.executor'); "
        f"devices.modules({kind!r}, 'attention.executor', 'packed.executor', 'slices.executor'); "
        "assert not {'torch', 'triton', 'numba'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_modules_of_a_target_are_declared_for_digests(kind):
    found = devices.modules(kind, "attention.executor", "attention.probe", "packed.executor")
    entered = [f"attention.{kind}.executor", f"attention.{kind}.probe"]
    entered += [f"packed.{kind}.executor"] * devices.has(kind, "packed.executor")
    assert found == tuple(f"tilewright.{name}" for name in (f"devices.{kind}.facts", *entered))
    assert devices.modules(kind) == found[:1]


@pytest.mark.parametrize("kind", devices.NAMES)
def test_a_digest_sees_the_facts_of_its_target_alone(kind):
    seen = provenance.closure("tilewright_study.stages.schedule", *devices.modules(kind))
    assert [name for name in devices.NAMES if f"tilewright.devices.{name}.facts" in seen] == [kind]


# What they do stands in the tests of packed batches and of slices, which run every such executor.
@pytest.mark.parametrize("role", ["packed.executor", "slices.executor", "slices.selection"])
def test_packed_batches_and_slices_are_optional(kind, role):
    if devices.has(kind, role):
        name = "Selection" if role.endswith("selection") else "Executor"
        assert callable(getattr(devices.module(kind, role), name)) and devices.offering(role)[kind]
    else:
        assert kind not in devices.offering(role)


def test_a_new_target_plans_and_runs(abacus, dense, tmp_path):
    q, k, v = tokens("cpu")
    plan = tw.plan(dense, **SIZES, device=abacus, bias=TABLE)
    rows, cols = np.ogrid[:N_Q, :N_K]
    bias = TABLE.table[:, torch.from_numpy(TABLE.index(rows, cols))]
    expected = reference.attention(q, k, v, torch.from_numpy(dense), bias=bias)
    assert tuple(plan.blocks) == devices.facts(abacus).TILES and plan.device == abacus
    plan.save(tmp_path / "p.plan")
    for call in (plan, tw.load(tmp_path / "p.plan"), torch.compile(lambda *qkv: plan(*qkv), backend="eager")):
        assert reference.relative_error(call(q, k, v), expected) <= reference.TOLERANCE[torch.float32]


def test_the_stages_take_a_new_target(abacus, dense, tmp_path):
    ordered = plans.reordered(dense, **SIZES)
    files = {"blocks": [], "profile": []}
    for name, cover in plans.covers(ordered, NAMES).items():
        for what, suffix in (("blocks", "npz"), ("profile", "json")):
            files[what].append(tmp_path / f"{name}.{suffix}")
        blocks.save(files["blocks"][-1], cover)
        profile.save(files["profile"][-1], measure(cover, device=abacus, split_keys=32))
    options = {"solver": ["highs"], "tiles": None, "objective": "sum", "time_limit": 5.0, "gap": 1e-4, "seed": 0}
    options |= {"threads": 1, "rounds": 1, "max_tile_kinds": 2, "output": [tmp_path / "out.json"]}
    schedule_stage.run(**files, **options)
    found = schedule.load(tmp_path / "out.json")
    assert found.device_id == devices.device_id(devices.describe(abacus)) and found.predicted_us > 0
