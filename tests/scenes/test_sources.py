"""Sources of images with labels: scenes, crops, streams, and files in the layouts of published data."""

import inspect

import numpy as np
import pytest
import torch
from PIL import Image

from tilewright.core.errors import ArtifactError, ConfigError, PatternError, UnknownNameError
from tilewright_study import scenes
from tilewright_study.scenes import pictures, sources
from tilewright_study.scenes.labels import voc_colours
from tilewright_study.scenes.sources import ade20k, camvid, cityscapes
from tilewright_study.scenes.sources import scenes as drawn_scenes


def write(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    lossless = {"lossless": True} if path.suffix == ".webp" else {}
    Image.fromarray(np.asarray(array, np.uint8)).save(path, **lossless)


def picture(seed, height=6, width=8):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3))


def make(name, folder):
    """A small data set in the layout of `name`; its labels are those of `expected`."""
    if name == "camvid":
        for split in ("train", "val", "test"):
            for at in range(12 if split == "val" else 2):
                write(folder / split / f"f{at}.{'webp' if at else 'png'}", picture(at))
                write(folder / f"{split}annot" / f"f{at}.png", np.arange(48).reshape(6, 8) % 12)
    elif name == "ade20k":
        for split, name in (("training", "a"), *(("validation", f"b{at}") for at in range(12))):
            write(folder / "images" / split / f"{name}.jpg", picture(0))
            write(folder / "annotations" / split / f"{name}.png", np.arange(48).reshape(6, 8) * 3)
        (folder / "objectInfo150.txt").write_text(
            "Idx\tRatio\tName\n" + "".join(f"{n}\t0\tthing{n}, other\n" for n in range(1, 151))
        )
    elif name == "cityscapes":
        for split, at in (("train", 0), *(("val", at) for at in range(12))):
            labels = folder / "gtFine" / split / "ulm" / f"ulm_{at:03}_gtFine"
            write(folder / "leftImg8bit" / split / "ulm" / f"ulm_{at:03}_leftImg8bit.png", picture(0))
            write(labels.with_name(f"{labels.name}_labelIds.png"), np.arange(48).reshape(6, 8) % 34)
            write(labels.with_name(f"{labels.name}_color.png"), picture(1))
    elif name == "voc":
        for split, count in (("train", 1), ("val", 12)):
            names = [f"2007_{split}{at}" for at in range(count)]
            for each in (*names, f"other_{split}"):
                write(folder / "JPEGImages" / f"{each}.jpg", picture(0))
                labels = Image.fromarray((np.arange(48).reshape(6, 8) % 22).astype(np.uint8), "L")
                labels = labels.point(lambda value: 255 if value == 21 else value).convert("P")
                labels.putpalette(voc_colours().tobytes())
                (folder / "SegmentationClass").mkdir(exist_ok=True)
                labels.save(folder / "SegmentationClass" / f"{each}.png")
            (folder / "ImageSets" / "Segmentation").mkdir(parents=True, exist_ok=True)
            (folder / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(names) + "\n")
    elif name == "coco_stuff":
        values = np.array([0, 1, 10, 12, 89, 91, 181, 255])
        for split, count in (("train2017", 1), ("val2017", 12)):
            for at in range(count):
                write(folder / "images" / split / f"{at:012}.jpg", picture(0))
                write(folder / "annotations" / split / f"{at:012}.png", np.tile(values, (6, 1)))
        (folder / "labels.txt").write_text("".join(f"{n}: thing{n}\n" for n in range(183)))
    elif name == "own":
        for at in range(20):
            write(folder / "images" / f"{at}.jpg", picture(at))
            write(folder / "labels" / f"{at}.png", np.arange(48).reshape(6, 8) % 3)
        (folder / "data.toml").write_text('classes = ["a", "b", "c"]')
    else:
        for split in ("train", "val"):
            for at, wnid in enumerate(("n02", "n01")):
                write(folder / split / wnid / f"{at}.png", picture(at, 20, 30))
    return folder


OPTIONS = {"scenes": {}, "crops": {}, "stream": {"frames": 8}}


@pytest.fixture(params=sources.NAMES)
def source(request, tmp_path):
    options = OPTIONS.get(request.param)
    return scenes.create(request.param, **({"folder": make(request.param, tmp_path)} if options is None else options))


def test_the_contract(source):
    assert source.task in ("maps", "classes") and len(source.splits) == len(set(source.splits)) > 0
    assert all(isinstance(name, str) for name in source.classes) and isinstance(source.classes, tuple)
    for split in source.splits:
        assert source.count(split) >= 1
        images, labels = source.read(split, [0, source.count(split) - 1], (32, 40))
        assert images.shape == (2, 3, 32, 40) and images.dtype == torch.float32 and images.isfinite().all()
        if source.task == "maps":
            assert labels.shape == (2, 32, 40) and labels.dtype == torch.uint8
            assert set(labels.unique().tolist()) <= {*range(len(source.classes)), sources.VOID}
        else:
            assert labels.shape == (2,) and labels.dtype == torch.int64
            assert labels.min() >= 0 and labels.max() < len(source.classes)
        again = source.read(split, [0], (32, 40))
        assert torch.equal(again[0], images[:1]) and torch.equal(again[1], labels[:1])


def test_what_is_not_there_is_refused(source):
    split = source.splits[-1]
    with pytest.raises(UnknownNameError, match=f"known: {', '.join(source.splits)}"):
        source.read("other", [0], 32)
    with pytest.raises(UnknownNameError):
        source.count("other")
    count = source.count(split)
    with pytest.raises(PatternError, match=f"indices from 0 to {count - 1}, found {count}"):
        source.read(split, [count], 32)
    with pytest.raises(PatternError, match="found 0"):
        source.read(split, [0], 0)


def test_images_are_normalised():
    pictures = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8)
    images = sources.normalised(pictures)
    back = images * torch.tensor(sources.DEVIATION).view(3, 1, 1) + torch.tensor(sources.MEAN).view(3, 1, 1)
    torch.testing.assert_close(back * 255, pictures.float(), atol=1e-3, rtol=0)


def test_scenes_that_a_cpu_drew_are_kept(monkeypatch):
    source = scenes.create("scenes")
    source.read("test", [1, 2], 32)
    monkeypatch.setattr(drawn_scenes.drawing, "drawn", None)
    assert source.read("test", [1, 2], 32)[0].shape == (2, 3, 32, 32)
    with pytest.raises(TypeError):
        source.read("test", [1], 32)


def test_few_scenes_are_kept(monkeypatch):
    monkeypatch.setattr(drawn_scenes, "KEPT_BYTES", 9000)
    source = scenes.create("scenes")
    for at in range(4):
        source.read("test", [at], 32)
    # 4,096 bytes each.
    assert [indices for _, indices, _ in source._kept] == [(2,), (3,)]


def test_a_crop_shows_its_object_in_the_middle():
    source, whole = scenes.create("crops"), scenes.create("scenes")
    assert source.classes == whole.classes[1:]
    _, labels = source.drawn("test", range(40), 64)
    # The label map of the same view has the class in its middle, but for objects with holes.
    found = []
    for at in range(40):
        numbers = drawn_scenes.drawing.numbers("test", [at])
        things = drawn_scenes.drawing.things("test", numbers, (64, 64))
        main = things.shown[0].sum() - 1
        found.append(drawn_scenes.objects.table().labels[things.kinds[0, main]] - 1)
    assert labels.tolist() == found
    assert len(set(found)) > 10


def test_frames_of_a_stream_follow_one_another():
    source = scenes.create("stream", frames=60)
    pictures, labels = source.drawn("test", range(60), 64)
    assert (labels > 0).float().mean((1, 2)).min() > 0.01
    apart = [(labels[at] != labels[at + step]).float().mean().item() for step in (1, 30) for at in range(0, 30, 5)]
    assert max(apart[:6]) < 0.5 * np.mean(apart[6:])
    assert torch.equal(source.drawn("test", [7], 64)[1][0], labels[7])
    other = scenes.create("stream", frames=60, index=1).drawn("test", [0], 64)[0]
    assert not torch.equal(other[0], pictures[0])


def test_shots_of_a_stream_are_of_scenes_of_their_own():
    cut = scenes.create("stream", frames=7, shots=3, index=2).drawn("test", range(7), 64)
    # The first frames of the streams that these shots are of.
    for index, frames in ((2, [0, 1, 2]), (3, [3, 4]), (4, [5, 6])):
        alone = scenes.create("stream", index=index).drawn("test", range(len(frames)), 64)
        # The noise of a frame is of its own, what is there is not.
        assert torch.equal(cut[1][frames], alone[1])
        assert (cut[0][frames].float() - alone[0].float()).abs().mean() < 0.25 * alone[0].float().std()
    assert len({tuple(map(int, labels.flatten().bincount(minlength=256))) for labels in cut[1][[0, 3, 5]]}) == 3


@pytest.mark.parametrize("shots", [0, 8])
def test_each_shot_of_a_stream_has_a_frame(shots):
    with pytest.raises(ConfigError, match=f"expected shots, each of at least one of 7 frames, found {shots}"):
        scenes.create("stream", frames=7, shots=shots)


def test_camvid_is_read_as_published(tmp_path):
    source = scenes.create("camvid", folder=make("camvid", tmp_path))
    images, labels = source.read("train", [0, 1], (6, 8))
    wanted = np.arange(48).reshape(6, 8) % 12
    assert (labels.numpy() == np.where(wanted == 11, 255, wanted)).all()
    assert torch.equal(
        images, sources.normalised(torch.from_numpy(np.stack([picture(0), picture(1)])).permute(0, 3, 1, 2))
    )
    assert len(camvid.CLASSES) == 11


def test_frames_of_camvid_are_opened_once(tmp_path):
    folder = make("camvid", tmp_path)
    source, other = (scenes.create("camvid", folder=folder) for _ in range(2))
    first, labels = source.read("train", [0, 1], (6, 8))
    # What a caller does to its own images leaves the next one's alone.
    first.zero_()
    for path in folder.rglob("*.*"):
        path.write_bytes(b"no longer there")
    again, same = source.read("train", [1, 0], (6, 8))
    assert again.abs().sum() > 0 and torch.equal(labels.flip(0), same)
    for split, size in (("train", (12, 16)), ("val", (6, 8))):
        with pytest.raises(ArtifactError, match="expected an image, found"):
            source.read(split, [0], size)
    with pytest.raises(ArtifactError, match="expected an image, found"):
        other.read("train", [0], (6, 8))


def test_ade20k_is_read_as_published(tmp_path):
    source = scenes.create("ade20k", folder=make("ade20k", tmp_path))
    _, labels = source.read("val", [0], (6, 8))
    wanted = np.arange(48).reshape(6, 8) * 3
    assert (labels[0].numpy() == np.where(wanted == 0, 255, wanted - 1)).all()
    assert source.classes[0] == "thing1" and len(source.classes) == ade20k.CLASSES
    (tmp_path / "objectInfo150.txt").unlink()
    assert scenes.create("ade20k", folder=tmp_path).classes[149] == "class 150"


def test_cityscapes_is_read_as_published(tmp_path):
    source = scenes.create("cityscapes", folder=make("cityscapes", tmp_path))
    _, labels = source.read("val", [0], (6, 8))
    known = {value: label for label, value in enumerate(cityscapes.CLASSES.values())}
    wanted = [known.get(value % 34, 255) for value in range(48)]
    assert labels.flatten().tolist() == wanted and len(source.classes) == 19


@pytest.mark.filterwarnings("ignore:.*label maps have no image")
def test_cityscapes_may_have_the_numbers_of_training(tmp_path):
    folder = make("cityscapes", tmp_path)
    wanted = scenes.create("cityscapes", folder=folder).whole("train", 0)[1]
    for path in folder.glob("gtFine/*/*/*_labelIds.png"):
        path.unlink()
        write(path.with_name(path.name.replace("labelIds", "labelTrainIds")), wanted)
    assert (scenes.create("cityscapes", folder=folder).whole("train", 0)[1] == wanted).all()


def test_voc_is_read_as_published(tmp_path):
    source = scenes.create("voc", folder=make("voc", tmp_path))
    picture, labels = source.whole("val", 3)
    wanted = np.arange(48).reshape(6, 8) % 22
    assert (labels == np.where(wanted == 21, 255, wanted)).all() and picture.shape == (6, 8, 3)
    # Those of its lists alone.
    assert (source.count("train"), source.count("val"), len(source.classes)) == (1, 12, 21)
    assert source.labels.colours[15].tolist() == [192, 128, 128]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("2007_val0\n2007_new\n", r"val\.txt: expected names of images .*, found 2007_new without image"),
        (
            "2007_val0\n2007_train0\n",
            r"val\.txt: expected each name in one list, once, found 2007_train0",
        ),
        (None, r"val\.txt: no such file; expected the names of images"),
    ],
)
def test_lists_that_do_not_fit_are_refused(change, message, tmp_path):
    folder = make("voc", tmp_path)
    path = folder / "ImageSets" / "Segmentation" / "val.txt"
    path.unlink() if change is None else path.write_text(change)
    with pytest.raises(ArtifactError, match=message):
        scenes.create("voc", folder=folder)


def test_coco_stuff_is_read_as_published(tmp_path):
    source = scenes.create("coco_stuff", folder=make("coco_stuff", tmp_path))
    assert len(source.classes) == 171 and source.classes[11] == "thing13" and source.classes[-1] == "thing182"
    # Number 12 (value 11) and ten others are none.
    assert source.whole("train", 0)[1][0].tolist() == [0, 1, 10, 11, 79, 80, 170, 255]
    write(tmp_path / "annotations" / "train2017" / f"{0:012}.png", np.full((6, 8), 11))
    with pytest.raises(ArtifactError, match=r"expected labels of 171 classes, found 11 in 48 pixels, the first"):
        source.whole("train", 0)
    (tmp_path / "labels.txt").write_text("person\n")
    with pytest.raises(ArtifactError, match=r"labels\.txt: expected lines such as '1: person' to 182"):
        scenes.create("coco_stuff", folder=tmp_path)
    (tmp_path / "labels.txt").unlink()
    assert scenes.create("coco_stuff", folder=tmp_path).classes[11] == "class 13"


@pytest.mark.parametrize("whole", [False, True], ids=["folders", "all"])
def test_camvid_in_colours_is_read_as_published(whole, tmp_path):
    colours = np.array([camvid.NOTHING, *(x for name in camvid.CLASSES for x in camvid.COLOURS[name])])
    assert len(np.unique(colours, axis=0)) == 32
    wanted = [255, *(at for at, name in enumerate(camvid.CLASSES) for _ in camvid.COLOURS[name])]
    named = [(split, f"{split}_{at}00000") for split in ("train", "val", "test") for at in range(12)]
    for split, name in named:
        images, maps = ("701_StillsRaw_full", "LabeledApproved_full") if whole else (split, f"{split}_labels")
        write(tmp_path / images / f"{name}.png", picture(0, 4, 8))
        write(tmp_path / maps / f"{name}_L.png", colours.reshape(4, 8, 3))
    source = scenes.create("camvid", folder=tmp_path)
    assert source.whole("train", 0)[1].ravel().tolist() == wanted
    splits = ("train", "fit", "choice", "test") if whole else ("train", "val", "test")
    assert sum(source.count(split) for split in splits) == 36
    changed = colours.reshape(4, 8, 3).copy()
    changed[2, 5:7] = 1, 2, 3
    write(tmp_path / maps / f"{name}_L.png", changed)
    with pytest.raises(ArtifactError, match=r"of 11 classes, found \(1, 2, 3\) in 2 pixels, .* row 2, column 5"):
        [source.whole(split, at) for split in source.splits for at in range(source.count(split))]


def test_published_validation_images_are_parted(tmp_path):
    source = scenes.create("camvid", folder=make("camvid", tmp_path))
    assert source.splits == ("train", "val", "test", "fit", "choice")
    named = {split: {source.name(split, at) for at in range(source.count(split))} for split in source.splits}
    assert named["fit"] | named["choice"] == named["val"] and not named["fit"] & named["choice"]
    assert not named["val"] & (named["train"] | named["test"])


def test_folders_are_classes(tmp_path):
    source = scenes.create("folder", folder=make("folder", tmp_path))
    assert source.classes == ("n01", "n02") and source.splits == ("train", "val")
    assert source.read("val", [0, 1], 8)[1].tolist() == [0, 1]
    flat = scenes.create("folder", folder=tmp_path / "val", crop=1.0)
    assert flat.splits == ("val",) and flat.count("val") == 2
    # The middle of the longer side, as a whole.
    images, _ = flat.read("val", [0], 20)
    wanted = torch.from_numpy(picture(1, 20, 30)[None, :, 5:25]).permute(0, 3, 1, 2)
    assert torch.equal(images, sources.normalised(wanted))


def test_labels_are_resized_to_the_nearest(tmp_path):
    source = scenes.create("camvid", folder=make("camvid", tmp_path))
    _, labels = source.read("train", [0], (12, 16))
    _, whole = source.read("train", [0], (6, 8))
    assert torch.equal(labels, whole.repeat_interleave(2, 1).repeat_interleave(2, 2))


def broken(name, tmp_path, change):
    folder = make(name, tmp_path)
    change(folder)
    scenes.create(name, folder=folder).read("train", [0], 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: [p.unlink() for p in f.glob("*annot/*")], "expected annotations .*, found no image there"),
        (lambda f: [p.unlink() for p in f.glob("train*/*")], "expected images train/{name}, found no image"),
        (lambda f: (f / "valannot" / "f1.png").unlink(), r"f1\.webp: expected its annotation .*f1, found none"),
        (lambda f: write(f / "trainannot" / "f0.png", np.full((6, 8), 12)), "labels of 11 classes, found 12"),
        (lambda f: write(f / "trainannot" / "f0.png", np.zeros((6, 7))), "expected 8x6 labels, .*found 7x6"),
        (lambda f: write(f / "trainannot" / "f0.png", picture(0)), "in 8 bits, found mode RGB"),
        (lambda f: (f / "train" / "f0.png").write_bytes(b"what"), "expected an image, found"),
    ],
    ids=["no annotations", "no training", "one missing", "label", "size", "mode", "damaged"],
)
def test_broken_folders_are_refused(change, message, tmp_path):
    with pytest.raises(ArtifactError, match=message):
        broken("camvid", tmp_path, change)


def test_options_are_checked(tmp_path):
    for name in sorted({*sources.NAMES} - {*OPTIONS}):
        with pytest.raises(ConfigError, match="expected folder="):
            scenes.create(name)
        with pytest.raises(ArtifactError, match="no such folder"):
            scenes.create(name, folder=tmp_path / "none")
        assert (
            "folder"
            in inspect.signature(sources.member(sources.__name__, "source", name, sources.NAMES).create).parameters
        )
    with pytest.raises(ConfigError, match="unknown option 'size'; known: seed"):
        scenes.create("scenes", size=3)
    with pytest.raises(ConfigError, match="seed: expected at least 0"):
        scenes.create("scenes", seed=-1)
    with pytest.raises(ConfigError, match="at least a frame"):
        scenes.create("stream", frames=0)
    with pytest.raises(ConfigError, match="crop: expected a share"):
        scenes.create("folder", folder=tmp_path, crop=0.0)
    with pytest.raises(ArtifactError, match="expected a folder for each class"):
        scenes.create("folder", folder=tmp_path)
    with pytest.raises(UnknownNameError, match="scenes, crops, stream"):
        scenes.create("coco")
    with pytest.raises(UnknownNameError, match="unknown source 'coco=x'; known: scenes"):
        sources.stated("coco=x")


# Pictures as files hold them


def gray16(folder):
    """A ramp of 16-bit gray levels, and the 8-bit levels that it shows."""
    levels = (np.arange(48).reshape(6, 8) * 1367).astype(np.uint16)
    Image.fromarray(levels).save(folder / "ramp.png")
    return folder / "ramp.png", np.round(levels / 257)


def test_gray_levels_of_16_bits_are_scaled(tmp_path):
    path, levels = gray16(tmp_path)
    assert np.abs(np.asarray(pictures.read_rgb(path)) - levels[..., None]).max() <= 1
    Image.fromarray(np.full((6, 8), 70000, np.int32)).save(tmp_path / "wide.tif")
    with pytest.raises(ArtifactError, match="expected gray levels from 0 to 65535, found 70000 to 70000"):
        pictures.read_rgb(tmp_path / "wide.tif")
    # Black, or a picture in 8 of them.
    Image.fromarray(np.full((6, 8), 255, np.int32)).save(tmp_path / "narrow.tif")
    with pytest.raises(ArtifactError, match="expected gray levels of 8 or 16 bits, found 32 bits of at most 255"):
        pictures.read_rgb(tmp_path / "narrow.tif")
    Image.fromarray(np.full((6, 8), 0.5, np.float32)).save(tmp_path / "share.tif")
    with pytest.raises(ArtifactError, match=r"expected an image of mode .*, found F"):
        pictures.read_rgb(tmp_path / "share.tif")


@pytest.mark.parametrize("suffix", [".PNG", ".Jpeg", ".tif", ".TIFF", ".gif", ".BMP", ".ppm"])
def test_an_image_is_known_by_its_ending_in_any_case(suffix, tmp_path):
    folder = make("folder", tmp_path)
    write(folder / "val" / "n01" / f"more{suffix}", picture(3, 20, 30))
    assert scenes.create("folder", folder=folder).count("val") == 3


def test_a_reader_tells_which_files_it_does_not_read(tmp_path):
    folder = make("folder", tmp_path)
    (folder / "val" / "n01" / "photo.heic").write_bytes(b"x")
    (folder / "val" / "n01" / ".hidden").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"n01: 1 of 2 files are not read as images of a class: \.heic"):
        assert scenes.create("folder", folder=folder).count("val") == 2


def test_pictures_and_labels_are_turned_as_they_are_looked_at(tmp_path):
    folder = make("camvid", tmp_path)
    turned = Image.fromarray(np.asarray(picture(5, 8, 6), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    # As a camera that was held upright stores it: the file's rows are columns of what is seen.
    turned.save(folder / "train" / "f0.png", exif=exif)
    found, _ = scenes.create("camvid", folder=folder).read("train", [0], (6, 8))
    wanted = sources.normalised(torch.from_numpy(np.rot90(np.asarray(turned), -1).copy()).permute(2, 0, 1)[None])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "options"),
    [("f0.jpg", {}), ("f0.gif", {}), ("f0.tif", {"compression": "jpeg"}), ("f0.png", {"format": "JPEG2000"})],
    ids=["jpeg", "gif", "jpeg in tiff", "jpeg 2000 named png"],
)
def test_label_maps_that_lost_values_are_refused(name, options, tmp_path):
    folder = make("camvid", tmp_path)
    (folder / "trainannot" / "f0.png").unlink()
    labels = Image.fromarray((np.arange(48).reshape(6, 8) % 12).astype(np.uint8))
    labels.save(folder / "trainannot" / name, **options)
    with pytest.raises(ArtifactError, match=f"{name}: expected a map of labels without loss"):
        scenes.create("camvid", folder=folder).read("train", [0], (6, 8))


@pytest.mark.parametrize("kind", ["train", "trainannot"])
def test_two_files_of_one_name_are_refused(kind, tmp_path):
    folder = make("camvid", tmp_path)
    write(folder / kind / "f0.tif", np.zeros((6, 8)))
    with pytest.raises(ArtifactError, match=r"f0\.tif: expected one file of this name, found f0\.png, too"):
        scenes.create("camvid", folder=folder)


def test_hidden_folders_are_not_read(tmp_path):
    for name in ("camvid", "folder"):
        folder = make(name, tmp_path / name)
        place = folder / ("train" if name == "camvid" else "train/n01") / ".checkpoints"
        write(place / "f0.png", picture(0))
        write(folder / "train" / ".hidden" / "f0.png", picture(0))
        source = scenes.create(name, folder=folder)
        assert source.count("train") == 2 and ".hidden" not in source.classes


def test_a_folder_of_validation_images_is_no_class(tmp_path):
    folder = make("folder", tmp_path)
    (folder / "val").rename(folder / "validation")
    source = scenes.create("folder", folder=folder)
    assert source.splits == ("train", "val") and source.classes == ("n01", "n02")
    (folder / "val").mkdir()
    with pytest.raises(ArtifactError, match="expected one folder of validation images"):
        scenes.create("folder", folder=folder)


@pytest.mark.parametrize("text", [b"Idx\n1\ttree\n", b"Idx\n" + b"1\t\xe9\n" * 150], ids=["short", "latin-1"])
def test_names_of_classes_that_cannot_be_read_are_refused(text, tmp_path):
    folder = make("ade20k", tmp_path)
    (folder / "objectInfo150.txt").write_bytes(text)
    with pytest.raises(ArtifactError, match=r"objectInfo150\.txt: expected"):
        scenes.create("ade20k", folder=folder)
