"""Where Triton's kernels are tested; the interpreter has to be asked for before a kernel is imported."""

import functools
import os
from pathlib import Path

import pytest
import torch


def hasten_interpreter():
    """Have Triton's interpreter replace the members of `triton.language` once a launch.

    It does so before a launch, which it takes back afterwards, and in each call of a function of the kernel in between,
    which then changes nothing and takes a third of the time.
    """
    from triton import language
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, set()

    @functools.cache
    def languages(function):
        return frozenset(id(x) for x in function.__globals__.values() if x is language or x is language.core)

    def replace_once(function):
        if languages(function) in replaced:
            return interpreter._LangPatchScope()
        scope = replace(function)
        replaced.add(languages(function))
        restore = scope.restore

        def restore_all():
            replaced.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = replace_once


TRITON_DEVICE = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
if TRITON_DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    hasten_interpreter()
HOPPER = TRITON_DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="Gluon has no interpreter, and this machine has no Hopper GPU")


def hide_gpu(monkeypatch):
    """Have torch find no GPU, also where there is one."""
    from tilewright import targets

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # Without what was found earlier.
    monkeypatch.setattr(targets, "_described", targets._described.__wrapped__)
