import pytest
import torch
from torch import library
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.core import operators
from tilewright.core.errors import ArtifactError


class Doubling:
    """A plan as the operator sees it."""

    def __init__(self, digest="doubling"):
        self._digest = digest

    def digest(self):
        return self._digest

    def run(self, q, k, v, ordered, bias=None):
        return q * 2 if ordered else q + k + v

    def like_result(self, q, k, v, bias=None):
        return torch.empty_like(q)


@pytest.fixture
def plan():
    return Doubling()


def test_the_operator_calls_the_plan_of_a_digest(plan):
    q, k, v = torch.randn(3, 4)
    operators.register(plan)
    assert torch.equal(torch.ops.tilewright.attend(q, k, v, "doubling", True), q * 2)
    assert torch.equal(torch.ops.tilewright.attend(q, k, v, "doubling", False), q + k + v)


def test_the_operator_is_well_formed(plan):
    q, k, v = torch.randn(3, 4)
    operators.register(plan)
    arguments = (q, k, v, plan.digest(), True)
    library.opcheck(torch.ops.tilewright.attend.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_plan_that_is_gone_is_named():
    q, k, v = torch.randn(3, 4)
    operators.register(Doubling("gone"))
    with pytest.raises(
        ArtifactError, match=r"the plan gone, which is not loaded: .*load\(path\) first, and keep the plan"
    ):
        torch.ops.tilewright.attend(q, k, v, "gone", True)


def test_a_plan_stands_for_an_equal_one_that_is_gone():
    q, k, v = torch.randn(3, 4)
    plans = [Doubling("equal") for _ in range(2)]
    assert len({operators.register(plan) for plan in plans}) == 2
    for _ in range(2):
        assert torch.equal(torch.ops.tilewright.attend(q, k, v, "equal", True), q * 2)
        plans.pop(0)
    with pytest.raises(ArtifactError, match="the plan equal, which is not loaded"):
        torch.ops.tilewright.attend(q, k, v, "equal", True)


def test_what_is_traced_or_compiled_is_watched():
    seen = []

    def call(x):
        seen.append(operators.watched(x))
        return x + 1

    x = torch.ones(2)
    call(x)
    make_fx(call)(x)
    call(torch.nn.Parameter(x))
    assert seen == [False, True, False]
    assert torch.compile(lambda x: x + operators.watched(x), fullgraph=True, backend="eager")(x).sum() == 4
