"""Stage T5 on files: graphs in, a CSV file with the rows of baselines out."""

import itertools

from tilewright import graph as graph_file
from tilewright.core import progress
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.measure import lock
from tilewright_study.measure.effort import Effort
from tilewright_study.stages import bench, experiment


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
    forms=(),
    schedule=None,
):
    """Check and time the `baselines` on a `device` of this kind and write all rows to `output`.

    graph: files of one pattern in several orders. Baselines that work through all pairs take the same time in every
    order: they run in the first one only. forms: pairs of a baseline and a form of it; without one a baseline runs in
    all. schedule: the plan of this file, and of those that it names, takes turns with them. compile_only: nothing is
    timed, `output` lists what was compiled instead.
    Raises `TilewrightError`; nothing is written then.
    """
    from tilewright_study.experiments.attention import run as _attention

    effort = experiment.checked(Effort(rse, min_repetitions, max_seconds))
    facts = {"heads": heads, "head_dim": head_dim, "dtype": dtype, "batch": batch, "seed": seed, "device": device}
    rows, names, chosen = [], baselines, {}
    for name, form in forms:
        chosen.setdefault(name, []).append(form)
    with lock.exclusive(device):
        loaded = map(graph_file.load, progress.with_progress(graph, "baselines"))
        orders = (_attention.Tokens(found, **facts) for found in loaded)
        if compile_only:
            compiled = (_attention.compile_baselines(names, tokens, chosen) for tokens in orders)
            experiment.write_names(output, itertools.chain.from_iterable(compiled))
            return
        plan = None if schedule is None else bench.loaded(schedule, **facts)
        for tokens in orders:
            limits = {"max_dense_tokens": max_dense_tokens, "forms": chosen}
            rows += _attention.run_baselines(names, tokens, effort, **limits, plan=plan)
            names = [name for name in names if not sparse_baselines.member(name).DENSE]
    bench.show(rows)
    experiment.write(output, "attention", rows, device)
