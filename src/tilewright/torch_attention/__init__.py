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
