"""Private names of torch and Triton: what they do, and what stands in where a build lacks one."""

import ast
import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import triton

import tilewright
from helpers import files
from tilewright.core import _internals

PACKAGE = Path(tilewright.__file__).parent


def loaded():
    """The module as it is loaded now."""
    return files.loaded(_internals.__file__)


def hidden(monkeypatch, owner, name):
    """The module as it is loaded where `owner` has no such name."""
    monkeypatch.delattr(owner, name, raising=False)
    return loaded()


def test_tensors_under_vmap_may_stand_for_several():
    x, seen = torch.ones(2), []
    torch.vmap(lambda each: (seen.append(_internals.is_batched(each)), each)[1])(x)
    assert seen == [True] and not _internals.is_batched(x)


def test_the_backward_of_softmax_is_written_over_the_gradients():
    weights, grads = torch.randn(3, 5).softmax(-1), torch.randn(3, 5)
    wanted = weights * (grads - (weights * grads).sum(-1, keepdim=True))
    torch.testing.assert_close(_internals.softmax_backward(grads, weights), wanted)
    torch.testing.assert_close(grads, wanted)


def test_without_the_libraries_of_torch_threads_are_counted_by_torch(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError))
    for module in (_internals, loaded()):
        for n in (before + 1, before):
            module.use_threads(n)
            assert torch.get_num_threads() == n


def test_without_the_raw_stream_it_is_asked_for_in_public(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5 + index, raising=False)
    assert loaded().raw_stream(1) == 6
    module = hidden(monkeypatch, torch._C, "_cuda_getCurrentRawStream")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=7 + index))
    assert module.raw_stream(1) == 8


DIFFERENT = {
    "shape": lambda x: x[:1],
    "strides": lambda x: x.T.contiguous().T,
    "dtype": lambda x: x.half(),
    "device": lambda x: x.to("meta"),
    "gradient": lambda x: x.clone().requires_grad_(),
    "type": torch.nn.Parameter,
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_tensors_are_compared_by_all_that_a_call_depends_on(case):
    x, y = torch.randn(2, 4, 5)
    same = _internals.same_tensors(x, y)
    assert same(x, y) and same(y.clone(), x)
    assert not same(x, DIFFERENT[case](y))


@pytest.mark.parametrize("name", ["launch_pdl", "arg_annotations"])
def test_a_launcher_without_what_it_is_known_for_is_not_called(monkeypatch, caplog, name):
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    facts = dict.fromkeys(
        ("launch", "launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature"), False
    )
    run = SimpleNamespace(**facts, global_scratch_size=0, profile_scratch_size=0)
    compiled = SimpleNamespace(run=run, function=1, packed_metadata=())
    assert _internals.triton_launcher(compiled, (1, 1, 1), 0) is not None
    delattr(run, name)
    assert _internals.triton_launcher(compiled, (1, 1, 1), 0) is None
    assert f"no attribute '{name}'; calls take longer" in caplog.text


def private_names(source):
    """Names of torch and Triton with a leading underscore that Python `source` uses."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        found += [name for name in names if re.match(r"(torch|triton|tl|aten)\b.*\._(?!_)", name)]
    return found


def test_no_other_module_uses_private_names():
    assert private_names("import torch\nfrom torch._C import x\naten._call()") == ["torch._C.x", "aten._call"]
    used = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if (names := private_names(path.read_bytes()))
    }
    assert set(used) == {"core/_internals.py"}, used


class Counted:
    """A module that asks for what must not be traced."""

    def __init__(self):
        self.seen = []

    @_internals.uncompiled
    def apart(self, x):
        self.inner(x)
        return x + 1

    def inner(self, x):
        self.seen.append(torch.compiler.is_compiling())

    @_internals.constant
    def known(self):
        self.seen.append("constant")
        return len(str(self.seen)) * 0 + 3

    def __call__(self, x):
        return self.apart(x * 2) * self.known()


@pytest.mark.filterwarnings("error")
def test_what_is_not_to_be_compiled_runs_eagerly_between_two_graphs():
    made, x, graphs = Counted(), torch.ones(3), []
    torch._dynamo.reset()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(made, backend=backend)
    for n in (3, 4, 5):
        # Other sizes are no other graphs of the function apart: none is made of it.
        torch.testing.assert_close(compiled(torch.ones(n)), torch.full((n,), 9.0))
    assert made.seen.count("constant") >= 1 and [each for each in made.seen if each != "constant"] == [False] * 3
    names = [node.target.__name__ for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert {*names} == {"mul"} and made(x)[0] == 9
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(made, backend=backend, fullgraph=True)(x)
