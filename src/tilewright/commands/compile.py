"""Compile the functions that order and cut large patterns, once for this machine."""

import time
from argparse import ArgumentParser


def arguments(parser: ArgumentParser) -> None:
    """It has none."""


def run() -> None:
    """Compile, and print how long it took."""
    begin = time.perf_counter()
    ahead()
    print(f"compiled in {time.perf_counter() - begin:.1f} s")


def ahead() -> None:
    """Compile what no plan should wait for: by use, where a function's types are those that it is called with."""
    import numpy as np

    from tilewright import graph
    from tilewright.attention import reorder
    from tilewright.attention.blocks import cut
    from tilewright.core import compiled, progress

    for name in cut.ENTERED:
        compiled.prepare(name)
    # Tokens of a grid in any order, and a pattern that is none.
    generator, n = np.random.default_rng(0), 256
    place = np.stack(np.divmod(generator.permutation(n), 16), 1)
    near = np.abs(place[:, None] - place).max(-1) <= 2
    for pattern in progress.with_progress((near, near | (generator.random((n, n)) < 0.1)), "compile"):
        found = graph.from_pattern(pattern)
        for order in ("ic", "hc"):
            reorder.apply(found, order)
