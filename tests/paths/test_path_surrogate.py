"""What a Gaussian process predicts of paths: its gradient, what it knows that a form does not, and its stated error."""

import csv
from pathlib import Path as File

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from tilewright.core.errors import ConfigError
from tilewright.networks import segformer
from tilewright.networks.path import Path, parse
from tilewright_study.planning import accuracy, block_sets, surrogate

BASE = Path(("11", "111", "11"), levels="123")
BLOCKS = 7
RECORDED = File(__file__).parents[2] / "expected/h200/paths.csv"


def rows_of(case):
    """The recorded rows of a case."""
    with open(RECORDED, newline="") as stream:
        return [row for row in csv.DictReader(stream) if row["case"] == case]


def by_counts(path):
    """A stage without blocks loses half, and all stages together what they lose is more than a sum."""
    left = [stage.count("1") / len(stage) for stage in path.blocks]
    return 0.8 * float(np.prod([0.5 + share - share**2 / 2 for share in left])) + 0.02 * int(path.blocks[1][0])


def known_of(truth, bases=(BASE,), count=60):
    return {
        base: {path: truth(path) for path in (base, *block_sets.singles(base), *block_sets.drawn(base, count, at))}
        for at, base in enumerate(bases)
    }


def errors_of(model, truth, known, base=BASE):
    return [abs(model.predict(path) - truth(path)) for path in block_sets.every(base) if path not in known[base]]


def drawn_paths(rng, count):
    """Paths of two bases, drawn by `rng`."""
    apart = np.array([[0.0, 0.4], [0.4, 0.0]])
    skips = rng.integers(0, 2, (count, BLOCKS)).astype(float)
    return surrogate._Paths.of(BASE, rng.integers(0, 2, count), skips, apart)


def drawn_weights(rng):
    return rng.normal(-1, 0.5, 2 * BLOCKS + 3 + len(surrogate.BEGIN_REST))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_the_gradient_is_that_of_the_likelihood(seed):
    rng = np.random.default_rng(seed)
    given = drawn_paths(rng, 20), rng.random(20), rng.uniform(0.05, 0.25, 20)
    weights = drawn_weights(rng)
    _, gradient = surrogate._unlikely(weights, *given)
    numeric = optimize.approx_fprime(weights, lambda at: surrogate._unlikely(at, *given)[0], 1e-6)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-4 * abs(gradient).max())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_losses_are_covariances_times_what_is_solved(seed):
    rng = np.random.default_rng(seed)
    ones, others, weights, solved = drawn_paths(rng, 9), drawn_paths(rng, 20), drawn_weights(rng), rng.normal(size=20)
    whole, shared, near = surrogate._covariance(weights, ones, others)
    np.testing.assert_allclose(surrogate._lost(weights, ones, others, solved), whole @ solved, rtol=1e-9, atol=1e-9)
    assert shared.any() and near.any()


def test_what_stages_lose_together_is_found_where_no_form_holds_it():
    known = known_of(by_counts)
    forms = accuracy.fits(known)
    found = surrogate.closest(forms, known)[BASE]
    assert isinstance(found, surrogate.Surrogate) and found.form == "Gaussian process"
    errors, others = (errors_of(model, by_counts, known) for model in (found, forms[BASE]))
    assert np.median(errors) < 0.3 * np.median(others)
    assert found.error < 0.5 * forms[BASE].error and found.accuracy == known[BASE][BASE]
    assert found.predict(BASE) == pytest.approx(known[BASE][BASE], abs=2e-3)


def test_a_form_that_holds_stays():
    def truth(path):
        return 0.8 - 0.03 * float(block_sets.skips(path) @ np.arange(1, BLOCKS + 1) / BLOCKS)

    known = known_of(truth, count=20)
    forms = accuracy.fits(known)
    assert surrogate.closest(forms, known)[BASE] is forms[BASE]


def test_accuracies_of_many_paths_are_those_of_each():
    known = known_of(by_counts)
    for model in (surrogate.fits(known)[BASE], accuracy.fits(known)[BASE]):
        several = list(block_sets.every(BASE))
        together = model.accuracies(np.array([block_sets.skips(path) for path in several]))
        np.testing.assert_allclose(together, [model.predict(path) for path in several], rtol=0, atol=1e-12)


@pytest.mark.parametrize("fits", [accuracy.fits, surrogate.fits], ids=["form", "process"])
def test_what_is_held_out_says_nothing_of_itself(fits):
    """Of several bases at once: a path whose accuracy is changed is predicted as before."""
    other = msgspec.structs.replace(BASE, scale=0.75)
    known = known_of(by_counts, (BASE, other))
    found = fits(known)
    for base, model in found.items():
        assert set(model.held) == set(known[base]) - {base}
        assert np.median([abs(model.held[path] - known[base][path]) for path in model.held]) == model.error
    path = list(known[BASE])[-1]
    changed = known | {BASE: known[BASE] | {path: known[BASE][path] - 0.1}}
    again = fits(changed)[BASE]
    assert abs(again.predict(path) - found[BASE].predict(path)) > 1e-3
    if again.form == found[BASE].form:
        assert again.held[path] == pytest.approx(found[BASE].held[path], abs=1e-9)


@pytest.mark.parametrize("like", [True, False])
def test_bases_learn_of_each_other_what_is_alike(like):
    """A base of which 13 paths are measured, beside one of which 67 are, whose blocks lose as much or other things."""
    other = msgspec.structs.replace(BASE, scale=0.75)

    def truth(path):
        turned = like or path.scale == 1.0
        return by_counts(path if turned else msgspec.structs.replace(path, blocks=tuple(s[::-1] for s in path.blocks)))

    few, many = known_of(truth, (BASE,), 6), known_of(truth, (other,))
    alone, beside = surrogate.fits(few)[BASE], surrogate.fits(few | many)[BASE]
    errors = [np.median(errors_of(model, truth, few)) for model in (alone, beside)]
    assert errors[1] < 0.5 * errors[0] or not like
    assert errors[1] < 1.2 * errors[0]


def test_bases_of_other_blocks_are_processes_of_their_own():
    fewer = msgspec.structs.replace(BASE, levels="12")
    found = surrogate.fits(known_of(by_counts, (BASE, fewer)))
    assert list(found) == [BASE, fewer] and found[fewer].accuracies(np.zeros((1, 5))).shape == (1,)
    assert found[BASE].predict(block_sets.singles(BASE)[0]) == surrogate.fits(known_of(by_counts))[BASE].predict(
        block_sets.singles(BASE)[0]
    )


@pytest.mark.parametrize("seed", [0, 2])
def test_the_stated_error_is_of_paths_that_were_not_known(seed):
    """Where each set of blocks has something of its own, which nothing else tells."""
    rng = np.random.default_rng(seed)
    own = {path: rng.choice([-0.1, 0.1]) for path in block_sets.every(BASE)}

    def truth(path):
        return min(0.95, max(0.05, by_counts(path) + own[path]))

    known = known_of(truth)
    found = surrogate.fits(known)[BASE]
    assert found.error > 0.8 * np.median(errors_of(found, truth, known))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 30))
def test_whatever_was_measured_predictions_are_accuracies(seed, count):
    rng = np.random.default_rng(seed)
    measured = [BASE, *block_sets.singles(BASE), *block_sets.drawn(BASE, 30, seed)][: count + 1]
    drawn = rng.choice([0.0, 1.0, 0.5, rng.random()], len(measured))
    found = surrogate.fits({BASE: dict(zip(measured, drawn.tolist(), strict=True))}, seed=seed)[BASE]
    predicted = found.accuracies(np.array([block_sets.skips(path) for path in block_sets.every(BASE)]))
    assert ((predicted >= 0) & (predicted <= 1)).all()


def test_too_few_paths_to_fit_to():
    known = {BASE: dict.fromkeys([BASE, *block_sets.singles(BASE)[:3]], 0.5)}
    with pytest.raises(ConfigError, match="expected at least 4 measured paths to fit to, found 3"):
        surrogate.fits(known)


def test_recorded_paths_that_nothing_was_fitted_to_are_predicted():
    """All sets of blocks of a trained network at full size, as one H200 measured them."""
    options = segformer.Options(variant="b0", image_size=512)
    rows = [r for r in rows_of("segformer-b0-512.sampled") if "scale=1 " in r["base"] and r["fit"]]
    fitted = [r for r in rows if r["part"] in ("base", "single", "drawn", "seen")]
    base = Path.full(options)
    known = {base: {parse(r["path"], options): float(r["fit"]) for r in fitted}}
    found = surrogate.closest(accuracy.fits(known), known)[base]
    every = [r for r in rows if r["part"] == "every"]
    errors = [abs(found.predict(parse(r["path"], options)) - float(r["fit"])) for r in every]
    assert len(errors) == 147 and np.median(errors) < 0.005 and found.error < 0.005
