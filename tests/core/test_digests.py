"""Digests of inputs and of code, versions of libraries."""

import hashlib

import numpy as np
import pytest

from tilewright.core import provenance


def test_digest_of_a_file_is_that_of_its_bytes(tmp_path):
    (tmp_path / "f").write_bytes(b"x" * 3_000_000)
    assert provenance.sha256_file(tmp_path / "f") == hashlib.sha256(b"x" * 3_000_000).hexdigest()


@pytest.mark.parametrize(
    "one, other",
    [
        ((np.zeros(4, np.int32),), (np.zeros(2, np.int64),)),
        ((np.zeros((2, 3)),), (np.zeros((3, 2)),)),
        ((np.arange(3),), (np.arange(3)[::-1],)),
        ((np.zeros(0),), ()),
        (("ab", "c"), ("a", "bc")),
        (("a", np.zeros(1)), (np.zeros(1), "a")),
    ],
    ids=["dtype", "shape", "values", "empty", "strings", "order"],
)
def test_digest_of_arrays_tells_apart(one, other):
    assert provenance.sha256_arrays(*one) != provenance.sha256_arrays(*other)


def test_digest_of_arrays_does_not_depend_on_memory_order():
    array = np.arange(12).reshape(3, 4)
    assert provenance.sha256_arrays(np.asfortranarray(array)) == provenance.sha256_arrays(array)


def test_versions_name_what_is_absent():
    assert provenance.versions("numpy", "no-such-distribution") == {
        "numpy": np.__version__,
        "no-such-distribution": None,
    }


def test_digests_of_code_follow_the_sources(tmp_path, monkeypatch):
    root = tmp_path / "tilewright"
    (root / "core").mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(root / "core/provenance.py"))

    def digest(text):
        (root / "one.py").write_text(text)
        provenance.package_digest.cache_clear()
        return provenance.package_digest()

    try:
        assert digest("VALUE = 1\n") == digest("VALUE = 1\n") != digest("VALUE = 2\n")
    finally:
        provenance.package_digest.cache_clear()
