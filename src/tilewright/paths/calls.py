"""Paths of one network as calls: CUDA graphs on a GPU, functions on a CPU."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from tilewright.core import _internals, timing
from tilewright.core.errors import ConfigError, PatternError
from tilewright.networks import backends
from tilewright.networks.path import Path
from tilewright.paths import PARTS
from tilewright.paths.frames import Places

# Calls before a capture: kernels are compiled, chosen and warmed in them.
WARM_UP = 3


class _Line:
    """The stream of the latest call, and what graphs that share memory are captured with; None all on a CPU."""

    def __init__(self):
        self.stream: Any = None
        self.raw: int | None = None
        self.captured: Any = None
        self.pool: Any = None


class Calls:
    """Paths that share a network's weights, one place for images and one for maps.

    With `frames`, a call takes these instead of images and gives their class maps: a graph then holds the copies
    through pinned memory, too, and there is a second one of each path for frames that are on the GPU.

    On a GPU each path is a graph. All are captured on one stream with one memory pool, the first ones first, and never
    replayed at once: together they need hardly more memory than the largest, where that comes first. They are replayed
    on the stream of the caller, who would wait for an own one twice in each call. What the host does in a call is kept
    short, since it is what delays a call: a kernel of our own copies the images, and no context is entered.
    """

    def __init__(
        self,
        network: Any,
        paths: Mapping[str, Path],
        *,
        batch: int = 1,
        folded: Mapping[str, Any] | None = None,
        compiled: bool = False,
        frames: Places | None = None,
        beside: "Calls | None" = None,
        pixels: tuple[int, int] | None = None,
    ):
        """paths: by the text that they are called by. folded: ``{text: Folded}`` of paths with statistics of their own;
        other decoders are folded here, once. compiled: whether torch compiles blocks and decoders first, which paths
        share; the network itself stays as it is. beside: calls of another network, whose memory graphs share. pixels:
        height and width of images, None for those that the network was made for.

        Raises `ConfigError` for a network whose parts cannot be compiled.
        """
        if compiled and not hasattr(network, "compiled"):
            raise ConfigError(f"compiled: expected a network with parts to compile, found {type(network).__module__}")
        self.network, self.paths = network.compiled(dynamic=False) if compiled else network, dict(paths)
        weight = next(network.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.shape = (batch, 3, *(pixels or network.options.pixels))
        with torch.inference_mode():
            self.folded = {text: (folded or {}).get(text) or self._fold(path) for text, path in self.paths.items()}
            self.images = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.frames = frames
            self._graphs: dict = {}
            self._line: _Line = beside._line if beside else _Line()
            self.maps: Any = None
            self._current: Callable[[], int]
            with _internals.recompile_limit() if compiled else contextlib.nullcontext():
                if weight.is_cuda:
                    self._capture()
                elif compiled:
                    for text in self.paths:
                        self._called(text, self.images)

    def __call__(self, text: str, images: torch.Tensor) -> torch.Tensor:
        """Maps of images by a path, in memory that the next call overwrites on a GPU. Nothing waits on the host.

        With frames, a tensor uint8 [batch, H, W, 3]: their class maps, in memory of the caller's, on the device that
        the frames are on. The host waits for those of frames of its own.

        Raises `PatternError` for images of another shape.
        """
        if self.frames is not None:
            return self._labelled(self.frames, text, images)
        if images.shape != self.shape:
            raise PatternError(f"images: expected {_sizes(self.shape)} of the runner, found {_sizes(images.shape)}")
        if self.stream is None:
            return self._called(text, images.to(self.dtype))
        self._follow()
        if images.dtype is self.dtype and images.device == self.device and images.is_contiguous():
            self._copy(self.images, images)
        else:
            with torch.inference_mode():
                self.images.copy_(images, non_blocking=True)
        self._graphs[text].replay()
        return self.maps

    def _labelled(self, places, text, frames):
        if self.stream is None:
            with torch.inference_mode():
                places.frames.copy_(frames)
                maps = self._called(text, places.prepare(self.images))
            return places.label(maps).clone()
        self._follow()
        if frames.is_cuda:
            places.frames.copy_(frames)
            self._graphs[text, True].replay()
            return places.labels.clone()
        places.host_frames.copy_(frames)
        self._graphs[text, False].replay()
        self.stream.synchronize()
        return places.host_labels.clone()

    def run(self, text: str) -> torch.Tensor:
        """Maps of the images that were there last, see `show`: a replay on the current stream, or a call."""
        if self.stream is None:
            return self._called(text, self.images)
        self._follow()
        self._graphs[text].replay()
        return self.maps

    @property
    def stream(self) -> Any:
        """The stream of the latest call; None on a CPU."""
        return self._line.stream

    @torch.inference_mode()
    def parts(self, text: str, effort: Callable) -> dict[str, float]:
        """Microseconds of the parts of a call with frames, see `paths.PARTS`.

        effort: ``effort(call)`` gives the microseconds of a call.
        """
        places, maps = self.frames, self._called(text, self.images)
        assert places is not None
        calls: tuple[Callable, ...] = (
            places.copy_in,
            partial(places.prepare, self.images),
            partial(self._called, text, self.images),
            partial(places.label, maps),
            places.copy_out,
        )
        on_host = self.stream is None
        return {
            name: 0.0 if on_host and name.startswith("copy") else effort(call)
            for name, call in zip(PARTS, calls, strict=True)
        }

    @torch.inference_mode()
    def show(self, images: torch.Tensor) -> None:
        """Put images where `run` finds them."""
        self.images.copy_(images)

    def _follow(self):
        """Let the caller's stream wait for that of the call before, if they differ: images and maps have one place."""
        if (raw := self._current()) != self._line.raw:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._line.stream)
            self._line.stream, self._line.raw = current, raw

    def _fold(self, path):
        return self.network.fold(path) if hasattr(self.network, "fold") else None

    @torch.inference_mode()
    def _called(self, text, images):
        path, folded = self.paths[text], self.folded[text]
        return self.network(images, path) if folded is None else self.network(images, path, folded)

    def _capture(self):
        line = self._line
        line.captured = line.captured or torch.cuda.Stream(self.device)
        # The next call comes behind what is captured here.
        line.stream, line.raw = line.captured, None
        self._current = partial(_internals.raw_stream, self.device.index)
        self._copy = backends.maps(self.device.type).copier(self.device)  # type: ignore[union-attr]  # torch's modules do not tell the types of what they hold
        line.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(line.stream):
            for text in self.paths:
                for _ in range(WARM_UP):
                    maps = self._called(text, self.images)
                if self.frames is not None:
                    self.frames.prepare(self.images)
                    self.frames.label(maps)
                elif self.maps is None:
                    self.maps = torch.empty_like(maps)
                del maps
                for key, run in self._ways(text).items():
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=line.pool, stream=line.stream):
                        run()
                    line.pool = line.pool or graph.pool()
                    # The first replay uploads the graph.
                    graph.replay()
                    self._graphs[key] = graph
        torch.cuda.synchronize(self.device)

    def _ways(self, text):
        """``{key: call}`` of the graphs of a path."""
        places = self.frames
        if places is None:
            return {text: lambda: self.maps.copy_(self._called(text, self.images))}

        def on_device():
            places.label(self._called(text, places.prepare(self.images)))

        def from_host():
            places.copy_in()
            on_device()
            places.copy_out()

        return {(text, False): from_host, (text, True): on_device}


def samples(
    call: Callable,
    texts: Sequence[str],
    count: int,
    batches: Sequence,
    *,
    seed: int = 0,
    beside: Callable | None = None,
) -> dict[str, np.ndarray]:
    """``{text: float64 [count]}`` microseconds of ``call(text, images)`` until the maps are on the device, by the
    host's clock.

    Texts come in random order, as in a stream: caches hold what another path has left. Each call takes the next of the
    `batches` of images. beside: called before each of them, within its time, to start foreign work on the device.
    """
    found: dict[str, list[float]] = {text: [] for text in texts}
    order = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(texts)), count))
    for text in texts:
        call(text, batches[0])
    timing.wait(batches[0])
    for number, at in enumerate(order):
        begin = perf_counter_ns()
        if beside is not None:
            beside()
        call(texts[at], batches[number % len(batches)])
        timing.wait(batches[0])
        found[texts[at]].append((perf_counter_ns() - begin) / 1e3)
    return {text: np.array(times) for text, times in found.items()}


def _sizes(shape):
    return "x".join(map(str, shape))
