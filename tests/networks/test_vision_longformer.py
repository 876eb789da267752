"""Vision Longformer: windows and full stages against slow loops, published counts and names, files, sizes, errors."""

import math
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tilewright import networks as networks_of
from tilewright.core.errors import ArtifactError, ConfigError, PatternError
from tilewright.masks import vision_longformer as graphs
from tilewright.networks import _sliding_chunks, attention_sites
from tilewright.networks import vision_longformer as networks
from tilewright.networks._sliding_chunks import Windows

# Two sparse stages of other windows, globals and strides, one of which needs padding, and a full one; 60 pixels.
STAGES = [
    {"heads": 1, "dim": 16, "blocks": 2, "n_global": 2, "patch": 4, "radius": 2},
    {"heads": 2, "dim": 32, "blocks": 1, "n_global": 1, "patch": 2, "radius": 3},
    {"heads": 2, "dim": 32, "blocks": 1, "sparse": False, "n_global": 1, "patch": 2},
    {"heads": 2, "dim": 32, "blocks": 1, "sparse": False, "n_global": 0, "patch": 1},
]
SIZE = 60
# Sparse stages of 23 x 14 and 11 x 7 tokens, and of 15 x 23 and 7 x 11. Beyond whole chunks of 2 stand 1 and 0, and 1
# and 1 of them; beyond those of 3, 2 and 1, and 1 and 2.
NO_SQUARES = [(92, 56), (60, 92)]
MODES = ("chunk", "exact", "cyclic")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))


def create(**options):
    return networks_of.create(
        "vision_longformer", **{"variant": "tiny", "image_size": SIZE, "stages": STAGES, **options}
    )


def changed(at, **fields):
    """`STAGES` with other fields of one."""
    return [stage | fields if place == at else stage for place, stage in enumerate(STAGES)]


def draw(network, seed=0):
    """All weights random, of a scale that makes logits differ by about one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            scale = 1 / math.sqrt(weight[0].numel()) if weight.ndim > 1 and "pos" not in name else 0.5
            weight.copy_(scale * torch.randn(weight.shape, generator=generator) + ("norm" in name))
    return network


def images(size=SIZE, batch=2):
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(7))


# ----------------------------------------------------------------------------------------------- windows


def published(q, k, v, windows, tables=None):
    """Attention of one image and head by the published definition, query by query: q, k, v [g + m n, D] in float64.

    The grid is padded with zeros to whole chunks. In cyclic mode a zero is left out only where the last chunk is
    reached directly. tables: local [(4f-1)^2], local to global [g], global to local [g], global to global [g, g].
    """
    (rows, columns), g, f = windows.grid, windows.n_global, windows.radius
    tall, wide = (-(-side // f) * f for side in windows.grid)
    own, to_global, from_global, between = tables or (None, torch.zeros(g), torch.zeros(g), torch.zeros(g, g))
    out = torch.empty_like(q)
    scores = q @ k.T / math.sqrt(q.shape[1])
    for i in range(g):
        bias = torch.cat([between[i], from_global[i].expand(rows * columns)])
        out[i] = torch.softmax(scores[i] + bias, 0) @ v
    zero = torch.zeros(q.shape[1], dtype=q.dtype)
    for y in range(rows):
        for x in range(columns):
            at = g + y * columns + x
            seen = [(scores[at, i] + to_global[i], v[i]) for i in range(g)]
            for b in range((y // f - 1) * f, (y // f + 2) * f):
                for a in range((x // f - 1) * f, (x // f + 2) * f):
                    if windows.mode == "cyclic":
                        visible = not (rows <= b < tall or columns <= a < wide)
                        ky, kx = b % tall, a % wide
                    else:
                        visible = 0 <= b < rows and 0 <= a < columns
                        visible &= windows.mode == "chunk" or max(abs(y - b), abs(x - a)) <= f
                        ky, kx = b, a
                    if visible:
                        real = ky < rows and kx < columns
                        score = scores[at, g + ky * columns + kx] if real else torch.tensor(0.0)
                        bias = 0 if own is None else own[(y - b + 2 * f - 1) * (4 * f - 1) + x - a + 2 * f - 1]
                        seen.append((score + bias, v[g + ky * columns + kx] if real else zero))
            weights = torch.softmax(torch.stack([score for score, _ in seen]), 0)
            out[at] = weights @ torch.stack([value for _, value in seen])
    return out


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
@pytest.mark.parametrize("attention", ["dense", "native"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("grid", "n_global", "radius"),
    [
        ((6, 6), 1, 2),
        ((7, 7), 2, 3),
        ((5, 9), 1, 2),
        ((11, 7), 2, 3),
        ((6, 8), 0, 2),
    ],
    ids=str,
)
def test_windows_follow_the_published_definition(grid, n_global, radius, mode, attention, relative):
    windows, g = Windows(grid, n_global, radius, mode), n_global
    generator = torch.Generator().manual_seed(grid[0])
    q, k, v = (torch.randn(g + math.prod(grid), 8, generator=generator, dtype=torch.float64) for _ in range(3))
    sizes = ((4 * radius - 1) ** 2, g, g, g * g)
    tables = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    bias = torch.cat([*tables, torch.zeros(1)])[None].double() if relative else None
    at = attention_sites.Site(attention, windows.graph, 1, 8, windows.attend, windows.bias_index)
    padded = (windows.pad(x[None])[None] for x in (q, k, v))
    out = windows.unpad(at.layer()(*padded, bias)[0])[0]
    wanted = published(q, k, v, windows, (*tables[:3], tables[3].view(g, g)) if relative else None)
    torch.testing.assert_close(out, wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize("mode", ["chunk", "cyclic"])
def test_a_sparse_layer_follows_the_published_definition(mode):
    side, g, heads, f = 5, 2, 2, 2
    shape = networks.Shape(heads, 16, 1, 4, True, g, f, 1, False, (side, side))
    windows = Windows((side, side), g, f, mode)
    at = attention_sites.Site("dense", windows.graph, heads, 8, windows.attend, windows.bias_index)
    layer = draw(networks.SparseAttention(shape, windows, at)).double()
    x = torch.randn(1, g + side * side, 16, dtype=torch.float64)
    q, k, v = layer.query(x)[0], layer.kv(x)[0, :, :16], layer.kv(x)[0, :, 16:]
    outs = []
    for head in range(heads):
        mine = slice(8 * head, 8 * head + 8)
        from_global, to_global = layer.g2l_relative_position_bias[:, head]
        own, between = layer.local_relative_position_bias_table[:, head], layer.g2g_relative_position_bias[head]
        tables = own, to_global, from_global[:, None], between
        outs.append(published(q[:, mine], k[:, mine], v[:, mine], windows, tables))
    torch.testing.assert_close(windows.unpad(layer(windows.pad(x)))[0], layer.proj(torch.cat(outs, 1)))


def test_sliding_chunks_run_some_rows_at_a_time(monkeypatch):
    windows = Windows((8, 8), 1, 3, "exact")
    q, k, v = torch.randn(3, 2, 2, 65, 8)
    bias = torch.randn(2, 11 * 11 + 4)
    whole = windows.attend(q, k, v, bias)
    monkeypatch.setattr(_sliding_chunks, "SCORES", 1)
    torch.testing.assert_close(windows.attend(q, k, v, bias), whole)


@pytest.mark.parametrize("mode", MODES)
def test_bias_indices_and_patterns_are_those_of_the_graphs(mode):
    for stage, side in ((1, 14), (2, 9)):
        params = graphs.Params("tiny", side << (stage - 1), stage, patch=1, mode=mode, window=7)
        windows = Windows((side, side), 1, 3, mode)
        at = np.arange(1 + side * side)
        wanted = graphs.bias_index_at(np.where, (side, side), 1, 6, 3 if mode == "cyclic" else None, at[:, None], at)
        at = torch.arange(len(at))
        if windows.padded:
            # The zeros are further tokens, so that only what the real ones see of each other can be compared.
            real = windows.real(torch.zeros(1)).flatten().nonzero().flatten()
            assert windows.graph().n_rows == 1 + math.prod(windows.whole)
            np.testing.assert_array_equal(
                windows.graph().to_dense()[np.ix_(real, real)], graphs.graph(params).to_dense()
            )
            at = real
        else:
            assert windows.graph().id == graphs.graph(params).id
        indices = windows.bias_index(at[:, None], at).numpy()
        allowed = graphs.graph(params).to_dense()
        np.testing.assert_array_equal(indices[allowed], wanted[allowed])
        assert indices.max() < graphs.graph(params).meta["bias"]["slots"]


@pytest.mark.parametrize("variant", graphs.STAGES)
def test_the_sparse_stages_of_a_variant_are_its_graphs(variant):
    with torch.device("meta"):
        network = networks.Network(networks.Options(variant, 128), "dense")
    assert [stage.site is not None for stage in network.stages] == [True, True, False, False]
    for number, stage in enumerate(network.stages, 1):
        graph = graphs.graph(graphs.Params(variant, 128, number))
        assert (stage.shape.heads, stage.shape.dim // stage.shape.heads) == (
            graph.meta["heads"],
            graph.meta["head_dim"],
        )
        assert graph.meta["grid"] == list(stage.shape.grid)
        assert graph.meta["n_global"] == stage.shape.n_global
        if stage.site is not None:
            assert stage.site.graph.id == graph.id


# ------------------------------------------------------------------------------------------- full stages


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (5, 2)], ids=str)
@pytest.mark.parametrize("n_global", [0, 2])
def test_full_stages_add_the_published_bias(n_global, grid, monkeypatch):
    (m, n), g, heads = grid, n_global, 2
    shape = networks.Shape(heads, 16, 1, 2, False, g, 7, 3, False, grid)
    attention = draw(networks.FullAttention(shape)).double()
    x = torch.randn(2, g + m * n, 16, dtype=torch.float64)
    q, k, v = (part.view(2, -1, heads, 8).transpose(1, 2) for part in attention.qkv(x).split(16, 2))
    bias = torch.zeros(heads, g + m * n, g + m * n, dtype=torch.float64)
    for i in range(g + m * n):
        for j in range(g + m * n):
            (y, x_), (b, a) = divmod(i - g, n), divmod(j - g, n)
            if i < g:
                bias[:, i, j] = (
                    attention.g2g_relative_position_bias[:, i, j]
                    if j < g
                    else attention.g2l_relative_position_bias[0, :, i]
                )
            elif j < g:
                bias[:, i, j] = attention.g2l_relative_position_bias[1, :, j]
            else:
                offset = (y - b + m - 1) * (2 * n - 1) + x_ - a + n - 1
                bias[:, i, j] = attention.local_relative_position_bias_table[offset]
    weights = torch.softmax(q @ k.mT / math.sqrt(8) + bias, -1)
    wanted = attention.proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), wanted)
    monkeypatch.setattr(networks, "BIAS_BYTES", 1)
    torch.testing.assert_close(attention(x), wanted)


# ------------------------------------------------------------------------------------- the network, any mode


@pytest.mark.parametrize(
    ("mode", "position"), [("chunk", "absolute"), ("chunk", "relative"), ("exact", "relative"), ("cyclic", "relative")]
)
def test_every_attention_gives_the_same_logits(mode, position):
    logits = {}
    for attention in ("dense", "native", "tilewright"):
        network = draw(create(window_mode=mode, position=position, attention=attention))
        logits[attention] = network(images()).detach()
    assert logits["dense"].shape == (2, 1000)
    assert logits["dense"].std() > 0.3
    torch.testing.assert_close(logits["native"], logits["dense"], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits["tilewright"], logits["dense"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [pytest.param(NO_SQUARES[0], marks=pytest.mark.slow), NO_SQUARES[1]], ids=str)
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_every_attention_gives_the_same_logits_of_images_that_are_no_squares(mode, size):
    made = partial(create, image_size=size, window_mode=mode, position="relative")
    logits = {each: draw(made(attention=each))(images(size)) for each in ("dense", "native", "tilewright")}
    assert logits["dense"].std() > 0.3
    torch.testing.assert_close(logits["native"], logits["dense"], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits["tilewright"], logits["dense"], atol=1e-4, rtol=0)


@torch.no_grad()
def test_flex_gives_the_same_logits_of_images_that_are_no_squares(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    made = partial(create, image_size=NO_SQUARES[0], window_mode="cyclic", position="relative")
    dense, flex = (draw(made(attention=each))(images(NO_SQUARES[0])) for each in ("dense", "flex"))
    torch.testing.assert_close(flex, dense, atol=1e-4, rtol=0)


def transposed(network):
    """The state of the network that sees transposed images as this one sees them as they are.

    Half of a position's channels are of its row and half of its column, so that with the tables the halves of all
    channels between the layers change places.
    """
    state, other = network.state_dict(), {}
    for name, weight in state.items():
        if name.endswith(".0.proj.weight"):
            weight = swapped(weight, 0).mT if name.startswith("layer1.") else swapped(swapped(weight, 0), 1).mT
        elif name.endswith((".x_pos_embed", ".y_pos_embed")):
            axis = "y" if ".x_pos" in name else "x"
            weight = state[name.replace(name[-11:], f"{axis}_pos_embed")]
        elif name.endswith("bias_table"):
            offsets = network.get_submodule(name.rpartition(".")[0]).offsets
            weight = weight.unflatten(0, offsets).transpose(0, 1).flatten(0, 1)
        elif "norm" in name or "cls_" in name or name.endswith(".0.proj.bias"):
            weight = swapped(weight, -1)
        elif name.endswith((".query.weight", ".kv.weight", ".qkv.weight", ".fc1.weight", "head.weight")):
            weight = swapped(weight, 1)
        elif ".attn.proj." in name or ".fc2." in name:
            weight = swapped(weight, 0)
        other[name] = weight
    return other


def swapped(weight, axis):
    return weight.roll(weight.shape[axis] // 2, axis)


@pytest.mark.parametrize("position", ["absolute", "relative"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["dense", "native"])
@torch.no_grad()
def test_a_transposed_network_sees_transposed_images(attention, mode, position):
    made = partial(create, window_mode=mode, position=position, attention=attention)
    for height, width in NO_SQUARES:
        network, other = draw(made(image_size=(height, width))), made(image_size=(width, height))
        other.load_state_dict(transposed(network))
        batch = images((height, width))
        found = other(batch.mT.contiguous())
        torch.testing.assert_close(found, network(batch), atol=1e-4, rtol=0)
        assert (network(batch.flip(2)) - found).abs().max() > 1e-2


@torch.no_grad()
def test_traced_networks_compute_the_same():
    network = draw(create(attention="dense"))
    expected = network(images().flip(0))
    traced = torch.jit.trace(network, (images(),))
    assert torch.equal(traced(images().flip(0)), expected)
    # The exporter of traces to ONNX knows no `mT`.
    assert "aten::mT" not in str(traced.inlined_graph)


def test_positions_down_and_across_have_the_published_shapes():
    state = create(image_size=(92, 56)).state_dict()
    shapes = [tuple(state[f"layer{stage}.0.{axis}_pos_embed"].shape) for stage in (1, 2, 3) for axis in "xy"]
    assert shapes == [(1, 23, 8), (1, 14, 8), (1, 11, 16), (1, 7, 16), (1, 5, 16), (1, 3, 16)]
    state = create(image_size=(92, 56), position="relative").state_dict()
    table = "1.attn.local_relative_position_bias_table"
    assert [len(state[f"layer{stage}.{table}"]) for stage in (1, 2, 3, 4)] == [7 * 7, 11 * 11, 9 * 5, 9 * 5]


def test_equal_sides_are_a_square():
    one, pair = create(), create(image_size=(60, 60))
    assert networks.name(pair.options) == networks.name(one.options)
    for key, weight in one.state_dict().items():
        assert torch.equal(weight, pair.state_dict()[key])
    assert [stage.site.graph.id for stage in pair.stages[:2]] == [stage.site.graph.id for stage in one.stages[:2]]
    assert torch.equal(pair(images()), one(images()))


def test_window_modes_and_positions_differ():
    logits = [draw(create(window_mode=mode))(images()).detach() for mode in MODES]
    logits += [draw(create(position="relative"))(images()).detach()]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert (one - other).abs().max() > 1e-3


def test_a_network_with_globals_at_its_end_reads_the_first():
    small = {"heads": 1, "dim": 8, "blocks": 1, "patch": 2}
    stages = [small | {"patch": 4}, small | {"sparse": False}, small | {"sparse": False, "n_global": 2}]
    network = create(stages=stages, num_classes=5)
    tokens = {}
    network.norm.register_forward_hook(lambda module, taken, out: tokens.update(out=out))
    out = network(images())
    assert torch.equal(out, network.head(tokens["out"][:, 0]))


def test_weights_are_drawn_from_the_seed():
    first, again, other = (create(seed=seed).state_dict() for seed in (1, 1, 2))
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        if weight.numel() and not name.endswith("bias") and "norm" not in name:
            assert not torch.equal(weight, other[name])


def test_names_of_networks():
    name = networks.name
    assert name(networks.Options("tiny")) == "vil-tiny-224"
    assert name(networks.Options("base-wide", 384, "relative", "cyclic")) == "vil-base-wide-384-relative-cyclic"
    assert name(networks.Options("tiny", 60, "absolute", stages=networks.published("small"))).startswith("vil-tiny-60-")
    for size, stated in ((224, "224"), ((224, 224), "224"), ((224, 160), "224x160")):
        options = networks.Options("small", size, "relative", "exact")
        assert name(options) == f"vil-small-{stated}-relative-exact"
        family, read = networks_of.parse(name(options))
        assert (family, networks.Options(**read).pixels) == ("vision_longformer", options.pixels)
    assert networks_of.parse("vil-tiny-224x160")[1] == {"variant": "tiny", "image_size": (224, 160)}


# ------------------------------------------------------------------------------------------- published counts


@pytest.mark.parametrize(
    ("variant", "millions"),
    [
        ("tiny", 6.71),
        ("small", 24.64),
        ("medium-deep", 39.72),
        ("medium-wide", 39.78),
        ("base-deep", 55.70),
        ("base-wide", 79.00),
    ],
)
def test_published_parameter_counts(variant, millions):
    with torch.device("meta"):
        network = networks.Network(networks.Options(variant), "dense")
    assert round(sum(weight.numel() for weight in network.parameters()) / 1e6, 2) == millions


@pytest.mark.parametrize(("position", "millions"), [("absolute", 6.754), ("relative", 6.766)])
def test_counts_of_the_public_code_with_the_projections_of_globals_apart(position, millions):
    with torch.device("meta"):
        network = networks.Network(networks.Options("tiny", position=position), "dense")
    aliased = [module for module in network.modules() if isinstance(module, networks.SparseAttention)]
    again = [weight for a in aliased for own in (a.query, a.kv, a.proj) for weight in own.parameters()]
    assert round(sum(weight.numel() for weight in (*network.parameters(), *again)) / 1e6, 3) == millions


def published_names(position):
    """Names and shapes of `STAGES` at 60 pixels in the public code's state dict, without aliases and buffers."""
    named = {}

    def linear(name, rows, cols):
        named.update({f"{name}.weight": (rows, cols), f"{name}.bias": (rows,)})

    channels = 3
    stages = ((1, 16, 2, True, 2, 4, 2, 15), (2, 32, 1, True, 1, 2, 3, 7), (2, 32, 1, False, 1, 2, 7, 3))
    stages += ((2, 32, 1, False, 0, 1, 7, 3),)
    for s, (heads, d, blocks, sparse, g, p, f, n) in enumerate(stages, 1):
        first = f"layer{s}.0."
        named |= {f"{first}proj.weight": (d, channels, p, p), f"{first}proj.bias": (d,)}
        named |= {f"{first}norm_embed.weight": (d,), f"{first}norm_embed.bias": (d,)}
        named |= {f"{first}cls_token": (1, g, d)} if g else {}
        if position == "absolute":
            named |= {f"{first}cls_pos_embed": (1, g, d)}
            named |= {f"{first}{axis}_pos_embed": (1, n, d // 2) for axis in "xy"}
        for i in range(blocks):
            one, two = f"layer{s}.{2 * i + 1}.", f"layer{s}.{2 * i + 2}."
            named |= {f"{at}norm.{what}": (d,) for at in (one, two) for what in ("weight", "bias")}
            projections = {"query": d, "kv": 2 * d, "proj": d} if sparse else {"qkv": 3 * d, "proj": d}
            for name, rows in projections.items():
                linear(f"{one}attn.{name}", rows, d)
            linear(f"{two}mlp.fc1", 4 * d, d)
            linear(f"{two}mlp.fc2", d, 4 * d)
            if position == "relative":
                side = 4 * f - 1 if sparse else 2 * n - 1
                named[f"{one}attn.local_relative_position_bias_table"] = (side * side, heads)
                if g:
                    named[f"{one}attn.g2l_relative_position_bias"] = (2, heads, g)
                    named[f"{one}attn.g2g_relative_position_bias"] = (heads, g, g)
        channels = d
    named |= {"norm.weight": (d,), "norm.bias": (d,)}
    linear("head", 1000, d)
    return named


@pytest.mark.parametrize("position", ["absolute", "relative"])
def test_weights_have_the_published_names_and_shapes(position):
    state = create(position=position).state_dict()
    assert {name: tuple(weight.shape) for name, weight in state.items()} == published_names(position)


# ------------------------------------------------------------------------------------------------- files


def published_file(network, path, **more):
    """Write weights as the public code does: wrapped, prefixed, with aliases and index buffers."""
    state = dict(network.state_dict())
    for name in list(state):
        for own in ("query", "kv", "proj"):
            if f".attn.{own}." in name and name.replace(f".{own}.", ".query.") in state:
                state[name.replace(f".{own}.", f".{own}_global.")] = state[name]
        if name.endswith("bias_table"):
            state[name.replace("local_relative_position_bias_table", "relative_position_index")] = torch.zeros(
                4, 36
            ).long()
    state |= more
    wrapped = {f"module.{name}": weight for name, weight in state.items()}
    torch.save({"net": wrapped, "arch": "msvit", "epoch": 300, "best_acc": 76.3, "optimizer": {"state": {}}}, path)
    return path


@pytest.mark.parametrize("position", ["absolute", "relative"])
def test_a_published_file_loads(tmp_path, position):
    network = draw(create(position=position))
    path = published_file(network, tmp_path / "model_best.pth")
    assert any("kv_global" in name for name in torch.load(path, weights_only=True)["net"])
    loaded = create(position=position, checkpoint=path)
    assert torch.equal(loaded(images()), network(images()))


def test_global_projections_of_their_own_are_refused(tmp_path):
    alias = "layer1.1.attn.kv_global.weight"
    path = published_file(draw(create()), tmp_path / "c.pth", **{alias: torch.ones(32, 16)})
    with pytest.raises(ArtifactError, match=rf"not a checkpoint of this network: 1 unexpected: {alias}"):
        create(checkpoint=path)


def test_a_file_of_the_other_position_is_refused(tmp_path):
    path = published_file(draw(create(position="relative")), tmp_path / "c.pth")
    with pytest.raises(ArtifactError, match=r"missing: layer1.0.cls_pos_embed, .*unexpected: .*relative_position_bias"):
        create(checkpoint=path)


def test_tables_of_no_square_are_refused(tmp_path):
    table = "layer1.1.attn.local_relative_position_bias_table"
    path = published_file(draw(create(position="relative")), tmp_path / "c.pth", **{table: torch.ones(50, 1)})
    with pytest.raises(ArtifactError, match="not a checkpoint of this network"):
        create(position="relative", checkpoint=path)


def resample(old, new):
    """[new, old]: linear interpolation between the centres of `old` cells at those of `new` ones."""
    at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return torch.tensor(np.stack([np.interp(at, np.arange(old), row) for row in np.eye(old)], 1), dtype=torch.float32)


@pytest.mark.parametrize("size", [84, 40])
def test_positions_are_resized_to_other_images(tmp_path, size):
    path = tmp_path / "c.pth"
    small = draw(create())
    resized = create(image_size=size, checkpoint=published_file(small, path))
    old, new = small.state_dict(), resized.state_dict()
    for name in ("layer1.0.x_pos_embed", "layer2.0.y_pos_embed"):
        kernel = resample(old[name].shape[1], new[name].shape[1])
        torch.testing.assert_close(new[name][0], kernel @ old[name][0])
    small = draw(create(position="relative"))
    resized = create(image_size=size, position="relative", checkpoint=published_file(small, path))
    name = "layer3.1.attn.local_relative_position_bias_table"
    old, new = small.state_dict(), resized.state_dict()
    assert torch.equal(old["layer1.1.attn.local_relative_position_bias_table"], new[name.replace("r3", "r1")])
    a, b = math.isqrt(len(old[name])), math.isqrt(len(new[name]))
    grid = torch.einsum("ya,xb,abh->yxh", resample(a, b), resample(a, b), old[name].view(a, a, -1))
    torch.testing.assert_close(new[name], grid.flatten(0, 1))
    assert resized(images(size)).shape == (2, 1000)


# In the second, a full stage of 5 x 13 tokens has as many offsets as one of 8 x 8.
@pytest.mark.parametrize(("square", "size"), [(60, (92, 56)), (128, (80, 208))], ids=str)
def test_positions_of_squares_are_resized_to_images_that_are_none(tmp_path, square, size):
    path = tmp_path / "c.pth"
    small = draw(create(image_size=square))
    state = create(image_size=size, checkpoint=published_file(small, path)).state_dict()
    for name, old in small.state_dict().items():
        new = state[name]
        if name.endswith("pos_embed") and "cls" not in name:
            side = size[name.endswith("y_pos_embed")] // {"1": 4, "2": 8}.get(name[5], 16)
            torch.testing.assert_close(new, F.interpolate(old.mT, side, mode="linear").mT)
        else:
            assert torch.equal(new, old)
    small = draw(create(image_size=square, position="relative"))
    state = create(image_size=size, position="relative", checkpoint=published_file(small, path)).state_dict()
    n, offsets = 2 * (square // 16) - 1, tuple(2 * (side // 16) - 1 for side in size)
    for name, old in small.state_dict().items():
        new = state[name]
        if name.endswith("bias_table") and name.startswith(("layer3", "layer4")):
            table = F.interpolate(old.mT.unflatten(1, (n, n))[None], offsets, mode="bilinear")[0]
            torch.testing.assert_close(new, table.flatten(1).mT)
            kernels = [resample(n, side) for side in offsets]
            grid = torch.einsum("ya,xb,abh->yxh", *kernels, old.view(n, n, -1))
            torch.testing.assert_close(new, grid.flatten(0, 1))
        else:
            assert torch.equal(new, old)


@pytest.mark.parametrize("position", ["absolute", "relative"])
def test_weights_of_images_that_are_no_squares_load_again(tmp_path, position):
    network = draw(create(image_size=(92, 56), position=position))
    path = published_file(network, tmp_path / "c.pth")
    again = create(image_size=(92, 56), position=position, checkpoint=path)
    assert torch.equal(again(images((92, 56))), network(images((92, 56))))


def test_relative_positions_of_no_square_fit_no_other_images(tmp_path):
    path = published_file(draw(create(image_size=(92, 56), position="relative")), tmp_path / "c.pth")
    for size in (60, (56, 120)):
        with pytest.raises(ArtifactError, match="not a checkpoint of this network"):
            create(image_size=size, position="relative", checkpoint=path)


def test_a_table_of_another_window_is_resized(tmp_path):
    small = draw(create(position="relative"))
    wider = changed(0, radius=3)
    resized = create(position="relative", stages=wider, checkpoint=published_file(small, tmp_path / "c.pth"))
    name = "layer1.3.attn.local_relative_position_bias_table"
    grid = torch.einsum("ya,xb,abh->yxh", resample(7, 11), resample(7, 11), small.state_dict()[name].view(7, 7, -1))
    torch.testing.assert_close(resized.state_dict()[name], grid.flatten(0, 1))


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("shape", [(1, 3, 61, 60), (1, 4, 60, 60), (0, 3, 60, 60), (3, 60, 60)], ids=str)
def test_other_images_are_refused(shape):
    with pytest.raises(PatternError, match=r"expected a tensor \[B, 3, 60, 60\] with B at least 1, found"):
        create()(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(56, 92), (92, 92), (92, 60)], ids=str)
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(PatternError, match=r"expected a tensor \[B, 3, 92, 56\] with B at least 1, found"):
        create(image_size=(92, 56))(images(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"variant": "huge"},
            "vision_longformer: variant: expected one of tiny, .*, found 'huge'; options: variant, image_size",
        ),
        ({"position": "both"}, "position: expected one of .*, found 'both'"),
        ({"window_mode": "zero"}, "window_mode: expected one of .*, found 'zero'"),
        ({"num_classes": 0}, ">= 1"),
        ({"keep_ratio": 0.5}, "unknown field `keep_ratio`"),
        ({"stages": []}, "stages: expected at least one, found none"),
        ({"stages": changed(0, blocks=0)}, "blocks: expected int >= 1"),
        ({"stages": changed(0, width=3)}, "unknown field `width` - at .*stages.0"),
        ({"stages": [{"heads": 1}]}, "missing required field `dim` - at .*stages.0"),
        ({"stages": changed(1, heads=3)}, "stage 2: expected heads that divide the width 32, found 3"),
        ({"stages": changed(0, dim=15)}, "stage 1: expected an even width with absolute position, found 15"),
        ({"image_size": 3}, "image_size 3 leaves no token at stage 1"),
        ({"image_size": -5}, "image_size -5 leaves no token at stage 1"),
        ({"image_size": (60, 12)}, "image_size 60x12 leaves no token at stage 3"),
        ({"image_size": (7, 60)}, "image_size 7x60 leaves no token at stage 2"),
        ({"image_size": (60, 60, 60)}, "image_size: expected array of length 2"),
        (
            {"image_size": (60, 40), "window_mode": "cyclic"},
            "at least 3 chunks of 3 a side, found 5 tokens at stage 2 of images of 60x40 pixels",
        ),
        (
            {"image_size": (40, 60), "window_mode": "cyclic"},
            "at least 3 chunks of 3 a side, found 5 tokens at stage 2 of images of 40x60 pixels",
        ),
        ({"image_size": 40, "window_mode": "cyclic"}, "at least 3 chunks of 3 a side, found 5 tokens at stage 2"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        create(**options)


def test_stages_have_one_position_and_those_behind_a_full_one_are_full():
    shapes = networks.Options("tiny", position="relative").shapes()
    assert not any(shape.absolute for shape in shapes) and shapes[-1].grid == (7, 7)
    small = {"heads": 1, "dim": 8, "blocks": 1, "patch": 2}
    stages = msgspec.convert([small, small | {"sparse": False}, small], tuple[networks.Shape, ...])
    shapes = networks.Options("tiny", stages=stages).shapes()
    assert [shape.sparse for shape in shapes] == [True, False, False]
    assert [(shape.n_global, shape.radius) for shape in shapes] == [(1, 7)] * 3
