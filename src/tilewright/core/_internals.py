"""Names that torch and Triton keep private: the only module that uses them, each with a stand-in where it is missing.

A release may rename any of them. The package still works then: slower, or without a baseline, as each entry says.
Import this module only where torch is loaded already.
"""

import ctypes
import logging
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

_LOG = logging.getLogger(__name__)

try:
    from torch._C import _len_torch_dispatch_stack as dispatch_depth
except ImportError:

    def dispatch_depth() -> int:
        """Modes that see each operator. The stand-in always sees one: every call goes through the operators, 1.6 µs."""
        return 1


try:
    from torch._C import _is_tracing as is_tracing
except ImportError:

    def is_tracing() -> bool:
        """Whether ``torch.jit.trace`` runs. The stand-in takes 80 ns, where it takes 30."""
        return torch.jit.is_tracing()


try:
    from torch._C import _current_graph_task_id as _graph_task
except ImportError:

    def _graph_task() -> int:
        return -1


def backward_number() -> int | None:
    """The number of the backward that this thread is in, None outside. The stand-in knows of none: layers that are
    computed again in one take the grid of the last call."""
    found = _graph_task()
    return None if found < 0 else found


try:
    from torch._C import _are_functorch_transforms_active as transforms_active
except ImportError:

    def transforms_active() -> bool:
        """Whether a function runs under ``torch.func``. The stand-in says so of all: calls go through the operators."""
        return True


try:
    from torch._C._functorch import TransformType, get_interpreter_stack, maybe_current_level
except ImportError:
    get_interpreter_stack = None  # type: ignore[assignment]  # the stand-in


try:
    from torch._C import DispatchKey, DispatchKeySet, _dispatch_tls_local_include_set, _ForceDispatchKeyGuard
except ImportError:
    _everything_seen = None
else:

    def _everything_seen():
        """Context in which no dispatch key is excluded."""
        return _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), DispatchKeySet(DispatchKey.Undefined))


def functionalized() -> list:
    """Of each transform of ``torch.func`` that a function runs under, whether it is ``functionalize``. The stand-in
    knows of none."""
    if get_interpreter_stack is None:
        return []
    return [level.key() == TransformType.Functionalize for level in get_interpreter_stack() or ()]


def call_functionalized(operator: Callable, given: tuple) -> Any:
    """``operator(*given)`` that writes to none of its tensors, as ``functionalize`` calls it, the innermost transform.

    Without these names `functionalized` knows of none, and nobody comes here."""
    from torch._functorch.eager_transforms import _unwrap_all_tensors_from_functional, _wrap_all_tensors_to_functional
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    inner, level = _unwrap_all_tensors_from_functional(given, reapply_views=True), maybe_current_level()
    with retrieve_current_functorch_interpreter().lower():
        found = operator(*inner)
    return _wrap_all_tensors_to_functional(found, level)  # type: ignore[arg-type]  # inside of a level, it is no None


def has_tangent(x: torch.Tensor) -> bool:
    """Whether `x` is a tensor with a forward-mode derivative, for kernels, which run where nothing is differentiated.
    The stand-in sees none."""
    if not isinstance(x, torch.Tensor) or _everything_seen is None:
        return False
    with _everything_seen():
        return forward_ad.unpack_dual(x).tangent is not None


def forward_level() -> int:
    """The level of forward-mode derivatives, -1 outside of all. The stand-in takes all calls for one inside."""
    return getattr(forward_ad, "_current_level", 0)


try:
    from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
except ImportError:
    is_functorch_wrapped_tensor = is_legacy_batchedtensor = None  # type: ignore[assignment]  # the stand-in


def is_batched(x: torch.Tensor) -> bool:
    """Whether `x` may stand for several tensors, as under ``vmap`` and with ``is_grads_batched``. The stand-in says so
    of all: backwards of plans go through the operators, 25 µs."""
    return is_legacy_batchedtensor is None or is_legacy_batchedtensor(x) or is_functorch_wrapped_tensor(x)


try:
    _cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    # Of OpenMP, and of MKL where torch has it.
    _own_counts = [
        getattr(_cpu, name) for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local") if hasattr(_cpu, name)
    ]
except OSError:
    _own_counts = []


def use_threads(n: int) -> None:
    """Have operators of the calling thread use `n` threads from now on; other threads keep theirs. With the stand-in,
    those that start later have `n`, too: torch sets both."""
    # The count of all holds for a thread from when it first asks.
    torch.get_num_threads()
    for set_own in _own_counts:
        set_own(n)
    if torch.get_num_threads() != n:
        torch.set_num_threads(n)


try:
    from torch._C import _cuda_getCurrentRawStream as raw_stream
except ImportError:

    def raw_stream(device: int) -> int:
        """Address of the stream that is current on GPU `device`. The stand-in takes ten times as long."""
        return torch.cuda.current_stream(device).cuda_stream


try:
    from torch._C import _cuda_getDriverVersion as driver_version  # type: ignore[attr-defined]  # torch has no stub of it
except ImportError:

    def driver_version() -> int | str | None:
        """Release of CUDA that the driver has, as a number. The stand-in knows torch's own."""
        return torch.version.cuda


try:
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided_cuda  # type: ignore[attr-defined]  # torch has no stub of it
except ImportError:

    def empty_strided_cuda(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the current GPU. The stand-in takes twice as long."""
        return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


try:
    from torch import _softmax_backward_data
except ImportError:
    _softmax_backward_data = None  # type: ignore[assignment]  # the stand-in


def softmax_backward(grads: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gradients of scores, for `weights`, their softmax over the last dimension, and its `grads`; written over the
    latter. The stand-in passes over them three times."""
    if _softmax_backward_data is None:
        return grads.sub_((grads * weights).sum(-1, keepdim=True)).mul_(weights)
    return _softmax_backward_data(grads, weights, -1, grads.dtype, grad_input=grads)


try:
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _TensorGuards = None  # type: ignore[assignment, misc]  # the stand-in


def same_tensors(*tensors: torch.Tensor) -> Callable:
    """``callable(*tensors) -> bool``: whether shapes, strides, dtypes, devices and gradients are those of `tensors`.

    Torch's guards of compiled code compare them in a third of a microsecond, the stand-in in ten times as long.
    """
    if _TensorGuards is None:
        return partial(_same_facts, _facts(tensors))
    return _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _facts(tensors):
    facts = [(type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_neg()) for x in tensors]
    return facts, torch.is_inference_mode_enabled()


def _same_facts(facts, *tensors):
    return _facts(tensors) == facts


def plain_attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attn_mask: Any, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attention_with_lse` returns, by operators that every torch has."""
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores + attn_mask
    lse = scores.logsumexp(-1)
    weights = torch.softmax(scores, -1).masked_fill((lse == -torch.inf)[..., None], 0)
    return (weights @ v.float()).to(q.dtype), lse


# ``(q, k, v [n, H, N, D], *, attn_mask, scale) -> (attention, log-sum-exps [n, H, N])`` on a CPU: the one operator
# there that returns both. `scaled_dot_product_attention` calls it, too. The stand-in writes all scores to memory.
attention_with_lse = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", plain_attention_with_lse)

# Kernels of `scaled_dot_product_attention` on a GPU, by the backend's name, and FlashAttention of packed images. They
# are baselines: nothing stands in for one that is missing, which is None.
SDPA_BACKENDS: dict[str, Any] = {
    name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention", None)
    for name in ("flash", "cudnn", "efficient")
}
packed_flash = getattr(torch.ops.aten, "_flash_attention_forward", None)


# Forms of a function that are compiled, at most: of a part of a network one for each size, scale and set of levels.
FORMS = 256


def recompile_limit(most: int = FORMS) -> Any:
    """Context in which a function is compiled up to `most` times; the stand-in leaves torch's own limit."""
    config = getattr(getattr(torch, "_dynamo", None), "config", None)
    if config is None or not hasattr(config, "recompile_limit"):
        _LOG.warning("torch %s: its limit of compilations is not known here and stays", torch.__version__)
        return nullcontext()
    return config.patch(recompile_limit=most)


def missing_compiler() -> str | None:
    """Why torch cannot compile for a CPU, or None where it can: it needs a C++ compiler that works.

    The stand-in looks for a compiler and does not try it.
    """
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler
    except ImportError:
        return None if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++") else "none is installed"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return None


# Triton's releases whose C launcher `triton_launcher` calls.
KNOWN_TRITON = ("3.6", "3.7")


def triton_launcher(compiled: Any, grid: tuple[int, ...], stream: int, memory: Any = None) -> Any:
    """``(launch, head, in_tuple)``: the C launcher of a compiled kernel, what it takes before the kernel's arguments,
    and whether it takes those as one tuple.

    None where the launcher is not known, or `compiled` is None, as under the interpreter: such kernels are launched
    through Triton, which takes 10 µs longer. So are those that ask for scratch memory, unless ``memory(bytes)`` gives
    it, a tensor that is then held. grid: programs in each of three dimensions.
    """
    if compiled is None:
        return None
    # Only a process that has compiled a kernel comes here.
    import triton

    release = ".".join(triton.__version__.split(".")[:2])
    if release not in KNOWN_TRITON:
        known = ", ".join(KNOWN_TRITON)
        _LOG.warning("triton %s: direct launches are known for %s; calls take longer", release, known)
        return None
    try:
        return _triton_launcher(compiled, (*grid, stream), memory, in_tuple=release != "3.6")
    except AttributeError as missing:
        _LOG.warning("triton %s: %s; calls take longer", triton.__version__, missing)
        return None


def _triton_launcher(compiled, place, memory, in_tuple):
    run, metadata, scratch = compiled.run, compiled.packed_metadata, None
    if run.profile_scratch_size or (run.global_scratch_size and memory is None):
        return None
    if run.global_scratch_size:
        scratch = memory(run.global_scratch_size * run.num_ctas * math.prod(place[:3]))
    head = (*place, compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    # What is None: the memory of profilers, the metadata for the hooks, and the hooks.
    if in_tuple:
        head = (*head, metadata, None, None, None, scratch, None, run.arg_annotations, run.kernel_signature)
    else:
        head = (*head, scratch, None, metadata, None, None, None)
    return run.launch, head, in_tuple
