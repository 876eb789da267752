"""Paths of a network, measured: single skips and random sets first, then what the models of these propose."""

import itertools
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from tilewright import devices, networks
from tilewright.core import weight_files
from tilewright.paths import calls, table
from tilewright_study import scenes
from tilewright_study.experiments.paths import budgets_for, measure, texts
from tilewright_study.measure.rows import machine, now
from tilewright_study.planning import accuracy, block_sets, latency, program, search, surrogate
from tilewright_study.planning import layers as counted

# Why a path is measured, the first that holds.
PARTS = ("base", "single", "drawn", "seen", "earlier", "proposed", "every", "alone")
# A search plans for so many budgets where others plan for one: the front of what is predicted has paths between.
FINER = 8
# What proposed such a path.
FRONT = "front"
# Those that are measured on scenes of ``choice`` whether or not they are proposed.
CHOSEN = ("base", "single", "every", "alone")


@dataclass
class Bench:
    """A network with its weights on a device, scenes, and what was measured of its paths.

    seen: ``{(rung, split, path): mean IoU}``; times_us: ``{path: microseconds}``; own: decoders by path; wrong:
    ``{path: why}`` of those that gave other maps where they were timed.
    """

    case: str
    settings: object
    how: object

    def __post_init__(self):
        stated, how = self.settings.network, self.how
        self.device = devices.describe(how.device)
        place = devices.facts(how.device).TORCH_DEVICE
        self.source = scenes.stated(self.settings.data)
        family, options = networks.parse(stated.network)
        classes = len(self.source.classes)
        made = networks.create(family, checkpoint=stated.file, num_classes=classes, **options)
        self.network = made.to(place).to(getattr(torch, how.dtype)).eval()
        self.options = self.network.options
        counts = {split: getattr(self.settings, split) for split in ("fit", "choice", "test", "novel")}
        counts = {split: count for split, count in counts.items() if count}
        self.scenes = measure.Scenes(self.source, counts, self.options.pixels, place)
        self.images = self.scenes.kept["fit"][0][: self.settings.batch].to(getattr(torch, how.dtype))
        if len(self.images) < self.settings.batch:
            self.images = self.images.repeat(self.settings.batch, 1, 1, 1)[: self.settings.batch]
        self.seen, self.times_us, self.own, self.wrong = {}, {}, {}, {}
        self.bases = texts(self.options, self.settings.bases)
        self.alone = texts(self.options, self.settings.alone)
        if self.images.is_cuda:
            networks.choose_kernels(self.network, self.images, [*self.bases, *self.alone])
        self.digest = weight_files.digest(stated.file)

    @property
    def called(self):
        """How `Calls` are made."""
        return {"batch": self.settings.batch, "compiled": self.settings.compiled}

    def folded(self, rung, path):
        """The decoder of a path on a rung; None for the network's own."""
        if rung == "trained":
            return None
        if path not in self.own:
            self.own[path] = self.scenes.own(self.network, "fit", path)
        return self.own[path]

    def see(self, rung, split, wanted):
        """``{path: mean IoU}``, each measured once."""
        wanted = list(wanted)
        if missing := [path for path in wanted if (rung, split, path) not in self.seen]:
            own = {path: self.folded(rung, path) for path in missing}
            found = self.scenes.mean_ious(self.network, split, missing, own)
            self.seen |= {(rung, split, path): value for path, value in found.items()}
        return {path: self.seen[rung, split, path] for path in wanted}

    def time(self, wanted):
        """Microseconds of paths, measured in turns with those of this call.

        From one call to the next a processor's clock changes, and how many others share the caches. The bases and the
        single skips of the first one are timed again in each, since one path alone tells little of that, and times
        are stated as they would be beside those of the first call.
        """
        wanted = [path for path in dict.fromkeys(wanted) if path not in self.times_us]
        if wanted and not self.wrong:
            effort = self.how.effort(self.settings.max_seconds).limits
            known = [path for path in (*self.bases, *block_sets.singles(self.bases[0])) if path in self.times_us]
            checked = {"images": self.images, "wrong": self.wrong}
            found = measure.times(self.network, [*known, *wanted], **checked, **self.called, **effort)
            if self.wrong:
                return
            slower = np.exp(np.mean([np.log(found[path] / self.times_us[path]) for path in known])) if known else 1.0
            self.times_us |= {path: float(found[path] / slower) for path in wanted}


def run(case, settings, how):
    """Yield the rows of `case`: all paths that were measured, on each rung."""
    bench = Bench(case, settings, how)
    measured, times = {}, {}
    for at, base in enumerate(bench.bases):
        measured[base] = {base: "base"} | dict.fromkeys(block_sets.singles(base), "single")
        # Other sets for each base: what one says of a set, it says of the others, too.
        drawn = block_sets.drawn(base, settings.drawn, (how.seed, at))
        measured[base] |= dict.fromkeys(drawn[: settings.timed], "drawn")
        measured[base] |= dict.fromkeys(drawn[settings.timed :], "seen")
    # Together, as proposals are later: in turns with few others a path finds more of itself in the caches.
    bench.time(path for parts in measured.values() for path, part in parts.items() if part != "seen")
    if bench.wrong:
        yield from _refuted(bench)
        return
    for base, parts in measured.items():
        times[base] = latency.model(base, {path: bench.times_us[path] for path in parts if path in bench.times_us})
    for last in [False] * (settings.rounds - 1) + [True]:
        fitted, proposals, seconds = planned(bench, measured, times)
        kept = {path for found in proposals.values() for path in thinned(found, settings.proposals * len(bench.bases))}
        for path in sorted(kept, key=str):
            measured[block_sets.base_of(path)].setdefault(path, "proposed" if last else "earlier")
    if settings.every:
        for path in block_sets.every(bench.bases[0]):
            measured[bench.bases[0]].setdefault(path, "every")
    for path in bench.alone:
        measured[path] = {path: "alone"}
    whole = bench.bases[0] if settings.every else None
    bench.time(
        path
        for base, parts in measured.items()
        for path, part in parts.items()
        if part != "seen" or path in kept or base == whole
    )
    if not bench.wrong:
        # A path that was drawn before it was proposed may be chosen, too.
        chosen = [
            path
            for parts in measured.values()
            for path, part in parts.items()
            if path in kept or part in ("base", "alone")
        ]
        sampled = samples(bench, chosen)
    if bench.wrong:
        yield from _refuted(bench)
        return
    promises = table.promises(sampled)
    for rung in settings.rungs:
        seen = seen_of(bench, rung, measured, sampled)
        found = []
        for base, parts in measured.items():
            for path, part in parts.items():
                model = times.get(base), fitted.get((rung, base))
                by = ", ".join(proposals[rung].get(path, ()))
                made = sampled.get(path), promises.get(path)
                of_path = {split: its[path] for split, its in seen.items() if path in its}
                found.append(_row(bench, rung, base, path, part, model, made, of_path, by, seconds[rung]))
        yield from _marked(found)


def planned(bench, measured, times):
    """What each rung's models, fitted to all paths in `measured`, propose: ``{(rung, base): Losses or Surrogate}``,
    ``{rung: what `proposed` gives}`` and the seconds of each rung's planning."""
    fitted, proposals, seconds = {}, {}, {}
    for rung in bench.settings.rungs:
        of_all = bench.see(rung, "fit", itertools.chain.from_iterable(measured[base] for base in bench.bases))
        known = {base: {path: of_all[path] for path in measured[base]} for base in bench.bases}
        forms = accuracy.fits(known, seed=bench.how.seed)
        seen = surrogate.closest(forms, known, seed=bench.how.seed)
        fitted |= {(rung, base): model for base, model in seen.items()}
        begin = perf_counter()
        proposals[rung] = proposed(bench.settings, times, forms, seen)
        seconds[rung] = perf_counter() - begin
    return fitted, proposals, seconds


def proposed(settings, times, forms, seen):
    """``{path: {what proposed it: None}}`` for all budgets: of the solver the best over the bases, and what a search
    finds from these, for budgets between these, too.

    times, forms, seen: of each base the `Latency`, the `Losses`, and what predicts accuracies best.
    """
    models = [(times[base], losses) for base, losses in forms.items()]
    budgets, found = budgets_for(models, settings.budgets), {}
    plan = program.plan(models, budgets, settings.solver)
    between = dict.fromkeys(budgets_for(models, FINER * (settings.budgets - 1) + 1))
    searched = search.improved(times, seen, [plan, between])
    for by, made in ((settings.solver, plan), (search.NAME, searched)):
        for budget in budgets:
            if (proposal := made[budget]) is not None:
                found.setdefault(proposal.path, {})[f"{by} {budget:.0f}"] = None
    for budget, proposal in searched.items():
        if proposal is not None:
            found.setdefault(proposal.path, {f"{FRONT} {budget:.0f}": None})
    return found


def thinned(found, most):
    """At most `most` of the paths that were proposed: those of the search first, then those of the solver, and the
    search's between budgets; of each evenly over budgets."""
    order = (search.NAME, "program", FRONT)
    levels = [[] for _ in order]
    for path, proposals in found.items():
        # A program's proposal bears the name of its solver.
        names = (each.split()[0] for each in proposals)
        levels[min(order.index(name if name in order else "program") for name in names)].append(path)
    kept = []
    for level in levels:
        room = max(0, most - len(kept))
        if len(level) > room:
            level = [level[at] for at in np.unique(np.linspace(0, len(level) - 1, room).round().astype(int))]
        kept += level
    return kept


def samples(bench, wanted):
    """``{path: microseconds}`` of calls as a stream makes them, whose maps are compared before and after."""
    slowest_first = sorted(wanted, key=lambda path: -bench.times_us[path])
    named = {str(path): path for path in slowest_first}
    made, expected = calls.Calls(bench.network, named, **bench.called), measure.Maps(bench.network, bench.images)

    def refute():
        refuted = expected.refuted(lambda text: made(text, bench.images), named)
        bench.wrong |= {named[text]: why for text, why in refuted.items()}

    refute()
    found = calls.samples(made, list(named), bench.settings.samples, [bench.images], seed=bench.how.seed)
    refute()
    return {path: found[text] for text, path in named.items()}


def _refuted(bench):
    """A row of each path that gave other maps where it was timed. Others have none: models are fitted to all of them,
    and what one says is known from the others."""
    stated = bench.settings
    for rung in stated.rungs:
        for path, why in bench.wrong.items():
            yield {
                "case": bench.case, "network": stated.network.network, "checkpoint": bench.digest, "data": stated.data,
                "base": str(block_sets.base_of(path)), "path": str(path), "rung": rung, "dtype": bench.how.dtype,
                "batch": stated.batch, "compiled": stated.compiled, "status": "failed", "reason": why, "time": now(),
                **machine(bench.device),
            }  # fmt: skip


def seen_of(bench, rung, measured, sampled):
    """``{split: {path: mean IoU}}`` of the splits that decide on a path, or state its result."""
    parts = {path: part for found in measured.values() for path, part in found.items()}
    wanted = {"fit": [path for path, part in parts.items() if part != "alone"]}
    wanted["choice"] = [path for path, part in parts.items() if part in CHOSEN or path in sampled]
    wanted["test"] = wanted["novel"] = list(sampled)
    return {split: bench.see(rung, split, found) for split, found in wanted.items() if split in bench.scenes.kept}


def _row(bench, rung, base, path, part, model, made, seen, by, seconds):
    (times, losses), (sampled, promise_us) = model, made
    stated = bench.settings
    planned = part != "alone"
    count = getattr(counted, networks.parse(stated.network.network)[0])
    found = {
        "case": bench.case, "network": stated.network.network, "checkpoint": bench.digest, "data": stated.data,
        "base": str(base), "part": part, "path": str(path), "rung": rung, "dtype": bench.how.dtype,
        "batch": stated.batch, "compiled": stated.compiled, "macs": counted.macs(count(bench.options, path)),
        "skipped": int(block_sets.skips(path).sum()), "p50_us": bench.times_us.get(path), "proposed": by, **seen,
    }  # fmt: skip
    if sampled is not None:
        found |= {"p99_us": float(np.percentile(sampled, 99)), "promise_us": promise_us}
    if planned:
        if found["p50_us"] is not None:
            found["saved_us"] = bench.times_us[base] - found["p50_us"]
        found |= {
            "predicted_us": times.predict(path), "lost": bench.seen[rung, "fit", base] - seen["fit"],
            "predicted": losses.predict(path), "held_out": losses.held.get(path),
            "loss_error": losses.error, "pairs": losses.form, "plan_seconds": seconds,
        }  # fmt: skip
    return found | {"time": now()} | machine(bench.device)


def _marked(found):
    """Rows with what dominates each of those that have a promise."""
    fields = table.Entry.__struct_fields__
    at = [number for number, row in enumerate(found) if "promise_us" in row]
    entries = [table.Entry(**{name: found[number][name] for name in fields if name in found[number]}) for number in at]
    for number, entry in zip(at, table.marked(entries), strict=True):
        found[number]["dominated"] = entry.dominated
    yield from found
