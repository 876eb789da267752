"""How full the blocks are: useful entries over the area that the tiles execute, by workload, order and tile.

How full the executed tiles are: allowed pairs over pairs executed, padding of rows and keys included, by workload,
order and tile. Slices (Mx1) gather their keys one by one. The dashed line is the density of the pattern, the fill of
dense attention.
"""

from tilewright_study.tables import _read, _select

SHOWN = {
    "model": ("workload", ""),
    "reorder": ("order", ""),
    "tile": ("tile", ""),
    "blocks": ("blocks", ",d"),
    "runs": ("key runs", ",d"),
    "density": ("density of the pattern", ".4f"),
    "fill": ("fill (entries / executed area)", ".3f"),
    "work": ("executed area / dense", ".3f"),
}


def needs(config):
    """Blocks of the workloads and tiles that ``config.figures`` names, under every order."""
    return _select.blocks(config, config.figures.fill_workloads, config.figures.fill_tiles)


def table(inputs):
    """One row per blocks file; ``work`` is the executed area, padding included, over N_q x N_k."""
    import pandas as pd

    from tilewright.attention import blocks

    files = _read.by_kind(inputs, blocks=blocks.load)["blocks"]
    rows = []
    for path, cover in files.items():
        model, order = path.parts[-3:-1]
        dense = cover.shape[0] * cover.shape[1]
        rows.append(
            {
                "model": model,
                "family": _select.family(model),
                "reorder": order,
                "tile": cover.tile.name,
                "blocks": cover.n_blocks,
                "runs": int(cover.runs.sum()),
                "density": cover.entries.sum() / dense,
                "fill": cover.entries.sum() / cover.area.sum(),
                "work": cover.area.sum() / dense,
            }
        )
    return pd.DataFrame(rows)
