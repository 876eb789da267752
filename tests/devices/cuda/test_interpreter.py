"""What the tests change of Triton's interpreter gives the same values, of the same types."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from helpers import gpu

pytestmark = pytest.mark.skipif(gpu.TRITON_DEVICE == "cuda", reason="kernels are compiled for the GPU of this machine")
SIZE = 4


@triton.jit
def keep(out_ptr, place, value, SIZE: tl.constexpr):
    ids = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + place * SIZE * SIZE + ids, (value + tl.zeros((SIZE, SIZE), value.dtype)).to(tl.float64))


@triton.jit
def every_operator(out_ptr, x_ptr, i_ptr, j_ptr, h_ptr, number, SIZE: tl.constexpr):
    ids = tl.arange(0, SIZE)
    x, i, j = tl.load(x_ptr + ids), tl.load(i_ptr + ids), tl.load(j_ptr + ids)
    place = 0
    for one, other in (
        (x[:, None], x[None, :]),
        (i[:, None], i[None, :]),
        (j[None, :], j[:, None]),
        # Usual ones: of two types.
        (i[:, None], x[None, :]),
        (i[:, None], j[None, :]),
        (x[:, None], number),
        (i[:, None], number),
        (number, j[:, None]),
        (x[:, None], 3),
        (x[:, None], -0.1),
        (i[:, None], -3),
        (2, j[:, None]),
        (i[:, None], 0.5),
        (x[:, None], SIZE),
        (x[:, None], float("inf")),
    ):
        for value in (
            one + other,
            one - other,
            one * other,
            other - one,
            one < other,
            one <= other,
            one > other,
            one >= other,
            one == other,
            one != other,
        ):
            keep(out_ptr, place, value, SIZE)
            place += 1
    # Pointers and offsets of each kind, a negative one among them.
    for offsets in (ids, ids.to(tl.int64), ids + number, ids - 1, ids.to(tl.int8)):
        keep(out_ptr, place, tl.load((x_ptr + 1) + offsets)[None, :], SIZE)
        keep(out_ptr, place + 1, tl.load(offsets[:, None] + (i_ptr + tl.full((SIZE,), 1, tl.int32))[None, :]), SIZE)
        keep(out_ptr, place + 2, tl.load(j_ptr + number) + tl.zeros((SIZE, SIZE), tl.int64), SIZE)
        place += 3
    # What is masked, by row or whole, and what is chosen.
    rows, both = ids < 3, (ids[:, None] < 3) & (ids[None, :] > 0)
    grid = ids[:, None] + ids[None, :]
    for value in (
        tl.load(x_ptr + grid, both, other=-float("inf")),
        tl.load(x_ptr + grid, rows[:, None], other=2),
        tl.load(i_ptr + grid, both & rows[None, :], other=-7, cache_modifier=".cg"),
        tl.load(h_ptr + grid, mask=both, other=0.5),
        tl.load(h_ptr.to(tl.pointer_type(tl.bfloat16)) + grid, mask=both, other=0.0),
        tl.load(h_ptr.to(tl.pointer_type(tl.bfloat16)) + grid, mask=both, other=0.5),
        tl.load(j_ptr + grid, mask=both, other=0.0),
        tl.load(x_ptr + grid, number < 3, other=1.0),
        tl.load(x_ptr + grid, x_ptr.to(tl.int64) == 0, other=1.0),
        tl.load(x_ptr + ids, rows, other=0.0)[None, :],
        tl.load(i_ptr + ids[:, None], both, other=grid),
        tl.load(h_ptr.to(tl.pointer_type(tl.int1)) + grid),
        tl.load(h_ptr.to(tl.pointer_type(tl.int8)) + grid),
        tl.where(both, x[:, None], x[None, :]),
        tl.where(rows[None, :], i[:, None], grid),
        tl.where(number < 3, x[:, None], grid),
        tl.where(both, x[:, None], 0.5),
        both & rows[:, None],
    ):
        keep(out_ptr, place, value, SIZE)
        place += 1


def test_operators_give_what_they_give_the_usual_way(monkeypatch):
    def run():
        out, types = torch.full((220, SIZE, SIZE), torch.nan, dtype=torch.float64), []
        init = tl.tensor.__init__

        def noted(self, handle, type):
            init(self, handle, type)
            if handle is not None:
                types.append((str(type), handle.data.dtype, handle.data.shape))

        with monkeypatch.context() as patch:
            patch.setattr(tl.tensor, "__init__", noted)
            every_operator[(1,)](out, x, i, j, h, 2, SIZE)
        return out, types

    x = torch.tensor([0.1, -2.5, 3.0, 1e30, 2.0, -0.0, 7.0, 8.0])
    i = torch.tensor([3, -1, 2, 2**31 - 1, 0, 5, 6, 7], dtype=torch.int32)
    j = torch.tensor([3, -(2**40), 2, 4, 1, 1, 1, 1])
    h = torch.tensor([0.5, -1, 2, 3, 4, 5, 0, 6], dtype=torch.float16)
    with np.errstate(over="ignore"):
        short, types = run()
        for name in ("NUMBERS", "OFFSETS", "LOADED", "INDEXED"):
            monkeypatch.setattr(gpu, name, ())
        usual, others = run()
    torch.testing.assert_close(short, usual, rtol=0, atol=0, equal_nan=True)
    assert 165 < (~short.isnan()).all((1, 2)).sum() < 220
    # Fewer values on the way, of no other type.
    assert len(types) < len(others) and set(types) <= set(others)
