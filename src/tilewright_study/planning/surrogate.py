"""What paths are predicted to see by a Gaussian process over their skips, counts of skips, and bases.

A path loses so much on the scale of log-odds. Losses of two paths covary by the blocks that both skip, and by how alike
the paths are: in which blocks they differ, and by how many skips in each stage. The quadratic form of `accuracy` is a
program that solvers take; it does not hold that the last blocks of a stage lose far more than pairs say, nor that a
stage loses more where another has lost blocks. This one does, but no solver takes it: `search` begins where programs
end. Logarithms of its weights are fitted by the likelihood of what was measured and a prior (Rasmussen and Williams,
Gaussian Processes for Machine Learning, 2006, chapters 2 and 5).
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy import linalg, optimize
from threadpoolctl import threadpool_limits

from tilewright.networks.path import Path
from tilewright_study.planning import accuracy, block_sets
from tilewright_study.planning.accuracy import Losses

# ASSUME: the logarithm that weights of blocks and stages scatter around, and half of their inverse variance.
USUAL, FIRMNESS = -1.0, 0.2
# Where fits begin: with variances of blocks, the variance of what is alike, reaches over bases, and noises.
BEGIN, BEGIN_REST = -2.0, (-1.0, 1.0, 1.0, -9.0, -6.0)
# Within these logarithms weights are looked for, and those of noise.
BOUNDS, NOISE_BOUNDS = (-9.0, 5.0), (-16.0, -2.0)
# Steps of a fit, and the most paths, drawn at random, that weights are fitted to: all are predicted from.
STEPS, MOST = 40, 512
# Channels of the published decoder that set bases as far apart as a size of 1 and one of 0.
CHANNELS = 1024
# Added to variances, in squares of log-odds, so that matrices are definite in spite of rounding: some 0.02 points.
JITTER = 1e-6


@dataclass(frozen=True)
class Surrogate:
    """Predictions of a base. accuracy: its own. error, held: as `Losses` has them, but that weights are fitted anew
    without each fold."""

    base: Path
    accuracy: float
    error: float
    held: Mapping[Path, float] = field(repr=False)
    _place: int
    _known: "_Paths" = field(repr=False)
    _weights: np.ndarray = field(repr=False)
    _solved: np.ndarray = field(repr=False)

    form = "Gaussian process"

    def accuracies(self, skips: npt.ArrayLike) -> np.ndarray:
        """float64 [paths]: predicted accuracies of skips, bool [paths, blocks]."""
        skips = np.asarray(skips, dtype=np.float64)
        asked = _Paths.of(self.base, np.full(len(skips), self._place), skips, self._known.apart)
        losses = _lost(self._weights, asked, self._known, self._solved)
        return accuracy.from_scale(accuracy.on_scale(self.accuracy, "logit") - losses, "logit")

    def predict(self, path: Path) -> float:
        """Predicted accuracy of a path of the base."""
        return float(self.accuracies(block_sets.skips(path)[None])[0])


def closest(
    forms: Mapping[Path, Losses], known: Mapping[Path, Mapping[Path, float]], *, seed: int = 0
) -> dict[Path, Losses | Surrogate]:
    """For each base of `known`, as `fits` takes it, its form or its `Surrogate`, whichever errs less where paths are
    held out: a process takes more paths than a form."""
    others = fits(known, seed=seed)
    both: dict[Path, tuple[Losses | Surrogate, ...]] = {base: (forms[base], others[base]) for base in known}
    return {base: min(models, key=lambda model: model.error) for base, models in both.items()}


def fits(known: Mapping[Path, Mapping[Path, float]], *, seed: int = 0) -> dict[Path, Surrogate]:
    """A `Surrogate` of each base from the accuracies of paths, ``{base: {path: accuracy}}``, the base's own among them.

    Those of bases with the same blocks are one process. Raises `ConfigError` for fewer than `accuracy.FEWEST` paths of
    a base.
    """
    found = {each.base: each for bases in accuracy.alike(known) for each in _fitted(bases, known, seed)}
    return {base: found[base] for base in known}


def _fitted(bases, known, seed):
    """The `Surrogate` of each of `bases`, which have the same blocks."""
    knobs = np.array([_knobs(base) for base in bases])
    place = np.repeat(np.arange(len(bases)), [len(known[base]) for base in bases])
    skips = np.array([block_sets.skips(path) for base in bases for path in known[base]], dtype=np.float64)
    paths = _Paths.of(bases[0], place, skips, abs(knobs[:, None] - knobs).sum(-1))
    seen = np.array([seen for base in bases for seen in known[base].values()], dtype=np.float64)
    own = accuracy.on_scale(np.array([known[base][base] for base in bases]), "logit")[place]
    losses, slopes = own - accuracy.on_scale(seen, "logit"), accuracy.slope(seen, "logit")
    folds = accuracy.folds_of(skips, seed)

    def without(fold):
        """Weights and what `_solve` gives for paths that are not in a fold, and what those of the fold then lose."""
        kept, out = folds != fold, folds == fold
        weights, solved = _solve(paths[kept], losses[kept], slopes[kept], seed)
        return weights, solved, _lost(weights, paths[out], paths[kept], solved)

    # No path is in fold -1: all are known. Folds share the cores; libraries that would, too, wait for each other.
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        (weights, solved, _), *held = pool.map(without, range(-1, folds.max() + 1))
    lost = np.empty_like(losses)
    for fold, (_, _, part) in enumerate(held):
        lost[folds == fold] = part
    predicted, skipping = accuracy.from_scale(own - lost, "logit"), skips.any(1)
    found = []
    for number, base in enumerate(bases):
        mine = (place == number) & skipping
        losses = dict(zip([path for path in known[base] if path != base], predicted[mine].tolist(), strict=True))
        error = float(np.median(abs(predicted - seen)[mine]))
        found.append(Surrogate(base, known[base][base], error, losses, number, paths, weights, solved))
    return found


def _knobs(base):
    """Where a base stands: two are as far apart as the sum of these numbers' differences."""
    channels = [1.0 if kept is None else kept / CHANNELS for kept in (base.fuse, base.width)]
    return [base.scale, *channels, *(float(str(stage + 1) in base.levels) for stage in range(len(base.blocks)))]


@dataclass(frozen=True)
class _Paths:
    """Paths of several bases. place: int [paths], of its base. skips: float64 [paths, blocks]. traits: skips, and how
    many in each stage, float64 [paths, blocks + stages]. apart: how far bases are from each other, float64 [bases,
    bases]."""

    place: np.ndarray
    skips: np.ndarray
    traits: np.ndarray
    apart: np.ndarray

    @classmethod
    def of(cls, base, place, skips, apart):
        stages = np.array([stage for stage, _ in block_sets.free(base)])
        counts = skips @ (stages[:, None] == np.unique(stages))
        return cls(place, skips, np.hstack((skips, counts)), apart)

    def __getitem__(self, chosen):
        return _Paths(self.place[chosen], self.skips[chosen], self.traits[chosen], self.apart)


def _named(weights, blocks):
    """Of logarithms: variances of blocks, what differing traits weigh, the variance of what is alike, the reach of both
    terms over bases, and noise in accuracy and in log-odds."""
    *lists, rest = np.split(np.exp(weights), [blocks, len(weights) - len(BEGIN_REST)])
    return *lists, *rest


def _covariance(weights, ones, others):
    """Covariances of losses, [ones, others], and its two terms: by shared skips, and by what is alike."""
    variances, by_trait, alike, reach, reach_alike, _, _ = _named(weights, ones.skips.shape[1])
    # There are few bases and many paths: exponentials of how far bases are apart are taken once a pair of bases.
    places = np.ix_(ones.place, others.place)
    shared = (ones.skips * variances) @ others.skips.T * np.exp(-ones.apart / reach)[places]
    near = np.exp(-_squares(ones.traits, others.traits, by_trait))
    near *= (alike * np.exp(-ones.apart / reach_alike))[places]
    return shared + near, shared, near


def _lost(weights, ones, others, solved):
    """What `ones` lose: `_covariance` times `solved`, with neither of its terms as a whole, since a search asks of many
    paths."""
    variances, by_trait, alike, reach, reach_alike, _, _ = _named(weights, ones.skips.shape[1])
    apart = ones.apart[:, others.place]
    shared = (solved * np.exp(-apart / reach)) @ others.skips * variances
    near = np.exp(-_squares(ones.traits, others.traits, by_trait))
    near = near @ (solved * alike * np.exp(-apart / reach_alike)).T
    return (ones.skips * shared[ones.place]).sum(1) + near[np.arange(len(near)), ones.place]


def _squares(ones, others, weights):
    """Weighted sums of squared differences, [ones, others]."""
    return (ones**2 @ weights)[:, None] + others**2 @ weights - 2 * (ones * weights) @ others.T


def _solve(paths, losses, slopes, seed):
    """Logarithms of weights, and what covariances with `paths` are multiplied with for predictions."""
    some = np.sort(np.random.default_rng(seed).permutation(len(losses))[:MOST])
    blocks, traits = paths.skips.shape[1], paths.traits.shape[1]
    begin = np.array([BEGIN] * blocks + [USUAL] * traits + list(BEGIN_REST))
    bounds = [BOUNDS] * (len(begin) - 2) + [NOISE_BOUNDS] * 2
    known = paths[some], losses[some], slopes[some]
    options = {"maxiter": STEPS}
    weights = optimize.minimize(_unlikely, begin, known, "L-BFGS-B", jac=True, bounds=bounds, options=options).x
    covariances = _covariance(weights, paths, paths)[0] + np.diag(_noise(weights, slopes))
    return weights, linalg.cho_solve(linalg.cho_factor(covariances, lower=True), losses)


def _noise(weights, slopes):
    in_accuracy, in_log_odds = np.exp(weights[-2:])
    return in_accuracy / slopes**2 + in_log_odds + JITTER


def _unlikely(weights, paths, losses, slopes):
    """How unlikely weights are, the negative logarithm but for a constant, and its gradient."""
    blocks, own = paths.skips.shape[1], len(weights) - len(BEGIN_REST)
    variances, by_trait, _, reach, reach_alike, in_accuracy, in_log_odds = _named(weights, blocks)
    covariances, shared, near = _covariance(weights, paths, paths)
    covariances[np.diag_indices_from(covariances)] += _noise(weights, slopes)
    lower = linalg.cholesky(covariances, lower=True)
    inverse = linalg.cho_solve((lower, True), np.eye(len(losses)))
    solved, usual = inverse @ losses, weights[:own] - USUAL
    value = losses @ solved / 2 + np.log(np.diag(lower)).sum() + FIRMNESS * usual @ usual
    # By each covariance; by a weight it is the sum of these times the covariances' own derivatives.
    slope = (inverse - np.outer(solved, solved)) / 2
    places = np.ix_(paths.place, paths.place)
    apart, falls = paths.apart[places], np.exp(-paths.apart / reach)[places]
    by_shared, by_near, noise = slope * falls, slope * near, np.diag(slope)
    differ = by_near.sum(1) @ paths.traits**2 - (paths.traits * (by_near @ paths.traits)).sum(0)
    gradient = np.concatenate((
        variances * (paths.skips * (by_shared @ paths.skips)).sum(0),
        -2 * by_trait * differ,
        [by_near.sum(), (slope * shared * apart).sum() / reach, (by_near * apart).sum() / reach_alike],
        [in_accuracy * (noise / slopes**2).sum(), in_log_odds * noise.sum()],
    ))  # fmt: skip
    gradient[:own] += 2 * FIRMNESS * usual
    return value, gradient
