"""The contract of experiments, for every member, and an experiment that is added without an edit elsewhere."""

import hashlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import typing
from pathlib import Path

import msgspec
import pytest
import yaml

from helpers.checkout import ALL, copied, dry_run, merged, snakemake
from tilewright import devices
from tilewright.attention.schedule import search
from tilewright.core.errors import ConfigError, UnknownNameError
from tilewright_study import cli, config, experiments, provenance, sections
from tilewright_study.measure import rows as _rows
from tilewright_study.tables import _read

ROOT = Path(__file__).parents[2]
# Every experiment, also those that the default study leaves out. Their weights need not be there.
STUDY = msgspec.structs.replace(config.load(merged(ALL)), experiments=experiments.NAMES)
GENERAL = [name for name in experiments.NAMES if hasattr(experiments.member(name), "Settings")]


def test_an_unknown_experiment_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match="unknown experiment 'pie'; known: attention, networks, ragged, pruned"):
        experiments.member("pie")


@pytest.mark.parametrize("name", experiments.NAMES)
def test_a_row_is_declared_once_with_types(name):
    row = experiments.member(name).Row
    assert issubclass(row, _rows.Row) and _rows.kind_of(row) == name and _rows.version_of(row) >= 1
    assert row.columns()[:2] == ("kind", "version") and row.columns()[-3:] == ("commit", "code", "time")
    assert sorted(row.columns()) == sorted(row.__struct_fields__)
    known = (str, bool, _rows.Number, _rows.Count, _rows.Flag, _rows.Status)
    hints = typing.get_type_hints(row)
    assert all(hints[column] in known for column in row.columns()[2:])
    assert inspect.getdoc(row)


@pytest.mark.parametrize("name", experiments.NAMES)
def test_a_section_describes_its_values_and_checks_them(name):
    section = experiments.member(name).Section
    assert issubclass(section, sections.Section)
    text, values = sections.descriptions(section)
    assert text and list(values) == list(section.__struct_fields__)
    assert section.check is not sections.Section.check
    default = msgspec.structs.replace(STUDY, experiments=())
    getattr(STUDY, experiments.section_of(name)).check(default)


@pytest.mark.parametrize("name", experiments.NAMES)
def test_files_are_those_of_the_cases_and_none_where_it_is_not_selected(name):
    files = experiments.files(name, STUDY)
    assert files and len(set(files)) == len(files)
    assert all(path.startswith(experiments.LOGS) and path.endswith(".csv") for path in files)
    others = msgspec.structs.replace(STUDY, experiments=())
    assert experiments.files(name, others) == experiments.cases(name, others) == []


@pytest.mark.parametrize("name", GENERAL)
def test_a_case_is_run_with_its_flags_alone(name):
    """What the rule prints says everything: read again, it is the settings of the study."""
    for case in experiments.cases(name, STUDY):
        words = shlex.split(" ".join(experiments.arguments(name, STUDY, case)))
        pairs = words[1 : next(at for at, word in enumerate(words) if word == "--device")]
        assert words[0] == "--set"
        assert experiments.parse(name, cli.settings(pairs)) == experiments.member(name).settings(STUDY, case)
        assert experiments.size(name, STUDY, case) > 0


@pytest.mark.parametrize("device", devices.NAMES)
@pytest.mark.parametrize("name", GENERAL)
def test_the_code_of_a_case_covers_that_of_its_rows(name, device):
    module = experiments.member(name)
    for case in experiments.cases(name, STUDY):
        rows = module.planned(case, module.settings(STUDY, case))
        assert rows and {column for row in rows for column in row} <= {*module.Row.columns()}
        entered = {entered for row in rows for entered in module.modules(row, device)}
        assert entered <= {*experiments.modules(name, rows, device)}
        covered = provenance.closure(*experiments.modules(name, rows, device))
        assert experiments.runner(name).__name__ in covered
        untimed = ("orders", "accelerator", "configure", "push", "push_attention", "push_streams")
        assert module.__name__ in covered and ("tilewright.core.timing" in covered or name in untimed)


@pytest.mark.parametrize("name", GENERAL)
def test_settings_that_are_unknown_or_missing_are_named(name):
    with pytest.raises(ConfigError, match=f"experiment {name}: .*; settings: "):
        experiments.parse(name, {"pie": 1})
    with pytest.raises(ConfigError, match=f"experiment {name}: .*missing required field.*; settings: "):
        experiments.parse(name, {})


def test_what_has_rules_of_its_own_is_not_run_by_the_general_one():
    assert [name for name in experiments.NAMES if name not in GENERAL] == ["attention"]
    with pytest.raises(ConfigError, match="experiment attention: needs files of other stages"):
        experiments.parse("attention", {})


def test_solvers_without_a_module_are_those_of_the_search():
    assert tuple(search.HEURISTICS) == _read.HEURISTICS
    assert {name for name in search.NAMES if name.endswith(_read.PUBLISHED)} == {*search.PUBLISHED}


@pytest.mark.parametrize("name", GENERAL)
def test_what_runs_a_case_imports_its_experiment_and_not_the_other_way_round(name):
    section, runner = experiments.member(name).__name__, experiments.runner(name).__name__
    assert section in provenance.closure(runner)
    assert section == runner or runner not in provenance.closure(section)


def test_importing_the_experiments_stays_light():
    heavy = ("torch", "triton", "numba", "gurobipy", "highspy", "matplotlib", "pandas", "seaborn")
    program = (
        "import sys; from tilewright_study import experiments; dict(experiments.row_types());"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# An experiment of one's own, as CONTRIBUTING.md shows it.

_, _, PAGE = (ROOT / "CONTRIBUTING.md").read_text().partition("\n### An experiment\n")
SHOWN = dict(re.findall(r"^```(\w*)\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL))
DIFF, OVERLAY, COMMANDS = SHOWN["diff"], SHOWN["yaml"], SHOWN[""]
OWN = re.findall(r"^\+\+\+ b/(.+)$", DIFF, re.MULTILINE)
REGISTRY = "src/tilewright_study/experiments/__init__.py"


def digests(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkout with an experiment of its own; no other file of it is edited."""
    folder = copied(tmp_path_factory.mktemp("own") / "checkout")
    before = digests(folder)
    subprocess.run(["git", "apply", "-"], input=DIFF, text=True, cwd=folder, check=True)
    subprocess.run(COMMANDS.splitlines()[0], shell=True, cwd=folder, check=True)
    after = digests(folder)
    assert {path for path in after if after[path] != before.get(path)} == {*OWN, REGISTRY}
    return folder


def test_an_experiment_is_added_by_a_folder_and_a_word(source, tmp_path):
    """It goes through configuration, rule, file, reader, table and figure."""
    study = yaml.safe_load(OVERLAY)
    (tmp_path / "own.yaml").write_text(OVERLAY)
    given = ("--cores", "2", "--configfile", tmp_path / "own.yaml")
    _, *cores, table, figure, _, overlay = shlex.split(COMMANDS.splitlines()[1])
    wanted = (table, figure)
    assert cores == ["--cores", "2"] and overlay == "own.yaml"
    done = snakemake(tmp_path, *wanted, *given, source=source, capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (tmp_path / "results/logs/counted/short.csv").read_text().splitlines()
    assert lines[0].startswith("kind,version,word,letters,") and lines[2].startswith("counted,1,it's,4,")
    assert "it's: 4 letters" in (tmp_path / "logs/counted/short.log").read_text()
    rows = sorted((tmp_path / "results/tables/counted.csv").read_text().splitlines()[1:])
    assert rows == ["a,1.0", "it's,4.0", "word,4.0"]
    assert (tmp_path / "figures/counted.svg").stat().st_size
    # The whole study is this experiment; its code and its settings rerun its own cases.
    assert jobs(tmp_path, given, source) == {"report": 1, "all": 1}
    module = source / "src/tilewright_study/experiments/counted/__init__.py"
    text = module.read_text()
    module.write_text(text + "\nCHANGED = True\n")
    assert jobs(tmp_path, given, source)["experiment"] == 2
    module.write_text(text)
    study["counted"]["words"]["long"] = ["words"]
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(study))
    assert jobs(tmp_path, given, source)["experiment"] == 1


MADE_UP = """
from pathlib import Path
from helpers import checkout, synthetic
from tilewright_study import config, experiments, figures, tables
checkout.ROOT = Path(experiments.__file__).parents[3]
study = config.load(checkout.merged(checkout.small()))
synthetic.write_derived(Path(), study, "counted")
tables.tabulate("counted", tables.needs("counted", study), ["counted.csv"])
figures.draw("counted", figures.needs("counted", study), ["counted.svg"])
"""


def test_its_rows_and_its_small_study_are_made_up_from_its_folder(source, tmp_path):
    path = os.pathsep.join(map(str, (source / "src", ROOT / "tests")))
    command, environment = [sys.executable, "-c", MADE_UP], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results/logs/counted/short.csv").read_text().startswith("kind,version,word,letters,")
    assert (tmp_path / "counted.csv").read_text().count("\n") == 3
    assert (tmp_path / "counted.svg").is_file()


def jobs(directory, given, source):
    """Jobs that the whole study would run, by rule."""
    status, printed = dry_run(directory, *given, source=source)
    assert status == 0, printed[-4000:]
    lines = printed.partition("Job stats:")[2].partition("total")[0].splitlines()
    return {name: int(count) for name, count in (line.split() for line in lines[3:] if line.strip())}


def test_its_mistakes_are_named(source, tmp_path):
    for words, message in (
        ({"x": ["a", "a"]}, "counted.words.x: 'a' appears twice"),
        ({"x": [1]}, "Expected `str`, got `int` - at `$.counted.words[...][0]`"),
        (None, "experiments: 'counted' is selected; expected its section 'counted', found none"),
    ):
        study = {"experiments": ["counted"]} | ({} if words is None else {"counted": {"words": words}})
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(study))
        given = ("--cores", "2", "--configfile", tmp_path / "own.yaml")
        status, printed = dry_run(tmp_path, *given, source=source)
        assert status != 0 and message in printed


def test_an_experiment_may_have_a_type_of_its_own():
    stated = merged()
    stated["ragged"]["dtype"] = "float16"
    study = config.load(stated)
    found = {
        name: experiments.arguments(name, study, experiments.cases(name, study)[0]) for name in ("ragged", "pruned")
    }
    assert {name: flags[flags.index("--dtype") + 1] for name, flags in found.items()} == {
        "ragged": "float16",
        "pruned": study.dtype,
    }


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("networks", {"network": "vil-tiny-224", "attention": "tilewright"}),
        ("heatmap", {"reorder": "window", "solver": "highs"}),
    ],
)
def test_rows_of_whole_plans_depend_on_what_predicts_them(name, row):
    assert "tilewright.attention.cuda.cost_model" in experiments.modules(name, [row], "cuda")
    assert not any("cost_model" in module for module in experiments.modules(name, [row], "cpu"))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("networks", {"network": "vil-tiny-224", "attention": "native"}),
        ("pruned", {"network": "deit-tiny-64-evit", "pruner": "evit", "batching": "padded"}),
    ],
)
def test_rows_without_plans_do_not_depend_on_the_scheduler(name, row):
    found = provenance.closure(*experiments.modules(name, [row], "cpu"))
    assert not [
        module
        for module in found
        if module.startswith(("tilewright.attention.schedule", "tilewright.attention.reorder."))
    ]
