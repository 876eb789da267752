"""Frames with budgets, one after the other, as contenders meet them."""

import itertools
from time import perf_counter_ns

import msgspec
import numpy as np
import torch

from tilewright import devices, networks
from tilewright.core import timing, weight_files
from tilewright.core.errors import ArtifactError
from tilewright.networks.path import Path
from tilewright.paths import lateness, table
from tilewright.paths.calls import Calls
from tilewright.paths.runner import Picker, Runner
from tilewright_study import scenes
from tilewright_study.experiments.paths import measure
from tilewright_study.experiments.stream import check_static, of_static, pixels, traces
from tilewright_study.measure.rows import machine, now
from tilewright_study.planning import layers
from tilewright_study.training import evaluation

# Controllers of the contenders that see how late frames are.
CONTROLLERS = dict.fromkeys(("closed", "static", "joint"), lateness.Closed) | {"target": lateness.Priced}
# On a GPU the load is products of square matrices of this side, each of which takes some 30 us of a Hopper: larger ones
# are too coarse for frames of 300. How much of it a frame waits for is tried in so many frames, and again with what
# that says.
SIDE, FRAMES, TRIES = 2048, 20, 3
# Rounds of what a switch takes, and what is less than can be told, in microseconds.
ROUNDS, NOTHING_US = 5, 1.0
# Picks that are timed together.
PICKS = 10_000
# Frames of a trace whose maps are kept, and judged when it is over; with the last one.
KEPT = 8
# Scenes that statistics of a path are measured on.
SCENES = 64
# A timing of one network, or of the load, ends after so many seconds.
SECONDS = 0.1


class Contenders:
    """The frames, a runner of the case's paths, a picker of static networks, and what each of these sees of a frame."""

    def __init__(self, settings, how):
        stated = settings.network
        entries = [entry for entry in table.read(settings.table) if entry.rung == settings.rung]
        if not entries:
            raise ArtifactError(f"{settings.table}: expected paths on the rung {settings.rung}, found none")
        self.settings = settings
        # Promises of other weights, of another device or type would be promises about nothing.
        table.Table(entries).check(
            network=stated.network,
            checkpoint=weight_files.digest(stated.file),
            device=devices.describe(how.device)["name"],
            dtype=how.dtype,
            batch=1,
        )
        place = devices.facts(how.device).TORCH_DEVICE
        source = scenes.create("stream", frames=settings.scenes, shots=settings.shots)
        shown = measure.Scenes(source, {"test": settings.scenes}, pixels(stated), place)
        self.images = shown.kept["test"][0].to(getattr(torch, how.dtype))
        self.frames = self.images.split(1)
        self.network = self._network(stated, source)
        promised = [entry for entry in entries if entry.promise_us is not None]
        paths = {entry.path: self.network.path(entry.path) for entry in promised}
        own = {}
        if settings.rung == "statistics":
            fit = measure.Scenes(scenes.create("scenes"), {"fit": SCENES}, pixels(stated), place)
            own = {text: fit.own(self.network, "fit", path) for text, path in paths.items()}
        folded = {paths[text]: each for text, each in own.items()}
        # A table's mean IoU is of all scenes together. Here each frame counts, which asks for larger images: what that
        # table leaves out may be the best here.
        self.judged = measure.Scenes(scenes.create("scenes"), {"choice": settings.scenes}, pixels(stated), place)
        worth = self.judged.image_ious(self.network, "choice", paths.values(), folded)
        judged = [msgspec.structs.replace(x, choice=worth[paths[x.path]]) for x in promised]
        kept = table.Table(judged, least=settings.least)
        # What the maps of a frame have to be, by what may run; `wrong`: of those that gave others, why.
        self.paths, self.wrong, self.kept = {x.path: paths[x.path] for x in kept.rows}, {}, []
        self.expected = dict.fromkeys(self.paths, measure.Maps(self.network, self.frames[0], folded))
        self.runner = Runner(self.network, kept, margin=settings.margin, late="fastest", folded=own)
        seen = shown.confusions(self.network, "test", [paths[x.path] for x in kept.rows], folded, apart=True)
        self.sees = {x.path: seen[paths[x.path]] for x in kept.rows}
        self.static = self._static(shown, how) if of_static(settings) else None
        self.scores = {
            text: np.array([evaluation.mean_iou(confusion) for confusion in found]) for text, found in self.sees.items()
        }
        # Quiet ones come first: they make the promises anew, paths that are dominated then go, and the load follows.
        for picker in filter(None, (self.runner, self.static)):
            self.refute(picker)
        self.took = {False: self.runner.rehearse(self.images, settings.samples, seed=how.seed)}
        if self.static:
            self.static.rehearse(self.images, settings.samples, seed=how.seed)
        for picker in filter(None, (self.runner, self.static)):
            self.refute(picker)
        self.joint = self._joint() if "joint" in settings.contenders else None
        self.loaded = None
        if "contended" in settings.traces:
            self.loaded = self._foreign()
            self.took[True] = self.runner.times(self.images, settings.samples, seed=how.seed, beside=self.loaded)

    @property
    def table(self):
        """The paths that are picked from, with the promises of this process."""
        return self.runner.table

    def picker(self, name):
        """What a contender of this name picks with."""
        return {"static": self.static, "joint": self.joint}.get(name, self.runner)

    def contender(self, name, trace):
        """What `traces.run` asks for a frame's path."""
        rows, picker = self.table.rows, self.picker(name)
        fixed = {"full": rows[-1], "fixed": traces.fixed(self.table, trace.budgets_us.min())}.get(name)

        def asked(frame, room, price):
            entry = fixed or picker.pick(room, price=price)
            images = self.frames[frame % len(self.frames)]

            def call():
                maps = picker.run(entry, images)
                timing.wait(images)
                return maps

            return entry, call

        return asked

    def met(self, name, trace, seed):
        """What becomes of the frames of a trace with a contender of this name: `traces.Frames`."""
        if name == "oracle":
            shown = np.arange(len(trace)) % len(self.images)
            sees = {entry.path: self.scores[entry.path][shown] for entry in self.table.rows}
            found = traces.oracle(trace, self._times(trace, seed), sees)
            self.refute(self.runner)
            return found
        picker = self.picker(name)
        self.warm(picker)

        looked = {len(trace) - 1, *np.random.default_rng(seed).choice(len(trace), min(KEPT, len(trace)), replace=False)}

        def seen(frame, entry, maps):
            if frame in looked:
                images = self.frames[frame % len(self.frames)]
                # The next frame writes to the same memory, and begins once this is done.
                self.kept.append((entry.path, images, maps.clone()))
                timing.wait(images)

        how = {"controller": self.controller(name), "load": self.loaded, "seen": seen}
        found = traces.run(trace, self.contender(name, trace), **how)
        self.refute(picker, set(found.path))
        return found

    def refute(self, picker, texts=None):
        """Note in `wrong` what `picker` runs, of `texts` or all, with other maps than the network's own: of frames
        that were timed, and of the first one again."""
        frames, self.kept = self.kept, []
        for text, images, maps in frames:
            own = self.expected[text]
            self._note(text, measure.Maps(own.network, images, own.own).wrong(self.paths[text], maps))
        for entry in picker.table.rows:
            text = entry.path
            if texts is None or text in texts:
                run = {text: self.paths[text]}
                refuted = self.expected[text].refuted(lambda _, entry=entry: picker.run(entry, self.frames[0]), run)
                self._note(text, refuted.get(text, ""))

    def _note(self, text, why):
        if why:
            self.wrong.setdefault(text, why)

    @property
    def failed(self):
        """Columns of what was timed where one of the paths gave other maps: what is picked depends on all of them."""
        if not self.wrong:
            return {}
        return {"status": "failed", "reason": next(iter(self.wrong.values())), "time": now()}

    def controller(self, name):
        """A new controller for a contender of this name: `CONTROLLERS`, or an open one."""
        made = CONTROLLERS.get(name)
        controller = made(self.settings.late) if made else lateness.Controller()
        if isinstance(controller, lateness.Priced):
            controller.odds = self.picker(name).odds
        return controller

    def _times(self, trace, seed):
        """Microseconds that each path takes in each frame of a trace that others have met: drawn from calls before the
        first frame of all or after that trace's last, as likely. A host may be slower by then."""
        drawn, count = np.random.default_rng(seed), -(-self.settings.samples // 2)
        took = {entry.path: np.empty(len(trace)) for entry in self.table.rows}
        for loaded in np.unique(trace.loaded).tolist():
            beside = self.loaded if loaded else None
            after = self.runner.times(self.images, count, seed=seed + 1, beside=beside)
            frames = np.flatnonzero(trace.loaded == loaded)
            late = drawn.random(len(frames)) < 0.5
            for path, times in took.items():
                before = self.took[loaded][path]
                times[frames] = np.where(late, *(drawn.choice(each, len(frames)) for each in (after[path], before)))
        return took

    def miou(self, texts):
        """Mean IoU of the pixels of all frames together, each as the path that ran sees it."""
        return evaluation.mean_iou(sum(self.sees[text][frame % len(self.images)] for frame, text in enumerate(texts)))

    def frame_mious(self, texts):
        """float64 [frames]: the mean IoU of each frame, over the classes that occur in it."""
        return np.array([self.scores[text][frame % len(self.images)] for frame, text in enumerate(texts)])

    def warm(self, picker):
        """Run all that may be picked, so that the first frames find what later ones do."""
        for entry in picker.table.rows:
            for _ in range(3):
                picker.run(entry, self.images[:1])
        timing.wait(self.images)

    def _network(self, stated, source):
        """A network on the images' device, in their type, with the fastest kernels for its full path."""
        family, options = networks.parse(stated.network)
        made = networks.create(family, checkpoint=stated.file, num_classes=len(source.classes), **options)
        made = made.to(self.images).eval()
        if self.images.is_cuda:
            networks.choose_kernels(made, self.images[:1])
        return made

    def _static(self, shown, how):
        """A `Picker` of the static networks, whose promises are their times until they are rehearsed.

        What they see of the frames joins `sees`.
        """
        compiled, calls, entries = self.table.rows[0].compiled, {}, []
        for name, stated in self.settings.static.items():
            network = self._network(stated, shown.source)
            path = Path.full(network.options)
            limits, wrong = how.effort(SECONDS).limits, {}
            taken = measure.times(network, [path], images=self.frames[0], compiled=compiled, wrong=wrong, **limits)
            us = taken.get(path, 1.0)
            self.paths[name], self.expected[name] = path, measure.Maps(network, self.frames[0])
            self._note(name, wrong.get(path, ""))
            calls[name] = Calls(network, {name: path}, compiled=compiled, beside=self.runner.calls)
            self.sees[name] = shown.confusions(network, "test", [path], apart=True)[path]
            # A table is of one network, whose paths these are.
            entries.append(
                table.Entry(
                    network=", ".join(self.settings.static),
                    checkpoint="",
                    path=name,
                    rung="trained",
                    batch=1,
                    device=devices.describe(how.device)["name"],
                    dtype=how.dtype,
                    compiled=compiled,
                    macs=layers.macs(getattr(layers, networks.parse(stated.network)[0])(network.options, path)),
                    p50_us=us,
                    promise_us=us,
                    choice=self.judged.image_ious(network, "choice", [path])[path],
                )
            )
        kept = table.Table(entries, least=self.settings.least)
        return Picker(lambda name, images: calls[name](name, images), kept, margin=self.settings.margin, late="fastest")

    def _joint(self):
        """A `Picker` of the runner's paths and the static networks, with the promises of both."""
        found = table.Table([*self.runner.table.rows, *self.static.table.rows], joint=True)
        runs = {found.key(row): (one, row) for one in (self.runner, self.static) for row in one.table.rows}

        def run(key, images):
            one, row = runs[key]
            return one.calls(row.path, images)

        return Picker(run, found, margin=self.settings.margin, late="fastest")

    def _foreign(self):
        """A load under which the slowest path misses a budget of `traces.ROOM` promises by as much as the fastest one
        keeps it, in medians."""
        slowest = self.table.rows[-1]
        fast, mostly = (float(np.median(self.took[False][row.path])) for row in (self.table.rows[0], slowest))

        budgets_us = np.full(FRAMES, traces.ROOM * slowest.promise_us)
        trace = traces.Trace("contended", budgets_us, np.zeros(FRAMES), np.ones(FRAMES, dtype=bool))

        def added_us(load):
            frames = self.contender("full", trace)
            found = traces.run(trace, frames, controller=lateness.Controller(), load=load)
            return float(np.median(found.measured_us)) - mostly

        start = self._load if self.images.is_cuda else self._host_load
        return load_of(float(budgets_us[0]) - (fast + mostly) / 2, start, added_us)

    def _load(self, us):
        """Foreign work on another stream, which takes turns with the frames' kernels: one launch, since what the host
        takes to start it counts to the frame."""
        x = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
        beside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        one = timing.time_gpu(lambda: x @ x, min_reps=3, max_seconds=SECONDS, rse_target=0.05).p50_us
        torch.cuda.synchronize()
        with torch.cuda.stream(beside):
            # Libraries initialise a stream in the first call on it, which must not be captured.
            x @ x
            with torch.cuda.graph(graph, stream=beside):
                for _ in range(max(1, round(us / one))):
                    x @ x

        def load():
            with torch.cuda.stream(beside):
                graph.replay()

        # The graph reads it in each launch.
        load.matrix = x
        return load

    def _host_load(self, us):
        """Foreign work on the host, within the frame's time."""

        def load():
            end = perf_counter_ns() + us * 1e3
            while perf_counter_ns() < end:
                pass

        return load


def load_of(wanted_us, start, added_us):
    """The load, of those of ``start(us)`` that are tried, that comes closest to adding so many microseconds to a frame,
    which may wait for a part of it alone.

    added_us: what one adds, tried on the device.
    """
    us, tried = wanted_us, []
    for _ in range(TRIES):
        load = start(us)
        added = added_us(load)
        tried.append((abs(added - wanted_us), load))
        us *= wanted_us / max(added, wanted_us / 2)
    return min(tried, key=lambda each: each[0])[1]


def run(case, settings, how):
    """Yield the rows of `case`. Raises `TilewrightError`."""
    check_static("static", case, settings)
    yield from rows(case, settings, how)


def rows(case, settings, how):
    """Yield the rows of `case`: each trace with each contender, then what switching costs."""
    bench = Contenders(settings, how)
    first = bench.table.rows[0]
    known = {
        "case": case, "network": settings.network.network, "checkpoint": first.checkpoint, "rung": settings.rung,
        "dtype": how.dtype, "compiled": first.compiled, **machine(devices.describe(how.device)),
    }  # fmt: skip
    for name in settings.traces:
        trace = traces.trace(name, bench.table, settings.frames, seed=how.seed)
        for contender in settings.contenders:
            told = known | {"trace": name, "contender": contender, "part": "frames"}
            found = None if bench.wrong else bench.met(contender, trace, how.seed)
            if bench.wrong:
                yield told | bench.failed
                continue
            missed, mious = found.missed(trace), bench.frame_mious(found.path)
            for at in traces.told(trace, settings.shown).tolist():
                shown = {"frame": at, "budget_us": trace.budgets_us[at], "path": found.path[at]}
                shown |= {"promised_us": found.promised_us[at], "measured_us": found.measured_us[at]}
                shown |= {"miou": float(mious[at])}
                yield told | shown | {"slowdown": found.slowdown[at], "loaded": float(trace.loaded[at]), "time": now()}
            yield told | {
                "frames": len(trace), "missed": float(missed.mean()), "miou": bench.miou(found.path),
                "mean_miou": float(mious.mean()), "timely_miou": float((mious * ~missed).mean()),
                "p50_us": float(np.percentile(found.measured_us, 50)),
                "p99_us": float(np.percentile(found.measured_us, 99)), "paths": len(set(found.path)),
                "pick_us": pick_us(bench.picker(contender), bench.controller(contender).price), "time": now(),
            }  # fmt: skip
    switched = [] if bench.wrong else list(switching(bench, settings.switches))
    bench.refute(bench.runner)
    if bench.wrong:
        yield known | {"part": "switching"} | bench.failed
        return
    yield from (known | {"part": "switching", "time": now()} | row for row in switched)


def pick_us(picker, price):
    """Microseconds of the host to pick a path at a price, or by promises."""
    budgets = np.random.default_rng(0).uniform(1, 2 * picker.table.rows[-1].promise_us, PICKS).tolist()
    begin = perf_counter_ns()
    for budget in budgets:
        picker.pick(budget, price=price)
    return (perf_counter_ns() - begin) / 1e3 / PICKS


def switching(bench, turns):
    """What a call takes more where paths take turns than where one is repeated, by neighbours in the table."""
    calls, images, rows = bench.runner.calls, bench.images[:1], bench.table.rows

    def us(texts):
        for text in texts[:4]:
            calls(text, images)
        timing.wait(images)
        begin = perf_counter_ns()
        for text in texts:
            calls(text, images)
        timing.wait(images)
        return (perf_counter_ns() - begin) / 1e3 / len(texts)

    for one, other in itertools.pairwise(rows):
        added = []
        for _ in range(ROUNDS):
            repeated = (us([one.path] * turns) + us([other.path] * turns)) / 2
            added.append(us([one.path, other.path] * (turns // 2 + 1)) - repeated)
        yield {"path": f"{one.path} | {other.path}", **switch_us(added)}


def switch_us(added):
    """Columns of what a switch takes, of rounds: the median. Less than nothing is nothing where rounds differ by as
    much, and else no measurement: something else was slow while paths were repeated."""
    median, spread = float(np.median(added)), float(np.ptp(added))
    if not median >= -max(spread, NOTHING_US):
        return {"status": "failed", "reason": f"paths that took turns were {-median:,.1f} us faster than repeated ones"}
    return {"measured_us": max(0.0, median)}
