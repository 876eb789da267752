"""Key streams of stage T2 on push memories: keys, affine pieces and configuration words, by order and tile."""

from typing import Literal

from tilewright.attention.blocks import tiles as tile_names
from tilewright.core.errors import TilewrightError
from tilewright_study import sections
from tilewright_study.experiments import push
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count

TABLES = ("push_streams",)
FIGURES = ()

SECTION, Section = "push", push.Section
# Streams are cut on the host, whatever device the study times.
ON_HOST, TIMES = True, False


class Settings(sections.Section, frozen=True):
    """What one case is run with; values as in the whole study. params: the family's own, of the configuration."""

    params: dict
    orders: tuple[str, ...]
    tiles: tuple[str, ...]
    region_rows: int
    reorder: dict


class Row(rows.Judged, frozen=True, kw_only=True):
    """The keys that the blocks of one order and tile read, one after another.

    keys: of the stream, without padding; pieces: the fewest stretches that the loops of a controller give; words:
    configuration words of 16 bits of all pieces, two for the starts and three for each loop; longest: keys of the
    longest piece; wrong: keys of the replayed pieces that differ.
    """

    kind: Literal["push_streams"] = "push_streams"
    version: Literal[1] = 1
    model: str = ""
    reorder: str = ""
    tile: str = ""
    tokens: Count = None
    keys: Count = None
    pieces: Count = None
    words: Count = None
    longest: Count = None
    wrong: Count = None


NAMED = "{model} {reorder} {tile}"


def cases(config):
    """Each workload whose keys are streamed."""
    return list(config.push.attention)


def settings(config, case):
    """`Settings` of one case."""
    params = dict(config.models.get(case, {}))
    return Settings(params, config.orders, config.tiles, config.region_rows, dict(config.reorder))


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    return [{"model": case, "reorder": order} for order in settings.orders]


def modules(row, device):
    """Modules that a row depends on."""
    from tilewright import masks

    order = f"tilewright.attention.reorder.{row['reorder']}"
    own = "tilewright_study.experiments.push_streams.pieces"
    return [*masks.modules(row["model"], None), order, "tilewright.attention.blocks", own]


def size(case, settings):
    """Numbers that a case holds: the pattern, dense."""
    from tilewright import masks

    return masks.size(case, settings.params)


def run(case, settings, how):
    """Yield a row for each order and tile. Raises `TilewrightError`."""
    from tilewright import devices, masks
    from tilewright.attention import blocks
    from tilewright_study import orders
    from tilewright_study.experiments.push_streams import pieces

    facts = rows.machine(devices.describe("cpu"))
    pattern = masks.build(case, settings.params)
    for order in settings.orders:
        known = {"model": case, "reorder": order, "tokens": pattern.n_rows, **facts}
        try:
            ordered, _ = orders.apply(pattern, order, settings.reorder.get(order, {}))
        except TilewrightError as reason:
            skipped = {"status": "skipped", "reason": str(reason), "time": rows.now()}
            yield from (known | skipped | {"tile": tile} for tile in settings.tiles)
            continue
        for tile in settings.tiles:
            cover = blocks.extract(ordered, tile_names.parse(tile), settings.region_rows)
            keys = pieces.stream(cover)
            found = pieces.pieces(keys)
            row = known | {"tile": tile, "keys": len(keys), "pieces": len(found), "time": rows.now()}
            row |= {"words": sum(p.words for p in found), "longest": max((len(p.keys()) for p in found), default=0)}
            row["wrong"] = _wrong(keys, found)
            if row["wrong"]:
                row |= {"status": "failed", "reason": f"expected none, found {row['wrong']} keys that differ"}
            yield row


def _wrong(keys, found):
    """Keys of the stream that the pieces give otherwise, or not at all."""
    import numpy as np

    given = np.concatenate([piece.keys() for piece in found] or [np.zeros(0, np.int64)])
    common = min(len(keys), len(given))
    return int((keys[:common] != given[:common]).sum()) + abs(len(keys) - len(given))


def remark(row):
    """What the log says of a row that passed."""
    return f"{row['keys']:,} keys, {row['pieces']:,} pieces, {row['words']:,} words"
