"""Python files that are no part of a package."""

import contextlib
import csv
import importlib.util
import io
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock


def loaded(path):
    """The file as a module, run anew in each call."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entered(path, *arguments):
    """What the command of a file does with such arguments, in this process: its errors are raised."""
    module = loaded(path)
    module.run(**vars(module.parser.parse_args([*map(str, arguments)])))


def rows(path):
    """The rows of a CSV."""
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


def run_script(path, *arguments, folder="."):
    """Run the file as a command in `folder`, in this process, which has loaded what it needs: what it ended with."""
    words, path, status = [*map(str, (path, *arguments))], Path(path).resolve(), 0
    printed, errors, before = io.StringIO(), io.StringIO(), {*sys.modules}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(mock.patch.object(sys, "argv", words))
        stack.enter_context(mock.patch.object(sys, "path", [str(path.parent), *sys.path]))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=errors)
    # Of one name with those of other folders.
    for name in {each.stem for each in path.parent.glob("*.py")} & {*sys.modules} - before:
        del sys.modules[name]
    return subprocess.CompletedProcess(words, status, printed.getvalue(), errors.getvalue())
