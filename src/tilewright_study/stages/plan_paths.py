"""Plans of paths from a file of measured ones: what each budget of time should run, by a solver (stage T4)."""

import json
from pathlib import Path as FilePath

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.networks.path import Path
from tilewright_study import experiments
from tilewright_study.cli import settings
from tilewright_study.experiments import paths as of_paths
from tilewright_study.measure import rows as _rows

KIND, VERSION = "path plans", 1
# Rows that losses are fitted to, as those of the last round were.
FITTED = ("single", "drawn", "seen", "earlier")


def run(
    profile, output, solver, budgets, count, rung, seed, data=None, network=None, checkpoint=None, images=64,
    device="cpu", dtype="float32", stated=(),
):  # fmt: skip
    """Write a JSON file with the path that `solver` and a search that goes on from it propose for each budget, and
    what it should take and see.

    profile: rows of the experiment ``paths``. budgets: microseconds, or None for `count` of them, evenly from the
    fastest path to the full one. rung: whose losses are fitted. Raises `TilewrightError`, also for a file without the
    base, its single skips, or enough paths to fit to.

    data: a source (`scenes.stated`), on which the paths of a `network` with the weights `checkpoint` are measured
    first: with at most `images` of each split, and with the settings of ``config.yaml`` but for those `stated`.
    `profile` is written then, and is a path table. None for rows that are there.
    """
    from tilewright_study.planning import accuracy, program, search, surrogate

    if solver not in of_paths.SOLVERS:
        raise ConfigError(f"solver: unknown {solver!r}; known: {', '.join(of_paths.SOLVERS)}")
    if rung not in of_paths.RUNGS:
        raise ConfigError(f"rung: unknown {rung!r}; known: {', '.join(of_paths.RUNGS)}")
    if wrong := [budget for budget in budgets or () if not budget > 0]:
        raise ConfigError(f"budgets: expected microseconds above 0, found {wrong[0]}")
    if count < 1:
        raise ConfigError(f"count: expected at least 1, found {count}")
    if data is not None:
        _measure(profile, data, network, checkpoint, images, device, dtype, seed, stated)
    times, known = _measured(profile, rung)
    forms = accuracy.fits(known, seed=seed)
    models = [(times[base], losses) for base, losses in forms.items()]
    if budgets is None:
        budgets = of_paths.budgets_for(models, count)
    found = []
    plan = program.plan(models, budgets, solver)
    searched = search.improved(times, surrogate.closest(forms, known, seed=seed), [plan])
    for budget in budgets:
        best = searched[budget]
        if best is None:
            print(f"{budget:,.0f} us: no path is predicted to be so fast")
            continue
        seconds = sum(step[budget].seconds for step in (plan, searched) if step[budget])
        stated = {"path": str(best.path), "us": best.us, "accuracy": best.accuracy, "seconds": seconds}
        found.append({"budget_us": float(budget), "solver": solver} | stated)
        print(f"{budget:,.0f} us: {best.path}, {best.us:,.0f} us, mIoU {best.accuracy:.3f} predicted", flush=True)
    artifacts.write_json(output, KIND, VERSION, {"rung": rung, "plans": found}, {"profile": str(profile)})


def _measure(profile, data, network, checkpoint, images, device, dtype, seed, stated):
    """Write the rows of paths of a network, measured on images of a source."""
    import yaml

    from tilewright_study import scenes
    from tilewright_study.stages import experiment

    if network is None or checkpoint is None:
        raise ConfigError(f"--data: expected --network and --checkpoint, too, found {network} and {checkpoint}")
    given, source = settings(stated), scenes.stated(data)
    section = yaml.safe_load((of_paths.CHECKOUT / "config.yaml").read_text(encoding="utf-8"))["paths"]
    fields = {name: section[name] for name in of_paths.Values.__struct_fields__}
    counts = {split: min(images, source.count(split)) for split in ("fit", "choice", "test")}
    fields |= {"data": data, "network": {"network": network, "checkpoint": checkpoint}, **counts, "novel": 0, **given}
    pairs = [f"{name}={json.dumps(value)}" for name, value in fields.items()]
    case = f"{network}.{FilePath(checkpoint).stem}"
    how = {"device": device, "dtype": dtype, "rse": 0.02, "min_repetitions": 10, "seed": seed}
    experiment.run("paths", case, profile, **how, stated=pairs)
    print(f"{profile}: written, {', '.join(f'{count} images of {split}' for split, count in counts.items())}")


def _measured(profile, rung):
    """``{base: Latency}`` and ``{base: {path: accuracy}}`` of a file, of the paths that models are fitted to."""
    from tilewright_study.planning import latency

    kind, rows = _rows.read(profile, experiments.row_types())
    if kind != "paths":
        raise ArtifactError(f"{profile}: expected rows of the experiment paths, found {kind}")
    if len(cases := {row["case"] for row in rows}) > 1:
        raise ArtifactError(f"{profile}: expected paths of one case, found {', '.join(sorted(cases))}")
    rows = [row for row in rows if row["rung"] == rung and row["status"] == "ok" and row["fit"]]
    bases = [row for row in rows if row["part"] == "base"]
    if not bases:
        raise ArtifactError(f"{profile}: expected paths on the rung {rung}, found none")
    seen, times = {}, {}
    for base in bases:
        own = [base, *(row for row in rows if row["base"] == base["path"] and row["part"] in FITTED)]
        path = _path(base["path"])
        seen[path] = {_path(row["path"]): float(row["fit"]) for row in own}
        times[path] = latency.model(path, {_path(row["path"]): float(row["p50_us"]) for row in own if row["p50_us"]})
    return times, seen


def _path(text):
    """The `Path` that its own text states in full."""

    stages, *knobs = text.split()
    fields = dict(knob.split("=") for knob in knobs)
    numbers = {knob: int(fields[knob]) for knob in ("fuse", "width") if knob in fields}
    scale = float(fields["scale"])
    return Path(tuple(stages.split(".")), **(fields | numbers | {"scale": scale}))
