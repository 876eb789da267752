"""Training of video networks: that it learns, goes on where it stopped, and leaves what a network loads."""

import csv
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from helpers.files import run_script
from tilewright import networks
from tilewright.core import images
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.masks import wan as pattern
from tilewright_study.training import _loop, states, video

ROOT = Path(__file__).parents[2]
NAME = "wan-tiny-480p-9f"
SHORT = video.Recipe(
    stages=(
        video.Stage(steps=4, batch=2, clips=5, frames=1, height=4, width=4),
        video.Stage(steps=3, batch=1, clips=2, frames=2, height=4, width=6),
    ),
    warmup=2,
)


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setitem(pattern.VARIANTS, "tiny", pattern.Size(128, 256, 1, 2))


def create(**options):
    return networks.create_video(NAME, **options)


def moving(indices, frames, height, width, seed):
    """Stand-ins for clips: a bright spot that moves, the same in each channel but for its sign."""
    made = []
    for index in indices:
        drawn = np.random.default_rng([seed, index])
        y, x, dy, dx = drawn.uniform(0, 1, 4)
        t = np.arange(frames)[:, None, None] / max(frames, 2)
        rows, columns = np.arange(height)[:, None] / height, np.arange(width) / width
        spot = np.exp(-(((rows - y - t * (dy - y)) ** 2 + (columns - x - t * (dx - x)) ** 2) * 12))
        made.append(np.stack([spot * 3 * (-1) ** c for c in range(16)]))
    return torch.tensor(np.stack(made), dtype=torch.float32)


def test_the_loss_falls_far_below_that_of_a_constant_answer(tmp_path):
    # 144 tokens a clip.
    recipe = video.Recipe(
        stages=(video.Stage(steps=60, batch=8, clips=64, frames=3, height=16, width=12),), rate=3e-3, warmup=5
    )
    path = tmp_path / "tiny.safetensors"
    network = create()
    trained = video.train(network, moving, recipe, path)
    assert len(trained.losses) == len(trained.constant) == 60
    assert all(np.isfinite(trained.losses))
    assert np.mean(trained.losses[:5]) > 0.8 * np.mean(trained.constant[:5])
    assert np.mean(trained.losses[-10:]) < 0.3 * np.mean(trained.constant[-10:])
    # What is kept has learned, too.
    loaded = create(checkpoint=path)
    clips = moving(range(1000, 1004), 3, 16, 12, 0)
    noise = torch.randn(clips.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = loaded((clips + noise) / 2, 500.0)
    assert (found - (noise - clips)).square().mean() < 0.5 * (noise - clips).var()


def test_a_training_that_stopped_ends_as_one_that_did_not(tmp_path, monkeypatch):
    whole = video.train(create(), moving, SHORT, tmp_path / "whole.safetensors")
    assert whole.done and whole.path == tmp_path / "whole.safetensors" and len(whole.losses) == 7
    path, state = tmp_path / "parts.safetensors", tmp_path / "parts.state.safetensors"
    for stop in (2, 5):
        taken = []
        monkeypatch.setattr(_loop, "perf_counter", lambda stop=stop, taken=taken: stopping(state, stop, taken))
        # What goes on is what was written, whatever the network holds.
        stopped = video.train(create(seed=stop - 2), moving, SHORT, path, limit_s=1.0)
        assert not stopped.done and state.exists()
        assert len(stopped.losses) == stop
        # The averages so far, which say of how many steps they are.
        with safe_open(path, "pt") as file:
            assert file.metadata()["step"] == str(stop)
        assert not torch.equal(load_file(path)["head.head.weight"], load_file(whole.path)["head.head.weight"])
    monkeypatch.undo()
    monkeypatch.setitem(pattern.VARIANTS, "tiny", pattern.Size(128, 256, 1, 2))
    parts = video.train(create(seed=2), moving, SHORT, path)
    assert parts.losses == whole.losses and parts.constant == whole.constant
    one, other = load_file(whole.path), load_file(path)
    assert one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())
    assert not state.exists()


def stopping(state, stop, taken):
    """A clock that stands still until the training is at step `stop`."""
    taken.append(None)
    done = 0
    if state.exists():
        with safe_open(state, "pt") as file:
            done = int(file.metadata()["step"])
    # The first reading is that of the beginning.
    return 0.0 if len(taken) - 2 < stop - done else 10.0


def test_weights_are_averages_in_16_bits(tmp_path):
    network = create()
    video.train(network, moving, SHORT, tmp_path / "tiny.safetensors")
    saved = load_file(tmp_path / "tiny.safetensors")
    assert {x.dtype for x in saved.values()} == {torch.bfloat16}
    for name, x in network.state_dict().items():
        assert torch.equal(saved[name], x.bfloat16())
    fresh = create().state_dict()
    assert not torch.equal(fresh["blocks.0.ffn.0.weight"], network.state_dict()["blocks.0.ffn.0.weight"])


def test_weights_in_parts_are_those_in_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "PART_BYTES", 400_000)
    whole, index = tmp_path / "whole.safetensors", tmp_path / "tiny.index.json"
    video.train(create(), moving, SHORT, whole)
    trained = video.train(create(), moving, SHORT, index)
    assert trained.done and trained.path == index
    parts = sorted(tmp_path.glob("tiny-0*.safetensors"))
    assert len(parts) > 2 and parts[1].name == f"tiny-00002-of-{len(parts):05}.safetensors"
    # Only a tensor that is larger has a file above the limit, for itself.
    assert all(
        sum(x.nbytes for x in load_file(part).values()) <= 400_000 or len(load_file(part)) == 1 for part in parts
    )
    one, other = create(checkpoint=whole).state_dict(), create(checkpoint=index).state_dict()
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert json.loads(index.read_text())["metadata"]["step"] == "7"
    assert not list(tmp_path.glob("*.state.safetensors"))


def test_progress_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(_loop, "SHOWN_S", -1.0)
    lines = []
    trained = video.train(create(), moving, SHORT, tmp_path / "tiny.safetensors", show=lines.append)
    assert len(lines) == 7
    assert lines[4].startswith(f"step 5, 57 %, stage 2, loss {trained.losses[4]:.3f}, a constant's ")


def test_trained_networks_sample_clips_of_a_stage(tmp_path):
    network = create()
    found = video.samples(network, SHORT.stages[1], 2, steps=2)
    assert found.shape == (2, 16, 2, 4, 6) and found.isfinite().all()
    assert torch.equal(found, video.samples(network, SHORT.stages[1], 2, steps=2))
    assert not torch.equal(found, video.samples(network, SHORT.stages[1], 2, steps=2, seed=1))


def test_a_state_of_another_training_is_refused(tmp_path):
    path = tmp_path / "tiny.safetensors"
    assert not video.train(create(), moving, SHORT, path, limit_s=-1.0).done
    with pytest.raises(ArtifactError, match=r'tiny\.state\.safetensors: expected a training by .*"seed":1.*remove'):
        video.train(create(), moving, msgspec.structs.replace(SHORT, seed=1), path)
    with pytest.raises(ArtifactError, match="expected a training of this network"):
        video.train(wider(), moving, SHORT, path)
    with pytest.raises(ArtifactError, match="expected a training of these data, found another: means"):
        video.train(create(), lambda *asked: moving(*asked) + 1, SHORT, path)
    save_file({"x": torch.zeros(1)}, tmp_path / "tiny.state.safetensors")
    with pytest.raises(ArtifactError, match="expected video training version 1, found None"):
        video.train(create(), moving, SHORT, path)
    (tmp_path / "tiny.state.safetensors").write_bytes(b"what")
    with pytest.raises(ArtifactError, match="found a damaged one"):
        video.train(create(), moving, SHORT, path)


def wider():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pattern.VARIANTS, "tiny", pattern.Size(128, 512, 1, 2))
        return create()


def test_only_dense_attention_is_trained(tmp_path):
    with pytest.raises(ConfigError, match=r"attention: expected dense, .*found 'slices'"):
        video.train(create(attention="slices"), moving, SHORT, tmp_path / "x.safetensors")


def test_rates_rise_and_fall():
    recipe = msgspec.structs.replace(SHORT, rate=1.0, warmup=2)
    rates = [recipe.rate_at(step) for step in range(recipe.steps + 1)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[-1] == pytest.approx(0.1)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_recipes_are_read_strictly(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_bytes(msgspec.json.encode(SHORT))
    assert video.read_recipe(path) == SHORT
    for text, message in (('{"stages": []}', "at least one"), ('{"stage": 1}', "unknown field"), ("{", "recipe")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            video.read_recipe(path)
    with pytest.raises(ArtifactError, match="no such file"):
        video.read_recipe(tmp_path / "none.json")


def test_the_command_trains_on_photographs(tmp_path):
    recipe = {"stages": [{"steps": 3, "batch": 1, "clips": 1, "frames": 1, "height": 2, "width": 2}]}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    command = [ROOT / "workflow/scripts/train_video.py", "--network", "wan-tiny-480p-1f"]
    command += ["--output", "w.safetensors", "--losses", "losses.csv", "--recipe", "recipe.json", "--set", "layers=1"]
    command += ["--samples", "samples.png"]
    done = run_script(*command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 3 of 3, loss" in done.stdout and "w.safetensors: written" in done.stdout
    rows = list(csv.DictReader((tmp_path / "losses.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2", "3"] and all(float(row["loss"]) > 0 for row in rows)
    assert "blocks.0.modulation" in load_file(tmp_path / "w.safetensors")
    # A row for a clip that was drawn, and three for what was sampled, of 4 frames of 16 x 16 pixels.
    assert images.load(str(tmp_path / "samples.png"), 480).shape == (3, 480, 480)
