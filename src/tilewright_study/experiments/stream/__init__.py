"""Streams of frames with budgets, met by paths of a table, by one path, and by networks of their own (stage T5)."""

from typing import Literal

from tilewright import devices, networks, paths
from tilewright.core import sides
from tilewright.core.errors import ConfigError
from tilewright_study import sections
from tilewright_study.experiments import paths as of_paths
from tilewright_study.measure import rows
from tilewright_study.measure.rows import Count, Number
from tilewright_study.scenes import backends

TABLES = ("stream",)
FIGURES = ("stream",)

TRACES = ("uniform", "steps", "contended")
# Whose frames the figure shows.
DRAWN = "closed"
CONTENDERS = ("closed", "target", "open", "full", "fixed", "static", "joint", "oracle")


class Values(sections.Section, frozen=True):
    """What all networks are run with.

    traces: budgets over time
    frames: of a trace
    shown: of these, the first ones at each rate, which rows tell one by one
    contenders: closed and open, our paths by their promises, with a controller and without; target, with one that
    weighs what a path sees against how likely it is late, so that a share `late` of the frames is; full, always
    everything; fixed, always the path that the least budget allows; static, the networks of `static`, each with its
    full path only, with a controller as closed has it; joint, all of these paths and networks in one table, as closed;
    oracle, which knows how long each path would take, as calls
    before the first frame and after the last one took, chooses by the table, and is not run
    rung: of the paths, trained or statistics
    margin: share of a promise that a budget has to leave beside it
    late: share of late frames that controllers aim at
    least: share of the best mean IoU that a path needs to be among those that are picked
    samples: calls of each path before the first frame, from which its promise is made anew
    scenes: frames of a camera, shown again and again, and scenes of `choice` that paths and static networks are
    compared by: the mean over these, as a mean over frames is what a stream is judged by
    shots: of the camera, each over a scene of its own
    switches: how often two paths take turns, to see what switching costs
    """

    traces: tuple[str, ...]
    frames: int
    shown: int
    contenders: tuple[str, ...]
    rung: str
    margin: float
    late: float
    least: float
    samples: int
    scenes: int
    shots: int
    switches: int


class Section(Values, frozen=True):
    """Streams of frames, for networks of paths.

    networks: names of paths.networks, whose images come one by one
    static: names of paths.networks that the contenders static and joint switch between, of one image size with all of
    `networks`
    """

    networks: tuple[str, ...]
    static: tuple[str, ...]

    def check(self, config):
        """Raise `ConfigError` for unknown names and for numbers out of range."""
        sections.known("stream.traces", "trace", self.traces, TRACES)
        sections.known("stream.contenders", "contender", self.contenders, CONTENDERS)
        sections.known("stream.static", "network", self.static, of_paths.cases(config))
        sections.distinct("stream.static", self.static)
        if cases(config) and "stream" in config.experiments:
            sections.known("stream.networks", "network", self.networks, of_paths.cases(config))
            sections.distinct("stream.networks", self.networks)
            self._check_cases(config)
        sections.known("stream.rung", "rung", [self.rung], of_paths.RUNGS)
        for name in ("frames", "samples", "scenes", "shots", "switches"):
            sections.at_least(f"stream.{name}", 1, [getattr(self, name)])
        if self.shots > self.scenes:
            raise ConfigError(f"stream.shots: expected at most {self.scenes} of stream.scenes, found {self.shots}")
        sections.at_least("stream.shown", 0, [self.shown])
        sections.at_least("stream.margin", 0, [self.margin])
        sections.at_least("stream.least", 0, [self.least])
        sections.above_zero("stream.late", self.late)

    def _check_cases(self, config):
        for case in self.networks:
            if (batch := of_paths.settings(config, case).batch) != 1:
                raise ConfigError(f"stream.networks: expected paths for one image a call, found {batch} of {case}")
            check_static("stream.static", case, settings(config, case))


class Settings(Values, frozen=True):
    """What one network is run with. table: the file of its paths. static: networks by name."""

    network: of_paths.Network
    table: str
    static: dict[str, of_paths.Network]


class Row(rows.Typed, frozen=True, kw_only=True):
    """A trace with one contender, in all (``frame`` is blank) or one frame of it.

    part: ``frames``, or ``switching``, where two paths took turns and ``measured_us`` is what one switch takes beyond
    a repeated replay. compiled: as in the table of paths. frames: in all; missed: share of frames that took longer than
    their budget; miou: of the pixels of all frames together; mean_miou: the mean of the frames' own; timely_miou: where
    a late frame counts 0; paths: different ones that ran; pick_us: of the host, to pick a path. Of a frame: its miou,
    budget_us, path, of the contender static the name of a network, promised_us, measured_us, slowdown: what the
    controller divided the budget by, loaded: whether a foreign load was on the device.

    The contender oracle knows what each path takes and sees in each frame: no other one sees more in time, but by what
    times were drawn. The load is made such that the slowest path misses its budget under it (`run.Contenders`), and
    the contender open, which does not see it, runs that one: its share of missed frames is that of loaded ones, by
    construction, and says nothing of it.
    """

    kind: Literal["stream"] = "stream"
    version: Literal[1] = 1
    case: str = ""
    network: str = ""
    checkpoint: str = ""
    rung: str = ""
    trace: str = ""
    contender: str = ""
    part: str = ""
    compiled: bool = False
    frame: Count = None
    frames: Count = None
    missed: Number = None
    miou: Number = None
    mean_miou: Number = None
    timely_miou: Number = None
    p50_us: Number = None
    p99_us: Number = None
    paths: Count = None
    pick_us: Number = None
    budget_us: Number = None
    path: str = ""
    promised_us: Number = None
    measured_us: Number = None
    slowdown: Number = None
    loaded: Number = None


NAMED = "{case} {trace} {contender} {frame}"


def cases(config):
    """The networks that are listed, where their paths are measured, too."""
    return list(config.stream.networks) if "paths" in config.experiments else []


def settings(config, case):
    """`Settings` of one network."""
    section = config.stream
    static = {name: of_paths.settings(config, name).network for name in section.static}
    network, table = of_paths.settings(config, case).network, f"results/logs/paths/{case}.csv"
    return sections.taken(Settings, section, static=static, network=network, table=table)


def check_static(place, case, settings):
    """Raise `ConfigError` where such a contender has no network, or one of another image size than the case's."""
    if not (asking := of_static(settings)):
        return
    if not settings.static:
        raise ConfigError(f"{place}: expected networks for the contender {asking[0]}, found none")
    expected = pixels(settings.network)
    for name, stated in settings.static.items():
        if (found := pixels(stated)) != expected:
            wanted, other = ("x".join(map(str, size)) for size in (expected, found))
            raise ConfigError(f"{place}: expected images of {wanted}, as {case} has them, found {other} of {name}")


def of_static(settings):
    """The contenders that switch between static networks."""
    return [name for name in ("static", "joint") if name in settings.contenders]


def pixels(stated):
    """Height and width of the images of a `paths.Network`."""
    _, options = networks.parse(stated.network)
    return sides.pair(options["image_size"])


def planned(case, settings):
    """What decides the rows of a case, as `modules` asks for it."""
    return [{"network": stated.network} for stated in (settings.network, *settings.static.values())]


def modules(row, device):
    """Modules that a row depends on, see `experiments`."""
    own = ["tilewright_study.scenes.sources.stream"]
    own += [*devices.modules(device, "networks.maps"), *backends.modules(device)]
    own += [f"{paths.__name__}.{name}" for name in ("lateness", "runner", "calls", "table")]
    if row.get("network"):
        own.append(f"tilewright.networks.{networks.parse(row['network'])[0]}")
    return own


def sources(settings):
    """The weights of all networks, and the table of paths."""
    weights = [stated.checkpoint for stated in (settings.network, *settings.static.values())]
    return [*dict.fromkeys(weights), settings.table]


def size(case, settings):
    """Numbers that a case holds: scenes, and the network's activations."""
    height, width = pixels(settings.network)
    return 4 * height * width * (settings.scenes + 64)


def recorded(rows):
    """All but frames: of these, those that the figure shows, of the last network, and one of each static network."""
    last, seen, kept = rows[-1]["case"], set(), []
    for row in rows:
        name = (row["case"], row["contender"], row["path"])
        drawn = row["contender"] == DRAWN and row["case"] == last
        first = row["contender"] == "static" and name not in seen
        seen.add(name)
        if not row["frame"] or drawn or first:
            kept.append(row)
    return kept


def remark(row):
    """What the log says of a row that passed."""
    if row["part"] == "switching":
        return f"switching {row['measured_us']:+,.1f} us"
    return f"{row['measured_us']:,.0f} us" if row.get("missed") is None else f"{row['missed']:.1%} missed"
