"""How a GPU's kernels are compiled: by the tile, the head dim, the type and what a GPU has room for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.attention.blocks import tiles
from tilewright.attention.cuda import config
from tilewright.attention.cuda.config import KernelConfig, Room
from tilewright.attention.profile import DTYPES

TILE = tiles.parse("64x1")


@given(
    st.sampled_from([16, 32, 64, 128]),
    st.sampled_from([1, 8, 16, 64, 128]),
    st.sampled_from(sorted(config.HEAD_DIMS)),
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from([48 << 10, 99 << 10, 163 << 10, 227 << 10]),
)
def test_the_kernel_of_a_tile_fits_the_device(rows, keys, head_dim, dtype, shared_bytes):
    tile, room, dtype = tiles.Tile(rows, keys), Room(shared_bytes, 1 << 16), getattr(torch, dtype)
    form = config.for_tile(tile, head_dim, dtype, room)
    assert form.step_keys % tile.run == 0 and form.num_warps in (1, 2, 4, 8)
    row_bytes = sum(config.HEAD_DIMS[head_dim]) * dtype.itemsize
    assert form.num_stages == 1 or (2 * form.num_stages * form.step_keys + rows) * row_bytes <= shared_bytes
    if form.maxnreg is not None:
        assert form.maxnreg % 8 in (0, 7) and 32 * form.num_warps * form.maxnreg <= room.registers


@pytest.mark.parametrize(
    "name, head_dim, dtype, expected",
    [
        ("64x1", 64, torch.bfloat16, KernelConfig(64, 2, 4, 128)),
        ("64x1", 32, torch.bfloat16, KernelConfig(64, 2, 4, 96)),
        ("128x128", 64, torch.bfloat16, KernelConfig(128, 2, 8, 128)),
        ("16x1", 64, torch.bfloat16, KernelConfig(64, 2, 1)),
        ("64x1", 48, torch.bfloat16, KernelConfig(128, 2, 4)),
        ("64x1", 64, torch.float32, KernelConfig(64, 2, 4)),
        ("64x1", 128, torch.float32, KernelConfig(16, 1, 8)),
    ],
)
def test_kernels_on_a_large_gpu(name, head_dim, dtype, expected):
    assert config.for_tile(tiles.parse(name), head_dim, dtype, config.ANY_ROOM) == expected


def test_less_shared_memory_has_fewer_stages():
    tile = tiles.parse("128x128")
    large, small = (config.for_tile(tile, 128, torch.bfloat16, Room(kb << 10, 1 << 16)) for kb in (227, 163))
    assert (large.num_stages, small.num_stages) == (2, 1)


def test_fewer_registers_leave_fewer_to_a_thread():
    one, half = (config.for_tile(TILE, 64, torch.float16, Room(227 << 10, n)) for n in (1 << 16, 1 << 15))
    assert (one.maxnreg, half.maxnreg) == (128, 64)
