"""Memory tiles configured from example streams: what each engine found, how long it took, and what verified it.

The rule `configure` writes a configuration for each stream and engine; the rows tell what these files say.
"""

import json
from typing import Literal

from tilewright.core import artifacts
from tilewright.core.errors import ConfigError
from tilewright.pushmem import configuration_file as of_tiles
from tilewright.pushmem import solve as engines
from tilewright_study import sections
from tilewright_study.experiments import push
from tilewright_study.experiments.push import split
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Number

TABLES = ("configure",)
FIGURES = ("configure_time",)

SECTION, Section = "push", push.Section
WRITTEN = "results/push/streams/{}.json"


class Settings(sections.Section, frozen=True):
    """What one case tells. written: the file of the rule `configure`; memory: whose tile it configures."""

    written: str
    memory: str


class Row(rows.Judged, frozen=True, kw_only=True):
    """A configured stream, or a component of its solution.

    stream, part: what went in and came out. engine: that was asked for; solved_by: that found it. component: blank for
    all together, else a controller or a part, whose ``seconds`` are those of bmc. first: seconds to the first
    configuration, of a component. cycles: of the stream. levels, extents, strides, starts: the published objectives, of
    the whole configuration. model_cycles, rtl_cycles: that were run and compared; rtl: why the RTL was not run.
    """

    kind: Literal["configure"] = "configure"
    version: Literal[1] = 1
    stream: str = ""
    part: str = ""
    memory: str = ""
    engine: str = ""
    solved_by: str = ""
    component: str = ""
    cycles: Count = None
    seconds: Number = None
    first: Number = None
    levels: Count = None
    extents: Count = None
    strides: Count = None
    starts: Count = None
    model_cycles: Count = None
    rtl_cycles: Count = None
    rtl: str = ""


NAMED = "{stream} {part} {engine} {component}"


def cases(config):
    """Each stream with each engine, as the rule's files are named."""
    return [f"{stream}.{engine}" for stream, chosen in config.push.streams.items() for engine in chosen]


def settings(config, case):
    """`Settings` of one case."""
    return Settings(WRITTEN.format(case), config.push.memory)


def sources(settings):
    """The rule's file."""
    return [settings.written]


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    stream, engine = case.rsplit(".", 1)
    return [{"stream": split(stream)[0], "engine": engine, "memory": settings.memory}]


def modules(row, device):
    """Modules that a row depends on: see `of_stream`."""
    return of_stream(row["memory"])


def of_stream(memory):
    """Dotted names of the modules that the configuration of an example stream depends on."""
    found = ("solve", "bmc", f"memories.{memory}", "memories._rtl")
    return ["tilewright_study.experiments.push.examples", *(f"tilewright.pushmem.{name}" for name in found)]


def run(case, settings, how):
    """Yield the rows of a case: of the whole, and of each component that bmc solved. Raises `TilewrightError`."""
    from tilewright import devices

    with open(settings.written, encoding="utf-8") as stream:
        kind = json.load(stream).get("kind")
    if kind not in (of_tiles.KIND, "push explanation"):
        raise ConfigError(f"{settings.written}: expected a configuration, found {kind!r}")
    document = artifacts.read_json(settings.written, kind, 1)
    name, _, engine = case.rpartition(".")
    stream, part = split(name)
    known = {"stream": stream, "part": part, "memory": document["memory"], "engine": engine}
    known |= {"cycles": document["cycles"], "solved_by": document["engine"], "time": rows.now()}
    known |= rows.machine(devices.describe("cpu"))
    seconds = document["seconds"]
    whole = sum(spent for name, spent in seconds.items() if "." not in name)
    if document["verdict"] != engines.SOLVED:
        reason = f"{document['verdict']}: {document['explanation']['text']}"
        yield known | {"status": "failed", "reason": reason, "seconds": whole}
        return
    ran = document["verified"]["rtl"]
    checks = {"model_cycles": document["verified"]["model"], "rtl_cycles": ran if isinstance(ran, int) else None}
    yield known | document["layers"] | checks | {"seconds": whole, "rtl": "" if isinstance(ran, int) else ran}
    for component, spent in seconds.items():
        if "." not in component and component != "fit":
            first = seconds.get(f"{component}.first")
            yield known | {"component": component, "seconds": spent, "first": first}


def remark(row):
    """What the log says of a row that passed."""
    return f"{row['seconds']:.2f} s"
