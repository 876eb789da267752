"""Where the package keeps what it may make again."""

import copy
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import pytest
import torch
from numba.core import caching

from tilewright.core import caches, compiled
from tilewright.networks import Plans
from tilewright.nn import attention as sparse


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


def below_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file" / "cache"))


def without_a_home(tmp_path, monkeypatch):
    monkeypatch.delenv("TILEWRIGHT_CACHE", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


def forbidden(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "another's"))

    def refuse(place, method):
        def checked(path, *arguments, **options):
            if "another's" in str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return method(path, *arguments, **options)

        monkeypatch.setattr(Path, place, checked)

    for name in ("is_file", "exists", "mkdir", "open", "stat"):
        refuse(name, getattr(Path, name))


@pytest.mark.parametrize("place", [below_a_file, without_a_home, forbidden])
def test_where_nothing_can_be_kept_one_warning_says_so_and_all_works(tmp_path, monkeypatch, caplog, place):
    monkeypatch.chdir(tmp_path)
    place(tmp_path, monkeypatch)
    caches._SAID.clear()
    sparse._SITES.clear()
    x = torch.randn(1, 17, 16)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for pattern in ("window-3-g1", "axial-g1"):
            layer = sparse.SparseAttention(16, 2, pattern, (4, 4), plans=Plans(solver="greedy"))
            whole = copy.deepcopy(layer)
            whole.attention = sparse.Patterned("full", 2, 8, 1)
            found, dense = layer(x), whole(x)
            # The special token sees all.
            torch.testing.assert_close(found[:, 0], dense[:, 0], atol=1e-5, rtol=1e-5)
    assert caplog.text.count("plans serve this process alone") == 1
    assert not (tmp_path / "~").exists()


def test_functions_are_compiled_where_numba_has_no_folder_for_them(monkeypatch, caplog):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(caching.FunctionCache._impl_class, "_locator_classes", [])
    compiled._say_unkept.cache_clear()

    def add(a, b):
        return a + b

    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(add)
    with caplog.at_level(logging.WARNING):
        assert [compiled.njit(cache=True)(add)(1, 2), compiled.njit("i8(i8, i8)", cache=True)(add)(3, 4)] == [3, 7]
    assert caplog.text.count("compiled functions serve this process alone: set NUMBA_CACHE_DIR") == 1
