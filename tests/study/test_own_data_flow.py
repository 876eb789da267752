"""One's own folder through the commands: training, its weights' classes, a path table and plans."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.files import entered
from tilewright import networks
from tilewright.core.errors import TilewrightError
from tilewright.paths import table
from tilewright_study.experiments import paths as of_paths
from tilewright_study.training import segmentation

SCRIPTS = Path(__file__).parents[2] / "workflow/scripts"
CLASSES = ("dark", "light")
SMALL = {
    "alone": [], "drawn": 4, "timed": 2, "budgets": 2, "proposals": 2, "samples": 3, "solver": "exhaustive",
    "max_seconds": 0.01,
}  # fmt: skip


def command(name, *arguments):
    entered(SCRIPTS / f"{name}.py", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images whose left half is dark, of some seven sizes."""
    folder = tmp_path_factory.mktemp("own")
    for kind in ("images", "labels"):
        (folder / kind).mkdir()
    for at in range(12):
        labels = np.zeros((40 + at % 7, 60), np.uint8)
        labels[:, 30:] = 1
        noise = np.random.default_rng(at).integers(0, 60, (*labels.shape, 3))
        Image.fromarray((180 * labels[:, :, None] + noise).astype(np.uint8)).save(folder / f"images/{at}.jpg")
        Image.fromarray(labels).save(folder / f"labels/{at}.png")
    (folder / "data.toml").write_text('classes = ["dark", "light"]\npalette = [[0, 0, 0], [9, 8, 7]]')
    return folder


@pytest.fixture(scope="module")
def weights(folder):
    recipe = {"stages": [{"until": 1, "sizes": [32], "batch": 4}], "measured": 4, "rate": 2e-3, "average": 0.5}
    output = folder / "b0.safetensors"
    arguments = ["--network", "segformer-b0-32", "--data", folder, "--recipe", json.dumps(recipe), "--steps", 25]
    command("train", *arguments, "--output", output, "--scores", folder / "scores.json")
    return output


def test_a_network_learns_one_s_own_classes(folder, weights, tmp_path):
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["miou_test"] > 0.6 and set(scores["ious_test"]) == {*CLASSES}
    found = segmentation.labels_of(weights)
    assert found.classes == CLASSES and found.colours[1].tolist() == [9, 8, 7]
    network = networks.create("segformer", variant="b0", image_size=64, num_classes=2, checkpoint=weights)
    assert network.decode_head.linear_pred.out_channels == 2
    stated = ["--model", "segformer-b0-64", "--data", folder, "--checkpoint", weights]
    command("evaluate", *stated, "--output", tmp_path / "x.csv")
    assert float((tmp_path / "x.csv").read_text().splitlines()[1].split(",")[-3]) > 0.6


def test_paths_are_planned_on_one_s_own_images(folder, weights, tmp_path, capsys):
    stated = ["--network", "segformer-b0-32", "--data", folder, "--checkpoint", weights]
    small = [f"{name}={json.dumps(value)}" for name, value in SMALL.items()]
    files = ["--profile", tmp_path / "rows.csv", "--output", tmp_path / "plans.json", "--count", 2]
    command("plan_paths", *stated, *files, "--solver", "exhaustive", "--images", 3, "--set", *small)
    assert len(json.loads((tmp_path / "plans.json").read_text())["plans"]) == 2
    found = table.load(tmp_path / "rows.csv")
    assert all(entry.network == "segformer-b0-32" and 0 <= entry.test <= 1 for entry in found.rows)
    assert "images of choice" in capsys.readouterr().out
    with pytest.raises(TilewrightError, match="--data: expected --network and --checkpoint, too, found None and None"):
        command("plan_paths", "--data", folder, *files)


def test_a_study_may_name_a_folder(folder):
    row = {"network": "segformer-b0-32", "data": str(folder)}
    assert "tilewright_study.scenes.sources.own" in of_paths.modules(row, "cpu")
    assert "tilewright_study.scenes.sources.voc" in of_paths.modules(row | {"data": "voc=VOC2012"}, "cpu")
