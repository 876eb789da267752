"""Scheduled attention: a plan for each pattern, built once for each device and kept on disk."""

import hashlib
import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tilewright import devices
from tilewright.attention import backends, plan, reorder
from tilewright.attention.masks import Bias
from tilewright.core import _internals, caches, provenance
from tilewright.core.errors import ArtifactError, PatternError
from tilewright.networks import attention_sites

TRACED, READS = "operator", True

_LOG = logging.getLogger(__name__)
# What plans enter by name where a network does not choose others, see `networks.plans`.
ENTERED = ("tilewright.attention.reorder.window", "tilewright.milp.highs")


def order(site: attention_sites.Site) -> torch.Tensor:
    """The plans' order of the tokens, the same for queries and keys, on every device and in every type."""
    ordered, _ = reorder.apply(site.graph, site.planned.reorder)
    if not np.array_equal(np.asarray(ordered.row_order), np.asarray(ordered.col_order)):
        raise PatternError("expected one order for queries and keys of a self-attention, found two")
    return torch.from_numpy(np.asarray(ordered.row_order, np.int64))


def prepare(
    site: attention_sites.Site, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> Callable:
    """The site's plan, with the layer's bias, for tokens in its order."""
    found = _plan(site, dtype, device)
    if bias is not None:
        found = _biased(found, site, bias)

    def attend(q, k, v):
        return found(q, k, v, ordered=True)

    return attend if backends.differentiates(device.type) else partial(attention_sites.without_backward, attend)


def taking(site: attention_sites.Site, dtype: torch.dtype, device: torch.device) -> Callable | None:
    """The site's plan, which takes the values of the bias in each call."""
    if not backends.differentiates(device.type):
        return None
    planned = _plan(site, dtype, device)
    made: list = []

    def attend(q, k, v, bias):
        if not made:
            made.append(_made(planned, site, bias))
        return made[0](q, k, v, ordered=True, bias=bias)

    return attend


@_internals.uncompiled
def _made(planned, site, bias):
    return _biased(planned, site, bias.detach())


def _biased(planned, site, bias):
    return planned.with_bias(
        Bias(bias.float(), lambda rows, cols: site.bias_index(*map(_tensor, (rows, cols))).numpy())
    )


def _tensor(array):
    return torch.as_tensor(array, dtype=torch.int64, device="cpu")


def _plan(site, dtype, device):
    """The site's plan for `dtype` on a ``torch.device``, from memory, from disk, or made and written there."""
    # Kept by the site: its layers share one plan.
    if (dtype, device) in site.plans:
        return site.plans[dtype, device]
    # Several GPUs of a process have their plans each: a plan is profiled on the current one.
    with torch.cuda.device(device.index if devices.facts(device.type).CUDA else -1):
        return site.plans.setdefault((dtype, device), _read_or_made(site, dtype, device.type))


def _read_or_made(site, dtype, device):
    """The plan for `dtype` on the current device of a kind."""
    facts = devices.describe(device)
    shape = {"heads": site.heads, "head_dim": site.head_dim, "dtype": dtype}
    planned = site.planned
    # Equal patterns may have other windows, and then their tokens stand in another order.
    pattern = site.graph.id, provenance.sha256_arrays(site.order.numpy())
    asked = (*map(str, shape.values()), repr(planned))
    made_of = (*pattern, *asked, devices.device_id(facts), provenance.package_digest())
    path = caches.folder() / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]}.plan"
    if caches.has(path):
        try:
            return plan.load(path)
        except ArtifactError as error:
            _LOG.warning("a cached plan cannot be read and is made again: %s", error)
    chosen = {"reorder": planned.reorder, "tiles": planned.tiles or None, "solver": planned.solver}
    found = plan.plan(site.graph, **shape, device=device, **chosen)
    with caches.keeping("plans"):
        found.save(path)
    return found
