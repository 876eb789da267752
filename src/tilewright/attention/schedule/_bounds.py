"""Named lower bounds on any schedule. No solver is needed for them; each schedule reports them."""

from collections.abc import Mapping

import numpy as np

from tilewright.attention.blocks import Blocks
from tilewright.attention.profile import Profile
from tilewright.attention.schedule.problem import Problem

# Bytes of one number of each dtype that a profile may name.
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def lower_bounds(problem: Problem, blocks: Mapping[str, Blocks], profiles: Mapping[str, Profile]) -> dict[str, float]:
    """Lower bounds in microseconds: ``work``, ``longest``, ``launched``; of a device with rates ``bytes``, ``flops``.

    work: the least load of each region, shared by the lanes. longest: the longest item, each region with the tile
        that keeps its longest item shortest. launched: `work`, and what the region that needs most beside it needs.
    bytes: queries, keys, values and outputs, each moved once at the device's copy rate (``copy_gb_per_s``).
    flops: the two products of each allowed pair at the device's peak rate (``peak_gflops``).
    """
    least = np.where(problem.allowed, problem.load_us, np.inf).min(axis=1)
    longest = np.where(problem.allowed, problem.longest_us, np.inf).min(axis=1)
    fixed = np.where(problem.allowed, problem.fixed_us, np.inf).min(axis=1)
    bounds = {"work": float(least.sum() / problem.limits.lanes), "longest": float(longest.max())}
    bounds["launched"] = bounds["work"] + float(fixed.max())
    cover, profile = next(iter(blocks.values())), next(iter(profiles.values()))
    width = profile.heads * profile.head_dim
    if rate := profile.device.get("copy_gb_per_s"):
        queries = int(cover.rows[cover.runs > 0].sum())
        keys = len(np.unique(_keys_seen(cover)))
        bounds["bytes"] = 2 * (queries + keys) * width * ITEM_BYTES[profile.dtype] / rate / 1e3
    if rate := profile.device.get("peak_gflops"):
        bounds["flops"] = 4 * int(cover.run_entries.sum()) * width / rate / 1e3
    return bounds


def _keys_seen(cover):
    """Keys that some query of the cover sees, repeated."""
    width = cover.run_keys.shape[1]
    seen = np.unpackbits(np.bitwise_or.reduce(cover.masks, axis=1), axis=1, count=width, bitorder="little")
    full = (cover.run_mask < 0)[:, None] & (cover.run_keys >= 0)
    partial = np.zeros(cover.run_keys.shape, bool)
    partial[cover.run_mask >= 0] = seen[cover.run_mask[cover.run_mask >= 0]]
    return cover.run_keys[full | partial]
