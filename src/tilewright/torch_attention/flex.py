"""FlexAttention, compiled: block-sparse attention that asks for single pairs in the blocks that it fills partly.

A form of it has blocks of some size. It may compute the rows that see most keys apart (``split``): such a row is one
long program of FlexAttention, which has no way to split it, and makes its whole block of rows visit every key; dense
attention of a few rows splits the keys. On a GPU torch may tune its kernel (``tuned``). Which form is fastest is a
matter of the pattern and of the device. Arithmetic decides which pairs are allowed
where a rule is known, else the pattern's bits.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tilewright import devices
from tilewright.core import _internals, timing
from tilewright.core.errors import Unavailable
from tilewright.torch_attention import Ready, patterns, wide

if TYPE_CHECKING:
    from tilewright.graph import Graph

_LOG = logging.getLogger(__name__)
# Block size of a mask by default.
BLOCK = 128
# By variant: block size, whether wide rows are computed apart, whether torch tunes the kernel.
_FORMS = {
    f"{block}{'-split' * split}{'-tuned' * tuned}": (block, split, tuned)
    for tuned, blocks in ((False, (BLOCK, 64, 32, 16)), (True, (BLOCK, 64)))
    for split in (False, True)
    for block in blocks
}
VARIANTS = tuple(_FORMS)
UNTUNED = tuple(variant for variant, (_, _, tuned) in _FORMS.items() if not tuned)
UNSPLIT = tuple(variant for variant in UNTUNED if not _FORMS[variant][1])

# ASSUME: on a GPU smaller blocks are not worth compiling: the tiles that torch itself tries there have 64 or 128 rows
# and keys (`_inductor/template_heuristics/triton.py`).
SMALLEST_ON_GPU = 64
# Patterns, shapes and dtypes that one process may compile; torch's own limit of 8 is less than a few networks need.
COMPILATIONS = 256
# How well `fastest` knows the time of a form.
TRIAL = {"min_reps": 3, "max_seconds": 0.1, "rse_target": 0.05}


@dataclass(frozen=True)
class Bias:
    """Added to the scores: ``table[h, index(q, k)]`` of head h. table: [H, n], where the tokens are; index: of int64
    tensors that broadcast, queries and keys in the order of the graph, of operations that torch can compile."""

    table: torch.Tensor
    index: Callable

    def score(
        self, score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        """FlexAttention's ``score_mod``."""
        return score + self.table[h, self.index(q, kv)]


def prepare(
    graph: "Graph",
    *,
    max_bytes: int,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    variant: str = VARIANTS[0],
    mask_mod: Callable | None = None,
    bias: Any = None,
    **_: Any,
) -> Ready:
    """`Ready` for one form, of `VARIANTS`, over `graph` in its own order; the first call compiles.

    mask_mod: a FlexAttention ``mask_mod`` of the same pattern, or of more pairs in blocks that `graph` fills partly;
    default `pairs`. bias: a `Bias`.
    """
    need_compiler(device)
    block, split, tuned = _FORMS[variant]
    gpu = devices.facts(device).CUDA
    if tuned and not gpu:
        # There is one choice on a CPU, whose tiles are the mask's blocks (`_inductor/kernel/flex/flex_cpu.py`).
        raise Unavailable(f"torch tunes FlexAttention on a GPU only, found {device}")
    if gpu and block < SMALLEST_ON_GPU:
        raise Unavailable(f"blocks of {block} rows are for a CPU; a GPU gets {SMALLEST_ON_GPU} and more")
    narrow, rows = wide.split(graph) if split else (graph, ())
    size = 0
    if mask_mod is None:
        mask_mod, size = pairs(graph, max_bytes, device)
    attend, held, executed = _blocks(narrow, block, tuned, mask_mod, bias, device)
    apart: Any = wide.attending(graph, rows, dtype, device, bias) if split else None

    def run(q, k, v):
        # FlexAttention has no backward on a CPU and refuses inputs that ask for one. Results are not inference tensors:
        # the layers of a network that read them may be asked for theirs.
        q, k, v = q.detach(), k.detach(), v.detach()
        with torch.no_grad():
            return apart(attend(q, k, v), q, k, v) if split else attend(q, k, v)

    return Ready(run, size + held, executed + len(rows) * graph.n_cols)


def fastest(prepare_form: Callable, variants: Sequence, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Of `variants`, that whose ``prepare_form(variant).call`` takes least time for q, k, v; all are compiled.

    On a GPU the fastest one is then tried as torch tunes it. Forms that cannot run are left out, with a warning unless
    they are no form for this pattern or device. Raises what the last one does where none can run.
    """
    calls = _working(prepare_form, variants, q, k, v)
    best = _least(calls, q)
    if (tuned := f"{best}-tuned") in _FORMS and q.is_cuda:
        try:
            calls = {best: calls[best]} | _working(prepare_form, [tuned], q, k, v)
        except RuntimeError as error:
            _LOG.warning("FlexAttention is left untuned: %s", error)
        best = _least(calls, q)
    return best


def _working(prepare_form, variants, q, k, v):
    """``{variant: call of q, k, v}``, each called once."""
    calls: dict = {}
    last: Exception | None = None
    for variant in variants:
        try:
            call = partial(prepare_form(variant).call, q, k, v)
            call()
            calls[variant] = call
        except Unavailable as reason:
            last = reason
        except RuntimeError as error:
            _LOG.warning("FlexAttention with blocks %s cannot run: %s", variant, error)
            last = error
    if not calls and last is not None:
        raise last
    return calls


def _least(calls, like):
    """The name of the fastest of `calls`, on the device of tensor `like`."""
    if len(calls) == 1:
        return next(iter(calls))
    if like.is_cuda:
        times = [timing.time_gpu(call, **TRIAL) for call in calls.values()]
    else:
        times = timing.time_together(list(calls.values()), **TRIAL)
    return min(zip(calls, times, strict=True), key=lambda pair: pair[1].p50_us)[0]


def _blocks(graph, block, tuned, mask_mod, bias, device):
    """``(attend(q, k, v), bytes, pairs worked through)``: FlexAttention of all rows, with blocks of that size."""
    found = patterns.kinds(graph, block)
    tables = [table for kind in found for table in patterns.listed(kind, device)]
    mask = BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=graph.shape)  # type: ignore[misc]  # mypy does not know the length of what is unpacked
    # On a GPU a tile may be larger than a block of less than the default size, unless stated.
    options: Any = {"BLOCK_M": block, "BLOCK_N": block} if devices.facts(device).CUDA and block < BLOCK else None
    # Made once: that takes the host as long as a small pattern takes a GPU. fullgraph: past the limit an error, where
    # otherwise torch would run without compiling. ASSUME: torch tunes for a mask of its own, of full blocks.
    limit = _internals.recompile_limit(COMPILATIONS)
    mode = "max-autotune-no-cudagraphs" if tuned else None
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=mode)
    score_mod = None if bias is None else bias.score

    def attend(q, k, v):
        with limit:
            return compiled(q, k, v, block_mask=mask, score_mod=score_mod, kernel_options=options)

    return attend, 4 * sum(table.numel() for table in tables), int(np.sum(found)) * block * block


def pairs(graph: "Graph", max_bytes: int, device: torch.device | str) -> tuple[Callable, int]:
    """``(mask_mod, bytes)``: by arithmetic on the places of tokens where a rule is known, else by the pattern's bits.

    Raises `Unavailable` above `max_bytes`.
    """
    if (rule := patterns.rule(graph)) is not None:
        of_query, of_key = (torch.from_numpy(np.ascontiguousarray(places)).to(device) for places in rule[:2])
        return _arithmetic(of_query, of_key, rule[2]), 4 * (len(of_query) + len(of_key))
    table = torch.from_numpy(patterns.bits(graph, max_bytes)).to(device)
    row_id = torch.from_numpy(graph.row_id).to(device)

    def mask_mod(b, h, q, kv):
        return (table[row_id[q], kv >> 3] >> (kv & 7)) & 1 == 1

    return mask_mod, table.numel()


def _arithmetic(of_query, of_key, reach):
    """The ``mask_mod`` of a `patterns.rule`; what the places of these tokens never ask for is left out."""
    any_query, any_key = bool((of_query < 0).any()), bool((of_key < 0).any())

    def mask_mod(b, h, q, kv):
        here, there = of_query[q], of_key[kv]
        if reach:
            near = ((here >> 15) - (there >> 15)).abs().maximum(((here & 0x7FFF) - (there & 0x7FFF)).abs()) <= reach
        else:
            near = here == there
        near = near | (here < 0) if any_query else near
        return near | (there < 0) if any_key else near

    return mask_mod


def need_compiler(device: Any = "cpu") -> None:
    """Raise `Unavailable` unless torch can compile for `device`: for a CPU it needs a C++ compiler that works."""
    if not devices.facts(device).CUDA and (why := _internals.missing_compiler()) is not None:
        raise Unavailable(f"no C++ compiler to compile FlexAttention with: {why}")
