"""Fine-tuning over patterns follows that over masked attention, on images of scenes.

Both see the same images in the same order from the same weights. They differ by rounding alone, which grows from step
to step: losses are compared with each other, and with how much those of three seeds differ.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tilewright import networks
from tilewright.nn import patterns
from tilewright_study import scenes

SIZE, PATTERN, SEEDS = 96, "window-3-g1", (0, 1, 2)
# Batches of an epoch: few images, so that a few steps learn something.
EPOCH = 6


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "plans"))


@pytest.fixture(scope="module")
def source():
    return scenes.create("crops")


@pytest.fixture(scope="module")
def images(source):
    """``images(seed, step, batch)``: each drawn once, for all networks."""
    drawn = {}

    def read(*key):
        seed, step, batch = key
        key = seed, step % EPOCH, batch
        if key not in drawn:
            first = 100_000 * seed + step % EPOCH * batch
            drawn[key] = source.read("train", range(first, first + batch), SIZE)
        return drawn[key]

    return read


def tuned(network, images, *, seed, steps, batch, rate=1e-3, call=None):
    """The losses of so many steps of AdamW."""
    call = network if call is None else call
    optimiser = torch.optim.AdamW(network.parameters(), rate, weight_decay=0.05)
    losses = []
    network.train()
    for step in range(steps):
        pictures, labels = images(seed, step, batch)
        loss = F.cross_entropy(call(pictures), labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    return np.array(losses)


class Masked(TorchFunctionMode):
    """Torch's attention with a mask, in calls that have none."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs["attn_mask"] = self.mask
        return func(*args, **kwargs)


def longformer(images, source, *, seed, steps, batch):
    """Losses of a ViL-tiny with bias tables: by plans, and by masked attention."""
    options = {"variant": "tiny", "image_size": SIZE, "position": "relative", "num_classes": len(source.classes)}
    found = []
    for attention in ("tilewright", "dense"):
        network = networks.create("vision_longformer", attention=attention, seed=seed, **options)
        before = copy.deepcopy(network.state_dict())
        found.append(tuned(network, images, seed=seed, steps=steps, batch=batch))
        # Tables are trained, too.
        changed = {name for name, x in network.state_dict().items() if not torch.equal(x, before[name])}
        assert changed == {name for name, _ in network.named_parameters()}
    return found


def deit(images, source, *, seed, steps, batch):
    """Losses of timm's DeiT-T, first tuned with dense attention, then sparse: by plans, and by masked attention."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    from tilewright.integrations.timm import sparsify

    torch.manual_seed(seed)
    options = {"img_size": SIZE, "num_classes": len(source.classes), "drop_path_rate": 0.0}
    first = timm.create_model("deit_tiny_patch16_224", **options)
    tuned(first, images, seed=seed, steps=steps // 2, batch=batch)
    sparse, masked = copy.deepcopy(first), copy.deepcopy(first)
    sparsify(sparse, PATTERN)
    graph = patterns.graph(PATTERN, masked.patch_embed.grid_size, 1)

    def call(x):
        with Masked(torch.from_numpy(graph.to_dense())):
            return masked(x)

    # Other images than those before.
    options = {"seed": seed + len(SEEDS), "steps": steps, "batch": batch}
    return tuned(sparse, images, **options), tuned(masked, images, call=call, **options)


@pytest.mark.parametrize("network", [longformer, deit], ids=["vil", "deit"])
def test_the_first_steps_have_the_losses_of_masked_attention(network, images, source):
    ours, masked = network(images, source, seed=0, steps=4, batch=4)
    np.testing.assert_allclose(ours, masked, atol=1e-5, rtol=0)
    # Another way to the same losses.
    assert np.ptp(masked) > 0.01 and (ours != masked).any()


@pytest.mark.slow
@pytest.mark.parametrize("network", [longformer, deit], ids=["vil", "deit"])
def test_fine_tuning_follows_masked_attention_within_the_noise_of_seeds(network, images, source):
    pairs = [network(images, source, seed=seed, steps=7 * EPOCH, batch=16) for seed in SEEDS]
    # [seeds, epochs]
    ours, masked = (np.array(each).reshape(len(SEEDS), -1, EPOCH).mean(2) for each in zip(*pairs, strict=True))
    apart, noise = np.abs(ours - masked), np.ptp(masked[:, -1])
    print(f"ours {ours[:, -1]}, masked {masked[:, -1]}, noise {noise:.4f}, apart {apart.max(0)}")
    assert (masked[:, 0] - masked[:, -1] > 0.3).all()
    # Later, rounding has grown to the size of noise: masked attention from weights that differ by 1e-7 goes as far.
    assert (apart[:, :2] <= 1e-3).all()
    assert (apart[:, -1] <= noise).all()
