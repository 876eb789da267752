"""Schedules and baselines, checked against the oracle and then timed (stage T5)."""

from tilewright.study.bench.rows import COLUMNS, Effort, run_baselines, run_schedule

__all__ = ["COLUMNS", "Effort", "run_baselines", "run_schedule"]
