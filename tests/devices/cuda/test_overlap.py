"""Launches that overlap: what kernels do before they wait for the one ahead, as compiled for Hopper."""

import re
from types import SimpleNamespace

import pytest
import torch

from helpers.cases import rest_slow
from helpers.hopper import compiled
from tilewright.devices.cuda import overlap
from tilewright.networks.cuda import linear_kernels, map_kernels

PRODUCT = {"CHANNELS": 128, "BLOCK_N": 64, "PRECISION": "tf32"}
# Rows in one piece, of which all weights may be loaded before, and in several.
WHOLE, PARTS = PRODUCT | {"BLOCK_M": 16, "BLOCK_K": 128}, PRODUCT | {"BLOCK_M": 64, "BLOCK_K": 64}
HEADS = {"HEADS": 2, "WIDTH": 64, "BLOCK_D": 64}
NORM = {"CHANNELS": 320, "SUMMANDS": 4, "BLOCK_M": 4, "BLOCK_K": 512}
DECODE = {
    "CLASSES": 21, "CHANNELS": 256, "FIRST": 32, "BLOCK_C": 64, "BLOCK_F": 32, "BLOCK_K": 16, "REST_K": 16,
    "PRECISION": "tf32", "U_WIDE": 9, "V_WIDE": 5, "W_WIDE": 3,
}  # fmt: skip
GATHERED = DECODE | {"BLOCK_Y": 1, "BLOCK_X": 64, "U_TAPS": 0, "V_TAPS": 0, "W_TAPS": 0}
SPREAD = DECODE | {"BLOCK_Y": 8, "BLOCK_X": 8, "U_TAPS": 32, "V_TAPS": 16, "W_TAPS": 16}
PATCHES = PRODUCT | {"SIDE": 3, "STRIDE": 2, "SUMMANDS": 2, "BLOCK_M": 32, "BLOCK_K": 64}
OF_NORM = {"gain_ptr", "offset_ptr"}
# Kernel, constants, its loads that come before it waits, and options.
CASES = [
    ("dwconv_gelu", {"BLOCK_Y": 4, "BLOCK_M": 8, "BLOCK_C": 64}, {"weight_ptr", "bias_ptr"}, {}),
    ("decode", GATHERED, set(), {"num_warps": 8}),
    ("decode", SPREAD, set(), {"num_stages": 3}),
    ("norm", NORM, {"shift_ptr", *OF_NORM}, {}),
    ("norm", NORM | {"shift_ptr": None}, OF_NORM, {}),
    ("norm_linear", WHOLE | {"SUMMANDS": 2}, {"shift_ptr", "weight_ptr", "bias_ptr", *OF_NORM}, {}),
    ("norm_linear", PARTS | {"SUMMANDS": 1, "shift_ptr": None}, {"bias_ptr"}, {}),
    ("norm_patches", WHOLE | {"STEP": 8, "SUMMANDS": 32}, {"weight_ptr", *OF_NORM}, {}),
    ("patches", PATCHES | {"WHOLE": True}, set(), {"num_stages": 3}),
    ("norm_attention", WHOLE | HEADS, {"weight_ptr", "bias_ptr", *OF_NORM}, {"num_stages": 3}),
    ("norm_attention", PARTS | HEADS, {"bias_ptr"}, {"num_stages": 3}),
    ("linear_add", PARTS, {"bias_ptr"}, {"num_stages": 4}),
]  # fmt: skip
WAIT, NEXT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
FLOATS = {"eps": "fp32", "scale": "fp32"}


def module(name):
    return next(each for each in (map_kernels, linear_kernels) if hasattr(each, f"tilewright_{name}"))


def ptx_of(name, constants, options, on=True):
    options = options | {"launch_pdl": True} if on else options
    constants = constants | {"OVERLAP": on}
    return compiled(module(name).__name__, f"tilewright_{name}", constants, FLOATS, **options)


def read(lines, arguments):
    """Arguments at whose addresses these lines load: each register depends on what it was computed of."""
    known, found = {}, set()
    for line in lines:
        if (match := re.search(r"ld\.param\S*\s+(%\w+), \[\w+_param_(\d+)\]", line)) is not None:
            at = int(match[2])
            known[match[1]] = {arguments[at]} if at < len(arguments) else set()
        elif ".global" in line:
            (address,) = re.findall(r"\[ *(%\w+)(?: \+ \d+)? *\]", line)[-1:]
            found |= {each for each in known.get(address, {"unknown"}) if each.endswith("ptr") or each == "unknown"}
        elif registers := re.findall(r"%\w+", line):
            # What is loaded is not followed: no address depends on it.
            known[registers[0]] = set().union(*(known.get(each, set()) for each in registers[1:]))
    return found


# Without a shift, other parts and other ways of reading are the same code before it.
@pytest.mark.parametrize(
    "name, constants, early, options",
    rest_slow(CASES, 0, 1, 3, 5, 6, 7, 8, 9, 11),
    ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)],
)
def test_a_kernel_reads_nothing_but_weights_before_it_waits(name, constants, early, options):
    made = ptx_of(name, constants, options)
    lines = [line.split("//")[0].strip() for line in made.ptx[made.ptx.index("%bb.0") :].splitlines()]
    (at,) = [number for number, line in enumerate(lines) if WAIT in line]
    before, after = lines[:at], "\n".join(lines[at:])
    # All programs wait: they have not left, and nothing jumps over it.
    assert lines[at].startswith(WAIT) and not [line for line in before if re.search(r"\b(bra|ret|exit|call)\b", line)]
    assert not [line for line in before if re.search(r"\b(st|red|atom)\.(global|b|v)|\.bulk", line)]
    assert read(before, made.arguments) == early
    # Before it lets the next one come.
    assert after.count(NEXT) == made.ptx.count(NEXT) == 1
    assert "st.global" in after and made.spilled == [0, 0]


def test_all_kernels_of_maps_are_looked_at():
    kernels = {name for each in (map_kernels, linear_kernels) for name in vars(each) if name.startswith("tilewright_")}
    # The copy of a call's images is launched on its own, before all others.
    assert kernels == {f"tilewright_{name}" for name, *_ in CASES} | {"tilewright_copy"}


def test_a_launch_as_usual_neither_waits_nor_signals():
    name, constants, _, options = CASES[0]
    assert "griddepcontrol" not in ptx_of(name, constants, options, on=False).ptx


def test_launches_overlap_on_hopper_alone(monkeypatch):
    overlapped = {"OVERLAP": True, "launch_pdl": True}
    capability = {"a": (9, 0), "b": (8, 9), "c": (10, 0)}
    weight = torch.zeros(4, 4)

    def options(device, *early):
        return overlap.options(SimpleNamespace(is_cuda=True, device=device), *early)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability.get)
    monkeypatch.setattr(overlap.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(overlap, "_able", overlap._able.__wrapped__)
    assert overlap.options(weight) == options("b") == {"OVERLAP": False}
    assert options("a") == options("c") == options("a", weight, None) == overlapped
    # A copy is made by the kernel ahead.
    assert options("a", weight, weight.T[:2].T) == {"OVERLAP": False}
    monkeypatch.setattr(overlap.triton.knobs.runtime, "interpret", True)
    assert options("a") == {"OVERLAP": False}
