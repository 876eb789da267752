"""Attention that torch itself offers, as networks run it and as schedules are measured against it.

`kernels`: the dense kernels behind `scaled_dot_product_attention`, each by itself. `flex`: FlexAttention over a graph,
in several forms. `masked`: the graph as a dense mask. `wide`: rows that see most keys, attended apart. `patterns`:
graphs as block-sparse kernels take them. Importing the package does not import torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewright import devices
from tilewright.core.errors import Unavailable

# Rows of a mask are that many values apart on a GPU: kernels copy, in each call, what is not aligned.
ALIGNED = 16


@dataclass(frozen=True)
class Ready:
    """A prepared attention: call it with q, k, v. held_bytes: its tables. executed: pairs that a head works through."""

    call: Callable
    held_bytes: int
    executed: int


def need_gpu(device: Any) -> None:
    """Raise `Unavailable` unless `device` is a GPU."""
    if not devices.facts(device).CUDA:
        raise Unavailable(f"runs on an NVIDIA GPU only, found {device}")


def need_tokens(dtype: Any, head_dim: int, head_dims: tuple[int, ...]) -> None:
    """Raise `Unavailable` unless tokens are of a 16-bit type, and their head dim is one of these."""
    if dtype.itemsize > 2 or head_dim not in head_dims:
        known = ", ".join(map(str, head_dims))
        raise Unavailable(f"takes 16-bit types and head dims {known}, found {dtype} and {head_dim}")
