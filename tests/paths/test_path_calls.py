"""Paths as calls: what a path gave first it gives again, whatever ran between; CUDA graphs where there is a GPU."""

import functools
import gc

import numpy as np
import pytest
import torch

from tilewright import devices, networks
from tilewright.core.errors import ConfigError
from tilewright.masks import segformer
from tilewright.networks.path import scaled
from tilewright.paths.calls import Calls
from tilewright.paths.runner import Runner
from tilewright.paths.table import Entry, Table

CUDA = torch.cuda.is_available()
DEVICE, DTYPE, SIZE = ("cuda", torch.bfloat16, 512) if CUDA else ("cpu", torch.float32, 64)
# Of a replay; a call on a CPU takes a thousand times as long.
SWITCHES = 1000 if CUDA else 30
# The largest first: the published decoder has maps of all levels at the size of the first one.
TEXTS = (
    "2.2.2.2 decoder=published",
    "2.2.2.2",
    "11.01.10.00",
    "2.2.2.2 levels=123",
    "1.1.1.1 scale=0.5",
    "2.2.2.2 scale=0.75",
)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    made = networks.create("segformer", variant="b0", image_size=SIZE, num_classes=21)
    return made.to(DEVICE, DTYPE).eval()


@pytest.fixture(scope="module")
def calls(network):
    return Calls(network, {text: network.path(text) for text in TEXTS})


@pytest.fixture(scope="module")
def images():
    return torch.randn(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(DEVICE, DTYPE)


def test_paths_repeat_their_first_result_after_random_switches(calls, images):
    first = {text: calls(text, images).clone() for text in TEXTS}
    for text in np.random.default_rng(0).choice(TEXTS, SWITCHES):
        assert torch.equal(calls(str(text), images), first[text]), text
    assert len({tuple(maps.flatten()[:64].tolist()) for maps in first.values()}) >= len(TEXTS) - 1


@pytest.mark.parametrize("text", TEXTS)
def test_a_path_gives_what_the_network_gives(text, network, calls, images):
    with torch.inference_mode():
        expected = network(images, network.path(text)).float()
    error = (calls(text, images).float() - expected).norm() / expected.norm()
    assert error <= (1e-2 if CUDA else 1e-5)


def test_images_of_other_types_and_layouts_give_the_same(network, calls, images):
    expected = calls("2.2.2.2", images).clone()
    held = images.new_zeros(1, SIZE, SIZE, 4).permute(0, 3, 1, 2)[:, 1:]
    held.copy_(images)
    for other in (images.double(), images.to(memory_format=torch.channels_last), held, images.cpu()):
        calls("2.2.2.2", -images)
        # A CPU computes maps of another layout in another order.
        assert torch.allclose(calls("2.2.2.2", other), expected, atol=0 if CUDA else 1e-5)
    assert not torch.allclose(calls("2.2.2.2", -images), expected, atol=1e-3)


@pytest.mark.parametrize("text", [*TEXTS, "2.2.2.2 decoder=published fuse=64 width=64"])
def test_16_bits_are_computed_in_float32_on_a_cpu(text):
    network = networks.create("segformer", variant="b0", image_size=64, num_classes=21).to(torch.bfloat16).eval()
    images = torch.randn(1, 3, 64, 64).to(torch.bfloat16)
    found = Calls(network, {text: network.path(text)})(text, images)
    with torch.inference_mode():
        expected = network.float()(images.float(), text)
    # What a decoder makes of the weights is rounded once more.
    assert (found - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.skipif(not CUDA, reason="a CPU has no streams, and this machine has no GPU")
def test_a_call_on_another_stream_comes_behind_the_one_before(calls, images):
    slow, fast = "2.2.2.2 decoder=published", "1.1.1.1 scale=0.5"
    other = -images
    expected = {(text, x is other): calls(text, x).clone() for text in (slow, fast) for x in (images, other)}
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for turn in range(200):
        text, at = ((slow, fast)[turn % 2], turn // 2 % 2)
        with torch.cuda.stream(streams[turn % 2]):
            found.append(((text, bool(at)), calls(text, other if at else images).clone()))
    torch.cuda.synchronize()
    assert all(torch.equal(maps, expected[key]) for key, maps in found)


@pytest.mark.skipif(not CUDA, reason="graphs hold memory of a GPU, and this machine has none")
def test_all_graphs_take_little_more_memory_than_the_largest(network):
    def taken(texts):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        held = Calls(network, {text: network.path(text) for text in texts})
        # What was called before each capture is given back: what stays is the graphs'.
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before, held

    one, held = taken(TEXTS[:1])
    del held
    every, _ = taken(TEXTS)
    assert 0 < one <= every <= 1.3 * one


@pytest.mark.skipif(not CUDA, reason="kernels of our own are those of a GPU, and this machine has none")
def test_a_runner_has_kernels_for_the_sizes_of_its_paths(images):
    made = networks.create("segformer", variant="b0", image_size=SIZE, num_classes=21).to(DEVICE, DTYPE).eval()
    facts = {"network": f"segformer-b0-{SIZE}", "checkpoint": "", "rung": "trained", "batch": 1, "dtype": "bfloat16"}
    facts["device"] = devices.describe("cuda")["name"]
    texts = {"2.2.2.2": 0.5, "1.1.1.1 scale=0.5": 0.4, "2.2.2.2 levels=123": 0.45}
    rows = [Entry(path=x, choice=y, promise_us=1e4 * y, p50_us=1.0, macs=1, **facts) for x, y in texts.items()]
    Runner(made, Table(rows))
    for text in texts:
        assert networks.choose_kernels(made, images, [text]) == []
    assert len(made.operators.chosen) == 2 * 29 + 1


# The published decoder with some of its channels, too.
COMPILED = (*TEXTS, "2.2.2.2 decoder=published fuse=128 width=64")


def graphs():
    """How many torch has compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def compiled(network):
    """Paths whose parts are compiled, and how many graphs these took."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            # Machine code of so many forms takes a CPU a minute.
            patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
        made = Calls(network, {text: network.path(text) for text in COMPILED}, compiled=True)
    return made, graphs()


@pytest.mark.parametrize("text", COMPILED)
def test_a_compiled_path_gives_what_the_network_gives(text, network, compiled, images):
    calls, count = compiled
    with torch.inference_mode():
        expected = network(images, network.path(text)).float()
    found = calls(text, images).float()
    assert (found - expected).norm() / expected.norm() <= (1e-2 if CUDA else 1e-5)
    assert graphs() == count > 0


def test_compiled_paths_share_parts_and_weights(network, compiled, images):
    calls, count = compiled
    pixels = {scaled((SIZE, SIZE), path.scale) for path in calls.paths.values()}
    blocks = {(stage, grid) for each in pixels for stage, grid in enumerate(segformer.grids(each))}
    decoders = {(path.scale, path.levels, path.decoder, path.fuse) for path in calls.paths.values()}
    # A kernel of our own may break a graph in two.
    assert count == len(blocks) + len(decoders) or (CUDA and count > len(blocks) + len(decoders))
    assert all(one is other for one, other in zip(network.parameters(), calls.network.parameters(), strict=True))
    assert not any("forward" in vars(part) for part in network.modules())
    # The network itself is as it was: other sizes compile nothing.
    with torch.inference_mode():
        network(torch.cat((images, images)))
    assert graphs() == count


@pytest.mark.parametrize("asked", [False, True])
def test_a_runner_is_compiled_where_its_table_was(asked, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    made = networks.create("segformer", variant="b0", image_size=64, num_classes=3).to(DEVICE, DTYPE).eval()
    facts = {"network": "segformer-b0-64", "checkpoint": "", "rung": "trained", "batch": 1, "compiled": asked}
    facts["device"] = devices.describe(torch.device(DEVICE).type)["name"]
    dtype = str(DTYPE).removeprefix("torch.")
    row = Entry(path="2.2.2.2", choice=0.5, promise_us=1.0, p50_us=1.0, macs=1, dtype=dtype, **facts)
    parts = [vars(part) for part in Runner(made, Table([row])).calls.network.modules()]
    assert any("forward" in part for part in parts) == asked
    other = Entry(path="1.1.1.1", promise_us=1.0, p50_us=1.0, macs=1, dtype=dtype, **facts | {"compiled": not asked})
    with pytest.raises(ConfigError, match="expected paths of one compiled, found False, True"):
        Table([row, other])


def test_networks_without_parts_to_compile_are_named():
    other = networks.create("swin", variant="tiny", image_size=32, num_classes=3).to(DEVICE).eval()
    with pytest.raises(ConfigError, match=r"compiled: expected a network with parts to compile, found .*swin"):
        Calls(other, {}, compiled=True)
