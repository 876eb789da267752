"""Stage T2 on files: a graph in, the same in a new order out."""

import resource

from tilewright import graph as graph_file
from tilewright_study import orders, provenance
from tilewright_study.cli import settings


def run(method, graph, output, stated):
    """Write the graph file `graph` in the order `method` to `output`.

    stated: settings of the order, ``key=value`` with values in YAML. The graph's ``meta["reorder"]`` records the
    settings used, the seconds, the work fraction and the peak memory. Raises `TilewrightError`; nothing is written
    then.
    """
    given = settings(stated)
    module, _ = orders.parse(method, given)
    ordered, info = orders.apply(graph_file.load(graph), method, given)
    # ru_maxrss counts KiB on Linux.
    info["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ordered.meta["reorder"] = info
    made_by = {
        "stage": "reorder",
        "parameters": {"method": method, "set": given},
        "inputs": {str(graph): provenance.sha256_file(graph)},
        "code": provenance.code_digest(module, "tilewright.graph"),
        "versions": provenance.versions("numpy", "scipy", "numba"),
    }
    graph_file.save(output, ordered, made_by)
    used = ", ".join(f"{key} {value}" for key, value in info["params"].items())
    print(f"{method}: gathered work {info['work_fraction']:.4g} of dense in {info['seconds']:.2f} s ({used})")
