"""Slices as operators: compiled, traced, and with the results that calls have."""

import pytest
import torch
from torch import library

from helpers.slices import mask_of, qkv
from tilewright import slices


@pytest.fixture
def lists(device):
    return slices.from_mask(mask_of([[[70, 3, 0], [4, 0, 64]]], 90).to(device), 40, rows=16)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_as_one_graph(backend, device):
    mask = mask_of([[[70, 3, 0], [4, 0, 64]]], 90).to(device)
    q, k, v = qkv(1, 2, 40, 90, 64, device=device)

    def network(mask, q, k, v):
        lists = slices.from_mask(mask, 40, rows=16)
        again = slices.unpack(lists.pack(), lists.layout)
        out, lse = slices.attend(q, k, v, again, lse=True)
        merged, _ = slices.merge((out, lse), slices.dense(q, k, v))
        return slices.attend(q, k, v, lists), merged, slices.recall(q, k, lists), lists.density(), lists.order

    with torch.no_grad():
        found = torch.compile(network, fullgraph=True, backend=backend)(mask, q, k, v)
        for one, other in zip(found, network(mask, q, k, v), strict=True):
            assert torch.equal(one, other)


def test_numbers_become_lists_in_a_compiled_graph(lists):
    def made(keys, counts):
        return slices.from_indices(keys, counts, (40, 90), rows=16).tensors

    found = torch.compile(made, fullgraph=True, backend="aot_eager")(lists.keys, lists.counts)
    for one, other in zip(found, made(lists.keys, lists.counts), strict=True):
        assert torch.equal(one, other)


def test_a_compiled_call_writes_to_given_memory(lists, device):
    q, k, v = qkv(1, 2, 40, 90, 64, device=device)
    out = torch.zeros(1, 2, 40, 64, device=device)
    compiled = torch.compile(lambda *given: slices.attend(*given, lists, out=out), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), slices.attend(q, k, v, lists))
    assert torch.equal(out, slices.attend(q, k, v, lists))


def test_operators_are_well_formed(lists, device):
    ops, checks = torch.ops.tilewright, {"test_utils": ("test_schema", "test_faketensor")}
    q, k, v = qkv(1, 2, 40, 90, 64, device=device)
    layout, mask = list(lists.layout), mask_of([[[70, 3, 0], [4, 0, 64]]], 90).to(device)
    library.opcheck(ops.slices_from_mask.default, (mask, layout), **checks)
    library.opcheck(ops.slices_pack.default, (lists.keys, lists.counts, layout), **checks)
    library.opcheck(ops.slices_unpack.default, (lists.pack(), layout), **checks)
    library.opcheck(ops.slices_rank.default, (lists.counts, layout), **checks)
    library.opcheck(ops.slices_attend.default, (*lists.tensors, q, k, v, 0.1, None, layout), **checks)
    library.opcheck(ops.slices_attend_lse.default, (*lists.tensors, q, k, v, 0.1, 3.0, layout), **checks)
    library.opcheck(ops.slices_dense.default, (q, k, v, None, 0.1, []), **checks)
