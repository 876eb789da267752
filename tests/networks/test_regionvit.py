"""RegionViT as a network: against its definition, in every mode of attention, and with the official files."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tilewright import networks
from tilewright.core import sides
from tilewright.core.errors import ArtifactError, ConfigError, PatternError
from tilewright.graph import from_pattern
from tilewright.masks import regionvit as pattern
from tilewright.networks import regionvit
from tilewright.networks._region_windows import Windows
from tilewright.torch_attention import flex


@pytest.fixture
def little(monkeypatch):
    """Networks of every variant with one head and few blocks, which differ in nothing else."""
    for variant, (_, stem) in regionvit.SIZES.items():
        monkeypatch.setitem(regionvit.SIZES, variant, ((2, 1, 1, 1), stem))
        monkeypatch.setitem(pattern.HEADS, variant, 1)


def drawn(variant="tiny", attention="dense", **options):
    """A network whose every weight, tables and norms included, has a say in the logits."""
    network = networks.create("regionvit", variant=variant, attention=attention, num_classes=10, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, x in network.named_parameters():
            drawn = torch.randn(x.shape, generator=generator)
            scale = 1 if "rel_pos" in name else 0.1 if x.numel() == max(x.shape) else x[0].numel() ** -0.5
            # Norms alone have weights for each channel and nothing else.
            x.copy_(drawn * scale + (name.endswith("weight") and x.numel() == max(x.shape)))
    return network


def pictures(size, batch=2):
    height, width = sides.pair(size)
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(height))


def defined(state, images, w):
    """Logits from the definition, one window at a time, for weights under their official names."""

    def norm(x, at):
        return F.layer_norm(x, x.shape[-1:], state[f"{at}.weight"], state[f"{at}.bias"], 1e-6)

    def linear(x, at):
        return F.linear(x, state[f"{at}.weight"], state[f"{at}.bias"])

    def conv(x, at, **options):
        return F.conv2d(x, state[f"{at}.weight"], state.get(f"{at}.bias"), **options)

    def grid_act(x, at):
        weight, bias = (state[f"{at}.{name}"].flatten() for name in ("weight", "bias"))
        return F.gelu(F.layer_norm(x.movedim(1, 3), x.shape[1:2], weight, bias, 1e-5).movedim(3, 1))

    def attention(x, at, bias=0.0, seen=None):
        q, k, v = (y.unflatten(2, (-1, 32)).transpose(1, 2) for y in linear(x, f"{at}.qkv").chunk(3, 2))
        scores = q @ k.transpose(2, 3) / 32**0.5 + bias
        weights = (scores if seen is None else scores.masked_fill(~seen, -1e30)).softmax(3)
        return linear((weights @ v).transpose(1, 2).flatten(2), f"{at}.proj")

    def sights(grid, regions):
        """Which pairs of a window's tokens see each other, by window."""
        (tall, wide), (r, s) = grid, regions
        column = torch.cat((torch.tensor([True]), (torch.arange(w) < wide - (s - 1) * w).repeat(w)))
        row = torch.cat((torch.tensor([True]), (torch.arange(w) < tall - (r - 1) * w).repeat_interleave(w)))
        column, row, every = (x[:, None] & x for x in (column, row, torch.ones(1 + w * w, dtype=torch.bool)))
        edge = {(True, False): column, (False, True): row, (True, True): column | row, (False, False): every}
        return {at: edge[at[1] == s - 1, at[0] == r - 1] for at in itertools.product(range(r), range(s))}

    def cut(regionals, locals_):
        (tall, wide), (r, s) = locals_.shape[2:], regionals.shape[2:]
        locals_ = F.pad(locals_, (0, s * w - wide, 0, r * w - tall))
        pieces = {
            (y, x): (regionals[:, :, y, x, None], locals_[:, :, y * w : y * w + w, x * w : x * w + w].flatten(2))
            for y, x in itertools.product(range(r), range(s))
        }
        return (tall, wide), {at: torch.cat(piece, 2).transpose(1, 2) for at, piece in pieces.items()}

    def paste(grid, windows):
        r, s = (1 + most for most in max(windows))
        squares = {at: x[:, 1:].transpose(1, 2).unflatten(2, (w, w)) for at, x in windows.items()}
        rows = [torch.cat([squares[y, x] for x in range(s)], 3) for y in range(r)]
        regionals = torch.stack([x[:, 0] for x in windows.values()], 2).unflatten(2, (r, s))
        return regionals, torch.cat(rows, 2)[:, :, : grid[0], : grid[1]]

    down, across = (-side % (4 * w) for side in images.shape[2:])
    framed = F.pad(images, (across // 2, across - across // 2, down // 2, down - down // 2))
    regionals = conv(framed, "cls_token.proj", stride=4 * w)
    if "patch_embed.proj.weight" in state:
        locals_ = conv(images, "patch_embed.proj", stride=4, padding=3)
    else:
        x = grid_act(conv(images, "patch_embed.proj.0", stride=2, padding=1), "patch_embed.proj.1")
        x = grid_act(conv(x, "patch_embed.proj.3", stride=2, padding=1), "patch_embed.proj.4")
        locals_ = conv(x, "patch_embed.proj.6", padding=1)
    y, x = torch.arange(w).repeat_interleave(w), torch.arange(w).repeat(w)
    offsets = y - y[:, None] + w // 2, x - x[:, None] + w // 2
    for stage in range(4):
        at = f"layers.{stage}.block"
        if stage:
            groups = regionals.shape[1]
            half = {"stride": 2, "padding": 1, "groups": groups}
            grids = regionals, locals_
            regionals, locals_ = (conv(grid_act(grid, f"{at}.0.proj.0"), f"{at}.0.proj.2", **half) for grid in grids)
        grid, windows = cut(regionals, locals_)
        seen = sights(grid, regionals.shape[2:])
        for block in itertools.count(1):
            of = f"{at}.{block}"
            if f"{of}.norm0.weight" not in state:
                break
            first = torch.stack([x[:, 0] for x in windows.values()], 1)
            first = first + attention(norm(first, f"{of}.norm0"), f"{of}.attn")
            table = state[f"{of}.attn.rel_pos"].unflatten(1, (2 * w - 1, 2 * w - 1))
            bias = F.pad(table[:, *offsets], (1, 0, 1, 0))
            for i, (place, x) in enumerate(windows.items()):
                x = torch.cat((first[:, i : i + 1], x[:, 1:]), 1)
                x = x + attention(norm(x, f"{of}.norm1"), f"{of}.attn", bias, seen[place])
                windows[place] = x + linear(F.gelu(linear(norm(x, f"{of}.norm2"), f"{of}.mlp.fc1")), f"{of}.mlp.fc2")
            if block == 1 and f"layers.{stage}.peg.weight" in state:
                peg = [conv(x, f"layers.{stage}.peg", padding=1, groups=x.shape[1]) + x for x in paste(grid, windows)]
                grid, windows = cut(*peg)
        regionals, locals_ = paste(grid, windows)
    return linear(norm(regionals.flatten(2).transpose(1, 2), "norm").mean(1), "head")


@pytest.mark.parametrize(
    ("variant", "size", "options"),
    [
        pytest.param("tiny", 56, {}, id="whole-windows"),
        pytest.param("tiny", 64, {}, id="padded"),
        pytest.param("tiny", 20, {"window": 3, "peg": True}, id="peg"),
        pytest.param("small-w14", 60, {}, id="w14"),
        pytest.param("medium", 57, {}, id="a-row-of-regions-without-locals"),
        pytest.param("tiny", (28, 84), {}, id="whole-windows-in-a-row"),
        pytest.param("tiny", (84, 61), {}, id="padded-to-the-right"),
        pytest.param("medium", (61, 84), {}, id="padded-below"),
        pytest.param("tiny", (41, 30), {"window": 3, "peg": True}, id="padded-by-another-number-each-way"),
        pytest.param("medium", (25, 44), {"window": 3}, id="only-a-row-of-regions-without-locals"),
        pytest.param("small", (75, 9), {"window": 2, "peg": True}, id="few-columns"),
    ],
)
def test_logits_are_those_of_the_definition(variant, size, options, tmp_path, monkeypatch, little):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    images = pictures(size)
    networks = {at: drawn(variant, at, image_size=size, **options) for at in ("dense", "native", "tilewright")}
    chosen, state = networks["dense"].options, networks["dense"].state_dict()
    wanted = defined(state, images, chosen.window)
    # What the images are must matter, or nothing is compared.
    assert (wanted[0] - wanted[1]).abs().max() > 0.05
    for attention, network in networks.items():
        with torch.inference_mode():
            torch.testing.assert_close(network(images), wanted, rtol=0, atol=1e-4, msg=f"{attention}: other logits")


def test_flex_gives_the_same_attention(monkeypatch):
    # A padded grid, with a bias, in plan order. As it is written down in torch: `test_sites` compiles one.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(flex, "UNTUNED", ("16",))
    n, r = (5, 10), (2, 3)
    windows = Windows(n, r, 4, 2, "flex")
    assert windows.site.order is not None and not torch.equal(windows.site.order, windows.site.order.sort().values)
    q, k, v = torch.randn(3, 2, 2, windows.site.graph.n_rows, 32).unbind()
    bias = F.pad(torch.randn(2, 49), (0, 1))
    dense = Windows(n, r, 4, 2, "dense").site.layer()
    found = windows.site.layer()(*(x[:, :, windows.site.order] for x in (q, k, v)), bias)
    torch.testing.assert_close(found, dense(q, k, v, bias)[:, :, windows.site.order], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("variant", "size", "options"),
    [
        pytest.param("tiny", (41, 30), {"window": 3, "peg": True}, id="three-convolutions"),
        pytest.param("medium", (61, 84), {}, id="one-convolution"),
    ],
)
@pytest.mark.parametrize("attention", ["native", "dense"])
def test_transposed_weights_take_transposed_images(variant, size, options, attention, little):
    network = drawn(variant, attention, image_size=size, **options)
    other = drawn(variant, attention, image_size=size[::-1], **options)
    state = network.state_dict()
    for key, x in state.items():
        if key.endswith(".rel_pos"):
            side = 2 * network.options.window - 1
            state[key] = x.unflatten(1, (side, side)).mT.flatten(1)
        elif x.ndim == 4:
            state[key] = x.mT
    images = pictures(size)
    with torch.inference_mode():
        wanted, untransposed = network(images), other(images.mT)
        other.load_state_dict(state)
        torch.testing.assert_close(other(images.mT), wanted, rtol=0, atol=1e-4)
    # The weights are of no symmetry of their own.
    assert (untransposed - wanted).abs().max() > 0.01


def test_squares_by_two_sides_are_those_by_one(little):
    one, two = (drawn(image_size=size) for size in (64, (64, 64)))
    for stage, other in zip(one.layers, two.layers, strict=True):
        assert stage.windows.site.graph.id == other.windows.site.graph.id
    with torch.inference_mode():
        assert torch.equal(one(pictures(64)), two(pictures(64)))


@pytest.mark.parametrize(
    ("variant", "millions"),
    [("tiny", 13.84), ("small", 30.59), ("medium", 41.22), ("base", 72.75), ("small-w14-peg", 31.37)],
)
def test_parameter_counts_are_the_published_ones(variant, millions):
    with torch.device("meta"):
        network = regionvit.Network(regionvit.Options(variant), "dense")
    assert round(sum(x.numel() for x in network.parameters()) / 1e6, 2) == millions


# ---------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("stated", "meant", "name"),
    [
        ({"variant": "tiny"}, ("tiny", 7, False), "regionvit-tiny-224"),
        ({"variant": "base-w14"}, ("base", 14, False), "regionvit-base-224-w14"),
        ({"variant": "small-w14-peg"}, ("small", 14, True), "regionvit-small-224-w14-peg"),
        ({"variant": "small", "window": 14, "peg": True}, ("small", 14, True), "regionvit-small-224-w14-peg"),
        ({"variant": "medium", "peg": True, "image_size": 96}, ("medium", 7, True), "regionvit-medium-96-peg"),
        ({"variant": "tiny", "image_size": (224, 224)}, ("tiny", 7, False), "regionvit-tiny-224"),
        ({"variant": "tiny-w14", "image_size": (64, 96)}, ("tiny", 14, False), "regionvit-tiny-64x96-w14"),
    ],
)
def test_a_variant_and_the_options_state_the_same(stated, meant, name):
    options = regionvit.Options(**stated)
    assert (options.variant, options.window, options.peg) == meant
    assert regionvit.name(options) == name


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"variant": "large"}, "large"),
        ({"variant": "tiny-w14", "window": 7}, "window: expected 14 for variant tiny-w14, found 7"),
        ({"variant": "small-w14-peg", "peg": False}, "peg: expected True"),
        ({"variant": "tiny", "image_size": 3}, "image_size: expected at least a patch of 4, found 3$"),
        ({"variant": "tiny", "image_size": (3, 96)}, "image_size: expected at least a patch of 4, found 3x96$"),
        ({"variant": "tiny", "image_size": (96, 3)}, "image_size: expected at least a patch of 4, found 96x3$"),
        ({"variant": "tiny", "image_size": (96, 96, 3)}, "image_size"),
        ({"variant": "tiny", "stage": 1}, "variant, image_size, num_classes, window, peg"),
    ],
)
def test_wrong_options_are_refused(stated, said):
    with pytest.raises(ConfigError, match=said):
        networks.create("regionvit", **stated)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("regionvit-tiny-224", 224),
        ("regionvit-tiny-64x96", (64, 96)),
        ("regionvit-small-64x96-w14-peg", (64, 96)),
        ("regionvit-small-w14-peg-64x96", (64, 96)),
    ],
)
def test_a_name_states_a_size_or_height_and_width(name, size):
    family, stated = networks.parse(name)
    assert family == "regionvit" and stated["image_size"] == size
    published = name.replace("-w14-peg-64x96", "-64x96-w14-peg")
    assert regionvit.name(regionvit.Options(**stated)) == published


def test_images_of_another_shape_are_refused(little):
    network = networks.create("regionvit", variant="tiny", image_size=(28, 56))
    with pytest.raises(PatternError, match=r"\[B, 3, 28, 56\] with B at least 1, found \[1, 3, 56, 28\]$"):
        network(torch.zeros(1, 3, 56, 28))


def test_images_of_another_size_are_refused(little):
    with pytest.raises(PatternError, match=r"\[B, 3, 56, 56\] with B at least 1, found \[1, 3, 64, 64\]"):
        networks.create("regionvit", variant="tiny", image_size=56)(torch.zeros(1, 3, 64, 64))


# ---------------------------------------------------------------------------------------------- the pattern


def windows_dense(n, r, w):
    """Bool pattern of the windows from the published mask; tokens as places in the padded grid, regionals first."""
    (tall, wide), (r, s) = sides.pair(n), sides.pair(r)
    tokens = [(y, x, True) for y in range(r) for x in range(s)]
    last = [(y, x) for y in range((r - 1) * w, r * w) for x in range((s - 1) * w, s * w)]
    right = [(y, x) for y, x in last if y < tall and x >= wide]
    below = [(y, x) for y, x in last if y >= tall and x < wide]
    tokens += [(y, x, False) for y, x in [*itertools.product(range(tall), range(wide)), *right, *below]]

    def sees(a, b):
        at = [(y, x) if regional else (y // w, x // w) for y, x, regional in (a, b)]
        rows = all(regional or y < tall for y, _, regional in (a, b))
        columns = all(regional or x < wide for _, x, regional in (a, b))
        return at[0] == at[1] and (rows or columns)

    return np.array([[sees(a, b) for b in tokens] for a in tokens])


# Padded nowhere, to the right, below, by another number each way; without locals in the last row, column, and both.
RECTANGLES = [
    ((3, 6), (1, 2), 3),
    ((6, 5), (2, 2), 3),
    ((5, 9), (2, 3), 3),
    ((7, 10), (2, 3), 4),
    ((4, 5), (3, 3), 2),
    ((7, 8), (4, 5), 2),
    ((4, 6), (3, 4), 2),
]


@pytest.mark.parametrize(("n", "r", "w"), [(6, 2, 3), (5, 2, 3), (7, 2, 4), (4, 3, 2), (3, 1, 4), *RECTANGLES])
def test_windows_follow_the_published_mask(n, r, w):
    graph = pattern.windows(n, r, w)
    np.testing.assert_array_equal(graph.to_dense(), windows_dense(n, r, w))
    assert graph.id == from_pattern(graph.to_csr()).id
    ordered = graph.reordered(*(np.argsort(hint, kind="stable") for hint in (graph.row_hint, graph.col_hint)))
    rows, cols = ordered.to_csr().nonzero()
    assert (abs(rows - cols) <= w * w).all()


@pytest.mark.parametrize(("n", "w"), [(6, 3), (8, 3)])
def test_the_whole_graph_adds_only_the_sight_among_regional_tokens(n, w):
    params = pattern.Params("tiny", n, 1, patch=1, window=w)
    regionals, real = params.regions**2, params.regions**2 + n * n
    dense = pattern.windows(n, params.regions, w).to_dense()[:real, :real]
    dense[:regionals, :regionals] = True
    np.testing.assert_array_equal(dense, pattern.graph(params).to_dense())


def test_bias_indices_are_those_of_the_graph():
    site = Windows(8, 3, 3, 2, "dense").site
    rows, cols = pattern.windows(8, 3, 3).to_csr().nonzero()
    rows, cols = (at[(rows < 73) & (cols < 73)] for at in (rows, cols))
    found = site.bias_index(torch.from_numpy(rows), torch.from_numpy(cols)).numpy()
    (qy, qx), (ky, kx) = (np.divmod(at - 9, 8) for at in (rows, cols))
    local = (rows >= 9) & (cols >= 9)
    np.testing.assert_array_equal(found, np.where(local, pattern.offset_index(ky - qy, kx - qx, 3), 25))


# ---------------------------------------------------------------------------------------------- weights


def official(network):
    """The network's tensors as published: with the projections' second name, and as trained on several devices."""
    state = network.state_dict()
    state |= {key.replace(".proj.", ".proj_cls."): x for key, x in state.items() if ".block.0.proj." in key}
    return {f"module.{key}": x for key, x in state.items()}


def saved(path, state):
    torch.save({"model": state, "optimizer": {"state": {}}, "epoch": 299, "max_accuracy": 80.4}, path)
    return path


def test_an_official_file_gives_the_same_logits(tmp_path, little):
    network, images = drawn(image_size=56), pictures(56)
    state = official(network)
    listed = ("cls_token.proj.weight", "patch_embed.proj.4.bias", "layers.1.block.0.proj_cls.2.weight", "norm.weight")
    listed += tuple(f"layers.2.block.1.{x}" for x in ("norm0.bias", "attn.rel_pos", "attn.qkv.weight", "mlp.fc1.bias"))
    assert all(f"module.{key}" in state for key in listed)
    assert state["module.layers.1.block.0.proj.0.weight"].shape == (1, 32, 1, 1)
    loaded = networks.create(
        "regionvit", variant="tiny", image_size=56, num_classes=10, checkpoint=saved(tmp_path / "a.pth", state)
    )
    with torch.inference_mode():
        assert torch.equal(loaded(images), network(images))


def test_a_file_for_another_window_is_resized_as_the_public_tool_does(tmp_path, little):
    path = saved(tmp_path / "a.pth", official(network := drawn(image_size=56)))
    wide = networks.create("regionvit", variant="tiny-w14", image_size=56, num_classes=10, checkpoint=path)
    old, new = network.state_dict(), wide.state_dict()
    for key in old:
        if key == "cls_token.proj.weight":
            wanted = F.interpolate(old[key], size=(56, 56), mode="bicubic")
        elif key.endswith("rel_pos"):
            wanted = F.interpolate(old[key].view(1, -1, 13, 13), size=(27, 27), mode="bicubic").view(len(old[key]), -1)
        else:
            wanted = old[key]
        assert torch.equal(new[key], wanted), key


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("module.norm.weight"), "1 missing: norm.weight"),
        (lambda state: state.update({"module.layers.0.peg.weight": torch.ones(32, 1, 3, 3)}), "1 unexpected: layers.0"),
        (
            lambda state: state.update({"module.head.weight": torch.ones(7, 256)}),
            "mis-shaped: head.weight .7, 256. for",
        ),
        (
            lambda state: state.update({"module.layers.3.block.0.proj_cls.2.bias": torch.ones(256)}),
            "1 unexpected: layers.3.block.0.proj_cls.2.bias",
        ),
        (
            lambda state: state.update({"module.layers.0.block.1.attn.rel_pos": torch.ones(1, 168)}),
            "mis-shaped: layers.0.block.1.attn.rel_pos .1, 168. for .1, 169.",
        ),
    ],
    ids=["missing", "unexpected", "classes", "projections-that-differ", "a-table-that-is-no-square"],
)
def test_a_file_that_does_not_fit_is_refused(change, said, tmp_path, little):
    change(state := official(drawn(image_size=56)))
    path = saved(tmp_path / "a.pth", state)
    with pytest.raises(ArtifactError, match=said):
        networks.create("regionvit", variant="tiny", image_size=56, num_classes=10, checkpoint=path)


def test_changed_weights_are_noticed_and_others_prepare_once(little):
    network, images = drawn(image_size=84), pictures(84)
    attend = network.layers[0].block[1].attn.attend
    with torch.inference_mode():
        before = network(images)
        prepared = attend._prepared
        assert torch.equal(network(images), before)
        assert attend._prepared is prepared
    with torch.no_grad():
        network.layers[0].block[1].attn.rel_pos.mul_(3)
    with torch.inference_mode():
        after = network(images)
    assert attend._prepared is not prepared
    wanted = defined(network.state_dict(), images, 7)
    torch.testing.assert_close(after, wanted, rtol=0, atol=1e-4)
    assert (after - before).abs().max() > 1e-3
