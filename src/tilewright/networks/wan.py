"""Wan2.1-T2V whole: latents of a noisy video, a time and a prompt to the velocity of rectified flow.

Sizes, names and source: `tilewright.masks.wan`. Parameters have the official names. How the tokens of a video attend
to each other can be exchanged (`tilewright.networks.video_attentions`), and the order in which they stand.
"""

import copy
import math
import re
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from tilewright.core import _internals, registry
from tilewright.core.errors import ConfigError, PatternError
from tilewright.core.precision import in_float32
from tilewright.masks import wan as pattern
from tilewright.networks import attention_sites, rectified_flow, video_attentions
from tilewright.networks.video_attentions import Call, Video
from tilewright.slices import orders

EXCHANGED = video_attentions
EPS = 1e-6
# Of rotary positions, and of the time.
THETA = 1e4

# What owns a weight or a bias, by its official name, and what diffusers' `WanTransformer3DModel` calls it: outside of
# the layers, and in one of them.
_OUTSIDE = {
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_INSIDE = {
    "modulation": "scale_shift_table",
    # Its third norm has no parameters.
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    **{
        f"{ours}.{part}": f"{theirs}.{other}"
        for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for part, other in {
            "q": "to_q",
            "k": "to_k",
            "v": "to_v",
            "o": "to_out.0",
            "norm_q": "norm_q",
            "norm_k": "norm_k",
        }.items()
    },
}


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One network, and the clips that it is meant for. frames: of pixels, 4 n + 1.

    resolution: a name of 16:9 clips. height, width: in pixels, instead of the resolution's. layers: fewer than
    published, for small experiments.
    """

    variant: str
    resolution: str = "480p"
    frames: Annotated[int, msgspec.Meta(ge=1)] = 81
    height: Annotated[int, msgspec.Meta(ge=16)] | None = None
    width: Annotated[int, msgspec.Meta(ge=16)] | None = None
    layers: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        for what, known in (("variant", pattern.VARIANTS), ("resolution", pattern.RESOLUTIONS)):
            if getattr(self, what) not in known:
                raise ConfigError(f"{what}: expected one of {', '.join(known)}, found {getattr(self, what)!r}")
        if (self.frames - 1) % pattern.STRIDE[0]:
            raise ConfigError(f"frames: expected one more than a multiple of {pattern.STRIDE[0]}, found {self.frames}")
        units = [a * b for a, b in zip(pattern.STRIDE[1:], pattern.PATCH[1:], strict=True)]
        for what, side, unit in zip(("height", "width"), self.pixels, units, strict=True):
            if side % unit:
                raise ConfigError(f"{what}: expected a multiple of {unit} pixels, found {side}")
        if self.layers is not None and self.layers > self.published.layers:
            raise ConfigError(f"layers: expected at most {self.published.layers}, found {self.layers}")

    @property
    def published(self) -> pattern.Size:
        """The sizes of the variant."""
        return pattern.VARIANTS[self.variant]

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width of clips."""
        named = pattern.RESOLUTIONS[self.resolution]
        return self.height or named[0], self.width or named[1]

    @property
    def depth(self) -> int:
        """Layers."""
        return self.layers or self.published.layers

    @property
    def latents(self) -> tuple[int, ...]:
        """``(16, frames, rows, columns)`` of a clip's latents."""
        return pattern.latent_shape(self.frames, *self.pixels)

    @property
    def model(self) -> str:
        """What clips of all sizes have in common."""
        return f"wan-{self.variant}"

    @property
    def shift(self) -> float:
        """How far the sampler's times are shifted towards noise."""
        return pattern.SHIFTS[self.resolution]


def name(options: Options) -> str:
    """The network's name in files and figures, e.g. ``wan-1.3b-480p-81f``."""
    return f"wan-{options.variant}-{options.resolution}-{options.frames}f"


def adapt(state: dict[str, torch.Tensor], network: nn.Module) -> dict[str, torch.Tensor]:
    """The official state, or that of diffusers' `WanTransformer3DModel`, under this network's names, which are the
    official ones."""
    if not any(key.startswith("condition_embedder.") for key in state):
        return state
    return _renamed(state, *({theirs: ours for ours, theirs in names.items()} for names in (_OUTSIDE, _INSIDE)))


def diffusers_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state under the official names as diffusers' `WanTransformer3DModel` names it."""
    return _renamed(state, _OUTSIDE, _INSIDE)


def _renamed(state, outside, inside):
    """A state with other names; those that no table has stay."""
    renamed = {}
    for key, tensor in state.items():
        parts = re.fullmatch(r"(blocks\.\d+\.|)(.+?)(\.weight|\.bias|)", key)
        assert parts is not None, key
        layer, owner, kind = parts.groups()
        renamed[layer + (inside if layer else outside).get(owner, owner) + kind] = tensor
    return renamed


def rotary(grid: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """``(cos, sin)``, float32 [N, 64]: the angles of the complex pairs of a head, tokens in raster order.

    22 pairs turn with the frame, 21 with the row and 21 with the column.
    """
    third = pattern.HEAD_DIM // 6
    angles = []
    for axis, pairs in enumerate((pattern.HEAD_DIM // 2 - 2 * third, third, third)):
        speed = THETA ** (-torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs)
        shape = [grid[axis] if at == axis else 1 for at in range(3)]
        angles.append(
            (torch.arange(grid[axis], device="cpu")[:, None] * speed).view(*shape, pairs).expand(*grid, pairs)
        )
    joined = torch.cat(angles, -1).flatten(0, 2)
    return joined.cos().float(), joined.sin().float()


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads x [B, N, H, D], adjacent values as complex numbers, turned by the angles of [N, D / 2]; in float32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def frequencies(time: torch.Tensor) -> torch.Tensor:
    """Float32 [B, 256] of times [B]: cosines, then sines, of wave lengths up to 10,000."""
    half = pattern.FREQUENCIES // 2
    speeds = THETA ** (-torch.arange(half, dtype=torch.float64, device=time.device) / half)
    angles = time.double()[:, None] * speeds
    return torch.cat((angles.cos(), angles.sin()), 1).float()


def _norm(x):
    return F.layer_norm(x.float(), x.shape[-1:], eps=EPS)


def _through(module, x):
    """``module(x)`` in the type of its weights."""
    return module(x.to(next(module.parameters()).dtype))


class _Attention(nn.Module):
    """The projections of an attention; queries and keys are normed over all channels, before the heads are split."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(width, EPS), nn.RMSNorm(width, EPS)

    def split(self, x, others, angles=None):
        """Queries of x, keys and values of others, from [B, N, C] to [B, H, N, D]. angles: of `rotary`, or None."""
        x, others = x.to(self.q.weight.dtype), others.to(self.k.weight.dtype)
        q, k, v = _through(self.norm_q, self.q(x)), _through(self.norm_k, self.k(others)), self.v(others)
        q, k, v = (y.unflatten(2, (self.heads, -1)) for y in (q, k, v))
        if angles is not None:
            q, k = turned(q, *angles), turned(k, *angles)
        return (y.to(v.dtype).transpose(1, 2) for y in (q, k, v))

    def join(self, out):
        """Heads [B, H, N, D] to tokens [B, N, C]."""
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer: attention within the video, attention to the prompt, feed-forward; the time scales and shifts."""

    def __init__(self, width: int, hidden: int, heads: int):
        """As published; norms 1 and 2 have no parameters."""
        super().__init__()
        self.self_attn, self.cross_attn = _Attention(width, heads), _Attention(width, heads)
        self.norm3 = nn.LayerNorm(width, EPS)
        self.ffn = nn.Sequential(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width))
        self.modulation = nn.Parameter(torch.randn(1, 6, width) / width**0.5)  # as of torch.nn

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor, attend: "_Layer", angles: list[torch.Tensor]
    ) -> torch.Tensor:
        """Tokens [B, N, C] to tokens. time: float32 [B, 6, C]; text: [B, L, C]; ``attend(q, k, v)``; angles: of
        `rotary`."""
        shift, scale, gate, shift_2, scale_2, gate_2 = (self.modulation.float() + time).split(1, 1)
        y = _norm(x) * (1 + scale) + shift
        q, k, v = self.self_attn.split(y, y, angles)
        # Called from here, the one place where compiled code may be interrupted.
        out = attend(q, k, v)
        x = (x.float() + self.self_attn.join(out).float() * gate).to(x.dtype)
        y = F.layer_norm(x.float(), x.shape[-1:], self.norm3.weight.float(), self.norm3.bias.float(), EPS)
        out = F.scaled_dot_product_attention(*self.cross_attn.split(y, text))
        x = x + self.cross_attn.join(out).to(x.dtype)
        y = _through(self.ffn, _norm(x) * (1 + scale_2) + shift_2)
        return (x.float() + y.float() * gate_2).to(x.dtype)


class Head(nn.Module):
    """From tokens to the values of their patches."""

    def __init__(self, width: int, values: int):
        """values: of a patch, its channels fastest."""
        super().__init__()
        self.head = nn.Linear(width, values)
        self.modulation = nn.Parameter(torch.randn(1, 2, width) / width**0.5)  # as of torch.nn

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Tokens [B, N, C] to [B, N, values]; time: float32 [B, C]."""
        shift, scale = (self.modulation.float() + time[:, None]).split(1, 1)
        return _through(self.head, _norm(x) * (1 + scale) + shift)


class _Layer:
    """The attention of one layer in clips of one grid: ``layer(q, k, v)``.

    Which call it is, a stateful attention is told where compiled code does not look: that would be compiled for each
    layer, step and branch by itself.
    """

    def __init__(self, attention, layer, now):
        self.attention, self.layer, self.now = attention, layer, now

    def __call__(self, q, k, v):
        """Attend."""
        if self.attention.stateful:
            return _told(self, q, k, v)
        return attention_sites.timed(self.attention, q, k, v, None)


@_internals.uncompiled
def _told(layer, q, k, v):
    return attention_sites.timed(layer.attention, q, k, v, Call(layer.layer, **layer.now))


class _Clip(NamedTuple):
    """What depends on the grid of a clip, on one device.

    layers: a `_Layer` each. now: step and branch, of which stateful attention is told. order, back: int64 [N], how
    tokens stand and how that is undone, or None for raster. angles: of `rotary`, in order.
    """

    layers: list
    now: dict
    order: torch.Tensor | None
    back: torch.Tensor | None
    angles: list

    def ordered(self, x):
        """Tokens [B, N, C] in raster order, as they stand in the layers."""
        return x if self.order is None else x.index_select(1, self.order)

    def raster(self, x):
        """What the layers made of the tokens, in raster order."""
        return x if self.back is None else x.index_select(1, self.back)


class Sample(NamedTuple):
    """A clip's latents float32 [B, 16, T, H, W], and how many passes of the network made it."""

    latents: torch.Tensor
    passes: int


class Network(nn.Module):
    """Latents [B, 16, T, H, W] to the velocity of the same shape; parameters under the official names."""

    def __init__(
        self, options: Options, attention: str, settings: dict[str, Any] | None = None, order: str | None = None
    ):
        """Random weights, drawn as published but for the last layer, which is published as zeros.

        attention: of `video_attentions.NAMES`; settings: a dict of its ``Settings``. order: of `slices.orders.NAMES`;
        None for the attention's own, or raster.
        """
        super().__init__()
        self.options = options
        width, hidden, heads, _ = options.published
        values = pattern.CHANNELS * math.prod(pattern.PATCH)
        self.patch_embedding = nn.Conv3d(pattern.CHANNELS, width, pattern.PATCH, pattern.PATCH)
        self.text_embedding = nn.Sequential(
            nn.Linear(pattern.TEXT_WIDTH, width), nn.GELU("tanh"), nn.Linear(width, width)
        )
        self.time_embedding = nn.Sequential(nn.Linear(pattern.FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.blocks = nn.ModuleList(Block(width, hidden, heads) for _ in range(options.depth))
        self.head = Head(width, values)
        self._initialise()
        self._attend_by(attention, settings, order)

    def _initialise(self):
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patch_embedding.weight.flatten(1))
        for module in (*self.text_embedding, *self.time_embedding):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        # ASSUME: not zeros, as published for training: a network that answers zeros would make every comparison of
        # random weights empty.
        nn.init.normal_(self.head.head.weight, std=0.02)

    def _attend_by(self, attention, settings, order):
        member = registry.member(video_attentions.__name__, "attention", attention, video_attentions.NAMES)
        try:
            chosen = msgspec.convert(settings or {}, member.Settings)
        except msgspec.ValidationError as error:
            known = ", ".join(member.Settings.__struct_fields__) or "none"
            raise ConfigError(f"attention {attention}: {error}; settings: {known}") from None
        if order is not None:
            registry.check("order of tokens", order, orders.NAMES)
        self.attention, self.settings, self.order = attention, chosen, order
        self._makes, self._clips = member.Attention, {}

    def with_attention(
        self, attention: str, settings: dict[str, Any] | None = None, order: str | None = None
    ) -> "Network":
        """This very network, its weights shared, with another attention or order; arguments as of the class."""
        other = copy.copy(self)
        other._attend_by(attention, settings, order)
        return other

    def lowered(self, dtype: torch.dtype) -> "Network":
        """This network with its matrices in `dtype`; what scales and shifts stays in float32. Returns itself."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Conv3d | nn.RMSNorm) and not name.startswith("time_"):
                module.to(dtype)
        return self

    def prepare(self, latents: torch.Tensor) -> None:
        """Make what clips of the size and on the device of `latents` need, before a network is compiled or captured."""
        self.clip(pattern.grid(latents.shape), latents.device)

    def clip(self, grid: tuple[int, int, int], device: torch.device) -> _Clip:
        """What clips of `grid` need on `device`, made once.

        Raises `ConfigError` for an attention that has an order of its own and was given another.
        """
        device = torch.device(device)
        if (grid, device) not in self._clips:
            # Layers that are trained later may read the tables, too.
            with torch.inference_mode(False):
                self._clips[grid, device] = self._made(grid, device)
        return self._clips[grid, device]

    def _made(self, grid, device):
        size = self.options.published
        attention = self._makes(self.settings, Video(grid, size.heads, pattern.HEAD_DIM, self.options.depth))
        order = attention.order
        if order is not None and self.order is not None:
            raise ConfigError(
                f"order: expected none, since attention {self.attention} has an order; found {self.order!r}"
            )
        if self.order not in (None, "raster"):
            order = torch.from_numpy(orders.order(self.order, grid))
        now = {"step": 0, "branch": 0}
        layers = [_Layer(attention, layer, now) for layer in range(self.options.depth)]
        angles = rotary(grid)
        if order is None:
            return _Clip(layers, now, None, None, [x.to(device) for x in angles])
        back = torch.argsort(order)
        return _Clip(layers, now, order.to(device), back.to(device), [x[order].to(device) for x in angles])

    def compile_layers(self, **options: Any) -> "Network":
        """Compile each layer by ``torch.compile(**options)``, in place, as a whole but for a stateful attention.

        Unlike the whole network compiled, it is not compiled again for each step of such an attention. Returns itself.
        """
        for block in self.blocks:
            block.compile(**options)
        return self

    def forward(
        self,
        latents: torch.Tensor,
        time: torch.Tensor,
        text: torch.Tensor | None = None,
        *,
        step: int = 0,
        branch: int = 0,
    ) -> torch.Tensor:
        """The velocity, of the shape and type of latents [B, 16, T, H, W].

        time: [B] or a number, in [0, 1000], 1000 for pure noise. text: the prompt [B, L, 4096], L up to 512, filled up
        with zeros, all of which are seen; None for an empty one. step, branch: for attentions that keep something from
        call to call, see `video_attentions.Call`. Raises `PatternError` for other shapes.
        """
        _check(latents, text)
        grid = pattern.grid(latents.shape)
        clip = self.clip(grid, latents.device)
        x = _through(self.patch_embedding, latents).flatten(2).mT.to(self.patch_embedding.weight.dtype)
        x = clip.ordered(x)
        time = torch.as_tensor(time, device=x.device).expand(len(x))
        embedded = in_float32(self.time_embedding, frequencies(time))
        parts = in_float32(self.time_projection, embedded).unflatten(1, (6, -1))
        text = _through(self.text_embedding, _padded(text, x))
        if clip.layers[0].attention.stateful:
            clip.now.update(step=step, branch=branch)
        for block, attend in zip(self.blocks, clip.layers, strict=True):
            x = block(x, parts, text, attend, clip.angles)
        with torch.autocast(x.device.type, enabled=False):
            x = self.head(x, embedded)
        return _unpatched(clip.raster(x), grid).to(latents.dtype)

    @torch.no_grad()
    def sample(
        self,
        text: torch.Tensor | None = None,
        *,
        steps: int = 50,
        guidance: float | None = None,
        negative: torch.Tensor | None = None,
        seed: int = 0,
        batch: int | None = None,
        shape: tuple[int, ...] | None = None,
        shift: float | None = None,
        noise: torch.Tensor | None = None,
    ) -> Sample:
        """A `Sample`: clips made of noise by rectified flow in Euler's steps, the same for the same seed on any device.

        text, negative: prompts [B, L, 4096], or None for empty ones. guidance: of classifier-free guidance, which takes
        two passes a step, first that with `text`, as branch 0; None: none. batch: clips, where no text tells it. shape:
        of the latents [16, T, H, W], by default those that the network was named for; shift: of the times, likewise.
        noise: float32 [B, 16, T, H, W], instead of that drawn from `seed`.

        Raises `ConfigError` for steps or a shift that are none, and `PatternError` as `forward`.
        """
        if noise is None:
            size = (batch or (1 if text is None else len(text)), *(shape or self.options.latents))
            generator = torch.Generator("cpu").manual_seed(seed)
            noise = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
        noise = noise.to(self.patch_embedding.weight.device, torch.float32)
        attention = self.clip(pattern.grid(noise.shape), noise.device).layers[0].attention
        if attention.stateful:
            stated = {"model": self.options.model, "layers": self.options.depth, "steps": steps}
            attention.check_run(**stated, shape=noise.shape[1:])
        velocity, passes = rectified_flow.guided(self, text, negative, guidance)
        sigmas = rectified_flow.sigmas(steps, self.options.shift if shift is None else shift)
        return Sample(rectified_flow.euler(velocity, noise, sigmas), passes * steps)


def _check(latents, text):
    """Raise `PatternError` for inputs that are not what `Network.forward` takes."""
    expected = f"[B, {pattern.CHANNELS}, frames, rows, columns] with rows and columns even"
    sizes = latents.shape[2:]
    if (
        latents.ndim != 5
        or latents.shape[1] != pattern.CHANNELS
        or not latents.numel()
        or any(size % patch for size, patch in zip(sizes, pattern.PATCH, strict=True))
    ):
        raise PatternError(f"latents: expected a tensor {expected}, found {list(latents.shape)}")
    if not latents.is_floating_point():
        raise PatternError(f"latents: expected floating point, found {latents.dtype}")
    if text is None:
        return
    batch, tokens = len(latents), pattern.TEXT_TOKENS
    if text.ndim != 3 or len(text) != batch or text.shape[2] != pattern.TEXT_WIDTH or not 0 < text.shape[1] <= tokens:
        expected = f"[{batch}, 1 to {tokens}, {pattern.TEXT_WIDTH}]"
        raise PatternError(f"text: expected a tensor {expected}, found {list(text.shape)}")


def _padded(text, x):
    """The prompt with all its tokens, for tokens x [B, N, C]. Attention to an empty one is that to one of its tokens:
    they are equal."""
    if text is None:
        return x.new_zeros(len(x), 1, pattern.TEXT_WIDTH)
    return F.pad(text, (0, 0, 0, pattern.TEXT_TOKENS - text.shape[1]))


def _unpatched(x, grid):
    """Tokens [B, N, values] to latents [B, 16, T, H, W]."""
    x = x.unflatten(2, (*pattern.PATCH, pattern.CHANNELS)).unflatten(1, grid)
    return x.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
