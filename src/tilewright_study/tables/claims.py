"""The claims about the experiments of a run: what was expected, the worst that was measured, the verdict and by how
much.

The claims about the experiments of this run: first those not met, then those met, then those whose rows hold no value.
Claims about experiments that were not asked for are left out. "Measured" is the worst case, and "worst case" names it.
The margin says by how much of the expected value the claim is held (above zero) or missed. "Cases" and "not met" count
the cases and the misses. A tie misses a claim to be as fast by less than two standard errors of the two times and by no
more than 5 %; it does not count as a miss. The last rows are the paper's speed-ups (A100) as claims about this device.
"""

import operator
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np

from tilewright.core.errors import ArtifactError
from tilewright_study import experiments
from tilewright_study.tables import _read, _select

# ``expected/claims.csv`` lists all claims. An id names a measure and, after the colon, its case; the column
# ``experiments`` names the experiment whose rows the claim is about. A run is judged by the claims that are about its
# own rows, and by no others. An experiment has its measures in its folder: ``claims.py`` with ``MEASURES``, and
# ``CHECKS`` of whether what was timed is right, ``{name: (table, values, *kinds)}``. ``table(files)``, of rows of the
# experiment and of files of further `kinds`, is what ``values(table, case)`` finds the values of a case in.
SHOWN = {
    "claim": ("claim", ""),
    "relation": ("", ""),
    "expected": ("expected", ",.4g"),
    "measured": ("measured", ",.4g"),
    "unit": ("unit", ""),
    "verdict": ("verdict", ""),
    "margin": ("margin", "+.1%"),
    "where": ("worst case", ""),
    "cases": ("cases", ",.0f"),
    "not_met": ("not met", ",.0f"),
    "ties": ("ties", ",.0f"),
    "device": ("device", ""),
}
# The parts of the table in Markdown, and their order in the report. A check passed or failed: it says that what was
# timed is right, and is not counted among the claims.
VERDICTS = ("not met", "failed", "met", "not measured", "passed")
PARTS = ("verdict", VERDICTS)
# Experiments that claims are about.
_FOLDERS = Path(experiments.__file__).parent
EXPERIMENTS = tuple(name for name in experiments.NAMES if (_FOLDERS / name / "claims.py").is_file())
_CHECKED = {"met": "passed", "not met": "failed"}
_JUDGED = ["measured", "verdict", "margin", "where", "cases", "not_met", "ties", "device"]
_RELATIONS = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "=": lambda found, expected: round(found, _decimals(expected)) == expected,
}


def _decimals(value):
    """Decimals in which a value was claimed."""
    return len(f"{value:.12g}".partition(".")[2])


def modules():
    """Dotted names of the modules of the measures."""
    return [f"{experiments.__name__}.{name}.claims" for name in EXPERIMENTS]


@cache
def _measures():
    """``{measure: (kinds of files, table, values, whether it is a check)}``."""
    found = {}
    for name, module in zip(EXPERIMENTS, map(import_module, modules()), strict=True):
        for is_check, of in ((False, module.MEASURES), (True, getattr(module, "CHECKS", {}))):
            found |= {each: ((name, *kinds), make, values, is_check) for each, (make, values, *kinds) in of.items()}
    return found


def asked(config):
    """``{experiment: [paths]}``: the files of rows that `config` asks for, of the experiments that claims are about."""
    files = {name: _select.logs(config, name) for name in EXPERIMENTS}
    return {name: paths for name, paths in files.items() if paths}


def needs(config):
    """The list of claims, the paper's bars and the rows of every experiment that is asked for."""
    files = [path for paths in asked(config).values() for path in paths]
    return [_select.CLAIMS, _select.PAPER_LATENCY, *files] if files else []


def table(inputs):
    """One row per claim about the rows among `inputs`: about experiments and cases that were asked for. Such a claim is
    "not measured" where its rows hold no value. Rows of the heat map and of ``worth``, of which nothing is claimed, may
    be among them.

    ``margin``: by how much of what was expected the claim is held, above zero, or missed. ``cases``: how many there
    are; ``not_met``: how many miss; ``ties``: how many miss a claim to be as fast, but by less than two standard errors
    and no more than `read.MOST_NOISE`, which does not count. A claim to be more than something is held only by more
    than two standard errors. A check, one of ``CHECKS``, is ``passed`` or ``failed``. ``device``: where the rows were
    measured.

    Raises `ArtifactError` for a claim of an unknown measure or relation, of zero, or of other experiments than those
    that its measure reads.
    """
    import pandas as pd

    kinds = ("claims", "paper_latency", *EXPERIMENTS, "heatmap", "worth")
    found = _read.sort(inputs, kinds, optional=kinds[2:])
    (frame,) = _read.frames(found["claims"], "claims")
    _check(found["claims"][0], frame)
    devices = {kind: _read.devices(_read.frames(found[kind], kind)[0]) for kind in EXPERIMENTS if found[kind]}
    results, tables, measures = {}, {}, _measures()
    for row in frame.itertuples():
        measure, _, case = row.id.partition(":")
        kinds, make, values, is_check = measures[measure]
        if not all(found[kind] for kind in kinds):
            continue
        if make not in tables:
            tables[make] = make([path for kind in kinds for path in found[kind]])
        cases = values(tables[make], case)
        if len(cases):
            device = ", ".join(dict.fromkeys(devices[kind] for kind in kinds if kind in devices))
            verdict = _judged(row, cases.dropna(subset="value"))
            if is_check:
                verdict["verdict"] = _CHECKED.get(verdict["verdict"], verdict["verdict"])
            results[row.Index] = {**verdict, "device": device}
    judged = pd.DataFrame(list(results.values()), index=list(results), columns=_JUDGED)
    return frame.loc[judged.index].join(judged)[["id", "experiments", *SHOWN]].reset_index(drop=True)


def _check(path, frame):
    """Raise `ArtifactError` for a list of claims that cannot be judged."""
    measures = frame["id"].str.partition(":")[0]
    _read.known(path, "relation", frame["relation"], _RELATIONS)
    _read.known(path, "measure", measures, _measures())
    if (frame["expected"] == 0).any():
        raise ArtifactError(f"{path}: expected values other than 0, of which no share can be missed, found one")
    for row, measure in zip(frame.itertuples(), measures, strict=True):
        expected = [name for name in _measures()[measure][0] if name in EXPERIMENTS]
        if row.experiments.split() != expected:
            raise ArtifactError(
                f"{path}: {row.id}: expected the experiments {' '.join(expected)}, found {row.experiments or 'none'}"
            )


def _judged(claim, cases):
    """What the `cases` of a claim come to; a frame of value and noise, indexed by where each was found."""
    if not len(cases):
        blank = {"measured": np.nan, "verdict": "not measured", "margin": np.nan, "where": ""}
        return blank | {"cases": 0, "not_met": 0, "ties": 0}
    above, below = cases["value"] - claim.expected, claim.expected - cases["value"]
    margin = {">": above, ">=": above, "<=": below, "=": -above.abs()}[claim.relation] / abs(claim.expected)
    # More than something is not shown by what may be noise.
    sure = cases["value"] - cases["noise"].fillna(0) * (claim.relation == ">")
    met = sure.map(lambda value: _RELATIONS[claim.relation](value, claim.expected))
    # To be as fast is not refuted by what may be noise, nor shown by what is mostly noise.
    as_fast = claim.relation == ">=" and claim.expected == 1
    tie = ~met & (-margin <= cases["noise"].clip(upper=_read.MOST_NOISE)) & as_fast
    missed = ~met & ~tie
    worst = (margin - missed).argmin()
    return {
        "measured": _rounded(cases["value"].iloc[worst]),
        "verdict": "not met" if missed.any() else "met",
        # A value that is equal in the digits claimed misses nothing.
        "margin": 0.0 if claim.relation == "=" and met.iloc[worst] else _rounded(margin.iloc[worst]),
        "where": str(cases.index[worst]),
        "cases": len(cases),
        "not_met": int(missed.sum()),
        "ties": int(tie.sum()),
    }


def _rounded(value):
    """In six digits, which every platform agrees on."""
    return float(f"{value:.6g}")
