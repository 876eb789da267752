"""The tile kernel whose warps gather and multiply beside each other: compiled anywhere, run on Hopper alone.

Gluon has no interpreter, so that nothing here runs the kernel without a GPU.
"""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from helpers import plans
from helpers.gpu import HOPPER, needs_hopper
from helpers.gpu import TRITON_DEVICE as DEVICE
from helpers.hopper import compiled
from tilewright import masks, reference
from tilewright.attention import reorder
from tilewright.attention.blocks import tiles
from tilewright.attention.cuda import config, tile_lists, tile_warp_kernel
from tilewright.attention.cuda import executor as cuda_executor


@pytest.mark.parametrize(
    "rows, keys, head_dim, stages, rank, most, across",
    [
        (64, 64, 64, 3, 16, 80, 0),
        (64, 64, 64, 3, 16, 80, 3),
        (64, 64, 64, 3, 1, 128, 0),
        (64, 64, 64, 3, 2, 128, 1),
        (128, 128, 64, 3, 0, 168, 0),
    ],
)
def test_it_compiles_for_hopper(rows, keys, head_dim, stages, rank, most, across):
    constants = {"BLOCK_M": rows, "BLOCK_N": keys, "HEAD_DIM": head_dim, "RANK": rank, "HEADS": 3, "FULL": True}
    constants |= {"PARTIAL": rank > 0, "SPLIT": True, "ORDERED": False, "NUM_STAGES": stages, "MAXNREG": most}
    constants |= {"WIDE": 0, "ACROSS": across}
    types = dict.fromkeys(("item_ptr", "row_ptr", "key_ptr", "part_ptr", "count_ptr"), "*i32")
    types |= {"acc_ptr": "*fp32", "stat_ptr": "*fp32", "scale_log2": "fp32"}
    types |= {"right_ptr": {1: "*fp32", 2: "*u8"}.get(rank, "*bf16")}
    given = {"free": ("n_items", "n_hb"), "gluon": True, "num_warps": 4, "maxnreg": most}
    made = compiled(tile_warp_kernel.__name__, "tilewright_tile_attention_by_warps", constants, types, **given)
    factors = rank if rank > 2 else 0
    held = (2 * stages * keys + rows) * head_dim * 2 + (stages * keys + rows) * factors * 2
    assert held <= made.shared <= held + 8192 and made.warps == 4 + rows // 16
    # Copies of 16 bytes, by 128 threads: of queries, keys and values, and factors.
    copies = made.ptx.count("cp.async.cg")
    assert copies == ((rows + 2 * keys) * head_dim + (rows + keys) * factors) // 8 // 128
    assert made.ptx.count("wgmma.mma_async") >= rows // 64 * (head_dim // 16 + keys // 16)
    assert made.spilled == [0, 0] and not made.serialized


def by_warps(rows, head_dim, dtype):
    """Forms of all kinds that a tile is tried with."""
    found = config.candidates(tiles.parse(f"{rows}x1"), head_dim, dtype, config.ANY_ROOM)
    return [form for form in found if form.loads == "warps"]


def check(dense, rows, form, *, head_dim, dtype, heads=2, batch=1, loads="warps", **options):
    """Run a random order and schedule in a form, and compare with the reference; return the executor."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(batch, heads, n, head_dim) for n in (dense.shape[0], dense.shape[1], dense.shape[1])]
    qkv = [torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes]

    def prepare(schedule, cover, **given):
        return cuda_executor.prepare(replace(schedule, forms=(asdict(form),) * len(cover)), cover, **given)

    call, inputs, expected = plans.prepared(
        prepare, dense, [f"{rows}x1"], qkv, region_rows=128, device=DEVICE, **options
    )
    for _ in range(3):
        # Again and again: the counters of split blocks are to be as they were.
        result = call(*inputs).cpu()
        assert not result.isnan().any()
        assert reference.relative_error(result, expected) <= reference.TOLERANCE[dtype]
    assert {launch.loads(*inputs) for launch in call.launches} == {loads}
    return call


FORMS = [(rows, d, form) for rows in (64, 128) for d in (32, 64, 128) for form in by_warps(rows, d, torch.bfloat16)]


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, head_dim, form", FORMS, ids=str)
def test_every_form(rows, head_dim, form, dtype):
    sizes = {"head_dim": head_dim, "dtype": dtype}
    rng = np.random.default_rng(0)
    windows = reorder.apply(masks.build("vil-tiny-96-s1-exact"), "window")[0].to_dense()
    call = check(windows, rows, form, **sizes, split_keys=128)
    assert {launch.lists.rank for launch in call.launches} == {tile_lists.BYTES}
    assert call.launches[0].lists.groups > 0
    # In a random order each tile has rows of few groups, whose masks have few factors.
    groups = np.kron(np.eye(6, dtype=bool), np.ones((50, 60), bool))
    call = check(groups, rows, form, **sizes, split_keys=128)
    assert {launch.lists.rank for launch in call.launches} <= set(tile_lists.RANKS)
    near = abs(np.arange(300)[:, None] - np.arange(500)) < 150
    check(near, rows, form, **sizes, batch=3)
    check(rng.random((200, 300)) < 0.5, rows, form, **sizes, split_keys=128)
    kept = np.repeat(rng.random((1, 900)) < 0.5, 300, axis=0)
    check(kept, rows, form, **sizes, split_keys=128, ordered=True)


@needs_hopper
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("n_global", [1, 9, 100], ids=lambda n: f"{n}-global")
def test_rows_without_keys_and_rows_that_see_all(rows, n_global):
    form = by_warps(rows, 64, torch.bfloat16)[0]
    dense = abs(np.arange(400)[:, None] - np.arange(700)) < 60
    dense[:n_global], dense[200:205] = True, False
    check(dense, rows, form, head_dim=64, dtype=torch.bfloat16, split_keys=64)


@needs_hopper
@pytest.mark.parametrize("rows", [64, 128])
def test_launches_that_it_does_not_hold_for_are_gathered(rows):
    form = by_warps(rows, 64, torch.bfloat16)[-1]
    dense = plans.pattern(150, 200, 0.5)
    sizes = {"head_dim": 64, "dtype": torch.bfloat16, "loads": "gather"}
    check(dense, rows, form, **sizes, bias=torch.randn(2, *dense.shape))
    check(np.ones((150, 200), bool), rows, form, **sizes, scale=-0.5)


def test_without_hopper_launches_are_gathered():
    if HOPPER:
        pytest.skip("this machine has a Hopper GPU")
    for rows in (64, 128):
        form = by_warps(rows, 64, torch.float16)[0]
        check(plans.pattern(70, 90), rows, form, head_dim=64, dtype=torch.float16, loads="gather", split_keys=64)
