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
    """Lists of given keys, on their device.

    keys: int [B, H, G, C], the first ``counts[b, h, g]`` of each ascending; the rest is not read. counts: int
    [B, H, G]. shape: (N_q, N_k). rows, width: as in `Layout`. text: as in `make_layout`; the lists are of the other
    queries. check: wait for the device and check the lists at once.

    Raises `PatternError` for tensors that are no such lists. Keys that are out of range or not ascending, and more keys
    than C, make every result NaN; `SliceLists.check` tells which group has them.
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
    """Lists of the keys that a mask flags for each group of queries.

    mask: bool [B or 1, H or 1, G, N_k]. queries: N_q. batch, heads: B and H, where the mask has 1. rows: as in
    `Layout`. budget: room, as a share of the keys; a group that has more makes every result NaN, see
    `SliceLists.check`. width: runs of so many keys are listed whole where any of their keys is flagged. text: as in
    `make_layout`; the mask is for the groups of the other queries, and says which keys of text they attend to.

    Raises `PatternError` for a mask that does not fit.
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
    """Lists of the keys that any query of a group may see, by a mask function as FlexAttention takes it.

    mask_mod: ``mask_mod(b, h, query, key) -> bool`` of int64 tensors that broadcast, evaluated on `device`, see
    `slices.predictors.given.of_function`. shape: (N_q, N_k). The other arguments are as in `from_mask`. All queries of
    a group attend to the keys of its list.
    """
    if not callable(mask_mod):
        raise PatternError(f"mask_mod: expected a function (b, h, query, key), found {arguments.shown(mask_mod)}")
    queries, n_keys = arguments.sizes("shape", shape, 2, PatternError)
    device = arguments.device("device", device)
    layout = make_layout(batch, heads, queries, n_keys, rows=rows, budget=budget, width=width, text=text)
    mask = of_function(mask_mod, layout, device)
    return from_mask(mask, queries, batch=batch, heads=heads, rows=rows, budget=budget, width=width, text=text)


def unpack(bits: Tensor, layout: Layout, lengths: Tensor | None = None) -> SliceLists:
    """The lists of `layout` and `lengths` that `SliceLists.pack` made `bits` of.

    Raises `PatternError` for bits of other lists.
    """
    arguments.of_kind(Layout, "a Layout", PatternError, layout=layout)
    if layout is None or not isinstance(bits, Tensor) or bits.is_nested:
        raise PatternError(f"bits: expected those of lists of a layout, found {arguments.shown(bits)}")
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
