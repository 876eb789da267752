"""Stage T4 on files: the fastest of several schedules, its command line and its rule."""

from pathlib import Path

import pytest
import yaml

from helpers import plans
from helpers.checkout import merged, snakemake
from helpers.files import run_script
from tilewright import devices
from tilewright import graph as graph_file
from tilewright.attention import blocks as blocks_file
from tilewright.attention import profile as profile_file
from tilewright.attention import schedule
from tilewright.attention.measure import measure
from tilewright.attention.schedule import TUNED, Skipped
from tilewright.core.errors import ArtifactError, ConfigError, DeviceError
from tilewright_study import config, experiments
from tilewright_study.stages import tune

ROOT = Path(__file__).parents[2]
NAMES = ("16x1", "32x1")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A graph with its blocks and profiles, and a schedule of all tiles and one of each."""
    folder = tmp_path_factory.mktemp("tune")
    ordered = plans.reordered(plans.pattern(96, 96), heads=2, head_dim=16)
    graph_file.save(folder / "graph.npz", ordered)
    covers = plans.covers(ordered, NAMES)
    profiles = {name: measure(cover, budget_s=0.02) for name, cover in covers.items()}
    limits = devices.limits(devices.describe("cpu"))
    for name in NAMES:
        blocks_file.save(folder / f"{name}.npz", covers[name])
        profile_file.save(folder / f"{name}.json", profiles[name])
        alone = schedule.solve({name: covers[name]}, {name: profiles[name]}, limits, "greedy")
        schedule.save(folder / f"{name}.greedy.json", alone)
    schedule.save(folder / "mixed.descent.json", schedule.solve(covers, profiles, limits, "descent"))
    return folder


def arguments(folder, **changes):
    runs = ("mixed.descent", *(f"{name}.greedy" for name in NAMES))
    values = {
        "schedule": [folder / f"{name}.json" for name in runs],
        "graph": folder / "graph.npz",
        "blocks": [folder / f"{name}.npz" for name in NAMES],
        "profile": [folder / f"{name}.json" for name in NAMES],
        "seed": 0,
        "output": folder / "out.json",
    }
    return values | changes


def test_the_command_writes_the_fastest(files, tmp_path):
    given = arguments(files, output=tmp_path / "mixed.tuned.json")
    words = []
    for name, value in given.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    done = run_script(ROOT / "workflow/scripts/tune.py", *words)
    assert done.returncode == 0, done.stderr
    found = schedule.load(given["output"])
    assert found.solver == TUNED and 1 <= len(found.trials) <= 3
    best = min(found.trials, key=lambda trial: trial.p50_us)
    assert found.chosen == f"{'+'.join(best.tiles)} {best.solver}"
    assert f"chosen: {found.chosen}, in " in done.stderr and "predicted" in done.stderr


def test_a_skipped_schedule_is_left_out(files, tmp_path):
    found = schedule.load(files / "mixed.descent.json")
    kept = {name: getattr(found, name) for name in Skipped.__dataclass_fields__ if name not in ("reason", "status")}
    schedule.save(tmp_path / "skipped.json", Skipped(**kept, reason="no licence"))
    tune.run(**arguments(files, schedule=[tmp_path / "skipped.json", files / "16x1.greedy.json"]))
    assert schedule.load(files / "out.json").chosen == "16x1 greedy"
    with pytest.raises(ArtifactError, match="expected a schedule to tune, found none but skipped ones"):
        tune.run(**arguments(files, schedule=[tmp_path / "skipped.json"]))


def test_parts_that_do_not_belong_together_are_refused(files):
    with pytest.raises(ArtifactError, match="needs blocks of the tiles"):
        tune.run(**arguments(files, blocks=[files / "16x1.npz"]))


def test_another_device_is_refused(files, monkeypatch):
    described = devices.describe("cpu")
    monkeypatch.setattr(devices, "describe", lambda _: described | {"threads": described["threads"] + 1})
    with pytest.raises(DeviceError, match="made for another device"):
        tune.run(**arguments(files))


STUDY = merged()


def configured(**schedules):
    return config.load(STUDY | {"attention": STUDY["attention"] | {"schedules": schedules}})


def test_a_tuned_schedule_is_chosen_from_those_of_its_tiles():
    study = configured(mixed=["greedy", "descent", "highs", "tuned"], **{"64x1": ["greedy"], "16x1": ["greedy"]})
    assert study.attention.runs[3] == ("mixed", TUNED)
    tried = [("mixed", "greedy"), ("mixed", "descent"), ("mixed", "highs"), ("64x1", "greedy"), ("16x1", "greedy")]
    assert list(study.attention.tried("mixed", study)) == tried
    with pytest.raises(ConfigError, match=r"attention\.schedules\.mixed: expected a solver beside tuned, found none"):
        configured(mixed=["tuned"])


def test_rows_of_a_tuned_schedule_depend_on_what_chose_it():
    def code(solver):
        row = {"model": "vil-tiny-224-s1", "reorder": "ic", "provider": "tilewright", "solver": solver}
        return experiments.code("attention", [row], "cpu")

    assert len({code("greedy"), code("highs"), code(TUNED)}) == 3


def test_the_workflow_tunes_after_the_solvers(tmp_path):
    overlay = {
        "experiments": ["attention"],
        "workloads": ["vil-tiny-64-s1"],
        "orders": ["window"],
        "solvers": ["greedy", "descent"],
        "attention": {"schedules": {"mixed": ["greedy", "descent", "tuned"]}, "baselines": ["sdpa_dense"]},
        "figures": {"pattern_workloads": [], "fill_workloads": [], "gantt_order": "window"},
    }
    overlay["figures"]["gantt_workload"] = "vil-tiny-64-s1"
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(overlay))
    log = "results/logs/vil-tiny-64-s1/window/mixed.tuned.csv"
    options = ["-n", "-p", "--cores", "1", "--configfile", tmp_path / "study.yaml", "--", log]
    done = snakemake(tmp_path, *options, capture_output=True)
    assert done.returncode == 0, done.stderr
    tuned = next(line for line in done.stdout.splitlines() if "tune.py" in line)
    names = ("mixed.greedy", "mixed.descent", "16x1.greedy", "64x1.greedy", "64x64.greedy")
    assert all(f"results/schedules/vil-tiny-64-s1/window/{name}.json" in tuned for name in names)
