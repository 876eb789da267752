"""Experiments of the study: what stage T5 runs, times and records.

An experiment is a folder of this package and a word in `NAMES`; ``experiments:`` of the configuration selects some.
Its ``run.py`` measures, ``table_<name>.py`` and ``figure_<name>.py`` show what was measured (see `tables`, `figures`).
Tables and figures ask for its files by `files` and read its rows by `tilewright_study.tables._read`. Contract of a
member, whose import stays light (no torch):
    ``Section``: the type of its section of the configuration, a `sections.Section` with its own ``check(config)``. The
        section is called as the module, or as ``SECTION`` says where the module has one.
    ``Row``: a `rows.Row`, the one declaration of its columns; ``kind`` is the module's name.
    ``cases(config) -> names``: each is a CSV file, results/logs/<experiment>/<case>.csv.
    ``Settings``, ``settings(config, case) -> Settings``: everything that a case is run with, besides `effort.Run`.
    ``planned(case, settings) -> list``: dicts of the columns that decide which code makes the rows of a case.
    ``modules(row, device) -> list``: dotted names of the modules that such a row depends on, besides those that the
        member and its ``run.py`` import and the facts of the device: what they enter by name. row: of ``planned``, or
        one that was recorded; device: a kind of `devices`. The digest of these is the row's ``code``, and a case runs
        again when one of them changes.
    ``named(settings, device) -> list``, of a member whose settings name modules that no column does: their dotted
        names, such as the predictors behind names of the user's own.
    ``size(case, settings) -> int``: how many numbers a case holds at once, for a cluster's memory and time; without
        it, few.
    ``run.py`` in its folder, where what runs a case loads more than a light import may: the module that has the
        functions ``run`` and ``first_calls``, which is entered by its name. Without it the member has them.
    ``run(case, settings, how)``: yields the rows, a dict of columns each, as they are measured; how: a `effort.Run`.
        Rows of what failed its check, or could not run, have no time and say why in ``reason``. What is timed is what
        was checked: a `timing.Checked`, as `checks.checked` makes it.
    ``compiles(settings) -> bool``, ``first_calls(case, settings, how)``, of a member that runs what torch compiles and
        keeps on disk: whether a case has such calls, and those calls, which yield the names of what was compiled. On a
        CPU the workflow compiles cases side by side before it times them alone.
    ``sources(settings) -> paths``, of a member whose cases may read files of the user's own: those files.
    ``NAMED``, ``remark(row)``: how the log calls a row, a format of its columns, and what it says of one that passed,
        None for nothing; without it, its time and its error.
    ``recorded(rows) -> rows``, of a member with rows that no table, figure or claim reads: those that a recorded run
        keeps.
    ``ON_HOST = True``, of a member that runs on the host's processors whatever device the study is for; ``TIMES =
        False``, of one of these that times nothing, and so may run beside others.
    ``TABLES``, ``FIGURES``: names of those in its folder, in the order in which they are shown.
    ``FOLDER``: where its files are below results/logs; by default a folder of its name.

A member whose cases need other files of the study has rules of its own, and none of ``Settings``, ``settings``,
``planned``, ``size``, ``run``, ``NAMED`` and ``remark``: the rule `experiment` serves those that have ``Settings``.
"""

import json
import shlex
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import msgspec

from tilewright import devices
from tilewright.core import registry
from tilewright.core.errors import ConfigError
from tilewright_study import provenance

NAMES = (
    *("attention", "networks", "ragged", "pruned", "slices", "recall", "video", "paths", "stream", "heatmap", "orders"),
    *("pruned_accuracy", "accelerator", "configure", "push", "push_attention", "push_streams", "worth", "gains"),
    *("neighborhood", "budgets"),
)
LOGS = "results/logs/"
# Numbers of a case that says nothing of them.
FEW = 1 << 20


def member(name):
    """The module of an experiment. Raises `UnknownNameError`."""
    return registry.member(__name__, "experiment", name, NAMES)


def runner(name):
    """The module that runs the cases of an experiment. Raises `UnknownNameError`."""
    return import_module(_runner(member(name)))


def _runner(module):
    return f"{module.__name__}.run" if Path(module.__file__).with_name("run.py").exists() else module.__name__


def sections():
    """``{name of the section: member}`` in the order of `NAMES`."""
    return {section_of(name): member(name) for name in NAMES}


def section_of(name):
    """The name of an experiment's section of the configuration."""
    return getattr(member(name), "SECTION", name)


class _RowTypes(Mapping):
    """``{kind: Row}``: an experiment is imported when its rows are asked for."""

    def __getitem__(self, name):
        return member(name).Row

    def __contains__(self, name):
        return name in NAMES

    def __iter__(self):
        return iter(NAMES)

    def __len__(self):
        return len(NAMES)


def row_types():
    """``{kind: Row}`` of every experiment, a mapping."""
    return _RowTypes()


def by_place():
    """``(untimed, on_host, on_device)``: names of the experiments that time nothing, of those that time the host's
    processors, and of those that time the device that the study is for; none with rules of its own."""
    general = {name: member(name) for name in NAMES if hasattr(member(name), "Settings")}
    host = {name: made for name, made in general.items() if getattr(made, "ON_HOST", False)}
    untimed = [name for name, made in host.items() if not getattr(made, "TIMES", True)]
    return untimed, [name for name in host if name not in untimed], [name for name in general if name not in host]


def cases(name, config):
    """Cases of an experiment under `config`; none where it is not selected."""
    return list(member(name).cases(config)) if name in config.experiments else []


def files(name, config):
    """Paths of an experiment's CSV files under `config`; none where it is not selected."""
    folder = getattr(member(name), "FOLDER", f"{name}/")
    return [f"{LOGS}{folder}{case}.csv" for case in cases(name, config)]


def arguments(name, config, case):
    """The flags that run a case: a list of words for a shell, quoted."""
    stated = msgspec.to_builtins(member(name).settings(config, case))
    pairs = (shlex.quote(f"{key}={json.dumps(value)}") for key, value in stated.items())
    dtype = getattr(getattr(config, section_of(name)), "dtype", None) or config.dtype
    timing = f"--rse {config.timing.rse} --min-repetitions {config.timing.min_repetitions}"
    flags = f"--device {config.device} --dtype {dtype} --seed {config.seed} {timing}"
    return ["--set", *pairs, *flags.split()]


def compiles(name, config, case):
    """Whether a case has first calls that compile under `config`."""
    module = member(name)
    return hasattr(module, "compiles") and module.compiles(module.settings(config, case))


def sources(name, config, case):
    """Paths of the user's own files that a case reads under `config`."""
    module = member(name)
    return list(module.sources(module.settings(config, case))) if hasattr(module, "sources") else []


def parse(name, stated):
    """``Settings`` of an experiment from a dict, read strictly. Raises `ConfigError`."""
    module = member(name)
    if not hasattr(module, "Settings"):
        raise ConfigError(f"experiment {name}: needs files of other stages; run its own commands")
    try:
        return msgspec.convert(stated, module.Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(module.Settings.__struct_fields__)
        raise ConfigError(f"experiment {name}: {error}; settings: {known}") from None


def modules(name, rows, device):
    """Dotted names of all modules that `rows` of an experiment depend on, see the contract; sorted."""
    module = member(name)
    found = {entered for row in rows for entered in module.modules(row, device)}
    return sorted({module.__name__, _runner(module), *devices.modules(device), *found})


def code(name, rows, device):
    """Digest of the code that makes `rows` of an experiment on a `device` of this kind.

    Raises `UnknownNameError` for a module that is not there.
    """
    return provenance.code_digest(*modules(name, rows, device))


def modules_of_case(name, config, case):
    """Dotted names of all modules that the rows of a case depend on under `config`, as `modules` gives them."""
    module = member(name)
    settings = module.settings(config, case)
    named = module.named(settings, config.device) if hasattr(module, "named") else []
    return sorted({*modules(name, module.planned(case, settings), config.device), *named})


def of_file(path):
    """The experiment whose rows the file `path` holds, as `files` names it."""
    name = path.removeprefix(LOGS).partition("/")[0]
    # Those of attention lie below the names of graphs.
    return name if name in NAMES else "attention"


def read(paths):
    """Dotted names of the experiments whose rows are in files among `paths`, as `files` names them."""
    return sorted({f"{__name__}.{of_file(path)}" for path in paths if path.startswith(LOGS)})


def size(name, config, case):
    """How many numbers a case holds at once under `config`."""
    module = member(name)
    return module.size(case, module.settings(config, case)) if hasattr(module, "size") else FEW
