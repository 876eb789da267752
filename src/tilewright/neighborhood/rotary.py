"""Queries and keys of a video made ready for attention in one pass: norm of each head, scale, and rotation.

``torch.ops.tilewright.neighborhood_rotary`` is the operator, for GPUs alone: it records no gradient.
"""

from collections.abc import Sequence

from torch import Tensor, library

from tilewright.core import operators as _first  # noqa: F401  defines the library that a fragment is added to
from tilewright.core import transforms
from tilewright.core.errors import PatternError

_LIBRARY = library.Library("tilewright", "FRAGMENT")


def rotary(
    q: Tensor,
    k: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    *,
    eps: Sequence[float],
    scale: float,
    split: Sequence[int],
    base: float,
) -> tuple[Tensor, Tensor]:
    """q and k [B, T, H, W, heads, d], each head over its root mean square and times its gain [d]; q times `scale`;
    then pairs of channels turned by position. All in float32, rounded once.

    eps: what the norms of q and k add to the mean square. split: channels that turn by frame, row and column, even
    numbers that add up to d. Channels 2 i and 2 i + 1 of n turn by the position times ``base ** (-2 i / n)``. Raises
    `PatternError`.
    """
    shape = tuple(q.shape)
    if q.ndim != 6 or tuple(k.shape) != shape:
        raise PatternError(f"q and k: expected [B, T, H, W, heads, d] both, found {list(shape)} and {list(k.shape)}")
    if len(split) != 3 or sum(split) != shape[5] or any(n % 2 or n < 0 for n in split):
        raise PatternError(f"split: expected three even numbers that add up to {shape[5]}, found {list(split)}")
    found = [tuple(x.shape) for x in (q_gain, k_gain)]
    if found != [shape[5:]] * 2:
        raise PatternError(f"gains: expected {shape[5]} channels, found {' and '.join(map(str, found))}")
    return transforms.call("neighborhood_rotary", q, k, q_gain, k_gain, [*eps], scale, [*split], base)


def _launched(q, k, q_gain, k_gain, eps, scale, split, base):
    from tilewright.neighborhood.cuda import rotary_kernel

    return rotary_kernel.rotary(q, k, q_gain, k_gain, eps, scale, split, base)


def _fake(q, k, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape)


transforms.define(
    _LIBRARY,
    "neighborhood_rotary(Tensor q, Tensor k, Tensor q_gain, Tensor k_gain, float[] eps, float scale, int[] split, "
    "float base) -> (Tensor, Tensor)",
    _launched,
    _fake,
)
