"""Timm's own vision transformers, sparsified, against the same networks with timm's own attention, on one GPU.

    python benchmarks/timm_network.py                        ViT-B at 1024 px, 15 x 15 windows, batches 1 and 8
    python benchmarks/timm_network.py --part drift           DINOv2-B at 1022 px, 40 to 90 % sparse: latency and drift
    python benchmarks/timm_network.py --part drift --checkpoint dinov2.safetensors --images a.jpg b.jpg
    python benchmarks/timm_network.py --part both --tiny     small networks on a CPU, to see that everything works

Every network is compiled by torch as a whole. Sparse ones are compared first with masked attention in timm's own code,
in float32: what is further off than three times what timm's dense network is off there has no time. `call_us` is the
host's clock until the features are there, `graph_us` the GPU's time of a CUDA graph; `ratio` is of `call_us` over that
of timm's own network of the same batch, which is measured just before.

Drift is the cosine of a token's features, after the last norm, to those of the dense network: of the class token, and
the mean and the lowest tenth of all patches. Without --checkpoint weights are random, drawn such that every layer
counts: the drift of such a network says nothing of a trained one, and its rows say `weights` random. Patches of 14
pixels do not divide 1024: images have 1022. Without --images they are smooth noise.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tilewright.core import timing
from tilewright.core.artifacts import atomic
from tilewright.core.errors import TilewrightError, Unavailable
from tilewright.integrations.timm import sparsify
from tilewright.nn import patterns
from tilewright_study.measure.checks import judging
from tilewright_study.scenes.pictures import read_rgb

# As many times further off than timm's dense network (docs/decisions/timing.md).
ROUNDING, LEAST = 3, 1e-4
EFFORT = {"min_reps": 10, "max_seconds": 1.0, "rse_target": 0.005}
# The deviation of a layer's scale, where a network has such: layers that add next to nothing hide what goes wrong.
GAMMA = 0.5
# Of ImageNet, which both networks were trained on.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PARTS = {
    "speed": ("vit_base_patch16_224", 1024, (1, 8)),
    "drift": ("vit_base_patch14_reg4_dinov2", 1022, (1,)),
}
TINY = {"depth": 3, "embed_dim": 48, "num_heads": 3}
SHOWN = [
    *("model", "batch", "case", "sparse", "compiled", "status", "error", "tolerance", "call_us", "graph_us", "ratio"),
    *("cosine_class", "cosine_patches", "cosine_patches_p10"),
]


class Masked(TorchFunctionMode):
    """Timm's own calls of torch's attention, with a mask; calls: how many there were."""

    def __init__(self, mask):
        """mask: bool [N, N]."""
        super().__init__()
        self.mask, self.calls = mask, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs["attn_mask"] = self.mask
            self.calls += 1
        return func(*args, **kwargs)


def main():
    """Compare, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--part", default="both", choices=(*PARTS, "both"), help="default both")
    add("--model", help="of timm's: default that of the part")
    add("--size", type=int, help="pixels a side: default that of the part")
    add("--batches", type=int, nargs="+", help="default those of the part")
    add("--window", type=int, default=15, help="side of the windows of the part speed, in tokens; default 15")
    add("--sparse", type=float, nargs="+", default=[0.4, 0.5, 0.6, 0.7, 0.8, 0.9], help="shares left out, part drift")
    add("--dtype", default=None, choices=("float32", "float16", "bfloat16"), help="default bfloat16; on a CPU float32")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--checkpoint", type=Path, help="weights of timm or of DINOv2's authors, a file; without, weights are random")
    add("--images", type=Path, nargs="+", help="files; without, images are smooth noise")
    add("--no-compile", action="store_true", help="networks are called as they are")
    add("--seconds", type=float, default=240.0, help="no case begins after this time; default 240")
    add("--tiny", action="store_true", help="three layers of 48 channels at a tenth of the size, on a CPU")
    add("--output", type=Path, help="CSV of all rows")
    given = parser.parse_args()
    if given.tiny:
        given.device = "cpu"
    given.dtype = getattr(torch, given.dtype or ("bfloat16" if given.device == "cuda" else "float32"))
    deadline = time.monotonic() + given.seconds
    try:
        rows = [
            row for part in (PARTS if given.part == "both" else (given.part,)) for row in run(part, given, deadline)
        ]
    except Unavailable as reason:
        raise SystemExit(str(reason)) from None
    frame = with_ratios(pd.DataFrame(rows))
    print(frame[[column for column in SHOWN if column in frame]].round(4).to_string(index=False), flush=True)
    for _, row in frame[frame["status"] != "ok"].iterrows():
        print(f"{row['model']} batch {row['batch']} {row['case']}: {row['status']}: {row['reason']}")
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        with atomic(given.output) as written:
            frame.to_csv(written, index=False)


@torch.no_grad()
def run(part, given, deadline):
    """Yield the rows of a part."""
    name, size, batches = PARTS[part]
    name, size, batches = given.model or name, given.size or size, tuple(given.batches or batches)
    model = made(name, tiny_size(name, size) if given.tiny else size, given)
    grid, special = tuple(model.patch_embed.grid_size), model.num_prefix_tokens
    if part == "speed":
        chosen = [f"window-{window_on(grid, given.window)}-g{special}"]
    else:
        chosen = [f"window-{window_of(grid, special, 1 - share)}-g{special}" for share in sorted(given.sparse)]
    chosen = list(dict.fromkeys(chosen))
    pixels = images(given.images, max(batches), model.patch_embed.img_size)
    of_case = {case: patterns.graph(case, grid, special) for case in chosen}
    facts = {
        **{"part": part, "model": name, "size": "x".join(map(str, model.patch_embed.img_size))},
        **{"tokens": special + grid[0] * grid[1], "dtype": str(given.dtype)[6:], "compiled": not given.no_compile},
        **{"weights": "random" if given.checkpoint is None else given.checkpoint.name},
        **{"images": "noise" if given.images is None else "files", "torch": torch.__version__, "timm": version()},
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
    }
    # float32 of the rounded weights, one image: what all others are compared with.
    model = model.to(given.device, given.dtype)
    wanted = {case: exact(model, graph, pixels[:1], given) for case, graph in {"dense": None, **of_case}.items()}
    shown = pixels[:1].to(given.device, given.dtype)
    dense = model.forward_features(shown).double()
    tolerance = max(LEAST, ROUNDING * relative_error(dense, wanted["dense"]))
    for batch in batches:
        taken = pixels[:batch].to(given.device, given.dtype)
        for case in ("dense", *chosen):
            density = of_case[case].density if case in of_case else 1.0
            row = facts | {"batch": batch, "case": case, "density": density, "sparse": 1 - density}
            row |= {"tolerance": tolerance, "parameters": sum(each.numel() for each in model.parameters())}
            if time.monotonic() > deadline:
                row |= {"status": "skipped", "reason": "no time left"}
            else:
                row |= measured(model, case, taken, shown, wanted, dense, tolerance, given)
            print(f"{name} batch {batch} {case}: {row.get('call_us', row.get('reason'))}", flush=True)
            yield row


def measured(model, case, taken, shown, wanted, dense, tolerance, given):
    """Columns of one case: its check, its drift, and if it passed, its times."""
    sparse = None
    begin = time.perf_counter()
    try:
        sparse = sparsify(model, case) if case != "dense" else None
        # Called once as it is, so that plans are there when torch compiles.
        found = model.forward_features(shown)
        row = {"first_call_s": time.perf_counter() - begin, "error": relative_error(found, wanted[case])}
        row |= drift(found, dense, model.num_prefix_tokens)
        if not row["error"] <= tolerance:
            why = f"features differ by {row['error']:.2g} from masked attention in timm's code, above {tolerance:.2g}"
            return row | {"status": "failed", "reason": why}
        return row | timed(model, taken, found if len(taken) == 1 else None, tolerance, given)
    except (RuntimeError, TilewrightError) as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}".splitlines()[0]}
    finally:
        if sparse is not None:
            sparse.remove()
        torch.compiler.reset()


def timed(model, taken, called, tolerance, given):
    """Columns of the times of one network. called: what it gives when it is not compiled, to compare, or None."""
    begin = time.perf_counter()
    call = model.forward_features if given.no_compile else torch.compile(model.forward_features, dynamic=False)
    with torch.inference_mode():
        found = call(taken)
        timing.wait(found)
        row = {"compile_s": time.perf_counter() - begin}
        if called is not None:
            error = relative_error(found, called.double())
            if not error <= tolerance:
                return row | {
                    "status": "failed",
                    "reason": f"compiled, features differ by {error:.2g} from those called",
                }
        # Of more images than one, what the first call gave: those of one were compared before.
        right = (found if called is None else called).double()

        def judge(features):
            error = relative_error(features, right)
            return "" if error <= tolerance else f"when it was timed, features differed by {error:.2g}"

        def waiting():
            features = call(taken)
            timing.wait(features)
            return features

        calls = [timing.Checked(each, judging(judge)) for each in (waiting, lambda: call(taken))]
        waited = timing.time_call(calls[0], **EFFORT)
        times = {"status": "ok", "reason": "", "call_us": waited.p50_us, "call_rse": waited.rse}
        times["images_per_s"] = 1e6 * len(taken) / waited.p50_us
        if taken.is_cuda:
            alone = timing.time_gpu(calls[1], **EFFORT)
            times |= {"graph_us": alone.p50_us, "graph_rse": alone.rse, "timing": alone.method}
    if wrong := calls[0].wrong or calls[1].wrong:
        return row | {"status": "failed", "reason": wrong}
    return row | times


def with_ratios(frame):
    """`frame` with ``ratio``, and ``graph_ratio``: how many times as fast as timm's own of the same model and batch."""
    key = ["part", "model", "size", "batch"]
    dense = frame[frame["case"] == "dense"].set_index(key)
    for column, ratio in (("call_us", "ratio"), ("graph_us", "graph_ratio")):
        if column in frame:
            frame[ratio] = frame[key].join(dense[column].rename("own"), on=key)["own"] / frame[column]
    return frame


def exact(model, graph, pixels, given):
    """Features of timm's own code in float32, with the mask of a `graph` or without; float64."""
    mask = None
    if graph is not None:
        mask = torch.zeros(graph.shape, dtype=torch.bool)
        indptr, indices = graph.expand()
        mask[np.repeat(np.arange(graph.n_rows), np.diff(indptr)), indices] = True
        mask = mask.to(given.device)
    dtype, model = given.dtype, model.float()
    # In 32 bits, not in the 19 of tensor cores.
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        pixels = pixels.to(given.device, dtype).float()
        if mask is None:
            return model.forward_features(pixels).double()
        with Masked(mask) as mode:
            found = model.forward_features(pixels).double()
        if mode.calls != len(model.blocks):
            raise SystemExit(
                f"expected {len(model.blocks)} calls of torch's attention in timm's code, found {mode.calls}"
            )
        return found
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
        model.to(dtype)


def relative_error(found, expected):
    """Difference of features [B, N, C] over how far those expected spread around their mean."""
    spread = expected - expected.mean(dim=(0, 1))
    return float(torch.linalg.vector_norm(found.double() - expected) / torch.linalg.vector_norm(spread))


def drift(found, dense, special):
    """Cosines of features [B, N, C] to those of the dense network: class token, and patches."""
    cosine = F.cosine_similarity(found.double(), dense, dim=-1)
    patches = cosine[:, special:].flatten()
    return {
        "cosine_class": float(cosine[:, 0].mean()),
        "cosine_patches": float(patches.mean()),
        "cosine_patches_p10": float(patches.quantile(0.1)) if len(patches) < 1 << 24 else None,
    }


def window_density(grid, special, side):
    """The share of all pairs that windows of `side` tokens and `special` global tokens hold."""
    local = 1
    for n in grid:
        at = np.arange(n)
        local *= int((np.minimum(at + side // 2, n - 1) - np.maximum(at - side // 2, 0) + 1).sum())
    n, own = special + grid[0] * grid[1], grid[0] * grid[1]
    return (local + special * n + special * own) / n**2


def window_of(grid, special, density):
    """The side of the windows whose density is the closest to `density`."""
    return min(range(3, 2 * max(grid), 2), key=lambda side: abs(window_density(grid, special, side) - density))


def window_on(grid, side):
    """The side of a window that fits a grid: that asked for, or the largest odd one of a smaller grid."""
    return min(side, max(3, min(grid) - 1 | 1))


def made(name, size, given):
    """A model of timm's for images of `size` pixels a side, in evaluation. Raises `Unavailable` without timm."""
    try:
        import timm
    except ImportError as error:
        raise Unavailable(f"timm cannot be imported: {error}") from error
    torch.manual_seed(0)
    sizes = TINY if given.tiny else {}
    model = (
        timm.create_model(name, pretrained=False, img_size=size, num_classes=0, **sizes).eval().requires_grad_(False)
    )
    if given.checkpoint is None:
        spread_weights(model)
    else:
        from timm.models import load_state_dict
        from timm.models.vision_transformer import checkpoint_filter_fn

        state = checkpoint_filter_fn(load_state_dict(str(given.checkpoint)), model)
        state = {key: value for key, value in state.items() if not key.startswith("head.")}
        missing, _ = model.load_state_dict(state, strict=False)
        if missing:
            raise SystemExit(f"{given.checkpoint}: expected weights of {name}, found none for {', '.join(missing[:5])}")
    return model


def version():
    """Of timm."""
    import timm

    return timm.__version__


def tiny_size(name, size):
    """A tenth of a size, in whole patches."""
    patch = 14 if "patch14" in name else 16
    return max(6, size // 10 // patch) * patch


def spread_weights(model):
    """Draw weights by which every layer counts: as timm draws them, attention is nearly even and layers add little."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if name.endswith("gamma"):
            weight.copy_(GAMMA * (1 + 0.1 * drawn))
        elif weight.ndim > 1 and "token" not in name and "pos" not in name:
            weight.copy_(drawn / np.sqrt(weight[0].numel()))
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features == 3 * module.in_features:
            # Scores of attention with a deviation of about 2.
            module.weight[: 2 * module.in_features] *= 2**0.5


def images(paths, count, size):
    """float32 [count, 3, *size]: files, normalised, each as often as needed, or smooth noise."""
    if paths is None:
        generator = torch.Generator().manual_seed(1)
        coarse = torch.randn(count, 3, 12, 12, generator=generator)
        fine = torch.randn(count, 3, *size, generator=generator)
        return F.interpolate(coarse, size=size, mode="bicubic") + 0.5 * fine
    found = []
    for path in paths[:count]:
        pixels = np.asarray(read_rgb(path).resize(size[::-1]), np.float32) / 255
        found.append(torch.from_numpy((pixels - np.float32(MEAN)) / np.float32(DEVIATION)).permute(2, 0, 1))
    return torch.stack([found[i % len(found)] for i in range(count)])


if __name__ == "__main__":
    main()
