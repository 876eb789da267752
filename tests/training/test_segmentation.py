"""SegFormer learns scenes; a training that is resumed ends with the weights of an unbroken one."""

import csv
import functools
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from helpers.files import run_script
from tilewright import networks
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.networks import map_operators, segformer
from tilewright_study import scenes, training
from tilewright_study.training import evaluation, segmentation, states, statistics
from tilewright_study.training.segmentation import Paths, Recipe, Stage

ROOT = Path(__file__).parents[2]
SHORT = Recipe(
    stages=(Stage(until=0.5, sizes=(32,), batch=3), Stage(until=1.0, sizes=(40, (32, 48)), batch=2)),
    average=0.9,
    measured=4,
    steps=6,
)
BESIDE = Paths(count=1, scales=(1.0,))


class Blobs:
    """A source whose label follows from the colour: discs of a class on a ground without one."""

    classes, task, splits = ("ground", "red", "green"), "maps", ("train", "test")

    def __init__(self, count=1 << 31):
        self._count = count

    def count(self, split):
        return self._count

    def read(self, split, indices, size, device="cpu"):
        height, width = (size, size) if isinstance(size, int) else size
        y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
        images, labels = torch.zeros(len(indices), 3, height, width), torch.zeros(len(indices), height, width)
        for at, index in enumerate(indices):
            drawn = np.random.default_rng([index, self.splits.index(split)])
            middle, label = drawn.uniform(-0.6, 0.6, 2), drawn.integers(1, 3)
            inside = (x - middle[0]).square() + (y - middle[1]).square() < 0.3
            images[at, label - 1][inside] = 2.0
            labels[at][inside] = float(label)
        labels[:, 0] = 255
        return images.to(device), labels.to(device, torch.uint8)


def create(classes=3, size=32, seed=0, **options):
    return networks.create("segformer", variant="b0", image_size=size, num_classes=classes, seed=seed, **options)


def test_b0_learns_scenes(tmp_path):
    recipe = Recipe(stages=(Stage(until=1.0, sizes=(64,), batch=4),), steps=30, average=0.9, measured=8)
    network = create(classes=21, size=64)
    trained = segmentation.train(network, scenes.create("scenes"), recipe, tmp_path / "b0.safetensors")
    losses = trained.log["loss"]
    assert trained.done and len(losses) == 30 and trained.images == 120
    assert np.mean(losses[-6:]) < 0.6 * np.mean(losses[:3])
    # Written is what the network is left with: half precision in matrices.
    saved = load_file(tmp_path / "b0.safetensors")
    for name, x in network.state_dict().items():
        assert saved[name].dtype == (torch.float16 if x.ndim > 1 else x.dtype)
        assert torch.equal(saved[name], x.to(saved[name].dtype))
    assert sum(x.nbytes for x in saved.values()) < 8e6
    assert not network.training and not list(tmp_path.glob("*.state.*"))


@pytest.mark.parametrize("paths", [BESIDE, pytest.param(None, marks=pytest.mark.slow)], ids=["beside", "alone"])
def test_a_resumed_training_is_an_unbroken_one(tmp_path, paths):
    recipe = msgspec.structs.replace(SHORT, paths=paths) if paths else SHORT
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    segmentation.train(create(), Blobs(), recipe, whole)
    calls = 0
    while not (trained := segmentation.train(create(), Blobs(), recipe, parts, limit_s=0.05)).done:
        calls += 1
        assert trained.path == parts and calls < 99
    assert calls >= 1
    one, other = load_file(whole), load_file(parts)
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    again = tmp_path / "again.safetensors"
    segmentation.train(create(seed=1), Blobs(), recipe, again)
    assert not torch.equal(load_file(again)["backbone.norm1.weight"], one["backbone.norm1.weight"])


def test_paths_learn_from_the_full_one(tmp_path):
    recipe = msgspec.structs.replace(SHORT, steps=24, rate=2e-3, paths=BESIDE)
    trained = segmentation.train(create(), Blobs(), recipe, tmp_path / "x.safetensors")
    assert min(trained.log["paths"]) > 0
    assert np.mean(trained.log["loss"][-4:]) < 0.8 * np.mean(trained.log["loss"][:4])
    plain = segmentation.train(create(), Blobs(), SHORT, tmp_path / "y.safetensors")
    assert not any(plain.log["paths"])


def test_paths_may_begin_later(tmp_path):
    beside = msgspec.structs.replace(BESIDE, begin=0.5)
    recipe = msgspec.structs.replace(SHORT, steps=8, paths=beside)
    log = segmentation.train(create(), Blobs(), recipe, tmp_path / "x.safetensors").log
    assert not any(log["paths"][:4]) and min(log["paths"][4:]) > 0


def test_half_of_the_random_paths_keep_all_blocks_of_smaller_images():
    network = networks.create("segformer", variant="b2", image_size=64, num_classes=3)
    recipe = msgspec.structs.replace(SHORT, paths=Paths(count=400, keep=(0.4, 0.6)))
    first, *others = segmentation._Step(network, Blobs(), recipe, False)._paths(np.random.default_rng(0))
    assert str(first).startswith("110.1100.111000.110 levels=1234 scale=0.5 ")
    whole = [path for path in others if path.blocks == network.path().blocks]
    assert 160 < len(whole) < 240 and {path.scale for path in whole} == {0.5, 0.625, 0.75}
    kept = [np.mean([int(bit) for stage in path.blocks for bit in stage]) for path in others if path not in whole]
    assert 0.45 < np.mean(kept) < 0.55 and {path.scale for path in others} == {0.5, 0.625, 0.75, 1.0}


class Called:
    """Stands in for `_graphs.Graphs` where there is no GPU: it calls what they record. names: of the paths, in turn."""

    def __init__(self):
        self.names = []

    def __call__(self, key, function, *inputs):
        self.names.append(key[0])
        loss, *others = function(*(x.clone() for x in inputs))
        loss.backward()
        return loss.detach(), *others


def gradients(monkeypatch, recipe, lowered, compiled, graphs=None):
    """Losses of a step, gradients of the weights by name, and graphs that were compiled."""
    # What is dropped would differ.
    monkeypatch.setattr(segformer, "DROPOUT", 0.0)
    network = create(size=64).train()
    network.set_drop_path(0.0)
    step = segmentation._Step(network, Blobs(), recipe, compiled)
    step.lowered, step.graphs = lowered, graphs
    if graphs is not None:
        step.recorded = step._repeated()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with step.reader, step.parts_compiled():
        if compiled:
            step.warm()
        warmed = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found = [step(at, 0.1) for at in range(3)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == warmed
    assert not any("forward" in vars(module) for module in network.modules())
    return found, {name: x.grad for name, x in network.named_parameters()}, warmed


@pytest.mark.slow
def test_paths_share_weights_and_what_is_compiled(monkeypatch):
    """However a step is taken, its gradients are the same."""
    stage = Stage(until=1.0, sizes=(64,), batch=2)
    beside = Paths(count=2, scales=(1.0, 0.5), levels=("1234", "123"))
    recipe = msgspec.structs.replace(SHORT, stages=(stage,), paths=beside)
    losses, expected, _ = gradients(monkeypatch, recipe, False, False)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for lowered, compiled, graphs in ((True, False, None), (True, True, Called())):
        found, others, made = gradients(monkeypatch, recipe, lowered, compiled, graphs)
        torch.testing.assert_close(found, losses)
        torch.testing.assert_close(others, expected, atol=1e-6, rtol=1e-4)
        # The whole path; of two scales a block of each stage, and the decoder of two sets of levels.
        # In float32 graphs take the weights themselves, which torch tells from tensors: the smaller scale is made anew.
        assert made == compiled * (1 + 2 * 4 + 2 * 2) + (4 + 2) * (graphs is not None)
    # The full path, the smallest one, and of two levels that with all blocks of smaller images; then those of steps.
    assert graphs.names[:4] == ["", *dict.fromkeys(graphs.names[1:4])] and len(graphs.names) > 4 + 3 * 2
    assert set(graphs.names) == set(graphs.names[:4])


def test_time_ends_a_training(tmp_path):
    recipe = msgspec.structs.replace(SHORT, steps=None, minutes=1 / 60)
    lines = []
    trained = segmentation.train(create(), Blobs(), recipe, tmp_path / "x.safetensors", show=lines.append)
    assert trained.done and trained.seconds >= 1 and not lines


def test_time_that_was_taken_counts_when_it_goes_on(tmp_path):
    recipe = msgspec.structs.replace(SHORT, steps=None, minutes=10.0)
    path = tmp_path / "x.safetensors"
    one = segmentation.train(create(), Blobs(), recipe, path, limit_s=0.5)
    other = segmentation.train(create(), Blobs(), recipe, path, limit_s=0.5)
    assert not one.done and not other.done and other.seconds > one.seconds > 0
    assert len(other.log["loss"]) > len(one.log["loss"])


def test_a_finite_split_is_shuffled_and_augmented(tmp_path):
    few = Blobs(count=5)
    assert sorted(segmentation.chosen(5, 0, 5, 0)) == [0, 1, 2, 3, 4]
    assert segmentation.chosen(5, 0, 5, 0) != segmentation.chosen(5, 1, 5, 0)
    assert set(segmentation.chosen(5, 0, 9, 0)) <= {*range(5)}
    assert segmentation.train(create(), few, SHORT, tmp_path / "x.safetensors").done
    images, labels = few.read("train", range(12), 32)
    one = segmentation.augmented(images, labels, np.random.default_rng(0))
    other = segmentation.augmented(images, labels, np.random.default_rng(0))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    moved, kept = one
    assert moved.shape == images.shape and kept.dtype == torch.uint8
    assert set(kept.unique().tolist()) <= {0, 1, 2, 255} and not torch.equal(kept, labels)
    # Labels move with their pixels.
    for label in (1, 2):
        assert moved[:, label - 1][kept == label].mean() > 1.5


def test_images_that_never_end_are_seen_once():
    seen = [index for step in range(5) for index in segmentation.chosen(1 << 31, step, 7, 0)]
    assert len(set(seen)) == 35


def test_losses_are_those_of_all_pixels():
    """Phases of rows and columns together make the loss of the whole map."""
    network = create().train()
    images, labels = Blobs().read("train", [0, 1], 32)
    step = segmentation._Step(network, Blobs(), SHORT, False)
    maps = torch.randn(2, 3, 8, 8, requires_grad=True)
    step._maps = lambda images: maps

    class Phase:
        def __init__(self, *phases):
            self.phases = iter(phases)

        def integers(self, _):
            return next(self.phases)

    parts = [step._loss(images, labels, Phase(i, j))[0] for i in (0, 1) for j in (0, 1)]
    counts = [(labels[:, i::2, j::2] < 255).sum() for i in (0, 1) for j in (0, 1)]
    whole = torch.nn.functional.cross_entropy(map_operators.resized(maps, (32, 32)), labels.long(), ignore_index=255)
    found = sum(part * count for part, count in zip(parts, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(found, whole.detach())


def test_spread_maps_are_resized_ones():
    maps = torch.randn(2, 5, 6, 7, dtype=torch.float64)
    rows, columns = (map_operators.interpolation(*sides, torch.float64, maps.device) for sides in ((6, 13), (7, 28)))
    torch.testing.assert_close(
        map_operators.spread(maps, rows, columns), map_operators.resized(maps, (13, 28)), atol=1e-12, rtol=0
    )


def test_weights_go_on_with_other_classes(tmp_path):
    path = tmp_path / "x.safetensors"
    segmentation.train(create(), Blobs(), msgspec.structs.replace(SHORT, steps=1), path)
    kept = load_file(path)
    network = create(classes=5, seed=3)
    head = network.decode_head.linear_pred.weight.clone()
    segmentation.start(network, path)
    assert torch.equal(network.decode_head.linear_pred.weight, head)
    assert torch.equal(network.backbone.norm1.weight, kept["backbone.norm1.weight"])
    same = create(seed=4)
    segmentation.start(same, path)
    assert torch.equal(same.decode_head.linear_pred.weight.half(), kept["decode_head.linear_pred.weight"])


def test_dropped_branches_are_those_of_whole_images():
    network = create().train()
    network.set_drop_path(0.5)
    blocks = [module for module in network.modules() if hasattr(module, "drop_path")]
    assert [block.drop_path for block in blocks] == pytest.approx([0.5 * at / 7 for at in range(8)])
    torch.manual_seed(0)
    x = torch.ones(4000, 2, 3)
    kept = blocks[-1]._added(0, x, torch.nn.Identity())
    assert set(kept.unique().tolist()) == {0.0, 2.0} and (kept == kept[:, :1, :1]).all()
    assert kept.mean().item() == pytest.approx(1, abs=0.05)
    network.eval()
    x, layer = torch.randn(5, 2, blocks[-1].attn.proj.in_features), blocks[-1].attn.proj
    torch.testing.assert_close(blocks[-1]._added(x, x, layer), x + layer(x))


def test_statistics_are_those_of_the_decoders_sum():
    network, source = create(), Blobs()
    path = network.path("1.2.1.2 levels=124")
    found = statistics.measured(network, source, "train", range(5), path=path, batch=2)
    images, _ = source.read("train", range(5), 32)
    maps = network.backbone(images, path)
    head = network.decode_head.train()
    total = sum(
        map_operators.resized(map_operators.product(maps[int(level) - 1], weight), (8, 8))
        for level, weight in zip(path.levels, head.fold(path.levels).weights, strict=True)
    ) + head.fold(path.levels).bias.view(-1, 1, 1)
    head.eval()
    torch.testing.assert_close(found.mean, total.mean((0, 2, 3)), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.variance, total.var((0, 2, 3), unbiased=False), atol=1e-5, rtol=1e-3)


def test_statistics_of_a_path_are_kept_beside_the_network():
    network, source = create(), Blobs()
    before = {name: x.clone() for name, x in network.state_dict().items()}
    found = statistics.measured(network, source, "train", range(4))
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items())
    assert not network.decode_head.training
    images, _ = source.read("test", range(2), 32)
    folded = statistics.folded(network, found)
    maps = network(images, None, folded)
    assert not torch.equal(maps, network(images))
    statistics.use(network, found)
    torch.testing.assert_close(network(images), maps)


def test_statistics_are_of_segformers_paths():
    with pytest.raises(ConfigError, match="expected one with all channels"):
        statistics.measured(create(), Blobs(), "train", [0], path="2.2.2.2 decoder=published width=64")
    with pytest.raises(ConfigError, match="expected a SegFormer"):
        statistics.use(torch.nn.Linear(2, 2), statistics.Statistics(torch.zeros(2), torch.ones(2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": None}, "expected steps or minutes, after which it ends"),
        ({"stages": (Stage(until=1.0, sizes=(16,)),)}, "at least 32 pixels a side, found 16: 16 x 1"),
        ({"stages": (Stage(until=1.0, sizes=(32,), batch=2000),)}, "at most 1024 images a step, found 2000"),
        ({"paths": Paths()}, r"at least 32 pixels a side, found 16: 32 x 0\.5"),
        ({"steps": -5}, r"recipe: Expected `int` >= 1 - at `\$\.steps`"),
        ({"steps": None, "minutes": math.nan}, r"recipe: Expected `float` > 0\.0 - at `\$\.minutes`"),
        ({"rate": math.nan}, r"recipe: Expected `float` >= 0\.0 - at `\$\.rate`"),
        ({"seed": -1}, r"recipe: Expected `int` >= 0 - at `\$\.seed`"),
    ],
    ids=str,
)
def test_recipes_that_cannot_be_trained_are_refused(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        segmentation.train(create(), Blobs(), msgspec.structs.replace(SHORT, **change), tmp_path / "x.safetensors")


def test_networks_and_sources_fit_each_other(tmp_path):
    with pytest.raises(ConfigError, match="expected maps of the network's 4 classes, found maps of 3"):
        segmentation.train(create(classes=4), Blobs(), SHORT, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="expected a SegFormer to train"):
        swin = networks.create("swin", variant="tiny", image_size=64, num_classes=3)
        segmentation.train(swin, Blobs(), SHORT, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="found maps of 3"):
        evaluation.confusion(create(classes=4), Blobs(), "test", [0])


def test_a_state_of_another_training_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    assert not segmentation.train(create(), Blobs(), SHORT, path, limit_s=-1.0).done
    with pytest.raises(ArtifactError, match=r'x\.state\.safetensors: expected a training by .*"seed":1.*remove'):
        segmentation.train(create(), Blobs(), msgspec.structs.replace(SHORT, seed=1), path)
    save_file({"x": torch.zeros(1)}, tmp_path / "x.state.safetensors")
    with pytest.raises(ArtifactError, match="expected segmentation training version 1, found None"):
        segmentation.train(create(), Blobs(), SHORT, path)
    assert states.header_of(path, segmentation.KIND)["step"] == "0"
    assert states.header_of(path, "video training") is None


class Others(Blobs):
    """Other images of the same classes."""

    def read(self, split, indices, size, device="cpu"):
        return super().read(split, [index + 1 for index in indices], size, device)


class Named(Blobs):
    classes = ("ground", "red", "blue")


@pytest.mark.parametrize(
    ("network", "source", "message"),
    [
        ({}, Others(), "of these data, found another: means"),
        ({}, Blobs(7), "of these data, found another: images 2147483648 for 7"),
        ({}, Named(), "of these data, found another: classes"),
        ({"classes": 4}, type("Four", (Blobs,), {"classes": tuple("abcd")})(), "of this network, .*linear_pred"),
        ({"variant": "b1"}, Blobs(), "of this network, found another: "),
    ],
    ids=["images", "count", "classes", "more-classes", "network"],
)
def test_a_state_of_other_data_or_another_network_is_refused(tmp_path, network, source, message):
    path = tmp_path / "x.safetensors"
    assert not segmentation.train(create(), Blobs(), SHORT, path, limit_s=-1.0).done
    options = {"variant": "b0", "classes": 3} | network
    made = networks.create(
        "segformer", variant=options["variant"], image_size=32, num_classes=options["classes"], seed=1
    )
    before = {name: x.clone() for name, x in made.state_dict().items()}
    with pytest.raises(ArtifactError, match=f"{message}.*; remove the file to start over"):
        segmentation.train(made, source, SHORT, path)
    assert all(torch.equal(x, before[name]) for name, x in made.state_dict().items())


@pytest.mark.parametrize("name", ["x.pth", "x.bin", "x", "x.json", "x.safetensors.zip"])
def test_weights_are_written_as_what_is_read(tmp_path, name):
    with pytest.raises(ConfigError, match=r"expected weights to write, as \.safetensors or in parts \.index\.json"):
        segmentation.train(create(), Blobs(), SHORT, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_rates_rise_and_fall():
    rates = [SHORT.rate_at(share) for share in np.linspace(0, 1, 50)]
    top = int(np.argmax(rates))
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) == pytest.approx(1e-3, rel=0.01) and rates[-1] == pytest.approx(0, abs=1e-9) and rates[0] > 0


def test_recipes_have_names():
    assert tuple(segmentation.RECIPES) == training.RECIPES
    assert {*training.STARTS, *training.STARTS.values()} <= {*training.RECIPES}


def test_recipes_are_read_strictly(tmp_path):
    assert segmentation.read_recipe("sampled").paths is not None
    path = tmp_path / "recipe.json"
    path.write_bytes(msgspec.json.encode(SHORT))
    assert segmentation.read_recipe(path) == SHORT == segmentation.read_recipe(path.read_text())
    texts = (
        ('{"stages": []}', "rise to 1"),
        ('{"stage": 1}', "unknown field"),
        ('{"steps": 1, "minutes": 1}', "steps or minutes, found 1 and 1"),
    )
    for text, message in texts:
        with pytest.raises(ConfigError, match=message):
            segmentation.read_recipe(text)
    with pytest.raises(ArtifactError, match="no such file; expected a recipe: plain, sampled, continued, depthless"):
        segmentation.read_recipe(tmp_path / "none.json")


def test_confusions_count_pixels():
    class Exact(torch.nn.Module):
        options = create().options

        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.zeros(1))

        def forward(self, images):
            # Class 1 wherever there is a disc, of either colour.
            disc = images.amax(1, keepdim=True)
            return torch.cat([1 - disc, disc, torch.full_like(disc, -9)], 1)

    source = Blobs()
    found = evaluation.confusion(Exact(), source, "test", range(6), batch=4)
    _, labels = source.read("test", range(6), 32)
    counts = [(labels == label).sum().item() for label in range(3)]
    assert found.tolist() == [[counts[0], 0, 0], [0, counts[1], 0], [0, counts[2], 0]]
    assert evaluation.ious(found).tolist() == pytest.approx([1, counts[1] / (counts[1] + counts[2]), 0])
    assert evaluation.mean_iou(found) == pytest.approx((1 + counts[1] / (counts[1] + counts[2])) / 3)


def test_classes_that_do_not_occur_do_not_count():
    found = np.array([[5, 0, 1], [0, 0, 0], [1, 0, 3]])
    assert np.isnan(evaluation.ious(found)[1])
    assert evaluation.mean_iou(found) == pytest.approx((5 / 7 + 3 / 5) / 2)


def test_maps_are_resized_before_the_largest_is_taken():
    maps = torch.randn(2, 3, 8, 8)
    labels = torch.randint(0, 3, (2, 30, 32), dtype=torch.uint8)
    labels[:, :3] = 255
    found = evaluation.counted(maps, labels, 3)
    taken = map_operators.resized(maps, (30, 32)).argmax(1)
    for truth in range(3):
        for given in range(3):
            assert found[truth, given] == ((labels == truth) & (taken == given)).sum()


@pytest.mark.parametrize("sides", [(1, 1, 4, 3), (3, 5, 12, 20), (7, 4, 25, 9), (6, 6, 6, 6), (9, 8, 4, 5)])
def test_counts_are_those_of_the_largest_interpolated_logit(sides):
    # Smooth maps: most pixels lie between neighbours of one class, some do not.
    height, width, *whole = sides
    torch.manual_seed(sum(sides))
    maps = torch.randn(3, 5, height, width) + 2 * F.one_hot(torch.arange(3) % 5, 5)[:, :, None, None]
    labels = torch.randint(0, 7, (3, *whole), dtype=torch.uint8)
    exact = F.interpolate(maps.double(), size=whole, mode="bilinear", align_corners=False)
    assert exact.topk(2, 1).values.diff(dim=1).abs().min() > 1e-4
    expected = np.zeros((5, 5), int)
    for label, found in zip(labels.flatten().tolist(), exact.argmax(1).flatten().tolist(), strict=True):
        if label < 5:
            expected[label, found] += 1
    np.testing.assert_array_equal(evaluation.counted(maps, labels, 5).numpy(), expected)


def test_pixels_of_other_labels_count_nowhere():
    assert not evaluation.counted(torch.zeros(1, 3, 2, 2), torch.full((1, 8, 8), 3, dtype=torch.uint8), 3).any()


def test_of_equal_logits_the_first_counts():
    counts = evaluation.counted(torch.zeros(1, 3, 2, 2), torch.ones(1, 8, 8, dtype=torch.uint8), 3)
    assert counts.tolist() == [[0, 0, 0], [64, 0, 0], [0, 0, 0]]


def test_accuracy_is_a_share_of_crops():
    source = scenes.create("crops")
    network = networks.create("deit", variant="tiny", image_size=32, num_classes=20)
    images, labels = source.read("test", range(6), 32)
    wanted = (network(images).argmax(1) == labels).float().mean().item()
    assert evaluation.accuracy(network, source, "test", range(6), batch=4) == pytest.approx(wanted)
    with pytest.raises(ConfigError, match="expected classes of the network's 20 classes, found maps of 21"):
        evaluation.accuracy(network, scenes.create("scenes"), "test", [0])


def test_the_command_trains(tmp_path):
    recipe = '{"stages": [{"until": 1, "sizes": [32], "batch": 2}], "measured": 2}'
    command = [ROOT / "workflow/scripts/train.py", "--network", "segformer-b0-32", "--steps", "2"]
    command += ["--output", "w.index.json", "--recipe", recipe, "--log", "w.csv", "--scores", "w.json", "--judged", "8"]
    command += ["--paths", "1.1.1.1", "2.2.2.2"]
    done = run_script(*command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "written after 2 steps, 4 images" in done.stdout and "novel: mIoU" in done.stdout
    rows = list(csv.DictReader((tmp_path / "w.csv").open()))
    assert [row["images"] for row in rows] == ["2", "4"] and all(float(row["loss"]) > 0 for row in rows)
    scores = json.loads((tmp_path / "w.json").read_text())
    assert 0 <= scores["miou_test"] <= 1 and len(scores["ious_novel"]) == 21
    fewer, whole = scores["paths"].values()
    # After two steps nothing of the test scenes is named right.
    assert whole["miou_test"] == scores["miou_test"] and fewer["ious_novel"] != whole["ious_novel"]
    network = create(classes=21, checkpoint=tmp_path / "w.index.json")
    assert network.weights.endswith("w.index.json")
    refused = run_script(*command, "--data", "coco", folder=tmp_path)
    assert refused.returncode == 2 and "unknown source 'coco'; known: scenes" in refused.stderr
