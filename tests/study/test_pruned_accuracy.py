"""Trained pruned networks: what they name right, what is recorded of it, and the table, figure and claims of it."""

from math import nan

import pytest
import torch
from test_figures import ROOT, configured, texts

from helpers import synthetic
from helpers.rows import whole
from helpers.threads import threads
from tilewright import networks
from tilewright.core.errors import ConfigError
from tilewright.masks import deit
from tilewright_study import experiments, figures, scenes
from tilewright_study.experiments import pruned_accuracy
from tilewright_study.experiments.pruned_accuracy import run
from tilewright_study.experiments.pruned_accuracy import table_pruned_accuracy as accuracy_table
from tilewright_study.figures import _style
from tilewright_study.measure.effort import Run
from tilewright_study.stages import train_classifier
from tilewright_study.tables import _select, claims

HOW = Run(rse=1.0, min_repetitions=3)
NAME = "deit-tiny-64"
TRAINING = {"seconds": 1, "steps": None, "predictor_seconds": 1, "predictor_steps": None, "keep_ratio": 0.5, "batch": 4}
PRUNERS = {"threshold_l2": ({"keep_ratio": 0.5},), "dynamicvit": ({"keep_ratio": 0.5},), "evit": ()}


class Crops:
    """Noise, brighter where the class is larger."""

    task, classes, splits = "classes", tuple(f"class {i}" for i in range(6)), ("train", "test", "novel")

    def count(self, split):
        return 1 << 31 if split == "train" else 10

    def read(self, split, indices, size, device="cpu"):
        labels = torch.tensor([index % 6 for index in indices])
        generator = torch.Generator().manual_seed(self.splits.index(split) + 3 * indices[0])
        images = torch.randn(len(labels), 3, size, size, generator=generator)
        return images + labels[:, None, None, None], labels


@pytest.fixture(autouse=True, scope="module")
def small():
    """DeiT-T as published, but for its width; crops of six classes."""
    with pytest.MonkeyPatch.context() as patch, threads(1):
        patch.setitem(deit.VARIANTS, "tiny", (32, 2))
        patch.setattr(scenes, "create", lambda name: Crops())
        run.crops.cache_clear()
        yield
        run.crops.cache_clear()


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    """``(weights, predictor)``: files that the command writes."""
    folder = tmp_path_factory.mktemp("weights")
    paths = folder / "x.safetensors", folder / "p.safetensors"
    stated = {"device": "cpu", "seed": 1, "seconds": None, "steps": 3, "predictor_seconds": None, "predictor_steps": 2}
    stated |= {"keep_ratio": 0.7, "batch": 4, "compiled": False, "losses": folder / "losses.csv"}
    train_classifier.run(NAME, paths[0], predictor=paths[1], **stated)
    lines = (folder / "losses.csv").read_text().splitlines()
    assert lines[0] == "part,step,loss" and [line.split(",")[0] for line in lines[1:]] == 3 * ["network"] + 2 * [
        "predictor"
    ]
    return paths


def settings(weights, predictor, **changes):
    stated = {"crops": 8, "batching": ("unpruned", "padded", "ragged"), "modes": {"eager": (4,)}, "max_seconds": 0.01}
    chosen = {"weights": str(weights), "predictor": str(predictor), "pruners": PRUNERS, **stated, **changes}
    return pruned_accuracy.Settings(**chosen)


@pytest.fixture(scope="module")
def rows(trained):
    return whole("pruned_accuracy", run.run(f"{NAME}.1", settings(*trained), HOW))


def test_every_setting_has_a_checked_row_for_each_batching(rows):
    told = [(row["pruner"], row["batching"]) for row in rows]
    batchings = ("unpruned", "padded", "ragged")
    assert told == [(pruner, name) for pruner in ("threshold_l2", "dynamicvit") for name in batchings]
    for row in rows:
        assert row["status"] == "ok" and row["images_per_s"] > 0 and row["relative_error"] <= row["tolerance"]
        # Three steps of four images, and two of a predictor's, which prunes the very network.
        assert (row["training"], row["images"]) == (1, 12)
        assert row["predictor_images"] == ("" if row["pruner"] == "threshold_l2" else 8)
        assert row["crops"] == 8 and 0 <= row["top1"] <= row["top5"] <= 1
    assert [row["kept"] for row in rows[:3]] == pytest.approx([1, 9 / 17, 9 / 17])
    # In float32 packed tokens name what padded ones do; without a pruner another network answers.
    assert [row["changed"] for row in rows[:3]] == ["", 0, 0]


def test_what_is_right_is_what_the_network_says(trained, rows):
    images, labels = run.crops("test", 8, 64, "cpu")
    novel, novel_labels = run.crops("novel", 8, 64, "cpu")
    for place, options in (
        (1, {"pruner": "threshold_l2", "keep_ratio": 0.5, "checkpoint": trained[0]}),
        (4, {"pruner": "dynamicvit", "keep_ratio": 0.5, "checkpoint": trained[1]}),
    ):
        network = networks.create("deit", variant="tiny", image_size=64, num_classes=6, **options)
        with torch.inference_mode():
            right = (network(images.float()).argmax(1) == labels).double().mean()
            right_novel = (network(novel.float()).argmax(1) == novel_labels).double().mean()
        assert rows[place]["top1"] == pytest.approx(float(right))
        assert rows[place]["novel_top1"] == pytest.approx(float(right_novel))


@pytest.mark.parametrize(("gone", "name"), [(0, "x"), (1, "p")])
def test_missing_weights_are_one_row_that_says_so(trained, tmp_path, gone, name):
    paths = [*trained]
    paths[gone] = tmp_path / f"{name}.safetensors"
    (row,) = whole("pruned_accuracy", run.run(f"{NAME}.1", settings(*paths), HOW))
    assert row["status"] == "skipped" and row["reason"] == f"no weights at {paths[gone]}"
    assert experiments.code("pruned_accuracy", [row], "cpu")


def test_a_predictor_is_not_asked_for_where_it_is_not_used(trained, tmp_path):
    own = settings(trained[0], tmp_path / "none", pruners={"threshold_l2": ({},), "dynamicvit": ()})
    assert pruned_accuracy.sources(own) == [str(trained[0])]


# The configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"networks": {"deit-tiny-64-evit": [0]}}, "networks: expected networks that are not pruned, found 'deit-tiny"),
        ({"networks": {"vil-tiny-64": [0]}}, "expected networks that are not pruned, found 'vil-tiny-64'"),
        ({"networks": {NAME: [1, 1]}}, r"pruned_accuracy.networks.deit-tiny-64: 1 appears twice"),
        ({"networks": {NAME: [-1]}}, r"pruned_accuracy.networks.deit-tiny-64: expected at least 0, found -1"),
        ({"pruners": {"none": [{}]}}, "pruned_accuracy.pruners: unknown pruner 'none'; known: threshold_l2"),
        ({"batching": ["paded"]}, "pruned_accuracy.batching: unknown batching 'paded'"),
        ({"modes": {"eager": []}}, "pruned_accuracy.modes: expected a batch for at least one mode"),
        (
            {"training": TRAINING | {"seconds": 0}},
            "training.seconds: expected a number above 0",
        ),
        (
            {"training": TRAINING | {"keep_ratio": 1.5}},
            "training.keep_ratio: expected above 0, at most 1, found 1.5",
        ),
    ],
    ids=str,
)
def test_a_wrong_section_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        configured(pruned_accuracy=changes)


def test_a_rule_trains_what_a_case_reads():
    study = configured()
    (case,) = experiments.cases("pruned_accuracy", study)
    found = experiments.sources("pruned_accuracy", study, case)
    assert found == [
        f"results/classifiers/{NAME}.0.safetensors",
        f"results/classifiers/{NAME}-dynamicvit.0.safetensors",
    ]
    words = pruned_accuracy.arguments_of_training(study, case)
    assert words[:4] == ["--network", NAME, "--seed", "0"] and "--batch" in words and "--compiled" not in words
    assert "--steps" not in words
    by_steps = configured(pruned_accuracy={"training": TRAINING | {"steps": 30, "predictor_steps": 10}})
    words = pruned_accuracy.arguments_of_training(by_steps, case)
    assert words[words.index("--steps") + 1] == "30" and words[words.index("--predictor-steps") + 1] == "10"


# What is shown


@pytest.fixture
def files(tmp_path):
    """Three trainings of a network with two pruners."""
    for training in range(3):
        made = [
            synthetic.accuracy_row("deit-tiny-224", training, pruner, "keep_ratio=0.5", batching, "graph", 256)
            for pruner in ("evit", "ats")
            for batching in ("unpruned", "padded", "ragged")
        ]
        synthetic.write_csv(tmp_path / f"{training}.csv", "pruned_accuracy", made)
    return sorted(tmp_path.glob("*.csv"))


def test_the_table_shows_means_spread_and_the_front(files):
    frame = accuracy_table.table(files).set_index(["pruner", "batching"])
    assert len(frame) == 5 and (frame["trainings"] == 3).all()
    evit, ats, plain = (frame.loc[key] for key in (("evit", "ragged"), ("ats", "ragged"), ("", "unpruned")))
    assert [evit["top1"], evit["least_top1"], evit["most_top1"]] == pytest.approx([0.88, 0.87, 0.89])
    assert evit["lost"] == pytest.approx(2) and evit["over_unpruned"] == 2 and evit["over_padded"] == pytest.approx(2.4)
    # As fast and less often right: beaten. The network that keeps all is right most often.
    assert [evit["front"], ats["front"], plain["front"]] == ["yes", "", "yes"]
    assert (evit["changed"], evit["crops"]) == (3, 3000)


def test_the_network_alone_has_the_images_of_its_training_not_of_a_predictors(tmp_path):
    made = [
        synthetic.accuracy_row("deit-tiny-224", 0, pruner, "keep_ratio=0.5", batching, "graph", 256)
        for pruner in ("evit", "dynamicvit")
        for batching in ("unpruned", "ragged")
    ]
    synthetic.write_csv(tmp_path / "0.csv", "pruned_accuracy", made)
    frame = accuracy_table.table([tmp_path / "0.csv"]).set_index(["pruner", "batching"])
    assert (frame["images"] == 5000).all()
    assert frame["predictor_images"].to_dict() == pytest.approx(
        {("", "unpruned"): nan, ("evit", "ragged"): nan, ("dynamicvit", "ragged"): 800}, nan_ok=True
    )


def test_a_training_without_a_time_leaves_no_time(files):
    rows = [
        synthetic.accuracy_row("deit-tiny-224", 0, "evit", "keep_ratio=0.5", "ragged", "graph", 256, status="failed")
    ]
    synthetic.write_csv(files[0], "pruned_accuracy", [row | {"reason": "wrong"} for row in rows])
    row = accuracy_table.table(files).set_index(["pruner", "batching"]).loc["evit", "ragged"]
    assert row["images_per_s"] != row["images_per_s"] and row["reason"] == "wrong" and row["front"] == ""


def test_the_figure_has_a_line_for_each_pruner(files):
    with _style.context():
        drawn = figures.member("pruned_accuracy").draw(files)
    assert "mean of 3 trainings" in texts(drawn)
    (axes,) = drawn.axes
    # The network that keeps all and the better pruner are on the front.
    front = axes.lines[0]
    assert [*front.get_xdata()] == [1200, 2400] and [*front.get_ydata()] == pytest.approx([90, 88])
    marks = {line.get_label(): [*line.get_ydata()] for line in axes.lines if line.get_marker() in "oD^s"}
    assert marks["EViT"] == pytest.approx([88])
    assert drawn.legends[0].get_title().get_text() == "EViT loses 2.0 points of top-1 at 2.00 times the speed"


@pytest.mark.parametrize(
    ("claim", "measured"),
    [
        ("accuracy_whole:deit-tiny-224", 90),
        ("accuracy_same:deit-tiny-224", 99.9),
        ("accuracy_over:2.5/deit-tiny-224", 2),
    ],
)
def test_claims_are_about_the_worst_training(files, tmp_path, claim, measured):
    stated = {"id": claim, "kind": "aim", "claim": "c", "relation": ">=", "expected": 1, "unit": "%"}
    synthetic.write_csv(tmp_path / "claims" / "claims.csv", ",".join(stated), [stated])
    (row,) = claims.table([tmp_path / "claims" / "claims.csv", ROOT / _select.PAPER_LATENCY, *files]).itertuples()
    assert row.measured == pytest.approx(measured) and row.verdict == "met"
