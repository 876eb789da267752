"""What a path of a base is predicted to lose in mean IoU, from single skips and pairs: a quadratic form of its skips.

``loss = sum a_i d_i + sum b_ij d_i d_j`` with d the skips, on a scale where losses add up: the mean IoU itself, its
logarithm, or its log-odds, where many skips cannot lose more than there is. All rise with it, so that the least loss is
the best path of a base on any of them. A further skip is never predicted to gain: the form is a sum, with weights of at
least 0, of skips, of pairs that are both left out, and of pairs of which one or both are. The weights are fitted to
measured paths by least squares with a ridge, towards nothing or towards weights that serve all bases with these blocks:
what a block is worth at one size says much of what it is worth at another. Scale, which pairs have weights, what the
ridge pulls to, and how strong it is, are decided by cross-validation. An error weighs what it is in mean IoU, and the
less, the more a path loses: what is chosen from loses little, and most random sets lose much.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations, product

import numpy as np
import numpy.typing as npt
from scipy import optimize

from tilewright.core.errors import ConfigError
from tilewright.networks.path import Path
from tilewright_study.planning import block_sets

# Scales on which losses add up, the simplest first, and how close to 0 and 1 they tell accuracies apart.
LINKS = ("identity", "log", "logit")
LEAST = 1e-3
# Which pairs of blocks may have a weight of their own: none, those of one stage, neighbours of two stages besides, all.
PAIRS = ("none", "stage", "neighbours", "all")
# Strength of the ridge, in sizes of the mean square of a column, and for weights that serve several bases.
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
SHARED_RIDGE = 1e-3
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
    cross-validation. link: of `LINKS`, the scale of losses. shared: whether the ridge pulls to weights of all bases.
    held: ``{path: accuracy}`` that was predicted of each path that it is fitted to, fitted without it.
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
    shared: bool = False
    held: Mapping[Path, float] = field(default_factory=dict, repr=False)

    def loss(self, skips: npt.ArrayLike) -> np.ndarray:
        """float64 [...]: predicted losses of skips, bool [..., blocks], on the scale of `link`."""
        skips, form = np.asarray(skips, dtype=np.float64), np.diag(self.single)
        for (i, j), loss in zip(self.pairs, self.pair, strict=True):
            form[i, j] = loss
        return np.einsum("...i,...i->...", skips @ form, skips)

    @property
    def form(self) -> str:
        """What cross-validation chose, in words."""
        return ", ".join((self.chosen, self.link, *(("shared",) if self.shared else ())))

    def accuracies(self, skips: npt.ArrayLike) -> np.ndarray:
        """float64 [...]: predicted accuracies of skips, bool [..., blocks]."""
        return from_scale(on_scale(self.accuracy, self.link) - self.loss(skips), self.link)

    def predict(self, path: Path) -> float:
        """Predicted accuracy of a path of the base."""
        return float(self.accuracies(block_sets.skips(path)))


def pairs_of(base: Path, kind: str) -> tuple[tuple[int, int], ...]:
    """The pairs of a kind of `PAIRS`."""
    places = block_sets.free(base)

    def joined(i, j):
        same = places[i][0] == places[j][0]
        return {"none": False, "stage": same, "neighbours": same or j == i + 1, "all": True}[kind]

    return tuple((i, j) for i, j in combinations(range(len(places)), 2) if joined(i, j))


def fits(known: Mapping[Path, Mapping[Path, float]], *, seed: int = 0) -> dict[Path, Losses]:
    """`Losses` of bases from the accuracies of their paths, ``{base: {path: accuracy}}``, the base's own among them.

    Bases with the same blocks learn of each other. Raises `ConfigError` for fewer than `FEWEST` paths of a base.
    """
    groups = ([_Measured.of(base, known[base]) for base in bases] for bases in alike(known))
    found = {losses.base: losses for group in groups for losses in _fitted(group, seed)}
    return {base: found[base] for base in known}


def alike(known: Mapping[Path, Mapping[Path, float]]) -> list[list[Path]]:
    """Bases with the same blocks together. Raises `ConfigError` for fewer than `FEWEST` paths of a base."""
    found: dict = {}
    for base, accuracies in known.items():
        if (count := len(accuracies) - 1) < FEWEST:
            raise ConfigError(f"accuracy: expected at least {FEWEST} measured paths to fit to, found {count}")
        found.setdefault(tuple(block_sets.free(base)), []).append(base)
    return list(found.values())


def folds_of(skips: np.ndarray, seed: int) -> np.ndarray:
    """int [paths]: in which of at most `FOLDS` folds each path is, whose skips are bool [paths, blocks].

    A set of blocks is held out of all bases at once: what another base says of it is not known, either.
    """
    sets = np.unique(skips, axis=0, return_inverse=True)[1]
    return (np.random.default_rng(seed).permutation(sets.max() + 1) % min(FOLDS, sets.max() + 1))[sets]


@dataclass(frozen=True)
class _Measured:
    """Paths of a base: its own accuracy, their skips [paths, blocks], accuracies, and how much their errors weigh."""

    base: Path
    own: float
    paths: list[Path]
    skips: np.ndarray
    accuracies: np.ndarray
    near: np.ndarray

    @classmethod
    def of(cls, base, known):
        paths, own = [path for path in known if path != base], known[base]
        accuracies = np.array([known[path] for path in paths], dtype=np.float64)
        skips = np.array([block_sets.skips(path) for path in paths], dtype=np.float64)
        return cls(base, own, paths, skips, accuracies, HALVED / (HALVED + np.maximum(own - accuracies, 0)))


def _fitted(bases, seed):
    """`Losses` of each of the `_Measured`, whose bases have the same blocks."""
    folds = folds_of(np.vstack([each.skips for each in bases]), seed)
    parts = np.split(folds, np.cumsum([len(each.skips) for each in bases])[:-1])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        tried = list(pool.map(lambda form: _tried(bases, parts, *form), product(LINKS, PAIRS)))
    best = [_least(each) for each in zip(*tried, strict=True)]
    return [_losses(bases, at, *choice) for at, (_, *choice) in enumerate(best)]


def _least(choices):
    """Of choices, whose score comes first, that of the least: of two that are equally good, the earlier one."""
    best = choices[0]
    for choice in choices[1:]:
        if choice[0] < best[0] * (1 - 1e-9):
            best = choice
    return best


def _tried(bases, folds, link, kind):
    """For each base the best on a scale, with pairs of a kind: ``(score, link, kind, pulled, ridge, predicted)``.

    Solvers let other threads run.
    """
    problems = [_problem(each, kind, link) for each in bases]
    pulls = (False, True) if len(bases) > 1 else (False,)
    shared = [_shared(problems, [fold != number for fold in folds]) for number in range(FOLDS)] if pulls[-1] else []
    found = []
    for each, (columns, losses, weight), fold in zip(bases, problems, folds, strict=True):
        choices = []
        for pulled, ridge in product(pulls, RIDGES):
            held = np.empty_like(losses)
            for number in np.unique(fold):
                out, towards = fold == number, shared[number] if pulled else 0.0
                held[out] = columns[out] @ _solved(columns[~out], losses[~out], ridge, towards)
            predicted = from_scale(on_scale(each.own, link) - held / weight, link)
            score = np.mean((each.near * (predicted - each.accuracies)) ** 2)
            choices.append((score, link, kind, pulled, ridge, predicted))
        found.append(_least(choices))
    return found


def _losses(bases, at, link, kind, pulled, ridge, predicted):
    """`Losses` of the base at a place, fitted to all of its paths. predicted: of these, each held out."""
    each, pairs = bases[at], pairs_of(bases[at].base, kind)
    problems = [_problem(each, kind, link) for each in bases]
    towards = _shared(problems, [slice(None)] * len(bases)) if pulled else 0.0
    weights = _solved(problems[at][0], problems[at][1], ridge, towards)
    single, both, either = np.split(weights, np.cumsum((each.skips.shape[1], len(pairs))))
    # i or j is i + j - i j.
    np.add.at(single, np.array(pairs, dtype=int).reshape(-1, 2), either[:, None])
    pair = both - either
    # Those without a weight would be variables of the program for nothing.
    kept = pair != 0
    pairs = tuple(places for places, own in zip(pairs, kept, strict=True) if own)
    held, error = dict(zip(each.paths, predicted.tolist(), strict=True)), np.median(abs(predicted - each.accuracies))
    return Losses(each.base, each.own, single, pairs, pair[kept], kind, ridge, float(error), link, pulled, held)


def _problem(each, kind, link):
    """Columns [paths, weights] and losses [paths] of least squares, and what each path's loss was multiplied with."""
    weight = slope(each.accuracies, link) * each.near
    losses = on_scale(each.own, link) - on_scale(each.accuracies, link)
    return _columns(each.skips, pairs_of(each.base, kind)) * weight[:, None], losses * weight, weight


def _shared(problems, taken):
    """Weights that serve all bases, of the paths of each that are `taken`."""
    columns = np.vstack([columns[rows] for (columns, _, _), rows in zip(problems, taken, strict=True)])
    losses = np.concatenate([losses[rows] for (_, losses, _), rows in zip(problems, taken, strict=True)])
    return _solved(columns, losses, SHARED_RIDGE)


def on_scale(accuracy: npt.ArrayLike, link: str) -> np.ndarray:
    """Where an accuracy stands on a scale of `LINKS`."""
    if link == "identity":
        return np.asarray(accuracy)
    known = np.clip(accuracy, LEAST, 1 - LEAST)
    return np.log(known) if link == "log" else np.log(known / (1 - known))


def from_scale(value: npt.ArrayLike, link: str) -> np.ndarray:
    """The accuracy at a value on a scale: the inverse of `on_scale`."""
    value = np.asarray(value)
    if link == "identity":
        return value
    return np.exp(value) if link == "log" else 1 / (1 + np.exp(-value))


def slope(accuracy: npt.ArrayLike, link: str) -> np.ndarray:
    """What a step on a scale is in accuracy, there."""
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


def _solved(columns, losses, ridge, towards=0.0):
    """Weights of at least 0 of the ridge regression, without an intercept: no skip, no loss."""
    count = columns.shape[1]
    own = np.sqrt(ridge * np.sum(columns**2) / count) * np.eye(count)
    rows, right = np.vstack((columns, own)), np.concatenate((losses, own @ np.broadcast_to(towards, count)))
    return optimize.nnls(rows, right, maxiter=100 * count)[0]
