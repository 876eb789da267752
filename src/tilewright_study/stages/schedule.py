"""Stage T4 on files: blocks and profiles in, a schedule out."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter

from tilewright import devices
from tilewright.attention import blocks as blocks_file
from tilewright.attention import profile as profile_file
from tilewright.attention.schedule import Skipped, save, search, solve
from tilewright.core import registry
from tilewright.core.errors import ArtifactError, ConfigError, SolverUnavailableError
from tilewright_study import provenance


def run(blocks, profile, solver, objective, time_limit, gap, seed, threads, rounds, max_tile_kinds, output):
    """Solve the files `blocks` with the profiles `profile`, in the same order, and write the schedule to `output`.

    time_limit: seconds. Progress goes to stderr. A solver without a licence or a package is skipped: `output` then
    holds the reason in place of a schedule. Raises `TilewrightError`; nothing is written then.
    """
    _check(time_limit=time_limit, gap=gap)
    _check(least=1, rounds=rounds, max_tile_kinds=max_tile_kinds)
    registry.check("solver", solver, search.NAMES)
    objective = search.objective_of(solver, objective)
    covers, profiles = _load(blocks, profile)
    device = next(iter(profiles.values())).device
    limits = devices.limits(device, rounds=rounds, max_tile_kinds=max_tile_kinds)
    settings = {"time_limit_s": time_limit, "gap": gap, "seed": seed, "threads": threads}
    paths = dict(zip(covers, zip(blocks, profile, strict=True), strict=True))
    with nullcontext() if solver in search.HEURISTICS else within(solver, time_limit) as show:
        try:
            found = solve(covers, profiles, limits, solver, objective, **settings, paths=paths, log=show)
        except SolverUnavailableError as error:
            found = _skipped(covers, profiles, solver, objective, paths, str(error))
    made_by = {
        "stage": "schedule",
        "parameters": {"solver": solver, "objective": objective, "rounds": rounds, "max_tile_kinds": max_tile_kinds}
        | settings,
        "inputs": {str(path): provenance.sha256_file(path) for path in [*blocks, *profile]},
        "code": provenance.code_digest(*_modules(solver)),
        "versions": provenance.versions("highspy", "gurobipy", "numpy", "scipy"),
    }
    save(output, found, made_by)
    for name, value in found.summary().items():
        print(f"{name}: {value}", file=sys.stderr)


@contextmanager
def within(what: str, limit_s: float) -> Iterator[Callable]:
    """Yield a function that shows a line about a task of at most `limit_s` seconds.

    On a terminal, a bar below the lines shows the time that has passed.
    """
    if not sys.stderr.isatty():
        print(f"{what}: at most {limit_s:g} s", file=sys.stderr, flush=True)
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    from tqdm import tqdm

    begin = perf_counter()
    form = "{desc} |{bar}| {n:.0f} of at most {total:g} s"
    with tqdm(total=limit_s, desc=what, bar_format=form, leave=False) as bar:

        def show(line):
            bar.update(min(perf_counter() - begin, limit_s) - bar.n)
            bar.write(line, file=sys.stderr)

        yield show


def _check(least=0, **values):
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ConfigError(f"{name.replace('_', ' ')}: expected at least {least}, found {value}")


def _load(blocks, profile):
    """``({tile: Blocks}, {tile: Profile})`` of files that come in the same order."""
    if len(blocks) != len(profile):
        raise ArtifactError(f"expected one profile for each blocks file, found {len(profile)} for {len(blocks)}")
    covers = [blocks_file.load(path) for path in blocks]
    profiles = [profile_file.load(path) for path in profile]
    tiles = [cover.tile.name for cover in covers]
    if len(set(tiles)) < len(tiles):
        raise ArtifactError(f"expected blocks files of different tiles, found {tiles}")
    return dict(zip(tiles, covers, strict=True)), dict(zip(tiles, profiles, strict=True))


def _skipped(covers, profiles, solver, objective, paths, reason):
    return Skipped(
        graph_id=next(iter(covers.values())).graph_id,
        tiles=tuple(covers),
        blocks_ids=tuple(cover.id for cover in covers.values()),
        blocks_paths=tuple(str(path) for path, _ in paths.values()),
        profile_paths=tuple(str(path) for _, path in paths.values()),
        solver=solver,
        objective=objective,
        device_id=next(iter(profiles.values())).device_id,
        reason=reason,
    )


def _modules(solver):
    """What the answer depends on. A solver is loaded by its name, so that no import shows it."""
    return ["tilewright_study.stages.schedule", *search.entered(solver)]
