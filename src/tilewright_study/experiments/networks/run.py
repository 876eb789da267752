"""Whole networks, from images to logits: every attention is compared with the family's oracle and only then timed, in
turns with the others (stage T5).

A row that did not pass has the status ``failed`` and no time; one that could not run has ``skipped``; both say why.
"""

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from tilewright import devices, networks, reference
from tilewright.attention.profile import DTYPES
from tilewright.core import _internals, images, registry, timing
from tilewright.core.errors import ConfigError
from tilewright.core.timing import time_in_turns
from tilewright.masks import _gates
from tilewright.networks import attention_sites, attentions, batching
from tilewright_study import sections
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.experiments.networks import columns, side
from tilewright_study.measure import clock as clocks
from tilewright_study.measure import oracles
from tilewright_study.measure.checks import checked, refusal, settled
from tilewright_study.measure.rows import machine, now

# Of logits in float32: 12 layers of rounding, measured 1e-6.
TOLERANCE = 1e-4
# ASSUME: in 16 bits an attention may be off by so many times what dense attention is off there, from what float32 makes
# of the same weights: each layer rounds, and what differs in a last bit drifts apart from layer to layer.
ROUNDING = 3.0
# But by no more than so many roundoffs: dense attention is off by up to 3.4, and 1 % of the keys make 12 in bfloat16.
# Where tokens are pruned dense attention may be off by more: by rounding, another token goes on. Beyond `WORST` that is
# no network to compare with: dense attention itself fails then.
MOST_ROUNDOFFS, WORST = 10, 0.1
# Queries of an attention to all keys that are compared.
EVERYWHERE = 256
# A site's attention may be off by so many times what a layer's may: published forms round scores of up to 8 as well.
SITE = 4
# ASSUME: networks are compared with weights by which scores and biases have these standard deviations, and attention
# adds so much to a token, whose norm makes it 1. As they are drawn, weights attend nearly evenly and add little: logits
# hardly tell attention from a mean of all values.
SCORES, BIASES, ADDED = 2.0, 1.0, 0.5


# What torch's compiler raises for what it cannot compile: also where it finds itself wrong.
_REFUSALS = (RuntimeError, AssertionError)

CHECKS = (
    ("relative_error", "tolerance", "logits differ by {:.2g} of their spread from those of the oracle"),
    ("attention_error", "attention_tolerance", "an attention differs by {:.2g} from float64"),
)


@dataclass(frozen=True)
class Oracle:
    """Logits that others are compared with, float32 [B, classes], and how far theirs may be from them."""

    logits: torch.Tensor
    tolerance: float

    @property
    def columns(self):
        """What rows say of it."""
        return {"tolerance": self.tolerance, "largest_logit": float(self.logits.abs().max())}


@dataclass
class _Run:
    """A row of a network at one batch and, where it passed its check, the call to be timed: a `timing.Checked` of
    ``call()``, the logits, which notes in `attention_s` what attention took, unless it is compiled."""

    row: dict
    timed: timing.Checked | None = None
    forward: Callable | None = None
    compiled: bool = False
    attention_s: list = field(default_factory=list)


def photographs(count, size):
    """`count` normalised photographs, float32 [count, 3, height, width]: `images.PHOTOGRAPHS`, then these mirrored.

    size: a side of a square, or height and width.
    """
    names = list(images.PHOTOGRAPHS)
    pixels = [_gates.pixels(name, size) for name in names[:count]]
    chosen = [(i % len(names), i // len(names) % 2 == 1) for i in range(count)]
    return torch.from_numpy(np.stack([pixels[i][:, :, ::-1] if mirrored else pixels[i] for i, mirrored in chosen]))


def run(case, settings, how):
    """Yield the rows of the network `case`. Raises `TilewrightError`."""
    for place in ("attention", "compiled"):
        sections.batches(place, "attention", getattr(settings, place), (*attentions.NAMES, *batching.NAMES))
    for plans in settings.plans:
        plans.check()
    options = {"device": how.device, "dtype": how.dtype, "seed": how.seed}
    options |= {"compiled": settings.compiled, "plans": settings.plans}
    yield from run_network(case, settings.attention, how.effort(settings.max_seconds), **options)


def first_calls(case, settings, how):
    """Yield the attentions and batches of the network `case` that were compiled, alone or with all of it. Raises
    `TilewrightError`."""
    sizes = {name: batches for name, batches in settings.attention.items() if name in attentions.COMPILED}
    options = {"device": how.device, "dtype": how.dtype, "seed": how.seed}
    yield from compile_network(case, sizes, compiled=settings.compiled, **options)


@torch.inference_mode()
def run_network(name, batches, effort, *, compiled=None, plans=(), device="cpu", dtype="float32", seed=0):
    """Yield a row for each attention and batch of `batches`, ``{attention: [batch, …]}``, for each of `plans` with
    attention tilewright, and for those of `compiled`, like `batches`.

    All attentions have the weights that `seed` draws, `peaked` and rounded to `dtype`. The logits of the family's
    oracle (dense attention) in float32, one image at a time, are what others are compared with, itself in batches
    included; those of `attentions.OTHERS`, other functions, with their own. Each attention over a pattern is compared
    with float64, on its own queries, keys and values.
    ``p50_us`` is the time until the logits are there. ``attention_us`` is spent in attention, its projections and the
    ordering of tokens excluded; on a GPU it is what its stream took from the beginning to the end of each attention,
    and ``gpu_us`` the time of the whole as a CUDA graph, where it can be captured. ``first_call_s`` holds what is done
    once, such as plans and compiling. All that have one batch are timed in turns, as far as they fit the memory
    together.
    Raises `UnknownNameError`, `DeviceError` and what `networks.create` raises.
    """
    registry.check("dtype", dtype, DTYPES)
    family, options = networks.parse(name)
    facts = devices.describe(device)
    compiled = compiled or {}
    create, inputs = prepared(name, [batches, compiled], device, dtype, seed)
    dense = create(networks.exchanged(family)[1][0])
    parameters = sum(weights.numel() for weights in dense.parameters())
    oracles = {"": oracle_of(dense, inputs)}
    del dense
    for other in [name for name in attentions.OTHERS if name in batches or name in compiled]:
        oracles[other] = oracle_of(create(other), inputs)
    known = {
        "network": name,
        "family": family,
        "variant": options["variant"],
        "resolution": side(options["image_size"]),
        "status": "ok",
        "dtype": dtype,
        "parameters": parameters,
        **machine(facts),
    }
    cases = [(attention, sizes, None, False) for attention, sizes in batches.items()]
    cases += [("tilewright", batches["tilewright"], each, False) for each in plans]
    cases += [(attention, sizes, None, True) for attention, sizes in compiled.items()]
    if compiled:
        # What was compiled before counts against the limit of torch's cache, and is forgotten.
        torch.compiler.reset()
    held = []
    for attention, sizes, chosen, is_compiled in cases:
        case = known | {"attention": attention, "compiled": is_compiled} | (columns(chosen) if chosen else {})
        oracle = oracles.get(attention, oracles[""])
        try:
            network = create(attention, chosen)
        except ConfigError as reason:
            if chosen is None:
                raise
            # A network whose patterns depend on the image has no plans to choose.
            held += [
                _Run(case | {"batch": n, "status": "skipped", "reason": str(reason), "time": now()}) for n in sizes
            ]
            continue
        for batch in sizes:
            row = case | {"batch": batch, **oracle.columns}
            run = _checked(network, inputs[:batch], oracle, row, is_compiled)
            if run is None:
                # The memory does not hold this one beside the others.
                yield from _in_turns(held, effort, inputs)
                held = []
                _freed(inputs)
                run = _checked(network, inputs[:batch], oracle, row, is_compiled, alone=True)
            held.append(run)
        network = run = None
        _freed(inputs)
    yield from _in_turns(held, effort, inputs)


def _freed(inputs):
    """Give back what nothing holds any more."""
    gc.collect()
    if inputs.is_cuda:
        torch.cuda.empty_cache()


@torch.inference_mode()
def compile_network(name, batches, *, compiled=None, device="cpu", dtype="float32", seed=0):
    """Make the first calls of a network with each attention and batch of `batches` and of `compiled`, as `run_network`:
    those of another process find on disk what torch compiled. Yields ``"<attention>, batch <n>"`` of what can run.
    """
    compiled = compiled or {}
    create, inputs = prepared(name, [batches, compiled], device, dtype, seed)
    for cases, whole in ((batches, False), (compiled, True)):
        for attention, sizes in cases.items():
            network = create(attention)
            for batch in sizes:
                # What cannot run says so where it is timed.
                refusals = sparse_baselines.Unavailable, *(_REFUSALS if whole else ())
                with suppress(*refusals), _internals.recompile_limit():
                    (_compiled(network, inputs[:batch]) if whole else network)(inputs[:batch])
                    yield f"{attention}, batch {batch}" + (", compiled" if whole else "")


def _compiled(network, inputs):
    """A network as torch.compile makes it, once it was called: tables that a first call makes on the host would be
    compiled for the host, too, and cut the network in many."""
    network(inputs)
    return torch.compile(network, dynamic=False)


def prepared(name, batches, device, dtype, seed):
    """``(create, inputs)``: the network `name` with an attention or a batching, and with plans; and as many images as
    the dicts `batches` ask for, on the device."""
    family, options = networks.parse(name)
    # What a family exchanges, its attention or its batching, is a column of its rows under the first name.
    what, _ = networks.exchanged(family)
    place, kind = devices.facts(device).TORCH_DEVICE, getattr(torch, dtype)

    def create(exchanged, plans=None):
        # As a user makes them: layers go by the versions of parameters, which inference tensors do not have.
        with torch.inference_mode(False):
            chosen = {what: exchanged} if plans is None else {what: exchanged, "plans": plans}
            return peaked(networks.create(family, **options, seed=seed, **chosen)).to(place, kind)

    most = max(batch for each in batches for sizes in each.values() for batch in sizes)
    inputs = photographs(most, options["image_size"])
    return create, inputs.to(place, kind)


@torch.no_grad()
def peaked(network):
    """`network` with what its attentions learn scaled, in place, to `SCORES`, `BIASES` and `ADDED`."""
    for module in network.modules():
        layers = dict(module.named_children())
        if "qkv" in layers:
            q, k, v = layers["qkv"].weight.chunk(3)
        elif "query" in layers:
            q, (k, v) = layers["query"].weight, layers["kv"].weight.chunk(2)
        else:
            continue
        # Of tokens whose channels have the variance 1; the scale of attention makes up for the sum over a head.
        channels = q.shape[1]
        _scale(q, SCORES / (_size(k) * channels))
        _scale(v, channels**-0.5)
        _scale(layers["proj"].weight, ADDED * channels**-0.5)
        for name, table in module.named_parameters(recurse=False):
            if "rel_pos" in name or "relative_position_bias" in name:
                _scale(table, BIASES)
    return network


def _size(weight):
    return weight.square().mean().sqrt()


def _scale(weight, size):
    weight.mul_(size / _size(weight))


def oracle_of(dense, inputs):
    """The `Oracle` of a network with dense attention, in the type of `inputs`; the network is in float32 after that."""
    rounded = torch.cat([dense(image[None]) for image in inputs])
    if inputs.dtype == torch.float32:
        return Oracle(rounded, TOLERANCE)
    # Of its own weights and images, in float32: not in TensorFloat-32, which convolutions on a GPU take by default.
    dense.float()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        logits = torch.cat([dense(image[None].float()) for image in inputs])
    own, most = oracles.logits_error(rounded, logits), MOST_ROUNDOFFS * torch.finfo(inputs.dtype).eps / 2
    return Oracle(logits, min(WORST, max(TOLERANCE, own, min(most, ROUNDING * own))))


def _attention_errors(network, inputs):
    """Columns of the attention of `network` over its patterns, on `inputs`; none where it has no pattern, or the tokens
    of ``native`` do not stand as in its graph, so that only logits tell."""
    graphs, found = {}, []

    def compare(attend, arguments, out):
        q, k, v, bias = (*arguments, None)[:4]
        bias, site = bias() if callable(bias) else bias, attend.site
        if site.attention == "native" and site.native_layout:
            return
        if site.attention in attentions.OTHERS:
            rows = np.unique(np.linspace(0, q.shape[2] - 1, EVERYWHERE).astype(int))
            expected = reference.dense_rows(rows, q, k, v)
            found.append((reference.relative_error(out[:, :, rows], expected), SITE * reference.TOLERANCE[q.dtype]))
            return
        if site not in graphs:
            order = None if site.order is None else site.order.numpy()
            graphs[site] = site.graph if order is None else site.graph.reordered(order, order)
        graph = graphs[site]
        rows = reference.sample_rows(graph, reference.stride(graph.n_rows), seed=len(found))

        def added(rows, keys):
            rows, keys = (x if graph.row_order is None else graph.row_order[x] for x in (rows, keys))
            rows, keys = (torch.from_numpy(x.astype(np.int64)).to(q.device) for x in (rows, keys))
            return bias[:, site.bias_index(rows[:, None], keys)]

        expected = reference.attention_rows(graph, rows, q, k, v, bias=None if bias is None else added)
        found.append((reference.relative_error(out[:, :, rows], expected), SITE * reference.TOLERANCE[q.dtype]))

    hooks = [m.register_forward_hook(compare) for m in network.modules() if isinstance(m, attention_sites.Attend)]
    network(inputs)
    for hook in hooks:
        hook.remove()
    if not found:
        return {}
    # A NaN is larger than all numbers.
    error, tolerance = max(found, key=lambda pair: np.nan_to_num(pair[0], nan=np.inf))
    return {"attention_error": error, "attention_tolerance": tolerance}


def _checked(network, inputs, oracle, row, compiled, alone=False):
    """The `_Run` of a network on one batch. compiled: by torch.compile, anew for every batch.

    None where memory is used up, unless it is `alone` and its row says so.
    """
    row |= {"time": now()}
    begin = time.perf_counter()
    expected, run = oracle.logits[: len(inputs)], _Run(row, compiled=compiled)

    def call():
        with clocks.clocked() as clock:
            logits = run.forward(inputs)
            timing.wait(inputs)
        run.attention_s.append(clock.seconds)
        return logits

    def look(logits):
        if logits.shape != expected.shape:
            raise ValueError(f"expected logits of {list(expected.shape)}, found {list(logits.shape)}")
        return {
            "max_abs_error": float((logits - expected).abs().max()),
            "relative_error": oracles.logits_error(logits, expected),
            "same_top1": float((logits.argmax(1) == expected.argmax(1)).double().mean()),
        }

    try:
        # Compiled networks of one class share a cache, which holds fewer by default.
        with _internals.recompile_limit():
            run.forward = _compiled(network, inputs) if compiled else network
            run.forward(inputs)
            timing.wait(inputs)
            row |= {"first_call_s": time.perf_counter() - begin}
            row |= {} if compiled else _attention_errors(network, inputs)
            row |= _peak_bytes(run.forward, inputs)
            run.row, run.timed = checked(call, look, row, CHECKS)
    except sparse_baselines.Unavailable as reason:
        run.row = row | {"status": "skipped", "reason": str(reason)}
    except torch.OutOfMemoryError as error:
        if not alone:
            return None
        run.row = row | {"status": "failed", "reason": refusal(error)}
    except _REFUSALS as error:
        if not compiled:
            raise
        run.row = row | {"status": "failed", "reason": refusal(error)}
    return run


def _in_turns(runs, effort, inputs):
    """The rows of `runs`, in their order: those of one batch that passed their checks are timed in turns."""
    passed = [run for run in runs if run.timed is not None]
    for batch in dict.fromkeys(run.row["batch"] for run in passed):
        _time([run for run in passed if run.row["batch"] == batch], inputs[:batch], effort)
    return [run.row for run in runs]


def _time(runs, inputs, effort):
    """Fill in the times of `runs` of one batch."""
    gpu, batch = inputs.is_cuda, len(inputs)
    for run in runs:
        run.attention_s.clear()
    graphs = [timing.Checked(partial(run.forward, inputs), run.timed.judge) for run in runs] if gpu else []
    # As they were compiled: another limit may ask for another code.
    with _internals.recompile_limit():
        taken = timing.time_together([run.timed for run in runs], **effort.limits)
        captured = time_in_turns(graphs, gpu=True, **effort.limits) if gpu else [None] * len(runs)
    for run, own, graph, replayed in zip(runs, taken, graphs or [None] * len(runs), captured, strict=True):
        facts = {**own.columns, "images_per_s": batch / own.p50_us * 1e6}
        if not run.compiled and not run.timed.wrong:
            # A compiled network has no clocks.
            attention_us = 1e6 * float(np.median(run.attention_s[: own.repetitions]))
            facts |= {"attention_us": attention_us, "rest_us": own.p50_us - attention_us}
        if gpu:
            facts |= {"gpu_us": replayed.p50_us} if replayed.method == "graph" else {}
            run.timed.wrong = run.timed.wrong or graph.wrong
        run.row = settled(run.row, run.timed, facts)


def _peak_bytes(network, inputs):
    """The column of that name, of a call; none on a CPU."""
    if not inputs.is_cuda:
        return {}
    torch.cuda.reset_peak_memory_stats(inputs.device)
    network(inputs)
    timing.wait(inputs)
    return {"peak_bytes": torch.cuda.max_memory_allocated(inputs.device)}
