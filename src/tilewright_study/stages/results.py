"""Stage T6 on folders: every table, or every figure, that the rows of a run suffice for."""

from pathlib import Path

import yaml

from tilewright.core.errors import ArtifactError
from tilewright_study import config, experiments, figures, tables

FAMILIES = {
    "tables": (tables, tables.tabulate, (".csv", ".md")),
    "figures": (figures, figures.draw, (".svg", ".png")),
}


def run(family, input, output, checkout):
    """Write the members of `family`, ``tables`` or ``figures``, to the folder `output`, from the logs in `input`.

    `input` may hold recorded rows, a file an experiment. The study is ``config.yaml`` of `checkout`; other results are
    looked for beside `input`. What lacks a file is
    skipped, and the file is named. Raises `ArtifactError` where nothing can be made.
    """
    members, make, suffixes = FAMILIES[family]
    study = config.load(yaml.safe_load((checkout / "config.yaml").read_text()))
    made = 0
    for name in members.NAMES:
        needed = list(dict.fromkeys(_found(path, Path(input), checkout) for path in members.needs(name, study)))
        missing = [path for path in needed if not path.exists()]
        if missing or not needed:
            print(f"{name}: skipped, {f'no {missing[0]}' if missing else 'not in config.yaml'}")
            continue
        make(name, needed, [Path(output) / f"{name}{suffix}" for suffix in suffixes])
        made += 1
        print(f"{name}: made of {len(needed)} files")
    if not made:
        raise ArtifactError(f"{input}: expected the rows of a run of config.yaml, found none that suffice")


def _found(path, logs, checkout):
    """Where a file that the study calls `path` is when its logs are in the folder `logs`."""
    if path.startswith(experiments.LOGS):
        recorded = logs / f"{experiments.of_file(path)}.csv"
        return recorded if recorded.is_file() else logs / path.removeprefix(experiments.LOGS)
    if path.startswith("results/"):
        return logs.parent / path.removeprefix("results/")
    return checkout / path
