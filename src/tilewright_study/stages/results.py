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

    `input` may hold recorded rows, a file an experiment. The study is that of `checkout`, with ``config/all.yaml`` or,
    where that needs more files than there are, without; other results are looked for beside `input`. What lacks a file
    is skipped, and the file is named. Raises `ArtifactError` where nothing can be made.
    """
    members, make, suffixes = FAMILIES[family]
    stated = studies(checkout)
    made = 0
    for name in members.NAMES:
        asked = (dict.fromkeys(found(path, Path(input), checkout) for path in members.needs(name, s)) for s in stated)
        asked = [list(needed) for needed in asked if needed]
        needed = next((paths for paths in asked if all(path.exists() for path in paths)), None)
        if needed is None:
            missing = [f"no {path}" for paths in asked for path in paths if not path.exists()]
            print(f"{name}: skipped, {missing[0] if missing else 'not in config/all.yaml'}")
            continue
        make(name, needed, [Path(output) / f"{name}{suffix}" for suffix in suffixes])
        made += 1
        print(f"{name}: made of {len(needed)} files")
    if not made:
        raise ArtifactError(f"{input}: expected the rows of a run of the study, found none that suffice")


def studies(checkout):
    """All that runs on a CPU, and the default study."""
    from snakemake.utils import update_config

    stated, more = (yaml.safe_load((checkout / name).read_text()) for name in ("config.yaml", "config/all.yaml"))
    default = config.load(stated)
    update_config(stated, more)
    return config.load(stated), default


def found(path, logs, checkout):
    """Where a file that the study calls `path` is when its logs are in the folder `logs`."""
    if path.startswith(experiments.LOGS):
        recorded = logs / f"{experiments.of_file(path)}.csv"
        return recorded if recorded.is_file() else logs / path.removeprefix(experiments.LOGS)
    if path.startswith("results/"):
        return logs.parent / path.removeprefix("results/")
    return checkout / path
