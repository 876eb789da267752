"""Where a network attends: one pattern, shared by the layers of a stage, and the attention that was chosen for it."""

import uuid
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import library, nn

from tilewright import devices
from tilewright.core import _internals, apart, transforms
from tilewright.core.errors import ArtifactError, ConfigError, PatternError
from tilewright.core.registry import member
from tilewright.graph import Graph
from tilewright.networks import attentions
from tilewright.networks.plans import Plans

# ``watch(run, arguments)`` in place of each attention that is called, or None: by it the study takes their time.
WATCH: ContextVar[Any] = ContextVar("watch", default=None)


def timed(run: Callable, *arguments: Any) -> Any:
    """``run(*arguments)``, through `WATCH` where somebody does."""
    # A compiled network is not watched: looking for that would cut it in two at each attention.
    watch = None if torch.compiler.is_compiling() else WATCH.get()
    return run(*arguments) if watch is None else watch(run, arguments)


def without_backward(call: Callable, *tensors: torch.Tensor) -> torch.Tensor:
    """``call(*tensors)``; where gradients are recorded the result is right, and asking for its gradient an error."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _Forward.apply(call, *tensors)
    return call(*tensors)


class _Forward(torch.autograd.Function):
    """What `without_backward` records."""

    @staticmethod
    def forward(ctx, call, *tensors):
        """Call."""
        return call(*tensors)

    @staticmethod
    def backward(ctx, *_):
        """Raise `PatternError`."""
        raise PatternError(
            "attention 'tilewright' has no backward: train with attention='dense', which has the same weights"
        )


def resident(owner: Any, name: str, device: torch.device | str) -> torch.Tensor:
    """The tensor ``owner.name`` on `device`, copied there once: a copy in every call would wait for the device.

    owner: keeps its copies in a dict, ``copies``.
    """
    if (name, device) not in owner.copies:
        owner.copies[name, device] = apart.made(lambda: _internals.at_rest(getattr(owner, name).to(device)))
    return owner.copies[name, device]


def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Attention to everything, the same in every mode: q [B, H, M, D], k, v [B, H, N, D], bias [H, M, N] or None."""
    return timed(partial(F.scaled_dot_product_attention, attn_mask=bias), q, k, v)


@dataclass(eq=False)
class Site:
    """One sparse pattern of a network and how it is attended to.

    attention: of `attentions.NAMES`. build: makes the `Graph`, in the model's own token order; called when needed.
    native: the published formulation, ``native(q, k, v, bias) -> out`` with bias [H, n] or None.
    bias_index: for patterns with a relative-position bias, ``bias_index(rows, cols)`` of each (query, key) pair in a
        head's bias vector, for int64 tensors that broadcast and of operations that torch can compile.
    native_layout: whether the tokens of ``native`` stand in an order of its own, other than that of the graph.
    planned: how plans are made; not to be changed after the first call.
    """

    attention: str
    build: Callable[[], Graph]
    heads: int
    head_dim: int
    native: Callable | None
    bias_index: Callable | None = None
    native_layout: bool = False
    planned: Plans = field(default_factory=Plans)
    plans: dict = field(default_factory=dict)
    copies: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A plain variable: ``torch.compile`` cannot follow the import of a member.
        self.member = member(attentions.__name__, "attention", self.attention, attentions.NAMES)

    @cached_property
    def graph(self) -> Graph:
        """The pattern in the model's own order."""
        return apart.made(self.build)

    @cached_property
    def order(self) -> torch.Tensor:
        """Order in which the tokens stand while in this stage (``order[new] = old``, int64), or None: their own."""
        return apart.made(self.member.order, self)

    @cached_property
    def ordered(self) -> Graph:
        """The pattern with its tokens in `order`."""
        return self.graph if self.order is None else self.graph.reordered(*2 * [self.order.numpy()])

    @cached_property
    def _back(self):
        return apart.made(torch.argsort, self.order)

    @cached_property
    def orders(self) -> torch.Tensor:
        """`order`, where there is one, and the way back, int64 [2, N]."""
        return apart.made(lambda: torch.stack((self.order, self._back)))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens x [B, N, C] in the site's order; once, at the entry of a stage."""
        return x if self.order is None else x.index_select(1, resident(self, "order", x.device))

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `enter`, at the exit of the stage."""
        return x if self.order is None else x.index_select(1, resident(self, "_back", x.device))

    def layer(self) -> "Attend":
        """A new `Attend` over this site."""
        return Attend(self)

    def __deepcopy__(self, memo: dict) -> "Site":
        # Copies of a network share its patterns and plans.
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError("networks of this package cannot be pickled: save their options and state_dict()")


class Attend(nn.Module):
    """The attention of one layer at a site; it has no parameters of its own."""

    @property
    def site(self) -> "Site":
        """Where it attends."""
        return self._site[0]

    def __init__(self, site: Site):
        """Attend at `site`; nothing is prepared before the first call."""
        super().__init__()
        # In a tuple: a site is no module, and its plans are not part of any state.
        self._site = (site,)
        # What was prepared last: ``(dtype, device), the tables as they were, run(q, k, v)``.
        self._prepared: tuple = None, (), None
        # Likewise, of a bias that is differentiated: ``(dtype, device), run(q, k, v, bias)``.
        self._taking: tuple = None, None
        self._name = _registered(self)

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        super().__setstate__(state)
        # A copy is a layer that compiled code calls by its own name.
        self._name = _registered(self)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | Callable | None = None,
        tables: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attention over the site's pattern: q, k, v [B, H, N, D] with tokens in the site's order.

        bias: [H, n], the layer's relative-position bias with the zero entry last, or a function that makes it of
        tables, the parameters that decide it. On a CPU it is prepared once, and again when the values of a table are
        others. A GPU would be waited for: there it is made in every call, but for members that know a table by its
        version (`attentions`), which does not tell what was written through ``.data``. Where a table needs a gradient,
        it gets one from the members that have it, and the bias is made in every call. A layer that is to be compiled
        whole is called once before, so that what takes it is there.

        Compiled code sees one operator, or what the member computes where gradients pass through it.
        """
        if tables is None:
            tables = (bias,) if isinstance(bias, torch.Tensor) else ()
        if bias is not None and (self._reads(q.device) or _recorded(q, k, v, tables)):
            run = self._differentiable(q.dtype, q.device)
            if run is not None:
                return timed(run, q, k, v, bias() if callable(bias) else bias)
        if bias is not None and torch.compiler.is_compiling():
            return self._traced(q, k, v, bias() if callable(bias) else bias, tables)
        return timed(self.prepared(q.dtype, q.device, bias, tables), q, k, v)

    def _reads(self, device):
        """Whether each call reads the bias anew."""
        (site,) = self._site
        return transforms.transformed() or (not compared(device) and getattr(site.member, "READS", False))

    def _differentiable(self, dtype, device):
        """``run(q, k, v, bias)`` of a member that differentiates the bias there, else None."""
        known, run = self._taking
        return run if known == (dtype, device) else self._made_differentiable(dtype, device)

    @_internals.uncompiled
    def _made_differentiable(self, dtype, device):
        taking = getattr(self.site.member, "taking", None)
        run = None if taking is None else taking(self.site, dtype, device)
        self._taking = (dtype, device), run
        return run

    def prepared(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        bias: torch.Tensor | Callable | None,
        tables: Sequence[torch.Tensor],
    ) -> Callable:
        """``run(q, k, v)`` for tensors of `dtype` on `device`; bias and tables as `forward` takes them."""
        known, remembered, run = self._prepared
        if known != (dtype, device) or not same(tables, remembered):
            remembered = [Table(table) for table in tables]
            made = bias() if callable(bias) else bias
            # A copy: what was prepared must not change with what is written later.
            made = None if made is None else made.detach().clone().to(dtype)
            run = _made(self.site, made, dtype, device)
            # In one step, for other threads.
            self._prepared = (dtype, device), remembered, run
        return run

    def _traced(self, q, k, v, bias, tables):
        """The attention as a compiler sees it. It cannot follow the comparison of tables."""
        (site,) = self._site
        if site.member.TRACED == "operator":
            return torch.ops.tilewright.attend_at(q, k, v, bias.detach(), [x.detach() for x in tables], self._name)
        if site.member.TRACED == "formula":
            return site.native(q, k, v, bias.to(q.dtype))  # type: ignore[misc]  # sites of networks have one
        if site.member.TRACED == "everything":
            return F.scaled_dot_product_attention(q, k, v)
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            # What torch looks into, with the bias of each call.
            return site.member.prepare(site, bias.to(q.dtype), q.dtype, q.device)(q, k, v)
        return self._untraced(q, k, v, bias, tables)

    @_internals.uncompiled
    def _untraced(self, q, k, v, bias, tables):
        return self.prepared(q.dtype, q.device, bias, tables)(q, k, v)


@_internals.uncompiled
def _made(site, bias, dtype, device):
    """What a member prepares: whoever compiles before the first call does not trace how plans are made."""
    return site.member.prepare(site, bias, dtype, device)


def compared(device: torch.device) -> bool:
    """Whether tables on a device are compared by their values: a GPU would be waited for."""
    return _compared(device.type)


# By kinds of devices: each layer asks in each call.
_COMPARED: dict[str, bool] = {}


# Compiled code asks, too, and imports nothing.
@_internals.constant
def _compared(kind):
    if kind not in _COMPARED:
        _COMPARED[kind] = kind not in devices.NAMES or not devices.facts(kind).CUDA
    return _COMPARED[kind]


def _recorded(q, k, v, tables):
    """Whether a bias is given in the call: its tables need a gradient, or what a compiler sees as one operator does."""
    if not torch.is_grad_enabled():
        return False
    needed = any(table.requires_grad for table in tables)
    return needed or (torch.compiler.is_compiling() and any(x.requires_grad for x in (q, k, v)))


class Table:
    """A table as it was when something was made of it.

    Its values are held where they are compared. Elsewhere its memory is, so that no other table gets that address.
    """

    def __init__(self, table: torch.Tensor):
        self.compared = compared(table.device) or table.is_inference()
        self.held = table.detach().clone() if self.compared else table.detach()
        # Inference tensors count no versions.
        self.version = None if self.compared else table._version

    def unchanged(self, table: torch.Tensor) -> bool:
        """Whether `table` has the values that it had, or on a GPU is the one that is held and was not written to."""
        if table.dtype != self.held.dtype or table.device != self.held.device:
            return False
        if not self.compared:
            return not table.is_inference() and table._version == self.version and table.is_set_to(self.held)
        # To compare values waits for a GPU, which is forbidden in a capture. The networks of this package hold no
        # inference tensors, see `_parameters.Counted`.
        return (table.is_cuda and torch.cuda.is_current_stream_capturing()) or torch.equal(table, self.held)


def same(tables: Sequence[torch.Tensor], remembered: "Sequence[Table]") -> bool:
    """Whether `tables` are those that were `remembered`, and none was written to."""
    return len(tables) == len(remembered) and all(old.unchanged(x) for old, x in zip(remembered, tables, strict=True))


# ``torch.ops.tilewright.attend_at``: the attention of a layer with a bias, as compiled networks call it. A compiler
# cannot follow how a layer notices that its bias was written to. To it the layer is one operator, which gets the bias
# and the tables that it is made of in every call; whether they changed is seen when it runs.
#
# Layers by name; names are of one process, and no other process has them.
_LAYERS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()

_LIBRARY = library.Library("tilewright", "FRAGMENT")


def _registered(layer):
    """Make `layer`, an `Attend`, known to the operator; return its name."""
    name = uuid.uuid4().hex
    _LAYERS[name] = layer
    return name


def _attend(q, k, v, bias, tables, layer):
    found = _LAYERS.get(layer)
    if found is None:
        raise ArtifactError(
            f"this program calls the attention {layer}, which is not in this process: compile or export the network "
            "here, and keep it while the program runs"
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


transforms.define(
    _LIBRARY,
    "attend_at(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor[] tables, str layer) -> Tensor",
    _attend,
    _like_result,
)
transforms.differentiate("attend_at", lambda *_: None, _backward)
