"""Stage T2 on files: a graph in, the same in a new order out."""

import resource

import yaml

from tilewright import graph as graph_file
from tilewright import provenance, reorder
from tilewright.errors import ConfigError


def run(method, input, output, set):
    """Write the graph file `input` in the order `method`, with the settings `set` (``key=value``, YAML), to `output`.

    The settings used, the seconds, the work fraction and the peak memory go into the graph's ``meta["reorder"]``.
    Raises `TilewrightError`; nothing is written then.
    """
    settings = dict(_setting(text) for text in set)
    module, _ = reorder.parse(method, settings)
    ordered, info = reorder.apply(graph_file.load(input), method, settings)
    # ru_maxrss counts KiB on Linux.
    info["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ordered.meta["reorder"] = info
    made_by = {
        "stage": "reorder",
        "parameters": {"method": method, "set": settings},
        "inputs": {str(input): provenance.sha256_file(input)},
        "code": provenance.code_digest(module.__name__, "tilewright.graph"),
        "versions": provenance.versions("numpy", "scipy", "numba"),
    }
    graph_file.save(output, ordered, made_by)
    used = ", ".join(f"{key} {value}" for key, value in info["params"].items())
    print(f"{method}: gathered work {info['work_fraction']:.4g} of dense in {info['seconds']:.2f} s ({used})")


def _setting(text):
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ConfigError(f"--set {text}: expected KEY=VALUE")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}: expected a YAML value: {error}") from error
