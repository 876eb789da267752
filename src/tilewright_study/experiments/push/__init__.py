"""Programs on push memories: what a mapped app needs, how long it runs, and whether each word is numpy's.

The rules `push_map`, `push_configure` and `push_run` write the files of an app; the rows tell what they say.
"""

import csv
import json
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tilewright.core import artifacts
from tilewright.core.errors import ArtifactError, ConfigError
from tilewright.pushmem import memories
from tilewright.pushmem import solve as engines
from tilewright.pushmem import streams as parts
from tilewright_study import sections
from tilewright_study.experiments.push import apps as programs
from tilewright_study.experiments.push import examples
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Number

TABLES = ("push",)
FIGURES = ("push_tiles",)

# What is timed the rules of the files have timed.
ON_HOST, TIMES = True, False
FOLDER_OF = "results/push/{}/{}"
FILES = ("mapped.json", "config.json", "run.csv")
Positive = Annotated[float, msgspec.Meta(gt=0)]
# Buffers of an app whose live words and ports are told, those that hold most.
BUFFERS = 4


class Section(sections.Section, frozen=True):
    """Push memories: tiles that stream data by themselves, configured from examples, and programs mapped to them.

    memory: the tile that streams are configured for, pub or dp
    streams: engines by the name of an example, such as identity-16x16; with -agg, -sram or -tb behind it, of a part
    time_limit: of bmc, in seconds; null is none
    apps: programs by name and side of their image, such as gaussian-64
    memories: tiles that apps are mapped to
    rtl: whether apps run in RTL, too
    attention: workloads with windows whose keys are streamed
    """

    memory: str
    streams: dict[str, tuple[str, ...]]
    time_limit: Positive | None
    apps: tuple[str, ...]
    memories: tuple[str, ...]
    rtl: bool
    attention: tuple[str, ...]

    def check(self, config):
        """Raise `ConfigError` for unknown names."""
        sections.known("push.memory", "memory", [self.memory, *self.memories], memories.NAMES)
        tile = memories.member(self.memory)
        for name, chosen in self.streams.items():
            stream, _ = split(name)
            sections.at("push.streams", examples.stream, stream, tile.PARAMETERS)
            sections.distinct(f"push.streams.{name}", chosen)
            sections.known(f"push.streams.{name}", "engine", chosen, engines.ENGINES)
        sections.distinct("push.apps", self.apps)
        sections.distinct("push.memories", self.memories)
        for app in self.apps:
            sections.at("push.apps", programs.parse, app)
        for name in self.attention:
            check_workload(config, name)


class Settings(sections.Section, frozen=True):
    """What one case tells. folder: of the files that the rules wrote."""

    folder: str


class Row(rows.Judged, frozen=True, kw_only=True):
    """A mapped app, or a part of what its tiles hold.

    part: ``whole``; ``live``, words that a tile holds of a buffer in a cycle, and the modulus of its
    addresses; ``port``, a buffer's port, and when it is
    in use. last_cycle: of the last output. occupancy: accesses of a tile's memory in a cycle. words: of the outputs.
    ports: reads of buffers that keep words. saved: tiles that registers and sharing save, of one a port. area_um2,
    energy_nj: of cited parameters. wrong_model, wrong_rtl: words that differ from numpy's. asked,
    agreed: tiles that were configured from their streams alone, and those where that gave the same words. map_s,
    run_s: seconds to map the app, and of the model's run. side, name: of a port: in or out, and its signal. first,
    last: its cycles.
    """

    kind: Literal["push"] = "push"
    version: Literal[1] = 1
    app: str = ""
    memory: str = ""
    part: str = ""
    tiles: Count = None
    pes: Count = None
    registers: Count = None
    last_cycle: Count = None
    occupancy: Number = None
    words: Count = None
    ports: Count = None
    saved: Number = None
    area_um2: Number = None
    energy_nj: Number = None
    wrong_model: Count = None
    wrong_rtl: Count = None
    asked: Count = None
    agreed: Count = None
    map_s: Number = None
    run_s: Number = None
    buffer: str = ""
    cycle: Count = None
    live: Count = None
    modulus: Count = None
    side: str = ""
    name: str = ""
    first: Count = None
    last: Count = None


NAMED = "{app} {memory}"


def split(name):
    """``(example, part)`` of a stream's name."""
    stream, _, part = name.rpartition("-")
    return (stream, part) if part in parts.PARTS else (name, "top")


def check_workload(config, name):
    """Raise `ConfigError` for a workload that is not known or has no windows that push memories stream."""
    from tilewright import masks

    known = ("vision_longformer", "regionvit")
    family, _ = sections.at("push.attention", masks.parse, name, config.models.get(name))
    if family.__name__.rpartition(".")[2] not in known:
        raise ConfigError(f"push.attention: expected a workload with windows, of {' or '.join(known)}, found {name!r}")


def cases(config):
    """Each app with each memory."""
    return [f"{app}.{memory}" for app in config.push.apps for memory in config.push.memories]


def settings(config, case):
    """`Settings` of one case."""
    return Settings(FOLDER_OF.format(*case.rsplit(".", 1)))


def sources(settings):
    """The rules' files."""
    return [f"{settings.folder}/{name}" for name in FILES]


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    app, memory = case.rsplit(".", 1)
    return [{"app": app, "memory": memory}]


def modules(row, device):
    """Modules that a row depends on: see `of_app`."""
    return of_app(row["memory"])


def of_app(memory):
    """Dotted names of the modules that a mapped app depends on."""
    found = (f"memories.{memory}", "memories._rtl")
    return ["tilewright_study.stages.push_app", f"{__name__}.apps", *(f"tilewright.pushmem.{name}" for name in found)]


def run(case, settings, how):
    """Yield the rows of a case: of the whole, and of what its tiles hold. Raises `TilewrightError`."""
    from tilewright import devices
    from tilewright_study.stages import push_app as stage

    app, memory = case.rsplit(".", 1)
    folder = Path(settings.folder)
    mapped = artifacts.read_json(folder / "mapped.json", stage.MAPPED, stage.VERSION)
    config = artifacts.read_json(folder / "config.json", stage.CONFIG, stage.VERSION)
    with open(folder / "run.csv", newline="", encoding="utf-8") as stream:
        (said,) = csv.DictReader(stream)
    if [said["app"], said["memory"]] != [app, memory]:
        raise ArtifactError(f"{folder}/run.csv: expected {app} on {memory}, found {said['app']} on {said['memory']}")
    known = {"app": app, "memory": memory, "time": rows.now(), **rows.machine(devices.describe("cpu"))}
    told = [tile["from_stream"] for tile in config["tiles"]]
    asked = [each for each in told if each["verdict"] != stage.NOT_ASKED]
    wrong = {name: said[f"error_words_{name}"] for name in ("model", "rtl")}
    ran = {f"wrong_{name}": int(found) for name, found in wrong.items() if found != "not run"}
    whole = {name: json.loads(said[name]) for name in ("tiles", "pes", "registers", "last_cycle", "occupancy", "words")}
    whole |= {name: json.loads(said[name]) for name in ("ports", "saved", "run_s")}
    whole |= {"area_um2": json.loads(said["area_um2_cited"]), "energy_nj": json.loads(said["energy_nj_cited"])}
    whole |= {"map_s": json.loads(said["compile_s"]), "asked": len(asked), "part": "whole"}
    whole["agreed"] = sum(each["verdict"] == engines.SOLVED for each in asked)
    bad = {"status": "failed", "reason": f"words differ from numpy's: {wrong}"} if any(ran.values()) else {}
    yield known | whole | ran | bad
    for held in sorted(mapped["held"], key=lambda each: -max(each["live"]))[:BUFFERS]:
        shared = known | {"buffer": held["buffer"]}
        for cycle, live in zip(held["cycles"], held["live"], strict=True):
            yield shared | {"part": "live", "cycle": cycle, "live": live, "modulus": held["modulus"]}
        for port in held["ports"]:
            at = {"first": port["first"], "last": port["last"], "words": port["words"]}
            yield shared | at | {"part": "port", "side": port["kind"], "name": port["name"]}


def recorded(rows):
    """What a program takes in all."""
    return [row for row in rows if row["part"] == "whole"]


def remark(row):
    """What the log says of a row that passed."""
    return f"{row['tiles']} tiles, last output in cycle {row['last_cycle']}" if row["part"] == "whole" else None
