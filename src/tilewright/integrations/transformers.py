"""Attention over a pattern in vision transformers of Hugging Face: ViT, DINOv2, DINOv3, SigLIP, Swin and BEiT.

`register` enters the attention ``tilewright`` with the library's public registry. A model takes it by
``attn_implementation="tilewright"``, or later by ``model.set_attn_implementation("tilewright")``, and its pattern from
its configuration: `use` checks and states it. Queries and keys come in the model's own order; the executor gathers.

What the registry calls is not told the shape of the images. The library's embeddings note it, its layers hand it to
their attention, with each call, and `register` has their classes do so.
"""

import copy
import functools
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.core.errors import ConfigError, PatternError, Unavailable
from tilewright.integrations._calls import Calls
from tilewright.nn.attention import BiasPlans, PairBias, Patterned

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
# Of families: the classes of the library's module that embed images, and those of layers.
CLASSES = {
    "vit": ("ViTEmbeddings", "ViTLayer"),
    "dinov2": ("Dinov2Embeddings", "Dinov2Layer"),
    "dinov2_with_registers": ("Dinov2WithRegistersEmbeddings", "Dinov2WithRegistersLayer"),
    "dinov3_vit": ("DINOv3ViTEmbeddings", "DINOv3ViTLayer"),
    "siglip": ("SiglipVisionEmbeddings", "SiglipEncoderLayer"),
    "beit": ("BeitEmbeddings", "BeitLayer"),
}
# Heights and widths of images, by call.
_images = Calls()


def register() -> None:
    """Enter the attention ``tilewright``; again, nothing new. Raises `Unavailable` without transformers."""
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise Unavailable(f"transformers cannot be imported: {error}") from error
    AttentionInterface.register(NAME, attend)
    _follow_images()


@functools.cache
def _follow_images():
    """Have the library's classes note the shape of images for attention."""
    for family, names in CLASSES.items():
        try:
            module = import_module(f"transformers.models.{family}.modeling_{family}")
            embeddings, layer = (getattr(module, name) for name in names)
        except (ImportError, AttributeError):
            # A release without this family; or one whose layers have other names, and whose images are taken for those
            # of the configuration.
            continue
        embeddings.forward = _noting(embeddings.forward)
        layer.forward = _beginning(layer.forward)


def _noting(forward):
    @functools.wraps(forward)
    def embed(self, pixel_values, *arguments, **named):
        out = forward(self, pixel_values, *arguments, **named)
        tokens = out[0] if isinstance(out, tuple) else out
        _images.enter(tuple(map(int, pixel_values.shape[-2:])), tokens.shape[1])
        return out

    return embed


def _beginning(forward):
    @functools.wraps(forward)
    def of_layer(self, hidden_states, *arguments, **named):
        # Which part of a layer holds the configuration differs between releases.
        config = next((part.config for part in self.modules() if hasattr(part, "config")), None)
        if getattr(config, "_attn_implementation", None) == NAME:
            _images.begin(hidden_states)
        return forward(self, hidden_states, *arguments, **named)

    return of_layer


def use(model: Any, pattern: Any, grid: tuple[int, ...] | None = None) -> Any:
    """Let a model of transformers attend over a pattern; its configuration keeps it.

    Parameters
    ----------
    model : PreTrainedModel
        ViT, DINOv2 (with registers, too), DINOv3, SigLIP, BEiT or Swin.
    pattern : str
        A name of `nn.patterns.NAMED`, with ``-g<special tokens>``, or ``full``. Swin takes ``full`` alone: its windows
        are its pattern.
    grid : (int, int), optional
        Rows and columns of tokens, for layers that are called without images. Images have their own.

    Returns
    -------
    PreTrainedModel
        The model itself, with a configuration of its own. Another model that shared it keeps its attention.

    Raises
    ------
    ConfigError
        For another model. The model is left as it was.
    PatternError, UnknownNameError
        For a pattern that does not fit. The model is left as it was.
    """
    register()
    configs = [config for config in _configs(model.config) if config.model_type in (*SPECIAL, *WINDOWED)]
    if not configs:
        raise ConfigError(f"model: expected one of {_families()}, found {model.config.model_type}")
    for config in configs:
        _check(config, pattern, grid)
    before = _configs(model.config)
    own = _configs(copy.deepcopy(model.config))
    configs = [mine for config, mine in zip(before, own, strict=True) if any(config is each for each in configs)]
    _exchange(model, before, own)
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

        _exchange(model, own, before)
        raise ConfigError(
            f"model: expected one that takes attention from the registry of transformers, found {', '.join(kept)} of "
            f"transformers {__version__}; transformers 5 or later may be needed"
        )
    for config in configs:
        config.tilewright_pattern = pattern
        config.tilewright_grid = None if grid is None else list(grid)
    return model


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: Any = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> Any:
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
    pattern, grid = _stated(config), _grid_of(config, _images.now())
    n_special = SPECIAL[config.model_type](config)
    if q.shape[2] != k.shape[2] or q.shape[2] != n_special + grid[0] * grid[1]:
        raise PatternError(
            f"attention {NAME}: expected {n_special} special tokens and a grid of {grid[0]} x {grid[1]}, found "
            f"{q.shape[2]} queries and {k.shape[2]} keys; for tokens without images state `grid`, see `use`"
        )
    if mask is not None and (mask.dtype == torch.bool or mask.ndim != 4 or len(mask) != 1):
        raise PatternError(
            f"attention {NAME}: expected a bias [1, heads, N, N] or no mask, found {mask.dtype} {list(mask.shape)}"
        )
    key = pattern, q.shape[1], q.shape[3], n_special, scale
    # With the layer, so that it lives as long; copies share it.
    known, found, plans = vars(module).get("_tilewright", (None, None, None))
    if known != key:
        found, plans = Patterned(pattern, q.shape[1], q.shape[3], n_special, scale=scale), BiasPlans()
        module._tilewright = key, found, plans
    values = None if mask is None else mask.expand(-1, q.shape[1], -1, -1)[0]
    bias = None if values is None else PairBias(tuple(values.shape), plans, values)
    return found.attend(q, k, v, grid, bias=bias)


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


def _grid_of(config, image=None):
    """``(rows, columns)`` of tokens of an image ``(height, width)``; of None, those that a configuration states, or has
    by its size of images."""
    stated = getattr(config, "tilewright_grid", None)
    if image is None and stated is not None:
        return tuple(map(int, stated))
    size, patch = (_sides(config.image_size if image is None else image), _sides(config.patch_size))
    return size[0] // patch[0], size[1] // patch[1]


def _sides(size):
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)


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


def _exchange(model, old, new):
    """Give a model and its parts other configurations, each in place of an old one."""
    by = {id(config): other for config, other in zip(old, new, strict=True)}
    for module in model.modules():
        if id(vars(module).get("config")) in by:
            module.config = by[id(module.config)]


def _configs(config):
    """A configuration and those of the models inside it."""
    return [config, *(getattr(config, key) for key in getattr(config, "sub_configs", {}))]


def _families():
    return ", ".join((*SPECIAL, *WINDOWED))
