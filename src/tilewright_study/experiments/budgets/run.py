"""What the experiment `budgets` measures: errors and times of attention by lists that several choosers choose."""

from functools import partial

import numpy as np
import torch

from tilewright import devices, reference, slices
from tilewright.core import timing
from tilewright.core.errors import SolverUnavailableError, Unavailable
from tilewright.integrations import tuning
from tilewright.slices import budgets, orders
from tilewright.slices.budgets import choice
from tilewright_study.experiments.budgets import DENSE, MASS, shape
from tilewright_study.measure import checks, weights
from tilewright_study.measure.rows import machine, now
from tilewright_study.scenes import planted

# Queries of a head that are compared with float64, and the largest score that `reference.TOLERANCE` is derived for.
CHECKED, DERIVED_SCORE = 64, 16
# Steps of the bisection for a mass.
BISECTIONS = 8


@torch.no_grad()
def run(case, settings, how):
    """Yield the rows of `case`; of weights that are not there one row, which says so. Raises `TilewrightError`."""
    layers, heads, head_dim, grid = shape(case, settings)
    try:
        taken, apart, steps, begins, origin = _passes(heads, head_dim, grid, settings, how)
    except Unavailable as reason:
        yield weights.absent(settings.weights, grid, reason, how) | {"case": case}
        return
    found = tuning.measure(taken, case, steps, begins, shares=settings.shares, rows=settings.rows)
    known = (
        origin
        | machine(devices.describe(how.device))
        | {
            **{
                "case": case,
                "grid": "x".join(map(str, grid)),
                "tokens": found.tokens,
                "layers": layers,
                "heads": heads,
            },
            **{"head_dim": head_dim, "parts": len(begins), "dtype": how.dtype, "status": "ok"},
        }
    )
    right = [one.repeat(lambda layer, q, k, v: slices.dense(q, k, v)[0]) for one in apart]
    # The last pass, of the part with the least noise, is timed.
    made = [(known | {"chosen_by": DENSE, "error": 0.0, "density": 1.0, "recall": 1.0}, _tokens(apart[-1]), None)]
    for keep in settings.keeps:
        limit = found.limit_us(keep)
        # A single share takes all of the time where it is one of those that there are.
        for name in (name for name in settings.choosers if name != "single" or keep in settings.shares):
            row = known | {"chosen_by": name, "keep": keep, "limit_us": limit}
            try:
                choose = _choose(name, keep, limit, found, apart, settings, row)
            except SolverUnavailableError as reason:
                yield row | {"status": "skipped", "reason": str(reason), "time": now()}
                continue
            made.append(_seen(row, choose, apart, right, begins, steps))
    yield from _timed(made, settings, how)


def _passes(heads, head_dim, grid, settings, how):
    """``(passes, those of another run, steps, first steps of parts, columns)`` of a case."""
    place, dtype = devices.facts(how.device).TORCH_DEVICE, getattr(torch, how.dtype)
    if settings.weights is None:
        taken, apart = (
            [_planted(heads, head_dim, grid, settings.order, seed, place, dtype)] for seed in (how.seed, how.seed + 1)
        )
        return taken, apart, 1, (0,), {"maps": "planted"}
    network, origin = weights.load(settings.weights, place)
    network = network.lowered(dtype).with_attention("dense", order=settings.order)
    begins = budgets.parts(settings.steps, settings.parts)
    size = (network.options.latents[0], grid[0], 2 * grid[1], 2 * grid[2])

    def passes(seed):
        sample = partial(network.sample, steps=settings.steps, seed=seed, shape=size)
        return tuning.passes(network, sample, settings.steps, begins)

    return passes(how.seed), passes(how.seed + 1), settings.steps, begins, origin


def _planted(heads, head_dim, grid, order, seed, place, dtype):
    """Planted maps as the pass of a model of one layer, whose result is their attention."""
    made = planted.tokens(grid, head_dim, planted.mixed(heads), seed=seed, device=place)
    at = torch.from_numpy(orders.order(order, grid)).to(place)
    q, k, v = (x[:, :, at].to(dtype).contiguous() for x in (made.q, made.k, made.v))
    return tuning.Pass(0, tuple(grid), lambda attend: attend(0, q, k, v))


def _tokens(one):
    """q, k and v of each layer of a pass."""
    found = []

    def seen(layer, q, k, v):
        found.append((q, k, v))
        return slices.dense(q, k, v)[0]

    one.repeat(seen)
    return found


def _choose(name, keep, limit, found, apart, settings, row):
    """``choose(step, layer, q, k) -> SliceLists`` of a chooser; what it says of itself goes to the row."""
    if name == MASS:
        mass = _mass(keep, apart[-1], settings)
        return lambda step, layer, q, k: slices.predict(q, k, mass=mass, budget=1.0, rows=settings.rows)
    made = choice.choose(found.velocity, found.us, limit, name)
    if wrong := choice.violations(made.chosen, found.velocity, found.us, limit):
        row |= {"status": "failed", "reason": wrong[0]}
    table = found.table(made.chosen)
    part = table.part(apart[-1].step)
    last = np.take_along_axis(found.us[part], made.chosen[part][..., None], -1).sum()
    often = np.diff([*table.begins, table.steps])[part]
    row |= {
        "predicted_error": made.error**0.5,
        "run_us": made.us,
        "predicted_us": float(last / often),
        "solution": made.status,
    }
    row |= {"gap": None if made.gap == np.inf else made.gap, "solve_s": made.seconds}

    def choose(step, layer, q, k):
        shares = table.of(step, layer)
        return slices.predict(q, k, keep=shares, budget=max(shares), rows=settings.rows)

    return choose


def _mass(keep, one, settings):
    """The mass of attention whose lists keep as many keys in all, by a pass."""
    tokens, low, high = _tokens(one), 0.0, 1.0
    for _ in range(BISECTIONS):
        mass = (low + high) / 2
        kept = [slices.predict(q, k, mass=mass, budget=1.0, rows=settings.rows).density().mean() for q, k, _ in tokens]
        low, high = (low, mass) if float(sum(kept)) / len(kept) > keep else (mass, high)
    return low or high


def _seen(row, choose, apart, right, begins, steps):
    """``(row, tokens, lists)``: with what passes of another run are like; tokens and lists of the last one."""
    squares, kept, recalls, held = [], [], [], []
    for one, expected in zip(apart, right, strict=True):
        held.clear()

        def attend(layer, q, k, v, step=one.step):
            lists = choose(step, layer, q, k)
            held.append(((q, k, v), lists))
            kept.append(float(lists.density().mean()))
            recalls.append(float(slices.recall(q, k, lists).mean()))
            return slices.attend(q, k, v, lists)

        squares.append(tuning.relative(one.repeat(attend), expected) ** 2)
    often = np.diff([*begins, steps]).repeat(len(apart) // len(begins))
    tokens, lists = zip(*held, strict=True)
    columns = {"error": float(np.average(squares, weights=often) ** 0.5)}
    return row | columns | {"density": float(np.mean(kept)), "recall": float(np.mean(recalls))}, tokens, lists


def _timed(made, settings, how):
    """The rows, with times of attention by lists that exist, of all layers; contenders take turns."""
    timed, gpu = [], devices.facts(how.device).GPU_TIMER
    for number, (row, tokens, lists) in enumerate(made):
        made[number] = row, tokens, lists
        if row["status"] == "ok":
            found, call = checks.checked(partial(_attend, tokens, lists), partial(_errors, tokens, lists), row)
            made[number] = found, tokens, lists
            if call is not None:
                timed.append((number, call))
    effort = how.effort(settings.max_seconds)
    calls = [call for _, call in timed]
    taken = (
        [timing.time_gpu(call, **effort.limits) for call in calls]
        if gpu
        else timing.time_together(calls, **effort.limits)
    )
    for (number, call), times in zip(timed, taken, strict=True):
        row, tokens, lists = made[number]
        made[number] = checks.settled(row, call, times.columns), tokens, lists
    yield from (row | {"time": now()} for row, _, _ in made)


def _attend(tokens, lists):
    """Attention of all layers."""
    if lists is None:
        return tuple(slices.dense(q, k, v)[0] for q, k, v in tokens)
    return tuple(slices.attend(q, k, v, own) for (q, k, v), own in zip(tokens, lists, strict=True))


def _errors(tokens, lists, found):
    """Columns for the worst error of a head of each layer, by its tolerance, against float64 over its lists."""
    errors = []
    for layer, ((q, k, v), out) in enumerate(zip(tokens, found, strict=True)):
        head = layer % q.shape[1]
        rows = np.unique(np.linspace(0, q.shape[2] - 1, CHECKED).astype(int))
        q, k, v, out = (x[:, head : head + 1] for x in (q, k, v, out))
        if lists is None:
            expected = reference.dense_rows(rows, q, k, v)
        else:
            expected = reference.attention_rows(lists[layer].graph(0, head), rows, q, k, v)
        longest = [float(torch.linalg.vector_norm(x.float(), dim=-1).max()) for x in (q, k)]
        scores = longest[0] * longest[1] * q.shape[-1] ** -0.5
        tolerance = reference.TOLERANCE[q.dtype] + reference.TOLERANCE[torch.float32] * scores / DERIVED_SCORE
        errors.append((reference.relative_error(out[:, :, rows].to(expected.device), expected), tolerance))
    error, tolerance = max(errors, key=lambda pair: np.nan_to_num(pair[0] / pair[1], nan=np.inf))
    return {"relative_error": error, "tolerance": tolerance}
