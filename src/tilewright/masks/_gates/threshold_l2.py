"""The patches whose embeddings have the largest L2 norm.

With a checkpoint, its patch embedding is meant. Without one, the embedding is taken to be an isometry of zero-mean
patches: then the norm is the contrast of the normalised pixels, whatever the isometry, and nothing is random.
"""

from typing import Any

import numpy as np

from tilewright.core.errors import ConfigError
from tilewright.masks._gates import _checkpoint, pixels


def kept(params: Any) -> np.ndarray:
    """Ids of the ``params.kept`` patches with the largest norm, int64, best first; ties go to the smaller id."""
    p, n = params.patch, params.side
    if params.weights:
        weight, bias = _embedding(_checkpoint.read(params.weights), params)
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
    weight = _checkpoint.tensor(state, "patch_embed.proj.weight", params.weights).float().numpy()
    _checkpoint.check_patch(weight.shape[-1], params)
    return weight.reshape(len(weight), -1), _checkpoint.tensor(
        state, "patch_embed.proj.bias", params.weights
    ).float().numpy()
