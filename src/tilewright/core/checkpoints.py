"""Official checkpoint files: read as published, checked whole, then loaded; or nothing is.

A published file is a state dict, or a dict that holds one under ``model``, ``net`` or ``state_dict``, with ``module.``
before each name where it was trained on several devices. Pickles are opened with ``weights_only=True``.
"""

import argparse
import json
import logging
import os
import pickle
from pathlib import Path

import torch

from tilewright.core.errors import ArtifactError

_LOG = logging.getLogger(__name__)
# Where the published files keep their tensors.
HOLDERS = ("model", "net", "state_dict")
# What timm's repositories call them.
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")
# What diffusion models are called, in official folders and in those of diffusers.
_PUBLISHED = "diffusion_pytorch_model.safetensors"
# How many names of each kind an error lists.
_LISTED = 5


def read(path):
    """Tensors by name of a ``.pth`` or ``.safetensors`` file, on the CPU, names without ``module.``.

    Of a model in several ``.safetensors`` files, `path` is the ``.index.json`` beside them.

    Raises `ArtifactError` for a file that is missing, damaged, holds other content than tensors, or NaN.
    """
    try:
        if str(path).endswith((".safetensors", ".index.json")):
            from safetensors.torch import load_file

            state = {}
            for part in _parts(path):
                state |= load_file(part)
        else:
            # The published training scripts keep their arguments beside the weights: values in a namespace, no code.
            with torch.serialization.safe_globals([argparse.Namespace]):
                state = _state(torch.load(path, map_location="cpu", weights_only=True), path)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; expected a checkpoint") from None
    except pickle.UnpicklingError as error:
        raise ArtifactError(f"{path}: expected a checkpoint of nothing but tensors, found other content") from error
    except ArtifactError:
        raise
    except Exception as error:
        # A damaged file surfaces as whatever the reader meets first: zip, struct, key, safetensors' own error.
        raise ArtifactError(f"{path}: expected a checkpoint of tensors, found a damaged file: {error}") from error
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    unsound = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if unsound:
        raise ArtifactError(f"{path}: expected finite weights, found NaN or infinity in {_list(unsound)}")
    return state


def _parts(path):
    """The files that hold a model: one, or those that an index names, which stand beside it."""
    path = Path(path)
    if path.suffix != ".json":
        return [path]
    named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    parts = [path.with_name(name) for name in sorted(set(named.values()))]
    if missing := [part.name for part in parts if not part.exists()]:
        raise ArtifactError(f"{path}: expected its parts beside it, found none of {_list(missing)}")
    return parts


def located(path):
    """The file of a checkpoint at `path`, a file or a folder as it was published; None where there is none.

    Of a folder it is the official file or that of diffusers, which keeps it in ``transformer``; of a model in several
    files their index.
    """
    path = Path(path)
    if not path.is_dir():
        return path if path.exists() else None
    folders, names = (path, path / "transformer"), (f"{_PUBLISHED}.index.json", _PUBLISHED)
    return next((folder / name for folder in folders for name in names if (folder / name).exists()), None)


def cached(name):
    """The checkpoint that was downloaded under timm's `name`, or None with a warning; nothing is downloaded.

    Looked for in the cache of the Hugging Face hub, where timm keeps its own, newest first, and in torch's hub.
    """
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    torch_hub = Path(torch.hub.get_dir()) / "checkpoints"
    # A tag behind the name says what the weights were trained on, a digest which they are.
    tagged = [f"models--*--{name}{tag}/snapshots/*/{file}" for tag in ("", ".*") for file in _HUB_FILES]
    found = [path for pattern in tagged for path in hub.glob(pattern)]
    found = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    found += sorted(torch_hub.glob(f"{name}-*.pth"))
    if not found:
        _LOG.warning("no weights of %s in %s or %s: they are random", name, hub, torch_hub)
        return None
    return found[0]


def _state(content, path):
    for holder in HOLDERS:
        if isinstance(content, dict) and isinstance(content.get(holder), dict):
            content = content[holder]
            break
    if not isinstance(content, dict) or not content:
        raise ArtifactError(f"{path}: expected a dict of tensors, plain or under {', '.join(HOLDERS)}")
    foreign = [
        str(name) for name, value in content.items() if not (isinstance(name, str) and isinstance(value, torch.Tensor))
    ]
    if foreign:
        raise ArtifactError(f"{path}: expected tensors by name, found other content under {_list(foreign)}")
    return content


def load(network, path, adapt):
    """Load a checkpoint file into `network`; ``adapt(state, network)`` brings it to the network's names and shapes.

    Raises `ArtifactError` that lists missing, unexpected and mis-shaped tensors; the network is then as it was.
    """
    found = read(path)
    try:
        found = adapt(dict(found), network)
    except (KeyError, RuntimeError, ValueError, IndexError) as error:
        raise ArtifactError(f"{path}: not a checkpoint of this network: {error}") from error
    wanted = network.state_dict()
    problems = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in wanted],
        "mis-shaped": [
            f"{name} {list(found[name].shape)} for {list(wanted[name].shape)}"
            for name in wanted
            if name in found and found[name].shape != wanted[name].shape
        ],
    }
    if any(problems.values()):
        told = "; ".join(f"{len(names)} {kind}: {_list(names)}" for kind, names in problems.items() if names)
        raise ArtifactError(f"{path}: not a checkpoint of this network: {told}")
    network.load_state_dict(found)


def _list(names):
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
