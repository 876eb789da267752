"""The form in which a GPU attends to slices: what a calibration found fastest, else the default (stage T3).

As `forms` has it for tiles: a file for each number of queries, width of runs, type and head dim, on a GPU with a
driver, a torch, a triton and this code.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.attention.cuda import forms
from tilewright.core import _internals, provenance
from tilewright.slices.cuda import config

# What the fastest form depends on beside the device.
CODE = tuple(
    f"tilewright.{name}"
    for name in (
        *(f"slices.cuda.{name}" for name in ("config", "form_search", "kernels", "warp_kernel")),
        *(f"devices.cuda.{name}" for name in ("online_softmax", "warps")),
    )
)


@dataclass(frozen=True)
class Kind:
    """Lists that share a form. rows: queries of a group. width: keys of a run. dtype: a name."""

    rows: int
    width: int
    head_dim: int
    dtype: str


def of(kind, device):
    """The `SliceConfig` of lists of a `Kind` on a ``torch.device``."""
    if device.type == "cuda":
        stated = made_for(kind, device)
        found = forms.held(forms.path_of(stated), stated, read=config.read)
        if found is not None:
            return config.read(found.forms[0])
    return candidates(kind, device)[0]


def candidates(kind, device: torch.device | str):
    """The forms of a `Kind` on a device, the default first."""
    return config.candidates(kind.rows, kind.head_dim, getattr(torch, kind.dtype), *device_facts(device))


def made_for(kind, device: torch.device | str):
    """What a choice holds for that is made now on a GPU, a JSON-able dict. Asks nothing of the GPU, which may be
    capturing a graph."""
    own = {"dtype": kind.dtype, "head_dim": kind.head_dim, "rows": kind.rows, "run": kind.width}
    return device_for(CODE, device) | own


def device_for(code, device: torch.device | str) -> dict:
    """What of `made_for` says which device, releases and modules `code` it is."""
    # Any: torch's stub leaves fields out.
    facts: Any = torch.cuda.get_device_properties(device)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "multiprocessors": facts.multi_processor_count,
        "driver": _internals.driver_version(),
        **provenance.versions("torch", "triton"),
        "code": provenance.text_digest(*code),
    }


def device_facts(device):
    """``((major, minor), most bytes of shared memory of a program)``; those of an A100 under the interpreter, which
    runs no kernel of `warp_kernel`."""
    if device.type != "cuda":
        return (8, 0), 163 << 10
    # Any: torch's stub leaves fields out.
    facts: Any = torch.cuda.get_device_properties(device)
    return (facts.major, facts.minor), facts.shared_memory_per_block_optin
