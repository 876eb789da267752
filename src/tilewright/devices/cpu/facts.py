"""The cores of this machine that torch computes on, and their caches."""

import os
import platform
from pathlib import Path
from typing import Any

from tilewright.core.provenance import versions

MACHINE = ("kind", "name")
IDENTITY = (*MACHINE, "threads", "l1_bytes", "l2_bytes", "l3_bytes", "torch")

TORCH_DEVICE = "cpu"
CUDA = GPU_TIMER = EXCLUSIVE = False
TILES = ("32x1", "64x1", "64x64")
# Cores take items of any kind from one list.
MIXES = True
FEWEST_ROWS = 1
# At head dim 64, keys and values of an item take half a megabyte in float32, a share of a core's second-level cache.
SPLIT_KEYS = 1024

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# ASSUME: caches of a machine that does not state them: the least that x86 and Arm servers of the last decade have.
_UNKNOWN_CACHE = {1: 32 << 10, 2: 512 << 10, 3: 4 << 20}


def describe() -> dict[str, Any]:
    """Facts of this machine.

    name: of the processor. cores: logical processors this process may use; threads: those that torch uses in one
        operator.
    l1_bytes, l2_bytes: data caches of one core; l3_bytes: last-level cache, shared. memory_bytes: physical memory.
    """
    import torch

    return {
        "kind": "cpu",
        "name": _name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        **_caches(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": versions("torch", "numpy"),
    }


def seen() -> dict:
    """Those facts of this machine that its times depend on, but for threads."""
    return {"kind": "cpu", "name": _name(), **_caches(), **versions("torch")}


def current() -> None:
    """None: a machine's cores have no number."""
    return None


def limits(device: dict[str, Any]) -> dict[str, Any]:
    """Limits of the cores: the number that computes side by side, and the machine's memory.

    ASSUME: memory is the limit, and caches are none: an item that exceeds them runs slower, which its profile shows.
    Items that run side by side share the memory (C2). So do the batches of a round (C5), each counted with its largest
    item. Cores queue the items of a round, so that occupancy (C6) counts the memory of their results and tables.
    """
    memory = float(device["memory_bytes"])
    share = memory / device["threads"]
    return {
        "lanes": device["threads"],
        "per_block": {"working_set_bytes": share},
        "envelope": {"working_set_bytes": memory},
        "occupancy": memory,
        # Kappa of C3 as published. A second round would only add a barrier.
        "max_tile_kinds": 4,
        "rounds": 1,
    }


def _caches():
    """Bytes of data caches by level, from the kernel where it states them."""
    found = dict(_UNKNOWN_CACHE)
    for index in sorted(_CACHES.glob("index*")):
        kind, size = ((index / name).read_text().strip() for name in ("type", "size"))
        if kind != "Instruction":
            found[int((index / "level").read_text())] = int(size.removesuffix("K")) << 10
    return {f"l{level}_bytes": found[level] for level in _UNKNOWN_CACHE}


def _name():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
