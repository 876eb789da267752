"""T5: run a pruned network by each strategy for its kept tokens; its time follows the comparison of its logits."""

import argparse

from tilewright.networks import batching
from tilewright.study.bench.stage import run_pruned
from tilewright.study.cli import script, timing_options

parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--network", required=True, help="network and pruner, e.g. deit-small-224-threshold_l2")
add("--setting", nargs="+", default=["{}"], metavar="JSON", help="the pruner's settings (default: its own)")
add("--attention", nargs="+", default=batching.NAMES, metavar="NAME", help="strategies (default: all)")
add("--modes", nargs="+", default=["eager=1"], metavar="MODE=BATCH[,BATCH...]", help="eager, graph, compile (eager=1)")
timing_options(add, 1.0, "weights and crops")

if __name__ == "__main__":
    script(parser, run_pruned)
