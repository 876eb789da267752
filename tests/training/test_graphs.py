"""Steps that are recorded in CUDA graphs leave the losses and gradients of those that are called."""

import pytest
import torch

from helpers.gpu import TRITON_DEVICE
from tilewright import networks
from tilewright_study import scenes
from tilewright_study.training import segmentation
from tilewright_study.training._graphs import Graphs
from tilewright_study.training.segmentation import Paths, Recipe, Stage

pytestmark = pytest.mark.skipif(TRITON_DEVICE == "cpu", reason="captures CUDA graphs, and this machine has no GPU")

BESIDE = Paths(count=2, scales=(1.0, 0.5), levels=("1234", "123"))
RECIPE = Recipe(stages=(Stage(until=1.0, sizes=(128, 64), batch=4),), paths=BESIDE, steps=8, measured=8, drop_path=0.2)


def stepped(graphs):
    """Losses, and gradients by name, of four steps that leave the weights alone; of both sizes of images."""
    source = scenes.create("scenes")
    network = networks.create("segformer", variant="b0", image_size=128, num_classes=len(source.classes))
    network = network.to("cuda").train()
    network.set_drop_path(RECIPE.drop_path)
    step = segmentation._Step(network, source, RECIPE, False)
    if not graphs:
        step.graphs, step.recorded = None, ()
    found = []
    with step.reader:
        if graphs:
            step.warm()
        for at in range(4):
            loss, beside, _ = step(at, 0.5)
            gradients = {name: x.grad.clone() for name, x in network.named_parameters()}
            found.append((loss.item(), beside.item(), gradients))
            network.zero_grad(set_to_none=True)
    return found


def test_recorded_steps_are_called_ones():
    """What is dropped at random is the same, too: it follows from the seed of the step.

    Gradients of recorded paths join in 32 bits, of others in 16.
    """
    for (loss, beside, found), (own_loss, own_beside, own) in zip(stepped(True), stepped(False), strict=True):
        assert loss == pytest.approx(own_loss, rel=2e-3) and beside == pytest.approx(own_beside, rel=2e-3)
        found, own = (torch.cat([x.flatten() for x in each.values()]) for each in (found, own))
        assert (found - own).norm() < 0.02 * own.norm()


def test_gradients_join_those_that_are_there():
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0], device="cuda"))
    graphs = Graphs([weight])
    for factor in (1.0, 2.0):
        x = torch.tensor([factor, 1.0], device="cuda")
        (loss, twice) = graphs("first", lambda x: ((weight * x).sum(), 2 * x), x)
        assert loss.item() == 2 * factor + 3 and twice.tolist() == [2 * factor, 2.0]
        assert weight.grad.tolist() == [factor, 1.0]
        (loss,) = graphs("second", lambda x: ((weight.square() * x).sum(),), x)
        assert loss.item() == 4 * factor + 9
        assert weight.grad.tolist() == [factor + 4 * factor, 1.0 + 6.0]
        weight.grad = None


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_drawn_follows_the_seed(compiled):
    weight, ones = torch.nn.Parameter(torch.ones(1000, device="cuda")), torch.ones(1000, device="cuda")
    graphs = Graphs([weight])

    def dropped(x):
        return (torch.nn.functional.dropout(weight * x, 0.5).sum(),)

    function = torch.compile(dropped) if compiled else dropped
    found = []
    # The calls before a recording draw, too.
    for seed in (0, 0, 1, 0):
        torch.manual_seed(seed)
        graphs("", function, ones)
        found.append(weight.grad.clone())
        weight.grad = None
    assert torch.equal(found[1], found[3]) and not torch.equal(found[1], found[2])
    torch.manual_seed(0)
    function(ones)[0].backward()
    assert torch.equal(found[1], weight.grad)


def test_a_training_is_recorded(tmp_path):
    source = scenes.create("scenes")
    network = networks.create("segformer", variant="b0", image_size=128, num_classes=len(source.classes)).to("cuda")
    lines = []
    trained = segmentation.train(network, source, RECIPE, tmp_path / "x.safetensors", show=lines.append)
    assert trained.done and trained.left_out == 0 and lines[0].startswith("recorded in ")
    assert len(trained.log["loss"]) == RECIPE.steps and min(trained.log["paths"]) > 0
