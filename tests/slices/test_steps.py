"""Lists that are kept across denoising steps."""

import pytest
import torch

from helpers.cases import rest_slow
from helpers.slices import mask_of, qkv
from tilewright import slices
from tilewright.core.errors import PatternError

ROWS, KEYS = 150, 90


class Predictor:
    """Stands in for `slices.predict`: other random lists in each call."""

    def __init__(self):
        """No call yet."""
        self.made = []

    def __call__(self, q, k, *, count):
        """Lists of `count` keys for each group."""
        mask = mask_of([[[count, 2 * count]] * q.shape[1]], KEYS, seed=len(self.made)).to(q.device)
        self.made.append(slices.from_mask(mask, ROWS))
        return self.made[-1]


def tokens(device, step=0):
    return qkv(1, 2, ROWS, KEYS, 64, seed=10 * step, device=device)


@pytest.fixture(params=[True, False], ids=["packed", "whole"])
def packed(request):
    return request.param


def test_lists_are_predicted_at_a_refresh_and_kept_until_the_next(packed, device):
    predict = Predictor()
    steps = slices.Steps(refresh=(0, 3), first_dense=2, packed=packed, predict=predict, count=20)
    for step in range(5):
        for layer in range(2):
            q, k, v = tokens(device, step)
            out = steps(layer, step, "cond", q, k, v)
            if step < 2:
                assert torch.equal(out, slices.dense(q, k, v)[0])
            else:
                lists = predict.made[layer + (2 if step >= 3 else 0)]
                assert torch.equal(out, slices.attend(q, k, v, lists))
                assert torch.equal(steps.lists(layer, step, "cond").counts, lists.counts)
    assert len(predict.made) == 4
    steps.check()
    held = [x.nbytes for lists in predict.made[2:] for x in ((lists.pack(),) if packed else lists.tensors)]
    assert steps.memory_bytes == sum(held)
    steps.clear()
    assert not steps.memory_bytes


def test_first_layers_stay_dense_and_keep_nothing(device):
    predict = Predictor()
    steps = slices.Steps(refresh=(0,), first_dense=0, dense_layers=1, predict=predict, count=20)
    q, k, v = tokens(device)
    assert torch.equal(steps(0, 5, "cond", q, k, v), slices.dense(q, k, v)[0]) and not predict.made


def test_branches_have_lists_of_their_own_or_those_of_another(device):
    q, k, v = tokens(device)
    for shared in ({}, {"without": "with"}):
        predict = Predictor()
        steps = slices.Steps(refresh=(0,), first_dense=0, shared=shared, predict=predict, count=20)
        one, other = (steps(0, 0, branch, q, k, v) for branch in ("with", "without"))
        assert len(predict.made) == 2 - len(shared)
        assert torch.equal(other, slices.attend(q, k, v, predict.made[-1]))
        assert torch.equal(one, other) == bool(shared)


def test_what_lists_missed_at_a_refresh_is_added_later(device):
    predict = Predictor()
    steps = slices.Steps(refresh=(0, 2), first_dense=0, delta=True, predict=predict, count=20)
    q, k, v = tokens(device)
    dense = slices.dense(q, k, v)[0]
    assert torch.equal(steps(0, 0, "cond", q, k, v), dense)
    assert torch.allclose(steps(0, 1, "cond", q, k, v), dense, atol=1e-6)
    later = tokens(device, 1)
    missed = dense - slices.attend(q, k, v, predict.made[0])
    assert torch.equal(steps(0, 1, "cond", *later), slices.attend(*later, predict.made[0]) + missed)


def test_a_step_before_any_refresh_is_refused(device):
    q, k, v = tokens(device)
    steps = slices.Steps(refresh=(3,), first_dense=1, predict=Predictor(), count=20)
    steps(0, 0, "cond", q, k, v)
    message = r"^step 2: expected lists of layer 0, branch 'cond', made at one of the steps 3 before it, found none$"
    with pytest.raises(PatternError, match=message):
        steps(0, 2, "cond", q, k, v)
    steps(0, 3, "cond", q, k, v)
    with pytest.raises(PatternError, match=message):
        steps(0, 2, "cond", q, k, v)


@pytest.mark.parametrize("delta", rest_slow([False, True], 1))
@pytest.mark.parametrize(
    ("last", "first", "run"),
    [(4, 20, None), (19, 16, None), (16, 17, "another")],
    ids=["a refresh was passed", "an earlier step", "another name"],
)
def test_lists_of_an_earlier_run_are_refused(last, first, run, delta, device):
    q, k, v = tokens(device)
    steps = slices.Steps(refresh=(0, 15), first_dense=0, delta=delta, predict=Predictor(), count=20)
    for step in range(last + 1):
        steps(0, step, "cond", q, k, v)
    made_at = rf"^step {first}: expected lists of layer 0, branch 'cond', made at step 15 of this run, found "
    with pytest.raises(PatternError, match=made_at):
        steps(0, first, "cond", q, k, v, run=run)
    # It may begin at a refresh.
    for step in range(15, 18):
        steps(0, step, "cond", q, k, v, run=run)


@pytest.mark.parametrize("delta", [False, True])
def test_a_network_may_join_a_run_late(delta, device):
    """And leave it while a refresh passes."""
    predict = Predictor()
    steps = slices.Steps(refresh=(0, 15), first_dense=0, joins=True, delta=delta, predict=predict, count=20)
    made = []
    for step in (3, 4, 15, 16):
        steps(0, step, "cond", *tokens(device, step))
        made.append(len(predict.made))
    assert made == [1, 1, 2, 2]
    steps(0, 4, "cond", *tokens(device))
    steps(0, 17, "cond", *tokens(device))
    assert len(predict.made) == 4


def test_memory_is_bounded(device):
    predict, q = Predictor(), tokens(device)
    steps = slices.Steps(refresh=(0, 1), first_dense=0, predict=predict, count=20)
    steps(0, 0, "cond", *q)
    one = steps.memory_bytes
    steps = slices.Steps(refresh=(0, 1), first_dense=0, most_bytes=2 * one, predict=predict, count=20)
    for step in range(3):
        for layer in range(2):
            steps(layer, step, "cond", *q)
    assert steps.memory_bytes == 2 * one
    message = (
        f"^most_bytes: expected at most {2 * one} bytes of kept lists, found {3 * one} with layer 2, branch 'cond'; 2"
    )
    with pytest.raises(PatternError, match=message):
        steps(2, 1, "cond", *q)


def test_kept_lists_that_did_not_fit_are_told(device):
    def predict(q, k):
        return slices.from_mask(mask_of([[[80, 1]] * 2], KEYS).to(device), ROWS, budget=0.5)

    steps = slices.Steps(refresh=(0,), first_dense=0, predict=predict)
    assert steps(0, 0, "cond", *tokens(device)).isnan().all()
    with pytest.raises(PatternError, match=r"^budget: expected at most 64 keys a group, found 80 in group 0 of head 1"):
        steps.check()


@pytest.mark.parametrize(
    "options,message",
    [
        ({"refresh": ()}, "refresh: expected at least one step at which lists are predicted, found none"),
        ({"refresh": (0, -1)}, "refresh: expected an integer of at least 0, found -1"),
        ({"first_dense": 0.1}, "first_dense: expected an integer of at least 0, found 0.1"),
        ({"dense_layers": -1}, "dense_layers: expected an integer of at least 0, found -1"),
        ({"most_bytes": -1}, "most_bytes: expected an integer from 0 to 9223372036854775807, found -1"),
        (
            {"shared": {"b": "a", "c": "b"}},
            "shared: expected branches that share lists of a branch with lists, found 'c' of 'b', which shares lists",
        ),
    ],
)
def test_settings_are_sensible(options, message):
    with pytest.raises(PatternError, match=f"^{message}$"):
        slices.Steps(**options)
