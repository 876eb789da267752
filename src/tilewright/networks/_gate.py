"""The gate `predictor` of DynamicViT, see `masks._gates`: the network itself, with an official checkpoint."""

from typing import TYPE_CHECKING

from tilewright.core.errors import ConfigError
from tilewright.masks import dynamicvit
from tilewright.masks._gates import _checkpoint, pixels

if TYPE_CHECKING:
    import numpy as np

# `networks.create` enters the family by its name.
ENTERED = ("tilewright.networks.dynamicvit",)


def kept(params: dynamicvit.Params) -> "np.ndarray":
    """Ids of the patches (int64, ascending) that the network of `params` keeps after ``params.prune`` prunings.

    Raises `ConfigError` for a checkpoint of another network or patch size, `ArtifactError` for one that is incomplete.
    """
    import torch

    from tilewright import networks

    width = dynamicvit.VARIANTS[params.variant][0]
    path = params.weights
    state = _checkpoint.read(path)  # type: ignore[arg-type]  # a gate without weights is not made here
    lvvit = "patch_embed.conv1.weight" in state
    if lvvit != params.variant.startswith("lvvit"):
        raise ConfigError(
            f"{path}: expected a checkpoint of {params.variant}, found one of {'LV-ViT' if lvvit else 'DeiT'}"
        )
    if (found := _checkpoint.tensor(state, "cls_token", path).shape[-1]) != width:
        raise ConfigError(f"{path}: expected a width of {width} for {params.variant}, found {found}")
    # LV-ViT's stem halves the image before the patches are cut.
    patch = _checkpoint.tensor(state, "patch_embed.proj.weight", path).shape[-1]
    _checkpoint.check_patch((2 if lvvit else 1) * patch, params)
    network = networks.create(
        "dynamicvit",
        variant=params.variant,
        image_size=params.resolution,
        patch=params.patch,
        keep_ratio=params.keep_ratio,
        num_classes=len(_checkpoint.tensor(state, "head.weight", path)),
        checkpoint=path,
        attention="native",
    )
    with torch.inference_mode():
        prunings = network.kept(torch.from_numpy(pixels(params.image, params.resolution))[None])  # type: ignore[operator]  # torch's modules do not tell the types of what they hold
    return prunings[params.prune - 1][0].numpy()
