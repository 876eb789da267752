"""``torch.ops.tilewright.attend``: plans as an operator, for ``torch.compile``, ``torch.export`` and tracing.

The operator names its plan by a digest of the plan's content, which holds in every process. It is defined and
implemented by hand, which costs the host less in each call than the decorator for custom operators
(docs/decisions/0009).
"""

import itertools
import weakref

import torch
from torch import Tensor, library
from torch.compiler import is_compiling

from tilewright.core._internals import dispatch_depth
from tilewright.core.errors import ArtifactError

# Plans by names of this process, and those that were called by digest. A plan lives as long as its owner holds it.
_LIVE, _CALLED = weakref.WeakValueDictionary(), weakref.WeakValueDictionary()
_NUMBERS = itertools.count()

_LIBRARY = library.Library("tilewright", "DEF")
_LIBRARY.define(
    "attend(Tensor q, Tensor k, Tensor v, str plan, bool ordered) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def register(plan):
    """Make `plan` known to the operator; return a name that no other plan of this process has or had.

    The operator is given ``plan.digest()`` and calls ``plan.run(q, k, v, ordered)`` and ``plan.like_result(q, k, v)``.
    """
    name = f"plan {next(_NUMBERS)}"
    _LIVE[name] = plan
    return name


def watched(x):
    """True where a call on tensor `x` must go through the operator: it is compiled, exported or traced."""
    return is_compiling() or type(x) is not Tensor or dispatch_depth() > 0


def _plan(digest):
    """A plan of this digest: equal plans stand for each other."""
    found = _CALLED.get(digest)
    if found is None:
        # Digests are computed here, not when plans are made: few plans are ever called by them.
        live = filter(None, (reference() for reference in _LIVE.valuerefs()))
        found = next((plan for plan in live if plan.digest() == digest), None)
        if found is None:
            raise ArtifactError(
                f"this program calls the plan {digest}, which is not here: before running the program, read the plan's "
                "file with tilewright.load(path), and keep the plan for as long as the program is run"
            )
        _CALLED[digest] = found
    return found


def _attend(q, k, v, plan, ordered):
    return _plan(plan).run(q, k, v, ordered)


# For tensors of every device: the plan's executor refuses those of another device than its own.
_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")


@library.register_fake("tilewright::attend", lib=_LIBRARY)
def _(q, k, v, plan, ordered):
    return _plan(plan).like_result(q, k, v)
