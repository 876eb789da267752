"""FlexAttention, compiled: one sequence whose images do not see each other, with blocks of the size that is fastest."""

import torch

from tilewright.torch_attention import flex
from tilewright_study.baselines.packed import Ready, lengths


def prepare(packing, heads, head_dim, dtype):
    """See the contract of the package."""
    device = packing.lists.device.type
    counts = torch.tensor(lengths(packing), device=packing.lists.device)
    image = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    pattern = packing.graph()

    def form(variant):
        setting = {"max_bytes": 0, "device": device, "variant": variant}
        return flex.prepare(pattern, mask_mod=lambda b, h, q, kv: image[q] == image[kv], **setting)

    calls = []

    def call(q, k, v):
        if not calls:
            calls.append(form(flex.fastest(form, flex.UNSPLIT, q, k, v)).call)
        return calls[0](q, k, v)

    return Ready(
        call,
        lambda *qkv: [x[: len(image)].transpose(0, 1)[None] for x in qkv],
        lambda out: out[0].transpose(0, 1),
    )
