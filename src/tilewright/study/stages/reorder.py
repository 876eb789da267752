"""Stage T2 on files: a graph in, the same in a new order out."""

import resource

from tilewright import graph as graph_file
from tilewright import reorder
from tilewright.core import provenance
from tilewright.study.cli import settings


def run(method, input, output, set):
    """Write the graph file `input` in the order `method`, with the settings `set` (``key=value``, YAML), to `output`.

    The settings used, the seconds, the work fraction and the peak memory go into the graph's ``meta["reorder"]``.
    Raises `TilewrightError`; nothing is written then.
    """
    stated = settings(set)
    module, _ = reorder.parse(method, stated)
    ordered, info = reorder.apply(graph_file.load(input), method, stated)
    # ru_maxrss counts KiB on Linux.
    info["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ordered.meta["reorder"] = info
    made_by = {
        "stage": "reorder",
        "parameters": {"method": method, "set": stated},
        "inputs": {str(input): provenance.sha256_file(input)},
        "code": provenance.code_digest(module.__name__, "tilewright.graph"),
        "versions": provenance.versions("numpy", "scipy", "numba"),
    }
    graph_file.save(output, ordered, made_by)
    used = ", ".join(f"{key} {value}" for key, value in info["params"].items())
    print(f"{method}: gathered work {info['work_fraction']:.4g} of dense in {info['seconds']:.2f} s ({used})")
