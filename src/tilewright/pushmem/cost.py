"""Area and energy of memories from published parameters. Nothing here was measured by this project.

Source: "Unified Buffer", ACM TACO 2023, Table 5: a tile that stores 3 × 3 lines, in 16 nm.
"""

from dataclasses import dataclass

from tilewright.pushmem.mapping import Mapped

AREA_UM2 = {"pub": 13_700, "dp": 16_700}
ENERGY_PJ = {"pub": 2.5, "dp": 3.6}


@dataclass(frozen=True)
class Cost:
    """area_um2: of all memory tiles. energy_nj: of all words that tiles deliver. ports: reads of all buffers that keep
    words, a tile each without registers. saved: the share of these tiles that shift registers and sharing save.
    """

    area_um2: int
    energy_nj: float
    ports: int
    saved: float


def cost(mapped: Mapped, memory: str) -> Cost:
    """The `Cost` of a mapped program."""
    words = sum(len(stream.times) for use in mapped.wiring.uses for _, stream in use.reads)
    plan = mapped.schedule
    stored = {e.buffer for e in plan.edges if plan.distance(e) != (0, 0)}
    ports = sum(e.buffer in stored for e in plan.edges)
    saved = 1 - len(mapped.tiles) / ports if ports else 0.0
    return Cost(AREA_UM2[memory] * len(mapped.tiles), ENERGY_PJ[memory] * words / 1e3, ports, saved)
