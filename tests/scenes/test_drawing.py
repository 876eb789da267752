"""Scenes: what follows from their index, and what is drawn of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.core import images
from tilewright.core.errors import ArtifactError, PatternError, UnknownNameError
from tilewright_study.scenes import drawing, objects, pictures

PIXELS = (48, 64)


def listed(split, indices, pixels=PIXELS, seed=0):
    numbers = drawing.numbers(split, indices, seed=seed)
    return drawing.listed(split, numbers, drawing.things(split, numbers, pixels), pixels)


def naive(scene, pixels):
    """``(picture, labels, owners)`` of a scene pixel by pixel in float64, by the words of `drawing.Listed`."""
    texels = drawing.texels("cpu").numpy().view(np.uint8).reshape(-1, 4) / 255.0

    def sampled(begin, side, u, v):
        x, y, found = (u + 0.5) * side - 0.5, (v + 0.5) * side - 0.5, np.zeros(4)
        for row in (int(np.floor(y)), int(np.floor(y)) + 1):
            for column in (int(np.floor(x)), int(np.floor(x)) + 1):
                if 0 <= row < side and 0 <= column < side:
                    found += (1 - abs(x - column)) * (1 - abs(y - row)) * texels[begin + row * side + column]
        return found

    def mapped(place, x, y):
        return place[0] * (x - place[4]) + place[1] * (y - place[5]), place[2] * (x - place[4]) + place[3] * (
            y - place[5]
        )

    def mirrored(u):
        whole = np.floor(u + 0.5)
        return (u - whole) * (1 if whole % 2 == 0 else -1)

    ground, photograph = scene.grounds.astype(float), scene.photographs.tolist()
    picture, labels, owners = np.empty((3, *pixels)), np.zeros(pixels, int), np.zeros(pixels, int)
    for row, column in np.ndindex(*pixels):
        x, y = column + 0.5, row + 0.5
        u, v = mapped(ground, x, y)
        found = sampled(*photograph[:2], mirrored(u), mirrored(v))
        light = np.clip(ground[6:15].reshape(3, 3) @ found[:3], 0, 1)
        for at, (left, right, top, bottom) in enumerate(scene.windows):
            if not (left <= column < right and top <= row < bottom):
                continue
            place, shade = scene.places[at].astype(float), scene.lights[at].astype(float)
            begin, side, shadow_begin, shadow_side, label = scene.texels[at].tolist()
            shadow = sampled(shadow_begin, shadow_side, *mapped(place, x - shade[3], y - shade[4]))[3]
            u, v = mapped(place, x, y)
            found = sampled(begin, side, u, v)
            colour = np.clip(scene.colours[at].astype(float).reshape(3, 3) @ found[:3], 0, found[3])
            light = light * (1 - shade[2] * shadow) * (1 - found[3]) + colour * (1 + shade[0] * u + shade[1] * v)
            if found[3] >= 0.5:
                labels[row, column], owners[row, column] = label, at + 1
        hashed = ((row * pixels[1] + column) * 0x9E3779B1 + photograph[2]) % 2**32
        hashed = ((hashed ^ hashed >> 16) * 0x85EBCA6B) % 2**32
        hashed = ((hashed ^ hashed >> 13) * 0xC2B2AE35) % 2**32
        hashed ^= hashed >> 16
        noise = np.array([hashed >> shift & 1023 for shift in (0, 11, 22)]) / 511.5 - 1
        picture[:, row, column] = np.clip(light, 1e-6, 1) ** ground[15] + ground[16] * noise
    return np.floor(np.clip(picture, 0, 1) * 255 + 0.5), labels, owners


def test_a_scene_is_what_the_words_say():
    scenes = listed("train", [5, 8], (24, 32))
    pictures, labels = drawing.drawn(scenes, (24, 32))
    assert pictures.dtype == labels.dtype == torch.uint8
    for at in range(2):
        expected, known, owners = naive(drawing.Listed(*(array[at] for array in scenes)), (24, 32))
        # Sums in float32 may round the other way.
        assert np.abs(pictures[at].numpy() - expected).max() <= 1
        known, owners = (torch.from_numpy(x[None]).to(torch.uint8) for x in (known, owners))
        assert (drawing.outlined(known, owners)[0] != labels[at]).float().mean() < 0.01


def test_windows_hold_all_that_an_object_touches():
    scenes = listed("train", range(6))
    whole = scenes._replace(windows=np.where(scenes.windows.any(-1, keepdims=True), [0, PIXELS[1], 0, PIXELS[0]], 0))
    one = drawing.drawn(scenes, PIXELS)
    other = drawing.drawn(whole._replace(windows=whole.windows.astype(np.int32)), PIXELS)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=4), st.sampled_from(list(drawing.SPLITS)))
def test_a_scene_depends_on_its_index_alone(indices, split):
    together = drawing.drawn(listed(split, indices, (16, 16)), (16, 16))
    alone = drawing.drawn(listed(split, indices[-1:], (16, 16)), (16, 16))
    assert all(torch.equal(x[-1:], y) for x, y in zip(together, alone, strict=True))


def test_scenes_of_other_indices_splits_and_seeds_are_others():
    of = [
        ("train", [0], 0),
        ("train", [1], 0),
        ("fit", [0], 0),
        ("choice", [0], 0),
        ("train", [0], 1),
        ("test", [0], 0),
    ]
    found = [drawing.numbers(split, indices, seed=seed).objects for split, indices, seed in of]
    assert all(not np.intersect1d(one, other).size for at, one in enumerate(found) for other in found[:at])


def test_numbers_are_uniform_and_independent():
    numbers = drawing.numbers("train", range(4000))
    for found in (numbers.scene, numbers.objects.reshape(4000, -1)[:, :100]):
        # The standard error of a mean of 4,000 is 0.0046, and of 100 the largest is below four of them.
        assert np.abs(found.mean(0) - 0.5).max() < 0.02
        assert np.abs(found.std(0) - 12**-0.5).max() < 0.02
    assert np.abs(np.corrcoef(numbers.scene.T) - np.eye(16)).max() < 0.08
    assert abs(np.corrcoef(numbers.scene[:-1, 0], numbers.scene[1:, 0])[0, 1]) < 0.08


def test_scenes_hold_what_they_should():
    numbers = drawing.numbers("test", range(300))
    things = drawing.things("test", numbers, PIXELS)
    counts = things.shown.sum(1)
    assert (counts.min(), counts.max()) == drawing.COUNT
    least, most = drawing.SIZE
    assert things.sizes.min() >= least and things.sizes.max() <= most
    assert np.median(things.sizes) == pytest.approx((least * most) ** 0.5, rel=0.05)
    labels = objects.table().labels[things.kinds]
    assert np.bincount(labels.ravel(), minlength=21)[1:].min() > 0.8 * labels.size / 20


def test_splits_are_disjoint_by_object_and_photograph():
    table, whole = objects.table(), [(name, None) for name in drawing.TRAINED]
    left, right = drawing.CHOSEN, drawing.TESTED
    shown = {"train": whole, "fit": left, "choice": left, "test": right, "novel": right}
    for split, (photographs, novel) in drawing.SPLITS.items():
        kinds = drawing.things(split, drawing.numbers(split, range(200)), PIXELS).kinds
        assert (table.novel[kinds] == novel).all()
        assert photographs == shown[split]
    assert {*drawing.TRAINED, *drawing.HELD_OUT} == {*images.PHOTOGRAPHS, *pictures.GRAY}
    assert not {*drawing.TRAINED} & {*drawing.HELD_OUT} and not {*drawing.CHOSEN} & {*drawing.TESTED}


def test_halves_of_a_photograph_are_mirrored_and_share_no_pixel():
    whole, left, right = (drawing._photograph("chelsea", half) for half in (None, "left", "right"))
    middle = drawing.PHOTOGRAPH // 2
    for half in (left, right):
        assert half.shape == whole.shape and np.array_equal(half, half[..., ::-1])
    assert np.array_equal(np.concatenate((left[..., :middle], right[..., :middle]), -1), whole)


def test_objects_are_of_twenty_classes_a_fifth_of_them_novel():
    table = objects.table()
    assert len(table.classes) == 21 and table.classes[0] == "background"
    counts = np.bincount(table.labels)[1:]
    assert counts.min() >= 12 and len(table.names) == counts.sum() > 700
    novel = np.bincount(table.labels[table.novel], minlength=21)[1:] / counts
    assert (np.abs(novel - 0.2) <= 0.5 / counts + 1e-9).all()


def test_cells_are_empty_at_their_border_and_colours_at_most_opaque():
    pictures = objects.pictures()
    assert pictures.shape == (len(objects.table().names), 128, 128, 4)
    assert not pictures[:, [0, -1], :, 3].any() and not pictures[:, :, [0, -1], 3].any()
    assert (pictures[..., :3] <= pictures[..., 3:]).all()
    assert (pictures[..., 3] >= 128).mean((1, 2)).min() > 0.03


def test_a_sheet_of_another_table_is_refused(monkeypatch):
    monkeypatch.setattr(objects, "table", lambda: objects.Objects(("one",), np.ones(1, int), np.zeros(1, bool), ()))
    with pytest.raises(ArtifactError, match=r"expected \[128, 4096\] pixels for 1 objects, found \[3200, 4096\]"):
        objects.pictures()


def test_two_pixels_along_an_outline_have_no_label():
    labels = torch.zeros(1, 4, 6, dtype=torch.uint8)
    labels[:, :, 3:] = 7
    outlined = drawing.outlined(labels, (labels > 0).byte())
    assert outlined[0].tolist() == [[0, 0, 255, 255, 7, 7]] * 4


def test_a_scene_looks_the_same_at_any_size():
    small, large = (drawing.drawn(listed("train", [3], size), size)[0].float() for size in ((64, 64), (128, 128)))
    halved = torch.nn.functional.avg_pool2d(large, 2)
    assert (halved - small).abs().mean() < 0.25 * (small - small.mean()).abs().mean()


def test_negative_indices_and_unknown_splits_are_refused():
    with pytest.raises(PatternError, match=r"found \[-1\] and 0"):
        drawing.numbers("train", [-1])
    with pytest.raises(UnknownNameError, match="train, fit, choice, test, novel"):
        drawing.numbers("valid", [0])
