"""What a training goes on from, and the weights that it leaves: shared by all recipes."""

import csv
import io
import json
import signal
import threading
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tilewright.core import arguments, artifacts
from tilewright.core.errors import ArtifactError, ConfigError, TrainingError

# Of recipes.
Positive = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Number = Annotated[float, msgspec.Meta(ge=0)]

VERSION = "1"
# Bytes of a file, of weights that are written in several.
PART_BYTES = 15 << 20
# What weights may be written as.
ENDINGS = (".safetensors", ".index.json")
# Examples that data are known by, and by how much their means may differ: another host may round otherwise.
SAMPLES, SAME = 4, 1e-3
# Steps after which those that were left out are counted, and how many of them a training may have.
COUNTED, MOST_LEFT_OUT = 200, 40
# Steps at the beginning and at the end that losses are compared over, and the growth that no training recovers from.
COMPARED, GROWN = 20, 10


class State:
    """All that a training goes on from: weights, their averages, the optimiser's moments, numbers of each step.

    kind: of its file, such as ``video training``. recipe: a struct with ``weight_decay`` of matrices, ``norm`` of the
    gradient at most, and ``average``, the weight of what was before a step in the averages, towards which it grows.
    path: of the weights to be written; the state lies beside it, ``<stem>.state.safetensors``. width: numbers of a step
    that are kept. data: facts about what it learns from, as `facts_of` gives them, which `resume` compares.

    Raises `ConfigError` for a path that does not end as weights do.
    """

    def __init__(self, kind: str, network, recipe, path: Path, *, betas=(0.9, 0.999), width: int = 1, data=None):
        if not path.name.endswith(ENDINGS):
            raise ConfigError(f"{path}: expected weights to write, as {' or in parts '.join(ENDINGS)}")
        self.kind, self.network, self.recipe, self.width, self.data = kind, network, recipe, width, data or {}
        self.path = path.with_name(f"{_stem(path)}.state.safetensors")
        self.names, self.weights = zip(*network.named_parameters(), strict=True)
        self.device = self.weights[0].device
        matrices = [x for x in self.weights if x.ndim > 1 and x.shape[0] > 1]
        others = [x for x in self.weights if not any(x is y for y in matrices)]
        groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, betas=betas, fused=self.weights[0].is_cuda)
        # Nothing is scaled: it leaves out steps whose gradients are not finite, and no host waits for that of a GPU.
        self.guard = torch.amp.GradScaler(self.device.type, init_scale=1.0)
        # It exists on the device once it has scaled something.
        self.guard.scale(torch.ones((), device=self.device))
        self.left_out, self._known = torch.zeros((), device=self.device), 0
        self.averages = [x.detach().clone() for x in self.weights]
        # seconds: of the training before it was interrupted. told: the numbers of each step, float32 [width].
        self.step, self.seconds, self.told = 0, 0.0, []
        # A signal that asks to end after this step.
        self._asked = None

    def take(self, rate: float, *numbers: Tensor | float) -> None:
        """One step down the gradients that the weights hold, at a `rate` of learning; `numbers` are kept.

        Weights stay as they are where a gradient is not finite: the step counts, and `settle` tells of it. Where that
        happens often something is wrong that time does not cure, and this raises `TrainingError`.
        """
        self.guard.unscale_(self.optimiser)
        norm = torch.nn.utils.clip_grad_norm_(self.weights, self.recipe.norm)
        self.left_out += ~norm.isfinite()
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.guard.step(self.optimiser)
        self.guard.update(1.0)
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        weight = min(self.recipe.average, self.step / (self.step + 10))
        with torch.no_grad():
            get_ema_multi_avg_fn(weight)(self.averages, [x.detach() for x in self.weights], self.step)
        # Read later: the host would wait for each step.
        like = torch.zeros((), device=self.device)
        told = [x.detach().float() if isinstance(x, Tensor) else torch.full_like(like, x) for x in numbers]
        self.told.append(torch.stack(told))
        if self.step % COUNTED == 0:
            self._count()
        if self._asked is not None:
            raise KeyboardInterrupt

    def _count(self):
        """Raise `TrainingError` where many of the last steps were left out. The host waits for them."""
        found = int(self.left_out)
        recent, self._known = found - self._known, found
        if recent > MOST_LEFT_OUT:
            raise TrainingError(
                f"training: expected finite gradients, found {recent} of the {COUNTED} steps to step {self.step} "
                "without; a smaller rate of learning, other sizes of images or float32 may help"
            )

    def columns(self) -> list[list[float]]:
        """The numbers of all steps, a list for each that a step has."""
        return torch.stack(self.told).T.tolist() if self.told else [[] for _ in range(self.width)]

    @contextmanager
    def kept(self):
        """Write the state where what runs inside ends early; what ended it goes on.

        A first SIGINT or SIGTERM ends it after the step, as Ctrl-C does, a second one at once.
        """
        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.getsignal(number) for number in numbers}

        def ask(number, _):
            self._asked = number
            signal.signal(number, before[number])

        for number in numbers:
            signal.signal(number, ask)
        begin = self.step
        try:
            yield
        except BaseException as error:
            # Who goes on from gradients that are not finite meets them again.
            if self.step > begin and not isinstance(error, TrainingError):
                self.write_or_warn()
            raise
        finally:
            self._asked = None
            for number in numbers:
                signal.signal(number, before[number])

    def write_or_warn(self) -> bool:
        """As `write`; where the file cannot be written a warning says so, and the training can go on."""
        try:
            self.write()
        except ArtifactError as error:
            warnings.warn(str(error), stacklevel=2)
            return False
        return True

    def write(self) -> None:
        """Write all of it, whole, to its file."""
        tensors = {f"weights.{name}": x for name, x in zip(self.names, self.weights, strict=True)}
        tensors |= {f"average.{name}": x for name, x in zip(self.names, self.averages, strict=True)}
        for name, x in zip(self.names, self.weights, strict=True):
            tensors |= {f"{moment}.{name}": value for moment, value in self.optimiser.state[x].items()}
        if self.told:
            tensors["losses"] = torch.stack(self.told)
        header = {"step": str(self.step), "seconds": str(self.seconds), "recipe": text(self.recipe)}
        header["data"] = json.dumps(self.data)
        _save({name: x.detach() for name, x in tensors.items()}, self.path, {"kind": self.kind, **header})

    def resume(self) -> None:
        """Go on from the file, where there is one.

        Raises `ArtifactError` for one of another recipe, other data or another network; then nothing has been taken.
        """
        if not self.path.exists():
            return
        header, tensors = _read(self.path, self.kind)
        if header.get("recipe") != text(self.recipe):
            raise ArtifactError(
                f"{self.path}: expected a training by the recipe {text(self.recipe)}, found {header.get('recipe')}; "
                "remove the file to start over"
            )
        self._check(json.loads(header.get("data", "{}")), tensors)
        with torch.no_grad():
            for kind, kept in (("weights", self.weights), ("average", self.averages)):
                for name, x in zip(self.names, kept, strict=True):
                    x.copy_(tensors.pop(f"{kind}.{name}"))
        self.step, self.seconds = int(header["step"]), float(header.get("seconds", 0.0))
        self.told = list(tensors.pop("losses", torch.empty(0, self.width)).to(self.device))
        owners = dict(zip(self.names, self.weights, strict=True))
        for key, value in tensors.items():
            moment, _, name = key.partition(".")
            # Where AdamW keeps it: the count of its steps on the host, unless it is fused.
            place = self.device if value.ndim or self.weights[0].is_cuda else "cpu"
            self.optimiser.state[owners[name]][moment] = value.to(place)

    def _check(self, data, tensors):
        """Raise `ArtifactError` unless a file is of these data and this network."""
        kinds = ("weights", "average")
        shapes = {name: list(x.shape) for name, x in tensors.items() if name.startswith(kinds)}
        wanted = {
            f"{kind}.{name}": list(x.shape) for kind in kinds for name, x in zip(self.names, self.weights, strict=True)
        }
        for what, expected, found in (("this network", wanted, shapes), ("these data", self.data, data)):
            for name in {**expected, **found}:
                if not _same(one := expected.get(name), other := found.get(name)):
                    raise ArtifactError(
                        f"{self.path}: expected a training of {what}, found another: {name} {arguments.shown(other)} "
                        f"for {arguments.shown(one)}; remove the file to start over"
                    )

    def settle(self) -> None:
        """Leave the averages in the network, and warn of steps that were left out since the training went on.

        Raises `TrainingError` where the loss, the first number of each step, has grown `GROWN` times.
        """
        losses = torch.tensor(self.columns()[0])
        first, last = losses[:COMPARED].nanmedian(), losses[-COMPARED:].nanmedian()
        if last > GROWN * first > 0:
            raise TrainingError(
                f"training: expected a loss that falls, found {first:.3g} at its beginning and {last:.3g} at step "
                f"{self.step}; no weights were written; a smaller rate of learning may help"
            )
        if count := int(self.left_out):
            warnings.warn(f"{count} of {self.step} steps were left out: their gradients were not finite", stacklevel=2)
        with torch.no_grad():
            for x, average in zip(self.weights, self.averages, strict=True):
                x.copy_(average)

    def keep(self, path: Path, saved: Callable[[Tensor], torch.dtype | None], **header: str) -> None:
        """Write the network's weights to `path`, in the type that `saved` says of each; the header says of which step.

        `path` is a ``.safetensors`` file, or an ``.index.json`` beside several of at most `PART_BYTES`.
        """
        state = {name: x.detach().to(saved(x)) for name, x in self.network.state_dict().items()}
        header = {"kind": self.kind, "step": str(self.step), "recipe": text(self.recipe), **header}
        if path.suffix != ".json":
            _save(state, path, header)
            return
        names, parts = {}, _parts(state)
        for at, part in enumerate(parts, 1):
            name = f"{_stem(path)}-{at:05}-of-{len(parts):05}.safetensors"
            _save(part, path.with_name(name), header)
            names |= dict.fromkeys(part, name)
        artifacts.write_text(path, json.dumps({"metadata": header, "weight_map": names}, indent=1) + "\n")


def header_of(path, kind):
    """What weights of a `kind` of training say of it, a file or an index; None for those of others.

    Raises `ArtifactError`.
    """
    path = Path(path)
    try:
        if path.suffix == ".json":
            header = json.loads(path.read_text(encoding="utf-8")).get("metadata", {})
            return header if "recipe" in header and header.get("kind", kind) == kind else None
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
        return header if header.get("kind") == kind else None
    except Exception as error:
        raise ArtifactError(f"{path}: expected weights, found a damaged file: {error}") from error


def facts_of(source, size) -> dict:
    """What a training's source is known by: its classes, how many images it has, and means of some of `size`."""
    count = source.count("train")
    images, labels = source.read("train", [at * (count - 1) // (SAMPLES - 1) for at in range(SAMPLES)], size)
    return {"classes": list(source.classes), "images": count, "means": means(images) + means(labels)}


def means(examples: Tensor) -> list[float]:
    """The mean of each example of a batch."""
    return examples.double().reshape(len(examples), -1).mean(1).tolist()


def _same(one, other):
    """Whether two facts are equal, means but for rounding."""
    if one == other or not (isinstance(one, list) and isinstance(other, list) and len(one) == len(other)):
        return one == other
    return all(isinstance(x, float) and abs(x - y) <= SAME for x, y in zip(one, other, strict=True))


def sound(recipe):
    """`recipe`, whose values a copy by ``structs.replace`` does not check. Raises `ConfigError`."""
    try:
        return msgspec.convert(msgspec.to_builtins(recipe), type(recipe))
    except msgspec.ValidationError as error:
        raise ConfigError(f"recipe: {error}") from None


def read_recipe(path, kind, named=()):
    """The recipe, of a type, of one of the names in the dict `named`, of a JSON file, or of the JSON itself.

    Raises `ArtifactError` where there is no such file and `ConfigError` for its content.
    """
    if str(path) in named:
        return named[str(path)]
    try:
        content = path.encode() if str(path).startswith("{") else Path(path).read_bytes()
        return msgspec.json.decode(content, type=kind)
    except FileNotFoundError:
        known = f": {', '.join(named)}, or JSON" if named else ""
        raise ArtifactError(f"{path}: no such file; expected a recipe{known}") from None
    except (msgspec.DecodeError, RecursionError, OSError) as error:
        raise ConfigError(f"{str(path)[:80]}: expected a recipe: {error}") from error


def write_rows(path, names, rows):
    """Write rows under `names` as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    artifacts.write_text(path, text.getvalue())


def text(recipe):
    """A recipe as JSON."""
    return msgspec.json.encode(recipe).decode()


def _stem(path):
    """The name of a file of weights without its ending."""
    return path.name.removesuffix(".index.json").removesuffix(".safetensors")


def _parts(state):
    """`state` in dicts of at most `PART_BYTES`, each of one tensor at least."""
    parts, held = [], PART_BYTES
    for name, x in state.items():
        if held + x.nbytes > PART_BYTES:
            parts.append({})
            held = 0
        parts[-1][name] = x
        held += x.nbytes
    return parts


def _save(tensors, path, header):
    with artifacts.atomic(path) as temporary:
        held = {name: x.contiguous().cpu() for name, x in tensors.items()}
        try:
            save_file(held, temporary, {"version": VERSION, **header})
        except SafetensorError as error:
            raise OSError(str(error)) from error


def _read(path, kind):
    """``(header, tensors)`` of a file that `_save` wrote. Raises `ArtifactError`."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            found = header.get("kind"), header.get("version")
            if found != (kind, VERSION):
                raise ArtifactError(f"{path}: expected {kind} version {VERSION}, found {found[0]} version {found[1]}")
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except ArtifactError:
        raise
    except Exception as error:
        # safetensors' own error is of a class that it does not export.
        raise ArtifactError(f"{path}: expected a {kind} file, found a damaged one: {error}") from error
