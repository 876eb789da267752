"""The benchmark of several GPUs, in small on two processes."""

import subprocess
import sys
from pathlib import Path

import pandas as pd

SCRIPT = Path(__file__).parents[2] / "benchmarks/slices_parallel.py"


def test_the_small_benchmark_compares_and_times_every_case(tmp_path):
    output = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    found = subprocess.run(
        [*command, "--tiny", "--sparsities", "0.7", "--output", output], capture_output=True, text=True, timeout=180
    )
    assert not found.returncode, found.stderr
    rows = pd.read_csv(output)
    assert len(rows) == 8
    assert set(rows["case"]) == {"attention", "pass"} and set(rows["attention"]) == {"dense", "slices"}
    assert (rows["error"] <= rows["tolerance"]).all()
    several = rows["ranks"] == 2
    assert several.sum() == 4
    assert (rows["exchange_ms"] > 0).equals(several) and (rows["sent_mb"] > 0).equals(several)
    assert (rows["latency_ms"] > 0).all()
    assert {"device", "driver", "torch", "triton", "commit"} <= set(rows) and rows["device"].notna().all()
