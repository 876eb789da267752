"""Slices as an attention backend of diffusers, by name.

`register` enters it with the dispatcher; ``transformer.set_attention_backend("tilewright")`` then chooses it, as the
context ``attention_backend("tilewright")`` does. Classes that do not go through the dispatcher, such as HunyuanVideo's
of diffusers 0.35, take `tilewright.integrations.sdpa.Slices.attach`.
"""

from typing import Any

import torch

from tilewright.core.errors import ConfigError, Unavailable
from tilewright.integrations.sdpa import Slices

# Versions of diffusers that the tests ran with. Its dispatcher is experimental there: names have no public way in.
TESTED = "0.35 and 0.42"
# Backends that were entered here.
_ours: set[str] = set()


def register(name: str = "tilewright", **settings: Any) -> Any:
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
        For settings that are unknown or out of range, and for a name that diffusers uses.
    Unavailable
        Without diffusers, or with a version whose dispatcher does not call what is entered.
    """
    attention = Slices(**settings)
    dispatch = _dispatch()

    def attend(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
        _parallel_config=None,
    ):  # fmt: skip
        if _parallel_config is not None:
            raise ConfigError(f"{name}: expected all tokens on one device, found a parallel configuration of diffusers")
        # Tokens before heads, as diffusers has them.
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)

    try:
        if name not in _ours:
            _enter(dispatch.AttentionBackendName, name)
        backend = dispatch.AttentionBackendName(name)
        dispatch._AttentionBackendRegistry.register(backend)(attend)
        dispatch.dispatch_attention_fn(*torch.zeros(3, 1, 1, 1, 8), backend=backend)
    except (AttributeError, TypeError, ValueError) as error:
        raise _unlike(error) from error
    if not attention.calls:
        raise _unlike("what is entered is not called")
    attention.calls.clear()
    return attention


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
    _ours.add(name)
