"""Windowed attention on push memories: the keys that banks deliver, against the workload's graph, and the cycles."""

from typing import Literal

from tilewright.core.errors import TilewrightError
from tilewright_study import sections
from tilewright_study.experiments import push
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Number

TABLES = ("push_attention",)
FIGURES = ()

SECTION, Section = "push", push.Section
# Cycles are counted, in a model.
ON_HOST, TIMES = True, False
# float32 sums of a few hundred to a few thousand terms, in another order than the reference's.
TOLERANCE = 1e-4


class Settings(sections.Section, frozen=True):
    """What one case is run with. params: the family's own, of the configuration. rtl: whether a bank runs in RTL."""

    params: dict
    rtl: bool


class Row(rows.Judged, frozen=True, kw_only=True):
    """A workload on the array. tiles: of K and V of one head. cycles: to the last key; cycles_global: with the tokens
    that see all keys. bound: cycles of the multiply-adds alone. ms: at the published clock, of all heads. delivered:
    keys that queries were given, of one dimension of one head or of all, as the bank delivers them; wrong: that are not
    the keys due; conflicts: accesses of a tile's memory that met; queries: whose keys are not their row of the graph.
    words: that come in from outside, of K and V; gathered: that would, were each pass to fetch its own keys.
    rtl_wrong: keys of the bank in RTL. error: the largest difference from the reference, over its largest value, of
    one head in float32; tolerance: of it.
    """

    kind: Literal["push_attention"] = "push_attention"
    version: Literal[1] = 1
    model: str = ""
    heads: Count = None
    head_dim: Count = None
    tokens: Count = None
    tiles: Count = None
    cycles: Count = None
    cycles_global: Count = None
    bound: Count = None
    ms: Number = None
    delivered: Count = None
    wrong: Count = None
    conflicts: Count = None
    queries: Count = None
    words: Count = None
    gathered: Count = None
    rtl_wrong: Count = None
    error: Number = None
    tolerance: Number = None


NAMED = "{model}"


def cases(config):
    """Each workload."""
    return list(config.push.attention)


def settings(config, case):
    """`Settings` of one case."""
    return Settings(dict(config.models.get(case, {})), config.push.rtl)


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    return [{"model": case}]


def modules(row, device):
    """Modules that a row depends on."""
    from tilewright import masks

    return [*masks.modules(row["model"], None), f"{__name__}.array", "tilewright.pushmem.memories.pub",
            "tilewright.pushmem.memories._rtl", "tilewright.reference"]  # fmt: skip


def size(case, settings):
    """Numbers that a case holds: the pattern, dense."""
    from tilewright import masks

    return masks.size(case, settings.params)


def run(case, settings, how):
    """Yield the row of a case. Raises `TilewrightError`."""
    import numpy as np

    from tilewright import devices, masks
    from tilewright_study.experiments.push_attention import array as attention

    known = {"model": case, "time": rows.now(), **rows.machine(devices.describe("cpu"))}
    graph = masks.build(case, settings.params)
    make = attention.longformer if graph.meta["family"] == "vision_longformer" else attention.regionvit
    try:
        layer = make(graph.meta)
    except TilewrightError as reason:
        yield known | {"status": "failed", "reason": str(reason)}
        return
    extra = np.arange(graph.meta.get("n_global", 0))
    found, dim = attention.deliver(layer), graph.meta["head_dim"]
    row = {
        "heads": layer.heads,
        "head_dim": dim,
        "tokens": graph.n_rows,
        "tiles": layer.tiles,
        "cycles": layer.cycles,
        "cycles_global": layer.cycles_global,
        "bound": layer.bound,
        "ms": layer.milliseconds,
        "delivered": found.deliveries,
        "wrong": found.wrong,
        "conflicts": found.conflicts,
        "queries": attention.rows_that_differ(layer, graph, extra),
        "words": 2 * dim * found.words,
        "gathered": 2 * dim * found.deliveries,
        "rtl_wrong": attention.deliver(layer, hardware=True).wrong if settings.rtl else None,
        "error": _error(layer, graph, extra),
        "tolerance": TOLERANCE,
    }
    bad = [name for name in ("wrong", "conflicts", "queries", "rtl_wrong") if row[name]]
    bad += ["error"] * (not row["error"] <= TOLERANCE)
    if bad:
        row |= {"status": "failed", "reason": f"expected none, found {', '.join(f'{n} {row[n]}' for n in bad)}"}
    yield known | row


def _error(layer, graph, extra):
    """The largest difference of one head from the reference, over its largest value."""
    import numpy as np
    import torch

    from tilewright.reference import attention as reference
    from tilewright_study.experiments.push_attention import array as attention

    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((graph.n_rows, graph.meta["head_dim"])).astype(np.float32) for _ in range(3))
    found = attention.attend(layer, q, k, v, extra)
    given = (torch.from_numpy(x)[None, None] for x in (q, k, v))
    expected = reference(*given, torch.from_numpy(graph.to_dense()))[0, 0].numpy()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def remark(row):
    """What the log says of a row that passed."""
    return f"{row['cycles_global']:,} cycles, {row['ms']:.3f} ms"
