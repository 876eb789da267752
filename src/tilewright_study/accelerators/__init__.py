"""What paths of networks cost on generated hardware, by a cost model: cycles and energy, as ratios of each other.

The model is that of `zigzag-dse` (Mei et al., "ZigZag: Enlarging Joint Architecture-Mapping Design Space Exploration
for DNN Accelerators", IEEE Transactions on Computers, 2021), an optional extra, ``accelerator``. It searches how a
layer is mapped onto the hardware. Its numbers are uncalibrated: no chip was made, and only ratios are claimed.
Importing this package imports neither torch nor `zigzag`.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import msgspec

from tilewright.core import artifacts, caches, provenance
from tilewright.core.errors import ArtifactError, TilewrightError, Unavailable

PACKAGE = "zigzag-dse"
# What it is installed as, and what it imports: its own metadata leaves the last one out.
NEEDED = {
    **{"zigzag-dse": "zigzag", "onnx": "onnx", "sympy": "sympy", "cerberus": "cerberus", "typeguard": "typeguard"},
    **{"multiprocessing-on-dill": "multiprocessing_on_dill", "networkx": "networkx", "six": "six"},
}
WORKER = f"{__name__}._worker"


class Shape(msgspec.Struct, frozen=True, order=True):
    """A product of 8-bit matrices [pixels, inputs] x [inputs, outputs], or `outputs` products of a depthwise kernel of
    `inputs` numbers at so many pixels; rounded up to what the hardware computes at once."""

    kind: str
    pixels: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Cost:
    """cycles, and energy in pJ, of a layer."""

    cycles: float
    pj: float


def version():
    """The version of the cost model. Raises `Unavailable` where it, or what it needs, is not installed."""
    found = provenance.versions(*NEEDED)
    if missing := [name for name, installed in found.items() if installed is None]:
        raise Unavailable(
            f"{', '.join(missing)} not installed; the extra `accelerator` of this package has all it needs"
        )
    return found[PACKAGE]


def costs(hardware, shapes, orders):
    """``{shape: Cost}`` of each of `shapes` on `hardware`.

    orders: how many loops are arranged in every order; the search grows with its factorial. What was found before is
    read from the cache (`core.caches`), by shape, hardware, version and `orders`. The model runs in a process of its
    own, for it configures logging and writes files where it stands.

    Raises `Unavailable` without the extra, and `TilewrightError` where the model fails.
    """
    stated = {"version": version(), "orders": orders, "hardware": hardware.described()}
    text = json.dumps(stated, sort_keys=True)
    path = caches.folder() / "accelerators" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    with caches.locked(path.with_suffix(".lock")):
        known = _known(path)
        todo = sorted({shape for shape in shapes if _key(shape) not in known})
        if todo:
            known |= _run(hardware, todo, orders)
            with caches.keeping("costs"):
                artifacts.write_text(path, json.dumps(known, sort_keys=True) + "\n")
    return {shape: Cost(*known[_key(shape)]) for shape in set(shapes)}


def _key(shape):
    return f"{shape.kind} {shape.pixels} {shape.inputs} {shape.outputs}"


def _known(path):
    """What a file of the cache holds; nothing where there is none, or a damaged one."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[float, float]])
    except (OSError, msgspec.DecodeError):
        return {}
    return found


def _run(hardware, shapes, orders):
    """``{key: (cycles, pJ)}``, by the model, in another process and in a folder that is gone afterwards."""
    asked = {
        "hardware": hardware.described(),
        "sizes": [hardware.vector, hardware.lanes, hardware.elements],
        "shapes": [msgspec.to_builtins(shape) for shape in shapes],
        "orders": orders,
    }
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        command = [sys.executable, "-m", WORKER, folder]
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, cwd=folder)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise TilewrightError(f"{PACKAGE}: expected costs on hardware {hardware}, found an error: {last}")
    try:
        found = msgspec.json.decode(done.stdout, type=list[tuple[float, float]])
    except msgspec.DecodeError as error:
        raise ArtifactError(f"{PACKAGE}: expected costs of {len(shapes)} shapes, found: {error}") from error
    return {_key(shape): cost for shape, cost in zip(shapes, found, strict=True)}
