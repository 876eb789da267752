"""What a run of one layer says that it proves."""

import pytest

from helpers import synthetic
from tilewright.core.errors import ArtifactError
from tilewright_study.stages import proof

MODEL = "vil-tiny-224-s1"
CHECKED = {"relative_error": 1e-6, "tolerance": 1e-5}


def written(path, *rows):
    synthetic.write_csv(path, synthetic.BENCH, rows)
    return [path]


def plan(us, **changes):
    stated = {"ordered": "True", "reorder": "window", "tiles": "mixed", "solver": "highs", **CHECKED}
    return synthetic.row(MODEL, "tilewright", us, **stated | changes)


def test_a_run_says_what_was_checked_and_what_was_fastest(tmp_path, capsys):
    rows = [synthetic.row(MODEL, "sdpa_dense", 3000, **CHECKED), plan(2000), plan(2500, solver="greedy")]
    rows += [plan(1000, ordered="False", relative_error=2e-6), synthetic.row(MODEL, "flex", None)]
    proof.run(written(tmp_path / "a.csv", *rows), "speedup.svg")
    pattern, checked, error, ours, other, figure = capsys.readouterr().out.splitlines()
    assert pattern.startswith(f"{MODEL}: 225 tokens, 12% of their pairs, on ")
    assert checked == "4 timed results agree with dense attention in float64."
    assert error == "The largest error is 20% of the tolerance."
    # A call that permutes tokens is no plan in its order.
    assert ours == "The fastest plan takes 2.00 ms: order window, tiles mixed, solver highs."
    assert other == "The fastest other attention takes 3.00 ms: sdpa_dense." and figure == "The figure is speedup.svg"


def test_a_wrong_result_proves_nothing(tmp_path):
    wrong = plan(None, status="failed", reason="it is off")
    with pytest.raises(ArtifactError, match="expected correct results of tilewright, found: it is off"):
        proof.run(written(tmp_path / "a.csv", plan(2000), wrong), "x.svg")
    with pytest.raises(ArtifactError, match="expected rows with times, found none"):
        proof.run(written(tmp_path / "b.csv", synthetic.row(MODEL, "flex", None)), "x.svg")
