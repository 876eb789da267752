import contextlib
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from helpers import plans
from helpers.files import entered, run_script
from helpers.gpu import TRITON_DEVICE
from helpers.rows import run_baselines, run_schedule, whole
from tilewright import devices, graph, masks, reference
from tilewright.attention import blocks, profile, schedule
from tilewright.attention import plan as api
from tilewright.attention.blocks import work
from tilewright.attention.cpu import executor as cpu_executor
from tilewright.attention.cuda import executor as cuda_executor
from tilewright.core.errors import ArtifactError, TilewrightError, UnknownNameError
from tilewright.core.timing import TURNS, Timing
from tilewright.masks import dynamicvit
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.baselines.sparse import sdpa_dense
from tilewright_study.experiments import heatmap, orders
from tilewright_study.experiments.attention import Row
from tilewright_study.experiments.attention import run as _attention
from tilewright_study.experiments.attention.run import Tokens
from tilewright_study.measure import ceilings, effort
from tilewright_study.measure.effort import Effort

SCRIPTS = Path(__file__).parents[2] / "workflow/scripts"
QUICK = Effort(rse=1.0, min_repetitions=3, max_seconds=0.01)
HOW = effort.Run(rse=1.0, min_repetitions=3)
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
    found_schedule = plans.scheduled(cover, split_keys=32)
    found = run_schedule(found_schedule, cover, tokens, QUICK, tiles="mixed")
    assert [row["ordered"] for row in found] == [True, False]
    for row in found:
        assert tuple(row) == Row.columns()
        assert (row["status"], row["provider"], row["tiles"], row["solver"]) == ("ok", "tilewright", "mixed", "greedy")
        assert (
            row["relative_error"] < row["tolerance"]
            and row["checked_rows"] == 140
            and 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        )
        assert (row["tokens"], row["entries"], row["batch"]) == (140, tokens.graph.entries, 2)
        assert row["items"] == len(found_schedule.tile) and row["launches"] <= row["items"]
        assert row["useful_gflops"] == pytest.approx(4 * 16 * 2 * 2 * row["entries"] / row["p50_us"] / 1e3)
        assert row["executed_gflops"] > row["useful_gflops"]
        assert row["tokens_per_s"] == pytest.approx(280 / row["p50_us"] * 1e6)
        assert row["memory_bytes"] > 0


def test_executors_count_the_pairs_that_they_work_through(cover, tokens):
    options = {"heads": 2, "head_dim": 16, "dtype": torch.float32}
    plan = plans.scheduled(cover, split_keys=32)
    area = 0
    for t, blocks_of_tile in enumerate(cover.values()):
        items, shape = work.items(blocks_of_tile, plan.split_keys), plan.shape[plan.tile == t]
        area += int((items.shape_rows[shape] * items.shape_runs[shape]).sum()) * blocks_of_tile.tile.run
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
    assert dense["turns"] == masked["turns"] == TURNS
    assert masked["memory_bytes"] == 140 * 90 * 4 and dense["executed_gflops"] > dense["useful_gflops"]


def test_a_plan_takes_turns_with_its_peers(monkeypatch, cover, tokens):
    timed, in_turns = [], _attention.time_in_turns

    def noted(calls, **limits):
        timed.append(in_turns(calls, **limits))
        return timed[-1]

    monkeypatch.setattr(_attention, "time_in_turns", noted)
    plan = plans.scheduled(cover), cover, None, tokens
    rows = run_baselines(["sdpa_dense", "sdpa_mask"], tokens, QUICK, max_dense_tokens=1000, plan=plan)
    assert [row["provider"] for row in rows] == ["sdpa_dense", "sdpa_mask"]
    ((*peers, ours),) = timed
    assert [row["p50_us"] for row in rows] == [each.p50_us for each in peers]
    assert {(row["plan_us"], row["plan_rse"]) for row in rows} == {(ours.p50_us, ours.rse)}
    # Without a plan, and beside one that is wrong, rows say nothing of it.
    monkeypatch.setattr(_attention, "_run", lambda *_: _attention._Run(tokens.row(status="failed")))
    for beside in (None, plan):
        (row,) = run_baselines(["sdpa_mask"], tokens, QUICK, max_dense_tokens=1000, plan=beside)
        assert (row["status"], row["plan_us"]) == ("ok", "")


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
    # One form is timed with the others, and not before.
    monkeypatch.setattr(sdpa_dense, "VARIANTS", tuple(calls))
    monkeypatch.setattr(_attention, "time_call", None)
    (row,) = run_baselines(["sdpa_dense"], tokens, QUICK, max_dense_tokens=90, forms={"sdpa_dense": ["slow"]})
    assert (row["status"], row["variant"]) == ("ok", "slow")


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
    monkeypatch.setattr(_attention, "time_gpu", lambda call, **_: timing)
    monkeypatch.setattr(_attention, "time_cold", lambda call, l2_bytes, **_: 10.0)
    monkeypatch.setattr(_attention, "time_host", lambda call, **_: (20.0, 4.0))
    monkeypatch.setattr(_attention, "copy_bandwidth", lambda: 1e9)
    return found


def test_on_a_gpu_times_stand_beside_floor_and_ceiling(gpu_tokens):
    call = sdpa_dense.prepare(gpu_tokens.graph).call
    found = gpu_tokens.checked(call, gpu_tokens.dense_result, gpu_tokens.ordered, gpu_tokens.rows, 140 * 90, QUICK)
    (row,) = whole("attention", [found])
    assert tuple(row) == Row.columns() and row["status"] == "ok"
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


def cells(patches, *, max_tokens=100, tiles=("16x1", "8x1"), resolution="64"):
    chosen = heatmap.Settings(patches, max_tokens, "window", "greedy", 0.01, tiles, 1024)
    return whole("heatmap", heatmap.run(resolution, chosen, HOW))


def test_heat_map_runs_what_fits_and_says_why_not():
    found = cells([8, 4, 64, 128])
    assert [cell["status"] for cell in found] == ["ok", "skipped", "ok", "skipped"]
    assert found[0]["speedup"] == pytest.approx(found[0]["dense_p50_us"] / found[0]["plan_p50_us"])
    assert found[0]["tokens"] == 65 and found[0]["max_abs_error"] < 2e-5
    assert {(cell["reorder"], cell["solver"]) for cell in found} == {("window", "greedy")}
    assert found[1]["reason"] == "too many tokens: 257 over 100"
    # Two tokens, which none of the tiles fits.
    assert found[2]["tokens"] == 2 and found[2]["plan_p50_us"] > 0
    assert "patch: expected at most the resolution" in found[3]["reason"]


def test_a_cell_whose_graph_is_refused_says_why(monkeypatch):
    monkeypatch.setattr(dynamicvit, "MAX_ENTRIES", 1000)
    small, large = cells([16, 8])
    assert (small["status"], large["status"]) == ("ok", "skipped")
    assert large["reason"].startswith("65 tokens have 1,0") and "expected at most 1,000" in large["reason"]


def test_plans_of_the_heat_map_are_made_while_others_time(monkeypatch):
    doing = []

    @contextlib.contextmanager
    def untimed():
        doing.append("lent")
        yield
        doing.append("back")

    monkeypatch.setattr(heatmap.lock, "untimed", untimed)
    for module, name in ((heatmap, "make_plan"), (_attention, "run_schedule"), (_attention, "run_baselines")):
        monkeypatch.setattr(module, name, _noted(doing, name, getattr(module, name)))
    cells([8])
    assert doing == ["lent", "make_plan", "back", "run_schedule", "run_baselines"]


def _noted(doing, name, function):
    def run(*arguments, **options):
        doing.append(name)
        return function(*arguments, **options)

    return run


def test_heat_map_is_over_the_fastest_dense_attention(monkeypatch):
    rows = [("sdpa_dense", "ok", 9.0), ("sdpa_flash", "ok", 4.0), ("sdpa_cudnn", "skipped", None)]
    found = [{"provider": name, "status": status, "p50_us": us, "reason": ""} for name, status, us in rows]
    monkeypatch.setattr(_attention, "run_baselines", lambda *_, **__: found)
    (cell,) = cells([8], tiles=("16x1",))
    assert (cell["dense"], cell["dense_p50_us"]) == ("sdpa_flash", 4.0)
    assert cell["speedup"] == 4 / cell["plan_p50_us"]


def test_a_cell_of_a_failed_plan_has_no_time(monkeypatch):
    right = cpu_executor.Executor.__call__
    monkeypatch.setattr(cpu_executor.Executor, "__call__", lambda self, *qkv: right(self, *qkv) + 1e-3)
    (cell,) = cells([8])
    assert cell["status"] == "failed" and "against the reference" in cell["reason"]
    assert cell["speedup"] == cell["plan_p50_us"] == "" and cell["max_abs_error"] >= 1e-3


def test_the_plan_of_a_cell_is_that_of_the_library(monkeypatch):
    """Order, tiles, solver and the rest reach `tilewright.plan`; tiles that do not fit are left out."""
    asked = {}
    monkeypatch.setattr(api, "plan", lambda pattern, **options: asked.update(options))
    chosen = heatmap.Settings([8], 100, "window", "greedy", 0.01, ("64x64", "16x1"), 512)
    pattern = masks.build("dynamicvit-s-64-p16")
    heatmap.make_plan(pattern, chosen, replace(HOW, dtype="bfloat16", seed=3))
    assert asked["tiles"] == ("16x1",) and (asked["reorder"], asked["solver"]) == ("window", "greedy")
    assert (asked["dtype"], asked["split_keys"], asked["seed"]) == (torch.bfloat16, 512, 3)
    assert (asked["heads"], asked["head_dim"]) == (pattern.meta["heads"], pattern.meta["head_dim"])


def test_orders_are_timed():
    found = whole("orders", orders.run("times", orders.Settings(["vil-tiny-64-s1"], ["none", "window"]), HOW))
    assert [row["reorder"] for row in found] == ["none", "window"]
    for row in found:
        assert row["tokens"] == 257 and row["seconds"] >= 0 and 0 < row["work_fraction"] <= 1.1


# The command line, by its files.


def command(name, root, *arguments):
    """Run the script `name` in this process, in the folder `root`."""
    quick = ["--max-seconds", "0.01", "--min-repetitions", "3"]
    with contextlib.chdir(root):
        entered(SCRIPTS / f"{name}.py", *quick, *arguments)


def bench(root, *arguments):
    command("run_bench", root, *arguments)


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
    limits = devices.limits(next(iter(profiles.values())).device)
    plan = schedule.solve(cover, profiles, limits, "greedy", paths=paths)
    schedule.save(root / "pair.greedy.json", plan)
    schedule.save(root / "other.json", replace(plan, device_id="other"))
    schedule.save(root / "homeless.json", replace(plan, blocks_paths=("", "")))
    return root


def test_a_schedule_file_is_run_with_the_files_that_it_records(study):
    bench(study, "--schedule", "pair.greedy.json", "--output", "out.csv")
    frame = pd.read_csv(study / "out.csv")
    assert tuple(frame.columns) == Row.columns() and set(frame["kind"]) == {"attention"}
    assert frame["status"].tolist() == ["ok", "ok"] and frame["tiles"].tolist() == ["pair", "pair"]
    assert frame["ordered"].tolist() == [True, False] and (frame["predicted_us"] > 0).all()


def test_torchs_own_attention_is_profiled_scheduled_and_named(study):
    """Where torch's own attention is faster than several tiles, a schedule of these runs it, and its row says so."""
    names = ["16x1", "8x8"]
    files, outputs = [f"{name}.npz" for name in names], [f"torch-{name}.json" for name in names]
    bench(study, "--profile_only", "--blocks", *files, "--graph", "graph.npz", "--output", *outputs)
    times = profile.load(study / outputs[0]).torch_us
    assert times["masked"] > 0 and times == profile.load(study / outputs[1]).torch_us
    # However fast torch is here.
    for path in outputs:
        profile.save(study / path, replace(profile.load(study / path), torch_us={"masked": 1e-3}))
    solved = ["both.highs.json", "both.greedy.json", "one.highs.json"]
    solvers, tiles = ["highs", "greedy", "highs"], ["16x1+8x8", "16x1+8x8", "16x1"]
    asked = ["--blocks", *files, "--profile", *outputs, "--solver", *solvers, "--tiles", *tiles, "--output", *solved]
    with contextlib.chdir(study):
        entered(SCRIPTS / "solve_ilp.py", *asked)
    found = [schedule.load(study / path) for path in solved]
    assert [each.runs for each in found] == ["torch:masked", "tiles", "tiles"]
    assert found[0].predicted_us == 1e-3 < found[0].own_us
    bench(study, "--schedule", *solved, "--output", "a.csv", "b.csv", "c.csv")
    frames = [pd.read_csv(study / path, keep_default_na=False) for path in ("a.csv", "b.csv", "c.csv")]
    assert [set(frame["variant"]) for frame in frames] == [{"torch:masked"}, {""}, {""}]
    for frame, each in zip(frames, found, strict=True):
        assert set(frame["status"]) == {"ok"} and np.allclose(frame["own_us"].astype(float), each.tiles_us)


GIVEN = ["--blocks", "16x1.npz", "8x8.npz", "--graph", "graph.npz", "--profile", "16x1.json", "8x8.json"]


def test_files_that_are_given_replace_those_that_are_recorded(study):
    bench(study, "--schedule", "homeless.json", "--output", "given.csv", *GIVEN)
    assert pd.read_csv(study / "given.csv")["tiles"].tolist() == ["16x1+8x8"] * 2


def test_a_moved_folder_runs_on_its_own_files(study, tmp_path):
    """Paths inside files are provenance: with all inputs given, none of them is opened."""
    moved = tmp_path / "moved"
    shutil.copytree(study, moved)
    for path in [*moved.glob("*.npz"), *moved.glob("*.json")]:
        path.rename(moved / f"moved-{path.name}")
    given = [name if name.startswith("--") else f"moved-{name}" for name in GIVEN]
    bench(moved, "--schedule", "moved-pair.greedy.json", "--output", "out.csv", *given)
    assert set(pd.read_csv(moved / "out.csv")["status"]) == {"ok"}
    with pytest.raises(ArtifactError, match=r"(16x1|8x8)\.npz: no such file"):
        bench(moved, "--schedule", "moved-pair.greedy.json", "--output", "x.csv")


@pytest.mark.parametrize(
    ("flag", "message"), [("--blocks", "expected blocks .* among --blocks"), ("--profile", "expected a profile of its")]
)
def test_inputs_of_other_schedules_are_refused(study, cover, flag, message):
    other = plans.covers(plans.reordered(plans.pattern(140, 90, seed=3), **META), ["16x1"])["16x1"]
    blocks.save(study / "other.npz", other)
    bench(study, "--profile_only", "--blocks", "other.npz", "--output", "other-profile.json")
    at = GIVEN.index(flag)
    wrong = [*GIVEN[:at], flag, {"--blocks": "other.npz", "--profile": "other-profile.json"}[flag], *GIVEN[at + 3 :]]
    with pytest.raises(ArtifactError, match=message):
        bench(study, "--schedule", "pair.greedy.json", "--output", "x.csv", *wrong)


def test_baselines_are_run_on_a_graph_file(study):
    command("run_baselines", study, "--baselines", "sdpa_dense", "--graph", "graph.npz", "--output", "base.csv")
    assert pd.read_csv(study / "base.csv")["provider"].tolist() == ["sdpa_dense"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--output x.csv", "expected one of --profile_only, --schedule, found none"),
        ("--profile_only --schedule pair.greedy.json --output x.csv", "expected one of .* found both"),
        ("--profile_only --output x.csv", "expected one output for each blocks file, found 1 for 0"),
        ("--schedule nothing.json --output x.csv", "nothing.json: no such file"),
        ("--schedule nothing.json --output x.csv y.csv", "expected one output for each schedule, found 2 for 1"),
        ("--schedule other.json --output x.csv", "made for another device"),
        ("--schedule homeless.json --output x.csv", "expected blocks .* among --blocks, found none"),
        pytest.param(
            "--profile_only --blocks 16x1.npz --device cuda --output x.csv",
            "known: cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
        ),
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
    named = replace(schedule.load(study / "pair.greedy.json"), blocks_paths=("orphan-16x1.npz", "orphan-8x8.npz"))
    schedule.save(study / "orphan.json", named)
    with pytest.raises(ArtifactError, match="does not name its graph"):
        bench(study, "--schedule", "orphan.json", "--output", "x.csv")


def test_the_script_ends_with_one_line(tmp_path):
    done = run_script(SCRIPTS / "run_bench.py", "--schedule", "nothing.json", "--output", "x.csv", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: nothing.json: no such file")
    assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())
