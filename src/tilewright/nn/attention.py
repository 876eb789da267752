"""Attention over a pattern for models that are not of this package: plans by grid, type and device."""

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from tilewright.attention.masks import Bias
from tilewright.core import _internals, apart, arguments, operators, precision
from tilewright.core.errors import ConfigError, PatternError
from tilewright.core.provenance import sha256_arrays
from tilewright.networks import attention_sites
from tilewright.networks.attentions import tilewright as planning
from tilewright.networks.plans import Plans
from tilewright.nn import patterns

if TYPE_CHECKING:
    from tilewright.attention.plan import Plan
    from tilewright.graph import Graph

# Multiple of the head dims that every executor has.
HEAD_DIM_STEP = 8

# Patterns with their plans, by content. Models, layers and copies with equal patterns share them, while one lives.
_SITES: WeakValueDictionary = WeakValueDictionary()


def site_of(graph: "Graph", heads: int, head_dim: int, planned: Plans | None = None) -> attention_sites.Site:
    """The shared `Site` of a pattern for so many heads: its order, its graph, its plans."""
    planned = Plans() if planned is None else planned
    key = graph.id, sha256_arrays(np.asarray(graph.row_hint)), heads, head_dim, repr(planned)
    found = _SITES.get(key)
    if found is None:
        made = attention_sites.Site("tilewright", lambda: graph, heads, head_dim, native=None, planned=planned)
        found = _SITES.setdefault(key, made)
    return found


class Patterned:
    """Attention over one pattern, whatever the grid. It holds no parameters; models and their layers may share it.

    pattern: as `patterns.graph` takes it. n_special: tokens before the grid. heads: of the model. full: whether the
    pattern is ``full``, by name.
    """

    # A compiler guards that no method of an object is one of its own, but where it can have none.
    __slots__ = (
        *("pattern", "heads", "head_dim", "n_special", "scale", "plans", "full"),
        *("_padding", "_by_grid", "_orders", "_plans", "_digests"),
    )

    def __init__(
        self,
        pattern: Any,
        heads: int,
        head_dim: int,
        n_special: int,
        *,
        scale: float | None = None,
        plans: Plans | None = None,
    ):
        """Raises `UnknownNameError` for an unknown pattern, `PatternError` for one told of other special tokens."""
        if isinstance(pattern, str):
            told = patterns.special(pattern)
            if told is not None and told != n_special:
                patterns.graph(pattern, (1, 1), n_special)
        self.pattern, self.heads, self.head_dim, self.n_special = pattern, heads, head_dim, n_special
        self.scale = head_dim**-0.5 if scale is None else scale
        self.plans = plans
        # Torch's dense attention then runs, with no plan.
        self.full = isinstance(pattern, str) and patterns.parse(pattern)[0] is patterns.NAMED[patterns.FULL][1]
        # Zeros at the end of a head, for plans.
        self._padding = -head_dim % HEAD_DIM_STEP
        self._by_grid: dict[tuple[int, int], attention_sites.Site] = {}
        self._orders: dict[tuple, torch.Tensor | None] = {}
        self._plans: dict[tuple, Any] = {}
        self._digests: dict[tuple, str] = {}

    def site(self, grid: Any) -> attention_sites.Site:
        """The `Site` for a grid of ``(rows, columns)``. Raises as `patterns.graph`."""
        if grid not in self._by_grid:
            graph = patterns.graph(self.pattern, grid, self.n_special)
            self._by_grid[grid] = site_of(graph, self.heads, self.head_dim + self._padding, self.plans)
        return self._by_grid[grid]

    def plan(self, grid: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Any:
        """The plan for a grid, without a bias; tokens in plan order where it is called with ``ordered=True``."""
        key = grid, dtype, device
        if torch.compiler.is_dynamo_compiling():
            self._ready("digest", *key)
        elif key not in self._plans:
            self._plans[key] = self._plan(*key)
        return self._plans[key]

    def digest(self, grid: tuple[int, int], dtype: torch.dtype, device: torch.device) -> str:
        """The digest of a plan, by which compiled code is guarded, and calls it."""
        key = grid, dtype, device
        if torch.compiler.is_dynamo_compiling():
            self._ready("digest", *key)
        elif key not in self._digests:
            self._digests[key] = self.plan(*key).digest()
        return self._digests[key]

    def orders(self, grid: Any, device: torch.device) -> torch.Tensor | None:
        """`Site.orders` of a grid on a device."""
        key = grid, device
        if torch.compiler.is_dynamo_compiling():
            self._ready("orders", *key)
        elif key not in self._orders:
            site = self.site(grid)
            self._orders[key] = None if site.order is None else attention_sites.resident(site, "orders", device)
        return self._orders[key]

    @_internals.constant
    def _ready(self, name, *arguments):
        """Have the method `name` make what it keeps, before a compiler looks for that: it cannot follow how."""
        apart.made(getattr(self, name), *arguments)
        return True

    def _plan(self, grid, dtype, device):
        found = apart.made(planning._plan, self.site(grid), dtype, device)
        if self.scale != (self.head_dim + self._padding) ** -0.5:
            # The schedule is the same whatever the scale.
            found = copy_with_scale(found, self.scale)
        return found

    def enter(self, x: Any, grid: Any) -> torch.Tensor:
        """Tokens x [B, N, C] in plan order."""
        orders = None if self.full else self.orders(grid, x.device)
        return x if orders is None else x.index_select(1, orders[0])

    def leave(self, x: torch.Tensor, grid: Any) -> torch.Tensor:
        """Undo `enter`."""
        orders = None if self.full else self.orders(grid, x.device)
        return x if orders is None else x.index_select(1, orders[1])

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        grid: tuple[int, int],
        *,
        bias: Any = None,
        ordered: bool = False,
    ) -> torch.Tensor:
        """Attention of q, k, v [B, H, N, D] over the pattern of a grid, [B, H, N, D].

        bias: a `LayerBias`, or None. ordered: tokens stand in plan order. Raises `PatternError` for other sizes.
        """
        n = self.n_special + grid[0] * grid[1]
        if q.shape[2] != n:
            raise PatternError(
                f"expected {n} tokens, {self.n_special} special and a grid of {grid[0]} x {grid[1]}, found {q.shape[2]}"
            )
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = precision.cast(q, k, v)
        if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
            raise PatternError(
                "expected queries, keys and values of one dtype and device, found "
                + ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
            )
        if self.full:
            dense = None if bias is None else bias.dense(q.dtype)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=dense, scale=self.scale)
        if self._padding:
            # They add nothing to scores.
            q, k, v = (F.pad(x, (0, self._padding)) for x in (q, k, v))
        if bias is not None:
            found, values = bias.planned(self.plan(grid, q.dtype, q.device))
            out = found(q, k, v, ordered=ordered, bias=values)
        elif torch.compiler.is_dynamo_compiling():
            out = operators.traced(q, k, v, self.digest(grid, q.dtype, q.device), ordered, None, None)
        else:
            out = self.plan(grid, q.dtype, q.device)(q, k, v, ordered=ordered)
        return out[..., : self.head_dim] if self._padding else out

    def of_projection(self, x: torch.Tensor, grid: tuple[int, int], *, ordered: bool = False) -> torch.Tensor:
        """`attend` of the queries, keys and values that one projection makes, [B, N, 3 H D], at less cost for the host:
        [B, N, H D]."""
        # A compiler sees views.
        if not (torch.compiler.is_dynamo_compiling() or self._padding or _internals.any_autocast()):
            plan = self._plans.get((grid, x.dtype, x.device))
            if plan is not None and x.shape[1] == plan.shape[0] and x.is_contiguous():
                return plan.of_projection(x, ordered=ordered)
        q, k, v = x.unflatten(2, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.attend(q, k, v, grid, ordered=ordered).transpose(1, 2).flatten(2)

    def __deepcopy__(self, memo: dict) -> "Patterned":
        # Plans do not change: copies of a model share them.
        return self

    def __reduce__(self) -> tuple:
        # Plans are of one process, and on disk.
        made = functools.partial(Patterned, scale=self.scale, plans=self.plans)
        return made, (self.pattern, self.heads, self.head_dim, self.n_special)


def copy_with_scale(plan: "Plan", scale: float) -> "Plan":
    """`plan` with another scale of the scores: same order, blocks and schedule."""
    made = copy.copy(plan)
    type(plan).__init__(
        made, plan.graph, plan.blocks, plan.profiles, plan.schedule, bias=plan.bias, scale=scale, reorder=plan.reorder
    )
    return made


class BiasPlans:
    """Plans that take the values of a layer's bias in each call, by the plan without one and the bias's form."""

    def __init__(self):
        """Nothing is made before the first call."""
        self._taking = {}

    def __reduce__(self) -> tuple[type, tuple]:
        # Plans are of one process, and a copy of a layer may get another index.
        return BiasPlans, ()

    def taking(self, plan: "Plan", bias: Any) -> "Plan":
        """`plan` for values of a `LayerBias` or `PairBias` that each call gives.

        A program is exported after a call with such tokens. Raises `PatternError` where there was none.
        """
        key = plan, type(bias).__name__
        # A compiler cannot follow how a plan is made. It does not see who looks.
        if torch.compiler.is_dynamo_compiling() and not self._has(key[1]):
            bias.ready(self, plan)
        return self._taking[key] if key in self._taking else self._made(key, bias)

    @_internals.constant
    def _has(self, name):
        return any(known == name for _, known in self._taking)

    @_internals.constant
    def of_pairs(self, plan: str, shape: tuple[int, ...]) -> bool:
        """Make the plan for a `PairBias` of a shape; plan: its name."""
        self.made(plan, PairBias(shape, self))
        return True

    def made(self, plan: str, bias: Any) -> None:
        """Make the plan for a bias; plan: its name."""
        self._made((operators.named(plan), type(bias).__name__), bias)

    @_internals.uncompiled
    def _made(self, key, bias):
        if operators.exporting():
            # Tables have no values while a program is traced.
            raise PatternError("bias table: call the module once with tokens of this shape, then export it")
        # Values of its own, of no transformed or inference tensor: each call gives others.
        made = apart.made(lambda: key[0].with_bias(bias.empty()))
        # Known before a compiler asks: what it makes of one layer serves all whose plans are equal.
        made.digest()
        return self._taking.setdefault(key, made)


class LayerBias:
    """The relative-position bias of one layer: one plan, which takes the table in every call.

    Subclasses have ``table() -> tensor [H, T]``, read in every call; ``index(rows, cols) -> int array``, places of
    pairs in it, by token numbers in the model's own order; ``pairs() -> [H, N, N]``, of all pairs, for ``full``.
    """

    table: Callable[[], torch.Tensor]
    index: Callable[[NDArray, NDArray], NDArray]
    pairs: Callable[[], torch.Tensor]

    def __init__(self, source: Any, plans: Any):
        """source: the module that has the table, of this call: a replica's own. plans: `BiasPlans` of the layer."""
        self.source, self._plans = source, plans

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The bias [1, H, N, N] of all pairs."""
        return self.pairs().to(dtype)[None]

    def empty(self) -> Any:
        """A bias of this form."""
        return Bias(torch.zeros(self.table().shape, dtype=torch.float32, device="cpu"), self.index)

    def ready(self, plans: Any, plan: "Plan") -> None:
        """Have the module's `_plan_bias` make the plan for its bias, where it has one."""
        made = getattr(self.source, "_plan_bias", None)
        if made is not None:
            made(plan._name)

    def planned(self, plan: "Plan") -> Any:
        """``(plan that takes a table, the table)``."""
        return self._plans.taking(plan, self), self.table()


class PairBias:
    """A bias [H, N, N] that a model makes in every call: one plan takes it."""

    def __init__(self, source: tuple[int, ...], plans: Any, values: Any = None):
        """source: the shape. plans: `BiasPlans` of the layer. values: of this call."""
        self.source, self._plans, self._values = source, plans, values

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The bias [1, H, N, N]."""
        return self._values.to(dtype)[None]

    def empty(self) -> Any:
        """A bias of this form."""
        return torch.zeros(self.source, dtype=torch.float32, device="cpu")

    def ready(self, plans: Any, plan: "Plan") -> None:
        """Have `plans` make the plan for a bias of this shape."""
        plans.of_pairs(plan._name, self.source)

    def planned(self, plan: "Plan") -> Any:
        """``(plan that takes a bias, the bias)``."""
        return self._plans.taking(plan, self), self._values


class SparseAttention(nn.Module):
    """Multi-head self-attention over a pattern, with the parameters of timm's ``Attention`` under the same names.

    Weights are random. Plans are made in the first call and kept on disk. Tokens x [B, N, dim] give [B, N, dim]:
    special ones first, then the grid, row by row.

    Parameters
    ----------
    dim, heads : int
        Channels and heads.
    pattern : str, Graph, matrix or callable
        A name of `patterns.NAMED`, with ``-g<special tokens>``, a `Graph`, a matrix [N, N] or a ``callable(grid,
        special)``.
    grid : (int, int)
        Rows and columns of tokens, unless a call says otherwise.
    special : int, optional
        Tokens before the grid. None takes the number in the pattern's name, or what a matrix leaves over.
    qkv_bias, proj_bias : bool
        Whether the projections have biases.
    qk_norm : bool
        Whether heads of queries and keys are normalised, by `norm_layer`.
    norm_layer : callable, optional
        Class of the norm; the default is `nn.LayerNorm`.
    bias : bool
        Whether there is a relative-position bias: ``relative_position_bias_table``, a table [heads, 2 rows - 1, 2
        columns - 1] and an entry for pairs with a special token.
    scale : float, optional
        Of the scores; the default is ``(dim // heads) ** -0.5``.
    plans : networks.plans.Plans, optional
        Order, solver and tiles.
    device, dtype
        Of the parameters, floats of 16 bits or more.

    Raises
    ------
    TilewrightError
        For a pattern that does not fit the grid, and for arguments out of range.

    Examples
    --------
    >>> import torch
    >>> from tilewright.nn import SparseAttention
    >>> attention = SparseAttention(64, 2, pattern="window-3-g1", grid=(8, 8))
    >>> attention(torch.randn(1, 65, 64)).shape
    torch.Size([1, 65, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        pattern: Any = "window-7-g1",
        grid: tuple[int, int] = (64, 64),
        *,
        special: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        proj_bias: bool = True,
        norm_layer: Any = None,
        bias: bool = False,
        scale: float | None = None,
        plans: Plans | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Refuses what does not fit before anything is computed."""
        super().__init__()
        dim, heads = arguments.whole("dim", dim), arguments.whole("heads", heads)
        if dim % heads:
            raise ConfigError(f"dim: expected a multiple of the {heads} heads, found {dim}")
        flags = {"qkv_bias": qkv_bias, "qk_norm": qk_norm, "proj_bias": proj_bias, "bias": bias}
        for name, value in flags.items():
            arguments.flag(name, value)
        special = None if special is None else arguments.whole("special", special, least=0)
        scale = None if scale is None else arguments.number("scale", scale)
        arguments.of_kind(Plans, "Plans", plans=plans)
        if norm_layer is not None and not callable(norm_layer):
            raise ConfigError(f"norm_layer: expected a class of modules, found {arguments.shown(norm_layer)}")
        where = {"device": arguments.device("device", device), "dtype": dtype}
        arguments.of_kind(torch.dtype, "a dtype of torch", dtype=dtype)
        if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
            raise ConfigError(f"dtype: expected floats of 16 bits or more, found {dtype}")
        self.grid = _grid(grid)
        n_special = _special(pattern, self.grid) if special is None else special
        self.num_heads, self.head_dim = heads, dim // heads
        self.attention = Patterned(pattern, heads, self.head_dim, n_special, scale=scale, plans=plans)
        # Now, so that a pattern that does not fit is refused before anything is computed.
        self.attention.site(self.grid)
        norm = functools.partial(norm_layer or nn.LayerNorm, self.head_dim, **where)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **where)
        self.q_norm, self.k_norm = (norm() if qk_norm else nn.Identity() for _ in range(2))
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **where)
        self._plans = BiasPlans()
        if bias:
            entries = (2 * self.grid[0] - 1) * (2 * self.grid[1] - 1) + 1
            self.relative_position_bias_table = nn.Parameter(torch.empty(entries, heads, **where))
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.has_bias = bias
        self._plain = not (bias or qk_norm)

    def forward(self, x: torch.Tensor, grid: Any = None, *, ordered: Any = False) -> Any:
        """Attention over tokens x [B, N, dim]. grid: of this call. ordered: tokens stand in the order of `enter`.

        Raises `PatternError` for another number of tokens, for a grid other than the bias table's, and for tensors
        that need a gradient where the plan has none.
        """
        grid = self.grid if grid is None else _grid(grid)
        if self.has_bias and grid != self.grid:
            raise PatternError(f"grid: expected the grid of the bias table, {self.grid}, found {grid}")
        made = self.qkv(x)
        if self._plain:
            return self.proj(self.attention.of_projection(made, grid, ordered=ordered))
        q, k, v = made.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        bias = _OwnBias(self, self._plans) if self.has_bias else None
        out = self.attention.attend(q, k, v, grid, bias=bias, ordered=ordered)
        return self.proj(out.transpose(1, 2).flatten(2))

    def enter(self, x: Any, grid: tuple[int, ...] | None = None) -> torch.Tensor:
        """Tokens [B, N, C] in plan order: once, before several layers that are called with ``ordered=True``."""
        return self.attention.enter(x, self.grid if grid is None else _grid(grid))

    def leave(self, x: torch.Tensor, grid: tuple[int, ...] | None = None) -> torch.Tensor:
        """Undo `enter`."""
        return self.attention.leave(x, self.grid if grid is None else _grid(grid))

    @_internals.constant
    def _plan_bias(self, plan):
        self._plans.made(plan, _OwnBias(self, self._plans))
        return True

    def bias_index(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """Places of (query, key) pairs, int arrays that broadcast, in the bias table; the last is of special tokens."""
        (height, width), g = self.grid, self.attention.n_special
        (qy, qx), (ky, kx) = (np.divmod(np.asarray(at, np.int64) - g, width) for at in (rows, cols))
        place = (qy - ky + height - 1) * (2 * width - 1) + qx - kx + width - 1
        inside = (np.asarray(rows) >= g) & (np.asarray(cols) >= g)
        return np.where(inside, place, (2 * height - 1) * (2 * width - 1))


class _OwnBias(LayerBias):
    """Of a `SparseAttention`."""

    def table(self):
        return self.source.relative_position_bias_table.T

    def index(self, rows, cols):
        return self.source.bias_index(rows, cols)

    def pairs(self):
        layer = self.source
        at = np.arange(layer.attention.n_special + layer.grid[0] * layer.grid[1])
        table = layer.relative_position_bias_table
        return table[torch.from_numpy(layer.bias_index(at[:, None], at)).to(table.device)].movedim(-1, 0)


def _grid(grid):
    try:
        return arguments.sizes("grid", grid, 2)
    except ConfigError:
        raise ConfigError(f"grid: expected (rows, columns) of tokens, found {arguments.shown(grid)}") from None


def _special(pattern, grid):
    """Special tokens of a pattern by its name, or by what its matrix has more than the grid."""
    if isinstance(pattern, str):
        return patterns.special(pattern) or 0
    # Others than a matrix are refused where it becomes a graph.
    matrix = not getattr(pattern, "is_nested", False) and len(getattr(pattern, "shape", ())) == 2
    return max(0, pattern.shape[0] - grid[0] * grid[1]) if matrix else 0
