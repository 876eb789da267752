"""Gates: which patches of a photograph DynamicViT keeps (part of stage T1).

``threshold-l2``: the patches whose embeddings have the largest L2 norm. With a checkpoint, its patch embedding is
meant. Without one, the embedding is taken to be an isometry of zero-mean patches: then the norm is the contrast of the
normalised pixels themselves, whatever the isometry, and nothing is random.
``predictor``: the network's own score predictors, run up to the pruning in question on an official checkpoint.
"""

import json
import math

import numpy as np

from tilewright import images
from tilewright.errors import ArtifactError, ConfigError

# ImageNet statistics, which all five networks are trained with.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


def _pixels(params):
    """The normalised photograph, float32 [3, R, R]."""
    return (images.load(params.image, params.resolution) - MEAN[:, None, None]) / STD[:, None, None]


def describe(params):
    """JSON-able facts about the gate of a graph."""
    photograph = images.PHOTOGRAPHS.get(params.image)
    embedding = "of the checkpoint" if params.weights else "isometric, of zero-mean patches"
    return {
        "name": params.gate,
        "embedding": embedding,
        "image": params.image,
        "credit": f"{photograph.credit}, {photograph.licence}" if photograph else None,
    }


def own_image(params):
    """The image's path in a list; empty for a photograph that is shipped."""
    return [] if params.image in images.PHOTOGRAPHS else [params.image]


def threshold_l2(params):
    """Ids of the ``params.kept`` patches with the largest norm, int64, best first; ties go to the smaller id."""
    p, n = params.patch, params.side
    if params.weights:
        weight, bias = _embedding(load_checkpoint(params.weights), params)
    pixels = _pixels(params)[:, : n * p, : n * p]
    norm = np.empty((n, n))
    # A band of patches at a time: an 8192-pixel image in float32 is 800 MB already.
    for y in range(n):
        patches = pixels[:, y * p : (y + 1) * p].reshape(3, p, n, p).transpose(2, 0, 1, 3)
        if params.weights:
            embedded = patches.reshape(n, -1) @ weight.T + bias
        else:
            # ASSUME: trained embeddings answer to structure, hardly to brightness; so does this one.
            embedded = (patches - patches.mean((2, 3), keepdims=True)).reshape(n, -1)
        norm[y] = np.linalg.norm(embedded, axis=1)
    return np.argsort(-norm.ravel(), kind="stable")[: params.kept[params.prune - 1]]


def _embedding(state, params):
    """Weight [d, 3 p p] and bias [d] of a checkpoint whose patches are embedded by one convolution."""
    if "patch_embed.conv1.weight" in state:
        raise ConfigError(
            f"gate threshold-l2: {params.variant} embeds patches by four convolutions; leave out `weights`"
        )
    weight = _get(state, "patch_embed.proj.weight", params.weights).numpy()
    _check_patch(weight.shape[-1], params)
    return weight.reshape(len(weight), -1), _get(state, "patch_embed.proj.bias", params.weights).numpy()


def _get(state, key, path):
    if key not in state:
        raise ArtifactError(f"{path}: expected an official DynamicViT checkpoint, found no {key!r}")
    return state[key]


def _check_patch(patch, params):
    if patch != params.patch:
        raise ConfigError(f"{params.weights}: expected a patch of {patch} pixels, found {params.patch}")


def load_checkpoint(path):
    """Tensors by name, float32, of a ``.pth`` (plain or under ``model``) or ``.safetensors`` file.

    Raises `ArtifactError`.
    """
    import pickle

    import torch

    try:
        if str(path).endswith(".safetensors"):
            state = _read_safetensors(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
            state = state.get("model", state)
        return {name: tensor.float() for name, tensor in state.items()}
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file; expected a checkpoint") from None
    except (OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ArtifactError(f"{path}: expected a checkpoint of tensors, found: {error}") from error
    except pickle.UnpicklingError as error:
        raise ArtifactError(f"{path}: expected a checkpoint of nothing but tensors, found other content") from error


def _read_safetensors(path):
    """Tensors by name. The format: 8 bytes, the length of a JSON header; dtype, shape and place of each; the data."""
    import torch

    dtypes = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
    }
    with open(path, "rb") as stream:
        raw = bytearray(stream.read())
    start = 8 + int.from_bytes(raw[:8], "little")
    if start > len(raw):
        raise ValueError(f"a header of {start} bytes in a file of {len(raw)}")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        lo, hi = entry["data_offsets"]
        flat = torch.frombuffer(raw, dtype=torch.uint8, offset=start + lo, count=hi - lo)
        tensors[name] = flat.clone().view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def predictor(params, width, heads, blocks):
    """Ids of the patches (int64, best first) that the network keeps after ``params.prune`` prunings.

    The forward pass of DynamicViT (DeiT and LV-ViT) in evaluation mode, up to the score that decides.
    width, heads: of the network. blocks: before which blocks tokens are pruned. Raises `ConfigError` for a checkpoint
    of another network or patch size, `ArtifactError` for one that is incomplete.
    """
    import torch
    from torch.nn import functional as F

    state, path = load_checkpoint(params.weights), params.weights
    lvvit = "patch_embed.conv1.weight" in state
    if lvvit != params.variant.startswith("lvvit"):
        raise ConfigError(
            f"{path}: expected a checkpoint of {params.variant}, found one of {'LV-ViT' if lvvit else 'DeiT'}"
        )
    if (found := _get(state, "cls_token", path).shape[-1]) != width:
        raise ConfigError(f"{path}: expected a width of {width} for {params.variant}, found {found}")
    # LV-ViT halves each residual, keeps the default epsilon, and its stem halves the image before the patches are cut.
    skip, eps, stem = (2.0, 1e-5, 2) if lvvit else (1.0, 1e-6, 1)
    _check_patch(stem * _get(state, "patch_embed.proj.weight", path).shape[-1], params)

    def get(key):
        return _get(state, key, path)

    def linear(x, key):
        return F.linear(x, get(f"{key}.weight"), state.get(f"{key}.bias"))

    def norm(x, key, eps=1e-5):
        return F.layer_norm(x, x.shape[-1:], get(f"{key}.weight"), get(f"{key}.bias"), eps)

    def embed(x):
        if lvvit:
            for layer, (stride, pad) in enumerate(((2, 3), (1, 1), (1, 1)), start=1):
                x = F.conv2d(x, get(f"patch_embed.conv{layer}.weight"), stride=stride, padding=pad)
                names = ("running_mean", "running_var", "weight", "bias")
                x = F.relu(F.batch_norm(x, *(get(f"patch_embed.bn{layer}.{name}") for name in names)))
        kernel = get("patch_embed.proj.weight")
        return F.conv2d(x, kernel, get("patch_embed.proj.bias"), stride=kernel.shape[-1])

    def position(n):
        """The position embedding, resized (bilinear, as published) to n x n patches."""
        table = get("pos_embed")
        side = math.isqrt(table.shape[1] - 1)
        grid = table[:, 1:].unflatten(1, (side, side)).movedim(-1, 1)
        if side != n:
            grid = F.interpolate(grid, size=(n, n), mode="bilinear")
        return torch.cat((table[:, :1], grid.flatten(2).mT), dim=1)

    def attend(x, key):
        q, k, v = linear(x, f"{key}.qkv").unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), f"{key}.proj")

    def block(x, key):
        x = x + attend(norm(x, f"{key}.norm1", eps), f"{key}.attn") / skip
        hidden = F.gelu(linear(norm(x, f"{key}.norm2", eps), f"{key}.mlp.fc1"))
        return x + linear(hidden, f"{key}.mlp.fc2") / skip

    def score(x, key):
        """Log-probability of staying, [1, N], from half of a patch's channels and the mean of the other half."""
        x = F.gelu(linear(norm(x, f"{key}.in_conv.0"), f"{key}.in_conv.1"))
        own, shared = x.chunk(2, dim=-1)
        x = torch.cat((own, shared.mean(1, keepdim=True).expand_as(shared)), dim=-1)
        for layer in (0, 2):
            x = F.gelu(linear(x, f"{key}.out_conv.{layer}"))
        return linear(x, f"{key}.out_conv.4").log_softmax(-1)[..., 0]

    with torch.inference_mode():
        edge = params.side * params.patch
        pixels = torch.from_numpy(_pixels(params)[:, :edge, :edge].copy())
        x = embed(pixels[None]).flatten(2).mT
        x = torch.cat((get("cls_token"), x), dim=1) + position(params.side)
        patches = torch.arange(params.side**2)
        for time, count in enumerate(params.kept[: params.prune]):
            for i in range(blocks[time - 1] if time else 0, blocks[time]):
                x = block(x, f"blocks.{i}")
            best = score(x[:, 1:], f"score_predictor.{time}")[0].argsort(descending=True, stable=True)[:count]
            patches, x = patches[best], x[:, torch.cat((torch.zeros(1, dtype=torch.int64), 1 + best))]
        return patches.numpy()
