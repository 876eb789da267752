"""Attention by slice lists on planted or captured maps: how lists are chosen, what they lose, and contenders (T5).

A row that did not pass has the status ``failed`` and no time; one that could not run has ``skipped``; both say why.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch

from tilewright import devices, graph, reference, slices
from tilewright.attention.blocks import tiles
from tilewright.attention.profile import DTYPES
from tilewright.core import registry
from tilewright.core.timing import time_gpu, time_host, time_together
from tilewright.slices import orders
from tilewright.slices.prediction import LEAST
from tilewright.torch_attention.flex import BLOCK
from tilewright_study.baselines import flex_blocks
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.baselines.sparse import Unavailable
from tilewright_study.experiments.slices import ORACLE, SLICE, sizes, text
from tilewright_study.measure import slice_shares
from tilewright_study.measure.checks import checked, errors, refusal, same_lists, settled
from tilewright_study.measure.rows import machine, now
from tilewright_study.scenes import planted

OURS = "tilewright"
# The largest score that `reference.TOLERANCE` is derived for.
DERIVED_SCORE = 16
# Halvings of an interval in which a mass is looked for.
HALVINGS = 12
# By how much more than asked for the lists of a predictor may keep of attention.
PRECISION = 0.004
# Room of lists whose length is looked for: all keys.
WHOLE = 1.0
# What lists keep of attention is told from log-sum-exps; by so much it may differ from the sum of the exact shares.
RECALL_OFF = 0.01


@dataclass(frozen=True)
class Lists:
    """Lists, who chose them by which mass or share of keys, for groups of which shape, and what they keep.

    facts: columns of rows. flags: bool [1, H, G, runs] of lists of whole runs that the host knows, else None. wrong:
    why they are not what their facts say, else an empty text.
    """

    found: slices.SliceLists
    facts: dict
    flags: torch.Tensor | None = None
    wrong: str = ""

    @property
    def columns(self):
        """`facts`, and why the row of these lists has failed."""
        return self.facts | ({"status": "failed", "reason": self.wrong} if self.wrong else {})


def group(name):
    """``(rows, width)`` of a shape of groups, such as ``128x1``: queries, and keys that are listed together."""
    tile = tiles.parse(name)
    return tile.rows, tile.keys


class Maps:
    """Queries, keys and values of one case in one order, and what attention over all keys makes of them."""

    def __init__(
        self, heads, head_dim, grid, order, *, text=(0, 0), device="cpu", dtype="float32", seed=0, made=None,
        origin=None,
    ):  # fmt: skip
        """Plant `heads` heads (`planted.mixed`), or take those that were `made` elsewhere, a `planted.Planted` or a
        `captured.Captured`. text: tokens before and behind those of the grid, of planted heads. origin: columns that
        say where they are from.

        Raises `UnknownNameError`, `PatternError` and `DeviceError`.
        """
        registry.check("dtype", dtype, DTYPES)
        self.facts, self.dtype, self.seed = devices.describe(device), getattr(torch, dtype), seed
        self.place = devices.facts(device).TORCH_DEVICE
        self.grid, self.heads, self.head_dim = grid, heads, head_dim
        self.origin = {"maps": "planted"} if origin is None else origin
        if made is None:
            made = planted.tokens(grid, head_dim, planted.mixed(heads), seed=seed, device=self.place)
            if any(text):
                made = planted.with_text(made, *text, seed=seed)
        self.made, self.text = made, text
        self.arrange(order)

    def arrange(self, order):
        """Put the tokens of the grid in `order`; those of text stay."""
        (first, last), video = self.text, torch.from_numpy(orders.order(order, self.grid))
        behind = torch.arange(last) + first + len(video)
        at = torch.cat([torch.arange(first), first + video, behind]).to(self.place)
        self.order, self.cached = order, {}
        self.qkv = tuple(x[:, :, at].to(self.dtype).contiguous() for x in (self.made.q, self.made.k, self.made.v))
        self.exact = tuple(x.float() for x in self.qkv)
        self.dense, self.dense_lse = slices.dense(*self.exact)
        # Beyond the scores that the tolerance is derived for, their rounding grows with them.
        longest = [float(torch.linalg.vector_norm(x, dim=-1).max()) for x in self.exact[:2]]
        scores = longest[0] * longest[1] * self.head_dim**-0.5
        float32 = reference.TOLERANCE[torch.float32]
        self.tolerance = reference.TOLERANCE[self.dtype] + float32 * scores / DERIVED_SCORE
        self.rows = reference.sample_rows(self.pairs, reference.stride(self.tokens), self.seed)

    @property
    def tokens(self):
        """Their number."""
        return self.qkv[0].shape[2]

    @property
    def gpu(self):
        """Whether calls are timed by a GPU's own clock."""
        return devices.facts(self.facts["kind"]).GPU_TIMER

    @cached_property
    def pairs(self):
        """All pairs as a graph."""
        return graph.from_distinct_rows(
            np.array([0, self.tokens]), np.arange(self.tokens), np.zeros(self.tokens, np.int32), self.tokens
        )

    @property
    def known(self):
        """Columns that all rows share."""
        return {
            **self.origin,
            **{"heads": self.heads, "head_dim": self.head_dim, "tokens": self.tokens},
            **{"grid": self.place_of_text("x".join(map(str, self.grid))), "token_order": self.order, "status": "ok"},
            **{"dtype": str(self.dtype).removeprefix("torch."), **machine(self.facts), "time": now()},
        }

    def ranked(self, shape):
        """`slice_shares.Ranked` of the exact shares [H, G, runs] of groups of `shape`."""
        if shape not in self.cached:
            rows, width = group(shape)
            first, last = self.text
            token = torch.arange(self.tokens, device=self.place)
            always = slice_shares.run_shares(((token < first) | (token >= self.tokens - last)).float(), width) > 0
            self.cached[shape] = slice_shares.Ranked(slice_shares.run_shares(self.shares(rows), width), always)
        return self.cached[shape]

    def shares(self, rows):
        """The exact shares [H, G, N] of groups of `rows` queries, which all shapes of so many queries sum over runs."""
        key = "shares", rows
        if key not in self.cached:
            (first, last), (q, k, _) = self.text, self.exact
            q = q[:, :, first : self.tokens - last]
            groups = torch.arange(-(-q.shape[2] // rows), device=self.place)
            each = [slice_shares.group_shares(q[0, h], k[0, h], groups, rows=rows) for h in range(self.heads)]
            self.cached[key] = torch.stack(each)
        return self.cached[key]

    def oracle(self, shape, *, keep=None, mass=None):
        """`Lists` by the exact shares: the share `keep` of the keys of every group, or the fewest that hold `mass`. The
        keys of text are among them."""
        ranked, (_, width) = self.ranked(shape), group(shape)
        runs = ranked.places.shape[-1]
        counts = (
            ranked.counts(mass)
            if keep is None
            else torch.full(ranked.places.shape[:-1], max(1, ranked.least, round(keep * runs)), device=self.place)
        )
        flags = ranked.mask(counts)[None]
        mask = flags.repeat_interleave(width, -1)[..., : self.tokens]
        # Room for the longest list, and a key more than rounding may take.
        budget = min(1.0, (int(counts.max()) * width + 1) / self.tokens)
        found = slices.from_mask(mask, self.tokens, rows=group(shape)[0], width=width, budget=budget, text=self.text)
        return self.judged(Lists(found, self.facts_of(ORACLE, shape, keep=keep, mass=mass), flags))

    def uneven(self, shape, density):
        """`oracle` with the mass by which the lists hold the share `density` of all keys."""
        ranked = self.ranked(shape)
        runs = ranked.places.shape[-1]
        return self.oracle(
            shape, mass=_least(lambda mass: float(ranked.counts(mass).double().mean()) / runs >= density)
        )

    def oracle_for(self, shape, recall):
        """`oracle` with the mass by which the lists hold the share `recall` of all attention."""
        ranked = self.ranked(shape)
        return self.oracle(shape, mass=_least(lambda mass: float(ranked.kept(ranked.counts(mass)).mean()) >= recall))

    def predicted(self, name, setting, **how):
        """`Lists` by a predictor. setting: arguments of `slices.predict`; how: ``keep`` or ``mass``."""
        found = slices.predict(*self.qkv[:2], **setting, **how, text=self.text)
        shape = f"{found.layout.rows}x{found.layout.width}"
        return self.judged(Lists(found, self.facts_of(name, shape, **how)))

    def predicted_for(self, name, setting, recall):
        """`predicted` with the mass by which the lists hold the share `recall` of all attention, to `PRECISION`."""
        known = self.cached.setdefault(name, {0.0: 0.0, 1.0: 1.0})
        while True:
            low, high = max(m for m, r in known.items() if r < recall), min(m for m, r in known.items() if r >= recall)
            if known[high] - recall <= PRECISION or high - low < 2**-HALVINGS:
                return self.predicted(name, setting, budget=WHOLE, mass=high)
            # Between the neighbours, but not beside one of them: that would find the other one slowly.
            part = (recall + PRECISION / 2 - known[low]) / (known[high] - known[low])
            mass = low + (high - low) * min(0.9, max(0.1, part))
            lists = slices.predict(*self.qkv[:2], **setting, budget=WHOLE, mass=mass, text=self.text)
            known[mass] = float(self.recall(lists).mean())

    def place_of_text(self, grid):
        """The name of a grid with the tokens of text before and behind it, as `slices.sizes` reads it."""
        return "-".join(str(part) for part in (self.text[0], grid, self.text[1]) if part)

    def facts_of(self, chosen_by, shape, keep=None, mass=None, budget=None):
        """Columns that say how lists were chosen."""
        return {"chosen_by": chosen_by, "group": shape, "keep": keep, "mass": mass}

    def recall(self, lists):
        """float32 [1, H, N]: share of each query's attention that its list keeps.

        From the tokens in their own type: products of 16 bits are exact in the float32 that log-sum-exps are made in.
        """
        return slices.recall(*self.qkv[:2], lists, lse=self.dense_lse)

    def judged(self, lists):
        """`lists` with what they keep among their facts, and what they lose in float32."""
        lists.found.check(allow_empty=True)
        recall = self.recall(lists.found)
        density = lists.found.density()
        out = slices.attend(*self.exact, lists.found)
        errors = slice_shares.errors(out, self.dense)
        return Lists(
            lists.found,
            lists.facts
            | {"density": float(density.mean()), "recall": float(recall.mean())}
            | {"least_density": float(density.min()), "most_density": float(density.max())}
            | {"least_recall": float(recall.mean(-1).min()), "l1_error": errors["l1"], "cosine": errors["cosine"]}
            | {
                "largest_error": errors["largest"],
                "error_bound": float(slice_shares.error_bound(recall, self.exact[2]).max()),
            },
            lists.flags,
            self._wrong(lists, recall),
        )

    def _wrong(self, lists, recall):
        """Why lists do not hold as many keys as were asked for, or not the attention `recall` [1, H, N]; else ""."""
        (rows, width), keep, counts = group(lists.facts["group"]), lists.facts["keep"], lists.found.counts[0]
        if keep is not None and lists.facts["mass"] is None:
            # They hold whole runs, of which the last may be short, and a least number.
            fewest, most = (float(end) for end in counts.aminmax())
            asked, least = keep * self.tokens, min(LEAST + sum(self.text), self.tokens)
            if not asked - 1.5 * width <= fewest <= most <= max(asked, least) + 1.5 * width:
                return f"lists hold from {fewest:.0f} to {most:.0f} keys, {asked:.1f} were asked for"
        told = recall[0, :, self.text[0] : self.tokens - self.text[1]]
        told = slice_shares.run_shares(told, rows) / slice_shares.run_shares(torch.ones_like(told), rows)
        place, off = torch.arange(lists.found.keys.shape[-1], device=told.device), []
        # A head at a time: numbers take twice the memory of its lists.
        for keys, count, shares, own in zip(lists.found.keys[0], counts, self.shares(rows), told, strict=True):
            listed = place < count[:, None]
            kept = shares.gather(-1, keys.long().where(listed, 0)) * listed
            off.append((kept.sum(-1) - own).abs().max())
        if not (most_off := float(torch.stack(off).max())) <= RECALL_OFF:
            return f"lists keep another share of attention than is told, off by {most_off:.2g}"
        return ""

    def expected(self, lists):
        """float64 [1, H, R, D]: what attention by `lists`, None for all keys, makes of the rows that are checked."""
        if lists is None:
            return reference.dense_rows(self.rows, *self.qkv)
        q, k, v = self.qkv
        if self.gpu:
            return slice_shares.attention_rows(lists.found, torch.from_numpy(self.rows).to(self.place), q, k, v)
        heads = (slice(h, h + 1) for h in range(self.heads))
        made = [
            reference.attention_rows(lists.found.graph(0, h.start), self.rows, q[:, h], k[:, h], v[:, h]) for h in heads
        ]
        return torch.cat(made, 1)


def _least(enough):
    """The least mass in (0, 1] that is `enough`, of a sequence of halved intervals; 1 where none is."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# Contenders


@dataclass(frozen=True)
class Contender:
    """A call that is to be timed. facts: its columns. call: without arguments. lists: what it attends by, None for all
    keys. pairs: of a query and a key that its result needs, for all heads; None of a call that makes those lists, whose
    result is their tensors."""

    facts: dict
    call: object
    lists: Lists | None
    pairs: float | None


def dense(maps, name):
    """`Contender`s of one of `sparse_baselines.DENSE`: on a GPU also with the heads of a token side by side, as a
    projection leaves them, which some kernels prefer. Raises `Unavailable`."""
    setting = {"batch": 1, "heads": maps.heads, "head_dim": maps.head_dim, "dtype": maps.dtype}
    member = sparse_baselines.member(name)
    ready = member.prepare(maps.pairs, variant=member.VARIANTS[0], device=maps.facts["kind"], max_bytes=0, **setting)
    facts = {"provider": name, "call": "attend", "density": 1.0, "recall": 1.0}
    layouts = [maps.qkv]
    if maps.gpu:
        layouts.append(tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in maps.qkv))
    for qkv in layouts:
        yield Contender(facts, lambda qkv=qkv: ready.call(*qkv), None, maps.heads * maps.tokens**2)


def ours(maps, lists):
    """The `Contender` of attention by given lists."""
    facts = {"provider": OURS, "call": "attend", **lists.facts}
    return Contender(facts, lambda: slices.attend(*maps.qkv, lists.found), lists, _pairs(maps, lists))


def predicting(maps, setting, lists, budget):
    """`Contender` of making `lists` by a predictor, and of doing so before each attention."""
    q, k, v = maps.qkv
    how = {"keep": lists.facts["keep"], "budget": budget, "text": maps.text}
    known = {"provider": OURS, **lists.facts}

    def both():
        return slices.attend(q, k, v, slices.predict(q, k, **setting, **how))

    yield Contender(known | {"call": "predict"}, lambda: slices.predict(q, k, **setting, **how).tensors, lists, None)
    yield Contender(known | {"call": "predict_attend"}, both, lists, _pairs(maps, lists))


def blocked(maps, name, lists):
    """The `Contender` of one of `sparse_baselines.BLOCKS` by lists of whole blocks. Raises `Unavailable`."""
    if any(maps.text):
        raise Unavailable("expected blocks of queries from the first one on, found text")
    setting = {"block": group(lists.facts["group"]), "head_dim": maps.head_dim, "dtype": maps.dtype}
    shape = (maps.tokens, maps.tokens)
    attend = sparse_baselines.member(name).blocks(lists.flags, shape, **setting, device=maps.facts["kind"])
    facts = {"provider": name, "call": "attend", **lists.facts}
    return Contender(facts, lambda: attend(*maps.qkv), lists, _pairs(maps, lists))


def compile_flex(heads, head_dim, grid, *, device, dtype):
    """Make torch compile `flex` for tokens of a shape; yields its name, nothing where it cannot run."""
    tokens = grid[0] * grid[1] * grid[2]
    blocks = -(-tokens // BLOCK)
    place = devices.facts(device).TORCH_DEVICE
    try:
        attend = flex_blocks.prepare(
            torch.ones(1, heads, blocks, blocks, dtype=torch.bool, device=place), (tokens, tokens)
        )
    except Unavailable:
        return
    attend(*torch.zeros(3, 1, heads, tokens, head_dim, dtype=getattr(torch, dtype), device=place))
    yield "flex"


def _pairs(maps, lists):
    return lists.facts["density"] * maps.heads * maps.tokens**2


def run(case, settings, how):
    """Yield the rows of `case`. Raises `TilewrightError`."""
    heads, head_dim, grid = sizes(case)
    stated = {"text": text(case), "device": how.device, "dtype": how.dtype, "seed": how.seed}
    maps = Maps(heads, head_dim, grid, settings.order, **stated)
    effort = how.effort(settings.max_seconds)
    for sparsity in settings.sparsities:
        for row in rows_of(maps, _offers(maps, sparsity, settings), effort):
            yield row | {"sparsity": sparsity}


def first_calls(case, settings, how):
    """Compile FlexAttention for the shape of a case."""
    heads, head_dim, grid = sizes(case)
    if not any(text(case)):
        yield from compile_flex(heads, head_dim, grid, device=how.device, dtype=how.dtype)


def _offers(maps, sparsity, settings):
    """The contenders at one sparsity, for `rows_of`: dense attention, lists of equal and of different lengths,
    blocks, and lists that are made in each call."""
    keep = 1 - sparsity
    by_group = {name: maps.oracle(name, keep=keep) for name in settings.groups}
    yield from dense_offers(maps, settings)
    yield {"provider": OURS}, lambda: [ours(maps, lists) for lists in by_group.values()]
    yield {"provider": OURS}, lambda: [ours(maps, maps.uneven(SLICE, keep))]
    for name, setting in settings.predictors.items():

        def predicted(name=name, setting=setting):
            lists = maps.predicted(name, setting, keep=keep, budget=keep)
            return [ours(maps, lists), *predicting(maps, setting, lists, keep)]

        yield {"provider": OURS, "chosen_by": name}, predicted
    yield from block_offers(maps, by_group.values(), settings)


def dense_offers(maps, settings):
    """The dense contenders among the baselines of `settings`."""
    for name in settings.baselines:
        if name in sparse_baselines.DENSE:
            yield {"provider": name, "call": "attend"}, lambda name=name: dense(maps, name)


def block_offers(maps, chosen, settings):
    """The contenders among the baselines of `settings` that attend by those of the `chosen` lists that are of blocks of
    theirs."""
    for name, lists in product(settings.baselines, chosen):
        if lists.flags is not None and lists.facts["group"] in sparse_baselines.BLOCKS.get(name, ()):
            facts = {"provider": name, "call": "attend", **lists.facts}
            yield facts, lambda name=name, lists=lists: [blocked(maps, name, lists)]


def rows_of(maps, offers, effort):
    """Yield the rows of contenders that take turns, each checked first.

    offers: ``(facts, make)`` each; ``make()`` gives contenders or raises `Unavailable`, and then facts are the row's.
    """
    passed, rows = [], []
    for facts, make in offers:
        try:
            for contender in make():
                row, call = _checked(maps, contender)
                rows.append(row)
                if call is not None:
                    passed.append((len(rows) - 1, contender, call))
        except Unavailable as reason:
            rows.append(maps.known | facts | {"status": "skipped", "reason": str(reason)})
        except RuntimeError as error:
            rows.append(maps.known | facts | {"status": "failed", "reason": refusal(error)})
    found = _timed(maps, [call for _, _, call in passed], effort)
    for (at, contender, call), taken in zip(passed, found, strict=True):
        if contender.pairs:
            taken["useful_gflops"] = 4 * maps.head_dim * contender.pairs / taken["p50_us"] / 1e3
        rows[at] = settled(rows[at], call, taken)
    yield from rows


def _checked(maps, contender):
    """``(row, call)`` of a contender whose result was compared with the oracle, see `checks.checked`; one that makes
    lists is compared with these."""
    row = maps.known | contender.facts
    if contender.lists is not None and contender.lists.wrong:
        return row | contender.lists.columns, None
    if contender.pairs is None:
        return checked(contender.call, lambda found: same_lists(found, contender.lists.found), row)
    expected = _expected(maps, contender.lists)

    def columns(found):
        return errors(found[:, :, maps.rows].cpu(), expected) | {"checked_rows": len(maps.rows)}

    return checked(contender.call, columns, row | {"tolerance": maps.tolerance}, like=maps.qkv[0])


def _expected(maps, lists):
    """`Maps.expected` on the host, computed once for contenders that attend by the same lists."""
    key = None if lists is None else id(lists.found)
    known = maps.cached.setdefault("expected", {})
    if key not in known:
        # The lists are kept beside: their number is not another's then.
        known[key] = maps.expected(lists).cpu(), lists
    return known[key][0]


def _timed(maps, calls, effort):
    """Columns of the times of `calls`: on a CPU they take turns, so that a change of its clock meets all of them."""
    if not maps.gpu:
        for call in calls:
            call()
        return [taken.columns for taken in time_together(calls, **effort.limits)]
    found = []
    for call in calls:
        taken = time_gpu(call, **effort.limits)
        latency_us, host_us = time_host(call, **effort.limits)
        found.append(taken.columns | {"timing": taken.method, "latency_us": latency_us, "host_us": host_us})
    return found
