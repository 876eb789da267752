"""What is made in the first call and kept is made apart from the state that this call finds.

A thread of its own has none of it: no inference mode, autocast, default device, transformation, and nobody that traces.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tilewright.core import _internals


@_internals.uncompiled
def made(make: Callable, *arguments: Any) -> Any:
    """``make(*arguments)`` in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make, *arguments).result()
