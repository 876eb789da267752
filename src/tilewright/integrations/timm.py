"""Attention over a pattern in timm's vision transformers: ViT, DeiT, DINOv2 (with registers), BEiT, EVA, DINOv3.

`sparsify` changes no weight and no name of one. Special tokens, position tables, their resampling, rotations, norms and
biases are timm's own. Tokens are put into plan order once, before the first sparse block, and back after the last.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from tilewright.core import _internals
from tilewright.core.errors import ConfigError, PatternError, Unavailable
from tilewright.integrations._calls import Calls
from tilewright.nn.attention import BiasPlans, LayerBias, PairBias, Patterned

# Of a layer: modules that do nothing where it has none.
NORMS = "q_norm", "k_norm", "norm"


def sparsify(model: Any, pattern: Any, blocks: Any = None, *, plans: Any = None) -> Any:
    """Let the attention of a timm model attend over a pattern.

    Parameters
    ----------
    model : torch.nn.Module
        A ``VisionTransformer``, ``Beit`` or ``Eva`` of timm, for images of any size that it takes itself
        (``dynamic_img_size``, ``set_input_size``).
    pattern : str, Graph, matrix or callable
        A name of `nn.patterns.NAMED` such as ``window-15-g5``, with ``-g<special tokens of the model>``; ``full``; a
        `Graph` or matrix [N, N]; or ``callable(grid, n_special)``.
    blocks : iterable of int, optional
        Numbers of the blocks; None takes all.
    plans : networks.plans.Plans, optional
        Order, solver and tiles. Plans are made in the first call and kept on disk.

    Returns
    -------
    Sparsified
        Its ``remove()`` gives the model back as it was.

    Raises
    ------
    Unavailable
        Without timm.
    ConfigError
        For models and blocks that cannot be sparsified. The model is left as it was.
    PatternError, UnknownNameError
        For a pattern that does not fit. The model is left as it was.
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
    """A model of timm whose attention attends over a pattern; `sparsify` makes it.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which is changed in place.
    attention : callable
        Makes the sparse attention of a block.
    chosen : list of int
        Numbers of the blocks.
    """

    def __init__(self, model: Any, attention: Any, chosen: Any):
        """Change `model`, which `sparsify` has checked."""
        self.model, self.attention, self.blocks = model, attention, chosen
        state = _State(attention, _keeps_order(model, chosen))
        shared = getattr(model, "rel_pos_bias", None)
        model.__class__ = _changed(Model, type(model))  # type: ignore[arg-type]  # timm's own class has it
        model._sparse = state
        for i in chosen:
            layer = model.blocks[i].attn
            form = _Form.of(layer, shared is not None)
            layer.__class__ = _changed(Attention, type(layer), form)  # type: ignore[arg-type]  # timm's own class has it
            # In a tuple: it is no part of the layer.
            layer._sparse, layer._plans, layer._shared = state, BiasPlans(), (shared,)
        _enclose(model)

    def remove(self) -> None:
        """Restore the model's own attention."""
        remove(self.model)


def remove(model: Any) -> None:
    """Give a model that `sparsify` changed, or a copy of one, back as it was."""
    for module in (model, model.patch_embed, *model.blocks, *_layers(model)):
        if isinstance(module, _Changed):
            module.__class__ = module.OWN
            for name in ("_sparse", "_plans", "_shared"):
                vars(module).pop(name, None)


class _Changed:
    """A module of timm's by another class, made for its own one and its form: parameters and their names stay."""

    if TYPE_CHECKING:
        # What timm's own class has.
        def __getattr__(self, name: str) -> Any: ...

    def __reduce__(self):
        return _blank, (self.CHANGE, self.OWN, self.FORM), self.__dict__

    @_internals.constant
    def _known(self) -> Any:
        """Its form. A compiler guards the class of a module, and each value that it finds by itself."""
        return self.FORM


@functools.cache
def _changed(change, own, form=None):
    """The class `own` with what the class `change` says, for modules of a form."""
    said = {"CHANGE": change, "OWN": own, "FORM": form, "_theirs": own.forward, "__module__": __name__}
    return type(f"Sparse{own.__name__}", (change, own), said)


def _blank(change, own, form):
    """Of a copy, before it has a state."""
    made = _changed(change, own, form)
    return made.__new__(made)


class Model(_Changed):
    """A model with sparse layers."""

    def forward_intermediates(self, *arguments: Any, **named: Any) -> Any:
        """As timm's. It returns tokens from between the blocks: they stay in timm's order."""
        with self._sparse.orders.inside(True):
            return super().forward_intermediates(*arguments, **named)  # type: ignore[misc]  # timm's own class has it

    def prune_intermediate_layers(self, *arguments: Any, **named: Any) -> Any:
        """As timm's. Tokens are put back after the last block that is left."""
        try:
            return super().prune_intermediate_layers(*arguments, **named)  # type: ignore[misc]  # timm's own class has it
        finally:
            _enclose(self)


class Patches(_Changed):
    """What embeds the patches of a model: a call begins."""

    def forward(self, x: torch.Tensor) -> Any:
        """As timm's own."""
        self._sparse.see(self, x)
        return self._theirs(x)


class Block(_Changed):
    """A block of a model: what its layers are to know of a call begins here."""

    def forward(self, x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        """As timm's own."""
        # What is compiled to infer is never computed again.
        if torch.is_grad_enabled() or not torch.compiler.is_compiling():
            self._sparse.calls.begin(x)
        return self._theirs(x, *arguments, **named)


class Edge(_Changed):
    """The first sparse block or the last, as its form says: tokens are in plan order from the one to the other."""

    def forward(self, x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        """As timm's own."""
        first, last = self._known()
        self._sparse.calls.begin(x)
        if first:
            x = self._sparse.enter(x)
        x = self._theirs(x, *arguments, **named)
        return self._sparse.leave(x) if last else x


class Attention(_Changed):
    """One layer's attention: timm's own module with another call."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # What was compiled is guarded by the class.
        if name in NORMS and self.FORM.plain and not self._bare():
            self.__class__ = _changed(Attention, self.OWN, self.FORM._replace(plain=False))  # type: ignore[arg-type]  # timm's own class has it

    @_internals.constant
    def _bare(self) -> bool:
        """Whether the norms of a plain layer do nothing that anyone sees: then they are not called."""
        for name in NORMS:
            norm = self._modules.get(name)
            if norm is not None and (type(norm) is not torch.nn.Identity or _internals.hooked(norm)):
                return False
        return True

    def _replicate_for_data_parallel(self):
        # The replica of a module that is no part of this one is not known here.
        replica = super()._replicate_for_data_parallel()  # type: ignore[misc]  # timm's own class has it
        replica._shared = (None,)
        return replica

    def forward(
        self,
        x: torch.Tensor,
        rope: Any = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        shared_rel_pos_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens [B, N, C], in plan order where the call says so. Raises `PatternError` for what is not supported."""
        if attn_mask is not None or is_causal:
            raise PatternError("sparse attention: expected the pattern as the only mask, found attn_mask or is_causal")
        if self.training and self.attn_drop.p:
            raise PatternError(f"sparse attention: expected no attention dropout in training, found {self.attn_drop.p}")
        sparse, form = self._sparse, self._known()
        grid, ordered = sparse.call()
        if form.plain and rope is None and shared_rel_pos_bias is None and self._bare():
            out = sparse.attention.of_projection(self.qkv(x), grid, ordered=ordered)
            return self.proj_drop(self.proj(out))
        q, k, v = _projected(self, form, x)
        if rope is not None:
            rope = sparse.rotations(rope, grid, ordered)
            q, k = (_rotated(each, rope, getattr(self, "rotate_half", False)).type_as(v) for each in (q, k))
        bias: Any = None
        if form.table:
            bias = _TableBias(self, self._plans)
        elif form.shared and self._shared[0] is not None:
            bias = _TableBias(self._shared[0], self._plans)
        elif shared_rel_pos_bias is not None:
            shape = tuple(shared_rel_pos_bias.shape[-3:])
            bias = PairBias(shape, self._plans, shared_rel_pos_bias.view(shape))
        out = sparse.attention.attend(q, k, v, grid, bias=bias, ordered=ordered)
        out = out.transpose(1, 2).flatten(2)
        if form.norm:
            out = self.norm(out)
        if form.gate:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    @_internals.constant
    def _plan_bias(self, plan):
        self._plans.made(plan, _TableBias(self, self._plans))
        return True


class _Form(NamedTuple):
    """What a layer of timm's consists of. To ask a module for what it has not takes the host microseconds."""

    head_dim: int
    # Queries, keys and values by one projection, which has a bias for each.
    fused: bool
    biases: bool
    # Of queries and keys, of the result, which may do nothing; and its gate.
    qk_norm: bool
    norm: bool
    gate: bool
    # Neighbouring heads of queries that share keys and values.
    groups: int
    # A bias of its own, or of the model's.
    table: bool
    shared: bool
    # Nothing of all this but one projection and norms.
    plain: bool

    @classmethod
    def of(cls, layer: Any, shared: bool) -> "_Form":
        """The form of a layer. shared: whether the model has a bias of all layers."""

        def has(name):
            return getattr(layer, name, None) is not None

        found = cls(
            head_dim=_head_dim(layer),
            fused=has("qkv"),
            biases=has("q_bias"),
            qk_norm=has("q_norm"),
            norm=has("norm"),
            gate=has("gate"),
            groups=getattr(layer, "num_kv_groups", 1),
            table=has("relative_position_bias_table"),
            shared=shared,
            plain=False,
        )
        without = found._replace(qk_norm=False, norm=False)
        return found._replace(plain=without[1:] == (True, False, False, False, False, 1, False, False, False))


class _State:
    """What the layers of a model share: the pattern, and the calls."""

    # A compiler guards that no method of an object is one of its own, but where it can have none.
    __slots__ = "attention", "calls", "keeps", "orders"

    def __init__(self, attention, keeps):
        self.attention, self.keeps = attention, keeps
        # A call: the grid of its images; whether tokens stand in plan order from the first sparse block to the last.
        # `orders`: whether tokens stay in timm's order between the blocks.
        self.calls, self.orders = Calls(), Calls()

    def see(self, patch_embed, images):
        """Before the patches are embedded: a call begins, with the grid of these images."""
        rows, columns = patch_embed.dynamic_feat_size(images.shape[-2:])
        grid = int(rows), int(columns)
        ordered = self.keeps and not self.attention.full and not self.orders.now()
        self.calls.enter((grid, ordered), self.attention.n_special + grid[0] * grid[1])  # type: ignore[arg-type]  # timm's own class has it

    def call(self):
        """The call that this thread is in. Raises `PatternError` where there is none."""
        found = self.calls.now()
        if found is None:
            raise PatternError("sparse attention: expected a call of patch_embed with images first, found none")
        return found

    def enter(self, x):
        """Tokens of the first sparse block."""
        grid, ordered = self.call()
        return self.attention.enter(x, grid) if ordered else x

    def leave(self, x):
        """Tokens after the last sparse block."""
        grid, ordered = self.call()
        return self.attention.leave(x, grid) if ordered else x

    def rotations(self, rope, grid, ordered):
        """Rotations [..., N, 2 D] (sine, cosine) of all tokens, as they stand, of those of the patches."""
        half = rope.shape[-1] // 2
        special = rope.new_zeros((*rope.shape[:-2], self.attention.n_special, rope.shape[-1]))
        # Special tokens are not turned.
        special[..., half:] = 1
        rope = torch.cat((special, rope), dim=-2)
        if not ordered:
            return rope
        *others, n, width = rope.shape
        return self.attention.enter(rope.reshape(-1, n, width), grid).reshape(*others, n, width)


def _enclose(model):
    """Have a model's patches and blocks tell its state of calls; tokens are in plan order in the sparse blocks."""
    sparse = [block for block in model.blocks if isinstance(getattr(block, "attn", None), Attention)]
    ends = [(sparse[:1] == [block], sparse[-1:] == [block]) for block in model.blocks]
    forms = [(Edge, end) if any(end) else (Block, None) for end in ends]
    for (change, form), module in zip(((Patches, None), *forms), (model.patch_embed, *model.blocks), strict=True):
        own = module.OWN if isinstance(module, _Changed) else type(module)
        module.__class__ = _changed(change, own, form)  # type: ignore[arg-type]  # a class is hashable
        module._sparse = model._sparse


def _layers(model):
    return [layer for block in model.blocks if (layer := getattr(block, "attn", None)) is not None]


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


def _projected(own, form, x):
    """Queries, keys and values [B, H, N, D] of tokens x [B, N, C], by the layer's own projections and norms."""
    if form.fused:
        if not form.biases:
            made = own.qkv(x)
        else:
            bias = torch.cat((own.q_bias, own.k_bias, own.v_bias))
            made = own.qkv(x) + bias if own.qkv_bias_separate else F.linear(x, own.qkv.weight, bias)
        q, k, v = made.view(*x.shape[:2], 3, -1, form.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    else:
        made = (each(x) for each in (own.q_proj, own.k_proj, own.v_proj))
        q, k, v = (each.unflatten(-1, (-1, form.head_dim)).transpose(1, 2) for each in made)
    if form.qk_norm:
        q, k = own.q_norm(q), own.k_norm(k)
    # Of grouped queries, keys and values are shared by neighbouring heads.
    return (q, k, v) if form.groups == 1 else (q, *(each.repeat_interleave(form.groups, dim=1) for each in (k, v)))


def _rotated(x, rope, half):
    """x [B, H, N, D] turned by timm's own function."""
    from timm.layers import apply_rot_embed_cat

    return apply_rot_embed_cat(x, rope, half=half)


class _TableBias(LayerBias):
    """Of a module of timm's that has a table and the places of all pairs in it."""

    def table(self):
        return self.source.relative_position_bias_table.T

    def index(self, rows, cols):
        places = self.source.relative_position_index.cpu().numpy()
        return places[np.asarray(rows), np.asarray(cols)]

    def pairs(self):
        table, places = self.source.relative_position_bias_table, self.source.relative_position_index
        return table[places.flatten()].unflatten(0, places.shape).movedim(-1, 0)
