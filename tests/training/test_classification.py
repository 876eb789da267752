"""Training of classifiers and of DynamicViT's predictor: what is learned, what is repeatable, what is refused."""

import copy
from types import SimpleNamespace

import pytest
import torch

from tilewright import networks
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.networks import dynamicvit
from tilewright_study.training import _loop, classification

SIZE, CLASSES = 64, 3


class Colours:
    """Noise in which one colour is bright in the left half: the class."""

    task, splits, classes = "classes", ("train",), ("red", "green", "blue")

    def count(self, split):
        return 1 << 31

    def read(self, split, indices, size, device="cpu"):
        images, labels = [], []
        for index in indices:
            generator = torch.Generator().manual_seed(index)
            image, label = torch.randn(3, size, size, generator=generator), index % CLASSES
            image[label, :, : size // 2] += 2
            images.append(image)
            labels.append(label)
        return torch.stack(images).to(device), torch.tensor(labels, device=device)


def create(**options):
    return networks.create("deit", variant="tiny", image_size=SIZE, num_classes=CLASSES, **options)


RECIPE = classification.Recipe(batch=12, rate=1e-3, average=0.8)
PREDICTOR = classification.PredictorRecipe(batch=8, rate=3e-3)


def trained(folder, steps=15, **how):
    network = create()
    return network, classification.train(network, Colours(), RECIPE, folder / "x.safetensors", steps=steps, **how)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A trained network, and the one whose predictor was trained, with their files."""
    folder = tmp_path_factory.mktemp("weights")
    network, first = trained(folder)
    pruned = create(pruner="dynamicvit", predictor="random", keep_ratio=0.5)
    pruned.load_state_dict(network.state_dict(), strict=False)
    path = folder / "predictor.safetensors"
    second = classification.train_predictor(pruned, Colours(), PREDICTOR, path, steps=40)
    return network, first, pruned, second


def test_a_network_learns_and_its_file_is_the_network(taught):
    network, found, _, _ = taught
    assert sum(found.losses[-5:]) < 0.7 * sum(found.losses[:5])
    assert (found.steps, found.images, len(found.losses)) == (15, 180, 15)
    images, labels = Colours().read("train", range(9000, 9060), SIZE)
    loaded = create(checkpoint=found.path)
    with torch.inference_mode():
        assert torch.equal(loaded(images), network(images))
        assert (loaded(images).argmax(1) == labels).float().mean() > 0.8
    assert classification.images_of(found.path) == 180


def test_the_same_images_make_the_same_weights(tmp_path):
    (first, _), (second, _), (other, _) = (trained(tmp_path, steps=3, first=first) for first in (0, 0, 50))
    for name, x in first.state_dict().items():
        assert torch.equal(x, second.state_dict()[name]), name
    assert not torch.equal(first.head.weight, other.head.weight)


def test_the_clock_ends_a_training(tmp_path):
    _, found = trained(tmp_path, steps=None, seconds=1.0)
    assert 1 <= found.steps < 200 and 1.0 <= found.seconds < 8


def test_rates_rise_and_fall():
    found = [_loop.rate(share, 0.1) for share in (0, 0.05, 0.1, 0.55, 1)]
    assert found == pytest.approx([0, 0.5, 1, 0.5, 0])
    state = SimpleNamespace(step=3, seconds=8.0)
    assert _loop.until(state, 4)() == 0.75 and _loop.until(state, 4, 9)() == 8 / 9 and _loop.until(state, 2)() == 1
    with pytest.raises(ConfigError, match="expected a number of steps or of seconds, found neither"):
        _loop.until(state)


# The predictor


@torch.inference_mode()
def test_without_prunings_masked_tokens_are_the_networks(taught):
    network, _, pruned, _ = taught
    images, _ = Colours().read("train", range(4), SIZE)
    tokens, policy, shares = classification.masked(pruned, images, prune=False)
    assert policy.all() and shares.shape == (0, 4)
    torch.testing.assert_close(pruned.head(pruned.norm(tokens[:, 0])), network(images), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_hidden_tokens_are_hidden_as_from_masked_attention():
    q, k, v = torch.randn(3, 2, 9, 2, 8).unbind()
    seen = torch.rand(2, 9) > 0.5
    found = classification._attend(q, k, v, seen.float())
    heads = (x.transpose(1, 2) for x in (q, k, v))
    torch.testing.assert_close(found, dynamicvit.masked(seen, torch.float32)(*heads).transpose(1, 2))


def test_decisions_are_whole_and_their_gradients_those_of_chances():
    score = torch.tensor([[-1.0, 0.5, 2.0]], requires_grad=True)
    drawn = classification._drawn(score, None)
    assert drawn.tolist() == [[0, 1, 1]]
    drawn.sum().backward()
    chance = score.detach().sigmoid()
    torch.testing.assert_close(score.grad, chance * (1 - chance))
    kept = classification._drawn(torch.zeros(1, 20000), torch.Generator().manual_seed(0)).mean()
    assert abs(kept - 0.5) < 0.02


def test_a_predictor_learns_and_the_network_stays(taught):
    network, _, pruned, found = taught
    for name, x in network.state_dict().items():
        assert torch.equal(x, pruned.state_dict()[name]), name
    # Of 16 patches 8, 4 and 2 are asked for.
    assert found.kept == pytest.approx([0.5, 0.25, 0.125], abs=0.1)
    loaded = create(pruner="dynamicvit", keep_ratio=0.5, checkpoint=found.path)
    images, labels = Colours().read("train", range(9000, 9060), SIZE)
    random = create(pruner="dynamicvit", keep_ratio=0.5, predictor="random", seed=3)
    random.load_state_dict(network.state_dict(), strict=False)
    with torch.inference_mode():
        right, blind = ((each(images).argmax(1) == labels).float().mean() for each in (loaded, random))
    assert right >= blind - 0.02 and right > 0.6


# Refusals


def test_what_cannot_be_trained_is_refused(tmp_path):
    source = Colours()
    other = copy.copy(source)
    other.classes = ("a", "b")
    with pytest.raises(ConfigError, match="expected classes, of the network's 3, found classes of 2"):
        classification.train(create(), other, RECIPE, tmp_path / "x.safetensors", steps=1)
    with pytest.raises(ConfigError, match="pruner: expected dynamicvit, which has a predictor, found evit"):
        classification.train_predictor(create(pruner="evit"), source, PREDICTOR, tmp_path / "x.safetensors", steps=1)
    assert not list(tmp_path.iterdir())


def test_images_of_other_weights_are_not_known(tmp_path):
    assert classification.images_of(tmp_path / "official.pth") is None
    (tmp_path / "x.safetensors").write_bytes(b"no weights")
    with pytest.raises(ArtifactError, match="expected weights, found a damaged file"):
        classification.images_of(tmp_path / "x.safetensors")
