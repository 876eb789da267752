"""Wan 1.3B of diffusers with random weights and slices: whole passes, in CUDA graphs, and on two GPUs.

    python benchmarks/diffusers_wan.py                 passes of 480p and 720p, their layers compiled
    python benchmarks/diffusers_wan.py --ranks 2       480p on two GPUs, not compiled
    python benchmarks/diffusers_wan.py --tiny          a small network on a CPU

`times_as_fast` is over the same call with torch's attention. Lists are made in each call, or `kept` from an earlier
step. Maps of random weights are flat: recall says what part of the attention was listed. Needs diffusers 0.36 or newer.
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
    """Yield a row for dense attention and for each share of the keys: lists of each call, kept ones, in a graph."""
    net.set_attention_backend("native")
    dense_ms, right = taken(lambda: net(**given)[0])
    yield {"size": size, "attention": "dense", "ms": dense_ms, "times_as_fast": 1.0}
    for share in SHARES:
        adapter.register(keep=share, budget=share)
        facts = {"size": size, "left_out": round(1 - share, 2), "recall": kept_share(net, given)}

        def row(attention, ms, out, facts=facts):
            return {**facts, "attention": attention, "ms": ms, "times_as_fast": dense_ms / ms, "psnr": psnr(out, right)}

        with adapter.denoising(net):
            yield row("lists of each call", *taken(lambda: net(**given)[0]))
        adapter.register(keep=share, budget=share, steps=STEPS)
        with adapter.denoising(net) as run:
            net(**given)
            run.step_end(None, 0, None, {})
            call = uncounted(run, lambda: net(**given)[0])
            yield row("kept lists", *taken(call))
            if torch.cuda.is_available():
                yield row("kept lists, a CUDA graph", *taken(captured(call)))


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
    """Rows of all sizes, or of several processes."""
    sizes = TINY if tiny else SIZES
    if ranks > 1:
        size, shape = next(iter(sizes.items()))
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(of_rank, (ranks, tiny, shape, results), nprocs=ranks, join=True)
        return [{"size": size, **row} for row in results.get()]
    net, given = network(tiny)
    if not tiny:
        net.compile_repeated_blocks(dynamic=False)
    return [row for size, shape in sizes.items() for row in passes(net, given(shape), size)]


def main():
    """Measure."""
    import diffusers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small network on a CPU")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, with --tiny processes")
    parser.add_argument("--output", type=Path, default=Path("results/logs/diffusers_wan.csv"), help="rows")
    given = parser.parse_args()
    known = {"device": "cpu" if given.tiny else torch.cuda.get_device_name(), "torch": torch.__version__}
    columns = ("size", "attention", "left_out", "ms", "times_as_fast", "recall", "psnr", "off")
    found = pd.DataFrame(rows(given.tiny, given.ranks)).reindex(columns=columns)
    found = found.assign(**known, diffusers=diffusers.__version__)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with atomic(given.output) as path:
        found.to_csv(path, index=False)
    print(found.to_string(index=False))


if __name__ == "__main__":
    main()
