"""A folder of one's own: label maps in each form, splits by name, and pairs that do not fit in one line."""

import json

import numpy as np
import pytest
from PIL import Image

from tilewright.core.errors import ArtifactError
from tilewright_study import scenes
from tilewright_study.scenes import sources
from tilewright_study.scenes.labels import Shares, voc_colours
from tilewright_study.scenes.sources import _files

CLASSES = ["sky", "road", "car"]
LABELS = np.array([[0, 1, 2, 255], [2, 2, 1, 0], [255, 0, 0, 1]], np.uint8)


def save(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(array))
    if options.pop("palette", False):
        image = image.convert("P")
        image.putpalette(voc_colours().tobytes())
    image.save(path, **options)


def state(folder, **fields):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.json").write_text(json.dumps({"classes": CLASSES, "seed": 1} | fields))


def picture(seed, height=3, width=4):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def values(folder, name, **options):
    save(folder / "labels" / f"{name}.png", LABELS, **options)


def sixteen(folder, name):
    save(folder / "labels" / f"{name}.png", LABELS.astype(np.uint16))


def others(folder, name):
    """Values that are not those of labels."""
    table = np.zeros(256, np.uint8)
    table[[0, 1, 2, 255]] = 10, 20, 40, 7
    save(folder / "labels" / f"{name}.png", table[LABELS])


PALETTE = [[1, 2, 3], [1, 2, 4], [200, 0, 1]]


def colours(folder, name, **options):
    table = np.zeros((256, 3), np.uint8)
    table[:3], table[255] = PALETTE, 9
    save(folder / "masks" / f"{name}_rgb.png", table[LABELS], **options)


def by_suffix(folder, name):
    """Of no class where a pixel has no label; the sky has a file where it is seen alone."""
    for label in (0, 1, 2):
        save(folder / f"{name}_{CLASSES[label]}.png", np.where(label == LABELS, 255, 0).astype(np.uint8))


def by_folder(folder, name):
    """A car hides the road that goes on below it."""
    save(folder / "labels" / "road" / f"{name}.png", LABELS > 0)
    save(folder / "labels" / "car" / f"{name}.png", LABELS == 2)


FORMS = {
    "gray": (values, {}, LABELS),
    "palette": (lambda *at: values(*at, palette=True), {}, LABELS),
    "16 bits": (sixteen, {}, LABELS),
    "tiff": (lambda f, n: save(f / "labels" / f"{n}.TIF", LABELS), {}, LABELS),
    "values": (others, {"values": [10, 20, 40], "ignore": [7]}, LABELS),
    "colours": (
        colours,
        {"labels": "masks/{name}_rgb", "pixels": "colours", "palette": PALETTE, "ignore_colours": [[9, 9, 9]]},
        LABELS,
    ),
    "suffix": (by_suffix, {"images": "{name}.jpg", "labels": "{name}_{class}"}, LABELS),
    "folders": (
        by_folder,
        {"labels": "labels/{class}/{name}.png", "background": "sky"},
        np.where(LABELS == 255, 1, LABELS),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_label_maps_are_read_in_each_form(form, tmp_path):
    write, fields, wanted = FORMS[form]
    place = tmp_path if form == "suffix" else tmp_path / "images"
    for at in range(12):
        save(place / f"a_{at}.jpg", picture(at))
        write(tmp_path, f"a_{at}")
    state(tmp_path, **fields)
    source = sources.stated(str(tmp_path))
    assert source.classes == tuple(CLASSES) and source.splits == ("train", "fit", "choice", "test")
    found, labels = source.whole("test", 0)
    assert (labels == wanted).all() and found.shape == (3, 4, 3) and found.dtype == labels.dtype == np.uint8
    _, read = source.read("test", [0], (3, 4))
    assert (read[0].numpy() == wanted).all()


def folder_of(tmp_path, names, **fields):
    for at, name in enumerate(names):
        save(tmp_path / "images" / f"{name}.png", picture(at))
        save(tmp_path / "labels" / f"{name}.png", LABELS)
    state(tmp_path, **fields)
    return tmp_path


def splits(source):
    return {split: {source.name(split, at).stem for at in range(source.count(split))} for split in source.splits}


NAMES = [f"{place}-{at}" for place in "abcdef" for at in range(10)]


def test_a_split_follows_from_the_name_and_the_seed(tmp_path):
    whole = splits(scenes.create("own", folder=folder_of(tmp_path / "all", NAMES)))
    # Each once.
    assert sorted(name for each in whole.values() for name in each) == sorted(NAMES)
    some = splits(scenes.create("own", folder=folder_of(tmp_path / "some", NAMES[::2])))
    assert all(some[split] == whole[split] & {*NAMES[::2]} for split in whole)
    state(tmp_path / "all", seed=2)
    assert splits(scenes.create("own", folder=tmp_path / "all")) != whole
    counts = np.array([len(whole[split]) for split in whole]) / len(NAMES)
    assert np.abs(counts - [Shares().train, Shares().fit, Shares().choice, Shares().test]).max() < 0.1


def test_no_split_is_empty(tmp_path):
    for seed in range(8):
        found = splits(scenes.create("own", folder=folder_of(tmp_path, NAMES[:5], seed=seed)))
        assert sorted(map(len, found.values())) == [1, 1, 1, 2]


def test_groups_and_copies_stay_in_one_split(tmp_path):
    folder = folder_of(tmp_path, NAMES, group="^.", shares={"train": 0.5, "test": 0.5, "fit": 0, "choice": 0})
    found = splits(scenes.create("own", folder=folder))
    assert found.keys() == {"train", "test"}
    assert not {name[0] for name in found["train"]} & {name[0] for name in found["test"]}
    state(folder)
    for name in NAMES[1::2]:
        save(folder / "images" / f"{name}.png", picture(0))
    with open(folder / "images" / f"{NAMES[2]}.png", "ab") as file:
        # As long as another one, with other bytes.
        file.write(b"x" * max(0, (folder / "images" / f"{NAMES[0]}.png").stat().st_size - file.tell()))
    found = splits(scenes.create("own", folder=folder))
    assert sum(bool({NAMES[0], *NAMES[1::2]} & each) for each in found.values()) == 1


@pytest.mark.parametrize("lists", [False, True])
def test_splits_may_be_folders_or_lists(lists, tmp_path):
    if lists:
        folder_of(tmp_path, NAMES, lists="{split}.txt")
        (tmp_path / "train.txt").write_text("\n".join(NAMES[:40]))
        (tmp_path / "test.txt").write_text("\n".join(NAMES[40:]))
    else:
        for kind in ("images", "labels"):
            for at, name in enumerate(NAMES):
                place = tmp_path / kind / ("training" if at < 40 else "test") / f"{name}.png"
                save(place, picture(at) if kind == "images" else LABELS)
        state(tmp_path, images="images/{split}/{name}", labels="labels/{split}/{name}")
    found = splits(scenes.create("own", folder=tmp_path))
    assert found["test"] == {*NAMES[40:]} and all(found.values())
    # What paths are fitted and chosen by is not trained with.
    assert found["train"] | found["fit"] | found["choice"] == {*NAMES[:40]}
    assert sum(map(len, found.values())) == len(NAMES)


def test_links_to_folders_are_followed_once(tmp_path):
    folder = folder_of(tmp_path / "own", NAMES[:20])
    (folder / "images").rename(tmp_path / "elsewhere")
    (folder / "images").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "elsewhere")
    assert sum(map(len, splits(scenes.create("own", folder=folder)).values())) == 20


def test_what_is_too_few_to_part_stays_whole(tmp_path):
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            save(tmp_path / kind / split / "a.png", picture(0) if kind == "images" else LABELS)
    state(tmp_path, images="images/{split}/{name}", labels="labels/{split}/{name}")
    assert splits(scenes.create("own", folder=tmp_path)) == {"train": {"a"}, "val": {"a"}}


def test_images_keep_the_ratio_of_their_sides(tmp_path):
    folder_of(tmp_path, NAMES)
    source = scenes.create("own", folder=tmp_path)
    images, labels = source.read("test", [0], (8, 8))
    # 4 x 3 pixels in the middle of 8 x 8: those beside them have no label and the mean colour.
    assert (labels[0, 1:7].numpy() == LABELS.repeat(2, 0).repeat(2, 1)).all()
    assert (labels[0, [0, 7]] == sources.VOID).all()
    assert images[0, :, [0, 7]].abs().max() < 0.02 < images[0, :, 1:7].abs().max()


def test_what_was_read_is_held_as_far_as_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "KEPT_BYTES", 100)
    source = scenes.create("own", folder=folder_of(tmp_path, NAMES[:20]))
    # 4 x 16 bytes, and 4 x 36.
    found = source.read("train", [0], 4)[0]
    source.read("train", [1], 6)
    for path in (tmp_path / "images").iterdir():
        path.unlink()
    assert source.read("train", [0], 4)[0].equal(found)
    with pytest.raises(ArtifactError, match="no such file"):
        source.read("train", [1], 6)


def damaged(change):
    def made(tmp_path):
        folder_of(tmp_path, NAMES[:20])
        change(tmp_path)
        source = scenes.create("own", folder=tmp_path)
        for split in source.splits:
            for at in range(source.count(split)):
                source.whole(split, at)

    return made


BAD = {
    "no map": (
        lambda f: (f / "labels/a-1.png").unlink(),
        r"a-1\.png: expected its annotation .*/a-1, found none",
    ),
    "sizes": (
        lambda f: save(f / "labels/a-1.png", LABELS.T),
        "expected 4x3 labels, as the image .* found 3x4",
    ),
    "range": (lambda f: save(f / "labels/a-1.png", LABELS.clip(max=3)), r"of 3 classes, found 3 in 2 pixels, .* row 0"),
    "16 bits": (
        lambda f: save(f / "labels/a-1.png", LABELS.astype(np.uint16) + 300),
        "labels in 8 bits, found the value 555",
    ),
    "rgb": (
        lambda f: save(f / "labels/a-1.png", picture(0)),
        "found mode RGB; state pixels = ",
    ),
    "lossy": (
        lambda f: ((f / "labels/a-1.png").unlink(), save(f / "labels/a-1.jpg", LABELS)),
        "map of labels without loss, such as a PNG, found JPEG",
    ),
    "palette": (
        lambda f: (
            [save(x, voc_colours()[LABELS]) for x in (f / "labels").iterdir()],
            state(f, pixels="colours", palette=PALETTE),
        ),
        r"expected colours of 3 classes, found \(0, 0, 0\) in 4 pixels, the first in row 0, column 0",
    ),
    "class": (
        lambda f: (
            [save(f / "labels" / "sky" / x.name, LABELS) for x in (f / "labels").glob("*.png")],
            [x.unlink() for x in (f / "labels").glob("*.png")],
            save(f / "labels" / "tree" / "a-1.png", LABELS),
            state(f, labels="labels/{class}/{name}"),
        ),
        r"tree/a-1\.png: expected a label map .* of a class, found another name; known: sky, road, car",
    ),
    "twice": (lambda f: save(f / "images/a-1.webp", picture(0)), "expected one file of this name, found a-1.png, too"),
    "few": (
        lambda f: state(f, group="^."),
        "expected images of at least 4 names or groups, one for each of train, fit, choice, test, found 2",
    ),
    "lists": (lambda f: state(f, lists="{split}.txt"), "expected lists {split}.txt, found none"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_is_told_in_one_line(what, tmp_path):
    change, message = BAD[what]
    with pytest.raises(ArtifactError, match=message) as told:
        damaged(change)(tmp_path)
    assert "\n" not in str(told.value)


def test_what_is_not_read_is_told(tmp_path):
    folder = folder_of(tmp_path, NAMES[:20])
    save(folder / "labels" / "more.png", LABELS)
    (folder / "images" / "photo.heic").write_bytes(b"x")
    with pytest.warns(UserWarning) as told:
        scenes.create("own", folder=folder)
    said = sorted(str(each.message) for each in told)
    assert len(said) == 2 and "1 of 21 files are not read as images: .heic" in said[0]
    assert "1 label maps have no image, such as that of more" in said[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"images": "images/*"}, "images: expected {name} once"),
        ({"labels": "{name}/{kind}"}, "labels: expected {name} once and of others only class, name, split"),
        ({"labels": "{split}/{name}"}, r"expected \{split\} in images and labels, in lists, or in none"),
        ({"pixels": "colours"}, "pixels: expected a palette"),
        ({"pixels": "bits"}, "pixels: expected one of values, colours, found 'bits'"),
        ({"values": [1, 2]}, "values: expected one for each of 3 classes, found 2"),
        ({"values": [1, 2, 2]}, "values: expected one for each of 3 classes"),
        ({"ignore": [2]}, "values: expected each of one class, or to be ignored, found 2 again"),
        ({"background": "sky"}, "background: expected a class, and {class} in labels, found 'sky'"),
        ({"group": "("}, "group: expected a regular expression"),
        ({"shares": {"train": 0.9}}, "shares: expected a sum of 1, found 1.3"),
        ({"splits": {"rest": "x"}}, "rest"),
    ],
    ids=str,
)
def test_descriptions_that_do_not_fit_are_refused(fields, message, tmp_path):
    folder_of(tmp_path, NAMES[:1], **fields)
    with pytest.raises(ArtifactError, match=message):
        scenes.create("own", folder=tmp_path)
