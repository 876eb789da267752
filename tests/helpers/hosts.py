"""Small networks of diffusers with random weights, by family, and what they are called with."""

from functools import partial

import torch

# Tokens of the small videos: 3 frames of 6 x 8.
GRID = 3, 6, 8
VIDEO = 144
# Of prompts, of which the second is shorter where a class pads.
TEXT, SHORT = 20, 7


def random(*shape, seed=0):
    """Numbers that do not depend on other calls."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _padded():
    return (torch.arange(TEXT) < torch.tensor([[TEXT], [SHORT]])).long()


def _wan(channels=16, **given):
    return {
        "hidden_states": random(2, channels, 3, 12, 16),
        "timestep": torch.tensor([900.0, 10.0]),
        "encoder_hidden_states": random(2, 512, 32),
        **given,
    }


def _hunyuan():
    return {
        "hidden_states": random(2, 16, 3, 12, 16),
        "timestep": torch.tensor([900.0, 10.0]),
        "encoder_hidden_states": random(2, TEXT, 24),
        "encoder_attention_mask": _padded(),
        "pooled_projections": random(2, 16),
        "guidance": torch.tensor([6000.0, 6000.0]),
    }


def _hunyuan15():
    # Of 5 image tokens, 4 of glyphs and 11 of text.
    return {
        "hidden_states": random(2, 4, *GRID),
        "timestep": torch.tensor([900.0, 10.0]),
        "encoder_hidden_states": random(2, 11, 24),
        "encoder_attention_mask": (torch.arange(11) < torch.tensor([[11], [3]])).long(),
        "encoder_hidden_states_2": random(2, 4, 12, seed=1),
        "encoder_attention_mask_2": (torch.arange(4) < torch.tensor([[2], [4]])).long(),
        "image_embeds": random(2, 5, 16, seed=2),
    }


def _cogvideox(rotary):
    angle = random(VIDEO, 32, seed=5)
    tables = tuple(table.repeat_interleave(2, 1) for table in (angle.cos(), angle.sin()))
    return {
        "hidden_states": random(2, 3, 16, 12, 16),
        "timestep": torch.tensor([900, 10]),
        "encoder_hidden_states": random(2, TEXT, 24),
        "image_rotary_emb": tables if rotary else None,
    }


def _ltx():
    return {
        "hidden_states": random(2, VIDEO, 8),
        "encoder_hidden_states": random(2, TEXT, 24),
        "timestep": torch.tensor([900.0, 10.0]),
        "encoder_attention_mask": _padded(),
        **dict(zip(("num_frames", "height", "width"), GRID, strict=True)),
    }


def _ltx2():
    return {
        "hidden_states": random(2, VIDEO, 8),
        "audio_hidden_states": random(2, 9, 8, seed=1),
        "encoder_hidden_states": random(2, TEXT, 24),
        "audio_encoder_hidden_states": random(2, TEXT, 24, seed=2),
        "timestep": torch.tensor([900, 10]),
        "encoder_attention_mask": _padded(),
        "audio_encoder_attention_mask": _padded(),
        "audio_num_frames": 9,
        **dict(zip(("num_frames", "height", "width"), GRID, strict=True)),
    }


def _flux():
    return {
        "hidden_states": random(2, VIDEO, 8),
        "encoder_hidden_states": random(2, TEXT, 24),
        "pooled_projections": random(2, 16),
        "timestep": torch.tensor([0.9, 0.1]),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(12.0), torch.arange(12.0)),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def _qwen():
    return {
        "hidden_states": random(2, VIDEO, 8),
        "encoder_hidden_states": random(2, TEXT, 24),
        "encoder_hidden_states_mask": _padded().bool(),
        "timestep": torch.tensor([0.9, 0.1]),
        "img_shapes": [[(1, 12, 12)]] * 2,
    }


_HEADS = {"num_attention_heads": 2, "attention_head_dim": 64}
_WAN = {**_HEADS, "ffn_dim": 128, "num_layers": 2, "text_dim": 32, "freq_dim": 32}
_HUNYUAN = {**_HEADS, "num_refiner_layers": 1, "text_embed_dim": 24, "rope_axes_dim": (16, 24, 24)}
_COG = {
    **_HEADS,
    **{"num_layers": 2, "time_embed_dim": 32, "text_embed_dim": 24, "max_text_seq_length": TEXT},
    **{"sample_width": 16, "sample_height": 12, "sample_frames": 9},
}
_LTX = {**_HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 128, "caption_channels": 24}
# Class, its sizes, what it is called with, layers of self-attention, and tokens of text before and after the video.
FAMILIES = {
    "wan": ("WanTransformer3DModel", _WAN, _wan, 2, (0, 0)),
    "wan-2.2": ("WanTransformer3DModel", {**_WAN, "in_channels": 48, "out_channels": 48}, partial(_wan, 48), 2, (0, 0)),
    # Of an image's tokens, and the image beside the noise.
    "wan-i2v": (
        "WanTransformer3DModel",
        {**_WAN, "in_channels": 36, "out_channels": 16, "image_dim": 20, "added_kv_proj_dim": 128},
        lambda: _wan(36, encoder_hidden_states_image=random(2, 257, 20, seed=3)),
        2,
        (0, 0),
    ),
    # One layer has another beside it, of what controls the video.
    "wan-vace": (
        "WanVACETransformer3DModel",
        {**_WAN, "vace_layers": [0], "vace_in_channels": 20},
        lambda: _wan(control_hidden_states=random(2, 20, 3, 12, 16, seed=4)),
        3,
        (0, 0),
    ),
    "hunyuan": (
        "HunyuanVideoTransformer3DModel",
        {**_HUNYUAN, "num_layers": 1, "num_single_layers": 1, "pooled_projection_dim": 16},
        _hunyuan,
        2,
        (0, TEXT),
    ),
    "hunyuan-1.5": (
        "HunyuanVideo15Transformer3DModel",
        {
            **_HUNYUAN,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "text_embed_2_dim": 12,
            "image_embed_dim": 16,
        },
        _hunyuan15,
        2,
        (0, TEXT),
    ),
    "cogvideox-2b": ("CogVideoXTransformer3DModel", _COG, partial(_cogvideox, False), 2, (TEXT, 0)),
    "cogvideox-5b": (
        "CogVideoXTransformer3DModel",
        {**_COG, "use_rotary_positional_embeddings": True},
        partial(_cogvideox, True),
        2,
        (TEXT, 0),
    ),
    "ltx": ("LTXVideoTransformer3DModel", {**_LTX, "num_layers": 2}, _ltx, 2, (0, 0)),
    "ltx-2": (
        "LTX2VideoTransformer3DModel",
        {
            **_LTX,
            **{"num_layers": 2, "audio_in_channels": 8, "audio_out_channels": 8, "audio_num_attention_heads": 2},
            **{"audio_attention_head_dim": 64, "audio_cross_attention_dim": 128},
        },
        _ltx2,
        2,
        (0, 0),
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            **_HEADS,
            **{"in_channels": 8, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 24},
            **{"pooled_projection_dim": 16, "axes_dims_rope": (16, 24, 24)},
        },
        _flux,
        2,
        (TEXT, 0),
    ),
    "qwen-image": (
        "QwenImageTransformer2DModel",
        {
            **_HEADS,
            **{"in_channels": 8, "out_channels": 2, "num_layers": 2, "joint_attention_dim": 24},
            **{"axes_dims_rope": (16, 24, 24)},
        },
        _qwen,
        2,
        (TEXT, 0),
    ),
}
