"""Networks of maps by the tensors of a checkpoint: family, variant, head and classes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tilewright import networks
from tilewright.core import arguments, checkpoints, weight_files
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.core.registry import member

CONFIG = "config.json"


def opened(path: str | Path, image_size: Any, attention: str | None, options: Mapping[str, Any]) -> torch.nn.Module:
    """See `networks.from_checkpoint`."""
    path = arguments.path("path", path)
    family, found = _stated(path)
    stated = {**found, **options}
    if "num_classes" not in stated:
        raise ConfigError(f"num_classes: expected one, since {path} holds a backbone alone; found none")
    network = networks.create(family, image_size=image_size, checkpoint=path, attention=attention, **stated)
    network.labels = _labels(path, network.options.num_classes)  # type: ignore[assignment, union-attr]  # torch takes attributes of any type
    return network


def _stated(path):
    """``(family, options)`` of a checkpoint. Raises `ArtifactError`."""
    state = checkpoints.read(path)
    for prefix in checkpoints.prefixes(state):
        own = {name[len(prefix) :]: tensor for name, tensor in state.items()}
        for family in networks.MAPS:
            try:
                found = member(networks.__name__, "network", family, networks.MAPS).recognised(own)
            except KeyError as error:
                raise ArtifactError(f"{path}: expected a whole {family}, found none of its {error}") from None
            except ValueError as error:
                raise ArtifactError(f"{path}: {error}") from None
            if found is not None:
                return family, found
    raise ArtifactError(
        f"{path}: expected weights of {' or '.join(networks.MAPS)} by the names of its authors, of transformers or of "
        f"mmsegmentation, found {weight_files.some(sorted(state))}"
    )


def _labels(path, count):
    """Names of the classes that a config of transformers beside the weights has, or none."""
    file = (path if path.is_dir() else path.parent) / CONFIG
    try:
        named = json.loads(file.read_text(encoding="utf-8"))["id2label"]
        found = tuple(str(named[str(number)]) for number in range(len(named)))
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return found if len(found) == count else ()
