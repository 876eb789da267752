"""The published formulation of each family, as the family's network defines it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tilewright.networks.attention_sites import Site

TRACED, READS = "formula", True


def order(site: "Site") -> None:
    """Tokens stay in the model's order."""
    return None


def prepare(site: "Site", bias: "torch.Tensor | None", dtype: "torch.dtype", device: "torch.device | str") -> Callable:
    """The site's own formulation."""
    return lambda q, k, v: site.native(q, k, v, bias)  # type: ignore[misc]  # sites of networks have one


def taking(site: "Site", dtype: "torch.dtype", device: "torch.device | str") -> Callable:
    """Likewise."""
    return lambda q, k, v, bias: site.native(q, k, v, bias.to(dtype))  # type: ignore[misc]  # sites of networks have one
