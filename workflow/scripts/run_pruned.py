"""T5: run a pruned network by each strategy for its kept tokens; its time follows the comparison of its logits."""

import argparse

from tilewright import hardware
from tilewright.bench.stage import run_pruned
from tilewright.cli import script
from tilewright.networks import strategies

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--network", required=True, help="network and pruner, e.g. deit-small-224-threshold_l2")
add("--setting", nargs="+", default=["{}"], metavar="JSON", help="the pruner's settings (default: its own)")
add("--attention", nargs="+", default=strategies.NAMES, metavar="NAME", help="strategies (default: all)")
add("--modes", nargs="+", default=["eager=1"], metavar="MODE=BATCH[,BATCH...]", help="eager, graph, compile (eager=1)")
add("--device", default="cpu", help=f"{' or '.join(hardware.KINDS)} (default: cpu)")
add("--dtype", default="float32", help="float32, float16 or bfloat16 (default: float32)")
add("--rse", type=float, default=0.02, help="stop at this relative standard error (default: 0.02)")
add("--min-repetitions", type=int, default=10, help="but not before as many calls (default: 10)")
add("--max-seconds", type=float, default=1.0, help="and stop after this time in any case (default: 1)")
add("--seed", type=int, default=0, help="seed of weights and crops (default: 0)")
add("--output", required=True, metavar="CSV", help="the rows to write")

if __name__ == "__main__":
    script(parser, run_pruned)
