"""Official checkpoint files: read as published, checked whole, then loaded; or nothing is.

A published file is a state dict, or a dict that holds one under one of `HOLDERS`. Its first bytes say of which kind it
is. Pickles are opened with ``weights_only=True``. What stands before all names alike, such as ``module.`` where it was
trained on several devices, or ``model.``, is left out.
"""

import argparse
import itertools
import json
import logging
import os
import pickle
from pathlib import Path

import torch

from tilewright.core.errors import ArtifactError

_LOG = logging.getLogger(__name__)
# Where the published files keep their tensors.
HOLDERS = ("model", "net", "state_dict", "model_state_dict", "model_state")
# What wrappers of torch put into names, at any place, and before all of them.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_PARALLEL = "module."
# What timm's repositories and folders of `save_pretrained` call them.
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")
# And diffusion models, in official folders and in those of diffusers.
_PUBLISHED = ("diffusion_pytorch_model.safetensors", *_HUB_FILES)
# First bytes of what `torch.save` writes: a zip file, and before torch 1.6 a pickle.
_TORCH = (b"PK", b"\x80")
# How many names of each kind an error lists.
_LISTED = 5


def read(path):
    """Tensors by name of a checkpoint, on the CPU, names without what wrappers of torch put into them.

    path: a ``.safetensors`` file, one of `torch.save`, the ``.index.json`` beside several of either, or a folder of one
    of these, see `located`. Raises `ArtifactError` for a file that is missing, damaged, holds other content than
    tensors, or NaN.
    """
    file = located(path)
    if file is None:
        if not Path(path).is_dir():
            raise ArtifactError(f"{path}: no such file; expected a checkpoint")
        raise ArtifactError(f"{path}: expected a checkpoint of tensors, found a folder without {', '.join(_PUBLISHED)}")
    state = {}
    for part in _parts(file):
        state |= _tensors(part)
    for wrapper in _WRAPPERS:
        state = {name.replace(wrapper, ""): tensor for name, tensor in state.items()}
    while state and all(name.startswith(_PARALLEL) for name in state):
        state = {name.removeprefix(_PARALLEL): tensor for name, tensor in state.items()}
    unsound = [name for name, tensor in state.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if unsound:
        raise ArtifactError(f"{path}: expected finite weights, found NaN or infinity in {_list(unsound)}")
    return state


def _tensors(path):
    """Tensors by name of one file. Raises `ArtifactError`."""
    try:
        head = _head(path)
        if head[8:9] == b"{":
            from safetensors.torch import load_file

            found = load_file(path)
        elif head and not head.startswith(_TORCH):
            raise ValueError("it begins as no file of safetensors or torch.save does")
        else:
            # The published training scripts keep their arguments beside the weights: values in a namespace, no code.
            # As a stream: torch goes by the ending of a path.
            with torch.serialization.safe_globals([argparse.Namespace]), Path(path).open("rb") as stream:
                found = torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ArtifactError(f"{path}: expected a checkpoint of nothing but tensors, found other content") from error
    except Exception as error:
        # A damaged file surfaces as whatever the reader meets first: zip, struct, key, safetensors' own error.
        raise _damaged(path, error) from error
    return _state(found, path)


def _parts(path):
    """The files that hold a model: one, or those that an index names, which stand beside it."""
    try:
        if not _head(path).lstrip().startswith(b"{"):
            return [path]
        named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        parts = [path.with_name(name) for name in sorted(set(named.values()))]
    except Exception as error:
        raise _damaged(path, error) from error
    if missing := [part.name for part in parts if not part.exists()]:
        raise ArtifactError(f"{path}: expected its parts beside it, found none of {_list(missing)}")
    return parts


def _head(path):
    """The first bytes of a file: a ``{`` begins an index, and behind eight bytes the header of safetensors."""
    with Path(path).open("rb") as stream:
        return stream.read(9)


def _damaged(path, error):
    return ArtifactError(f"{path}: expected a checkpoint of tensors, found a damaged file: {error}")


def located(path):
    """The file of a checkpoint at `path`, a file or a folder as it was published; None where there is none.

    Of a folder it is the official file, that of diffusers, which keeps it in ``transformer``, or that of
    ``save_pretrained``; of a model in several files their index.
    """
    path = Path(path)
    if not path.is_dir():
        return path if path.exists() else None
    names = [f"{name}{index}" for name in _PUBLISHED for index in (".index.json", "")]
    found = (folder / name for folder in (path, path / "transformer") for name in names)
    return next((file for file in found if file.exists()), None)


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
    while isinstance(content, dict) and (held := [x for x in HOLDERS if isinstance(content.get(x), dict)]):
        content = content[held[0]]
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

    What all names begin with is left out where most are the network's then.

    Raises `ArtifactError` that lists missing, unexpected and mis-shaped tensors; the network is then as it was.
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
    }
    if any(problems.values()):
        told = "; ".join(f"{len(names)} {kind}: {_list(names)}" for kind, names in problems.items() if names)
        raise ArtifactError(f"{path}: not a checkpoint of this network: {told}")
    network.load_state_dict(found)


def _adapted(state, adapt, network, wanted, path):
    """`state` under the names of `network`, which has those `wanted`, without a prefix where its names have none."""
    refused, best, most = None, state, 0
    for prefix in _prefixes(state):
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


def _prefixes(state):
    """What all names of a state begin with, whole parts up to a dot, the shortest first."""
    parts = [name.split(".")[:-1] for name in state]
    shared = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False))
    return ["", *itertools.accumulate(f"{each[0]}." for each in shared)]


def _list(names):
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
