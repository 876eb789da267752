"""Arrays of vector units with buffers beside them, generated from few numbers and from `technology.yaml`.

An array multiplies, in each cycle, `vector` input channels of `elements` pixels with the weights of `lanes` output
channels, 8 bits each, and adds to sums of 24 bits. The paper's hardware is built of such vector units, whose widths it
searches. ASSUME: its numbers are not public; these are round ones of the same order.
"""

import math
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from tilewright.core.errors import ArtifactError, ConfigError

TECHNOLOGY = Path(__file__).with_name("technology.yaml")
BITS, SUM_BITS = 8, 24
# Where what is off the chip never runs out of room.
ENDLESS_BITS = 10**12

Positive = Annotated[int, msgspec.Meta(ge=1)]
Cost = Annotated[float, msgspec.Meta(gt=0)]


class Technology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Energies in pJ and areas in µm², see the file."""

    multiply_pj: Cost
    add_pj_per_bit: Cost
    multiply_um2: Cost
    add_um2_per_bit: Cost
    register_pj_per_bit: Cost
    register_um2_per_bit: Cost
    buffer_pj_per_64_bits: dict[int, Cost]
    buffer_um2_per_bit: Cost
    memory_pj_per_bit: Cost
    memory_bits_per_cycle: Positive

    def buffer_pj_per_bit(self, kib):
        """Energy of a bit of a buffer of `kib` KiB: a power of its size between known ones, and beyond them."""
        sizes = sorted(self.buffer_pj_per_64_bits)
        above = next((i for i, size in enumerate(sizes) if size >= kib), len(sizes) - 1)
        low, high = sizes[max(above, 1) - 1], sizes[max(above, 1)]
        least, most = self.buffer_pj_per_64_bits[low], self.buffer_pj_per_64_bits[high]
        return least * (kib / low) ** (math.log(most / least) / math.log(high / low)) / 64


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator. vector: input channels that a unit sums up; lanes: output channels; elements: pixels at a time.

    weights_kib, inputs_kib, outputs_kib: of its buffers. Raises `ConfigError` where a buffer cannot hold what the array
    takes in one cycle.
    """

    vector: Positive
    lanes: Positive
    elements: Positive
    weights_kib: Positive
    inputs_kib: Positive
    outputs_kib: Positive

    def __post_init__(self):
        tiles = {
            "weights_kib": self.vector * self.lanes * BITS,
            "inputs_kib": self.vector * self.elements * BITS,
            "outputs_kib": self.lanes * self.elements * SUM_BITS,
        }
        for buffer, bits in tiles.items():
            if (held := getattr(self, buffer)) * 8192 < bits:
                raise ConfigError(
                    f"hardware {self}: {buffer}: expected room for one tile, {bits / 8192:g} KiB, found {held}"
                )

    def __str__(self):
        buffers = f"{self.weights_kib}+{self.inputs_kib}+{self.outputs_kib}"
        return f"{self.vector}x{self.lanes}x{self.elements} {buffers}"

    @property
    def multipliers(self):
        """Products in a cycle."""
        return self.vector * self.lanes * self.elements

    @property
    def area_mm2(self):
        """Of multipliers, adders, registers and buffers. Wires, control and what norms need are left out."""
        cost = technology()
        weights = self.vector * self.lanes * BITS
        sums = self.lanes * self.elements * SUM_BITS
        um2 = self.multipliers * (cost.multiply_um2 + SUM_BITS * cost.add_um2_per_bit)
        um2 += (weights + sums) * cost.register_um2_per_bit
        um2 += 8192 * (self.weights_kib + self.inputs_kib + self.outputs_kib) * cost.buffer_um2_per_bit
        return um2 / 1e6

    def described(self):
        """The hardware as `zigzag` reads it: sizes in bits, energies in pJ of a whole port, areas in µm²."""
        cost, v, n, e = technology(), self.vector, self.lanes, self.elements
        every = ["D1", "D2", "D3"]
        weights, inputs, sums = BITS * v * n, BITS * v * e, SUM_BITS * n * e
        off = cost.memory_bits_per_cycle

        def register(bits, operand, ports, served):
            return _memory(bits, [operand], [(*port, bits) for port in ports], served, cost.register_pj_per_bit)

        def buffer(kib, operand, ports):
            return _memory(8192 * kib, [operand], ports, every, cost.buffer_pj_per_bit(kib))

        return {
            "name": "generated",
            "memories": {
                # A weight serves all pixels of a cycle; a sum is of all input channels of a cycle.
                "weights_register": register(BITS, "I2", [("read", ["tl"]), ("write", ["fh"])], ["D3"]),
                "sums_register": register(
                    SUM_BITS, "O", [("read", ["tl"]), ("read", ["th"]), ("write", ["fh"]), ("write", ["fl"])], ["D1"]
                ),
                "weights": buffer(self.weights_kib, "I2", [("read", ["tl"], weights), ("write", ["fh"], off)]),
                "inputs": buffer(self.inputs_kib, "I1", [("read", ["tl"], inputs), ("write", ["fh"], off)]),
                "outputs": buffer(self.outputs_kib, "O", [("read", ["tl", "th"], sums), ("write", ["fh", "fl"], sums)]),
                "memory": _memory(
                    ENDLESS_BITS,
                    ["I1", "I2", "O"],
                    [("read_write", ["fh", "tl"], off)],
                    every,
                    cost.memory_pj_per_bit,
                ),
            },
            "operational_array": {
                "unit_energy": cost.multiply_pj + SUM_BITS * cost.add_pj_per_bit,
                "unit_area": cost.multiply_um2 + SUM_BITS * cost.add_um2_per_bit,
                "dimensions": every,
                "sizes": [v, n, e],
            },
        }


def _memory(bits, operands, ports, served, pj_per_bit):
    """A memory as `zigzag` reads it. ports: ``(type, directions, bits a cycle)``."""
    named, count = [], {}
    for kind, directions, width in ports:
        letters = "".join(word[0] for word in kind.split("_"))
        count[letters] = count.get(letters, 0) + 1
        # What is summed up comes back from below and goes down again.
        ways = {
            operand: [*directions, *(["fl", "th"] if letters == "rw" and operand == "O" else [])]
            for operand in operands
        }
        named.append(
            {
                "name": f"{letters}_port_{count[letters]}",
                "type": kind,
                "bandwidth_min": BITS,
                "bandwidth_max": width,
                "allocation": [f"{operand}, {way}" for operand, own in ways.items() for way in own],
            }
        )
    read, write = (max(width for kind, _, width in ports if word in kind) for word in ("read", "write"))
    return {
        "size": bits,
        "r_cost": pj_per_bit * read,
        "w_cost": pj_per_bit * write,
        "area": 0.0,
        "latency": 1,
        "operands": operands,
        "ports": named,
        "served_dimensions": served,
    }


@cache
def technology():
    """`Technology` of the file beside this module."""
    return _read(TECHNOLOGY, Technology)


def read(path):
    """The `Hardware` of a YAML file with its fields.

    Raises `ArtifactError` for a file that cannot be read and `ConfigError` for what it states.
    """
    return _read(Path(path), Hardware)


def _read(path, kind):
    import yaml

    try:
        return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), kind)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; expected hardware as YAML") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ArtifactError(f"{path}: expected YAML, found: {' '.join(str(error).split())}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; fields: {', '.join(kind.__struct_fields__)}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def generated(vectors, lanes, elements, buffers, multipliers):
    """Every `Hardware` of these widths and buffers, whose products in a cycle lie in `multipliers`, ``(least, most)``.

    buffers: KiB for weights, inputs and outputs, several times. Raises `ConfigError` where none is left.
    """
    least, most = multipliers
    found = [
        Hardware(v, n, e, *kib)
        for v in vectors
        for n in lanes
        for e in elements
        for kib in buffers
        if least <= v * n * e <= most
    ]
    if not found:
        raise ConfigError(f"hardware: expected some with {least} to {most} multipliers, found none")
    return found
