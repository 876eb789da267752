"""Each private name of torch and Triton hidden in turn: what stands in for it does the same."""

import ast
import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch._C._dynamo.guards as guards
import triton
from torch._inductor import cpp_builder

import tilewright
from helpers import files
from tilewright.core import _internals

PACKAGE = Path(tilewright.__file__).parent
ATEN = "_scaled_dot_product_flash_attention_for_cpu"


class Lacking:
    """A namespace without some names."""

    def __init__(self, owner, *names):
        self._owner, self._names = owner, names

    def __getattr__(self, name):
        if name in self._names:
            raise AttributeError(name)
        return getattr(self._owner, name)


def loaded():
    """The module as it is loaded now."""
    return files.loaded(_internals.__file__)


def hidden(monkeypatch, owner, name):
    """The module as it is loaded where `owner` has no such name."""
    monkeypatch.delattr(owner, name, raising=False)
    return loaded()


def test_without_the_depth_of_modes_all_calls_are_watched(monkeypatch):
    assert _internals.dispatch_depth() == 0
    assert hidden(monkeypatch, torch._C, "_len_torch_dispatch_stack").dispatch_depth() == 1


def test_without_the_types_of_transforms_all_tensors_may_be_batched(monkeypatch):
    x, seen = torch.ones(2), []
    torch.vmap(lambda each: (seen.append(_internals.is_batched(each)), each)[1])(x)
    assert seen == [True] and not _internals.is_batched(x)
    assert hidden(monkeypatch, torch._C._functorch, "is_legacy_batchedtensor").is_batched(x)


def test_without_the_libraries_of_torch_threads_are_counted_by_torch(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError))
    for module in (_internals, loaded()):
        for n in (before + 1, before):
            module.use_threads(n)
            assert torch.get_num_threads() == n


def test_without_the_backward_of_softmax_it_is_written_out(monkeypatch):
    weights, grads = torch.randn(3, 5).softmax(-1), torch.randn(3, 5)
    module = hidden(monkeypatch, torch, "_softmax_backward_data")
    assert module._softmax_backward_data is None
    wanted = weights * (grads - (weights * grads).sum(-1, keepdim=True))
    for each in (module, _internals):
        taken = grads.clone()
        torch.testing.assert_close(each.softmax_backward(taken, weights), wanted)
        torch.testing.assert_close(taken, wanted)


def test_without_the_raw_stream_it_is_asked_for_in_public(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5 + index, raising=False)
    assert loaded().raw_stream(1) == 6
    module = hidden(monkeypatch, torch._C, "_cuda_getCurrentRawStream")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=7 + index))
    assert module.raw_stream(1) == 8


def test_without_memory_of_compiled_code_it_is_asked_for_in_public(monkeypatch):
    empty = hidden(monkeypatch, guards, "_empty_strided_cuda").empty_strided_cuda
    with torch._subclasses.FakeTensorMode():
        x = empty((2, 3), (1, 2), torch.float16)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (1, 2), torch.float16, "cuda")


DIFFERENT = {
    "shape": lambda x: x[:1],
    "strides": lambda x: x.T.contiguous().T,
    "dtype": lambda x: x.half(),
    "device": lambda x: x.to("meta"),
    "gradient": lambda x: x.clone().requires_grad_(),
    "type": torch.nn.Parameter,
}


@pytest.mark.parametrize("guarded", [True, False], ids=["guards", "stand-in"])
@pytest.mark.parametrize("case", DIFFERENT)
def test_tensors_are_compared_without_guards_as_with_them(monkeypatch, case, guarded):
    module = loaded() if guarded else hidden(monkeypatch, guards, "TensorGuards")
    x, y = torch.randn(2, 4, 5)
    same = module.same_tensors(x, y)
    assert same(x, y) and same(y.clone(), x)
    assert not same(x, DIFFERENT[case](y))


def test_without_the_cpus_operator_log_sum_exps_are_the_same(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 7, 8)
    mask = torch.zeros(1, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1) > 0, -torch.inf)
    expected = _internals.attention_with_lse(q, k, v, attn_mask=mask, scale=None)
    monkeypatch.setattr(torch.ops, "aten", Lacking(torch.ops.aten, ATEN))
    module = loaded()
    assert module.attention_with_lse is module.plain_attention_with_lse
    for one, other in zip(module.attention_with_lse(q, k, v, attn_mask=mask, scale=None), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
def test_a_baseline_whose_operator_is_missing_is_none(monkeypatch, backend):
    monkeypatch.setattr(torch.ops, "aten", Lacking(torch.ops.aten, f"_scaled_dot_product_{backend}_attention"))
    found = loaded().SDPA_BACKENDS
    assert [name for name in found if found[name] is None] == [backend]


def test_packed_attention_of_torch_may_be_missing(monkeypatch):
    assert _internals.packed_flash is not None
    monkeypatch.setattr(torch.ops, "aten", Lacking(torch.ops.aten, "_flash_attention_forward"))
    assert loaded().packed_flash is None


def test_without_its_limit_of_compilations_torch_goes_by_its_own(monkeypatch, caplog):
    config = torch._dynamo.config
    before = config.recompile_limit
    with _internals.recompile_limit(77):
        assert config.recompile_limit == 77
    monkeypatch.setattr(torch._dynamo, "config", SimpleNamespace())
    with _internals.recompile_limit(77):
        assert config.recompile_limit == before
    assert "its limit of compilations is not known" in caplog.text


def test_without_torchs_search_a_compiler_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.delattr(cpp_builder, "get_cpp_compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _internals.missing_compiler() == "none is installed"
    (tmp_path / "g++").touch(0o755)
    assert _internals.missing_compiler() is None


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


# Torch without any of them, when the package is imported.
RENAMED = """
import torch
import torch._C._dynamo.guards as guards
# What torch needs itself.
import torch._dynamo
import torch._inductor

hidden = [
    (guards, "TensorGuards"),
    (guards, "_empty_strided_cuda"),
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_cuda_getCurrentRawStream"),
]
kept = [(owner, name, owner.__dict__[name]) for owner, name in hidden if hasattr(owner, name)]
for owner, name, _ in kept:
    delattr(owner, name)

import tilewright.attention.plan
from tilewright.core import _internals

for owner, name, value in kept:
    setattr(owner, name, value)
assert _internals._TensorGuards is None and _internals.dispatch_depth() == 1
"""


@pytest.mark.skipif("INTERNALS_RENAMED" in os.environ, reason="these are the tests that it runs")
def test_the_package_does_without_internals_of_torch(tmp_path):
    (tmp_path / "renamed.py").write_text(RENAMED)
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    tests = Path(__file__).parents[1]
    tests = [tests / "devices/test_qkv.py", tests / "core/test_operators.py", "-k", "not watched"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "renamed", "-p", "no:cacheprovider", *map(str, tests)]
    environment = os.environ | {"PYTHONPATH": path, "INTERNALS_RENAMED": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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
