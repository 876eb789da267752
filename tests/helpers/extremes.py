"""Random patterns and biases of extreme size, and attention with all its gradients of them, in float64."""

from types import SimpleNamespace

import numpy as np
import torch

from helpers.plans import prepared
from tilewright import reference
from tilewright.attention.blocks.tiles import fitting
from tilewright.attention.masks import Bias

# The greatest of float32 is what padding is masked with; 1e4 is kept by scores, larger ones are not.
SIZES = 30.0, 1e4, 1e20, 1e31, float(torch.finfo(torch.float32).max)
# Entries of a table.
ENTRIES = 50
# Sets of tiles, most of them taller than many blocks.
TILES = ("16x1",), ("32x16", "8x1"), ("64x1", "16x16"), ("64x1",), ("128x1", "16x1")


def pattern(rng, most):
    """bool [N_q, N_k], each below `most`: documents, bands or random pairs; some rows and columns are full or empty."""
    n_q, n_k = rng.integers(20, most, 2)
    rows, cols = np.ogrid[:n_q, :n_k]
    kind = rng.integers(4)
    if kind == 0:
        found = np.sort(rng.integers(0, 4, n_q))[:, None] == np.sort(rng.integers(0, 4, n_k))
    elif kind == 1:
        found = abs(rows * n_k // n_q - cols) <= rng.integers(5, 60)
    else:
        found = rng.random((n_q, n_k)) < (rng.uniform(0.05, 0.95) if kind == 2 else 1)
    if rng.random() < 0.4:
        found[rng.integers(n_q, size=2)], found[:, rng.integers(n_k, size=2)] = True, True
    if rng.random() < 0.3:
        found[rng.integers(n_q, size=3)], found[:, rng.integers(n_k, size=3)] = False, False
    found[0, 0] = True
    return found


def values(rng, heads, rows, keys):
    """float32 [heads, rows, keys]: some rows, keys and pairs are far below or above the others, or forbidden."""
    found = torch.from_numpy(rng.standard_normal((heads, rows, keys)).astype(np.float32))
    for _ in range(rng.integers(1, 5)):
        size = rng.choice(SIZES) * rng.choice([-1, 1]) if rng.random() < 0.8 else -np.inf
        head = rng.integers(heads) if rng.random() < 0.5 else slice(None)
        place = [(rng.random(n) < rng.choice([0.1, 0.5, 1])) for n in (rows, keys)]
        place[rng.integers(2)][:] = True
        at = torch.from_numpy(np.outer(*place) if rng.random() < 0.7 else rng.random((rows, keys)) < 0.3)
        found[head] = torch.where(at, torch.tensor(size, dtype=torch.float32), found[head])
    return found


def case(seed, dtype=torch.float32, tiles=TILES, heads=2, head_dim=16, most=150):
    """A random one: ``dense``, ``tokens`` q, k and v, ``grad`` of the result, ``bias`` of a plan or None; ``names`` of
    tiles and ``options`` of `plans.prepared`."""
    rng = np.random.default_rng(seed)
    dense = pattern(rng, most)
    n_q, n_k = dense.shape
    kind, bias = rng.integers(4), None
    if kind == 1:
        table = values(rng, heads, 1, ENTRIES)[:, 0]
        bias = Bias(table, lambda rows, cols: (31 * rows + 17 * cols) % ENTRIES)
    elif kind > 1:
        bias = values(rng, heads, n_q, n_k)
    make, batch = torch.Generator().manual_seed(seed), int(rng.integers(1, 4))
    q, k, v, grad = (torch.randn(batch, heads, n, head_dim, generator=make).to(dtype) for n in (n_q, n_k, n_k, n_q))
    names = fitting(tiles[rng.integers(len(tiles))], dense.shape, 16)
    region_rows, split_keys = int(rng.integers(3, 90)), [16, 16, 32, 64, None][rng.integers(5)]
    options = {"region_rows": region_rows, "split_keys": split_keys, "seed": seed, "bias": bias}
    return SimpleNamespace(dense=dense, tokens=(q, k, v), grad=grad, bias=bias, names=names, options=options)


def check(case, prepare, backward, tolerance, device=None):
    """Compare an executor's result and gradients of a case with those of the reference, row by row.

    prepare: of the executor's module; device: for it, None where it takes none. backward: module of its gradients.
    tolerance: of the result; twice that of gradients, which sum products of four rounded factors in place of two.
    """
    tokens = [x.to(device) for x in case.tokens]
    options = case.options if device is None else case.options | {"device": device}
    call, taken, _ = prepared(prepare, case.dense, case.names, tokens, **options)
    out = call(*taken)
    differentiate = backward.gradients if case.bias is None else backward.gradients_with_bias
    found = differentiate(call, *taken, out, case.grad.to(device))
    for name, error in errors(case, out, found).items():
        assert error <= (tolerance if name == "out" else 2 * tolerance), f"{name}: {error:.2e}"


def wanted(case):
    """``(result, {name: gradient})`` of a case, float64: of q, k, v, and of the bias."""
    leaves = {name: x.double().requires_grad_() for name, x in zip("qkv", case.tokens, strict=True)}
    pairs = None
    if case.bias is not None:
        table = case.bias.table if isinstance(case.bias, Bias) else case.bias
        pairs = leaves["bias"] = table.double().requires_grad_()
        if isinstance(case.bias, Bias):
            index = case.bias.index(*np.ogrid[: case.dense.shape[0], : case.dense.shape[1]])
            pairs = pairs[:, torch.from_numpy(index)]
    q, k, v = (leaves[name] for name in "qkv")
    out = reference.attention(q, k, v, torch.from_numpy(case.dense), bias=pairs)
    gradients = torch.autograd.grad(out, list(leaves.values()), case.grad.double())
    return out.detach(), dict(zip(leaves, gradients, strict=True))


def errors(case, out, found):
    """``{name: error}`` of a result and its gradients ``[dq, dk, dv, d_bias]``.

    Relative to the largest row expected; where a key has all the weight of each row, gradients are rounding alone, and
    measured by the sizes that they are differences of.
    """
    expected, gradients = wanted(case)
    least = float(case.grad.norm(dim=-1).max()) / 10
    assert not out.isnan().any()
    made = {"out": reference.relative_error(out.cpu(), expected)}
    for (name, y), x in zip(gradients.items(), found, strict=True):
        x = x.cpu().double().view(y.shape)
        made[name] = float((x - y).norm(dim=-1).max() / max(y.norm(dim=-1).max(), least))
    return made
