"""Which kernel runs each operator on maps: the fastest that passed its check, on the device that runs it (stage T3).

What was found fastest is kept in a file for each device and code, see `core.caches`: a process that asks for the same
operators checks them, and times nothing.
"""

import hashlib
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tilewright import devices
from tilewright.core import artifacts, caches, contents, provenance, timing
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.networks import backends, map_operators
from tilewright.networks.path import Path

KIND, VERSION = "kernels", 1

# Of the largest value: a kernel sums in float32 and rounds once in the middle and once at the end.
ROUNDINGS, LEAST = 4, 1e-6
EFFORT = {"min_reps": 10, "max_seconds": 0.1, "rse_target": 0.02}

_LOG = logging.getLogger(__name__)


@torch.inference_mode()
def choose(
    network: nn.Module, images: torch.Tensor, paths: Iterable[Path | str | None], anew: bool
) -> list[dict[str, Any]]:
    """See `networks.choose_kernels`."""
    operators = getattr(network, "operators", None)
    if operators is None:
        raise ConfigError(f"expected a network whose operators have kernels, found {type(network).__module__}")
    kept: dict = {}
    file = None
    if backends.maps(images.device.type) is not None:
        _lay_out(network, operators)
        file = _file(images.device.type)
        kept = {} if anew else _read(file)
    rows = []
    for path in paths:
        found: dict = {}
        rows += _chosen(network, operators, images, path, kept, found)
        # Path by path: a process that is ended has not timed for nothing.
        if file and found:
            _keep(file, found)
    return rows


def _file(kind):
    """The file of what is the fastest on this device of a kind, with its libraries and this code."""
    made_of = devices.device_id(devices.describe(kind)), provenance.package_digest()
    return caches.folder() / KIND / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]}.json"


def _read(file):
    """``{operator and arguments: name of a form}`` of a file, nothing without one; logs a line about a bad one."""
    if not caches.has(file):
        return {}
    try:
        return contents.fields(file, KIND, artifacts.read_json(file, KIND, VERSION).get("chosen"), dict[str, str])
    except ArtifactError as error:
        _LOG.warning("kernels are chosen again: %s", error)
        return {}


def _keep(file, found):
    """Write what was `found` beside what others have written since."""
    with caches.locked(file.with_suffix(".lock")):
        try:
            artifacts.write_json(file, KIND, VERSION, {"chosen": dict(sorted((_read(file) | found).items()))})
        except ArtifactError as error:
            _LOG.warning("the choice of kernels serves this process alone: %s", error)


def _lay_out(network, operators):
    """Lay out the weights of convolutions as maps are, channels last: each call would copy them."""
    with torch.inference_mode(False), torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d) and not module.weight.is_contiguous(memory_format=torch.channels_last):
                # Graphs that were captured before read them where they were.
                operators.held.append(module.weight.data)
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)


def _chosen(network, operators, images, path, kept, found):
    """The rows of what a path runs that nothing was chosen for. A form that is not the one `kept` joins `found`."""
    seen: dict = {}
    operators.seen = seen
    try:
        network(images, path)
    finally:
        operators.seen = None
    rows = []
    for key, arguments in seen.items():
        if key in operators.chosen:
            continue
        forms, text = (map_operators.TORCH, *map_operators.forms(key[0], images.device)), _text(key[0], arguments)
        tried = [_checked(key, arguments, form) for form in forms if form == kept.get(text)]
        if [row["status"] for row in tried] != ["ok"]:
            tried = [_measured(key, arguments, form) for form in forms]
        # One that was kept is alone, and has no time.
        fastest = min((row for row in tried if row["status"] == "ok"), key=lambda row: row.get("us"))
        if fastest["form"] != kept.get(text):
            found[text] = fastest["form"]
        fastest["chosen"] = True
        operators.chosen[key] = fastest["form"]
        rows += tried
    return rows


def _text(name, arguments):
    """An operator and its arguments, tensors by type and shape."""

    def of(x):
        if isinstance(x, torch.Tensor):
            return f"{str(x.dtype).removeprefix('torch.')}[{'x'.join(map(str, x.shape))}]"
        return f"({', '.join(map(of, x))})" if isinstance(x, list | tuple) else repr(x)

    return name + of(arguments)


def _measured(key, arguments, form):
    """A row of one candidate; only one that is right is timed."""
    row = _checked(key, arguments, form)
    if row["status"] != "ok":
        return row
    operator, kind = getattr(map_operators, key[0]), _first(arguments).device.type
    time = timing.time_gpu if devices.facts(kind).GPU_TIMER else timing.time_call
    return row | {"us": time(lambda: map_operators.run(operator, arguments, form), **EFFORT).p50_us}


def _checked(key, arguments, form):
    """A row of one candidate, compared with float32."""
    (name, dtype, shapes), x = key, _first(arguments)
    row = {"operator": name, "dtype": str(dtype).removeprefix("torch."), "shapes": str(shapes), "form": form}
    row |= {"status": "ok", "reason": "", "chosen": False}
    operator = getattr(map_operators, name)
    refusals = () if form == map_operators.TORCH else backends.maps(x.device.type).REFUSALS  # type: ignore[union-attr]  # torch's modules do not tell the types of what they hold
    try:
        found = map_operators.run(operator, arguments, form).float()
    except refusals as reason:
        return row | {"status": "skipped", "reason": str(reason)}
    # Not in TensorFloat-32, which convolutions on a GPU take by default.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = operator(*_in_float32(arguments))
    error = float((found - expected).abs().max() / expected.abs().max())
    # Torch's own rounds each map before it is added; it is what others replace, and passes.
    tolerance = float("inf") if form == map_operators.TORCH else max(LEAST, ROUNDINGS * torch.finfo(dtype).eps)
    row |= {"error": error, "tolerance": tolerance}
    if not error <= tolerance:
        return row | {"status": "failed", "reason": f"differs by {error:.2g} of the largest value from float32"}
    return row


def _first(arguments):
    return arguments[0][0] if isinstance(arguments[0], list) else arguments[0]


def _in_float32(arguments):
    return [
        type(x)(y.float() for y in x)
        if isinstance(x, list | tuple) and isinstance(x[0], torch.Tensor)
        else x.float()
        if isinstance(x, torch.Tensor)
        else x
        for x in arguments
    ]
