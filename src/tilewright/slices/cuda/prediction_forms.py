"""How prediction of slices is compiled: what a calibration found fastest on this GPU, else the default (stage T3).

As `forms` has it for attention: a file for the codes of each number of queries that a mean is of, and one for
selection, on a GPU with a driver, a torch, a triton and this code.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewright.attention.cuda import forms
from tilewright.core.errors import ArtifactError
from tilewright.slices.cuda import forms as slice_forms

# What the fastest form depends on beside the device.
CODE = tuple(
    f"tilewright.slices.cuda.{name}"
    for name in ("code_kernels", "prediction_forms", "prediction_search", "selection", "selection_kernels")
)
# Of a large GPU, eight for each multiprocessor: many short programs share a few that are late.
PROGRAMS = 1056
# Ranges of keys that log-sum-exps are computed in, at most.
MOST_SPLITS = 32
# The kind of a form for selection; that of codes is named after the queries of a mean.
SELECT = "select"
# What forms are tried with in 16 bits. PRODUCTS: block_m, block_n, num_warps, num_stages. KEYED: keyed, keyed_warps,
# keyed_stages. COUNTED: counted, count_warps. AVERAGED: averaged, mean_warps. SPLITS: splits, for few rows of a head.
PRODUCTS = ((128, 128, 8, 3), (128, 128, 8, 2), (64, 128, 4, 3), (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 4))
KEYED = ((128, 8, 3), (64, 4, 3), (64, 4, 2), (64, 8, 3), (128, 4, 2), (256, 8, 2))
COUNTED = ((8192, 8), (8192, 4), (2048, 2), (2048, 4), (16384, 8), (32768, 16))
AVERAGED = ((128, 4), (128, 8), (32, 2), (64, 2))
SPLITS = (11, 22, 32)


class Config(NamedTuple):
    """How the kernels are compiled.

    block_m, block_n: rows and keys of a product; num_warps, num_stages: of the kernels that compute some. counted:
    codes that a program selects from at once; count_warps: of that kernel. programs: about as many as keys are shared
    out to. by_keys: codes of several rows a group by `code_kernels`, with block_m rows and keyed keys of a
    product, keyed_warps and keyed_stages. averaged: tokens that are read at once for means, by mean_warps. splits:
    ranges of keys that log-sum-exps are computed in, at most `MOST_SPLITS`.
    """

    # Two programs of this size fit a multiprocessor: one computes while the other waits. Of those that were tried on
    # an H200 they took the least with pools of 32 queries, and 10 µs more than that with 128.
    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3
    counted: int = 4096
    count_warps: int = 4
    programs: int = PROGRAMS
    by_keys: bool = True
    keyed: int = 128
    keyed_warps: int = 8
    keyed_stages: int = 2
    averaged: int = 64
    mean_warps: int = 4
    splits: int = 16


def config_for(head_dim: int, dtype: torch.dtype):
    """The `Config` for keys of a type: pipelines fit the shared memory, products without tensor cores the registers."""
    if dtype == torch.float32:
        return Config(block_m=32, block_n=32, num_warps=4, num_stages=1, keyed=32, keyed_warps=4, keyed_stages=1)
    return Config() if head_dim <= 128 else Config(num_stages=2, keyed=64)


@dataclass(frozen=True)
class Kind:
    """What shares a form. what: `SELECT`, or ``pool`` and the queries of a mean. rows: queries of a group. dtype: a
    name; that of selection, which reads codes alone, and its head_dim are of no account."""

    what: str
    rows: int
    head_dim: int
    dtype: str

    @property
    def pool(self):
        """Queries of a mean; None for selection."""
        return None if self.what == SELECT else int(self.what.removeprefix("pool"))


def selecting() -> Kind:
    """The `Kind` of selection."""
    return Kind(SELECT, 0, 0, "uint8")


def of(kind, device):
    """The `Config` of a `Kind` on a ``torch.device``."""
    if device.type == "cuda":
        stated = made_for(kind, device)
        found = forms.held(forms.path_of(stated), stated, read=read)
        if found is not None:
            return read(found.forms[0])
    return candidates(kind)[0]


def candidates(kind):
    """The forms of a `Kind`, distinct, the default first. Those that do not fit a GPU are dropped where they are tried:
    each changes one part of the default."""
    if kind.what == SELECT:
        return (Config(), *(Config(counted=n, count_warps=warps) for n, warps in COUNTED))
    first = config_for(kind.head_dim, getattr(torch, kind.dtype))
    if first.num_stages == 1:
        return (first,)
    found = [first]
    if kind.pool < kind.rows:
        keyed = "keyed", "keyed_warps", "keyed_stages"
        found += [first._replace(**dict(zip(keyed, each, strict=True))) for each in KEYED]
    names = "block_m", "block_n", "num_warps", "num_stages"
    # A product of another number of rows would change the codes by keys, too.
    products = [each for each in PRODUCTS if kind.pool == kind.rows or each[0] == first.block_m]
    found += [first._replace(**dict(zip(names, each, strict=True))) for each in products]
    found += [first._replace(programs=PROGRAMS * n // 2) for n in (1, 4)]
    found += [first._replace(averaged=n, mean_warps=warps) for n, warps in AVERAGED]
    if kind.pool == kind.rows:
        found += [first._replace(splits=n) for n in SPLITS]
        found += [first._replace(splits=n, averaged=128, mean_warps=8) for n in SPLITS]
    if kind.pool < kind.rows:
        # Parts that stand alone are tried together, too.
        pairs = itertools.product(KEYED[:2], AVERAGED[:1])
        found += [
            first._replace(
                keyed=keyed[0], keyed_warps=keyed[1], keyed_stages=keyed[2], averaged=mean[0], mean_warps=mean[1]
            )
            for keyed, mean in pairs
        ]
    return tuple(dict.fromkeys(found))


def made_for(kind, device: torch.device | str):
    """As `forms.made_for`."""
    own = {"dtype": kind.dtype, "head_dim": kind.head_dim, "rows": kind.rows, "run": kind.what}
    return slice_forms.device_for(CODE, device) | own


def read(stated) -> Config:
    """The `Config` that a file states as numbers by name. Raises `ArtifactError`."""
    if stated.keys() != set(Config._fields) or not all(isinstance(n, int) and n >= 0 for n in stated.values()):
        raise ArtifactError(f"the form of a prediction: expected {', '.join(Config._fields)}, numbers, found {stated}")
    return Config(**{name: bool(n) if name == "by_keys" else n for name, n in stated.items()})


def as_stated(form) -> dict:
    """A form as files state it."""
    return {name: int(n) for name, n in form._asdict().items()}
