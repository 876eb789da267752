"""Workloads of Swin's stages: the patterns and biases that the network itself attends with, names and refusals."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright import masks, networks
from tilewright.core.errors import ConfigError, UnknownNameError
from tilewright.masks import swin_stage
from tilewright.networks import swin

SIDES = st.integers(32, 150)


def dense(graph):
    return graph.to_csr().toarray().astype(bool)


@settings(max_examples=20, deadline=None)
@given(size=st.tuples(SIDES, SIDES), stage=st.integers(1, 4), shifted=st.booleans())
def test_a_stage_sees_what_its_network_sees(size, stage, shifted):
    name = f"swin-tiny-{size[0]}x{size[1]}-s{stage}" + "-shifted" * shifted
    graph = masks.build(name)
    grid = swin.pattern.grids(size)[stage - 1]
    windows = swin.Windows.pair(grid, 3 << (stage - 1), 32, "dense", 7)[shifted]
    assert graph.meta["grid"] == list(windows.grid) and graph.id == windows.site.graph.id
    assert graph.meta["heads"] == 3 << (stage - 1)
    tokens = np.arange(graph.n_rows)
    seen = dense(graph)
    index = windows._bias_index(torch.from_numpy(tokens)[:, None], torch.from_numpy(tokens)).numpy()
    assert index[seen].max() < graph.meta["bias"]["table_size"] == 169
    assert masks.size(name) >= graph.n_rows + len(graph.indices)


@pytest.mark.parametrize("shifted", [False, True])
def test_masked_attention_by_a_workload_is_that_of_the_published_windows(shifted):
    graph = masks.build("swin-tiny-40x100-s1" + "-shifted" * shifted)
    windows = swin.Windows.pair((10, 25), 3, 32, "native", 7)[shifted]
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, graph.n_rows, 32, generator=generator).unbind()
    table = torch.randn(3, 169, generator=generator)
    tokens = torch.arange(graph.n_rows)
    index = windows._bias_index(tokens[:, None], tokens)
    mask = F.pad(table, (0, 1))[:, index].masked_fill(~torch.from_numpy(dense(graph)), -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(windows.native(q, k, v, F.pad(table, (0, 1))), expected, atol=1e-5, rtol=0)


def test_shifted_windows_are_smaller_at_the_edges():
    graph = masks.build("swin-tiny-512-s1-shifted")
    # 128 tokens a side are 19 windows of 7; shifted by 3 the last one of a side is cut in 4 and 3.
    lengths = np.diff(graph.indptr)
    assert graph.n_rows == 133**2 and len(lengths) == 20**2
    assert sorted(set(lengths)) == [9, 12, 16, 21, 28, 49] and graph.meta["grid"] == [133, 133]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swin-tiny-512-s5", "unknown workload 'swin-tiny-512-s5'; known: .*swin-<tiny"),
        ("swin-huge-512-s1", "unknown workload"),
        ("swin-tiny-16-s1", "resolution: expected at least 32 pixels a side, found 16"),
    ],
)
def test_other_names_are_refused(name, message):
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        masks.build(name)


def test_another_variant_is_refused():
    with pytest.raises(ConfigError, match="variant: expected one of tiny, small, base, large, found 'huge'"):
        swin_stage.Params("huge", 512, 1)


def test_networks_of_maps_are_named_without_torch():
    code = (
        "import sys; from tilewright import masks, networks\n"
        "assert networks.parse('segformer-b2-512x1024')[1]['image_size'] == (512, 1024)\n"
        "assert networks.parse('swin-tiny-512')[0] == 'swin' and masks.parse('swin-tiny-512-s2-shifted')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert networks.parse("segformer-b0-512") == ("segformer", {"variant": "b0", "image_size": 512})
