"""Attention of packed batches, and the calls around it: each is compared with an oracle and only then timed (stage T5).

A row that did not pass has the status ``failed`` and no time; one that could not run has ``skipped``; both say why.
"""

from functools import cached_property

import torch

from tilewright import devices, reference
from tilewright.attention.profile import DTYPES
from tilewright.core import registry
from tilewright.core.timing import time_call, time_gpu, time_host
from tilewright.packed import pack
from tilewright_study import sections
from tilewright_study.baselines import packed as packed_baselines
from tilewright_study.baselines.sparse import Unavailable
from tilewright_study.experiments.ragged import OURS, PROVIDERS, check_lengths, shape
from tilewright_study.measure.checks import checked, errors, refusal, settled
from tilewright_study.measure.device import copy_bandwidth
from tilewright_study.measure.rows import machine, now

# What a network does with tokens besides attending: into the packed order and back, and the class tokens.
MOVES = ("pack", "gather", "scatter", "first")


def run(case, settings, how):
    """Yield the rows of the shape `case`. Raises `TilewrightError`."""
    check_lengths("lengths", settings.lengths)
    sections.batches("attention", "attention", settings.attention, PROVIDERS)
    options = {"device": how.device, "dtype": how.dtype, "seed": how.seed}
    effort = how.effort(settings.max_seconds)
    yield from run_ragged(*shape(case), settings.lengths, settings.attention, effort, **options)


@torch.inference_mode()
def run_ragged(heads, head_dim, lengths, attention, effort, *, device="cpu", dtype="float32", seed=0):
    """Yield a row for each (low, high) of `lengths` and each provider and batch of `attention`,
    ``{provider: [images, …]}``; for ours also one into given memory and one for each of `MOVES`.

    Images have lengths drawn uniformly from low to high, the same ones for every provider; q, k and v are views of one
    tensor, as a projection leaves them. Raises `UnknownNameError` and `DeviceError`.
    """
    registry.check("dtype", dtype, DTYPES)
    for name in attention:
        registry.check("attention", name, PROVIDERS)
    kind, facts = getattr(torch, dtype), devices.describe(device)
    for low, high in lengths:
        for images in sorted({images for sizes in attention.values() for images in sizes}):
            batch = _Batch(heads, head_dim, (low, high), images, kind, facts, seed)
            for name in (name for name, sizes in attention.items() if images in sizes):
                yield batch.attended(name, effort)
                if name == OURS:
                    yield batch.attended(name, effort, into=True)
                    yield from (batch.moved(call, effort) for call in MOVES)


class _Batch:
    """One packed batch of random tokens."""

    def __init__(self, heads, head_dim, lengths, images, dtype, facts, seed):
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(lengths[0], lengths[1] + 1, (images,), generator=generator)
        device = devices.facts(facts["kind"]).TORCH_DEVICE
        self.counts, self.facts, self.dtype = counts.tolist(), facts, dtype
        self.packing = pack.pack_lengths(counts.to(device))
        kept = sum(self.counts)
        qkv = torch.randn(kept, 3, heads, head_dim, generator=generator).to(device, dtype)
        self.qkv = qkv.unbind(1)
        self.keep = (torch.arange(max(self.counts)) < counts[:, None]).to(device)
        self.tokens = torch.randn(images, max(self.counts), heads * head_dim, generator=generator).to(device, dtype)
        self.known = {
            "heads": heads,
            "head_dim": head_dim,
            "lengths": "-".join(map(str, lengths)),
            "images": images,
            "tokens": kept,
            "longest": max(self.counts),
            "exact": True,
            "dtype": str(dtype).removeprefix("torch."),
            **machine(facts),
        }

    def attended(self, name, effort, into=False):
        """The row of one provider's attention. into: ours, written to given memory."""
        call = "attend_into" if into else "attend"
        known = {"provider": name, "call": call, "tolerance": reference.TOLERANCE[self.dtype]}
        try:
            ready = self._ready(name, into)
            inputs = ready.put(*self.qkv)
            expected = self._attention if ready.exact else ready.get(_everywhere(*inputs))
            row = self._row(**known, exact=ready.exact)
            row, call = checked(
                lambda: ready.call(*inputs),
                lambda found: self._errors(ready.get(found), expected),
                row,
                like=self.qkv[0],
            )
        except Unavailable as reason:
            return self._row(**known, status="skipped", reason=str(reason))
        except RuntimeError as error:
            return self._row(**known, status="failed", reason=refusal(error))
        heads, head_dim = self.qkv[0].shape[1:]
        flops = 4 * heads * head_dim * sum(count * count for count in self.counts)
        moved = 4 * self.qkv[0].numel() * self.dtype.itemsize
        return self._timed(row, call, effort, moved, flops)

    def moved(self, call, effort):
        """The row of one of `MOVES`; values are moved as they are."""
        x, packed = self.tokens, self.tokens[self.keep]
        capacity = self.packing.capacity
        back = torch.zeros_like(x)
        back[self.keep] = packed
        run, expected, rows = {
            "pack": (lambda: pack.pack(self.keep, capacity, x).tokens, packed, 2 * len(packed)),
            "gather": (lambda: self.packing.gather(x), packed, 2 * len(packed)),
            "scatter": (lambda: self.packing.scatter(packed), back, len(packed) + x.shape[0] * x.shape[1]),
            "first": (lambda: self.packing.first(packed), x[:, 0], 2 * len(x)),
        }[call]
        moved = rows * x.shape[-1] * x.element_size()
        row = self._row(provider=OURS, call=call, tolerance=0.0)
        row, timed = checked(run, lambda found: self._errors(found, expected.double()), row, like=expected)
        return self._timed(row, timed, effort, moved)

    def _errors(self, found, expected):
        """How far a result [..., D] is from what was expected, and over how many rows."""
        return errors(found, expected) | {"checked_rows": expected[..., 0].numel()}

    def _ready(self, name, into):
        if name == OURS:
            given = torch.full_like(self.qkv[0], torch.nan, memory_format=torch.contiguous_format)
            memory = (given,) if into else ()
            return packed_baselines.Ready(self.packing.attend, lambda *qkv: (*qkv, *memory), lambda out: out)
        return packed_baselines.prepare(name, self.packing, *self.qkv[0].shape[1:], self.dtype)

    @cached_property
    def _attention(self):
        """float64 [tokens, H, D]: the oracle, image by image."""
        parts = zip(*(x.split(self.counts) for x in self.qkv), strict=True)
        made = (_everywhere(*(x.transpose(0, 1)[None] for x in qkv)) for qkv in parts)
        return torch.cat([out[0].transpose(0, 1) for out in made])

    def _timed(self, row, call, effort, moved, flops=None):
        """A row with the times of its call, None of one that did not pass. moved: bytes at least."""
        if call is None:
            return row
        gpu = devices.facts(self.facts["kind"]).GPU_TIMER
        taken = (time_gpu if gpu else time_call)(call, **effort.limits)
        facts = taken.columns
        facts |= {} if flops is None else {"useful_gflops": flops / taken.p50_us / 1e3}
        if gpu:
            floor_us = moved / copy_bandwidth() * 1e6
            latency_us, host_us = time_host(call, **effort.limits)
            facts |= {"timing": taken.method, "latency_us": latency_us, "host_us": host_us}
            facts |= {"byte_floor_us": floor_us, "floor_fraction": floor_us / taken.p50_us}
        return settled(row, call, facts)

    def _row(self, **facts):
        return self.known | {"status": "ok"} | facts | {"time": now()}


def _everywhere(q, k, v):
    """float64 [B, H, N, D]: dense attention of q, k and v [B, H, N, D], padding and all."""
    return reference.attention(q, k, v, torch.ones(1, 1, dtype=torch.bool, device=q.device))
