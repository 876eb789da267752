"""Whole networks, from images to logits: every attention is compared with the family's oracle and only then timed
(stage T5).

A row that did not pass has the status ``failed`` and no time; one that could not run has ``skipped``; both say why.
"""

import gc
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from tilewright import networks, reference, targets
from tilewright.baselines import sparse as sparse_baselines
from tilewright.core import images, registry, timing
from tilewright.core.errors import ConfigError
from tilewright.models import _gates
from tilewright.networks import _sites
from tilewright.profile import DTYPES
from tilewright.study.experiments._checks import refusal, refuted
from tilewright.study.experiments._rows import machine, now
from tilewright.study.experiments.networks import columns, side

# Of logits in float32: 12 layers of rounding, measured 1e-6.
TOLERANCE = 1e-4
# ASSUME: in 16 bits an attention may be off by so many times what dense attention is off there, from what float32 makes
# of the same weights: each layer rounds, and what differs in a last bit drifts apart from layer to layer.
ROUNDING = 3.0
# But by no more than so many roundoffs: dense attention is off by up to 3.4, and 1 % of the keys make 12 in bfloat16.
# Where tokens are pruned dense attention may be off by more: by rounding, another token goes on.
MOST_ROUNDOFFS = 10
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


def photographs(count, size):
    """`count` normalised photographs, float32 [count, 3, height, width]: `images.PHOTOGRAPHS`, then these mirrored.

    size: a side of a square, or height and width.
    """
    names = list(images.PHOTOGRAPHS)
    pixels = [_gates.pixels(name, size) for name in names[:count]]
    chosen = [(i % len(names), i // len(names) % 2 == 1) for i in range(count)]
    return torch.from_numpy(np.stack([pixels[i][:, :, ::-1] if mirrored else pixels[i] for i, mirrored in chosen]))


@torch.inference_mode()
def run_network(name, batches, effort, *, compiled=None, plans=(), device="cpu", dtype="float32", seed=0):
    """Yield a row for each attention and batch of `batches`, ``{attention: [batch, …]}``, for each of `plans` with
    attention tilewright, and for those of `compiled`, like `batches`.

    All attentions have the weights that `seed` draws, `peaked` and rounded to `dtype`. The logits of the family's
    oracle (dense attention) in float32, one image at a time, are what others are compared with, itself in batches
    included; and each attention over a pattern is compared with float64, on its own queries, keys and values.
    ``p50_us`` is the time until the logits are there. ``attention_us`` is spent in attention, its projections and the
    ordering of tokens excluded; on a GPU it is what its stream took from the beginning to the end of each attention,
    and ``gpu_us`` the time of the whole as a CUDA graph, where it can be captured. ``first_call_s`` holds what is done
    once, such as plans and compiling.
    Raises `UnknownNameError`, `DeviceError` and what `networks.create` raises.
    """
    registry.check("dtype", dtype, DTYPES)
    family, options = networks.parse(name)
    facts = targets.describe(device)
    compiled = compiled or {}
    create, inputs = _prepared(name, [batches, compiled], device, dtype, seed)
    dense = create(networks.exchanged(family)[1][0])
    parameters = sum(weights.numel() for weights in dense.parameters())
    oracle = _oracle(dense, inputs)
    del dense
    known = {
        "network": name,
        "family": family,
        "variant": options["variant"],
        "resolution": side(options["image_size"]),
        "status": "ok",
        "dtype": dtype,
        "parameters": parameters,
        "tolerance": oracle.tolerance,
        "largest_logit": float(oracle.logits.abs().max()),
        **machine(facts),
    }
    cases = [(attention, sizes, None, False) for attention, sizes in batches.items()]
    cases += [("tilewright", batches["tilewright"], each, False) for each in plans]
    cases += [(attention, sizes, None, True) for attention, sizes in compiled.items()]
    for attention, sizes, chosen, is_compiled in cases:
        case = known | {"attention": attention, "compiled": is_compiled} | (columns(chosen) if chosen else {})
        # One network at a time: masks of several would not fit the memory at high resolution.
        gc.collect()
        if inputs.is_cuda:
            torch.cuda.empty_cache()
        try:
            network = create(attention, chosen)
        except ConfigError as reason:
            if chosen is None:
                raise
            # A network whose patterns depend on the image has no plans to choose.
            yield from (case | {"batch": n, "status": "skipped", "reason": str(reason), "time": now()} for n in sizes)
            continue
        for batch in sizes:
            yield case | {"batch": batch} | _measured(network, inputs[:batch], oracle, effort, is_compiled)
        del network


@torch.inference_mode()
def compile_network(name, batches, *, compiled=None, device="cpu", dtype="float32", seed=0):
    """Make the first calls of a network with each attention and batch of `batches` and of `compiled`, as `run_network`:
    those of another process find on disk what torch compiled. Yields ``"<attention>, batch <n>"`` of what can run.
    """
    compiled = compiled or {}
    create, inputs = _prepared(name, [batches, compiled], device, dtype, seed)
    for cases, whole in ((batches, False), (compiled, True)):
        for attention, sizes in cases.items():
            network = create(attention)
            for batch in sizes:
                # What cannot run says so where it is timed.
                with suppress(sparse_baselines.Unavailable, *(_REFUSALS if whole else ())):
                    (_compiled(network, inputs[:batch]) if whole else network)(inputs[:batch])
                    yield f"{attention}, batch {batch}" + (", compiled" if whole else "")


def _compiled(network, inputs):
    """A network as torch.compile makes it, once it was called: tables that a first call makes on the host would be
    compiled for the host, too, and cut the network in many. What was compiled before counts against the limit of
    torch's cache, and is forgotten."""
    network(inputs)
    torch.compiler.reset()
    return torch.compile(network, dynamic=False)


def _prepared(name, batches, device, dtype, seed):
    """``(create, inputs)``: the network `name` with an attention or a batching, and with plans; and as many images as
    the dicts `batches` ask for, on the device."""
    family, options = networks.parse(name)
    # What a family exchanges, its attention or its batching, is a column of its rows under the first name.
    what, _ = networks.exchanged(family)
    place, kind = targets.facts(device).TORCH_DEVICE, getattr(torch, dtype)

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


def _oracle(dense, inputs):
    """The `Oracle` of a network with dense attention, in the type of `inputs`; the network is in float32 after that."""
    rounded = torch.cat([dense(image[None]) for image in inputs])
    if inputs.dtype == torch.float32:
        return Oracle(rounded, TOLERANCE)
    # Of its own weights and images, in float32: not in TensorFloat-32, which convolutions on a GPU take by default.
    dense.float()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        logits = torch.cat([dense(image[None].float()) for image in inputs])
    own, most = reference.logits_error(rounded, logits), MOST_ROUNDOFFS * torch.finfo(inputs.dtype).eps / 2
    return Oracle(logits, max(TOLERANCE, own, min(most, ROUNDING * own)))


def _attention_errors(network, inputs):
    """Columns of the attention of `network` over its patterns, on `inputs`; none where it has no pattern, or the tokens
    of ``native`` do not stand as in its graph, so that only logits tell."""
    graphs, found = {}, []

    def compare(attend, arguments, out):
        q, k, v, bias = (*arguments, None)[:4]
        bias, site = bias() if callable(bias) else bias, attend.site
        if site.attention == "native" and site.native_layout:
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

    hooks = [m.register_forward_hook(compare) for m in network.modules() if isinstance(m, _sites.Attend)]
    network(inputs)
    for hook in hooks:
        hook.remove()
    if not found:
        return {}
    # A NaN is larger than all numbers.
    error, tolerance = max(found, key=lambda pair: np.nan_to_num(pair[0], nan=np.inf))
    return {"attention_error": error, "attention_tolerance": tolerance}


def _measured(network, inputs, oracle, effort, compiled=False):
    """Check of one network on one batch, and only if it passes, its time. compiled: by torch.compile, anew for every
    batch."""
    facts, expected = {"time": now()}, oracle.logits[: len(inputs)]
    begin = time.perf_counter()
    try:
        network = _compiled(network, inputs) if compiled else network
        found = network(inputs)
        timing.wait(inputs)
    except sparse_baselines.Unavailable as reason:
        return facts | {"status": "skipped", "reason": str(reason)}
    except _REFUSALS as error:
        if not compiled:
            raise
        return facts | {"status": "failed", "reason": refusal(error)}
    facts |= {
        "first_call_s": time.perf_counter() - begin,
        "max_abs_error": float((found - expected).abs().max()),
        "relative_error": reference.logits_error(found, expected),
        "tolerance": oracle.tolerance,
        "same_top1": float((found.argmax(1) == expected.argmax(1)).double().mean()),
        **({} if compiled else _attention_errors(network, inputs)),
        **_peak_bytes(network, inputs),
    }
    if reason := refuted(facts, CHECKS):
        return facts | {"status": "failed", "reason": reason}
    in_attention = []

    def call():
        with _sites.clocked() as clock:
            network(inputs)
            timing.wait(inputs)
        in_attention.append(clock.seconds)

    taken = timing.time_call(call, **effort.limits)
    # A compiled network has no clocks. Warm-up calls come first.
    attention_us = 1e6 * float(np.median(in_attention[-taken.repetitions :]))
    if inputs.is_cuda:
        captured = timing.time_gpu(lambda: network(inputs), **effort.limits)
        facts |= {"gpu_us": captured.p50_us} if captured.method == "graph" else {}
    facts |= {**taken.columns, "images_per_s": len(inputs) / taken.p50_us * 1e6}
    return facts | ({} if compiled else {"attention_us": attention_us, "rest_us": taken.p50_us - attention_us})


def _peak_bytes(network, inputs):
    """The column of that name, of a call; none on a CPU."""
    if not inputs.is_cuda:
        return {}
    torch.cuda.reset_peak_memory_stats(inputs.device)
    network(inputs)
    timing.wait(inputs)
    return {"peak_bytes": torch.cuda.max_memory_allocated(inputs.device)}
