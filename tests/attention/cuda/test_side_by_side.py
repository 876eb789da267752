"""Launches of a round side by side: streams that are recorded where there is no GPU, and a GPU where there is one."""

from contextlib import contextmanager, nullcontext
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from helpers import plans
from helpers.gpu import TRITON_DEVICE
from tilewright import reference
from tilewright.attention.cuda import executor as cuda_executor
from tilewright.core.errors import DeviceError
from tilewright.devices.cuda import launcher

needs_gpu = pytest.mark.skipif(TRITON_DEVICE == "cpu", reason="runs streams of a GPU, and this machine has none")
OPTIONS = {"heads": 2, "head_dim": 32, "dtype": torch.float16, "device": TRITON_DEVICE}
DENSE = plans.pattern(400, 300, 0.1, n_global=3)


def prepared(names=("16x1", "64x1"), rounds=1, **options):
    """An executor of a random schedule with split blocks, and its graph."""
    pattern = plans.reordered(DENSE)
    cover = plans.covers(pattern, names)
    schedule = plans.scheduled(cover, split_keys=64, rounds=rounds)
    order = {"row_order": pattern.row_order, "col_order": pattern.col_order}
    return cuda_executor.prepare(schedule, cover, **OPTIONS | order | options)


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    n_q, n_k = DENSE.shape
    return [torch.randn(1, 2, n, 32, generator=generator).to(TRITON_DEVICE, torch.float16) for n in (n_q, n_k, n_k)]


def assert_right(found, qkv):
    expected = reference.attention(*(x.cpu() for x in qkv), torch.from_numpy(DENSE))
    assert reference.relative_error(found.cpu(), expected) <= reference.TOLERANCE[torch.float16]


# Streams that are recorded


class Recorded:
    """In place of streams: what is done, in order, and where."""

    def __init__(self, n, said):
        self.said, self.here = said, None
        self.places = [nullcontext, *(lambda i=i: self._place(i) for i in range(1, 1 + n))]

    @contextmanager
    def _place(self, i):
        self.here = i
        yield
        self.here = None

    def fork(self, *_):
        self.said.append("fork")

    def join(self, *_):
        self.said.append("join")

    def around(self, calls):
        return [self.fork, *calls, self.join]


@pytest.fixture
def said(monkeypatch):
    """What an executor does, whose launches do nothing but say so; direct ones do, too."""
    said, made = [], []

    def beside(device, n):
        made.append(Recorded(n, said) if n else None)
        return made[-1]

    def name(launch):
        return launch.lists.rows, getattr(made[-1], "here", None)

    def direct(launch, *_):
        at = name(launch)
        return lambda *addresses: said.append((*at, len(addresses)))

    monkeypatch.setattr(launcher, "beside", beside)
    monkeypatch.setattr(cuda_executor.Launch, "__call__", lambda launch, *_: said.append(name(launch)))
    monkeypatch.setattr(cuda_executor.Launch, "direct", direct)
    return said


def test_tiles_of_a_round_run_between_fork_and_join(said):
    call, qkv = prepared(("16x1", "64x1", "32x1")), tokens()
    call(*qkv)
    longest = [launch.lists.rows for launch in call.launches]
    first = ["fork", (longest[0], None), (longest[1], 1), (longest[2], 2), "join"]
    assert said == first and sorted(longest) == [16, 32, 64]
    said.clear()
    call(*qkv)
    assert said == [(*step, 4) if isinstance(step, tuple) else step for step in first]


def test_rounds_follow_one_another(said):
    call = prepared(rounds=2)
    call(*tokens())
    assert [step if isinstance(step, str) else step[1] for step in said] == ["fork", None, 1, "join"] * 2


def test_one_tile_takes_no_other_stream(said):
    call = prepared(["16x1"], rounds=2)
    call(*tokens())
    assert said == [(16, None)] * 2


def test_the_longest_items_come_first():
    for launches in prepared(("16x1", "64x1", "32x1"), rounds=2)._rounds:
        sizes = [each.lists.rows * each.lists.step_keys * each.lists.items[:, 4].max() for each in launches]
        assert sizes == sorted(sizes, reverse=True) and len(sizes) == 3


def test_a_launch_that_is_refused_joins_the_streams(said, monkeypatch):
    def refused(launch, *_):
        raise DeviceError("too large")

    call = prepared()
    monkeypatch.setattr(cuda_executor.Launch, "__call__", refused)
    with pytest.raises(DeviceError, match="too large"):
        call(*tokens())
    assert said == ["fork", "join"]


def test_events_order_the_streams(monkeypatch):
    """Each stream begins after its own, and ends before it goes on: whatever is on none of them is not waited for."""
    said = []

    class Event:
        def record(self, stream):
            self.of = stream
            said.append(("record", stream))

        def wait(self, stream):
            said.append((stream, "waits for", self.of))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    beside = launcher.Beside("own", ["a", "b"])
    calls = beside.around([lambda *_: said.append("first"), lambda *_: said.append("second")])
    for call in calls:
        call(1, 2, 3, 4)
    begin = [("record", "own"), ("a", "waits for", "own"), ("b", "waits for", "own")]
    end = [("record", "a"), ("own", "waits for", "a"), ("record", "b"), ("own", "waits for", "b")]
    assert said == [*begin, "first", "second", *end]
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: SimpleNamespace(stream=stream))
    own, *others = beside.places
    assert own is nullcontext and [place().stream for place in others] == ["a", "b"]


def test_a_cpu_runs_launches_one_after_another():
    assert launcher.beside(torch.device("cpu"), 2) is None


def test_several_tiles_attend_rightly():
    call, qkv = prepared(), tokens()
    for _ in range(2):
        assert_right(call(*qkv), qkv)


# On a GPU


@needs_gpu
def test_calls_on_several_streams_at_once():
    call, failed = prepared(("16x1", "64x1", "32x1")), []

    def work(seed):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(20):
                qkv = tokens(seed + i % 3)
                found = call(*qkv)
                stream.synchronize()
                try:
                    assert_right(found, qkv)
                except AssertionError as error:
                    failed.append(error)

    threads = [Thread(target=work, args=(10 * seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@needs_gpu
def test_a_result_that_is_read_at_once_is_complete():
    call, given = prepared(), [tokens(seed) for seed in range(5)]
    for qkv in given:
        call(*qkv)
    # Nothing waits for the device: results are read on the stream of the calls, and memory is used again at once.
    found = [sum(call(*qkv).double() for _ in range(20)) / 20 for qkv in given]
    for mean, qkv in zip(found, given, strict=True):
        assert_right(mean.half(), qkv)


@needs_gpu
@pytest.mark.parametrize("warm", ["same-stream", "other-stream"])
def test_a_captured_call_forks_and_joins_in_its_graph(warm):
    call, qkv = prepared(), tokens()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream if warm == "same-stream" else torch.cuda.current_stream()):
        call(*qkv)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        found = [call(*qkv) for _ in range(3)]
    for seed in (1, 2):
        for x, other in zip(qkv, tokens(seed), strict=True):
            x.copy_(other)
        graph.replay()
        for each in found:
            assert_right(each, qkv)
    # And outside of a graph after it.
    assert_right(call(*qkv), qkv)
