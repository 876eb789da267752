"""The tensors that a plan is called with: what is expected of them, and what tells two calls apart (stage T5)."""

from functools import partial

import torch

from tilewright.core.errors import DeviceError, PatternError

try:
    from torch._C._dynamo.guards import TensorGuards, _empty_strided_cuda
except ImportError:
    # Torch's own, which it may rename: what stands in for them is slower.
    TensorGuards = _empty_strided_cuda = None


def check(q, k, v, *, shape, heads, head_dim, dtype, device):
    """Raise `PatternError` or `DeviceError` for tensors other than planned, or whose gradient would be lost.

    Planned are q [B, heads, shape[0], head_dim] and k, v [B, heads, shape[1], head_dim] of `dtype` on `device`, a
    ``torch.device``; one without an index stands for any of its kind.
    """
    for name, x, n in (("q", q, shape[0]), ("k", k, shape[1]), ("v", v, shape[1])):
        if x.ndim != 4 or tuple(x.shape) != (q.shape[0], heads, n, head_dim):
            batch = "B" if x is q or q.ndim != 4 else q.shape[0]
            raise PatternError(f"{name}: expected shape {(batch, heads, n, head_dim)}, found {tuple(x.shape)}")
        if x.dtype != dtype:
            raise PatternError(f"{name}: expected dtype {dtype} as planned, found {x.dtype}")
        if x.device.type != device.type or device.index not in (None, x.device.index):
            raise DeviceError(f"{name}: expected a tensor on {device} as planned, found {x.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise PatternError(f"{name}: this operator has no backward; call it under torch.no_grad()")


def alike(*tensors):
    """``callable(*tensors) -> bool``: true only for tensors that neither `check` nor a kernel tells apart from these.

    They may lie elsewhere, in the same device's memory. Tensors that need a gradient are alike only where none is
    recorded. Torch's own guards of compiled code compare shapes, strides, dtypes, devices and gradients in a third of a
    microsecond; in Python that takes ten times as long.
    """
    if TensorGuards is None:
        same = partial(_same_form, _form(tensors))
    else:
        same = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if not any(x.requires_grad for x in tensors):
        return same
    return lambda *others: not torch.is_grad_enabled() and same(*others)


def _form(tensors):
    """What `alike` compares, in plain Python."""
    facts = [(type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_neg()) for x in tensors]
    return facts, torch.is_inference_mode_enabled()


def _same_form(form, *tensors):
    return _form(tensors) == form


def empty(q, n_queries):
    """Memory for a result [B, H, n_queries, D], the heads of a token side by side, as a network's next layer reads it.

    Executors return their results so, and the registered operator tells compilers so.
    """
    batch, heads, _, head_dim = q.shape
    width = heads * head_dim
    return q.new_empty_strided((batch, heads, n_queries, head_dim), (n_queries * width, head_dim, width, 1))


def another(x):
    """``callable()``: memory like that of `x`, on the current GPU as compiled code asks for it, at half the cost."""
    shape, stride, dtype = tuple(x.shape), x.stride(), x.dtype
    if x.device.type == "cuda" and _empty_strided_cuda is not None:
        return partial(_empty_strided_cuda, shape, stride, dtype)
    return partial(x.new_empty_strided, shape, stride)
