"""What is built for others: the wheel holds the package whole, the source distribution a checkout, and both run."""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77", reason="setuptools 77, which builds the package, is not installed")

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def copied(folder):
    """A copy of what git tracks, so that no build leaves anything in the checkout, or takes more."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("no checkout of git")
    # Some may be deleted.
    for name in filter(lambda name: name and (ROOT / name).is_file(), listed.stdout.decode().split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def built(what, source, folder):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-c", BUILD, what, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def held(folder):
    """{path: content} of the files under `folder`."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def package(wheel):
    """{path: content} of what a wheel installs, and its metadata as one text each."""
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    about = {name.partition("/")[2]: content.pop(name).decode() for name in list(content) if ".dist-info/" in name}
    return content, about


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return copied(tmp_path_factory.mktemp("build") / "checkout")


@pytest.fixture(scope="module")
def wheel(checkout):
    return built("wheel", checkout, checkout.parent / "wheel")


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    source = held(wheel.parents[1] / "checkout/src/tilewright")
    wanted = {f"tilewright/{name}": content for name, content in source.items()}
    found, about = package(wheel)
    assert found.keys() == wanted.keys()
    assert found == wanted
    assert {Path(name).suffix for name in wanted} >= {".py", ".typed"}
    assert "tilewright = tilewright.__main__:main" in about["entry_points.txt"]
    assert "licenses/LICENSE" in about


def test_the_extra_study_brings_the_workflow(wheel):
    about = email.message_from_string(package(wheel)[1]["METADATA"])
    extras = set(about.get_all("Provides-Extra"))
    assert {"study", "slurm", "push", "accelerator"} <= extras
    brought = [line for line in about.get_all("Requires-Dist") if line.endswith('extra == "study"')]
    assert any(line.startswith("snakemake<10") for line in brought)


def test_the_source_distribution_is_a_checkout_that_builds_the_same_wheel(checkout, wheel, tmp_path):
    wanted = {name for name in held(checkout) if ".egg-info" not in name and not name.startswith("build/")}
    with tarfile.open(built("sdist", checkout, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("tilewright-*")
    found = {name for name in held(source) if ".egg-info" not in name}
    assert found - wanted == {"PKG-INFO", "setup.cfg"}
    assert wanted - found == {".gitignore"}
    again, _ = package(built("wheel", source, tmp_path / "wheel"))
    assert again == package(wheel)[0]


def test_the_wheel_runs_where_no_checkout_is(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site := tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(site), "TILEWRIGHT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-P", ROOT / "tests/helpers/installed.py", str(site)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 'pictures need matplotlib: pip install ".[study]" in the checkout of tilewright' in done.stderr
