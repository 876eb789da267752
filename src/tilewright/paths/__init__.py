"""Choosing the path of a network (`networks.path`): a table of the best, a runner to a budget."""

from importlib import import_module
from typing import Any

# Loaded when asked for: Snakemake imports this package, and must not load NumPy and torch.
_LATER = {"Table": "table", "load": "table", "Runner": "runner", "FrameRunner": "frame_runner"}
# Parts of the time from a frame to its class map, as columns of a table.
PARTS = ("copy_in_us", "before_us", "network_us", "after_us", "copy_out_us")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
