"""The published formulation of each family, as the family's network defines it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tilewright.networks._sites import Site

TRACED, READS = "formula", True


def order(site: "Site"):
    """Tokens stay in the model's order."""
    return None


def prepare(site, bias, dtype: "torch.dtype", device: "torch.device | str"):
    """The site's own formulation."""
    return lambda q, k, v: site.native(q, k, v, bias)


def taking(site, dtype, device: "torch.device | str"):
    """Likewise."""
    return lambda q, k, v, bias: site.native(q, k, v, bias.to(dtype))
