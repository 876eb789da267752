"""Programs that were exported hold their plans: they run in processes that have none, from a file or compiled ahead."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright as tw
from tilewright import devices
from tilewright.attention import plan
from tilewright.attention.masks import Bias
from tilewright.core import _internals, operators
from tilewright.core.errors import ArtifactError, ConfigError, DeviceError, PatternError
from tilewright.nn import SparseAttention

GRID, DIM, HEADS = (6, 7), 32, 2


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "plans"))


class Block(nn.Module):
    """Of a vision transformer."""

    def __init__(self, bias):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = SparseAttention(DIM, HEADS, "window-3-g1", GRID, bias=bias)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        x = x + self.attn(self.norm1(x), ordered=True)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A small vision transformer: tokens enter plan order once."""

    def __init__(self, bias=False, depth=3):
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, DIM))
        self.pos = nn.Parameter(torch.randn(1, 1 + GRID[0] * GRID[1], DIM))
        self.blocks = nn.ModuleList(Block(bias and i == 1) for i in range(depth))
        self.head = nn.Linear(DIM, 5)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), 1) + self.pos
        entry = self.blocks[0].attn
        x = entry.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(entry.leave(x)[:, 0])


def network(**options):
    torch.manual_seed(0)
    made = Transformer(**options).eval().requires_grad_(False)
    images = torch.randn(2, 3, *(4 * side for side in GRID))
    return made, images, made(images)


# No plan, no module and no cache of plans: what the program holds, and the registered operator.
ALONE = """
import os, sys
import torch
import tilewright.attention.plan
from tilewright.core import operators

folder, how = sys.argv[1:]
images, expected = torch.load(f"{folder}/tensors.pt")
if how == "program":
    program = torch.export.load(f"{folder}/program.pt2").module()
else:
    program = torch._inductor.aoti_load_package(f"{folder}/package.pt2")
assert not len(operators._LIVE)
with torch.no_grad():
    for batch in (images, images.flip(0)):
        wanted = expected if batch is images else expected.flip(0)
        torch.testing.assert_close(program(batch), wanted, atol=1e-5, rtol=1e-5)
assert not os.path.exists(os.environ["TILEWRIGHT_CACHE"])
print(len(operators._CARRIED), "plans")
"""


def alone(folder, how, images, expected):
    """What `ALONE` prints in a process of its own."""
    torch.save((images, expected), folder / "tensors.pt")
    path = os.pathsep.join([str(Path(tw.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TILEWRIGHT_CACHE": str(folder / "none")}
    command = [sys.executable, "-c", ALONE, str(folder), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_program_holds_each_of_its_plans_once(bias):
    model, images, expected = network(bias=bias)
    program = torch.export.export(model, (images,))
    held = [x for x in program.constants.values() if x.dtype == torch.uint8]
    # The layers without a bias share one.
    assert len(held) == 1 + bias
    calls = [node for node in program.graph.nodes if node.target is torch.ops.tilewright.attend.default]
    # A bias is read from the program's own table.
    assert sorted(len(node.args) for node in calls) == [6, 6, 6 + bias]
    assert torch.equal(program.module()(images), expected)


def test_a_program_runs_in_a_process_without_its_plans(tmp_path):
    model, images, expected = network(bias=True)
    torch.export.save(torch.export.export(model, (images,)), tmp_path / "program.pt2")
    assert alone(tmp_path, "program", images, expected) == "2 plans"


def test_a_program_takes_batches_of_any_size():
    model, images, expected = network()
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    torch.testing.assert_close(program.module()(images[:1].repeat(5, 1, 1, 1)), expected[:1].repeat(5, 1))


@pytest.mark.slow
@pytest.mark.skipif(_internals.missing_compiler() is not None, reason="torch compiles for a CPU by a C++ compiler")
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_package_that_is_compiled_ahead_runs_in_a_process_without_its_plans(tmp_path, bias):
    model, images, expected = network(bias=bias)
    program = torch.export.export(model, (images,))
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    assert alone(tmp_path, "package", images, expected) == f"{1 + bias} plans"


@pytest.mark.slow
@pytest.mark.skipif(_internals.missing_compiler() is not None, reason="torch compiles for a CPU by a C++ compiler")
def test_a_package_of_timms_model_runs_in_a_process_without_its_plans(tmp_path):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    from tilewright.integrations.timm import sparsify

    torch.manual_seed(0)
    sizes = {"depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5, "img_size": (48, 64)}
    model = timm.create_model("vit_tiny_patch16_224", **sizes).eval().requires_grad_(False)
    dense = model(images := torch.randn(2, 3, 48, 64))
    sparsify(model, "window-3-g1")
    expected = model(images)
    assert not torch.allclose(dense, expected, atol=1e-4)
    program = torch.export.export(model, (images,))
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    assert alone(tmp_path, "package", images, expected) == "1 plans"


NO_ONNX = "ONNX has no operator for a plan: export with torch.exp"


def test_onnx_is_refused_with_what_to_do_instead(tmp_path):
    """The exporter that traces must not write down what one call of the executor happened to do."""
    model, images, expected = network()
    with pytest.warns(DeprecationWarning), pytest.raises(ConfigError, match=NO_ONNX):
        torch.onnx.export(model, (images,), tmp_path / "model.onnx", dynamo=False)
    assert not list(tmp_path.iterdir())
    # Afterwards all is as before.
    assert torch.equal(torch.export.export(model, (images,)).module()(images), expected)


def test_onnx_by_export_is_refused_with_what_to_do_instead(tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript, by which torch exports to ONNX, is not installed")
    model, images, _ = network()
    with pytest.raises(torch.onnx.OnnxExporterError, match=NO_ONNX):
        torch.onnx.export(model, (images,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    # Of a program that was exported before, the operator's name is all that torch can tell.
    program = torch.export.export(model, (images,))
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"No ONNX function found for .*tilewright\.attend"):
        torch.onnx.export(program, (), tmp_path / "model.onnx", dynamo=True, verbose=False)
    assert not list(tmp_path.iterdir())


def test_a_plan_of_another_device_is_named_as_the_programs(monkeypatch):
    made = tw.plan(torch.ones(3, 3, dtype=torch.bool), heads=1, head_dim=8, solver="greedy")
    digest, file = made.digest(), made._file()
    del made
    monkeypatch.setattr(devices, "describe", lambda kind: {"kind": "cpu", "name": "another processor"})
    with pytest.raises(DeviceError, match=r"^the plan that this program holds: .*another processor"):
        torch.ops.tilewright.attend(*3 * [torch.ones(1, 1, 3, 8)], digest, False, file)
    with pytest.raises(ArtifactError, match=r"^the plan that this program holds: expected a plan file"):
        torch.ops.tilewright.attend(*3 * [torch.ones(1, 1, 3, 8)], "0" * 32, False, file[:100])


def test_a_traced_module_calls_the_operator_and_holds_the_plan():
    model, images, _ = network()
    traced = torch.jit.trace(model, (images,))
    assert str(traced.inlined_graph).count("tilewright::attend") == 3
    assert torch.equal(traced(images.flip(0)), model(images.flip(0)))


def test_a_bias_has_to_be_known_before_the_export():
    torch.manual_seed(0)
    layer = SparseAttention(DIM, HEADS, "window-3-g1", GRID, bias=True).eval().requires_grad_(False)
    x = torch.randn(1, 43, DIM)
    # Of the plan without a bias, which others may have made.
    layer.attention.plan(GRID, x.dtype, x.device)
    with pytest.raises(PatternError, match="bias table: call the module once with tokens of this shape"):
        torch.export.export(layer, (x,))
    expected = layer(x)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), expected)


def test_a_program_is_compiled_again_where_its_plan_is_not(monkeypatch):
    model, images, expected = network()
    program = torch.export.export(model, (images,))
    for known in ("_LIVE", "_CALLED", "_CARRIED"):
        monkeypatch.setattr(operators, known, {} if known == "_CARRIED" else type(operators._LIVE)())
    with torch.no_grad():
        compiled = torch.compile(program.module(), backend="aot_eager")
        torch.testing.assert_close(compiled(images), expected)
    assert len(operators._CARRIED) == 1


def test_another_plan_than_the_programs_is_refused(tmp_path):
    plans = [tw.plan(torch.ones(n, n, dtype=torch.bool), heads=1, head_dim=8, solver="greedy") for n in (3, 4)]
    file = plans[0]._file()
    with pytest.raises(
        ArtifactError, match=rf"expected the digest {'0' * 32}, found {plans[0].digest()}; export again"
    ):
        torch.ops.tilewright.attend(*3 * [torch.ones(1, 1, 3, 8)], "0" * 32, False, file)
    assert torch.equal(file, plans[0]._file()) and not torch.equal(file, plans[1]._file())
    assert plan._from_program(file.numpy().tobytes()).digest() == plans[0].digest()


class Biased(nn.Module):
    """A plan that is given its bias in each call."""

    def __init__(self):
        super().__init__()
        seen = torch.ones(20, 20).tril()
        bias = Bias(torch.zeros(HEADS, 3), lambda rows, cols: (rows + cols) % 3)
        self.plan = tw.plan(seen, heads=HEADS, head_dim=8, solver="greedy", bias=bias)
        self.table = nn.Parameter(torch.randn(HEADS, 3))

    def forward(self, q):
        return self.plan(q, q, q, bias=self.table)


@pytest.mark.parametrize("recorded", [False, True], ids=["inference", "gradients"])
def test_a_bias_that_is_given_in_the_call_is_an_input_of_the_program(recorded):
    made, q = Biased(), torch.randn(1, HEADS, 20, 8)
    with torch.set_grad_enabled(recorded):
        program = torch.export.export(made, (q,)).module()
    with torch.no_grad():
        for x in (made.table, program.table):
            x.copy_(torch.arange(6.0).view(HEADS, 3))
        torch.testing.assert_close(program(q), made(q))
        written = made(q)
        program.table.mul_(-1)
        assert not torch.allclose(program(q), written, atol=1e-3)
