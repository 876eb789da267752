"""Stages T3 and T5 on files: blocks in, profiles out; schedules, a graph or names in, tidy CSV files out."""

import json
import sys
from pathlib import Path

from tilewright import blocks as blocks_file
from tilewright import graph as graph_file
from tilewright import profile as profile_file
from tilewright import schedule as schedule_file
from tilewright import targets
from tilewright.core import artifacts, progress, provenance, registry
from tilewright.core.errors import ArtifactError, ConfigError, DeviceError
from tilewright.study import recorded
from tilewright.study.bench import turns
from tilewright.targets.measure import measure

MODES = ("profile_only", "schedule", "baselines", "heatmap", "reorder_times")


def run(output, device, rse, min_repetitions, max_seconds, **arguments):
    """Do what the one mode among `MODES` that is given asks for, alone on a `device` of this kind, and write `output`.

    ``profile_only`` and ``schedule`` take as many outputs as inputs, the others one. Files are written when everything
    has run. Raises `TilewrightError`; nothing is written then.
    """
    effort = _effort(rse, min_repetitions, max_seconds)
    chosen = [mode for mode in MODES if arguments[mode] not in (None, False)]
    if len(chosen) != 1:
        flags = ", ".join(f"--{mode}" if mode == "profile_only" else f"--{mode.replace('_', '-')}" for mode in MODES)
        raise ConfigError(f"expected exactly one of {flags}, found {len(chosen)}")
    inputs = arguments[{"profile_only": "blocks", "schedule": "schedule"}.get(chosen[0], chosen[0])] or []
    inputs = inputs if chosen[0] in ("profile_only", "schedule") else [None]
    if len(inputs) != len(output):
        raise ConfigError(f"expected one output for each input, found {len(output)} for {len(inputs)}")
    call = {
        "profile_only": _profile,
        "schedule": _schedule,
        "baselines": _baselines,
        "heatmap": _heatmap,
        "reorder_times": _reorder_times,
    }[chosen[0]]
    with turns.turn(device):
        call(output, device=device, effort=effort, **arguments)


def run_network(network, attention, output, device, dtype, rse, min_repetitions, max_seconds, seed):
    """Write the times of `network` on `device` to `output`, a CSV, for each ``NAME=BATCH[,BATCH…]`` of `attention`, by
    default every attention of the network's family at batch 1.

    Raises `TilewrightError`; nothing is written then.
    """
    from tilewright.study.bench import networks

    effort = _effort(rse, min_repetitions, max_seconds)
    batches = dict(map(_batches, attention)) if attention else {name: [1] for name in networks.attentions(network)}

    def told(row):
        share = f"{row['attention_us'] / row['p50_us']:.0%} of it attention"
        return f"{row['p50_us'] / 1e3:.1f} ms, {share}, error {row['max_abs_error']:.1e}"

    rows = networks.run_network(network, batches, effort, device=device, dtype=dtype, seed=seed)
    _stream(rows, device, output, "network", "{network} {attention}, batch {batch}", told)


def run_ragged(heads, head_dim, lengths, attention, output, device, dtype, rse, min_repetitions, max_seconds, seed):
    """Write the times of packed attention on `device` to `output`, a CSV, for images of ``LOW-HIGH`` tokens, `lengths`,
    and for each ``NAME=IMAGES[,IMAGES…]`` of `attention`.

    Raises `TilewrightError`; nothing is written then.
    """
    from tilewright.study.bench import ragged

    effort = _effort(rse, min_repetitions, max_seconds)
    batches, spans = dict(map(_batches, attention)), list(map(_span, lengths))
    rows = ragged.run_ragged(heads, head_dim, spans, batches, effort, device=device, dtype=dtype, seed=seed)
    _stream(rows, device, output, "ragged", "{provider} {call}, {images} images of {lengths}", _microseconds)


def run_pruned(network, setting, attention, modes, output, device, dtype, rse, min_repetitions, max_seconds, seed):
    """Write the times of the pruned `network` on `device` to `output`, a CSV, for each JSON of `setting`, each strategy
    of `attention` and each ``MODE=BATCH[,BATCH…]`` of `modes`.

    Raises `TilewrightError`; nothing is written then.
    """
    from tilewright.study.bench import pruned

    effort = _effort(rse, min_repetitions, max_seconds)
    batches, settings = dict(map(_batches, modes)), list(map(_setting, setting))
    rows = pruned.run_pruned(network, settings, attention, batches, effort, device=device, dtype=dtype, seed=seed)
    what = "{network} {setting} {strategy} {mode}, batch {batch}, {same_tokens} of {inputs} with the same tokens"
    _stream(rows, device, output, "pruned", what, _microseconds)


def _stream(rows, device, output, kind, what, told):
    """Write `rows` of a `kind`, an iterator that runs as it is read, to `output`, alone on a `device` of this kind.

    Each is told of at once, it may take minutes. what: the format of a row's name. told: what a row that passed says.
    """
    made = []
    with turns.turn(device):
        for row in rows:
            made.append(row)
            if row["status"] == "ok":
                print(f"{what.format_map(row)}: {told(row)}", flush=True)
            else:
                print(f"{what.format_map(row)}: {row['status']}: {row['reason']}", file=sys.stderr)
    _write(output, kind, made, device)


def _microseconds(row):
    error = "no error" if row["max_abs_error"] == "" else f"error {row['max_abs_error']:.1e}"
    return f"{row['p50_us']:,.1f} us, {error}"


def _span(text):
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise ConfigError(f"--lengths {text}: expected LOW-HIGH, tokens from 1 on")
    return int(low), int(high)


def _setting(text):
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--setting {text}: expected a JSON object of the pruner's settings")
    return found


def _batches(text):
    name, _, sizes = text.partition("=")
    try:
        batches = [int(size) for size in sizes.split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise ConfigError(f"{text}: expected NAME=BATCH[,BATCH...] with batches of at least 1")
    return name, batches


def _effort(rse, min_repetitions, max_seconds):
    from tilewright.study.bench import Effort

    if not (rse > 0 and min_repetitions >= 1 and max_seconds > 0):
        raise ConfigError(f"expected an effort above zero, found rse {rse}, {min_repetitions} times, {max_seconds} s")
    return Effort(rse, min_repetitions, max_seconds)


def _profile(output, blocks, heads, head_dim, dtype, device, split_keys, seed, **_):
    options = {"heads": heads, "head_dim": head_dim, "dtype": dtype, "split_keys": split_keys, "seed": seed}
    profiles = [
        measure(blocks_file.load(path), device=device, **options) for path in progress.steps(blocks, "profiles")
    ]
    for path, source, profile in zip(output, blocks, profiles, strict=True):
        made_by = {
            "stage": "profile",
            "parameters": options | {"device": device},
            "inputs": {str(source): provenance.sha256_file(source)},
            "code": provenance.code_digest("tilewright.targets.measure", *targets.modules(device, "probe")),
            "versions": provenance.versions("torch", "triton", "numpy"),
        }
        profile_file.save(path, profile, made_by)
        print(f"{profile.tile}: {len(profile.classes)} shape classes, {profile.launch_us:.1f} us a launch")


def _schedule(output, schedule, graph, blocks, effort, heads, head_dim, dtype, batch, device, seed, **_):
    from tilewright.study.bench import run_schedule
    from tilewright.study.bench.rows import Tokens

    covers = {path: blocks_file.load(path) for path in blocks or []}
    given = {cover.tile.name: path for path, cover in covers.items()}
    tokens, tables = None, []
    for path in progress.steps(schedule, "schedules"):
        plan = schedule_file.load(path)
        if plan.device_id != targets.device_id(targets.describe(device)):
            raise DeviceError(
                f"{path}: made for another device ({plan.device_id}); profile and solve again on this one"
            )
        paths = {name: given.get(name, made) for name, made in zip(plan.tiles, plan.blocks_paths, strict=True)}
        if missing := [name for name, source in paths.items() if not source]:
            raise ArtifactError(f"{path}: records no blocks of the tiles {missing}; expected them as --blocks")
        for source in paths.values():
            covers[source] = covers.get(source) or blocks_file.load(source)
        if tokens is None or tokens.graph.id != plan.graph_id:
            pattern = graph_file.load(_one(graph) or _graph_path(next(iter(paths.values()))))
            planned = _planned(plan, heads=heads, head_dim=head_dim, dtype=dtype)
            tokens = Tokens(pattern, **planned, batch=batch, seed=seed, device=device)
        stem, _, solver = Path(path).stem.rpartition(".")
        rows = run_schedule(
            plan,
            {name: covers[source] for name, source in paths.items()},
            tokens,
            effort,
            tiles=stem if solver == plan.solver else None,
        )
        _report(rows)
        tables.append(rows)
    for path, rows in zip(output, tables, strict=True):
        _write(path, "bench", rows, device)


def _baselines(output, baselines, graph, effort, heads, head_dim, dtype, batch, device, seed, max_dense_tokens, **_):
    from tilewright.study.bench import run_baselines
    from tilewright.study.bench.rows import Tokens

    if not graph:
        raise ConfigError("--baselines: expected the pattern as --graph, found none")
    facts = {"heads": heads, "head_dim": head_dim, "dtype": dtype, "batch": batch, "seed": seed, "device": device}
    rows, names = [], baselines
    for path in progress.steps(graph, "baselines"):
        tokens = Tokens(graph_file.load(path), **facts)
        rows += run_baselines(names, tokens, effort, max_dense_tokens=max_dense_tokens)
        # What works through all pairs takes the same time in every order.
        names = [name for name in names if not _baseline(name).DENSE]
    _report(rows)
    _write(output[0], "bench", rows, device)


def _baseline(name):
    from tilewright.baselines import sparse as sparse_baselines

    return registry.member(sparse_baselines.__name__, "baseline", name, sparse_baselines.NAMES)


def _one(paths):
    """The one of `paths`, or None without any. Raises `ConfigError` for several."""
    if paths and len(paths) > 1:
        raise ConfigError(f"--graph: expected one graph with --schedule, found {len(paths)}")
    return paths[0] if paths else None


def _heatmap(output, heatmap, patches, effort, max_dense_tokens, orders, tiles, solver, split_keys, **options):
    from tilewright.study.bench.sweeps import run_heatmap

    if not patches or len(orders) != 1:
        raise ConfigError(f"--heatmap: expected --patches and one of --orders, found {patches} and {orders}")
    options = {name: options[name] for name in ("device", "dtype", "seed")}
    options |= {"order": orders[0], "names": tiles, "solver": solver, "split_keys": split_keys}
    rows = run_heatmap(heatmap, patches, effort, max_tokens=max_dense_tokens, **options)
    _write(output[0], "heatmap", rows, options["device"])


def _reorder_times(output, reorder_times, orders, **_):
    from tilewright.study.bench.sweeps import run_reorder_times

    _write(output[0], "reorder_time", run_reorder_times(reorder_times, orders), "cpu")


def _planned(plan, **arguments):
    """heads, head_dim and dtype: as given, else those of the profile that the schedule was made from."""
    path = next((path for path in plan.profile_paths if path), None)
    profile = None if path is None else profile_file.load(path)
    return {name: value or getattr(profile, name, None) for name, value in arguments.items()}


def _graph_path(blocks_path):
    """The graph that blocks were cut from, as their file tells."""
    _, header = artifacts.read_npz(blocks_path, blocks_file.KIND, blocks_file.VERSION)
    path = next(iter(header["made_by"].get("inputs", ())), None)
    if path is None:
        raise ArtifactError(f"{blocks_path}: does not say what graph it was made from; expected it as --graph")
    return path


def _report(rows):
    for row in rows:
        what = " ".join(str(row[name]) for name in ("provider", "reorder", "tiles", "solver") if row[name])
        if row["status"] == "ok":
            print(f"{what}: {row['p50_us'] / 1e3:.3f} ms, error {row['max_abs_error']:.1e}")
        else:
            print(f"{what}: {row['status']}: {row['reason']}", file=sys.stderr)


def _write(path, kind, rows, device):
    """Write rows of a `kind`, see `recorded`, that were made on a `device` of this kind."""
    import pandas as pd

    rows = [row | recorded.origin(kind, row, device) for row in rows]
    frame = pd.DataFrame(rows, columns=recorded.KINDS[kind].columns)
    artifacts.write_text(path, frame.to_csv(index=False, lineterminator="\n"))
