"""The simulated cluster: every job of the full-scale study has a time."""

import re

import pytest

from helpers.checkout import ROOT
from helpers.files import loaded

simulate = loaded(ROOT / "benchmarks/simulate_cluster.py")
# What no experiment of the full-scale study asks for: weights, pictures, and what is compiled or built apart.
ELSEWHERE = r"compile_.*|video_.*|path_pictures|classifier"


@pytest.mark.parametrize("path", sorted((ROOT / "rules").glob("t[0-9]_*.smk")), ids=lambda path: path.stem)
def test_every_rule_has_a_time(path):
    rules = re.findall(r"^rule (\w+):", path.read_text(), re.MULTILINE)
    assert rules
    for rule in rules:
        if not re.fullmatch(ELSEWHERE, rule):
            assert simulate.seconds(rule, {}, 60) > 0
