"""Multiply-add blocks of FPGAs and a generator of addresses, and what they are asked to compute for all inputs.

The blocks are the simulation models that come with Yosys. Parameters of a block become inputs that are configuration,
``c_...``; what is asked for is an assertion. ``python -m helpers.statements [seconds]`` asks all, and prints a table.
"""

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from tilewright.pushmem.configure import design, verilog

# Inputs one and two cycles ago, and how many cycles there were.
PAST = """
reg signed [{w}:0] a1, b1, a2, b2; reg [2:0] age = 0;
always @(posedge clk) begin a1 <= a; b1 <= b; a2 <= a1; b2 <= b1; if (age < 7) age <= age + 1; end
"""
SB_MAC16 = {
    **dict.fromkeys(("C_REG", "A_REG", "B_REG", "D_REG", "TOP_8x8_MULT_REG", "BOT_8x8_MULT_REG", "MODE_8x8"), 1),
    **dict.fromkeys(("PIPELINE_16x16_MULT_REG1", "PIPELINE_16x16_MULT_REG2", "A_SIGNED", "B_SIGNED"), 1),
    **{f"{half}{what}": bits for half in ("TOP", "BOT") for what, bits in (
        ("OUTPUT_SELECT", 2), ("ADDSUB_LOWERINPUT", 2), ("ADDSUB_UPPERINPUT", 1), ("ADDSUB_CARRYSELECT", 2))},
}  # fmt: skip


def _bound(names):
    return ", ".join(f".{name}(c_{name})" for name in names)


def _zero(names, width=1):
    return ", ".join(f".{name}({width}'d0)" for name in names.split())


def _one(names):
    return ", ".join(f".{name}(1'b1)" for name in names.split())


@dataclass(frozen=True)
class Block:
    """A file of Yosys, modules in it, parameters that become inputs (bits), ports of the statement, and instances."""

    file: str
    modules: tuple[str, ...]
    opened: dict[str, int]
    ports: str
    body: str

    def text(self, asked: str) -> str:
        """The design in Verilog of a statement."""
        whole = (verilog.pyosys() / "share" / self.file).read_text(encoding="utf-8") if self.file else GENERATOR
        found = [
            re.search(rf"^module {name}\b.*?^endmodule", whole, re.DOTALL | re.MULTILINE)[0] for name in self.modules
        ]
        for name, bits in self.opened.items():
            found[0] = re.sub(rf"\bparameter\s+(integer\s+|\[\d+:\d+\]\s*)?{name}\s*=[^;]*;", "", found[0])
            found[0] = re.sub(r"\(", f"(input [{bits - 1}:0] {name},", found[0], count=1)
        opened = "".join(f"input [{bits - 1}:0] c_{name}, " for name, bits in self.opened.items())
        return f"module statement(input clk, {opened}{self.ports});\n{self.body}\n{asked}\nendmodule\n" + "\n".join(
            found
        )


ICE40 = Block(
    "ice40/cells_sim.v", ("SB_MAC16",), SB_MAC16, "input c_subtop, c_subbot, input [15:0] a, b, c, d",
    f"""wire [31:0] o;
SB_MAC16 block(.CLK(clk), .A(a), .B(b), .C(c), .D(d), .O(o), .ADDSUBTOP(c_subtop), .ADDSUBBOT(c_subbot),
{_one("CE")}, {_zero("AHOLD BHOLD CHOLD DHOLD IRSTTOP IRSTBOT ORSTTOP ORSTBOT OLOADTOP OLOADBOT OHOLDTOP OHOLDBOT CI")},
{_zero("ACCUMCI SIGNEXTIN")}, {_bound(SB_MAC16)});
{PAST.format(w=15)}
wire signed [15:0] h = $signed(a[15:8]) * $signed(b[15:8]), l = $signed(a[7:0]) * $signed(b[7:0]);
wire [15:0] hu = a[15:8] * b[15:8], lu = a[7:0] * b[7:0], hl = a[15:8] * b[7:0], lh = a[7:0] * b[15:8];""",
)  # fmt: skip
SPARTAN = Block(
    "xilinx/cells_sim.v", ("MULT18X18SIO",), dict.fromkeys(("AREG", "BREG", "PREG"), 1),
    "input signed [17:0] a, b",
    f"""wire signed [35:0] p;
MULT18X18SIO block(.CLK(clk), .A(a), .B(b), .P(p), {_one("CEA CEB CEP")}, {_zero("RSTA RSTB RSTP")},
.BCIN(18'd0), {_bound(("AREG", "BREG", "PREG"))});
{PAST.format(w=17)}""",
)  # fmt: skip
_DSP48 = """wire signed [47:0] p{n};
DSP48E1 #(.AREG({n}), .BREG({n}), .CREG({n}), .DREG({n}), .ADREG(0), .MREG(0), .PREG({out}), .ACASCREG({n}),
.BCASCREG({n}), .INMODEREG(0), .OPMODEREG(0), .ALUMODEREG(0), .CARRYINREG(0), .CARRYINSELREG(0), .USE_DPORT("TRUE"))
block{n}(.CLK(clk), .A(a), .B(b), .C(c), .D(d), .P(p{n}), .OPMODE(c_opmode), .ALUMODE(c_alumode), .INMODE(c_inmode),
.PCIN(pcin), .CARRYIN(c_carry), .CARRYINSEL(3'd0), .ACIN(30'd0), .BCIN(18'd0), {zero}, {one});
"""
_OF_DSP48 = {
    "zero": _zero("CARRYCASCIN MULTSIGNIN RSTA RSTALLCARRYIN RSTALUMODE RSTB RSTC RSTCTRL RSTD RSTINMODE RSTM RSTP"),
    "one": _one("CEA1 CEA2 CEAD CEALUMODE CEB1 CEB2 CEC CECARRYIN CECTRL CED CEINMODE CEM CEP"),
}


def _series7(out):
    return Block(
        "xilinx/cells_sim.v", ("DSP48E1",), {},
        "input [6:0] c_opmode, input [3:0] c_alumode, input [4:0] c_inmode, input c_early, c_carry, "
        "input signed [29:0] a, input signed [17:0] b, input signed [47:0] c, pcin, input signed [24:0] d",
        _DSP48.format(n=0, out=out, **_OF_DSP48) + _DSP48.format(n=1, out=out, **_OF_DSP48) + PAST.format(w=29) + """
wire signed [47:0] p = c_early ? p1 : p0;
wire signed [24:0] al = a[24:0], more = d + al, less = d - al;
wire signed [42:0] m = al * b, mm = more * b, ml = less * b;
reg signed [42:0] m1; reg signed [47:0] c1; always @(posedge clk) begin m1 <= m; c1 <= c; end
// What the model refuses in other simulators: both halves of a product, or none; the output where it has a register.
always @* assume((c_opmode[1:0] == 1) == (c_opmode[3:2] == 1));
always @* assume(c_opmode[1:0] != 2 && (c_opmode[6:4] != 2 || OUT) && c_opmode[6:4] != 4 && c_opmode[6:4] < 6);
""".replace("OUT", str(out)),
    )  # fmt: skip


SERIES7, SERIES7_OUT = _series7(0), _series7(1)
# Each has an enable and a reset.
REGISTERS = ("A", "B", "C", "PIPE", "CTRL", "CIN", "OUT")
NEXUS = Block(
    "nexus/cells_sim.v", ("MULTADDSUB18X18", "OXIDE_DSP_SIM", "OXIDE_DSP_REG"), {},
    "input c_signed, c_load, c_sub, c_in, input [17:0] a, b, input [53:0] c",
    f"""wire [53:0] z;
MULTADDSUB18X18 #(.REGINPUTA("BYPASS"), .REGINPUTB("BYPASS"), .REGINPUTC("BYPASS"), .REGADDSUB("BYPASS"),
.REGLOADC("BYPASS"), .REGLOADC2("BYPASS"), .REGCIN("BYPASS"), .REGPIPELINE("BYPASS")) block(.CLK(clk), .A(a), .B(b),
.C(c), .SIGNED(c_signed), .LOADC(c_load), .ADDSUB(c_sub), .CIN(c_in), .Z(z),
{_one(" ".join(f"CE{port}" for port in REGISTERS))},
{_zero(" ".join(f"RST{port}" for port in REGISTERS))});
wire [35:0] m = a * b; wire signed [35:0] s = $signed(a) * $signed(b);
reg signed [53:0] c1; reg [35:0] m1; reg signed [35:0] s1; reg old = 0;
wire signed [53:0] less = c1 - s1, more = c1 + s1;
always @(posedge clk) begin c1 <= c; m1 <= m; s1 <= s; old <= 1; end""",
)  # fmt: skip
QUICKLOGIC = Block(
    "quicklogic/qlf_k6n10f/dsp_sim.v", ("dsp_t1_sim_cfg_ports",), {},
    "input [2:0] c_feedback, c_select, input c_load, c_ua, c_ub, c_saturate, c_round, c_subtract, c_registers, "
    "input [5:0] c_shift, c_fir, input [9:0] a, input [8:0] b",
    """wire [18:0] z; wire [8:0] late;
dsp_t1_sim_cfg_ports #(.NBITS_ACC(32), .NBITS_A(10), .NBITS_B(9), .NBITS_Z(19)) block(.clock_i(clk), .s_reset(1'b0),
.a_i(a), .b_i(b), .z_o(z), .dly_b_o(late), .acc_fir_i(c_fir), .feedback_i(c_feedback), .load_acc_i(c_load),
.unsigned_a_i(c_ua), .unsigned_b_i(c_ub), .saturate_enable_i(c_saturate), .output_select_i(c_select), .round_i(c_round),
.shift_right_i(c_shift), .subtract_i(c_subtract), .register_inputs_i(c_registers), .coef_0_i(10'd0), .coef_1_i(10'd0),
.coef_2_i(10'd0), .coef_3_i(10'd0));
wire [18:0] m = a * b; reg [18:0] m1; reg [9:0] a1; reg old = 0;
always @(posedge clk) begin m1 <= m; a1 <= a; old <= 1; end""",
)  # fmt: skip


# Two loops: a step at a time, another one at the end of the inner loop.
GENERATOR = """module generator(input clk, go, input [1:0] last0, last1, input [7:0] step0, step1, input [7:0] start,
output [7:0] at, output reg [1:0] inner, outer);
reg [7:0] moved; initial {moved, inner, outer} = 0;
assign at = start + moved;
always @(posedge clk) if (go) begin
  inner <= inner == last0 ? 0 : inner + 1;
  if (inner == last0) outer <= outer == last1 ? 0 : outer + 1;
  moved <= inner != last0 ? moved + step0 : outer != last1 ? moved + step1 : 0;
end
endmodule"""
ADDRESSES = Block(
    "", ("generator",), {}, "input [1:0] c_last0, c_last1, input [7:0] c_step0, c_step1, start, input go",
    """wire [7:0] at; wire [1:0] inner, outer; reg [1:0] x, y; initial {x, y} = 0;
generator block(.clk(clk), .go(go), .start(start), .at(at), .inner(inner), .outer(outer), .last0(c_last0),
.last1(c_last1), .step0(c_step0), .step1(c_step1));
wire same = x == inner && y == outer && y < 3;
always @(posedge clk) if (go) begin x <= x + 1; if (x == 3) y <= y == 2 ? 0 : y + 1; end""",
)  # fmt: skip


@dataclass(frozen=True)
class Statement:
    """What a block is asked for. exists: whether a configuration does it, None where 60 s do not tell."""

    name: str
    block: Block
    asked: str
    exists: bool | None = True
    cycles: int = 1
    always: bool = False


def _always(truth, when="1"):
    return f"always @* if ({when}) assert({truth});"


def _registered(name, block, truth, when, exists=True):
    return Statement(name, block, _always(truth, when), exists, 4, True)


def _summed(name, block, out, product, exists=True):
    """An accumulator: what goes out grows by the product each cycle."""
    bits = {"p": 48, "z": 54}[out]
    body = f"reg signed [{bits - 1}:0] grown; reg begun = 0;\n"
    body += f"always @(posedge clk) begin grown <= {out} + {product}; begun <= 1; end\n"
    return Statement(name, block, body + _always(f"{out} == grown", "begun"), exists, 3, True)


STATEMENTS = (
    Statement("start + 5 x + 40 y", ADDRESSES, _always("at == start + 8'd5 * x + 8'd40 * y"), True, 14),
    Statement("the same, always", ADDRESSES, _always("at == start + 8'd5 * x + 8'd40 * y && same"), True, 14, True),
    Statement("start - 3 x + 8 y", ADDRESSES, _always("at == start - 8'd3 * x + 8'd8 * y && same"), True, 14, True),
    Statement("start + x * x", ADDRESSES, _always("at == start + 8'd1 * x * x"), False, 6),
    Statement("two products of 8 bits", ICE40, _always("o == {hu, lu}")),
    Statement("two signed products of 8 bits", ICE40, _always("o == {h, l}")),
    Statement("a product and d, 8 bits", ICE40, _always("o[15:0] == lu + d")),
    Statement("d less a product, 8 bits", ICE40, _always("o[15:0] == d - lu")),
    Statement("a product less d, 8 bits", ICE40, _always("o[15:0] == lu - d"), False),
    Statement("two sums of 16 bits", ICE40, _always("o == {a + c, b + d}")),
    Statement("a sum of 32 bits", ICE40, _always("o == {c, d} + {a, b}")),
    Statement("a difference of 32 bits", ICE40, _always("o == {c, d} - {a, b}")),
    Statement("16 x 16 bits from four products", ICE40, _always("o == lu + (hl << 8) + (lh << 8) + (hu << 16)")),
    Statement("16 x 16 bits as one product", ICE40, _always("o == a * b"), None),
    Statement("a sum of two products of 8 bits", ICE40, _always("o[15:0] == hu + lu"), False),
    Statement("a product of swapped halves", ICE40, _always("o[15:0] == hl"), False),
    _registered("a product, two cycles late", SPARTAN, "p == a2 * b2", "age >= 2"),
    _registered("a product, one cycle late", SPARTAN, "p == a1 * b1", "age >= 1"),
    _registered("a product, b one cycle older", SPARTAN, "p == a1 * b2", "age >= 2"),
    _registered("a product, two cycles older b", SPARTAN, "p == a * b2", "age >= 2", False),
    Statement("a * b", SERIES7, _always("p == m")),
    Statement("a * b + c", SERIES7, _always("p == m + c")),
    Statement("c - a * b", SERIES7, _always("p == c - m")),
    Statement("a * b - c", SERIES7, _always("p == m - c")),
    Statement("a * b + 1", SERIES7, _always("p == m + 1")),
    Statement("a * b + 2", SERIES7, _always("p == m + 2"), False),
    Statement("(d + a) * b + c", SERIES7, _always("p == mm + c")),
    Statement("(d - a) * b", SERIES7, _always("p == ml")),
    Statement("a * b + c + pcin", SERIES7, _always("p == m + c + pcin"), False),
    Statement("(a, b) + c + pcin", SERIES7, _always("p == $signed({a, b}) + c + pcin")),
    Statement("(a, b) and c", SERIES7, _always("p == ({a, b} & c)")),
    Statement("(a, b) exclusive or c", SERIES7, _always("p == ({a, b} ^ c)")),
    Statement("a * b + c, one cycle late", SERIES7, _always("p == m1 + c1", "age >= 1"), True, 2, True),
    _summed("a sum of a * b", SERIES7_OUT, "p", "m"),
    Statement("c + a * b, unsigned, one cycle late", NEXUS, _always("z == c1 + m1", "old"), True, 3, True),
    Statement("c - a * b, signed, one cycle late", NEXUS, _always("z == less", "old"), True, 3, True),
    _summed("a sum of a * b, unsigned", NEXUS, "z", "m"),
    Statement("a * b - c", NEXUS, _always("z == m1 - c1", "old"), False, 3),
    Statement("a * b of 10 and 9 bits", QUICKLOGIC, _always("z == m")),
    Statement("a * b, one cycle late", QUICKLOGIC, _always("z == m1", "old"), True, 3, True),
    Statement("a * b shifted by 4", QUICKLOGIC, _always("z == m >> 4")),
    Statement("a + b", QUICKLOGIC, _always("z == a + b"), False),
)  # fmt: skip


def asked(statement: Statement, folder: Path, limit_s: float):
    """``(forall.Answer, seconds to read)`` of a statement; files lie in a folder."""
    path, begin = folder / "statement.v", perf_counter()
    path.write_text(statement.block.text(statement.asked), encoding="utf-8")
    answer = design.run_for_all(
        path, "c_.*", ".*", folder / "answer.json", cycles=statement.cycles, always=statement.always, limit_s=limit_s
    )
    return answer, perf_counter() - begin


def main(limit_s: float = 60.0) -> None:
    """Print a row for each statement."""
    print("| block | statement | answer | for | examples | s | other solver |\n|---|---|---|---|---:|---:|---|")
    for statement in STATEMENTS:
        with tempfile.TemporaryDirectory() as folder:
            answer, _ = asked(statement, Path(folder), limit_s)
        cycles = "all cycles" if answer.depth else f"{statement.cycles} cycle{'s' * (statement.cycles > 1)}"
        told = ", ".join(sorted(set(answer.confirmed.values())))
        wrong = {"solved": True, "infeasible": False}.get(answer.verdict) is not statement.exists
        print(
            f"| {statement.block.modules[0]} | {statement.name} | {answer.verdict} | {cycles} | {answer.rounds} "
            f"| {answer.seconds:.1f} | {told} |" + " UNEXPECTED" * wrong, flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
