"""Where the package keeps what it may make again."""

import pytest

from tilewright.core import caches


@pytest.mark.parametrize("stated, found", [("/somewhere", "/somewhere"), ("", "/home/someone/.cache/tilewright")])
def test_caches_are_at_home_unless_told_otherwise(monkeypatch, stated, found):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("TILEWRIGHT_CACHE", stated)
    assert str(caches.folder()) == found
