"""The look-up table: which rows are picked from, by which budget, and what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.errors import ArtifactError, BudgetError, ConfigError
from tilewright.paths import table
from tilewright.paths.table import Entry, Table


def entry(promise, choice, path="11.11", **more):
    facts = {"network": "segformer-b0-64", "checkpoint": "ab12", "rung": "trained", "batch": 1, "device": "x"}
    facts |= {"dtype": "float32", "macs": 1, "p50_us": promise * 0.9, "p99_us": promise, "promise_us": promise}
    return Entry(**(facts | {"path": path, "choice": choice} | more))


measurements = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=40)


@given(measurements)
def test_just_the_best_stay(found):
    entries = [entry(time, score / 20, path=str(at)) for at, (time, score) in enumerate(found)]
    marked = table.marked(entries, gain=0.0)
    best = {pair for pair in found if not any(t <= pair[0] and s >= pair[1] and (t, s) != pair for t, s in found)}
    assert {found[int(x.path)] for x in marked if not x.dominated} == best
    assert sum(not x.dominated for x in marked) == len(best)
    by_path = {x.path: x for x in entries}
    for x in marked:
        if x.dominated:
            over = by_path[x.dominated]
            assert over.promise_us <= x.promise_us and over.choice >= x.choice


def test_a_slower_path_sees_more_than_rounding():
    step = table.ROUNDING / 2
    scores = [0.5, 0.5 + step, 0.5 + 3 * step, 0.5 + 4 * step, 0.5 + 6 * step]
    marked = table.marked([entry(10 + at, score, path=str(at)) for at, score in enumerate(scores)])
    assert [x.dominated for x in marked] == ["", "0", "", "2", ""]
    assert [x.path for x in Table(marked).rows] == ["0", "2", "4"]


@given(measurements, st.lists(st.floats(0.5, 40), min_size=2, max_size=20))
def test_a_larger_budget_never_gets_less(found, budgets):
    look_up = Table([entry(time, score / 20, path=str(at)) for at, (time, score) in enumerate(found)])
    assert len(look_up.rows) <= table.MOST
    picked = []
    for budget in sorted(budgets):
        try:
            picked.append(look_up.select(budget))
        except BudgetError:
            assert not picked and budget < look_up.rows[0].promise_us
            continue
        assert picked[-1].promise_us <= budget
    assert [x.choice for x in picked] == sorted(x.choice for x in picked)


def test_the_ends_of_a_long_front_stay():
    look_up = Table([entry(100 + at, at / 100, path=str(at)) for at in range(60)])
    assert len(look_up.rows) == table.MOST
    assert (look_up.rows[0].path, look_up.rows[-1].path) == ("0", "59")


@pytest.mark.parametrize("budget", [0, -1, math.nan, math.inf, "900", None, True, 1j])
def test_budgets_that_are_none(budget):
    with pytest.raises(BudgetError, match="expected microseconds above 0, found"):
        Table([entry(10, 0.5)]).select(budget)


def test_a_budget_below_every_promise():
    look_up = Table([entry(10, 0.5), entry(20, 0.6, path="b")])
    with pytest.raises(BudgetError, match="at least 10 us, which the fastest path promises, found 9 us"):
        look_up.select(9)
    assert look_up.select(9, late="fastest").promise_us == 10
    with pytest.raises(ConfigError, match="late: expected one of error, fastest"):
        look_up.select(9, late="soon")


@pytest.mark.parametrize(
    "field, value", [("network", "b2"), ("checkpoint", "cd"), ("rung", "statistics"), ("batch", 2)]
)
def test_paths_of_two_kinds(field, value):
    with pytest.raises(ConfigError, match=f"expected paths of one {field}, found"):
        Table([entry(10, 0.5), entry(20, 0.6, **{field: value})])
    with pytest.raises(ConfigError, match=f"expected one of {field} {value}, found"):
        Table([entry(10, 0.5)]).check(**{field: value})


def test_promise_is_the_996th_of_1000():
    samples = np.random.default_rng(0).permutation(np.arange(1, 1001)).astype(float)
    assert table.promised(samples) == 996
    assert table.promised([5.0]) == 5.0
    # Of many, no longer than the 99th percentile asks for; of few, the slowest.
    assert [table.promised(np.arange(1, n + 1)) for n in (298, 299, 473, 10_000, 200_000)] == [
        298,
        299,
        472,
        9917,
        198_074,
    ]
    with pytest.raises(ConfigError, match="expected latencies in microseconds, found none"):
        table.promised([])


def test_promises_of_few_samples_share_their_tail():
    drawn = np.random.default_rng(0)
    samples = {"slow": drawn.permutation(np.r_[np.full(39, 10.0), 12.0]), "fast": np.full(40, 4.0)}
    found = table.promises(samples)
    # One of 80 took 1.2 times its median.
    assert found == {"slow": pytest.approx(12.0), "fast": pytest.approx(4.8)}
    # A stall of the host beside the faster path does not make it the slower one.
    samples["fast"][7] = 40.0
    found = table.promises(samples)
    assert found["fast"] < found["slow"] and found["fast"] == 40


def test_promises_of_many_samples_are_each_path_s_own():
    samples = {"slow": np.arange(1.0, 1001), "fast": np.full(1000, 2.0)}
    assert table.promises(samples) == {"slow": 996, "fast": 2}


def test_files(tmp_path):
    entries = [entry(10, 0.5, test=0.4, dominated="b", predicted_us=9.5), entry(20, None, path="1 levels=12")]
    table.write(tmp_path / "t.csv", entries)
    assert table.read(tmp_path / "t.csv") == entries
    assert table.load(tmp_path / "t.csv").rows == table.Table(entries).rows
    both = [*entries, entry(5, 0.7, rung="statistics")]
    table.write(tmp_path / "t.csv", both)
    assert table.load(tmp_path / "t.csv").rows == table.Table(entries).rows
    assert table.load(tmp_path / "t.csv", rung="statistics").rows == both[2:]


def test_files_that_are_none(tmp_path):
    with pytest.raises(ArtifactError, match="no such file; expected a path table"):
        table.read(tmp_path / "none.csv")
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ArtifactError, match="rows of kind paths, version 1, found another at line 2"):
        table.read(tmp_path / "a.csv")
    table.write(tmp_path / "t.csv", [entry(10, 0.5)])
    text = (tmp_path / "t.csv").read_text()
    (tmp_path / "t.csv").write_text(text.replace(",10,", ",ten,"))
    with pytest.raises(ArtifactError, match="line 2 is no row of a path table"):
        table.read(tmp_path / "t.csv")
    for other in ("nan", "-10", "inf"):
        (tmp_path / "t.csv").write_text(text.replace(",10,", f",{other},"))
        with pytest.raises(ArtifactError, match="line 2 is no row of a path table: expected p99_us from 0"):
            table.read(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text(text.splitlines()[0] + "\n")
    with pytest.raises(ArtifactError, match="found no measured path"):
        table.read(tmp_path / "t.csv")
