"""Stage T4 on files: blocks and profiles in, schedules out."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter

from tilewright import devices
from tilewright.attention import blocks as blocks_file
from tilewright.attention import profile as profile_file
from tilewright.attention.schedule import search, solve
from tilewright.core import registry
from tilewright.core.errors import ArtifactError, ConfigError, SolverUnavailableError
from tilewright_study import provenance
from tilewright_study.schedules import Skipped, save, summary


def run(blocks, profile, solver, tiles, objective, time_limit, gap, seed, threads, rounds, max_tile_kinds, output):
    """Solve the files `blocks` with the profiles `profile`, in the same order, by each `solver`; write the schedules to
    the paths `output`.

    tiles: names of those that each schedule chooses from, joined by ``+``; all where None. time_limit: seconds, of each
    schedule. Progress goes to stderr. A solver without a licence or a package is skipped: its output then holds the
    reason in place of a schedule. Files are written when all have been solved. Raises `TilewrightError`; nothing is
    written then.
    """
    _check(time_limit=time_limit, gap=gap)
    _check(least=1, rounds=rounds, max_tile_kinds=max_tile_kinds)
    for name in solver:
        registry.check("solver", name, search.NAMES)
    covers, profiles = _load(blocks, profile)
    sets = _sets(solver, tiles, output, tuple(covers))
    device = next(iter(profiles.values())).device
    limits = devices.limits(device, rounds=rounds, max_tile_kinds=max_tile_kinds)
    settings = {"time_limit_s": time_limit, "gap": gap, "seed": seed, "threads": threads}
    paths = dict(zip(covers, zip(blocks, profile, strict=True), strict=True))
    found = []
    for name, chosen in zip(solver, sets, strict=True):
        own = [{tile: of[tile] for tile in chosen} for of in (covers, profiles)]
        given = {tile: paths[tile] for tile in chosen}
        found.append(_solved(*own, limits, name, search.objective_of(name, objective), settings, given))
    stated = settings | {"rounds": rounds, "max_tile_kinds": max_tile_kinds}
    for path, each, chosen in zip(output, found, sets, strict=True):
        save(path, each, _made_by(each, stated, [part for tile in chosen for part in paths[tile]]))
        for name, value in summary(each).items():
            print(f"{name}: {value:.6g}" if isinstance(value, float) else f"{name}: {value}", file=sys.stderr)


def _sets(solver, tiles, output, known):
    """The tiles that each schedule chooses from, of those that are `known`."""
    sets = [known] * len(solver) if tiles is None else [tuple(names.split("+")) for names in tiles]
    if not len(solver) == len(sets) == len(output):
        found = f"{len(output)} outputs and tiles of {len(sets)} for {len(solver)}"
        raise ConfigError(f"expected an output, and tiles, for each solver, found {found}")
    for tile in (tile for names in sets for tile in names):
        registry.check("tile", tile, known)
    return sets


def _made_by(found, stated, files):
    return {
        "stage": "schedule",
        "parameters": {"solver": found.solver, "objective": found.objective} | stated,
        "inputs": {str(path): provenance.sha256_file(path) for path in files},
        "code": provenance.code_digest(*_modules(found.solver)),
        "versions": provenance.versions("highspy", "gurobipy", "numpy", "scipy"),
    }


def _solved(covers, profiles, limits, solver, objective, settings, paths):
    """The schedule, or why the solver was skipped."""
    with nullcontext() if solver in search.HEURISTICS else within(solver, settings["time_limit_s"]) as show:
        try:
            # A set of one tile is a baseline of that tile.
            beside = {"beside_torch": len(covers) > 1 and search.compares(solver) and objective == "sum"}
            return solve(covers, profiles, limits, solver, objective, **settings, **beside, paths=paths, log=show)
        except SolverUnavailableError as error:
            return _skipped(covers, profiles, solver, objective, paths, str(error))


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
