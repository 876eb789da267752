"""The fastest form of the prediction of slices on this GPU, found by timing the candidates once (stage T3).

As `form_search` has it for attention. Codes are compared with float64, lists with those of the CPU's selection.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from tilewright.attention.cuda.cost import form_search
from tilewright.core.timing import time_gpu
from tilewright.slices import layout as layouts
from tilewright.slices.cpu.selection import Selection as CpuSelection
from tilewright.slices.cuda import prediction_forms
from tilewright.slices.cuda.prediction_forms import SELECT, Config, Kind
from tilewright.slices.cuda.selection import Selection
from tilewright.slices.selection import OCTAVE, Rule

# Queries of a mean that a calibration finds forms for, and of a group.
POOLS, ROWS = (128, 32), 128
# Tokens and heads of what is timed, and tokens of what is checked: the last groups are short, no number is even.
TOKENS, HEADS, CHECKED_TOKENS = 32_760, 12, 1033
# Codes may be that far, in eighths of an octave, from those of float64: means of 16 bits move scores.
CODE_ERROR = 1.0
# Seconds for one timing, and the relative standard error at which it stops.
SHARE_S, RSE, MIN_REPS = 0.1, 0.005, 5
RULES = (Rule(count=TOKENS // 5, least=64, most=TOKENS // 3), Rule(mass=0.9, least=64, most=TOKENS // 3))


def search(head_dim: int, dtype: torch.dtype, anew: bool = False) -> None:
    """As `form_search.search`."""
    if head_dim in layouts.HEAD_DIMS:
        form_search.find([OfPrediction(kind) for kind in kinds(head_dim, dtype)], head_dim, dtype, anew)


def kinds(head_dim, dtype):
    """What has a form of its own."""
    return [*(Kind(f"pool{pool}", ROWS, head_dim, dtype) for pool in POOLS), prediction_forms.selecting()]


@dataclass(frozen=True)
class OfPrediction:
    """A part of prediction whose form is searched, see `form_search.OfTile`."""

    kind: Kind

    MODULE: ClassVar = __name__
    MOST: ClassVar = 1
    read: ClassVar = staticmethod(prediction_forms.read)
    as_stated: ClassVar = staticmethod(prediction_forms.as_stated)

    def __str__(self) -> str:
        return f"prediction, {self.kind.what}"

    @property
    def stated(self):
        """What its choice holds for."""
        return prediction_forms.made_for(self.kind, _device())

    def candidates(self):
        """Its forms, the default first."""
        return prediction_forms.candidates(self.kind)

    def job(self, form):
        """The word that has a process compile a form, and check it."""
        values = prediction_forms.as_stated(form).values()
        return ",".join(map(str, (self.kind.what, self.kind.rows, *values)))

    def tried(self, form):
        """The `Trial` of a form: checked, and timed if it is right."""
        return form_search.trial(
            form,
            lambda: (checked(self.kind, form, _device()), allowed(self.kind), lambda: timed(self.kind, form)),
            self.as_stated,
        )


def allowed(kind):
    """The largest error of a form that is right, see `checked`."""
    return 0.0 if kind.what == SELECT else CODE_ERROR


def timed(kind, form) -> Iterator[Any]:
    """Microseconds of each launch, or of all that make codes."""
    device = _device()
    calls: list[Callable[[], Any]]
    if kind.what == SELECT:
        selection, codes, keys, counts = selecting(HEADS, TOKENS, max(rule.most for rule in RULES), form, device)
        calls = [partial(selection.select, codes, rule, keys, counts) for rule in RULES]
    else:
        selection, q, k = predicting(kind, HEADS, TOKENS, form, device)
        calls = [lambda: selection.pooled(q, k, kind.pool, kind.head_dim**-0.5)]
    for call in calls:
        call()
        yield time_gpu(call, min_reps=MIN_REPS, max_seconds=SHARE_S, rse_target=RSE).p50_us


def checked(kind, form, device: torch.device | str):
    """Of codes, the most eighths of an octave that one is off from float64; of lists, the share of groups that are not
    as they are on the CPU."""
    if kind.what == SELECT:
        return _wrong_lists(form, device)
    selection, q, k = predicting(kind, 2, CHECKED_TOKENS, form, device)
    scale = kind.head_dim**-0.5
    codes = selection.pooled(q, k, kind.pool, scale)
    worst = torch.zeros((), dtype=torch.float64, device=device)
    for h, g in ((h, g) for h in range(2) for g in range(selection.layout.groups)):
        group = q[0, h, g * kind.rows : (g + 1) * kind.rows].double()
        shares = sum(
            (part.mean(0) @ k[0, h].double().mT * scale).softmax(-1) * (len(part) / len(group))
            for part in group.split(kind.pool)
        )
        exact = (shares.log2() * -OCTAVE).clamp(0, 255)
        # Codes are rounded down.
        off = (codes[0, h, g].double() + 0.5 - exact).abs().max() - 0.5
        worst = torch.fmax(worst, off.nan_to_num(torch.inf))
    return float(worst)


def predicting(kind, heads: int, n_tokens: int, form, device: torch.device | str):
    """``(Selection, q, k)`` of random tokens, neighbours alike, as projections leave them."""
    generator = torch.Generator(device).manual_seed(0)
    dtype, near = getattr(torch, kind.dtype), torch.arange(n_tokens, device=device) // 64 % 16
    drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": device}
    centres = torch.randn(16, heads, kind.head_dim, **drawn)
    shape = n_tokens, heads, kind.head_dim
    made = [centres[near] + torch.randn(shape, **drawn) for _ in range(2)]
    q, k = (x.to(dtype)[None].transpose(1, 2) for x in made)
    layout = layouts.Layout(1, heads, n_tokens, n_tokens, kind.rows, layouts.rounded(n_tokens))
    return Selection(layout, device, form), q, k


def selecting(heads: int, n_tokens: int, most, form, device: torch.device | str):
    """``(Selection, codes, keys, counts)``: codes of a bell, that many are equal, and memory for lists of `most`."""
    layout = layouts.Layout(1, heads, n_tokens, n_tokens, ROWS, layouts.rounded(most))
    selection = Selection(layout, device, form)
    codes = selection._empty_codes(n_tokens)
    generator = torch.Generator(device).manual_seed(0)
    score = torch.randn(codes.shape, generator=generator, dtype=torch.float32, device=device)
    codes.copy_((score * 30 + 130).clamp(0, 255))
    counts = torch.empty(codes.shape[:3], dtype=torch.int32, device=device)
    return selection, codes, counts.new_empty(*counts.shape, layout.capacity), counts


def _wrong_lists(form, device):
    n_tokens, wrong, groups = CHECKED_TOKENS, 0, 0
    for rule in RULES:
        rule = rule._replace(most=n_tokens // 3, count=n_tokens // 5 if rule.count else rule.count)
        selection, codes, keys, counts = selecting(1, n_tokens, rule.most, form, device)
        selection.select(codes, rule, keys, counts)
        right = keys.new_empty(keys.shape, device="cpu"), counts.new_empty(counts.shape, device="cpu")
        CpuSelection(selection.layout, torch.device("cpu")).select(codes.cpu(), rule, *right)
        listed = torch.arange(keys.shape[-1], device="cpu") < right[1][..., None]
        same = (counts.cpu() == right[1]) & ((keys.cpu() == right[0]) | ~listed).all(-1)
        wrong, groups = wrong + int((~same).sum()), groups + same.numel()
    return wrong / groups


def _device():
    return torch.device("cuda", torch.cuda.current_device())


def _compile(head_dim, dtype, *jobs):
    """Compile and check the candidates that `jobs` name, and say which are right."""
    for job in jobs:
        what, rows, *values = job.split(",")
        kind = Kind(what, int(rows), int(head_dim), dtype)
        form = prediction_forms.read(dict(zip(Config._fields, map(int, values), strict=True)))
        try:
            error = checked(kind, form, _device())
        except form_search.FAILURES:
            continue
        if error <= allowed(kind):
            print(job, flush=True)


if __name__ == "__main__":
    _compile(*sys.argv[1:])
