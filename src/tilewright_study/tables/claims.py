"""The claims about the experiments of a run: what was expected, the worst that was measured, the verdict and by how
much.

The claims about the experiments of this run: first those not met, then those met, then those whose rows hold no value.
Claims about experiments that were not asked for are left out. "Measured" is the worst case, and "worst case" names it.
The margin says by how much of the expected value the claim is held (above zero) or missed. "Cases" and "not met" count
the cases and the misses. A tie misses a claim to be as fast by less than two standard errors of the two times and by no
more than 5 %; it does not count as a miss. The last rows are the paper's speed-ups (A100) as claims about this device.
"""

import operator

import numpy as np

from tilewright.core.errors import ArtifactError
from tilewright.networks.batching import UNPRUNED
from tilewright.pushmem.streams import DRAIN
from tilewright_study.baselines import sparse as sparse_baselines
from tilewright_study.experiments.accelerator import table_accelerator
from tilewright_study.experiments.attention import (
    table_policy as policy,
)
from tilewright_study.experiments.attention import (
    table_prediction,
    table_speedup,
)
from tilewright_study.experiments.networks import table_end_to_end
from tilewright_study.experiments.orders import table_reorder_time
from tilewright_study.experiments.paths import table_paths as paths
from tilewright_study.experiments.pruned import table_pruned
from tilewright_study.experiments.pruned_accuracy import table_pruned_accuracy
from tilewright_study.experiments.ragged import table_ragged
from tilewright_study.experiments.recall import table_recall
from tilewright_study.experiments.slices import table_slices
from tilewright_study.experiments.stream import table_stream as stream
from tilewright_study.experiments.video import table_video
from tilewright_study.tables import _read, _select

# ``expected/claims.csv`` lists all claims. An id names one of the measures below and, after the colon, its case; the
# column ``experiments`` names the experiments whose rows the claim is about. A run is judged by the claims that are
# about its own rows, and by no others.
SHOWN = {
    "claim": ("claim", ""),
    "relation": ("", ""),
    "expected": ("expected", ",.4g"),
    "measured": ("measured", ",.4g"),
    "unit": ("unit", ""),
    "verdict": ("verdict", ""),
    "margin": ("margin", "+.1%"),
    "where": ("worst case", ""),
    "cases": ("cases", ",.0f"),
    "not_met": ("not met", ",.0f"),
    "ties": ("ties", ",.0f"),
    "device": ("device", ""),
}
# The parts of the table in Markdown, and their order in the report. A check passed or failed: it says that what was
# timed is right, and is not counted among the claims.
VERDICTS = ("not met", "failed", "met", "not measured", "passed")
PARTS = ("verdict", VERDICTS)
# Experiments that claims are about.
EXPERIMENTS = (
    *("attention", "networks", "ragged", "pruned", "slices", "recall", "video", "orders"),
    *("pruned_accuracy", "paths", "stream", "accelerator", "configure", "push", "push_attention", "push_streams"),
)
_CHECKED = {"met": "passed", "not met": "failed"}
_JUDGED = ["measured", "verdict", "margin", "where", "cases", "not_met", "ties", "device"]
_RELATIONS = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "=": lambda found, expected: round(found, _decimals(expected)) == expected,
}


def _decimals(value):
    """Decimals in which a value was claimed."""
    return len(f"{value:.12g}".partition(".")[2])


def asked(config):
    """``{experiment: [paths]}``: the files of rows that `config` asks for, of the experiments that claims are about."""
    files = {name: _select.logs(config, name) for name in EXPERIMENTS}
    return {name: paths for name, paths in files.items() if paths}


def needs(config):
    """The list of claims, the paper's bars and the rows of every experiment that is asked for."""
    files = [path for paths in asked(config).values() for path in paths]
    return [_select.CLAIMS, _select.PAPER_LATENCY, *files] if files else []


def table(inputs):
    """One row per claim about the rows among `inputs`: about experiments and cases that were asked for. Such a claim is
    "not measured" where its rows hold no value. Rows of the heat map and of ``worth``, of which nothing is claimed, may
    be among them.

    ``margin``: by how much of what was expected the claim is held, above zero, or missed. ``cases``: how many there
    are; ``not_met``: how many miss; ``ties``: how many miss a claim to be as fast, but by less than two standard errors
    and no more than `read.MOST_NOISE`, which does not count. A claim to be more than something is held only by more
    than two standard errors. A check, one of `CHECKS`, is ``passed`` or ``failed``. ``device``: where the rows were
    measured.

    Raises `ArtifactError` for a claim of an unknown measure or relation, of zero, or of other experiments than those
    that its measure reads.
    """
    import pandas as pd

    kinds = ("claims", "paper_latency", *EXPERIMENTS, "heatmap", "worth")
    found = _read.sort(inputs, kinds, optional=kinds[2:])
    (frame,) = _read.frames(found["claims"], "claims")
    _check(found["claims"][0], frame)
    devices = {kind: _read.devices(_read.frames(found[kind], kind)[0]) for kind in EXPERIMENTS if found[kind]}
    results, tables = {}, {}
    for row in frame.itertuples():
        measure, _, case = row.id.partition(":")
        kinds, make, values = _MEASURES[measure]
        if not all(found[kind] for kind in kinds):
            continue
        if make not in tables:
            tables[make] = make([path for kind in kinds for path in found[kind]])
        cases = values(tables[make], case)
        if len(cases):
            device = ", ".join(dict.fromkeys(devices[kind] for kind in kinds if kind in devices))
            verdict = _judged(row, cases.dropna(subset="value"))
            if measure in CHECKS:
                verdict["verdict"] = _CHECKED.get(verdict["verdict"], verdict["verdict"])
            results[row.Index] = {**verdict, "device": device}
    judged = pd.DataFrame(list(results.values()), index=list(results), columns=_JUDGED)
    return frame.loc[judged.index].join(judged)[["id", "experiments", *SHOWN]].reset_index(drop=True)


def _check(path, frame):
    """Raise `ArtifactError` for a list of claims that cannot be judged."""
    measures = frame["id"].str.partition(":")[0]
    _read.known(path, "relation", frame["relation"], _RELATIONS)
    _read.known(path, "measure", measures, _MEASURES)
    if (frame["expected"] == 0).any():
        raise ArtifactError(f"{path}: expected values other than 0, of which no share can be missed, found one")
    for row, measure in zip(frame.itertuples(), measures, strict=True):
        expected = [name for name in _MEASURES[measure][0] if name in EXPERIMENTS]
        if row.experiments.split() != expected:
            raise ArtifactError(
                f"{path}: {row.id}: expected the experiments {' '.join(expected)}, found {row.experiments or 'none'}"
            )


def _judged(claim, cases):
    """What the `cases` of a claim come to; a frame of value and noise, indexed by where each was found."""
    if not len(cases):
        blank = {"measured": np.nan, "verdict": "not measured", "margin": np.nan, "where": ""}
        return blank | {"cases": 0, "not_met": 0, "ties": 0}
    above, below = cases["value"] - claim.expected, claim.expected - cases["value"]
    margin = {">": above, ">=": above, "<=": below, "=": -above.abs()}[claim.relation] / abs(claim.expected)
    # More than something is not shown by what may be noise.
    sure = cases["value"] - cases["noise"].fillna(0) * (claim.relation == ">")
    met = sure.map(lambda value: _RELATIONS[claim.relation](value, claim.expected))
    # To be as fast is not refuted by what may be noise, nor shown by what is mostly noise.
    as_fast = claim.relation == ">=" and claim.expected == 1
    tie = ~met & (-margin <= cases["noise"].clip(upper=_read.MOST_NOISE)) & as_fast
    missed = ~met & ~tie
    worst = (margin - missed).argmin()
    return {
        "measured": _rounded(cases["value"].iloc[worst]),
        "verdict": "not met" if missed.any() else "met",
        # A value that is equal in the digits claimed misses nothing.
        "margin": 0.0 if claim.relation == "=" and met.iloc[worst] else _rounded(margin.iloc[worst]),
        "where": str(cases.index[worst]),
        "cases": len(cases),
        "not_met": int(missed.sum()),
        "ties": int(tie.sum()),
    }


def _rounded(value):
    """In six digits, which every platform agrees on."""
    return float(f"{value:.6g}")


def _cases(values, where, noise=np.nan):
    """Values of a claim as `_judged` takes them."""
    import pandas as pd

    return pd.DataFrame({"value": values, "noise": noise}).set_axis(list(where))


def _by_name(frame, column, *names, noise=None):
    where = [" ".join(filter(None, words)) for words in zip(*(frame[name] for name in names), strict=True)]
    return _cases(frame[column], where, np.nan if noise is None else frame[noise])


def _speedup(frame, case):
    return _by_name(frame[frame["model"].str.startswith(case)], "speedup", "model", noise="noise_dense")


def _over_peer(frame, case):
    """Headline over the fastest peer in a form, ``<plan, natural or cold>/<first part of the workload's name>``."""
    form, name = case.split("/")
    suffix = "" if form == "plan" else f"_{form}"
    # A device without a cache that can be emptied times nobody in the cold form.
    if frame[[f"plan_us{suffix}", f"peer_us{suffix}"]].isna().all(axis=None):
        return ()
    rows = frame[frame["model"].str.startswith(name)]
    return _by_name(rows, f"over_peer{suffix}", "model", f"peer{suffix}", noise=f"noise_peer{suffix}")


def _over_rival(policy):
    def values(frame, case):
        """A rival's time over that of a policy's schedule: ``<rival>/median``, or of ``each`` workload and order."""
        rival, what = case.split("/")
        rows = frame[frame["policy"] == policy].dropna(subset=f"over_{rival}")
        if what == "median" and len(rows):
            over = rows[f"over_{rival}"]
            # A median is beyond noise where at least half of its cases are.
            noise = over.median() - (over - rows[f"noise_{rival}"].fillna(0)).median()
            return _cases([over.median()], [f"median of {len(rows)}"], [noise])
        return _by_name(rows, f"over_{rival}", "model", "reorder", noise=f"noise_{rival}")

    return values


def _prediction_error(frame, case):
    """Relative error in percent, the ``median`` or the 90th percentile, ``p90``."""
    errors = 100 * frame["error"].abs()
    value = errors.quantile({"median": 0.5, "p90": 0.9}[case])
    return _cases([value], [f"of {len(errors)} schedules"])


def _passed(column, ours):
    def values(frame, _):
        """Share of our rows that passed their checks, of all that could run, in percent."""
        if not (frame[column] == ours).any():
            return ()
        rows = frame[(frame[column] == ours) & (frame["status"] != "skipped")]
        failed = rows.loc[rows["status"] == "failed", "reason"]
        return _cases([100 * (rows["status"] == "ok").mean()], [next(iter(failed), f"{len(rows)} rows")])

    return values


def _error(*names, error="relative_error", tolerance="tolerance"):
    def values(frame, _):
        """Error over tolerance."""
        frame = frame.assign(ratio=frame[error] / frame[tolerance])
        return _by_name(_with_batch(frame), "ratio", *names)

    return values


def _with_batch(rows):
    return rows.assign(batch=rows["batch"].map("batch {:.0f}".format)) if "batch" in rows else rows


def _end_to_end(suffix):
    """Of the columns of one way of running, see `end_to_end.WAYS`."""

    def values(frame, case):
        """Over an attention, or over the fastest ``peer``, in networks whose names begin so: ``<network>/<peer>``."""
        network, peer = case.split("/")
        rows = frame[frame["network"].str.startswith(network)]
        asked = peer == "peer" or peer in set(rows["attention"])
        # Only a GPU runs graphs.
        if not asked or (suffix and rows[f"best_us{suffix}"].isna().all()):
            return ()
        rows = _with_batch(rows[rows["attention"] == table_end_to_end.OURS])
        named = ["peer" + suffix] if peer == "peer" else []
        return _by_name(rows, f"over_{peer}{suffix}", "network", "batch", *named, noise=f"noise_{peer}{suffix}")

    return values


def _beside_paper(inputs):
    """`end_to_end` with ``paper_speedup``, the paper's best over FlashAttention of the same family and resolution."""
    found = _read.sort(inputs, ("networks", "paper_latency"))
    (paper,) = _read.frames(found["paper_latency"], "paper_latency")
    bars = table_speedup.best_of_paper(_read.paper_speedups(paper)).rename("paper_speedup")
    return table_end_to_end.table(found["networks"]).join(bars, on=["family", "resolution"])


def _paper_network(suffix):
    def values(frame, network):
        """A whole network with one image over the same one with attention to all pairs, as the paper has it. Where that
        was not run, over masked SDPA, which takes no less: a miss over it is a miss, more than that is no value."""
        rows = frame[
            (frame["network"] == network) & (frame["batch"] == 1) & (frame["attention"] == table_end_to_end.OURS)
        ]
        # Only a GPU runs graphs.
        if suffix and rows[f"best_us{suffix}"].isna().all():
            return ()
        full, masked = rows[f"over_full{suffix}"], rows[f"over_dense{suffix}"]
        rows = rows.assign(
            value=full.fillna(masked.where(masked < rows["paper_speedup"])),
            over=full.isna().map({True: "over masked SDPA", False: "over dense attention"}),
        )
        return _by_name(rows, "value", "network", "over")

    return values


def _ragged_over(frame, case):
    """A peer's time over ours, ``<peer>/<fewest images>-<most>``, with six heads; that of the fastest ``peer`` of each
    case with any number of heads."""
    peer, span = case.split("/")
    low, high = map(float, span.split("-"))
    rows = frame[frame["images"].between(low, high) & (frame["provider"] != table_ragged.OURS)]
    if peer == "peer":
        rows = _read.best(rows, table_ragged.KEY, "over_ours").reset_index()
    else:
        rows = rows[(rows["provider"] == peer) & (rows["heads"] == 6)]
    return _at_images(rows, rows["over_ours"])


def _ragged_host(frame, _):
    """The host's time of a call, which a GPU alone leaves to other work."""
    if frame["host_us"].isna().all():
        return ()
    rows = frame[(frame["provider"] == table_ragged.OURS) & (frame["call"] == "attend")]
    return _at_images(rows, rows["host_us"])


def _ragged_floor(frame, case):
    rows = frame[(frame["provider"] == table_ragged.OURS) & (frame["call"] == "attend") & (frame["heads"] == 6)]
    rows = rows[rows["images"] == float(case)]
    return _at_images(rows, 1 / rows["floor_fraction"])


def _at_images(rows, values):
    where = zip(rows["heads"], rows["head_dim"], rows["lengths"], rows["images"], strict=True)
    return _cases(values, [f"{h:.0f}x{d:.0f}, {images:.0f} images of {span}" for h, d, span, images in where])


def _pruned_over(frame, case):
    """Our speed-up over a peer, ``padded``, ``published``, or the best ``dense`` or ``fair`` one, in the same mode:
    ``<mode>/<peer>[/<network>[/<setting>]]``, the mode ``any`` for all."""
    mode, peer, *rest = case.split("/")
    rows = frame[(frame["batching"] == table_pruned.OURS) & ((frame["mode"] == mode) | (mode == "any"))]
    for column, value in zip(("network", "setting"), rest, strict=False):
        rows = rows[rows[column] == value]
    return _at_batch(rows, f"over_{peer}", noise=f"noise_{peer}")


def _pruned_best(frame, case):
    """The greatest speed-up of a case."""
    return _pruned_over(frame, case).nlargest(1, "value")


def _pruned_differ(frame, case):
    """Where images of a batch keep different numbers of tokens, by more than the class token."""
    return _pruned_over(frame[frame["spread"] > 1], case)


def _pack_share(frame, mode):
    rows = frame[(frame["mode"] == mode) & (frame["batching"] == table_pruned.OURS)]
    return _at_batch(rows.assign(percent=100 * rows["pack_share"]), "percent")


def _pruned_logits(frame, case):
    """Largest difference of a logit in the type `case`, of images that kept the same tokens."""
    return _at_batch(frame[frame["dtype"] == case], "max_abs_error")


def _pruned_top1(column):
    def values(frame, _):
        return _at_batch(frame.assign(percent=100 * frame[column]), "percent")

    return values


def _at_batch(rows, column, noise=None):
    return _by_name(_with_batch(rows), column, "network", "setting", "batching", "mode", "batch", noise=noise)


def _at_sparsity(frame, case):
    """The rows of ``<sparsity>/<case>``."""
    sparsity, name = case.split("/")
    return frame[np.isclose(frame["sparsity"], float(sparsity)) & (frame["case"] == name)]


def _slices_over(frame, case):
    """Attention by lists of equal length over the fastest dense one: ``dense/<sparsity>/<case>``."""
    rows = table_slices.attending(_at_sparsity(frame, case.partition("/")[2]))
    return _of_case(rows[rows["lengths"] == "equal"], "speedup")


def _slices_made(frame, case):
    """Attention by lists that are made in each call, over the fastest dense one: ``<predictor>/<sparsity>/<case>``."""
    name, _, case = case.partition("/")
    rows = _at_sparsity(frame, case)
    return _of_case(rows[(rows["chosen_by"] == name) & (rows["call"] == "predict_attend")], "speedup")


def _slices_uneven(frame, _):
    """Pairs a second by uneven lists over those by lists of equal length that keep as many."""
    mine = table_slices.attending(frame)
    key = ["case", "sparsity"]
    equal = mine[mine["lengths"] == "equal"].set_index(key)["useful_gflops"].rename("equal_gflops")
    rows = mine[mine["lengths"] == "uneven"].join(equal, on=key)
    return _of_case(rows.assign(rate=rows["useful_gflops"] / rows["equal_gflops"]), "rate")


def _predict_share(frame, case):
    """Choosing the keys over the fastest dense attention, in percent: ``<predictor>/<case>``."""
    name, case = case.split("/")
    rows = frame[(frame["case"] == case) & (frame["chosen_by"] == name) & (frame["call"] == "predict")]
    return _of_case(rows.assign(percent=100 / rows["speedup"]), "percent")


def _of_case(rows, column):
    where = [f"{case} at {sparsity:.0%}" for case, sparsity in zip(rows["case"], rows["sparsity"], strict=True)]
    return _cases(rows[column], where, rows["noise"] if column == "speedup" else np.nan)


def _of_maps(frame, maps):
    """Rows of one source of maps: the sources are never mixed."""
    return frame[frame["maps"] == (maps or "planted")]


def _recall_ratio(frame, case):
    """Keys that lists of blocks keep over those of slices, both by the exact shares: ``<group>/<recall>`` on planted
    maps, ``<group>/<recall>/<maps>`` on others."""
    group, target, *maps = case.split("/")
    frame = _of_maps(frame, "".join(maps))
    ours = ~frame["provider"].isin(sparse_baselines.BLOCKS)
    rows = frame[(frame["group"] == group) & (frame["chosen_by"] == table_slices.ORACLE) & ours]
    return _by_name(rows[np.isclose(rows["target"], float(target))], "over_slices", "case", "token_order")


def _recall_chosen(frame, case):
    """Keys that the lists of a predictor keep over those by the exact shares: ``<predictor>/<recall>/<maps>``."""
    name, target, maps = case.split("/")
    rows = _of_maps(frame, maps)
    rows = rows[(rows["chosen_by"] == name) & np.isclose(rows["target"], float(target))]
    return _by_name(rows, "over_slices", "case", "token_order")


def _recall_over(frame, maps):
    """Time of the fastest lists of blocks over that of slices, where all keep the same share of attention and are
    chosen by the exact shares, on planted ``<maps>`` or others."""
    rows = table_recall.timed(_of_maps(frame, maps))
    rows = rows[rows["chosen_by"] == table_slices.ORACLE]
    ours = (rows["provider"] == table_slices.OURS) & rows["group"].str.endswith("x1")
    blocks = _read.best(rows[~ours], ["case"])["p50_us"].rename("blocks_us")
    mine = rows[ours & (rows["group"] == table_slices.SLICE)].join(blocks, on="case")
    return _by_name(mine.assign(over=mine["blocks_us"] / mine["p50_us"]), "over", "case")


def _video_over(frame, case):
    """A pass with an attention over one with dense attention, the faster mode of each: ``<attention>/<network>``."""
    name, network = case.split("/")
    rows = frame[(frame["attention"] == name) & (frame["network"] == network)].dropna(subset="p50_us")
    dense = frame[(frame["by"] == "dense") & (frame["network"] == network)]
    if not len(rows):
        return ()
    rows = rows.sort_values("p50_us").head(1)
    return _by_name(rows.assign(over=dense["p50_us"].min() / rows["p50_us"]), "over", "case", "mode")


def _accuracy_whole(frame, network):
    """Top-1 of the network without a pruner, in percent: of the training where it is least."""
    rows = frame[(frame["batching"] == UNPRUNED) & (frame["network"] == network)].head(1)
    return _by_name(rows.assign(percent=100 * rows["least_top1"]), "percent", "network")


def _accuracy_same(frame, network):
    """Share of the crops, in percent, that packed tokens name as padded ones, with every pruner and setting."""
    rows = frame[(frame["batching"] == table_pruned.OURS) & (frame["network"] == network)]
    return _by_name(
        rows.assign(percent=100 * (1 - rows["changed"] / rows["crops"])), "percent", "pruner", "setting", "mode"
    )


def _accuracy_over(frame, case):
    """The greatest speed-up over the network without a pruner, packed, that loses at most so many points of top-1:
    ``<points>/<network>``."""
    points, network = case.split("/")
    rows = frame[
        (frame["batching"] == table_pruned.OURS) & (frame["network"] == network) & (frame["lost"] <= float(points))
    ]
    return _by_name(rows.nlargest(1, "over_unpruned"), "over_unpruned", "pruner", "setting")


def _path_saving(frame, case):
    """The most time, in percent of the full path's, that a path saves on the rung of a case and is at most so many
    points of mean IoU below the full path of `paths.static_alike`: ``<points>/<rung>/<case>``; nothing where even the
    full path is further below. Paths that scenes of ``choice`` rule out are not counted, since no runner picks them,
    nor is folding the full path's decoder, which leaves nothing out."""
    points, rung, name = case.split("/")
    rows = frame[(frame["case"] == name) & (frame["rung"] == rung)]
    if not len(rows):
        return ()
    static = paths.static_alike(frame, rows)
    rows = rows[(rows["kept"] == "yes") | (rows["path"] == rows["full"])]
    decoder = [rows[column].str.extract(r"decoder=(\w+)", expand=False) for column in ("path", "full")]
    rows = rows[decoder[0] == decoder[1]]
    found = rows[100 * (rows["test"] - static) >= -float(points)].nsmallest(1, "time_over")
    if not len(found):
        return _cases([np.nan if np.isnan(static) else 0.0], ["no path"])
    return _by_name(found.assign(saved=100 * (1 - found["time_over"])), "saved", "path")


def _path_error_us(frame, name):
    """The median error of predicted times, in percent, of paths that no model of time was fitted to."""
    rows = frame[(frame["case"] == name) & frame["part"].isin(["seen", "proposed", "every"])].dropna(subset="p50_us")
    error = 100 * (rows["predicted_us"] / rows["p50_us"] - 1).abs()
    return _cases([error.median()], [name]) if len(rows) else ()


def _path_error_points(frame, name):
    """The median error of predicted mean IoU, in points, of paths that were held out in cross-validation."""
    rows = frame[(frame["case"] == name)].dropna(subset="loss_error").drop_duplicates(["rung", "base"])
    return _by_name(rows.assign(error=100 * rows["loss_error"]), "error", "rung", "base")


def _path_plan_s(frame, name):
    """Seconds of all solvers, for all budgets."""
    rows = frame[frame["case"] == name].dropna(subset="plan_seconds").drop_duplicates("rung")
    return _by_name(rows, "plan_seconds", "rung")


def _path_static(frame, name):
    """The least points of mean IoU by which the table of a network is above static ones of equal training at equal
    time, up to its best path or to the full path of that network, whichever is slower."""
    frame = frame[frame["rung"] == "trained"]
    rows = frame[frame["case"] == name]
    if not len(rows):
        return ()
    alike = frame[(frame[paths.ALIKE] == rows[paths.ALIKE].iloc[0]).all(axis=1)]
    # Of every recipe: its times scatter, and the static network of the same size is to be among those compared.
    full = alike[(alike["network"] == rows["network"].iloc[0]) & (alike["path"] == alike["full"])]
    kept = rows[rows["kept"] == "yes"]
    static = paths.static(alike, paths.equal(name))
    both = paths.against_static(kept, static, max(kept["p50_us"].max(), full["p50_us"].max()))
    return _at_time("idxmin", [100 * (both["ours"] - both["theirs"])])


def _path_between(frame, resolution):
    """The most points of mean IoU by which the tables of all networks of a resolution are above static ones of equal
    training at a time between two of these, for each of `paths.ALIKE`. Fronts are steps: what holds at the time of the
    faster holds right after it, too."""
    rows = frame[(frame["resolution"] == resolution) & (frame["rung"] == "trained")]
    groups = rows.groupby(paths.ALIKE, sort=False)
    found = [
        paths.against_static(alike[alike["kept"] == "yes"], paths.static(alike, paths.equal(*alike["case"])))
        for _, alike in groups
    ]
    return _at_time("idxmax", [100 * (both["ours"] - both["theirs"]) for both in (each.iloc[:-1] for each in found)])


def _at_time(which, found):
    """Of each series over microseconds the value at ``idxmin`` or ``idxmax``; none of one that is empty."""
    places = [getattr(values, which)() if len(values) else None for values in found]
    values = [np.nan if place is None else values[place] for values, place in zip(found, places, strict=True)]
    return _cases(values, ["" if place is None else f"at {place:,.0f} µs" for place in places])


def _path_full(frame, name):
    """Points of mean IoU on test scenes that the full path of a case is below that of `paths.static_alike`: what a
    network loses where its training is spent on paths."""
    rows = frame[(frame["case"] == name) & (frame["rung"] == "trained") & (frame["path"] == frame["full"])].head(1)
    return _cases(100 * (paths.static_alike(frame, rows) - rows["test"]), rows["case"]) if len(rows) else ()


def _path_folded(frame, name):
    """Time, in percent of the full path's with the published decoder, that the folded one saves."""
    rows = frame[(frame["case"] == name) & (frame["rung"] == "trained")]
    published = rows[rows["path"] == rows["full"].str.replace("decoder=folded", "decoder=published")]
    full = rows[rows["path"] == rows["full"]]
    return _by_name(full.assign(saved=100 * (1 - full["p50_us"] / published["p50_us"].min())), "saved", "path")


def _path_true_front(frame, name):
    """Share, in percent, of the area below the front of all sets of blocks of a base that is below the front of what
    planners proposed for any base, too: on each rung where all sets were measured.

    On scenes of ``fit``, which planners plan for, and which alone all sets see: random sets are not measured on those
    of ``choice``. The base counts as proposed; a proposal counts if it has a promise, as what a table holds.
    """
    found = {}
    for rung, rows in frame[frame["case"] == name].groupby("rung", sort=False):
        bases = rows.loc[rows["part"] == "every", "base"]
        if len(bases):
            every = rows[rows["base"] == bases.iloc[0]]
            proposed = rows["proposed"].astype(bool) & rows["promise_us"].notna()
            reached = rows[proposed | (rows["path"] == bases.iloc[0])]
            true, ours = (paths.front(these, chosen="fit", seen="fit") for these in (every, reached))
            slowest_us = every["p50_us"].max()
            share = paths.area(true, ours, slowest_us=slowest_us) / paths.area(true, slowest_us=slowest_us)
            found[rung] = 100 * share
    return _cases(list(found.values()), found)


def _path_hypervolume(frame, name):
    """Area below the front of what a solver proposed over that of what greedy did. Solvers but greedy propose the
    same."""
    return _over_greedy(frame, name, lambda by: by not in ("greedy", "second", "searched", "front"))


def _path_searched(frame, name):
    """The same of what a search found from what all of them proposed."""
    return _over_greedy(frame, name, lambda by: by == "searched")


def _over_greedy(frame, name, of):
    """Area below the front of what the first planner ``of(planner)`` proposed over that of what greedy did, on test
    scenes, up to the slowest of both: on each rung, of budgets for which both were measured, as what exceeds
    `proposals` was not."""
    rows = frame[frame["case"] == name]
    rows = rows.assign(by=rows["proposed"].str.split(", ")).explode("by", ignore_index=True)
    rows[["solver", "budget"]] = rows["by"].str.extract(r"(\S+) (\S+)")
    found = {}
    for rung, own in rows.groupby("rung", sort=False):
        planner = next(filter(of, own["solver"].dropna()), None)
        solvers = [own[own["solver"] == solver] for solver in (planner, "greedy")]
        both = set.intersection(*(set(these["budget"]) for these in solvers))
        ours, greedy = np.nan, 0
        if both:
            solvers = [these[these["budget"].isin(both)] for these in solvers]
            slowest_us = max(these["p50_us"].max() for these in solvers)
            ours, greedy = (paths.area(paths.front(these), slowest_us=slowest_us) for these in solvers)
        found[rung] = ours / greedy if greedy else np.nan
    return _cases(list(found.values()), found)


def _stream(column, scale=1):
    def values(frame, case):
        """A column of what one contender did on a trace: ``<trace>/<contender>/<case>``."""
        trace, contender, name = case.split("/")
        rows = frame[(frame["trace"] == trace) & (frame["contender"] == contender) & (frame["case"] == name)]
        rows = rows.dropna(subset=column)
        return _by_name(rows.assign(value=scale * rows[column]), "value", "case", "rung", "trace", "contender")

    return values


def _accelerator_folded(column):
    def values(frame, network):
        """A cost of the whole path, whose decoder is folded, over that of the published one, on every hardware."""
        rows = frame[(frame["network"] == network) & frame["path"].str.endswith(" decoder=published")]
        rows = rows.dropna(subset=column)
        return _by_name(rows.assign(folded=1 / rows[column]), "folded", "hardware")

    return values


def _configured(inputs):
    """Rows of whole streams: those of a component are left out."""
    (frame,) = _read.frames(inputs, "configure")
    return frame[frame["component"].fillna("") == ""]


def _configured_seconds(frame, engine):
    return _by_name(frame[frame["engine"] == engine], "seconds", "stream", "part")


def _configured_exact(frame, _):
    """Share of streams whose configuration gave each word, in model and RTL, also in the cycles behind, in percent."""
    ran = frame[["model_cycles", "rtl_cycles"]].eq(frame["cycles"] + DRAIN, axis=0).all(axis=1)
    exact = ran & (frame["status"] == "ok")
    first = next(iter(frame.loc[~exact, "stream"]), f"{len(frame)} streams")
    return _cases([100 * exact.mean()], [first])


def _configured_layer(frame, case):
    """An objective of what model checking found: ``<objective>/<stream>/<component>``."""
    layer, stream, part = case.split("/")
    rows = frame[(frame["engine"] == "bmc") & (frame["stream"] == stream) & (frame["part"] == part)]
    return _by_name(rows, layer, "stream", "part")


def _pushed(inputs):
    """Rows of whole apps."""
    (frame,) = _read.frames(inputs, "push")
    return frame[frame["part"] == "whole"]


def _streamed(inputs):
    (frame,) = _read.frames(inputs, "push_attention")
    return frame


def _push(column, scale=1):
    def values(frame, case):
        """A column of an app on a memory, ``<app>/<memory>``."""
        app, memory = case.split("/")
        rows = frame[(frame["app"] == app) & (frame["memory"] == memory)].dropna(subset=column)
        return _by_name(rows.assign(value=scale * rows[column]), "value", "app", "memory")

    return values


def _push_exact(frame, _):
    """Share of apps and memories whose every word is numpy's, in model and RTL, in percent."""
    exact = (frame["wrong_model"] == 0) & (frame["wrong_rtl"] == 0)
    first = frame[~exact].head(1)
    where = f"{first['app'].iloc[0]} {first['memory'].iloc[0]}" if len(first) else f"{len(frame)} apps on memories"
    return _cases([100 * exact.mean()], [where])


def _push_attention(column):
    def values(frame, model):
        return _by_name(frame[frame["model"] == model].dropna(subset=column), column, "model")

    return values


def _push_attention_exact(frame, _):
    """Share of workloads whose every query is given the keys of its row, in model and RTL, in percent."""
    counts = frame[["wrong", "conflicts", "queries", "rtl_wrong"]]
    exact = (counts == 0).all(axis=1) & (frame["status"] == "ok")
    return _cases([100 * exact.mean()], [next(iter(frame.loc[~exact, "model"]), f"{len(frame)} workloads")])


def _cut(inputs):
    (frame,) = _read.frames(inputs, "push_streams")
    return frame


def _push_streams_exact(frame, _):
    """Share of orders and tiles whose pieces give each key of T2's blocks and no other, in percent."""
    exact = (frame["wrong"] == 0) & (frame["status"] == "ok")
    first = frame[~exact].head(1)
    named = [f"{row.model} {row.reorder} {row.tile}" for row in first.itertuples()]
    return _cases([100 * exact.mean()], named or [f"{len(frame)} orders and tiles"])


def _workload(column):
    def values(frame, case):
        return _by_name(frame[frame["model"] == case].head(1), column, "model")

    return values


def _gathered(frame, case):
    """Pairs gathered by slices of 64 consecutive rows over dense, under the orders found from the graph alone."""
    rows = frame[(frame["model"] == case) & frame["reorder"].isin(["ic", "hc"])]
    return _by_name(rows, "work_fraction", "model", "reorder")


def _gathered_over_window(frame, case):
    """How much more an order found from the graph alone gathers than the window order, in percent."""
    window = frame[frame["reorder"] == "window"].set_index("model")["work_fraction"]
    rows = frame[frame["reorder"] == case]
    more = 100 * (rows["work_fraction"] / rows["model"].map(window) - 1)
    return _by_name(rows.assign(more=more), "more", "model", "reorder")


def _reorder_s(frame, case):
    order, tokens = case.split("/")
    rows = frame[(frame["reorder"] == order) & (frame["tokens"] >= float(tokens))]
    return _by_name(rows, "seconds", "model", "reorder")


# Measures of whether what was timed is right.
CHECKS = (
    *("bench_error", "bench_passed", "network_error", "network_attention", "network_passed", "ragged_error"),
    *("ragged_passed", "pruned_error", "pruned_passed", "pruned_logits", "slices_error", "slices_passed"),
    *("recall_error", "video_error", "video_whole", "video_passed", "configure_exact", "push_exact"),
    *("push_attention_exact", "push_streams_exact"),
)


def _bench(inputs):
    return _read.bench(_read.frames(inputs, "attention")[0])


# Measure: kinds of files it is made from, the table of them, and the values of a case, each under where it was found.
_MEASURES = {
    "speedup": (("attention", "paper_latency"), table_speedup.table, _speedup),
    "over_peer": (("attention", "paper_latency"), table_speedup.table, _over_peer),
    "tokens": (("attention",), _bench, _workload("tokens")),
    "density": (("attention",), _bench, _workload("density")),
    "bench_error": (("attention",), _bench, _error("model", "provider", "reorder")),
    "bench_passed": (("attention",), _bench, _passed("provider", "tilewright")),
    "network_error": (("networks",), table_end_to_end.table, _error("network", "attention", "batch")),
    "network_attention": (
        ("networks",),
        table_end_to_end.table,
        _error("network", "attention", "batch", error="attention_error", tolerance="attention_tolerance"),
    ),
    "network_passed": (("networks",), table_end_to_end.table, _passed("attention", table_end_to_end.OURS)),
    "ragged_error": (("ragged",), table_ragged.table, _error("lengths", "provider", "call")),
    "ragged_passed": (("ragged",), table_ragged.table, _passed("provider", table_ragged.OURS)),
    "pruned_error": (("pruned",), table_pruned.table, _error("network", "setting", "batching", "mode", "batch")),
    "pruned_passed": (("pruned",), table_pruned.table, _passed("batching", table_pruned.OURS)),
    "end_to_end": (("networks",), table_end_to_end.table, _end_to_end("")),
    "end_to_end_graph": (("networks",), table_end_to_end.table, _end_to_end("_graph")),
    "paper_network": (("networks", "paper_latency"), _beside_paper, _paper_network("")),
    "paper_network_graph": (("networks", "paper_latency"), _beside_paper, _paper_network("_graph")),
    "ragged_over": (("ragged",), table_ragged.table, _ragged_over),
    "ragged_host": (("ragged",), table_ragged.table, _ragged_host),
    "ragged_floor": (("ragged",), table_ragged.table, _ragged_floor),
    "pruned_over": (("pruned",), table_pruned.table, _pruned_over),
    "pruned_best": (("pruned",), table_pruned.table, _pruned_best),
    "pruned_differ": (("pruned",), table_pruned.table, _pruned_differ),
    "pack_share": (("pruned",), table_pruned.table, _pack_share),
    "pruned_logits": (("pruned",), table_pruned.table, _pruned_logits),
    "pruned_top1": (("pruned",), table_pruned.table, _pruned_top1("same_top1")),
    "pruned_top1_all": (("pruned",), table_pruned.table, _pruned_top1("same_top1_all")),
    "slices_error": (("slices",), table_slices.table, _error("case", "provider", "call", "group")),
    "slices_passed": (("slices",), table_slices.table, _passed("provider", table_slices.OURS)),
    "slices_over": (("slices",), table_slices.table, _slices_over),
    "slices_made": (("slices",), table_slices.table, _slices_made),
    "slices_uneven": (("slices",), table_slices.table, _slices_uneven),
    "predict_share": (("slices",), table_slices.table, _predict_share),
    "recall_error": (("recall",), table_recall.table, _error("case", "provider", "group")),
    "recall_ratio": (("recall",), table_recall.table, _recall_ratio),
    "recall_over": (("recall",), table_recall.table, _recall_over),
    "recall_chosen": (("recall",), table_recall.table, _recall_chosen),
    "video_error": (("video",), table_video.table, _error("case", "mode", "attention")),
    "video_whole": (
        ("video",),
        table_video.table,
        _error("case", "mode", "attention", error="whole_error", tolerance="whole_tolerance"),
    ),
    "video_passed": (("video",), table_video.table, _passed("ours", True)),
    "video_over": (("video",), table_video.table, _video_over),
    "accuracy_whole": (("pruned_accuracy",), table_pruned_accuracy.table, _accuracy_whole),
    "accuracy_same": (("pruned_accuracy",), table_pruned_accuracy.table, _accuracy_same),
    "accuracy_over": (("pruned_accuracy",), table_pruned_accuracy.table, _accuracy_over),
    "path_saving": (("paths",), paths.table, _path_saving),
    "path_error_us": (("paths",), paths.measured, _path_error_us),
    "path_error_points": (("paths",), paths.measured, _path_error_points),
    "path_plan_s": (("paths",), paths.measured, _path_plan_s),
    "path_static": (("paths",), paths.table, _path_static),
    "path_between": (("paths",), paths.table, _path_between),
    "path_full": (("paths",), paths.table, _path_full),
    "path_folded": (("paths",), paths.table, _path_folded),
    "path_true_front": (("paths",), paths.measured, _path_true_front),
    "path_hypervolume": (("paths",), paths.table, _path_hypervolume),
    "path_searched": (("paths",), paths.table, _path_searched),
    "stream_missed": (("stream",), stream.table, _stream("missed", 100)),
    "stream_share": (("stream",), stream.table, _stream("oracle_share", 100)),
    "stream_over_one": (("stream",), stream.table, _stream("over_fixed")),
    "stream_over_static": (("stream",), stream.table, _stream("over_static")),
    "stream_pick_us": (("stream",), stream.table, _stream("pick_us")),
    "stream_switch_us": (("stream",), stream.table, _stream("switch_us")),
    "accelerator_decoder": (("accelerator",), table_accelerator.table, _accelerator_folded("decoder_energy_over")),
    "accelerator_whole": (("accelerator",), table_accelerator.table, _accelerator_folded("energy_over")),
    "configure_seconds": (("configure",), _configured, _configured_seconds),
    "configure_exact": (("configure",), _configured, _configured_exact),
    "configure_layer": (("configure",), _configured, _configured_layer),
    "push_exact": (("push",), _pushed, _push_exact),
    "push_tiles": (("push",), _pushed, _push("tiles")),
    "push_cycles": (("push",), _pushed, _push("last_cycle")),
    "push_saved": (("push",), _pushed, _push("saved", 100)),
    "push_streams_exact": (("push_streams",), _cut, _push_streams_exact),
    "push_attention_exact": (("push_attention",), _streamed, _push_attention_exact),
    "push_attention_cycles": (("push_attention",), _streamed, _push_attention("cycles_global")),
    "prediction_error": (("attention",), table_prediction.table, _prediction_error),
    "policy_over": (("attention", "paper_latency"), policy.table, _over_rival("ilp")),
    "tuned_over": (("attention", "paper_latency"), policy.table, _over_rival("tuned")),
    "gathered": (("orders",), table_reorder_time.table, _gathered),
    "gathered_over_window": (("orders",), table_reorder_time.table, _gathered_over_window),
    "reorder_s": (("orders",), table_reorder_time.table, _reorder_s),
}
