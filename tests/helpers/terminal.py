"""What tests of progress show it on, and a clock that they move."""

import io


class Terminal(io.StringIO):
    """A terminal that keeps what it is told."""

    def isatty(self):
        return True


def clock_of(monkeypatch, module):
    """The clock of a module, a list of one number of seconds, which moves when told to."""
    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now
