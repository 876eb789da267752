"""Gates: which patches of a photograph DynamicViT keeps (part of stage T1).

Contract of a module of `MODULES`: ``kept(params) -> int64 array``: ids of the ``params.kept`` patches that stay after
``params.prune`` prunings, in any order. params: `tilewright.masks.dynamicvit.Params`. A gate is entered by its name
alone, so that the graphs of one do not change with the code of the others.
"""

from importlib import import_module
from typing import Any

import numpy as np

from tilewright.core import images, registry

# By name. A network that is a gate stands above the graphs.
MODULES = {"threshold_l2": f"{__name__}.threshold_l2", "predictor": "tilewright.networks._gate"}

# ImageNet statistics, which all five networks are trained with.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


def pixels(image: str, size: int) -> np.ndarray:
    """A photograph as networks take it: cut and resized by `images.load`, normalised, float32 [3, height, width]."""
    return (images.load(image, size) - MEAN[:, None, None]) / STD[:, None, None]


def describe(params: Any) -> dict[str, str | None]:
    """JSON-able facts about the gate of a graph."""
    photograph = images.PHOTOGRAPHS.get(params.image)
    embedding = "of the checkpoint" if params.weights else "isometric, of zero-mean patches"
    return {
        "name": params.gate,
        "embedding": embedding,
        "image": params.image,
        "credit": f"{photograph.credit}, {photograph.licence}" if photograph else None,
    }


def own_image(params: Any) -> list[str]:
    """The image's path in a list; empty for a photograph that is shipped."""
    return [] if params.image in images.PHOTOGRAPHS else [params.image]


def module(params: Any) -> str:
    """The dotted name of the module of the gate, for digests of code. A gate's name has a hyphen where that has none.

    Raises `UnknownNameError`.
    """
    name = params.gate.replace("-", "_")
    registry.check("gate", name, MODULES)
    return MODULES[name]


def kept(params: Any) -> np.ndarray:
    """Ids of the patches that the gate of `params` keeps. Raises what the gate raises."""
    return import_module(module(params)).kept(params)
