"""A sequence shared out among several GPUs: one attention call and one pass of Wan 1.3B, against one GPU.

32,760 tokens (480p, 81 frames), 12 heads of 128, bfloat16; the pass with random weights, kernel by kernel. Queries and
keys of the attention call are random: good for times, worthless for what lists keep. For each attention and number of
ranks, the result is first compared with that of one rank. `latency_ms` is the median over repetitions of the slowest
rank's time by the host's clock, until the result is there. `exchange_ms` is that of the exchanges alone, with an
attention that returns memory that is there; in a pass, of as many as the network has layers and of the gathering at its
end.

    torchrun --nproc-per-node 2 benchmarks/slices_parallel.py --output results/logs/slices_parallel.csv
    torchrun --nproc-per-node 2 benchmarks/slices_parallel.py --sparsities 0.8 --output results/logs/slices_parallel.csv
    torchrun --nproc-per-node 2 benchmarks/slices_parallel.py --tiny

Rows are written as they are measured: a run that is ended leaves those that it has. --graph times attention calls, and
their exchanges, as replays of CUDA graphs, whose results are compared, too. --tiny runs small sizes in float32 on a CPU
with Gloo, to see that everything works.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist

from tilewright import devices, networks, reference
from tilewright.core.artifacts import atomic
from tilewright.core.errors import TilewrightError
from tilewright.core.registry import member
from tilewright.devices import qkv
from tilewright.masks import wan as pattern
from tilewright.networks import video_attentions
from tilewright.networks.video_attentions import Call, Video
from tilewright.slices import parallel
from tilewright_study import provenance
from tilewright_study.measure.rows import machine, now

SPARSITIES = (0.7, 0.8, 0.9)
# A velocity may differ by this many times what rounding in 16 bits makes out, and by so much in float32
# (docs/decisions/timing.md).
MOST_ROUNDINGS, FLOAT32 = 3, 1e-4
SHOWN = [
    *("case", "attention", "sparsity", "ranks", "latency_ms", "exchange_ms", "exchange_share"),
    *("times_as_fast", "error", "tolerance", "sent_mb"),
]


@dataclass(frozen=True)
class Size:
    """What runs. network: its name; chosen: options of it; settings: of lists beside the share of keys that they keep.
    repetitions: of a call and of a pass.
    """

    network: str
    chosen: dict
    settings: dict
    dtype: torch.dtype
    repetitions: tuple[int, int]


FULL = Size("wan-1.3b-480p-81f", {}, {"predictor": {"pool": 32}}, torch.bfloat16, (30, 7))
TINY = Size(
    "wan-tiny-480p-9f",
    {"height": 96, "width": 160, "layers": 2},
    {"rows": 16, "least": 1, "predictor": {"pool": 4}},
    torch.float32,
    (3, 3),
)


def main():
    """Compare, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes, float32, on a CPU")
    parser.add_argument("--ranks", default=None, help="numbers of ranks, e.g. 1,2; one and all by default")
    parser.add_argument("--sparsities", default=None, help=f"of lists, e.g. 0.8; default {SPARSITIES}")
    parser.add_argument("--network", default=None, help=f"another one, e.g. wan-1.3b-720p-81f; default {FULL.network}")
    parser.add_argument("--graph", action="store_true", help="attention calls as CUDA graphs")
    parser.add_argument("--output", type=Path, default=None)
    given = parser.parse_args()
    device = torch.device("cpu" if given.tiny else f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    if not given.tiny:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if given.tiny else "nccl")
    world = dist.get_world_size()
    numbers = sorted({1, *map(int, given.ranks.split(","))} if given.ranks else {1, world})
    groups = {ranks: dist.new_group(range(ranks)) for ranks in numbers}
    size = TINY if given.tiny else replace(FULL, network=given.network or FULL.network)
    sparsities = SPARSITIES if given.sparsities is None else tuple(map(float, given.sparsities.split(",")))
    known, rows = machine(devices.describe(device.type)) | {"commit": provenance.commit()}, []
    with torch.inference_mode():
        for found in measured(size, groups, device, given.graph, sparsities):
            rows += [{**row, **known, "time": now()} for row in found]
            if dist.get_rank() == 0 and given.output is not None:
                given.output.parent.mkdir(parents=True, exist_ok=True)
                with atomic(given.output) as path:
                    pd.DataFrame(rows).to_csv(path, index=False)
    if dist.get_rank() == 0:
        print(pd.DataFrame(rows)[SHOWN].round(4).to_string(index=False), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measured(size, groups, device, graph, sparsities):
    """Yield the rows of each case, on rank 0. graph: attention calls are captured."""
    with device:
        network = networks.create_video(size.network, **size.chosen).lowered(size.dtype)
    for name, settings, sparsity in attentions(size, sparsities):
        network = network.with_attention(name, settings)
        for case in (AttentionCall(network, size, device), Pass(network, size, device)):
            columns = {"attention": name, "sparsity": sparsity}
            yield of_case(case, groups, columns, graph and isinstance(case, AttentionCall))


def attentions(size, sparsities):
    """``(name, settings, sparsity)`` of what attends."""
    yield "dense", {}, 0.0
    for sparsity in sparsities:
        keep = round(1 - sparsity, 6)
        # Tiny sequences are shorter than what lists are rounded up to.
        yield "slices", {"keep": keep, "budget": 1.0 if size is TINY else keep, **size.settings}, sparsity


def of_case(case, groups, columns, graph):
    """Rows of a case, one for each number of ranks."""
    rows, expected = [], None
    for ranks, group in groups.items():
        dist.barrier()
        if dist.get_rank() >= ranks:
            continue
        found = case.result(group)
        expected = found if ranks == 1 else expected
        facts = checked(case, found, expected)
        prepared = captured if graph else lambda call, group: call
        latency = median_ms(prepared(case.call(group), group), group, case.repetitions)
        # One rank exchanges nothing.
        exchange = median_ms(prepared(case.exchange(group), group), group, case.repetitions) if ranks > 1 else 0.0
        if dist.get_rank() == 0:
            row = {"case": case.name, "network": case.size.network, "tokens": case.tokens, "heads": case.heads}
            row |= {**columns, "ranks": ranks, **facts}
            row |= {"latency_ms": latency, "exchange_ms": exchange, "exchange_share": exchange / latency}
            row |= {"times_as_fast": rows[0]["latency_ms"] / latency if rows else 1.0}
            row |= {"sent_mb": case.sent_bytes(group) / 1e6, "repetitions": case.repetitions, "graph": graph}
            rows.append(row | {"dtype": str(case.size.dtype).removeprefix("torch.")})
    dist.barrier()
    return rows


class Case:
    """What both cases share."""

    def __init__(self, network, size, device):
        self.network, self.size, self.device = network, size, device
        self.grid = pattern.grid(network.options.latents)
        self.heads, self.tokens = network.options.published.heads, self.grid[0] * self.grid[1] * self.grid[2]

    def sharding(self, group):
        """Which tokens and heads each rank has."""
        return parallel.shard(self.tokens, self.heads, group)

    def drawn(self, *shape):
        """Random values, the same on all ranks."""
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        return torch.randn(shape, generator=generator, device=self.device).to(self.size.dtype)


class AttentionCall(Case):
    """q, k, v to attention, of a rank's tokens; lists are made in each call."""

    name = "attention"

    def __init__(self, *given):
        super().__init__(*given)
        self.repetitions = self.size.repetitions[0]
        # As a projection leaves them.
        self.qkv = self.drawn(1, self.tokens, 3, self.heads, pattern.HEAD_DIM).permute(2, 0, 3, 1, 4).unbind(0)

    def attention(self, group):
        """The network's attention, for a rank's heads."""
        sharding = self.sharding(group)
        video = Video(self.grid, sharding.heads[sharding.rank], pattern.HEAD_DIM, 1)
        known = member(video_attentions.__name__, "attention", self.network.attention, video_attentions.NAMES)
        found = known.Attention(self.network.settings, video)
        return lambda q, k, v: found(q, k, v, Call(0))

    def call(self, group, attention=None):
        """``callable()``: what is timed."""
        sharding, attention = self.sharding(group), attention or self.attention(group)
        own = [sharding.own(x, 2).transpose(1, 2).clone().transpose(1, 2) for x in self.qkv]
        return lambda: sharding.attend(*own, attention)

    def result(self, group):
        """What all ranks make together, whole."""
        return self.sharding(group).gather(self.call(group)(), 2)

    def exchange(self, group):
        """``callable()``: what is sent and received, without what it is for."""
        sharding = self.sharding(group)
        like = self.qkv[0][:, sharding.own_heads]
        ready = qkv.empty(like, self.tokens).fill_(1)
        return self.call(group, lambda q, k, v: ready)

    def error(self, found, expected):
        """How far a result is from that of one rank."""
        return reference.relative_error(found, expected)

    def tolerance(self, expected):
        """How far it may be: each of both as far as rounding makes out."""
        return 2 * reference.TOLERANCE[self.size.dtype]

    def sent_bytes(self, group):
        """Bytes that a rank sends."""
        return self.sharding(group).sent_bytes(1, pattern.HEAD_DIM, self.size.dtype.itemsize)


class Pass(Case):
    """Latents, time and text to the velocity, the same on all ranks."""

    name = "pass"

    def __init__(self, *given):
        super().__init__(*given)
        self.repetitions = self.size.repetitions[1]
        text = self.drawn(1, pattern.TEXT_TOKENS, pattern.TEXT_WIDTH)
        self.given = self.drawn(1, *self.network.options.latents), 500.0, text

    def call(self, group):
        """``callable()``: what is timed."""
        # One rank runs the network itself.
        network = networks.sequence_parallel(self.network, group) if dist.get_world_size(group) > 1 else self.network
        return lambda: network(*self.given)

    def result(self, group):
        """What all ranks make together, whole."""
        return self.call(group)()

    def exchange(self, group):
        """``callable()``: what is sent and received, without what it is for."""
        attention = AttentionCall(self.network, self.size, self.device).exchange(group)
        sharding = self.sharding(group)
        values = sharding.own(self.drawn(1, self.tokens, pattern.CHANNELS * 4))

        def exchanged():
            for _ in range(self.network.options.depth):
                attention()
            return sharding.gather(values)

        return exchanged

    def error(self, found, expected):
        """The largest difference, as a share of the largest value."""
        return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())

    def tolerance(self, expected):
        """In 16 bits, some times what rounding makes out: the same weights on one rank in float32."""
        if self.size.dtype == torch.float32:
            return FLOAT32
        latents, when, text = self.given
        exact = self.network.float()(latents.float(), when, text.float())
        self.network.lowered(self.size.dtype)
        return MOST_ROUNDINGS * self.error(expected, exact)

    def sent_bytes(self, group):
        """Bytes that a rank sends."""
        attention = self.sharding(group).sent_bytes(1, pattern.HEAD_DIM, self.size.dtype.itemsize)
        sharding = self.sharding(group)
        gathered = (sharding.ranks - 1) * max(sharding.tokens) * pattern.CHANNELS * 4 * self.size.dtype.itemsize
        return attention * self.network.options.depth + gathered


def checked(case, found, expected):
    """Columns of a comparison with the result of one rank, which rank 0 has.

    Raises an error for a result that is wrong; then nothing is timed.
    """
    if found is expected or expected is None:
        return {"error": 0.0, "tolerance": 0.0, "equal": True}
    error, most = case.error(found, expected), case.tolerance(expected)
    if not error <= most:
        raise TilewrightError(
            f"{case.name}, {case.network.attention}: error {error:.2g} against one rank, tolerance {most:.2g}"
        )
    return {"error": error, "tolerance": most, "equal": torch.equal(found, expected)}


def captured(call, group):
    """``callable()``: replays of `call` as a CUDA graph. Raises an error where they give another result."""
    expected = call()
    dist.barrier(group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The process group's own thread asks for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = call()
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(found, expected):
        raise TilewrightError("expected the replay of a CUDA graph to give what the call gives, found another result")
    return graph.replay


def median_ms(call, group, repetitions):
    """Median over repetitions of the slowest rank's milliseconds."""
    call()
    cuda = torch.cuda.is_available() and dist.get_backend(group) == "nccl"
    times = torch.zeros(repetitions, dtype=torch.float64, device="cuda" if cuda else "cpu")
    for at in range(repetitions):
        dist.barrier(group)
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        times[at] = (time.perf_counter() - begin) * 1e3
    dist.all_reduce(times, dist.ReduceOp.MAX, group)
    return statistics.median(times.tolist())


if __name__ == "__main__":
    main()
