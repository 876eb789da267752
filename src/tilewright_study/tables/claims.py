"""The results: each claim with the worst and the best that was measured, and the verdict.

A claim is judged by the rows of this run. Claims about experiments and cases that were not asked for are left out. The
worst case decides, and it is named. A claim to be faster than an alternative is *faster* where every case is faster,
*tie* where none is slower, *slower* where all are, else *mixed*. A tie is a difference within two standard errors of
the two times and of at most 5 %. *Not shown*: the rows hold no value. The paper's numbers are of an A100.
"""

import operator
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np

from tilewright.core.errors import ArtifactError
from tilewright_study import experiments
from tilewright_study.tables import _read, _select

# ``expected/claims.csv`` lists the claims, and ``expected/aims.csv``, in the same columns, what builders aim at. An id
# names a measure and, after the colon, its case. A run is judged by what is about its own rows, and by nothing else. An
# experiment has its measures in its folder: ``claims.py`` with ``MEASURES``, ``{name: (table, values, *kinds)}``.
# ``table(files)``, of rows of the experiment and of files of further `kinds`, is what ``values(table, case)`` finds the
# values of a case in.
SHOWN = {
    "kind": ("kind", ""),
    "claim": ("claim", ""),
    "expects": ("expected", ""),
    "measured": ("worst case", ",.4g"),
    "best": ("best case", ",.4g"),
    "verdict": ("verdict", ""),
    "where": ("which is the worst", ""),
    "cases": ("cases", ",.0f"),
    "missed": ("missed", ",.0f"),
    "ties": ("ties", ",.0f"),
}
# The kinds of claims: a heading, and the verdicts, of what is missed first.
KINDS = {
    "paper": ("What papers report", ("not reproduced", "reproduced")),
    "alternatives": ("Against the alternatives", ("slower", "mixed", "tie", "faster")),
    "beyond": ("Beyond the paper", ("does not hold", "holds")),
    "correctness": ("Correctness", ("failed", "passed")),
    "aim": ("Aims of the builders", ("not met", "met")),
}
UNKNOWN = "not shown"
VERDICTS = (*(verdict for _, verdicts in KINDS.values() for verdict in verdicts), UNKNOWN)
# Experiments that claims are about.
_FOLDERS = Path(experiments.__file__).parent
EXPERIMENTS = tuple(name for name in experiments.NAMES if (_FOLDERS / name / "claims.py").is_file())
_JUDGED = ["measured", "best", "verdict", "where", "cases", "missed", "ties", "device"]
_WORDS = {">=": "at least", "<=": "at most", ">": "more than", "=": ""}
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
    """``{measure: (experiment, further kinds of files, table, values)}``."""
    return {
        measure: (name, kinds, make, values)
        for name, module in zip(EXPERIMENTS, map(import_module, modules()), strict=True)
        for measure, (make, values, *kinds) in module.MEASURES.items()
    }


def experiment_of(measure):
    """The name of the experiment that a measure is of."""
    return _measures()[measure][0]


def needs(config):
    """The list of claims, the papers' values and the rows of every experiment that is asked for."""
    files = _select.logs(config, *EXPERIMENTS)
    return [_select.CLAIMS, *_select.PAPERS, *files] if files else []


def table(inputs):
    """One row per claim about the rows among `inputs`: about experiments and cases that were asked for. Such a claim is
    `UNKNOWN` where its rows hold no value.

    ``measured``: the worst case, ``best``: the best. ``cases``: how many there are; ``missed``: how many miss;
    ``ties``: how many neither hold nor miss to be as fast or faster. ``device``: where the rows were measured.

    Raises `ArtifactError` for a claim of an unknown measure, kind or relation, of zero, or about rows without the file
    of a paper that its measure reads.
    """
    import pandas as pd

    kinds = ("claims", *_read.PAPERS, *_read.ROWS)
    found = _read.sort(inputs, kinds, optional=kinds[1:])
    (frame,) = _read.frames(found["claims"], "claims")
    _check(found["claims"][0], frame)
    devices = {kind: _read.devices(_read.frames(found[kind], kind)[0]) for kind in EXPERIMENTS if found[kind]}
    results, tables, measures = {}, {}, _measures()
    for row in frame.itertuples():
        measure, _, case = row.id.partition(":")
        experiment, further, make, values = measures[measure]
        if not found[experiment]:
            continue
        if make not in tables:
            _read.sort([path for kind in further for path in found[kind]], further)
            tables[make] = make([path for kind in (experiment, *further) for path in found[kind]])
        cases = values(tables[make], case)
        if len(cases):
            results[row.Index] = {**_judged(row, cases.dropna(subset="value")), "device": devices[experiment]}
    judged = pd.DataFrame(list(results.values()), index=list(results), columns=_JUDGED)
    frame = frame.loc[judged.index].join(judged)
    numbers = frame["expected"].map("{:,.4g}".format)
    frame["expects"] = (frame["relation"].map(_WORDS) + " " + numbers + " " + frame["unit"]).str.strip()
    place = frame["kind"].map(list(KINDS).index), frame["verdict"].map(VERDICTS.index)
    order = np.lexsort([*map(list, reversed(place))])
    return frame.iloc[order][["id", *SHOWN, "unit", "device"]].reset_index(drop=True)


def found(row):
    """What was found of a claim, in a cell: the worst and the best case, and the verdict."""
    if row["verdict"] == UNKNOWN:
        return UNKNOWN
    ends = list(dict.fromkeys(digits(row[name]) for name in ("measured", "best")))
    misses = f"{row['missed']:,} of {row['cases']:,}" if 0 < row["missed"] < row["cases"] else ""
    missed = misses and f", {'slower' if row['kind'] == 'alternatives' else 'not'} in {misses}"
    return f"{row['verdict']}: {' to '.join(ends)} {row['unit']}".rstrip() + missed


def digits(value):
    """Three digits of a number, and no more than three decimals."""
    size = abs(value)
    return f"{value:,.{0 if size >= 100 or value.is_integer() else 1 if size >= 10 else 2 if size >= 0.2 else 3}f}"


def _check(path, frame):
    """Raise `ArtifactError` for a list of claims that cannot be judged."""
    _read.known(path, "relation", frame["relation"], _RELATIONS)
    _read.known(path, "kind", frame["kind"], KINDS)
    _read.known(path, "measure", frame["id"].str.partition(":")[0], _measures())
    if (frame["expected"] == 0).any():
        raise ArtifactError(f"{path}: expected values other than 0, of which no share can be missed, found one")
    than_one = (frame["relation"] == ">") & (frame["expected"] == 1)
    if wrong := [*frame.loc[(frame["kind"] == "alternatives") & ~than_one, "id"]]:
        raise ArtifactError(f"{path}: {wrong[0]}: expected > 1 of a claim against alternatives, found another")


def _judged(claim, cases):
    """What the `cases` of a claim come to; a frame of value and noise, indexed by where each was found."""
    if not len(cases):
        blank = {"measured": np.nan, "best": np.nan, "verdict": UNKNOWN, "where": ""}
        return blank | {"cases": 0, "missed": 0, "ties": 0}
    _, verdicts = KINDS[claim.kind]
    above, below = cases["value"] - claim.expected, claim.expected - cases["value"]
    margin = {">": above, ">=": above, "<=": below, "=": -above.abs()}[claim.relation] / abs(claim.expected)
    if claim.kind == "alternatives":
        found = _read.verdict(cases["value"], cases["noise"])
        held, tie, missed = (found == verdict for verdict in ("faster", "tie", "slower"))
        said = "faster" if held.all() else "tie" if not missed.any() else "slower" if missed.all() else "mixed"
    else:
        # More than something is not shown by what may be noise.
        sure = cases["value"] - cases["noise"].fillna(0) * (claim.relation == ">")
        held = sure.map(lambda value: _RELATIONS[claim.relation](value, claim.expected))
        # To be as fast is not refuted by what may be noise, nor shown by what is mostly noise.
        as_fast = claim.relation == ">=" and claim.expected == 1
        tie = ~held & (-margin <= cases["noise"].clip(upper=_read.MOST_NOISE)) & as_fast
        missed = ~held & ~tie
        said = verdicts[not missed.any()]
    worst = (margin - missed).argmin()
    return {
        "measured": _rounded(cases["value"].iloc[worst]),
        "best": _rounded(cases["value"].iloc[margin.argmax()]),
        "verdict": said,
        "where": str(cases.index[worst]),
        "cases": len(cases),
        "missed": int(missed.sum()),
        "ties": int(tie.sum()),
    }


def _rounded(value):
    """In six digits, which every platform agrees on."""
    return float(f"{value:.6g}")
