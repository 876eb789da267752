"""Deliberate faults, one at a time, in what computes attention: the check that guards a timed row catches each."""

import contextlib
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from types import MethodType, SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from test_timed_calls import planned, streamed, weights

from helpers import plans
from helpers.gpu import TRITON_DEVICE, cases
from tilewright import networks, reference
from tilewright.attention import backends
from tilewright.attention.cpu import executor as cpu_executor
from tilewright.attention.cpu import launch as cpu_launch
from tilewright.attention.cuda import executor as cuda_executor
from tilewright.attention.cuda import tile_kernel as cuda_tile_kernel
from tilewright.attention.cuda import tile_lists
from tilewright.attention.cuda.tile_lists import Item
from tilewright.masks import deit, dynamicvit
from tilewright.masks import wan as video_pattern
from tilewright.networks import attention_sites, regionvit, token_layouts, vision_longformer, vit_parts, wan
from tilewright.networks.attentions import tilewright as scheduled
from tilewright.networks.batching import ragged as packed_batching
from tilewright.packed import pack
from tilewright.packed.cpu import executor as cpu_packed
from tilewright.packed.pruners import threshold_l2
from tilewright.paths import calls, runner
from tilewright.paths import table as look_up
from tilewright.slices import attention as slice_attention
from tilewright.slices import steps as slice_steps
from tilewright.slices.cpu import executor as cpu_slices
from tilewright.slices.cpu import selection as cpu_selection
from tilewright_study.experiments import recall, video, worth
from tilewright_study.experiments.attention.run import Tokens, run_schedule
from tilewright_study.experiments.networks import run as network_bench
from tilewright_study.experiments.pruned import run as pruned_bench
from tilewright_study.experiments.ragged import run as ragged_bench
from tilewright_study.experiments.recall import run as _recall
from tilewright_study.experiments.slices import run as slice_bench
from tilewright_study.experiments.stream import run as stream_bench
from tilewright_study.experiments.video import run as video_bench
from tilewright_study.experiments.worth import run as worth_bench
from tilewright_study.measure.effort import Effort, Run

pytestmark = pytest.mark.mutation
QUICK = Effort(rse=1.0, min_repetitions=1, max_seconds=0.001)
META = {"model": "toy", "family": "toys", "resolution": 8, "heads": 2, "head_dim": 16}
DTYPES = ("float32", "float16", "bfloat16")


# Layers. A fault changes the parts of a schedule, or the code that runs it.


@pytest.fixture(scope="module")
def ordered():
    """Blocks of one and of two steps of the GPU's kernel, and a split one; one query sees everything, one nothing."""
    return plans.reordered(plans.pattern(40, 300, 0.02), **META)


def statuses(ordered, executor, dtype="float32", change=lambda plan, cover: (plan, cover)):
    """Of the rows of a schedule that `change` has changed: tokens in plan order, and permuted in the call."""
    tokens = Tokens(ordered, batch=2, dtype=dtype)
    cover = plans.covers(ordered, ["16x1"])
    plan, cover = change(plans.scheduled(cover, split_keys=160), cover)
    with pytest.MonkeyPatch.context() as patch:
        if executor == "cuda":
            tokens = on_triton(patch, tokens)
        return [row["status"] for row in run_schedule(plan, cover, tokens, QUICK)]


def on_triton(patch, tokens):
    """Tokens whose schedules run by the GPU's kernel, which is timed as a processor's."""
    prepare = partial(cuda_executor.prepare, device=TRITON_DEVICE)
    patch.setattr(backends, "executor", lambda kind: SimpleNamespace(prepare=prepare))
    tokens.ordered = tuple(x.to(TRITON_DEVICE) for x in tokens.ordered)
    return tokens


EXECUTORS = pytest.mark.parametrize("executor", ["cpu", "cuda"])


def skip_bfloat16_of_the_interpreter(executor, dtype):
    if executor == "cuda" and dtype == "bfloat16" and TRITON_DEVICE == "cpu":
        pytest.skip("bfloat16 is silently wrong under some releases of the interpreter")


@EXECUTORS
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_fault_a_schedule_passes(ordered, executor, dtype):
    skip_bfloat16_of_the_interpreter(executor, dtype)
    assert statuses(ordered, executor, dtype) == ["ok", "ok"]


COLUMNS = ("tile", "round", "block", "run_lo", "run_hi", "shape", "split", "lane", "start_us")


def taken(plan, items):
    return replace(plan, **{name: getattr(plan, name)[items] for name in COLUMNS})


def without(plan, items):
    """The schedule without `items`."""
    return taken(plan, np.setdiff1d(np.arange(len(plan.tile)), items))


def blocks_of(plan, split):
    """Items of one block that is split or is not."""
    first = np.flatnonzero((plan.run_hi - plan.run_lo > 1) & (plan.split == split))[0]
    return np.flatnonzero((plan.block == plan.block[first]) & (plan.tile == plan.tile[first]))


def moved(plan, item, lo=0, hi=0):
    """The schedule with the runs of one item from ``run_lo + lo`` to ``run_hi + hi``."""
    run_lo, run_hi = plan.run_lo.copy(), plan.run_hi.copy()
    run_lo[item] += lo
    run_hi[item] += hi
    return replace(plan, run_lo=run_lo, run_hi=run_hi)


def remade(cover, **changes):
    """A schedule of a changed cover."""
    cover = {name: replace(part, **{k: f(part) for k, f in changes.items()}) for name, part in cover.items()}
    return plans.scheduled(cover, split_keys=160), cover


def flipped(part):
    masks = part.masks.copy()
    masks[:, 0] ^= 1
    return masks


def first_partial_is_full(part):
    return np.where(np.arange(len(part.run_mask)) == np.flatnonzero(part.run_mask >= 0)[0], -1, part.run_mask)


def padding_counts(part):
    return np.where((part.run_keys < 0).any(1), -1, part.run_mask)


def one_percent_elsewhere(part):
    """Keys divisible by a hundred are read from their neighbours."""
    return np.where((part.run_keys >= 0) & (part.run_keys % 100 == 0), part.run_keys + 1, part.run_keys)


SCHEDULES = {
    "dropped-item": lambda plan, cover: (without(plan, blocks_of(plan, False)[:1]), cover),
    "dropped-block": lambda plan, cover: (without(plan, blocks_of(plan, True)), cover),
    "lost-part": lambda plan, cover: (without(plan, blocks_of(plan, True)[-1:]), cover),
    "part-twice": lambda plan, cover: (
        taken(plan, np.sort(np.r_[np.arange(len(plan.tile)), blocks_of(plan, True)[:1]])),
        cover,
    ),
    "truncated-split": lambda plan, cover: (moved(plan, blocks_of(plan, True)[0], hi=-1), cover),
    "run-short-of-one": lambda plan, cover: (moved(plan, blocks_of(plan, False)[0], hi=-1), cover),
    "run-late-by-one": lambda plan, cover: (moved(plan, blocks_of(plan, False)[0], lo=1), cover),
    "keys-off-by-one": lambda plan, cover: remade(
        cover, run_keys=lambda part: np.where(part.run_keys < 0, -1, (part.run_keys + 1) % part.shape[1])
    ),
    "one-percent-of-keys": lambda plan, cover: remade(cover, run_keys=one_percent_elsewhere),
    "mask-bit": lambda plan, cover: remade(cover, masks=flipped),
    "padded-keys": lambda plan, cover: remade(cover, run_mask=padding_counts),
    "full-for-partial": lambda plan, cover: remade(cover, run_mask=first_partial_is_full),
}


@EXECUTORS
@pytest.mark.parametrize("fault", SCHEDULES)
def test_a_changed_schedule_is_caught(ordered, executor, fault):
    assert statuses(ordered, executor, change=SCHEDULES[fault]) == ["failed", "failed"]


def wrapped(patch, owner, name, change):
    """Let `change` have the function ``owner.name`` and the arguments of each call."""
    patch.setattr(owner, name, partial(change, getattr(owner, name)))


def scaled(make, *arguments, **options):
    return replace(make(*arguments, **options), scale=1.05 * 16**-0.5)


def reversed_order(axis):
    """The order of the tokens for its inverse."""

    def change(make, *arguments, **options):
        common = make(*arguments, **options)
        orders = list(common.taken)
        orders[axis] = np.argsort(orders[axis])
        return replace(common, taken=tuple(orders))

    return change


def fed(change):
    """A fault of the tensors that an executor computes with."""

    def fault(patch, module):
        def call(right, executor, q, k, v):
            return right(executor, *change(q, k, v))

        right = module.Executor.__call__
        patch.setattr(module.Executor, "__call__", lambda executor, *qkv: call(right, executor, *qkv))

    return fault


def left(change):
    """A fault of what an executor leaves in the memory of its result."""

    def fault(patch, module):
        right = module.Executor.__call__

        def call(executor, *qkv):
            out = right(executor, *qkv)
            change(out)
            return out

        patch.setattr(module.Executor, "__call__", call)

    return fault


def unordered(patch, module):
    """Results stay in the order of the plan."""
    right = module.Executor.__call__
    order = torch.from_numpy(plans.reordered(plans.pattern(40, 300, 0.02)).row_order)
    patch.setattr(module.Executor, "__call__", lambda executor, *qkv: right(executor, *qkv)[:, :, order])


def of_setting(change):
    return lambda patch, module: wrapped(patch, module, "setting", change)


def fill(rows, value):
    def change(out):
        out[:, :, rows] = value

    return change


EMPTY = int(np.flatnonzero(~plans.reordered(plans.pattern(40, 300, 0.02)).to_dense().any(1))[0])
# By name: the fault, and which of the two rows it changes.
BOTH, NATURAL = ["failed", "failed"], ["ok", "failed"]
CALLS = {
    "scale": (of_setting(scaled), BOTH),
    "row-order-inverted": (of_setting(reversed_order(0)), NATURAL),
    "key-order-inverted": (of_setting(reversed_order(1)), NATURAL),
    "unordered": (unordered, BOTH),
    "heads-of-values": (fed(lambda q, k, v: (q, k, v.flip(1))), BOTH),
    "heads-of-queries": (fed(lambda q, k, v: (q.flip(1).contiguous(), k, v)), BOTH),
    "batch-entries": (fed(lambda q, k, v: (q, k.flip(0), v.flip(0))), BOTH),
    "keys-for-values": (fed(lambda q, k, v: (q, v, k)), BOTH),
    "half-precision": (fed(lambda q, k, v: (q, k, v.half().float())), BOTH),
    "last-row": (left(fill(-1, torch.nan)), BOTH),
    "zero-for-not-written": (left(fill(7, 0.0)), BOTH),
    "row-without-keys": (left(fill(EMPTY, 1e-6)), BOTH),
}


@pytest.mark.parametrize("fault", CALLS)
def test_a_changed_call_is_caught(ordered, fault):
    change, expected = CALLS[fault]
    with pytest.MonkeyPatch.context() as patch:
        change(patch, cpu_executor)
        assert statuses(ordered, "cpu") == expected


@pytest.mark.parametrize("fault", ["scale", "row-order-inverted", "heads-of-values", "batch-entries", "half-precision"])
def test_a_changed_call_of_the_gpus_kernel_is_caught(ordered, fault):
    change, expected = CALLS[fault]
    with pytest.MonkeyPatch.context() as patch:
        change(patch, cuda_executor)
        assert statuses(ordered, "cuda") == expected


def mean_of_parts(merge, parts, stats, sources, heads):
    return merge(parts, torch.zeros_like(stats), sources, heads)


def sums_of_the_next_head(merge, parts, stats, sources, heads):
    return merge(parts, stats.roll(1, -1), sources, heads)


def in_half(attend, q, k, v, mask, scale, with_lse):
    out, logs = attend(q.half(), k.half(), v.half(), None if mask is None else mask.half(), scale, with_lse)
    return out.float(), logs


def last_queries_read_zeros(places, *arguments):
    place, *rest = places(*arguments)
    place[-1] = rest[1]
    return place, *rest


BLOCKS = {
    "merge-without-weights": (cpu_executor, "merge", mean_of_parts),
    "merge-by-other-heads": (cpu_executor, "merge", sums_of_the_next_head),
    "half-precision-inside": (cpu_launch, "_attend", in_half),
    "last-query-reads-zeros": (cpu_executor, "_places", last_queries_read_zeros),
}


@pytest.mark.parametrize("fault", BLOCKS)
def test_a_fault_inside_the_processors_executor_is_caught(ordered, fault):
    with pytest.MonkeyPatch.context() as patch:
        wrapped(patch, *BLOCKS[fault])
        assert statuses(ordered, "cpu") == BOTH


@triton.jit
def _not_rescaled(b_s, b_v0, b_v1, m_i, l_i, acc0, acc1, scale_log2, D1: tl.constexpr):
    """`update` that leaves what it has gathered as it is when the maximum grows."""
    m_new = tl.maximum(m_i, tl.max(b_s, 1))
    b_p = tl.exp2(b_s * scale_log2 - (m_new * scale_log2)[:, None])
    acc0 = tl.dot(b_p.to(b_v0.dtype), b_v0, acc0, input_precision="ieee")
    return m_new, l_i + tl.sum(b_p, 1), acc0, acc1


@triton.jit
def _sum_not_rescaled(b_s, b_v0, b_v1, m_i, l_i, acc0, acc1, scale_log2, D1: tl.constexpr):
    """`update` that rescales the values and not their sum."""
    m_new = tl.maximum(m_i, tl.max(b_s, 1))
    b_p = tl.exp2(b_s * scale_log2 - (m_new * scale_log2)[:, None])
    alpha = tl.exp2((m_i - m_new) * scale_log2)
    acc0 = tl.dot(b_p.to(b_v0.dtype), b_v0, acc0 * alpha[:, None], input_precision="ieee")
    return m_new, l_i + tl.sum(b_p, 1), acc0, acc1


# What the faults below are faults of. By its own name the kernel would find the faults.
_store_rows, _merge_block = cuda_tile_kernel.store_rows, cuda_tile_kernel.merge_block


@triton.jit
def _all_but_one_row(
    o_ptr, rows, stride_on, acc0, acc1, l_i, m_rows, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr
):  # fmt: skip
    """`store_rows` that does not write a row of each tile."""
    m = tl.arange(0, acc0.shape[0])
    _store_rows(o_ptr, rows, stride_on, acc0, acc1, l_i, m_rows & (m != 3), HEAD_DIM, D0, D1)


@triton.jit
def _first_part_alone(
    acc_ptr, stat_ptr, o_ptr, rows, stride_on, m_rows, n_parts, part_rows,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """`merge_block` that loses all parts but the first."""
    _merge_block(acc_ptr, stat_ptr, o_ptr, rows, stride_on, m_rows, 1, part_rows, BLOCK_M, HEAD_DIM, D0, D1)


def neighbours_first_key(build, *arguments, **options):
    """A step reads the keys of the step behind it."""
    lists = build(*arguments, **options)
    return replace(lists, keys=np.roll(lists.keys, 1, 0))


def no_masks(build, *arguments, **options):
    """Partial steps count as full ones."""
    lists = build(*arguments, **options)
    items = lists.items.copy()
    items[:, Item.FULL_STEPS] = items[:, Item.STEPS]
    return replace(lists, items=items, full=True)


def others_masks(build, *arguments, **options):
    lists = build(*arguments, **options)
    return replace(
        lists,
        bias_index=np.roll(lists.bias_index, 1, 0),
        intervals=np.roll(lists.intervals, 1, 0),
        right=np.roll(lists.right, 1, 0),
    )


KERNELS = {
    "values-not-rescaled": ("update", _not_rescaled),
    "sum-not-rescaled": ("update", _sum_not_rescaled),
    "row-not-written": ("store_rows", _all_but_one_row),
    "parts-lost-in-the-merge": ("merge_block", _first_part_alone),
}
LISTS = {"keys-of-another-step": neighbours_first_key, "no-masks": no_masks, "other-masks": others_masks}


@pytest.mark.skipif(TRITON_DEVICE == "cuda", reason="a compiled kernel does not look its parts up again")
@pytest.mark.parametrize("fault", KERNELS)
def test_a_fault_inside_the_gpus_kernel_is_caught(ordered, fault):
    name, changed = KERNELS[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_tile_kernel, name, changed)
        assert statuses(ordered, "cuda") == BOTH


@pytest.mark.parametrize("fault", LISTS)
def test_a_fault_of_the_lists_of_the_gpus_kernel_is_caught(ordered, fault):
    with pytest.MonkeyPatch.context() as patch:
        wrapped(patch, tile_lists, "build", LISTS[fault])
        assert statuses(ordered, "cuda") == BOTH


# Packed batches.

PACKED = pytest.mark.parametrize("executor", ["cpu", "cuda"])


# Where an executor runs its packed batches.
PLACES = {"cpu": "cpu", "cuda": TRITON_DEVICE}


@contextlib.contextmanager
def packing_by(executor):
    """Packed batches run by that executor; a place to put a fault."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pack.EXECUTORS, PLACES[executor], f"tilewright.packed.{executor}.executor")
        pack._executor.cache_clear()
        yield patch
    pack._executor.cache_clear()


def packed(executor, dtype="float32", calls=None):
    """``{call: status}`` of a packed batch of three images; of the first `calls`."""
    place = {"device": PLACES[executor], "dtype": dtype}
    rows = ragged_bench.run_ragged(2, 16, [(5, 20)], {"tilewright": [3]}, QUICK, **place)
    return {row["call"]: row["status"] for row in islice(rows, calls)}


CALLED = ("attend", "attend_into", *ragged_bench.MOVES)


@PACKED
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_fault_a_packed_batch_passes(executor, dtype):
    skip_bfloat16_of_the_interpreter(executor, dtype)
    with packing_by(executor):
        assert packed(executor, dtype) == dict.fromkeys(CALLED, "ok")


def attended_otherwise(change):
    """A fault of ``attend(q, k, v, out=None)``."""

    def fault(patch):
        right = pack.Packing.attend
        patch.setattr(pack.Packing, "attend", lambda packing, *given: change(partial(right, packing), *given))

    return fault


def moved_start(by):
    """The second image begins `by` rows late, for attention only."""

    def fault(patch):
        right = pack.Packing.attend

        def attend(packing, *given):
            lists = packing.lists.clone()
            at = packing.offsets.starts + 1
            items = lists[packing.offsets.work : packing.offsets.work + 3 * packing.offsets.items].view(-1, 3)
            first = items[:, 0] == lists[at]
            items[first, 0] += by
            lists[at] += by
            return right(pack.Packing(packing.offsets, lists), *given)

        patch.setattr(pack.Packing, "attend", attend)

    return fault


def neighbour_leaks_in(patch):
    """The first two images attend as one."""
    right = cpu_packed.Executor._stretches

    def stretches(executor, lists):
        (first, _, a), (_, _, b), *rest = right(executor, lists)
        return [(first, 1, a + b), *rest]

    patch.setattr(cpu_packed.Executor, "_stretches", stretches)


def last_image_is_left_out(patch):
    right = cpu_packed.Executor._stretches
    patch.setattr(cpu_packed.Executor, "_stretches", lambda executor, lists: right(executor, lists)[:-1])


def written(out, value):
    out[-1:] = value
    return out


PACKINGS = {
    "heads": attended_otherwise(lambda attend, q, k, v, *out: attend(q, k, v.flip(1), *out)),
    "keys-for-values": attended_otherwise(lambda attend, q, k, v, *out: attend(q, v, k, *out)),
    "scale": attended_otherwise(lambda attend, q, k, v, *out: attend(1.05 * q, k, v, *out)),
    "half-precision": attended_otherwise(lambda attend, q, k, v, *out: attend(q, k.half().float(), v, *out)),
    "rows-off-by-one": attended_otherwise(lambda attend, q, k, v, *out: attend(q, k.roll(1, 0), v.roll(1, 0), *out)),
    "last-row": attended_otherwise(lambda attend, *given: written(attend(*given), torch.nan)),
    "one-key-lost": attended_otherwise(lambda attend, q, k, v, *out: attend(q, written(k.clone(), 0), v, *out)),
    "start-off-by-one": moved_start(1),
}


@PACKED
@pytest.mark.parametrize("fault", PACKINGS)
def test_a_fault_of_packed_attention_is_caught(executor, fault):
    with packing_by(executor) as patch:
        PACKINGS[fault](patch)
        assert packed(executor, calls=2) == {"attend": "failed", "attend_into": "failed"}


@pytest.mark.parametrize("fault", [neighbour_leaks_in, last_image_is_left_out])
def test_a_fault_inside_the_processors_packed_attention_is_caught(fault):
    with packing_by("cpu") as patch:
        fault(patch)
        assert packed("cpu", calls=2) == {"attend": "failed", "attend_into": "failed"}


@pytest.mark.parametrize("call", ["gather", "scatter", "first"])
def test_a_row_that_is_moved_to_the_wrong_place_is_caught(call):
    with packing_by("cpu") as patch:
        right = getattr(pack.Packing, call)
        patch.setattr(pack.Packing, call, lambda packing, x: right(packing, x).roll(1, 0))
        assert {name for name, status in packed("cpu").items() if status == "failed"} == {call}


# Networks: as a GPU computes them, each layer in its type.

NETWORKS = ("vil-tiny-64-relative", "regionvit-tiny-64", "dynamicvit-256-64")
SITES = NETWORKS[:2]


@pytest.fixture(scope="module")
def plans_of_networks(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.mktemp("plans")))
        patch.setitem(dynamicvit.VARIANTS, "deit-256", (64, 2, (1, 2, 3)))
        # As many layers of a kind as share what is planned, or may be taken for one another.
        patch.setitem(regionvit.SIZES, "tiny", ((2, 2, 2, 2), 3))
        patch.setitem(vision_longformer.BLOCKS, "tiny", (1, 1, 2, 1))
        yield


# Drawn and planned once: copies of a network share its plans.
drawn = cache(networks.create)


def judged(name, dtype, fault=lambda network: None):
    """The status of a network whose attention ``tilewright`` has a fault."""

    def created(family, **options):
        network = deepcopy(drawn(family, **options))
        # On a processor, it would be computed in float32.
        network.forward = MethodType(type(network).forward.__wrapped__, network)
        if options["attention"] == "tilewright":
            fault(network)
        return network

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(networks, "create", created)
        (row,) = network_bench.run_network(name, {"tilewright": [2]}, QUICK, dtype=dtype)
    return row["status"]


@pytest.mark.parametrize(("name", "dtype"), cases(NETWORKS, DTYPES))
def test_without_a_fault_a_network_passes(plans_of_networks, name, dtype):
    assert judged(name, dtype) == "ok"


def instead(change):
    """A fault by which attention gives ``change(q, k, v, allowed, bias, out)``, bias [H, N, N] or None."""

    def at_site(attend, arguments, out):
        q, k, v, bias = (*arguments, None)[:4]
        order, bias = attend.site.order, bias() if callable(bias) else bias
        allowed = torch.from_numpy(attend.site.graph.to_dense())[order][:, order]
        added = None if bias is None else bias[:, attend.site.bias_index(order[:, None], order)]
        return change(q, k, v, allowed, added, out).to(out.dtype)

    def among_kept(attend, q, k, v):
        if isinstance(attend, vit_parts.InRows):
            rows = attend.attend(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)))
            out = rows.unflatten(0, (len(q), -1)).transpose(1, 2)
        else:
            out = attend(q, k, v)
        return change(q, k, v, torch.ones(k.shape[2], k.shape[2]) > 0, None, out).to(q.dtype)

    def fault(network):
        for module in network.modules():
            if isinstance(module, attention_sites.Attend) and module.site.attention == "tilewright":
                module.register_forward_hook(at_site)
        for block in network.blocks[1:] if hasattr(network, "blocks") else ():
            block.attn.register_forward_pre_hook(lambda m, given: (given[0], partial(among_kept, given[1])))

    return fault


def block_dropped(q, k, v, allowed, bias, out):
    """64 queries, or as many as there are, do without the first 64 keys that are theirs, or without half of them."""
    allowed = allowed.clone()
    keys = allowed[:64].any(0).nonzero().ravel()
    allowed[:64, keys[: min(64, len(keys) // 2)]] = False
    return reference.attention(q, k, v, allowed, bias=bias)


def one_percent_dropped(q, k, v, allowed, bias, out):
    n = k.shape[2]
    lost = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: -(-n // 100)]
    seen = torch.ones(n, dtype=torch.bool).index_fill(0, lost, False)
    return reference.attention(q, k, v, allowed & seen, bias=bias)


ATTENTIONS = {
    "mean-of-values": lambda q, k, v, allowed, bias, out: v.mean(2, keepdim=True).expand_as(out),
    "dropped-block": block_dropped,
    "one-percent-of-keys": one_percent_dropped,
}


# The least of them in every type, each other one in one.
SEEN_IN = {"mean-of-values": ["float16"], "dropped-block": ["bfloat16"], "one-percent-of-keys": DTYPES}


@pytest.mark.parametrize(
    ("name", "fault", "dtype"),
    [
        # Larger faults of a network whose sites are as those of another one.
        pytest.param(
            *(name, fault, dtype),
            marks=pytest.mark.slow if name == "regionvit-tiny-64" and fault != "one-percent-of-keys" else [],
        )
        for name in NETWORKS
        for fault in ATTENTIONS
        for dtype in SEEN_IN[fault]
    ],
)
def test_a_network_with_another_attention_is_caught(plans_of_networks, fault, name, dtype):
    assert judged(name, dtype, instead(ATTENTIONS[fault])) == "failed"


# What a layer's plan gets for its bias; first: that of the first layer of the site.
BIASES = {
    "stale": lambda bias, first: first,
    "of-the-next-head": lambda bias, first: bias.roll(1, 0) if len(bias) > 1 else bias.flip(1),
    "of-the-next-entry": lambda bias, first: bias.roll(1, 1),
    "none": lambda bias, first: torch.zeros_like(bias),
}
# ViL's sites have one layer each here, so that no other's bias can be left over.
WRONG = [(name, fault) for name in SITES for fault in BIASES if (name, fault) != (SITES[0], "stale")]


@pytest.mark.parametrize(("name", "fault"), WRONG)
def test_a_wrong_bias_is_caught(plans_of_networks, name, fault):
    right, first = scheduled.prepare, {}

    def prepare(site, bias, *kind):
        return right(site, BIASES[fault](bias, first.setdefault(site, bias)), *kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduled, "prepare", prepare)
        assert judged(name, "bfloat16") == "failed"


# Slices: lists of a predictor and of the oracle, of tokens with text before and behind them.

TEXT = (3, 5)


@pytest.fixture(scope="module")
def maps():
    q, k, v = torch.randn(3, 1, 2, 256 + sum(TEXT), 64, generator=torch.Generator().manual_seed(0))
    return slice_bench.Maps(2, 64, (4, 8, 8), "raster", text=TEXT, made=SimpleNamespace(q=1.5 * q, k=k, v=v))


def listed(maps):
    """``{(who chose, call): status}`` of what attends by lists, and of what makes them."""
    setting = {"by": "pooled", "pool": 16, "rows": 16}

    def offered():
        own, found = maps.oracle("16x1", keep=0.4), maps.predicted("pooled", setting, keep=0.4, budget=0.5)
        return [slice_bench.ours(maps, own), *slice_bench.predicting(maps, setting, found, 0.5)]

    rows = list(slice_bench.rows_of(maps, [({}, offered)], QUICK))
    assert all(("p50_us" in row) == (row["status"] == "ok") for row in rows)
    return {(row.get("chosen_by"), row.get("call")): row["status"] for row in rows}


OF_LISTS = ("oracle", "attend"), ("pooled", "predict"), ("pooled", "predict_attend")


def test_without_a_fault_lists_pass(maps):
    assert listed(maps) == dict.fromkeys(OF_LISTS, "ok")


def of_executor(change):
    """A fault of the lists, or of the scale, that attention by lists is computed with: ``change(keys, counts)``."""

    def fault(patch):
        right = cpu_slices.Executor.attend

        def attend(executor, lists, *qkv, **options):
            keys, counts = (x.clone() for x in lists[:2])
            change(keys, counts)
            return right(executor, (keys, counts, *lists[2:]), *qkv, **options)

        patch.setattr(cpu_slices.Executor, "attend", attend)

    return fault


def key_dropped(keys, counts):
    """The middle one of one group."""
    keys[0, 0, 3, 40:-1] = keys[0, 0, 3, 41:].clone()
    counts[0, 0, 3] -= 1


def key_twice(keys, counts):
    keys[0, 0, 3, 41:] = keys[0, 0, 3, 40:-1].clone()
    counts[0, 0, 3] += 1


def last_key_is_not_read(keys, counts):
    counts[0, 1, 2] -= 1


def one_key_too_many(keys, counts):
    """Behind the end of a list its last key is repeated."""
    keys[0, 1, 2, counts[0, 1, 2]] = keys[0, 1, 2, counts[0, 1, 2] - 1]
    counts[0, 1, 2] += 1


def text_is_not_read(keys, counts):
    first, last = TEXT
    keys[..., :-first] = keys[..., first:].clone()
    counts -= first + last


def of_the_next_head(keys, counts):
    keys.copy_(keys.roll(1, 1))


def of_the_next_group(keys, counts):
    keys.copy_(keys.roll(1, 2))


def another_scale(patch):
    right = cpu_slices.Executor.attend
    patch.setattr(
        cpu_slices.Executor, "attend", lambda *given, scale, **options: right(*given, scale=1.05 * scale, **options)
    )


def text_sees_less(patch):
    """Queries of text do without the last keys."""
    right = slice_attention.dense
    patch.setattr(slice_attention, "dense", lambda q, k, v, **how: right(q, k[:, :, :-1], v[:, :, :-1], **how))


LISTED = {
    "key-dropped": of_executor(key_dropped),
    "key-twice": of_executor(key_twice),
    "count-short-of-one": of_executor(last_key_is_not_read),
    "count-more-by-one": of_executor(one_key_too_many),
    "text-keys": of_executor(text_is_not_read),
    "next-head": of_executor(of_the_next_head),
    "next-group": of_executor(of_the_next_group),
    "scale": another_scale,
    "text-queries": text_sees_less,
}


@pytest.mark.parametrize("fault", LISTED)
def test_a_fault_of_attention_by_lists_is_caught(maps, fault):
    with pytest.MonkeyPatch.context() as patch:
        LISTED[fault](patch)
        found = listed(maps)
    assert {found[call] for call in OF_LISTS if "attend" in call[1]} == {"failed"}


@pytest.mark.parametrize("by", [0.05, -0.05])
def test_wrong_sums_of_attention_by_lists_are_caught(maps, by):
    """Recall is told from them."""
    right = cpu_slices.Executor.attend

    def attend(*given, **options):
        out, lse = right(*given, **options)
        return out, None if lse is None else lse + by

    untimed = recall.Settings(
        **{"weights": None, "layers": 1, "noise": (), "orders": ("raster",), "recalls": (0.9,), "timed": 0.5},
        **{"groups": ("16x1",), "predictors": {}, "baselines": (), "max_seconds": 0.001},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_slices.Executor, "attend", attend)
        assert listed(maps) == dict.fromkeys(OF_LISTS, "failed")
        assert [row["status"] for row in _recall._rows_of(maps, untimed, Run())] == ["failed"]


def a_code_too_few(flags, codes, always):
    """Keys of the last code that is taken are left out."""
    last = codes.masked_fill(~flags | always, 0).amax(1, keepdim=True)
    return flags & ((codes < last) | always)


def a_code_too_many(flags, codes, always):
    last = codes.masked_fill(~flags | always, 0).amax(1, keepdim=True)
    return flags | (codes <= last + 1)


SELECTIONS = {"ties-dropped": a_code_too_few, "a-code-more": a_code_too_many}


@pytest.mark.parametrize("fault", SELECTIONS)
def test_lists_of_other_lengths_than_were_asked_for_are_caught(maps, fault):
    def selected(right, codes, rule, most, always):
        flags, _ = right(codes, rule, most, always)
        flags = SELECTIONS[fault](flags, codes, always)
        return flags, flags.sum(1)

    with pytest.MonkeyPatch.context() as patch:
        wrapped(patch, cpu_selection, "_taken", selected)
        found = listed(maps)
    assert found == {call: "ok" if call[0] == "oracle" else "failed" for call in OF_LISTS}


# Paths and streams: what runs is another path than its name says.

trained = weights


def other_path(**changes):
    """A fault of the path that a text stands for: ``{field: change(its value)}``."""

    def fault(patch):
        @torch.inference_mode()
        def called(self, text, images):
            path = self.paths[text]
            stated = {name: change(getattr(path, name)) for name, change in changes.items()}
            return self.network(images, msgspec.structs.replace(path, **stated))

        patch.setattr(calls.Calls, "_called", called)

    return fault


PATHS = {
    "block-skipped": other_path(blocks=lambda stages: (*stages[:-1], "0" + stages[-1][1:])),
    "first-block-skipped": other_path(blocks=lambda stages: ("0" + stages[0][1:], *stages[1:])),
    "scale": other_path(scale=lambda scale: 1.5 - scale),
    "levels": other_path(levels=lambda levels: levels[:-1]),
    "first-level": other_path(levels=lambda levels: levels[1:]),
}


@pytest.mark.parametrize("fault", PATHS)
@pytest.mark.parametrize("run", [planned, streamed])
def test_a_path_that_runs_as_another_is_caught(trained, run, fault):
    with pytest.MonkeyPatch.context() as patch:
        PATHS[fault](patch)
        rows = run(trained)
    assert rows and {row.get("status") for row in rows} == {"failed"} and all("maps" in row["reason"] for row in rows)


@pytest.fixture(scope="module")
def with_statistics(trained, tmp_path_factory):
    """The same paths, with decoders' statistics of their own."""
    entries = [msgspec.structs.replace(entry, rung="statistics") for entry in look_up.read(trained[1])]
    table = tmp_path_factory.mktemp("statistics") / "table.csv"
    look_up.write(table, entries)
    return trained[0], str(table)


def of_another_path(folded):
    return dict(zip(folded, [*list(folded.values())[1:], next(iter(folded.values()))], strict=True))


STATISTICS = {"right": dict, "of-another-path": of_another_path, "of-the-network": lambda folded: {}}


@pytest.mark.parametrize("fault", STATISTICS)
def test_statistics_of_another_decoder_are_caught(with_statistics, fault):
    right = calls.Calls.__init__

    def made(self, network, paths, *, folded=None, **how):
        right(self, network, paths, folded=folded and STATISTICS[fault](folded), **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_bench, "SCENES", 2)
        patch.setattr(calls.Calls, "__init__", made)
        rows = streamed(with_statistics, rung="statistics", contenders=["closed"])
    assert rows and {row.get("status", "ok") for row in rows} == {"ok" if fault == "right" else "failed"}


def test_maps_of_an_earlier_frame_are_caught(trained):
    right, shown = runner.Picker.run, []

    def run(picker, entry, images):
        shown.append(images)
        return right(picker, entry, shown[-2:][0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.Picker, "run", run)
        rows = streamed(trained, contenders=["closed", "full"])
    assert rows and {row.get("status", "ok") for row in rows} == {"failed"}


# Video: lists that are kept over steps, in another order than the raster, and windows, which have one of their own.

LISTS_OF_STEPS = {"keep": 0.6, "budget": 0.7, "rows": 16, "predictor": {"pool": 16}}
ATTENTION = {
    "slices": video.Attention("slices", LISTS_OF_STEPS, "hilbert", 2),
    "window": video.Attention("window", {"window": (1, 5, 5)}, None, 1),
}


def passes(dtype, fault, attention=ATTENTION, layers=2):
    """``{attention: status}`` of a pass with a `fault`."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 16, 2, 16, 16, generator=generator).to(getattr(torch, dtype)), torch.tensor([500.0]), None
    stated = video.Settings(attention, ("eager",), 2, 0.001, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(video_pattern.VARIANTS, "tiny", video_pattern.Size(128, 128, 1, layers))
        patch.setattr(video_bench, "_inputs", lambda *_, **__: inputs)
        fault(patch)
        rows = list(video_bench.run_network("wan-tiny-480p-5f", stated, Run("cpu", dtype, 0, 1.0, 1)))
    assert all(("p50_us" in row) == (row["status"] == "ok") for row in rows)
    return {row["attention"]: row["status"] for row in rows}


def lists_of(change):
    """A fault of which lists are taken: ``change(layer, step)``."""

    def fault(patch):
        right = slice_steps.Steps.lists
        patch.setattr(
            slice_steps.Steps,
            "lists",
            lambda steps, layer, step, branch: right(steps, change(layer, step), step, branch),
        )

    return fault


def order_not_undone(patch):
    patch.setattr(wan._Clip, "raster", lambda clip, x: x)


def order_undone_by_itself(patch):
    patch.setattr(wan._Clip, "raster", wan._Clip.ordered)


def angles_of_the_raster(patch):
    def made(right, network, grid, device):
        return right(network, grid, device)._replace(angles=[x.to(device) for x in wan.rotary(grid)])

    right = wan.Network._made
    patch.setattr(wan.Network, "_made", lambda *given: made(right, *given))


ORDERS = {"not-undone": order_not_undone, "undone-by-itself": order_undone_by_itself, "angles": angles_of_the_raster}


@pytest.fixture
def kept_plans(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_fault_a_pass_of_a_video_has_a_time(kept_plans, dtype):
    assert passes(dtype, lambda patch: None) == dict.fromkeys(ATTENTION, "ok")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ORDERS)
def test_tokens_of_a_video_at_other_places_are_caught(kept_plans, fault, dtype):
    assert passes(dtype, ORDERS[fault]) == dict.fromkeys(ATTENTION, "failed")


KEPT = {
    "last-by-first": lambda layer, step: 0,
    "middle-by-first": lambda layer, step: 0 if layer == 1 else layer,
    "later-step-by-first-layer": lambda layer, step: 0 if step else layer,
}


@pytest.mark.parametrize("fault", KEPT)
def test_lists_of_another_layer_of_a_video_are_caught(fault):
    found = passes("float32", lists_of(KEPT[fault]), {"slices": ATTENTION["slices"]}, layers=3)
    assert found == {"slices": "failed"}


# Worth: a window around each token, behind a global one, in the order of its plan.

WINDOWS = worth.Settings(
    **{"square": 1, "densities": (0.4,), "heads": 2, "head_dim": 32, "batch": 2, "order": "rcm", "solver": "greedy"},
    **{"masked": {}, "masked_densities": (), "compiled": False, "max_entries": 10**6, "max_seconds": 0.001},
)


def parts(dtype, change):
    """``{part: status}`` of windows whose plan gives what ``change(plan, q, k, v)`` does."""
    made = worth_bench._plan

    class Changed:
        def __init__(self, *given):
            self.plan = made(*given)

        def __getattr__(self, name):
            return getattr(self.plan, name)

        def __call__(self, *qkv, ordered):
            return change(self.plan, *qkv)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worth_bench, "_plan", Changed)
        rows = [
            row for row in worth_bench.run("8", WINDOWS, Run("cpu", dtype, 0, 1.0, 1)) if row["provider"] == worth.OURS
        ]
    assert all(("p50_us" in row) == (row["status"] == "ok") for row in rows)
    return {row["part"]: row["status"] for row in rows}


def without_the_global_token(plan, q, k, v):
    """No query sees it."""
    at = int(np.flatnonzero(plan.row_order.numpy() == 0)[0])
    keep = torch.arange(k.shape[2]) != at
    allowed = torch.from_numpy(plan.graph.to_dense()) & keep
    return reference.attention(q, k, v, allowed).to(q.dtype)


def without_a_key(plan, q, k, v):
    """The last query does without its first key."""
    allowed = torch.from_numpy(plan.graph.to_dense()).clone()
    allowed[-1, allowed[-1].nonzero()[0]] = False
    return reference.attention(q, k, v, allowed).to(q.dtype)


WINDOW_FAULTS = {
    "global-token": without_the_global_token,
    "a-key": without_a_key,
    "order-not-undone": lambda plan, *qkv: plan(*qkv, ordered=True)[:, :, plan.row_order],
    "in-raster-order": lambda plan, *qkv: plan(*qkv),
    "another-image": lambda plan, *qkv: plan(*qkv, ordered=True).roll(1, 0),
    "keys-of-another-image": lambda plan, q, k, v: plan(q, k.roll(1, 0), v.roll(1, 0), ordered=True),
    "keys-of-another-head": lambda plan, q, k, v: plan(q, k.roll(1, 1), v, ordered=True),
    "scale": lambda plan, q, k, v: plan(1.25 * q, k, v, ordered=True),
}
LAYER_AND_BLOCK = ("layer", "block")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_fault_windows_have_a_time(kept_plans, dtype):
    found = parts(dtype, lambda plan, *qkv: plan(*qkv, ordered=True))
    assert found == dict.fromkeys(LAYER_AND_BLOCK, "ok")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", WINDOW_FAULTS)
def test_a_fault_of_windows_is_caught_in_a_layer_and_in_a_block(kept_plans, fault, dtype):
    assert parts(dtype, WINDOW_FAULTS[fault]) == dict.fromkeys(LAYER_AND_BLOCK, "failed")


# Pruned networks, beside the padded one.


def pruned(fault=lambda patch: None):
    """``{batching: status}`` of a network with a `fault`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(deit.VARIANTS, "tiny", (32, 2))
        patch.setattr(pruned_bench, "JUDGED", 4)
        patch.setattr(pruned_bench, "FITTED", 16)
        fault(patch)
        chosen = ("deit-tiny-64-threshold_l2", ({"keep_range": [0.4, 0.8]},), ("padded", "ragged"), {"eager": [2]})
        rows = list(pruned_bench.run_pruned(*chosen, QUICK))
    assert all(("p50_us" in row) == (row["status"] == "ok") for row in rows)
    return {row["batching"]: row["status"] for row in rows}


def narrowed(change):
    """A fault of the tokens and of those that are kept, as they are packed: ``change(x, keep)``."""

    def fault(patch):
        def narrow(right, x, layout, choice, *rest):
            x, keep = change(x, choice.keep.clone())
            most = max(choice.most, int(keep.sum(1).max()))
            return right(x, layout, replace(choice, keep=keep, least=1, most=most), *rest)

        wrapped(patch, packed_batching, "narrow", narrow)

    return fault


def dropped(x, keep):
    keep[1, keep[1].nonzero()[2]] = False
    return x, keep


def one_more(x, keep):
    keep[1, (~keep[1]).nonzero()[-1]] = True
    return x, keep


def another_stays(x, keep):
    return one_more(*dropped(x, keep))


def class_token_goes(x, keep):
    keep[:, 0] = False
    return x, keep


def backwards(x, keep):
    """Behind the class token, tokens stand in the other order, and so do those that are kept."""
    return torch.cat((x[:, :1], x[:, 1:].flip(1)), 1), torch.cat((keep[:, :1], keep[:, 1:].flip(1)), 1)


def class_token_of_another(patch):
    right = token_layouts.Packed.first
    patch.setattr(token_layouts.Packed, "first", lambda layout, x: right(layout, x).roll(1, 0))


def second_for_first(patch):
    """The token behind the class token stands for it."""
    patch.setattr(token_layouts.Packed, "first", lambda layout, x: layout.padded(x)[:, 1])


PRUNED = {
    "token-dropped": narrowed(dropped),
    "token-more": narrowed(one_more),
    "another-token": narrowed(another_stays),
    "class-token": narrowed(class_token_goes),
    "order": narrowed(backwards),
    "another-image": narrowed(lambda x, keep: (x.roll(1, 0), keep)),
    "class-token-of-another": class_token_of_another,
    "second-for-first": second_for_first,
}


def test_without_a_fault_pruned_networks_have_times():
    assert pruned() == {"padded": "ok", "ragged": "ok"}


@pytest.mark.parametrize("fault", PRUNED)
def test_a_fault_of_packed_tokens_in_a_network_is_caught(fault):
    assert pruned(PRUNED[fault]) == {"padded": "ok", "ragged": "failed"}


def test_a_pruner_that_drops_class_tokens_is_caught():
    """All batchings do as it says, so that none differs from another."""

    def fault(patch):
        def drop(right, pruner, *given):
            x, choice = right(pruner, *given)
            choice.keep[:, 0] = False
            return x, choice

        right = threshold_l2.Pruner.forward
        patch.setattr(threshold_l2.Pruner, "forward", lambda *given: drop(right, *given))

    assert pruned(fault) == {"padded": "failed", "ragged": "failed"}
