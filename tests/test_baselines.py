import importlib
import itertools
import sys

import numpy as np
import pytest
import torch

import plans
from tilewright import graph, models
from tilewright.bench import Effort, rows, run_baselines
from tilewright.bench.rows import Tokens
from tilewright.kernels import baselines, reference
from tilewright.kernels.baselines import (
    Unavailable,
    backends,
    cudnn_flex,
    fa4,
    flashinfer,
    flex,
    flex_split,
    patterns,
    sdpa_compacted,
    sdpa_kept,
    sdpa_mask,
    sdpa_windows,
)  # fmt: skip

QUICK = Effort(rse=1.0, min_repetitions=3, max_seconds=0.01)
META = {"heads": 2, "head_dim": 16}
ON_GPU = {"batch": 1, "heads": 2, "head_dim": 16, "dtype": torch.float16, "device": "cuda", "max_bytes": 1 << 20}
GPU_ONLY = (
    "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_windows", "sdpa_kept", "fa4", "cudnn_flex", "flashinfer",
)  # fmt: skip


def shuffled(pattern, seed=0):
    rng = np.random.default_rng(seed)
    return pattern.reordered(rng.permutation(pattern.n_rows), rng.permutation(pattern.n_cols))


def windows(count=4, n_q=6, n_k=5):
    """Disjoint windows of n_q queries and n_k keys each."""
    return graph.from_pattern(np.kron(np.eye(count), np.ones((n_q, n_k))).astype(bool), meta=META)


def keeping(n=40, n_kept=11, seed=0):
    """Kept tokens, which all queries see; the others see themselves too."""
    common = np.random.default_rng(seed).choice(n, n_kept, replace=False)
    dense = np.eye(n, dtype=bool)
    dense[:, common] = True
    return graph.from_pattern(dense, meta=META), np.sort(common)


# Kinds of blocks, rules, bits.


def test_blocks_are_full_partial_or_absent():
    dense = np.zeros((300, 200), bool)
    dense[:128, :128] = dense[130, 150] = True
    partial, full = patterns.kinds(graph.from_pattern(dense), 128)
    assert full.tolist() == [[True, False], [False, False], [False, False]]
    assert partial.tolist() == [[False, False], [False, True], [False, False]]
    counts, numbers = patterns.listed(partial, "cpu")
    assert counts.tolist() == [[[0, 1, 0]]] and numbers[0, 0, 1].tolist() == [1, 0]


def test_windows_are_told_from_other_patterns():
    found = shuffled(windows())
    owner = patterns.windows(found)
    assert (found.to_dense() == (found.row_class[:, None] == owner)).all()
    lone, uneven, shared = windows().to_dense(), windows().to_dense(), windows().to_dense()
    lone[:, 3], uneven[0], shared[:6, 6] = False, uneven[7], True
    for other in (lone, uneven, shared, np.ones((4, 4), bool)):
        assert patterns.windows(graph.from_pattern(other)) is None


def test_kept_tokens_are_told_from_other_patterns():
    found, common = keeping()
    assert patterns.kept(found).tolist() == common.tolist()
    missing, stray, none = found.to_dense(), found.to_dense(), np.eye(5, dtype=bool)
    pruned = np.setdiff1d(np.arange(40), common)
    missing[pruned[0], pruned[0]] = False
    stray[pruned[0], pruned[:2]] = False, True
    for other in (missing, stray, none, found.to_dense()[:-1]):
        assert patterns.kept(graph.from_pattern(other)) is None
    assert patterns.kept(found.reordered(*2 * [np.random.default_rng(0).permutation(40)])) is not None


RULED = {
    "windows": windows,
    "kept": lambda: keeping()[0],
    "exact": lambda: models.build("vil-tiny-96-s1-exact"),
    "chunk": lambda: models.build("vil-tiny-84-s1"),
}


@pytest.mark.parametrize("name", RULED)
@pytest.mark.parametrize("order", ["natural", "shuffled"])
def test_a_rule_allows_the_pattern_and_nothing_else(name, order):
    pattern = RULED[name]()
    if order == "shuffled":
        same = np.random.default_rng(0).permutation(pattern.n_rows)
        pattern = pattern.reordered(same, same) if name == "kept" else shuffled(pattern)
    assert patterns.rule(pattern) is not None
    assert_allows(pattern, flex.pairs(pattern, 0, "cpu")[0])


def test_without_a_rule_pairs_are_looked_up():
    pattern = graph.from_pattern(plans.pattern(30, 21))
    assert patterns.rule(pattern) is None and patterns.rule(models.build("vil-tiny-64-s3")) is None
    mask_mod, size = flex.pairs(pattern, 1000, "cpu")
    assert_allows(pattern, mask_mod)
    with pytest.raises(Unavailable, match=f"bits take {size} bytes; at most 10 are allowed"):
        flex.pairs(pattern, 10, "cpu")


def assert_allows(pattern, mask_mod):
    queries, keys = torch.arange(pattern.n_rows)[:, None], torch.arange(pattern.n_cols)
    assert np.array_equal(mask_mod(0, 0, queries, keys).numpy(), pattern.to_dense())


def test_intervals_of_keys_hold_the_pattern():
    pattern = graph.from_pattern(plans.pattern(30, 21, density=0.5))
    bounds = cudnn_flex.endpoints(pattern)
    assert bounds.shape[1] % 2 == 1 and (np.diff(bounds, axis=1) >= 0).all()
    keys = np.arange(21)
    seen = keys < bounds[:, :1]
    for low, high in zip(bounds[:, 1::2].T, bounds[:, 2::2].T, strict=True):
        seen |= (keys >= low[:, None]) & (keys < high[:, None])
    assert np.array_equal(seen[pattern.row_class], pattern.to_dense())


def test_tiles_that_hold_a_pair_are_counted():
    dense = np.zeros((10, 9), bool)
    dense[0, 0] = dense[1, 8] = dense[7, 3] = True
    assert cudnn_flex._visited(graph.from_pattern(dense), 4, 3) == 3


def test_gathered_keys_hold_the_pattern():
    pattern = graph.from_pattern(plans.pattern(30, 21))
    indptr, keys, mask = flashinfer.gathered(pattern, 8, 10_000)
    found = np.zeros((32, 21), bool)
    for group, (lo, hi) in enumerate(itertools.pairwise(indptr)):
        found[8 * group : 8 * group + 8, keys[lo:hi]] = mask[lo:hi, :, 0].T
    assert np.array_equal(found[:30], pattern.to_dense()) and not found[30:].any()
    with pytest.raises(Unavailable, match=r"mask takes .* at most 10 are allowed"):
        flashinfer.gathered(pattern, 8, 10)


def test_bits_for_flash_attention_are_words():
    pattern = graph.from_pattern(plans.pattern(30, 41))
    row_class, words = fa4._tables(pattern, 1000)
    assert row_class.shape == (256,) and words.shape == (pattern.n_classes, 8)
    keys = np.arange(41)
    seen = words[row_class[:30, None], keys // 32] >> keys % 32 & 1
    assert np.array_equal(seen.astype(bool), pattern.to_dense())


# Members.


def test_every_baseline_keeps_the_contract():
    for name in baselines.NAMES:
        module = importlib.import_module(f"tilewright.kernels.baselines.{name}")
        assert isinstance(module.MASKED, bool) and isinstance(module.DENSE, bool) and callable(module.prepare)
        assert module.VARIANTS and len(set(module.VARIANTS)) == len(module.VARIANTS)


def test_gpu_baselines_are_skipped_on_a_cpu_with_the_reason():
    found = run_baselines(GPU_ONLY, Tokens(windows()), QUICK, max_dense_tokens=100)
    assert {(row["status"], row["reason"]) for row in found} == {
        ("skipped", "runs on an NVIDIA GPU only, found cpu"),
    }
    with pytest.raises(Unavailable, match="NVIDIA GPU only"):
        sdpa_mask.prepare(windows(), variant="cudnn", **ON_GPU | {"device": "cpu"})


@pytest.mark.parametrize(
    ("module", "package"),
    [(fa4, "flash_attn"), (cudnn_flex, "cudnn"), (flashinfer, "flashinfer")],
    ids=lambda x: str(x),
)
def test_what_is_not_installed_is_unavailable(monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unavailable, match="cannot be imported"):
        module.prepare(windows(), variant=module.VARIANTS[0], **ON_GPU)


def test_other_patterns_are_unavailable():
    pattern = graph.from_pattern(plans.pattern(30, 30))
    with pytest.raises(Unavailable, match="not one of disjoint windows"):
        sdpa_windows.prepare(pattern, variant="flash", **ON_GPU)
    with pytest.raises(Unavailable, match="not one of kept tokens"):
        sdpa_kept.prepare(pattern, variant="flash", **ON_GPU)
    for dense, who in ((np.eye(8), "no"), (np.ones((8, 8)), "every")):
        with pytest.raises(Unavailable, match=f"{who} query sees more than 50% of the keys"):
            flex_split.prepare(graph.from_pattern(dense), variant="64", **ON_GPU)


@pytest.mark.parametrize("backend", backends.NAMES)
def test_a_kernel_that_refuses_the_tokens_is_unavailable(backend):
    # On a GPU for their type, elsewhere for the lack of one.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with pytest.raises(Unavailable, match=f"torch's {backend} attention refuses torch.float64, head dim 16"):
        backends.need(backend, *3 * [torch.zeros(1, 2, 8, 16, dtype=torch.float64, device=device)])


@pytest.fixture
def on_cpu(monkeypatch):
    """The kernels of a GPU, computed here."""

    def attend(backend, q, k, v, with_lse=False):
        everything = torch.ones(1, 1, dtype=torch.bool)
        lse = torch.logsumexp(q.double() @ k.double().mT * q.shape[-1] ** -0.5, -1, keepdim=True)
        return reference.attention(q, k, v, everything).to(q.dtype), lse.float()

    for module in (backends, sdpa_windows, sdpa_kept):
        monkeypatch.setattr(module, "need_gpu", lambda device: None)
    monkeypatch.setattr(backends, "need", lambda *_: None)
    monkeypatch.setattr(backends, "attend", attend)


def only_ok(name, pattern, **options):
    (row,) = run_baselines([name], Tokens(pattern, **options), QUICK, max_dense_tokens=100)
    if "no C++ compiler" in row["reason"]:
        pytest.skip(row["reason"])
    assert row["status"] == "ok", row["reason"]
    return row


@pytest.mark.parametrize("order", [lambda pattern: pattern, shuffled], ids=["natural", "shuffled"])
@pytest.mark.parametrize("batch", [1, 2], ids=lambda batch: f"B{batch}")
def test_windows_are_a_batch(on_cpu, order, batch):
    row = only_ok("sdpa_windows", order(windows()), batch=batch)
    assert row["executed_gflops"] == pytest.approx(row["useful_gflops"])


def test_own_keys_are_merged(on_cpu):
    same = np.random.default_rng(1).permutation(40)
    for pattern in (keeping()[0], keeping()[0].reordered(same, same)):
        only_ok("sdpa_kept", pattern, batch=2)


def test_inference_attends_among_the_kept_tokens_alone(on_cpu):
    pattern, common = keeping()
    same = np.random.default_rng(1).permutation(40)
    for asked in (pattern, pattern.reordered(same, same)):
        row = only_ok("sdpa_compacted", asked, batch=2)
        # Nothing of it is counted for the queries that are dropped.
        assert (row["tokens"], row["entries"], row["density"]) == (11, 121, 1)
        assert row["executed_gflops"] == pytest.approx(row["useful_gflops"])
    # What it computes is what the whole pattern gives the kept queries.
    drawn = Tokens(pattern)
    ready = sdpa_compacted.prepare(sdpa_compacted.part(pattern), variant="torch", **drawn.setting)
    found = ready.call(*(x[:, :, common] for x in drawn.ordered))
    torch.testing.assert_close(found.double(), drawn.masked_result[:, :, common], atol=2e-5, rtol=0)


@pytest.mark.parametrize("pattern", [windows(), graph.from_pattern(np.ones((8, 8)), meta=META)], ids=["windows", "all"])
def test_patterns_without_pruned_tokens_have_no_inference_of_their_own(pattern):
    (row,) = run_baselines(["sdpa_compacted"], Tokens(pattern), QUICK, max_dense_tokens=100)
    assert (row["status"], row["reason"]) == ("skipped", "the pattern is not one of kept tokens and each query itself")


def test_wrong_inference_is_never_timed(on_cpu, monkeypatch):
    monkeypatch.setattr(sdpa_compacted, "VARIANTS", ("flash",))
    monkeypatch.setattr(backends, "attend", lambda backend, q, k, v: (v.mean(2, keepdim=True).expand_as(q), None))
    (row,) = run_baselines(["sdpa_compacted"], Tokens(keeping()[0]), QUICK, max_dense_tokens=100)
    assert row["status"] == "failed" and row["p50_us"] == ""


def test_dense_kernels_attend_to_everything(on_cpu):
    assert only_ok("sdpa_flash", windows())["executed_gflops"] > 0


@pytest.mark.parametrize("name", ["flex", "flex_best", "flex_split"])
def test_flex_passes_its_check(name):
    dense = plans.pattern(300, 200, density=0.01)
    dense[:128, :128] = True
    # A wide row that misses a key.
    dense[200, :199] = True
    row = only_ok(name, graph.from_pattern(dense, meta=META))
    assert row["variant"] in ("128", "64") and row["memory_bytes"] > 0


def test_flex_with_a_rule_passes_its_check():
    only_ok("flex_split", RULED["exact"](), heads=1, head_dim=16)


def test_without_the_wide_rows_fewer_blocks_are_visited():
    pattern = graph.from_pattern(np.kron(np.eye(4), np.ones((128, 128))).astype(bool) | (np.arange(512) == 0)[:, None])
    whole = flex.prepare(pattern, max_bytes=1 << 20)
    split = flex_split.prepare(pattern, variant="128", **ON_GPU | {"device": "cpu"})
    assert (whole.executed, split.executed) == ((4 + 3) * 128 * 128, 4 * 128 * 128 + 512)


def test_what_is_too_large_is_skipped_with_the_reason(monkeypatch):
    tokens = Tokens(graph.from_pattern(plans.pattern(140, 90), meta=META))
    for row in run_baselines(["sdpa_dense", "sdpa_mask"], tokens, QUICK, max_dense_tokens=89):
        assert row["status"] == "skipped" and row["reason"] == "90 tokens; dense attention is run up to 89"
        assert row["p50_us"] == row["max_abs_error"] == ""
    monkeypatch.setattr(rows, "BASELINE_BYTES", 100)
    for row in run_baselines(["sdpa_mask", "flex"], tokens, QUICK, max_dense_tokens=90):
        assert row["status"] == "skipped" and "at most 100 are allowed" in row["reason"]


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    from torch._inductor import cpp_builder

    monkeypatch.setenv("PATH", str(tmp_path))
    cpp_builder.cpp_compiler_search.cache_clear()
    yield
    cpp_builder.cpp_compiler_search.cache_clear()


def test_without_a_compiler_flex_is_skipped(no_compiler):
    (row,) = run_baselines(["flex"], Tokens(windows()), QUICK, max_dense_tokens=1000)
    assert row["status"] == "skipped" and "no C++ compiler" in row["reason"]
