"""The video decoder of LTX-2.5 with random weights, whole and by kinds of kernels, with each attention, on one GPU.

    python benchmarks/ltx_decoder.py                                           videos of 17 and 121 frames
    python benchmarks/ltx_decoder.py --tiny                                    a small decoder on a CPU
    python benchmarks/ltx_decoder.py --draw ltx_decoder.csv --output x.png     the figure of rows that exist

An attention module of each stage is compared first, on a small grid, with diffusers' own in float32. `decode_ms` is
the host's clock around a finished call, `attention_ms` to `pointwise_ms` the GPU's time in kernels of a kind. Forms:
`fused` and `plain` are `NeighborhoodProcessor`, `flex` and `natten` diffusers' processors. diffusers calls
FlexAttention without a compiler: here it and its mask are compiled. Needs diffusers 0.42 or newer.
"""

import argparse
import contextlib
import statistics
import time
from pathlib import Path

import pandas as pd
import torch
from torch.nn.attention import flex_attention as flex

from tilewright.core import timing
from tilewright.core.artifacts import atomic
from tilewright.integrations.diffusers import NeighborhoodProcessor

FORMS = ("fused", "plain", "natten", "flex")
# Height, width and frames.
SIZES = ((224, 224, 17), (512, 768, 121), (1088, 1920, 121))
TINY = {
    **{"latent_channels": 4, "decoder_head_dim": 8, "decoder_stage_channels": (64, 32, 16, 16, 8)},
    **{"decoder_stage_depths": (1,) * 5, "decoder_stage_kernels": ((3, 3, 3),) * 4, "decoder_t_emb_dim": 16},
    **{"decoder_stage5_kernel": (3, 3, 3), "decoder_upsample_strides": ((1, 1, 1), (2, 1, 1), (2, 2, 2), (2, 2, 2))},
    **{"spatial_compression_ratio": 16},
}
# What names of kernels have of each kind; all others are pointwise.
KINDS = {
    "rotary": ("tilewright_rotary",),
    "attention": ("tilewright", "flex", "triton_tem", "fna", "natten", "fmha"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "gemv"),
}
PARTS = (*KINDS, "pointwise")


def kind(name):
    """The kind of a kernel."""
    return next((own for own, parts in KINDS.items() if any(part in name.lower() for part in parts)), "pointwise")


def processor(form):
    """The processor of a form. Raises `ImportError` where NATTEN is not installed."""
    from diffusers.models.autoencoders import ltx2_diffusion_decoder as theirs

    if form == "natten":
        import natten  # noqa: F401

        return theirs.LTX2VideoVaeNeighborhoodNattenProcessor()
    return theirs.LTX2VideoVaeNeighborhoodAttnProcessor() if form == "flex" else NeighborhoodProcessor(form == "fused")


@contextlib.contextmanager
def compiled_flex(form):
    """FlexAttention and its mask are compiled, on a GPU."""
    if form != "flex" or not torch.cuda.is_available():
        yield
        return
    plain = flex.flex_attention, flex.create_block_mask
    flex.flex_attention, flex.create_block_mask = (torch.compile(each, dynamic=False) for each in plain)
    try:
        yield
    finally:
        flex.flex_attention, flex.create_block_mask = plain


def relative(found, expected):
    """The difference of two results, over the norm of the second."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@torch.no_grad()
def check(decoder, device, dtype):
    """Raise `AssertionError` where an attention of a stage is further off than its type rounds."""
    first = [blocks[0].attn for blocks in decoder.decoder.det_stages]
    for attn in [*first, decoder.decoder.diff_blocks[0].attn]:
        before, grid = attn.processor, [n + 3 for n in attn.kernel_size]
        x = torch.randn(1, *grid, attn.heads * attn.head_dim, device=device)
        attn.float().set_processor(processor("flex"))
        exact = attn(x)
        attn.to(dtype)
        for form in ("fused", "plain"):
            attn.set_processor(processor(form))
            error = relative(attn(x.to(dtype)), exact)
            assert error <= (0.02 if dtype == torch.bfloat16 else 1e-5), f"{form}, window {attn.kernel_size}: {error}"
        attn.set_processor(before)


def taken(call, device):
    """Columns of a call: its time, its kernels and its memory."""
    found = []
    timing.wait(call())
    while len(found) < 3 or (sum(found) < 300 and len(found) < 20):
        begin = time.perf_counter()
        timing.wait(call())
        found.append(1000 * (time.perf_counter() - begin))
    row = {"decode_ms": statistics.median(found)}
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as kernels:
            timing.wait(call())
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        row |= {f"{part}_ms": 0.0 for part in PARTS}
        for event in kernels.profiler.kineto_results.events():
            if event.device_type() == torch.autograd.DeviceType.CUDA:
                row[f"{kind(event.name())}_ms"] += event.duration_ns() / 1e6
    return row


@torch.no_grad()
def rows(tiny):
    """Yield a row for each size and form."""
    import diffusers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        decoder = diffusers.LTX2VideoDiffusionDecoderModel(**(TINY if tiny else {})).eval().to(dtype)
    check(decoder, device, dtype)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    known = {"device": name, "dtype": str(dtype)[6:], "torch": torch.__version__, "diffusers": diffusers.__version__}
    for height, width, frames in ((64, 64, 17),) if tiny else SIZES:
        side = 16 if tiny else 32
        shape = 1, decoder.config.latent_channels, (frames - 1) // 8 + 1, height // side, width // side
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        for form in FORMS:
            row = {"height": height, "width": width, "frames": frames, "form": form, **known, "reason": ""}

            def decode(latents=latents):
                return decoder.decode(latents, generator=torch.Generator(device).manual_seed(0)).sample

            try:
                decoder.set_attn_processor(processor(form))
                with compiled_flex(form):
                    row |= taken(decode, device)
            except (ImportError, RuntimeError) as problem:
                row["reason"] = str(problem).splitlines()[0]
            if device == "cuda":
                torch.cuda.empty_cache()
            yield row


LABELS = {
    "fused": "Tilewright", "plain": "Tilewright, fused=False", "natten": "NATTEN", "flex": "FlexAttention, compiled",
}  # fmt: skip


def draw(frame, path):
    """A bar for each form that ran, of the GPU's time by kind of kernel, with the wall time behind; a panel a size."""
    from tilewright_study.figures import _palette, _style

    ran = frame[frame["attention_ms"] > 0]
    groups = list(ran.groupby(["frames", "height", "width"], sort=False))
    drawn, colours = (
        _style.figure(3.4),
        dict(zip(PARTS, (_palette.BLUE, "#E69F00", "#117733", _palette.DENSE), strict=True)),
    )
    panels, handles = drawn.subplots(1, len(groups), squeeze=False)[0], {}
    for axes, ((frames, height, width), own) in zip(panels, groups, strict=True):
        for at, row in enumerate(own.to_dict("records")):
            left = 0.0
            for part in PARTS:
                handles[part] = axes.barh(at, row[f"{part}_ms"], left=left, color=colours[part], label=part)
                left += row[f"{part}_ms"]
            axes.plot(row["decode_ms"], at, "k|", markersize=14)
        axes.set_yticks(range(len(own)), [LABELS[form].replace(", ", ",\n") for form in own["form"]])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(f"{width} × {height} × {frames}", loc="left")
    _style.head(drawn, f"LTX-2.5's decoder: {_faster(ran)}", handles.values())
    missing = frame[~frame.index.isin(ran.index) & (frame["form"] == "flex")]
    beside = " FlexAttention's mask does not fit the larger videos." if len(missing) else ""
    _style.notes(
        drawn, f"Pixels × pixels × frames. Bars: GPU time by kind of kernel. Lines: wall time of a call.{beside}"
    )
    _style.save(drawn, path)


def _faster(ran):
    """How much the fused form saves over diffusers' own operations around the same attention."""
    times = ran.pivot_table(index=["frames", "height", "width"], columns="form", values="decode_ms")
    ratios = times["plain"] / times["fused"]
    return f"fused norms and rotations make it {ratios.min():.1f} to {ratios.max():.1f} times as fast"


def main():
    """Measure, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small decoder on a CPU")
    parser.add_argument("--draw", type=Path, metavar="CSV", help="rows to draw, in place of measuring")
    parser.add_argument("--output", type=Path, default=Path("results/logs/ltx_decoder.csv"), help="rows, or a picture")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    if arguments.draw:
        from tilewright_study.figures import _style

        with _style.context():
            draw(pd.read_csv(arguments.draw), arguments.output)
        return
    found = pd.DataFrame(rows(arguments.tiny))
    with atomic(arguments.output) as path:
        found.to_csv(path, index=False)
    print(found.to_string(index=False))


if __name__ == "__main__":
    main()
