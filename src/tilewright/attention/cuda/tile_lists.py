"""What `tile_kernel` reads: the records, keys and masks of a work list, packed (stages T3 and T5)."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from tilewright.attention.blocks import Blocks
from tilewright.attention.cuda.mask_factors import factors
from tilewright.attention.cuda.mask_intervals import intervals
from tilewright.attention.masks import distinct_rows
from tilewright.attention.units import Units, interleaved

# In place of the number of a mask: a run that only fills up a step, and a full run.
_ABSENT, _FULL = -2, -1
# Depths of the product that applies a mask: one or two steps of a 16-bit tensor-core product.
RANKS = (16, 32)
# In place of a rank: each row sees one interval of the keys of a step; a byte for each pair.
INTERVALS, BYTES = 1, 2
# Forms of masks without a bias, the first of which that a launch can have it has. Any mask can be bytes.
FORMS = ("factors", "intervals", "bytes")
# Steps with intervals of as many with bytes, at most. ASSUME: a step takes about as long with either, for intervals
# take more instructions and read less (docs/decisions/tile-kernel.md).
MOST_STEPS = 1.05
# Bias index of a pair that is not allowed.
MASKED = -1


class Item(IntEnum):
    """Fields of a work item's record."""

    FIRST_ROW = 0
    ROWS = 1
    FIRST_STEP = 2
    # Steps without a mask come first.
    FULL_STEPS = 3
    STEPS = 4
    # First step of its masks, and the left factor of all of them.
    MASK_STEP = 5
    LEFT_FACTOR = 6
    # Its number among the parts of split blocks, or -1.
    PART = 7


class Part(IntEnum):
    """Fields of the record of one part of a split block."""

    # Number of the split block, and the parts that it has.
    GROUP = 0
    COUNT = 1
    # Scratch rows before those of the block, and the number of this part in it.
    SCRATCH_ROW = 2
    NUMBER = 3


@dataclass(frozen=True, eq=False)
class TileLists:
    """Work items of one tile, longest first, in steps of `step_keys` keys.

    items: int32 [I, len(Item)], of several patterns with one more column, see `of_units`.
    keys: int32 [steps + 1, step_keys], in the graph's order.
    rank: of the mask factors left, bool [kinds, M, rank], and right, bool [steps, step_keys, rank]; `INTERVALS` or
        `BYTES` where masks are such, 0 where they are tiles of floats.
    intervals: int32 [steps, M], the first of the keys of a step that a row sees, plus 2**16 times how many it sees.
    bias_index: int32 [steps, M, step_keys], bytes or tiles: an index into the bias table of each pair (0 without a
        bias), `MASKED` where it is not allowed. family: int [steps], equal for steps with the same rows, or with rows
        of the same bias.
    parts: int32 [P, len(Part)]. groups: split blocks. part_rows: rows of all parts.
    full, partial: whether some step has no mask, and whether some step has one.
    """

    rows: int
    step_keys: int
    rank: int
    items: np.ndarray
    keys: np.ndarray
    left: np.ndarray
    right: np.ndarray
    intervals: np.ndarray
    bias_index: np.ndarray
    family: np.ndarray
    parts: np.ndarray
    groups: int
    part_rows: int
    full: bool
    partial: bool


def build(
    blocks: Blocks,
    block: np.ndarray,
    run_lo: np.ndarray,
    run_hi: np.ndarray,
    step_keys: int,
    index: Callable | None = None,
    masks: bool = True,
    forms: Sequence[str] = FORMS,
) -> TileLists:
    """`TileLists` of work items (int columns `block`, `run_lo`, `run_hi`) of `blocks`.

    step_keys: a multiple of a run. index: with a bias, ``callable(rows, keys) -> int array``, its index for rows and
    keys in the graph's order; all steps are then partial. Masks have the first of `forms` that they can; with a bias,
    and where they can have none of them, they are tiles. masks: False leaves them out, for who does not run the lists.
    """
    longest_first = np.argsort(run_lo - run_hi, kind="stable")
    block, run_lo, run_hi = (column[longest_first].astype(np.int64) for column in (block, run_lo, run_hi))
    per_step = step_keys // blocks.tile.run
    steps = -(-(run_hi - run_lo) // per_step)
    first = np.concatenate(([0], np.cumsum(steps)))
    owner = np.repeat(np.arange(len(block)), steps)
    number = np.arange(first[-1]) - first[owner]
    # The kernel reads one step ahead.
    keys = np.empty((first[-1] + min(first[-1], 1), step_keys), np.int32)
    keys[: first[-1]], of_run = _steps_of(blocks, run_lo[owner], run_hi[owner], number, per_step)

    n_full = steps.copy()
    masked = (of_run != _FULL).any(1) | (index is not None)
    np.minimum.at(n_full, owner[masked], number[masked])
    late = number >= n_full[owner]
    made, mask_step, kind, places = _masks(
        blocks,
        block,
        owner[late],
        (number - n_full[owner])[late],
        of_run[late],
        keys[:-1][late],
        index,
        forms if masks else (),
    )
    if places:
        keys, steps = _placed(keys, steps, n_full, kind, places)
        first = np.concatenate(([0], np.cumsum(steps)))
    keys[-1:] = keys[:1]

    parts, part, groups, part_rows = _parts(block, run_lo, blocks.rows)
    fields = {
        Item.FIRST_ROW: blocks.row_ptr[block],
        Item.ROWS: blocks.rows[block],
        Item.FIRST_STEP: first[:-1],
        Item.FULL_STEPS: n_full,
        Item.STEPS: steps,
        Item.MASK_STEP: mask_step,
        Item.LEFT_FACTOR: kind,
        Item.PART: part,
    }
    items = np.stack([fields[field] for field in Item], 1)
    return TileLists(
        rows=blocks.tile.rows,
        step_keys=step_keys,
        items=items.astype(np.int32),
        keys=keys,
        parts=parts,
        groups=groups,
        part_rows=part_rows,
        full=bool((n_full > 0).any()),
        partial=bool((n_full < steps).any()),
        **made,
    )


def _steps_of(blocks, run_lo, run_hi, number, per_step):
    """``(keys int32 [steps, step_keys], masks int32 [steps, runs])`` of steps, each the `number`-th of the runs
    run_lo..run_hi.

    Where no run is, the keys of the first stand; where no key is, the first of the step.
    """
    run = (run_lo + number * per_step)[:, None] + np.arange(per_step)
    there = run < run_hi[:, None]
    run = np.where(there, run, run_lo[:, None])
    keys = blocks.run_keys[run].reshape(len(run), -1)
    return np.where(keys < 0, keys[:, :1], keys), np.where(there, blocks.run_mask[run], _ABSENT)


def subset(lists: TileLists, here: np.ndarray | slice | list[int]) -> TileLists:
    """The items `here` (an index of items) of `TileLists`; of split blocks, only the parts there are merged."""
    items = lists.items[here]
    part = items[:, Item.PART]
    # Items that are no parts are blocks of their own.
    block, number = lists.groups + np.arange(len(items)), np.zeros(len(items), np.int64)
    block[part >= 0], number[part >= 0] = lists.parts[part[part >= 0]][:, [Part.GROUP, Part.NUMBER]].T
    rows = np.zeros(lists.groups + len(items), np.int64)
    rows[block] = items[:, Item.ROWS]
    parts, items[:, Item.PART], groups, part_rows = _parts(block, number, rows)
    return replace(lists, items=items, parts=parts, groups=groups, part_rows=part_rows)


def of_units(lists: TileLists, units: Units, n_rows: int) -> TileLists:
    """`TileLists` of patterns that stand one above the other, `n_rows` each, as those of all `units`.

    Keys and masks stay those of the patterns. The record of an item has one more field: the first head of its unit,
    those of all images counted through. Rows count within a pattern. The longest items come first, those of several
    patterns side by side.
    """
    pattern = lists.items[:, Item.FIRST_ROW] // n_rows
    order = interleaved(pattern, lists.items[:, Item.STEPS])
    here, unit = units.members(pattern[order])
    here = order[here]
    items = lists.items[here]
    items[:, Item.FIRST_ROW] -= pattern[here] * n_rows
    part = items[:, Item.PART]
    # Blocks of the lists: split ones, then items that are no parts; each unit has its own.
    n = len(units.group)
    block, number = lists.groups + here, np.zeros(len(items), np.int64)
    block[part >= 0], number[part >= 0] = lists.parts[part[part >= 0]][:, [Part.GROUP, Part.NUMBER]].T
    block = block * n + unit
    rows = np.zeros((lists.groups + len(lists.items)) * n, np.int64)
    rows[block] = items[:, Item.ROWS]
    parts, items[:, Item.PART], groups, part_rows = _parts(block, number, rows)
    items = np.column_stack([items, units.first[unit]]).astype(np.int32)
    return replace(lists, items=items, parts=parts, groups=groups, part_rows=part_rows)


def _parts(block, run_lo, rows):
    """``(parts [P, len(Part)], part of each item or -1, groups, their rows)``: the items of a block that has several,
    in run order. rows: of each block."""
    order = np.lexsort((run_lo, block))
    _, begin, counts = np.unique(block[order], return_index=True, return_counts=True)
    parts: list = []
    part, groups, part_rows = np.full(len(block), -1), 0, 0
    for lo, count in zip(begin[counts > 1], counts[counts > 1], strict=True):
        part[order[lo : lo + count]] = len(parts) + np.arange(count)
        # In the order of `Part`.
        parts += [(groups, count, part_rows, i) for i in range(count)]
        part_rows += int(count * rows[block[order[lo]]])
        groups += 1
    return np.array(parts, np.int32).reshape(-1, len(Part)), part, groups, part_rows


def _masks(blocks, block, owner, number, masks, keys, index, forms):
    """``(fields of TileLists, first mask step and kind of each item, places of `intervals` for each kind or None)``.

    owner: item of each partial step; number: its number among the item's partial steps; masks [steps, runs] and keys
    [steps, step_keys], of these steps; index, forms: as for `build`, no forms leave the masks out.
    """
    height, step_keys = blocks.tile.rows, keys.shape[1]
    none, empty = np.zeros(len(block), np.int64), np.zeros((1, height, RANKS[0]), bool)
    made = {
        "rank": 0,
        "left": empty,
        "right": np.zeros((1, step_keys, RANKS[0]), bool),
        "intervals": np.zeros((0, height), np.int32),
        "bias_index": np.zeros((0, height, step_keys), np.int32),
        "family": none[:0],
    }
    if not forms:
        return made, none, none, None
    if index is None:
        kind, kinds = _kinds(blocks, block, owner, number, masks)
        if "factors" in forms and (found := _as_factors(blocks, kinds, step_keys)) is not None:
            factored, first = found
            return made | factored, first[kind], kind, None
        most = (MOST_STEPS if "bytes" in forms else step_keys) * len(owner)
        if "intervals" in forms and (found := _as_intervals(blocks, kinds, np.bincount(kind), most, step_keys)):
            bounded, first, places = found
            return made | bounded, first[kind], kind, places
    tiled, mask_step = _as_tiles(blocks, block, owner, masks, keys, index)
    rank = BYTES if index is None and "bytes" in forms else 0
    return made | tiled | {"rank": rank}, mask_step, none, None


def _kinds(blocks, block, owner, number, masks):
    """``(kind of each item, [(masks of its runs int [runs], rows), …])``: items of a kind have equal partial steps, and
    as many rows. Arguments as of `_masks`."""
    per_step = masks.shape[1]
    signature = np.full((len(block), (number.max(initial=0) + 1) * per_step + 1), _ABSENT - 1, np.int32)
    signature[:, -1] = blocks.rows[block]
    signature[owner[:, None], number[:, None] * per_step + np.arange(per_step)] = masks
    distinct, kind = distinct_rows(signature)
    return kind, [(row[:-1][row[:-1] >= _ABSENT], int(row[-1])) for row in distinct]


def _pairs(blocks, runs, rows):
    """bool [rows, K]: the pairs of query and key that `runs` with these masks allow, side by side."""
    return _allowed(blocks, runs[:, None])[:, :rows].transpose(1, 0, 2).reshape(rows, -1)


def _as_factors(blocks, kinds, step_keys):
    """``(fields of TileLists, first mask step of each kind)``; None where some kind has no factors."""
    found, known = [], {}
    for runs, rows in kinds:
        # Factors depend on which masks there are, not on how often.
        masks, of_run = np.unique(runs, return_inverse=True)
        same = masks.tobytes(), rows
        if same not in known:
            known[same] = factors(~_pairs(blocks, masks, rows), RANKS[-1])
        if (product := known[same]) is None:
            return None
        found.append((*product, of_run))
    rank = next(rank for rank in RANKS if rank >= max(a.shape[1] for a, _, _ in found))
    per_step = step_keys // blocks.tile.run
    offset = np.concatenate(([0], np.cumsum([len(of_run) // per_step for *_, of_run in found], dtype=np.int64)))
    left = np.zeros((len(found), blocks.tile.rows, rank), bool)
    right = np.zeros((max(1, offset[-1]), step_keys, rank), bool)
    for i, (a, b, of_run) in enumerate(found):
        left[i, : len(a), : a.shape[1]] = a
        by_run = b.T.reshape(b.shape[1] // blocks.tile.run, blocks.tile.run, len(b))[of_run]
        right[offset[i] : offset[i + 1], :, : len(b)] = by_run.reshape(len(of_run) // per_step, step_keys, len(b))
    return {"rank": rank, "left": left, "right": right}, offset[:-1]


def _as_intervals(blocks, kinds, counts, most, step_keys):
    """``(fields of TileLists, first mask step of each kind, places of each)``; None where all items together have more
    than `most` partial steps then. counts: items of each kind."""
    height, left, places = blocks.tile.rows, most, []
    bounds = [np.zeros((0, height), np.int64)]
    for (runs, rows), count in zip(kinds, counts.tolist(), strict=True):
        found = intervals(_pairs(blocks, runs, rows), step_keys, int(left / count))
        if found is None:
            return None
        place, begin, length = found
        left -= count * len(place)
        places.append(place)
        bounds.append(np.zeros((len(place), height), np.int64))
        bounds[-1][:, : begin.shape[1]] = begin + (length << 16)
    first = np.concatenate(([0], np.cumsum([len(place) for place in places[:-1]], dtype=np.int64)))
    return {"rank": INTERVALS, "intervals": np.concatenate(bounds).astype(np.int32)}, first, places


def _placed(keys, steps, n_full, kind, places):
    """``(keys, steps of each item)``, the partial steps of an item having its keys where the `places` of its kind say.

    keys: int [all steps + 1, step_keys], the last of no meaning, as in the result. places: int [steps, step_keys] for
    each kind, of the keys of an item's partial steps.
    """
    after = n_full + np.array([len(place) for place in places])[kind]
    old, new = (np.cumsum(each) - each + n_full for each in (steps, after))
    found = np.empty((int(after.sum()) + 1, keys.shape[1]), keys.dtype)
    late = np.arange(len(keys) - 1) - np.repeat(old, steps) >= 0
    fresh = np.arange(len(found) - 1) - np.repeat(new, after) >= 0
    found[:-1][~fresh] = keys[:-1][~late]
    by_kind = np.split(np.argsort(kind, kind="stable"), np.cumsum(np.bincount(kind))[:-1])
    for own, place in zip(by_kind, places, strict=True):
        n_old = steps[own[0]] - n_full[own[0]]
        taken = keys[old[own, None] + np.arange(n_old)].reshape(len(own), -1)
        found[new[own, None] + np.arange(len(place))] = taken[:, place]
    return found, after


def _as_tiles(blocks, block, owner, masks, keys, index):
    """``(fields of TileLists, first mask step of each item)``, masks and bias as tiles of the bias index.

    Items with equal tiles share them; parts of split blocks do where all their other parts are equal, too: the bias of
    a row is relative to the greatest of all its keys. Arguments as of `_masks`.
    """
    height = blocks.tile.rows
    # Without a bias all rows have the same bias.
    owning = block.tolist() if index is not None else [0] * len(block)
    digests: list = []
    distinct: dict = {}
    parts: dict = {}
    bounds = np.searchsorted(owner, np.arange(len(block) + 1))
    # Without a bias, equal masks are equal tiles.
    known: dict = {}
    for item in range(len(block)):
        at = slice(bounds[item], bounds[item + 1])
        same = masks[at].tobytes() if index is None else item
        if same in known:
            digests.append(known[same])
            continue
        rows = np.minimum(blocks.row_ptr[block[item]] + np.arange(height), blocks.row_ptr[block[item] + 1] - 1)
        allowed = _allowed(blocks, masks[at])
        tiles = 0 if index is None else index(rows[None, :, None], keys[at][:, None, :])
        tiles = np.where(allowed, tiles, MASKED).astype(np.int32)
        digest = hashlib.blake2b(tiles.tobytes(), digest_size=16).digest()
        digests.append(digest)
        known[same] = digest
        distinct[digest] = tiles
        parts.setdefault(owning[item], set()).add(digest)
    families: dict = {}
    number = {own: families.setdefault(frozenset(made), len(families)) for own, made in parts.items()}
    seen, held, family, mask_step, total = {}, [], [], np.zeros(len(block), np.int64), 0
    for item, (digest, own) in enumerate(zip(digests, owning, strict=True)):
        if (digest, number[own]) not in seen:
            seen[digest, number[own]] = total
            held.append(distinct[digest])
            family.append(np.full(len(held[-1]), number[own]))
            total += len(held[-1])
        mask_step[item] = seen[digest, number[own]]
    bias_index = np.concatenate(held) if total else np.zeros((1, height, keys.shape[1]), np.int32)
    families_of = np.concatenate(family) if total else np.zeros(1, np.int64)
    return {"bias_index": bias_index, "family": families_of}, mask_step


def _allowed(blocks, masks):
    """bool [steps, M, runs * W]: pairs that the runs `masks` [steps, runs] allow."""
    allowed = blocks.allowed_by(np.maximum(masks, _FULL)) & (masks != _ABSENT)[:, :, None, None]
    return allowed.transpose(0, 2, 1, 3).reshape(len(masks), blocks.tile.rows, masks.shape[1] * blocks.tile.run)
