"""The time that orders take, and how good they are, by the number of tokens (stage T5)."""

import resource
from typing import Literal

from tilewright import devices, masks
from tilewright.attention import reorder
from tilewright.core import progress
from tilewright.core.errors import ConfigError, UnknownNameError
from tilewright_study import sections
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Number

TABLES = ("reorder_time",)
FIGURES = ("reorder_time",)

# `orders` is the study's selection of orders.
SECTION = "order_times"
# Orders are found on the host's processors, whatever device the study times.
ON_HOST = True


class Section(sections.Section, frozen=True):
    """Time of each order against the number of tokens.

    workloads: workloads, from small to large, on which every order is timed
    """

    workloads: tuple[str, ...]

    def check(self, config):
        """Raise `ConfigError` for unknown workloads."""
        for name in self.workloads:
            sections.at("order_times.workloads", masks.parse, name)


class Settings(Section, frozen=True):
    """What the orders are run with. orders: of the whole study."""

    orders: tuple[str, ...]


class Row(rows.Row, frozen=True, kw_only=True):
    """One order of one workload.

    seconds: of ordering; work_fraction: gathered work, of dense; peak_rss_bytes: most memory of the process so far.
    """

    kind: Literal["orders"] = "orders"
    version: Literal[1] = 1
    model: str = ""
    tokens: Count = None
    entries: Count = None
    distinct_rows: Count = None
    reorder: str = ""
    seconds: Number = None
    work_fraction: Number = None
    peak_rss_bytes: Count = None


NAMED = "{model} {reorder}"


def cases(config):
    """``times``: one process times all, so that what is loaded and compiled once is so once."""
    return ["times"] if config.order_times.workloads else []


def settings(config, case):
    """`Settings` of the study."""
    return Settings(config.order_times.workloads, config.orders)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    return [{"model": model, "reorder": order} for model in settings.workloads for order in settings.orders]


def modules(row, device):
    """Modules that a row's time depends on, see `experiments`."""
    return [*_family(row["model"]), f"tilewright.attention.reorder.{row['reorder']}"]


def size(case, settings):
    """Numbers that a case holds: those of its largest graph."""
    return max(map(masks.size, settings.workloads), default=0)


def run(case, settings, how):
    """Yield a row for each workload and order, smallest workload first."""
    facts = rows.machine(devices.describe("cpu"))
    # What is compiled or loaded once is no part of an order's time.
    for order in settings.orders if settings.workloads else ():
        reorder.apply(masks.build(settings.workloads[0]), order)
    for name in progress.with_progress(settings.workloads, "order times"):
        pattern = masks.build(name)
        for order in settings.orders:
            _, info = reorder.apply(pattern, order)
            yield {
                "model": name,
                "tokens": pattern.n_rows,
                "entries": pattern.entries,
                "distinct_rows": pattern.n_distinct,
                "reorder": order,
                "seconds": info["seconds"],
                "work_fraction": info["work_fraction"],
                # ru_maxrss counts KiB on Linux.
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                **facts,
                "time": rows.now(),
            }


def remark(row):
    """What the log says of a row."""
    return f"{row['seconds']:.2f} s, gathered work {row['work_fraction']:.4f} of dense"


def _family(model):
    """The modules that make a workload's graph; none for a name of the user's own."""
    try:
        return masks.modules(model)
    except (UnknownNameError, ConfigError):
        return []
