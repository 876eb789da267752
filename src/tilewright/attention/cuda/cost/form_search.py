"""The fastest forms of a tile's kernel on this GPU, found by timing the candidates once (stage T3).

Processes side by side compile the candidates of `config`. One that does not compile, does not fit the GPU or attends
wrongly is dropped. The others run two launches of made-up items: short ones with masks, as windows have them, and long
ones without, as kept tokens do. The fastest of each launch is kept.
"""

import math
import os
import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from triton.errors import TritonError

from tilewright import devices, graph, reference
from tilewright.attention import blocks
from tilewright.attention.blocks import tiles, work
from tilewright.attention.cuda import calibration, config, forms, tile_lists
from tilewright.attention.cuda.cost.calibration_points import Point
from tilewright.attention.cuda.forms import Choice, Trial
from tilewright.core import caches, progress
from tilewright.core.errors import DeviceError

# Keys of an item with masks: those of 8 x 8 queries, each of which sees a 15 x 15 window; and of one without.
WINDOW_KEYS, KEPT_KEYS = 22 * 22, 4096
# Programs of each multiprocessor in a launch, one after another or at a time.
PROGRAMS = 12
# Candidates that a core compiles, at most: the last ones are left out. Each takes it one to two seconds.
TURNS = 8
# A candidate has to be faster than the default by this share, which two timings of one launch may differ by, and a
# second form faster than the first.
MARGIN = 0.02
# Tokens of the pattern that candidates are checked with, how far queries see, and groups of a tile's queries that see
# the same keys: so many that all masks have the least rank.
TOKENS, REACH, GROUPS = 1024, 256, 8
# What a candidate that does not compile or run ends with.
FAILURES = (DeviceError, RuntimeError, TritonError)


@dataclass(frozen=True)
class OfTile:
    """A tile whose forms are searched: what `find` needs of it. MOST: forms that are kept of it."""

    tile: tiles.Tile
    head_dim: int
    dtype: str

    MODULE: ClassVar = __name__
    MOST: ClassVar = forms.MOST
    read: ClassVar = staticmethod(config.read)
    as_stated: ClassVar = staticmethod(forms.as_stated)

    def __str__(self) -> str:
        return f"tile {self.tile.name}"

    @property
    def stated(self):
        """What its choice holds for."""
        return forms.made_for(self.tile, self.head_dim, self.dtype)

    def candidates(self):
        """Its forms, the default first."""
        room = forms.room(devices.describe("cuda"))
        return config.candidates(self.tile, self.head_dim, getattr(torch, self.dtype), room)

    def job(self, form):
        """The word that has a process of `MODULE` compile a form."""
        return _job(self.tile, form)

    def tried(self, form):
        """The `Trial` of a form."""
        return _tried(self.tile, self.head_dim, self.dtype, form)


def search(chosen, head_dim, dtype, anew=False) -> None:
    """Find the fastest forms of each of the tiles `chosen` that has no file yet, and write it; anew: of each.

    Two processes that need the same find it once. Raises `DeviceError` without a GPU, and where no form of a tile runs.
    """
    config.check_head_dim(head_dim)
    find([OfTile(tile, head_dim, dtype) for tile in chosen], head_dim, dtype, anew)


def find(subjects, head_dim: int, dtype: torch.dtype, anew: bool) -> None:
    """As `search`, of `subjects` that are like `OfTile`, all of one class."""
    stated = {subject: subject.stated for subject in subjects}
    paths = {subject: forms.path_of(each) for subject, each in stated.items()}
    with caches.locked(caches.folder() / forms.KIND / "lock"):
        left = [
            subject
            for subject in subjects
            if anew or forms.held(paths[subject], stated[subject], say=True, read=subject.read) is None
        ]
        # As many as the cores compile in a few turns; two at least.
        most = max(2, TURNS * len(os.sched_getaffinity(0)) // max(1, len(left)))
        trials = {subject: subject.candidates()[:most] for subject in left}
        jobs = [subject.job(form) for subject, each in trials.items() for form in each]
        done = calibration.side_by_side(left[0].MODULE, head_dim, dtype, jobs) if jobs else ()
        for subject, each in trials.items():
            forms.keep(paths[subject], choose(subject, each, done, stated[subject]))


def choose(subject, candidates, done, stated) -> Choice:
    """The `Choice` among `candidates`, of which the jobs `done` were compiled, made for what is `stated`."""
    found = []
    for form in progress.with_progress(candidates, f"forms of {subject}"):
        # One whose compiler broke off in a process of its own is not tried here. The default is.
        if form == candidates[0] or subject.job(form) in done:
            found.append(subject.tried(form))
        else:
            found.append(Trial(subject.as_stated(form), "not compiled"))
    timed = [trial for trial in found if trial.us]
    if not timed:
        raise DeviceError(f"{subject}: expected a form that runs on this GPU, found {found[0].status}")
    return Choice(stated, tuple(each.form for each in _kept(timed, found[0], subject.MOST)), tuple(found))


def _kept(timed, default, most):
    """The trials of those `timed` whose forms are kept, at most `most`.

    The fastest of each launch: first the one of them that is best over all, then what its own launch takes less in.
    """
    launches = range(len(timed[0].us))
    if most == 1:
        return [_best(timed, default, launches)]
    by_launch = [_best(timed, default, [launch]) for launch in launches]
    first = _best(by_launch, default, launches)
    clearly = [each for launch, each in zip(launches, by_launch, strict=True) if _faster(each, first, [launch])]
    return [first, *clearly][:most]


def _best(timed, default, launches):
    """The trial that takes least in `launches`; where the default is among them, only if clearly less than it does."""
    best = min(timed, key=lambda trial: _score(trial, launches))
    return best if default not in timed or _faster(best, default, launches) else default


def _faster(trial, other, launches):
    """Whether a trial takes less than another by more than timings differ; each launch counts alike."""
    return _score(trial, launches) <= _score(other, launches) + len(launches) * math.log(1 - MARGIN)


def trial(form, measured, as_stated=forms.as_stated) -> Trial:
    """The `Trial` of a form: ``measured() -> (relative error, the largest allowed, callable() -> microseconds)``.

    as_stated: what writes the form.
    """
    try:
        error, allowed, timed = measured()
        # A NaN is wrong, too.
        if not error <= allowed:
            return Trial(as_stated(form), f"wrong: relative error {error:.1e}")
        return Trial(as_stated(form), "ok", tuple(timed()))
    except FAILURES as error:
        return Trial(as_stated(form), f"{type(error).__name__}: {error}".splitlines()[0])


def _score(trial, launches):
    """The ratios of times to those of another trial, multiplied: each launch counts alike."""
    return sum(math.log(trial.us[launch]) for launch in launches)


def _tried(tile, head_dim, dtype, form):
    """The `Trial` of a form: checked, and timed if it is right."""

    def measured():
        gpu = calibration.Gpu(tile, head_dim, dtype, form)
        each = (gpu.timed(*gpu.setup.work(point))[0] for point in points(gpu.setup))
        return checked(gpu), reference.TOLERANCE[gpu.dtype], lambda: each

    return trial(form, measured)


def points(setup):
    """The launches that are timed, whatever the keys a step: as many items, of as many keys."""
    window, kept = (-(-keys // setup.step_keys) for keys in (WINDOW_KEYS, KEPT_KEYS))
    rank = tile_lists.RANKS[0]
    return Point(rank, PROGRAMS, partial=window), Point(rank, PROGRAMS, full=kept)


def checked(gpu) -> float:
    """Relative error of attention over a small pattern in the form of `gpu`, by the kernel that `points` run."""
    dense, lists = _small(gpu.tile, gpu.setup.step_keys)
    launch, tokens = gpu.prepared(lists, TOKENS, 1)
    tokens[3].fill_(torch.nan)
    launch(*tokens)
    *qkv, found = (x.cpu() for x in tokens)
    return float(reference.relative_error(found, reference.attention(*qkv, torch.from_numpy(dense))))  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked


def _small(tile, step_keys):
    """``(bool [TOKENS, TOKENS], TileLists)``: a pattern with steps with and without masks."""
    group = max(1, tile.rows // GROUPS)
    seen_from = np.arange(TOKENS) // group * group
    dense = np.abs(seen_from[:, None] - np.arange(TOKENS)) < REACH
    cover = blocks.extract(graph.from_pattern(dense), tile)
    items = work.items(cover, None)
    return dense, tile_lists.build(cover, items.block, items.run_lo, items.run_hi, step_keys)


def _job(tile, form):
    return f"{tile.name},{forms.as_word(form)}"


def _compile(head_dim, dtype, *jobs):
    """Compile the candidates that `jobs` name, and say which are done."""
    for job in jobs:
        name, _, word = job.partition(",")
        form = forms.from_word(word)
        try:
            gpu = calibration.Gpu(tiles.parse(name), int(head_dim), dtype, form)
            gpu.resources(gpu.setup.compiled(tile_lists.RANKS[0], False))
        except FAILURES:
            continue
        print(job, flush=True)


if __name__ == "__main__":
    _compile(*sys.argv[1:])
