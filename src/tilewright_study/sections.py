"""Sections of the configuration: their type, and the checks that several of them share.

A section documents its values in its docstring, a paragraph of ``name: what it is`` for each. `descriptions` reads
them, so that the schema for editors says the same.
"""

import inspect
import re
from typing import Literal

import msgspec

from tilewright.core.errors import ConfigError, TilewrightError

Dtype = Literal["float32", "float16", "bfloat16"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section of the configuration. Nothing in it has a default: ``config.yaml`` names every value."""

    def check(self, config):
        """Raise `ConfigError` for a value that its type allows and the study does not.

        config: the whole configuration; a section may refer to other parts of it.
        """


def descriptions(section):
    """``(text, {name: text})``: what a section is, and what each of its values is, from its docstring and those of the
    classes that it has values of."""
    bases = (msgspec.Struct, Section)
    classes = [each for each in section.__mro__[::-1] if issubclass(each, msgspec.Struct) and each not in bases]
    parts = [re.split(r"\n\n|\n(?=\w+: )", inspect.cleandoc(each.__doc__)) for each in classes]
    named = (text.partition(": ") for _, *rest in parts for text in rest)
    return _line(parts[-1][0]), {name: _line(text) for name, _, text in named}


def _line(text):
    return " ".join(text.split())


def taken(settings, section, /, **own):
    """The `settings`, a type, of a case: values of its `section`, but for its `own`."""
    shared = {name: getattr(section, name) for name in settings.__struct_fields__ if name not in own}
    return settings(**shared | own)


def at(place, call, *arguments):
    """Call, and let an error name the `place` in the configuration that caused it."""
    try:
        return call(*arguments)
    except (TilewrightError, msgspec.ValidationError) as error:
        raise ConfigError(f"{place}: {error}") from error


def known(place, what, names, members):
    """Raise `ConfigError` unless all `names` are among `members`."""
    for name in names:
        if name not in members:
            raise ConfigError(f"{place}: unknown {what} {name!r}; known: {', '.join(members)}")


def selection(place, names):
    """Raise `ConfigError` unless there is a name, and none appears twice."""
    if not names:
        raise ConfigError(f"{place}: expected at least one name, found none")
    distinct(place, names)


def distinct(place, values):
    """Raise `ConfigError` for a value that appears twice."""
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise ConfigError(f"{place}: {twice[0]!r} appears twice")


def at_least(place, bound, values):
    """Raise `ConfigError` for a value below `bound`; None is a value that is left open."""
    for value in values:
        if value is not None and value < bound:
            raise ConfigError(f"{place}: expected at least {bound}, found {value}")


def above_zero(place, value):
    """Raise `ConfigError` unless the number `value` is above zero."""
    # Not `<=`: a NaN is not above zero.
    if not value > 0:
        raise ConfigError(f"{place}: expected a number above 0, found {value}")


def batches(place, what, chosen, members):
    """Raise `ConfigError` for names of `chosen`, ``{name: batches}``, that are unknown, and for batches below 1 or that
    stand twice."""
    known(place, what, chosen, members)
    for name, sizes in chosen.items():
        at_least(f"{place}.{name}", 1, sizes)
        distinct(f"{place}.{name}", sizes)
