"""The launch path without a GPU: what would reach Triton's C launcher, and which calls reach it."""

from threading import Barrier, Thread
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.errors import OutOfResources

from helpers import plans
from tilewright.attention.blocks.tiles import parse
from tilewright.attention.cuda import config
from tilewright.attention.cuda import executor as cuda_executor
from tilewright.attention.cuda import launch as cuda_launch
from tilewright.attention.cuda import tile_kernel as cuda_tile_kernel
from tilewright.attention.cuda.tile_lists import Item
from tilewright.core.caches import Recent
from tilewright.core.errors import DeviceError, PatternError, TileError
from tilewright.devices import qkv
from tilewright.devices.cuda import launcher as cuda_launcher

KERNEL = cuda_tile_kernel.tilewright_tile_attention
# The interpreter launches nothing: tensors lie in main memory, and what would be launched is recorded.
FACTS = {
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "global_scratch_align": 1,
    "profile_scratch_align": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": True,
    "num_ctas": 1,
    "arg_annotations": "annotations",
    "kernel_signature": b"signature",
}


GRID = 5, 3, 1


@pytest.fixture
def launched():
    return []


def compiled(launched, **changes):
    launcher = object.__new__(CudaLauncher)
    vars(launcher).update(FACTS | changes, launch=lambda *arguments: launched.append(arguments))
    return SimpleNamespace(run=launcher, function=77, packed_metadata=(4, 1, 1000))


def test_the_installed_triton_is_called_as_it_calls_itself(launched):
    kernel = compiled(launched)
    kernel.run(*GRID, 9, kernel.function, kernel.packed_metadata, None, None, None, 1, 2, 3, 4, 32, 0.5)
    cuda_launcher.direct(kernel, GRID, 9, (32, 0.5))(1, 2, 3, 4)
    assert launched[0] == launched[1]


@pytest.mark.parametrize(
    ("release", "rest"),
    [
        ("3.6.0", (None, None, (4, 1, 1000), None, None, None, 1, 2, 3, 4, 32)),
        ("3.7.1", ((4, 1, 1000), None, None, None, None, None, "annotations", b"signature", (1, 2, 3, 4, 32))),
    ],
)
def test_every_known_release_gets_its_own_arguments(monkeypatch, launched, release, rest):
    monkeypatch.setattr(triton, "__version__", release)
    cuda_launcher.direct(compiled(launched), GRID, 9, (32,))(1, 2, 3, 4)
    assert launched == [(*GRID, 9, 77, False, True, *rest)]


def test_other_launchers_are_not_called(monkeypatch, launched, caplog):
    assert cuda_launcher.direct(None, GRID, 9, ()) is None
    for asked in ("global_scratch_size", "profile_scratch_size"):
        assert cuda_launcher.direct(compiled(launched, **{asked: 8}), GRID, 9, ()) is None
    assert not caplog.records
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    assert cuda_launcher.direct(compiled(launched), GRID, 9, ()) is None
    assert "triton 3.8: direct launches are known for 3.6, 3.7" in caplog.text


def test_a_cpu_has_no_streams():
    assert cuda_launcher.current_stream(torch.device("cpu"))() == 0 and not cuda_launcher.capturing()


@pytest.fixture
def ready(monkeypatch, launched):
    """An executor with a split row, whose kernel is replaced by a record of its launches: usual ones and direct."""
    usual = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: (usual.append((grid, args, constants)), compiled(launched))[1]

    monkeypatch.setattr(cuda_executor.Launch, "kernel", Kernel())
    cover = plans.covers(plans.reordered(plans.pattern(60, 60, empty=0)), ["64x1"])
    schedule = plans.scheduled(cover, split_keys=16, rounds=1)
    call = cuda_executor.prepare(schedule, cover, heads=2, head_dim=32, dtype=torch.float32, device="cpu")
    return SimpleNamespace(call=call, usual=usual, direct=launched)


def inputs(batch=1):
    return [torch.randn(batch, 2, 60, 32) for _ in range(3)]


def misaligned(i):
    """Tensors the i-th of which does not begin at a multiple of 16 bytes."""
    tensors = inputs()
    tensors[i] = torch.randn(1 + tensors[i].numel())[1:].view_as(tensors[i])
    return tensors


def fused():
    return list(torch.randn(1, 60, 3, 2, 32).permute(2, 0, 3, 1, 4))


def test_arguments_stand_in_the_kernels_order(ready):
    ready.call(*inputs())
    _, arguments, options = ready.usual[0]
    launch = ready.call.launches[0]
    named = dict(zip(KERNEL.arg_names, arguments, strict=True))
    assert launch.constants.items() <= named.items() and options.keys() == {"num_warps", "maxnreg"}
    assert named["n_items"] == len(launch.lists.items) and named["item_ptr"] is launch.held("item_ptr")


def test_a_second_call_launches_directly_what_the_first_did(ready):
    q, k, v = inputs()
    ready.call(q, k, v)
    out = ready.call(q, k, v)
    assert (len(ready.usual), len(ready.direct)) == (1, 1)
    grid, arguments, _ = ready.usual[0]
    *place, given = ready.direct[0] if triton.__version__ >= "3.7" else (*ready.direct[0][:13], ready.direct[0][13:])
    usual = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
    usual[3] = out.data_ptr()
    assert place[:4] == [*grid, 0] and list(given) == usual


@pytest.mark.parametrize(
    "other",
    [lambda: inputs(batch=2), *(lambda i=i: misaligned(i) for i in range(3)), fused],
    ids=["batch", "misaligned-q", "misaligned-k", "misaligned-v", "strided"],
)
def test_unlike_tensors_are_compiled_for_anew(ready, other):
    for make in (inputs, other, inputs, other):
        ready.call(*make())
    assert (len(ready.usual), len(ready.direct)) == (2, 2)


def test_each_stream_has_its_own_scratch_memory(ready):
    q, k, v = inputs()
    for stream in (1, 2, 1):
        ready.call._stream = ready.call.launches[0]._stream = lambda stream=stream: stream
        ready.call(q, k, v)
    (_, one, _), (_, two, _) = ready.usual
    assert len(ready.direct) == 1 and one[10] is not two[10] and one[12] is not two[12] and one[4] is two[4]
    assert ready.direct[0][3] == 1


@pytest.fixture
def capture(monkeypatch):
    return lambda: monkeypatch.setattr(cuda_launcher, "capturing", lambda: True)


def test_a_capture_takes_scratch_memory_that_is_there(ready, capture):
    ready.call(*inputs())
    capture()
    ready.call._stream = ready.call.launches[0]._stream = lambda: 5
    ready.call(*inputs())
    ready.call(*inputs())
    (_, before, _), (_, captured, _), _ = ready.usual
    assert captured[12] is before[12] and len(ready.direct) == 0


def test_a_capture_before_the_first_call_is_refused(ready, capture):
    ready.call(*inputs())
    capture()
    with pytest.raises(DeviceError, match="call the plan once with tensors of these shapes and strides"):
        ready.call(*inputs(batch=2))
    cover = plans.covers(plans.reordered(plans.pattern(40, 40)), ["16x1"])
    with pytest.raises(DeviceError, match="a CUDA graph is being captured"):
        cuda_executor.prepare(plans.scheduled(cover), cover, heads=2, head_dim=32, dtype=torch.float32, device="cpu")


def test_tensors_are_checked_again_when_they_differ(ready):
    q, k, v = inputs()
    ready.call(q, k, v)
    with pytest.raises(PatternError, match="no backward"):
        ready.call(q.requires_grad_(), k, v)
    with torch.no_grad():
        ready.call(q, k, v)


def test_no_gradient_is_lost_after_a_call_without(ready):
    q, k, v = inputs()
    q.requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            ready.call(q, k, v)
        with torch.inference_mode():
            ready.call(q, k, v)
        with pytest.raises(PatternError, match="no backward"):
            ready.call(q, k, v)
    # Tensors of inference mode are not told from others by one check.
    assert (len(ready.usual), len(ready.direct)) == (2, 2)


def test_batches_are_not_compiled_for(ready):
    unspecialized = getattr(KERNEL, "kwargs", vars(KERNEL))["do_not_specialize"]
    compiled_for = set()
    for batch in range(1, 21):
        ready.call(*inputs(batch))
        _, arguments, constants = ready.usual[-1]
        sizes = [(name, x) for name, x in zip(KERNEL.arg_names, arguments, strict=False) if not torch.is_tensor(x)]
        compiled_for.add((*(x for x in sizes if x[0] not in unspecialized), *constants.items()))
    assert len(ready.usual) == 20 and len(compiled_for) == 1


def test_a_plan_recognises_keys_that_are_values_too(ready):
    q, k, _ = inputs()
    for _ in range(3):
        ready.call(q, k, k)
    assert len(ready.usual) == 1 and len(ready.direct) == 2


def test_what_is_remembered_is_bounded(ready, monkeypatch):
    monkeypatch.setattr(ready.call, "_known", Recent(10, cuda_launcher.CALLS))
    (launch,) = ready.call.launches
    x = torch.zeros(3, 20, 2, 160, 32)
    for i in range(100):
        ready.call(*x[:, : 1 + i % 20, :, :60])
        ready.call(*x.as_strided((3, 20, 2, 60, 32), (*x.stride()[:2], 32 * (60 + i), 32, 1)))
    known = ready.call._known.items()
    assert len(known) == 10 and max(len(calls) for _, calls in known) <= cuda_launcher.CALLS
    largest = launch.scratch_bytes(20)
    held = sum(
        x.nbytes
        for made in launch._scratch.values()
        for _, parts in made
        for x in (parts["acc_ptr"], parts["stat_ptr"])
    )
    assert largest <= held <= 4 * largest


def test_a_smaller_batch_uses_the_scratch_memory_of_a_larger_one(ready):
    for batch in (3, 1, 4):
        ready.call(*inputs(batch))
    (_, three, _), (_, one, _), (_, four, _) = ready.usual
    rows = ready.call.launches[0].lists.part_rows
    assert one[10] is three[10] and three[10].shape == (3 * 2 * rows, 32) and four[10].shape == (6 * 2 * rows, 32)


def test_first_calls_of_several_threads(ready):
    start, failed = Barrier(8), []

    def work(stream):
        try:
            start.wait()
            for batch in range(1, 30):
                ready.call._stream = ready.call.launches[0]._stream = lambda: stream
                assert ready.call(*inputs(1 + (batch + stream) % 20)).shape[1:] == (2, 60, 32)
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=work, args=(stream,)) for stream in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_calls_that_are_looked_through_do_not_change_meanwhile(ready, monkeypatch):
    make, asked, others = qkv.same_layout, [], []

    def same_layout(*given):
        check = make(*given)

        def meanwhile(*tensors):
            asked.append(tensors)
            # Once by the call itself, then to look through all that are known.
            if len(asked) == 2:
                others.append(Thread(target=ready.call, args=misaligned(0)))
                others[0].start()
                others[0].join(0.5)
            return check(*tensors)

        return meanwhile

    monkeypatch.setattr(qkv, "same_layout", same_layout)
    ready.call(*misaligned(1))
    ready.call(*inputs())
    asked.clear()
    ready.call(*fused())
    others[0].join()
    assert len(ready.usual) == 4


def test_many_items_are_spread_over_a_grid(ready, monkeypatch):
    monkeypatch.setattr(cuda_launch, "MOST_ACROSS", 3)
    ready.call(*inputs(2))
    grid, arguments, _ = ready.usual[0]
    items = len(ready.call.launches[0].lists.items)
    assert grid[0] == 4 and grid[1] <= 3 and items <= grid[1] * grid[2] < items + grid[2]
    assert arguments[KERNEL.arg_names.index("n_items")] == items


def test_an_empty_batch_launches_nothing(ready):
    assert ready.call(*inputs(0)).shape == (0, 2, 60, 32) and not ready.usual


def test_a_device_with_too_little_shared_memory_is_refused(ready, monkeypatch):
    class Kernel:
        def __getitem__(self, grid):
            raise OutOfResources(250000, 101376, "shared memory")

    monkeypatch.setattr(cuda_executor.Launch, "kernel", Kernel())
    with pytest.raises(DeviceError, match=r"tile 64x1: .* at most 101376 .*shared memory, found 250000"):
        ready.call(*inputs())


def test_a_tile_of_too_few_rows_is_refused():
    with pytest.raises(TileError, match="tile 8x1: expected at least 16 rows"):
        config.for_tile(parse("8x1"), 32, torch.float16)


def test_another_current_gpu_is_left_as_it_was(ready, monkeypatch):
    entered, current = [], [0]

    class Device:
        def __init__(self, device):
            entered.append(device)

        def __enter__(self):
            current[0] = None

        def __exit__(self, *_):
            current[0] = 0

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    ready.call._several = True
    ready.call(*inputs())
    assert entered == [ready.call.device] and current == [0] and len(ready.usual) == 1


def test_memory_is_what_is_held(ready):
    call = ready.call
    held = sum(x.nbytes for x in call.launches[0]._held.values())
    assert call.memory_bytes == held > 0
    items = call.launches[0].lists.items
    part_rows = items[items[:, Item.PART] >= 0, Item.ROWS].sum()
    assert call.peak_bytes(3) == 3 * 2 * 4 * (60 * 32 + part_rows * (32 + 2))


def test_a_result_has_the_layout_that_compilers_are_told(ready):
    q, k, v = inputs()
    assert ready.call(q, k, v).stride() == qkv.empty(q, 60).stride()


@pytest.fixture
def repeated(launched):
    """A `CachedLaunch` that doubles, and what it started through Triton."""
    started = []

    def start(x, *_):
        started.append(x)
        return 2 * x, compiled(launched), 5, (32, 0.5)

    return cuda_launcher.CachedLaunch(start, torch.device("cpu")), started


def test_a_repeated_kernel_is_launched_directly_from_the_second_call_on(repeated, launched):
    call, started = repeated
    x = torch.randn(4, 8)
    assert torch.equal(call(x), 2 * x) and not launched
    out = call(x)
    assert out.shape == x.shape and len(started) == len(launched) == 1
    *place, given = launched[0] if triton.__version__ >= "3.7" else (*launched[0][:13], launched[0][13:])
    assert place[:4] == [5, 1, 1, 0] and list(given) == [out.data_ptr(), x.data_ptr(), 32, 0.5]


@pytest.mark.parametrize(
    "other",
    [lambda: torch.randn(5, 8), lambda: torch.randn(33)[1:].view(4, 8), lambda: torch.randn(8, 4).T],
    ids=["shape", "misaligned", "strided"],
)
def test_unlike_tensors_of_a_repeated_kernel_go_through_triton(repeated, launched, other):
    call, started = repeated
    for x in (torch.randn(4, 8), other()):
        call(x)
    assert len(started) == 2 and not launched


def test_a_repeated_kernel_knows_how_many_tensors_it_has(repeated, launched):
    call, started = repeated
    for given in (1, 2, 1, 2):
        call(*torch.randn(given, 4, 8))
    assert len(started) == len(launched) == 2


def test_a_repeated_kernel_writes_to_the_memory_that_it_is_given_first(launched):
    def start(out, x):
        return torch.mul(x, 2, out=out), compiled(launched), 5, (32,)

    call, out, x = cuda_launcher.CachedLaunch(start, torch.device("cpu")), torch.empty(4, 8), torch.randn(4, 8)
    assert call(out, x) is out and torch.equal(out, 2 * x) and not launched
    assert call(out, x) is out and len(launched) == 1
    given = launched[0][-1] if triton.__version__ >= "3.7" else launched[0][13:]
    assert list(given) == [out.data_ptr(), x.data_ptr(), 32]


def test_a_repeated_kernel_of_one_layout_compares_none(repeated, launched, monkeypatch):
    call, started = repeated
    alike, x = call.for_one_layout(), torch.randn(4, 8)
    assert torch.equal(alike(x), 2 * x) and len(started) == 1 and not launched
    # Compared once more, and never again.
    alike(x)
    monkeypatch.setattr(call, "_known", None)
    out = alike(x)
    assert len(started) == 1 and len(launched) == 2
    given = launched[-1][-1] if triton.__version__ >= "3.7" else launched[-1][13:]
    assert list(given)[:2] == [out.data_ptr(), x.data_ptr()]


def test_a_repeated_kernel_of_one_layout_still_looks_where_tensors_lie(repeated, launched):
    call, started = repeated
    alike = call.for_one_layout()
    for _ in range(3):
        alike(torch.randn(4, 8))
    alike(torch.randn(33)[1:].view(4, 8))
    assert len(started) == 2 and len(launched) == 2


def test_a_repeated_kernel_takes_one_tensor_twice(repeated, launched):
    call, started = repeated
    x, y = torch.randn(2, 4, 8)
    for _ in range(3):
        out = call(x, y, x, x)
    assert len(started) == 1 and len(launched) == 2
    given = launched[-1][-1] if triton.__version__ >= "3.7" else launched[-1][13:]
    assert list(given)[:5] == [each.data_ptr() for each in (out, x, y, x, x)]


def test_one_tensor_given_twice_keeps_its_gradient(repeated):
    call, started = repeated
    x = torch.randn(4, 8, requires_grad=True)
    # `start` is where kernels refuse tensors whose gradient would be lost.
    start = call._start
    call._start = lambda *given: started.append(given) or start(*given)
    call(x, x)
    assert started[0][0] is x and all(each.requires_grad for each in started[0])


def test_a_repeated_kernel_checks_again_where_a_gradient_would_be_lost(repeated, launched):
    call, started = repeated
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            call(x)
    assert len(started) == len(launched) == 1
    # `started` is where kernels check their tensors.
    call(x)
    assert len(started) == 2 and len(launched) == 1


def test_what_a_repeated_kernel_remembers_is_bounded(repeated):
    call, started = repeated
    for width in range(1, 1001):
        call(torch.zeros(4, width))
    assert len(started) == 1000 and sum(len(calls) for _, calls in call._known.items()) == cuda_launcher.CALLS


def test_a_repeated_kernel_knows_its_stream(repeated, launched):
    call, started = repeated
    for stream in (1, 2, 1):
        call._stream = lambda stream=stream: stream
        call(torch.zeros(4, 8))
    assert len(started) == 2 and launched[0][3] == 1
