"""Stage T5 on files: graphs in, a CSV file with the rows of baselines out."""

from tilewright import graph as graph_file
from tilewright.baselines import sparse as sparse_baselines
from tilewright.core import progress, registry
from tilewright.study.experiments import _lock
from tilewright.study.experiments._effort import Effort
from tilewright.study.stages import bench, experiment


def run(
    baselines,
    graph,
    output,
    heads,
    head_dim,
    dtype,
    batch,
    device,
    max_dense_tokens,
    rse,
    min_repetitions,
    max_seconds,
    seed,
    compile_only=False,
):
    """Check and time the `baselines` on a `device` of this kind and write all rows to `output`.

    graph: files of one pattern in several orders. Baselines that work through all pairs take the same time in every
    order: they run in the first one only. compile_only: nothing is timed, `output` lists what was compiled instead.
    Raises `TilewrightError`; nothing is written then.
    """
    from tilewright.study.experiments import _attention

    effort = experiment.checked(Effort(rse, min_repetitions, max_seconds))
    facts = {"heads": heads, "head_dim": head_dim, "dtype": dtype, "batch": batch, "seed": seed, "device": device}
    rows, names, compiled = [], baselines, []
    with _lock.exclusive(device):
        for path in progress.with_progress(graph, "baselines"):
            tokens = _attention.Tokens(graph_file.load(path), **facts)
            if compile_only:
                compiled += _attention.compile_baselines(names, tokens)
                continue
            rows += _attention.run_baselines(names, tokens, effort, max_dense_tokens=max_dense_tokens)
            names = [name for name in names if not _baseline(name).DENSE]
    if compile_only:
        experiment.write_names(output, compiled)
        return
    bench.show(rows)
    experiment.write(output, "attention", rows, device)


def _baseline(name):
    return registry.member(sparse_baselines.__name__, "baseline", name, sparse_baselines.NAMES)
