"""Kernels compiled for an NVIDIA H100 or H200, on any machine.

One process, without Triton's interpreter, compiles for all tests of this one: torch and Triton take longer to load than
a kernel to compile.
"""

import atexit
import contextlib
import functools
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

from helpers.files import loaded

# Seconds that a kernel may take.
PATIENCE = 300


class Compiled(NamedTuple):
    """ptx: its text. arguments: names of those that are no constants, in the order of its parameters. shared: bytes.
    warps: of a program. registers: of a thread. spilled: bytes of stores and of loads. serialized: whether the
    assembler had to keep products apart."""

    ptx: str
    arguments: list[str]
    shared: int
    warps: int
    registers: int
    spilled: list[int]
    serialized: bool


def compiled(module, name, constants, types=None, *, pointers="*bf16", free=(), gluon=False, **options) -> Compiled:
    """A kernel of a module, by its dotted name or its file.

    constants: of which those are taken that the kernel has. types: of other arguments, where they are not `pointers` by
    their name, or i32. free: integers that are no multiples of 16.
    """
    asked = {"module": str(module), "name": name, "constants": constants, "types": types or {}, "pointers": pointers}
    asked |= {"free": list(free), "gluon": gluon, "options": options}
    process = _process()
    print(json.dumps(asked), file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        _process.cache_clear()
    assert line, f"{name}: expected a kernel within {PATIENCE} s, found that its compiler ended"
    answer = json.loads(line)
    assert "error" not in answer, answer["error"]
    return Compiled(**answer)


@functools.cache
def _process():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.getenv("PYTHONPATH")]))
    command = [sys.executable, "-m", "helpers.hopper"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(process.kill)
    return process


def _compile(module, name, constants, types, pointers, free, gluon, options):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = getattr(loaded(module) if module.endswith(".py") else importlib.import_module(module), name)
    names = kernel.arg_names
    constants = {each: value for each, value in constants.items() if each in names}
    kinds = {each: types.get(each, pointers if each.endswith("ptr") else "i32") for each in names}
    signature = {each: "constexpr" if each in constants else kind for each, kind in kinds.items()}
    free = {*free, *constants, *(each for each, kind in kinds.items() if kind == "fp32")}
    aligned = {(place,): [["tt.divisibility", 16]] for place, each in enumerate(names) if each not in free}
    given = {(names.index(each),): value for each, value in constants.items()}
    source = (GluonASTSource if gluon else ASTSource)(fn=kernel, signature=signature, constexprs=given, attrs=aligned)
    # A kernel that was kept comes without what the assembler said of it.
    triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    said = printed.getvalue()
    return {
        "ptx": made.asm["ptx"],
        "arguments": [each for each in names if each not in constants],
        "shared": made.metadata.shared,
        "warps": made.metadata.num_warps,
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": list(map(int, re.findall(r"(\d+) bytes spill", said))),
        "serialized": "serialized" in said,
    }


def _serve():
    """Answer each line of standard input by one; what compilers print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        signal.alarm(PATIENCE)
        try:
            answer = _compile(**json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        signal.alarm(0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
