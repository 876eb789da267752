"""Operators on words of bits, as BTOR2 defines them: on integers, from which constants are folded, too.

A function takes ``(node, *values)``: `node` tells the width and the numbers of an operator, see `system.Node`.
"""

import operator


def _mask(node):
    return (1 << node.width) - 1


def signed(value: int, width: int) -> int:
    """The signed number that a word stands for."""
    return value - (1 << width) if value >> (width - 1) else value


def _signed(compare):
    def of(node, one, other):
        return int(compare(signed(one, node.numbers[0]), signed(other, node.numbers[0])))

    return of


def _sra(node, one, by):
    return (signed(one, node.width) >> min(by, node.width)) & _mask(node)


def _sdiv(node, one, other):
    """Truncated towards zero; by zero it is 1 for a negative number, else -1, as in SMT-LIB."""
    one, other = signed(one, node.width), signed(other, node.width)
    if not other:
        return 1 if one < 0 else _mask(node)
    return (abs(one) // abs(other) * (-1 if (one < 0) != (other < 0) else 1)) & _mask(node)


def _srem(node, one, other):
    """With the dividend's sign."""
    one, other = signed(one, node.width), signed(other, node.width)
    return (abs(one) % (abs(other) or 1 + abs(one)) * (-1 if one < 0 else 1)) & _mask(node)


def _smod(node, one, other):
    """With the divisor's sign."""
    one, other = signed(one, node.width), signed(other, node.width)
    return (one % other if other else one) & _mask(node)


def _overflow(op, whole):
    """Whether a sum, a difference or a product is no word. whole: of signed numbers."""

    def of(node, one, other):
        width, low = node.numbers[0], 0
        if whole:
            one, other, low = signed(one, width), signed(other, width), -(1 << width - 1)
        return int(not low <= op(one, other) < low + (1 << width))

    return of


def _sdivo(node, one, other):
    """Only the least number by -1 is no word."""
    width = node.numbers[0]
    return int(one == 1 << width - 1 and other == (1 << width) - 1)


def _rol(node, one, by):
    by %= node.width
    return (one << by | one >> (node.width - by)) & _mask(node)


def _parity(_node, one):
    return one.bit_count() & 1


OPERATORS = {
    "not": lambda node, one: ~one & _mask(node),
    "neg": lambda node, one: -one & _mask(node),
    "inc": lambda node, one: (one + 1) & _mask(node),
    "dec": lambda node, one: (one - 1) & _mask(node),
    # numbers: the width of what is reduced.
    "redand": lambda node, one: int(one == (1 << node.numbers[0]) - 1),
    "redor": lambda _node, one: int(one != 0),
    "redxor": _parity,
    # numbers: the width of what is extended.
    "uext": lambda _node, one: one,
    "sext": lambda node, one: signed(one, node.numbers[0]) & _mask(node),
    # numbers: the highest and the lowest bit.
    "slice": lambda node, one: (one >> node.numbers[1]) & _mask(node),
    "and": lambda _node, one, other: one & other,
    "or": lambda _node, one, other: one | other,
    "xor": lambda _node, one, other: one ^ other,
    "nand": lambda node, one, other: ~(one & other) & _mask(node),
    "nor": lambda node, one, other: ~(one | other) & _mask(node),
    "xnor": lambda node, one, other: ~(one ^ other) & _mask(node),
    "implies": lambda _node, one, other: int(not one or bool(other)),
    "iff": lambda _node, one, other: int(one == other),
    "eq": lambda _node, one, other: int(one == other),
    "neq": lambda _node, one, other: int(one != other),
    "ult": lambda _node, one, other: int(one < other),
    "ulte": lambda _node, one, other: int(one <= other),
    "ugt": lambda _node, one, other: int(one > other),
    "ugte": lambda _node, one, other: int(one >= other),
    # numbers: the width of what is compared.
    "slt": _signed(lambda one, other: one < other),
    "slte": _signed(lambda one, other: one <= other),
    "sgt": _signed(lambda one, other: one > other),
    "sgte": _signed(lambda one, other: one >= other),
    "uaddo": _overflow(operator.add, False),
    "saddo": _overflow(operator.add, True),
    "usubo": _overflow(operator.sub, False),
    "ssubo": _overflow(operator.sub, True),
    "umulo": _overflow(operator.mul, False),
    "smulo": _overflow(operator.mul, True),
    "sdivo": _sdivo,
    "add": lambda node, one, other: (one + other) & _mask(node),
    "sub": lambda node, one, other: (one - other) & _mask(node),
    "mul": lambda node, one, other: (one * other) & _mask(node),
    "udiv": lambda node, one, other: one // other if other else _mask(node),
    "urem": lambda _node, one, other: one % other if other else one,
    "sdiv": _sdiv,
    "srem": _srem,
    "smod": _smod,
    "sll": lambda node, one, by: (one << by) & _mask(node) if by < node.width else 0,
    "srl": lambda node, one, by: one >> by if by < node.width else 0,
    "sra": _sra,
    "rol": _rol,
    "ror": lambda node, one, by: _rol(node, one, -by % node.width),
    # numbers: the width of the lower word.
    "concat": lambda node, one, other: one << node.numbers[0] | other,
    "ite": lambda _node, condition, one, other: one if condition else other,
}
UNARY = ("not", "neg", "inc", "dec", "redand", "redor", "redxor")
SAME = (
    *("and", "or", "xor", "nand", "nor", "xnor", "add", "sub", "mul"),
    *("udiv", "urem", "sdiv", "srem", "smod", "sll", "srl", "sra", "rol", "ror"),
)
# Of two words one bit.
COMPARED = (
    *("implies", "iff", "eq", "neq", "ult", "ulte", "ugt", "ugte", "slt", "slte", "sgt", "sgte"),
    *("uaddo", "saddo", "usubo", "ssubo", "umulo", "smulo", "sdivo"),
)
# Arrays: of a constant word, read, write, whether two are the same.
ARRAYS = ("fill", "read", "write", "same")
