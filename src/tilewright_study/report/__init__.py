"""The study as one HTML file without network or server (stage T6): claims, figures, tiles to explore, tables."""

from pathlib import Path

from tilewright_study import experiments
from tilewright_study.tables import _select

# What the page is made of besides Python.
ASSETS = tuple(Path(__file__).parent / name for name in ("page.html", "style.css", "page.js", "explorer.js"))


# Recorded runs whose results stand beside those of the run: of the machine of the default study, and of a GPU.
RECORDED = {"expected/cpu-2-cores": "Recorded run on 2 CPU cores", "expected/h200": "Recorded run on an H200"}


def recorded(config):
    """Files by which claims are judged on recorded rows; without those that the study shows itself."""
    root = Path(__file__).parents[3]
    rows = [f"{run}/{name}.csv" for run in RECORDED if run != config.recorded for name in experiments.NAMES]
    return [_select.CLAIMS, *_select.PAPERS, *(path for path in rows if (root / path).is_file())]


def explored(config):
    """Files that the tile explorer draws: graphs, blocks, profiles and schedules of the workloads whose patterns the
    figures show, under every order and every tile set that is benched.

    None of a study whose times were recorded elsewhere: its schedules are not here.
    """
    models = [] if config.recorded else _select.drawn(config, config.figures.pattern_workloads)
    tiles = dict.fromkeys(tile for name, _ in config.attention.runs for tile in config.tile_sets[name])
    return [
        *(f"results/graphs/{m}/{r}.npz" for m in models for r in config.orders),
        *_select.blocks(config, models, tiles),
        *(f"results/profiling/{m}/{r}/{tile}.json" for m in models for r in config.orders for tile in tiles),
        *(
            f"{_select.SCHEDULES}{m}/{r}/{t}.{s}.json"
            for m in models
            for r in config.orders
            for t, s in config.attention.runs
        ),
    ]
