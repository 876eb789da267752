"""Public calls do not depend on what a process has set for torch: its default type and its default device."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch

import tilewright
from helpers import plans
from tilewright import ragged, reference, slices
from tilewright.targets.masks import Bias

ROOT = Path(tilewright.__file__).parent
# Experiments, trainings and commands have processes of their own, and those who measure draw as they please.
APART = {"study", "training", "commands", "baselines", "scenes"}
# What a factory takes from the process where the call does not state it.
TYPED = {"empty", "zeros", "ones", "full", "tensor", "rand", "randn", "linspace", "eye", "scalar_tensor"}
PLACED = TYPED | {"arange", "randint", "randperm", "as_tensor", "asarray", "tril_indices", "triu_indices"}
# Parameters of networks follow the defaults, as those of torch.nn do.
MARK = "# as of torch.nn"
N, H, D = 40, 2, 32
DENSE = plans.pattern(N, N, 0.4, empty=0)


def undetermined(path):
    """``line: call`` of each factory of torch in a file that does not say its type or device."""
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        stated = {keyword.arg for keyword in node.keywords}
        missing = {"dtype"} if node.func.attr in TYPED else set()
        missing |= {"device"} if node.func.attr in PLACED else set()
        of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        marked = any(MARK in line for line in lines[node.lineno - 1 : node.end_lineno])
        if of_torch and missing - stated and None not in stated and not marked:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_factories_state_their_type_and_device():
    paths = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] not in APART]
    assert len(paths) > 100
    assert not [call for path in paths for call in undetermined(path)]


def tokens(*shape, count=3):
    make = torch.Generator("cpu").manual_seed(0)
    shape = shape or (1, H, N, D)
    return [torch.randn(shape, generator=make, dtype=torch.float32, device="cpu") for _ in range(count)]


def trained(call, *leaves):
    """The result of a call, and its gradients."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = call(*leaves)
    return out, *torch.autograd.grad(out, leaves, torch.cos(out.detach()))


def planned(pattern=DENSE, bias=None, **options):
    plan = tilewright.plan(pattern, heads=H, head_dim=D, solver="greedy", split_keys=16, bias=bias, **options)
    if bias is None:
        return trained(plan, *tokens())
    values = bias.table if isinstance(bias, Bias) else bias
    return plan(*tokens()), *trained(lambda q, k, v, bias: plan(q, k, v, bias=bias), *tokens(), values + 1)


def packed():
    keep = torch.from_numpy(plans.pattern(3, 30, 0.5, empty=0))
    packing = ragged.pack(keep, 70)
    (x,) = tokens(3, 30, 8, count=1)
    found = packing.gather(x)
    rest = packing.scatter(found), packing.first(found), packing.pad(found, 30)
    return *trained(packing.attend, *tokens(70, H, D)), found, *rest, ragged.pack_lengths([3, 9, 1]).starts


def listed(**how):
    q, k, v = tokens(1, H, 256, 64)
    lists = slices.predict(q, k, budget=0.9, **how)
    part, rest = slices.attend(q, k, v, lists, lse=True), slices.rest(q, k, v, lists)
    return *part, *slices.merge(part, rest), slices.recall(q, k, lists), *slices.dense(q, k, v)


def flagged():
    mask = torch.from_numpy(plans.pattern(2, 256, 0.3, empty=0))
    return (slices.attend(*tokens(1, H, 256, 64), slices.from_mask(mask[None, None], 256, heads=H)),)


CALLS = {
    "plan": planned,
    "plan of a dense bias": lambda: planned(bias=tokens(H, N, N, count=1)[0]),
    "plan of a table": lambda: planned(bias=Bias(tokens(H, 9, count=1)[0], lambda rows, cols: (rows + 2 * cols) % 9)),
    "plan of heads, by a function": lambda: planned(lambda b, h, q, k: abs(q - k) <= 5 + 3 * h, shape=(N, N)),
    "plan that is tuned": lambda: planned(tune=True),
    "packed batch": packed,
    "lists by mass": lambda: listed(mass=0.8),
    "lists by blocks": lambda: listed(keep=0.3, by="blocks"),
    "lists of a mask": flagged,
    "oracle": lambda: (reference.attention(*tokens(), torch.from_numpy(DENSE)),),
}
STATES = {str(dtype): dtype for dtype in (torch.float64, torch.float16)} | {"meta": "meta", "autocast": None}


@contextlib.contextmanager
def state(of):
    before = torch.get_default_dtype()
    try:
        if isinstance(of, torch.dtype):
            torch.set_default_dtype(of)
            yield
        else:
            with torch.device(of) if of else torch.autocast("cpu", torch.bfloat16):
                yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_do_not_depend_on_the_defaults_of_torch(call):
    expected = call()
    for of in STATES.values():
        with state(of):
            found = call()
        for x, y in zip(found, expected, strict=True):
            assert (x.dtype, x.device) == (y.dtype, y.device)
            torch.testing.assert_close(x.detach(), y.detach(), rtol=1e-5, atol=1e-5)
