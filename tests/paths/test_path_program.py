"""Which blocks are skipped for a budget: the program against all sets of blocks, and the models that it is made of."""

import csv
import itertools
from dataclasses import replace
from pathlib import Path as File

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.networks import segformer
from tilewright.networks.path import Path, parse
from tilewright.paths import table
from tilewright_study import experiments
from tilewright_study.experiments import paths as of_paths
from tilewright_study.measure import rows as _rows
from tilewright_study.planning import accuracy, block_sets, latency, program
from tilewright_study.stages import plan_paths

BASE = Path(("11", "11", "1", "11"))
BLOCKS = 7
RECORDED = File(__file__).parents[2] / "expected/h200/paths.csv"


def rows_of(case):
    """The recorded rows of a case."""
    with open(RECORDED, newline="") as stream:
        return [row for row in csv.DictReader(stream) if row["case"] == case]


def losses(single, pair=(), pairs=(), base=BASE):
    return accuracy.Losses(base, 0.6, np.array(single, float), tuple(pairs), np.array(pair, float), "all", 1e-3, 0.0)


def form_of(base, accuracy_of, measured, accuracies, seed=0):
    """The form of one base."""
    known = {base: accuracy_of} | dict(zip(measured, accuracies, strict=True))
    return accuracy.fits({base: known}, seed=seed)[base]


def times(saved, base_us=1000.0):
    return latency.Latency(BASE, base_us, np.array(saved, float))


def brute(saved, form, need):
    """The least loss of all sets of blocks that save enough; None where none does."""
    every = [np.array(skips) for skips in itertools.product((False, True), repeat=len(saved))]
    return min((float(form.loss(skips)) for skips in every if saved @ skips >= need - 1e-9), default=None)


# Whole numbers, so that many sets are equally good, and losses of either sign.
@st.composite
def instances(draw):
    numbers = st.integers(-3, 9)
    pairs = draw(st.lists(st.sampled_from(list(itertools.combinations(range(BLOCKS), 2))), unique=True, max_size=9))
    form = losses([draw(numbers) / 100 for _ in range(BLOCKS)], [draw(numbers) / 100 for _ in pairs], sorted(pairs))
    return form, np.array([draw(st.integers(-2, 40)) for _ in range(BLOCKS)], float), draw(st.integers(-20, 220))


@pytest.mark.parametrize("solver", ["highs", "exhaustive"])
@settings(max_examples=60, deadline=None)
@given(instances())
def test_a_solver_finds_what_all_sets_hold(solver, instance):
    form, saved, need = instance
    found = program.propose(times(saved), form, 1000.0 - need, solver)
    expected = brute(saved, form, need)
    assert (found is None) == (expected is None)
    if found:
        skips = block_sets.skips(found.path)
        assert saved @ skips >= need - 1e-6 and float(form.loss(skips)) == pytest.approx(expected, abs=1e-7)
        assert found.us == pytest.approx(1000.0 - saved @ skips)
        assert found.accuracy == pytest.approx(0.6 - form.loss(skips))


@settings(max_examples=30, deadline=None)
@given(instances())
def test_of_sets_that_lose_as_little_the_one_of_fewest_skips_is_listed_first(instance):
    form, saved, need = instance
    found = program.propose(times(saved), form, 1000.0 - need, "exhaustive")
    every = [skips for skips in map(block_sets.skips, block_sets.every(BASE)) if saved @ skips >= need]
    if found is not None:
        least = brute(saved, form, need)
        equal = [skips for skips in every if form.loss(skips) <= least + 1e-9]
        keys = [(skips.sum(), str(block_sets.with_skips(BASE, skips))) for skips in equal]
        assert str(found.path) == min(keys)[1]


def test_gurobi_agrees():
    pytest.importorskip("gurobipy")
    rng = np.random.default_rng(0)
    pairs = accuracy.pairs_of(BASE, "all")
    form = losses(rng.normal(0.02, 0.02, BLOCKS), rng.normal(0, 0.01, len(pairs)), pairs)
    saved = rng.uniform(5, 40, BLOCKS)
    for need in (-5.0, 10.0, 60.0, 120.0):
        ours, theirs = (program.propose(times(saved), form, 1000.0 - need, name) for name in ("highs", "gurobi"))
        assert ours.path == theirs.path


def test_all_sets_of_many_blocks_are_not_listed():
    base = Path(("1" * 7,) * 3 + ("1",))
    saved = latency.Latency(base, 1000.0, np.ones(22))
    with pytest.raises(ConfigError, match="exhaustive: expected at most 20 blocks, found 22; highs takes more"):
        program.propose(saved, losses([0.01] * 22, base=base), 990.0, "exhaustive")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Recorded rows of a network of 16 blocks, and its models: ``(times, form)`` of each base."""
    rows = rows_of("segformer-b2-512.sampled-8")
    file = tmp_path_factory.mktemp("recorded") / "paths.csv"
    _rows.write(file, experiments.member("paths").Row, rows)
    times, known = plan_paths._measured(file, "trained")
    with pytest.MonkeyPatch.context() as patch:
        # To weigh all pairs takes most of the time, and predicts no better here.
        patch.setattr(accuracy, "PAIRS", accuracy.PAIRS[:-1])
        return rows, {base: (times[base], form) for base, form in accuracy.fits(known).items()}


def test_a_recorded_network_of_16_blocks_is_planned_by_its_sets_as_by_programs(recorded):
    assert len(recorded[1]) == 5
    models, budgets = [*recorded[1].values()][:2], np.linspace(150.0, 900.0, 6)
    plans = [program.plan(models, budgets, solver) for solver in ("highs", "exhaustive")]
    one, other = ({us: found and found.accuracy for us, found in plan.items()} for plan in plans)
    assert one == pytest.approx(other, abs=1e-6) and len(set(one.values())) > 4


def test_the_best_of_several_bases():
    fast = program.Proposal(block_sets.with_skips(BASE, [True] * 3 + [False] * 4), 1.0, 0.5, "highs", 0.0)
    good = program.Proposal(BASE, 2.0, 0.6, "highs", 0.0)
    more = program.Proposal(block_sets.with_skips(BASE, [True] + [False] * 6), 2.0, 0.6, "highs", 0.0)
    assert program.best([None, fast, more, good]) is good
    assert program.best([None]) is None


@pytest.mark.parametrize("solver", ["exhaustive", "highs"])
@settings(max_examples=20, deadline=None)
@given(st.tuples(instances(), instances()), st.lists(st.integers(-30, 230), min_size=1, max_size=16))
def test_budgets_together_are_planned_as_well_as_each_alone(solver, pair, needs):
    """Also where bases are equally good, and where nothing meets a budget."""
    models = []
    for scale, (form, saved, _) in zip((1.0, 0.5), pair, strict=True):
        base = msgspec.structs.replace(BASE, scale=scale)
        models.append((latency.Latency(base, 1000.0, saved), replace(form, base=base)))
    budgets = [1000.0 - need for need in needs]
    plans = program.plan(models, budgets, solver)
    assert plans.keys() == set(budgets)
    for budget in budgets:
        alone = program.best([program.propose(*model, budget, solver) for model in models])
        assert (plans[budget] is None) == (alone is None)
        if alone is not None:
            assert plans[budget].us <= budget + 1e-6
            assert plans[budget].accuracy == pytest.approx(alone.accuracy, abs=1e-7)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_losses_that_are_such_a_form_are_found(seed):
    rng = np.random.default_rng(seed)
    pairs = accuracy.pairs_of(BASE, "stage")
    # No skip gains anything: what one loses besides may not be more than what it loses by itself.
    either = rng.uniform(0, 0.01, len(pairs))
    single = rng.uniform(0.01, 0.05, BLOCKS)
    np.add.at(single, np.array(pairs), either[:, None])
    truth = losses(single, rng.uniform(0, 0.01, len(pairs)) - either, pairs)
    measured = [*block_sets.singles(BASE), *block_sets.drawn(BASE, 60, seed)]
    found = form_of(BASE, 0.6, measured, [truth.predict(path) for path in measured])
    others = [path for path in block_sets.every(BASE) if path not in measured]
    errors = [abs(found.predict(path) - truth.predict(path)) for path in others]
    assert np.median(errors) < 2e-3
    assert found.chosen != "none"
    assert found.predict(BASE) == 0.6


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 40))
def test_nothing_is_predicted_to_gain_by_a_further_skip(seed, count):
    """Whatever was measured."""
    rng = np.random.default_rng(seed)
    measured = [*block_sets.singles(BASE), *block_sets.drawn(BASE, 40, seed)][:count]
    found = form_of(BASE, 0.6, measured, rng.uniform(0, 0.9, len(measured)), seed=seed)
    for path in block_sets.every(BASE):
        skips = block_sets.skips(path)
        for at in np.flatnonzero(~skips):
            more = skips.copy()
            more[at] = True
            assert found.loss(more) >= found.loss(skips) - 1e-9


@pytest.mark.parametrize("link", ["log", "logit"])
def test_the_scale_on_which_losses_add_up_is_found(link):
    """Where each block takes a share of what is left, losses of many blocks do not add up themselves."""
    rng = np.random.default_rng(3)
    truth = replace(losses(rng.uniform(0.1, 1.2, BLOCKS)), link=link)
    measured = [*block_sets.singles(BASE), *block_sets.drawn(BASE, 40, 3)]
    accuracies = [truth.predict(path) for path in measured]
    assert 0 < min(accuracies) < 0.2
    found = form_of(BASE, 0.6, measured, accuracies)
    assert found.link == link
    errors = [abs(found.predict(path) - truth.predict(path)) for path in block_sets.every(BASE)]
    assert max(errors) < 1e-3
    assert found.predict(BASE) == pytest.approx(0.6, abs=1e-12)


@pytest.mark.parametrize("like", [True, False])
def test_bases_learn_of_each_other_what_is_alike(like):
    """A base of which 12 paths are measured, beside one of which 60 are, whose blocks lose as much or other things."""
    rng = np.random.default_rng(5)
    pairs, other = accuracy.pairs_of(BASE, "all"), msgspec.structs.replace(BASE, scale=0.5)
    weights = [(rng.uniform(0, 0.2, BLOCKS), rng.uniform(0, 0.1, len(pairs))) for _ in range(2)]
    truths = {BASE: weights[0], other: weights[0] if like else weights[1]}
    truths = {base: replace(losses(*each, pairs), base=base, link="log") for base, each in truths.items()}
    known = {BASE: block_sets.drawn(BASE, 12, 1), other: block_sets.drawn(other, 60, 2)}
    known = {base: {path: truths[base].predict(path) for path in (base, *paths)} for base, paths in known.items()}
    alone, beside = accuracy.fits({BASE: known[BASE]})[BASE], accuracy.fits(known)[BASE]
    others = [path for path in block_sets.every(BASE) if path not in known[BASE]]
    errors = [
        np.median([abs(found.predict(path) - truths[BASE].predict(path)) for path in others])
        for found in (alone, beside)
    ]
    assert not alone.shared and beside.shared == like
    assert errors[1] < 0.25 * errors[0] or not like


def test_bases_of_other_blocks_are_fitted_by_themselves():
    base, fewer = Path(("11", "11", "1", "11")), Path(("11", "11", "1", "11"), levels="123")
    known = {
        each: {path: 0.6 - 0.02 * block_sets.skips(path).sum() for path in block_sets.every(each)}
        for each in (base, fewer)
    }
    found = accuracy.fits(known)
    assert list(found) == [base, fewer] and [len(each.single) for each in found.values()] == [7, 5]
    assert not found[base].shared
    assert np.array_equal(found[base].single, accuracy.fits({base: known[base]})[base].single)


def test_an_accuracy_of_nothing_is_no_infinite_loss():
    measured = [*block_sets.singles(BASE), *block_sets.drawn(BASE, 30, 0)]
    found = form_of(BASE, 0.6, measured, [0.6 * 0.5 ** block_sets.skips(path).sum() for path in measured[:-1]] + [0.0])
    assert np.isfinite(found.single).all() and np.isfinite(found.pair).all()


def test_recorded_paths_that_nothing_was_fitted_to_are_predicted():
    """All sets of blocks of a trained network at full size, as one H200 measured them."""
    options = segformer.Options(variant="b0", image_size=512)
    rows = [r for r in rows_of("segformer-b0-512.sampled") if "scale=1 " in r["base"] and r["fit"]]
    known = {part: [r for r in rows if r["part"] == part] for part in ("base", "single", "drawn", "seen", "every")}
    full, (base,) = Path.full(options), known["base"]
    fitted = [*known["single"], *known["drawn"], *known["seen"]]
    found = form_of(full, float(base["fit"]), [parse(r["path"], options) for r in fitted],
                         [float(r["fit"]) for r in fitted])  # fmt: skip
    errors = [abs(found.predict(parse(r["path"], options)) - float(r["fit"])) for r in known["every"]]
    assert len(errors) == 147 and found.link != "identity"
    assert np.median(errors) < 0.011 and found.error < 0.011


def test_recorded_proposals_that_nothing_was_fitted_to_are_predicted(recorded):
    """What was proposed for a B2 in the last round, of what sees much: 16 blocks leave much to choose from."""
    rows, models = recorded
    held = [(plan_paths._path(r["path"]), float(r["fit"])) for r in rows if r["part"] == "proposed"]
    errors = [abs(models[block_sets.base_of(path)][1].predict(path) - seen) for path, seen in held if seen > 0.5]
    assert len(errors) == 20 and np.median(errors) < 0.0075


def test_rows_of_several_networks_are_planned_for_none():
    with pytest.raises(ArtifactError, match=r"expected paths of one case, found segformer-b0-1024\.sampled, segformer"):
        plan_paths._measured(RECORDED, "trained")
    with pytest.raises(ArtifactError, match=r"of one case, found segformer-b0-1024\.sampled, segformer-b0-512"):
        table.load(RECORDED)


def test_too_few_paths_to_fit_to():
    with pytest.raises(ConfigError, match="expected at least 4 measured paths to fit to, found 1"):
        form_of(BASE, 0.6, block_sets.singles(BASE)[:1], [0.5])


def test_times_by_leaving_out():
    measured = {BASE: 100.0} | {path: 100.0 - at for at, path in enumerate(block_sets.singles(BASE))}
    model = latency.model(BASE, measured)
    assert model.predict(block_sets.with_skips(BASE, [True] * 7)) == pytest.approx(100.0 - sum(range(7)))
    del measured[block_sets.singles(BASE)[3]]
    with pytest.raises(ConfigError, match=r"found none of 11\.10\.1\.11"):
        latency.model(BASE, measured)


def test_times_of_sets_of_blocks_say_what_these_save_together():
    """Each block alone saves 10 of 100, two of them 18, all seven 49."""
    drawn = [
        block_sets.with_skips(BASE, [at in chosen for at in range(7)]) for chosen in itertools.combinations(range(7), 2)
    ]
    whole = block_sets.with_skips(BASE, [True] * 7)
    singles = {BASE: 100.0} | dict.fromkeys(block_sets.singles(BASE), 90.0)
    assert latency.model(BASE, singles).predict(whole) == pytest.approx(30.0)
    model = latency.model(BASE, singles | dict.fromkeys(drawn, 82.0) | {whole: 51.0})
    assert model.predict(BASE) == 100.0
    assert [model.predict(path) for path in (block_sets.singles(BASE)[0], drawn[0])] == pytest.approx(
        [90.0, 82.0], rel=0.03
    )
    assert model.predict(whole) == pytest.approx(51.0, rel=0.2)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 2.0), st.integers(0, 6))
def test_no_set_of_skips_is_predicted_to_take_no_time(seed, noise, count):
    """Of a few noisy calls all blocks together may seem to save more than there is. Budgets begin above nothing."""
    rng = np.random.default_rng(seed)
    paths = [BASE, *block_sets.singles(BASE), *block_sets.drawn(BASE, count, seed)]
    measured = {
        path: (100 - 10 * block_sets.skips(path).sum()) * np.exp(noise * rng.standard_normal()) for path in paths
    }
    model = latency.model(BASE, measured)
    assert model.predict(BASE) == measured[BASE]
    least = min(us / (1 + BLOCKS - block_sets.skips(path).sum()) for path, us in measured.items())
    found = min(map(model.predict, block_sets.every(BASE)))
    assert found > 0 and found >= least - 1e-12 * measured[BASE]
    assert min(of_paths.budgets_for([(model, None)], 3)) > 0


def test_savings_that_are_bounded_fit_best():
    """Of two blocks that seem to save 80 and 60 of 100, against all pairs of savings within the bound."""
    first, second, *others = block_sets.singles(BASE)
    found = latency.model(BASE, {BASE: 100.0, first: 20.0, second: 40.0} | dict.fromkeys(others, 100.0)).saved_us
    most = 100 - 20 / BLOCKS
    assert found.sum() == pytest.approx(most) and found[2:] == pytest.approx(0)

    def error(one, other):
        return ((80 - one) / 20) ** 2 + ((60 - other) / 40) ** 2

    assert error(*found[:2]) <= min(error(one, most - one) for one in np.linspace(0, most, 999)) + 1e-6


def test_recorded_times_of_paths_that_nothing_was_fitted_to_are_predicted():
    """All sets of blocks of a network at full size, as one H200 timed them, by single and random ones."""
    options = segformer.Options(variant="b0", image_size=512)
    rows = [r for r in rows_of("segformer-b0-512.sampled") if r["rung"] == "trained" and "scale=1 " in r["base"]]
    times_us = {part: {parse(r["path"], options): float(r["p50_us"]) for r in rows if r["part"] == part}
                for part in ("base", "single", "drawn", "every")}  # fmt: skip
    full, known = Path.full(options), times_us["base"] | times_us["single"]

    def error(model):
        return np.median([abs(model.predict(path) / us - 1) for path, us in times_us["every"].items()])

    assert len(times_us["every"]) == 147
    assert error(latency.model(full, known)) > 0.04
    assert error(latency.model(full, known | times_us["drawn"])) < 0.015
