import pytest
import torch
from torch import library
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright import operators
from tilewright.errors import ArtifactError


class Doubling:
    """A plan as the operator sees it."""

    def run(self, q, k, v, ordered):
        return q * 2 if ordered else q + k + v

    def like_result(self, q, k, v):
        return torch.empty_like(q)


@pytest.fixture
def plan():
    return Doubling()


def test_the_operator_calls_the_plan_of_its_number(plan):
    q, k, v = torch.randn(3, 4)
    handle = operators.register(plan)
    assert torch.equal(torch.ops.tilewright.attend(q, k, v, handle, True), q * 2)
    assert torch.equal(torch.ops.tilewright.attend(q, k, v, handle, False), q + k + v)


def test_the_operator_is_well_formed(plan):
    q, k, v = torch.randn(3, 4)
    arguments = (q, k, v, operators.register(plan), True)
    library.opcheck(torch.ops.tilewright.attend.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_plan_that_is_gone_is_named():
    q, k, v = torch.randn(3, 4)
    handle = operators.register(Doubling())
    with pytest.raises(ArtifactError, match="a plan that is gone: keep the plan"):
        torch.ops.tilewright.attend(q, k, v, handle, True)


def test_what_is_traced_or_compiled_is_watched():
    seen = []

    def call(x):
        seen.append(operators.watched(x))
        return x + 1

    x = torch.ones(2)
    call(x)
    make_fx(call)(x)
    call(torch.nn.Parameter(x))
    assert seen == [False, True, True]
    assert torch.compile(lambda x: x + operators.watched(x), fullgraph=True, backend="eager")(x).sum() == 4
