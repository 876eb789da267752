"""Classes of regions: regions with equal costs are one class, so that the integer program stays small (stage T4).

Regions with the same work with every option are interchangeable. A class with a multiplicity models them exactly.
Where the program is still too large, similar classes are merged and modelled by their lower envelope, so that a bound
of the program stays a bound of the schedule.

Each region pays at least its least load, whatever option it takes. This part is summed exactly. Only the *regret* of
an option, its load beyond the least, is subject to the envelope. It is zero for a region that gets its best one.
"""

from dataclasses import dataclass

import numpy as np

from tilewright.attention.schedule.problem import Problem

# Above this many classes the linkage takes too much memory for the precision it adds: 8 bytes for each pair.
LINKAGE_LIMIT = 8192


@dataclass(frozen=True, eq=False)
class RegionClasses:
    """Classes of regions (C classes): exact, or lower envelopes over their members.

    member: int [B], class of each region. size: int [C]. load_us, regret_us, units: float [C, O], least over
        the members.
    base_us: float [C], sum over the members of their least load. needs: bool [C, K], shapes that every
        member needs.
    allowed: bool [C, O], options that some member may take. form: ``regions``, ``classes`` or ``merged``.
    """

    member: np.ndarray
    size: np.ndarray
    load_us: np.ndarray
    regret_us: np.ndarray
    units: np.ndarray
    base_us: np.ndarray
    needs: np.ndarray
    allowed: np.ndarray
    form: str


def exact(problem: Problem, aggregate: bool = True) -> RegionClasses:
    """One class for each distinct region of `problem` (``aggregate=False``: for each region)."""
    if not aggregate:
        return _envelope(problem, np.arange(problem.n_regions), "regions")
    _, member = np.unique(problem.counts, axis=0, return_inverse=True)
    member = member.reshape(-1)
    return _envelope(problem, member, "classes" if member.max() + 1 < problem.n_regions else "regions")


class Merges:
    """The tree that merges `classes` of `problem` pair by pair, smallest error first (Ward's criterion)."""

    def __init__(self, problem: Problem, classes: RegionClasses):
        from scipy.cluster.hierarchy import linkage

        self.problem, self.member = problem, classes.member
        # ASSUME: what matters of an option is whether a launch can pay for its regret: regrets near that count
        # in full, larger ones by their logarithm. The weights were chosen by the bound on irregular problems
        # of 600 and 2,048 regions.
        launch = problem.launch_us.mean() or 1.0
        most = classes.regret_us[classes.allowed].max()
        regret = np.where(classes.allowed, classes.regret_us, 2 * most) * np.sqrt(classes.size)[:, None]
        features = np.hstack([np.log1p(3 * regret / launch), 0.75 * classes.needs * problem.launch_us / launch])
        self.bucket = np.arange(len(features))
        if len(features) > LINKAGE_LIMIT:
            # ASSUME: neighbours in the order of their features are similar enough to be merged beforehand.
            rank = np.lexsort(features.T[::-1])
            self.bucket[rank] = np.arange(len(features)) * LINKAGE_LIMIT // len(features)
        _, first = np.unique(self.bucket, return_index=True)
        self.tree = linkage(features[first], "ward")

    def cut(self, n_classes: int) -> RegionClasses:
        """At most `n_classes` merged classes."""
        from scipy.cluster.hierarchy import fcluster

        _, label = np.unique(fcluster(self.tree, n_classes, "maxclust"), return_inverse=True)
        return _envelope(self.problem, label[self.bucket][self.member], "merged")


def _envelope(problem, member, form):
    order = np.argsort(member, kind="stable")
    size = np.bincount(member)
    start = np.cumsum(size) - size
    load = np.where(problem.allowed, problem.load_us, np.inf)
    base = load.min(axis=1)
    units = np.where(problem.allowed, problem.units, np.inf)

    def least(values):
        return np.minimum.reduceat(values[order], start, axis=0)

    allowed = np.logical_or.reduceat(problem.allowed[order], start, axis=0)
    # A class needs a shape only where every member that may take its option does.
    optional = (problem.counts > 0) | ~problem.allowed[:, problem.option_of]
    needs = np.logical_and.reduceat(optional[order], start, axis=0) & allowed[:, problem.option_of]
    return RegionClasses(
        member=member,
        size=size,
        load_us=least(load),
        regret_us=least(load - base[:, None]),
        units=least(units),
        base_us=np.add.reduceat(base[order], start),
        needs=needs,
        allowed=allowed,
        form=form,
    )
