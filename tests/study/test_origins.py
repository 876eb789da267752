"""What makes a job stale: its parameters, compared from one study to another. Nothing runs."""

import ast
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from snakemake.utils import update_config

from helpers.cases import rest_slow
from helpers.checkout import ROOT, TINY, appended, copied, described, dry_run, merged, overlay, run_loaded
from tilewright.core.errors import ArtifactError
from tilewright_study import config, experiments, origins
from tilewright_study.measure import rows as _rows
from tilewright_study.tables import _read

# What a shell takes and Snakemake does not record: where the checkout lies, and where a job writes.
DERIVED = {"script", "shipped", "recorded", "weights", "folder"}
# Weights that nothing asks for by default.
TRAINED = "results/checkpoints/segformer-b0-64.plain.safetensors"
# A path of a study in a command, maybe in JSON.
RESULT = re.compile(r'(?:^|(?<=["=]))[^"=]*results/[^"]*')
SHOWN = {"figure", "table", "report"}


def by_output(jobs):
    return {job["output"][0]: job for job in jobs if job["output"]}


def own(job):
    """What a job's own rule says of it, without what is upstream."""
    return {name: value for name, value in job["parameters"].items() if name not in DERIVED | {"origin"}}


def differing(before, after, of=lambda job: job["parameters"]["origin"]):
    """First outputs of the jobs that differ, those of one side alone among them."""
    one, two = by_output(before), by_output(after)
    return {name for name in one | two if name not in one or name not in two or of(one[name]) != of(two[name])}


def rules(jobs, names):
    return {by_output(jobs)[name]["rule"] for name in names if name in by_output(jobs)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def base(folder):
    """All jobs of the small study."""
    (jobs,) = described(folder, "all", TRAINED)
    return jobs


def test_parameters_are_texts_and_numbers_that_snakemake_records(base):
    for job in by_output(base).values():
        stated = {name: value for name, value in job["parameters"].items() if name not in DERIVED}
        assert {"code", "origin"} <= stated.keys()
        recorded = [ast.literal_eval(text) for text in job["recorded"]]
        assert sorted(map(str, recorded)) == sorted(map(str, stated.values())), job["rule"]


def test_the_whole_study_asks_for_every_file_that_it_makes(base):
    asked = next(set(job["input"]) for job in base if job["rule"] == "all")
    made = {
        path for job in by_output(base).values() if job["rule"] != "train" or TRAINED in asked for path in job["output"]
    }
    assert asked == made


# Other values of keys: what reads them. Of a key of several words, jobs of the rules.
KEYS = {
    "attention.schedules": ({"mixed": ["greedy"]}, {"bench"}),
    "attention.baselines": (["sdpa_mask", "sdpa_dense"], {"baselines"}),
    "attention.baseline_orders": (["ic"], {"baselines"}),
    "attention.max_dense_tokens": (10, {"baselines"}),
    "attention.max_seconds": (0.06, {"bench", "baselines"}),
    "schedule.objective": ("paper", {"schedule"}),
    "schedule.time_limit_s": (6, {"schedule"}),
    "schedule.gap": (0.01, {"schedule"}),
    "schedule.rounds": (1, {"schedule"}),
    "schedule.max_tile_kinds": (3, {"schedule"}),
    "figures.pattern_workloads": (["regionvit-tiny-64-s1", "vil-tiny-64-s1"], {"report"}),
    "figures.pattern_tiles": (["16x1"], {"figure"}),
    "figures.fill_workloads": (["regionvit-tiny-64-s1"], {"figure"}),
    "figures.fill_tiles": (["16x16", "16x1"], {"figure"}),
    "training.minutes": ({"plain": 0.04}, {"train"}),
    "training.size": (96, {"train"}),
    "training.batch": (5, {"train"}),
    "push.time_limit": (61, {"configure"}),
    "push.rtl": (False, {"push_run"}),
    "push.apps": (["gaussian-24"], {"push_map"}),
    "push.memories": (["dp"], {"push_map"}),
    "push.streams": ({"identity-8x8": ["fit"]}, {"configure"}),
    "push.attention": (["regionvit-tiny-64-s1"], {"experiment_untimed"}),
    "timing.rse": (0.03, {"bench", "baselines", "experiment", "experiment_on_host", "experiment_untimed"}),
    "timing.min_repetitions": (4, {"bench", "baselines", "experiment", "experiment_on_host", "experiment_untimed"}),
    "experiments": (["attention"], {"experiment"}),
    "device": ("cuda", {"profile", "bench", "baselines", "experiment"}),
    "dtype": ("float16", {"profile", "baselines", "experiment"}),
    "workloads": (["vil-tiny-64-s1"], {"graph"}),
    "models": ({"vil-tiny-64-s1": {"window": 5}}, {"graph"}),
    "orders": (["ic", "none"], {"table", "figure"}),
    "reorder": ({"ic": {"tau": 0.31}}, {"reorder", "experiment_untimed"}),
    "tiles": (["16x1", "64x1", "64x64", "32x1"], {"blocks"}),
    "tile_sets": ({"64x64": None}, {"bench"}),
    "solvers": (["greedy", "descent", "highs"], {"schedule", "table"}),
    "region_rows": (256, {"blocks", "experiment_untimed"}),
    "split_keys": (512, {"profile"}),
    "seed": (1, {"profile", "schedule", "bench", "baselines", "experiment"}),
    "video.weights": ({"tiny": {"recipe": {"warmup": 4}}}, {"video_weights"}),
    "pruned_accuracy.training": ({"batch": 5}, {"classifier"}),
}
# These alone decide so much that no other key would be seen beside them.
ALONE = {"experiments", "device", "dtype", "workloads", "orders", "tiles", "tile_sets", "seed"}


def rounds():
    """The keys, each once, those that different rules read side by side."""
    taken = [([name], KEYS[name][1]) for name in KEYS if name in ALONE]
    free = []
    for name, (_, read) in KEYS.items():
        if name in ALONE:
            continue
        section = name.partition(".")[0]
        for names, rules in free:
            if not rules & read and section not in {other.partition(".")[0] for other in names}:
                names.append(name)
                rules |= read
                break
        else:
            free.append(([name], set(read)))
    return [names for names, _ in (*taken, *free)]


# Experiments that ask for every rule, and have every key.
FEW = ["attention", "orders", "paths", "configure", "push", "push_attention", "push_streams", "video"]
FEW += ["pruned_accuracy", "neighborhood"]


@pytest.fixture(scope="module")
def changed(folder, base):
    """``{keys: jobs}`` of few experiments of the small study: without a change, and with other values of these keys."""
    few = overlay(folder / "few.yaml", {"experiments": FEW})
    found, studies = rounds(), [(TINY, few)]
    for number, names in enumerate(found):
        change = {}
        for name in names:
            section, _, key = name.rpartition(".")
            value = KEYS[name][0]
            update_config(change, {section: {key: value}} if section else {key: value})
        studies.append((TINY, few, overlay(folder / f"{number}.yaml", change)))
    made = dict(zip([(), *map(tuple, found)], described(folder, "all", TRAINED, studies=studies), strict=True))
    assert {job["rule"] for job in made[()]} == {job["rule"] for job in base}
    return made


def test_every_key_has_a_reader(changed):
    before = changed[()]
    for names, jobs in changed.items():
        seen = differing(before, jobs, lambda job: (own(job), job["input"]))
        rerun = rules(before, seen) | rules(jobs, seen)
        for name in names:
            assert rerun & KEYS[name][1] == KEYS[name][1] - ({"report"} - rerun), name


def test_what_is_changed_makes_all_that_follows_stale_and_nothing_else(changed):
    """So that a job that was interrupted is missed by whatever asks for less than the whole study."""
    base = changed[()]
    before = by_output(base)
    for jobs in changed.values():
        makers = {path: name for name, job in by_output(jobs).items() for path in job["output"]}
        due = differing(base, jobs, lambda job: (own(job), job["input"]))
        stale = differing(base, jobs)
        for name, job in by_output(jobs).items():
            upstream = {makers[path] for path in job["input"] if path in makers}
            assert (name in stale) == (name in due or bool(upstream & stale)), (name, before.get(name))


def test_keys_of_an_experiment_change_its_cases():
    """Those that have no rules of their own: what the rule `experiment` is run with says everything."""
    mapping = merged(TINY)
    found = config.load(mapping)
    ours = {name.partition(".")[0] for name in KEYS}
    for name in experiments.NAMES:
        section = experiments.section_of(name)
        if name == "attention" or section in ours - {"video", "pruned_accuracy"}:
            continue
        for key, value in mapping[section].items():
            if f"{section}.{key}" in KEYS:
                continue
            other = next(filter(None, (_loaded(mapping, section, key, each) for each in candidates(value))), None)
            if other is not None:
                assert cases(name, other) != cases(name, found), f"{section}.{key}"


def cases(name, study):
    made = ((experiments.arguments(name, study, case), case) for case in experiments.cases(name, study))
    return [*map(str, made)]


def _loaded(mapping, section, key, value):
    try:
        found = config.load({**mapping, section: {**mapping[section], key: value}})
    except config.ConfigError:
        return None
    return found if found != config.load(mapping) else None


def candidates(value):
    """Other values of the kind of `value`."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value * 2, value - 1, value / 2, value * 1.1)
    elif isinstance(value, list):
        yield value[:-1]
        for last in candidates(value[-1]) if value else ():
            yield [*value[:-1], last]
    elif isinstance(value, dict):
        for key, each in [*value.items()][::-1]:
            yield from ({**value, key: other} for other in candidates(each))


def test_the_order_of_names_counts(changed):
    base, jobs = changed[()], changed["orders",]
    assert "results/tables/latency.csv" in differing(base, jobs)
    assert not rules(base, differing(base, jobs)) & {"graph", "reorder", "blocks", "profile", "schedule", "bench"}


def test_timed_jobs_depend_on_the_cores_that_they_have(folder, base):
    (jobs,) = described(folder, "all", cores=1)
    timed = rules(base, differing(base, jobs, own))
    assert timed >= {"profile", "bench", "baselines", "experiment", "experiment_on_host", "configure"}
    assert not timed & {"graph", "reorder", "blocks", "schedule", "experiment_untimed", "push_map", "push_run", *SHOWN}


def test_threads_that_a_command_names_count():
    def counted(shellcmd, **resources):
        rule = SimpleNamespace(shellcmd=shellcmd)
        return origins._counts_cores(SimpleNamespace(rule=rule, resources=resources))

    # A solver's, which `--set-threads` states.
    assert counted("solve --threads {threads}") and counted("run", timing=1)
    assert not counted("run") and not counted("run", timing=1, gpu=1) and not counted(None)


@pytest.fixture
def checkout(tmp_path):
    """A copy of what runs the workflow, free to be edited, whose path a shell and Snakemake would read otherwise."""
    return copied(tmp_path / "it's a $HOME {checkout}")


# A member of each family that a workflow knows, by its folder below src/; what is added is a copy of it.
FAMILIES = {
    "tilewright/masks": "band", "tilewright/attention/reorder": "rcm", "tilewright/milp": "highs",
    "tilewright/slices/predictors": "column", "tilewright/packed/pruners": "evit",
    "tilewright/networks/attentions": "dense", "tilewright/networks/batching": "padded",
    "tilewright/networks/video_attentions": "window",
    "tilewright/pushmem/memories": "dp",
    "tilewright_study/baselines/sparse": "sdpa_mask", "tilewright_study/baselines/packed": "nested",
}  # fmt: skip
# Those of an experiment, whose names say what they are.
OF_EXPERIMENTS = {"TABLES": "table", "FIGURES": "figure"}
NEEDS = ("def needs(", "def needs(config):\n    return []\n\n\ndef _needs(")


def with_member(text, name):
    """The source of a package whose tuple `name` has one more word, the last one."""
    (found,) = (node for node in ast.parse(text).body if ast.unparse(node).startswith(f"{name} = ("))
    lines = text.splitlines(keepends=True)
    end = sum(map(len, lines[: found.end_lineno - 1])) + found.end_col_offset - 1
    comma = "" if text[:end].rstrip().endswith(",") else ", "
    return f'{text[:end]}{comma}"extra",{text[end:]}'


def test_a_new_member_repeats_nothing(folder, base, checkout):
    for family, member in FAMILIES.items():
        place = checkout / "src" / family
        shutil.copy(place / f"{member}.py", place / "extra.py")
        registry = place / "__init__.py"
        registry.write_text(with_member(registry.read_text(), "NAMES"))
    place = checkout / "src/tilewright_study/experiments/attention"
    for names, kind in OF_EXPERIMENTS.items():
        text = (place / f"{kind}_fill.py").read_text()
        (place / f"{kind}_extra.py").write_text(text.replace(*NEEDS))
        (place / "__init__.py").write_text(with_member((place / "__init__.py").read_text(), names))
    # By itself an order is chosen from all that there are.
    assert {by_output(base)[name]["wildcards"]["experiment"] for name in repeated(folder, base, checkout)} <= {"worth"}


def repeated(folder, base, checkout):
    """Jobs that run anew in an edited checkout, less those that show what they made."""
    (jobs,) = described(folder, "all", TRAINED, source=checkout)
    return {name for name in differing(base, jobs, own) if by_output(base)[name]["rule"] not in SHOWN}


def test_paths_that_a_shell_reads_otherwise_are_quoted(folder, base, checkout):
    (jobs,) = described(folder, "all", TRAINED, source=checkout)
    assert differing(base, jobs) == set()
    for job in by_output(jobs).values():
        assert (folder / job["script"]).is_file(), job
        shipped = [word for word in job["arguments"] if "expected/" in word and "=" not in word]
        assert all((folder / path).is_file() for path in shipped), shipped


def test_where_a_study_lies_makes_nothing_stale(base, tmp_path):
    deeper = tmp_path / "one/two/three"
    deeper.mkdir(parents=True)
    (jobs,) = described(deeper, "all", TRAINED)
    assert differing(base, jobs, lambda job: (job["recorded"], job["input"])) == set()


@pytest.mark.parametrize(
    ("path", "stale"),
    [
        pytest.param("tilewright_study/accelerators/technology.yaml", {"experiment_untimed"}, marks=pytest.mark.slow),
        ("tilewright_study/scenes/objects.csv", {"classifier", "train", "experiment", "path_pictures", "figure"}),
        pytest.param("tilewright_study/report/style.css", {"report"}, marks=pytest.mark.slow),
        ("tilewright_study/stages/graph.py", {"graph"}),
    ],
)
def test_what_a_job_loads_is_its_code(folder, base, checkout, path, stale):
    with appended(checkout / "src" / path, "\n\nCHANGED = 1\n"):
        (jobs,) = described(folder, "all", TRAINED, source=checkout)
    assert rules(base, differing(base, jobs, own)) >= stale


def test_a_package_of_another_checkout_is_refused(folder, tmp_path):
    other = copied(tmp_path / "other")
    given = ("--snakefile", ROOT / "Snakefile", "--directory", folder, "--cores", "2", "--dry-run")
    status, printed = run_loaded(*given, "--configfile", TINY, source=other)
    assert status != 0 and f"expected the package of this checkout, {ROOT}/src, found {other}/src/tilewright" in printed


def test_a_mask_that_was_deleted_is_missed(tmp_path):
    change = {"workloads": ["file-mine"], "models": {"file-mine": {"path": "mine.npy"}}}
    change |= {"figures": {"pattern_workloads": [], "fill_workloads": []}, "experiments": ["attention"]}
    study = overlay(tmp_path / "mine.yaml", change)
    for made in ("results/graphs/file-mine.npz", "results/graphs/file-mine/none.npz"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).write_bytes(b"")
    status, printed = dry_run(
        tmp_path, "results/graphs/file-mine/none.npz", "--cores", "2", "--configfile", TINY, study
    )
    assert status != 0 and "expected what it is made from, found no mine.npy" in printed


def test_recorded_rows_that_are_not_there_are_missed(tmp_path):
    figure = tmp_path / "figures/latency_vil.svg"
    figure.parent.mkdir()
    figure.write_text("old")
    change = {"recorded": "expected/paper/none", "device": "cuda"}
    change["figures"] = {"pattern_workloads": [], "fill_workloads": []}
    study = overlay(tmp_path / "change.yaml", change)
    status, printed = dry_run(tmp_path, "figures/latency_vil.svg", "--cores", "2", "--configfile", study)
    assert status != 0 and "found none in expected/paper/none" in printed


@pytest.mark.parametrize("prefix", rest_slow(["", "mine/"], 1))
def test_a_part_of_the_configuration_is_enough_for_a_module(tmp_path, prefix):
    mine = tmp_path / "Snakefile"
    stated = {"experiments": ["attention", "video", "push"], "seed": 1}
    stated["video"] = yaml.safe_load((ROOT / "config/all.yaml").read_text())["video"]
    mine.write_text(
        f'module tw:\n    snakefile: "{ROOT}/Snakefile"\n    config: {stated!r}\n    prefix: {prefix!r}\n'
        "use rule * from tw as tw_*\nrule mine:\n    default_target: True\n    input: rules.tw_all.input\n"
    )
    jobs = described(tmp_path, "mine", studies=[()], source=ROOT, snakefile=mine)[0]
    made = by_output(jobs)
    assert {job["rule"] for job in jobs} >= {"tw_bench", "tw_report"}
    assert {job["wildcards"].get("experiment") for job in jobs} == {None, "push", "video"}
    assert all(name.startswith(f"{prefix}results/") or name.startswith(f"{prefix}figures/") for name in made)
    asked = next(job["input"] for job in jobs if job["rule"] == "mine")
    assert set(asked) == {path for job in jobs for path in job["output"]}
    named = [path for job in made.values() for word in job["arguments"] for path in RESULT.findall(word)]
    assert named and all(path.startswith(f"{prefix}results/") for path in named), named


def test_a_tile_set_is_left_out_by_null():
    found = config.load(merged(TINY, {"tile_sets": {"64x64": None, "16x1": None}}))
    assert {*found.tile_sets} == {*found.attention.schedules} == {"mixed", "64x1"}
    found = config.load(merged(TINY, {"attention": {"schedules": {"64x64": None}}}))
    assert {*found.attention.schedules} >= {"16x1", "64x1"}


def test_a_file_of_the_checkout_counts_by_what_it_holds(folder, base, checkout):
    csv = checkout / "expected/paper/latency.csv"
    shutil.copystat(ROOT / "config.yaml", csv)
    (jobs,) = described(folder, "all", TRAINED, source=checkout)
    assert differing(base, jobs) == set()
    lines = Path(csv).read_text().splitlines(keepends=True)
    csv.write_text("".join(lines[:-1]))
    (jobs,) = described(folder, "all", TRAINED, source=checkout)
    assert "results/tables/claims.csv" in differing(base, jobs)


@pytest.mark.parametrize("column", ["device", "cores", "torch"])
def test_rows_of_unequal_devices_make_no_table(tmp_path, column):
    row = {"model": "vil-tiny-64-s1", "provider": "sdpa_dense", "device": "x", "cores": 1, "torch": "1"}
    unequal = row | {column: 2 if column == "cores" else "2"}
    for name, found in (("one", row), ("other", unequal), ("blank", {**row, "cores": None, "torch": ""})):
        _rows.write(tmp_path / f"{name}.csv", experiments.member("attention").Row, [found])
    with pytest.raises(ArtifactError, match=f"expected attention rows of one device, found {column} . and ."):
        _read.frames([tmp_path / "one.csv", tmp_path / "other.csv"], "attention")
    (rows,) = _read.frames([tmp_path / "one.csv", tmp_path / "blank.csv"], "attention")
    assert len(rows) == 2
