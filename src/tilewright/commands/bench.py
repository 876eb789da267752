"""Compare the latency of a plan with masked SDPA, dense SDPA and the fastest variant of FlexAttention.

Each result is compared with a float64 reference, too; a wrong result has no latency. The contenders are timed in turns.
"""

import sys
import time
from argparse import ArgumentParser
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.commands import _drawing, table
from tilewright.core import flags, registry
from tilewright.core.errors import ConfigError, Unavailable

# In the order of the table.
BASELINES = {"sdpa_mask": "SDPA with mask", "sdpa_dense": "SDPA, all pairs", "flex": "FlexAttention"}
# Masks of more keys are not made, and dense attention of more is not run: it takes minutes, or all memory.
MOST_TOKENS = 32768
# ASSUME: a mask or a table of bits that takes more is not worth waiting for.
MOST_BYTES = 2 << 30
REPETITIONS = 10


def arguments(parser: ArgumentParser) -> None:
    """The plan, and how long to measure."""
    parser.add_argument("plan", help="a plan that `tilewright plan` or Plan.save wrote")
    parser.add_argument("--batch", type=flags.count, default=1, help="sequences in a batch (default: 1)")
    parser.add_argument("--without", choices=BASELINES, nargs="+", default=[], help="contenders to leave out")
    parser.add_argument(
        "--ways",
        action="store_true",
        help="also time the ways to call the plan: eager, compiled, and on a GPU as a CUDA graph (takes seconds)",
    )
    parser.add_argument("--forms", nargs="+", help="variants of FlexAttention to try, e.g. 128 64-split (default: all)")
    parser.add_argument(
        "--rse", type=flags.positive, default=0.02, help="stop timing at this relative standard error (default: 0.02)"
    )
    parser.add_argument(
        "--seconds", type=flags.seconds, default=1.0, help="longest time of each measurement in seconds (default: 1)"
    )
    parser.add_argument(
        "--seed", type=flags.seed, default=0, help="seed of the tokens, which are standard normal (default: 0)"
    )


def run(
    plan: str | Path,
    batch: int,
    without: list[str],
    ways: bool,
    forms: list[str] | None,
    rse: float,
    seconds: float,
    seed: int,
) -> int:
    """Check, time, and print one table. Returns 1 where a result was wrong."""
    from tilewright import devices
    from tilewright.attention import plan as api
    from tilewright.core.timing import time_in_turns
    from tilewright.torch_attention import flex

    for form in forms or ():
        registry.check("form of FlexAttention", form, flex.VARIANTS)
    made = api.load(plan)
    if made.bias is not None or made.scale not in (None, made.head_dim**-0.5):
        raise ConfigError(f"{plan}: expected a plan without bias and with the scale of the baselines, head_dim**-0.5")
    tokens = {"plan's": _Tokens(made, made.graph, batch, seed)}
    tokens["model's"] = _Tokens(made, _drawing.natural(made.graph), batch, seed)
    groups = [[_ours(made, tokens["plan's"], order)] for order in tokens]
    groups += [_baseline(name, tokens, forms or flex.VARIANTS) for name in BASELINES if name not in without]
    right = [one for group in groups for one in group if one.call is not None]
    gpu = devices.facts(made.device).GPU_TIMER
    calls = [one.call for one in right]
    timings = time_in_turns(calls, gpu=gpu, min_reps=REPETITIONS, max_seconds=seconds, rse_target=rse)
    for one, timing in zip(right, timings, strict=True):
        one.take(one.call, timing)
    best = [min(group, key=_rank) for group in groups]
    print(made.summary().splitlines()[0])
    sizes = f"batch {batch}, {made.heads} heads × {made.head_dim}, {str(made.dtype).removeprefix('torch.')}"
    print(f"tensors    {sizes}, {_device(made)}")
    print("\n".join(table(_lines(best))))
    for one in best:
        if one.timing is None:
            print(f"{one.title}: {one.status}: {one.reason}")
    wrong = [one.status == "failed" for one in best]
    if ways:
        found = _ways(made, tokens["plan's"], gpu, seconds, rse)
        print("\n".join(table(found)))
        print(f"fastest    {min(found, key=lambda one: float(one['us']))['way to call']}")
    return int(any(wrong))


class _Tokens:
    """Standard normal q, k, v in the order of a graph, and what the reference makes of some of their rows."""

    def __init__(self, made, graph, batch, seed):
        import torch

        from tilewright import devices, reference

        facts = devices.facts(made.device)
        self.graph, self.device, place = graph, made.device, facts.TORCH_DEVICE
        self.sizes = {"batch": batch, "heads": made.heads, "head_dim": made.head_dim, "dtype": made.dtype}
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(batch, made.heads, n, made.head_dim, generator=generator, dtype=torch.float32)
            for n in (graph.shape[0], graph.shape[1], graph.shape[1])
        )
        self.qkv = tuple(x.to(place, made.dtype) for x in (q, k, v))
        # A GPU checks all rows in the time that a CPU takes for a sample.
        self.rows = reference.sample_rows(graph, 1 if facts.GPU_TIMER else reference.stride(graph.n_rows), seed)

    @cached_property
    def _masked(self):
        """float64 [B, H, R, D]: attention of `rows` over the pattern, the reference of all forms but the dense one."""
        from tilewright import reference

        return reference.attention_rows(self.graph, self.rows, *self.qkv)

    def checked(self, call, *, masked=True, natural=False):
        """A `Checked` of ``call(q, k, v)`` that was called once. Its ``error`` is the relative error of the last
        result.

        natural: the call takes the tokens, and returns rows, in the model's order.
        """
        from tilewright import reference
        from tilewright.core.timing import Checked

        graph, qkv, rows = self.graph, self.qkv, self.rows
        expected = self._masked if masked else reference.dense_rows(rows, *qkv)
        if natural and graph.row_order is not None:
            orders = graph.row_order, graph.col_order, graph.col_order
            qkv = tuple(x[:, :, np.argsort(order)] for x, order in zip(qkv, orders, strict=True))
            rows = graph.row_order[rows]

        def judge(result):
            timed.error = reference.relative_error(result[:, :, rows], expected)
            tolerance = reference.TOLERANCE[self.sizes["dtype"]]
            # Not `>`: a NaN does not pass.
            if timed.error <= tolerance:
                return ""
            return f"relative error {timed.error:.2g} against the reference, tolerance {tolerance:.2g}"

        timed: Any = Checked(partial(call, *qkv), judge)
        timed.wrong = judge(timed())
        return timed


def _ways(made, tokens, gpu, seconds, rse):
    """Rows of the ways to call a plan, as texts. Each is checked, then all are timed in turns.

    Whole calls: until the device is done. On a GPU the host is free before that.
    """
    import torch

    from tilewright.core.timing import TURNS, time_call, time_host

    torch.compiler.reset()
    calls = {"eager": made, "torch.compile": torch.compile(made, fullgraph=True)}
    if gpu:
        calls["torch.compile, reduce-overhead"] = torch.compile(made, fullgraph=True, mode="reduce-overhead")
        calls["CUDA graph"] = _captured(made)
    found, first = {}, {}
    with torch.no_grad():
        for name, call in calls.items():
            begin = time.perf_counter()
            found[name] = tokens.checked(call, natural=True)
            first[name] = time.perf_counter() - begin
            if found[name].wrong:
                raise ConfigError(f"{name}: {found[name].wrong}")
        effort: Any = {"min_reps": REPETITIONS, "max_seconds": seconds / TURNS, "rse_target": rse}
        times: dict[str, list[tuple[float, ...]]] = {name: [] for name in found}
        for _ in range(TURNS):
            for name, call in found.items():
                times[name].append(time_host(call, **effort) if gpu else (time_call(call, **effort).p50_us,))
    rows = []
    for name, each in times.items():
        us, *host = np.median(each, axis=0)
        said = {"way to call": name, "us": f"{us:.1f}"} | ({"us of the host": f"{host[0]:.1f}"} if host else {})
        rows.append(said | {"first call (s)": f"{first[name]:.2f}"})
    return rows


def _captured(made):
    """``call(q, k, v)`` that captures a CUDA graph of the plan on these tensors, and replays it from then on."""
    import torch

    graph = torch.cuda.CUDAGraph()
    held: list[torch.Tensor] = []

    def call(*given):
        if not held:
            made(*given)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                held.append(made(*given))
        graph.replay()
        return held[0]

    return call


@dataclass
class _Contender:
    """One form of attention: what the table says of it."""

    title: str
    order: str
    form: str
    call: Any = None
    error: float | None = None
    timing: object = None
    status: str = "ok"
    reason: str = ""

    def take(self, call, timing=None):
        """Itself with a `Checked` call, which is timed only while its results are right, and its time."""
        self.error = call.error
        if call.wrong:
            self.status, self.reason = "failed", call.wrong
        else:
            self.call, self.timing = call, timing
        return self


def _ours(made, tokens, order):
    run = partial(made, ordered=order == "plan's")
    found = _Contender("tilewright", order, made.schedule.runs if made.schedule.form else "+".join(made.schedule.tiles))
    return found.take(tokens.checked(run, natural=order != "plan's"))


def _baseline(name, tokens, forms):
    """A `_Contender` for each form of a baseline, in either order of the tokens where that matters."""
    import torch.nn.functional as F

    from tilewright.torch_attention import Ready, flex, masked

    if name == "flex":
        return [_form(name, order, form, these, flex.prepare) for order, these in tokens.items() for form in forms]
    # These work through all pairs, and take as long in any order.
    order, these = "model's", tokens["model's"]
    if these.graph.n_cols > MOST_TOKENS:
        reason = f"{these.graph.n_cols:,} keys; dense attention is run up to {MOST_TOKENS:,}"
        return [_Contender(BASELINES[name], order, "", status="skipped", reason=reason)]
    if name == "sdpa_dense":
        return [_form(name, order, "torch", these, lambda *_, **__: Ready(F.scaled_dot_product_attention, 0, 0))]
    return [_form(name, order, form, these, masked.prepare) for form in masked.VARIANTS]


def _form(name, order, form, tokens, prepare):
    found = _Contender(BASELINES[name], order, form)
    try:
        setting = tokens.sizes | {"device": tokens.device, "max_bytes": MOST_BYTES}
        call = prepare(tokens.graph, variant=form, **setting).call
        begin = time.perf_counter()
        call(*tokens.qkv)
    except Unavailable as reason:
        found.status, found.reason = "skipped", str(reason)
        return found
    except RuntimeError as error:
        found.status, found.reason = "failed", f"{type(error).__name__}: {error}".splitlines()[0]
        return found
    # It may have compiled. Said where it does not disturb the table.
    print(f"{name} {form}: first call {time.perf_counter() - begin:.2f} s, not counted", file=sys.stderr)
    return found.take(tokens.checked(call, masked=name != "sdpa_dense"))


def _rank(one):
    """The fastest form that is right; a form that is wrong is told of only where none is."""
    return ("ok", "failed", "skipped").index(one.status), one.timing.p50_us if one.timing else 0


def _lines(rows):
    """Rows as texts."""
    ours = rows[0].timing
    lines = []
    for one in rows:
        t = one.timing
        lines.append(
            {
                "attention": one.title,
                "order of tokens": one.order,
                "form": one.form,
                "ms": "–" if t is None else f"{t.p50_us / 1e3:.3f}",
                "20 to 80 %": "–" if t is None else f"{t.p20_us / 1e3:.3f} to {t.p80_us / 1e3:.3f}",
                "× plan": "–" if t is None or ours is None else f"{t.p50_us / ours.p50_us:.2f}",
                "relative error": "–" if one.error is None else f"{one.error:.1e}",
            }
        )
    return lines


def _device(made):
    device = next(iter(made.profiles.values())).device
    return f"{device['name']}" + (f", {device['threads']} threads" if "threads" in device else "")
