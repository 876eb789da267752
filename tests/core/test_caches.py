"""Where the package keeps what it may make again."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tilewright.core import caches


@pytest.mark.parametrize("stated, found", [("/somewhere", "/somewhere"), ("", "/home/someone/.cache/tilewright")])
def test_caches_are_at_home_unless_told_otherwise(monkeypatch, stated, found):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("TILEWRIGHT_CACHE", stated)
    assert str(caches.folder()) == found


def test_the_oldest_values_are_forgotten():
    recent = caches.Recent(3, 2)
    for i in range(1000):
        recent.add(i // 10, i)
    assert recent.items() == [(97, (978, 979)), (98, (988, 989)), (99, (998, 999))]
    assert recent.get(99) == (998, 999) and recent.get(5) == ()


def test_threads_share_what_is_recent():
    recent = caches.Recent(2, 2)

    def work(thread):
        for i in range(2000):
            recent.add(i % 5, thread)
            assert len(recent.items()) <= 2 and len(recent.get(i % 5)) <= 2
        return thread

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == [0, 1, 2, 3]
    finally:
        sys.setswitchinterval(interval)
