"""Stage T5 on files: an experiment's case and its settings in, a CSV file of rows out."""

import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from tilewright.core import artifacts
from tilewright.core.errors import ConfigError, TilewrightError
from tilewright_study import experiments, provenance
from tilewright_study.cli import settings
from tilewright_study.measure import lock
from tilewright_study.measure import rows as _rows
from tilewright_study.measure.effort import Run


def run(experiment, case, output, device, dtype, rse, min_repetitions, seed, stated, compile_only=False):
    """Run the `case` of an `experiment` and write its rows to `output`.

    stated: its settings, ``key=value`` in JSON or YAML. Each row is printed as it is measured, which may take minutes.
    compile_only: nothing is timed, `output` lists what was compiled instead. Raises `TilewrightError`; `output` is not
    written then. Where that, another exception, SIGINT or SIGTERM ends it, the rows so far go to `partial` of it.
    """
    chosen = experiments.parse(experiment, settings(stated))
    how = checked(Run(device, dtype, seed, rse, min_repetitions))
    module, runner = experiments.member(experiment), experiments.runner(experiment)
    place = "cpu" if getattr(module, "ON_HOST", False) else device
    rows = []
    with lock.exclusive(place):
        if compile_only:
            write_names(output, runner.first_calls(case, chosen, how) if hasattr(runner, "first_calls") else ())
            return
        with terminating(), _keeping(output, experiment, rows, place):
            for row in runner.run(case, chosen, how):
                rows.append(row)
                show(module, row)
    write(output, experiment, rows, place)
    # Of an earlier run, which did not end.
    partial(output).unlink(missing_ok=True)


def partial(output):
    """Where the rows of a run go that does not end: beside its `output`, which is not written then."""
    return Path(f"{output}.partial.csv")


@contextmanager
def _keeping(output, experiment, rows, device):
    """Write the `rows` so far where the run is ended early, and say so; what ended it goes on."""
    try:
        yield
    except BaseException:
        if rows:
            _keep(output, experiment, rows, device)
        raise


def _keep(output, experiment, rows, device):
    path = partial(output)
    try:
        write(path, experiment, rows, device)
        print(f"{path}: the {len(rows)} rows that were measured before the run ended", file=sys.stderr, flush=True)
    except (TilewrightError, OSError) as error:
        # What ended the run is to be told, not this.
        print(f"{path}: the {len(rows)} rows so far are lost: {error}", file=sys.stderr, flush=True)


@contextmanager
def terminating():
    """SIGTERM ends the program as an exception does, with the status that shells know it by."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number, _):
        # Once: a second one is not to disturb what the first one began.
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def checked(how):
    """`how`, a `Run` or an `Effort`. Raises `ConfigError` for numbers out of range."""
    if not (how.rse > 0 and how.min_repetitions >= 1 and getattr(how, "max_seconds", 1) > 0):
        raise ConfigError(f"expected rse, repetitions and seconds above zero, found {how}")
    return how


def show(module, row):
    """Print a row of the experiment `module`: what it measured, or to stderr why it did not."""
    name = module.NAMED.format_map(_Blank(row))
    if row.get("status", "ok") == "ok":
        if (said := getattr(module, "remark", _rows.microseconds)(row)) is not None:
            print(f"{name}: {said}", flush=True)
    else:
        print(f"{name}: {row['status']}: {row['reason']}", file=sys.stderr)


class _Blank(dict):
    """A row whose missing columns are blank."""

    def __missing__(self, column):
        return ""


def write_names(path, names):
    """Write a text file with a line for each of `names`, as they come."""
    artifacts.write_text(path, "".join(f"{name}\n" for name in names))


def write(path, experiment, rows, device):
    """Write `rows` of an `experiment` that were made on a `device` of this kind, with the code that made them."""
    commit = provenance.commit()
    rows = [row | {"commit": commit, "code": experiments.code(experiment, [row], device)} for row in rows]
    _rows.write(path, experiments.member(experiment).Row, rows)
