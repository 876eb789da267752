"""The environments say the same: pyproject's bounds, the lock that make installs, conda's files, the containers."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from helpers.checkout import dry_run
from tilewright.core import _internals

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text()
PINS = {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", LOCK, re.MULTILINE)}
CONDA = ("cpu", "gpu")
# What conda-forge calls them.
PYPI_NAMES = {"matplotlib-base": "matplotlib", "msgspec-python": "msgspec", "pytorch-cpu": "torch"}
# No Python packages of the lock.
NOT_LOCKED = {"python", "pip", "cxx-compiler"}
RECIPES = ("Dockerfile", "tilewright.def")
# Installed by those who want them alone.
NOT_SET_UP = {"accelerator", "camera", "halide"}
# The oldest and the newest torch that everything was run with.
RUN = ("2.11", "2.13")


def required(*extras):
    """Requirements of the package and of its extras."""
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(line) for lines in lists for line in lines]


def conda(name):
    """{package as on PyPI: pinned version} of an environment of conda."""
    content = yaml.safe_load((ROOT / f"envs/{name}.yaml").read_text())
    *packages, from_pypi = content["dependencies"]
    pairs = [re.fullmatch(r"([\w-]+)(?: =([\d.]+))?", package).groups() for package in packages]
    pairs += [line.split("==") for line in from_pypi["pip"]]
    return {PYPI_NAMES.get(package, package): version for package, version in pairs}


def test_the_lock_keeps_the_bounds_of_the_project():
    for requirement in required(*PROJECT["optional-dependencies"].keys() - NOT_SET_UP):
        assert PINS[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_torch_and_triton_are_bounded_by_the_releases_that_were_run():
    """The launcher of each release of triton that is let in is known."""
    bounds = {requirement.name: requirement.specifier for requirement in required()}
    releases = {"torch": RUN, "triton": _internals.KNOWN_TRITON}
    for name, known in releases.items():
        minors = [Version(release).minor for release in known]
        major = Version(known[0]).major
        let_in = [minor for minor in range(2 * max(minors)) if f"{major}.{minor}.0" in bounds[name]]
        assert let_in == list(range(min(minors), max(minors) + 1)), name
        assert f"{major + 1}.0.0" not in bounds[name]
        assert ".".join(PINS[name].split(".")[:2]) == known[-1]


def test_the_lock_has_all_that_its_packages_need():
    """`make setup` installs it without looking at dependencies."""
    from importlib.metadata import requires

    for name, version in PINS.items():
        for requirement in map(Requirement, requires(name) or []):
            # torch of PyPI brings CUDA's libraries, exactly pinned by itself, before the lock is installed.
            if (requirement.marker and not requirement.marker.evaluate({"extra": ""})) or name == "torch":
                continue
            needed = canonicalize_name(requirement.name)
            assert requirement.specifier.contains(PINS[needed], prereleases=True), f"{name}=={version}: {requirement}"


def test_every_pin_has_its_hashes():
    blocks = re.split(r"^(?=[\w.-]+==)", LOCK, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(PINS)
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}$", block, re.MULTILINE) for block in blocks)


@pytest.mark.parametrize("name", CONDA)
def test_conda_pins_are_those_of_the_lock(name):
    for package, version in conda(name).items():
        if package not in NOT_LOCKED:
            assert f"{PINS[package]}.".startswith(f"{version}."), package


@pytest.mark.parametrize("name", CONDA)
def test_conda_has_what_the_package_needs(name):
    needed = {requirement.name for requirement in required()}
    # No kernel of Triton runs on a CPU.
    assert needed - set(conda(name)) == ({"triton"} if name == "cpu" else set())


def test_conda_files_differ_in_torch_alone():
    cpu, gpu = map(conda, CONDA)
    assert {package for package, _ in cpu.items() ^ gpu.items()} == {"torch", "triton"}


@pytest.mark.parametrize("path", sorted((ROOT / "rules").glob("t*.smk")), ids=lambda path: path.stem)
def test_every_rule_names_its_environment(path):
    _, *rules = re.split(r"^rule ", path.read_text(), flags=re.MULTILINE)
    for rule in rules:
        assert re.search(r'conda:\n {8}(environment\("cpu"\)|TIMED_ENV)\n', rule), rule.partition(":")[0]
        # What is compiled ahead is for the environment that times it.
        assert ("TIMED_ENV" in rule) == ("**asked(" in rule or "--compile-only" in rule)


def test_python_and_snakemake_are_the_same_everywhere():
    python = Requirement(f"python{PROJECT['requires-python']}").specifier
    assert {base(name) for name in RECIPES} == {f"python:{conda('cpu')['python']}-slim-bookworm"}
    assert all(conda(name)["python"] in python for name in CONDA)
    lowest = re.search(r'min_version\("(.+)"\)', (ROOT / "Snakefile").read_text()).group(1)
    snakemake = next(line for line in required("study") if line.name == "snakemake")
    assert lowest in snakemake.specifier and Version(PINS["snakemake"]) >= Version(lowest)


def test_the_citation_is_of_this_version_and_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


# Containers: no engine is needed to see that a recipe copies and installs the right things.


def recipe(name):
    return (ROOT / "containers" / name).read_text()


def base(name):
    return re.search(r"^from:? (\S+)$", recipe(name), re.MULTILINE | re.IGNORECASE).group(1)


def copied(name):
    """Paths of the checkout that a recipe copies."""
    if name == "Dockerfile":
        return {path for line in re.findall(r"^COPY (.+) \S+$", recipe(name), re.MULTILINE) for path in line.split()}
    return set(re.findall(r"^ +(\S+) /opt/tilewright/$", recipe(name), re.MULTILINE))


def test_both_recipes_say_the_same():
    assert copied("Dockerfile") == copied("tilewright.def")
    packages = [re.search(r"--no-install-recommends (.+?)\s*\\?$", recipe(name), re.MULTILINE) for name in RECIPES]
    assert packages[0].group(1) == packages[1].group(1)
    for name in RECIPES:
        assert re.search(r"make setup TORCH_INDEX=", recipe(name))


def test_what_the_recipes_copy_is_enough_to_plan_the_study(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in copied("Dockerfile"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    assert all((source / name).is_file() for name in ("Makefile", "requirements.lock", PROJECT["readme"]))
    for study in ([], ["--configfile", source / "config/h200.yaml"]):
        status, printed = dry_run(tmp_path / "run", "--quiet", "all", *study, source=source)
        assert status == 0, printed


# docs/environments.md: which machine installs what.


def test_the_table_of_machines_names_the_versions_of_the_lock():
    text = (ROOT / "docs/environments.md").read_text()
    pins = set(re.findall(r"torch==([\d.]+)", text)) - {f"{RUN[0]}.0"}
    assert pins == {PINS["torch"]}
    assert f"{PINS['torch']}+cpu" in text and f"{PINS['torch']}+cu126" in text
    specifiers = [next(str(line.specifier) for line in required() if line.name == name) for name in ("torch", "triton")]
    bounds = re.search(r"torch from ([\d.]+) to below ([\d.]+), triton from ([\d.]+) to below ([\d.]+)", text).groups()
    assert [f"<{bounds[1]},>={bounds[0]}", f"<{bounds[3]},>={bounds[2]}"] == specifiers
