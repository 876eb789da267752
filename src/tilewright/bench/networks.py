"""Whole networks, from images to logits: every attention is compared with the dense one and only then timed (stage T5).

A row that did not pass has the status ``failed`` and no time; one that could not run has ``skipped``; both say why.
"""

import gc
import time
from datetime import UTC, datetime
from functools import partial

import numpy as np
import torch

from tilewright import hardware, images, networks
from tilewright.kernels import baselines
from tilewright.models import gates
from tilewright.networks import sites
from tilewright.timing import time_call

NETWORKS = (
    "network", "family", "variant", "resolution", "attention", "batch", "status", "reason", "dtype", "parameters",
    "max_abs_error", "tolerance", "largest_logit", "same_top1", "first_call_s", "p20_us", "p50_us", "p80_us",
    "repetitions", "rse", "images_per_s", "attention_us", "rest_us", "device", "cores", "torch", "numpy", "time",
)  # fmt: skip

# In float32, of logits of the order of 1.
TOLERANCE = 1e-4


def photographs(count, size):
    """`count` normalised photographs, float32 [count, 3, size, size]: `images.PHOTOGRAPHS`, then these mirrored."""
    names = list(images.PHOTOGRAPHS)
    pixels = [gates.pixels(name, size) for name in names[:count]]
    turned = [(i % len(names), i // len(names) % 2 == 1) for i in range(count)]
    return torch.from_numpy(np.stack([pixels[i][:, :, ::-1] if mirrored else pixels[i] for i, mirrored in turned]))


@torch.inference_mode()
def run_network(name, batches, effort, *, seed=0):
    """Yield a row of `NETWORKS` for each attention and batch of `batches`, ``{attention: [batch, …]}``.

    All attentions have the weights that `seed` draws. The logits of dense attention, one image at a time, are what
    others are compared with, itself in batches included. ``attention_us`` is spent in attention, its projections and
    the ordering of tokens excluded; ``first_call_s`` holds what is done once, such as plans and compiling. Raises what
    `networks.create` raises.
    """
    family, options = networks.parse(name)
    create = partial(networks.create, family, **options, seed=seed)
    inputs = photographs(max(batch for sizes in batches.values() for batch in sizes), options["image_size"])
    dense = create(attention="dense")
    expected = torch.cat([dense(image[None]) for image in inputs])
    device = hardware.describe("cpu")
    known = dict.fromkeys(NETWORKS, "") | {
        "network": name,
        "family": family,
        "variant": options["variant"],
        "resolution": options["image_size"],
        "status": "ok",
        "dtype": str(expected.dtype).removeprefix("torch."),
        "parameters": sum(weights.numel() for weights in dense.parameters()),
        "tolerance": TOLERANCE,
        "largest_logit": float(expected.abs().max()),
        "device": device["name"],
        "cores": device["threads"],
        **device["versions"],
    }
    del dense
    for attention, sizes in batches.items():
        # One network at a time: masks of several would not fit the memory at high resolution.
        gc.collect()
        network = create(attention=attention)
        for batch in sizes:
            measured = _measured(network, inputs[:batch], expected[:batch], effort)
            yield known | {"attention": attention, "batch": batch} | measured
        del network


def _measured(network, inputs, expected, effort):
    """Check of one network on one batch, and only if it passes, its time."""
    facts = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
    begin = time.perf_counter()
    try:
        found = network(inputs)
    except baselines.Unavailable as reason:
        return facts | {"status": "skipped", "reason": str(reason)}
    error = float((found - expected).abs().max())
    facts |= {
        "first_call_s": time.perf_counter() - begin,
        "max_abs_error": error,
        "same_top1": float((found.argmax(1) == expected.argmax(1)).float().mean()),
    }
    # Not `>`: a NaN does not pass.
    if not error <= TOLERANCE:
        reason = f"logits differ by {error:.2g} from those of dense attention, tolerance {TOLERANCE:.2g}"
        return facts | {"status": "failed", "reason": reason}
    in_attention = []

    def call():
        with sites.clocked() as clock:
            network(inputs)
        in_attention.append(clock.seconds)

    timing = time_call(call, min_reps=effort.min_repetitions, max_seconds=effort.max_seconds, rse_target=effort.rse)
    # Warm-up calls come first.
    attention_us = 1e6 * float(np.median(in_attention[-timing.repetitions :]))
    return facts | {
        "p20_us": timing.p20_us,
        "p50_us": timing.p50_us,
        "p80_us": timing.p80_us,
        "repetitions": timing.repetitions,
        "rse": timing.rse,
        "images_per_s": len(inputs) / timing.p50_us * 1e6,
        "attention_us": attention_us,
        "rest_us": timing.p50_us - attention_us,
    }
