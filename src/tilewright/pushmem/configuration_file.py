"""The file of a tile's configuration: its controllers as `settings` has them, and its registers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.pushmem import memories, recurrence
from tilewright.pushmem.settings import CYCLE, Affine, Configuration, Controller, Extent

KIND, VERSION = "push configuration", 1


def write(
    path: str | Path,
    configuration: Configuration,
    told: Mapping[str, Any] | None = None,
    made_by: dict[str, Any] | None = None,
) -> None:
    """Write a `Configuration` with its registers. told: what else the file says, see `configure`."""
    memory = memories.member(configuration.memory)
    body = {
        "memory": configuration.memory,
        "controllers": {name: each.document() for name, each in configuration.controllers.items()},
        "registers": recurrence.registers(configuration, memory),
        **(told or {}),
    }
    artifacts.write_json(path, KIND, VERSION, body, made_by)


def read(path: str | Path) -> tuple[Configuration, dict[str, Any]]:
    """The `Configuration` of a file that `write` wrote, checked, and the whole document. Raises `TilewrightError`."""
    document = artifacts.read_json(path, KIND, VERSION)
    try:
        controllers = {}
        for name, stated in document["controllers"].items():
            parts = dict(stated)
            extents = msgspec.convert(parts.pop("extents"), tuple[Extent, ...])
            affines = {part: msgspec.convert(value, Affine) for part, value in parts.items()}
            controllers[name] = Controller(extents, affines.pop(CYCLE), affines)
        configuration = Configuration(msgspec.convert(document["memory"], str), controllers)
    except (KeyError, AttributeError, TypeError, ValueError, msgspec.ValidationError, ConfigError) as error:
        raise ArtifactError(f"{path}: expected a {KIND}, found a damaged one: {error!r}") from error
    configuration.check(memories.member(configuration.memory))
    return configuration, document
