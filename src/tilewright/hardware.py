"""What a device is and what it allows (stages T3 to T5). Nothing about a device is a default argument elsewhere."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """The limits that a schedule must respect; symbols are those of the published constraints C2 to C7.

    slots: work items that run side by side (C4, load).
    per_block: most of each named resource that one item may take (C2), e.g. ``{"working_set_bytes": 1 << 20}``.
    envelope: most of each named resource that the tile kinds of one round may take together (C5), each kind counting with
        the largest need among its items.
    occupancy: most occupancy units that the items of one round may take together (C6).
    max_tile_kinds: tile kinds in one round (C3, kappa).
    conflicts: pairs of tile names that may not share a round (C7).
    rounds: most rounds that a schedule may use.
    round_us: cost of one more round (a barrier), on top of its launches.
    """

    slots: int
    per_block: dict[str, float]
    envelope: dict[str, float]
    occupancy: float
    max_tile_kinds: int
    conflicts: tuple[tuple[str, str], ...] = field(default=())
    rounds: int = 1
    round_us: float = 0.0
