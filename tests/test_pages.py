"""Code in the README, how-to pages and tutorials: it runs, or what it names exists."""

import re
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml

from helpers import pages
from helpers.pages import ROOT
from tilewright import devices, nn, slices
from tilewright.attention.masks import Bias
from tilewright.pushmem import mapping
from tilewright_study.experiments.push import apps

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
# What a plan runs is the fastest here and now.
_FORM = re.compile(r"torch:\w+|\d+x\d+(?:\+\d+x\d+)*")


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
                # By itself one of these may bring a torch that the package does not take.
                assert " -e " in line or not any(name in line for name in OPTIONAL), line
            elif words[0] == "torchrun":
                assert (ROOT / words[3]).exists(), line
            else:
                # Snakemake's are planned in test_workflow_plans.py.
                assert words[0] in (*SETUP, "snakemake", "python"), line


# Smaller sizes, by what stands on a page. Of a tutorial's output the words are then compared.
# Lines on the device, and on what was chosen for it: not compared.
CHOSEN = ("order", "tensors", "work", "schedule", "other", "predicted", "runs")
WEIGHTS = ROOT / "expected/checkpoints/segformer-b0.sampled.safetensors"
SMALL = {
    "docs/tutorials/mask.md": [("side = 48", "side = 24"), ("--without flex", "--without flex --seconds 0.02")],
    "docs/tutorials/video.md": [("(12, 24, 32)", "(2, 24, 32)"), ("480p-9f", "480p-1f")],
    "docs/tutorials/reproduce.md": [("vil-tiny-128-s1", "vil-tiny-64-s1")],
    "docs/tutorials/timm.md": [("896", "140"), (", pretrained", ", depth=2, pretrained")],
    "docs/api.md": [("(4096, 4096)", "(64, 64)"), ('"window.plan"', "path")],
    "docs/dynamic.md": [
        *[("b0.safetensors", str(WEIGHTS)), ("9000", "900_000")],
        *[("(480, 640)", "(60, 80)"), ("rehearse(frames)", "rehearse(frames, 1)")],
    ],
    "docs/models.md": [("384, 6", "48, 3"), ("(64, 64)", "(8, 8)")],
    "README.md": [("224", "64"), ('"tilewright"', '"native"')],
    "docs/networks.md": [
        *[('"tilewright"', '"native"'), ("=224", "=64"), ("=512", "=64"), ('checkpoint="cached"', "image_size=64")],
        *[(', checkpoint="model_best.pth"', ""), (', checkpoint="segformer.b2.512x512.ade.160k.pth"', "")],
    ],
    "docs/scenes.md": [("b0.safetensors", str(WEIGHTS)), ("range(256)", "range(2)")],
}


def small(text, path):
    for large, smaller in SMALL.get(path, ()):
        text = text.replace(large, smaller)
    return text


def band(reach):
    at = torch.arange(64)
    return (at[:, None] - at).abs() <= reach


def of_masks(tmp_path):
    q, k, v = torch.randn(3, 2, 6, 64, 64)
    few = {name: x[:, :3, :, :32] for name, x in (("q", q), ("k", k), ("v", v))}
    yield {"pattern": band(5), "path": tmp_path / "window.plan", **few}
    yield {"window": band, "first": band(3), "second": band(4)}
    table = torch.zeros(6, 127, requires_grad=True)
    yield {"Bias": Bias, "table": table, "index": lambda rows, cols: rows - cols + 63, "q": q, "k": k, "v": v}
    yield {}


def of_paths(tmp_path):
    recorded = (ROOT / "expected/cpu-2-cores/paths.csv").read_text()
    here = devices.describe("cpu")["name"]
    (tmp_path / "table.csv").write_text(recorded.replace("Intel(R) Xeon(R) Processor", here))
    yield {"images": torch.randn(1, 3, 256, 256)}
    frames = torch.randint(0, 256, (2, 60, 80, 3), dtype=torch.uint8)
    yield {"frames": frames, "frame": frames[0]}


def of_models(_):
    block = SimpleNamespace(attn=nn.SparseAttention(48, 3, pattern="window-7-g1", grid=(8, 8)))
    yield from ("needs timm", "needs a download", {"timm_block": block, "x": torch.randn(1, 65, 48)}, "needs timm")


def of_push_programs(_):
    yield from ({}, {}, {}, {"mapped": mapping.compile(apps.program("gaussian-64"))}, "needs halide")


def of_packed_batches(_):
    keep = torch.rand(2, 50) < 0.5
    keep[:, 0] = True
    sizes = {"capacity": 100, "heads": 2, "head_dim": 32}
    yield {"keep": keep, "tokens": torch.randn(2, 50, 64), "project": torch.nn.Linear(64, 192), **sizes}


def of_slices(_):
    yield from ["runs in tests/slices/test_document.py"] * 3
    q, k, v = torch.randn(3, 1, 2, 256, 64)
    steps = {
        "slices": slices,
        "layer": 0,
        "step": 0,
        "branch": 0,
        "choose": lambda q, k: slices.predict(q, k, keep=0.5, budget=0.5),
    }
    yield {"q": q, "k": k, "v": v, **steps}


class Pipe(SimpleNamespace):
    """A stand-in for a pipeline of diffusers."""

    def __call__(self, prompt, **_):
        """A video."""
        return SimpleNamespace(frames=[prompt])


def of_videos(_):
    decoder = SimpleNamespace(set_attn_processor=lambda processor: None)
    yield "needs diffusers"
    yield {"pipe": Pipe(transformer=torch.nn.Identity(), diffusion_decoder=decoder), "latents": None}
    yield from ({}, "needs a GPU")


# What a page leaves to its readers, block by block of Python; or why only the names of a block are looked up.
GIVEN = {
    "README.md": lambda _: [{}, {}],
    "docs/api.md": of_masks,
    "docs/dynamic.md": of_paths,
    "docs/fold.md": lambda _: ["needs transformers"],
    "docs/models.md": of_models,
    "docs/neighborhood.md": lambda _: [{}, {}, {}],
    "docs/networks.md": lambda _: [{"images": torch.randn(1, 3, 64, 64)}] * 3,
    "docs/parallel.md": lambda _: ["needs processes: tests/slices and tests/networks"] * 4,
    "docs/push-programs.md": of_push_programs,
    "docs/pushmem.md": lambda _: [{}],
    "docs/ragged.md": of_packed_batches,
    "docs/scenes.md": lambda _: [{}, {}, {}],
    "docs/slices.md": of_slices,
    "docs/video.md": of_videos,
}


@pytest.fixture(autouse=True)
def own_state():
    """A page may turn gradients off, and draw."""
    with torch.enable_grad(), torch.random.fork_rng():
        yield


def test_every_page_with_python_says_what_its_readers_give():
    with_python = {path for path in PAGES if any(block.kind == "python" for block in pages.blocks(path))}
    assert {*GIVEN} == with_python - {*TUTORIALS}


@pytest.mark.parametrize("path", GIVEN)
def test_python_of_a_page_runs(path, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "plans"))
    found, names = [block for block in pages.blocks(path) if block.kind == "python"], {"torch": torch}
    for block, given in zip(found, GIVEN[path](tmp_path), strict=True):
        if isinstance(given, dict):
            names |= given
            exec(small(block.text, path), names)
    if path == "README.md":
        expected = F.scaled_dot_product_attention(names["q"], names["k"], names["v"], attn_mask=names["pattern"])
        assert torch.allclose(names["out"], expected, atol=1e-4) and len(names["logits"]) == 1


def printed(text, path):
    """Output without what differs from run to run."""
    lines = [" ".join(line.split()) for line in _DURATION.sub("#", text).strip().splitlines()]
    if path not in SMALL:
        return lines
    return sorted(_NUMBER.sub("#", _FORM.sub("#", line)) for line in lines if not line.startswith(CHOSEN))


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
        text, told = small(block.text, path), None
        if block.kind == "python":
            imported = re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
            left_out += [name for name in imported if name in OPTIONAL and find_spec(name) is None]
            # The blocks below go on with what it makes. A block that needs a download is looked up by its names alone.
            told = None if left_out or "from_pretrained(" in text else python.paste(text)
        elif block.kind in pages.SHELL and not left_out:
            words = {line.split()[0] for line in pages.commands(block)}
            told = (
                None
                if words & {*SETUP, "make", "pip", "snakemake"}
                else pages.shell(block._replace(text=text), tmp_path)
            )
    if left_out:
        pytest.skip(f"from its place on: {', '.join(left_out)} is not installed")


def test_the_profile_of_the_tutorial_is_filled_in(tmp_path):
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    found = [block for block in pages.blocks("docs/tutorials/slurm.md") if block.kind == "bash"]
    for line in [line for block in found for line in pages.commands(block) if line.startswith(("cp ", "sed "))]:
        subprocess.run(line, shell=True, cwd=tmp_path, check=True)
    filled = yaml.safe_load((tmp_path / "profiles/mine/profile.yaml").read_text())
    assert "CHANGE-ME" not in str(filled) and filled["slurm-status-command"] == "squeue"
