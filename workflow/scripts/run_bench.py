"""T3 and T5: time the tiles of blocks, or check and time schedules."""

import argparse

from tilewright.core import flags
from tilewright.core.errors import ConfigError
from tilewright_study.cli import attention_options, script, timing_options
from tilewright_study.stages import bench, profile


def run(profile_only, schedule, blocks, output, device, seed, split_keys, heads, head_dim, dtype, **timed):
    """Run the one stage that is asked for. Raises `TilewrightError`."""
    shared = {"output": output, "heads": heads, "head_dim": head_dim, "dtype": dtype, "device": device, "seed": seed}
    if profile_only == bool(schedule):
        raise ConfigError(f"expected one of --profile_only, --schedule, found {'both' if schedule else 'none'}")
    if profile_only:
        profile.run(blocks or [], split_keys=split_keys, **shared)
    else:
        bench.run(schedule, blocks=blocks, **shared, **timed)


def length(text):
    """A split length, or None."""
    return None if text == "none" else flags.count(text)


parser = argparse.ArgumentParser(description=__doc__)
add = parser.add_argument
add("--profile_only", "--profile-only", action="store_true", help="time the shapes of the work items of --blocks (T3)")
add("--schedule", nargs="+", metavar="JSON", help="check and time schedules of one graph (T5)")
add("--graph", metavar="NPZ", help="graph of the schedules (default: the one that their blocks name)")
add("--blocks", nargs="+", metavar="NPZ", help="blocks to profile, or of the schedules (default: those that they name)")
add("--profile", nargs="+", metavar="JSON", help="profiles of these blocks (default: those that a schedule names)")
add(
    "--output", type=flags.output, nargs="+", required=True, help="a JSON for each blocks file, a CSV for each schedule"
)
add("--batch", type=flags.count, default=1, help="sequences in a call (default: 1)")
add(
    "--split-keys",
    type=length,
    metavar="KEYS",
    help="most keys of a work item; longer blocks are split (default: none, never)",
)
add("--max-seconds", type=flags.seconds, default=1.0, help="a timing stops after this time in any case (default: 1)")
attention_options(add, "of a schedule's profile, else float32")
timing_options(add, "the tokens")

if __name__ == "__main__":
    script(parser, run)
