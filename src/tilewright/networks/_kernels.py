"""Which kernel runs each operator on maps: the fastest that passed its check, on the device that runs it (stage T3)."""

import torch
from torch import nn

from tilewright import targets
from tilewright.core import timing
from tilewright.core.errors import ConfigError
from tilewright.networks import _maps

# Of the largest value: a kernel sums in float32 and rounds once in the middle and once at the end.
ROUNDINGS, LEAST = 4, 1e-6
EFFORT = {"min_reps": 10, "max_seconds": 0.1, "rse_target": 0.02}


@torch.inference_mode()
def choose(network, images, paths):
    """See `networks.choose_kernels`."""
    operators = getattr(network, "operators", None)
    if operators is None:
        raise ConfigError(f"expected a network whose operators have kernels, found {type(network).__module__}")
    if targets.maps(images.device.type) is not None:
        _lay_out(network, operators)
    return [row for path in paths for row in _chosen(network, operators, images, path)]


def _lay_out(network, operators):
    """Lay out the weights of convolutions as maps are, channels last: each call would copy them."""
    with torch.inference_mode(False), torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d) and not module.weight.is_contiguous(memory_format=torch.channels_last):
                # Graphs that were captured before read them where they were.
                operators.held.append(module.weight.data)
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)


def _chosen(network, operators, images, path):
    """The rows of what a path runs that nothing was chosen for."""
    operators.seen = seen = {}
    try:
        network(images, path)
    finally:
        operators.seen = None
    rows = []
    for key, arguments in seen.items():
        if key in operators.chosen:
            continue
        forms = (_maps.TORCH, *_maps.forms(key[0], images.device))
        found = [_measured(key, arguments, form) for form in forms]
        fastest = min((row for row in found if row["status"] == "ok"), key=lambda row: row["us"])
        fastest["chosen"] = True
        operators.chosen[key] = fastest["form"]
        rows += found
    return rows


def _measured(key, arguments, form):
    """A row of one candidate; only one that is right is timed."""
    (name, dtype, shapes), x = key, _first(arguments)
    row = {"operator": name, "dtype": str(dtype).removeprefix("torch."), "shapes": str(shapes), "form": form}
    row |= {"status": "ok", "reason": "", "chosen": False}
    operator = getattr(_maps, name)
    refusals = () if form == _maps.TORCH else targets.maps(x.device.type).REFUSALS
    try:
        found = _maps.run(operator, arguments, form).float()
    except refusals as reason:
        return row | {"status": "skipped", "reason": str(reason)}
    # Not in TensorFloat-32, which convolutions on a GPU take by default.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = operator(*_in_float32(arguments))
    error = float((found - expected).abs().max() / expected.abs().max())
    # Torch's own rounds each map before it is added; it is what others replace, and passes.
    tolerance = float("inf") if form == _maps.TORCH else max(LEAST, ROUNDINGS * torch.finfo(dtype).eps)
    row |= {"error": error, "tolerance": tolerance}
    if not error <= tolerance:
        return row | {"status": "failed", "reason": f"differs by {error:.2g} of the largest value from float32"}
    time = timing.time_gpu if targets.facts(x.device.type).GPU_TIMER else timing.time_call
    return row | {"us": time(lambda: _maps.run(operator, arguments, form), **EFFORT).p50_us}


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
