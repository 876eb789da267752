import importlib
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers import plans
from helpers.rows import run_baselines
from tilewright import graph, masks, reference
from tilewright.core import timing
from tilewright.core.errors import Unavailable
from tilewright.integrations import natten as drop_in
from tilewright.torch_attention import flex, kernels, patterns
from tilewright.torch_attention import wide as wide_rows
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.baselines.sparse import (
    _forms,
    cudnn_blocks,
    cudnn_flex,
    fa4,
    fa4_dense,
    flash3_dense,
    flashinfer,
    natten,
    sdpa_compacted,
    sdpa_kept,
    sdpa_mask,
    sdpa_windows,
)
from tilewright_study.baselines.sparse import flex as flex_member
from tilewright_study.experiments.attention import run as rows
from tilewright_study.experiments.attention.run import Tokens
from tilewright_study.measure.effort import Effort

QUICK = Effort(rse=1.0, min_repetitions=3, max_seconds=0.01)
META = {"heads": 2, "head_dim": 16}
ON_GPU = {"batch": 1, "heads": 2, "head_dim": 16, "dtype": torch.float16, "device": "cuda", "max_bytes": 1 << 20}
GPU_ONLY = (
    "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_windows", "sdpa_kept", "fa4", "cudnn_flex", "flashinfer",
    "natten", "fa4_dense", "flash3_dense", "cudnn_blocks",
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
    assert (found.to_dense() == (found.row_id[:, None] == owner)).all()
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
    "exact": lambda: masks.build("vil-tiny-96-s1-exact"),
    "chunk": lambda: masks.build("vil-tiny-84-s1"),
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
    assert patterns.rule(pattern) is None and patterns.rule(masks.build("vil-tiny-64-s3")) is None
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
    assert np.array_equal(seen[pattern.row_id], pattern.to_dense())


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
    row_id, words = fa4._tables(pattern, 1000)
    assert row_id.shape == (256,) and words.shape == (pattern.n_distinct, 8)
    keys = np.arange(41)
    seen = words[row_id[:30, None], keys // 32] >> keys % 32 & 1
    assert np.array_equal(seen.astype(bool), pattern.to_dense())


# Members.


def test_every_baseline_keeps_the_contract():
    for name in sparse_baselines.NAMES:
        module = importlib.import_module(f"tilewright_study.baselines.sparse.{name}")
        assert isinstance(module.MASKED, bool) and isinstance(module.DENSE, bool) and callable(module.prepare)
        assert module.VARIANTS and len(set(module.VARIANTS)) == len(module.VARIANTS)


def test_gpu_baselines_are_skipped_on_a_cpu_with_the_reason():
    # NATTEN says first that its windows are others.
    names = [name for name in GPU_ONLY if name != "natten"]
    found = run_baselines(names, Tokens(windows()), QUICK, max_dense_tokens=100)
    assert {(row["status"], row["reason"]) for row in found} == {
        ("skipped", "runs on an NVIDIA GPU only, found cpu"),
    }
    with pytest.raises(Unavailable, match="NVIDIA GPU only"):
        sdpa_mask.prepare(windows(), variant="cudnn", **ON_GPU | {"device": "cpu"})


@pytest.mark.parametrize(
    ("module", "package"),
    [
        *((fa4, "flash_attn"), (cudnn_flex, "cudnn"), (flashinfer, "flashinfer"), (fa4_dense, "flash_attn")),
        *((flash3_dense, "flash_attn_interface"), (cudnn_blocks, "cudnn")),
    ],
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
            flex.prepare(graph.from_pattern(dense), variant="64-split", **ON_GPU)


@pytest.mark.parametrize("backend", kernels.NAMES)
def test_a_kernel_that_refuses_the_tokens_is_unavailable(backend):
    # On a GPU for their type, elsewhere for the lack of one.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with pytest.raises(Unavailable, match=f"torch's {backend} attention refuses torch.float64, head dim 16"):
        kernels.need(backend, *3 * [torch.zeros(1, 2, 8, 16, dtype=torch.float64, device=device)])


@pytest.fixture
def on_cpu(monkeypatch):
    """The kernels of a GPU, computed here."""

    def attend(backend, q, k, v, with_lse=False):
        everything = torch.ones(1, 1, dtype=torch.bool)
        lse = torch.logsumexp(q.double() @ k.double().mT * q.shape[-1] ** -0.5, -1, keepdim=True)
        return reference.attention(q, k, v, everything).to(q.dtype), lse.float()

    for module in (_forms, sdpa_windows, sdpa_kept):
        monkeypatch.setattr(module, "need_gpu", lambda device: None)
    monkeypatch.setattr(kernels, "need", lambda *_: None)
    monkeypatch.setattr(kernels, "attend", attend)


def only_ok(name, pattern, **options):
    """The row of tokens in the order of `pattern`; if that is not the natural one, one with permutation follows it, but
    for baselines of a part of the pattern, which has no order of its own."""
    row, *permuted = run_baselines([name], Tokens(pattern, **options), QUICK, max_dense_tokens=100)
    if "no C++ compiler" in row["reason"]:
        pytest.skip(row["reason"])
    assert row["status"] == "ok", row["reason"]
    permutes = not natural(pattern) and name != "sdpa_compacted"
    assert [(other["status"], other["ordered"]) for other in permuted] == [("ok", False)] * permutes
    return row


def natural(pattern):
    return pattern.row_order is None


@pytest.mark.parametrize("order", [lambda pattern: pattern, shuffled], ids=["natural", "shuffled"])
@pytest.mark.parametrize("batch", [1, 2], ids=lambda batch: f"B{batch}")
def test_windows_are_a_batch(on_cpu, order, batch):
    row = only_ok("sdpa_windows", order(windows()), batch=batch)
    assert row["executed_gflops"] == pytest.approx(row["useful_gflops"])


@pytest.mark.parametrize("order", ["natural", "shuffled", "kept first"])
def test_own_keys_are_merged(on_cpu, order):
    pattern, common = keeping()
    if order != "natural":
        same = np.random.default_rng(1).permutation(40)
        same = same if order == "shuffled" else np.concatenate((common, np.setdiff1d(np.arange(40), common)))
        pattern = pattern.reordered(same, same)
    only_ok("sdpa_kept", pattern, batch=2)


def test_kept_tokens_that_stand_first_are_not_copied(on_cpu, monkeypatch):
    pattern, common = keeping()
    first = np.concatenate((common, np.setdiff1d(np.arange(40), common)))
    ready = sdpa_kept.prepare(pattern.reordered(first, first), variant="flash", **ON_GPU | {"device": "cpu"})
    attend, seen = kernels.attend, []
    monkeypatch.setattr(kernels, "attend", lambda *a, **options: seen.extend(a[2:]) or attend(*a, **options))
    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind()
    ready.call(q, k, v)
    assert [x.data_ptr() for x in seen] == [k.data_ptr(), v.data_ptr()] and seen[0].shape[2] == 11
    assert ready.held_bytes == 0


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
    monkeypatch.setattr(kernels, "attend", lambda backend, q, k, v: (v.mean(2, keepdim=True).expand_as(q), None))
    (row,) = run_baselines(["sdpa_compacted"], Tokens(keeping()[0]), QUICK, max_dense_tokens=100)
    assert row["status"] == "failed" and row["p50_us"] == ""


def test_dense_kernels_attend_to_everything(on_cpu):
    assert only_ok("sdpa_flash", windows())["executed_gflops"] > 0


def wide():
    """A pattern with full blocks, stray pairs, and a row that sees all keys but one."""
    dense = plans.pattern(300, 200, density=0.01)
    dense[:128, :128] = True
    dense[200, :199] = True
    return graph.from_pattern(dense, meta=META)


def check_form_of_flex(monkeypatch, variant):
    monkeypatch.setattr(flex_member, "VARIANTS", (variant,))
    row = only_ok("flex", wide())
    assert row["variant"] == variant and row["memory_bytes"] > 0 and row["ordered"] is True


def test_flex_passes_its_check(monkeypatch):
    check_form_of_flex(monkeypatch, "64-split")


@pytest.fixture
def uncompiled(monkeypatch):
    """FlexAttention as it is written down in torch."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(flex, "need_compiler", lambda device: None)


def test_other_forms_of_flex_pass_their_check(monkeypatch, uncompiled):
    check_form_of_flex(monkeypatch, "16")


def test_the_fastest_form_of_flex_is_the_peer(uncompiled, monkeypatch):
    times = {"128": 5.0, "64-split": 2.0, "32-split": 1.0, "16": 3.0}
    monkeypatch.setattr(flex_member, "VARIANTS", tuple(times))
    measured = rows.settled

    def settled(*arguments):
        row = measured(*arguments)
        # The fastest one is wrong.
        if row["variant"] == "32-split":
            return row | {"status": "failed", "p50_us": ""}
        return row | {"p50_us": times[row["variant"]]}

    monkeypatch.setattr(rows, "settled", settled)
    assert only_ok("flex", wide())["variant"] == "64-split"


def test_a_peer_in_plan_order_has_a_row_with_the_permutation(uncompiled, monkeypatch):
    monkeypatch.setattr(flex_member, "VARIANTS", ("16",))
    pattern = shuffled(wide())
    permuted = []
    permuting = rows._permuting
    monkeypatch.setattr(rows, "_permuting", lambda *a: permuted.append(1) or permuting(*a))
    found = run_baselines(["flex", "sdpa_dense"], Tokens(pattern), QUICK, max_dense_tokens=1000)
    told = [(row["provider"], row["ordered"], row["variant"], row["status"]) for row in found]
    flexed = [("flex", True, "16", "ok"), ("flex", False, "16", "ok")]
    assert told == [*flexed, ("sdpa_dense", True, "torch", "ok")] and permuted == [1]
    # A wrong permutation is seen.
    monkeypatch.setattr(rows, "_permuting", lambda call, *_: call)
    found = run_baselines(["flex"], Tokens(pattern), QUICK, max_dense_tokens=1000)
    assert [row["status"] for row in found] == ["ok", "failed"]


def test_flex_with_a_rule_passes_its_check(monkeypatch):
    monkeypatch.setattr(flex_member, "VARIANTS", ("64-split",))
    only_ok("flex", RULED["exact"](), heads=1, head_dim=16)


def test_without_the_wide_rows_fewer_blocks_are_visited(uncompiled):
    pattern = graph.from_pattern(np.kron(np.eye(4), np.ones((128, 128))).astype(bool) | (np.arange(512) == 0)[:, None])
    whole, split = (flex.prepare(pattern, max_bytes=1 << 20, variant=variant) for variant in ("128", "128-split"))
    assert (whole.executed, split.executed) == ((4 + 3) * 128 * 128, 4 * 128 * 128 + 512)


def test_full_blocks_are_told_from_those_filled_partly(monkeypatch, uncompiled):
    """FlexAttention does not ask for the pairs of a full block."""
    monkeypatch.setattr(flex, "flex_attention", lambda *tokens, block_mask, **_: block_mask)
    dense = np.zeros((128, 64), bool)
    dense[:64] = dense[64, 0] = True
    ready = flex.prepare(graph.from_pattern(dense), max_bytes=1 << 20, variant="64")
    mask = ready.call(*3 * [torch.zeros(1)])
    assert (mask.full_kv_num_blocks.tolist(), mask.kv_num_blocks.tolist()) == ([[[1, 0]]], [[[0, 1]]])


def test_what_a_device_has_no_use_for_is_unavailable(uncompiled):
    with pytest.raises(Unavailable, match="tunes FlexAttention on a GPU only, found cpu"):
        flex.prepare(wide(), max_bytes=1 << 20, variant="64-tuned")
    with pytest.raises(Unavailable, match="blocks of 32 rows are for a CPU"):
        flex.prepare(wide(), variant="32-split", **ON_GPU)


@pytest.mark.parametrize("variant", flex.VARIANTS)
def test_tuned_forms_ask_torch_to_tune(monkeypatch, variant):
    """And no other does; tiles are no larger than blocks."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    listed = patterns.listed
    monkeypatch.setattr(patterns, "listed", lambda kind, device: listed(kind, "cpu"))
    monkeypatch.setattr(flex, "pairs", lambda *_: (lambda b, h, q, kv: q >= 0, 0))
    monkeypatch.setattr(flex, "SMALLEST_ON_GPU", 16)
    monkeypatch.setattr(wide_rows, "attending", lambda *_: None)
    flex.prepare(wide(), variant=variant, **ON_GPU)
    mode = "max-autotune-no-cudagraphs" if variant.endswith("-tuned") else None
    assert asked == [{"dynamic": False, "fullgraph": True, "mode": mode}]


def test_the_form_that_takes_least_time_is_chosen(monkeypatch):
    times = {"128": 3, "64": 2, "32": 1}

    def prepare(variant):
        if variant == "16":
            raise Unavailable("no such form")

        def call(*_):
            if variant == "32":
                raise RuntimeError("out of resources")
            return variant

        return sparse_baselines.Ready(call, 0, 0)

    def time_together(calls, **_):
        return [SimpleNamespace(p50_us=times[call()]) for call in calls]

    monkeypatch.setattr(timing, "time_together", time_together)
    tokens = 3 * [torch.zeros(1)]
    assert flex.fastest(prepare, ["128", "64", "32", "16"], *tokens) == "64"
    with pytest.raises(Unavailable, match="no such form"):
        flex.fastest(prepare, ["16"], *tokens)
    with pytest.raises(RuntimeError, match="out of resources"):
        flex.fastest(prepare, ["32"], *tokens)


# Members that need a package which is not installed here, and never was: what they hand to it is enough to compute the
# pattern by. The stand-ins have the packages' interfaces and nothing else of them.


def stand_in(monkeypatch, member, **modules):
    """Put `modules`, ``{path: {name: value}}`` with ``__`` for dots, in the place of packages; no GPU is needed."""
    monkeypatch.setattr(member, "need_gpu", lambda device: None)
    for path, names in modules.items():
        monkeypatch.setitem(sys.modules, path.replace("__", "."), SimpleNamespace(**names))


def spelt_out(q, k, v, seen):
    """Attention of tokens [B, N, H, D] where `seen` [N_q, N_k] allows it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return reference.attention(q, k, v, seen).to(q.dtype).transpose(1, 2)


def sixteen_bit(name, pattern, **options):
    assert only_ok(name, pattern, dtype="float16", **options)["dtype"] == "float16"


def blocks_of(count, number, size, shape):
    """bool [N_q, N_k]: the pairs of the first `count` of the numbers of each row of blocks of one head."""
    held = torch.zeros(len(count), -(-shape[1] // size[1]), dtype=torch.bool)
    for row, some, listed in zip(held, count, number, strict=True):
        row[listed[:some].long()] = True
    return held.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)[: shape[0], : shape[1]]


def flash_attention_4(monkeypatch, sizes):
    """Stand in for it. sizes: the sizes of blocks that it was asked for are added."""

    def attend(q, k, v, *, block_sparse_tensors, mask_mod=None, aux_tensors=None):
        shape, heads = (q.shape[1], k.shape[1]), q.shape[2]
        pairs = torch.tensor(False)
        if mask_mod == "mask_mod":
            row_id, words = aux_tensors
            assert row_id.dtype == words.dtype == torch.int32
            keys = torch.arange(shape[1])
            pairs = (words[row_id[: shape[0]].long()][:, keys // 32] >> (keys % 32) & 1).bool()
        out = torch.empty(q.shape, dtype=q.dtype)
        counted, size = block_sparse_tensors
        for head in range(heads):
            partial, full = (
                blocks_of(*(table.expand(1, heads, *table.shape[2:])[0, head] for table in kind), size, shape)
                for kind in (counted[:2], counted[2:])
            )
            out[:, :, head] = spelt_out(*(x[:, :, [head]] for x in (q, k, v)), full | (partial & pairs))[:, :, 0]
        return out, None, None, None, None

    def sparse(*lists, block_size):
        assert all(table.dtype == torch.int32 and table.ndim == 3 + at % 2 for at, table in enumerate(lists))
        sizes.append(block_size)
        return lists, block_size

    package = {"block_sparsity": SimpleNamespace(BlockSparseTensorsTorch=sparse)}
    stand_in(monkeypatch, fa4, flash_attn__cute=package | {"interface": SimpleNamespace(_flash_attn_fwd=attend)})
    monkeypatch.setattr(fa4, "_mask_mod", lambda: "mask_mod")


@pytest.mark.parametrize("variant", fa4.VARIANTS)
def test_flash_attention_4_gets_the_pattern(monkeypatch, variant):
    flash_attention_4(monkeypatch, sizes := [])
    monkeypatch.setattr(fa4, "VARIANTS", (variant,))
    sixteen_bit("fa4", wide(), batch=2)
    assert sizes == [tuple(map(int, variant.removesuffix("-split").split("x")))]


def test_cudnn_gets_the_pattern(monkeypatch):
    class Forward:
        workspace_size = 8

        def __init__(self, q, k, v, out, plan):
            assert q.shape == out.shape and not q.is_contiguous()

        def check_support(self):
            pass

        def compile(self):
            pass

        def execute(self, q, k, v, out, plan, workspace):
            assert workspace.dtype == torch.uint8 and workspace.numel() == self.workspace_size
            batch, n = q.shape[:2]
            assert plan.dtype == torch.int32 and plan.shape[::2] == (1, batch * n)
            ends, keys = plan[0].unflatten(1, (batch, n)), torch.arange(k.shape[1])
            assert (ends == ends[:, :1]).all()
            first, *others = ends[:, 0, :, None]
            seen = keys < first
            for low, high in zip(others[::2], others[1::2], strict=True):
                seen |= (keys >= low) & (keys < high)
            out.copy_(spelt_out(q, k, v, seen))

    def create_mask_plan(per_query, q, k, v, *, build_backward):
        assert not build_backward
        return per_query

    stand_in(monkeypatch, cudnn_flex, cudnn={"FlexAttentionFwd": Forward, "create_mask_plan": create_mask_plan})
    for variant in cudnn_flex.VARIANTS:
        monkeypatch.setattr(cudnn_flex, "VARIANTS", (variant,))
        sixteen_bit("cudnn_flex", wide(), batch=2)


def test_flashinfer_gets_the_pattern(monkeypatch):
    class Wrapper:
        def __init__(self, workspace, *, backend):
            assert workspace.dtype == torch.uint8 and backend == "fa2"

        def plan(self, indptr, keys, n_q, n_k, rows, columns, q_heads, kv_heads, head_dim, *, mask, **dtypes):
            assert (columns, q_heads, kv_heads, head_dim) == (1, 2, 2, 64) and set(dtypes.values()) == {torch.float16}
            assert indptr.dtype == keys.dtype == torch.int32 and mask.dtype == torch.bool
            self.seen = torch.zeros(len(indptr) * rows, n_k, dtype=torch.bool)
            for group, (low, high) in enumerate(itertools.pairwise(indptr.tolist())):
                self.seen[rows * group : rows * group + rows, keys[low:high].long()] = mask[low:high, :, 0].mT
            # The last group has fewer rows.
            self.seen = self.seen[:n_q]

        def run(self, q, k, v, *, out):
            # Written without a look at its strides.
            assert out.is_contiguous()
            out.copy_(spelt_out(q[None], k[None], v[None], self.seen)[0])
            return out

    stand_in(monkeypatch, flashinfer, flashinfer={"BlockSparseAttentionWrapper": Wrapper})
    for variant in flashinfer.VARIANTS:
        monkeypatch.setattr(flashinfer, "VARIANTS", (variant,))
        sixteen_bit("flashinfer", wide(), head_dim=64)
    with pytest.raises(Unavailable, match="head dims 64, 128, 256, found"):
        flashinfer.prepare(wide(), variant="64x1", **ON_GPU)


# Lists of whole blocks.


def block_lists(tokens=300, heads=2, size=64, seed=0):
    """q, k, v [1, H, N, 64], flags of blocks, each row of which has some, and the bool pairs [H, N, N] of these."""
    q, k, v = torch.randn(3, 1, heads, tokens, 64, generator=torch.Generator().manual_seed(seed))
    count = -(-tokens // size)
    flags = torch.rand(1, heads, count, count, generator=torch.Generator().manual_seed(seed)) < 0.5
    flags |= torch.eye(count, dtype=torch.bool)
    pairs = flags[0].repeat_interleave(size, 1).repeat_interleave(size, 2)[:, :tokens, :tokens]
    return (q, k, v), flags, pairs


def assert_attends_by_blocks(module, size=64):
    tokens, flags, pairs = block_lists(size=size)
    setting = {"block": (size, size), "head_dim": 64, "dtype": torch.float16, "device": "cuda"}
    found = module.blocks(flags, (300, 300), **setting)(*tokens)
    heads = [reference.attention(*(x[:, [h]] for x in tokens), pairs[h]) for h in range(2)]
    assert torch.allclose(found.double(), torch.cat(heads, 1).double(), atol=1e-5)


def test_dense_kernels_get_all_pairs(monkeypatch):
    def attend(q, k, v):
        return spelt_out(q, k, v, torch.ones(1, 1, dtype=torch.bool)), None

    interface = SimpleNamespace(_flash_attn_fwd=attend)
    stand_in(monkeypatch, fa4, flash_attn__cute={"block_sparsity": None, "interface": interface})
    stand_in(monkeypatch, flash3_dense, flash_attn_interface={"flash_attn_func": attend})
    for name in ("fa4_dense", "flash3_dense"):
        sixteen_bit(name, windows(), batch=2)
    with pytest.raises(Unavailable, match=r"takes 16-bit types, found torch.float32"):
        flash3_dense.prepare(wide(), variant="hopper", **ON_GPU | {"dtype": torch.float32})


def test_cudnn_attends_by_blocks(monkeypatch):
    def attend(q, k, v, numbers, *, q2k_block_nums, block_sizes, sparse_block_size):
        assert q.shape[2] % 64 == 0 and block_sizes.tolist() == [64] * 4 + [300 - 4 * 64] and sparse_block_size == 64
        heads = [
            spelt_out(
                *(x.transpose(1, 2)[:, :, [h]] for x in (q, k, v)),
                blocks_of(q2k_block_nums[0, h], numbers[0, h], (64, 64), (q.shape[2], k.shape[2])),
            )
            for h in range(q.shape[1])
        ]
        return {"o_tensor": torch.cat(heads, 2).transpose(1, 2)}

    stand_in(monkeypatch, cudnn_blocks, cudnn={"BSA": SimpleNamespace(block_sparse_attention_forward=attend)})
    assert_attends_by_blocks(cudnn_blocks)
    with pytest.raises(Unavailable, match="takes no pattern of single pairs"):
        cudnn_blocks.prepare(wide(), variant="64x64", **ON_GPU | {"head_dim": 64})
    with pytest.raises(Unavailable, match=r"head dims 64, 96, 128, found torch.float16 and 16"):
        cudnn_blocks.prepare(wide(), variant="64x64", **ON_GPU)


def test_flash_attention_4_attends_by_blocks(monkeypatch):
    flash_attention_4(monkeypatch, sizes := [])
    assert_attends_by_blocks(fa4)
    assert sizes == [(64, 64)]


def test_flashinfer_attends_by_blocks(monkeypatch):
    class Wrapper:
        def __init__(self, workspace, *, backend):
            assert workspace.dtype == torch.uint8 and backend == "auto"

        def plan(self, flags, rows, columns, q_heads, kv_heads, head_dim, **dtypes):
            assert (q_heads, kv_heads, head_dim) == (2, 2, 64) and set(dtypes.values()) == {torch.float16}
            assert flags.shape == (2, rows.shape[1], columns.shape[1]) and rows.dtype == columns.dtype == torch.int32
            self.seen = torch.stack([
                f.repeat_interleave(r, 0).repeat_interleave(c, 1) for f, r, c in zip(flags, rows, columns, strict=True)
            ])  # fmt: skip

        def run(self, q, k, v):
            each = zip(q, k, v, self.seen, strict=True)
            return torch.stack([reference.attention(*(x[None, None] for x in qkv), seen)[0, 0] for *qkv, seen in each])

    stand_in(monkeypatch, flashinfer, flashinfer={"VariableBlockSparseAttentionWrapper": Wrapper})
    assert_attends_by_blocks(flashinfer)


def shifted_windows(side, kernel, n_global):
    """NATTEN's windows on a grid, which keep their size at its borders, and global tokens before them."""
    first = np.clip(np.arange(side) - kernel // 2, 0, side - kernel)
    sees = (np.arange(side) >= first[:, None]) & (np.arange(side) < first[:, None] + kernel)
    dense = np.pad(np.kron(sees, sees), ((n_global, 0), (n_global, 0)), constant_values=True)
    told = {"family": "vision_longformer", "mode": "exact", "grid": [side, side], "window": kernel - 1}
    return graph.from_pattern(dense, meta=META | told | {"n_global": n_global})


@pytest.mark.parametrize("n_global", [0, 1, 2])
def test_natten_gets_grids_and_global_keys(monkeypatch, n_global):
    def na2d(q, k, v, *, kernel_size, additional_keys=None, additional_values=None):
        assert q.shape[1:3] == (7, 7) and kernel_size == (5, 5)
        q, k, v = (x.flatten(1, 2) for x in (q, k, v))
        if additional_keys is not None:
            k, v = torch.cat((additional_keys, k), 1), torch.cat((additional_values, v), 1)
        seen = torch.from_numpy(shifted_windows(7, 5, n_global).to_dense())[n_global:]
        return spelt_out(q, k, v, seen).unflatten(1, (7, 7))

    stand_in(monkeypatch, natten, natten={"na2d": na2d})
    sixteen_bit("natten", shifted_windows(7, 5, n_global), batch=2)


@pytest.mark.parametrize("rest", ["20-w5-s2-causal", "8x9-w3x4-d2", "4x5x6-w2x3x5-s1x2x3-causal0"])
def test_natten_gets_windows_of_the_family_of_its_name(monkeypatch, rest):
    stand_in(monkeypatch, natten, natten={name: getattr(drop_in, name) for name in ("na1d", "na2d", "na3d")})
    sixteen_bit("natten", masks.build(f"neighborhood-{rest}", {"heads": 2, "head_dim": 16}), batch=2)


def test_natten_refuses_other_patterns(monkeypatch):
    stand_in(monkeypatch, natten, natten={"na2d": None})
    exact = RULED["exact"]()
    with pytest.raises(Unavailable, match=r"another pattern: .* of \d+% of the queries are cut off"):
        natten.prepare(exact, **ON_GPU)
    shifted, turned = shifted_windows(7, 5, 1), np.arange(50)[::-1].copy()
    with pytest.raises(Unavailable, match="row by row, in their natural order"):
        natten.prepare(shifted.reordered(turned, turned), **ON_GPU)
    with pytest.raises(Unavailable, match="not one of windows around each token of a grid"):
        natten.prepare(windows(), **ON_GPU)
    with pytest.raises(Unavailable, match=r"another pattern: .* of 100% of the queries are cut off"):
        natten.prepare(masks.build("neighborhood-8x8-w3-cut"), **ON_GPU)
    with pytest.raises(Unavailable, match="takes windows of 2 tokens or more"):
        natten.prepare(masks.build("neighborhood-8x8-w1x3"), **ON_GPU)
    # That it is not installed is no reason where it computes something else.
    monkeypatch.setitem(sys.modules, "natten", None)
    for pattern, reason in ((shifted, "cannot be imported"), (exact, "another pattern")):
        with pytest.raises(Unavailable, match=reason):
            natten.prepare(pattern, **ON_GPU)


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
    from torch._inductor import config, cpp_builder

    monkeypatch.setenv("PATH", str(tmp_path))
    cpp_builder.cpp_compiler_search.cache_clear()
    # CXX may hold the whole path of one; torch read it when it was imported.
    with config.patch({"cpp.cxx": (None, "g++")}):
        yield
    cpp_builder.cpp_compiler_search.cache_clear()


def test_without_a_compiler_flex_is_skipped(no_compiler):
    (row,) = run_baselines(["flex"], Tokens(windows()), QUICK, max_dense_tokens=1000)
    assert row["status"] == "skipped" and "no C++ compiler" in row["reason"]
