"""Neighbourhood attention on a CPU: workers attend boxes of queries to copies of the boxes of their keys.

The contract is that of `neighborhood.backends`.
"""

from collections.abc import Callable
from ctypes import c_int64
from functools import partial
from itertools import product
from math import log, prod

import torch
from torch import Tensor

from tilewright.devices.cpu.workers import alone, in_any_state, workers
from tilewright.neighborhood.boxes import Candidate, Choice
from tilewright.neighborhood.cpu import choice, kernel, slabs
from tilewright.neighborhood.cpu.slabs import Memory
from tilewright.neighborhood.rule import MOST_AXES, Axis, Rule

# Queries of a head that are looked at together where all see the same keys.
_ROWS = 1 << 12


@in_any_state
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    scale: float,
    extra: tuple[Tensor, Tensor] | None,
    want_lse: bool,
    bound: float | None = None,
    form: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `neighborhood.backends`. form: a box of queries, None for what `choice.choose` finds."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    logs = q.new_empty((2, *q.shape[:-1]) if want_lse else (2, 0), dtype=torch.float32)
    lanes = {"a": q, "d": out} | (dict(zip("st", logs, strict=True)) if want_lse else {})
    _run(kernel.FORWARD, rule, lanes, {"x": k, "y": v}, _by_head(extra), scale, form)
    return out, logs[0].log_().add_(logs[1], alpha=log(2)) if want_lse else None


def choose(
    rule: Rule, grid: tuple[int, ...], heads: int, kv_heads: int, dim: int, v_dim: int, dtype: torch.dtype
) -> Choice:
    """See `neighborhood.backends`."""
    return choice.choose(rule, grid, heads, kv_heads, dim, v_dim, torch.get_num_threads())


def candidates(
    rule: Rule, grid: tuple[int, ...], heads: int, kv_heads: int, dim: int, v_dim: int, dtype: torch.dtype
) -> list[Candidate]:
    """See `neighborhood.backends`; predicted: in microseconds of a core."""
    found = sorted(choice.candidates(rule, grid, heads, kv_heads, dim, v_dim))
    return [
        Candidate("x".join(map(str, box)), choice.visited(rule, grid, box, heads // kv_heads), us, box)
        for us, box in found
    ]


def prepared(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, scale: float, want_lse: bool, bound: float | None
) -> Callable:
    """See `neighborhood.backends`."""
    return partial(forward, rule=rule, scale=scale, extra=None, want_lse=want_lse)


@in_any_state
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    rule: Rule,
    scale: float,
    extra: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See `neighborhood.backends`."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    logs = {"s": (lse * (-1 / log(2))).contiguous(), "t": lse.new_empty(lse.shape)}
    more = _by_head(extra)
    pairs = partial(_products, out, grad, logs["t"])
    _share(pairs, [(entry, *place) for entry in range(len(q)) for place in _places(q.shape[1:-2])])
    passing = {"x": k, "y": v}
    _run(kernel.OF_QUERIES, rule, {"a": q, "b": grad, "c": dq} | logs, passing, more, scale)
    _run(kernel.OF_KEYS, rule, {"a": k, "b": v, "c": dk, "d": dv}, {"x": q, "y": grad} | logs, None, scale)
    if extra is None or more is None:
        return dq, dk, dv, None, None
    found = extra[0].new_empty(extra[0].shape), extra[1].new_empty(extra[1].shape)
    given = q, out, lse, grad, more, found, scale
    _share(partial(_differentiate_extra, given), product(range(len(k)), range(k.shape[-2])))
    return dq, dk, dv, *found


def _share(call, jobs):
    """Call with each job, on all cores."""
    threads = torch.get_num_threads()
    with alone():
        workers(threads).run(call, jobs)


def _places(grid):
    """Parts of a grid of a few thousand tokens."""
    sides: list = []
    for n in reversed(grid):
        sides.insert(0, min(n, max(1, _ROWS // prod(sides))))
    for begins in product(*(range(0, n, side) for n, side in zip(grid, sides, strict=True))):
        yield tuple(slice(lo, lo + side) for lo, side in zip(begins, sides, strict=True))


def _products(out, grad, found, place):
    """Write the negative of what results times their gradients sum up to."""
    torch.sum(out[place].float() * grad[place], -1, out=found[place]).neg_()


def _run(kind, rule, lanes, passing, extra, scale, box=None):
    """Run a kernel with tensors [B, *grid, H, ...] by their names in `kernel.FIELDS`: those in its lanes, and those
    that pass by."""
    (batch, *grid, heads), other_heads, threads = lanes["a"].shape[:-1], passing["x"].shape[-2], torch.get_num_threads()
    group = choice.together(max(1, heads // other_heads))
    units, widths = heads // group, [_padded(passing[name]) for name in "xy"]
    share, each = max(1, units // other_heads), max(1, other_heads // units)
    box = box or choice.choose(rule, tuple(grid), heads, min(heads, other_heads), *widths).box
    call, memory = kernel.compiled(kind, *widths), Memory()
    # Grids of one or two axes have others of one token.
    more = (None,) * (MOST_AXES - len(box))
    axes, box = (*(Axis(1) for _ in more), *rule.axes), (*(1 for _ in more), *box)
    token, score_ns = 4 * sum(widths) * each, choice.score_ns(*widths) * each
    for here in slabs.inside(rule):
        mine, others = ({name: x[here][:, *more] for name, x in part.items()} for part in (lanes, passing))
        tables = slabs.tables(axes, mine["a"].shape[1:4], box, group, kind == kernel.OF_KEYS)
        setting = {"group": group, "share": share, "each": each}
        _share(
            partial(_slab, call, memory, mine, others, tables, extra, setting, scale),
            slabs.slabs(batch, units, tables, token, score_ns, threads),
        )


def _slab(call, memory, lanes, passing, tables, extra, setting, scale, job):
    """Run a kernel on a slab."""
    entry, (first, end), *boxes = job
    group, share, each = setting.values()
    own, others = zip(*(one.places(*ends) for one, ends in zip(tables, boxes, strict=True)), strict=True)
    heads = slice(first // share * each, ((end - 1) // share + 1) * each)
    given = dict.fromkeys(kernel.FIELDS, 0) | setting | {"units": end - first, "skipped": first % share}
    tensors, results = {}, []
    for name, x in lanes.items():
        mine = tensors[name] = x[entry, *own, slice(first * group, end * group)]
        if name in "abcd" and (x.dtype != torch.float32 or x.shape[-1] != _padded(x)):
            if name in "ab":
                tensors[name] = memory.copy(name, mine, _padded(x))
            else:
                tensors[name] = memory.take(name, *mine.shape[:-1], _padded(x))
                results.append((mine, tensors[name]))
    for name, x in passing.items():
        mine = x[entry, *others, heads]
        # Heads first, so that tokens lie one after the other.
        copy = memory.copy(name, mine.movedim(3, 0), _padded(x)) if name in "xy" else memory.token(name, mine)
        tensors[name] = copy.movedim(0, 3)
    for name, x in tensors.items():
        strides = x.stride()
        begins = zip((at.start for at in (others if name in passing else own)), strides, strict=False)
        given[name] = x.data_ptr() - 4 * sum(n * stride for n, stride in begins)
        given |= {f"{name}{i}": strides[i] for i in range(4) if f"{name}{i}" in given}
    for name, x in zip(("x_extra", "y_extra"), extra or (), strict=False):
        mine = x[entry, heads]
        given |= {name: mine.data_ptr(), f"{name}3": mine.stride(0), "extras": mine.shape[1]}
    for i, (one, (begin, stop)) in enumerate(zip(tables, boxes, strict=True)):
        given |= {f"spans{i}": one.data.ctypes.data + begin * one.data.strides[0], f"count{i}": stop - begin}
    call((c_int64 * len(given))(*given.values()), scale / log(2), scale)
    for mine, found in results:
        mine.copy_(found[..., : mine.shape[-1]])


def _padded(x):
    """Values of a head that kernels read: zeros come after its own."""
    return -(-x.shape[-1] // kernel.lanes()) * kernel.lanes()


def _by_head(extra):
    """Extra keys and values as float32 [B, H_kv, N, D] each, or None."""
    return None if extra is None else tuple(Memory().copy("", x.transpose(1, 2), _padded(x)) for x in extra)


def _differentiate_extra(given, job):
    """The gradients of extra keys and values of one head, by some queries at a time."""
    q, out, lse, grad, extra, found, scale = given
    entry, head = job
    group = q.shape[-2] // extra[0].shape[1]
    keys, values = (x[entry, head] for x in extra)
    dk, dv = (torch.zeros_like(x) for x in (keys, values))
    for part in _places(q.shape[1:-2]):
        place = entry, *part, slice(head * group, (head + 1) * group)
        queries, results, grads = (x[place].flatten(0, -2).float() for x in (q, out, grad))
        weights = (queries @ keys[:, : q.shape[-1]].mT).mul_(scale).sub_(lse[place].flatten()[:, None]).exp_()
        width = grads.shape[-1]
        delta = (results * grads).sum(-1, keepdim=True)
        d_scores = (grads @ values[:, :width].mT).sub_(delta).mul_(weights).mul_(scale)
        dk[:, : q.shape[-1]].addmm_(d_scores.mT, queries)
        dv[:, :width].addmm_(weights.mT, grads)
    for total, own in zip(found, (dk, dv), strict=True):
        total[entry, :, head] = own[:, : total.shape[-1]]
