"""Code of pages: blocks in their order, run as by a reader who pastes them, or looked up by name."""

import argparse
import ast
import code
import contextlib
import importlib
import inspect
import io
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import tilewright.__main__
from helpers.files import run_script

ROOT = Path(__file__).parents[2]
SHELL = ("bash", "")
# Also of an item of a list.
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """kind: of the fence. line: where the text of the block begins on its page."""

    kind: str
    text: str
    line: int


def blocks(path):
    """The `Block`s of a page."""
    text = (ROOT / path).read_text()
    found = _FENCE.finditer(text)
    return [Block(each[1], textwrap.dedent(each[2]), text[: each.start(2)].count("\n") + 1) for each in found]


def commands(block):
    """Command lines of a block of the shell, without comments and variables."""
    joined = block.text.replace("\\\n", " ")
    return [
        line for line in (re.sub(r"(^| )#.*|^[A-Z_]+=\S+ ", "", each).strip() for each in joined.splitlines()) if line
    ]


class Python(code.InteractiveConsole):
    """A session of Python into which blocks are pasted line by line; an error ends the test."""

    def showtraceback(self):
        """In place of printing it."""
        raise

    def showsyntaxerror(self, filename=None, **_):
        """Likewise."""
        raise

    def write(self, data):
        """To where it is looked at."""
        sys.stdout.write(data)

    def paste(self, text):
        """What it prints."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for line in [*text.splitlines(), ""]:
                open_block = self.push(line)
            assert not open_block, f"a block that does not end: {text}"
        return printed.getvalue()


def scripted(words, folder):
    """Exit status, output and errors of `tilewright …` or `python script …`, in this process."""
    if words[0] == "tilewright":
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            status = tilewright.__main__.main(words[1:])
        return status, out.getvalue(), errors.getvalue()
    done = run_script(ROOT / words[1], *words[2:], folder=folder)
    return done.returncode, done.stdout, done.stderr


def accepted(words, folder):
    """Exit status and errors of the same where it only parses its arguments."""

    def parsed(parser, *given):
        _, unknown = parser.parse_known_args(*given)
        sys.exit(2 if unknown else 0)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parsed):
        try:
            status, _, errors = scripted(words, folder)
        except SystemExit as end:
            status, errors = end.code, " ".join(words)
    return status, errors


def shell(block, folder):
    """What the lines of a block print; each ends well, or is one half of ``… || echo …``."""
    printed = ""
    for line in commands(block):
        line, _, otherwise = line.partition(" || echo ")
        words = shlex.split(line)
        if words[0] in ("tilewright", "python"):
            status, *told = scripted(words, folder)
            printed += "".join(told)
        else:
            done = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True)
            status = done.returncode
            printed += done.stdout + done.stderr
        assert bool(status) == bool(otherwise), f"{line}\n{printed}"
        printed += otherwise.strip('"').replace("$?", str(status)) + "\n" * bool(otherwise)
    return printed


def unknown(text):
    """Names of Tilewright that code uses and that are not there, and keywords that a function does not take."""
    tree, known, wrong = ast.parse(text), {}, []

    def looked_up(owner, name):
        if inspect.ismodule(owner):
            with contextlib.suppress(ImportError):
                return (
                    getattr(owner, name)
                    if hasattr(owner, name)
                    else importlib.import_module(f"{owner.__name__}.{name}")
                )
        return getattr(owner, name)

    def found(node):
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := found(node.value)) is not None:
            try:
                return looked_up(owner, node.attr)
            except AttributeError:
                wrong.append(ast.unparse(node))
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "tilewright":
                    known[each.asname or "tilewright"] = importlib.import_module(
                        each.name if each.asname else "tilewright"
                    )
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("tilewright", "tilewright_study"):
            for each in node.names:
                try:
                    known[each.asname or each.name] = looked_up(importlib.import_module(node.module), each.name)
                except AttributeError:
                    wrong.append(f"{node.module}.{each.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found(node)
        if isinstance(node, ast.Call) and (called := found(node.func)) is not None:
            taken = inspect.signature(called).parameters.values()
            if not any(each.kind is each.VAR_KEYWORD for each in taken):
                names = {each.name for each in taken}
                wrong += [
                    f"{ast.unparse(node.func)}({key.arg}=)" for key in node.keywords if key.arg not in {*names, None}
                ]
    return sorted({*wrong})
