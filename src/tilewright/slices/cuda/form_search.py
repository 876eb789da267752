"""The fastest form of attention to slices on this GPU, found by timing the candidates once (stage T3).

As `form_search` has it for tiles, with lists of random keys: long ones, all alike, and short uneven ones.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tilewright import reference
from tilewright.attention.cuda import forms
from tilewright.attention.cuda.cost import form_search
from tilewright.core.timing import time_gpu
from tilewright.slices import layout as layouts
from tilewright.slices.cuda import config
from tilewright.slices.cuda import forms as slice_forms
from tilewright.slices.cuda.forms import Kind

# Queries of a group and keys of a run that a calibration finds forms for: slices, and blocks to compare them with.
KINDS = ((128, 1), (128, 64), (64, 1))
# Tokens and heads of the launches that are timed, and shares of keys listed: of each group, and of the first and last.
TOKENS, HEADS, SHARES = 32_768, 3, ((0.3, 0.3), (0.02, 0.2))
# Tokens of the lists that candidates are checked with, and keys of their groups: no step, parts of one, several.
CHECKED_TOKENS, CHECKED_KEYS = 1000, (0, 1, 63, 64, 65, 128, 447, 1000)
# Seconds for one timing, and the relative standard error at which it stops.
SHARE_S, RSE, MIN_REPS = 0.1, 0.005, 5


def search(head_dim: int, dtype: torch.dtype, anew: bool = False, kinds=KINDS) -> None:
    """Find the fastest form of each of `kinds` that has no file yet, and write it; anew: of each.

    Head dims that `layouts.HEAD_DIMS` does not name have no such kernels. Raises what `form_search.search` raises.
    """
    if head_dim in layouts.HEAD_DIMS:
        form_search.find([OfSlices(Kind(*each, head_dim, dtype)) for each in kinds], head_dim, dtype, anew)  # type: ignore[call-arg]  # mypy does not know the length of what is unpacked


@dataclass(frozen=True)
class OfSlices:
    """Lists whose form is searched, see `form_search.OfTile`."""

    kind: Kind

    MODULE: ClassVar = __name__
    # Nothing chooses between two by the lists of a call.
    MOST: ClassVar = 1
    read: ClassVar = staticmethod(config.read)
    as_stated: ClassVar = staticmethod(forms.as_stated)

    def __str__(self) -> str:
        return f"slices {self.kind.rows}x{self.kind.width}"

    @property
    def stated(self):
        """What its choice holds for."""
        return slice_forms.made_for(self.kind, _device())

    def candidates(self):
        """Its forms, the default first."""
        return slice_forms.candidates(self.kind, _device())

    def job(self, form):
        """The word that has a process compile a form, and check it: one that hangs is not tried here."""
        return ",".join(map(str, (self.kind.rows, self.kind.width, *forms.as_stated(form).values())))

    def tried(self, form):
        """The `Trial` of a form: checked, and timed if it is right."""
        allowed = reference.TOLERANCE[getattr(torch, self.kind.dtype)]
        return form_search.trial(
            form, lambda: (checked(self.kind, form, _device()), allowed, lambda: timed(self.kind, form))
        )


def timed(kind, form) -> Iterator[Any]:
    """Microseconds of each launch."""
    for low, high in SHARES:
        groups = TOKENS // kind.rows
        counts = (
            (torch.linspace(high, low, groups, dtype=torch.float32, device="cpu") * TOKENS).int()
            // kind.width
            * kind.width
        )
        call = prepared(kind, form, counts.repeat(HEADS, 1), TOKENS, _device())[0]
        call()
        yield time_gpu(call, min_reps=MIN_REPS, max_seconds=SHARE_S, rse_target=RSE).p50_us


def checked(kind, form, device: torch.device | str) -> float:
    """Largest relative error of a form over a few groups, compared with float64."""
    groups = -(-CHECKED_TOKENS // kind.rows)
    counts = torch.tensor(CHECKED_KEYS, dtype=torch.int64, device="cpu")
    counts = (-(-counts // kind.width) * kind.width).clamp(max=CHECKED_TOKENS)
    call, (q, k, v), lists = prepared(kind, form, counts.repeat(HEADS, groups)[:, :groups], CHECKED_TOKENS, device)
    worst = torch.zeros((), dtype=torch.float64, device="cpu")
    out = call()[0]
    for h, g in ((h, g) for h in range(HEADS) for g in range(groups)):
        rows, listed = slice(g * kind.rows, (g + 1) * kind.rows), lists[0][0, h, g, : lists[1][0, h, g]].long()
        scores = q[0, h, rows].double() @ k[0, h, listed].double().mT * kind.head_dim**-0.5
        right = scores.softmax(-1) @ v[0, h, listed].double()
        # As it stands, a NaN would be lost by a maximum.
        error = worst.new_tensor(reference.relative_error(out[0, h, rows], right))
        worst = torch.fmax(worst, error.nan_to_num(torch.inf))
    return float(worst)


def prepared(kind, form, counts, n_tokens: int, device: torch.device | str):
    """``(call, tokens, lists)``: attention in a form to so many random keys of each group; counts: int [H, G]."""
    from tilewright.slices.cuda.executor import Executor

    heads, groups = counts.shape
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, kind.dtype)
    shape = 1, n_tokens, heads, kind.head_dim
    drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": device}
    tokens = [torch.randn(shape, **drawn).to(dtype).transpose(1, 2) for _ in range(3)]
    runs, most = -(-n_tokens // kind.width), int(counts.max())
    keys = torch.empty(1, heads, groups, layouts.rounded(most), dtype=torch.int32, device=device)
    counts = counts.to(device, torch.int32)[None]
    run = torch.arange(kind.width, device=device)
    for h in range(heads):
        score = torch.rand(groups, runs, **drawn)
        # The last run, which may be short, only where all are listed: the first so many of each row, ascending.
        score[:, -1] = 2.0
        rank = score.argsort(-1).argsort(-1)
        wanted = -(-counts[0, h] // kind.width)
        chosen = torch.where(rank < wanted[:, None], torch.arange(runs, device=device), runs).sort(-1).values
        listed = (chosen[:, :, None] * kind.width + run).flatten(1)[:, : keys.shape[-1]].clamp(max=n_tokens - 1)
        keys[0, h, :, : listed.shape[1]] = listed.int()
    layout = layouts.Layout(1, heads, n_tokens, n_tokens, kind.rows, keys.shape[-1], kind.width)
    keys = layouts.with_tails(keys, counts).contiguous()
    executor = Executor(layout, device, form)
    order, state = executor.rank(counts.contiguous())
    lists = keys, counts.contiguous(), order, state
    return lambda: executor.attend(lists, *tokens, scale=kind.head_dim**-0.5), tokens, lists


def _device():
    return torch.device("cuda", torch.cuda.current_device())


def _compile(head_dim, dtype, *jobs):
    """Compile and check the candidates that `jobs` name, and say which are right."""
    for job in jobs:
        numbers: list[Any] = [None if value == "None" else int(value) for value in job.split(",")]
        rows, width, *values = numbers
        form = config.SliceConfig(*values)
        try:
            error = checked(Kind(rows, width, int(head_dim), dtype), form, _device())
        except form_search.FAILURES:
            continue
        if error <= reference.TOLERANCE[getattr(torch, dtype)]:
            print(job, flush=True)


if __name__ == "__main__":
    _compile(*sys.argv[1:])
