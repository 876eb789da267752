"""``torch.ops.tilewright.attend``: plans as an operator, for ``torch.compile``, ``torch.export`` and tracing.

The operator names its plan by a number. It is defined and implemented by hand, which costs the host less in each call
than the decorator for custom operators (docs/decisions/0009).
"""

import itertools
import weakref

import torch
from torch import Tensor, library
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_compiling

from tilewright.errors import ArtifactError

# A plan lives as long as its owner holds it.
_PLANS = weakref.WeakValueDictionary()
_HANDLES = itertools.count()

_LIBRARY = library.Library("tilewright", "DEF")
_LIBRARY.define(
    "attend(Tensor q, Tensor k, Tensor v, int plan, bool ordered) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def register(plan):
    """The number that the operator knows `plan` by; it calls ``run(q, k, v, ordered)`` and ``like_result(q, k, v)``."""
    handle = next(_HANDLES)
    _PLANS[handle] = plan
    return handle


def watched(x):
    """True where a call on tensor `x` must go through the operator: it is compiled, exported or traced."""
    return is_compiling() or type(x) is not Tensor or _len_torch_dispatch_stack() > 0


def _plan(handle):
    if handle not in _PLANS:
        raise ArtifactError("this program calls a plan that is gone: keep the plan for as long as the program is run")
    return _PLANS[handle]


def _attend(q, k, v, plan, ordered):
    return _plan(plan).run(q, k, v, ordered)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attend", _attend, _key)


@library.register_fake("tilewright::attend", lib=_LIBRARY)
def _(q, k, v, plan, ordered):
    return _plan(plan).like_result(q, k, v)
