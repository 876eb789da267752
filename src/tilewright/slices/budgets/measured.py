"""What heads lose by lists of a share of the keys, against dense attention, and how long lists of a share take."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright.core import timing
from tilewright.slices.attention import attend, recall
from tilewright.slices.prediction import predict


class Losses(NamedTuple):
    """float64 [heads, shares], means over a batch. error: squares of the L2 error over that of dense attention.
    recall: share of the attention that is kept."""

    error: np.ndarray
    recall: np.ndarray


def losses(
    q: Tensor, k: Tensor, v: Tensor, dense: Tensor, lse: Tensor, shares: Sequence[float], **options: Any
) -> Losses:
    """What heads lose by lists of each of `shares`; dense, lse: attention and log-sum-exps over all keys. options: of
    `predict`."""
    errors, kept = [], []
    whole = dense.double().square().sum((0, 2, 3))
    for share in shares:
        lists = predict(q, k, keep=share, budget=share, **options)
        off = (attend(q, k, v, lists).double() - dense).square().sum((0, 2, 3))
        errors.append(off / whole.clamp(min=1e-300))
        kept.append(recall(q, k, lists, lse=lse).double().mean((0, 2)))
    return Losses(*(torch.stack(each, 1).cpu().numpy() for each in (errors, kept)))


def times(q: Tensor, k: Tensor, v: Tensor, shares: Sequence[float], **options: Any) -> np.ndarray:
    """Microseconds float64 [shares] of a head's attention by lists of each share, which exist already: on a line over
    the pairs that are listed, through what was measured, that does not fall. The heads of a call share its time.
    options: of `predict`."""
    made = [predict(q, k, keep=share, budget=share, **options) for share in shares]
    calls = [partial(attend, q, k, v, lists) for lists in made]
    for call in calls:
        call()
    timed = timing.time_together(calls, min_reps=5, max_seconds=0.5, rse_target=0.02, gpu=q.is_cuda)
    found, x = (
        np.array([each.p50_us for each in timed]) / (q.shape[0] * q.shape[1]),
        np.array([float(lists.density().mean()) for lists in made]),
    )
    if np.ptp(x) < 1e-6:
        return np.full(len(x), found.mean())
    # Never falling, however a time is off.
    slope = max(float(np.polyfit(x, found, 1)[0]), 1e-6 * float(found.max()))
    return np.maximum(found.mean() - slope * x.mean(), 0.0) + slope * x
