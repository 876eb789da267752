"""`attend`: attention of the tokens of a grid to boxes around them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.core import arguments, transforms
from tilewright.core._internals import any_autocast
from tilewright.core.caches import Recent
from tilewright.core.errors import DeviceError, PatternError
from tilewright.core.operators import watched
from tilewright.devices import qkv
from tilewright.neighborhood import operators
from tilewright.neighborhood import rule as rules
from tilewright.neighborhood.operators import KEPT_LSE, LSE, NO_LSE
from tilewright.neighborhood.rule import Rule

DTYPES = torch.float32, torch.bfloat16, torch.float16
# Calls of late, by their arguments but for tensors: of some forms of these each.
_known = Recent(256, 8)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | tuple[int, ...],
    *,
    stride: int | tuple[int, ...] = 1,
    dilation: int | tuple[int, ...] = 1,
    causal: bool | tuple[bool, ...] = False,
    border: str = "shift",
    scale: float | None = None,
    extra: tuple[Tensor, Tensor] | None = None,
    lse: bool = False,
    bound: float | None = None,
) -> Any:
    """Softmax attention of each token of a grid over the tokens in a window around it.

    Parameters
    ----------
    q, k, v : Tensor
        [B, *grid, H, D] for a grid of 1, 2 or 3 axes: float32, bfloat16 or float16 views of any strides. k and v may
        have fewer heads, a divisor of H, and v another D. Where the values of a head do not lie side by side, they are
        copied.
    window : int or tuple of int
        Tokens that a query sees along each axis, at most the tokens of the axis. An even window reaches one token
        further back than forth.
    stride : int or tuple of int
        Neighbours that share the window of one of them, at most the window.
    dilation : int or tuple of int
        Distance of the tokens of a window.
    causal : bool or tuple of bool
        Along such an axis a query sees no later token.
    border : str
        ``"shift"`` moves windows inwards at borders, as NATTEN does, so that all have their full length. ``"cut"``
        leaves out keys beyond borders.
    scale : float, optional
        Factor of the scores; the default is ``D ** -0.5``.
    extra : tuple of Tensor, optional
        Keys and values [B, N, H_kv, D] that all tokens of the grid see, such as those of text.
    lse : bool
        Return the natural log-sum-exps of the scores as well.
    bound : float, optional
        What no score times `scale` exceeds, as is known where q and k are normed. A GPU then needs no maximum of the
        scores, in float32 and bfloat16; other devices do not use it. Results are wrong where scores exceed it by 80
        or stay below it by as much.

    Returns
    -------
    Tensor, or (Tensor, Tensor)
        [B, *grid, H, D], contiguous, and with `lse` float32 [B, *grid, H].

    Raises
    ------
    PatternError, DeviceError
        For windows that do not fit the grid, and tensors that do not fit each other.

    Notes
    -----
    Gradients of q, k, v and `extra` are there, and those of second order are refused. Under autocast tensors are
    computed in its type, like those of ``scaled_dot_product_attention``.

    Examples
    --------
    >>> import torch
    >>> import tilewright as tw
    >>> q, k, v = torch.randn(3, 1, 32, 32, 6, 64)  # [batch, rows, columns, heads, values of a head] each
    >>> tw.neighborhood.attend(q, k, v, window=7).shape
    torch.Size([1, 32, 32, 6, 64])
    """
    key = None if torch.compiler.is_compiling() else _text(window, stride, dilation, causal, border, scale, lse, bound)
    if key is not None and extra is None and (call := again(_known, key, q, k, v)) is not None:
        return call(q, k, v)
    tensors = check_tensors(q, k, v, extra)
    found = rules.make(q.ndim - 3, window, stride, dilation, causal, border)
    arguments.flag("lse", lse)
    scale = check_scale(scale, q)
    return run(cast(tensors), found, scale, lse, check_bound(bound), _known, key)


def _text(*given):
    """What was given as text, in which 3 is not 3.0, or None."""
    try:
        return repr(given)
    # Of what has no text, which is refused later.
    except Exception:
        return None


def again(known: Recent, key: Any, q: Any, k: Any, v: Any) -> Callable | None:
    """What attends tensors like these without checks, which take the host longer than a GPU takes for small grids.

    None where no such call was `known` by `run`, and where somebody looks at this one.
    """
    for same, call in known.get(key):
        # Torch's guards end the process where they are given nested tensors. Written out: every call asks.
        try:
            if q.is_nested or k.is_nested or v.is_nested:
                return None
        except AttributeError:
            return None
        if same(q, k, v):
            return None if watched(q) or any_autocast() else call
    return None


def run(tensors: tuple, rule: Rule, scale: float, lse: bool, bound: float | None, known: Recent, key: Any) -> Any:
    """`attend` of tensors ``(q, k, v, extra keys or None, extra values or None)`` that are checked but for the grid.

    known: where the next call, of the same key, finds it by `again`.
    """
    q = tensors[0]
    rule.check_grid(q.shape[1:-2])
    # Written out: every call asks.
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    mode = LSE if lse else KEPT_LSE if recorded or transforms.transformed() else NO_LSE
    given = *tensors, rule.ints, scale, mode, bound
    if watched(q):
        out, sums = transforms.call("neighborhood_attend", *given)
    else:
        out, sums = (operators.differentiated if recorded else operators.attend)(*given)
        if not recorded and key is not None:
            _keep(known, key, tensors, given[5:], lse)
    return (out, sums) if lse else out


def _keep(known, key, tensors, setting, lse):
    """Keep what attends such tensors, where the kernels take them as they are."""
    q, k, v, k_extra, _ = tensors
    if k_extra is not None or (forward := operators.prepared(q, k, v, *setting)) is None:
        return

    def call(q, k, v):
        found = forward(q, k, v)
        return found if lse else found[0]

    known.add(key, (qkv.same_layout(q, k, v), call))


def check_tensors(q: Any, k: Any, v: Any, extra: Any) -> tuple:
    """``(q, k, v, extra keys or None, extra values or None)``. Raises `PatternError` or `DeviceError` where they do not
    fit each other."""
    if extra is not None and (not isinstance(extra, tuple | list) or len(extra) != 2):
        raise PatternError(f"extra: expected a pair of keys and values, found {arguments.shown(extra)}")
    k_extra, v_extra = (None, None) if extra is None else extra
    _check_form("q", q, None, None)
    if not 4 <= q.ndim <= rules.MOST_AXES + 3 or not q.shape[-1] or not q.shape[-2]:
        raise PatternError(
            f"q: expected shape (batch, 1 to {rules.MOST_AXES} axes of a grid, heads, head_dim), found {tuple(q.shape)}"
        )
    if q.dtype not in DTYPES and not torch.is_autocast_enabled(q.device.type):
        raise PatternError(f"q: expected one of {', '.join(map(str, DTYPES))}, found {q.dtype}")
    _check_form("k", k, q, (*q.shape[:-2], None, q.shape[-1]))
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if not kv_heads or heads % kv_heads:
        raise PatternError(f"k: expected a number of heads that divides the {heads} of q, found {kv_heads}")
    _check_form("v", v, q, (*k.shape[:-1], None))
    if not v.shape[-1]:
        raise PatternError(f"v: expected at least one value a head, found shape {tuple(v.shape)}")
    if extra is not None:
        _check_form("extra keys", k_extra, q, (q.shape[0], None, kv_heads, q.shape[-1]))
        _check_form("extra values", v_extra, q, (*extra[0].shape[:-1], v.shape[-1]))
    rules.check_size(q.shape[:-1], max(q.shape[-1], v.shape[-1]))
    return q, k, v, k_extra, v_extra


def _check_form(name, x, q, shape):
    """Raise an error for what is no tensor of the kind of `q` and of this shape, in which None is any size."""
    if not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided:
        raise PatternError(f"{name}: expected a strided tensor, found {arguments.shown(x)}")
    if q is None:
        return
    if len(shape) != x.ndim or any(n is not None and n != m for n, m in zip(shape, x.shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise PatternError(f"{name}: expected shape ({wanted}) with q {tuple(q.shape)}, found {tuple(x.shape)}")
    if x.device != q.device:
        raise DeviceError(f"{name}: expected a tensor on {q.device} like q, found {x.device}")
    if x.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type):
        raise PatternError(f"{name}: expected dtype {q.dtype} like q, found {x.dtype}")


def check_scale(scale: Any, q: Tensor) -> float:
    """The factor of scores. Raises `PatternError` for what is no finite number."""
    return q.shape[-1] ** -0.5 if scale is None else arguments.number("scale", scale, error=PatternError)


def check_bound(bound: Any) -> float | None:
    """What no scaled score exceeds. Raises `PatternError` for what is no finite number."""
    return None if bound is None else arguments.number("bound", bound, error=PatternError)


def cast(tensors: tuple) -> tuple:
    """Tensors in the type of autocast where it is on."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(None if x is None else x.to(torch.get_autocast_dtype(kind)) for x in tensors)
