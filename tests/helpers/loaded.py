"""What the jobs of a finished study have loaded, against what counts as their code. See `traced/sitecustomize.py`."""

import json
import sys
from pathlib import Path

from helpers.checkout import ROOT, TINY, described
from tilewright import masks
from tilewright_study import experiments, provenance

TRACER = Path(__file__).parent / "traced"


def traced(folder):
    """Variables of an environment in which jobs write down to `folder` what they load; none of a path is lost."""
    return {"TRACED": str(folder), "PYTHONPATH": str(TRACER)}


def missed(jobs, folder):
    """``{rule: names}``: modules and files of the package that jobs have loaded, and that are not their code.

    A package that is loaded for a module of it alone, with what it imports, is none; nor are families of workloads that
    are asked whether a name is theirs, and, where something is shown, experiments that are asked which tables and
    figures are theirs. jobs: of `described`.
    """
    known = {(Path(job["script"]).name, *job["arguments"]): job for job in jobs if "script" in job}
    found = {}
    for path in Path(folder).iterdir():
        loaded = json.loads(path.read_bytes())
        job = known.get((Path(loaded["command"][0]).name, *loaded["command"][1:]))
        if job is None:
            continue
        covered = set(job["covered"])
        besides = {*_packages(covered), *(f"tilewright.masks.{name}" for name in masks.NAMES)}
        if job["rule"] in ("figure", "table"):
            besides |= {f"{experiments.__name__}.{name}" for name in experiments.NAMES}
        modules = set(loaded["modules"]) - set(provenance.closure(*covered, *besides))
        modules = {name for name in modules if not name.startswith("tilewright.masks.") and _does_something(name)}
        counted = {path.name for name in covered for path in provenance._data(name)}
        found.setdefault(job["rule"], set()).update(modules, {Path(path).name for path in loaded["data"]} - counted)
    return found


def _packages(modules):
    """The packages that `modules` are in."""
    return {name.rsplit(".", depth)[0] for name in modules for depth in range(1, name.count(".") + 1)}


def _does_something(module):
    """Whether a module holds more than its docstring."""
    return provenance._source(module).code != provenance.canonical("")


if __name__ == "__main__":
    study, traces = sys.argv[1:]
    (jobs,) = described(study, "all", studies=[(TINY,)], source=ROOT, cores=2)
    lacking = {rule: names for rule, names in missed(jobs, traces).items() if names}
    sys.exit(f"expected what jobs load to be their code, found besides: {lacking}" if lacking else None)
