"""Code in the README, how-to pages and tutorials: it runs, or what it names exists."""

import re
import shlex
import shutil
import subprocess
from importlib.util import find_spec

import pytest
import yaml

from helpers import pages
from helpers.pages import ROOT

# The names of parallel.md need several processes: its code runs in test_parallel.py and test_sequence_parallel.py.
ELSEWHERE = {"docs/parallel.md"}
PAGES = [
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "docs/*.md", "docs/tutorials/*.md", "config/README.md")
    for path in sorted(ROOT.glob(pattern))
    if "```" in path.read_text()
]
TUTORIALS = [path for path in PAGES if "tutorials" in path]
# What a reader's machine may lack.
OPTIONAL = ("timm", "transformers", "diffusers", "halide")
KINDS = {"python", "bash", "", "text", "yaml", "bibtex"}
# Commands that set a machine up, or wait for a cluster.
SETUP = ("cd", "cp", "git", "sacctmgr", "sed", "sinfo", "source", "tmux")
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
_DURATION = re.compile(r"\d+(\.\d+)? ?(µs|ms|s|min)\b")
_NUMBER = re.compile(r"\d[\d,.]*")


@pytest.mark.parametrize("path", PAGES)
def test_names_in_python_exist(path):
    text = "\n".join(block.text for block in pages.blocks(path) if block.kind == "python")
    assert pages.unknown(text) == []


def test_a_name_and_a_keyword_that_do_not_exist_are_found():
    text = "import tilewright as tw\nfrom tilewright import slices\ntw.plan(p, head=3)\nslices.sparse(q)\ntw.load('p')"
    assert pages.unknown(text) == ["slices.sparse", "tw.plan(head=)"]


@pytest.mark.parametrize("path", PAGES)
def test_commands_are_taken(path, tmp_path):
    found = pages.blocks(path)
    assert {block.kind for block in found} <= KINDS
    for block in found:
        if block.kind == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict)
        for line in pages.commands(block) if block.kind in pages.SHELL else ():
            words = shlex.split(line.partition(" || ")[0])
            if words[0] in ("tilewright", "python") and len(words) > 1:
                status, errors = pages.accepted(words, tmp_path)
                assert status == 0, f"{line}\n{errors}"
            elif words[0] == "make":
                assert re.search(rf"^{words[1]}:", MAKEFILE, re.MULTILINE), line
            elif words[:2] == ["pip", "install"]:
                extras = re.findall(r"[\w]+", "".join(re.findall(r"\[(.*)\]", line)))
                assert [name for name in extras if f"\n{name} = [" not in PROJECT] == [], line
            elif words[0] == "torchrun":
                assert (ROOT / words[3]).exists(), line
            else:
                # Snakemake's are planned in test_workflow_plans.py.
                assert words[0] in (*SETUP, "snakemake", "python"), line


# Smaller sizes of a tutorial, by what stands on its page. Of its output the first word of each line is then compared.
SMALL = {
    "docs/tutorials/mask.md": [("side = 48", "side = 24"), ("--without flex", "--without flex --seconds 0.02")],
    "docs/tutorials/video.md": [("(12, 24, 32)", "(2, 24, 32)"), ("480p-9f", "480p-1f")],
    "docs/tutorials/reproduce.md": [("vil-tiny-128-s1", "vil-tiny-64-s1")],
    "docs/tutorials/timm.md": [("896", "140"), (", pretrained", ", depth=2, pretrained")],
}


def printed(text, path):
    """Output without what differs from run to run."""
    lines = [" ".join(line.split()) for line in _DURATION.sub("#", text).strip().splitlines()]
    return sorted(_NUMBER.sub("#", line.split()[0]) for line in lines) if path in SMALL else lines


@pytest.mark.parametrize("path", TUTORIALS)
def test_a_tutorial_prints_what_it_shows(path, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The library that is made of a memory's RTL takes a compiler ten seconds: it stays where other tests find it.
    if "push" not in path:
        monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "plans"))
    python, told, left_out = pages.Python(), None, []
    for block in pages.blocks(path):
        if block.kind == "text":
            assert told is None or printed(told, path) == printed(block.text, path), f"{path}:{block.line}"
            continue
        text = block.text
        for large, small in SMALL.get(path, ()):
            text = text.replace(large, small)
        told = None
        if block.kind == "python":
            imported = re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
            left_out += [name for name in imported if name in OPTIONAL and find_spec(name) is None]
            # The blocks below go on with what it makes. A block that needs a download is looked up by its names alone.
            told = None if left_out or "from_pretrained(" in text else python.paste(text)
        elif block.kind in pages.SHELL and not left_out:
            words = {line.split()[0] for line in pages.commands(block)}
            told = None if words & {*SETUP, "make", "pip", "snakemake"} else pages.shell(block, tmp_path)
    if left_out:
        pytest.skip(f"from its place on: {', '.join(left_out)} is not installed")


def test_the_profile_of_the_tutorial_is_filled_in(tmp_path):
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    found = [block for block in pages.blocks("docs/tutorials/slurm.md") if block.kind == "bash"]
    for line in [line for block in found for line in pages.commands(block) if line.startswith(("cp ", "sed "))]:
        subprocess.run(line, shell=True, cwd=tmp_path, check=True)
    filled = yaml.safe_load((tmp_path / "profiles/mine/profile.yaml").read_text())
    assert "CHANGE-ME" not in str(filled) and filled["slurm-status-command"] == "squeue"
