"""One pass of a video network by kind of attention, checked against its lists' oracle and dense attention (stage T5).

A row that did not pass has the status ``failed`` and no time; one that could not run has ``skipped``; both say why.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

from tilewright import devices, networks, reference, slices
from tilewright.core import timing
from tilewright.core.errors import TilewrightError, Unavailable
from tilewright.masks import wan as pattern
from tilewright.networks import rectified_flow, wan
from tilewright_study.experiments.video import CHOOSING, check_attention
from tilewright_study.measure import weights as _weights
from tilewright_study.measure.checks import judging, refusal, refuted, same_lists
from tilewright_study.measure.rows import machine, now
from tilewright_study.scenes import captured, clips

# The share of noise in the clip of a pass.
NOISE = 0.5
# Queries of a head that are compared with float64.
ROWS = 128
# The largest score that `reference.TOLERANCE` is derived for.
DERIVED_SCORE = 16
# Of a velocity in float32, by its spread, where lists hold all keys. In 16 bits it may be off by so many times what
# dense attention is off where the tokens stand in another order, which rounds otherwise, or by so many roundoffs.
WHOLE, ROUNDING, ROUNDOFFS = 1e-4, 3.0, 2.0
CHECKS = (
    ("relative_error", "tolerance", "an attention differs by {:.2g} from float64 over its lists"),
    ("whole_error", "whole_tolerance", "with lists of all keys the velocity is off by {:.2g} from dense attention"),
)
# What `slices.predict` takes to say how many keys are kept.
AMOUNTS = ("mass", "keep", "threshold")
# What torch's compiler raises for what it cannot compile: also where it finds itself wrong.
_REFUSALS = (RuntimeError, AssertionError)


@dataclass
class Contender:
    """A network with one attention, its row so far, the velocity of the pass that was checked and how far a timed one
    may be from it, and of its first layer the tokens, the result and the lists, which its parts are timed with."""

    chosen: object
    network: object
    row: dict
    velocity: object = None
    tolerance: float = 0.0
    tokens: tuple = ()
    out: object = None
    lists: object = None


def run(case, settings, how):
    """Yield the rows of `case`; of weights that are not there one row, which says so. Raises `TilewrightError`."""
    check_attention("attention", settings.attention)
    yield from run_network(case, settings, how)


@torch.no_grad()
def run_network(case, settings, how):
    """Yield a row for each attention and mode, see `video.Row`. Raises `TilewrightError`."""
    facts, place = devices.describe(how.device), devices.facts(how.device).TORCH_DEVICE
    dtype, trained = getattr(torch, how.dtype), False
    if settings.weights is None:
        # Drawn where they are used: a CPU takes some ten seconds for those of 1.3B.
        with torch.device(place):
            network, origin = networks.create_video(case, seed=how.seed), {"network": case, "weights": "random"}
    else:
        try:
            network, loaded = _weights.load(settings.weights, place)
        except Unavailable as reason:
            yield {"network": settings.weights.network, "status": "skipped", "reason": str(reason), **machine(facts)}
            return
        origin = {name: loaded[name] for name in ("network", "weights")}
        trained = loaded["maps"] == "trained"
    network = network.lowered(dtype)
    inputs = _inputs(network, place, dtype, how.seed, trained=trained)
    grid = pattern.grid(inputs[0].shape)
    known = origin | {
        **{"layers": network.options.depth, "heads": network.options.published.heads, "dtype": how.dtype},
        **{"grid": "x".join(map(str, grid)), "tokens": int(np.prod(grid)), "status": "ok", **machine(facts)},
        "parameters": sum(weights.numel() for weights in network.parameters()),
    }
    effort = how.effort(settings.max_seconds)
    dense = network(*inputs)
    own = _off(network.with_attention("dense", order="hilbert")(*inputs), dense)
    roundoff = torch.finfo(dtype).eps / 2
    tolerance = WHOLE if dtype == torch.float32 else max(ROUNDING * own, ROUNDOFFS * roundoff)
    contenders = []
    for name, chosen in settings.attention.items():
        row = known | {"attention": name, "by": chosen.by, "every": chosen.every, "mode": "eager", "time": now()}
        made = Contender(chosen, exchanged(network, chosen, settings.sampler), row)
        contenders.append(made)
        try:
            _check(made, inputs, dense, tolerance, how.seed)
        except Unavailable as reason:
            row |= {"status": "skipped", "reason": str(reason)}
        except (RuntimeError, TilewrightError) as error:
            row |= {"status": "failed", "reason": refusal(error)}
    passed = [made for made in contenders if made.row["status"] == "ok"]
    if trained:
        _sample(passed, inputs, settings.sampler, how.seed)
    if "eager" in settings.modes:
        _time(passed, inputs, effort, gpu=devices.facts(how.device).GPU_TIMER)
        yield from (made.row for made in contenders)
    else:
        yield from (made.row | {"mode": "compile"} for made in contenders if made.row["status"] != "ok")
    if "compile" in settings.modes:
        network.compile_layers(dynamic=False)
        for made in contenders:
            if made.row["status"] == "ok":
                yield _compiled(made, inputs, effort, dense, tolerance, gpu=devices.facts(how.device).GPU_TIMER)


def _inputs(network, place, dtype, seed, trained):
    """Latents, time and prompt of a pass: noise, and for a network that was trained here its clips, without prompts."""
    size = network.options.latents
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, *size, generator=generator).to(place)
    stamp = torch.full((1,), rectified_flow.SCALE * NOISE, device=place)
    if not trained:
        return noise.to(dtype), stamp, torch.randn(1, 512, pattern.TEXT_WIDTH, generator=generator).to(place, dtype)
    clean = clips.latents([seed], *size[1:], split="test", device=place)
    return torch.lerp(clean, noise, NOISE).to(dtype), stamp, None


def exchanged(network, chosen, steps, **changes):
    """`network` with a chosen attention; lists are made in each `every`-th of so many steps."""
    stated = dict(chosen.settings)
    if changes:
        stated = {name: value for name, value in stated.items() if name not in AMOUNTS} | changes
    if chosen.every > 1:
        refresh = tuple(range(0, max(steps, chosen.every), chosen.every))
        stated["steps"] = {"refresh": refresh, "first_dense": 0, "packed": stated.pop("packed", True)}
    return network.with_attention(chosen.by, stated, chosen.order)


def _off(found, expected):
    """How far a velocity is off, by the spread of the one expected: root of mean squares."""
    expected = expected.double()
    return float((found.double() - expected).square().mean().sqrt() / expected.std())


def _predicted(made, q, k):
    """The lists that an attention makes of q and k."""
    return slices.predict(q, k, **made.network.settings.stated)


def _check(made, inputs, dense, tolerance, seed):
    """Fill in what one pass is like, and whether it is right."""
    row, chosen, network = made.row, made.chosen, made.network
    clip = network.clip(pattern.grid(inputs[0].shape), inputs[0].device)
    kept, errors, begin = [], [], time.perf_counter()
    network(*inputs)
    timing.wait(inputs[0])
    row["first_call_s"] = time.perf_counter() - begin

    def seen(layer, q, k, v, out):
        lists = _predicted(made, q, k) if chosen.by in CHOOSING else None
        if lists is not None:
            lists.check(allow_empty=True)
            kept.append((float(lists.density().mean()), float(slices.recall(q, k, lists).mean())))
        if layer == 0:
            made.tokens, made.out, made.lists = (q, k, v), out, lists
        # Of each layer a head at least: it may attend by the lists of another one.
        heads = {0, q.shape[1] // 2, q.shape[1] - 1} if layer in (0, row["layers"] - 1) else {layer % q.shape[1]}
        errors.append(_error(made, clip, sorted(heads), q, k, v, out, lists, seed))

    with captured.observed(network, inputs[0], seen):
        found = network(*inputs)
    row["token_order"] = network.order or ("raster" if clip.order is None else "plan")
    made.velocity, made.tolerance = found, tolerance
    row["velocity_error"] = _off(found, dense)
    # A NaN is larger than all numbers.
    row["relative_error"], row["tolerance"] = max(errors, key=lambda pair: np.nan_to_num(pair[0] / pair[1], nan=np.inf))
    row["checked_rows"] = ROWS
    if kept:
        row["density"], row["recall"] = (float(x) for x in np.mean(kept, 0))
    elif chosen.by == "dense":
        row["density"] = row["recall"] = 1.0
    else:
        row["density"] = _site(clip).graph.density
    row["flops_share"] = _flops(network, row["tokens"], row["density"]) / _flops(network, row["tokens"], 1.0)
    if chosen.by in CHOOSING:
        # As bits: lists of all keys take 32 times as much.
        whole = exchanged(network, chosen, 1, keep=1.0, budget=1.0, **({"packed": True} if chosen.every > 1 else {}))
        row["whole_error"] = max(_off(whole(*inputs, step=step), dense) for step in range(min(chosen.every, 2)))
        row["whole_tolerance"] = tolerance
    _forget(made, inputs)
    if reason := _misplaced(clip, pattern.grid(inputs[0].shape)) or refuted(row, CHECKS):
        row |= {"status": "failed", "reason": reason}


def _misplaced(clip, grid):
    """Why tokens do not stand in the layers with the angles of their places, or do not come back to these; else "".

    A velocity alone does not tell: of lists it may be off by what another order rounds, and a window's has no oracle.
    """
    place = torch.arange(int(np.prod(grid)), device=clip.angles[0].device)[None, :, None]
    stand = clip.ordered(place)
    if not torch.equal(clip.raster(stand), place):
        return "tokens do not come back to their places"
    angles = (x.to(place.device)[stand.ravel()] for x in wan.rotary(grid))
    if not all(map(torch.equal, clip.angles, angles)):
        return "tokens are turned by the angles of other places"
    return ""


def _site(clip):
    """The site of a static window."""
    return clip.layers[0].attention._attend.site


def _error(made, clip, heads, q, k, v, out, lists, seed):
    """``(error, tolerance)`` of the attention of a layer, on some queries of some `heads`."""
    rows = np.sort(np.random.default_rng(seed).permutation(q.shape[2])[:ROWS])
    q, k, v, out = (x[:, heads] for x in (q, k, v, out))
    if lists is not None:
        each = [
            reference.attention_rows(lists.graph(0, head), rows, *(x[:, at : at + 1] for x in (q, k, v)))
            for at, head in enumerate(heads)
        ]
        expected = torch.cat(each, 1)
    elif made.chosen.by == "dense":
        expected = reference.dense_rows(rows, q, k, v)
    else:
        order = clip.order.cpu().numpy()
        expected = reference.attention_rows(_site(clip).graph.reordered(order, order), rows, q, k, v)
    longest = [float(torch.linalg.vector_norm(x.float(), dim=-1).max()) for x in (q, k)]
    scores = longest[0] * longest[1] * q.shape[-1] ** -0.5
    float32 = reference.TOLERANCE[torch.float32]
    tolerance = reference.TOLERANCE[q.dtype] + float32 * scores / DERIVED_SCORE
    return reference.relative_error(out[:, :, rows].to(expected.device), expected), tolerance


def _flops(network, tokens, density):
    """Operations of the products of a pass, for pairs of a `density`, with the whole prompt."""
    width, hidden, _, _ = network.options.published
    products = 2 * tokens * (6 * width * width + 2 * width * hidden) + 4 * pattern.TEXT_TOKENS * width * width
    pairs = tokens * tokens * density + tokens * pattern.TEXT_TOKENS
    return network.options.depth * (products + 4 * width * pairs)


def _calls(made, inputs, judge):
    """The passes whose mean is a pass, to be timed: one that makes lists, one that has them. judge: of velocities."""
    network, every = made.network, made.chosen.every
    passes = [lambda step=step: network(*inputs, step=step) for step in range(min(every, 2))]
    return [timing.Checked(call, judging(judge)) for call in passes]


def _as_checked(made):
    """What judges velocities by that of the pass that was checked."""

    def judge(found):
        off = _off(found, made.velocity)
        return "" if off <= made.tolerance else f"the velocity is off by {off:.2g} from that which was checked"

    return judge


def _first_wrong(calls):
    """What was wrong with one of these calls, else an empty text."""
    return next((call.wrong for call in calls if call.wrong), "")


def _measured(calls, effort, gpu):
    """A `timing.Timing` of each of `calls`, on a GPU those of one contender."""
    if not gpu:
        for call in calls:
            call()
        return timing.time_together(calls, **effort.limits)
    found = []
    for call in calls:
        found.append(timing.time_gpu(call, **effort.limits))
        # A captured call left its lists in the memory of its graph.
        calls[0]()
    return found


def _columns(taken, every):
    """Columns of the times of a pass that makes lists and of one that has them."""
    made, kept = taken[0], taken[-1]
    if every == 1:
        return made.columns | {"made_us": made.p50_us, "timing": made.method}
    share = {
        name: (getattr(made, name) + (every - 1) * getattr(kept, name)) / every
        for name in ("p20_us", "p50_us", "p80_us")
    }
    method = " ".join(dict.fromkeys((made.method, kept.method)))
    repetitions, rse = min(made.repetitions, kept.repetitions), max(made.rse, kept.rse)
    return share | {
        **{"made_us": made.p50_us, "kept_us": kept.p50_us, "timing": method},
        **{"repetitions": repetitions, "rse": rse},
    }


def _time(passed, inputs, effort, gpu):
    """Fill in the times of contenders and of their parts. On a CPU they take turns; on a GPU one after the other, since
    lists that are kept by all of them may not fit its memory."""
    for group in [[made] for made in passed] if gpu else [passed]:
        calls = [_calls(made, inputs, _as_checked(made)) for made in group]
        try:
            taken = iter(_measured([call for own in calls for call in own], effort, gpu))
            times = [
                _columns([next(taken) for _ in own], made.chosen.every) for made, own in zip(group, calls, strict=True)
            ]
            parts = _time_parts(group, inputs, effort, gpu)
            for made, own, passes, (alone, wrong) in zip(group, calls, times, parts, strict=True):
                if wrong := _first_wrong(own) or wrong:
                    made.row |= {"status": "failed", "reason": f"when it was timed: {wrong}"}
                    continue
                made.row |= passes | alone
                made.row |= _rest(made.row) | _memory(made, inputs)
        except RuntimeError as error:
            # Such as memory that is used up.
            for made in group:
                made.row |= {"status": "failed", "reason": refusal(error)}
        for made in group:
            _forget(made, inputs)


def _time_parts(group, inputs, effort, gpu):
    """``(columns, wrong)`` of each of a group: the times of the parts of a pass, and what was wrong with one."""
    parts = [_parts(made, inputs) for made in group]
    alone = iter(_measured([call for own in parts for call in own.values()], effort, gpu))
    found = []
    for made, part in zip(group, parts, strict=True):
        often = {name: made.chosen.every if name == "predict_us" else 1 for name in part}
        times = {name: made.row["layers"] * next(alone).p50_us / often[name] for name in part}
        found.append((times, _first_wrong(part.values())))
    return found


def _rest(row):
    """The column of what is left of a pass."""
    return {"rest_us": row["p50_us"] - sum(row.get(name, 0) for name in ("attend_us", "predict_us"))}


def _parts(made, inputs):
    """The calls of one layer's attention and of its choosing, by the columns of all layers."""
    q, k, v = made.tokens
    rows = np.unique(np.linspace(0, q.shape[2] - 1, ROWS).astype(int))

    def judge(found):
        error = reference.relative_error(found[:, :, rows], made.out[:, :, rows])
        tolerance = 2 * made.row["tolerance"]
        return "" if error <= tolerance else f"an attention is off by {error:.2g} from that of the network"

    def attending(call):
        return {"attend_us": timing.Checked(call, judging(judge))}

    def judge_lists(found):
        same_lists(found, made.lists)
        return ""

    if made.chosen.by in CHOOSING:
        predict = timing.Checked(lambda: _predicted(made, q, k).tensors, judging(judge_lists))
        return attending(lambda: slices.attend(q, k, v, made.lists)) | {"predict_us": predict}
    clip = made.network.clip(pattern.grid(inputs[0].shape), inputs[0].device)
    return attending(lambda: clip.layers[0](q, k, v))


def _memory(made, inputs):
    """Columns of what a pass takes of a GPU's memory, and of the lists that are kept."""
    network, x = made.network, inputs[0]
    network(*inputs)
    held = {"lists_bytes": _kept(made, inputs).memory_bytes} if made.chosen.every > 1 else {}
    if x.is_cuda:
        timing.wait(x)
        before = torch.cuda.memory_allocated(x.device)
        torch.cuda.reset_peak_memory_stats(x.device)
        network(*inputs, step=min(made.chosen.every - 1, 1))
        timing.wait(x)
        held["peak_bytes"] = torch.cuda.max_memory_allocated(x.device) - before
    return held


def _kept(made, inputs):
    """The `slices.Steps` of an attention that keeps lists."""
    return made.network.clip(pattern.grid(inputs[0].shape), inputs[0].device).layers[0].attention.steps


def _forget(made, inputs):
    """Free the lists that an attention keeps: those of several would not fit a GPU's memory."""
    if made.chosen.every > 1:
        _kept(made, inputs).clear()


def _sample(passed, inputs, steps, seed):
    """Fill in how far sampled clips are from that of dense attention, from the same noise."""
    frames = {}
    for made in passed:
        begin = time.perf_counter()
        sampled = made.network.sample(steps=steps, seed=seed)
        frames[made.row["attention"]] = clips.decode(sampled.latents.float().cpu()).clamp(0, 1)
        made.row |= {"sampler_steps": steps, "sample_s": time.perf_counter() - begin}
        _forget(made, inputs)
    first, *others = passed or [None]
    for made in others:
        if first.chosen.by == "dense":
            error = (frames[made.row["attention"]] - frames[first.row["attention"]]).square().mean()
            made.row["psnr"] = float(-10 * error.log10())


def _compiled(made, inputs, effort, dense, tolerance, gpu):
    """The row of a contender whose layers are compiled: with what was checked before, and its own velocity."""
    blank = ("first_call_s", "made_us", "kept_us", "p20_us", "p50_us", "p80_us", "repetitions", "rse", "timing")
    blank += ("rest_us", "peak_bytes")
    # Told once.
    blank += ("sampler_steps", "psnr", "sample_s") if "p50_us" in made.row else ()
    row = {name: value for name, value in made.row.items() if name not in blank}
    row |= {"mode": "compile", "time": now()}
    # What was compiled for another attention counts against the limit of torch's cache, and is forgotten.
    torch.compiler.reset()
    eager, begin = row["velocity_error"], time.perf_counter()
    try:
        alone, wrong = ({}, "") if "attend_us" in row else _time_parts([made], inputs, effort, gpu)[0]

        def judge(found):
            # Compiled code rounds otherwise, by as much as lists of all keys may.
            off = _off(found, dense)
            if off <= eager * 1.5 + tolerance:
                return ""
            return f"compiled, the velocity is off by {off:.2g} from dense attention, eager {eager:.2g}"

        calls = _calls(made, inputs, judge)
        found = [call() for call in calls]
        timing.wait(inputs[0])
        row["first_call_s"] = time.perf_counter() - begin
        row["velocity_error"] = max(_off(x, dense) for x in found)
        if wrong := next(filter(None, map(judge, found)), wrong):
            return row | {"status": "failed", "reason": wrong}
        taken = _measured(calls, effort, gpu)
        if wrong := _first_wrong(calls):
            return row | {"status": "failed", "reason": f"when it was timed: {wrong}"}
        row |= alone | _columns(taken, made.chosen.every)
        return row | _rest(row) | _memory(made, inputs)
    except _REFUSALS as error:
        return row | {"status": "failed", "reason": refusal(error)}
    finally:
        _forget(made, inputs)
