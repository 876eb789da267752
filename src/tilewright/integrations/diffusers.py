"""Slices as an attention backend of diffusers, by name.

`register` enters it with the dispatcher; ``transformer.set_attention_backend("tilewright")`` then chooses it, as the
context ``attention_backend("tilewright")`` does. Classes that do not go through the dispatcher, such as HunyuanVideo's
of diffusers 0.35, take `tilewright.integrations.sdpa.Slices.attach`.
"""

from typing import Any

from tilewright.core.errors import ConfigError, Unavailable
from tilewright.integrations.sdpa import Slices

# Of diffusers. Its dispatcher is experimental there: names have no public way in.
VERSIONS = ("0.35",)
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
        Without diffusers, or with another version of it.
    """
    attention = Slices(**settings)
    dispatch = _dispatch()
    if name not in _ours:
        _enter(dispatch.AttentionBackendName, name)

    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        # Tokens before heads, as diffusers has them.
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)

    dispatch._AttentionBackendRegistry.register(dispatch.AttentionBackendName(name))(attend)
    _ours.add(name)
    return attention


def _dispatch():
    """The dispatcher's module. Raises `Unavailable`."""
    try:
        import diffusers
        from diffusers.models import attention_dispatch
    except ImportError as error:
        raise Unavailable(f"diffusers cannot be imported: {error}") from error
    if not diffusers.__version__.startswith(VERSIONS):
        raise Unavailable(f"diffusers: expected version {' or '.join(VERSIONS)}, found {diffusers.__version__}")
    return attention_dispatch


def _enter(names, name):
    """Add a member to the enumeration of backends, which has no way in: as Python's own enumerations keep theirs."""
    if name in names._value2member_map_ or not name.islower():
        raise ConfigError(f"name: expected lower-case letters, and a name that diffusers does not use, found {name!r}")
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    names._member_map_[member._name_] = names._value2member_map_[name] = member
    names._member_names_.append(member._name_)
