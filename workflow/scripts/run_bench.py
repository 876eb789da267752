"""Time the tiles of blocks (--profile_only), or check and time schedules (--schedule).

python workflow/scripts/run_bench.py --profile_only --blocks blocks.npz --output profile.json
"""

from tilewright.core import flags
from tilewright.core.errors import ConfigError
from tilewright_study.cli import attention_options, parser_for, script, timing_options
from tilewright_study.stages import bench, profile


def run(profile_only, schedule, blocks, graph, output, device, seed, split_keys, heads, head_dim, dtype, **timed):
    """Run the one stage that is asked for. Raises `TilewrightError`."""
    shared = {"output": output, "heads": heads, "head_dim": head_dim, "dtype": dtype, "device": device, "seed": seed}
    if profile_only == bool(schedule):
        raise ConfigError(f"expected one of --profile_only, --schedule, found {'both' if schedule else 'none'}")
    if profile_only:
        profile.run(blocks or [], split_keys=split_keys, graph=graph, **shared)
    else:
        bench.run(schedule, blocks=blocks, graph=graph, **shared, **timed)


def length(text):
    """A split length, or None."""
    return None if text == "none" else flags.count(text)


parser = parser_for(__doc__)
add = parser.add_argument
add("--profile_only", "--profile-only", action="store_true", help="time the shapes of the work items of --blocks (T3)")
add("--schedule", nargs="+", metavar="JSON", help="check and time schedules of one graph (T5)")
add(
    "--graph",
    metavar="NPZ",
    help="graph of the blocks, over which torch's own attention is timed, too, or of the schedules",
)
add(
    "--blocks",
    nargs="+",
    metavar="NPZ",
    help="blocks to profile, or blocks of the schedules (default: the blocks that the schedules name)",
)
add(
    "--profile",
    nargs="+",
    metavar="JSON",
    help="profiles of these blocks (default: the profiles that the schedules name)",
)
add(
    "--output",
    type=flags.output,
    nargs="+",
    required=True,
    help="a JSON file for each blocks file, or a CSV file for each schedule",
)
add("--batch", type=flags.count, default=1, help="sequences in a call (default: 1)")
add(
    "--split-keys",
    type=length,
    metavar="KEYS",
    help="most keys of a work item; longer blocks are split (default: none)",
)
add("--max-seconds", type=flags.seconds, default=1.0, help="longest time of a measurement in seconds (default: 1)")
attention_options(add, "the schedule's, else float32")
timing_options(add, "the tokens")

if __name__ == "__main__":
    script(parser, run)
