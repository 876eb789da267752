"""What is measured of paths on scenes: how many images at once, and stages that paths share."""

import itertools
import random

import numpy as np
import pytest
import torch

from tilewright import networks
from tilewright.masks import segformer, swin
from tilewright.networks.path import Stages
from tilewright_study import scenes
from tilewright_study.experiments.paths import measure

NETWORKS = {
    "segformer": ("b0", ("2.2.2.2", "2.1.2.2 scale=0.75", "2.10.2.01 levels=234", "2.10.2.2", "2.2.2.2 levels=12")),
    "swin": ("tiny", ("2.2.6.2", "10.2.6.2 fuse=16", "2.2.101011.2", "2.2.101011.1", "2.1.6.2")),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A narrow Swin: what is shared does not depend on widths."""
    monkeypatch.setitem(swin.VARIANTS, "tiny", swin.Size(24, (2, 2, 6, 2), 3))
    monkeypatch.setattr(swin, "CHANNELS", 32)


def made(family, **options):
    network = networks.create(family, variant=NETWORKS[family][0], image_size=64, num_classes=4, seed=0, **options)
    return network.eval()


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("pixels", [(64, 64), (512, 512), (360, 480), (1024, 1024), (8192, 8192)])
def test_maps_of_the_images_at_once_are_few_enough_to_interpolate(pixels, gpu):
    count = measure.at_once(pixels, gpu)
    channels = max(variant.channels for variant in segformer.VARIANTS.values())
    assert 1 <= count <= measure.BATCH[gpu]
    values = channels * -(-pixels[0] // 4) * -(-pixels[1] // 4)
    assert count * values < 2**31 or count == 1
    # No fewer than are known to fit.
    assert count == measure.BATCH[gpu] or (count + 1) * pixels[0] * pixels[1] > measure.MOST_PIXELS


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", NETWORKS)
def test_stages_of_the_path_before_change_nothing(family, dtype):
    network = made(family).to(dtype)
    images = torch.randn(2, 3, 64, 64).to(dtype)
    wanted = [network.path(text) for text in NETWORKS[family][1]]
    alone = {path: network(images, path) for path in wanted}
    for seed in range(2):
        stages = Stages()
        for path in random.Random(seed).choices(wanted, k=8):
            assert torch.equal(network(images, path, stages=stages), alone[path])


@torch.inference_mode()
@pytest.mark.parametrize("family", NETWORKS)
def test_stages_run_once_for_paths_that_begin_with_them(family):
    network, ran = made(family), []
    blocks = [module for module in network.modules() if type(module).__name__ == "_Block"]
    for number, block in enumerate(blocks):
        block.register_forward_hook(lambda *_, number=number: ran.append(number))
    kept = [["1" * depth, "1" * (depth - 1) + "0"] for depth in network.options.depths]
    wanted = [network.path(".".join(stages)) for stages in itertools.product(*kept)]
    random.Random(0).shuffle(wanted)
    stages = Stages()
    for path in sorted(wanted, key=lambda path: (path.scale, path.blocks)):
        network(torch.zeros(1, 3, 64, 64), path, stages=stages)
    # A stage in two forms runs as often as there are forms of it and of those before it.
    depths = network.options.depths
    assert len(ran) == sum(2**stage * (2 * depth - 1) for stage, depth in enumerate(depths))


@pytest.mark.parametrize("apart", [False, True])
def test_paths_that_are_measured_together_see_what_each_sees(apart):
    source = scenes.create("scenes")
    network = networks.create("segformer", variant="b0", image_size=64, num_classes=len(source.classes), seed=0).eval()
    kept = measure.Scenes(source, {"fit": 3}, (64, 64), "cpu")
    texts = ["2.2.2.2", "2.2.2.1", "2.2.1.1 scale=0.75", "2.2.2.2 levels=123", "1.2.2.2"]
    wanted = [network.path(text) for text in texts]
    own = {wanted[0]: kept.own(network, "fit", wanted[0])}
    found = kept.confusions(network, "fit", [*wanted, wanted[1]], own, apart=apart)
    for path in wanted:
        (alone,) = kept.confusions(network, "fit", [path], own, apart=apart).values()
        assert np.array_equal(found[path], alone) and len(alone) == (3 if apart else 1)
    assert not np.array_equal(found[wanted[0]], kept.confusions(network, "fit", wanted[:1], apart=apart)[wanted[0]])


def test_scenes_apart_are_together_what_they_are_at_once():
    source = scenes.create("scenes")
    network = networks.create("segformer", variant="b0", image_size=64, num_classes=len(source.classes), seed=0).eval()
    kept = measure.Scenes(source, {"fit": 6}, (64, 64), "cpu")
    path = network.path("2.2.2.1")
    (at_once,) = kept.confusions(network, "fit", [path]).values()
    (apart,) = kept.confusions(network, "fit", [path], apart=True).values()
    assert len(at_once) == 2 and len(apart) == 6 and np.array_equal(at_once.sum(0), apart.sum(0))
    for place, own in enumerate(apart):
        one = measure.Scenes.__new__(measure.Scenes)
        one.source, one.kept = source, {"fit": [part[place : place + 1] for part in kept.kept["fit"]]}
        assert np.array_equal(one.confusions(network, "fit", [path])[path][0], own)
