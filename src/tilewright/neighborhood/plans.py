"""`plan`: what is chosen once for a grid and a window."""

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from tilewright.core import arguments
from tilewright.core.caches import Recent
from tilewright.core.errors import DeviceError, PatternError
from tilewright.neighborhood import operators
from tilewright.neighborhood import rule as rules
from tilewright.neighborhood.attention import DTYPES, again, check_bound, check_tensors, run
from tilewright.neighborhood.backends import LAUNCHES
from tilewright.neighborhood.boxes import Choice
from tilewright.neighborhood.rule import Rule


def plan(
    grid: int | tuple[int, ...],
    window: int | tuple[int, ...],
    *,
    heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    stride: int | tuple[int, ...] = 1,
    dilation: int | tuple[int, ...] = 1,
    causal: bool | tuple[bool, ...] = False,
    border: str = "shift",
    kv_heads: int | None = None,
    scale: float | None = None,
    bound: float | None = None,
) -> "NeighborhoodPlan":
    """Plan neighbourhood attention of one grid, in milliseconds at any size.

    Parameters
    ----------
    grid : int or tuple of int
        Tokens along each axis.
    window : int or tuple of int
        As `stride`, `dilation`, `causal` and `border` see `attend`.
    heads, head_dim : int
        Of the queries.
    dtype : torch.dtype
        Of q, k and v: float32, bfloat16 or float16.
    device : str or torch.device
        Where they lie.
    stride, dilation : int or tuple of int
        See `attend`.
    causal : bool or tuple of bool
        See `attend`.
    border : str
        See `attend`.
    kv_heads : int, optional
        Heads of k and v, a divisor of `heads`; the default is as many.
    scale : float, optional
        Factor of the scores; the default is ``head_dim ** -0.5``.
    bound : float, optional
        See `attend`.

    Returns
    -------
    NeighborhoodPlan

    Raises
    ------
    PatternError, DeviceError
        For a window that does not fit the grid, and for arguments that are no such numbers.

    Examples
    --------
    >>> import torch
    >>> import tilewright as tw
    >>> plan = tw.neighborhood.plan((32, 32), 7, heads=6, head_dim=64)
    >>> q, k, v = torch.randn(3, 1, 32 * 32, 6, 64)  # or [1, 32, 32, 6, 64]
    >>> plan(q, k, v).shape
    torch.Size([1, 1024, 6, 64])
    """
    axes = arguments.each(grid) or (grid,)
    axes = arguments.sizes("grid", axes, len(axes), PatternError)
    found = rules.make(len(axes), window, stride, dilation, causal, border)
    found.check_grid(axes)
    heads, head_dim = (arguments.whole(*one, error=PatternError) for one in (("heads", heads), ("head_dim", head_dim)))
    kv_heads = heads if kv_heads is None else arguments.whole("kv_heads", kv_heads, error=PatternError)
    if heads % kv_heads:
        raise PatternError(f"kv_heads: expected a divisor of the {heads} heads, found {kv_heads}")
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise PatternError(f"dtype: expected one of {', '.join(map(str, DTYPES))}, found {arguments.shown(dtype)}")
    rules.check_size(axes, heads, head_dim)
    place = arguments.device("device", device)
    if place is None or place.type not in LAUNCHES:
        raise DeviceError(f"device: expected one of {', '.join(LAUNCHES)}, found {arguments.shown(device)}")
    scale = head_dim**-0.5 if scale is None else arguments.number("scale", scale, error=PatternError)
    return NeighborhoodPlan(axes, found, heads, kv_heads, head_dim, dtype, place, scale, check_bound(bound))


@dataclass(frozen=True)
class NeighborhoodPlan:
    """Neighbourhood attention of one grid; `plan` makes it.

    Notes
    -----
    A plan holds no tensors: it can be pickled, copied and shared.
    """

    grid: tuple[int, ...]
    rule: Rule
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    bound: float | None = None
    # Calls of late, without a trace in copies.
    _known: Recent = field(default_factory=lambda: Recent(2, 8), init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple:
        """By its arguments."""
        place = self.dtype, self.device
        given = self.grid, self.rule, self.heads, self.kv_heads, self.head_dim, *place, self.scale, self.bound
        return NeighborhoodPlan, given

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        extra: tuple[Tensor, Tensor] | None = None,
        lse: bool = False,
    ) -> Any:
        """Attention of q, k and v.

        Parameters
        ----------
        q, k, v : Tensor
            [B, *grid, H, D] or [B, N, H, D] with the N tokens of the grid, row by row.
        extra : tuple of Tensor, optional
            Keys and values [B, N, H_kv, D] that all tokens see.
        lse : bool
            Return the natural log-sum-exps as well.

        Returns
        -------
        Tensor, or (Tensor, Tensor)
            In the form of q, and with `lse` float32 without the last dimension.

        Raises
        ------
        PatternError, DeviceError
            For tensors other than planned.
        """
        if (
            extra is None
            and not torch.compiler.is_compiling()
            and (call := again(self._known, lse, q, k, v)) is not None
        ):
            return call(q, k, v)
        arguments.flag("lse", lse)
        arguments.of_kind(Tensor, "a tensor", PatternError, q=q, k=k, v=v)
        flat = q.ndim == 4 and len(self.grid) > 1
        if flat:
            q, k, v = (self._on_grid(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        tensors = check_tensors(q, k, v, extra)
        expected = (*self.grid, self.heads, self.head_dim)
        if tuple(q.shape[1:]) != expected or k.shape[-2] != self.kv_heads:
            raise PatternError(
                f"q: expected shape (B, {', '.join(map(str, expected))}) and {self.kv_heads} heads of k as planned, "
                f"found {tuple(q.shape)} and {k.shape[-2]}"
            )
        if q.device.type != self.device.type or self.device.index not in (None, q.device.index):
            raise DeviceError(f"q: expected a tensor on {self.device} as planned, found {q.device}")
        if torch.is_autocast_enabled(q.device.type):
            tensors = tuple(None if x is None else x.to(self.dtype) for x in tensors)
        elif q.dtype != self.dtype:
            raise PatternError(f"q: expected dtype {self.dtype} as planned, found {q.dtype}")
        found = run(tensors, self.rule, self.scale, lse, self.bound, self._known, lse)
        if not flat:
            return found
        return (found[0].flatten(1, -3), found[1].flatten(1, -2)) if lse else found.flatten(1, -3)

    def _on_grid(self, name, x):
        if x.ndim != 4 or x.shape[1] != prod(self.grid):
            raise PatternError(f"{name}: expected the {prod(self.grid)} tokens of {self.grid}, found {tuple(x.shape)}")
        return x.unflatten(1, self.grid)

    @property
    def choice(self) -> Choice | None:
        """The box of queries that calls take, where it is known."""
        choose = getattr(operators.launches(self.device.type), "choose", None)
        if choose is None:
            return None
        return choose(self.rule, self.grid, self.heads, self.kv_heads, self.head_dim, self.head_dim, self.dtype)

    def summary(self) -> str:
        """What is planned, as text."""
        rule, pairs, choice = self.rule, self.rule.pairs(self.grid), self.choice
        with_keys = "" if self.kv_heads == self.heads else f", {self.kv_heads} of keys"
        lines = [
            f"neighbourhood attention on {self.device}, {str(self.dtype).removeprefix('torch.')}",
            f"grid {_sizes(self.grid)}, window {_sizes(rule.window)}, stride {_sizes(rule.stride)}, "
            f"dilation {_sizes(rule.dilation)}, causal {', '.join(map(str, rule.causal))}, border {rule.border}",
            f"heads {self.heads}{with_keys}, head_dim {self.head_dim}",
            f"pairs of a head {pairs:,}, {pairs / prod(self.grid):,.1f} keys a query",
        ]
        if choice is not None:
            lines.append(
                f"box {_sizes(choice.box)}, visited pairs {choice.visited:,}, fill {pairs / choice.visited:.3f}"
                + ("" if choice.us is None else f", predicted {choice.us / 1e3:,.3g} ms for a batch of one")
            )
        return "\n".join(lines)


def _sizes(values):
    return "×".join(map(str, values))
