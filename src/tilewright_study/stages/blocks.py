"""Stage T2 on files: an ordered graph in, its blocks out."""

import numpy as np

from tilewright import graph as graph_file
from tilewright.attention import blocks as blocks_file
from tilewright.attention.blocks import tiles
from tilewright.core.errors import ConfigError
from tilewright_study import provenance


def run(graph, tile, output, region_rows):
    """Write the blocks of each `tile` (its name, e.g. ``64x1``) that cover the graph file `graph` to its `output`.

    region_rows: most rows in a region. Each file is written before the next one is begun, since large ones fill the
    memory. Raises `TilewrightError`; nothing of that tile is written then.
    """
    if len(tile) != len(output):
        raise ConfigError(f"expected one output for each tile, found {len(output)} for {len(tile)}")
    chosen, pattern = [tiles.parse(name) for name in tile], graph_file.load(graph)
    made_by = {
        "stage": "blocks",
        "inputs": {str(graph): provenance.sha256_file(graph)},
        "code": provenance.code_digest("tilewright_study.stages.blocks"),
        "versions": provenance.versions("numpy", "scipy"),
    }
    for each, path in zip(chosen, output, strict=True):
        cover = blocks_file.extract(pattern, each, region_rows)
        blocks_file.save(path, cover, made_by | {"parameters": {"tile": each.name, "region_rows": region_rows}})
        facts = {name: f"{x:.4g}" if isinstance(x, float) else x for name, x in summary(cover).items()}
        print(", ".join(f"{name} {value}" for name, value in facts.items()))


def summary(cover):
    """JSON-able totals of `Blocks`. `fill`: entries over padded area; `work`: padded area over the dense pairs."""
    area, entries = int(cover.area.sum()), int(cover.run_entries.sum(dtype=np.int64))
    return {
        "tile": cover.tile.name,
        "regions": cover.n_regions,
        "blocks": cover.n_blocks,
        "runs": len(cover.run_mask),
        "full_runs": int((cover.run_mask < 0).sum()),
        "masks": len(cover.masks),
        "entries": entries,
        "area": area,
        "fill": entries / area,
        "work": area / (cover.shape[0] * cover.shape[1]),
    }
