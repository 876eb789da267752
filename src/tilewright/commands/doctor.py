"""Check the installation: versions, device, compilers and caches, with a remedy for each problem."""

import importlib.util
import os
import platform
import sys
from argparse import ArgumentParser
from importlib import metadata
from pathlib import Path
from typing import Any

from tilewright.core import caches

# Not needed, but used where they are there: what for.
OPTIONAL = {
    "snakemake": "the study: pip install tilewright[study]",
    "timm": "tilewright.integrations.timm",
    "transformers": "tilewright.integrations.transformers",
    "diffusers": "tilewright.integrations.diffusers",
    "gurobipy": "solver gurobi",
}


# Of the plan whose call is timed.
_TOKENS = 64


def arguments(parser: ArgumentParser) -> None:
    """It has none."""


def run() -> int:
    """Print the lines. Returns 1 where something does not work."""
    lines = [*_versions(), *_device(), *_called(), *_compilers(), *_caches(), *_optional()]
    for state, name, text in lines:
        print(f"{state:<5} {name:<12} {text}")
    return int(any(state == "bad" for state, *_ in lines))


def _release(version):
    """The leading numbers of a version, ``2.13.0+cpu`` as (2, 13)."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("+")[0].split(".")[:2])


def _installed(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions():
    """This package, Python, and what it requires."""
    import tilewright

    folder = Path(tilewright.__file__).parent
    yield "ok", "tilewright", f"{tilewright.__version__}, {folder}"
    yield "ok", "python", f"{platform.python_version()}, {sys.executable}"
    if _installed("tilewright") is None:
        yield "note", "versions", "run from its folder, not installed: its requirements are not checked"
        return
    from packaging.requirements import Requirement

    for requirement in map(Requirement, metadata.requires("tilewright") or ()):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        found, name = _installed(requirement.name), requirement.name
        if found is None:
            yield "bad", name, f"not installed, expected {requirement.specifier}: pip install '{requirement}'"
        elif not requirement.specifier.contains(found.partition("+")[0], prereleases=True):
            yield "bad", name, f"{found}, expected {requirement.specifier}: pip install '{requirement}'"
        elif name in ("torch", "triton", "numpy"):
            yield "ok", name, found


def _device():
    """The GPU and what is known of it, or the cores."""
    import torch

    from tilewright import devices
    from tilewright.core import _internals
    from tilewright.core.errors import DeviceError

    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    advice = ""
    if threads < cores:
        advice = "; plans use the threads: torch.set_num_threads before the first plan, or OMP_NUM_THREADS"
    yield "slow" if advice else "ok", "cpu", f"{threads} of {cores} cores in use by torch{advice}"
    if not torch.cuda.is_available():
        yield "note", "gpu", f"none that torch {torch.__version__} can use: {_why_no_gpu(torch)}"
        return
    try:
        gpu = devices.describe("cuda")
    except DeviceError as error:
        yield "bad", "gpu", str(error)
        return
    capability, driver = gpu["capability"], gpu["driver"]
    yield "ok", "gpu", f"{gpu['name']}, compute capability {capability}, driver {driver}, CUDA {torch.version.cuda}"
    if _release(capability) < (8, 0):
        yield "slow", "gpu", f"kernels are written for compute capability 8.0 and later, found {capability}"
    release = ".".join(map(str, _release(_installed("triton") or "0")))
    if release not in _internals.KNOWN_TRITON:
        known = ", ".join(_internals.KNOWN_TRITON)
        yield "slow", "launches", f"calls take 10 µs longer: expected triton {known}, found {release}"
    yield from _calibrated(gpu)


def _called():
    """What a call of a small plan costs."""
    import numpy as np
    import torch

    from tilewright.attention import plan as planning
    from tilewright.core.errors import TilewrightError
    from tilewright.core.timing import time_call, time_host

    gpu = torch.cuda.is_available()
    at = np.arange(_TOKENS)
    sizes: Any = {"heads": 1, "head_dim": 64, "dtype": torch.float16 if gpu else torch.float32}
    try:
        plan = planning.plan(abs(at[:, None] - at) < 8, **sizes, device="cuda" if gpu else "cpu")
    except TilewrightError as error:
        yield "bad", "call", str(error)
        return
    q = torch.randn(1, 1, _TOKENS, 64, device=plan.device).to(plan.dtype)
    effort: Any = {"min_reps": 50, "max_seconds": 0.2, "rse_target": 0.02}
    with torch.no_grad():
        plan(q, q, q)
        if gpu:
            cost = f"{time_host(lambda: plan(q, q, q), **effort)[1]:.0f} µs of the host; a CUDA graph takes less"
        else:
            cost = f"{time_call(lambda: plan(q, q, q), **effort).p50_us:.0f} µs"
    yield "ok", "call", f"{_TOKENS} tokens, 1 head, by {plan.schedule.runs}: {cost} (tilewright bench --ways)"


def _why_no_gpu(torch):
    if torch.version.cuda is None:
        return "it is built without CUDA, see docs/environments.md"
    return "no device, or its driver is too old for CUDA " + torch.version.cuda


def _calibrated(gpu):
    """What plans on this GPU are made of."""
    from tilewright.attention.cuda import calibration

    found = sorted({path.name.rpartition("-")[0] for path in (caches.folder() / calibration.KIND).glob("*.json")})
    if found:
        yield "ok", "calibration", f"measured here for {', '.join(found)} (type-head dim-rows)"
    shipped, name = calibration.shipped(), gpu["name"]
    if shipped and shipped[0].name == name:
        yield "ok", "calibration", f"the package has those of a {name}"
    elif shipped:
        yield (
            "note",
            "calibration",
            f"the package has those of a {shipped[0].name}; for {name} run once: tilewright calibrate",
        )
    elif not found:
        yield "slow", "calibration", f"none for {name}; run once, about a minute: tilewright calibrate"


def _compilers():
    """What compiles, or was compiled."""
    from tilewright.attention.blocks import cut
    from tilewright.core import _internals, compiled

    missing = _internals.missing_compiler()
    if missing:
        yield "note", "C++", f"{missing.splitlines()[0]}: no torch.compile, FlexAttention or AOTInductor on the CPU"
    else:
        yield "ok", "C++", "a compiler for torch.compile, FlexAttention and AOTInductor on the CPU"
    if all(compiled.is_prepared(name) for name in cut.ENTERED):
        yield "ok", "compiled", "functions that plan large patterns"
    else:
        yield "slow", "compiled", "planning large patterns is several times slower; run once: tilewright compile"


def _caches():
    """The folder of caches."""
    folder = caches.folder()
    if not folder.exists():
        nearest = next(parent for parent in folder.parents if parent.exists())
        state = "ok" if os.access(nearest, os.W_OK) else "slow"
        yield (
            state,
            "cache",
            f"{folder} does not exist yet" + ("" if state == "ok" else " and cannot be made; set TILEWRIGHT_CACHE"),
        )
        return
    files = [path for path in folder.rglob("*") if path.is_file()]
    plans = sum(path.suffix == ".plan" for path in files)
    text = f"{folder}: {plans} plans, {sum(path.stat().st_size for path in files) / 1e6:,.1f} MB in {len(files)} files"
    if os.access(folder, os.W_OK):
        yield "ok", "cache", text
    else:
        yield "slow", "cache", f"{text}; cannot be written, so plans are made again each time; set TILEWRIGHT_CACHE"


def _optional():
    for name, use in OPTIONAL.items():
        found = _installed(name) or ("there" if importlib.util.find_spec(name) else None)
        yield ("ok", name, found) if found else ("note", name, f"not installed: {use}")
