"""NATTEN's functions and modules by `tilewright.neighborhood`: replace the import, keep the code and the checkpoints.

Signatures, layouts and names of parameters are those of NATTEN 0.21, which need not be installed.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

from torch import Tensor, nn

from tilewright import neighborhood
from tilewright.core import _internals
from tilewright.core.errors import ConfigError, PatternError
from tilewright.neighborhood import rule as rules

_Value = TypeVar("_Value", int, bool)
# One value for all axes, or one for each.
PerAxis: TypeAlias = _Value | Sequence[_Value]


class Tuning(TypedDict, total=False):
    """Arguments that choose NATTEN's kernels and tiles. They change no result."""

    attention_kwargs: Mapping[str, Any] | None
    backend: str | None
    q_tile_shape: Sequence[int] | None
    kv_tile_shape: Sequence[int] | None
    backward_q_tile_shape: Sequence[int] | None
    backward_kv_tile_shape: Sequence[int] | None
    backward_kv_splits: Sequence[int] | None
    backward_use_pt_reduction: bool
    run_persistent_kernel: bool
    kernel_schedule: Any
    torch_compile: bool


# What NATTEN takes for those that are left out: None, but for these.
DEFAULTS = {"backward_use_pt_reduction": False, "run_persistent_kernel": True, "torch_compile": False}

# Such arguments that a warning was given for.
_WARNED: set[tuple[str, ...]] = set()


def na1d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis[int],
    stride: PerAxis[int] | None = 1,
    dilation: PerAxis[int] | None = 1,
    is_causal: PerAxis[bool] | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    *,
    return_lse: bool = False,
    **tuning: Unpack[Tuning],
) -> Tensor | tuple[Tensor, Tensor]:
    """`na2d` along a sequence: query [B, N, heads, D]."""
    windows = kernel_size, stride, dilation, is_causal
    return _attend(1, query, key, value, windows, scale, additional_keys, additional_values, return_lse, tuning)


def na2d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis[int],
    stride: PerAxis[int] | None = 1,
    dilation: PerAxis[int] | None = 1,
    is_causal: PerAxis[bool] | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    *,
    return_lse: bool = False,
    **tuning: Unpack[Tuning],
) -> Tensor | tuple[Tensor, Tensor]:
    """Neighbourhood attention on a grid of rows and columns, as NATTEN's function of this name.

    Parameters
    ----------
    query : Tensor [B, Y, X, heads, D]
        Queries.
    key : Tensor [B, Y, X, heads_kv, D]
        Keys. ``heads_kv`` divides ``heads``.
    value : Tensor [B, Y, X, heads_kv, D_v]
        Values.
    kernel_size : int or sequence of int
        Keys that a query attends to, along each axis. At borders windows are shifted and keep this size.
    stride : int or sequence of int
        How many neighbouring queries share one window.
    dilation : int or sequence of int
        Distance of the keys of a window.
    is_causal : bool or sequence of bool
        Whether a query attends to no later keys along an axis.
    scale : float, optional
        Factor of the scores, ``D ** -0.5`` by default.
    additional_keys : Tensor [B, n, heads_kv, D], optional
        Keys that every query attends to.
    additional_values : Tensor [B, n, heads_kv, D_v], optional
        Their values.
    return_lse : bool
        Whether to return the logarithm of the sum of the exponents, too.
    **tuning
        Fields of `Tuning`. They have no effect, and a warning says so once.

    Returns
    -------
    Tensor [B, Y, X, heads, D_v]
        With ``return_lse`` a tuple of this and a float32 Tensor [B, Y, X, heads].

    Raises
    ------
    ConfigError, PatternError
        For tensors, windows, strides and dilations that do not fit one another.

    Examples
    --------
    >>> import torch
    >>> from tilewright.integrations.natten import na2d
    >>> q, k, v = torch.randn(3, 1, 16, 16, 4, 32)
    >>> na2d(q, k, v, kernel_size=7, is_causal=(True, False)).shape
    torch.Size([1, 16, 16, 4, 32])
    """
    windows = kernel_size, stride, dilation, is_causal
    return _attend(2, query, key, value, windows, scale, additional_keys, additional_values, return_lse, tuning)


def na3d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis[int],
    stride: PerAxis[int] | None = 1,
    dilation: PerAxis[int] | None = 1,
    is_causal: PerAxis[bool] | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    *,
    return_lse: bool = False,
    **tuning: Unpack[Tuning],
) -> Tensor | tuple[Tensor, Tensor]:
    """`na2d` in a volume or video: query [B, Z, Y, X, heads, D]."""
    windows = kernel_size, stride, dilation, is_causal
    return _attend(3, query, key, value, windows, scale, additional_keys, additional_values, return_lse, tuning)


def _attend(axes, query, key, value, windows, scale, more_keys, more_values, return_lse, tuning):
    """Attention over a grid of `axes`, by the arguments of NATTEN's functions."""
    if tuning:
        _leave(f"na{axes}d", tuning)
    if query.dim() != axes + 3:
        raise PatternError(
            f"na{axes}d: expected a query [B, {axes} sides of the grid, heads, D], found {tuple(query.shape)}"
        )
    if (more_keys is None) != (more_values is None):
        given, missing = ("keys", "values") if more_values is None else ("values", "keys")
        raise PatternError(f"na{axes}d: expected additional_{missing} with the additional_{given}, found None")
    window, stride, dilation, causal = _given(*windows)
    return neighborhood.attend(
        query,
        key,
        value,
        window,
        stride=stride,
        dilation=dilation,
        causal=causal,
        # As in NATTEN, 0 is the default.
        scale=scale or None,
        extra=None if more_keys is None else (more_keys, more_values),
        lse=return_lse,
    )


def _given(window: Any, stride: Any, dilation: Any, causal: Any) -> tuple[Any, Any, Any, Any]:
    """The same with what None stands for."""
    return window, 1 if stride is None else stride, 1 if dilation is None else dilation, causal is not None and causal


def _leave(name, tuning):
    """Leave arguments without effect, and say so where they differ from NATTEN's own."""
    if unknown := tuning.keys() - Tuning.__annotations__.keys():
        raise TypeError(f"{name}() got an unexpected keyword argument {min(unknown)!r}")
    if ignored := tuple(name for name, value in tuning.items() if value not in (None, DEFAULTS.get(name))):
        _warn(ignored)


# A compiler takes its result for a constant, and cuts no graph.
@_internals.constant
def _warn(names: tuple[str, ...]) -> bool:
    """Say once that arguments have no effect."""
    if names not in _WARNED:
        _WARNED.add(names)
        warnings.warn(f"Tilewright chooses its own tiles; without effect: {', '.join(names)}", stacklevel=5)
    return True


class _NeighborhoodAttention(nn.Module):
    """What the modules share: queries, keys and values by one projection, attention, and a projection of its result."""

    na_dim: int

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernel_size: PerAxis[int],
        stride: PerAxis[int] | None = 1,
        dilation: PerAxis[int] | None = 1,
        is_causal: PerAxis[bool] | None = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        proj_drop: float = 0.0,
    ):
        """Raises `ConfigError` or `PatternError` for numbers that do not fit one another."""
        super().__init__()
        if embed_dim % num_heads:
            raise ConfigError(f"num_heads: expected a divisor of embed_dim {embed_dim}, found {num_heads}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.scale = qk_scale or self.head_dim**-0.5
        found = rules.make(self.na_dim, *_given(kernel_size, stride, dilation, is_causal), "shift")
        self.kernel_size, self.stride, self.dilation = found.window, found.stride, found.dilation
        self.is_causal = found.causal
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.proj = nn.Linear(embed_dim, embed_dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, *grid, embed_dim] to as many. Raises `PatternError` for others, and windows beyond the grid."""
        if x.dim() != self.na_dim + 2 or x.shape[-1] != self.embed_dim:
            raise PatternError(
                f"{type(self).__name__}: expected tokens [B, {self.na_dim} sides of a grid, {self.embed_dim}], "
                f"found {tuple(x.shape)}"
            )
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        out = neighborhood.attend(
            q,
            k,
            v,
            self.kernel_size,
            stride=self.stride,
            dilation=self.dilation,
            causal=self.is_causal,
            scale=self.scale,
        )
        return self.proj_drop(self.proj(out.flatten(-2)))

    def extra_repr(self) -> str:
        """Shown in a printed model."""
        names = "head_dim", "num_heads", "kernel_size", "stride", "dilation", "is_causal"
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class NeighborhoodAttention1D(_NeighborhoodAttention):
    """`NeighborhoodAttention2D` for tokens [B, N, embed_dim] of a sequence."""

    na_dim = 1


class NeighborhoodAttention2D(_NeighborhoodAttention):
    """A layer of `na2d` between its projections, as NATTEN's module of this name: ``state_dict`` loads both ways.

    Parameters
    ----------
    embed_dim : int
        Channels of tokens [B, Y, X, embed_dim].
    num_heads : int
        Heads, a divisor of `embed_dim`.
    kernel_size, stride, dilation, is_causal
        As `na2d` takes them.
    qkv_bias : bool
        Whether the projection to queries, keys and values has a bias.
    qk_scale : float, optional
        Factor of the scores.
    proj_drop : float
        Share of the results that training drops.

    Examples
    --------
    >>> import torch
    >>> from tilewright.integrations.natten import NeighborhoodAttention2D
    >>> layer = NeighborhoodAttention2D(128, 4, kernel_size=7, dilation=2)
    >>> layer(torch.randn(1, 16, 16, 128)).shape
    torch.Size([1, 16, 16, 128])
    """

    na_dim = 2


class NeighborhoodAttention3D(_NeighborhoodAttention):
    """`NeighborhoodAttention2D` for tokens [B, Z, Y, X, embed_dim] of a volume or video."""

    na_dim = 3
