"""Stage T2 on files: an ordered graph in, its blocks of one tile out."""

from tilewright import graph as graph_file
from tilewright.attention import blocks as blocks_file
from tilewright.attention.blocks import tiles
from tilewright_study import provenance


def run(graph, tile, output, region_rows):
    """Write the blocks of `tile` (its name, e.g. ``64x1``) that cover the graph file `graph` to `output`.

    region_rows: most rows in a region. Raises `TilewrightError`; nothing is written then.
    """
    blocks = blocks_file.extract(graph_file.load(graph), tiles.parse(tile), region_rows)
    made_by = {
        "stage": "blocks",
        "parameters": {"tile": tile, "region_rows": region_rows},
        "inputs": {str(graph): provenance.sha256_file(graph)},
        "code": provenance.code_digest("tilewright_study.stages.blocks"),
        "versions": provenance.versions("numpy", "scipy"),
    }
    blocks_file.save(output, blocks, made_by)
    print(", ".join(f"{name} {value}" for name, value in blocks.summary().items()))
