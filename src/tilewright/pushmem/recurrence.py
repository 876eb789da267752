"""How a controller steps, as its hardware does it: registers, and the cycles in which it fires.

Registers of a controller: ``enable``; of each level ``last``, the extent less one (0 where the level is not used); of
the schedule and each address ``start`` and of each level ``step``: what the value grows by as the level advances and
the lower ones go back, ``stride_l - sum((extent_m - 1) * stride_m for m < l)`` modulo two to the width.

A controller fires in a cycle where the counter of cycles, of 16 bits, is its schedule's value. Then the first level
that is not at its end advances. After the last iteration it stays silent.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tilewright.pushmem.memories import Fired, Memory, Port
from tilewright.pushmem.settings import CYCLE, CYCLE_BITS, Affine, Configuration, Controller


def steps(extents: Sequence[int], affine: Affine, bits: int) -> list[int]:
    """What a value grows by as each level advances."""
    found, behind = [], 0
    for extent, stride in zip(extents, affine.strides, strict=True):
        found.append((stride - behind) % (1 << bits))
        behind += (extent - 1) * stride
    return found


def strides(extents: Sequence[int], found: Sequence[int], bits: int) -> list[int]:
    """The strides whose `steps` are `found`."""
    known, behind = [], 0
    for extent, step in zip(extents, found, strict=True):
        known.append((step + behind) % (1 << bits))
        behind += (extent - 1) * known[-1]
    return known


def registers(configuration: Configuration, memory: Memory) -> dict[str, int]:
    """Every register of a tile by its name, such as ``in2agg0_cycle_step1``; those of silent controllers are 0."""
    parameters, found = memory.PARAMETERS, {}
    for name, port in parameters.ports().items():
        controller = configuration.controllers.get(name)
        extents = () if controller is None else controller.extents
        found[f"{name}_enable"] = int(controller is not None)
        unused = [0] * (parameters.levels - len(extents))
        for level, extent in enumerate([*extents, *(1 for _ in unused)]):
            found[f"{name}_last{level}"] = extent - 1
        for what, bits in {CYCLE: CYCLE_BITS, **port.addresses}.items():
            affine = Affine(0) if controller is None else {CYCLE: controller.cycle, **controller.addresses}[what]
            found[f"{name}_{what}_start"] = affine.start
            for level, step in enumerate([*steps(extents, affine, bits), *unused]):
                found[f"{name}_{what}_step{level}"] = step
    return found


def silent(memory: Memory) -> dict[str, int]:
    """Registers of a tile none of whose controllers fires."""
    return registers(Configuration(memory.NAME, {}), memory)


def configuration(found: Mapping[str, int], memory: Memory) -> Configuration:
    """The `Configuration` of registers. Levels of extent 1 are left out: they never advance."""
    parameters, controllers = memory.PARAMETERS, {}
    for name, port in parameters.ports().items():
        if not found[f"{name}_enable"]:
            continue
        extents = [found[f"{name}_last{level}"] + 1 for level in range(parameters.levels)]
        affines = {}
        for what, bits in {CYCLE: CYCLE_BITS, **port.addresses}.items():
            given = [found[f"{name}_{what}_step{level}"] for level in range(parameters.levels)]
            known = strides(extents, given, bits)
            used = tuple(stride for extent, stride in zip(extents, known, strict=True) if extent > 1)
            affines[what] = Affine(found[f"{name}_{what}_start"], used)
        cycle = affines.pop(CYCLE)
        controllers[name] = Controller(tuple(extent for extent in extents if extent > 1), cycle, affines)
    return Configuration(memory.NAME, controllers)


def events(controller: Controller, port: Port, cycles: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """``(times, {address: values})``, int64 [firings] each: what a controller does in the first `cycles` cycles."""
    values = controller.cycle.at(controller.extents, CYCLE_BITS)
    gaps = (np.diff(values) - 1) % (1 << CYCLE_BITS) + 1
    # The first of those that are equal to the counter of 16 bits is the next one.
    times = values[0] + np.concatenate(([0], np.cumsum(gaps)))
    times = times[times < cycles]
    addresses = {
        name: controller.addresses[name].at(controller.extents, bits)[: len(times)]
        for name, bits in port.addresses.items()
    }
    return times, addresses


def fired(configuration: Configuration, memory: Memory, cycles: int) -> Fired:
    """The `events` of every controller; none of those that are silent."""
    none = np.zeros(0, dtype=np.int64)
    return {
        name: events(configuration.controllers[name], port, cycles)
        if name in configuration.controllers
        else (none, dict.fromkeys(port.addresses, none))
        for name, port in memory.PARAMETERS.ports().items()
    }
