"""The command that makes a table of budgets."""

import json
from types import SimpleNamespace

import pytest
import torch

from tilewright import __main__ as command
from tilewright import networks, slices
from tilewright.commands import tune_slices
from tilewright.core.errors import ConfigError, PatternError
from tilewright.slices.budgets import Budgets

SMALL = ["wan-tiny-480p-5f", "--set", "layers=2", "height=192", "width=192", "--steps", "4", "--parts", "2"]


def test_a_network_is_tuned_and_reads_its_table(tmp_path, capsys):
    path = tmp_path / "budgets.json"
    assert command.main(["tune-slices", *SMALL, "--rows", "32", "--keep", "0.3", "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert all(solver in out for solver in ("single", "greedy", "highs")) and out.endswith(f"saved  {path}\n")
    made = Budgets.load(path)
    assert (made.model, made.shape, made.tokens, made.steps) == ("wan-tiny", (16, 2, 24, 24), 288, 4)
    assert (made.begins, made.layers, made.heads) == ((0, 2), 2, 3)
    rows = json.loads(path.read_text())["made_by"]["choices"]
    error = {row["solver"]: float(row["predicted error"]) for row in rows}
    assert error["highs"] <= error["greedy"] <= error["single"] and all(float(row["time"]) <= 1 for row in rows)
    steps = {"refresh": [0, 2], "first_dense": 0, "budgets": str(path)}
    sizes = {"layers": 2, "height": 192, "width": 192}
    network = networks.create_video(
        "wan-tiny-480p-5f", attention="slices", settings={"rows": 32, "steps": steps}, **sizes
    )
    kept = network.sample(steps=4).latents
    dense = network.with_attention("dense").sample(steps=4).latents
    assert 0 < (kept - dense).norm() / dense.norm() < 0.2
    with pytest.raises(PatternError, match=r"^budgets of wan-tiny: expected steps 4, found 5$"):
        network.sample(steps=5)
    with pytest.raises(PatternError, match=r"^budgets of wan-tiny: expected steps 4, found 3$"):
        network.sample(steps=3)
    with pytest.raises(PatternError, match=r"^budgets of wan-tiny: expected shape \(16, 2, 24, 24\), found "):
        network.sample(steps=4, shape=(16, 3, 24, 16))
    with pytest.raises(PatternError, match=r"^budgets of wan-tiny: expected tokens 288, found 144$"), torch.no_grad():
        network(torch.zeros(1, 16, 1, 24, 24), 500.0)
    with pytest.raises(ConfigError, match=r"^budgets: expected a table in place of budget, keep, found both$"):
        network.with_attention("slices", {"keep": 0.3, "budget": 0.3, "steps": steps})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--solver", "magic"], "unknown solver 'magic'; known: highs, gurobi, greedy, single"),
        (["--keep", "0.01"], "keep: expected a share from 0.05 to 0.6, found 0.01"),
        (["--parts", "5"], "parts: expected an integer from 1 to 4, found 5"),
        (["--set", "layers=few"], "--set: expected KEY=NUMBER, found 'layers=few'"),
    ],
)
def test_bad_input_is_one_line(changes, message, tmp_path, capsys, monkeypatch):
    path = tmp_path / "budgets.json"
    assert command.main(["tune-slices", *SMALL, *changes, "-o", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1 and not path.exists()


def test_a_network_of_diffusers_is_tuned(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    network = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=64, ffn_dim=64, num_layers=1, text_dim=32, freq_dim=32
    )
    network.save_config(tmp_path)
    stated = ["--video", "5", "192", "192", "--steps", "2", "--parts", "1", "--rows", "32"]
    path = tmp_path / "budgets.json"
    for _ in range(2):
        assert command.main(["tune-slices", str(tmp_path), *stated, "-o", str(path)]) == 0
        made = slices.Budgets.load(path)
        assert (made.model, made.tokens, made.layers, made.heads) == ("WanTransformer3DModel", 288, 1, 2)
        # Then with weights of its own.
        network.save_pretrained(tmp_path)


def test_the_transformer_of_a_pipeline_is_tuned(tmp_path, monkeypatch):
    network = networks.create_video("wan-tiny-480p-5f", layers=1, height=192, width=192)
    asked = []

    class Pipeline:
        """Stands in for a pipeline of diffusers, with two passes a step."""

        transformer = network

        def __call__(self, prompt, *, num_inference_steps, generator, **stated):
            asked.append((prompt, stated))
            noise = torch.randn(1, 16, 2, 24, 24, generator=generator)
            for step in range(num_inference_steps):
                for _ in range(2):
                    network(noise, 1000.0 - step)

        def to(self, _):
            return self

    loaded = SimpleNamespace(from_pretrained=lambda folder, torch_dtype: Pipeline())
    monkeypatch.setattr(tune_slices, "_diffusers", lambda: SimpleNamespace(DiffusionPipeline=loaded))
    (tmp_path / "model_index.json").write_text("{}")
    stated = ["--video", "5", "192", "192", "--steps", "2", "--parts", "1", "--rows", "32", "--prompt", "a cat"]
    assert command.main(["tune-slices", str(tmp_path), *stated, "-o", str(tmp_path / "budgets.json")]) == 0
    assert slices.Budgets.load(tmp_path / "budgets.json").tokens == 288
    size = {"num_frames": 5, "height": 192, "width": 192, "output_type": "latent"}
    assert asked == [("a cat", size)] * 2
