"""Packed batches on every executor: the GPU's on a GPU where there is one, else under Triton's interpreter."""

import gc
import mmap
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import library

from helpers.gpu import TRITON_DEVICE
from helpers.threads import interrupted
from tilewright import reference
from tilewright.attention.cuda.config import KernelConfig
from tilewright.core.errors import DeviceError, PatternError
from tilewright.packed import pack
from tilewright.packed.cpu import executor as cpu_packed
from tilewright.packed.cuda import executor as cuda_packed
from tilewright.packed.lists import ITEMS, RECORD, PackedOffsets

EXECUTORS = {"torch": "cpu", "triton": TRITON_DEVICE}
KINDS = {"torch": "cpu", "triton": "cuda"}
# bfloat16 is silently wrong under some releases of the interpreter.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if TRITON_DEVICE == "cuda" else [])


@pytest.fixture(params=EXECUTORS)
def device(request, monkeypatch):
    """Where the executor of a test runs; its batches are all that `ragged` makes there."""
    monkeypatch.setitem(pack.EXECUTORS, EXECUTORS[request.param], f"tilewright.packed.{KINDS[request.param]}.executor")
    pack._executor.cache_clear()
    yield torch.device(EXECUTORS[request.param])
    pack._executor.cache_clear()


def keeping(lengths, n, device, seed=0):
    """bool [B, n]: the first token and others at random, so many an image."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(len(lengths), n, generator=generator)
    score[:, 0] = 2
    place = score.argsort(1, descending=True).argsort(1)
    return (place < torch.tensor(lengths)[:, None]).to(device)


def tokens(*shape, device, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def qkv(capacity, heads, head_dim, **options):
    """Strided views of a fused projection."""
    return tokens(capacity, 3, heads, head_dim, **options).unbind(1)


def check_attention(packing, q, k, v):
    kept = int(packing.starts[-1])
    found = packing.attend(q, k, v)
    assert found.shape == q.shape and found.is_contiguous() and found.isfinite().all()
    seen = torch.from_numpy(packing.graph().to_dense())
    expected = reference.attention(*(x[:kept].cpu().transpose(0, 1)[None] for x in (q, k, v)), seen)[0].transpose(0, 1)
    assert reference.relative_error(found[:kept].cpu(), expected) <= reference.TOLERANCE[q.dtype]
    out = torch.full_like(found, torch.nan)
    assert packing.attend(q, k, v, out) is out and torch.equal(out, found)


def check_moves(packing, keep, x, fill):
    kept = int(keep.sum())
    packed = packing.gather(x)
    assert torch.equal(packed[:kept], x[keep]) and not packed[kept:].any()
    assert torch.equal(packing.scatter(packed), x * keep[..., None])
    assert torch.equal(packing.scatter(packed, fill), torch.where(keep[..., None], x, fill))
    first = x[torch.arange(len(x)), keep.int().argmax(1)]
    assert torch.equal(packing.first(packed), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 32, 48, 64, 72, 128, 256])
def test_attention(head_dim, dtype, device):
    packing = pack.pack(keeping([1, 70, 16, 33, 64], 75, device), 200)
    check_attention(packing, *qkv(200, 2, head_dim, dtype=dtype, device=device))


def test_offsets_beyond_32_bits(monkeypatch):
    packing, n = triton_packing(monkeypatch), 2_500_000_000
    if TRITON_DEVICE == "cuda":
        far_apart = torch.empty(n, dtype=torch.float16, device=TRITON_DEVICE)
    else:
        # The interpreter copies whole storages back.
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
        far_apart = torch.frombuffer(mmap.mmap(-1, 2 * n, flags=mmap.MAP_PRIVATE), dtype=torch.float16)
    _, k, v = qkv(5, 3, 16, dtype=torch.float16, device=TRITON_DEVICE)
    # Two images of two and three tokens: rows of the second one, then heads.
    for strides in ((1_200_000_000 // 2, 16, 1), (16, 1_200_000_000, 1)):
        q = far_apart.as_strided((5, 3, 16), strides)
        q.copy_(tokens(5, 3, 16, device="cpu"))
        check_attention(packing, q, k, v)


@pytest.mark.parametrize("rows", [16, 32, 128])
def test_other_tiles(rows, device):
    packing = pack.pack(keeping([130, 5, 40], 140, device), 180, rows=rows)
    check_attention(packing, *qkv(180, 1, 32, dtype=torch.float16, device=device))


@pytest.mark.parametrize("step_keys,trim", [(32, 32), (64, 64), (64, 16), (128, 16), (128, 32)])
def test_other_kernels(step_keys, trim):
    offsets = PackedOffsets(3, 150, 200, 64)
    keep = keeping([150, 1, 31], 150, TRITON_DEVICE)
    device = keep.device
    executor = cuda_packed.Executor(offsets, device, KernelConfig(step_keys, trim=trim))
    packing = pack.Packing(offsets, executor.lists(keep))
    packing._executor = executor
    check_attention(packing, *qkv(200, 1, 32, dtype=torch.float16, device=device))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_batches(data):
    n = data.draw(st.integers(1, 40), "n")
    lengths = data.draw(st.lists(st.one_of(st.just(1), st.just(n), st.integers(1, n)), min_size=1, max_size=6), "kept")
    capacity = sum(lengths) + data.draw(st.integers(0, 70), "spare")
    width = data.draw(st.sampled_from([1, 3, 32]), "width")
    for kind, at in EXECUTORS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(pack.EXECUTORS, at, f"tilewright.packed.{KINDS[kind]}.executor")
            pack._executor.cache_clear()
            keep = keeping(lengths, n, at)
            x, fill = tokens(len(lengths), n, width, device=at), tokens(len(lengths), n, width, device=at, seed=2)
            packing = pack.pack(keep, capacity, tokens=x)
            assert packing.starts.tolist() == [0, *np.cumsum(lengths)] and packing.starts.dtype == torch.int32
            assert torch.equal(packing.tokens, packing.gather(x))
            check_moves(packing, keep, x, fill)
            check_attention(packing, *qkv(capacity, 2, 32, device=at))
    pack._executor.cache_clear()


@pytest.mark.parametrize("lengths", [[1, 1, 1], [30, 30], [64], [65]], ids=str)
def test_one_token_all_tokens_none_but_the_first(lengths, device):
    n = max(lengths)
    keep = keeping(lengths, n, device)
    packing = pack.pack(keep)
    assert packing.capacity == sum(lengths)
    check_moves(packing, keep, *tokens(2, len(lengths), n, 5, device=device))
    check_attention(packing, *qkv(packing.capacity, 1, 32, device=device))


def test_tokens_may_be_strided(device):
    keep = keeping([7, 3], 9, device)
    packing = pack.pack(keep, 12)
    check_moves(packing, keep, *(tokens(9, 2, 20, device=device)[..., i : i + 8].transpose(0, 1) for i in (0, 8)))


def written(packing):
    """The lists without the places of work items that the batch has no use for."""
    return packing.lists[: packing.offsets.work + RECORD * packing.lists[ITEMS]]


def test_large_batches_are_described_and_gathered_apart(monkeypatch, device):
    keep, x = keeping([3, 1, 20], 20, device), tokens(3, 20, 8, device=device)
    together = pack.pack(keep, 30, tokens=x)
    monkeypatch.setattr(cuda_packed, "FUSED", 2)
    apart = pack.pack(keep, 30, tokens=x)
    assert torch.equal(together.tokens, apart.tokens) and torch.equal(written(together), written(apart))


@pytest.mark.parametrize("fused", [1, 32])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_packed_tokens_are_padded_and_packed_again(fused, data):
    n = data.draw(st.integers(1, 40), "n")
    lengths = data.draw(st.lists(st.integers(1, n), min_size=1, max_size=6), "kept")
    length = max(lengths) + data.draw(st.integers(0, 3), "length to spare")
    width = data.draw(st.sampled_from([1, 3, 300]), "width")
    seed, spare = data.draw(st.integers(0, 9), "seed"), data.draw(st.integers(0, 20), "spare")
    for kind, at in EXECUTORS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(pack.EXECUTORS, at, f"tilewright.packed.{KINDS[kind]}.executor")
            patch.setattr(cuda_packed, "FUSED", fused)
            pack._executor.cache_clear()
            before = pack.pack(keeping(lengths, n, at), sum(lengths) + spare)
            # Rows of a wider tensor.
            x = tokens(before.capacity, width + 5, device=at)[:, 5:]
            valid = torch.arange(length, device=at) < torch.tensor(lengths, device=at)[:, None]
            padded = before.pad(x, length)
            assert torch.equal(padded[valid], x[: sum(lengths)]) and not padded[~valid].any()
            chosen = torch.rand(valid.shape, generator=torch.Generator().manual_seed(seed)).to(at) < 0.5
            chosen[:, 0] = True
            again = pack.pack(valid & chosen, int((valid & chosen).sum()) + spare, tokens=x, origin=before)
            directly = pack.pack(valid & chosen, again.capacity, tokens=padded)
            assert torch.equal(again.tokens, directly.tokens) and torch.equal(written(again), written(directly))
    pack._executor.cache_clear()


def test_tokens_of_a_batch_that_did_not_fit_are_nan_however_they_are_packed_again(device):
    before = pack.pack(keeping([3, 5, 2], 5, device), 9)
    x = tokens(9, 4, device=device)
    assert before.pad(x, 5).isnan().all()
    # Rows that are not there are asked for.
    again = pack.pack(
        torch.ones(3, 5, dtype=torch.bool, device=device), 15, tokens=before.gather(x.new_zeros(3, 5, 4)), origin=before
    )
    assert again.tokens.isnan().all()


def test_packed_tokens_are_those_of_the_packing(device):
    before, keep = pack.pack(keeping([3, 5], 5, device), 9), keeping([1, 1], 5, device)
    with pytest.raises(PatternError, match="origin: expected the packing of 1 images, found one of 2"):
        pack.pack(keep[:1], 5, tokens=tokens(9, 4, device=device), origin=before)
    for shape in ((8, 4), (2, 5, 4)):
        with pytest.raises(PatternError, match=rf"tokens: expected shape \(9, C\), .* found \({shape[0]}, "):
            pack.pack(keep, 5, tokens=tokens(*shape, device=device), origin=before)
    with pytest.raises(PatternError, match=r"tokens: expected shape \(9, C\), .* found None"):
        pack.pack(keep, 5, origin=before)


def test_many_tokens_and_images(monkeypatch, device):
    # More than are counted, and rows than are gathered, at once.
    monkeypatch.setattr(cuda_packed, "GATHERING", 40)
    lengths = [300, 1, 200] + 15 * [2]
    keep = keeping(lengths, 300, device)
    packing = pack.pack(keep, 700, tokens=(x := tokens(18, 300, 300, device=device)))
    kept = int(keep.sum())
    assert torch.equal(packing.tokens[:kept], x[keep]) and not packing.tokens[kept:].any()
    check_attention(packing, *qkv(700, 1, 32, device=device))


@pytest.mark.parametrize("rows", [16, 64])
def test_work_items_are_the_longest_first_and_cover_every_row(rows):
    lengths = [5, 70, 70, 1, 129]
    offsets = PackedOffsets(5, 130, 400, rows)
    keep = keeping(lengths, 130, TRITON_DEVICE)
    made = cuda_packed.Executor(offsets, keep.device).lists(keep).cpu()
    count = int(made[ITEMS])
    items = made[offsets.work :].view(-1, RECORD)
    assert len(items) == offsets.items >= count
    items = items[:count].tolist()
    covered = [first + offset + i for first, length, offset in items for i in range(min(rows, length - offset))]
    assert sorted(covered) == list(range(400))
    own = [length for first, length, _ in items if first < sum(lengths)]
    assert own == sorted(own, reverse=True)
    assert len(own) == sum(-(-length // rows) for length in lengths)


def overflowing(device, lengths=(9, 20, 4), capacity=30):
    keep = keeping(lengths, 20, device)
    return pack.pack(keep, capacity, tokens=tokens(len(lengths), 20, 8, device=device))


@pytest.mark.parametrize("case", ["overflow", "empty"])
def test_a_batch_that_does_not_fit_is_nan_until_it_is_checked(case, device):
    packing = overflowing(device, *([] if case == "overflow" else [(9, 0, 4)]))
    x = tokens(30, 8, device=device)
    for found in (
        packing.tokens,
        packing.gather(tokens(3, 20, 8, device=device)),
        packing.attend(*qkv(30, 1, 32, device=device)),
        packing.scatter(x),
        packing.scatter(x, tokens(3, 20, 8, device=device)),
        packing.first(x),
    ):
        assert found.isnan().all()
    wanted = {
        "overflow": "capacity: expected at least the 33 tokens kept, found 30",
        "empty": "expected every image to keep a token, found 1 that keep none",
    }
    for ask in (packing.check, packing.graph):
        with pytest.raises(PatternError, match=wanted[case]):
            ask()


def test_the_graph_is_block_diagonal():
    packing = pack.pack_lengths([2, 1, 3], 10)
    assert np.array_equal(packing.graph().to_dense(), torch.block_diag(*map(torch.ones, [(2, 2), (1, 1), (3, 3)])) > 0)


def test_compiled_as_one_graph(device):
    keep, x = keeping([9, 3], 12, device), tokens(2, 12, 32, device=device)

    def network(keep, x):
        packing = pack.pack(keep, 16, tokens=x)
        q, k, v = (packing.tokens[:, None].repeat(1, 3, 1)).view(16, 3, 1, 32).unbind(1)
        out = packing.attend(q, k, v).flatten(1)
        return packing.first(out), packing.scatter(out, x), pack.pack(keep, 14).gather(x)

    with torch.no_grad():
        found = torch.compile(network, fullgraph=True, backend="aot_eager")(keep, x)
        for one, other in zip(found, network(keep, x), strict=True):
            assert torch.equal(one, other)


def test_a_compiled_call_writes_to_given_memory(device):
    packing = pack.pack(keeping([2, 3], 4, device))
    q, k, v = qkv(5, 1, 32, device=device)
    out = torch.zeros(5, 1, 32, device=device)
    # The compiler's own backend is not needed to see what it was given.
    compiled = torch.compile(lambda *given: packing.attend(*given), backend="aot_eager", fullgraph=True)
    assert compiled(q, k, v, out) is out and torch.equal(out, packing.attend(q, k, v))


def test_operators_are_well_formed(device):
    keep, x = keeping([5, 3], 6, device), tokens(2, 6, 32, device=device)
    offsets = list(PackedOffsets(2, 6, 9, 16))
    ops, checks = torch.ops.tilewright, {"test_utils": ("test_schema", "test_faketensor")}
    lists, packed = ops.ragged_pack(keep, x, None, offsets)
    library.opcheck(ops.ragged_lists.default, (keep, offsets), **checks)
    library.opcheck(ops.ragged_pack.default, (keep, x, None, offsets), **checks)
    library.opcheck(ops.ragged_pack.default, (keep, packed, lists, offsets), **checks)
    library.opcheck(ops.ragged_pad.default, (lists, packed, 6, offsets), **checks)
    library.opcheck(ops.ragged_gather.default, (lists, x, offsets), **checks)
    library.opcheck(ops.ragged_scatter.default, (lists, packed, x, offsets), **checks)
    library.opcheck(ops.ragged_first.default, (lists, packed, offsets), **checks)
    library.opcheck(ops.ragged_attend.default, (lists, *qkv(9, 1, 32, device=device), offsets), **checks)


def test_packings_of_one_layout_are_not_mixed_up_by_a_switch_of_threads():
    """Wherever a thread may be interrupted, another one asks for the runs of its own lists."""
    one, other = (pack.pack_lengths(lengths, 8, rows=16) for lengths in ([5, 3], [3, 5]))
    other.offsets, executor = one.offsets, one._executor
    right, others = executor._stretches(one.lists), executor._stretches(other.lists)
    assert right != others
    found = []
    meanwhile = lambda: found.append(executor._stretches(other.lists))  # noqa: E731
    for last in (one, other):
        executor._stretches(last.lists)
        call = partial(executor._stretches, one.lists)
        for stretches in interrupted(call, cpu_packed.Executor._stretches, meanwhile):
            assert stretches == right and executor._stretches(other.lists) == found.pop() == others
            executor._stretches(last.lists)


def test_executors_hold_no_memory_of_their_batches():
    """Without a capacity every batch has a layout of its own: as many executors are kept, of a few kilobytes each."""
    most = pack._executor.cache_info().maxsize
    pack._executor.cache_clear()
    tracemalloc.start()
    held = []
    for n in range(1, 2 * most + 1):
        pack.pack(torch.arange(2 * most)[None] < n).attend(*torch.zeros(3, n, 1, 8))
        if n % most == 0:
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert pack._executor.cache_info().currsize == most
    assert max(held) <= most * 4096 and held[1] <= 1.5 * held[0]


# Bad input.


def test_lengths_that_do_not_sum_to_the_tokens_are_refused(device):
    packing = pack.pack(keeping([5, 3], 6, device))
    for rows in (7, 9):
        with pytest.raises(PatternError, match=rf"q: expected shape \(8, H, D\), a row .*, found \({rows}, 2, 32\)"):
            packing.attend(*qkv(rows, 2, 32, device=device))


def test_images_without_tokens_are_refused():
    with pytest.raises(PatternError, match="lengths: expected at least one token an image, found 0"):
        pack.pack_lengths([5, 0, 3])
    with pytest.raises(PatternError, match="found 1 that keep none"):
        pack.pack(torch.tensor([[True, True], [False, False]]))


def test_more_tokens_than_the_capacity_are_refused_at_once_where_lengths_are_known():
    with pytest.raises(PatternError, match="capacity: expected at least the 9 tokens kept, found 8"):
        pack.pack_lengths([5, 4], 8)


@pytest.mark.parametrize("lengths", [[], [[1]], [1.5], [True]], ids=str)
def test_lengths_are_integers(lengths):
    with pytest.raises(PatternError, match="lengths: expected integers of shape"):
        pack.pack_lengths(lengths)


@pytest.mark.parametrize("keep", [torch.ones(3, dtype=torch.bool), torch.ones(2, 3), torch.ones(0, 3) > 0], ids=str)
def test_keep_is_a_table_of_bool(keep):
    with pytest.raises(PatternError, match="keep: expected bool of shape"):
        pack.pack(keep)


@pytest.mark.parametrize(("option", "value"), [("capacity", 0), ("rows", 8), ("rows", 48)])
def test_sizes_are_sensible(option, value):
    with pytest.raises(PatternError, match=f"{option}: expected .*, found {value}"):
        pack.pack(torch.ones(2, 3) > 0, **{option: value})


def test_devices_are_known():
    with pytest.raises(DeviceError, match="keep: expected a tensor on one of cpu, cuda, found meta"):
        pack.pack((torch.ones(2, 3) > 0).to("meta"))


def test_a_fill_is_a_tensor_or_0(device):
    packing = pack.pack(keeping([2, 3], 3, device))
    with pytest.raises(PatternError, match="fill: expected a tensor or 0, found 1"):
        packing.scatter(tokens(5, 4, device=device), 1)
    with pytest.raises(PatternError, match=r"fill: expected torch.float32 of shape \(2, 3, 4\), found torch.float16"):
        packing.scatter(tokens(5, 4, device=device), tokens(2, 3, 4, device=device, dtype=torch.float16))


def test_rows_are_of_the_batch(device):
    packing = pack.pack(keeping([2, 3], 3, device))
    for call, shape, wanted in (
        (packing.gather, (2, 4, 8), "(2, 3, C)"),
        (packing.scatter, (6, 8), "(5, C)"),
        (packing.first, (2, 3, 8), "(5, C)"),
    ):
        with pytest.raises(PatternError) as error:
            call(tokens(*shape, device=device))
        assert f"expected tokens of shape {wanted}, found {shape}" in str(error.value)


def test_q_k_and_v_are_of_one_shape_and_type(device):
    packing = pack.pack(keeping([2, 3], 3, device))
    q, k, v = qkv(5, 1, 32, device=device)
    with pytest.raises(PatternError, match=r"v: expected shape \(5, 1, 32\)"):
        packing.attend(q, k, v[..., :16])
    with pytest.raises(PatternError, match=r"k: expected a float dtype, .*, found torch\.float64"):
        packing.attend(q, k.double(), v)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            lambda q: q[:4],
            r"out: .*contiguous .* of shape \(5, 1, 32\), found .* of shape \(4, 1, 32\)",
        ),
        (lambda q: q.half(), "out: expected contiguous torch.float32 of .* found torch.float16"),
        (lambda q: q.new_empty(5, 2, 32)[:, :1], r"contiguous .*, found .* strides \(64, 32, 1\)"),
        (lambda q: q, "out: expected memory that no input uses, found the memory of q"),
    ],
    ids=["shape", "dtype", "strides", "shared"],
)
def test_memory_for_a_result_can_hold_it(device, out, message):
    packing = pack.pack(keeping([2, 3], 4, device))
    q, k, v = (tokens(5, 1, 32, device=device, seed=seed) for seed in range(3))
    with pytest.raises(PatternError, match=message):
        packing.attend(q, k, v, out(q))


def test_tensors_lie_on_one_device(device):
    packing = pack.pack(keeping([2, 3], 3, device))
    q, k, v = qkv(5, 1, 32, device=device)
    with pytest.raises(DeviceError, match=r"k: expected a tensor on .*, found meta"):
        packing.attend(q, k.to("meta"), v)


@pytest.fixture
def without_backward(device, monkeypatch):
    """A target whose batches have no gradients."""
    for module in (cpu_packed, cuda_packed):
        monkeypatch.delattr(module.Executor, "attend_backward")
    return device


def test_gradients_are_not_lost_silently(without_backward):
    device = without_backward
    packing = pack.pack(keeping([2, 3], 3, device))
    x = tokens(2, 3, 4, device=device).requires_grad_()
    with pytest.raises(PatternError, match="tokens: packed batches have no backward"):
        packing.gather(x)
    with torch.no_grad():
        packing.gather(x)


def test_gradients_are_not_lost_after_calls_without(without_backward):
    device = without_backward
    packing = pack.pack(keeping([2, 3], 3, device))
    q, k, v = (x.requires_grad_() for x in qkv(5, 1, 32, device=device))
    with torch.no_grad():
        packing.attend(q, k, v)
        packing.attend(q, k, v)
    with pytest.raises(PatternError, match="packed batches have no backward"):
        packing.attend(q, k, v)


def test_compiled_code_refuses_gradients_where_there_are_none(without_backward):
    packing = pack.pack(keeping([2, 3], 3, without_backward))
    x = tokens(2, 3, 4, device=without_backward).requires_grad_()
    with pytest.raises(PatternError, match=r"packed batches have no backward on c.*; call this under torch.no_grad"):
        torch.ops.tilewright.ragged_gather(packing.lists, x, packing.offsets)


# Gradients, against autograd through the same steps written out in float64.


def _written_out(keep, x, project, rows, masked):
    """Tokens packed, attended and scattered with a fill, by torch's own indexing; rows of no image are zeros."""
    packed = x[keep]
    owner = torch.arange(len(keep))[:, None].expand(keep.shape)[keep]
    q, k, v = (packed @ project).unflatten(1, (3, 2, -1)).unbind(1)
    out = reference.attention(*(y.transpose(0, 1)[None] for y in (q, k, v)), owner[:, None] == owner)[0]
    out = out.transpose(0, 1).flatten(1)
    back = masked.clone()
    back[keep] = out
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)))
    return back, out[starts[:-1]], torch.nn.utils.rnn.pad_sequence(out.split(keep.sum(1).tolist()), batch_first=True)


def _packed(keep, x, project, rows, masked):
    packing = pack.pack(keep, rows, x)
    q, k, v = (packing.tokens @ project).unflatten(1, (3, 2, -1)).unbind(1)
    out = packing.attend(q, k, v).flatten(1)
    return packing.scatter(out, masked), packing.first(out), packing.pad(out, int(keep.sum(1).max()))


def _losses(call, given):
    given = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in given]
    outs = call(*given)
    weigh = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(outs)]
    loss = sum((x * w.to(x.dtype)).sum() for x, w in zip(outs, weigh, strict=True))
    return torch.autograd.grad(loss, [x for x in given if x.is_floating_point()])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("lengths", "rows"), [([3, 7, 7, 1], 18), ([5, 5], 14), ([40, 1, 33], 74)])
def test_a_packed_batch_has_the_gradients_of_its_images(lengths, rows, compiled, monkeypatch):
    # Some queries at a time.
    monkeypatch.setattr(cpu_packed, "_PAIRS", 300)
    n = max(lengths) + 2
    keep = keeping(lengths, n, "cpu")
    x, masked = (tokens(len(lengths), n, 16, device="cpu", seed=seed) for seed in (1, 2))
    project = tokens(16, 48, device="cpu", seed=3) / 4

    def call(x, project, masked):
        return _packed(keep, x, project, rows, masked)

    torch.compiler.reset()
    found = _losses(torch.compile(call, backend="aot_eager") if compiled else call, (x, project, masked))
    wanted = _losses(
        lambda x, project, masked: _written_out(keep, x, project, rows, masked),
        [y.double() for y in (x, project, masked)],
    )
    for name, a, b in zip(("tokens", "weights", "fill"), found, wanted, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm(), name


def test_tokens_that_go_on_from_an_earlier_batch_have_gradients():
    first = keeping([5, 7, 2], 8, "cpu")
    x = tokens(3, 8, 4, device="cpu").requires_grad_()
    one = pack.pack(first, 16, x)
    stays = torch.zeros(3, 7, dtype=torch.bool)
    for b, count in enumerate([5, 7, 2]):
        stays[b, :count:2] = True
    two = pack.pack(stays, 11, one.tokens, origin=one)
    weigh = torch.randn(11, 4)
    (found,) = torch.autograd.grad((two.tokens * weigh).sum(), x)
    wanted, row = torch.zeros_like(x), 0
    for b in range(3):
        kept = first[b].nonzero().flatten()
        for i in kept[::2]:
            wanted[b, i] = weigh[row]
            row += 1
    assert torch.equal(found, wanted)


def test_gather_has_a_gradient_and_rows_of_no_image_none():
    keep = keeping([2, 3], 4, "cpu")
    packing = pack.pack(keep, 7)
    x = tokens(2, 4, 3, device="cpu").requires_grad_()
    weigh = torch.randn(7, 3)
    (found,) = torch.autograd.grad((packing.gather(x) * weigh).sum(), x)
    wanted = torch.zeros(2, 4, 3)
    wanted[keep] = weigh[:5]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_attention_in_sixteen_bits(dtype):
    packing = pack.pack(keeping([3, 9], 10, "cpu"), 14)
    given = [x.to(dtype).requires_grad_() for x in qkv(14, 2, 16, device="cpu")]
    grad = tokens(14, 2, 16, device="cpu", seed=9).to(dtype)
    found = torch.autograd.grad(packing.attend(*given), given, grad)
    exact = [x.detach().float().requires_grad_() for x in given]
    for x, y in zip(found, torch.autograd.grad(packing.attend(*exact), exact, grad.float()), strict=True):
        assert x.dtype == dtype and (x.float() - y).norm() <= 2 * reference.TOLERANCE[dtype] * y.norm()


def test_gradients_of_a_batch_that_did_not_fit_are_nan():
    packing = pack.pack(keeping([3, 9], 10, "cpu"), 8)
    given = [x.requires_grad_() for x in qkv(8, 1, 8, device="cpu")]
    assert all(x.isnan().all() for x in torch.autograd.grad(packing.attend(*given).sum(), given))


def test_a_second_derivative_of_packed_attention_is_refused():
    packing = pack.pack(keeping([3, 4], 5, "cpu"), 7)
    given = [x.requires_grad_() for x in qkv(7, 1, 8, device="cpu")]
    (first,) = torch.autograd.grad(packing.attend(*given).square().sum(), given[0], create_graph=True)
    with pytest.raises(PatternError, match="packed attention has first derivatives only"):
        first.sum().backward()


def test_lists_are_no_longer_than_their_numbers_reach():
    with pytest.raises(PatternError, match=r"lists: expected fewer than 2\*\*31 values, found \d+ of PackedOffsets"):
        cuda_packed.Executor(PackedOffsets(1 << 20, 1 << 12, 1 << 20, 64), torch.device(TRITON_DEVICE))


def triton_packing(monkeypatch):
    monkeypatch.setitem(pack.EXECUTORS, TRITON_DEVICE, "tilewright.packed.cuda.executor")
    pack._executor.cache_clear()
    return pack.pack(keeping([2, 3], 3, TRITON_DEVICE))


def test_a_gpu_reads_no_keep_of_another_type(monkeypatch):
    executor, keep = triton_packing(monkeypatch)._executor, torch.ones(2, 3, dtype=torch.int64, device=TRITON_DEVICE)
    for call in (executor.lists, partial(executor.pack, tokens=tokens(2, 3, 8, device=TRITON_DEVICE))):
        with pytest.raises(PatternError, match=r"keep: expected torch\.bool, found torch\.int64"):
            call(keep)


def test_head_dims_of_a_gpu_are_known(monkeypatch):
    with pytest.raises(PatternError, match="head_dim: expected a multiple of 8 from 8 to 256 on a GPU, found 20"):
        triton_packing(monkeypatch).attend(*qkv(5, 1, 20, device=TRITON_DEVICE))


def test_values_of_a_row_lie_side_by_side_on_a_gpu(monkeypatch):
    q, _, v = qkv(5, 1, 32, device=TRITON_DEVICE)
    spread = tokens(5, 1, 64, device=TRITON_DEVICE)[..., ::2]
    with pytest.raises(PatternError, match="k: expected stride 1 in the last dimension, found 2"):
        triton_packing(monkeypatch).attend(q, spread, v)
