"""Wan 1.3B of diffusers with random weights and slices: whole passes, in CUDA graphs, and on two GPUs.

    python benchmarks/diffusers_wan.py                 passes of 480p and 720p, their layers compiled, and a pipeline
    python benchmarks/diffusers_wan.py --ranks 2       480p on two GPUs, not compiled
    python benchmarks/diffusers_wan.py --tiny          a small network on a CPU

`times_as_fast` is over the fastest call with torch's attention, of a pass or of a pipeline's step. Lists are made in
each call, or `kept` from an earlier step. Maps of random weights are flat: recall says what part of the attention was
listed. Rows are written as they are measured. Needs diffusers 0.36 or newer.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import pandas as pd
import torch
import torch.multiprocessing as mp

from tilewright import slices
from tilewright.core import timing
from tilewright.core.artifacts import atomic
from tilewright.integrations import diffusers as adapter

# Latent frames, rows and columns.
SIZES = {"480p": (21, 60, 104), "720p": (21, 90, 160)}
TINY = {"tiny": (3, 40, 48)}
SHARES = 0.3, 0.2, 0.1
SMALL = {"num_attention_heads": 2, "attention_head_dim": 64, "ffn_dim": 64, "num_layers": 2, "text_dim": 32}
WAN = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30, "text_dim": 4096}
STEPS = {"refresh": [0, 15, 30, 45], "first_dense": 0}
# Steps of a pipeline, whose lists are made in the first.
N_STEPS = 4
NAME = "tilewright_slices"


def network(tiny):
    """A network, and what it is called with for a size."""
    import diffusers

    device = "cpu" if tiny else "cuda"
    torch.manual_seed(0)
    with torch.device(device):
        made = diffusers.WanTransformer3DModel(**(SMALL if tiny else WAN)).eval()
    made = made.to(torch.float32 if tiny else torch.bfloat16)

    def given(shape):
        draw = torch.Generator().manual_seed(1)
        latents, text = (torch.randn(1, *x, generator=draw) for x in ((16, *shape), (512, made.config.text_dim)))
        moved = (x.to(device, made.dtype) for x in (latents, text))
        named = dict(zip(("hidden_states", "encoder_hidden_states"), moved, strict=True))
        return {**named, "timestep": torch.full((1,), 500.0, device=device), "return_dict": False}

    return made, given


def taken(call):
    """Milliseconds of a call, and what it returns."""
    found = []
    timing.wait(call())
    for _ in range(3):
        begin = time.perf_counter()
        timing.wait(out := call())
        found.append(1000 * (time.perf_counter() - begin))
    return statistics.median(found), out


def psnr(found, right):
    """Of a result, to that by dense attention."""
    span = float(right.max() - right.min())
    return float(10 * torch.log10(span**2 / (found.float() - right.float()).square().mean()))


def kept_share(net, given):
    """Mean share of the attention that lists of a pass keep, in the first layer of ten."""
    found, predict, calls = [], slices.predict, []

    def spy(q, k, **more):
        lists = predict(q, k, **more)
        calls.append(lists.layout)
        if len(calls) % 10 == 1:
            found.append(float(slices.recall(q, k, lists).mean()))
        return lists

    slices.predict = spy
    try:
        with torch.compiler.set_stance("force_eager"), adapter.denoising(net):
            net(**given)
    finally:
        slices.predict = predict
    return sum(found) / len(found)


def passes(net, given, size):
    """Yield a row for dense attention and for each share of the keys: lists of each call, kept ones, then in graphs."""

    def call():
        return net(**given)[0]

    graphs = torch.cuda.is_available()
    net.set_attention_backend("native")
    ms, right = taken(call)
    yield {"size": size, "attention": "dense", "ms": ms}
    if graphs:
        yield {"size": size, "attention": "dense, a CUDA graph", "ms": taken(captured(call))[0]}
    for share in SHARES:
        adapter.register(keep=share, budget=share)
        facts = {"size": size, "left_out": round(1 - share, 2), "recall": kept_share(net, given)}

        def row(attention, ms, out, facts=facts):
            return {**facts, "attention": attention, "ms": ms, "psnr": psnr(out, right)}

        with adapter.denoising(net):
            yield row("lists of each call", *taken(call))
            if graphs:
                yield row("lists of each call, a CUDA graph", *taken(captured(call)))
        adapter.register(keep=share, budget=share, steps=STEPS)
        with adapter.denoising(net) as run:
            call()
            run.step_end(None, 0, None, {})
            kept = uncounted(run, call)
            yield row("kept lists", *taken(kept))
            if graphs:
                yield row("kept lists, a CUDA graph", *taken(captured(kept)))


def pipelines(net, given, size):
    """Yield a row for a step of diffusers' pipeline with guidance: dense, and with lists that the first step makes."""
    import diffusers

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = diffusers.WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=net)
    pipe.set_progress_bar_config(disable=True)
    latents, text = given["hidden_states"], given["encoder_hidden_states"]
    frames, height, width = latents.shape[2:]
    asked = {"num_frames": 4 * frames - 3, "height": 8 * height, "width": 8 * width, "guidance_scale": 3.0}
    asked |= {"prompt_embeds": text, "negative_prompt_embeds": -text, "num_inference_steps": N_STEPS}

    def call(**more):
        return pipe(latents=latents.float(), output_type="latent", **asked, **more).frames

    net.set_attention_backend("native")
    ms, right = taken(call)
    yield {"size": size, "attention": "dense, a step of a pipeline", "ms": ms / N_STEPS}
    for share in SHARES:
        adapter.register(keep=share, budget=share, steps=STEPS)
        with adapter.denoising(pipe) as run:
            ms, out = taken(lambda run=run: call(callback_on_step_end=run.step_end))
        facts = {"size": size, "left_out": round(1 - share, 2), "psnr": psnr(out, right)}
        yield {**facts, "attention": "kept lists, a step of a pipeline", "ms": ms / N_STEPS}


def uncounted(run, call):
    """A pass of the step that a run is at, called any number of times."""

    def again():
        run._go_to(run.step)
        return call()

    return again


def captured(call):
    """A call as a CUDA graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = call()

    def replay():
        graph.replay()
        return out

    return replay


def of_rank(rank, ranks, tiny, shape, results):
    """One of the processes: each form against one process, on which both were timed before."""
    import diffusers

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_grad_enabled(False)
    if tiny:
        # diffusers asks for devices other than a CPU.
        torch.accelerator.device_count = lambda: 1
    else:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("gloo" if tiny else "cpu:gloo,cuda:nccl", rank=rank, world_size=ranks)
    adapter.register(keep=0.2, budget=0.2)
    net, given = network(tiny)
    given, found = given(shape), []
    net.set_attention_backend(NAME)
    one_ms, right = taken(lambda: net(**given)[0])
    for form in ("ulysses", "ring"):
        net, _ = network(tiny)
        net.set_attention_backend(NAME)
        net.enable_parallelism(config=diffusers.ContextParallelConfig(**{f"{form}_degree": ranks}))
        ms, out = taken(lambda net=net: net(**given)[0])
        off = float((out.float() - right.float()).abs().max())
        found.append({"attention": f"{form}, {ranks} processes", "left_out": 0.8, "ms": ms, "off": off})
        found[-1]["times_as_fast"] = one_ms / ms
    if rank == 0:
        results.put(found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@torch.no_grad()
def rows(tiny, ranks):
    """Yield rows of all sizes, or of several processes."""
    sizes = TINY if tiny else SIZES
    first, shape = next(iter(sizes.items()))
    if ranks > 1:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(of_rank, (ranks, tiny, shape, results), nprocs=ranks, join=True)
        yield from ({"size": first, **row} for row in results.get())
        return
    net, given = network(tiny)
    if not tiny:
        net.compile_repeated_blocks(dynamic=False)
    for size, each in sizes.items():
        yield from passes(net, given(each), size)
    yield from pipelines(net, given(shape), first)


def table(found, known):
    """Rows as they are written."""
    columns = ("size", "attention", "left_out", "ms", "times_as_fast", "recall", "psnr", "off")
    made = pd.DataFrame(found).reindex(columns=columns)
    # Of the same size and kind of call.
    kind = [made["size"], made["attention"].str.contains("pipeline")]
    dense = made["ms"].where(made["attention"].str.startswith("dense")).groupby(kind).transform("min")
    return made.assign(times_as_fast=made["times_as_fast"].fillna(dense / made["ms"]), **known)


def main():
    """Measure."""
    import diffusers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small network on a CPU")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, with --tiny processes")
    parser.add_argument("--output", type=Path, default=Path("results/logs/diffusers_wan.csv"), help="rows")
    given = parser.parse_args()
    device = "cpu" if given.tiny else torch.cuda.get_device_name()
    known = {"device": device, "torch": torch.__version__, "diffusers": diffusers.__version__}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    found = []
    for row in rows(given.tiny, given.ranks):
        found.append(row)
        made = table(found, known)
        with atomic(given.output) as path:
            made.to_csv(path, index=False)
    print(made.to_string(index=False))


if __name__ == "__main__":
    main()
