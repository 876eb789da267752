"""The forward kernel of a CPU: machine code that LLVM makes of the text written here, in a fifth of a second.

A register holds one value of each query of a box, its lanes. The scores of a key are a register: products of a register
of queries and one value of the key, read where it lies, are added up in it. So are sums of values. Maxima, exponentials
and sums take whole registers, and boxes of few queries, which have the fewest pairs in vain, are at full speed.
"""

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

# What a job is, int64 each. Pointers: q, out, sums of weights and maxima of scores in powers of two, both like out
# without its last axis, or 0; k, v, extra keys and values. extras: how many. group: heads of q in a box, side by side.
# units: such groups, of which so many neighbours `share` one head of keys, as if there were `skipped` before the first.
# Strides, in values: of q, out and sums by axis and head; of k and v by axes and head, of extra ones by head. Of each
# axis, `slabs.Table.data` from a box on, and boxes.
FIELDS = (
    *("q", "o", "s", "t", "k", "v", "k_extra", "v_extra", "extras", "group", "units", "share", "skipped"),
    *(f"{name}{i}" for name in "qos" for i in range(4)),
    *("k0", "k1", "k3", "v0", "v1", "v3", "k_extra3", "v_extra3"),
    *("spans0", "count0", "spans1", "count1", "spans2", "count2"),
)
# int64 of a box in `slabs.Table.data`: before those of the lanes, and of each lane.
TABLE, LANES = 3, 3
# Scores of each lane that are held, half a first-level cache.
_HELD = 256
# The score of a key that is not seen, and what maxima begin with.
_NONE = -1e30
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
def attend(dim: int, v_dim: int) -> Callable:
    """The kernel for heads of so many values, multiples of the lanes: ``(int64 of FIELDS, scale times log2(e))``."""
    import llvmlite.binding as llvm

    name, features = _host()
    flags = ",".join(f"{'+' if on else '-'}{feature}" for feature, on in sorted(features.items()))
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=name, features=flags, opt=3)
    module = llvm.parse_assembly(_text(*sizes(), dim, v_dim))
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
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_float)(engine.get_function_address("attend"))
    # Its memory holds the code.
    call.engine = engine  # type: ignore[attr-defined]
    return call


class _Writer:
    """The text of functions, an instruction after the other. Values are names or numbers."""

    def __init__(self, lanes):
        self.lines, self.n, self.entry, self.lanes = [], 0, 0, lanes
        self.floats, self.ints, self.longs = (f"<{lanes} x {kind}>" for kind in ("float", "i32", "i64"))

    def name(self):
        self.n += 1
        return f"%t{self.n}"

    def op(self, text):
        name = self.name()
        self.lines.append(f"{name} = {text}")
        return name

    def do(self, what, one, *others, kind="i64"):
        """An operation on values of one kind, from the left."""
        for other in others:
            one = self.op(f"{what} {kind} {one}, {other}")
        return one

    def at(self, pointer, index, kind="float"):
        """The address of an element."""
        return self.op(f"getelementptr {kind}, ptr {pointer}, i64 {index}")

    def load(self, kind, pointer):
        return self.op(f"load {kind}, ptr {pointer}, align {4 if kind == 'float' else 8}")

    def store(self, kind, value, pointer):
        self.lines.append(f"store {kind} {value}, ptr {pointer}, align {4 if kind == 'float' else 8}")

    def held(self, pointer, index=0):
        """A register from memory of the kernel's own."""
        return self.op(f"load {self.floats}, ptr {self.at(pointer, index, self.floats)}, align 64")

    def hold(self, value, pointer, index=0):
        self.lines.append(f"store {self.floats} {value}, ptr {self.at(pointer, index, self.floats)}, align 64")

    def read(self, pointer):
        """A register from anywhere."""
        return self.op(f"load {self.floats}, ptr {pointer}, align 4")

    def var(self, kind, value=None, count=1):
        """Memory on the stack, of which LLVM makes registers where it can."""
        name = self.name()
        self.lines.insert(self.entry, f"{name} = alloca {kind}, i64 {count}, align 64")
        if value is not None:
            self.store(kind, value, name)
        return name

    def all(self, value, kind="float"):
        """A register of one value."""
        vector = f"<{self.lanes} x {kind}>"
        one = self.op(f"insertelement {vector} poison, {kind} {value}, i32 0")
        return self.op(f"shufflevector {vector} {one}, {vector} poison, {self.ints} zeroinitializer")

    def number(self, value):
        """A register of one number."""
        bits = struct.pack(">d", struct.unpack("f", struct.pack("f", value))[0])
        return self.all(f"0x{bits.hex().upper()}")

    def math(self, name, *given):
        values = ", ".join(f"{self.floats} {x}" for x in given)
        return self.op(f"call {self.floats} @llvm.{name}.v{self.lanes}f32({values})")

    def larger(self, one, other):
        """The larger of two registers, and `other` where one of them is no number."""
        more = self.op(f"fcmp ogt {self.floats} {one}, {other}")
        return self.op(f"select <{self.lanes} x i1> {more}, {self.floats} {one}, {self.floats} {other}")

    def seen(self, key, lo, size, score):
        """`score` in lanes that see a key, of which each sees `size` from `lo` on."""
        key = self.all(self.op(f"trunc i64 {key} to i32"), "i32")
        inside = self.op(f"icmp ult {self.ints} {self.do('sub', key, lo, kind=self.ints)}, {size}")
        return self.op(
            f"select <{self.lanes} x i1> {inside}, {self.floats} {score}, {self.floats} {self.number(_NONE)}"
        )

    def label(self, name):
        self.lines += [f"br label %{name}", f"{name}:"]

    @contextmanager
    def loop(self, end: str | int, step: int = 1) -> Iterator[str]:
        """For i in range(0, end, step)."""
        i = self.var("i64", 0)
        label = f"loop{self.n}"
        self.label(label)
        now = self.load("i64", i)
        more = self.op(f"icmp ult i64 {now}, {end}")
        self.lines += [f"br i1 {more}, label %{label}.in, label %{label}.end", f"{label}.in:"]
        yield now
        self.store("i64", self.do("add", now, step), i)
        self.lines += [f"br label %{label}", f"{label}.end:"]

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """If the condition holds."""
        self.n += 1
        label = f"when{self.n}"
        self.lines += [f"br i1 {condition}, label %{label}, label %{label}.end", f"{label}:"]
        yield
        self.label(f"{label}.end")

    @contextmanager
    def function(self, head: str) -> Iterator[None]:
        """A function; it returns nothing unless its last line does."""
        self.lines.append(f"define {head} #0 {{")
        self.entry = len(self.lines)
        yield
        self.lines += ["}"] if self.lines[-1].startswith("ret ") else ["ret void", "}"]

    def transposed(self, rows):
        """Registers whose lanes are the registers of `rows`, as many as lanes."""
        numbers, half = range(self.lanes), self.lanes // 2
        while half:
            low = ", ".join(f"i32 {self.lanes + i - half if i & half else i}" for i in numbers)
            high = ", ".join(f"i32 {self.lanes + i if i & half else i + half}" for i in numbers)
            made = list(rows)
            for i in (i for i in numbers if not i & half):
                pair = f"{self.floats} {rows[i]}, {self.floats} {rows[i + half]}, {self.ints}"
                made[i], made[i + half] = (self.op(f"shufflevector {pair} <{each}>") for each in (low, high))
            rows, half = made, half // 2
        return rows


# Scores that are held, how many and of how many pieces of keys, a pointer to values and a number each, and of all keys
# before: sums of values, the largest score and the sum of weights.
_STATE = "ptr noalias %scores, ptr noalias %held, ptr noalias %pieces, ptr noalias %o, ptr noalias %m, ptr noalias %sum"


def _text(lanes, tile, summed, dim, v_dim):
    w = _Writer(lanes)
    for n in range(1, tile + 1):
        _scores(w, n, dim)
    _weigh(w, summed, v_dim)
    _row(w, tile, dim, v_dim)
    _boxes(w, dim, v_dim)
    for name, n in (("fmuladd", 3), ("rint", 1)):
        w.lines.append(f"declare {w.floats} @llvm.{name}.v{lanes}f32({', '.join([w.floats] * n)})")
    w.lines.append('attributes #0 = { nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512" }')
    return "\n".join(w.lines)


def _scores(w, n, dim):
    """Write the scores of `n` keys from number %x of a row on; return the largest of them and %top."""
    given = f"ptr noalias %q, ptr noalias %k, ptr noalias %s, i64 %x, {w.floats} %seen, {w.ints} %lo, {w.ints} %size"
    with w.function(f"internal {w.floats} @scores{n}({given}, {w.floats} %top)"):
        sums = [w.var(w.floats, w.seen(w.do("add", "%x", j), "%lo", "%size", "%seen")) for j in range(n)]
        with w.loop(dim, 4) as d:
            for i in (w.do("add", d, u) for u in range(4)):
                query, key = w.held("%q", i), w.at("%k", i)
                for j, one in enumerate(sums):
                    value = w.all(w.load("float", w.at(key, j * dim)))
                    w.hold(w.math("fmuladd", query, value, w.held(one)), one)
        found = [w.held(one) for one in sums]
        for j, one in enumerate(found):
            w.hold(one, "%s", j)
        found.append("%top")
        while len(found) > 1:
            found = [
                *(w.larger(*pair) for pair in zip(found[::2], found[1::2], strict=False)),
                *found[len(found) & ~1 :],
            ]
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


def _weigh(w, summed, v_dim):
    """Add held keys' values by the weights of their scores, of which none exceeds %top."""
    with w.function(f"internal void @weigh({_STATE}, {w.floats} %top)"):
        found, pieces = (w.load("i64", w.at("%held", i, "i64")) for i in (0, 1))
        less = _power(w, w.do("fsub", w.held("%m"), "%top", kind=w.floats))
        w.hold("%top", "%m")
        total = w.var(w.floats, w.do("fmul", w.held("%sum"), less, kind=w.floats))
        with w.loop(found) as i:
            weight = _power(w, w.do("fsub", w.held("%scores", i), "%top", kind=w.floats))
            w.hold(weight, "%scores", i)
            w.hold(w.do("fadd", w.held(total), weight, kind=w.floats), total)
        w.hold(w.held(total), "%sum")
        with w.loop(v_dim, summed) as d:
            places = [w.do("add", d, j) for j in range(summed)]
            sums = [w.var(w.floats, w.do("fmul", w.held("%o", one), less, kind=w.floats)) for one in places]
            score = w.var("ptr", "%scores")
            with w.loop(pieces) as i:
                piece = w.at("%pieces", w.do("mul", i, 2), "i64")
                value = w.var("ptr", w.at(w.load("ptr", piece), d))
                with w.loop(w.load("i64", w.at(piece, 1, "i64"))):
                    s, v = w.load("ptr", score), w.load("ptr", value)
                    weight = w.held(s)
                    for j, one in enumerate(sums):
                        w.hold(w.math("fmuladd", weight, w.all(w.load("float", w.at(v, j))), w.held(one)), one)
                    w.store("ptr", w.at(s, 1, w.floats), score)
                    w.store("ptr", w.at(v, v_dim), value)
            for place, one in zip(places, sums, strict=True):
                w.hold(w.held(one), "%o", place)
        for i in (0, 1):
            w.store("i64", 0, w.at("%held", i, "i64"))


def _row(w, tile, dim, v_dim):
    """Attend to %n keys side by side, in tiles, as few as there are, of one length or two."""
    given = f"ptr %q, ptr %k, ptr %v, i64 %n, {w.floats} %seen, {w.ints} %lo, {w.ints} %size, ptr noalias %top"
    with w.function(f"internal void @row({given}, {_STATE})"):
        tiles = w.do("udiv", w.do("add", "%n", tile - 1), tile)
        with w.loop(tiles) as i:
            first, end = (w.do("udiv", w.do("mul", one, "%n"), tiles) for one in (i, w.do("add", i, 1)))
            keys = w.do("sub", end, first)
            held, pieces = (w.load("i64", w.at("%held", i, "i64")) for i in (0, 1))
            piece = w.at("%pieces", w.do("mul", pieces, 2), "i64")
            w.store("ptr", w.at("%v", w.do("mul", first, v_dim)), piece)
            w.store("i64", keys, w.at(piece, 1, "i64"))
            given = (
                f"ptr %q, ptr {w.at('%k', w.do('mul', first, dim))}, ptr {w.at('%scores', held, w.floats)}, i64 {first}"
            )
            given += f", {w.floats} %seen, {w.ints} %lo, {w.ints} %size, {w.floats} {w.held('%top')}"
            cases = " ".join(f"i64 {n}, label %of{n}" for n in range(1, tile))
            w.lines.append(f"switch i64 {keys}, label %of{tile} [{cases}]")
            for n in range(1, tile + 1):
                w.lines.append(f"of{n}:")
                w.hold(w.op(f"call {w.floats} @scores{n}({given})"), "%top")
                w.lines.append("br label %done")
            w.lines.append("done:")
            held = w.do("add", held, keys)
            w.store("i64", held, "%held")
            w.store("i64", w.do("add", pieces, 1), w.at("%held", 1, "i64"))
            with w.when(w.op(f"icmp ugt i64 {held}, {_HELD - tile}")):
                w.lines.append(f"call void @weigh({_STATE.replace(' noalias', '')}, {w.floats} {w.held('%top')})")


def _boxes(w, dim, v_dim):
    """Attend the boxes of a job."""
    with w.function("void @attend(ptr noalias %job, float %scale)"):
        a = {name: w.load("i64", w.at("%job", i, "i64")) for i, name in enumerate(FIELDS)}
        q, o, scores = (w.var(w.floats, count=n) for n in (dim, v_dim, _HELD))
        m, total, top, nowhere = (w.var(w.floats, count=n) for n in (1, 1, 1, v_dim // w.lanes))
        held, pieces = w.var("i64", count=2), w.var("i64", count=2 * _HELD)
        for i in (0, 1):
            w.store("i64", 0, w.at(held, i, "i64"))
        state = f"ptr {scores}, ptr {held}, ptr {pieces}, ptr {o}, ptr {m}, ptr {total}"
        offsets = {name: w.var("i64", count=w.lanes) for name in "qos"}
        places = w.var("i64", count=w.lanes)
        scale, zero, none = w.all("%scale"), w.number(0.0), w.number(_NONE)
        with (
            w.loop(a["units"]) as unit,
            w.loop(a["count0"]) as box0,
            w.loop(a["count1"]) as box1,
            w.loop(a["count2"]) as box2,
        ):
            # Tensors of this unit.
            first = w.do("mul", unit, a["group"])
            head = w.do("udiv", w.do("add", unit, a["skipped"]), a["share"])
            p = {}
            for name in ("q", "o", "s", "t", "k", "v", "k_extra", "v_extra"):
                stride = a[f"{'s' if name == 't' else name}3"]
                begin = w.op(f"inttoptr i64 {a[name]} to ptr")
                p[name] = w.at(begin, w.do("mul", first if name in "qost" else head, stride))
            # What the box is along each axis: of all, of all lanes.
            lanes: list = [[] for _ in range(6)]
            begins, counts, bits, queries, lo, size = lanes
            for i, box in enumerate((box0, box1, box2)):
                row = w.do("mul", box, TABLE + LANES * w.lanes)
                row = w.at(w.op(f"inttoptr i64 {a[f'spans{i}']} to ptr"), row, "i64")
                for j, one in enumerate((begins, counts, bits)):
                    one.append(w.load("i64", w.at(row, j, "i64")))
                for j, one in enumerate((queries, lo, size)):
                    one.append(w.load(w.longs, w.at(row, TABLE + j * w.lanes, "i64")))
            lo, size = ([w.op(f"trunc {w.longs} {x} to {w.ints}") for x in each] for each in (lo, size))
            # Where lanes lie.
            numbers = f"<{', '.join(f'i64 {i}' for i in range(w.lanes))}>"
            queries.append(w.do("urem", numbers, w.all(a["group"], "i64"), kind=w.longs))
            for name, place in offsets.items():
                each = [w.do("mul", x, w.all(a[f"{name}{i}"], "i64"), kind=w.longs) for i, x in enumerate(queries)]
                w.store(w.longs, w.do("add", *each, kind=w.longs), place)
            with w.loop(dim, w.lanes) as d:
                rows = [w.at(w.at(p["q"], w.load("i64", w.at(offsets["q"], i, "i64"))), d) for i in range(w.lanes)]
                for i, one in enumerate(w.transposed([w.read(row) for row in rows])):
                    w.hold(w.do("fmul", one, scale, kind=w.floats), q, w.do("add", d, i))
            with w.loop(v_dim) as d:
                w.hold(zero, o, d)
            for place, value in ((m, none), (top, none), (total, zero)):
                w.hold(value, place)
            with w.loop(counts[0]) as x, w.loop(counts[1]) as y:
                seen = w.seen(y, lo[1], size[1], w.seen(x, lo[0], size[0], zero))
                row = []
                for name, width in (("k", dim), ("v", v_dim)):
                    strides = a[f"{name}0"], a[f"{name}1"], width
                    key = zip((w.do("add", x, begins[0]), w.do("add", y, begins[1]), begins[2]), strides, strict=True)
                    row.append(w.at(p[name], w.do("add", *(w.do("mul", *pair) for pair in key))))
                given = f"ptr {q}, ptr {row[0]}, ptr {row[1]}, i64 {counts[2]}, {w.floats} {seen}"
                w.lines.append(f"call void @row({given}, {w.ints} {lo[2]}, {w.ints} {size[2]}, ptr {top}, {state})")
            given = f"ptr {q}, ptr {p['k_extra']}, ptr {p['v_extra']}, i64 {a['extras']}, {w.floats} {zero}"
            all_keys = f"{w.ints} zeroinitializer, {w.ints} {w.all(-1, 'i32')}"
            w.lines.append(f"call void @row({given}, {all_keys}, ptr {top}, {state})")
            w.lines.append(f"call void @weigh({state}, {w.floats} {w.held(top)})")
            # Results of lanes that are copies go where nobody reads.
            bits = w.do("and", *bits)
            for i in range(w.lanes):
                own = w.op(f"icmp ne i64 {w.do('and', bits, 1 << i)}, 0")
                place = w.at(p["o"], w.load("i64", w.at(offsets["o"], i, "i64")))
                w.store("ptr", w.op(f"select i1 {own}, ptr {place}, ptr {nowhere}"), w.at(places, i, "i64"))
            share = w.do("fdiv", w.number(1.0), w.held(total), kind=w.floats)
            with w.loop(v_dim, w.lanes) as d:
                rows = [w.do("fmul", w.held(o, w.do("add", d, i)), share, kind=w.floats) for i in range(w.lanes)]
                for i, one in enumerate(w.transposed(rows)):
                    place = w.at(w.load("ptr", w.at(places, i, "i64")), d)
                    w.lines.append(f"store {w.floats} {one}, ptr {place}, align 4")
            with w.when(w.op(f"icmp ne i64 {a['s']}, 0")), w.loop(w.lanes) as i:
                offset = w.load("i64", w.at(offsets["s"], i, "i64"))
                with w.when(w.op(f"trunc i64 {w.do('lshr', bits, i)} to i1")):
                    for name, values in (("s", total), ("t", m)):
                        w.store("float", w.load("float", w.at(values, i)), w.at(p[name], offset))
