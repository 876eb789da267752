"""Any pattern of the user's: a graph file, a scipy ``.npz`` or a dense ``.npy`` mask."""

from dataclasses import replace
from typing import Annotated

import msgspec

from tilewright.errors import PatternError
from tilewright.graph import read_mask

NAMING = "file-<label> with the parameter path, e.g. file-mine"


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mask's path and what a pattern alone does not tell: the heads and head dimension it is to be run with."""

    label: str
    path: str
    heads: Annotated[int, msgspec.Meta(ge=1)] = 1
    head_dim: Annotated[int, msgspec.Meta(ge=1)] = 64


def fields(name):
    """Parameters stated by a workload name, or None."""
    family, _, label = name.partition("-")
    return {"label": label} if family == "file" and label else None


def graph(params):
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


def sources(params):
    """The mask itself."""
    return [params.path]
