"""Steps with a table of biases that were taken down and are made again, by the host's least work.

Where there is no GPU, what would be launched directly runs under Triton's interpreter.
"""

from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright as tw
from helpers import plans
from helpers.cases import rest_slow
from helpers.direct import Kernel
from helpers.gpu import TRITON_DEVICE as DEVICE
from tilewright import graph, reference
from tilewright.attention import backends
from tilewright.attention.cuda import (
    backward,
    backward_kernels,
    bias_gradients,
    bias_kernels,
    tile_kernel,
)
from tilewright.attention.cuda import executor as cuda_executor
from tilewright.attention.masks import Bias
from tilewright.attention.units import Units
from tilewright.core import _internals
from tilewright.core.errors import DeviceError, PatternError
from tilewright.devices.cuda import launcher, tape

H, D, T, N = 2, 32, 11, 60
# Of so many tokens, one that sees all has lists of its own: two launches of each kernel, side by side.
MANY = 130
# Of torch, what makes memory and views: no more may come between launches that are taken down.
MAKING = {"empty", "new_empty", "new_empty_strided", "empty_strided", "detach", "view", "slice", "select"}
MAKING |= {"split_with_sizes", "_unsafe_view", "reshape", "_reshape_alias", "as_strided", "alias", "unbind"}


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The kernels that were launched, directly and through Triton; new memory holds NaN."""
    found = SimpleNamespace(direct=[], usual=[])
    if DEVICE == "cpu":
        made = {}
        for module in (tile_kernel, backward_kernels, bias_kernels):
            for name in filter(lambda name: name.startswith("tilewright_"), dir(module)):
                made[name] = Kernel(getattr(module, name), found.direct, found.usual)
                monkeypatch.setattr(module, name, made[name])
        # Launches hold their kernel since they were defined.
        monkeypatch.setattr(cuda_executor.Launch, "kernel", made["tilewright_tile_attention"])
        monkeypatch.setattr(backward.QueryLaunch, "kernel", made["tilewright_query_gradients"])
        monkeypatch.setattr(backward.KeyLaunch, "kernel", made["tilewright_key_gradients"])
        monkeypatch.setattr(_internals, "triton_launcher", lambda compiled, *_: (compiled.launch, (), False))
        torch.use_deterministic_algorithms(True)
    yield found
    torch.use_deterministic_algorithms(False)


def seeing(n=N):
    """A pattern in which all see a token, which sees all."""
    dense = plans.pattern(n, n, 0.1, n_global=1, empty=0)
    dense[0] = dense[:, 0] = True
    return dense


def index(rows, cols):
    return (5 * rows + 3 * cols) % T


def table_of(seed=0, dtype=torch.float32):
    # Values that no float16 rounds.
    values = torch.randint(-64, 64, (H, T), generator=torch.Generator().manual_seed(seed)) / 16
    return values.to(DEVICE, dtype)


def tokens(seed=0, batch=1, n=N):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, H, n, D, generator=make).to(DEVICE) for _ in range(4)]


def prepared(dense=None, names=("16x1", "16x16"), **options):
    dense = seeing() if dense is None else dense
    bias = Bias(table_of(seed=9).cpu(), index)
    given = {"bias": bias, "split_keys": 32, "region_rows": 16, "rounds": 1, "device": DEVICE, **options}
    return plans.prepared(cuda_executor.prepare, dense, names, tuple(tokens(n=len(dense))[:3]), **given)[0]


def step(call, table, q, k, v, grad, of_bias=True):
    """``(out, dq, dk, dv)``, and the gradient of the table `of_bias`."""
    now = call.with_bias(table)
    out = now(q, k, v)
    differentiated = backward.gradients_with_bias if of_bias else backward.gradients
    return out, *differentiated(now, q, k, v, out, grad)


def usual(call, table, q, k, v, grad, of_bias=True):
    """What `step` returns, the usual way."""
    out, prepared = call(q, k, v, table), backward.prepared(call)
    *found, last = prepared._made(of_bias, q, k, v, out, grad.contiguous(), table)
    return out, *found, prepared._of_bias.of_table(last) if of_bias else last


def assert_same(found, expected):
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def replays(call):
    """How many calls of an executor were taken down, forward and backward."""
    both = call._of_tables, *backward.prepared(call)._of_tables.values()
    found = [x for calls in both for _, known in calls._known.items() for x in known]
    return sum(isinstance(x, tape.Replay) for x in found)


def test_a_plan_makes_calls_with_values_of_a_bias_again(launched, monkeypatch):
    dense = seeing(N)
    plan = tw.plan(dense, heads=H, head_dim=D, device=DEVICE, solver="greedy", bias=Bias(table_of(9).cpu(), index))
    if DEVICE == "cpu":
        call = prepared(dense)
        monkeypatch.setattr(plan, "_prepare", lambda *_, **__: call)
        monkeypatch.setattr(backends.executor("cpu"), "READS_TABLES", True, raising=False)
    with torch.no_grad():
        for seed in range(3):
            plan(*tokens(seed)[:3], bias=table_of(seed))
        launched.usual.clear()
        q, k, v, _ = tokens(3)
        with monkeypatch.context() as patched:
            patched.setattr(plan, "_executor", None)
            found = [plan(q, k, v, bias=table_of(seed)) for seed in (3, 4)]
            found.append(torch.ops.tilewright.attend_direct(q, k, v, plan.digest(), False, None, table_of(3)))
        assert not launched.usual
        for out, seed in zip(found, (3, 4, 3), strict=True):
            bias = table_of(seed)[:, index(np.arange(N)[:, None], np.arange(N))]
            wanted = reference.attention(*(x.cpu() for x in (q, k, v)), torch.from_numpy(dense), bias=bias.cpu())
            assert reference.relative_error(out.cpu(), wanted) <= reference.TOLERANCE[torch.float32]
        other = plan(*tokens(4, batch=2)[:3], bias=table_of(4))
        assert len(other) == 2
    with pytest.raises(PatternError, match="bias"):
        plan(q, k, v, bias=table_of(3)[:1])


@pytest.mark.parametrize(
    "of_bias, dtype, n",
    [(True, torch.float32, MANY), (True, torch.bfloat16, N), (False, torch.float32, N)],
)
def test_steps_made_again_are_those_of_the_usual_way(launched, of_bias, dtype, n):
    call, other = prepared(seeing(n)), prepared(seeing(n))
    for seed in range(2):
        given = table_of(seed, dtype), *tokens(seed, n=n)
        assert_same(step(call, *given, of_bias), usual(other, *given, of_bias))
        assert replays(call) == 2
    launched.usual.clear(), launched.direct.clear()
    step(call, table_of(5, dtype), *tokens(5, n=n), of_bias)
    names = [kernel.fn.__name__ for kernel in launched.direct]
    assert not launched.usual
    if DEVICE == "cpu" and n == MANY:
        n, sums = len(call.launches), backward.prepared(call)._of_bias
        lists = {half: len(each) for half, each in backward.prepared(call).launches.items()}
        assert n >= 2 and lists == {"queries": 2, "keys": 2}
        # Of the forward, of the backward, and of the table's gradient: parts, their sums, and those of each entry.
        assert len(names) == 3 * n + 3 * 2 + 1 + 2 * 2 + (2 * 2 + len(sums._steps) if of_bias else 0)
        assert names.count("tilewright_spread_peaks") == 1


@pytest.mark.parametrize(
    "units", rest_slow([Units("image", H, (0, 1)), Units("both", H, (0, 1, 1, 0))], 1), ids=lambda x: x.by
)
def test_steps_of_several_patterns(launched, units):
    found = [seeing(), seeing()]
    found[1][3:9, 10:30] = True
    stacked = graph.stacked([graph.from_pattern(x) for x in found])
    covers = plans.covers(stacked, ("16x1", "16x16"), 16)
    given = {"heads": H, "head_dim": D, "dtype": torch.float32, "device": DEVICE, "units": units}
    given |= {"row_order": range(N), "col_order": range(N), "bias": Bias(table_of(seed=9).cpu(), index)}
    call, other = (cuda_executor.prepare(plans.scheduled(covers, 32), covers, **given) for _ in range(2))
    for seed in range(2):
        launched.usual.clear()
        step_of = table_of(seed), *tokens(seed, batch=2)
        found = step(call, *step_of)
        assert bool(launched.usual) == (seed == 0) or DEVICE != "cpu"
        assert_same(found, usual(other, *step_of))
    assert replays(call) == 2


def test_a_new_layout_is_taken_down_of_its_own(launched):
    call = prepared()
    fused = torch.randn(2, N, 3, H, D, device=DEVICE).permute(2, 0, 3, 1, 4)
    strided = [x.mT.contiguous().mT for x in tokens(1)]
    for number, (q, k, v, grad) in enumerate(
        [tokens(0), tokens(0, batch=2), [*fused, tokens(3, batch=2)[3]], [*tokens(4)[:3], strided[3]]], 1
    ):
        for seed in range(2):
            given = table_of(seed), q, k, v, grad
            launched.usual.clear()
            found = step(call, *given)
            # A gradient in other strides is copied first.
            assert bool(launched.usual) == (seed == 0 and number < 4) or DEVICE != "cpu"
            assert_same(found, usual(call, *given))
        assert replays(call) == 2 * min(number, 3)


def misaligned(x):
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


# The table, a token and the gradient.
@pytest.mark.parametrize("which", rest_slow([0, 3, 4], 0, 2))
def test_misaligned_tensors_go_the_usual_way(launched, which):
    call = prepared()
    given = [table_of(1), *tokens(1)]
    given[which] = misaligned(given[which])
    expected = usual(prepared(), *given)
    for _ in range(3):
        assert_same(step(call, *given), expected)
    # The gradient is no part of the forward.
    assert replays(call) == (1 if which == 4 else 0)
    aligned = [x.clone() for x in given]
    for _ in range(2):
        assert_same(step(call, *aligned), usual(call, *aligned))
    assert replays(call) == 2


@pytest.mark.parametrize("case", ["queries that see nothing", "keys that nothing sees", "table in other strides"])
def test_what_torch_writes_goes_the_usual_way(launched, case):
    dense, table = seeing(), table_of(1)
    if case == "queries that see nothing":
        dense[7] = False
    elif case == "keys that nothing sees":
        dense[:, 7] = False
    else:
        table = torch.stack((table, table), 2)[..., 0]
    call = prepared(dense)
    expected = usual(prepared(dense), table, *tokens())
    for _ in range(3):
        found = step(call, table, *tokens())
        assert_same(found, expected)
    assert replays(call) == (1 if case == "keys that nothing sees" else 0)
    if case == "keys that nothing sees":
        assert not found[2][:, :, 7].any()


def test_gradients_that_overlap_go_the_usual_way(launched):
    """As a sum has them. What cannot be taken down goes through Triton once."""
    call, (q, k, v, _) = prepared(), tokens()
    grad = torch.ones(1, H, 1, D, device=DEVICE).expand(1, H, N, D)
    for _ in range(3):
        launched.usual.clear()
        assert_same(step(call, table_of(), q, k, v, grad), usual(call, table_of(), q, k, v, grad.clone()))
    assert not launched.usual and replays(call) == 1


def test_entries_that_no_pair_has_have_empty_lists():
    entry = torch.tensor([3, 0, 3, 3, 0, 5]).numpy()
    at, lists, more, sums = bias_gradients.listed(10 * torch.arange(6).numpy(), entry, 7)
    assert sums == 7 and not len(more) and sorted(lists[:, 2]) == list(range(7))
    found = {into: sorted(at[begin : begin + length]) for begin, length, into in lists}
    assert found == {0: [10, 40], 1: [], 2: [], 3: [0, 20, 30], 4: [], 5: [50], 6: []}


@pytest.mark.parametrize("longest", rest_slow([2, 512], 0))
def test_sums_in_several_pieces(monkeypatch, longest):
    monkeypatch.setattr(bias_gradients, "LONGEST", longest)
    call, other = prepared(), prepared()
    # Other entries have no pair.
    alone = Bias(table_of().cpu(), lambda rows, cols: 0 * index(rows, cols) + 3)
    for seed in range(2):
        given = table_of(seed), *tokens(seed)
        assert_same(step(call, *given), usual(other, *given))
    made = prepared(bias=alone)
    for seed in range(2):
        d_table = step(made, table_of(seed), *tokens(seed))[4]
        assert not d_table[:, [0, 1, 2, *range(4, T)]].any()


class Watched(TorchDispatchMode):
    """The names of torch's operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def test_between_launches_torch_makes_memory_and_views_alone(monkeypatch):
    call, (q, k, v, grad), table = prepared(), tokens(), table_of()
    out, *_ = step(call, table, q, k, v, grad)
    made = backward.prepared(call)
    if DEVICE == "cpu":
        # The interpreter copies what kernels read.
        monkeypatch.setattr(Kernel, "__getitem__", lambda *_: lambda *given, **options: SimpleNamespace(launch=None))
    with tape.Tape(call.device).running(), Watched() as watched:
        call._with_table(q, k, v, table)
        made._made(True, q, k, v, out, grad, table)
    assert "new_empty" in watched.names and watched.names <= MAKING, watched.names - MAKING


def test_a_capture_comes_after_a_step(launched, monkeypatch):
    call, given = prepared(), (table_of(), *tokens())
    with monkeypatch.context() as captured:
        captured.setattr(launcher, "capturing", lambda: True)
        with pytest.raises(DeviceError, match="a CUDA graph is being captured"):
            step(call, *given)
    expected = step(call, *given)
    monkeypatch.setattr(launcher, "capturing", lambda: True)
    for calls in (call._of_tables, backward.prepared(call)._of_tables[True]):
        # A capture has a stream of its own, mostly: nothing is taken down there.
        assert_same(step(call, *given), expected)
        monkeypatch.setattr(calls, "_stream", lambda: 7)
    launched.usual.clear()
    assert_same(step(call, *given), expected)
    assert replays(call) == 2
    with pytest.raises(DeviceError, match="a CUDA graph is being captured"):
        step(call, table_of(), *tokens(batch=2))


def test_streams_fork_and_join_around_launches_side_by_side(monkeypatch):
    said, events = [], iter(range(99))

    class Event:
        def __init__(self):
            self.number = next(events)

        def record(self, stream):
            said.append(("record", self.number, stream))

        def wait(self, stream):
            said.append(("wait", self.number, stream))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    streams = launcher.Beside("own", ["other"])
    x = torch.zeros(4)
    taken = tape.Tape(torch.device("cpu"), x)
    on = iter((5, 6))
    monkeypatch.setattr(taken, "_stream", lambda: next(on))
    compiled = SimpleNamespace(launch=lambda stream, *_: said.append(stream))
    monkeypatch.setattr(_internals, "triton_launcher", lambda made, grid, stream: (made.launch, (stream,), False))
    with taken.running():
        streams.fork()
        for _ in range(2):
            launcher.taken_down(compiled, (1, 1, 1), (x,), ())
        streams.join()
    taken.settle()
    said.clear()
    monkeypatch.undo()
    assert taken.replay(x)(x) == []
    assert said == [
        ("record", 0, "own"), ("wait", 0, "other"), 5, 6, ("record", 1, "other"), ("wait", 1, "own"),
    ]  # fmt: skip


def test_steps_of_several_threads():
    call, found = prepared(), {}
    expected = {seed: usual(prepared(), table_of(seed), *tokens(seed)) for seed in range(4)}

    def work(seed):
        found[seed] = [step(call, table_of(seed), *tokens(seed)) for _ in range(2)]

    threads = [Thread(target=work, args=(seed,)) for seed in expected]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for seed, steps in found.items():
        for each in steps:
            assert_same(each, expected[seed])
    assert len(found) == 4
