"""``torch.ops.tilewright.attend_at``: the attention of a layer with a bias, as compiled networks call it.

A compiler cannot follow how a layer notices that its bias was written to. To it the layer is one operator, which gets
the bias and the tables that it is made of in every call; whether they changed is seen when it runs.
"""

import uuid
import weakref

import torch
from torch import library

from tilewright.core.errors import ArtifactError, PatternError

# Layers by name; names are of one process, and no other process has them.
_LAYERS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()

_LIBRARY = library.Library("tilewright", "FRAGMENT")
_LIBRARY.define(
    "attend_at(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor[] tables, str layer) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def register(layer: torch.nn.Module) -> str:
    """Make `layer`, a `attention_sites.Attend`, known to the operator; return its name."""
    name = uuid.uuid4().hex
    _LAYERS[name] = layer
    return name


def _attend(q, k, v, bias, tables, layer):
    found = _LAYERS.get(layer)
    if found is None:
        raise ArtifactError(
            f"this program calls the attention {layer}, which is not here: compile or export the network in the "
            "process that runs it, and keep the network for as long as the program is run"
        )
    return _by_token(found.prepared(q.dtype, q.device, bias, tables)(q, k, v))


def _by_token(out):
    """The result [B, H, N, D] with the heads of a token side by side, as compilers are promised."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _like_result(q, k, v, bias, tables, layer):
    batch, heads, n, dim = q.shape
    return q.new_empty(batch, n, heads, dim).transpose(1, 2)


def _backward(ctx, *_):
    raise PatternError("this attention has no backward: train with attention='dense', which has the same weights")


_LIBRARY.impl("attend_at", _attend, "CompositeExplicitAutograd")
library.register_fake("tilewright::attend_at", _like_result, lib=_LIBRARY)
library.register_autograd("tilewright::attend_at", _backward, lib=_LIBRARY)
