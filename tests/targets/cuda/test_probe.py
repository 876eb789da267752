"""What T3 runs on a GPU: its launches under the interpreter, too; its times where there is a GPU."""

import numpy as np
import pytest
import torch

from helpers import plans
from helpers.gpu import TRITON_DEVICE as DEVICE
from helpers.gpu import hide_gpu
from tilewright import reference, targets
from tilewright.blocks import work
from tilewright.core.errors import DeviceError
from tilewright.targets.cuda import executor as cuda_executor
from tilewright.targets.cuda import probe as cuda_probe
from tilewright.targets.cuda import tile_lists
from tilewright.targets.cuda.tile_lists import Part
from tilewright.targets.measure import measure
from tilewright.targets.setting import setting

H, D = 2, 32
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="times a GPU, and this machine has none")


@pytest.fixture(scope="module")
def ordered():
    return plans.reordered(plans.pattern(100, 200, n_global=2), heads=H, head_dim=D)


@pytest.mark.parametrize("split_keys", [None, 64])
def test_items_that_run_several_times_give_the_same(ordered, split_keys):
    cover = plans.covers(ordered, ["16x1"])["16x1"]
    items = work.items(cover, split_keys)
    lists = tile_lists.build(cover, items.block, items.run_lo, items.run_hi, 64)
    thrice = cuda_probe.repeated(lists, 3)
    assert len(thrice.items) == 3 * len(lists.items)
    assert (thrice.parts[:, Part.NUMBER] == np.tile(lists.parts[:, Part.NUMBER], 3)).all()
    tokens = [
        torch.randn(1, H, n, D, generator=torch.Generator().manual_seed(i)) for i, n in enumerate((100, 200, 200))
    ]
    q, k, v = (x.to(DEVICE) for x in tokens)
    out = torch.full_like(q, torch.nan)
    common = setting(cover.shape, H, D, torch.float32)
    cuda_executor.Launch(thrice, cover.tile, common, DEVICE)(q, k, v, out)
    expected = reference.attention(*tokens, torch.from_numpy(ordered.to_dense()))
    written = torch.from_numpy(np.repeat(cover.runs > 0, cover.rows))
    found, right = out.cpu()[:, :, written], expected[:, :, written]
    assert reference.relative_error(found, right) <= reference.TOLERANCE[torch.float32]


def test_without_a_gpu_nothing_is_profiled(ordered, monkeypatch):
    hide_gpu(monkeypatch)
    with pytest.raises(DeviceError, match="expected an NVIDIA GPU"):
        measure(plans.covers(ordered, ["16x1"])["16x1"], device="cuda")


@needs_gpu
@pytest.mark.parametrize("tile", ["16x1", "64x1", "64x64"])
def test_a_gpu_tells_times_and_resources(ordered, tile):
    cover = plans.covers(ordered, [tile], region_rows=64)[tile]
    measured = measure(cover, device="cuda", dtype="bfloat16", split_keys=64)
    limits = targets.limits(measured.device)
    assert limits.max_tile_kinds == 1 and limits.lanes == measured.device["multiprocessors"]
    assert measured.device["launch_us"] > 0
    for shape in measured.shapes:
        assert shape.latency_us > 0 and shape.alone_us > 0
        assert 0 < shape.resources["shared_bytes"] <= limits.per_block["shared_bytes"]
        assert 0 < shape.resources["registers"] <= 255 and shape.resources["spills"] == 0
        assert shape.resources["resident"] >= 1
