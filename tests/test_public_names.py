"""The public names: a change of one is seen, and is meant. `python tests/test_public_names.py` writes the file anew."""

import importlib
import inspect
import re
from pathlib import Path

import tilewright
from tilewright import commands

FILE = Path(__file__).with_name("public_names.txt")
REFERENCE = (Path(__file__).parents[1] / "docs/reference.md").read_text()
STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def names():
    """Each public name with its parameters: those of `tilewright`, of the packages among them, of the reference and of
    the command line."""
    found = {}
    for name in tilewright.__all__:
        thing = getattr(tilewright, name)
        found[f"tilewright.{name}"] = thing
        found |= {f"tilewright.{name}.{own}": getattr(thing, own) for own in getattr(thing, "__all__", ())}
    for path, listed in re.findall(r"^::: (\S+)(?:\n    options: \{members: \[(.*)\]\})?$", REFERENCE, re.MULTILINE):
        module, _, name = path.rpartition(".")
        found[path] = getattr(importlib.import_module(module), name)
        found |= {f"{path}.{own}": getattr(found[path], own) for own in re.findall(r'"(\w+)"', listed)}
    lines = {f"{name}{parameters(thing)}" for name, thing in found.items()}
    return sorted(lines | {f"$ tilewright {name}" for name in commands.NAMES})


def parameters(thing):
    """The parameters of what can be called, without types and defaults."""
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, BaseException)):
        return ""
    stated = inspect.signature(thing).parameters.values()
    return f"({', '.join(STARS.get(p.kind, '') + p.name for p in stated)})"


def test_every_public_name_is_listed():
    found, listed = names(), FILE.read_text().splitlines()
    assert found == listed, (
        f"{sorted({*found} ^ {*listed})}: if it is meant, run {Path(__file__).name}, and say so in CHANGELOG"
    )


if __name__ == "__main__":
    FILE.write_text("\n".join(names()) + "\n")
