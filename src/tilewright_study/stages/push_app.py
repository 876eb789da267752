"""An app of push memories, or a program of one's own, mapped, configured and run against numpy: the command's function.

``map_app`` writes ``mapped.json``, ``configure_app`` writes ``config.json``, ``run_app`` writes ``run.csv``, all in one
folder.
"""

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from tilewright.core import artifacts, registry
from tilewright.core.errors import ArtifactError, ConfigError, TilewrightError
from tilewright.pushmem import configuration, dsl, mapping, memories, netlist, recurrence, simulate, storage
from tilewright_study.experiments.push import apps
from tilewright_study.stages import own_program

STEPS = ("map", "configure", "run")
VERSION = 3
# Of a tile whose stream is no example, see `configuration.from_streams`.
NOT_ASKED = "not asked"
# Points of a buffer's live words that are told.
POINTS = 64
MAPPED, CONFIG = "push mapping", "push app configuration"
# Parameters of a tile that stores 3 × 3 lines, in 16 nm: "Unified Buffer", ACM TACO 2023, Table 5. Nothing here was
# measured by this project.
AREA_UM2 = {"pub": 13_700, "dp": 16_700}
ENERGY_PJ = {"pub": 2.5, "dp": 3.6}


def mapped_document(mapped: mapping.Mapped) -> dict:
    """Start cycles, wires, registers and tiles."""
    plan, wiring = mapped.schedule, mapped.wiring
    return {
        "starts": plan.starts,
        "strides": {n: list(s) for n, s in plan.strides.items()},
        "last_cycle": plan.last_cycle,
        "wires": [{"statement": s, "read": k, "signal": w} for (s, k), w in wiring.wires.items()],
        "delays": [dataclasses.asdict(d) for d in wiring.delays],
        "taps": [dataclasses.asdict(t) for t in wiring.taps],
        "tiles": [
            {"memory": t.memory, "buffers": list(t.buffers), "sources": list(t.sources), "targets": list(t.targets)}
            | ({} if t.chain is None else {"chain": dataclasses.asdict(t.chain)})
            for t in mapped.tiles
        ],
        "pes": mapped.pes,
        "registers": mapped.registers,
        "held": [_held(use) for use in mapped.wiring.uses],
    }


def _held(use):
    """What a tile holds of a buffer: live words over time, at most `POINTS`; the modulus at which addresses may
    wrap; when each of its ports is in use."""
    addresses, born = use.write.addresses.astype(np.int64), use.write.times.astype(np.int64)
    reads = [read for _, read in use.reads]
    # Words by address, then by cycle: a layout that has wrapped writes an address many times.
    order = np.lexsort((born, addresses))
    far = 1 + max(int(each.times.max()) for each in (use.write, *reads))
    known, last = addresses[order] * far + born[order], born[order].copy()
    for read in reads:
        taken = np.ones(len(read.times), bool) if read.live is None else read.live
        at, cycle = read.addresses[taken].astype(np.int64), read.times[taken].astype(np.int64)
        # A word that is written in the cycle of a read is not what it takes.
        word = np.searchsorted(known, at * far + cycle) - 1
        there = (word >= 0) & (addresses[order][word] == at)
        np.maximum.at(last, word[there], cycle[there])
    ends = np.sort(last)
    cycles = np.unique(np.linspace(int(use.write.times[0]), int(ends[-1]), POINTS).astype(np.int64))
    begun = np.searchsorted(np.sort(born), cycles, side="right")
    live = begun - np.searchsorted(ends, cycles)
    ports = [("in", use.source, use.write), *(("out", target, read) for target, read in use.reads)]
    return {
        "buffer": use.buffer,
        "cycles": cycles.tolist(),
        "live": live.tolist(),
        "modulus": storage.modulus(addresses[order], born[order], last),
        "ports": [
            {
                "kind": kind,
                "name": name,
                "first": int(each.times[0]),
                "last": int(each.times[-1]),
                "words": len(each.times),
            }
            for kind, name, each in ports
        ],
    }


def map_app(
    app: str,
    memory: str,
    folder: str | Path,
    made_by: dict[str, Any] | None = None,
    outputs: Sequence[dsl.Source] | None = None,
) -> mapping.Mapped:
    """The mapped app, e.g. ``gaussian-64``, or the program with these `outputs`, whose files are written to `folder`.

    Raises `TilewrightError`.
    """
    mapped = mapping.compile(apps.program(app) if outputs is None else outputs, memory)
    told = {"app": app, "memory": memory}
    artifacts.write_json(Path(folder) / "mapped.json", MAPPED, VERSION, told | mapped_document(mapped), made_by)
    return mapped


def mapped_app(app: str, memory: str, folder: str | Path, outputs: Sequence[dsl.Source]) -> mapping.Mapped:
    """The mapped app of a folder that `map_app` wrote to. It is compiled again.

    Raises `ArtifactError` for another app, and where today's code maps it otherwise than the files say.
    """
    said = artifacts.read_json(Path(folder) / "mapped.json", MAPPED, VERSION)
    if [said["app"], said["memory"]] != [app, memory]:
        raise ArtifactError(f"{folder}: expected {app} on {memory}, found {said['app']} on {said['memory']}")
    mapped = mapping.compile(outputs, memory)
    if json.loads(json.dumps(mapped_document(mapped))) != {key: said[key] for key in mapped_document(mapped)}:
        raise ArtifactError(
            f"{folder}/mapped.json: expected the mapping that this code makes, found another; run --step map again"
        )
    return mapped


def _told(found):
    """What the configurator said of a tile."""
    return {"verdict": found.verdict, "verified": found.verified}


def configure_app(
    mapped: mapping.Mapped, memory: str, folder: str | Path, made_by: dict[str, Any] | None = None
) -> dict:
    """Write each tile's configuration in closed form with its registers, and what the configurator says."""
    begin = perf_counter()
    tiles = []
    found = configuration.from_streams(mapped)
    for tile, one, other in zip(mapped.tiles, configuration.configurations(mapped), found, strict=True):
        tiles.append(
            {
                "controllers": {name: each.document() for name, each in one.controllers.items()},
                "registers": recurrence.registers(one, tile.member) | configuration.place(tile),
                "from_stream": {"verdict": NOT_ASKED} if other is None else _told(other),
            }
        )
    body = {"memory": memory, "tiles": tiles, "seconds": perf_counter() - begin}
    artifacts.write_json(Path(folder) / "config.json", CONFIG, VERSION, body, made_by)
    return body


def run_app(
    app: str,
    mapped: mapping.Mapped,
    memory: str,
    folder: str | Path,
    hardware: bool = True,
    outputs: Sequence[dsl.Source] | None = None,
    images: Sequence[str] = (),
    definition: str | None = None,
) -> dict:
    """Run words through the model and the RTL, and write one row of measures.

    error words of the RTL are ``not run`` where `hardware` is False. images: of inputs, see `own_program.words`; others
    are random. definition: in NumPy, ``FILE.py:NAME``, whose words are expected, too. Of a program of one's own, the
    words of each output are written, ``<stage>.npy``.
    """
    stages = dsl.stages(apps.program(app) if outputs is None else outputs)
    data = own_program.words(stages, images)
    run, priced = simulate.run(mapped, data), cost(mapped, memory)
    row = {
        "app": app,
        "memory": memory,
        "tiles": len(mapped.tiles),
        "pes": mapped.pes,
        "registers": mapped.registers,
        "last_cycle": run.last_cycle,
        "occupancy": run.sram_accesses / max(1, len(mapped.tiles)) / (run.last_cycle + 1),
        "words": run.words,
        "ports": priced.ports,
        "saved": priced.saved,
        "area_um2_cited": priced.area_um2,
        "energy_nj_cited": priced.energy_nj,
        "error_words_model": simulate.differing_words(mapped, stages, data, run.outputs),
        "error_words_rtl": "not run",
        "compile_s": mapped.seconds,
        "run_s": run.seconds,
    }
    if hardware:
        row["error_words_rtl"] = simulate.differing_words(mapped, stages, data, netlist.run(mapped, data))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(row), lineterminator="\n")
    writer.writeheader()
    writer.writerow(row)
    artifacts.write_text(Path(folder) / "run.csv", text.getvalue())
    if outputs is not None:
        arrays = simulate.whole_arrays(mapped, stages, run.outputs)
        for name, words in arrays.items():
            with artifacts.atomic(Path(folder) / f"{name}.npy") as temporary, open(temporary, "wb") as stream:
                np.save(stream, words)
        if definition is not None and (text := own_program.differing(definition, stages, data, arrays)):
            raise TilewrightError(f"{app} on {memory}: {text}")
    return row


@dataclass(frozen=True)
class Cost:
    """area_um2: of all memory tiles. energy_nj: of all words that tiles deliver. ports: reads of all buffers that keep
    words, a tile each without registers. saved: the share of these tiles that shift registers and sharing save.
    """

    area_um2: int
    energy_nj: float
    ports: int
    saved: float


def cost(mapped: mapping.Mapped, memory: str) -> Cost:
    """The `Cost` of a mapped program."""
    words = sum(len(stream.times) for use in mapped.wiring.uses for _, stream in use.reads)
    plan = mapped.schedule
    stored = {e.buffer for e in plan.edges if plan.distance(e) != (0, 0)}
    ports = sum(e.buffer in stored for e in plan.edges)
    saved = 1 - len(mapped.tiles) / ports if ports else 0.0
    return Cost(AREA_UM2[memory] * len(mapped.tiles), ENERGY_PJ[memory] * words / 1e3, ports, saved)


def run(app, memory, step, rtl, output, program=None, size=None, image=None, definition=None):
    """Write ``mapped.json`` (map), ``config.json`` (configure) and ``run.csv`` (run) to the folder `output`: all of
    them, or that of one step, which reads what the first one wrote.

    Raises `TilewrightError`, also where a word differs from numpy's.
    """
    registry.check("memory", memory, memories.NAMES)
    if (app is None) == (program is None):
        raise ConfigError(f"expected either --app or --program, found {'both' if app else 'neither'}")
    if program is None:
        own = {"--size": size, "--image": image, "--numpy": definition}
        if given := [flag for flag, value in own.items() if value is not None]:
            raise ConfigError(f"{', '.join(given)}: for --program only; leave out with --app")
        outputs = None
    else:
        outputs = own_program.outputs(program, size)
        app = Path(program).name if size is None else f"{Path(program).name}-{size}"
    if step in (None, "map"):
        mapped = map_app(app, memory, output, outputs=outputs)
    else:
        mapped = mapped_app(app, memory, output, apps.program(app) if outputs is None else outputs)
    if step in (None, "configure"):
        configure_app(mapped, memory, output)
    if step not in (None, "run"):
        return
    row = run_app(app, mapped, memory, output, rtl, outputs, image or (), definition)
    wrong = [row["error_words_model"], *([row["error_words_rtl"]] if rtl else [])]
    if any(wrong):
        raise TilewrightError(f"{app} on {memory}: expected the words of numpy, found {max(wrong)} that differ")
    told = "RTL: 0 words differ" if rtl else "RTL: not run"
    print(
        f"{app} on {memory}: {row['tiles']} tiles, {row['pes']} PEs, {row['registers']} registers, last output in "
        f"cycle {row['last_cycle']}; 0 of {row['words']} words differ; {told}"
    )
