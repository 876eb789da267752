"""What programs of each form take on this GPU, measured once and kept in a file (stage T3).

`of` reads the file, or measures: launches of made-up items, all alike, with every multiprocessor working on 1, 2, … of
their programs. What the parts of a program take follows from these times (`calibration_fit`), and `cost_model` puts it
together for a pattern.

A file holds for a form of the kernel (rows of a tile, keys a step, warps, …), a type and a head dim, on a GPU with a
driver, a torch, a triton and this code. For others there are others.
"""

import hashlib
import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

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
from tilewright.core import artifacts, caches, contents, progress, provenance
from tilewright.core.errors import ArtifactError, DeviceError
from tilewright.core.timing import time_gpu

KIND = "calibration"
VERSION = 1
# The facts of a device that it holds for.
FACTS = ("name", "capability", "multiprocessors", "driver")
# Seconds for one timing, and the relative standard error at which it stops.
SHARE_S, RSE, MIN_REPS = 0.04, 0.01, 10
# Where timings spread more than this about their median, someone else uses the GPU.
MOST_SPREAD = 0.05
# Seconds for a process that compiles.
COMPILE_S = 120
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
        "code": provenance.package_digest(),
        "dtype": dtype,
        "head_dim": head_dim,
        "rows": tile.rows,
        **asdict(config.for_tile(tile, head_dim, getattr(torch, dtype))),
    }


def path_of(stated: dict) -> Path:
    """The file of a calibration that is `made_for` what is stated."""
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()[:16]
    return caches.folder() / KIND / f"{stated['dtype']}-{stated['head_dim']}-{stated['rows']}-{digest}.json"


def of(chosen: Sequence[Tile], head_dim: int, dtype: str, anew: bool = False) -> dict:
    """``{tile name: Calibration}`` of the tiles `chosen`: what no file holds yet is measured and written.

    anew: measure all. Two processes that need the same measure it once. Raises `DeviceError` without a GPU, and for a
    tile that does not fit it.
    """
    config.check_head_dim(head_dim)
    stated = {tile: made_for(tile, head_dim, dtype) for tile in chosen}
    # Several tiles may have one form.
    jobs = {path_of(each): tile for tile, each in stated.items()}
    if anew or any(_held(path, stated[tile]) is None for path, tile in jobs.items()):
        with caches.locked(caches.folder() / KIND / "lock"):
            # Another process may have come first.
            left = {path: tile for path, tile in jobs.items() if anew or _held(path, stated[tile], say=True) is None}
            if left:
                compile_ahead(left.values(), head_dim, dtype)
            for path, tile in left.items():
                _HELD[path] = found = measure(Gpu(tile, head_dim, dtype), stated[tile])
                _say_spread(tile, found)
                try:
                    artifacts.write_json(path, KIND, VERSION, asdict(found))
                except ArtifactError as error:
                    _LOG.warning("the calibration serves this process alone: %s", error)
    return {tile.name: _HELD[path_of(stated[tile])] for tile in chosen}


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
                _LOG.warning("a calibration is made anew: %s", error)
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


def compile_ahead(chosen: Iterable[Tile], head_dim: int, dtype: str) -> None:
    """Compile the variants of the tiles `chosen` in processes side by side; Triton finds them in its cache then.

    What they do not compile is compiled later, one after the other.
    """
    variants = list(itertools.product(VARIANTS, (False, True)))
    jobs = [f"{tile.name},{rank},{split:d}" for tile in chosen for rank, split in variants]
    n = min(len(jobs), len(os.sched_getaffinity(0)))
    source = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", __name__, str(head_dim), dtype]
    null = subprocess.DEVNULL
    running = [subprocess.Popen([*command, *jobs[i::n]], env=environment, stdout=null, stderr=null) for i in range(n)]
    for process in progress.with_progress(running, "compile"):
        try:
            process.wait(COMPILE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _compile(head_dim, dtype, *jobs):
    """Compile the variants that `jobs` name, as `compile_ahead` asks for them."""
    for job in jobs:
        name, rank, split = job.split(",")
        gpu = Gpu(tiles.parse(name), int(head_dim), dtype)
        gpu.resources(gpu.setup.compiled(None if rank == "None" else int(rank), bool(int(split))))


if __name__ == "__main__":
    _compile(*sys.argv[1:])
