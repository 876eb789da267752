"""What the kernels are called: by a profiler, and by each other."""

import ast
from functools import cache
from pathlib import Path

import tilewright

FOLDER = Path(tilewright.__file__).parent


@cache
def sources():
    """Modules of kernels and of what launches them, by their paths."""
    return {str(path.relative_to(FOLDER)): ast.parse(path.read_text()) for path in FOLDER.glob("*/cuda/**/*.py")}


def launched(tree):
    """Names of the kernels that a module takes from those of kernels, to launch them."""
    owners = {
        "map_kernels", "kernels", "packed_kernels", "code_kernels", "slice_kernels", "selection_kernels", "warp_kernel",
        "tile_kernel",
    }  # fmt: skip
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return {node.attr for node in found if node.value.id in owners and node.attr.islower()}


def test_kernels_take_public_pieces_of_each_other():
    names = [
        f"{module}: {node.module}.{alias.name}"
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tilewright")
        for alias in node.names
    ]
    assert [name for name in names if "._" in name and not name.endswith(" tilewright.core._internals")] == []


def test_a_profiler_shows_whose_kernels_they_are():
    kernels = set().union(*map(launched, sources().values()))
    assert {"tilewright_tile_attention", "tilewright_packed_attention", "tilewright_gather_rows"} < kernels
    assert {"tilewright_slice_attention", "tilewright_list_keys", "tilewright_rank_groups"} < kernels
    assert "tilewright_slice_attention_by_warps" in kernels
    assert all(name.startswith("tilewright_") for name in kernels), kernels
