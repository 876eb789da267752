"""DynamicViT: tokens pruned by what the image shows (Rao et al., NeurIPS 2021, arXiv 2106.02034).

Before three of its blocks the network drops the least informative tokens: rho, rho^2, rho^3 of the patches stay, and
the class token always does. The graph is the `CASE` of training, and of whoever masks: over the original tokens the
attention that follows is ``A = 1 keep^T | I``, each query sees the kept tokens and itself. Inference drops the other
queries too, and what is left is dense (the baseline ``sdpa_compacted``). A gate, see `_gates`, decides from a real
photograph which tokens are kept. Any resolution and patch size will do; the public code is bound to 14 x 14 patches.
Tokens: the class token first, then the patches, row by row.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from tilewright.core import sides
from tilewright.core.errors import ConfigError, PatternError
from tilewright.graph import Graph
from tilewright.masks import _gates

NAMING = "dynamicvit-<variant>-<resolution>[-p<patch>][-b<1|2|3>], e.g. dynamicvit-s-224-b3"
NETWORK_NAMING = "dynamicvit-<variant>-<size>[-p<patch>], e.g. dynamicvit-s-224"

# What the graph is a case of, for whoever shows it.
CASE = "training mask"

# Width, heads and the blocks before which tokens are pruned: the published configurations.
VARIANTS = {
    "deit-256": (256, 4, (3, 6, 9)),
    "deit-s": (384, 6, (3, 6, 9)),
    "deit-b": (768, 12, (3, 6, 9)),
    "lvvit-s": (384, 6, (4, 8, 12)),
    "lvvit-m": (512, 8, (5, 10, 15)),
}
ALIASES = {"256": "deit-256", "s": "deit-s", "b": "deit-b"}

# Pruned rows are all distinct; more than this many of their entries (4 GB of int32) are refused.
MAX_ENTRIES = 1_000_000_000


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pruned part of one network, on one image.

    prune: 1, 2 or 3, how often tokens have been pruned. keep_ratio: rho. image: a name of `images.PHOTOGRAPHS` or a
    path. gate: see `_gates`. weights: an official checkpoint (``.pth`` or ``.safetensors``), needed by ``predictor``.
    """

    variant: Literal["deit-256", "deit-s", "deit-b", "lvvit-s", "lvvit-m"]
    resolution: sides.Pixels
    patch: Annotated[int, msgspec.Meta(ge=1)] = 16
    # ASSUME: a name without -b means the last pruning, which the most heavily pruned blocks share.
    prune: Annotated[int, msgspec.Meta(ge=1, le=3)] = 3
    keep_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.7
    image: str = "astronaut"
    gate: Literal["threshold-l2", "predictor"] = "threshold-l2"
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.patch > self.resolution:
            raise ConfigError(f"patch: expected at most the resolution {self.resolution}, found {self.patch}")
        if self.gate == "predictor" and self.weights is None:
            raise ConfigError("gate predictor: expected an official checkpoint as `weights`, found none")

    @property
    def side(self) -> int:
        """Patches along a side: a strided convolution drops what is left over."""
        return self.resolution // self.patch

    @property
    def kept(self) -> list[int]:
        """Patches kept after each pruning."""
        return kept(self.side, self.keep_ratio)


def kept(side: int, keep_ratio: float) -> list[int]:
    """Of side x side patches those kept after each pruning, as the public code rounds them."""
    return kept_of(side**2, keep_ratio)


def kept_of(patches: int, keep_ratio: float) -> list[int]:
    """Of so many patches those kept after each pruning."""
    return [int(patches * keep_ratio**time) for time in (1, 2, 3)]


def fields(name: str) -> dict[str, Any] | None:
    """Parameters stated by a workload name, or None."""
    variants = "|".join([*VARIANTS, *ALIASES])
    match = re.fullmatch(rf"dynamicvit-({variants})-(\d+)(?:-p(\d+))?(?:-b([123]))?", name)
    if not match:
        return None
    variant, resolution, patch, prune = match.groups()
    stated = {"variant": ALIASES.get(variant, variant), "resolution": int(resolution)}
    return stated | ({"patch": int(patch)} if patch else {}) | ({"prune": int(prune)} if prune else {})


def network_fields(name: str) -> Any:
    """Options of the network that a name states, or None."""
    match = re.fullmatch(rf"dynamicvit-({'|'.join([*VARIANTS, *ALIASES])})-([1-9]\d*)(?:-p([1-9]\d*))?", name)
    if not match:
        return None
    variant, size, patch = match.groups()
    stated = {"variant": ALIASES.get(variant, variant), "image_size": int(size)}
    return stated | ({"patch": int(patch)} if patch else {})


def keep(params: Params) -> np.ndarray:
    """Sorted token ids (int32, the class token 0 included) that are kept after ``params.prune`` prunings."""
    return np.concatenate(([0], 1 + np.sort(_gates.kept(params)))).astype(np.int32)


def _counts(params):
    """Tokens, kept tokens, and entries of the distinct rows."""
    n_tokens, n_kept = 1 + params.side**2, 1 + params.kept[params.prune - 1]
    return n_tokens, n_kept, n_kept + (n_tokens - n_kept) * (n_kept + 1)


def graph(params: Params) -> Graph:
    """The exact pattern of training: one row shared by all kept tokens, and one for each pruned token, which also sees
    itself.

    Raises `PatternError` above `MAX_ENTRIES` and what the gate raises.
    """
    width, heads, blocks = VARIANTS[params.variant]
    n_tokens, n_kept, entries = _counts(params)
    if entries > MAX_ENTRIES:
        raise PatternError(
            f"{n_tokens:,} tokens have {entries:,} entries in distinct rows; expected at most {MAX_ENTRIES:,}"
        )
    kept = keep(params)
    pruned = np.setdiff1d(np.arange(n_tokens, dtype=np.int32), kept)
    row_id = np.zeros(n_tokens, np.int32)
    row_id[pruned] = np.arange(1, len(pruned) + 1)
    indices = np.empty(entries, np.int32)
    indices[:n_kept] = kept
    own = indices[n_kept:].reshape(len(pruned), n_kept + 1)
    for row, token, place in zip(own, pruned, np.searchsorted(kept, pruned), strict=True):
        row[:place], row[place], row[place + 1 :] = kept[:place], token, kept[place:]
    # Compaction: the kept tokens come first, for queries and for keys.
    hint = (row_id > 0).astype(np.int64)
    meta = {
        "family": "dynamicvit",
        "paper_family": "DynamicViT",
        "case": CASE,
        "variant": params.variant,
        "resolution": params.resolution,
        "patch": params.patch,
        "prune": params.prune,
        "before_block": blocks[params.prune - 1],
        "heads": heads,
        "head_dim": width // heads,
        "grid": [params.side, params.side],
        "n_global": 1,
        "kept": n_kept,
        "gate": _gates.describe(params),
        "bias": None,
    }
    indptr = np.concatenate(([0, n_kept], n_kept + (n_kept + 1) * np.arange(1, len(pruned) + 1)))
    return Graph(indptr, indices, row_id, n_tokens, meta, hint, hint)


def sources(params: Params) -> list[str]:
    """The image, when it is the user's, and the checkpoint."""
    return [*_gates.own_image(params), *([params.weights] if params.weights else [])]


def entered(params: Params) -> list[str]:
    """The gate."""
    return [_gates.module(params)]


def size(params: Params) -> int:
    """Tokens and entries of the distinct rows: one of the kept tokens, and one for each pruned token."""
    n_tokens, _, entries = _counts(params)
    return n_tokens + entries
