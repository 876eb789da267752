"""What a GPU's memory and multiprocessors allow at best: the measure of the times of stage T5."""

import numpy as np
import torch

# Per multiprocessor and clock, by compute capability: FLOP of 16-bit matrix products, exponentials, float32 lanes
# (NVIDIA's tuning guides and the throughput table of the CUDA programming guide).
RATES = {"8.0": (2048, 16, 64), "9.0": (4096, 16, 128)}
# float32 instructions for each score beside its exponential: scale and shift, maximum, sum, conversion, and its share
# of fading the sums (counted in compiled kernels for Hopper).
ALU_PER_SCORE = 5.5
# Keys that are read at a time.
_KEYS = 1 << 24


def floor_bytes(graph, *, batch, heads, head_dim, itemsize):
    """Bytes that attention over `graph` moves at least: q and the result, and k and v that some query sees, once."""
    seen = np.zeros(graph.n_cols, bool)
    # Some at a time: of a billion keys, 64-bit copies would take 8 GB.
    for lo in range(0, len(graph.indices), _KEYS):
        seen[graph.indices[lo : lo + _KEYS]] = True
    return 2 * (graph.n_rows + int(seen.sum())) * batch * heads * head_dim * itemsize


def softmax_bound_gflops(device, head_dim, dtype):
    """GFLOP/s of tile work (4 d FLOP for each pair) where matrix products and softmax overlap perfectly; None if the
    device's rates, or those of `dtype`, are not known.

    For each score a multiprocessor spends d / 1024 clocks (on Hopper) in matrix products, and 1 / 16 in the exponential
    and then 5.5 / 128 in other arithmetic, which do not overlap each other: the softmax, which bounds head dims up to
    about 100. The "perfect overlap" column of the ceilings that the study started from, at the highest clock of the
    device, not the clock it happens to run at: 281 and 562 TFLOP/s at 1.755 GHz on 132 multiprocessors for head dims 32
    and 64.
    """
    rates = RATES.get(device.get("capability"))
    if rates is None or dtype == torch.float32:
        return None
    flop, exponentials, lanes = rates
    clocks = max(4 * head_dim / flop, 1 / exponentials + ALU_PER_SCORE / lanes)
    return 4 * head_dim / clocks * device["multiprocessors"] * device["clock_mhz"] / 1e3
