"""Types in which modules and attention compute: 16 bits in float32, and what autocast asks for."""

from itertools import chain
from typing import Any

import torch
from torch.func import functional_call

SIXTEEN_BITS = torch.float16, torch.bfloat16


def float32(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its parameters and buffers by name, 16-bit ones in float32, as `functional_call` takes them."""
    state = chain(module.named_parameters(), module.named_buffers())
    return {name: x.float() if x.is_floating_point() else x for name, x in state}


def widened(value: Any) -> Any:
    """`value` with its tensors in 16 bits, also those in tuples, lists and dicts of it, in float32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in SIXTEEN_BITS else value
    if isinstance(value, dict):
        return {key: widened(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        parts = map(widened, value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def in_float32(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """``module(x)`` in float32, whatever the network runs in: in half precision many scores would tie."""
    with torch.autocast(x.device.type, enabled=False):
        return functional_call(module, float32(module), x.float())


def cast(*tensors: list | torch.Tensor) -> Any:
    """Tensors under autocast as torch's attention takes them there: in its type, but for float64."""
    device = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    to = torch.get_autocast_dtype(device)
    return tuple(_cast(x, to) for x in tensors)


def _cast(x, to):
    eligible = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(to) if eligible else x
