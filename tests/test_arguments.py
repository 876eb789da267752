"""Every argument of the public interface × wrong values: one line that says what was expected, and no raw error."""

import inspect
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import tilewright as tw
from tilewright import masks, neighborhood, networks, nn, paths, slices
from tilewright.attention.masks import Bias
from tilewright.core.errors import TilewrightError, UnknownNameError
from tilewright.integrations import sdpa
from tilewright.networks import path
from tilewright.packed import pack
from tilewright.paths import runner

HEADS, DIM, N = 2, 8, 20
NAN, INF = float("nan"), float("inf")
ARRAY, NOTHING = np.ones((2, 3)), object()

# Wrong values of whole kinds of arguments. Where None is a value it is taken out.
HUGE, NESTED = 10**400, torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
TRAINED = Path(__file__).parents[1] / "expected/checkpoints/segformer-b0.sampled.safetensors"
COUNT = [0, -1, "2", 2.0, 1.5, NAN, True, None, [2], ARRAY, torch.ones(2), HUGE, 2**31, np.float64(2), torch.tensor(2)]
NUMBER = ["a", NAN, INF, 1j, [1.0], ARRAY, torch.ones(2), NOTHING, HUGE, 1e39, True, np.float32(NAN)]
SHARE = [*NUMBER, 0, -0.5, 1.5]
FLAG = ["yes", 2, [True], ARRAY]
TENSOR = ["a", 3, [1.0], ARRAY, None, NOTHING, NESTED]
NAME = ["other", 3, None, ("none",), ARRAY, NOTHING]
PAIR = ["ab", b"ab", 5, (1,), (1, 2, 3), (1.5, 2), ("a", "b"), None, ARRAY, np.array(3), (HUGE, HUGE)]
DEVICE = ["gpu", "cpu:x", 3.5, [], ARRAY, HUGE, "cuda:99"]
PATH = [3, None, "", "/", "none.plan", ARRAY, "a\0b", "x" * 5000, b"x"]


def given(*values):
    """Those of `values` that are not None, of an argument for which None is a value."""
    return [x for x in values if x is not None]


MASK = torch.eye(N, dtype=torch.bool)
WHOLE = torch.ones(HEADS, N, N)
BIASES = [
    *("a", 3, NOTHING, WHOLE[0], WHOLE[None], WHOLE[:, :3], WHOLE > 0, WHOLE.to(torch.complex64)),
    *(WHOLE * INF, WHOLE * NAN, Bias(WHOLE[:, 0], 3), Bias(WHOLE, lambda r, c: 0 * r), Bias("a", lambda r, c: 0 * r)),
    *(np.array(["a"]), NESTED),
    *(Bias(WHOLE[0], lambda r, c: 0 * r), Bias(WHOLE[:, 0] * NAN, lambda r, c: 0 * r)),
]
INDICES = [
    Bias(WHOLE[:, 0], index) for index in (lambda r, c: r + c + N, lambda r, c: r / 2, lambda r, c: {}[0], lambda r: r)
]


def make_plan(pattern=MASK, **options):
    return tw.plan(pattern, **{"heads": HEADS, "head_dim": DIM, "solver": "greedy", **options})


PLAN = {
    "pattern": [
        *(
            "none.npy",
            3,
            None,
            NOTHING,
            {},
            [],
            np.ones(3),
            np.ones((2, 0)),
            MASK * 2,
            MASK.float().log(),
            MASK.half() * NAN,
            MASK.to("meta"),
            NESTED,
            "x" * 5000,
        ),
        *(torch.stack([MASK] * 3), torch.stack([MASK] * 4).view(2, 1, 2, N, N), [MASK] * 3, lambda b, h, q, k: q >= k),
        *(np.array([["a", "b"]]), MASK.to(torch.complex64), torch.zeros(N, N)),
    ],
    "heads": COUNT,
    "head_dim": COUNT,
    "dtype": ["float32", torch.float64, torch.int8, None, float, ARRAY],
    "device": [*DEVICE, None],
    "reorder": NAME,
    "tiles": ["64x1", (), (3,), ("64",), 5, ("64x1", None), ("48x1",), ARRAY],
    "solver": NAME,
    "bias": [*BIASES, *INDICES],
    "scale": NUMBER,
    "shape": [*given(*PAIR), (N, N + 1)],
    "split_keys": [0, -1, 1.5, "a", b"a", (), (64, 0), (64, "a"), NAN, ARRAY, HUGE],
    "region_rows": COUNT,
    "time_limit_s": [*NUMBER, 0, -1, None],
    "seed": [-1, "a", 1.5, None, ARRAY, 2**64],
    "by": NAME,
    "images": given(*COUNT),
}

Q = torch.randn(1, HEADS, N, DIM)
QS = [*TENSOR, Q[0], Q[:, :1], Q[..., :3], Q.double(), Q.long(), Q.to_sparse(), Q.to("meta"), torch.tensor(1.0)]

KEEP = torch.ones(3, 5, dtype=torch.bool)
TOKENS, PACKED = torch.randn(3, 5, 4), torch.randn(15, 4)
ROWS = torch.randn(15, 2, 8)
PACKING = pack.pack(KEEP)
X = [*TENSOR, torch.tensor(1.0), torch.randn(3)]
PROJECTED = torch.randn(1, N, 3 * HEADS * DIM)

S = torch.randn(1, 1, 128, 64)
LISTS = slices.predict(S, S, budget=1.0, keep=0.5)
G = torch.randn(1, 6, 7, 2, 8)
GS = [*TENSOR, G[0], G[..., :0], G[:, :, :, :0], G.double(), G.long(), G.to_sparse(), torch.tensor(1.0), NESTED]
SQ = [*TENSOR, S[0], S[..., :3], S.double(), torch.tensor(1.0), S[:, :, :0]]
OPTIONS = {
    "rows": [*COUNT, 24, 8, 256],
    "budget": [*SHARE, None],
    "width": [*COUNT, 3],
    "text": [*PAIR, (-1, 0), (128, 0)],
}
LENGTHS = [*given(*TENSOR), torch.ones(3, dtype=torch.int32), torch.ones(1)]
STEPS = slices.Steps((0,), budget=1.0, keep=0.5)

LAYER = partial(nn.SparseAttention, **{"dim": 16, "heads": 2, "pattern": "window-3-g1", "grid": (4, 5)})


# By name: the callable, arguments that are right, and wrong values of each parameter.
TABLE = {
    "plan": (make_plan, {}, PLAN),
    "load": (tw.load, {}, {"path": PATH}),
    "Plan.__call__": (
        make_plan(bias=torch.zeros(HEADS, N, N)),
        {"q": Q, "k": Q, "v": Q},
        {
            "q": QS,
            "k": QS,
            "v": QS,
            "ordered": ["x", 2, None, [], {}, ARRAY],
            "bias": [*given(*TENSOR), WHOLE[0], WHOLE.long()],
        },
    ),
    "Plan.of_projection": (
        make_plan().of_projection,
        {"x": PROJECTED},
        {
            "x": [*TENSOR, PROJECTED[0], PROJECTED[..., :-1], PROJECTED.double(), NESTED],
            "ordered": ["x", 2, None, [], {}, ARRAY],
        },
    ),
    "Plan.with_bias": (make_plan().with_bias, {}, {"bias": [*BIASES, *INDICES]}),
    "Plan.save": (make_plan().save, {}, {"path": [3, None, "", "/", "/dev/null/x.plan", ARRAY, "a\0b", "x" * 5000]}),
    "ragged.pack": (
        pack.pack,
        {"keep": KEEP},
        {
            "keep": [*TENSOR, KEEP[0], KEEP.int(), KEEP[:, :0], KEEP.to("meta"), ~KEEP],
            "capacity": given(*COUNT),
            "tokens": [*given(*TENSOR), TOKENS[0], TOKENS[:2], TOKENS.to("meta")],
            "rows": [*given(*COUNT), 8, 24],
            "origin": ["a", 3, KEEP, PACKING],
        },
    ),
    "ragged.pack_lengths": (
        pack.pack_lengths,
        {"lengths": [3, 2]},
        {
            "lengths": ["a", 3, None, [], [1.5], ["a"], [0, 1], [-1], [[1]], [True], ARRAY, NOTHING],
            "capacity": [*given(*COUNT), 4],
            "tokens": [*given(*TENSOR), TOKENS[0], TOKENS[:1]],
            "rows": [*given(*COUNT), 8, 24],
        },
    ),
    "ragged.differentiates": (pack.differentiates, {}, {"device": [*DEVICE[:-1], None, "meta"]}),
    "Packing.gather": (PACKING.gather, {}, {"x": [*X, TOKENS[:2]]}),
    "Packing.scatter": (
        PACKING.scatter,
        {"x": PACKED},
        {"x": [*X, PACKED[:3]], "fill": ["a", 1, 0.5, None, [], TOKENS[:2]]},
    ),
    "Packing.first": (PACKING.first, {}, {"x": [*X, PACKED[:3]]}),
    "Packing.pad": (PACKING.pad, {"x": PACKED, "length": 5}, {"x": [*X, PACKED[:3]], "length": [*COUNT, 4]}),
    "Packing.attend": (
        PACKING.attend,
        {"q": ROWS, "k": ROWS, "v": ROWS},
        {
            **{name: [*X, ROWS[:3], ROWS.long(), ROWS[:, 0]] for name in "qkv"},
            "out": [*given(*TENSOR), torch.eye(3).to_sparse_csr(), ROWS[:3], ROWS.double(), ROWS],
        },
    ),
    "neighborhood.attend": (
        neighborhood.attend,
        {"q": G, "k": G, "v": G, "window": 3},
        {
            **dict.fromkeys("qkv", GS),
            "window": [*COUNT, (3,), (3, 9), (3.0, 3)],
            "stride": [*COUNT, 4],
            "dilation": [*COUNT, 3],
            "causal": ["a", None, 2, (True,), (1, 0), ARRAY],
            "border": NAME,
            "scale": NUMBER,
            "bound": NUMBER,
            "extra": ["a", 3, [], G, (G, G), (None, None), (G[:, 0], None), (G[:, 0], G[:, 0].double())],
            "lse": [*FLAG, None],
        },
    ),
    "neighborhood.plan": (
        neighborhood.plan,
        {"grid": (6, 7), "window": 3, "heads": 2, "head_dim": 8},
        {
            "grid": [*COUNT, (), (6, 0), (6, 7, 8, 9), (2**40, 2**40)],
            "window": [*COUNT, (3,), (3, 9)],
            "heads": COUNT,
            "head_dim": COUNT,
            "dtype": PLAN["dtype"],
            "device": DEVICE,
            "stride": [*COUNT, 4],
            "dilation": [*COUNT, 3],
            "causal": ["a", None, 2, (True,), ARRAY],
            "border": NAME,
            "kv_heads": [*given(*COUNT), 3],
            "scale": NUMBER,
            "bound": NUMBER,
        },
    ),
    "slices.attend": (
        slices.attend,
        {"q": S, "k": S, "v": S, "lists": LISTS},
        {
            **dict.fromkeys("qkv", SQ),
            "lists": ["a", 3, None, S, NOTHING],
            "scale": [*NUMBER, 0, -1],
            "bound": NUMBER,
            "lse": [*FLAG, None],
            "out": [*given(*TENSOR), S[0], S.double(), S],
        },
    ),
    "slices.dense": (
        slices.dense,
        {"q": S, "k": S, "v": S},
        {**dict.fromkeys("qkv", SQ), "scale": [*NUMBER, 0, -1], "lengths": LENGTHS},
    ),
    "slices.from_indices": (
        slices.from_indices,
        {"keys": LISTS.keys, "counts": LISTS.counts, "shape": (128, 128)},
        {
            "keys": [*TENSOR, LISTS.keys[0], LISTS.keys.float(), LISTS.keys.expand(1, 1, 3, -1)],
            "counts": [*TENSOR, LISTS.counts[0], LISTS.counts.float()],
            "shape": [*PAIR, (0, 128)],
            "rows": OPTIONS["rows"],
            "width": OPTIONS["width"],
            "text": OPTIONS["text"],
            "check": [*FLAG, None],
        },
    ),
    "slices.from_mask": (
        slices.from_mask,
        {"mask": torch.ones(1, 1, 1, 128, dtype=torch.bool), "queries": 128},
        {
            "mask": [
                *TENSOR,
                torch.ones(1, 1, 1, 128),
                torch.ones(1, 128, dtype=torch.bool),
                torch.ones(1, 1, 3, 128) > 0,
            ],
            "queries": COUNT,
            "batch": given(*COUNT),
            "heads": given(*COUNT),
            **OPTIONS,
        },
    ),
    "slices.from_mask_mod": (
        slices.from_mask_mod,
        {"mask_mod": lambda b, h, q, k: q >= k, "shape": (128, 128)},
        {
            "mask_mod": ["a", 3, None, S, lambda b: b, lambda b, h, q, k: (q - k).float(), lambda b, h, q, k: None],
            "shape": [*PAIR, (0, 128)],
            "batch": COUNT,
            "heads": COUNT,
            **OPTIONS,
            "device": DEVICE,
        },
    ),
    "slices.make_layout": (
        slices.make_layout,
        {"batch": 1, "heads": 1, "queries": 128, "keys": 128},
        {**dict.fromkeys(("batch", "heads", "queries", "keys"), COUNT), **OPTIONS},
    ),
    "slices.merge": (
        lambda parts: slices.merge(*parts),
        {},
        {"parts": [[], [3], ["ab"], [S], [(S, S)], [(S, None)], [(S, S[..., 0]), (S[:, :, :3], S[:, :, :3, 0])]]},
    ),
    "slices.predict": (
        slices.predict,
        {"q": S, "k": S, "budget": 1.0, "keep": 0.5},
        {
            **dict.fromkeys("qk", SQ),
            **OPTIONS,
            "by": NAME,
            "mass": SHARE,
            "keep": [*(x for x in SHARE if x is not SHARE[4]), (0.5, 0.5), [0.0], None],
            "threshold": SHARE,
            "always": ["a", 3, np.array(3), [3], [(1,)], [(5, 3)], [(0, 500)], [("a", "b")], [(-1, 3)], None],
            "lengths": LENGTHS,
            "least": [-1, "a", 1.5, ARRAY],
            "lse": [*given(*TENSOR), S, S[..., 0]],
            "mask": [*given(*TENSOR), S, S > 0, lambda b, h, q, k: q >= k],
            "scale": [*NUMBER, 0, -1],
        },
    ),
    "slices.recall": (
        slices.recall,
        {"q": S, "k": S, "lists": LISTS},
        {
            **dict.fromkeys("qk", SQ),
            "lists": ["a", 3, None, S],
            "scale": [*NUMBER, 0, -1],
            "lse": [*given(*TENSOR), S, torch.ones(3)],
        },
    ),
    "slices.rest": (
        slices.rest,
        {"q": S, "k": S, "v": S, "lists": LISTS},
        {**dict.fromkeys("qkv", SQ), "lists": ["a", 3, None, S], "scale": [*NUMBER, 0, -1]},
    ),
    "slices.unpack": (
        slices.unpack,
        {"bits": LISTS.pack(), "layout": LISTS.layout},
        {"bits": [*TENSOR, S, LISTS.pack()[0]], "layout": ["a", 3, None, (1, 2), S], "lengths": LENGTHS},
    ),
    "slices.Steps": (
        slices.Steps,
        {"refresh": (0,)},
        {
            "refresh": ["a", b"a", 3, None, np.array(3), (), (-1,), (1.5,), ("a",)],
            "first_dense": [-1, "a", 1.5, None],
            "dense_layers": [-1, "a", 1.5, None],
            "shared": ["a", 3, [1], {"a": "b", "b": "c"}],
            "budgets": [3, "", ARRAY],
            "packed": [*FLAG, None],
            "delta": [*FLAG, None],
            "rest": [*FLAG, None],
            "joins": [*FLAG, None],
            "most_bytes": [-1, "a", 1.5],
            "predict": ["a", 3],
        },
    ),
    "models.parse": (
        masks.parse,
        {"name": "vil-tiny-224-s1"},
        {"name": NAME, "overrides": ["a", 3, {"x": 1}, {"variant": "s"}]},
    ),
    "models.build": (
        masks.build,
        {"name": "vil-tiny-224-s1"},
        {"name": NAME, "overrides": ["a", 3, {"x": 1}, {"stage": 9}]},
    ),
    "models.size": (
        masks.size,
        {"name": "vil-tiny-224-s1"},
        {"name": NAME, "overrides": ["a", 3, {"x": 1}, {"window": "a"}]},
    ),
    "models.modules": (
        masks.modules,
        {"name": "vil-tiny-224-s1"},
        {"name": NAME, "overrides": ["a", 3, {"x": 1}, {"mode": 3}]},
    ),
    "networks.from_checkpoint": (
        networks.from_checkpoint,
        {"path": TRAINED, "image_size": 32},
        {
            "path": PATH,
            "image_size": [0, -1, "a", 1.5, (1, 2, 3), None, 2**31],
            "attention": given(*NAME),
        },
    ),
    "networks.create": (
        lambda family="vision_longformer", variant="tiny", **each: networks.create(family, variant=variant, **each),
        {"image_size": 32},
        {
            "family": NAME,
            "variant": ["s", 3, None],
            "image_size": [0, -1, "a", 1.5, (1, 2, 3), None, 2**31, HUGE],
            "checkpoint": [3, "none.pth", ARRAY],
            "attention": given(*NAME),
            "plans": ["a", 3, {"x": 1}],
            "batching": ["padded", 3],
            "seed": [-1, "a", 1.5, None],
            "position": ["x", 3],
        },
    ),
    "nn.SparseAttention": (
        LAYER,
        {},
        {
            "dim": [*COUNT, 15],
            "heads": [*COUNT, 3],
            "pattern": [
                *("x", 3, None, NOTHING, torch.ones(3, 3), lambda grid, special: 3, "window-4-g1"),
                *(np.float32(3), torch.tensor(3), NESTED, MASK.to("meta"), lambda grid, special: 1 // 0),
            ],
            "grid": [*PAIR, (0, 5), (65536, 65536)],
            "special": [-1, "a", 1.5, 5, ARRAY],
            **{name: [*FLAG, None] for name in ("qkv_bias", "qk_norm", "proj_bias", "bias")},
            "norm_layer": ["a", 3],
            "scale": NUMBER,
            "plans": ["a", 3, {"reorder": "none"}],
            "device": DEVICE,
            "dtype": ["float32", 3, ARRAY, torch.int32, torch.float8_e4m3fn],
        },
    ),
}

NETWORK = networks.create("segformer", variant="b0", image_size=32)
ENTRY = {"network": "", "checkpoint": "", "device": "", "dtype": "", "rung": "trained", "path": "2.2.2.2"}
ROUTES = paths.Table([paths.table.Entry(**ENTRY, batch=1, macs=1, p50_us=1.0, promise_us=1.0)])
PIXELS = torch.randn(1, 3, 32, 32)
# What paths take, and networks in a call.
TAKING_PATHS = {
    "path.Path": (
        lambda **fields: NETWORK.path(path.Path(**fields)),
        {"blocks": ("11",) * 4},
        {
            "blocks": [3, None, (), "11", ("11",), ("12",) * 4, (1, 2, 3, 4), ARRAY],
            "levels": [3, None, "", "41", ("1", "2")],
            "scale": [*SHARE, None],
            "decoder": NAME,
            **{name: ["64", 64, 64.0, True, -64, ARRAY] for name in ("fuse", "width")},
        },
    ),
    "network.path": (NETWORK.path, {}, {"path": [3, "", "2.2", "2.2.2.9", b"2.2.2.2", ["2.2.2.2"], ARRAY, NOTHING]}),
    "network": (NETWORK, {}, {"images": [*TENSOR, PIXELS[0], PIXELS.double(), PIXELS.long(), PIXELS.to("meta")]}),
    "paths.load": (paths.load, {}, {"path": PATH}),
    "paths.Table": (
        paths.Table,
        {"entries": ROUTES.rows},
        {"entries": [None, 3, "a", [], [3], ARRAY, NOTHING], "least": [*NUMBER, None]},
    ),
    "paths.Runner": (
        paths.Runner,
        {"network": NETWORK, "table": ROUTES},
        {"network": [None, 3, "a", NOTHING], "table": [None, 3, "a", [], ROUTES.rows], "batch": COUNT},
    ),
    "paths.FrameRunner": (
        lambda **given: paths.FrameRunner(**{"table": of_network(), **given}),
        {"networks": NETWORK, "frame": (32, 32)},
        {
            "networks": [None, 3, "a", [], [3], NOTHING],
            "table": [3, "a", [], ROUTES.rows],
            "frame": [None, 3, "a", (3,), (0, 3), (3.5, 3), ARRAY],
            "batch": [*COUNT, 2],
            "margin": [-1, "a", None, math.nan],
            "late": ["soon", 3, None],
            "late_share": [0, 1.5, "a", math.nan],
            "pixels": [3, "a", (3,), (31, 64), (64.5, 64)],
            **{name: [None, 3, "abc", (1, 2), (0, 0, math.inf), NOTHING] for name in ("mean", "std")},
        },
    ),
}


def of_network():
    """A table of `NETWORK` on this machine."""
    known = {**ENTRY, **runner.facts(NETWORK)}
    return paths.Table([paths.table.Entry(**known, batch=1, macs=1, p50_us=1.0, promise_us=1.0)])


# Behind the registered operator, or of what others of the interface have made.
INNER = {
    *("Plan.run", "Plan.gradients", "Plan.like_result", "Plan.check_backward"),
    *("models.sources", "slices.Layout", "slices.SliceLists", "slices.Budgets"),
    *("neighborhood.NeighborhoodPlan", "neighborhood.Rule"),
}


def own(outer, name):
    """``{name: callable}`` of the functions of a module, or the methods of a class, that are its own."""
    place = outer.__name__ if inspect.ismodule(outer) else outer.__module__
    functions = inspect.getmembers(outer, inspect.isfunction)
    return {f"{name}.{key}": x for key, x in functions if x.__module__ == place and not key.startswith("_")}


def public():
    """``{name in the table: names of parameters}`` of all that the public interface calls."""
    found = {"plan": tw.plan, "load": tw.load, "Plan.__call__": tw.Plan.__call__, **own(tw.Plan, "Plan")}
    found |= {**own(pack, "ragged"), **own(pack.Packing, "Packing"), **own(masks, "models")}
    found |= {"networks.create": networks.create, "networks.from_checkpoint": networks.from_checkpoint}
    for module, name in ((slices, "slices"), (nn, "nn"), (neighborhood, "neighborhood")):
        found |= {f"{name}.{key}": getattr(module, key) for key in module.__all__}
    parameters = {name: inspect.signature(x).parameters.values() for name, x in found.items() if name not in INNER}
    taken = {
        name: {p.name for p in each if p.kind is not p.VAR_KEYWORD and p.name != "self"}
        for name, each in parameters.items()
    }
    return {name: each for name, each in taken.items() if each}


def test_every_parameter_of_the_public_interface_has_a_row():
    taken = public()
    assert taken.keys() == TABLE.keys()
    for name, parameters in taken.items():
        assert not parameters - TABLE[name][2].keys(), name


@pytest.mark.parametrize("name", TABLE | TAKING_PATHS)
def test_a_wrong_argument_is_refused_in_one_line_where_it_enters(name, monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    call, right, rows = (TABLE | TAKING_PATHS)[name]
    missed = []
    for parameter, values in rows.items():
        for value in values:
            try:
                call(**{**right, parameter: value})
            except TilewrightError as error:
                # Names are listed, however many there are.
                long = len(str(error)) > 200 and not isinstance(error, UnknownNameError)
                if "\n" in str(error) or long:
                    missed.append(f"{parameter}={value!r:.50}: {str(error)!r}")
            except Exception as error:
                missed.append(f"{parameter}={value!r:.50}: {type(error).__name__} {error}"[:200])
            else:
                missed.append(f"{parameter}={value!r:.50}: accepted")
    assert not missed, "\n".join(missed)
    assert not list(tmp_path.glob("*.plan"))


# Calls by what makes them: with numbers as they are, and as NumPy's.
NUMBERS = {
    "neighborhood": lambda i, f: neighborhood.attend(G, G, G, (i(3), i(2)), stride=i(2), dilation=i(2), scale=f(0.5)),
    "neighborhood plan": lambda i, f: neighborhood.plan((i(6), i(7)), i(3), heads=i(2), head_dim=i(8))(G, G, G),
    "plan": lambda i, f: make_plan(heads=i(2), head_dim=i(8), scale=f(0.5), split_keys=i(64), seed=i(1))(Q, Q, Q),
    "mask_mod": lambda i, f: make_plan(lambda b, h, q, k: q >= k, shape=(i(N), i(N)), images=i(1))(Q, Q, Q),
    "pack": lambda i, f: pack.pack(KEEP, i(15), rows=i(16)).pad(PACKED, i(5)),
    "scatter": lambda i, f: PACKING.scatter(PACKED, i(0)),
    "pack_lengths": lambda i, f: pack.pack_lengths([i(3), i(2)]).source,
    "predict": lambda i, f: slices.predict(S, S, budget=f(0.75), keep=f(0.5), rows=i(64), pool=i(16)).counts,
    "always": lambda i, f: slices.predict(S, S, budget=1.0, keep=0.5, always=[(i(0), i(3))], text=(i(1), i(2))).counts,
    "random": lambda i, f: slices.predict(S, S, budget=1.0, keep=f(0.5), by="random", seed=i(3)).counts,
    "create": lambda i, f: networks.create("segformer", variant="b0", image_size=(i(32), i(32)), seed=i(1))(PIXELS),
    "build": lambda i, f: torch.tensor(masks.build("vil-tiny-64-s1", {"stage": i(2)}).shape),
    "layer": lambda i, f: torch.tensor(LAYER(dim=i(16), heads=i(2), grid=(i(4), i(5)), scale=f(0.5)).grid),
    "sdpa": lambda i, f: sdpa.Slices(tokens=i(128), keep=f(0.5), predictor={"pool": i(32)})(S, S, S),
    "path": lambda i, f: NETWORK(PIXELS, path.Path(("11",) * 4, scale=f(1))),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_are_numbers(name, monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    with torch.no_grad():
        assert torch.equal(NUMBERS[name](np.int64, np.float32), NUMBERS[name](int, float))
