"""Designs in BTOR2 and Verilog, with examples in CSV: solved, explained, verified; unreadable files are named."""

import json

import pytest

from helpers import extras
from helpers.systems import COUNTER
from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.pushmem.configure import design, example, query
from tilewright_study.stages import configure

extras.need("bitwuzla")
SOLVED = "go, value\n1, 7\n0, x\n1, 0x0a\n,\n"
REFUTED = "go,value\n1,7\n0,9\n1,10\n"


@pytest.fixture
def files(tmp_path):
    """Paths of a design and of an example, whose text is written by the call."""
    (tmp_path / "counter.btor2").write_text(COUNTER)

    def written(text):
        (tmp_path / "example.csv").write_text(text)
        return tmp_path / "counter.btor2", "by_.*", tmp_path / "example.csv"

    return written


def test_a_design_is_configured_written_and_verified(files, tmp_path):
    answer = design.run(*files(SOLVED), tmp_path / "out.json")
    # go is 1, 0, 1: the third value is one step on.
    assert answer.registers == {"by_start": 7, "by_step": 3}
    assert design.verify(*files(SOLVED), tmp_path / "out.json") == 4
    assert json.loads((tmp_path / "out.json").read_text())["verified"] == {"replay": 4}


def test_a_design_that_cannot_is_explained(files, tmp_path):
    answer = design.run(*files(REFUTED), tmp_path / "out.json")
    assert answer.verdict == query.INFEASIBLE
    document = json.loads((tmp_path / "out.json").read_text())
    # The counter stands still from the second cycle to the third.
    assert document["cause"] == answer.cause.text() and document["registers"] == {}
    assert answer.cause.asked == [("value", 1, 9), ("value", 2, 10)]


def test_a_run_that_is_not_the_examples_is_refused(files, tmp_path):
    design.run(*files(SOLVED), tmp_path / "out.json")
    with pytest.raises(ConfigError, match=r"out\.json: value, cycle 2: expected 11, found 10"):
        design.verify(*files("go,value\n1,7\n0,\n1,11\n"), tmp_path / "out.json")


def test_a_file_without_an_answer_is_not_verified(files, tmp_path):
    design.run(*files(REFUTED), tmp_path / "out.json")
    with pytest.raises(ConfigError, match="expected a value of by_start"):
        design.verify(*files(SOLVED), tmp_path / "out.json")


@pytest.mark.parametrize(("text", "limit", "code"), [(SOLVED, None, None), (REFUTED, None, 2), (SOLVED, 0.0, 3)])
def test_the_commands_exit_code_is_the_verdicts(files, tmp_path, capsys, text, limit, code):
    system, chosen, trace = files(text)
    values = dict.fromkeys(("stream", "component", "memory", "engine", "layers", "fix", "monolithic", "write_stream"))
    values |= {"system": system, "example": trace, "time_limit": limit, "verify": None, "output": tmp_path / "out.json"}
    values |= {"least": None}
    if code is None:
        configure.run(**values, solve=chosen)
    else:
        with pytest.raises(SystemExit) as ended:
            configure.run(**values, solve=chosen)
        assert ended.value.code == code
    assert capsys.readouterr().out.startswith(f"{system}: {({None: 'solved', 2: 'infeasible', 3: 'unknown'})[code]}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a row for each cycle, found none"),
        ("go\n1\n", "expected a column of an output, among value, moved, found none"),
        ("go,value\n", "expected a row for each cycle, found none"),
        ("go,valu\n1,7\n", "expected columns among go, value, moved, found valu"),
        ("go,by_start\n1,7\n", "expected columns among go, value, moved, found by_start"),
        ("go,go\n1,1\n", "expected a column for each signal, found two of go"),
        ("go,\n1,7\n", "expected columns among go, value, moved, found a blank"),
        ("go,value\n1,7\n1\n", "row 3: expected 2 columns, found 1"),
        ("go,value\n1,7\n1,256\n", "row 3, column value: expected a word of 8 bits or x, found 256"),
        ("go,value\n2,7\n", "row 2, column go: expected a word of 1 bits or x, found 2"),
        ("go,value\n1,seven\n", "row 2, column value: expected a word of 8 bits or x, found seven"),
        ("go,value\n1,-1\n", "row 2, column value: expected a word of 8 bits or x, found -1"),
    ],
)
def test_an_example_that_cannot_be_read_is_named_and_nothing_is_written(files, tmp_path, text, message):
    with pytest.raises(ArtifactError, match=f"example.csv: {message}"):
        design.run(*files(text), tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_files_that_are_not_there_are_named(files, tmp_path):
    system, chosen, trace = files(SOLVED)
    with pytest.raises(ArtifactError, match=r"none\.csv: no such file"):
        design.run(system, chosen, tmp_path / "none.csv", tmp_path / "out.json")
    with pytest.raises(ArtifactError, match=r"none\.btor2: expected a design in BTOR2 or Verilog"):
        design.run(tmp_path / "none.btor2", chosen, trace, tmp_path / "out.json")
    trace.write_bytes(b"\xff\xfe")
    with pytest.raises(ArtifactError, match=r"example\.csv: expected an example, found a file that cannot be read"):
        design.run(system, chosen, trace, tmp_path / "out.json")


def test_an_input_that_may_be_any_is_zero(files):
    from tilewright.pushmem.configure import btor2

    read = example.read(files(SOLVED)[2], btor2.read(COUNTER, "by_.*"))
    assert read.inputs == {"go": [1, 0, 1, 0]} and read.outputs == {"value": [7, None, 10, None]}


def written(path, text):
    path.write_text(text)
    return path


# A count `n` that grows by `by_step` while `go`; twice it and `by_start` go out.
VERILOG = """
module count(input clk, rst, go, input [7:0] by, output reg [7:0] n);
  always @(posedge clk) if (rst) n <= 0; else if (go) n <= n + by;
endmodule
module twice(input clk, rst, go, input [7:0] by_step, by_start, output [7:0] value);
  wire [7:0] n;
  count of(.clk(clk), .rst(rst), .go(go), .by(by_step), .n(n));
  assign value = (n << 1) + by_start;
  always @(*) assume(n < 200);
  always @(*) assert(value != 7);
endmodule
"""


def test_a_design_in_verilog_is_configured_by_inner_names_too(tmp_path):
    extras.need("pyosys")
    folder = tmp_path / "with a blank"
    folder.mkdir()
    path, out = written(folder / "twice.v", VERILOG), tmp_path / "out.json"
    # What n is at first is open; then it is 0, 100 and 100 + by_step, all below 200.
    trace = written(tmp_path / "e.csv", "rst,go,n,value\n1,0,,\n0,1,,5\n0,1,100,\n0,0,,\n")
    answer = design.run(path, "by_.*", trace, out)
    assert (answer.verdict, answer.registers) == ("infeasible", {})
    trace = written(tmp_path / "e.csv", "rst,go,n,value\n1,0,,\n0,1,,5\n0,1,99,\n0,0,,\n")
    assert design.run(path, "by_.*", trace, out).registers == {"by_step": 99, "by_start": 5}
    assert design.verify(path, "by_.*", trace, out) == 4


def test_verilog_that_cannot_be_read_is_named_by_its_line(tmp_path):
    extras.need("pyosys")
    path, trace = written(tmp_path / "d.v", "module d(input a;\nendmodule\n"), written(tmp_path / "e.csv", "a\n1\n")
    with pytest.raises(ArtifactError, match=r"d\.v: expected a design in Verilog: .*d\.v:1: ERROR: syntax error"):
        design.run(path, "a", trace, tmp_path / "out.json")
    written(path, "module d(input a, output b);\n  e f(a, b);\nendmodule\n")
    with pytest.raises(ArtifactError, match=r"Module `.e' referenced in module `.d'"):
        design.run(path, "a", trace, tmp_path / "out.json")


# A sum of three words goes out.
SUM = """
1 sort bitvec 4
2 input 1 by_a
3 input 1 by_b
4 input 1 by_c
5 add 1 2 3
6 add 1 5 4
7 output 6 sum
"""


@pytest.mark.parametrize(
    ("least", "fix", "registers", "layers"),
    [
        (["by_[ab]", "by_c"], None, {"by_a": 0, "by_b": 0, "by_c": 9}, {"by_[ab]": 0, "by_c": 9}),
        (["by_c", "by_a"], None, {"by_a": 0, "by_b": 9, "by_c": 0}, {"by_c": 0, "by_a": 0}),
        (["by_b", "by_c"], {"by_a": 3}, {"by_a": 3, "by_b": 0, "by_c": 6}, {"by_b": 0, "by_c": 6}),
        (["by_[ab]"], {"by_a": 3, "by_c": 2}, {"by_a": 3, "by_b": 4, "by_c": 2}, {"by_[ab]": 7}),
    ],
)
def test_words_are_least_in_the_order_that_is_asked_for(tmp_path, capsys, least, fix, registers, layers):
    path, trace = written(tmp_path / "sum.btor2", SUM), written(tmp_path / "e.csv", "sum\n9\n")
    if fix is not None:
        artifacts.write_json(tmp_path / "fix.json", design.KIND, design.VERSION, {"registers": fix})
    values = dict.fromkeys(("stream", "component", "memory", "engine", "layers", "monolithic", "write_stream"))
    values |= {"system": path, "example": trace, "solve": "by_.*", "least": least, "time_limit": None, "verify": None}
    configure.run(**values, fix=fix and tmp_path / "fix.json", output=tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_text())
    assert (document["registers"], document["layers"], document["least"]) == (registers, layers, True)
    assert capsys.readouterr().out == f"{path}: solved{''.join(f', {name} {word}' for name, word in layers.items())}\n"


@pytest.mark.parametrize(
    ("options", "fix", "message"),
    [
        (
            {"least": ["b.*d"]},
            None,
            "expected configuration words that match 'b.*d', found none; known: by_a, by_b, by_c",
        ),
        ({"least": ["("]}, None, "expected a regular expression, found '\\('"),
        ({"least": ["by_a", "by_a"]}, None, "expected an objective once, found 'by_a' twice"),
        ({}, {"registers": {"by_d": 1}}, "sum.btor2 has no configuration word 'by_d'; known: by_a, by_b, by_c"),
        ({}, {"registers": {"by_a": 16}}, "by_a: expected a word of 4 bits, found 16"),
        ({}, {"registers": {"by_a": True}}, "expected registers, each a whole number"),
        ({}, {}, "expected registers, each a whole number, found none"),
    ],
)
def test_objectives_and_fixed_words_that_the_design_lacks_are_refused(tmp_path, options, fix, message):
    path, trace = written(tmp_path / "sum.btor2", SUM), written(tmp_path / "e.csv", "sum\n9\n")
    if fix is not None:
        artifacts.write_json(tmp_path / "fix.json", design.KIND, design.VERSION, fix)
        options = {"fix": tmp_path / "fix.json"}
    with pytest.raises((ConfigError, ArtifactError), match=message):
        design.run(path, "by_.*", trace, tmp_path / "out.json", **options)
    assert not (tmp_path / "out.json").exists()
