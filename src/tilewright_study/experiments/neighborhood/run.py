"""Neighbourhood attention of one layer by Tilewright and by others: each is compared with float64, and then timed (T5).

A row that did not pass has the status ``failed`` and no time; one that could not run has ``skipped``; both say why.
"""

import time
from functools import partial
from importlib import import_module
from math import prod

import numpy as np
import torch
import torch.nn.functional as F

from tilewright import devices, neighborhood, reference
from tilewright.attention.profile import DTYPES
from tilewright.core import registry
from tilewright.core.errors import DeviceError, Unavailable
from tilewright.core.timing import FEWEST, time_gpu, time_host, time_in_turns
from tilewright.neighborhood.operators import launches
from tilewright.torch_attention import need_gpu
from tilewright_study.experiments.neighborhood import OURS, layer
from tilewright_study.experiments.neighborhood.flex import prepare as flex
from tilewright_study.measure import lock
from tilewright_study.measure.checks import checked, errors, refusal, settled
from tilewright_study.measure.rows import machine, now

# Queries that are checked, about; between two of them lie fewer tokens than a box has on all but the largest grids.
CHECKED = 512
# Values of keys that `_gather` brings together at a time: what a processor's cache holds, or what a GPU is busy with.
GATHERED = {"cpu": 1 << 20, "cuda": 1 << 26}


class Tokens:
    """Queries, keys and values [1, *grid, heads, head_dim] of a layer, and what float64 makes of some queries."""

    def __init__(self, case, how):
        """Draw them by the seed. Raises `ConfigError`, `UnknownNameError` and `DeviceError`."""
        registry.check("dtype", how.dtype, DTYPES)
        self.case, self.layer = case, layer(case)
        self.facts, self.dtype = devices.describe(how.device), getattr(torch, how.dtype)
        self.place = devices.facts(how.device).TORCH_DEVICE
        self.gpu = devices.facts(how.device).GPU_TIMER
        generator = torch.Generator(self.place).manual_seed(how.seed)
        shape = 1, *self.layer.grid, self.layer.heads, self.layer.head_dim
        draw = partial(torch.randn, shape, generator=generator, dtype=self.dtype, device=self.place)
        self.q, self.k, self.v = draw(), draw(), draw()
        first = np.linspace(0, self.count, min(self.count, CHECKED) + 1).astype(np.int64)
        drawn = np.random.default_rng(how.seed).integers(first[:-1], first[1:])
        self.rows = torch.from_numpy(np.unique(np.r_[drawn, 0, self.count - 1])).to(self.place)
        self.expected, self.dense = self._expected(), None

    @property
    def count(self):
        """Their number."""
        return prod(self.layer.grid)

    @property
    def arguments(self):
        """The rule of the layer by the names that `neighborhood.attend` has."""
        return {name: getattr(self.layer.rule, name) for name in ("window", "stride", "dilation", "causal", "border")}

    @property
    def known(self):
        """Columns that all rows share."""
        found = self.layer
        sizes = {"tokens": self.count, "heads": found.heads, "head_dim": found.head_dim, "axes": len(found.grid)}
        words = {name: "x".join(map(str, x)) for name, x in (("grid", found.grid), ("window", found.rule.window))}
        known = {"case": self.case, **words, **sizes, "pairs": found.rule.pairs(found.grid)}
        return known | {"dtype": str(self.dtype).removeprefix("torch."), **machine(self.facts), "time": now()}

    def _expected(self):
        """float64 [queries, heads, head_dim] of the queries that are checked, each over its own keys alone."""
        rule, grid = self.layer.rule, self.layer.grid
        each = zip(grid, rule.window, rule.stride, rule.dilation, rule.causal, strict=True)
        seen = [reference.axis_pairs(*one, rule.border) for one in each]
        q, k, v = (x[0].flatten(0, -3) for x in (self.q, self.k, self.v))
        everything, found = torch.ones(1, 1, dtype=torch.bool, device=self.place), []
        for row in self.rows.tolist():
            at = np.zeros(1, np.int64)
            for n, pairs, x in zip(grid, seen, np.unravel_index(row, grid), strict=True):
                at = np.add.outer(at * n, pairs[int(x)].nonzero()[:, 0].numpy()).ravel()
            keys = torch.from_numpy(at).to(self.place)
            own = (x.transpose(0, 1) for x in (q[row : row + 1], k[keys], v[keys]))
            found.append(reference.attention(*(x[None] for x in own), everything)[0, :, 0])
        return torch.stack(found)

    def judged(self, call, of, expected, **facts):
        """``(row, call)`` of a call whose result ``of(result)`` has the checked queries [queries, heads, head_dim]."""
        row = self.known | {"status": "ok", "tolerance": reference.TOLERANCE[self.dtype]} | facts
        row |= {"checked_rows": len(self.rows)}
        try:
            return checked(call, lambda found: errors(of(found), expected), row, like=self.q)
        except Unavailable as reason:
            return self._without("skipped", str(reason), facts)
        except (DeviceError, RuntimeError) as error:
            return self._without("failed", refusal(error), facts)

    def _without(self, status, reason, facts):
        return self.known | facts | {"status": status, "reason": reason}, None

    def skipped(self, reason, **facts):
        """A row of what is not run."""
        return self._without("skipped", reason, facts)

    def on_grid(self, found):
        """The checked queries of a result [1, *grid, heads, head_dim]."""
        return found.flatten(1, -3)[0, self.rows]


@torch.inference_mode()
def run(case, settings, how):
    """Yield the rows of a layer. Raises `TilewrightError`.

    A GPU times each call by itself, right after its check. On a CPU all calls are timed at the end, in turns: its clock
    and its other work change within seconds.
    """
    tokens, effort = Tokens(case, how), how.effort(settings.max_seconds)
    found = _checked(tokens, settings)
    if tokens.gpu:
        yield from (row if call is None else _on_gpu(tokens, row, call, effort) for row, call in found)
        return
    found = list(found)
    calls = [call for _, call in found if call is not None]
    timings = iter(time_in_turns(calls, gpu=False, turns=FEWEST, **effort.limits))
    for row, call in found:
        yield row if call is None else _with_rate(settled(row, call, next(timings).columns) | {"time": now()})


@torch.inference_mode()
def first_calls(case, settings, how):
    """Yield what was compiled of a layer. Raises `TilewrightError`."""
    tokens = Tokens(case, how)
    for row, _ in _checked(tokens, settings):
        if row["provider"] == "flex" or tokens.gpu:
            yield f"{row['provider']} {row.get('box', '')}".strip()


def _checked(tokens, settings):
    """Yield ``(row, call)`` of each row: call is None where a check failed, or nothing ran."""
    launch, found = launches(tokens.place), tokens.layer
    begin = time.perf_counter()
    sizes = {"heads": found.heads, "head_dim": found.head_dim, "dtype": tokens.dtype, "device": tokens.place}
    chosen = neighborhood.plan(found.grid, **tokens.arguments, **sizes)
    assert chosen.choice is not None
    plan_us = (time.perf_counter() - begin) * 1e6
    with lock.untimed():
        heads = found.heads, found.heads, found.head_dim, found.head_dim
        boxes = launch.candidates(found.rule, found.grid, *heads, tokens.dtype)
    attend = partial(neighborhood.attend, tokens.q, tokens.k, tokens.v, **tokens.arguments)
    facts = {"provider": OURS, "box": boxes[0].name, "chosen": True, "predicted": 1.0, "visited": boxes[0].visited}
    yield tokens.judged(attend, tokens.on_grid, tokens.expected, **facts, plan_us=plan_us)
    scale = found.head_dim**-0.5
    tried = boxes[1 : 1 + settings.boxes] if tokens.count <= settings.box_tokens else []
    for box in tried:
        call = partial(launch.forward, tokens.q, tokens.k, tokens.v, found.rule, scale, None, False, form=box.form)
        facts = {"provider": OURS, "box": box.name, "chosen": False, "visited": box.visited}
        facts["predicted"] = box.predicted / boxes[0].predicted
        yield tokens.judged(call, lambda made: tokens.on_grid(made[0]), tokens.expected, **facts)
    for name, most in settings.contenders.items():
        if tokens.count > most:
            yield tokens.skipped(f"a grid of {tokens.count:,} tokens; it is run on {most:,} at most", provider=name)
        else:
            yield from _contender(name, tokens)


def _contender(name, tokens):
    """Yield ``(row, call)`` of a contender, of each of its forms."""
    try:
        with lock.untimed():
            forms = _PREPARED[name](tokens)
    except Unavailable as reason:
        yield tokens.skipped(str(reason), provider=name)
        return
    except RuntimeError as error:
        yield tokens._without("failed", refusal(error), {"provider": name})
        return
    for variant, call, of, expected in forms:
        yield tokens.judged(call, of, expected, provider=name, variant=variant)


def _on_gpu(tokens, row, call, effort):
    """A row with its time on the GPU, and ours with the host's."""
    timing = time_gpu(call, **effort.limits)
    row = settled(row, call, timing.columns | {"timing": timing.method, "time": now()})
    if row["status"] == "ok" and row.get("chosen"):
        latency_us, host_us = time_host(call, **effort.limits)
        row = settled(row, call, {"latency_us": latency_us, "host_us": host_us})
    return _with_rate(row)


def _with_rate(row):
    """A row with what it computes a second of the pairs that the result is made of, once it has a time."""
    if row["status"] != "ok":
        return row
    return row | {"useful_gflops": 4e-3 * row["pairs"] * row["heads"] * row["head_dim"] / row["p50_us"]}


# Contenders: ``(variant, call, checked queries of its result, what these are to be)`` of each form.


def _gather(tokens):
    """In eager torch: the keys of some queries are brought together, and attended to by products of batches."""
    found, axes = tokens.layer, []
    for axis, n in zip(found.rule.axes, found.grid, strict=True):
        x = np.arange(n)
        index, first = np.divmod(x, axis.dilation)
        ends = [axis.keys(i, axis.lengths(n)[r]) for i, r in zip(index, first, strict=True)]
        lo, hi = (np.array(end)[:, None] for end in zip(*ends, strict=True))
        keys = lo + np.arange(axis.window)
        axes.append((np.minimum(keys, hi - 1) * axis.dilation + first[:, None], keys < hi))
    at, seen = (_over_axes([each[part] for each in axes], found.grid, tokens.place) for part in (0, 1))
    # Tokens of a head side by side, so that products of batches copy nothing.
    q, k, v = (x[0].flatten(0, -3).transpose(0, 1).contiguous() for x in (tokens.q, tokens.k, tokens.v))
    q = q[..., None] * found.head_dim**-0.5
    whole = bool(prod(float(each.all()) for _, each in axes))
    some = max(1, GATHERED[tokens.place] // (prod(found.rule.window) * found.heads * found.head_dim))

    def attend():
        parts = []
        for lo in range(0, tokens.count, some):
            here = slice(lo, min(tokens.count, lo + some))
            keys = at(here)
            scores = (k[:, keys] @ q[:, here])[..., 0]
            if not whole:
                scores = scores.masked_fill(~seen(here), -torch.inf)
            parts.append((scores.softmax(-1)[:, :, None] @ v[:, keys])[:, :, 0])
        return torch.cat(parts, 1)

    return [("eager", attend, lambda made: made[:, tokens.rows].transpose(0, 1), tokens.expected)]


def _over_axes(tables, grid, place):
    """``of(queries)`` [queries, keys]: for a slice of the tokens, what `tables` [n, window] of each axis say of their
    keys: their numbers, or whether it is true along each axis."""
    tables = [torch.from_numpy(np.ascontiguousarray(table)).to(place) for table in tables]
    number, strides = tables[0].dtype != torch.bool, [prod(grid[axis + 1 :]) for axis in range(len(grid))]

    def of(queries):
        row = torch.arange(queries.start, queries.stop, device=place)
        found = None
        for table, n, stride in zip(tables, grid, strides, strict=True):
            own = table[row // stride % n]
            own = own * stride if number else own
            if found is None:
                found = own
            else:
                pair = found[:, :, None], own[:, None]
                found = (pair[0] + pair[1] if number else pair[0] & pair[1]).flatten(1)
        return found

    return of


def _flex(tokens):
    """FlexAttention, compiled, of tokens in an order of boxes, into which they are brought once."""
    attend, order = flex(tokens.layer, tokens.place, tokens.gpu)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    q, k, v = (x[0].flatten(0, -3)[order].transpose(0, 1)[None].contiguous() for x in (tokens.q, tokens.k, tokens.v))

    def of(made):
        return made[0].transpose(0, 1)[place[tokens.rows]]

    return [("boxes", partial(attend, q, k, v), of, tokens.expected)]


def _natten(tokens):
    """NATTEN's fused kernels, each form that it has for these tensors. ASSUME: version 0.21 of the interface."""
    found = tokens.layer
    need_gpu(tokens.facts["kind"])
    if found.rule.border == "cut":
        raise Unavailable("computes another pattern: its windows are shifted at borders")
    try:
        natten, configs = import_module("natten"), import_module("natten.backends.configs")
    except ImportError as error:
        raise Unavailable(f"natten cannot be imported: {error}") from error
    if not natten.HAS_LIBNATTEN:
        raise Unavailable("natten is installed without its kernels")
    stated = {"kernel_size": found.rule.window, "stride": found.rule.stride, "dilation": found.rule.dilation}
    qkv = tokens.q, tokens.k, tokens.v
    attend = partial(getattr(natten, f"na{len(found.grid)}d"), *qkv, **stated, is_causal=found.rule.causal)
    forms = [("default", attend, tokens.on_grid, tokens.expected)]
    for (q_tile, kv_tile), schedule in configs.get_configs_for_cutlass_hopper_fna(*qkv):
        tiles = {"q_tile_shape": q_tile, "kv_tile_shape": kv_tile, "kernel_schedule": schedule}
        name = "-".join("x".join(map(str, tile)) for tile in (q_tile, kv_tile))
        name = f"hopper-{name}-{schedule.name}"
        forms.append((name, partial(attend, backend="hopper-fna", **tiles), tokens.on_grid, tokens.expected))
        forms.append((f"{name}-ordered", *_natten_kernel(tokens, q_tile, kv_tile, schedule), tokens.expected))
    return forms


def _natten_kernel(tokens, q_tile, kv_tile, schedule):
    """``(call, of)`` of NATTEN's kernel alone, whose tokens lie in the order of its tiles, into which they are brought
    once."""
    found, axes = tokens.layer, len(tokens.layer.grid)
    library, permute = import_module("natten._libnatten"), import_module("natten.token_permute")
    dilation = found.rule.dilation
    q, grid, q_grid = permute.token_permute_operation(tokens.q, q_tile, dilation=dilation)
    k, v = (permute.token_permute_operation(x, kv_tile, dilation=dilation) for x in (tokens.k, tokens.v))
    rule = found.rule.window, found.rule.stride, dilation, found.rule.causal, found.head_dim**-0.5
    shapes = q_grid, k[2], grid, q_tile, kv_tile, schedule.value
    attend = partial(getattr(library, f"hopper_na{axes}d_forward"), q, k[0], v[0], *rule, *shapes)

    def of(made):
        return tokens.on_grid(permute.token_unpermute_operation(made[0], grid, q_tile, dilation=dilation))

    return attend, of


def _dense(tokens):
    """Attention of all tokens to all, by torch."""
    q, k, v = (x.flatten(1, -3).transpose(1, 2).contiguous() for x in (tokens.q, tokens.k, tokens.v))
    expected = reference.dense_rows(tokens.rows.cpu().numpy(), q, k, v)[0].transpose(0, 1)

    def of(made):
        return made[0].transpose(0, 1)[tokens.rows]

    return [("torch", partial(F.scaled_dot_product_attention, q, k, v), of, expected)]


_PREPARED = {"gather": _gather, "flex": _flex, "natten": _natten, "sdpa_dense": _dense}
