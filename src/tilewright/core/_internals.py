"""Names that torch and Triton keep private: the only module that uses them.

They are those of the releases that this package requires. A stand-in is here where a build of these lacks one: without
CUDA, or off Linux. Import this module only where torch is loaded already.
"""

import contextlib
import ctypes
import logging
import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _current_graph_task_id,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
)
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._C import _is_any_autocast_enabled as any_autocast
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_depth
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.guards import TensorGuards
from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided_cuda  # type: ignore[attr-defined]  # torch has no stub of it
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    maybe_current_level,
)
from torch._guards import TracingContext
from torch._library.utils import get_layout_constraint_tag
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

__all__ = ["any_autocast", "below_autograd", "dispatch_depth", "empty_strided_cuda", "is_tracing", "transforms_active"]

_LOG = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable)


def constant(function: _Function) -> _Function:
    """``torch.compiler.assume_constant_result``, which would load torch's compiler, in seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # of functions, any name
    return function


def at_rest(x: torch.Tensor) -> torch.Tensor:
    """`x`, marked as by ``torch._dynamo.mark_static_address``, which would load torch's compiler: replays of compiled
    code's CUDA graphs read it where it is."""
    x._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]  # of tensors, any name
    return x


def uncompiled(function: _Function) -> _Function:
    """``torch.compiler.disable``, which loads torch's compiler, in seconds; here, who compiles has loaded it."""

    @cache
    def disabled():
        return torch.compiler.disable(function)

    def call(*args, **kwargs):
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    # Compiled callers leave their graph here, as for a function that is disabled, and the frame is left alone.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # of functions, any name
    set_code_exec_strategy(call.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return wraps(function)(call)  # type: ignore[return-value]  # takes and returns what `function` does


def compiled_graph() -> bool:
    """Whether ``torch.compile`` is making a graph."""
    return TracingContext.try_get() is not None


def backward_number() -> int | None:
    """The number of the backward that this thread is in, None outside."""
    found = _current_graph_task_id()
    return None if found < 0 else found


def functionalized() -> list[bool]:
    """Of each transform of ``torch.func`` that a function runs under, whether it is ``functionalize``."""
    return [level.key() == TransformType.Functionalize for level in get_interpreter_stack() or ()]


def call_functionalized(operator: Callable, given: tuple) -> Any:
    """``operator(*given)`` that writes to no tensor, as ``functionalize`` calls it, the innermost transform."""
    from torch._functorch.eager_transforms import _unwrap_all_tensors_from_functional, _wrap_all_tensors_to_functional
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    inner, level = _unwrap_all_tensors_from_functional(given, reapply_views=True), maybe_current_level()
    with retrieve_current_functorch_interpreter().lower():
        found = operator(*inner)
    return _wrap_all_tensors_to_functional(found, level)  # type: ignore[arg-type]  # inside of a level, it is no None


def has_tangent(x: torch.Tensor) -> bool:
    """Whether `x` has a forward-mode derivative, for kernels, which run where nothing is differentiated."""
    if not isinstance(x, torch.Tensor):
        return False
    # No dispatch key is excluded here.
    with _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), DispatchKeySet(DispatchKey.Undefined)):
        return forward_ad.unpack_dual(x).tangent is not None


def forward_level() -> int:
    """The level of forward-mode derivatives, -1 outside of all."""
    return forward_ad._current_level


def is_batched(x: torch.Tensor) -> bool:
    """Whether `x` may stand for several tensors, as under ``vmap`` and with ``is_grads_batched``."""
    return is_legacy_batchedtensor(x) or is_functorch_wrapped_tensor(x)


def softmax_backward(grads: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gradients of scores, for `weights`, their softmax over the last dimension, and its `grads`; written over the
    latter."""
    return torch._softmax_backward_data(grads, weights, -1, grads.dtype, grad_input=grads)


def hooked(module: torch.nn.Module) -> bool:
    """Whether a hook, of `module` or of all modules, sees its calls."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own or _has_any_global_hook())


def same_tensors(*tensors: torch.Tensor) -> Callable[..., bool]:
    """``callable(*tensors) -> bool``: whether shapes, strides, dtypes, devices and gradients are those of `tensors`, by
    torch's guards of compiled code, which compare them in a third of a microsecond."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


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


# ``(q, k, v [n, H, N, D], *, attn_mask, scale) -> (attention, log-sum-exps [n, H, N])`` on a CPU: the one operator
# there that returns both. `scaled_dot_product_attention` calls it, too.
attention_with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# Its gradients, ``(grad, q, k, v, attention, log-sum-exps, 0.0, False, *, attn_mask, scale) -> (dq, dk, dv)``.
attention_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Kernels of `scaled_dot_product_attention` on a GPU, by the backend's name, and FlashAttention of packed images.
SDPA_BACKENDS: dict[str, Any] = {
    name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention") for name in ("flash", "cudnn", "efficient")
}
packed_flash = torch.ops.aten._flash_attention_forward


# Forms of a function that are compiled, at most: of a part of a network one for each size, scale and set of levels.
FORMS = 256


def recompile_limit(most: int = FORMS) -> Any:
    """Context in which a function is compiled up to `most` times."""
    return torch._dynamo.config.patch(recompile_limit=most)


def call_directly(operator: Any, name: str) -> None:
    """Have the Python code that torch's compiler is making call `name`, an expression, in place of `operator`.

    Nothing happens where another compiler is at work. Where this torch's compiler is made otherwise, code calls the
    operator.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or operator in lowering.lowerings:
        return
    try:
        constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(operator))
        lowering.make_fallback(operator, layout_constraint=constraint, warn=False)
        made = lowering.lowerings[operator]
    except (AttributeError, TypeError) as missing:
        _LOG.debug("%s is called through the dispatcher: %s", operator, missing)
        return

    @wraps(made)
    def lowered(*given, **named):
        found = made(*given, **named)
        first = found[0] if isinstance(found, tuple | list) else found
        with contextlib.suppress(AttributeError):
            first.data.data.inputs[0].set_python_kernel_name(name)
        return found

    lowering.lowerings[operator] = lowered


def missing_compiler() -> str | None:
    """Why torch cannot compile for a CPU, or None where it can: it needs a C++ compiler that works."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return None


# Triton's releases whose C launcher `triton_launcher` calls.
KNOWN_TRITON = ("3.6", "3.7")


def triton_launcher(compiled: Any, grid: tuple[int, ...], stream: int) -> Any:
    """``(launch, head, in_tuple)``: the C launcher of a compiled kernel, what it takes before the kernel's arguments,
    and whether it takes those as one tuple.

    None where the launcher is not known, or `compiled` is None, as under the interpreter: such kernels are launched
    through Triton, which takes 10 µs longer. So are those that ask for scratch memory. grid: programs in each of three
    dimensions.
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
        return _triton_launcher(compiled, (*grid, stream), in_tuple=release != "3.6")
    except AttributeError as missing:
        _LOG.warning("triton %s: %s; calls take longer", triton.__version__, missing)
        return None


def _triton_launcher(compiled, place, in_tuple):
    run, metadata = compiled.run, compiled.packed_metadata
    if run.profile_scratch_size or run.global_scratch_size:
        return None
    head = (*place, compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    # What is None: scratch memory, that of profilers, the metadata for the hooks, and the hooks.
    if in_tuple:
        head = (*head, metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
    else:
        head = (*head, None, None, metadata, None, None, None)
    return run.launch, head, in_tuple
