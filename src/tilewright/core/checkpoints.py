"""Official checkpoint files: read as published, checked whole, then loaded; or nothing is.

A published file is a state dict, or a dict that holds one under one of `HOLDERS`, or just one. Its first bytes say of
which kind it is. Pickles are opened with ``weights_only=True``. What stands before all names alike, such as ``module.``
where it was trained on several devices, or ``model.``, is left out.
"""

import argparse
import itertools
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import torch

from tilewright.core import weight_files
from tilewright.core.errors import ArtifactError

_LOG = logging.getLogger(__name__)
# Where the published files keep their tensors, and in how many dicts one in another at most.
HOLDERS = ("model", "net", "state_dict", "model_state_dict", "model_state")
_DEEPEST = 8
# What wrappers of torch put into names, at any place, and before all of them.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_PARALLEL = "module."
# First bytes of what `torch.save` writes: a zip file, and before torch 1.6 a pickle.
_TORCH = (b"PK", b"\x80")


def read(path: Path | str) -> dict[str, torch.Tensor]:
    """Tensors by name of a checkpoint, on the CPU, names without what wrappers of torch put into them.

    path: a ``.safetensors`` file, one of `torch.save`, the ``.index.json`` beside several of either, or a folder of one
    of these, see `weight_files.located`. Raises `ArtifactError` for a file that is missing, damaged, holds other
    content than tensors, or NaN.
    """
    file = weight_files.located(path)
    if file is None:
        if not Path(path).is_dir():
            raise ArtifactError(f"{path}: no such file; expected a checkpoint")
        named = ", ".join(weight_files.PUBLISHED)
        raise ArtifactError(f"{path}: expected a checkpoint of tensors, found a folder without {named}")
    state: dict = {}
    for part in weight_files.parts(file):
        state |= _tensors(part)
    for wrapper in _WRAPPERS:
        state = {name.replace(wrapper, ""): tensor for name, tensor in state.items()}
    while state and all(name.startswith(_PARALLEL) for name in state):
        state = {name.removeprefix(_PARALLEL): tensor for name, tensor in state.items()}
    if other := [name for name, tensor in state.items() if not _plain(tensor)]:
        raise ArtifactError(f"{path}: expected dense tensors of numbers, found others in {weight_files.some(other)}")
    unsound = [name for name, x in state.items() if x.is_floating_point() and not _wide(x).isfinite().all()]
    if unsound:
        raise ArtifactError(f"{path}: expected finite weights, found NaN or infinity in {weight_files.some(unsound)}")
    return state


def _plain(tensor):
    """Whether a tensor holds each of its numbers."""
    return tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)


def _wide(tensor):
    """Floating-point numbers of 8 bits, of which torch asks nothing, in 32."""
    return tensor.float() if tensor.itemsize == 1 else tensor


def _tensors(path):
    """Tensors by name of one file. Raises `ArtifactError`."""
    try:
        head = weight_files.head(path)
        if head[8:9] == b"{":
            from safetensors.torch import load_file

            found = load_file(path)
        elif head and not head.startswith(_TORCH):
            raise ValueError("its first bytes are of neither safetensors nor torch.save")
        else:
            # The published training scripts keep their arguments beside the weights: values in a namespace, no code.
            # As a stream: torch goes by the ending of a path.
            with torch.serialization.safe_globals([argparse.Namespace]), Path(path).open("rb") as stream:
                found = torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ArtifactError(f"{path}: expected a checkpoint of tensors only, found other objects") from error
    except Exception as error:
        # A damaged file surfaces as whatever the reader meets first: zip, struct, key, safetensors' own error.
        raise weight_files.damaged(path, error) from error
    return _state(found, path)


def cached(name: str) -> Path | None:
    """The checkpoint that was downloaded under timm's `name`, or None with a warning; nothing is downloaded.

    Looked for in the cache of the Hugging Face hub, where timm keeps its own, newest first, and in torch's hub.
    """
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    torch_hub = Path(torch.hub.get_dir()) / "checkpoints"
    # A tag behind the name says what the weights were trained on, a digest which they are.
    tagged = [f"models--*--{name}{tag}/snapshots/*/{file}" for tag in ("", ".*") for file in weight_files.HUB_FILES]
    found = [path for pattern in tagged for path in hub.glob(pattern)]
    found = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    found += sorted(torch_hub.glob(f"{name}-*.pth"))
    if not found:
        _LOG.warning("no weights of %s in %s or %s: they are random", name, hub, torch_hub)
        return None
    return found[0]


def _state(content, path):
    for _ in range(_DEEPEST):
        if not isinstance(content, dict):
            break
        held = [name for name in HOLDERS if isinstance(content.get(name), dict)]
        if not held and not any(isinstance(value, torch.Tensor) for value in content.values()):
            held = [name for name, value in content.items() if _holds(value)]
            if len(held) > 1:
                raise ArtifactError(f"{path}: expected the weights of one network, found several: {', '.join(held)}")
        if not held:
            break
        content = content[held[0]]
    if not isinstance(content, dict) or not content:
        raise ArtifactError(f"{path}: expected a dict of tensors, plain or under {', '.join(HOLDERS)}")
    foreign = [
        str(name) for name, value in content.items() if not (isinstance(name, str) and isinstance(value, torch.Tensor))
    ]
    if foreign:
        raise ArtifactError(f"{path}: expected tensors by name, found other content under {weight_files.some(foreign)}")
    return content


def _holds(content, deepest=_DEEPEST):
    """Whether content is a dict of tensors by name, or of such a dict: an optimiser's are by number."""
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content) or not deepest:
        return False
    return any(isinstance(value, torch.Tensor) or _holds(value, deepest - 1) for value in content.values())


def load(network: torch.nn.Module, path: Path | str, adapt: Callable) -> None:
    """Load a checkpoint file into `network`; ``adapt(state, network)`` brings it to the network's names and shapes.

    What all names begin with is left out where most are the network's then.

    Raises `ArtifactError` that lists missing, unexpected, mis-shaped and mis-typed tensors; the network is then as it
    was. Floating-point numbers of any type are taken for others.
    """
    wanted = network.state_dict()
    found = _adapted(read(path), adapt, network, wanted, path)
    problems = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in wanted],
        "mis-shaped": [
            f"{name} {list(found[name].shape)} for {list(wanted[name].shape)}"
            for name in wanted
            if name in found and found[name].shape != wanted[name].shape
        ],
        "mis-typed": [
            f"{name} {found[name].dtype} for {wanted[name].dtype}"
            for name in wanted
            if name in found and found[name].is_floating_point() != wanted[name].is_floating_point()
        ],
    }
    if any(problems.values()):
        told = "; ".join(
            f"{len(names)} {kind}: {weight_files.some(names)}" for kind, names in problems.items() if names
        )
        raise ArtifactError(f"{path}: not a checkpoint of this network: {told}")
    network.load_state_dict(found)


def _adapted(state, adapt, network, wanted, path):
    """`state` under the names of `network`, which has those `wanted`, without a prefix where its names have none."""
    refused, best, most = None, state, 0
    for prefix in prefixes(state):
        try:
            found = adapt({name[len(prefix) :]: tensor for name, tensor in state.items()}, network)
        except (KeyError, RuntimeError, ValueError, IndexError) as error:
            refused = refused or error
            continue
        matching = sum(name in wanted for name in found)
        if 2 * matching >= len(found):
            return found
        if matching > most:
            best, most = found, matching
    if refused is not None:
        raise ArtifactError(f"{path}: not a checkpoint of this network: {refused}") from refused
    return best


def prefixes(state: dict[str, torch.Tensor]) -> list[str]:
    """What all names of a state begin with, whole parts up to a dot, the shortest first."""
    parts = [name.split(".")[:-1] for name in state]
    shared = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False))
    return ["", *itertools.accumulate(f"{each[0]}." for each in shared)]
