"""Keys that banks deliver against graphs of stage T1."""

import dataclasses

import numpy as np
import pytest

from helpers.cases import rest_slow
from tilewright import masks
from tilewright.pushmem.errors import MappingError
from tilewright_study.experiments.push_attention import array as attention


@pytest.mark.parametrize(
    ("name", "cycles", "cycles_global", "tiles"),
    [("vil-tiny-224-s1", 375_000, 380_000, 96), ("regionvit-tiny-224-s1", 61_000, 61_000, 64)],
)
def test_every_query_is_given_the_keys_of_its_row(name, cycles, cycles_global, tiles):
    graph = masks.build(name)
    layer = attention.layer(graph.meta)
    assert layer.bound <= layer.cycles <= cycles
    assert layer.cycles_global <= cycles_global
    assert layer.tiles <= tiles
    found = attention.deliver(layer)
    assert (found.wrong, found.conflicts) == (0, 0)
    assert attention.rows_that_differ(layer, graph, np.arange(graph.meta.get("n_global", 0))) == 0


def test_deliveries_a_cycle_early_are_wrong():
    layer = attention.regionvit(masks.build("regionvit-tiny-224-s1").meta)
    (times, keys), other = layer.outputs
    assert attention.deliver(dataclasses.replace(layer, outputs=((times - 1, keys), other))).wrong


@pytest.mark.parametrize("name", rest_slow(["vil-tiny-224-s1", "regionvit-tiny-224-s1"], 1))
def test_delivered_vectors_give_the_reference(name):
    import torch

    from tilewright.reference import attention as reference

    graph = masks.build(name)
    layer = (attention.longformer if name.startswith("vil") else attention.regionvit)(graph.meta)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((graph.n_rows, graph.meta["head_dim"])).astype(np.float32) for _ in range(3))
    found = attention.attend(layer, q, k, v, np.arange(graph.meta.get("n_global", 0)))
    given = (torch.tensor(a)[None, None] for a in (q, k, v))
    expected = reference(*given, torch.tensor(graph.to_dense()))[0, 0].numpy()
    # Weights add up to 1; rounding of 3,137 float32 terms grows as their root: 56 · 2^-24 · 4, the largest of v.
    assert np.abs(found - expected).max() < 1.4e-5


def test_a_ring_that_is_larger_than_a_bank_names_what_would_fit():
    meta = dict(masks.build("vil-tiny-224-s1").meta, grid=[112, 112])
    with pytest.raises(MappingError, match="strips of 8 chunks would fit"):
        attention.longformer(meta)


@pytest.mark.parametrize("name", ["dynamicvit-s-224", "band-64"])
def test_a_graph_without_windows_is_refused(name):
    meta = {"family": name.split("-")[0], "model": name}
    with pytest.raises(MappingError, match=f"{name}: expected attention in windows, of the families vision_longformer"):
        attention.layer(meta)
