"""Questions written down in SMT-LIB, and asked of another solver.

`Text` takes the place of `solve.Solver` where a system is unrolled. Its operators are those of SMT-LIB, by the
definitions of BTOR2; an overflow is read off the result in more bits. So an answer that depends on how terms are made,
or on one solver, is not confirmed by itself.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.core.errors import SolverError
from tilewright.pushmem.configure.solve import UNKNOWN, UNSAT
from tilewright.pushmem.configure.system import Node

_SAME = {
    **{op: f"bv{op}" for op in ("not", "neg", "and", "or", "xor", "nand", "nor", "xnor", "add", "sub", "mul")},
    **{op: f"bv{op}" for op in ("udiv", "urem", "sdiv", "srem", "smod")},
    **{"sll": "bvshl", "srl": "bvlshr", "sra": "bvashr", "concat": "concat", "read": "select", "write": "store"},
}
_COMPARED = {
    **{"eq": "=", "iff": "=", "neq": "distinct", "same": "=", "ult": "bvult", "ulte": "bvule", "ugt": "bvugt"},
    **{"ugte": "bvuge", "slt": "bvslt", "slte": "bvsle", "sgt": "bvsgt", "sgte": "bvsge"},
}
# Reads a file and says sat, unsat or unknown: other solvers, and the first one with other steps before and inside.
_ASKED = {
    "z3": "import sys, z3; s = z3.SolverFor('QF_ABV'); s.from_file(sys.argv[1]); print(s.check())",
    "bitwuzla": """
import sys, bitwuzla
options = bitwuzla.Options()
options.set(bitwuzla.Option.BV_SOLVER, "preprop")
options.set(bitwuzla.Option.PREPROCESS, False)
options.set(bitwuzla.Option.SEED, 7)
parser = bitwuzla.Parser(bitwuzla.TermManager(), options)
parser.parse(sys.argv[1], False, True)
""",
}


@dataclass(frozen=True)
class Term:
    """A name or an expression; of a word `width` bits, of an array also `index`; a truth has none."""

    text: str
    width: int = 0
    index: int = 0

    def id(self) -> str:
        """The same for the same terms."""
        return self.text

    def sort(self) -> str:
        """In SMT-LIB."""
        word = f"(_ BitVec {self.width})"
        return f"(Array (_ BitVec {self.index}) {word})" if self.index else word if self.width else "Bool"


class Text:
    """Terms, and what is required of them, as text."""

    def __init__(self) -> None:
        self.lines = ["(set-logic QF_ABV)"]
        self._known: dict[str, Term] = {}

    def in_time(self) -> None:
        """No time is taken."""

    def unknown(self, name: str, width: int, index: int = 0) -> Term:
        """A word to be found, or an array."""
        term = Term(f"|{len(self.lines)} {name.replace('|', '!').replace(chr(92), '!')}|", width, index)
        self.lines.append(f"(declare-const {term.text} {term.sort()})")
        return term

    def value(self, number: int, width: int) -> Term:
        """A constant word."""
        return Term(f"(_ bv{number} {width})", width)

    def array(self, index: int, width: int, term: Term) -> Term:
        """An array that holds `term` everywhere."""
        kind = Term("", width, index).sort()
        return self._made(f"((as const {kind}) {term.text})", width, index)

    def _made(self, text, width, index=0):
        if text not in self._known:
            self._known[text] = term = Term(f"t{len(self._known)}", width, index)
            self.lines.append(f"(define-fun {term.text} () {term.sort()} {text})")
        return self._known[text]

    def apply(self, node: Node, args: Sequence[Term]) -> Term:
        """The term of a node, see `system.Node`, of the terms `args`."""
        return self._made(self._applied(node, args), node.width, node.index)

    def _applied(self, node, args):
        op, width, texts = node.op, args[0].width, [arg.text for arg in args]
        told = " ".join(texts)
        if op in _SAME:
            return f"({_SAME[op]} {told})"
        if op in _COMPARED:
            return _bit(f"({_COMPARED[op]} {told})")
        if op == "ite":
            return f"(ite (= {texts[0]} #b1) {texts[1]} {texts[2]})"
        if op == "implies":
            return f"(bvor (bvnot {texts[0]}) {texts[1]})"
        if op in ("inc", "dec"):
            return f"(bv{'add' if op == 'inc' else 'sub'} {told} (_ bv1 {width}))"
        if op == "slice":
            return f"((_ extract {node.numbers[0]} {node.numbers[1]}) {told})"
        if op in ("uext", "sext"):
            return _extended(op, told, node.width - node.numbers[0])
        if op in ("redor", "redand"):
            return _bit(
                f"(distinct {told} (_ bv0 {width}))" if op == "redor" else f"(= (bvnot {told}) (_ bv0 {width}))"
            )
        if op == "redxor":
            bits = [f"((_ extract {at} {at}) {told})" for at in range(width)]
            return f"(bvxor {' '.join(bits)})" if width > 1 else told
        if op in ("rol", "ror"):
            if width == 1:
                return texts[0]
            by = f"(bvurem {texts[1]} (_ bv{width} {width}))"
            left, right = (by, f"(bvsub (_ bv{width} {width}) {by})")[:: 1 if op == "rol" else -1]
            return f"(bvor (bvshl {texts[0]} {left}) (bvlshr {texts[0]} {right}))"
        # Whether the result in twice the bits, and one more, is that of the bits there are.
        kind, more = "uext" if op[0] == "u" else "sext", width + 1
        name = {"add": "bvadd", "sub": "bvsub", "mul": "bvmul", "div": "bvsdiv"}[op[1:-1]]
        whole = f"({name} {' '.join(_extended(kind, text, more) for text in texts)})"
        short = _extended(kind, f"((_ extract {width - 1} 0) {whole})", more)
        wrong = f"(distinct {whole} {short})"
        if op == "sdivo":
            wrong = f"(and (distinct {texts[1]} (_ bv0 {width})) {wrong})"
        return _bit(wrong)

    def equal(self, term: Term, number: int) -> Term:
        """The truth that a word is a number."""
        return Term(f"(= {term.text} (_ bv{number} {term.width}))")

    def negated(self, truth: Term) -> Term:
        """The truth that another is none."""
        return Term(f"(not {truth.text})")

    def all_of(self, truths: Sequence[Term]) -> Term:
        """The truth of all."""
        return self._made(f"(and true true {' '.join(truth.text for truth in truths)})", 0)

    def any_of(self, truths: Sequence[Term]) -> Term:
        """The truth of one at least."""
        return self._made(f"(or false false {' '.join(truth.text for truth in truths)})", 0)

    def require(self, truth: Term) -> None:
        """From now on this holds."""
        self.lines.append(f"(assert {truth.text})")

    def written(self) -> str:
        """All of it."""
        return "\n".join([*self.lines, "(check-sat)", ""])


def _bit(truth):
    return f"(ite {truth} #b1 #b0)"


def _extended(op, text, more):
    return f"((_ {'zero' if op == 'uext' else 'sign'}_extend {more}) {text})"


def confirmed(path: str | Path, limit_s: float | None = None) -> tuple[str, str]:
    """``(solver, answer)`` to a written question: of z3 where it is installed and knows, else of Bitwuzla, which reads
    the file in a process of its own, with other steps. The answer is `UNSAT`, or `UNKNOWN` where the time is over.

    Raises `SolverError` where it is another one.
    """
    solvers = ["z3", "bitwuzla"] if importlib.util.find_spec("z3") else ["bitwuzla"]
    limit_s = None if limit_s is None else limit_s / len(solvers)
    for solver in solvers:
        command = [sys.executable, "-c", _ASKED[solver], str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
        except subprocess.TimeoutExpired:
            continue
        said = done.stdout.strip()
        if said == UNSAT:
            break
        if said != UNKNOWN:
            raise SolverError(f"{path}: expected unsat of {solver}, found {said or done.stderr.strip()[-200:]}")
    else:
        said = UNKNOWN
    return solver, said
