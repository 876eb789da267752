"""NATTEN's functions and modules by Tilewright: against the oracle, and against NATTEN's own where that is installed.

NATTEN answers here by FlexAttention, which on a CPU has no gradients.
"""

import functools
import inspect
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import reference
from tilewright.core.errors import TilewrightError
from tilewright.integrations import natten as ours

FUNCTIONS = [ours.na1d, ours.na2d, ours.na3d]
MODULES = [ours.NeighborhoodAttention1D, ours.NeighborhoodAttention2D, ours.NeighborhoodAttention3D]


@pytest.fixture(scope="module")
def theirs():
    module = pytest.importorskip("natten", reason="NATTEN is not installed", exc_type=ImportError)
    with pytest.MonkeyPatch.context() as patch:
        # It compiles the merge of results otherwise, in seconds for each shape.
        merge = functools.partial(module.functional.merge_attentions, torch_compile=False)
        patch.setattr(module.functional, "merge_attentions", merge)
        yield module


@st.composite
def calls(draw, least=2):
    """``(grid, windows by name)``. Windows of NATTEN have `least` tokens or more."""
    axes = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(least, 8))
        dilation = draw(st.integers(1, length // least))
        window = draw(st.integers(least, length // dilation))
        axes.append((length, window, draw(st.integers(1, window)), dilation, draw(st.booleans())))
    grid, *windows = zip(*axes, strict=True)
    return grid, dict(zip(("kernel_size", "stride", "dilation", "is_causal"), windows, strict=True))


def tensors(grid, *, heads=(2, 2), dims=(16, 16), extra=0):
    """q, k, v, and additional keys and values or None."""
    random = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    (h, kv), (d, dv) = heads, dims
    more = (random(2, extra, kv, d), random(2, extra, kv, dv)) if extra else (None, None)
    return random(2, *grid, h, d), random(2, *grid, kv, d), random(2, *grid, kv, dv), *more


def oracle(q, k, v, more_keys, more_values, windows, scale=None):
    arguments = {"stride": windows["stride"], "dilation": windows["dilation"], "causal": windows["is_causal"]}
    extra = None if more_keys is None else (more_keys, more_values)
    return reference.neighborhood(q, k, v, windows["kernel_size"], scale=scale, extra=extra, **arguments)


def close(found, expected):
    return all(torch.allclose(x.double(), y.double(), atol=1e-5) for x, y in zip(found, expected, strict=True))


HEADS = st.sampled_from([(2, 2), (4, 2), (3, 1)])


@settings(max_examples=25)
@given(call=calls(), heads=HEADS, dims=st.sampled_from([(16, 16), (8, 24)]), extra=st.integers(0, 3))
def test_functions_are_the_oracle(call, heads, dims, extra):
    grid, windows = call
    *qkv, more_keys, more_values = tensors(grid, heads=heads, dims=dims, extra=extra)
    found = FUNCTIONS[len(grid) - 1](
        *qkv, **windows, scale=0.3, additional_keys=more_keys, additional_values=more_values, return_lse=True
    )
    assert [x.dtype for x in found] == [torch.float32] * 2 and found[1].shape == found[0].shape[:-1]
    assert close(found, oracle(*qkv, more_keys, more_values, windows, 0.3))


@settings(max_examples=10)
@given(call=calls(), heads=HEADS, extra=st.integers(0, 3))
def test_functions_are_those_of_natten(theirs, call, heads, extra):
    grid, windows = call
    if len(grid) == 1 and windows["kernel_size"] == grid:
        # NATTEN's FlexAttention has no causal form of the whole sequence.
        windows["is_causal"] = (False,)
    *qkv, more_keys, more_values = tensors(grid, heads=heads, extra=extra)
    arguments = {"additional_keys": more_keys, "additional_values": more_values, "return_lse": True, **windows}
    name = f"na{len(grid)}d"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = getattr(theirs, name)(*qkv, **arguments)
    found = getattr(ours, name)(*qkv, **arguments)
    assert [x.dtype for x in found] == [x.dtype for x in expected] and close(found, expected)


def test_one_number_is_that_of_all_axes_and_none_the_default():
    qkv = tensors((6, 7))[:3]
    assert torch.equal(ours.na2d(*qkv, 3), ours.na2d(*qkv, (3, 3), 1, 1, False, 0.25))
    assert torch.equal(ours.na2d(*qkv, 3), ours.na2d(*qkv, [3, 3], None, None, None, 0))
    assert torch.equal(ours.na2d(*qkv, 3, 2, 2, True), ours.na2d(*qkv, 3, (2, 2), (2, 2), (True, True)))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_signatures_are_those_of_natten(theirs, axes):
    own, other = (inspect.signature(getattr(module, f"na{axes}d")).parameters for module in (ours, theirs))
    stated = [name for name in own if name != "tuning"]
    assert {*other} == {*stated, *ours.Tuning.__annotations__}
    # By position, too, up to what chooses kernels.
    assert stated == [name for name in other if name in stated]
    assert all(own[name].default == other[name].default for name in stated)
    assert {name: ours.DEFAULTS.get(name) for name in ours.Tuning.__annotations__} == {
        name: other[name].default for name in ours.Tuning.__annotations__
    }
    own, other = (
        inspect.signature(getattr(module, f"NeighborhoodAttention{axes}D")).parameters for module in (ours, theirs)
    )
    assert [(p.name, p.default) for p in own.values()] == [(p.name, p.default) for p in other.values()]


def test_tuning_changes_nothing_and_a_warning_says_so_once():
    qkv, tuning = tensors((6, 6))[:3], {"backend": "cutlass-fna", "q_tile_shape": (4, 4), "torch_compile": False}
    expected = ours.na2d(*qkv, 3)
    ours._WARNED.clear()
    with pytest.warns(UserWarning, match="without effect: backend, q_tile_shape$") as told:
        for _ in range(2):
            assert torch.equal(ours.na2d(*qkv, 3, **tuning), expected)
    assert [each.filename for each in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.na2d(*qkv, 3, backend=None, run_persistent_kernel=True, attention_kwargs=None)
    with pytest.raises(TypeError, match=r"na2d\(\) got an unexpected keyword argument 'rpb'"):
        ours.na2d(*qkv, 3, rpb=None)


@pytest.mark.filterwarnings("ignore:Tilewright chooses its own tiles")
def test_a_call_with_tuning_compiles_into_one_graph():
    qkv = tensors((6, 6))[:3]
    call = functools.partial(ours.na2d, kernel_size=3, backend="flex-fna", return_lse=True)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert all(map(torch.equal, compiled(*qkv), call(*qkv)))


BAD = {
    "a window beyond the grid": {"kernel_size": 7},
    "a dilated window beyond the grid": {"kernel_size": 3, "dilation": (1, 3)},
    "a stride beyond the window": {"kernel_size": 3, "stride": 4},
    "a stride of 0": {"kernel_size": 3, "stride": 0},
    "a window of other axes": {"kernel_size": (3, 3, 3)},
    "a window that is no number": {"kernel_size": 3.0},
    "a dilation that is no number": {"kernel_size": 3, "dilation": "2"},
    "causal that is no bool": {"kernel_size": 3, "is_causal": (1, 0)},
    "additional keys alone": {"kernel_size": 3, "additional_keys": torch.ones(2, 3, 2, 16)},
    "additional values of other heads": {
        "kernel_size": 3,
        "additional_keys": torch.ones(2, 3, 2, 16),
        "additional_values": torch.ones(2, 3, 1, 16),
    },
    "additional tokens of another head dim": {
        "kernel_size": 3,
        "additional_keys": torch.ones(2, 3, 2, 8),
        "additional_values": torch.ones(2, 3, 2, 16),
    },
    "additional keys and values of different numbers": {
        "kernel_size": 3,
        "additional_keys": torch.ones(2, 3, 2, 16),
        "additional_values": torch.ones(2, 4, 2, 16),
    },
    "keys of another type": {"kernel_size": 3, "key": torch.ones(2, 6, 6, 2, 16, dtype=torch.bfloat16)},
    "keys of another grid": {"kernel_size": 3, "key": torch.ones(2, 6, 5, 2, 16)},
    "keys of another batch": {"kernel_size": 3, "key": torch.ones(1, 6, 6, 2, 16)},
    "keys of another head dim": {"kernel_size": 3, "key": torch.ones(2, 6, 6, 2, 8)},
    "values of other heads": {"kernel_size": 3, "value": torch.ones(2, 6, 6, 1, 16)},
    "heads that do not divide": {
        "kernel_size": 3,
        **dict.fromkeys(("key", "value"), torch.ones(2, 6, 6, 4, 16)),
    },
    "a query of another rank": {"kernel_size": 3, "query": torch.ones(2, 6, 2, 16)},
}


def bad(arguments):
    return dict(zip(("query", "key", "value"), tensors((6, 6)), strict=False)) | arguments


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_what_natten_refuses_is_refused(arguments):
    with pytest.raises(TilewrightError, match=r"^[^\n]+$"):
        ours.na2d(**bad(arguments))


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_natten_refuses_it(theirs, arguments):
    with pytest.raises((ValueError, NotImplementedError)):
        theirs.na2d(**bad(arguments))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_modules_load_each_other_s_weights_and_answer_the_same(theirs, axes):
    arguments = {"embed_dim": 32, "num_heads": 2, "kernel_size": 3, "stride": 2, "dilation": 2, "qkv_bias": axes > 1}
    arguments |= {"is_causal": tuple(axis == 0 for axis in range(axes)), "qk_scale": 0.4}
    torch.manual_seed(axes)
    own, other = (getattr(module, f"NeighborhoodAttention{axes}D")(**arguments) for module in (ours, theirs))
    x = torch.randn(2, *(7, 6, 8)[:axes], 32)
    own.load_state_dict(other.state_dict())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.allclose(own(x), other(x), atol=1e-5)
    torch.nn.init.normal_(own.qkv.weight)
    other.load_state_dict(own.state_dict())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.allclose(own(x), other(x), atol=1e-5)
    same = ("embed_dim", "num_heads", "head_dim", "scale", "kernel_size", "stride", "dilation", "is_causal", "na_dim")
    assert [getattr(own, name) for name in same] == [getattr(other, name) for name in same]
    assert repr(own) == repr(other)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_trains_with_the_gradients_of_the_oracle(module):
    torch.manual_seed(0)
    layer = module(32, 2, 3, stride=2)
    x = torch.randn(2, *(7, 6, 5)[: module.na_dim], 32, requires_grad=True)
    arguments = [x, *layer.parameters()]
    found = torch.autograd.grad(layer(x).square().sum(), arguments)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 16)).unbind(-3)
    windows = {"kernel_size": 3, "stride": 2, "dilation": 1, "is_causal": False}
    out = layer.proj(oracle(q, k, v, None, None, windows)[0].flatten(-2).float())
    expected = torch.autograd.grad(out.square().sum(), arguments)
    for mine, true in zip(found, expected, strict=True):
        assert (mine - true).norm() <= 1e-5 * true.norm()


def test_a_module_drops_in_training_alone():
    layer = ours.NeighborhoodAttention1D(16, 1, 3, proj_drop=1.0)
    x = torch.randn(1, 8, 16)
    assert not layer(x).any() and layer.eval()(x).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ours.NeighborhoodAttention2D(30, 4, 3), "num_heads: expected a divisor of embed_dim 30, found 4"),
        (lambda: ours.NeighborhoodAttention2D(32, 4, 3, stride=4), "stride: expected at most the window 3, found 4"),
        (lambda: ours.NeighborhoodAttention2D(32, 4, (3,)), "window: expected"),
        (lambda: ours.NeighborhoodAttention2D(32, 4, 3)(torch.ones(1, 8, 32)), "expected tokens"),
        (lambda: ours.NeighborhoodAttention2D(32, 4, 3)(torch.ones(1, 8, 8, 16)), "expected tokens"),
        (lambda: ours.NeighborhoodAttention2D(32, 4, 9)(torch.ones(1, 8, 8, 32)), "window: expected at most the 8"),
    ],
)
def test_a_module_refuses_what_does_not_fit(make, message):
    with pytest.raises(TilewrightError, match=message):
        make()
