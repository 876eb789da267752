"""The part of the study about video networks, on a machine without Snakemake: weights, passes, pictures and recall.

Each step is the command that a rule would run, with the settings of config.yaml and the overlays. A step that takes
longer than its limit is ended, and the next one begins; rows of a step are written when it is done.

    python benchmarks/video_study.py --steps train video pictures recall
    python benchmarks/video_study.py --configs --steps train video        the study of a CPU
    python benchmarks/video_study.py --steps video --cases wan-1.3b-720p-81f --attention dense slices80
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tilewright.study import config, experiments
from tilewright.study.experiments import _weights

ROOT = Path(__file__).parents[1]
GPU = ("config/h200.yaml", "config/h200_video.yaml")
STEPS = ("train", "video", "pictures", "recall")


def merged(first, second):
    """``second`` over ``first``: maps at every depth, all else whole."""
    both = (key for key in second if isinstance(second[key], dict) and isinstance(first.get(key), dict))
    return first | second | {key: merged(first[key], second[key]) for key in both}


def study(overlays, attention=()):
    """The configuration with overlays, maps merged as Snakemake does. attention: some of those of its video section."""
    found = yaml.safe_load((ROOT / "config.yaml").read_text())
    for overlay in overlays:
        found = merged(found, yaml.safe_load((ROOT / overlay).read_text()))
    if attention:
        found["video"] = found["video"] | {"attention": {name: found["video"]["attention"][name] for name in attention}}
    return config.load(found)


def commands(chosen, steps, only, stated):
    """``(what, words)`` of each command. only: cases, or all; stated: further settings of experiments."""
    script = [sys.executable, str(ROOT / "workflow/scripts")]

    def words(name, *flags):
        return [script[0], f"{script[1]}/{name}.py", *(word for flag in flags for word in shlex.split(flag))]

    def settings(name, case):
        flags = experiments.arguments(name, chosen, case)
        at = flags.index("--device")
        return [*flags[:at], *map(shlex.quote, stated), *flags[at:]], [*flags[:at], *map(shlex.quote, stated)]

    for step in steps:
        if step == "train":
            used = {*chosen.video.networks, *(name for name, grids in chosen.recall.networks.items() if grids)}
            for name, weights in chosen.video.weights.items():
                path = Path(weights.file(name))
                if name in used and weights.path is None and not path.exists():
                    flags = ["--output", str(path), *(f"--{kind} {path.with_suffix(end)}" for kind, end in OUTPUTS)]
                    yield f"train {name}", words("train_video", *flags, *_weights.arguments(weights, chosen))
            continue
        experiment = "recall" if step == "recall" else "video"
        for case in experiments.cases(experiment, chosen):
            named = case.rpartition("-")[0] if step == "recall" else case
            if (only and case not in only) or (step != "video" and named not in chosen.video.weights):
                continue
            run, pictured = settings(experiment, case)
            target = f"{experiments.LOGS}{experiment}/{case}"
            if step == "pictures":
                flags = [*pictured, f"--device {chosen.device}", f"--case {case} --output {target}.npz"]
                yield f"pictures {case}", words("video_pictures", *flags)
            else:
                flags = [f"--experiment {experiment} --case {case} --output {target}.csv", *run]
                yield f"{experiment} {case}", words("run_experiment", *flags)


# What a training leaves beside its weights.
OUTPUTS = (("losses", ".csv"), ("samples", ".png"))


def main():
    """Run the steps that the command line asks for, in the working folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--configs", nargs="*", default=GPU, help=f"overlays of config.yaml (default: {' '.join(GPU)})")
    add("--steps", nargs="+", default=STEPS, choices=STEPS)
    add("--attention", nargs="+", default=[], help="of video.attention (default: all)")
    add("--cases", nargs="+", default=[], help="of experiments (default: all)")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of the experiments")
    add("--limit-s", type=float, default=540.0, help="of one command, in seconds (default: %(default)s)")
    add("--dry-run", action="store_true", help="only show the commands")
    asked = parser.parse_args()
    failed = []
    for what, words in commands(study(asked.configs, asked.attention), asked.steps, asked.cases, asked.set):
        print(f"# {what}\n{shlex.join(words)}", flush=True)
        if asked.dry_run:
            continue
        begin = time.monotonic()
        try:
            code = subprocess.run(words, timeout=asked.limit_s).returncode
        except subprocess.TimeoutExpired:
            code = "over its limit"
        print(f"# {what}: {code}, {time.monotonic() - begin:.0f} s", flush=True)
        failed += [what] if code else []
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
