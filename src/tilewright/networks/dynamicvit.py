"""DynamicViT: vision transformers (DeiT and LV-ViT) that score their patches three times and keep the best.

Which patches stay is known only once the image has been seen, so there is no plan on disk here. Inference drops the
others, and those that an image keeps attend to each other: a batch is block diagonal, a block for each image.

    ``native``: as published, kept tokens are gathered, best first, and attend by torch's dense attention.
    ``tilewright``: kept tokens are packed in their own order, once per pruning, and attend by `tilewright.packed.pack`.
    ``dense``: all tokens stay to the end, as in training; pruned ones are hidden from the others by a mask.
    ``flex``: the same through compiled FlexAttention, which reads who is kept; compiled once per shape.
    ``full``: all tokens stay to the end, and none is hidden: another network, without pruning.

Before the first pruning there is nothing to leave out: all of them attend by torch's dense attention there.

Source: Rao et al., "DynamicViT: Efficient Vision Transformers with Dynamic Token Sparsification" (2021), and its code.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Annotated, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tilewright.core.errors import ConfigError
from tilewright.masks import dynamicvit as pattern
from tilewright.networks import _precision, attention_sites, attentions, vit_parts
from tilewright.networks.attentions.dense import MASK_BYTES
from tilewright.packed import pack
from tilewright.packed.pruners import _scores
from tilewright.packed.pruners._predictor import Predictor
from tilewright.torch_attention import flex

EXCHANGED = attentions

# Channels of LV-ViT's stem; kernel, stride and padding of its convolutions (``p_emb='4_2'``).
STEM = 64
CONVOLUTIONS = ((7, 2, 3), (3, 1, 1), (3, 1, 1))
# LV-ViT halves what a layer adds (``skip_lam``), and adds half of the best patch's logits.
SKIP = 2.0
PATCH_SHARE = 0.5


class Options(vit_parts.Sizes, frozen=True, forbid_unknown_fields=True):
    """One network. image_size: pixels a side, or (height, width). patch: pixels, 16 as published, others for DeiTs.

    keep_ratio: rho; each pruning leaves this share of those before it, ``int(n rho^i)`` of all n patches.
    """

    variant: Literal["deit-256", "deit-s", "deit-b", "lvvit-s", "lvvit-m"]
    # Without a bound of its own: msgspec crashes on a union of a bounded number and a tuple.
    image_size: int | tuple[int, int] = 224
    patch: Annotated[int, msgspec.Meta(ge=1)] = 16
    keep_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.7
    num_classes: Annotated[int, msgspec.Meta(ge=1)] = 1000

    def __post_init__(self) -> None:
        if self.patch > min(self.pixels):
            raise ConfigError(f"patch: expected at most the image size {self.size_name}, found {self.patch}")
        if self.lvvit and self.patch != 16:
            raise ConfigError(f"patch: expected 16 for {self.variant}, found {self.patch}")
        # The published DeiTs can continue with the class token alone; the published LV-ViTs have no maximum to take.
        if self.lvvit and not self.kept[-1]:
            raise ConfigError(
                f"keep_ratio: expected one that keeps a patch, for {self.variant} needs one to classify; found "
                f"{self.keep_ratio}, which leaves {self.kept} of {self.grid[0] * self.grid[1]}"
            )

    @property
    def lvvit(self) -> bool:
        """Whether the backbone is an LV-ViT."""
        return self.variant.startswith("lvvit")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches; what is left over at the right and at the bottom is not seen."""
        return self.grid_of(self.patch)

    @property
    def kept(self) -> list[int]:
        """Patches that are kept after each pruning."""
        return pattern.kept_of(self.grid[0] * self.grid[1], self.keep_ratio)


def name(options: Options) -> str:
    """The network's name, made as those of its graphs, e.g. ``dynamicvit-s-224``."""
    short = {variant: alias for alias, variant in pattern.ALIASES.items()}.get(options.variant, options.variant)
    return f"dynamicvit-{short}-{options.size_name}" + (f"-p{options.patch}" if options.patch != 16 else "")


def adapt(state: dict[str, torch.Tensor], network: "Network") -> dict[str, torch.Tensor]:
    """The official state with its position table resized, bilinearly as the official code does."""
    vit_parts.resize_positions(state, network, "bilinear", network.options.grid)
    return state


class Network(nn.Module):
    """Images [B, 3, H, W] to logits [B, num_classes]; parameters under the official names."""

    def __init__(self, options: Options, attention: str):
        """Random weights, drawn as published. attention: of `attentions.NAMES`."""
        super().__init__()
        self.options, self.attention = options, attention
        width, heads, self.prune_before = pattern.VARIANTS[options.variant]
        self.patch_embed = _Stem(width, options.patch) if options.lvvit else vit_parts.Patches(3, width, options.patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))  # as of torch.nn
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + options.grid[0] * options.grid[1], width))  # as of torch.nn
        # In all five networks the prunings cut the depth in four.
        self.blocks = nn.ModuleList(_block(width, heads, options.lvvit) for _ in range(4 * self.prune_before[0]))
        self.norm = nn.LayerNorm(width, _eps(options.lvvit))
        self.head = nn.Linear(width, options.num_classes)
        if options.lvvit:
            self.aux_head = nn.Linear(width, options.num_classes)
        self.score_predictor = nn.ModuleList(Predictor(width) for _ in self.prune_before)
        vit_parts.initialise(self, self.cls_token, self.pos_embed)

    @_precision.checked
    def forward(self, images: torch.Tensor, only_kept: bool = False) -> torch.Tensor:
        """Images [B, 3, H, W] to logits, or to what `kept` returns. Raises `PatternError` for another shape."""
        x, kept = self._run(images)
        if only_kept:
            return kept
        x = self.norm(x)
        logits = _precision.logits(self.head, x[:, 0])
        if self.options.lvvit:
            logits = logits + PATCH_SHARE * _precision.logits(self.aux_head, x[:, 1:]).amax(1)
        return logits

    def kept(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Ids of the patches that stay after each pruning: three int64 [B, K_i], ascending; patches run row by row."""
        return self(images, True)

    def _run(self, images):
        """Tokens [B, 1 + K, C] of the class and of the patches kept last, and what `kept` returns."""
        rows, columns = self.options.grid
        # LV-ViT's stem rounds up: an image one pixel short of a further patch yields that patch.
        x = self.patch_embed(images)[:, :, :rows, :columns].flatten(2).transpose(-2, -1)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed
        # The patch at each place behind the class token, and whether it counts.
        patch = torch.arange(rows * columns, device=x.device).expand(len(x), -1)
        alive = torch.ones_like(patch, dtype=torch.bool)
        kept: list = []
        hide, attend = HIDING.get(self.attention), attention_sites.full
        for i, block in enumerate(self.blocks):
            if i in self.prune_before:
                score = self.score_predictor[len(kept)](x[:, 1:], alive).masked_fill(~alive, -torch.inf)
                best = score.argsort(dim=1, descending=True)[:, : self.options.kept[len(kept)]]
                kept.append(patch.gather(1, best).sort(dim=1).values)
                if self.attention == "native":
                    x, patch, alive = _gather(x, best), patch.gather(1, best), alive.gather(1, best)
                else:
                    stay = _scores.marked(best, alive.shape[1])
                    seen = F.pad(stay, (1, 0), value=True)
                    if hide:
                        alive, attend = stay, partial(attention_sites.timed, attention_sites.timed(hide, seen, x.dtype))
                    else:
                        x, attend = _pack(x, seen, 1 + best.shape[1])
                        patch, alive = kept[-1], alive.gather(1, best)
            x = block(x, attend)
        return _gather(x, kept[-1]) if hide else x, kept


def _gather(x, places):
    """The class token of x [B, 1 + n, C] and the patches at places [B, K]."""
    return torch.cat((x[:, :1], x[:, 1:].gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))), dim=1)


def _pack(x, keep, count):
    """Those of the tokens x [B, N, C] that are in keep [B, N], `count` of each image: ``([B, count, C], attend)``."""
    recorded = pack.differentiates(x.device)
    packing = pack.pack(keep, len(x) * count, tokens=x if recorded else None)
    tokens, attend = packing.tokens, packing.attend
    if tokens is None:
        tokens = attention_sites.without_backward(packing.gather, x)
        attend = partial(attention_sites.without_backward, attend)
    return tokens.unflatten(0, (-1, count)), vit_parts.InRows(partial(attention_sites.timed, attend))


def _eps(lvvit):
    """Of the layer norms: DeiT's own, LV-ViT the default."""
    return 1e-5 if lvvit else 1e-6


class _Stem(vit_parts.Patches):
    """LV-ViT's: three convolutions, which halve the image, before the patches."""

    def __init__(self, width, patch):
        super().__init__(STEM, width, patch // 2)
        for i, (kernel, stride, padding) in enumerate(CONVOLUTIONS, start=1):
            channels = 3 if i == 1 else STEM
            self.add_module(f"conv{i}", nn.Conv2d(channels, STEM, kernel, stride, padding, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(STEM))

    def forward(self, x):
        for i in range(1, 1 + len(CONVOLUTIONS)):
            x = F.relu(self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x)))
        return self.proj(x)


def _block(width, heads, lvvit):
    if lvvit:
        return vit_parts.Block(width, heads, eps=_eps(lvvit), ratio=3, bias=False, skip=SKIP)
    return vit_parts.Block(width, heads, eps=_eps(lvvit))


def masked(seen: torch.Tensor, dtype: torch.dtype) -> Callable:
    """Masked scaled-dot-product attention, the oracle; a mask too large for memory is made some rows at a time."""
    n_batch, n = seen.shape
    place = torch.arange(n, device=seen.device)
    step = max(1, MASK_BYTES // (n_batch * n * dtype.itemsize))

    def rows(lo):
        sees = seen[:, None] | (place[lo : lo + step, None] == place)
        return torch.zeros(sees.shape, dtype=dtype, device=seen.device).masked_fill_(~sees, -torch.inf)[:, None]

    whole = rows(0) if step >= n else None

    def run(q, k, v):
        if whole is not None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=whole)
        parts = [
            F.scaled_dot_product_attention(q[:, :, lo : lo + step], k, v, attn_mask=rows(lo))
            for lo in range(0, n, step)
        ]
        return torch.cat(parts, dim=2)

    return run


def flexed(seen: torch.Tensor, dtype: torch.dtype) -> Callable:
    """The same attention by compiled FlexAttention; the block mask is this batch's, the code that of the shape."""
    mask, compiled = block_mask(seen), compiled_flex(seen.device.type)

    def run(q, k, v):
        # FlexAttention has no backward on a CPU and refuses inputs that ask for one.
        with torch.no_grad():
            return compiled(q.detach(), k.detach(), v.detach(), block_mask=mask)

    return run


def block_mask(seen: torch.Tensor) -> BlockMask:
    """FlexAttention's mask of tokens that see themselves and those in seen [B, N], which reads no single pairs."""
    n = seen.shape[1]
    n_blocks = -(-n // flex.BLOCK)
    entries = F.pad(seen, (0, n_blocks * flex.BLOCK - n)).unflatten(1, (n_blocks, flex.BLOCK)).sum(2)
    own = torch.eye(n_blocks, dtype=torch.bool, device=seen.device)
    # As torch has it, blocks over the edge are never full.
    inside = torch.arange(1, 1 + n_blocks, device=seen.device) * flex.BLOCK <= n
    full = (entries == flex.BLOCK)[:, None] & inside[:, None]
    tables = []
    for kind in (((entries > 0)[:, None] | own) & ~full, full):
        first = (~kind).to(torch.int8).argsort(dim=2, stable=True)
        tables += [kind.sum(2, dtype=torch.int32)[:, None], first.to(torch.int32)[:, None]]

    def mask_mod(b, h, q, kv):
        return seen[b, kv] | (q == kv)

    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=flex.BLOCK, mask_mod=mask_mod, seq_lengths=(n, n))  # type: ignore[misc]  # mypy does not know the length of what is unpacked


def unmasked(seen: torch.Tensor, dtype: torch.dtype) -> Callable:
    """Attention among all tokens, pruned or not: what pruning is to save."""
    return F.scaled_dot_product_attention


@cache
def compiled_flex(device: torch.device | str) -> Callable:
    """FlexAttention compiled for `device`, a kind. Raises `Unavailable` without a compiler."""
    flex.need_compiler(device)
    # fullgraph: beyond its limit of recompilations torch would otherwise run uncompiled, without a warning.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


# Attention that keeps all tokens and hides the pruned ones, where every token sees the kept ones and itself, but with
# `unmasked`; the others drop them. ``HIDING[name](seen, dtype) -> run(q, k, v)`` for bool seen [B, N], who is kept, and
# q, k, v [B, H, N, D].
HIDING = {"dense": masked, "flex": flexed, "full": unmasked}
