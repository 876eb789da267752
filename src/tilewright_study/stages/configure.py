"""Configuration of memory tiles, of their parts, and of any designs: the command's function."""

import sys
from time import perf_counter

from tilewright.core import artifacts, deadline
from tilewright.core.errors import ConfigError
from tilewright.pushmem import configuration_file, memories, parts, recurrence, solve, streams
from tilewright_study.experiments.push import examples

# Of a file that says why there is no configuration.
KIND, VERSION = "push explanation", 1
# Objectives in words.
LAYERS = {"levels": "loops", "extents": "iterations", "strides": "strides", "starts": "starts"}
CODES = {"solved": 0, "infeasible": 2, "unknown": 3}


def run(
    stream, component, memory, engine, layers, fix, monolithic, time_limit, system, example, verify, write_stream,
    output, for_all=None, cycles=None, always=False, **design,
):  # fmt: skip
    """See ``configure.py --help``. Exits with 2 for no configuration, with 3 for a search without an answer.

    Raises `TilewrightError`.
    """
    if (output is None) == (verify is None):
        raise ConfigError(f"expected --output or --verify, found {'neither' if output is None else 'both'}")
    if time_limit is not None and not time_limit >= 0:
        raise ConfigError(f"--time-limit: expected seconds, at least 0, found {time_limit}")
    of_tiles = {"--stream": stream, "--component": component, "--memory": memory, "--engine": engine}
    of_tiles |= {"--layers": layers, "--monolithic": monolithic or None, "--write-stream": write_stream}
    of_designs = {"--solve": design["solve"], "--example": example, "--least": design["least"]}
    of_designs |= {"--for-all": for_all}
    of_search = {"--engine": engine, "--layers": layers, "--least": design["least"], "--fix": fix}
    of_search |= {"--time-limit": None if monolithic or for_all else time_limit}
    of_runs = {"--cycles": cycles, "--always": always or None}
    for given, others, what in (
        (system is not None, of_tiles, "apply to tiles; leave them out with --system"),
        (system is None, of_designs, "apply to designs; add --system"),
        (verify is not None, of_search, "apply to a search; leave them out with --verify"),
        (for_all is None, of_runs, "apply to statements for all inputs; add --for-all"),
        (engine == "fit", {"--layers": layers, "--monolithic": monolithic or None}, "apply to the engine bmc"),
    ):
        if given and (flags := [flag for flag, value in others.items() if value is not None]):
            raise ConfigError(f"{', '.join(flags)}: {what}")
    component, memory, engine = component or "top", memory or "pub", engine or "auto"
    layers = 4 if layers is None else layers
    if system is not None:
        if for_all is not None:
            asked = {"trace": example, "cycles": cycles or 0, "always": always, "limit_s": time_limit}
            return _for_all(system, design["solve"], for_all, verify, output, design["least"] or (), fix, asked)
        return _design(system, design["solve"], example, verify, output, design["least"] or (), fix, time_limit)
    if stream is None:
        raise ConfigError("expected --stream CSV, or --system DESIGN with --solve and --example, found neither")
    if component not in streams.PARTS:
        raise ConfigError(f"--component: unknown {component!r}; known: {', '.join(streams.PARTS)}")
    if not 0 <= layers <= len(solve.LAYERS):
        raise ConfigError(f"--layers: expected 0 to {len(solve.LAYERS)}, found {layers}")
    tile = memories.member(memory)
    end = None if time_limit is None else perf_counter() + time_limit
    asked = read(stream, component, tile)
    if write_stream is not None:
        streams.write(write_stream, asked)
    if verify is not None:
        known, _ = configuration_file.read(verify)
        known.check(tile)
        by = solve.verified(known, asked, tile)
        if monolithic:
            by["one question"] = solve.asserted(known, asked, tile, limit_s=time_limit)
        _say(f"{verify}: gives {stream}; {_verified(by)}")
        return None
    known = None if fix is None else configuration_file.read(fix)[0]
    found = solve.solve(
        asked, tile, engine=engine, depth=layers, known=known, monolithic=monolithic, limit_s=deadline.left(end)
    )
    told = {
        "stream": str(stream),
        "component": component,
        "cycles": len(asked),
        "verdict": found.verdict,
        **found.told(),
    }
    if found.configuration is not None:
        configuration_file.write(output, found.configuration, told)
        numbers = "".join(f", {LAYERS[layer]} {number}" for layer, number in found.layers.items())
        _say(f"{stream}: {found.engine}, {_verified(found.verified)}{numbers}")
        return None
    cause = found.cause or {"cause": "time", "text": "the time limit ended the search"}
    artifacts.write_json(output, KIND, VERSION, {**told, "memory": memory, "explanation": cause})
    return _end(found.verdict, f"{stream}: {found.verdict}: {cause['text']}")


def read(stream, component, tile):
    """The `Stream` of a file, or of an example by its name; of a component in the latter's own schedule by `fit`."""
    if str(stream).endswith(".csv"):
        return streams.read(stream, component, tile.PARAMETERS)
    whole = examples.stream(str(stream), tile.PARAMETERS)
    if component == "top":
        return whole
    solve.check_part(component, tile)
    found = solve.solve(whole, tile, engine="fit", hardware=False)
    if found.configuration is None:
        raise ConfigError(f"{stream}: the tile cannot give this stream: {found.cause['text']}")
    ran = tile.run(recurrence.fired(found.configuration, tile, len(whole)), whole.data_in[:, :, 0])
    return parts.of_run(component, whole, ran)


def _design(system, solved_for, example, verify, output, least, fix, limit_s):
    from tilewright.pushmem.configure import design

    if solved_for is None or example is None:
        raise ConfigError("--system: missing --solve REGEX or --example CSV")
    if verify is not None:
        return _say(f"{verify}: gives {example}; {design.verify(system, solved_for, example, verify)} cycles")
    answer = design.run(system, solved_for, example, output, least=least, fix=fix, limit_s=limit_s)
    said = f": {answer.cause.text()}" if answer.cause else ""
    said += "".join(f", {name} {number}" for name, number in answer.layers.items())
    said += "" if answer.complete or answer.verdict != "solved" else "; not known to be least: the time is over"
    return _end(answer.verdict, f"{system}: {answer.verdict}{said}")


def _for_all(system, solved_for, free, verify, output, least, fix, asked):
    from tilewright.pushmem.configure import design

    told = {"--solve": solved_for, "--cycles": asked["cycles"], "--example": asked["trace"]}
    if solved_for is None or bool(asked["cycles"]) == (asked["trace"] is not None):
        found = ", ".join(name for name, value in told.items() if value) or "none"
        raise ConfigError(f"--for-all: expected --solve and one of --cycles and --example, found {found}")
    if verify is not None:
        answer = design.verify_for_all(system, solved_for, free, verify, **asked)
    else:
        answer = design.run_for_all(system, solved_for, free, output, least=least, fix=fix, **asked)
    said = f": {answer.why}" if answer.why else ""
    said += "".join(f", {name} {number}" for name, number in answer.layers.items())
    if answer.verdict == "solved":
        said += ", for all cycles" if answer.depth else f", for the first {answer.cycles} cycles"
    said += f"; {answer.rounds} counterexample{'s' * (answer.rounds != 1)}" + "".join(
        f"; {n}: {each}" for n, each in answer.confirmed.items()
    )
    return _end(answer.verdict, f"{verify or system}: {answer.verdict}{said}")


def _verified(by):
    return "verified by " + ", ".join(
        f"the {what.replace('rtl', 'RTL')} over {cycles} cycles" if isinstance(cycles, int) else f"{what}: {cycles}"
        for what, cycles in by.items()
    )


def _say(line):
    print(line, flush=True)


def _end(verdict, line):
    _say(line)
    if CODES[verdict]:
        sys.exit(CODES[verdict])
