"""Plans and packings under threads, forks and processes: every result of every call is compared."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from numpy.testing import assert_allclose

import tilewright as tw
from helpers import plans
from helpers.cases import rest_slow
from helpers.threads import threads
from tilewright import graph, networks, reference, slices
from tilewright.attention import reorder
from tilewright.attention.cpu import executor as cpu_executor
from tilewright.devices.cpu import workers as cpu_workers
from tilewright.packed import pack as ragged

H, D = 2, 16
THREADS, CALLS = 8, 100
TOLERANCE = reference.TOLERANCE[torch.float32]
# A child that is not done by then waits for a thread that did not come along.
CHILD_S = 20


def in_child(call, seconds=CHILD_S):
    """Run `call` in a fork; fail with what it raises, or when it is not done in time."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        told = b""
        try:
            call()
        except BaseException:
            told = traceback.format_exc().encode()[-4000:]
        os.write(write, told)
        os._exit(bool(told))
    os.close(write)
    deadline = time.monotonic() + seconds
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read().decode()
    assert done != (0, 0), f"the child was not done after {seconds} s"
    assert done[1] == 0, told


def together(calls):
    """Run all `calls` at the same time, each in a thread of its own; raise what one of them raises."""
    start = threading.Barrier(len(calls))

    def run(call):
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result() for done in [pool.submit(run, call) for call in calls]]


def assert_close(found, expected, atol=TOLERANCE):
    """In numpy, which computes on one core: torch's own operators wait for ever in a fork of whoever used them all."""
    assert_allclose(found.numpy(), expected.numpy(), rtol=0, atol=atol)


def plan_case(seed, n_q, n_k, names, batch=1, **options):
    """A prepared schedule as ``callable()`` that calls it and compares."""
    torch.manual_seed(seed)
    qkv = [torch.randn(batch, H, n, D) for n in (n_q, n_k, n_k)]
    dense = plans.pattern(n_q, n_k, 0.3, seed)
    call, inputs, expected = plans.prepared(cpu_executor.prepare, dense, names, qkv, seed=seed, **options)

    return lambda: assert_close(call(*inputs), expected)


def packing_case(seed, lengths, capacity, n=16):
    """A packing as ``callable()`` that packs, gathers, attends and scatters, and compares."""
    torch.manual_seed(seed)
    keep = torch.rand(len(lengths), n).argsort(1) < torch.tensor(lengths)[:, None]
    x, (q, k, v) = torch.randn(len(lengths), n, 6), torch.randn(capacity, 3, H, D).unbind(1)
    shared, total = ragged.pack(keep, capacity), sum(lengths)
    own = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    transposed = (t[:total].transpose(0, 1)[None] for t in (q, k, v))
    expected = reference.attention(*transposed, own[:, None] == own)[0].transpose(0, 1)

    kept = x * keep[..., None]

    def check():
        for packing in (shared, ragged.pack(keep, capacity, tokens=x)):
            assert_close(packing.attend(q, k, v)[:total], expected)
            assert_close(packing.scatter(packing.gather(x)), kept, 0)

    return check


def plan_cases():
    return [
        plan_case(0, 64, 64, ["16x1", "8x8"], batch=2),
        plan_case(1, 97, 61, ["16x1"], split_keys=16, ordered=True),
        plan_case(2, 40, 90, ["8x8"], split_keys=32, batch=3),
        plan_case(3, 33, 33, ["32x16"], bias=torch.randn(H, 33, 33), ordered=True),
    ]


def packing_cases():
    """Four packings of one layout, hence of one executor, and one of another."""
    alike = [[3, 1, 8, 4], [8, 2, 2, 4], [4, 4, 4, 4], [1, 1, 1, 13]]
    return [*(packing_case(seed, lengths, 16) for seed, lengths in enumerate(alike)), packing_case(4, [5, 2], 12)]


def test_threads_share_plans_and_packings():
    """8 threads of 100 calls each, on plans and packings that all of them share."""
    cases = plan_cases() + packing_cases()

    def calls(first):
        for i in range(CALLS):
            cases[(first + i) % len(cases)]()

    together([lambda first=first: calls(first) for first in range(THREADS)])


def test_threads_make_their_first_calls_together(monkeypatch):
    """The workers are not there yet, and all are to share them; nor is the executor of the plan."""
    monkeypatch.setattr(cpu_workers, "_made", {})
    before = torch.get_num_threads()
    make, check = planned()
    plan = make()

    def call():
        check(plan)
        # Where there are several, workers share the heads of a backward.
        plan(*(x.requires_grad_() for x in torch.randn(3, 1, H, 150, D))).sum().backward()

    together([call] * THREADS)
    assert len(cpu_workers._made) == min(1, before - 1)
    assert torch.get_num_threads() == before
    assert plan._prepared.keys() == {(ordered, -1, tiles) for ordered, tiles in ((0, 0), (1, 0), (0, 1))}


def planned(n_q=150, n_k=150, heads=H, **options):
    """``(make, check)``: what makes a plan, and what calls one with tokens in both orders and compares."""
    dense = plans.pattern(n_q, n_k, 0.3)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, D) for n in (n_q, n_k, n_k))
    pattern, expected = graph.from_pattern(dense), reference.attention(q, k, v, torch.from_numpy(dense))
    chosen = {"reorder": "none", "tiles": ["16x1"], "solver": "greedy", "split_keys": 64, **options}

    ordered = reorder.apply(pattern, chosen["reorder"])[0]
    rows, cols = ordered.row_order, ordered.col_order
    moved, wanted = (q[:, :, rows], k[:, :, cols], v[:, :, cols]), expected[:, :, rows]

    def check(plan):
        assert_close(plan(q, k, v), expected)
        assert_close(plan(*moved, ordered=True), wanted)

    return lambda: tw.plan(pattern, heads=heads, head_dim=D, **chosen), check


@pytest.mark.parametrize("own", [False, True], ids=["torch's threads", "own threads"])
def test_a_thread_that_starts_during_a_call_has_all_cores(own, monkeypatch):
    """Inside of the sums of a backward, of a list of slices, and while workers are made."""
    if own:
        monkeypatch.setattr(cpu_workers, "_parallel", None)
    found = []

    def starting(call):
        def started(*given, **named):
            thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            return call(*given, **named)

        return started

    monkeypatch.setattr(cpu_workers, "_made", {})
    monkeypatch.setattr(cpu_workers.Workers, "run", starting(cpu_workers.Workers.run))
    monkeypatch.setattr(cpu_workers, "use_threads", starting(cpu_workers.use_threads))
    monkeypatch.setattr(cpu_workers, "Barrier", starting(threading.Barrier))
    with threads(2):
        plan = planned()[0]()
        tokens = [x.requires_grad_() for x in torch.randn(3, 1, H, 150, D)]
        plan(*tokens).sum().backward()
        mask = torch.ones(1, 1, 1, 100, dtype=torch.bool)
        slices.attend(*torch.randn(3, 1, H, 100, 64), slices.from_mask(mask, 100, heads=H))
        assert torch.get_num_threads() == 2
    assert len(found) > 5 and set(found) == {2}


def test_a_fork_calls_what_its_parent_prepared():
    for check in plan_cases() + packing_cases():
        # In the parent as well: its threads are those that the child does not have.
        check()
        in_child(check)
        check()


def test_a_fork_makes_its_own():
    """The child's own first call, and its own first plan. The parent has computed on all cores."""
    make, check = planned()
    plan = make()
    check(make())
    in_child(lambda: check(plan))
    in_child(lambda: check(make()))


def test_a_fork_calls_what_is_too_large_for_one_core():
    """A plan of one job and packed images, whose operators all cores share elsewhere, and the helpers of the caller."""
    make, check = planned(128, 8192, tiles=["128x1"], split_keys=None)
    plan, pack = make(), packing_case(0, [300] * 4, 1200, n=400)
    for call in (lambda: check(plan), pack):
        call()
        in_child(call)


def test_a_fork_of_a_fork():
    check = plan_cases()[0]
    check()
    in_child(lambda: (check(), in_child(check), check()))


@pytest.mark.parametrize("cases", rest_slow([plan_cases, packing_cases], 0), ids=["plans", "packings"])
def test_a_fork_while_threads_are_inside_calls(cases):
    cases, stop = cases(), threading.Event()

    def busy(check):
        while not stop.is_set():
            check()

    def forks():
        try:
            for _ in range(3):
                for check in cases:
                    in_child(check)
        finally:
            stop.set()

    together([forks, *(lambda check=check: busy(check) for check in cases)])


def test_a_fork_while_the_workers_are_made(monkeypatch):
    """Whoever makes them holds their lock, and is not in the child to release it."""
    check = plan_cases()[0]
    check()
    with cpu_workers._making:
        in_child(check)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


def network_check():
    """Two networks, in two threads each, make or read the plans of their stages; the logits are compared with dense."""
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    built = [
        networks.create("vision_longformer", variant="tiny", image_size=64, attention=attention)
        for attention in ("dense", "tilewright", "tilewright")
    ]
    with torch.inference_mode():
        expected = built[0](images)

    def check(network):
        with torch.inference_mode():
            assert_close(network(images), expected, 1e-4)

    together([lambda network=network: check(network) for network in built[1:] * 2])


def test_processes_and_threads_share_a_cache(cache):
    """Two processes of four threads each make the plans of a network at the same time."""
    code = "import test_stress; test_stress.network_check()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    with contextlib.ExitStack() as stack:
        for process in running:
            stack.callback(process.kill)
        told = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert "cannot be read" not in "".join(told)
    written = {path.name: path.stat().st_mtime_ns for path in cache.glob("*.plan")}
    # Nothing else is left, but for what source files say.
    assert {path.name for path in cache.iterdir()} - {*written} <= {"code", "times"} and written
    # Who comes later reads what they wrote.
    network_check()
    assert {path.name: path.stat().st_mtime_ns for path in cache.glob("*.plan")} == written
