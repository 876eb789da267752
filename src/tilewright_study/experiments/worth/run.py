"""One layer and one block of a vision transformer on a grid: dense, over windows of some densities, and masked (T5).

Every result is compared with float64 before it is timed. Tokens stand in plan order: a network orders them once, before
its first block, and back after the last.
"""

import time
from contextlib import suppress
from copy import deepcopy
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from tilewright import devices, reference
from tilewright.attention import plan as api
from tilewright.core.errors import ConfigError
from tilewright.core.timing import time_call, time_gpu, time_together
from tilewright.masks import _ready
from tilewright.networks.vit_parts import Block
from tilewright.nn import patterns
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.experiments.attention import run as _attention
from tilewright_study.experiments.worth import OURS, PARTS
from tilewright_study.measure import lock
from tilewright_study.measure.checks import checked, errors, refusal, settled
from tilewright_study.measure.rows import machine, now

N_GLOBAL = 1
# ASSUME: a window whose density is off by more than this share of the one asked for stands for another one.
OFF = 0.5
# Rows that are checked, about: one of each stretch of as many tokens, see `reference.sample_rows`.
CHECKED = 1024
# Of a block's rows, by how far attention moves them. Weights and tokens are drawn such that it moves a token by about
# its own length; products of the three other layers round as often as those of attention. Measured on a CPU: 2e-6 in
# float32, 0.004 in float16, 0.03 in bfloat16, a fault of one key in a hundred 0.1 (tests/study/test_worth.py).
BLOCK_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.0125, torch.bfloat16: 0.1}
# Side of the coarse grid that tokens follow, so that a window's mean is another one than that of all tokens.
COARSE = 4
# Standard deviation of the scores of a block's attention.
SCORES = 2.0
# What the solver of a plan may take, as in the experiment `heatmap`.
SOLVE_SECONDS = 10.0


# Patterns


def spans(side, square, halo):
    """``(first, last)`` of the coordinates that each square of coordinates sees along one axis, int [side / square]."""
    first = np.arange(0, side, square)
    return np.maximum(first - halo, 0), np.minimum(first + square + halo, side)


def entries(side, square, halo):
    """``(pairs, pairs in distinct rows)`` of `pattern`, by arithmetic."""
    first, last = spans(side, square, halo)
    tokens, local = N_GLOBAL + side**2, int((last - first).sum()) ** 2
    of_globals = N_GLOBAL * tokens
    return of_globals + local * square**2 + N_GLOBAL * side**2, of_globals + local + N_GLOBAL * len(first) ** 2


def halo_of(side, square, density):
    """The halo whose pattern has the density closest to `density`."""
    pairs = (1 + side**2) ** 2
    halos = range(1 if square == 1 else 0, side)
    return min(halos, key=lambda halo: abs(entries(side, square, halo)[0] / pairs - density))


def pattern(side, square, halo):
    """Windows on a grid of `side` x `side` tokens behind a global one: the `square` x `square` queries of a square see
    the tokens up to `halo` away from it. Of squares of one token it is the window around each, else HaloNet's (Vaswani
    et al., 2021)."""
    if square == 1:
        return patterns.graph(f"window-{2 * halo + 1}-g{N_GLOBAL}", (side, side), N_GLOBAL)
    own = [np.arange(lo, hi) for lo, hi in zip(*spans(side, square, halo), strict=True)]
    special = np.arange(N_GLOBAL)
    local = [np.concatenate((special, N_GLOBAL + np.add.outer(side * y, x).ravel())) for y in own for x in own]
    place = np.arange(side) // square
    number = (place[:, None] * len(own) + place).ravel()
    row_id = np.concatenate((np.zeros(N_GLOBAL, int), 1 + number))
    hint = np.concatenate((np.full(N_GLOBAL, -1), number))
    sizes = _ready.Sizes()
    return _ready.build("halo", sizes, [np.arange(N_GLOBAL + side**2), *local], row_id, grid=(side, side), hint=hint)


# A block


class ViT:
    """A block of a vision transformer in two halves, before and after attention, with weights that `seed` draws."""

    def __init__(self, heads, head_dim, *, device, dtype, seed, compiled=False):
        """compiled: each half is compiled in its first call; what attends is the caller's."""
        width = heads * head_dim
        generator = torch.Generator().manual_seed(seed)
        self.block = Block(width, heads)
        with torch.no_grad():
            for name, weight in self.block.named_parameters():
                if weight.ndim == 2:
                    weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)
                elif name.endswith("bias"):
                    weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
            # Of queries and keys.
            self.block.attn.qkv.weight[: 2 * width] *= SCORES**0.5
        self.block.to(device, dtype)
        self.before, self.after = self._before, self._after
        if compiled:
            self.before, self.after = (torch.compile(half, dynamic=False) for half in (self._before, self._after))

    def exact(self):
        """The same in float64, not compiled."""
        made = object.__new__(ViT)
        made.block = deepcopy(self.block).double()
        made.before, made.after = made._before, made._after
        return made

    def _before(self, x):
        return tuple(each.transpose(1, 2) for each in self.block.attn.split(self.block.norm1(x)))

    def _after(self, x, out):
        x = x + self.block.attn.proj(out.transpose(1, 2).flatten(2))
        return x + self.block.mlp(self.block.norm2(x))

    def __call__(self, x, attend):
        """Tokens [B, N, C]; attend: ``attend(q, k, v)`` on [B, H, N, D]."""
        return self.after(x, attend(*self.before(x)))


def grid_tokens(side, width, batch, seed):
    """float32 [batch, 1 + side^2, width]: half of the variance follows a coarse grid, so that neighbours are alike."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch, width, COARSE, COARSE, generator=generator)
    smooth = F.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=True).flatten(2).mT
    smooth = torch.cat((torch.randn(batch, N_GLOBAL, width, generator=generator), smooth), dim=1)
    return (smooth + torch.randn(smooth.shape, generator=generator)) / 2**0.5


class Image:
    """The tokens of a block and what float64 makes of them, in the model's own order."""

    def __init__(self, vit, side, tokens):
        """tokens: the `_attention.Tokens` of a layer, for sizes, type and device."""
        width = tokens.heads * tokens.head_dim
        self.vit, self.exact = vit, vit.exact()
        x = grid_tokens(side, width, tokens.batch, tokens.seed)
        self.x = x.to(tokens.ordered[0].device, tokens.dtype)

    def expected(self, order, rows, attend):
        """``(expected, middle)`` of `rows` of the tokens in `order`: a block's result in float64, and that without
        attention. attend: ``attend(q, k, v)`` of those rows, in float64."""
        x = self.x[:, order].double()
        out = attend(*self.exact.before(x))
        return self.exact.after(x[:, rows], out), self.exact.after(x[:, rows], torch.zeros_like(out))


# Rows


def run(case, settings, how):
    """Yield the rows of the grid `case`. Raises `TilewrightError`."""
    settings.check_values("")
    yield from rows(_side(case, settings), settings, how)


def first_calls(case, settings, how):
    """Yield what was compiled of the grid `case`. Raises `TilewrightError`."""
    settings.check_values("")
    yield from compile_case(_side(case, settings), settings, how)


def _side(case, settings):
    if not case.isdecimal() or int(case) < 4 or int(case) % settings.square:
        raise ConfigError(f"case {case!r}: expected tokens a side, at least 4, whole squares of {settings.square}")
    return int(case)


@torch.inference_mode()
def rows(side, settings, how):
    """Yield the rows of a grid: dense ones first, then those of each density.

    A GPU times each call by itself, right after its check. On a CPU all calls are timed at the end, in rounds of one
    call each: its clock and its other work change within seconds, and ratios of these times are what is asked for.
    """
    effort = how.effort(settings.max_seconds)
    found = _checked_rows(side, settings, how, effort)
    if devices.facts(how.device).GPU_TIMER:
        for row, call in found:
            yield _timed(row, call, True, effort)
        return
    found = list(found)
    calls = [call for _, call in found if call is not None]
    timings = iter(time_together(calls, **effort.limits))
    for row, call in found:
        yield row if call is None else settled(row, call, next(timings).columns) | {"time": now()}


def _checked_rows(side, settings, how, effort):
    """Yield ``(row, call)`` of each row: call is None where a check failed, or nothing ran."""
    sizes = {"heads": settings.heads, "head_dim": settings.head_dim, "batch": settings.batch}
    common = {"device": how.device, "dtype": how.dtype, "seed": how.seed}
    shared = {"side": side, "tokens": N_GLOBAL + side**2, "square": settings.square, "dtype": how.dtype, **sizes}
    shared |= machine(devices.describe(how.device))
    tokens = _tokens(_everything(side), sizes, common)
    image = Image(_vit(settings, tokens, how), side, tokens)
    known = shared | {"asked": 1.0, "density": 1.0}
    dense = [_baseline(name, sparse_baselines.member(name).VARIANTS, tokens, effort) for name in sparse_baselines.DENSE]
    if sum(call is not None for _, call, _ in dense) > 1:
        dense = [(_timed(row, call, tokens.gpu, effort), call, attend) for row, call, attend in dense]
    yield from ((known | row, call) for row, call, _ in dense)
    right = [(row, attend) for row, call, attend in dense if row["status"] == "ok"]
    if right:
        row, attend = min(right, key=lambda each: each[0].get("p50_us", 0))
        expected = image.expected(slice(None), tokens.rows, partial(reference.dense_rows, tokens.rows))
        about = known | {"part": "block", "provider": row["provider"], "compiled": settings.compiled}
        found, call = _block(image, slice(None), tokens, attend, expected)
        yield about | found, call
    for asked in settings.densities:
        for row, call in _of_density(side, asked, settings, how, effort, sizes, common, image):
            yield shared | row, call


def _of_density(side, asked, settings, how, effort, sizes, common, image):
    """Yield ``(row, call)`` of each row of one density."""
    halo = halo_of(side, settings.square, asked)
    pairs, held = entries(side, settings.square, halo)
    known = {"asked": asked, "density": pairs / (N_GLOBAL + side**2) ** 2, "window": settings.square + 2 * halo}
    if reason := _unfit(asked, known["density"], held, settings.max_entries):
        known |= {"provider": OURS, "status": "skipped", "reason": reason, "time": now()}
        yield from ((known | {"part": part}, None) for part in PARTS)
        return
    graph = pattern(side, settings.square, halo)
    with lock.untimed():
        begin = time.perf_counter()
        plan = _plan(graph, settings, how)
        plan_s = time.perf_counter() - begin
    used = np.bincount(plan.schedule.tile, minlength=len(plan.schedule.tiles))
    planned = {"provider": OURS, "reorder": plan.reorder["order"], "solver": plan.schedule.solver, "plan_s": plan_s}
    planned["tiles"] = "+".join(name for name, count in zip(plan.schedule.tiles, used, strict=True) if count)
    planned["variant"] = plan.schedule.runs if plan.schedule.form else ""
    tokens = _tokens(plan.graph, sizes, common)
    attend = partial(plan, ordered=True)
    row, call = _layer(tokens, attend, tokens.masked_result)
    yield known | planned | row, call
    order = plan.row_order.to(image.x.device)
    expected = image.expected(order, tokens.rows, partial(reference.attention_rows, plan.graph, tokens.rows))
    row, call = _block(image, order, tokens, attend, expected)
    yield known | planned | {"compiled": settings.compiled} | row, call
    if asked in settings.masked_densities:
        for name, variants in settings.masked.items():
            row, call, _ = _baseline(name, variants, tokens, effort)
            yield known | row, call


def _unfit(asked, density, held, max_entries):
    """Why a window of this density is not run, else an empty text."""
    if abs(density - asked) > OFF * asked:
        return f"no window on this grid has a density of {asked:.0%}; the closest has {density:.1%}"
    if held > max_entries:
        return f"the distinct rows hold {held:,} pairs; at most {max_entries:,} are allowed"
    return ""


def _everything(side):
    """The pattern of all pairs."""
    return patterns.graph(patterns.FULL, (side, side), N_GLOBAL)


def _tokens(graph, sizes, common):
    """`Tokens` of a graph of which about `CHECKED` rows are checked, on a GPU, too."""
    found = _attention.Tokens(graph, **sizes, **common)
    every = max(reference.stride(graph.n_rows), graph.n_rows // CHECKED)
    found.rows = reference.sample_rows(graph, every, found.seed)
    return found


def _vit(settings, tokens, how):
    place = tokens.ordered[0].device
    sizes = {"heads": settings.heads, "head_dim": settings.head_dim}
    return ViT(**sizes, device=place, dtype=tokens.dtype, seed=how.seed, compiled=settings.compiled)


def _plan(graph, settings, how):
    """The plan of a pattern, with all that `tilewright.plan` chooses by itself."""
    found = api.plan(
        graph,
        heads=settings.heads,
        head_dim=settings.head_dim,
        dtype=getattr(torch, how.dtype),
        device=how.device,
        reorder=settings.order,
        solver=settings.solver,
        time_limit_s=SOLVE_SECONDS,
        seed=how.seed,
    )
    return found


def _baseline(name, variants, tokens, effort):
    """``(row, call, attend)`` of the fastest form of a baseline that is right, else of one that is not, without a call.

    attend: ``attend(q, k, v)``; call: without arguments, on these tokens.
    """
    module = sparse_baselines.member(name)
    found = []
    for variant in variants:
        facts = {"part": "layer", "provider": name, "variant": variant, "time": now()}
        try:
            attend = _attention._prepared(module, variant, tokens).call
            # The first call may compile.
            attend(*tokens.ordered)
            row, call = _layer(tokens, attend, tokens.masked_result if module.MASKED else tokens.dense_result)
            found.append((facts | row, call, attend))
        except sparse_baselines.Unavailable as reason:
            found.append((facts | {"status": "skipped", "reason": str(reason)}, None, None))
        except RuntimeError as error:
            found.append((facts | {"status": "failed", "reason": refusal(error)}, None, None))
    if len(variants) > 1:
        found = [(_timed(row, call, tokens.gpu, effort), call, attend) for row, call, attend in found]
    ranks = ("ok", "failed", "skipped")
    return min(found, key=lambda each: (ranks.index(each[0]["status"]), each[0].get("p50_us", 0)))


def _layer(tokens, attend, expected):
    """``(row, call)`` of attention alone; call is None where its check failed."""
    row = {"part": "layer", "tolerance": reference.TOLERANCE[tokens.dtype], **_passing(tokens)}
    call = partial(attend, *tokens.ordered)
    return checked(call, lambda found: errors(found[:, :, tokens.rows], expected), row, like=tokens.ordered[0])


def _block(image, order, tokens, attend, expected):
    """``(row, call)`` of a block with this attention, tokens in `order`; call is None where it failed."""
    x = image.x[:, order].contiguous()
    expected, middle = expected

    def columns(found):
        found = found[:, tokens.rows]
        return errors(found, expected) | {"relative_error": reference.relative_error(found, expected, middle)}

    row = {"part": "block", "tolerance": BLOCK_TOLERANCE[tokens.dtype], **_passing(tokens)}
    try:
        return checked(partial(image.vit, x, attend), columns, row, like=x)
    except RuntimeError as error:
        return {"part": "block", "status": "failed", "reason": refusal(error), "time": now()}, None


def _passing(tokens):
    """Columns of a row whose check passes."""
    return {"checked_rows": len(tokens.rows), "time": now(), "status": "ok"}


def _timed(row, call, gpu, effort):
    """A `row` with the time of its `call`, unless it has none or was timed."""
    if call is None or "p50_us" in row or row["status"] != "ok":
        return row
    timing = (time_gpu if gpu else time_call)(call, **effort.limits)
    return settled(row, call, timing.columns | ({"timing": timing.method} if gpu else {}))


def compile_case(side, settings, how):
    """Yield the names of what was compiled for the grid, as `rows` calls it."""
    sizes = {"heads": settings.heads, "head_dim": settings.head_dim, "batch": settings.batch}
    common = {"device": how.device, "dtype": how.dtype, "seed": how.seed}
    with torch.inference_mode():
        tokens = _tokens(_everything(side), sizes, common)
        if settings.compiled:
            vit = _vit(settings, tokens, how)
            vit(Image(vit, side, tokens).x, F.scaled_dot_product_attention)
            yield "block"
        for asked in settings.masked_densities:
            if "flex" not in settings.masked:
                return
            halo = halo_of(side, settings.square, asked)
            density, held = entries(side, settings.square, halo)
            if _unfit(asked, density / tokens.graph.n_rows**2, held, settings.max_entries):
                continue
            # In the plan's order, which a compiled kernel does not depend on.
            tokens = _tokens(pattern(side, settings.square, halo), sizes, common)
            for variant in settings.masked["flex"]:
                # What cannot run says so where it is timed.
                with suppress(sparse_baselines.Unavailable, RuntimeError):
                    _attention._prepared(sparse_baselines.member("flex"), variant, tokens).call(*tokens.ordered)
                    yield f"flex {variant}, density {asked}"
