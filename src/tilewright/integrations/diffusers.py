"""Tilewright's attention in diffusers: slices by name, and windows by rule in the video decoder of LTX-2.5.

`register` enters slices with the dispatcher; ``transformer.set_attention_backend("tilewright_slices")`` then chooses
them, as the context ``attention_backend("tilewright_slices")`` does. `denoising` has the networks of a pipeline choose
them, also those whose class does not go through the dispatcher, and knows their text, steps and guidance branches.
`NeighborhoodProcessor` is for ``decoder.set_attn_processor``.
"""

import inspect
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tilewright import neighborhood
from tilewright.core import arguments
from tilewright.core.errors import ConfigError, Unavailable
from tilewright.integrations import _context_parallel
from tilewright.integrations._denoising import Denoising, following
from tilewright.integrations.sdpa import Slices
from tilewright.neighborhood.rotary import rotary

# Versions of diffusers that the tests ran with. Its dispatcher is experimental there: names have no public way in.
TESTED = "0.35, 0.40 and 0.42"
# Names that were entered here, and backends by them.
_entered: set[str] = set()
_registered: dict[str, Slices] = {}
# Contexts of `denoising` by names.
_followed: Counter[str] = Counter()
# Networks of a pipeline that denoise.
PARTS = "transformer", "transformer_2"
# How a backend says that it takes tokens of several processes.
PARALLEL = "supports_context_parallel"
# What the processor uses of an attention module, and what its fused form does.
USED = ("project_qkv", "kernel_size", "to_out")
USED_FUSED = (
    *("to_q", "to_k", "to_v", "heads", "scale", "norm_q.weight", "norm_q.eps", "norm_k.weight", "norm_k.eps"),
    *("rope.base", "rope.rope_dim_split"),
)
NORMS = ("norm_q", "norm_k")
# Devices with a kernel for the fused form.
FUSED_ON = ("cuda",)
# A row's largest score may be the bound below zero, and `neighborhood.attend` allows 80 from its bound.
LARGEST_BOUND = 40.0
# Of modules: what their gains were, the bound of their scores, and the gains' memory, which no others get then. Read
# from the device once.
_bounds: MutableMapping[nn.Module, tuple[list, float, list[Tensor]]] = WeakKeyDictionary()


def register(name: str = "tilewright_slices", **settings: Any) -> Any:
    """Register slices as an attention backend of diffusers. A second call changes the settings.

    Parameters
    ----------
    name : str
        Name of the backend, in lower case.
    **settings
        Fields of `tilewright.integrations.sdpa.Settings`, such as ``mass=0.95, budget=0.4``.

    Returns
    -------
    tilewright.integrations.sdpa.Slices
        The backend, with counts of its calls.

    Raises
    ------
    ConfigError
        For settings that are unknown or out of range, for a name that diffusers uses, and inside of `denoising` by it.
    Unavailable
        Without diffusers, or with a version whose dispatcher does not call what is entered.
    """
    attention, dispatch = Slices(**settings), _dispatch()
    if (known := _registered.get(name)) is not None:
        if _followed[name]:
            raise ConfigError(f"name: expected a backend outside of denoising, found {name!r}, which is inside")
        # The same one: code that is compiled calls it by any settings.
        known._set(attention.settings)
        known.calls.clear()
        return known

    def attend(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
        return_lse=False, _parallel_config=None,
    ):  # fmt: skip
        if attn_mask is not None and attn_mask.shape == (len(query), key.shape[1]):
            # Of keys, as diffusers reads it.
            attn_mask = attn_mask[:, None, None]
        given = attn_mask, dropout_p, is_causal, scale, enable_gqa
        if _parallel_config is not None:
            config = {"lse": return_lse, "config": _parallel_config}
            found = _context_parallel.attend(dispatch, name, attention, query, key, value, *given, **config)
        else:
            # Tokens before heads, as diffusers has them.
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            out, sums = attention.both(q, k, v, *given, lse=return_lse)
            found = out.transpose(1, 2), None if sums is None else sums.transpose(1, 2)
        return found if return_lse else found[0]

    try:
        if name not in _entered:
            _enter(dispatch.AttentionBackendName, name)
        backend = dispatch.AttentionBackendName(name)
        enter = dispatch._AttentionBackendRegistry.register
        # Since 0.36.
        parallel = {PARALLEL: True} if PARALLEL in inspect.signature(enter).parameters else {}
        enter(backend, **parallel)(attend)
        dispatch.dispatch_attention_fn(*torch.zeros(3, 1, 1, 1, 8), backend=backend)
    except (AttributeError, TypeError, ValueError) as error:
        raise _unlike(error) from error
    if not attention.calls:
        raise _unlike("what is entered is not called")
    attention.calls.clear()
    _registered[name] = attention
    return attention


@contextmanager
def denoising(pipe: Any, name: str = "tilewright_slices") -> Iterator[Denoising]:
    """Context in which the networks of a pipeline attend by slices that know where the pipeline is.

    Parameters
    ----------
    pipe : DiffusionPipeline or ModelMixin
        Its `transformer` and, where it has one, `transformer_2` are followed, each with lists of its own. Or a network.
    name : str
        Name of the backend, as it was registered.

    Yields
    ------
    Denoising
        Its `step_end` is for the pipeline's ``callback_on_step_end``. With the setting `steps`, lists are kept until
        the next step that refreshes them, for each network, layer and guidance branch.

    Raises
    ------
    ConfigError
        For a name that is not registered, and for networks that cannot have slices, which stay as they were: without
        attention, with head dims that no kernel has, and of classes whose text is not known.
    """
    attention = _registered.get(name)
    if attention is None:
        raise ConfigError(
            f"name: expected a registered backend, found {name!r}; known: {', '.join(_registered) or 'none'}"
        )
    held = [pipe] if isinstance(pipe, nn.Module) else [getattr(pipe, part, None) for part in PARTS]
    networks = [getattr(network, "_orig_mod", network) for network in held if network is not None]
    if not networks:
        raise ConfigError(f"{type(pipe).__name__}: expected a network, or a pipeline with one of {', '.join(PARTS)}")
    if lacking := [network for network in networks if not _processors(network)]:
        raise ConfigError(f"{type(lacking[0]).__name__}: expected attention with processors, found none")

    def choose(network):
        known = {processor: processor._attention_backend for processor in _processors(network) if _chooses(processor)}
        if not known:
            return attention.attach(network).remove
        registry = _dispatch()._AttentionBackendRegistry
        active = registry._active_backend
        network.set_attention_backend(name)
        # Of the process, which other models go by.
        registry._active_backend = active

        def leave():
            for processor, backend in known.items():
                processor._attention_backend = backend

        return leave

    with following(attention, networks, pipe, choose) as run:
        _followed[name] += 1
        try:
            yield run
        finally:
            _followed[name] -= 1


def _processors(network):
    found = (getattr(module, "processor", None) for module in network.modules())
    return [processor for processor in found if processor is not None]


def _chooses(processor):
    return hasattr(processor, "_attention_backend")


def _dispatch():
    """The dispatcher's module. Raises `Unavailable`."""
    try:
        from diffusers.models import attention_dispatch
    except ImportError as error:
        raise Unavailable(f"diffusers cannot be imported: {error}") from error
    return attention_dispatch


def _unlike(reason):
    return Unavailable(f"diffusers: expected a dispatcher like that of {TESTED}, found another: {reason}")


def _enter(names, name):
    """Add a member to the enumeration of backends, which has no way in: as Python's own enumerations keep theirs."""
    if name in names._value2member_map_ or not name.islower():
        raise ConfigError(f"name: expected lower-case letters, and a name that diffusers does not use, found {name!r}")
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    names._member_map_[member._name_] = names._value2member_map_[name] = member
    names._member_names_.append(member._name_)
    _entered.add(name)


class NeighborhoodProcessor:
    """Neighbourhood attention in the video decoder of LTX-2.5, for ``decoder.set_attn_processor``.

    Windows are a rule in the kernel: no block mask is built, and memory grows with the video alone. Weights and tiling
    stay as they are.

    Parameters
    ----------
    fused : bool
        On a GPU and without gradients, norms, scale and rotation of queries and keys are one kernel, which rounds once.
        Otherwise, and with False, they are diffusers' own operations.

    Raises
    ------
    ConfigError
        For a value that is not True or False.
    Unavailable
        When called by attention that is not like ``LTX2VideoVaeNeighborhoodAttention`` of diffusers 0.42.
    """

    def __init__(self, fused: bool = True):
        arguments.flag("fused", fused)
        self.fused = fused

    def __call__(self, attn: Any, hidden_states: Tensor, block_mask: Any = None) -> Tensor:
        """Attention module `attn` of hidden_states [B, T, H, W, C], which it projects; `block_mask` is not read."""
        _expect(attn, USED)
        fused = self.fused and hidden_states.device.type in FUSED_ON and not _recorded(attn, hidden_states)
        q, k, v = _projected(attn, hidden_states) if fused else attn.project_qkv(hidden_states)
        # Queries are scaled.
        out = neighborhood.attend(q, k, v, attn.kernel_size, scale=1.0, bound=_bound(attn))
        return attn.to_out[0](out.flatten(-2))


def _recorded(attn, x):
    """Whether a gradient is recorded in a call of a module."""
    return torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w in attn.parameters()))


def _projected(attn, x):
    """What ``attn.project_qkv(x)`` returns, with one kernel behind the projections."""
    _expect(attn, USED_FUSED)
    norms, rope = [getattr(attn, norm) for norm in NORMS], attn.rope
    if not all(isinstance(norm, nn.RMSNorm) for norm in norms):
        found = " and ".join(type(norm).__name__ for norm in norms)
        raise Unavailable(f"{type(attn).__name__}: expected norms RMSNorm of torch for fused=True, found {found}")
    q, k, v = (project(x).unflatten(-1, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v))
    gains, eps = [norm.weight for norm in norms], [norm.eps for norm in norms]
    return *rotary(q, k, *gains, eps=eps, scale=attn.scale, split=rope.rope_dim_split, base=rope.base), v


def _bound(attn):
    """What no scaled score exceeds, or None where it is large or unknown: a normed head is at most ``sqrt(d)`` times
    its largest gain long, and a rotation keeps that."""
    if not all(_has(attn, f"{norm}.weight") and isinstance(getattr(attn, norm), nn.RMSNorm) for norm in NORMS):
        return None
    if torch.compiler.is_compiling() or not _has(attn, "scale"):
        return None
    gains = [getattr(attn, norm).weight for norm in NORMS]
    # The version counts changes in place, which inference tensors do not have.
    state = [(gain.data_ptr(), 0 if gain.is_inference() else gain._version) for gain in gains]
    known, bound, _ = _bounds.get(attn, (None, 0.0, []))
    if known != state:
        if gains[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        q, k = (float(gain.detach().abs().max()) for gain in gains)
        bound = abs(attn.scale) * gains[0].numel() * q * k
        _bounds[attn] = state, bound, [gain.detach() for gain in gains]
    return bound if bound <= LARGEST_BOUND else None


def _expect(attn, names):
    """Raise `Unavailable` where a module lacks one of these."""
    missing = [name for name in names if not _has(attn, name)]
    if missing:
        expected = "expected attention like LTX2VideoVaeNeighborhoodAttention of diffusers 0.42"
        raise Unavailable(f"{expected}, found {type(attn).__name__} without {', '.join(missing)}")


def _has(thing, name):
    try:
        return attrgetter(name)(thing) is not None
    except AttributeError:
        return False
