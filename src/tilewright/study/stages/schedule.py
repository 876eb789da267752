"""Stage T4 on files: blocks and profiles in, a schedule out."""

import sys
from contextlib import nullcontext

from tilewright import blocks as blocks_file
from tilewright import profile as profile_file
from tilewright import targets
from tilewright.core import progress, provenance
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.schedule import save, search, solve


def run(blocks, profile, solver, objective, time_limit, gap, seed, threads, rounds, max_tile_kinds, output):
    """Solve the files `blocks` with the profiles `profile`, in the same order, and write the schedule to
    `output`.

    time_limit in seconds. Progress goes to stderr. Raises `TilewrightError`; nothing is written then.
    """
    for name, value, least in (
        ("time limit", time_limit, 0),
        ("gap", gap, 0),
        ("rounds", rounds, 1),
        ("max tile kinds", max_tile_kinds, 1),
    ):
        if value is not None and not value >= least:
            raise ConfigError(f"{name}: expected at least {least}, found {value}")
    if len(blocks) != len(profile):
        raise ArtifactError(f"expected one profile for each blocks file, found {len(profile)} for {len(blocks)}")
    covers = {path: blocks_file.load(path) for path in blocks}
    measured = {path: profile_file.load(path) for path in profile}
    tiles = [cover.tile.name for cover in covers.values()]
    if len(set(tiles)) < len(blocks):
        raise ArtifactError(f"expected blocks files of different tiles, found {tiles}")
    with nullcontext() if solver in search.HEURISTICS else progress.within(solver, time_limit) as show:
        schedule = solve(
            dict(zip(tiles, covers.values(), strict=True)),
            dict(zip(tiles, measured.values(), strict=True)),
            targets.limits(next(iter(measured.values())).device, rounds=rounds, max_tile_kinds=max_tile_kinds),
            solver,
            objective,
            time_limit_s=time_limit,
            gap=gap,
            seed=seed,
            threads=threads,
            paths=dict(zip(tiles, zip(blocks, profile, strict=True), strict=True)),
            log=show,
        )
    made_by = {
        "stage": "schedule",
        "parameters": {
            "solver": solver,
            "objective": objective,
            "time_limit_s": time_limit,
            "gap": gap,
            "seed": seed,
            "threads": threads,
            "rounds": rounds,
            "max_tile_kinds": max_tile_kinds,
        },
        "inputs": {str(path): provenance.sha256_file(path) for path in [*blocks, *profile]},
        "code": provenance.code_digest(*_modules(solver)),
        "versions": provenance.versions("highspy", "gurobipy", "numpy", "scipy"),
    }
    save(output, schedule, made_by)
    for name, value in schedule.summary().items():
        print(f"{name}: {value}", file=sys.stderr)


def _modules(solver):
    """What the answer depends on; solvers are loaded by name, so that no import tells."""
    member = [] if solver in search.HEURISTICS else [f"tilewright.schedule.solvers.{solver}"]
    return ["tilewright.study.stages.schedule", *member]
