"""What a tool that watches memory and races says of warps with roles that cannot race: its share of what it reports.

Two kernels in Gluon for Hopper. Roles of ``alone`` share nothing: each copies numbers of its own. In ``handed`` a role
copies numbers to shared memory, asynchronously, and a barrier in memory tells the others that they are there; they are
written once and read after that. What is reported of these is reported of any kernel of such roles, as
`slice_warp_kernel` is one.

    compute-sanitizer --target-processes application-only --tool racecheck python benchmarks/warp_roles.py
    compute-sanitizer --target-processes application-only --tool memcheck python benchmarks/warp_roles.py --registers 40
"""

import argparse
import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

# Numbers that a role copies, warps of a role, and programs.
NUMBERS, WARPS, PROGRAMS = 1024, gl.constexpr(4), 8


@gluon.jit(do_not_specialize=["n"])
def alone(o_ptr, x_ptr, n, BLOCK: gl.constexpr, REGISTERS: gl.constexpr):
    """Each of three roles adds 1 to a block of its own. REGISTERS: of a thread of the last role."""
    base = gl.program_id(0) * 3 * BLOCK
    gl.warp_specialize(
        [
            (_add, (o_ptr, x_ptr, base, n, BLOCK)),
            (_add, (o_ptr, x_ptr, base + BLOCK, n, BLOCK)),
            (_add, (o_ptr, x_ptr, base + 2 * BLOCK, n, BLOCK)),
        ],
        [WARPS, WARPS],
        [168, REGISTERS],
    )


@gluon.jit(do_not_specialize=["n"])
def handed(o_ptr, x_ptr, n, BLOCK: gl.constexpr, REGISTERS: gl.constexpr):
    """A role copies two blocks to shared memory; two others add 1 to one each."""
    base = gl.program_id(0) * 2 * BLOCK
    at: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = gl.allocate_shared_memory(gl.float32, [2, BLOCK], at)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=WARPS * 32)
    gl.warp_specialize(
        [
            (_take, (o_ptr, memory, full, 0, base, n)),
            (_take, (o_ptr, memory, full, 1, base, n)),
            (_hand, (x_ptr, memory, full, base)),
        ],
        [WARPS, WARPS],
        [168, REGISTERS],
    )


@gluon.jit
def _add(o_ptr, x_ptr, base, n, BLOCK: gl.constexpr):
    i = base + gl.arange(0, BLOCK, gl.BlockedLayout([4], [32], [WARPS], [0]))
    gl.store(o_ptr + i, gl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


@gluon.jit
def _hand(x_ptr, memory, full, base):
    BLOCK: gl.constexpr = memory.shape[1]
    i = base + gl.arange(0, BLOCK, gl.BlockedLayout([4], [32], [WARPS], [0]))
    for part in gl.static_range(2):
        async_copy.async_copy_global_to_shared(memory.index(part), x_ptr + part * BLOCK + i)
    async_copy.mbarrier_arrive(full.index(0), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _take(o_ptr, memory, full, part, base, n):
    BLOCK: gl.constexpr = memory.shape[1]
    at: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    mbarrier.wait(full.index(0), 0)
    x = memory.index(part).load(at)
    i = base + part * BLOCK + gl.arange(0, BLOCK, at)
    gl.store(o_ptr + i, x + 1, mask=i < n)


def main():
    """Run both kernels; returns how many results were wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registers", type=int, default=168, help="of a thread of the last role (default: 168)")
    given = parser.parse_args()
    wrong = 0
    for kernel, blocks in ((alone, 3), (handed, 2)):
        x = torch.randn(PROGRAMS * blocks * NUMBERS, device="cuda")
        out = torch.zeros_like(x)
        kernel[(PROGRAMS,)](out, x, len(x), BLOCK=NUMBERS, REGISTERS=given.registers, num_warps=WARPS.value)
        right = torch.equal(out, x + 1)
        wrong += not right
        print(kernel.fn.__name__, "right" if right else "wrong", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
