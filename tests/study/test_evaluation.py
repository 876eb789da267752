"""Networks on folders of images: shares that are right, all attentions, and bad input in one line."""

from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from helpers.files import entered, rows, run_script
from tilewright import networks
from tilewright.core.errors import TilewrightError
from tilewright_study import scenes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "workflow/scripts/evaluate.py"
CLASSES = {"cat": "red", "dog": "green", "owl": "blue"}
MODEL = ["--model", "regionvit-tiny-32", "--set", "num_classes=3"]


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "plans"))


@pytest.fixture
def data(tmp_path):
    """As ImageNet lies: one cat, two dogs, three owls."""
    for place, (name, colour) in enumerate(CLASSES.items()):
        (tmp_path / "data/val" / name).mkdir(parents=True)
        for number in range(1 + place):
            Image.new("RGB", (50 + number, 40), colour).save(tmp_path / "data/val" / name / f"{number}.png")
    return tmp_path / "data"


@pytest.fixture
def checkpoint(tmp_path):
    """Weights of a RegionViT of three classes that names everything a dog."""
    network = networks.create("regionvit", variant="tiny", image_size=32, num_classes=3)
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.copy_(torch.tensor([1.0, 2.0, 0.0]))
    torch.save({"model": network.state_dict()}, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


evaluate = partial(entered, SCRIPT)


def test_every_attention_names_what_the_weights_say(data, checkpoint, tmp_path, capsys):
    names = ["native", "dense", "tilewright"]
    command = [*MODEL, "--data", data, "--checkpoint", checkpoint, "--output", tmp_path / "x.csv", "--batch", 4]
    evaluate(*command, "--attention", *names)
    found, said = rows(tmp_path / "x.csv"), capsys.readouterr().out
    assert [row["attention"] for row in found] == names
    for row in found:
        assert float(row["top1"]) == pytest.approx(2 / 6) and float(row["top5"]) == 1 and float(row["same"]) == 1
        assert float(row["images_per_s"]) > 0 and (row["images"], row["weights"]) == ("6", "weights.pth")
        assert f"{row['attention']} attention: top-1 33.33%, top-5 100.00% of 6 images" in said


def test_all_of_a_networks_batchings_run_and_who_cannot_says_why(data, tmp_path, capsys):
    command = ["--model", "deit-tiny-32-evit", "--set", "num_classes=3", "--data", data, "--batch", 3]
    evaluate(*command, "--output", tmp_path / "x.csv")
    found = rows(tmp_path / "x.csv")
    assert [row["attention"] for row in found] == list(networks.exchanged("deit")[1])
    for row in found:
        assert (row["status"] == "ok") == bool(row["top1"]) == (not row["reason"])
    assert "deit-tiny-32-evit, varlen batching: skipped: " in capsys.readouterr().out
    with pytest.raises(TilewrightError, match="expected an attention that runs here, found none"):
        evaluate(*command, "--attention", "varlen")


def test_answers_are_those_of_the_network(data, tmp_path, capsys):
    network = networks.create("deit", variant="tiny", image_size=64, num_classes=3)
    source = scenes.create("folder", folder=data)
    images, labels = source.read("val", range(6), 64)
    with torch.inference_mode():
        right = (network(images).argmax(1) == labels).double().mean()
    command = ["--model", "deit-tiny-64", "--set", "num_classes=3", "--data", data, "--batch", 2]
    evaluate(*command, "--attention", "padded", "ragged", "--output", tmp_path / "x.csv")
    assert [float(row["top1"]) for row in rows(tmp_path / "x.csv")] == pytest.approx(2 * [float(right)])
    assert "weights: random, for there is no checkpoint" in capsys.readouterr().out


def test_folders_may_be_some_of_the_classes(data, checkpoint, tmp_path):
    for path in (data / "val" / "cat").iterdir():
        path.unlink()
    (data / "val" / "cat").rmdir()
    (tmp_path / "classes").write_text("cat\ndog\nowl\n")
    command = [*MODEL, "--data", data, "--checkpoint", checkpoint, "--attention", "native"]
    evaluate(*command, "--classes", tmp_path / "classes", "--output", tmp_path / "x.csv", "--count", 5)
    (row,) = rows(tmp_path / "x.csv")
    assert float(row["top1"]) == pytest.approx(2 / 5)
    with pytest.raises(TilewrightError, match="expected a folder for each of the network's 3 classes, found 2"):
        evaluate(*command)
    (tmp_path / "classes").write_text("cat\ndog\nhen\n")
    with pytest.raises(TilewrightError, match=r"expected folders that .*classes names, found owl"):
        evaluate(*command, "--classes", tmp_path / "classes")
    (tmp_path / "classes").write_text("cat\n")
    with pytest.raises(TilewrightError, match="expected 3 lines, one for each class of the network, found 1"):
        evaluate(*command, "--classes", tmp_path / "classes")


def test_damaged_images_are_named_and_left_out(data, checkpoint, tmp_path, capsys):
    command = [*MODEL, "--data", data, "--checkpoint", checkpoint, "--output", tmp_path / "x.csv", "--batch", 2]
    (data / "val/cat/0.png").write_bytes(b"no image")
    (data / "val/owl/1.png").write_bytes((data / "val/owl/1.png").read_bytes()[:60])
    evaluate(*command, "--attention", "dense", "native")
    told = capsys.readouterr().out
    assert told.count("left out: ") == 2 and "cat/0.png" in told and "owl/1.png" in told
    for row in rows(tmp_path / "x.csv"):
        assert (row["images"], row["status"]) == ("4", "ok") and float(row["top1"]) == pytest.approx(2 / 4)
    for path in (data / "val").glob("*/*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(TilewrightError, match="expected images that can be read, found none of 6"):
        evaluate(*command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "segformer-b0-64"], r"data: expected a file data\.toml or data\.json that names its classes"),
        (["--model", "vit-64"], "unknown network 'vit-64'"),
        ([*MODEL, "--attention", "magic"], "unknown attention 'magic'"),
        ([*MODEL, "--split", "rest"], "unknown split 'rest'"),
        ([*MODEL, "--dtype", "int8"], "unknown dtype 'int8'"),
        ([*MODEL, "--checkpoint", "none.pth"], "none.pth: no such file"),
        ([*MODEL, "--classes", "none.txt"], "none.txt: expected the folder's name of each class on a line"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments, message, data):
    with pytest.raises(TilewrightError, match=message):
        evaluate(*arguments, "--data", data)


def test_a_missing_folder_is_one_line(tmp_path):
    done = run_script(SCRIPT, *MODEL, "--data", tmp_path / "gone")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "gone" in done.stderr and not done.stdout
