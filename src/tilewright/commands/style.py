"""The style of every picture, and how it is written: one colour per tile, the same bytes each time."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.attention.blocks import tiles
from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, need

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Colour = str | tuple[float, float, float] | tuple[float, float, float, float]
# Of an allowed pair of query and key.
ENTRY = "#08306B"
# Inches that a title, a label of an axis and notes need.
NARROWEST = 5.0

# Dates and versions out of the files: equal inputs give equal bytes.
_METADATA = {".svg": {"Date": None}, ".png": {"Software": None}, ".pdf": {"CreationDate": None}}
_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "svg.hashsalt": "tilewright",
    "pdf.fonttype": 42,
    "hatch.linewidth": 0.6,
}


@contextlib.contextmanager
def context() -> Iterator[None]:
    """Draw in the house style, whatever the user's own settings are; they are back afterwards."""
    matplotlib = need("matplotlib", "pictures", "study")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def figure(width: float, height: float) -> "Figure":
    """An empty figure of `width` x `height` inches, no narrower than `NARROWEST`, whose parts are laid out without
    overlap."""
    from matplotlib.figure import Figure

    return Figure(figsize=(max(width, NARROWEST), height), layout="constrained")


def check_suffix(path: str | Path) -> None:
    """Raise `ArtifactError` unless `path` ends in a format that can be written."""
    if Path(path).suffix not in _METADATA:
        known = ", ".join(_METADATA)
        raise ArtifactError(f"{path}: expected a name ending in {known}, found {Path(path).suffix!r}")


def settle(drawn: "Figure") -> None:
    """Lay the parts of a figure out, once for all formats that it is saved in."""
    drawn.draw_without_rendering()
    drawn.set_layout_engine("none")


def save(drawn: "Figure", path: str | Path) -> None:
    """Write a figure atomically, without dates or versions in it."""
    suffix = Path(path).suffix
    with artifacts.atomic(path) as temporary:
        drawn.savefig(temporary, format=suffix[1:], metadata=_METADATA[suffix])


def tile_colour(name: str) -> Colour:
    """Colour of a tile: gathered slices are orange to brown, tiles of contiguous keys purple; more rows are darker."""
    import matplotlib

    tile = tiles.parse(name)
    shades = matplotlib.colormaps["YlOrBr" if tile.gathered else "Purples"]
    return shades(max(0.2, 0.35 + 0.18 * (math.log2(tile.rows) - 4)))


def tint(colour: Colour, strength: float = 0.4) -> Colour:
    """`colour` mixed with white."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return red, green, blue


def head(drawn: "Figure", title: str, handles: Iterable[Any] = (), columns: int | None = None) -> None:
    """Put a title and below it a legend on top of a figure, outside its panels, in one line or in `columns`, or in as
    many as the figure is wide enough for."""
    handles = list(handles)
    for most in range(max(1, columns or len(handles)), 0, -1):
        legend = drawn.legend(handles=handles, loc="outside upper center", ncols=most, title=title, columnspacing=1.6)
        legend.get_title().set(fontsize=11.5, fontweight="bold")
        if most == 1 or legend.get_window_extent().width <= drawn.bbox.width:
            break
        legend.remove()
