"""Networks of maps on folders of images and label maps: mean IoU as it is defined, whole and in windows, any size."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from helpers.files import entered, rows
from tilewright import networks
from tilewright.core.errors import TilewrightError
from tilewright_study import map_evaluation
from tilewright_study.scenes import sources

SCRIPT = Path(__file__).parents[2] / "workflow/scripts/evaluate.py"
SIZES = [(40, 70), (64, 48), (33, 34), (90, 50), (45, 45)]
CLASSES = ("sky", "road", "car")


@pytest.fixture
def data(tmp_path):
    """Images of several sizes, with labels of pixels that have none."""
    drawn = np.random.default_rng(0)
    for kind in ("images", "labels"):
        (tmp_path / "data" / kind).mkdir(parents=True)
    for at, size in enumerate(SIZES):
        Image.fromarray(drawn.integers(0, 256, (*size, 3), np.uint8)).save(tmp_path / f"data/images/{at}.png")
        labels = drawn.choice(np.array([0, 1, 255], np.uint8), size)
        Image.fromarray(labels).save(tmp_path / f"data/labels/{at}.png")
    (tmp_path / "data/data.toml").write_text(
        'classes = ["sky", "road", "car"]\nshares = {train = 0, fit = 0, choice = 0, test = 1}'
    )
    return tmp_path / "data"


@pytest.fixture
def network():
    made = networks.create("segformer", variant="b0", image_size=32, num_classes=3)
    torch.manual_seed(0)
    # Else one class is the largest everywhere.
    torch.nn.init.normal_(made.decode_head.linear_pred.weight)
    torch.nn.init.normal_(made.decode_head.linear_fuse["bn"].bias)
    return made


evaluate = partial(entered, SCRIPT)


def defined(source, found):
    """Confusion, IoUs and their mean by their definition. found: the labels that each image is given."""
    counts = np.zeros((3, 3), int)
    for index, labels in enumerate(found):
        truth = source.whole("test", index)[1]
        np.add.at(counts, (truth[truth < 3], labels[truth < 3]), 1)
    ious = [counts[c, c] / max(1, counts[c].sum() + counts[:, c].sum() - counts[c, c]) for c in range(3)]
    return counts, ious, np.mean([iou for iou, row in zip(ious, counts, strict=True) if row.sum()])


def resized(x, size):
    return F.interpolate(x, size, mode="bilinear", align_corners=False)


def windows(network, image, side, stride):
    """As `map_evaluation.windowed`: of each pixel the mean of the windows that see it, one after the other."""
    height, width = image.shape[2:]
    total, seen = torch.zeros(1, 3, height, width), torch.zeros(height, width)
    for top in sorted({min(at, max(0, height - side)) for at in range(0, height, stride)}):
        for left in sorted({min(at, max(0, width - side)) for at in range(0, width, stride)}):
            part = image[:, :, top : top + side, left : left + side]
            total[:, :, top : top + side, left : left + side] += resized(network(part), part.shape[2:])
            seen[top : top + side, left : left + side] += 1
    assert (seen > 0).all()
    return total / seen


@pytest.mark.parametrize("how", ["whole", "original", "windows"])
def test_it_is_what_is_defined(how, data, network, tmp_path, capsys):
    source, found = sources.stated(str(data)), []
    torch.save(network.state_dict(), tmp_path / "w.pth")
    flags = {
        "whole": [],
        "original": ["--side", "original"],
        "windows": ["--side", 48, "--window", 32, "--stride", 20, "--batch", 3],
    }[how]
    with torch.inference_mode():
        for index in range(len(SIZES)):
            picture, labels = source.whole("test", index)
            image = torch.from_numpy(picture).permute(2, 0, 1)[None].float()
            if how != "original":
                scale = (32 if how == "whole" else 48) / min(labels.shape)
                size = [round(scale * side) for side in labels.shape]
                image = F.interpolate(image, size, mode="bilinear", antialias=True)
            image = sources.normalised(image)
            maps = windows(network, image, 32, 20) if how == "windows" else network(image)
            found.append(resized(maps, labels.shape).argmax(1)[0].numpy())
    counts, ious, mean = defined(source, found)
    command = ["--model", "segformer-b0-32", "--data", data, "--checkpoint", tmp_path / "w.pth"]
    evaluate(*command, *flags, "--output", tmp_path / "x.csv")
    told = rows(tmp_path / "x.csv")
    assert [row["class"] for row in told] == list(CLASSES)
    # A pixel may fall to the other side where two logits are as large.
    assert [float(row["iou"]) for row in told] == pytest.approx(ious, abs=1e-3)
    assert float(told[0]["miou"]) == pytest.approx(mean, abs=1e-3)
    assert [int(row["pixels"]) for row in told] == counts.sum(1).tolist()
    assert float(told[0]["accuracy"]) == pytest.approx(np.trace(counts) / counts.sum(), abs=1e-3)
    assert 0.05 < mean < 0.6 and (counts.sum(0) > 0).sum() > 1
    assert f"mean IoU {float(told[0]['miou']):.2%}" in capsys.readouterr().out


def test_paths_and_few_images_are_evaluated(data, tmp_path, capsys):
    command = ["--model", "segformer-b0-32", "--data", data, "--count", 2, "--side", 64]
    evaluate(*command, "--paths", "2.2.2.2", "1.1.1.1 scale=1", "--output", tmp_path / "x.csv")
    told = rows(tmp_path / "x.csv")
    assert (
        len(told) == 6 and {row["images"] for row in told} == {"2"} and {row["weights"] for row in told} == {"random"}
    )
    assert len({row["path"] for row in told}) == 2
    assert "whole images" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "stride"), [((40, 70), 20), ((32, 64), 32), ((33, 90), 7)])
def test_logits_of_windows_are_means(size, stride, network):
    image = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = map_evaluation.windowed(network, image, (32, 32), stride, batch=4)
        # Sums of float32 in another order: sets of windows differ in size.
        torch.testing.assert_close(found, windows(network, image, 32, stride), atol=1e-4, rtol=1e-5)


def test_weights_of_other_classes_are_refused(data, tmp_path):
    other = networks.create("segformer", variant="b0", image_size=32, num_classes=5)
    torch.save(other.state_dict(), tmp_path / "w.pth")
    with pytest.raises(TilewrightError, match="--data: expected 5 classes of the network, found 3"):
        evaluate("--model", "segformer-b0-32", "--data", data, "--checkpoint", tmp_path / "w.pth")
    with pytest.raises(TilewrightError, match="not a checkpoint of this network"):
        evaluate("--model", "segformer-b1-32", "--data", data, "--checkpoint", tmp_path / "w.pth")


def test_long_images_are_four_shorter_sides_long(network):
    image = map_evaluation.image_of(network, np.zeros((64, 640, 3), np.uint8), 64)
    assert image.shape == (1, 3, 32, 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "rest"], "unknown split 'rest'; known: test"),
        (["--window", "16"], "--window: expected at least 32 pixels a side, found 16"),
        (["--stride", "16"], "--stride: expected --window, too, found none"),
        (["--window", "32", "--stride", "33"], "--stride: expected at most the 32 pixels of a window, found 33"),
        (["--classes", "x.txt"], "--classes: expected none"),
        (["--set", "num_classes=4"], "--data: expected 4 classes of the network, found 3"),
        (["--data", "scenes"], "--data: expected a folder of images and label maps, found scenes"),
        (["--data", "none"], "unknown source 'none'; known: scenes.*, a folder with data.toml"),
        (["--model", "deit-tiny-32", "--stride", "3"], "--stride: expected a network that labels pixels"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments, message, data):
    with pytest.raises(TilewrightError, match=message):
        evaluate("--model", "segformer-b0-32", "--data", data, *arguments)
