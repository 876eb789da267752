"""Which rooms of the package may import which others."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tilewright

ROOT = Path(tilewright.__file__).parent


def imports(path):
    """Dotted names that a file of the package imports, anywhere in its text."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: expected absolute imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms(path):
    """The rooms, or loose modules, of the package that a file imports."""
    names = (name.split(".") for name in imports(path))
    return {parts[1] for parts in names if parts[0] == "tilewright" and len(parts) > 1}


def files(room):
    found = list((ROOT / room).rglob("*.py"))
    assert found, room
    return found


@pytest.mark.parametrize("path", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in sorted(ROOT.rglob("*.py"))])
def test_only_the_study_and_the_commands_import_baselines_and_the_study(path):
    room = path.relative_to(ROOT).parts[0]
    all_of_them = {"study", "baselines"}
    allowed = {"study": all_of_them, "commands": all_of_them, "baselines": {"baselines"}}.get(room, set())
    assert rooms(path) & {"study", "baselines"} <= allowed


def test_the_core_imports_nothing_else_of_the_package():
    assert set().union(*map(rooms, files("core"))) <= {"core"}


def test_nothing_but_the_entry_imports_the_commands():
    importing = {path.name for path in ROOT.rglob("*.py") if "commands" in rooms(path)} - {
        path.name for path in files("commands")
    }
    assert importing == {"__main__.py"}


def test_configuration_by_examples_knows_no_memory():
    assert set().union(*map(rooms, files("configure"))) <= {"configure", "core"}


def test_pruners_do_not_import_networks():
    assert "networks" not in set().union(*map(rooms, files("pruners")))


def test_files_of_tests_have_names_of_their_own():
    # Of two with one name pytest refuses the second.
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


NAMES = """
import sys
import tilewright as tw

assert not {"torch", "numpy", "numba", "highspy"} & sys.modules.keys()
named = {"plan", "load", "slices", "paths", "ragged", "integrations", "nn", "models", "networks"}
assert named <= {*dir(tw)} & {*tw.__all__}
assert tw.integrations.sdpa and tw.integrations is sys.modules["tilewright.integrations"]
print(*(getattr(tw, name).__name__ for name in sorted(tw.__all__) if not name.startswith("__")))
try:
    tw.plans
except AttributeError as error:
    print(error)
"""


def test_all_that_is_public_is_there_after_the_import_and_none_of_it_before():
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "Plan TilewrightError tilewright.core.errors tilewright.integrations load tilewright.masks "
        "tilewright.networks tilewright.nn tilewright.paths plan tilewright.packed.pack tilewright.slices",
        "module 'tilewright' has no attribute 'plans'",
    ], done.stderr
