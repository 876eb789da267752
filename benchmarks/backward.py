"""Training side by side: forward and backward of plans, of FlexAttention, of masked and of dense attention of torch.

Each contender's result and gradients are compared with a float64 reference before it is timed, and what was timed, a
graph's replay too, is read back and compared again. Sparse contenders have their tokens in the plan's order, and
FlexAttention in their natural one, too. Times are of one attention layer: `forward_us` without gradients, `both_us` of
a forward that records and its backward; `backward_us` is their difference. On a GPU all are replays of CUDA graphs
where these can be captured. `peak_mb` is what a forward and backward hold beyond q, k, v and the result's gradient.

`--bias` gives each pattern a table of relative positions in a square grid, with an entry for special tokens, and
compares its gradient, too (`error_table`). On a GPU a graph of a forward and a backward is captured, the table's values
change, and the graph is replayed: `replayed` says whether its results are those of the new values. `host_us` is what
the host takes to queue both. `--ragged` compares packed batches, ``<images>-<tokens>``, whose images keep
from 30 % to all of their tokens, with those of `tilewright_study.baselines.packed` that have a backward and with
FlexAttention.

All forms of a peer have a row: its time is that of the fastest.

    python benchmarks/backward.py --device cuda --output results/logs/backward.csv
    python benchmarks/backward.py --device cpu --patterns kept-30-1024 --seconds 2
    python benchmarks/backward.py --bias --patterns vil-tiny-224-s1-exact
    python benchmarks/backward.py --patterns --ragged 64-197 8-4097
"""

import argparse
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewright
from tilewright import devices, graph, masks, reference
from tilewright.attention.masks import Bias
from tilewright.core import timing
from tilewright.core.errors import TilewrightError, Unavailable
from tilewright.packed import pack
from tilewright.torch_attention import flex, patterns, wide
from tilewright_study.baselines import packed as packed_baselines
from tilewright_study.measure.checks import judging

PATTERNS = ("vil-medium-wide-1024-s2-exact", "vil-tiny-224-s1-exact", "vil-tiny-224-s2-exact", "kept-30-4096")
# Heads x head dim of patterns that state none.
HEADS, HEAD_DIM = 6, 64
FLEX = tuple(form for form in flex.VARIANTS if int(form.split("-")[0]) >= flex.SMALLEST_ON_GPU)
# Packed peers whose attention may be differentiated; FlexAttention's forms are apart.
PACKED = ("sdpa_mask", "flash_varlen", "flash3_varlen", "torch_varlen", "nested")
BACKENDS = {"dense flash": SDPBackend.FLASH_ATTENTION, "dense cudnn": SDPBackend.CUDNN_ATTENTION}
# A gradient sums products of four rounded factors where the result sums those of two: twice its tolerance. Norms of
# whole tensors are compared.
TOLERANCE = {dtype: 2 * error for dtype, error in reference.TOLERANCE.items()}
# Queries that the reference takes at a time.
SLAB = 1024


def main():
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patterns", nargs="*", default=PATTERNS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=devices.NAMES)
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--contenders", nargs="+", default=None, help="beginnings of names; default: all")
    parser.add_argument("--flex", nargs="+", default=FLEX, help="forms of FlexAttention")
    parser.add_argument("--bias", action="store_true", help="give each pattern a table of relative positions")
    parser.add_argument("--ragged", nargs="*", default=(), help="packed batches, <images>-<tokens>")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing, for each number")
    parser.add_argument("--output", type=Path, default=Path("results/logs/backward.csv"))
    arguments = parser.parse_args()
    arguments.dtype = getattr(torch, arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32"))
    arguments.effort = {"min_reps": 10, "max_seconds": arguments.seconds, "rse_target": 0.01}
    rows = []
    cases = [(compared, name) for name in arguments.patterns] + [(packed, name) for name in arguments.ragged]
    for compare, name in cases:
        for row in compare(name, arguments):
            rows.append(row)
            write(arguments.output, rows)
    wrong = [row for row in rows if row["status"] == "wrong"]
    if wrong:
        raise SystemExit(f"wrong: {', '.join(row['pattern'] + ' ' + row['contender'] for row in wrong)}")


def write(path, rows):
    """Write `rows` as they are so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(path, index=False)


def pattern_of(name):
    """A `Graph`: a model's, or ``kept-<percent>-<tokens>``, where each query sees those kept at random and itself."""
    kind, *numbers = name.split("-")
    if kind != "kept":
        return masks.build(name)
    percent, n = map(int, numbers)
    kept = np.random.default_rng(0).random(n) < percent / 100
    return graph.from_pattern(kept[None, :] | np.eye(n, dtype=bool), meta={"heads": HEADS, "head_dim": HEAD_DIM})


def compared(name, arguments):
    """Yield the row of each contender of one pattern."""
    device, dtype = arguments.device, arguments.dtype
    pattern = pattern_of(name)
    sizes = {"heads": pattern.meta.get("heads") or HEADS, "head_dim": pattern.meta.get("head_dim") or HEAD_DIM}
    begin = time.perf_counter()
    make = torch.Generator().manual_seed(0)
    places = table = None
    if arguments.bias:
        places = Places(pattern.n_rows)
        table = torch.randn(sizes["heads"], places.entries, generator=make)
    bias = table if table is None else Bias(table, places)
    plan = tilewright.plan(pattern, **sizes, dtype=dtype, device=device, bias=bias)
    print(f"{name}: {pattern.n_rows} tokens, density {pattern.density:.4f}, {sizes}, planned in "
          f"{time.perf_counter() - begin:.1f} s\n{plan.summary()}", flush=True)  # fmt: skip
    counts = (pattern.n_rows, pattern.n_cols, pattern.n_cols, pattern.n_rows)
    shape = arguments.batch, sizes["heads"]
    q, k, v, grad = (torch.randn(*shape, n, sizes["head_dim"], generator=make).to(device, dtype) for n in counts)
    tokens = q, k, v, grad
    of_pairs = places and places.of(plan.graph, device)
    values = None if table is None else table.to(device)
    expected = {"sparse": oracle(plan.graph, *tokens, of_pairs, values)}
    if not arguments.bias:
        expected["dense"] = oracle(None, *tokens)
    common = {"pattern": name, "device": device, "dtype": str(dtype).removeprefix("torch."), "batch": arguments.batch,
              **sizes, "tokens": pattern.n_rows, "density": pattern.density, "bias": arguments.bias}  # fmt: skip
    for contender, kind, prepare in contenders(plan, pattern, of_pairs, arguments):
        yield from row_of(contender, kind, prepare, (*tokens, values), expected.get(kind), common, arguments)


def row_of(contender, kind, prepare, tokens, expected, common, arguments):
    """Yield the row of a contender, where it is asked for."""
    if arguments.contenders and not contender.startswith(tuple(arguments.contenders)):
        return
    found = measured(prepare, tokens, expected, arguments)
    print(f"  {contender:24}", "  ".join(f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}"
          for n, v in found.items()), flush=True)  # fmt: skip
    yield {**common, "contender": contender, "computes": kind, **found}


def packed(name, arguments):
    """Yield the row of each contender of one packed batch."""
    images, n = map(int, name.split("-"))
    device, dtype = arguments.device, arguments.dtype
    lengths = np.random.default_rng(0).integers(max(1, n * 3 // 10), n + 1, images).tolist()
    packing = pack.pack_lengths(torch.tensor(lengths, device=device))
    pattern, make = packing.graph(), torch.Generator().manual_seed(0)
    print(f"ragged {name}: {packing.capacity} tokens, density {pattern.density:.4f}", flush=True)
    shape = packing.capacity, HEADS, HEAD_DIM
    tokens = [torch.randn(*shape, generator=make).to(device, dtype) for _ in range(4)]
    by_head = [x.transpose(0, 1)[None] for x in tokens]
    expected = [x[0].transpose(0, 1) for x in oracle(pattern, *by_head)]
    common = {"pattern": f"ragged-{name}", "device": device, "dtype": str(dtype).removeprefix("torch."),
              "batch": images, "heads": HEADS, "head_dim": HEAD_DIM, "tokens": packing.capacity,
              "density": pattern.density, "bias": False}  # fmt: skip

    counts = packing.starts.diff()
    image = torch.arange(images, device=device).repeat_interleave(counts)

    def apart(form):
        """FlexAttention of heads of one image, of packed tokens: who sees whom is told by arithmetic."""
        attend = flexible(pattern, form, None, arguments, lambda b, h, q, kv: image[q] == image[kv])
        return attend, lambda *given: [x.transpose(0, 1)[None] for x in given], lambda out: out[0].transpose(0, 1)

    known = [("tilewright", lambda: packing.attend)]
    known += [(name, partial(peer, name, packing, dtype)) for name in PACKED]
    if device == "cuda":
        # Each image sees itself: no token sees more than others.
        known += [(f"flex {form}", partial(apart, form)) for form in arguments.flex if "split" not in form]
    for contender, prepare in known:
        yield from row_of(contender, "sparse", prepare, (*tokens, None), expected, common, arguments)


def peer(name, packing, dtype):
    """``(attend, put, get)`` of a packed baseline, see `tilewright_study.baselines.packed`. Raises `Unavailable`."""
    ready = packed_baselines.prepare(name, packing, HEADS, HEAD_DIM, dtype)
    if not ready.exact:
        raise Unavailable("attends to padding, too")
    return ready.call, ready.put, ready.get


class Places:
    """Where pairs of tokens stand in a table of relative positions: a square grid, special tokens before it."""

    def __init__(self, n):
        self.side = int(n**0.5)
        self.special = n - self.side**2
        self.entries = (2 * self.side - 1) ** 2 + 1

    def __call__(self, rows, cols):
        """Of int arrays or tensors that broadcast; the last entry is that of special tokens."""
        (qy, qx), (ky, kx) = (((x - self.special) // self.side, (x - self.special) % self.side) for x in (rows, cols))
        place = (qy - ky + self.side - 1) * (2 * self.side - 1) + qx - kx + self.side - 1
        inside = (rows >= self.special) & (cols >= self.special)
        return place * inside + (self.entries - 1) * ~inside

    def of(self, ordered, device):
        """``callable(rows, cols)`` of positions in a graph's order, int64 tensors on `device`."""
        natural = [torch.from_numpy(np.asarray(x, np.int64)).to(device) for x in (ordered.row_order, ordered.col_order)]
        return lambda rows, cols: self(natural[0][rows], natural[1][cols])


def contenders(plan, pattern, of_pairs, arguments):
    """``(name, sparse or dense, prepare)`` of each, see `measured`. pattern: in its natural order; of_pairs: of a bias,
    or None."""
    gpu = arguments.device == "cuda"

    def ours(q, k, v, table=None):
        return plan(q, k, v, ordered=True, bias=table)

    yield "tilewright", "sparse", lambda: ours
    for form in arguments.flex if gpu else ():
        if of_pairs is None or "split" not in form:
            yield f"flex {form}", "sparse", partial(flexible, plan.graph, form, of_pairs, arguments)
        if of_pairs is None and plan.graph.row_order is not None:
            yield f"flex {form} natural", "sparse", partial(natural, plan.graph, pattern, form, arguments)
    yield "sdpa masked", "sparse", partial(masked, plan.graph, of_pairs, arguments.device)
    if of_pairs is not None:
        return
    for name, backend in BACKENDS.items() if gpu else ():
        yield name, "dense", partial(dense, backend)
    if not gpu:
        yield "dense sdpa", "dense", lambda: F.scaled_dot_product_attention


def natural(ordered, pattern, form, arguments):
    """``(attend, put, get)`` of FlexAttention with the tokens in the model's own order, which are put there before."""
    rows, cols = (torch.from_numpy(np.argsort(x)).to(arguments.device) for x in (ordered.row_order, ordered.col_order))
    back = torch.from_numpy(np.asarray(ordered.row_order, np.int64)).to(arguments.device)

    def put(q, k, v):
        return q.index_select(2, rows), k.index_select(2, cols), v.index_select(2, cols)

    return flexible(pattern, form, None, arguments), put, lambda out: out.index_select(2, back)


def flexible(ordered, form, of_pairs, arguments, mask_mod=None):
    """FlexAttention with gradients, in a form of `FLEX`: block size, whether wide queries are attended apart, and
    whether torch tunes its kernels. mask_mod: by arithmetic, where it is known; else a rule of the pattern or bits."""
    block, *options = form.split("-")
    block, device = int(block), arguments.device
    narrow, rows = wide.split(ordered) if "split" in options else (ordered, None)
    mask_mod = mask_mod or flex.pairs(ordered, 1 << 31, device)[0]
    tables = [table for kind in patterns.kinds(narrow, block) for table in patterns.listed(kind, device)]
    mask = flex.BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=ordered.shape)
    mode = "max-autotune-no-cudagraphs" if "tuned" in options else None
    sides = "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"
    stated = dict.fromkeys(sides, block) if block < flex.BLOCK else None
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True, mode=mode)
    places = None if rows is None else torch.from_numpy(rows).to(device)

    def attend(q, k, v, table=None):
        def biased(score, b, h, row, col):
            return score + table[h, of_pairs(row, col)]

        score_mod = None if table is None else biased
        out = compiled(q, k, v, score_mod=score_mod, block_mask=mask, kernel_options=stated)
        if places is None:
            return out
        # ASSUME: wide queries see all keys, as global tokens do; the comparison with the reference says if not.
        return out.index_copy(2, places, F.scaled_dot_product_attention(q[:, :, places], k, v))

    return attend


def masked(ordered, of_pairs, device):
    """Torch's attention with the pattern as a mask, and with its bias in it."""
    allowed = torch.from_numpy(ordered.to_dense()).to(device)
    if of_pairs is not None:
        at = [torch.arange(n, device=device) for n in ordered.shape]
        index = of_pairs(at[0][:, None], at[1])

    def attend(q, k, v, table=None):
        mask = allowed if table is None else table[:, index].masked_fill(~allowed, -torch.inf).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def dense(backend):
    """Torch's attention over all pairs by one of its kernels."""

    def attend(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


def oracle(ordered, q, k, v, grad, of_pairs=None, table=None):
    """``(out, dq, dk, dv)`` in float64, and the gradient of a table; some queries at a time.

    ordered: a `Graph`, None for all pairs.
    """
    d_table = None if table is None else torch.zeros_like(table, dtype=torch.float64)
    q, k, v, grad = (x.double() for x in (q, k, v, grad))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    scale = q.shape[-1] ** -0.5
    for lo in range(0, q.shape[2], SLAB):
        at = slice(lo, min(lo + SLAB, q.shape[2]))
        allowed = None
        if ordered is not None:
            indptr, keys = graph.take_rows(ordered.indptr, ordered.indices, ordered.row_id[at])
            flags = np.zeros((at.stop - lo, ordered.n_cols), bool)
            flags[np.repeat(np.arange(len(flags)), np.diff(indptr)), keys] = True
            allowed = torch.from_numpy(flags).to(q.device)
        index = None
        if table is not None:
            rows = torch.arange(lo, at.stop, device=q.device)
            index = of_pairs(rows[:, None], torch.arange(k.shape[2], device=q.device))
        for b, h in np.ndindex(*q.shape[:2]):
            scores = q[b, h, at] @ k[b, h].T * scale
            if index is not None:
                scores += table[h].double()[index]
            if allowed is not None:
                scores.masked_fill_(~allowed, -torch.inf)
            weights = torch.softmax(scores, -1).nan_to_num_(0.0)
            out[b, h, at] = weights @ v[b, h]
            delta = (out[b, h, at] * grad[b, h, at]).sum(-1, keepdim=True)
            d_scores = weights * (grad[b, h, at] @ v[b, h].T - delta)
            if index is not None:
                d_table[h].index_add_(0, index.flatten(), d_scores.flatten())
            d_scores *= scale
            dq[b, h, at] = d_scores @ k[b, h]
            dk[b, h] += d_scores.T @ q[b, h, at]
            dv[b, h] += weights.T @ grad[b, h, at]
    return (out, dq, dk, dv) if table is None else (out, dq, dk, dv, d_table)


def measured(prepare, tokens, expected, arguments):
    """Columns of one contender: its status and, where it is right, its errors, times and memory.

    prepare: ``prepare()`` gives ``attend(q, k, v[, table])``, or this and ``put(q, k, v)`` and ``get(out)``, as a
    packed baseline has them: tokens are kept as it wants them, before the clock starts.
    """
    gpu, (q, k, v, grad, table) = arguments.device == "cuda", tokens
    try:
        made = prepare()
        attend, put, get = made if isinstance(made, tuple) else (made, lambda *given: given, lambda out: out)
        inputs = [*put(q, k, v), *(() if table is None else (table,))]
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = attend(*leaves)
        # What padding adds to a loss is nothing.
        given = torch.autograd.grad(get(out), out, grad)[0].detach()
        del out

        def both():
            return torch.autograd.grad(attend(*leaves), leaves, given)

        def forward():
            with torch.no_grad():
                return (attend(*inputs),)

        def off(found, wanted):
            # Tables are as they are.
            found = [get(x) if at < 3 else x for at, x in enumerate(found)]
            return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, wanted, strict=True)]

        def checked(call, wanted):
            def judge(found):
                return "" if all(error <= TOLERANCE[q.dtype] for error in off(found, wanted)) else "other values"

            return timing.Checked(call, judging(judge))

        calls = checked(forward, expected[:1]), checked(both, expected[1:])
        errors = off(calls[0](), expected[:1]) + off(calls[1](), expected[1:])
        replays = {}
        if gpu and table is not None:
            replays = {"replayed": replayed(both, leaves[3])}
        stated = dict(zip(("error", "error_dq", "error_dk", "error_dv", "error_table"), errors, strict=False))
        if replays.get("replayed") == "wrong" or not all(error <= TOLERANCE[q.dtype] for error in errors):
            return {"status": "wrong", **stated, **replays}
        memory = peak_mb(both) if gpu else None
        effort = arguments.effort
        times = [timing.time_gpu(call, **effort) if gpu else timing.time_call(call, **effort) for call in calls]
        if replays:
            replays["host_us"] = timing.time_host(calls[1], **effort)[1]
        if any(call.wrong for call in calls):
            return {"status": "wrong", **stated, **replays}
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"status": "out of memory"}
    except (Unavailable, TilewrightError, RuntimeError, NotImplementedError) as reason:
        return {"status": f"unavailable: {str(reason).strip().splitlines()[0][:200]}"}
    columns = {"status": "ok", "forward_us": times[0].p50_us, "backward_us": times[1].p50_us - times[0].p50_us,
               "both_us": times[1].p50_us, "peak_mb": memory}  # fmt: skip
    spread, method = max(t.rse for t in times), "+".join(t.method for t in times)
    return {**columns, **stated, **replays, "rse": spread, "method": method}


def replayed(call, table):
    """Whether replays of a CUDA graph of `call` see values that `table` takes later: ``right``, ``wrong``, or ``not
    captured``. The values are as they were afterwards."""
    current, stream, captured = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            call()
        with torch.cuda.graph(captured, stream=stream):
            found = call()
    except (TilewrightError, RuntimeError):
        torch.cuda.synchronize()
        return "not captured"
    finally:
        # A capture that fails leaves its stream as the current one.
        torch.cuda.set_stream(current)
    before = table.detach().clone()
    try:
        with torch.no_grad():
            table.mul_(-0.5)
        captured.replay()
        right = all(bool((x.double() - y.double()).norm() <= TOLERANCE[x.dtype] * y.double().norm())
                    for x, y in zip(found, call(), strict=True))  # fmt: skip
    finally:
        with torch.no_grad():
            table.copy_(before)
    return "right" if right else "wrong"


def peak_mb(call):
    """Most megabytes that `call` holds beyond what is held before."""
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


if __name__ == "__main__":
    # Torch says so of each kernel that does not take a call.
    warnings.filterwarnings("ignore", module="torch.nn.attention")
    main()
