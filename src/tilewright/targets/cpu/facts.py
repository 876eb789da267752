"""The cores of this machine that torch computes on, and their caches."""

import os
import platform
from pathlib import Path

from tilewright.core.provenance import versions

MACHINE = ("kind", "name")
IDENTITY = (*MACHINE, "threads", "l1_bytes", "l2_bytes", "l3_bytes", "torch")

TORCH_DEVICE = "cpu"
CUDA = GPU_TIMER = GRAPHS = EXCLUSIVE = False
TILES = ("32x1", "64x1", "64x64")
FEWEST_ROWS = 1
# At head dim 64, K and V of an item in float32 are half a megabyte, a share of a core's second-level cache.
SPLIT_KEYS = 1024

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# ASSUME: the cache of a machine that does not tell: what x86 and Arm servers of the last decade have at least.
_UNKNOWN_CACHE = {1: 32 << 10, 2: 512 << 10, 3: 4 << 20}


def describe():
    """Facts of this machine.

    name: of the processor. cores: logical processors this process may use; threads: those that torch uses in one
        operator.
    l1_bytes, l2_bytes: data caches of one core; l3_bytes: last-level cache, shared. memory_bytes: physical memory.
    """
    import torch

    caches = _caches()
    return {
        "kind": "cpu",
        "name": _name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        **{f"l{level}_bytes": caches.get(level, unknown) for level, unknown in _UNKNOWN_CACHE.items()},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": versions("torch", "numpy"),
    }


def current():
    """None: a machine's cores have no number."""
    return None


def limits(device):
    """Limits of the cores: what runs side by side, and the memory that is there.

    ASSUME: caches are no limits. An item beyond the caches runs slower, which its profile shows; memory is what cannot
    be exceeded, shared by the items that run side by side (C2) and by the batches of a round (C5), whose largest items
    stand for them. Cores queue the items of a round, so that occupancy (C6) counts the memory of their results and
    tables.
    """
    memory = float(device["memory_bytes"])
    share = memory / device["threads"]
    return {
        "lanes": device["threads"],
        "per_block": {"working_set_bytes": share},
        "envelope": {"working_set_bytes": memory},
        "occupancy": memory,
        # Kappa of C3 as published; a further round would only be a further barrier.
        "max_tile_kinds": 4,
        "rounds": 1,
    }


def _caches():
    """Bytes of data caches by level, as the kernel tells."""
    found = {}
    for index in sorted(_CACHES.glob("index*")):
        kind, size = ((index / name).read_text().strip() for name in ("type", "size"))
        if kind != "Instruction":
            found[int((index / "level").read_text())] = int(size.removesuffix("K")) << 10
    return found


def _name():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
