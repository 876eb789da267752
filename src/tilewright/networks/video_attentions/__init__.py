"""How the tokens of a video attend to each other in a network, by name. The first member is the oracle.

Contract of a member module:
    ``Settings``: a frozen `msgspec.Struct` (``forbid_unknown_fields``) of what a user states.
    ``Attention(settings, video)``: attention for clips of one `Video`, made once for each grid and device, for all
        layers. ``.order``: int64 tensor [N], the order in which the tokens have to stand (``order[new] = old``), or
        None for any. ``.stateful``: whether a call depends on the step and branch, and on calls before it; compiled
        code is interrupted there. Called with q, k, v [B, H, N, D], which may be strided, and a `Call`, or None where
        it is not stateful, it returns [B, H, N, D]. Raises `tilewright.core.errors.Unavailable` where it cannot run.

A stateful one has ``check_run(**found)``, which raises `PatternError` where it cannot serve a run: see
`slices.Budgets.check`.

What is not over all pairs, or has no backward, is not for training.
"""

from typing import NamedTuple

WHAT = "attention"
NAMES = ("dense", "slices", "blocks", "window")


class Video(NamedTuple):
    """What attends: frames, rows and columns of tokens; heads, their dim, and the layers of the network."""

    grid: tuple[int, int, int]
    heads: int
    head_dim: int
    layers: int


class Call(NamedTuple):
    """Which call it is: the layer; the step of the sampler; the branch of guidance, 0 with the prompt, 1 without."""

    layer: int
    step: int = 0
    branch: int = 0
