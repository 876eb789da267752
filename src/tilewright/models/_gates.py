"""Gates: which patches of a photograph DynamicViT keeps (part of stage T1).

``threshold-l2``: the patches whose embeddings have the largest L2 norm. With a checkpoint, its patch embedding is
meant. Without one, the embedding is taken to be an isometry of zero-mean patches: then the norm is the contrast of the
normalised pixels themselves, whatever the isometry, and nothing is random.
``predictor``: the network itself, with an official checkpoint, tells what it keeps.
"""

from importlib import import_module

import numpy as np

from tilewright.core import images
from tilewright.core.errors import ArtifactError, ConfigError

# ImageNet statistics, which all five networks are trained with.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


def pixels(image, size):
    """A photograph as networks take it: cut and resized as `images.load` does, normalised, float32 [3, size, size]."""
    return (images.load(image, size) - MEAN[:, None, None]) / STD[:, None, None]


def describe(params):
    """JSON-able facts about the gate of a graph."""
    photograph = images.PHOTOGRAPHS.get(params.image)
    embedding = "of the checkpoint" if params.weights else "isometric, of zero-mean patches"
    return {
        "name": params.gate,
        "embedding": embedding,
        "image": params.image,
        "credit": f"{photograph.credit}, {photograph.licence}" if photograph else None,
    }


def own_image(params):
    """The image's path in a list; empty for a photograph that is shipped."""
    return [] if params.image in images.PHOTOGRAPHS else [params.image]


def threshold_l2(params):
    """Ids of the ``params.kept`` patches with the largest norm, int64, best first; ties go to the smaller id."""
    p, n = params.patch, params.side
    if params.weights:
        weight, bias = _embedding(_read(params.weights), params)
    photograph = pixels(params.image, params.resolution)[:, : n * p, : n * p]
    norm = np.empty((n, n))
    # A band of patches at a time: an 8192-pixel image in float32 is 800 MB already.
    for y in range(n):
        patches = photograph[:, y * p : (y + 1) * p].reshape(3, p, n, p).transpose(2, 0, 1, 3)
        if params.weights:
            embedded = patches.reshape(n, -1) @ weight.T + bias
        else:
            # ASSUME: trained embeddings answer to structure, hardly to brightness; so does this one.
            embedded = (patches - patches.mean((2, 3), keepdims=True)).reshape(n, -1)
        norm[y] = np.linalg.norm(embedded, axis=1)
    return np.argsort(-norm.ravel(), kind="stable")[: params.kept[params.prune - 1]]


def _embedding(state, params):
    """Weight [d, 3 p p] and bias [d] of a checkpoint whose patches are embedded by one convolution."""
    if "patch_embed.conv1.weight" in state:
        raise ConfigError(
            f"gate threshold-l2: {params.variant} embeds patches by four convolutions; leave out `weights`"
        )
    weight = _get(state, "patch_embed.proj.weight", params.weights).float().numpy()
    _check_patch(weight.shape[-1], params)
    return weight.reshape(len(weight), -1), _get(state, "patch_embed.proj.bias", params.weights).float().numpy()


def _read(path):
    return import_module("tilewright.core.checkpoints").read(path)


def _get(state, key, path):
    if key not in state:
        raise ArtifactError(f"{path}: expected an official DynamicViT checkpoint, found no {key!r}")
    return state[key]


def _check_patch(patch, params):
    if patch != params.patch:
        raise ConfigError(f"{params.weights}: expected a patch of {patch} pixels, found {params.patch}")


def predictor(params, width):
    """Ids of the patches (int64, ascending) that the network of `params` keeps after ``params.prune`` prunings.

    width: of the network. Raises `ConfigError` for a checkpoint of another network or patch size, `ArtifactError` for
    one that is incomplete.
    """
    # By name: only this gate needs torch.
    torch, networks = import_module("torch"), import_module("tilewright.networks")
    path = params.weights
    state = _read(path)
    lvvit = "patch_embed.conv1.weight" in state
    if lvvit != params.variant.startswith("lvvit"):
        raise ConfigError(
            f"{path}: expected a checkpoint of {params.variant}, found one of {'LV-ViT' if lvvit else 'DeiT'}"
        )
    if (found := _get(state, "cls_token", path).shape[-1]) != width:
        raise ConfigError(f"{path}: expected a width of {width} for {params.variant}, found {found}")
    # LV-ViT's stem halves the image before the patches are cut.
    _check_patch((2 if lvvit else 1) * _get(state, "patch_embed.proj.weight", path).shape[-1], params)
    network = networks.create(
        "dynamicvit",
        variant=params.variant,
        image_size=params.resolution,
        patch=params.patch,
        keep_ratio=params.keep_ratio,
        num_classes=len(_get(state, "head.weight", path)),
        checkpoint=path,
        attention="native",
    )
    with torch.inference_mode():
        return network.kept(torch.from_numpy(pixels(params.image, params.resolution))[None])[params.prune - 1][
            0
        ].numpy()
