"""What gates read of an official DynamicViT checkpoint."""

from typing import TYPE_CHECKING, Any

from tilewright.core.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    import torch

# A tensor that every network of the family has.
KNOWN = "patch_embed.proj.weight"


def read(path: str) -> "dict[str, torch.Tensor]":
    """The tensors of a checkpoint by name, without what all names begin with. Raises `ArtifactError`."""
    # Here: reading needs torch, which a gate without weights does not.
    from tilewright.core import checkpoints

    state = checkpoints.read(path)
    before = next((name.removesuffix(KNOWN) for name in state if name.endswith(f".{KNOWN}")), "")
    if all(name.startswith(before) for name in state):
        return {name.removeprefix(before): tensor for name, tensor in state.items()}
    return state


def tensor(state: "dict[str, torch.Tensor]", key: str, path: Any) -> "torch.Tensor":
    """The tensor named `key`. Raises `ArtifactError` where there is none."""
    if key not in state:
        raise ArtifactError(f"{path}: expected an official DynamicViT checkpoint, found no {key!r}")
    return state[key]


def check_patch(patch: int, params: Any) -> None:
    """Raise `ConfigError` unless the checkpoint's patches have the size that `params` state, in pixels."""
    if patch != params.patch:
        raise ConfigError(f"{params.weights}: expected a patch of {patch} pixels, found {params.patch}")
