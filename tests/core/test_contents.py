import msgspec
import numpy as np
import pytest

from tilewright.core import contents
from tilewright.core.errors import ArtifactError


class Form(msgspec.Struct):
    size: contents.Size
    count: contents.Count = 0
    finite: contents.Finite = 0.0
    amount: contents.Amount = 0.0


@pytest.mark.parametrize(
    "document",
    [{"size": 1}, {"size": 2**31 - 1, "count": 0, "finite": -1e300, "amount": 3, "more": "is of no interest"}],
)
def test_fields_of_the_right_types_are_read(document):
    assert contents.fields("p", "graph", document, Form).size == document["size"]


@pytest.mark.parametrize(
    "document",
    [
        *({}, [], None, {"size": 0}, {"size": 2**31}, {"size": 1.5}, {"size": True}, {"size": "1"}, {"size": None}),
        *({"size": 1, "count": -1}, {"size": 1, "finite": float("nan")}, {"size": 1, "finite": float("inf")}),
        *({"size": 1, "finite": 10**400}, {"size": 1, "amount": -0.1}, {"size": 1, "amount": True}),
    ],
    ids=str,
)
def test_fields_of_other_types_are_refused(document):
    with pytest.raises(ArtifactError, match="p: expected a complete graph file, found: "):
        contents.fields("p", "graph", document, Form)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, r"expected the arrays \['a'\], found \[\]"),
        ({"a": np.zeros((2, 3)), "b": np.zeros(1)}, r"expected the arrays \['a'\], found \['a', 'b'\]"),
        ({"a": np.zeros((2, 3), np.float32)}, r"expected a: float64 \['any', 3\], found float32 \[2, 3\]"),
        ({"a": np.zeros((3, 2))}, r"expected a: float64 \['any', 3\], found float64 \[3, 2\]"),
        ({"a": np.zeros(3)}, r"found float64 \[3\]"),
        ({"a": np.zeros((2, 3), ">f8")}, "found >f8"),
    ],
)
def test_arrays_of_another_form_are_refused(arrays, message):
    contents.arrays("p", {"a": np.zeros((2, 3))}, a=(np.float64, None, 3))
    with pytest.raises(ArtifactError, match=f"p: .*{message}"):
        contents.arrays("p", arrays, a=(np.float64, None, 3))


@pytest.mark.parametrize("values", [[-1, 2], [0, 4], [np.nan, 1.0]])
def test_numbers_out_of_range_are_refused(values):
    contents.within("p", "a", np.array([0, 3]), 0, 3)
    contents.within("p", "a", np.zeros(0), 0, 3)
    with pytest.raises(ArtifactError, match=r"p: expected a: 0\.\.3, found "):
        contents.within("p", "a", np.array(values), 0, 3)


@pytest.mark.parametrize(
    "ptr",
    [[], [0], [1, 5], [0, 4], [0, 3, 2, 5], [0, 2, 2, 5], [0, 4, 5], [0, -(2**31), 5], [0, 2**31 - 1, 5]],
    ids=str,
)
def test_bounds_that_cut_otherwise_are_refused(ptr):
    contents.bounds("p", "a", np.array([0, 2, 5], np.int32), 5, 1, 3)
    with pytest.raises(ArtifactError, match=r"p: expected (steps of )?a: "):
        contents.bounds("p", "a", np.array(ptr, np.int32), 5, 1, 3)


@pytest.mark.parametrize("order", [[0, 0, 1], [1, 2, 3], [-1, 0, 1]], ids=str)
def test_what_is_no_permutation_is_refused(order):
    contents.permutation("p", "a", np.array([2, 0, 1]))
    contents.permutation("p", "a", np.zeros(0, int))
    with pytest.raises(ArtifactError, match="p: expected a: "):
        contents.permutation("p", "a", np.array(order))
