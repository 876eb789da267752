"""Stage T5 on files: schedules with their graph, blocks and profiles in, a CSV file of rows for each out."""

import itertools
import sys
from pathlib import Path

from tilewright import devices
from tilewright import graph as graph_file
from tilewright.attention import blocks as blocks_file
from tilewright.attention import profile as profile_file
from tilewright.core import artifacts, progress
from tilewright.core.errors import ArtifactError, ConfigError, DeviceError
from tilewright_study import schedules
from tilewright_study.measure import lock
from tilewright_study.measure.effort import Effort
from tilewright_study.stages import experiment


def run(
    schedule,
    output,
    graph,
    blocks,
    profile,
    heads,
    head_dim,
    dtype,
    batch,
    device,
    rse,
    min_repetitions,
    max_seconds,
    seed,
):
    """Check and time each of the files `schedule` on a `device` of this kind, and write its rows to the paths `output`.

    graph: the graph of the schedules. blocks, profile: of every tile that a schedule may choose, in any order; files
    are matched by their contents. heads, head_dim, dtype: by default those of the profile. A schedule that is run
    without `graph`, `blocks` or `profile` takes the files that it was made from, which it names: the published commands
    give nothing else. Files are written when everything has run. Raises `TilewrightError`; nothing is written then.
    """
    if len(schedule) != len(output):
        raise ConfigError(f"expected one output for each schedule, found {len(output)} for {len(schedule)}")
    effort = experiment.checked(Effort(rse, min_repetitions, max_seconds))
    stated = {"heads": heads, "head_dim": head_dim, "dtype": dtype}
    with lock.exclusive(device):
        inputs = _Inputs(graph, blocks, profile)
        loaded = [
            _loaded(path, inputs, stated, {"batch": batch, "seed": seed, "device": device})
            for path in progress.with_progress(schedule, "schedules")
        ]
        tables = _timed(loaded, effort)
    for path, rows in zip(output, tables, strict=True):
        experiment.write(path, "attention", rows, device)


class _Inputs:
    """Files that are given, or else those that a schedule names, loaded once."""

    def __init__(self, graph, blocks, profile):
        self._graph_path, self._tokens = graph, None
        self._blocks = {found.id: found for found in map(blocks_file.load, blocks or ())}
        self._profiles = {found.blocks_id: found for found in map(profile_file.load, profile or ())}
        self._given_blocks, self._given_profiles = bool(blocks), bool(profile)

    def blocks(self, path, schedule):
        """``{tile: Blocks}`` of the `schedule` at `path`. Raises `ArtifactError`."""
        for tile, own, recorded in zip(schedule.tiles, schedule.blocks_ids, schedule.blocks_paths, strict=True):
            if own not in self._blocks and not self._given_blocks and recorded:
                found = blocks_file.load(recorded)
                self._blocks[found.id] = found
            if own not in self._blocks:
                raise ArtifactError(f"{path}: expected blocks {own} of tile {tile} among --blocks, found none")
        return {tile: self._blocks[own] for tile, own in zip(schedule.tiles, schedule.blocks_ids, strict=True)}

    def profile(self, path, schedule):
        """The first profile that the `schedule` at `path` was made from, or None."""
        for own, recorded in zip(schedule.blocks_ids, schedule.profile_paths, strict=True):
            if own in self._profiles:
                return self._profiles[own]
            if not self._given_profiles and recorded:
                return profile_file.load(recorded)
        if self._given_profiles:
            raise ArtifactError(f"{path}: expected a profile of its blocks among --profile, found none")
        return None

    def tokens(self, schedule, **options):
        """Tokens of the graph of the `schedule`; schedules of one graph share them."""
        from tilewright_study.experiments.attention import run as _attention

        if self._tokens is None or self._tokens.graph.id != schedule.graph_id:
            found = graph_file.load(self._graph_path or _named_graph(schedule))
            self._tokens = _attention.Tokens(found, **options)
        return self._tokens


def loaded(path, *, heads, head_dim, dtype, **options):
    """As `_loaded`, of the files that the schedule at `path` names."""
    return _loaded(path, _Inputs(None, None, None), {"heads": heads, "head_dim": head_dim, "dtype": dtype}, options)


def _loaded(path, inputs, stated, options):
    """``(schedule, blocks, name of its tile set, Tokens)`` of the schedule at `path`."""
    schedule = schedules.read(path)
    if schedule.device_id != devices.device_id(devices.describe(options["device"])):
        raise DeviceError(
            f"{path}: made for another device ({schedule.device_id}); profile and solve again on this one"
        )
    covers, profile = inputs.blocks(path, schedule), inputs.profile(path, schedule)
    for name, value in stated.items():
        if None not in (value, known := getattr(profile, name, None)) and value != known:
            raise ConfigError(f"{path}: expected {name} {known}, of the profile that it was made by, found {value}")
    sizes = {name: getattr(profile, name, None) if value is None else value for name, value in stated.items()}
    tokens = inputs.tokens(schedule, **sizes, **options)
    stem, _, solver = Path(path).stem.rpartition(".")
    return schedule, covers, stem if solver == schedule.solver else None, tokens


def _timed(loaded, effort):
    """The rows of each of the schedules; neighbours of one graph are timed in turns."""
    from tilewright_study.experiments.attention import run as _attention

    tables = []
    for tokens, group in itertools.groupby(loaded, key=lambda found: found[-1]):
        tables += _attention.run_schedules([found[:-1] for found in group], tokens, effort)
    for rows in tables:
        show(rows)
    return tables


def _named_graph(schedule):
    """The graph that the blocks of a schedule were cut from, as they name it. Raises `ArtifactError`."""
    path = next(filter(None, schedule.blocks_paths), None)
    if path is None:
        raise ArtifactError("the schedule names no blocks; pass its graph by --graph")
    _, header = artifacts.read_npz(path, blocks_file.KIND, blocks_file.VERSION)
    found = next(iter(header["made_by"].get("inputs", ())), None)
    if found is None:
        raise ArtifactError(f"{path}: does not name its graph; pass it by --graph")
    return found


def show(rows):
    """Print what rows of attention say."""
    for row in rows:
        what = " ".join(str(row[name]) for name in ("provider", "reorder", "tiles", "solver") if row.get(name))
        if row["status"] == "ok":
            print(f"{what}: {row['p50_us'] / 1e3:.3f} ms, error {row['max_abs_error']:.1e}")
        else:
            print(f"{what}: {row['status']}: {row['reason']}", file=sys.stderr)
