"""What a figure or a table was made from, as a JSON beside it: its inputs, whose times they hold, and the code
(stage T6)."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError
from tilewright_study import provenance

KIND = "origin"
VERSION = 1
# Facts of a device, by the column of a CSV that holds them.
_FACTS = ("device", "cores", "torch")
# Kinds of rows that hold no time.
_COUNTED = ("accelerator",)


@dataclass(frozen=True)
class Origin:
    """Where the figure or table `name` comes from.

    inputs: paths, as the command had them. hardware: what the times in the inputs were measured on, in words; empty
    where nothing in them was timed.
    """

    name: str
    inputs: tuple[str, ...]
    hardware: str


def save(path, name, module, inputs):
    """Write the origin of the figure or table `name`, which `module` made from the files `inputs`."""
    made_by = {
        "stage": "tables" if hasattr(module, "table") else "figures",
        "parameters": {"name": name},
        "inputs": {str(source): provenance.sha256_file(source) for source in inputs},
        "code": provenance.code_digest(module.__name__, *getattr(module, "modules", list)()),
        "versions": provenance.versions("matplotlib", "numpy", "pandas"),
    }
    artifacts.write_json(path, KIND, VERSION, {"name": name, "hardware": hardware(inputs)}, made_by)


def load(path):
    """Read what `save` wrote. Raises `ArtifactError`."""
    document = artifacts.read_json(path, KIND, VERSION)
    try:
        return Origin(document["name"], tuple(document["made_by"]["inputs"]), document["hardware"])
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: expected a complete origin file, found {error!r}") from error


def hardware(inputs):
    """Devices, cores and torch that the times in `inputs` are of, in words: of profiles and of rows of T5."""
    found = dict.fromkeys(facts for path in map(Path, inputs) for facts in _facts(path))
    devices, cores, torch = ({*filter(None, each)} for each in zip(*found, strict=True)) if found else ((), (), ())
    counts = sorted(cores, key=int)
    words = [", ".join(name for name in dict.fromkeys(facts[0] for facts in found) if name in devices)]
    words.append(f"{' and '.join(counts)} core{'s' * (counts != ['1'])}" if counts else "")
    words.append(f"torch {', '.join(sorted(torch))}" if torch else "")
    return "; ".join(filter(None, words))


def _facts(path):
    """Tuples of `_FACTS` as text, of the rows of a CSV or of a profile."""
    if path.suffix == ".csv":
        with open(path, encoding="utf-8", newline="") as stream:
            rows = (row for row in csv.DictReader(stream) if row.get("kind") not in _COUNTED)
            return [tuple(row.get(name) or "" for name in _FACTS) for row in rows]
    device = json.loads(path.read_bytes()).get("device") if path.suffix == ".json" else None
    return [(device["name"], str(device["threads"]), device["versions"].get("torch"))] if device else []
