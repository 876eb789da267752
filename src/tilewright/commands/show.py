"""Print a summary of a plan or of a pattern, and draw it with --figure."""

from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.commands import _inputs

if TYPE_CHECKING:
    from tilewright.graph import Graph


def arguments(parser: ArgumentParser) -> None:
    """What is shown, and how."""
    parser.add_argument("what", help=f"a plan, or a pattern: {_inputs.PATTERN}")
    _inputs.grid_option(parser)
    parser.add_argument("--figure", type=Path, help="draw the pattern and its tiles to this .svg, .png or .pdf")
    parser.add_argument(
        "--reorder", default="ic", help="order that a pattern is drawn in, next to its own order (default: ic)"
    )
    parser.add_argument("--tile", default="64x1", help="tile that a pattern is cut into, e.g. 64x64 (default: 64x1)")


def run(what: str, grid: str | None, figure: Path | None, reorder: str, tile: str) -> None:
    """Print a summary, and draw where a figure is asked for."""
    from tilewright.commands import _drawing, style

    if figure is not None:
        style.check_suffix(figure)
    if _inputs.is_plan(what):
        from tilewright.attention import plan as api

        plan = api.load(what)
        print(plan.summary())
        panels = _drawing.of_plan(plan)
    else:
        found = _inputs.pattern(what, grid)
        print("\n".join(summary(found)))
        panels = _drawing.of_pattern(found, reorder, tile)
        print("\n".join(f"{panel.title:<38} executes {panel.work:.2%} of all pairs" for panel in panels))
    if figure is not None:
        _drawing.draw(panels, Path(what).name, figure)
        print(f"drawn      {figure}")


def summary(found: "Graph") -> list[str]:
    """Lines that say what a pattern is."""
    import numpy as np

    least, median, most = np.percentile(found.row_degree, (0, 50, 100)).astype(int)
    named = {name: found.meta.get(name) for name in ("model", "family", "heads", "head_dim")}
    return [
        f"pattern    {found.n_rows} × {found.n_cols}, {found.entries:,} pairs, density {found.density:.4f}",
        f"rows       {found.n_distinct:,} distinct; {least:,} to {most:,} keys, median {median:,}",
        *(
            [f"of         {', '.join(f'{n} {v}' for n, v in named.items() if v is not None)}"]
            if any(named.values())
            else []
        ),
    ]
