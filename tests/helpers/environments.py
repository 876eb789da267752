"""Folders with other packages, each an environment of its own beside this one: made once, or named by a variable."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from helpers.checkout import ROOT

# A folder that holds them, such as one that several checkouts share.
VARIABLE = "TILEWRIGHT_HOSTS"


def folder(name, *requirements):
    """The folder `name`, with `requirements` and what they need beside this environment. Skips where that cannot be."""
    place = Path(os.environ.get(VARIABLE) or ROOT / "build" / "hosts") / name
    if place.is_dir():
        return place
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip(f"{name}: uv is not installed beside {sys.executable}")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        # What is here already is not installed again; what setuptools holds for itself is not here.
        here = Path(scratch) / "here.txt"
        places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        here.write_text("".join(f"{each.name}; python_version < '3'\n" for each in distributions(path=places)))
        made = Path(scratch) / name
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", made, "--overrides", here]
        try:
            found = subprocess.run([*command, *requirements], capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{name} cannot be installed in 300 s")
        if found.returncode:
            pytest.skip(f"{name} cannot be installed: {(found.stderr.strip().splitlines() or ['no reason'])[-1]}")
        if not place.exists():
            shutil.move(made, place)
    return place
