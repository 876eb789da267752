"""The kernels of a CPU: machine code that LLVM makes of the text written here, in a fifth of a second each.

A register holds one value of each query of a box, its lanes. The scores of a key are a register: products of a register
of queries and one value of the key, read where it lies, are added up in it. So are sums of values. Maxima, exponentials
and sums take whole registers, and boxes of few queries, which have the fewest pairs in vain, are at full speed.

Of the gradients, those of queries are computed like that, and those of keys and values with keys as lanes: the queries
that see them pass by.
"""

import ctypes
from collections.abc import Callable
from functools import cache

from tilewright.neighborhood.cpu.writer import UNSEEN, Writer

# What a kernel computes, and the tensors that lie in lanes: a to d below, and s as well in the first two.
FORWARD, OF_QUERIES, OF_KEYS = "ads", "abcs", "abcd"
# What a job is, int64 each. Pointers: a, q or for `OF_KEYS` k; b, gradients of results, or v; x and y, which pass by, k
# and v, or q and gradients of results; extra keys and values, which all see; c, gradients of a; d, results, or
# gradients of v. Then s and t, like d without its last axis: in the forward sums of weights and maxima of scores in
# powers of two, which are written unless s is 0; else the negative of log-sum-exps, in powers of two, and of the sums
# of results times their gradients. extras: how many. group: heads in a box, side by side. units: such groups, of which
# so many neighbours `share` a head that passes by, or `each` such heads, as if there were `skipped` before the first.
# Strides, in values, by axes and head. Of each axis, `slabs.Table.data` from a box on, and boxes.
FIELDS = (
    *("a", "b", "c", "d", "s", "t", "x", "y", "x_extra", "y_extra"),
    *("extras", "group", "units", "share", "each", "skipped"),
    *(f"{name}{i}" for name in "abcds" for i in range(4)),
    *("x0", "x1", "x3", "y0", "y1", "y3", "x_extra3", "y_extra3"),
    *("spans0", "count0", "spans1", "count1", "spans2", "count2"),
)
# int64 of a box in `slabs.Table.data`: before those of the lanes, and of each lane.
TABLE, LANES = 3, 3
# Scores of each lane that are held, half a first-level cache.
_HELD = 256
# 2^x for |x| <= 1/2 to 1e-7, at Chebyshev's points, the highest power first.
_POWERS = 0.00133909, 0.00967603, 0.05550357, 0.24022107, 0.69314719, 1.00000008


@cache
def _host():
    """Name and features of this processor, where LLVM knows them."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    try:
        return llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    except RuntimeError:
        return "", {}


@cache
def sizes() -> tuple[int, int, int]:
    """Lanes of a register, keys whose scores are added up side by side, and values that are: as many as there are
    registers for."""
    return (16, 16, 16) if _host()[1].get("avx512f") else (8, 12, 8)


def lanes() -> int:
    """Queries of a register."""
    return sizes()[0]


@cache
def compiled(kind: str, dim: int, v_dim: int) -> Callable:
    """A kernel for heads of so many values, multiples of the lanes: ``(int64 of FIELDS, factor of scores with log2(e),
    factor of c)``."""
    import llvmlite.binding as llvm

    name, features = _host()
    flags = ",".join(f"{'+' if on else '-'}{feature}" for feature, on in sorted(features.items()))
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=name, features=flags, opt=3)
    module = llvm.parse_assembly(_text(kind, *sizes(), dim, v_dim))
    # More passes take longer, and the kernel as long.
    passes = llvm.create_new_function_pass_manager()
    for add in (passes.add_sroa_pass, passes.add_instruction_combine_pass, passes.add_simplify_cfg_pass):
        add()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    types = ctypes.c_void_p, ctypes.c_float, ctypes.c_float
    call = ctypes.CFUNCTYPE(None, *types)(engine.get_function_address("attend"))
    # Its memory holds the code.
    call.engine = engine  # type: ignore[attr-defined]
    return call


# Scores that are held, and what belongs to them; how many, and of how many pieces of keys, a pointer to each of x and y
# and a number each; sums of both, the largest score of keys before, and the sum of their weights.
_NAMES = "scores", "others", "held", "pieces", "c", "d", "m", "sum"
_STATE = ", ".join(f"ptr noalias %{name}" for name in _NAMES)
_PIECE = 3


def _text(kind, lanes, tile, summed, dim, v_dim):
    w = Writer(lanes)
    for width in {dim} if kind == FORWARD else {dim, v_dim}:
        for n in range(1, tile + 1):
            _scores(w, kind, n, width)
    (_weigh if kind == FORWARD else _differentiate)(w, kind, summed, dim, v_dim)
    _row(w, kind, tile, dim, v_dim)
    _boxes(w, kind, dim, v_dim)
    for name, n in (("fmuladd", 3), ("rint", 1)):
        w.lines.append(f"declare {w.floats} @llvm.{name}.v{lanes}f32({', '.join([w.floats] * n)})")
    w.lines.append('attributes #0 = { nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }')
    return "\n".join(w.lines)


def _scores(w, kind, n, dim):
    """Write the scores of `n` keys from number %i of a row on, to begin with %seen; return the largest and %top."""
    given = f"ptr %a, ptr %x, ptr %bias, ptr noalias %s, i64 %i, {w.floats} %seen, {w.ints} %lo, {w.ints} %size"
    with w.function(f"internal {w.floats} @scores{n}_{dim}({given}, {w.floats} %top)"):
        sums = []
        for j in range(n):
            begin = "%seen"
            if kind == OF_KEYS:
                begin = w.do("fadd", begin, w.all(w.load("float", w.at("%bias", j))), kind=w.floats)
            sums.append(w.var(w.floats, w.seen(w.do("add", "%i", j), "%lo", "%size", begin)))
        with w.loop(dim, 4) as d:
            for i in (w.do("add", d, u) for u in range(4)):
                lane, key = w.held("%a", i), w.at("%x", i)
                for j, one in enumerate(sums):
                    value = w.all(w.load("float", w.at(key, j * dim)))
                    w.hold(w.math("fmuladd", lane, value, w.held(one)), one)
        found = [w.held(one) for one in sums]
        for j, one in enumerate(found):
            w.hold(one, "%s", j)
        found.append("%top")
        while len(found) > 1:
            pairs = zip(found[::2], found[1::2], strict=False)
            found = [*(w.larger(*pair) for pair in pairs), *found[len(found) & ~1 :]]
        w.lines.append(f"ret {w.floats} {found[0]}")


def _power(w, x):
    """2^x for x <= 0, and 0 where it is below all normal numbers."""
    x = w.larger(w.number(-127.0), x)
    whole = w.math("rint", x)
    part, found = w.do("fsub", x, whole, kind=w.floats), w.number(_POWERS[0])
    for factor in _POWERS[1:]:
        found = w.math("fmuladd", found, part, w.number(factor))
    exponent = w.do("add", w.op(f"fptosi {w.floats} {whole} to {w.ints}"), w.all(127, "i32"), kind=w.ints)
    bits = w.do("shl", exponent, w.all(23, "i32"), kind=w.ints)
    return w.do("fmul", found, w.op(f"bitcast {w.ints} {bits} to {w.floats}"), kind=w.floats)


def _weigh(w, kind, summed, dim, v_dim):
    """Add held keys' values by the weights of their scores, of which none exceeds %top."""
    with w.function(f"internal void @weigh({_STATE}, {w.floats} %top)"):
        less = _power(w, w.do("fsub", w.held("%m"), "%top", kind=w.floats))
        w.hold("%top", "%m")
        total = w.var(w.floats, w.do("fmul", w.held("%sum"), less, kind=w.floats))
        with w.loop(w.load("i64", "%held")) as i:
            weight = _power(w, w.do("fsub", w.held("%scores", i), "%top", kind=w.floats))
            w.hold(weight, "%scores", i)
            w.hold(w.do("fadd", w.held(total), weight, kind=w.floats), total)
        w.hold(w.held(total), "%sum")
        _sum(w, summed, v_dim, "%scores", 1, "%d", less)
        _empty(w, "%held")


def _differentiate(w, kind, summed, dim, v_dim):
    """Add what held keys add to gradients, of scores that have their log-sum-exp and products their own sum left."""
    with w.function(f"internal void @weigh({_STATE}, {w.floats} %top)"):
        with w.loop(w.load("i64", "%held")) as i:
            weight = _power(w, w.held("%scores", i))
            w.hold(weight, "%scores", i)
            w.hold(w.do("fmul", w.held("%others", i), weight, kind=w.floats), "%others", i)
        _sum(w, summed, dim, "%others", 0, "%c")
        if kind == OF_KEYS:
            _sum(w, summed, v_dim, "%scores", 1, "%d")
        _empty(w, "%held")


def _sum(w, summed, dim, factors, which, sums, less=None):
    """Add values of all pieces times the factors of their keys to sums, after these times `less`."""
    with w.loop(dim, summed) as d:
        places = [w.do("add", d, j) for j in range(summed)]
        found = [w.held(sums, one) for one in places]
        if less is not None:
            found = [w.do("fmul", one, less, kind=w.floats) for one in found]
        found, factor = [w.var(w.floats, one) for one in found], w.var("ptr", factors)
        with w.loop(w.load("i64", w.at("%held", 1, "i64"))) as i:
            piece = w.at("%pieces", w.do("mul", i, _PIECE), "i64")
            value = w.var("ptr", w.at(w.load("ptr", w.at(piece, which, "i64")), d))
            with w.loop(w.load("i64", w.at(piece, 2, "i64"))):
                f, v = w.load("ptr", factor), w.load("ptr", value)
                one = w.held(f)
                for j, total in enumerate(found):
                    w.hold(w.math("fmuladd", one, w.all(w.load("float", w.at(v, j))), w.held(total)), total)
                w.store("ptr", w.at(f, 1, w.floats), factor)
                w.store("ptr", w.at(v, dim), value)
        for place, total in zip(places, found, strict=True):
            w.hold(w.held(total), sums, place)


def _empty(w, held):
    for i in (0, 1):
        w.store("i64", 0, w.at(held, i, "i64"))


def _row(w, kind, tile, dim, v_dim):
    """Attend to %n keys side by side, in tiles, as few as there are, of one length or two."""
    pointers = ", ".join(f"ptr %{name}" for name in ("a", "b", "x", "y", "bias", "y_bias"))
    given = f"i64 %n, {w.floats} %seen, {w.floats} %y_seen, {w.ints} %lo, {w.ints} %size, ptr noalias %top"
    with w.function(f"internal void @row({pointers}, {given}, {_STATE})"):
        tiles = w.do("udiv", w.do("add", "%n", tile - 1), tile)
        with w.loop(tiles) as i:
            first, end = (w.do("udiv", w.do("mul", one, "%n"), tiles) for one in (i, w.do("add", i, 1)))
            keys = w.do("sub", end, first)
            held, pieces = (w.load("i64", w.at("%held", i, "i64")) for i in (0, 1))
            piece = w.at("%pieces", w.do("mul", pieces, _PIECE), "i64")
            x, y = (w.at(one, w.do("mul", first, width)) for one, width in (("%x", dim), ("%y", v_dim)))
            for j, (of, one) in enumerate((("ptr", x), ("ptr", y), ("i64", keys))):
                w.store(of, one, w.at(piece, j, "i64"))
            of_rows = f"i64 {first}, {w.floats} %seen, {w.ints} %lo, {w.ints} %size, {w.floats} {w.held('%top')}"
            scores = f"ptr %a, ptr {x}, ptr {w.at('%bias', first)}, ptr {w.at('%scores', held, w.floats)}, {of_rows}"
            others = f"ptr %b, ptr {y}, ptr {w.at('%y_bias', first)}, ptr {w.at('%others', held, w.floats)}, {of_rows}"
            cases = " ".join(f"i64 {n}, label %of{n}" for n in range(1, tile))
            w.lines.append(f"switch i64 {keys}, label %of{tile} [{cases}]")
            for n in range(1, tile + 1):
                w.lines.append(f"of{n}:")
                w.hold(w.op(f"call {w.floats} @scores{n}_{dim}({scores})"), "%top")
                if kind != FORWARD:
                    w.op(f"call {w.floats} @scores{n}_{v_dim}({others.replace('%seen', '%y_seen')})")
                w.lines.append("br label %done")
            w.lines.append("done:")
            held = w.do("add", held, keys)
            w.store("i64", held, "%held")
            w.store("i64", w.do("add", pieces, 1), w.at("%held", 1, "i64"))
            with w.when(w.op(f"icmp ugt i64 {held}, {_HELD - tile}")):
                w.lines.append(f"call void @weigh({_STATE.replace(' noalias', '')}, {w.floats} {w.held('%top')})")


def _boxes(w, kind, dim, v_dim):
    """Attend the boxes of a job."""
    widths = {"a": dim, "b": v_dim, "c": dim, "d": v_dim}
    with w.function("void @attend(ptr noalias %job, float %scale, float %factor)"):
        n = {name: w.load("i64", w.at("%job", i, "i64")) for i, name in enumerate(FIELDS)}
        own = {name: w.var(w.floats, count=width) for name, width in widths.items()}
        m, total, top = (w.var(w.floats) for _ in range(3))
        scores, others, nowhere = (w.var(w.floats, count=count) for count in (_HELD, _HELD, max(dim, v_dim)))
        held, pieces = w.var("i64", count=2), w.var("i64", count=_PIECE * _HELD)
        _empty(w, held)
        names = scores, others, held, pieces, own["c"], own["d"], m, total
        state = ", ".join(f"ptr {name}" for name in names)
        offsets = {name: w.var("i64", count=w.lanes) for name in kind}
        scale, factor, zero = w.all("%scale"), w.all("%factor"), w.number(0.0)
        with (
            w.loop(n["units"]) as unit,
            w.loop(n["count0"]) as box0,
            w.loop(n["count1"]) as box1,
            w.loop(n["count2"]) as box2,
        ):
            # What the box is along each axis: of all, of all lanes.
            each: list = [[] for _ in range(6)]
            begins, counts, bits, places, los, sizes = each
            for i, box in enumerate((box0, box1, box2)):
                row = w.do("mul", box, TABLE + LANES * w.lanes)
                row = w.at(w.op(f"inttoptr i64 {n[f'spans{i}']} to ptr"), row, "i64")
                for j, one in enumerate((begins, counts, bits)):
                    one.append(w.load("i64", w.at(row, j, "i64")))
                for j, one in enumerate((places, los, sizes)):
                    one.append(w.load(w.longs, w.at(row, TABLE + j * w.lanes, "i64")))
            lo, size = ([w.op(f"trunc {w.longs} {x} to {w.ints}") for x in one] for one in (los, sizes))
            # Where lanes lie.
            numbers = f"<{', '.join(f'i64 {i}' for i in range(w.lanes))}>"
            places.append(w.do("urem", numbers, w.all(n["group"], "i64"), kind=w.longs))
            pointers = {}
            for name in kind + "t" * ("s" in kind):
                strides = [n[f"{'s' if name == 't' else name}{i}"] for i in range(4)]
                begin = w.op(f"inttoptr i64 {n[name]} to ptr")
                pointers[name] = w.at(begin, w.do("mul", unit, n["group"], strides[3]))
                if name != "t":
                    pairs = zip(places, strides, strict=True)
                    added = [w.do("mul", x, w.all(stride, "i64"), kind=w.longs) for x, stride in pairs]
                    w.store(w.longs, w.do("add", *added, kind=w.longs), offsets[name])

            def lane(name, i):
                """Where a lane lies in a tensor."""
                return w.at(pointers[name], w.load("i64", w.at(offsets["s" if name == "t" else name], i, "i64")))

            for name in "ab"[: 1 if kind == FORWARD else 2]:
                with w.loop(widths[name], w.lanes) as d:
                    rows = w.transposed([w.read(w.at(lane(name, i), d)) for i in range(w.lanes)])
                    for i, one in enumerate(rows):
                        value = w.do("fmul", one, scale, kind=w.floats) if name == "a" else one
                        w.hold(value, own[name], w.do("add", d, i))
            for name in set(kind) & {"c", "d"}:
                with w.loop(widths[name]) as d:
                    w.hold(zero, own[name], d)
            for one, value in ((m, w.number(UNSEEN)), (top, w.number(UNSEEN)), (total, zero)):
                w.hold(value, one)
            begin = [zero, zero]
            if kind == OF_QUERIES:
                for one, name in ((m, "s"), (total, "t")):
                    with w.loop(w.lanes) as i:
                        w.store("float", w.load("float", lane(name, i)), w.at(one, i))
                begin = [w.held(m), w.held(total)]
            head = w.do("mul", w.do("udiv", w.do("add", unit, n["skipped"]), n["share"]), n["each"])
            with w.loop(n["each"]) as other:
                head = w.do("add", head, other)
                passing = {}
                for name in ("x", "y", "x_extra", "y_extra", *("st" if kind == OF_KEYS else "")):
                    stride = n[f"{'s' if name == 't' else name}3"]
                    passing[name] = w.at(w.op(f"inttoptr i64 {n[name]} to ptr"), w.do("mul", head, stride))
                with w.loop(counts[0]) as i, w.loop(counts[1]) as j:
                    seen = [w.seen(j, lo[1], size[1], w.seen(i, lo[0], size[0], one)) for one in begin]
                    keys = w.do("add", i, begins[0]), w.do("add", j, begins[1]), begins[2]
                    row = {}
                    for name, width in (("x", dim), ("y", v_dim), *((one, 1) for one in "st")):
                        if name in passing:
                            steps = *(n[f"{'s' if name == 't' else name}{axis}"] for axis in (0, 1)), width
                            offset = w.do("add", *(w.do("mul", *pair) for pair in zip(keys, steps, strict=True)))
                            row[name] = w.at(passing[name], offset)
                    rows = [row["x"], row["y"], row.get("s", row["x"]), row.get("t", row["x"])]
                    _attend(w, own, rows, counts[2], seen, lo[2], size[2], top, state)
                rows = [passing[name] for name in ("x_extra", "y_extra", "x_extra", "y_extra")]
                _attend(w, own, rows, n["extras"], begin, "zeroinitializer", w.all(-1, "i32"), top, state)
            w.lines.append(f"call void @weigh({state}, {w.floats} {w.held(top)})")
            # Results of lanes that are copies go where nobody reads.
            bits = w.do("and", *bits)
            for name in sorted(set(kind) & {"c", "d"}):
                share = w.do("fdiv", w.number(1.0), w.held(total), kind=w.floats) if kind == FORWARD else None
                targets = []
                for i in range(w.lanes):
                    mine = w.op(f"icmp ne i64 {w.do('and', bits, 1 << i)}, 0")
                    targets.append(w.op(f"select i1 {mine}, ptr {lane(name, i)}, ptr {nowhere}"))
                kept = w.var("ptr", count=w.lanes)
                for i, one in enumerate(targets):
                    w.store("ptr", one, w.at(kept, i, "i64"))
                by = factor if name == "c" else share
                with w.loop(widths[name], w.lanes) as d:
                    rows = [w.held(own[name], w.do("add", d, i)) for i in range(w.lanes)]
                    rows = rows if by is None else [w.do("fmul", row, by, kind=w.floats) for row in rows]
                    for i, one in enumerate(w.transposed(rows)):
                        place = w.at(w.load("ptr", w.at(kept, i, "i64")), d)
                        w.lines.append(f"store {w.floats} {one}, ptr {place}, align 4")
            if kind != FORWARD:
                return
            with w.when(w.op(f"icmp ne i64 {n['s']}, 0")), w.loop(w.lanes) as i:
                mine = w.op(f"trunc i64 {w.do('lshr', bits, i)} to i1")
                for name, values in (("s", total), ("t", m)):
                    place = w.op(f"select i1 {mine}, ptr {lane(name, i)}, ptr {nowhere}")
                    w.store("float", w.load("float", w.at(values, i)), place)


def _attend(w, own, rows, keys, seen, lo, size, top, state):
    """Call `row`."""
    pointers = ", ".join(f"ptr {one}" for one in (own["a"], own["b"], *rows))
    begins = ", ".join(f"{w.floats} {one}" for one in seen)
    w.lines.append(
        f"call void @row({pointers}, i64 {keys}, {begins}, {w.ints} {lo}, {w.ints} {size}, ptr {top}, {state})"
    )
