"""What may import what: operators stand side by side on devices, the study outside of the wheel."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import tilewright

SOURCES = Path(tilewright.__file__).parents[1]
# From the ground up: a part imports those before it, and of its own floor itself alone.
FLOORS = (
    ("core",),
    ("graph", "milp"),
    ("reference",),
    ("devices",),
    ("neighborhood",),
    ("masks",),
    ("torch_attention",),
    ("attention",),
    ("packed",),
    ("slices",),
    ("networks",),
    ("nn",),
    ("integrations",),
    ("paths",),
    ("pushmem",),
    ("commands",),
)
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
# Arrows that go up, and why.
UPWARD = {}


@cache
def module_of(path):
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_of(path): path for path in sorted(SOURCES.glob("tilewright*/**/*.py"))}


@cache
def imports(module):
    """Modules that a module imports anywhere in its text; a package for what its ``__init__`` holds."""
    found = set()
    for node in ast.walk(ast.parse(PATHS[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in PATHS else node.module)
    return frozenset((found & PATHS.keys()) - {module})


def part_of(module):
    """``tilewright.slices.layout`` is of the part ``slices``."""
    return module.split(".")[1] if "." in module else ""


def test_the_wheel_does_not_know_the_study():
    found = [(name, other) for name in PATHS for other in imports(name)]
    assert [pair for pair in found if not pair[0].startswith("tilewright_study") and "_study" in pair[1]] == []


@pytest.mark.parametrize("part", [part for floor in FLOORS for part in floor])
def test_a_part_imports_those_below_it(part):
    wrong = set()
    for name in PATHS:
        if name.startswith("tilewright.") and part_of(name) == part:
            above = {other for other in imports(name) if other.startswith("tilewright.") and part_of(other) != part}
            wrong |= {(name, other) for other in above if FLOOR_OF[part_of(other)] >= FLOOR_OF[part]}
    assert wrong - UPWARD.keys() == set()


def test_every_part_has_a_floor():
    assert {part_of(name) for name in PATHS if name.startswith("tilewright.")} == FLOOR_OF.keys() | {"__main__"}
    assert len(UPWARD) <= 3


def test_push_memories_know_patterns_alone_of_attention():
    found = {other for name in PATHS if part_of(name) == "pushmem" for other in imports(name)}
    assert {part_of(other) for other in found if other.startswith("tilewright.")} <= {"core", "graph", "pushmem"}


def test_configuration_by_examples_knows_no_memory():
    inside = [name for name in PATHS if name.startswith("tilewright.pushmem.configure")]
    found = {other for name in inside for other in imports(name)}
    assert {other for other in found if part_of(other) != "core"} <= {*inside}


def circles():
    """Groups of modules that import one another, by Tarjan."""
    index, low, stack, found = {}, {}, [], []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(imports(name)):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(group)

    for name in PATHS:
        if name not in index:
            visit(name)
    return found


def test_no_modules_import_one_another():
    assert circles() == []


def test_files_of_tests_have_names_of_their_own():
    # Of two with one name pytest refuses the second.
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


NAMES = """
import sys
import tilewright as tw

assert not {"torch", "numpy", "numba", "highspy"} & sys.modules.keys()
named = {"plan", "load", "slices", "paths", "ragged", "integrations", "nn", "models", "networks", "neighborhood"}
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
        "Plan TilewrightError tilewright.core.errors fold tilewright.integrations load tilewright.networks "
        "tilewright.neighborhood tilewright.networks tilewright.nn tilewright.paths plan "
        "tilewright.packed.pack tilewright.slices",
        "module 'tilewright' has no attribute 'plans'",
    ], done.stderr


PLANNED = """
import sys
import torch
import tilewright as tw
from tilewright.devices.cuda import facts

near = (torch.arange(64)[:, None] - torch.arange(64)).abs() <= 8
q, k, v = torch.randn(3, 1, 2, 64, 8)
tw.plan(near, heads=2, head_dim=8)(q, k, v)
print(sorted({"numba", "triton", "scipy.optimize", "matplotlib"} & sys.modules.keys()))
facts.describe = lambda: {
    **{"kind": "cuda", "name": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132, "l2_bytes": 62914560},
    **{"shared_bytes": 232448, "registers": 65536, "memory_bytes": 150e9, "driver": "", "launch_us": 1.2},
    "versions": {"torch": "", "triton": ""},
}
for pattern in near, near[:1].expand(64, 64):
    tw.plan(pattern, heads=2, head_dim=64, device="cuda")
print(sorted({"numba", "scipy.optimize", "matplotlib"} & sys.modules.keys()))
tw.nn.SparseAttention(16, 2, "window-3-g0", (8, 8))(torch.randn(1, 64, 16))
net = tw.networks.create("vision_longformer", variant="tiny", image_size=224, attention="tilewright")
net(torch.randn(1, 3, 224, 224))
assert tw.integrations and tw.ragged and tw.slices and tw.paths
print(sorted({"torch._dynamo", "torch._inductor", "sympy"} & sys.modules.keys()))
"""


def test_windows_are_planned_without_numba_and_what_runs_eagerly_loads_no_compiler():
    done = subprocess.run([sys.executable, "-c", PLANNED], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n[]\n[]\n", done.stderr


# Wings whose public functions and methods say the types of all that they take and give.
TYPED = (
    *("core", "graph", "milp", "reference", "devices", "masks", "packed", "torch_attention", "nn", "integrations"),
    *("attention", "networks", "paths", "slices", "commands", "pushmem", "neighborhood"),
)


def public(body, methods=False):
    """Public functions of a module or class, those of its public classes included; kernels have none but pointers."""
    for node in body:
        if isinstance(node, ast.FunctionDef) and "jit" not in " ".join(map(ast.unparse, node.decorator_list)):
            if not node.name.startswith("_") or node.name.endswith("__"):
                yield node, methods and "staticmethod" not in map(ast.unparse, node.decorator_list)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node.body, methods=True)


def untyped(function, bound):
    """Parameters without a type, but for ``self``, and ``return`` where the result has none."""
    taken = function.args
    named = (taken.posonlyargs + taken.args)[bound:] + taken.kwonlyargs + [taken.vararg, taken.kwarg]
    found = [one.arg for one in named if one is not None and one.annotation is None]
    return found + ["return"] * (function.returns is None and function.name != "__init__")


@pytest.mark.parametrize("wing", TYPED)
def test_public_functions_of_a_wing_say_their_types(wing):
    found = {}
    for name, path in PATHS.items():
        if name.startswith("tilewright.") and part_of(name) == wing:
            for function, bound in public(ast.parse(path.read_text()).body):
                if missing := untyped(function, bound):
                    found[f"{name}.{function.name}"] = missing
    assert found == {}
