"""Nothing is pruned."""

from typing import TYPE_CHECKING

from torch import nn

from tilewright.packed.pruners import Settings as Params

if TYPE_CHECKING:
    from tilewright.packed.pruners import Settings

__all__ = ("Params", "Pruner")


class Pruner(nn.Module):
    """Never called."""

    before = inside = ()

    def __init__(self, params: "Settings", width: int, n_tokens: int):
        """See the contract."""
        super().__init__()
