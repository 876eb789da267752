"""Progress of long stages: a bar on a terminal, lines in a job's log."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
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


@contextlib.contextmanager
def within(what: str, limit_s: float) -> Iterator[Callable]:
    """Yield a function that shows a line about a task of at most `limit_s` seconds.

    On a terminal, a bar below the lines shows the time that has passed.
    """
    if not sys.stderr.isatty():
        print(f"{what}: at most {limit_s:g} s", file=sys.stderr, flush=True)
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    from tqdm import tqdm

    begin = perf_counter()
    form = "{desc} |{bar}| {n:.0f} of at most {total:g} s"
    with tqdm(total=limit_s, desc=what, bar_format=form, leave=False) as bar:

        def show(line):
            bar.update(min(perf_counter() - begin, limit_s) - bar.n)
            bar.write(line, file=sys.stderr)

        yield show
