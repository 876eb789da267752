"""Any pattern of the user's: a graph file, a scipy ``.npz``, a dense ``.npy`` or a tensor in a ``.pt`` file."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tilewright.core.errors import ArtifactError, PatternError
from tilewright.graph import read_mask

if TYPE_CHECKING:
    from tilewright.graph import Graph

NAMING = "file-<label> with the parameter path, e.g. file-mine"


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mask's path and what a pattern alone does not tell: the heads and head dimension it is to be run with."""

    label: str
    path: str
    heads: Annotated[int, msgspec.Meta(ge=1)] = 1
    head_dim: Annotated[int, msgspec.Meta(ge=1)] = 64


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    family, _, label = name.partition("-")
    return {"label": label} if family == "file" and label else None


def graph(params: Params) -> "Graph":
    """The pattern in the file, with the window hints of a graph file. Raises `ArtifactError` and `PatternError`."""
    pattern = read_mask(params.path)
    if pattern.row_order is not None:
        raise PatternError(f"{params.path}: expected a pattern in its natural order, found a reordered graph")
    meta = {
        "family": "file",
        "paper_family": None,
        "variant": params.label,
        "heads": params.heads,
        "head_dim": params.head_dim,
        "grid": None,
        "bias": None,
    }
    return replace(pattern, meta=meta)


def sources(params: Params) -> list[str]:
    """The mask itself."""
    return [params.path]


def size(params: Params) -> int:
    """As many as the file has bytes: what it holds is not known before it is read. Raises `ArtifactError`."""
    # ASSUME: a byte for each entry; a dense mask has more bytes, a compressed matrix of regular rows may have fewer.
    try:
        return Path(params.path).stat().st_size
    except OSError as error:
        raise ArtifactError(f"{params.path}: expected a mask, found {error.strerror}") from error
