"""The NVIDIA GPU that torch computes on: its multiprocessors, their memories and what a launch costs."""

import os
import subprocess
from typing import Any

from tilewright.core.errors import DeviceError
from tilewright.core.provenance import versions

MACHINE = ("kind", "name", "multiprocessors")
IDENTITY = (*MACHINE, "torch", "triton")

TORCH_DEVICE = "cuda"
CUDA = GPU_TIMER = EXCLUSIVE = True
TILES = ("32x1", "64x1", "64x64")
# Launches follow one another, each with a tail of its own: on an H200, plans of several kinds of tiles took longer than
# those of the best kind (docs/decisions/schedules.md).
MIXES = False
# Rows of one tensor-core product.
FEWEST_ROWS = 16
# Longest key range of an item: parts of a global row run side by side. Measured on an H200.
SPLIT_KEYS = 512
# The driver's own command, for facts that torch does not have.
TOOL = "nvidia-smi"
# Calls in the graph that the cost of a launch is measured with.
_LAUNCHES = 256
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def describe() -> dict[str, Any]:
    """Facts of the current GPU.

    multiprocessors: work items run side by side on them; also stated as threads. registers, shared_bytes_each: of one
        multiprocessor. shared_bytes: most that one program may ask for. clock_mhz: the highest. launch_us: cost
        of one more launch in a CUDA graph.
    Raises `DeviceError` without a GPU, and where the driver does not state its version and clock.
    """
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("expected an NVIDIA GPU that torch can use, found none; known: cpu")
    # Any: torch's stub leaves fields out.
    facts: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver, clock = query_gpu("driver_version", "clocks.max.sm")
    return {
        "kind": "cuda",
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "multiprocessors": facts.multi_processor_count,
        "threads": facts.multi_processor_count,
        "registers": facts.regs_per_multiprocessor,
        "shared_bytes_each": facts.shared_memory_per_multiprocessor,
        "shared_bytes": facts.shared_memory_per_block_optin,
        "l2_bytes": facts.L2_cache_size,
        "memory_bytes": facts.total_memory,
        "clock_mhz": float(clock.split()[0]),
        "driver": driver,
        "launch_us": _launch_us(torch),
        "versions": versions("torch", "triton", "numpy"),
    }


def seen() -> dict:
    """The GPUs that the driver lists, by their names, and the versions that times depend on."""
    try:
        listed = _listed("name")
    except (OSError, subprocess.CalledProcessError):
        listed = []
    return {"kind": "cuda", "name": " or ".join(sorted({*listed})), **versions("torch", "triton")}


def _listed(*facts):
    """What `TOOL` states of each GPU, a line each."""
    query = [TOOL, f"--query-gpu={','.join(facts)}", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()


def current() -> int | None:
    """Number of the GPU that torch computes on now; None without one."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else None


def available() -> Any:
    """Identifiers of the GPUs that this process may use, a list. Raises `DeviceError` where the driver lists none."""
    try:
        found = _listed("uuid")
    except (OSError, subprocess.CalledProcessError) as error:
        raise DeviceError(f"expected an NVIDIA GPU that {TOOL} lists, found {error}; known: cpu") from error
    stated = os.environ.get(_VISIBLE)
    return [found[int(name)] if name.isdigit() else name for name in stated.split(",")] if stated else found


def claim(name: str) -> None:
    """Make the GPU `name` the only one that this process sees."""
    os.environ[_VISIBLE] = name


def limits(device: dict[str, Any]) -> dict:
    """Limits of the multiprocessors: shared memory, and memory for the results of split items.

    A launch runs one tile, and a round has one. A lane is a multiprocessor: it works on several items at a time, which
    their latencies, measured with all of them busy, account for.
    """
    return {
        "lanes": device["multiprocessors"],
        "per_block": {"shared_bytes": float(device["shared_bytes"])},
        "envelope": {"shared_bytes": float(device["shared_bytes"])},
        "occupancy": float(device["memory_bytes"]),
        "max_tile_kinds": 1,
        "rounds": 2,
        "round_us": device["launch_us"],
    }


def query_gpu(*facts: Any) -> list[str]:
    """Values of `facts` that `TOOL` states of torch's current GPU, a list of str. Raises `DeviceError`."""
    import torch

    own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        lines = [line.split(", ") for line in _listed("uuid", *facts)]
        return next(rest for uuid, *rest in lines if uuid.endswith(own))
    except (OSError, subprocess.CalledProcessError, StopIteration, ValueError) as error:
        raise DeviceError(f"expected {TOOL} to state {', '.join(facts)} of GPU {own}, found {error!r}") from error


def _launch_us(torch):
    """Cost of one more small launch in a CUDA graph of `_LAUNCHES`, rounded to a tenth of a microsecond."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    x = torch.zeros(1, dtype=torch.float32, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.add_(1)
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_LAUNCHES):
                x.add_(1)
    torch.cuda.current_stream().wait_stream(stream)
    taken = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / _LAUNCHES)
    return round(sorted(taken)[len(taken) // 2], 1)
