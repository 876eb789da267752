"""Attention over a pattern in vision transformers of Hugging Face: ViT, DINOv2, DINOv3, SigLIP, Swin and BEiT.

`register` enters the attention ``tilewright`` with the library's public registry. A model takes it by
``attn_implementation="tilewright"``, or later by ``model.set_attn_implementation("tilewright")``, and its pattern from
its configuration: `use` checks and states it. Queries and keys come in the model's own order; the executor gathers.
"""

from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F

from tilewright.core.errors import ConfigError, PatternError, Unavailable
from tilewright.nn.attention import PairBias, Patterned

NAME = "tilewright"
# Of configurations: how many tokens stand before the grid. Swin's attention has windows of its own.
SPECIAL = {
    "vit": lambda config: 1,
    "dinov2": lambda config: 1,
    "dinov2_with_registers": lambda config: 1 + config.num_register_tokens,
    "dinov3_vit": lambda config: 1 + config.num_register_tokens,
    "siglip_vision_model": lambda config: 0,
    "beit": lambda config: 1,
}
WINDOWED = ("swin",)
# What is prepared for a layer: ``key, Patterned``; ``plan, mask as it was, plan with it``; and ``plan, plan that takes
# the mask in each call``, in training.
_patterns: WeakKeyDictionary = WeakKeyDictionary()
_biased: WeakKeyDictionary = WeakKeyDictionary()
_trained: WeakKeyDictionary = WeakKeyDictionary()


def register():
    """Enter the attention ``tilewright``; again, nothing new. Raises `Unavailable` without transformers."""
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise Unavailable(f"transformers cannot be imported: {error}") from error
    AttentionInterface.register(NAME, attend)


def use(model, pattern, grid=None):
    """Let a model of transformers attend over `pattern`; its configuration keeps it. Returns the model.

    pattern: a name of `nn.patterns.NAMED`, with ``-g<special tokens>``, or ``full``; of Swin ``full`` alone, whose
    windows are the pattern. grid: ``(rows, columns)`` of tokens, for images of another size than the configuration's.
    Raises `ConfigError` for another model, `PatternError` and `UnknownNameError` for a pattern that does not fit; the
    model is then left as it was.
    """
    register()
    configs = [config for config in _configs(model.config) if config.model_type in (*SPECIAL, *WINDOWED)]
    if not configs:
        raise ConfigError(f"model: expected one of {_families()}, found {model.config.model_type}")
    for config in configs:
        _check(config, pattern, grid)
    if len(configs) == 1 and configs[0] is model.config:
        model.set_attn_implementation(NAME)
    else:
        # Of several models in one, such as SigLIP's of text and images, those of images.
        model.set_attn_implementation(
            {key: NAME for key in model.config.sub_configs if getattr(model.config, key) in configs}
        )
    # Models that have classes of attention of their own keep these, with a warning alone: BEiT and Swin before 5.0.
    if kept := [config.model_type for config in configs if config._attn_implementation != NAME]:
        from transformers import __version__

        raise ConfigError(
            f"model: expected one that takes attention from the registry of transformers, found {', '.join(kept)} of "
            f"transformers {__version__}; transformers 5 or later may be needed"
        )
    for config in configs:
        config.tilewright_pattern = pattern
        config.tilewright_grid = None if grid is None else list(grid)
    return model


def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **others):
    """What the registry calls: query, key, value [B, H, N, D] to ``([B, N, H, D], None)``.

    attention_mask: an additive bias [1, H or 1, N, N] (BEiT, Swin), or None. Raises `PatternError` or `ConfigError`
    for what cannot be honoured.
    """
    config = module.config
    for what, found in {
        "causal attention": is_causal if is_causal is not None else getattr(module, "is_causal", False),
        "dropout": dropout,
        "a softcap": others.get("softcap"),
        "a cache of keys": others.get("cache"),
        "a position bias beside the mask": others.get("position_bias"),
        "attention weights as output": others.get("output_attentions"),
    }.items():
        if found is not None and found is not False and found != 0:
            raise PatternError(f"attention {NAME}: expected a call without {what}, found {what}")
    if config.model_type in WINDOWED:
        out = _windows(module, query, key, value, attention_mask, scaling)
    else:
        out = _patterned(module, query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def _patterned(module, q, k, v, mask, scale):
    """Attention over the pattern of the configuration."""
    config = module.config
    if config.model_type not in SPECIAL:
        raise ConfigError(f"attention {NAME}: expected a model of {_families()}, found {config.model_type}")
    pattern, grid = _stated(config), _grid_of(config)
    n_special = SPECIAL[config.model_type](config)
    if q.shape[2] != k.shape[2] or q.shape[2] != n_special + grid[0] * grid[1]:
        raise PatternError(
            f"attention {NAME}: expected {n_special} special tokens and a grid of {grid[0]} x {grid[1]}, found "
            f"{q.shape[2]} queries and {k.shape[2]} keys; for other images state `grid`, see `use`"
        )
    if mask is not None and (mask.dtype == torch.bool or mask.ndim != 4 or len(mask) != 1):
        raise PatternError(
            f"attention {NAME}: expected a bias [1, heads, N, N] or no mask, found {mask.dtype} {list(mask.shape)}"
        )
    key = pattern, q.shape[1], q.shape[3], n_special, scale
    known, found = _patterns.get(module, (None, None))
    if known != key:
        found = Patterned(pattern, q.shape[1], q.shape[3], n_special, scale=scale)
        _patterns[module] = key, found
    if mask is None:
        return found.attend(q, k, v, grid)
    return found.attend(q, k, v, grid, bias=PairBias(module, mask.expand(-1, q.shape[1], -1, -1)[0]))


def _windows(module, q, k, v, mask, scale):
    """Attention inside windows: q, k, v [B x windows, H, w x w, D], mask [1 or B x windows, H, w x w, w x w]."""
    if _stated(module.config) != "full":
        raise PatternError(
            f"attention {NAME}: expected the pattern full for {module.config.model_type}, whose windows are its "
            f"pattern, found {_stated(module.config)}"
        )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _stated(config):
    """The pattern of a configuration. Raises `ConfigError`."""
    pattern = getattr(config, "tilewright_pattern", None)
    if pattern is None:
        raise ConfigError(
            f"attention {NAME}: expected a pattern in the model's configuration, tilewright_pattern, such as "
            "window-7-g1; found none"
        )
    return pattern


def _grid_of(config):
    """``(rows, columns)`` of tokens that a configuration states, or has by its size of images."""
    stated = getattr(config, "tilewright_grid", None)
    if stated is not None:
        return tuple(map(int, stated))
    sides = (np.broadcast_to(getattr(config, name), 2) for name in ("image_size", "patch_size"))
    size, patch = sides
    return int(size[0] // patch[0]), int(size[1] // patch[1])


def _check(config, pattern, grid):
    """Raise unless a model of this configuration can attend over `pattern`."""
    if config.model_type in WINDOWED:
        if pattern != "full":
            raise PatternError(
                f"pattern: expected full for {config.model_type}, whose windows are its pattern, found {pattern!r}"
            )
        return
    if not isinstance(pattern, str):
        # A configuration is written as JSON.
        raise ConfigError(f"pattern: expected a name, found {type(pattern).__name__}")
    heads, n_special = config.num_attention_heads, SPECIAL[config.model_type](config)
    grid = _grid_of(config) if grid is None else tuple(grid)
    Patterned(pattern, heads, config.hidden_size // heads, n_special).site(grid)


def _configs(config):
    """A configuration and those of the models inside it."""
    return [config, *(getattr(config, key) for key in getattr(config, "sub_configs", {}))]


def _families():
    return ", ".join((*SPECIAL, *WINDOWED))
