import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from helpers import plans
from helpers.gpu import TRITON_DEVICE
from tilewright import blocks, graph, profile, reference, schedule, targets
from tilewright.baselines import sparse as sparse_baselines
from tilewright.baselines.sparse import sdpa_dense
from tilewright.blocks import work
from tilewright.core.errors import ArtifactError, TilewrightError, UnknownNameError
from tilewright.core.timing import Timing
from tilewright.study.bench import COLUMNS, Effort, ceilings, rows, run_baselines, run_schedule, sweeps
from tilewright.study.bench.rows import Tokens
from tilewright.targets.cpu import executor as cpu_executor
from tilewright.targets.cuda import executor as cuda_executor

SCRIPT = Path(__file__).parents[2] / "workflow/scripts/run_bench.py"
QUICK = Effort(rse=1.0, min_repetitions=3, max_seconds=0.01)
META = {"model": "toy", "family": "toys", "resolution": 8, "heads": 2, "head_dim": 16}


@pytest.fixture(scope="module")
def ordered():
    return plans.reordered(plans.pattern(140, 90), **META)


@pytest.fixture(scope="module")
def tokens(ordered):
    return Tokens(ordered, batch=2)


@pytest.fixture(scope="module")
def cover(ordered):
    return plans.covers(ordered, ["16x1", "8x8"])


def test_a_schedule_gives_a_row_for_tokens_in_order_and_one_for_others(cover, tokens):
    plan = plans.scheduled(cover, split_keys=32)
    found = run_schedule(plan, cover, tokens, QUICK, tiles="mixed")
    assert [row["ordered"] for row in found] == [True, False]
    for row in found:
        assert list(row) == list(COLUMNS)
        assert (row["status"], row["provider"], row["tiles"], row["solver"]) == ("ok", "tilewright", "mixed", "greedy")
        assert (
            row["relative_error"] < row["tolerance"]
            and row["checked_rows"] == 140
            and 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        )
        assert (row["tokens"], row["entries"], row["batch"]) == (140, tokens.graph.entries, 2)
        assert row["items"] == len(plan.tile) and row["launches"] <= row["items"]
        assert row["useful_gflops"] == pytest.approx(4 * 16 * 2 * 2 * row["entries"] / row["p50_us"] / 1e3)
        assert row["executed_gflops"] > row["useful_gflops"]
        assert row["tokens_per_s"] == pytest.approx(280 / row["p50_us"] * 1e6)
        assert row["memory_bytes"] > 0


def test_executors_count_the_pairs_that_they_work_through(cover, tokens):
    options = {"heads": 2, "head_dim": 16, "dtype": torch.float32}
    plan = plans.scheduled(cover, split_keys=32)
    area = 0
    for t, blocks_of_tile in enumerate(cover.values()):
        items, cls = work.items(blocks_of_tile, plan.split_keys), plan.cls[plan.tile == t]
        area += int((items.class_rows[cls] * items.class_runs[cls]).sum()) * blocks_of_tile.tile.run
    assert cpu_executor.prepare(plan, cover, **options).executed == area
    slices = {"16x1": cover["16x1"]}
    plan = plans.scheduled(slices)
    steps = -(-(plan.run_hi - plan.run_lo) * cover["16x1"].tile.run // 64)
    assert cuda_executor.prepare(plan, slices, **options, device=TRITON_DEVICE).executed == 16 * 64 * steps.sum()


def test_a_wrong_result_is_never_timed(monkeypatch, cover, tokens):
    right = cpu_executor.Executor.__call__
    monkeypatch.setattr(cpu_executor.Executor, "__call__", lambda self, *qkv: right(self, *qkv) + 1e-3)
    for row in run_schedule(plans.scheduled(cover), cover, tokens, QUICK):
        assert row["status"] == "failed" and "against the reference" in row["reason"]
        assert row["p50_us"] == row["useful_gflops"] == ""


def test_nan_does_not_pass(monkeypatch, cover, tokens):
    right = cpu_executor.Executor.__call__
    monkeypatch.setattr(cpu_executor.Executor, "__call__", lambda self, *qkv: right(self, *qkv) * torch.nan)
    assert {row["status"] for row in run_schedule(plans.scheduled(cover), cover, tokens, QUICK)} == {"failed"}


def test_a_graph_of_another_schedule_is_refused(cover):
    other = Tokens(plans.reordered(plans.pattern(140, 90, seed=3), **META))
    with pytest.raises(ArtifactError, match="of the schedule, found"):
        run_schedule(plans.scheduled(cover), cover, other, QUICK)


def test_tokens_need_heads_and_a_known_dtype(ordered):
    with pytest.raises(ArtifactError, match="heads and head_dim"):
        Tokens(graph.from_pattern(np.eye(3, dtype=bool)))
    with pytest.raises(UnknownNameError, match="int8"):
        Tokens(ordered, dtype="int8")


def test_a_large_graph_is_checked_by_sample(monkeypatch, cover, ordered):
    monkeypatch.setattr(reference, "ALL_ROWS", 20)
    sampled = Tokens(ordered)
    assert 20 <= len(sampled.rows) <= 26
    for row in run_schedule(plans.scheduled(cover), cover, sampled, QUICK):
        assert (row["status"], row["checked_rows"]) == ("ok", len(sampled.rows))


def test_a_row_that_is_not_written_does_not_show_an_earlier_result(tokens):
    right = sdpa_dense.prepare(tokens.graph).call

    def lazy(q, k, v):
        out = torch.empty_like(q)
        out[:, :, 1:] = right(q, k, v)[:, :, 1:]
        return out

    row = tokens.checked(lazy, tokens.dense_result, tokens.ordered, tokens.rows, 1, QUICK)
    assert row["status"] == "failed"


def test_dense_baselines_pass_their_own_checks(tokens):
    dense, masked = run_baselines(["sdpa_dense", "sdpa_mask"], tokens, QUICK, max_dense_tokens=1000)
    assert [(row["provider"], row["status"]) for row in (dense, masked)] == [("sdpa_dense", "ok"), ("sdpa_mask", "ok")]
    assert masked["memory_bytes"] == 140 * 90 * 4 and dense["executed_gflops"] > dense["useful_gflops"]


def test_an_unknown_baseline_is_refused(tokens):
    with pytest.raises(UnknownNameError, match="sdpa_dense, sdpa_mask, flex"):
        run_baselines(["xformers"], tokens, QUICK, max_dense_tokens=90)


def test_of_the_variants_the_fastest_that_is_right_is_reported(monkeypatch, tokens):
    def prepare(graph, *, variant, **_):
        if variant == "absent":
            raise sparse_baselines.Unavailable("not here")
        return sparse_baselines.Ready(calls[variant], 0, 1)

    right = sdpa_dense.prepare(tokens.graph).call
    calls = {
        "slow": lambda *qkv: sum(right(*qkv) / 50 for _ in range(50)),
        "fast": right,
        "wrong": lambda *qkv: qkv[0],
        "broken": lambda *qkv: torch.zeros(1).view(2),
    }
    monkeypatch.setattr(sdpa_dense, "prepare", prepare)
    for variants, status, variant, reason in (
        (("absent", "broken", "wrong", "slow", "fast"), "ok", "fast", ""),
        (("absent", "wrong"), "failed", "wrong", "against the reference"),
        (("broken",), "failed", "broken", "RuntimeError: shape '\\[2\\]' is invalid"),
        (("absent",), "skipped", "absent", "not here"),
    ):
        monkeypatch.setattr(sdpa_dense, "VARIANTS", variants)
        (row,) = run_baselines(["sdpa_dense"], tokens, QUICK, max_dense_tokens=90)
        assert (row["status"], row["variant"]) == (status, variant)
        assert re.search(reason, row["reason"])


GPU = {
    "kind": "cuda", "name": "Imaginary GPU", "threads": 100, "multiprocessors": 100, "capability": "9.0",
    "clock_mhz": 1000.0, "l2_bytes": 1, "driver": "1.2", "versions": {"torch": "2", "triton": "3", "numpy": "4"},
}  # fmt: skip


@pytest.fixture
def gpu_tokens(monkeypatch, ordered):
    """Tokens that take this processor for a GPU of 1 GB/s, on which a call takes 8 us."""
    found = Tokens(ordered, dtype="bfloat16")
    found.device = GPU
    timing = Timing(7.0, 8.0, 9.0, 3, 0.0, "graph")
    monkeypatch.setattr(rows, "time_gpu", lambda call, **_: timing)
    monkeypatch.setattr(rows, "time_cold", lambda call, l2_bytes, **_: 10.0)
    monkeypatch.setattr(rows, "time_host", lambda call, **_: (20.0, 4.0))
    monkeypatch.setattr(rows, "copy_bandwidth", lambda: 1e9)
    return found


def test_on_a_gpu_times_stand_beside_floor_and_ceiling(gpu_tokens):
    row = gpu_tokens.checked(
        sdpa_dense.prepare(gpu_tokens.graph).call,
        gpu_tokens.dense_result,
        gpu_tokens.ordered,
        gpu_tokens.rows,
        140 * 90,
        QUICK,
    )
    assert list(row) == list(COLUMNS) and row["status"] == "ok"
    assert [row[name] for name in ("p50_us", "timing", "cold_us", "latency_us", "host_us")] == [8, "graph", 10, 20, 4]
    assert [row[name] for name in ("driver", "triton", "cores")] == ["1.2", "3", 100]
    assert row["byte_floor_us"] == pytest.approx(2 * (140 + 90) * 2 * 16 * 2 / 1e3)
    assert row["floor_fraction"] == pytest.approx(row["byte_floor_us"] / 8)
    # 64 FLOP in the clocks of an exponential and 5.5 other instructions, on 100 multiprocessors at 1 GHz.
    ceiling_gflops = 64 / (1 / 16 + 5.5 / 128) * 100
    assert row["ceiling_fraction"] == pytest.approx(4 * 16 * 2 * 140 * 90 / 8 / 1e3 / ceiling_gflops)


@pytest.mark.parametrize(("head_dim", "tflops"), [(32, 281), (48, 422), (64, 562), (128, 949)])
def test_the_ceiling_is_that_of_perfect_overlap(head_dim, tflops):
    device = {"capability": "9.0", "multiprocessors": 132, "clock_mhz": 1755.0}
    assert ceilings.softmax_bound_gflops(device, head_dim, torch.bfloat16) / 1e3 == pytest.approx(tflops, rel=2e-3)


def test_without_known_rates_there_is_no_ceiling():
    assert ceilings.softmax_bound_gflops({"capability": "7.0"}, 64, torch.bfloat16) is None
    assert ceilings.softmax_bound_gflops(GPU, 64, torch.float32) is None


def test_keys_that_no_query_sees_need_not_be_moved():
    pattern = graph.from_pattern(np.eye(3, 5, dtype=bool))
    assert ceilings.floor_bytes(pattern, batch=2, heads=3, head_dim=8, itemsize=2) == (3 + 3 + 3 + 3) * 2 * 3 * 8 * 2


def test_heat_map_runs_what_fits_and_says_why_not():
    options = {"max_tokens": 100, "order": "window", "names": ["16x1", "8x1"], "solver": "greedy", "region_rows": 32}
    cells = sweeps.run_heatmap(64, [8, 4, 64, 128], QUICK, **options)
    assert [list(cell) for cell in cells] == [list(sweeps.HEATMAP)] * 4
    assert [cell["status"] for cell in cells] == ["ok", "skipped", "ok", "skipped"]
    assert cells[0]["speedup"] == pytest.approx(cells[0]["dense_p50_us"] / cells[0]["plan_p50_us"])
    assert cells[0]["tokens"] == 65 and cells[0]["max_abs_error"] < 2e-5
    assert cells[1]["reason"] == "too many tokens: 257 over 100"
    # Two tokens, which none of the tiles fits.
    assert cells[2]["tokens"] == 2 and cells[2]["plan_p50_us"] > 0
    assert "patch: expected at most the resolution" in cells[3]["reason"]


def test_heat_map_is_over_the_fastest_dense_attention(monkeypatch):
    rows = [("sdpa_dense", "ok", 9.0), ("sdpa_flash", "ok", 4.0), ("sdpa_cudnn", "skipped", "")]
    found = [{"provider": name, "status": status, "p50_us": us, "reason": ""} for name, status, us in rows]
    monkeypatch.setattr(sweeps, "run_baselines", lambda *_, **__: found)
    options = {"max_tokens": 100, "order": "window", "names": ["16x1"], "solver": "greedy", "region_rows": 32}
    (cell,) = sweeps.run_heatmap(64, [8], QUICK, **options)
    assert (cell["dense"], cell["dense_p50_us"]) == ("sdpa_flash", 4.0)
    assert cell["speedup"] == 4 / cell["plan_p50_us"]


def test_orders_are_timed():
    found = sweeps.run_reorder_times(["vil-tiny-64-s1"], ["none", "window"])
    assert [list(row) for row in found] == [list(sweeps.REORDER_TIMES)] * 2
    for row in found:
        assert row["tokens"] == 257 and row["seconds"] >= 0 and 0 < row["work_fraction"] <= 1.1


# The command line, by its files.


def bench(root, *arguments):
    """Run the script in this process, in the folder `root`."""
    spec = importlib.util.spec_from_file_location("run_bench", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    quick = ["--max-seconds", "0.01", "--min-repetitions", "3"]
    with contextlib.chdir(root):
        module.run(**vars(module.parser.parse_args([*quick, *arguments])))


@pytest.fixture(scope="module")
def study(tmp_path_factory, ordered, cover):
    """Graph, blocks, profiles and schedules of the toy, as files; the paths are relative, as in a study."""
    root, names = tmp_path_factory.mktemp("study"), list(cover)
    graph.save(root / "graph.npz", ordered)
    for name in names:
        blocks.save(root / f"{name}.npz", cover[name], {"inputs": {"graph.npz": ""}})
    outputs = [f"{name}.json" for name in names]
    bench(root, "--profile_only", "--blocks", *(f"{name}.npz" for name in names), "--output", *outputs)
    profiles = {name: profile.load(root / f"{name}.json") for name in names}
    paths = {name: (f"{name}.npz", f"{name}.json") for name in names}
    limits = targets.limits(next(iter(profiles.values())).device)
    plan = schedule.solve(cover, profiles, limits, "greedy", paths=paths)
    schedule.save(root / "pair.greedy.json", plan)
    schedule.save(root / "other.json", replace(plan, device_id="other"))
    schedule.save(root / "homeless.json", replace(plan, blocks_paths=("", "")))
    return root


def test_a_schedule_file_is_run_with_the_files_that_it_records(study):
    bench(study, "--schedule", "pair.greedy.json", "--output", "out.csv")
    frame = pd.read_csv(study / "out.csv")
    assert tuple(frame.columns) == COLUMNS
    assert frame["status"].tolist() == ["ok", "ok"] and frame["tiles"].tolist() == ["pair", "pair"]
    assert frame["ordered"].tolist() == [True, False] and (frame["predicted_us"] > 0).all()


def test_files_that_are_given_replace_those_that_are_recorded(study):
    given = ["--blocks", "16x1.npz", "8x8.npz", "--graph", "graph.npz"]
    bench(study, "--schedule", "homeless.json", "--output", "given.csv", *given)
    assert pd.read_csv(study / "given.csv")["tiles"].tolist() == ["16x1+8x8"] * 2


def test_baselines_are_run_on_a_graph_file(study):
    bench(study, "--baselines", "sdpa_dense", "--graph", "graph.npz", "--output", "base.csv")
    assert pd.read_csv(study / "base.csv")["provider"].tolist() == ["sdpa_dense"]


def test_a_heat_map_and_order_times_are_written(study):
    bench(study, "--heatmap", "32", "--patches", "16", "--tiles", "4x1", "--solver", "greedy", "--output", "heat.csv")
    assert tuple(pd.read_csv(study / "heat.csv").columns) == sweeps.HEATMAP
    bench(study, "--reorder-times", "vil-tiny-64-s1", "--orders", "none", "--output", "orders.csv")
    assert tuple(pd.read_csv(study / "orders.csv").columns) == sweeps.REORDER_TIMES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--output x.csv", "expected exactly one of --profile_only, --schedule, .* found 0"),
        ("--profile_only --heatmap 224 --output x.csv", "expected exactly one of .* found 2"),
        ("--profile_only --output x.csv", "expected one output for each input, found 1 for 0"),
        ("--baselines flex --output x.csv", "expected the pattern as --graph"),
        ("--heatmap 224 --output x.csv", "expected --patches"),
        ("--schedule nothing.json --output x.csv", "nothing.json: no such file"),
        ("--schedule other.json --output x.csv", "made for another device"),
        ("--schedule homeless.json --output x.csv", "records no blocks of the tiles"),
        ("--baselines sdpa_dense --graph graph.npz --rse 0 --output x.csv", "expected an effort above zero"),
        ("--profile_only --blocks 16x1.npz --device cuda --output x.csv", "known: cpu"),
    ],
    ids=lambda value: value.partition(" --output")[0] if value.startswith("--") else "",
)
def test_wrong_arguments_are_refused_and_write_nothing(study, arguments, message):
    with pytest.raises(TilewrightError, match=message):
        bench(study, *arguments.split())
    assert not (study / "x.csv").exists()


def test_blocks_that_do_not_say_their_graph_need_it_given(study, cover):
    for name in cover:
        blocks.save(study / f"orphan-{name}.npz", cover[name])
    with pytest.raises(ArtifactError, match="does not say what graph it was made from"):
        given = map(str, study.glob("orphan-*.npz"))
        bench(study, "--schedule", "homeless.json", "--output", "x.csv", "--blocks", *given)


def test_the_script_ends_with_one_line(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2] / "src")}
    command = [sys.executable, str(SCRIPT), "--schedule", "nothing.json", "--output", "x.csv"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: nothing.json: no such file")
    assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())
