"""SegFormer on a GPU or a CPU: its decoder and the whole network, published and folded, against `transformers`.

Random weights, in bfloat16; everything is compared with float32 of the same rounded weights before it is timed, and a
result that is further off than three times what the published operators are off there is not timed. `graph_us` is the
GPU's time of a replay among others of a CUDA graph, `call_us` the host's clock around a call, until the maps are there.

    python benchmarks/segformer.py --output results/logs/segformer.csv
    python benchmarks/segformer.py --variants b0 --sizes 512,1024 --batches 1,8
    python benchmarks/segformer.py --variants b2 --sizes 1024 --only-compiled --cases network/decode,network/published
    python benchmarks/segformer.py --device cpu --variants b0,b2 --sizes 512 --no-compile
    python benchmarks/segformer.py --tiny

Cases: `published` and `folded`, operators of torch; `kernels`, folded with the kernels that were the fastest; `decode`,
folded with that of the decoder alone, for a compiler fuses other operators with their neighbours; and `transformers`,
its own network, where it is installed. Each is called as it is, and compiled by torch. --cases takes some of them, in
the order that is stated. After --seconds no case begins: what is left is listed as skipped. What torch compiles it
keeps on disk: a run beside other work makes the next one's compilations short. A CPU computes in float32, without
graphs, and has no kernels of its own. --tiny runs all cases on one, at a small size, to see that everything works.
"""

import argparse
import importlib.util
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from torch import nn

from tilewright import devices, networks
from tilewright.core import timing
from tilewright.core.artifacts import atomic
from tilewright.masks import segformer as pattern
from tilewright.networks import map_operators, segformer
from tilewright.networks.path import Path as ExecutionPath
from tilewright_study.measure.checks import judging
from tilewright_study.planning import layers

# As many times further off than the published operators (docs/decisions/timing.md).
ROUNDING, LEAST = 3, 1e-5
EFFORT = {"min_reps": 10, "max_seconds": 0.4, "rse_target": 0.01}
SHOWN = [
    "network",
    "batch",
    "part",
    "case",
    "compiled",
    "status",
    "error",
    "same_argmax",
    "call_us",
    "graph_us",
    "gmac",
]
CLASSES = 150


# What is compiled takes long: what matters most comes first.
CASES = (
    *(("decoder", "published"), ("decoder", "kernels"), ("network", "decode"), ("network", "published")),
    *(("network", "transformers"), ("network", "kernels"), ("network", "folded"), ("decoder", "folded")),
)

# Kernels of our own that a case takes.
KERNELS = {"kernels": tuple(map_operators.KERNELS), "decode": ("decode",)}


@dataclass
class Point:
    """One network with its images. theirs: that of `transformers` with the same weights, or None. kernels: what was
    chosen; oracles: maps in float32 and the tolerance, by part."""

    network: nn.Module
    images: torch.Tensor
    theirs: nn.Module | None
    kernels: dict
    oracles: dict


def main():
    """Compare, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variants", default="b2,b0", help="default b2,b0")
    parser.add_argument("--sizes", default="512,1024", help="default 512,1024")
    parser.add_argument("--batches", default="1", help="default 1")
    parser.add_argument("--seconds", type=float, default=100.0, help="no case begins after this time; default 100")
    parser.add_argument("--cases", default="", metavar="PART/CASE,...", help="default all, e.g. network/published")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--no-compile", action="store_true", help="nothing is compiled by torch")
    which.add_argument("--only-compiled", action="store_true", help="nothing is called as it is")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, float32, on a CPU")
    parser.add_argument("--output", type=Path, help="CSV of all rows; kernels go beside it")
    given = parser.parse_args()
    deadline = time.monotonic() + given.seconds
    variants, sizes, batches = (text.split(",") for text in (given.variants, given.sizes, given.batches))
    if given.tiny:
        variants, sizes, batches = ["b0"], ["64"], ["1"]
    cases = chosen_cases(parser, given.cases, given.device)
    # All that is called comes before what is compiled.
    forms = (True,) if given.only_compiled else (False,) if given.no_compile or given.tiny else (False, True)
    device = torch.device("cpu" if given.tiny else given.device)
    with torch.inference_mode():
        rows, chosen = [], []
        names = [(v, int(size), int(n)) for v in variants for size in sizes for n in batches]
        own = any(case in KERNELS for _, case in cases)
        points = [prepared(*name, device, chosen if own else None) for name in names if time.monotonic() < deadline]
        for compiled in forms:
            for point in points:
                rows += of_point(point, compiled, deadline, cases)
    if not rows:
        raise SystemExit("no time left before anything was compared")
    frame, kernels = pd.DataFrame(rows), pd.DataFrame(chosen)
    print(frame[[column for column in SHOWN if column in frame]].round(5).to_string(index=False), flush=True)
    show_kernels(kernels)
    show_ratios(frame)
    if (output := given.output) is not None:
        for table, path in ((frame, output), (kernels, output.with_name(f"{output.stem}_kernels.csv"))):
            with atomic(path) as written:
                table.to_csv(written, index=False)


def chosen_cases(parser, text, device):
    """`CASES` that a device has, or those of them that a text lists, in its order."""
    known = {f"{part}/{case}": (part, case) for part, case in CASES if device == "cuda" or case not in KERNELS}
    if not text:
        return tuple(known.values())
    if unknown := [name for name in text.split(",") if name not in known]:
        parser.error(f"--cases: unknown {unknown[0]!r}; known: {', '.join(known)}")
    return tuple(known[name] for name in text.split(","))


def prepared(variant, size, batch, device, chosen):
    """A `Point` with random weights; what was timed to choose its kernels is added to `chosen`, unless it is None."""
    theirs, checkpoint = of_transformers(variant), None
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False):
        if theirs is not None:
            theirs.save_pretrained(folder)
            checkpoint = Path(folder) / "model.safetensors"
        options = {"variant": variant, "image_size": size, "num_classes": CLASSES}
        network = networks.create("segformer", **options, checkpoint=checkpoint)
        if theirs is None:
            spread(network.decode_head.linear_fuse["bn"])
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        network, theirs = network.to(device, kind), theirs and theirs.to(device, kind)
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device, kind)
    point = Point(network, images, theirs, {}, {})
    point.oracles = {part: exact(point, part) for part in ("decoder", "network")}
    if chosen is not None:
        measured = networks.choose_kernels(network, images, anew=True)
        chosen += ({"network": f"segformer-{variant}-{size}", "batch": batch, **row} for row in measured)
        point.kernels = network.operators.chosen
    return point


def of_point(point, compiled, deadline, cases):
    """Rows of `cases` of one network, size and batch, called or compiled."""
    network, images = point.network, point.images
    facts = {"network": segformer.name(network.options), "batch": len(images), "dtype": str(images.dtype)[6:]}
    facts |= {"device": devices.describe(images.device.type)["name"], "torch": torch.__version__}
    rows = []
    for part, case in cases:
        if case == "transformers" and point.theirs is None:
            continue
        taken = KERNELS.get(case, ())
        network.operators.chosen = {key: form for key, form in point.kernels.items() if key[0] in taken}
        row = facts | {"part": part, "case": case, "compiled": compiled, "gmac": gmac(network, case, part)}
        late = {"status": "skipped", "reason": "no time left"}
        rows.append(row | (late if time.monotonic() > deadline else measured_case(point, part, case, compiled)))
    return rows


def spread(bn):
    """Give a batch norm statistics that are not those of a new one."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        bn.running_mean.copy_(torch.randn(bn.running_mean.shape, generator=generator))
        bn.running_var.copy_(torch.randn(bn.running_var.shape, generator=generator).abs() + 0.5)


def of_transformers(variant):
    """The network of `transformers` with random weights, norms as published, or None where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    size = pattern.VARIANTS[variant]
    config = SegformerConfig(
        hidden_sizes=list(size.widths),
        depths=list(size.depths),
        num_attention_heads=list(pattern.HEADS),
        decoder_hidden_size=size.channels,
        num_labels=CLASSES,
    )
    with torch.inference_mode(False):
        torch.manual_seed(0)
        theirs = SegformerForSemanticSegmentation(config).eval()
        spread(theirs.decode_head.batch_norm)
    for name, module in theirs.named_modules():
        if isinstance(module, nn.LayerNorm) and not any(
            part in name for part in ("patch_embed", "reduction", ".self.")
        ):
            module.eps = config.layer_norm_eps
    return theirs


def path_of(network, case):
    """The full path, with the decoder of a case."""
    decoder = "published" if case == "published" else "folded"
    return ExecutionPath(network.path().blocks, decoder=decoder)


def gmac(network, case, part):
    """1e9 multiplications of a case, of one image."""
    path = path_of(network, "published" if case == "transformers" else case)
    found = layers.segformer(network.options, path)
    return layers.macs([x for x in found if part == "network" or x.name.startswith("decode_head")]) / 1e9


def call_of(point, part, case):
    """``callable()``: what is compared and timed, and its module and arguments, which torch compiles."""
    network, images = point.network, point.images
    if case == "transformers":
        return point.theirs, (images,)
    path = path_of(network, case)
    folded = network.fold(path)
    if part == "network":
        return network, (images, path, folded)
    return network.decode_head, (network.backbone(images, path), path, folded)


def exact(point, part):
    """``(maps, tolerance)`` in float32, of the same rounded weights, by the published operators."""
    module, arguments = call_of(point, part, "published")
    rounded = module(*arguments).float()
    wide = {name: x.float() if x.is_floating_point() else x for name, x in module.state_dict().items()}
    first = arguments[0]
    first = [x.float() for x in first] if isinstance(first, list) else first.float()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        maps = torch.func.functional_call(module, wide, (first, *arguments[1:]))
    return maps, max(LEAST, ROUNDING * off(rounded, maps))


def off(found, expected):
    """The largest difference, as a share of the largest value."""
    return float((found.float() - expected).abs().max() / expected.abs().max())


def measured_case(point, part, case, compiled):
    """Columns of one case: compared, then timed."""
    expected, tolerance = point.oracles[part]
    module, arguments = call_of(point, part, case)
    begin = time.monotonic()
    try:
        if compiled:
            torch.compiler.reset()
            module = torch.compile(module, dynamic=False)
        run = partial(module, *arguments)
        found = maps_of(run())
    except RuntimeError as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {str(error)[:200]}"}
    row = {"first_call_s": time.monotonic() - begin, "error": off(found, expected), "tolerance": tolerance}
    row["same_argmax"] = float((found.argmax(1) == expected.argmax(1)).double().mean())
    if not row["error"] <= tolerance:
        return row | {"status": "failed", "reason": f"differs by {row['error']:.2g}, tolerance {tolerance:.2g}"}
    cuda = point.images.is_cuda

    def judge(maps):
        error = off(maps, expected)
        return "" if maps.shape == expected.shape and error <= tolerance else f"differed by {error:.2g} when timed"

    def waiting():
        maps = maps_of(run())
        timing.wait(maps)
        return maps

    waited, queued = (timing.Checked(call, judging(judge)) for call in (waiting, lambda: maps_of(run())))
    times = {"call_us": timing.time_call(waited, **EFFORT).p50_us}
    if cuda:
        graph = timing.time_gpu(queued, **EFFORT)
        times |= {"graph_us": graph.p50_us, "method": graph.method}
    if wrong := waited.wrong or queued.wrong:
        return row | {"status": "failed", "reason": wrong}
    return row | times | {"status": "ok"}


def maps_of(found):
    """Maps of a network's result."""
    return found if isinstance(found, torch.Tensor) else found.logits


def show_kernels(kernels):
    """Print what was chosen, and what torch's operator takes there."""
    if kernels.empty:
        return
    print("\nchosen kernels", flush=True)
    columns = ["network", "batch", "operator", "shapes"]
    torchs = kernels[kernels["form"] == "torch"].set_index(columns)["us"].rename("torch_us")
    best = kernels[kernels["chosen"]].set_index(columns)[["form", "us", "error"]].join(torchs)
    print(best.reset_index().assign(shapes=lambda f: f["shapes"].str.slice(0, 40)).round(4).to_string(index=False))
    for _, row in kernels[kernels["status"] != "ok"].iterrows():
        print(f"{row['status']}: {row['operator']} {row['form']} {row['shapes'][:40]}: {row['reason'][:120]}")


def show_ratios(frame):
    """Print how many times as fast as the better published form, and as `transformers`, the best of ours is."""
    measure = "graph_us" if "graph_us" in frame else "call_us"
    if measure not in frame:
        return
    best = frame[frame["status"] == "ok"].groupby(["network", "batch", "part", "case"])[measure].min().unstack("case")
    for ours in ("folded", "kernels", "decode"):
        for other in ("published", "transformers"):
            if {ours, other} <= set(best):
                best[f"{other}/{ours}"] = best[other] / best[ours]
    print(f"\nbest {measure} of called and compiled", flush=True)
    print(best.round(2).to_string())


if __name__ == "__main__":
    main()
