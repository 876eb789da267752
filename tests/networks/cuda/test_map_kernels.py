"""Kernels on maps, on a GPU or under the interpreter, against the operators of torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.gpu import TRITON_DEVICE
from tilewright import networks
from tilewright.core.errors import PatternError
from tilewright.networks import _kernels, backends, map_operators
from tilewright.networks.cuda import maps
from tilewright.networks.cuda.maps import Apart, Form, Tile

# The interpreter is wrong in bfloat16.
TYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (TRITON_DEVICE == "cuda")
SMALL = {"decode": Form(32, 32, 2), "dwconv_gelu": Form(8, 16, 2)}
# Rows in one piece, and in several; and libraries.
TILES = [Tile(16, 32, 64, 2), Tile(16, 16, 16, 2), Apart(4)]
# Operators of a block that have such forms.
OF_TILES = "patches", "norm_linear", "attention", "linear_add"
OF_APART = "norm", "patches", "norm_linear", "attention"
# Whether pixels gather what they read of smaller maps, or share it.
DECODE = [Form(16, 32, 2, rows=2), Form(8, 32, 2, rows=4, spread=True)]


@pytest.fixture(autouse=True, scope="module")
def whole_float32():
    """Torch lets cuDNN convolve float32 in TensorFloat-32 by default, with 10 bits of its 23."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def close(found, expected, dtype):
    """Sums of some hundred terms are made in float32, and rounded once in the middle and once at the end."""
    assert found.dtype == dtype
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= 4 * max(torch.finfo(dtype).eps, 1e-6)


def drawn(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(TRITON_DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_copy_holds_all_values_and_touches_nothing_else(dtype):
    copy = maps.copier(torch.device(TRITON_DEVICE, 0) if TRITON_DEVICE == "cuda" else torch.device(TRITON_DEVICE))
    for count in (1, maps.COPIED, maps.COPIED + 1, 3 * maps.COPIED - 7):
        x = drawn(count, dtype=torch.float32, seed=count).mul(100).to(dtype)
        held = torch.full((count + 2 * 16,), 77, dtype=dtype, device=x.device)
        for turn in range(3):
            copy(held[16:-16], x + turn)
            assert torch.equal(held[16:-16], x + turn) and (held[:16] == 77).all() and (held[-16:] == 77).all()


def decoder(batch, grids, widths, channels, classes, dtype, seed=0):
    """Arguments of `decode`: maps of the given grids, channels last in memory."""
    levels = [drawn(batch, *grid, n, dtype=dtype, seed=seed + n) for grid, n in zip(grids, widths, strict=True)]
    weights = [drawn(channels, n, dtype=dtype, seed=seed + n + 1) / n**0.5 for n in widths]
    predict = drawn(classes, channels, dtype=dtype, seed=seed + 5) / channels**0.5
    biases = (drawn(n, dtype=dtype, seed=seed + 6 + n) for n in (channels, classes))
    return [x.permute(0, 3, 1, 2) for x in levels], weights, next(biases), predict, next(biases)


def check_decode(grid, levels, weights, bias, predict, predict_bias, form):
    with torch.no_grad():
        found = maps.decode(levels, weights, bias, grid, predict, predict_bias, form)
        exact = [x.double() for x in (bias, predict, predict_bias)]
        expected = map_operators.decode(
            [x.double() for x in levels], [x.double() for x in weights], exact[0], grid, *exact[1:]
        )
    assert found.shape == expected.shape and found.stride(1) == 1
    close(found, expected, predict.dtype)


@pytest.mark.parametrize("form", DECODE, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("classes", [5, 16, 19, 40])
def test_a_decoder_of_four_levels(dtype, classes, form):
    grids = [(12, 9), (6, 5), (3, 3), (2, 2)]
    check_decode(grids[0], *decoder(2, grids, (32, 24, 40, 48), 32, classes, dtype), form)


@pytest.mark.parametrize("form", DECODE, ids=str)
@pytest.mark.parametrize("kept", [(0,), (1,), (3,), (0, 2), (1, 2, 3)], ids=str)
def test_a_decoder_of_some_levels(kept, form):
    grids, widths = [(9, 12), (5, 6), (3, 3), (2, 2)], (32, 24, 40, 48)
    given = decoder(1, [grids[i] for i in kept], [widths[i] for i in kept], 32, 5, torch.float32)
    check_decode(grids[0], *given, form)


@settings(max_examples=6, deadline=None)
@given(
    sides=st.tuples(*2 * [st.integers(1, 17)]),
    classes=st.integers(1, 40),
    batch=st.integers(1, 2),
    seed=st.integers(0, 9),
    form=st.sampled_from(DECODE),
)
def test_decoders_of_any_size(sides, classes, batch, seed, form):
    grids = [tuple(max(1, -(-side // step)) for side in sides) for step in (1, 2, 4, 8)]
    # Several levels of one grid are read so, too.
    check_decode(grids[0], *decoder(batch, grids, (16, 32, 8, 24), 64, classes, torch.float32, seed), form)


@settings(max_examples=6, deadline=None)
@given(
    grid=st.tuples(*2 * [st.integers(1, 11)]),
    channels=st.integers(1, 40),
    batch=st.integers(1, 2),
    dtype=st.sampled_from(TYPES),
    rows=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 9),
)
def test_a_convolution_of_any_size_with_its_gelu(grid, channels, batch, dtype, rows, seed):
    x = drawn(batch, grid[0] * grid[1], channels, dtype=dtype, seed=seed)
    weight, bias = (drawn(*shape, dtype=dtype, seed=seed + 1) / 3 for shape in ((channels, 1, 3, 3), (channels,)))
    with torch.no_grad():
        found = maps.dwconv_gelu(x, grid, weight, bias, SMALL["dwconv_gelu"]._replace(rows=rows))
        expected = map_operators.dwconv_gelu(x.double(), grid, weight.double(), bias.double())
    close(found, expected, dtype)


def block(batch, grid, heads, width, features, step, dtype, seed=0):
    """Arguments of the operators of a block by their names; keys are reduced by `step`, or those of all tokens."""
    channels, kept = heads * width, {"dtype": dtype, "seed": seed}
    tokens = batch, grid[0] * grid[1]
    # Means as large as what is around them.
    x, residual = drawn(*tokens, channels, **kept) + 1, drawn(*tokens, features, **kept)
    gain, offset = drawn(channels, **kept), drawn(channels, dtype=dtype, seed=seed + 1)
    weight, bias = drawn(features, channels, **kept) / channels**0.5, drawn(features, **kept)
    query, keys = (drawn(n * channels, channels, dtype=dtype, seed=seed + n) / channels**0.5 for n in (1, 2))
    conv = drawn(channels, channels, step, step, **kept) / (step * channels**0.5)
    reduced = (conv, offset, offset, gain, 1e-5) if step > 1 else (None, None, None, None, 0.0)
    norm = gain, offset, 1e-6
    return {
        "norm_linear": (x, *norm, weight, bias),
        "attention": (x, grid, heads, *norm, query, offset, *reduced, keys, gain.repeat(2)),
        "linear_add": (x, weight, bias, residual),
        "norm": (x, *norm),
        "patches": (
            x.unflatten(1, grid).permute(0, 3, 1, 2),
            drawn(features, channels, 3, 3, **kept) / (3 * channels**0.5),
            *(bias, 2, bias, drawn(features, dtype=dtype, seed=seed + 2), 1e-5),
        ),
        "dwconv_gelu": (x, grid, drawn(channels, 1, 3, 3, **kept) / 3, gain),
    }


def check_block(operator, arguments, form):
    """The result of an operator is that of torch in float64."""
    exact = [x.double() if isinstance(x, torch.Tensor) else x for x in arguments]
    with torch.no_grad():
        found, expected = getattr(maps, operator)(*arguments, form), getattr(map_operators, operator)(*exact)
    assert found.shape == expected.shape and found.is_contiguous()
    close(found, expected, arguments[0].dtype)


@settings(max_examples=30, deadline=None)
@given(
    chosen=st.sampled_from(
        [(name, form) for form in TILES for name in (OF_APART if isinstance(form, Apart) else OF_TILES)]
    ),
    sizes=st.tuples(st.integers(1, 2), st.tuples(*2 * [st.integers(4, 9)])),
    heads=st.integers(1, 3),
    width=st.integers(8, 20),
    # A norm of few features that differ little makes much of what rounding leaves.
    features=st.just(1) | st.integers(8, 50),
    step=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 9),
)
def test_layers_of_any_size(chosen, sizes, heads, width, features, step, dtype, seed):
    operator, form = chosen
    check_block(operator, block(*sizes, heads, width, features, step, dtype, seed)[operator], form)


@pytest.mark.parametrize("form", [Tile(16, 16, 32, 2, 2), Tile(32, 16, 16, 2)], ids=str)
@pytest.mark.parametrize("side, stride", [(7, 4), (3, 2)])
@pytest.mark.parametrize("channels, last", [(3, False), (3, True), (32, True), (48, True)])
def test_overlapping_patches_of_maps_in_any_layout(channels, last, side, stride, form, monkeypatch):
    kept = {"dtype": torch.float32, "seed": 0}
    layout = torch.channels_last if last else torch.contiguous_format
    x, others = drawn(2, channels, 13, 10, **kept).to(memory_format=layout), drawn(3, 24, **kept)
    weight = drawn(24, channels, side, side, **kept) / side
    for busy in (1, 100):
        monkeypatch.setattr(maps, "BUSY", busy)
        check_block("patches", (x, weight, others[0], stride, *others[1:], 1e-5), form)


def test_a_convolution_is_a_sum_of_parts(monkeypatch):
    """A busy GPU needs fewer."""
    arguments = block(1, (8, 8), 1, 16, 8, 4, torch.float32)["attention"]
    x, grid, _, *norm, eps = arguments[:6]
    for busy, parts in ((1, 1), (3, 4), (128, 16)):
        monkeypatch.setattr(maps, "BUSY", busy)
        check_block("attention", arguments, TILES[0])
        with torch.no_grad():
            assert len(maps._norm_patches(x, grid, norm, eps, arguments[8])) == parts


@pytest.mark.parametrize("operator", maps.FORMS)
def test_every_form_gives_the_same(operator):
    grids = [(10, 7), (5, 4), (3, 2), (2, 1)]
    given = decoder(1, grids, (32, 64, 160, 256), 128, 150, torch.float32)
    arguments = None if operator == "decode" else block(1, grids[0], 5, 32, 72, 2, torch.float32)[operator]
    for form in maps.FORMS[operator]:
        if operator == "decode":
            check_decode(grids[0], *given, form)
        else:
            check_block(operator, arguments, form)


@torch.inference_mode()
def test_a_network_runs_its_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(backends, "maps", lambda kind: maps)
    forms = {"decode": (Form(64, 64, 4),), "dwconv_gelu": (Form(8, 128, 2),)}
    linears = dict.fromkeys(OF_TILES, (Tile(16, 256, 256, 2),)) | {"norm": (Apart(4),)}
    monkeypatch.setattr(maps, "FORMS", forms | linears)
    # An interpreter takes its time for each program.
    monkeypatch.setattr(maps, "BUSY", 4)
    few = {} if TRITON_DEVICE == "cuda" else {"warmups": 1, "fewest": 1}
    monkeypatch.setattr(_kernels, "EFFORT", {"min_reps": 1, "max_seconds": 0.001, "rse_target": 1, **few})
    network = networks.create("segformer", variant="b0", image_size=32, num_classes=21).to(TRITON_DEVICE)
    images = drawn(1, 3, 32, 32, dtype=torch.float32, seed=0)
    path = network.path("1.1.1.1")
    expected = network(images, path)
    rows = networks.choose_kernels(network, images, [path])
    assert {row["status"] for row in rows} == {"ok"} and all(row["us"] > 0 for row in rows)
    # Whatever is faster here: the kernels.
    for key in network.operators.chosen:
        (network.operators.chosen[key],) = map_operators.forms(key[0], images.device)
    torch.testing.assert_close(network(images, path), expected, atol=1e-5, rtol=1e-4)
    # Dynamo leaves them alone.
    torch.compiler.reset()
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images, path), expected, atol=1e-5, rtol=1e-4)


def test_what_a_kernel_does_not_take_is_named():
    grids = [(8, 8), (4, 4)]
    levels, weights, bias, predict, more = decoder(1, grids, (32, 32), 40, 5, torch.float32)
    with pytest.raises(PatternError, match="channels in multiples of 32, found 40"):
        maps.decode(levels, weights, bias, grids[0], predict, more, SMALL["decode"])
    with pytest.raises(PatternError, match=r"one type, torch.float32, found torch.float16"):
        maps.decode(levels, weights, bias.half(), grids[0], predict, more, SMALL["decode"])
    with pytest.raises(PatternError, match="no backward"):
        maps.decode(levels, weights, bias.requires_grad_(), grids[0], predict, more, SMALL["decode"])
    many = decoder(1, [(4, 4)] * 4, (32,) * 4, 32, 5, torch.float32)
    x, grid, _, *others = block(1, (4, 4), 2, 8, 8, 2, torch.float32)["attention"]
    with pytest.raises(PatternError, match="channels in multiples of 3 heads, found 16"):
        maps.attention(x, grid, 3, *others, TILES[0])
    with pytest.raises(PatternError, match="at most 3 levels on other grids, found 4"):
        maps.decode(*many[:3], grids[0], *many[3:], SMALL["decode"])
    x = torch.zeros(1, 15, 32, device=TRITON_DEVICE)
    with pytest.raises(PatternError, match=r"expected 4 x 4 tokens and a 3 x 3 each channel, found \[1, 15, 32\]"):
        maps.dwconv_gelu(x, (4, 4), x.new_zeros(32, 1, 3, 3), x.new_zeros(32), SMALL["dwconv_gelu"])
