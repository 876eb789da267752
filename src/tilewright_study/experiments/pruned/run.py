"""Pruned networks, from images to logits: each batching of the kept tokens, eager, as a CUDA graph and compiled (stage
T5).

Its logits are compared with those of ``padded``, its packed tokens and its attention with what they should be; only
then is it timed.

A row that did not pass has the status ``failed`` and no time; one that could not run has ``skipped``; both say why.
"""

import gc
import json
import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from tilewright import devices, networks, reference
from tilewright.attention.profile import DTYPES
from tilewright.core import images, registry, timing
from tilewright.core.errors import ConfigError
from tilewright.masks import _gates
from tilewright.networks import batching
from tilewright.networks.batching import MODES, UNPRUNED, ragged
from tilewright_study.baselines.sparse import Unavailable, need_gpu
from tilewright_study.experiments.pruned import FAMILY, check_modes
from tilewright_study.experiments.pruned.captured import Captured
from tilewright_study.measure import oracles
from tilewright_study.measure.checks import judging, refusal, refuted, settled
from tilewright_study.measure.rows import machine, now

ORACLE = "padded"
# Largest relative_error. In 16 bits each of 12 blocks rounds what it adds, and what it adds to, some four times in all
# by up to u, the roundoff: sqrt(48) u = 7 u on average, and three times that. In float32 u is 6e-8, and sums of
# thousands of products round more than single values do.
TOLERANCE = {"float32": 1e-4, "float16": 20 * 2**-11, "bfloat16": 20 * 2**-8}
# Largest attention_error. In 16 bits weights, parts of a result and the result are rounded by up to u each; values that
# have much in common, as a network's have, make no result much shorter than they are. One of 100 keys left out is 0.02.
ATTENTION_TOLERANCE = {"float32": 2e-5, "float16": 3 * 2**-11, "bfloat16": 3 * 2**-8}
LOGITS = ("relative_error", "tolerance", f"logits differ by {{:.2g}} from those of {ORACLE}")
ATTENTION = ("attention_error", "attention_tolerance", "attention is off by {:.2g}")
# Images that are compared at least, in batches of the size that is timed. A GPU runs more of them in less time.
JUDGED, JUDGED_BY_GPU = 8, 32
# Number of capacities that a network is made for, up to all tokens of the batch, or of an image.
BUCKETS = 32
# Crops that a head is fitted to, from another seed than those that are compared; the share of the features' mean
# square that is added to it, which keeps the head as large as one that is drawn.
FITTED, RIDGE = 96, 0.1


@dataclass(frozen=True)
class Seen:
    """What a network made of the judged images: logits float32 [I, classes]; the state of each position after each
    pruning, uint8 [I, positions]: 0 dropped, 1 kept, 2 kept and fused. choices: of the last batch."""

    logits: torch.Tensor
    states: tuple
    choices: tuple

    @property
    def counts(self):
        """int64 [I] after each pruning: kept tokens of each image."""
        return [(state > 0).sum(1) for state in self.states]

    def same_tokens(self, other):
        """bool [I]: the images that keep the same tokens throughout."""
        same = torch.ones(len(self.logits), dtype=torch.bool, device=self.logits.device)
        for ours, theirs in zip(self.states, other.states, strict=True):
            # A layout may have more positions than tokens, and another layout more than it.
            wide = max(ours.shape[1], theirs.shape[1])
            ours, theirs = (F.pad(state, (0, wide - state.shape[1])) for state in (ours, theirs))
            same &= (ours == theirs).all(1)
        return same


class _Way(NamedTuple):
    """A network to be timed: the name of its rows, its capacity, and what its logits are compared with."""

    name: str
    network: Any
    capacity: int | None
    oracle: Seen


def crops(count, size, seed=0):
    """`count` normalised squares cut at random places out of `images.PHOTOGRAPHS`, float32 [count, 3, size, size]."""
    wholes = [_gates.pixels(name, 2 * size) for name in images.PHOTOGRAPHS]
    corners = np.random.default_rng(seed).integers(size + 1, size=(count, 2))
    cut = [wholes[i % len(wholes)][:, y : y + size, x : x + size] for i, (y, x) in enumerate(corners)]
    return torch.from_numpy(np.stack(cut))


def judged(device):
    """How many images are compared at least on a `device` of this kind."""
    return JUDGED_BY_GPU if devices.facts(device).GPU_TIMER else JUDGED


def fit_head(network, shown):
    """Fit the head of `network` to the `crops` in shown: its first classes are `images.PHOTOGRAPHS`, the others get 0.

    By regularised least squares from the class tokens. A random head gives nearly equal logits, so that rounding would
    decide which of them is the largest.
    """
    kinds, tokens = len(images.PHOTOGRAPHS), []
    handle = network.norm.register_forward_hook(lambda *call: tokens.append(call[-1].double()))
    try:
        for part in shown.split(JUDGED_BY_GPU):
            network(part)
    finally:
        handle.remove()
    features = torch.cat(tokens[:: 1 + network.options.distilled])
    wanted = F.one_hot(torch.arange(len(features), device=features.device) % kinds, kinds).to(features)
    mean, expected = features.mean(0), wanted.mean(0)
    features = features - mean
    gram = features.T @ features
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    weight = torch.linalg.solve(gram, features.T @ (wanted - expected)).T
    network.head.weight.zero_()[:kinds], network.head.bias.zero_()[:kinds] = weight, expected - weight @ mean


def run(case, settings, how):
    """Yield the rows of the network `case`. Raises `TilewrightError`."""
    check_modes("modes", settings.modes)
    options = {"device": how.device, "dtype": how.dtype, "seed": how.seed}
    effort = how.effort(settings.max_seconds)
    yield from run_pruned(case, settings.settings, settings.batching, settings.modes, effort, **options)


@torch.inference_mode()
def run_pruned(name, settings, batchings, modes, effort, *, device="cpu", dtype="float32", seed=0):
    """Yield a row for each of `settings`, of the `batchings` and of the batches of `modes`. `UNPRUNED` among the
    batchings is the network without its pruner; its logits are compared with its own, kernel by kernel.

    settings: options of the network's pruner, a dict each; ``checkpoint`` is a file of official weights, without which
    `seed` draws them and the head is fitted. modes: ``{mode: [batch, …]}``. Weights are rounded to `dtype`, and all see
    the same crops of photographs.

    Raises `UnknownNameError`, `ConfigError` for a network of another family, `DeviceError` and what `networks.create`
    raises.
    """
    family, options = networks.parse(name)
    if family != FAMILY:
        raise ConfigError(f"network: expected one of the family {FAMILY}, found {name}")
    registry.check("dtype", dtype, DTYPES)
    for chosen in batchings:
        registry.check("batching", chosen, (*batching.NAMES, UNPRUNED))
    for mode in modes:
        registry.check("mode", mode, MODES)
    facts, sizes = devices.describe(device), sorted({batch for chosen in modes.values() for batch in chosen})
    place = devices.facts(device).TORCH_DEVICE
    inputs = crops(max(*sizes, judged(device)), options["image_size"], seed).to(place, getattr(torch, dtype))
    training = crops(FITTED, options["image_size"], seed + 1).to(inputs)
    for place, setting in enumerate(settings):
        made = networks.create(family, **{**options, **setting}, seed=seed, batching=ORACLE).to(inputs)
        if made.weights is None:
            fit_head(made, training)
        known = {
            "network": name,
            "variant": options["variant"],
            "resolution": options["image_size"],
            "pruner": made.options.pruner,
            "setting": " ".join(f"{key}={_stated(key, value)}" for key, value in setting.items()),
            "dtype": dtype,
            "parameters": sum(weights.numel() for weights in made.parameters()),
            "tokens": made.options.n_tokens,
            "tolerance": TOLERANCE[dtype],
            "attention_tolerance": ATTENTION_TOLERANCE[dtype],
            **machine(facts),
        }
        for batch in sizes:
            chosen = [mode for mode, batches in modes.items() if batch in batches]
            # Compiling is slow: the first setting stands for all.
            chosen = [mode for mode in chosen if not mode.startswith("compile") or place == 0]
            gc.collect()
            for row in _batch(made, inputs, batch, batchings, chosen, effort) if chosen else ():
                yield known | {"batch": batch} | row


def _stated(key, value):
    """A setting in words: of a checkpoint the file's name, which is the same wherever it lies."""
    return Path(value).name if key == "checkpoint" else json.dumps(value)


def _batch(made, inputs, batch, batchings, modes, effort):
    """Rows of one network at one batch."""
    # Whole batches, as many as it takes.
    inputs = inputs[: batch * max(1, min(len(inputs), JUDGED_BY_GPU) // batch)]
    oracle = _seen(_with_layouts(made, None), inputs, batch)
    tokens, counts = made.options.n_tokens, oracle.counts
    first = [kept[:batch] for kept in counts] or [torch.full((batch,), tokens)]
    # Of all batches that are compared, after each pruning.
    together = max((int(kept.view(-1, batch).sum(1).max()) for kept in counts), default=batch * tokens)
    longest = max((int(kept.max()) for kept in counts), default=tokens)
    room = {"shared": _room(together, batch * tokens), "even": batch * _room(longest, tokens), None: None}
    facts = {
        "fewest_kept": int(first[-1].min()),
        "most_kept": int(first[-1].max()),
        "spread": max(int(counts.max() - counts.min()) for counts in first),
        "largest_logit": float(oracle.logits.abs().max()),
    }
    # Where the host does not know how many are kept, it may wait for the number, or run with rows to spare.
    asking = any(choice.most - choice.least > 1 for choice in oracle.choices)
    packed = "ragged" in batchings and oracle.choices
    pack_us = _pack_us(made.with_batching("ragged"), inputs[:batch], room["shared"], effort) if packed else None
    plain = _unpruned(made) if UNPRUNED in batchings else None
    whole = _seen(_with_layouts(plain, None), inputs, batch) if plain else None
    for mode in modes:
        ways = [_Way(UNPRUNED, plain, None, whole)] if plain else []
        for network in (made.with_batching(name) for name in batchings if name != UNPRUNED):
            capacity = room[network.batcher.ROOM]
            both = (None, capacity) if asking and mode == "eager" else (capacity,)
            ways += [_Way(network.batching, network, most, oracle) for most in dict.fromkeys(both)]
        # What is compiled counts against the limit of torch's cache: one at a time.
        groups = [[way] for way in ways] if mode.startswith("compile") else [ways]
        rows = [row for group in groups for row in _measured(group, mode, inputs, batch, effort)]
        for name in batchings:
            own = [row for row in rows if row["batching"] == name]
            # The faster way; but one that fails is not hidden by the other.
            row = min(own, key=lambda row: (("failed", "ok", "skipped").index(row["status"]), row.get("p50_us", 0)))
            if name == "ragged" and pack_us and row["status"] == "ok":
                row |= {"pack_us": pack_us, "pack_share": pack_us / row["p50_us"]}
            yield facts | {"mode": mode} | row


def _unpruned(made):
    """The network without its pruner: all tokens go on, and the weights are the same."""
    options = msgspec.structs.replace(made.options, pruner="none", pruner_settings={})
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        plain = type(made)(options, ORACLE).eval().to(made.cls_token)
    plain.load_state_dict(made.state_dict(), strict=False)
    return plain


def _room(needed, most):
    """A capacity for `needed` tokens of at most `most`. One to spare at least: by rounding, a network in 16 bits may
    keep another token than the padded one."""
    step = math.ceil(most / BUCKETS)
    return min(most, (needed // step + 1) * step)


def _measured(ways, mode, inputs, batch, effort):
    """Rows of `_Way`s in one mode: first all are checked, then those that passed timed."""
    rows, runs = [], {}
    for at, way in enumerate(ways):
        row, call = _checked(way.network, mode, way.capacity, inputs, batch, way.oracle)
        rows.append({"batching": way.name, **row})
        if call is not None:
            runs[at] = call
    for at, taken in zip(runs, timing.time_together(list(runs.values()), **effort.limits), strict=True):
        facts = {"status": "ok", "images_per_s": batch / taken.p50_us * 1e6, **taken.columns}
        rows[at] = settled(rows[at], runs[at], facts)
    return rows


def _waited(call, images):
    found = call(images)
    timing.wait(images)
    return found


def _checked(network, mode, capacity, inputs, batch, oracle):
    """``(columns, call)`` of a network in one mode. The call, a `timing.Checked` of a batch, is to be timed and is
    judged by the logits and tokens that were compared; None where it is not timed, and a column says why."""
    facts = {"time": now(), "capacity": capacity}
    dtype = str(inputs.dtype).removeprefix("torch.")
    begin = time.perf_counter()
    try:
        call = _callable(network, mode, capacity, inputs[:batch])
        call(inputs[:batch])
        timing.wait(inputs)
        facts["first_call_s"] = time.perf_counter() - begin
        attention = _attention_error(network, capacity, inputs[:batch])
        seen = _seen(call, inputs, batch)
    except Unavailable as reason:
        return facts | {"status": "skipped", "reason": str(reason)}, None
    except RuntimeError as error:
        return facts | {"status": "failed", "reason": refusal(error)}, None
    tolerances = {"tolerance": TOLERANCE[dtype], "attention_tolerance": ATTENTION_TOLERANCE[dtype]}
    compared, reason = _compared(seen, oracle, facts | {"attention_error": attention}, tolerances)
    if reason:
        return compared | {"status": "failed", "reason": reason}, None
    first = Seen(seen.logits[:batch], tuple(state[:batch] for state in seen.states), ())

    def judge(found):
        again = _seen(lambda part: found, inputs[:batch], batch)
        if again.logits.shape != first.logits.shape:
            raise ValueError(f"expected logits of {list(first.logits.shape)}, found {list(again.logits.shape)}")
        return _compared(again, first, {}, tolerances)[1]

    return compared, timing.Checked(partial(_waited, call, inputs[:batch]), judging(judge))


def _compared(seen, oracle, facts, tolerances):
    """``(columns, reason)``: `facts` and how far what was seen is from what another network saw; why that is too far,
    else an empty text."""
    same, top1 = seen.same_tokens(oracle), (seen.logits.argmax(1) == oracle.logits.argmax(1)).double()
    facts = facts | {
        "inputs": len(same),
        "same_tokens": int(same.sum()),
        "max_abs_error_all": float((seen.logits - oracle.logits).abs().max()),
        "same_top1_all": float(top1.mean()),
    }
    if reason := refuted(facts | tolerances, [ATTENTION]):
        return facts, reason
    if not all(bool(state[:, 0].all()) for state in seen.states):
        # No batching differs from another where the pruner is wrong.
        return facts, "the class token of an image is pruned"
    if not facts["same_tokens"]:
        return facts, f"none of {len(same)} images kept the tokens of {ORACLE}"
    ours, theirs = seen.logits[same], oracle.logits[same]
    facts |= {
        "max_abs_error": float((ours - theirs).abs().max()),
        "relative_error": oracles.logits_error(ours, theirs),
        "same_top1": float(top1[same].mean()),
    }
    return facts, refuted(facts | tolerances, [LOGITS])


def _attention_error(network, capacity, inputs):
    """`reference.relative_error` of the attention of `network` after its prunings, by token and head.

    Compared with dense attention in float64 among the tokens of each image. Infinite where the batching keeps other
    tokens than the pruner chose, or changes them.
    """
    watched = network.with_batching(network.batching)
    watched.batcher = _Watched(network.batcher)
    watched(inputs, capacity)
    # Not `max`, which loses a NaN.
    return float(np.max(watched.batcher.errors, initial=0.0))


class _Watched:
    """A batching that notes in `errors` how far its attention is from the oracle's."""

    def __init__(self, batching):
        self.ROOM, self._narrow, self.errors = batching.ROOM, batching.narrow, []

    def narrow(self, x, layout, choice, capacity):
        """As that of the batching."""
        chosen = layout.padded(x)[choice.keep]
        x, narrower = self._narrow(x, layout, choice, capacity)
        if not torch.equal(narrower.padded(x)[narrower.valid], chosen):
            self.errors.append(math.inf)
        narrower.attend = partial(self._attend, narrower, narrower.attend)
        return x, narrower

    def _attend(self, layout, attend, *qkv):
        out = attend(*qkv)
        q, k, v = (layout.padded(x).double().transpose(1, 2) for x in qkv)
        wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=layout.valid[:, None, None]).transpose(1, 2)
        self.errors.append(reference.relative_error(layout.padded(out)[layout.valid], wanted[layout.valid]))
        return out


def _callable(network, mode, capacity, inputs):
    """``call(images) -> (logits, layouts)`` of a network in a mode, for images like `inputs`. Raises `Unavailable`."""
    if mode.endswith("graph"):
        need_gpu(inputs.device.type)
    if mode.startswith("compile"):
        # What was compiled before counts against the limit of torch's cache.
        torch.compiler.reset()
        network = torch.compile(network, dynamic=False)
    if not mode.endswith("graph"):
        return _with_layouts(network, capacity)
    # Batchings that have no use for a capacity get one that is never exceeded.
    capacity = capacity or len(inputs) * network.options.n_tokens
    _need_no_host(lambda: network(inputs, capacity, True))
    captured = Captured(network, [capacity])

    def call(images):
        return captured(images), captured.layouts

    return call


def _with_layouts(network, capacity):
    return lambda images: network(images, capacity, True)


def _need_no_host(call):
    """Raise `Unavailable` where the host asks the device in `call`, which a capture forbids."""
    # What is done once may ask.
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise Unavailable("the host asks the device for lengths, which a CUDA graph forbids") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _seen(call, inputs, batch):
    """`Seen`, of what `call` makes of `inputs`, batch by batch."""
    logits, states = [], []
    for part in inputs.split(batch):
        found, layouts = call(part)
        choices = tuple(layout.choice for layout in layouts)
        # The next replay of a graph overwrites them.
        logits.append(found.float().clone())
        states.append([_state(choice) for choice in choices])
    return Seen(torch.cat(logits), tuple(map(_stacked, zip(*states, strict=True))), choices)


def _state(choice):
    """See `Seen`."""
    # A fused token has the position of one that it was made of: it must differ from a token that was kept as it is.
    return choice.keep.byte() if choice.fused is None else choice.keep.byte() + choice.fused


def _stacked(states):
    """States of several batches, one after the other; a batch may have fewer positions."""
    wide = max(state.shape[1] for state in states)
    return torch.cat([F.pad(state, (0, wide - state.shape[1])) for state in states])


def _pack_us(network, inputs, capacity, effort):
    """Time of packing after each pruning of `network`, and of finding the class tokens, without the rest."""
    pruned = []

    def note(module, arguments, result):
        pruned.append((result[0], arguments[2], result[1]))

    handle = network.pruner.register_forward_hook(note)
    try:
        network(inputs, capacity)
    finally:
        handle.remove()

    def pack():
        for x, layout, choice in pruned:
            packed, narrower = ragged.narrow(x, layout, choice, capacity)
        return packed, narrower.first(packed), narrower

    def judge(found):
        packed, first, narrower = found
        x, layout, choice = pruned[-1]
        padded = narrower.padded(packed)
        right = torch.equal(padded[narrower.valid], layout.padded(x)[choice.keep]) and torch.equal(first, padded[:, 0])
        return "" if right else "tokens are not packed as they were chosen"

    call = timing.Checked(pack, judging(judge))
    taken = (timing.time_gpu if inputs.is_cuda else timing.time_call)(call, **effort.limits)
    return None if call.wrong else taken.p50_us
