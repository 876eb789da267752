"""Text of LLVM, an instruction after the other: what `kernel` is written with."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

# A name, or a number.
Value: TypeAlias = str | int
# The score of a key that is not seen.
UNSEEN = -1e30


class Writer:
    """The text of functions, an instruction after the other. Values are names or numbers."""

    def __init__(self, lanes: int):
        self.n, self.entry, self.lanes = 0, 0, lanes
        self.lines: list[str] = []
        self.floats, self.ints, self.longs = (f"<{lanes} x {kind}>" for kind in ("float", "i32", "i64"))

    def name(self) -> str:
        """A new name."""
        self.n += 1
        return f"%t{self.n}"

    def op(self, text: str) -> str:
        """A new value."""
        name = self.name()
        self.lines.append(f"{name} = {text}")
        return name

    def do(self, what: str, one: Value, *others: Value, kind: str = "i64") -> str:
        """An operation on values of one kind, from the left."""
        for other in others:
            one = self.op(f"{what} {kind} {one}, {other}")
        return str(one)

    def at(self, pointer: str, index: Value, kind: str = "float") -> str:
        """The address of an element."""
        return self.op(f"getelementptr {kind}, ptr {pointer}, i64 {index}")

    def load(self, kind: str, pointer: str) -> str:
        """A value from memory."""
        return self.op(f"load {kind}, ptr {pointer}, align {4 if kind == 'float' else 8}")

    def store(self, kind: str, value: Value, pointer: str) -> None:
        """Write a value to memory."""
        self.lines.append(f"store {kind} {value}, ptr {pointer}, align {4 if kind == 'float' else 8}")

    def held(self, pointer: str, index: Value = 0) -> str:
        """A register from memory of the kernel's own."""
        return self.op(f"load {self.floats}, ptr {self.at(pointer, index, self.floats)}, align 64")

    def hold(self, value: str, pointer: str, index: Value = 0) -> None:
        """Write a register to memory of the kernel's own."""
        self.lines.append(f"store {self.floats} {value}, ptr {self.at(pointer, index, self.floats)}, align 64")

    def read(self, pointer: str) -> str:
        """A register from anywhere."""
        return self.op(f"load {self.floats}, ptr {pointer}, align 4")

    def var(self, kind: str, value: Value | None = None, count: int = 1) -> str:
        """Memory on the stack, of which LLVM makes registers where it can."""
        name = self.name()
        self.lines.insert(self.entry, f"{name} = alloca {kind}, i64 {count}, align 64")
        if value is not None:
            self.store(kind, value, name)
        return name

    def all(self, value: Value, kind: str = "float") -> str:
        """A register of one value."""
        vector = f"<{self.lanes} x {kind}>"
        one = self.op(f"insertelement {vector} poison, {kind} {value}, i32 0")
        return self.op(f"shufflevector {vector} {one}, {vector} poison, {self.ints} zeroinitializer")

    def number(self, value: float) -> str:
        """A register of one number."""
        bits = struct.pack(">d", struct.unpack("f", struct.pack("f", value))[0])
        return self.all(f"0x{bits.hex().upper()}")

    def math(self, name: str, *given: str) -> str:
        """One of LLVM's functions of registers."""
        values = ", ".join(f"{self.floats} {x}" for x in given)
        return self.op(f"call {self.floats} @llvm.{name}.v{self.lanes}f32({values})")

    def larger(self, one: str, other: str) -> str:
        """The larger of two registers, and `other` where one of them is no number."""
        more = self.op(f"fcmp ogt {self.floats} {one}, {other}")
        return self.op(f"select <{self.lanes} x i1> {more}, {self.floats} {one}, {self.floats} {other}")

    def seen(self, key: Value, lo: str, size: str, score: str) -> str:
        """`score` in lanes that see a key, of which each sees `size` from `lo` on."""
        key = self.all(self.op(f"trunc i64 {key} to i32"), "i32")
        inside = self.op(f"icmp ult {self.ints} {self.do('sub', key, lo, kind=self.ints)}, {size}")
        return self.op(
            f"select <{self.lanes} x i1> {inside}, {self.floats} {score}, {self.floats} {self.number(UNSEEN)}"
        )

    def label(self, name: str) -> None:
        """Begin a block, which the one before goes on with."""
        self.lines += [f"br label %{name}", f"{name}:"]

    @contextmanager
    def loop(self, end: Value, step: int = 1) -> Iterator[str]:
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

    def transposed(self, rows: list[str]) -> list[str]:
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
