"""The published artifact's command lines, as its README has them, run with our scripts in the place of its own."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from helpers.files import run_script
from tilewright import graph, masks
from tilewright_study.stages import graph as graph_stage

ROOT = Path(__file__).parents[2]
# The artifact's README (github.com/KLab-AI3/ipdps-26_vit, commit 2f3a54be).
PUBLISHED = """\
python src/gen_adj.py --model VisionLongformer --output results/graphs/A.npz
python src/reorder/ic.py --input results/graphs/A.npz --output results/graphs/A_ic.npz
python src/reorder/hc.py --input results/graphs/A.npz --output results/graphs/A_hc.npz
python src/reorder/rcm.py --input results/graphs/A.npz --output results/graphs/A_rcm.npz
python src/extract_blocks.py --input results/graphs/A_ic.npz --output results/blocks/blocks_ic.json
python src/run_bench.py --profile_only --blocks results/blocks/blocks_ic.json --output results/profiling/profile_ic.json
python src/solve_ilp_gurobi.py --blocks results/blocks/blocks_ic.json --profile results/profiling/profile_ic.json \
--output results/schedules/schedule_ic.json
python src/run_bench.py --schedule results/schedules/schedule_ic.json --output results/logs/bench_ic.csv
"""
# T6: its README documents two commands that it does not ship.
COLLECT = """\
python scripts/aggregate_results.py --input results/logs --output results/tables
python scripts/plot_results.py --input results/logs --output results/figures
"""
PUBLISHED += COLLECT
OURS = re.sub(r"(src/(reorder/)?|scripts/)", "workflow/scripts/", PUBLISHED)


def run(line, folder, *more):
    """What a command line `line` ended with in `folder`, by this checkout's scripts."""
    program, script, *arguments = shlex.split(line)
    assert program == "python"
    return run_script(ROOT / script, *arguments, *more, folder=folder)


def test_the_published_commands_run_in_their_order(tmp_path):
    """On a smaller image than theirs, so that the test takes seconds."""
    for line in OURS.replace("VisionLongformer", "vil-tiny-64-s1").splitlines()[:-2]:
        done = run(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert (tmp_path / shlex.split(line)[-1]).is_file(), line
        if method := re.search(r"/(ic|hc|rcm)\.py", line):
            assert done.stdout.startswith(f"{method[1]}: ")
    schedule = json.loads((tmp_path / "results/schedules/schedule_ic.json").read_text())
    assert "gurobi" in json.dumps(schedule)
    header, row, *_ = (tmp_path / "results/logs/bench_ic.csv").read_text().splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=True))["status"] == "ok"


def test_the_artifacts_own_settings_are_taken(tmp_path):
    assert run("python workflow/scripts/gen_adj.py --model vil-tiny-64-s1 --output A.npz", tmp_path).returncode == 0
    done = run("python workflow/scripts/ic.py --input A.npz --output B.npz --set variant=paper", tmp_path)
    assert done.returncode == 0, done.stderr
    assert graph.load(tmp_path / "B.npz").meta["reorder"]["params"]["variant"] == "paper"


def test_tables_and_figures_are_made_of_the_rows_that_there_are(tmp_path):
    (tmp_path / "results/logs").mkdir(parents=True)
    shutil.copy(ROOT / "expected/cpu-2-cores/heatmap.csv", tmp_path / "results/logs")
    for line, kinds in zip(OURS.splitlines()[-2:], ((".csv", ".md"), (".png", ".svg")), strict=True):
        done = run(line, tmp_path)
        assert done.returncode == 0, done.stderr
        made = sorted((tmp_path / shlex.split(line)[-1]).iterdir())
        assert [path.name for path in made] == [f"heatmap{kind}" for kind in kinds]
        assert "speedup: skipped, no results/logs/vil-tiny-128-s1/" in done.stdout


def test_a_folder_without_rows_is_refused(tmp_path):
    done = run(OURS.splitlines()[-2], tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: results/logs: expected the rows of a run")


@pytest.mark.parametrize("name", graph_stage.PUBLISHED)
def test_a_published_model_name_is_a_workload(name, tmp_path):
    done = run(f"python workflow/scripts/gen_adj.py --model {name} --output A.npz", tmp_path)
    assert done.returncode == 0, done.stderr
    made = graph.load(tmp_path / "A.npz")
    expected = masks.build(graph_stage.PUBLISHED[name])
    assert (made.meta["model"], made.shape, made.entries) == (
        graph_stage.PUBLISHED[name],
        expected.shape,
        expected.entries,
    )


def test_an_unknown_model_name_is_refused_in_one_line(tmp_path):
    done = run("python workflow/scripts/gen_adj.py --model VisionLongFormer --output A.npz", tmp_path)
    assert done.returncode == 2 and "VisionLongFormer" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "A.npz").exists()


def test_the_documents_show_these_commands():
    text = (ROOT / "docs/paper.md").read_text()
    for published, ours in zip(PUBLISHED.splitlines(), OURS.splitlines(), strict=True):
        script, *arguments = published.removeprefix("python ").split(" ", 1)
        assert f"`{script}" in text and f"`{ours.split()[1]}" in text, script
        assert arguments[0] in text, arguments
