"""Oracles of shares, codes and selection: float64 and NumPy's sort."""

import numpy as np
import torch

from tilewright.slices.layout import UNKNOWN
from tilewright.slices.selection import BIN, CODES, MASS_UNIT, OCTAVE, WEIGHTS

# Eighths of an octave that float32 scores, and queries averaged in 16 bits, may be off: scores below 20 octaves, whose
# rounding is 2**-20 and 2**-10 of them.
CODE_ERROR = {torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 1.6}


def numbers(x):
    return x.detach().cpu().double().numpy()


def softmax(scores):
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def groups(n, rows):
    """Ranges of the queries of each group."""
    return [slice(lo, min(lo + rows, n)) for lo in range(0, n, rows)]


def pooled(q, k, rows, pool, scale):
    """Shares [B, H, G, N_k] of the means of sub-pools, each weighed by its queries."""
    q, k = numbers(q), numbers(k)
    found = []
    for group in groups(q.shape[2], rows):
        members = q[:, :, group]
        parts = [members[:, :, part] for part in groups(members.shape[2], pool)]
        shares = [softmax(part.mean(2, keepdims=True) @ k.swapaxes(2, 3) * scale) * part.shape[2] for part in parts]
        found.append(sum(shares) / members.shape[2])
    return np.concatenate(found, 2)


def column(q, k, rows, step, largest, scale):
    """The largest or mean share that every step-th query of a group gives."""
    shares = softmax(numbers(q) @ numbers(k).swapaxes(2, 3) * scale)
    found = []
    for group in groups(q.shape[2], rows):
        asked = shares[:, :, group][:, :, ::step]
        # Each stands for the queries up to the next one.
        weights = [part.stop - part.start for part in groups(group.stop - group.start, step)]
        mean = np.average(asked, axis=2, weights=weights)
        found.append(asked.max(2) if largest else mean)
    return np.stack(found, 2)


def blocks(q, k, rows, block, similarity, scale):
    """Shares [B, H, G, N_k] that means of groups give to the keys of blocks, infinite for what is kept whole."""
    q, k = numbers(q), numbers(k)

    def means(x, size):
        parts = [x[:, :, part] for part in groups(x.shape[2], size)]
        mean = np.stack([part.mean(2) for part in parts], 2)
        length = np.linalg.norm
        cosines = [
            ((part @ m[..., None])[..., 0] / length(part, axis=-1) / length(m, axis=-1)[..., None]).mean(-1)
            for part, m in ((part, part.mean(2)) for part in parts)
        ]
        return mean, np.stack(cosines, -1) < similarity, np.array([part.shape[2] for part in parts])

    q_mean, q_unlike, _ = means(q, rows)
    k_mean, k_unlike, size = means(k, block)
    p = np.exp(q_mean @ k_mean.swapaxes(2, 3) * scale)
    with np.errstate(divide="ignore"):
        p = p / (p * size * ~k_unlike[:, :, None]).sum(-1, keepdims=True)
    p[np.broadcast_to(q_unlike[..., None] | k_unlike[:, :, None], p.shape)] = np.inf
    return np.repeat(p, block, -1)[..., : k.shape[2]]


def check_codes(codes, shares, error):
    """Codes are those of the shares, give or take `error` before they are rounded down."""
    with np.errstate(divide="ignore"):
        exact = -OCTAVE * np.log2(shares)
    low, high = (np.clip(np.floor(exact + e), 0, CODES - 1) for e in (-error, error))
    codes = codes.cpu().numpy()
    assert codes.shape == shares.shape
    assert (low <= codes).all() and (codes <= high).all(), np.abs(codes - exact).max()


def run_codes(codes, width):
    """Codes of the summed shares of runs of keys, as the selection has them: keys of code 255 have no share."""
    n = -(-len(codes) // width) * width
    padded = np.pad(codes, (0, n - len(codes)), constant_values=CODES - 1).astype(np.float64)
    shares = np.where(padded < CODES - 1, 2 ** ((padded + 0.5) / -OCTAVE), 0).reshape(-1, width).sum(1)
    with np.errstate(divide="ignore"):
        return np.clip(np.floor(-OCTAVE * np.log2(shares)), 0, CODES - 1).astype(np.uint8)


def mass_of(codes, free=False):
    """The masses of codes, integers of at most 31 bits."""
    codes = codes.astype(int)
    return np.where(free & (codes == 0), 0, np.array(WEIGHTS)[codes % OCTAVE // BIN] >> codes // OCTAVE)


def select(codes, rule):
    """``(keys listed, count)`` of a group's codes [N_k], by sorting them."""
    n_keys = len(codes)
    unknown = (codes == CODES - 1).all() and not rule.known
    if rule.width > 1:
        codes = run_codes(codes, rule.width)
    always = np.zeros(len(codes), bool)
    for first, end in rule.always:
        always[first:end] = True
    others = np.flatnonzero(~always)
    order = others[np.argsort(codes[others], kind="stable")]
    if rule.mass is not None:
        mass = mass_of(codes, rule.free)
        reached = mass[always].sum() + np.concatenate([[0], np.cumsum(mass[order])])
        n = int((reached < rule.mass_units * MASS_UNIT * mass.sum()).sum())
        # All of a code, from the first one on.
        last = codes[order[max(n - 1, 0)]] if len(order) else 0
        last = 0 if n == 0 else last
        asked = always.sum() + (codes[order] <= last).sum()
    elif rule.code is not None:
        asked = always.sum() + (codes[order] <= rule.code).sum()
    else:
        asked = len(codes)
    asked = min(asked, len(codes) if rule.count is None else rule.count)
    asked = max(asked, min(rule.least, len(codes)), always.sum())
    fit = min(asked, rule.most)
    units = np.sort(np.concatenate([np.flatnonzero(always), order[: fit - always.sum()]]))
    keys = (units[:, None] * rule.width + np.arange(rule.width)).ravel()
    keys = keys[keys < n_keys]
    if unknown:
        return keys, UNKNOWN
    return keys, asked * rule.width if asked > rule.most else len(keys)
