"""The processor for the video decoder of LTX-2.5: a module like its attention, and diffusers' own where it is there."""

import importlib

import pytest
import torch
from torch import nn

from helpers.gpu import TRITON_DEVICE
from tilewright import neighborhood, reference
from tilewright.core.errors import ConfigError, Unavailable
from tilewright.integrations import diffusers as adapter
from tilewright.integrations.diffusers import NeighborhoodProcessor


class Rope(nn.Module):
    """Channels of three axes, which turn in pairs by position."""

    def __init__(self, split):
        super().__init__()
        self.base, self.rope_dim_split = 10_000.0, split

    def forward(self, x):
        """x: [B, T, H, W, heads, d]."""
        parts = []
        for axis, part in enumerate(x.split(self.rope_dim_split, -1), 1):
            places = torch.arange(x.shape[axis]).view([-1 if i == axis else 1 for i in range(6)])
            n = part.shape[-1]
            angle = places.to(x) * (self.base ** -(torch.arange(0, n, 2).double() / max(n, 1))).to(x)
            turned = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(angle * 0 + 1, angle)
            parts.append(torch.view_as_real(turned).flatten(-2))
        return torch.cat(parts, -1)


class Attention(nn.Module):
    """What the processor uses of the decoder's attention."""

    def __init__(self, heads=2, head_dim=16, kernel_size=(3, 2, 5), split=(4, 6, 6)):
        super().__init__()
        self.heads, self.head_dim, self.kernel_size, self.scale = heads, head_dim, kernel_size, head_dim**-0.5
        width = heads * head_dim
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.norm_q, self.norm_k = (nn.RMSNorm(head_dim, eps=1e-6) for _ in range(2))
        nn.init.normal_(self.norm_q.weight), nn.init.normal_(self.norm_k.weight)
        self.to_out, self.rope = nn.ModuleList([nn.Linear(width, width), nn.Dropout(0.0)]), Rope(split)

    def project_qkv(self, x):
        """Queries, keys and values [B, T, H, W, heads, d]."""
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)) for project in (self.to_q, self.to_k, self.to_v))
        return self.rope(self.norm_q(q) * self.scale), self.rope(self.norm_k(k)), v


@pytest.fixture
def attention():
    torch.manual_seed(0)
    return Attention()


@pytest.fixture
def tokens():
    return torch.randn(2, 4, 5, 6, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
def test_it_attends_as_the_oracle(attention, tokens, fused, monkeypatch):
    # The interpreter runs the kernel on tensors of the CPU.
    monkeypatch.setattr(adapter, "FUSED_ON", ("cpu", "cuda"))
    attention, tokens = attention.to(TRITON_DEVICE), tokens.to(TRITON_DEVICE)
    calls = []
    attention.norm_q.register_forward_hook(lambda *_: calls.append("norm"))
    found = NeighborhoodProcessor(fused)(attention, tokens)
    assert calls == ["norm"] * (not fused)
    q, k, v = (x.double() for x in attention.cpu().project_qkv(tokens.cpu()))
    out = reference.neighborhood(q, k, v, attention.kernel_size, scale=1.0)[0].flatten(-2)
    expected = nn.functional.linear(out, *(w.double() for w in attention.to_out[0].parameters()))
    assert found.shape == tokens.shape and (found.cpu() - expected).abs().max() <= 1e-5


@torch.no_grad()
def test_scores_stay_below_a_bound_that_follows_the_gains(attention, tokens, monkeypatch):
    bounds, attend = [], neighborhood.attend

    def record(*given, **named):
        bounds.append(named["bound"])
        return attend(*given, **named)

    monkeypatch.setattr(neighborhood, "attend", record)
    for factor in (1.0, 1.5, 100.0):
        attention.norm_q.weight.mul_(factor)
        NeighborhoodProcessor()(attention, tokens)
        q, k, _ = (x.flatten(0, 4) for x in attention.project_qkv(tokens))
        if factor == 100.0:
            assert bounds.pop() is None
        else:
            assert float((q @ k.T).max()) <= bounds[-1] <= adapter.LARGEST_BOUND
    assert bounds[1] == pytest.approx(1.5 * bounds[0])


def test_gradients_go_by_the_modules_own_operations(attention, tokens, monkeypatch):
    monkeypatch.setattr(adapter, "FUSED_ON", ("cpu",))
    NeighborhoodProcessor()(attention, tokens).square().sum().backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in attention.parameters())


@torch.no_grad()
def test_a_compiler_sees_one_graph(attention, tokens, monkeypatch):
    monkeypatch.setattr(adapter, "FUSED_ON", (TRITON_DEVICE,))
    torch._dynamo.reset()
    call, attention, tokens = NeighborhoodProcessor(), attention.to(TRITON_DEVICE), tokens.to(TRITON_DEVICE)
    found = torch.compile(call, backend="aot_eager", fullgraph=True)(attention, tokens)
    assert torch.allclose(found, call(attention, tokens), atol=1e-6)


def test_others_attention_is_refused(attention, tokens, monkeypatch):
    with pytest.raises(Unavailable, match="found Linear without project_qkv, kernel_size, to_out"):
        NeighborhoodProcessor()(nn.Linear(2, 2), tokens)
    with pytest.raises(ConfigError, match="fused: expected True or False, found 1"):
        NeighborhoodProcessor(fused=1)
    monkeypatch.setattr(adapter, "FUSED_ON", ("cpu",))
    attention.norm_k = nn.LayerNorm(16)
    with torch.no_grad(), pytest.raises(Unavailable, match="for fused=True, found RMSNorm and LayerNorm"):
        NeighborhoodProcessor()(attention, tokens)
    attention.norm_k = attention.rope.base = None
    with torch.no_grad(), pytest.raises(Unavailable, match=r"without norm_k\.weight, norm_k\.eps, rope\.base"):
        NeighborhoodProcessor()(attention, tokens)


@pytest.fixture(scope="module")
def theirs():
    """diffusers' module of the decoder."""
    name = "diffusers.models.autoencoders.ltx2_diffusion_decoder"
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    return pytest.importorskip(name, reason="this diffusers has no video decoder of LTX-2.5")


@pytest.fixture
def decoder(theirs):
    torch.manual_seed(0)
    return theirs.LTX2VideoDiffusionDecoderModel(
        latent_channels=4,
        patch_size=2,
        decoder_head_dim=8,
        decoder_stage_channels=(64, 32, 16, 16, 16),
        decoder_stage_depths=(1, 1, 1, 1, 2),
        decoder_stage_kernels=((3, 3, 3), (3, 3, 3), (3, 4, 5), (3, 5, 5)),
        decoder_upsample_strides=((1, 1, 1), (2, 2, 2), (2, 1, 1), (2, 2, 1)),
        decoder_upsample_channel_reductions=(2, 2, 1, 1),
        decoder_stage5_kernel=(5, 7, 4),
        decoder_t_emb_dim=16,
        spatial_compression_ratio=4,
    ).eval()


def decoded(decoder, latents):
    return decoder.decode(latents, generator=torch.Generator(latents.device).manual_seed(0)).sample


@torch.no_grad()
@pytest.mark.parametrize("tiled", [False, True])
def test_the_decoder_answers_the_same(decoder, theirs, monkeypatch, tiled):
    latents = torch.randn(1, 4, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    if tiled:
        decoder.enable_tiling(*(24, 12, 10), *(24, 6, 10))
    tiles, denoise = [], decoder.decoder.denoise
    decoder.decoder.denoise = lambda *given: tiles.append(given) or denoise(*given)
    expected = decoded(decoder, latents)
    assert (len(tiles) > 1) == tiled
    decoder.set_attn_processor(NeighborhoodProcessor())
    monkeypatch.setattr(theirs, "_neighborhood_block_mask", None)
    found = decoded(decoder, latents)
    assert found.isfinite().all() and expected.std() > 0.01
    assert (found - expected).abs().max() <= 1e-5
    if TRITON_DEVICE == "cpu":
        monkeypatch.setattr(adapter, "FUSED_ON", ("cpu",))
        assert (decoded(decoder, latents) - expected).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.skipif(TRITON_DEVICE == "cpu", reason="bfloat16 on a GPU")
@pytest.mark.parametrize("fused", [False, True])
def test_attention_in_bfloat16_is_that_of_diffusers(theirs, fused):
    torch.manual_seed(0)
    attention = theirs.LTX2VideoVaeNeighborhoodAttention(256, (5, 7, 11)).to("cuda")
    tokens = torch.randn(1, 9, 16, 20, 256, device="cuda")
    exact = attention(tokens)
    attention, tokens = attention.to(torch.bfloat16), tokens.to(torch.bfloat16)
    assert attention.build_block_mask(tokens) is not None
    attention.set_processor(NeighborhoodProcessor(fused))
    assert attention.build_block_mask(tokens) is None
    assert (attention(tokens) - exact).norm() <= 0.02 * exact.norm()


def test_the_names_it_uses_are_those_of_diffusers(theirs):
    attention = theirs.LTX2VideoVaeNeighborhoodAttention(64, (3, 3, 3))
    adapter._expect(attention, adapter.USED + adapter.USED_FUSED)
    assert importlib.import_module("diffusers").LTX2VideoDiffusionDecoderModel
