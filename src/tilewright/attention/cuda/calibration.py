"""What programs of each form take on this GPU, measured once and kept in a file (stage T3).

`measured` reads the file, or measures: launches of made-up items, all alike, with every multiprocessor working on 1,
2, … of their programs. What the parts of a program take follows from these times (`calibration_fit`), and `cost_model`
puts it together for a pattern.

A file holds for a form of the kernel (rows of a tile, keys a step, warps, …), a type and a head dim, on a GPU with a
driver, a torch, a triton and this kernel. For others there are others. Calibrations of known GPUs come with the package
(`SHIPPED`): `of` takes them where nothing was measured here.
"""

import ast
import hashlib
import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright import devices
from tilewright.attention.blocks import tiles
from tilewright.attention.blocks.tiles import Tile
from tilewright.attention.cuda import config, executor, probe
from tilewright.attention.cuda.calibration_fit import FEW_TOKENS, VARIANTS, Setup, fitted
from tilewright.attention.cuda.cost_model import Calibration
from tilewright.attention.cuda.tile_lists import BYTES, INTERVALS, RANKS, TileLists
from tilewright.attention.setting import setting
from tilewright.core import artifacts, caches, contents, progress
from tilewright.core.contents import Size
from tilewright.core.errors import ArtifactError, DeviceError
from tilewright.core.timing import time_gpu

KIND = "calibration"
VERSION = 2
# Those of a known GPU, a file each; what they are made for by default: head dims and types.
SHIPPED, SHIPPED_KIND = Path(__file__).with_name("calibrations"), "calibrations"
SHIPPED_SIZES = (*((dim, "bfloat16") for dim in (32, 48, 64, 80, 96, 128)), (64, "float32"))
# The facts of a device that it holds for; of these, what a shipped one holds for.
FACTS = ("name", "capability", "multiprocessors", "driver")
ALIKE = ("capability", "multiprocessors")
# What a shipped one does not state of itself.
_ELSEWHERE = (*FACTS, "torch", "triton", "kernel")
# Significant digits of its numbers.
DIGITS = 4
# The code that is timed, from this folder.
KERNEL = ("tile_kernel.py", "../../devices/cuda/online_softmax.py")
# Seconds for one timing, and the relative standard error at which it stops.
SHARE_S, RSE, MIN_REPS = 0.04, 0.01, 10
# Where timings spread more than this about their median, someone else uses the GPU.
MOST_SPREAD = 0.05
# Seconds for a variant that a process compiles.
COMPILE_S = 60
# What the form of a calibration may leave out.
_FORM = dict.fromkeys(("step_keys", "num_stages", "num_warps", "maxnreg"))

_LOG = logging.getLogger(__name__)
# By path, what this process has read or measured.
_HELD: dict = {}


def made_for(tile: Tile, head_dim: int, dtype: str) -> dict:
    """What a calibration of `tile` that is made here and now holds for, a JSON-able dict; dtype: a name.

    Raises `DeviceError` without a GPU.
    """
    device = devices.describe("cuda")
    return {
        **{name: device[name] for name in FACTS},
        **{name: device["versions"][name] for name in ("torch", "triton")},
        "kernel": kernel_digest(),
        **form(tile, head_dim, dtype),
    }


def form(tile: Tile, head_dim: int, dtype: str) -> dict[str, Any]:
    """The part of `made_for` that names a kernel, whatever the device.

    ASSUME: the types of 16 bits are equally fast, and so are head dims that are loaded in as many columns.
    """
    dtype, columns = "bfloat16" if dtype == "float16" else dtype, sum(config.HEAD_DIMS[head_dim])
    kernel = config.for_tile(tile, columns, getattr(torch, dtype))
    return {"dtype": dtype, "head_dim": columns, "rows": tile.rows, **asdict(kernel)}


@cache
def kernel_digest() -> str:
    """Of the code that is timed."""
    folder = Path(__file__).parent
    return code_digest(*((folder / name).read_text(encoding="utf-8") for name in KERNEL))


def code_digest(*sources: str) -> str:
    """Of Python's code, whatever its comments, docstrings and layout."""
    trees = [ast.parse(source) for source in sources]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return hashlib.sha256("\n".join(map(ast.unparse, trees)).encode()).hexdigest()[:16]


def path_of(stated: dict) -> Path:
    """The file of a calibration that is `made_for` what is stated."""
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:16]
    return caches.folder() / KIND / f"{stated['dtype']}-{stated['head_dim']}-{stated['rows']}-{digest}.json"


def of(chosen: Sequence[Tile], head_dim: int, dtype: str) -> dict:
    """``{tile name: Calibration}`` of the tiles `chosen`: measured here, else shipped, else measured now.

    Raises `DeviceError` without a GPU, and for a tile that does not fit it.
    """
    config.check_head_dim(head_dim)
    found = {}
    for tile in chosen:
        stated = made_for(tile, head_dim, dtype)
        found[tile.name] = _held(path_of(stated), stated) or _from_shipped(stated)
    missing = [tile for tile in chosen if found[tile.name] is None]
    return found | measured(missing, [(head_dim, dtype)])[head_dim, dtype]


def measured(chosen: Sequence[Tile], sizes: Sequence[tuple[int, str]], anew: bool = False) -> dict:
    """``{(head dim, type): {tile name: Calibration}}`` of this GPU: what no file holds yet is measured and written.

    anew: measure all. All kernels are compiled first, side by side. Two processes that need the same measure it once.
    Raises as `of` does.
    """
    for head_dim, _ in sizes:
        config.check_head_dim(head_dim)
    stated = {(tile, *size): made_for(tile, *size) for size in sizes for tile in chosen}
    # Several tiles may have one form.
    jobs = {path_of(each): (tile, each) for (tile, *_), each in stated.items()}
    if anew or any(_held(path, each) is None for path, (_, each) in jobs.items()):
        with caches.locked(caches.folder() / KIND / "lock"):
            # Another process may have come first.
            left = {path: job for path, job in jobs.items() if anew or _held(path, job[1], say=True) is None}
            if left:
                compile_ahead((tile, each["head_dim"], each["dtype"]) for tile, each in left.values())
            for path, (tile, each) in left.items():
                _HELD[path] = found = measure(Gpu(tile, each["head_dim"], each["dtype"]), each)
                _say_spread(tile, found)
                try:
                    artifacts.write_json(path, KIND, VERSION, asdict(found))
                except ArtifactError as error:
                    _LOG.warning("the calibration serves this process alone: %s", error)
    return {size: {tile.name: _HELD[path_of(stated[tile, *size])] for tile in chosen} for size in sizes}


@dataclass(frozen=True)
class Shipped:
    """Calibrations of a GPU that come with the package. kernel: `kernel_digest`."""

    name: str
    capability: str
    multiprocessors: Size
    kernel: str
    calibrations: tuple[Calibration, ...]


def shipped() -> list[Shipped]:
    """Those that hold for this GPU: of its capability and number of multiprocessors, its own name first, and of this
    kernel; of any driver and libraries."""
    device = devices.describe("cuda")
    alike = [
        each
        for each in _read_shipped()
        if all(getattr(each, name) == device[name] for name in ALIKE) and each.kernel == kernel_digest()
    ]
    return sorted(alike, key=lambda each: each.name != device["name"])


def _from_shipped(stated):
    """The calibration for what is `stated` that comes with the package, or None."""
    for each in shipped():
        for found in each.calibrations:
            if all(stated[name] == value for name, value in found.made_for.items()):
                if each.name != stated["name"]:
                    _say_sibling(each.name, stated["name"])
                return replace(found, l2_bytes=devices.describe("cuda")["l2_bytes"])
    return None


@cache
def _read_shipped():
    """All that come with the package."""
    return [
        contents.fields(path, SHIPPED_KIND, artifacts.read_json(path, SHIPPED_KIND, VERSION), Shipped)
        for path in sorted(SHIPPED.glob("*.json"))
    ]


@cache
def _say_sibling(known, name):
    _LOG.warning(
        "plans are made from times of a %s, which has the multiprocessors of this %s; `tilewright calibrate` takes its "
        "own, once",
        *(known, name),
    )


def ship(path: str, found: Iterable[Calibration]) -> None:
    """Write calibrations that were measured here as a file of `SHIPPED`. Raises `ArtifactError`."""
    device = devices.describe("cuda")
    held: list[dict] = []
    for each in found:
        made = {name: value for name, value in each.made_for.items() if name not in _ELSEWHERE}
        # Several tiles may have one form.
        if made not in [other["made_for"] for other in held]:
            held.append(asdict(replace(each, made_for=made, timings=())))
    stated = {name: device[name] for name in ("name", *ALIKE)} | {"kernel": kernel_digest()}
    made_by = {name: device["versions"][name] for name in ("torch", "triton")} | {"driver": device["driver"]}
    artifacts.write_json(path, SHIPPED_KIND, VERSION, stated | {"calibrations": _rounded(held)}, made_by)


def _rounded(value):
    """A JSON value with numbers of `DIGITS` digits."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def summary(calibration: Calibration) -> dict:
    """What a person wants to know of a `Calibration`, ``{name: text}``: microseconds of a step with all programs."""
    kernel = calibration.kernel(RANKS[0])
    steps = {each.rank: f"{each.steady_us[2]:.2f}" for each in calibration.kernels}
    return {
        "rows": str(calibration.rows),
        "form": "{step_keys}-{num_stages}-{num_warps}-{maxnreg}".format_map(_FORM | calibration.made_for),
        "registers": f"{kernel.registers:.0f}",
        "resident": str(kernel.resident),
        "full step (us)": f"{kernel.steady_us[1]:.2f}",
        **{f"rank {rank}": steps.get(rank, "-") for rank in RANKS},
        "intervals": steps.get(INTERVALS, "-"),
        "bytes": steps.get(BYTES, "-"),
        "tiles": steps.get(0, "-"),
        "error": f"{calibration.error:.1%}",
        "spread": f"{calibration.spread:.1%}",
        "seconds": f"{calibration.seconds:.1f}",
    }


def _held(path, stated, say=False):
    """The calibration of a file; None where there is none that is `stated` so. say: log one line about a bad one."""
    if path not in _HELD and caches.has(path):
        try:
            found = contents.fields(path, KIND, artifacts.read_json(path, KIND, VERSION), Calibration)
            others = [name for name in stated if found.made_for.get(name) != stated[name]]
            contents.expect(path, not others, "a calibration of this device and code", f"another {', '.join(others)}")
            ranks = {kernel.rank for kernel in found.kernels}
            contents.expect(path, {RANKS[0]} <= ranks <= set(VARIANTS), f"some of the ranks {VARIANTS}", ranks)
            _HELD[path] = found
        except ArtifactError as error:
            if say:
                _LOG.warning("a calibration is made again: %s", error)
    return _HELD.get(path)


def _say_spread(tile, found):
    if found.spread > MOST_SPREAD:
        _LOG.warning(
            "the GPU seems in use by others: times of tile %s spread by %.0f %%; calibrate again when it is free: "
            "tilewright calibrate --anew",
            *(tile.name, 100 * found.spread),
        )


class Gpu:
    """The GPU that torch computes on, running launches of one tile."""

    device = "cuda"

    def __init__(self, tile: Tile, head_dim: int, dtype: str):
        """Launch items of `tile` in programs of `head_dim` and `dtype` (a name)."""
        self.tile, self.head_dim, self.dtype = tile, head_dim, getattr(torch, dtype)
        self.facts = devices.describe("cuda")
        self._size: tuple[int, int] | None = None
        self._tokens: tuple[Tensor, ...] = ()

    @property
    def setup(self) -> Setup:
        """What the points of this tile share."""
        sizes = {name: self.facts[name] for name in ("multiprocessors", "l2_bytes")}
        form = config.for_tile(self.tile, self.head_dim, self.dtype)
        dtype = str(self.dtype).removeprefix("torch.")
        return Setup(self.tile.rows, form.step_keys, self.head_dim, dtype, **sizes)

    def resources(self, lists: TileLists) -> dict[str, float]:
        """What a program takes of a multiprocessor, see `probe.resources`. The kernel is compiled for it."""
        launch, tokens = self.prepared(lists, FEW_TOKENS, 1)
        return probe.resources(launch(*tokens), self.facts)

    def timed(self, lists: TileLists, n_tokens: int, batch: int) -> tuple[float, float]:
        """``(microseconds, spread)`` of a launch of `lists` over `batch` entries of `n_tokens` tokens."""
        launch, tokens = self.prepared(lists, n_tokens, batch)
        launch(*tokens)
        found = time_gpu(lambda: launch(*tokens), min_reps=MIN_REPS, max_seconds=SHARE_S, rse_target=RSE)
        return found.p50_us, (found.p80_us - found.p20_us) / found.p50_us

    def prepared(self, lists: TileLists, n_tokens: int, batch: int) -> tuple[executor.Launch, tuple[Tensor, ...]]:
        """``(launch, tokens)`` of `lists`: q, k, v and memory for the result, a head of `batch` entries."""
        if self._size != (n_tokens, batch):
            # One set at a time: those beyond the second-level cache are large.
            self._size, self._tokens = (n_tokens, batch), ()
            generator = torch.Generator(self.device).manual_seed(0)
            shape = batch, 1, n_tokens, self.head_dim
            qkv = [
                torch.randn(shape, generator=generator, dtype=torch.float32, device=self.device).to(self.dtype)
                for _ in range(3)
            ]
            self._tokens = *qkv, torch.empty_like(qkv[0])
        common = setting((n_tokens, n_tokens), 1, self.head_dim, self.dtype)
        return executor.Launch(lists, self.tile, common, self._tokens[0].device), self._tokens


def measure(gpu: Gpu, stated: dict) -> Calibration:
    """The `Calibration` of a `Gpu` and its tile, made for what is `stated`."""
    begin, setup, needs = time.perf_counter(), gpu.setup, {}
    for key in itertools.product(VARIANTS, (False, True)):
        try:
            needs[key] = gpu.resources(setup.compiled(*key))
        except DeviceError:
            # A variant that does not fit is no matter before a pattern asks for it; without the least, none does.
            if key == (RANKS[0], False):
                raise
    resident = {key: int(each["resident"]) for key, each in needs.items()}
    basic = {rank: setup.basic(rank, resident[rank, False]) for rank in VARIANTS if (rank, False) in resident}
    groups = {"memory": setup.memory(resident[RANKS[0], False])}
    more = {"factors": (RANKS[-1], False), "tiles": (0, False), "parts": (RANKS[0], True)}
    groups |= {name: getattr(setup, name)(resident[key]) for name, key in more.items() if key in resident}
    again = groups["memory"][0]
    points = [*itertools.chain(*basic.values(), *groups.values()), again]
    us, spreads, repeated = {}, [], [gpu.timed(*setup.work(again))[0]]
    for point in progress.with_progress(points, f"calibrate {setup.rows} rows"):
        us[point], spread = gpu.timed(*setup.work(point))
        spreads.append(spread)
        if point == again:
            repeated.append(us[point])
    # Of one launch at the beginning and at the end, and of each launch.
    spread = float(max(max(repeated) / min(repeated) - 1, np.median(spreads)))
    seconds = time.perf_counter() - begin
    return fitted(setup, us, basic, groups, needs, made_for=stated, spread=spread, seconds=seconds)


def compile_ahead(jobs: Iterable[tuple[Tile, int, str]]) -> None:
    """Compile the variants of tiles, each with a head dim and a type, in processes side by side; Triton finds them in
    its cache then.

    What they do not compile is compiled later, one after the other.
    """
    variants = list(itertools.product(VARIANTS, (False, True)))
    words = [
        f"{tile.name},{head_dim},{dtype},{rank},{split:d}" for tile, head_dim, dtype in jobs for rank, split in variants
    ]
    n = min(len(words), len(os.sched_getaffinity(0)))
    source = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    command, null = [sys.executable, "-m", __name__], subprocess.DEVNULL
    running = [subprocess.Popen([*command, *words[i::n]], env=environment, stdout=null, stderr=null) for i in range(n)]
    for process in progress.with_progress(running, "compile"):
        try:
            process.wait(COMPILE_S * -(-len(words) // n))
        except subprocess.TimeoutExpired:
            process.kill()


def _compile(*words):
    """Compile the variants that `words` name, as `compile_ahead` asks for them."""
    for word in words:
        name, head_dim, dtype, rank, split = word.split(",")
        gpu = Gpu(tiles.parse(name), int(head_dim), dtype)
        gpu.resources(gpu.setup.compiled(None if rank == "None" else int(rank), bool(int(split))))


if __name__ == "__main__":
    _compile(*sys.argv[1:])
