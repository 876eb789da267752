"""Code outside the folders of a device asks for what it can do, never for its name."""

import ast
from pathlib import Path

import pytest

from tilewright import devices

SOURCES = Path(devices.__file__).parents[2]


def compared(source):
    """Lines of Python `source` that compare something with the name of a device."""
    tree = ast.parse(source)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for side in ast.walk(node)
        if isinstance(side, ast.Constant) and side.value in devices.NAMES
    ]


@pytest.mark.parametrize("line", ['x == "cuda"', 'x.device.type != "cpu"', 'kind in ("cpu", "mps")'])
def test_a_comparison_with_a_name_is_found(line):
    assert compared(f"def f(x):\n    return {line}\n") == [2]


def test_no_module_outside_of_a_devices_folders_asks_for_one_by_name():
    paths = [path for path in SOURCES.rglob("*.py") if not {"devices", *devices.NAMES} & {path.stem, *path.parts}]
    found = [f"{path.relative_to(SOURCES)}:{line}" for path in paths for line in compared(path.read_text())]
    assert not found
