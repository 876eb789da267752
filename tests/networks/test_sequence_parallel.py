"""Wan with its tokens shared out among processes, against the network in one process."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from helpers.cases import rest_slow
from helpers.ranks import Ranks
from tilewright import networks
from tilewright.core.errors import ConfigError, PatternError
from tilewright.masks import wan as pattern
from tilewright.networks.video_attentions import dense

# Three frames of 3 x 5 tokens, which 2 does not divide; 3 does not divide the heads.
SMALL = {"height": 48, "width": 80, "layers": 2}
HEADS = 4
SETTINGS = {
    "dense": {},
    "slices": {"keep": 0.25, "budget": 1.0, "rows": 16, "least": 1, "predictor": {"pool": 4}},
}


# Shares of three are of unequal lengths.
@pytest.fixture(scope="module", params=rest_slow([2, 3], 1), ids=lambda ranks: f"P{ranks}")
def ranks(request, tmp_path_factory):
    found = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


def create(**chosen):
    """As published, but for its width and depth; queries and keys large, so that attention is not even."""
    pattern.VARIANTS["tiny"] = pattern.Size(HEADS * pattern.HEAD_DIM, 320, HEADS, 2)
    network = networks.create_video("wan-tiny-480p-9f", **SMALL, **chosen)
    with torch.no_grad():
        for block in network.blocks:
            for norm in (block.self_attn.norm_q, block.self_attn.norm_k):
                norm.weight.mul_(2)
    return network


def inputs(network):
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(2, *network.options.latents, generator=generator)
    return latents, torch.tensor([900.0, 12.5]), torch.randn(2, 7, pattern.TEXT_WIDTH, generator=generator)


@torch.inference_mode()
def velocity(make, chosen):
    network = make(create(**chosen))
    return network(*inputs(network))


@torch.inference_mode()
def of_the_document():
    """What the document's lines for networks give, for a small one."""
    text = (Path(__file__).parents[2] / "docs/parallel.md").read_text()
    (lines,) = re.findall(r"^```python\n([^`]*create_video.+?)^```$", text, re.MULTILINE | re.DOTALL)
    small = lines.replace('networks.create_video("wan-1.3b-480p-81f")', "create()")
    assert small != lines
    names = {"create": create} | dict(zip(("latents", "time", "text"), inputs(create()), strict=True))
    exec(small, names)
    return names["velocity"]


def in_one(network):
    return network


def with_another_attention(network):
    return networks.sequence_parallel(network.with_attention("window")).with_attention("dense", order="voxel")


@pytest.fixture
def restored():
    """The published sizes again."""
    tiny = pattern.VARIANTS["tiny"]
    yield
    pattern.VARIANTS["tiny"] = tiny


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("order", [None, "hilbert"], ids=str)
@pytest.mark.parametrize("attention", ["dense", "slices"])
def test_every_rank_returns_the_velocity_of_one_process(ranks, attention, order):
    chosen = {"attention": attention, "settings": SETTINGS[attention], "order": order}
    expected = velocity(in_one, chosen)
    for found in ranks.results(velocity, networks.sequence_parallel, chosen):
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.usefixtures("restored")
def test_a_fourth_of_the_keys_makes_a_difference():
    every, listed = (velocity(in_one, {"attention": name, "settings": SETTINGS[name]}) for name in SETTINGS)
    assert (every - listed).abs().max() > 1e-3 * every.abs().max()


@pytest.mark.usefixtures("restored")
def test_the_lines_of_the_document_give_the_velocity_of_one_process(ranks):
    expected = velocity(in_one, {})
    for found in ranks.results(of_the_document):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def sampled(make):
    settings = SETTINGS["slices"] | {"steps": {"refresh": (1,), "first_dense": 1}}
    network = make(create(attention="slices", settings=settings))
    return network.sample(inputs(network)[2], steps=3, guidance=2.0).latents


@pytest.mark.usefixtures("restored")
def test_every_rank_samples_the_clip_of_one_process_with_lists_kept_from_step_to_step(ranks):
    expected = sampled(in_one)
    for found in ranks.results(sampled, networks.sequence_parallel):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.usefixtures("restored")
def test_the_attention_of_a_shared_network_can_be_exchanged(ranks):
    expected = velocity(in_one, {})
    for found in ranks.results(velocity, with_another_attention, {}):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.usefixtures("restored")
def test_the_weights_are_the_networks_own():
    network = create()
    shared = networks.sequence_parallel(network)
    assert shared.state_dict().keys() == network.state_dict().keys()
    assert all(a is b for a, b in zip(shared.parameters(), network.parameters(), strict=True))


@torch.inference_mode()
def tokens_in_layers():
    network = networks.sequence_parallel(create())
    seen = []
    for block in network.blocks:
        block.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    network(*inputs(network))
    return seen


@pytest.mark.usefixtures("restored")
def test_layers_have_a_ranks_own_tokens(ranks):
    found = ranks.results(tokens_in_layers)
    assert sum(tokens[0] for tokens in found) == 45
    assert all(len(tokens) == 2 and max(tokens) <= 23 for tokens in found)


@torch.inference_mode()
def heads_of_attentions():
    made = []

    class Attention(dense.Attention):
        def __init__(self, settings, video):
            super().__init__(settings, video)
            made.append(video.heads)

        def __call__(self, q, k, v, call):
            assert q.shape[1] == made[-1]
            return super().__call__(q, k, v, call)

    with patch.object(dense, "Attention", Attention):
        network = networks.sequence_parallel(create())
        network(*inputs(network))
    return made[-1]


@pytest.mark.usefixtures("restored")
def test_attention_is_made_for_a_ranks_own_heads(ranks):
    assert sum(ranks.results(heads_of_attentions)) == HEADS


@torch.inference_mode()
def too_many_ranks():
    pattern.VARIANTS["tiny"] = pattern.Size(pattern.HEAD_DIM, 64, 1, 2)
    network = networks.sequence_parallel(networks.create_video("wan-tiny-480p-9f", **SMALL))
    with pytest.raises(PatternError) as refusal:
        network(*inputs(network))
    return str(refusal.value)


def test_fewer_heads_than_ranks_are_refused_in_the_first_call(ranks):
    assert all("heads: expected at least one for each" in text for text in ranks.results(too_many_ranks))


def test_other_networks_are_refused():
    with pytest.raises(ConfigError, match=r"expected a network of videos.*found Linear"):
        networks.sequence_parallel(nn.Linear(2, 2))
