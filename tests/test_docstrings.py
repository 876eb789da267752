"""Docstrings of the public interface: numpydoc's sections, every parameter in them, and examples that run."""

import contextlib
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import tilewright

REFERENCE = (Path(__file__).parents[1] / "docs/reference.md").read_text()
# Users get them from functions. Errors have no parameters.
MADE = {
    "tilewright.attention.plan.Plan",
    "tilewright.neighborhood.plans.NeighborhoodPlan",
    "tilewright.packed.pack.Packing",
    "tilewright.core.errors",
}
SHOWN = re.findall(r"^::: (\S+)(?:\n    options: {members: \[(.*)\]})?$", REFERENCE, re.MULTILINE)
MEMBERS = [f"{name}.{member}" for name, members in SHOWN for member in re.findall(r'"(\w+)"', members)]
NAMES = [*(name for name, _ in SHOWN), *(name for name in MEMBERS if "core.errors" not in name)]


def found(name):
    """What a dotted name stands for: a function or a class of a module, a method, or a module."""
    thing, parts = tilewright, name.split(".")
    for n, part in enumerate(parts[1:], 2):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(".".join(parts[:n]))
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("name", sorted(set(NAMES) - MADE))
def test_every_parameter_is_described(name):
    thing = found(name)
    parameters = [p for p in inspect.signature(thing).parameters if p not in ("self", "args")]
    described = re.findall(r"^\s*((?:\*{0,2}\w+, )*\*{0,2}\w+)(?: : .+)?$", thing.__doc__, re.MULTILINE)
    known = {part.strip("* ") for names in described for part in names.split(",")}
    assert [p for p in parameters if p not in known] == []
    assert not parameters or re.search(r"^ *Parameters\n *-{10}$", thing.__doc__, re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in NAMES if ">>>" in (found(name).__doc__ or "")])
def test_examples_run(name):
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    for test in finder.find(found(name), name):
        assert runner.run(test).failed == 0
