"""Whole networks, from images to logits: every attention is compared with the family's oracle and only then timed
(stage T5).

A row that did not pass has the status ``failed`` and no time; one that could not run has ``skipped``; both say why.
"""

import gc
import time
from dataclasses import dataclass

import numpy as np
import torch

from tilewright import hardware, images, networks, registry, timing
from tilewright.bench.rows import machine, now
from tilewright.kernels import baselines
from tilewright.models import gates
from tilewright.networks import sites
from tilewright.profile import DTYPES

NETWORKS = (
    "network", "family", "variant", "resolution", "attention", "batch", "status", "reason", "dtype", "parameters",
    "max_abs_error", "tolerance", "largest_logit", "same_top1", "first_call_s", "p20_us", "p50_us", "p80_us",
    "repetitions", "rse", "images_per_s", "attention_us", "rest_us", "gpu_us", "device", "cores", "torch", "numpy",
    "commit", "code", "time",
)  # fmt: skip

# In float32, of logits of the order of 1.
TOLERANCE = 1e-4
# ASSUME: in 16 bits an attention may be off by so many times what dense attention is off there, from what float32 makes
# of the same weights: each layer rounds, and what differs in a last bit drifts apart from layer to layer.
ROUNDING = 3.0


@dataclass(frozen=True)
class Oracle:
    """Logits that others are compared with, float32 [B, classes], and how far theirs may be from them."""

    logits: torch.Tensor
    tolerance: float


def photographs(count, size):
    """`count` normalised photographs, float32 [count, 3, size, size]: `images.PHOTOGRAPHS`, then these mirrored."""
    names = list(images.PHOTOGRAPHS)
    pixels = [gates.pixels(name, size) for name in names[:count]]
    turned = [(i % len(names), i // len(names) % 2 == 1) for i in range(count)]
    return torch.from_numpy(np.stack([pixels[i][:, :, ::-1] if mirrored else pixels[i] for i, mirrored in turned]))


def attentions(name):
    """What a network can attend by, its oracle first. Raises `UnknownNameError`."""
    family, _ = networks.parse(name)
    return registry.member(networks.__name__, "network", family, networks.NAMES).ATTENTIONS.NAMES


@torch.inference_mode()
def run_network(name, batches, effort, *, device="cpu", dtype="float32", seed=0):
    """Yield a row of `NETWORKS` for each attention and batch of `batches`, ``{attention: [batch, …]}``.

    All attentions have the weights that `seed` draws, rounded to `dtype`. The logits of the family's oracle (dense
    attention) in float32, one image at a time, are what others are compared with, itself in batches included.
    ``p50_us`` is the time until the logits are there. ``attention_us`` is spent in attention, its projections and the
    ordering of tokens excluded; on a GPU it is what its stream took from the beginning to the end of each attention,
    and ``gpu_us`` the time of the whole as a CUDA graph, where it can be captured. ``first_call_s`` holds what is done
    once, such as plans and compiling.
    Raises `UnknownNameError`, `DeviceError` and what `networks.create` raises.
    """
    registry.check("dtype", dtype, DTYPES)
    family, options = networks.parse(name)
    kind, facts = getattr(torch, dtype), hardware.describe(device)

    def create(attention):
        # As a user makes them: layers go by the versions of parameters, which inference tensors do not have.
        with torch.inference_mode(False):
            return networks.create(family, **options, seed=seed, attention=attention).to(device, kind)

    inputs = photographs(max(batch for sizes in batches.values() for batch in sizes), options["image_size"])
    inputs = inputs.to(device, kind)
    dense = create(attentions(name)[0])
    parameters = sum(weights.numel() for weights in dense.parameters())
    oracle = _oracle(dense, inputs)
    del dense
    known = dict.fromkeys(NETWORKS, "") | {
        "network": name,
        "family": family,
        "variant": options["variant"],
        "resolution": options["image_size"],
        "status": "ok",
        "dtype": dtype,
        "parameters": parameters,
        "tolerance": oracle.tolerance,
        "largest_logit": float(oracle.logits.abs().max()),
        **{name: value for name, value in machine(facts).items() if name in NETWORKS},
    }
    for attention, sizes in batches.items():
        # One network at a time: masks of several would not fit the memory at high resolution.
        gc.collect()
        if inputs.is_cuda:
            torch.cuda.empty_cache()
        network = create(attention)
        for batch in sizes:
            measured = _measured(network, inputs[:batch], oracle, effort)
            yield known | {"attention": attention, "batch": batch} | measured
        del network


def _oracle(dense, inputs):
    """The `Oracle` of a network with dense attention, in the type of `inputs`; the network is in float32 after that."""
    rounded = torch.cat([dense(image[None]) for image in inputs])
    if inputs.dtype == torch.float32:
        return Oracle(rounded, TOLERANCE)
    # Of its own weights and images, in float32: not in TensorFloat-32, which convolutions on a GPU take by default.
    dense.float()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        logits = torch.cat([dense(image[None].float()) for image in inputs])
    return Oracle(logits, max(TOLERANCE, ROUNDING * float((rounded - logits).abs().max())))


def _measured(network, inputs, oracle, effort):
    """Check of one network on one batch, and only if it passes, its time."""
    facts, expected = {"time": now()}, oracle.logits[: len(inputs)]
    begin = time.perf_counter()
    try:
        found = network(inputs)
        timing.wait(inputs)
    except baselines.Unavailable as reason:
        return facts | {"status": "skipped", "reason": str(reason)}
    error = float((found - expected).abs().max())
    facts |= {
        "first_call_s": time.perf_counter() - begin,
        "max_abs_error": error,
        "same_top1": float((found.argmax(1) == expected.argmax(1)).double().mean()),
    }
    # Not `>`: a NaN does not pass.
    if not error <= oracle.tolerance:
        reason = f"logits differ by {error:.2g} from those of the oracle, tolerance {oracle.tolerance:.2g}"
        return facts | {"status": "failed", "reason": reason}
    in_attention = []

    def call():
        with sites.clocked() as clock:
            network(inputs)
            timing.wait(inputs)
        in_attention.append(clock.seconds)

    taken = timing.time_call(call, **effort.limits)
    # Warm-up calls come first.
    attention_us = 1e6 * float(np.median(in_attention[-taken.repetitions :]))
    if inputs.is_cuda:
        captured = timing.time_gpu(lambda: network(inputs), **effort.limits)
        facts |= {"gpu_us": captured.p50_us} if captured.method == "graph" else {}
    rates = {"images_per_s": len(inputs) / taken.p50_us * 1e6, "attention_us": attention_us}
    return facts | taken.columns | rates | {"rest_us": taken.p50_us - attention_us}
