"""Stage T1 on files: a workload's name in, its graph out."""

from tilewright import graph as graph_file
from tilewright import masks
from tilewright.core import images
from tilewright.core.errors import ConfigError
from tilewright_study import provenance
from tilewright_study.cli import settings

# Model names of the published artifact (github.com/KLab-AI3/ipdps-26_vit).
# ASSUME: the artifact names a model without variant, size and stage. Its own scripts run the smallest variants at 224
# pixels; stage 1 is the sparse stage with the most tokens. Its README and its folders spell two names differently.
PUBLISHED = {
    "VisionLongformer": "vil-tiny-224-s1",
    "RegionViT": "regionvit-tiny-224-s1",
    "RegionVit": "regionvit-tiny-224-s1",
    "DynamicViT": "dynamicvit-s-224",
    "DynamicVit": "dynamicvit-s-224",
}


def run(model, output, stated, known=False):
    """Write the graph of the workload `model` to `output`.

    stated: parameters beyond the name, ``key=value`` with values in YAML. known: list the names of workloads and
    photographs instead. Raises `TilewrightError`; nothing is written then.
    """
    if known:
        _list()
        return
    if output is None:
        raise ConfigError("--output: expected the graph file to write, found none")
    model, overrides = PUBLISHED.get(model, model), settings(stated)
    module, params = masks.parse(model, overrides)
    graph = masks.build(model, overrides)
    made_by = {
        "stage": "graph",
        "parameters": graph.meta["params"],
        "inputs": {path: provenance.sha256_file(path) for path in masks.sources(module, params)},
        "code": provenance.code_digest(module.__name__, "tilewright.graph"),
        "versions": provenance.versions("numpy", "scikit-image", "pillow"),
    }
    graph_file.save(output, graph, made_by)
    rows, cols = graph.shape
    print(
        f"{model}: {rows} x {cols} tokens, {graph.entries:,} entries, density {graph.density:.4g}, "
        f"{graph.n_distinct} distinct rows"
    )


def _list():
    print("workloads:", *(module.NAMING for module in masks.members()), sep="\n  ")
    print("names of the published artifact:")
    for name, workload in PUBLISHED.items():
        print(f"  {name}: {workload}")
    print("photographs:")
    for name, photograph in images.PHOTOGRAPHS.items():
        width, height = photograph.size
        print(f"  {name}: {width}x{height}, {photograph.licence}, {photograph.credit}")
