"""Parameters that count how often they are written to, also where a network is handled in inference mode."""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Counted(nn.Module):
    """A network whose parameters are ordinary tensors wherever it is moved, loaded or copied.

    Inference tensors count no versions: to notice that a bias was written to, a layer would have to compare its values,
    for which the host waits for a GPU.
    """

    def _apply(self, fn, recurse=True):
        with torch.inference_mode(False):
            _own(self)
            return super()._apply(fn, recurse)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of `nn.Module`; tensors that were made in inference mode are copied where they are assigned."""
        with torch.inference_mode(False):
            _own(self)
            if assign:
                ordinary = {name: x.clone() if x.is_inference() else x for name, x in state_dict.items()}
                state_dict = _with_metadata(ordinary, state_dict)
            return super().load_state_dict(state_dict, strict, assign)

    def __deepcopy__(self, memo: dict) -> "Counted":
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        with torch.inference_mode(False):
            made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made


def _with_metadata(state, like):
    """`state` as a mapping that may hold what torch notes about the versions of modules."""
    made = OrderedDict(state)
    if hasattr(like, "_metadata"):
        made._metadata = like._metadata  # type: ignore[attr-defined]  # as torch does
    return made


def _own(network):
    """Replace the parameters of `network` that are inference tensors by ordinary copies."""
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_inference():
                ordinary = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(module, name, ordinary)
