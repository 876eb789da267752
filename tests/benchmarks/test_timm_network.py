"""The benchmark of timm's networks: checks and ratios on a stand-in, and all of it, small, where timm is installed."""

import argparse
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.files import loaded, run_script
from tilewright.networks.vit_parts import Block
from tilewright.nn import patterns
from tilewright.nn.attention import Patterned

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/timm_network.py"


@pytest.fixture(scope="module")
def bench():
    return loaded(SCRIPT)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "plans"))


class StandIn(nn.Module):
    """What the benchmark uses of a model of timm's: one channel a patch of 16 pixels, a class token, three blocks."""

    num_prefix_tokens = 1

    def __init__(self, size):
        super().__init__()
        grid = (size // 16, size // 16)
        self.patch_embed = SimpleNamespace(grid_size=grid, img_size=(size, size))
        self.embed = nn.Conv2d(3, 32, 16, 16)
        self.cls_token = nn.Parameter(torch.ones(1, 1, 32))
        self.blocks = nn.ModuleList(Block(32, 2) for _ in range(3))
        self.attends = F.scaled_dot_product_attention

    def forward_features(self, images):
        x = self.embed(images).flatten(2).mT
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1)
        for block in self.blocks:
            x = block(
                x, lambda q, k, v: F.scaled_dot_product_attention(q, k, v) if self.dense else self.attends(q, k, v)
            )
        return x

    @property
    def dense(self):
        return self.attends is F.scaled_dot_product_attention


def sparsify(model, pattern):
    """The stand-in's, by a plan."""
    attention = Patterned(pattern, 2, 16, 1)
    model.attends = lambda q, k, v: attention.attend(q, k, v, model.patch_embed.grid_size)
    return SimpleNamespace(remove=lambda: setattr(model, "attends", F.scaled_dot_product_attention))


def asked(**changes):
    stated = {"model": None, "size": 128, "batches": None, "window": 5, "sparse": [0.5, 0.8], "dtype": torch.float32}
    stated |= {"device": "cpu", "checkpoint": None, "images": None, "no_compile": True, "tiny": False}
    return argparse.Namespace(**stated | changes)


@pytest.fixture
def standing_in(bench, monkeypatch):
    def made(name, size, given):
        torch.manual_seed(0)
        model = StandIn(size).eval().requires_grad_(False)
        bench.spread_weights(model)
        return model

    monkeypatch.setattr(bench, "EFFORT", {"min_reps": 3, "max_seconds": 0.01, "rse_target": 1.0})
    for name, found in (("made", made), ("sparsify", sparsify), ("version", lambda: "a stand-in")):
        monkeypatch.setattr(bench, name, found)
    return bench


def test_every_case_is_checked_timed_and_compared_with_the_dense_network(standing_in):
    frame = standing_in.with_ratios(pd.DataFrame(standing_in.run("speed", asked(), np.inf)))
    assert frame[["batch", "case"]].values.tolist() == [[n, case] for n in (1, 8) for case in ("dense", "window-5-g1")]
    assert (
        set(frame["status"]) == {"ok"} and (frame["error"] <= frame["tolerance"]).all() and (frame["call_us"] > 0).all()
    )
    for _, same in frame.groupby("batch"):
        dense, sparse = same["call_us"]
        assert same["ratio"].tolist() == pytest.approx([1, dense / sparse])
    assert frame["sparse"].iloc[0] == 0 and 0.5 < frame["sparse"].iloc[1] < 0.8


def test_drift_grows_with_what_is_left_out(standing_in):
    frame = pd.DataFrame(standing_in.run("drift", asked(), np.inf))
    assert frame["sparse"].is_monotonic_increasing and len(frame) == 3
    assert (
        frame["cosine_patches"].iloc[0] == pytest.approx(1) and (frame["cosine_patches"].diff().dropna() < -1e-3).all()
    )
    assert (frame["cosine_patches_p10"] <= frame["cosine_patches"]).all() and set(frame["weights"]) == {"random"}


def test_a_network_over_another_pattern_has_no_time(standing_in, monkeypatch):
    monkeypatch.setattr(standing_in, "sparsify", lambda model, pattern: sparsify(model, "window-7-g1"))
    dense, sparse = (row for row in standing_in.run("speed", asked(batches=[1]), np.inf))
    assert (dense["status"], sparse["status"]) == ("ok", "failed") and "call_us" not in sparse
    assert "from masked attention in timm's code" in sparse["reason"]


def test_what_there_is_no_time_for_is_skipped_by_name(standing_in):
    rows = list(standing_in.run("speed", asked(), -np.inf))
    assert {(row["status"], row["reason"]) for row in rows} == {("skipped", "no time left")} and len(rows) == 4


@pytest.mark.parametrize(("grid", "special"), [((8, 8), 1), ((5, 9), 5), ((64, 64), 1)])
@pytest.mark.parametrize("side", [3, 5])
def test_the_density_of_a_window_is_that_of_its_pattern(bench, grid, special, side):
    graph = patterns.graph(f"window-{side}-g{special}", grid, special)
    assert bench.window_density(grid, special, side) == pytest.approx(graph.density, abs=1e-12)


def test_windows_are_chosen_by_density(bench):
    assert bench.window_of((73, 73), 5, 0.1) == 25 and bench.window_of((73, 73), 5, 0.6) == 77
    assert bench.window_on((64, 64), 15) == 15 and bench.window_on((6, 6), 15) == 5


def test_features_are_compared_by_their_spread(bench):
    expected = torch.randn(2, 7, 5, dtype=torch.float64) + 100
    assert bench.relative_error(expected, expected) == 0
    spread = (expected - expected.mean((0, 1))).norm()
    assert bench.relative_error(expected + 0.1, expected) == pytest.approx(0.1 * 70**0.5 / float(spread))
    found = bench.drift(-expected, expected, 2)
    assert [found[name] for name in ("cosine_class", "cosine_patches")] == pytest.approx([-1, -1])


def test_files_are_normalised_images(bench, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    image.new("RGB", (40, 30), (255, 0, 128)).save(tmp_path / "x.png")
    found = bench.images([tmp_path / "x.png"], 3, (28, 42))
    assert found.shape == (3, 3, 28, 42)
    assert found[0, 0, 3, 3] == pytest.approx((1 - bench.MEAN[0]) / bench.DEVIATION[0], rel=1e-4)
    assert torch.equal(found[0], found[2]) and bench.images(None, 2, (28, 42)).shape == (2, 3, 28, 42)


def test_without_timm_it_says_so():
    if importlib.util.find_spec("timm") is not None:
        pytest.skip("timm is installed")
    done = run_script(SCRIPT, "--tiny")
    assert done.returncode == 1 and done.stderr.startswith("timm cannot be imported: ")


def test_timms_own_networks(tmp_path):
    pytest.importorskip("timm", reason="timm is not installed")
    assert run_script(SCRIPT, "--tiny", "--no-compile", "--output", tmp_path / "x.csv").returncode == 0
    frame = pd.read_csv(tmp_path / "x.csv")
    assert set(frame["status"]) == {"ok"} and set(frame["part"]) == {"speed", "drift"}
    assert (frame["error"] <= frame["tolerance"]).all() and (frame["ratio"] > 0).all()
    assert (frame.loc[frame["case"] == "dense", "ratio"] == 1).all()
