"""An abacus: a device with one rod for each of its threads, and beads instead of memory."""

from tilewright.core.provenance import versions

MACHINE = ("kind", "name")
IDENTITY = (*MACHINE, "beads", "torch")
TORCH_DEVICE = "cpu"
CUDA = GPU_TIMER = EXCLUSIVE = False
TILES = ("8x1", "16x16")
FEWEST_ROWS = 1
MIXES = True
SPLIT_KEYS = 64


def describe():
    """Facts of the abacus. beads: the most that an item may take."""
    return {"kind": "abacus", "name": "wooden abacus", "threads": 3, "beads": 1 << 20, "versions": versions("torch")}


def current():
    """None: there is one abacus."""
    return None


def limits(device):
    """Limits of the beads; a round has as many items side by side as there are rods."""
    beads = {"beads": float(device["beads"])}
    return {"lanes": device["threads"], "per_block": beads, "envelope": beads, "occupancy": 1e12, "max_tile_kinds": 2}
