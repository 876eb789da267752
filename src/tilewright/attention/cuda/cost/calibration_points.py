"""The launches that a calibration times: made-up items, all alike (stage T3)."""

from dataclasses import dataclass

import numpy as np

from tilewright.attention.cuda.tile_lists import BYTES, INTERVALS, RANKS, Item, Part, TileLists

# The variants of the kernel, see `record.Kernel`.
VARIANTS = (None, *RANKS, INTERVALS, BYTES, 0)
# Steps of an item, without and with a mask, that tell the parts of its time apart.
STEPS = ((2, 2), (16, 2), (2, 16))
# Full loads of the multiprocessors one after another.
WAVES = (1, 3, 6)
# Tokens of items whose keys lie together: far fewer than the second-level cache holds; of what is only compiled.
NEAR_TOKENS, FEW_TOKENS = 8192, 256
# Shares of the second-level cache that keys take which lie in it, and which do not; masks take the first at most.
SHARES = INSIDE, BEYOND = 0.4, 4.0
# Where at most so many programs fit a multiprocessor, each number of them is timed.
EACH = 8


@dataclass(frozen=True)
class Point:
    """One launch that is timed: items alike.

    rank: of the variant. busy, waves: programs of each multiprocessor at a time, and one after another. full, partial:
    steps of an item. tokens: None for few keys that lie together, else so many, of which any are taken.
    own_masks: other items do not have its masks. parts, rows: of each block, where blocks are split. more: programs of
    each multiprocessor beyond full waves.
    """

    rank: int | None
    busy: int
    waves: int = 1
    full: int = 0
    partial: int = 0
    tokens: int | None = None
    own_masks: bool = False
    parts: int = 1
    rows: int | None = None
    more: int = 0


@dataclass(frozen=True)
class Setup:
    """What all points of a calibration share: the form of the kernel, type and head dim, and sizes of the GPU."""

    rows: int
    step_keys: int
    head_dim: int
    dtype: str
    multiprocessors: int
    l2_bytes: int

    @property
    def batch(self):
        """Entries that share the lists: as many as the multiprocessors can be shared out to."""
        return next(batch for batch in (4, 3, 2, 1) if self.multiprocessors % batch == 0)

    def work(self, point):
        """``(lists, tokens, batch)`` of a point."""
        batch = 1 if point.own_masks and point.waves == 1 else self.batch
        n_items = self.multiprocessors * (point.busy * point.waves + point.more) // batch
        n_tokens = point.tokens or NEAR_TOKENS
        return lists(point, self.rows, self.step_keys, n_items, n_tokens), n_tokens, batch

    def compiled(self, rank, split):
        """Lists of two items for which a variant is compiled; split: some block is."""
        point = Point(rank, 1, full=2, partial=0 if rank is None else 2, parts=1 + split)
        return lists(point, self.rows, self.step_keys, 2, FEW_TOKENS)

    def basic(self, rank: int, resident):
        """The points that tell what programs of a variant take; `resident` of them fit a multiprocessor."""
        steps = sorted({(full, 0) for full, _ in STEPS} if rank is None else STEPS)
        levels = range(1, resident + 1) if resident <= EACH else sorted({1, 2, 3, (resident + 1) // 2, resident})
        loads = [(busy, 1) for busy in levels] + [(resident, waves) for waves in WAVES[1:]]
        more = [Point(rank, resident, 1, *each, more=more) for more in sorted({1, resident // 2}) for each in steps]
        return [Point(rank, *load, *each) for load in loads for each in steps] + more

    def memory(self, resident) -> list:
        """Points whose keys lie together, apart, and beyond the second-level cache."""
        row_bytes = 2 * self.head_dim * (4 if self.dtype == "float32" else 2)
        tokens = [max(NEAR_TOKENS // 2, int(share * self.l2_bytes / (row_bytes * self.batch))) for share in SHARES]
        return [Point(RANKS[0], resident, WAVES[1], partial=STEPS[-1][1], tokens=n) for n in (None, *tokens)]

    def factors(self, resident) -> list:
        """A point whose items have factors of the greatest rank that no other item has."""
        return [Point(RANKS[-1], resident, WAVES[1], partial=STEPS[-1][1], own_masks=True)]

    def tiles(self, resident):
        """Points with tiles of masks that no other item has, few and many; in one wave, no other program."""
        few = max(1, int(INSIDE * self.l2_bytes / (4 * self.rows * self.step_keys)))
        points = []
        for waves, batch in ((WAVES[1], self.batch), (1, 1)):
            held = max(1, few * batch // (self.multiprocessors * resident * waves))
            points += [Point(0, resident, waves, partial=n, own_masks=True) for n in sorted({held, STEPS[-1][1]})]
        return points

    def parts(self, resident) -> list:
        """Points whose blocks are split."""
        forms = ((4, None), (16, None), (16, 1), (64, 1))
        return [Point(RANKS[0], resident, partial=4, parts=n, rows=rows) for n, rows in forms]


def lists(point, rows, step_keys, n_items, n_tokens: int) -> TileLists:
    """`TileLists` of `n_items` items as a `Point` has them, over `n_tokens` tokens."""
    rng, item = np.random.default_rng(0), np.arange(n_items)
    steps, n_rows = point.full + point.partial, point.rows or rows
    block = item // point.parts
    if point.tokens is None:
        keys = (item[:, None] * rows + np.arange(steps * step_keys)) % n_tokens
    else:
        keys = rng.integers(0, n_tokens, (n_items, steps * step_keys))
    keys = keys.reshape(-1, step_keys)
    rank = RANKS[0] if point.rank is None else point.rank
    # Masks that are held: their left factors, and their steps.
    kinds = n_items if point.own_masks else 1
    held = max(1, point.partial * kinds)
    factored, tiled = rank in RANKS, rank in (BYTES, 0)
    fields = {
        Item.FIRST_ROW: block * n_rows % (n_tokens - n_rows + 1),
        Item.ROWS: np.full(n_items, n_rows),
        Item.FIRST_STEP: item * steps,
        Item.FULL_STEPS: np.full(n_items, point.full),
        Item.STEPS: np.full(n_items, steps),
        Item.MASK_STEP: item * (point.partial if point.own_masks else 0),
        Item.LEFT_FACTOR: item * (kinds > 1),
        Item.PART: item if point.parts > 1 else np.full(n_items, -1),
    }
    # In the order of `Part`.
    parts = np.stack([block, np.bincount(block)[block], block * point.parts * n_rows, item % point.parts], 1)
    is_split = point.parts > 1
    return TileLists(
        rows=rows,
        step_keys=step_keys,
        rank=rank,
        items=np.stack([fields[field] for field in Item], 1).astype(np.int32),
        keys=np.concatenate((keys, keys[:1])).astype(np.int32),
        # Nothing is forbidden: the right factors, bytes and tiles are zeros, and intervals are as long as a step.
        left=rng.random((kinds if factored else 1, rows, rank if factored else RANKS[0])) < 0.5,
        right=np.zeros((held if factored else 1, step_keys, rank if factored else RANKS[0]), bool),
        intervals=np.full((held if rank == INTERVALS else 0, rows), step_keys << 16, np.int32),
        bias_index=np.zeros((held if tiled else 0, rows, step_keys), np.int32),
        family=np.zeros(held if tiled else 0, np.int64),
        parts=parts.astype(np.int32) if is_split else np.zeros((0, len(Part)), np.int32),
        groups=int(block[-1]) + 1 if is_split else 0,
        part_rows=(int(block[-1]) + 1) * point.parts * n_rows if is_split else 0,
        full=True,
        partial=point.rank is not None,
    )
