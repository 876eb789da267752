"""What a path of a base is predicted to lose in mean IoU, from single skips and pairs: a quadratic form of its skips.

``loss = sum a_i d_i + sum b_ij d_i d_j`` with d the skips, on a scale where losses add up: the mean IoU itself, its
logarithm, or its log-odds, where many skips cannot lose more than there is. All rise with it, so that the least loss is
the best path of a base on any of them. A further skip is never predicted to gain: the form is a sum, with weights of at
least 0, of skips, of pairs that are both left out, and of pairs of which one or both are. The weights are fitted to
measured paths by least squares with a ridge; scale, which pairs have weights, and how strong the ridge is, are decided
by cross-validation. An error weighs what it is in mean IoU, and the less, the more a path loses: what is chosen from
loses little, and most random sets lose much.
"""

from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from scipy import optimize

from tilewright.core.errors import ConfigError
from tilewright.paths import Path, space

# Scales on which losses add up, the simplest first, and how close to 0 and 1 they tell accuracies apart.
LINKS = ("identity", "log", "logit")
LEAST = 1e-3
# Which pairs of blocks may have a weight of their own: none, those of one stage, neighbours of two stages besides, all.
PAIRS = ("none", "stage", "neighbours", "all")
# Strength of the ridge, in sizes of the mean square of a column.
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
FOLDS = 8
# Loss in mean IoU at which an error weighs half.
HALVED = 0.05
# Fewest paths to fit to.
FEWEST = 4


@dataclass(frozen=True)
class Losses:
    """The quadratic form of a base.

    base: the path. accuracy: its own. single: float64 [blocks]. pairs: ``(i, j)`` with i < j. pair: float64 [pairs].
    chosen: of `PAIRS`. ridge: of `RIDGES`. error: median absolute error of held-out paths' accuracies, in
    cross-validation. link: of `LINKS`, the scale of losses.
    """

    base: Path
    accuracy: float
    single: np.ndarray
    pairs: tuple[tuple[int, int], ...]
    pair: np.ndarray
    chosen: str
    ridge: float
    error: float
    link: str = "identity"

    def loss(self, skips) -> np.ndarray:
        """float64 [...]: predicted losses of skips, bool [..., blocks], on the scale of `link`."""
        skips = np.asarray(skips, dtype=np.float64)
        found = skips @ self.single
        if self.pairs:
            first, second = np.array(self.pairs).T
            found = found + (skips[..., first] * skips[..., second]) @ self.pair
        return found

    def predict(self, path: Path) -> float:
        """Predicted accuracy of a path of the base."""
        return float(_accuracy(_on_scale(self.accuracy, self.link) - self.loss(space.skips(path)), self.link))


def pairs_of(base: Path, kind: str) -> tuple[tuple[int, int], ...]:
    """The pairs of a kind of `PAIRS`."""
    places = space.free(base)

    def joined(i, j):
        same = places[i][0] == places[j][0]
        return {"none": False, "stage": same, "neighbours": same or j == i + 1, "all": True}[kind]

    return tuple((i, j) for i, j in combinations(range(len(places)), 2) if joined(i, j))


def fit(base: Path, accuracy: float, measured: list[Path], accuracies, *, seed: int = 0) -> Losses:
    """`Losses` of a base whose own `accuracy` is known, from the accuracies of `measured` paths of it.

    Raises `ConfigError` for fewer than `FEWEST` paths.
    """
    if len(measured) < FEWEST:
        raise ConfigError(f"accuracy: expected at least {FEWEST} measured paths to fit to, found {len(measured)}")
    skips = np.array([space.skips(path) for path in measured], dtype=np.float64)
    measured_at = np.asarray(accuracies, dtype=np.float64)
    folds = np.random.default_rng(seed).permutation(len(skips)) % min(FOLDS, len(skips))
    near = HALVED / (HALVED + np.maximum(accuracy - measured_at, 0))
    best = None
    for link, kind in product(LINKS, PAIRS):
        pairs = pairs_of(base, kind)
        weight = _slope(measured_at, link) * near
        own = _on_scale(accuracy, link)
        columns, losses = _columns(skips, pairs) * weight[:, None], (own - _on_scale(measured_at, link)) * weight
        for ridge in RIDGES:
            held = np.empty_like(losses)
            for fold in np.unique(folds):
                out = folds == fold
                held[out] = columns[out] @ _solved(columns[~out], losses[~out], ridge)
            errors = abs(_accuracy(own - held / weight, link) - measured_at)
            score = np.mean((near * errors) ** 2)
            # Of two that are equally good, the simpler one, which comes first.
            if best is None or score < best[0] * (1 - 1e-9):
                best = score, link, kind, ridge, pairs, columns, losses, float(np.median(errors))
    _, link, kind, ridge, pairs, columns, losses, error = best
    single, both, either = np.split(_solved(columns, losses, ridge), np.cumsum((skips.shape[1], len(pairs))))
    # i or j is i + j - i j.
    np.add.at(single, np.array(pairs, dtype=int).reshape(-1, 2), either[:, None])
    pair = both - either
    # Those without a weight would be variables of the program for nothing.
    kept = pair != 0
    pairs = tuple(places for places, own in zip(pairs, kept, strict=True) if own)
    return Losses(base, accuracy, single, pairs, pair[kept], kind, ridge, error, link)


def _on_scale(accuracy, link):
    if link == "identity":
        return accuracy
    known = np.clip(accuracy, LEAST, 1 - LEAST)
    return np.log(known) if link == "log" else np.log(known / (1 - known))


def _accuracy(value, link):
    """The accuracy at a value on the scale: the inverse of `_on_scale`."""
    if link == "identity":
        return value
    return np.exp(value) if link == "log" else 1 / (1 + np.exp(-value))


def _slope(accuracy, link):
    """What a step on the scale is in accuracy, there."""
    if link == "identity":
        return np.ones_like(accuracy)
    known = np.clip(accuracy, LEAST, 1 - LEAST)
    return known if link == "log" else known * (1 - known)


def _columns(skips, pairs):
    """Skips, pairs of which both are skipped, and pairs of which one or both are."""
    if not pairs:
        return skips
    first, second = (skips[:, places] for places in np.array(pairs).T)
    return np.hstack((skips, first * second, np.maximum(first, second)))


def _solved(columns, losses, ridge):
    """Weights of at least 0 of the ridge regression, without an intercept: no skip, no loss."""
    count = columns.shape[1]
    own = np.sqrt(ridge * np.mean(columns**2) * len(columns)) * np.eye(count)
    rows, right = np.vstack((columns, own)), np.concatenate((losses, np.zeros(count)))
    return optimize.nnls(rows, right, maxiter=100 * count)[0]
