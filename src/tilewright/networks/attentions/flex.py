"""FlexAttention, compiled, in the model's own order, with the bias as its ``score_mod``."""

import torch

from tilewright.kernels.baselines import flex


def order(site):
    """Tokens stay in the model's order."""
    return None


def prepare(site, bias, dtype, device):
    """Compiled FlexAttention; the first call compiles. Raises what `kernels.baselines.flex` raises."""
    score_mod = None
    if bias is not None:
        bias = bias.to(device, dtype)
        # What the slots are looked up in goes to the device now: what is compiled cannot bring it there.
        site.slot(*torch.zeros(2, 1, dtype=torch.int64, device=device))

        def score_mod(score, b, h, q, kv):
            return score + bias[h, site.slot(q, kv)]

    return flex.prepare(site.graph, max_bytes=1 << 32, device=device.type, score_mod=score_mod).call
