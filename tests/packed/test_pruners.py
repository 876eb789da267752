"""Pruners by themselves: what they choose of scores made by hand, and their settings."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright import networks
from tilewright.core.errors import ConfigError, UnknownNameError
from tilewright.networks.token_layouts import Rectangle
from tilewright.packed import pruners
from tilewright.packed.pruners import Choice, Settings, ats, evit


@pytest.mark.parametrize("name", pruners.NAMES)
def test_a_pruner_keeps_its_contract(name):
    module, params = pruners.parse(name, {"predictor": "random"} if name == "dynamicvit" else {})
    pruner = module.Pruner(params, 32, 17)
    assert isinstance(params, Settings) and not params.learned
    assert set(pruner.before) | set(pruner.inside) <= set(range(12))
    x, layout = torch.randn(3, 17, 32), Rectangle(3, 17, torch.device("cpu"))
    heads = torch.randn(3, 3, 17, 2, 16)
    if name == "none":
        assert not pruner.before and not pruner.inside
        return
    found, choice = pruner(0, x, layout, heads)
    counts = choice.keep.sum(1)
    assert found.shape == x.shape and choice.keep.dtype == torch.bool
    assert choice.keep[:, 0].all() and (choice.least <= counts).all() and (counts <= choice.most).all()
    # Of one number that is scattered into a constant, the compiler of torch 2.11 loses the type.
    traced = make_fx(lambda x, q, k, v: pruner(0, x, layout, (q, k, v))[1].keep)(x, *heads)
    scattered = [node for node in traced.graph.nodes if "scatter" in str(node.target) and node.args[3] == 1]
    assert all(node.args[2].meta["tensor_meta"].shape[1] > 1 for node in scattered)


def test_a_learned_predictor_is_the_default():
    assert pruners.parse("dynamicvit", {})[1].learned


@pytest.mark.parametrize(
    ("name", "stated", "error", "message"),
    [
        ("topk", {}, UnknownNameError, "unknown pruner 'topk'; known: none, threshold_l2"),
        ("evit", {"threshold": 1.0}, ConfigError, "pruner evit: .*`threshold`; settings: keep_ratio"),
        ("ats", {"keep_ratio": 0.0}, ConfigError, "pruner ats: .*keep_ratio"),
        ("dynamicvit", {"predictor": "none"}, ConfigError, "pruner dynamicvit: .*predictor"),
        ("threshold_l2", {"threshold": 0.0}, ConfigError, "pruner threshold_l2: .*threshold"),
        ("threshold_l2", {"keep_range": (0.2, 1.2)}, ConfigError, "pruner threshold_l2: .*keep_range"),
        ("threshold_l2", {"keep_range": (0.7, 0.3)}, ConfigError, r"the least share first, found \(0.7, 0.3\)"),
        ("threshold_l2", {"keep_ratio": 0.5, "threshold": 1.0}, ConfigError, "one of keep_ratio, threshold, found 2"),
    ],
)
def test_settings_out_of_range_are_named(name, stated, error, message):
    with pytest.raises(error, match=message):
        pruners.parse(name, stated)


def test_the_fused_token_is_what_the_others_weigh():
    # All keys are equal: the class token attends to each of 5 tokens with 1/5; the first two patches win the tie.
    x, layout = torch.randn(1, 5, 4), Rectangle(1, 5, torch.device("cpu"))
    pruner = evit.Pruner(evit.Params(0.5), 4, 5)
    found, choice = pruner(0, x.clone(), layout, torch.ones(3, 1, 5, 2, 2))
    assert choice.keep.tolist() == [[True, True, True, True, False]] and choice.least == choice.most == 4
    torch.testing.assert_close(found[0, 3], (x[0, 3] + x[0, 4]) / 5)
    assert torch.equal(found[0, :3], x[0, :3])


def test_evit_counts_the_fused_token_from_then_on():
    # 196: ceil 137.2 and a fused one; 139: ceil 97.3 and one; 99: ceil 69.3 and one.
    assert evit.Pruner(evit.Params(0.7), 4, 197).tokens == [197, 140, 100, 72]
    assert evit.Pruner(evit.Params(1.0), 4, 197).tokens == [197] * 4


def test_sampling_follows_the_distribution():
    valid = torch.ones(1, 4, dtype=torch.bool)
    # Sorted .1 .2 .3 .4: the distribution is 0, 2/9, 5/9, 1; of the grid 2/9, 11/18, 1 the second is nearest to 5/9.
    score = torch.tensor([[0.3, 0.1, 0.4, 0.2]])
    assert ats.sample(score, valid, 3).tolist() == [[True, False, True, True]]
    # Two points: the ends.
    assert ats.sample(score, valid, 2).tolist() == [[False, False, True, True]]
    # One token has nearly all of it: most of a fine grid falls to it.
    assert ats.sample(torch.tensor([[0.1, 0.2, 99.0, 0.1]]), valid, 3).tolist() == [[False, True, True, True]]
    assert ats.sample(torch.tensor([[0.1, 0.2, 99.0, 0.1]]), valid, 2).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("alive", [[], [2], [0, 3]])
def test_sampling_of_few_tokens(alive):
    valid = torch.zeros(1, 4, dtype=torch.bool)
    valid[0, alive] = True
    keep = ats.sample(torch.tensor([[0.3, 0.1, 0.4, 0.2]]), valid, 7)
    # The least of several tokens is where the distribution is zero, which the grid does not touch.
    assert keep[0].nonzero().flatten().tolist() == (alive if len(alive) < 2 else [0])


def test_padding_takes_no_part_in_sampling():
    torch.manual_seed(0)
    score, valid = torch.rand(3, 20), torch.rand(3, 20) < 0.5
    keep = ats.sample(score, valid, 9)
    for image in range(3):
        alone = ats.sample(score[image, valid[image]][None], torch.ones(1, int(valid[image].sum())).bool(), 9)
        assert torch.equal(keep[image, valid[image]], alone[0]) and not keep[image, ~valid[image]].any()


def test_a_new_pruner_with_a_setting_edits_no_network(monkeypatch):
    """Its module and a name in the registry are all that a network needs."""

    class Params(Settings, frozen=True, forbid_unknown_fields=True):
        first: int = 5

    class Pruner(torch.nn.Module):
        before, inside = (2,), ()

        def __init__(self, params, width, n_tokens):
            super().__init__()
            self.count = params.first

        def forward(self, time, x, layout, heads):
            keep = (torch.arange(x.shape[1]) < self.count).expand(len(x), -1)
            return x, Choice(keep, self.count, self.count)

    monkeypatch.setattr(pruners, "NAMES", (*pruners.NAMES, "firsts"))
    monkeypatch.setitem(sys.modules, "tilewright.packed.pruners.firsts", SimpleNamespace(Params=Params, Pruner=Pruner))
    options = {"variant": "tiny", "image_size": 64, "pruner": "firsts"}
    for stated in ({"first": 3}, {"pruner_settings": {"first": 3}}):
        network = networks.create("deit", **options, **stated)
        with torch.no_grad():
            _, (layout,) = network(torch.randn(2, 3, 64, 64), None, True)
        assert layout.valid.sum(1).tolist() == [3, 3]
    with pytest.raises(ConfigError, match=r"deit: unknown field `last`; .*settings of pruner firsts: first"):
        networks.create("deit", **options, last=3)
    with pytest.raises(ConfigError, match="pruner firsts: first: expected int"):
        networks.create("deit", **options, first="three")
