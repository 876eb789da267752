"""Rows of experiments as a reader has them."""

from tilewright_study import experiments
from tilewright_study.experiments.attention import run


def whole(experiment, rows):
    """`rows` of an `experiment` with all its columns, ``{column: value}`` each; what is blank is an empty text."""
    made = map(experiments.member(experiment).Row.of, rows)
    return [{name: _shown(getattr(row, name)) for name in row.columns()} for row in made]


def run_schedule(*arguments, **options):
    """`_attention.run_schedule`, its rows `whole`."""
    return whole("attention", run.run_schedule(*arguments, **options))


def run_baselines(*arguments, **options):
    """`_attention.run_baselines`, its rows `whole`."""
    return whole("attention", run.run_baselines(*arguments, **options))


def _shown(value):
    return "" if value is None else value
