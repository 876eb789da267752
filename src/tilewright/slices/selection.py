"""How the keys of slices are chosen: a predictor writes a code for each group and key, and one selection reads them.

The code of a key is ``min(255, floor(-8 log2 m))`` of the share m of the group's attention that the key is expected to
get: an eighth of an octave, 32 octaves deep. A group whose codes are all 255 has no shares: q or k holds NaN.

Contract of ``slices/<device>/selection.py``. ``Selection(layout, device)``, for a `slices.layout.Layout` or a part of
one (see `parts`), has methods that return codes uint8 [B, H, G, N_k], whose rows begin at multiples of `ALIGNED` bytes.
q is [B, H, N_q, D], the queries of groups alone, and k [B, H, N_k, D], strided, the values of a head side by side.
scale: of the scores, as in attention. lengths: int32 [B] from 1 to N_k, or None; the keys of a batch entry are so many
first ones then, and what others get is not defined.
    ``pooled(q, k, pool, scale, lengths, sample)``: shares of the means of `pool` consecutive queries each, averaged
        over the group. Log-sum-exps are those of every `sample`-th key, which stands for the keys up to the next. Above
        1, it is for groups of one mean and without `lengths`; a key whose score is no number has code 0;
    ``column(q, k, lse, step, largest, scale, lengths)``: the largest share, or the mean one, that every `step`-th query
        of the group gives to a key. lse: float32 [B, H, N_q], log-sum-exps of all scores of a query, or None: computed
        here;
    ``blocks(q, k, block, similarity, scale)``: shares that the mean query of a group gives to the means of `block`
        consecutive keys; code 0 for blocks and groups whose mean cosine to their mean is below `similarity`. Keys of
        text are in no block and have the last code;
    ``given(mask)``: 0 where bool mask [B or 1, H or 1, G, N_k] is True, else 255;
    ``random(seed)``: every code as likely as any other, but the last, which stands for no share.
One chooses by codes:
    ``select(codes, rule, keys, counts, lengths)``: the lists of all groups, written to keys and counts of `SliceLists`.
        Where a group's keys do not fit, its list holds the first of them by code and its count is that of all, which is
        larger than the capacity; where it has no shares, its count is `layout.UNKNOWN`; where its length is out of
        range, `layout.NO_LENGTH`. Lists with these two counts hold some key at each place.
``memory(device) -> bytes``: of the device.
``recorded(device, call, *inputs) -> (result, replay)``, where calls are launches: the result of ``call(tape,
    *inputs)``, which tells ``tape.settle(*results)`` after each part of its work what results it has so far, and a
    ``callable(*inputs) -> results`` for other tensors of these layouts, or None in place of it. It returns None for
    tensors that it is not for.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tilewright.slices.layout import Layout

# Codes, and codes of a bin, which have one weight: that of the middle of half an octave.
CODES, OCTAVE, BIN = 256, 8, 4
# The weights of the bins of the first octave; that of any other is one of them, halved for each octave. Integers, so
# that sums do not depend on their order and are the same on every device.
WEIGHTS = tuple(round(2 ** (31 - (i + 0.5) * BIN / OCTAVE)) for i in range(OCTAVE // BIN))
# What masses are rounded to.
MASS_UNIT = 2.0**-24
# Bytes that codes and what they are made of may take at a time.
WORKSPACE = 256 << 20
# Above every number of units.
MOST_UNITS = 2**31 - 1
# Rows of codes begin at multiples of so many bytes.
ALIGNED = 16


class Rule(NamedTuple):
    """Which keys of a group are listed: those with the smallest codes, equal codes by key.

    Units are aligned runs of `width` keys, which are listed whole; the code of a run is that of the sum of its shares.
    mass: as many units as make up this share of the group's attention, or None.
    code: units of this code or a smaller one, or None.
    count: so many units, a number for each head where they differ, or None. One of mass, code and count is stated;
        beside mass or code, count is the most that these list.
    least: units of a group whatever the rule says. most: units that a list has room for.
    always: ranges ``(first, end)`` of units that are listed whatever their codes, in order, apart from each other. They
        count, and so does their mass.
    free: units of code 0 are listed and have no mass.
    known: codes tell which keys are listed: a group whose codes are all the last one has no keys, not no shares.
    """

    width: int = 1
    mass: float | None = None
    code: int | None = None
    count: int | tuple[int, ...] | None = None  # type: ignore[assignment]  # in place of the method of tuples
    least: int = 0
    most: int = 0
    always: tuple[tuple[int, int], ...] = ()
    free: bool = False
    known: bool = False

    @property
    def mass_units(self) -> int:
        """`mass` in units of `MASS_UNIT`."""
        return round((self.mass or 0) / MASS_UNIT)

    def counts(self, heads: int) -> tuple[int, ...]:
        """`count` of each of so many heads; for None a number above all others."""
        count = MOST_UNITS if self.count is None else self.count
        return count if isinstance(count, tuple) else (count,) * heads

    @property
    def n_always(self) -> int:
        """Units in the ranges of `always`."""
        return sum(end - first for first, end in self.always)


class Part(NamedTuple):
    """Consecutive groups, in the order of [B, H, G], that are predicted at a time: a range of each dimension."""

    batch: slice
    heads: slice
    groups: slice


# All groups.
WHOLE = Part(slice(None), slice(None), slice(None))


def parts(layout: "Layout", group_bytes: int) -> tuple[Part, ...]:
    """Parts of `layout` whose groups take `group_bytes` of `WORKSPACE` each; at least one group each."""
    heads, groups = layout.heads, layout.groups
    most = max(1, WORKSPACE // group_bytes)
    if most >= layout.batch * heads * groups:
        return (WHOLE,)
    if most >= heads * groups:
        return tuple(Part(b, slice(None), slice(None)) for b in _ranges(layout.batch, most // (heads * groups)))
    entries = _ranges(layout.batch, 1)
    if most >= groups:
        return tuple(Part(b, h, slice(None)) for b in entries for h in _ranges(heads, most // groups))
    return tuple(Part(b, h, g) for b in entries for h in _ranges(heads, 1) for g in _ranges(groups, most))


def _ranges(n, most):
    """Slices of 0..n of at most `most` elements each, as equal as can be."""
    step = math.ceil(n / math.ceil(n / most))
    return [slice(lo, min(lo + step, n)) for lo in range(0, n, step)]


def part_layout(layout: "Layout", part: Part) -> "Layout":
    """The `Layout` of a part by itself."""
    batch, heads, groups = (
        len(range(n)[taken]) for n, taken in zip((layout.batch, layout.heads, layout.groups), part, strict=True)
    )
    first = (part.groups.start or 0) * layout.rows
    return layout._replace(batch=batch, heads=heads, queries=min(groups * layout.rows, layout.queries - first))


def part_rule(rule: Rule, part: Part) -> Rule:
    """The `Rule` of a part by itself."""
    return rule._replace(count=rule.count[part.heads]) if isinstance(rule.count, tuple) else rule


def padded(n: int) -> int:
    """Bytes from a row of n codes to the next."""
    return -(-n // ALIGNED) * ALIGNED
