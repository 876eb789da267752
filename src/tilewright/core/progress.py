"""Progress of long stages: a bar on a terminal, lines in a job's log."""

import sys
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

# Seconds between two lines of a log.
EVERY_S = 10.0


def with_progress(items: Sequence, what: str) -> Iterator[Any]:
    """Yield each of `items`, a sized collection; show on stderr how many are done and about how long is left."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(items, desc=what, leave=False)
        return
    begin = shown = perf_counter()
    for done, item in enumerate(items):
        now = perf_counter()
        if done and now - shown >= EVERY_S:
            left = (now - begin) / done * (len(items) - done)
            print(f"{what}: {done} of {len(items)} done, about {left:.0f} s left", file=sys.stderr, flush=True)
            shown = now
        yield item
