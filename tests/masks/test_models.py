"""T1: every family's pattern against slow loops from its definition, the published counts, and every wrong name."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from helpers.files import run_script
from tilewright import graph as graph_file
from tilewright import masks
from tilewright.core import images
from tilewright.core.errors import ArtifactError, ConfigError, PatternError, UnknownNameError
from tilewright.masks import _gates, dynamicvit, file, regionvit, vision_longformer
from tilewright_study.stages import graph as graph_stage

SCRIPT = Path(__file__).parents[2] / "workflow/scripts/gen_adj.py"


def dense_by(sees, n):
    """Bool [n, n] of ``sees(query, key)``."""
    return np.array([[sees(q, k) for k in range(n)] for q in range(n)], bool)


def assert_canonical(graph):
    """Distinct rows are distinct, numbered by first appearance, with sorted keys: what a full CSR would collapse to."""
    assert graph.id == graph_file.from_pattern(graph.to_csr()).id


# ---------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "family", "stated"),
    [
        ("vil-tiny-224-s1", "vision_longformer", {"variant": "tiny", "resolution": 224, "stage": 1, "mode": "chunk"}),
        (
            "vil-medium-deep-384-p8-s2-exact",
            "vision_longformer",
            {"variant": "medium-deep", "patch": 8, "mode": "exact"},
        ),
        ("vil-base-wide-384-s1-cyclic", "vision_longformer", {"variant": "base-wide", "mode": "cyclic"}),
        ("regionvit-tiny-384-s1", "regionvit", {"variant": "tiny", "window": 7, "patch": 4}),
        ("regionvit-base-224-w14-p2-s3", "regionvit", {"variant": "base", "window": 14, "patch": 2, "stage": 3}),
        ("regionvit-small-896-s2-windows", "regionvit", {"variant": "small", "part": "windows", "head_dim": 32}),
        ("dynamicvit-s-224", "dynamicvit", {"variant": "deit-s", "prune": 3, "patch": 16, "keep_ratio": 0.7}),
        ("dynamicvit-256-224", "dynamicvit", {"variant": "deit-256"}),
        ("dynamicvit-deit-b-512-p32-b1", "dynamicvit", {"variant": "deit-b", "patch": 32, "prune": 1}),
        ("dynamicvit-lvvit-m-1024-b2", "dynamicvit", {"variant": "lvvit-m", "prune": 2}),
    ],
)
def test_a_name_states_parameters(name, family, stated):
    module, params = masks.parse(name)
    assert module.__name__ == f"tilewright.masks.{family}"
    assert stated.items() <= msgspec.to_builtins(params).items()


@pytest.mark.parametrize(
    "name",
    (
        *("", "vil", "vil-huge-224-s1", "vil-tiny-224", "vil-tiny-224-s5", "vil-tiny-224-s1-rows", "vil-tiny-224-s1\n"),
        *("VIL-tiny-224-s1", "regionvit-tiny-224-s0", "dynamicvit-s", "dynamicvit-s-224-b4", "file-"),
    ),
)
def test_an_unknown_name_is_answered_with_its_family_s_names_or_an_example_of_each_family(name):
    with pytest.raises(UnknownNameError, match="unknown workload") as error:
        masks.parse(name)
    own = [module.NAMING for module in masks.members() if module.NAMING.startswith(f"{name.partition('-')[0]}-")]
    examples = [module.NAMING.rpartition("e.g. ")[2] for module in masks.members()]
    assert all(shown in str(error.value) for shown in own or examples)
    assert all(module.fields(example) for module, example in zip(masks.members(), examples, strict=True))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("vil-tiny-224-s1", {"windows": 9}, r"unknown field `windows`; parameters: variant, resolution"),
        ("vil-tiny-224-s1", {"window": "9"}, "window: expected int, found str"),
        ("vil-tiny-224-s1", {"window": 8}, "window: expected an odd number of tokens, found 8"),
        ("vil-tiny-224-s1", {"window": 1}, ">= 3"),
        ("vil-tiny-224-s1", {"variant": "huge"}, "variant: expected one of tiny, small, .*, found 'huge'; parameters"),
        ("vil-tiny-224-s3-exact", {}, "stage 3 attends to everything"),
        ("vil-tiny-224-s4", {"window": 9}, "stage 4 attends to everything"),
        ("vil-tiny-16-s4", {}, "resolution 16 leaves no token at stage 4, patch 4"),
        ("vil-tiny-0-s1", {}, ">= 1"),
        ("vil-tiny-56-s1-cyclic", {}, "at least 3 chunks of 7 a side, found 14 tokens"),
        ("regionvit-tiny-224-p225-s1", {}, "patch: expected at most the resolution 224, found 225"),
        ("regionvit-tiny-224-s1", {"window": 1}, ">= 2"),
        ("regionvit-tiny-256-s1-windows", {}, "windows: expected a multiple of 7 tokens a side, found 64"),
        ("dynamicvit-s-224-p256", {}, "patch: expected at most the resolution 224, found 256"),
        ("dynamicvit-s-224", {"gate": "predictor"}, "expected an official checkpoint as `weights`, found none"),
        ("dynamicvit-s-224", {"gate": "magic"}, "gate: expected one of .*, found 'magic'"),
        ("dynamicvit-s-224", {"keep_ratio": 0}, "> 0"),
        ("file-mine", {}, "missing required field `path`"),
        ("file-mine", {"path": "m.npy", "heads": 0}, ">= 1"),
    ],
)
def test_wrong_parameters_are_named(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        masks.parse(name, overrides)


def test_a_built_graph_says_what_it_is():
    graph = masks.build("vil-tiny-64-s1", {"window": 9})
    assert graph.meta["model"] == "vil-tiny-64-s1"
    assert graph.meta["params"]["window"] == 9
    module, params = masks.parse("vil-tiny-64-s1", {"window": 9})
    assert msgspec.convert(graph.meta["params"], module.Params) == params
    json.dumps(graph.meta)


# ----------------------------------------------------------------------------------- published counts


@pytest.mark.parametrize(
    ("name", "tokens", "density"),
    [
        ("vil-tiny-224-s1", 3137, 0.119),
        ("vil-tiny-384-s1", 9217, 0.043),
        ("vil-tiny-1024-s1", 65537, 0.0065),
        ("vil-tiny-128-s1", 1025, 0.303),
        ("vil-tiny-224-s1-exact", 3137, 0.063),
        ("vil-tiny-128-s2", 257, 0.795),
        ("vil-tiny-224-s2", 785, 0.392),
        ("vil-tiny-384-s2", 2305, 0.155),
        ("vil-tiny-1024-s2", 16385, 0.025),
        ("vil-tiny-224-s3", 197, 1),
        ("vil-tiny-224-s4", 49, 1),
        ("regionvit-tiny-224-s1", 64 + 3136, 0.016),
    ],
)
def test_published_tokens_and_density(name, tokens, density):
    graph = masks.build(name)
    assert graph.shape == (tokens, tokens)
    digits = 3 if density >= 0.01 else 4
    assert round(graph.density, digits) == density


@pytest.mark.parametrize(("resolution", "entries"), [(512, 3_507_265), (1024, 14_449_729)])
def test_entries_of_a_15x15_window_with_one_global_token(resolution, entries):
    assert masks.build(f"vil-tiny-{resolution}-s1-exact").entries == entries


def test_a_2048_pixel_image_has_few_distinct_rows():
    graph = masks.build("vil-tiny-2048-s1")
    assert graph.n_rows == 512 * 512 + 1
    assert graph.n_distinct == 74 * 74 + 1
    # Along one axis 72 inner chunks of 7 see 21 tokens, the outer ones 14 and the last, of 512 - 73 * 7 = 1 token, 8.
    seen = 7 * 14 + 71 * 7 * 21 + 7 * 15 + 1 * 8
    assert graph.entries == seen**2 + 2 * 512 * 512 + 1


@pytest.mark.parametrize(
    ("name", "heads", "head_dim"),
    [
        *[(f"vil-tiny-224-s{s}", h, d) for s, h, d in ((1, 1, 48), (2, 3, 32), (3, 3, 64), (4, 6, 64))],
        *[(f"vil-small-224-s{s}", h, d) for s, h, d in ((1, 3, 32), (2, 3, 64), (3, 6, 64), (4, 12, 64))],
        *[(f"vil-medium-wide-224-s{s}", h, 64) for s, h in ((1, 3), (2, 6), (3, 8), (4, 12))],
        *[(f"vil-base-wide-224-s{s}", h, 64) for s, h in ((1, 3), (2, 6), (3, 12), (4, 16))],
        ("regionvit-tiny-224-s1", 2, 32),
        ("regionvit-medium-224-s4", 24, 32),
        ("regionvit-base-224-s3", 16, 32),
        ("dynamicvit-256-224", 4, 64),
        ("dynamicvit-s-224", 6, 64),
        ("dynamicvit-b-224", 12, 64),
        ("dynamicvit-lvvit-s-224", 6, 64),
        ("dynamicvit-lvvit-m-224", 8, 64),
    ],
)
def test_published_heads(name, heads, head_dim):
    meta = masks.build(name).meta
    assert (meta["heads"], meta["head_dim"]) == (heads, head_dim)


# --------------------------------------------------------------------------------- Vision Longformer


def vil(n, stage=1, **more):
    """Parameters with an n x n grid."""
    return vision_longformer.Params("tiny", n << (stage - 1), stage, patch=1, **more)


def vil_sees(params):
    """The definition, for one query and one key."""
    n, f, g = params.side, params.window // 2, params.n_global
    padded = -(-n // f) * f

    def axis(q, k):
        if params.mode == "exact":
            return abs(q - k) <= f
        start = (q // f - 1) * f
        seen = range(start, start + 3 * f)
        return k in ({s % padded for s in seen} if params.mode == "cyclic" else seen)

    def sees(q, k):
        if q < g or k < g or params.stage > 2:
            return True
        (qy, qx), (ky, kx) = divmod(q - g, n), divmod(k - g, n)
        return axis(qy, ky) and axis(qx, kx)

    return sees


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10), st.sampled_from([3, 5, 7]), st.sampled_from(["chunk", "exact", "cyclic"]), st.integers(1, 2))
def test_vil_windows_follow_the_definition(n, window, mode, stage):
    if mode == "cyclic":
        n = max(n, 2 * (window // 2) + 1)
    params = vil(n, stage, mode=mode, window=window)
    graph = vision_longformer.graph(params)
    np.testing.assert_array_equal(graph.to_dense(), dense_by(vil_sees(params), 1 + n * n))
    assert_canonical(graph)


@pytest.mark.parametrize(("stage", "n_global"), [(3, 1), (4, 0)])
def test_vil_late_stages_are_full(stage, n_global):
    graph = vision_longformer.graph(vil(5, stage))
    assert graph.shape == (25 + n_global, 25 + n_global)
    assert graph.density == 1


def published_vil_index(f):
    """The public ``relative_position_index`` [f^2, 9 f^2]: offsets of the middle chunk to its nine neighbours."""
    chunks = [[(y, x) for y in range(cy, cy + f) for x in range(cx, cx + f)] for cy in (-f, 0, f) for cx in (-f, 0, f)]
    keys = [key for chunk in chunks for key in chunk]
    return [
        [(qy - ky + 2 * f - 1) * (4 * f - 1) + qx - kx + 2 * f - 1 for ky, kx in keys] for qy, qx in chunks[4]
    ], keys


@pytest.mark.parametrize("mode", ["chunk", "exact", "cyclic"])
@pytest.mark.parametrize(("n", "window"), [(7, 5), (8, 7), (9, 7)], ids=str)
def test_vil_bias_of_the_sparse_stages_follows_the_published_index(n, window, mode):
    params = vil(n, mode=mode, window=window)
    graph = vision_longformer.graph(params)
    f, tokens = window // 2, 1 + n * n
    padded = -(-n // f) * f
    index, keys = published_vil_index(f)
    table = (4 * f - 1) ** 2
    wanted = np.full((tokens, tokens), -1)
    wanted[1:, 0], wanted[0, 1:], wanted[0, 0] = table, table + 1, table + 2
    for qy in range(n):
        for qx in range(n):
            for (ky, kx), slot in zip(keys, index[qy % f * f + qx % f], strict=True):
                ky, kx = ky + qy // f * f, kx + qx // f * f
                if mode == "cyclic":
                    ky, kx = ky % padded, kx % padded
                if 0 <= ky < n and 0 <= kx < n:
                    wanted[1 + qy * n + qx, 1 + ky * n + kx] = slot
    at, chunk = np.arange(tokens), f if mode == "cyclic" else None
    indices = vision_longformer.bias_index_at(np.where, (n, n), 1, 2 * f, chunk, at[:, None], at)
    allowed = graph.to_dense()
    np.testing.assert_array_equal(indices[allowed], wanted[allowed])
    assert graph.meta["bias"]["table_size"] == table
    assert indices.min() >= 0
    assert indices.max() < graph.meta["bias"]["slots"] == table + 4


@pytest.mark.parametrize("stage", [3, 4])
def test_vil_bias_of_the_full_stages_counts_all_offsets(stage):
    n, g = 4, 4 - stage
    params = vil(n, stage)
    bias = vision_longformer.graph(params).meta["bias"]
    assert bias["table_size"] == (2 * n - 1) ** 2
    assert bias["slots"] == (2 * n - 1) ** 2 + 3 * g + 1


def test_vil_hints_gather_the_chunks_behind_the_global_token():
    graph = vision_longformer.graph(vil(7, window=7))
    order = np.argsort(graph.row_hint, kind="stable")
    assert order[0] == 0
    for lo, size in ((1, 9), (10, 9), (19, 3)):
        assert len(np.unique(graph.row_id[order[lo : lo + size]])) == 1
    np.testing.assert_array_equal(graph.row_hint, graph.col_hint)


def test_vil_exact_hints_make_squares():
    n = 16
    graph = vision_longformer.graph(vil(n, mode="exact"))
    order = np.argsort(graph.row_hint, kind="stable")[1:] - 1
    for size in (16, 64):
        for lo in range(0, n * n, size):
            y, x = np.divmod(order[lo : lo + size], n)
            assert np.ptp(y) + 1 == np.ptp(x) + 1 == int(size**0.5)


# ------------------------------------------------------------------------------------------ RegionViT


def test_regionvits_windows_stand_alone():
    graph = masks.build("regionvit-small-112-s2-windows", {"head_dim": 64})
    assert graph.shape == (4 * 50, 4 * 50) and graph.entries == 4 * 50 * 50
    regional = masks.build("regionvit-small-112-s2").to_dense()
    regional[:4, :4] = np.eye(4)
    np.testing.assert_array_equal(graph.to_dense(), regional)
    assert (graph.meta["heads"], graph.meta["head_dim"], graph.meta["mode"]) == (6, 64, "windows")


def regionvit_dense(n, w):
    """The definition: sequences [1 regional, w x w locals] on the padded grid, and the regionals among themselves."""
    r = -(-n // w)
    dense = np.zeros((r * r + n * n,) * 2, bool)
    dense[: r * r, : r * r] = True
    for region in range(r * r):
        ry, rx = divmod(region, r)
        sequence = [region]
        for y in range(ry * w, ry * w + w):
            sequence += [r * r + y * n + x for x in range(rx * w, rx * w + w) if y < n and x < n]
        dense[np.ix_(sequence, sequence)] = True
    return dense


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 14), st.integers(2, 5))
def test_regionvit_follows_the_definition(n, w):
    graph = regionvit.graph(regionvit.Params("tiny", n, 1, patch=1, window=w))
    np.testing.assert_array_equal(graph.to_dense(), regionvit_dense(n, w))
    assert_canonical(graph)


@pytest.mark.parametrize(
    ("resolution", "locals_", "regionals"),
    [(224, (56, 28, 14, 7), (8, 4, 2, 1)), (384, (96, 48, 24, 12), (14, 7, 4, 2)), (128, (32, 16, 8, 4), (5, 3, 2, 1))],
)
def test_regionvit_grids_halve_and_round_up(resolution, locals_, regionals):
    for at in (1, 2, 3, 4):
        params = regionvit.Params("tiny", resolution, at)
        assert (params.side, params.regions) == (locals_[at - 1], regionals[at - 1])
        # The padding never reaches a whole window: every region keeps a local token.
        assert params.regions * params.window - params.window < params.side <= params.regions * params.window


@given(st.integers(1, 5000), st.sampled_from([1, 2, 4]), st.sampled_from([7, 14]))
def test_regionvit_grids_are_those_of_the_strided_convolutions(resolution, patch, window):
    resolution = max(resolution, patch)
    side, regions = -(-resolution // patch), -(-resolution // (patch * window))
    for at in (1, 2, 3, 4):
        params = regionvit.Params("tiny", resolution, at, patch=patch, window=window)
        assert (params.side, params.regions) == (side, regions)
        # kernel 3, stride 2, padding 1
        side, regions = ((size + 2 - 3) // 2 + 1 for size in (side, regions))


@pytest.mark.parametrize("w", [3, 4, 7])
def test_regionvit_bias_follows_the_published_wrapping_index(w):
    table = [[y * (2 * w - 1) + x for x in range(2 * w - 1)] for y in range(2 * w - 1)]
    offsets = range(1 - w, w)
    # Python's negative indices wrap, as those of the public code do.
    wanted = [[table[dy + w // 2][dx + w // 2] for dx in offsets] for dy in offsets]
    found = regionvit.offset_index(np.array(offsets)[:, None], np.array(offsets), w)
    np.testing.assert_array_equal(found, wanted)
    assert set(found.ravel()) == set(range((2 * w - 1) ** 2))
    bias = regionvit.graph(regionvit.Params("tiny", 2 * w, 1, patch=1, window=w)).meta["bias"]
    assert (bias["table_size"], bias["slots"]) == ((2 * w - 1) ** 2, (2 * w - 1) ** 2 + 1)


def test_regionvit_hints_gather_the_windows_behind_the_regional_tokens():
    graph = regionvit.graph(regionvit.Params("tiny", 5, 1, patch=1, window=3))
    order = np.argsort(graph.row_hint, kind="stable")
    np.testing.assert_array_equal(order[:4], np.arange(4))
    assert [len(np.unique(graph.row_id[order[lo:hi]])) for lo, hi in ((4, 13), (13, 19), (19, 25), (25, 29))] == [1] * 4


# ----------------------------------------------------------------------------------------- DynamicViT


@pytest.fixture(scope="module")
def photograph(tmp_path_factory):
    """A 96 x 96 picture of noise: each 16-pixel patch has a contrast of its own, and brightness grows downwards."""
    rng = np.random.default_rng(0)
    strength = np.kron(rng.permutation(36).reshape(6, 6) + 1, np.ones((16, 16)))[..., None]
    pixels = 128 + strength * rng.choice([-3, 3], (96, 96, 3)) + np.linspace(-15, 15, 96)[:, None, None]
    path = tmp_path_factory.mktemp("image") / "own.png"
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    return str(path)


@pytest.mark.parametrize(("prune", "kept"), [(1, 137), (2, 96), (3, 67)])
def test_published_keep_counts_at_224(prune, kept):
    assert masks.build(f"dynamicvit-s-224-b{prune}").meta["kept"] == 1 + kept


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 8), st.sampled_from([1, 2, 3, 5, 8]), st.integers(1, 3), st.floats(0.05, 1))
def test_dynamicvit_is_the_kept_columns_and_the_diagonal(side, patch, prune, keep_ratio):
    params = dynamicvit.Params("deit-s", side * patch, patch, prune, keep_ratio, image="coffee")
    graph, kept = dynamicvit.graph(params), dynamicvit.keep(params)
    wanted = np.eye(1 + side**2, dtype=bool)
    wanted[:, kept] = True
    np.testing.assert_array_equal(graph.to_dense(), wanted)
    assert_canonical(graph)
    assert kept[0] == 0
    assert len(kept) == 1 + int(side * side * keep_ratio**prune)


def test_dynamicvit_says_that_its_graph_is_that_of_training():
    assert masks.build("dynamicvit-s-64").meta["case"] == dynamicvit.CASE == "training mask"
    assert "case" not in masks.build("vil-tiny-64-s1").meta


def test_dynamicvit_keeps_fewer_of_the_same_tokens_each_time():
    first, second, third = (set(dynamicvit.keep(masks.parse(f"dynamicvit-s-224-b{b}")[1])) for b in (1, 2, 3))
    assert first > second > third


def test_dynamicvit_hints_compact_the_kept_tokens():
    graph = masks.build("dynamicvit-s-64")
    order = np.argsort(graph.row_hint, kind="stable")
    kept = graph.meta["kept"]
    assert len(np.unique(graph.row_id[order[:kept]])) == 1
    np.testing.assert_array_equal(np.sort(order[:kept]), graph.row(0))


def test_dynamicvit_drops_what_the_patches_leave_over(photograph):
    params = dynamicvit.Params("deit-s", 100, 16, image=photograph)
    assert dynamicvit.graph(params).shape == (37, 37)


def test_dynamicvit_is_refused_when_it_is_too_large():
    with pytest.raises(PatternError, match=r"262,145 tokens have [\d,]+ entries in distinct rows"):
        dynamicvit.graph(masks.parse("dynamicvit-s-1024-p2")[1])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vil-tiny-10000000-s1", "resolution: expected int <= 65536"),
        ("regionvit-tiny-10000000-s1", "resolution: expected int <= 65536"),
        ("dynamicvit-s-10000000", "resolution: expected int <= 65536"),
        ("vil-tiny-65536-s1", r"expected a graph of at most the memory, 8 GB, found 47\.3 GB"),
    ],
)
def test_a_workload_that_no_memory_holds_is_refused_at_once(name, message, monkeypatch):
    monkeypatch.setattr(masks, "_memory_bytes", lambda: 8e9)
    with pytest.raises((ConfigError, PatternError), match=message):
        masks.build(name)


def normalised(path, size):
    return (images.load(path, size).transpose(1, 2, 0) - _gates.MEAN) / _gates.STD


def patches_of(path, side, p):
    """Float32 [side^2, 3, p, p] of the normalised photograph."""
    pixels = normalised(path, side * p)
    return np.stack(
        [pixels[y * p : y * p + p, x * p : x * p + p].transpose(2, 0, 1) for y in range(side) for x in range(side)]
    )


def test_the_gate_without_weights_keeps_the_patches_of_largest_contrast(photograph):
    params = dynamicvit.Params("deit-s", 96, 16, 1, image=photograph)
    contrast = [((patch - patch.mean((1, 2), keepdims=True)) ** 2).sum() for patch in patches_of(photograph, 6, 16)]
    best = sorted(range(36), key=lambda i: -contrast[i])[:25]
    assert _gates.kept(params).tolist() == best
    assert masks.build("dynamicvit-s-96", {"image": photograph}).meta["gate"] == {
        "name": "threshold-l2",
        "embedding": "isometric, of zero-mean patches",
        "image": photograph,
        "credit": None,
    }


def test_the_gate_gives_ties_to_the_smaller_id(tmp_path):
    # Flat above, a chequerboard below: two contrasts only.
    pixels = np.full((64, 64), 128, np.uint8)
    pixels[32:] = np.indices((32, 64)).sum(0) % 2 * 255
    Image.fromarray(np.stack([pixels] * 3, axis=2)).save(tmp_path / "two.png")
    params = dynamicvit.Params("deit-s", 64, 2, 1, image=str(tmp_path / "two.png"))
    np.testing.assert_array_equal(_gates.kept(params), [*range(512, 1024), *range(716 - 512)])


class Network(nn.Module):
    """DynamicViT as a plain module with the official key names; tokens are masked and never gathered."""

    def __init__(self, width, heads, blocks, patch, side, lvvit):
        super().__init__()
        self.heads, self.blocks_at, self.lvvit = heads, blocks, lvvit
        self.eps = 1e-5 if lvvit else 1e-6
        stem = [("proj", nn.Conv2d(64 if lvvit else 3, width, patch // (1 + lvvit), patch // (1 + lvvit)))]
        for i in (1, 2, 3) if lvvit else ():
            stem += [
                (
                    f"conv{i}",
                    nn.Conv2d(
                        3 if i == 1 else 64, 64, 7 if i == 1 else 3, 2 if i == 1 else 1, 3 if i == 1 else 1, bias=False
                    ),
                )
            ]
            stem += [(f"bn{i}", nn.BatchNorm2d(64))]
        self.patch_embed = nn.ModuleDict(stem)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + side**2, width))
        self.blocks = nn.ModuleList()
        hidden = (3 if lvvit else 4) * width
        for _ in range(4 * blocks[0]):
            attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width, bias=not lvvit), "proj": nn.Linear(width, width)})
            mlp = nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, width)})
            norms = {f"norm{i}": nn.LayerNorm(width, self.eps) for i in (1, 2)}
            self.blocks.append(nn.ModuleDict({**norms, "attn": attn, "mlp": mlp}))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 7)
        if lvvit:
            self.aux_head = nn.Linear(width, 7)
        self.score_predictor = nn.ModuleList()
        for _ in blocks:
            into = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            out = [nn.Linear(width, width // 2), nn.GELU(), nn.Linear(width // 2, width // 4), nn.GELU()]
            out = nn.Sequential(*out, nn.Linear(width // 4, 2), nn.LogSoftmax(-1))
            self.score_predictor.append(nn.ModuleDict({"in_conv": into, "out_conv": out}))

    @torch.no_grad()
    def keep(self, pixels, counts):
        x, stem = pixels, self.patch_embed
        for i in (1, 2, 3) if self.lvvit else ():
            x = stem[f"bn{i}"](stem[f"conv{i}"](x)).relu()
        x = stem["proj"](x).flatten(2).transpose(1, 2)
        alive = torch.ones(x.shape[1], dtype=torch.bool)
        x = torch.cat([self.cls_token, x], 1) + self.pos_embed
        skip = 2 if self.lvvit else 1
        for i, block in enumerate(self.blocks):
            if i in self.blocks_at[: len(counts)]:
                time = self.blocks_at.index(i)
                predictor = self.score_predictor[time]
                hidden = predictor["in_conv"](x[0, 1:])
                half = hidden.shape[1] // 2
                shared = hidden[alive, half:].mean(0).expand(len(hidden), -1)
                score = predictor["out_conv"](torch.cat([hidden[:, :half], shared], 1))[:, 0]
                best = score.masked_fill(~alive, -torch.inf).topk(counts[time]).indices
                alive = torch.zeros_like(alive).index_fill(0, best, True)
                if time + 1 == len(counts):
                    return np.flatnonzero(alive.numpy())
            q, k, v = block["attn"]["qkv"](block["norm1"](x))[0].chunk(3, -1)
            seen = torch.cat([torch.ones(1, dtype=torch.bool), alive])
            heads = []
            for a, b, c in zip(q.chunk(self.heads, -1), k.chunk(self.heads, -1), v.chunk(self.heads, -1), strict=True):
                weight = (a @ b.T / a.shape[1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1)
                heads.append(weight @ c)
            x = x + block["attn"]["proj"](torch.cat(heads, -1)) / skip
            x = x + block["mlp"]["fc2"](F.gelu(block["mlp"]["fc1"](block["norm2"](x)))) / skip
        raise AssertionError("no pruning was reached")


def network(variant, patch=16, side=6):
    torch.manual_seed(0)
    width, heads, blocks = dynamicvit.VARIANTS[variant]
    made = Network(width, heads, blocks, patch, side, variant.startswith("lvvit")).eval()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return made


@pytest.mark.parametrize(("variant", "prune"), [("deit-256", 1), ("deit-256", 2), ("lvvit-s", 1)], ids=str)
def test_the_predictor_gate_keeps_what_the_masked_network_keeps(tmp_path, photograph, variant, prune):
    made = network(variant)
    torch.save({"model": made.state_dict()}, tmp_path / "net.pth")
    params = dynamicvit.Params(
        variant, 96, 16, prune, image=photograph, gate="predictor", weights=str(tmp_path / "net.pth")
    )
    pixels = torch.from_numpy(normalised(photograph, 96).transpose(2, 0, 1).copy())[None]
    wanted = made.keep(pixels, params.kept[:prune])
    np.testing.assert_array_equal(dynamicvit.keep(params), [0, *(1 + wanted)])


def test_the_predictor_gate_resizes_the_position_embedding(tmp_path, photograph):
    made = network("deit-256")
    torch.save(made.state_dict(), tmp_path / "net.pth")
    grid = made.pos_embed.data[:, 1:].reshape(1, 6, 6, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(4, 4), mode="bilinear").permute(0, 2, 3, 1).reshape(1, 16, -1)
    made.pos_embed.data = torch.cat([made.pos_embed.data[:, :1], grid], 1)
    pixels = torch.from_numpy(normalised(photograph, 64).transpose(2, 0, 1).copy())[None]
    params = dynamicvit.Params(
        "deit-256", 64, 16, 1, image=photograph, gate="predictor", weights=str(tmp_path / "net.pth")
    )
    np.testing.assert_array_equal(dynamicvit.keep(params), [0, *(1 + made.keep(pixels, [11]))])


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_the_gate_with_weights_measures_the_embeddings_of_the_checkpoint(tmp_path, photograph, suffix, prefix):
    weight, bias = torch.randn(8, 3, 16, 16), torch.randn(8)
    state, path = {"patch_embed.proj.weight": weight, "patch_embed.proj.bias": bias}, tmp_path / f"net.{suffix}"
    state = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    torch.save(state, path) if suffix == "pth" else save_file(state, path)
    params = dynamicvit.Params("deit-s", 96, 16, 1, image=photograph, weights=str(path))
    embedded = torch.from_numpy(patches_of(photograph, 6, 16)).flatten(1) @ weight.flatten(1).T + bias
    wanted = embedded.norm(dim=1).argsort(descending=True)[:25]
    assert _gates.kept(params).tolist() == wanted.tolist()
    assert _gates.describe(params)["embedding"] == "of the checkpoint"


EMBEDDING = {"patch_embed.proj.weight": torch.zeros(384, 3, 8, 8), "patch_embed.proj.bias": torch.zeros(384)}
HEAD = {"head.weight": torch.zeros(7, 384), "head.bias": torch.zeros(7)}


@pytest.mark.parametrize(
    ("state", "more", "error", "message"),
    [
        pytest.param(HEAD, {}, ArtifactError, "found no 'patch_embed.proj.weight'", id="other"),
        pytest.param(EMBEDDING, {}, ConfigError, "expected a patch of 8 pixels, found 16", id="patch"),
        pytest.param({"patch_embed.conv1.weight": torch.zeros(1)}, {}, ConfigError, "four convolutions", id="l2-lvvit"),
        pytest.param(HEAD, {"gate": "predictor"}, ArtifactError, "found no 'cls_token'", id="predictor-other"),
        pytest.param(
            {"cls_token": torch.zeros(1, 1, 384), **EMBEDDING},
            {"gate": "predictor"},
            ConfigError,
            "expected a patch of 8 pixels, found 16",
            id="predictor-patch",
        ),
        pytest.param(
            {"cls_token": torch.zeros(1, 1, 384), **EMBEDDING, **HEAD},
            {"gate": "predictor", "patch": 8},
            ArtifactError,
            r"net.pth: not a checkpoint of this network: \d+ missing: pos_embed",
            id="predictor-incomplete",
        ),
        pytest.param(
            {"cls_token": torch.zeros(1, 1, 768)},
            {"gate": "predictor"},
            ConfigError,
            "expected a width of 384 for deit-s, found 768",
            id="predictor-width",
        ),
        pytest.param(
            {"patch_embed.conv1.weight": torch.zeros(1)},
            {"gate": "predictor"},
            ConfigError,
            "expected a checkpoint of deit-s, found one of LV-ViT",
            id="predictor-family",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path, photograph, state, more, error, message):
    path = tmp_path / "net.pth"
    torch.save({"model": state}, path)
    with pytest.raises(error, match=message):
        masks.build("dynamicvit-s-96", {"image": photograph, "weights": str(path), **more})


# ----------------------------------------------------------------------------------------------- file


def test_a_mask_of_the_users(tmp_path):
    mask = np.random.default_rng(0).random((5, 7)) < 0.5
    np.save(tmp_path / "m.npy", mask)
    graph = masks.build("file-mine", {"path": str(tmp_path / "m.npy"), "heads": 3})
    np.testing.assert_array_equal(graph.to_dense(), mask)
    assert {"model": "file-mine", "family": "file", "heads": 3, "head_dim": 64}.items() <= graph.meta.items()


@pytest.mark.parametrize("form", ["to_dense", "to_sparse_coo", "to_sparse_csr"])
def test_a_mask_in_a_tensor(tmp_path, form):
    mask = torch.from_numpy(np.random.default_rng(0).random((5, 7)) < 0.5)
    tensor = mask if form == "to_dense" else getattr(mask.float(), form)()
    torch.save(tensor, tmp_path / "m.pt")
    graph = masks.build("file-mine", {"path": str(tmp_path / "m.pt")})
    np.testing.assert_array_equal(graph.to_dense(), mask)


class Foreign:
    """What a file of tensors may not hold."""


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"mask": torch.zeros(2, 2)}, ArtifactError, r"m\.pt: expected a file of one tensor, found dict"),
        (Foreign(), ArtifactError, r"m\.pt: expected a file of one tensor, found others, or damage: Weights only load"),
        (
            torch.zeros(2, 2, 2).to_sparse_coo(),
            PatternError,
            r"tensor \[N_q, N_k\], found shape \(2, 2, 2\)",
        ),
        (None, ArtifactError, r"m\.pt: expected a "),
    ],
)
def test_a_wrong_file_of_a_tensor_is_named(tmp_path, content, error, message):
    path = tmp_path / "m.pt"
    torch.save(content, path)
    if content is None:
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(error, match=message):
        masks.build("file-mine", {"path": str(path)})


def test_a_graph_file_brings_its_hints(tmp_path):
    graph_file.save(tmp_path / "g.npz", masks.build("vil-tiny-32-s1"))
    graph = masks.build("file-again", {"path": str(tmp_path / "g.npz")})
    assert graph.id == masks.build("vil-tiny-32-s1").id
    assert graph.row_hint is not None
    assert graph.meta["bias"] is None


def test_a_reordered_graph_is_no_model(tmp_path):
    graph = masks.build("vil-tiny-32-s1")
    order = np.arange(graph.n_rows)[::-1]
    graph_file.save(tmp_path / "g.npz", graph.reordered(order, order))
    with pytest.raises(PatternError, match=r"g\.npz: expected a pattern in its natural order"):
        masks.build("file-again", {"path": str(tmp_path / "g.npz")})


# ---------------------------------------------------------------------------------------------- stage


def test_sources_are_the_users_files(photograph):
    def sources(name, overrides=None):
        module, params = masks.parse(name, overrides)
        return masks.sources(module, params)

    assert sources("vil-tiny-224-s1") == sources("regionvit-tiny-224-s1") == sources("dynamicvit-s-224") == []
    assert sources("dynamicvit-s-224", {"image": photograph, "weights": "w.pth"}) == [photograph, "w.pth"]
    assert sources("file-mine", {"path": "m.npy"}) == ["m.npy"]


@pytest.mark.parametrize(
    "name",
    [
        "vil-tiny-224-s1",
        "vil-tiny-224-s2-exact",
        "vil-tiny-128-s1-cyclic",
        "vil-tiny-224-s3",
        "vil-tiny-224-s4",
        "regionvit-tiny-224-s1",
        "regionvit-tiny-100-s1",
        "regionvit-tiny-224-s1-windows",
        "dynamicvit-s-224",
        "dynamicvit-s-96-b1",
    ],
)
def test_the_size_is_known_before_the_graph(name):
    graph = masks.build(name)
    assert masks.size(name) == graph.n_rows + len(graph.indices)


def test_the_size_of_a_file_is_that_on_disk(tmp_path):
    np.save(tmp_path / "m.npy", np.eye(4, dtype=bool))
    assert masks.size("file-mine", {"path": str(tmp_path / "m.npy")}) == (tmp_path / "m.npy").stat().st_size
    with pytest.raises(ArtifactError, match="expected a mask, found No such file"):
        masks.size("file-mine", {"path": str(tmp_path / "absent.npy")})


def test_the_stage_writes_a_graph_and_what_made_it(tmp_path, photograph, capsys):
    out = tmp_path / "A.npz"
    graph_stage.run("dynamicvit-s-96", out, [f"image={photograph}", "keep_ratio=0.5", "patch=8"])
    assert (
        graph_file.load(out).id
        == masks.build("dynamicvit-s-96", {"image": photograph, "keep_ratio": 0.5, "patch": 8}).id
    )
    with np.load(out) as archive:
        made_by = json.loads(bytes(archive["tilewright"]))["made_by"]
    assert made_by["parameters"]["keep_ratio"] == 0.5
    assert list(made_by["inputs"]) == [photograph]
    assert "dynamicvit-s-96: 145 x 145 tokens" in capsys.readouterr().out


def test_the_stage_lists_what_is_known(capsys):
    graph_stage.run(None, None, [], known=True)
    shown = capsys.readouterr().out
    assert all(module.NAMING in shown for module in (vision_longformer, regionvit, dynamicvit, file))
    assert all(name in shown for name in images.PHOTOGRAPHS)


@pytest.mark.parametrize(
    ("output", "settings_", "message"),
    [
        pytest.param(None, [], "--output: expected the graph file", id="no-output"),
        pytest.param("A.npz", ["window"], "--set window: expected KEY=VALUE", id="no-value"),
        pytest.param("A.npz", ["=3"], "--set =3: expected KEY=VALUE", id="no-key"),
        pytest.param("A.npz", ["window=[3"], r"--set window=\[3: expected a YAML value", id="not-yaml"),
    ],
)
def test_the_stage_names_a_wrong_flag(tmp_path, output, settings_, message):
    with pytest.raises(ConfigError, match=message):
        graph_stage.run("vil-tiny-32-s1", output and tmp_path / output, settings_)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_fails_in_one_line_and_writes_nothing(tmp_path):
    done = run_script(SCRIPT, "--model", "vil-tiny-224", "--output", tmp_path / "A.npz")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown workload 'vil-tiny-224'; known: vil-")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_importing_the_models_stays_light():
    code = "import sys; from tilewright import masks; masks.members(); masks.parse('vil-tiny-224-s1');"
    code += "print([m for m in ('torch', 'scipy', 'skimage', 'PIL', 'numba', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
