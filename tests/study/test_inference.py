"""Networks on a photograph: what is said, what the pictures show, and bad input in one line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from helpers.files import entered, run_script
from tilewright import networks
from tilewright.core import images
from tilewright.core.errors import ArtifactError, ConfigError, TilewrightError
from tilewright.paths import frames
from tilewright.paths.runner import Runner, facts
from tilewright.paths.table import Entry, write
from tilewright_study import inference, labelling
from tilewright_study.figures import _photograph
from tilewright_study.scenes import pictures

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "workflow/scripts/infer.py"
CLASSES = 7


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "plans"))
    monkeypatch.setattr(inference, "SECONDS", 0.01)


def infer(*arguments, attention=("--attention", "native")):
    """Run the script in this process, as the shell would."""
    entered(SCRIPT, *attention, *arguments)


@pytest.fixture
def checkpoint(tmp_path):
    """Official weights of a RegionViT with few classes, of which it prefers 3 and then 5 by far."""
    network = networks.create("regionvit", variant="tiny", image_size=32, num_classes=CLASSES)
    with torch.no_grad():
        network.head.weight.zero_()
        network.head.bias.copy_(torch.tensor([0.0, 0, 0, 8, 0, 6, 0]))
    torch.save({"model": network.state_dict()}, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


# What is said


def test_without_a_checkpoint_the_weights_are_said_to_be_random(capsys):
    infer("--model", "regionvit-tiny-32", "--image", "coffee")
    said = capsys.readouterr().out
    assert "regionvit-tiny-32, native attention, one image of 32 x 32: " in said and " ms (p50 of " in said
    assert "weights: random, for there is no checkpoint" in said and "%" not in said


def test_the_most_probable_classes_are_told_with_their_names(checkpoint, tmp_path, capsys):
    (tmp_path / "labels").write_text("\n".join(f"thing {i}" for i in range(CLASSES)))
    model = ["--model", "regionvit-tiny-32", "--image", "coffee", "--checkpoint", checkpoint, "--set", "num_classes=7"]
    infer(*model, "--labels", tmp_path / "labels")
    told = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    total = np.exp(8) + np.exp(6) + 5
    assert told[0] == [f"{np.exp(8) / total:.2%}", "3", "thing", "3"]
    assert told[1] == [f"{np.exp(6) / total:.2%}", "5", "thing", "5"]
    assert len(told) == inference.BEST
    infer(*model)
    assert f"{np.exp(8) / total:.2%}  3\n" in capsys.readouterr().out


def test_a_pruned_deit_runs_by_any_strategy_and_has_no_picture(tmp_path, capsys):
    command = ("--model", "deit-tiny-64-evit", "--image", "retina", "--attention", "ragged", "--set", "keep_ratio=0.5")
    infer(*command)
    assert "deit-tiny-64-evit, ragged batching" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="a DeiT has dense attention and no picture"):
        infer(*command, "--output", str(tmp_path / "x.png"))


@pytest.mark.parametrize("attention", ["tilewright", "dense"])
def test_attentions_are_asked_for_by_name(attention, capsys):
    infer("--model", "vil-tiny-64", "--image", "retina", "--attention", attention)
    assert f"vil-tiny-64, {attention} attention" in capsys.readouterr().out


# What the pictures show


def views(name, place=None, **options):
    family, stated = networks.parse(name, options)
    network = networks.create(family, **stated, attention="native")
    height, width = np.broadcast_to(stated["image_size"], 2)
    pixels = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0))
    return network, pixels, inference.views(family, network, pixels, place)


def test_a_longformers_token_sees_its_chunk_and_those_around_it():
    # 16 and 8 tokens a side, in chunks of 7: token (0, 15) lies in the first row of chunks, and in the third column.
    _, _, (first, second) = views("vil-tiny-64", (0, 15))
    expected = np.zeros((64, 64), bool)
    expected[: 14 * 4, 7 * 4 :] = True
    assert np.array_equal(first.seen, expected)
    assert first.token == (0, 60, 4) and first.title == "stage 1: 126 of 256 tokens and 1 global"
    # Of 8 tokens a side it is the last of the first row: in the second column of two.
    assert second.seen.all() and second.token == (0, 56, 8)


def test_a_longformers_token_sees_its_window_in_exact_mode():
    _, _, (first, _) = views("vil-tiny-96-exact")
    # The centre is token (12, 12) of 24, and sees seven tokens either way.
    expected = np.zeros((96, 96), bool)
    expected[5 * 4 : 20 * 4, 5 * 4 : 20 * 4] = True
    assert np.array_equal(first.seen, expected) and first.token == (48, 48, 4)


def test_a_longformers_picture_may_be_no_square():
    # 16 x 24 tokens; the centre is token (8, 12), and token (15, 23) the last.
    _, _, (first, _) = views("vil-tiny-64x96-exact")
    expected = np.zeros((64, 96), bool)
    expected[4:, 5 * 4 : 20 * 4] = True
    assert np.array_equal(first.seen, expected) and first.token == (32, 48, 4)
    _, _, (first, _) = views("vil-tiny-64x96-exact", (15, 23))
    expected = np.zeros((64, 96), bool)
    expected[8 * 4 :, 16 * 4 :] = True
    assert np.array_equal(first.seen, expected)
    with pytest.raises(ConfigError, match="a row and a column from 0 to 15 and 23, found"):
        views("vil-tiny-64x96-exact", (16, 0))


def test_padding_of_cyclic_chunks_is_no_part_of_the_image():
    _, _, (first, _) = views("vil-tiny-128-cyclic", (0, 0))
    # 32 tokens a side are 5 chunks of 7; the last one has 4 tokens, and around the edge it is next to the first.
    at = np.arange(32)
    near = (at < 14) | (at >= 28)
    assert np.array_equal(first.seen[::4, ::4], near[:, None] & near)


def test_a_regions_token_sees_its_window():
    # 24 tokens a side, windows of 7: the last window has 3.
    _, _, (first, *_) = views("regionvit-tiny-96", (8, 23))
    expected = np.zeros((96, 96), bool)
    expected[7 * 4 : 14 * 4, 21 * 4 :] = True
    assert np.array_equal(first.seen, expected)
    assert first.title == "stage 1: 21 of 576 tokens and 1 regional"


def test_a_regions_token_sees_its_window_in_an_image_that_is_no_square():
    # 12 rows and 24 columns of tokens: the last window has 5 rows and 3 columns.
    _, _, (first, *_) = views("regionvit-tiny-48x96", (8, 23))
    expected = np.zeros((48, 96), bool)
    expected[7 * 4 :, 21 * 4 :] = True
    # What is seen of the padding is no part of the picture.
    assert np.array_equal(first.seen, expected) and first.token == (32, 92, 4)
    with pytest.raises(ConfigError, match="from 0 to 11 and 23"):
        views("regionvit-tiny-48x96", (12, 0))


@pytest.mark.parametrize("model", ["regionvit-tiny-64x96", "vil-tiny-64x96"])
def test_a_photograph_may_be_no_square(model, tmp_path, capsys):
    infer("--model", model, "--image", "coffee", "--output", str(tmp_path / "seen.png"))
    assert "one image of 64 x 96: " in capsys.readouterr().out
    with Image.open(tmp_path / "seen.png") as drawn:
        assert drawn.width > 2 * drawn.height


def test_pixels_beyond_the_last_token_are_not_seen():
    _, _, (first, *_) = views("vil-tiny-66-exact", (15, 15))
    assert first.seen[63, 63] and not first.seen[64:].any() and not first.seen[:, 64:].any()


def test_dynamicvits_picture_is_of_the_patches_it_keeps():
    network, pixels, found = views("dynamicvit-256-64", keep_ratio=0.5)
    kept = network.kept(pixels)
    assert [view.title for view in found] == [
        f"pruning {i}: {n} of 16 patches kept" for i, n in ((1, 8), (2, 4), (3, 2))
    ]
    for view, ids in zip(found, kept, strict=True):
        by_patch = view.seen.reshape(4, 16, 4, 16).transpose(0, 2, 1, 3).reshape(16, -1)
        assert sorted(np.flatnonzero(by_patch.all(1))) == ids[0].tolist() and by_patch.any(1).sum() == len(ids[0])
        assert view.token is None


def test_what_is_not_seen_is_dimmed():
    image = np.full((3, 2, 2), 0.2, np.float32)
    shown = _photograph.picture(image, np.array([[True, False], [False, True]]))
    np.testing.assert_allclose(shown[0, 0], 0.2)
    np.testing.assert_allclose(shown[0, 1], 0.8)


@pytest.mark.parametrize("model", ["vil-tiny-64", "regionvit-tiny-64", "dynamicvit-256-64"])
def test_a_picture_is_written(model, tmp_path, capsys):
    infer("--model", model, "--image", "astronaut", "--output", tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.width > 700 and picture.height > 400
    assert "picture.png: " in capsys.readouterr().out


def test_a_deit_runs_without_a_stated_batching(capsys):
    infer("--model", "deit-tiny-32", "--image", "coffee", attention=())
    assert "deit-tiny-32, padded batching" in capsys.readouterr().out


# Bad input

VIL = "--model vil-tiny-64 --image coffee"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--model segformer-b0-64 --image coffee --token 1,1",
            "--token: expected a network that names classes, found one",
        ),
        (
            "--model vil-tiny-64 --image coffee --maps x.d",
            "a network that labels pixels, found vil-tiny-64, which names",
        ),
        ("--model vil-tiny-64 --example", "a network that labels pixels, found vil-tiny-64"),
        ("--model vil-tiny-64", "--image: expected a photograph, found none"),
        ("--image coffee", "--model: expected a network, or --checkpoint, found neither"),
        ("--model segformer-b0-64", "--image: expected a photograph, a file or a folder, or --example, found neither"),
        ("--model segformer-b0-64 --image coffee --example", "or --example, found both"),
        (
            "--model segformer-b0-64 --image coffee --fit crop",
            "--fit: expected one of stretch, aspect, slide, found 'crop'",
        ),
        ("--model segformer-b0-64 --image coffee --fit aspect --table t.csv", "expected --fit stretch or slide"),
        ("--model segformer-b0-64 --image coffee --table no.csv", "^no.csv: no such file; expected a path table"),
        ("--model segformer-b0-64 --image coffee --dtype int8", "--dtype: expected one of float32, float16, bfloat16"),
        ("--model segformer-b0-64 --image .", "expected a folder of images"),
        ("--model vit-64 --image coffee", "unknown network 'vit-64'; known: vil-"),
        ("--model vil-tiny-64 --image tea", "unknown photograph .* 'tea'; known: astronaut"),
        (f"{VIL} --attention magic", "unknown attention 'magic'"),
        (f"{VIL} --checkpoint none.pth", "none.pth: no such file"),
        (f"{VIL} --device tpu", "found 'tpu'; known: cpu, cuda"),
        (f"{VIL} --output x.gif", "x.gif: expected a name ending in .svg, .png, .pdf"),
        (f"{VIL} --token 1,2", "--token: expected --output"),
        (f"{VIL} --token 1 --output x.png", "--token 1: expected y,x, two whole numbers"),
        (f"{VIL} --token 1,16 --output x.png", r"expected a row and a column from 0 to 15, found \(1, 16\)"),
        (f"{VIL} --labels none.txt", "none.txt: expected the name of a class on each line"),
        (f"{VIL} --set position", "--set position: expected KEY=VALUE"),
        (f"{VIL} --set colour=1", "vision_longformer: .*`colour`; options: variant"),
        (
            "--model dynamicvit-256-64 --image coffee --token 1,1 --output x.png",
            "DynamicViT's picture shows the kept patches",
        ),
        ("--model regionvit-tiny-28 --image coffee --output x.png", "no stage is sparse on images of 28 pixels"),
    ],
    ids=lambda value: value.removeprefix(f"{VIL} ") if value.startswith("--model") else "",
)
def test_wrong_arguments_are_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TilewrightError, match=message):
        infer(*arguments.split())
    assert not list(tmp_path.glob("x.*"))


# Class maps


@pytest.fixture
def weights(tmp_path):
    """Of a SegFormer with five classes, as transformers' folder says them, and a record of their colours."""
    folder = tmp_path / "weights"
    folder.mkdir()
    network = networks.create("segformer", variant="b0", image_size=64, num_classes=5)
    torch.nn.init.normal_(network.decode_head.linear_pred.weight, generator=torch.Generator().manual_seed(0))
    torch.save(network.state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({"id2label": {str(at): f"thing {at}" for at in range(5)}}))
    colours = [[at, 10 * at, 255] for at in range(5)]
    record = {"classes": list("abcde"), "palette": colours}
    (tmp_path / "data.json").write_text(json.dumps(record))
    return folder


def labelled(*arguments):
    infer(*arguments, "--set", "image_size=64", attention=())


def test_a_photograph_becomes_a_class_map_of_its_size_with_a_palette(weights, tmp_path, capsys):
    maps = tmp_path / "maps"
    labelled("--checkpoint", weights, "--image", "coffee", "--maps", maps, "--data", tmp_path / "data.json")
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("pytorch_model.bin; 5 classes") and re.match(r"coffee, 400 x 600: .* ms, 11\.", said[1])
    assert re.search(r": [a-e] \d+%", said[1]) and said[2].startswith("parts of 11.11.11.11") and "network" in said[2]
    found, blend = Image.open(maps / "coffee.png"), Image.open(maps / "coffee.blend.png")
    assert (found.mode, found.size, blend.mode) == ("P", (600, 400), "RGB") and found.getpalette()[3:6] == [1, 10, 255]
    numbers, pixels = np.asarray(found), np.asarray(Image.open(images.path("coffee"))).astype(float)
    assert 1 < len(np.unique(numbers)) <= 5
    mixed = 0.5 * pixels + 0.5 * np.asarray(found.convert("RGB"))
    assert np.abs(np.asarray(blend) - mixed).max() <= 1
    assert sorted(x.name for x in maps.iterdir()) == ["coffee.blend.png", "coffee.png"]
    labelled("--checkpoint", weights, "--image", "coffee")
    assert re.search(r": thing \d \d+%", capsys.readouterr().out)


def test_a_folder_of_all_kinds_of_images_is_labelled(weights, tmp_path, capsys):
    folder, maps = tmp_path / "images", tmp_path / "maps"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    image, exif = Image.fromarray(pixels), Image.Exif()
    exif[274] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(folder / "turned.png", exif=exif)
    image.save(folder / "whole.png")
    for mode, name in (("L", "gray.png"), ("RGBA", "clear.png"), ("P", "few.png"), ("CMYK", "print.jpg")):
        image.convert(mode).save(folder / name)
    image.save(folder / "gray.jpg")
    Image.fromarray(pixels[..., 0].astype(np.uint16)).save(folder / "deep.png")
    (folder / "half.png").write_bytes((folder / "whole.png").read_bytes()[:900])
    with pytest.raises(ArtifactError, match=r"found 2 of 9 that are none: deep\.png, half\.png"):
        labelled("--checkpoint", weights, "--image", folder, "--maps", maps)
    told = capsys.readouterr()
    assert "deep.png: expected an image of 8 bits (RGB, " in told.err and "half.png: expected an image" in told.err
    names = {"turned", "whole", "clear", "few", "print", "gray.png", "gray.jpg"}
    assert {x.name for x in maps.iterdir()} == {f"{name}{end}" for name in names for end in (".png", ".blend.png")}
    assert np.array_equal(*(np.asarray(Image.open(maps / f"{name}.png")) for name in ("turned", "whole")))
    assert {Image.open(x).size for x in maps.iterdir()} == {(70, 90)}


@pytest.mark.parametrize("size", [(64, 128), (100, 130), (40, 300)], ids=str)
def test_windows_are_averaged_and_aspect_ratios_are_kept(size, weights, tmp_path, capsys):
    """By hand, with one network: the mean of windows of 64 that begin every 42 pixels, or an image of another shape."""
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    network = networks.from_checkpoint(weights, image_size=64)

    def prepared(*sides):
        return frames.images_of(torch.from_numpy(pixels)[None], torch.empty(1, 3, *sides))

    def resized(x, sides):
        return F.interpolate(x, sides, mode="bilinear", align_corners=False)

    whole = tuple(round(64 / min(size) * side) for side in size)
    image, total, seen = prepared(*whole), torch.zeros(1, 5, *whole), torch.zeros(whole)
    with torch.inference_mode():
        for top in sorted({min(at, whole[0] - 64) for at in range(0, whole[0], 42)}):
            for left in sorted({min(at, whole[1] - 64) for at in range(0, whole[1], 42)}):
                place = ..., slice(top, top + 64), slice(left, left + 64)
                total[place] += resized(network(image[place]), (64, 64))
                seen[place] += 1
        kept = tuple(round(min(64 / min(size), 256 / max(size)) * side) for side in size)
        by_hand = {"slide": total / seen, "aspect": network(prepared(*kept))}
    for fit, logits in by_hand.items():
        labelled("--checkpoint", weights, "--image", tmp_path / "image.png", "--maps", tmp_path / fit, "--fit", fit)
        found = np.asarray(Image.open(tmp_path / fit / "image.png"))
        assert (found == resized(logits, size).argmax(1)[0].numpy()).mean() > 0.999
        assert (" of 64 x 64, 42 apart" in capsys.readouterr().out) == (fit == "slide")
    assert seen.max() > 1


def test_images_of_all_sizes_have_one_network(weights, tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    for side in (70, 80, 90):
        Image.new("RGB", (side, 64)).save(tmp_path / f"images/{side}.png")
    made, own = [], labelling._network
    monkeypatch.setattr(labelling, "_network", lambda *given: made.append(own(*given)) or made[-1])
    labelled("--checkpoint", weights, "--image", tmp_path / "images", "--fit", "aspect")
    assert len(made) == 1


def test_windows_share_a_budget(weights, tmp_path, capsys, monkeypatch):
    network = networks.from_checkpoint(weights, image_size=64)
    write(tmp_path / "t.csv", rows_of(network))
    Image.new("RGB", (64, 200)).save(tmp_path / "tall.png")
    budgets = []
    own = Runner.__call__

    def called(self, images, budget_us):
        budgets.append(budget_us)
        return own(self, images, budget_us)

    monkeypatch.setattr(Runner, "__call__", called)
    # Promises are those of the table.
    monkeypatch.setattr(Runner, "rehearse", lambda self, images, count: None)
    for budget, blocks in ((1, "10.00.10.00"), (1e9, "11.11.11.11")):
        slide = ["--fit", "slide", "--table", tmp_path / "t.csv", "--budget-us", budget]
        labelled("--checkpoint", weights, "--image", tmp_path / "tall.png", *slide)
        assert f" ms, {blocks} " in capsys.readouterr().out
    assert budgets == [1 / 5] * 5 + [1e9 / 5] * 5


def rows_of(network):
    known = {"rung": "trained", "batch": 1, "macs": 1, "p50_us": 1.0, **facts(network)}
    rows = [("1.0.1.0", 0.2), ("2.2.2.2", 0.4)]
    return [Entry(path=str(network.path(x)), choice=y, promise_us=y, **known) for x, y in rows]


def test_a_budget_is_met_by_a_path_of_a_table(weights, tmp_path, capsys):
    network = networks.from_checkpoint(weights, image_size=64)
    write(tmp_path / "t.csv", rows_of(network))
    for budget, blocks in ((1, "10.00.10.00"), (1e9, "11.11.11.11")):
        labelled("--checkpoint", weights, "--image", "rocket", "--table", tmp_path / "t.csv", "--budget-us", budget)
        assert f" ms, {blocks} " in capsys.readouterr().out


def test_the_example_has_ten_photographs_that_are_there():
    found = labelling.sources_of(None, True)
    assert len(found) == 10 and all(file.is_file() for file in found.values())
    for name, photograph in pictures.EXAMPLE.items():
        assert Image.open(found[name]).size == photograph.size and photograph.licence and photograph.credit


def test_classes_of_another_record_are_refused(weights, tmp_path):
    (tmp_path / "data.json").write_text(json.dumps({"classes": ["a", "b"]}))
    with pytest.raises(ConfigError, match="--data: expected 5 classes of the network, found 2"):
        labelled("--checkpoint", weights, "--image", "coffee", "--data", tmp_path / "data.json")


def test_labels_of_other_classes_are_refused(tmp_path):
    (tmp_path / "labels").write_text("cat\ndog\n")
    with pytest.raises(ArtifactError, match="labels: expected 1000 lines, one for each class, found 2"):
        inference.read_labels(tmp_path / "labels", 1000)
    (tmp_path / "labels").write_bytes(b"\xff\xfe")
    with pytest.raises(ArtifactError, match="labels: expected the name of a class"):
        inference.read_labels(tmp_path / "labels", 1)


@pytest.mark.parametrize(("mode", "message"), [("L", "found mode L"), (None, "expected an image, found")], ids=str)
def test_an_image_that_is_not_rgb_or_not_readable_is_refused(mode, message, tmp_path):
    path = tmp_path / "image.png"
    if mode:
        Image.new(mode, (80, 80)).save(path)
    else:
        path.write_text("no image")
    with pytest.raises(ArtifactError, match=message):
        infer("--model", "vil-tiny-64", "--image", path)


def test_a_checkpoint_of_another_network_is_refused(checkpoint):
    with pytest.raises(ArtifactError, match=r"not a checkpoint of this network: .* missing"):
        infer("--model", "vil-tiny-64", "--image", "coffee", "--checkpoint", checkpoint)


def test_a_place_outside_the_grid_is_refused():
    with pytest.raises(ConfigError, match="from 0 to 15"):
        views("vil-tiny-64", (-1, 0))


def test_the_script_ends_with_one_line(tmp_path):
    done = run_script(SCRIPT, "--model", "vil-tiny-64", "--image", "gone.jpg", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown photograph (nor a file) 'gone.jpg'")
    assert done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.parametrize("key", ["attention", "batching", "checkpoint"])
def test_an_option_that_has_a_flag_is_stated_by_it(key):
    with pytest.raises(ConfigError, match=f"found {key}, which has its own flag"):
        infer("--model", "regionvit-tiny-32", "--image", "coffee", "--set", f"{key}=x")
