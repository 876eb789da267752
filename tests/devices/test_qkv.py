import pytest
import torch

from tilewright.core.errors import DeviceError, PatternError
from tilewright.devices import qkv

PLANNED = {"shape": (20, 30), "heads": 2, "head_dim": 16, "dtype": torch.float32, "device": torch.device("cpu")}


def tensors(batch=3):
    return [torch.randn(batch, 2, n, 16) for n in (20, 30, 30)]


WRONG = {
    "rank": (lambda q, k, v: (q[0], k, v), PatternError, r"q: expected shape \(B, 2, 20, 16\), .*found \(2, 20, 16\)"),
    "heads": (lambda q, k, v: (q[:, :1], k, v), PatternError, "q: expected shape .* found"),
    "queries": (lambda q, k, v: (q[:, :, 1:], k, v), PatternError, "q: expected shape .* found"),
    "keys": (lambda q, k, v: (q, k, v[:, :, 1:]), PatternError, "v: expected shape .* found"),
    "head-dim": (lambda q, k, v: (q, k[..., :8], v), PatternError, "k: expected shape .* found"),
    "batch": (lambda q, k, v: (q, k[:1], v), PatternError, r"k: expected shape \(3, 2, 30, 16\), .*found \(1,"),
    "dtype": (lambda q, k, v: (q, k.half(), v), PatternError, "k: expected dtype torch.float32 as planned, found .*16"),
    "device": (lambda q, k, v: (q, k, v.to("meta")), DeviceError, "v: expected a tensor on cpu as planned, found meta"),
    "gradient": (lambda q, k, v: (q, k, v.requires_grad_()), PatternError, "v: this operator has no backward"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_tensors_than_planned_are_refused(case):
    change, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        qkv.check(*change(*tensors()), **PLANNED)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_tensors_of_another_device_are_refused(device):
    with pytest.raises(DeviceError, match=f"q: expected a tensor on {device} as planned, found cpu"):
        qkv.check(*tensors(), **PLANNED | {"device": torch.device(device)})


def test_tensors_of_another_gpu_are_refused():
    with torch._subclasses.FakeTensorMode():
        first = [torch.empty(x.shape, device="cuda:0") for x in tensors()]
    qkv.check(*first, **PLANNED | {"device": torch.device("cuda")})
    with pytest.raises(DeviceError, match="q: expected a tensor on cuda:1 as planned, found cuda:0"):
        qkv.check(*first, **PLANNED | {"device": torch.device("cuda:1")})


def test_planned_tensors_pass():
    qkv.check(*tensors(), **PLANNED)
    with torch.no_grad():
        qkv.check(*(x.requires_grad_() for x in tensors()), **PLANNED)


def test_one_tensor_given_twice_is_compared_as_two():
    q, k, v = tensors()
    both, apart = qkv.same_layout(q, k, k), qkv.same_layout(q, k, v)
    assert both(q, k, k) and both(q, v, v) and both(q, k, v) and apart(q, k, v)
    assert not both(q[:1], k[:1], k[:1]) and not both(q, k.half(), k.half())


CHANGES = {
    "batch": lambda q, k, v: (q[:1], k[:1], v[:1]),
    "strides": lambda q, k, v: (q, k.mT.contiguous().mT, v),
    "dtype": lambda q, k, v: (q, k, v.half()),
    "gradient": lambda q, k, v: (q.requires_grad_(), k, v),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_a_kernel_or_the_check_tells_apart_has_a_layout_of_its_own(case):
    first = tensors()
    same = qkv.same_layout(*first)
    assert same(*first) and same(*tensors())
    assert not same(*CHANGES[case](*first))


def test_tensors_that_need_a_gradient_match_where_none_is_recorded():
    first = tensors()
    first[1].requires_grad_()
    with torch.no_grad():
        same = qkv.same_layout(*first)
        assert same(*first)
    assert not same(*first)
    with torch.no_grad():
        assert same(*first) and not same(*tensors())


def test_what_needs_no_gradient_matches_in_both_modes():
    with torch.no_grad():
        same = qkv.same_layout(*tensors())
    assert same(*tensors())


def test_memory_for_another_result_is_as_for_the_first():
    first = qkv.empty(tensors()[0], 7)
    other = qkv.empty_like_result(first)()
    assert (other.shape, other.stride(), other.dtype) == (first.shape, first.stride(), first.dtype)
    assert other.data_ptr() != first.data_ptr()


def test_memory_for_another_result_has_all_of_its_last_row():
    """Of rows of 304 bytes, 300 are shown: a kernel fills all of them, beyond the last one that is shown."""
    first = torch.empty(2, 3, 304, dtype=torch.uint8)[..., :300]
    other = qkv.empty_like_result(first)()
    assert (other.shape, other.stride(), other.dtype) == (first.shape, first.stride(), first.dtype)
    assert other.untyped_storage().nbytes() == 2 * 3 * 304


def test_a_result_has_the_heads_of_a_token_side_by_side():
    out = qkv.empty(tensors()[0], 7)
    assert out.shape == (3, 2, 7, 16) and out.transpose(1, 2).is_contiguous()
