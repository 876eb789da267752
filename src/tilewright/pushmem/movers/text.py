"""Descriptors as the tools of AMD's arrays read them: ``aie.dma_bd`` of MLIR-AIE, and access patterns of IRON.

Both count in words of four bytes: a buffer of other elements is seen as ``memref<...xi32>``. Sizes and strides stand
outermost first. ASSUME: written after the public examples of both tools; neither was run here.
"""

from tilewright.pushmem.movers import Descriptor, Mover, Task


def written(tasks: tuple[Task, ...], own: Mover, words: int, channel: int = 0) -> str:
    """All tasks as text: for each descriptor what it moves, its operation and its pattern.

    words: of the buffer. channel: of the mover; where descriptors belong to channels, it decides their numbers.
    """
    lines, number = [], own.first_of_odd if channel % 2 else 0
    for i, task in enumerate(tasks):
        chain = f"a chain of {len(task.descriptors)}" if len(task.descriptors) > 1 else "one descriptor"
        times = f", made {task.times} times (repeat_count = {task.times - 1})" if task.times > 1 else ""
        lines.append(f"// task {i}: {chain}{times}")
        for each in task.descriptors:
            sizes, steps = _outermost_first(each, task.times)
            dims = ", ".join(f"<size = {n}, stride = {s}>" for n, s in zip(sizes, steps, strict=True))
            lines += [
                f"// {_moved(each, task.times)}",
                f"aie.dma_bd(%buffer : memref<{words}xi32>, {each.base}, {each.length}, [{dims}]) {{bd_id = {number} : "
                "i32}",
                f"# TensorAccessPattern(({words},), offset={each.base}, sizes={sizes}, strides={steps})",
            ]
            number += 1
    return "\n".join(lines) + "\n"


def _outermost_first(own: Descriptor, times: int) -> tuple[list[int], list[int]]:
    sizes, steps = [*own.sizes], [*own.steps]
    if times > 1:
        # How a descriptor moves on is the loop around all others, as for mlir-aie.
        sizes, steps = [*sizes, *[1] * (3 - len(sizes)), times], [*steps, *[1] * (3 - len(steps)), own.forward]
    return sizes[::-1], steps[::-1]


def _moved(own, times):
    last = own.base + sum((n - 1) * s for n, s in zip(own.sizes, own.steps, strict=True))
    on = f", then on by {own.forward}" if times > 1 and own.forward else ", then the same again" if times > 1 else ""
    return f"moves {own.length} word{'s' * (own.length > 1)} from {own.base} to {last}{on}"
