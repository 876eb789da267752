"""Slice lists of one's own: from key numbers, masks, mask functions and bits. Nothing waits for the device."""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.core import arguments
from tilewright.core.errors import PatternError
from tilewright.core.operators import watched
from tilewright.slices import operators
from tilewright.slices.layout import INVALID, STEP, Layout, SliceLists, check_lengths, make_layout, rounded, with_tails
from tilewright.slices.predictors.given import of_function


def from_indices(
    keys: Tensor,
    counts: Tensor,
    shape: tuple[int, int],
    *,
    rows: int = 128,
    width: int = 1,
    text: tuple[int, int] = (0, 0),
    check: bool = False,
) -> SliceLists:
    """Make lists of given keys, on their device.

    Parameters
    ----------
    keys : Tensor
        int32 or int64 [B, H, G, C]. Of each group the first ``counts[b, h, g]`` keys are read, in ascending order.
    counts : Tensor
        int32 or int64 [B, H, G], keys of each group.
    shape : (int, int)
        Numbers of queries and keys, (N_q, N_k).
    rows, width : int
        Queries of a group and keys of a run, see `Layout`.
    text : (int, int)
        Tokens of text, see `make_layout`. The lists are those of the other queries.
    check : bool
        Wait for the device and check the lists.

    Returns
    -------
    SliceLists
        If a key is out of range, keys do not ascend or a count is above C, every result is NaN; `SliceLists.check`
        names the group.

    Raises
    ------
    PatternError
        For tensors of other shapes or types, and with `check` for wrong lists.

    Examples
    --------
    >>> import torch
    >>> from tilewright import slices
    >>> keys = torch.arange(16).expand(1, 1, 2, 16)
    >>> lists = slices.from_indices(keys, torch.full((1, 1, 2), 16), (128, 128), rows=64)
    >>> lists.density()
    tensor([[0.1250]])
    """
    for name, x, dims in (("keys", keys, 4), ("counts", counts, 3)):
        if not isinstance(x, Tensor) or x.ndim != dims or x.dtype not in (torch.int32, torch.int64):
            letters = ", ".join("BHGC"[:dims])
            raise PatternError(f"{name}: expected int32 or int64 of shape ({letters}), found {arguments.shown(x)}")
    queries, n_keys = arguments.sizes("shape", shape, 2, PatternError)
    arguments.flag("check", check)
    batch, heads, _, room = keys.shape
    layout = make_layout(batch, heads, queries, n_keys, rows=rows, width=width, text=text)
    layout = layout._replace(capacity=max(STEP, min(rounded(room), layout.capacity)))
    _check_groups("keys", keys, layout)
    if counts.shape != keys.shape[:3] or counts.device != keys.device:
        raise PatternError(
            f"counts: expected shape {tuple(keys.shape[:3])} on {keys.device}, as keys has, found "
            f"{tuple(counts.shape)} on {counts.device}"
        )
    place = torch.arange(room, device=keys.device)
    listed = place < counts[..., None]
    in_range = (keys >= 0) & (keys < n_keys)
    follows = torch.ones_like(in_range)
    follows[..., 1:] = keys[..., 1:] > keys[..., :-1]
    if width > 1:
        # The keys of a run stand at its places, and each list ends where a run does.
        follows &= (keys % width) == (place % width)
        last = keys.gather(-1, (counts - 1).clamp(0, max(0, room - 1)).long()[..., None])[..., 0] if room else counts
        whole = (counts % width == 0) | (last == n_keys - 1)
    else:
        whole = torch.ones_like(counts, dtype=torch.bool)
    valid = (~listed | (in_range & follows)).all(-1) & whole & (counts >= 0) & (counts <= room)
    counts = torch.where(valid, counts, INVALID).int()
    # Out of range, they would be read before the results are known to be NaN.
    keys = torch.nn.functional.pad(keys.clamp(0, n_keys - 1).int(), (0, max(0, layout.capacity - room)))
    keys = with_tails(keys[..., : layout.capacity], counts).contiguous()
    lists = SliceLists(layout, keys, counts, *_made("rank", layout, counts))
    if check:
        lists.check(allow_empty=True)
    return lists


def from_mask(
    mask: Tensor,
    queries: int,
    *,
    batch: int | None = None,
    heads: int | None = None,
    rows: int = 128,
    budget: float = 1.0,
    width: int = 1,
    text: tuple[int, int] = (0, 0),
) -> SliceLists:
    """Make lists of the keys that a mask selects for each group of queries.

    Parameters
    ----------
    mask : Tensor
        bool [B or 1, H or 1, G, N_k].
    queries : int
        Number of queries, N_q.
    batch, heads : int, optional
        B and H, where the mask has 1.
    rows : int
        Queries of a group, see `Layout`.
    budget : float
        Share of the keys, in (0, 1], that lists have room for. A group with more keys makes every result NaN, see
        `SliceLists.check`.
    width : int
        Keys of a run, see `Layout`. A run is listed if the mask selects one of its keys.
    text : (int, int)
        Tokens of text, see `make_layout`. The mask is for the groups of the other queries.

    Returns
    -------
    SliceLists

    Raises
    ------
    PatternError
        For a mask that does not fit.

    Examples
    --------
    >>> import torch
    >>> from tilewright import slices
    >>> mask = torch.zeros(1, 1, 2, 128, dtype=torch.bool)
    >>> mask[..., :32] = True
    >>> slices.from_mask(mask, 128, heads=4, rows=64).counts[0, 3]
    tensor([32, 32], dtype=torch.int32)
    """
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.dtype != torch.bool:
        raise PatternError(f"mask: expected bool of shape (B, H, G, N_k), found {arguments.shown(mask)}")
    for name, given, found in (("batch", batch, mask.shape[0]), ("heads", heads, mask.shape[1])):
        if given is not None:
            arguments.whole(name, given, error=PatternError)
        if found not in (1, given or found):
            raise PatternError(f"mask: expected {name} of 1 or {given}, found {found}")
    sizes = batch or mask.shape[0], heads or mask.shape[1], queries, mask.shape[3]
    layout = make_layout(*sizes, rows=rows, budget=budget, width=width, text=text)
    _check_groups("mask", mask, layout)
    if width > 1:
        runs = torch.nn.functional.pad(mask, (0, -mask.shape[3] % width)).unflatten(-1, (-1, width)).any(-1)
        mask = runs.repeat_interleave(width, -1)[..., : mask.shape[3]]
    return SliceLists(layout, *_made("from_mask", layout, mask.contiguous() if mask.stride(-1) != 1 else mask))


def from_mask_mod(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    shape: tuple[int, int],
    *,
    batch: int = 1,
    heads: int = 1,
    rows: int = 128,
    budget: float = 1.0,
    width: int = 1,
    text: tuple[int, int] = (0, 0),
    device: torch.device | str = "cpu",
) -> SliceLists:
    """Make lists of the keys that any query of a group may see, by a mask function of FlexAttention.

    Parameters
    ----------
    mask_mod : callable
        ``mask_mod(b, h, query, key) -> bool`` of int64 tensors that broadcast.
    shape : (int, int)
        Numbers of queries and keys, (N_q, N_k).
    batch, heads : int
        B and H.
    rows, width : int
        Queries of a group and keys of a run, see `Layout`.
    budget : float
        Share of the keys, in (0, 1], that lists have room for.
    text : (int, int)
        Tokens of text, see `make_layout`.
    device : torch.device or str
        Where the function is evaluated and the lists are kept.

    Returns
    -------
    SliceLists
        All queries of a group attend to the keys of its list.

    Raises
    ------
    PatternError
        For a function that raises an error or returns no booleans.

    Examples
    --------
    >>> from tilewright import slices
    >>> lists = slices.from_mask_mod(lambda b, h, q, k: (q - k).abs() < 8, (128, 128), rows=64)
    >>> lists.counts[0, 0]
    tensor([71, 71], dtype=torch.int32)
    """
    if not callable(mask_mod):
        raise PatternError(f"mask_mod: expected a function (b, h, query, key), found {arguments.shown(mask_mod)}")
    queries, n_keys = arguments.sizes("shape", shape, 2, PatternError)
    device = arguments.device("device", device)
    layout = make_layout(batch, heads, queries, n_keys, rows=rows, budget=budget, width=width, text=text)
    mask = of_function(mask_mod, layout, device)
    return from_mask(mask, queries, batch=batch, heads=heads, rows=rows, budget=budget, width=width, text=text)


def unpack(bits: Tensor, layout: Layout, lengths: Tensor | None = None) -> SliceLists:
    """Make lists of the bits that `SliceLists.pack` returned.

    Parameters
    ----------
    bits : Tensor
        int32 [B, H, G, words + 1].
    layout : Layout
        Layout of the packed lists.
    lengths : Tensor, optional
        Lengths of the packed lists, int [B].

    Returns
    -------
    SliceLists

    Raises
    ------
    PatternError
        For bits of another layout.
    """
    arguments.of_kind(Layout, "a Layout", PatternError, layout=layout)
    if layout is None or not isinstance(bits, Tensor) or bits.is_nested:
        raise PatternError(f"bits: expected a tensor of SliceLists.pack, found {arguments.shown(bits)}")
    expected = (layout.batch, layout.heads, layout.groups, layout.words + 1)
    if tuple(bits.shape) != expected or bits.dtype != torch.int32:
        raise PatternError(f"bits: expected int32 of shape {expected}, found {bits.dtype} of {tuple(bits.shape)}")
    lengths = None if lengths is None else check_lengths(lengths, bits)
    return SliceLists(layout, *_made("unpack", layout, bits.contiguous()), lengths=lengths)


def _made(name, layout, x):
    """What the executor, or its operator, makes of a tensor."""
    if watched(x):
        return getattr(torch.ops.tilewright, f"slices_{name}")(x, [*layout])
    return getattr(operators.executor(layout, x.device), name)(x)


def _check_groups(name, x, layout):
    if x.shape[2] != layout.groups:
        raise PatternError(
            f"{name}: expected {layout.groups} groups, of {layout.rows} of {layout.queries} queries, found {x.shape[2]}"
        )
