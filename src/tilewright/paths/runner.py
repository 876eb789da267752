"""A network that meets a budget in every call: the paths of a table, with the same weights."""

import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from tilewright import devices, networks
from tilewright.core import _internals, arguments, weight_files
from tilewright.core.errors import ArtifactError, ConfigError, PatternError
from tilewright.paths.calls import Calls, samples
from tilewright.paths.lateness import Odds
from tilewright.paths.table import LATE, SAMPLES, Entry, Table, checked_budget, promises

# What takes a table of frames.
FRAMES = "a FrameRunner takes it"


class Told(NamedTuple):
    """What ran. path: its text. promised_us: microseconds. accuracy: on scenes of ``test``, None where not measured.

    Of a `FrameRunner` also the network's name, whether the budget is below every promise, such that the fastest path
    ran all the same, and the microseconds until the class map was in the host's memory, None for one that stays on a
    GPU.
    """

    path: str
    promised_us: float
    accuracy: float | None
    network: str = ""
    short: bool = False
    took_us: float | None = None


class Picker:
    """Calls by the texts of a table, of which a budget picks one: paths of a network, or whole networks.

    One thread and one stream at a time may call.
    """

    def __init__(self, calls: Callable, table: Table, *, margin: float = 0.0, late: str = "error"):
        """calls: ``calls(text, images)`` gives maps. margin: share of a promise that a budget has to leave beside it.
        late: see `Table.select`.

        Raises `ConfigError` for a margin or `late` that is none.
        """
        if not isinstance(late, str) or late not in LATE:
            raise ConfigError(f"late: expected one of {', '.join(LATE)}, found {arguments.shown(late)}")
        if (found := arguments.real(margin)) is None or found < 0:
            raise ConfigError(f"margin: expected a share of at least 0, found {arguments.shown(margin)}")
        self.calls, self.table, self.margin, self.late = calls, table, margin, late
        # How late paths are, once they are rehearsed.
        self.odds: Odds | None = None
        self._turn = threading.Lock()
        self._owner: int | None = None

    def pick(self, budget_us: float, *, price: float | None = None) -> Entry:
        """The entry that a call with this budget in microseconds runs.

        price: None for the best one whose promise the budget holds. Else the mean IoU that a late call costs: the path
        that is expected to give the most then, see `Odds`. Raises `BudgetError` as `Table.select` does, where no path
        may come in time, and `ConfigError` for a price before a rehearsal, or of paths whose mean IoU is not known.
        """
        room = checked_budget(budget_us) / (1 + self.margin)
        if price is None:
            return self.table.select(room, late=self.late)
        if self.odds is None:
            raise ConfigError("price: call runner.rehearse(images) first, with a table that states mean IoU")
        return self.odds.pick(room, price) or self.table.select(room, late=self.late)

    def run(self, entry: Entry, images: torch.Tensor) -> torch.Tensor:
        """Maps of images [batch, 3, H, W] by an `entry` of the table.

        Raises `PatternError` for a second caller, and what the call raises.
        """
        if not self._turn.acquire(blocking=False):
            raise PatternError("runner: expected one caller at a time, found a second one; make a Runner for each")
        try:
            if (gpu := images.get_device()) >= 0:
                stream = _internals.raw_stream(gpu)
                if self._owner is None:
                    self._owner = stream
                elif self._owner != stream:
                    raise PatternError("runner: expected calls on one stream, found a second; make a Runner for each")
            return self.calls(self.table.key(entry), images)
        finally:
            self._turn.release()

    def times(
        self, images: torch.Tensor, count: int = SAMPLES, *, seed: int = 0, beside: Callable[[], None] | None = None
    ) -> dict[str, np.ndarray]:
        """``{key: float64 [count]}`` microseconds of calls of each row of the table, see `calls.samples`.

        images: [n, 3, H, W], of which each call takes the next `batch`.
        """
        entries = {self.table.key(entry): entry for entry in self.table.rows}
        batches = images.split(self.table.rows[0].batch)

        def call(text, part):
            self._timed(entries[text], part)

        return samples(call, list(entries), count, batches, seed=seed, beside=beside)

    def _timed(self, entry, images):
        """A call as promises are about."""
        self.run(entry, images)

    def rehearse(self, images: torch.Tensor, count: int = SAMPLES, *, seed: int = 0) -> dict[str, np.ndarray]:
        """Measure the paths of the table again, in this process.

        Promised latencies depend on the process and its host. Paths that others then dominate are not picked.

        Parameters
        ----------
        images : Tensor
            [batch, 3, H, W].
        count : int
            Calls of each path.
        seed : int
            Seed of the random order of the calls.

        Returns
        -------
        dict
            Latencies in microseconds by path, float [count].
        """
        found = self.times(images, count, seed=seed)
        self._promise(found)
        return found

    def _promise(self, found, **more):
        """Let the table promise what calls took, ``{key: microseconds}``. more: other fields of all rows."""
        promised, table = promises(found), self.table
        rows = [
            msgspec.structs.replace(
                entry,
                p50_us=float(np.median(found[table.key(entry)])),
                p99_us=float(np.percentile(found[table.key(entry)], 99)),
                promise_us=promised[table.key(entry)],
                **more,
            )
            for entry in table.rows
        ]
        self.table = Table(rows, joint=table.joint)
        if all(entry.choice is not None for entry in self.table.rows):
            self.odds = Odds(self.table.rows, found, self.table.key)


class Runner(Picker):
    """A network and its paths, for images of one shape.

    ``runner(images, budget_us=900)`` returns ``(maps, told)``: maps in the network's type, in memory that the next
    call overwrites on a GPU, and a `Told`. A call picks a path and replays its CUDA graph, see `calls.Calls`: the host
    does not wait. One thread and one stream at a time may call.

    Parameters
    ----------
    network : torch.nn.Module
        On its device, in its type, for inference. Decoders are folded here, so that later changes of weights ask for a
        new runner. It runs as tables are measured: on a GPU with the fastest kernels for these paths, compiled by
        torch where the table says so.
    table : Table
        Of the same network, size, weights, device and type.
    batch : int
        Images of a call.
    margin : float
        Share of a promise that is added to it, see `Picker`.
    late : str
        What happens where no path fits a budget: ``error``, or ``fastest`` runs the fastest one.
    folded : dict, optional
        ``{text of a path: Folded}`` for paths with statistics of their own.

    Raises
    ------
    ConfigError
        For a table of another network or size, other weights, another device, type or batch, and for one of the rung
        ``statistics`` without `folded` of each path.
    """

    def __init__(
        self,
        network: torch.nn.Module,
        table: Table,
        *,
        batch: int = 1,
        margin: float = 0.0,
        late: str = "error",
        folded: Mapping[str, Any] | None = None,
    ):
        """Capture the paths of `table`."""
        if not isinstance(table, Table):
            raise ConfigError(f"table: expected a path table, found {arguments.shown(table)}")
        if not isinstance(network, torch.nn.Module) or not hasattr(network, "path"):
            raise ConfigError(f"network: expected one that takes paths, found {arguments.shown(network)}")
        batch = arguments.whole("batch", batch)
        if table.rows[0].frame or table.joint:
            found = "frames" if table.rows[0].frame else "several networks"
            raise ConfigError(f"path table: expected one of images and of one network, found one of {found}; {FRAMES}")
        table.check(batch=batch, **facts(network))
        if bare := [x.path for x in table.rows if x.rung != "trained" and x.path not in (folded or {})]:
            raise ConfigError(
                f"folded: expected batch-norm statistics of each path of the table, found none of {bare[0]}"
            )
        # The slowest first: its memory serves the others.
        paths = {entry.path: network.path(entry.path) for entry in reversed(table.rows)}  # type: ignore[operator]  # torch's modules do not tell the types of what they hold
        calls = made(network, paths, batch=batch, folded=folded, compiled=table.rows[0].compiled)
        super().__init__(calls, table, margin=margin, late=late)
        self.network = network

    def __call__(
        self, images: torch.Tensor, budget_us: float, *, price: float | None = None
    ) -> tuple[torch.Tensor, Told]:
        """Label images by the best path that fits a time budget.

        Parameters
        ----------
        images : Tensor
            [batch, 3, H, W], of the runner's shape.
        budget_us : float
            Time budget in microseconds.
        price : float, optional
            Mean IoU that a late call costs; it needs a `rehearse`. The call then runs the path of the highest expected
            mean IoU. None takes the best path whose promised latency fits the budget.

        Returns
        -------
        (Tensor, Told)
            Maps in the network's type, which the next call overwrites on a GPU, and the path with its promised latency
            and accuracy.

        Raises
        ------
        BudgetError
            For a budget that is no positive number, and for one that no path fits with ``late="error"``.
        ConfigError
            For a price without a rehearsal.
        PatternError
            For images of another shape, and for a second caller at a time.
        """
        entry = self.pick(budget_us, price=price)
        return self.run(entry, images), Told(entry.path, entry.promise_us, entry.test)  # type: ignore[arg-type]  # rows of a table have promises


def whole(network: Any, *, batch: int = 1, joint: bool = False) -> Table:
    """A table of the network's full path alone, whose time is not known before a rehearsal."""
    known = facts(network) | {"path": str(network.path()), "rung": "trained", "batch": batch, "macs": 0}
    return Table([Entry(p50_us=1.0, promise_us=1.0, **known)], joint=joint)


def made(network: Any, paths: Mapping[str, Any], *, batch: int, **options: Any) -> Calls:
    """`Calls` of a network, on a GPU with the fastest kernels for these paths. options: of `Calls`."""
    weight = next(network.parameters())
    if weight.is_cuda and hasattr(network, "operators"):
        pixels = options.get("pixels") or network.options.pixels
        images = torch.randn(batch, 3, *pixels, dtype=weight.dtype, device=weight.device)
        networks.choose_kernels(network, images, paths.values())
    return Calls(network, paths, batch=batch, **options)


def facts(network: Any) -> dict[str, Any]:
    """What the rows of a table say of `network`, its weights and where it is, see `Entry`."""
    weight = next(network.parameters())
    try:
        # ASSUME: the weights are still those of their file.
        weights = weight_files.digest(network.weights) if network.weights else ""
    except (OSError, ArtifactError) as error:
        raise ConfigError(f"path table: expected the file of the network's weights, found none: {error}") from None
    return {
        "network": import_module(type(network).__module__).name(network.options),
        "checkpoint": weights,
        "device": devices.describe(weight.device.type)["name"],
        "dtype": str(weight.dtype).removeprefix("torch."),
    }
