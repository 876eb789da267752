"""T2: cover a reordered graph by nearly dense blocks of one tile."""

import argparse

from tilewright import blocks, graph
from tilewright.blocks import tiles
from tilewright.core.provenance import code_digest, sha256_file, versions
from tilewright.study.cli import script


def run(input, tile, output, region_rows):
    pattern = graph.load(input)
    cover = blocks.extract(pattern, tiles.parse(tile), region_rows)
    made_by = {
        "stage": "blocks",
        "parameters": {"tile": tile, "region_rows": region_rows},
        "inputs": {input: sha256_file(input)},
        "code": code_digest("tilewright.blocks"),
        "versions": versions("numpy", "numba"),
    }
    blocks.save(output, cover, made_by)
    print(", ".join(f"{name} {value}" for name, value in cover.summary().items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input", required=True, help="reordered graph (.npz), e.g. results/graphs/vil-tiny-224-s1/ic.npz"
    )
    parser.add_argument("--tile", required=True, help="MxN: 64x64 (blocks of contiguous keys) or 64x1 (gathered keys)")
    parser.add_argument("--output", required=True, help="blocks file to write (.npz)")
    parser.add_argument("--region-rows", type=int, default=128, help="most rows in a region (default: %(default)s)")
    script(parser, run)
