"""Every kernel of slice lists once, on few tokens, each result checked: what a tool that watches memory and races runs.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --target-processes application-only --tool memcheck python benchmarks/slice_kernels.py
    compute-sanitizer --target-processes application-only --tool racecheck python benchmarks/slice_kernels.py
    TRITON_INTERPRET=1 python benchmarks/slice_kernels.py        no GPU: whether it runs at all

Without torch's cache each tensor is an allocation of its own, beyond whose end a tool sees. A kernel that was not
launched is an error: a new one has to be called here, too.

racecheck reports what the compiler adds to the kernel with warps of different tasks: both sides of each report are in
the lines of its ``def`` and of its ``warp_specialize``. It does so of ``warp_roles.py``, which cannot race.
"""

import argparse
import sys
from dataclasses import replace

import torch
from triton.runtime.errors import OutOfResources

from tilewright import reference, slices
from tilewright.slices import measures, operators, prediction
from tilewright.targets.cuda import (
    slice_code_kernels,
    slice_config,
    slice_kernels,
    slice_selection,
    slice_selection_kernels,
)
from tilewright.targets.cuda.slice_forms import device_facts
from tilewright.targets.cuda.slices import Executor

# Tokens that fill neither the last group, nor the last step of keys, nor the last word of bits.
TOKENS, HEADS, TEXT = 300, 2, (5, 9)
PREDICTORS = (
    {"by": "pooled", "pool": 128},
    {"by": "pooled", "pool": 32},
    {"by": "column", "criterion": "mean"},
    {"by": "column", "criterion": "max", "sample": 32},
    {"by": "blocks", "block": 64, "width": 64},
    {"by": "random"},
)
RULES = ({"mass": 0.9}, {"keep": 0.3}, {"threshold": 1e-3})
# Queries of a group, and keys that are listed together.
GROUPS = ((128, 1), (64, 1), (16, 1), (128, 64))
# Every row of so many is checked.
STRIDE = 37


def kernels():
    """``{name: kernel}`` of all that lists are made and attended to with on this device."""
    modules = [slice_code_kernels, slice_kernels, slice_selection_kernels]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= slice_config.HOPPER:
        from tilewright.targets.cuda import slice_warp_kernel

        modules.append(slice_warp_kernel)
    return {name: x for module in modules for name, x in vars(module).items() if name.startswith("tilewright_")}


def counted(launched):
    """Have each kernel note its name in the set `launched` as it is launched."""
    for name, kernel in kernels().items():

        def noting(*arguments, run=kernel.run, name=name, **options):
            launched.add(name)
            return run(*arguments, **options)

        kernel.run = noting


def predicted(q, k):
    """Yield ``(what, lists)`` of each way to make lists."""
    for setting in PREDICTORS:
        for rule in RULES:
            yield f"{setting} {rule}", slices.predict(q, k, **setting, **rule, budget=1.0)
    yield "beside text", slices.predict(q, k, mass=0.9, budget=1.0, text=TEXT, always=[(20, 40)])

    def near(b, h, query, key):
        return (query - key).abs() < 90

    yield "given", slices.predict(q, k, by="given", mask=near, budget=1.0)
    shape = TOKENS, TOKENS
    made = slices.from_mask_mod(near, shape, heads=HEADS, budget=1.0, device=q.device)
    yield "from a mask", made
    yield "packed", slices.unpack(made.pack(), made.layout)


def forms(layout, q):
    """Forms of attention: the default, one of each kind of kernel, and the plain kernel with each of its options."""
    facts = device_facts(q.device)
    first, *others = slice_config.candidates(layout.rows, q.shape[-1], q.dtype, *facts)
    plain = slice_config.plain(layout.rows, q.shape[-1], q.dtype, facts[1])
    kinds = {(form.by_warps, form.loose): form for form in others}
    options = ({"ahead": True}, {"k_columns": True}, {"slack": 8})
    return [*dict.fromkeys((first, *kinds.values(), *(replace(plain, **option) for option in options)))]


def error(lists, out, q, k, v):
    """Relative error over the tolerance of some rows of attention by lists."""
    rows = torch.arange(0, q.shape[2], STRIDE, device=q.device)
    expected = measures.attention_rows(lists, rows, q, k, v).cpu()
    return reference.relative_error(out[:, :, rows].cpu(), expected) / reference.TOLERANCE[q.dtype]


def main():
    """Run everything; returns how many results were wrong, and kernels that did not run."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Under the interpreter it is these kernels that run, too.
    operators.EXECUTORS[device] = Executor.__module__
    prediction.SELECTIONS[device] = slice_selection.__name__
    launched, wrong = set(), []
    counted(launched)
    torch.manual_seed(0)
    for head_dim in (64, 128):
        shape = 1, TOKENS, HEADS, head_dim
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        q, k, v = (torch.randn(shape, device=device).to(dtype).transpose(1, 2) for _ in range(3))
        for what, lists in predicted(q, k):
            print(head_dim, what, flush=True)
            lists.check(allow_empty=True)
        for rows, width in GROUPS:
            lists = slices.predict(q, k, pool=16, keep=0.4, budget=0.6, rows=rows, width=width)
            for form in forms(lists.layout, q):
                print(head_dim, f"{rows}x{width}", form, flush=True)
                executor = Executor(lists.layout, q.device, form)
                try:
                    out, _ = executor.attend(lists.tensors, q, k, v, scale=head_dim**-0.5, with_lse=True)
                except OutOfResources as refusal:
                    print(refusal)
                    continue
                if not (over := error(lists, out, q, k, v)) <= 1:
                    wrong.append(f"{rows}x{width} {form}: {over:.2f} of the tolerance")
    wrong += [f"{name}: not launched" for name in kernels() if name not in launched]
    print("\n".join(wrong) or f"{len(launched)} kernels, every result right", flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
