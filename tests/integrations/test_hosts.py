"""Integrations with versions of diffusers that this environment has not, each in an environment of its own."""

import os
import subprocess
import sys

import pytest

from helpers.checkout import ROOT
from helpers.environments import folder

# With what each of them took when it was new.
DIFFUSERS = {
    "0.35.2": "transformers==4.57.6",
    "0.40.0": "transformers==5.24.0",
    "0.42.1": "transformers==5.24.0",
}
# By itself this runs with one version.
LATEST = "0.42.1"
FILES = "tests/integrations/test_diffusers.py", "tests/integrations/test_neighborhood_processor.py"
# Other tests that need it.
MORE = (
    *("tests/networks/test_wan.py", "tests/commands/test_tune_slices.py", "tests/benchmarks/test_diffusers_wan.py"),
    "tests/test_pages.py::test_a_tutorial_prints_what_it_shows[docs/tutorials/video.md]",
)

OTHERS = [pytest.param(version, marks=pytest.mark.slow) for version in DIFFUSERS if version != LATEST]


@pytest.mark.parametrize("version", [*OTHERS, LATEST])
def test_diffusers(version, request):
    place = folder(f"diffusers-{version}", f"diffusers=={version}", DIFFUSERS[version])
    everything = ["-m", "", *MORE] if request.config.getoption("markexpr") == "" else []
    path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *everything, *FILES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    print(found.stdout.splitlines()[-1])
