"""Ports of all buffers, and the flow of words from writes to reads, by isl."""

import dataclasses
import itertools
from collections.abc import Iterator

from tilewright.pushmem.errors import ProgramError, need
from tilewright.pushmem.program import Port, Program


def extract(program: Program) -> Program:
    """`program` with the ports of its buffers. Raises `ProgramError` for a read that no write covers."""
    check_ranges(program)
    check_flow(program)
    ports: dict[str, list[Port]] = {name: [] for name in program.buffers}
    for name in program.inputs:
        axes = [f"i{d}" for d in range(len(program.buffers[name].shape))]
        extents = program.buffers[name].shape
        bounds = " and ".join(f"0 <= {a} < {e}" for a, e in zip(axes, extents, strict=True))
        place = f"{name}[{', '.join(axes)}]"
        ports[name].append(Port(f"{name}.in", "in", f"{{ {place} : {bounds} }}", f"{{ {place} -> {place} }}", name))
    for s in program.statements:
        ports[s.name].append(Port(f"{s.name}.in", "in", s.domain, s.write, s.name))
        for k, read in enumerate(s.reads):
            out = sum(p.kind == "out" for p in ports[read.buffer])
            ports[read.buffer].append(Port(f"{read.buffer}.out{out}", "out", s.domain, s.access(k), s.name))
    buffers = {n: dataclasses.replace(b, ports=tuple(ports[n])) for n, b in program.buffers.items()}
    return dataclasses.replace(program, buffers=buffers)


def check_ranges(program: Program) -> None:
    """Raise `ProgramError` for a read outside the box of a buffer; the message names stage, index and range."""
    isl = need("islpy")
    for s in program.statements:
        for k, read in enumerate(s.reads):
            places = isl.Map(s.access(k)).intersect_domain(isl.Set(s.domain)).range()
            for d, (i, extent) in enumerate(zip(read.indices, program.buffers[read.buffer].shape, strict=True)):
                low, high = (
                    int(str(f(d).max_val() if f == places.dim_max else f(d).min_val()))
                    for f in (places.dim_min, places.dim_max)
                )
                if low < 0 or high >= extent:
                    raise ProgramError(
                        f"{s.name}: index {i} of {read.buffer} spans {low}..{high}, not within 0..{extent - 1}"
                    )


def check_flow(program: Program) -> None:
    """Raise `ProgramError` for a read that no earlier write covers, by isl's dependence analysis."""
    isl = need("islpy")
    depth = max((len(s.loops) for s in program.statements), default=0)
    reads = writes = order = None

    def union(one, text):
        new = isl.UnionMap(text)
        return new if one is None else one.union(new)

    for name in program.inputs:
        axes = [f"i{d}" for d in range(len(program.buffers[name].shape))]
        bounds = " and ".join(f"0 <= {a} < {e}" for a, e in zip(axes, program.buffers[name].shape, strict=True))
        writes = union(writes, f"{{ __load_{name}[{', '.join(axes)}] -> {name}[{', '.join(axes)}] : {bounds} }}")
        order = union(order, f"{{ __load_{name}[{', '.join(axes)}] -> [{', '.join(['0'] * (depth + 1))}] : {bounds} }}")
    for number, s in enumerate(program.statements, 1):
        bounds = s.domain.split(":")[1].rstrip(" }")
        padded = [*s.loops, *["0"] * (depth - len(s.loops))]
        order = union(
            order, f"{{ {s.name}[{', '.join(s.loops)}] -> [{', '.join([str(number), *padded])}] : {bounds} }}"
        )
        writes = union(writes, s.write.rstrip(" }") + f" : {bounds} }}")
        for k in range(len(s.reads)):
            reads = union(reads, s.access(k).rstrip(" }") + f" : {bounds} }}")
    if reads is None:
        return
    info = isl.UnionAccessInfo.from_sink(reads).set_must_source(writes).set_schedule_map(order)
    missing = info.compute_flow().get_must_no_source()
    if not missing.is_empty():
        raise ProgramError(f"reads that no write covers: {missing}")


def pairs(program: Program) -> Iterator:
    """Every read as ``(statement, k, access)``."""
    return itertools.chain.from_iterable(((s, k, r) for k, r in enumerate(s.reads)) for s in program.statements)
