"""T3 and T5: time the tiles of blocks, run schedules, baselines and sweeps; every time follows a check."""

import argparse

from tilewright import targets
from tilewright.baselines import sparse as sparse_baselines
from tilewright.study.bench.stage import run
from tilewright.study.cli import script

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--profile_only", "--profile-only", action="store_true", help="time the shape classes of --blocks (T3)")
add("--schedule", nargs="+", metavar="JSON", help="check and time schedules (T5)")
add("--baselines", nargs="+", metavar="NAME", help=f"check and time on --graph: {', '.join(sparse_baselines.NAMES)}")
add("--heatmap", type=int, metavar="PX", help="DynamicViT at this resolution over --patches, against dense attention")
add("--reorder-times", nargs="+", metavar="MODEL", help="time --orders on workloads, given from small to large")
add("--blocks", nargs="+", metavar="NPZ", help="blocks to profile, or instead of those that a schedule records")
add("--graph", nargs="+", metavar="NPZ", help="the pattern (default for a schedule: what its blocks were made from)")
add("--output", nargs="+", required=True, help="a JSON for each blocks file, a CSV for each schedule, else one CSV")
add("--heads", type=int, help="attention heads (default: of the model)")
add("--head-dim", type=int, help="dimension of a head (default: of the model)")
add("--dtype", help="float32, float16 or bfloat16 (default: of a schedule's profile, else float32)")
add("--batch", type=int, default=1, help="sequences in a call (default: 1)")
add("--device", default="cpu", help=f"{' or '.join(targets.NAMES)} (default: cpu)")
add("--split-keys", type=int, help="most keys of a work item; longer blocks are split (default: never)")
add("--patches", nargs="+", type=int, help="patch sizes of the heat map, in pixels")
add("--orders", nargs="+", default=["window"], help="orders (default: window)")
add("--tiles", nargs="+", default=["16x1", "64x1", "64x64"], help="tiles of the heat map's plans")
add("--solver", default="highs", help="solver of the heat map's plans (default: highs)")
add("--max-dense-tokens", type=int, default=20000, help="skip dense attention above (default: 20000)")
add("--rse", type=float, default=0.02, help="stop at this relative standard error (default: 0.02)")
add("--min-repetitions", type=int, default=10, help="but not before as many calls (default: 10)")
add("--max-seconds", type=float, default=1.0, help="and stop after this time in any case (default: 1)")
add("--seed", type=int, default=0, help="seed of the tokens and the solver (default: 0)")

if __name__ == "__main__":
    script(parser, run)
