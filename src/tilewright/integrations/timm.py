"""Attention over a pattern in timm's vision transformers: ViT, DeiT, DINOv2 (with registers), BEiT, EVA, DINOv3.

`sparsify` changes no weight and no name of one. Special tokens, position tables, their resampling, rotations, norms and
biases are timm's own. Tokens are put into plan order once, before the first sparse block, and back after the last.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tilewright.core.errors import ConfigError, PatternError, Unavailable
from tilewright.nn.attention import LayerBias, Patterned


def sparsify(model, pattern, blocks=None, *, plans=None):
    """Let the attention of a timm model attend over `pattern`. Returns a `Sparsified`; its ``remove()`` undoes it.

    model: a ``VisionTransformer``, ``Beit`` or ``Eva`` of timm, for images of any size that it takes itself
    (``dynamic_img_size``, ``set_input_size``). pattern: a name of `nn.patterns.NAMED` such as ``window-15-g5``, with
    ``-g<the model's special tokens>``; ``full``; a `Graph` or matrix [N, N]; or ``callable(grid, n_special)``. blocks:
    numbers of the blocks, None for all. plans: `networks.Plans`. Plans are made when first called and kept on disk.

    Raises `Unavailable` without timm, `ConfigError` for models and blocks that cannot be sparsified, `PatternError` and
    `UnknownNameError` for a pattern that does not fit. The model is then left as it was.
    """
    known = _known()
    chosen = _checked(model, blocks, known)
    layers = [model.blocks[i].attn for i in chosen]
    first = layers[0]
    head_dim = _head_dim(first)
    attention = Patterned(pattern, first.num_heads, head_dim, model.num_prefix_tokens, scale=first.scale, plans=plans)
    if not getattr(model, "dynamic_img_size", False):
        attention.site(tuple(model.patch_embed.grid_size))
    return Sparsified(model, attention, chosen)


class Sparsified:
    """A model whose attention attends over a pattern, until ``remove()``. model: timm's, changed in place."""

    def __init__(self, model, attention, chosen):
        """Change `model`, which `sparsify` has checked."""
        self.model, self.attention, self.blocks = model, attention, chosen
        self._state = state = _State(attention, _keeps_order(model, chosen))
        shared = getattr(model, "rel_pos_bias", None)
        for i in chosen:
            model.blocks[i].attn = Attention(model.blocks[i].attn, state, shared)
        self._hooks = [
            model.patch_embed.register_forward_pre_hook(state.see),
            model.blocks[chosen[0]].register_forward_pre_hook(state.enter),
            model.blocks[chosen[-1]].register_forward_hook(state.leave),
        ]
        # It returns tokens from between the blocks: they stay in timm's order.
        if hasattr(model, "forward_intermediates"):
            model.forward_intermediates = _InOrder(model, state)

    def remove(self):
        """Give the model back as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for i in self.blocks:
            if isinstance(self.model.blocks[i].attn, Attention):
                self.model.blocks[i].attn = self.model.blocks[i].attn.original.train(self.model.training)
        self.model.__dict__.pop("forward_intermediates", None)


class Attention(nn.Module):
    """One layer's attention: timm's own module gives the parameters, under their names, and this one the call."""

    def __init__(self, original, state, shared=None):
        """original: timm's. shared: the model's module of a bias that all layers share, or None."""
        super().__init__()
        # In a tuple: it is no part of this module; their parameters, buffers and parts are the same.
        self._held, self._state = (original,), state
        self._parameters, self._buffers, self._modules = original._parameters, original._buffers, original._modules
        self._non_persistent_buffers_set = original._non_persistent_buffers_set
        self.training, self.num_heads = original.training, original.num_heads
        source = original if getattr(original, "relative_position_bias_table", None) is not None else shared
        self._bias = None if source is None else _TableBias(source)

    @property
    def original(self):
        """Timm's module."""
        return self._held[0]

    def set_window_size(self, window_size):
        """As timm's: the table of the bias for another grid."""
        self.original.set_window_size(window_size)

    def forward(self, x, rope=None, attn_mask=None, is_causal=False, shared_rel_pos_bias=None):
        """Tokens [B, N, C], in plan order where the state says so. Raises `PatternError` for what is not supported."""
        own = self.original
        if attn_mask is not None or is_causal:
            raise PatternError("sparse attention: expected no mask beside the pattern, found attn_mask or is_causal")
        if self.training and own.attn_drop.p:
            raise PatternError(f"sparse attention: expected no attention dropout in training, found {own.attn_drop.p}")
        q, k, v = _projected(own, x)
        ordered = self._state.ordered
        if rope is not None:
            rope = self._state.rotations(rope)
            q, k = (_rotated(each, rope, getattr(own, "rotate_half", False)).type_as(v) for each in (q, k))
        out = self._state.attention.attend(q, k, v, self._state.grid, bias=self._bias, ordered=ordered)
        out = out.transpose(1, 2).flatten(2)
        if getattr(own, "norm", None) is not None:
            out = own.norm(out)
        if getattr(own, "gate", None) is not None:
            out = out * own.gate(x).sigmoid()
        return own.proj_drop(own.proj(out))


class _State:
    """What the layers of a model share in a call: the pattern, the grid of the images, how tokens stand."""

    def __init__(self, attention, keeps):
        self.attention, self.keeps = attention, keeps
        self.grid, self.ordered, self.in_order = None, False, False

    def see(self, patch_embed, arguments):
        """Before the patches are embedded: the grid of these images."""
        height, width = arguments[0].shape[-2:]
        self.grid = tuple(map(int, patch_embed.dynamic_feat_size((height, width))))
        self.ordered = False

    def enter(self, block, arguments):
        """Before the first sparse block."""
        self.ordered = self.keeps and not self.in_order and not self.attention.full
        return (self.attention.enter(arguments[0], self.grid), *arguments[1:]) if self.ordered else None

    def leave(self, block, arguments, out):
        """After the last sparse block."""
        if not self.ordered:
            return None
        # Of a block that is computed again, in checkpointing, tokens stand as they did: the state stays.
        return self.attention.leave(out, self.grid)

    def rotations(self, rope):
        """Rotations [..., N, 2 D] (sine, cosine) of all tokens, as they stand, of those of the patches."""
        half = rope.shape[-1] // 2
        special = rope.new_zeros((*rope.shape[:-2], self.attention.n_special, rope.shape[-1]))
        # Special tokens are not turned.
        special[..., half:] = 1
        rope = torch.cat((special, rope), dim=-2)
        if not self.ordered:
            return rope
        *others, n, width = rope.shape
        return self.attention.enter(rope.reshape(-1, n, width), self.grid).reshape(*others, n, width)


class _InOrder:
    """``forward_intermediates`` of a model, with tokens in timm's order between the blocks."""

    def __init__(self, model, state):
        self._model, self._state = (model,), state

    def __call__(self, *arguments, **named):
        self._state.in_order = True
        try:
            (model,) = self._model
            return type(model).forward_intermediates(model, *arguments, **named)
        finally:
            self._state.in_order = False


def _known():
    """Classes of models, and of attention, that can be sparsified."""
    try:
        from timm.layers.attention import Attention as Plain
        from timm.layers.attention import AttentionRope
        from timm.models import beit, eva, vision_transformer
    except ImportError as error:
        raise Unavailable(f"timm cannot be imported: {error}") from error
    models = vision_transformer.VisionTransformer, beit.Beit, eva.Eva
    return models, (Plain, AttentionRope, beit.Attention, eva.EvaAttention)


def _checked(model, blocks, known):
    """Numbers of the blocks, ascending. Raises `ConfigError`."""
    models, layers = known
    if not isinstance(model, models):
        names = ", ".join(each.__name__ for each in models)
        raise ConfigError(f"model: expected one of timm's {names}, found {type(model).__name__}")
    depth = len(model.blocks)
    chosen = sorted(set(range(depth) if blocks is None else blocks))
    if not chosen or not all(isinstance(i, int) and 0 <= i < depth for i in chosen):
        raise ConfigError(f"blocks: expected numbers from 0 to {depth - 1}, at least one, found {chosen}")
    for i in chosen:
        layer = getattr(model.blocks[i], "attn", None)
        if isinstance(layer, Attention):
            raise ConfigError(f"block {i}: expected timm's own attention, found a sparse one; remove() that first")
        if type(layer) not in layers:
            names = ", ".join(f"{each.__module__.rpartition('.')[2]}.{each.__name__}" for each in layers)
            raise ConfigError(f"block {i}: expected attention of timm's {names}, found {type(layer).__name__}")
        own = getattr(layer, "relative_position_bias_table", None)
        if own is not None and getattr(model, "rel_pos_bias", None) is not None:
            raise ConfigError(f"block {i}: expected one bias, of the layer or of the model, found both")
    if any(isinstance(getattr(block, "attn", None), Attention) for block in model.blocks):
        raise ConfigError("model: expected timm's own attention in all blocks, found sparse ones; remove() these first")
    if not hasattr(model.patch_embed, "dynamic_feat_size"):
        raise ConfigError(f"model: expected patches of timm's PatchEmbed, found {type(model.patch_embed).__name__}")
    return chosen


def _keeps_order(model, chosen):
    """Whether tokens may stay in plan order from the first sparse block to the last."""
    if len(chosen) == chosen[-1] - chosen[0] + 1:
        return True
    # A dense block between them gets rotations and biases in timm's order.
    biased = any(getattr(b.attn, "relative_position_bias_table", None) is not None for b in model.blocks)
    return not biased and getattr(model, "rel_pos_bias", None) is None and getattr(model, "rope", None) is None


def _head_dim(layer):
    own = getattr(layer, "head_dim", None)
    return layer.qkv.out_features // 3 // layer.num_heads if own is None else own


def _projected(own, x):
    """Queries, keys and values [B, H, N, D] of tokens x [B, N, C], by the layer's own projections and norms."""
    if getattr(own, "qkv", None) is None:
        q, k, v = (each(x) for each in (own.q_proj, own.k_proj, own.v_proj))
    elif getattr(own, "q_bias", None) is None:
        q, k, v = own.qkv(x).chunk(3, dim=-1)
    else:
        bias = torch.cat((own.q_bias, own.k_bias, own.v_bias))
        q, k, v = (own.qkv(x) + bias if own.qkv_bias_separate else F.linear(x, own.qkv.weight, bias)).chunk(3, dim=-1)
    dim = _head_dim(own)
    q, k, v = (each.unflatten(-1, (-1, dim)).transpose(1, 2) for each in (q, k, v))
    if hasattr(own, "q_norm"):
        q, k = own.q_norm(q), own.k_norm(k)
    # Of grouped queries, keys and values are shared by neighbouring heads.
    groups = getattr(own, "num_kv_groups", 1)
    return (q, k, v) if groups == 1 else (q, *(each.repeat_interleave(groups, dim=1) for each in (k, v)))


def _rotated(x, rope, half):
    """x [B, H, N, D] turned by timm's own function."""
    from timm.layers import apply_rot_embed_cat

    return apply_rot_embed_cat(x, rope, half=half)


class _TableBias(LayerBias):
    """Of a module of timm's that has a table and the places of all pairs in it."""

    def __init__(self, source):
        super().__init__()
        # In a copy of the model, the copy's.
        self._source = source

    def table(self):
        return self._source.relative_position_bias_table.T

    def index(self, rows, cols):
        places = self._source.relative_position_index.cpu().numpy()
        return places[np.asarray(rows), np.asarray(cols)]

    def pairs(self):
        table, places = self._source.relative_position_bias_table, self._source.relative_position_index
        return table[places.flatten()].unflatten(0, places.shape).movedim(-1, 0)
