"""A program for push memories in a file of one's own: its stages, its images, and its definition in NumPy."""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.core import images
from tilewright.core.errors import ConfigError
from tilewright.pushmem import dsl, expressions, reference


def outputs(program: str, size: int | None) -> tuple[dsl.Stage, ...]:
    """The outputs that ``FILE.py:NAME`` says: stages, or a function that gives them for a size.

    Raises `ConfigError`, with the line of the file where it fails.
    """
    made = _named("--program", program)
    if callable(made):
        made = _called("--program", program, made, *([] if size is None else [size]))
    elif size is not None:
        raise ConfigError(f"--size: expected a function that takes a size, found stages in {program}")
    return dsl.stages(made)


def words(stages: dsl.Outputs, given: Sequence[str], seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays of the inputs by name: those of ``NAME=FILE``, the name left out where there is one input; others random.

    Raises `ConfigError` for an unknown input, and for an array of another shape or type.
    """
    inputs = {s.name: s for s in dsl.stages_of(stages) if not isinstance(s, dsl.Stage)}
    rng = np.random.default_rng(seed)
    data = {n: rng.integers(0, 1 << expressions.BITS, s.shape).astype(s.dtype) for n, s in inputs.items()}
    for text in given:
        name, equals, path = text.rpartition("=")
        name = name if equals or len(inputs) > 1 else next(iter(inputs))
        if name not in inputs:
            raise ConfigError(f"--image {text}: expected NAME=FILE, unknown input {name!r}; known: {', '.join(inputs)}")
        data[name] = _image(Path(path), inputs[name])
    return data


def _image(path: Path, source: dsl.Source) -> np.ndarray:
    """The words of a file: an array of whole numbers (``.npy``), or an image, in grey or as three planes."""
    if path.suffix == ".npy":
        try:
            found = np.load(path)
        except ValueError as error:
            raise ConfigError(f"{path}: expected an array: {error}") from None
    else:
        image, planes = images.opened(path), len(source.shape) == 3
        wide = image.mode.startswith("I")
        found = np.asarray(image if wide else image.convert("RGB" if planes else "L"))
        found = found.transpose(2, 0, 1) if planes and not wide else found
    if found.shape != source.shape or found.dtype.kind not in "iub":
        raise ConfigError(
            f"{path}: expected whole numbers of the shape {source.shape} for {source.name}, found {found.dtype} of "
            f"{found.shape}"
        )
    low, high = np.iinfo(source.dtype).min, np.iinfo(source.dtype).max
    if found.size and not low <= int(found.min()) <= int(found.max()) <= high:
        raise ConfigError(
            f"{path}: expected words of {source.dtype}, {low} to {high}, for {source.name}, found {found.min()} to "
            f"{found.max()}"
        )
    return found.astype(source.dtype)


def differing(definition: str, stages: Sequence[dsl.Stage], data: dict[str, np.ndarray], found: dict) -> str:
    """Where `found` differs from what a function ``FILE.py:NAME`` gives for the inputs by name: a text, or none.

    The function gives an array, arrays in the order of the outputs, or arrays by the names of the outputs.
    """
    given = _called("--numpy", definition, _named("--numpy", definition), **{n: a.copy() for n, a in data.items()})
    if not isinstance(given, dict):
        several = isinstance(given, tuple | list) and (len(stages) > 1 or len(given) == 1)
        given = dict(zip([s.name for s in stages], given if several else [given], strict=False))
    for stage in stages:
        wanted = np.asarray(given.get(stage.name))
        if wanted.shape != stage.shape or wanted.dtype.kind not in "iub":
            raise ConfigError(
                f"--numpy {definition}: expected whole numbers of the shape {stage.shape} for {stage.name}, found "
                f"{wanted.dtype} of {wanted.shape}"
            )
        wrong = np.argwhere(reference.stored(wanted, stage.dtype) != found[stage.name])
        if len(wrong):
            at = tuple(map(int, wrong[0]))
            return (
                f"{stage.name}{list(at)}: expected {wanted[at]}, found {found[stage.name][at]}; {len(wrong)} of "
                f"{wanted.size} words differ from {definition}"
            )
    return ""


def _named(flag: str, text: str) -> Any:
    """What a file of Python calls a name."""
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{flag}: expected FILE.py:NAME, found {text}")
    if not Path(path).is_file():
        raise ConfigError(f"{flag}: {path}: expected a file, found none")
    label = f"_program_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(label, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What the file imports lies beside it, as if it were run.
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        _called(flag, text, lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    finally:
        sys.path.pop(0)
    if not hasattr(module, name):
        known = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == label]
        raise ConfigError(f"{flag}: {path} has no {name!r}; known: {', '.join(known)}")
    return getattr(module, name)


def _called(flag: str, text: str, function: Callable, *args: Any, **named: Any) -> Any:
    """What a function of one's own gives; its errors name the line of the file."""
    path = text.rpartition(":")[0]
    try:
        return function(*args, **named)
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == Path(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = path if line is None else f"{path}, line {line}"
        raise ConfigError(f"{flag}: {where}: {type(error).__name__}: {error}") from error
