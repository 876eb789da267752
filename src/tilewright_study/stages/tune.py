"""Stage T4 on files: schedules of one graph in, the fastest of them out."""

import sys

from tilewright import devices
from tilewright import graph as graph_file
from tilewright.attention import blocks as blocks_file
from tilewright.attention import profile as profile_file
from tilewright.attention import schedule as schedule_file
from tilewright.attention.schedule import Skipped
from tilewright.core.errors import ArtifactError, DeviceError
from tilewright_study import provenance
from tilewright_study.measure import lock


def run(schedule, graph, blocks, profile, seed, output):
    """Time the files `schedule` whole on the device that they were made for; write the fastest to `output`.

    graph: theirs, in plan order. blocks, profile: of every tile that they may choose, in any order; heads, head dim and
    type are those of the profiles. Files that hold a reason in place of a schedule are left out. Raises
    `TilewrightError`; nothing is written then.
    """
    import torch

    from tilewright.attention import tuning

    covers = {found.tile.name: found for found in map(blocks_file.load, blocks)}
    profiles = {found.tile: found for found in map(profile_file.load, profile)}
    found = [each for each in map(schedule_file.read, schedule) if not isinstance(each, Skipped)]
    if not found:
        raise ArtifactError("expected a schedule to tune, found none but skipped ones")
    for each in found:
        schedule_file.verify_inputs(each, covers, profiles)
    first = next(iter(profiles.values()))
    kind = first.device["kind"]
    with lock.exclusive(kind):
        if first.device_id != devices.device_id(devices.describe(kind)):
            raise DeviceError(f"made for another device ({first.device_id}); profile and solve again on this one")
        sizes = {"heads": first.heads, "head_dim": first.head_dim, "dtype": getattr(torch, first.dtype)}
        best = tuning.fastest(found, covers, graph_file.load(graph), **sizes, device=kind, seed=seed)
    made_by = {
        "stage": "tune",
        "parameters": {"seed": seed},
        "inputs": {str(path): provenance.sha256_file(path) for path in [graph, *blocks, *profile, *schedule]},
        "code": provenance.code_digest("tilewright.attention.tuning", *devices.modules(kind, "attention.executor")),
        "versions": provenance.versions("torch", "triton", "numpy"),
    }
    schedule_file.save(output, best, made_by)
    for trial in best.trials:
        time = trial.reason or f"{trial.p50_us:.2f} us"
        print(f"{'+'.join(trial.tiles)} {trial.solver}: {time}, predicted {trial.predicted_us:.2f}", file=sys.stderr)
    print(f"chosen: {best.chosen}, in {best.tuned_s:.1f} s", file=sys.stderr)
